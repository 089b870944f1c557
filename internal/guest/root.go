package guest

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// root writes a layer of an OCI image over the root file system, for a sandbox that begins with files of another. It
// comes before anything but the guest runs.
func (s *Server) root(w http.ResponseWriter, r *http.Request) {
	if !fromHost(w, r, "write the root") {
		return
	}
	l := layer{root: "/", made: map[string]bool{}}
	if err := l.apply(r.Body); err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// notRoot are what the kernel and the host mount over the root. A layer has nothing in them, but perhaps names them.
var notRoot = []string{"/proc", "/sys", "/dev", "/workspace", "/home/user", "/.warren"}

// layer is a layer that is being applied.
type layer struct {
	root string
	made map[string]bool // what it has made, which its own marks do not remove
	dirs []*tar.Header   // whose times are set at the end
}

func (l *layer) apply(r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the layer: %w", err)
		}
		if err := l.entry(h, tr); err != nil {
			return fmt.Errorf("%q: %w", h.Name, err)
		}
	}
	for i := len(l.dirs) - 1; i >= 0; i-- {
		h := l.dirs[i]
		_ = os.Chtimes(l.path(h.Name), time.Time{}, h.ModTime)
	}
	return nil
}

// path is where a name of the layer lies; "..", wherever it stands, leads no higher than the root.
func (l *layer) path(name string) string { return path.Join(l.root, path.Clean("/"+name)) }

func (l *layer) entry(h *tar.Header, content io.Reader) error {
	name := path.Clean("/" + h.Name)
	for _, n := range notRoot {
		if name == n || strings.HasPrefix(name, n+"/") {
			return nil
		}
	}
	if name == "/" {
		return nil
	}
	at := l.path(name)
	dir, base := path.Split(name)
	switch {
	case base == opaque:
		return l.clear(path.Clean(dir))
	case strings.HasPrefix(base, whiteout):
		return os.RemoveAll(l.path(dir + strings.TrimPrefix(base, whiteout)))
	}
	l.made[name] = true
	if err := os.MkdirAll(path.Dir(at), 0o755); err != nil {
		return err
	}
	mode := h.FileInfo().Mode()
	if fi, err := os.Lstat(at); err == nil && !(fi.IsDir() && h.Typeflag == tar.TypeDir) {
		if err := os.RemoveAll(at); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := os.Mkdir(at, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		l.dirs = append(l.dirs, h)
	case tar.TypeReg:
		f, err := os.OpenFile(at, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, content)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := os.Symlink(h.Linkname, at); err != nil {
			return err
		}
	case tar.TypeLink:
		return os.Link(l.path(h.Linkname), at)
	case tar.TypeFifo:
		if err := unix.Mkfifo(at, 0o600); err != nil {
			return err
		}
	default:
		return nil // a device, which a sandbox has of its own
	}
	if err := os.Lchown(at, h.Uid, h.Gid); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	if err := os.Chmod(at, mode); err != nil { // after the owner, whose change clears set-uid
		return err
	}
	for k, v := range h.PAXRecords {
		if attr, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok {
			_ = unix.Lsetxattr(at, attr, []byte(v), 0) // not every file system takes every one
		}
	}
	return os.Chtimes(at, time.Time{}, h.ModTime)
}

// clear removes what a directory had before this layer.
func (l *layer) clear(dir string) error {
	entries, err := os.ReadDir(l.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, d := range entries {
		if name := path.Join(dir, d.Name()); !l.made[name] {
			err = errors.Join(err, os.RemoveAll(l.path(name)))
		}
	}
	return err
}
