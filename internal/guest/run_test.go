package guest_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/hashicorp/yamux"

	"github.com/warren-sandbox/warren/internal/guest"
	"github.com/warren-sandbox/warren/internal/guest/channel"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/proto/e2b/process"
)

const (
	mostBytes  = 8 << 20
	mostMemory = 8 << 20
)

// startBinary runs the guest's binary with a channel on descriptor 3 and returns the host's end.
func startBinary(t *testing.T, env ...string) (*exec.Cmd, *yamux.Session) {
	t.Helper()
	bin := testenv.NeedsBinary(t, "warren-guest")
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "host")
	cmd := exec.Command(bin)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "WARREN_CHANNEL_FD=3", "WARREN_LISTEN=none", "WARREN_LOG_DIR=" + t.TempDir(),
		"WARREN_USER=" + currentUser()}, env...)
	cmd.ExtraFiles = []*os.File{theirs}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the guest said: %s", stderr.String())
		}
	})
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
	session, err := yamux.Client(conn, channel.YamuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return cmd, session
}

func over(session *yamux.Session) *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		st, answer, err := dial(session, header(guest.Port))
		if err == nil && answer != channel.Connected {
			err = fmt.Errorf("answer %d", answer)
		}
		return st, err
	}}}
}

// statusField returns a line of /proc/PID/status in bytes.
func statusField(t *testing.T, pid int, name string) int {
	t.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), name+":")
	n, _ := strconv.Atoi(strings.Fields(rest)[0])
	return n << 10
}

func TestBinary(t *testing.T) {
	bin, err := testenv.Build(t.TempDir(), "warren-guest", "./cmd/warren-guest")
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the binary has %d bytes", st.Size())
	if st.Size() > mostBytes {
		t.Errorf("the binary has %d bytes, at most %d", st.Size(), mostBytes)
	}
	deps := exec.Command("go", "list", "-deps", "./cmd/warren-guest")
	deps.Dir = testenv.Repo(t)
	out, err := deps.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"google.golang.org/protobuf", "connectrpc.com/connect", "os/exec"} {
		if strings.Contains(string(out), bad+"\n") {
			t.Errorf("the guest imports %s", bad)
		}
	}
}

func TestMemoryWhenIdle(t *testing.T) {
	cmd, session := startBinary(t)
	client := over(session)
	resp, err := client.Post("http://guest/init", "application/json", strings.NewReader(`{}`))
	if err != nil || resp.StatusCode != 204 {
		t.Fatalf("%v %v", resp, err)
	}
	c := newClients(client, "http://guest")
	t.Logf("at the start: anonymous %d, resident %d bytes", statusField(t, cmd.Process.Pid, "RssAnon"), statusField(t, cmd.Process.Pid, "VmRSS"))
	// A burst of work, after which the memory goes back.
	for range 20 {
		if o := run(t, c, shell("seq 1 200000")); o.err != nil {
			t.Fatal(o.err)
		}
	}
	until(t, "the guest is small again", func() bool { return statusField(t, cmd.Process.Pid, "RssAnon") <= mostMemory })
	t.Logf("after a burst: anonymous %d, resident %d bytes, %d threads", statusField(t, cmd.Process.Pid, "RssAnon"), statusField(t, cmd.Process.Pid, "VmRSS"), statusField(t, cmd.Process.Pid, "Threads")>>10)
}

func TestSecretsOfTheGuest(t *testing.T) {
	cmd, session := startBinary(t, "WARREN_CHANNEL_TOKEN=very-secret-token", "OTHER=kept")
	c := newClients(over(session), "http://guest")
	o := run(t, c, shell("env"))
	if o.err != nil || strings.Contains(o.stdout, "WARREN_CHANNEL") || !strings.Contains(o.stdout, "OTHER=kept\n") {
		t.Errorf("%+v", o)
	}
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/environ")
	if err == nil && bytes.Contains(environ, []byte("very-secret-token")) {
		t.Error("the token stands in /proc/PID/environ")
	}
	st, err := os.Stat("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 && st.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Error("the guest is dumpable")
	}
}

func TestEndOfTheGuest(t *testing.T) {
	cmd, session := startBinary(t)
	c := newClients(over(session), "http://guest")
	pid, _ := start(t, c, shell("sleep 1000"))
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	until(t, "the process has ended with the guest", func() bool {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/stat")
		return err != nil || strings.Contains(string(data), ") Z ")
	})
}

func TestWrongSettings(t *testing.T) {
	bin := testenv.NeedsBinary(t, "warren-guest")
	for _, env := range []string{"WARREN_CHANNEL_FD=1", "WARREN_CHANNEL_FD=x", "WARREN_CHANNEL_FD=77", "WARREN_LISTEN=nonsense", "WARREN_CHANNEL_SOCKET=/no/such/dir/s"} {
		cmd := exec.Command(bin)
		cmd.Env = []string{env, "WARREN_LOG_DIR=" + t.TempDir()}
		if env != "WARREN_LISTEN=nonsense" {
			cmd.Env = append(cmd.Env, "WARREN_LISTEN=none")
		}
		if out, err := cmd.CombinedOutput(); err == nil || !strings.HasPrefix(string(out), "warren-guest: ") {
			t.Errorf("%s: %v %q", env, err, out)
		}
	}
}

func TestChannelSocket(t *testing.T) {
	bin := testenv.NeedsBinary(t, "warren-guest")
	path := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command(bin)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "WARREN_CHANNEL_SOCKET=" + path, "WARREN_LISTEN=none", "WARREN_LOG_DIR=" + t.TempDir(), "WARREN_USER=" + currentUser()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	var conn net.Conn
	until(t, "the socket", func() (ok bool) {
		var err error
		conn, err = net.Dial("unix", path)
		return err == nil
	})
	session, err := yamux.Client(conn, channel.YamuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	resp, err := over(session).Post("http://guest/init", "application/json", strings.NewReader(`{}`))
	if err != nil || resp.StatusCode != 204 {
		t.Errorf("%v %v", resp, err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}
}

// TestOutOfMemory asks the guest, as the host does, to kill the largest process, in a pid namespace so that it has
// no other to choose.
func TestOutOfMemory(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTool(t, "unshare", "python3")
	testenv.NeedsMountNamespace(t)
	bin := testenv.NeedsBinary(t, "warren-guest")
	path := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", bin)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "WARREN_CHANNEL_SOCKET=" + path, "WARREN_LISTEN=none", "WARREN_LOG_DIR=" + t.TempDir(), "WARREN_USER=root"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	var conn net.Conn
	until(t, "the socket", func() (ok bool) {
		var err error
		conn, err = net.Dial("unix", path)
		return err == nil
	})
	session, err := yamux.Client(conn, channel.YamuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	client := over(session)
	post := func(path, body string) int {
		resp, err := client.Post("http://guest"+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode
	}
	if code := post("/warren/oom", ""); code != http.StatusConflict {
		t.Errorf("nothing to kill: %d", code)
	}
	if code := post("/warren/quiesce", ""); code != 204 {
		t.Errorf("quiesce: %d", code)
	}
	c := newClients(client, "http://guest")
	const hog = `import time; x = b"x" * (60 << 20); print("ready", flush=True); time.sleep(1000)`
	t.Run("the process itself", func(t *testing.T) {
		_, st := start(t, c, &process.StartRequest{Process: &process.ProcessConfig{Cmd: "python3", Args: []string{"-c", hog}}})
		if !st.Receive() {
			t.Fatal(st.Err())
		}
		if code := post("/init", `{"memoryLimitBytes":536870912}`); code != 204 {
			t.Fatal(code)
		}
		if code := post("/warren/oom", ""); code != 204 {
			t.Fatal(code)
		}
		if o := rest(t, st); o.end.GetStatus() != "killed: out of memory (limit 512 MiB)" || o.end.GetError() != o.end.GetStatus() || o.end.GetExitCode() != -1 {
			t.Errorf("%+v", o)
		}
	})
	t.Run("its child", func(t *testing.T) {
		_, st := start(t, c, shell("python3 -c '"+hog+"'; echo the shell goes on: $?; exit 5"))
		if !st.Receive() {
			t.Fatal(st.Err())
		}
		// The guard finds the limit by itself.
		if code := post("/init", `{"memoryLimitBytes":52428800}`); code != 204 {
			t.Fatal(code)
		}
		o := rest(t, st)
		if o.end.GetStatus() != "exit status 5" || o.stdout != "the shell goes on: 137\n" || !strings.Contains(o.stderr, "killed: out of memory (limit 50 MiB): python3 (pid ") {
			t.Errorf("%+v", o)
		}
	})
	t.Run("orphans are reaped", func(t *testing.T) {
		if o := run(t, c, shell("(sleep 0.05 &) ; (sh -c : &)")); o.err != nil {
			t.Fatal(o.err)
		}
		until(t, "no zombie is left", func() bool {
			o := run(t, c, shell("ps -eo stat= | grep -c ^Z"))
			return strings.TrimSpace(o.stdout) == "0"
		})
	})
	if _, err := c.process.List(testContext(t), connect.NewRequest(&process.ListRequest{})); err != nil {
		t.Error(err)
	}
}

func BenchmarkTrue(b *testing.B) {
	s := newSandbox(b)
	c := newClients(http.DefaultClient, "http://"+s.addr)
	req := &process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/true", Cwd: ptr("/")}, Stdin: ptr(false)}
	for b.Loop() {
		if o := run(b, c, req); o.err != nil || o.end.GetExitCode() != 0 {
			b.Fatalf("%+v", o)
		}
	}
}

// BenchmarkStream reads the stream as bytes: a client's JSON decoder would be most of the time.
func BenchmarkStream(b *testing.B) {
	s := newSandbox(b)
	const size = 64 << 20
	b.SetBytes(size)
	body := []byte(`{"process":{"cmd":"head","args":["-c","67108864","/dev/zero"]},"stdin":false}`)
	frame := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
	for b.Loop() {
		resp, err := http.Post(s.url("/process.Process/Start"), "application/connect+json", bytes.NewReader(frame))
		if err != nil {
			b.Fatal(err)
		}
		n, err := io.Copy(io.Discard, resp.Body)
		if err != nil || n < size*4/3 {
			b.Fatal(n, err)
		}
		resp.Body.Close()
	}
}

func BenchmarkFiles(b *testing.B) {
	s := newSandbox(b)
	const size = 64 << 20
	url := s.url("/files?path=" + b.TempDir() + "/f")
	data := make([]byte, size)
	b.Run("up", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			if resp, body := fetch(b, "POST", url, bytes.NewReader(data), "Content-Type", "application/octet-stream"); resp.StatusCode != 200 {
				b.Fatal(body)
			}
		}
	})
	b.Run("down", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			resp, err := http.Get(url)
			if err != nil {
				b.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
				b.Fatal(n, err)
			}
			resp.Body.Close()
		}
	})
}
