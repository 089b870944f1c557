package guest_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/hashicorp/yamux"

	"github.com/warren-sandbox/warren/internal/guest"
	"github.com/warren-sandbox/warren/internal/guest/channel"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/proto/e2b/filesystem"
	"github.com/warren-sandbox/warren/proto/e2b/filesystem/filesystemconnect"
	"github.com/warren-sandbox/warren/proto/e2b/process"
	"github.com/warren-sandbox/warren/proto/e2b/process/processconnect"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
	"github.com/warren-sandbox/warren/proto/warren/guest/v1/guestv1connect"
)

// sandbox is a guest that runs in the test's own process.
type sandbox struct {
	*guest.Server
	addr string
	host *yamux.Session // the host's end of the channel
}

func newSandbox(t testing.TB, change ...func(*guest.Config)) *sandbox {
	t.Helper()
	env := []string{"PATH=" + os.Getenv("PATH")}
	config := guest.Config{LogDir: t.TempDir(), Env: env, User: currentUser()}
	for _, f := range change {
		f(&config)
	}
	s := &sandbox{Server: guest.New(config)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	go s.Serve(l)
	go s.ServeInner()
	s.host = s.newChannel(t)
	t.Cleanup(func() { s.Close() })
	return s
}

func currentUser() string {
	if os.Geteuid() == 0 {
		return "root"
	}
	return "" // whoever runs the test
}

// newChannel connects a channel the way a driver does, by a socket pair.
func (s *sandbox) newChannel(t testing.TB) *yamux.Session {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "channel")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	go s.ServeChannel(ends[0])
	session, err := yamux.Client(ends[1], channel.YamuxConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return session
}

// dial opens a stream to a port and returns the guest's answer.
func dial(session *yamux.Session, header [4]byte) (*yamux.Stream, byte, error) {
	st, err := session.OpenStream()
	if err != nil {
		return nil, 0, err
	}
	if _, err := st.Write(header[:]); err != nil {
		return nil, 0, err
	}
	var answer [1]byte
	_, err = io.ReadFull(st, answer[:])
	return st, answer[0], err
}

func header(port uint16) [4]byte { return [4]byte{channel.Version, 0, byte(port >> 8), byte(port)} }

// trusted returns a client that comes over the channel.
func (s *sandbox) trusted() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		st, answer, err := dial(s.host, header(guest.Port))
		if err == nil && answer != channel.Connected {
			err = fmt.Errorf("answer %d", answer)
		}
		return st, err
	}}}
}

// settle sets the sandbox up over the channel.
func (s *sandbox) settle(t testing.TB, body string) {
	t.Helper()
	resp, err := s.trusted().Post("http://guest/init", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		text, _ := io.ReadAll(resp.Body)
		t.Fatalf("init: %s: %s", resp.Status, text)
	}
}

func (s *sandbox) url(path string) string { return "http://" + s.addr + path }

// clients of the three services.
type clients struct {
	process processconnect.ProcessClient
	files   filesystemconnect.FilesystemClient
	guest   guestv1connect.GuestServiceClient
}

func newClients(c connect.HTTPClient, base string, opts ...connect.ClientOption) clients {
	opts = append([]connect.ClientOption{connect.WithProtoJSON()}, opts...)
	return clients{processconnect.NewProcessClient(c, base, opts...), filesystemconnect.NewFilesystemClient(c, base, opts...),
		guestv1connect.NewGuestServiceClient(c, base, opts...)}
}

func h2c() *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{Protocols: &p}}
}

// transports are the ways by which clients come.
func transports(t *testing.T, s *sandbox, f func(t *testing.T, c clients)) {
	for _, tr := range []struct {
		name   string
		client *http.Client
		base   string
	}{
		{"http1", &http.Client{Transport: &http.Transport{}}, "http://" + s.addr},
		{"h2c", h2c(), "http://" + s.addr},
		{"channel", s.trusted(), "http://guest"},
	} {
		t.Run(tr.name, func(t *testing.T) {
			defer tr.client.CloseIdleConnections()
			f(t, newClients(tr.client, tr.base))
		})
	}
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func ptr[T any](v T) *T { return &v }

func shell(script string) *process.StartRequest {
	return &process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}, Cwd: ptr("/")}, Stdin: ptr(false)}
}

// outcome is what a process stream told.
type outcome struct {
	stdout, stderr, pty string
	end                 *process.ProcessEvent_EndEvent
	err                 error
}

type events interface {
	Receive() bool
	Msg() *process.StartResponse
	Err() error
	Close() error
}

// collect reads a stream to its end.
func collect(t testing.TB, st events) outcome {
	t.Helper()
	if st.Receive() && st.Msg().GetEvent().GetStart() == nil {
		t.Errorf("the first event is no start: %v", st.Msg())
	}
	return rest(t, st)
}

// rest reads a stream whose start event has been read.
func rest(t testing.TB, st events) outcome {
	t.Helper()
	var o outcome
	var stdout, stderr, pty strings.Builder
	for st.Receive() {
		e := st.Msg().GetEvent()
		stdout.Write(e.GetData().GetStdout())
		stderr.Write(e.GetData().GetStderr())
		pty.Write(e.GetData().GetPty())
		if e.GetStart() != nil {
			t.Error("a second start")
		}
		if e.GetEnd() != nil {
			o.end = e.GetEnd()
		}
	}
	o.stdout, o.stderr, o.pty, o.err = stdout.String(), stderr.String(), pty.String(), st.Err()
	return o
}

func start(t testing.TB, c clients, req *process.StartRequest) (uint32, *connect.ServerStreamForClient[process.StartResponse]) {
	t.Helper()
	st, err := c.process.Start(testContext(t), connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	if !st.Receive() {
		t.Fatal(st.Err())
	}
	return st.Msg().GetEvent().GetStart().GetPid(), st
}

func run(t testing.TB, c clients, req *process.StartRequest) outcome {
	t.Helper()
	st, err := c.process.Start(testContext(t), connect.NewRequest(req))
	if err != nil {
		return outcome{err: err}
	}
	defer st.Close()
	return collect(t, st)
}

func wantCode(t testing.TB, err error, code connect.Code) {
	t.Helper()
	if connect.CodeOf(err) != code || err == nil {
		t.Errorf("error %v, want code %v", err, code)
	}
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

// TestEarlyEnd has a command end before its request has, and the next request follow on the same connection, as a proxy's do whose
// client is slow to end the first. The guest outlives it, and whoever may send another request gets its answer.
func TestEarlyEnd(t *testing.T) {
	s := newSandbox(t)
	message := `{"process":{"cmd":"/bin/true"},"stdin":false}`
	frame := string([]byte{0, 0, 0, 0, byte(len(message))}) + message
	begin := fmt.Sprintf("POST /process.Process/Start HTTP/1.1\r\nHost: guest\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(frame), frame)
	const end = "0\r\n\r\n"
	for range 30 {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(30 * time.Second))
		r := bufio.NewReader(c)
		answer := func(which string) bool {
			t.Helper()
			res, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatalf("%s: %v", which, err)
			}
			defer res.Body.Close()
			if body, err := io.ReadAll(res.Body); err != nil || !strings.Contains(string(body), `"end"`) {
				t.Fatalf("%s: %q, %v", which, body, err)
			}
			return !res.Close
		}
		io.WriteString(c, begin)
		if answer("the first") {
			io.WriteString(c, end+begin+end)
			answer("the second")
		}
		c.Close()
	}
}

func TestProcess(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		ctx := testContext(t)
		byPID := func(pid uint32) *process.ProcessSelector {
			return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
		}
		t.Run("ends", func(t *testing.T) {
			for _, c2 := range []struct {
				script, stdout, stderr, status string
				code                           int32
				exited                         bool
			}{
				{"echo a; echo b >&2", "a\n", "b\n", "exit status 0", 0, true},
				{"exit 3", "", "", "exit status 3", 3, true},
				{"kill -9 $$", "", "", "signal: killed", -1, false},
				{"cat", "", "", "exit status 0", 0, true},
				{"printf '\\0\\377\\n'", "\x00\xff\n", "", "exit status 0", 0, true},
			} {
				o := run(t, c, shell(c2.script))
				if o.err != nil || o.stdout != c2.stdout || o.stderr != c2.stderr || o.end.GetExitCode() != c2.code || o.end.GetExited() != c2.exited || o.end.GetStatus() != c2.status {
					t.Errorf("%s: %+v", c2.script, o)
				}
				if (o.end.Error != nil) != (c2.code != 0) || o.end.GetError() != "" && o.end.GetError() != c2.status {
					t.Errorf("%s: error %q", c2.script, o.end.GetError())
				}
			}
		})
		t.Run("refusals", func(t *testing.T) {
			for name, req := range map[string]*process.StartRequest{
				"no process":      {},
				"no command":      {Process: &process.ProcessConfig{}},
				"missing command": {Process: &process.ProcessConfig{Cmd: "/no/such/program"}},
				"not in PATH":     {Process: &process.ProcessConfig{Cmd: "no-such-program-anywhere"}},
				"missing cwd":     {Process: &process.ProcessConfig{Cmd: "true", Cwd: ptr("/no/such/dir")}},
				"cwd is a file":   {Process: &process.ProcessConfig{Cmd: "true", Cwd: ptr("/etc/passwd")}},
				"zero in arg":     {Process: &process.ProcessConfig{Cmd: "true", Args: []string{"a\x00b"}}},
				"zero in env":     {Process: &process.ProcessConfig{Cmd: "true", Envs: map[string]string{"A": "\x00"}}},
				"equals in env":   {Process: &process.ProcessConfig{Cmd: "true", Envs: map[string]string{"A=B": "1"}}},
			} {
				t.Run(name, func(t *testing.T) { wantCode(t, run(t, c, req).err, connect.CodeInvalidArgument) })
			}
		})
		t.Run("a command found in PATH, with words that a shell would split", func(t *testing.T) {
			o := run(t, c, &process.StartRequest{Process: &process.ProcessConfig{Cmd: "printf", Args: []string{"%s|", "a b", "$HOME", "-n", "*"}}})
			if o.stdout != "a b|$HOME|-n|*|" {
				t.Errorf("%+v", o)
			}
		})
		t.Run("input, tag and list", func(t *testing.T) {
			tag := "tag-" + strings.ReplaceAll(t.Name(), "/", "-")
			req := shell("read x; echo got $x; cat")
			req.Stdin, req.Tag = nil, &tag
			pid, st := start(t, c, req)
			list, err := c.process.List(ctx, connect.NewRequest(&process.ListRequest{}))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(list.Msg.Processes, func(p *process.ProcessInfo) bool {
				return p.Pid == pid && p.GetTag() == tag && p.Config.Cmd == "/bin/bash" && p.Config.GetCwd() == "/"
			}) {
				t.Errorf("not listed: %v", list.Msg.Processes)
			}
			sel := &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}}
			in := func(s string) *process.ProcessInput {
				return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte(s)}}
			}
			if _, err := c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: sel, Input: in("one\n")})); err != nil {
				t.Fatal(err)
			}
			_, err = c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: sel,
				Input: &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte("x")}}}))
			wantCode(t, err, connect.CodeInternal)
			up := c.process.StreamInput(ctx)
			for _, m := range []*process.StreamInputRequest{
				{Event: &process.StreamInputRequest_Start{Start: &process.StreamInputRequest_StartEvent{Process: byPID(pid)}}},
				{Event: &process.StreamInputRequest_Keepalive{Keepalive: &process.StreamInputRequest_KeepAlive{}}},
				{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: in("two ")}}},
				{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: in("three")}}},
			} {
				if err := up.Send(m); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := up.CloseAndReceive(); err != nil {
				t.Fatal(err)
			}
			if _, err := c.process.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: sel})); err != nil {
				t.Fatal(err)
			}
			if o := rest(t, st); o.stdout != "got one\ntwo three" || o.end.GetExitCode() != 0 {
				t.Errorf("%+v", o)
			}
			_, err = c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: sel, Input: in("late")}))
			wantCode(t, err, connect.CodeNotFound)
			_, err = c.process.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
			if err == nil { // the error of a stream comes with its first message
				st, _ := c.process.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
				st.Receive()
				err = st.Err()
				st.Close()
			}
			wantCode(t, err, connect.CodeNotFound)
		})
		t.Run("a client that leaves, another that comes", func(t *testing.T) {
			req := shell("read x; echo $x; read x; echo $x")
			req.Stdin = ptr(true)
			pid, st := start(t, c, req)
			st.Close()
			con, err := c.process.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
			if err != nil {
				t.Fatal(err)
			}
			defer con.Close()
			if !con.Receive() || con.Msg().GetEvent().GetStart().GetPid() != pid {
				t.Fatalf("no start: %v %v", con.Msg(), con.Err())
			}
			_, err = c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid),
				Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("a\nb\n")}}}))
			if err != nil {
				t.Fatal(err)
			}
			var got string
			for con.Receive() {
				got += string(con.Msg().GetEvent().GetData().GetStdout())
			}
			if got != "a\nb\n" || con.Err() != nil {
				t.Errorf("%q %v", got, con.Err())
			}
		})
		t.Run("signals", func(t *testing.T) {
			pid, st := start(t, c, shell("trap 'echo term; exit 4' TERM; echo ready; while :; do sleep 0.05; done"))
			if !st.Receive() || string(st.Msg().GetEvent().GetData().GetStdout()) != "ready\n" {
				t.Fatalf("%v %v", st.Msg(), st.Err())
			}
			if _, err := c.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: process.Signal_SIGNAL_SIGTERM})); err != nil {
				t.Fatal(err)
			}
			if o := rest(t, st); o.stdout != "term\n" || o.end.GetExitCode() != 4 {
				t.Errorf("%+v", o)
			}
			_, err := c.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: process.Signal_SIGNAL_SIGKILL}))
			wantCode(t, err, connect.CodeNotFound)
			_, err = c.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{}))
			wantCode(t, err, connect.CodeInvalidArgument)
		})
		t.Run("a deadline", func(t *testing.T) {
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			st, err := c.process.Start(short, connect.NewRequest(shell("sleep 1000 & wait")))
			if err == nil {
				for st.Receive() {
				}
				err = st.Err()
				st.Close()
			}
			wantCode(t, err, connect.CodeDeadlineExceeded)
			until(t, "the process is gone", func() bool {
				list, err := c.process.List(ctx, connect.NewRequest(&process.ListRequest{}))
				return err == nil && !slices.ContainsFunc(list.Msg.Processes, func(p *process.ProcessInfo) bool {
					return slices.Contains(p.Config.Args, "sleep 1000 & wait")
				})
			})
		})
		t.Run("a terminal", func(t *testing.T) {
			req := &process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", "stty size; read x; stty size; tty; ps -o tty= -p $$; exit 2"}},
				Pty: &process.PTY{Size: &process.PTY_Size{Cols: 100, Rows: 20}}}
			pid, st := start(t, c, req)
			var out string
			for !strings.Contains(out, "20 100") && st.Receive() {
				out += string(st.Msg().GetEvent().GetData().GetPty())
			}
			if _, err := c.process.Update(ctx, connect.NewRequest(&process.UpdateRequest{Process: byPID(pid), Pty: &process.PTY{Size: &process.PTY_Size{Cols: 7, Rows: 8}}})); err != nil {
				t.Fatal(err)
			}
			_, err := c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid),
				Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("x\n")}}}))
			wantCode(t, err, connect.CodeInternal)
			if _, err := c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid),
				Input: &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte("x\n")}}})); err != nil {
				t.Fatal(err)
			}
			o := rest(t, st)
			if !strings.Contains(o.pty, "8 7\r\n/dev/pts/") || o.end.GetExitCode() != 2 {
				t.Errorf("%q %+v", out, o)
			}
		})
	})
}

func TestUnaryErrorsAndContentTypes(t *testing.T) {
	s := newSandbox(t)
	post := func(path, contentType, body string, hdr ...string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, s.url(path), strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		for i := 0; i+1 < len(hdr); i += 2 {
			req.Header.Set(hdr[i], hdr[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(text)
	}
	for _, c := range []struct {
		name, path, contentType, body string
		hdr                           []string
		status                        int
		want                          string
	}{
		{"list", "/process.Process/List", "application/json", "{}", nil, 200, "{}"},
		{"charset", "/process.Process/List", "application/json; charset=utf-8", "{}", nil, 200, "{}"},
		{"proto", "/process.Process/List", "application/proto", "", nil, 415, ""},
		{"connect+proto", "/process.Process/Start", "application/connect+proto", "", nil, 415, ""},
		{"unary type on a stream", "/process.Process/Start", "application/json", "{}", nil, 415, ""},
		{"no JSON", "/process.Process/List", "application/json", "{", nil, 400, `{"code":"invalid_argument"`},
		{"empty body", "/process.Process/List", "application/json", "", nil, 400, `{"code":"invalid_argument"`},
		{"compressed", "/process.Process/List", "application/json", "{}", []string{"Content-Encoding", "br"}, 501, `{"code":"unimplemented"`},
		{"bad timeout", "/process.Process/List", "application/json", "{}", []string{"Connect-Timeout-Ms", "soon"}, 400, `{"code":"invalid_argument"`},
		{"unknown user", "/process.Process/List", "application/json", "{}", []string{"Authorization", "Basic eDo="}, 401, `{"code":"unauthenticated","message":"invalid username: 'x'"}`},
		{"missing file", "/filesystem.Filesystem/Stat", "application/json", `{"path":"/no/such"}`, nil, 404, `{"code":"not_found","message":"path '/no/such' does not exist"}`},
		{"zero byte", "/filesystem.Filesystem/Stat", "application/json", `{"path":"/a\u0000b"}`, nil, 400, `{"code":"invalid_argument"`},
		{"no such procedure", "/process.Process/Nope", "application/json", `{}`, nil, 404, `{"code":404`},
		{"too large", "/process.Process/List", "application/json", `{"x":"` + strings.Repeat("a", 5<<20) + `"}`, nil, 429, `{"code":"resource_exhausted"`},
		{"an error of a stream", "/process.Process/Start", "application/connect+json", "\x00\x00\x00\x00\x02{}", nil, 200, "\x02"},
		{"a stream without a request", "/process.Process/Start", "application/connect+json", "", nil, 200, "\x02"},
		{"a huge frame", "/process.Process/Start", "application/connect+json", "\x00\xff\xff\xff\xff", nil, 200, "\x02"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := post(c.path, c.contentType, c.body, c.hdr...)
			if resp.StatusCode != c.status || !strings.HasPrefix(body, c.want) {
				t.Errorf("%s %.200q, want %d %q", resp.Status, body, c.status, c.want)
			}
			if c.status == 415 && resp.Header.Get("Accept-Post") == "" {
				t.Error("no Accept-Post")
			}
		})
	}
	resp, err := http.Get(s.url("/process.Process/List"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 405 || resp.Header.Get("Allow") != "POST" {
		t.Errorf("GET: %s", resp.Status)
	}
}

func TestFilesystem(t *testing.T) {
	s := newSandbox(t)
	transports(t, s, func(t *testing.T, c clients) {
		ctx := testContext(t)
		dir := t.TempDir()
		stat := func(path string) (*filesystem.EntryInfo, error) {
			r, err := c.files.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: path}))
			if err != nil {
				return nil, err
			}
			return r.Msg.Entry, nil
		}
		mkdir := func(path string) error {
			_, err := c.files.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: path}))
			return err
		}
		if err := mkdir(dir + "/a/b"); err != nil {
			t.Fatal(err)
		}
		wantCode(t, mkdir(dir+"/a/b"), connect.CodeAlreadyExists)
		if err := os.WriteFile(dir+"/a/f", []byte("12345"), 0o640); err != nil {
			t.Fatal(err)
		}
		wantCode(t, mkdir(dir+"/a/f"), connect.CodeInvalidArgument)
		wantCode(t, mkdir(dir+"/a/f/g"), connect.CodeInvalidArgument)
		for link, target := range map[string]string{"link": "f", "dirlink": "b", "broken": "gone", "loop": "loop"} {
			if err := os.Symlink(target, dir+"/a/"+link); err != nil {
				t.Fatal(err)
			}
		}
		if err := syscall.Mkfifo(dir+"/a/fifo", 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := stat(dir + "/a/f")
		if err != nil {
			t.Fatal(err)
		}
		if e.Name != "f" || e.Type != filesystem.FileType_FILE_TYPE_FILE || e.Size != 5 || e.Mode != 0o640 || e.Permissions != "-rw-r-----" ||
			e.Owner == "" || e.Group == "" || time.Since(e.ModifiedTime.AsTime()) > time.Hour || e.SymlinkTarget != nil {
			t.Errorf("%v", e)
		}
		for name, want := range map[string]struct {
			typ    filesystem.FileType
			target string
		}{
			"link":    {filesystem.FileType_FILE_TYPE_FILE, dir + "/a/f"},
			"dirlink": {filesystem.FileType_FILE_TYPE_DIRECTORY, dir + "/a/b"},
			"broken":  {filesystem.FileType_FILE_TYPE_UNSPECIFIED, dir + "/a/broken"},
			"loop":    {filesystem.FileType_FILE_TYPE_UNSPECIFIED, dir + "/a/loop"},
		} {
			e, err := stat(dir + "/a/" + name)
			if err != nil || e.Type != want.typ || e.GetSymlinkTarget() != want.target || e.Permissions[0] != 'L' {
				t.Errorf("%s: %v %v", name, e, err)
			}
		}
		ls := func(path string, depth uint32) ([]string, error) {
			r, err := c.files.ListDir(ctx, connect.NewRequest(&filesystem.ListDirRequest{Path: path, Depth: depth}))
			if err != nil {
				return nil, err
			}
			var names []string
			for _, e := range r.Msg.Entries {
				rel, _ := filepath.Rel(dir, e.Path)
				names = append(names, rel)
			}
			return names, nil
		}
		if got, err := ls(dir, 0); err != nil || !slices.Equal(got, []string{"a"}) {
			t.Errorf("depth 0: %v %v", got, err)
		}
		want := []string{"a", "a/b", "a/broken", "a/dirlink", "a/f", "a/fifo", "a/link", "a/loop"}
		if got, err := ls(dir, 9); err != nil || !slices.Equal(got, want) {
			t.Errorf("depth 9: %v %v", got, err)
		}
		_, err = ls(dir+"/gone", 1)
		wantCode(t, err, connect.CodeNotFound)
		_, err = ls(dir+"/a/f", 1)
		wantCode(t, err, connect.CodeInvalidArgument)
		move := func(from, to string) error {
			_, err := c.files.Move(ctx, connect.NewRequest(&filesystem.MoveRequest{Source: from, Destination: to}))
			return err
		}
		if err := move(dir+"/a/f", dir+"/new/parent/g"); err != nil {
			t.Error(err)
		}
		wantCode(t, move(dir+"/a/f", dir+"/x"), connect.CodeNotFound)
		if data, err := os.ReadFile(dir + "/new/parent/g"); err != nil || string(data) != "12345" {
			t.Errorf("%q %v", data, err)
		}
		for range 2 { // what is removed may be removed again
			if _, err := c.files.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: dir + "/new"})); err != nil {
				t.Error(err)
			}
		}
		_, err = stat(dir + "/new")
		wantCode(t, err, connect.CodeNotFound)

		// Watching, by polling and by stream.
		_, err = c.files.CreateWatcher(ctx, connect.NewRequest(&filesystem.CreateWatcherRequest{Path: dir + "/gone"}))
		wantCode(t, err, connect.CodeNotFound)
		w, err := c.files.CreateWatcher(ctx, connect.NewRequest(&filesystem.CreateWatcherRequest{Path: dir, Recursive: true, IncludeEntry: true}))
		if err != nil {
			t.Fatal(err)
		}
		ws, err := c.files.WatchDir(ctx, connect.NewRequest(&filesystem.WatchDirRequest{Path: dir}))
		if err != nil {
			t.Fatal(err)
		}
		defer ws.Close()
		if !ws.Receive() || ws.Msg().GetStart() == nil {
			t.Fatalf("no start: %v", ws.Err())
		}
		if err := os.MkdirAll(dir+"/n1/n2", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/n1/n2/file", []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		seen := make(map[string]*filesystem.FilesystemEvent)
		until(t, "events of a new tree", func() bool {
			r, err := c.files.GetWatcherEvents(ctx, connect.NewRequest(&filesystem.GetWatcherEventsRequest{WatcherId: w.Msg.WatcherId}))
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range r.Msg.Events {
				if e.Type == filesystem.EventType_EVENT_TYPE_CREATE {
					if seen[e.Name] != nil {
						t.Errorf("%s was created twice", e.Name)
					}
					seen[e.Name] = e
				}
			}
			return seen["n1"] != nil && seen["n1/n2"] != nil && seen["n1/n2/file"] != nil
		})
		if e := seen["n1/n2/file"].GetEntry(); e.GetPath() != dir+"/n1/n2/file" || e.GetType() != filesystem.FileType_FILE_TYPE_FILE {
			t.Errorf("entry %v", e)
		}
		if !ws.Receive() || ws.Msg().GetFilesystem().GetName() != "n1" || ws.Msg().GetFilesystem().GetType() != filesystem.EventType_EVENT_TYPE_CREATE || ws.Msg().GetFilesystem().Entry != nil {
			t.Errorf("%v %v", ws.Msg(), ws.Err())
		}
		if _, err := c.files.RemoveWatcher(ctx, connect.NewRequest(&filesystem.RemoveWatcherRequest{WatcherId: w.Msg.WatcherId})); err != nil {
			t.Error(err)
		}
		_, err = c.files.GetWatcherEvents(ctx, connect.NewRequest(&filesystem.GetWatcherEventsRequest{WatcherId: w.Msg.WatcherId}))
		wantCode(t, err, connect.CodeNotFound)
	})
}

// TestTheUsersRights is the promise that the guest, which is root, does no more for a user than the user could do.
func TestTheUsersRights(t *testing.T) {
	testenv.NeedsRoot(t)
	s := newSandbox(t)
	c := newClients(&http.Client{Transport: asUser("nobody")}, "http://"+s.addr)
	ctx := testContext(t)
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	secret := dir + "/secret"
	if err := os.WriteFile(secret, []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/open", 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir+"/open", 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, dir+"/open/link"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, dir+"/open/up"); err != nil {
		t.Fatal(err)
	}
	get := func(path string) (int, string) {
		resp, err := (&http.Client{Transport: asUser("nobody")}).Get(s.url("/files?path=" + path))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(text)
	}
	put := func(path string) int {
		resp, err := (&http.Client{Transport: asUser("nobody")}).Post(s.url("/files?path="+path), "application/octet-stream", strings.NewReader("mine"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	for _, p := range []string{secret, dir + "/open/link", dir + "/open/up/secret", "/proc/1/environ"} {
		if code, text := get(p); code != 403 {
			t.Errorf("read %s: %d %q", p, code, text)
		}
	}
	for _, p := range []string{secret, dir + "/new", dir + "/open/link", dir + "/open/up/new", dir + "/made/by/nobody"} {
		if code := put(p); code != 403 {
			t.Errorf("write %s: %d", p, code)
		}
	}
	if code := put(dir + "/open/sub/dir/file"); code != 200 {
		t.Fatalf("write where all may: %d", code)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir+"/open/sub/dir/file", &st); err != nil || st.Uid != 65534 || st.Mode&0o777 != 0o644 {
		t.Errorf("owner %d mode %o %v", st.Uid, st.Mode, err)
	}
	_, err := c.files.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: secret}))
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = c.files.Move(ctx, connect.NewRequest(&filesystem.MoveRequest{Source: secret, Destination: dir + "/open/stolen"}))
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = c.files.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: dir + "/d"}))
	wantCode(t, err, connect.CodePermissionDenied)
	_, err = c.guest.Replace(ctx, connect.NewRequest(&guestv1.ReplaceRequest{Path: secret, Pattern: "s", Replacement: "t"}))
	if data, _ := os.ReadFile(secret); string(data) != "s" {
		t.Errorf("replaced: %q, %v", data, err)
	}
	o := run(t, c, shell("id -u; id -G; cat "+secret))
	if o.stdout != "65534\n65534\n" || o.end.GetExitCode() == 0 {
		t.Errorf("%+v", o)
	}
	// And root is root again afterwards.
	root := newClients(&http.Client{Transport: asUser("root")}, "http://"+s.addr)
	if _, err := root.files.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: secret})); err != nil {
		t.Error(err)
	}
}

// asUser is a transport that names a user.
type asUser string

func (u asUser) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.SetBasicAuth(string(u), "")
	return http.DefaultTransport.RoundTrip(r)
}

func TestChannel(t *testing.T) {
	s := newSandbox(t)
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		for {
			conn, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				data, _ := io.ReadAll(conn) // until the half-close
				conn.Write(append([]byte("echo "), data...))
				conn.Close()
			}()
		}
	}()
	port := uint16(echo.Addr().(*net.TCPAddr).Port)
	check := func(t *testing.T, session *yamux.Session) {
		st, answer, err := dial(session, header(port))
		if err != nil || answer != channel.Connected {
			t.Fatalf("answer %d, %v", answer, err)
		}
		if _, err := st.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
			t.Fatal(err)
		}
		st.Close() // one way
		data, err := io.ReadAll(st)
		if err != nil || len(data) != 1<<20+5 || !bytes.HasPrefix(data, []byte("echo x")) {
			t.Errorf("%d bytes, %v", len(data), err)
		}
	}
	t.Run("half-close", func(t *testing.T) { check(t, s.host) })
	t.Run("a closed port", func(t *testing.T) {
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p := uint16(free.Addr().(*net.TCPAddr).Port)
		free.Close()
		if _, answer, err := dial(s.host, header(p)); err != nil || answer != channel.Refused {
			t.Errorf("answer %d, %v", answer, err)
		}
	})
	for name, head := range map[string][4]byte{"another version": {2, 0, 1, 1}, "reserved set": {1, 1, 1, 1}, "port 0": {1, 0, 0, 0}} {
		t.Run(name, func(t *testing.T) {
			st, answer, err := dial(s.host, head)
			if err != nil || answer != channel.BadRequest {
				t.Errorf("answer %d, %v", answer, err)
			}
			if n, err := st.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Errorf("not closed: %d %v", n, err)
			}
		})
	}
	t.Run("upgrade", func(t *testing.T) {
		upgrade := func(token string) (net.Conn, string) {
			conn, err := net.Dial("tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "GET /warren/channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: warren-channel\r\nX-Channel-Token: %s\r\n\r\n", token)
			buf := make([]byte, 1024)
			n, err := conn.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			return conn, string(buf[:n])
		}
		if conn, resp := upgrade(""); !strings.HasPrefix(resp, "HTTP/1.1 401 ") {
			t.Errorf("no token is set: %q", resp)
		} else {
			conn.Close()
		}
		s.settle(t, `{"channelToken":"ct","accessToken":"at"}`)
		for _, guess := range []string{"", "at", "c", "ctx"} {
			conn, resp := upgrade(guess)
			conn.Close()
			if !strings.HasPrefix(resp, "HTTP/1.1 401 ") {
				t.Errorf("token %q: %q", guess, resp)
			}
		}
		conn, resp := upgrade("ct")
		if !strings.HasPrefix(resp, "HTTP/1.1 101 ") {
			t.Fatalf("%q", resp)
		}
		session, err := yamux.Client(conn, channel.YamuxConfig())
		if err != nil {
			t.Fatal(err)
		}
		defer session.Close()
		check(t, session)
		again := &sandbox{Server: s.Server, addr: s.addr, host: session}
		again.settle(t, `{}`) // it is trusted as the first one is
	})
}

func TestTokens(t *testing.T) {
	s := newSandbox(t)
	do := func(method, path string, hdr ...string) int {
		t.Helper()
		req, err := http.NewRequest(method, s.url(path), strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+1 < len(hdr); i += 2 {
			req.Header.Set(hdr[i], hdr[i+1])
		}
		if req.Header.Get("Content-Type") == "" {
			req.Header.Set("Content-Type", "application/json")
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	const list = "/process.Process/List"
	if code := do("POST", list); code != 200 {
		t.Errorf("before a token is set: %d", code)
	}
	s.settle(t, `{"accessToken":"tok"}`)
	for _, c := range []struct {
		method, path string
		hdr          []string
		want         int
	}{
		{"POST", list, nil, 401},
		{"POST", list, []string{"X-Access-Token", "wrong"}, 401},
		{"POST", list, []string{"X-Access-Token", "tok"}, 200},
		{"GET", "/health", nil, 204},
		{"GET", "/envs", nil, 401},
		{"GET", "/metrics", nil, 401},
		{"GET", "/metrics", []string{"X-Access-Token", "tok"}, 200},
		{"GET", "/files?path=/etc/hostname", nil, 401},
		{"GET", "/files?path=/etc/hostname", []string{"X-Access-Token", "wrong"}, 401},
		{"GET", "/files?path=/etc/hostname", []string{"X-Access-Token", "tok"}, 200},
		{"POST", "/files/compose", nil, 401},
		{"POST", "/init", nil, 403},
		{"POST", "/init", []string{"X-Access-Token", "tok"}, 403},
		{"POST", "/warren/oom", []string{"X-Access-Token", "tok"}, 403},
		{"POST", "/warren/quiesce", nil, 401},
		{"POST", "/warren/quiesce", []string{"X-Access-Token", "tok"}, 403},
		{"POST", "/warren/mark", nil, 401},
		{"POST", "/warren/mark", []string{"X-Access-Token", "tok"}, 403},
		{"GET", "/nothing", nil, 401},
		{"GET", "/nothing", []string{"X-Access-Token", "tok"}, 404},
		{"GET", "//health", nil, 401},
		{"OPTIONS", list, []string{"Origin", "https://a.example", "Access-Control-Request-Method", "POST"}, 204},
	} {
		if got := do(c.method, c.path, c.hdr...); got != c.want {
			t.Errorf("%s %s %v: %d, want %d", c.method, c.path, c.hdr, got, c.want)
		}
	}
	s.settle(t, `{}`) // a set-up that does not mention the token leaves it
	if code := do("POST", list); code != 401 {
		t.Errorf("after a second set-up: %d", code)
	}
	s.settle(t, `{"accessToken":""}`)
	if code := do("POST", list); code != 200 {
		t.Errorf("after the token was taken away: %d", code)
	}
}

func TestSettings(t *testing.T) {
	s := newSandbox(t)
	dir := t.TempDir()
	s.settle(t, `{"envVars":{"A":"from init","B":"b"},"defaultWorkdir":"`+dir+`","sandboxId":"s123","defaultUser":null,"timestamp":"2026-01-01T00:00:00Z","volumeMounts":[]}`)
	c := newClients(http.DefaultClient, "http://"+s.addr)
	o := run(t, c, &process.StartRequest{Process: &process.ProcessConfig{Cmd: "bash", Args: []string{"-c", "echo $A $B $E2B_SANDBOX_ID $E2B_SANDBOX; pwd"}, Envs: map[string]string{"B": "mine"}}})
	if o.stdout != "from init mine s123 true\n"+dir+"\n" {
		t.Errorf("%+v", o)
	}
	resp, err := http.Get(s.url("/envs"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	if string(text) != `{"A":"from init","B":"b","E2B_SANDBOX":"true","E2B_SANDBOX_ID":"s123"}` {
		t.Errorf("envs: %s", text)
	}
	for _, bad := range []string{`{"envVars":{"":"x"}}`, `{"defaultWorkdir":"relative"}`, `{"defaultUser":"who-is-that"}`, `[`, `{"accessToken":1}`} {
		resp, err := s.trusted().Post("http://guest/init", "application/json", strings.NewReader(bad))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 400 {
			t.Errorf("%s: %s", bad, resp.Status)
		}
	}
	// A default directory that has gone does not keep commands from starting.
	s.settle(t, `{"defaultWorkdir":"/no/such/dir"}`)
	if o := run(t, c, &process.StartRequest{Process: &process.ProcessConfig{Cmd: "true"}}); o.err != nil {
		t.Error(o.err)
	}
}

func TestCORS(t *testing.T) {
	s := newSandbox(t)
	req, _ := http.NewRequest(http.MethodOptions, s.url("/process.Process/List"), nil)
	req.Header.Set("Origin", "https://page.example")
	req.Header.Set("Access-Control-Request-Method", "POST")
	req.Header.Set("Access-Control-Request-Headers", "authorization,content-type,x-access-token")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 204 || resp.Header.Get("Access-Control-Allow-Origin") != "*" ||
		resp.Header.Get("Access-Control-Allow-Headers") != "authorization,content-type,x-access-token" || resp.Header.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("%s %v", resp.Status, resp.Header)
	}
}

// TestHostileHeaders sends what no honest client sends and wants the guest to live.
func TestHostileHeaders(t *testing.T) {
	s := newSandbox(t)
	for _, raw := range []string{
		"\x00\x00\x00\x00\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
		"GET /health HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("a", 1<<20) + "\r\n\r\n",
		"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 100),
	} {
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		conn.Write([]byte(raw))
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn)
		conn.Close()
	}
	resp, err := http.Get(s.url("/health"))
	if err != nil || resp.StatusCode != 204 {
		t.Fatalf("%v %v", resp, err)
	}
	resp.Body.Close()
}
