package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// Check says what is wrong with a repository in the cache: [warren.ErrState] when its git directories cannot be read, or
// when objects of a ref, or of the commit if one is given, are gone. It reads all trees of the commit; it is for after a failure.
func (c *Cache) Check(ctx context.Context, id warren.RepoID, commit string) error {
	r, _, err := c.load(id)
	if err != nil {
		return err
	}
	origin := c.origin(id)
	what := ""
	for _, dir := range []string{origin, r.Dir} {
		if what = damage(ctx, dir, commit); what != "" {
			break
		}
		commit = "" // the mirror has what the origin's directory has, and may have commits that nobody needs
	}
	if what == "" || ctx.Err() != nil {
		return ctx.Err()
	}
	return damaged(r, what)
}

func damaged(r *Repo, what string) error {
	return fmt.Errorf("the cached repository %s (%s) is damaged: %s; remove it with `warren repo rm %s` and create again, which fetches it anew (commits of workspaces that were not pushed go with it): %w",
		r.ID, r.URL, what, r.ID, warren.ErrState)
}

// damage says in words what is wrong with a git directory, "" when nothing was found.
func damage(ctx context.Context, dir, commit string) string {
	name := filepath.Base(dir)
	if _, err := os.Stat(filepath.Join(dir, "objects")); errors.Is(err, fs.ErrNotExist) {
		return name + " has no objects"
	}
	if err := command(dir, "rev-parse", "--git-dir").Run(ctx); err != nil {
		return name + " is no git directory any more"
	}
	refs, err := command(dir, "for-each-ref", "--format=%(objectname)").Output(ctx)
	if err != nil {
		return "the refs of " + name + " cannot be read"
	}
	have := command(dir, "cat-file", "--batch-check=%(objecttype)")
	have.Stdin = strings.NewReader(string(refs))
	types, err := have.Output(ctx)
	if err != nil || strings.Contains(string(types), " missing\n") {
		return name + " lacks objects that its refs name"
	}
	if commit == "" {
		return ""
	}
	// A commit that only the mirror has is not for this directory to have.
	if command(dir, "cat-file", "-e", commit).Run(ctx) != nil {
		return ""
	}
	// Quiet, it says whether all that the commit's tree reaches is there.
	walk := command(dir, "rev-list", "--objects", "--quiet", "--no-walk", "--end-of-options", commit)
	walk.Stdout = io.Discard
	if walk.Run(ctx) != nil {
		return fmt.Sprintf("%s lacks objects of commit %.12s", name, commit)
	}
	return ""
}

// blame returns why git failed in a repository of the cache, when its damage is why, else err.
func (c *Cache) blame(ctx context.Context, id warren.RepoID, commit string, err error) error {
	var ge *git.Error
	if !errors.As(err, &ge) || ctx.Err() != nil {
		return err
	}
	if why := c.Check(ctx, id, commit); errors.Is(why, warren.ErrState) {
		c.o.Logger.WarnContext(ctx, "repository damaged", "repo", id, "err", err)
		return why
	}
	return err
}
