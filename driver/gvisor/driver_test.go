//go:build linux

package gvisor_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// binaries are built once for all tests.
var binaries = sync.OnceValues(func() (dir string, err error) {
	dir, err = os.MkdirTemp("", "warren-gvisor-test-")
	if err != nil {
		return "", err
	}
	if _, err := testenv.BuildRuntime(dir, "warren-runtime"); err != nil {
		return dir, err
	}
	_, err = testenv.Build(dir, "guest", "./driver/gvisor/internal/testguest")
	return dir, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := binaries(); err == nil {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// env is a driver on a state directory of its own, with a root like that of the host image.
type env struct {
	t     testing.TB
	state string
	opts  gvisor.Options
	root  driver.Root
	d     *gvisor.Driver
}

func newEnv(t testing.TB) *env {
	t.Helper()
	testenv.NeedsRoot(t)
	bin, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, state: filepath.Join(t.TempDir(), "gvisor")}
	e.opts = gvisor.Options{
		StateDir: e.state, RuntimePath: filepath.Join(bin, "warren-runtime"), GuestPath: filepath.Join(bin, "guest"),
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
		Debug:  os.Getenv("GVISOR_DEBUG") != "",
	}
	e.root = hostRoot(t)
	e.open()
	t.Cleanup(e.close)
	return e
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) { w.t.Logf("%s", b); return len(b), nil }

func (e *env) open() {
	e.t.Helper()
	d, err := gvisor.New(e.opts)
	if err != nil {
		e.t.Fatal(err)
	}
	e.d = d
}

// close deletes everything, ends the keeper and looks for residue.
func (e *env) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	list, err := e.d.List(ctx)
	if err != nil {
		e.t.Error(err)
	}
	for _, s := range list {
		if err := e.d.Delete(ctx, s.ID); err != nil {
			e.t.Error(err)
		}
	}
	if err := e.d.Shutdown(ctx); err != nil {
		e.t.Error(err)
	}
	if e.t.Failed() || os.Getenv("GVISOR_LOG") != "" {
		if b, err := os.ReadFile(filepath.Join(e.state, "keeper.log")); err == nil {
			e.t.Logf("keeper.log:\n%s", b)
		}
	}
	checkResidue(e.t, e.state)
}

// checkResidue looks for what a keeper and its sandboxes could leave.
func checkResidue(t testing.TB, state string) {
	t.Helper()
	left, err := os.ReadDir(state)
	if err != nil {
		t.Error(err)
	}
	for _, f := range left {
		if f.Name() != "keeper.log" && f.Name() != "keeper.lock" {
			t.Errorf("left in the state directory: %s", f.Name())
		}
	}
	if b, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(b), state) {
		t.Errorf("left in the host's mount table:\n%s", b)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), state) {
			t.Errorf("left running: %s %q", p, b)
		}
	}
	filepath.WalkDir("/sys/fs/cgroup", func(p string, f os.DirEntry, err error) error {
		if err == nil && f.IsDir() && strings.HasPrefix(f.Name(), "warren-"+instance(t, state)) {
			t.Errorf("left control group: %s", p)
		}
		return nil
	})
}

// hostRoot is a root of the host's /usr over a small skeleton.
func hostRoot(t testing.TB) driver.Root {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "skeleton")
	own := func(p string, id int) {
		if err := os.Lchown(p, driver.DiskIDBase+id, driver.DiskIDBase+id); err != nil {
			t.Fatal(err)
		}
	}
	mkdir := func(p string, id int, mode os.FileMode) {
		p = filepath.Join(dir, p)
		if err := os.MkdirAll(p, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		own(p, id)
	}
	mkdir("", 0, 0o755)
	for _, d := range []string{"etc", "usr", "home", "var", "opt", "root"} {
		mkdir(d, 0, 0o755)
	}
	mkdir("home/user", driver.SandboxUID, 0o755)
	write := func(name, content string) {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		own(p, 0)
	}
	write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
	write("etc/group", "root:x:0:\nuser:x:1000:\n")
	for _, l := range []string{"bin", "sbin", "lib", "lib64"} {
		if fi, err := os.Lstat("/" + l); err == nil && fi.Mode()&os.ModeSymlink != 0 {
			os.Symlink("usr/"+l, filepath.Join(dir, l))
			own(filepath.Join(dir, l), 0)
		}
	}
	return driver.Root{
		Digest: "host:test",
		Layers: []driver.Layer{{Dir: dir, IDBase: driver.DiskIDBase}},
		Binds:  []driver.Bind{{Source: "/usr", Target: "/usr"}},
	}
}

func newID() warren.SandboxID {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := []byte("s")
	for range 19 {
		b = append(b, letters[rand.IntN(len(letters))])
	}
	return warren.SandboxID(b)
}

func (e *env) spec() *driver.Spec {
	return &driver.Spec{
		ID: newID(), Hostname: "box", Root: e.root,
		Limits: driver.Limits{CPUMillis: 2000, Memory: 512 << 20, Disk: 256 << 20, PIDs: 256},
	}
}

func (e *env) create(spec *driver.Spec) warren.SandboxID {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := e.d.Create(ctx, spec); err != nil {
		e.t.Fatal(err)
	}
	return spec.ID
}

func (e *env) client(id warren.SandboxID) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return e.d.Dial(ctx, id, warren.GuestPort)
		},
	}}
}

// run runs a shell script as root inside and returns its output without the final newline.
func (e *env) run(id warren.SandboxID, script string) string {
	e.t.Helper()
	out, err := e.tryRun(id, script)
	if err != nil {
		e.t.Fatalf("run %q: %v", script, err)
	}
	return out
}

func (e *env) tryRun(id warren.SandboxID, script string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://guest/run", strings.NewReader(script))
	if err != nil {
		return "", err
	}
	resp, err := e.client(id).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	out := strings.TrimSuffix(string(b), "\n")
	if code := resp.Header.Get("Exit"); code != "0" {
		return out, fmt.Errorf("exit %s: %s", code, out)
	}
	return out, nil
}
