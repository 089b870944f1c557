// Package deaths holds what drivers that watch their sandboxes share.
package deaths

import (
	"context"

	"github.com/warren-sandbox/warren/driver"
)

// Queue passes on in order and holds what a slow reader has not taken, then closes out.
func Queue(ctx context.Context, in <-chan driver.Status, out chan<- driver.Status) {
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
