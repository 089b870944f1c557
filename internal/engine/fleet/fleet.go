// Package fleet measures the engine and its store without the cost of real sandboxes: on the fake driver, with
// workspaces that hold nothing.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/store"
)

// Result is what a run measured.
type Result struct {
	Sandboxes, Concurrency int
	// PerSecond is creates per second over the whole run; P50, P99 and Max are latencies of one create.
	PerSecond     float64
	P50, P99, Max time.Duration
	// CPU is processor time of the whole process per create; it tells what an idle machine could do when this one is not.
	CPU time.Duration
	// RecordBytes is heap per sandbox of the engine and the fake driver together, of which WorldBytes is the driver's;
	// StoreBytes is the database's size per sandbox.
	RecordBytes, WorldBytes, StoreBytes int64
	// GroupSize is how many changes were committed together on average.
	GroupSize float64
	// Reopen is how long opening the store and the engine took with all sandboxes in them.
	Reopen time.Duration
	// DeletesPerSecond is of deletes with the same concurrency.
	DeletesPerSecond float64
}

// Bench creates n sandboxes on the fake driver, so many at a time, opens the engine again on them, deletes them all, and
// writes what it measured to w. Its files are below dir, and removed.
func Bench(ctx context.Context, dir string, n, concurrency int, w io.Writer) (_ *Result, err error) {
	if n < 1 || concurrency < 1 {
		return nil, fmt.Errorf("fleet of %d with concurrency %d: both must be at least 1: %w", n, concurrency, warren.ErrInvalid)
	}
	dir, err = os.MkdirTemp(dir, "warren-fleet-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	f := &fleet{dir: dir, world: fake.NewWorld()}
	r := &Result{Sandboxes: n, Concurrency: concurrency}

	if r.WorldBytes, err = worldBytes(ctx); err != nil {
		return nil, err
	}
	before := heap()
	if err := f.open(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()

	users := min(64, n) // so that names and budgets are spread as on a server
	took := make([]time.Duration, n)
	ids := make([]string, n)
	start, cpu := time.Now(), cpuTime()
	if err := parallel(ctx, n, concurrency, func(i int) error {
		begin := time.Now()
		sb, err := f.eng.Create(ctx, caller(i%users), engine.CreateRequest{
			IdempotencyKey: fmt.Sprintf("key-%d", i),
			Spec:           engine.Spec{Name: fmt.Sprintf("box-%d", i), Labels: map[string]string{"fleet": "bench"}, Env: map[string]string{"CI": "1"}, IdleTimeout: 24 * time.Hour},
		}, nil)
		if err != nil {
			return err
		}
		took[i], ids[i] = time.Since(begin), string(sb.ID)
		return nil
	}); err != nil {
		return nil, err
	}
	all := time.Since(start)
	r.CPU = (cpuTime() - cpu) / time.Duration(n)
	slices.Sort(took)
	r.PerSecond = float64(n) / all.Seconds()
	r.P50, r.P99, r.Max = took[n/2], took[min(n-1, n*99/100)], took[n-1]
	if groups := f.groups.Load(); groups > 0 {
		r.GroupSize = float64(f.changes.Load()) / float64(groups)
	}
	r.RecordBytes = (heap() - before) / int64(n)
	runtime.KeepAlive(f)
	fmt.Fprintf(w, "fleet: %d sandboxes on the fake driver, %d creates at a time, GOMAXPROCS %d\n", n, concurrency, runtime.GOMAXPROCS(0))
	fmt.Fprintf(w, "  create        %8.0f /s    p50 %s   p99 %s   max %s\n", r.PerSecond, round(r.P50), round(r.P99), round(r.Max))
	fmt.Fprintf(w, "  processor     %8s for each create, of all threads together\n", r.CPU.Round(time.Microsecond))
	fmt.Fprintf(w, "  commits       %8.1f changes each, every one with fsync\n", r.GroupSize)
	fmt.Fprintf(w, "  memory        %8d bytes of heap per sandbox, %d of them the fake driver's\n", r.RecordBytes, r.WorldBytes)

	if err := f.close(); err != nil {
		return nil, err
	}
	start = time.Now()
	if err := f.open(ctx); err != nil {
		return nil, err
	}
	r.Reopen = time.Since(start)
	if info, err := os.Stat(filepath.Join(dir, "warren.db")); err == nil {
		r.StoreBytes = info.Size() / int64(n)
	}
	fmt.Fprintf(w, "  store         %8d bytes on disk per sandbox\n", r.StoreBytes)
	fmt.Fprintf(w, "  reopen        %8s with integrity check and reconciliation of all\n", round(r.Reopen))

	start = time.Now()
	if err := parallel(ctx, n, concurrency, func(i int) error {
		return f.eng.Delete(ctx, caller(i%users), engine.DeleteRequest{ID: ids[i]})
	}); err != nil {
		return nil, err
	}
	r.DeletesPerSecond = float64(n) / time.Since(start).Seconds()
	fmt.Fprintf(w, "  delete        %8.0f /s\n", r.DeletesPerSecond)
	if left := f.world.Len(); left != 0 {
		return r, fmt.Errorf("%d sandboxes are left in the driver", left)
	}
	return r, nil
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }

func caller(i int) engine.Caller { return engine.Caller{User: fmt.Sprintf("user-%d", i)} }

// parallel calls fn with 0 to n-1, so many at a time, and stops at the first error.
func parallel(ctx context.Context, n, concurrency int, fn func(i int) error) error {
	var next atomic.Int64
	var once sync.Once
	var first error
	var wg sync.WaitGroup
	var stop atomic.Bool
	for range concurrency {
		wg.Go(func() {
			for !stop.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				err := ctx.Err()
				if err == nil {
					err = fn(i)
				}
				if err != nil {
					once.Do(func() { first = err })
					stop.Store(true)
					return
				}
			}
		})
	}
	wg.Wait()
	return first
}

// cpuTime is what this process has used so far.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// heap is what is in use after a collection.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// worldBytes measures what a sandbox costs in the fake driver alone.
func worldBytes(ctx context.Context) (int64, error) {
	const n = 20_000
	before := heap()
	d := fake.New(fake.Options{})
	defer d.Close()
	for i := range n {
		if err := d.Create(ctx, &driver.Spec{
			ID: warren.SandboxID(fmt.Sprintf("s%019d", i)), Hostname: "box", Root: driver.Root{Digest: "sha256:fleet"},
			Limits: driver.Limits{CPUMillis: 1, Memory: 1, Disk: 1, PIDs: 1},
			Mounts: []driver.Mount{{Source: "/", Target: "/workspace"}, {Source: "/", Target: "/home/user"}},
		}); err != nil {
			return 0, err
		}
	}
	after := heap()
	runtime.KeepAlive(d)
	return (after - before) / n, nil
}

// fleet is an engine whose durable things hold nothing.
type fleet struct {
	dir     string
	world   *fake.World
	store   *store.Store
	driver  *fake.Driver
	eng     *engine.Engine
	groups  atomic.Int64
	changes atomic.Int64
}

func (f *fleet) open(ctx context.Context) (err error) {
	if f.store, err = store.Open(ctx, store.Options{Path: filepath.Join(f.dir, "warren.db")}); err != nil {
		return err
	}
	f.driver = fake.New(fake.Options{World: f.world})
	f.eng, err = engine.Open(ctx, engine.Options{
		Store: f.store, Images: images{}, Repos: repos{}, Workspaces: workspaces{f.dir},
		Drivers: map[string]driver.Driver{"fake": f.driver}, DefaultDriver: "fake",
	})
	if err != nil {
		return errors.Join(err, f.close())
	}
	f.store.Observe(func(_ time.Duration, changes int) {
		f.groups.Add(1)
		f.changes.Add(int64(changes))
	})
	return nil
}

func (f *fleet) close() error {
	var errs []error
	if f.eng != nil {
		errs = append(errs, f.eng.Close())
	}
	if f.driver != nil {
		errs = append(errs, f.driver.Close())
	}
	if f.store != nil {
		errs = append(errs, f.store.Close())
	}
	f.eng, f.driver, f.store = nil, nil, nil
	return errors.Join(errs...)
}

// errNothing is what the durable things of a fleet say to all that it does not need.
var errNothing = fmt.Errorf("a fleet has none: %w", warren.ErrNotFound)

type images struct{ engine.Images }

func (images) Resolve(context.Context, string) (*engine.Image, error) {
	return &engine.Image{Name: "host", Digest: "sha256:fleet", Kind: "host", Root: driver.Root{Digest: "sha256:fleet"}}, nil
}

type repos struct{ engine.Repos }

func (repos) Fetch(context.Context, string, engine.FetchOptions) (*engine.Repo, error) {
	return nil, errNothing
}

// workspaces are all the same empty directory.
type workspaces struct{ dir string }

func (w workspaces) dirs() *engine.WorkspaceDirs {
	return &engine.WorkspaceDirs{Files: w.dir, Home: w.dir}
}

func (w workspaces) Prepare(context.Context, warren.WorkspaceID, engine.WorkspaceSource) (*engine.WorkspaceDirs, error) {
	return w.dirs(), nil
}
func (w workspaces) Populate(context.Context, warren.WorkspaceID) error { return nil }
func (w workspaces) Get(context.Context, warren.WorkspaceID) (*engine.WorkspaceDirs, error) {
	return w.dirs(), nil
}
func (w workspaces) Delete(context.Context, warren.WorkspaceID) error { return nil }
func (w workspaces) Copy(context.Context, warren.WorkspaceID, warren.WorkspaceID) (string, error) {
	return "", errNothing
}
func (w workspaces) BeginCopy(context.Context, warren.WorkspaceID, warren.WorkspaceID, bool) (engine.WorkspaceCopy, error) {
	return nil, errNothing
}
func (w workspaces) Replace(context.Context, warren.WorkspaceID, warren.WorkspaceID) error {
	return errNothing
}
func (w workspaces) ReplaceNeeds(context.Context, warren.WorkspaceID) (int64, error) { return 0, nil }
func (w workspaces) BeginReplace(context.Context, warren.WorkspaceID, warren.WorkspaceID) (engine.WorkspaceReplacement, error) {
	return nil, errNothing
}
func (w workspaces) Sync(context.Context, warren.WorkspaceID) error { return nil }
func (w workspaces) Adopt(context.Context, warren.WorkspaceID, warren.WorkspaceID) error {
	return errNothing
}
func (w workspaces) Usage(context.Context, warren.WorkspaceID) (int64, int64, error) {
	return 0, 0, nil
}
func (w workspaces) Size(context.Context, warren.WorkspaceID) (int64, error) { return 0, nil }
func (w workspaces) Diff(context.Context, warren.WorkspaceID, engine.DiffOptions, io.Writer) error {
	return errNothing
}
func (w workspaces) Mark(context.Context, warren.WorkspaceID) error { return errNothing }
func (w workspaces) Commit(context.Context, warren.WorkspaceID, engine.CommitOptions) (*engine.Commit, error) {
	return nil, errNothing
}
func (w workspaces) Push(context.Context, warren.WorkspaceID, engine.PushOptions) (*engine.PushResult, error) {
	return nil, errNothing
}
func (w workspaces) FormatPatch(context.Context, warren.WorkspaceID, io.Writer) error {
	return errNothing
}
