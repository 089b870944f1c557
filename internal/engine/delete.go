package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a delete, in order.
var (
	fpDeleteBegin     = failpoint.New("engine.delete.begin")
	fpDeleteIntent    = failpoint.New("engine.delete.intent")
	fpDeleteDriver    = failpoint.New("engine.delete.driver")
	fpDeleteWorkspace = failpoint.New("engine.delete.workspace")
	fpDeleteGone      = failpoint.New("engine.delete.gone")
)

// Delete removes a sandbox: its processes, what it wrote to its root, and its workspace when that was made for it and is
// not to be kept. It returns when all is gone. Deleting again, or at the same time, joins. When the driver fails, Delete
// says so and the engine goes on trying.
func (e *Engine) Delete(ctx context.Context, c Caller, r DeleteRequest) error {
	if r.Key != "" {
		if r.ID != "" {
			return fmt.Errorf("delete by an id or by the idempotency key of a create, not by both: %w", warren.ErrInvalid)
		}
		id, err := e.made(ctx, c, r.Key)
		if err != nil {
			return err
		}
		if id == "" {
			if r.AllowMissing {
				return nil
			}
			return fmt.Errorf("no create with idempotency key %s: %w", quote(r.Key), warren.ErrNotFound)
		}
		r.ID = id
	}
	e.mu.Lock()
	sb, err := e.find(c, r.ID)
	e.mu.Unlock()
	if err != nil {
		if r.AllowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	return e.delete(ctx, sb, c.User, "sandbox.delete", "", r.DeleteWorkspace)
}

// made ends a create that is under way with the key, and returns the sandbox that one has made.
func (e *Engine) made(ctx context.Context, c Caller, key string) (string, error) {
	if err := checkKey(key); err != nil {
		return "", err
	}
	e.mu.Lock()
	f := e.flights[ownedName{c.User, key}]
	if f != nil {
		f.cancel()
	}
	e.mu.Unlock()
	if f != nil {
		select {
		case <-f.done:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	k, err := e.store.Key(ctx, c.User, key)
	if err != nil || k == nil {
		return "", err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.boxes[warren.SandboxID(k.Object)] == nil {
		return "", nil
	}
	return k.Object, nil
}

func (e *Engine) delete(ctx context.Context, sb *sandbox, actor, action, why string, workspace bool) error {
	for {
		e.mu.Lock()
		if sb.gone {
			e.mu.Unlock()
			return nil
		}
		op := sb.op
		if op == nil {
			op = e.beginDelete(sb, actor, action, why, workspace)
			if op == nil {
				e.mu.Unlock()
				return errClosing
			}
		}
		if op.kind == "delete" {
			op.workspace = op.workspace || workspace
			e.mu.Unlock()
			select {
			case <-op.first:
				return op.firstErr
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		op.doomed = true
		if op.cancel != nil {
			op.cancel()
		}
		e.mu.Unlock()
		select {
		case <-op.done:
		case <-op.first: // a create that is being undone
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// beginDelete starts the removal of a sandbox that nothing holds. The caller holds mu.
func (e *Engine) beginDelete(sb *sandbox, actor, action, why string, workspace bool) *operation {
	op := newOperation("delete", nil)
	op.workspace = workspace
	was, counted := sb.state(), sb.executing()
	if !e.spawn(func() { e.runDelete(sb, op, was, actor, action, why) }) {
		return nil
	}
	sb.op = op
	if !counted {
		// From here on it counts as executing again, which drop gives back; nothing may forbid a delete.
		more := usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory}
		e.usage[sb.row.Owner].add(more, 1)
		e.total.add(more, 1)
	}
	e.setState(sb, Deleting)
	return op
}

func (e *Engine) runDelete(sb *sandbox, op *operation, was State, actor, action, why string) {
	err := fpDeleteBegin.Hit()
	if err == nil {
		e.mu.Lock()
		row := sb.row
		e.mu.Unlock()
		err = e.store.UpdateFreeing(e.ctx, func(tx *store.Tx) error {
			if err := tx.UpdateSandbox(&row); err != nil {
				return err
			}
			return tx.AppendEvent(e.event(actor, action, &row, why))
		})
	}
	if err == nil {
		err = fpDeleteIntent.Hit()
	}
	if err != nil && !errors.Is(err, warren.ErrExhausted) && !errors.Is(err, failpoint.ErrInjected) {
		// Without its intent nothing is done. A full disk alone does not stop a delete, which makes room: should the
		// process end in the middle, the sandbox is found without an execution, and can be deleted again.
		e.mu.Lock()
		e.setState(sb, was)
		op.firstErr = err
		close(op.first)
		e.mu.Unlock()
		e.finish(sb, op, err)
		return
	}
	e.erase(e.ctx, sb, op, erasure{event: e.event(actor, "sandbox.deleted", &sb.row, "")})
}

// erasure says how a removal is recorded.
type erasure struct {
	event *store.Event
	// cause of the undoing of a create, which is what waiters get.
	cause error
	// key of the create that is undone, so that a retry is a first call again; when it is not known, lostKey says so.
	key     ownedName
	lostKey bool
}

// erase removes all of a sandbox whose deletion is decided, and repeats what fails until it is done or the engine
// closes. It returns after the first attempt; op ends with the last.
func (e *Engine) erase(ctx context.Context, sb *sandbox, op *operation, x erasure) {
	err := e.eraseOnce(ctx, sb, op, x)
	e.mu.Lock()
	op.firstErr = err
	if err != nil {
		op.firstErr = fmt.Errorf("sandbox %s could not be removed yet and is tried again: %w", sb.label(), err)
	}
	again := err != nil && e.spawn(func() { e.eraseAgain(sb, op, x) })
	if again {
		op.lingers = cmp.Or(x.cause, op.firstErr)
	}
	close(op.first)
	e.mu.Unlock()
	if again {
		return
	}
	if err == nil {
		err = x.cause
	}
	e.finish(sb, op, err)
}

func (e *Engine) eraseAgain(sb *sandbox, op *operation, x erasure) {
	var r removing
	for {
		if !e.againRemove(e.ctx, &r) {
			e.finish(sb, op, errClosing)
			return
		}
		if err := e.eraseOnce(e.ctx, sb, op, x); err == nil {
			e.finish(sb, op, x.cause)
			return
		}
	}
}

func (e *Engine) eraseOnce(ctx context.Context, sb *sandbox, op *operation, x erasure) (err error) {
	e.mu.Lock()
	row, ws := sb.row, e.spaces[sb.row.WorkspaceID]
	drop := op.workspace || row.DropWorkspace
	e.mu.Unlock()
	defer func() {
		if err != nil && e.ctx.Err() == nil {
			e.log.Warn("delete failed", "sandbox", row.ID, "error", err)
			e.mu.Lock()
			sb.row.Failure = &store.Failure{Reason: "delete", Message: err.Error(), Time: e.clock.Now()}
			e.mu.Unlock()
		}
	}()
	d := e.opts.Drivers[row.Driver]
	if d == nil {
		return fmt.Errorf("driver %q, which has sandbox %s, is not open in this server: %w", row.Driver, row.ID, warren.ErrUnavailable)
	}
	// Only the driver has a deadline: a workspace of a million files takes as long as it takes.
	dctx, cancel := context.WithTimeout(ctx, e.opts.DeleteTimeout)
	err = e.removeFrom(dctx, row.Driver, row.ID)
	cancel()
	if err != nil {
		e.metrics.driverError(row.Driver, "delete")
		return fmt.Errorf("driver %s: %w", row.Driver, err)
	}
	if err := e.dropImage(row.ID); err != nil {
		return plainPath(err)
	}
	if err := fpDeleteDriver.Hit(); err != nil {
		return err
	}
	if drop && ws != nil {
		if err := e.quiet(ctx, ws); err != nil {
			return err
		}
		// Files that are gone already are what an earlier try was killed after.
		if err := e.opts.Workspaces.Delete(ctx, ws.row.ID); err != nil && !errors.Is(err, warren.ErrNotFound) {
			return fmt.Errorf("workspace %s: %w", ws.row.ID, err)
		}
	}
	if err := fpDeleteWorkspace.Hit(); err != nil {
		return err
	}
	if err := e.forgetSandbox(ctx, sb, x, drop); err != nil {
		return err
	}
	e.leftPeers(ctx, ownedName{row.Owner, row.Network})
	return nil
}

// forgetSandbox takes a sandbox of which nothing is left out of the store, and then out of memory; with drop its workspace too.
func (e *Engine) forgetSandbox(ctx context.Context, sb *sandbox, x erasure, drop bool) error {
	e.mu.Lock()
	row, ws := sb.row, e.spaces[sb.row.WorkspaceID]
	e.mu.Unlock()
	if x.key.name != "" || x.lostKey {
		e.undoing.RLock()
		defer e.undoing.RUnlock()
	}
	event := *x.event
	if err := e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteSandbox(row.ID); err != nil {
			return err
		}
		if drop {
			if err := tx.DeleteWorkspace(row.WorkspaceID); err != nil {
				return err
			}
		}
		if x.key.name != "" {
			if err := tx.DeleteKey(x.key.owner, x.key.name); err != nil {
				return err
			}
		}
		if x.lostKey {
			if err := tx.DeleteKeysOf(string(row.ID)); err != nil {
				return err
			}
		}
		return tx.AppendEvent(&event)
	}); err != nil {
		return err
	}
	fpDeleteGone.Hit() // too late to fail
	e.mu.Lock()
	e.drop(sb)
	e.madeRoom()
	if drop && ws != nil {
		e.forget(ws)
	}
	e.mu.Unlock()
	return nil
}
