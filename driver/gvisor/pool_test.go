//go:build linux

package gvisor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// ready waits until the pool has n executions.
func (e *env) ready(n int) {
	e.t.Helper()
	for range 1000 {
		got, err := e.d.Pooled(context.Background())
		if err != nil {
			e.t.Fatal(err)
		}
		if got == n {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	e.t.Fatalf("the pool never has %d executions", n)
}

// mounted is a spec with the directories of names on targets of those names.
func (e *env) mounted(dir string, names ...string) *driver.Spec {
	e.t.Helper()
	s := e.spec()
	for _, n := range names {
		at := filepath.Join(dir, n)
		if err := os.MkdirAll(at, 0o755); err != nil {
			e.t.Fatal(err)
		}
		if err := os.Chown(at, driver.DiskIDBase, driver.DiskIDBase); err != nil {
			e.t.Fatal(err)
		}
		s.Mounts = append(s.Mounts, driver.Mount{Source: at, Target: "/" + n, Writable: n != "mirror", Owner: driver.Owner{IDBase: driver.DiskIDBase}})
	}
	return s
}

// TestPool restores copies into executions of the pool: each has its own directories, mounted as they should be.
func TestPool(t *testing.T) {
	e := newEnv(t)
	names := []string{"workspace", "home/user", "mirror"}
	source := e.mounted(t.TempDir(), names...)
	id := e.create(source)
	e.run(id, "echo mine >/workspace/file; echo kept >/var/file; echo of the source >/home/user/own")
	image := t.TempDir()
	if _, err := e.d.Snapshot(t.Context(), id, image, false); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Warm(t.Context(), source, 2); err != nil {
		t.Fatal(err)
	}
	e.ready(2)
	list, err := e.d.List(t.Context())
	if err != nil || len(list) != 1 {
		t.Errorf("List shows %+v, %v", list, err)
	}
	for n := range 4 {
		dir := t.TempDir()
		s := e.mounted(dir, names...)
		if err := os.WriteFile(filepath.Join(dir, "mirror", "read"), []byte("mirror\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Restore(t.Context(), s, image); err != nil {
			t.Fatal(err)
		}
		got := e.run(s.ID, "cat /var/file /mirror/read /etc/hostname; uname -n; ls /workspace; echo copied >/workspace/new; stat -c %u /workspace; ! touch /mirror/no 2>/dev/null && echo refused")
		if want := "kept\nmirror\nbox\nbox\n0\nrefused"; got != want {
			t.Errorf("copy %d says %q, want %q", n, got, want)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "workspace", "new")); string(b) != "copied\n" {
			t.Errorf("on the host the copy's file has %q, %v", b, err)
		}
		fi, err := os.Stat(filepath.Join(dir, "workspace", "new"))
		if err == nil && ownerOf(fi) != driver.DiskIDBase {
			t.Errorf("it belongs to %d", ownerOf(fi))
		}
		if n == 1 {
			// As any other sandbox: it stands still, is found by the next keeper, and is copied in turn.
			if err := e.d.Freeze(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			if err := e.d.Thaw(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			if _, err := e.d.Snapshot(t.Context(), s.ID, t.TempDir(), false); err != nil {
				t.Fatal(err)
			}
			e.run(s.ID, "true")
		}
		if n > 1 {
			if err := e.d.Delete(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The first create came before the pool; what is refilled in time is not for this test to say.
	if hits, misses := e.d.PoolUse(); hits < 2 || misses < 1 || hits+misses != 5 {
		t.Errorf("%d starts from the pool and %d others, of 5", hits, misses)
	}
	used := func() int {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(e.state, "keeper.log"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "pool=true")
	}
	if used() < 2 {
		t.Error("the pool was not used")
	}
	// A copy with another name takes one too; its guest would be told the name, which this one does not understand.
	e.ready(2)
	before := used()
	other := e.mounted(t.TempDir(), names...)
	other.Hostname = "copy"
	if err := os.WriteFile(filepath.Join(other.Mounts[2].Source, "read"), []byte("mirror\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Restore(t.Context(), other, image); err != nil {
		t.Fatal(err)
	}
	if got := e.run(other.ID, "cat /etc/hostname; uname -n"); got != "copy\nbox" || used() != before+1 {
		t.Errorf("a copy with a name of its own says %q; %d were taken from the pool", got, used()-before)
	}
	if err := e.d.Delete(t.Context(), other.ID); err != nil {
		t.Fatal(err)
	}
	e.ready(2)

	// A cold start into one, with directories of its own.
	dir := t.TempDir()
	fresh := e.mounted(dir, names...)
	e.create(fresh)
	if got := e.run(fresh.ID, "cat /etc/hostname; uname -n; ls /workspace /var/file 2>/dev/null; echo new >/workspace/file; cat /proc/self/status | grep CapEff"); !strings.HasPrefix(got, "box\nbox\n/workspace:\nCapEff") {
		t.Errorf("a fresh sandbox says %q", got)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "workspace", "file")); string(b) != "new\n" {
		t.Errorf("on the host its file has %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(e.state, "keeper.log")); err != nil || !strings.Contains(string(b), "sandbox="+string(fresh.ID)) || strings.Count(string(b), "pool=true") < 3 {
		t.Errorf("the pool was not used for a cold start (%v)", err)
	}
	if err := e.d.Delete(t.Context(), fresh.ID); err != nil {
		t.Fatal(err)
	}
	e.ready(2)

	// One that does not fit, since its memory is another.
	s := e.mounted(t.TempDir(), names...)
	s.Limits.Memory *= 2
	if err := e.d.Restore(t.Context(), s, image); err != nil {
		t.Fatal(err)
	}
	e.run(s.ID, "true")
	e.ready(2)

	// A damaged image leaves nothing, also of the execution that it would have had.
	f := filepath.Join(image, "pages.img")
	b, err := os.ReadFile(f)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(f, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Restore(t.Context(), e.mounted(t.TempDir(), names...), image); !errors.Is(err, driver.ErrImage) {
		t.Errorf("a damaged image: %v", err)
	}

	e.killKeeper()
	for _, s := range list {
		e.run(s.ID, "true")
	}
	all, err := e.d.List(t.Context())
	if err != nil || len(all) != 4 {
		t.Errorf("after a keeper was killed there are %+v, %v", all, err)
	}
	for _, s := range all {
		e.run(s.ID, "true")
		if s.State != driver.Running {
			t.Errorf("%+v", s)
		}
	}
	e.ready(0) // they went with it
	if err := e.d.Warm(t.Context(), source, 1); err != nil {
		t.Fatal(err)
	}
	e.ready(1)
	if err := e.d.Warm(t.Context(), source, 0); err != nil {
		t.Fatal(err)
	}
	e.ready(0)
	if err := e.d.Warm(t.Context(), source, 1); err != nil {
		t.Fatal(err)
	}
	e.ready(1) // is gone at the end, see checkResidue
}

// TestPoolDeath ends an execution of the pool: the next start does without it.
func TestPoolDeath(t *testing.T) {
	e := newEnv(t)
	if err := e.d.Warm(t.Context(), e.spec(), 1); err != nil {
		t.Fatal(err)
	}
	e.ready(1)
	pids := e.processes("pool-", "runsc-sandbox")
	for _, pid := range pids {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.Contains(string(b), instance(t, e.state)) {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(pids) == 0 {
		t.Fatal("the pool has no processes")
	}
	time.Sleep(100 * time.Millisecond)
	id := e.create(e.spec())
	e.run(id, "true")
	e.ready(1) // it makes another
	e.run(e.create(e.spec()), "true")
}

// TestPoolRefuses asks for what cannot be kept.
func TestPoolRefuses(t *testing.T) {
	e := newEnv(t)
	if err := e.d.Warm(t.Context(), e.spec(), 1000); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a thousand: %v", err)
	}
	nested := e.mounted(t.TempDir(), "workspace", "workspace/inner")
	if err := e.d.Warm(t.Context(), nested, 1); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a mount in a mount: %v", err)
	}
	e.ready(0)
}

func ownerOf(fi os.FileInfo) uint32 { return fi.Sys().(*syscall.Stat_t).Uid }
