// Package hostproc looks at processes of this host from outside.
package hostproc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Naming returns the processes whose command line holds the text, and all that descend from them. This process is not
// among them.
func Naming(text string) ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	var next []int
	for _, name := range stats {
		dir := filepath.Dir(name)
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// The name, in parentheses, may hold anything.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 2 {
			continue
		}
		parent, err := strconv.Atoi(string(fields[1]))
		if err != nil {
			continue
		}
		children[parent] = append(children[parent], pid)
		if cmdline, err := os.ReadFile(dir + "/cmdline"); err == nil && bytes.Contains(cmdline, []byte(text)) {
			next = append(next, pid)
		}
	}
	seen := map[int]bool{}
	var all []int
	for len(next) > 0 {
		pid := next[0]
		next = next[1:]
		if !seen[pid] {
			seen[pid] = true
			all = append(all, pid)
			next = append(next, children[pid]...)
		}
	}
	return all, nil
}

// PSS returns the proportional set size of a process in bytes: shared pages count as a part. It is 0 for one that has ended.
func PSS(pid int) int64 {
	return field(fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss:")
}

// MemAvailable returns how much memory the host could still give, in bytes.
func MemAvailable() int64 { return field("/proc/meminfo", "MemAvailable:") }

// field reads a line such as "Pss:   123 kB".
func field(file, key string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				return 0
			}
			return n << 10
		}
	}
	return 0
}
