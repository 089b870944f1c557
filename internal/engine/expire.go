package engine

import (
	"container/heap"
	"context"
	"fmt"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// timers is a heap of sandboxes by when they have to be looked at, which may be earlier than they expire: a use does
// not move its sandbox in the heap, it is looked at and put back.
type timers []timerEntry

type timerEntry struct {
	at int64
	sb *sandbox
}

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at < t[j].at }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].sb.timer, t[j].sb.timer = i, j
}

// Push is for container/heap.
func (t *timers) Push(x any) {
	e := x.(timerEntry)
	e.sb.timer = len(*t)
	*t = append(*t, e)
}

// Pop is for container/heap.
func (t *timers) Pop() any {
	old := *t
	e := old[len(old)-1]
	e.sb.timer = -1
	old[len(old)-1] = timerEntry{}
	*t = old[:len(old)-1]
	return e
}

func (t *timers) remove(sb *sandbox) {
	if sb.timer >= 0 && sb.timer < len(*t) && (*t)[sb.timer].sb == sb {
		heap.Remove(t, sb.timer)
	}
	sb.timer = -1
}

// deadline returns when sb expires or is paused as things stand, and why. The caller holds mu.
func (e *Engine) deadline(sb *sandbox) (d due) {
	s := sb.state()
	if s == Creating || s == Deleting {
		return d
	}
	d = e.hardDeadline(sb)
	if s != Running && s != Failed && s != Paused {
		return d // the end of its life ends what is under way
	}
	if sb.row.Idle > 0 && s != Paused { // which costs nothing that a timeout could save
		if idle := e.idleDue(sb, s); idle.at != 0 && (d.at == 0 || idle.at < d.at) {
			return idle
		}
	}
	return d
}

// hardDeadline returns when the lifetime or the TTL of sb is over, which no use puts off. The caller holds mu.
func (e *Engine) hardDeadline(sb *sandbox) (d due) {
	row := &sb.row
	if at, capped := e.lifeCap.ends(row); capped {
		d = due{at: at, why: fmt.Sprintf("the longest lifetime that the server allows (max_lifetime, %s) is over", e.lifeCap.Limit)}
	} else if at != 0 {
		d = due{at: at, why: "its longest lifetime is over"}
	}
	if row.Expires == 0 {
		return d
	}
	ttl := due{at: row.Expires, why: "its time to live is over"}
	if IdleAction(row.TTLAction) == IdlePause {
		if sb.state() != Running {
			return d // nothing of it runs, and a resume begins its time anew
		}
		ttl.pause, ttl.ttl = true, true
		if sb.pauseFailures > 0 {
			ttl.at = max(ttl.at, sb.held) // not again at once
		}
	}
	if d.at == 0 || ttl.at < d.at {
		return ttl
	}
	return d
}

// renewTTL begins the time to live of a sandbox anew that was paused when it was over, and now is to run. The caller holds mu.
func (e *Engine) renewTTL(row *store.Sandbox) {
	if now := e.line.now(); IdleAction(row.TTLAction) == IdlePause && row.TTL > 0 && row.Expires != 0 && row.Expires <= now {
		row.Expires = now + int64(row.TTL)
	}
}

// look is when sb has to be looked at for what is due. The caller holds mu.
func (d due) look(row *store.Sandbox) int64 {
	if d.pause && !d.ttl {
		return d.at - int64(lookTime(row))
	}
	return d.at
}

// schedule puts sb where it belongs in the heap. The caller holds mu.
func (e *Engine) schedule(sb *sandbox) {
	e.timers.remove(sb)
	d := e.deadline(sb)
	if d.at == 0 {
		return
	}
	heap.Push(&e.timers, timerEntry{max(d.look(&sb.row), e.line.grace), sb})
	if sb.timer == 0 {
		select {
		case e.kick <- struct{}{}:
		default:
		}
	}
}

// expiryLoop deletes what has expired, and pauses what is idle.
func (e *Engine) expiryLoop() {
	for {
		wait := e.expire()
		select {
		case <-e.kick:
		case <-e.clock.After(wait):
		case <-e.ctx.Done():
			return
		}
	}
}

// expire begins the deletion or the pause of all that is due, and returns how long nothing else will. Whether a sandbox is in
// use and that it is being deleted are decided under one lock: a use that has begun is never cut off by idling, one that
// comes later finds the sandbox deleting.
func (e *Engine) expire() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.line.now()
	for len(e.timers) > 0 && e.timers[0].at <= now {
		sb := e.timers[0].sb
		d := e.deadline(sb)
		switch {
		case d.at == 0:
			e.timers.remove(sb)
		case max(d.look(&sb.row), e.line.grace) > now:
			e.schedule(sb)
		case sb.op != nil || d.pause && !d.ttl && sb.looked:
			// What is under way puts off no end of a life: it is ended as a delete by hand ends it.
			if end := e.hardDeadline(sb); sb.op != nil && sb.op.cancel != nil && end.at != 0 && end.at <= now && !end.pause {
				sb.op.cancel()
			}
			e.timers[0].at = now + int64(100*time.Millisecond)
			heap.Fix(&e.timers, 0)
		case d.ttl:
			e.timers.remove(sb)
			if e.beginPause(sb, pauseCause{reason: PauseTTL, message: d.why}) == nil {
				return time.Hour // closing
			}
		case d.pause:
			if !e.beginLook(sb, d) {
				return time.Hour // closing
			}
		default:
			e.timers.remove(sb)
			if e.beginDelete(sb, "warren", "sandbox.expire", d.why, false) == nil {
				return time.Hour // closing
			}
			e.metrics.expired.Inc()
		}
	}
	if len(e.timers) == 0 {
		return time.Hour
	}
	return min(max(time.Duration(e.timers[0].at-now), time.Millisecond), time.Hour)
}

// heartbeat is how often the time line and the activity of sandboxes are saved.
const heartbeat = 30 * time.Second

func (e *Engine) heartbeatLoop() {
	for {
		ctx, cancel := context.WithTimeout(e.ctx, heartbeat)
		if err := e.saveActivity(ctx); err != nil && e.ctx.Err() == nil {
			e.log.Warn("heartbeat", "error", err)
		}
		e.keepHeads(ctx)
		cancel()
		e.coolPool(false, "")
		e.mu.Lock()
		e.sizeStandbys()
		e.mu.Unlock()
		select {
		case <-e.clock.After(heartbeat):
		case <-e.ctx.Done():
			return
		}
	}
}

// saveActivity writes the time line and who was active since it was last written, and forgets old keys. It is called by
// the heartbeat, and once more when that has ended.
func (e *Engine) saveActivity(ctx context.Context) error {
	since, now := e.saved, e.line.now()
	type use struct {
		id warren.SandboxID
		at time.Time
	}
	var used []use
	e.mu.Lock()
	for _, sb := range e.boxes {
		if sb.stored && (sb.active >= since || sb.inUse()) && sb.state() == Running {
			if sb.inUse() {
				sb.row.LastActive = e.clock.Now()
			}
			used = append(used, use{sb.row.ID, sb.row.LastActive})
		}
	}
	e.mu.Unlock()
	tokens := e.usedTokens()
	// In parts, so that a large fleet does not stop the writer.
	const part = 200
	for len(used) > part {
		now := used[:part]
		used = used[part:]
		if err := e.store.Update(ctx, func(tx *store.Tx) error {
			for _, u := range now {
				if err := tx.SetActive(u.id, u.at); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	err := e.store.Update(ctx, func(tx *store.Tx) error {
		for _, u := range used {
			if err := tx.SetActive(u.id, u.at); err != nil {
				return err
			}
		}
		for id, at := range tokens {
			if err := tx.SetTokenUsed(id, at); err != nil {
				return err
			}
		}
		if err := tx.DeleteKeysBefore(e.clock.Now().Add(-keyLife)); err != nil {
			return err
		}
		return e.line.save(tx)
	})
	if err == nil {
		e.saved = now
	}
	return err
}
