package workspace_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// canary is a program that leaves a file when it runs, by whatever name.
type canary struct {
	t   testing.TB
	dir string
}

func newCanary(t testing.TB) *canary {
	dir := t.TempDir()
	// Whoever runs it must be able to leave its mark.
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	return &canary{t, dir}
}

// command returns a command line for a setting that git hands to a shell.
func (c *canary) command(name string) string {
	return fmt.Sprintf("touch %s/%s; cat", c.dir, name)
}

// program returns a program.
func (c *canary) program(name string) string {
	p := filepath.Join(c.t.TempDir(), name)
	if err := testenv.WriteProgram(p, []byte("#!/bin/sh\ntouch "+c.dir+"/"+name+"\n")); err != nil {
		c.t.Fatal(err)
	}
	for d := filepath.Dir(p); d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		os.Chmod(d, 0o755)
	}
	return p
}

func (c *canary) sang() []string {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		c.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

var hooks = []string{"pre-commit", "post-commit", "post-checkout", "post-index-change", "reference-transaction", "pre-push", "pre-receive",
	"update", "post-update", "post-receive", "proc-receive", "fsmonitor-watchman", "commit-msg", "prepare-commit-msg", "post-merge", "pre-auto-gc", "push-to-checkout", "post-rewrite"}

// poison makes a git directory run the canary wherever git runs something that a repository names.
func (c *canary) poison(gitDir string) {
	t := c.t
	var b strings.Builder
	cmd := c.command
	fmt.Fprintf(&b, `
[core]
	fsmonitor = %q
	pager = %q
	editor = %q
	sshCommand = %q
	askPass = %q
	alternateRefsCommand = %q
	gitProxy = %q
	attributesFile = /etc/passwd
	excludesFile = /etc/passwd
	hooksPath = %s
[uploadpack]
	packObjectsHook = %q
	allowAnySHA1InWant = true
[filter "x"]
	clean = %q
	smudge = %q
	required = true
[filter "p"]
	process = %q
[diff]
	external = %q
[diff "x"]
	textconv = %q
	command = %q
[merge "x"]
	driver = %q
[credential]
	helper = %q
[alias]
	diff-tree = "!%s"
	status = "!%s"
	ls-files = "!%s"
[gpg]
	program = %s
[commit]
	gpgSign = true
[remote "evil"]
	url = %q
	promisor = true
	uploadpack = %q
	receivepack = %q
	partialclonefilter = blob:none
[extensions]
	partialClone = evil
[interactive]
	diffFilter = %q
[submodule "sub"]
	url = file:///etc
	update = "!%s"
[protocol]
	allow = always
[protocol "ext"]
	allow = always
[include]
	path = /etc/passwd
`, cmd("fsmonitor"), cmd("pager"), cmd("editor"), cmd("ssh"), c.program("askpass"), cmd("alternaterefs"), cmd("gitproxy"), filepath.Join(gitDir, "evilhooks"), cmd("packobjects"),
		cmd("clean"), cmd("smudge"), cmd("process"), c.program("external"), cmd("textconv"), c.program("diffcommand"), cmd("merge"),
		"!"+cmd("credential"), cmd("alias"), cmd("alias"), cmd("alias"), c.program("gpg"),
		"ext::sh -c "+c.program("ext"), cmd("uploadpack"), cmd("receivepack"), cmd("difffilter"), cmd("subupdate"))
	f, err := os.OpenFile(filepath.Join(gitDir, "config"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	// The include is not readable as a configuration and would make the twin fail before it runs anything.
	if _, err := f.WriteString(strings.Split(b.String(), "[include]")[0]); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, d := range []string{"hooks", "evilhooks"} {
		for _, h := range hooks {
			p := filepath.Join(gitDir, d, h)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := testenv.WriteProgram(p, []byte("#!/bin/sh\ntouch "+c.dir+"/hook-"+h+"\n")); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// hostileRepo makes a repository that runs canaries, with content that names them, and a commit.
func hostileRepo(t testing.TB, c *canary) string {
	src := newRepo(t, map[string]string{
		"a.txt":          "one\n",
		"p.bin":          "process\n",
		".gitattributes": "*.txt filter=x diff=x merge=x\n*.bin filter=p\n",
		".gitmodules":    "[submodule \"sub\"]\n\tpath = sub\n\turl = file:///etc\n",
		"b.txt":          "b\n",
		"dir/c.txt":      "c\n",
	})
	runGit(t, src, "update-index", "--add", "--cacheinfo", "160000,"+runGit(t, src, "rev-parse", "HEAD")+",sub")
	runGit(t, src, "commit", "-q", "-m", "submodule")
	c.poison(filepath.Join(src, ".git"))
	// Uncommitted work, so that --dirty has something to read.
	write(t, src, "b.txt", "changed\n")
	write(t, src, "new.txt", "new\n")
	return src
}

// sabotage makes a workspace as hostile as files can be.
func sabotage(t testing.TB, c *canary, files string) {
	c.poison(filepath.Join(files, ".git"))
	write(t, files, ".git/objects/info/alternates", "/etc\n/root\n")
	write(t, files, "a.txt", "changed\n")
	write(t, files, "p.bin", "changed\n")
	// A nested repository, a nested one as submodule, and ways to have a .git that is not a directory.
	for _, d := range []string{"nested", "sub", "deep/er"} {
		if err := os.MkdirAll(filepath.Join(files, d), 0o755); err != nil {
			t.Fatal(err)
		}
		runGit(t, filepath.Join(files, d), "init", "-q")
		write(t, files, d+"/inner.txt", "inner\n")
		runGit(t, filepath.Join(files, d), "add", "-A")
		runGit(t, filepath.Join(files, d), "commit", "-q", "-m", "inner")
		c.poison(filepath.Join(files, d, ".git"))
	}
	write(t, files, "gitfile/.git", "gitdir: ../nested/.git\n")
	write(t, files, "gitfile/x.txt", "x\n")
	if err := os.MkdirAll(filepath.Join(files, "gitlink"), 0o755); err != nil {
		t.Fatal(err)
	}
	must(t, os.Symlink("../nested/.git", filepath.Join(files, "gitlink/.git")))
	write(t, files, "gitlink/y.txt", "y\n")
	must(t, os.Symlink("/etc", filepath.Join(files, "etc")))
	must(t, os.Symlink("/etc/passwd", filepath.Join(files, "passwd")))
	// A directory of the base that became a link out.
	must(t, os.RemoveAll(filepath.Join(files, "dir")))
	must(t, os.Symlink("/etc", filepath.Join(files, "dir")))
	for _, n := range oddNames {
		must(t, os.WriteFile(filepath.Join(files, n), []byte(n), 0o644))
	}
	write(t, files, "attributes/.gitattributes", "* filter=x diff=x merge=x text=auto ident\n")
	write(t, files, "attributes/file.txt", "$Id$\n")
	must(t, os.Remove(filepath.Join(files, ".gitattributes")))
	must(t, os.Symlink("/etc/passwd", filepath.Join(files, ".gitattributes")))
	must(t, os.Symlink("/etc/passwd", filepath.Join(files, ".gitignore")))
}

var oddNames = []string{"new\nline", "tab\tq\"uote\\back", "\x01\x1b[31mred", "-rf", "--help", "...", "..data", "ünïcode․․", "\xff\xfe latin", strings.Repeat("n", 255), ":(glob)*", "a b ", "HEAD", "con"}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestHostile runs every verb of the host on a hostile repository and a hostile workspace (E44). It does so with git
// confined, as in real life, and unconfined, where a canary would be heard.
func TestHostile(t *testing.T) {
	for _, mode := range []string{"confined", "unconfined"} {
		t.Run(mode, func(t *testing.T) {
			f := newFixture(t)
			if mode == "unconfined" {
				f.store.Unconfine()
			}
			c := newCanary(t)
			src := hostileRepo(t, c)
			hush(t, c) // what the fixture itself set off
			w := f.cut("whostile", src, "", func(s *workspace.Source) { s.Dirty = src })
			quiet(t, c, "fetch, prepare, populate")
			sabotage(t, c, w.Files)
			hush(t, c)
			hostileVerbs(t, f, c, src, w)
		})
	}
}

func hush(t testing.TB, c *canary) {
	for _, n := range c.sang() {
		must(t, os.Remove(filepath.Join(c.dir, n)))
	}
}

func quiet(t testing.TB, c *canary, verb string) {
	t.Helper()
	if s := c.sang(); len(s) > 0 {
		t.Errorf("%s ran %v", verb, s)
		hush(t, c)
	}
}

func hostileVerbs(t *testing.T, f *fixture, c *canary, src string, w *workspace.Workspace) {
	ctx := t.Context()
	d := f.diff(w.ID, workspace.DiffOptions{})
	quiet(t, c, "diff")
	for _, want := range []string{"nested/inner.txt", "deep/er/inner.txt", "gitfile/x.txt", "gitlink/y.txt", "+changed", "deleted file mode", "# warren: sub is a submodule"} {
		if !strings.Contains(d, want) {
			t.Errorf("diff lacks %q", want)
		}
	}
	if strings.Contains(d, "root:") || strings.Contains(d, "nested/.git") {
		t.Error("diff shows what it must not")
	}
	for _, o := range []workspace.DiffOptions{{All: true}, {Stat: true}} {
		f.diff(w.ID, o)
		quiet(t, c, fmt.Sprintf("diff %+v", o))
	}
	commit, err := f.store.Commit(ctx, w.ID, workspace.CommitOptions{Message: "-m\n--amend", Name: "x"})
	must(t, err)
	quiet(t, c, "commit")
	runGit(t, commit.RepoDir, "fsck", "--strict")
	tree := runGit(t, commit.RepoDir, "ls-tree", "-r", "-z", "--name-only", commit.ID)
	for _, n := range oddNames {
		if !strings.Contains(tree, n+"\x00") {
			t.Errorf("commit lacks the file %q", n)
		}
	}
	if got := runGit(t, commit.RepoDir, "cat-file", "-p", commit.ID+":passwd"); got != "/etc/passwd" {
		t.Errorf("a symbolic link was followed: %q", got)
	}
	must(t, f.store.FormatPatch(ctx, w.ID, io.Discard))
	quiet(t, c, "format-patch")
	_, err = f.store.Push(ctx, w.ID, workspace.PushOptions{})
	must(t, err)
	_, err = f.store.Push(ctx, w.ID, workspace.PushOptions{Force: true})
	must(t, err)
	quiet(t, c, "push")
	_, err = f.repos.Fetch(ctx, src, repo.FetchOptions{Ref: "warren/x", Force: true})
	must(t, err)
	quiet(t, c, "fetch again")
	_, err = f.store.Copy(ctx, w.ID, "wcopy")
	must(t, err)
	if f.diff("wcopy", workspace.DiffOptions{}) != d {
		t.Error("the copy has another diff")
	}
	_, err = f.store.Size(ctx, w.ID)
	must(t, err)
	must(t, f.store.Delete(ctx, "wcopy"))
	must(t, f.store.Delete(ctx, w.ID))
	quiet(t, c, "copy, size, delete")
}

// TestHostileTwin proves that the canaries sing: git as a host would run it, on the same files, runs them.
func TestHostileTwin(t *testing.T) {
	f := newFixture(t)
	c := newCanary(t)
	src := hostileRepo(t, c)
	w := f.cut("wtwin", src, "")
	sabotage(t, c, w.Files)
	write(t, w.Files, ".git/objects/info/alternates", w.Borrow+"\n")
	must(t, os.Remove(filepath.Join(w.Files, ".gitattributes")))
	write(t, w.Files, ".gitattributes", "* filter=x diff=x\n")
	hush(t, c)
	// Whether they succeed does not matter.
	tryGit(w.Files, nil, "add", "-A")
	tryGit(w.Files, nil, "commit", "-m", "x")
	tryGit(w.Files, nil, "diff", "HEAD")
	tryGit(w.Files, nil, "checkout", "-f", "HEAD~0")
	tryGit(w.Files, nil, "fetch", "evil")
	sang := strings.Join(c.sang(), " ")
	for _, want := range []string{"fsmonitor", "hook-", "clean", "smudge"} {
		if !strings.Contains(sang, want) {
			t.Errorf("plain git did not run the canary %q; it ran: %s", want, sang)
		}
	}
	hush(t, c)
	// And a clone of the hostile path as its configuration would have it.
	tryGit("/", nil, "-C", src, "push", "-q", src, "HEAD:refs/heads/twin")
	if s := strings.Join(c.sang(), " "); !strings.Contains(s, "hook-") {
		t.Errorf("plain push into the hostile path ran no hook; it ran: %s", s)
	}
}

// TestSymlinkSwap swaps a directory for a link out while the host diffs and checks out (E25).
func TestSymlinkSwap(t *testing.T) {
	f := newFixture(t)
	src := newRepo(t, map[string]string{"d/hostname": "x\n", "a": "a\n"})
	w := f.cut("wswap", src, "")
	secret := t.TempDir()
	must(t, os.Chmod(secret, 0o755))
	must(t, os.WriteFile(filepath.Join(secret, "hostname"), []byte("SECRET-OF-THE-HOST\n"), 0o644))
	for d := secret; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	dir, aside := filepath.Join(w.Files, "d"), filepath.Join(w.Files, "aside")
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			os.WriteFile(filepath.Join(dir, "hostname"), bytes.Repeat([]byte{'y'}, 19-i%2), 0o644)
			os.Rename(dir, aside)
			os.Symlink(secret, dir)
			os.Remove(dir)
			os.Rename(aside, dir)
		}
	}()
	defer func() { close(stop); <-stopped }()
	for range 25 {
		var b bytes.Buffer
		if err := f.store.Diff(t.Context(), w.ID, workspace.DiffOptions{}, &b); err != nil {
			continue // changes too fast to be read is an honest answer
		}
		if strings.Contains(b.String(), "SECRET") {
			t.Fatal("the diff shows a file of the host")
		}
	}
}

// TestOtherOwners has files that only the sandbox's root may read.
func TestOtherOwners(t *testing.T) {
	needsRoot(t)
	f := newFixture(t)
	w := f.cut("wowners", newRepo(t, some), "")
	write(t, w.Files, "rootdir/secret", "of the sandbox's root\n")
	must(t, os.Lchown(filepath.Join(w.Files, "rootdir/secret"), driver.DiskIDBase, driver.DiskIDBase))
	must(t, os.Chmod(filepath.Join(w.Files, "rootdir/secret"), 0))
	must(t, os.Lchown(filepath.Join(w.Files, "rootdir"), driver.DiskIDBase, driver.DiskIDBase))
	must(t, os.Chmod(filepath.Join(w.Files, "rootdir"), 0))
	if d := f.diff(w.ID, workspace.DiffOptions{}); !strings.Contains(d, "+of the sandbox's root") {
		t.Errorf("diff lacks a file of the sandbox's root:\n%s", d)
	}
	// A file of the host's root that got in by a mistake is not the workspace's to show.
	must(t, os.WriteFile(filepath.Join(w.Files, "hostfile"), []byte("HOST"), 0o600))
	var b bytes.Buffer
	if err := f.store.Diff(t.Context(), w.ID, workspace.DiffOptions{}, &b); err == nil || strings.Contains(b.String(), "HOST") {
		t.Errorf("diff of a file that only the host's root may read: %v", err)
	}
}

func TestBadIDs(t *testing.T) {
	f := newFixture(t)
	for _, id := range []warren.WorkspaceID{"", ".", "..", "../x", "a/../../b", "a/b", "a\x00b", warren.WorkspaceID(strings.Repeat("w", 300)), "w․․", "W", ".locks", ".tmp-x", "-w", "w w"} {
		ctx := t.Context()
		errs := map[string]error{}
		_, errs["prepare"] = f.store.Prepare(ctx, id, workspace.Source{})
		_, errs["get"] = f.store.Get(ctx, id)
		_, errs["size"] = f.store.Size(ctx, id)
		_, errs["copy"] = f.store.Copy(ctx, "w1", id)
		_, errs["commit"] = f.store.Commit(ctx, id, workspace.CommitOptions{})
		_, errs["push"] = f.store.Push(ctx, id, workspace.PushOptions{})
		errs["populate"] = f.store.Populate(ctx, id)
		errs["delete"] = f.store.Delete(ctx, id)
		errs["diff"] = f.store.Diff(ctx, id, workspace.DiffOptions{}, io.Discard)
		errs["format-patch"] = f.store.FormatPatch(ctx, id, io.Discard)
		for verb, err := range errs {
			if !isInvalid(err) {
				t.Errorf("%s of %q: %v", verb, id, err)
			}
		}
	}
	entries, err := os.ReadDir(filepath.Join(f.dir, "workspaces"))
	must(t, err)
	if len(entries) != 1 { // the locks
		t.Errorf("something was made: %v", entries)
	}
}
