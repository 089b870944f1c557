package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warren-sandbox/warren"
)

// execFlags say how a command runs in a sandbox, shared by run, exec and shell.
type execFlags struct {
	interactive, tty bool
	user, workdir    string
	timeout          time.Duration
}

func (f *execFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SetInterspersed(false)
	flags.BoolVarP(&f.interactive, "interactive", "i", false, "send standard input, also from a terminal (a pipe or file is always sent)")
	flags.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	flags.StringVarP(&f.workdir, "workdir", "w", "", "directory to run in (default /workspace)")
	flags.StringVarP(&f.user, "user", "u", "", `user to run as: "user" (the default), "root" or another of the image, by name or number`)
	flags.DurationVar(&f.timeout, "timeout", 0, "kill the command after this long and exit with 124")
}

// exitTimeout is what timeout(1) exits with.
const exitTimeout = 124

func execCommand(a *app) *cobra.Command {
	var f execFlags
	var env, envFiles []string
	var detach bool
	var attach, tag string
	var from int64
	cmd := &cobra.Command{
		Use:   "exec ID [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox and exit as it did: with its exit code, or 128 and the number of the signal that ended it; 127 when
there is no such command, 126 when it cannot be run. Its output comes as it is; a terminal gets it without sequences that could do
harm there.

The command runs on when this program or the daemon ends. Signals are passed on to it; a second Ctrl-C kills it. When the sandbox
does not take a signal within 2s, this program ends alone. The command runs as "user"; -u root runs it as root.`,
		Example: `  warren exec fix -- go test ./...
  warren exec -it fix -- bash                        an interactive shell
  warren exec fix -w /tmp -e DEBUG=1 -u root -- env
  tar c . | warren exec fix -- tar x                 standard input is passed on
  pid=$(warren exec -d fix -- ./server)              start it and go
  warren exec fix --attach $pid                      its output from the beginning, then as it comes`,
		RunE: func(cmd *cobra.Command, args []string) error {
			// Flags may stand on both sides of ID, but what follows the first word of the command is the command's.
			if len(args) > 0 {
				if err := cmd.Flags().Parse(args[1:]); err != nil {
					return cmd.FlagErrorFunc()(cmd, err)
				}
				if help, _ := cmd.Flags().GetBool("help"); help {
					return cmd.Help()
				}
				args = append(args[:1:1], cmd.Flags().Args()...)
			}
			id, argv, err := splitExec(args, attach != "")
			if err != nil {
				return &usageError{err, cmd.CommandPath()}
			}
			vars, err := environment(envFiles, env)
			if err != nil {
				return err
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(id)
			if attach != "" {
				return a.attach(cmd.Context(), sb, attach, from, f)
			}
			command := f.command(sb, argv, vars)
			command.Tag = tag
			if detach {
				return a.startDetached(cmd.Context(), command)
			}
			return a.execute(cmd.Context(), command, f)
		},
	}
	f.register(cmd)
	flags := cmd.Flags()
	flags.StringArrayVarP(&env, "env", "e", nil, "set a variable, as K=V; K alone takes the value from here")
	flags.StringArrayVar(&envFiles, "env-file", nil, "read variables from a file, one K=V a line")
	flags.BoolVarP(&detach, "detach", "d", false, "print the process id and leave the command running")
	flags.StringVar(&tag, "tag", "", "name of the process, for --attach and logs")
	flags.StringVar(&attach, "attach", "", "follow this process, by its id or tag, instead of starting one")
	flags.Int64Var(&from, "from", 0, "with --attach: the byte of output to begin with; -1 means now")
	return cmd
}

// splitExec finds the id and the command.
func splitExec(args []string, attach bool) (id string, argv []string, err error) {
	switch {
	case len(args) == 0:
		return "", nil, errors.New("missing ID")
	case attach && len(args) > 1:
		return "", nil, errors.New("--attach takes no command")
	case !attach && len(args) == 1:
		return "", nil, errors.New("missing COMMAND")
	}
	return args[0], args[1:], nil
}

// command prepares a command.
func (f *execFlags) command(sb *warren.Sandbox, argv []string, env map[string]string) *warren.Cmd {
	cmd := sb.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.User = f.workdir, f.user
	for _, k := range sortedKeys(env) {
		cmd.Env = append(cmd.Env, k+"="+env[k])
	}
	return cmd
}

func (a *app) startDetached(ctx context.Context, cmd *warren.Cmd) error {
	if err := cmd.Start(ctx); err != nil {
		return startFailure(a, err)
	}
	cmd.Detach()
	if a.json {
		return a.printJSON(struct {
			PID int    `json:"pid"`
			Tag string `json:"tag,omitempty"`
		}{cmd.Process.Pid, cmd.Tag})
	}
	_, err := fmt.Fprintln(a.out, cmd.Process.Pid)
	return err
}

// execute runs a command with this program's streams and returns its end as an exit code.
func (a *app) execute(ctx context.Context, cmd *warren.Cmd, f execFlags) error {
	if f.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.timeout)
		defer cancel()
	}
	out := a.commandOutput(f.tty)
	cmd.Stdout, cmd.Stderr = out.stdout, out.stderr
	stdinTerminal := isTerminal(a.in)
	if a.in != nil && (f.interactive || !stdinTerminal) {
		cmd.Stdin = a.in
	}
	if f.tty {
		cmd.PTY = a.terminalSize()
		if term := os.Getenv("TERM"); term != "" {
			cmd.Env = append([]string{"TERM=" + term}, cmd.Env...)
		}
		if f.interactive && stdinTerminal {
			restore, err := rawTerminal(a.in.(*os.File))
			if err != nil {
				return err
			}
			defer restore()
		}
	}
	cmd.RolledBack = a.rolledBack(f.tty)
	signals := forwardedSignals()
	defer signal.Stop(signals)
	early, err := a.begin(signals, func() error { return cmd.Start(ctx) })
	if err != nil {
		return a.beginFailure(ctx, f, err)
	}
	return a.wait(ctx, cmd, f, signals, early, out)
}

// patience is how long the sandbox may take to pass a signal on, and to tell of the end that a kill or a timeout brought about. Who
// is root inside can stop what would answer.
const patience = 2 * time.Second

// begin starts or attaches. A signal that comes meanwhile is returned, for the command; when it cannot have it soon, or another
// comes, the program ends.
func (a *app) begin(signals <-chan os.Signal, start func() error) (early os.Signal, err error) {
	done := make(chan error, 1)
	go func() { done <- start() }()
	var late <-chan time.Time
	for {
		select {
		case err := <-done:
			return early, err
		case sig := <-signals:
			if early != nil {
				return nil, a.abandon(sig)
			}
			early, late = sig, time.After(patience)
		case <-late:
			return nil, a.abandon(early)
		}
	}
}

// beginFailure is the exit when nothing began.
func (a *app) beginFailure(ctx context.Context, f execFlags, err error) error {
	if f.timeout > 0 && errors.Is(err, context.DeadlineExceeded) && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return a.tooLate(f)
	}
	return startFailure(a, err)
}

// abandon is the exit by a signal that the command may not have got.
func (a *app) abandon(sig os.Signal) error {
	a.notice("gave up, for the sandbox does not answer; the command may still run")
	return exitError(128 + int(linuxSignal(sig)))
}

// tooLate is the exit by a timeout after which the sandbox told nothing.
func (a *app) tooLate(f execFlags) error {
	fmt.Fprintf(a.err, "%s %v are over and the sandbox does not answer; the command may still run\n", a.errorStyle("warren:"), f.timeout)
	return exitError(exitTimeout)
}

// wait passes signals on, the one that came early first, until the command has ended.
func (a *app) wait(ctx context.Context, cmd *warren.Cmd, f execFlags, signals <-chan os.Signal, early os.Signal, out *commandOutput) error {
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	if f.tty {
		resized, stop := watchTerminal(a.out)
		defer stop()
		over := make(chan struct{})
		defer close(over)
		go a.resize(ctx, cmd, resized, over)
	}
	// One call at a time, so that signals keep their order; the loop waits for none of them.
	type passed struct {
		sig os.Signal
		err error
	}
	taken := make(chan passed, 1)
	var queue []os.Signal
	busy := false
	pass := func() {
		if busy || len(queue) == 0 {
			return
		}
		busy = true
		sig := queue[0]
		queue = queue[1:]
		go func() {
			quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			taken <- passed{sig, cmd.Process.SignalGroup(quit, linuxSignal(sig))}
		}()
	}
	if early != nil {
		queue = append(queue, early)
		pass()
	}
	interrupts := 0
	if early == os.Interrupt {
		interrupts++
	}
	ended := ctx.Done()
	var late <-chan time.Time
	for {
		select {
		case err := <-done:
			return a.ended(ctx, cmd, f, err, out)
		case <-ended:
			ended, late = nil, time.After(patience)
		case <-late:
			if f.timeout > 0 && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return a.tooLate(f)
			}
			late = nil
		case p := <-taken:
			busy = false
			switch {
			case p.err == nil, errors.Is(p.err, os.ErrProcessDone): // a process that has just ended is none to tell
			case errors.Is(p.err, context.DeadlineExceeded):
				return a.abandon(p.sig)
			default:
				a.notice("could not pass %v on: %s; Ctrl-C again kills the command", p.sig, describe(p.err))
			}
			pass()
		case sig := <-signals:
			if sig == os.Interrupt {
				interrupts++
			}
			if busy && (sig == os.Interrupt || linuxSignal(sig) == syscall.SIGTERM) {
				// The one before is still on its way, and would have arrived by now.
				select {
				case <-taken:
					busy = false
				case <-time.After(patience / 4):
					return a.abandon(sig)
				}
			}
			if interrupts > 1 {
				go func() {
					quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
					defer cancel()
					_ = cmd.Process.Kill(quit)
				}()
				select {
				case err := <-done:
					return a.ended(ctx, cmd, f, err, out)
				case <-signals:
				case <-time.After(2 * patience):
				}
				return a.abandon(sig)
			}
			queue = append(queue, sig)
			pass()
		}
	}
}

// resize passes the size of the terminal on.
func (a *app) resize(ctx context.Context, cmd *warren.Cmd, resized, over <-chan struct{}) {
	for {
		select {
		case <-over:
			return
		case <-resized:
			if size := a.terminalSize(); size != nil {
				soon, cancel := context.WithTimeout(ctx, patience)
				_ = cmd.Process.Resize(soon, *size)
				cancel()
			}
		}
	}
}

// ended turns the end of a command into this program's exit.
func (a *app) ended(ctx context.Context, cmd *warren.Cmd, f execFlags, err error, out *commandOutput) error {
	state := cmd.ProcessState
	if state == nil {
		if err == nil {
			return nil // followed up to now only
		}
		if f.timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
			// One that was started here has been killed; what it attached to has not.
			quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			if err := cmd.Process.Kill(quit); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return a.tooLate(f)
			}
			return a.timedOut(f)
		}
		return err
	}
	if err := out.end(state); err != nil {
		return err
	}
	// The news of the end may come before that of the kill which brought it about.
	if f.timeout > 0 && errors.Is(ctx.Err(), context.DeadlineExceeded) && !state.Exited() {
		return a.timedOut(f)
	}
	var exit *warren.ExitError
	if err != nil && !errors.As(err, &exit) && state.Success() {
		if brokenPipe(err) {
			return exitError(128 + 13)
		}
		return err // output or input that failed
	}
	code := exitCode(state)
	if strings.HasPrefix(state.String(), "killed: ") {
		a.notice("%s", escape(state.String()))
	}
	if code == 0 {
		return nil
	}
	return exitError(code)
}

// rolledBack tells the user that the output has a turn. A terminal that passes keys on as they are does not return by itself.
func (a *app) rolledBack(tty bool) func(int64) {
	return func(int64) {
		raw := ""
		if tty && isTerminal(a.err) {
			raw = "\r"
		}
		a.notice("the sandbox was rolled back; output goes on from there%s", raw)
	}
}

func (a *app) timedOut(f execFlags) error {
	fmt.Fprintf(a.err, "%s the command was killed after %v; give it longer with --timeout\n", a.errorStyle("warren:"), f.timeout)
	return exitError(exitTimeout)
}

// startFailure is the exit of a command that could not begin: 127 when there is none, 126 when it cannot be run.
func startFailure(a *app, err error) error {
	code := exitFailure
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = 127
	case errors.Is(err, fs.ErrPermission):
		code = 126
	default:
		return err
	}
	fmt.Fprintln(a.err, a.errorStyle("warren:"), describe(err))
	return exitError(code)
}

// exitCode is the shell's view of an end: the code, or 128 and the signal's number.
func exitCode(state *warren.ProcessState) int {
	if code := state.ExitCode(); code >= 0 {
		return code
	}
	status := strings.TrimSuffix(state.String(), " (core dumped)")
	if strings.HasPrefix(status, "killed: out of memory") {
		return 128 + 9
	}
	name, _ := strings.CutPrefix(status, "signal: ")
	for n, known := range linuxSignals {
		if known == name {
			return 128 + n
		}
	}
	return 128 + 9
}

// linuxSignals are the signals of a sandbox, by number, as package syscall names them on Linux.
var linuxSignals = map[int]string{
	1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted", 7: "bus error",
	8: "floating point exception", 9: "killed", 10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
	13: "broken pipe", 14: "alarm clock", 15: "terminated", 16: "stack fault", 24: "CPU time limit exceeded", 25: "file size limit exceeded",
	31: "bad system call",
}

func (a *app) attach(ctx context.Context, sb *warren.Sandbox, process string, from int64, f execFlags) error {
	out := a.commandOutput(false)
	opts := warren.AttachOptions{From: from, Stdout: out.stdout, Stderr: out.stderr, RolledBack: a.rolledBack(f.interactive)}
	opts.PID, opts.Tag = pidOrTag(process)
	if f.interactive {
		opts.Stdin = a.in
	}
	if f.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.timeout)
		defer cancel()
	}
	signals := forwardedSignals()
	defer signal.Stop(signals)
	var cmd *warren.Cmd
	early, err := a.begin(signals, func() (err error) {
		cmd, err = sb.Attach(ctx, opts)
		return err
	})
	if err != nil {
		if f.timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
			return a.tooLate(f)
		}
		return err
	}
	f.tty = cmd.PTY != nil && isTerminal(a.out)
	if f.tty && f.interactive && isTerminal(a.in) {
		restore, err := rawTerminal(a.in.(*os.File))
		if err != nil {
			return err
		}
		defer restore()
	}
	return a.wait(ctx, cmd, f, signals, early, out)
}

// terminalSize returns the size of this program's terminal, or 80 by 24 without one.
func (a *app) terminalSize() *warren.Size {
	for _, stream := range []any{a.out, a.in, a.err} {
		if f, ok := stream.(*os.File); ok {
			if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 && rows > 0 {
				return &warren.Size{Cols: uint32(cols), Rows: uint32(rows)}
			}
		}
	}
	return &warren.Size{Cols: 80, Rows: 24}
}

// rawTerminal passes each key on as it is, until restore is called.
func rawTerminal(f *os.File) (restore func(), err error) {
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("set up the terminal: %w", err)
	}
	var once sync.Once
	return func() { once.Do(func() { _ = term.Restore(int(f.Fd()), state) }) }, nil
}

// commandOutput is where the output of a command goes, as it is or as JSON.
type commandOutput struct {
	stdout, stderr io.Writer
	end            func(*warren.ProcessState) error
}

func (a *app) commandOutput(tty bool) *commandOutput {
	if !a.json {
		return &commandOutput{sandboxOutput(a.out), sandboxOutput(a.err), func(*warren.ProcessState) error { return nil }}
	}
	return &commandOutput{
		stdout: &jsonOutput{a: a, stream: "stdout"},
		stderr: &jsonOutput{a: a, stream: "stderr"},
		end: func(state *warren.ProcessState) error {
			return a.printJSON(struct {
				ExitCode int    `json:"exitCode"`
				Status   string `json:"status"`
			}{exitCode(state), state.String()})
		},
	}
}

// jsonOutput prints each piece of output as an object.
type jsonOutput struct {
	a      *app
	stream string
}

func (o *jsonOutput) Write(p []byte) (int, error) {
	line := struct {
		Stream string `json:"stream"`
		Text   string `json:"text,omitempty"`
		Base64 []byte `json:"base64,omitempty"`
	}{Stream: o.stream}
	if utf8.Valid(p) {
		line.Text = string(p)
	} else {
		line.Base64 = p
	}
	if err := o.a.printJSON(line); err != nil {
		return 0, err
	}
	return len(p), nil
}
