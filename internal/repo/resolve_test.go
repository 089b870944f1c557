package repo_test

import (
	"errors"
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
