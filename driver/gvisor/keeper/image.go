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
const manifestVersion = 1

// maxManifest bounds what is read of a manifest; a real one has some kilobytes.
const maxManifest = 1 << 20

// image is the manifest of an image, and its directory while it is open.
type image struct {
	Version int       `json:"version"`
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

	dir *os.File
}

// imageFile is one file beside the manifest.
type imageFile struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// base is what an image relies on and does not hold: files that are mapped into memory or open.
type base struct {
	Root   string   `json:"root"`
	Guest  string   `json:"guest"`
	Disk   int64    `json:"disk"`
	Mounts []string `json:"mounts,omitempty"`
}

func baseOf(spec *protocol.Spec) base {
	b := base{Root: spec.Root, Guest: spec.GuestBuild, Disk: spec.Limits.Disk}
	for _, m := range spec.Mounts {
		b.Mounts = append(b.Mounts, m.Target)
	}
	return b
}

// path names the image's directory for gVisor, which takes a name.
func (m *image) path() string { return fmt.Sprintf("/proc/self/fd/%d", m.dir.Fd()) }

// seal makes what was written into the directory an image: modes, checksums, the manifest, and all of it on disk. It returns
// the size.
func (m *image) seal(ctx context.Context) (int64, error) {
	names, err := m.names()
	if err != nil {
		return 0, err
	}
	m.Files = make([]imageFile, len(names))
	g, ctx := errgroup.WithContext(ctx)
	for i, name := range names {
		f, err := m.open(name)
		if err != nil {
			return 0, errors.Join(err, g.Wait())
		}
		defer f.Close()
		if err := f.Chmod(0o600); err != nil {
			return 0, errors.Join(err, g.Wait())
		}
		g.Go(f.Sync) // while it is read
		g.Go(func() (err error) {
			m.Files[i], err = checksum(ctx, f, name)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	b, err := json.Marshal(m)
	if err != nil {
		return 0, err
	}
	b = append(b, '\n')
	sum := sha256.Sum256(b)
	b = append(hex.AppendEncode(b, sum[:]), '\n')
	fd, err := unix.Openat(int(m.dir.Fd()), manifestName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), manifestName)
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return 0, err
	}
	if err := m.dir.Sync(); err != nil {
		return 0, err
	}
	size := int64(len(b))
	for _, f := range m.Files {
		size += f.Size
	}
	return size, nil
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
	fd, err := unix.Openat(int(m.dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
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

// checksum reads a file to its end.
func checksum(ctx context.Context, f *os.File, name string) (imageFile, error) {
	h := sha256.New()
	buf := make([]byte, 1<<20)
	var size int64
	for {
		if err := ctx.Err(); err != nil {
			return imageFile{}, err
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		size += int64(n)
		if err == io.EOF {
			return imageFile{name, size, hex.EncodeToString(h.Sum(nil))}, nil
		}
		if err != nil {
			return imageFile{}, err
		}
	}
}

func damaged(format string, args ...any) error {
	return protocol.Errorf(protocol.KindImage, format, args...)
}

// openImage reads the manifest of an image and compares every byte of it with the checksums.
func openImage(ctx context.Context, dir *os.File) (*image, error) {
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
	if err := json.Unmarshal(body, m); err != nil {
		return nil, damaged("its manifest cannot be read: %w", err)
	}
	if m.Version != manifestVersion {
		return nil, protocol.Errorf(protocol.KindUnsupported, "the image has version %d and this build of Warren reads version %d", m.Version, manifestVersion)
	}
	names, err := m.names()
	if err != nil {
		return nil, err
	}
	if len(names) != len(m.Files) {
		return nil, damaged("it has %d files instead of %d", len(names), len(m.Files))
	}
	g, ctx := errgroup.WithContext(ctx)
	for _, want := range m.Files {
		g.Go(func() error {
			f, err := m.open(want.Name)
			if errors.Is(err, fs.ErrNotExist) {
				return damaged("its file %s is missing", want.Name)
			}
			if err != nil {
				return err
			}
			defer f.Close()
			have, err := checksum(ctx, f, want.Name)
			switch {
			case errors.Is(err, unix.EIO):
				return damaged("its file %s cannot be read", want.Name)
			case err != nil:
				return err
			case have.Size != want.Size:
				return damaged("its file %s has %d bytes instead of %d", want.Name, have.Size, want.Size)
			case have != want:
				return damaged("its file %s does not have the checksum that was written with it", want.Name)
			}
			return nil
		})
	}
	return m, g.Wait()
}

// fits says whether this host can go on from the image with the spec, and if not why.
func (m *image) fits(build string, spec *protocol.Spec) error {
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
