package warren

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/proto/e2b/process"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// Process is a running process in a sandbox.
type Process struct {
	// Pid in the sandbox.
	Pid int

	sb  *Sandbox
	tag string
	own bool // the tag is this process's alone
}

// FindProcess returns a handle on the process with this PID, without asking whether there is one.
func (s *Sandbox) FindProcess(pid int) *Process { return &Process{Pid: pid, sb: s} }

// selector prefers the tag where it is unique: a PID may be another process's after a restart.
func (p *Process) selector() *guestv1.ProcessSelector {
	if p.own || p.Pid == 0 {
		return &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Tag{Tag: p.tag}}
	}
	return &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Pid{Pid: uint32(p.Pid)}}
}

func (p *Process) e2b() *process.ProcessSelector {
	if p.own {
		return &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: p.tag}}
	}
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: uint32(p.Pid)}}
}

// Signal sends a signal to the process. A process that has ended gives os.ErrProcessDone.
func (p *Process) Signal(ctx context.Context, sig os.Signal) error {
	n, err := signalNumber(sig)
	if err != nil {
		return err
	}
	return p.signal(ctx, n, false)
}

// SignalGroup sends a signal to the process and all of its process group, as a terminal's ^C does.
func (p *Process) SignalGroup(ctx context.Context, sig os.Signal) error {
	n, err := signalNumber(sig)
	if err != nil {
		return err
	}
	return p.signal(ctx, n, true)
}

func signalNumber(sig os.Signal) (int32, error) {
	switch s := sig.(type) {
	case syscall.Signal:
		return int32(s), nil
	}
	return 0, fmt.Errorf("signal %v: %w: want a syscall.Signal", sig, ErrInvalid)
}

// Kill ends the process and all of its process group.
func (p *Process) Kill(ctx context.Context) error { return p.signal(ctx, 9, true) }

func (p *Process) signal(ctx context.Context, n int32, group bool) error {
	_, err := p.sb.guest.warren.Signal(ctx, request("", &guestv1.SignalRequest{Process: p.selector(), Signal: n, Group: group}))
	if err != nil && connect.IsWireError(err) && connect.CodeOf(err) == connect.CodeNotFound && len(details(err)) == 0 {
		return os.ErrProcessDone
	}
	return fromWire("signal", err)
}

// Resize changes the size of the process's terminal.
func (p *Process) Resize(ctx context.Context, size Size) error {
	_, err := p.sb.guest.process.Update(ctx, request("", &process.UpdateRequest{
		Process: p.e2b(), Pty: &process.PTY{Size: &process.PTY_Size{Cols: size.Cols, Rows: size.Rows}},
	}))
	return fromWire("resize terminal", err)
}

// ProcessState says how a process ended.
type ProcessState struct {
	pid    int
	code   int
	status string
}

// Pid returns the process's PID in the sandbox.
func (p *ProcessState) Pid() int { return p.pid }

// ExitCode returns the exit code, or -1 when a signal ended the process.
func (p *ProcessState) ExitCode() int {
	if p == nil {
		return -1
	}
	return p.code
}

// Success reports whether the process exited with 0.
func (p *ProcessState) Success() bool { return p.code == 0 }

// Exited reports whether the process ended by itself rather than by a signal.
func (p *ProcessState) Exited() bool { return p.code >= 0 }

// String returns how the process ended, such as "exit status 3", "signal: killed" or
// "killed: out of memory (limit 512 MiB)".
func (p *ProcessState) String() string {
	switch {
	case p == nil:
		return "<nil>"
	case p.status != "":
		return p.status
	}
	return fmt.Sprintf("exit status %d", p.code)
}

// ExitError says that a command ended with another exit code than 0, or by a signal.
type ExitError struct {
	*ProcessState
	// Stderr is the beginning and the end of the standard error, if Output collected it.
	Stderr []byte

	cause error
}

// Error returns how the process ended.
func (e *ExitError) Error() string { return e.ProcessState.String() }

// Unwrap returns why the command was ended, such as context.DeadlineExceeded, if this side ended it.
func (e *ExitError) Unwrap() error { return e.cause }

// ProcessInfo describes a process in a sandbox.
type ProcessInfo struct {
	PID  int      `json:"pid"`
	Tag  string   `json:"tag,omitempty"`
	Path string   `json:"cmd"`
	Args []string `json:"args,omitempty"`
	Dir  string   `json:"cwd,omitempty"`
	User string   `json:"user,omitempty"`
	PTY  bool     `json:"pty,omitempty"`
	// Running is false for one that ended lately; ExitCode and Status say how.
	Running  bool      `json:"running"`
	ExitCode int       `json:"exitCode"`
	Status   string    `json:"status,omitempty"`
	Started  time.Time `json:"started,omitzero"`
	Ended    time.Time `json:"ended,omitzero"`
	// Seq counts the bytes of output so far.
	Seq int64 `json:"seq"`

	// The last rollback of the sandbox, and where the output went on after it: a beginning stream tells.
	rollback    string
	rollbackSeq int64
}

func processInfo(p *guestv1.ProcessStatus) ProcessInfo {
	return ProcessInfo{
		PID: int(p.GetPid()), Tag: p.GetTag(), Path: p.GetCmd(), Args: p.GetArgs(), Dir: p.GetCwd(), User: p.GetUser(), PTY: p.GetPty(),
		Running: p.GetRunning(), ExitCode: int(p.GetExitCode()), Status: p.GetStatus(), Started: timeFrom(p.GetStarted()), Ended: timeFrom(p.GetEnded()), Seq: p.GetSeq(),
		rollback: p.GetRollback(), rollbackSeq: p.GetRollbackSeq(),
	}
}

// Processes returns the running commands and terminals that clients started, and with all also those that ended lately.
func (s *Sandbox) Processes(ctx context.Context, all bool) ([]ProcessInfo, error) {
	res, err := s.guest.warren.ListProcesses(ctx, request("", &guestv1.ListProcessesRequest{All: all}))
	if err != nil {
		return nil, fromWire("list processes", err)
	}
	var list []ProcessInfo
	for _, p := range res.Msg.GetProcesses() {
		list = append(list, processInfo(p))
	}
	return list, nil
}
