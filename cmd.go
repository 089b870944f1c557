package warren

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/proto/e2b/process"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// Cmd is a command in a sandbox, prepared, running or ended. It mirrors [os/exec.Cmd] and cannot be used twice.
//
// A command outlives the connection to it: when the connection breaks, as while the server restarts, the Cmd attaches again
// at the byte where it was, so that no output is lost or doubled.
type Cmd struct {
	// Path is the program, looked up in the sandbox.
	Path string
	// Args are the arguments, Args[0] included, which is not used.
	Args []string
	// Env is added to the environment that the sandbox gives each process, as "name=value", with names of letters, digits
	// and _. The last of equal names counts.
	Env []string
	// Dir to run in. Empty means /workspace.
	Dir string
	// User to run as. Empty means the sandbox's default.
	User string
	// Tag names the process for [Sandbox.Attach]. Empty means one that nobody else has.
	Tag string

	// Stdin is read to its end by a goroutine and sent as fast as the process takes it. Nil means an empty input. Unlike in
	// os/exec, Wait does not wait for a Read that is still under way when the process has ended.
	Stdin io.Reader
	// Stdout and Stderr take the output; nil discards it. One goroutine writes to both. A slow writer slows the process
	// down. When a Write fails, the process gets SIGPIPE and Wait returns the error.
	Stdout, Stderr io.Writer
	// PTY, when set, runs the command in a terminal of this size. All output goes to Stdout.
	PTY *Size

	// Cancel is called when the context of Start ends before the process. The default kills the process and its group.
	Cancel func() error
	// WaitDelay is how long after a Cancel of the caller's own the process is killed, if it still runs; 0 means never. After a kill,
	// Wait waits for news of the end for as long, and at least 10 seconds.
	WaitDelay time.Duration

	// RolledBack, when set, is called when the sandbox was rolled back under the command, before any output that comes after. The
	// output goes on where it was at the snapshot, with the byte of this sequence number; what was written since then to Stdout
	// and Stderr is not taken back. The goroutine that writes to them calls it.
	RolledBack func(seq int64)

	// Process is set once Start has returned nil.
	Process *Process
	// ProcessState is set once Wait has returned, if the process is known to have ended.
	ProcessState *ProcessState

	sb       *Sandbox
	attached bool
	ctx      context.Context
	stop     context.CancelFunc // ends following
	stream   context.Context
	seq      int64     // bytes of output so far
	rollback string    // the sandbox's last when the stream began, as the guest names it; empty from a guest that does not tell
	started  time.Time // the process, where that is known

	done     chan struct{} // closed when following has ended
	state    *ProcessState
	err      error // why following ended without a state
	sinkErr  error // of Stdout, Stderr or lost output
	canceled error // ctx's error, once Cancel was called
	detached bool
	mu       sync.Mutex
	inputErr error
	atEnd    []func() // closes pipes
	waited   bool
	once     bool // end with the output so far
}

// Size of a terminal in characters.
type Size struct {
	Cols uint32 `json:"cols"`
	Rows uint32 `json:"rows"`
}

// Command returns a Cmd that runs a program in the sandbox.
func (s *Sandbox) Command(name string, arg ...string) *Cmd {
	return &Cmd{Path: name, Args: append([]string{name}, arg...), sb: s}
}

// String returns the command for people to read; it is not quoted for a shell.
func (c *Cmd) String() string {
	return strings.Join(append([]string{c.Path}, c.argv()...), " ")
}

func (c *Cmd) argv() []string {
	if len(c.Args) < 2 {
		return nil
	}
	return c.Args[1:]
}

// Run starts the command and waits for its end. It returns nil when the command exited with 0, and *[ExitError] when
// it ended otherwise.
func (c *Cmd) Run(ctx context.Context) error {
	if err := c.Start(ctx); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command and returns its standard output. Without Stderr set, an *[ExitError] holds the beginning and the
// end of it.
func (c *Cmd) Output(ctx context.Context) ([]byte, error) {
	if c.Stdout != nil {
		return nil, errors.New("warren: Stdout already set")
	}
	var stdout bytes.Buffer
	c.Stdout = &stdout
	var stderr *headTail
	if c.Stderr == nil {
		stderr = &headTail{limit: 32 << 10}
		c.Stderr = stderr
	}
	err := c.Run(ctx)
	var ee *ExitError
	if stderr != nil && errors.As(err, &ee) {
		ee.Stderr = stderr.bytes()
	}
	return stdout.Bytes(), err
}

// CombinedOutput runs the command and returns its standard output and standard error together, in the order in which
// they were read.
func (c *Cmd) CombinedOutput(ctx context.Context) ([]byte, error) {
	if c.Stdout != nil || c.Stderr != nil {
		return nil, errors.New("warren: Stdout or Stderr already set")
	}
	var b bytes.Buffer
	c.Stdout, c.Stderr = &b, &b
	err := c.Run(ctx)
	return b.Bytes(), err
}

// StdinPipe returns a pipe to the command's standard input. A Write returns when the process's end has taken the bytes; Close
// ends the input.
func (c *Cmd) StdinPipe() (io.WriteCloser, error) {
	if c.Stdin != nil {
		return nil, errors.New("warren: Stdin already set")
	}
	if c.done != nil {
		return nil, errors.New("warren: StdinPipe after Start")
	}
	r, w := io.Pipe()
	c.Stdin = r
	c.atEnd = append(c.atEnd, func() { r.CloseWithError(os.ErrClosed) })
	return w, nil
}

// StdoutPipe returns a pipe from the command's standard output. Read it to its end before Wait: it holds 64 KiB, then the
// process waits for the reader.
func (c *Cmd) StdoutPipe() (io.ReadCloser, error) { return c.outPipe(&c.Stdout, "Stdout") }

// StderrPipe returns a pipe from the command's standard error, like [Cmd.StdoutPipe].
func (c *Cmd) StderrPipe() (io.ReadCloser, error) { return c.outPipe(&c.Stderr, "Stderr") }

func (c *Cmd) outPipe(to *io.Writer, name string) (io.ReadCloser, error) {
	if *to != nil {
		return nil, fmt.Errorf("warren: %s already set", name)
	}
	if c.done != nil {
		return nil, fmt.Errorf("warren: %sPipe after Start", name)
	}
	p := newPipe(64 << 10)
	*to = p
	c.atEnd = append(c.atEnd, p.closeWrite)
	return p, nil
}

// Environ returns the variables that Env adds, one for each name.
func (c *Cmd) Environ() []string {
	m, _ := envMap(c.Env)
	var env []string
	for k, v := range m {
		env = append(env, k+"="+v)
	}
	slices.Sort(env)
	return env
}

// envName is what a server takes for the name of a variable of a sandbox, so that a process gets no other.
var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,255}$`)

func envMap(env []string) (map[string]string, error) {
	if len(env) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(env))
	for _, kv := range env {
		k, v, ok := strings.Cut(kv, "=")
		switch {
		case !ok || k == "":
			return nil, fmt.Errorf("environment %.80q: want name=value", kv)
		case !envName.MatchString(k):
			return nil, fmt.Errorf("environment variable %.80q: a name has letters, digits and _, and no digit first", k)
		case strings.ContainsRune(v, 0) || !utf8.ValidString(v):
			return nil, fmt.Errorf("environment variable %s: its value must be UTF-8 without NUL", k) // it may be a secret
		}
		m[k] = v
	}
	return m, nil
}

// Start starts the command and returns when it runs. Wait must be called to learn its end. The process is ended
// through Cancel when ctx ends first.
func (c *Cmd) Start(ctx context.Context) error {
	if c.done != nil {
		return errors.New("warren: already started")
	}
	req, err := c.startRequest()
	if err != nil {
		return &Error{Kind: "invalid", Op: "start", ID: c.Path, Message: err.Error(), Err: err}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	c.begin(ctx)
	st, err := c.open(ctx, req)
	if err != nil {
		c.stop()
		c.err = err
		close(c.done)
		c.closePipes()
		return err
	}
	c.watch(st)
	if c.Stdin != nil {
		go c.feed()
	}
	return nil
}

func (c *Cmd) begin(ctx context.Context) {
	c.ctx = ctx
	c.done = make(chan struct{})
	// The stream does not end with ctx: Cancel decides what happens then, and the end has yet to be read. Nor does the
	// deadline travel, at which the guest would kill the process without asking Cancel.
	c.stream, c.stop = context.WithCancel(context.WithoutCancel(ctx))
}

// watch follows the output and the context.
func (c *Cmd) watch(st *output) {
	go func() {
		st := c.follow(st)
		c.closePipes()
		close(c.done)
		if c.state != nil {
			// To its end, which is on its way, so that the connection can serve the next command.
			late := time.AfterFunc(time.Second, c.stop)
			st.shut()
			late.Stop()
		}
		c.stop()
		st.close()
	}()
	if c.ctx.Done() == nil {
		return
	}
	go func() {
		select {
		case <-c.done:
		case <-c.ctx.Done():
			c.interrupt()
		}
	}()
}

func (c *Cmd) startRequest() (*process.StartRequest, error) {
	if c.Path == "" {
		return nil, errors.New("no command")
	}
	for _, s := range append([]string{c.Path, c.Dir, c.Tag}, c.argv()...) {
		if strings.ContainsRune(s, 0) {
			return nil, fmt.Errorf("%q contains a zero byte", s)
		}
	}
	env, err := envMap(c.Env)
	if err != nil {
		return nil, err
	}
	tag := c.Tag
	if tag == "" {
		tag = "cmd-" + randomKey()
	}
	stdin := c.Stdin != nil
	req := &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: c.Path, Args: c.argv(), Envs: env},
		Tag:     &tag,
		Stdin:   &stdin,
	}
	if c.Dir != "" {
		req.Process.Cwd = &c.Dir
	}
	if c.PTY != nil {
		req.Pty = &process.PTY{Size: &process.PTY_Size{Cols: c.PTY.Cols, Rows: c.PTY.Rows}}
	}
	return req, nil
}

// open starts the process and waits for the word that it runs. When the connection breaks before that, it looks whether the
// process was started, by its tag, so that none is started twice.
func (c *Cmd) open(ctx context.Context, req *process.StartRequest) (*output, error) {
	own := c.Tag == ""
	c.Process = &Process{sb: c.sb, tag: req.GetTag(), own: own}
	fresh := true
	var st *output
	err := c.sb.c.again(ctx, func() error {
		var e event
		var err error
		st, e, err = c.connect(ctx, func(ctx context.Context) (*output, error) {
			if fresh {
				return c.sb.guest.start(ctx, c.User, req)
			}
			return c.sb.guest.attach(comingBack(ctx), c.Process.selector(), 0, false)
		})
		if err == nil {
			c.Process.Pid, c.rollback, c.started = e.pid, e.info.rollback, e.info.Started
			return nil
		}
		switch {
		case ctx.Err() != nil:
			// It may run by now. Who waits is not kept long by a guest that does not answer.
			p, killed := c.Process, make(chan struct{})
			go func() {
				defer close(killed)
				quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
				defer cancel()
				p.Kill(quit)
			}()
			select {
			case <-killed:
			case <-time.After(time.Second):
			}
			return giveUp{ctx.Err()}
		case fresh && broken(err) && !refused(err):
			// Without a name of its own the process cannot be told from another.
			if !own {
				return giveUp{err}
			}
			fresh = false
			return err
		case !fresh && errors.Is(err, ErrNotFound):
			fresh = true
			return &Error{Kind: "unavailable", Op: "start", ID: c.Path, Message: "the connection broke before the command began", Err: err}
		}
		return err
	})
	if err != nil {
		c.Process = nil
		return nil, err
	}
	return st, nil
}

// connect opens a stream of output, which ends with c.stream, and returns it with its first event. The end of ctx ends the wait
// for them.
func (c *Cmd) connect(ctx context.Context, open func(context.Context) (*output, error)) (*output, event, error) {
	sctx, cut := context.WithCancel(c.stream)
	stop := context.AfterFunc(ctx, cut)
	st, err := open(sctx)
	if err != nil {
		cut()
		return nil, event{}, err
	}
	e, err := st.first(ctx)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		cut()
		st.close()
		return nil, event{}, err
	}
	return st, e, nil
}

// follow reads events until the end of the process, and returns the stream that told it.
func (c *Cmd) follow(st *output) *output {
	for {
		e, err := st.next()
		if err != nil {
			if c.stream.Err() != nil {
				return st
			}
			if err == errCaughtUp {
				return st
			}
			// Data loss is how this wire tells that it fell behind; the other one tells how far.
			if !broken(err) && connect.CodeOf(err) != connect.CodeDataLoss {
				c.err = err
				return st
			}
			st.close()
			again, err := c.reattach()
			if err != nil {
				c.err = err
				return st
			}
			st = again
			continue
		}
		if e.end != nil {
			c.state = e.end
			return st
		}
		if e.lost > c.seq {
			c.sink(fmt.Errorf("%d bytes of output are lost: more was written than the sandbox keeps: %w", e.lost-c.seq, ErrExhausted))
			c.seq = e.lost
		}
		c.take(e)
	}
}

// take writes output once, also when a replay holds more than was asked for.
func (c *Cmd) take(e event) {
	if e.seq >= 0 && e.seq < c.seq {
		skip := min(c.seq-e.seq, int64(len(e.data)))
		e.data = e.data[skip:]
	}
	if len(e.data) == 0 {
		return
	}
	if e.seq > c.seq {
		c.seq = e.seq
	}
	c.seq += int64(len(e.data))
	w := c.Stdout
	if e.stderr {
		w = c.Stderr
	}
	if w == nil || c.sinkErr != nil {
		return
	}
	n, err := w.Write(e.data)
	if err == nil && n < len(e.data) {
		err = io.ErrShortWrite
	}
	if err != nil {
		c.sink(err)
		// What a command learns whose reader went away.
		go c.signal(13)
	}
}

func (c *Cmd) sink(err error) {
	if c.sinkErr == nil {
		c.sinkErr = err
	}
}

func (c *Cmd) signal(n int32) error {
	ctx, cancel := context.WithTimeout(comingBack(c.stream), 10*time.Second)
	defer cancel()
	return c.sb.c.again(ctx, func() error { return c.Process.signal(ctx, n, true) })
}

// reattach connects to the process again at the byte where the old stream ended or, after a rollback, where the output went on.
func (c *Cmd) reattach() (st *output, err error) {
	from, rolledBack := c.seq, false
	err = c.sb.c.again(c.stream, func() error {
		for {
			var e event
			if st, err = c.sb.guest.attach(comingBack(c.stream), c.Process.selector(), from, c.once); err == nil {
				if e, err = st.first(c.stream); err != nil {
					st.close()
				}
			}
			switch {
			case errors.Is(err, ErrNotFound) && c.beforeProcess():
				return &Error{Kind: "not_found", Op: "attach", ID: c.Path, Message: "the process is gone: its sandbox was rolled back to before the process began"}
			case err != nil:
				return err
			}
			if e.tag != c.Process.tag || e.pid != c.Process.Pid || !c.started.IsZero() && !e.info.Started.Equal(c.started) {
				st.close()
				message := "the process is gone: its sandbox was started anew"
				if c.beforeProcess() {
					message = "the process is gone: its sandbox was rolled back to before the process began"
				}
				return &Error{Kind: "not_found", Op: "attach", ID: c.Path, Message: message}
			}
			to, turned := c.turn(from, e.info)
			c.rollback = e.info.rollback
			rolledBack = rolledBack || turned
			if to == from {
				return nil
			}
			// The guest was asked for bytes that are not there, or no longer the next.
			st.close()
			from = to
		}
	})
	if err != nil {
		return st, err
	}
	c.seq = from
	if rolledBack && c.RolledBack != nil {
		c.RolledBack(from)
	}
	return st, nil
}

// turn returns where to go on with the output of a process of which bytes up to from are known, and whether the sandbox was
// rolled back meanwhile.
func (c *Cmd) turn(from int64, info ProcessInfo) (to int64, rolledBack bool) {
	to = min(from, info.Seq) // what a guest of an older snapshot tells is this much
	switch {
	case c.rollback == "" || info.rollback == c.rollback:
	case info.rollback == "":
		rolledBack = true
	default:
		rolledBack = true
		to = min(to, info.rollbackSeq)
	}
	return max(to, 0), rolledBack || to < from // a guest may say anything, and below 0 means now
}

// beforeProcess says whether the process is not there because the sandbox was rolled back since the last stream began.
func (c *Cmd) beforeProcess() bool {
	ctx, cancel := context.WithTimeout(comingBack(c.stream), 10*time.Second)
	defer cancel()
	stream, err := c.sb.guest.warren.WatchLifecycle(ctx, request("", &guestv1.WatchLifecycleRequest{NoFollow: true}))
	if err != nil {
		return false
	}
	defer stream.Close()
	if !stream.Receive() {
		return false
	}
	last := stream.Msg().GetCurrent()
	return last.GetEvent() == "rollback" && last.GetGeneration() != c.rollback
}

// interrupt does what is due when the context ends before the process.
func (c *Cmd) interrupt() {
	if c.attached {
		c.mu.Lock()
		c.canceled = c.ctx.Err()
		c.mu.Unlock()
		c.stop()
		return
	}
	cancel := c.Cancel
	if cancel == nil {
		cancel = func() error { return c.signal(9) }
	}
	// The end of the process may be read before cancel returns, and has to find the reason there.
	c.mu.Lock()
	c.canceled = c.ctx.Err()
	c.mu.Unlock()
	err := cancel()
	c.mu.Lock()
	switch {
	case err == nil:
	case errors.Is(err, os.ErrProcessDone):
		c.canceled = nil
	default:
		c.canceled = errors.Join(c.ctx.Err(), fmt.Errorf("warren: canceling Cmd: %w", err))
	}
	c.mu.Unlock()
	if c.Cancel != nil {
		if c.WaitDelay == 0 {
			return
		}
		select {
		case <-c.done:
			return
		case <-time.After(c.WaitDelay):
		}
		c.signal(9)
	}
	select {
	case <-c.done:
	case <-time.After(max(c.WaitDelay, 10*time.Second)):
		c.stop()
	}
}

// Detach stops following the command, which runs on. Wait then returns nil with no ProcessState.
func (c *Cmd) Detach() {
	if c.done == nil {
		return
	}
	c.mu.Lock()
	c.detached = true
	c.mu.Unlock()
	c.stop()
	<-c.done
}

// Wait waits for the end of a command that Start started, and for its output. The error is nil for exit code 0, *[ExitError] for
// another end of the process, and something else when the input or output failed or the end could not be learned. An
// ExitError after the end of Start's context matches the context's error too.
func (c *Cmd) Wait() error {
	if c.done == nil {
		return errors.New("warren: not started")
	}
	if c.waited {
		return errors.New("warren: Wait was already called")
	}
	c.waited = true
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ProcessState = c.state
	switch {
	case c.state != nil && c.inputErr != nil && !c.state.Success():
		return c.inputErr
	case c.state != nil && !c.state.Success():
		return &ExitError{ProcessState: c.state, cause: errors.Join(c.canceled, c.sinkErr)}
	case c.state != nil:
		for _, err := range []error{c.inputErr, c.sinkErr, c.canceled} {
			if err != nil {
				return err
			}
		}
		return nil
	case c.detached:
		return nil
	case c.canceled != nil:
		return c.canceled
	}
	return c.err
}

func (c *Cmd) closePipes() {
	for _, f := range c.atEnd {
		f()
	}
	c.atEnd = nil
}

// feed sends Stdin to the process.
func (c *Cmd) feed() {
	// Large enough that base64 and a round trip cost little, small enough to start at once.
	buf := make([]byte, 64<<10)
	for {
		n, readErr := c.Stdin.Read(buf)
		if n > 0 {
			if err := c.send(buf[:n]); err != nil {
				c.inputFailed(err)
				return
			}
		}
		if readErr == nil {
			continue
		}
		if c.PTY != nil {
			// A terminal has no end of input; ^D asks the program for one.
			c.send([]byte{4})
			return
		}
		// A pipe that was closed at the process's end is no failure: the reader of io.Pipe says so by an error of its own.
		if readErr != io.EOF && !errors.Is(readErr, os.ErrClosed) && !errors.Is(readErr, io.ErrClosedPipe) {
			c.mu.Lock()
			c.inputErr = fmt.Errorf("read stdin: %w", readErr)
			c.mu.Unlock()
		}
		err := c.sb.c.again(c.stream, func() error {
			_, err := c.sb.guest.process.CloseStdin(comingBack(c.stream), request(c.User, &process.CloseStdinRequest{Process: c.Process.e2b()}))
			return fromWire("close stdin", err)
		})
		if err != nil {
			c.inputFailed(err)
		}
		return
	}
}

// send writes a piece of input. It repeats only what cannot have arrived.
func (c *Cmd) send(b []byte) error {
	in := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: b}}
	if c.PTY != nil {
		in.Input = &process.ProcessInput_Pty{Pty: b}
	}
	return c.sb.c.again(c.stream, func() error {
		_, err := c.sb.guest.process.SendInput(comingBack(c.stream), request(c.User, &process.SendInputRequest{Process: c.Process.e2b(), Input: in}))
		if err = fromWire("send input", err); broken(err) && !refused(err) {
			return giveUp{err}
		}
		return err
	})
}

// inputFailed ends a process whose input has a hole: what it would make of the rest is worse than nothing.
func (c *Cmd) inputFailed(err error) {
	if c.stream.Err() != nil || !broken(err) && !silent(err) {
		// The process has ended or closed its input, which is no failure of the input.
		return
	}
	if c.PTY != nil {
		go c.feed()
		return
	}
	c.mu.Lock()
	c.inputErr = fmt.Errorf("the connection broke while input was on its way, and how much arrived is not known: %w", err)
	c.mu.Unlock()
	c.signal(9)
}

// AttachOptions say which process to attach to, and what to do with its output.
type AttachOptions struct {
	// PID or Tag of the process.
	PID int
	Tag string
	// From is the first byte of output wanted, as a sequence number: 0 is the beginning, -1 is now.
	From int64
	// NoFollow ends with the output that is kept, as a log does.
	NoFollow bool
	// Stdin, Stdout and Stderr are as in [Cmd]. Input goes to a process that was started with one.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// RolledBack is that of the Cmd.
	RolledBack func(seq int64)
}

// Attach follows a process that runs, or one that ended lately. The returned Cmd has been started; Wait returns how the process
// ended. When ctx ends the process runs on. With NoFollow, Wait returns nil at the end of the output of a process that
// still runs, and ProcessState stays nil.
func (s *Sandbox) Attach(ctx context.Context, o AttachOptions) (*Cmd, error) {
	p := &Process{Pid: o.PID, tag: o.Tag, sb: s}
	if (o.PID == 0) == (o.Tag == "") {
		return nil, &Error{Kind: "invalid", Op: "attach", Message: "want the PID or the tag of a process, one of them"}
	}
	c := &Cmd{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, RolledBack: o.RolledBack, sb: s, attached: true, Process: p}
	c.begin(ctx)
	var st *output
	var e event
	err := s.c.again(ctx, func() error {
		var err error
		st, e, err = c.connect(ctx, func(ctx context.Context) (*output, error) {
			return s.guest.attach(ctx, p.selector(), o.From, o.NoFollow)
		})
		return err
	})
	if err != nil {
		c.stop()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	p.Pid, p.tag = e.pid, e.tag
	c.Path, c.Args, c.Dir, c.User, c.Tag = e.info.Path, append([]string{e.info.Path}, e.info.Args...), e.info.Dir, e.info.User, e.tag
	if e.info.PTY {
		c.PTY = &Size{}
	}
	c.rollback, c.started = e.info.rollback, e.info.Started
	// From beyond the end is now too, as the guest takes it: before a rollback there may have been that much.
	if c.seq = o.From; o.From < 0 || o.From > e.info.Seq {
		c.seq = e.info.Seq
	}
	c.once = o.NoFollow
	c.watch(st)
	if c.Stdin != nil {
		go c.feed()
	}
	return c, nil
}

// event is one thing that a stream of output told.
type event struct {
	started bool
	pid     int
	tag     string
	info    ProcessInfo
	stderr  bool
	data    []byte
	// seq of the first byte of data, or -1 when the stream does not tell.
	seq  int64
	lost int64
	end  *ProcessState
}

// output is a stream of events of one process, of either wire.
type output struct {
	receive func() (event, bool, error)
	shut    func()
	cancel  context.CancelFunc
	// silence cancels a stream from which nothing, not even a sign of life, has come for too long.
	silence *time.Timer
	quiet   chan struct{}
}

// A guest tells every keepalive that it is there; after three times that, the connection is dead.
const (
	keepalive    = "20"
	keepaliveEnd = 60 * time.Second
)

func newOutput(cancel context.CancelFunc, shut func(), receive func() (event, bool, error)) *output {
	o := &output{receive: receive, shut: shut, cancel: cancel, quiet: make(chan struct{})}
	o.silence = time.AfterFunc(keepaliveEnd, func() {
		close(o.quiet)
		cancel()
	})
	o.silence.Stop()
	return o
}

// next returns the next event that is not a keepalive.
func (o *output) next() (event, error) {
	for {
		o.silence.Reset(keepaliveEnd)
		e, ok, err := o.receive()
		o.silence.Stop()
		switch {
		case err != nil:
			select {
			case <-o.quiet:
				err = &Error{Kind: "unavailable", Op: "follow output", Message: "nothing came for " + keepaliveEnd.String()}
			default:
			}
			return event{}, err
		case ok:
			return e, nil
		}
	}
}

// first returns the start event, which comes before all others.
func (o *output) first(ctx context.Context) (event, error) {
	stop := context.AfterFunc(ctx, o.cancel)
	defer stop()
	e, err := o.next()
	if err == nil && !e.started {
		err = &Error{Kind: "internal", Op: "follow output", Message: "the guest did not begin with a start event"}
	}
	return e, err
}

func (o *output) close() {
	o.silence.Stop()
	o.cancel()
	o.shut()
}

func (g *guest) start(ctx context.Context, user string, req *process.StartRequest) (*output, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := request(user, req)
	r.Header().Set("Keepalive-Ping-Interval", keepalive)
	stream, err := g.process.Start(ctx, r)
	if err != nil {
		cancel()
		return nil, startError(req, err)
	}
	pid := 0
	return newOutput(cancel, func() { stream.Close() }, func() (event, bool, error) {
		if !stream.Receive() {
			if err := stream.Err(); err != nil {
				return event{}, false, startError(req, err)
			}
			return event{}, false, streamEnd("follow output", nil)
		}
		e := event{seq: -1}
		switch ev := stream.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Start:
			pid = int(ev.Start.GetPid())
			e.started, e.pid, e.tag = true, pid, req.GetTag()
			e.info.rollback = stream.ResponseHeader().Get("Warren-Rollback")
		case *process.ProcessEvent_Data:
			switch out := ev.Data.GetOutput().(type) {
			case *process.ProcessEvent_DataEvent_Stdout:
				e.data = out.Stdout
			case *process.ProcessEvent_DataEvent_Stderr:
				e.data, e.stderr = out.Stderr, true
			case *process.ProcessEvent_DataEvent_Pty:
				e.data = out.Pty
			}
		case *process.ProcessEvent_End:
			e.end = &ProcessState{pid: pid, code: int(ev.End.GetExitCode()), status: ev.End.GetStatus()}
			if msg := ev.End.GetError(); msg != "" && (e.end.status == "" || strings.HasPrefix(msg, "killed: ")) {
				e.end.status = msg
			}
		default:
			return e, false, nil
		}
		return e, true, nil
	}), nil
}

// startError judges what the guest said of a start. On its wire a program that is not there, or cannot be run, is an invalid
// argument like others, which only the message tells apart.
func startError(req *process.StartRequest, err error) error {
	own := connect.IsWireError(err) && len(details(err)) == 0
	err = guestError("start", err)
	var e *Error
	if errors.As(err, &e) && e.ID == "" && e.Op == "start" {
		e.ID = req.GetProcess().GetCmd()
		ends := func(with string) bool { return own && e.Kind == "invalid" && strings.HasSuffix(e.Message, with) }
		switch {
		case ends("is not in PATH"):
			e.Kind, e.Message = "file_not_found", "not in the PATH of the sandbox"
		case ends("no such file or directory"):
			e.Kind = "file_not_found"
		case (ends("permission denied") || ends("exec format error")) && !strings.Contains(e.Message, "cwd "):
			e.Kind = "file_denied"
		}
	}
	return err
}

func (g *guest) attach(ctx context.Context, sel *guestv1.ProcessSelector, from int64, once bool) (*output, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := request("", &guestv1.AttachRequest{Process: sel, FromSeq: from, NoFollow: once})
	r.Header().Set("Keepalive-Ping-Interval", keepalive)
	stream, err := g.warren.Attach(ctx, r)
	if err != nil {
		cancel()
		return nil, fromWire("attach", err)
	}
	return newOutput(cancel, func() { stream.Close() }, func() (event, bool, error) {
		if !stream.Receive() {
			if err := stream.Err(); err != nil {
				return event{}, false, fromWire("attach", err)
			}
			if once {
				return event{}, false, errCaughtUp
			}
			return event{}, false, streamEnd("attach", nil)
		}
		e := event{seq: -1}
		switch ev := stream.Msg().GetEvent().(type) {
		case *guestv1.AttachResponse_Start:
			e.info = processInfo(ev.Start)
			e.started, e.pid, e.tag = true, e.info.PID, e.info.Tag
		case *guestv1.AttachResponse_Output:
			e.seq = ev.Output.GetSeq()
			switch out := ev.Output.GetData().(type) {
			case *guestv1.Output_Stdout:
				e.data = out.Stdout
			case *guestv1.Output_Stderr:
				e.data, e.stderr = out.Stderr, true
			case *guestv1.Output_Pty:
				e.data = out.Pty
			}
		case *guestv1.AttachResponse_LostBefore:
			e.lost = ev.LostBefore
		case *guestv1.AttachResponse_End:
			e.end = &ProcessState{pid: int(ev.End.GetPid()), code: int(ev.End.GetExitCode()), status: ev.End.GetStatus()}
		default:
			return e, false, nil
		}
		return e, true, nil
	}), nil
}

// errCaughtUp ends the log of a process that still runs.
var errCaughtUp = errors.New("end of the output so far")
