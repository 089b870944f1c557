package repo

import (
	"context"

	"github.com/warren-sandbox/warren"
)

// Maintain merges the packs of a repository and writes what makes its history fast to walk. Nothing is dropped, not even
// what no ref reaches any more (git repack -k): workspaces borrow these objects, and know no better than to have them.
// It takes the repository's lock and as long as the repository is large; it is for quiet hours.
func (c *Cache) Maintain(ctx context.Context, id warren.RepoID) error {
	r, _, err := c.load(id)
	if err != nil {
		return err
	}
	unlock, err := LockFile(ctx, c.lockName(id))
	if err != nil {
		return err
	}
	defer unlock()
	origin := c.dir(id) + "/origin.git"
	for _, dir := range []string{origin, r.Dir} {
		// -l leaves out what mirror.git borrows from origin.git.
		if err := command(dir, "repack", "-a", "-d", "-k", "-l", "-q").Run(ctx); err != nil {
			return err
		}
	}
	return command(origin, "commit-graph", "write", "--reachable", "--no-progress").Run(ctx)
}
