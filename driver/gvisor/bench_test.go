//go:build linux

package gvisor_test

import (
	"context"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
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
