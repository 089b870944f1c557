package workspace_test

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// empty makes a workspace without a repository.
func (f *fixture) empty(id warren.WorkspaceID) *workspace.Workspace {
	f.t.Helper()
	w, err := f.store.Prepare(f.t.Context(), id, workspace.Source{})
	if err == nil {
		err = f.store.Populate(f.t.Context(), id)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return w
}

// listing describes all of a tree: kinds, modes, times, contents and which names are one file.
func listing(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		line := fmt.Sprintf("%s %o %d", name, st.Mode, st.Uid)
		switch {
		case d.Type().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %q", st.Mtim.Nano(), b)
			if other, ok := first[st.Ino]; ok {
				line += " = " + other
			} else {
				first[st.Ino] = name
			}
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + to
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func same(t testing.TB, what, a, b string) {
	t.Helper()
	x, y := listing(t, a), listing(t, b)
	for _, l := range x {
		if !slices.Contains(y, l) {
			t.Errorf("%s: the copy lacks %.200s", what, l)
		}
	}
	for _, l := range y {
		if !slices.Contains(x, l) {
			t.Errorf("%s: the copy has %.200s", what, l)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// fill makes more files than are copied at the instant itself.
func fill(t testing.TB, dir string) {
	t.Helper()
	for i := range 400 {
		d := filepath.Join(dir, fmt.Sprintf("d%d", i%7), fmt.Sprintf("e%d", i%3))
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprintf("f%d", i)), fmt.Appendf(nil, "content %d", i), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(100 * time.Millisecond) // until what was changed just now no longer counts as changing
}

// mutate does something to a tree that a sandbox could do.
func mutate(t testing.TB, r *rand.Rand, dir string) {
	t.Helper()
	var files, dirs []string
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if path == dir {
			return nil
		}
		if d.IsDir() {
			dirs = append(dirs, path)
		} else if d.Type()&(fs.ModeNamedPipe|fs.ModeSymlink) == 0 {
			files = append(files, path) // writing to a FIFO would wait for a reader
		}
		return nil
	})
	if len(files) == 0 || len(dirs) < 3 {
		return
	}
	file, other := files[r.IntN(len(files))], files[r.IntN(len(files))]
	d, e := dirs[r.IntN(len(dirs))], dirs[r.IntN(len(dirs))]
	fresh := filepath.Join(d, fmt.Sprint("n", r.Uint32()))
	var err error
	switch r.IntN(16) {
	case 0:
		err = os.WriteFile(file, fmt.Append(nil, r.Uint64()), 0o644)
	case 1: // the same size, and the time put back
		var st os.FileInfo
		if st, err = os.Stat(file); err == nil {
			err = os.WriteFile(file, []byte(strings.Repeat("x", int(st.Size()))), 0o644)
			os.Chtimes(file, st.ModTime(), st.ModTime())
		}
	case 2:
		err = os.Remove(file)
	case 3:
		err = os.WriteFile(fresh, []byte("new"), 0o600)
	case 4:
		err = os.Rename(file, other)
	case 5: // two files change places
		err = unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE)
	case 6:
		err = os.Rename(d, fresh+"d")
	case 7: // two directories change places
		err = unix.Renameat2(unix.AT_FDCWD, d, unix.AT_FDCWD, e, unix.RENAME_EXCHANGE)
	case 8:
		err = os.RemoveAll(d)
	case 9:
		err = os.Link(file, fresh)
	case 10:
		err = os.Symlink(file, fresh)
	case 11:
		err = os.Chmod(file, 0o4711)
	case 12: // a directory takes a file's name
		if err = os.Remove(file); err == nil {
			err = os.Mkdir(file, 0o711)
		}
	case 13: // and the other way round
		if err = os.RemoveAll(d); err == nil {
			err = os.WriteFile(d, []byte("was a directory"), 0o640)
		}
	case 14: // one directory is made anew, perhaps with the inodes that were there
		var names []os.DirEntry
		if names, err = os.ReadDir(d); err == nil {
			err = os.RemoveAll(d)
			os.Mkdir(d, 0o755)
			for _, n := range names {
				os.WriteFile(filepath.Join(d, n.Name()), []byte("content 1"), 0o644)
			}
		}
	case 15:
		err = unix.Mkfifo(fresh, 0o600)
	}
	_ = err // a name may be gone, or lie below the other
}

func TestInstant(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			f := newFixture(t)
			w := f.empty("w1")
			fill(t, w.Files)
			var copies []warren.WorkspaceID
			var then [][]string
			for i := range 5 {
				for range r.IntN(12) {
					mutate(t, r, w.Files)
				}
				if r.IntN(2) == 0 {
					time.Sleep(100 * time.Millisecond)
				}
				id := warren.WorkspaceID(fmt.Sprint("c", i))
				c, err := f.store.BeginCopy(t.Context(), "w1", id, true)
				if err != nil {
					t.Fatal(err)
				}
				for range r.IntN(20) {
					mutate(t, r, w.Files)
				}
				if err := c.Finish(t.Context()); err != nil {
					t.Fatal(err)
				}
				want := listing(t, w.Files)
				mutate(t, r, w.Files) // it runs on
				if _, err := c.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				c.Abort()
				copies, then = append(copies, id), append(then, want)
				// Earlier copies stay what they were, whatever they share.
				if i == 3 {
					if err := f.store.Delete(t.Context(), copies[1]); err != nil {
						t.Fatal(err)
					}
				}
				for n, id := range copies {
					if n == 1 && i >= 3 {
						continue
					}
					c, err := f.store.Get(t.Context(), id)
					if err != nil {
						t.Fatal(err)
					}
					have := listing(t, c.Files)
					slices.Sort(have)
					slices.Sort(then[n])
					if !slices.Equal(have, then[n]) {
						for _, l := range have {
							if !slices.Contains(then[n], l) {
								t.Errorf("copy %d after %d: has %.200s", n, i, l)
							}
						}
						for _, l := range then[n] {
							if !slices.Contains(have, l) {
								t.Errorf("copy %d after %d: lacks %.200s", n, i, l)
							}
						}
						t.FailNow()
					}
				}
			}
		})
	}
}

// A page that is dirty already can be written through a mapping without any time being moved.
func TestInstantMapped(t *testing.T) {
	f := newFixture(t)
	w := f.empty("w1")
	fill(t, w.Files)
	name := filepath.Join(w.Files, "mapped")
	if err := os.WriteFile(name, make([]byte, 8192), 0o644); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	m, err := unix.Mmap(int(file.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	for i := range 4 {
		m[100] = byte(10*i + 1)
		time.Sleep(120 * time.Millisecond) // the time of the change is no longer recent, and the page is dirty
		id := warren.WorkspaceID(fmt.Sprint("c", i))
		c, err := f.store.BeginCopy(t.Context(), "w1", id, true)
		if err != nil {
			t.Fatal(err)
		}
		m[100] = byte(10*i + 2)
		if err := c.Finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.Abort()
		got, err := f.store.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "mapped", w.Files, got.Files)
	}
}

func TestInstantShares(t *testing.T) {
	f := newFixture(t)
	w := f.empty("w1")
	fill(t, w.Files)
	big := make([]byte, 5<<20)
	rand.NewChaCha8([32]byte{}).Read(big)
	if err := os.WriteFile(filepath.Join(w.Files, "big"), big, 0o644); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	take := func(id warren.WorkspaceID) (total, shared int64) {
		c, err := f.store.BeginCopy(t.Context(), "w1", id, true)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Abort()
		if err := c.Finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		total, shared, err = f.store.Usage(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		return total, shared
	}
	if _, shared := take("c1"); shared != 0 {
		t.Errorf("the first copy shares %d bytes", shared)
	}
	if total, shared := take("c2"); f.store.CopyMethod() == "copy" && (shared < 5<<20 || total-shared > 1<<20) {
		t.Errorf("the second copy has %d bytes and shares %d of them", total, shared)
	}
	if err := f.store.Delete(t.Context(), "c1"); err != nil {
		t.Fatal(err)
	}
	if _, shared, err := f.store.Usage(t.Context(), "c2"); err != nil || shared != 0 {
		t.Errorf("the only copy shares %d bytes (%v)", shared, err)
	}
	c2, err := f.store.Get(t.Context(), "c2")
	if err != nil {
		t.Fatal(err)
	}
	same(t, "c2", w.Files, c2.Files)

	// A workspace made of the copy is not the copy.
	if _, err := f.store.Copy(t.Context(), "c2", "w2"); err != nil {
		t.Fatal(err)
	}
	w2, err := f.store.Get(t.Context(), "w2")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w2.Files, "big"), []byte("small"), 0o644); err != nil {
		t.Fatal(err)
	}
	same(t, "c2 after a write to w2", w.Files, c2.Files)
}

func TestReplace(t *testing.T) {
	f := newFixture(t)
	w := f.empty("w1")
	fill(t, w.Files)
	os.WriteFile(filepath.Join(w.Home, "history"), []byte("then"), 0o600)
	if _, err := f.store.Copy(t.Context(), "w1", "c1"); err != nil {
		t.Fatal(err)
	}
	then := listing(t, w.Files)
	os.RemoveAll(filepath.Join(w.Files, "d1"))
	os.WriteFile(filepath.Join(w.Files, "new"), []byte("new"), 0o600)
	os.WriteFile(filepath.Join(w.Home, "history"), []byte("now"), 0o600)
	for range 2 { // it may be repeated
		if err := f.store.Replace(t.Context(), "w1", "c1"); err != nil {
			t.Fatal(err)
		}
		if now := listing(t, w.Files); !slices.Equal(now, then) {
			t.Errorf("%d entries, want the %d of then", len(now), len(then))
		}
		if b, _ := os.ReadFile(filepath.Join(w.Home, "history")); string(b) != "then" {
			t.Errorf("home has %q", b)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(f.dir, "workspaces", ".tmp-*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if err := f.store.Adopt(t.Context(), "c1", "w5"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.store.Get(t.Context(), "c1"); err == nil {
		t.Error("an adopted copy is still there")
	}
	w5, err := f.store.Get(t.Context(), "w5")
	if err != nil {
		t.Fatal(err)
	}
	same(t, "w5", w.Files, w5.Files)
	if err := f.store.Adopt(t.Context(), "w5", "w1"); err == nil {
		t.Error("a copy took the place of a workspace that exists")
	}
}

// TestReplaceFullDisk replaces a workspace on a disk without room for both: the first half says so and changes nothing. With room
// it writes all that there is to write, so that the second half needs none.
func TestReplaceFullDisk(t *testing.T) {
	ctx := t.Context()
	dir := filepath.Join(testenv.SmallFS(t, 8<<20, 1000), "workspaces")
	s, err := workspace.Open(workspace.Options{Dir: dir, IDBase: driver.DiskIDBase})
	if err != nil {
		t.Fatal(err)
	}
	made := func(id warren.WorkspaceID, word string, size int) string {
		w, err := s.Prepare(ctx, id, workspace.Source{})
		if err == nil {
			err = s.Populate(ctx, id)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(w.Files, "word"), []byte(word), 0o644)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(w.Files, "big"), make([]byte, size), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return w.Files
	}
	files := made("w1", "now", 1<<10)
	made("c1", "then", 3<<20)
	filler := filepath.Join(dir, "..", "filler")
	if err := os.WriteFile(filler, make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	word := func(want string) {
		t.Helper()
		if b, err := os.ReadFile(filepath.Join(files, "word")); err != nil || string(b) != want {
			t.Errorf("the workspace has %q, want %q (%v)", b, want, err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, ".tmp-*")); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
	if _, err := s.BeginReplace(ctx, "w1", "c1"); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("on a full disk: %v", err)
	}
	word("now")
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if n, err := s.ReplaceNeeds(ctx, "c1"); err != nil || n < 3<<20 {
		t.Errorf("it needs %d bytes (%v)", n, err)
	}
	r, err := s.BeginReplace(ctx, "w1", "c1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Abort()
	if b, err := os.ReadFile(filepath.Join(files, "word")); err != nil || string(b) != "now" {
		t.Errorf("before the second half it has %q (%v)", b, err)
	}
	if err := os.WriteFile(filler, make([]byte, 8<<20), 0o600); err == nil {
		t.Fatal("the disk was never full")
	}
	if err := r.Commit(ctx); err != nil {
		t.Errorf("the second half, on a full disk: %v", err)
	}
	r.Abort()
	word("then")
}
