//go:build linux

package gvisor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
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
