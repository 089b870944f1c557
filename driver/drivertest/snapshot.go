package drivertest

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/proto/e2b/process"
)

var snapshotCases = []testCase{
	{name: "snapshot-restore", sentence: "a sandbox goes on from its image under its own id, with a driver opened anew", optional: freezes, run: testSnapshotRestore},
	{name: "snapshot-continues", sentence: "memory, processes, pipes, open files, the root overlay and terminals continue", commands: true, optional: freezes, run: testSnapshotContinues},
	{name: "snapshot-again", sentence: "a restored sandbox can be snapshotted and restored again", optional: freezes, run: testSnapshotAgain},
	{name: "snapshot-runs-on", sentence: "without freeze the sandbox runs on", optional: freezes, run: testSnapshotRunsOn},
	{name: "snapshot-freeze", sentence: "with freeze it stands still until Thaw, which leaves one that runs alone", optional: freezes, run: testSnapshotFreeze},
	{name: "snapshot-refuses", sentence: "a missing, a dead sandbox and a directory that is not empty are refused, and the sandbox runs on", optional: freezes, run: testSnapshotRefuses},
	{name: "snapshot-cancel", sentence: "when ctx ends during a snapshot the sandbox runs on and nothing of the image is left", optional: freezes, run: testSnapshotCancel},
	{name: "snapshot-streams", sentence: "connections into a sandbox outlive its snapshots, also into a restored one and a copy of a copy", commands: true, optional: freezes, run: testSnapshotStreams},
	{name: "snapshot-modes", sentence: "an image is readable by its owner alone, and Size is what its files have", optional: freezes, run: testSnapshotModes},
	{name: "restore-many", sentence: "an image may be restored any number of times, also beside its source", optional: freezes, run: testRestoreMany},
	{name: "restore-exists", sentence: "restoring to an id that exists returns ErrExists and changes nothing", optional: freezes, run: testRestoreExists},
	{name: "restore-damaged", sentence: "one flipped byte anywhere, a file too short, missing or too many is refused, and nothing is left", optional: freezes, run: testRestoreDamaged},
	{name: "restore-open-file", sentence: "without a file that a process has open on a mount the restore fails and nothing is left; with it back it works", commands: true, optional: freezes, run: testRestoreOpenFile},
	{name: "restore-base", sentence: "another root or other mounts than the image relies on are refused, and nothing is left", optional: freezes, run: testRestoreBase},
}

// snapshot writes an image of a sandbox into a new directory.
func (c *ctx) snapshot(id warren.SandboxID, freeze bool) (dir string, img driver.Image) {
	c.t.Helper()
	dir = c.t.TempDir()
	img, err := c.freezer().Snapshot(c, id, dir, freeze)
	if err != nil {
		c.t.Fatalf("Snapshot(%s): %v", id, err)
	}
	return dir, img
}

func (c *ctx) freezer() driver.Snapshotter {
	s, _ := driver.As[driver.Snapshotter](c.d)
	return s
}

func (c *ctx) restore(s *driver.Spec, dir string) {
	c.t.Helper()
	if err := c.freezer().Restore(c, s, dir); err != nil {
		c.t.Fatalf("Restore(%s): %v", s.ID, err)
	}
}

func (c *ctx) delete(id warren.SandboxID) {
	c.t.Helper()
	if err := c.d.Delete(c, id); err != nil {
		c.t.Fatalf("Delete(%s): %v", id, err)
	}
}

func testSnapshotRestore(t *testing.T, c *ctx) {
	spec := c.spec()
	c.createSpec(spec)
	c.answers(c.d, spec.ID)
	dir, _ := c.snapshot(spec.ID, true)
	c.delete(spec.ID)
	c.nothingLeft(spec.ID)
	other := c.h.New(t)
	defer other.Close()
	s, _ := driver.As[driver.Snapshotter](other)
	if err := s.Restore(c, spec, dir); err != nil {
		t.Fatalf("Restore: %v", err)
	}
	c.answers(c.d, spec.ID)
	if s, ok := c.list(c.d, spec.ID); !ok || s.State != driver.Running {
		t.Errorf("List: %+v, %v; want it running", s, ok)
	}
}

// living is a shell whose parts must all go on: a counter in memory, which passes through a pipe to another process, which
// writes it to a file that is open and to one that is deleted; on the mount and in the root overlay.
const living = `
exec 5<>/var/tmp/deleted; rm /var/tmp/deleted; echo kept >&5
exec 6>/mnt/data/open
n=0
while :; do n=$((n+1)); echo $n; sleep 0.01; done | while read x; do echo $x >&6; echo $x >>/var/tmp/count; done &
wait`

func testSnapshotContinues(t *testing.T, c *ctx) {
	data := t.TempDir()
	if err := os.Chown(data, driver.DiskIDBase, driver.DiskIDBase); err != nil {
		t.Fatal(err)
	}
	spec := c.spec(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, data, "/mnt/data", true, driver.Owner{IDBase: driver.DiskIDBase}))
	})
	c.createSpec(spec)
	g := c.guest(spec.ID)
	shell := g.start(c, Command{Args: []string{"/bin/sh", "-c", living}})
	term := g.terminal(c)
	g.typeIn(c, term, "secret=4711; cd /var/tmp\n")
	last := func() int {
		t.Helper()
		n, err := strconv.Atoi(g.Output(c, "tail", "-n", "1", "/var/tmp/count"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for i := 0; g.Run(c, "test", "-s", "/var/tmp/count").Code != 0; i++ {
		if i == 500 {
			shell.cancel()
			r := <-shell.result
			t.Fatalf("the counter does not begin: %+v", r)
		}
		time.Sleep(10 * time.Millisecond)
	}
	boot := g.Output(c, "cat", "/proc/sys/kernel/random/boot_id")
	before := last()
	dir, _ := c.snapshot(spec.ID, true)
	c.delete(spec.ID)
	held, err := os.ReadFile(filepath.Join(data, "open"))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // in which nothing may count

	c.restore(spec, dir)
	g = NewGuest(t, c.d, spec.ID)
	at := last()
	if n := len(strings.Fields(string(held))); at < before || at > n+200 {
		t.Errorf("the counter was %d before, at most %d when it stopped, and is %d", before, n, at)
	}
	for range 500 {
		if last() > at+10 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if now := last(); now <= at+10 {
		t.Errorf("the counter stands still at %d", now)
	}
	if out := g.Output(c, "/bin/sh", "-c", `i=0; while read x; do i=$((i+1)); [ $x = $i ] || echo $x after $i; done </var/tmp/count`); out != "" {
		t.Errorf("the counter has gaps: %s", out)
	}
	after, err := os.ReadFile(filepath.Join(data, "open"))
	if err != nil || len(after) <= len(held) || !strings.HasPrefix(string(after), string(held)) {
		t.Errorf("the file open on the mount has %d bytes, %d before (%v)", len(after), len(held), err)
	}
	if got := g.Output(c, "cat", fmt.Sprintf("/proc/%d/fd/5", shell.pid)); got != "kept" {
		t.Errorf("the deleted file holds %q", got)
	}
	if got := g.Output(c, "cat", "/proc/sys/kernel/random/boot_id"); got != boot {
		t.Logf("boot id %s, before %s", got, boot)
	}
	g.typeIn(c, term, "echo $secret in $PWD >/var/tmp/said\n")
	for range 500 {
		if g.Run(c, "test", "-s", "/var/tmp/said").Code == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got := g.Output(c, "cat", "/var/tmp/said"); got != "4711 in /var/tmp" {
		t.Errorf("the shell on the terminal says %q", got)
	}
	inside, err := strconv.ParseInt(g.Output(c, "date", "+%s"), 10, 64)
	if d := time.Now().Unix() - inside; err != nil || d < -2 || d > 2 {
		t.Errorf("the wall clock inside is %d s behind (%v)", d, err)
	}
}

// terminal starts a shell on a terminal and returns its process id.
func (g *Guest) terminal(ctx context.Context) uint32 {
	g.t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	g.t.Cleanup(cancel)
	req := connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/sh"},
		Pty:     &process.PTY{Size: &process.PTY_Size{Cols: 80, Rows: 24}},
	})
	req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("root:")))
	stream, err := g.client.Start(ctx, req)
	if err != nil || !stream.Receive() || stream.Msg().GetEvent().GetStart() == nil {
		g.t.Fatalf("start a terminal: %v", err)
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	go func() {
		for stream.Receive() {
		}
		stream.Close()
	}()
	return pid
}

// typeIn writes to a terminal.
func (g *Guest) typeIn(ctx context.Context, pid uint32, text string) {
	g.t.Helper()
	req := connect.NewRequest(&process.SendInputRequest{
		Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}},
		Input:   &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte(text)}},
	})
	req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("root:")))
	if _, err := g.client.SendInput(ctx, req); err != nil {
		g.t.Fatalf("type into the terminal: %v", err)
	}
}

func testSnapshotAgain(t *testing.T, c *ctx) {
	spec := c.spec()
	c.createSpec(spec)
	for range 3 {
		c.answers(c.d, spec.ID)
		dir, _ := c.snapshot(spec.ID, true)
		c.delete(spec.ID)
		c.restore(spec, dir)
	}
	c.answers(c.d, spec.ID)
}

func testSnapshotRunsOn(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	c.snapshot(id, false)
	c.answers(c.d, id)
}

// still says whether the guest gives no answer within a moment.
func (c *ctx) still(id warren.SandboxID) bool {
	short, cancel := context.WithTimeout(c, 300*time.Millisecond)
	defer cancel()
	conn, err := c.d.Dial(short, id, warren.GuestPort)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, context.DeadlineExceeded)
}

func testSnapshotFreeze(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	c.snapshot(id, true)
	if !c.still(id) {
		t.Error("the guest of a frozen sandbox answers")
	}
	c.snapshot(id, false) // it stays as it is
	if !c.still(id) {
		t.Error("the guest answers after another snapshot")
	}
	for range 2 {
		if err := c.freezer().Thaw(c, id); err != nil {
			t.Fatalf("Thaw: %v", err)
		}
		c.answers(c.d, id)
	}
	if err := c.freezer().Thaw(c, c.newID()); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Thaw of a missing sandbox: %v, want ErrNotFound", err)
	}
}

func testSnapshotRefuses(t *testing.T, c *ctx) {
	if _, err := c.freezer().Snapshot(c, c.newID(), t.TempDir(), false); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Snapshot of a missing sandbox: %v, want ErrNotFound", err)
	}
	id := c.create()
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.freezer().Snapshot(c, id, full, true); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("Snapshot into a directory that is not empty: %v, want ErrInvalid", err)
	}
	if _, err := os.Stat(filepath.Join(full, "mine")); err != nil {
		t.Error(err)
	}
	c.answers(c.d, id)
	if c.h.Kill == nil && c.h.Processes == nil {
		return
	}
	c.kill(id)
	if _, err := c.freezer().Snapshot(c, id, t.TempDir(), false); !errors.Is(err, warren.ErrState) {
		t.Errorf("Snapshot of a dead sandbox: %v, want ErrState", err)
	}
}

func testSnapshotCancel(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	cut := 0
	for after := time.Duration(0); after < 40*time.Millisecond; after += 5 * time.Millisecond {
		short, cancel := context.WithTimeout(c, after)
		dir := t.TempDir()
		_, err := c.freezer().Snapshot(short, id, dir, true)
		cancel()
		switch left := files(t, dir); {
		case err == nil:
			if err := c.freezer().Thaw(c, id); err != nil {
				t.Fatalf("Thaw: %v", err)
			}
		case !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("cancelled after %v: %v, want DeadlineExceeded", after, err)
		case len(left) > 0:
			t.Errorf("cancelled after %v: left are %v", after, left)
		default:
			cut++
		}
		c.answers(c.d, id)
	}
	if cut == 0 {
		t.Error("no snapshot was cancelled")
	}
}

// testSnapshotStreams follows the output of a process, and keeps a second connection silent, over snapshots of each kind; then
// the same in a sandbox that was restored from one, and in one that was restored from that.
func testSnapshotStreams(t *testing.T, c *ctx) {
	id := c.create()
	g := c.guest(id)
	for _, what := range []string{"a sandbox", "a copy", "a copy of a copy"} {
		p := g.start(c, Command{Args: []string{"/bin/sh", "-c", "n=0; while :; do n=$((n+1)); echo $n; sleep 0.01; done"}})
		next := 0
		// follow reads the numbers up to one; none may be missing.
		follow := func(when string) {
			t.Helper()
			for to := next + 10; next < to; {
				line, err := p.line()
				if err != nil {
					t.Fatalf("%s, %s: the output ends after %d: %v", what, when, next, err)
				}
				if next++; line != strconv.Itoa(next) {
					t.Fatalf("%s, %s: the output says %q instead of %d", what, when, line, next)
				}
			}
		}
		follow("before any snapshot")
		var dir string
		for range 3 {
			// Anew each time, for the guest waits for a request for so long and no longer.
			silent, err := c.d.Dial(c, id, warren.GuestPort)
			if err != nil {
				t.Fatal(err)
			}
			defer silent.Close()
			dir, _ = c.snapshot(id, false)
			follow("after a snapshot")
			c.snapshot(id, true)
			if err := c.freezer().Thaw(c, id); err != nil {
				t.Fatal(err)
			}
			follow("after a snapshot with freeze, and Thaw")
			if _, err := io.WriteString(silent, "GET /health HTTP/1.0\r\n\r\n"); err != nil {
				t.Errorf("%s: a connection that was silent: %v", what, err)
			}
			if answer, err := io.ReadAll(silent); !strings.Contains(string(answer), " 204 ") {
				t.Errorf("%s: a connection that was silent answers %q, %v", what, answer, err)
			}
		}
		s := c.spec()
		c.restore(s, dir)
		follow("after a restore of its image")
		c.delete(id)
		id, g = s.ID, NewGuest(t, c.d, s.ID)
	}
	c.answers(c.d, id)
}

func testSnapshotModes(t *testing.T, c *ctx) {
	dir, img := c.snapshot(c.create(), false)
	var size int64
	for _, f := range files(t, dir) {
		fi, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode() != 0o600 {
			t.Errorf("%s has mode %v", filepath.Base(f), fi.Mode())
		}
		size += fi.Size()
	}
	if size == 0 || img.Size != size {
		t.Errorf("Size is %d, the files have %d", img.Size, size)
	}
}

// files returns the files of a directory.
func files(t testing.TB, dir string) (all []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			all = append(all, p)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func testRestoreMany(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	dir, _ := c.snapshot(id, false)
	for range 2 {
		s := c.spec()
		c.restore(s, dir)
		c.answers(c.d, s.ID)
	}
	c.answers(c.d, id)
}

func testRestoreExists(t *testing.T, c *ctx) {
	spec := c.spec()
	c.createSpec(spec)
	c.answers(c.d, spec.ID)
	dir, _ := c.snapshot(spec.ID, false)
	if err := c.freezer().Restore(c, spec, dir); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Restore: %v, want ErrExists", err)
	}
	c.answers(c.d, spec.ID)
}

func testRestoreDamaged(t *testing.T, c *ctx) {
	source := c.create()
	c.answers(c.d, source)
	dir, _ := c.snapshot(source, false)
	refused := func(what string) {
		t.Helper()
		s := c.spec()
		if err := c.freezer().Restore(c, s, dir); !errors.Is(err, driver.ErrImage) {
			t.Errorf("%s: %v, want ErrImage", what, err)
		}
		if v, ok := driver.As[driver.Verifier](c.d); ok {
			if err := v.Verify(c, s, dir); !errors.Is(err, driver.ErrImage) {
				t.Errorf("%s: Verify: %v, want ErrImage", what, err)
			}
		}
		c.nothingLeft(s.ID)
	}
	for _, f := range files(t, dir) {
		name := filepath.Base(f)
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		put := func(data []byte) {
			if err := os.WriteFile(f, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, at := range []int{0, len(data) / 3, len(data) / 2, len(data) - 1} {
			data[at] ^= 1
			put(data)
			refused(fmt.Sprintf("byte %d of %d of %s is flipped", at, len(data), name))
			data[at] ^= 1
		}
		put(data[:len(data)-1])
		refused(name + " is too short")
		put(append(data[:len(data):len(data)], 0))
		refused(name + " is too long")
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
		refused(name + " is missing")
		put(data)
	}
	more := filepath.Join(dir, "more")
	if err := os.WriteFile(more, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("there is a file too many")
	if err := os.Remove(more); err != nil {
		t.Fatal(err)
	}
	s := c.spec() // whole again, as proof that the damage was the reason
	c.restore(s, dir)
	c.answers(c.d, s.ID)
}

func testRestoreOpenFile(t *testing.T, c *ctx) {
	data := t.TempDir()
	if err := os.Chown(data, driver.DiskIDBase, driver.DiskIDBase); err != nil {
		t.Fatal(err)
	}
	spec := c.spec(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, data, "/mnt/data", true, driver.Owner{IDBase: driver.DiskIDBase}))
	})
	c.createSpec(spec)
	g := c.guest(spec.ID)
	g.start(c, Command{Args: []string{"/bin/sh", "-c", "exec 6>/mnt/data/open; echo ready; while :; do sleep 1; done"}}).line()
	dir, _ := c.snapshot(spec.ID, true)
	c.delete(spec.ID)
	open, aside := filepath.Join(data, "open"), filepath.Join(data, "aside")
	if err := os.Rename(open, aside); err != nil {
		t.Fatal(err)
	}
	if err := c.freezer().Restore(c, spec, dir); err == nil {
		t.Error("a restore without the open file succeeds")
	}
	c.nothingLeft(spec.ID)
	if err := os.Rename(aside, open); err != nil {
		t.Fatal(err)
	}
	c.restore(spec, dir)
	c.answers(c.d, spec.ID)
}

func testRestoreBase(t *testing.T, c *ctx) {
	source := c.create()
	dir, _ := c.snapshot(source, false)
	data := t.TempDir()
	for what, change := range map[string]func(*driver.Spec){
		"another root":  func(s *driver.Spec) { s.Root.Digest = "sha256:other" },
		"another mount": func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, data, "/mnt/x", false, driver.Owner{})) },
	} {
		s := c.spec(change)
		if err := c.freezer().Restore(c, s, dir); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v, want ErrUnsupported", what, err)
		}
		if v, ok := driver.As[driver.Verifier](c.d); ok {
			if err := v.Verify(c, s, dir); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%s: Verify: %v, want ErrUnsupported", what, err)
			}
			same := c.spec()
			same.ID = source
			if err := v.Verify(c, same, dir); err != nil {
				t.Errorf("Verify for the id of the source: %v", err)
			}
		}
		c.nothingLeft(s.ID)
	}
}
