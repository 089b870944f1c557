package repo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// FetchOptions of Fetch.
type FetchOptions struct {
	// Ref that must be there afterwards: a branch, tag, full ref name or commit; empty means the default branch.
	Ref string
	// Force asks the origin even when Ref is in the cache.
	Force bool
	// HostCredentials lets git use what the daemon's own user has: credential helpers and URL rewrites of its git
	// configuration, GIT_ASKPASS, the ssh agent, keys and configuration. For callers that are operators of the host only.
	HostCredentials bool
	// Progress of the transfer; done and total are counts of what message names, total 0 when unknown.
	Progress func(step, message string, done, total int64)
}

// refspecs keep the origin's branches apart from Warren's.
var refspecs = []string{"+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"}

// Fetch returns the repository of a URL. The first call clones it; a later one asks the origin again when Force is
// set or Ref is not in the cache. A repository on this host is always looked at, which costs milliseconds when nothing
// changed. Callers of several processes take turns; whoever waited uses what the other brought.
func (c *Cache) Fetch(ctx context.Context, rawURL string, o FetchOptions) (*Repo, error) {
	origin, err := ParseOrigin(rawURL)
	if err != nil {
		return nil, err
	}
	if o.Ref != "" {
		if err := git.CheckRevision(o.Ref); err != nil {
			return nil, err
		}
	}
	if o.Progress == nil {
		o.Progress = func(string, string, int64, int64) {}
	}
	id := origin.ID()
	if origin.Path == "" && !o.Force {
		if r, ok, err := c.cached(ctx, id, o.Ref); err != nil || ok {
			return r, err
		}
	}
	began := time.Now()
	unlock, err := LockFile(ctx, c.lockName(id))
	if err != nil {
		return nil, fmt.Errorf("wait for repository %s: %w", id, err)
	}
	defer unlock()
	_, m, err := c.load(id)
	switch {
	case errors.Is(err, warren.ErrNotFound):
		if err := c.clone(ctx, id, origin, o); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	default:
		fresh := m.Fetched.After(began)
		if r, ok, err := c.cached(ctx, id, o.Ref); err != nil || ok && fresh {
			return r, err
		}
		if err := c.update(ctx, c.dir(id), origin, m, o); err != nil {
			// Git words our own damage like that of an origin.
			if why := c.Check(ctx, id, ""); errors.Is(why, warren.ErrState) {
				return nil, why
			}
			return nil, err
		}
	}
	r, _, err := c.load(id)
	if err != nil {
		return nil, err
	}
	if _, _, err := c.ResolveRef(ctx, id, o.Ref); err != nil {
		return nil, err
	}
	return r, nil
}

// cached returns the repository when it is there and has the ref.
func (c *Cache) cached(ctx context.Context, id warren.RepoID, ref string) (*Repo, bool, error) {
	r, _, err := c.load(id)
	if errors.Is(err, warren.ErrNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	_, _, err = c.ResolveRef(ctx, id, ref)
	if errors.Is(err, warren.ErrNotFound) {
		return nil, false, nil
	}
	return r, err == nil, err
}

// clone makes the repository under a temporary name and then gives it its own.
func (c *Cache) clone(ctx context.Context, id warren.RepoID, origin *Origin, o FetchOptions) (err error) {
	tmp, err := os.MkdirTemp(c.o.Dir, tmpPrefix+"clone-*~"+string(id))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(tmp)
		}
	}()
	// MkdirTemp makes it private, but sandboxes are shown what is below.
	if err := os.Chmod(tmp, 0o711); err != nil {
		return err
	}
	if err := c.update(ctx, tmp, origin, &meta{Version: 1, URL: origin.URL}, o); err != nil {
		return err
	}
	// What is left of a repository without a record is not one.
	if err := os.RemoveAll(c.dir(id)); err != nil {
		return err
	}
	return os.Rename(tmp, c.dir(id))
}

// update brings dir, which may be empty, to the state of the origin.
func (c *Cache) update(ctx context.Context, dir string, origin *Origin, m *meta, o FetchOptions) error {
	t, err := c.connect(ctx, origin, o.HostCredentials)
	if err != nil {
		return err
	}
	defer t.close()
	next := *m
	next.Fetched = time.Now().UTC()
	if t.local != nil {
		sum, refs, err := t.local.fingerprint(ctx)
		if err != nil {
			return originError(origin, err)
		}
		if sum == m.Refs && sum != "" {
			next.Refs = sum
			return writeMeta(dir, &next)
		}
		if refs == 0 {
			return fmt.Errorf("repository %s is empty: it has no branch yet; commit something first: %w", origin.URL, warren.ErrState)
		}
		next.Refs, next.DefaultBranch, next.Format = sum, t.local.DefaultBranch(), t.local.Format
	} else {
		o.Progress("fetch repo", "Connecting", 0, 0)
		if next.DefaultBranch, next.Format, err = t.look(ctx); err != nil {
			return originError(origin, err)
		}
	}
	if m.Format != "" && m.Format != next.Format {
		return fmt.Errorf("repository %s changed its object format from %s to %s; delete it from the cache first: %w", origin.URL, m.Format, next.Format, warren.ErrState)
	}
	originDir, mirrorDir := filepath.Join(dir, "origin.git"), filepath.Join(dir, "mirror.git")
	if err := initBare(originDir, next.Format, nil); err != nil {
		return err
	}
	if err := initBare(mirrorDir, next.Format, []string{"../../origin.git/objects"}); err != nil {
		return err
	}
	fetch := t.command(originDir, "fetch", "--progress", "--prune", "--no-tags", "--force", "--no-write-fetch-head", "--no-auto-maintenance",
		"--no-recurse-submodules", "--update-shallow", "--end-of-options", t.url)
	fetch.Args = append(fetch.Args, refspecs...)
	if t.local != nil && next.DefaultBranch == "" {
		fetch.Args = append(fetch.Args, "+HEAD:refs/warren/extra/HEAD")
	}
	fetch.Progress = progress(o.Progress)
	if err := fetch.Run(ctx); err != nil {
		return originError(origin, err)
	}
	if extra := extraRef(o.Ref); extra != "" {
		if err := c.fetchExtra(ctx, t, originDir, extra); err != nil {
			return originError(origin, err)
		}
	}
	// One file with all refs is what a workspace starts from.
	if err := command(originDir, "pack-refs", "--all", "--prune").Run(ctx); err != nil {
		return err
	}
	if err := c.syncMirror(ctx, originDir, mirrorDir, next.DefaultBranch); err != nil {
		return err
	}
	return writeMeta(dir, &next)
}

// extraRef returns the ref when it is one that the refspecs do not bring: a commit, or a name such as refs/pull/1/head.
func extraRef(ref string) string {
	if git.IsObjectID(ref) || strings.HasPrefix(ref, "refs/") && !strings.HasPrefix(ref, "refs/heads/") && !strings.HasPrefix(ref, "refs/tags/") {
		return ref
	}
	return ""
}

// fetchExtra brings one more ref or commit and keeps it. Where the origin refuses, ResolveRef says that it is not there.
func (c *Cache) fetchExtra(ctx context.Context, t *transport, originDir, ref string) error {
	if git.IsObjectID(ref) && command(originDir, "cat-file", "-e", ref+"^{commit}").Run(ctx) == nil {
		return nil
	}
	f := t.command(originDir, "fetch", "--no-tags", "--force", "--no-write-fetch-head", "--no-auto-maintenance", "--no-recurse-submodules",
		"--end-of-options", t.url, "+"+ref+":refs/warren/extra/"+strings.TrimPrefix(ref, "refs/"))
	if err := f.Run(ctx); err != nil && git.ExitCode(err) < 0 {
		return err
	}
	return nil
}

// initBare makes a bare git directory, unless it is there.
func initBare(dir, format string, alternates []string) error {
	if _, err := os.Lstat(filepath.Join(dir, "HEAD")); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	// Sandboxes and confined git read these files as users of their own, whatever the umask here is.
	own := func(name string) error {
		fi, err := root.Lstat(name)
		if err != nil {
			return err
		}
		if fi.IsDir() {
			return root.Chmod(name, 0o755)
		}
		return root.Chmod(name, 0o644)
	}
	return git.Init(root, git.Layout{
		Head: "ref: refs/heads/none", Format: format, Bare: true, Alternates: alternates,
		// The maintenance of the host's own git must not drop what workspaces borrow, if somebody works in here.
		Config: "\tsharedrepository = 0644\n\tbigFileThreshold = 32m\n[gc]\n\tauto = 0\n\tpruneExpire = never\n[maintenance]\n\tauto = false\n[core]\n\tlogAllRefUpdates = true\n",
	}, own)
}

// syncMirror gives mirror.git the refs of origin.git, whose objects it borrows, and a HEAD at the default branch, for
// people who run git there.
func (c *Cache) syncMirror(ctx context.Context, originDir, mirrorDir, branch string) error {
	f := command(mirrorDir, "fetch", "--quiet", "--prune", "--no-tags", "--force", "--no-write-fetch-head", "--no-auto-maintenance", "--no-recurse-submodules",
		"--update-shallow", "--end-of-options", originDir, "+refs/remotes/origin/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*",
		"+refs/warren/*:refs/warren/*")
	f.Protocols = []string{"file"}
	if err := f.Run(ctx); err != nil {
		return err
	}
	if branch == "" {
		return nil
	}
	ref := "refs/remotes/origin/" + branch
	commit, err := command(mirrorDir, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}").Line(ctx)
	if err != nil {
		return nil // HEAD of the origin names a branch that nobody made yet
	}
	if err := command(mirrorDir, "symbolic-ref", "refs/remotes/origin/HEAD", ref).Run(ctx); err != nil {
		return err
	}
	return command(mirrorDir, "update-ref", "--no-deref", "HEAD", commit).Run(ctx)
}

// progress turns git's lines into calls.
func progress(f func(step, message string, done, total int64)) func(string) {
	return func(line string) {
		if what, done, total, ok := git.ParseProgress(line); ok {
			f("fetch repo", what, done, total)
		}
	}
}

// ResolveRef returns the commit of a branch, tag, full ref name or commit id in the cache, and the branch when it
// is one. An empty ref is the default branch.
func (c *Cache) ResolveRef(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error) {
	r, _, err := c.load(id)
	if err != nil {
		return "", "", err
	}
	return c.resolve(ctx, r, r.Dir, ref)
}

// ResolveOrigin is ResolveRef among the branches, tags and commits of the origin alone: what was committed from a
// workspace and not pushed is not found.
func (c *Cache) ResolveOrigin(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error) {
	r, _, err := c.load(id)
	if err != nil {
		return "", "", err
	}
	return c.resolve(ctx, r, c.origin(id), ref)
}

// resolve looks in the git directory dir of r.
func (c *Cache) resolve(ctx context.Context, r *Repo, dir, ref string) (commit, branch string, err error) {
	if ref == "" || ref == "HEAD" {
		if r.DefaultBranch == "" {
			ref = "refs/HEAD" // HEAD of the origin is a commit, not a branch
		} else {
			ref = "refs/heads/" + r.DefaultBranch
		}
	}
	if err := git.CheckRevision(ref); err != nil {
		return "", "", err
	}
	type candidate struct{ name, branch string }
	var try []candidate
	add := func(name, branch string) { try = append(try, candidate{name, branch}) }
	if b, ok := strings.CutPrefix(ref, "refs/heads/"); ok {
		add("refs/remotes/origin/"+b, b)
		add(ref, b)
	} else if strings.HasPrefix(ref, "refs/") {
		add(ref, "")
		add("refs/warren/extra/"+strings.TrimPrefix(ref, "refs/"), "")
	} else {
		if git.IsObjectID(ref) {
			add(ref, "")
		}
		add("refs/remotes/origin/"+ref, ref)
		add("refs/heads/"+ref, ref)
		add("refs/tags/"+ref, "")
		if b, ok := strings.CutPrefix(ref, "origin/"); ok {
			add("refs/remotes/origin/"+b, b)
		}
		if git.IsShortID(ref) {
			add(ref, "")
		}
	}
	var in strings.Builder
	for _, t := range try {
		in.WriteString(t.name + "^{commit}\n")
	}
	cmd := command(dir, "cat-file", "--batch-check=%(objectname) %(objecttype)")
	cmd.Stdin = strings.NewReader(in.String())
	cmd.Env = []string{"GIT_NAMESPACE="}
	out, err := cmd.Output(ctx)
	if err != nil {
		return "", "", c.blame(ctx, r.ID, "", err)
	}
	for i, line := range strings.Split(strings.TrimSuffix(string(out), "\n"), "\n") {
		if f := strings.Fields(line); i < len(try) && len(f) == 2 && f[1] == "commit" && git.IsObjectID(f[0]) {
			return f[0], try[i].branch, nil
		}
	}
	// A ref whose object is gone is there, and not a name that nobody made.
	for _, t := range try {
		if !strings.HasPrefix(t.name, "refs/") {
			continue
		}
		oid, err := command(dir, "rev-parse", "--verify", "--quiet", "--end-of-options", t.name).Line(ctx)
		if err == nil && command(dir, "cat-file", "-e", oid+"^{}").Run(ctx) != nil && ctx.Err() == nil {
			return "", "", damaged(r, "the object of "+t.name+" is gone")
		}
	}
	return "", "", c.noSuchRef(ctx, r, dir, ref)
}

// noSuchRef says which names come near.
func (c *Cache) noSuchRef(ctx context.Context, r *Repo, dir, ref string) error {
	out, err := command(dir, "for-each-ref", "--format=%(refname)", "refs/remotes/origin", "refs/tags", "refs/heads").Output(ctx)
	if err != nil {
		return err
	}
	var names []string
	for line := range strings.Lines(string(out)) {
		n := strings.TrimSpace(line)
		for _, p := range []string{"refs/remotes/origin/", "refs/tags/", "refs/heads/"} {
			n = strings.TrimPrefix(n, p)
		}
		if n != "HEAD" && n != "" {
			names = append(names, n)
		}
	}
	msg := fmt.Sprintf("repository %s has no branch, tag or commit %q", r.URL, strings.TrimPrefix(ref, "refs/heads/"))
	if near := nearest(strings.TrimPrefix(ref, "refs/heads/"), names); len(near) > 0 {
		msg += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("%s: %w", msg, warren.ErrNotFound)
}

// originError puts what git said about an origin in words and under a sentinel.
func originError(o *Origin, err error) error {
	var ge *git.Error
	if !errors.As(err, &ge) {
		return err
	}
	for _, k := range []struct {
		re   *regexp.Regexp
		say  string
		kind error
	}{
		{authFailed, "the origin refused access; check the credentials of the host's user", warren.ErrDenied},
		{offline, "the origin cannot be reached from the host", warren.ErrUnavailable},
		{missing, "there is no such repository, or it takes credentials to see it", warren.ErrNotFound},
		{full, "the host's disk is full", warren.ErrExhausted},
	} {
		if k.re.MatchString(ge.Message) {
			return fmt.Errorf("repository %s: %s (%s): %w", o.URL, k.say, ge.Message, k.kind)
		}
	}
	return fmt.Errorf("repository %s: %w: %w", o.URL, err, warren.ErrUnavailable)
}

var (
	authFailed = regexp.MustCompile(`(?i)authentication failed|could not read (username|password)|permission denied|returned error: 40[13]|terminal prompts disabled|invalid credentials|host key verification failed`)
	offline    = regexp.MustCompile(`(?i)could not resolve|connection (refused|timed out|reset)|network is unreachable|no route to host|failed to connect|couldn't connect|timed out|ssl|certificate|early eof|hung up unexpectedly.*resolve`)
	missing    = regexp.MustCompile(`(?i)not found|does not appear to be a git repository|does not exist|returned error: 404|not a git repository|no such repo`)
	full       = regexp.MustCompile(`(?i)no space left|disk quota`)
)

// nearest returns at most three names that are a few edits away from name, or hold it.
func nearest(name string, names []string) []string {
	type scored struct {
		name string
		n    int
	}
	var best []scored
	seen := map[string]bool{}
	for _, n := range names {
		if seen[n] {
			continue
		}
		seen[n] = true
		d := distance(strings.ToLower(name), strings.ToLower(n))
		if d <= max(2, len(name)/3) || len(name) >= 3 && strings.Contains(strings.ToLower(n), strings.ToLower(name)) {
			best = append(best, scored{n, d})
		}
		if len(seen) > 5000 {
			break
		}
	}
	for i := range best {
		for j := i; j > 0 && best[j].n < best[j-1].n; j-- {
			best[j], best[j-1] = best[j-1], best[j]
		}
	}
	var out []string
	for _, b := range best[:min(3, len(best))] {
		out = append(out, b.name)
	}
	return out
}

// distance is the number of edits from a to b, both of at most 64 bytes.
func distance(a, b string) int {
	a, b = a[:min(64, len(a))], b[:min(64, len(b))]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diag := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diag, row[j] = row[j], min(row[j]+1, row[j-1]+1, diag+cost)
		}
	}
	return row[len(b)]
}

// Refs returns the path of the file with all refs of the origin, in the format of packed-refs, and whether the
// repository is shallow, with the file that says where it ends.
func (c *Cache) Refs(id warren.RepoID) (packed, shallow string, err error) {
	if _, _, err := c.load(id); err != nil {
		return "", "", err
	}
	dir := c.origin(id)
	if _, err := os.Lstat(filepath.Join(dir, "shallow")); err == nil {
		shallow = filepath.Join(dir, "shallow")
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", "", err
	}
	return filepath.Join(dir, "packed-refs"), shallow, nil
}
