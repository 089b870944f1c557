package warren_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/server/servertest"
)

func newSandbox(t testing.TB) (*servertest.Server, *warren.Sandbox) {
	t.Helper()
	s := servertest.New(t)
	return s, s.Sandbox(warren.Spec{})
}

func TestCmd(t *testing.T) {
	_, sb := newSandbox(t)
	dir := t.TempDir()
	for _, test := range []struct {
		name           string
		cmd            *warren.Cmd
		set            func(*warren.Cmd)
		stdout, stderr string
		code           int
	}{
		{name: "true", cmd: sb.Command("true")},
		{name: "output", cmd: sb.Command("echo", "a b", "c"), stdout: "a b c\n"},
		{name: "both streams", cmd: sb.Command("sh", "-c", "echo out; echo err >&2"), stdout: "out\n", stderr: "err\n"},
		{name: "exit code", cmd: sb.Command("sh", "-c", "echo x; exit 7"), stdout: "x\n", code: 7},
		{name: "env", cmd: sb.Command("sh", "-c", "echo $A$B"), set: func(c *warren.Cmd) { c.Env = []string{"A=1", "B=x=y", "A=2"} }, stdout: "2x=y\n"},
		{name: "dir", cmd: sb.Command("pwd"), set: func(c *warren.Cmd) { c.Dir = dir }, stdout: dir + "\n"},
		{name: "stdin", cmd: sb.Command("cat"), set: func(c *warren.Cmd) { c.Stdin = strings.NewReader("in put") }, stdout: "in put"},
		{name: "no stdin", cmd: sb.Command("cat")},
		{name: "arguments are not parsed again", cmd: sb.Command("printf", "%s|", "$HOME", "a;b", "-n", ""), stdout: "$HOME|a;b|-n||"},
		{name: "terminal", cmd: sb.Command("sh", "-c", "tty >/dev/null && stty size"), set: func(c *warren.Cmd) { c.PTY = &warren.Size{Cols: 97, Rows: 31} }, stdout: "31 97\r\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			test.cmd.Stdout, test.cmd.Stderr = &stdout, &stderr
			if test.set != nil {
				test.set(test.cmd)
			}
			err := test.cmd.Run(t.Context())
			var ee *warren.ExitError
			if test.code == 0 && err != nil || test.code != 0 && !errors.As(err, &ee) {
				t.Fatalf("Run: %v", err)
			}
			if got := test.cmd.ProcessState.ExitCode(); got != test.code {
				t.Errorf("exit code %d, want %d", got, test.code)
			}
			if stdout.String() != test.stdout || stderr.String() != test.stderr {
				t.Errorf("stdout %q, stderr %q; want %q, %q", stdout.String(), stderr.String(), test.stdout, test.stderr)
			}
			if test.cmd.Process.Pid <= 0 || test.cmd.ProcessState.Pid() != test.cmd.Process.Pid {
				t.Errorf("pid %d, of the state %d", test.cmd.Process.Pid, test.cmd.ProcessState.Pid())
			}
		})
	}
}

func TestCmdErrors(t *testing.T) {
	s, sb := newSandbox(t)
	gone := s.Client().Ref("snothinghere00000000")
	for _, test := range []struct {
		name string
		cmd  *warren.Cmd
		set  func(*warren.Cmd)
		want error
	}{
		{"no such program", sb.Command("/nonexistent/program"), nil, fs.ErrNotExist},
		{"no such program in PATH", sb.Command("no-such-program-anywhere"), nil, fs.ErrNotExist},
		{"not executable", sb.Command("/etc/passwd"), nil, fs.ErrPermission},
		{"a directory", sb.Command("/etc"), nil, fs.ErrPermission},
		{"empty", sb.Command(""), nil, warren.ErrInvalid},
		{"zero byte", sb.Command("echo", "a\x00b"), nil, warren.ErrInvalid},
		{"environment without =", sb.Command("true"), func(c *warren.Cmd) { c.Env = []string{"X"} }, warren.ErrInvalid},
		{"environment that a sandbox refuses", sb.Command("true"), func(c *warren.Cmd) { c.Env = []string{"1A=x"} }, warren.ErrInvalid},
		{"environment that is no text", sb.Command("true"), func(c *warren.Cmd) { c.Env = []string{"A=\xff"} }, warren.ErrInvalid},
		{"no such directory", sb.Command("true"), func(c *warren.Cmd) { c.Dir = "/nonexistent/dir" }, warren.ErrInvalid},
		{"no such user", sb.Command("true"), func(c *warren.Cmd) { c.User = "nobody-here" }, warren.ErrDenied},
		{"no such sandbox", gone.Command("true"), nil, warren.ErrNotFound},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.set != nil {
				test.set(test.cmd)
			}
			if err := test.cmd.Run(t.Context()); !errors.Is(err, test.want) {
				t.Errorf("Run: %v; want %v", err, test.want)
			}
		})
	}
	cmd := sb.Command("true")
	if err := cmd.Wait(); err == nil {
		t.Error("Wait before Start succeeded")
	}
	if err := cmd.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if cmd.Start(t.Context()) == nil || cmd.Wait() == nil {
		t.Error("a Cmd can be used twice")
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := sb.Command("true").Run(canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("Run with an ended context: %v", err)
	}
}

func TestCmdOutput(t *testing.T) {
	_, sb := newSandbox(t)
	out, err := sb.Command("sh", "-c", "echo out; echo why >&2; exit 3").Output(t.Context())
	var ee *warren.ExitError
	if !errors.As(err, &ee) || string(ee.Stderr) != "why\n" || string(out) != "out\n" || err.Error() != "exit status 3" {
		t.Errorf("Output = %q, %v (%+v)", out, err, ee)
	}
	out, err = sb.Command("sh", "-c", "echo a; echo b >&2").CombinedOutput(t.Context())
	if err != nil || len(out) != 4 {
		t.Errorf("CombinedOutput = %q, %v", out, err)
	}
	out, err = sb.Command("sh", "-c", "yes 0123456789 | head -c 200000 >&2; exit 1").Output(t.Context())
	if !errors.As(err, &ee) || len(ee.Stderr) < 60_000 || len(ee.Stderr) > 70_000 || !bytes.Contains(ee.Stderr, []byte("left out")) {
		t.Errorf("of a long standard error %d bytes are kept (%q, %v)", len(ee.Stderr), out, err)
	}
}

// TestCmdLarge sends more than any buffer holds through a command.
func TestCmdLarge(t *testing.T) {
	_, sb := newSandbox(t)
	data := make([]byte, 9<<20)
	rand.Read(data)
	in, out := sha256.Sum256(data), sha256.New()
	cmd := sb.Command("cat")
	cmd.Stdin, cmd.Stdout = bytes.NewReader(data), out
	if err := cmd.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := out.Sum(nil); !bytes.Equal(got, in[:]) {
		t.Error("what came out of cat is not what went in")
	}
}

func TestCmdPipes(t *testing.T) {
	_, sb := newSandbox(t)
	cmd := sb.Command("sh", "-c", "read a; echo got $a; echo problem >&2; read b; echo got $b")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	io.WriteString(in, "one\n")
	buf := make([]byte, 100)
	if n, err := out.Read(buf); err != nil || string(buf[:n]) != "got one\n" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	io.WriteString(in, "two\n")
	in.Close()
	if rest, err := io.ReadAll(out); err != nil || string(rest) != "got two\n" {
		t.Errorf("read %q, %v", rest, err)
	}
	if rest, err := io.ReadAll(errs); err != nil || string(rest) != "problem\n" {
		t.Errorf("read %q, %v", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestCmdPipeLeftOpen has commands end whose input is open, and waits only when all of that is over: they have succeeded.
func TestCmdPipeLeftOpen(t *testing.T) {
	_, sb := newSandbox(t)
	for range 10 {
		cmd := sb.Command("true")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = io.WriteString(in, "x") // until the end is noticed
		}
		time.Sleep(10 * time.Millisecond)
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCmdContext(t *testing.T) {
	_, sb := newSandbox(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	cmd := sb.Command("sh", "-c", "echo started; sleep 600; echo not reached")
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run(ctx)
	var ee *warren.ExitError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &ee) || ee.ExitCode() != -1 || out.String() != "started\n" {
		t.Errorf("Run: %v, stdout %q", err, out.String())
	}
	list, err := sb.Processes(t.Context(), false)
	if err != nil || slices.ContainsFunc(list, func(p warren.ProcessInfo) bool { return p.PID == cmd.Process.Pid }) {
		t.Errorf("the process still runs: %v, %v", list, err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	cmd = sb.Command("sh", "-c", "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.02; done")
	cmd.Cancel = func() error { return cmd.Process.Signal(context.Background(), syscall.SIGTERM) }
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(ctx); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 6)
	io.ReadFull(stdout, buf)
	cancel()
	rest, _ := io.ReadAll(stdout)
	if err := cmd.Wait(); !errors.As(err, &ee) || ee.ExitCode() != 5 || string(rest) != "bye\n" {
		t.Errorf("Wait after Cancel: %v, %q", err, rest)
	}

	ctx, cancel = context.WithCancel(t.Context())
	cmd = sb.Command("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.02; done")
	cmd.Cancel = func() error { return cmd.Process.Signal(context.Background(), syscall.SIGTERM) }
	cmd.WaitDelay = 50 * time.Millisecond
	stdout, _ = cmd.StdoutPipe()
	if err := cmd.Start(ctx); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(stdout, buf)
	cancel()
	if err := cmd.Wait(); !errors.As(err, &ee) || ee.ExitCode() != -1 || !errors.Is(err, context.Canceled) {
		t.Errorf("Wait after WaitDelay: %v", err)
	}
}

func TestCmdSignals(t *testing.T) {
	_, sb := newSandbox(t)
	cmd := sb.Command("sleep", "600")
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(t.Context(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	var ee *warren.ExitError
	if err := cmd.Wait(); !errors.As(err, &ee) || ee.Exited() || !strings.Contains(err.Error(), "user defined signal 1") {
		t.Errorf("Wait: %v", err)
	}
	if err := cmd.Process.Kill(t.Context()); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Kill of an ended process: %v", err)
	}
}

// failingWriter takes one write.
type failingWriter struct{ n int }

func (w *failingWriter) Write(b []byte) (int, error) {
	if w.n++; w.n > 1 {
		return 0, io.ErrShortBuffer
	}
	return len(b), nil
}

func TestCmdWriterFails(t *testing.T) {
	_, sb := newSandbox(t)
	cmd := sb.Command("sh", "-c", "while :; do echo x; sleep 0.01; done")
	cmd.Stdout = new(failingWriter)
	err := cmd.Run(t.Context())
	var ee *warren.ExitError
	if !errors.Is(err, io.ErrShortBuffer) || !errors.As(err, &ee) {
		t.Errorf("Run: %v; want the writer's error and the process ended", err)
	}
}

// TestCmdRestart restarts the server again and again under a command that counts, and reads each number once.
func TestCmdRestart(t *testing.T) {
	s, sb := newSandbox(t)
	const n = 3000
	cmd := sb.Command("sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do i=$((i+1)); echo $i; [ $((i%%10)) = 0 ] && sleep 0.005; done; exit 9", n))
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		time.Sleep(100 * time.Millisecond)
		s.Restart(50 * time.Millisecond)
	}
	var ee *warren.ExitError
	if err := cmd.Wait(); !errors.As(err, &ee) || ee.ExitCode() != 9 {
		t.Fatalf("Wait: %v", err)
	}
	var want strings.Builder
	for i := range n {
		fmt.Fprintln(&want, i+1)
	}
	if out.String() != want.String() {
		t.Errorf("got %d bytes of output, want %d, each once and in order", out.Len(), want.Len())
	}
}

// TestCmdRestartBeforeStart begins a command while no server answers.
func TestCmdRestartBeforeStart(t *testing.T) {
	s, sb := newSandbox(t)
	s.Stop()
	time.AfterFunc(200*time.Millisecond, func() { s.Restart(0) })
	out, err := sb.Command("echo", "hello").Output(t.Context())
	if err != nil || string(out) != "hello\n" {
		t.Errorf("Output = %q, %v", out, err)
	}
}

func TestCmdSandboxDies(t *testing.T) {
	s, sb := newSandbox(t)
	cmd := sb.Command("sh", "-c", "echo started; sleep 600")
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := s.Sandbox(warren.Spec{}) // the same guest
	defer func() { other.FindProcess(cmd.Process.Pid).Kill(t.Context()) }()
	io.ReadFull(stdout, make([]byte, 8))
	s.Engine.Kill(sb.ID)
	if err := cmd.Wait(); !errors.Is(err, warren.ErrState) {
		t.Errorf("Wait: %v; want ErrState", err)
	}
	if err := sb.Command("true").Run(t.Context()); !errors.Is(err, warren.ErrState) {
		t.Errorf("Run in a failed sandbox: %v", err)
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := sb.Command("true").Run(t.Context()); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Run in a deleted sandbox: %v", err)
	}
}

func TestAttach(t *testing.T) {
	_, sb := newSandbox(t)
	cmd := sb.Command("sh", "-c", "echo first; read x; echo got $x; exit 4")
	cmd.Tag = "attach-test-" + hex.EncodeToString([]byte(t.Name()))
	in, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(stdout, make([]byte, 6))
	cmd.Detach()
	if err := cmd.Wait(); err != nil || cmd.ProcessState != nil {
		t.Errorf("Wait after Detach: %v, %v", err, cmd.ProcessState)
	}
	in.Close()

	// What is there so far.
	var log bytes.Buffer
	a, err := sb.Attach(t.Context(), warren.AttachOptions{Tag: cmd.Tag, NoFollow: true, Stdout: &log})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Wait(); err != nil || log.String() != "first\n" || a.ProcessState != nil {
		t.Errorf("log: %q, %v, %v", log.String(), err, a.ProcessState)
	}

	// From the middle, by pid, and with input.
	var out bytes.Buffer
	a, err = sb.Attach(t.Context(), warren.AttachOptions{PID: cmd.Process.Pid, From: 2, Stdout: &out, Stdin: strings.NewReader("word\n")})
	if err != nil {
		t.Fatal(err)
	}
	var ee *warren.ExitError
	if err := a.Wait(); !errors.As(err, &ee) || ee.ExitCode() != 4 || out.String() != "rst\ngot word\n" {
		t.Errorf("attached: %q, %v", out.String(), err)
	}
	if a.Path != "sh" || a.Tag != cmd.Tag || len(a.Args) != 3 {
		t.Errorf("attached to %q %q", a.Path, a.Args)
	}

	// Ended processes keep their output and their end.
	out.Reset()
	a, err = sb.Attach(t.Context(), warren.AttachOptions{Tag: cmd.Tag, Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Wait(); !errors.As(err, &ee) || out.String() != "first\ngot word\n" {
		t.Errorf("after the end: %q, %v", out.String(), err)
	}
	list, err := sb.Processes(t.Context(), true)
	if err != nil || !slices.ContainsFunc(list, func(p warren.ProcessInfo) bool { return p.Tag == cmd.Tag && !p.Running && p.ExitCode == 4 }) {
		t.Errorf("Processes: %+v, %v", list, err)
	}

	for _, o := range []warren.AttachOptions{{}, {PID: 1, Tag: "x"}} {
		if _, err := sb.Attach(t.Context(), o); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("Attach(%+v): %v", o, err)
		}
	}
	if _, err := sb.Attach(t.Context(), warren.AttachOptions{Tag: "no such tag"}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Attach to nothing: %v", err)
	}
	// The end of an attached Cmd's context leaves the process alone.
	cmd = sb.Command("sleep", "600")
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	a, err = sb.Attach(ctx, warren.AttachOptions{PID: cmd.Process.Pid})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := a.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait: %v", err)
	}
	if err := cmd.Process.Kill(t.Context()); err != nil {
		t.Errorf("the process is gone: %v", err)
	}
	cmd.Wait()
}

func TestSession(t *testing.T) {
	_, sb := newSandbox(t)
	dir := t.TempDir()
	sess, err := sb.Session(t.Context(), warren.SessionOptions{Dir: dir, Env: []string{"A=1"}})
	if err != nil {
		t.Fatal(err)
	}
	run := func(command, stdout string, code int) *warren.SessionResult {
		t.Helper()
		var out bytes.Buffer
		res, err := sess.Run(t.Context(), command, warren.SessionRun{Stdout: &out})
		if err != nil || res.ExitCode != code || out.String() != stdout {
			t.Fatalf("%s: %q, %+v, %v", command, out.String(), res, err)
		}
		return res
	}
	run("echo $A; B=2; f() { echo f $B; }", "1\n", 0)
	run("mkdir sub && cd sub", "", 0)
	if res := run("f; false", "f 2\n", 1); res.Dir != dir+"/sub" {
		t.Errorf("directory %q", res.Dir)
	}
	if res, err := sess.Run(t.Context(), "sleep 600", warren.SessionRun{Timeout: 100 * time.Millisecond}); err != nil || !res.TimedOut {
		t.Errorf("timeout: %+v, %v", res, err)
	}
	list, err := sb.Sessions(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != sess.ID {
		t.Errorf("Sessions: %+v, %v", list, err)
	}
	if err := sess.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := sess.Run(t.Context(), "true", warren.SessionRun{}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Run in a closed session: %v", err)
	}
}

func BenchmarkUnary(b *testing.B) {
	s := servertest.New(b)
	c := s.Client()
	sb := s.Sandbox(warren.Spec{})
	for b.Loop() {
		if _, err := c.Sandbox(b.Context(), string(sb.ID)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCmdRun(b *testing.B) {
	_, sb := newSandbox(b)
	for b.Loop() {
		if err := sb.Command("true").Run(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkNativeRun is what BenchmarkCmdRun would cost without Warren.
func BenchmarkNativeRun(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCmdThroughput(b *testing.B) {
	_, sb := newSandbox(b)
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		cmd := sb.Command("head", "-c", fmt.Sprint(size), "/dev/zero")
		cmd.Stdout = io.Discard
		if err := cmd.Run(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// TestStartSilent starts a command, and attaches to one, where nothing answers: the end of the context ends the wait.
func TestStartSilent(t *testing.T) {
	s, sb := newSandbox(t)
	s.Engine.Freeze()
	for name, start := range map[string]func(context.Context) error{
		"start":  func(ctx context.Context) error { return sb.Command("true").Start(ctx) },
		"attach": func(ctx context.Context) error { _, err := sb.Attach(ctx, warren.AttachOptions{PID: 7}); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		began := time.Now()
		err := start(ctx)
		cancel()
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
			t.Errorf("%s: %v after %v", name, err, took)
		}
	}
}
