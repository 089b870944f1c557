package engine

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/store"
)

// rootRig is a rig whose sandboxes have something in their root, with a sandbox "box" of word "two" and a snapshot "files" of word "one".
type rootRig struct {
	*rig
	mu     sync.Mutex
	layers int           // written whole
	block  chan struct{} // when set, told of each layer, which is never written then
	refuse int           // how many more are refused
}

func newRootRig(t *testing.T) *rootRig {
	t.Helper()
	r := &rootRig{rig: prepareRig(t, t.TempDir(), func(o *Options) { o.Drivers["fake"] = rootedDriver{o.Drivers["fake"].(*fake.Driver)} })}
	r.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path != "/root" {
				return
			}
			r.mu.Lock()
			block := r.block
			r.mu.Unlock()
			if block != nil {
				block <- struct{}{}
				<-req.Context().Done()
				return
			}
			n, _ := io.Copy(io.Discard, req.Body)
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.refuse > 0 {
				r.refuse--
				http.Error(w, "no room", http.StatusInsufficientStorage)
				return
			}
			if n == 6000 {
				r.layers++
			}
		})
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	r.rig.create(alice, Spec{Name: "box", Restart: RestartOnFailure})
	r.mark("box", "one")
	if _, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	r.mark("box", "two")
	return r
}

// set changes what becomes of layers from now on.
func (r *rootRig) set(block chan struct{}, refuse int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.block, r.refuse = block, refuse
}

// has checks the state of the box, how many layers were written whole, and whether one is owed.
func (r *rootRig) has(t *testing.T, when string, state State, layers int, owes bool) {
	t.Helper()
	got, err := r.Get(context.Background(), alice, "box")
	if err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	n := r.layers
	r.mu.Unlock()
	_, err = os.Stat(r.imageDir(got.ID) + owed)
	if got.State != state || n != layers || (err == nil) != owes {
		t.Errorf("%s: it is %s (%+v), %d layers were written, and one is owed: %t; want %s, %d, %t", when, got.State, got.Failure, n, err == nil, state, layers, owes)
	}
	if is := r.word("box"); is != "one" {
		t.Errorf("%s: the workspace holds %q", when, is)
	}
}

// dial makes a call, which starts the box by its policy.
func (r *rootRig) dial(t *testing.T) error {
	conn, err := r.Dial(t.Context(), alice, "box", warren.GuestPort)
	if err == nil {
		conn.Close()
	}
	return err
}

// TestRollbackRootCrash ends the server while a rollback to files writes the root: who starts the sandbox then has that root, also when the
// snapshot is gone, and the starts after that have the image's.
func TestRollbackRootCrash(t *testing.T) {
	r := newRootRig(t)
	seen := make(chan struct{}, 10)
	r.set(seen, 0)
	go r.Rollback(context.Background(), alice, "box", "files")
	select {
	case <-seen:
	case <-time.After(20 * time.Second):
		t.Fatal("the rollback writes no root")
	}
	r.stop()
	r.set(nil, 0)
	r.start()
	eventually(t, "it is settled", func() bool {
		got, err := r.Get(context.Background(), alice, "box")
		return err == nil && got.State == Failed
	})
	r.has(t, "after the crash", Failed, 0, true)
	if err := r.DeleteSnapshot(t.Context(), alice, "files", false); err != nil {
		t.Fatal(err)
	}
	r.stop() // nor is it lost with the next server
	r.start()
	if err := r.dial(t); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after the next call", Running, 1, false)
	if _, err := r.Restart(t.Context(), alice, "box"); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after a restart", Running, 1, false)
}

// TestRollbackRootRefused has the layer refused for some time: no start leaves it out.
func TestRollbackRootRefused(t *testing.T) {
	r := newRootRig(t)
	r.set(nil, 3)
	if _, err := r.Rollback(t.Context(), alice, "box", "files"); err == nil {
		t.Fatal("a root that cannot be written was not reported")
	}
	r.has(t, "after the rollback", Failed, 0, true)
	if err := r.dial(t); err == nil {
		t.Error("a call began without the root")
	}
	if _, err := r.Restart(t.Context(), alice, "box"); err == nil {
		t.Error("a restart began without the root")
	}
	r.has(t, "after two tries", Failed, 0, true)
	// What is kept of it now has the root too.
	if got, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box", Name: "again", FilesOnly: true}, nil); err != nil || got.MemorySize != 6000 {
		t.Errorf("a snapshot of what is to begin with the root: %+v, %v", got, err)
	}
	if _, err := r.Restart(t.Context(), alice, "box"); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after a restart", Running, 1, false)
	if _, err := r.Rollback(t.Context(), alice, "box", "again"); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after a rollback to the other", Running, 2, false)
}

// TestRollbackRootRestart lets the execution fail that a rollback begins, once and before the root.
func TestRollbackRootRestart(t *testing.T) {
	r := newRootRig(t)
	r.world.Inject(fake.OpCreate, fake.Fault{Err: errors.New("no memory"), Times: 1})
	if _, err := r.Rollback(t.Context(), alice, "box", "files"); err == nil {
		t.Fatal("a start that fails was not reported")
	}
	r.has(t, "after the rollback", Failed, 0, true)
	if err := r.dial(t); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after the next call", Running, 1, false)
}

// TestRollbackRootElsewhere goes to memory from where a root is owed, which is owed no more then.
func TestRollbackRootElsewhere(t *testing.T) {
	r := newRootRig(t)
	r.mark("box", "one")
	r.snapshotNow("box", "memory")
	r.set(nil, 1)
	if _, err := r.Rollback(t.Context(), alice, "box", "files"); err == nil {
		t.Fatal("a root that cannot be written was not reported")
	}
	r.has(t, "after the rollback", Failed, 0, true)
	if _, err := r.Rollback(t.Context(), alice, "box", "memory"); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after that to memory", Running, 0, false)
	r.world.Kill(r.boxNamed("box"), driver.Exit{Reason: "oom"})
	if err := r.dial(t); err != nil {
		t.Fatal(err)
	}
	r.has(t, "after a restart", Running, 0, false)
}

// TestRollbackRootDamaged starts nothing with an owed layer that is not what it was.
func TestRollbackRootDamaged(t *testing.T) {
	r := newRootRig(t)
	r.set(nil, 1)
	if _, err := r.Rollback(t.Context(), alice, "box", "files"); err == nil {
		t.Fatal("a root that cannot be written was not reported")
	}
	layer, _, err := r.owedRoot(t.Context(), r.boxNamed("box"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(layer, []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restart(t.Context(), alice, "box"); !errors.Is(err, warren.ErrState) {
		t.Errorf("restart with a damaged layer: %v", err)
	}
	r.has(t, "after that", Failed, 0, true)
	r.delete(alice, "box")
	if err := r.DeleteSnapshot(t.Context(), alice, "files", false); err != nil {
		t.Fatal(err)
	}
	r.empty()
}

// TestCreateRootCrash ends the server in creates whose execution runs, of which nobody knows whether it has the root of the snapshot: its
// key makes another. One of memory, or without a layer, is completed.
func TestCreateRootCrash(t *testing.T) {
	r := newRootRig(t)
	ctx := t.Context()
	r.snapshotNow("box", "memory")
	r.killNow("box") // with which its root is gone
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "none", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	snaps := []string{"files", "memory", "none"}
	first := map[string]*Sandbox{}
	make1 := func(snap string) (*Sandbox, error) {
		return r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "of-" + snap, Snapshot: snap}, IdempotencyKey: snap}, nil)
	}
	for _, snap := range snaps {
		var err error
		if first[snap], err = make1(snap); err != nil {
			t.Fatal(err)
		}
		// As the store has it until the guest has been told who it is.
		r.Engine.mu.Lock()
		row := r.boxes[first[snap].ID].row
		ws := r.Engine.spaces[row.WorkspaceID].row
		r.Engine.mu.Unlock()
		row.State, ws.State = string(Creating), wsCreating
		if err := r.store.Update(ctx, func(tx *store.Tx) error { return errors.Join(tx.UpdateSandbox(&row), tx.UpdateWorkspace(&ws)) }); err != nil {
			t.Fatal(err)
		}
	}
	r.stop()
	r.start()
	for _, snap := range snaps {
		got, err := make1(snap)
		if err != nil || got.State != Running || (got.ID != first[snap].ID) != (snap == "files") {
			t.Errorf("of %s: %+v, %v; it was %s", snap, got, err, first[snap].ID)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.layers != 2 {
		t.Errorf("%d layers were written for two sandboxes", r.layers)
	}
}
