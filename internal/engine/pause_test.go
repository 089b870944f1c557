package engine

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// pauseNow pauses or fails the test.
func (r *rig) pauseNow(id warren.SandboxID) *Sandbox {
	r.t.Helper()
	sb, err := r.Pause(context.Background(), alice, string(id))
	if err != nil {
		r.t.Fatal(err)
	}
	return sb
}

func TestPauseResume(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box", Resources: Resources{CPUMillis: 1000, MemoryBytes: 1 << 30, DiskBytes: 1 << 30}})
	_, running := r.usageNow()
	p := r.pauseNow(sb.ID)
	if p.State != Paused || p.ImageSize == 0 || p.Generation != 1 {
		t.Errorf("paused: %+v", p)
	}
	if _, now := r.usageNow(); now != (usage{sandboxes: 1, disk: running.disk + p.ImageSize}) {
		t.Errorf("a paused sandbox counts for %+v, its image is %d bytes", now, p.ImageSize)
	}
	if r.world.Len() != 0 {
		t.Error("the driver still has an execution")
	}
	again := r.pauseNow(sb.ID)
	if again.State != Paused {
		t.Errorf("paused again: %+v", again)
	}
	_, err := r.Dial(ComingBack(ctx), alice, "box", warren.GuestPort)
	if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "is paused; `warren resume box`") {
		t.Errorf("dial: %v", err)
	}
	if _, err := r.Stats(ctx, alice, "box"); !errors.Is(err, warren.ErrState) {
		t.Errorf("stats: %v", err)
	}
	name := "renamed"
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "box", Name: &name}); err != nil {
		t.Errorf("update: %v", err)
	}
	for range 2 {
		got, err := r.Resume(ctx, alice, name)
		if err != nil || got.State != Running || got.ID != sb.ID || got.Generation != 1 || got.ImageSize != 0 {
			t.Fatalf("resume: %+v, %v", got, err)
		}
	}
	if _, now := r.usageNow(); now != running {
		t.Errorf("resumed, it counts for %+v, before for %+v", now, running)
	}
	conn, err := r.Dial(ctx, alice, name, warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := r.Pause(ctx, bob, string(sb.ID)); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("pause of another's: %v", err)
	}
	r.pauseNow(sb.ID)
	r.delete(alice, name)
	r.empty()
}

func TestPauseOutlivesServer(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{})
	r.pauseNow(sb.ID)
	r.stop()
	// What crashes leave beside it.
	for _, d := range []string{"s2222222222222222222", string(sb.ID) + unfinished} {
		if err := os.MkdirAll(filepath.Join(r.dir, "paused", d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r.start()
	if _, err := r.Resume(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "images of nobody are removed", func() bool {
		names, err := os.ReadDir(r.opts.PauseDir)
		return err == nil && len(names) == 0
	})
	r.delete(alice, string(sb.ID))
	r.empty()
}

// TestPauseFails lets each step fail: the sandbox runs on, and nothing is left of the image.
func TestPauseFails(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{})
	// Its files have to be on disk as well.
	r.spaces.mu.Lock()
	r.spaces.sync = errors.New("the disk is broken")
	r.spaces.mu.Unlock()
	if _, err := r.Pause(t.Context(), alice, string(sb.ID)); err == nil || !strings.Contains(err.Error(), "the disk is broken") {
		t.Errorf("pause: %v", err)
	}
	r.spaces.mu.Lock()
	r.spaces.sync = nil
	r.spaces.mu.Unlock()
	r.world.Inject(fake.OpSnapshot, fake.Fault{Err: errors.New("the disk is full"), Times: 1})
	_, err := r.Pause(t.Context(), alice, string(sb.ID))
	if err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("pause: %v", err)
	}
	got, err := r.Get(t.Context(), alice, string(sb.ID))
	if err != nil || got.State != Running {
		t.Errorf("after it: %+v, %v", got, err)
	}
	conn, err := r.Dial(t.Context(), alice, string(sb.ID), warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if names, err := os.ReadDir(r.opts.PauseDir); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}

// TestResumeDamaged says that an image is damaged, and starts the sandbox anew.
func TestResumeDamaged(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	r.pauseNow(sb.ID)
	file := filepath.Join(r.opts.PauseDir, string(sb.ID), "image.json")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[3] ^= 1
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = r.Resume(t.Context(), alice, "box")
	if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), "started anew on its workspace") {
		t.Errorf("resume: %v", err)
	}
	got, err := r.Get(t.Context(), alice, "box")
	if err != nil || got.State != Running || got.Generation != 2 {
		t.Fatalf("after it: %+v, %v", got, err)
	}
	if names, err := os.ReadDir(r.opts.PauseDir); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
	r.delete(alice, "box")
	r.empty()
}

// TestRestartOfPausedFails lets the start of a paused sandbox fail: it stays paused and its memory is not lost.
func TestRestartOfPausedFails(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	r.pauseNow(sb.ID)
	r.world.Inject(fake.OpCreate, fake.Fault{Err: errors.New("too many open files")})
	if _, err := r.Restart(t.Context(), alice, "box"); err == nil || !strings.Contains(err.Error(), "it stays paused") {
		t.Errorf("restart: %v", err)
	}
	if got, err := r.Get(t.Context(), alice, "box"); err != nil || got.State != Paused || got.Generation != 1 {
		t.Fatalf("after it: %+v, %v", got, err)
	}
	r.world.Inject(fake.OpCreate, fake.Fault{})
	if got, err := r.Resume(t.Context(), alice, "box"); err != nil || got.State != Running || got.Generation != 1 {
		t.Fatalf("resume: %+v, %v", got, err)
	}
	r.delete(alice, "box")
	r.empty()
}

// TestResumeNeedsBudget refuses a resume for which there is no room, and does it when there is.
func TestResumeNeedsBudget(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Budgets.PerUser = Budget{Memory: 1 << 30} })
	big := Spec{Resources: Resources{MemoryBytes: 1 << 30}}
	first := r.create(alice, big)
	r.pauseNow(first.ID)
	second := r.create(alice, big)
	if _, err := r.Resume(t.Context(), alice, string(first.ID)); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("resume: %v", err)
	}
	r.pauseNow(second.ID)
	if _, err := r.Resume(t.Context(), alice, string(first.ID)); err != nil {
		t.Error(err)
	}
}

func TestPauseTimeouts(t *testing.T) {
	r, clock := timedRig(t, nil)
	idle := r.create(alice, Spec{Name: "idle", IdleTimeout: time.Minute})
	r.pauseNow(idle.ID)
	ttl := r.create(alice, Spec{Name: "ttl", TTL: time.Hour})
	r.pauseNow(ttl.ID)
	clock.advance(2 * time.Hour)
	eventually(t, "the time to live ends a paused sandbox", func() bool {
		_, err := r.Get(context.Background(), alice, "ttl")
		return errors.Is(err, warren.ErrNotFound)
	})
	if got, err := r.Get(t.Context(), alice, "idle"); err != nil || got.State != Paused || !got.Expires.IsZero() {
		t.Errorf("the idle one: %+v, %v", got, err)
	}
	r.delete(alice, "idle")
	r.empty()
}

// plainDriver hides what the fake can do beyond the five methods.
type plainDriver struct{ driver.Driver }

func TestPauseUnsupported(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Drivers["fake"] = plainDriver{o.Drivers["fake"]} })
	sb := r.create(alice, Spec{})
	_, err := r.Pause(t.Context(), alice, string(sb.ID))
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("pause: %v", err)
	}
	if got, err := r.Get(t.Context(), alice, string(sb.ID)); err != nil || got.State != Running {
		t.Errorf("after it: %+v, %v", got, err)
	}
}

// TestPauseEndsConnections pauses a sandbox while a client reads: its connection ends, and the next says why.
func TestPauseEndsConnections(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{})
	conn, err := r.Dial(t.Context(), alice, string(sb.ID), warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r.pauseNow(sb.ID)
	ended := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(conn)
		ended <- err
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the connection into a paused sandbox stays open")
	}
}
