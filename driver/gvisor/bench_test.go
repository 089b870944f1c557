//go:build linux

package gvisor_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// BenchmarkReady measures create until the real guest has taken its settings, which is when the first command can run.
func BenchmarkReady(b *testing.B) {
	e := newEnv(b)
	if err := e.d.Close(); err != nil {
		b.Fatal(err)
	}
	e.opts.GuestPath = testenv.NeedsBinary(b, "warren-guest")
	e.open()
	var ready []time.Duration
	for b.Loop() {
		spec := e.spec()
		t0 := time.Now()
		e.create(spec)
		e.do(spec.ID, "POST", "/init", `{"defaultUser":"root"}`, http.StatusNoContent)
		ready = append(ready, time.Since(t0))
		if err := e.d.Delete(context.Background(), spec.ID); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(ready)
	b.ReportMetric(float64(ready[len(ready)/2].Microseconds())/1000, "ready-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkLife measures one sandbox after another: create until the first command is done, a dial, and delete.
func BenchmarkLife(b *testing.B) {
	e := newEnv(b)
	var create, first, dial, del []time.Duration
	for b.Loop() {
		spec := e.spec()
		t0 := time.Now()
		e.create(spec)
		t1 := time.Now()
		e.run(spec.ID, "true")
		t2 := time.Now()
		c, err := e.d.Dial(context.Background(), spec.ID, warren.GuestPort)
		if err != nil {
			b.Fatal(err)
		}
		t3 := time.Now()
		c.Close()
		t4 := time.Now()
		if err := e.d.Delete(context.Background(), spec.ID); err != nil {
			b.Fatal(err)
		}
		t5 := time.Now()
		create, first, dial, del = append(create, t1.Sub(t0)), append(first, t2.Sub(t0)), append(dial, t3.Sub(t2)), append(del, t5.Sub(t4))
	}
	for name, d := range map[string][]time.Duration{"create": create, "first-command": first, "dial": dial, "delete": del} {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, name+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkFork measures a copy of a running sandbox, small and with 300 MB of memory in use: how long the source stands still,
// how long its snapshot takes, and the time from there until the first command in the copy is done; then the same restore
// of an image that is on disk, as after a pause.
func BenchmarkFork(b *testing.B) {
	const large = "head -c 300000000 /dev/urandom >/dev/shm/fill"
	type snapshot = func(context.Context, warren.SandboxID, string, bool) (driver.Image, error)
	durable := func(e *env) snapshot { return e.d.Snapshot }
	transient := func(e *env) snapshot {
		return func(ctx context.Context, id warren.SandboxID, dir string, freeze bool) (driver.Image, error) {
			return e.d.SnapshotTransient(ctx, id, dir, freeze, nil)
		}
	}
	for _, c := range []struct {
		name, fill string
		take       func(*env) snapshot
		pool       int
	}{
		{"small", "true", durable, 0}, {"small-transient", "true", transient, 0}, {"small-pooled", "true", transient, 2},
		{"300MB", large, durable, 0}, {"300MB-transient", large, transient, 0}, {"300MB-pooled", large, transient, 2},
	} {
		fill, take := c.fill, c.take
		b.Run(c.name, func(b *testing.B) {
			e := newEnv(b)
			spec := e.spec()
			spec.Limits.Memory = 2 << 30
			id := e.create(spec)
			e.run(id, fill)
			took := make(map[string][]time.Duration)
			if c.pool > 0 {
				if err := e.d.Warm(context.Background(), spec, c.pool); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				e.ready(c.pool)
				dir := b.TempDir()
				t0 := time.Now()
				if _, err := take(e)(context.Background(), id, dir, false); err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				s := e.spec()
				s.Limits.Memory = 2 << 30
				if err := e.d.Restore(context.Background(), s, dir); err != nil {
					b.Fatal(err)
				}
				t2 := time.Now()
				e.run(s.ID, "true")
				t3 := time.Now()
				if err := e.d.Delete(context.Background(), s.ID); err != nil {
					b.Fatal(err)
				}
				for what, d := range map[string]time.Duration{"snapshot": t1.Sub(t0), "restore": t2.Sub(t1), "resume": t3.Sub(t1), "fork": t3.Sub(t0)} {
					took[what] = append(took[what], d)
				}
				os.RemoveAll(dir)
			}
			log, err := os.ReadFile(filepath.Join(e.state, "keeper.log"))
			if err != nil {
				b.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`msg=snapshot .* stood=(\S+)`).FindAllSubmatch(log, -1) {
				if d, err := time.ParseDuration(string(m[1])); err == nil {
					took["stood"] = append(took["stood"], d)
				}
			}
			for what, d := range took {
				slices.Sort(d)
				b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, what+"-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkPool measures a start into an execution of the pool until the first command is done, beside one without, and what such
// an execution costs: the proportional set sizes of its processes.
func BenchmarkPool(b *testing.B) {
	e := newEnv(b)
	const n = 4
	took := make(map[string][]time.Duration)
	start := func(what string, spec *driver.Spec) {
		t0 := time.Now()
		e.create(spec)
		e.run(spec.ID, "true")
		took[what] = append(took[what], time.Since(t0))
		if err := e.d.Delete(context.Background(), spec.ID); err != nil {
			b.Fatal(err)
		}
	}
	if err := e.d.Warm(context.Background(), e.spec(), n); err != nil {
		b.Fatal(err)
	}
	var pss int
	for b.Loop() {
		e.ready(n)
		pss = 0
		for _, pid := range tree(append(e.processes("pool-", "runsc-sandbox"), e.processes("pool-", "runsc-gofer")...)) {
			pss += pssOf(pid)
		}
		start("pooled", e.spec())
		e.ready(n)
		cold := e.spec()
		cold.Limits.PIDs++ // which fits none
		start("cold", cold)
	}
	for what, d := range took {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, what+"-ms")
	}
	b.ReportMetric(float64(pss)/n/1024, "PSS-MiB/execution")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkIdleMemory measures what an idle sandbox with the real guest costs: the proportional set sizes of its
// processes, what its control group is charged with, and the drop of MemAvailable, which other programs disturb.
func BenchmarkIdleMemory(b *testing.B) {
	e := newEnv(b)
	if err := e.d.Close(); err != nil {
		b.Fatal(err)
	}
	e.opts.GuestPath = testenv.NeedsBinary(b, "warren-guest")
	e.open()
	const n = 10
	var ids []warren.SandboxID
	e.create(e.spec()) // warms caches
	before := memAvailable(b)
	for b.Loop() {
		for range n {
			id := e.create(e.spec())
			e.do(id, "GET", "/health", "", http.StatusNoContent)
			ids = append(ids, id)
		}
	}
	time.Sleep(2 * time.Second) // until the garbage of the start is collected
	drop := before - memAvailable(b)
	var pss, charged int
	for _, id := range ids {
		for _, pid := range tree(append(e.processes(id, "runsc-sandbox"), e.processes(id, "runsc-gofer")...)) {
			pss += pssOf(pid)
		}
		st, err := e.d.Stats(context.Background(), id)
		if err != nil {
			b.Fatal(err)
		}
		charged += int(st.Memory >> 10)
	}
	b.ReportMetric(float64(drop)/float64(len(ids))/1024, "MemAvailable-MiB/sandbox")
	b.ReportMetric(float64(pss)/float64(len(ids))/1024, "PSS-MiB/sandbox")
	b.ReportMetric(float64(charged)/float64(len(ids))/1024, "cgroup-MiB/sandbox")
	b.ReportMetric(0, "ns/op")
}

// tree returns the processes and all that descend from them.
func tree(pids []int) []int {
	var all []int
	for len(pids) > 0 {
		pid := pids[0]
		pids = append(pids[1:], children(pid)...)
		all = append(all, pid)
	}
	return all
}

// pssOf returns the proportional set size of a process in KiB.
func pssOf(pid int) int {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(text), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func memAvailable(b *testing.B) int {
	b.Helper()
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		b.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemAvailable:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				b.Fatal(err)
			}
			return n
		}
	}
	b.Fatal("no MemAvailable")
	return 0
}
