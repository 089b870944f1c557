package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/process"
	"github.com/warren-sandbox/warren/internal/guest/service"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// serviceTag begins the tag of a service's process.
const serviceTag = "service:"

// startService starts a program of a service, with the settings that the sandbox has at that moment.
func (s *Server) startService(spec service.Spec, command []string, hidden bool) (*process.Process, error) {
	u, err := s.user(spec.User)
	if err != nil {
		return nil, err
	}
	dir, err := s.dirNow(u, spec.Dir)
	if err != nil {
		return nil, err
	}
	p := process.Spec{Cmd: command[0], Args: command[1:], Env: s.environ(u, spec.Env), Dir: dir, User: u, Hidden: hidden,
		Label: &wire.ProcessConfig{Cmd: command[0], Args: command[1:], Envs: spec.Env, Cwd: &dir}}
	if !hidden {
		p.Tag = serviceTag + spec.Name
	}
	return s.table.Start(p)
}

// serviceError gives an error of package service its code.
func serviceError(err error) error {
	switch {
	case errors.Is(err, service.ErrInvalid):
		return wire.Errorf(wire.InvalidArgument, "%v", err)
	case errors.Is(err, service.ErrNotFound):
		return wire.Errorf(wire.NotFound, "%v", err)
	}
	return err
}

// servicesFile lies in the root, of which snapshots of files alone are made too.
const servicesFile = "/var/lib/warren/services.json"

// maxServicesFile bounds what is read of it.
const maxServicesFile = 1 << 20

// serveFiles starts the services that the files name, in a guest that begins with them: what a snapshot of files alone was taken of had
// these, and their processes are not in it. A guest that goes on from memory has done so long ago.
func (s *Server) serveFiles() {
	if s.cfg.ServicesFile == "" {
		return
	}
	b, err := readUpTo(s.cfg.ServicesFile, maxServicesFile)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var req wire.PutServicesRequest
	if err == nil {
		err = wire.Unmarshal(b, &req)
	}
	if err == nil {
		err = s.serve(&req)
	}
	if err != nil {
		s.complain(fmt.Errorf("services of %s are not started: %w", s.cfg.ServicesFile, err))
	}
}

func readUpTo(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("it is larger than %d bytes", limit)
	}
	return b, err
}

// keepServices writes down which services there are.
func (s *Server) keepServices(req *wire.PutServicesRequest) error {
	path := s.cfg.ServicesFile
	if path == "" {
		return nil
	}
	if len(req.Services) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// Beside it first: a snapshot may be taken at any moment.
	// What lies there may be anybody's, and is neither followed nor waited for.
	if err := os.Remove(path + ".new"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(wire.Append(nil, req))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (s *Server) putServices(_ *call, req *wire.PutServicesRequest) (*wire.Empty, error) {
	err := s.serve(req)
	if err == nil {
		s.complain(s.keepServices(req)) // a full disk is no reason to stop them
	}
	return &wire.Empty{}, err
}

// serve makes the services those of a request.
func (s *Server) serve(req *wire.PutServicesRequest) error {
	var specs []service.Spec
	for _, m := range req.Services {
		if err := checkEnv(m.Env); err != nil {
			return err
		}
		if m.Port > 1<<16-1 {
			return wire.Errorf(wire.InvalidArgument, "service %.70q: %d is no port", m.Name, m.Port)
		}
		if _, err := s.user(m.User); err != nil {
			return wire.Errorf(wire.InvalidArgument, "service %.70q: %s", m.Name, wire.AsError(err).Message)
		}
		spec := service.Spec{Name: m.Name, Command: m.Command, User: m.User, Dir: m.Dir, Env: m.Env, Port: uint16(m.Port), Restart: m.Restart}
		if c := m.Check; c != nil {
			const longest = 1 << 30 // far above what is allowed, and no overflow
			if c.Retries > longest {
				return wire.Errorf(wire.InvalidArgument, "service %.70q: %d retries", m.Name, c.Retries)
			}
			spec.Check = &service.Check{HTTPPath: c.HTTPPath, TCP: c.TCP, Command: c.Command, Retries: int(c.Retries),
				Interval: time.Duration(max(min(c.IntervalMS, longest), -1)) * time.Millisecond, Timeout: time.Duration(max(min(c.TimeoutMS, longest), -1)) * time.Millisecond}
		}
		specs = append(specs, spec)
	}
	return serviceError(s.services.Put(specs))
}

func (s *Server) listServices(c *call, req *wire.ListServicesRequest) (*wire.ListServicesResponse, error) {
	var list []service.Status
	if req.WaitMS > 0 {
		ctx, cancel := context.WithTimeout(c.ctx, time.Duration(min(req.WaitMS, int64(time.Hour/time.Millisecond)))*time.Millisecond)
		list = s.services.Wait(ctx)
		cancel()
	} else {
		list = s.services.List()
	}
	res := &wire.ListServicesResponse{}
	for _, st := range list {
		m := wire.Service{Name: st.Spec.Name, Command: st.Spec.Command, User: st.Spec.User, Dir: st.Spec.Dir, Env: st.Spec.Env,
			Port: uint32(st.Spec.Port), Restart: st.Spec.Restart}
		if c := st.Spec.Check; c != nil {
			m.Check = &wire.ServiceCheck{HTTPPath: c.HTTPPath, TCP: c.TCP, Command: c.Command, IntervalMS: c.Interval.Milliseconds(),
				TimeoutMS: c.Timeout.Milliseconds(), Retries: uint32(c.Retries)}
		}
		res.Services = append(res.Services, wire.ServiceStatus{Service: &m, State: st.State, PID: uint32(st.PID), Restarts: uint32(st.Restarts),
			ExitCode: int32(st.ExitCode), Message: st.Message, Since: &st.Since})
	}
	return res, nil
}

func (s *Server) controlService(_ *call, req *wire.ControlServiceRequest) (*wire.Empty, error) {
	switch req.Action {
	case "stop":
		return &wire.Empty{}, serviceError(s.services.Stop(req.Name))
	case "restart":
		return &wire.Empty{}, serviceError(s.services.Restart(req.Name))
	}
	return nil, wire.Errorf(wire.InvalidArgument, "action %.20q is none of stop and restart", req.Action)
}
