package drivertest

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/driver"
)

var limitCases = []testCase{
	{name: "hostname", sentence: "the sandbox has the host name of the spec", commands: true, run: testHostname},
	{name: "guest-env", sentence: "the guest has the environment of the spec, and nothing of the driver's own", commands: true, run: testGuestEnv},
	{name: "guest-signals", sentence: "a signal that misses its process and meets the guest does not end the sandbox", commands: true, run: testGuestSignals},
	{name: "arguments", sentence: "a command gets its arguments, environment and directory as they are", commands: true, run: testArguments},
	{name: "loopback-only", sentence: "a sandbox has loopback and no other network", commands: true, run: testLoopbackOnly},
	{name: "limit-disk", sentence: "at most Limits.Disk bytes can be written to the root overlay", commands: true, run: testLimitDisk},
	{name: "limit-memory", sentence: "past Limits.Memory the largest process is killed and the sandbox goes on", commands: true, run: testLimitMemory},
	{name: "limit-pids", sentence: "at most Limits.PIDs processes can exist, and the sandbox goes on", commands: true, run: testLimitPIDs},
	{name: "limit-cpu", sentence: "a busy sandbox gets about Limits.CPUMillis of the processors", commands: true, optional: measures, run: testLimitCPU},
}

func testHostname(t *testing.T, c *ctx) {
	g := c.guest(c.create(func(s *driver.Spec) { s.Hostname = "burrow-7" }))
	if got := g.Output(c, "hostname"); got != "burrow-7" {
		t.Errorf("hostname: %q", got)
	}
	// Names are resolved: a program that looks up its own host name must not fail.
	if got := g.succeeds(c, "user", "getent hosts burrow-7 || grep burrow-7 /etc/hosts"); got == "" {
		t.Error("the host name does not resolve")
	}
}

func testGuestSignals(t *testing.T, c *ctx) {
	id := c.create()
	g := c.guest(id)
	// To each thread as well: a number of the guest's that somebody takes for a process may be that of a thread.
	r := g.Shell(c, "root", "for s in HUP QUIT ABRT SYS STKFLT; do for p in 1 $(ls /proc/1/task); do kill -$s $p; done; done; sleep 0.2; echo on")
	if !strings.HasSuffix(r.Stdout, "on\n") {
		t.Errorf("the guest sent signals to itself: %+v", r)
	}
	// And what it starts does not inherit that it endures them.
	if r := g.Shell(c, "root", "kill -QUIT $$; echo alive"); r.Stdout != "" || r.Code == 0 {
		t.Errorf("a shell survives SIGQUIT: %+v", r)
	}
	c.answers(c.d, id)
}

func testGuestEnv(t *testing.T, c *ctx) {
	t.Setenv("WARREN_CANARY", "of-the-driver")
	g := c.guest(c.create(func(s *driver.Spec) { s.Env = append(s.Env, "BURROW=with space=and equals") }))
	// The guest's own is not for others to read; what it was given it gives on.
	env := strings.Split(g.Output(c, "env", "-0"), "\x00")
	found := false
	for _, v := range env {
		found = found || v == "BURROW=with space=and equals"
		if strings.HasPrefix(v, "WARREN_CANARY=") {
			t.Error("the guest has the driver's own environment")
		}
	}
	if !found {
		t.Errorf("the guest's environment: %q", env)
	}
}

func testArguments(t *testing.T, c *ctx) {
	g := c.guest(c.create())
	args := []string{"plain", "", "two words", "$HOME", "`id`", "a\nb", "-n", `"quoted"`, "ünïcode", "*", strings.Repeat("x", 100<<10)}
	r, err := g.Try(c, Command{
		Args: append([]string{"/usr/bin/printf", `%s\n=\n`}, args...),
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Join(args, "\n=\n") + "\n=\n"; r.Stdout != want {
		t.Errorf("arguments arrived as %.300q (%s %s)", r.Stdout, r.Status, r.Stderr)
	}
	r, err = g.Try(c, Command{Args: []string{"/bin/sh", "-c", "pwd; echo \"$VALUE\"; exit 7"}, Dir: "/usr/lib", Env: map[string]string{"VALUE": "a=b c"}})
	if err != nil {
		t.Fatal(err)
	}
	if r.Stdout != "/usr/lib\na=b c\n" || r.Code != 7 {
		t.Errorf("%q, code %d", r.Stdout, r.Code)
	}
}

func testLoopbackOnly(t *testing.T, c *ctx) {
	g := c.guest(c.create())
	lines := strings.Split(strings.TrimSpace(g.Output(c, "cat", "/proc/net/dev")), "\n")
	for _, line := range lines[min(2, len(lines)):] {
		if name, _, _ := strings.Cut(strings.TrimSpace(line), ":"); name != "lo" {
			t.Errorf("interface %s", name)
		}
	}
}

func testLimitDisk(t *testing.T, c *ctx) {
	const limit = 64 << 20
	g := c.guest(c.create(func(s *driver.Spec) { s.Limits.Disk = limit }))
	r := g.Shell(c, "root", "cat /dev/zero > /var/tmp/a; for i in 1 2 3; do head -c 1000000 /dev/zero > /usr/full$i; done; cat /dev/zero > /root/c; stat -c %s /var/tmp/a /usr/full1 /usr/full2 /usr/full3 /root/c")
	total := int64(0)
	for _, f := range strings.Fields(r.Stdout) {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatalf("sizes: %q", r.Stdout)
		}
		total += n
	}
	if total > limit || total < limit*85/100 {
		t.Errorf("%d bytes could be written, limit %d", total, limit)
	}
	// What is freed can be used again, and the sandbox works.
	g.succeeds(c, "root", "rm /var/tmp/a /usr/full* /root/c && head -c 10000000 /dev/zero > /var/tmp/again")
}

func testLimitMemory(t *testing.T, c *ctx) {
	const limit = 256 << 20
	id := c.create(withProbe(t), func(s *driver.Spec) { s.Limits.Memory = limit })
	g := c.guest(id)
	small := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", "echo up; sleep 1000"}})
	if _, err := small.line(); err != nil {
		t.Fatal(err)
	}
	r, err := g.Try(c, Command{User: "user", Args: []string{probePath, "memory", fmt.Sprint(4 * limit)}})
	if err != nil {
		t.Fatalf("the command that took too much: %v", err)
	}
	if r.Code == 0 || strings.Contains(r.Stdout, "all") {
		t.Errorf("%d bytes could be used, limit %d", 4*limit, limit)
	}
	if !strings.Contains(r.Status, "out of memory") {
		t.Errorf("its status is %q, want one that says out of memory", r.Status)
	}
	g.succeeds(c, "root", fmt.Sprintf("kill -0 %d", small.pid))
	if s, ok := c.list(c.d, id); !ok || s.State != driver.Running {
		t.Errorf("the sandbox is %+v, %v", s, ok)
	}
	// Half of the limit is no trouble.
	if r, err := g.Try(c, Command{User: "user", Args: []string{probePath, "memory", fmt.Sprint(limit / 2)}}); err != nil || r.Code != 0 {
		t.Errorf("half the limit: %+v, %v", r, err)
	}
}

func testLimitPIDs(t *testing.T, c *ctx) {
	const limit = 60
	id := c.create(withProbe(t), func(s *driver.Spec) { s.Limits.PIDs = limit })
	g := c.guest(id)
	r, err := g.Try(c, Command{User: "user", Args: []string{probePath, "forks", "300"}})
	if err != nil {
		t.Fatalf("the command that forks: %v", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(r.Stdout))
	if err != nil || n > limit || n < limit/4 {
		t.Errorf("%q processes could be made, limit %d (%s %s)", strings.TrimSpace(r.Stdout), limit, r.Status, r.Stderr)
	}
	g.succeeds(c, "user", "true")
	if s, ok := c.list(c.d, id); !ok || s.State != driver.Running {
		t.Errorf("the sandbox is %+v, %v", s, ok)
	}
}

// testLimitCPU compares the processor time that the host counts for the sandbox with the time that passes. The bounds are
// wide: the machine may be busy with other tests, and the schedulers count coarsely.
func testLimitCPU(t *testing.T, c *ctx) {
	s, _ := driver.As[driver.Statser](c.d)
	id := c.create(func(s *driver.Spec) { s.Limits.CPUMillis = 300 })
	g := c.guest(id)
	p := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", "while :; do :; done & while :; do :; done & echo busy; wait"}})
	if _, err := p.line(); err != nil {
		t.Fatal(err)
	}
	before, err := s.Stats(c, id)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	time.Sleep(4 * time.Second)
	after, err := s.Stats(c, id)
	if err != nil {
		t.Fatal(err)
	}
	share := (after.CPUTime - before.CPUTime).Seconds() / time.Since(begin).Seconds()
	t.Logf("two busy loops used %.2f of a processor, limit 0.30", share)
	if share > 0.6 || share < 0.03 {
		t.Errorf("two busy loops used %.2f of a processor, limit 0.30", share)
	}
}
