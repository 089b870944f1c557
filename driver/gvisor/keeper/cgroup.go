//go:build linux

package keeper

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// controllers are those that limit or measure a sandbox.
var controllers = []string{"memory", "cpu", "cpuacct", "pids"}

// cgroups knows where control groups of sandboxes go: below the keeper's own group, in "warren-INSTANCE", so that a
// limit on the daemon's service holds for its sandboxes too.
type cgroups struct {
	// parent has the directory per controller; on version 2 all are one, under the key "unified".
	parent map[string]string
	// missing lists controllers that this host does not offer.
	missing []string
}

// cgroup is the control group of one sandbox: directories by controller.
type cgroup map[string]string

const unified = "unified"

// findCgroups reads where the keeper's own groups are.
func findCgroups(instance string) (*cgroups, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	v1, v2, err := parseCgroups(bufio.NewScanner(mounts), string(own))
	if err != nil {
		return nil, err
	}
	c := &cgroups{parent: map[string]string{}}
	name := "warren-" + instance
	for _, ctl := range controllers {
		if dir := v1[ctl]; dir != "" {
			c.parent[ctl] = filepath.Join(dir, name)
		}
	}
	if c.parent["memory"] == "" && v2.dir != "" {
		parent, missing, err := unifiedParent(v2.mount, v2.dir)
		if err != nil {
			return nil, err
		}
		c.parent = map[string]string{unified: filepath.Join(parent, name)}
		c.missing = missing
		return c, nil
	}
	for _, ctl := range controllers {
		if c.parent[ctl] == "" && ctl != "cpuacct" {
			c.missing = append(c.missing, ctl)
		}
	}
	return c, nil
}

type unifiedMount struct{ mount, dir string }

// parseCgroups returns the keeper's own directory in each hierarchy.
func parseCgroups(mountinfo *bufio.Scanner, own string) (map[string]string, unifiedMount, error) {
	ownPath := map[string]string{} // by controller; "" is version 2
	for _, line := range strings.Split(own, "\n") {
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			continue
		}
		for _, ctl := range strings.Split(f[1], ",") {
			ownPath[ctl] = f[2]
		}
	}
	v1 := map[string]string{}
	var v2 unifiedMount
	at := func(mount, root, own string) string {
		// Root is what of the hierarchy is mounted; a group outside of it cannot be reached.
		rel, err := filepath.Rel(root, own)
		if err != nil || strings.HasPrefix(rel, "..") {
			return mount
		}
		return filepath.Join(mount, rel)
	}
	for mountinfo.Scan() {
		f := strings.Fields(mountinfo.Text())
		sep := -1
		for i := range f {
			if f[i] == "-" {
				sep = i
				break
			}
		}
		if sep < 6 || len(f) < sep+4 {
			continue
		}
		root, mount, kind, opts := f[3], f[4], f[sep+1], f[sep+3]
		switch kind {
		case "cgroup2":
			if p, ok := ownPath[""]; ok && v2.mount == "" {
				v2 = unifiedMount{mount, at(mount, root, p)}
			}
		case "cgroup":
			for _, o := range strings.Split(opts, ",") {
				if p, ok := ownPath[o]; ok && o != "" && v1[o] == "" {
					v1[o] = at(mount, root, p)
				}
			}
		}
	}
	return v1, v2, mountinfo.Err()
}

// unifiedParent finds the nearest group, from the keeper's own upwards, that can hand controllers to children. A group
// with processes in it cannot, unless it is the root, so it is mostly the parent.
func unifiedParent(mount, own string) (dir string, missing []string, err error) {
	want := []string{"memory", "cpu", "pids"}
	for dir = own; ; dir = filepath.Dir(dir) {
		have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if err != nil {
			return "", nil, err
		}
		missing = nil
		ok := true
		for _, ctl := range want {
			if !hasWord(string(have), ctl) {
				missing = append(missing, ctl)
				continue
			}
			if os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+ctl), 0) != nil {
				on, _ := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
				ok = ok && hasWord(string(on), ctl)
			}
		}
		if ok || dir == mount {
			return dir, missing, nil
		}
	}
}

func hasWord(s, word string) bool {
	for _, f := range strings.Fields(s) {
		if f == word {
			return true
		}
	}
	return false
}

// memoryHeadroom is what a sandbox may use on top of its limit: the gVisor kernel's own memory, page tables and
// kernel stacks of its threads, and the guest. Measured: an idle sandbox uses 13 to 20 MiB; the kernel process keeps
// about 1% of the memory in use for its own tables, and more for many small files. The guest's own enforcement acts
// at the limit itself, so room above it costs nothing while it works.
func memoryHeadroom(limit int64) int64 { return 96<<20 + limit/8 }

// pidsGuard is the limit on host tasks: gVisor needs two or more per process inside, and some of its own. It only
// guards the host; what a sandbox may have is RLIMIT_NPROC inside.
func pidsGuard(limit uint32) uint64 { return 4*uint64(limit) + 256 }

// group names the directories of a sandbox's group. They are on record before they exist.
func (c *cgroups) group(id string) cgroup {
	g := cgroup{}
	for ctl, parent := range c.parent {
		g[ctl] = filepath.Join(parent, id)
	}
	return g
}

// create makes the group and sets limits. What it made on failure, remove removes.
func (g cgroup) create(l protocol.Limits) error {
	for ctl, dir := range g {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a control group: %w", err)
		}
		if ctl == unified {
			// The parent of our own must hand the controllers on.
			for _, want := range []string{"memory", "cpu", "pids"} {
				os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), []byte("+"+want), 0)
			}
		}
	}
	return g.limit(l)
}

// limit writes limits. A controller that is missing was told by Check and does not stop a sandbox; a write that fails
// does.
func (g cgroup) limit(l protocol.Limits) error {
	const period = 100_000
	quota := int64(l.CPUMillis) * period / 1000
	quota = max(quota, 1000) // the kernel's least
	memory := l.Memory + memoryHeadroom(l.Memory)
	write := func(ctl, name, value string) error {
		dir := g[ctl]
		if dir == "" {
			return nil
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0); err != nil {
			if ctl == unified && errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return fmt.Errorf("set %s to %s: %w", name, value, err)
		}
		return nil
	}
	if g[unified] != "" {
		return errors.Join(
			write(unified, "memory.max", strconv.FormatInt(memory, 10)),
			write(unified, "memory.swap.max", "0"),
			write(unified, "cpu.max", fmt.Sprintf("%d %d", quota, period)),
			write(unified, "pids.max", strconv.FormatUint(pidsGuard(l.PIDs), 10)),
		)
	}
	return errors.Join(
		write("memory", "memory.limit_in_bytes", strconv.FormatInt(memory, 10)),
		write("cpu", "cpu.cfs_period_us", strconv.Itoa(period)),
		write("cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)),
		write("pids", "pids.max", strconv.FormatUint(pidsGuard(l.PIDs), 10)),
	)
}

// place moves processes and all that descend from them into the group. They may start others meanwhile: a child of a
// process that has moved is born inside, so it is over when a pass finds nobody new.
func (g cgroup) place(pids ...int) error {
	moved := map[int]bool{}
	for {
		again := false
		for _, pid := range descendants(pids) {
			if moved[pid] {
				continue
			}
			for _, dir := range g {
				err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
				if err != nil && !errors.Is(err, unix.ESRCH) {
					return fmt.Errorf("move a process into its control group: %w", err)
				}
			}
			moved[pid] = true
			again = true
		}
		if !again {
			return nil
		}
	}
}

// descendants returns processes and all that were born of them and live.
func descendants(pids []int) []int {
	var all []int
	for len(pids) > 0 {
		pid := pids[0]
		pids = pids[1:]
		all = append(all, pid)
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		for _, t := range tasks {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
			for _, f := range strings.Fields(string(b)) {
				if child, err := strconv.Atoi(f); err == nil {
					pids = append(pids, child)
				}
			}
		}
	}
	return all
}

// oomKills returns how many processes of the group the kernel has killed for memory.
func (g cgroup) oomKills() int64 {
	if dir := g[unified]; dir != "" {
		return readKey(filepath.Join(dir, "memory.events"), "oom_kill")
	}
	if dir := g["memory"]; dir != "" {
		return readKey(filepath.Join(dir, "memory.oom_control"), "oom_kill")
	}
	return 0
}

// stats fills in what the group knows.
func (g cgroup) stats(s *protocol.Stats) {
	if dir := g[unified]; dir != "" {
		s.CPUTime = time.Duration(readKey(filepath.Join(dir, "cpu.stat"), "usage_usec")) * time.Microsecond
		s.Memory = readInt(filepath.Join(dir, "memory.current")) - readKey(filepath.Join(dir, "memory.stat"), "inactive_file")
		s.PIDs = uint32(readInt(filepath.Join(dir, "pids.current")))
		return
	}
	s.CPUTime = time.Duration(readInt(filepath.Join(g["cpuacct"], "cpuacct.usage")))
	if dir := g["memory"]; dir != "" {
		s.Memory = readInt(filepath.Join(dir, "memory.usage_in_bytes")) - readKey(filepath.Join(dir, "memory.stat"), "total_inactive_file")
	}
	s.PIDs = uint32(readInt(filepath.Join(g["pids"], "pids.current")))
}

func readInt(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// readKey reads "key value" lines.
func readKey(path, key string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) == 2 && f[0] == key {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n
		}
	}
	return 0
}

// remove ends what is left in the group and removes it.
func (g cgroup) remove() error {
	var errs []error
	deadline := time.Now().Add(5 * time.Second)
	for _, dir := range g {
		for {
			err := unix.Rmdir(dir)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if time.Now().After(deadline) {
				errs = append(errs, fmt.Errorf("remove a control group: %w", err))
				break
			}
			// A process that ends holds its group a little longer than its parent can see.
			b, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			for _, f := range strings.Fields(string(b)) {
				if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
					unix.Kill(pid, unix.SIGKILL)
				}
			}
			time.Sleep(time.Millisecond)
		}
	}
	return errors.Join(errs...)
}

// close removes the parents and whatever is still in them.
func (c *cgroups) close() {
	for _, dir := range c.parent {
		children, _ := os.ReadDir(dir)
		for _, child := range children {
			if child.IsDir() {
				cgroup{"": filepath.Join(dir, child.Name())}.remove()
			}
		}
		unix.Rmdir(dir)
	}
}
