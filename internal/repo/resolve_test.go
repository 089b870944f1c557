package repo_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
)

// What is committed to the mirror from a workspace is none of the origin's, by branch and by commit.
func TestResolveOrigin(t *testing.T) {
	src := newRepo(t)
	first := commit(t, src, "one")
	c := open(t, t.TempDir())
	ctx := t.Context()
	r, err := c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	mine := runGit(t, r.Dir, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit-tree", first+"^{tree}", "-p", first, "-m", "mine")
	runGit(t, r.Dir, "update-ref", "refs/heads/warren/x", mine)

	if got, _, err := c.ResolveRef(ctx, r.ID, "warren/x"); err != nil || got != mine {
		t.Fatalf("the mirror's own branch: %q, %v", got, err)
	}
	for _, ref := range []string{"warren/x", "refs/heads/warren/x", mine, mine[:12]} {
		if got, _, err := c.ResolveOrigin(ctx, r.ID, ref); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("ResolveOrigin(%q) = %q, %v", ref, got, err)
		}
	}
	for _, ref := range []string{"", first, first[:12]} {
		if got, _, err := c.ResolveOrigin(ctx, r.ID, ref); err != nil || got != first {
			t.Errorf("ResolveOrigin(%q) = %q, %v; want %s", ref, got, err, first)
		}
	}
}

// A repository is named by the beginning of its id, if that is long enough and no other begins so.
func TestGetByPrefix(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	for _, id := range []string{"rabcaaaaaaaaaaaaaaaa", "rabcbbbbbbbbbbbbbbbb", "rxyzaaaaaaaaaaaaaaaa"} {
		must(t, os.Mkdir(filepath.Join(dir, id), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, id, "meta.json"), []byte(`{"url": "https://example.org/`+id[1:5]+`"}`), 0o644))
	}
	for ref, want := range map[string]string{"rabca": "rabcaaaaaaaaaaaaaaaa", "rxy": "rxyzaaaaaaaaaaaaaaaa"} {
		if r, err := c.Get(t.Context(), ref); err != nil || string(r.ID) != want {
			t.Errorf("%q: %+v, %v", ref, r, err)
		}
	}
	for ref, want := range map[string]string{
		"rabc": `"rabc" is ambiguous, it names 2 repositories: rabcaaaaaaaaaaaaaaaa (https://example.org/abca), rabcb`,
		"r":    "it names 3 repositories", "rx": "too short for the id of repository rxyz", "rnone": "neither a URL nor an absolute path",
	} {
		if _, err := c.Get(t.Context(), ref); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", ref, err, want)
		}
	}
}
