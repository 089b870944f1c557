package process

import (
	"context"
	"errors"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
)

func testTable(t *testing.T) *Table {
	table := NewTable(NewReaper(false), t.TempDir())
	t.Cleanup(table.KillAll)
	return table
}

func spec(script string) Spec {
	u := &account.User{Name: "me", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	return Spec{Cmd: "sh", Args: []string{"-c", script}, Env: []string{"PATH=" + os.Getenv("PATH")}, Dir: "/", User: u}
}

func mustStart(t *testing.T, table *Table, s Spec) *Process {
	t.Helper()
	p, err := table.Start(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func wait(t *testing.T, p *Process) End {
	t.Helper()
	select {
	case <-p.Ended():
	case <-time.After(30 * time.Second):
		t.Fatal("the process does not end")
	}
	e, _ := p.End()
	return e
}

func TestEndComesAfterAllOutput(t *testing.T) {
	table := testTable(t)
	for range 50 {
		p := mustStart(t, table, spec("seq 1 5000; seq 1 100 >&2"))
		wait(t, p)
		got, lost := readAll(t, p.Output, 0)
		if lost != 0 || !strings.HasSuffix(got[Stdout], "\n5000\n") || !strings.HasSuffix(got[Stderr], "\n100\n") {
			t.Fatalf("%d and %d bytes", len(got[Stdout]), len(got[Stderr]))
		}
	}
}

// TestChildrenThatKeepTheOutput: the end of a process is told though its child holds the pipe, and what the child
// writes later is kept and does not kill it.
func TestChildrenThatKeepTheOutput(t *testing.T) {
	table := testTable(t)
	dir := t.TempDir()
	p := mustStart(t, table, spec("( while [ ! -e "+dir+"/go ]; do sleep 0.01; done; echo late; touch "+dir+"/done ) & echo early"))
	if e := wait(t, p); e.Code != 0 {
		t.Errorf("%+v", e)
	}
	if got, _ := readAll(t, p.Output, 0); got[Stdout] != "early\n" {
		t.Errorf("%q", got[Stdout])
	}
	if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		got, _ := readAll(t, p.Output, 0)
		if _, err := os.Stat(dir + "/done"); err == nil && got[Stdout] == "early\nlate\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%q", got[Stdout])
		}
	}
}

func TestDescriptorsOfAProcess(t *testing.T) {
	// Descriptors that the test itself was started with are not at issue; the guest closes its own so.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	table := testTable(t)
	p := mustStart(t, table, spec("ls /proc/self/fd; cat /proc/self/fdinfo/1; umask"))
	wait(t, p)
	got, _ := readAll(t, p.Output, 0)
	// 3 is ls's own; anything else would be the guest's.
	if !strings.HasPrefix(got[Stdout], "0\n1\n2\n3\n") || strings.HasPrefix(got[Stdout], "0\n1\n2\n3\n4") {
		t.Errorf("descriptors: %q", got[Stdout])
	}
	if strings.Contains(got[Stdout], "flags:\t0104001") || strings.Contains(got[Stdout], "flags:\t04001") {
		t.Errorf("the standard output does not block: %q", got[Stdout])
	}
}

func TestWriteToAProcessThatDoesNotRead(t *testing.T) {
	table := testTable(t)
	s := spec("read x; sleep 1000")
	s.Stdin = true
	p := mustStart(t, table, s)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := p.Write(ctx, make([]byte, 1<<20), false); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if err := p.CloseStdin(); err != nil {
		t.Error(err)
	}
	if err := p.Write(context.Background(), []byte("x"), false); !errors.Is(err, ErrInvalid) {
		t.Errorf("after closing: %v", err)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	if e := wait(t, p); e.Code != -1 || e.Exited || e.Status != "signal: killed" {
		t.Errorf("%+v", e)
	}
	if err := p.Signal(syscall.SIGTERM, false); !errors.Is(err, ErrNotFound) {
		t.Errorf("after the end: %v", err)
	}
}

func TestKilledForMemory(t *testing.T) {
	table := testTable(t)
	p := mustStart(t, table, spec("sleep 1000"))
	p.KilledForMemory("killed: out of memory (limit 1 MiB)")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, p); e.Code != -1 || e.Status != "killed: out of memory (limit 1 MiB)" {
		t.Errorf("%+v", e)
	}
	p = mustStart(t, table, spec("exit 3"))
	p.KilledForMemory("killed: out of memory")
	if e := wait(t, p); e.Status != "exit status 3" {
		t.Errorf("one that ended by itself: %+v", e)
	}
}

func TestEndedProcessesAreBounded(t *testing.T) {
	table := testTable(t)
	for range maxEnded + 20 {
		wait(t, mustStart(t, table, spec(":")))
	}
	for end := time.Now().Add(20 * time.Second); len(table.Running()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("some are still listed as running")
		}
	}
	if n := len(table.All()); n != maxEnded {
		t.Errorf("%d processes are remembered", n)
	}
}

func TestSync(t *testing.T) {
	table := testTable(t)
	s := spec("while read n; do seq 1 $n; echo done >&2; done")
	s.Stdin = true
	p := mustStart(t, table, s)
	for range 20 {
		f := p.Output.Follow(-1)
		if err := p.Write(context.Background(), []byte("3000\n"), false); err != nil {
			t.Fatal(err)
		}
		out := ""
		for !strings.Contains(out, "done") {
			c, err := f.Next(context.Background(), 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if c.Kind == Stderr {
				out += string(c.Data)
			}
		}
		p.Sync() // what was written to the other pipe before is there now
		all, _ := readAll(t, p.Output, 0)
		if !strings.HasSuffix(all[Stdout], "\n3000\n") {
			t.Fatalf("%q", all[Stdout][max(0, len(all[Stdout])-20):])
		}
		f.Close()
	}
	if err := p.CloseStdin(); err != nil {
		t.Error(err)
	}
	wait(t, p)
	p.Sync() // also when nothing is left to wait for
}

// TestOtherDirs starts commands where the directory that was meant is not there, by a path, which is tried at once, and by a name, which is looked for.
func TestOtherDirs(t *testing.T) {
	table := testTable(t)
	missing, other := t.TempDir()+"/missing", t.TempDir()
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []string{shell, "sh"} {
		s := spec("pwd")
		s.Cmd, s.Dir, s.OtherDirs = cmd, missing, []string{missing + "2", other, "/"}
		p := mustStart(t, table, s)
		wait(t, p)
		if got, _ := readAll(t, p.Output, 0); strings.TrimSpace(got[Stdout]) != other || p.Spec.Dir != other {
			t.Errorf("%s ran in %q, and says %q; want %q", cmd, got[Stdout], p.Spec.Dir, other)
		}
		s.OtherDirs = nil
		if _, err := table.Start(s); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "cwd") || !strings.Contains(err.Error(), "does not exist") {
			t.Errorf("%s without another directory: %v", cmd, err)
		}
	}
	s := spec("")
	s.Cmd = missing // the command, and not the directory
	if _, err := table.Start(s); !errors.Is(err, ErrInvalid) || !errors.Is(err, syscall.ENOENT) || strings.Contains(err.Error(), "cwd") {
		t.Errorf("a command that is not there: %v", err)
	}
}

// TestDevNull has a first command that cannot open what it should read, which is not the end of the others.
func TestDevNull(t *testing.T) {
	null.Lock()
	if null.open {
		syscall.Close(null.fd)
		null.open = false
	}
	null.Unlock()
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := devNull()
	if rerr := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); rerr != nil {
		t.Fatal(rerr)
	}
	if !errors.Is(err, syscall.EMFILE) {
		t.Fatalf("without descriptors: %v", err)
	}
	if e := wait(t, mustStart(t, testTable(t), spec("exit 3"))); e.Code != 3 {
		t.Errorf("%+v", e)
	}
}
