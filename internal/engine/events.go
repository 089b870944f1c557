package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// Watch calls fn with the events that c may see, oldest first, each once, until ctx ends or fn returns an error. A slow fn
// delays nobody: events are read from the store. Events older than those kept are gone: after a number before the oldest
// kept, Watch fails instead of leaving a gap unsaid.
func (e *Engine) Watch(ctx context.Context, c Caller, r WatchRequest, fn func(*Event) error) error {
	f, err := e.filter(c, r.ID)
	if err != nil {
		return err
	}
	if r.After < 0 {
		return invalid("after", fmt.Sprint(r.After), "want 0 or the number of an event")
	}
	after := r.After
	for {
		if after > 0 {
			oldest, err := e.store.OldestSeq(ctx)
			if err != nil {
				return err
			}
			if oldest > after+1 {
				return fmt.Errorf("events after %d are wanted, but those before %d are no longer kept; begin with 0: %w", after, oldest, warren.ErrState)
			}
		}
		events, upto, err := e.store.Events(ctx, after, f, 500)
		if err != nil {
			return err
		}
		for _, x := range events {
			if err := fn(&Event{Seq: x.Seq, Time: x.Time, Actor: x.Actor, Action: x.Action, SandboxID: x.SandboxID, WorkspaceID: x.WorkspaceID, Message: x.Message, Fields: x.Fields}); err != nil {
				return err
			}
		}
		more := len(events) == 500
		after = upto
		if more {
			continue
		}
		if r.NoFollow {
			return nil
		}
		wctx, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(e.ctx, cancel)
		err = e.store.WaitSeq(wctx, after)
		stop()
		cancel()
		if err != nil {
			if ctx.Err() == nil && e.ctx.Err() != nil {
				return errClosing
			}
			return err
		}
	}
}

// filter finds what the events of ref are. A whole id works also when what it named is gone.
func (e *Engine) filter(c Caller, ref string) (store.EventFilter, error) {
	f := store.EventFilter{Owner: c.User}
	if c.Operator {
		f.Owner = ""
	}
	if ref == "" {
		return f, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	switch {
	case err == nil:
		f.SandboxID = sb.row.ID
		return f, nil
	case !errors.Is(err, warren.ErrNotFound):
		return f, err
	case isID(ref, 's'):
		f.SandboxID = warren.SandboxID(ref)
		return f, nil
	case isID(ref, 'w'):
		f.WorkspaceID = warren.WorkspaceID(ref)
		return f, nil
	}
	w, werr := e.findWorkspace(c, ref)
	if werr != nil {
		return f, err
	}
	f.WorkspaceID = w.row.ID
	return f, nil
}

// MarkFirstCommand records that the first command in a sandbox has been answered, as the last milestone of its create.
// Later calls do nothing.
func (e *Engine) MarkFirstCommand(ctx context.Context, id warren.SandboxID) error {
	e.mu.Lock()
	sb := e.boxes[id]
	if sb == nil || sb.marked || sb.row.Generation != 1 {
		e.mu.Unlock()
		return nil
	}
	sb.marked = true
	created, now := sb.row.Created, e.clock.Now()
	e.mu.Unlock()
	rows, err := e.store.Specs(ctx, id)
	if err != nil {
		return err
	}
	timing := rows[id].Timing
	for _, m := range timing {
		if m.Name == "first command" {
			return nil
		}
	}
	var ready = now.Sub(created)
	for _, m := range timing {
		if m.Name == "guest ready" {
			ready = m.Start + m.Duration
		}
	}
	took := max(now.Sub(created)-ready, 0)
	e.metrics.milestone("first command", took)
	return e.store.Update(ctx, func(tx *store.Tx) error {
		return tx.SetTiming(id, append(timing, store.Milestone{Name: "first command", Start: ready, Duration: took}))
	})
}
