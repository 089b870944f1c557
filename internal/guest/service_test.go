package guest_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/proto/e2b/process"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

func pidOf(pid uint32) *guestv1.ProcessSelector {
	return &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Pid{Pid: pid}}
}

// attached is what an Attach stream told.
type attached struct {
	stdout, stderr string
	lost           int64
	start, end     *guestv1.ProcessStatus
	err            error
}

func attach(t testing.TB, c clients, req *guestv1.AttachRequest) attached {
	t.Helper()
	st, err := c.guest.Attach(testContext(t), connect.NewRequest(req))
	if err != nil {
		return attached{err: err}
	}
	defer st.Close()
	var a attached
	var stdout, stderr strings.Builder
	next := req.FromSeq
	for st.Receive() {
		switch e := st.Msg().Event.(type) {
		case *guestv1.AttachResponse_Start:
			a.start = e.Start
		case *guestv1.AttachResponse_LostBefore:
			a.lost, next = e.LostBefore, e.LostBefore
		case *guestv1.AttachResponse_Output:
			if e.Output.Seq != next && next >= 0 {
				t.Errorf("output at %d, want %d", e.Output.Seq, next)
			}
			stdout.Write(e.Output.GetStdout())
			stderr.Write(e.Output.GetStderr())
			next = e.Output.Seq + int64(len(e.Output.GetStdout())+len(e.Output.GetStderr())+len(e.Output.GetPty()))
		case *guestv1.AttachResponse_End:
			a.end = e.End
		}
	}
	a.stdout, a.stderr, a.err = stdout.String(), stderr.String(), st.Err()
	return a
}

func TestAttach(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		req := shell("printf abc; read x; printf def >&2; exit 6")
		req.Stdin, req.Tag = ptr(true), ptr("attach "+t.Name())
		pid, st := start(t, c, req)
		if !st.Receive() {
			t.Fatal(st.Err())
		}
		st.Close() // gone
		a := attach(t, c, &guestv1.AttachRequest{Process: pidOf(pid), NoFollow: true})
		if a.stdout != "abc" || a.end != nil || !a.start.GetRunning() || a.err != nil {
			t.Errorf("no follow: %+v", a)
		}
		done := make(chan attached)
		go func() { done <- attach(t, c, &guestv1.AttachRequest{Process: pidOf(pid), FromSeq: 1}) }()
		if _, err := c.process.SendInput(testContext(t), connect.NewRequest(&process.SendInputRequest{
			Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}},
			Input:   &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("\n")}}})); err != nil {
			t.Fatal(err)
		}
		if a := <-done; a.stdout != "bc" || a.stderr != "def" || a.end.GetExitCode() != 6 || a.end.GetStatus() != "exit status 6" || a.end.GetSeq() != 6 || a.err != nil {
			t.Errorf("follow: %+v", a)
		}
		// It has ended; the output is still there.
		byTag := &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Tag{Tag: "attach " + t.Name()}}
		if a := attach(t, c, &guestv1.AttachRequest{Process: byTag, FromSeq: 4}); a.stderr != "ef" || a.end.GetExitCode() != 6 || a.start.GetRunning() {
			t.Errorf("after the end: %+v", a)
		}
		if a := attach(t, c, &guestv1.AttachRequest{Process: byTag, FromSeq: -1}); a.stderr != "" || a.end == nil {
			t.Errorf("from now, after the end: %+v", a)
		}
		for _, all := range []bool{true, false} {
			list, err := c.guest.ListProcesses(testContext(t), connect.NewRequest(&guestv1.ListProcessesRequest{All: all}))
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(list.Msg.Processes, func(p *guestv1.ProcessStatus) bool { return p.Pid == pid })
			if (i >= 0) != all {
				t.Errorf("all %t: %v", all, list.Msg.Processes)
			}
			if i >= 0 {
				p := list.Msg.Processes[i]
				if p.Cmd != "/bin/bash" || p.Cwd != "/" || p.User == "" || p.Running || p.ExitCode != 6 || p.Ended.AsTime().Before(p.Started.AsTime()) {
					t.Errorf("%v", p)
				}
			}
		}
		wantCode(t, attach(t, c, &guestv1.AttachRequest{Process: pidOf(1 << 30)}).err, connect.CodeNotFound)
		wantCode(t, attach(t, c, &guestv1.AttachRequest{}).err, connect.CodeInvalidArgument)
	})
}

// TestLongOutput writes more than is kept while nobody reads, and wants the end of it and word of what is lost.
func TestLongOutput(t *testing.T) {
	s := newSandbox(t)
	c := newClients(http.DefaultClient, "http://"+s.addr)
	const lines, length = 3_000_000, 3_000_000 * 8
	_, st := start(t, c, shell(fmt.Sprintf("seq -w 1 %d", lines)))
	st.Close()
	var p *guestv1.ProcessStatus
	until(t, "the process has ended", func() bool {
		list, err := c.guest.ListProcesses(testContext(t), connect.NewRequest(&guestv1.ListProcessesRequest{All: true}))
		if err != nil {
			t.Fatal(err)
		}
		p = list.Msg.Processes[len(list.Msg.Processes)-1]
		return !p.Running
	})
	a := attach(t, c, &guestv1.AttachRequest{Process: pidOf(p.Pid)})
	if a.err != nil || a.end.GetSeq() != length || a.lost == 0 || a.lost+int64(len(a.stdout)) != length {
		t.Fatalf("lost before %d, %d bytes, end %v, %v", a.lost, len(a.stdout), a.end, a.err)
	}
	if len(a.stdout) < 8<<20 || !strings.HasSuffix(a.stdout, "\n3000000\n") {
		t.Errorf("%d bytes are kept, ending %q", len(a.stdout), a.stdout[len(a.stdout)-20:])
	}
	// A client that reads as fast as it can loses nothing.
	o := run(t, c, shell(fmt.Sprintf("seq -w 1 %d", lines)))
	if len(o.stdout) != length || o.err != nil {
		t.Errorf("a live client got %d bytes, %v", len(o.stdout), o.err)
	}
}

func TestSignal(t *testing.T) {
	s := newSandbox(t)
	c := newClients(http.DefaultClient, "http://"+s.addr)
	ctx := testContext(t)
	pid, st := start(t, c, shell("trap 'echo usr1' USR1; echo ready; while :; do sleep 0.02; done"))
	if !st.Receive() {
		t.Fatal(st.Err())
	}
	for _, sig := range []int32{-1, 65, 1000} {
		_, err := c.guest.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Process: pidOf(pid), Signal: sig}))
		wantCode(t, err, connect.CodeInvalidArgument)
	}
	if _, err := c.guest.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Process: pidOf(pid), Signal: 10})); err != nil {
		t.Fatal(err)
	}
	if !st.Receive() || string(st.Msg().GetEvent().GetData().GetStdout()) != "usr1\n" {
		t.Errorf("%v %v", st.Msg(), st.Err())
	}
	if _, err := c.guest.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Process: pidOf(pid), Signal: 15, Group: true})); err != nil {
		t.Fatal(err)
	}
	if o := rest(t, st); o.end.GetStatus() != "signal: terminated" || o.end.GetExitCode() != -1 {
		t.Errorf("%+v", o)
	}
	_, err := c.guest.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Process: pidOf(pid), Signal: 15}))
	wantCode(t, err, connect.CodeNotFound)
}

func TestSearchAndReplace(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		ctx := testContext(t)
		dir := t.TempDir()
		for name, text := range map[string]string{"a.go": "package a\n\nfunc Foo() {}\n", "sub/b.go": "Foo()\r\n", "skip.txt": "Foo\n", ".gitignore": "ignored\n", "ignored": "Foo\n"} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		// .gitignore counts inside a repository.
		if err := os.Mkdir(dir+"/.git", 0o755); err != nil {
			t.Fatal(err)
		}
		st, err := c.guest.Search(ctx, connect.NewRequest(&guestv1.SearchRequest{Path: dir, Pattern: `Fo+\(`, Exclude: []string{"*.txt"}, Context: 1}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		var got []string
		var sum *guestv1.SearchSummary
		for st.Receive() {
			if m := st.Msg().GetMatch(); m != nil {
				rel, _ := filepath.Rel(dir, m.Path)
				got = append(got, fmt.Sprintf("%s:%d:%d:%s %q %q", rel, m.Line, m.Column, m.Text, m.Before, m.After))
			}
			if x := st.Msg().GetSummary(); x != nil {
				sum = x
			}
		}
		slices.Sort(got)
		want := []string{`a.go:3:6:func Foo() {} [""] []`, `sub/b.go:1:1:Foo() [] []`}
		if st.Err() != nil || !slices.Equal(got, want) || sum.GetMatches() != 2 || sum.GetFilesSearched() != 2 {
			t.Errorf("%q %v %v", got, sum, st.Err())
		}
		r, err := c.guest.Replace(ctx, connect.NewRequest(&guestv1.ReplaceRequest{Path: dir, Pattern: `F(o+)`, Replacement: "B$1", Include: []string{"**/*.go", "*.go"}}))
		if err != nil {
			t.Fatal(err)
		}
		data, _ := os.ReadFile(dir + "/sub/b.go")
		if r.Msg.Replacements != 2 || len(r.Msg.Files) != 2 || string(data) != "Boo()\r\n" {
			t.Errorf("%v %q", r.Msg, data)
		}
		_, err = c.guest.Replace(ctx, connect.NewRequest(&guestv1.ReplaceRequest{Path: dir, Pattern: "("}))
		wantCode(t, err, connect.CodeInvalidArgument)
		_, err = c.guest.Replace(ctx, connect.NewRequest(&guestv1.ReplaceRequest{Path: dir + "/gone", Pattern: "x"}))
		wantCode(t, err, connect.CodeNotFound)
	})
}

// inSession is what a command in a session told.
type inSession struct {
	stdout, stderr string
	end            *guestv1.RunInSessionResponse_End
	err            error
}

func runInSession(ctx context.Context, c clients, id, command string, timeout time.Duration) inSession {
	st, err := c.guest.RunInSession(ctx, connect.NewRequest(&guestv1.RunInSessionRequest{Id: id, Command: command, TimeoutMs: timeout.Milliseconds()}))
	if err != nil {
		return inSession{err: err}
	}
	defer st.Close()
	var r inSession
	for st.Receive() {
		r.stdout += string(st.Msg().GetStdout())
		r.stderr += string(st.Msg().GetStderr())
		if e := st.Msg().GetEnd(); e != nil {
			r.end = e
		}
	}
	r.err = st.Err()
	return r
}

func TestSession(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		ctx := testContext(t)
		dir := t.TempDir()
		open, err := c.guest.OpenSession(ctx, connect.NewRequest(&guestv1.OpenSessionRequest{Cwd: dir, Envs: map[string]string{"GIVEN": "g"}}))
		if err != nil {
			t.Fatal(err)
		}
		id := open.Msg.Id
		_, err = c.guest.OpenSession(ctx, connect.NewRequest(&guestv1.OpenSessionRequest{Id: id}))
		wantCode(t, err, connect.CodeAlreadyExists)
		_, err = c.guest.OpenSession(ctx, connect.NewRequest(&guestv1.OpenSessionRequest{Id: "no slashes/please"}))
		wantCode(t, err, connect.CodeInvalidArgument)
		long := strings.Repeat("# a long comment line\n", 2000)
		for _, step := range []struct {
			command, stdout, stderr string
			code                    int32
			cwd                     string
		}{
			{"echo $GIVEN; pwd", "g\n" + dir + "\n", "", 0, dir},
			{"mkdir -p 'sub dir' && cd 'sub dir'; X=5; export Y=6; f() { echo \"f$X\"; }; alias ll='echo aliased'", "", "", 0, dir + "/sub dir"},
			{"f; echo $Y; ll", "f5\n6\naliased\n", "", 0, dir + "/sub dir"},
			{"echo out; echo err >&2; (exit 7)", "out\n", "err\n", 7, dir + "/sub dir"},
			{"echo '$?' $?", "$? 0\n", "", 0, dir + "/sub dir"},
			{"false", "", "", 1, dir + "/sub dir"},
			{"cat; read x; echo \"got <$x>\"", "got <>\n", "", 0, dir + "/sub dir"},
			{"printf 'no line end'", "no line end", "", 0, dir + "/sub dir"},
			{"echo 'quote '\\''and \"double\" !! $(echo sub) `echo tick`'; echo \"!x\"", "quote 'and \"double\" !! $(echo sub) `echo tick`\n!x\n", "", 0, dir + "/sub dir"},
			{"for i in 1 2; do\n  echo $i\ndone", "1\n2\n", "", 0, dir + "/sub dir"},
			{"cat <<'E'\n'\nE", "'\n", "", 0, dir + "/sub dir"},
			{long + "echo long $X", "long 5\n", "", 0, dir + "/sub dir"},
			{"cd /", "", "", 0, "/"},
			{"", "", "", 0, "/"},
			{"bash -c 'echo x >&61' 2>/dev/null; echo $?", "1\n", "", 0, "/"}, // the control descriptor is not a command's
		} {
			r := runInSession(ctx, c, id, step.command, time.Minute)
			if r.err != nil || r.stdout != step.stdout || r.stderr != step.stderr || r.end.GetExitCode() != step.code || r.end.GetCwd() != step.cwd ||
				r.end.GetTimedOut() || r.end.GetSessionEnded() {
				t.Errorf("%.80q: %+v", step.command, r)
			}
		}
		t.Run("a syntax error", func(t *testing.T) {
			r := runInSession(ctx, c, id, "if (", 0)
			if r.err != nil || r.end.GetExitCode() == 0 || !strings.Contains(r.stderr, "syntax error") {
				t.Errorf("%+v", r)
			}
		})
		t.Run("output is no control", func(t *testing.T) {
			r := runInSession(ctx, c, id, `for i in $(seq 50); do printf 'READY 0 /\0%s 0 /\0' "$RANDOM"; done; exec 61>&-; echo still $X`, 0)
			if r.err != nil || !strings.HasSuffix(r.stdout, "still 5\n") || r.end.GetExitCode() != 0 || r.end.GetCwd() != "/" {
				t.Errorf("%+v", r)
			}
		})
		t.Run("timeouts", func(t *testing.T) {
			for _, command := range []string{
				"echo a; sleep 1000", "echo a; while true; do sleep 0.01; done", "echo a; while :; do :; done",
				"echo a; (trap '' INT; sleep 1000)", "echo a; bash -c 'trap \"\" INT; sleep 1000; sleep 1000'",
			} {
				r := runInSession(ctx, c, id, command, 300*time.Millisecond)
				if r.err != nil || !r.end.GetTimedOut() || r.end.GetSessionEnded() || !strings.HasPrefix(r.stdout, "a\n") || r.end.GetExitCode() == 0 {
					t.Errorf("%s: %+v", command, r)
				}
				if r := runInSession(ctx, c, id, "f", 0); r.stdout != "f5\n" || r.err != nil {
					t.Errorf("after %s: %+v", command, r)
				}
			}
		})
		t.Run("a background job outlives the command and a timeout", func(t *testing.T) {
			r := runInSession(ctx, c, id, "sleep 1000 & echo $!", 0)
			job := strings.TrimSpace(r.stdout)
			runInSession(ctx, c, id, "sleep 1001", 100*time.Millisecond)
			if r := runInSession(ctx, c, id, "kill "+job, 0); r.end.GetExitCode() != 0 {
				t.Errorf("%+v", r)
			}
		})
		t.Run("busy", func(t *testing.T) {
			fifo := dir + "/fifo"
			runInSession(ctx, c, id, "mkfifo "+fifo, 0)
			done := make(chan inSession)
			go func() { done <- runInSession(ctx, c, id, "cat "+fifo, 0) }()
			until(t, "the session is busy", func() bool {
				l, err := c.guest.ListSessions(ctx, connect.NewRequest(&guestv1.ListSessionsRequest{}))
				return err == nil && slices.ContainsFunc(l.Msg.Sessions, func(s *guestv1.ListSessionsResponse_Session) bool {
					return s.Id == id && s.Busy && s.Pid == open.Msg.Pid
				})
			})
			wantCode(t, runInSession(ctx, c, id, "true", 0).err, connect.CodeFailedPrecondition)
			if err := os.WriteFile(fifo, []byte("through\n"), 0); err != nil {
				t.Fatal(err)
			}
			if r := <-done; r.stdout != "through\n" || r.err != nil {
				t.Errorf("%+v", r)
			}
		})
		t.Run("a client that leaves", func(t *testing.T) {
			gone, cancel := context.WithCancel(ctx)
			left := make(chan inSession)
			go func() { left <- runInSession(gone, c, id, "touch "+dir+"/begun; sleep 0.3; V=kept", 0) }()
			until(t, "the command runs", func() bool { _, err := os.Stat(dir + "/begun"); return err == nil || len(left) > 0 })
			cancel()
			if r := <-left; r.err == nil {
				t.Errorf("%+v", r)
			}
			var r inSession
			until(t, "the session is free again", func() bool {
				r = runInSession(ctx, c, id, "echo $V", 0)
				return r.err == nil
			})
			if r.stdout != "kept\n" {
				t.Errorf("%+v", r)
			}
		})
		r := runInSession(ctx, c, id, "echo bye; echo last >&2; exit 9", 0)
		if r.err != nil || r.stdout != "bye\n" || r.stderr != "last\n" || r.end.GetExitCode() != 9 || !r.end.GetSessionEnded() {
			t.Errorf("exit: %+v", r)
		}
		wantCode(t, runInSession(ctx, c, id, "true", 0).err, connect.CodeNotFound)

		again, err := c.guest.OpenSession(ctx, connect.NewRequest(&guestv1.OpenSessionRequest{Id: id}))
		if err != nil {
			t.Fatal(err)
		}
		if again.Msg.Id != id {
			t.Errorf("id %q", again.Msg.Id)
		}
		if _, err := c.guest.CloseSession(ctx, connect.NewRequest(&guestv1.CloseSessionRequest{Id: id})); err != nil {
			t.Error(err)
		}
		_, err = c.guest.CloseSession(ctx, connect.NewRequest(&guestv1.CloseSessionRequest{Id: id}))
		wantCode(t, err, connect.CodeNotFound)
		list, err := c.process.List(ctx, connect.NewRequest(&process.ListRequest{}))
		if err != nil || len(list.Msg.Processes) != 0 {
			t.Errorf("sessions are no processes of E2B's list: %v %v", list, err)
		}
	})
}

func TestWatchPorts(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		before, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer before.Close()
		portOf := func(l net.Listener) uint32 { return uint32(l.Addr().(*net.TCPAddr).Port) }
		st, err := c.guest.WatchPorts(ctx, connect.NewRequest(&guestv1.WatchPortsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		seen := false
		for st.Receive() && st.Msg().GetReady() == nil {
			if o := st.Msg().GetOpen(); o.GetPort() == portOf(before) {
				seen = o.Address == "127.0.0.1" && o.Pid == uint32(os.Getpid()) && strings.HasPrefix(o.Program, "guest.test")
			}
		}
		if !seen {
			t.Error("the port that listened before was not told as it is")
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := portOf(l)
		for st.Receive() && st.Msg().GetOpen().GetPort() != port {
		}
		l.Close()
		for st.Receive() && st.Msg().GetClose().GetPort() != port {
		}
		if st.Err() != nil {
			t.Error(st.Err())
		}
		once, err := c.guest.WatchPorts(ctx, connect.NewRequest(&guestv1.WatchPortsRequest{NoFollow: true}))
		if err != nil {
			t.Fatal(err)
		}
		defer once.Close()
		n := 0
		for once.Receive() {
			n++
		}
		if once.Err() != nil || n < 2 {
			t.Errorf("%d events, %v", n, once.Err())
		}
	})
}
