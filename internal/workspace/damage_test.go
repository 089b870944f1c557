package workspace_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// When the repository in the cache is damaged, that is what a workspace's errors say, and not what git stumbled over.
func TestDamagedRepository(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	f.cut("wbefore", src, "")
	r, err := f.repos.Fetch(t.Context(), src, repo.FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	commit, branch, err := f.repos.ResolveRef(t.Context(), r.ID, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.store.Prepare(t.Context(), "wafter", workspace.Source{Repo: r, URL: r.URL, Commit: commit, Branch: branch}); err != nil {
		t.Fatal(err)
	}
	packs, err := filepath.Glob(filepath.Join(r.Objects, "*", "*"))
	if err != nil || len(packs) == 0 {
		t.Fatal(packs, err)
	}
	for _, p := range packs {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
	check := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), string(r.ID)) {
			t.Errorf("%s: %v, want that repository %s is damaged", what, err, r.ID)
		}
	}
	check("populate", f.store.Populate(t.Context(), "wafter"))
	write(t, filepath.Join(f.dir, "workspaces", "wbefore", "files"), "new.txt", "new\n")
	check("diff", f.store.Diff(t.Context(), "wbefore", workspace.DiffOptions{}, &bytes.Buffer{}))
	_, err = f.store.Commit(t.Context(), "wbefore", workspace.CommitOptions{Message: "x"})
	check("commit", err)
}
