package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
	"github.com/warren-sandbox/warren/internal/repo"
)

// carry brings the uncommitted changes of a path on the host into the workspace: the files that differ from the commit
// and those that git neither tracks nor ignores, as they are on disk. A repository inside the path comes along as it
// is. The index inside stays at the commit, so that all of it shows as uncommitted.
//
// The path's own configuration, hooks, filters and fsmonitor are not read; see [repo.Local].
func (s *Store) carry(ctx context.Context, id warren.WorkspaceID, m *meta) error {
	l, err := repo.OpenLocal(ctx, m.Dirty, "")
	if err != nil {
		return err
	}
	defer l.Close()
	if l.Work == "" {
		return fmt.Errorf("%s is a bare repository, which has no uncommitted changes: %w", m.Dirty, warren.ErrInvalid)
	}
	names, err := l.Changes(ctx, m.Commit)
	if err != nil {
		return err
	}
	from, err := os.OpenRoot(l.Work)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenRoot(s.files(id))
	if err != nil {
		return err
	}
	defer to.Close()
	for _, n := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		n = strings.TrimSuffix(n, "/")
		if hasDotGit(n) {
			continue
		}
		if err := s.carryOne(from, to, n); err != nil {
			return fmt.Errorf("%s: %w", printable(n), err)
		}
	}
	return nil
}

// carryOne makes a name in to what it is in from.
func (s *Store) carryOne(from, to *os.Root, name string) error {
	fi, err := from.Lstat(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return err
	}
	if err != nil || !fi.IsDir() {
		if err := to.RemoveAll(name); err != nil && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
	}
	if err != nil {
		// Git keeps no empty directories.
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if to.Remove(d) != nil {
				break
			}
		}
		return nil
	}
	if err := s.parents(to, path.Dir(name)); err != nil {
		return err
	}
	switch {
	case fi.IsDir():
		return s.carryDir(from, to, name)
	case fi.Mode()&fs.ModeSymlink != 0:
		target, err := from.Readlink(name)
		if err != nil {
			return err
		}
		if err := to.Symlink(target, name); err != nil {
			return err
		}
		return s.own(to, name)
	case fi.Mode().IsRegular():
		return s.carryFile(from, to, name, fi)
	}
	return nil
}

// parents makes the directories above a file; what is there and is none has been replaced by one.
func (s *Store) parents(to *os.Root, dir string) error {
	if dir == "." {
		return nil
	}
	if fi, err := to.Lstat(dir); err == nil && fi.IsDir() {
		return nil
	} else if err == nil {
		if err := to.Remove(dir); err != nil {
			return err
		}
	}
	if err := s.parents(to, path.Dir(dir)); err != nil {
		return err
	}
	return s.mkdir(to, dir, 0o755)
}

func (s *Store) carryDir(from, to *os.Root, name string) error {
	if err := s.parents(to, name); err != nil {
		return err
	}
	d, err := from.Open(name)
	if err != nil {
		return err
	}
	entries, err := d.ReadDir(-1)
	d.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := s.carryOne(from, to, name+"/"+e.Name()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) carryFile(from, to *os.Root, name string, fi fs.FileInfo) error {
	in, err := from.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer in.Close()
	mode := fs.FileMode(0o644)
	if fi.Mode()&0o100 != 0 {
		mode = 0o755
	}
	out, err := to.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(mode)
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return s.own(to, name)
}

// FormatPatch writes the commits of the workspace's branch as mails, as git format-patch does.
func (s *Store) FormatPatch(ctx context.Context, id warren.WorkspaceID, w io.Writer) error {
	m, err := s.ready(id)
	if err != nil {
		return err
	}
	if m.Head == "" {
		return fmt.Errorf("workspace %s has no commit yet; commit first: %w", id, warren.ErrState)
	}
	c := s.confined(id, m, nil, "format-patch", "--stdout", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-signature", "--no-attach", "--end-of-options", m.Commit+".."+m.Head)
	c.Stdout = w
	if err := c.Run(ctx); err != nil {
		return fmt.Errorf("commits of workspace %s: %w", id, s.blame(ctx, m, err))
	}
	return nil
}

// PushOptions of Push.
type PushOptions struct {
	// Branch of the mirror; empty means that of the last commit. RemoteBranch is its name at the origin; empty means the same.
	Branch, RemoteBranch string
	// Force replaces the origin's branch if it is still where the cache saw it last.
	Force bool
	// HostCredentials as in repo.FetchOptions.
	HostCredentials bool
	// URL to push to instead of the one that was fetched, for credentials in it; it must be the same repository.
	URL string
}

// PushResult is what Push did.
type PushResult struct {
	// URL of the origin without credentials.
	URL, Branch, Commit string
}

// Push sends a committed branch to the origin.
func (s *Store) Push(ctx context.Context, id warren.WorkspaceID, o PushOptions) (*PushResult, error) {
	m, err := s.ready(id)
	if err != nil {
		return nil, err
	}
	if m.RepoID == "" {
		return nil, fmt.Errorf("workspace %s was not cut from a repository: %w", id, warren.ErrState)
	}
	if o.Branch == "" {
		if o.Branch = m.HeadBranch; o.Branch == "" {
			return nil, fmt.Errorf("workspace %s has no commit yet; commit first: %w", id, warren.ErrState)
		}
	}
	if o.RemoteBranch == "" {
		o.RemoteBranch = o.Branch
	}
	for _, b := range []string{o.Branch, o.RemoteBranch} {
		if err := git.CheckRef(b); err != nil {
			return nil, err
		}
	}
	p, err := s.o.Repos.Push(ctx, m.RepoID, repo.PushOptions{Branch: o.Branch, RemoteBranch: o.RemoteBranch, Force: o.Force, HostCredentials: o.HostCredentials, URL: o.URL})
	if err != nil {
		return nil, fmt.Errorf("push workspace %s: %w", id, err)
	}
	return &PushResult{URL: p.URL, Branch: o.RemoteBranch, Commit: p.Commit}, nil
}
