//go:build linux

package keeper

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// idMap says which ids on disk become which ids of the host, for an idmapped mount.
type idMap struct {
	diskUID, diskGID uint32
	hostUID, hostGID uint32
	count            uint32
}

// userNamespaces holds a user namespace per mapping; the kernel takes mappings in no other form. They are kept because
// ranges are used again, and a namespace costs a process to make.
type userNamespaces struct {
	mu   sync.Mutex
	open map[idMap]*os.File
}

// maxUserNamespaces bounds the cache; beyond it the namespaces of the moment are made and closed.
const maxUserNamespaces = 512

// get returns the namespace of a mapping and a function to call when it is no longer needed.
func (u *userNamespaces) get(m idMap) (*os.File, func(), error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if f := u.open[m]; f != nil {
		return f, func() {}, nil
	}
	f, err := newUserNamespace(m)
	if err != nil {
		return nil, nil, err
	}
	if len(u.open) >= maxUserNamespaces {
		return f, func() { f.Close() }, nil
	}
	if u.open == nil {
		u.open = make(map[idMap]*os.File)
	}
	u.open[m] = f
	return f, func() {}, nil
}

func newUserNamespace(m idMap) (*os.File, error) {
	// The child stops before its first instruction, because it is traced, and is never let go. It dies with this
	// thread, which the goroutine keeps until the child has been waited for.
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		f, err := startUserNamespace(m)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func startUserNamespace(m idMap) (*os.File, error) {
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"warren-userns"}, &syscall.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: int(m.diskUID), HostID: int(m.hostUID), Size: int(m.count)}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: int(m.diskGID), HostID: int(m.hostGID), Size: int(m.count)}},
			Ptrace:      true,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
	unix.Kill(pid, unix.SIGKILL)
	for {
		var ws unix.WaitStatus
		if _, werr := unix.Wait4(pid, &ws, 0, nil); werr == unix.EINTR || werr == nil && ws.Stopped() {
			continue
		}
		break
	}
	return f, err
}
