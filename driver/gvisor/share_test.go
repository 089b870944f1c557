//go:build linux

package gvisor_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/warren-sandbox/warren/driver"
)

// TestSnapshotsShare takes snapshots of a sandbox with 64 MiB of memory that cannot be compressed, and of one that was restored from them: together they take
// hardly more than the first. When all others have been deleted, each that is left goes on where it was.
func TestSnapshotsShare(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	id := e.create(spec)
	sum := e.run(id, "head -c 64M /dev/urandom >/dev/shm/heap && sha256sum </dev/shm/heap")
	like := ""
	var dirs []string
	var first, rest int64
	take := func() {
		t.Helper()
		n := len(dirs)
		e.run(id, fmt.Sprintf("echo %d >/dev/shm/state; head -c 1M /dev/urandom >/dev/shm/new%d", n, n))
		dir := filepath.Join(t.TempDir(), "image")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := e.d.SnapshotTransient(t.Context(), id, dir, false, nil); err != nil {
			t.Fatal(err)
		}
		img, err := e.d.Seal(t.Context(), dir, like)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("snapshot %d takes %d KiB", n, img.Size>>10)
		if n == 0 {
			first = img.Size
		} else {
			rest += img.Size
		}
		like, dirs = dir, append(dirs, dir)
	}
	back := func(n int) {
		t.Helper()
		if err := e.d.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Restore(t.Context(), spec, dirs[n]); err != nil {
			t.Fatal(err)
		}
		if got, want := e.run(id, "cat /dev/shm/state; sha256sum </dev/shm/heap"), fmt.Sprintf("%d\n%s", n, sum); got != want {
			t.Errorf("snapshot %d restores %q, want %q", n, got, want)
		}
	}
	take()
	take()
	take()
	back(1)
	like = dirs[1]
	take() // which hangs on the second
	if rest > first/2 {
		t.Errorf("the first snapshot takes %d bytes, and three more %d", first, rest)
	}
	for _, gone := range []int{0, 1} {
		if err := os.RemoveAll(dirs[gone]); err != nil {
			t.Fatal(err)
		}
	}
	e.killKeeper()
	back(3)
	if err := os.RemoveAll(dirs[3]); err != nil {
		t.Fatal(err)
	}
	back(2)
	flip(t, dirs[2]) // in the pack that was the first snapshot's
	if err := e.d.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Restore(t.Context(), spec, dirs[2]); !errors.Is(err, driver.ErrImage) {
		t.Errorf("restore with a flipped byte in a shared pack: %v, want ErrImage", err)
	}
}
