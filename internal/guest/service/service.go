// Package service keeps the long-running programs of a project going: a database, a development server. Each is started,
// watched, asked whether it is ready, and started again as its policy says. All of it is in the guest's memory, so that it
// goes on through a pause, a rollback and a fork.
package service

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/process"
)

// Errors of this package.
var (
	ErrInvalid  = errors.New("invalid")
	ErrNotFound = errors.New("no such service")
)

// Policies of restarting.
const (
	Always    = "always"
	OnFailure = "on-failure"
	Never     = "never"
)

// States of a service.
const (
	// Starting runs, and its check has not succeeded yet.
	Starting = "starting"
	// Running runs and has no check.
	Running = "running"
	// Ready runs, and its check succeeds.
	Ready = "ready"
	// Unready runs, and its check has failed as often as it may.
	Unready = "unready"
	// Waiting has ended and is started again in a moment.
	Waiting = "waiting"
	// Exited has ended well and is left so.
	Exited = "exited"
	// Failed has ended otherwise, or could not be started, and is left so.
	Failed = "failed"
	// Stopped was stopped by a caller.
	Stopped = "stopped"
)

// Spec is a service.
type Spec struct {
	Name    string
	Command []string
	// User is the sandbox's default user when empty; Dir as for other processes.
	User, Dir string
	Env       map[string]string
	// Port is where it listens, for its check.
	Port uint16
	// Check is how to ask whether it is ready; nil means that it is when it runs.
	Check *Check
	// Restart is a policy; empty means [OnFailure].
	Restart string
}

// Check asks a service whether it is ready, in one of three ways.
type Check struct {
	// HTTPPath is asked for on the port; any answer below 400 will do.
	HTTPPath string
	// TCP connects to the port.
	TCP bool
	// Command is run as the service's user and exits with 0.
	Command []string
	// Interval lies between two questions, Timeout bounds one; Retries failures in a row make it unready. 0 means half a second, two
	// seconds and 120.
	Interval, Timeout time.Duration
	Retries           int
}

// Status is how a service does.
type Status struct {
	Spec  Spec
	State string
	// PID is the process that runs, or ran last; 0 when none could be started.
	PID int
	// Restarts counts the starts after the first.
	Restarts int
	// ExitCode and Message are how it ended last, or why it could not be started; while it runs, Message is what its last
	// check said.
	ExitCode int
	Message  string
	// Since is when the state began.
	Since time.Time
}

// settled says whether waiting for the service is of no more use.
func (s Status) settled() bool { return s.State != Starting && s.State != Waiting }

const (
	maxServices = 64
	// A service that has run that long gets the shortest wait before its next start.
	steadyTime = 10 * time.Second
	graceTime  = 5 * time.Second
	maxTime    = time.Hour
)

// Table is the services of the sandbox.
type Table struct {
	// Start starts a program of a service; a check's is hidden.
	Start func(spec Spec, command []string, hidden bool) (*process.Process, error)
	// First and Longest bound the wait before a start; 0 means half a second and half a minute. Each failure doubles it.
	First, Longest time.Duration
	// Grace is how long a service may take to end by itself; 0 means five seconds.
	Grace time.Duration

	puts sync.Mutex // held while the set of services changes

	mu      sync.Mutex
	units   map[string]*unit
	changed chan struct{}
	closed  bool
}

// unit is one service and the goroutine that keeps it.
type unit struct {
	t      *Table
	spec   Spec
	status Status
	stop   context.CancelFunc
	done   chan struct{} // closed when nothing of it runs any more
}

// validate fills in what was left out.
func validate(s *Spec) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: service %.70q: %s", ErrInvalid, s.Name, fmt.Sprintf(format, args...))
	}
	if s.Name == "" || len(s.Name) > 64 || strings.ContainsFunc(s.Name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	}) {
		return bad("use up to 64 letters, digits, dots, dashes and underscores for its name")
	}
	if len(s.Command) == 0 || s.Command[0] == "" {
		return bad("it has no command")
	}
	switch s.Restart {
	case "":
		s.Restart = OnFailure
	case Always, OnFailure, Never:
	default:
		return bad("restart %.20q is none of always, on-failure and never", s.Restart)
	}
	if s.Check == nil {
		return nil
	}
	c := *s.Check
	ways := 0
	for _, way := range []bool{c.HTTPPath != "", c.TCP, len(c.Command) > 0} {
		if way {
			ways++
		}
	}
	switch {
	case ways != 1:
		return bad("its check is by one of an HTTP path, TCP and a command")
	case (c.HTTPPath != "" || c.TCP) && s.Port == 0:
		return bad("its check needs a port")
	case c.HTTPPath != "" && (c.HTTPPath[0] != '/' || strings.ContainsFunc(c.HTTPPath, func(r rune) bool { return r <= ' ' || r > '~' })):
		return bad("the path %.100q of its check is no path of a URL", c.HTTPPath)
	case c.Interval < 0 || c.Timeout < 0 || c.Retries < 0 || c.Interval > maxTime || c.Timeout > maxTime:
		return bad("times and counts of its check are not negative, and times at most an hour")
	}
	if c.Interval == 0 {
		c.Interval = 500 * time.Millisecond
	}
	c.Interval = max(c.Interval, 20*time.Millisecond)
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Retries == 0 {
		c.Retries = 120
	}
	s.Check = &c
	return nil
}

// Put makes the services those of the list: one that is in it unchanged goes on as it is, a changed one is stopped and started
// as it is now, one that is not in it is stopped and forgotten.
func (t *Table) Put(specs []Spec) error {
	if len(specs) > maxServices {
		return fmt.Errorf("%w: %d services, of at most %d", ErrInvalid, len(specs), maxServices)
	}
	specs = slices.Clone(specs)
	names := map[string]bool{}
	for i := range specs {
		if err := validate(&specs[i]); err != nil {
			return err
		}
		if names[specs[i].Name] {
			return fmt.Errorf("%w: two services are named %s", ErrInvalid, specs[i].Name)
		}
		names[specs[i].Name] = true
	}
	t.puts.Lock()
	defer t.puts.Unlock()
	same := map[string]bool{}
	var gone []*unit
	t.mu.Lock()
	for _, s := range specs {
		u := t.units[s.Name]
		same[s.Name] = u != nil && reflect.DeepEqual(u.spec, s)
	}
	for name, u := range t.units {
		if !same[name] {
			gone = append(gone, u)
			delete(t.units, name)
		}
	}
	t.mu.Unlock()
	halt(gone)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	for _, s := range specs {
		if !same[s.Name] {
			t.begin(s)
		}
	}
	t.tell()
	return nil
}

// halt stops units and waits until they have ended.
func halt(units []*unit) {
	for _, u := range units {
		u.stop()
	}
	for _, u := range units {
		<-u.done
	}
}

// begin starts a service; t.mu is held.
func (t *Table) begin(s Spec) *unit {
	ctx, cancel := context.WithCancel(context.Background())
	u := &unit{t: t, spec: s, status: Status{Spec: s, State: Starting, Since: time.Now()}, stop: cancel, done: make(chan struct{})}
	if t.units == nil {
		t.units = map[string]*unit{}
	}
	t.units[s.Name] = u
	go func() {
		defer close(u.done)
		u.keep(ctx)
	}()
	return u
}

// tell wakes those who wait for a change; t.mu is held.
func (t *Table) tell() {
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// List returns the services by name.
func (t *Table) List() []Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.list()
}

func (t *Table) list() []Status {
	var all []Status
	for _, name := range slices.Sorted(maps.Keys(t.units)) {
		all = append(all, t.units[name].status)
	}
	return all
}

// Wait returns the services when none of them is about to become ready any more, or when ctx ends.
func (t *Table) Wait(ctx context.Context) []Status {
	for {
		t.mu.Lock()
		all := t.list()
		if !slices.ContainsFunc(all, func(s Status) bool { return !s.settled() }) {
			t.mu.Unlock()
			return all
		}
		if t.changed == nil {
			t.changed = make(chan struct{})
		}
		wait := t.changed
		t.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return all
		}
	}
}

// Stop stops a service, which stays known.
func (t *Table) Stop(name string) error { return t.control(name, false) }

// Restart stops a service if it runs, and starts it.
func (t *Table) Restart(name string) error { return t.control(name, true) }

func (t *Table) control(name string, again bool) error {
	t.puts.Lock()
	defer t.puts.Unlock()
	t.mu.Lock()
	u := t.units[name]
	t.mu.Unlock()
	if u == nil {
		return fmt.Errorf("%w: %.70q", ErrNotFound, name)
	}
	halt([]*unit{u})
	u.set(func(s *Status) { s.State = Stopped })
	t.mu.Lock()
	defer t.mu.Unlock()
	if again && !t.closed {
		t.begin(u.spec)
		t.tell()
	}
	return nil
}

// Close stops all services for good, without waiting for them.
func (t *Table) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, u := range t.units {
		u.stop()
	}
}

// set changes the status.
func (u *unit) set(change func(*Status)) {
	u.t.mu.Lock()
	defer u.t.mu.Unlock()
	was := u.status.State
	change(&u.status)
	if u.status.State != was {
		u.status.Since = time.Now()
		u.t.tell()
	}
}

// keep runs the service until ctx ends or its policy says so.
func (u *unit) keep(ctx context.Context) {
	first, longest := u.t.First, u.t.Longest
	if first == 0 {
		first = 500 * time.Millisecond
	}
	if longest == 0 {
		longest = 30 * time.Second
	}
	wait := first
	for ctx.Err() == nil {
		begin := time.Now()
		code, message := u.once(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(begin) >= steadyTime {
			wait = first
		}
		state := Waiting
		switch {
		case u.spec.Restart == Always, u.spec.Restart == OnFailure && code != 0:
		case code == 0:
			state = Exited
		default:
			state = Failed
		}
		u.set(func(s *Status) { s.State, s.ExitCode, s.Message = state, code, message })
		if state != Waiting {
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = min(2*wait, longest)
		u.set(func(s *Status) { s.State, s.Restarts = Starting, s.Restarts+1 })
	}
}

// once starts the service and waits until it has ended; when ctx ends, it ends the service.
func (u *unit) once(ctx context.Context) (code int, message string) {
	grace := u.t.Grace
	if grace == 0 {
		grace = graceTime
	}
	p, err := u.t.Start(u.spec, u.spec.Command, false)
	if err != nil {
		return -1, err.Error()
	}
	checking, stop := context.WithCancel(ctx)
	var checker sync.WaitGroup
	u.set(func(s *Status) {
		s.PID, s.Message = p.PID, ""
		if u.spec.Check == nil {
			s.State = Running
		}
	})
	if u.spec.Check != nil {
		checker.Go(func() { u.check(checking) })
	}
	select {
	case <-p.Ended():
	case <-ctx.Done():
		_ = p.Signal(syscall.SIGTERM, true) // it may have ended
		select {
		case <-p.Ended():
		case <-time.After(grace):
		}
	}
	// What it started and left behind would hold its port.
	_ = syscall.Kill(-p.PID, syscall.SIGKILL)
	_ = p.Kill()
	stop()
	checker.Wait()
	select {
	case <-p.Ended():
	case <-time.After(graceTime):
		return -1, "it cannot be killed"
	}
	end, _ := p.End()
	return end.Code, end.Status
}

// check asks the service again and again whether it is ready.
func (u *unit) check(ctx context.Context) {
	c := u.spec.Check
	for failures := 0; ; {
		one, cancel := context.WithTimeout(ctx, c.Timeout)
		err := u.ask(one)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
			u.set(func(s *Status) { s.State, s.Message = Ready, "" })
		} else {
			failures++
			u.set(func(s *Status) {
				if s.Message = err.Error(); failures >= c.Retries {
					s.State = Unready
				}
			})
		}
		select {
		case <-time.After(c.Interval):
		case <-ctx.Done():
			return
		}
	}
}
