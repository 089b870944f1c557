//go:build linux

package gvisor_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// newGuestEnv is newEnv with the real guest.
func newGuestEnv(t *testing.T) *env {
	e := newEnv(t)
	if err := e.d.Close(); err != nil {
		t.Fatal(err)
	}
	e.opts.GuestPath = testenv.NeedsBinary(t, "warren-guest")
	e.open()
	return e
}

// TestSnapshotAfterKeepers takes an image of a restored sandbox, each time with a keeper that found it.
func TestSnapshotAfterKeepers(t *testing.T) {
	e := newGuestEnv(t)
	spec := e.spec()
	id := e.create(spec)
	for range 3 {
		e.do(id, "GET", "/health", "", 204)
		e.killKeeper()
		e.do(id, "GET", "/health", "", 204) // the next keeper has it
		dir := t.TempDir()
		img, err := e.d.Snapshot(t.Context(), id, dir, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("image of %d KiB", img.Size>>10)
		e.killKeeper() // while it stands still
		if err := e.d.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Restore(t.Context(), spec, dir); err != nil {
			t.Fatal(err)
		}
	}
	e.do(id, "GET", "/health", "", 204)
}

// TestKeeperKilledFrozen thaws, with a new keeper, a sandbox that stood still under the last one.
func TestKeeperKilledFrozen(t *testing.T) {
	e := newGuestEnv(t)
	id := e.create(e.spec())
	e.do(id, "GET", "/health", "", 204)
	if _, err := e.d.Snapshot(t.Context(), id, t.TempDir(), true); err != nil {
		t.Fatal(err)
	}
	e.killKeeper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if c, err := e.d.Dial(ctx, id, warren.GuestPort); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial of a frozen sandbox: %v, %v", c, err)
	}
	if err := e.d.Thaw(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	e.do(id, "GET", "/health", "", 204)
}

// TestSnapshotDiskFull fails to write an image; the sandbox runs on and nothing is left of the image.
func TestSnapshotDiskFull(t *testing.T) {
	e := newGuestEnv(t)
	id := e.create(e.spec())
	e.do(id, "GET", "/health", "", 204)
	dir := t.TempDir()
	if err := unix.Mount("warren-test", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The keeper may have the directory open for a moment after its answer.
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, freeze := range []bool{true, false} {
		_, err := e.d.Snapshot(t.Context(), id, dir, freeze)
		if err == nil || !strings.Contains(err.Error(), "disk") {
			t.Errorf("snapshot onto a full disk: %v", err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left of the image: %v, %v", left, err)
		}
		e.do(id, "GET", "/health", "", 204)
	}
	image := filepath.Join(t.TempDir(), "image")
	if err := os.Mkdir(image, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := e.d.Snapshot(t.Context(), id, image, false); err != nil {
		t.Errorf("snapshot after two that failed: %v", err)
	}
}

// TestKeeperKilledInSnapshot kills the keeper at different moments of a snapshot: the sandbox runs on, and there is a
// whole image or none.
func TestKeeperKilledInSnapshot(t *testing.T) {
	e := newGuestEnv(t)
	spec := e.spec()
	id := e.create(spec)
	whole := 0
	for after := time.Duration(0); after < 60*time.Millisecond; after += 6 * time.Millisecond {
		e.do(id, "GET", "/health", "", 204)
		dir := t.TempDir()
		done := make(chan error, 1)
		go func() {
			_, err := e.d.Snapshot(t.Context(), id, dir, false)
			done <- err
		}()
		time.Sleep(after)
		e.killKeeper()
		err := <-done
		left, rerr := os.ReadDir(dir)
		switch {
		case rerr != nil:
			t.Error(rerr)
		case err == nil:
			whole++
			if len(left) == 0 {
				t.Errorf("killed after %v: no image, and no error", after)
			}
		case len(left) > 0:
			t.Errorf("killed after %v: %v, and left are %v", after, err, left)
		}
		e.do(id, "GET", "/health", "", 204)
	}
	t.Logf("%d of 10 snapshots were whole", whole)
	if _, err := e.d.Snapshot(t.Context(), id, t.TempDir(), false); err != nil {
		t.Errorf("snapshot after all of that: %v", err)
	}
}
