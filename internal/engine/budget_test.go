package engine

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/warren-sandbox/warren"
)

// TestSnapshotsCountOnce takes and deletes snapshots that share files. Whichever goes, those that are left count for what is on the
// disk, no more and no less, also after a restart.
func TestSnapshotsCountOnce(t *testing.T) {
	r := newRig(t, nil)
	has := map[warren.WorkspaceID]map[string]int64{} // the files of each, by name
	now := map[string]int64{"base": 1 << 30}         // those of the sandbox
	there := func(id warren.WorkspaceID) bool {
		_, err := os.Stat(r.spaces.path(id))
		return err == nil
	}
	r.spaces.usage = func(id warren.WorkspaceID) (total, shared int64) {
		if has[id] == nil {
			has[id] = maps.Clone(now)
		}
		for name, size := range has[id] {
			total += size
			for other, files := range has {
				if _, ok := files[name]; ok && other != id && there(other) {
					shared += size
					break
				}
			}
		}
		return total, shared
	}
	r.create(alice, Spec{Name: "box"})
	none, _ := r.usageNow()
	rnd := rand.New(rand.NewPCG(1, 2))
	var names []string
	check := func(step int) {
		t.Helper()
		want, seen := none["alice"].disk, map[string]bool{}
		for id, files := range has {
			for name, size := range files {
				if there(id) && !seen[name] {
					seen[name] = true
					want += size
				}
			}
		}
		r.mu.Lock()
		for _, p := range r.snaps {
			want += p.row.MemorySize
		}
		r.mu.Unlock()
		per, total := r.usageNow()
		if got := per["alice"].disk; got != want || total.disk != want {
			t.Fatalf("after step %d %d bytes count, of all users %d; there are %d", step, got, total.disk, want)
		}
	}
	for step := range 120 {
		switch n := rnd.IntN(8); {
		case n < 3 || len(names) == 0:
			// A few files go, and a few come.
			for name := range now {
				if name != "base" && rnd.IntN(3) == 0 {
					delete(now, name)
				}
			}
			for i := range rnd.IntN(3) {
				now[fmt.Sprintf("file-%d-%d", step, i)] = int64(1 + rnd.IntN(1000))
			}
			name := fmt.Sprintf("p-%d", step)
			r.snapshotNow("box", name)
			names = append(names, name)
		case n < 7:
			i := rnd.IntN(len(names))
			if err := r.DeleteSnapshot(t.Context(), alice, names[i], false); err != nil {
				t.Fatal(err)
			}
			names = append(names[:i], names[i+1:]...)
		default:
			r.stop()
			r.start()
		}
		check(step)
	}
}
