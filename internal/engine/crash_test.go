package engine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// The crash suite runs an engine in a second process (this test binary, executed again), ends it with SIGKILL at a
// failpoint or at any time, opens the engine again on what is left and compares: nothing that was acknowledged is lost,
// nothing is orphaned, what was under way is done or undone.

const (
	crashDir  = "WARREN_TEST_CRASH_DIR"
	crashSeed = "WARREN_TEST_CRASH_SEED"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		crashChild(dir, os.Getenv(crashSeed))
		return
	}
	os.Exit(m.Run())
}

// journal writes what the child does to its standard output, one line at a time, so that the parent knows what was
// acknowledged when the child is gone.
type journal struct {
	mu  sync.Mutex
	w   io.Writer
	num int
}

// do runs one operation on a name between a "begin" and an "ok" or "err" line.
func (j *journal) do(op, name string, fn func() (string, error)) error {
	return j.doKeyed(op, name, "-", fn)
}

func (j *journal) doKeyed(op, name, key string, fn func() (string, error)) error {
	j.line("begin", op, name, key)
	result, err := fn()
	if err != nil {
		j.line("err", op, name, strings.ReplaceAll(err.Error(), "\n", " "))
		return err
	}
	if result == "" {
		result = "-"
	}
	j.line("ok", op, name, result)
	return nil
}

func (j *journal) line(fields ...string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	fmt.Fprintln(j.w, strings.Join(fields, " "))
}

// childT lets a rig be used outside a test.
type childT struct{ testing.TB }

func (childT) Helper() {}
func (childT) Fatal(args ...any) {
	fmt.Println("fatal", fmt.Sprint(args...))
	os.Exit(3)
}

func crashChild(dir, seed string) {
	if err := failpoint.Check(); err != nil {
		fmt.Println("fatal", err)
		os.Exit(3)
	}
	r := prepareRig(childT{}, dir, func(o *Options) { o.Standby = 1 })
	r.start()
	j := &journal{w: os.Stdout}
	if seed == "" {
		script(r, j)
	} else {
		n, err := strconv.ParseUint(seed, 10, 64)
		if err != nil {
			fmt.Println("fatal", err)
			os.Exit(3)
		}
		storm(r, j, n)
	}
	r.stop()
	fmt.Println("end - - -")
}

// actor runs operations on names and journals them.
type actor struct {
	r *rig
	j *journal
}

func (a actor) create(name string, s Spec) error {
	s.Name = name
	a.j.mu.Lock()
	a.j.num++
	key := fmt.Sprintf("%s-%d-%d", name, os.Getpid(), a.j.num)
	a.j.mu.Unlock()
	return a.j.doKeyed("create", name, key, func() (string, error) {
		sb, err := a.r.Create(context.Background(), alice, CreateRequest{Spec: s, IdempotencyKey: key}, nil)
		if err != nil {
			return "", err
		}
		return string(sb.ID), nil
	})
}

func (a actor) delete(name string) error {
	return a.j.do("delete", name, func() (string, error) {
		return "", a.r.Delete(context.Background(), alice, DeleteRequest{ID: name})
	})
}

func (a actor) restart(name string) error {
	return a.j.do("restart", name, func() (string, error) {
		_, err := a.r.Restart(context.Background(), alice, name)
		return "", err
	})
}

func (a actor) pause(name string) error {
	return a.j.do("pause", name, func() (string, error) {
		_, err := a.r.Pause(context.Background(), alice, name)
		return "", err
	})
}

func (a actor) resume(name string) error {
	return a.j.do("resume", name, func() (string, error) {
		_, err := a.r.Resume(context.Background(), alice, name)
		return "", err
	})
}

// mark writes a word into the workspace of a sandbox, and into its root.
func (a actor) mark(name, word string) {
	a.j.do("mark", name, func() (string, error) {
		if id, err := a.r.Resolve(alice, name); err == nil {
			a.r.world.ChangeRoot(id, word)
		}
		return word, a.r.mark(name, word)
	})
}

func (a actor) snapshot(name, as string, filesOnly bool) error {
	return a.j.do("snapshot", as, func() (string, error) {
		p, err := a.r.Snapshot(context.Background(), alice, SnapshotRequest{ID: name, Name: as, FilesOnly: filesOnly}, nil)
		if err != nil {
			return "", err
		}
		return string(p.ID), nil
	})
}

func (a actor) rollback(name, to string) error {
	return a.j.do("rollback", name, func() (string, error) {
		_, err := a.r.Rollback(context.Background(), alice, name, to)
		return a.r.word(name), err
	})
}

func (a actor) fork(name, as string) error {
	return a.j.do("create", as, func() (string, error) {
		f, err := a.r.Fork(context.Background(), alice, ForkRequest{ID: name, Name: as}, nil)
		if err != nil {
			return "", err
		}
		return string(f.Children[0].Sandbox.ID), nil
	})
}

// forkAll makes two children, or none.
func (a actor) forkAll(name, as string) error {
	return a.j.do("fork-all", as, func() (string, error) {
		f, err := a.r.Fork(context.Background(), alice, ForkRequest{ID: name, Name: as, Count: 2, All: true}, nil)
		if err != nil {
			return "", err
		}
		return string(f.Children[0].Sandbox.ID) + " " + string(f.Children[1].Sandbox.ID), nil
	})
}

func (a actor) deleteSnapshot(name string) error {
	return a.j.do("delete-snapshot", name, func() (string, error) {
		return "", a.r.DeleteSnapshot(context.Background(), alice, name, false)
	})
}

func (a actor) createSpace(name string) error {
	return a.j.do("ws-create", name, func() (string, error) {
		w, err := a.r.CreateWorkspace(context.Background(), alice, CreateWorkspaceRequest{Name: name, Repo: &RepoSource{URL: "https://example.com/r"}}, nil)
		if err != nil {
			return "", err
		}
		return string(w.ID), nil
	})
}

func (a actor) copySpace(from, to string) error {
	return a.j.do("ws-create", to, func() (string, error) {
		w, _, err := a.r.CopyWorkspace(context.Background(), alice, from, to)
		if err != nil {
			return "", err
		}
		return string(w.ID), nil
	})
}

func (a actor) deleteSpace(name string) error {
	return a.j.do("ws-delete", name, func() (string, error) {
		return "", a.r.DeleteWorkspace(context.Background(), alice, name, false)
	})
}

// script passes every failpoint once.
func script(r *rig, j *journal) {
	ctx := context.Background()
	a := actor{r, j}
	a.create("first", Spec{Repo: &RepoSource{URL: "https://example.com/r"}})
	a.create("second", Spec{Restart: RestartOnFailure})
	a.forkAll("second", "twin")
	a.createSpace("space")
	a.copySpace("space", "copy")
	j.do("commit", "space", func() (string, error) {
		c, err := r.Commit(ctx, alice, CommitRequest{ID: "space", Message: "m"})
		if err != nil {
			return "", err
		}
		return c.ID, nil
	})
	a.create("third", Spec{WorkspaceID: "space"})
	a.restart("first")
	id, err := r.Resolve(alice, "second")
	if err == nil {
		r.world.Kill(id, driver.Exit{Reason: "oom"})
		j.do("use", "second", func() (string, error) {
			conn, err := r.Dial(ctx, alice, "second", warren.GuestPort)
			if err != nil {
				return "", err
			}
			return "", conn.Close()
		})
	}
	r.spaces.mu.Lock()
	r.spaces.populate = errors.New("no checkout today")
	r.spaces.mu.Unlock()
	a.create("undone", Spec{})
	r.spaces.mu.Lock()
	r.spaces.populate = nil
	r.spaces.mu.Unlock()
	a.deleteSpace("copy")
	a.mark("second", "one")
	a.snapshot("second", "snap", false)
	a.mark("second", "two")
	a.snapshot("second", "files", true)
	a.mark("second", "three")
	a.rollback("second", "snap")
	a.mark("second", "four")
	a.rollback("second", "files")
	a.create("cold", Spec{Snapshot: "files"})
	a.fork("second", "child")
	j.do("create", "from", func() (string, error) {
		sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "from", Snapshot: "snap"}}, nil)
		if err != nil {
			return "", err
		}
		return string(sb.ID), nil
	})
	a.deleteSnapshot("files")
	if _, _, err := r.PutTemplate(ctx, alice, TemplateRequest{Name: "app", Snapshot: "snap"}); err == nil {
		for r.preparing() {
			time.Sleep(5 * time.Millisecond)
		}
		a.create("stood", Spec{Template: "app"})
	}
	a.pause("third")
	a.resume("third")
	a.pause("third")
	a.restart("third")
	a.pause("third")
	a.pause("second") // and stays so
	a.delete("third")
	a.delete("first")
}

// storm runs random operations on four threads until the process is killed, or a while has passed.
func storm(r *rig, j *journal, seed uint64) {
	var wg sync.WaitGroup
	until := time.Now().Add(3 * time.Second)
	for w := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(w)))
			a := actor{r, j}
			name := func() string { return fmt.Sprintf("w%d-n%d", w, rnd.IntN(3)) }
			for time.Now().Before(until) {
				switch rnd.IntN(19) {
				case 0, 1, 2, 3:
					a.create(name(), Spec{Restart: RestartOnFailure})
				case 4, 5, 6:
					a.delete(name())
				case 7:
					a.restart(name())
				case 8:
					if id, err := r.Resolve(alice, name()); err == nil {
						r.world.Kill(id, driver.Exit{Reason: "killed"})
					}
				case 14:
					n := name()
					if a.snapshot(n, "p"+n, rnd.IntN(2) == 0) != nil {
						a.deleteSnapshot("p" + n)
					}
				case 15:
					n := name()
					a.rollback(n, "p"+n)
				case 16, 17:
					a.fork(name(), name())
				case 18:
					a.deleteSnapshot("p" + name())
				case 10, 11:
					a.pause(name())
				case 12, 13:
					a.resume(name())
				case 9:
					n := name()
					if a.createSpace("s"+n) != nil {
						a.deleteSpace("s" + n)
					}
				}
			}
		})
	}
	wg.Wait()
}

// model is what the journal says must be there.
type model struct {
	boxes  map[string]string // name to id
	spaces map[string]string
	flying map[string]string // name to the operation that was under way
	snaps  map[string]string
	words  map[string][]string // name to the words that its workspace may hold
	keys   map[string]string   // name to the key of a create under way
	killed bool                // sandboxes are killed as well
}

func newModel() *model {
	return &model{boxes: map[string]string{}, spaces: map[string]string{}, flying: map[string]string{}, snaps: map[string]string{}, words: map[string][]string{}, keys: map[string]string{}}
}

// read applies a journal.
func (m *model) read(text []byte) error {
	clear(m.flying)
	s := bufio.NewScanner(bytes.NewReader(text))
	for s.Scan() {
		f := strings.SplitN(s.Text(), " ", 4)
		if len(f) < 4 {
			if f[0] == "fatal" {
				return errors.New(s.Text())
			}
			continue // the last line may be cut
		}
		op, name, result := f[1], f[2], f[3]
		switch f[0] {
		case "fatal":
			return errors.New(s.Text())
		case "begin":
			m.flying[name], m.keys[name] = op, result
		case "err":
			delete(m.flying, name)
			if op == "rollback" {
				m.words[name] = append(m.words[name], "-", "one", "two", "three", "four") // it says which, to people
			}
		case "ok":
			delete(m.flying, name)
			switch op {
			case "create":
				m.boxes[name] = result
			case "fork-all":
				m.boxes[name+"-1"], m.boxes[name+"-2"], _ = strings.Cut(result, " ")
			case "delete":
				delete(m.boxes, name)
			case "mark", "rollback":
				m.words[name] = []string{result}
			case "snapshot":
				m.snaps[name] = result
			case "delete-snapshot":
				delete(m.snaps, name)
			case "ws-create":
				m.spaces[name] = result
			case "ws-delete":
				delete(m.spaces, name)
			}
		}
	}
	return s.Err()
}

// check compares the model with an engine that was opened after the crash, and brings it up to date with what the
// operations under way came to.
func (m *model) check(t *testing.T, r *rig) {
	t.Helper()
	ctx := context.Background()
	eventually(t, "all operations end", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, sb := range r.boxes {
			if sb.op != nil || (sb.state() != Running && sb.state() != Failed && sb.state() != Paused) {
				return false
			}
		}
		for _, w := range r.Engine.spaces {
			if w.row.State != wsReady || w.removing {
				return false
			}
		}
		return true
	})
	list, _, err := r.List(ctx, alice, ListRequest{PageSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]*Sandbox{}
	for _, sb := range list {
		have[sb.Name] = sb
		if want, ok := m.boxes[sb.Name]; ok && want == string(sb.ID) {
			continue
		}
		if as, ok := twinOf(sb.Name); m.flying[sb.Name] != "create" && !(ok && m.flying[as] == "fork-all") {
			t.Errorf("sandbox %s (%s) is there; the model has %q and %q was under way", sb.Name, sb.ID, m.boxes[sb.Name], m.flying[sb.Name])
		}
		m.boxes[sb.Name] = string(sb.ID)
	}
	for name, id := range m.boxes {
		if have[name] == nil {
			if m.flying[name] != "delete" {
				t.Errorf("sandbox %s (%s) is lost; %q was under way", name, id, m.flying[name])
			}
			delete(m.boxes, name)
		}
	}
	for name, op := range m.flying {
		if one, two := have[name+"-1"] != nil, have[name+"-2"] != nil; op == "fork-all" && one != two {
			t.Errorf("of two children of a fork, which are wanted both or not at all, there are %t and %t", one, two)
		}
	}
	spaces, _, err := r.ListWorkspaces(ctx, alice, false, 1000, "")
	if err != nil {
		t.Fatal(err)
	}
	haveSpaces := map[string]bool{}
	dirs := map[string]bool{}
	for _, w := range spaces {
		dirs[string(w.ID)] = true
		if w.Name == "" {
			if w.SandboxID == "" {
				t.Errorf("workspace %s is orphaned", w.ID)
			}
			continue
		}
		haveSpaces[w.Name] = true
		if m.spaces[w.Name] != string(w.ID) && m.flying[w.Name] != "ws-create" {
			t.Errorf("workspace %s is there; %q was under way", w.Name, m.flying[w.Name])
		}
		m.spaces[w.Name] = string(w.ID)
	}
	for name := range m.spaces {
		if !haveSpaces[name] {
			if m.flying[name] != "ws-delete" {
				t.Errorf("workspace %s is lost; %q was under way", name, m.flying[name])
			}
			delete(m.spaces, name)
		}
	}
	// The world and the disk hold exactly what the store says.
	running := map[warren.SandboxID]bool{}
	for _, sb := range list {
		running[sb.ID] = sb.State == Running
		if !dirs[string(sb.WorkspaceID)] {
			t.Errorf("sandbox %s has no workspace", sb.Name)
		}
		if _, err := os.Stat(r.spaces.path(sb.WorkspaceID) + "/files/README"); err != nil {
			t.Errorf("the files of sandbox %s are not there: %v", sb.Name, err)
		}
	}
	eventually(t, "the driver has what runs and nothing else", func() bool {
		ids := r.world.IDs()
		n := 0
		for _, r := range running {
			if r {
				n++
			}
		}
		for _, id := range ids {
			if !running[id] {
				return false
			}
		}
		return len(ids) == n
	})
	// A pause or a resume loses no execution: each goes on from where it runs or from a whole image.
	m.checkPaused(t, r, list)
	m.checkSnapshots(t, r, dirs)
	entries, err := os.ReadDir(r.spaces.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !dirs[e.Name()] {
			t.Errorf("directory of workspace %s is orphaned", e.Name())
		}
	}
	if len(entries) != len(dirs) {
		t.Errorf("%d directories for %d workspaces", len(entries), len(dirs))
	}
	// The same key gives the same sandbox, or makes the one that was undone.
	for name, op := range m.flying {
		if op != "create" || m.keys[name] == "-" {
			continue
		}
		sb, err := r.Create(ctx, alice, CreateRequest{Spec: m.spec(name), IdempotencyKey: m.keys[name]}, nil)
		id, there := m.boxes[name]
		if there && errors.Is(err, warren.ErrExists) {
			continue // it was there before that create began
		}
		if err != nil {
			t.Errorf("a retry of the create of %s: %v", name, err)
			continue
		}
		if there && id != string(sb.ID) {
			t.Errorf("a retry of the create of %s made a second sandbox", name)
		}
		m.boxes[name] = string(sb.ID)
	}
}

// twinOf is the name under which forkAll made one of two.
func twinOf(name string) (as string, ok bool) {
	if as, ok = strings.CutSuffix(name, "-1"); !ok {
		as, ok = strings.CutSuffix(name, "-2")
	}
	return as, ok
}

// checkSnapshots compares the snapshots on disk with those that were acknowledged, adds their files to dirs, and looks
// whether a sandbox that was rolled back holds what it held before or after.
func (m *model) checkSnapshots(t *testing.T, r *rig, dirs map[string]bool) {
	t.Helper()
	for name, op := range m.flying {
		switch {
		case op == "mark" || op == "rollback":
			m.words[name] = append(m.words[name], "-", "one", "two", "three", "four")
		}
	}
	for name, words := range m.words {
		if m.boxes[name] == "" {
			delete(m.words, name)
			continue
		}
		if is := r.word(name); !slices.Contains(words, is) {
			t.Errorf("the workspace of %s holds %q, want one of %q; %q was under way", name, is, words, m.flying[name])
		}
	}
	eventually(t, "snapshots are settled", func() bool {
		rows, err := r.store.Snapshots(context.Background())
		return err == nil && !slices.ContainsFunc(rows, func(p *store.Snapshot) bool { return p.State != snapReady || p.Transient })
	})
	list, _, err := r.ListSnapshots(context.Background(), alice, "", true, 1000, "")
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]*Snapshot{}
	disk := map[string]bool{}
	for _, p := range list {
		have[p.Name] = p
		disk[string(p.ID)] = true
		if m.snaps[p.Name] != string(p.ID) && m.flying[p.Name] != "snapshot" {
			t.Errorf("snapshot %s is there; %q was under way", p.Name, m.flying[p.Name])
		}
		r.mu.Lock()
		files := r.snaps[p.ID].row.FilesID
		r.mu.Unlock()
		dirs[string(files)] = true
		if _, err := os.Stat(filepath.Join(r.memoryDir(p.ID), "image.json")); (err == nil) != (p.Kind == MemorySnapshot) {
			t.Errorf("snapshot %s of %s: %v", p.Name, p.Kind, err)
		}
		if _, err := os.Stat(r.spaces.path(files) + "/files/README"); err != nil {
			t.Errorf("the files of snapshot %s are not there: %v", p.Name, err)
		}
	}
	for name := range m.snaps {
		if have[name] == nil && m.flying[name] != "delete-snapshot" {
			t.Errorf("snapshot %s is lost; %q was under way", name, m.flying[name])
		}
	}
	clear(m.snaps)
	for name, p := range have {
		m.snaps[name] = string(p.ID)
	}
	eventually(t, "the disk has the snapshots and no others", func() bool {
		entries, err := os.ReadDir(r.opts.SnapshotDir)
		return err == nil && len(entries) == len(disk) && !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !disk[e.Name()] })
	})
	// Nothing stands still for ever.
	for name := range m.boxes {
		sb, err := r.Get(context.Background(), alice, name)
		if err != nil || sb.State != Running {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		conn, err := r.Dial(ctx, alice, name, warren.GuestPort)
		cancel()
		if err != nil {
			t.Errorf("sandbox %s runs and does not answer: %v", name, err)
			continue
		}
		conn.Close()
	}
}

// checkRoots looks whether the root of a sandbox of the script is what it was when its workspace was what that is now. What has failed is started
// first: no crash of the server is a reason for another root than a rollback promised.
func (m *model) checkRoots(t *testing.T, r *rig) {
	t.Helper()
	for name := range m.boxes {
		word := r.word(name)
		if name != "second" && name != "cold" || word == "-" {
			continue
		}
		conn, err := r.Dial(context.Background(), alice, name, warren.GuestPort)
		if err != nil {
			t.Errorf("sandbox %s does not start: %v", name, err)
			continue
		}
		conn.Close()
		if is := r.world.Changed(r.boxNamed(name)); is != word {
			t.Errorf("the root of %s holds %q, and its workspace %q; %q was under way", name, is, word, m.flying[name])
		}
	}
}

// checkPaused compares the images on disk with what is paused, resumes that and pauses it again.
func (m *model) checkPaused(t *testing.T, r *rig, list []*Sandbox) {
	t.Helper()
	paused, failed := map[string]bool{}, map[string]bool{}
	for _, sb := range list {
		failed[string(sb.ID)] = sb.State == Failed
		if op := m.flying[sb.Name]; (op == "pause" || op == "resume") && sb.State == Failed && !m.killed {
			t.Errorf("sandbox %s failed in a %s: %+v", sb.Name, op, sb.Failure)
		}
		paused[string(sb.ID)] = sb.State == Paused
		if sb.State != Paused {
			continue
		}
		if sb.ImageSize == 0 {
			t.Errorf("sandbox %s is paused without an image", sb.Name)
		}
		for _, change := range []func(context.Context, Caller, string) (*Sandbox, error){r.Resume, r.Pause} {
			if _, err := change(context.Background(), alice, sb.Name); err != nil {
				t.Errorf("sandbox %s, found paused: %v", sb.Name, err)
			}
		}
	}
	eventually(t, "there are images of what is paused and no others", func() bool {
		entries, err := os.ReadDir(r.opts.PauseDir)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, is := range paused {
			if is {
				n++
			}
		}
		entries = slices.DeleteFunc(entries, func(d os.DirEntry) bool {
			id, owes := strings.CutSuffix(d.Name(), owed)
			return owes && failed[id]
		})
		for _, e := range entries {
			if !paused[e.Name()] {
				return false
			}
		}
		return len(entries) == n
	})
}

// spec is with what the child creates a name.
func (m *model) spec(name string) Spec {
	switch name {
	case "first":
		return Spec{Name: name, Repo: &RepoSource{URL: "https://example.com/r"}}
	case "third":
		return Spec{Name: name, WorkspaceID: "space"}
	case "undone":
		return Spec{Name: name}
	case "cold":
		return Spec{Name: name, Snapshot: "files"}
	case "stood":
		return Spec{Name: name, Template: "app"}
	}
	return Spec{Name: name, Restart: RestartOnFailure}
}

// wipe removes all and checks that nothing is left.
func wipe(t *testing.T, r *rig) {
	t.Helper()
	ctx := context.Background()
	list, _, err := r.List(ctx, operator, ListRequest{PageSize: 1000})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		r.delete(operator, string(sb.ID))
	}
	templates, err := r.ListTemplates(ctx, operator)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range templates {
		if err := r.DeleteTemplate(ctx, operator, m.ID, false); err != nil {
			t.Error(err)
		}
	}
	snaps, _, err := r.ListSnapshots(ctx, operator, "", false, 1000, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range snaps {
		if err := r.DeleteSnapshot(ctx, operator, string(p.ID), false); err != nil {
			t.Error(err)
		}
	}
	spaces, _, err := r.ListWorkspaces(ctx, operator, false, 1000, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range spaces {
		if err := r.DeleteWorkspace(ctx, operator, string(w.ID), false); err != nil {
			t.Error(err)
		}
	}
	r.empty()
}

func child(dir string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

func killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	ws, ok := exit.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// ours are the failpoints of the engine and its store.
func ours() []string {
	var names []string
	for _, n := range failpoint.Names() {
		if strings.HasPrefix(n, "engine.") || strings.HasPrefix(n, "store.") {
			names = append(names, n)
		}
	}
	return names
}

func TestCrashAtEachFailpoint(t *testing.T) {
	names := ours()
	if len(names) < 25 {
		t.Fatalf("only %d failpoints: %v", len(names), names)
	}
	for _, name := range names {
		hits := []int{1}
		if strings.HasPrefix(name, "store.before") || strings.HasPrefix(name, "store.after") {
			hits = []int{1, 2, 3, 5, 8, 13, 21} // different changes pass here
		}
		switch {
		case name == "engine.create.running":
			hits = []int{1, 3, 4} // of one sandbox, and of either twin
		case strings.HasPrefix(name, "engine.restart."):
			hits = []int{1, 3} // also that of a rollback to files
		case name == "engine.create.booted":
			hits = []int{1, 8, 9, 10, 11, 12} // also of rollbacks, to memory and to files, and of what is made of files
		case strings.HasPrefix(name, "engine.fork."):
			hits = []int{1, 2} // of the twins, and of a single child
		}
		for _, hit := range hits {
			t.Run(fmt.Sprintf("%s:%d", name, hit), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				out, err := child(dir, fmt.Sprintf("%s=%s=kill:%d", failpoint.Env, name, hit)).Output()
				if !killed(err) {
					t.Fatalf("the child ended with %v; the script does not pass this point\n%s", err, out)
				}
				m := newModel()
				if err := m.read(out); err != nil {
					t.Fatal(err)
				}
				r := prepareRig(t, dir, nil)
				r.start()
				defer r.stop()
				m.check(t, r)
				m.checkRoots(t, r)
				wipe(t, r)
			})
		}
	}
}

// TestErrorAtEachFailpoint makes each point fail instead, and lets the same process go on.
func TestErrorAtEachFailpoint(t *testing.T) {
	for _, name := range ours() {
		if name == "store.migrate" || name == "engine.reconcile" {
			continue // they fail Open, see TestOpenFails
		}
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(o *Options) { o.Standby = 1 })
			if err := failpoint.Set(name + "=error"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(failpoint.Clear)
			script(r, &journal{w: io.Discard})
			failpoint.Clear()
			eventually(t, "retries have ended", func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				for _, sb := range r.boxes {
					if sb.op != nil {
						return false
					}
				}
				return true
			})
			// What a crash would leave for the next start, a failing store may leave as well.
			r.stop()
			r.start()
			eventually(t, "settled", func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				for _, sb := range r.boxes {
					if sb.op != nil {
						return false
					}
				}
				for _, w := range r.Engine.spaces {
					if w.removing {
						return false
					}
				}
				return true
			})
			wipe(t, r)
		})
	}
}

func TestOpenFails(t *testing.T) {
	for _, name := range []string{"store.migrate", "engine.reconcile"} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(failpoint.Clear)
			r := prepareRig(t, t.TempDir(), nil)
			if err := failpoint.Set(name + "=error"); err != nil {
				t.Fatal(err)
			}
			if err := r.open(); !errors.Is(err, failpoint.ErrInjected) {
				t.Fatalf("open: %v", err)
			}
			failpoint.Clear()
			r.start() // nothing was left half-way
			r.create(alice, Spec{})
			r.stop()
		})
	}
}

// killLanes is how many data directories there are, each with a child of its own, of which go test runs as many at the same time as
// there are processors: most of a kill's time is waiting.
const killLanes = 4

// TestRandomKills ends the child at random times, again and again on the same data. WARREN_KILLS says how often,
// WARREN_SEED with which seed.
func TestRandomKills(t *testing.T) {
	kills := testenv.Count(t, "WARREN_KILLS", 200, 3000)
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("WARREN_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("seed %d", seed)
	for lane := range killLanes {
		t.Run(strconv.Itoa(lane), func(t *testing.T) {
			t.Parallel()
			// Seeds of children count up from the lane's, and must not meet those of the next.
			randomKills(t, (kills+lane)/killLanes, seed+uint64(lane)<<32)
		})
	}
}

// forks is held by lanes that start a child, and for a moment by those that have closed a store.
var forks sync.RWMutex

func randomKills(t *testing.T, kills int, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	m := newModel()
	m.killed = true
	acknowledged := 0
	// A child of another lane that is between its fork and its exec has the lock of a store that was open at the fork.
	stop := func(r *rig) {
		r.stop()
		forks.Lock()
		defer forks.Unlock()
	}
	for i := range kills {
		cmd := child(dir, fmt.Sprintf("%s=%d", crashSeed, seed+uint64(i)))
		var out bytes.Buffer
		cmd.Stdout = &out
		forks.RLock()
		err := cmd.Start() // returns after the exec
		forks.RUnlock()
		if err != nil {
			t.Fatal(err)
		}
		kill := time.AfterFunc(time.Duration(20+rnd.IntN(300))*time.Millisecond, func() { cmd.Process.Kill() })
		err = cmd.Wait()
		kill.Stop()
		if !killed(err) {
			t.Fatalf("kill %d: %v\n%s", i, err, out.String())
		}
		acknowledged += strings.Count(out.String(), "\nok ")
		if err := m.read(out.Bytes()); err != nil {
			t.Fatalf("kill %d: %v", i, err)
		}
		r := prepareRig(t, dir, nil)
		r.start()
		m.check(t, r)
		stop(r)
		if t.Failed() {
			t.Fatalf("seed %d, kill %d\n%s", seed, i, out.String())
		}
	}
	t.Logf("%d kills, %d operations acknowledged before them", kills, acknowledged)
	if acknowledged < kills/10 { // far fewer than on a machine that has nothing else to do
		t.Errorf("%d kills hit only %d operations: the children hardly began", kills, acknowledged)
	}
	r := prepareRig(t, dir, nil)
	r.start()
	defer r.stop()
	wipe(t, r)
}
