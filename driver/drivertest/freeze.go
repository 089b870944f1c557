package drivertest

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

var freezeCases = []testCase{
	{name: "freeze", sentence: "a frozen sandbox stands still until Thaw; freezing it again does nothing, and thawing one that runs leaves it alone", optional: freezing, run: testFreeze},
	{name: "freeze-processes", sentence: "when Freeze returns nothing in the sandbox runs any more; after Thaw all of it goes on", commands: true, optional: freezing, run: testFreezeProcesses},
	{name: "freeze-connections", sentence: "connections wait while their sandbox is frozen", optional: freezing, run: testFreezeConnections},
	{name: "freeze-looks", sentence: "a frozen sandbox is listed as running and is measured; a driver opened anew thaws it", optional: freezing, run: testFreezeLooks},
	{name: "freeze-delete", sentence: "a frozen sandbox can be deleted", optional: freezing, run: testFreezeDelete},
	{name: "freeze-refuses", sentence: "a missing sandbox gives ErrNotFound, one that has died ErrState", optional: freezing, run: testFreezeRefuses},
}

func (c *ctx) freezes() driver.Freezer {
	f, _ := driver.As[driver.Freezer](c.d)
	return f
}

func (c *ctx) freeze(id warren.SandboxID) {
	c.t.Helper()
	if err := c.freezes().Freeze(c, id); err != nil {
		c.t.Fatalf("Freeze(%s): %v", id, err)
	}
}

func (c *ctx) thaw(id warren.SandboxID) {
	c.t.Helper()
	if err := c.freezes().Thaw(c, id); err != nil {
		c.t.Fatalf("Thaw(%s): %v", id, err)
	}
}

func testFreeze(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	for range 2 {
		c.freeze(id)
		if !c.still(id) {
			t.Error("the guest of a frozen sandbox answers")
		}
	}
	for range 2 {
		c.thaw(id)
		c.answers(c.d, id)
	}
	c.freeze(id)
	c.thaw(id)
	c.answers(c.d, id)
}

func testFreezeProcesses(t *testing.T, c *ctx) {
	id := c.create()
	g := c.guest(id)
	p := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", "n=0; while :; do n=$((n+1)); echo $n >/var/tmp/at.new; mv /var/tmp/at.new /var/tmp/at; echo $n; done"}})
	if _, err := p.line(); err != nil {
		t.Fatal(err)
	}
	// What it says has to be taken, or it would stand still without us.
	go func() {
		for {
			if _, err := p.line(); err != nil {
				return
			}
		}
	}()
	at := func() int {
		t.Helper()
		n, err := strconv.Atoi(g.Output(c, "cat", "/var/tmp/at"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := at()
	for range 3 {
		c.freeze(id)
		time.Sleep(50 * time.Millisecond) // the kernel still has to add up what was used before
		used := c.used(id)
		time.Sleep(300 * time.Millisecond)
		if more := c.used(id) - used; more > 60*time.Millisecond {
			t.Errorf("it used %v of processors while it stood still", more)
		}
		c.thaw(id)
	}
	if after := at(); after <= before {
		t.Errorf("the counter was at %d and is at %d", before, after)
	}
}

// used is the processor time that a sandbox has used, or 0 when the driver does not measure.
func (c *ctx) used(id warren.SandboxID) time.Duration {
	c.t.Helper()
	s, ok := driver.As[driver.Statser](c.d)
	if !ok {
		return 0
	}
	st, err := s.Stats(c, id)
	if err != nil {
		c.t.Fatalf("Stats of a frozen sandbox: %v", err)
	}
	return st.CPUTime
}

func testFreezeConnections(t *testing.T, c *ctx) {
	const port = 7777
	id := c.listening(port)
	conn := c.ask(id, port, "echo")
	say := func(text string) {
		t.Helper()
		if _, err := fmt.Fprint(conn, text); err != nil {
			t.Fatal(err)
		}
	}
	hear := func(want string) {
		t.Helper()
		got := make([]byte, len(want))
		for n := 0; n < len(got); {
			m, err := conn.Read(got[n:])
			if err != nil {
				t.Fatalf("%q, %v; want %q", got[:n], err, want)
			}
			n += m
		}
		if string(got) != want {
			t.Fatalf("%q, want %q", got, want)
		}
	}
	say("before")
	hear("before")
	c.freeze(id)
	if c.h.Commands { // what answers for a fake sandbox is not in it
		say("within")
		conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		if n, err := conn.Read(make([]byte, 1)); err == nil || n > 0 {
			t.Error("a frozen sandbox answers on a connection")
		}
		conn.SetReadDeadline(time.Time{})
	}
	c.thaw(id)
	if c.h.Commands {
		hear("within")
	}
	say("after")
	hear("after")
}

func testFreezeLooks(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	c.freeze(id)
	if s, ok := c.list(c.d, id); !ok || s.State != driver.Running {
		t.Errorf("List: %+v, %v; want it running", s, ok)
	}
	c.used(id)
	other := c.h.New(t)
	defer other.Close()
	if s, ok := c.list(other, id); !ok || s.State != driver.Running {
		t.Errorf("List of a driver opened anew: %+v, %v; want it running", s, ok)
	}
	f, _ := driver.As[driver.Freezer](other)
	if err := f.Thaw(c, id); err != nil {
		t.Fatalf("Thaw by a driver opened anew: %v", err)
	}
	c.answers(c.d, id)
}

func testFreezeDelete(t *testing.T, c *ctx) {
	dir := workDir(t)
	spec := c.spec(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	})
	c.createSpec(spec)
	c.answers(c.d, spec.ID)
	if c.h.Commands {
		c.guest(spec.ID).succeeds(c, "user", "echo -n kept > /mnt/rw/file")
	}
	c.freeze(spec.ID)
	c.delete(spec.ID)
	c.notListed(spec.ID)
	c.nothingLeft(spec.ID)
	if c.h.Commands {
		hostFile(t, filepath.Join(dir, "file"), "kept")
	}
	c.createSpec(c.h.Spec(t, spec.ID))
	c.answers(c.d, spec.ID)
}

func testFreezeRefuses(t *testing.T, c *ctx) {
	calls := map[string]func(warren.SandboxID) error{
		"Freeze": func(id warren.SandboxID) error { return c.freezes().Freeze(c, id) },
		"Thaw":   func(id warren.SandboxID) error { return c.freezes().Thaw(c, id) },
	}
	missing := c.newID()
	for name, call := range calls {
		if err := call(missing); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("%s of a missing sandbox: %v, want ErrNotFound", name, err)
		}
	}
	if c.h.Kill == nil && c.h.Processes == nil {
		return
	}
	id := c.create()
	c.answers(c.d, id)
	c.kill(id)
	for name, call := range calls {
		if err := call(id); !errors.Is(err, warren.ErrState) {
			t.Errorf("%s of a dead sandbox: %v, want ErrState", name, err)
		} else if strings.Contains(err.Error(), "pause") {
			t.Errorf("%s calls it a pause: %v", name, err)
		}
	}
}
