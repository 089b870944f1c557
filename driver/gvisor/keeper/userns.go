//go:build linux

package keeper

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// idMap says which ids on disk become which ids of the host, for an idmapped mount. It is comparable, to be a key.
type idMap struct {
	uids, gids [2]extent
}

// extent maps count ids; one of none is left out.
type extent struct{ disk, host, count uint32 }

// diskMap maps the whole range of a sandbox.
func diskMap(base, host uint32) idMap {
	e := [2]extent{{base, host, idCount}}
	return idMap{uids: e, gids: e}
}

// userMap makes one user of the host the user inside. The root inside maps to an id of nobody's: gVisor makes each file
// as root before it gives it to the user, and what root itself makes there shall not belong to a user of the host.
func userMap(uid, gid, host uint32) idMap {
	root := extent{diskIDBase, host, 1}
	return idMap{
		uids: [2]extent{{uid, host + sandboxUser, 1}, root},
		gids: [2]extent{{gid, host + sandboxUser, 1}, root},
	}
}

func sysMap(extents [2]extent) []syscall.SysProcIDMap {
	var out []syscall.SysProcIDMap
	for _, e := range extents {
		if e.count > 0 {
			out = append(out, syscall.SysProcIDMap{ContainerID: int(e.disk), HostID: int(e.host), Size: int(e.count)})
		}
	}
	return out
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
			UidMappings: sysMap(m.uids),
			GidMappings: sysMap(m.gids),
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL, // it stands still, and would for ever if this process were killed now
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
