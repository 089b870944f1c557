package workspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
)

// markDir holds the mark of a workspace: the name of a tree, and its objects that the repository lacks. A copy of the workspace
// has no mark.
const markDir = "mark"

// treeName is what git calls a tree.
var treeName = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// Mark remembers the files as they are, for a diff since then. A workspace has one mark: the next takes its place, in one step. What
// a diff leaves out, ignored files and large ones, is not remembered either.
func (s *Store) Mark(ctx context.Context, id warren.WorkspaceID) error {
	m, err := s.ready(id)
	if err != nil {
		return err
	}
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	sc, err := s.scratch(id)
	if err != nil {
		return err
	}
	// Of what was the mark before, too, when the two have changed places.
	defer sc.close()
	snap, err := s.snapshot(ctx, id, m, sc, false, maxDiffFile)
	if err != nil {
		return fmt.Errorf("mark workspace %s: %w", id, s.blame(ctx, m, err))
	}
	err = removeAll(filepath.Dir(sc.index))
	if err == nil {
		err = os.WriteFile(filepath.Join(sc.dir, "tree"), []byte(snap.tree+"\n"), 0o600)
	}
	if err == nil {
		mark := filepath.Join(s.dir(id), markDir)
		err = unix.Renameat2(unix.AT_FDCWD, sc.dir, unix.AT_FDCWD, mark, unix.RENAME_EXCHANGE)
		if errors.Is(err, fs.ErrNotExist) {
			err = os.Rename(sc.dir, mark)
		}
	}
	if err != nil {
		return fmt.Errorf("mark workspace %s: %w", id, err)
	}
	return nil
}

// marked returns the tree of the workspace's mark.
func (s *Store) marked(id warren.WorkspaceID) (string, error) {
	b, err := os.ReadFile(filepath.Join(s.dir(id), markDir, "tree"))
	tree := strings.TrimSpace(string(b))
	if err == nil && !treeName.MatchString(tree) {
		err = errors.New("it names no tree")
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("workspace %s has no mark to compare with; mark it first: %w", id, warren.ErrState)
	case err != nil:
		return "", fmt.Errorf("the mark of workspace %s is damaged (%v); mark it again: %w", id, err, warren.ErrState)
	}
	return tree, nil
}
