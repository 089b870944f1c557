//go:build linux

package gvisor_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestLife(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	if got := e.run(id, "echo hello; id -u; hostname; cat /etc/hostname; grep MemTotal /proc/meminfo"); got != "hello\n0\nbox\nbox\nMemTotal:         524288 kB" {
		t.Errorf("output %q", got)
	}
	if err := e.d.Create(t.Context(), &driver.Spec{ID: id, Hostname: "x", Root: e.root, Limits: e.spec().Limits}); !errors.Is(err, warren.ErrExists) {
		t.Errorf("second create of an id: %v", err)
	}
	if got := e.state1(id); got != driver.Running {
		t.Errorf("state %q", got)
	}
	for range 2 {
		if err := e.d.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := e.d.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("after delete: %v, %v", list, err)
	}
	if _, err := e.d.Dial(t.Context(), id, warren.GuestPort); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("dial after delete: %v", err)
	}
}

// state1 returns the state of one sandbox, or "".
func (e *env) state1(id warren.SandboxID) driver.State {
	return e.status(id).State
}

func (e *env) status(id warren.SandboxID) driver.Status {
	e.t.Helper()
	list, err := e.d.List(context.Background())
	if err != nil {
		e.t.Fatal(err)
	}
	for _, s := range list {
		if s.ID == id {
			return s
		}
	}
	return driver.Status{}
}

// eventually polls until f returns true.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("timeout: %s", what)
}

// processes returns the sandbox's processes on the host whose first argument is name.
func (e *env) processes(id warren.SandboxID, name string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(b), name) && strings.Contains(string(b), string(id)) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			pids = append(pids, pid)
		}
	}
	return pids
}

func (e *env) keeperPID() int {
	e.t.Helper()
	b, err := os.ReadFile(filepath.Join(e.state, "keeper.pid"))
	if err != nil {
		e.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		e.t.Fatal(err)
	}
	return pid
}

func (e *env) killKeeper() {
	e.t.Helper()
	if err := syscall.Kill(e.keeperPID(), syscall.SIGKILL); err != nil {
		e.t.Fatal(err)
	}
}

func TestReopen(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.run(id, "echo kept >/tmp/file")
	pid := e.keeperPID()
	if err := e.d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.d.List(t.Context()); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("list on a closed driver: %v", err)
	}
	e.open()
	if got := e.run(id, "cat /tmp/file"); got != "kept" {
		t.Errorf("file has %q", got)
	}
	if e.keeperPID() != pid {
		t.Error("the keeper was replaced")
	}
}

func TestKeeperKilled(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.run(id, "echo kept >/tmp/file; sleep 1000 >/dev/null 2>&1 &")
	for range 2 {
		e.killKeeper()
		if got := e.run(id, "cat /tmp/file; pgrep -c sleep"); got != "kept\n1" {
			t.Errorf("after the keeper was killed: %q", got)
		}
	}
	// The new keeper is not the parent of the sandbox, and must see its end all the same.
	boot := e.processes(id, "runsc-sandbox")
	if len(boot) != 1 {
		t.Fatalf("sandbox processes: %v", boot)
	}
	syscall.Kill(boot[0], syscall.SIGKILL)
	eventually(t, "dead", func() bool { return e.state1(id) == driver.Dead })
	// It was watched; whether the reason is known depends on the host's kernel and on who reaps.
	if got := e.status(id).Exit; got.Reason != "killed" && got.Reason != "lost" || strings.Contains(got.Message, "no keeper") {
		t.Errorf("exit %+v", got)
	} else {
		t.Logf("%s: %s", got.Reason, got.Message)
	}
}

func TestKeeperAndSandboxKilled(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	boot := e.processes(id, "runsc-sandbox")
	e.killKeeper()
	for _, pid := range boot {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	st := e.status(id)
	if st.State != driver.Dead || st.Exit == nil || st.Exit.Reason != "lost" || !strings.Contains(st.Exit.Message, "no keeper ran") {
		t.Errorf("status %+v, exit %+v", st, st.Exit)
	}
}

func TestSandboxKilled(t *testing.T) {
	e := newEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := e.d.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	id := e.create(e.spec())
	e.run(id, "true")
	c, err := e.d.Dial(t.Context(), id, warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, pid := range e.processes(id, "runsc-sandbox") {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	select {
	case st := <-events:
		if st.ID != id || st.State != driver.Dead || st.Exit == nil || st.Exit.Reason != "killed" {
			t.Errorf("event %+v, exit %+v", st, st.Exit)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no event")
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
		t.Errorf("connection into a dead sandbox: %d, %v", n, err)
	}
	if st := e.status(id); st.State != driver.Dead || st.Exit == nil || st.Exit.Reason != "killed" {
		t.Errorf("list %+v, exit %+v", st, st.Exit)
	}
	if _, err := e.d.Dial(t.Context(), id, warren.GuestPort); !errors.Is(err, warren.ErrState) {
		t.Errorf("dial: %v", err)
	}
	// The record outlives the keeper.
	e.killKeeper()
	if st := e.status(id); st.State != driver.Dead || st.Exit == nil || st.Exit.Reason != "killed" {
		t.Errorf("list of the next keeper %+v, exit %+v", st, st.Exit)
	}
	cancel()
	for range events {
	}
}

func TestWatchAcrossKeepers(t *testing.T) {
	e := newEnv(t)
	events, err := e.d.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := e.create(e.spec())
	e.killKeeper()
	for _, pid := range e.processes(id, "runsc-sandbox") {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	select {
	case st := <-events:
		if st.ID != id || st.State != driver.Dead {
			t.Errorf("event %+v", st)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no event")
	}
}

func TestGuestExit(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.tryRun(id, "exit-guest 7")
	eventually(t, "dead", func() bool { return e.state1(id) == driver.Dead })
	if got := e.status(id).Exit; got.Reason != "exited" || !strings.Contains(got.Message, "7") {
		t.Errorf("exit %+v", got)
	}
}

func TestGoferKilled(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	for _, pid := range e.processes(id, "runsc-gofer") {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	eventually(t, "dead", func() bool { return e.state1(id) == driver.Dead })
	if got := e.status(id).Exit; got.Reason != "killed" {
		t.Errorf("exit %+v", got)
	}
}

// mount makes a directory on the host and returns it as a mount.
func (e *env) mount(target string, writable bool, owner driver.Owner) driver.Mount {
	e.t.Helper()
	dir := e.t.TempDir()
	f, err := os.Open(dir)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { f.Close() })
	return driver.Mount{Dir: f, Source: dir, Target: target, Writable: writable, Owner: owner}
}

func TestMounts(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	work := e.mount("/workspace", true, driver.Owner{IDBase: driver.DiskIDBase})
	if err := os.Chown(work.Source, driver.DiskIDBase+1000, driver.DiskIDBase+1000); err != nil {
		t.Fatal(err)
	}
	ro := e.mount("/deep/er/data", false, driver.Owner{IDBase: 0})
	if err := os.WriteFile(filepath.Join(ro.Source, "f"), []byte("host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	user := e.mount("/home/user/mine", true, driver.Owner{User: true, UID: 4242, GID: 4343})
	if err := os.Chown(user.Source, 4242, 4343); err != nil {
		t.Fatal(err)
	}
	nested := e.mount("/workspace/deps", false, driver.Owner{})
	spec.Mounts = []driver.Mount{work, ro, user, nested}
	// The path no longer leads to what was opened.
	moved := work.Source + ".moved"
	if err := os.Rename(work.Source, moved); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", work.Source); err != nil {
		t.Fatal(err)
	}
	id := e.create(spec)

	e.run(id, "echo root >/workspace/r; echo user >/workspace/u; chown 1000:1000 /workspace/u; chmod 4755 /workspace/u")
	check := func(name string, uid int, content string) {
		t.Helper()
		b, err := os.ReadFile(name)
		if err != nil || strings.TrimSpace(string(b)) != content {
			t.Errorf("%s on the host: %q, %v", filepath.Base(name), b, err)
			return
		}
		fi, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := int(fi.Sys().(*syscall.Stat_t).Uid); got != uid {
			t.Errorf("%s belongs to %d on the host, want %d", filepath.Base(name), got, uid)
		}
	}
	check(filepath.Join(moved, "r"), driver.DiskIDBase, "root")
	check(filepath.Join(moved, "u"), driver.DiskIDBase+1000, "user")

	if out, err := e.tryRun(id, "cat /deep/er/data/f; stat -c %u /deep/er/data; echo x >/deep/er/data/g"); err == nil || !strings.HasPrefix(out, "host\n0\n") {
		t.Errorf("read-only mount: %q, %v", out, err)
	}
	if _, err := os.Stat(filepath.Join(ro.Source, "g")); err == nil {
		t.Error("a read-only mount was written")
	}
	e.run(id, `test "$(stat -c %u:%g /home/user/mine)" = 1000:1000`)
	e.run(id, "setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'echo me >/home/user/mine/f'")
	check(filepath.Join(user.Source, "f"), 4242, "me")
	e.run(id, "echo root >/home/user/mine/g")
	check(filepath.Join(user.Source, "g"), driver.DiskIDBase, "root") // of no user of the host

	// Durable at once, and for the next sandbox.
	for _, pid := range e.processes(id, "runsc-sandbox") {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	check(filepath.Join(moved, "r"), driver.DiskIDBase, "root")
	next := e.spec()
	next.Mounts = []driver.Mount{work}
	e.create(next)
	if got := e.run(next.ID, "cat /workspace/r; stat -c %u /workspace/u"); got != "root\n1000" {
		t.Errorf("next sandbox sees %q", got)
	}
}

func TestDiskLimit(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	spec.Limits.Disk = 64 << 20
	id := e.create(spec)
	out, err := e.tryRun(id, "dd if=/dev/zero of=/tmp/big bs=1M 2>&1; stat -c %s /tmp/big")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	got, _ := strconv.ParseInt(lines[len(lines)-1], 10, 64)
	// Directories and the copied-up parents use a few pages too.
	if got > spec.Limits.Disk || got < spec.Limits.Disk-1<<20 || !strings.Contains(out, "No space left") {
		t.Errorf("wrote %d of %d: %s", got, spec.Limits.Disk, out)
	}
	st, err := e.d.Stats(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if st.Disk < got || st.Disk > spec.Limits.Disk+1<<20 || st.Memory <= 0 || st.PIDs == 0 || st.CPUTime <= 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestDialPorts(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	if _, err := e.d.Dial(t.Context(), id, 8080); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("dial with nobody listening: %v", err)
	}
	if _, err := exec.LookPath("python3"); err != nil {
		t.Fatal("python3 is needed")
	}
	e.run(id, `cat >/tmp/s.py <<'E'
import socket
s=socket.create_server(('127.0.0.1',8080))
while True:
    c,_=s.accept()
    n=0
    while True:
        b=c.recv(65536)
        if not b: break
        n+=len(b)
    c.sendall(b'got %d\n'%n); c.close()
E
python3 /tmp/s.py >/dev/null 2>&1 & `)
	var c net.Conn
	eventually(t, "the server listens", func() bool {
		var err error
		c, err = e.d.Dial(t.Context(), id, 8080)
		return err == nil
	})
	defer c.Close()
	// Half-close: the answer comes after the end of the question.
	go func() {
		b := make([]byte, 1<<20)
		for range 5 {
			c.Write(b)
		}
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || line != fmt.Sprintf("got %d\n", 5<<20) {
		t.Errorf("answer %q, %v", line, err)
	}
}

// A client that vanishes must not leave the sender inside blocked for ever.
func TestDialAbandoned(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.run(id, `cat >/tmp/s.py <<'E'
import socket,threading
s=socket.create_server(('127.0.0.1',8080))
def serve(c):
    try:
        while True: c.sendall(b'x'*65536)
    except OSError:
        open('/tmp/ended','a').write('e')
while True:
    c,_=s.accept()
    threading.Thread(target=serve,args=(c,)).start()
E
python3 /tmp/s.py >/dev/null 2>&1 & `)
	var c net.Conn
	eventually(t, "the server listens", func() bool {
		var err error
		c, err = e.d.Dial(t.Context(), id, 8080)
		return err == nil
	})
	if _, err := io.ReadFull(c, make([]byte, 100000)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	eventually(t, "the sender sees the end", func() bool {
		out, err := e.tryRun(id, "cat /tmp/ended")
		return err == nil && out == "e"
	})
}

func TestCreateCancelled(t *testing.T) {
	e := newEnv(t)
	for i := range 12 {
		spec := e.spec()
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i*10)*time.Millisecond)
		err := e.d.Create(ctx, spec)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cancelled create: %v", err)
		}
		if st := e.state1(spec.ID); (err == nil) != (st == driver.Running) || err != nil && st != "" {
			t.Errorf("create returned %v, and the sandbox is %q", err, st)
		}
		if err != nil && len(e.processes(spec.ID, "runsc")) > 0 {
			t.Errorf("a cancelled create left processes")
		}
	}
}

func TestKeeperKilledDuringCreate(t *testing.T) {
	e := newEnv(t)
	for i := range 8 {
		spec := e.spec()
		done := make(chan error, 1)
		go func() { done <- e.d.Create(t.Context(), spec) }()
		time.Sleep(time.Duration(i*10) * time.Millisecond)
		e.killKeeper()
		err := <-done
		eventually(t, "a keeper", func() bool { _, err := e.d.List(t.Context()); return err == nil })
		st := e.state1(spec.ID)
		if err != nil && (st != "" || len(e.processes(spec.ID, "runsc")) > 0) {
			t.Errorf("create returned %v, and the sandbox is %q", err, st)
		}
		if err == nil && st != driver.Running {
			t.Errorf("create returned nil, and the sandbox is %q", st)
		}
	}
}

func TestParallel(t *testing.T) {
	e := newEnv(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			spec := e.spec()
			if err := e.d.Create(t.Context(), spec); err != nil {
				t.Error(err)
				return
			}
			if out, err := e.tryRun(spec.ID, "hostname"); err != nil || out != "box" {
				t.Errorf("%q, %v", out, err)
			}
			var dels sync.WaitGroup
			for range 3 {
				dels.Go(func() {
					if err := e.d.Delete(t.Context(), spec.ID); err != nil {
						t.Error(err)
					}
				})
			}
			dels.Wait()
		})
	}
	wg.Wait()
}

func TestBuildReplaced(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	pid := e.keeperPID()
	if err := e.d.Close(); err != nil {
		t.Fatal(err)
	}
	// Another build of the same program: other linker flags give another build id.
	other, err := testenv.BuildRuntime(t.TempDir(), "warren-runtime", "-ldflags", "-s -w -X main.build=other -buildid=other")
	if err != nil {
		t.Fatal(err)
	}
	was := e.opts.RuntimePath
	e.opts.RuntimePath = other
	e.open()
	if e.keeperPID() == pid {
		t.Error("the keeper was not replaced")
	}
	if got := e.run(id, "hostname"); got != "box" {
		t.Errorf("output %q", got)
	}
	e.opts.RuntimePath = was
}

func TestKeeperEndsWhenIdle(t *testing.T) {
	e := newEnv(t)
	if err := e.d.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.opts.KeeperIdle = 200 * time.Millisecond
	e.open()
	id := e.create(e.spec())
	if err := e.d.Shutdown(t.Context()); !errors.Is(err, warren.ErrState) {
		t.Errorf("shutdown with a sandbox: %v", err)
	}
	if err := e.d.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the keeper ends", func() bool {
		_, err := os.Stat(filepath.Join(e.state, "keeper.pid"))
		return os.IsNotExist(err)
	})
	checkResidue(t, e.state)
	e.open()
}

func TestInvalid(t *testing.T) {
	e := newEnv(t)
	for name, change := range map[string]func(*driver.Spec){
		"option":       func(s *driver.Spec) { s.Options = map[string]string{"privileged": "true"} },
		"no layer":     func(s *driver.Spec) { s.Root.Layers = nil },
		"no memory":    func(s *driver.Spec) { s.Limits.Memory = 0 },
		"host name":    func(s *driver.Spec) { s.Hostname = "a\nb" },
		"target":       func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("/a/../b", true, driver.Owner{})} },
		"relative":     func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("a", true, driver.Owner{})} },
		"proc":         func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("/proc/x", true, driver.Owner{})} },
		"guest":        func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("/.warren", true, driver.Owner{})} },
		"over a file":  func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("/etc/passwd", true, driver.Owner{})} },
		"below a file": func(s *driver.Spec) { s.Mounts = []driver.Mount{e.mount("/etc/passwd/x", true, driver.Owner{})} },
		"missing in a bind": func(s *driver.Spec) {
			s.Mounts = []driver.Mount{e.mount("/usr/no-such-directory", false, driver.Owner{})}
		},
		"id":  func(s *driver.Spec) { s.ID = "../x" },
		"env": func(s *driver.Spec) { s.Env = []string{"A=b\x00c"} },
	} {
		spec := e.spec()
		change(spec)
		if err := e.d.Create(t.Context(), spec); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(err.Error(), e.state) {
			t.Errorf("%s: the message has a host path: %v", name, err)
		}
	}
	if list, err := e.d.List(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}

// The engine asks a driver through wrappers before it makes a workspace.
func TestCheckOptions(t *testing.T) {
	type checker interface{ CheckOptions(map[string]string) error }
	c, ok := driver.As[checker](&gvisor.Driver{})
	if !ok {
		t.Fatal("the driver does not judge options")
	}
	if err := c.CheckOptions(nil); err != nil {
		t.Error(err)
	}
	err := c.CheckOptions(map[string]string{"runtime": "runc"})
	if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), `"runtime" is not known to gvisor (known: none)`) {
		t.Errorf("an unknown option: %v", err)
	}
}

func TestCheck(t *testing.T) {
	e := newEnv(t)
	for _, c := range e.d.Check(t.Context()) {
		t.Logf("%s: %s: %s", c.Name, c.Status, c.Message)
		if c.Status == "fail" || c.Status != "ok" && c.Hint == "" {
			t.Errorf("%+v", c)
		}
	}
	if _, err := gvisor.New(gvisor.Options{}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("empty options: %v", err)
	}
}

func TestHide(t *testing.T) {
	e := newEnv(t)
	secret := filepath.Join(t.TempDir(), "opt")
	if err := os.MkdirAll(filepath.Join(secret, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"file", "dir/inner", "shown"} {
		if err := os.WriteFile(filepath.Join(secret, f), []byte("canary"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	spec := e.spec()
	spec.Root.Binds = append(spec.Root.Binds,
		driver.Bind{Source: secret, Target: "/opt"},
		driver.Bind{Target: "/opt/file", Hide: true},
		driver.Bind{Target: "/opt/dir", Hide: true},
		driver.Bind{Target: "/opt/none", Hide: true},
		driver.Bind{Source: filepath.Join(secret, "shown"), Target: "/etc/shown"},
	)
	id := e.create(spec)
	if got := e.run(id, "cat /opt/file; ls /opt/dir; cat /opt/shown /etc/shown"); got != "canarycanary" {
		t.Errorf("output %q", got)
	}
	// Writes go to the overlay and never to the host.
	e.run(id, "echo changed >/opt/shown; mkdir /opt/new; rm -rf /usr/bin")
	if b, _ := os.ReadFile(filepath.Join(secret, "shown")); string(b) != "canary" {
		t.Errorf("the host's file has %q", b)
	}
	if _, err := os.Stat("/usr/bin/env"); err != nil {
		t.Fatal(err)
	}
}

func TestLayers(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	base := t.TempDir()
	layer := func(name string, files map[string]string, whiteouts ...string) driver.Layer {
		dir := filepath.Join(base, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for f, content := range files {
			p := filepath.Join(dir, f)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if to, ok := strings.CutPrefix(content, "->"); ok {
				if err := os.Symlink(to, p); err != nil {
					t.Fatal(err)
				}
			} else if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		for _, w := range whiteouts {
			p := filepath.Join(dir, w)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mknod(p, syscall.S_IFCHR, 0); err != nil {
				t.Fatal(err)
			}
		}
		err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Lchown(p, driver.DiskIDBase, driver.DiskIDBase)
		})
		if err != nil {
			t.Fatal(err)
		}
		return driver.Layer{Dir: dir, IDBase: driver.DiskIDBase}
	}
	spec.Root.Layers = append(spec.Root.Layers,
		layer("one", map[string]string{"data/a": "1", "data/b": "1", "gone/x": "1", "var/lock": "->/run/lock", "esc": "->/../../etc"}),
		layer("two", map[string]string{"data/b": "2"}, "gone"),
	)
	for i := range 40 {
		spec.Root.Layers = append(spec.Root.Layers, layer(fmt.Sprint("more", i), map[string]string{"data/n": strconv.Itoa(i)}))
	}
	spec.Mounts = []driver.Mount{
		e.mount("/var/lock/x", true, driver.Owner{IDBase: driver.DiskIDBase}),
		e.mount("/esc/inside", true, driver.Owner{IDBase: driver.DiskIDBase}),
	}
	id := e.create(spec)
	if got := e.run(id, "cat /data/a /data/b /data/n; ls -d /gone /run/lock/x /etc/inside 2>/dev/null; readlink /var/lock"); got != "1239/etc/inside\n/run/lock/x\n/run/lock" {
		t.Errorf("output %q", got)
	}
}

// TestMany has the keeper hold some hundred descriptors, among them the numbers that gVisor's start moves its streams to.
func TestMany(t *testing.T) {
	e := newEnv(t)
	var ids []warren.SandboxID
	for range 45 {
		ids = append(ids, e.create(e.spec()))
	}
	if got := e.run(ids[len(ids)-1], "hostname"); got != "box" {
		t.Errorf("output %q", got)
	}
	for _, id := range ids {
		if err := e.d.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReattachedChannel asks one thing after the other of guests whose keeper is not the one that started them: their channels are connections
// that gVisor forwards, where a word must not lie until another comes. It takes a busy host to lie.
func TestReattachedChannel(t *testing.T) {
	e := newGuestEnv(t)
	ids := make([]warren.SandboxID, 6)
	for i := range ids {
		ids[i] = e.create(e.spec())
	}
	e.killKeeper()
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			for range 500 {
				e.do(id, "GET", "/health", "", 204)
			}
		})
	}
	wg.Wait()
}
