//go:build linux

package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
)

// TestRaceKeepFails has the keeping of the chosen attempt fail in three ways. Each time its child stays with what it has, and the
// others go.
func TestRaceKeepFails(t *testing.T) {
	h := newHome(t)
	// The first snapshot is the fork's; the second is the keep's, and fails.
	h.env = []string{"WARREN_FAILPOINTS=engine.snapshot.written=error:2", "WARREN_BUDGETS_DISK=1536MiB"}
	id := h.warren("create", "--name", "s", "--disk", "256MiB")
	connect := func() *warren.Client {
		t.Helper()
		c, err := warren.Connect(t.Context(), warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	for _, how := range []struct {
		name, says string
		spoil      func(c *warren.Client)
		snapshots  int
	}{
		{"a failure of the snapshot", "injected failure", func(*warren.Client) {}, 0},
		{"a budget used up", "budget of disk per user", func(c *warren.Client) {
			// This is all that is left of it.
			if _, err := c.Create(t.Context(), warren.Spec{Name: "filler", Resources: warren.Resources{Disk: 768 << 20}}); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"a source that is gone", "not found", func(c *warren.Client) {
			if err := c.DeleteSandbox(t.Context(), id, warren.DeleteOptions{DeleteWorkspace: true}); err != nil {
				t.Fatal(err)
			}
		}, 1},
	} {
		c := connect()
		spoiled := func(all []*warren.Attempt) *warren.Attempt {
			how.spoil(c)
			return all[1]
		}
		r, err := c.Ref(id).Race(t.Context(), warren.RaceOptions{
			Name: "try", Commands: [][]string{{"sh", "-c", "echo $WARREN_ATTEMPT > /workspace/mine; echo $WARREN_ATTEMPT > /dev/shm/mine"}}, Count: 2, Choose: spoiled,
		})
		if err == nil || r == nil || r.Kept != nil || !r.Attempts[1].Left || r.Attempts[0].Left {
			t.Fatalf("%s: %+v, %v", how.name, r, err)
		}
		child, stays := r.Attempts[1].Sandbox, err.Error()
		if !strings.Contains(stays, how.says) || !strings.Contains(stays, "its sandbox try-2 ("+string(child.ID)+") stays") {
			t.Errorf("%s: the error is %s", how.name, stays)
		}
		names := strings.Fields(h.warren("ls", "--json"))
		if all := strings.Join(names, ""); strings.Contains(all, `"try-1"`) || !strings.Contains(all, `"try-2"`) {
			t.Errorf("%s: there are %s", how.name, all)
		}
		if got := h.warren("exec", "try-2", "--", "cat", "/workspace/mine", "/dev/shm/mine"); got != "2\n2" {
			t.Errorf("%s: the child that stays holds %q", how.name, got)
		}
		if err := child.Refresh(t.Context()); err != nil || child.Spec.IdleTimeout != 0 || child.Spec.Labels["warren.race"] != "" {
			t.Errorf("%s: the child that stays is %+v, %v", how.name, child, err)
		}
		snaps := strings.Fields(h.warren("snapshot", "ls", "-q"))
		if len(snaps) != how.snapshots {
			t.Errorf("%s: snapshots are left: %v", how.name, snaps)
		}
		if how.snapshots > 0 {
			if !strings.Contains(stays, "stays as snapshot") || !strings.Contains(h.warren("snapshot", "ls"), "race-") {
				t.Errorf("%s: the snapshot cannot be found: %s\n%s", how.name, stays, h.warren("snapshot", "ls"))
			}
			h.warren("snapshot", "rm", snaps[0])
		}
		h.warren("rm", "try-2")
		if how.says == "budget of disk per user" {
			h.warren("rm", "filler")
		}
		if how.says == "injected failure" {
			h.warren("shutdown")
			h.env[0] = "WARREN_FAILPOINTS="
			h.warren("ls")
		}
		c.Close()
	}
}
