package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// linking is a driver whose images have all packs of those that they are like, and one of their own.
type linking struct {
	*fake.Driver
	packs *int
	likes *[]string
}

func (d linking) SnapshotTransient(ctx context.Context, id warren.SandboxID, dir string, freeze bool, stood func()) (driver.Image, error) {
	if err := d.Freeze(ctx, id); err != nil {
		return driver.Image{}, err
	}
	stood()
	return d.Snapshot(ctx, id, dir, freeze)
}

func (d linking) Seal(ctx context.Context, dir, like string) (driver.Image, error) {
	*d.likes = append(*d.likes, like)
	*d.packs++
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("pack-%d", *d.packs)), make([]byte, 1000+*d.packs), 0o600); err != nil {
		return driver.Image{}, err
	}
	size, _, err := memoryUsage(dir, anywhere)
	if err != nil || like == "" {
		return driver.Image{Size: size}, err
	}
	entries, err := os.ReadDir(like)
	for _, e := range entries {
		if err == nil && strings.HasPrefix(e.Name(), "pack-") {
			err = os.Link(filepath.Join(like, e.Name()), filepath.Join(dir, e.Name()))
		}
	}
	return driver.Image{Size: size}, err
}

// TestSnapshotsShareMemory takes and deletes snapshots whose images have packs in common. Whichever goes, those
// that are left count for what is on the disk, no more and no less, also after a restart; a size that is asked for tells of both.
func TestSnapshotsShareMemory(t *testing.T) {
	packs, likes := 0, []string{}
	r := newRig(t, func(o *Options) {
		o.Drivers = map[string]driver.Driver{"fake": linking{o.Drivers["fake"].(*fake.Driver), &packs, &likes}}
	})
	r.spaces.usage = func(warren.WorkspaceID) (total, shared int64) { return 0, 0 }
	r.create(alice, Spec{Name: "box"})
	none, _ := r.usageNow()
	rnd := rand.New(rand.NewPCG(1, 2))
	paused := false
	var names []string
	check := func(step int) {
		t.Helper()
		want, seen := none["alice"].disk, map[uint64]bool{}
		files, err := filepath.Glob(filepath.Join(r.dir, "snapshots", "*", "memory", "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			fi, err := os.Stat(f)
			if err != nil {
				t.Fatal(err)
			}
			if ino := fi.Sys().(*syscall.Stat_t).Ino; !seen[ino] {
				seen[ino] = true
				want += fi.Size()
			}
		}
		per, total := r.usageNow()
		got := per["alice"].disk
		if paused { // which counts for itself, and not as one that has what a snapshot has
			box, err := r.Get(t.Context(), alice, "box")
			if err != nil || box.ImageSize == 0 {
				t.Fatalf("%+v, %v", box, err)
			}
			want += box.ImageSize
		}
		if got != want || total.disk != want {
			t.Fatalf("after step %d %d bytes count, of all users %d; there are %d", step, got, total.disk, want)
		}
	}
	for step := range 160 {
		switch n := rnd.IntN(10); {
		case n == 8 && !paused:
			if _, err := r.Pause(t.Context(), alice, "box"); err != nil {
				t.Fatal(err)
			}
			paused = true
		case n == 8:
			if _, err := r.Resume(t.Context(), alice, "box"); err != nil {
				t.Fatal(err)
			}
			paused = false
		case n == 9 && paused:
			// One that is linked to what is there already.
			name := fmt.Sprintf("l-%d", step)
			r.snapshotNow("box", name)
			names = append(names, name)
		case !paused && (n < 4 || len(names) == 0):
			name := fmt.Sprintf("p-%d", step)
			p := r.snapshotNow("box", name)
			want := ""
			if p.ParentID != "" {
				want = r.memoryDir(p.ParentID)
			}
			if got := likes[len(likes)-1]; got != want {
				t.Fatalf("step %d: its image is like %q, want %q", step, got, want)
			}
			names = append(names, name)
		case n < 7 && len(names) > 0:
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
	if paused {
		if _, err := r.Resume(t.Context(), alice, "box"); err != nil {
			t.Fatal(err)
		}
	}
	// One of what is paused goes while others have a part of their images in common, of which only one counts for each.
	r.snapshotNow("box", "first")
	r.snapshotNow("box", "second")
	if _, err := r.Pause(t.Context(), alice, "box"); err != nil {
		t.Fatal(err)
	}
	paused = true
	r.snapshotNow("box", "linked")
	check(-1)
	if err := r.DeleteSnapshot(t.Context(), alice, "linked", false); err != nil {
		t.Fatal(err)
	}
	check(-2)
	if _, err := r.Resume(t.Context(), alice, "box"); err != nil {
		t.Fatal(err)
	}
	paused = false
	check(-3)
	one := r.snapshotNow("box", "one")
	two := r.snapshotNow("box", "two")
	got, err := r.GetSnapshot(t.Context(), alice, "two", true)
	if err != nil {
		t.Fatal(err)
	}
	if own := got.MemorySize - got.SharedSize; own != two.MemorySize || got.SharedSize < 1000 {
		t.Errorf("of %d bytes it shares %d; it counted for %d", got.MemorySize, got.SharedSize, two.MemorySize)
	}
	if err := r.DeleteSnapshot(t.Context(), alice, string(one.ID), false); err != nil {
		t.Fatal(err)
	}
	r.create(alice, Spec{Name: "build", Labels: map[string]string{buildLabel: "app"}})
	r.snapshotNow("build", "step-1")
	r.snapshotNow("build", "step-2")
	if got := likes[len(likes)-1]; got != "" {
		t.Errorf("the snapshot of a template's build is like %q", got)
	}
}
