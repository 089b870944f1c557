//go:build linux

package gvisor_test

import (
	"os"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// allocate takes memory as fast as it can.
const allocate = `python3 -c "
l=[]
while True: l.append(bytearray(16<<20))
"`

// TestOutOfMemory lets a program outrun every watcher; it dies, and the sandbox lives.
func TestOutOfMemory(t *testing.T) {
	if _, err := os.Stat("/sys/fs/cgroup/memory/cgroup.event_control"); err != nil {
		testenv.Skip(t, "needs version 1 of the memory controller; with version 2 the kernel ends the sandbox")
	}
	e := newEnv(t)
	spec := e.spec()
	spec.Limits.Memory = 128 << 20
	id := e.create(spec)
	e.run(id, "echo kept >/tmp/file")
	for i := range 3 {
		if out, err := e.tryRun(id, allocate); err == nil {
			t.Errorf("an allocation without end ended well: %s", out)
		} else {
			t.Log(err)
		}
		if got := e.run(id, "cat /tmp/file"); got != "kept" {
			t.Errorf("file has %q", got)
		}
		if i == 0 {
			e.killKeeper() // the next one watches too
			e.run(id, "true")
		}
	}
	if st := e.state1(id); st != driver.Running {
		t.Errorf("state %q", st)
	}
}

// TestOutOfMemoryKilled has a guest that does not free memory: the kernel ends the sandbox, and that is on record.
func TestOutOfMemoryKilled(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	spec.Limits.Memory = 64 << 20
	spec.Env = []string{"TESTGUEST_STUBBORN=1"}
	id := e.create(spec)
	e.tryRun(id, allocate)
	eventually(t, "dead", func() bool { return e.state1(id) == driver.Dead })
	if x := e.status(id).Exit; x.Reason != "oom" || !strings.Contains(x.Message, "limit 64 MiB") {
		t.Errorf("exit %+v", x)
	}
}
