//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// home is a data directory of its own with the real programs, for tests that are no scripts.
type home struct {
	t   *testing.T
	bin testenv.Binaries
	dir string
	env []string // of every call, besides the test's own
}

func newHome(t *testing.T) *home {
	t.Helper()
	testenv.NeedsRoot(t)
	dir, err := os.MkdirTemp("", "warren-home-") // short, for the sockets in it
	if err != nil {
		t.Fatal(err)
	}
	return newHomeIn(t, dir)
}

// newHomeIn is newHome in a directory that is there.
func newHomeIn(t *testing.T, dir string) *home {
	t.Helper()
	bin := testenv.NeedsBinaries(t)
	before, err := testenv.TakeSnapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	h := &home{t: t, bin: bin, dir: dir}
	t.Cleanup(func() {
		if out, err := h.command("shutdown", "--sandboxes").CombinedOutput(); err != nil {
			t.Errorf("shutdown: %v\n%s", err, out)
		}
		before.Note()
		log := remarks(dir)
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the data directory: %v", err)
		}
		if left := before.WaitClean(15 * time.Second); len(left) > 0 {
			t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", log)
		}
	})
	return h
}

// command is a call of warren on the data directory.
func (h *home) command(args ...string) *exec.Cmd {
	cmd := exec.Command(h.bin.Warren, args...)
	cmd.Env = append(os.Environ(), "WARREN_HOME="+h.dir, "WARREN_URL=", "HOME="+filepath.Join(h.dir, "none"))
	cmd.Env = append(cmd.Env, h.env...)
	return cmd
}

// warren runs a command that must succeed and returns what it prints.
func (h *home) warren(args ...string) string {
	h.t.Helper()
	cmd := h.command(args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		h.t.Fatalf("warren %s: %v\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out))
}

func (h *home) daemon() int {
	h.t.Helper()
	pid, err := daemonPID(h.dir)
	if err != nil || pid == 0 {
		h.t.Fatalf("no daemon runs (%v)", err)
	}
	return pid
}

func (h *home) keeper() int {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir, "run", "gvisor", "keeper.pid"))
	if err != nil {
		h.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		h.t.Fatal(err)
	}
	return pid
}

// usage is what a process holds.
type usage struct{ memory, files, threads int }

func (u usage) String() string {
	return fmt.Sprintf("%.1f MiB, %d descriptors, %d threads", float64(u.memory)/(1<<20), u.files, u.threads)
}

// usageOf reads a process's own memory, which no file backs, and counts its descriptors and threads.
func usageOf(t *testing.T, pid int) (u usage) {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 3 && f[0] == "RssAnon:":
			kib, _ := strconv.Atoi(f[1])
			u.memory = kib << 10
		case len(f) == 2 && f[0] == "Threads:":
			u.threads, _ = strconv.Atoi(f[1])
		}
	}
	fds, err := os.ReadDir(proc + "fd")
	if err != nil {
		t.Fatal(err)
	}
	u.files = len(fds)
	return u
}

// TestCycles creates and deletes sandboxes, two at a time, and looks for what adds up: after a tenth of the cycles neither the
// daemon nor the keeper grows any more. WARREN_CYCLES says how many; there are 1,000 with WARREN_SOAK.
func TestCycles(t *testing.T) {
	cycles := testenv.Count(t, "WARREN_CYCLES", 40, 1000)
	h := newHome(t)
	h.env = []string{"WARREN_POOL=2"}
	h.warren("ls")
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(cycles)*10*time.Second)
	defer cancel()
	c, err := warren.Connect(ctx, warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	var next atomic.Int64
	run := func(until int) {
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for i := next.Add(1); i <= int64(until) && !t.Failed(); i = next.Add(1) {
					sb, err := c.Create(ctx, warren.Spec{})
					if err != nil {
						t.Errorf("create %d: %v", i, err)
						return
					}
					if i%10 == 0 {
						if out, err := sb.Command("echo", "here").Output(ctx); err != nil || string(out) != "here\n" {
							t.Errorf("command in sandbox %d: %q, %v", i, out, err)
						}
					}
					if err := sb.Delete(ctx); err != nil {
						t.Errorf("delete %d: %v", i, err)
					}
				}
			})
		}
		wg.Wait()
		next.Store(int64(until))
	}
	daemon, keeper := h.daemon(), h.keeper()
	// What a start leaves for the next one (caches, idle connections, namespaces made ahead) settles first.
	settle := func() (usage, usage) {
		time.Sleep(2 * time.Second)
		return usageOf(t, daemon), usageOf(t, keeper)
	}
	warm := max(cycles/10, 10)
	run(warm)
	daemonThen, keeperThen := settle()
	t.Logf("after %4d cycles: daemon %v; keeper %v", warm, daemonThen, keeperThen)
	began := time.Now()
	for part := range 4 {
		run(warm + (cycles-warm)*(part+1)/4)
		t.Logf("after %4d cycles: daemon %v; keeper %v", warm+(cycles-warm)*(part+1)/4, usageOf(t, daemon), usageOf(t, keeper))
	}
	t.Logf("%.1f cycles a second", float64(cycles-warm)/time.Since(began).Seconds())
	if h.daemon() != daemon || h.keeper() != keeper {
		t.Fatal("the daemon or the keeper was replaced meanwhile")
	}
	// Go's heap breathes by some MiB; a leak of 10 KiB a cycle shows in a thousand.
	const grow, files, threads = 8 << 20, 8, 12
	daemonNow, keeperNow := settle()
	for _, p := range []struct {
		name      string
		then, now usage
	}{{"daemon", daemonThen, daemonNow}, {"keeper", keeperThen, keeperNow}} {
		t.Logf("%s: from %v to %v", p.name, p.then, p.now)
		if p.now.memory > p.then.memory+grow {
			t.Errorf("the %s grew by %d KiB in %d cycles", p.name, (p.now.memory-p.then.memory)>>10, cycles-warm)
		}
		if p.now.files > p.then.files+files {
			t.Errorf("the %s holds %d descriptors more", p.name, p.now.files-p.then.files)
		}
		if p.now.threads > p.then.threads+threads {
			t.Errorf("the %s has %d threads more", p.name, p.now.threads-p.then.threads)
		}
	}
	ready := 0 // kept for the next sandboxes, as WARREN_POOL says
	for _, dir := range []string{"workspaces", "run/gvisor/sandboxes"} {
		entries, _ := os.ReadDir(filepath.Join(h.dir, dir))
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), "pool-") && ready < 2 {
				ready++
				continue
			}
			if !strings.HasPrefix(e.Name(), ".") {
				t.Errorf("left: %s/%s", dir, e.Name())
			}
		}
	}
}
