package engine

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// An idle sandbox is paused or removed. It is idle when nobody is attached to it: no call is under way and no command is
// followed, silent or not. For a pause, which ends what it finds, more is asked: a connection to one of its ports counts only
// by the bytes that it carries, processes that work keep it awake, what it sends and receives over its network card as well, and so does a process
// that asked the guest for it. A removal
// asks nothing more, since it is for sandboxes that nobody will come back to.

// IdleAction says what the idle timeout of a sandbox does, or its TTL.
type IdleAction string

// The idle actions. The empty one pauses where the driver can, and else deletes; of a TTL it deletes.
const (
	IdlePause  IdleAction = "pause"
	IdleDelete IdleAction = "delete"
)

// Why a sandbox is paused.
const (
	PauseAsked  = "asked"
	PauseIdle   = "idle"
	PauseTTL    = "ttl"
	PauseMemory = "memory"
)

// pauseCause is why a sandbox is being paused and how that is recorded; the zero value is a pause that was asked for.
type pauseCause struct {
	reason, action, message string
	fields                  map[string]string
}

// event is the first event of the pause.
func (p pauseCause) event(e *Engine, actor string, row *store.Sandbox) *store.Event {
	action := p.action
	if action == "" {
		action = "sandbox.pause"
	}
	ev := e.event(actor, action, row, p.message)
	ev.Fields = p.fields
	return ev
}

// checkAction says whether a driver can do what is wished of what, the idle timeout or the TTL.
func (e *Engine) checkAction(what string, a IdleAction, name string) error {
	switch a {
	case "", IdleDelete:
		return nil
	case IdlePause:
		if _, err := e.snapshotter(name); err != nil {
			return fmt.Errorf("%s %s: %w", what, quote(string(a)), err)
		}
		return nil
	}
	return invalid(what, string(a), "want pause or delete")
}

// idleAction is what the idle timeout of a sandbox does.
func (e *Engine) idleAction(row *store.Sandbox) IdleAction {
	if row.IdleAction != "" {
		return IdleAction(row.IdleAction)
	}
	if _, err := e.snapshotter(row.Driver); err == nil {
		return IdlePause
	}
	return IdleDelete
}

// attached reports whether somebody uses the sandbox other than by a connection to one of its ports. The caller holds mu.
func (sb *sandbox) attached() bool {
	uses, answered := sb.uses, sb.answered
	for u := range sb.dialled {
		uses--
		if u.answered {
			answered--
		}
	}
	return answered > 0 || uses > 0 && !sb.silent
}

// lastUse is when somebody was last there, by the measure of a pause. The caller holds mu.
func (sb *sandbox) lastUse(now int64) int64 {
	if sb.attached() {
		return now
	}
	last := sb.active
	for u := range sb.dialled {
		last = max(last, u.traffic.Load())
	}
	return last
}

// due is what happens to a sandbox, when and why, if nothing else happens until then.
type due struct {
	at    int64 // 0 for never
	why   string
	pause bool
	// ttl is a pause that comes whether somebody uses the sandbox or not.
	ttl bool
}

// idleDue is when the idle timeout of a sandbox is over. The caller holds mu.
func (e *Engine) idleDue(sb *sandbox, s State) due {
	now := e.line.now()
	if e.idleAction(&sb.row) == IdleDelete {
		last := sb.active
		if sb.inUse() {
			last = now
		}
		return due{at: last + int64(sb.row.Idle), why: "it was idle for " + sb.row.Idle.String()}
	}
	if s == Failed {
		return due{} // nothing of it runs, and it is not to be removed
	}
	at := max(max(sb.lastUse(now), sb.awake)+int64(sb.row.Idle), sb.held)
	return due{at: at, why: "it was idle for " + sb.row.Idle.String(), pause: true}
}

// maxLook is the longest time over which the use of the processor is measured before a pause.
const maxLook = 5 * time.Second

// lookTime is how long before its idle timeout is over a sandbox is looked at more closely.
func lookTime(row *store.Sandbox) time.Duration { return min(row.Idle/2, maxLook) }

// beginLook looks whether a sandbox whose idle timeout is almost over is idle. The caller holds mu, and has it at the top of the heap.
func (e *Engine) beginLook(sb *sandbox, d due) bool {
	if !e.spawn(func() { e.pauseIdle(sb, d) }) {
		return false
	}
	sb.looked = true
	e.timers.remove(sb)
	if d := e.hardDeadline(sb); d.at != 0 {
		heap.Push(&e.timers, timerEntry{max(d.at, e.line.grace), sb})
	}
	return true
}

// pauseIdle pauses a sandbox that is found idle when its timeout is over, or puts the timeout off. Uses come and go
// meanwhile; that there is none and that it is paused are decided under one lock.
func (e *Engine) pauseIdle(sb *sandbox, d due) {
	e.mu.Lock()
	row := sb.row
	e.mu.Unlock()
	wait := max(time.Duration(d.at-e.line.now()), lookTime(&row)/2)
	w := e.look(&row, wait)
	e.mu.Lock()
	defer e.mu.Unlock()
	sb.looked = false
	if sb.gone || e.closing {
		return
	}
	defer e.schedule(sb)
	if sb.state() != Running || sb.op != nil {
		return
	}
	now := e.line.now()
	if w.busy {
		sb.awake = now
	}
	sb.awake = max(sb.awake, w.traffic)
	// A hold may end long before its limit, so the next look comes after another idle timeout.
	sb.held = min(w.held, sb.lastUse(now)+int64(e.opts.MaxHold), now+int64(row.Idle))
	if d = e.deadline(sb); !d.pause || d.at > now {
		return
	}
	e.beginPause(sb, pauseCause{reason: PauseIdle, message: d.why})
}

// beginPause pauses a running sandbox that nothing holds. The caller holds mu.
func (e *Engine) beginPause(sb *sandbox, why pauseCause) *operation {
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
	op := newOperation("pause", cancel)
	if !e.spawn(func() {
		err := e.runPause(ctx, sb, "warren")
		e.mu.Lock()
		if err != nil && sb.state() == Running {
			// Not again at once: each attempt stops it for a while.
			sb.pauseFailures++
			sb.held = e.line.now() + int64(min(time.Minute<<min(sb.pauseFailures-1, 6), time.Hour))
			e.schedule(sb)
		} else if err == nil {
			sb.pauseFailures = 0
		}
		e.mu.Unlock()
		e.finish(sb, op, err)
	}) {
		cancel()
		return nil
	}
	sb.op, sb.cause = op, why
	e.setState(sb, Pausing)
	e.timers.remove(sb)
	return op
}

// work is what a look at a sandbox that nobody uses has found.
type work struct {
	busy bool  // its processes use the processor
	held int64 // line reading until which a process in it wants it awake, 0 for none
	// traffic is the line reading of the last byte that its network card carried, 0 for none.
	traffic int64
}

// guestWait is how long a guest may take to tell whether its sandbox is held. One that does not say holds nothing.
const guestWait = 2 * time.Second

// look measures for a while what a sandbox does, and asks its guest.
func (e *Engine) look(row *store.Sandbox, wait time.Duration) (w work) {
	before, ok := e.cpuTime(row)
	began := e.line.now()
	select {
	case <-e.clock.After(wait):
	case <-e.ctx.Done():
		return work{busy: true}
	}
	if after, still := e.cpuTime(row); ok && still {
		took := max(e.line.now()-began, 1)
		w.busy = int64(after-before)*1000/took >= int64(e.opts.IdleCPUMillis)
	}
	ctx, cancel := context.WithTimeout(e.ctx, guestWait)
	defer cancel()
	if e.hasCard(row.ID) {
		if quiet, err := e.opts.Network.Quiet(ctx, row.ID); err == nil {
			w.traffic = max(e.line.now()-int64(quiet), 1)
		} else if !errors.Is(err, warren.ErrNotFound) {
			e.log.Warn("the gateway does not say whether an idle sandbox has traffic", "sandbox", row.ID, "error", err)
		}
	}
	m, err := guestMetrics(ctx, e.opts.Drivers[row.Driver], row.ID)
	if err != nil {
		e.log.Debug("the guest of an idle sandbox does not say whether it is held", "sandbox", row.ID, "error", err)
		return w
	}
	if t, err := time.Parse(time.RFC3339Nano, m.HoldUntil); err == nil {
		if d := t.Sub(e.clock.Now()); d > 0 {
			w.held = e.line.now() + int64(min(d, e.opts.MaxHold))
		}
	}
	if !ok {
		// A driver that cannot measure; the guest tells what was used since it was last asked.
		w.busy = m.CPUUsed/100*float64(m.CPUs)*1000 >= float64(e.opts.IdleCPUMillis)
	}
	return w
}

// cpuTime is the processor time that a sandbox has used, if its driver can tell.
func (e *Engine) cpuTime(row *store.Sandbox) (time.Duration, bool) {
	s, ok := driver.As[driver.Statser](e.opts.Drivers[row.Driver])
	if !ok {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(e.ctx, guestWait)
	defer cancel()
	st, err := s.Stats(ctx, row.ID)
	if err != nil {
		return 0, false
	}
	return st.CPUTime, true
}

type comingBackKey struct{}

// ComingBack marks the context of a call that goes on with what was cut off, or was under way before. Such a call does not
// resume a sandbox that somebody, or its TTL, has paused: clients that were attached to it come back within milliseconds, and would undo
// every pause.
func ComingBack(ctx context.Context) context.Context {
	return context.WithValue(ctx, comingBackKey{}, true)
}

// mayResume says whether a call resumes a paused sandbox. The caller holds mu.
func mayResume(ctx context.Context, sb *sandbox) error {
	cut := sb.row.PauseReason != PauseIdle && sb.row.PauseReason != PauseMemory // it may have been in use, as with PauseAsked and PauseTTL
	if sb.row.NoAutoResume || cut && ctx.Value(comingBackKey{}) != nil {
		return pausedError(sb)
	}
	return nil
}

// pausedError says that a sandbox is paused. The caller holds mu.
func pausedError(sb *sandbox) error {
	return fmt.Errorf("sandbox %s is paused; `warren resume %s`: %w", sb.label(), sb.label(), warren.ErrState)
}
