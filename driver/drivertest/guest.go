package drivertest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/proto/e2b/process"
	"github.com/warren-sandbox/warren/proto/e2b/process/processconnect"
)

// Guest runs commands in a sandbox through what its driver dials, as the daemon would.
type Guest struct {
	t      testing.TB
	client processconnect.ProcessClient
	http   *http.Client
}

// guestURL is only a name: every connection is dialled by the driver.
const guestURL = "http://guest"

// NewGuest returns a client of the guest of a sandbox.
func NewGuest(t testing.TB, d driver.Driver, id warren.SandboxID) *Guest {
	t.Helper()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.Dial(ctx, id, warren.GuestPort) },
	}
	t.Cleanup(transport.CloseIdleConnections)
	hc := &http.Client{Transport: transport}
	return &Guest{t: t, http: hc, client: processconnect.NewProcessClient(hc, guestURL, connect.WithProtoJSON())}
}

// guest returns a client for a sandbox whose guest has been told who works in it, if its creator has not done so.
func (c *ctx) guest(id warren.SandboxID) *Guest {
	c.t.Helper()
	g := NewGuest(c.t, c.d, id)
	c.mu.Lock()
	limit, untold := c.untold[id]
	delete(c.untold, id)
	c.mu.Unlock()
	if untold {
		g.Init(c, fmt.Sprintf(`{"defaultUser":"user","defaultWorkdir":"/","sandboxId":%q,"memoryLimitBytes":%d,"envVars":{}}`, id, limit))
	}
	return g
}

// Init tells the guest what the engine tells it after a create; fields are those of the body of /init.
func (g *Guest) Init(ctx context.Context, body string) {
	g.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, guestURL+"/init", strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := g.http.Do(req)
	if err != nil {
		g.t.Fatalf("guest: POST /init: %v", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		g.t.Fatalf("guest: POST /init: %s %s", resp.Status, text)
	}
}

// Command is what to run in a sandbox.
type Command struct {
	// Args is the program and its arguments.
	Args []string
	// User is root when empty.
	User string
	Dir  string
	Env  map[string]string
}

// Result is how a command ended.
type Result struct {
	Stdout, Stderr string
	Code           int
	// Status is the guest's words, such as "exit status 1".
	Status string
}

// Try runs a command and returns how it ended, or why it could not be started.
func (g *Guest) Try(ctx context.Context, cmd Command) (Result, error) {
	p, err := g.open(ctx, cmd)
	if err != nil {
		return Result{}, err
	}
	return p.wait()
}

// Run is Try for a command that can be started.
func (g *Guest) Run(ctx context.Context, args ...string) Result {
	g.t.Helper()
	r, err := g.Try(ctx, Command{Args: args})
	if err != nil {
		g.t.Fatalf("%s in the sandbox: %v", strings.Join(args, " "), err)
	}
	return r
}

// Output runs a command that must succeed and returns its standard output without the last newline.
func (g *Guest) Output(ctx context.Context, args ...string) string {
	g.t.Helper()
	r := g.Run(ctx, args...)
	if r.Code != 0 {
		g.t.Fatalf("%s in the sandbox: %s\n%s", strings.Join(args, " "), r.Status, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// Shell is Output of a line of sh, run as the user.
func (g *Guest) Shell(ctx context.Context, user, line string) Result {
	g.t.Helper()
	r, err := g.Try(ctx, Command{User: user, Args: []string{"/bin/sh", "-c", line}})
	if err != nil {
		g.t.Fatalf("sh -c %q in the sandbox: %v", line, err)
	}
	return r
}

// proc is a command that runs.
type proc struct {
	pid    uint32
	cancel context.CancelFunc
	out    *bufio.Reader
	result chan outcome
}

type outcome struct {
	Result
	err error
}

// start runs a command until the test ends.
func (g *Guest) start(ctx context.Context, cmd Command) *proc {
	g.t.Helper()
	p, err := g.open(ctx, cmd)
	if err != nil {
		g.t.Fatalf("start %s in the sandbox: %v", strings.Join(cmd.Args, " "), err)
	}
	g.t.Cleanup(p.cancel)
	return p
}

func (g *Guest) open(ctx context.Context, cmd Command) (*proc, error) {
	user := cmd.User
	if user == "" {
		user = "root"
	}
	config := &process.ProcessConfig{Cmd: cmd.Args[0], Args: cmd.Args[1:], Envs: cmd.Env}
	if cmd.Dir != "" {
		config.Cwd = &cmd.Dir
	}
	noInput := false
	req := connect.NewRequest(&process.StartRequest{Process: config, Stdin: &noInput})
	req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	ctx, cancel := context.WithCancel(ctx)
	stream, err := g.client.Start(ctx, req)
	if err != nil {
		cancel()
		return nil, err
	}
	r, w := io.Pipe()
	p := &proc{cancel: func() { cancel(); r.Close() }, out: bufio.NewReader(r), result: make(chan outcome, 1)}
	started := make(chan error, 1)
	go p.follow(stream, w, started)
	if err := <-started; err != nil {
		p.cancel()
		return nil, err
	}
	return p, nil
}

// follow reads the stream to its end.
func (p *proc) follow(stream *connect.ServerStreamForClient[process.StartResponse], out *io.PipeWriter, started chan error) {
	var stdout, stderr bytes.Buffer
	o := outcome{err: fmt.Errorf("the stream ended without an end event: %w", io.ErrUnexpectedEOF)}
	begun := false
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Start:
			p.pid = e.Start.GetPid()
			begun = true
			started <- nil
		case *process.ProcessEvent_Data:
			stdout.Write(e.Data.GetStdout())
			stderr.Write(e.Data.GetStderr())
			out.Write(e.Data.GetStdout())
		case *process.ProcessEvent_End:
			o = outcome{Result: Result{Code: int(e.End.GetExitCode()), Status: e.End.GetStatus()}}
			if e.End.GetError() != "" {
				o.Status += ": " + e.End.GetError()
			}
		}
	}
	if err := stream.Err(); err != nil {
		o.err = err
	}
	stream.Close()
	o.Stdout, o.Stderr = stdout.String(), stderr.String()
	if !begun {
		started <- o.err
	}
	p.result <- o
	out.Close()
}

// line returns the next line of standard output.
func (p *proc) line() (string, error) {
	s, err := p.out.ReadString('\n')
	return strings.TrimSuffix(s, "\n"), err
}

// wait reads to the end.
func (p *proc) wait() (Result, error) {
	defer p.cancel()
	io.Copy(io.Discard, p.out)
	o := <-p.result
	return o.Result, o.err
}
