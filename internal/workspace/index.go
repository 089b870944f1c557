package workspace

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
)

// index is a git index of version 2, the only one that our configuration makes: a header, entries of 62 bytes (with
// sha1) and a name, padded with zeros to a multiple of 8, extensions, and a checksum of it all.
type index struct {
	raw     []byte
	sum     func() hash.Hash
	entries []entry
}

// entry is a file in an index; at is where it begins.
type entry struct {
	at   int
	mode uint32
	name string
}

var errIndex = fmt.Errorf("git's index is damaged: %w", warren.ErrState)

// parseIndex reads an index. The bytes may come from anybody.
func parseIndex(raw []byte, format string) (*index, error) {
	x := &index{raw: raw, sum: sha1.New}
	size := sha1.Size
	if format == "sha256" {
		x.sum, size = sha256.New, sha256.Size
	}
	if len(raw) < 12+size || string(raw[:4]) != "DIRC" || binary.BigEndian.Uint32(raw[4:]) != 2 {
		return nil, errIndex
	}
	n := binary.BigEndian.Uint32(raw[8:])
	at, limit := 12, len(raw)-size
	fixed := 40 + size + 2
	if int64(n)*int64(fixed) > int64(limit) {
		return nil, errIndex
	}
	x.entries = make([]entry, 0, n)
	for range n {
		if at+fixed > limit {
			return nil, errIndex
		}
		nul := bytes.IndexByte(raw[at+fixed:limit], 0)
		if nul <= 0 {
			return nil, errIndex
		}
		x.entries = append(x.entries, entry{at: at, mode: binary.BigEndian.Uint32(raw[at+24:]), name: string(raw[at+fixed : at+fixed+nul])})
		at += (fixed + nul + 8) &^ 7
	}
	if at > limit {
		return nil, errIndex
	}
	return x, nil
}

// stat is what an index has of the file of an entry, each value cut to 32 bits. A size of 0 says nothing.
type stat struct{ ctime, ctimeNsec, mtime, mtimeNsec, ino, size uint32 }

func (x *index) stat(e entry) stat {
	at := func(i int) uint32 { return binary.BigEndian.Uint32(x.raw[e.at+i:]) }
	return stat{at(0), at(4), at(8), at(12), at(20), at(36)}
}

// same reports whether git takes the file for the one of the entry without a look at what is in it.
func (i stat) same(st *unix.Stat_t) bool {
	return i == stat{uint32(st.Ctim.Sec), uint32(st.Ctim.Nsec), uint32(st.Mtim.Sec), uint32(st.Mtim.Nsec), uint32(st.Ino), uint32(st.Size)}
}

// assume returns the index with the entries of these names, and no others, as ones whose files git is to take for unchanged unread.
func (x *index) assume(names map[string]bool) []byte {
	x.raw = bytes.Clone(x.raw)
	flags := 40 + x.sum().Size()
	const assumeValid = 0x80 // of the first of two bytes
	for _, e := range x.entries {
		x.raw[e.at+flags] &^= assumeValid
		if names[e.name] {
			x.raw[e.at+flags] |= assumeValid
		}
	}
	return x.seal()
}

// seal returns the index with a fresh checksum.
func (x *index) seal() []byte {
	h := x.sum()
	out := bytes.Clone(x.raw[:len(x.raw)-h.Size()])
	h.Write(out)
	return h.Sum(out)
}

// settle makes the index right after a checkout, for us and for inside. Git takes a file whose time is not before that of the index for one
// that may have changed in between, and reads it again; after a checkout that would be all of them, at each status
// until the index is written anew. So the files' times are set two seconds back, and the entries say so. A file that is not as git
// wrote it keeps its entry, which no longer fits, and will be read.
//
// The host's git compares inode, owner and change time too, which nobody in a sandbox can set. The git inside sees
// others than these and is told to compare size and time only.
func (s *Store) settle(id warren.WorkspaceID, m *meta, raw []byte) ([]byte, error) {
	x, err := parseIndex(raw, m.Format)
	if err != nil {
		return nil, err
	}
	t := time.Now().Add(-2 * time.Second).Truncate(time.Second)
	ts := unix.NsecToTimespec(t.UnixNano())
	times := []unix.Timespec{ts, ts}
	w, err := newWalker(s.files(id))
	if err != nil {
		return nil, err
	}
	defer w.close()
	for _, e := range x.entries {
		if e.mode&unix.S_IFMT == 0o160000 {
			continue
		}
		dir, err := w.dir(path.Dir(e.name))
		if err != nil {
			if vanished(err) {
				continue
			}
			return nil, err
		}
		b := x.raw[e.at:]
		var st unix.Stat_t
		base := path.Base(e.name)
		if unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || !sameStat(b, &st) {
			continue
		}
		if err := unix.UtimesNanoAt(dir, base, times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, err
		}
		if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, err
		}
		be := binary.BigEndian
		be.PutUint32(b[0:], uint32(st.Ctim.Sec))
		be.PutUint32(b[4:], uint32(st.Ctim.Nsec))
		be.PutUint32(b[8:], uint32(st.Mtim.Sec))
		be.PutUint32(b[12:], uint32(st.Mtim.Nsec))
	}
	return x.seal(), nil
}

// sameStat reports whether a file is as the index entry says.
func sameStat(b []byte, st *unix.Stat_t) bool {
	be := binary.BigEndian
	return be.Uint32(b[0:]) == uint32(st.Ctim.Sec) && be.Uint32(b[4:]) == uint32(st.Ctim.Nsec) &&
		be.Uint32(b[8:]) == uint32(st.Mtim.Sec) && be.Uint32(b[12:]) == uint32(st.Mtim.Nsec) &&
		be.Uint32(b[20:]) == uint32(st.Ino) && be.Uint32(b[36:]) == uint32(st.Size)
}

func vanished(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}
