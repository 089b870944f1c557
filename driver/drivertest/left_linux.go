package drivertest

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
)

// nothingLeft fails the case if something on the host still bears the name of one of the sandboxes: a process, a mount in
// any mount namespace, a cgroup, a file in the driver's state.
func (c *ctx) nothingLeft(ids ...warren.SandboxID) {
	c.t.Helper()
	if len(ids) == 0 {
		return
	}
	if c.h.Alias != nil {
		for _, id := range ids {
			if alias := c.h.Alias(id); alias != "" {
				ids = append(ids, alias)
			}
		}
	}
	// What was told to end may still be on its way out of the process table.
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left := leftovers(c.h.State, ids)
		if len(left) == 0 {
			return
		}
		if time.Now().After(until) {
			c.t.Errorf("left of deleted sandboxes:\n  %s", strings.Join(left, "\n  "))
			return
		}
	}
}

func leftovers(state []string, ids []warren.SandboxID) (left []string) {
	named := func(text []byte) (warren.SandboxID, bool) {
		for _, id := range ids {
			if bytes.Contains(text, []byte(id)) {
				return id, true
			}
		}
		return "", false
	}
	procs, _ := filepath.Glob("/proc/[0-9]*")
	namespaces := map[string]bool{}
	for _, proc := range procs {
		if proc == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		cmdline, _ := os.ReadFile(proc + "/cmdline")
		if id, ok := named(cmdline); ok {
			left = append(left, fmt.Sprintf("process %s of %s: %.120s", filepath.Base(proc), id, bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
		ns, err := os.Readlink(proc + "/ns/mnt")
		if err != nil || namespaces[ns] {
			continue
		}
		namespaces[ns] = true
		mounts, _ := os.ReadFile(proc + "/mountinfo")
		for line := range bytes.Lines(mounts) {
			if id, ok := named(line); ok {
				left = append(left, fmt.Sprintf("mount of %s in the namespace of process %s: %.160s", id, filepath.Base(proc), bytes.TrimSpace(line)))
			}
		}
	}
	for _, dir := range append([]string{"/sys/fs/cgroup"}, state...) {
		filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil
			}
			if id, ok := named([]byte(d.Name())); ok {
				left = append(left, fmt.Sprintf("%s of %s", path, id))
				if d.IsDir() {
					return filepath.SkipDir
				}
			}
			return nil
		})
	}
	return left
}
