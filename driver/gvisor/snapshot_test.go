//go:build linux

package gvisor_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
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

// TestChannelComesBack restores a sandbox whose keeper had been killed, so that its guest had seen both of its descriptors to
// the host end: they carry its channel again, and a snapshot does not end what goes over that.
func TestChannelComesBack(t *testing.T) {
	e := newGuestEnv(t)
	spec := e.spec()
	id := e.create(spec)
	e.do(id, "GET", "/health", "", 204)
	e.killKeeper()
	e.do(id, "GET", "/health", "", 204)
	dir := t.TempDir()
	if _, err := e.d.Snapshot(t.Context(), id, dir, true); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Restore(t.Context(), spec, dir); err != nil {
		t.Fatal(err)
	}
	silent, err := e.d.Dial(t.Context(), id, warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if _, err := e.d.Snapshot(t.Context(), id, t.TempDir(), false); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(silent, "GET /health HTTP/1.0\r\n\r\n"); err != nil {
		t.Error(err)
	}
	if answer, err := io.ReadAll(silent); !strings.Contains(string(answer), " 204 ") {
		t.Errorf("after a snapshot of the restored sandbox: %q, %v", answer, err)
	}
}

// TestTransient copies a sandbox by an image that need not last, and refuses that image when its keeper has gone, unless it was
// sealed before; then no byte of it may change.
func TestTransient(t *testing.T) {
	e := newEnv(t)
	id := e.create(e.spec())
	e.run(id, "echo kept >/var/file")
	dir := t.TempDir()
	stood := 0
	img, err := e.d.SnapshotTransient(t.Context(), id, dir, true, func() {
		stood++
		// Nothing runs while the image is yet to be written.
		if names, err := os.ReadDir(dir); err == nil && slices.ContainsFunc(names, func(f os.DirEntry) bool { return f.Name() == "image.json" }) {
			t.Errorf("it stands still when its image is whole: %v", names)
		}
	})
	if err != nil || img.Size == 0 || stood != 1 {
		t.Fatalf("%+v, stood still %d times, %v", img, stood, err)
	}
	if err := e.d.Thaw(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s := e.spec()
		if err := e.d.Restore(t.Context(), s, dir); err != nil {
			t.Fatal(err)
		}
		if got := e.run(s.ID, "cat /var/file"); got != "kept" {
			t.Errorf("the copy has %q", got)
		}
	}
	sealed := t.TempDir()
	if _, err := e.d.SnapshotTransient(t.Context(), id, sealed, false, nil); err != nil {
		t.Fatal(err)
	}
	if img, err := e.d.Seal(t.Context(), sealed, ""); err != nil || img.Size == 0 {
		t.Fatalf("%+v, %v", img, err)
	}
	if _, err := e.d.Seal(t.Context(), sealed, ""); !errors.Is(err, driver.ErrImage) {
		t.Errorf("sealed again: %v, want ErrImage", err)
	}
	e.run(id, "true")
	e.killKeeper()
	e.run(id, "true") // with the next one
	late := e.spec()
	if err := e.d.Restore(t.Context(), late, sealed); err != nil {
		t.Fatal(err)
	}
	if got := e.run(late.ID, "cat /var/file"); got != "kept" {
		t.Errorf("of the sealed image the copy has %q", got)
	}
	flip(t, sealed)
	if err := e.d.Restore(t.Context(), e.spec(), sealed); !errors.Is(err, driver.ErrImage) {
		t.Errorf("damaged after it was sealed: %v, want ErrImage", err)
	}
	if _, err := e.d.Seal(t.Context(), dir, ""); !errors.Is(err, driver.ErrImage) {
		t.Errorf("seal the image of a keeper that has gone: %v, want ErrImage", err)
	}
	s := e.spec()
	if err := e.d.Restore(t.Context(), s, dir); !errors.Is(err, driver.ErrImage) {
		t.Errorf("with the next keeper: %v, want ErrImage", err)
	}
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
		if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "disk") {
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

// TestThawUnsure lets a sandbox go on of which nobody knows whether it stands still, since its keeper was killed just then, and whose guest does
// not answer though it runs.
func TestThawUnsure(t *testing.T) {
	e := newGuestEnv(t)
	id := e.create(e.spec())
	dir := filepath.Join(e.state, "sandboxes", string(id))
	meta := filepath.Join(dir, "meta.json")
	was, err := os.ReadFile(meta)
	if err != nil {
		t.Fatal(err)
	}
	// The guest answers those who know its token.
	wrong := regexp.MustCompile(`"token":"[^"]+"`).ReplaceAll(was, []byte(`"token":"wrong"`))
	if bytes.Equal(wrong, was) {
		t.Fatalf("no token in %s", was)
	}
	write := func(name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.killKeeper()
	write(meta, wrong)
	write(filepath.Join(dir, "frozen.changing"), nil)
	if err := e.d.Thaw(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	e.killKeeper()
	write(meta, was)
	e.do(id, "GET", "/health", "", 204)
}

// flip changes one bit in the largest file of an image.
func flip(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	largest := slices.MaxFunc(entries, func(a, b os.DirEntry) int {
		x, _ := a.Info()
		y, _ := b.Info()
		return cmp.Compare(x.Size(), y.Size())
	})
	f, err := os.OpenFile(filepath.Join(dir, largest.Name()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], 1000); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b[:], 1000); err != nil {
		t.Fatal(err)
	}
}
