package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/file"
	"github.com/warren-sandbox/warren/internal/guest/port"
	"github.com/warren-sandbox/warren/internal/guest/process"
	"github.com/warren-sandbox/warren/internal/guest/search"
	"github.com/warren-sandbox/warren/internal/guest/session"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// status tells all that is known of a process.
func status(p *process.Process) *wire.ProcessStatus {
	started := p.Started
	st := &wire.ProcessStatus{
		PID: uint32(p.PID), Tag: p.Spec.Tag, Cmd: p.Spec.Cmd, Args: p.Spec.Args, Cwd: p.Spec.Dir, User: p.Spec.User.Name,
		PTY: p.Spec.PTY != nil, Running: true, Started: &started, Seq: p.Output.Seq(),
	}
	if end, ended := p.End(); ended {
		st.Running, st.ExitCode, st.Status, st.Ended = false, int32(end.Code), end.Status, &end.Time
	}
	return st
}

// attach replays the output of a process from a sequence number on, and follows it.
func (s *Server) attach(c *call, req *wire.AttachRequest, send func(any) error) error {
	p, err := s.selected(req.Process)
	if err != nil {
		return err
	}
	st := status(p)
	st.Rollback, st.RollbackSeq = s.turn(), p.Output.Turn()
	if err := send(&wire.AttachResponse{Start: st}); err != nil {
		return err
	}
	f := p.Output.Follow(req.FromSeq)
	defer f.Close()
	idle := c.keepalive()
	if req.NoFollow {
		idle = 0
	}
	for {
		chunk, err := f.Next(c.ctx, idle)
		var lost *process.LostError
		switch {
		case err == nil:
			o := &wire.Output{Seq: chunk.Seq}
			switch chunk.Kind {
			case process.Stdout:
				o.Stdout = chunk.Data
			case process.Stderr:
				o.Stderr = chunk.Data
			default:
				o.PTY = chunk.Data
			}
			err = send(&wire.AttachResponse{Output: o})
		case errors.As(err, &lost):
			err = send(&wire.AttachResponse{LostBefore: &lost.Before})
		case errors.Is(err, process.ErrIdle) && req.NoFollow:
			return nil
		case errors.Is(err, process.ErrIdle):
			err = send(&wire.AttachResponse{Keepalive: &wire.Empty{}})
		case errors.Is(err, io.EOF):
			return send(&wire.AttachResponse{End: status(p)})
		}
		if err != nil {
			return err
		}
	}
}

func (s *Server) listProcesses(_ *call, req *wire.ListProcessesRequest) (*wire.ListProcessesResponse, error) {
	list := s.table.Running()
	if req.All {
		list = s.table.All()
	}
	res := &wire.ListProcessesResponse{}
	for _, p := range list {
		res.Processes = append(res.Processes, *status(p))
	}
	return res, nil
}

// maxSignal is the highest signal of Linux.
const maxSignal = 64

func (s *Server) signal(_ *call, req *wire.SignalRequest) (*wire.Empty, error) {
	if req.Signal < 0 || req.Signal > maxSignal {
		return nil, wire.Errorf(wire.InvalidArgument, "signal %d is not between 0 and %d", req.Signal, maxSignal)
	}
	p, err := s.running(req.Process)
	if err != nil {
		return nil, err
	}
	return &wire.Empty{}, processError(p.Signal(syscall.Signal(req.Signal), req.Group))
}

// maxSearches bounds the searches and replacements that run at a time: each may hold several files in memory.
const maxSearches = 2

// searching waits for a place among the searches.
func (s *Server) searching(ctx context.Context) (done func(), err error) {
	select {
	case s.searches <- struct{}{}:
		return func() { <-s.searches }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Server) search(c *call, req *wire.SearchRequest, send func(any) error) error {
	path, err := s.resolve(c.user, req.Path)
	if err != nil {
		return err
	}
	done, err := s.searching(c.ctx)
	if err != nil {
		return err
	}
	defer done()
	return file.Wrap(search.Search(c.ctx, c.user, path, req, func(r *wire.SearchResponse) error { return send(r) }), path)
}

func (s *Server) replace(c *call, req *wire.ReplaceRequest) (*wire.ReplaceResponse, error) {
	path, err := s.resolve(c.user, req.Path)
	if err != nil {
		return nil, err
	}
	done, err := s.searching(c.ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	res, err := search.Replace(c.ctx, c.user, path, req)
	return res, file.Wrap(err, path)
}

// sessionError gives an error of package session its code.
func sessionError(err error) error {
	for _, e := range []struct {
		is   error
		code wire.Code
	}{
		{session.ErrNotFound, wire.NotFound}, {session.ErrExists, wire.AlreadyExists}, {session.ErrTooMany, wire.ResourceExhausted},
		{session.ErrBusy, wire.FailedPrecondition}, {session.ErrInvalid, wire.InvalidArgument}, {session.ErrStart, wire.FailedPrecondition},
	} {
		if errors.Is(err, e.is) {
			return wire.Errorf(e.code, "%v", err)
		}
	}
	return processError(err)
}

func (s *Server) openSession(c *call, req *wire.OpenSessionRequest) (*wire.OpenSessionResponse, error) {
	if err := checkEnv(req.Envs); err != nil {
		return nil, err
	}
	dir, err := s.dirNow(c.user, req.Cwd)
	if err != nil {
		return nil, err
	}
	ses, err := s.sessions.Open(c.ctx, req.ID, c.user, dir, s.environ(c.user, req.Envs))
	if err != nil {
		return nil, sessionError(err)
	}
	return &wire.OpenSessionResponse{ID: ses.ID, PID: uint32(ses.PID())}, nil
}

// session returns the session with that id, if it is the caller's: another user's is as good as none.
func (s *Server) session(c *call, id string) (*session.Session, error) {
	ses, err := s.sessions.Get(id)
	if err == nil && c.user.UID != 0 && c.user.UID != ses.User.UID {
		err = session.ErrNotFound
	}
	return ses, sessionError(err)
}

// farewell is what the shell says on its error output when it is told to exit; no command wrote it.
const farewell = "logout\n"

func (s *Server) runInSession(c *call, req *wire.RunInSessionRequest, send func(any) error) error {
	if req.TimeoutMS < 0 {
		return wire.Errorf(wire.InvalidArgument, "timeoutMs %d is negative", req.TimeoutMS)
	}
	ses, err := s.session(c, req.ID)
	if err != nil {
		return err
	}
	const longest = 1000 * time.Hour
	timeout := time.Duration(min(req.TimeoutMS, longest.Milliseconds())) * time.Millisecond
	run, err := ses.Run(c.ctx, req.Command, timeout)
	if err != nil {
		return sessionError(err)
	}
	defer run.Output.Close()
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	go func() {
		select {
		case <-run.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	var held []byte
	over := int64(-1) // the sequence number after the command's last output, once it is known
	idle := c.keepalive()
	for {
		if over < 0 {
			select {
			case <-run.Done():
				_, over = run.End()
				idle = 0
			default:
			}
		}
		chunk, err := run.Output.Next(ctx, idle)
		var lost *process.LostError
		if held != nil && err == nil && chunk.Kind == process.Stderr {
			if err := send(&wire.RunInSessionResponse{Stderr: held}); err != nil {
				return err
			}
			held = nil
		}
		switch {
		case err == nil && over >= 0 && chunk.Seq >= over:
			err = io.EOF // the next command's
		case err == nil:
			if rest := over - chunk.Seq; over >= 0 && rest < int64(len(chunk.Data)) {
				chunk.Data = chunk.Data[:rest]
			}
			r := &wire.RunInSessionResponse{Stdout: chunk.Data}
			if chunk.Kind == process.Stderr {
				if rest, ok := bytes.CutSuffix(chunk.Data, []byte(farewell)); ok {
					held, chunk.Data = []byte(farewell), rest
				}
				r = &wire.RunInSessionResponse{Stderr: chunk.Data}
			}
			if len(chunk.Data) > 0 {
				err = send(r)
			}
		case errors.As(err, &lost):
			err = wire.Errorf(wire.DataLoss, "the client is too slow: output before byte %d is no longer kept", lost.Before)
		case errors.Is(err, process.ErrIdle) && over < 0:
			err = send(&wire.RunInSessionResponse{Keepalive: &wire.Empty{}})
		case errors.Is(err, context.Canceled) && c.ctx.Err() == nil:
			err = nil // the command has ended: see to the rest of its output
		case errors.Is(err, process.ErrIdle):
			err = io.EOF
		}
		if errors.Is(err, io.EOF) {
			<-run.Done()
			end, _ := run.End()
			if held != nil && !end.Closed {
				if err := send(&wire.RunInSessionResponse{Stderr: held}); err != nil {
					return err
				}
			}
			return send(&wire.RunInSessionResponse{End: &wire.SessionEnd{ExitCode: int32(end.Code), Cwd: end.Dir,
				TimedOut: end.TimedOut, SessionEnded: end.Closed}})
		}
		if err != nil {
			return err
		}
	}
}

func (s *Server) closeSession(c *call, req *wire.CloseSessionRequest) (*wire.Empty, error) {
	ses, err := s.session(c, req.ID)
	if err != nil {
		return nil, err
	}
	ses.Close()
	return &wire.Empty{}, nil
}

func (s *Server) listSessions(*call, *wire.Empty) (*wire.ListSessionsResponse, error) {
	res := &wire.ListSessionsResponse{}
	for _, ses := range s.sessions.List() {
		res.Sessions = append(res.Sessions, wire.SessionInfo{ID: ses.ID, PID: uint32(ses.PID()), User: ses.User.Name, Busy: ses.Busy()})
	}
	return res, nil
}

func (s *Server) watchPorts(c *call, req *wire.WatchPortsRequest, send func(any) error) error {
	omit := []uint16{Port}
	message := func(p port.Port) *wire.Port {
		return &wire.Port{Port: uint32(p.Port), Address: p.Addr.String(), PID: uint32(p.PID), Program: p.Program}
	}
	if req.NoFollow {
		for _, p := range port.List(omit...) {
			if err := send(&wire.WatchPortsResponse{Open: message(p)}); err != nil {
				return err
			}
		}
		return send(&wire.WatchPortsResponse{Ready: &wire.Empty{}})
	}
	return port.Watch(c.ctx, omit, c.keepalive(), port.Events{
		Open:  func(p port.Port) error { return send(&wire.WatchPortsResponse{Open: message(p)}) },
		Close: func(p port.Port) error { return send(&wire.WatchPortsResponse{Close: message(p)}) },
		Ready: func() error { return send(&wire.WatchPortsResponse{Ready: &wire.Empty{}}) },
		Idle:  func() error { return send(&wire.WatchPortsResponse{Keepalive: &wire.Empty{}}) },
	})
}
