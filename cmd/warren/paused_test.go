//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// onDisk adds up the blocks that the files below a directory take.
func onDisk(t *testing.T, dir string) (bytes int64) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		bytes += st.Blocks * 512
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return bytes
}

// TestPausedFleet lets sandboxes idle until all are paused, and looks what they take then: no process, and disk. A new daemon and a
// new keeper find them, and a command resumes each with what it had in memory. WARREN_PAUSED says how many; there are 200 with
// WARREN_SOAK.
func TestPausedFleet(t *testing.T) {
	n := testenv.Count(t, "WARREN_PAUSED", 4, 200)
	h := newHome(t)
	h.warren("ls")
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute+time.Duration(n)*5*time.Second)
	defer cancel()
	connect := func() *warren.Client {
		c, err := warren.Connect(ctx, warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	c := connect()
	each := func(what string, fn func(i int) error) {
		t.Helper()
		began := time.Now()
		next := make(chan int)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for i := range next {
					if err := fn(i); err != nil {
						t.Errorf("%s %d: %v", what, i, err)
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
		t.Logf("%s: %.0f ms each", what, float64(time.Since(began).Milliseconds())/float64(n))
		if t.Failed() {
			t.FailNow()
		}
	}
	boxes := make([]*warren.Sandbox, n)
	before := onDisk(t, h.dir)
	each("create", func(i int) (err error) {
		if boxes[i], err = c.Create(ctx, warren.Spec{IdleTimeout: 2 * time.Second}); err != nil {
			return err
		}
		// A process that keeps something in memory alone.
		cmd := boxes[i].Command("sh", "-c", `mine=$0; until [ -e go ]; do sleep 1; done; echo $mine`, fmt.Sprint(i))
		cmd.Tag = "keeps"
		if err := cmd.Start(ctx); err != nil {
			return err
		}
		cmd.Detach()
		return nil
	})
	allPaused := func() {
		t.Helper()
		for {
			paused := 0
			for _, err := range c.Sandboxes(ctx, warren.ListOptions{States: []warren.SandboxState{warren.StatePaused}, PageSize: 1000}) {
				if err != nil {
					t.Fatal(err)
				}
				paused++
			}
			if paused == n {
				return
			}
			select {
			case <-ctx.Done():
				t.Fatalf("%d of %d are paused", paused, n)
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
	began := time.Now()
	allPaused()
	t.Logf("all %d paused %v after the last create", n, time.Since(began).Round(time.Millisecond))
	// Paused is true a moment before the last process has ended.
	for range 100 {
		left := 0
		for _, sb := range boxes {
			left += len(h.sentries(string(sb.ID)))
		}
		if left == 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, sb := range boxes {
		if p := h.sentries(string(sb.ID)); len(p) != 0 {
			t.Errorf("sandbox %s has processes: %v", sb.ID, p)
		}
	}
	images, all := onDisk(t, filepath.Join(h.dir, "paused")), onDisk(t, h.dir)-onDisk(t, filepath.Join(h.dir, "workspaces"))
	t.Logf("%d paused sandboxes: no process, so no memory; %.2f MiB of disk each, of the whole data directory but its workspaces %.2f", n, float64(images)/float64(n)/(1<<20), float64(all-before)/float64(n)/(1<<20))
	if most := int64(n) * 2 << 20; images > most {
		t.Errorf("%d bytes for the memory of %d sandboxes, more than 2 MiB each", images, n)
	}

	// As after a boot: nothing of the daemon or the keeper is there.
	for _, pid := range []int{h.daemon(), h.keeper()} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	h.warren("ls")
	c = connect()
	allPaused()
	each("resume by a command", func(i int) error {
		sb := c.Ref(string(boxes[i].ID))
		if err := sb.FS().WriteFile("workspace/go", nil, 0); err != nil {
			return err
		}
		var out bytes.Buffer
		cmd, err := sb.Attach(ctx, warren.AttachOptions{Tag: "keeps", Stdout: &out})
		if err != nil {
			return err
		}
		if err := cmd.Wait(); err != nil {
			return err
		}
		if out.String() != fmt.Sprintln(i) {
			return fmt.Errorf("it says %q", out.String())
		}
		return nil
	})
	each("delete", func(i int) error { return c.DeleteSandbox(ctx, string(boxes[i].ID), warren.DeleteOptions{}) })
	if left := h.entries("paused"); len(left) != 0 {
		t.Errorf("images left: %v", left)
	}
}
