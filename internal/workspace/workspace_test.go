package workspace_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// fixture is a store over a cache.
type fixture struct {
	t     testing.TB
	dir   string
	repos *repo.Cache
	store *workspace.Store
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	testenv.NeedsTool(t, "git")
	f := &fixture{t: t, dir: t.TempDir()}
	var err error
	f.repos, err = repo.Open(repo.Options{
		Dir: filepath.Join(f.dir, "repos"), UID: driver.DiskIDBase + 1000, GID: driver.DiskIDBase + 1000,
		BorrowedBy: func(id warren.RepoID) (warren.WorkspaceID, error) { return f.store.BorrowedBy(id) },
	})
	if err != nil {
		t.Fatal(err)
	}
	f.store, err = workspace.Open(workspace.Options{Dir: filepath.Join(f.dir, "workspaces"), IDBase: driver.DiskIDBase, Repos: f.repos})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// cut prepares and populates a workspace.
func (f *fixture) cut(id warren.WorkspaceID, url, ref string, mod ...func(*workspace.Source)) *workspace.Workspace {
	f.t.Helper()
	ctx := f.t.Context()
	r, err := f.repos.Fetch(ctx, url, repo.FetchOptions{Ref: ref})
	if err != nil {
		f.t.Fatal(err)
	}
	commit, branch, err := f.repos.ResolveRef(ctx, r.ID, ref)
	if err != nil {
		f.t.Fatal(err)
	}
	src := workspace.Source{Repo: r, URL: r.URL, Ref: ref, Commit: commit, Branch: branch}
	for _, m := range mod {
		m(&src)
	}
	w, err := f.store.Prepare(ctx, id, src)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.store.Populate(ctx, id); err != nil {
		f.t.Fatal(err)
	}
	return w
}

func (f *fixture) diff(id warren.WorkspaceID, o workspace.DiffOptions) string {
	f.t.Helper()
	var b bytes.Buffer
	if err := f.store.Diff(f.t.Context(), id, o, &b); err != nil {
		f.t.Fatal(err)
	}
	return b.String()
}

// gitEnv is what tests give the stock git.
var gitEnv = []string{
	"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
	"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@x", "GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@x",
	"GIT_CONFIG_COUNT=2", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*", "GIT_CONFIG_KEY_1=init.defaultBranch", "GIT_CONFIG_VALUE_1=main",
}

func runGit(t testing.TB, dir string, args ...string) string {
	t.Helper()
	out, err := tryGit(dir, nil, args...)
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return out
}

func tryGit(dir string, env []string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = append(append([]string{}, gitEnv...), env...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSuffix(string(out), "\n"), err
}

func write(t testing.TB, dir, name, text string) {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// newRepo makes a repository with a commit.
func newRepo(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	runGit(t, dir, "init", "-q")
	for n, s := range files {
		write(t, dir, n, s)
	}
	runGit(t, dir, "add", "-A", "-f")
	runGit(t, dir, "commit", "-q", "-m", "first")
	return dir
}

var some = map[string]string{"a.txt": "one\ntwo\n", "dir/b.txt": "b\n", "dir/deep/c.go": "package c\n", ".gitignore": "*.log\nbuild/\n"}

func TestWholePath(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	w := f.cut("w1", src, "")
	if w.Branch != "main" || w.Commit != runGit(t, src, "rev-parse", "HEAD") {
		t.Fatalf("branch %q commit %q", w.Branch, w.Commit)
	}
	if d := f.diff("w1", workspace.DiffOptions{}); d != "" {
		t.Fatalf("diff of a fresh workspace:\n%s", d)
	}
	write(t, w.Files, "a.txt", "one\nthree\n")
	write(t, w.Files, "new file", "\x00\x01binary\xff")
	write(t, w.Files, "x.log", "ignored\n")
	if err := os.Remove(filepath.Join(w.Files, "dir/b.txt")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(w.Files, "dir/deep/c.go"), 0o755); err != nil {
		t.Fatal(err)
	}
	d := f.diff("w1", workspace.DiffOptions{})
	for _, want := range []string{"-two\n+three\n", "deleted file mode", "new file mode 100644", "GIT binary patch", "new mode 100755"} {
		if !strings.Contains(d, want) {
			t.Errorf("diff lacks %q:\n%s", want, d)
		}
	}
	if strings.Contains(d, "x.log") {
		t.Error("diff shows an ignored file")
	}
	if d := f.diff("w1", workspace.DiffOptions{All: true}); !strings.Contains(d, "x.log") {
		t.Error("diff with All lacks an ignored file")
	}
	if d := f.diff("w1", workspace.DiffOptions{Stat: true}); !strings.Contains(d, "4 files changed") {
		t.Errorf("stat: %s", d)
	}

	c, err := f.store.Commit(t.Context(), "w1", workspace.CommitOptions{Message: "change", Name: "fix", Author: "Ann <ann@x>"})
	if err != nil {
		t.Fatal(err)
	}
	if c.Branch != "warren/fix" || c.Files != 4 {
		t.Errorf("commit %+v", c)
	}
	if got := runGit(t, c.RepoDir, "log", "--format=%an %s", "warren/fix"); got != "Ann change\nA first" {
		t.Errorf("log: %s", got)
	}
	runGit(t, c.RepoDir, "fsck", "--strict")
	if _, err := f.store.Commit(t.Context(), "w1", workspace.CommitOptions{Message: "again", Name: "fix"}); !errors.Is(err, warren.ErrState) {
		t.Errorf("commit without changes: %v", err)
	}
	// The patch makes the same tree.
	clone := filepath.Join(t.TempDir(), "clone")
	runGit(t, "/", "clone", "-q", src, clone)
	p := filepath.Join(t.TempDir(), "p")
	if err := os.WriteFile(p, []byte(d), 0o644); err != nil {
		t.Fatal(err)
	}
	runGit(t, clone, "apply", "--index", p)
	if got, want := runGit(t, clone, "write-tree"), runGit(t, c.RepoDir, "rev-parse", "warren/fix^{tree}"); got != want {
		t.Errorf("the patch makes tree %s, the commit has %s", got, want)
	}
	var mails bytes.Buffer
	if err := f.store.FormatPatch(t.Context(), "w1", &mails); err != nil || !strings.Contains(mails.String(), "Subject: [PATCH] change") {
		t.Errorf("format-patch: %v\n%s", err, mails.String())
	}
	pushed, err := f.store.Push(t.Context(), "w1", workspace.PushOptions{RemoteBranch: "topic"})
	if err != nil {
		t.Fatal(err)
	}
	if got := runGit(t, src, "rev-parse", "topic"); got != c.ID || pushed.Commit != c.ID {
		t.Errorf("origin has %s, pushed %+v", got, pushed)
	}
	if err := f.repos.Delete(t.Context(), src); !errors.Is(err, warren.ErrState) {
		t.Errorf("delete of a borrowed repository: %v", err)
	}
	if err := f.store.Delete(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	if err := f.repos.Delete(t.Context(), src); err != nil {
		t.Fatal(err)
	}
}

func isInvalid(err error) bool { return errors.Is(err, warren.ErrInvalid) }

func needsRoot(t testing.TB) {
	t.Helper()
	testenv.NeedsRoot(t)
}
