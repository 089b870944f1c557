//go:build linux

package docker

import (
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver"
)

// idMap says which ids on disk become which ids of the host, for an idmapped mount. It is comparable, to be a key.
type idMap struct {
	uids, gids [2]extent
}

// extent maps count ids; one of none is left out.
type extent struct{ disk, host, count uint32 }

// ownerMap is the mapping of a mount into a container whose id 0 is the host's id base.
func ownerMap(o driver.Owner, base uint32) idMap {
	if !o.User {
		e := [2]extent{{o.IDBase, base, driver.IDCount}}
		return idMap{uids: e, gids: e}
	}
	root := extent{driver.DiskIDBase, base, 1}
	return idMap{
		uids: [2]extent{{o.UID, base + driver.SandboxUID, 1}, root},
		gids: [2]extent{{o.GID, base + driver.SandboxUID, 1}, root},
	}
}

// identity says that the mapping changes nothing for the ids that it covers, and that no other file is there to be hidden.
func (m idMap) identity() bool {
	return m.uids == m.gids && m.uids[0].disk == m.uids[0].host && m.uids[0].count == driver.IDCount && m.uids[1].count == 0
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

// userNamespaces holds a user namespace per mapping; the kernel takes mappings in no other form. There are few different
// ones, and each costs a process to make.
type userNamespaces struct {
	mu   sync.Mutex
	open map[idMap]*os.File
}

// maxUserNamespaces bounds the cache; beyond it the namespaces of the moment are made and closed.
const maxUserNamespaces = 64

// namespaces are those of this process; they are closed with it.
var namespaces userNamespaces

// get returns the namespace of a mapping and a function to call when it is no longer needed.
func (u *userNamespaces) get(m idMap) (*os.File, func(), error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if f := u.open[m]; f != nil {
		return f, func() {}, nil
	}
	f, err := newUserNamespace(m)
	if err != nil {
		return nil, nil, fmt.Errorf("make a user namespace: %w", err)
	}
	if len(u.open) >= maxUserNamespaces {
		return f, func() { f.Close() }, nil
	}
	if u.open == nil {
		u.open = map[idMap]*os.File{}
	}
	u.open[m] = f
	return f, func() {}, nil
}

func newUserNamespace(m idMap) (*os.File, error) {
	// The child stops before its first instruction, because it is traced, and is never let go.
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"warren-userns"}, &syscall.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: sysMap(m.uids), GidMappings: sysMap(m.gids), Ptrace: true,
			// It stands still, and would for ever if this process were killed now.
			Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return nil, err
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
	_ = unix.Kill(pid, unix.SIGKILL)
	for {
		var ws unix.WaitStatus
		if _, werr := unix.Wait4(pid, &ws, 0, nil); werr == unix.EINTR || werr == nil && ws.Stopped() {
			continue
		}
		break
	}
	return f, err
}
