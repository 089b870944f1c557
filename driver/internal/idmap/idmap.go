//go:build linux

// Package idmap makes the user namespaces that idmapped mounts take their mappings from.
package idmap

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Count is how many ids a sandbox has.
const Count = 65536

// Map says which ids on disk become which ids of the host, for an idmapped mount. It is comparable, to be a key.
type Map struct {
	uids, gids [2]extent
}

// extent maps count ids; one of none is left out.
type extent struct{ disk, host, count uint32 }

// Range maps all ids of a sandbox, from disk to host.
func Range(disk, host uint32) Map {
	e := [2]extent{{disk, host, Count}}
	return Map{uids: e, gids: e}
}

// User makes one user of the host, uid and gid, the id user of the sandbox whose id 0 is host. The root inside maps to the id root
// on disk: a kernel may make a file as root before it gives it away, and what root itself makes shall not belong to a user
// of the host.
func User(uid, gid, root, host, user uint32) Map {
	r := extent{root, host, 1}
	return Map{
		uids: [2]extent{{uid, host + user, 1}, r},
		gids: [2]extent{{gid, host + user, 1}, r},
	}
}

// Identity says that the mapping changes nothing for the ids that it covers, and that no other file is there to be hidden.
func (m Map) Identity() bool {
	return m.uids == m.gids && m.uids[0].disk == m.uids[0].host && m.uids[0].count == Count && m.uids[1].count == 0
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

// Namespaces holds a user namespace per mapping; the kernel takes mappings in no other form. They are kept because mappings come
// again, and a namespace costs a process to make. The zero value works.
type Namespaces struct {
	mu   sync.Mutex
	open map[Map]*os.File
}

// Get returns the namespace of a mapping and a function to call when it is no longer needed. At most keep are held; beyond that
// the namespaces of the moment are made and closed.
func (n *Namespaces) Get(m Map, keep int) (*os.File, func(), error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f := n.open[m]; f != nil {
		return f, func() {}, nil
	}
	f, err := namespace(m)
	if err != nil {
		return nil, nil, fmt.Errorf("make a user namespace: %w", err)
	}
	if len(n.open) >= keep {
		return f, func() { f.Close() }, nil
	}
	if n.open == nil {
		n.open = map[Map]*os.File{}
	}
	n.open[m] = f
	return f, func() {}, nil
}

func namespace(m Map) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The holder dies with the thread that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		pid, err := hold(m)
		if err != nil {
			done <- result{err: err}
			return
		}
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
		end(pid)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

// hold starts a process in a namespace with the mapping. It stops before its first instruction, because it is traced, and is
// never let go.
func hold(m Map) (pid int, err error) {
	return syscall.ForkExec("/proc/self/exe", []string{"warren-userns"}, &syscall.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: sysMap(m.uids),
			GidMappings: sysMap(m.gids),
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL, // it stands still, and would for ever if this process were killed now
		},
	})
}

// end kills a process and takes its result.
func end(pid int) {
	_ = unix.Kill(pid, unix.SIGKILL)
	for {
		var ws unix.WaitStatus
		if _, err := unix.Wait4(pid, &ws, 0, nil); err == unix.EINTR || err == nil && ws.Stopped() {
			continue
		}
		return
	}
}
