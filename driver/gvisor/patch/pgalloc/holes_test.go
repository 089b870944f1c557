//go:build linux

package pgalloc

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHoles compares with what was written: a page that holds something is never said to be missing, and in the memory of a sandbox,
// which is a file without a name, one that was never touched always is.
func TestHoles(t *testing.T) {
	fd, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	disk, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		file  *os.File
		exact bool
	}{{"memory", os.NewFile(uintptr(fd), "memory"), true}, {"disk", disk, false}} {
		t.Run(c.name, func(t *testing.T) {
			defer c.file.Close()
			const pages = 4096
			page := int64(os.Getpagesize())
			if err := c.file.Truncate(pages * page); err != nil {
				t.Fatal(err)
			}
			mem, err := unix.Mmap(int(c.file.Fd()), 0, int(pages*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Munmap(mem)
			held := map[int64]bool{0: true, pages - 1: true}
			for i := int64(1000); i < 1100; i++ {
				held[i] = true
			}
			for range 300 {
				held[rand.Int64N(pages)] = true
			}
			for i := range held {
				mem[i*page+rand.Int64N(page)] = 1
			}
			var h memoryHoles
			missing := 0
			for i := range int64(pages) {
				hole := h.at(c.file, uint64(i*page))
				if hole && held[i] {
					t.Fatalf("page %d is said to be missing", i)
				}
				if hole {
					missing++
				}
			}
			if want := pages - len(held); c.exact && missing != want {
				t.Errorf("%d pages are missing, want %d", missing, want)
			}
			// In any order, and beginning in a hole.
			for range 20 {
				first := rand.Int64N(pages)
				for held[first] {
					first = (first + 1) % pages
				}
				h = memoryHoles{}
				h.at(c.file, uint64(first*page))
				for _, i := range rand.Perm(pages) {
					if hole := h.at(c.file, uint64(int64(i)*page)); hole && held[int64(i)] {
						t.Fatalf("asked out of order, page %d is said to be missing", i)
					}
				}
			}
		})
	}
}

// TestHolesUnknown says that what cannot be asked is there.
func TestHolesUnknown(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	var h memoryHoles
	if h.at(r, 0) || h.at(r, 1<<40) {
		t.Error("a pipe is said to have holes")
	}
}
