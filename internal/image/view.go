package image

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"golang.org/x/sys/unix"
)

// view reads files of an image through its layers as overlayfs would show them: the topmost wins, whiteouts and opaque
// directories hide what is below, symbolic links are followed inside the image and nowhere else. Nothing is mounted.
type view struct {
	// layers, topmost first.
	layers []*tree.Tree
	base   uint32
}

// openView opens the layers, lowest first, as records list them.
func (s *Store) openView(diffIDs []string) (*view, error) {
	v := &view{base: s.base}
	for i := len(diffIDs) - 1; i >= 0; i-- {
		t, err := tree.Open(s.layerDir(diffIDs[i]))
		if err != nil {
			v.close()
			return nil, fmt.Errorf("image store: %w", err)
		}
		v.layers = append(v.layers, t)
	}
	return v, nil
}

func (v *view) close() {
	for _, t := range v.layers {
		t.Close()
	}
}

// node is what a name stands for.
type node struct {
	// path is canonical: no symbolic link is on the way to it.
	path string
	// in are the layers that hold it, topmost first: several for a directory, one for everything else.
	in []*tree.Tree
	st unix.Stat_t
}

func (n *node) kind() uint32 { return n.st.Mode & unix.S_IFMT }

// maxLinks is how many symbolic links are followed, as in the kernel.
const maxLinks = 40

// lookup finds a name; follow says whether a symbolic link at its end is followed. What does not exist matches
// [fs.ErrNotExist].
func (v *view) lookup(name string, follow bool) (*node, error) {
	missing := &fs.PathError{Op: "lookup", Path: name, Err: fs.ErrNotExist}
	rest := strings.Split(name, "/")
	at := v.top()
	links := 0
	for len(rest) > 0 {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			up, err := v.lookup(path.Dir(at.path), false)
			if err != nil {
				return nil, err
			}
			at = up
			continue
		}
		if at == nil || at.kind() != unix.S_IFDIR {
			return nil, missing
		}
		next, err := v.step(at, part)
		if err != nil {
			return nil, err
		}
		if next == nil {
			return nil, missing
		}
		if next.kind() == unix.S_IFLNK && (follow || len(rest) > 0) {
			if links++; links > maxLinks {
				return nil, fmt.Errorf("%w: too many symbolic links at %s", warren.ErrInvalid, tree.Quote(name))
			}
			target, err := next.in[0].Readlink(next.path)
			if err != nil {
				return nil, err
			}
			if len(target)+len(path.Join(rest...)) > tree.MaxName {
				return nil, missing
			}
			if path.IsAbs(target) {
				at = v.top()
			}
			rest = append(strings.Split(target, "/"), rest...)
			continue
		}
		at = next
	}
	return at, nil
}

func (v *view) top() *node {
	return &node{path: ".", in: v.layers, st: unix.Stat_t{Mode: unix.S_IFDIR | 0o755, Uid: v.base, Gid: v.base}}
}

// step finds one name in a directory, nil when there is none.
func (v *view) step(dir *node, part string) (*node, error) {
	if strings.ContainsRune(part, 0) || len(part) > tree.MaxComponent {
		return nil, nil
	}
	name := path.Join(dir.path, part)
	var n *node
	for _, t := range dir.in {
		st, err := t.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the image: %w", err)
		}
		isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0: // removed here
			return n, nil
		case n == nil:
			n = &node{path: name, in: []*tree.Tree{t}, st: st}
		case isDir:
			n.in = append(n.in, t)
		}
		if !isDir {
			return n, nil
		}
		hides, err := isOpaque(t, name)
		if err != nil {
			return nil, err
		}
		if hides {
			return n, nil
		}
	}
	return n, nil
}

func isOpaque(t *tree.Tree, name string) (bool, error) {
	fd, err := t.DirectoryStrict(name)
	if err != nil {
		return false, fmt.Errorf("read the image: %w", err)
	}
	defer unix.Close(fd)
	buf := make([]byte, 8)
	// A descriptor opened with O_PATH takes no attributes by itself.
	n, err := unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), "trusted.overlay.opaque", buf)
	if err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.ENOTSUP) {
		return false, fmt.Errorf("read the image: %w", err)
	}
	return err == nil && string(buf[:n]) == "y", nil
}

// readFile returns a file's content and what it is. One that does not exist matches [fs.ErrNotExist].
func (v *view) readFile(name string) ([]byte, *node, error) {
	n, err := v.lookup(name, true)
	if err != nil {
		return nil, nil, err
	}
	if n.kind() != unix.S_IFREG {
		return nil, nil, fmt.Errorf("%w: the image's /%s is not a file", warren.ErrInvalid, name)
	}
	b, err := n.in[0].ReadFile(n.path, maxEtc)
	return b, n, err
}

// maxEtc is how large an image's passwd may be.
const maxEtc = 8 << 20

// exists says whether a name leads to something.
func (v *view) exists(name string) (bool, error) {
	_, err := v.lookup(name, true)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
