package service

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/process"
)

// newTable starts real processes, as whoever runs the test.
func newTable(t *testing.T) (*Table, *process.Table) {
	t.Helper()
	procs := process.NewTable(process.NewReaper(false), t.TempDir())
	me := &account.User{Name: "me", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: "/"}
	tb := &Table{First: 10 * time.Millisecond, Longest: 50 * time.Millisecond, Grace: 500 * time.Millisecond}
	tb.Start = func(s Spec, command []string, hidden bool) (*process.Process, error) {
		env := []string{"PATH=" + os.Getenv("PATH")}
		for k, v := range s.Env {
			env = append(env, k+"="+v)
		}
		return procs.Start(process.Spec{Cmd: command[0], Args: command[1:], Env: env, Dir: "/", User: me, Tag: s.Name, Hidden: hidden})
	}
	t.Cleanup(func() {
		tb.Close()
		procs.KillAll()
		for _, u := range tb.units {
			<-u.done
		}
	})
	return tb, procs
}

func sh(name, script string) Spec {
	return Spec{Name: name, Command: []string{"/bin/sh", "-c", script}}
}

func put(t *testing.T, tb *Table, specs ...Spec) {
	t.Helper()
	if err := tb.Put(specs); err != nil {
		t.Fatal(err)
	}
}

// until waits for a status of the service.
func until(t *testing.T, tb *Table, name, what string, ok func(Status) bool) Status {
	t.Helper()
	var last Status
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, s := range tb.List() {
			if s.Spec.Name == name {
				if last = s; ok(s) {
					return s
				}
			}
		}
	}
	t.Fatalf("%s never gets %s; last it was %+v", name, what, last)
	return last
}

func inState(t *testing.T, tb *Table, name, state string) Status {
	t.Helper()
	return until(t, tb, name, state, func(s Status) bool { return s.State == state })
}

func alive(pid int) bool { return pid > 0 && syscall.Kill(pid, 0) == nil }

func TestPolicies(t *testing.T) {
	tb, _ := newTable(t)
	specs := []Spec{sh("never", "exit 3"), sh("once", "exit 0"), sh("fails", "exit 4"), sh("again", "exit 0"), sh("missing", ""), sh("runs", "exec sleep 1000")}
	specs[0].Restart, specs[3].Restart, specs[4].Restart = Never, Always, Never
	specs[4].Command = []string{"/no/such/program"}
	put(t, tb, specs...)
	if s := inState(t, tb, "never", Failed); s.ExitCode != 3 || s.Restarts != 0 || s.Message != "exit status 3" {
		t.Errorf("%+v", s)
	}
	if s := inState(t, tb, "once", Exited); s.ExitCode != 0 || s.Restarts != 0 {
		t.Errorf("%+v", s)
	}
	if s := inState(t, tb, "missing", Failed); s.PID != 0 || !strings.Contains(s.Message, "/no/such/program") {
		t.Errorf("%+v", s)
	}
	if s := until(t, tb, "fails", "three restarts", func(s Status) bool { return s.Restarts >= 3 }); s.Spec.Restart != OnFailure {
		t.Errorf("%+v", s)
	}
	until(t, tb, "again", "three restarts", func(s Status) bool { return s.Restarts >= 3 })
	if s := inState(t, tb, "runs", Running); !alive(s.PID) {
		t.Errorf("%+v", s)
	}
	// What was killed from outside is a failure.
	pid := inState(t, tb, "runs", Running).PID
	syscall.Kill(pid, syscall.SIGKILL)
	if s := until(t, tb, "runs", "another process", func(s Status) bool { return s.PID != pid && s.State == Running }); s.Restarts != 1 {
		t.Errorf("%+v", s)
	}
}

func TestBackoff(t *testing.T) {
	tb, _ := newTable(t)
	tb.First, tb.Longest = 100*time.Millisecond, 400*time.Millisecond
	begin := time.Now()
	put(t, tb, sh("fails", "exit 1"))
	until(t, tb, "fails", "four restarts", func(s Status) bool { return s.Restarts == 4 })
	if took := time.Since(begin); took < 1100*time.Millisecond { // 100 + 200 + 400 + 400
		t.Errorf("four restarts take %v", took)
	}
}

func TestReadiness(t *testing.T) {
	tb, _ := newTable(t)
	dir := t.TempDir()
	flag := filepath.Join(dir, "flag")
	s := sh("command", "exec sleep 1000")
	s.Check = &Check{Command: []string{"/bin/sh", "-c", "echo looking; test -e " + flag + " || { echo no flag; exit 5; }"}, Interval: 20 * time.Millisecond, Retries: 3}
	put(t, tb, s)
	if s := inState(t, tb, "command", Unready); s.Message != "the check's command: exit status 5: no flag" {
		t.Errorf("%+v", s)
	}
	if err := os.WriteFile(flag, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	ready := inState(t, tb, "command", Ready)
	os.Remove(flag)
	if s := inState(t, tb, "command", Unready); s.PID != ready.PID || s.Restarts != 0 {
		t.Errorf("%+v", s)
	}
	// A check that hangs fails.
	s.Name, s.Check = "hangs", &Check{Command: []string{"sleep", "1000"}, Interval: 20 * time.Millisecond, Timeout: 50 * time.Millisecond, Retries: 1}
	put(t, tb, s)
	if s := inState(t, tb, "hangs", Unready); !strings.Contains(s.Message, "too long") {
		t.Errorf("%+v", s)
	}
}

func TestPorts(t *testing.T) {
	tb, _ := newTable(t)
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		l, err = net.Listen("tcp", "127.0.0.1:0") // a machine without IPv6
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	answers := make(chan string, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 1024)
			n, _ := c.Read(b)
			select {
			case answer := <-answers:
				if n > 0 && !strings.HasPrefix(string(b[:n]), "GET /health?x=1 HTTP/1.1\r\nHost: localhost:") {
					answer = fmt.Sprintf("HTTP/1.1 500 asked %q\r\n\r\n", b[:n])
				}
				c.Write([]byte(answer))
				answers <- answer
			default:
			}
			c.Close()
		}
	}()
	say := func(s string) {
		select {
		case <-answers:
		default:
		}
		answers <- s
	}
	web, tcp, none := sh("web", "exec sleep 1000"), sh("tcp", "exec sleep 1000"), sh("none", "exec sleep 1000")
	web.Port, web.Check = port, &Check{HTTPPath: "/health?x=1", Interval: 20 * time.Millisecond, Timeout: time.Second, Retries: 1}
	tcp.Port, tcp.Check = port, &Check{TCP: true}
	none.Port, none.Check = 1, &Check{TCP: true, Interval: 20 * time.Millisecond, Retries: 2}
	say("HTTP/1.1 503 later\r\n\r\n")
	put(t, tb, web, tcp, none)
	inState(t, tb, "tcp", Ready)
	if s := inState(t, tb, "none", Unready); s.Message == "" {
		t.Errorf("%+v", s)
	}
	until(t, tb, "web", "unready by 503", func(s Status) bool { return s.State == Unready && s.Message == "GET /health?x=1: 503" })
	say("SSH-2.0 hello\r\n")
	until(t, tb, "web", "unready by no HTTP", func(s Status) bool { return s.Message == "the answer is no HTTP" })
	say("HTTP/1.0 302\r\n\r\n")
	inState(t, tb, "web", Ready)
}

func TestPut(t *testing.T) {
	tb, procs := newTable(t)
	put(t, tb, sh("same", "exec sleep 1000"), sh("changes", "exec sleep 1000"), sh("goes", "sleep 1000 & sleep 1000"))
	same, changes, goes := inState(t, tb, "same", Running).PID, inState(t, tb, "changes", Running).PID, inState(t, tb, "goes", Running).PID
	changed := sh("changes", "exec sleep 1000")
	changed.Env = map[string]string{"X": "1"}
	put(t, tb, sh("same", "exec sleep 1000"), changed)
	if s := inState(t, tb, "same", Running); s.PID != same {
		t.Error("what did not change was started again")
	}
	if s := inState(t, tb, "changes", Running); s.PID == changes || alive(changes) {
		t.Errorf("what changed runs on: %d %+v", changes, s)
	}
	left := func() bool { return syscall.Kill(-goes, 0) == nil }
	for end := time.Now().Add(10 * time.Second); left() && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond) // whoever inherits a killed child reaps it soon
	}
	if alive(goes) || left() {
		t.Error("what was left out runs on, or a child of it")
	}
	if got := len(tb.List()); got != 2 {
		t.Errorf("%d services", got)
	}
	if p, err := procs.ByTag("same"); err != nil || p.PID != same {
		t.Errorf("by its tag: %v %v", p, err)
	}
	put(t, tb)
	if alive(same) || len(tb.List()) != 0 {
		t.Error("an empty list leaves something")
	}
}

func TestControl(t *testing.T) {
	tb, _ := newTable(t)
	stubborn := sh("stubborn", "trap '' TERM; while :; do sleep 0.1; done")
	stubborn.Restart = Always
	put(t, tb, stubborn, sh("polite", "trap 'exit 0' TERM; while :; do sleep 0.01; done"))
	pid, polite := inState(t, tb, "stubborn", Running).PID, inState(t, tb, "polite", Running).PID
	begin := time.Now()
	if err := tb.Stop("polite"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > tb.Grace || alive(polite) {
		t.Errorf("stopping took %v, alive: %v", took, alive(polite))
	}
	inState(t, tb, "polite", Stopped)
	if err := tb.Stop("stubborn"); err != nil || alive(pid) {
		t.Errorf("what ignores the signal: %v, alive: %v", err, alive(pid))
	}
	if err := tb.Restart("stubborn"); err != nil {
		t.Fatal(err)
	}
	if s := inState(t, tb, "stubborn", Running); s.PID == pid || !alive(s.PID) {
		t.Errorf("%+v", s)
	}
	if err := tb.Stop("nobody"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a missing one: %v", err)
	}
	put(t, tb)
}

func TestWait(t *testing.T) {
	tb, _ := newTable(t)
	flag := filepath.Join(t.TempDir(), "flag")
	s := sh("slow", "sleep 0.2; touch "+flag+"; exec sleep 1000")
	s.Check = &Check{Command: []string{"test", "-e", flag}, Interval: 20 * time.Millisecond}
	put(t, tb, s, sh("fails", "exit 1"), sh("plain", "exec sleep 1000"))
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if all := tb.Wait(short); len(all) != 3 || all[2].State != Starting {
		t.Errorf("after a moment: %+v", all)
	}
	put(t, tb, s, sh("plain", "exec sleep 1000"))
	if all := tb.Wait(t.Context()); len(all) != 2 || all[0].State != Running || all[1].State != Ready {
		t.Errorf("in the end: %+v", all)
	}
}

func TestInvalid(t *testing.T) {
	tb, _ := newTable(t)
	put(t, tb, sh("here", "exec sleep 1000"))
	ok := sh("x", "true")
	for what, change := range map[string]func(*Spec){
		"no name":        func(s *Spec) { s.Name = "" },
		"a bad name":     func(s *Spec) { s.Name = "a b" },
		"a long name":    func(s *Spec) { s.Name = strings.Repeat("x", 65) },
		"no command":     func(s *Spec) { s.Command = nil },
		"a bad policy":   func(s *Spec) { s.Restart = "sometimes" },
		"an empty check": func(s *Spec) { s.Check = &Check{} },
		"two checks":     func(s *Spec) { s.Port, s.Check = 1, &Check{TCP: true, Command: []string{"true"}} },
		"no port":        func(s *Spec) { s.Check = &Check{TCP: true} },
		"a bad path":     func(s *Spec) { s.Port, s.Check = 1, &Check{HTTPPath: "/x\r\nHost: y"} },
		"a relative one": func(s *Spec) { s.Port, s.Check = 1, &Check{HTTPPath: "x"} },
		"negative times": func(s *Spec) { s.Port, s.Check = 1, &Check{TCP: true, Interval: -1} },
		"the same twice": func(s *Spec) { s.Name = "here" },
	} {
		s := ok
		change(&s)
		if err := tb.Put([]Spec{sh("here", "exec sleep 1000"), s}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := tb.Put(make([]Spec, maxServices+1)); !errors.Is(err, ErrInvalid) {
		t.Errorf("too many: %v", err)
	}
	if got := len(tb.List()); got != 1 {
		t.Errorf("a refused list left %d services", got)
	}
}
