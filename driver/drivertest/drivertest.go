// Package drivertest holds the tests that every driver runs: a case for each sentence of the contract of package driver
// ([Run]), attacks on the boundary with proof that each would be noticed ([Escape]), and a table of what ran.
//
// The same cases run against a driver itself, against a wrapper around it, and through the daemon's socket: what a
// case needs beyond the driver interface is in [Harness], and what a harness cannot express is listed as not run with its
// reason, never as passed.
package drivertest

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/drivertest/peer"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// Harness is one driver to test and what the cases need to know of it.
type Harness struct {
	// Name heads the table, such as "gvisor" or "gvisor over the socket".
	Name string
	// New opens the driver. Called again it opens another on the same state, as a restarted daemon would. The test
	// closes it.
	New func(t testing.TB) driver.Driver
	// Spec returns a spec that the driver can honour in full. Cases add mounts and change limits.
	Spec func(t testing.TB, id warren.SandboxID) *driver.Spec
	// Boundary is the class of [driver.Info] by which attacks are judged: "kernel", "namespace" or "none".
	Boundary string
	// Commands says that a real guest answers on [warren.GuestPort] and runs commands on Linux. Without it the cases
	// that look at a sandbox from inside are not run.
	Commands bool
	// Listen makes handle answer connections to a port in the sandbox. It is needed only without Commands; else the
	// suite runs a program in the sandbox.
	Listen func(t testing.TB, d driver.Driver, id warren.SandboxID, port uint16, handle func(net.Conn))
	// Kill ends a sandbox's processes from outside with SIGKILL, as a crash of its kernel would. Nil: the processes in Processes are killed.
	Kill func(t testing.TB, d driver.Driver, id warren.SandboxID)
	// Processes returns the host's processes of a sandbox; nil if there are none, as in an in-process fake.
	Processes func(t testing.TB, id warren.SandboxID) []int
	// Asynchronous says that a call which the caller gave up is undone soon after it returns, as behind a network.
	Asynchronous bool
	// Alias returns the name that a sandbox has on the host, where that is not its id.
	Alias func(id warren.SandboxID) warren.SandboxID
	// State are the directories in which the driver keeps what belongs to a sandbox.
	State []string
	// Lacks names cases that this harness cannot express, with the reason.
	Lacks map[string]string
	// Initialized says that who creates has also sent /init to the guest, as the engine does. Else the suite does.
	Initialized bool
	// Brief runs fewer cases, for a second way to a driver whose cases all run elsewhere. With WARREN_SOAK set all run.
	Brief bool
	// Binaries are programs of the host that run a sandbox; an attack must not change them.
	Binaries []string
}

// deadline bounds one case. Nothing depends on it in a run that passes.
const deadline = 3 * time.Minute

// testCase is one sentence of the contract.
type testCase struct {
	name string
	// sentence is what the case proves.
	sentence string
	// commands: the case looks at the sandbox from inside.
	commands bool
	// processes: the case needs host processes to look at or kill.
	processes bool
	// optional is the part of a driver that the case is about, if it need not have it.
	optional string
	run      func(t *testing.T, c *ctx)
}

// Run runs the conformance cases and prints a table of them.
func Run(t *testing.T, h Harness) {
	t.Helper()
	table := NewTable(h.Name, "conformance")
	able := h.abilities(t)
	var cases []testCase
	for _, group := range [][]testCase{lifecycleCases, dialCases, mountCases, limitCases, freezeCases, rootCases, snapshotCases, forkCases} {
		cases = append(cases, group...)
	}
	for _, name := range brief {
		if !slices.ContainsFunc(cases, func(tc testCase) bool { return tc.name == name }) {
			t.Fatalf("brief has %q, which is no case", name)
		}
	}
	for _, tc := range cases {
		table.Run(t, tc.name, tc.sentence, h.lacks(tc, able), func(t *testing.T) {
			tc.run(t, newCtx(t, h))
		})
	}
	table.Print(t)
}

func (h *Harness) isBrief() bool { return h.Brief && os.Getenv("WARREN_SOAK") == "" }

// inFull is why a brief run leaves a case out.
const inFull = "a brief run: all cases with WARREN_SOAK=1"

// brief are the cases that depend on the way to a driver: what is created, found again and removed by it, and a stream and a directory.
var brief = []string{
	"create-refuses", "delete", "delete-half-made", "list-reopened", "at-once", "watch", "info", "check", "unwrap", "dial-guest-waits",
	"dial-half-close", "dial-we-end", "mount-durable", "mount-sync", "owner-user", "freeze", "root-save-refuses", "snapshot-restore", "fork-identity",
}

// Optional parts of a driver that cases are about.
const (
	watches  = "Watcher"
	measures = "Statser"
	checks   = "Checker"
	freezes  = "Snapshotter"
	freezing = "Freezer"
	saving   = "RootSaver"
	syncs    = "Syncer"
)

// abilities returns the optional parts that the driver has.
func (h *Harness) abilities(t *testing.T) map[string]bool {
	t.Helper()
	d := h.New(t)
	defer d.Close()
	able := map[string]bool{}
	_, able[watches] = driver.As[driver.Watcher](d)
	_, able[measures] = driver.As[driver.Statser](d)
	_, able[checks] = driver.As[driver.Checker](d)
	_, able[freezes] = driver.As[driver.Snapshotter](d)
	_, able[freezing] = driver.As[driver.Freezer](d)
	_, able[saving] = driver.As[driver.RootSaver](d)
	_, able[syncs] = driver.As[driver.Syncer](d)
	return able
}

func (h *Harness) lacks(tc testCase, able map[string]bool) string {
	switch {
	case h.isBrief() && !slices.Contains(brief, tc.name):
		return inFull
	case h.Lacks[tc.name] != "":
		return h.Lacks[tc.name]
	case tc.optional != "" && !able[tc.optional]:
		return "it is no " + tc.optional
	case tc.commands && !h.Commands:
		return "no guest runs commands"
	case tc.processes && h.Processes == nil && h.Kill == nil:
		return "no processes on the host"
	}
	return ""
}

// ctx is what one case works with. Sandboxes made through it are deleted at the end of the case, and nothing may be left
// of them then.
type ctx struct {
	context.Context
	t   *testing.T
	h   Harness
	d   driver.Driver
	ids []warren.SandboxID

	mu sync.Mutex
	// memory limits of sandboxes whose guest has not been told yet.
	untold map[warren.SandboxID]int64
}

func newCtx(t *testing.T, h Harness) *ctx {
	t.Helper()
	base, cancel := context.WithTimeout(context.Background(), deadline)
	c := &ctx{Context: base, t: t, h: h, d: h.New(t), untold: map[warren.SandboxID]int64{}}
	t.Cleanup(func() {
		defer cancel()
		clean, stop := context.WithTimeout(context.Background(), time.Minute)
		defer stop()
		for _, id := range c.ids {
			if err := c.d.Delete(clean, id); err != nil {
				t.Errorf("Delete(%s) at the end: %v", id, err)
			}
		}
		c.nothingLeft(c.ids...)
		if err := c.d.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

// newID returns an id that is deleted at the end of the case, whether or not a sandbox was made with it.
func (c *ctx) newID() warren.SandboxID {
	id := warren.SandboxID("s" + strings.ToLower(rand.Text()[:19]))
	c.ids = append(c.ids, id)
	return id
}

// spec returns a spec with a new id.
func (c *ctx) spec(change ...func(*driver.Spec)) *driver.Spec {
	c.t.Helper()
	s := c.h.Spec(c.t, c.newID())
	for _, f := range change {
		f(s)
	}
	return s
}

// create makes a sandbox.
func (c *ctx) create(change ...func(*driver.Spec)) warren.SandboxID {
	c.t.Helper()
	s := c.spec(change...)
	c.createSpec(s)
	return s.ID
}

func (c *ctx) createSpec(s *driver.Spec) {
	c.t.Helper()
	if err := c.d.Create(c, s); err != nil {
		c.t.Fatalf("Create: %v", err)
	}
	if c.h.Commands && !c.h.Initialized {
		c.mu.Lock()
		c.untold[s.ID] = s.Limits.Memory
		c.mu.Unlock()
	}
}

// withProbe mounts the probe program at [probePath].
func withProbe(t testing.TB) func(*driver.Spec) {
	t.Helper()
	dir := filepath.Dir(probeBinary(t))
	return func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, filepath.Dir(probePath), false, driver.Owner{}))
	}
}

// probePath is where the probe program shows in a sandbox.
const probePath = "/mnt/probe/probe"

func probeBinary(t testing.TB) string {
	t.Helper()
	// A directory of its own: it is mounted into sandboxes, and nothing else shall show there.
	path, err := testenv.Build(filepath.Join(testenv.Repo(t), ".cache", "probe"), "probe", "./driver/drivertest/probe")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// openMount pins a directory as the engine does. It stays open until the test ends.
func openMount(t testing.TB, dir, target string, writable bool, owner driver.Owner) driver.Mount {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return driver.Mount{Dir: f, Source: dir, Target: target, Writable: writable, Owner: owner}
}

// list returns the status of a sandbox; ok is false when List does not name it.
func (c *ctx) list(d driver.Driver, id warren.SandboxID) (status driver.Status, ok bool) {
	c.t.Helper()
	all, err := d.List(c)
	if err != nil {
		c.t.Fatalf("List: %v", err)
	}
	n := 0
	for _, s := range all {
		if s.ID == id {
			status, n = s, n+1
		}
	}
	if n > 1 {
		c.t.Errorf("List names %s %d times", id, n)
	}
	return status, n > 0
}

// waitState polls List until the sandbox is in the state.
func (c *ctx) waitState(id warren.SandboxID, want driver.State) driver.Status {
	c.t.Helper()
	for {
		s, ok := c.list(c.d, id)
		if ok && s.State == want {
			return s
		}
		select {
		case <-c.Done():
			c.t.Fatalf("List never says that %s is %s; last: %+v", id, want, s)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// kill ends the sandbox from outside and waits until List says so.
func (c *ctx) kill(id warren.SandboxID) driver.Status {
	c.t.Helper()
	if c.h.Kill != nil {
		c.h.Kill(c.t, c.d, id)
	} else {
		pids := c.h.Processes(c.t, id)
		if len(pids) == 0 {
			c.t.Fatalf("no processes of %s to kill", id)
		}
		for _, pid := range pids {
			if p, err := os.FindProcess(pid); err == nil {
				p.Kill()
			}
		}
	}
	return c.waitState(id, driver.Dead)
}

// dial connects to a port.
func (c *ctx) dial(id warren.SandboxID, port uint16) net.Conn {
	c.t.Helper()
	conn, err := c.d.Dial(c, id, port)
	if err != nil {
		c.t.Fatalf("Dial(%s, %d): %v", id, port, err)
	}
	c.t.Cleanup(func() { conn.Close() })
	if until, ok := c.Deadline(); ok {
		conn.SetDeadline(until)
	}
	return conn
}

// ask dials the peer and sends the first line that says what it shall do.
func (c *ctx) ask(id warren.SandboxID, port uint16, line string) net.Conn {
	c.t.Helper()
	conn := c.dial(id, port)
	if _, err := io.WriteString(conn, line+"\n"); err != nil {
		c.t.Fatalf("write to port %d: %v", port, err)
	}
	return conn
}

// listening makes a sandbox in which [peer.Serve] answers on the port.
func (c *ctx) listening(port uint16) warren.SandboxID {
	c.t.Helper()
	if !c.h.Commands {
		id := c.create()
		c.h.Listen(c.t, c.d, id, port, peer.Serve)
		return id
	}
	id := c.create(withProbe(c.t))
	c.serve(id, "127.0.0.1", port)
	return id
}

// serve runs the probe as a listener in the sandbox and waits until it listens.
func (c *ctx) serve(id warren.SandboxID, host string, port uint16) {
	c.t.Helper()
	p := c.guest(id).start(c, Command{Args: []string{probePath, "serve", net.JoinHostPort(host, fmt.Sprint(port))}})
	line, err := p.line()
	if err != nil || line != "listening" {
		c.t.Fatalf("the listener in the sandbox said %q, %v", line, err)
	}
}
