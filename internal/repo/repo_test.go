package repo_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func open(t testing.TB, dir string) *repo.Cache {
	t.Helper()
	testenv.NeedsTool(t, "git")
	c, err := repo.Open(repo.Options{Dir: dir, UID: driver.DiskIDBase + 1000, GID: driver.DiskIDBase + 1000})
	must(t, err)
	return c
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func runGit(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@x", "GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@x",
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=init.defaultBranch", "GIT_CONFIG_VALUE_0=main"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func newRepo(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	runGit(t, dir, "init", "-q")
	commit(t, dir, "first")
	return dir
}

func commit(t testing.TB, dir, text string) string {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(dir, "a.txt"), []byte(text), 0o644))
	runGit(t, dir, "add", "-A")
	runGit(t, dir, "commit", "-q", "-m", text)
	return runGit(t, dir, "rev-parse", "HEAD")
}

func TestFetchLocal(t *testing.T) {
	src := newRepo(t)
	runGit(t, src, "tag", "v1")
	runGit(t, src, "branch", "feature/one")
	c := open(t, filepath.Join(t.TempDir(), "repos"))
	ctx := t.Context()
	var steps []string
	r, err := c.Fetch(ctx, src, repo.FetchOptions{Progress: func(step, msg string, done, total int64) { steps = append(steps, step+" "+msg) }})
	must(t, err)
	if r.DefaultBranch != "main" || r.URL != src || r.Format != "sha1" || time.Since(r.Fetched) > time.Hour {
		t.Errorf("%+v", r)
	}
	first := runGit(t, src, "rev-parse", "HEAD")
	for _, tt := range []struct{ ref, branch string }{
		{"", "main"}, {"HEAD", "main"}, {"main", "main"}, {"refs/heads/main", "main"}, {"v1", ""}, {"refs/tags/v1", ""},
		{first, ""}, {first[:8], ""}, {"feature/one", "feature/one"}, {"origin/main", "main"},
	} {
		got, branch, err := c.ResolveRef(ctx, r.ID, tt.ref)
		if err != nil || got != first || branch != tt.branch {
			t.Errorf("ResolveRef(%q) = %s, %q, %v", tt.ref, got, branch, err)
		}
	}
	for ref, kind := range map[string]error{"mian": warren.ErrNotFound, "feature": warren.ErrNotFound, "-x": warren.ErrInvalid, "a..b": warren.ErrInvalid, "main~1": warren.ErrInvalid,
		"main^{tree}": warren.ErrInvalid, "a\nb": warren.ErrInvalid, strings.Repeat("0", 40): warren.ErrNotFound, "@{-1}": warren.ErrInvalid} {
		if _, _, err := c.ResolveRef(ctx, r.ID, ref); !errors.Is(err, kind) {
			t.Errorf("ResolveRef(%q): %v, want %v", ref, err, kind)
		}
	}
	if _, _, err := c.ResolveRef(ctx, r.ID, "mian"); !strings.Contains(err.Error(), "did you mean main?") {
		t.Errorf("no hint: %v", err)
	}
	if _, _, err := c.ResolveRef(ctx, r.ID, "feature"); !strings.Contains(err.Error(), "feature/one") {
		t.Errorf("no hint: %v", err)
	}
	// A later commit is seen without force, a branch that is gone goes, and Warren's own branches stay.
	runGit(t, r.Dir, "update-ref", "refs/heads/warren/x", first)
	second := commit(t, src, "second")
	runGit(t, src, "branch", "-D", "feature/one")
	_, err = c.Fetch(ctx, src+"/.git/", repo.FetchOptions{})
	must(t, err)
	if got, _, err := c.ResolveRef(ctx, r.ID, ""); err != nil || got != second {
		t.Errorf("after a commit: %s %v", got, err)
	}
	if _, _, err := c.ResolveRef(ctx, r.ID, "feature/one"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a deleted branch: %v", err)
	}
	if got, branch, err := c.ResolveRef(ctx, r.ID, "warren/x"); err != nil || got != first || branch != "warren/x" {
		t.Errorf("warren/x: %s %s %v", got, branch, err)
	}
	if got := runGit(t, r.Dir, "log", "--format=%s"); got != "second\nfirst" {
		t.Errorf("git log in the mirror: %s", got)
	}
	all, err := c.List(ctx)
	if err != nil || len(all) != 1 || all[0].Size == 0 {
		t.Errorf("list: %+v %v", all, err)
	}
	// A19: no file of the cache is a file of the origin.
	inodes := map[uint64]bool{}
	filepath.WalkDir(filepath.Join(src, ".git"), func(p string, d fs.DirEntry, err error) error {
		if fi, err := d.Info(); err == nil && !d.IsDir() {
			inodes[fi.Sys().(*syscall.Stat_t).Ino] = true
		}
		return nil
	})
	filepath.WalkDir(filepath.Dir(r.Dir), func(p string, d fs.DirEntry, err error) error {
		if fi, err := d.Info(); err == nil && !d.IsDir() && inodes[fi.Sys().(*syscall.Stat_t).Ino] {
			t.Errorf("%s is a hard link", p)
		}
		return nil
	})
	must(t, c.Delete(ctx, src))
	if err := c.Delete(ctx, src); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("delete again: %v", err)
	}
	if _, err := c.Get(ctx, src); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("get of nothing: %v", err)
	}
}

// TestNothingDropped has a force-push at the origin: the old commit stays for those who borrow it.
func TestNothingDropped(t *testing.T) {
	src := newRepo(t)
	c := open(t, filepath.Join(t.TempDir(), "repos"))
	old := commit(t, src, "will go")
	r, err := c.Fetch(t.Context(), src, repo.FetchOptions{})
	must(t, err)
	runGit(t, src, "reset", "-q", "--hard", "HEAD~1")
	commit(t, src, "instead")
	_, err = c.Fetch(t.Context(), src, repo.FetchOptions{})
	must(t, err)
	must(t, c.Maintain(t.Context(), r.ID))
	runGit(t, "/", "--git-dir="+filepath.Dir(r.Objects), "cat-file", "-e", old)
	runGit(t, "/", "--git-dir="+filepath.Dir(r.Objects), "-c", "gc.auto=1", "fsck")
	if packs, _ := filepath.Glob(filepath.Join(r.Objects, "pack/*.pack")); len(packs) != 1 {
		t.Errorf("packs after maintenance: %v", packs)
	}
}

func TestFetchErrors(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "repos"))
	empty := t.TempDir()
	runGit(t, empty, "init", "-q")
	notRepo := t.TempDir()
	for url, kind := range map[string]error{
		"":                                       warren.ErrInvalid,
		"-u":                                     warren.ErrInvalid,
		"--upload-pack=x":                        warren.ErrInvalid,
		"ext::sh -c id":                          warren.ErrInvalid,
		"fd::3":                                  warren.ErrInvalid,
		"relative/path":                          warren.ErrInvalid,
		"ftp://host/x":                           warren.ErrInvalid,
		"https://":                               warren.ErrInvalid,
		"https://host":                           warren.ErrInvalid,
		"https://-host/x":                        warren.ErrInvalid,
		"ssh://-oProxy=x/y":                      warren.ErrInvalid,
		"ssh://-u@host/y":                        warren.ErrInvalid,
		"-oProxyCommand=x:y":                     warren.ErrInvalid,
		"host:-x":                                warren.ErrInvalid,
		"ssh://host/-x":                          warren.ErrInvalid,
		"https://h/x\n":                          warren.ErrInvalid,
		"https://h/x\x00":                        warren.ErrInvalid,
		"https://h/%0ax":                         warren.ErrInvalid,
		"https://u%0a@h/x":                       warren.ErrInvalid,
		"https://h/x#frag":                       warren.ErrInvalid,
		"file://otherhost/x":                     warren.ErrInvalid,
		"https://h/" + strings.Repeat("x", 3000): warren.ErrInvalid,
		"/no/such/path":                          warren.ErrNotFound,
		notRepo:                                  warren.ErrNotFound,
		"file://" + notRepo:                      warren.ErrNotFound,
		empty:                                    warren.ErrState,
		"http://127.0.0.1:1/x":                   warren.ErrUnavailable,
		"git@github.invalid:o/r":                 warren.ErrDenied, // no credentials of the host asked for
	} {
		_, err := c.Fetch(t.Context(), url, repo.FetchOptions{})
		if !errors.Is(err, kind) {
			t.Errorf("Fetch(%q): %v, want %v", url, err, kind)
		}
	}
	if all, err := c.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("half made: %v %v", all, err)
	}
}

func TestOriginIDs(t *testing.T) {
	src := newRepo(t)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(src, link))
	same := [][]string{
		{"https://example.com/o/r", "https://example.com/o/r.git", "https://example.com/o/r/", "https://EXAMPLE.com:443/o//r.git/", "HTTPS://u:p@example.com/o/r", "https://token@example.com/o/r"},
		{"http://example.com/o/r", "http://example.com:80/o/r.git"},
		{"https://example.com:8443/o/r"},
		{"https://example.com/o/R"},
		{"https://example.com/o/r?x=1"},
		{"ssh://git@example.com/o/r", "ssh://git@example.com:22/o/r.git", "git+ssh://git@example.com/o/r/", "git@example.com:/o/r"},
		{"git@example.com:o/r", "git@EXAMPLE.com:o/r.git"},
		{"other@example.com:o/r"},
		{src, "file://" + src, src + "/", src + "/.git", link, "file://localhost" + src},
	}
	seen := map[warren.RepoID]string{}
	for _, group := range same {
		var id warren.RepoID
		for _, u := range group {
			o, err := repo.ParseOrigin(u)
			if err != nil {
				t.Errorf("%s: %v", u, err)
				continue
			}
			if id == "" {
				id = o.ID()
				if other := seen[id]; other != "" {
					t.Errorf("%s and %s are one", u, other)
				}
				seen[id] = u
			} else if o.ID() != id {
				t.Errorf("%s is not %s", u, group[0])
			}
			if strings.Contains(o.URL, "u:p") || strings.Contains(o.URL, "token") {
				t.Errorf("%s keeps credentials: %s", u, o.URL)
			}
		}
	}
}

func FuzzParseOrigin(f *testing.F) {
	for _, s := range []string{"https://u:p@h/x.git", "git@h:p", "ssh://u@h:22/p", "file:///etc", "ext::sh", "[::1]:x", "https://[::1]:80/x", "a::b", "/etc"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		o, err := repo.ParseOrigin(s)
		if err != nil {
			if !errors.Is(err, warren.ErrInvalid) && !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, fs.ErrPermission) && o != nil {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if strings.HasPrefix(o.URL, "-") || strings.Contains(o.URL, "::") && o.Scheme != "file" && !strings.Contains(o.URL, "[") && strings.Index(o.URL, "::") < strings.Index(o.URL, "/") {
			t.Fatalf("%q gives %q", s, o.URL)
		}
		again, err := repo.ParseOrigin(o.URL)
		if err != nil || again.ID() != o.ID() {
			t.Fatalf("%q gives %q, which is another: %v", s, o.URL, err)
		}
	})
}

// TestFetchTogether has many callers, of two caches on one directory: one clones, the others wait and use it.
func TestFetchTogether(t *testing.T) {
	src := newRepo(t)
	dir := filepath.Join(t.TempDir(), "repos")
	caches := []*repo.Cache{open(t, dir), open(t, dir)}
	srv := newServer(t, src, "", "")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, err := caches[i%2].Fetch(t.Context(), srv.URL+"/r", repo.FetchOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	srv.mu.Lock()
	defer srv.mu.Unlock()
	if srv.packs != 1 {
		t.Errorf("cloned %d times", srv.packs)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".tmp-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestWaitCanEnd has a caller give up while another clones.
func TestWaitCanEnd(t *testing.T) {
	src := newRepo(t)
	dir := filepath.Join(t.TempDir(), "repos")
	c := open(t, dir)
	o, err := repo.ParseOrigin(src)
	must(t, err)
	unlock, err := repo.LockFile(t.Context(), filepath.Join(dir, ".locks", string(o.ID())))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Fetch(ctx, src, repo.FetchOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("fetch while another clones: %v", err)
	}
	unlock()
	_, err = c.Fetch(t.Context(), src, repo.FetchOptions{})
	must(t, err)
}

func TestOpenCleans(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "repos")
	open(t, dir)
	o, err := repo.ParseOrigin("https://example.com/x")
	must(t, err)
	dead, live := filepath.Join(dir, ".tmp-clone-1~"+string(o.ID())), filepath.Join(dir, ".tmp-clone-2~raaaaaaaaaaaaaaaaaaa")
	must(t, os.MkdirAll(filepath.Join(dead, "origin.git"), 0o755))
	must(t, os.MkdirAll(live, 0o755))
	unlock, err := repo.LockFile(t.Context(), filepath.Join(dir, ".locks/raaaaaaaaaaaaaaaaaaa"))
	must(t, err)
	defer unlock()
	open(t, dir)
	if _, err := os.Lstat(dead); err == nil {
		t.Error("an interrupted clone is left")
	}
	if _, err := os.Lstat(live); err != nil {
		t.Error("the clone of another process was removed")
	}
}

// server is a git server over HTTP that counts packs.
type server struct {
	*httptest.Server
	mu    sync.Mutex
	packs int
	auth  []string
}

func newServer(t testing.TB, src, user, password string) *server {
	out, err := exec.Command("git", "--exec-path").Output()
	must(t, err)
	backend := filepath.Join(strings.TrimSpace(string(out)), "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		testenv.Skip(t, "git http-backend is not installed")
	}
	root := t.TempDir()
	runGit(t, "/", "clone", "-q", "--bare", src, filepath.Join(root, "r"))
	runGit(t, filepath.Join(root, "r"), "config", "http.receivepack", "true")
	h := &cgi.Handler{Path: backend, Stderr: io.Discard, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"}}
	s := &server{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u, p, _ := r.BasicAuth()
		s.mu.Lock()
		s.auth = append(s.auth, u+":"+p)
		s.mu.Unlock()
		if password != "" && (u != user || p != password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="git"`)
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		if strings.HasSuffix(r.URL.Path, "git-upload-pack") && r.Method == "POST" {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			if bytes.Contains(body, []byte("command=fetch")) {
				s.mu.Lock()
				s.packs++
				s.mu.Unlock()
			}
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestCredentials(t *testing.T) {
	const secret = "hunter2-S3CRET"
	srv := newServer(t, newRepo(t), "ann", secret)
	dir := filepath.Join(t.TempDir(), "repos")
	c := open(t, dir)
	ctx := t.Context()
	url := srv.URL + "/r"
	withUser := strings.Replace(url, "http://", "http://ann:"+secret+"@", 1)
	if _, err := c.Fetch(ctx, url, repo.FetchOptions{}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("without credentials: %v", err)
	}
	if _, err := c.Fetch(ctx, strings.Replace(withUser, secret, "wr0ng-S3CRET", 1), repo.FetchOptions{}); !errors.Is(err, warren.ErrDenied) || strings.Contains(err.Error(), "S3CRET") {
		t.Errorf("with a wrong password: %v", err)
	}
	if _, err := c.Fetch(ctx, withUser+"-missing", repo.FetchOptions{}); !errors.Is(err, warren.ErrNotFound) || strings.Contains(err.Error(), "S3CRET") {
		t.Errorf("no such repository: %v", err)
	}
	var said strings.Builder
	r, err := c.Fetch(ctx, withUser, repo.FetchOptions{Progress: func(step, msg string, _, _ int64) { said.WriteString(step + msg) }})
	must(t, err)
	if r.URL != url || strings.Contains(said.String(), "S3CRET") {
		t.Errorf("URL %s, progress %s", r.URL, said.String())
	}
	filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), secret) {
			t.Errorf("%s holds the password", p)
		}
		return nil
	})
	// In the cache it is there for those who may use the cache; whoever may is the engine's matter. A fetch needs them again.
	if _, err := c.Fetch(ctx, url, repo.FetchOptions{Force: true}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("fetch by force without credentials: %v", err)
	}
	// Push.
	first, _, err := c.ResolveRef(ctx, r.ID, "")
	must(t, err)
	runGit(t, r.Dir, "update-ref", "refs/heads/warren/p", first)
	if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/p", RemoteBranch: "warren/p"}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("push without credentials: %v", err)
	}
	_, err = c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/p", RemoteBranch: "warren/p", URL: withUser})
	must(t, err)
	if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/p", RemoteBranch: "x", URL: "https://example.com/r"}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("push elsewhere: %v", err)
	}
	// The host user's credential helper, for operators only; other settings of that user do nothing.
	home := t.TempDir()
	must(t, os.WriteFile(filepath.Join(home, ".gitconfig"), []byte("[credential]\n\thelper = \"!f() { echo username=ann; echo password="+secret+"; }; f\"\n[core]\n\thooksPath = /evil\n\tfsmonitor = /evil\n[alias]\n\tfetch = !false\n"), 0o600))
	t.Setenv("HOME", home)
	t.Setenv("GIT_DIR", "/evil")
	t.Setenv("GIT_EXTERNAL_DIFF", "/evil")
	if _, err := c.Fetch(ctx, url, repo.FetchOptions{Force: true}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("host credentials were used unasked: %v", err)
	}
	_, err = c.Fetch(ctx, url, repo.FetchOptions{Force: true, HostCredentials: true})
	must(t, err)
}

func TestPushConflict(t *testing.T) {
	src := newRepo(t)
	c := open(t, filepath.Join(t.TempDir(), "repos"))
	ctx := t.Context()
	r, err := c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	first, _, err := c.ResolveRef(ctx, r.ID, "")
	must(t, err)
	mine := runGit(t, r.Dir, "commit-tree", "-p", first, "-m", "mine", first+"^{tree}")
	runGit(t, r.Dir, "update-ref", "refs/heads/warren/a", mine)
	runGit(t, src, "branch", "topic")
	theirs := runGit(t, src, "commit-tree", "-p", first, "-m", "theirs", first+"^{tree}")
	runGit(t, src, "update-ref", "refs/heads/topic", theirs)
	for _, force := range []bool{false, true} { // the cache has not seen topic
		if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/a", RemoteBranch: "topic", Force: force}); !errors.Is(err, warren.ErrState) {
			t.Errorf("push over another's commit, force %t: %v", force, err)
		}
	}
	_, err = c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/a", RemoteBranch: "topic"}); !errors.Is(err, warren.ErrState) {
		t.Errorf("push that loses a commit: %v", err)
	}
	_, err = c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/a", RemoteBranch: "topic", Force: true})
	must(t, err)
	if got := runGit(t, src, "rev-parse", "topic"); got != mine {
		t.Errorf("origin has %s", got)
	}
	if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/a", RemoteBranch: "main"}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("push to the branch that is checked out: %v", err)
	}
	if _, err := c.Push(ctx, r.ID, repo.PushOptions{Branch: "warren/none", RemoteBranch: "x"}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("push of nothing: %v", err)
	}
}

// TestImportChecks hands the mirror packs that are not what they should be.
func TestImportChecks(t *testing.T) {
	src := newRepo(t)
	c := open(t, filepath.Join(t.TempDir(), "repos"))
	ctx := t.Context()
	r, err := c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	first, _, err := c.ResolveRef(ctx, r.ID, "")
	must(t, err)
	// A tree with an entry named .git, which git refuses to make, and a commit with it.
	evil := t.TempDir()
	runGit(t, evil, "init", "-q")
	blob := runGit(t, evil, "hash-object", "-w", "--stdin")
	tree := mktree(t, evil, "100644 .git", blob)
	bad := runGit(t, evil, "commit-tree", "-m", "evil", tree)
	pack := packOf(t, evil, bad)
	good := commit(t, src, "good")
	goodPack := packOf(t, src, good)
	for name, tt := range map[string]struct {
		pack   string
		commit repo.Commit
	}{
		"a tree with .git":         {pack, repo.Commit{ID: bad, Branch: "warren/e"}},
		"not a pack":               {"hello", repo.Commit{ID: good, Branch: "warren/e"}},
		"cut short":                {goodPack[:len(goodPack)-30], repo.Commit{ID: good, Branch: "warren/e"}},
		"without the commit":       {goodPack, repo.Commit{ID: strings.Repeat("1", 40), Branch: "warren/e"}},
		"a tree for a commit":      {goodPack, repo.Commit{ID: runGit(t, src, "rev-parse", good+"^{tree}"), Branch: "warren/e"}},
		"branch that is elsewhere": {goodPack, repo.Commit{ID: good, Branch: "warren/e", Old: first}},
		"bad branch":               {goodPack, repo.Commit{ID: good, Branch: "../../x"}},
	} {
		if err := c.Import(ctx, r.ID, strings.NewReader(tt.pack), tt.commit); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, ok, _ := c.Branch(ctx, r.ID, "warren/e"); ok {
		t.Error("a branch was made")
	}
	must(t, c.Import(ctx, r.ID, strings.NewReader(goodPack), repo.Commit{ID: good, Branch: "warren/e"}))
	runGit(t, r.Dir, "fsck", "--strict")
}

func mktree(t testing.TB, dir, entry, blob string) string {
	raw := entry + "\x00"
	for i := 0; i < len(blob); i += 2 {
		var b byte
		for _, c := range blob[i : i+2] {
			b = b<<4 | byte(strings.IndexRune("0123456789abcdef", c))
		}
		raw += string([]byte{b})
	}
	f := filepath.Join(t.TempDir(), "tree")
	must(t, os.WriteFile(f, []byte(raw), 0o644))
	return runGit(t, dir, "hash-object", "-w", "-t", "tree", "--literally", f)
}

func packOf(t testing.TB, dir, commit string) string {
	cmd := exec.Command("git", "pack-objects", "--revs", "--stdout", "-q")
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(commit + "\n")
	out, err := cmd.Output()
	must(t, err)
	return string(out)
}

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// A repository with many packs is merged into one, with all that was in them, and one with few is left alone.
func TestMaintainAll(t *testing.T) {
	src := newRepo(t)
	c := open(t, t.TempDir())
	ctx := t.Context()
	r, err := c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	origin := filepath.Dir(r.Objects)
	packs := func() int {
		list, err := filepath.Glob(filepath.Join(r.Objects, "pack", "*.pack"))
		must(t, err)
		return len(list)
	}
	pack := func() {
		commit(t, src, rand.Text())
		_, err := c.Fetch(ctx, src, repo.FetchOptions{})
		must(t, err)
		runGit(t, origin, "repack", "-q", "-d")
	}
	for packs() < 3 {
		pack()
	}
	lost := strings.Fields(runGit(t, origin, "rev-parse", "refs/remotes/origin/main"))[0]
	c.MaintainAll(ctx)
	if n := packs(); n != 3 {
		t.Errorf("%d packs of 3", n)
	}
	for packs() < 20 {
		pack()
	}
	// What no ref reaches any more may be borrowed.
	runGit(t, src, "reset", "-q", "--hard", "HEAD~18")
	_, err = c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	c.MaintainAll(ctx)
	if n := packs(); n != 1 {
		t.Errorf("%d packs after maintenance, want 1", n)
	}
	runGit(t, origin, "cat-file", "-e", lost)
	must(t, c.Check(ctx, r.ID, lost))
}
