//go:build linux

package gvisor_test

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

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

// BenchmarkIdleMemory measures what an idle sandbox costs: the drop of MemAvailable, and the proportional set sizes.
func BenchmarkIdleMemory(b *testing.B) {
	e := newEnv(b)
	const n = 10
	e.create(e.spec()) // warms caches
	before := memAvailable(b)
	for b.Loop() {
		for range n {
			spec := e.spec()
			e.create(spec)
			e.run(spec.ID, "true")
		}
	}
	time.Sleep(time.Second)
	b.ReportMetric(float64(before-memAvailable(b))/float64(n*b.N)/1024, "MiB/sandbox")
	b.ReportMetric(0, "ns/op")
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
