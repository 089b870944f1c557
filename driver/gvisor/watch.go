//go:build linux

package gvisor

import (
	"context"
	"fmt"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// Watch reports deaths, see [driver.Watcher]. It goes on across keepers: a new one first tells who is dead, so what
// happened between two of them is reported too.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Status, error) {
	c, first, err := d.open(ctx, &protocol.Request{Op: protocol.OpWatch})
	if err != nil {
		return nil, fmt.Errorf("watch sandboxes: %w", err)
	}
	known := map[warren.SandboxID]bool{} // dead and reported, or dead before
	for _, s := range first.Statuses {
		known[warren.SandboxID(s.ID)] = true
	}
	news := make(chan driver.Status)
	out := make(chan driver.Status)
	go queue(ctx, news, out)
	go func() {
		defer close(news)
		for {
			stop := context.AfterFunc(ctx, func() { c.Close() })
			for {
				var r protocol.Response
				if _, err := protocol.Read(c, &r); err != nil {
					break
				}
				report(ctx, news, known, r.Statuses)
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
					report(ctx, news, known, r.Statuses)
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

func report(ctx context.Context, news chan<- driver.Status, known map[warren.SandboxID]bool, statuses []protocol.Status) {
	for _, s := range statuses {
		st := status(s)
		if known[st.ID] {
			continue
		}
		known[st.ID] = true
		select {
		case news <- st:
		case <-ctx.Done():
		}
	}
}

// queue passes on in order and holds what a slow reader has not taken, then closes out.
func queue(ctx context.Context, in <-chan driver.Status, out chan<- driver.Status) {
	defer close(out)
	var waiting []driver.Status
	for in != nil || len(waiting) > 0 {
		var send chan<- driver.Status
		var next driver.Status
		if len(waiting) > 0 {
			send, next = out, waiting[0]
		}
		select {
		case s, ok := <-in:
			if !ok {
				in = nil
				continue
			}
			waiting = append(waiting, s)
		case send <- next:
			waiting = waiting[1:]
		case <-ctx.Done():
			// The sender ends by itself; nobody may be left sending to us.
			for in != nil {
				if _, ok := <-in; !ok {
					in = nil
				}
			}
			return
		}
	}
}
