package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// TestTTLPauses pauses at the end of the TTL what is in use, and gives it its time anew with each resume.
func TestTTLPauses(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	sb := l.create(alice, Spec{Name: "box", TTL: 2 * time.Minute, TTLAction: IdlePause, IdleTimeout: time.Hour, MaxLifetime: 30 * time.Minute})
	if left := sb.Pauses.Sub(sb.Created); left != 2*time.Minute || sb.Spec.TTLAction != IdlePause {
		t.Errorf("it pauses after %s, %q", left, sb.Spec.TTLAction)
	}
	if left := sb.Expires.Sub(sb.Created); left != 30*time.Minute {
		t.Errorf("it expires after %s", left)
	}
	_, use, err := l.Hold(ctx, alice, "box")
	if err != nil {
		t.Fatal(err)
	}
	l.pass(119*time.Second, 1)
	l.runs(sb.ID, "before the end of its time")
	l.pass(2*time.Second, 1)
	l.paused(sb.ID)
	use.End()
	got, err := l.Get(ctx, alice, "box")
	if err != nil || got.PauseReason != PauseTTL || !got.Pauses.IsZero() || !got.Expires.Equal(sb.Expires) {
		t.Errorf("paused: %+v, %v", got, err)
	}
	// Its clients, which were cut off, do not undo that; others do.
	if _, _, err := l.Hold(ComingBack(ctx), alice, "box"); !errors.Is(err, warren.ErrState) {
		t.Errorf("coming back: %v", err)
	}
	l.stop()
	l.start()
	_, use, err = l.Hold(ctx, alice, "box")
	if err != nil {
		t.Fatal(err)
	}
	use.End()
	if got, err = l.Get(ctx, alice, "box"); err != nil || got.Pauses.IsZero() || got.Pauses.Sub(l.clock.Now()) > 2*time.Minute || got.Pauses.Sub(l.clock.Now()) < 119*time.Second {
		t.Errorf("resumed: it pauses at %v (now %v), %v", got.Pauses, l.clock.Now(), err)
	}
	l.pass(121*time.Second, 0)
	l.paused(sb.ID)
	// A restart of what is paused does as well.
	if _, err := l.Restart(ctx, alice, "box"); err != nil {
		t.Fatal(err)
	}
	l.pass(time.Minute, 0)
	l.runs(sb.ID, "a minute after its restart")
	l.pass(time.Minute+time.Second, 0)
	l.paused(sb.ID)
	// A longer life than the longest is not to be had, and what is paused ends as well.
	day := 24 * time.Hour
	if _, err := l.Update(ctx, alice, UpdateRequest{ID: "box", TTL: &day}); err != nil {
		t.Fatal(err)
	}
	l.pass(25*time.Minute, 0)
	eventually(t, "its life is over", func() bool {
		l.clock.advance(time.Second)
		_, err := l.Get(ctx, alice, "box")
		return errors.Is(err, warren.ErrNotFound)
	})
	why := ""
	l.Watch(ctx, operator, WatchRequest{NoFollow: true}, func(e *Event) error {
		if e.Action == "sandbox.expire" {
			why = e.Message
		}
		return nil
	})
	if why != "its longest lifetime is over" {
		t.Errorf("on record: %q", why)
	}
	l.empty()
}

func TestTTLAction(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	if _, err := l.Create(ctx, alice, CreateRequest{Spec: Spec{TTLAction: "sleep"}}, nil); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), `ttl action "sleep": want pause or delete`) {
		t.Errorf("unknown: %v", err)
	}
	l.create(alice, Spec{Name: "box", TTL: time.Minute})
	pause, remove, ttl := IdlePause, IdleDelete, 3*time.Minute
	if sb, err := l.Update(ctx, alice, UpdateRequest{ID: "box", TTLAction: &pause}); err != nil || sb.Pauses.IsZero() || !sb.Expires.IsZero() || sb.Spec.TTL != time.Minute {
		t.Errorf("%+v, %v", sb, err)
	}
	if sb, err := l.Update(ctx, alice, UpdateRequest{ID: "box", TTL: &ttl}); err != nil || sb.Pauses.Sub(l.clock.Now()) != ttl || sb.Spec.TTL != ttl {
		t.Errorf("%+v, %v", sb, err)
	}
	kids, err := l.Fork(ctx, alice, ForkRequest{ID: "box", Count: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if k := kids.Children[0].Sandbox; k == nil || k.Spec.TTLAction != IdlePause || k.Spec.TTL != ttl || k.Pauses.IsZero() {
		t.Errorf("a fork: %+v", k)
	}
	// What was changed of the source since its create holds for what is forked from it.
	none := time.Duration(0)
	yes := true
	if _, err := l.Update(ctx, alice, UpdateRequest{ID: string(kids.Children[0].Sandbox.ID), TTL: &none, KeepWorkspace: &yes}); err != nil {
		t.Fatal(err)
	}
	if kids, err = l.Fork(ctx, alice, ForkRequest{ID: string(kids.Children[0].Sandbox.ID), Count: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if k := kids.Children[0].Sandbox; k == nil || k.Spec.TTL != 0 || !k.Pauses.IsZero() || !k.Expires.IsZero() || !k.Spec.KeepWorkspace {
		t.Errorf("a fork of what has no TTL any more: %+v", k)
	}
	// One that was paused by hand has the rest of its time, and goes when it is to be deleted then, after as much time again.
	l.pauseNow(l.mustID("box"))
	l.pass(4*time.Minute, 0)
	if s := l.state(l.mustID("box")); s != Paused {
		t.Fatalf("paused by hand it is %s after its time", s)
	}
	if _, err := l.Update(ctx, alice, UpdateRequest{ID: "box", TTLAction: &remove}); err != nil {
		t.Fatal(err)
	}
	l.pass(ttl-10*time.Second, 0)
	if s := l.state(l.mustID("box")); s != Paused {
		t.Fatalf("when its time has just begun anew it is %s", s)
	}
	eventually(t, "it is removed", func() bool {
		l.clock.advance(time.Second)
		_, err := l.Get(ctx, alice, "box")
		return errors.Is(err, warren.ErrNotFound)
	})
}

func (l *lab) mustID(name string) warren.SandboxID {
	l.t.Helper()
	sb, err := l.Get(context.Background(), operator, name)
	if err != nil {
		l.t.Fatal(err)
	}
	return sb.ID
}

// TestTTLPauseFails tries again, and neither loses what it cannot pause nor stops it all the time.
func TestTTLPauseFails(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	l := newLab(t, func(o *Options) { o.Host = h })
	sb := l.create(alice, Spec{Name: "box", TTL: time.Minute, TTLAction: IdlePause})
	h.set(8<<30, 1<<30+100<<10)
	failures := func() (n int) {
		l.Watch(t.Context(), operator, WatchRequest{NoFollow: true}, func(e *Event) error {
			if e.Action == "sandbox.pause_failed" {
				n++
			}
			return nil
		})
		return n
	}
	l.pass(90*time.Second, 0)
	eventually(t, "the pause has failed", func() bool {
		l.clock.advance(10 * time.Millisecond)
		return failures() == 1 && l.state(sb.ID) == Running
	})
	h.set(8<<30, 50<<30)
	l.pass(20*time.Second, 0)
	l.runs(sb.ID, "soon after it could not be paused")
	l.pass(time.Minute, 0)
	l.paused(sb.ID)
}

func TestMaxLifetime(t *testing.T) {
	l := newLab(t, func(o *Options) { o.MaxLifetime = time.Hour })
	ctx := t.Context()
	if _, err := l.Create(ctx, alice, CreateRequest{Spec: Spec{MaxLifetime: 2 * time.Hour}}, nil); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "2h0m0s") || !strings.Contains(err.Error(), "no sandbox more than 1h0m0s") {
		t.Errorf("more than the server's: %v", err)
	}
	if _, err := l.Create(ctx, alice, CreateRequest{Spec: Spec{MaxLifetime: time.Millisecond}}, nil); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "max lifetime") {
		t.Errorf("too short: %v", err)
	}
	sb := l.create(alice, Spec{TTL: 10 * time.Hour})
	short := l.create(alice, Spec{MaxLifetime: 10 * time.Minute})
	if sb.Expires.Sub(sb.Created) != time.Hour || short.Expires.Sub(short.Created) != 10*time.Minute {
		t.Errorf("they expire after %s and %s", sb.Expires.Sub(sb.Created), short.Expires.Sub(short.Created))
	}
	l.pauseNow(sb.ID)
	l.clock.advance(61 * time.Minute)
	eventually(t, "both are gone", func() bool {
		l.clock.advance(time.Second)
		all, _, err := l.List(ctx, operator, ListRequest{})
		return err == nil && len(all) == 0
	})
	l.empty()
}

// TestEvictPaused takes the memory of what was paused for the longest when the disk is very short and the operator lets it, one at a time.
func TestEvictPaused(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	l := newLab(t, func(o *Options) { o.Host, o.EvictPaused = h, time.Hour })
	ctx := t.Context()
	old := l.create(alice, Spec{Name: "old"})
	l.pauseNow(old.ID)
	l.clock.advance(30 * time.Minute)
	again := l.create(alice, Spec{Name: "again", Restart: RestartOnFailure})
	l.pauseNow(again.ID)
	runs := l.create(alice, Spec{Name: "runs"})
	l.clock.advance(40 * time.Minute)
	h.set(8<<30, 800<<20) // short, but not very
	l.pass(20*time.Second, 0)
	if s := l.state(old.ID); s != Paused || len(l.evicted()) != 0 {
		t.Fatalf("with most of what is to be free it is %s", s)
	}
	h.set(8<<30, 400<<20)
	eventually(t, "the one that was paused longest loses its memory", func() bool { l.clock.advance(time.Second); return l.state(old.ID) == Failed })
	l.pass(20*time.Second, 0)
	if s := l.state(again.ID); s != Paused {
		t.Fatalf("what was used 40 minutes ago is %s", s)
	}
	l.runs(runs.ID, "with a full disk")
	got, err := l.Get(ctx, alice, "old")
	if err != nil || got.Failure == nil || got.Failure.Reason != FailureEvicted || !strings.Contains(got.Failure.Message, "400 MiB of 100 GiB were free") || got.ImageSize != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := os.Stat(l.imageDir(old.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its memory: %v", err)
	}
	events := l.evicted()
	if len(events) != 1 || events[0].SandboxID != old.ID || events[0].Fields["reason"] != "disk" || events[0].Fields["available"] != "419430400" {
		t.Errorf("events: %+v", events)
	}
	if _, _, err := l.Hold(ctx, alice, "old"); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "evicted: the disk of the host ran short") || !strings.Contains(err.Error(), "warren restart old") {
		t.Errorf("its next use: %v", err)
	}
	l.clock.advance(30 * time.Minute)
	eventually(t, "the other follows when its time has come", func() bool { l.clock.advance(time.Second); return l.state(again.ID) == Failed })
	h.set(8<<30, 50<<30)
	l.stop()
	l.start()
	if s := l.state(old.ID); s != Failed {
		t.Errorf("after a restart of the server it is %s", s)
	}
	// Both go on, from their workspaces.
	if _, use, err := l.Hold(ctx, alice, "again"); err != nil {
		t.Errorf("started again at its next use: %v", err)
	} else {
		use.End()
	}
	if _, err := l.Restart(ctx, alice, "old"); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"old", "again", "runs"} {
		l.delete(alice, name)
	}
	l.empty()
}

// TestEvictPausedSpares leaves alone what was used long ago and paused just now, and what would free nothing, and takes what frees
// next to nothing last.
func TestEvictPausedSpares(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	l := newLab(t, func(o *Options) { o.Host, o.EvictPaused = h, time.Hour })
	ctx := t.Context()
	kept := l.create(alice, Spec{Name: "kept"})
	l.pauseNow(kept.ID)
	if _, err := l.Snapshot(ctx, alice, SnapshotRequest{ID: "kept"}, nil); err != nil {
		t.Fatal(err)
	}
	works := l.create(alice, Spec{Name: "works"})
	small := l.create(alice, Spec{Name: "small"})
	l.pauseNow(small.ID)
	l.clock.advance(time.Minute)
	large := l.create(alice, Spec{Name: "large"})
	l.pauseNow(large.ID)
	if err := os.WriteFile(filepath.Join(l.imageDir(large.ID), "more"), make([]byte, smallImage), 0o600); err != nil {
		t.Fatal(err)
	}
	l.clock.advance(2 * time.Hour)
	l.pauseNow(works.ID)
	h.set(8<<30, 400<<20)
	for i, sb := range []*Sandbox{large, small} {
		eventually(t, "the next is evicted", func() bool { l.clock.advance(time.Second); return len(l.evicted()) > i })
		if got := l.evicted()[i].SandboxID; got != sb.ID {
			t.Fatalf("eviction %d is of %s, not of %s", i, got, sb.Name)
		}
	}
	l.pass(20*time.Second, 0)
	for _, sb := range []*Sandbox{kept, works} {
		if s := l.state(sb.ID); s != Paused {
			t.Errorf("%s is %s", sb.Name, s)
		}
	}
	l.clock.advance(time.Hour)
	eventually(t, "it has rested for long enough", func() bool { l.clock.advance(time.Second); return l.state(works.ID) == Failed })
	if got := l.evicted()[2].Message; !strings.Contains(got, "paused and unused for 1h") {
		t.Errorf("the event says %q", got)
	}
	if s := l.state(kept.ID); s != Paused {
		t.Errorf("what frees nothing is %s", s)
	}
}

// TestEvictPausedRestart has a start of the server be no use of what rests.
func TestEvictPausedRestart(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	l := newLab(t, func(o *Options) { o.Host, o.EvictPaused = h, time.Hour })
	rested := map[string]time.Duration{"long": 3 * time.Hour, "short": 10 * time.Minute}
	ids := map[string]warren.SandboxID{}
	for name, d := range rested {
		sb := l.create(alice, Spec{Name: name})
		l.pauseNow(sb.ID)
		ids[name] = sb.ID
		at := l.clock.Now().Add(-d)
		if err := os.Chtimes(l.imageDir(sb.ID), at, at); err != nil {
			t.Fatal(err)
		}
	}
	l.stop()
	l.start()
	h.set(8<<30, 400<<20)
	eventually(t, "the one is evicted", func() bool { l.clock.advance(time.Second); return len(l.evicted()) > 0 })
	if got := l.evicted()[0]; got.SandboxID != ids["long"] || !strings.Contains(got.Message, "unused for 3h") {
		t.Errorf("%s: %s", got.SandboxID, got.Message)
	}
	l.pass(20*time.Second, 0)
	if s := l.state(ids["short"]); s != Paused {
		t.Errorf("the other is %s", s)
	}
}

// TestMaxLifetimeLater gives sandboxes an end that were made before there was a limit, or under a longer one, from the start on that first
// knows of it, and forks of them no more than it allows.
func TestMaxLifetimeLater(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	l.create(alice, Spec{Name: "old"})
	l.create(alice, Spec{Name: "long", MaxLifetime: 72 * time.Hour})
	l.create(alice, Spec{Name: "short", MaxLifetime: time.Hour})
	l.clock.advance(30 * time.Minute)
	restart := func() {
		l.stop()
		l.change = func(o *Options) { o.MaxLifetime = 24 * time.Hour }
		l.start()
	}
	restart()
	want := map[string]time.Time{"old": l.clock.Now().Add(24 * time.Hour), "long": l.clock.Now().Add(24 * time.Hour), "short": l.clock.Now().Add(30 * time.Minute)}
	check := func(when string) {
		t.Helper()
		for name, end := range want {
			sb, err := l.Get(ctx, alice, name)
			if off := sb.Expires.Sub(end).Abs(); err != nil || off > time.Second {
				t.Errorf("%s %s ends at %v, want %v; %v", when, name, sb.Expires, end, err)
			}
		}
	}
	check("at first")
	l.clock.advance(10 * time.Minute)
	restart()
	check("after another start")
	for _, name := range []string{"old", "long"} {
		kids, err := l.Fork(ctx, alice, ForkRequest{ID: name, Count: 1}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if left := kids.Children[0].Sandbox.Expires.Sub(l.clock.Now()); left < 23*time.Hour || left > 24*time.Hour {
			t.Errorf("a fork of %s has %v", name, left)
		}
	}
	// What was given to them is taken back with the limit, and moves with it.
	set := func(limit time.Duration) {
		l.stop()
		l.change = func(o *Options) { o.MaxLifetime = limit }
		l.start()
	}
	first := want["old"]
	set(48 * time.Hour)
	want["old"], want["long"] = first.Add(24*time.Hour), first.Add(24*time.Hour)
	check("with more")
	set(0)
	want["old"], want["long"] = time.Time{}, first.Add(48*time.Hour).Add(-30*time.Minute)
	check("without a limit")
	set(time.Hour / 4)
	for name := range want {
		want[name] = l.clock.Now().Add(time.Hour / 4)
	}
	check("with little")
	l.clock.advance(16 * time.Minute)
	eventually(t, "they have gone", func() bool {
		l.clock.advance(time.Second)
		_, err := l.Get(ctx, alice, "old")
		return errors.Is(err, warren.ErrNotFound)
	})
}

// TestLifetimeEndsOperations has a rollback under way that gets nowhere when the sandbox's longest lifetime is over.
func TestLifetimeEndsOperations(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	sb := l.create(alice, Spec{Name: "box", MaxLifetime: time.Minute})
	l.snapshotNow("box", "snap")
	stuck := make(chan struct{})
	l.spaces.mu.Lock()
	l.spaces.stuck = stuck
	l.spaces.mu.Unlock()
	rolled := make(chan error, 1)
	go func() {
		_, err := l.Rollback(ctx, alice, "box", "snap")
		rolled <- err
	}()
	<-stuck
	eventually(t, "its life is over", func() bool {
		l.clock.advance(time.Second)
		_, err := l.Get(ctx, alice, string(sb.ID))
		return errors.Is(err, warren.ErrNotFound)
	})
	if err := <-rolled; err == nil {
		t.Error("the rollback succeeded")
	}
}
