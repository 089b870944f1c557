package drivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

var lifecycleCases = []testCase{
	{name: "create", sentence: "when Create returns nil the sandbox exists and its guest boots", run: testCreate},
	{name: "create-exists", sentence: "creating an id that exists returns ErrExists and changes nothing", run: testCreateExists},
	{name: "create-same-id-at-once", sentence: "of many creates of one id exactly one succeeds", run: testCreateSameID},
	{name: "create-refuses", sentence: "a spec that cannot be honoured is refused before anything is made", run: testCreateRefuses},
	{name: "create-error-leaves-nothing", sentence: "when Create returns an error nothing of the sandbox is left", run: testCreateError},
	{name: "create-cancel", sentence: "when ctx ends, Create stops soon and leaves nothing", run: testCreateCancel},
	{name: "delete", sentence: "Delete ends every process and removes all that was made", run: testDelete},
	{name: "delete-missing", sentence: "deleting what does not exist returns nil, as often as one likes", run: testDeleteMissing},
	{name: "delete-half-made", sentence: "Delete removes what a create left that was cut short, whoever started it", run: testDeleteHalfMade},
	{name: "delete-at-once", sentence: "many deletes of one sandbox at the same time all return nil", run: testDeleteAtOnce},
	{name: "delete-keeps-mounts", sentence: "what the spec mounted stays after Delete", run: testDeleteKeepsMounts},
	{name: "list", sentence: "List returns every sandbox of the state, in any order", run: testList},
	{name: "list-reopened", sentence: "a driver opened anew lists what an earlier one created", run: testListReopened},
	{name: "list-dead", sentence: "List has dead sandboxes, with how they ended", processes: true, run: testListDead},
	{name: "dead-reopened", sentence: "a driver opened anew knows that a sandbox has died, and deletes it", processes: true, run: testDeadReopened},
	{name: "close", sentence: "Close releases what the process holds; sandboxes keep running", run: testClose},
	{name: "close-keeps-processes", sentence: "commands go on while no driver is open", commands: true, run: testCloseKeepsProcesses},
	{name: "at-once", sentence: "all methods may be called at the same time", run: testAtOnce},
	{name: "watch", sentence: "Watch sends each death, also to a slow reader, and closes the channel when ctx ends", processes: true, optional: watches, run: testWatch},
	{name: "stats", sentence: "Stats tells what a sandbox uses", optional: measures, run: testStats},
	{name: "info", sentence: "Info names the driver and the class of its boundary", run: testInfo},
	{name: "check", sentence: "each finding about the host has a status, and a hint where it is not ok", optional: checks, run: testCheck},
	{name: "unwrap", sentence: "a wrapper hides no capability", run: testUnwrap},
}

// answers fails the case unless the guest of the sandbox, or with no real guest its port, can be reached.
func (c *ctx) answers(d driver.Driver, id warren.SandboxID) {
	c.t.Helper()
	if !c.h.Commands {
		conn, err := d.Dial(c, id, warren.GuestPort)
		if err != nil {
			c.t.Fatalf("Dial(%s, guest): %v", id, err)
		}
		conn.Close()
		return
	}
	g := NewGuest(c.t, d, id)
	req, err := http.NewRequestWithContext(c, http.MethodGet, guestURL+"/health", nil)
	if err != nil {
		c.t.Fatal(err)
	}
	resp, err := g.http.Do(req)
	if err != nil {
		c.t.Fatalf("guest of %s: GET /health: %v", id, err)
	}
	resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		c.t.Fatalf("guest of %s: GET /health: %s", id, resp.Status)
	}
}

func testCreate(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	if s, ok := c.list(c.d, id); !ok || s.State != driver.Running {
		t.Errorf("List: %+v, %v; want it running", s, ok)
	}
}

func testCreateExists(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	again := c.h.Spec(t, id)
	again.Hostname = "usurper"
	err := c.d.Create(c, again)
	if !errors.Is(err, warren.ErrExists) {
		t.Errorf("second Create: %v, want ErrExists", err)
	}
	c.answers(c.d, id)
	if c.h.Commands {
		if name := c.guest(id).Output(c, "cat", "/proc/sys/kernel/hostname"); name == "usurper" {
			t.Error("the second Create changed the host name")
		}
	}
	other := c.h.New(t)
	defer other.Close()
	if err := other.Create(c, again); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Create by a driver opened anew: %v, want ErrExists", err)
	}
}

func testCreateSameID(t *testing.T, c *ctx) {
	id := c.newID()
	errs := make([]error, 6)
	var wg sync.WaitGroup
	for i := range errs {
		spec := c.h.Spec(t, id)
		wg.Go(func() { errs[i] = c.d.Create(c, spec) })
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
		} else if !errors.Is(err, warren.ErrExists) {
			t.Errorf("Create: %v, want ErrExists", err)
		}
	}
	if made != 1 {
		t.Errorf("%d creates of one id succeeded, want 1", made)
	}
	c.answers(c.d, id)
}

func testCreateRefuses(t *testing.T, c *ctx) {
	dir := t.TempDir()
	for name, spoil := range map[string]func(*driver.Spec){
		"no id":                func(s *driver.Spec) { s.ID = "" },
		"an id that is a path": func(s *driver.Spec) { s.ID = "../../" + s.ID },
		"an id with a NUL":     func(s *driver.Spec) { s.ID += "\x00" },
		"no memory":            func(s *driver.Spec) { s.Limits.Memory = 0 },
		"negative memory":      func(s *driver.Spec) { s.Limits.Memory = -1 },
		"no processor":         func(s *driver.Spec) { s.Limits.CPUMillis = 0 },
		"no disk":              func(s *driver.Spec) { s.Limits.Disk = 0 },
		"no processes":         func(s *driver.Spec) { s.Limits.PIDs = 0 },
		"an unknown option":    func(s *driver.Spec) { s.Options = map[string]string{"no-such-option": "1"} },
		"a relative target":    func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, dir, "data", false, driver.Owner{})) },
		"an unclean target":    func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, dir, "/a/../b", false, driver.Owner{})) },
		"the root as target":   func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, dir, "/", false, driver.Owner{})) },
		"/proc as target":      func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, dir, "/proc", false, driver.Owner{})) },
		"a variable without =": func(s *driver.Spec) { s.Env = append(s.Env, "NOVALUE") },
		"a NUL in a variable":  func(s *driver.Spec) { s.Env = append(s.Env, "A=b\x00c") },
		"a host name too long": func(s *driver.Spec) { s.Hostname = strings.Repeat("h", 300) },
	} {
		spec := c.spec(spoil)
		err := c.d.Create(c, spec)
		if !errors.Is(err, warren.ErrInvalid) && !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: Create: %v, want ErrInvalid or ErrUnsupported", name, err)
		}
		if err == nil && spec.ID != "" {
			c.ids = append(c.ids, spec.ID)
		}
	}
	c.nothingLeft(c.ids...)
	c.notListed(c.ids...)
}

// notListed fails the case if List names one of the ids.
func (c *ctx) notListed(ids ...warren.SandboxID) {
	c.t.Helper()
	all, err := c.d.List(c)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, s := range all {
		if slices.Contains(ids, s.ID) {
			c.t.Errorf("List still names %s as %s", s.ID, s.State)
		}
	}
}

func testCreateError(t *testing.T, c *ctx) {
	dir := t.TempDir()
	for name, spoil := range map[string]func(*driver.Spec){
		"a layer that is gone": func(s *driver.Spec) {
			s.Root = driver.Root{Digest: "sha256:gone", Layers: []driver.Layer{{Dir: filepath.Join(dir, "gone")}}}
		},
		"a bind that is gone": func(s *driver.Spec) {
			s.Root.Binds = append(slices.Clone(s.Root.Binds), driver.Bind{Source: filepath.Join(dir, "gone"), Target: "/usr/gone"})
		},
		"a mount that was closed": func(s *driver.Spec) {
			m := openMount(t, dir, "/data", false, driver.Owner{})
			m.Dir.Close()
			s.Mounts = append(s.Mounts, m)
		},
	} {
		spec := c.spec(spoil)
		if err := c.d.Create(c, spec); err == nil {
			t.Errorf("%s: Create succeeded", name)
		} else if strings.Contains(err.Error(), "panic") {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.nothingLeft(c.ids...)
	c.notListed(c.ids...)
	// The driver is as good as new.
	c.answers(c.d, c.create())
}

func testCreateCancel(t *testing.T, c *ctx) {
	var stopped []warren.SandboxID
	for _, after := range []time.Duration{0, 1, 3, 7, 15, 25, 40, 60, 90, 130} {
		ctx, cancel := context.WithCancel(c)
		if after == 0 {
			cancel()
		} else {
			time.AfterFunc(after*time.Millisecond, cancel)
		}
		spec := c.spec()
		begin := time.Now()
		err := c.d.Create(ctx, spec)
		took := time.Since(begin)
		cancel()
		switch {
		case err == nil && after == 0:
			t.Error("Create with a context that had ended succeeded")
		case err == nil:
			c.answers(c.d, spec.ID)
		case !errors.Is(err, context.Canceled):
			t.Errorf("cancelled after %v: %v, want context.Canceled", after*time.Millisecond, err)
			fallthrough
		default:
			stopped = append(stopped, spec.ID)
			// Soon, on a machine that may be busy with other tests.
			if took > 20*time.Second {
				t.Errorf("cancelled after %v: Create took %v", after*time.Millisecond, took)
			}
		}
	}
	if c.h.Asynchronous {
		c.waitNotListed(stopped...)
	}
	c.nothingLeft(stopped...)
	c.notListed(stopped...)
}

// waitNotListed waits until List names none of the ids.
func (c *ctx) waitNotListed(ids ...warren.SandboxID) {
	c.t.Helper()
	for until := time.Now().Add(30 * time.Second); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		all, err := c.d.List(c)
		if err != nil {
			c.t.Fatal(err)
		}
		if !slices.ContainsFunc(all, func(s driver.Status) bool { return slices.Contains(ids, s.ID) }) {
			return
		}
	}
}

func testDelete(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	if c.h.Processes != nil && len(c.h.Processes(t, id)) == 0 {
		t.Error("a running sandbox has no processes")
	}
	if err := c.d.Delete(c, id); err != nil {
		t.Fatalf("Delete: %v", err)
	}
	c.notListed(id)
	if c.h.Processes != nil {
		if left := c.h.Processes(t, id); len(left) > 0 {
			t.Errorf("processes after Delete: %v", left)
		}
	}
	c.nothingLeft(id)
	if _, err := c.d.Dial(c, id, warren.GuestPort); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Dial after Delete: %v, want ErrNotFound", err)
	}
}

func testDeleteMissing(t *testing.T, c *ctx) {
	id := c.newID()
	for range 3 {
		if err := c.d.Delete(c, id); err != nil {
			t.Errorf("Delete of an id that never was: %v", err)
		}
	}
	id = c.create()
	for range 3 {
		if err := c.d.Delete(c, id); err != nil {
			t.Errorf("Delete: %v", err)
		}
	}
}

func testDeleteHalfMade(t *testing.T, c *ctx) {
	for _, after := range []time.Duration{1, 5, 12, 30, 60} {
		spec := c.spec()
		done := make(chan error, 1)
		go func() { done <- c.d.Create(c, spec) }()
		time.Sleep(after * time.Millisecond)
		// Another driver on the same state, as after a crash of the one that creates.
		other := c.h.New(t)
		if err := other.Delete(c, spec.ID); err != nil {
			t.Errorf("Delete %v into a create: %v", after*time.Millisecond, err)
		}
		<-done
		// The create may have begun after the delete looked, or have succeeded before.
		if err := other.Delete(c, spec.ID); err != nil {
			t.Errorf("Delete after the create: %v", err)
		}
		c.notListed(spec.ID)
		c.nothingLeft(spec.ID)
		other.Close()
	}
}

func testDeleteAtOnce(t *testing.T, c *ctx) {
	id := c.create()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := c.d.Delete(c, id); err != nil {
				t.Errorf("Delete: %v", err)
			}
		})
	}
	wg.Wait()
	c.notListed(id)
	c.nothingLeft(id)
}

func testDeleteKeepsMounts(t *testing.T, c *ctx) {
	dir := t.TempDir()
	file := filepath.Join(dir, "kept")
	if err := os.WriteFile(file, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/kept", true, driver.Owner{IDBase: driver.DiskIDBase}))
	})
	c.answers(c.d, id)
	if err := c.d.Delete(c, id); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "kept" {
		t.Errorf("after Delete: %q, %v", text, err)
	}
}

func testList(t *testing.T, c *ctx) {
	want := []warren.SandboxID{c.create(), c.create(), c.create()}
	for _, id := range want {
		if s, ok := c.list(c.d, id); !ok || s.State != driver.Running || s.Exit != nil {
			t.Errorf("List of %s: %+v, %v; want it running", id, s, ok)
		}
	}
	if err := c.d.Delete(c, want[1]); err != nil {
		t.Fatal(err)
	}
	c.notListed(want[1])
	if _, ok := c.list(c.d, want[0]); !ok {
		t.Error("List lost another sandbox")
	}
}

func testListReopened(t *testing.T, c *ctx) {
	id := c.create()
	other := c.h.New(t)
	defer other.Close()
	if s, ok := c.list(other, id); !ok || s.State != driver.Running {
		t.Errorf("List of a driver opened anew: %+v, %v; want it running", s, ok)
	}
	c.answers(other, id)
	if err := other.Delete(c, id); err != nil {
		t.Errorf("Delete by a driver opened anew: %v", err)
	}
	c.notListed(id)
}

func testListDead(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	s := c.kill(id)
	if s.Exit == nil {
		t.Fatal("dead without an Exit")
	}
	if s.Exit.Reason != "killed" && s.Exit.Reason != "lost" {
		t.Errorf("killed from outside: reason %q, want killed or lost", s.Exit.Reason)
	}
	if s.Exit.Time.IsZero() || time.Since(s.Exit.Time) > deadline || time.Until(s.Exit.Time) > time.Minute {
		t.Errorf("it ended at %v", s.Exit.Time)
	}
	for _, dir := range c.h.State {
		if strings.Contains(s.Exit.Message, dir) {
			t.Errorf("the message has a host path: %q", s.Exit.Message)
		}
	}
	if err := c.d.Create(c, c.h.Spec(t, id)); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Create of a dead sandbox's id: %v, want ErrExists until it is deleted", err)
	}
	if err := c.d.Delete(c, id); err != nil {
		t.Fatal(err)
	}
	c.notListed(id)
	c.nothingLeft(id)
}

func testDeadReopened(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	c.kill(id)
	other := c.h.New(t)
	defer other.Close()
	if s, ok := c.list(other, id); !ok || s.State != driver.Dead || s.Exit == nil {
		t.Errorf("List of a driver opened anew: %+v, %v; want it dead", s, ok)
	}
	if err := other.Delete(c, id); err != nil {
		t.Fatal(err)
	}
	c.nothingLeft(id)
}

func testClose(t *testing.T, c *ctx) {
	first := c.h.New(t)
	spec := c.spec()
	if err := first.Create(c, spec); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	again := c.h.New(t)
	defer again.Close()
	c.answers(again, spec.ID)
	if s, ok := c.list(again, spec.ID); !ok || s.State != driver.Running {
		t.Errorf("List: %+v, %v; want it running", s, ok)
	}
}

func testCloseKeepsProcesses(t *testing.T, c *ctx) {
	first := c.h.New(t)
	spec := c.spec()
	if err := first.Create(c, spec); err != nil {
		t.Fatal(err)
	}
	g := NewGuest(t, first, spec.ID)
	p := g.start(c, Command{Args: []string{"/bin/sh", "-c", "echo $$; while :; do date +%s%N > /tmp/beat; sleep 0.05; done"}})
	pid, err := p.line()
	if err != nil {
		t.Fatal(err)
	}
	g.http.CloseIdleConnections()
	if err := first.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	again := c.h.New(t)
	defer again.Close()
	g = NewGuest(t, again, spec.ID)
	beat := func() string { return g.Output(c, "cat", "/tmp/beat") }
	g.Output(c, "kill", "-0", pid)
	for before := beat(); beat() == before; {
		if c.Err() != nil {
			t.Fatal("the command stands still after Close")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func testAtOnce(t *testing.T, c *ctx) {
	ids := make([]warren.SandboxID, 6)
	specs := make([]*driver.Spec, len(ids))
	for i := range ids {
		ids[i] = c.newID()
		specs[i] = c.h.Spec(t, ids[i])
	}
	listing, stop := context.WithCancel(c)
	var lister, makers sync.WaitGroup
	lister.Go(func() {
		for listing.Err() == nil {
			if _, err := c.d.List(c); err != nil {
				t.Errorf("List: %v", err)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	for i := range ids {
		makers.Go(func() {
			if err := c.d.Create(c, specs[i]); err != nil {
				t.Errorf("Create: %v", err)
				return
			}
			conn, err := c.d.Dial(c, ids[i], warren.GuestPort)
			if err != nil {
				t.Errorf("Dial: %v", err)
			} else {
				conn.Close()
			}
			if err := c.d.Delete(c, ids[i]); err != nil {
				t.Errorf("Delete: %v", err)
			}
		})
	}
	makers.Wait()
	stop()
	lister.Wait()
	c.notListed(ids...)
}

func testWatch(t *testing.T, c *ctx) {
	w, _ := driver.As[driver.Watcher](c.d)
	ids := make([]warren.SandboxID, 4)
	for i := range ids {
		ids[i] = c.create()
		c.answers(c.d, ids[i])
	}
	ctx, cancel := context.WithCancel(c)
	defer cancel()
	deaths, err := w.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// Nobody reads until all have died.
	for _, id := range ids {
		c.kill(id)
	}
	seen := map[warren.SandboxID]driver.Status{}
	for len(seen) < len(ids) {
		select {
		case s, ok := <-deaths:
			if !ok {
				t.Fatalf("the channel closed after %d of %d deaths", len(seen), len(ids))
			}
			if slices.Contains(ids, s.ID) {
				seen[s.ID] = s
			}
		case <-c.Done():
			t.Fatalf("%d of %d deaths were sent", len(seen), len(ids))
		}
	}
	for id, s := range seen {
		if s.State != driver.Dead || s.Exit == nil || s.Exit.Reason == "" {
			t.Errorf("death of %s: %+v", id, s)
		}
	}
	// One that is made again can die again.
	again := ids[0]
	if err := c.d.Delete(c, again); err != nil {
		t.Fatal(err)
	}
	c.createSpec(c.h.Spec(t, again))
	c.answers(c.d, again)
	c.kill(again)
	for told := false; !told; {
		select {
		case s := <-deaths:
			told = s.ID == again
		case <-c.Done():
			t.Fatal("the second death of one id was not sent")
		}
	}
	cancel()
	for {
		select {
		case _, ok := <-deaths:
			if !ok {
				return
			}
		case <-c.Done():
			t.Fatal("the channel stays open after its context ended")
		}
	}
}

func testStats(t *testing.T, c *ctx) {
	s, _ := driver.As[driver.Statser](c.d)
	if _, err := s.Stats(c, c.newID()); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Stats of an id that never was: %v, want ErrNotFound", err)
	}
	id := c.create()
	c.answers(c.d, id)
	before, err := s.Stats(c, id)
	if err != nil {
		t.Fatal(err)
	}
	if before.Memory <= 0 || before.Memory > 64<<30 || before.CPUTime < 0 || before.Disk < 0 {
		t.Errorf("Stats: %+v", before)
	}
	if !c.h.Commands {
		return
	}
	const written = 24 << 20
	c.guest(id).Shell(c, "root", fmt.Sprintf("head -c %d /dev/urandom > /var/tmp/data; sync", written))
	after, err := s.Stats(c, id)
	if err != nil {
		t.Fatal(err)
	}
	if after.CPUTime <= before.CPUTime {
		t.Errorf("processor time went from %v to %v over a busy command", before.CPUTime, after.CPUTime)
	}
	if grown := after.Disk - before.Disk; grown < written || grown > 2*written {
		t.Errorf("disk grew by %d over a file of %d", grown, written)
	}
	if after.PIDs == 0 {
		t.Error("no processes")
	}
}

func testInfo(t *testing.T, c *ctx) {
	d, ok := driver.As[driver.Describer](c.d)
	if !ok {
		t.Fatal("the driver is no Describer; every driver of this module is")
	}
	info := d.Info()
	if info.Name == "" || info.Isolation == "" || !slices.Contains([]string{"kernel", "namespace", "none"}, info.Boundary) {
		t.Errorf("Info: %+v", info)
	}
}

func testCheck(t *testing.T, c *ctx) {
	d, _ := driver.As[driver.Checker](c.d)
	for _, check := range d.Check(c) {
		if check.Name == "" || check.Message == "" || !slices.Contains([]string{"ok", "warn", "fail"}, check.Status) {
			t.Errorf("check: %+v", check)
		}
		if check.Status != "ok" && check.Hint == "" {
			t.Errorf("%s is %s and has no hint how to mend it", check.Name, check.Status)
		}
	}
}

// wrapper is a driver that adds nothing.
type wrapper struct{ driver.Driver }

func (w wrapper) Unwrap() driver.Driver { return w.Driver }

// Wrap returns a harness whose driver is wrapped, as one that counts calls would be.
func Wrap(h Harness) Harness {
	open := h.New
	h.Name += " wrapped"
	h.New = func(t testing.TB) driver.Driver { return wrapper{open(t)} }
	lacks := map[string]string{}
	for _, tc := range forkCases {
		lacks[tc.name] = "it is about what an image holds, which no wrapper sees"
	}
	maps.Copy(lacks, h.Lacks)
	h.Lacks = lacks
	return h
}

func testUnwrap(t *testing.T, c *ctx) {
	w := wrapper{c.d}
	_, describes := driver.As[driver.Describer](c.d)
	_, watches := driver.As[driver.Watcher](c.d)
	_, measures := driver.As[driver.Statser](c.d)
	_, checks := driver.As[driver.Checker](c.d)
	if _, ok := driver.As[driver.Describer](w); ok != describes {
		t.Error("the wrapper changes Describer")
	}
	if _, ok := driver.As[driver.Watcher](w); ok != watches {
		t.Error("the wrapper changes Watcher")
	}
	if _, ok := driver.As[driver.Statser](w); ok != measures {
		t.Error("the wrapper changes Statser")
	}
	if _, ok := driver.As[driver.Checker](w); ok != checks {
		t.Error("the wrapper changes Checker")
	}
	if _, ok := driver.As[io.Seeker](w); ok {
		t.Error("As finds what is not there")
	}
}
