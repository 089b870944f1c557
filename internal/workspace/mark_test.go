package workspace_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// A diff since a mark shows what changed since then alone, with a repository and without one.
func TestMark(t *testing.T) {
	for name, repo := range map[string]bool{"repository": true, "empty": false} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			var w *workspace.Workspace
			if repo {
				w = f.cut("w1", newRepo(t, some), "")
			} else {
				w = f.empty("w1")
			}
			since := workspace.DiffOptions{SinceMark: true}
			if err := f.store.Diff(t.Context(), "w1", since, io.Discard); !errors.Is(err, warren.ErrState) {
				t.Fatalf("diff without a mark: %v", err)
			}
			write(t, w.Files, "early.txt", "before\n")
			write(t, w.Files, "stays.txt", "as it is\n")
			if err := f.store.Mark(t.Context(), "w1"); err != nil {
				t.Fatal(err)
			}
			if d := f.diff("w1", since); d != "" {
				t.Errorf("nothing changed since the mark, and the diff is\n%s", d)
			}
			write(t, w.Files, "early.txt", "after\n")
			write(t, w.Files, "late.txt", "new\n")
			d := f.diff("w1", since)
			for _, want := range []string{"-before\n+after\n", "late.txt"} {
				if !strings.Contains(d, want) {
					t.Errorf("the diff lacks %q:\n%s", want, d)
				}
			}
			if strings.Contains(d, "stays.txt") {
				t.Errorf("the diff has what was there before the mark:\n%s", d)
			}
			if d := f.diff("w1", workspace.DiffOptions{}); !strings.Contains(d, "stays.txt") {
				t.Errorf("the whole diff is\n%s", d)
			}
			// The next takes its place, and leaves nothing of it.
			if err := f.store.Mark(t.Context(), "w1"); err != nil {
				t.Fatal(err)
			}
			if d := f.diff("w1", since); d != "" {
				t.Errorf("after the second mark:\n%s", d)
			}
			dir := filepath.Dir(w.Files)
			left, err := filepath.Glob(filepath.Join(dir, ".tmp-*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			// Going back to before the mark is a change too.
			if err := os.Remove(filepath.Join(w.Files, "stays.txt")); err != nil {
				t.Fatal(err)
			}
			if d := f.diff("w1", since); !strings.Contains(d, "deleted file mode") {
				t.Errorf("the removal is missing:\n%s", d)
			}
			if _, err := f.store.Copy(t.Context(), "w1", "w2"); err != nil {
				t.Fatal(err)
			}
			if err := f.store.Diff(t.Context(), "w2", since, io.Discard); !errors.Is(err, warren.ErrState) {
				t.Errorf("diff of a copy since a mark: %v", err)
			}
			write(t, dir, "mark/tree", "--output=x\n")
			if err := f.store.Diff(t.Context(), "w1", since, io.Discard); !errors.Is(err, warren.ErrState) {
				t.Errorf("diff since a damaged mark: %v", err)
			}
		})
	}
}

// What was written after a mark does not say what is ignored, and does not hide what the mark has.
func TestMarkIgnored(t *testing.T) {
	f := newFixture(t)
	w := f.cut("w1", newRepo(t, some), "")
	since := workspace.DiffOptions{SinceMark: true}
	write(t, w.Files, "sub/.gitignore", "*.log\n")
	write(t, w.Files, "sub/old.log", "noise\n")
	write(t, w.Files, "cache/.gitignore", "*\n")
	write(t, w.Files, "cache/thing", "noise\n")
	write(t, w.Files, "goes.txt", "here\n")
	write(t, w.Files, "changes.txt", "one\n")
	must(t, f.store.Mark(t.Context(), "w1"))
	if d := f.diff("w1", since); d != "" {
		t.Fatalf("nothing changed, and the diff is\n%s", d)
	}
	write(t, w.Files, ".gitignore", "*\n")
	write(t, w.Files, "sub/.gitignore", "*\n")
	write(t, w.Files, "cache/.gitignore", "nothing\n")
	write(t, w.Files, "sub/new.log", "noise\n")
	write(t, w.Files, "sub/new.txt", "hidden work\n")
	write(t, w.Files, "changes.txt", "two\n")
	write(t, w.Files, "cache/more", "noise\n")
	write(t, w.Files, "inner/.git/HEAD", "ref: refs/heads/main\n")
	write(t, w.Files, "inner/.git/objects/x", "")
	write(t, w.Files, "inner/.git/refs/x", "")
	write(t, w.Files, "inner/.gitignore", "*\n")
	write(t, w.Files, "inner/code.txt", "nested work\n")
	must(t, os.Remove(filepath.Join(w.Files, "goes.txt")))
	d := f.diff("w1", since)
	for _, want := range []string{"b/.gitignore", "b/sub/.gitignore", "b/cache/.gitignore", "+hidden work", "-one\n+two", "a/goes.txt", "-here", "+nested work"} {
		if !strings.Contains(d, want) {
			t.Errorf("the diff lacks %q:\n%s", want, d)
		}
	}
	for _, not := range []string{"noise", "stays", ".ignore-"} {
		if strings.Contains(d, not) {
			t.Errorf("the diff has %q:\n%s", not, d)
		}
	}
}

// The files of a mark are read within bounds; beyond, they are told by what the file system says of them.
func TestMarkBudget(t *testing.T) {
	f := newFixture(t)
	w := f.empty("w1")
	f.store.ReadAtMost(1000)
	since := workspace.DiffOptions{SinceMark: true}
	for _, n := range []string{"a", "b"} {
		write(t, w.Files, n, strings.Repeat("x", 900))
	}
	write(t, w.Files, "small", "s\n")
	must(t, f.store.Mark(t.Context(), "w1"))
	if d := f.diff("w1", since); d != "" {
		t.Fatalf("nothing changed, and the diff is\n%s", d)
	}
	write(t, w.Files, "b", strings.Repeat("y", 900))
	write(t, w.Files, "small", "S\n")
	write(t, w.Files, "c", strings.Repeat("z", 2000))
	for _, o := range []workspace.DiffOptions{since, {SinceMark: true, Stat: true}} {
		d := f.diff("w1", o)
		for _, want := range []string{"# warren: b (0 MiB) has changed", "# warren: c (0 MiB) has changed", "too large to compare: 2\n", "small"} {
			if !strings.Contains(d, want) {
				t.Errorf("%+v lacks %q:\n%s", o, want, d)
			}
		}
		if strings.Contains(d, "yyy") || strings.Contains(d, "zzz") {
			t.Errorf("%+v has what is not read:\n%s", o, d)
		}
	}
	must(t, os.Remove(filepath.Join(w.Files, "b")))
	if d := f.diff("w1", since); !strings.Contains(d, "# warren: b ") {
		t.Errorf("a removed one is missing:\n%s", d)
	}
}

// Who reads since a mark needs no lock that others wait for, and a rollback keeps the mark.
func TestMarkStays(t *testing.T) {
	f := newFixture(t)
	w := f.empty("w1")
	ctx := t.Context()
	since := workspace.DiffOptions{SinceMark: true}
	write(t, w.Files, "word", "one\n")
	must(t, f.store.Mark(ctx, "w1"))
	write(t, w.Files, "word", "two\n")
	unlock, err := repo.LockFile(ctx, filepath.Join(f.dir, "workspaces", ".locks", "w1"))
	must(t, err)
	if d := f.diff("w1", since); !strings.Contains(d, "+two") {
		t.Errorf("while it is locked: %q", d)
	}
	unlock()
	_, err = f.store.Copy(ctx, "w1", "snap")
	must(t, err)
	write(t, w.Files, "word", "three\n")
	must(t, f.store.Replace(ctx, "w1", "snap"))
	if d := f.diff("w1", since); !strings.Contains(d, "-one\n+two") {
		t.Errorf("after a rollback: %q", d)
	}
}

// A file that has grown to a terabyte without a byte on the disk is not read to learn that it changed.
func TestDiffGrown(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	f := newFixture(t)
	w := f.cut("w1", newRepo(t, some), "")
	write(t, w.Files, "new.txt", "as young as the mark\n")
	must(t, f.store.Mark(ctx, "w1"))
	for _, name := range []string{"new.txt", "a.txt", "dir/b.txt"} {
		size := int64(1 << 40)
		if name == "dir/b.txt" {
			size = 4<<32 + int64(len(some[name])) // an index has 32 bits of it, and these are the same
		}
		must(t, os.Truncate(filepath.Join(w.Files, name), size))
	}
	for _, o := range []workspace.DiffOptions{{SinceMark: true}, {SinceMark: true, Stat: true}, {}, {Stat: true}} {
		var d strings.Builder
		if err := f.store.Diff(ctx, "w1", o, &d); err != nil {
			t.Fatalf("%+v: %v", o, err)
		}
		for _, want := range []string{"# warren: new.txt (1048576 MiB)", "# warren: a.txt (1048576 MiB)", "# warren: dir/b.txt (16384 MiB)"} {
			if !strings.Contains(d.String(), want) {
				t.Errorf("%+v lacks %q:\n%s", o, want, d.String())
			}
		}
	}
	// What was passed over is looked at again.
	write(t, w.Files, "a.txt", "one\n2\n")
	write(t, w.Files, "dir/b.txt", some["dir/b.txt"])
	for _, since := range []bool{false, true} {
		if d := f.diff("w1", workspace.DiffOptions{SinceMark: since}); !strings.Contains(d, "-two\n+2\n") || strings.Contains(d, "dir/b.txt") || !strings.Contains(d, "# warren: new.txt") {
			t.Errorf("after it shrank, since the mark %v:\n%s", since, d)
		}
	}
}

// A repository where a file was hides nothing, and neither does what git refuses to carry.
func TestDiffRepositoryForFile(t *testing.T) {
	f := newFixture(t)
	w := f.cut("w1", newRepo(t, some), "")
	must(t, f.store.Mark(t.Context(), "w1"))
	file := filepath.Join(w.Files, "a.txt")
	must(t, os.Remove(file))
	must(t, os.Mkdir(file, 0o755))
	runGit(t, file, "init", "-q")
	write(t, w.Files, "a.txt/code.txt", "hidden work\n")
	write(t, w.Files, "a.txt/sub/more.txt", "more of it\n")
	must(t, os.Symlink("/etc/hostname", filepath.Join(w.Files, ".gitmodules")))
	for _, o := range []workspace.DiffOptions{{SinceMark: true}, {}, {All: true}} {
		d := f.diff("w1", o)
		for _, want := range []string{"+hidden work", "+more of it", "-two", "# warren: .gitmodules is not in the patch"} {
			if !strings.Contains(d, want) {
				t.Errorf("%+v lacks %q:\n%s", o, want, d)
			}
		}
		if strings.Count(d, "+hidden work") != 1 || strings.Contains(d, "a.txt/.git/") {
			t.Errorf("%+v has too much:\n%s", o, d)
		}
	}
	res, err := f.store.Commit(t.Context(), "w1", workspace.CommitOptions{Message: "x", Branch: "b"})
	if err != nil {
		t.Fatal(err)
	}
	if res.Files != 3 {
		t.Errorf("the commit has %+v; want the removal and two files", res)
	}
}

// What takes too much memory to compare is refused, with words.
func TestDiffMemory(t *testing.T) {
	testenv.NeedsRoot(t)
	f := newFixture(t)
	w := f.empty("w1")
	lines := strings.Repeat("\n", 20_000_000)
	write(t, w.Files, "lines", lines)
	must(t, f.store.Mark(t.Context(), "w1"))
	write(t, w.Files, "lines", "a\n"+lines+"b\n")
	if err := f.store.Diff(t.Context(), "w1", workspace.DiffOptions{SinceMark: true}, io.Discard); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "warren diff --stat") {
		t.Errorf("a patch: %v", err)
	}
	if d := f.diff("w1", workspace.DiffOptions{SinceMark: true, Stat: true}); !strings.Contains(d, "lines | Bin 20000000 -> 20000004 bytes") {
		t.Errorf("a summary:\n%s", d)
	}
}
