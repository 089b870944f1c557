package workspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// Prepare makes the directories of a workspace and its .git, without the files: milliseconds, whatever the
// repository's size, so that a sandbox can boot on them while [Store.Populate] does the rest. Preparing again what was
// prepared from the same commit returns it; another commit gives [warren.ErrExists].
func (s *Store) Prepare(ctx context.Context, id warren.WorkspaceID, src Source) (*Workspace, error) {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	m := &meta{Version: 1, Created: time.Now().UTC()}
	if src.Repo != nil {
		if !git.IsObjectID(src.Commit) {
			return nil, fmt.Errorf("workspace %s: commit %q: %w", id, clip(src.Commit), warren.ErrInvalid)
		}
		if src.Branch != "" {
			if err := git.CheckRef(src.Branch); err != nil {
				return nil, err
			}
		}
		if src.Dirty != "" && !filepath.IsAbs(src.Dirty) {
			return nil, fmt.Errorf("workspace %s: %q is not an absolute path: %w", id, clip(src.Dirty), warren.ErrInvalid)
		}
		m.RepoID, m.URL, m.Ref, m.Commit, m.Branch, m.Format, m.Dirty = src.Repo.ID, src.URL, src.Ref, src.Commit, src.Branch, src.Repo.Format, src.Dirty
		if m.URL == "" {
			m.URL = src.Repo.URL
		}
	} else if src.Dirty != "" || src.Commit != "" {
		return nil, fmt.Errorf("workspace %s: a commit or path without a repository: %w", id, warren.ErrInvalid)
	}
	if old, err := s.load(id); err == nil {
		if old.RepoID != m.RepoID || old.Commit != m.Commit || old.Branch != m.Branch {
			return nil, fmt.Errorf("workspace %s, of another commit: %w", id, warren.ErrExists)
		}
		return s.workspace(id, old), nil
	} else if !errors.Is(err, warren.ErrNotFound) {
		return nil, err
	}

	tmp := filepath.Join(s.o.Dir, tmpPrefix+"prepare~"+string(id))
	if err := removeAll(tmp); err != nil {
		return nil, err
	}
	if err := s.build(tmp, id, m); err != nil {
		removeAll(tmp)
		return nil, fmt.Errorf("prepare workspace %s: %w", id, err)
	}
	// A directory without a record is not a workspace.
	if err := removeAll(s.dir(id)); err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, s.dir(id)); err != nil {
		return nil, err
	}
	return s.workspace(id, m), nil
}

// build writes a whole workspace below dir.
func (s *Store) build(dir string, id warren.WorkspaceID, m *meta) error {
	if err := s.copier.mkdir(dir); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, d := range []struct {
		name string
		mode fs.FileMode
	}{{"files", 0o755}, {"home", 0o750}} {
		if err := s.mkdir(root, d.name, d.mode); err != nil {
			return err
		}
	}
	// Ours: the confined git reads it and cannot write it.
	if err := root.Mkdir("git", 0o755); err != nil {
		return err
	}
	ours, err := root.OpenRoot("git")
	if err != nil {
		return err
	}
	defer ours.Close()
	readable := func(name string) error {
		fi, err := ours.Lstat(name)
		if err != nil {
			return err
		}
		if fi.IsDir() {
			return ours.Chmod(name, 0o755)
		}
		return ours.Chmod(name, 0o644)
	}
	if err := git.Init(ours, git.Layout{Head: "ref: refs/heads/none", Format: m.Format, Bare: true, Fixed: true}, readable); err != nil {
		return err
	}
	shallow := ""
	if m.RepoID != "" {
		if shallow, err = s.inside(root, m); err != nil {
			return err
		}
	}
	if shallow != "" {
		if err := ours.WriteFile("shallow", []byte(shallow), 0o644); err != nil {
			return err
		}
	}
	return save(dir, m, false)
}

func (s *Store) mkdir(root *os.Root, name string, mode fs.FileMode) error {
	if err := root.Mkdir(name, 0o700); err != nil {
		return err
	}
	if err := root.Chmod(name, mode); err != nil {
		return err
	}
	return s.own(root, name)
}

// inside writes the .git that the sandbox uses: a git directory of its own with the origin's refs, whose objects are
// those at RepoMount. It returns the list of commits at which a shallow repository ends.
func (s *Store) inside(root *os.Root, m *meta) (shallow string, err error) {
	if err := s.mkdir(root, "files/.git", 0o755); err != nil {
		return "", err
	}
	dir, err := root.OpenRoot("files/.git")
	if err != nil {
		return "", err
	}
	defer dir.Close()
	head := m.Commit
	var config strings.Builder
	// Owner, inode and change time of a file look different in a sandbox, so its git compares size and time only.
	config.WriteString("\tcheckstat = minimal\n\ttrustctime = false\n")
	config.WriteString("[remote \"origin\"]\n")
	if strings.Contains(m.URL, "://") || !strings.HasPrefix(m.URL, "/") { // a path of the host is none of the sandbox's business
		fmt.Fprintf(&config, "\turl = %s\n", quote(m.URL))
	}
	config.WriteString("\tfetch = +refs/heads/*:refs/remotes/origin/*\n")
	if m.Branch != "" {
		head = "ref: refs/heads/" + m.Branch
		fmt.Fprintf(&config, "[branch %s]\n\tremote = origin\n\tmerge = %s\n", quote(m.Branch), quote("refs/heads/"+m.Branch))
	}
	own := func(name string) error { return s.own(dir, name) }
	if err := git.Init(dir, git.Layout{Head: head, Format: m.Format, Config: config.String(), Alternates: []string{RepoMount}}, own); err != nil {
		return "", err
	}
	put := func(name, text string) error {
		if err := dir.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
		return own(name)
	}
	packedName, shallowName, err := s.o.Repos.Refs(m.RepoID)
	if err != nil {
		return "", err
	}
	packed, err := os.ReadFile(packedName)
	if err != nil {
		return "", err
	}
	refs, def := originRefs(packed, m.Branch, m.Commit), s.o.Repos.DefaultBranch(m.RepoID)
	if err := put("packed-refs", refs); err != nil {
		return "", err
	}
	if def != "" {
		for _, d := range []string{"refs/remotes", "refs/remotes/origin"} {
			if err := s.mkdir(dir, d, 0o755); err != nil {
				return "", err
			}
		}
		if err := put("refs/remotes/origin/HEAD", "ref: refs/remotes/origin/"+def+"\n"); err != nil {
			return "", err
		}
	}
	if shallowName != "" {
		b, err := os.ReadFile(shallowName)
		if err != nil {
			return "", err
		}
		if err := put("shallow", string(b)); err != nil {
			return "", err
		}
		shallow = string(b)
	}
	return shallow, nil
}

// originRefs returns the packed refs of a workspace: those of the origin, and its own branch. Names are sorted, as the
// header promises.
func originRefs(packed []byte, branch, commit string) string {
	var b strings.Builder
	b.WriteString("# pack-refs with: peeled fully-peeled sorted \n")
	if branch != "" {
		b.WriteString(commit + " refs/heads/" + branch + "\n") // sorts before remotes and tags
	}
	keep := false
	for line := range bytes.Lines(packed) {
		switch line[0] {
		case '#':
			continue
		case '^':
		default:
			_, name, _ := strings.Cut(string(line), " ")
			keep = strings.HasPrefix(name, "refs/remotes/") || strings.HasPrefix(name, "refs/tags/")
		}
		if keep {
			b.Write(line)
		}
	}
	return b.String()
}

// quote writes a value for a git configuration file.
func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}
