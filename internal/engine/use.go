package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a restart, in order.
var (
	fpRestartIntent  = failpoint.New("engine.restart.intent")
	fpRestartRemoved = failpoint.New("engine.restart.removed")
	fpRestartReady   = failpoint.New("engine.restart.ready")
	fpRestartRunning = failpoint.New("engine.restart.running")
	fpFailIntent     = failpoint.New("engine.fail.recorded")
)

// Use is a use of a running sandbox. While it lasts the sandbox does not idle out, and its end is an activity, except where
// the sandbox's guest is silent: then only a use that has been answered counts.
type Use interface {
	// Answered says that the sandbox gave an answer to this use.
	Answered()
	// Unanswered says that the guest does not answer. It counts as silent until some use is answered.
	Unanswered()
	// End ends the use. Only the first call counts.
	End()
}

// Hold begins a use of a running sandbox and returns its id and the use. A sandbox that starts is waited for; one that
// failed is restarted if its policy says so, and one that is paused is resumed, see [ComingBack].
func (e *Engine) Hold(ctx context.Context, c Caller, ref string) (warren.SandboxID, Use, error) {
	sb, u, err := e.useOf(ctx, c, ref)
	if err != nil {
		return "", nil, err
	}
	return sb.row.ID, u, nil
}

func (e *Engine) useOf(ctx context.Context, c Caller, ref string) (*sandbox, *use, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	e.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	u, err := e.use(ctx, sb)
	return sb, u, err
}

// Dial connects to a port in a sandbox. The connection is a use of the sandbox, as in [Engine.Hold], until it is closed.
func (e *Engine) Dial(ctx context.Context, c Caller, ref string, port uint16) (net.Conn, error) {
	sb, u, err := e.useOf(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	conn, err := e.dial(ctx, sb, port, u)
	if err != nil {
		u.End()
		return nil, err
	}
	u.dialled()
	return &usedConn{Conn: conn, use: u}, nil
}

// DialPooled connects as [Engine.Dial] does, but the connection itself is no use: who keeps connections open between
// requests holds the sandbox during each request.
func (e *Engine) DialPooled(ctx context.Context, c Caller, ref string, port uint16) (net.Conn, error) {
	sb, u, err := e.useOf(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	defer u.End()
	return e.dial(ctx, sb, port, u)
}

// usedConn is a connection that is a use.
type usedConn struct {
	net.Conn
	use *use
}

func (u *usedConn) Read(b []byte) (int, error) {
	n, err := u.Conn.Read(b)
	u.use.carried(n)
	return n, err
}

func (u *usedConn) Write(b []byte) (int, error) {
	n, err := u.Conn.Write(b)
	u.use.carried(n)
	return n, err
}

func (u *usedConn) Close() error {
	u.use.End()
	return u.Conn.Close()
}

// CloseWrite ends the direction into the sandbox, where the driver's connections can.
func (u *usedConn) CloseWrite() error {
	if w, ok := u.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return fmt.Errorf("half-close: %w", errUnsupported)
}

// dialWait is how long the guest of a running sandbox may take to connect to a port, which is on its own loopback.
const dialWait = 30 * time.Second

// Unanswered is the error of a call that a guest leaves without an answer.
func Unanswered(label string) error {
	return &warren.Error{Kind: "unavailable", Resource: warren.ResourceGuest, Message: "the guest of sandbox " + label + " does not answer",
		Hint: "`warren restart " + label + "` begins afresh, its workspace is intact"}
}

// dial connects to a sandbox in use. When the driver says that it has died, so does the error, in full.
func (e *Engine) dial(ctx context.Context, sb *sandbox, port uint16, u *use) (net.Conn, error) {
	for try := 0; ; try++ {
		e.mu.Lock()
		id, name, label := sb.row.ID, sb.row.Driver, sb.label()
		gen := sb.row.Generation
		e.mu.Unlock()
		dctx, cancel := context.WithTimeout(ctx, e.opts.DialTimeout)
		conn, err := e.opts.Drivers[name].Dial(dctx, id, port)
		late := dctx.Err() == context.DeadlineExceeded && ctx.Err() == nil
		cancel()
		if err == nil {
			// A connection to the guest's own port says nothing yet: it is the call on it that the guest answers.
			if port != warren.GuestPort {
				u.Answered()
			}
			return conn, nil
		}
		if late {
			u.Unanswered()
			return nil, Unanswered(label)
		}
		dead := errors.Is(err, warren.ErrState) || errors.Is(err, warren.ErrNotFound)
		if !dead || try > 0 {
			if errors.Is(err, warren.ErrNotFound) {
				err = fmt.Errorf("it ended meanwhile: %w", warren.ErrState)
			}
			return nil, fmt.Errorf("dial port %d of sandbox %s: %w", port, label, err)
		}
		// Nobody has told us yet. Record it; then, by its policy, a new execution takes the call, or an error says why.
		if err := e.died(ctx, sb, gen, nil); err != nil {
			return nil, err
		}
		again, err := e.use(ComingBack(ctx), sb)
		if err != nil {
			return nil, err
		}
		again.End() // the caller's own use goes on
	}
}

// use counts a use of sb, which is running when it returns.
func (e *Engine) use(ctx context.Context, sb *sandbox) (*use, error) {
	for {
		e.mu.Lock()
		if sb.gone {
			e.mu.Unlock()
			return nil, notFound("sandbox", string(sb.row.ID))
		}
		op := sb.op
		switch {
		case sb.state() == Deleting:
			e.mu.Unlock()
			return nil, fmt.Errorf("sandbox %s is being deleted: %w", sb.label(), warren.ErrState)
		// Before a rollback has all that it needs the sandbox runs on, and may do so after it.
		case sb.state() == Running && (op == nil || op.kind == "update" || op.kind == "snapshot" || op.kind == "fork" || op.kind == "rollback"):
			sb.uses++
			e.mu.Unlock()
			return &use{e: e, sb: sb}, nil
		case sb.settling() != nil:
			err := sb.settling()
			e.mu.Unlock()
			return nil, err
		case op != nil:
			e.mu.Unlock()
			select {
			case <-op.done:
			case <-op.first:
			case <-op.waits:
				continue // which says why
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			if (op.kind == "restart" || op.kind == "resume") && op.err != nil {
				return nil, op.err
			}
		case sb.state() == Paused:
			err := mayResume(ctx, sb)
			e.mu.Unlock()
			if err == nil {
				err = e.shift(ctx, sb, sb.row.Owner, "resume", Paused, Running, Resuming, e.runResume)
			}
			if err != nil {
				return nil, err
			}
		case sb.state() == RollingBack: // between two tries
			err := sb.rollingBack(nil)
			e.mu.Unlock()
			return nil, err
		case sb.state() == Failed && RestartPolicy(sb.row.Restart) == RestartOnFailure && sb.row.Damaged == "":
			if wait := time.Duration(sb.notBefore - e.line.now()); wait > 0 {
				err := fmt.Errorf("sandbox %s failed %d times in a row soon after its start (last: %s); it is not started again for %s, or `warren restart %s` starts it now: %w",
					sb.label(), sb.failures, reason(&sb.row), wait.Round(time.Second), sb.label(), warren.ErrUnavailable)
				e.mu.Unlock()
				return nil, err
			}
			e.mu.Unlock()
			if err := e.restart(ctx, sb, sb.row.Owner, false); err != nil {
				return nil, err
			}
		default:
			err := failedError(sb)
			e.mu.Unlock()
			return nil, err
		}
	}
}

// use implements [Use]. Its fields are guarded by the engine's mu.
type use struct {
	e              *Engine
	sb             *sandbox
	answered, over bool
	// traffic is when a connection last carried something, as a line reading.
	traffic atomic.Int64
}

// dialled makes the use one of a connection.
func (u *use) dialled() {
	u.traffic.Store(u.e.line.now())
	u.e.mu.Lock()
	defer u.e.mu.Unlock()
	if u.sb.dialled == nil {
		u.sb.dialled = map[*use]struct{}{}
	}
	u.sb.dialled[u] = struct{}{}
}

// carried notes that a connection has carried n bytes.
func (u *use) carried(n int) {
	if n > 0 {
		u.traffic.Store(u.e.line.now())
	}
}

// Answered implements [Use].
func (u *use) Answered() {
	u.e.mu.Lock()
	defer u.e.mu.Unlock()
	u.sb.silent = false
	if !u.answered && !u.over {
		u.answered = true
		u.sb.answered++
	}
}

// Unanswered implements [Use].
func (u *use) Unanswered() {
	u.e.mu.Lock()
	defer u.e.mu.Unlock()
	if !u.answered {
		u.sb.silent = true
	}
}

// End implements [Use].
func (u *use) End() {
	u.e.mu.Lock()
	defer u.e.mu.Unlock()
	if u.over {
		return
	}
	u.over = true
	u.sb.uses--
	delete(u.sb.dialled, u)
	if u.answered {
		u.sb.answered--
	} else if u.sb.silent {
		return
	}
	u.sb.active = u.e.line.now()
	u.sb.row.LastActive = u.e.clock.Now()
}

// inUse reports whether a use keeps the sandbox from its idle timeout. The caller holds mu.
func (sb *sandbox) inUse() bool { return sb.answered > 0 || sb.uses > 0 && !sb.silent }

// reason says in words how an execution ended.
func reason(row *store.Sandbox) string {
	f := row.Failure
	if f == nil {
		return "for an unknown reason"
	}
	more := ""
	if f.Message != "" {
		more = ": " + f.Message
	}
	switch f.Reason {
	case "oom":
		return fmt.Sprintf("ended by the host: out of memory (limit %s)", size(row.Memory))
	case "killed":
		return "killed from outside" + more
	case "exited":
		return "ended by its own guest" + more
	case "lost":
		if more == "" {
			more = ", nobody saw how it ended"
		}
		return "lost" + more
	case "create":
		return "not started again" + more
	}
	return f.Reason + more
}

// failedError says why a failed sandbox cannot be used. The caller holds mu.
func failedError(sb *sandbox) error {
	if sb.row.Damaged != "" {
		return fmt.Errorf("the record of sandbox %s is damaged (%s); all that can be done is `warren rm %s`, its workspace %s can be kept: %w",
			sb.label(), sb.row.Damaged, sb.label(), sb.row.WorkspaceID, warren.ErrState)
	}
	return fmt.Errorf("sandbox %s was %s; its workspace is intact; `warren restart %s`: %w", sb.label(), reason(&sb.row), sb.label(), warren.ErrState)
}

// Restart gives a sandbox a fresh execution: same id, image, workspace and settings. The memory of a paused one is lost.
func (e *Engine) Restart(ctx context.Context, c Caller, ref string) (*Sandbox, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	// A new execution begins with a network or not at all, so one that runs is not ended for what could not be.
	if e.hasCard(sb.row.ID) {
		if _, err := e.opts.Network.Attached(ctx); err != nil {
			return nil, fmt.Errorf("sandbox %s is as it was: its network could not be made anew: %w", sb.label(), err)
		}
	}
	if err := e.restart(ctx, sb, c.User, true); err != nil {
		return nil, err
	}
	return e.Get(ctx, c, string(sb.row.ID))
}

// restart replaces the execution. Callers at the same time share one restart, which goes on when they leave. When it was
// not asked for by a person, a sandbox that is running already is left alone.
func (e *Engine) restart(ctx context.Context, sb *sandbox, actor string, asked bool) error {
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
			case sb.row.Damaged != "":
				err = failedError(sb)
			case e.opts.Drivers[sb.row.Driver] == nil:
				err = fmt.Errorf("driver %q, which sandbox %s needs, is not open in this server: %w", sb.row.Driver, sb.label(), warren.ErrUnavailable)
			case s == Running && !asked:
				e.mu.Unlock()
				return nil
			case s == Failed || s == Paused:
				err = e.reserve(sb.row.Owner, usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory})
			case s != Running:
				err = fmt.Errorf("sandbox %s is %s: %w", sb.label(), s, warren.ErrState)
			}
			if err != nil {
				e.mu.Unlock()
				return err
			}
			rctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
			op = newOperation("restart", cancel)
			was := sb.row
			sb.op = op
			e.setState(sb, Creating)
			if !e.spawn(func() { e.finish(sb, op, e.runRestart(rctx, sb, was, actor)) }) {
				e.setState(sb, State(was.State))
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
		if op.kind == "restart" {
			return op.err
		}
	}
}

// runRestart gives sb a new execution, over whose root comes the layer that it is owed, if any.
func (e *Engine) runRestart(ctx context.Context, sb *sandbox, was store.Sandbox, actor string) error {
	e.mu.Lock()
	sb.row.Generation++
	sb.row.Failure = nil
	e.renewTTL(&sb.row)
	row := sb.row
	label := sb.label()
	e.mu.Unlock()
	revert := func() {
		e.mu.Lock()
		sb.row.Generation, sb.row.Failure = was.Generation, was.Failure
		e.setState(sb, State(was.State))
		e.mu.Unlock()
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		return tx.AppendEvent(e.event(actor, "sandbox.restart", &row, ""))
	}); err != nil {
		revert()
		return cutShort(ctx, label, err)
	}
	err := fpRestartIntent.Hit()
	r := bootRequest{}
	if err == nil {
		r.root, _, err = e.owedRoot(ctx, row.ID)
	}
	if err == nil {
		err = e.execute(ctx, &row, r)
	}
	if err == nil {
		row.State, row.LastActive = string(Running), e.clock.Now()
		if err = fpRestartReady.Hit(); err == nil {
			err = e.store.Update(ctx, func(tx *store.Tx) error {
				if err := tx.UpdateSandbox(&row); err != nil {
					return err
				}
				return tx.AppendEvent(e.event(actor, "sandbox.running", &row, fmt.Sprintf("execution %d", row.Generation)))
			})
		}
	}
	if err == nil {
		fpRestartRunning.Hit() // too late to fail
		// That of a paused sandbox, which nobody wants to go on any more, and what was owed.
		if err := e.dropImage(row.ID); err != nil {
			e.log.Warn("image not removed until the next start of the server", "sandbox", row.ID, "error", err)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		sb.row.State, sb.row.LastActive, sb.row.ImageDigest = row.State, row.LastActive, row.ImageDigest
		sb.born = e.line.now()
		sb.active = sb.born
		sb.silent = false
		e.schedule(sb)
		e.log.Info("sandbox restarted", "sandbox", row.ID, "generation", row.Generation)
		return nil
	}
	if e.ctx.Err() != nil {
		return errClosing // the next Open finds a restart that was cut short
	}
	e.log.Warn("restart failed", "sandbox", row.ID, "error", err)
	// What was left of it goes now, or with the next restart or delete.
	cleanup, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	e.removeExecution(sb)
	err = cutShort(ctx, label, err)
	if was.State == string(Paused) && e.hasImage(row.ID) {
		// It may go on yet.
		revert()
		if perr := e.enter(cleanup, sb, Paused, e.event("warren", "sandbox.restart_failed", &was, err.Error())); perr == nil {
			return fmt.Errorf("%w; it stays paused", err)
		}
	}
	e.setFailed(cleanup, sb, store.Failure{Reason: "create", Message: err.Error(), Time: e.clock.Now()})
	return err
}

// cutShort names what was restarted. A delete ends a restart by its context, which is not that of those who wait for it.
func cutShort(ctx context.Context, label string, err error) error {
	if context.Cause(ctx) == context.Canceled {
		return fmt.Errorf("the restart of sandbox %s was cut short by its delete: %w", label, warren.ErrState)
	}
	return fmt.Errorf("restart sandbox %s: %w", label, err)
}

// execute removes the old execution and makes a new one, which boots, or goes on from a memory image, as r says.
func (e *Engine) execute(ctx context.Context, row *store.Sandbox, r bootRequest) error {
	dctx, cancel := context.WithTimeout(ctx, e.opts.DeleteTimeout)
	err := e.removeFrom(dctx, row.Driver, row.ID)
	cancel()
	if err != nil {
		e.metrics.driverError(row.Driver, "delete")
		return fmt.Errorf("remove the old execution: driver %s: %w", row.Driver, err)
	}
	if r.memory == "" {
		if err := fpRestartRemoved.Hit(); err != nil {
			return err
		}
	}
	spec, operator, err := e.loadSpec(ctx, row.ID)
	if err != nil {
		return err
	}
	mounts, err := e.openMounts(Caller{User: row.Owner, Operator: operator}, spec.Mounts)
	if err != nil {
		return err
	}
	defer closeMounts(mounts)
	img, err := e.pinnedImage(ctx, row)
	if err != nil {
		return err
	}
	dirs, err := e.opts.Workspaces.Get(ctx, row.WorkspaceID)
	if err != nil {
		return fmt.Errorf("workspace %s: %w", row.WorkspaceID, err)
	}
	// A checkout that was cut short goes on.
	if err := e.opts.Workspaces.Populate(ctx, row.WorkspaceID); err != nil {
		return fmt.Errorf("workspace %s: %w", row.WorkspaceID, err)
	}
	if err := e.starts.acquire(ctx, row.Owner); err != nil {
		return err
	}
	defer e.starts.release()
	r.row, r.spec, r.image, r.dirs, r.mounts = row, spec, img, dirs, mounts
	r.step = func(ctx context.Context, _ string, fn func(context.Context) error) error { return fn(ctx) }
	return e.boot(ctx, r)
}

func (e *Engine) loadSpec(ctx context.Context, id warren.SandboxID) (*Spec, bool, error) {
	rows, err := e.store.Specs(ctx, id)
	if err != nil {
		return nil, false, err
	}
	var s storedSpec
	if row, ok := rows[id]; !ok {
		return nil, false, notFound("sandbox", string(id))
	} else if err := json.Unmarshal(row.Spec, &s); err != nil {
		return nil, false, fmt.Errorf("the spec of sandbox %s is damaged (%v): %w", id, err, warren.ErrState)
	}
	return &s.Spec, s.Operator, nil
}

// setFailed records that a sandbox has no execution. The record in memory changes even when the store cannot take
// it: reconciliation would find out the same.
func (e *Engine) setFailed(ctx context.Context, sb *sandbox, f store.Failure) {
	e.mu.Lock()
	e.setState(sb, Failed)
	sb.row.Failure = &f
	row := sb.row
	if now := e.line.now(); now-sb.born < int64(soon) {
		sb.failures++
		if sb.failures > freeRestarts {
			sb.notBefore = now + int64(min(time.Second<<min(sb.failures-freeRestarts-1, 10), maxBackoff))
		}
	} else {
		sb.failures, sb.notBefore = 1, 0
	}
	e.mu.Unlock()
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		ev := e.event("warren", "sandbox.failed", &row, reason(&row))
		ev.Fields = map[string]string{"reason": f.Reason}
		return tx.AppendEvent(ev)
	}); err != nil {
		e.log.Error("failure not recorded", "sandbox", row.ID, "error", err)
	}
	fpFailIntent.Hit()
}

// A sandbox that fails within soon of its start, more than freeRestarts times in a row, waits before its policy starts
// it again, twice as long each time.
const (
	soon         = time.Minute
	freeRestarts = 3
	maxBackoff   = 5 * time.Minute
)

// died records the death of execution gen of sb, if it is true. exit is what the driver told, nil when it has to be asked.
// It returns nil when sb is recorded as failed, or is another execution by now.
func (e *Engine) died(ctx context.Context, sb *sandbox, gen uint32, exit *driver.Exit) error {
	op, err := e.hold(ctx, sb, "fail", nil)
	if err != nil {
		return err
	}
	defer func() { e.finish(sb, op, nil) }()
	e.mu.Lock()
	row := sb.row
	e.mu.Unlock()
	if State(row.State) != Running || row.Generation != gen {
		return nil
	}
	d := e.opts.Drivers[row.Driver]
	alive, found, err := execution(ctx, d, row.ID, exit != nil)
	if err != nil || alive {
		return err
	}
	if exit == nil {
		exit = found
	}
	if exit == nil {
		exit = &driver.Exit{Reason: "lost"}
	}
	f := store.Failure{Reason: exit.Reason, Message: exit.Message, Time: exit.Time}
	if f.Time.IsZero() {
		f.Time = e.clock.Now()
	}
	bg, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.DeleteTimeout)
	defer cancel()
	e.setFailed(bg, sb, f)
	e.log.Warn("sandbox failed", "sandbox", row.ID, "reason", f.Reason, "message", f.Message)
	// Its memory, mounts and overlay are of no more use. What fails here is repeated by restart or delete.
	if err := e.removeFrom(bg, row.Driver, row.ID); err != nil {
		e.metrics.driverError(row.Driver, "delete")
		e.log.Warn("dead execution not removed yet", "sandbox", row.ID, "error", err)
	}
	return nil
}

// execution asks the driver whether a sandbox lives. A dial answers at once for the dead; only when it does not, or
// when the reason is wanted, are all listed.
func execution(ctx context.Context, d driver.Driver, id warren.SandboxID, known bool) (alive bool, _ *driver.Exit, err error) {
	dctx, cancel := context.WithTimeout(ctx, time.Second)
	conn, err := d.Dial(dctx, id, warren.GuestPort)
	cancel()
	if err == nil {
		conn.Close()
		return true, nil, nil
	}
	if known && (errors.Is(err, warren.ErrState) || errors.Is(err, warren.ErrNotFound)) {
		return false, nil, nil
	}
	all, err := d.List(ctx)
	if err != nil {
		return false, nil, err
	}
	for _, s := range all {
		if s.ID == id {
			return s.State != driver.Dead, s.Exit, nil
		}
	}
	return false, nil, nil
}

// pollEvery is how often a driver that cannot watch is listed; one that can is listed too, less often, for what its
// watch may have missed.
const (
	pollEvery  = 2 * time.Second
	sweepEvery = time.Minute
)

// watchDriver records deaths until the engine closes.
func (e *Engine) watchDriver(name string, d driver.Driver) {
	var deaths <-chan driver.Status
	w, watches := driver.As[driver.Watcher](d)
	for {
		every := pollEvery
		if watches && deaths == nil {
			var err error
			if deaths, err = w.Watch(e.ctx); err == nil {
				e.sweep(name, d) // for what died before the watch began
			} else if e.ctx.Err() == nil {
				e.log.Warn("driver watch", "driver", name, "error", err)
			}
		}
		if deaths != nil {
			every = sweepEvery
		}
		select {
		case s, ok := <-deaths:
			if !ok {
				deaths = nil
				select {
				case <-e.clock.After(pollEvery):
				case <-e.ctx.Done():
				}
				break
			}
			e.noteDeath(s)
		case <-e.clock.After(every):
			e.sweep(name, d)
		case <-e.ctx.Done():
			return
		}
		if e.ctx.Err() != nil {
			return
		}
	}
}

// noteDeath handles a death beside the watch, for it may have to wait for an operation.
func (e *Engine) noteDeath(s driver.Status) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.boxes[s.ID]
	if sb == nil && s.State == driver.Dead {
		e.standbyDied(s.ID)
	}
	if sb == nil || s.State != driver.Dead || sb.state() == Deleting || sb.state() == Failed {
		return
	}
	gen, exit := sb.row.Generation, s.Exit
	if exit == nil {
		exit = &driver.Exit{Reason: "lost"}
	}
	e.spawn(func() {
		if err := e.died(e.ctx, sb, gen, exit); err != nil && e.ctx.Err() == nil && !errors.Is(err, warren.ErrNotFound) {
			e.log.Warn("death not recorded", "sandbox", s.ID, "error", err)
		}
	})
}

// sweep compares what runs with what the driver has.
func (e *Engine) sweep(name string, d driver.Driver) {
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	defer cancel()
	began := e.line.now()
	all, err := d.List(ctx)
	if err != nil {
		if e.ctx.Err() == nil {
			e.metrics.driverError(name, "list")
			e.log.Warn("driver list", "driver", name, "error", err)
		}
		return
	}
	have := make(map[warren.SandboxID]driver.Status, len(all))
	for _, s := range all {
		have[s.ID] = s
	}
	var dead []driver.Status
	e.mu.Lock()
	for id, sb := range e.boxes {
		if sb.row.Driver != name || sb.state() != Running || sb.born >= began || sb.op != nil {
			continue
		}
		if s, ok := have[id]; !ok {
			dead = append(dead, driver.Status{ID: id, State: driver.Dead})
		} else if s.State == driver.Dead {
			dead = append(dead, s)
		}
	}
	e.mu.Unlock()
	for _, s := range dead {
		e.noteDeath(s)
	}
}
