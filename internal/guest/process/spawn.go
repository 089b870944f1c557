package process

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawner starts processes from an operating-system thread of its own. The guest may hold capabilities that no process which
// it starts may have, see ownCapabilities, so that thread has given them up, for itself and for what it executes.
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
		err := dropOwn()
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

// ownCapabilities are for the guest alone. By CAP_SYS_RESOURCE the sandbox's limit of processes does not stop it from making a
// thread when root inside has used the limit up. By CAP_SYS_PTRACE it sees which process holds a port; root inside could
// stop the guest itself with it, and read its memory. By CAP_SYS_ADMIN it sets the host name.
var ownCapabilities = []uint{unix.CAP_SYS_RESOURCE, unix.CAP_SYS_PTRACE, unix.CAP_SYS_ADMIN}

func noNewPrivileges() bool {
	v, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	return err == nil && v == 1
}

// dropOwn takes ownCapabilities from the calling thread.
func dropOwn() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	for _, c := range ownCapabilities {
		set, bit := &data[c/32], uint32(1)<<(c%32)
		if set.Effective&bit|set.Permitted&bit|set.Inheritable&bit == 0 {
			continue
		}
		// A program that root executes gets what is in the bounding set, but with no_new_privs no more than it had, and the
		// guest may then lack the right to change the set.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !(errors.Is(err, unix.EPERM) && noNewPrivileges()) {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
		set.Effective, set.Permitted, set.Inheritable = set.Effective&^bit, set.Permitted&^bit, set.Inheritable&^bit
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("drop the guest's own capabilities: %w", err)
	}
	return nil
}
