//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestDiskFullInCheckpoint takes the disk away while the memory of a sandbox is written to it, by a pause, a snapshot and a
// fork, and by a pause whose image is encrypted. Each fails in words, nothing is left of its image, the sandbox runs on with what
// it had in memory, and the same call succeeds once there is room.
func TestDiskFullInCheckpoint(t *testing.T) {
	dir := filepath.Join(testenv.SmallFS(t, 160<<20, 8192), "home")
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	h := newHomeIn(t, dir)
	// A pause first looks whether there is room. Then, when its event is written, it comes to the point at which the test takes it.
	h.env = []string{"WARREN_LOW_DISK=1KiB", "WARREN_FAILPOINTS=engine.pause.intent=sleep:300ms"}
	id := h.warren("create", "--name", "s")
	h.warren("exec", "-d", "s", "--", "sh", "-c", `i=0; while :; do i=$((i+1)); echo $i >/dev/shm/new; mv /dev/shm/new /dev/shm/count; sleep 0.01; done`)
	h.warren("exec", "s", "--", "sh", "-c", "head -c 24000000 /dev/urandom >/dev/shm/held")
	// What has to be the same, and what has to go on.
	look := func() (held string, count int) {
		t.Helper()
		out := h.warren("exec", "s", "--", "sh", "-c", "pgrep -f shm/new | head -n 1; sha256sum </dev/shm/held; cat /dev/shm/count")
		held, last, _ := strings.Cut(out, "-\n")
		count, err := strconv.Atoi(last)
		if err != nil {
			t.Fatalf("it shows %q", out)
		}
		return held, count
	}
	held, last := look()
	url := "unix://" + filepath.Join(dir, "warren.sock")
	c, err := warren.Connect(t.Context(), warren.Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Sandbox(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	goesOn := func(what string) {
		t.Helper()
		is, count := look()
		if is != held {
			t.Errorf("%s: its process and what it holds in memory are %q, were %q", what, is, held)
		}
		if count <= last {
			t.Errorf("%s: its process counts %d, had counted %d", what, count, last)
		}
		last = count
	}
	filler := filepath.Join(filepath.Dir(dir), "filler")
	// fill leaves room for the records and for a part of an image.
	fill := func() {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(filler)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-8<<20); err != nil {
			t.Fatal(err)
		}
	}
	pauses := func() int { return strings.Count(h.warren("events", "s"), " sandbox.pause ") }
	pause := func() error { return sb.Pause(t.Context()) }
	resume := func() { h.warren("resume", "s") }
	for _, op := range []struct {
		what string
		do   func() error
		// undo is after do has succeeded.
		undo func()
	}{
		{"pause", pause, resume},
		{"snapshot", func() error {
			_, err := sb.Snapshot(t.Context(), warren.SnapshotOptions{Name: "p"})
			return err
		}, func() { h.warren("snapshot", "rm", "p") }},
		{"fork", func() error {
			_, err := sb.Fork(t.Context(), warren.ForkOptions{Name: "child", All: true})
			return err
		}, func() { h.warren("rm", "child") }},
		{"encrypted pause", pause, resume},
	} {
		if op.what == "encrypted pause" {
			h.warren("shutdown")
			key := filepath.Join(t.TempDir(), "key")
			if err := os.WriteFile(key, []byte(strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			h.env = append(h.env, "WARREN_SNAPSHOTS_KEY="+key)
		}
		paused := pauses()
		var failed error
		if strings.HasSuffix(op.what, "pause") {
			done := make(chan error, 1)
			go func() { done <- op.do() }()
			for deadline := time.Now().Add(20 * time.Second); pauses() == paused; {
				if time.Now().After(deadline) {
					t.Fatalf("the pause never begins: %v", <-done)
				}
			}
			fill()
			failed = <-done
		} else {
			fill()
			failed = op.do()
		}
		t.Logf("%s: %v", op.what, failed)
		if !errors.Is(failed, warren.ErrExhausted) || !strings.Contains(failed.Error(), "the disk of this server is full, and the image of the sandbox does not fit") {
			t.Errorf("%s on a full disk: %v, want ErrExhausted", op.what, failed)
		}
		if now, err := c.Sandbox(t.Context(), id); err != nil || now.State != warren.StateRunning {
			t.Errorf("%s: it is then %+v, %v", op.what, now, err)
		}
		if left := append(h.entries("paused"), h.entries("snapshots")...); len(left) > 0 {
			t.Errorf("%s: left of the image: %v", op.what, left)
		}
		if left := h.visible("workspaces"); len(left) != 1 {
			t.Errorf("%s: the workspaces %v are there", op.what, left)
		}
		goesOn(op.what + " that failed")
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		if err := op.do(); err != nil {
			t.Fatalf("%s with room: %v", op.what, err)
		}
		op.undo()
		goesOn(op.what + " with room")
	}
}
