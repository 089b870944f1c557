package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a rollback, in order.
var (
	fpRollbackStaged   = failpoint.New("engine.rollback.staged")
	fpRollbackIntent   = failpoint.New("engine.rollback.intent")
	fpRollbackRemoved  = failpoint.New("engine.rollback.removed")
	fpRollbackReplaced = failpoint.New("engine.rollback.replaced")
	fpRollbackImage    = failpoint.New("engine.rollback.image")
	fpRollbackPaused   = failpoint.New("engine.rollback.paused")
)

// A rollback looks at all that it needs, and makes aside what takes room on the disk, before it touches anything. Then the
// store says that the sandbox is rolling back, and from there on it only goes forward: the execution ends, the workspace
// becomes the snapshot's in one step, the snapshot's image becomes that of a paused sandbox, and that is resumed. Each step
// may be repeated, so a crash at any point leaves the sandbox as it was, or as it was at the snapshot. What was aside at a
// crash is removed by the next start and made again, in the room that it had.

// staged is what a rollback has made aside. Its nil makes all of it when it is needed.
type staged struct {
	files WorkspaceReplacement
	image string // the directory of an image, "" for none
}

// drop removes what has not been used.
func (s *staged) drop() {
	if s == nil {
		return
	}
	if s.files != nil {
		s.files.Abort()
	}
	if s.image != "" {
		os.RemoveAll(s.image)
	}
}

// stage makes what a rollback of a sandbox to p needs, or leaves nothing.
func (e *Engine) stage(ctx context.Context, row *store.Sandbox, p *snapshot) (_ *staged, err error) {
	need, err := e.opts.Workspaces.ReplaceNeeds(ctx, p.row.FilesID)
	if err != nil {
		return nil, err
	}
	if err := e.diskRoom(need); err != nil {
		return nil, err
	}
	s := &staged{}
	defer func() {
		if err != nil {
			s.drop()
		}
	}()
	if SnapshotKind(p.row.Kind) == MemorySnapshot {
		s.image = e.imageDir(row.ID) + unfinished
		if err := os.RemoveAll(s.image); err != nil {
			return nil, plainPath(err)
		}
		if _, err := linkImage(e.memoryDir(p.row.ID), s.image); err != nil {
			return nil, err
		}
	}
	if s.files, err = e.opts.Workspaces.BeginReplace(ctx, row.WorkspaceID, p.row.FilesID); err != nil {
		return nil, err
	}
	return s, fpRollbackStaged.Hit()
}

// goOn lets an execution begin where a snapshot is.
func (e *Engine) goOn(ctx context.Context, r *bootRequest, p *snapshot) error {
	if SnapshotKind(p.row.Kind) == MemorySnapshot {
		r.memory = e.memoryDir(p.row.ID)
		return nil
	}
	layer, err := e.checkRoot(ctx, p)
	r.root = layer
	return err
}

// Rollback takes a sandbox back to a snapshot: memory, root and workspace. It keeps its id, its name and its settings. What
// it did since then is lost, but for commits.
func (e *Engine) Rollback(ctx context.Context, c Caller, ref, snapRef string) (*Sandbox, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	if err == nil && e.closing {
		err = errClosing
	}
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	p, release, err := e.useSnapshot(c, snapRef)
	if err != nil {
		return nil, err
	}
	defer release()
	hctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
	op, err := e.hold(ctx, sb, "rollback", cancel)
	if err != nil {
		cancel()
		return nil, err
	}
	e.mu.Lock()
	hold := e.holdSnapshot(p) // for as long as it runs
	ok := e.spawn(func() {
		defer hold()
		e.finish(sb, op, e.runRollback(hctx, sb, p, c.User))
	})
	e.mu.Unlock()
	if !ok {
		hold()
		e.finish(sb, op, errClosing)
		return nil, errClosing
	}
	select {
	case <-op.done:
	case <-ctx.Done():
		return nil, fmt.Errorf("the rollback of sandbox %s goes on: %w", sb.label(), ctx.Err())
	}
	if op.err != nil {
		return nil, op.err
	}
	return e.Get(ctx, c, string(sb.row.ID))
}

func (e *Engine) runRollback(ctx context.Context, sb *sandbox, p *snapshot, actor string) error {
	aside, committed, err := e.beginRollback(ctx, sb, p, actor)
	if err == nil {
		err = e.rollForward(ctx, sb, p, aside)
	}
	if err == nil {
		err = e.goOnFrom(ctx, sb, p, actor)
	}
	if err == nil {
		return nil
	}
	e.mu.Lock()
	label, state := sb.label(), sb.state()
	e.mu.Unlock()
	if e.ctx.Err() != nil {
		return errClosing // the next Open finds a rollback that was cut short
	}
	e.log.Warn("rollback failed", "sandbox", sb.row.ID, "snapshot", p.row.ID, "error", err)
	switch {
	case !committed:
		return fmt.Errorf("sandbox %s is as it was: rollback to snapshot %s: %w", label, p.label(), err)
	case state == RollingBack:
		// It can only go forward, and it does.
		e.stuck(sb, err)
		if err := e.settleRollback(sb); err != nil {
			e.record(ctx, e.event("warren", "sandbox.rollback_failed", &sb.row, err.Error()))
			e.spawnSettle(sb, err)
			return fmt.Errorf("sandbox %s is on its way to snapshot %s, which is tried again: %w", label, p.label(), err)
		}
		return fmt.Errorf("sandbox %s is at snapshot %s, but does not run: %w", label, p.label(), err)
	}
	return err
}

// spawnSettle goes on with a rollback that the driver or the disk does not let through, as soon as nothing holds sb.
func (e *Engine) spawnSettle(sb *sandbox, why error) {
	ctx, cancel := context.WithCancel(e.ctx) // which a delete ends
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.spawn(func() {
		op, err := e.hold(ctx, sb, opSettle, cancel)
		if err != nil {
			cancel()
			return
		}
		e.stuck(sb, why)
		e.settleFor(ctx, sb, op)
	}) {
		cancel()
	}
}

// settleFor goes on with a rollback until it is finished, or ctx ends.
func (e *Engine) settleFor(ctx context.Context, sb *sandbox, op *operation) {
	var wait time.Duration
	for {
		var err error
		e.mu.Lock()
		over := sb.state() != RollingBack
		e.mu.Unlock()
		if !over {
			err = e.settleRollback(sb)
		}
		if over || err == nil || ctx.Err() != nil {
			e.finish(sb, op, err)
			return
		}
		e.stuck(sb, err)
		e.log.Warn("rollback not finished yet", "sandbox", sb.row.ID, "error", err)
		e.again(ctx, &wait)
	}
}

// opSettle is the kind of an operation that is repeated until it succeeds. Nobody but a delete, which ends it, waits for it.
const opSettle = "settle"

// stuck says to those who wait for a rollback, and to those who come, what keeps it from getting on.
func (e *Engine) stuck(sb *sandbox, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if op := sb.op; op != nil && sb.state() == RollingBack {
		if op.stuck == nil {
			close(op.waits)
		}
		op.stuck = err
	}
}

// settling is what others get who find a sandbox so held, or nil. The caller holds mu.
func (sb *sandbox) settling() error {
	if sb.op == nil || sb.op.kind != opSettle && sb.op.stuck == nil {
		return nil
	}
	return sb.rollingBack(sb.op.stuck)
}

// rollingBack is what a caller gets who would wait for a rollback that may take for ever. It is no [warren.ErrUnavailable], at which
// clients ask again and again and tell nobody.
func (sb *sandbox) rollingBack(why error) error {
	because := ""
	if why != nil {
		because = " (" + why.Error() + ")"
	}
	return fmt.Errorf("sandbox %s is on its way to a snapshot, which does not get on%s and is tried again; `warren rm %s` ends that: %w", sb.label(), because, sb.label(), warren.ErrState)
}

// beginRollback looks at what a rollback needs and makes the decision durable.
func (e *Engine) beginRollback(ctx context.Context, sb *sandbox, p *snapshot, actor string) (aside *staged, committed bool, err error) {
	e.mu.Lock()
	row := sb.row
	ws := e.spaces[row.WorkspaceID]
	was := sb.state()
	switch {
	case row.Damaged != "":
		err = failedError(sb)
	case was != Running && was != Paused && was != Failed:
		err = fmt.Errorf("it is %s: %w", was, warren.ErrState)
	case row.Driver != p.row.Driver:
		err = fmt.Errorf("the snapshot was taken with driver %s, and the sandbox has %s: %w", p.row.Driver, row.Driver, warren.ErrInvalid)
	case row.ImageDigest != p.row.ImageDigest: // also files alone: the layer of the root fits no other image
		err = fmt.Errorf("the snapshot was taken on image %s (%.20s), and the sandbox has %s (%.20s); `warren create --snapshot %s` makes a sandbox of it: %w",
			p.row.Image, p.row.ImageDigest, row.Image, row.ImageDigest, p.label(), warren.ErrInvalid)
	case row.Disk != p.row.Disk && SnapshotKind(p.row.Kind) == MemorySnapshot:
		err = fmt.Errorf("the snapshot has a disk of %s, and the sandbox %s: %w", size(p.row.Disk), size(row.Disk), warren.ErrInvalid)
	case ws == nil:
		err = fmt.Errorf("workspace %s: %w", row.WorkspaceID, warren.ErrNotFound)
	}
	e.mu.Unlock()
	if err != nil {
		return nil, false, err
	}
	look := row
	if err := e.verify(ctx, &look, p); err != nil {
		return nil, false, err
	}
	if aside, err = e.stage(ctx, &look, p); err != nil {
		return nil, false, err
	}
	defer func() {
		if err != nil {
			aside.drop()
		}
	}()
	e.mu.Lock()
	row, was = sb.row, sb.state() // what was written of it meanwhile stays
	if !sb.executing() {
		if err := e.reserve(row.Owner, usage{cpu: int64(row.CPUMillis), memory: row.Memory}); err != nil {
			e.mu.Unlock()
			return nil, false, err
		}
	}
	e.setState(sb, RollingBack)
	row.State, row.SnapshotID, row.Failure = string(RollingBack), p.row.ID, nil
	e.mu.Unlock()
	ev := e.event(actor, "sandbox.rollback", &row, "to snapshot "+p.label())
	ev.Fields = map[string]string{"snapshot": string(p.row.ID)}
	err = e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		return tx.AppendEvent(ev)
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.setState(sb, was)
		return nil, false, err
	}
	sb.row.SnapshotID, sb.row.Failure = row.SnapshotID, nil
	return aside, true, nil
}

// verify says whether a sandbox could go on from a snapshot, before anything depends on it.
func (e *Engine) verify(ctx context.Context, row *store.Sandbox, p *snapshot) error {
	if SnapshotKind(p.row.Kind) != MemorySnapshot {
		layer, err := e.checkRoot(ctx, p)
		if err == nil && layer != "" && e.opts.PauseDir == "" {
			err = fmt.Errorf("this server has no directory for what a rollback leaves to be done: %w", errUnsupported)
		}
		return err
	}
	v, ok := driver.As[driver.Verifier](e.opts.Drivers[row.Driver])
	if !ok {
		return nil
	}
	spec, _, err := e.loadSpec(ctx, row.ID)
	if err != nil {
		return err
	}
	img, err := e.pinnedImage(ctx, row)
	if err != nil {
		return err
	}
	dirs, err := e.opts.Workspaces.Get(ctx, row.WorkspaceID)
	if err != nil {
		return err
	}
	mounts, err := e.openMounts(Caller{User: row.Owner, Operator: true}, spec.Mounts)
	if err != nil {
		return err
	}
	defer closeMounts(mounts)
	ds, own, err := e.driverSpec(bootRequest{row: row, spec: spec, image: img, dirs: dirs, mounts: mounts})
	if err != nil {
		return err
	}
	defer closeMounts(own)
	err = v.Verify(ctx, ds, e.memoryDir(p.row.ID))
	if errors.Is(err, driver.ErrImage) {
		return fmt.Errorf("snapshot %s cannot be gone back to: %w: %w", p.label(), err, warren.ErrState)
	}
	return err
}

// rollForward makes of a sandbox that is rolling back a paused one, or one without an execution where the snapshot has
// files alone. It may be repeated, without what was made aside before.
func (e *Engine) rollForward(ctx context.Context, sb *sandbox, p *snapshot, aside *staged) error {
	defer aside.drop()
	if err := fpRollbackIntent.Hit(); err != nil {
		return err
	}
	e.mu.Lock()
	row := sb.row
	e.mu.Unlock()
	// What an earlier rollback left owing is of no more use.
	if err := os.RemoveAll(e.imageDir(row.ID) + owed); err != nil {
		return plainPath(err)
	}
	dctx, cancel := context.WithTimeout(ctx, e.opts.DeleteTimeout)
	err := e.removeFrom(dctx, row.Driver, row.ID)
	cancel()
	if err != nil {
		e.metrics.driverError(row.Driver, "delete")
		return fmt.Errorf("driver %s: %w", row.Driver, err)
	}
	if err := fpRollbackRemoved.Hit(); err != nil {
		return err
	}
	if aside != nil {
		if err := aside.files.Commit(ctx); err != nil {
			return err
		}
		aside.files.Abort() // what was there before goes, and the workspace is free for who starts on it
		aside.files = nil
	} else if err := e.opts.Workspaces.Replace(ctx, row.WorkspaceID, p.row.FilesID); err != nil {
		return err
	}
	if err := fpRollbackReplaced.Hit(); err != nil {
		return err
	}
	dir := e.imageDir(row.ID)
	if aside == nil || aside.image == "" {
		if err := e.dropImage(row.ID); err != nil {
			return plainPath(err)
		}
		if SnapshotKind(p.row.Kind) != MemorySnapshot {
			return e.oweRoot(ctx, row.ID, p)
		}
		if _, err := linkImage(e.memoryDir(p.row.ID), dir+unfinished); err != nil {
			return err
		}
	} else {
		if err := os.RemoveAll(dir); err != nil {
			return plainPath(err)
		}
		e.mu.Lock()
		e.countImage(sb, 0)
		e.mu.Unlock()
	}
	// It stands there from a rollback whose resume failed.
	if err := os.Mkdir(dir+turned, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return plainPath(err)
	}
	if err := os.Rename(dir+unfinished, dir); err != nil {
		return plainPath(err)
	}
	if aside != nil {
		aside.image = ""
	}
	if err := syncDir(e.opts.PauseDir); err != nil {
		return plainPath(err)
	}
	if err := fpRollbackImage.Hit(); err != nil {
		return err
	}
	err = e.enter(ctx, sb, Paused, e.event("warren", "sandbox.paused", &row, "at snapshot "+p.label()))
	if err == nil {
		err = fpRollbackPaused.Hit()
	}
	return err
}

// goOnFrom lets a sandbox run again that has been rolled back.
func (e *Engine) goOnFrom(ctx context.Context, sb *sandbox, p *snapshot, actor string) error {
	if SnapshotKind(p.row.Kind) == MemorySnapshot {
		e.mu.Lock()
		err := e.reserve(sb.row.Owner, usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory})
		if err == nil {
			e.setState(sb, Resuming)
		}
		e.mu.Unlock()
		if err != nil {
			return err
		}
		return e.resumeFor(ctx, sb, actor, "rollback")
	}
	e.mu.Lock()
	was := sb.row
	was.State = string(Failed)
	e.setState(sb, Creating)
	e.mu.Unlock()
	return e.runRestart(ctx, sb, was, actor)
}

// settleRollback finishes a rollback that was cut short. The sandbox is at the snapshot afterwards, paused, or failed where
// it has to start cold, which it does at once where the snapshot is still there.
func (e *Engine) settleRollback(sb *sandbox) error {
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
	defer cancel()
	e.mu.Lock()
	p := e.snaps[sb.row.SnapshotID]
	var release func()
	if p != nil {
		release = e.holdSnapshot(p)
	}
	e.mu.Unlock()
	if p == nil {
		// It cannot have been deleted meanwhile; a store that says so is damaged.
		e.setFailed(ctx, sb, store.Failure{Reason: "lost", Message: "the snapshot that it was rolled back to is gone", Time: e.clock.Now()})
		return nil
	}
	defer release()
	if err := e.rollForward(ctx, sb, p, nil); err != nil {
		return err
	}
	if SnapshotKind(p.row.Kind) == MemorySnapshot {
		return nil
	}
	if err := e.goOnFrom(ctx, sb, p, "warren"); err != nil && e.ctx.Err() == nil {
		e.log.Warn("sandbox not started after its rollback", "sandbox", sb.row.ID, "error", err)
	}
	return nil
}

// applyRoot gives a guest what the root of another had that its image has not.
func (e *Engine) applyRoot(ctx context.Context, row *store.Sandbox, tar string) error {
	f, err := os.Open(tar)
	if err != nil {
		return plainPath(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return plainPath(err)
	}
	conn, err := e.opts.Drivers[row.Driver].Dial(ctx, row.ID, warren.GuestPort)
	if err != nil {
		return fmt.Errorf("the guest does not answer: %w", err)
	}
	defer conn.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/root", io.NopCloser(f))
	if err != nil {
		return err
	}
	req.ContentLength = fi.Size()
	var refused error
	if err := askGuest(ctx, conn, req, func(resp *http.Response) error {
		refused = refusal(resp, "the guest could not write the changes of the root")
		return nil
	}); err != nil {
		return fmt.Errorf("write the changes of the root: %w", err)
	}
	return refused
}
