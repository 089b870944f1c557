package server

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/audit"
)

// Recorder keeps evidence of calls; an [audit.Log] is one.
type Recorder interface {
	Append(ctx context.Context, r audit.Record) (audit.Record, error)
}

// strangers is how many calls of callers who have shown no good token are recorded in a second: a flood of them shall not push
// out what others did.
const strangers = 5

// calls writes down who called what, and what came of it.
type calls struct {
	to Recorder

	mu     sync.Mutex
	second time.Time
	seen   int
	more   int64
}

// result is what came of a call.
func (r *request) result(status int, cut bool) string {
	switch {
	case r.fault != "":
		return r.fault
	case cut:
		return "cut"
	case status >= http.StatusBadRequest:
		return "refused"
	}
	return "ok"
}

// record writes down a call that has ended. What is asked all the time and by machines alone is left out.
func (c *calls) record(req *request, r *http.Request, status int, took time.Duration, cut bool) error {
	if c.to == nil || req.route == "healthz" || req.route == "metrics" {
		return nil
	}
	var more int64
	if req.user == "" {
		var enough bool
		if more, enough = c.stranger(time.Now()); enough {
			return nil
		}
	}
	fields := map[string]string{
		"call": printable(req.route, 128), "result": req.result(status, cut), "status": strconv.Itoa(status), "request": req.id,
		"ms": itoa(took.Milliseconds()), "method": printable(r.Method, 16),
	}
	for key, value := range req.told {
		fields[key] = logged(value, 64)
	}
	if req.user == "" {
		fields["remote"] = printable(r.RemoteAddr, 64)
	}
	if req.sandbox != "" {
		fields["target"] = logged(req.sandbox, 64)
	}
	if more > 0 {
		fields["more"] = itoa(more)
	}
	_, err := c.to.Append(context.WithoutCancel(r.Context()), audit.Record{Actor: printable(req.user, 64), Action: "call", Fields: fields})
	return err
}

// stranger says whether enough calls of strangers are on record in this second, and else how many are not that came before.
func (c *calls) stranger(now time.Time) (more int64, enough bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.second) >= time.Second {
		c.second, c.seen = now, 0
	}
	if c.seen++; c.seen > strangers {
		c.more++
		return 0, true
	}
	more, c.more = c.more, 0
	return more, false
}
