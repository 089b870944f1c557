//go:build linux

package boot

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
)

func temp(t *testing.T, name string, content []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// TestCopier copies pages to scattered places of two files, one of which its owner closes meanwhile, and one too many.
func TestCopier(t *testing.T) {
	const page, pages = 4096, 1000
	pagesOf := make([]byte, pages*page)
	for i := range pagesOf {
		pagesOf[i] = byte(rand.Uint32())
	}
	from := temp(t, "pages", pagesOf)
	fd, err := unix.Dup(int(from.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	c := newCopier(int32(fd))
	if !c.NeedRegisterDestinationFD() {
		t.Error("it is not told where to write")
	}
	const size = 4 * pages * page
	files, want := make([]*os.File, 2), make([][]byte, 2)
	into := make([]stateio.DestinationFile, 2)
	for i := range files {
		files[i], want[i] = temp(t, "memory", nil), make([]byte, size)
		if err := files[i].Truncate(size); err != nil {
			t.Fatal(err)
		}
		if into[i], err = c.RegisterDestinationFD(int32(files[i].Fd()), size, nil); err != nil {
			t.Fatal(err)
		}
	}
	path := files[1].Name()
	if err := files[1].Close(); err != nil {
		t.Fatal(err)
	}

	// Ranges of 1 to 40 pages with gaps, in jobs of up to 64 pages.
	var off int64
	at, expect := []uint64{0, 0}, map[int]uint64{}
	for off < pages*page {
		if len(expect) == c.MaxParallel() {
			t.Fatal("the jobs are too small")
		}
		which := rand.IntN(2)
		var frs []memmap.FileRange
		total := uint64(0)
		for total < copyBytes && off+int64(total) < pages*page && len(frs) < c.MaxRanges() {
			n := min(uint64(1+rand.IntN(40))*page, copyBytes-total, uint64(pages*page-off)-total)
			at[which] += uint64(rand.IntN(3)) * page
			fr := memmap.FileRange{Start: at[which], End: at[which] + n}
			copy(want[which][fr.Start:fr.End], pagesOf[uint64(off)+total:])
			at[which], total, frs = fr.End, total+n, append(frs, fr)
		}
		id := len(expect)
		expect[id] = total
		if len(frs) == 1 {
			c.AddRead(id, off, into[which], frs[0], nil)
		} else {
			c.AddReadv(id, off, total, into[which], frs, nil)
		}
		off += int64(total)
	}
	for len(expect) > 0 {
		done, err := c.Wait(nil, 1)
		if err != nil || len(done) == 0 {
			t.Fatal(done, err)
		}
		for _, d := range done {
			if d.Err != nil || d.N != expect[d.ID] || d.N == 0 {
				t.Fatalf("job %d: %d bytes of %d, %v", d.ID, d.N, expect[d.ID], d.Err)
			}
			delete(expect, d.ID)
		}
	}
	for i, name := range []string{files[0].Name(), path} {
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want[i]) {
			t.Errorf("file %d holds something else", i)
		}
	}

	// The image ends early: what is missing is an error, and so is a file that cannot be written.
	c.AddReadv(5, (pages-2)*page, 3*page, into[0], []memmap.FileRange{{Start: 0, End: page}, {Start: 2 * page, End: 4 * page}}, nil)
	done, err := c.Wait(nil, 1)
	if err != nil || len(done) != 1 || done[0].ID != 5 || done[0].N != 2*page || !errors.Is(done[0].Err, io.EOF) {
		t.Errorf("past the end: %+v, %v", done, err)
	}
	readOnly, err := os.Open(files[0].Name())
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	bad, err := c.RegisterDestinationFD(int32(readOnly.Fd()), size, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.AddRead(6, 0, bad, memmap.FileRange{Start: 0, End: page}, nil)
	if done, err = c.Wait(nil, 1); err != nil || len(done) != 1 || done[0].N != 0 || !errors.Is(done[0].Err, unix.EBADF) {
		t.Errorf("a file that cannot be written: %+v, %v", done, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := unix.FcntlInt(uintptr(into[0].(int)), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("a descriptor is left open: %v", err)
	}
}

// TestCopierMaps copies much while somebody else writes all the time: what is little waits, and all else goes into the mapping.
func TestCopierMaps(t *testing.T) {
	const little, size = copyLittle, copyLittle + 4<<20 + 4096
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(rand.Uint32())
	}
	from, to := temp(t, "pages", content), temp(t, "memory", nil)
	if err := to.Truncate(size); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(to.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	fd, err := unix.Dup(int(from.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	c := newCopier(int32(fd)).(*copier)
	defer c.Close()
	into, err := c.RegisterDestinationFD(int32(to.Fd()), size, nil)
	if err != nil {
		t.Fatal(err)
	}
	copied := func(id int, want int) {
		t.Helper()
		done, err := c.Wait(nil, 1)
		if err != nil || len(done) != 1 || done[0].ID != id || done[0].N != uint64(want) || done[0].Err != nil {
			t.Fatalf("job %d: %+v, %v", id, done, err)
		}
	}
	image := bytes.Clone(content)
	// turn has b begin where it was cut: as it is to lie in memory.
	turn := func(b []byte, cut int) { copy(b, slices.Concat(b[cut:], b[:cut])) }
	c.writing.Lock()
	// Whole, and in two pieces that lie the other way round.
	for at, id := little, 0; at < size; id++ {
		n := min(copyBytes, size-at)
		fr := memmap.FileRange{Start: uint64(at), End: uint64(at + n)}
		if n < 8192 || id%2 == 0 {
			c.AddRead(id, int64(at), into, fr, mem[at:at+n])
		} else {
			frs := []memmap.FileRange{{Start: fr.Start + 4096, End: fr.End}, {Start: fr.Start, End: fr.Start + 4096}}
			v := make([]unix.Iovec, 2)
			for i, r := range frs {
				v[i].Base = &mem[r.Start]
				v[i].SetLen(int(r.Length()))
			}
			c.AddReadv(id, int64(at), uint64(n), into, frs, v)
			turn(content[at:at+n], n-4096)
		}
		copied(id, n)
		at += n
	}
	c.AddRead(1, 0, into, memmap.FileRange{Start: 0, End: copyBytes}, mem[:copyBytes])
	time.Sleep(20 * time.Millisecond)
	if mem[0] != 0 || mem[1] != 0 || mem[2] != 0 || mem[3] != 0 {
		t.Error("a little was not written in its turn")
	}
	c.writing.Unlock()
	copied(1, copyBytes)
	if !bytes.Equal(mem[:copyBytes], content[:copyBytes]) || !bytes.Equal(mem[little:], content[little:]) {
		t.Error("the memory holds something else")
	}
	// The image ends early.
	c.writing.Lock()
	c.AddRead(2, size-4096, into, memmap.FileRange{Start: 0, End: 8192}, mem[:8192])
	done, err := c.Wait(nil, 1)
	if err != nil || len(done) != 1 || done[0].N != 4096 || !errors.Is(done[0].Err, io.EOF) {
		t.Errorf("past the end: %+v, %v", done, err)
	}
	// What cannot be mapped for want of memory, as here what lies past the end of the file, waits until it can be written.
	if err := to.Truncate(size - 4096); err != nil {
		t.Fatal(err)
	}
	c.AddRead(3, size-8192, into, memmap.FileRange{Start: size - 8192, End: size}, mem[size-8192:size])
	time.Sleep(20 * time.Millisecond)
	c.writing.Unlock()
	copied(3, 8192)
	if !bytes.Equal(mem[size-8192:], image[size-8192:]) {
		t.Error("what was written after all is something else")
	}
}
