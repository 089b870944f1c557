//go:build linux

package gateway

import (
	"context"
	"strconv"

	"github.com/warren-sandbox/warren/internal/audit"
)

// Record writes an entry as a record of evidence.
func Record(log *audit.Log) func(Entry) error {
	return func(e Entry) error {
		fields := map[string]string{}
		text := func(name, v string) {
			if v != "" {
				fields[name] = v
			}
		}
		number := func(name string, n int64) {
			if n != 0 {
				fields[name] = strconv.FormatInt(n, 10)
			}
		}
		text("of", e.Of)
		text("host", string(e.Host))
		text("addr", e.Addr)
		number("port", int64(e.Port))
		text("protocol", string(e.Protocol))
		text("policy", e.Policy)
		text("rule", e.Rule)
		text("method", e.Method)
		text("path", e.Path)
		text("secret", e.Secret)
		number("status", int64(e.Status))
		number("up", e.Up)
		number("down", e.Down)
		number("ms", e.Duration.Milliseconds())
		number("more", e.More)
		text("peer", e.Peer)
		if e.Inward {
			fields["inward"] = "true"
		}
		if e.Inspected {
			fields["inspected"] = "true"
		}
		_, err := log.Append(context.Background(), audit.Record{Time: e.Time, Actor: "gateway", Action: e.Action, Sandbox: e.Sandbox, Message: e.Reason, Fields: fields})
		return err
	}
}
