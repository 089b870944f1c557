//go:build linux

// Package pgalloc is compiled as a part of gVisor's package of that name, see the program in the directory above.
package pgalloc

import (
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// memoryHoles says where a file that holds a sandbox's memory has no pages. A checkpoint looks for pages that are zero by reading
// all that was ever allocated, and whatever was never touched is made by being read: for the heap of a Go program, which asks for
// much more than it uses, that takes longer than the rest of the checkpoint. The file must not change while it is asked.
type memoryHoles struct {
	// What is known of the bytes from start to end.
	start, end uint64
	hole       bool
}

// at says whether the page at an offset is not there, and thus zero. What cannot be known is said to be there.
func (h *memoryHoles) at(f *os.File, off uint64) bool {
	if off < h.start || off >= h.end {
		h.look(int(f.Fd()), off)
	}
	return h.hole
}

func (h *memoryHoles) look(fd int, off uint64) {
	h.start, h.end, h.hole = off, math.MaxUint64, false
	data, err := seek(fd, off, unix.SEEK_DATA)
	switch {
	case err == unix.ENXIO: // nothing from here on
		h.hole = true
	case err != nil: // not for this file
	case data > off:
		page := uint64(os.Getpagesize())
		h.end, h.hole = data/page*page, true
		if h.end == off {
			h.end, h.hole = off+page, false
		}
	default:
		if hole, err := seek(fd, off, unix.SEEK_HOLE); err == nil && hole > off {
			h.end = hole
		}
	}
}

func seek(fd int, off uint64, whence int) (uint64, error) {
	for {
		at, err := unix.Seek(fd, int64(off), whence)
		if err != unix.EINTR {
			return uint64(at), err
		}
	}
}
