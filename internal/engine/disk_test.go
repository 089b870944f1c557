package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/store"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestFullDisk fills the disk of the store under an engine: creates are refused and leave nothing, what runs goes on,
// deletes work, and with room creates do.
func TestFullDisk(t *testing.T) {
	// With its own bound the engine refuses a create before anything is made; without it a create finds out half-way.
	for name, low := range map[string]int64{"bound": 0, "last byte": -1} {
		t.Run(name, func(t *testing.T) { testFullDisk(t, low) })
	}
}

func testFullDisk(t *testing.T, low int64) {
	ctx := context.Background()
	dir := testenv.SmallFS(t, 8<<20, 1000)
	r := prepareRig(t, dir, func(o *Options) { o.LowDisk = low })
	r.start()
	defer r.stop()
	// Which of engine, store, workspace or driver meets the full disk first is chance, and only the first two name its kind.
	// A create that comes after a refused one may be taken again, for the store empties its log beside the calls.
	var ids []string
	var err error
	for refused := 0; refused < 20 && !errors.Is(err, warren.ErrExhausted); {
		var sb *Sandbox
		sb, err = r.Create(ctx, alice, CreateRequest{Spec: Spec{Env: map[string]string{"X": strings.Repeat("x", 60_000)}}}, nil)
		if err != nil {
			refused++
			continue
		}
		if ids = append(ids, string(sb.ID)); len(ids) == 2000 {
			t.Fatal("the disk was never full")
		}
	}
	t.Logf("%d creates, then: %v", len(ids), err)
	if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("on a full disk: %v", err)
	}
	for _, id := range ids {
		if sb, err := r.Get(ctx, alice, id); err != nil || sb.State != Running {
			t.Fatalf("%s: %+v, %v", id, sb, err)
		}
	}
	conn, err := r.Dial(ctx, alice, ids[0], warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	// The disk is still full. Only deletes may use the store's reserve, and all of them succeed.
	for _, id := range ids {
		if err := r.Delete(ctx, alice, DeleteRequest{ID: id}); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	// A create that failed and could not be undone at once is undone soon after something else was removed, else after half a minute at the latest.
	for end := time.Now().Add(2 * time.Minute); r.leftovers() != nil; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(r.leftovers())
		}
	}
	eventually(t, "creates are taken again", func() bool {
		sb, err := r.Create(ctx, alice, CreateRequest{}, nil)
		if err != nil {
			return false
		}
		return r.Delete(ctx, alice, DeleteRequest{ID: string(sb.ID)}) == nil
	})
	r.empty()
}

func TestDamagedRecord(t *testing.T) {
	ctx := context.Background()
	r := newRig(t, nil)
	bad := r.create(alice, Spec{Name: "bad"})
	good := r.create(alice, Spec{Name: "good"})
	r.stop()
	db, err := store.Open(ctx, store.Options{Path: filepath.Join(r.dir, "warren.db")})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(ctx, func(tx *store.Tx) error {
		return tx.UpdateSandbox(&store.Sandbox{ID: bad.ID, Name: "bad", State: "melted", Generation: 1, DropWorkspace: true})
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	r.start()
	if got, err := r.Get(ctx, alice, "good"); err != nil || got.ID != good.ID || got.State != Running {
		t.Errorf("the good one: %+v, %v", got, err)
	}
	for what, err := range map[string]error{
		"dial":    func() error { _, err := r.Dial(ctx, alice, "bad", 80); return err }(),
		"restart": func() error { _, err := r.Restart(ctx, alice, "bad"); return err }(),
	} {
		if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "melted") {
			t.Errorf("%s of the bad one: %v", what, err)
		}
	}
	r.delete(alice, "bad")
	r.delete(alice, "good")
	r.empty()
}

// TestDriverMissing opens an engine without the driver of a sandbox, and again with it.
func TestDriverMissing(t *testing.T) {
	ctx := context.Background()
	r := newRig(t, nil)
	other := fake.New(fake.Options{})
	defer other.Close()
	r.change = func(o *Options) { o.Drivers["other"] = other }
	r.stop()
	r.start()
	sb := r.create(alice, Spec{Name: "box", Driver: "other"})
	r.stop()
	r.change = nil
	r.start()
	got, err := r.Get(ctx, alice, "box")
	if err != nil || got.State != Failed || !strings.Contains(got.Failure.Message, `"other" is not open`) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := r.Dial(ctx, alice, "box", 80); !errors.Is(err, warren.ErrState) {
		t.Errorf("dial: %v", err)
	}
	if _, err := r.Restart(ctx, alice, "box"); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("restart: %v", err)
	}
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "box"}); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("delete: %v", err)
	}
	r.stop()
	r.change = func(o *Options) { o.Drivers["other"] = other }
	r.start()
	eventually(t, "the delete is finished with the driver back", func() bool { return r.gone(sb.ID) })
	if other.World().Len() != 0 {
		t.Error("left in the driver")
	}
	r.empty()
}

func TestOpenOptions(t *testing.T) {
	r := newRig(t, nil)
	full := r.opts
	for name, change := range map[string]func(o *Options){
		"no store":       func(o *Options) { o.Store = nil },
		"no drivers":     func(o *Options) { o.Drivers = nil },
		"default driver": func(o *Options) { o.DefaultDriver = "nope" },
	} {
		o := full
		change(&o)
		if _, err := Open(context.Background(), o); err == nil {
			t.Errorf("%s: opened", name)
		}
	}
}

func TestStats(t *testing.T) {
	r := prepareRig(t, t.TempDir(), nil)
	ctx := context.Background()
	// The number of processes is the guest's; one that has none to tell, or another answer, breaks nothing.
	var answer atomic.Value
	r.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				io.WriteString(w, answer.Load().(string))
			}
		})
	}
	r.start()
	defer r.stop()
	counted := r.create(alice, Spec{})
	for text, want := range map[string]uint32{`{"ts":1,"processes":7}`: 7, `{"ts":1}`: 0, `{"processes":-1}`: 0, "no JSON": 0} {
		answer.Store(text)
		if s, err := r.Stats(ctx, alice, string(counted.ID)); err != nil || s.PIDs != want {
			t.Errorf("guest says %s: %+v, %v", text, s, err)
		}
	}
	sb := r.create(alice, Spec{Resources: Resources{MemoryBytes: 64 << 20}})
	if s, err := r.Stats(ctx, alice, string(sb.ID)); err != nil || s.MemoryLimit != 64<<20 || s.Memory == 0 {
		t.Errorf("%+v, %v", s, err)
	}
	r.world.Kill(sb.ID, driver.Exit{Reason: "killed"})
	eventually(t, "it fails", func() bool { got, err := r.Get(ctx, alice, string(sb.ID)); return err == nil && got.State == Failed })
	if _, err := r.Stats(ctx, alice, string(sb.ID)); !errors.Is(err, warren.ErrState) {
		t.Errorf("of a failed one: %v", err)
	}
}

func TestUpdate(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	r.create(alice, Spec{Name: "one", Labels: map[string]string{"a": "1", "b": "2"}})
	r.create(alice, Spec{Name: "two"})
	str := func(s string) *string { return &s }
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "one", Name: str("two")}); !errors.Is(err, warren.ErrExists) {
		t.Errorf("name taken: %v", err)
	}
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "one", Name: str("../x")}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("bad name: %v", err)
	}
	keep := true
	got, err := r.Update(ctx, alice, UpdateRequest{ID: "one", Name: str("uno"), SetLabels: map[string]string{"a": "x", "c": "3"}, RemoveLabels: []string{"b"}, KeepWorkspace: &keep})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := json.Marshal(map[string]string{"a": "x", "c": "3"})
	if have, _ := json.Marshal(got.Labels); string(have) != string(want) || got.Name != "uno" {
		t.Errorf("%+v", got)
	}
	if _, err := r.Get(ctx, alice, "one"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("the old name: %v", err)
	}
	r.stop()
	r.start()
	if got, err := r.Get(ctx, alice, "uno"); err != nil || got.Labels["c"] != "3" || got.Spec.Labels["a"] != "x" {
		t.Errorf("%+v, %v", got, err)
	}
	r.create(alice, Spec{Name: "one"}) // free again
	r.delete(alice, "uno")
	list, _, err := r.ListWorkspaces(ctx, alice, false, 0, "")
	if err != nil || len(list) != 3 {
		t.Errorf("the workspace was not kept: %d, %v", len(list), err)
	}
}

// TestCloseDuringCreates stops the engine in the middle of creates; the next one finds nothing half-made.
func TestCloseDuringCreates(t *testing.T) {
	r := newRig(t, nil)
	r.world.Inject(fake.OpCreate, fake.Fault{Latency: 30 * 1e6})
	done := make(chan error, 20)
	for i := range 20 {
		go func() {
			_, err := r.Engine.Create(context.Background(), alice, CreateRequest{Spec: Spec{Name: fmt.Sprint("n", i)}}, nil)
			done <- err
		}()
	}
	eventually(t, "some boot", func() bool { return r.world.Calls(fake.OpCreate) > 3 })
	e := r.Engine
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	made := 0
	for range 20 {
		if err := <-done; err == nil {
			made++
		} else if !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("create while closing: %v", err)
		}
	}
	r.stop()
	r.start()
	eventually(t, "settled", func() bool {
		list, _, err := r.List(context.Background(), alice, ListRequest{})
		return err == nil && len(list) == made && r.world.Len() == made
	})
	wipe(t, r)
}
