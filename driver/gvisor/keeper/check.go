//go:build linux

package keeper

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// check tells what the keeper knows of its host.
func (k *Keeper) check() []protocol.Check {
	var out []protocol.Check
	if len(k.cgroups.missing) == 0 {
		version := "version 1"
		if k.cgroups.parent[unified] != "" {
			version = "version 2"
		}
		out = append(out, protocol.Check{Name: "control groups", Status: "ok", Message: "memory, cpu and pids, " + version})
	} else {
		out = append(out, protocol.Check{
			Name: "control groups", Status: "warn",
			Message: "no controller for " + strings.Join(k.cgroups.missing, ", ") + ": the host does not enforce these limits",
			Hint:    "mount the cgroup controllers, or give Warren's service Delegate=yes",
		})
	}
	out = append(out, k.checkIDMap())
	return out
}

// checkIDMap tries an idmapped mount on the state directory's file system.
func (k *Keeper) checkIDMap() protocol.Check {
	c := protocol.Check{Name: "idmapped mounts", Status: "ok", Message: "the data directory's file system maps owners"}
	fd, err := unix.OpenTree(unix.AT_FDCWD, stateDir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == nil {
		defer unix.Close(fd)
		err = k.idmap(fd, diskMap(diskIDBase, idRange(0)), 0, false)
	}
	if err != nil {
		c.Status = "fail"
		c.Message = fmt.Sprintf("the data directory's file system cannot map owners (%v): workspaces cannot be mounted", err)
		c.Hint = "set WARREN_HOME to a directory on ext4, xfs, btrfs or tmpfs, with Linux 5.19 or newer (tmpfs: 6.3)"
	}
	return c
}
