package warren

import (
	"context"
	"iter"
	"time"

	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// LifecycleEvent is one turn in the life of a sandbox, as its guest was told it.
type LifecycleEvent struct {
	// Event is "start", "resume", "rollback" or "fork".
	Event string `json:"event"`
	// SandboxID is the sandbox that goes on, ParentID the one that it was forked from, where that is told.
	SandboxID SandboxID `json:"sandboxId"`
	ParentID  SandboxID `json:"parentId,omitempty"`
	// Generation is another UUID after each event and in each fork.
	Generation string    `json:"generation"`
	Time       time.Time `json:"time"`
}

// WatchLifecycle returns the last event in the life of the sandbox, then each that happens. A pause ends the watch, as it
// ends every connection: after it a caller watches again, and sees by the generation whether anything happened. The
// first error ends the watch.
func (s *Sandbox) WatchLifecycle(ctx context.Context) iter.Seq2[LifecycleEvent, error] {
	return func(yield func(LifecycleEvent, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := s.guest.warren.WatchLifecycle(ctx, request("", &guestv1.WatchLifecycleRequest{}))
		if err != nil {
			yield(LifecycleEvent{}, fromWire("watch the lifecycle", err))
			return
		}
		defer stream.Close()
		for stream.Receive() {
			e := stream.Msg().GetCurrent()
			if e == nil {
				e = stream.Msg().GetHappened()
			}
			if e == nil {
				continue
			}
			if !yield(LifecycleEvent{e.GetEvent(), SandboxID(e.GetSandboxId()), SandboxID(e.GetParentId()), e.GetGeneration(), e.GetTime().AsTime()}, nil) {
				cancel()
				return
			}
		}
		yield(LifecycleEvent{}, streamEnd("watch the lifecycle", stream.Err()))
	}
}
