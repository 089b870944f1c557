package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a pause and a resume, in order.
var (
	fpPauseIntent    = failpoint.New("engine.pause.intent")
	fpPauseWritten   = failpoint.New("engine.pause.written")
	fpPauseKept      = failpoint.New("engine.pause.kept")
	fpPausePaused    = failpoint.New("engine.pause.paused")
	fpPauseRemoved   = failpoint.New("engine.pause.removed")
	fpResumeIntent   = failpoint.New("engine.resume.intent")
	fpResumeRestored = failpoint.New("engine.resume.restored")
	fpResumeRunning  = failpoint.New("engine.resume.running")
	fpResumeDropped  = failpoint.New("engine.resume.dropped")
)

// A paused sandbox is an image of its memory in a directory named by its id, and nothing else on the host but its
// workspace. The image gets that name only when it is whole and on disk; the execution, which stands still from the
// instant of the image on, ends only when the store says that the sandbox is paused. So a crash at any point leaves an
// execution that can run on, or an image, and never two that both go on.

// imageDir is where the image of a paused sandbox is.
func (e *Engine) imageDir(id warren.SandboxID) string {
	return filepath.Join(e.opts.PauseDir, string(id))
}

// unfinished marks the directory of an image that is being written.
const unfinished = ".new"

// turned marks, beside it, an image that a rollback put there and from which nothing has run yet: whenever that is, the guest is
// told of a rollback, also after a crash.
const turned = ".turned"

// dropImage removes what there is of the image of a sandbox, and what root it is owed.
func (e *Engine) dropImage(id warren.SandboxID) error { return e.dropImageBy(id, os.RemoveAll) }

// dropImageBy is dropImage with a way to remove a directory.
func (e *Engine) dropImageBy(id warren.SandboxID, remove func(dir string) error) error {
	if e.opts.PauseDir == "" {
		return nil
	}
	if err := errors.Join(os.RemoveAll(e.imageDir(id)+unfinished), remove(e.imageDir(id)), os.RemoveAll(e.imageDir(id)+turned), os.RemoveAll(e.imageDir(id)+owed)); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if sb := e.boxes[id]; sb != nil {
		e.countImage(sb, 0)
	}
	return nil
}

// removeSoon removes a directory of files that are gone by name when it returns. Nobody waits until what they took on the disk and in memory is free, which for
// 300 MB is 50 ms: they stay open for so long.
func removeSoon(dir string) error {
	var files []*os.File
	entries, _ := os.ReadDir(dir) // which is looked at again
	for _, d := range entries {
		if !d.Type().IsRegular() {
			continue
		}
		if f, err := os.OpenFile(filepath.Join(dir, d.Name()), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0); err == nil {
			files = append(files, f)
		}
	}
	err := os.RemoveAll(dir)
	go func() {
		for _, f := range files {
			f.Close()
		}
	}()
	return err
}

// hasImage says whether a whole image is there.
func (e *Engine) hasImage(id warren.SandboxID) bool {
	if e.opts.PauseDir == "" {
		return false
	}
	_, err := os.Stat(e.imageDir(id))
	return err == nil
}

// imageSize adds up what the files of an image take on disk, which is less than their size where they have holes.
func (e *Engine) imageSize(id warren.SandboxID) int64 {
	var size int64
	filepath.WalkDir(e.imageDir(id), func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // a size is no reason to fail
		}
		if fi, err := d.Info(); err == nil && fi.Mode().IsRegular() {
			n := fi.Size()
			if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Blocks > 0 {
				n = min(n, st.Blocks*512)
			}
			size += n
		}
		return nil
	})
	return size
}

// snapshotter returns the capability of a driver, or an error that says that it has none.
func (e *Engine) snapshotter(name string) (driver.Snapshotter, error) {
	d := e.opts.Drivers[name]
	if d == nil {
		return nil, fmt.Errorf("driver %q is not open in this server: %w", name, warren.ErrUnavailable)
	}
	s, ok := driver.As[driver.Snapshotter](d)
	if !ok || e.opts.PauseDir == "" {
		return nil, fmt.Errorf("driver %s cannot keep the memory of a sandbox, so it cannot pause one%s: %w", name, e.pausers(), errUnsupported)
	}
	return s, nil
}

// pausers says which drivers of this server can keep memory, after a semicolon, and nothing when none can.
func (e *Engine) pausers() string {
	var can []string
	for _, name := range sortedKeys(e.opts.Drivers) {
		if _, ok := driver.As[driver.Snapshotter](e.opts.Drivers[name]); ok && e.opts.PauseDir != "" {
			can = append(can, name)
		}
	}
	if len(can) == 0 {
		return ""
	}
	return "; " + strings.Join(can, ", ") + " can"
}

// Pause writes the memory of a running sandbox to disk and ends its processes. Connections into it end; what clients were
// told by sequence number they can go on with after [Engine.Resume]. When it fails the sandbox runs on. Pausing a paused
// sandbox does nothing.
func (e *Engine) Pause(ctx context.Context, c Caller, ref string) (*Sandbox, error) {
	return e.change(ctx, c, ref, "pause", Running, Paused, Pausing, e.runPause)
}

// Resume lets a paused sandbox go on where it was. When it fails the sandbox stays paused. Resuming a running sandbox
// does nothing.
func (e *Engine) Resume(ctx context.Context, c Caller, ref string) (*Sandbox, error) {
	return e.change(ctx, c, ref, "resume", Paused, Running, Resuming, e.runResume)
}

// change takes a sandbox from one state to another. Callers at the same time share the operation, which goes on when
// they leave.
func (e *Engine) change(ctx context.Context, c Caller, ref, kind string, from, to, via State, run func(context.Context, *sandbox, string) error) (*Sandbox, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	e.mu.Unlock()
	if err == nil {
		err = e.shift(ctx, sb, c.User, kind, from, to, via, run)
	}
	if err != nil {
		return nil, err
	}
	return e.Get(ctx, c, string(sb.row.ID))
}

// shift is change for a sandbox that was found.
func (e *Engine) shift(ctx context.Context, sb *sandbox, actor, kind string, from, to, via State, run func(context.Context, *sandbox, string) error) error {
	for {
		e.mu.Lock()
		if sb.gone {
			e.mu.Unlock()
			return notFound("sandbox", string(sb.row.ID))
		}
		if err := sb.settling(); err != nil {
			e.mu.Unlock()
			return err
		}
		op := sb.op
		if op == nil {
			var err error
			switch s := sb.state(); {
			case s == to:
				e.mu.Unlock()
				return nil
			case s != from:
				err = fmt.Errorf("sandbox %s is %s, so it cannot %s: %w", sb.label(), s, kind, warren.ErrState)
				if s == Failed {
					err = failedError(sb)
				}
			default:
				_, err = e.snapshotter(sb.row.Driver)
			}
			if err == nil && from == Paused {
				if err = e.reserve(sb.row.Owner, usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory}); err != nil {
					err = fmt.Errorf("sandbox %s is paused and cannot be resumed: %w", sb.label(), err)
				}
			}
			if err != nil {
				e.mu.Unlock()
				return err
			}
			rctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
			op = newOperation(kind, cancel)
			sb.op, sb.cause = op, pauseCause{reason: PauseAsked}
			e.setState(sb, via)
			if !e.spawn(func() { e.finish(sb, op, run(rctx, sb, actor)) }) {
				e.setState(sb, from)
				sb.op = nil
				e.mu.Unlock()
				cancel()
				return errClosing
			}
		}
		e.mu.Unlock()
		select {
		case <-op.done:
		case <-op.first:
		case <-op.waits:
			continue // which says why
		case <-ctx.Done():
			return ctx.Err()
		}
		if op.kind == kind {
			return op.err
		}
	}
}

// enter makes a state durable, and then true in memory.
func (e *Engine) enter(ctx context.Context, sb *sandbox, s State, event *store.Event) error {
	e.mu.Lock()
	if s == Running && sb.state() != Pausing {
		e.renewTTL(&sb.row)
	}
	row := sb.row
	e.mu.Unlock()
	row.State = string(s)
	err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		return tx.AppendEvent(event)
	})
	if err != nil {
		return err
	}
	var image int64
	if s == Paused {
		image = e.imageSize(sb.row.ID)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.setState(sb, s)
	switch s {
	case Running:
		sb.active = e.line.now()
	case Paused:
		sb.paused = e.line.now()
		e.countImage(sb, image)
	}
	e.schedule(sb)
	return nil
}

func (e *Engine) runPause(ctx context.Context, sb *sandbox, actor string) error {
	err := e.pause(ctx, sb, actor)
	if err == nil {
		return nil
	}
	if e.ctx.Err() != nil {
		// The next Open finds a pause that was cut short. One whose image is not kept runs on until then.
		if !e.hasImage(sb.row.ID) {
			_ = e.letRun(sb) // which the next one does again
		}
		return errClosing
	}
	e.mu.Lock()
	label, state := sb.label(), sb.state()
	e.mu.Unlock()
	e.log.Warn("pause failed", "sandbox", sb.row.ID, "error", err)
	if state != Paused {
		if uerr := e.unpause(sb, err); uerr != nil {
			err = errors.Join(err, uerr)
		}
	}
	if context.Cause(ctx) == context.Canceled {
		return fmt.Errorf("the pause of sandbox %s was cut short by its delete: %w", label, warren.ErrState)
	}
	return fmt.Errorf("pause sandbox %s: %w", label, err)
}

// unpause lets a sandbox run on whose pause failed.
func (e *Engine) unpause(sb *sandbox, cause error) error {
	if err := e.letRun(sb); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	if err := e.dropImage(sb.row.ID); err != nil {
		return err
	}
	err := e.enter(ctx, sb, Running, e.event("warren", "sandbox.pause_failed", &sb.row, cause.Error()))
	if err != nil {
		// It runs, whatever the store can take; a reopened engine would find out the same.
		e.mu.Lock()
		e.setState(sb, Running)
		e.mu.Unlock()
	}
	return err
}

func (e *Engine) pause(ctx context.Context, sb *sandbox, actor string) error {
	e.mu.Lock()
	cause := sb.cause
	sb.row.PauseReason = cause.reason
	row := sb.row
	e.mu.Unlock()
	s, err := e.snapshotter(row.Driver)
	if err != nil {
		return err
	}
	give, err := e.takeDisk(ctx, &row)
	if err != nil {
		return err
	}
	defer give()
	if err := e.enter(ctx, sb, Pausing, cause.event(e, actor, &row)); err != nil {
		return err
	}
	if err := fpPauseIntent.Hit(); err != nil {
		return err
	}
	dir := e.imageDir(row.ID)
	if err := e.dropImage(row.ID); err != nil {
		return err
	}
	if err := os.Mkdir(dir+unfinished, 0o700); err != nil {
		return plainPath(err)
	}
	if err := e.starts.acquire(ctx, row.Owner); err != nil {
		return err
	}
	if err := quiesceGuest(ctx, e.opts.Drivers[row.Driver], row.ID); err != nil {
		e.log.Debug("guest not made small", "sandbox", row.ID, "error", err)
	}
	img, err := s.Snapshot(ctx, row.ID, dir+unfinished, true)
	e.starts.release()
	if err != nil {
		e.metrics.driverError(row.Driver, "snapshot")
		return fmt.Errorf("driver %s: %w", row.Driver, err)
	}
	// Nothing writes any more. What a program has open must be as it was when it goes on, also after the machine was without power.
	if err := e.opts.Workspaces.Sync(ctx, row.WorkspaceID); err != nil {
		return err
	}
	if err := fpPauseWritten.Hit(); err != nil {
		return err
	}
	if err := os.Rename(dir+unfinished, dir); err != nil {
		return plainPath(err)
	}
	if err := syncDir(e.opts.PauseDir); err != nil {
		return plainPath(err)
	}
	if err := fpPauseKept.Hit(); err != nil {
		return err
	}
	if err := e.enter(ctx, sb, Paused, e.event(actor, "sandbox.paused", &row, size(img.Size)+" of memory and files on disk")); err != nil {
		return err
	}
	fpPausePaused.Hit() // too late to fail
	e.metrics.pauses.WithLabelValues(cause.reason).Inc()
	dctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	if err := e.removeFrom(dctx, row.Driver, row.ID); err != nil {
		e.metrics.driverError(row.Driver, "delete")
		// It stands still and is of no more use. The resume removes it, or the next start of the server.
		return fmt.Errorf("it is paused, but its memory is not free yet: driver %s: %w", row.Driver, err)
	}
	fpPauseRemoved.Hit()
	e.log.Info("sandbox paused", "sandbox", row.ID, "bytes", img.Size)
	return nil
}

// plainPath takes the host's paths out of an error.
func plainPath(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return fmt.Errorf("%s the memory image: %w", p.Op, p.Err)
	}
	var l *os.LinkError
	if errors.As(err, &l) {
		return fmt.Errorf("%s the memory image: %w", l.Op, l.Err)
	}
	return err
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (e *Engine) runResume(ctx context.Context, sb *sandbox, actor string) error {
	err := e.resumeFor(ctx, sb, actor, "resume")
	if errors.Is(err, driver.ErrImage) {
		return e.fallBack(ctx, sb, actor, err)
	}
	return err
}

// fallBack starts a sandbox anew on its workspace whose image turned out to be damaged, and always returns an error that says so:
// whoever asked for it finds other processes than were there. The next call finds a sandbox that runs.
func (e *Engine) fallBack(ctx context.Context, sb *sandbox, actor string, damage error) error {
	e.mu.Lock()
	err := ctx.Err()
	if err == nil {
		err = e.reserve(sb.row.Owner, usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory})
	}
	was, label := sb.row, sb.label()
	if err == nil {
		e.setState(sb, Creating)
	}
	e.mu.Unlock()
	if err != nil {
		return errors.Join(damage, err)
	}
	if err := e.runRestart(ctx, sb, was, actor); err != nil {
		return fmt.Errorf("%w (%w)", err, damage)
	}
	back := ""
	if was.SnapshotID != "" {
		back = fmt.Sprintf("; `warren rollback %s %s` goes back to its last snapshot", label, was.SnapshotID)
	}
	return fmt.Errorf("%w; it has been started anew on its workspace, which is intact, and runs: what was in memory is lost%s", damage, back)
}

// resumeFor resumes a sandbox, whose guest is told why. When it fails the sandbox is paused.
func (e *Engine) resumeFor(ctx context.Context, sb *sandbox, actor, event string) error {
	err := e.resume(ctx, sb, actor, event)
	if err == nil {
		return nil
	}
	if e.ctx.Err() != nil {
		return errClosing // the next Open finds a resume that was cut short
	}
	e.mu.Lock()
	label := sb.label()
	e.mu.Unlock()
	e.log.Warn("resume failed", "sandbox", sb.row.ID, "error", err)
	e.removeExecution(sb)
	bg, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	if rerr := e.enter(bg, sb, Paused, e.event("warren", "sandbox.resume_failed", &sb.row, err.Error())); rerr != nil {
		err = errors.Join(err, rerr)
		e.mu.Lock()
		e.setState(sb, Paused)
		e.schedule(sb)
		e.mu.Unlock()
	}
	switch {
	case context.Cause(ctx) == context.Canceled:
		return fmt.Errorf("the resume of sandbox %s was cut short by its delete: %w", label, warren.ErrState)
	case errors.Is(err, driver.ErrImage):
		return fmt.Errorf("sandbox %s cannot go on: %w: %w", label, err, warren.ErrState)
	case errors.Is(err, errUnsupported):
		return fmt.Errorf("sandbox %s stays paused: %w; where its image cannot be resumed, `warren restart %s` starts it anew on its workspace", label, err, label)
	}
	return fmt.Errorf("sandbox %s stays paused: %w; should it never resume, `warren restart %s` starts it anew on its workspace", label, err, label)
}

func (e *Engine) resume(ctx context.Context, sb *sandbox, actor, event string) error {
	e.mu.Lock()
	row := sb.row
	e.mu.Unlock()
	if err := e.enter(ctx, sb, Resuming, e.event(actor, "sandbox.resume", &row, "")); err != nil {
		return err
	}
	if err := fpResumeIntent.Hit(); err != nil {
		return err
	}
	if err := e.execute(ctx, &row, bootRequest{memory: e.imageDir(row.ID), event: e.resumeEvent(row.ID, event)}); err != nil {
		return err
	}
	if err := fpResumeRestored.Hit(); err != nil {
		return err
	}
	return e.resumed(ctx, sb, e.event(actor, "sandbox.running", &row, "resumed"))
}

// resumeEvent is what a guest is told of a resume: a rollback whose first resume failed is still one.
func (e *Engine) resumeEvent(id warren.SandboxID, event string) string {
	if _, err := os.Lstat(e.imageDir(id) + turned); err == nil {
		return "rollback"
	}
	return event
}

// resumed makes a sandbox running that goes on from its image, which is of no more use.
func (e *Engine) resumed(ctx context.Context, sb *sandbox, event *store.Event) error {
	if err := e.enter(ctx, sb, Running, event); err != nil {
		return err
	}
	fpResumeRunning.Hit() // too late to fail
	e.metrics.resumes.Inc()
	if err := e.dropImageBy(sb.row.ID, removeSoon); err != nil {
		e.log.Warn("image not removed until the next start of the server", "sandbox", sb.row.ID, "error", err)
	}
	fpResumeDropped.Hit()
	e.log.Info("sandbox resumed", "sandbox", sb.row.ID)
	return nil
}

// settlePause brings a sandbox to rest whose pause or resume was cut short, and removes what a paused one has of an
// execution. It goes on until the driver answers.
func (e *Engine) settlePause(sb *sandbox, op *operation) {
	var wait time.Duration
	for {
		err := e.settlePauseOnce(sb)
		if err == nil || e.ctx.Err() != nil {
			e.finish(sb, op, err)
			return
		}
		e.log.Warn("interrupted pause or resume not settled yet", "sandbox", sb.row.ID, "error", err)
		if !e.again(e.ctx, &wait) {
			e.finish(sb, op, errClosing)
			return
		}
	}
}

func (e *Engine) settlePauseOnce(sb *sandbox) error {
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.BootTimeout+e.opts.DeleteTimeout)
	defer cancel()
	e.mu.Lock()
	row := sb.row
	e.mu.Unlock()
	d := e.opts.Drivers[row.Driver]
	all, err := d.List(ctx)
	if err != nil {
		return err
	}
	runs := false
	var exit *driver.Exit
	for _, s := range all {
		if s.ID == row.ID {
			runs, exit = s.State == driver.Running, s.Exit
		}
	}
	switch State(row.State) {
	case Pausing:
		if runs {
			return e.unpause(sb, errPauseInterrupted)
		}
		if e.hasImage(row.ID) {
			break // whole and on disk, only the word for it is missing
		}
		if err := e.removeFrom(ctx, row.Driver, row.ID); err != nil {
			return err
		}
		f := store.Failure{Reason: "lost", Message: "it ended while it was paused", Time: e.clock.Now()}
		if exit != nil {
			f.Reason, f.Message, f.Time = exit.Reason, exit.Message, exit.Time
		}
		e.setFailed(ctx, sb, f)
		return e.dropImage(row.ID)
	case Resuming:
		if !runs {
			break
		}
		spec, _, err := e.loadSpec(ctx, row.ID)
		if err != nil {
			return err
		}
		img, err := e.pinnedImage(ctx, &row)
		if err != nil {
			return err
		}
		if e.greet(ctx, bootRequest{row: &row, spec: spec, image: img, event: e.resumeEvent(row.ID, "resume")}) != nil {
			break // from the image again
		}
		return e.resumed(ctx, sb, e.event("warren", "sandbox.running", &row, "resumed; the server was started again meanwhile"))
	}
	if err := e.removeFrom(ctx, row.Driver, row.ID); err != nil {
		return err
	}
	if State(row.State) == Paused {
		return nil
	}
	return e.enter(ctx, sb, Paused, e.event("warren", "sandbox.paused", &row, "after a restart of the server"))
}

var errPauseInterrupted = fmt.Errorf("the server ended while the sandbox was being paused: %w", warren.ErrUnavailable)

// dropImages removes images of sandboxes that are not paused, such as one that a crash left beside its resumed sandbox.
// The caller holds mu.
func (e *Engine) dropImages(do func(func())) error {
	if e.opts.PauseDir == "" {
		return nil
	}
	if err := os.MkdirAll(e.opts.PauseDir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(e.opts.PauseDir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		name, owes := strings.CutSuffix(d.Name(), owed)
		id := warren.SandboxID(strings.TrimSuffix(strings.TrimSuffix(name, unfinished), turned))
		if sb := e.boxes[id]; sb != nil {
			if owes {
				switch sb.state() {
				case Creating, RollingBack, Failed:
					continue // no execution has had it yet
				}
				// At once: the next cold start must not have it again.
				if err := os.RemoveAll(filepath.Join(e.opts.PauseDir, d.Name())); err != nil {
					return err
				}
				continue
			}
			if sb.state() == Paused && strings.HasSuffix(d.Name(), unfinished) {
				// Of a rollback that was cut short before it was decided. At once, for the next one makes it again.
				if err := os.RemoveAll(filepath.Join(e.opts.PauseDir, d.Name())); err != nil {
					return err
				}
				continue
			}
			switch sb.state() {
			case Pausing, Paused, Resuming, RollingBack:
				continue
			}
			if d := e.opts.Drivers[sb.row.Driver]; d == nil {
				continue // its true state is only known with its driver
			}
		}
		path := filepath.Join(e.opts.PauseDir, d.Name())
		do(func() {
			if err := os.RemoveAll(path); err != nil {
				e.log.Warn("image without a paused sandbox not removed", "error", err)
			}
		})
	}
	return nil
}
