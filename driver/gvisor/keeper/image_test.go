//go:build linux

package keeper

import (
	"bytes"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// TestImageFits refuses, in words, to go on from an image where something is not as it was.
func TestImageFits(t *testing.T) {
	spec := &protocol.Spec{Root: "sha256:1", GuestBuild: "g1", Limits: protocol.Limits{Disk: 1 << 30, Memory: 64 << 20}, Mounts: []protocol.Mount{{Target: "/workspace"}}}
	cpu, err := cpuFeatures()
	if err != nil {
		t.Fatal(err)
	}
	whole := func() *image { return &image{Arch: runtime.GOARCH, Runtime: "r1", CPU: cpu, Base: baseOf(spec)} }
	if err := whole().fits("r1", "k1", spec); err != nil {
		t.Fatalf("an image of this host and spec: %v", err)
	}
	for want, spoil := range map[string]func(*image){
		"another build of warren-runtime": func(m *image) { m.Runtime = "r0" },
		"another build of warren-guest":   func(m *image) { m.Base.Guest = "g0" },
		"was made on vax":                 func(m *image) { m.Arch = "vax" },
		"lacks: zzz_matrix":               func(m *image) { m.CPU = append(append([]string{}, m.CPU...), "zzz_matrix") },
		"root file system":                func(m *image) { m.Base.Root = "sha256:2" },
		"mounts on":                       func(m *image) { m.Base.Mounts = nil },
		"limit of 2 GiB":                  func(m *image) { m.Base.Disk *= 2 },
		"holds 65 MiB of memory":          func(m *image) { m.Base.Memory *= 2; m.Pages = 65 << 20 },
		"may have 64 MiB": func(m *image) {
			m.Base.Memory *= 2
			m.Files = []imageFile{{Name: "other", Size: 1 << 20}, {Name: pagesName, Size: 64<<20 + 1}}
		},
	} {
		m := whole()
		spoil(m)
		err := m.fits("r1", "k1", spec)
		var e *protocol.Error
		if !errors.As(err, &e) || e.Kind != protocol.KindUnsupported || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: %v", want, err)
		}
	}
	brief := whole()
	brief.Transient = "k0"
	var e *protocol.Error
	if err := brief.fits("r1", "k1", spec); !errors.As(err, &e) || e.Kind != protocol.KindImage {
		t.Errorf("a transient image of another keeper: %v", err)
	}
	for what, change := range map[string]func(*image){
		"as much as its limit, which was more":         func(m *image) { m.Base.Memory *= 2; m.Pages = 64 << 20 },
		"more than its limit, which it always had":     func(m *image) { m.Pages = 65 << 20 },
		"more than its limit, which nobody wrote down": func(m *image) { m.Base.Memory, m.Pages = 0, 65<<20 },
	} {
		m := whole()
		change(m)
		if err := m.fits("r1", "k1", spec); err != nil {
			t.Errorf("an image with %s: %v", what, err)
		}
	}
	less := whole()
	less.CPU = less.CPU[:1] // this machine can do more
	if err := less.fits("r1", "k1", spec); err != nil {
		t.Errorf("an image of a lesser processor: %v", err)
	}
}

// TestImageChunks seals images with files of every size around that of a chunk, plain and packed, and finds one flipped bit in
// each file of them; what is unpacked is what was packed.
func TestImageChunks(t *testing.T) {
	key := bytes.Repeat([]byte{7}, protocol.KeySize)
	for _, c := range []struct {
		name    string
		packing protocol.Packing
	}{
		{"plain", protocol.Packing{Compress: protocol.CompressNever}},
		{"compressed", protocol.Packing{Compress: protocol.CompressAlways}},
		{"encrypted", protocol.Packing{Compress: protocol.CompressNever, Key: key}},
		{"compressed and encrypted", protocol.Packing{Compress: protocol.CompressAlways, Key: key}},
	} {
		t.Run(c.name, func(t *testing.T) { testImageChunks(t, c.packing) })
	}
}

func testImageChunks(t *testing.T, p protocol.Packing) {
	name := t.TempDir()
	dir, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	m := &image{dir: dir, Token: "a-secret-token"}
	if m.seals, err = newSealer(p.Key); err != nil {
		t.Fatal(err)
	}
	if m.seals != nil {
		m.unpacked = &scratch{t.TempDir()}
	}
	sizes := map[string]int{"empty": 0, "byte": 1, "less": chunkSize - 1, "chunk": chunkSize, "more": chunkSize + 1, "many": 3*chunkSize + 77}
	contents := map[string][]byte{}
	total := 0
	for file, size := range sizes {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(i * 31)
		}
		if file == "chunk" {
			rand.Read(b) // which cannot be compressed
		}
		contents[file] = b
		if err := os.WriteFile(filepath.Join(m.plain(), file), b, 0o644); err != nil {
			t.Fatal(err)
		}
		total += size
	}
	n, err := m.finish(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if small := n < int64(total)/2; small != (p.Compress == protocol.CompressAlways) {
		t.Errorf("%d bytes of %d", n, total)
	}
	open := func(key []byte) (*image, error) {
		m, err := openImage(dir, key)
		if err == nil && m.Packed {
			m.unpacked = &scratch{t.TempDir()}
		}
		return m, err
	}
	check := func() error {
		m, err := open(p.Key)
		if err != nil {
			return err
		}
		if whole := m.verify(t.Context()); !m.Packed || whole != nil {
			return whole
		}
		m.unpacked = nil
		return m.verify(t.Context())
	}
	if err := check(); err != nil {
		t.Fatal(err)
	}
	back, err := open(p.Key)
	if err != nil || back.verify(t.Context()) != nil || back.Token != m.Token {
		t.Fatalf("%+v, %v", back, err)
	}
	for file, want := range contents {
		if got, err := os.ReadFile(filepath.Join(back.plain(), file)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what it was: %d bytes, %v", file, len(got), err)
		}
		stored, err := os.ReadFile(filepath.Join(name, file))
		if err != nil {
			t.Fatal(err)
		}
		if p.Key != nil && len(want) > 100 && bytes.Contains(stored, want[:100]) {
			t.Errorf("%s can be read on disk", file)
		}
	}
	about, err := os.ReadFile(filepath.Join(name, manifestName))
	if err != nil || bytes.Contains(about, []byte(m.Token)) != (p.Key == nil) {
		t.Errorf("the manifest: %s, %v", about, err)
	}
	if p.Key != nil {
		other := slices.Clone(p.Key)
		other[0]++
		for _, key := range [][]byte{nil, other} {
			var e *protocol.Error
			if _, err := open(key); !errors.As(err, &e) || e.Kind != protocol.KindUnsupported || !strings.Contains(err.Error(), "key "+keyID(p.Key)) {
				t.Errorf("with key %x: %v", key, err)
			}
		}
	}
	for file := range sizes {
		f, err := os.OpenFile(filepath.Join(name, file), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		fi, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		size := fi.Size()
		for _, at := range []int64{0, size / 2, size - 1, chunkSize - 1, chunkSize, 2 * chunkSize} {
			if at < 0 || at >= size {
				continue
			}
			var b [1]byte
			f.ReadAt(b[:], at)
			b[0] ^= 0x10
			f.WriteAt(b[:], at)
			var e *protocol.Error
			if err := check(); !errors.As(err, &e) || e.Kind != protocol.KindImage || !strings.Contains(err.Error(), file) {
				t.Errorf("%s, byte %d is flipped: %v", file, at, err)
			}
			b[0] ^= 0x10
			f.WriteAt(b[:], at)
		}
		f.Close()
	}
	if err := check(); err != nil {
		t.Errorf("whole again: %v", err)
	}
}
