package process

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawner starts processes from an operating-system thread of its own. The guest may hold CAP_SYS_RESOURCE, by which the
// sandbox's limit of processes does not stop it from making a thread when root inside has used the limit up; no process
// that it starts may, so that thread has given the capability up, for itself and for what it executes.
type spawner chan spawnRequest

type spawnRequest struct {
	path string
	argv []string
	attr *syscall.ProcAttr
	done chan<- spawned
}

type spawned struct {
	pid int
	err error
}

func newSpawner() spawner {
	s := make(spawner)
	go func() {
		runtime.LockOSThread() // for ever: the thread is no good for anything else
		err := dropResource()
		for r := range s {
			out := spawned{err: err}
			if err == nil {
				out.pid, out.err = syscall.ForkExec(r.path, r.argv, r.attr)
			}
			r.done <- out
		}
	}()
	return s
}

func (s spawner) spawn(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	done := make(chan spawned, 1)
	s <- spawnRequest{path, argv, attr, done}
	r := <-done
	return r.pid, r.err
}

// dropResource takes CAP_SYS_RESOURCE from the calling thread.
func dropResource() error {
	const word, bit = unix.CAP_SYS_RESOURCE / 32, uint32(1) << (unix.CAP_SYS_RESOURCE % 32)
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	c := &data[word]
	if c.Effective&bit|c.Permitted&bit|c.Inheritable&bit == 0 {
		return nil
	}
	// A program that root executes gets what is in the bounding set.
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil {
		return fmt.Errorf("drop CAP_SYS_RESOURCE from the bounding set: %w", err)
	}
	c.Effective, c.Permitted, c.Inheritable = c.Effective&^bit, c.Permitted&^bit, c.Inheritable&^bit
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("drop CAP_SYS_RESOURCE: %w", err)
	}
	return nil
}
