package workspace_test

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
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// show gives a workspace's .git the objects that a sandbox would find at RepoMount.
func show(t testing.TB, w *workspace.Workspace) {
	t.Helper()
	alt := filepath.Join(w.Files, ".git/objects/info/alternates")
	b, err := os.ReadFile(alt)
	must(t, err)
	if string(b) != workspace.RepoMount+"\n" {
		t.Errorf("alternates: %q", b)
	}
	must(t, os.WriteFile(alt, []byte(w.Borrow+"\n"), 0o644))
}

func TestGitInside(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	runGit(t, src, "tag", "-a", "v1", "-m", "one")
	runGit(t, src, "branch", "other")
	w := f.cut("w1", src, "")
	show(t, w)
	g := func(args ...string) string { return runGit(t, w.Files, args...) }
	if got := g("status", "--porcelain=v2", "--branch"); !strings.Contains(got, "branch.head main\n# branch.upstream origin/main\n# branch.ab +0 -0") || strings.Contains(got, "\n1 ") || strings.Contains(got, "\n?") {
		t.Errorf("status: %s", got)
	}
	// Nothing is read again: not even where the files seem to have another owner, inode and change time.
	for n := range some {
		p := filepath.Join(w.Files, n)
		fi, err := os.Stat(p)
		must(t, err)
		b, err := os.ReadFile(p)
		must(t, err)
		must(t, os.Remove(p))
		must(t, os.WriteFile(p, b, 0o644))
		must(t, os.Chtimes(p, fi.ModTime(), fi.ModTime()))
	}
	trace, err := tryGit(w.Files, []string{"GIT_TRACE2_PERF=1", "GIT_OPTIONAL_LOCKS=0"}, "diff-files")
	must(t, err)
	if strings.Contains(trace, ":100644 ") {
		t.Errorf("git inside takes files for changed whose owner, inode and change time differ:\n%s", trace)
	}
	if got := g("branch", "-a", "--format=%(refname)"); got != "refs/heads/main\nrefs/remotes/origin/HEAD\nrefs/remotes/origin/main\nrefs/remotes/origin/other" {
		t.Errorf("branches: %s", got)
	}
	if got := g("describe", "--tags"); got != "v1" {
		t.Errorf("describe: %s", got)
	}
	g("fsck", "--strict")
	g("log", "--stat")
	g("blame", "a.txt")
	g("checkout", "-q", "-b", "topic")
	write(t, w.Files, "a.txt", "topic\n")
	g("commit", "-q", "-am", "inside")
	g("rebase", "-q", "main")
	g("stash", "list")
	g("gc", "-q")
	g("fsck", "--strict")
	if got := g("log", "--format=%s"); got != "inside\nfirst" {
		t.Errorf("log: %s", got)
	}
	// What was committed inside is in the diff: its base is what the workspace was cut from.
	if d := f.diff("w1", workspace.DiffOptions{}); !strings.Contains(d, "+topic") {
		t.Errorf("diff after a commit inside: %s", d)
	}
	// A repository of another name has no URL of the host inside.
	if got, err := tryGit(w.Files, nil, "config", "remote.origin.url"); err == nil {
		t.Errorf("the sandbox sees a path of the host: %s", got)
	}
}

func TestDirty(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, map[string]string{"a.txt": "a\n", "gone.txt": "gone\n", "dir/only.txt": "x\n", "staged.txt": "s\n", "d2f/x": "x\n", ".gitignore": "*.log\n"})
	write(t, src, "a.txt", "changed\n")
	write(t, src, "staged.txt", "staged\n")
	runGit(t, src, "add", "staged.txt")
	must(t, os.Remove(filepath.Join(src, "gone.txt")))
	must(t, os.RemoveAll(filepath.Join(src, "dir")))
	must(t, os.RemoveAll(filepath.Join(src, "d2f")))
	write(t, src, "d2f", "a file now\n")
	write(t, src, "new/deep/file", "new\n")
	write(t, src, "skip.log", "log\n")
	must(t, os.Symlink("/etc/passwd", filepath.Join(src, "link")))
	must(t, syscall.Mkfifo(filepath.Join(src, "fifo"), 0o644))
	index, err := os.ReadFile(filepath.Join(src, ".git/index"))
	must(t, err)
	w := f.cut("wd", src, "", func(s *workspace.Source) { s.Dirty = src })
	show(t, w)
	want := " D d2f/x\n D dir/only.txt\n D gone.txt\n M a.txt\n M staged.txt\n?? d2f\n?? link\n?? new/"
	var lines []string
	for l := range strings.SplitSeq(runGit(t, w.Files, "status", "--porcelain"), "\n") {
		if !strings.HasPrefix(l, " ") && !strings.HasPrefix(l, "?") {
			l = " " + l
		}
		lines = append(lines, l)
	}
	for l := range strings.SplitSeq(want, "\n") {
		if !strings.Contains("\n"+strings.Join(lines, "\n")+"\n", "\n"+l+"\n") {
			t.Errorf("status lacks %q: %q", l, lines)
		}
	}
	d := f.diff("wd", workspace.DiffOptions{})
	for _, want := range []string{"+changed", "+staged", "+a file now", "new/deep/file", "+/etc/passwd"} {
		if !strings.Contains(d, want) {
			t.Errorf("diff lacks %q", want)
		}
	}
	if strings.Contains(d, "skip.log") || strings.Contains(d, "root:") {
		t.Error("diff has what it should not")
	}
	after, err := os.ReadFile(filepath.Join(src, ".git/index"))
	must(t, err)
	if !bytes.Equal(index, after) {
		t.Error("reading the uncommitted changes wrote to the path")
	}
}

func TestEmptyWorkspace(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	w, err := f.store.Prepare(ctx, "we", workspace.Source{})
	must(t, err)
	if err := f.store.Diff(ctx, "we", workspace.DiffOptions{}, &bytes.Buffer{}); !errors.Is(err, warren.ErrState) {
		t.Errorf("diff before populate: %v", err)
	}
	must(t, f.store.Populate(ctx, "we"))
	if d := f.diff("we", workspace.DiffOptions{}); d != "" {
		t.Errorf("diff: %s", d)
	}
	write(t, w.Files, "x/y", "z\n")
	if d := f.diff("we", workspace.DiffOptions{}); !strings.Contains(d, "+z") {
		t.Errorf("diff: %s", d)
	}
	if _, err := f.store.Commit(ctx, "we", workspace.CommitOptions{Message: "m"}); !errors.Is(err, warren.ErrState) {
		t.Errorf("commit: %v", err)
	}
	if w.Borrow != "" {
		t.Errorf("borrows %s", w.Borrow)
	}
	again, err := f.store.Prepare(ctx, "we", workspace.Source{})
	if err != nil || again.ID != "we" {
		t.Errorf("prepare again: %v", err)
	}
}

func TestSubmoduleDirectory(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	runGit(t, src, "update-index", "--add", "--cacheinfo", "160000,"+runGit(t, src, "rev-parse", "HEAD")+",vendor/lib")
	runGit(t, src, "commit", "-q", "-m", "submodule")
	w := f.cut("ws", src, "")
	if d := f.diff("ws", workspace.DiffOptions{}); d != "" {
		t.Errorf("diff: %s", d)
	}
	write(t, w.Files, "vendor/lib/file", "in an empty submodule\n")
	if d := f.diff("ws", workspace.DiffOptions{}); !strings.Contains(d, "+in an empty submodule") || !strings.Contains(d, "-Subproject commit") {
		t.Errorf("diff: %s", d)
	}
}

func TestCommitConflictAndCut(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	ctx := t.Context()
	w1, w2 := f.cut("w1", src, ""), f.cut("w2", src, "")
	write(t, w1.Files, "a.txt", "w1\n")
	write(t, w2.Files, "a.txt", "w2\n")
	c1, err := f.store.Commit(ctx, "w1", workspace.CommitOptions{Message: "w1", Branch: "warren/same"})
	must(t, err)
	if _, err := f.store.Commit(ctx, "w2", workspace.CommitOptions{Message: "w2", Branch: "warren/same"}); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren/same") {
		t.Errorf("commit to a branch of another workspace: %v", err)
	}
	write(t, w1.Files, "a.txt", "w1 again\n")
	c2, err := f.store.Commit(ctx, "w1", workspace.CommitOptions{Message: "w1 again", Branch: "warren/same"})
	must(t, err)
	if got := runGit(t, c2.RepoDir, "log", "--format=%H", "warren/same"); got != c2.ID+"\n"+c1.ID+"\n"+w1.Commit {
		t.Errorf("log: %s", got)
	}
	// A crash after the branch was moved and before the record was written.
	record := filepath.Join(f.dir, "workspaces/w1/meta.json")
	must(t, os.WriteFile(record, []byte(strings.Replace(readFile(t, record), `"head": "`+c2.ID, `"next": "`+c2.ID+`", "head": "`+c1.ID, 1)), 0o600))
	// Back to the base is a commit too.
	write(t, w1.Files, "a.txt", some["a.txt"])
	c3, err := f.store.Commit(ctx, "w1", workspace.CommitOptions{Message: "undo", Branch: "warren/same"})
	must(t, err)
	if c3.Files != 1 {
		t.Errorf("commit: %+v", c3)
	}
	// The objects of the commit are not shown to other sandboxes ...
	if _, err := tryGit("/", []string{"GIT_DIR=" + filepath.Dir(w1.Borrow)}, "cat-file", "-e", c1.ID); err == nil {
		t.Error("a sandbox sees what was committed from another")
	}
	// ... but a workspace that is cut from the branch has them.
	w3 := f.cut("w3", src, "warren/same")
	show(t, w3)
	runGit(t, w3.Files, "fsck", "--strict")
	if got := runGit(t, w3.Files, "log", "--format=%s"); got != "undo\nw1 again\nw1\nfirst" {
		t.Errorf("log: %s", got)
	}
	for _, o := range []workspace.CommitOptions{{}, {Message: " \n"}, {Message: "x", Branch: "-x"}, {Message: "x", Branch: "a..b"}, {Message: "x", Author: "no mail"}, {Message: "x", Author: "a <b>\nc <d>"}} {
		if _, err := f.store.Commit(ctx, "w2", o); !isInvalid(err) {
			t.Errorf("commit %+v: %v", o, err)
		}
	}
}

func TestPopulateResumes(t *testing.T) {
	f := newFixture(t)
	files := map[string]string{}
	for i := range 800 {
		files[fmt.Sprintf("d%d/f%d", i%20, i)] = strings.Repeat("x", i)
	}
	src := newRepo(t, files)
	ctx := t.Context()
	r, err := f.repos.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	commit, branch, err := f.repos.ResolveRef(ctx, r.ID, "")
	must(t, err)
	w, err := f.store.Prepare(ctx, "wr", workspace.Source{Repo: r, Commit: commit, Branch: branch})
	must(t, err)
	for i := range 6 {
		c, cancel := context.WithTimeout(ctx, time.Duration(i*8)*time.Millisecond)
		if err := f.store.Populate(c, "wr"); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cut short: %v", err)
		}
		cancel()
	}
	// What a torn write leaves.
	must(t, os.MkdirAll(filepath.Join(w.Files, "d0"), 0o755))
	write(t, w.Files, "d0/f0", "half")
	fi, err := os.Stat(w.Files)
	must(t, err)
	for _, name := range []string{"d0", "d0/f0"} { // as whoever was cut short would have made them, should none have come so far
		owner := fi.Sys().(*syscall.Stat_t)
		must(t, os.Lchown(filepath.Join(w.Files, name), int(owner.Uid), int(owner.Gid)))
	}
	must(t, os.WriteFile(filepath.Join(f.dir, "workspaces/wr/meta.json"), []byte(strings.Replace(readFile(t, filepath.Join(f.dir, "workspaces/wr/meta.json")), `"populated": true`, `"populated": false`, 1)), 0o600))
	must(t, os.MkdirAll(filepath.Join(f.dir, "workspaces/wr/.tmp-git-dead/index"), 0o700))
	must(t, os.MkdirAll(filepath.Join(f.dir, "workspaces/.tmp-prepare~dead/files"), 0o700))
	s, err := workspace.Open(workspace.Options{Dir: filepath.Join(f.dir, "workspaces"), IDBase: 0x60000000, Repos: f.repos})
	must(t, err)
	must(t, s.Populate(ctx, "wr"))
	must(t, s.Populate(ctx, "wr"))
	var d bytes.Buffer
	must(t, s.Diff(ctx, "wr", workspace.DiffOptions{}, &d))
	if d.Len() > 0 {
		t.Errorf("diff: %s", d.String())
	}
	for _, pattern := range []string{"workspaces/wr/.tmp-*", "workspaces/.tmp-*"} {
		if left, _ := filepath.Glob(filepath.Join(f.dir, pattern)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

func readFile(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

func TestCopy(t *testing.T) {
	f := newFixture(t)
	w := f.cut("w1", newRepo(t, some), "")
	ctx := t.Context()
	must(t, os.Chmod(filepath.Join(w.Files, "a.txt"), 0o755|os.ModeSetuid))
	must(t, unix.Setxattr(filepath.Join(w.Files, "a.txt"), "user.note", []byte("kept"), 0))
	must(t, os.Link(filepath.Join(w.Files, "a.txt"), filepath.Join(w.Files, "dir/hard")))
	must(t, os.Symlink("/etc/passwd", filepath.Join(w.Files, "out")))
	must(t, syscall.Mkfifo(filepath.Join(w.Files, "fifo"), 0o640))
	sparse, err := os.Create(filepath.Join(w.Files, "sparse"))
	must(t, err)
	must(t, sparse.Truncate(1<<40))
	_, err = sparse.WriteAt([]byte("far"), 1<<39)
	must(t, err)
	must(t, sparse.Close())
	old := time.Unix(1e9, 5e8)
	must(t, os.Chtimes(filepath.Join(w.Files, "dir/deep"), old, old))
	must(t, os.Chtimes(filepath.Join(w.Files, "a.txt"), old, old))
	write(t, w.Home, ".bashrc", "x\n")

	method, err := f.store.Copy(ctx, "w1", "w2")
	must(t, err)
	if method != f.store.CopyMethod() {
		t.Errorf("copied by %q, announced %q", method, f.store.CopyMethod())
	}
	w2, err := f.store.Get(ctx, "w2")
	must(t, err)
	var a, b, hard, orig syscall.Stat_t
	must(t, syscall.Lstat(filepath.Join(w2.Files, "a.txt"), &a))
	must(t, syscall.Lstat(filepath.Join(w2.Files, "dir/hard"), &hard))
	must(t, syscall.Lstat(filepath.Join(w.Files, "a.txt"), &orig))
	if a.Ino != hard.Ino || a.Nlink != 2 || a.Dev == orig.Dev && a.Ino == orig.Ino {
		t.Errorf("hard links: %d %d (%d names), original %d", a.Ino, hard.Ino, a.Nlink, orig.Ino)
	}
	if a.Mode != orig.Mode || a.Uid != orig.Uid || a.Mtim != orig.Mtim {
		t.Errorf("attributes %+v, want %+v", a, orig)
	}
	buf := make([]byte, 10)
	if n, err := unix.Getxattr(filepath.Join(w2.Files, "a.txt"), "user.note", buf); err != nil || string(buf[:n]) != "kept" {
		t.Errorf("xattr: %q %v", buf, err)
	}
	if to, err := os.Readlink(filepath.Join(w2.Files, "out")); err != nil || to != "/etc/passwd" {
		t.Errorf("link: %q %v", to, err)
	}
	must(t, syscall.Lstat(filepath.Join(w2.Files, "sparse"), &b))
	if b.Size != 1<<40 || b.Blocks > 1000 {
		t.Errorf("sparse file: %d bytes, %d blocks", b.Size, b.Blocks)
	}
	if fi, err := os.Stat(filepath.Join(w2.Files, "dir/deep")); err != nil || !fi.ModTime().Equal(old) {
		t.Errorf("time of a directory: %v %v", fi, err)
	}
	if fi, err := os.Lstat(filepath.Join(w2.Files, "fifo")); err != nil || fi.Mode()&os.ModeNamedPipe == 0 {
		t.Errorf("fifo: %v %v", fi, err)
	}
	write(t, w2.Files, "a.txt", "only in the copy\n")
	if readFile(t, filepath.Join(w.Files, "a.txt")) != some["a.txt"] {
		t.Error("the copy is not independent")
	}
	if _, err := f.store.Copy(ctx, "w1", "w2"); !errors.Is(err, warren.ErrExists) {
		t.Errorf("copy to one that exists: %v", err)
	}
	if _, err := f.store.Copy(ctx, "w9", "w3"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("copy of nothing: %v", err)
	}
}

// TestCopyLive copies while files come and go.
func TestCopyLive(t *testing.T) {
	f := newFixture(t)
	w := f.cut("w1", newRepo(t, some), "")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			d := filepath.Join(w.Files, fmt.Sprintf("live%d", i%7))
			os.MkdirAll(filepath.Join(d, "x"), 0o755)
			os.WriteFile(filepath.Join(d, "x/f"), []byte("live"), 0o644)
			os.RemoveAll(d)
			os.Symlink("/etc", d)
			os.Remove(d)
		}
	}()
	defer func() { close(stop); <-stopped }()
	for i := range 12 {
		id := warren.WorkspaceID(fmt.Sprintf("c%d", i))
		if _, err := f.store.Copy(t.Context(), "w1", id); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(f.dir, "workspaces", string(id), "files/a.txt")); err != nil {
			t.Fatal(err)
		}
		var d bytes.Buffer
		f.store.Diff(t.Context(), "w1", workspace.DiffOptions{}, &d)
		if strings.Contains(d.String(), "root:") {
			t.Fatal("the diff left the workspace")
		}
	}
}

func TestDeleteHostileTree(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	w, err := f.store.Prepare(ctx, "wx", workspace.Source{})
	must(t, err)
	must(t, f.store.Populate(ctx, "wx"))
	outside := filepath.Join(t.TempDir(), "keep")
	write(t, filepath.Dir(outside), "keep", "keep")
	const n = 20000
	for i := range n {
		if i%1000 == 0 {
			must(t, os.MkdirAll(filepath.Join(w.Files, fmt.Sprint("d", i/1000)), 0o755))
		}
		fd, err := unix.Open(filepath.Join(w.Files, fmt.Sprint("d", i/1000), fmt.Sprint(i)), unix.O_CREAT|unix.O_WRONLY, 0)
		must(t, err)
		unix.Close(fd)
	}
	must(t, os.Symlink(filepath.Dir(outside), filepath.Join(w.Files, "out")))
	must(t, os.Chmod(filepath.Join(w.Files, "d0"), 0))
	// Deeper than any path, and than there are descriptors.
	fd, err := unix.Open(w.Files, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	for range 3000 {
		must(t, unix.Mkdirat(fd, "deep", 0o700))
		sub, err := unix.Openat(fd, "deep", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		unix.Close(fd)
		fd = sub
	}
	unix.Close(fd)
	if _, err := f.store.Size(ctx, "wx"); !isInvalid(err) {
		t.Errorf("size of a tree that is too deep: %v", err)
	}
	must(t, f.store.Delete(ctx, "wx"))
	if _, err := os.Lstat(outside); err != nil {
		t.Error("delete followed a link")
	}
	entries, err := os.ReadDir(filepath.Join(f.dir, "workspaces"))
	must(t, err)
	if len(entries) != 1 {
		t.Errorf("left: %v", entries)
	}
	if err := f.store.Delete(ctx, "wx"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("delete again: %v", err)
	}
	if locks, err := os.ReadDir(filepath.Join(f.dir, "workspaces", ".locks")); err != nil || len(locks) > 0 {
		t.Errorf("locks left: %v, %v", locks, err)
	}
}

// TestDeep has a file that no path reaches: the patch says that it is not there.
func TestDeep(t *testing.T) {
	f := newFixture(t)
	w := f.cut("wx", newRepo(t, some), "")
	fd, err := unix.Open(w.Files, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	for range 1500 {
		must(t, unix.Mkdirat(fd, "deep", 0o755))
		sub, err := unix.Openat(fd, "deep", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		unix.Close(fd)
		fd = sub
	}
	file, err := unix.Openat(fd, "file", unix.O_CREAT|unix.O_WRONLY, 0o644)
	must(t, err)
	unix.Close(file)
	unix.Close(fd)
	d := f.diff("wx", workspace.DiffOptions{})
	if !strings.Contains(d, "# warren: a directory is not in the patch") || len(d) > 1000 {
		t.Errorf("the diff says of a tree that is too deep:\n%.1000s", d)
	}
}

// TestEncoding has attributes that git cannot do to a file: the caller is told which, and nothing else is wrong.
func TestEncoding(t *testing.T) {
	f := newFixture(t)
	w := f.cut("wx", newRepo(t, some), "")
	write(t, w.Files, ".gitattributes", "* working-tree-encoding=UTF-16\n")
	err := f.store.Diff(t.Context(), "wx", workspace.DiffOptions{}, io.Discard)
	if !isInvalid(err) || !strings.Contains(err.Error(), ".gitattributes") {
		t.Errorf("diff: %v", err)
	}
	if _, err := f.store.Commit(t.Context(), "wx", workspace.CommitOptions{Message: "m", Name: "x"}); !isInvalid(err) {
		t.Errorf("commit: %v", err)
	}
	must(t, os.Remove(filepath.Join(w.Files, ".gitattributes")))
	f.diff("wx", workspace.DiffOptions{})
}

// TestKinds cuts workspaces from repositories of less common kinds.
func TestKinds(t *testing.T) {
	plain := newRepo(t, some)
	write(t, plain, "a.txt", "second\n")
	runGit(t, plain, "commit", "-q", "-am", "second")
	tmp := t.TempDir()
	kinds := map[string]func() string{
		"sha256": func() string {
			d := filepath.Join(tmp, "sha256")
			runGit(t, "/", "init", "-q", "--object-format=sha256", d)
			write(t, d, "a.txt", "a\n")
			runGit(t, d, "add", "-A")
			runGit(t, d, "commit", "-q", "-m", "m")
			return d
		},
		"bare": func() string {
			d := filepath.Join(tmp, "bare.git")
			runGit(t, "/", "clone", "-q", "--bare", plain, d)
			return d
		},
		"shallow": func() string {
			d := filepath.Join(tmp, "shallow")
			runGit(t, "/", "clone", "-q", "--depth=1", "file://"+plain, d)
			return d
		},
		"worktree": func() string {
			d := filepath.Join(tmp, "wt")
			runGit(t, plain, "worktree", "add", "-q", "-b", "wt", d)
			return d
		},
		"detached": func() string {
			d := filepath.Join(tmp, "det")
			runGit(t, "/", "clone", "-q", plain, d)
			runGit(t, d, "checkout", "-q", "--detach", "HEAD~1")
			return d
		},
		"shared": func() string {
			d := filepath.Join(tmp, "shared")
			runGit(t, "/", "clone", "-q", "--shared", plain, d)
			return d
		},
		"packed": func() string {
			d := filepath.Join(tmp, "packed")
			runGit(t, "/", "clone", "-q", plain, d)
			runGit(t, d, "gc", "-q")
			return d
		},
		"index-v4": func() string {
			d := filepath.Join(tmp, "v4")
			runGit(t, "/", "clone", "-q", plain, d)
			runGit(t, d, "update-index", "--index-version", "4", "--split-index")
			return d
		},
	}
	for name, mk := range kinds {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			src := mk()
			w := f.cut("wk", src, "", func(s *workspace.Source) {
				if name != "bare" {
					s.Dirty = src
				}
			})
			if want := runGit(t, src, "rev-parse", "HEAD"); w.Commit != want {
				t.Errorf("commit %s, want %s", w.Commit, want)
			}
			show(t, w)
			if got := runGit(t, w.Files, "status", "--porcelain"); got != "" {
				t.Errorf("status: %s", got)
			}
			runGit(t, w.Files, "fsck")
			runGit(t, w.Files, "log")
			write(t, w.Files, "a.txt", "changed\n")
			if d := f.diff("wk", workspace.DiffOptions{}); !strings.Contains(d, "+changed") {
				t.Errorf("diff: %s", d)
			}
			c, err := f.store.Commit(t.Context(), "wk", workspace.CommitOptions{Message: "m", Name: name})
			must(t, err)
			runGit(t, c.RepoDir, "fsck")
			_, err = f.store.Push(t.Context(), "wk", workspace.PushOptions{})
			must(t, err)
			if got := runGit(t, src, "rev-parse", c.Branch); got != c.ID {
				t.Errorf("origin has %s", got)
			}
		})
	}
}

// TestAttributes has line ends converted by git's own rules, and pointer files of Git LFS left as they are.
func TestAttributes(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, map[string]string{".gitattributes": "*.bat text eol=crlf\n*.bin filter=lfs diff=lfs merge=lfs -text\n", "x.bat": "a\r\nb\r\n", "x.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"})
	w := f.cut("wa", src, "")
	if got := readFile(t, filepath.Join(w.Files, "x.bat")); got != "a\r\nb\r\n" {
		t.Errorf("x.bat: %q", got)
	}
	if got := readFile(t, filepath.Join(w.Files, "x.bin")); !strings.HasPrefix(got, "version https://git-lfs") {
		t.Errorf("x.bin: %q", got)
	}
	write(t, w.Files, "x.bat", "a\r\nc\r\n")
	if d := f.diff("wa", workspace.DiffOptions{}); !strings.Contains(d, "-b\n+c\n") || strings.Contains(d, "-a") {
		t.Errorf("diff: %q", d)
	}
}

// TestLargeFile puts a file in the diff that is larger than what git keeps in memory for text.
func TestLargeFile(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	w := f.cut("wl", src, "")
	big := bytes.Repeat([]byte("0123456789abcde\n"), 4<<20) // 64 MB
	must(t, os.WriteFile(filepath.Join(w.Files, "big"), big, 0o644))
	p := filepath.Join(t.TempDir(), "p")
	out, err := os.Create(p)
	must(t, err)
	must(t, f.store.Diff(t.Context(), "wl", workspace.DiffOptions{}, out))
	must(t, out.Close())
	runGit(t, src, "apply", p)
	if got, err := os.ReadFile(filepath.Join(src, "big")); err != nil || !bytes.Equal(got, big) {
		t.Errorf("the patch makes another file: %d bytes, %v", len(got), err)
	}
}

// TestHugeFile has files that are larger than a patch or a commit carries: they are named, not read.
func TestHugeFile(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, some)
	w := f.cut("wh", src, "")
	runGit(t, w.Files, "init", "-q", "nested")
	for _, name := range []string{"huge", "nested/huge", "a.txt"} {
		must(t, os.WriteFile(filepath.Join(w.Files, name), nil, 0o644))
		must(t, os.Truncate(filepath.Join(w.Files, name), 1<<42)) // 4 TB of nothing: whoever reads it does not come back
	}
	write(t, w.Files, "small", "small\n")
	d := f.diff("wh", workspace.DiffOptions{})
	for _, want := range []string{"# warren: huge (4194304 MiB) is not in the patch: it is large", "# warren: nested/huge (", "# warren: a.txt (", "+small"} {
		if !strings.Contains(d, want) {
			t.Errorf("no %q in %q", want, d)
		}
	}
	if d := f.diff("wh", workspace.DiffOptions{Stat: true}); !strings.Contains(d, "# warren: huge (") {
		t.Errorf("stat: %q", d)
	}
	p := filepath.Join(t.TempDir(), "p")
	must(t, os.WriteFile(p, []byte(d), 0o644))
	runGit(t, src, "apply", "--check", p)
	_, err := f.store.Commit(t.Context(), "wh", workspace.CommitOptions{Message: "x", All: true})
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "huge (4194304 MiB)") {
		t.Errorf("commit: %v", err)
	}
}
