// Package tree reaches into a directory tree whose names and symbolic links nobody has checked.
//
// A [Tree] holds a descriptor of its top directory and resolves every name below it in the kernel, with openat2: an
// absolute symbolic link starts again at the top, ".." stops there, and no magic link of /proc is
// followed. A name from an archive or an image is therefore never joined to a path of the host, and a tree that changes
// meanwhile cannot lead outside.
package tree

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren"
	"golang.org/x/sys/unix"
)

const (
	// MaxName is how long a name in a tree may be, in bytes: what the kernel takes in one call.
	MaxName = unix.PathMax - 1
	// MaxComponent is how long one part of it may be.
	MaxComponent = 255
	// MaxDepth is how many parts it may have. Removing a tree needs a descriptor for each.
	MaxDepth = 256
)

// Clean makes a name of an archive or of an image's own files canonical: relative to the top, without "." and doubled
// slashes; the top itself is ".". A name with a ".." in it is refused and not resolved, for there is no honest reason for one.
func Clean(name string) (string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", fmt.Errorf("%w: a name with a NUL byte", warren.ErrInvalid)
	}
	if len(name) > MaxName {
		return "", fmt.Errorf("%w: a name of %d bytes; at most %d are possible", warren.ErrInvalid, len(name), MaxName)
	}
	parts := make([]string, 0, 8)
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return "", fmt.Errorf("%w: name %s has a \"..\" in it", warren.ErrInvalid, Quote(name))
		case len(part) > MaxComponent:
			return "", fmt.Errorf("%w: name %s has a part of %d bytes; at most %d are possible", warren.ErrInvalid, Quote(name), len(part), MaxComponent)
		default:
			parts = append(parts, part)
		}
	}
	if len(parts) > MaxDepth {
		return "", fmt.Errorf("%w: name %s is %d directories deep; at most %d are allowed", warren.ErrInvalid, Quote(name), len(parts), MaxDepth)
	}
	if len(parts) == 0 {
		return ".", nil
	}
	return strings.Join(parts, "/"), nil
}

// Quote makes a hostile name fit for a message: escaped and short.
func Quote(name string) string {
	const most = 120
	if len(name) > most {
		return strconv.QuoteToASCII(name[:most]) + "…"
	}
	return strconv.QuoteToASCII(name)
}

// Tree is a directory and everything below it.
type Tree struct{ dir *os.File }

// Open opens the directory at the top, which must not be a symbolic link itself.
func Open(dir string) (*Tree, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	return &Tree{dir: os.NewFile(uintptr(fd), dir)}, nil
}

// Close releases the descriptor.
func (t *Tree) Close() error { return t.dir.Close() }

// Dir is the top directory. It belongs to the tree.
func (t *Tree) Dir() *os.File { return t.dir }

// resolve opens a clean name.
func (t *Tree) resolve(name string, flags int, how uint64) (int, error) {
	h := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | how}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(int(t.dir.Fd()), name, &h)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN) && try < 32: // something was renamed while the kernel looked
		case errors.Is(err, unix.ENOSYS):
			return -1, fmt.Errorf("%w: this kernel has no openat2, which confines names of images (Linux 5.6 or later is needed)", errors.ErrUnsupported)
		default:
			return -1, err
		}
	}
}

// Directory opens a directory with O_PATH, following symbolic links inside the tree.
func (t *Tree) Directory(name string) (int, error) {
	return t.resolve(name, unix.O_PATH|unix.O_DIRECTORY, 0)
}

// DirectoryStrict opens a directory with O_PATH and refuses any symbolic link on the way with ELOOP.
func (t *Tree) DirectoryStrict(name string) (int, error) {
	return t.resolve(name, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
}

// Lstat describes a name without following its last part.
func (t *Tree) Lstat(name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := t.resolve(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return st, &fs.PathError{Op: "lstat", Path: name, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &st); err != nil {
		return st, &fs.PathError{Op: "lstat", Path: name, Err: err}
	}
	return st, nil
}

// Readlink returns the target of a symbolic link.
func (t *Tree) Readlink(name string) (string, error) {
	fd, err := t.resolve(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: err}
	}
	defer unix.Close(fd)
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: err}
	}
	return string(buf[:n]), nil
}

// OpenFile opens a regular file for reading, following symbolic links inside the tree. Anything else, a FIFO or a device, is
// refused and not waited for.
func (t *Tree) OpenFile(name string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := t.resolve(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, st, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, st, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		f.Close()
		return nil, st, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
	}
	return f, st, nil
}

// ReadFile reads a regular file of at most limit bytes.
func (t *Tree) ReadFile(name string, limit int64) ([]byte, error) {
	f, _, err := t.OpenFile(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%w: file %s is larger than %d bytes", warren.ErrInvalid, Quote(name), limit)
	}
	return b, nil
}

// ReadDir lists a directory, following symbolic links inside the tree.
func (t *Tree) ReadDir(name string) ([]fs.DirEntry, error) {
	fd, err := t.resolve(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	list, err := f.ReadDir(-1)
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errors.Unwrap(err)}
	}
	return list, nil
}

// Target makes the target of the symbolic link name absolute, by its letters only.
func Target(name, target string) string {
	if path.IsAbs(target) {
		return path.Clean(target)
	}
	return path.Join("/", path.Dir(name), target)
}
