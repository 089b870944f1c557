package warren

import (
	"context"
	"io"
	"time"

	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// SessionOptions describe a session.
type SessionOptions struct {
	// ID to know it by. Empty lets the guest choose. When a session of this ID is open, it is refused with [ErrExists].
	ID string
	// Dir to start in. Empty means /workspace.
	Dir string
	// Env is added to the sandbox's environment, as "name=value".
	Env []string
	// User to run as. Empty means the sandbox's default.
	User string
}

// Session is a shell in a sandbox whose directory, variables and functions persist between commands. One command
// runs at a time.
type Session struct {
	ID   string `json:"id"`
	PID  int    `json:"pid,omitempty"`
	User string `json:"user,omitempty"`
	// Busy says that a command ran when the session was listed.
	Busy bool `json:"busy,omitempty"`

	s *Sandbox
}

// Session opens a session.
func (s *Sandbox) Session(ctx context.Context, o SessionOptions) (*Session, error) {
	env, err := envMap(o.Env)
	if err != nil {
		return nil, &Error{Kind: "invalid", Op: "open session", Message: err.Error(), Err: err}
	}
	res, err := s.guest.warren.OpenSession(ctx, request(o.User, &guestv1.OpenSessionRequest{Cwd: o.Dir, Envs: env, Id: o.ID}))
	if err != nil {
		return nil, fromWire("open session", err)
	}
	return &Session{ID: res.Msg.GetId(), PID: int(res.Msg.GetPid()), User: o.User, s: s}, nil
}

// OpenedSession returns a handle on a session that is open, without asking the guest.
func (s *Sandbox) OpenedSession(id string) *Session { return &Session{ID: id, s: s} }

// Sessions returns the open sessions.
func (s *Sandbox) Sessions(ctx context.Context) ([]*Session, error) {
	res, err := s.guest.warren.ListSessions(ctx, request("", &guestv1.ListSessionsRequest{}))
	if err != nil {
		return nil, fromWire("list sessions", err)
	}
	var sessions []*Session
	for _, p := range res.Msg.GetSessions() {
		sessions = append(sessions, &Session{ID: p.GetId(), PID: int(p.GetPid()), User: p.GetUser(), Busy: p.GetBusy(), s: s})
	}
	return sessions, nil
}

// SessionRun says how to run a command in a session.
type SessionRun struct {
	// Stdout and Stderr take the command's output. Nil discards it.
	Stdout, Stderr io.Writer
	// Timeout interrupts the command; 0 means none.
	Timeout time.Duration
}

// SessionResult is how a command in a session ended. A non-zero exit is a result, not an error.
type SessionResult struct {
	ExitCode int `json:"exitCode"`
	// Dir is the directory of the session after the command.
	Dir string `json:"cwd"`
	// TimedOut says that the timeout ended it.
	TimedOut bool `json:"timedOut,omitempty"`
	// Ended says that the shell itself ended, as by exit; the session is closed.
	Ended bool `json:"sessionEnded,omitempty"`
}

// Run runs one command, in the shell's own syntax, and returns when it has ended. A connection that breaks in the
// middle is an error: a command in a session cannot be attached to again.
func (e *Session) Run(ctx context.Context, command string, o SessionRun) (*SessionResult, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := e.s.guest.warren.RunInSession(ctx, request(e.User, &guestv1.RunInSessionRequest{Id: e.ID, Command: command, TimeoutMs: o.Timeout.Milliseconds()}))
	if err != nil {
		return nil, fromWire("run in session", err)
	}
	defer stream.Close()
	for stream.Receive() {
		var w io.Writer
		var data []byte
		switch ev := stream.Msg().GetEvent().(type) {
		case *guestv1.RunInSessionResponse_Stdout:
			w, data = o.Stdout, ev.Stdout
		case *guestv1.RunInSessionResponse_Stderr:
			w, data = o.Stderr, ev.Stderr
		case *guestv1.RunInSessionResponse_End_:
			return &SessionResult{ExitCode: int(ev.End.GetExitCode()), Dir: ev.End.GetCwd(), TimedOut: ev.End.GetTimedOut(), Ended: ev.End.GetSessionEnded()}, nil
		}
		if w != nil && len(data) > 0 {
			if _, err := w.Write(data); err != nil {
				return nil, err
			}
		}
	}
	return nil, streamEnd("run in session", stream.Err())
}

// Close ends the session and what runs in it.
func (e *Session) Close(ctx context.Context) error {
	_, err := e.s.guest.warren.CloseSession(ctx, request(e.User, &guestv1.CloseSessionRequest{Id: e.ID}))
	return fromWire("close session", err)
}
