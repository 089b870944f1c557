package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
	"github.com/warren-sandbox/warren/internal/repo"
)

// CommitOptions of Commit.
type CommitOptions struct {
	// Message is required.
	Message string
	// Branch of the mirror; empty means warren/Name.
	Branch string
	// Name of the workspace or sandbox, for the default branch; empty means the workspace's id.
	Name string
	// Author and Committer are "Name <mail>"; empty means DefaultAuthor, and the author.
	Author, Committer string
	// All takes ignored files along.
	All bool
}

// DefaultAuthor is who commits when nobody is named.
const DefaultAuthor = "Warren <warren@localhost>"

// Commit is the result of Commit.
type Commit struct {
	ID, Branch string
	// Files is how many files changed against the commit before.
	Files int
	// RepoDir is the mirror: `git -C RepoDir log Branch` shows the commit.
	RepoDir string
}

// Commit records the files as they are on disk as a commit on a branch of the repository's mirror. Its parent is the
// workspace's commit before, or what the workspace was cut from. Without changes, and in a workspace without a
// repository, it returns [warren.ErrState]; so it does when the branch was moved by somebody else.
//
// The tree and the commit are made by a confined git in a directory of its own; their objects then go through
// [repo.Cache.Import], which believes none of them.
func (s *Store) Commit(ctx context.Context, id warren.WorkspaceID, o CommitOptions) (*Commit, error) {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	m, err := s.ready(id)
	if err != nil {
		return nil, err
	}
	if m.RepoID == "" {
		return nil, fmt.Errorf("workspace %s was not cut from a repository, so there is no branch to commit to; take its diff instead: %w", id, warren.ErrState)
	}
	if strings.TrimSpace(o.Message) == "" || strings.ContainsRune(o.Message, 0) || !utf8.ValidString(o.Message) {
		return nil, fmt.Errorf("a commit needs a message, in UTF-8: %w", warren.ErrInvalid)
	}
	if o.Branch == "" {
		o.Branch = "warren/" + o.Name
		if o.Name == "" {
			o.Branch += string(id)
		}
	}
	if err := git.CheckRef(o.Branch); err != nil {
		return nil, err
	}
	env, err := people(o.Author, o.Committer)
	if err != nil {
		return nil, err
	}

	sc, err := s.scratch(id)
	if err != nil {
		return nil, err
	}
	defer sc.close()
	snap, err := s.snapshot(ctx, id, m, sc, snapOptions{all: o.All, most: maxCommitFile})
	if err != nil {
		return nil, fmt.Errorf("commit of workspace %s: %w", id, s.blame(ctx, m, err))
	}
	if len(snap.large) > 0 {
		return nil, fmt.Errorf("commit of workspace %s: a commit takes files of at most %d MiB; remove or ignore %s: %w", id, maxCommitFile>>20, strings.Join(snap.large[:min(3, len(snap.large))], ", "), warren.ErrExhausted)
	}
	parent, old := m.Commit, ""
	if m.Head != "" {
		parent = m.Head
	}
	if at, ok, err := s.o.Repos.Branch(ctx, m.RepoID, o.Branch); err != nil {
		return nil, err
	} else if ok {
		// A branch goes on where this workspace left it, or from its base; anything else is somebody else's.
		if at != m.Head && at != m.Commit && at != m.Next {
			return nil, fmt.Errorf("branch %s of the mirror is at %.12s, which is not a commit of workspace %s; commit to another branch: %w", o.Branch, at, id, warren.ErrState)
		}
		parent, old = at, at
	}
	names, err := s.confined(id, m, sc, "diff-tree", "-r", "-z", "--name-only", "--end-of-options", parent, snap.tree).Output(ctx)
	if err != nil {
		return nil, fmt.Errorf("commit of workspace %s: %w", id, s.blame(ctx, m, err))
	}
	files := strings.Count(string(names), "\x00")
	if files == 0 {
		return nil, fmt.Errorf("workspace %s has no changes since commit %.12s: %w", id, parent, warren.ErrState)
	}
	// The tree of a commit where nothing differs from the base is the base's.
	mk := s.confined(id, m, sc, "commit-tree", snap.tree+"^{tree}", "-p", parent, "-F", "-")
	mk.Env = env
	mk.Stdin = strings.NewReader(strings.TrimRight(o.Message, "\n") + "\n")
	commit, err := mk.Line(ctx)
	if err != nil {
		return nil, err
	}
	if !git.IsObjectID(commit) {
		return nil, fmt.Errorf("git commit-tree wrote %q: %w", clip(commit), warren.ErrState)
	}

	// If this process ends between the branch and the record, the branch is still known for ours.
	m.Next = commit
	if err := save(s.dir(id), m, true); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	pack := s.confined(id, m, sc, "pack-objects", "--revs", "--thin", "--stdout", "--quiet", "--delta-base-offset")
	pack.Stdin = strings.NewReader(commit + "\n^" + parent + "\n")
	pack.Stdout = w
	packed := make(chan error, 1)
	go func() {
		err := pack.Run(ctx)
		w.CloseWithError(err)
		packed <- err
	}()
	err = s.o.Repos.Import(ctx, m.RepoID, r, repo.Commit{ID: commit, Branch: o.Branch, Old: old, Message: o.Message})
	r.Close()
	cancel()
	if perr := <-packed; err != nil {
		return nil, fmt.Errorf("commit of workspace %s: %w", id, s.blame(ctx, m, errors.Join(err, perr)))
	}
	m.Head, m.HeadBranch, m.Next = commit, o.Branch, ""
	if err := save(s.dir(id), m, true); err != nil {
		return nil, err
	}
	return &Commit{ID: commit, Branch: o.Branch, Files: files, RepoDir: s.o.Repos.Mirror(m.RepoID)}, nil
}

var person = regexp.MustCompile(`^([^<>\x00-\x1f]*[^<>\x00-\x1f ]) <([^<>\x00-\x20]*)>$`)

// people returns the environment that names author and committer.
func people(author, committer string) ([]string, error) {
	if author == "" {
		author = DefaultAuthor
	}
	if committer == "" {
		committer = author
	}
	var env []string
	for _, p := range []struct{ role, who string }{{"AUTHOR", author}, {"COMMITTER", committer}} {
		g := person.FindStringSubmatch(p.who)
		if g == nil || len(p.who) > 300 {
			return nil, fmt.Errorf("%s %q is not of the form Name <mail>: %w", strings.ToLower(p.role), clip(p.who), warren.ErrInvalid)
		}
		env = append(env, "GIT_"+p.role+"_NAME="+g[1], "GIT_"+p.role+"_EMAIL="+g[2])
	}
	return env, nil
}
