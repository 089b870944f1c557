//go:build linux

package keeper

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// An image may share pages of memory with an earlier one of the same sandbox. It then has no pages file. It has a map, which says
// for each page where it is: in a pack of its own with what is new, or in one of an earlier image, to which it has a hard link.
// The pages file of an image that shares with none serves later ones as a pack. So each directory has all that its image needs, no
// image depends on another's directory, and the file system counts who needs a pack.

const (
	// pagesName is gVisor's file with the pages of memory.
	pagesName = "pages.img"
	// mapName is the file with the map: for each run of pages in the pages file the number of a pack, counted from 1, the first page in
	// it, and how many follow each other; or 0 and how many are zero. All are unsigned varints.
	mapName = "pages.map"
	// pageSize is what is compared. gVisor's pages file has whole pages of this size.
	pageSize = 4096
	// maxLinks is how many packs of others an image needs at most.
	maxLinks = 16
)

// pageSum stands for the content of a page: the first half of its SHA-256. Two alike cost some 2^64 tries, and whoever found them could
// spoil images of their own alone: no others are shared.
type pageSum [16]byte

func sumPage(page []byte) pageSum {
	sum := sha256.Sum256(page)
	return pageSum(sum[:16])
}

var zeroSum = sumPage(make([]byte, pageSize))

// pageRef is a page of a pack; pack 0 stands for zeros.
type pageRef struct{ pack, page uint32 }

// sharedPack is a pack of an earlier image.
type sharedPack struct {
	file  imageFile
	from  string // its name there
	used  []bool // by page
	count int    // of those used
	out   bool   // it is not worth a link
}

// shares says whether it is worth it that an image looks for its pages in another.
func (m *image) shares() (bool, error) {
	var size int64
	if m.Packed {
		for _, f := range m.Files {
			if f.Name == pagesName {
				size = f.Size
			}
		}
	} else {
		fi, err := os.Stat(filepath.Join(m.plain(), pagesName))
		if err != nil {
			return false, err
		}
		size = fi.Size()
	}
	return size > smallImage && size%pageSize == 0, nil
}

// shareWith makes a transient image, which is not sealed yet, share what it can with the one in a directory. It stays whole where that one
// is of no use for it: damaged, transient, encrypted with another key or with none where this one is encrypted, or of another build, whose pages would be
// kept for an image that nobody can resume. Its files are plain then, and it may have a scratch.
func (m *image) shareWith(ctx context.Context, dir *os.File, key []byte, build string, scratch func() (*scratch, error)) error {
	if worth, err := m.shares(); err != nil || !worth {
		return err
	}
	like, err := openImage(dir, key)
	if err != nil || like.Transient != "" || like.Runtime != build || (like.seals == nil) != (m.seals == nil) {
		return nil
	}
	m.like = dir
	if m.Packed {
		if err := m.spread(ctx, key, scratch); err != nil {
			return err
		}
	}
	return m.share(ctx, like)
}

// spread takes a packed image apart into a scratch, and empties its directory: it is packed anew, with another salt, as what is
// under one place of an image is written once.
func (m *image) spread(ctx context.Context, key []byte, scratch func() (*scratch, error)) (err error) {
	if m.unpacked, err = scratch(); err != nil {
		return err
	}
	if err := m.verify(ctx); err != nil {
		return err
	}
	if err := m.clear(); err != nil {
		return err
	}
	m.Packed, m.Files = false, nil
	m.seals, err = newSealer(key)
	return err
}

// share replaces the plain pages file of an image, which is not sealed yet, by a map and a pack of what an earlier image has not. It leaves the
// image as it is where that other one is of no use for this.
func (m *image) share(ctx context.Context, like *image) error {
	src, err := os.Open(filepath.Join(m.plain(), pagesName))
	if err != nil {
		return err
	}
	defer src.Close()
	fi, err := src.Stat()
	if err != nil {
		return err
	}
	pages, err := sumPages(ctx, fi.Size(), func(chunk int, buf []byte) ([]byte, error) {
		n, err := src.ReadAt(buf[:min(chunkSize, fi.Size()-int64(chunk)*chunkSize)], int64(chunk)*chunkSize)
		return buf[:n], err
	})
	if err != nil {
		return err
	}
	packs, known, err := like.index(ctx)
	if err != nil {
		return err
	}
	// What a page is, as long as no pack is left out.
	found := 0
	for _, sum := range pages {
		if ref, ok := known[sum]; ok && sum != zeroSum {
			if p := packs[ref.pack-1]; !p.used[ref.page] {
				p.used[ref.page] = true
				p.count++
			}
		}
	}
	// A pack of which less than half is needed is not: else an image might keep much on the disk that is of no use for it.
	byUse := slices.Clone(packs)
	slices.SortStableFunc(byUse, func(a, b *sharedPack) int { return b.count - a.count })
	for i, p := range byUse {
		p.out = i >= maxLinks || p.count*2 < len(p.used)
	}
	refs := make([]pageRef, len(pages))
	own := map[pageSum]uint32{}
	number := uint32(len(packs) + 1) // of the own pack
	var fresh []uint32
	for i, sum := range pages {
		if sum == zeroSum {
			found++
			continue
		}
		if ref, ok := known[sum]; ok && !packs[ref.pack-1].out {
			refs[i] = ref
			found++
			continue
		}
		at, ok := own[sum]
		if !ok {
			at = uint32(len(fresh))
			own[sum] = at
			fresh = append(fresh, uint32(i))
		}
		refs[i] = pageRef{number, at}
	}
	if found < len(pages)/4 {
		return nil // whole it is restored faster
	}
	return m.writeShared(src, fi.Size(), refs, fresh, packs)
}

// writeShared writes the own pack and the map instead of the pages file.
func (m *image) writeShared(src *os.File, size int64, refs []pageRef, fresh []uint32, packs []*sharedPack) error {
	renumber := make([]uint32, len(packs)+2) // without those that are left out
	for i, p := range packs {
		if !p.out && p.count > 0 {
			m.links = append(m.links, link{p.file, p.from})
			m.Packs = append(m.Packs, p.file.Name)
			renumber[i+1] = uint32(len(m.Packs))
		}
	}
	if len(fresh) > 0 {
		name := newPackName()
		m.Packs = append(m.Packs, name)
		renumber[len(packs)+1] = uint32(len(m.Packs))
		if err := copyPages(filepath.Join(m.plain(), name), src, fresh); err != nil {
			return err
		}
	}
	var b []byte
	for i := 0; i < len(refs); {
		first, n := refs[i], 1
		for ; i+n < len(refs) && refs[i+n].pack == first.pack && (first.pack == 0 || refs[i+n].page == first.page+uint32(n)); n++ {
		}
		b = binary.AppendUvarint(b, uint64(renumber[first.pack]))
		if first.pack != 0 {
			b = binary.AppendUvarint(b, uint64(first.page))
		}
		b = binary.AppendUvarint(b, uint64(n))
		i += n
	}
	if err := os.WriteFile(filepath.Join(m.plain(), mapName), b, 0o600); err != nil {
		return err
	}
	m.Pages = size
	return os.Remove(filepath.Join(m.plain(), pagesName))
}

func newPackName() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return "pages-" + hex.EncodeToString(b[:]) + ".pack"
}

// copyPages writes some pages of a file, which are in order, one after the other.
func copyPages(name string, src io.ReaderAt, pages []uint32) (err error) {
	dst, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	w := bufio.NewWriterSize(dst, 1<<20)
	for i := 0; i < len(pages); {
		n := 1
		for ; i+n < len(pages) && pages[i+n] == pages[i]+uint32(n); n++ {
		}
		if _, err := io.Copy(w, io.NewSectionReader(src, int64(pages[i])*pageSize, int64(n)*pageSize)); err != nil {
			return err
		}
		i += n
	}
	return w.Flush()
}

// sumPages returns what stands for each page of a file, whose chunks it reads with all processors.
func sumPages(ctx context.Context, size int64, read func(chunk int, buf []byte) ([]byte, error)) ([]pageSum, error) {
	sums := make([]pageSum, size/pageSize)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range runtime.NumCPU() {
		g.Go(func() error {
			buf := make([]byte, chunkSize)
			for c := next.Add(1) - 1; c < chunks(size); c = next.Add(1) - 1 {
				if err := ctx.Err(); err != nil {
					return err
				}
				data, err := read(int(c), buf)
				if err != nil {
					return err
				}
				for at := range len(data) / pageSize {
					sums[c*chunkSize/pageSize+int64(at)] = sumPage(data[at*pageSize:][:pageSize])
				}
			}
			return nil
		})
	}
	return sums, g.Wait()
}

// index returns the packs of a sealed image with where which page is in them. A pack that is damaged is none.
func (m *image) index(ctx context.Context) (packs []*sharedPack, known map[pageSum]pageRef, err error) {
	dec, err := newDecoder()
	if err != nil {
		return nil, nil, err
	}
	defer dec.Close()
	names := m.Packs
	if m.Pages == 0 {
		names = []string{pagesName}
	}
	known = map[pageSum]pageRef{}
	for i, file := range m.Files {
		if !slices.Contains(names, file.Name) || file.Size%pageSize != 0 {
			continue
		}
		f, err := m.open(file.Name)
		if err != nil {
			continue
		}
		sums, err := sumPages(ctx, file.Size, func(chunk int, _ []byte) ([]byte, error) { return m.readChunk(f, i, chunk, dec) })
		f.Close()
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if err != nil {
			continue
		}
		p := &sharedPack{from: file.Name, file: file, used: make([]bool, len(sums))}
		if file.Name == pagesName {
			p.file.Name = newPackName()
		}
		if m.seals != nil && file.Salt == nil {
			p.file.Salt, p.file.Number = m.seals.salt, uint32(i)
		}
		packs = append(packs, p)
		for page, sum := range sums {
			if _, ok := known[sum]; !ok {
				known[sum] = pageRef{uint32(len(packs)), uint32(page)}
			}
		}
	}
	return packs, known, nil
}

// link is a file that an image has from another's directory.
type link struct {
	file imageFile
	from string
}

// linkPacks puts the packs of another image into the directory and the manifest.
func (m *image) linkPacks() error {
	for _, l := range m.links {
		if err := unix.Linkat(int(m.like.Fd()), l.from, int(m.dir.Fd()), l.file.Name, 0); err != nil {
			return &os.LinkError{Op: "link", Old: l.from, New: l.file.Name, Err: err}
		}
		m.Files = append(m.Files, l.file)
	}
	return nil
}

// segment is a run of pages of one chunk of a pack, with the place of its first in the pages file.
type segment struct{ page, count, to int64 }

// readMap returns, for each pack and each chunk of it, what of the pages file is there.
func (m *image) readMap(b []byte) (map[string][][]segment, error) {
	bad := damaged("its map of pages cannot be read")
	where := map[string][][]segment{}
	sizes := map[string]int64{}
	for _, f := range m.Files {
		if slices.Contains(m.Packs, f.Name) {
			where[f.Name] = make([][]segment, chunks(f.Size))
			sizes[f.Name] = f.Size / pageSize
		}
	}
	r := bytes.NewReader(b)
	next := func(most int64) int64 {
		n, err := binary.ReadUvarint(r)
		if err != nil || n > uint64(most) {
			return -1
		}
		return int64(n)
	}
	const perChunk = chunkSize / pageSize
	total := m.Pages / pageSize
	for at := int64(0); at < total || r.Len() > 0; {
		pack := next(int64(len(m.Packs)))
		if pack < 0 {
			return nil, bad
		}
		page, last := int64(0), total
		if pack > 0 {
			last = sizes[m.Packs[pack-1]]
			if page = next(last); page < 0 {
				return nil, bad
			}
		}
		n := next(min(last-page, total-at))
		if n <= 0 {
			return nil, bad
		}
		for pack > 0 && n > 0 {
			part := min(n, perChunk-page%perChunk)
			list := where[m.Packs[pack-1]]
			list[page/perChunk] = append(list[page/perChunk], segment{page % perChunk, part, at})
			page, at, n = page+part, at+part, n-part
		}
		at += n
	}
	return where, nil
}

// assemble puts the pages file together from the packs, comparing every byte of them with the checksums.
func (m *image) assemble(ctx context.Context, files []*os.File, dec *zstd.Decoder) (err error) {
	at := slices.IndexFunc(m.Files, func(f imageFile) bool { return f.Name == mapName })
	if at < 0 {
		return damaged("it has no map of its pages")
	}
	var b []byte
	for c := range chunks(m.Files[at].Size) {
		data, err := m.readChunk(files[at], at, int(c), dec)
		if err != nil {
			return err
		}
		b = append(b, data...)
	}
	where, err := m.readMap(b)
	if err != nil {
		return err
	}
	dst, err := os.OpenFile(filepath.Join(m.unpacked.dir, pagesName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if err := dst.Truncate(m.Pages); err != nil { // the rest is zero
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for i, f := range m.Files {
		for c, segments := range where[f.Name] {
			g.Go(func() error {
				if err := ctx.Err(); err != nil {
					return err
				}
				data, err := m.readChunk(files[i], i, c, dec)
				if err != nil {
					return err
				}
				for _, s := range segments {
					if _, err := dst.WriteAt(data[s.page*pageSize:][:s.count*pageSize], s.to*pageSize); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	return g.Wait()
}
