package memory

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"
)

// fake is a system whose processes are made up.
type fake struct {
	*Guard
	used   int64
	procs  []Process
	killed []int
	up     []int
	status string
}

func newFake(limit, used int64, procs ...Process) *fake {
	f := &fake{used: used, procs: procs}
	f.Guard = New(func(_ Process, up []int, status string) { f.up, f.status = up, status })
	f.Usage = func() int64 { return f.used }
	f.Processes = func() []Process { return f.procs }
	f.Kill = func(pid int) error { f.killed = append(f.killed, pid); return nil }
	f.limit = limit
	return f
}

const mib = 1 << 20

func TestGuard(t *testing.T) {
	procs := []Process{{PID: 1, RSS: 900 * mib}, {PID: os.Getpid(), RSS: 800 * mib}, {PID: 10, Parent: 1, RSS: 5 * mib}, {PID: 11, Parent: 10, RSS: 1 * mib}, {PID: 12, Parent: 11, RSS: 300 * mib}, {PID: 13, Parent: 10, RSS: 200 * mib}}
	f := newFake(512*mib, 480*mib, procs...)
	if wait := f.check(); len(f.killed) != 0 || wait != minPoll {
		t.Errorf("below: killed %v, wait %v", f.killed, wait)
	}
	f.used = 500 * mib
	f.check()
	if !slices.Equal(f.killed, []int{12}) || !slices.Equal(f.up, []int{11, 10}) || f.status != "killed: out of memory (limit 512 MiB)" {
		t.Errorf("killed %v, ancestors %v, %q", f.killed, f.up, f.status)
	}
	f.check()
	if len(f.killed) != 1 {
		t.Errorf("a second one before the first one's memory is back: %v", f.killed)
	}
	f.last = time.Now().Add(-settleTime * 2)
	f.check()
	if len(f.killed) != 1 {
		t.Errorf("a second one while the first is dying: %v", f.killed)
	}
	gone := func(pid int) {
		procs = slices.DeleteFunc(slices.Clone(procs), func(p Process) bool { return p.PID == pid })
		f.Processes = func() []Process { return procs }
	}
	gone(12)
	f.check()
	if len(f.killed) != 1 {
		t.Errorf("a second one just after the first was seen: %v", f.killed)
	}
	f.last = time.Now().Add(-settleTime * 2)
	f.check()
	if len(f.killed) != 2 {
		t.Errorf("still full, and nobody else was killed: %v", f.killed)
	}
	f.used = 10 * mib
	if wait := f.check(); wait < 100*time.Millisecond || len(f.killed) != 2 {
		t.Errorf("with plenty left: wait %v", wait)
	}
	f.SetLimit(0)
	if wait := f.check(); wait != 0 {
		t.Errorf("without a limit: wait %v", wait)
	}
	f.SetLimit(4096 * mib)
	if wait := f.check(); wait != maxPoll {
		t.Errorf("far from a large limit: wait %v", wait)
	}
	if !f.KillNow() || len(f.killed) != 2 {
		t.Errorf("KillNow while one is dying: %v", f.killed)
	}
	gone(13)
	if !f.KillNow() || len(f.killed) != 3 {
		t.Errorf("KillNow: %v", f.killed)
	}
	if f := newFake(mib, 0, Process{PID: 1, RSS: mib}); f.KillNow() {
		t.Error("process 1 was killed")
	}
}

func TestRun(t *testing.T) {
	f := newFake(0, 100*mib, Process{PID: 12, RSS: mib})
	killed := make(chan int, 10)
	f.Kill = func(pid int) error { killed <- pid; return nil }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan bool)
	go func() { f.Run(ctx); close(done) }()
	f.SetLimit(100 * mib)
	if pid := <-killed; pid != 12 {
		t.Errorf("killed %d", pid)
	}
	cancel()
	<-done
}

func TestStatus(t *testing.T) {
	for limit, want := range map[int64]string{0: "killed: out of memory", 512 * mib: "killed: out of memory (limit 512 MiB)", 1500: "killed: out of memory (limit 1 KiB)",
		100*mib + 5: "killed: out of memory (limit 100 MiB)", 12: "killed: out of memory (limit 12 bytes)"} {
		if got := Status(limit); got != want {
			t.Errorf("%d: %q", limit, got)
		}
	}
}

func TestParseStat(t *testing.T) {
	const rest = " S 7 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 5000 250 18446744073709551615"
	p, ok := parseStat("42 (a) b (c)" + rest)
	if !ok || p.Name != "a) b (c" || p.Parent != 7 || p.RSS != 250*int64(os.Getpagesize()) {
		t.Errorf("%+v %t", p, ok)
	}
	for _, bad := range []string{"", "1 (x", "1 x) S", "1 (x) S 1", "1 (x) Z" + rest[2:], "1 (x) S x" + rest[4:]} {
		if p, ok := parseStat(bad); ok {
			t.Errorf("%q: %+v", bad, p)
		}
	}
}

func TestThisSystem(t *testing.T) {
	i := slices.IndexFunc(processes(), func(p Process) bool { return p.PID == os.Getpid() && p.Parent == os.Getppid() && p.RSS > mib })
	if i < 0 {
		t.Error("this process is not among all")
	}
	if used := New(nil).Usage(); used < mib {
		t.Errorf("the system uses %d bytes", used)
	}
	if n := meminfo("MemTotal:       8 kB\nMemFree: x kB\n", "MemTotal:"); n != 8192 {
		t.Errorf("%d", n)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("42 (a) b (c) S 7 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 5000 250 1")
	f.Add("MemTotal: 99999999999999999999 kB")
	f.Fuzz(func(t *testing.T, in string) {
		if p, ok := parseStat(in); ok && p.RSS < 0 {
			t.Errorf("%+v", p)
		}
		if meminfo(in, "MemTotal:") < 0 {
			t.Error("negative")
		}
	})
}
