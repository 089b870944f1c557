// Package process starts commands and terminals, keeps their output, and reaps every process that ends.
//
// A process belongs to the sandbox, not to the client that started it: clients follow its output and leave. Output
// is counted in bytes since the start, over all streams together; that count is the sequence number by which a
// client comes back. The last part of it stays in memory, more of it on disk, both bounded.
package process

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Reaper waits for children. As PID 1 it is handed every orphan of the sandbox, so it must be the only caller of
// wait: nothing else in the guest may use os.StartProcess or os/exec.
type Reaper struct {
	orphans  bool
	spawner  spawner
	mu       sync.Mutex
	children map[int]*child
}

// NewReaper returns a reaper and starts its goroutine. With orphans set it reaps every child of the calling process,
// as PID 1 must, else only those that it started itself.
func NewReaper(orphans bool) *Reaper {
	r := &Reaper{orphans: orphans, spawner: newSpawner(), children: make(map[int]*child)}
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGCHLD)
	go func() {
		for range sig {
			r.reap()
		}
	}()
	return r
}

// child is a process that the reaper has started and not yet reaped.
type child struct {
	pid    int
	exited func(syscall.WaitStatus)
}

// spawn starts a process; exited is called with its wait status when it has ended and been reaped.
func (r *Reaper) spawn(path string, argv []string, attr *syscall.ProcAttr, exited func(syscall.WaitStatus)) (*child, error) {
	// The lock keeps reap from meeting a child that is not in the map yet.
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := r.spawner.spawn(path, argv, attr)
	if err != nil {
		return nil, err
	}
	c := &child{pid, exited}
	r.children[pid] = c
	return c, nil
}

// signal signals a child, or its process group, unless it has been reaped: only until then is the pid its own.
func (r *Reaper) signal(c *child, sig syscall.Signal, group bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.children[c.pid] != c {
		return syscall.ESRCH
	}
	if group {
		return syscall.Kill(-c.pid, sig)
	}
	return syscall.Kill(c.pid, sig)
}

// reap collects what has ended. Signals of one kind coalesce, so it goes on until nothing is left.
func (r *Reaper) reap() {
	type end struct {
		exited func(syscall.WaitStatus)
		status syscall.WaitStatus
	}
	var ends []end
	r.mu.Lock()
	wait := func(pid int) bool {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			return true
		}
		if err != nil || got <= 0 {
			return false
		}
		if c := r.children[got]; c != nil {
			delete(r.children, got)
			ends = append(ends, end{c.exited, ws})
		}
		return true
	}
	if r.orphans {
		for wait(-1) {
		}
	} else {
		for pid := range r.children {
			wait(pid)
		}
	}
	r.mu.Unlock()
	for _, e := range ends {
		e.exited(e.status)
	}
}
