package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/store"
)

// testClock is moved by hand. Its wall clock may jump alone.
type testClock struct {
	mu     sync.Mutex
	wall   time.Time
	steady time.Duration
	boot   string
	waits  []wait
}

type wait struct {
	at time.Duration
	ch chan time.Time
}

func newTestClock() *testClock {
	return &testClock{wall: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC), steady: time.Hour, boot: "boot-1"}
}

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall
}

func (c *testClock) Steady() (time.Duration, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.steady, c.boot
}

func (c *testClock) After(d time.Duration) <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan time.Time, 1)
	if d <= 0 {
		ch <- c.wall
	} else {
		c.waits = append(c.waits, wait{c.steady + d, ch})
	}
	return ch
}

// advance lets time pass.
func (c *testClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall, c.steady = c.wall.Add(d), c.steady+d
	var rest []wait
	for _, w := range c.waits {
		if w.at <= c.steady {
			w.ch <- c.wall
		} else {
			rest = append(rest, w)
		}
	}
	c.waits = rest
}

// waiting says whether somebody waits for d from now on.
func (c *testClock) waiting(d time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.waits, func(w wait) bool { return w.at == c.steady+d })
}

// jump sets the wall clock alone.
func (c *testClock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall = c.wall.Add(d)
}

func timedRig(t *testing.T, change func(*Options)) (*rig, *testClock) {
	c := newTestClock()
	r := prepareRig(t, t.TempDir(), change)
	r.clock = c
	r.start()
	t.Cleanup(r.stop)
	return r, c
}

func (r *rig) gone(id warren.SandboxID) bool {
	_, err := r.Get(context.Background(), operator, string(id))
	return errors.Is(err, warren.ErrNotFound)
}

// settle gives the expiry loop the chance to do something wrong.
func (r *rig) settle() {
	for range 5 {
		r.expire()
		time.Sleep(time.Millisecond)
	}
}

func TestExpiry(t *testing.T) {
	r, c := timedRig(t, nil)
	ctx := context.Background()
	idle := r.create(alice, Spec{IdleTimeout: time.Minute, IdleAction: IdleDelete})
	ttl := r.create(alice, Spec{TTL: 2 * time.Minute, IdleTimeout: time.Hour})
	kept := r.create(alice, Spec{TTL: time.Minute, KeepWorkspace: true})
	forever := r.create(alice, Spec{})
	if want := c.Now().Add(time.Minute); !idle.Expires.Equal(want) {
		t.Errorf("expires %s, want %s", idle.Expires, want)
	}
	if !forever.Expires.IsZero() {
		t.Errorf("expires %s, want never", forever.Expires)
	}
	c.advance(59 * time.Second)
	r.settle()
	for _, sb := range []*Sandbox{idle, ttl, kept, forever} {
		if r.gone(sb.ID) {
			t.Fatalf("%s is gone too early", sb.ID)
		}
	}
	conn, err := r.Dial(ctx, alice, string(idle.ID), warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	c.advance(time.Second)
	eventually(t, "the kept one expires", func() bool { return r.gone(kept.ID) })
	c.advance(61 * time.Second)
	eventually(t, "time to live ends", func() bool { return r.gone(ttl.ID) })
	c.advance(10 * time.Hour)
	r.settle()
	if r.gone(idle.ID) {
		t.Fatal("a sandbox with an open connection idled out")
	}
	conn.Close()
	c.advance(59 * time.Second)
	r.settle()
	if r.gone(idle.ID) {
		t.Fatal("gone less than a minute after its last use")
	}
	c.advance(time.Second)
	eventually(t, "idle one expires", func() bool { return r.gone(idle.ID) })
	ws, err := r.GetWorkspace(ctx, alice, string(kept.WorkspaceID), false)
	if err != nil || ws.SandboxID != "" {
		t.Errorf("the kept workspace: %+v, %v", ws, err)
	}
	if _, err := r.GetWorkspace(ctx, alice, string(idle.WorkspaceID), false); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("the workspace of an expired sandbox: %v", err)
	}
	// A pooled connection is no use.
	idle = r.create(alice, Spec{IdleTimeout: time.Minute, IdleAction: IdleDelete})
	conn, err = r.DialPooled(ctx, alice, string(idle.ID), warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c.advance(time.Minute)
	eventually(t, "it expires", func() bool { return r.gone(idle.ID) })
	// Updates move the deadline, from now on.
	sb := r.create(alice, Spec{TTL: time.Minute})
	hour := time.Hour
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: string(sb.ID), TTL: &hour}); err != nil {
		t.Fatal(err)
	}
	c.advance(2 * time.Minute)
	r.settle()
	if r.gone(sb.ID) {
		t.Fatal("gone in spite of a longer time to live")
	}
}

func TestClockJumps(t *testing.T) {
	r, c := timedRig(t, nil)
	var all []*Sandbox
	for range 10 {
		all = append(all, r.create(alice, Spec{TTL: 30 * time.Minute, IdleTimeout: 20 * time.Minute, IdleAction: IdleDelete}))
	}
	alive := func(when string) {
		t.Helper()
		r.settle()
		for _, sb := range all {
			if r.gone(sb.ID) {
				t.Fatalf("%s: %s expired", when, sb.ID)
			}
		}
	}
	for _, d := range []time.Duration{time.Hour, -2 * time.Hour, 10 * 365 * 24 * time.Hour, -10 * 365 * 24 * time.Hour} {
		c.jump(d)
		alive(fmt.Sprint("jump of ", d))
		r.stop()
		c.jump(d)
		r.start()
		alive(fmt.Sprint("jump while the daemon is down of ", d))
	}
	// Time that the daemon was down counts for the time to live, jumps or not.
	r.stop()
	c.jump(-time.Hour)
	c.advance(31 * time.Minute)
	r.start()
	eventually(t, "all expire", func() bool { r.expire(); return r.gone(all[9].ID) && r.gone(all[0].ID) })

	// After a boot only the wall clock tells; it may go on, not back, and nothing expires at once.
	sb := r.create(alice, Spec{TTL: 30 * time.Minute})
	r.stop()
	c.mu.Lock()
	c.boot, c.steady = "boot-2", time.Second
	c.wall = c.wall.Add(5 * time.Hour)
	c.mu.Unlock()
	r.start()
	r.settle()
	if r.gone(sb.ID) {
		t.Fatal("expired in the first moment after a boot")
	}
	c.advance(bootGrace)
	eventually(t, "it expires after the grace", func() bool { return r.gone(sb.ID) })
	sb = r.create(alice, Spec{TTL: 30 * time.Minute})
	r.stop()
	c.mu.Lock()
	c.boot = "boot-3"
	c.wall = c.wall.Add(-24 * time.Hour)
	c.mu.Unlock()
	r.start()
	c.advance(29 * time.Minute)
	r.settle()
	if r.gone(sb.ID) {
		t.Fatal("a clock that went back made a sandbox expire")
	}
	c.advance(time.Minute)
	eventually(t, "it expires", func() bool { return r.gone(sb.ID) })
}

// TestExpiryBoundary uses a sandbox in the moment in which it idles out, many times. A use that began is never cut off,
// and what comes later finds it deleting or gone.
func TestExpiryBoundary(t *testing.T) {
	r, c := timedRig(t, nil)
	ctx := context.Background()
	used, late := 0, 0
	for i := range 300 {
		sb := r.create(alice, Spec{IdleTimeout: time.Second, IdleAction: IdleDelete})
		start := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { <-start; c.advance(time.Second) })
		wg.Go(func() { <-start; r.expire() })
		wg.Go(func() {
			<-start
			_, use, err := r.Hold(ctx, alice, string(sb.ID))
			switch {
			case err == nil:
				for range 20 {
					if got, err := r.Get(ctx, alice, string(sb.ID)); err != nil || got.State != Running {
						t.Errorf("try %d: in use, and %v %v", i, got, err)
					}
				}
				use.End()
				used++
			case errors.Is(err, warren.ErrState), errors.Is(err, warren.ErrNotFound):
				late++
			default:
				t.Error(err)
			}
		})
		close(start)
		wg.Wait()
		if err := r.Delete(ctx, alice, DeleteRequest{ID: string(sb.ID), AllowMissing: true}); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d in time, %d too late", used, late)
	r.empty()
}

func TestDeath(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	sb := r.create(alice, Spec{Name: "box", Resources: Resources{MemoryBytes: 512 << 20}})
	r.world.Kill(sb.ID, driver.Exit{Reason: "oom"})
	_, err := r.Dial(ctx, alice, "box", warren.GuestPort)
	if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "out of memory (limit 512 MiB); its workspace is intact; `warren restart box`") {
		t.Errorf("dial of a dead sandbox: %v", err)
	}
	got, err := r.Get(ctx, alice, "box")
	if err != nil || got.State != Failed || got.Failure == nil || got.Failure.Reason != "oom" {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := r.GetWorkspace(ctx, alice, "box", true); err != nil {
		t.Errorf("the workspace of a failed sandbox: %v", err)
	}
	if err := r.Diff(ctx, alice, "box", DiffOptions{}, io.Discard); err != nil {
		t.Errorf("diff of a failed sandbox: %v", err)
	}
	eventually(t, "the dead execution is removed", func() bool { return r.world.Len() == 0 })
	got, err = r.Restart(ctx, alice, "box")
	if err != nil || got.State != Running || got.Generation != 2 || got.Failure != nil || got.WorkspaceID != sb.WorkspaceID {
		t.Errorf("restarted %+v, %v", got, err)
	}
	if got, err = r.Restart(ctx, alice, "box"); err != nil || got.Generation != 3 {
		t.Errorf("restart of a running one: %+v, %v", got, err)
	}
	// Seen by the watch alone.
	r.world.Kill(sb.ID, driver.Exit{Reason: "exited", Message: "status 1"})
	eventually(t, "it fails", func() bool { got, err := r.Get(ctx, alice, "box"); return err == nil && got.State == Failed })
	r.delete(alice, "box")
	r.empty()
}

func TestRestartOnFailure(t *testing.T) {
	r, c := timedRig(t, nil)
	ctx := context.Background()
	sb := r.create(alice, Spec{Name: "box", Restart: RestartOnFailure})
	r.world.Kill(sb.ID, driver.Exit{Reason: "oom"})
	creates := r.world.Calls(fake.OpCreate)
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
			if err != nil {
				t.Error(err)
				return
			}
			conn.Close()
		})
	}
	wg.Wait()
	if n := r.world.Calls(fake.OpCreate) - creates; n != 1 {
		t.Errorf("30 callers made %d executions", n)
	}
	if got, err := r.Get(ctx, alice, "box"); err != nil || got.Generation != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	// A crash loop is slowed down, and says so.
	var err error
	for range 6 {
		r.world.Kill(sb.ID, driver.Exit{Reason: "exited"})
		eventually(t, "it fails", func() bool { got, err := r.Get(ctx, alice, "box"); return err == nil && got.State == Failed })
		var conn io.Closer
		if conn, err = r.Dial(ctx, alice, "box", warren.GuestPort); err != nil {
			break
		}
		conn.Close()
	}
	if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "in a row") {
		t.Errorf("a crash loop: %v", err)
	}
	c.advance(10 * time.Minute)
	conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
	if err != nil {
		t.Fatalf("after the wait: %v", err)
	}
	conn.Close()
}

func TestRestartFails(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	sb := r.create(alice, Spec{Name: "box"})
	r.world.Inject(fake.OpCreate, fake.Fault{Err: fmt.Errorf("no memory: %w", warren.ErrExhausted)})
	if _, err := r.Restart(ctx, alice, "box"); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("restart: %v", err)
	}
	got, err := r.Get(ctx, alice, "box")
	if err != nil || got.State != Failed || got.Failure.Reason != "create" || got.WorkspaceID != sb.WorkspaceID {
		t.Errorf("%+v, %v", got, err)
	}
	r.world.Inject(fake.OpCreate, fake.Fault{})
	if _, err := r.Restart(ctx, alice, "box"); err != nil {
		t.Error(err)
	}
	r.delete(alice, "box")
	r.empty()
}

func TestDeleteIsRetried(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	sb := r.create(alice, Spec{Name: "box"})
	r.world.Inject(fake.OpDelete, fake.Fault{Err: fmt.Errorf("busy: %w", warren.ErrUnavailable), Times: 3, Half: true})
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "box"}); !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "tried again") {
		t.Errorf("delete: %v", err)
	}
	if got, err := r.Get(ctx, alice, "box"); err != nil || got.State != Deleting || got.Failure == nil {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := r.Dial(ctx, alice, "box", 80); !errors.Is(err, warren.ErrState) {
		t.Errorf("dial: %v", err)
	}
	eventually(t, "it goes", func() bool { return r.gone(sb.ID) })
	r.empty()
	if err := r.Delete(ctx, alice, DeleteRequest{ID: string(sb.ID)}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}
	if err := r.Delete(ctx, alice, DeleteRequest{ID: string(sb.ID), AllowMissing: true}); err != nil {
		t.Errorf("second delete, allowed: %v", err)
	}
}

// TestDeleteIsTriedWithRoom has a removal that failed for so long that it waits for half a minute. It is tried again as soon as
// another one, of each kind, has made room; not without that, and not more than once a second.
func TestDeleteIsTriedWithRoom(t *testing.T) {
	ctx := context.Background()
	remove := map[string]func(r *rig) error{
		"sandbox":   func(r *rig) error { return r.Delete(ctx, alice, DeleteRequest{ID: "other"}) },
		"workspace": func(r *rig) error { return r.DeleteWorkspace(ctx, alice, "spare", false) },
		"snapshot":  func(r *rig) error { return r.DeleteSnapshot(ctx, alice, "snap", false) },
		"image":     func(r *rig) error { return r.DeleteImage(ctx, operator, "unused", false) },
		"repo":      func(r *rig) error { return r.DeleteRepo(ctx, operator, "https://example.com/r", false) },
	}
	for name, remove := range remove {
		t.Run(name, func(t *testing.T) {
			r, c := timedRig(t, nil)
			box := r.create(alice, Spec{Name: "box"})
			r.create(alice, Spec{Name: "other"})
			r.images.add("unused", "oci")
			if _, err := r.repos.Fetch(ctx, "https://example.com/r", FetchOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := r.CreateWorkspace(ctx, alice, CreateWorkspaceRequest{Name: "spare"}, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "other", Name: "snap", FilesOnly: true}, nil); err != nil {
				t.Fatal(err)
			}
			r.world.Inject(fake.OpDelete, fake.Fault{Err: errors.New("no room")})
			if err := r.Delete(ctx, alice, DeleteRequest{ID: "box"}); err == nil {
				t.Fatal("the delete did not fail")
			}
			calls := func() int { return r.world.Calls(fake.OpDelete) }
			// waits is true when the eraser waits: at first for a second, which nobody else does, and then for the rest.
			waits := func() bool { return c.waiting(roomWait) }
			for range 12 {
				n := calls()
				eventually(t, "another try", func() bool { c.advance(31 * time.Second); return calls() > n })
			}
			eventually(t, "it waits", waits)
			tries := calls()
			c.advance(20 * time.Second)
			r.settle()
			if n := calls(); n != tries {
				t.Fatalf("%d tries without room", n-tries)
			}
			c.advance(10 * time.Second)
			eventually(t, "a try after half a minute", func() bool { return calls() > tries })
			eventually(t, "it waits", waits)
			r.world.Inject(fake.OpDelete, fake.Fault{})
			if err := remove(r); err != nil {
				t.Fatal(err)
			}
			r.settle()
			if r.gone(box.ID) {
				t.Fatal("tried again within a second")
			}
			c.advance(roomWait)
			eventually(t, "it is removed with room", func() bool { return r.gone(box.ID) })
		})
	}
}

func TestDeleteByKey(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	create := func(name, key string) error {
		_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: name}, IdempotencyKey: key}, nil)
		return err
	}
	if err := create("done", "k1"); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		who  Caller
		req  DeleteRequest
		want error
	}{
		"of another user": {bob, DeleteRequest{Key: "k1"}, warren.ErrNotFound},
		"unknown":         {alice, DeleteRequest{Key: "k2"}, warren.ErrNotFound},
		"allowed":         {alice, DeleteRequest{Key: "k2", AllowMissing: true}, nil},
		"too long":        {alice, DeleteRequest{Key: strings.Repeat("k", 1000)}, warren.ErrInvalid},
		"with an id":      {alice, DeleteRequest{Key: "k1", ID: "done"}, warren.ErrInvalid},
	} {
		if err := r.Delete(ctx, c.who, c.req); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if err := r.Delete(ctx, alice, DeleteRequest{Key: "k1"}); err != nil {
		t.Error(err)
	}
	if _, err := r.Get(ctx, alice, "done"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("after its delete: %v", err)
	}
	if err := r.Delete(ctx, alice, DeleteRequest{Key: "k1"}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}

	// One under way ends.
	r.spaces.mu.Lock()
	r.spaces.slow = time.Minute
	r.spaces.mu.Unlock()
	made := make(chan error, 1)
	go func() { made <- create("under-way", "k3") }()
	eventually(t, "the create has begun", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.flights) == 1
	})
	eventually(t, "its files are made", func() bool {
		made, err := os.ReadDir(r.spaces.dir)
		return err == nil && len(made) == 1
	})
	time.Sleep(20 * time.Millisecond) // as a rule Populate waits by then; the test holds if not
	r.spaces.mu.Lock()
	r.spaces.slow = 0
	r.spaces.mu.Unlock()
	if err := r.Delete(ctx, alice, DeleteRequest{Key: "k3", AllowMissing: true}); err != nil {
		t.Error(err)
	}
	if err := <-made; err == nil {
		t.Error("the create under way succeeded")
	}
	r.empty()
}

// TestDeleteOfManyFiles has a workspace whose removal takes longer than a driver may.
func TestDeleteOfManyFiles(t *testing.T) {
	r := newRig(t, func(o *Options) { o.DeleteTimeout = 50 * time.Millisecond })
	sb := r.create(alice, Spec{Name: "box"})
	r.spaces.mu.Lock()
	r.spaces.slow = 200 * time.Millisecond
	r.spaces.mu.Unlock()
	if err := r.Delete(context.Background(), alice, DeleteRequest{ID: "box"}); err != nil || !r.gone(sb.ID) {
		t.Errorf("delete: %v", err)
	}
	r.empty()
}

func TestForeign(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	sb := r.create(alice, Spec{Name: "mine"})
	for _, ref := range []string{string(sb.ID), string(sb.ID[:10]), "mine", string(sb.WorkspaceID)} {
		absent := ref[:1] + strings.Repeat("z", len(ref)-1)
		calls := map[string]func(ref string) error{
			"get":     func(ref string) error { _, err := r.Get(ctx, bob, ref); return err },
			"update":  func(ref string) error { _, err := r.Update(ctx, bob, UpdateRequest{ID: ref}); return err },
			"delete":  func(ref string) error { return r.Delete(ctx, bob, DeleteRequest{ID: ref}) },
			"restart": func(ref string) error { _, err := r.Restart(ctx, bob, ref); return err },
			"dial":    func(ref string) error { _, err := r.Dial(ctx, bob, ref, 80); return err },
			"pooled":  func(ref string) error { _, err := r.DialPooled(ctx, bob, ref, 80); return err },
			"hold":    func(ref string) error { _, _, err := r.Hold(ctx, bob, ref); return err },
			"stats":   func(ref string) error { _, err := r.Stats(ctx, bob, ref); return err },
			"token":   func(ref string) error { _, err := r.AccessToken(bob, ref); return err },
			"resolve": func(ref string) error { _, err := r.Resolve(bob, ref); return err },
			"ws get":  func(ref string) error { _, err := r.GetWorkspace(ctx, bob, ref, true); return err },
			"ws del":  func(ref string) error { return r.DeleteWorkspace(ctx, bob, ref, false) },
			"ws copy": func(ref string) error { _, _, err := r.CopyWorkspace(ctx, bob, ref, ""); return err },
			"mark":    func(ref string) error { return r.MarkWorkspace(ctx, bob, ref) },
			"diff":    func(ref string) error { return r.Diff(ctx, bob, ref, DiffOptions{}, io.Discard) },
			"commit":  func(ref string) error { _, err := r.Commit(ctx, bob, CommitRequest{ID: ref, Message: "m"}); return err },
			"push":    func(ref string) error { _, err := r.Push(ctx, bob, PushRequest{ID: ref}); return err },
			"patch":   func(ref string) error { return r.FormatPatch(ctx, bob, ref, io.Discard) },
			"use": func(ref string) error {
				_, err := r.Create(ctx, bob, CreateRequest{Spec: Spec{WorkspaceID: ref}}, nil)
				return err
			},
		}
		for name, call := range calls {
			err, none := call(ref), call(absent)
			if !errors.Is(err, warren.ErrNotFound) {
				t.Errorf("%s of a foreign %s: %v", name, ref, err)
				continue
			}
			if a, b := strings.ReplaceAll(err.Error(), ref, "X"), strings.ReplaceAll(none.Error(), absent, "X"); a != b {
				t.Errorf("%s tells a foreign id from none: %q, %q", name, a, b)
			}
		}
	}
	if list, _, err := r.List(ctx, bob, ListRequest{}); err != nil || len(list) != 0 {
		t.Errorf("bob lists %v, %v", list, err)
	}
	if list, _, err := r.ListWorkspaces(ctx, bob, false, 0, ""); err != nil || len(list) != 0 {
		t.Errorf("bob lists %v, %v", list, err)
	}
	n := 0
	if err := r.Watch(ctx, bob, WatchRequest{NoFollow: true}, func(*Event) error { n++; return nil }); err != nil || n != 0 {
		t.Errorf("bob sees %d events, %v", n, err)
	}
	if _, err := r.Get(ctx, operator, "mine"); err != nil {
		t.Errorf("the operator: %v", err)
	}
}

func TestResolve(t *testing.T) {
	r := newRig(t, nil)
	r.mu.Lock()
	for i, id := range []warren.SandboxID{"sabc0000000000000000", "sabc1000000000000000", "sxyz0000000000000000"} {
		sb := &sandbox{timer: -1, row: store.Sandbox{Num: int64(i), ID: id, Owner: "alice", State: string(Failed)}}
		r.addUsage(sb)
		r.insert(sb)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		clear(r.boxes)
		r.mu.Unlock()
	}()
	for ref, want := range map[string]string{
		"sabc0000000000000000": "sabc0000000000000000", "sabc1": "sabc1000000000000000", "sxy": "sxyz0000000000000000",
	} {
		if id, err := r.Resolve(alice, ref); err != nil || string(id) != want {
			t.Errorf("%q: %q, %v", ref, id, err)
		}
	}
	if _, err := r.Resolve(alice, "sabc"); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "sabc0000000000000000, sabc1000000000000000") {
		t.Errorf("ambiguous: %v", err)
	}
	// What is too short to count is not said to be missing.
	for ref, want := range map[string]string{"s": "ambiguous, it names 3 sandboxes: sabc0000000000000000, ", "sa": "names 2 sandboxes", "sx": "too short for the id of sandbox sxyz0000000000000000"} {
		if _, err := r.Resolve(alice, ref); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", ref, err, want)
		}
		if _, err := r.Resolve(bob, ref); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("%q of somebody else: %v", ref, err)
		}
	}
	for _, ref := range []string{"sy", "xyz", "nope", strings.Repeat("s", 10000)} {
		if _, err := r.Resolve(alice, ref); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("%.20q: %v", ref, err)
		}
	}
	if _, err := r.Resolve(alice, ""); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("empty: %v", err)
	}
}

func TestListPages(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	for i := range 25 {
		r.create(alice, Spec{Name: fmt.Sprint("n", i), Labels: map[string]string{"odd": fmt.Sprint(i % 2)}})
	}
	var names []string
	token := ""
	for {
		list, next, err := r.List(ctx, alice, ListRequest{PageSize: 10, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range list {
			names = append(names, sb.Name)
		}
		if token = next; token == "" {
			break
		}
	}
	for i, n := range names {
		if n != fmt.Sprint("n", i) {
			t.Fatalf("order %v", names)
		}
	}
	if len(names) != 25 {
		t.Errorf("%d names", len(names))
	}
	if list, _, err := r.List(ctx, alice, ListRequest{Labels: map[string]string{"odd": "1"}}); err != nil || len(list) != 12 {
		t.Errorf("%d with the label, %v", len(list), err)
	}
	for _, bad := range []ListRequest{{PageSize: -1}, {PageSize: 1001}, {PageToken: "x"}, {PageToken: "1 "}, {PageToken: "-1"}, {States: []State{"odd"}}} {
		if _, _, err := r.List(ctx, alice, bad); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestWorkspaces(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	ws, err := r.CreateWorkspace(ctx, alice, CreateWorkspaceRequest{Name: "space", Repo: &RepoSource{URL: "https://x/y"}, IdempotencyKey: "k"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := r.CreateWorkspace(ctx, alice, CreateWorkspaceRequest{Name: "space", Repo: &RepoSource{URL: "https://x/y"}, IdempotencyKey: "k"}, nil); err != nil || again.ID != ws.ID {
		t.Errorf("again: %+v, %v", again, err)
	}
	if _, err := r.CreateWorkspace(ctx, alice, CreateWorkspaceRequest{Name: "space"}, nil); !errors.Is(err, warren.ErrExists) {
		t.Errorf("name taken: %v", err)
	}
	sb := r.create(alice, Spec{Name: "box", WorkspaceID: "space"})
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{WorkspaceID: "space"}}, nil); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "sandbox box") {
		t.Errorf("second sandbox: %v", err)
	}
	if err := r.DeleteWorkspace(ctx, alice, "space", false); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren rm box") {
		t.Errorf("delete in use: %v", err)
	}
	if err := r.DeleteRepo(ctx, operator, string(ws.RepoID), false); !errors.Is(err, warren.ErrState) {
		t.Errorf("repo in use: %v", err)
	}
	if err := r.DeleteRepo(ctx, alice, string(ws.RepoID), false); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("repo by a user: %v", err)
	}
	cm, err := r.Commit(ctx, alice, CommitRequest{ID: "box", Message: "m"})
	if err != nil || cm.Branch != "warren/space" {
		t.Errorf("%+v, %v", cm, err)
	}
	r.stop()
	r.start()
	if got, err := r.GetWorkspace(ctx, alice, "box", false); err != nil || got.HeadCommit != "abc123" || got.Branch != "warren/space" || got.SandboxID != sb.ID || got.BaseCommit != "c0ffee" {
		t.Errorf("%+v, %v", got, err)
	}
	cp, method, err := r.CopyWorkspace(ctx, alice, "box", "copy")
	if err != nil || method != "copy" || cp.RepoURL != "https://x/y" || cp.ID == ws.ID {
		t.Errorf("%+v, %q, %v", cp, method, err)
	}
	r.delete(alice, "box")
	if _, err := r.GetWorkspace(ctx, alice, "space", false); err != nil {
		t.Errorf("a workspace of its own went with the sandbox: %v", err)
	}
	// A workspace that was made for a sandbox goes with it; unless kept; unless asked for.
	for _, c := range []struct {
		keep, ask, want bool
	}{{false, false, false}, {true, false, true}, {true, true, false}} {
		sb := r.create(alice, Spec{KeepWorkspace: c.keep})
		if err := r.Delete(ctx, alice, DeleteRequest{ID: string(sb.ID), DeleteWorkspace: c.ask}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.GetWorkspace(ctx, alice, string(sb.WorkspaceID), false); (err == nil) != c.want {
			t.Errorf("%+v: %v", c, err)
		}
	}
	// A delete ends who reads, and comes after.
	r.spaces.mu.Lock()
	r.spaces.slow = time.Hour
	r.spaces.mu.Unlock()
	diffed := make(chan error, 1)
	go func() { diffed <- r.Diff(ctx, alice, "copy", DiffOptions{}, io.Discard) }()
	eventually(t, "the diff runs", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.Engine.spaces[cp.ID].uses > 0
	})
	r.spaces.mu.Lock()
	r.spaces.slow = 0
	r.spaces.mu.Unlock()
	if err := r.DeleteWorkspace(ctx, alice, "copy", false); err != nil {
		t.Fatal(err)
	}
	if err := <-diffed; !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "is being deleted") {
		t.Errorf("a diff under way: %v", err)
	}
	list, _, err := r.ListWorkspaces(ctx, alice, false, 0, "")
	if err != nil || len(list) != 2 {
		t.Errorf("%d workspaces, %v", len(list), err)
	}
	for _, w := range list {
		if err := r.DeleteWorkspace(ctx, alice, string(w.ID), false); err != nil {
			t.Error(err)
		}
	}
	if err := r.DeleteWorkspace(ctx, alice, "space", true); err != nil {
		t.Error(err)
	}
	r.empty()
	if err := r.DeleteRepo(ctx, operator, string(ws.RepoID), false); err != nil {
		t.Error(err)
	}
	// Failing to fill leaves nothing.
	r.spaces.mu.Lock()
	r.spaces.populate = fmt.Errorf("no: %w", warren.ErrUnavailable)
	r.spaces.mu.Unlock()
	if _, err := r.CreateWorkspace(ctx, alice, CreateWorkspaceRequest{Name: "x", IdempotencyKey: "x"}, nil); !errors.Is(err, warren.ErrUnavailable) {
		t.Error(err)
	}
	r.empty()
}

func TestImagesInUse(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	if _, err := r.PullImage(ctx, alice, "debian", PullOptions{}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("pull by a user: %v", err)
	}
	if _, err := r.PullImage(ctx, operator, "debian", PullOptions{}); err != nil {
		t.Fatal(err)
	}
	r.create(alice, Spec{Name: "box", Image: "debian"})
	if err := r.DeleteImage(ctx, operator, "debian", false); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "box") {
		t.Errorf("delete in use: %v", err)
	}
	if err := r.DeleteImage(ctx, operator, "host", false); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("delete of the host: %v", err)
	}
	r.delete(alice, "box")
	if err := r.DeleteImage(ctx, operator, "debian", false); err != nil {
		t.Error(err)
	}
	if err := r.DeleteImage(ctx, operator, "debian", true); err != nil {
		t.Error(err)
	}
}

func TestTokens(t *testing.T) {
	r, c := timedRig(t, nil)
	ctx := context.Background()
	if _, _, err := r.CreateToken(ctx, alice, "alice", "", 0); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("by a user: %v", err)
	}
	id, secret, err := r.CreateToken(ctx, operator, "alice", "laptop", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	forever, eternal, err := r.CreateToken(ctx, operator, "bob", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	check := func(secret string, want Caller) {
		t.Helper()
		got, err := r.Authenticate(ctx, secret)
		if got != want || (want == Caller{}) != errors.Is(err, warren.ErrDenied) {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	check(secret, alice)
	check(eternal, bob)
	check("", Caller{})
	check(secret+"0", Caller{})
	r.stop()
	r.start()
	check(secret, alice)
	list, err := r.ListTokens(ctx, operator)
	if err != nil || len(list) != 2 || list[0].LastUsed.IsZero() {
		t.Errorf("%+v, %v", list, err)
	}
	if list, err := r.ListTokens(ctx, alice); err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("%+v, %v", list, err)
	}
	c.advance(time.Hour)
	check(secret, Caller{})
	if err := r.DeleteToken(ctx, alice, forever); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a foreign token: %v", err)
	}
	if err := r.DeleteToken(ctx, operator, forever); err != nil {
		t.Error(err)
	}
	check(eternal, Caller{})
}

func TestWatchFollows(t *testing.T) {
	r := newRig(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	const n = 30
	slow, fast := make(chan []string, 1), make(chan []string, 1)
	follow := func(out chan []string, wait time.Duration) {
		var seen []string
		last := int64(0)
		r.Watch(ctx, alice, WatchRequest{}, func(e *Event) error {
			if e.Seq <= last {
				t.Errorf("event %d after %d", e.Seq, last)
			}
			last = e.Seq
			time.Sleep(wait)
			if e.Action == "sandbox.running" {
				seen = append(seen, string(e.SandboxID))
			}
			if len(seen) == n {
				return io.EOF
			}
			return nil
		})
		out <- seen
	}
	go follow(slow, 2*time.Millisecond)
	go follow(fast, 0)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { r.create(alice, Spec{}) })
	}
	wg.Wait()
	a, b := <-fast, <-slow
	if len(a) != n || strings.Join(a, " ") != strings.Join(b, " ") {
		t.Errorf("fast saw %d, slow %d, not the same", len(a), len(b))
	}
}

// TestModel lets 64 workers work on few names and checks each answer against what may have been true meanwhile.
func TestModel(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Starts = 4 })
	ctx := context.Background()
	const names, workers = 4, 64
	var mu sync.Mutex
	alive := map[warren.SandboxID]string{} // created, and no delete of it has succeeded
	byName := map[string]int{}
	deadline := time.Now().Add(3 * time.Second)
	var wg sync.WaitGroup
	var ops [5]int
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(7, uint64(w)))
			for time.Now().Before(deadline) {
				name := fmt.Sprint("n", rnd.IntN(names))
				cctx, cancel := context.WithTimeout(ctx, time.Duration(1+rnd.IntN(400))*time.Millisecond)
				op := rnd.IntN(5)
				switch op {
				case 0, 1:
					sb, err := r.Create(cctx, alice, CreateRequest{Spec: Spec{Name: name}}, nil)
					mu.Lock()
					if err == nil {
						alive[sb.ID] = name
						byName[name]++
					}
					mu.Unlock()
					if err != nil && !errors.Is(err, warren.ErrExists) && !errors.Is(err, warren.ErrState) && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("create: %v", err)
					}
				case 2:
					id, err := r.Resolve(alice, name)
					if err == nil {
						if err = r.Delete(cctx, alice, DeleteRequest{ID: string(id)}); err == nil {
							mu.Lock()
							delete(alive, id)
							mu.Unlock()
							if !r.gone(id) {
								t.Errorf("%s is there after its delete", id)
							}
						}
					}
					if err != nil && !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("delete: %v", err)
					}
				case 3:
					conn, err := r.Dial(cctx, alice, name, warren.GuestPort)
					if err == nil {
						conn.Close()
					} else if !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, warren.ErrState) && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("dial: %v", err)
					}
				case 4:
					if rnd.IntN(3) > 0 {
						break
					}
					_, err := r.Restart(cctx, alice, name)
					if err != nil && !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, warren.ErrState) && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("restart: %v", err)
					}
				}
				cancel()
				mu.Lock()
				ops[op]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	eventually(t, "nothing is stuck", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, sb := range r.boxes {
			if sb.op != nil || sb.state() == Creating || sb.state() == Deleting {
				return false
			}
		}
		return len(r.flights) == 0
	})
	list, _, err := r.List(ctx, alice, ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, sb := range list {
		if seen[sb.Name] {
			t.Errorf("two sandboxes named %s", sb.Name)
		}
		seen[sb.Name] = true
		if sb.State != Running {
			t.Errorf("%s is %s: %+v", sb.Name, sb.State, sb.Failure)
		}
		if _, ok := alive[sb.ID]; !ok {
			t.Errorf("%s is there, and nobody was told", sb.ID)
		}
	}
	if r.world.Len() != len(list) {
		t.Errorf("%d in the driver, %d in the engine", r.world.Len(), len(list))
	}
	t.Logf("operations %v, created %v, %d left", ops, byName, len(list))
	for _, sb := range list {
		r.delete(alice, string(sb.ID))
	}
	r.empty()
}

// TestReconcileTable opens an engine on every combination of what the store and the driver say.
func TestReconcileTable(t *testing.T) {
	ctx := context.Background()
	states := []driver.State{"", driver.Creating, driver.Running, driver.Dead}
	for _, c := range []struct {
		state State
		gen   uint32
		keyed bool
		want  [4]string // per driver state: "gone", "running" or "failed"
	}{
		{Creating, 1, false, [4]string{"gone", "gone", "gone", "gone"}},
		{Creating, 1, true, [4]string{"gone", "gone", "running", "gone"}},
		{Creating, 2, false, [4]string{"failed", "failed", "failed", "failed"}},
		{Running, 1, false, [4]string{"failed", "failed", "running", "failed"}},
		{Running, 3, true, [4]string{"failed", "failed", "running", "failed"}},
		{Failed, 1, false, [4]string{"failed", "failed", "failed", "failed"}},
		{Deleting, 1, false, [4]string{"gone", "gone", "gone", "gone"}},
		{"odd", 1, false, [4]string{"failed", "failed", "failed", "failed"}},
	} {
		for i, has := range states {
			t.Run(fmt.Sprintf("%s gen %d keyed %t driver %q", c.state, c.gen, c.keyed, has), func(t *testing.T) {
				r := newRig(t, nil)
				key := ""
				if c.keyed {
					key = "k"
				}
				sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "box"}, IdempotencyKey: key}, nil)
				if err != nil {
					t.Fatal(err)
				}
				r.stop()
				db, err := store.Open(ctx, store.Options{Path: filepath.Join(r.dir, "warren.db")})
				if err != nil {
					t.Fatal(err)
				}
				rows, err := db.Sandboxes(ctx)
				if err != nil {
					t.Fatal(err)
				}
				rows[0].State, rows[0].Generation = string(c.state), c.gen
				spaces, err := db.Workspaces(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if c.state == Creating && c.gen == 1 {
					spaces[0].State = wsCreating
				}
				if err := db.Update(ctx, func(tx *store.Tx) error {
					return errors.Join(tx.UpdateSandbox(rows[0]), tx.UpdateWorkspace(spaces[0]))
				}); err != nil {
					t.Fatal(err)
				}
				if err := db.Close(); err != nil {
					t.Fatal(err)
				}
				r.world.Forget(sb.ID)
				if has != "" {
					st := driver.Status{ID: sb.ID, State: has}
					if has == driver.Dead {
						st.Exit = &driver.Exit{Reason: "oom", Time: time.Now()}
					}
					r.world.Put(st)
				}
				stranger := warren.SandboxID(newID('s'))
				r.world.Put(driver.Status{ID: stranger, State: driver.Running})
				r.start()
				switch c.want[i] {
				case "gone":
					eventually(t, "it is gone", func() bool { return r.leftovers() == nil })
				case "running":
					eventually(t, "it runs", func() bool {
						got, err := r.Get(ctx, alice, "box")
						return err == nil && got.State == Running
					})
					conn, err := r.Dial(ctx, alice, "box", warren.GuestPort)
					if err != nil {
						t.Fatal(err)
					}
					conn.Close()
				case "failed":
					eventually(t, "it failed", func() bool {
						got, err := r.Get(ctx, alice, "box")
						return err == nil && got.State == Failed
					})
					if _, err := r.GetWorkspace(ctx, alice, string(sb.WorkspaceID), true); err != nil {
						t.Errorf("its workspace: %v", err)
					}
				}
				eventually(t, "the stranger is removed", func() bool {
					for _, id := range r.world.IDs() {
						if id == stranger {
							return false
						}
					}
					return true
				})
				if c.want[i] != "gone" {
					r.delete(alice, "box")
				}
				r.empty()
			})
		}
	}
}

func TestDriverDown(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	r.stop()
	r.world.Inject(fake.OpList, fake.Fault{Err: fmt.Errorf("keeper gone: %w", warren.ErrUnavailable)})
	r.start()
	if got, err := r.Get(context.Background(), alice, "box"); err != nil || got.State != Running || got.ID != sb.ID {
		t.Errorf("with a driver that does not list: %+v, %v", got, err)
	}
	if r.world.Len() != 1 {
		t.Error("it was removed")
	}
}

func TestAdoptHundred(t *testing.T) {
	r := newRig(t, nil)
	for range 100 {
		r.create(alice, Spec{})
	}
	r.stop()
	start := time.Now()
	r.start()
	list, _, err := r.List(context.Background(), alice, ListRequest{States: []State{Running}, PageSize: 1000})
	if err != nil || len(list) != 100 {
		t.Fatalf("%d run, %v", len(list), err)
	}
	t.Logf("adopted 100 in %v", time.Since(start))
	eventually(t, "old states of the host's image are pruned, but for those in use", func() bool {
		r.images.mu.Lock()
		defer r.images.mu.Unlock()
		return len(r.images.kept) == 1 && r.images.kept["sha256:host"]
	})
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	r := newRig(t, func(o *Options) { o.Registerer = reg })
	r.create(alice, Spec{})
	r.Create(context.Background(), alice, CreateRequest{Spec: Spec{Image: "nope"}}, nil)
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]int{}
	for _, f := range all {
		have[f.GetName()] = len(f.GetMetric())
	}
	for name, n := range map[string]int{"warren_sandboxes": 5, "warren_paused_image_bytes": 1, "warren_sandbox_creates_total": 2, "warren_sandbox_create_step_seconds": 6,
		"warren_start_queue_length": 1, "warren_store_commit_seconds": 1, "warren_sandbox_create_seconds": 1} {
		if have[name] != n {
			t.Errorf("%s has %d series, want %d", name, have[name], n)
		}
	}
}

// TestSilentGuest dials a sandbox whose guest was stopped: that has an end, and does not keep the sandbox from its idle timeout.
func TestSilentGuest(t *testing.T) {
	r, c := timedRig(t, func(o *Options) { o.DialTimeout = 50 * time.Millisecond })
	ctx := context.Background()
	sb := r.create(alice, Spec{IdleTimeout: time.Minute, IdleAction: IdleDelete})
	used := r.create(alice, Spec{IdleTimeout: time.Minute, IdleAction: IdleDelete})
	_, waiting, err := r.Hold(ctx, alice, string(sb.ID))
	if err != nil {
		t.Fatal(err)
	}
	_, answered, err := r.Hold(ctx, alice, string(used.ID))
	if err != nil {
		t.Fatal(err)
	}
	answered.Answered()
	c.advance(59 * time.Second)
	before, err := r.Get(ctx, alice, string(sb.ID))
	if err != nil {
		t.Fatal(err)
	}
	r.world.Inject(fake.OpDial, fake.Fault{Latency: time.Hour})
	for _, ref := range []warren.SandboxID{sb.ID, used.ID} {
		for range 2 {
			_, err := r.DialPooled(ctx, alice, string(ref), warren.GuestPort)
			if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "does not answer; `warren restart "+string(ref)[:4]) {
				t.Fatalf("dial: %v", err)
			}
		}
	}
	then := c.Now()
	c.advance(500 * time.Millisecond)
	after, err := r.Get(ctx, alice, string(sb.ID))
	if err != nil {
		t.Fatal(err)
	}
	if !before.LastActive.Equal(then) || after.LastActive.After(then) {
		t.Errorf("last active %v while a call waits, %v when the guest is silent, at %v", before.LastActive, after.LastActive, c.Now())
	}
	// The call that still waits does not count either, but one that was answered goes on.
	c.advance(time.Minute)
	eventually(t, "it idles out", func() bool { return r.gone(sb.ID) })
	waiting.End()
	r.settle()
	if r.gone(used.ID) {
		t.Fatal("a sandbox with a use that was answered idled out")
	}
	answered.End()
	answered.End()
	r.settle()
	if r.gone(used.ID) {
		t.Fatal("gone at the end of its last use")
	}
	r.world.Inject(fake.OpDial, fake.Fault{})
}
