package engine

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// testHost is a machine whose room a test sets.
type testHost struct {
	mu           sync.Mutex
	memory, disk Room
}

func (h *testHost) Memory() (Room, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.memory, nil
}

func (h *testHost) Disk(string) (Room, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.disk, nil
}

func (h *testHost) set(memory, disk int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.memory, h.disk = Room{memory, 16 << 30}, Room{disk, 100 << 30}
}

func pressedLab(t *testing.T) (*lab, *testHost) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	return newLab(t, func(o *Options) { o.Host = h }), h
}

// evicted returns the events of evictions, oldest first.
func (l *lab) evicted() (all []*Event) {
	l.Watch(context.Background(), operator, WatchRequest{NoFollow: true}, func(e *Event) error {
		if e.Action == "sandbox.evicted" {
			all = append(all, e)
		}
		return nil
	})
	return all
}

func TestEviction(t *testing.T) {
	l, h := pressedLab(t)
	ctx := t.Context()
	oldest := l.create(alice, Spec{Name: "oldest"})
	l.pass(time.Minute, 0)
	middle := l.create(bob, Spec{Name: "middle", IdleTimeout: time.Hour})
	deletes := l.create(alice, Spec{Name: "deletes", IdleTimeout: time.Hour, IdleAction: IdleDelete})
	used := l.create(alice, Spec{Name: "used"})
	_, use, err := l.Hold(ctx, alice, "used")
	if err != nil {
		t.Fatal(err)
	}
	l.pass(time.Minute, 0)
	fresh := l.create(alice, Spec{Name: "fresh"})
	if n := len(l.evicted()); n != 0 {
		t.Fatalf("%d evictions with room", n)
	}
	h.set(500<<20, 50<<30)
	eventually(t, "the one that was idle longest is paused", func() bool {
		if l.state(oldest.ID) == Running { // else time stands still, or the next one follows
			l.pass(time.Second, 0)
		}
		return l.state(oldest.ID) == Paused
	})
	h.set(8<<30, 50<<30)
	l.pass(30*time.Second, 0)
	for _, sb := range []*Sandbox{middle, deletes, used, fresh} {
		l.runs(sb.ID, sb.Name+", with room again,")
	}
	events := l.evicted()
	if len(events) != 1 || events[0].SandboxID != oldest.ID || !strings.Contains(events[0].Message, "500 MiB of 16 GiB are available, less than 512 MiB") ||
		events[0].Fields["available"] != "524288000" || events[0].Fields["reason"] != "memory" || events[0].Fields["threshold"] == "" {
		t.Errorf("events: %+v", events)
	}
	if got, err := l.Get(ctx, alice, "oldest"); err != nil || got.PauseReason != PauseMemory {
		t.Errorf("%+v, %v", got, err)
	}
	// All that nobody uses, and nothing else; nothing is deleted.
	h.set(500<<20, 50<<30)
	eventually(t, "the others follow", func() bool {
		l.pass(time.Second, 0)
		return l.state(middle.ID) == Paused && l.state(deletes.ID) == Paused && l.state(fresh.ID) == Paused
	})
	l.pass(30*time.Second, 0)
	l.runs(used.ID, "in use")
	use.End()
	l.pass(5*time.Second, 0)
	l.runs(used.ID, "a moment after its use")
	eventually(t, "it follows as well", func() bool { l.pass(time.Second, 0); return l.state(used.ID) == Paused })
	// The next call finds it, as after any pause, also one that comes back.
	h.set(8<<30, 50<<30)
	if _, use, err := l.Hold(ComingBack(ctx), alice, "used"); err != nil {
		t.Error(err)
	} else {
		use.End()
	}
}

// TestEvictionOfBusy spares processes that work until hardly anything is left.
func TestEvictionOfBusy(t *testing.T) {
	l, h := pressedLab(t)
	sb := l.create(alice, Spec{})
	l.pass(time.Minute, 1)
	h.set(500<<20, 50<<30)
	l.pass(30*time.Second, 1)
	l.runs(sb.ID, "at work")
	l.hold.Store(l.clock.Now().Add(time.Hour).Format(time.RFC3339))
	l.pass(30*time.Second, 0)
	l.runs(sb.ID, "held")
	h.set(100<<20, 50<<30)
	eventually(t, "it is paused at last", func() bool { l.pass(time.Second, 1); return l.state(sb.ID) == Paused })
}

// TestShortDisk makes nothing and pauses nothing.
func TestShortDisk(t *testing.T) {
	l, h := pressedLab(t)
	ctx := t.Context()
	l.fopts.Stats = nil
	sb := l.create(alice, Spec{Name: "box", IdleTimeout: time.Minute})
	h.set(100<<20, 1<<30+100<<10)
	_, err := l.Pause(ctx, alice, "box")
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "more are needed") {
		t.Errorf("pause: %v", err)
	}
	l.pass(3*time.Minute, 0)
	l.runs(sb.ID, "without room for its memory")
	if n := len(l.evicted()); n != 0 {
		t.Errorf("%d evictions into a full disk", n)
	}
	if _, err := l.Create(ctx, alice, CreateRequest{}, nil); err != nil {
		t.Errorf("with a little room: %v", err)
	}
	h.set(100<<20, 900<<20)
	if _, err := l.Create(ctx, alice, CreateRequest{}, nil); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "900 MiB of 100 GiB are free, while 1 GiB have to stay so") {
		t.Errorf("create: %v", err)
	}
	if _, err := l.Snapshot(ctx, alice, SnapshotRequest{ID: "box"}, nil); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "while 1 GiB have to stay so") {
		t.Errorf("snapshot: %v", err)
	}
	// What is there goes on, and can be removed.
	conn, err := l.Dial(ctx, alice, "box", warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	l.delete(alice, "box")
}

// TestPausesShareDisk lets two pauses at a time not take the same bytes.
func TestPausesShareDisk(t *testing.T) {
	l, h := pressedLab(t)
	h.set(8<<30, 1<<30+3<<20/2) // room for one of 1 MiB
	a, b := l.create(alice, Spec{}), l.create(alice, Spec{})
	give, err := l.takeDisk(t.Context(), &l.boxes[a.ID].row)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Pause(t.Context(), alice, string(b.ID)); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("pause: %v", err)
	}
	give()
	l.pauseNow(b.ID)
}

func TestRoom(t *testing.T) {
	for _, tt := range []struct {
		room              Room
		set, most, expect int64
	}{
		{Room{Total: 100}, 0, 1000, 5},
		{Room{Total: 64 << 30}, 0, 512 << 20, 512 << 20},
		{Room{Total: 100}, 7, 1000, 7},
		{Room{Total: 100}, -1, 1000, 0},
	} {
		if got := tt.room.low(tt.set, tt.most); got != tt.expect {
			t.Errorf("%+v with %d, %d: %d, want %d", tt.room, tt.set, tt.most, got, tt.expect)
		}
	}
	r, err := parseMemory("MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:   300 kB\nHugePages_Total:       0\n")
	if err != nil || r != (Room{300 << 10, 1000 << 10}) {
		t.Errorf("%+v, %v", r, err)
	}
	for _, text := range []string{"", "MemTotal: x kB\n", "nonsense"} {
		if r, err := parseMemory(text); err == nil {
			t.Errorf("%q: %+v", text, r)
		}
	}
	if r, err := SystemHost().Memory(); err != nil || r.Total == 0 || r.Free == 0 || r.Free > r.Total {
		t.Errorf("this machine: %+v, %v", r, err)
	}
	if r, err := SystemHost().Disk(t.TempDir()); err != nil || r.Total == 0 || r.Free > r.Total {
		t.Errorf("this disk: %+v, %v", r, err)
	}
}
