package guest

import (
	"errors"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/process"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// processError gives an error of package process its code.
func processError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, process.ErrNotFound):
		return wire.Errorf(wire.NotFound, "%v", err)
	case errors.Is(err, process.ErrTooMany), errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM):
		return wire.Errorf(wire.ResourceExhausted, "%v", err)
	case errors.Is(err, process.ErrInvalid):
		return wire.Errorf(wire.InvalidArgument, "%v", err)
	case errors.Is(err, syscall.EPERM):
		return wire.Errorf(wire.PermissionDenied, "%v", err)
	}
	return err
}

// workDir resolves the working directory of a process: the request's, else the sandbox's, else the user's home. What nobody asked for need not be
// there: there are others then.
func (s *Server) workDir(u *account.User, cwd string) (dir string, others []string, err error) {
	explicit := cwd != ""
	if !explicit {
		cwd = s.get().dir
	}
	switch {
	case strings.IndexByte(cwd, 0) >= 0:
		return "", nil, wire.Errorf(wire.InvalidArgument, "cwd holds a zero byte")
	case cwd == "" || cwd == "~":
		cwd = u.Home
	case strings.HasPrefix(cwd, "~/"):
		cwd = filepath.Join(u.Home, cwd[2:])
	case !filepath.IsAbs(cwd):
		cwd = filepath.Join(u.Home, cwd)
	}
	if explicit {
		return cwd, nil, nil
	}
	return cwd, []string{u.Home, "/"}, nil
}

// dirNow is the working directory of a process that starts now.
func (s *Server) dirNow(u *account.User, cwd string) (string, error) {
	dir, others, err := s.workDir(u, cwd)
	if err != nil || others == nil {
		return dir, err
	}
	dir, err = process.FirstDir(u, append([]string{dir}, others...))
	return dir, processError(err)
}

// start starts what a request asks for.
func (s *Server) start(u *account.User, req *wire.StartRequest) (*process.Process, error) {
	if req.Process == nil {
		return nil, wire.Errorf(wire.InvalidArgument, "no process is given")
	}
	if err := checkEnv(req.Process.Envs); err != nil {
		return nil, err
	}
	cwd := ""
	if req.Process.Cwd != nil {
		cwd = *req.Process.Cwd
	}
	dir, others, err := s.workDir(u, cwd)
	if err != nil {
		return nil, err
	}
	spec := process.Spec{
		Cmd: req.Process.Cmd, Args: req.Process.Args, Env: s.environ(u, req.Process.Envs), Dir: dir, OtherDirs: others, User: u,
		Stdin: req.Stdin == nil || *req.Stdin, Label: req.Process,
	}
	if req.Tag != nil {
		spec.Tag = *req.Tag
	}
	if req.PTY != nil {
		spec.PTY = &process.Size{}
		if sz := req.PTY.Size; sz != nil {
			spec.PTY = &process.Size{Cols: sz.Cols, Rows: sz.Rows}
		}
	}
	p, err := s.table.Start(spec)
	return p, processError(err)
}

// selected returns the process that a selector names.
func (s *Server) selected(sel *wire.ProcessSelector) (*process.Process, error) {
	var p *process.Process
	var err error
	switch {
	case sel == nil || sel.PID == nil && sel.Tag == nil:
		return nil, wire.Errorf(wire.InvalidArgument, "no process is named: give its pid or its tag")
	case sel.PID != nil:
		p, err = s.table.ByPID(int(*sel.PID))
	default:
		p, err = s.table.ByTag(*sel.Tag)
	}
	return p, processError(err)
}

// running returns the process that a selector names, if it runs.
func (s *Server) running(sel *wire.ProcessSelector) (*process.Process, error) {
	p, err := s.selected(sel)
	if err != nil {
		return nil, err
	}
	if _, ended := p.End(); ended {
		return nil, wire.Errorf(wire.NotFound, "process %d has ended", p.PID)
	}
	return p, nil
}

func (s *Server) processList(*call, *wire.ListRequest) (*wire.ListResponse, error) {
	res := &wire.ListResponse{}
	for _, p := range s.table.Running() {
		info := wire.ProcessInfo{PID: uint32(p.PID)}
		info.Config, _ = p.Spec.Label.(*wire.ProcessConfig)
		if p.Spec.Tag != "" {
			info.Tag = &p.Spec.Tag
		}
		res.Processes = append(res.Processes, info)
	}
	return res, nil
}

// processStart starts a process and follows it. The client may leave; only its deadline ends the process.
func (s *Server) processStart(c *call, req *wire.StartRequest, send func(any) error) error {
	p, err := s.start(c.user, req)
	if err != nil {
		return err
	}
	began := time.Now()
	err = follow(c, p, p.Output.Follow(0), send)
	if _, ended := p.End(); c.timeout > 0 && !ended {
		// The deadline holds whether or not the client is still there.
		time.AfterFunc(max(c.timeout-time.Since(began), 0), func() { _ = p.Kill() })
	}
	return err
}

func (s *Server) processConnect(c *call, req *wire.ConnectRequest, send func(any) error) error {
	p, err := s.running(req.Process)
	if err != nil {
		return err
	}
	return follow(c, p, p.Output.Follow(-1), send)
}

// follow sends a start event, output, and an end event.
func follow(c *call, p *process.Process, f *process.Follower, send func(any) error) error {
	defer f.Close()
	event := func(e *wire.ProcessEvent) error { return send(&wire.StartResponse{Event: e}) }
	if err := event(&wire.ProcessEvent{Start: &wire.StartEvent{PID: uint32(p.PID)}}); err != nil {
		return err
	}
	for {
		chunk, err := f.Next(c.ctx, c.keepalive())
		var lost *process.LostError
		switch {
		case err == nil:
			d := &wire.DataEvent{}
			switch chunk.Kind {
			case process.Stdout:
				d.Stdout = chunk.Data
			case process.Stderr:
				d.Stderr = chunk.Data
			default:
				d.PTY = chunk.Data
			}
			err = event(&wire.ProcessEvent{Data: d})
		case errors.Is(err, process.ErrIdle):
			err = event(&wire.ProcessEvent{Keepalive: &wire.Empty{}})
		case errors.Is(err, io.EOF):
			end, _ := p.End()
			e := &wire.EndEvent{ExitCode: int32(end.Code), Exited: end.Exited, Status: end.Status}
			if end.Code != 0 {
				e.Error = &end.Status
			}
			return event(&wire.ProcessEvent{End: e})
		case errors.As(err, &lost):
			// This wire has no way to tell of a gap, so the stream must not go on as if there were none.
			err = wire.Errorf(wire.DataLoss, "the client is too slow: output before byte %d is no longer kept", lost.Before)
		}
		if err != nil {
			return err
		}
	}
}

func (s *Server) processUpdate(_ *call, req *wire.UpdateRequest) (*wire.Empty, error) {
	p, err := s.running(req.Process)
	if err != nil {
		return nil, err
	}
	if req.PTY != nil && req.PTY.Size != nil {
		err = processError(p.Resize(process.Size{Cols: req.PTY.Size.Cols, Rows: req.PTY.Size.Rows}))
	}
	return &wire.Empty{}, err
}

// input writes input to a process. What does not fit its kind is the server's fault on this wire: internal.
func input(c *call, p *process.Process, in *wire.ProcessInput) error {
	if in == nil || in.Stdin == nil && in.PTY == nil {
		return wire.Errorf(wire.InvalidArgument, "no input is given")
	}
	data, pty := in.Stdin, false
	if in.PTY != nil {
		data, pty = in.PTY, true
	}
	err := p.Write(c.ctx, data, pty)
	if errors.Is(err, process.ErrInvalid) {
		return wire.Errorf(wire.Internal, "%v", err)
	}
	return err
}

func (s *Server) processSendInput(c *call, req *wire.SendInputRequest) (*wire.Empty, error) {
	p, err := s.running(req.Process)
	if err != nil {
		return nil, err
	}
	return &wire.Empty{}, input(c, p, req.Input)
}

func (s *Server) processStreamInput(c *call, next func() (*wire.StreamInputRequest, error)) (*wire.Empty, error) {
	var p *process.Process
	for {
		req, err := next()
		switch {
		case errors.Is(err, io.EOF):
			return &wire.Empty{}, nil
		case err != nil:
			return nil, err
		case req.Start != nil:
			if p != nil {
				return nil, wire.Errorf(wire.InvalidArgument, "a second start in one stream")
			}
			p, err = s.running(req.Start.Process)
		case req.Data != nil:
			if p == nil {
				return nil, wire.Errorf(wire.InvalidArgument, "data before the start")
			}
			err = input(c, p, req.Data.Input)
		case req.Keepalive == nil:
			err = wire.Errorf(wire.InvalidArgument, "an event of no kind")
		}
		if err != nil {
			return nil, err
		}
	}
}

func (s *Server) processSendSignal(_ *call, req *wire.SendSignalRequest) (*wire.Empty, error) {
	p, err := s.running(req.Process)
	if err != nil {
		return nil, err
	}
	switch req.Signal {
	case wire.SignalKill:
		// With its group: a killed shell cannot end its children itself.
		err = p.Kill()
	case wire.SignalTerm:
		err = p.Signal(syscall.SIGTERM, false)
	default:
		return nil, wire.Errorf(wire.Unimplemented, "signal %d: this service sends SIGNAL_SIGTERM and SIGNAL_SIGKILL only", req.Signal)
	}
	return &wire.Empty{}, processError(err)
}

func (s *Server) processCloseStdin(_ *call, req *wire.ConnectRequest) (*wire.Empty, error) {
	p, err := s.running(req.Process)
	if err != nil {
		return nil, err
	}
	if err := p.CloseStdin(); err != nil {
		return nil, wire.Errorf(wire.Internal, "%v", err)
	}
	return &wire.Empty{}, nil
}
