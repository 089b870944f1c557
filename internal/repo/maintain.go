package repo

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// From so many packs or loose objects on git looks slowly for an object, and a repository is maintained.
const (
	manyPacks = 20
	manyLoose = 2000
)

// MaintainAll maintains the repositories that need it, one after the other, until ctx ends. What fails is logged, and tried again by
// the next call.
func (c *Cache) MaintainAll(ctx context.Context) {
	list, err := c.List(ctx)
	if err != nil {
		c.o.Logger.WarnContext(ctx, "maintain repositories", "err", err)
		return
	}
	for _, r := range list {
		if ctx.Err() != nil {
			return
		}
		due, err := c.due(ctx, r)
		if err == nil && due {
			began := time.Now()
			if err = c.Maintain(ctx, r.ID); err == nil {
				c.o.Logger.InfoContext(ctx, "repository maintained", "repo", r.ID, "took", time.Since(began))
			}
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, warren.ErrNotFound) {
			c.o.Logger.WarnContext(ctx, "repository not maintained", "repo", r.ID, "err", err)
		}
	}
}

// due says whether a repository needs maintenance.
func (c *Cache) due(ctx context.Context, r *Repo) (bool, error) {
	for _, dir := range []string{c.origin(r.ID), r.Dir} {
		out, err := command(dir, "count-objects", "-v").Output(ctx)
		if err != nil {
			return false, err
		}
		for line := range strings.Lines(string(out)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			n, err := strconv.Atoi(value)
			if err == nil && (key == "packs" && n >= manyPacks || key == "count" && n >= manyLoose) {
				return true, nil
			}
		}
	}
	return false, nil
}

// Maintain merges the packs of a repository and writes what makes its history fast to walk. Nothing is dropped, not even
// what no ref reaches any more (git repack -k): workspaces borrow these objects, and know no better than to have them.
// It takes as long as the repository is large, and gives way to all else. So it does not take the repository's lock: git's fetch and
// repack are made to run beside each other.
func (c *Cache) Maintain(ctx context.Context, id warren.RepoID) error {
	r, _, err := c.load(id)
	if err != nil {
		return err
	}
	unlock, err := LockFile(ctx, c.lockName(id+maintainLock))
	if err != nil {
		return err
	}
	defer unlock()
	quiet := func(dir string, args ...string) error {
		cmd := command(dir, args...)
		cmd.Background = true
		cmd.Config = []git.Setting{{Key: "pack.threads", Value: "1"}}
		return cmd.Run(ctx)
	}
	for _, dir := range []string{c.origin(id), r.Dir} {
		// -l leaves out what mirror.git borrows from origin.git.
		if err := quiet(dir, "repack", "-a", "-d", "-k", "-l", "-q"); err != nil {
			return c.blame(ctx, id, "", err)
		}
	}
	return c.blame(ctx, id, "", quiet(c.origin(id), "commit-graph", "write", "--reachable", "--no-progress"))
}

// origin is the git directory with what the origin has.
func (c *Cache) origin(id warren.RepoID) string { return filepath.Join(c.dir(id), "origin.git") }
