package warren

import (
	"context"
	"time"

	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// Service is a program that the guest keeps going, also through a pause, a rollback and a fork. Its output is that of the
// process with the tag "service:NAME".
type Service struct {
	// Name is up to 64 letters, digits, dots, dashes and underscores.
	Name string `json:"name"`
	// Command is the program and its arguments.
	Command []string `json:"command"`
	// User and Dir are as for processes.
	User string            `json:"user,omitempty"`
	Dir  string            `json:"dir,omitempty"`
	Env  map[string]string `json:"env,omitempty"`
	// Port is where it listens, for its check.
	Port int `json:"port,omitempty"`
	// Check asks whether it is ready; nil: it is when it runs.
	Check *ServiceCheck `json:"check,omitempty"`
	// Restart is "always", "on-failure" (the default) or "never".
	Restart string `json:"restart,omitempty"`
}

// ServiceCheck asks whether a service is ready, by one of an HTTP path, a connection and a command.
type ServiceCheck struct {
	// HTTPPath on the service's port is answered with a status from 200 to 399.
	HTTPPath string `json:"httpPath,omitempty"`
	// TCP connects to the service's port.
	TCP bool `json:"tcp,omitempty"`
	// Command exits with 0.
	Command []string `json:"command,omitempty"`
	// Interval lies between two questions (0: half a second), Timeout bounds one (0: two seconds), Retries failures in a row make it
	// unready (0: 120). Times are exact to a millisecond.
	Interval time.Duration `json:"interval,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"`
	Retries  int           `json:"retries,omitempty"`
}

// ServiceStatus is how a service does.
type ServiceStatus struct {
	Name string `json:"name"`
	// State is "starting", "running" (it has no check), "ready", "unready", "waiting" (for its next start), "exited", "failed" or "stopped".
	State string `json:"state"`
	// PID is 0 when it could not be started.
	PID int `json:"pid,omitempty"`
	// Restarts counts the starts after the first.
	Restarts int `json:"restarts"`
	// ExitCode and Message tell how it ended last; while it runs, Message is what its last check said.
	ExitCode int       `json:"exitCode"`
	Message  string    `json:"message,omitempty"`
	Since    time.Time `json:"since"`
}

// PutServices makes the services of the sandbox those of the list: one that is in it unchanged goes on, a changed one is started
// anew, and one that is not in it is stopped and forgotten.
func (s *Sandbox) PutServices(ctx context.Context, services ...Service) error {
	req := &guestv1.PutServicesRequest{}
	for _, v := range services {
		m := &guestv1.Service{Name: v.Name, Command: v.Command, User: v.User, Dir: v.Dir, Env: v.Env, Port: uint32(v.Port), Restart: v.Restart}
		if c := v.Check; c != nil {
			m.Check = &guestv1.ServiceCheck{HttpPath: c.HTTPPath, Tcp: c.TCP, Command: c.Command, Retries: uint32(c.Retries),
				IntervalMs: c.Interval.Milliseconds(), TimeoutMs: c.Timeout.Milliseconds()}
		}
		req.Services = append(req.Services, m)
	}
	if _, err := s.guest.warren.PutServices(ctx, request("", req)); err != nil {
		return fromWire("put services", err)
	}
	return nil
}

// Services returns how the services do, by name. With wait it first waits so long until all are ready or have given up.
func (s *Sandbox) Services(ctx context.Context, wait time.Duration) ([]ServiceStatus, error) {
	res, err := s.guest.warren.ListServices(ctx, request("", &guestv1.ListServicesRequest{WaitMs: wait.Milliseconds()}))
	if err != nil {
		return nil, fromWire("list services", err)
	}
	var all []ServiceStatus
	for _, m := range res.Msg.GetServices() {
		all = append(all, ServiceStatus{m.GetService().GetName(), m.GetState(), int(m.GetPid()), int(m.GetRestarts()), int(m.GetExitCode()),
			m.GetMessage(), m.GetSince().AsTime()})
	}
	return all, nil
}

// StopService stops a service, which stays known and stopped.
func (s *Sandbox) StopService(ctx context.Context, name string) error {
	return s.controlService(ctx, "stop service", name, "stop")
}

// RestartService stops a service if it runs, and starts it.
func (s *Sandbox) RestartService(ctx context.Context, name string) error {
	return s.controlService(ctx, "restart service", name, "restart")
}

func (s *Sandbox) controlService(ctx context.Context, op, name, action string) error {
	if _, err := s.guest.warren.ControlService(ctx, request("", &guestv1.ControlServiceRequest{Name: name, Action: action})); err != nil {
		return fromWire(op, err)
	}
	return nil
}
