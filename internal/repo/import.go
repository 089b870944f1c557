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

// Commit is what Import puts on a branch of the mirror.
type Commit struct {
	// ID of the commit, and Branch that is to name it, such as "warren/fix".
	ID, Branch string
	// Old is what the branch must name before; empty means that it must not exist.
	Old string
	// Message for the branch's log.
	Message string
}

// Import takes a pack with the objects of a commit, as `git pack-objects --thin --stdout` writes it, and moves a
// branch of the mirror to that commit. A branch that is not where Old says gives [warren.ErrState] and changes nothing.
//
// The bytes come from a workspace and are not trusted: a confined git, which sees the repository read-only, rebuilds
// and checks every object and every link between them (git index-pack --strict) into a directory of its own. Only the
// finished pack is copied into the mirror, and only under a name that is not taken, so nothing that was there changes.
func (c *Cache) Import(ctx context.Context, id warren.RepoID, pack io.Reader, commit Commit) error {
	r, _, err := c.load(id)
	if err != nil {
		return err
	}
	if err := git.CheckRef(commit.Branch); err != nil {
		return err
	}
	if !git.IsObjectID(commit.ID) || commit.Old != "" && !git.IsObjectID(commit.Old) {
		return fmt.Errorf("import into %s: not a commit id: %w", id, warren.ErrInvalid)
	}
	stage, err := os.MkdirTemp(c.o.Dir, tmpPrefix+"import-*~"+string(id))
	if err != nil {
		return err
	}
	defer os.RemoveAll(stage)
	unlock, err := LockFile(ctx, c.lockName(id))
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.Chmod(stage, 0o711); err != nil {
		return err
	}
	gitDir := filepath.Join(stage, "git")
	if err := initBare(gitDir, r.Format, nil); err != nil {
		return err
	}
	objects := filepath.Join(stage, "objects")
	for _, d := range []string{objects, filepath.Join(objects, "pack")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
		if os.Geteuid() == 0 {
			if err := os.Lchown(d, int(c.o.UID), int(c.o.GID)); err != nil {
				return err
			}
		}
	}
	confined := func(args ...string) *git.Cmd {
		return &git.Cmd{
			Dir: gitDir, Objects: objects, Alternates: []string{r.Objects, filepath.Join(r.Dir, "objects")},
			Args: args, Confine: c.confine(),
		}
	}
	index := confined("index-pack", "--strict", "--stdin", "--fix-thin")
	index.Stdin = pack
	if err := index.Run(ctx); err != nil {
		return fmt.Errorf("check the commit's objects: %w", c.blame(ctx, id, commit.Old, err))
	}
	if kind, err := confined("cat-file", "-t", commit.ID).Line(ctx); err != nil || kind != "commit" {
		return fmt.Errorf("import into %s: the pack has no commit %s: %w", id, commit.ID, errors.Join(warren.ErrInvalid, err))
	}
	if err := movePacks(stage, "objects/pack", filepath.Join(r.Dir, "objects", "pack")); err != nil {
		return fmt.Errorf("add the commit's objects: %w", err)
	}
	return c.moveBranch(ctx, r, commit)
}

// confine returns how git runs that handles bytes of a sandbox.
func (c *Cache) confine() *git.Confine {
	return &git.Confine{IDBase: c.o.UID - sandboxUID, UID: sandboxUID}
}

// moveBranch sets a branch if it still is where it was.
func (c *Cache) moveBranch(ctx context.Context, r *Repo, commit Commit) error {
	old := commit.Old
	if old == "" {
		old = strings.Repeat("0", len(commit.ID))
	}
	message := strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, commit.Message)
	u := command(r.Dir, "update-ref", "--create-reflog", "-m", "warren: "+clip(message), "--end-of-options", "refs/heads/"+commit.Branch, commit.ID, old)
	u.Env = []string{"GIT_COMMITTER_NAME=warren", "GIT_COMMITTER_EMAIL=warren@localhost"}
	err := u.Run(ctx)
	if err == nil {
		return nil
	}
	now, ok, rerr := c.Branch(ctx, r.ID, commit.Branch)
	if rerr == nil && (ok && now != commit.Old || !ok && commit.Old != "") {
		return fmt.Errorf("branch %s of the mirror was moved by another (it is at %.12s); commit to another branch: %w", commit.Branch, now, warren.ErrState)
	}
	return c.blame(ctx, r.ID, "", err)
}

// Branch returns the commit of a branch of the mirror.
func (c *Cache) Branch(ctx context.Context, id warren.RepoID, branch string) (commit string, ok bool, err error) {
	r, _, err := c.load(id)
	if err != nil {
		return "", false, err
	}
	if err := git.CheckRef(branch); err != nil {
		return "", false, err
	}
	out, err := command(r.Dir, "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads/"+branch).Output(ctx)
	if err != nil {
		return "", false, c.blame(ctx, id, "", err)
	}
	for line := range strings.Lines(string(out)) {
		if oid, ref, _ := strings.Cut(strings.TrimSpace(line), " "); ref == "refs/heads/"+branch {
			return oid, true, nil
		}
	}
	return "", false, nil
}

// movePacks copies finished packs from a directory below stage, in which git could put a symbolic link, to another; the
// index comes last, because a pack counts from when its index is there.
func movePacks(stage, from, to string) error {
	root, err := os.OpenRoot(stage)
	if err != nil {
		return err
	}
	defer root.Close()
	src, err := root.OpenRoot(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenRoot(to)
	if err != nil {
		return err
	}
	defer dst.Close()
	entries, err := fs.ReadDir(src.FS(), ".")
	if err != nil {
		return err
	}
	for _, ext := range []string{".pack", ".rev", ".idx"} {
		for _, e := range entries {
			if name := e.Name(); strings.HasPrefix(name, "pack-") && strings.HasSuffix(name, ext) && e.Type().IsRegular() {
				if err := copyPack(src, dst, name); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func copyPack(src, dst *os.Root, name string) error {
	if _, err := dst.Lstat(name); err == nil {
		return nil // the name is a checksum of the content
	}
	in, err := src.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	tmp := "tmp_" + name
	out, err := dst.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o444)
	if err != nil {
		return err
	}
	defer dst.Remove(tmp)
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(0o444)
	}
	if err == nil {
		err = out.Sync()
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = dst.Rename(tmp, name)
	}
	return err
}
