//go:build linux

package keeper

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// mergedDir looks at overlay layers as overlayfs will show them, before there is an overlay. It is needed to make
// mount points: a directory made in the topmost layer takes the place of what the image has at that name, so its
// parents must look as they do in the image, and no symbolic link may be replaced.
//
// Paths are walked a component at a time relative to descriptors, and links are resolved here, so that an image
// cannot lead the walk out of its layers.
type mergedDir struct {
	layers []int // O_PATH descriptors, topmost first
}

// entry is what the merged view has at a path.
type entry struct {
	// path has no symbolic link in it.
	path string
	// exists is false for what is missing; then path is where it would be.
	exists bool
	stat   unix.Stat_t
}

func (e *entry) isDir() bool { return e.exists && e.stat.Mode&unix.S_IFMT == unix.S_IFDIR }

// lookup resolves name as a process in the sandbox would.
func (m *mergedDir) lookup(name string) (*entry, error) {
	todo := components(name)
	links := 0
	type level struct {
		name string
		fds  []int // of the directory, in each layer that has it
	}
	root := level{fds: m.layers}
	stack := []level{root}
	defer func() {
		for _, l := range stack[1:] {
			closeAll(l.fds)
		}
	}()
	e := &entry{path: "/", exists: true}
	if err := unix.Fstat(m.layers[0], &e.stat); err != nil {
		return nil, err
	}
	for len(todo) > 0 {
		c := todo[0]
		todo = todo[1:]
		if c == ".." {
			if len(stack) > 1 {
				closeAll(stack[len(stack)-1].fds)
				stack = stack[:len(stack)-1]
			}
			continue
		}
		here := stack[len(stack)-1]
		var at string
		for _, l := range stack[1:] {
			at += "/" + l.name
		}
		found, st, fds, link, err := lookupIn(here.fds, c)
		if err != nil {
			return nil, err
		}
		if link != "" {
			closeAll(fds)
			if links++; links > 40 {
				return nil, protocol.Errorf(protocol.KindInvalid, "%s: too many symbolic links in the image", name)
			}
			if path.IsAbs(link) {
				for _, l := range stack[1:] {
					closeAll(l.fds)
				}
				stack = stack[:1]
			}
			todo = append(components(link), todo...)
			continue
		}
		e = &entry{path: at + "/" + c, exists: found, stat: st}
		if !e.isDir() {
			closeAll(fds)
			if len(todo) > 0 {
				// What would be below it; ".." in a missing part stays lexical.
				e = &entry{path: path.Join(append([]string{"/", at, c}, todo...)...)}
				if found {
					return nil, protocol.Errorf(protocol.KindInvalid, "%s: %s is no directory in the image", name, at+"/"+c)
				}
			}
			return e, nil
		}
		stack = append(stack, level{c, fds})
	}
	// A path that ends in ".." or a link to a directory.
	var at string
	for _, l := range stack[1:] {
		at += "/" + l.name
	}
	if at == "" {
		at = "/"
	}
	e.path = at
	if err := unix.Fstat(stack[len(stack)-1].fds[0], &e.stat); err != nil {
		return nil, err
	}
	e.exists = true
	return e, nil
}

// lookupIn finds a name in a directory merged of fds, topmost first. For a directory it returns descriptors of its parts.
func lookupIn(dirs []int, name string) (found bool, st unix.Stat_t, fds []int, link string, err error) {
	for _, d := range dirs {
		fd, err := unix.Openat(d, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			closeAll(fds)
			return false, st, nil, "", fmt.Errorf("look up %q in a layer: %w", name, err)
		}
		var s unix.Stat_t
		if err := unix.Fstat(fd, &s); err != nil {
			unix.Close(fd)
			closeAll(fds)
			return false, st, nil, "", err
		}
		kind := s.Mode & unix.S_IFMT
		if kind != unix.S_IFDIR {
			if len(fds) > 0 { // below a directory a file does not show
				unix.Close(fd)
				break
			}
			if kind == unix.S_IFCHR && s.Rdev == 0 { // a whiteout
				unix.Close(fd)
				return false, st, nil, "", nil
			}
			if kind == unix.S_IFLNK {
				buf := make([]byte, unix.PathMax)
				n, err := unix.Readlinkat(fd, "", buf)
				unix.Close(fd)
				if err != nil {
					return false, st, nil, "", err
				}
				return true, s, nil, string(buf[:n]), nil
			}
			unix.Close(fd)
			return true, s, nil, "", nil
		}
		if len(fds) == 0 {
			st = s
		}
		fds = append(fds, fd)
		var opaque [1]byte
		if n, err := getxattrFD(fd, "trusted.overlay.opaque", opaque[:]); err == nil && n == 1 && opaque[0] == 'y' {
			break
		}
	}
	return len(fds) > 0, st, fds, "", nil
}

// getxattrFD reads an attribute through /proc, because the kernel refuses it on an O_PATH descriptor.
func getxattrFD(fd int, name string, buf []byte) (int, error) {
	return unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), name, buf)
}

func components(p string) []string {
	var out []string
	for _, c := range strings.Split(p, "/") {
		if c != "" && c != "." {
			out = append(out, c)
		}
	}
	return out
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// topLayer is a layer of our own above the image: mount points that the image lacks, and the few files that differ by
// sandbox.
type topLayer struct {
	dir    string // on the host
	below  mergedDir
	owner  int // host id of the sandbox's root
	isMade map[string]bool
}

// mkdirAll makes a directory and its parents with the looks that they have in the image, or else mode, and returns
// its path without links.
func (t *topLayer) mkdirAll(name string, mode uint32) (string, error) {
	e, err := t.below.lookup(name)
	if err != nil {
		return "", err
	}
	if e.exists && !e.isDir() {
		return "", protocol.Errorf(protocol.KindInvalid, "%s is no directory in the image", name)
	}
	return e.path, t.mkdirResolved(e.path, mode)
}

func (t *topLayer) mkdirResolved(name string, mode uint32) error {
	if name == "/" || t.isMade[name] {
		return nil
	}
	if err := t.mkdirResolved(path.Dir(name), 0o755); err != nil {
		return err
	}
	e, err := t.below.lookup(name)
	if err != nil {
		return err
	}
	uid, gid := t.owner, t.owner
	if e.isDir() {
		mode = e.stat.Mode & 0o7777
		uid, gid = int(e.stat.Uid), int(e.stat.Gid)
	}
	at := t.dir + name
	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}
	if err := os.Lchown(at, uid, gid); err != nil {
		return err
	}
	if err := unix.Chmod(at, mode); err != nil {
		return err
	}
	t.isMade[name] = true
	return nil
}

// write makes a file, in place of the image's.
func (t *topLayer) write(name, content string, mode os.FileMode) error {
	dir, err := t.mkdirAll(path.Dir(name), 0o755)
	if err != nil {
		return err
	}
	at := t.dir + path.Join(dir, path.Base(name))
	if err := os.WriteFile(at, []byte(content), mode); err != nil {
		return err
	}
	if err := os.Lchown(at, t.owner, t.owner); err != nil {
		return err
	}
	t.isMade[path.Join(dir, path.Base(name))] = true
	return nil
}

// point makes a mount point, a directory or an empty file, where the image has none of that kind.
func (t *topLayer) point(name string, dir bool) error {
	e, err := t.below.lookup(name)
	if err != nil {
		return err
	}
	if e.exists && e.isDir() == dir || t.isMade[e.path] {
		return nil
	}
	if e.exists {
		return protocol.Errorf(protocol.KindInvalid, "%s is a file in the image where a directory is to be mounted, or the other way round", name)
	}
	if dir {
		return t.mkdirResolved(e.path, 0o755)
	}
	return t.write(e.path, "", 0o644)
}
