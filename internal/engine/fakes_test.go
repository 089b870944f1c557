package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/store"
)

// fakeImages has the host's image and those that a test adds.
type fakeImages struct {
	mu     sync.Mutex
	images map[string]*Image
	kept   map[string]bool
}

func newFakeImages() *fakeImages {
	f := &fakeImages{images: map[string]*Image{}}
	f.add("host", "host")
	return f
}

func (f *fakeImages) add(name, kind string) *Image {
	f.mu.Lock()
	defer f.mu.Unlock()
	img := &Image{Name: name, Digest: "sha256:" + name, Kind: kind, Config: ImageConfig{Env: map[string]string{"PATH": "/bin"}}, Root: driver.Root{Digest: "sha256:" + name}}
	f.images[name] = img
	return img
}

func (f *fakeImages) Resolve(_ context.Context, ref string) (*Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, img := range f.images {
		if name == ref || img.Digest == ref {
			return img, nil
		}
	}
	return nil, fmt.Errorf("image %q: %w; run `warren image pull %s` first", ref, warren.ErrNotFound, ref)
}

// PruneHost keeps in mind what it was told to keep.
func (f *fakeImages) PruneHost(keep map[string]bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept = keep
	return nil
}

func (f *fakeImages) Pull(_ context.Context, ref string, _ PullOptions) (*Image, error) {
	return f.add(ref, "oci"), nil
}

func (f *fakeImages) Import(_ context.Context, name string, _ io.Reader) (*Image, error) {
	return f.add(name, "tar"), nil
}

func (f *fakeImages) Bootstrap(_ context.Context, o BootstrapOptions) (*Image, error) {
	return f.add(o.Name, "bootstrap"), nil
}

func (f *fakeImages) List(context.Context) ([]*Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []*Image
	for _, i := range f.images {
		all = append(all, i)
	}
	return all, nil
}

func (f *fakeImages) Delete(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.images, name)
	return nil
}

// fakeRepos fetches anything.
type fakeRepos struct {
	mu    sync.Mutex
	repos map[warren.RepoID]*Repo
	err   error
	hold  chan struct{} // when set, Fetch waits for it
	last  FetchOptions
}

func newFakeRepos() *fakeRepos { return &fakeRepos{repos: map[warren.RepoID]*Repo{}} }

func (f *fakeRepos) Fetch(ctx context.Context, url string, o FetchOptions) (*Repo, error) {
	f.mu.Lock()
	hold, err := f.hold, f.err
	f.last = o
	f.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err != nil {
		return nil, err
	}
	if o.Progress != nil {
		o.Progress("fetch repo", "objects", 1, 2)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &Repo{ID: warren.RepoID("r" + fingerprint(url)[:8]), URL: url, DefaultBranch: "main"}
	f.repos[r.ID] = r
	return r, nil
}

func (f *fakeRepos) ResolveRef(_ context.Context, id warren.RepoID, ref string) (string, string, error) {
	if ref == "missing" {
		return "", "", fmt.Errorf("ref %q: %w", ref, warren.ErrNotFound)
	}
	return "c0ffee", "main", nil
}

func (f *fakeRepos) ResolveOrigin(ctx context.Context, id warren.RepoID, ref string) (string, string, error) {
	if strings.HasPrefix(ref, "warren/") {
		return "", "", fmt.Errorf("ref %q: %w", ref, warren.ErrNotFound)
	}
	return f.ResolveRef(ctx, id, ref)
}

func (f *fakeRepos) Get(_ context.Context, ref string) (*Repo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, r := range f.repos {
		if string(id) == ref || r.URL == ref {
			return r, nil
		}
	}
	return nil, notFound("repo", ref)
}

func (f *fakeRepos) List(context.Context) ([]*Repo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []*Repo
	for _, r := range f.repos {
		all = append(all, r)
	}
	return all, nil
}

func (f *fakeRepos) Delete(_ context.Context, id warren.RepoID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.repos, id)
	return nil
}

// dirWorkspaces are real directories, so that a crash of the process leaves them.
type dirWorkspaces struct {
	dir      string
	mu       sync.Mutex
	populate error
	remove   error
	replace  error // of all copies for a rollback
	sync     error
	slow     time.Duration
	usage    func(warren.WorkspaceID) (total, shared int64)
	stuck    chan struct{} // when set, a copy for a rollback is told to it and waits for its context
}

func (d *dirWorkspaces) path(id warren.WorkspaceID) string { return filepath.Join(d.dir, string(id)) }

func (d *dirWorkspaces) Prepare(_ context.Context, id warren.WorkspaceID, src WorkspaceSource) (*WorkspaceDirs, error) {
	for _, s := range []string{"files", "home"} {
		if err := os.MkdirAll(filepath.Join(d.path(id), s), 0o755); err != nil {
			return nil, err
		}
	}
	b, err := json.Marshal(src.Commit)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(d.path(id), "meta.json"), b, 0o600); err != nil {
		return nil, err
	}
	return d.Get(context.Background(), id)
}

func (d *dirWorkspaces) Populate(ctx context.Context, id warren.WorkspaceID) error {
	d.mu.Lock()
	err, slow := d.populate, d.slow
	d.mu.Unlock()
	if slow > 0 {
		select {
		case <-time.After(slow):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(d.path(id), "files", "README"), []byte("hello"), 0o644)
}

func (d *dirWorkspaces) Get(_ context.Context, id warren.WorkspaceID) (*WorkspaceDirs, error) {
	if _, err := os.Stat(filepath.Join(d.path(id), "files")); err != nil {
		return nil, notFound("workspace", string(id))
	}
	return &WorkspaceDirs{Files: filepath.Join(d.path(id), "files"), Home: filepath.Join(d.path(id), "home")}, nil
}

func (d *dirWorkspaces) Delete(_ context.Context, id warren.WorkspaceID) error {
	d.mu.Lock()
	err, slow := d.remove, d.slow
	d.mu.Unlock()
	time.Sleep(slow)
	if err != nil {
		return err
	}
	os.RemoveAll(d.path(id) + ".tmp") // what the real one does when it is opened
	if _, err := os.Stat(d.path(id)); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("workspace %s: %w", id, warren.ErrNotFound) // as the real one says
	}
	return os.RemoveAll(d.path(id))
}

// dirCopy copies as a whole at the instant.
type dirCopy struct {
	d        *dirWorkspaces
	from, to warren.WorkspaceID
}

func (c *dirCopy) tmp() string { return c.d.path(c.to) + ".tmp" }

func (c *dirCopy) Finish(context.Context) error {
	return os.CopyFS(c.tmp(), os.DirFS(c.d.path(c.from)))
}

func (c *dirCopy) Commit(context.Context) (string, error) {
	return "copy", os.Rename(c.tmp(), c.d.path(c.to))
}

func (c *dirCopy) Abort() { os.RemoveAll(c.tmp()) }

func (d *dirWorkspaces) BeginCopy(_ context.Context, from, to warren.WorkspaceID, _ bool) (WorkspaceCopy, error) {
	return &dirCopy{d: d, from: from, to: to}, nil
}

func (d *dirWorkspaces) Replace(ctx context.Context, id, from warren.WorkspaceID) error {
	r, err := d.BeginReplace(ctx, id, from)
	if err != nil {
		return err
	}
	defer r.Abort()
	return r.Commit(ctx)
}

func (d *dirWorkspaces) ReplaceNeeds(context.Context, warren.WorkspaceID) (int64, error) {
	return 200 << 20, nil
}

// dirReplacement keeps, as the real one, from BeginReplace to Abort what it needs, and writes no more in between.
type dirReplacement struct {
	d  *dirWorkspaces
	id warren.WorkspaceID
}

func (r dirReplacement) tmp() string { return r.d.path(r.id) + ".new" }

func (d *dirWorkspaces) BeginReplace(ctx context.Context, id, from warren.WorkspaceID) (WorkspaceReplacement, error) {
	r := dirReplacement{d, id}
	d.mu.Lock()
	err, stuck := d.replace, d.stuck
	d.mu.Unlock()
	if stuck != nil {
		close(stuck)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	os.RemoveAll(r.tmp())
	if err := os.CopyFS(r.tmp(), os.DirFS(d.path(from))); err != nil {
		return nil, err
	}
	return r, nil
}

func (r dirReplacement) Commit(context.Context) error {
	if err := os.RemoveAll(r.d.path(r.id)); err != nil {
		return err
	}
	return os.Rename(r.tmp(), r.d.path(r.id))
}

func (r dirReplacement) Abort() { os.RemoveAll(r.tmp()) }

func (d *dirWorkspaces) Sync(context.Context, warren.WorkspaceID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sync
}

func (d *dirWorkspaces) Adopt(_ context.Context, from, to warren.WorkspaceID) error {
	return os.Rename(d.path(from), d.path(to))
}

func (d *dirWorkspaces) Usage(_ context.Context, id warren.WorkspaceID) (total, shared int64, err error) {
	if d.usage != nil {
		total, shared = d.usage(id)
	}
	return total, shared, nil
}

func (d *dirWorkspaces) Copy(_ context.Context, from, to warren.WorkspaceID) (string, error) {
	return "copy", os.CopyFS(d.path(to), os.DirFS(d.path(from)))
}

func (d *dirWorkspaces) Size(_ context.Context, id warren.WorkspaceID) (int64, error) {
	if _, err := os.Stat(d.path(id)); err != nil {
		return 0, notFound("workspace", string(id))
	}
	return 5, nil
}

func (d *dirWorkspaces) Diff(ctx context.Context, id warren.WorkspaceID, o DiffOptions, w io.Writer) error {
	d.mu.Lock()
	slow := d.slow
	d.mu.Unlock()
	select {
	case <-time.After(slow):
	case <-ctx.Done():
		return ctx.Err()
	}
	_, err := fmt.Fprintf(w, "diff of %s %+v\n", id, o)
	return err
}

func (d *dirWorkspaces) Mark(_ context.Context, id warren.WorkspaceID) error {
	_, err := os.Stat(d.path(id))
	return err
}

func (d *dirWorkspaces) Commit(_ context.Context, id warren.WorkspaceID, o CommitOptions) (*Commit, error) {
	if o.Message == "" {
		return nil, fmt.Errorf("message: %w", warren.ErrInvalid)
	}
	return &Commit{ID: "abc123", Branch: "warren/" + o.Name, Files: 1}, nil
}

func (d *dirWorkspaces) Push(_ context.Context, id warren.WorkspaceID, o PushOptions) (*PushResult, error) {
	return &PushResult{URL: "https://example.com/r", Branch: "b", Commit: "abc123"}, nil
}

func (d *dirWorkspaces) FormatPatch(_ context.Context, id warren.WorkspaceID, w io.Writer) error {
	_, err := io.WriteString(w, "From abc123\n")
	return err
}

// rig is an engine with all that it needs, which a test can stop and start again.
type rig struct {
	t      testing.TB
	dir    string
	world  *fake.World
	images *fakeImages
	repos  *fakeRepos
	spaces *dirWorkspaces
	clock  Clock
	change func(*Options)
	fopts  fake.Options

	store  *store.Store
	driver *fake.Driver
	*Engine
}

func newRig(t testing.TB, change func(*Options)) *rig {
	t.Helper()
	r := prepareRig(t, t.TempDir(), change)
	r.start()
	t.Cleanup(r.stop)
	return r
}

func prepareRig(t testing.TB, dir string, change func(*Options)) *rig {
	t.Helper()
	world, err := fake.OpenWorld(filepath.Join(dir, "world"))
	if err != nil {
		t.Fatal(err)
	}
	ws := filepath.Join(dir, "workspaces")
	if err := os.MkdirAll(ws, 0o755); err != nil {
		t.Fatal(err)
	}
	return &rig{t: t, dir: dir, world: world, images: newFakeImages(), repos: newFakeRepos(), spaces: &dirWorkspaces{dir: ws}, change: change}
}

func (r *rig) open() error {
	ctx := context.Background()
	var err error
	if r.store, err = store.Open(ctx, store.Options{Path: filepath.Join(r.dir, "warren.db")}); err != nil {
		return err
	}
	// What the real one removes when it is opened.
	if left, _ := filepath.Glob(filepath.Join(r.spaces.dir, "*.new")); len(left) > 0 {
		for _, d := range left {
			os.RemoveAll(d)
		}
	}
	r.fopts.World = r.world
	r.driver = fake.New(r.fopts)
	o := Options{Store: r.store, Images: r.images, Repos: r.repos, Workspaces: r.spaces,
		Drivers: map[string]driver.Driver{"fake": r.driver}, DefaultDriver: "fake", Clock: r.clock, PauseDir: filepath.Join(r.dir, "paused"),
		SnapshotDir: filepath.Join(r.dir, "snapshots")}
	if r.change != nil {
		r.change(&o)
	}
	if r.Engine, err = Open(ctx, o); err != nil {
		return errors.Join(err, r.store.Close(), r.driver.Close())
	}
	return nil
}

func (r *rig) start() {
	r.t.Helper()
	if err := r.open(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) stop() {
	if r.Engine == nil {
		return
	}
	r.Engine.Close()
	r.store.Close()
	r.driver.Close()
	r.Engine = nil
}

// eventually polls until fn is true.
func eventually(t testing.TB, what string, fn func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		if fn() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// empty checks that nothing is left anywhere.
func (r *rig) empty() {
	r.t.Helper()
	if err := r.leftovers(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) leftovers() error {
	var errs []error
	if n := r.world.Len(); n != 0 {
		errs = append(errs, fmt.Errorf("%d sandboxes left in the driver: %v", n, r.world.IDs()))
	}
	entries, err := os.ReadDir(r.spaces.dir)
	if err != nil || len(entries) != 0 {
		errs = append(errs, fmt.Errorf("%d workspaces left on disk (%v)", len(entries), err))
	}
	if r.Engine == nil {
		return errors.Join(errs...)
	}
	if images, err := os.ReadDir(r.opts.PauseDir); err != nil || len(images) != 0 {
		errs = append(errs, fmt.Errorf("%d images of paused sandboxes left (%v)", len(images), err))
	}
	if snaps, err := os.ReadDir(r.opts.SnapshotDir); err != nil || len(snaps) != 0 {
		errs = append(errs, fmt.Errorf("%d snapshots left on disk (%v)", len(snaps), err))
	}
	if snaps, err := r.store.Snapshots(context.Background()); err != nil || len(snaps) != 0 {
		errs = append(errs, fmt.Errorf("%d snapshots left in the store (%v)", len(snaps), err))
	}
	rows, err := r.store.Sandboxes(context.Background())
	if err != nil || len(rows) != 0 {
		var states []string
		for _, row := range rows {
			states = append(states, string(row.ID)+" "+row.State)
		}
		errs = append(errs, fmt.Errorf("%d sandboxes left in the store: %v (%v)", len(rows), states, err))
	}
	spaces, err := r.store.Workspaces(context.Background())
	if err != nil || len(spaces) != 0 {
		errs = append(errs, fmt.Errorf("%d workspaces left in the store (%v)", len(spaces), err))
	}
	users, total := r.usageNow()
	if len(users) != 0 || total != (usage{}) {
		errs = append(errs, fmt.Errorf("budgets left in use: %v, together %v", users, total))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.boxes)+len(r.names)+len(r.Engine.spaces)+len(r.spaceNames)+len(r.flights)+len(r.timers) != 0 {
		errs = append(errs, fmt.Errorf("left in memory: %d sandboxes, %d names, %d workspaces, %d workspace names, %d flights, %d timers",
			len(r.boxes), len(r.names), len(r.Engine.spaces), len(r.spaceNames), len(r.flights), len(r.timers)))
	}
	return errors.Join(errs...)
}

var (
	alice    = Caller{User: "alice"}
	bob      = Caller{User: "bob"}
	operator = Caller{User: "root", Operator: true}
)

func (r *rig) create(c Caller, s Spec) *Sandbox {
	r.t.Helper()
	sb, err := r.Create(context.Background(), c, CreateRequest{Spec: s}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return sb
}

func (r *rig) delete(c Caller, id string) {
	r.t.Helper()
	if err := r.Delete(context.Background(), c, DeleteRequest{ID: id}); err != nil {
		r.t.Fatal(err)
	}
}

// usageNow copies what is in use.
func (e *Engine) usageNow() (map[string]usage, usage) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]usage{}
	for k, v := range e.usage {
		out[k] = *v
	}
	return out, e.total
}
