//go:build linux

package docker

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// writeLayer writes a layer's directory as a tar of the OCI image form: ids as they are in the sandbox, and overlayfs's
// marks for removed names as files that begin with ".wh.". The same directory gives the same bytes.
func writeLayer(ctx context.Context, w io.Writer, l driver.Layer) error {
	t := &layerTar{tar: tar.NewWriter(w), layer: l, links: map[inode]string{}, buf: make([]byte, 1<<20)}
	err := filepath.WalkDir(l.Dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		name, err := filepath.Rel(l.Dir, path)
		if err != nil {
			return err
		}
		return t.add(path, name)
	})
	if err != nil {
		return err
	}
	return t.tar.Close()
}

type inode struct{ dev, ino uint64 }

type layerTar struct {
	tar   *tar.Writer
	layer driver.Layer
	// links has the first name of each file that has several.
	links map[inode]string
	buf   []byte
}

// add writes one entry, and for a directory that hides what is below it the mark of that.
func (t *layerTar) add(path, name string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: t.id(st.Uid), Gid: t.id(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, 0), Format: tar.FormatPAX,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		if name == "." {
			h.Name = "./"
		}
	case unix.S_IFREG:
		if st.Nlink > 1 {
			at := inode{st.Dev, st.Ino}
			if first, ok := t.links[at]; ok {
				h.Typeflag, h.Linkname = tar.TypeLink, first
				return t.tar.WriteHeader(h)
			}
			t.links[at] = name
		}
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case unix.S_IFCHR, unix.S_IFBLK:
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
			dir, base := filepath.Split(name)
			h.Name, h.Typeflag, h.Mode = dir+".wh."+base, tar.TypeReg, 0o600
			return t.tar.WriteHeader(h)
		}
		return nil // devices are the container's own
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return nil // sockets are nothing without who listens
	}
	if err := t.attributes(h, path); err != nil {
		return err
	}
	if err := t.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if h.Typeflag == tar.TypeReg {
		return t.content(path, h.Size)
	}
	if h.Typeflag == tar.TypeDir && opaque(path) {
		return t.tar.WriteHeader(&tar.Header{Name: filepath.Join(name, ".wh..wh..opq"), Typeflag: tar.TypeReg, Mode: 0o600, ModTime: h.ModTime, Format: tar.FormatPAX})
	}
	return nil
}

// id is an id in the sandbox; what lies outside its range belongs to nobody there.
func (t *layerTar) id(on uint32) int {
	if in := on - t.layer.IDBase; in < driver.IDCount {
		return int(in)
	}
	return 65534
}

func (t *layerTar) content(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{t.tar}, io.LimitReader(f, size), t.buf)
	if err == nil && n < size {
		return fmt.Errorf("a file of the layer became shorter while it was read: %w", warren.ErrUnavailable)
	}
	return err
}

// attributes copies those that mean something in a container: file capabilities and what users set.
func (t *layerTar) attributes(h *tar.Header, path string) error {
	if h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir {
		return nil
	}
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if errors.Is(err, unix.ENOTSUP) || n == 0 {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "listxattr", Path: path, Err: err}
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if name != "security.capability" && !strings.HasPrefix(name, "user.") {
			continue
		}
		value := make([]byte, 64<<10)
		m, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return &fs.PathError{Op: "getxattr", Path: path, Err: err}
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords["SCHILY.xattr."+name] = string(value[:m])
	}
	return nil
}

func opaque(path string) bool {
	var b [1]byte
	n, err := unix.Lgetxattr(path, "trusted.overlay.opaque", b[:])
	return err == nil && n == 1 && b[0] == 'y'
}
