package process

import (
	"cmp"
	"encoding/binary"
	"os"
	"slices"
	"sync"
)

const (
	// spoolFile is how large one of the two files of a process grows; the older one is dropped when both are full.
	spoolFile = 8 << 20
	// spoolMin is how much a process keeps on disk at least while the disk budget is used up.
	spoolMin = 512 << 10
	// spoolWrite is how much is written at a time, about.
	spoolWrite = 128 << 10
	// spoolIndex is how far apart the entries of a file's index are.
	spoolIndex = 64 << 10
)

// disk is the space on disk that all processes share. Its files are unlinked as soon as they are made, so that
// nothing is left behind and nothing in the sandbox meddles with them by name.
type disk struct {
	dir   string
	limit int64

	mu   sync.Mutex
	used int64
	made bool
}

// add counts bytes and says whether the budget still holds.
func (d *disk) add(n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used += n
	return d.used <= d.limit
}

func (d *disk) full() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.used > d.limit
}

func (d *disk) create() (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.made {
		if err := os.MkdirAll(d.dir, 0o700); err != nil {
			return nil, err
		}
		d.made = true
	}
	f, err := os.CreateTemp(d.dir, "output-")
	if err != nil {
		return nil, err
	}
	os.Remove(f.Name())
	return f, nil
}

// spool is the part of a process's output that is on disk: at most two files, each a run of records of a byte for the
// kind, four for the length, and the data. Its owner's lock guards it.
type spool struct {
	disk  *disk
	files []*spoolSegment
}

type spoolSegment struct {
	f          *os.File
	start, end int64 // sequence numbers
	size       int64
	index      []spoolMark
	next       spoolMark // after the record read last
}

type spoolMark struct{ seq, off int64 }

const recordHeader = 5

// write appends chunks. What the disk does not take is lost, and readers are told.
func (s *spool) write(chunks []Chunk) {
	if len(chunks) == 0 {
		return
	}
	buf := make([]byte, 0, spoolWrite+chunkBytes+recordHeader)
	for len(chunks) > 0 {
		if n := len(s.files); n == 0 || s.files[n-1].size >= spoolFile || s.files[n-1].end != chunks[0].Seq ||
			s.files[n-1].size >= spoolMin && s.disk.full() {
			if !s.rotate(chunks[0].Seq) {
				return
			}
		}
		seg := s.files[len(s.files)-1]
		buf = buf[:0]
		end := seg.end
		n := 0
		for n < len(chunks) && seg.size+int64(len(buf)) < spoolFile && len(buf) < spoolWrite {
			c := chunks[n]
			off := seg.size + int64(len(buf))
			if k := len(seg.index); k == 0 || off-seg.index[k-1].off >= spoolIndex {
				seg.index = append(seg.index, spoolMark{c.Seq, off})
			}
			buf = append(buf, byte(c.Kind))
			buf = binary.BigEndian.AppendUint32(buf, uint32(len(c.Data)))
			buf = append(buf, c.Data...)
			end = c.end()
			n++
		}
		if _, err := seg.f.WriteAt(buf, seg.size); err != nil {
			// No space, most likely. The file may hold half of it, so it ends here.
			s.close()
			return
		}
		seg.size += int64(len(buf))
		seg.end = end
		s.disk.add(int64(len(buf)))
		chunks = chunks[n:]
	}
}

// rotate begins a new file, dropping the older of two.
func (s *spool) rotate(seq int64) bool {
	if len(s.files) == 2 {
		s.dropOldest()
	}
	f, err := s.disk.create()
	if err != nil {
		s.close()
		return false
	}
	s.files = append(s.files, &spoolSegment{f: f, start: seq, end: seq})
	return true
}

func (s *spool) dropOldest() {
	s.disk.add(-s.files[0].size)
	s.files[0].f.Close()
	s.files = slices.Delete(s.files, 0, 1)
}

// close forgets everything.
func (s *spool) close() {
	for len(s.files) > 0 {
		s.dropOldest()
	}
}

// first returns the first sequence number on disk from seq on.
func (s *spool) first(seq int64) (int64, bool) {
	for _, seg := range s.files {
		if seq < seg.end {
			return max(seq, seg.start), true
		}
	}
	return 0, false
}

// read returns the record that holds seq, from seq on.
func (s *spool) read(seq int64) (Chunk, bool) {
	for _, seg := range s.files {
		if seq >= seg.start && seq < seg.end {
			return seg.read(seq)
		}
	}
	return Chunk{}, false
}

// read returns the record that holds seq. A reader that goes on where the last one stopped costs one look at the disk;
// another starts at the index and passes over the records up to its place, a window of the file at a time.
func (g *spoolSegment) read(seq int64) (Chunk, bool) {
	at := g.next
	if at.seq != seq {
		i, found := slices.BinarySearchFunc(g.index, seq, func(m spoolMark, s int64) int { return cmp.Compare(m.seq, s) })
		if !found {
			i--
		}
		at = g.index[i]
	}
	var buf [4096]byte
	var win []byte // what has been read from at.off on
	for at.off < g.size {
		if len(win) < recordHeader {
			n, _ := g.f.ReadAt(buf[:], at.off) // what could be read tells whether it is enough
			if n < recordHeader {
				return Chunk{}, false
			}
			win = buf[:n]
		}
		n := int64(binary.BigEndian.Uint32(win[1:]))
		if seq < at.seq+n {
			skip := seq - at.seq
			c := Chunk{Seq: seq, Kind: Kind(win[0]), Data: make([]byte, n-skip)}
			if have := win[recordHeader:]; int64(len(have)) >= n {
				copy(c.Data, have[skip:])
			} else if _, err := g.f.ReadAt(c.Data, at.off+recordHeader+skip); err != nil {
				return Chunk{}, false
			}
			g.next = spoolMark{at.seq + n, at.off + recordHeader + n}
			return c, true
		}
		at.seq += n
		at.off += recordHeader + n
		win = win[min(int64(len(win)), recordHeader+n):]
	}
	return Chunk{}, false
}
