package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// markFile is where the tests keep a word in a workspace.
func (r *rig) markFile(name string) string {
	sb, err := r.Get(context.Background(), alice, name)
	if err != nil {
		return filepath.Join(r.dir, "nothing", "mark")
	}
	return filepath.Join(r.spaces.path(sb.WorkspaceID), "files", "mark")
}

func (r *rig) mark(name, word string) error {
	return os.WriteFile(r.markFile(name), []byte(word), 0o644)
}

// word returns what mark has written.
func (r *rig) word(name string) string {
	b, err := os.ReadFile(r.markFile(name))
	if err != nil {
		return "-"
	}
	return string(b)
}

func (r *rig) snapshotNow(ref, name string) *Snapshot {
	r.t.Helper()
	p, err := r.Snapshot(context.Background(), alice, SnapshotRequest{ID: ref, Name: name}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func TestSnapshotRollback(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	one := r.snapshotNow("box", "one")
	if one.Kind != MemorySnapshot || one.ParentID != "" || one.SandboxID != sb.ID || one.MemorySize == 0 {
		t.Errorf("snapshot: %+v", one)
	}
	r.mark("box", "two")
	two := r.snapshotNow("box", "two")
	if two.ParentID != one.ID {
		t.Errorf("the second comes after %q, want %q", two.ParentID, one.ID)
	}
	r.mark("box", "three")
	r.stop()
	r.start()
	for _, want := range []string{"one", "two", "one"} {
		got, err := r.Rollback(ctx, alice, "box", want)
		if err != nil {
			t.Fatal(err)
		}
		if got.State != Running || got.ID != sb.ID || r.word("box") != want {
			t.Errorf("rollback to %s: %s, %q", want, got.State, r.word("box"))
		}
		r.mark("box", "later")
	}
	// A third branch off the first.
	r.mark("box", "four")
	four := r.snapshotNow("box", "four")
	if four.ParentID != one.ID {
		t.Errorf("after a rollback to the first the next comes after %q", four.ParentID)
	}
	r.pauseNow(sb.ID)
	paused := r.snapshotNow("box", "paused")
	if paused.Kind != MemorySnapshot || paused.ParentID != four.ID {
		t.Errorf("of a paused sandbox: %+v", paused)
	}
	if got, err := r.Rollback(ctx, alice, "box", "two"); err != nil || got.State != Running || r.word("box") != "two" {
		t.Errorf("rollback of a paused sandbox: %+v, %v", got, err)
	}
	r.world.Kill(sb.ID, driver.Exit{Reason: "oom"})
	eventually(t, "its death is seen", func() bool {
		got, err := r.Get(ctx, alice, "box")
		return err == nil && got.State == Failed
	})
	if got, err := r.Rollback(ctx, alice, "box", "paused"); err != nil || got.State != Running || r.word("box") != "four" || got.Failure != nil {
		t.Errorf("rollback of a failed sandbox: %+v, %v", got, err)
	}
	if list, _, err := r.ListSnapshots(ctx, alice, "box", true, 0, ""); err != nil || len(list) != 4 {
		t.Errorf("list: %d, %v", len(list), err)
	}
	if list, _, err := r.ListSnapshots(ctx, bob, "", false, 0, ""); err != nil || len(list) != 0 {
		t.Errorf("another user sees %d", len(list))
	}
	// A node goes, and what came after it hangs on what came before.
	if err := r.DeleteSnapshot(ctx, alice, "one", false); err != nil {
		t.Fatal(err)
	}
	if p, err := r.GetSnapshot(ctx, alice, "two", true); err != nil || p.ParentID != "" {
		t.Errorf("after its parent's end: %+v, %v", p, err)
	}
	r.delete(alice, "box")
	from, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "again", Snapshot: "two", Env: map[string]string{"A": "1"}}}, nil)
	if err != nil || from.SnapshotID != two.ID || r.word("again") != "two" {
		t.Fatalf("create from a snapshot whose sandbox is gone: %+v, %v", from, err)
	}
	r.delete(alice, "again")
	for _, p := range []string{"two", "four", "paused"} {
		if err := r.DeleteSnapshot(ctx, alice, p, false); err != nil {
			t.Fatal(err)
		}
	}
	r.empty()
}

// TestSnapshotBadInput asks for what cannot be: nothing changes.
func TestSnapshotBadInput(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	other := r.create(alice, Spec{Name: "other", Resources: Resources{DiskBytes: 3 << 30}})
	p := r.snapshotNow("box", "snap")
	_ = other
	r.create(bob, Spec{Name: "bobs"})
	cases := []struct {
		name, want string
		kind       error
		do         func() error
	}{
		{"a name that is taken", "snapshot", warren.ErrExists, func() error {
			_, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "snap"}, nil)
			return err
		}},
		{"a name that is none", "want 1 to 63", warren.ErrInvalid, func() error {
			_, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "No!"}, nil)
			return err
		}},
		{"a sandbox that is not there", "nothing", warren.ErrNotFound, func() error {
			_, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "nothing"}, nil)
			return err
		}},
		{"another's sandbox", "box", warren.ErrNotFound, func() error {
			_, err := r.Snapshot(ctx, bob, SnapshotRequest{ID: string(sb.ID)}, nil)
			return err
		}},
		{"rollback to what is not there", "none", warren.ErrNotFound, func() error {
			_, err := r.Rollback(ctx, alice, "box", "none")
			return err
		}},
		{"rollback of what is not there", "nothing", warren.ErrNotFound, func() error {
			_, err := r.Rollback(ctx, alice, "nothing", "none")
			return err
		}},
		{"rollback of another's", string(sb.ID), warren.ErrNotFound, func() error {
			_, err := r.Rollback(ctx, bob, string(sb.ID), string(p.ID))
			return err
		}},
		{"rollback to another's", string(p.ID), warren.ErrNotFound, func() error {
			_, err := r.Rollback(ctx, bob, "bobs", string(p.ID))
			return err
		}},
		{"rollback across disks", "disk of", warren.ErrInvalid, func() error {
			_, err := r.Rollback(ctx, alice, "other", "snap")
			return err
		}},
		{"create with another image", "leave it out", warren.ErrInvalid, func() error {
			_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Snapshot: "snap", Image: "debian"}}, nil)
			return err
		}},
		{"create with a repo", "a workspace of its own", warren.ErrInvalid, func() error {
			_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Snapshot: "snap", Repo: &RepoSource{URL: "https://example.com/r"}}}, nil)
			return err
		}},
		{"too many children", "1 to 1000", warren.ErrInvalid, func() error {
			_, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: 1001}, nil)
			return err
		}},
		{"a child's name that is taken", `"other"`, warren.ErrExists, func() error {
			_, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Name: "other"}, nil)
			return err
		}},
		{"deleting what is not there", "none", warren.ErrNotFound, func() error { return r.DeleteSnapshot(ctx, alice, "none", false) }},
	}
	for _, c := range cases {
		if err := c.do(); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	r.pauseNow(sb.ID)
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "box"}, nil); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren resume box") {
		t.Errorf("fork of a paused sandbox: %v", err)
	}
	if err := r.DeleteSnapshot(ctx, alice, "none", true); err != nil {
		t.Error(err)
	}
}

// TestCreateAgain repeats a create whose snapshot has been deleted since: it returns what the first one made.
func TestCreateAgain(t *testing.T) {
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "snap")
	req := CreateRequest{Spec: Spec{Name: "copy", Snapshot: "snap"}, IdempotencyKey: "once"}
	first, err := r.Create(t.Context(), alice, req, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.DeleteSnapshot(t.Context(), alice, "snap", false); err != nil {
		t.Fatal(err)
	}
	if again, err := r.Create(t.Context(), alice, req, nil); err != nil || again.ID != first.ID {
		t.Errorf("again: %+v, %v", again, err)
	}
	req.IdempotencyKey = "twice"
	if _, err := r.Create(t.Context(), alice, req, nil); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("with another key: %v", err)
	}
}

func TestFork(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box", Labels: map[string]string{"a": "1"}, Env: map[string]string{"X": "1"}})
	r.mark("box", "shared")
	res, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: 3, Name: "kid", Labels: map[string]string{"b": "2"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Children) != 3 || res.Kind != MemorySnapshot {
		t.Fatalf("fork: %+v", res)
	}
	tokens := map[string]bool{}
	for i, ch := range res.Children {
		if ch.Err != nil {
			t.Fatal(ch.Err)
		}
		if ch.Sandbox.Name != "kid-"+string(rune('1'+i)) || ch.Sandbox.SourceID != sb.ID || ch.Sandbox.Labels["a"] != "1" || ch.Sandbox.Labels["b"] != "2" {
			t.Errorf("child: %+v", ch.Sandbox)
		}
		if r.word(ch.Sandbox.Name) != "shared" {
			t.Errorf("child %s has %q", ch.Sandbox.Name, r.word(ch.Sandbox.Name))
		}
		r.mark(ch.Sandbox.Name, ch.Sandbox.Name)
		r.mu.Lock()
		tokens[r.boxes[ch.Sandbox.ID].row.AccessToken] = true
		tokens[r.boxes[sb.ID].row.AccessToken] = true
		r.mu.Unlock()
	}
	if len(tokens) != 4 {
		t.Errorf("%d tokens for 4 sandboxes", len(tokens))
	}
	if r.word("box") != "shared" || r.word("kid-2") != "kid-2" {
		t.Error("a write of one showed in another")
	}
	if list, _, _ := r.ListSnapshots(ctx, alice, "", false, 0, ""); len(list) != 0 {
		t.Errorf("a fork left %d snapshots", len(list))
	}
	// A fork of a fork.
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "kid-2", Name: "grandkid"}, nil); err != nil || r.word("grandkid") != "kid-2" {
		t.Errorf("a fork of a fork: %v, %q", err, r.word("grandkid"))
	}
	for _, n := range []string{"grandkid", "kid-1", "kid-2", "kid-3", "box"} {
		r.delete(alice, n)
	}
	r.empty()
}

// TestForkAtOnce lets no child's guest answer before those of all have been asked: none waits for another.
func TestForkAtOnce(t *testing.T) {
	const children = 4
	r := prepareRig(t, t.TempDir(), func(o *Options) { o.Starts, o.BootTimeout = children, 20*time.Second })
	var mu sync.Mutex
	seen := map[warren.SandboxID]bool{}
	all := make(chan struct{})
	r.fopts.Guest = func(id warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path != "/init" {
				return
			}
			mu.Lock()
			seen[id] = true
			if len(seen) == 1+children {
				close(all)
			}
			source := len(seen) == 1
			mu.Unlock()
			if source {
				return
			}
			select {
			case <-all:
			case <-req.Context().Done():
			}
		})
	}
	r.start()
	defer r.stop()
	r.create(alice, Spec{Name: "box"})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	res, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: children, All: true}, nil)
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		t.Fatalf("%v; of %d sandboxes the guests were asked", err, len(seen))
	}
	for _, ch := range res.Children {
		r.delete(alice, string(ch.Sandbox.ID))
	}
}

// TestForkFails lets a child, the snapshot and the store fail: the source runs on and nothing is left of what failed.
func TestForkFails(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	alive := func(when string) {
		t.Helper()
		conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		conn.Close()
	}
	boom := errors.New("the disk is full")
	r.world.Inject(fake.OpSnapshot, fake.Fault{Err: boom, Times: 1})
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "box"}, nil); !errors.Is(err, boom) {
		t.Errorf("fork: %v", err)
	}
	alive("after a snapshot that failed")
	r.world.Inject(fake.OpRestore, fake.Fault{Err: boom, Times: 1})
	res, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, ch := range res.Children {
		if ch.Err != nil {
			failed++
			continue
		}
		r.delete(alice, string(ch.Sandbox.ID))
	}
	if failed != 1 {
		t.Errorf("%d of 3 children failed", failed)
	}
	r.world.Inject(fake.OpRestore, fake.Fault{Err: boom, Times: 1})
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: 3, All: true}, nil); !errors.Is(err, boom) {
		t.Errorf("all or nothing: %v", err)
	}
	alive("after children that failed")
	list, _, err := r.List(ctx, alice, ListRequest{})
	if err != nil || len(list) != 1 {
		t.Errorf("%d sandboxes left (%v)", len(list), err)
	}
	r.delete(alice, "box")
	r.empty()
}

// TestForkBudget finds out before it stops the source that there is no room for the children.
func TestForkBudget(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Budgets.PerUser.Sandboxes = 3 })
	r.create(alice, Spec{Name: "box"})
	snaps := 0
	r.world.Inject(fake.OpSnapshot, fake.Fault{Err: errors.New("stopped for nothing"), Times: 1})
	var b *BudgetError
	if _, err := r.Fork(t.Context(), alice, ForkRequest{ID: "box", Count: 3}, nil); !errors.As(err, &b) {
		t.Errorf("fork: %v (%d)", err, snaps)
	}
}

// TestRollbackFails: before the decision all stays as it was; after it a retry goes on.
func TestRollbackFails(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	r.snapshotNow("box", "snap")
	r.mark("box", "two")
	r.world.Inject(fake.OpRestore, fake.Fault{Err: errors.New("no memory"), Times: 1})
	if _, err := r.Rollback(ctx, alice, "box", "snap"); err == nil || !strings.Contains(err.Error(), "stays paused") {
		t.Errorf("a restore that fails: %v", err)
	}
	got, err := r.Get(ctx, alice, "box")
	if err != nil || got.State != Paused || r.word("box") != "one" {
		t.Errorf("after it: %+v, %v, %q", got, err, r.word("box"))
	}
	if _, err := r.Resume(ctx, alice, "box"); err != nil {
		t.Fatal(err)
	}
	r.mark("box", "two")
	r.world.Inject(fake.OpDelete, fake.Fault{Err: errors.New("busy"), Times: 2})
	if _, err := r.Rollback(ctx, alice, "box", "snap"); err == nil {
		t.Error("a driver that does not delete was not reported")
	}
	eventually(t, "it is at the snapshot", func() bool {
		got, err := r.Get(ctx, alice, string(sb.ID))
		return err == nil && (got.State == Paused || got.State == Running) && r.word("box") == "one"
	})
}

// TestRollbackAcrossImages asks for snapshots of both kinds of another image: what runs stays as it is.
func TestRollbackAcrossImages(t *testing.T) {
	r := newRig(t, nil)
	r.images.add("debian", "oci")
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "memory")
	if _, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	r.create(alice, Spec{Name: "other", Image: "debian"})
	r.mark("other", "mine")
	for _, to := range []string{"memory", "files"} {
		_, err := r.Rollback(t.Context(), alice, "other", to)
		if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "taken on image host") || !strings.Contains(err.Error(), "has debian") ||
			!strings.Contains(err.Error(), "`warren create --snapshot "+to+"`") {
			t.Errorf("to %s: %v", to, err)
		}
		if got, err := r.Get(t.Context(), alice, "other"); err != nil || got.State != Running || r.word("other") != "mine" {
			t.Errorf("after %s: %+v, %v, %q", to, got, err, r.word("other"))
		}
	}
}

// TestRollbackNoRoom asks for rollbacks for which there is no room: before it is asked for, or found out by the copy. What runs goes
// on, with its memory.
func TestRollbackNoRoom(t *testing.T) {
	ctx := t.Context()
	h := &testHost{}
	h.set(8<<30, 50<<30)
	r := newRig(t, func(o *Options) { o.Host = h })
	sb := r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	r.snapshotNow("box", "memory")
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	r.mark("box", "two")
	as := func(when string, want State) {
		t.Helper()
		if got, err := r.Get(ctx, alice, "box"); err != nil || got.State != want || r.word("box") != "two" {
			t.Errorf("%s: %+v, %v, %q", when, got, err, r.word("box"))
		}
		if left, _ := filepath.Glob(filepath.Join(r.dir, "*", "*.new")); len(left) > 0 {
			t.Errorf("%s: left %q", when, left)
		}
	}
	deletes := r.world.Calls(fake.OpDelete)
	for _, state := range []State{Running, Paused} {
		for _, to := range []string{"memory", "files"} {
			h.set(8<<30, 1<<30+100<<20) // of which 1 GiB stays free, and the copy takes 200 MiB
			_, err := r.Rollback(ctx, alice, "box", to)
			if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "is as it was") || !strings.Contains(err.Error(), "200 MiB more are needed") {
				t.Errorf("rollback to %s without room: %v", to, err)
			}
			as("without room for "+to, state)
			h.set(8<<30, 50<<30)
			r.spaces.mu.Lock()
			r.spaces.replace = fmt.Errorf("copy: %w", warren.ErrExhausted)
			r.spaces.mu.Unlock()
			_, err = r.Rollback(ctx, alice, "box", to)
			if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "is as it was") {
				t.Errorf("rollback to %s with a copy that fails: %v", to, err)
			}
			as("after a copy that failed for "+to, state)
			r.spaces.mu.Lock()
			r.spaces.replace = nil
			r.spaces.mu.Unlock()
		}
		if state == Running {
			if n := r.world.Calls(fake.OpDelete); n != deletes {
				t.Errorf("an execution was removed: %d calls, %d before", n, deletes)
			}
			conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
			if err != nil {
				t.Fatal(err)
			}
			conn.Close()
			r.pauseNow(sb.ID)
		}
	}
	if got, err := r.Rollback(ctx, alice, "box", "memory"); err != nil || got.State != Running || r.word("box") != "one" {
		t.Errorf("with room: %+v, %v, %q", got, err, r.word("box"))
	}
}

// TestRollbackStuck lets the driver remove nothing while a sandbox rolls back, in one server and then in the next: calls are told why,
// and neither wait for it nor are asked to come again; a delete ends it.
func TestRollbackStuck(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "snap")
	busy := errors.New("the driver is busy today")
	r.world.Inject(fake.OpDelete, fake.Fault{Err: busy})
	if _, err := r.Rollback(ctx, alice, "box", "snap"); !errors.Is(err, busy) {
		t.Errorf("rollback: %v", err)
	}
	told := func(when string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		for what, do := range map[string]func() error{
			"dial":     func() error { _, err := r.Dial(ctx, alice, "box", 80); return err },
			"restart":  func() error { _, err := r.Restart(ctx, alice, "box"); return err },
			"pause":    func() error { _, err := r.Pause(ctx, alice, "box"); return err },
			"snapshot": func() error { _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box"}, nil); return err },
		} {
			eventually(t, "the reason is known", func() bool {
				err := do()
				if !errors.Is(err, warren.ErrState) || errors.Is(err, warren.ErrUnavailable) {
					t.Fatalf("%s: %s: %v", when, what, err)
				}
				return strings.Contains(err.Error(), busy.Error())
			})
		}
	}
	told("while it is tried again")
	r.stop()
	r.start()
	told("after a restart of the server")
	r.world.Inject(fake.OpDelete, fake.Fault{})
	r.delete(alice, "box")
	if err := r.DeleteSnapshot(ctx, alice, "snap", false); err != nil {
		t.Fatal(err)
	}
	r.empty()
}

// rootedDriver is the fake driver with something in the root of its sandboxes.
type rootedDriver struct{ *fake.Driver }

func (rootedDriver) SaveRoot(_ context.Context, _ warren.SandboxID, w io.Writer) error {
	_, err := w.Write(bytes.Repeat([]byte("layer "), 1000))
	return err
}

// TestSnapshotFilesDamaged damages the layer of a snapshot of files in each way: nothing is made of it, nothing goes back to it, and what
// runs is as it was. Of an older version, without a checksum, it is taken as it is.
func TestSnapshotFilesDamaged(t *testing.T) {
	ctx := t.Context()
	r := prepareRig(t, t.TempDir(), func(o *Options) { o.Drivers["fake"] = rootedDriver{o.Drivers["fake"].(*fake.Driver)} })
	var layers atomic.Int64
	r.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			if n, _ := io.Copy(io.Discard, req.Body); req.URL.Path == "/root" && n == 6000 {
				layers.Add(1)
			}
		})
	}
	r.start()
	defer r.stop()
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	snap, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.killNow("box") // with which its root is gone
	none, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box", Name: "none", FilesOnly: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restart(ctx, alice, "box"); err != nil {
		t.Fatal(err)
	}
	r.mark("box", "two")
	tar := r.rootTar(snap.ID)
	good, err := os.ReadFile(tar)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string, b []byte) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(name), os.WriteFile(name, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	flipped := bytes.Clone(good)
	flipped[3000] ^= 1
	for _, c := range []struct {
		name, snap, want string
		do               func()
	}{
		{"a flipped bit", "files", "not the checksum", func() { put(tar, flipped) }},
		{"a truncated layer", "files", "has 2999 bytes, and had 6000", func() { put(tar, good[:2999]) }},
		{"an empty layer", "files", "has 0 bytes", func() { put(tar, nil) }},
		{"a layer that is gone", "files", "is gone", func() { os.Remove(tar) }},
		{"a layer where there was none", "none", "had not when it was taken", func() { put(r.rootTar(none.ID), good) }},
	} {
		c.do()
		damaged := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "snapshot "+c.snap+" is damaged: ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %s: %v", c.name, what, err)
			}
		}
		_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "copy", Snapshot: c.snap}}, nil)
		damaged("create", err)
		deletes := r.world.Calls(fake.OpDelete)
		_, err = r.Rollback(ctx, alice, "box", c.snap)
		damaged("rollback", err)
		if got, err := r.Get(ctx, alice, "box"); err != nil || got.State != Running || r.word("box") != "two" || r.world.Calls(fake.OpDelete) != deletes {
			t.Errorf("%s: after the rollback: %+v, %v, %q", c.name, got, err, r.word("box"))
		}
	}
	if n := layers.Load(); n != 0 {
		t.Errorf("%d layers of damaged snapshots were written", n)
	}
	put(tar, good)
	os.Remove(r.rootTar(none.ID))
	// The checksum is in the store, which is read again.
	r.stop()
	r.start()
	for _, to := range []string{"files", "none"} {
		if _, err := r.Rollback(ctx, alice, "box", to); err != nil || r.word("box") != "one" {
			t.Errorf("rollback to %s: %v, %q", to, err, r.word("box"))
		}
	}
	if n := layers.Load(); n != 1 {
		t.Errorf("%d layers were written by a rollback with one and one without", n)
	}
	r.mu.Lock()
	r.snaps[snap.ID].row.RootSum = "" // of an older version
	r.mu.Unlock()
	put(tar, flipped)
	if _, err := r.Rollback(ctx, alice, "box", "files"); err != nil || layers.Load() != 2 {
		t.Errorf("rollback to one without a checksum: %v, %d layers", err, layers.Load())
	}
}

// killNow ends the execution of a sandbox, and waits until that is known.
func (r *rig) killNow(name string) {
	r.t.Helper()
	r.world.Kill(r.boxNamed(name), driver.Exit{Reason: "killed"})
	eventually(r.t, "it has failed", func() bool {
		got, err := r.Get(r.t.Context(), alice, name)
		return err == nil && got.State == Failed
	})
}

// boxNamed is the id of a sandbox of alice's.
func (r *rig) boxNamed(name string) warren.SandboxID {
	r.t.Helper()
	id, err := r.Resolve(alice, name)
	if err != nil {
		r.t.Fatal(err)
	}
	return id
}

// TestSnapshotFilesSaid makes sandboxes of snapshots: those of one that has files alone are told to start cold, others are not.
func TestSnapshotFilesSaid(t *testing.T) {
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "memory")
	if _, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"memory": 0, "files": 1} {
		var mu sync.Mutex
		said := 0
		_, err := r.Create(t.Context(), alice, CreateRequest{Spec: Spec{Snapshot: name}}, func(p Progress) {
			mu.Lock()
			defer mu.Unlock()
			if p.Step == "files only" && strings.Contains(p.Message, "snapshot "+name+" has files alone") && strings.Contains(p.Message, "started cold") {
				said++
			}
		})
		mu.Lock()
		if err != nil || said != want {
			t.Errorf("of %s: said %d times, want %d (%v)", name, said, want, err)
		}
		mu.Unlock()
	}
}

// TestRollbackTold tells the guest of a rollback whenever it goes on from the snapshot, also when the first attempt failed, and
// once only.
func TestRollbackTold(t *testing.T) {
	ctx := t.Context()
	r := prepareRig(t, t.TempDir(), nil)
	var mu sync.Mutex
	var calls []string
	r.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			switch req.URL.Path {
			case "/init":
				var body struct {
					Event string `json:"event"`
				}
				if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
					t.Errorf("init: %v", err)
				}
				calls = append(calls, body.Event)
			case "/warren/mark":
				calls = append(calls, "mark")
			}
			w.WriteHeader(http.StatusNoContent)
		})
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "snap")
	r.world.Inject(fake.OpRestore, fake.Fault{Err: errors.New("no memory"), Times: 1})
	if _, err := r.Rollback(ctx, alice, "box", "snap"); err == nil {
		t.Fatal("a restore that fails was not reported")
	}
	for range 2 {
		if _, err := r.Resume(ctx, alice, "box"); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Pause(ctx, alice, "box"); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"start", "mark", "rollback", "resume"}; !slices.Equal(calls, want) {
		t.Errorf("the guest was told %q, want %q", calls, want)
	}
}

// TestSnapshotOtherDriver takes snapshots to another driver: files pass, with their layer, and memory does not.
func TestSnapshotOtherDriver(t *testing.T) {
	ctx := t.Context()
	var layers atomic.Int64
	other := fake.New(fake.Options{Guest: func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			if n, _ := io.Copy(io.Discard, req.Body); req.URL.Path == "/root" && n == 6000 {
				layers.Add(1)
			}
		})
	}})
	defer other.Close()
	r := newRig(t, func(o *Options) {
		o.Drivers["fake"] = rootedDriver{o.Drivers["fake"].(*fake.Driver)}
		o.Drivers["other"] = other
	})
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	r.snapshotNow("box", "memory")
	r.create(alice, Spec{Name: "tuned", DriverOptions: map[string]string{"note": "x"}})
	for box, name := range map[string]string{"box": "files", "tuned": "options"} {
		if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: box, Name: name, FilesOnly: true}, nil); err != nil {
			t.Fatal(err)
		}
	}
	got, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "moved", Snapshot: "files", Driver: "other"}}, nil)
	if err != nil || got.Driver != "other" || r.word("moved") != "one" || layers.Load() != 1 || other.World().Len() != 1 {
		t.Errorf("files: %+v, %v, %d layers", got, err, layers.Load())
	}
	for name, want := range map[string]string{"memory": "goes on with that", "options": "has options for driver fake (note)"} {
		_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Snapshot: name, Driver: "other"}}, nil)
		if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Snapshot: "files", Driver: "none"}}, nil); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("to a driver that is not there: %v", err)
	}
	r.delete(alice, "moved")
}
