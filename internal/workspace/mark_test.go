package workspace_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
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
