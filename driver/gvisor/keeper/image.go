//go:build linux

package keeper

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// manifestName is the file of an image that says what the others hold. It is written last: an image without it was
// never finished.
const manifestName = "image.json"

// manifestVersion is that of the form of the manifest.
const manifestVersion = 3

// maxManifest bounds what is read of a manifest; a real one has some kilobytes.
const maxManifest = 4 << 20

// chunkSize is how many bytes of a file have a checksum of their own.
const chunkSize = 4 << 20

// manifest is the file itself: what an image is, in the clear or encrypted.
type manifest struct {
	Version int `json:"version"`
	// Image is an image in JSON; if KeyID is set, encrypted with the key of that name and Salt.
	Image json.RawMessage `json:"image,omitempty"`
	KeyID string          `json:"keyID,omitempty"`
	Salt  []byte          `json:"salt,omitempty"`
	Nonce []byte          `json:"nonce,omitempty"`
	Box   []byte          `json:"box,omitempty"`
}

// image is what a manifest says, and the image's directory while it is open.
type image struct {
	Created time.Time `json:"created"`
	// Runtime is the build of the runtime binary, whose kernel alone understands its own state.
	Runtime string `json:"runtime"`
	// CPU has what programs may have found out about the processor and act upon.
	Arch string   `json:"arch"`
	CPU  []string `json:"cpu"`
	Base base     `json:"base"`
	// Token is that of the channel, which the guest in the image knows.
	Token string      `json:"token"`
	Files []imageFile `json:"files"`
	// Transient, when set, names the keeper that alone may restore the image: it has no checksums and may not be on disk.
	Transient string `json:"transient,omitempty"`
	// Packed says that the files are compressed, or encrypted, or both; of those that other images have too each for itself.
	Packed bool `json:"packed,omitempty"`
	// Pages, when set, is the size of the pages file, which is not there but put together from Packs as the map says, see share.
	Pages int64    `json:"pages,omitempty"`
	Packs []string `json:"packs,omitempty"`

	dir *os.File
	// links are the packs that are to come from the directory like of another image.
	links []link
	like  *os.File
	// seals encrypts and decrypts, if the image is encrypted.
	seals *sealer
	// unpacked is where gVisor finds the files if they are packed.
	unpacked *scratch
	// verified gets the result of verify, before which nothing of the image may run.
	verified chan error
}

// imageFile is one file beside the manifest, with the checksum of each chunk of it.
type imageFile struct {
	Name   string     `json:"name"`
	Size   int64      `json:"size"`
	Chunks []checksum `json:"chunks,omitempty"`
	// Packed has the lengths of the chunks if they are packed; the checksums are those of what is stored.
	Packed []int64 `json:"packed,omitempty"`
	// Salt, when set, is that of the image for which the file was encrypted, in which it had Number.
	Salt   []byte `json:"salt,omitempty"`
	Number uint32 `json:"number,omitempty"`

	seals *sealer // with Salt
}

// stored returns how many bytes the file has on disk.
func (f *imageFile) stored() (n int64) {
	if f.Packed == nil {
		return f.Size
	}
	for _, l := range f.Packed {
		n += l
	}
	return n
}

// at returns where a chunk is stored, and how long it is there.
func (f *imageFile) at(chunk int) (start, size int64) {
	if f.Packed == nil {
		start = int64(chunk) * chunkSize
		return start, min(chunkSize, f.Size-start)
	}
	for _, l := range f.Packed[:chunk] {
		start += l
	}
	return start, f.Packed[chunk]
}

// checksum finds damage, and is no defence against whoever can write the image, who can also write its manifest: CRC-32C and
// CRC-32 side by side, which processors compute as fast as they read memory, and ten times faster than a cryptographic one.
type checksum string

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func newChecksum(c, ieee uint32) checksum { return checksum(fmt.Sprintf("%08x%08x", c, ieee)) }

// base is what an image relies on and does not hold: files that are mapped into memory or open.
type base struct {
	Root   string   `json:"root"`
	Guest  string   `json:"guest"`
	Disk   int64    `json:"disk"`
	Mounts []string `json:"mounts,omitempty"`
	// Memory is the limit that it stayed below.
	Memory int64 `json:"memory,omitempty"`
}

func baseOf(spec *protocol.Spec) base {
	b := base{Root: spec.Root, Guest: spec.GuestBuild, Disk: spec.Limits.Disk, Memory: spec.Limits.Memory}
	for _, m := range spec.Mounts {
		b.Mounts = append(b.Mounts, m.Target)
	}
	return b
}

// path names the image's directory.
func (m *image) path() string { return fmt.Sprintf("/proc/self/fd/%d", m.dir.Fd()) }

// plain names the directory in which gVisor finds the files, or is to write them.
func (m *image) plain() string {
	if m.unpacked != nil {
		return m.unpacked.dir
	}
	return m.path()
}

// seal makes what was written into the directory an image: modes, checksums, the manifest, and, unless it is transient, all of
// it on disk. It returns the size, without that of what another image has too.
func (m *image) seal(ctx context.Context) (int64, error) {
	files, size, err := m.openAll()
	defer closeAllFiles(files)
	if err != nil {
		return 0, err
	}
	if m.Transient == "" {
		g, ctx := errgroup.WithContext(ctx)
		for i, f := range files {
			if !m.Packed {
				m.Files[i].Chunks = make([]checksum, chunks(m.Files[i].Size))
			}
			g.Go(f.Sync) // while it is read
		}
		if !m.Packed { // else they have their checksums
			g.Go(func() error {
				return m.eachChunk(ctx, files, func(file, chunk int, sum checksum) error {
					m.Files[file].Chunks[chunk] = sum
					return nil
				})
			})
		}
		if err := g.Wait(); err != nil {
			return 0, err
		}
	}
	if err := m.linkPacks(); err != nil {
		return 0, err
	}
	n, err := m.writeManifest()
	return size + n, err
}

// openAll opens the files of the directory, of which nobody else may read any, and enters those that are not packed in the
// manifest. It returns what they take.
func (m *image) openAll() (files []*os.File, size int64, err error) {
	names, err := m.names()
	if err != nil {
		return nil, 0, err
	}
	if !m.Packed {
		m.Files = make([]imageFile, len(names))
	}
	for i, name := range names {
		f, err := m.open(name)
		if err != nil {
			return files, 0, err
		}
		files = append(files, f)
		if err := f.Chmod(0o600); err != nil {
			return files, 0, err
		}
		fi, err := f.Stat()
		if err != nil {
			return files, 0, err
		}
		if !m.Packed {
			m.Files[i] = imageFile{Name: name, Size: fi.Size()}
		}
		size += fi.Size()
	}
	return files, size, nil
}

// writeManifest writes the manifest, to disk unless the image is transient, and returns its size.
func (m *image) writeManifest() (int64, error) {
	out := manifest{Version: manifestVersion}
	b, err := json.Marshal(m)
	if err != nil {
		return 0, err
	}
	if out.Image = b; m.seals != nil {
		out.Image, out.KeyID, out.Salt = nil, m.seals.keyID, m.seals.salt
		out.Nonce, out.Box = m.seals.boxManifest(b)
	}
	if b, err = json.Marshal(out); err != nil {
		return 0, err
	}
	b = append(b, '\n')
	sum := sha256.Sum256(b)
	b = append(hex.AppendEncode(b, sum[:]), '\n')
	f, err := m.create(manifestName)
	if err != nil {
		return 0, err
	}
	_, err = f.Write(b)
	if err == nil && m.Transient == "" {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil && m.Transient == "" {
		err = m.dir.Sync()
	}
	return int64(len(b)), err
}

func closeAllFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// chunks returns how many chunks a file has.
func chunks(size int64) int64 { return (size + chunkSize - 1) / chunkSize }

// eachChunk reads the files, which are those of the manifest, with all processors and calls a function, at the same time for
// several chunks, with the checksum of each.
func (m *image) eachChunk(ctx context.Context, files []*os.File, do func(file, chunk int, sum checksum) error) error {
	type place struct{ file, chunk int }
	places := make(chan place)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(places)
		for i, f := range m.Files {
			for c := range chunks(f.Size) {
				select {
				case places <- place{i, int(c)}:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
		return nil
	})
	for range runtime.NumCPU() {
		g.Go(func() error {
			buf := make([]byte, 128<<10) // which stays in the processor's cache
			for p := range places {
				start, size := m.Files[p.file].at(p.chunk)
				sum, err := sumOf(io.NewSectionReader(files[p.file], start, size), buf)
				if err == nil {
					err = do(p.file, p.chunk, sum)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func checksumOf(data []byte) checksum {
	return newChecksum(crc32.Checksum(data, castagnoli), crc32.ChecksumIEEE(data))
}

// sumOf reads to the end. What is shorter than it should be has another checksum.
func sumOf(r io.Reader, buf []byte) (checksum, error) {
	var c, ieee uint32
	for {
		n, err := r.Read(buf)
		c = crc32.Update(c, castagnoli, buf[:n])
		ieee = crc32.Update(ieee, crc32.IEEETable, buf[:n])
		if err == io.EOF {
			return newChecksum(c, ieee), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// names returns the files of the directory but the manifest, sorted.
func (m *image) names() ([]string, error) {
	entries, err := os.ReadDir(m.path())
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.Name() != manifestName {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

func (m *image) open(name string) (*os.File, error) {
	fd, err := unix.Openat(int(m.dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = damaged("its %s is no file", name)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// create makes a file of the image that is not there yet.
func (m *image) create(name string) (*os.File, error) {
	fd, err := unix.Openat(int(m.dir.Fd()), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "create", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// clear empties the directory.
func (m *image) clear() error {
	entries, err := os.ReadDir(m.path())
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(m.path(), e.Name())))
	}
	return err
}

func damaged(format string, args ...any) error {
	return protocol.Errorf(protocol.KindImage, format, args...)
}

// openImage reads the manifest of an image, with the key that it may be encrypted with. What it says holds when verify has
// returned nil.
func openImage(dir *os.File, key []byte) (*image, error) {
	m := &image{dir: dir}
	f, err := m.open(manifestName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damaged("it has no manifest: it was never finished, or lost it")
	}
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxManifest))
	f.Close()
	if err != nil {
		return nil, err
	}
	body, sum, _ := bytes.Cut(b, []byte{'\n'})
	want := sha256.Sum256(b[:min(len(body)+1, len(b))])
	if string(sum) != hex.EncodeToString(want[:])+"\n" {
		return nil, damaged("its manifest does not have the checksum that was written with it")
	}
	var outer manifest
	if err := json.Unmarshal(body, &outer); err != nil {
		return nil, damaged("its manifest cannot be read: %w", err)
	}
	if outer.Version != manifestVersion {
		return nil, protocol.Errorf(protocol.KindUnsupported, "the image has version %d and this build of Warren reads version %d", outer.Version, manifestVersion)
	}
	if outer.KeyID != "" {
		if m.seals, err = openSealer(key, outer.KeyID, outer.Salt); err != nil {
			return nil, err
		}
		if outer.Image, err = m.seals.openManifest(outer.Nonce, outer.Box); err != nil {
			return nil, damaged("its manifest cannot be decrypted with the key of its name")
		}
	}
	if err := json.Unmarshal(outer.Image, m); err != nil {
		return nil, damaged("its manifest cannot be read: %w", err)
	}
	for i := range m.Files {
		if f := &m.Files[i]; f.Salt != nil {
			if f.seals, err = openSealer(key, outer.KeyID, f.Salt); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

// memory is how many bytes of memory what was in the sandbox had.
func (m *image) memory() int64 {
	if m.Pages > 0 {
		return m.Pages
	}
	for _, f := range m.Files {
		if f.Name == pagesName {
			return f.Size
		}
	}
	return 0
}

// apart says whether the files are not as gVisor reads them.
func (m *image) apart() bool { return m.Packed || m.Pages > 0 }

// verify compares every byte of an image with the checksums, and unpacks it if gVisor is to read it.
func (m *image) verify(ctx context.Context) error {
	names, err := m.names()
	if err != nil {
		return err
	}
	if len(names) != len(m.Files) {
		return damaged("it has %d files instead of %d", len(names), len(m.Files))
	}
	files := make([]*os.File, len(m.Files))
	defer closeAllFiles(files)
	for i, want := range m.Files {
		files[i], err = m.open(want.Name)
		if errors.Is(err, fs.ErrNotExist) {
			return damaged("its file %s is missing", want.Name)
		}
		if err != nil {
			return err
		}
		fi, err := files[i].Stat()
		if err != nil {
			return err
		}
		if m.Transient == "" || m.Packed {
			if n := chunks(want.Size); n != int64(len(want.Chunks)) || want.Packed != nil && n != int64(len(want.Packed)) {
				return damaged("its manifest has %d checksums for %s", len(want.Chunks), want.Name)
			}
		}
		if fi.Size() != want.stored() {
			return damaged("its file %s has %d bytes instead of %d", want.Name, fi.Size(), want.stored())
		}
	}
	switch {
	case m.unpacked != nil:
		err = m.unpack(ctx, files)
	case m.Transient != "" && !m.Packed:
		return nil
	default:
		err = m.eachChunk(ctx, files, func(file, chunk int, sum checksum) error { return m.compare(file, chunk, sum) })
	}
	if errors.Is(err, unix.EIO) {
		return damaged("it cannot be read: %w", err)
	}
	return err
}

func (m *image) compare(file, chunk int, sum checksum) error {
	if f := m.Files[file]; f.Chunks[chunk] != sum {
		return damaged("its file %s does not have the checksum that was written with it, %d MiB from its start", f.Name, chunk*chunkSize>>20)
	}
	return nil
}

// fits says whether this host can go on from the image with the spec, and if not why.
func (m *image) fits(build, keeper string, spec *protocol.Spec) error {
	if m.Transient != "" && m.Transient != keeper {
		return damaged("it was made to be restored at once, by a keeper that has ended")
	}
	no := func(format string, args ...any) error {
		return protocol.Errorf(protocol.KindUnsupported, "the image cannot be resumed here: "+format, args...)
	}
	if m.Arch != runtime.GOARCH {
		return no("it was made on %s, and this machine is %s", m.Arch, runtime.GOARCH)
	}
	if m.Runtime != build {
		return no("it was made by another build of warren-runtime (%.12s, this is %.12s), and memory images do not pass from build to build", m.Runtime, build)
	}
	if m.Base.Guest != spec.GuestBuild {
		return no("it was made with another build of warren-guest (%.12s, this is %.12s), which runs in it", m.Base.Guest, spec.GuestBuild)
	}
	have, err := cpuFeatures()
	if err != nil {
		return err
	}
	var missing []string
	for _, f := range m.CPU {
		if _, ok := slices.BinarySearch(have, f); !ok {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return no("programs in it may use processor features that this machine lacks: %s", strings.Join(missing, " "))
	}
	now := baseOf(spec)
	switch {
	case m.Base.Root != now.Root:
		return no("its root file system is %.24s, and the sandbox would get %.24s", m.Base.Root, now.Root)
	case !slices.Equal(m.Base.Mounts, now.Mounts):
		return no("it was made with mounts on %s, and the sandbox would get %s", strings.Join(m.Base.Mounts, " "), strings.Join(now.Mounts, " "))
	case m.Base.Disk != now.Disk:
		return no("its root overlay has a limit of %s, and the sandbox would get %s", size(m.Base.Disk), size(now.Disk))
	// One with the limit that it had always may, whatever it holds: that it may not would be the end of it.
	case now.Memory < m.Base.Memory && m.memory() > now.Memory:
		return no("it holds %s of memory, and the sandbox may have %s", size(m.memory()), size(now.Memory))
	}
	return nil
}

// cpuFeatures returns what the kernel says that the processor can do, sorted.
func cpuFeatures() ([]string, error) {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		key, value, _ := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); key == "flags" || key == "Features" {
			f := strings.Fields(value)
			slices.Sort(f)
			return slices.Compact(f), nil
		}
	}
	return nil, errors.New("/proc/cpuinfo does not say what the processor can do")
}
