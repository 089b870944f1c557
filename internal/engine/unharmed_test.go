package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver/fake"
)

// TestStuckRollbackKeepsSnapshot deletes the snapshot that a rollback is on its way to which does not get on.
func TestStuckRollbackKeepsSnapshot(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	r.snapshotNow("box", "p1")
	r.mark("box", "two")
	r.snapshotNow("box", "p2")
	r.mark("box", "three")
	r.world.Inject(fake.OpDelete, fake.Fault{Err: errors.New("busy")})
	if _, err := r.Rollback(ctx, alice, "box", "p2"); err == nil {
		t.Fatal("a rollback whose sandbox cannot be removed succeeds")
	}
	// Whether a try is under way or not.
	for range 5 {
		if err := r.DeleteSnapshot(ctx, alice, "p2", false); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "box") {
			t.Errorf("delete of what a rollback needs: %v", err)
		}
		time.Sleep(60 * time.Millisecond)
	}
	r.world.Inject(fake.OpDelete, fake.Fault{})
	eventually(t, "the rollback gets on", func() bool {
		got, err := r.Get(ctx, alice, "box")
		return err == nil && got.State != RollingBack
	})
	if got := r.word("box"); got != "two" {
		t.Errorf("after the rollback it holds %q", got)
	}
	if err := r.DeleteSnapshot(ctx, alice, "p2", false); err != nil {
		t.Error(err)
	}
}

// TestThawIsTriedAgain has a sandbox that stands still not run on at the first try, of a pause that fails and of a fork.
func TestThawIsTriedAgain(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	full := errors.New("the disk is full")
	r.world.Inject(fake.OpSnapshot, fake.Fault{Err: full, Times: 1})
	r.world.Inject(fake.OpThaw, fake.Fault{Err: full, Times: 1})
	if _, err := r.Pause(ctx, alice, "box"); err == nil {
		t.Error("a pause that cannot be written succeeds")
	}
	answers := func(what string) {
		t.Helper()
		got, err := r.Get(ctx, alice, "box")
		if err != nil || got.State != Running {
			t.Fatalf("after %s it is %+v, %v", what, got, err)
		}
		conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
		if err != nil {
			t.Fatalf("after %s: %v", what, err)
		}
		conn.Close()
	}
	answers("a pause that failed")
	r.world.Inject(fake.OpThaw, fake.Fault{Err: full, Times: 1})
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "box"}, nil); err != nil {
		t.Error(err)
	}
	answers("a fork")
	// A delete does not wait for it for ever.
	r.world.Inject(fake.OpThaw, fake.Fault{Err: full})
	go r.Snapshot(ctx, alice, SnapshotRequest{ID: "box"}, nil)
	time.Sleep(300 * time.Millisecond)
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "box"}); err != nil {
		t.Error(err)
	}
}

// TestStopInSnapshot ends the server in order while a sandbox stands still for a snapshot: it runs on.
func TestStopInSnapshot(t *testing.T) {
	r := prepareRig(t, t.TempDir(), nil)
	r.start()
	sb := r.create(alice, Spec{Name: "box"})
	r.world.Inject(fake.OpSaveRoot, fake.Fault{Latency: 3 * time.Second})
	done := make(chan error, 1)
	go func() {
		_, err := r.Snapshot(context.Background(), alice, SnapshotRequest{ID: "box", FilesOnly: true}, nil)
		done <- err
	}()
	time.Sleep(500 * time.Millisecond)
	r.stop()
	if err := <-done; err == nil {
		t.Error("a snapshot that the server's end cut short succeeds")
	}
	d := fake.New(fake.Options{World: r.world})
	defer d.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := d.Dial(ctx, sb.ID, warren.GuestPort)
	if err != nil {
		t.Fatalf("after the server has ended in order: %v", err)
	}
	c.Close()
}

// TestRollbackAgain rolls back anew after the first resume of a rollback has failed.
func TestRollbackAgain(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	r.snapshotNow("box", "snap")
	r.mark("box", "two")
	r.world.Inject(fake.OpRestore, fake.Fault{Err: errors.New("no memory"), Times: 1})
	if _, err := r.Rollback(ctx, alice, "box", "snap"); err == nil {
		t.Error("a rollback whose resume fails succeeds")
	}
	got, err := r.Rollback(ctx, alice, "box", "snap")
	if err != nil || got.State != Running || r.word("box") != "one" {
		t.Errorf("the next one: %+v holds %q, %v", got, r.word("box"), err)
	}
}

// TestToldOfRollback ends the server before the guest has been told of a rollback: it is told of that, and not of a resume.
func TestToldOfRollback(t *testing.T) {
	r := prepareRig(t, t.TempDir(), nil)
	var mu sync.Mutex
	var told []string
	var block atomic.Bool
	seen := make(chan struct{}, 10)
	r.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/init" {
				var body struct {
					Event string `json:"event"`
				}
				json.NewDecoder(req.Body).Decode(&body)
				if block.Load() {
					seen <- struct{}{}
					<-req.Context().Done()
					return
				}
				mu.Lock()
				told = append(told, body.Event)
				mu.Unlock()
			}
			w.WriteHeader(http.StatusNoContent)
		})
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "snap")
	mu.Lock()
	told = nil
	mu.Unlock()
	block.Store(true)
	go r.Rollback(context.Background(), alice, "box", "snap")
	<-seen
	r.stop()
	block.Store(false)
	r.start()
	eventually(t, "it is settled", func() bool {
		got, err := r.Get(context.Background(), alice, "box")
		return err == nil && (got.State == Running || got.State == Paused)
	})
	if got, _ := r.Get(t.Context(), alice, "box"); got.State == Paused {
		if _, err := r.Resume(t.Context(), alice, "box"); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Contains(told, "rollback") || slices.Contains(told, "resume") {
		t.Errorf("the guest was told of %q", told)
	}
}

// TestPausedFilesOnly: what a paused sandbox has changed of its root is in its memory, so that a snapshot without it would lose that without a word.
func TestPausedFilesOnly(t *testing.T) {
	ctx := t.Context()
	r := prepareRig(t, t.TempDir(), func(o *Options) { o.Drivers["fake"] = rootedDriver{o.Drivers["fake"].(*fake.Driver)} })
	r.start()
	defer r.stop()
	r.create(alice, Spec{Name: "box"})
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", FilesOnly: true}, nil); err != nil {
		t.Error(err)
	}
	r.pauseNow(r.boxNamed("box"))
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", FilesOnly: true}, nil); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren resume box") {
		t.Errorf("of a paused sandbox: %v", err)
	}
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box"}, nil); err != nil {
		t.Errorf("with its memory: %v", err)
	}
}

// TestSnapshotsAreUse: who keeps snapshots of a sandbox uses it.
func TestSnapshotsAreUse(t *testing.T) {
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box", IdleTimeout: 2 * time.Second, IdleAction: IdleDelete})
	for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(200 * time.Millisecond) {
		p, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box"}, nil)
		if err != nil {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
		if err := r.DeleteSnapshot(t.Context(), alice, string(p.ID), false); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "it is removed when nobody uses it", func() bool {
		_, err := r.Get(t.Context(), alice, "box")
		return errors.Is(err, warren.ErrNotFound)
	})
}

// TestForkHasNoIdleTimeout: one that its source does not have is no default's.
func TestForkHasNoIdleTimeout(t *testing.T) {
	r := newRig(t, func(o *Options) { o.DefaultIdleTimeout = time.Minute })
	r.create(alice, Spec{Name: "box"})
	none := time.Duration(0)
	if _, err := r.Update(t.Context(), alice, UpdateRequest{ID: "box", IdleTimeout: &none}); err != nil {
		t.Fatal(err)
	}
	f, err := r.Fork(t.Context(), alice, ForkRequest{ID: "box"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := f.Children[0].Sandbox.IdleTimeout; got != 0 {
		t.Errorf("the child has %v", got)
	}
}
