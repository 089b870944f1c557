package testenv_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// recorder is a testing.TB that remembers instead of ending the test.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                           {}
func (r *recorder) Name() string                      { return "TestX" }
func (r *recorder) Logf(string, ...any)               {}
func (r *recorder) Skip(args ...any)                  { r.skipped = args[0].(string); panic(r) }
func (r *recorder) Fatalf(format string, args ...any) { r.failed = format; panic(r) }

func record(f func(testing.TB)) (r *recorder) {
	r = &recorder{}
	defer func() {
		if p := recover(); p != nil && p != any(r) {
			panic(p)
		}
	}()
	f(r)
	return r
}

func TestSkip(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	t.Setenv("WARREN_SKIP_LOG", log)
	t.Setenv("WARREN_REQUIRE_ALL", "")
	missing := func(tb testing.TB) { testenv.NeedsTool(tb, "no-such-program") }
	if r := record(missing); r.skipped == "" || r.failed != "" {
		t.Errorf("without WARREN_REQUIRE_ALL: skipped %q, failed %q", r.skipped, r.failed)
	}
	t.Setenv("WARREN_REQUIRE_ALL", "1")
	if r := record(missing); r.skipped != "" || r.failed == "" {
		t.Errorf("with WARREN_REQUIRE_ALL: skipped %q, failed %q", r.skipped, r.failed)
	}
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	summary, err := testenv.SkipSummary(f)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(summary, "1 not run: needs the program no-such-program") || !strings.Contains(summary, "testenv.TestX") {
		t.Errorf("summary:\n%s", summary)
	}
}

// Each kind of leftover is planted and must be found, and must not be found once it is gone.
func TestResidue(t *testing.T) {
	dir := t.TempDir()
	before, err := testenv.TakeSnapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	check := func(want string) {
		t.Helper()
		left, err := before.Left()
		if err != nil {
			t.Fatal(err)
		}
		if want == "" && len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		if want != "" && (len(left) != 1 || !strings.HasPrefix(left[0], want)) {
			t.Errorf("left: %q, want one that begins with %q", left, want)
		}
	}
	check("")

	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check("file ")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}

	for _, how := range []func(*exec.Cmd){
		func(c *exec.Cmd) { c.Args[0] = "sleep-" + dir + "/x" },
		func(c *exec.Cmd) { c.Env = []string{"DATA=" + dir} },
		func(c *exec.Cmd) { c.Dir = dir },
	} {
		cmd := exec.Command("sleep", "60")
		how(cmd)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		check("process ")
		cmd.Process.Kill()
		cmd.Wait()
		check("")
	}
	other := exec.Command("sleep", "60")
	other.Env = []string{"DATA=" + dir + "2"}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	check("")
	other.Process.Kill()
	other.Wait()
}

func TestResidueSeesMounts(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	// Taken of a sibling first: a snapshot of the mounted directory would already hold it.
	before, err := testenv.TakeSnapshot(filepath.Join(dir, "sub"))
	if err != nil {
		t.Fatal(err)
	}
	sub := filepath.Join(dir, "sub")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("x", sub, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	left, err := before.Left()
	syscall.Unmount(sub, 0)
	if err != nil || len(left) != 1 || !strings.HasPrefix(left[0], "mount of tmpfs x") {
		t.Errorf("left %q, %v", left, err)
	}
}

// Only the control groups of the directory's own keeper are left behind by it.
func TestResidueKnowsItsControlGroups(t *testing.T) {
	testenv.NeedsRoot(t)
	parent := "/sys/fs/cgroup/pids" // version 1
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		parent = "/sys/fs/cgroup"
	}
	home, other := t.TempDir(), t.TempDir()
	before, err := testenv.TakeSnapshot(home)
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]string{}
	for _, dir := range []string{home, other} {
		state := filepath.Join(dir, "run", "gvisor")
		if err := os.MkdirAll(state, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(state, "keeper.lock"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		var st syscall.Stat_t
		if err := syscall.Stat(state, &st); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(fmt.Appendf(nil, "%d:%d", st.Dev, st.Ino))
		group := filepath.Join(parent, "warren-"+hex.EncodeToString(sum[:4]))
		for _, d := range []string{group, filepath.Join(group, "s1")} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Remove(d) })
		}
		groups[dir] = group
	}
	before.Note()
	if err := os.RemoveAll(filepath.Join(home, "run")); err != nil {
		t.Fatal(err)
	}
	left, err := before.Left()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"cgroup " + groups[home], "cgroup " + groups[home] + "/s1"}
	if !slices.Equal(left, want) {
		t.Errorf("left %q, want %q", left, want)
	}
}

func TestSmallFS(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, 8<<20), 0o600)
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing 8 MiB to 4 MiB: %v, want ENOSPC", err)
	}
	os.Remove(filepath.Join(dir, "big"))
	for i := range 100 {
		if err = os.WriteFile(filepath.Join(dir, strings.Repeat("f", i+1)), nil, 0o600); err != nil {
			break
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("making 100 files where 64 may be: %v, want ENOSPC", err)
	}
}

func TestNamespaces(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsMountNamespace(t)
	testenv.NeedsUserNamespaces(t)
}
