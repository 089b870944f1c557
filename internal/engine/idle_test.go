package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// lab is a rig whose sandboxes use the processor, and are held, as the test says.
type lab struct {
	*rig
	clock *testClock
	cpu   atomic.Int64 // nanoseconds
	hold  atomic.Value // a string, for the guest's metrics
}

func newLab(t *testing.T, change func(*Options)) *lab {
	l := &lab{clock: newTestClock()}
	l.hold.Store("")
	l.rig = prepareRig(t, t.TempDir(), change)
	l.rig.clock = l.clock
	l.fopts.Stats = func(warren.SandboxID) driver.Stats {
		return driver.Stats{CPUTime: time.Duration(l.cpu.Load()), Memory: 1 << 20}
	}
	l.fopts.Guest = func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				fmt.Fprintf(w, `{"processes":3,"holdUntil":%q}`, l.hold.Load())
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})
	}
	l.fopts.Dial = func(context.Context, warren.SandboxID, uint16) (net.Conn, error) {
		near, far := net.Pipe()
		go io.Copy(far, far)
		return near, nil
	}
	l.start()
	t.Cleanup(l.stop)
	return l
}

func (l *lab) state(id warren.SandboxID) State {
	l.t.Helper()
	sb, err := l.Get(context.Background(), operator, string(id))
	if err != nil {
		l.t.Fatal(err)
	}
	return sb.State
}

// pass lets d go by, half a second at a time, so that looks have both of their ends; busy is the part of a processor
// that sandboxes use meanwhile.
func (l *lab) pass(d time.Duration, busy float64) {
	const step = 500 * time.Millisecond
	for ; d > 0; d -= step {
		l.cpu.Add(int64(busy * float64(step)))
		l.clock.advance(step)
		time.Sleep(500 * time.Microsecond) // for those that wait on the clock
	}
	time.Sleep(5 * time.Millisecond)
}

func (l *lab) paused(id warren.SandboxID) {
	l.t.Helper()
	eventually(l.t, "it is paused", func() bool { l.clock.advance(10 * time.Millisecond); return l.state(id) == Paused })
}

func (l *lab) runs(id warren.SandboxID, when string) {
	l.t.Helper()
	if s := l.state(id); s != Running {
		l.t.Fatalf("%s it is %s", when, s)
	}
}

func TestIdlePauses(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	sb := l.create(alice, Spec{Name: "box", IdleTimeout: time.Minute})
	if !sb.Expires.IsZero() || sb.Spec.IdleAction != IdlePause {
		t.Errorf("expires %v, %s", sb.Expires, sb.Spec.IdleAction)
	}
	l.pass(58*time.Second, 0)
	l.runs(sb.ID, "before the timeout")
	l.pass(3*time.Second, 0)
	l.paused(sb.ID)
	got, err := l.Get(ctx, alice, "box")
	if err != nil || got.PauseReason != PauseIdle || got.ImageSize == 0 {
		t.Errorf("paused: %+v, %v", got, err)
	}
	// Who comes back to it did not leave because of the pause.
	id, use, err := l.Hold(ComingBack(ctx), alice, "box")
	if err != nil || id != sb.ID {
		t.Fatal(err)
	}
	// A client that waits is attached, for as long as it likes.
	l.pass(3*time.Minute, 0)
	l.runs(sb.ID, "while it is attached")
	use.End()
	l.pass(50*time.Second, 0)
	l.runs(sb.ID, "less than a minute after the end of the use")
	l.pass(11*time.Second, 0)
	l.paused(sb.ID)
	// The events say why.
	var why []string
	l.Watch(ctx, alice, WatchRequest{ID: "box", NoFollow: true}, func(e *Event) error {
		if e.Action == "sandbox.pause" {
			why = append(why, e.Actor+": "+e.Message)
		}
		return nil
	})
	if len(why) != 2 || why[0] != "warren: it was idle for 1m0s" {
		t.Errorf("events: %q", why)
	}
	l.clock.advance(time.Hour)
	l.settle()
	if s := l.state(sb.ID); s != Paused {
		t.Errorf("an hour later it is %s", s)
	}
}

// TestIdleConnection has a connection to a port: it counts by what it carries.
func TestIdleConnection(t *testing.T) {
	l := newLab(t, nil)
	sb := l.create(alice, Spec{IdleTimeout: time.Minute})
	conn, err := l.Dial(t.Context(), alice, string(sb.ID), 8080)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 3 {
		l.pass(40*time.Second, 0)
		l.runs(sb.ID, "less than a minute after a byte")
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	l.pass(58*time.Second, 0)
	l.runs(sb.ID, "less than a minute after the last byte")
	l.pass(3*time.Second, 0)
	l.paused(sb.ID)
}

func TestIdleBusy(t *testing.T) {
	l := newLab(t, func(o *Options) { o.MaxHold = 30 * time.Minute })
	sb := l.create(alice, Spec{IdleTimeout: time.Minute})
	l.pass(5*time.Minute, 0.06)
	l.runs(sb.ID, "with 6% of a processor")
	l.pass(2*time.Minute+5*time.Second, 0.04)
	l.paused(sb.ID)
	// A process holds it: for as long as it says, and no longer than is allowed.
	if _, err := l.Resume(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	l.hold.Store(l.clock.Now().Add(5 * time.Minute).Format(time.RFC3339))
	l.pass(4*time.Minute+50*time.Second, 0)
	l.runs(sb.ID, "while it is held")
	l.pass(15*time.Second, 0)
	l.paused(sb.ID)
	if _, err := l.Resume(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	// A hold that ends before its time, as with its command.
	l.hold.Store(l.clock.Now().Add(25 * time.Minute).Format(time.RFC3339))
	l.pass(5*time.Minute, 0)
	l.runs(sb.ID, "while it is held for longer")
	l.hold.Store("")
	l.pass(2*time.Minute+5*time.Second, 0)
	l.paused(sb.ID)
	if _, err := l.Resume(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	l.hold.Store(l.clock.Now().Add(1000 * time.Hour).Format(time.RFC3339))
	l.pass(29*time.Minute, 0)
	l.runs(sb.ID, "while a hold is allowed")
	l.pass(2*time.Minute, 0)
	l.paused(sb.ID)
}

// What a sandbox sends or receives keeps it awake for as long as its idle timeout.
func TestIdleTraffic(t *testing.T) {
	var last atomic.Int64
	n := &policyNetwork{have: map[warren.SandboxID]NetworkPolicy{}}
	l := newLab(t, func(o *Options) {
		o.Network, o.DefaultPolicy = n, "locked"
		o.Drivers = map[string]driver.Driver{"fake": plainCards{o.Drivers["fake"].(*fake.Driver)}}
		clock := o.Clock
		n.quiet = func() time.Duration { return time.Duration(clock.Now().UnixNano() - last.Load()) }
	})
	last.Store(l.clock.Now().UnixNano())
	sb := l.create(alice, Spec{IdleTimeout: time.Minute})
	for range 5 {
		l.pass(50*time.Second, 0)
		last.Store(l.clock.Now().UnixNano())
	}
	l.runs(sb.ID, "with a byte every 50 seconds")
	l.pass(55*time.Second, 0)
	l.runs(sb.ID, "55 seconds after the last byte")
	l.pass(10*time.Second, 0)
	l.paused(sb.ID)
}

// TestIdlePauseFails lets pauses fail: the sandbox runs on, and is not stopped over and over.
func TestIdlePauseFails(t *testing.T) {
	l := newLab(t, nil)
	sb := l.create(alice, Spec{IdleTimeout: time.Second})
	l.world.Inject(fake.OpSnapshot, fake.Fault{Err: errors.New("the disk is full")})
	failed := func() (n int) {
		l.Watch(t.Context(), alice, WatchRequest{NoFollow: true}, func(e *Event) error {
			if e.Action == "sandbox.pause_failed" {
				n++
			}
			return nil
		})
		return n
	}
	l.pass(2*time.Second, 0)
	eventually(t, "a pause fails", func() bool { l.clock.advance(10 * time.Millisecond); return failed() == 1 })
	l.pass(50*time.Second, 0)
	if n := failed(); n != 1 {
		t.Errorf("%d attempts within a minute", n)
	}
	l.runs(sb.ID, "after a pause that failed")
	l.world.Inject(fake.OpSnapshot, fake.Fault{})
	l.pass(12*time.Second, 0)
	l.paused(sb.ID)
}

// TestIdleOf has what is not paused: a driver that cannot, a failed sandbox, a time to live, and a choice that cannot be.
func TestIdleOf(t *testing.T) {
	l := newLab(t, func(o *Options) { o.Drivers["plain"] = plainDriver{o.Drivers["fake"]} })
	ctx := t.Context()
	if _, err := l.Create(ctx, alice, CreateRequest{Spec: Spec{Driver: "plain", IdleAction: IdlePause}}, nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a pause that cannot be: %v", err)
	}
	if _, err := l.Create(ctx, alice, CreateRequest{Spec: Spec{IdleAction: "stop"}}, nil); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("an action that there is not: %v", err)
	}
	plain := l.create(alice, Spec{Driver: "plain", IdleTimeout: time.Minute})
	if plain.Spec.IdleAction != IdleDelete || plain.Expires.IsZero() {
		t.Errorf("without the capability: %+v", plain)
	}
	dead := l.create(alice, Spec{IdleTimeout: time.Minute})
	ttl := l.create(alice, Spec{IdleTimeout: time.Minute, TTL: 2 * time.Minute})
	if want := l.clock.Now().Add(2 * time.Minute); !ttl.Expires.Equal(want) {
		t.Errorf("expires %v, want %v", ttl.Expires, want)
	}
	l.world.Kill(dead.ID, driver.Exit{Reason: "oom"})
	eventually(t, "it fails", func() bool { return l.state(dead.ID) == Failed })
	l.pass(62*time.Second, 0)
	eventually(t, "a sandbox that cannot be paused is removed", func() bool { return l.gone(plain.ID) })
	l.paused(ttl.ID)
	l.pass(time.Minute, 0)
	eventually(t, "the time to live ends a sandbox that idles", func() bool { return l.gone(ttl.ID) })
	if s := l.state(dead.ID); s != Failed {
		t.Errorf("the failed one is %s", s)
	}
	// A choice can be changed, and then holds for what there is.
	del := IdleDelete
	if got, err := l.Update(ctx, alice, UpdateRequest{ID: string(dead.ID), IdleAction: &del}); err != nil || got.Spec.IdleAction != IdleDelete {
		t.Errorf("update: %+v, %v", got, err)
	}
	l.pass(61*time.Second, 0)
	eventually(t, "it is removed", func() bool { return l.gone(dead.ID) })
	l.empty()
}

// TestAutoResume calls paused sandboxes.
func TestAutoResume(t *testing.T) {
	l := newLab(t, nil)
	ctx := t.Context()
	sb := l.create(alice, Spec{Name: "box"})
	l.pauseNow(sb.ID)
	// What reads the workspace needs no sandbox.
	if err := l.Diff(ctx, alice, "box", DiffOptions{}, io.Discard); err != nil {
		t.Error(err)
	}
	if err := l.MarkWorkspace(ctx, alice, "box"); err != nil {
		t.Error(err)
	}
	if _, err := l.Stats(ctx, alice, "box"); !errors.Is(err, warren.ErrState) {
		t.Errorf("stats: %v", err)
	}
	// Who was attached when it was paused does not undo that, also after a restart of the server.
	for range 2 {
		for _, call := range []func(context.Context) error{
			func(ctx context.Context) error { _, _, err := l.Hold(ctx, alice, "box"); return err },
			func(ctx context.Context) error {
				_, err := l.DialPooled(ctx, alice, "box", warren.GuestPort)
				return err
			},
		} {
			if err := call(ComingBack(ctx)); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "is paused; `warren resume box`") {
				t.Errorf("coming back: %v", err)
			}
		}
		l.stop()
		l.start()
	}
	if s := l.state(sb.ID); s != Paused {
		t.Fatalf("it is %s", s)
	}
	// Many callers share one resume.
	before := l.world.Calls(fake.OpRestore)
	l.world.Inject(fake.OpRestore, fake.Fault{Latency: 20 * time.Millisecond})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			conn, err := l.Dial(ctx, alice, "box", warren.GuestPort)
			if err != nil {
				t.Error(err)
				return
			}
			conn.Close()
		})
	}
	wg.Wait()
	l.world.Inject(fake.OpRestore, fake.Fault{})
	if n := l.world.Calls(fake.OpRestore) - before; n != 1 {
		t.Errorf("%d resumes for 50 callers", n)
	}
	// One that may not be resumed by a call.
	no := false
	if _, err := l.Update(ctx, alice, UpdateRequest{ID: "box", AutoResume: &no}); err != nil {
		t.Fatal(err)
	}
	l.pauseNow(sb.ID)
	if _, _, err := l.Hold(ctx, alice, "box"); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren resume box") {
		t.Errorf("without auto-resume: %v", err)
	}
	if _, err := l.Resume(ctx, alice, "box"); err != nil {
		t.Error(err)
	}
	yes := true
	if _, err := l.Update(ctx, alice, UpdateRequest{ID: "box", AutoResume: &yes}); err != nil {
		t.Fatal(err)
	}
	// A resume that fails says what to do, to each that waits.
	l.pauseNow(sb.ID)
	l.world.Inject(fake.OpRestore, fake.Fault{Err: errors.New("no")})
	if _, _, err := l.Hold(ctx, alice, "box"); err == nil || !strings.Contains(err.Error(), "stays paused") || !strings.Contains(err.Error(), "warren restart box") {
		t.Errorf("a resume that fails: %v", err)
	}
	l.world.Inject(fake.OpRestore, fake.Fault{})
	l.delete(alice, "box")
	l.empty()
}

// TestPauseOfDial pauses a sandbox while a connection is being made: that does not undo the pause.
func TestPauseOfDial(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{})
	r.world.Inject(fake.OpDial, fake.Fault{Latency: 2 * quiesceWait})
	before := r.world.Calls(fake.OpDial)
	dialled := make(chan error, 1)
	go func() {
		_, err := r.Dial(context.Background(), alice, string(sb.ID), warren.GuestPort)
		dialled <- err
	}()
	eventually(t, "the dial is under way", func() bool { return r.world.Calls(fake.OpDial) > before })
	r.pauseNow(sb.ID)
	if err := <-dialled; !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "is paused") {
		t.Errorf("dial: %v", err)
	}
	if got, err := r.Get(t.Context(), alice, string(sb.ID)); err != nil || got.State != Paused {
		t.Errorf("after it: %+v, %v", got, err)
	}
}

// TestAutoResumeBudget refuses a call for whose resume there is no room.
func TestAutoResumeBudget(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Budgets.PerUser = Budget{Memory: 1 << 30} })
	big := Spec{Resources: Resources{MemoryBytes: 1 << 30}}
	first := r.create(alice, big)
	r.pauseNow(first.ID)
	r.create(alice, big)
	_, _, err := r.Hold(t.Context(), alice, string(first.ID))
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "is paused and cannot be resumed") {
		t.Errorf("hold: %v", err)
	}
	var b *BudgetError
	if !errors.As(err, &b) {
		t.Errorf("no budget named: %v", err)
	}
}

// TestPausedCounts counts memory on disk as disk: it never forbids a pause, and what is over the budget forbids more.
func TestPausedCounts(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Budgets.PerUser = Budget{Disk: 2<<20 + 100} })
	small := Spec{Resources: Resources{DiskBytes: 1 << 20}}
	sb := r.create(alice, small)
	r.pauseNow(sb.ID)
	if _, err := r.Create(t.Context(), alice, CreateRequest{Spec: small}, nil); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("create: %v", err)
	}
	_, before := r.usageNow()
	r.stop()
	r.start()
	if _, now := r.usageNow(); now != before {
		t.Errorf("after a restart %+v is in use, before %+v", now, before)
	}
	if _, err := r.Resume(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	second := r.create(alice, small)
	r.pauseNow(sb.ID)
	r.pauseNow(second.ID)
	if _, err := r.Restart(t.Context(), alice, string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	r.delete(alice, string(sb.ID))
	r.delete(alice, string(second.ID))
	r.empty()
}

// TestPausedFleet has 200 paused sandboxes: another server finds all, after a restart as after a boot, and each goes on.
func TestPausedFleet(t *testing.T) {
	const n = 200
	r := newRig(t, nil)
	var ids []warren.SandboxID
	for range n {
		ids = append(ids, r.create(alice, Spec{IdleTimeout: time.Hour}).ID)
	}
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() { r.pauseNow(id) })
	}
	wg.Wait()
	if r.world.Len() != 0 {
		t.Errorf("%d executions are left", r.world.Len())
	}
	_, used := r.usageNow()
	if used.cpu != 0 || used.memory != 0 {
		t.Errorf("paused, they count for %+v", used)
	}
	for _, when := range []string{"restart", "boot"} {
		r.stop()
		if when == "boot" {
			// Nothing of what ran is there, and the driver knows of nothing.
			world, err := fake.OpenWorld(filepath.Join(r.dir, "world-after"))
			if err != nil {
				t.Fatal(err)
			}
			r.world = world
		}
		r.start()
		list, _, err := r.List(t.Context(), alice, ListRequest{States: []State{Paused}, PageSize: 1000})
		if err != nil || len(list) != n {
			t.Fatalf("after a %s %d are paused, %v", when, len(list), err)
		}
		if _, now := r.usageNow(); now != used {
			t.Errorf("after a %s they count for %+v, before for %+v", when, now, used)
		}
	}
	for _, id := range ids {
		wg.Go(func() {
			_, use, err := r.Hold(context.Background(), alice, string(id))
			if err != nil {
				t.Error(err)
				return
			}
			use.End()
		})
	}
	wg.Wait()
	if r.world.Len() != n {
		t.Errorf("%d run", r.world.Len())
	}
	for _, id := range ids {
		wg.Go(func() { r.delete(alice, string(id)) })
	}
	wg.Wait()
	r.empty()
}

// TestIdleBoundary calls sandboxes in the moment in which they are paused. A use that has begun is not cut off; one that comes
// later waits for the pause and for a resume.
func TestIdleBoundary(t *testing.T) {
	l := newLab(t, nil)
	var resumed int
	for i := range 60 {
		sb := l.create(alice, Spec{IdleTimeout: time.Second})
		before := l.world.Calls(fake.OpRestore)
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 16 {
				l.clock.advance(100 * time.Millisecond)
				time.Sleep(200 * time.Microsecond)
			}
		})
		wg.Go(func() {
			time.Sleep(time.Duration(6000+i*250) * time.Microsecond)
			_, use, err := l.Hold(context.Background(), alice, string(sb.ID))
			if err != nil {
				t.Errorf("try %d: %v", i, err)
				return
			}
			for range 20 {
				if got, err := l.Get(context.Background(), alice, string(sb.ID)); err != nil || got.State != Running {
					t.Errorf("try %d: in use, and %v %v", i, got, err)
					break
				}
				l.clock.advance(100 * time.Millisecond)
				time.Sleep(100 * time.Microsecond)
			}
			use.End()
		})
		wg.Wait()
		resumed += l.world.Calls(fake.OpRestore) - before
		l.delete(alice, string(sb.ID))
	}
	t.Logf("%d of 60 came after the pause", resumed)
	l.empty()
}
