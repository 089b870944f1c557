// Package memory keeps the sandbox below its memory limit by killing the largest process in time: were the limit
// reached, the kernel outside would end the whole sandbox.
package memory

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/small"
)

// Process is what the guard knows of a process.
type Process struct {
	PID, Parent int
	Name        string
	RSS         int64 // bytes
}

// Usage tells how many bytes the sandbox uses of limit.
type Usage func() int64

// Guard watches the memory of the sandbox.
type Guard struct {
	// Killing is told just before a process is killed, with the words for why; Killed after it.
	Killing func(victim Process, ancestors []int, status string)
	// Usage and Processes look at the system; tests put their own here.
	Usage     Usage
	Processes func() []Process
	Kill      func(pid int) error

	mu    sync.Mutex // one kill at a time
	limit int64
	wake  chan struct{}
	// victim was killed last, at killed, and was last seen at last.
	victim       int
	killed, last time.Time
}

// New returns a guard without a limit. Run starts it.
func New(killing func(victim Process, ancestors []int, status string)) *Guard {
	g := &Guard{Killing: killing, Processes: processes, Kill: func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) },
		wake: make(chan struct{}, 1)}
	g.Usage = g.systemUsage
	return g
}

const (
	// killPercent of the limit is where the guard acts.
	killPercent = 95
	// growth is how fast, in bytes per second, memory is taken to be used up: the guard looks again before what is left
	// could be gone.
	growth = 1 << 30
	// The bounds of the time between two looks.
	minPoll = 20 * time.Millisecond
	maxPoll = time.Second
	// settleTime is how long the memory of a killed process may take to come back before the next one is killed.
	settleTime = 300 * time.Millisecond
	// dyingTime is how long a killed process may take to go: on a busy machine it is not gone at once, and its memory
	// still counts. Killing another for it would be one too many.
	dyingTime = 10 * time.Second
)

// SetLimit sets the limit in bytes; 0 means none.
func (g *Guard) SetLimit(bytes int64) {
	g.mu.Lock()
	same := g.limit == bytes
	g.limit = bytes
	g.mu.Unlock()
	if same {
		return
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Run looks at the memory until ctx ends: rarely while there is plenty, often near the limit.
func (g *Guard) Run(ctx context.Context) {
	for {
		wait := g.check()
		var timer <-chan time.Time
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-g.wake:
		case <-timer:
		}
	}
}

// check looks once, kills if it must, and returns when to look again; 0 means not before the limit changes.
func (g *Guard) check() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.limit <= 0 {
		return 0
	}
	used, most := g.Usage(), g.limit/100*killPercent
	if used >= most && time.Since(g.last) > settleTime {
		g.kill()
	}
	return min(max(time.Duration(most-used)*time.Second/growth, minPoll), maxPoll)
}

// KillNow kills the largest process at once and says whether there was one.
func (g *Guard) KillNow() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.kill()
}

// Status is the words for a process that was killed for memory.
func Status(limit int64) string {
	if limit <= 0 {
		return "killed: out of memory"
	}
	return fmt.Sprintf("killed: out of memory (limit %s)", size(limit))
}

func size(n int64) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0 || n >= 100<<20:
		return strconv.FormatInt(n>>20, 10) + " MiB"
	case n >= 1<<10:
		return strconv.FormatInt(n>>10, 10) + " KiB"
	}
	return strconv.FormatInt(n, 10) + " bytes"
}

func (g *Guard) kill() bool {
	list := g.Processes()
	if g.victim != 0 && time.Since(g.killed) < dyingTime && slices.ContainsFunc(list, func(p Process) bool { return p.PID == g.victim }) {
		g.last = time.Now()
		return true
	}
	parents := make(map[int]int, len(list))
	victim := Process{}
	for _, p := range list {
		parents[p.PID] = p.Parent
		if p.PID == 1 || p.PID == os.Getpid() {
			continue
		}
		if p.RSS > victim.RSS {
			victim = p
		}
	}
	if victim.PID == 0 {
		return false
	}
	var up []int
	for pid := parents[victim.PID]; pid > 1 && len(up) < 100; pid = parents[pid] {
		up = append(up, pid)
	}
	g.Killing(victim, up, Status(g.limit))
	g.victim, g.killed = victim.PID, time.Now()
	g.last = g.killed
	return g.Kill(victim.PID) == nil
}

// systemUsage measures by what the kernel offers. gVisor's /proc/meminfo is about the sandbox alone and counts what its
// memory file holds, which is what the limit outside counts too; a Linux container's is about the whole machine, so
// there the cgroup counts, or the processes.
func (g *Guard) systemUsage() int64 {
	if onGVisor() {
		m := readFile("/proc/meminfo")
		return meminfo(m, "MemTotal:") - meminfo(m, "MemFree:")
	}
	if n, ok := cgroupUsage(); ok && os.Getpid() == 1 {
		return n
	}
	var sum int64
	for _, p := range g.Processes() {
		sum += p.RSS
	}
	return sum
}

// onGVisor says whether the kernel is gVisor, by a line that only it has.
var onGVisor = sync.OnceValue(func() bool {
	return strings.Contains(readFile("/proc/version"), "#1 SMP Sun Jan 10 15:06:54 PST 2016")
})

// cgroupUsage reads what the container's own cgroup counts, less the file pages that can be dropped. A cgroup without a
// limit is not the container's own.
func cgroupUsage() (int64, bool) {
	const v2, v1 = "/sys/fs/cgroup/", "/sys/fs/cgroup/memory/"
	for _, c := range []struct{ usage, limit, stat, file string }{
		{v2 + "memory.current", v2 + "memory.max", v2 + "memory.stat", "inactive_file "},
		{v1 + "memory.usage_in_bytes", v1 + "memory.limit_in_bytes", v1 + "memory.stat", "total_inactive_file "},
	} {
		n, err := strconv.ParseInt(strings.TrimSpace(readFile(c.usage)), 10, 64)
		limit, errLimit := strconv.ParseInt(strings.TrimSpace(readFile(c.limit)), 10, 64)
		if err != nil || errLimit != nil || limit > 1<<60 {
			continue
		}
		for line := range strings.Lines(readFile(c.stat)) {
			if v, ok := strings.CutPrefix(line, c.file); ok {
				inactive, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
				n -= min(max(inactive, 0), n)
			}
		}
		return n, true
	}
	return 0, false
}

// meminfo returns one value of /proc/meminfo in bytes, 0 where it is missing.
func meminfo(data, name string) int64 {
	_, rest, ok := strings.Cut(data, name)
	if !ok {
		return 0
	}
	f := strings.Fields(rest)
	if len(f) == 0 {
		return 0
	}
	n, err := strconv.ParseInt(f[0], 10, 53)
	if err != nil || n < 0 {
		return 0
	}
	return n * 1024
}

func readFile(path string) string {
	data, _ := small.Read(path, 1<<20) // what can be read counts
	return string(data)
}

// processes lists all processes with their memory.
func processes() []Process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what can be read counts
	var out []Process
	for _, n := range names {
		pid, err := strconv.Atoi(n)
		if err != nil {
			continue
		}
		if p, ok := parseStat(readFile("/proc/" + n + "/stat")); ok {
			p.PID = pid
			out = append(out, p)
		}
	}
	return out
}

// parseStat reads the name, parent and memory from a process's stat file.
func parseStat(data string) (Process, bool) {
	open, shut := strings.IndexByte(data, '('), strings.LastIndexByte(data, ')') // the name may hold anything
	if open < 0 || shut < open {
		return Process{}, false
	}
	f := strings.Fields(data[shut+1:])
	const state, ppid, rss = 0, 1, 21 // fields 3, 4 and 24 in proc(5)
	if len(f) <= rss || f[state] == "Z" {
		return Process{}, false
	}
	parent, err1 := strconv.Atoi(f[ppid])
	pages, err2 := strconv.ParseInt(f[rss], 10, 48)
	if err1 != nil || err2 != nil || pages < 0 {
		return Process{}, false
	}
	return Process{Parent: parent, Name: data[open+1 : shut], RSS: pages * int64(os.Getpagesize())}, true
}
