// Package lifecycle is what the sandbox knows of its own life: that it was started, resumed, rolled back or forked. A
// copy of a sandbox begins with all that the memory of its source held; this package gives it an identity of its own,
// runs the hooks by which software takes note, and tells whoever watches.
//
// Software inside finds its identity in files below [Dir], which all may read:
//
//	sandbox-id   the id of the sandbox
//	boot-id      a UUID like the kernel's boot_id, new after each event
//	generation   the same for watching: see [Files]
//	hooks.log    what the hooks printed
package lifecycle

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"
)

// Dir is where the files are.
const Dir = "/run/warren"

// Names of events.
const (
	Start    = "start"
	Resume   = "resume"
	Fork     = "fork"
	Rollback = "rollback"
)

// Known says whether the name is one of an event.
func Known(name string) bool {
	return name == Start || Again(name)
}

// Again says whether after the event memory goes on that was saved before.
func Again(name string) bool {
	return name == Resume || name == Fork || name == Rollback
}

// Event is one turn in the life of a sandbox.
type Event struct {
	Name      string
	SandboxID string
	// ParentID is the sandbox from which this one was forked, where it is told.
	ParentID string
	// Generation is different after each event, and in each copy.
	Generation string
	Time       time.Time
}

// keptEvents is how far back a follower can be before events are lost to it.
const keptEvents = 64

// History keeps the last events and wakes those who wait for the next.
type History struct {
	mu     sync.Mutex
	first  int // the number of events[0]
	events []Event
	wake   chan struct{}
}

// Add appends an event.
func (h *History) Add(e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
	if n := len(h.events) - keptEvents; n > 0 {
		h.events, h.first = append([]Event(nil), h.events[n:]...), h.first+n
	}
	if h.wake != nil {
		close(h.wake)
		h.wake = nil
	}
}

// Last returns the newest event and the number of the one that comes after it; ok is false when there is none yet.
func (h *History) Last() (e Event, next int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	next = h.first + len(h.events)
	if len(h.events) == 0 {
		return Event{}, next, false
	}
	return h.events[len(h.events)-1], next, true
}

// Next waits for the event with a number, and returns it with the number after it. Where that one is no longer kept it
// returns the oldest that is. It ends with ctx, or after idle with ok false.
func (h *History) Next(ctx context.Context, number int, idle time.Duration) (e Event, next int, ok bool, err error) {
	t := time.NewTimer(idle)
	defer t.Stop()
	for {
		h.mu.Lock()
		number = max(number, h.first)
		if i := number - h.first; i < len(h.events) {
			e := h.events[i]
			h.mu.Unlock()
			return e, number + 1, true, nil
		}
		if h.wake == nil {
			h.wake = make(chan struct{})
		}
		wake := h.wake
		h.mu.Unlock()
		select {
		case <-wake:
		case <-t.C:
			return Event{}, number, false, nil
		case <-ctx.Done():
			return Event{}, number, false, ctx.Err()
		}
	}
}

// NewUUID returns a random UUID in the form of the kernel's boot_id.
func NewUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
