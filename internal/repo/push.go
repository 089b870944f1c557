package repo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// PushOptions of Push.
type PushOptions struct {
	// Branch of the mirror, and RemoteBranch, its name at the origin.
	Branch, RemoteBranch string
	// Force replaces the origin's branch if it is still where the cache saw it last.
	Force bool
	// HostCredentials as in FetchOptions.
	HostCredentials bool
	// URL, when set, is another spelling of the origin, with credentials in it.
	URL string
}

// Pushed says what was pushed.
type Pushed struct{ URL, Commit string }

// Push sends a branch of the mirror to the origin. A branch that the origin moved meanwhile gives [warren.ErrState].
//
// The branch that is checked out in a repository on this host is not pushed to, as in git. Hooks of such a repository
// do not run: it is written through a git directory of ours, as the user who owns it.
func (c *Cache) Push(ctx context.Context, id warren.RepoID, o PushOptions) (*Pushed, error) {
	r, _, err := c.load(id)
	if err != nil {
		return nil, err
	}
	for _, b := range []string{o.Branch, o.RemoteBranch} {
		if err := git.CheckRef(b); err != nil {
			return nil, err
		}
	}
	commit, ok, err := c.Branch(ctx, id, o.Branch)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("the mirror of %s has no branch %s; commit first: %w", r.URL, o.Branch, warren.ErrNotFound)
	}
	url := r.URL
	if o.URL != "" {
		url = o.URL
	}
	origin, err := ParseOrigin(url)
	if err != nil {
		return nil, err
	}
	if origin.ID() != id {
		return nil, fmt.Errorf("repository %s is not the one that was fetched (%s): %w", origin.URL, r.URL, warren.ErrInvalid)
	}
	t, err := c.connect(ctx, origin, o.HostCredentials)
	if err != nil {
		return nil, err
	}
	defer t.close()
	p := t.command(r.Dir, "push", "--porcelain", "--no-verify", "--no-follow-tags", "--recurse-submodules=no")
	if o.Force {
		expect, err := c.remote(ctx, r, o.RemoteBranch)
		if err != nil {
			return nil, err
		}
		p.Args = append(p.Args, "--force-with-lease=refs/heads/"+o.RemoteBranch+":"+expect)
	}
	p.Args = append(p.Args, "--end-of-options", t.url, "refs/heads/"+o.Branch+":refs/heads/"+o.RemoteBranch)
	if t.local != nil {
		if p.Owner, err = t.local.owner(); err != nil {
			return nil, err
		}
	}
	var report strings.Builder
	p.Stdout = &report
	if err := p.Run(ctx); err != nil {
		if why := c.Check(ctx, id, ""); errors.Is(why, warren.ErrState) {
			return nil, why
		}
		return nil, pushError(origin, o.RemoteBranch, err, git.Redact(report.String(), t.secrets...))
	}
	// What the origin has now is known without asking it again.
	if err := command(r.Dir, "update-ref", "--end-of-options", "refs/remotes/origin/"+o.RemoteBranch, commit).Run(ctx); err != nil {
		c.o.Logger.WarnContext(ctx, "pushed, but the mirror's remote ref was not updated", "repo", id, "err", err)
	}
	return &Pushed{URL: r.URL, Commit: commit}, nil
}

// remote returns where the cache saw a branch of the origin, or "" when it had none.
func (c *Cache) remote(ctx context.Context, r *Repo, branch string) (string, error) {
	out, err := command(r.Dir, "for-each-ref", "--format=%(objectname) %(refname)", "refs/remotes/origin/"+branch).Output(ctx)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(out)) {
		if oid, ref, _ := strings.Cut(strings.TrimSpace(line), " "); ref == "refs/remotes/origin/"+branch {
			return oid, nil
		}
	}
	return "", nil
}

// pushError tells a branch that moved from an origin that refused. The report is that of git push --porcelain, with a line
// such as "!\tA:B\t[rejected] (fetch first)".
func pushError(o *Origin, branch string, err error, report string) error {
	for line := range strings.Lines(report) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 3 || f[0] != "!" {
			continue
		}
		switch why := f[2]; {
		case strings.Contains(why, "fast-forward"), strings.Contains(why, "fetch first"), strings.Contains(why, "stale info"), strings.Contains(why, "already exists"):
			return fmt.Errorf("repository %s: branch %s has moved at the origin: %s; fetch and push with force, or push to another branch: %w", o.URL, branch, why, warren.ErrState)
		default:
			return fmt.Errorf("repository %s: the origin refused branch %s: %s: %w", o.URL, branch, why, warren.ErrDenied)
		}
	}
	return originError(o, err)
}

// owner returns who owns the repository, so that what is pushed to it stays theirs.
func (l *Local) owner() (*git.Owner, error) {
	fi, err := os.Stat(filepath.Join(l.Dir, "objects"))
	if err != nil {
		return nil, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 || st.Uid == 0 {
		return nil, nil
	}
	// The view is ours; whoever owns what it shows must be able to pass through it and lock in it.
	if err := filepath.Walk(l.Dir, func(p string, fi os.FileInfo, err error) error {
		if err != nil || fi.Mode()&os.ModeSymlink != 0 {
			return err
		}
		return os.Lchown(p, int(st.Uid), int(st.Gid))
	}); err != nil {
		return nil, err
	}
	return &git.Owner{UID: st.Uid, GID: st.Gid}, nil
}

// Missing returns a thin pack of the objects of a commit of the mirror that origin.git does not have. Close ends it.
func (c *Cache) Missing(ctx context.Context, id warren.RepoID, commit string) (io.ReadCloser, error) {
	r, _, err := c.load(id)
	if err != nil {
		return nil, err
	}
	if !git.IsObjectID(commit) {
		return nil, fmt.Errorf("commit %q: %w", clip(commit), warren.ErrInvalid)
	}
	have, err := command(r.Dir, "for-each-ref", "--format=^%(objectname)", "refs/remotes/origin", "refs/tags", "refs/warren").Output(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	pr, pw := io.Pipe()
	p := &git.Cmd{
		Dir: r.Dir, Args: []string{"pack-objects", "--revs", "--thin", "--stdout", "--quiet", "--delta-base-offset"},
		Stdin: io.MultiReader(strings.NewReader(commit+"\n"), bytes.NewReader(have)), Stdout: pw,
		Alternates: []string{r.Objects}, Confine: c.confine(),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pw.CloseWithError(p.Run(ctx))
	}()
	return &packStream{PipeReader: pr, end: func() { cancel(); <-done }}, nil
}

type packStream struct {
	*io.PipeReader
	end func()
}

func (m *packStream) Close() error {
	err := m.PipeReader.Close()
	m.end()
	return err
}
