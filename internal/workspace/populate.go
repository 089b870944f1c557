package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// scratch is a directory of the confined git's own, for one call.
type scratch struct {
	dir, index, objects string
}

func (s *Store) scratch(id warren.WorkspaceID) (*scratch, error) {
	dir, err := os.MkdirTemp(s.dir(id), tmpPrefix+"git-")
	if err != nil {
		return nil, plain(err)
	}
	sc := &scratch{dir: dir, index: filepath.Join(dir, "index", "index"), objects: filepath.Join(dir, "objects")}
	root, err := os.OpenRoot(dir)
	if err == nil {
		defer root.Close()
		for _, d := range []string{"index", "objects"} {
			if err = s.mkdir(root, d, 0o700); err != nil {
				break
			}
		}
	}
	if err != nil {
		sc.close()
		return nil, plain(err)
	}
	return sc, nil
}

func (sc *scratch) close() { removeAll(sc.dir) }

// readIndex returns the index that git left; the name is not followed if it is a symbolic link.
func (sc *scratch) readIndex() ([]byte, error) {
	root, err := os.OpenRoot(filepath.Dir(sc.index))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return root.ReadFile("index")
}

// writeIndex gives git an index to start from.
func (s *Store) writeIndex(sc *scratch, b []byte) error {
	root, err := os.OpenRoot(filepath.Dir(sc.index))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.WriteFile("index", b, 0o600); err != nil {
		return err
	}
	return s.own(root, "index")
}

// Populate checks the files out. Nothing may work in the workspace before it has returned nil. What a killed Populate
// left is finished by the next call; one that was finished is not touched again.
func (s *Store) Populate(ctx context.Context, id warren.WorkspaceID) error {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	m, err := s.load(id)
	if err != nil {
		return err
	}
	if m.Populated {
		return nil
	}
	if m.RepoID != "" {
		if err := s.checkout(ctx, id, m); err != nil {
			err = s.blame(ctx, m, err)
			return fmt.Errorf("check out workspace %s: %w", id, err)
		}
		if m.Dirty != "" {
			if err := s.carry(ctx, id, m); err != nil {
				return fmt.Errorf("take uncommitted changes of %s along: %w", m.Dirty, err)
			}
		}
	}
	m.Populated = true
	return save(s.dir(id), m, true)
}

// checkout writes the files of the commit, the index of ours and the index inside.
func (s *Store) checkout(ctx context.Context, id warren.WorkspaceID, m *meta) error {
	sc, err := s.scratch(id)
	if err != nil {
		return err
	}
	defer sc.close()
	if err := s.confined(id, m, sc, "read-tree", "--end-of-options", m.Commit).Run(ctx); err != nil {
		if git.ExitCode(err) == 128 {
			return fmt.Errorf("commit %.12s is not in the repository's cache; fetch it again: %w: %w", m.Commit, err, warren.ErrNotFound)
		}
		return err
	}
	out := s.confined(id, m, sc, "checkout-index", "--all", "--force", "--index", "--quiet")
	out.WorkTree = s.files(id)
	out.WriteTree = true
	out.Config = []git.Setting{{Key: "checkout.workers", Value: strconv.Itoa(min(runtime.NumCPU(), 8))}, {Key: "checkout.thresholdForParallelism", Value: "200"}}
	if err := out.Run(ctx); err != nil {
		return err
	}
	index, err := sc.readIndex()
	if err != nil {
		return err
	}
	if index, err = s.settle(id, m, index); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(s.dir(id), "git"), "index", index, 0o644, false); err != nil {
		return err
	}
	if err := s.insideObjects(ctx, id, m); err != nil {
		return err
	}
	root, err := os.OpenRoot(s.files(id))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.WriteFile(".git/index", index, 0o644); err != nil {
		return err
	}
	return s.own(root, ".git/index")
}

// insideObjects copies objects into the workspace that sandboxes do not see in the repository's: those of a commit that
// was made in another workspace.
func (s *Store) insideObjects(ctx context.Context, id warren.WorkspaceID, m *meta) error {
	check := s.confined(id, m, nil, "cat-file", "-e", m.Commit+"^{tree}")
	check.Alternates = []string{s.o.Repos.Objects(m.RepoID)}
	err := check.Run(ctx)
	if err == nil || git.ExitCode(err) < 0 {
		return err
	}
	pack, err := s.o.Repos.Missing(ctx, m.RepoID, m.Commit)
	if err != nil {
		return err
	}
	defer pack.Close()
	sc, err := s.scratch(id)
	if err != nil {
		return err
	}
	defer sc.close()
	index := s.confined(id, m, sc, "index-pack", "--stdin", "--fix-thin")
	index.Stdin = pack
	if err := index.Run(ctx); err != nil {
		return err
	}
	if err := pack.Close(); err != nil {
		return err
	}
	stage, err := os.OpenRoot(sc.objects)
	if err != nil {
		return err
	}
	defer stage.Close()
	from, err := stage.OpenRoot("pack")
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenRoot(s.files(id))
	if err != nil {
		return err
	}
	defer to.Close()
	entries, err := fs.ReadDir(from.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := s.copyIn(from, to, e.Name(), ".git/objects/pack/"+e.Name()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) copyIn(from, to *os.Root, name, as string) error {
	in, err := from.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := to.Remove(as); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	out, err := to.OpenFile(as, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return s.own(to, as)
}
