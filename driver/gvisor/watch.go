//go:build linux

package gvisor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/driver/internal/deaths"
	"github.com/warren-sandbox/warren/internal/message"
)

// Watch reports deaths, see [driver.Watcher]. It goes on across keepers: a new one first tells who is dead, so what
// happened between two of them is reported too.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Status, error) {
	c, first, err := d.open(ctx, &protocol.Request{Op: protocol.OpWatch})
	if err != nil {
		return nil, fmt.Errorf("watch sandboxes: %w", err)
	}
	before := dead(first.Statuses)
	news := make(chan driver.Status)
	out := make(chan driver.Status)
	go deaths.Queue(ctx, news, out)
	go func() {
		defer close(news)
		for {
			stop := context.AfterFunc(ctx, func() { c.Close() })
			for {
				var r protocol.Response
				if _, err := message.Read(c, &r); err != nil {
					break
				}
				report(ctx, news, r.Statuses)
			}
			stop()
			c.Close()
			// The keeper has gone; the next one is asked as soon as there is one.
			for {
				if ctx.Err() != nil || d.isClosed() {
					return
				}
				var r *protocol.Response
				if c, r, err = d.open(ctx, &protocol.Request{Op: protocol.OpWatch}); err == nil {
					now := dead(r.Statuses)
					// What the last keeper has told of may be told again.
					report(ctx, news, slices.DeleteFunc(r.Statuses, func(s protocol.Status) bool { return before[s.ID] }))
					before = now
					break
				}
				select {
				case <-ctx.Done():
				case <-d.done:
				case <-time.After(100 * time.Millisecond):
				}
			}
		}
	}()
	return out, nil
}

// dead returns the ids of a keeper's list of the dead.
func dead(statuses []protocol.Status) map[string]bool {
	ids := make(map[string]bool, len(statuses))
	for _, s := range statuses {
		ids[s.ID] = true
	}
	return ids
}

// report passes deaths on. One id may come again: a sandbox that was restarted can die again.
func report(ctx context.Context, news chan<- driver.Status, statuses []protocol.Status) {
	for _, s := range statuses {
		select {
		case news <- status(s):
		case <-ctx.Done():
		}
	}
}
