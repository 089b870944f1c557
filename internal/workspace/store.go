// Package workspace keeps the durable files that agents work on.
//
// A workspace is a directory:
//
//	<id>/files/      what a sandbox sees at /workspace, with a .git of the workspace's own
//	<id>/home/       what it sees at /home/user
//	<id>/git/        a git directory of ours, with an index of the commit that the workspace was cut from
//	<id>/meta.json   where it was cut from, and what was committed
//
// files and home belong to the sandbox's user and are hostile ground. The host's code reaches what is in them by
// descriptors that follow no symbolic link ([os.Root]) and by git that is confined (package git), and never runs or
// believes anything found there. The .git in files is for the sandbox alone: diff and commit use the git directory of
// ours and the files as they are on disk, so that commits, configuration, hooks and attributes made inside decide
// nothing on the host.
//
// What the diff and the commit hold is every file that git can carry, nested repositories included: the files of a
// repository inside the workspace count as plain files. Its .git does not (git cannot carry one). A submodule of the
// base commit stays a submodule while it has a .git of its own or is empty; uncommitted changes in it are its own
// repository's matter, and the patch says so in a line before the first file. FIFOs, sockets and devices are left
// out. The .gitignore files of the work tree say what is ignored, in a diff since a mark those of the mark; .git/info/exclude, which
// only the sandbox sees, does not.
//
// Text conversions by .gitattributes (eol, working-tree-encoding, ident) work as in git, because git itself knows
// them. Filters need a program named in a configuration, and there is none: what Git LFS keeps elsewhere stays a pointer file.
package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
	"github.com/warren-sandbox/warren/internal/repo"
)

// RepoMount is where a sandbox finds the objects that its workspace borrows.
const RepoMount = "/.warren/repo/objects"

// sandboxUID is driver.SandboxUID: the user in the sandbox that files belong to.
const sandboxUID = 1000

// Options of a store.
type Options struct {
	// Dir holds the workspaces; it is made when it does not exist.
	Dir string
	// IDBase is the host id that stands for a sandbox's 0 on disk. It counts only when the process is root;
	// otherwise all files are the process's own.
	IDBase uint32
	// Repos is the cache that workspaces are cut from.
	Repos  *repo.Cache
	Logger *slog.Logger
}

// Store is a directory of workspaces.
type Store struct {
	o      Options
	copier copier
	// unconfined is for tests: git runs as this process's own user, which sees everything.
	unconfined bool
	marks      turns
	readAtMost int64 // markBudget, when set
}

// Source says what a workspace is cut from. The zero Source makes an empty workspace.
type Source struct {
	// Repo in the cache.
	Repo *repo.Repo
	// URL of the origin without credentials, and the Ref that was asked for.
	URL, Ref string
	// Commit and Branch are what repo.Cache.ResolveRef said; without a branch HEAD is detached.
	Commit, Branch string
	// Dirty is a path on the host whose uncommitted changes come along: its work tree as it is on disk, ignored files left
	// out. Only an operator of the host may name one.
	Dirty string
}

// Workspace describes a workspace.
type Workspace struct {
	ID warren.WorkspaceID
	// RepoID is empty for a workspace without a repository.
	RepoID warren.RepoID
	URL    string
	Ref    string
	// Commit is what the workspace was cut from: the base of its diff. Branch is the branch inside.
	Commit, Branch string
	// Files and Home are directories on the host.
	Files, Home string
	// Borrow is the directory of objects to mount at RepoMount, read-only, or "".
	Borrow  string
	Created time.Time
	// Populated says that the checkout is complete.
	Populated bool
	// Head is the last commit made of the workspace, HeadBranch the branch of the mirror that holds it.
	Head, HeadBranch string
}

// meta is meta.json.
type meta struct {
	Version    int           `json:"version"`
	RepoID     warren.RepoID `json:"repo_id,omitempty"`
	URL        string        `json:"url,omitempty"`
	Ref        string        `json:"ref,omitempty"`
	Commit     string        `json:"commit,omitempty"`
	Branch     string        `json:"branch,omitempty"`
	Format     string        `json:"format,omitempty"`
	Dirty      string        `json:"dirty,omitempty"`
	Created    time.Time     `json:"created"`
	Populated  bool          `json:"populated"`
	Head       string        `json:"head,omitempty"`
	HeadBranch string        `json:"head_branch,omitempty"`
	// Next is a commit that is about to become Head.
	Next string `json:"next,omitempty"`
}

const (
	tmpPrefix = ".tmp-"
	lockDir   = ".locks"
)

// idOK is what a workspace's id may be: never a path.
var idOK = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

// Open opens the store, removes what interrupted calls left, and finds out how workspaces can be copied here.
func Open(o Options) (*Store, error) {
	if !filepath.IsAbs(o.Dir) {
		return nil, fmt.Errorf("workspaces: %q is not an absolute path: %w", o.Dir, warren.ErrInvalid)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{o: o}
	// Nobody else may pass through: files below belong to sandboxes, which let everybody read them, and command lines of git tell ids.
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(o.Dir, lockDir), 0o700); err != nil {
		return nil, err
	}
	if err := s.clean(); err != nil {
		return nil, err
	}
	if err := s.cleanLocks(); err != nil {
		return nil, err
	}
	var err error
	if s.copier, err = findCopier(o.Dir); err != nil {
		return nil, fmt.Errorf("find out how to copy workspaces: %w", err)
	}
	return s, nil
}

// clean removes temporary directories of calls that did not end, and leaves those of other processes alone.
func (s *Store) clean() error {
	entries, err := os.ReadDir(s.o.Dir)
	if err != nil {
		return err
	}
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for _, e := range entries {
		_, id, _ := strings.Cut(e.Name(), "~")
		switch {
		case strings.HasPrefix(e.Name(), tmpPrefix):
		case idOK.MatchString(e.Name()):
			id = e.Name()
		default:
			continue
		}
		if idOK.MatchString(id) {
			unlock, err := repo.LockFile(done, s.lockName(warren.WorkspaceID(id)))
			if err != nil {
				continue // somebody is at work
			}
			defer unlock()
		}
		dir := filepath.Join(s.o.Dir, e.Name())
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := removeAll(dir); err != nil {
				return fmt.Errorf("remove what an interrupted call left: %w", err)
			}
			continue
		}
		scratch, err := filepath.Glob(filepath.Join(dir, tmpPrefix+"*"))
		if err != nil {
			return err
		}
		for _, d := range scratch {
			if err := removeAll(d); err != nil {
				return fmt.Errorf("remove what an interrupted call left: %w", err)
			}
		}
	}
	return nil
}

// cleanLocks removes the locks of workspaces that are not there.
func (s *Store) cleanLocks() error {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	entries, err := os.ReadDir(filepath.Join(s.o.Dir, lockDir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		id := warren.WorkspaceID(e.Name())
		if _, err := os.Lstat(s.dir(id)); err == nil {
			continue
		}
		unlock, err := repo.LockFile(done, s.lockName(id))
		if err != nil {
			continue // somebody is at work
		}
		if _, err := os.Lstat(s.dir(id)); errors.Is(err, fs.ErrNotExist) {
			os.Remove(s.lockName(id))
		}
		unlock()
	}
	return nil
}

func (s *Store) dir(id warren.WorkspaceID) string { return filepath.Join(s.o.Dir, string(id)) }

func (s *Store) lockName(id warren.WorkspaceID) string {
	return filepath.Join(s.o.Dir, lockDir, string(id))
}

// lock makes writers of one workspace take turns, also those of other processes.
func (s *Store) lock(ctx context.Context, id warren.WorkspaceID) (func(), error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	return repo.LockFile(ctx, s.lockName(id))
}

func checkID(id warren.WorkspaceID) error {
	if !idOK.MatchString(string(id)) {
		return fmt.Errorf("workspace id %q: %w", clip(string(id)), warren.ErrInvalid)
	}
	return nil
}

func (s *Store) load(id warren.WorkspaceID) (*meta, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(s.dir(id), "meta.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("workspace %s: %w", id, warren.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("workspace %s: read its record: %w", id, err)
	}
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("workspace %s: its record is damaged (%v): %w", id, err, warren.ErrState)
	}
	return &m, nil
}

// save replaces the record in dir at once.
func save(dir string, m *meta, sync bool) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(dir, "meta.json", append(b, '\n'), 0o600, sync)
}

// writeFile replaces a file in a directory of ours at once.
func writeFile(dir, name string, b []byte, mode fs.FileMode, sync bool) error {
	f, err := os.CreateTemp(dir, tmpPrefix+name+"-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	return err
}

func (s *Store) workspace(id warren.WorkspaceID, m *meta) *Workspace {
	w := &Workspace{
		ID: id, RepoID: m.RepoID, URL: m.URL, Ref: m.Ref, Commit: m.Commit, Branch: m.Branch,
		Files: filepath.Join(s.dir(id), "files"), Home: filepath.Join(s.dir(id), "home"),
		Created: m.Created, Populated: m.Populated, Head: m.Head, HeadBranch: m.HeadBranch,
	}
	if m.RepoID != "" {
		w.Borrow = s.o.Repos.Objects(m.RepoID)
	}
	return w
}

// Get returns a workspace.
func (s *Store) Get(ctx context.Context, id warren.WorkspaceID) (*Workspace, error) {
	m, err := s.load(id)
	if err != nil {
		return nil, err
	}
	return s.workspace(id, m), nil
}

// List returns all workspaces, oldest first. One whose record is damaged is left out and logged.
func (s *Store) List(ctx context.Context) ([]*Workspace, error) {
	entries, err := os.ReadDir(s.o.Dir)
	if err != nil {
		return nil, err
	}
	var out []*Workspace
	for _, e := range entries {
		id := warren.WorkspaceID(e.Name())
		if checkID(id) != nil {
			continue
		}
		w, err := s.Get(ctx, id)
		if errors.Is(err, warren.ErrNotFound) {
			continue
		}
		if err != nil {
			s.o.Logger.WarnContext(ctx, "workspace left out", "workspace", id, "err", err)
			continue
		}
		out = append(out, w)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Created.Before(out[j].Created) })
	return out, nil
}

// BorrowedBy names a workspace that borrows objects of the repository, or returns "".
func (s *Store) BorrowedBy(id warren.RepoID) (warren.WorkspaceID, error) {
	all, err := s.List(context.Background())
	if err != nil {
		return "", err
	}
	for _, w := range all {
		if w.RepoID == id {
			return w.ID, nil
		}
	}
	return "", nil
}

// Delete removes a workspace and all that is in it. Deleting what does not exist returns warren.ErrNotFound.
func (s *Store) Delete(ctx context.Context, id warren.WorkspaceID) error {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	// First out of sight at once, then away; what a crash leaves in between, Open removes.
	tmp := filepath.Join(s.o.Dir, tmpPrefix+"gone~"+string(id))
	if err := removeAll(tmp); err != nil {
		return fmt.Errorf("delete workspace %s: %w", id, err)
	}
	if err := os.Rename(s.dir(id), tmp); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			os.Remove(s.lockName(id)) // it is held here
			return fmt.Errorf("workspace %s: %w", id, warren.ErrNotFound)
		}
		return fmt.Errorf("delete workspace %s: %w", id, err)
	}
	if err := removeAll(tmp); err != nil {
		return fmt.Errorf("delete workspace %s: %w", id, err)
	}
	os.Remove(s.lockName(id))
	return nil
}

// own gives a file of root to the sandbox's user.
func (s *Store) own(root *os.Root, name string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	uid := int(s.o.IDBase + sandboxUID)
	return root.Lchown(name, uid, uid)
}

// gitMemory bounds what a git that reads a workspace keeps in memory. What lies there decides how much that is: a comparison takes 90 bytes
// for each byte of a file of empty lines.
const gitMemory = 2 << 30

// confined returns a git command on the git directory of ours that works on the files as the sandbox's user.
func (s *Store) confined(id warren.WorkspaceID, m *meta, sc *scratch, args ...string) *git.Cmd {
	c := &git.Cmd{
		Dir: filepath.Join(s.dir(id), "git"), Args: args, Alternates: s.alternates(m),
		Confine: &git.Confine{IDBase: s.o.IDBase, UID: sandboxUID, Memory: gitMemory},
	}
	if s.unconfined {
		c.Confine = nil
	}
	if sc != nil {
		c.Index, c.Objects = sc.index, sc.objects
	}
	return c
}

// blame returns why git failed on a workspace, when damage of its repository in the cache is why, else err.
func (s *Store) blame(ctx context.Context, m *meta, err error) error {
	var ge *git.Error
	if !errors.As(err, &ge) || ctx.Err() != nil {
		return err
	}
	if strings.Contains(ge.Message, "failed to encode") || strings.Contains(ge.Message, "if encoded as") {
		return fmt.Errorf("a .gitattributes in the workspace asks for a working-tree-encoding that a file does not have (%s); mend one of them: %w", ge.Message, warren.ErrInvalid)
	}
	if strings.Contains(ge.Message, "Out of memory") || strings.Contains(ge.Message, "out of memory") {
		return fmt.Errorf("comparing its files takes more memory than the %d GiB that are given to it, as large files of very short lines do; `warren diff --stat` shows which those are, and `warren cp` fetches them: %w", gitMemory>>30, warren.ErrExhausted)
	}
	if m.RepoID == "" {
		return err
	}
	why := s.o.Repos.Check(ctx, m.RepoID, m.Commit)
	switch {
	case errors.Is(why, warren.ErrNotFound):
		return fmt.Errorf("the repository that the workspace borrows from is gone from the cache: %w", warren.ErrState)
	case why == nil || !errors.Is(why, warren.ErrState):
		return err
	}
	s.o.Logger.WarnContext(ctx, "repository damaged", "repo", m.RepoID, "err", err)
	return why
}

// alternates lists where the objects of a workspace's repository are.
func (s *Store) alternates(m *meta) []string {
	if m.RepoID == "" {
		return nil
	}
	return []string{s.o.Repos.Objects(m.RepoID), filepath.Join(s.o.Repos.Mirror(m.RepoID), "objects")}
}

func (s *Store) files(id warren.WorkspaceID) string { return filepath.Join(s.dir(id), "files") }

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
