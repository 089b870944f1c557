package drivertest

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// ProcessesNaming returns the processes whose command line holds the id, and all that descend from them: enough for drivers
// that pass the id to what they start.
func ProcessesNaming(t testing.TB, id warren.SandboxID) []int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	children := map[int][]int{}
	var roots []int
	for _, name := range procs {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		stat, err := os.ReadFile(name)
		if err != nil || pid == os.Getpid() {
			continue
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 2 {
			continue
		}
		ppid, _ := strconv.Atoi(string(fields[1]))
		children[ppid] = append(children[ppid], pid)
		if cmdline, _ := os.ReadFile(filepath.Dir(name) + "/cmdline"); bytes.Contains(cmdline, []byte(id)) {
			roots = append(roots, pid)
		}
	}
	seen := map[int]bool{}
	var all []int
	for len(roots) > 0 {
		pid := roots[0]
		roots = roots[1:]
		if !seen[pid] {
			seen[pid] = true
			all = append(all, pid)
			roots = append(roots, children[pid]...)
		}
	}
	return all
}

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// packageDir is this package's directory in the checkout.
func packageDir(t testing.TB) string {
	t.Helper()
	return filepath.Join(testenv.Repo(t), "driver", "drivertest")
}
