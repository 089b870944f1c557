//go:build linux

package gvisor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/warren-sandbox/warren"
)

// TestPosture reads what the host says of a sandbox's processes, each thread of them.
func TestPosture(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.run(id, "true")
	roots := append(e.processes(id, "runsc-sandbox"), e.processes(id, "runsc-gofer")...)
	if len(roots) != 2 {
		t.Fatalf("sandbox and gofer: %v", roots)
	}
	host := func(ns string) string {
		s, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	seen := 0
	for _, pid := range tree(roots) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, task := range tasks {
			st := status(t, task)
			if st == nil {
				continue // ended
			}
			seen++
			if st["NoNewPrivs"] != "1" || st["Seccomp"] != "2" {
				t.Errorf("%s: NoNewPrivs %s, Seccomp %s", task, st["NoNewPrivs"], st["Seccomp"])
			}
			for _, id := range strings.Fields(st["Uid"] + " " + st["Gid"]) {
				if n, _ := strconv.Atoi(id); n < 0x70000000 {
					t.Errorf("%s runs as %s", task, id)
				}
			}
			if g := strings.TrimSpace(st["Groups"]); g != "" {
				t.Errorf("%s has groups %s", task, g)
			}
		}
		for _, ns := range []string{"user", "net", "mnt", "pid", "ipc", "uts"} {
			if got, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns)); err == nil && got == host(ns) {
				t.Errorf("process %d is in the host's %s namespace", pid, ns)
			}
		}
		// Below their own roots there is nothing of the host's.
		for _, name := range []string{"etc/shadow", "root/.bashrc", "var/lib/dpkg"} {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/%s", pid, name)); err == nil {
				t.Errorf("process %d sees /%s", pid, name)
			}
		}
		for _, hierarchy := range []string{"memory", "pids", "cpu"} {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			if err == nil && !strings.Contains(string(b), string(id)) {
				t.Errorf("process %d is not in its %s control group:\n%s", pid, hierarchy, b)
				break
			}
		}
	}
	if seen < 10 {
		t.Errorf("only %d threads looked at", seen)
	}
}

func status(t *testing.T, name string) map[string]string {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	m := map[string]string{}
	for _, line := range strings.Split(string(b), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

// children returns the processes that a process started and that live.
func children(pid int) []int {
	var all []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, c := range strings.Fields(string(b)) {
			n, _ := strconv.Atoi(c)
			all = append(all, n)
		}
	}
	return all
}

// TestNothingShared starts sandboxes at the same time and looks for what connects the processes of one with those of another,
// or with the keeper: each of them holds one end of its own sockets and pipes and nobody else holds the same end.
func TestNothingShared(t *testing.T) {
	e := newEnv(t)
	const rounds, together = 4, 6
	for range rounds {
		ids := make([]warren.SandboxID, together)
		var wg sync.WaitGroup
		for i := range ids {
			spec := e.spec()
			ids[i] = spec.ID
			wg.Go(func() {
				if err := e.d.Create(t.Context(), spec); err != nil {
					t.Error(err)
				}
				e.tryRun(spec.ID, "true") // calls through control sockets and channels meanwhile
			})
		}
		wg.Wait()
		holders := map[string][]string{}
		note := func(who string, pids []int) {
			for _, pid := range pids {
				for _, end := range ends(pid) {
					if !slices.Contains(holders[end], who) {
						holders[end] = append(holders[end], who)
					}
				}
			}
		}
		note("the keeper", []int{e.keeperPID()})
		for _, id := range ids {
			roots := append(e.processes(id, "runsc-sandbox"), e.processes(id, "runsc-gofer")...)
			if len(roots) != 2 {
				t.Fatalf("sandbox and gofer of %s: %v", id, roots)
			}
			note(string(id), tree(roots))
		}
		if len(holders) < 5*together {
			t.Fatalf("only %d sockets, pipes and eventfds seen", len(holders))
		}
		for end, who := range holders {
			if len(who) > 1 {
				t.Errorf("%s is held by %v", end, who)
			}
		}
		for _, id := range ids {
			if err := e.d.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
	}
}

// ends returns the sockets, pipes and eventfds that a process holds, by what tells one from another.
func ends(pid int) []string {
	var all []string
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, name := range fds {
		target, err := os.Readlink(name)
		if err != nil {
			continue
		}
		switch {
		case strings.HasPrefix(target, "socket:"), strings.HasPrefix(target, "pipe:"):
			all = append(all, target)
		case target == "anon_inode:[eventfd]":
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, filepath.Base(name)))
			for line := range strings.Lines(string(b)) {
				if id, ok := strings.CutPrefix(line, "eventfd-id:"); ok {
					all = append(all, "eventfd "+strings.TrimSpace(id))
				}
			}
		}
	}
	return all
}
