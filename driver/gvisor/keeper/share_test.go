//go:build linux

package keeper

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// sharing makes images of invented memory as a keeper does: written, and then sealed with an earlier one to share with.
type sharing struct {
	t       *testing.T
	packing protocol.Packing
}

// take returns the directory of an image of some pages that was sealed with an earlier one, "" for none, and what it says that it takes.
func (s *sharing) take(pages []byte, like string) (dir string, size int64) {
	s.t.Helper()
	dir = s.t.TempDir()
	size, err := s.takeInto(dir, pages, like)
	if err != nil {
		s.t.Fatal(err)
	}
	return dir, size
}

func (s *sharing) takeInto(dir string, pages []byte, like string) (int64, error) {
	d := s.open(dir)
	m := &image{dir: d, Token: "a-secret-token", Runtime: "r1", Transient: "k1"}
	var err error
	if m.seals, err = newSealer(s.packing.Key); err != nil {
		s.t.Fatal(err)
	}
	if m.seals != nil {
		m.unpacked = &scratch{s.t.TempDir()}
	}
	for name, b := range map[string][]byte{pagesName: pages, "checkpoint.img": []byte("the kernel's state"), "pages_meta.img": pages[:100]} {
		if err := os.WriteFile(filepath.Join(m.plain(), name), b, 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	if _, err := m.finish(s.t.Context(), s.packing); err != nil {
		s.t.Fatal(err)
	}
	// As Keeper.seal, with scratches that need no mount.
	if m, err = openImage(d, s.packing.Key); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, manifestName)); err != nil {
		s.t.Fatal(err)
	}
	if like != "" {
		if err := m.shareWith(s.t.Context(), s.open(like), s.packing.Key, "r1", s.scratch); err != nil {
			return 0, err
		}
	}
	m.Transient = ""
	return m.finish(s.t.Context(), s.packing)
}

func (s *sharing) scratch() (*scratch, error) { return &scratch{s.t.TempDir()}, nil }

func (s *sharing) open(dir string) *os.File {
	s.t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { d.Close() })
	return d
}

// read returns the pages of an image as gVisor would get them.
func (s *sharing) read(dir string) ([]byte, error) {
	s.t.Helper()
	m, err := openImage(s.open(dir), s.packing.Key)
	if err != nil {
		return nil, err
	}
	if m.apart() {
		m.unpacked = &scratch{s.t.TempDir()}
		defer os.RemoveAll(m.unpacked.dir)
	}
	if err := m.verify(s.t.Context()); err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(m.plain(), pagesName))
}

func (s *sharing) same(dir string, want []byte) {
	s.t.Helper()
	if got, err := s.read(dir); err != nil || !bytes.Equal(got, want) {
		s.t.Errorf("%d bytes of %d, or others: %v", len(got), len(want), err)
	}
}

// randomPages are so many that images look for them in others; some are zero, some twice.
func randomPages() []byte {
	b := make([]byte, 2*chunkSize+5*pageSize)
	rand.Read(b)
	clear(b[20*pageSize : 24*pageSize])
	copy(b[40*pageSize:], b[30*pageSize:35*pageSize])
	return b
}

// changed has other pages in some places, and one more before all: every page behind it is elsewhere in the file.
func changed(b []byte, seed int) []byte {
	page := make([]byte, pageSize)
	rand.Read(page)
	b = slices.Concat(page, b)
	for i := range 10 {
		rand.Read(b[(100+seed*40+i*2)*pageSize:][:pageSize])
	}
	return b
}

var testKey = bytes.Repeat([]byte{7}, protocol.KeySize)

// TestShare takes four images of memory that changes little, which together take hardly more than the first, and deletes them one after
// the other in different orders: each of those that are left is what it was.
func TestShare(t *testing.T) {
	for name, c := range map[string]struct {
		packing protocol.Packing
		order   []int
	}{
		"plain":                    {protocol.Packing{}, []int{0, 1, 2, 3}},
		"compressed":               {protocol.Packing{Compress: protocol.CompressAlways}, []int{3, 2, 1, 0}},
		"encrypted":                {protocol.Packing{Key: testKey, Compress: protocol.CompressNever}, []int{2, 0, 3, 1}},
		"compressed and encrypted": {protocol.Packing{Key: testKey, Compress: protocol.CompressAlways}, []int{1, 3, 0, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &sharing{t: t, packing: c.packing}
			pages := randomPages()
			var dirs []string
			var memory [][]byte
			total := int64(0)
			for i := range c.order {
				like := ""
				if i > 0 {
					like = dirs[i-1]
					pages = changed(pages, i)
				}
				dir, size := s.take(pages, like)
				total += size
				dirs, memory = append(dirs, dir), append(memory, pages)
			}
			if most := int64(len(pages)) + 3*40*pageSize; total > most {
				t.Errorf("the images take %d bytes, want at most %d", total, most)
			}
			if c.packing.Key != nil {
				for _, dir := range dirs {
					for _, name := range packsOf(t, dir) {
						b, err := os.ReadFile(filepath.Join(dir, name))
						if err != nil || bytes.Contains(b, pages[200*pageSize:][:100]) {
							t.Errorf("%s can be read on disk, %v", name, err)
						}
					}
				}
			}
			for _, gone := range c.order {
				for i, dir := range dirs {
					if dir != "" {
						s.same(dir, memory[i])
					}
				}
				if err := os.RemoveAll(dirs[gone]); err != nil {
					t.Fatal(err)
				}
				dirs[gone] = ""
			}
		})
	}
}

// TestShareDamage changes, shortens and removes each file of an image that shares, and adds one: all of it is found. Its packs are those of the
// earlier one too, which tells of the same.
func TestShareDamage(t *testing.T) {
	for name, p := range map[string]protocol.Packing{"plain": {Compress: protocol.CompressNever}, "compressed and encrypted": {Key: testKey, Compress: protocol.CompressAlways}} {
		t.Run(name, func(t *testing.T) { testShareDamage(t, &sharing{t: t, packing: p}) })
	}
}

func testShareDamage(t *testing.T, s *sharing) {
	first := randomPages()
	second := changed(first, 0)
	one, _ := s.take(first, "")
	two, _ := s.take(second, one)
	entries, err := os.ReadDir(two)
	if err != nil || len(entries) != 6 { // the kernel's state, the places of the pages, the map, two packs, the manifest
		t.Fatalf("%v, %v", entries, err)
	}
	found := func(what string) {
		t.Helper()
		var e *protocol.Error
		m, err := openImage(s.open(two), s.packing.Key)
		if err == nil {
			err = m.verify(t.Context()) // which is a look
		}
		if !errors.As(err, &e) || e.Kind != protocol.KindImage {
			t.Errorf("%s: a look says %v", what, err)
		}
		if _, err := s.read(two); !errors.As(err, &e) || e.Kind != protocol.KindImage {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, entry := range entries {
		name := filepath.Join(two, entry.Name())
		whole, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{len(whole) / 2} {
			f, err := os.OpenFile(name, os.O_WRONLY, 0) // the file that both have
			if err != nil {
				t.Fatal(err)
			}
			f.WriteAt([]byte{whole[at] ^ 1}, int64(at))
			found(fmt.Sprintf("%s has another byte %d", entry.Name(), at))
			f.WriteAt(whole[at:at+1], int64(at))
			f.Close()
		}
		if err := os.Truncate(name, int64(len(whole)-1)); err != nil {
			t.Fatal(err)
		}
		found(entry.Name() + " is too short")
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		f.Write(whole[len(whole)-1:])
		f.Close()
		if err := os.Rename(name, name+".away"); err != nil {
			t.Fatal(err)
		}
		found(entry.Name() + " has another name")
		aside := filepath.Join(t.TempDir(), "aside")
		if err := os.Rename(name+".away", aside); err != nil {
			t.Fatal(err)
		}
		found(entry.Name() + " is missing")
		if err := os.Rename(aside, name); err != nil {
			t.Fatal(err)
		}
	}
	s.same(two, second)
	s.same(one, first)
}

// TestShareOthers leans on nothing that is of no use: what is damaged, transient or cut short, has another key, or hardly a page in common.
func TestShareOthers(t *testing.T) {
	key := testKey
	other := bytes.Repeat([]byte{8}, protocol.KeySize)
	pages := randomPages()
	for name, c := range map[string]struct {
		earlier, later *sharing
		spoil          func(dir string) error
		pages          []byte
	}{
		"a flipped byte in its pages": {spoil: func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, pagesName), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte{pages[5000] ^ 1}, 5000)
			return err
		}},
		"no pages":        {spoil: func(dir string) error { return os.Remove(filepath.Join(dir, pagesName)) }},
		"no manifest":     {spoil: func(dir string) error { return os.Remove(filepath.Join(dir, manifestName)) }},
		"other memory":    {pages: randomPages()},
		"another key":     {earlier: &sharing{packing: protocol.Packing{Key: other}}, later: &sharing{packing: protocol.Packing{Key: key}}},
		"no key":          {later: &sharing{packing: protocol.Packing{Key: key}}},
		"a key of before": {earlier: &sharing{packing: protocol.Packing{Key: key}}},
	} {
		t.Run(name, func(t *testing.T) {
			earlier, later := &sharing{}, &sharing{}
			if c.earlier != nil {
				earlier = c.earlier
			}
			if c.later != nil {
				later = c.later
			}
			earlier.t, later.t = t, t
			one, _ := earlier.take(pages, "")
			if c.spoil != nil {
				if err := c.spoil(one); err != nil {
					t.Fatal(err)
				}
			}
			now := c.pages
			if now == nil {
				now = pages
			}
			two, size := later.take(now, one)
			if size < int64(len(pages))-20*pageSize {
				t.Errorf("it took %d bytes, as if it shared %d", size, len(pages))
			}
			later.same(two, now)
		})
	}
}

// TestShareDead drops a pack of which an image needs less than half, so that it keeps at most as much on the disk for nothing as it needs.
func TestShareDead(t *testing.T) {
	s := &sharing{t: t}
	first := randomPages()
	one, _ := s.take(first, "")
	second := slices.Clone(first)
	rand.Read(second[:len(second)/3]) // two thirds are needed
	two, size := s.take(second, one)
	if size > int64(len(second)/3+100*pageSize) {
		t.Errorf("it shares nothing: it took %d bytes of %d", size, len(second))
	}
	third := slices.Clone(second)
	rand.Read(third[len(third)/3 : len(third)*3/4]) // a quarter of the first, and all of the second's own
	three, _ := s.take(third, two)
	var shared int64
	for _, name := range packsOf(t, three) {
		a, err := os.Stat(filepath.Join(three, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{one, two} {
			for _, other := range packsOf(t, dir) {
				if b, err := os.Stat(filepath.Join(dir, other)); err == nil && os.SameFile(a, b) {
					shared = max(shared, a.Size())
				}
			}
		}
	}
	if shared == 0 || shared > int64(len(first)/2) {
		t.Errorf("the third image has a pack of %d bytes from the others, which have %d", shared, len(first))
	}
	s.same(one, first)
	s.same(two, second)
	s.same(three, third)
}

func packsOf(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == pagesName || strings.HasSuffix(e.Name(), ".pack") {
			names = append(names, e.Name())
		}
	}
	return names
}

// TestShareMany chains more images than packs may be linked: the oldest small ones are written anew.
func TestShareMany(t *testing.T) {
	s := &sharing{t: t, packing: protocol.Packing{Compress: protocol.CompressNever}}
	pages := randomPages()
	dir, _ := s.take(pages, "")
	for i := range maxLinks + 4 {
		pages = changed(pages, i)
		dir, _ = s.take(pages, dir)
		if n := len(packsOf(t, dir)); n > maxLinks+1 {
			t.Fatalf("image %d has %d packs", i, n)
		}
	}
	s.same(dir, pages)
}

// TestShareCancelled ends the wait of a caller in the middle.
func TestShareCancelled(t *testing.T) {
	s := &sharing{t: t}
	pages := randomPages()
	one, _ := s.take(pages, "")
	like, err := openImage(s.open(one), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := like.index(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("index: %v", err)
	}
}

// FuzzMap reads any map, of an image with one pack of two chunks: what it says is within the pack and the pages file, and covers that.
func FuzzMap(f *testing.F) {
	f.Add([]byte{1, 0, 128, 8})
	f.Add([]byte{0, 7, 1, 255, 7, 2, 1, 0, 2})
	f.Add([]byte{1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &image{Files: []imageFile{{Name: "p", Size: 2 * chunkSize}}, Packs: []string{"p"}, Pages: 1024 * pageSize}
		where, err := m.readMap(b)
		if err != nil {
			return
		}
		end := int64(0)
		for _, chunk := range where["p"] {
			for _, s := range chunk {
				if s.count <= 0 || s.page < 0 || s.page+s.count > chunkSize/pageSize || s.to < 0 || s.to+s.count > 1024 {
					t.Errorf("%+v", s)
				}
				end = max(end, s.to+s.count)
			}
		}
		if end > 1024 {
			t.Errorf("it ends at page %d of 1024", end)
		}
	})
}
