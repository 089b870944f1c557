package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// walker opens directories below a root, one after the other in the order of their names, without following a
// symbolic link, and keeps the way to the last one open.
type walker struct {
	names []string
	fds   []int // fds[0] is the root, fds[i] the directory names[i-1]
}

func newWalker(root string) (*walker, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return &walker{fds: []int{fd}}, nil
}

// dir returns a descriptor of a directory, "." for the root, which is good until the next call.
func (w *walker) dir(name string) (int, error) {
	var parts []string
	if name != "." {
		parts = strings.Split(name, "/")
	}
	n := 0
	for n < len(parts) && n < len(w.names) && parts[n] == w.names[n] {
		n++
	}
	w.drop(n)
	for _, p := range parts[n:] {
		if p == "" || p == "." || p == ".." {
			return -1, unix.ENOENT
		}
		fd, err := unix.Openat(w.fds[len(w.fds)-1], p, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return -1, err
		}
		w.names, w.fds = append(w.names, p), append(w.fds, fd)
	}
	return w.fds[len(w.fds)-1], nil
}

func (w *walker) drop(n int) {
	for len(w.names) > n {
		unix.Close(w.fds[len(w.fds)-1])
		w.fds, w.names = w.fds[:len(w.fds)-1], w.names[:len(w.names)-1]
	}
}

func (w *walker) close() {
	w.drop(0)
	unix.Close(w.fds[0])
}

// maxDepth is how many directories deep the host walks with one descriptor each.
const maxDepth = 256

var moved atomic.Uint64

// removeAll removes a directory tree whatever its modes and however deep it is. What is deeper than maxDepth is moved
// up and removed from there, so that neither descriptors nor the stack run out.
func removeAll(name string) error {
	if isSubvolume(name) && volume(ioctlSnapDestroy, name, 0) == nil {
		return nil
	}
	top, err := unix.Open(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			return os.Remove(name)
		}
		if !errors.Is(err, unix.EACCES) {
			return &fs.PathError{Op: "open", Path: name, Err: err}
		}
		if err := os.Chmod(name, 0o700); err != nil {
			return err
		}
		if top, err = unix.Open(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
			return &fs.PathError{Op: "open", Path: name, Err: err}
		}
	}
	f := os.NewFile(uintptr(top), name)
	defer f.Close()
	if err := empty(f, f, 0); err != nil {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return os.Remove(name)
}

// empty removes everything in d.
func empty(d, top *os.File, depth int) error {
	fd := int(d.Fd())
	for again := true; again; {
		again = false
		if _, err := d.Seek(0, 0); err != nil {
			return err
		}
		for {
			names, err := d.Readdirnames(1024)
			for _, n := range names {
				again = true
				if err := remove(fd, n, top, depth); err != nil {
					return err
				}
			}
			if err != nil || len(names) == 0 {
				break
			}
		}
	}
	return nil
}

func remove(dir int, name string, top *os.File, depth int) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if errors.Is(err, unix.EACCES) {
		unix.Fchmod(dir, 0o700)
		if err = unix.Unlinkat(dir, name, 0); err == nil {
			return nil
		}
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if depth >= maxDepth {
		return unix.Renameat(dir, name, int(top.Fd()), fmt.Sprintf("%smoved-%d-%d", tmpPrefix, os.Getpid(), moved.Add(1)))
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.EACCES) {
		unix.Fchmodat(dir, name, 0o700, 0)
		fd, err = unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return err
	}
	sub := os.NewFile(uintptr(fd), name)
	err = empty(sub, top, depth+1)
	sub.Close()
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
