package workspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
)

// The ways to copy a workspace, best first.
const (
	bySnapshot = "btrfs snapshot"
	byReflink  = "reflink"
	byCopy     = "copy"
)

// copier is how directories of workspaces are made and copied on the file system that holds them.
type copier struct{ method string }

// CopyMethod returns how Copy works here: "btrfs snapshot", "reflink" or "copy".
func (s *Store) CopyMethod() string { return s.copier.method }

// findCopier tries on the directory itself what the file system can do.
func findCopier(dir string) (copier, error) {
	probe, err := os.MkdirTemp(dir, tmpPrefix+"probe-")
	if err != nil {
		return copier{}, err
	}
	defer removeAll(probe)
	a, b := filepath.Join(probe, "a"), filepath.Join(probe, "b")
	if subvolume(a) == nil {
		err := snapshot(a, b)
		removeAll(b)
		removeAll(a)
		if err == nil {
			return copier{bySnapshot}, nil
		}
	}
	if err := os.WriteFile(a, make([]byte, 8192), 0o600); err != nil {
		return copier{}, err
	}
	from, err := os.Open(a)
	if err != nil {
		return copier{}, err
	}
	defer from.Close()
	to, err := os.Create(b)
	if err != nil {
		return copier{}, err
	}
	defer to.Close()
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return copier{byReflink}, nil
	}
	return copier{byCopy}, nil
}

// mkdir makes the directory of a workspace.
func (c copier) mkdir(dir string) error {
	if c.method == bySnapshot {
		if err := subvolume(dir); err != nil {
			return err
		}
	} else if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.Chmod(dir, 0o711)
}

// Copy makes workspace to as an independent copy of from: files, home, base and last commit. A sandbox may be working
// in from; files that vanish while they are copied are left out. It returns the method.
func (s *Store) Copy(ctx context.Context, from, to warren.WorkspaceID) (method string, err error) {
	c, err := s.beginCopy(ctx, from, to, copyOptions{})
	if err != nil {
		return "", err
	}
	defer c.Abort()
	if err := c.Finish(ctx); err != nil {
		return "", err
	}
	return c.Commit(ctx)
}

type fileID struct{ dev, ino uint64 }

// treeCopy copies one tree at a time by descriptors that follow no symbolic link.
type treeCopy struct {
	ctx context.Context
	// links are the first copies of files with several names; the names are below to.
	links   map[fileID]string
	to      int
	reflink bool
	// shared, when set, is an earlier copy: what has not changed since then is linked to it instead of copied.
	shared *stamps
	// stamps, when set, take down what is copied, so that it shows later what has changed.
	stamps *stamps
}

// maxCopyDepth is how deep a tree may be that is copied or measured: each level holds two descriptors, or three.
const maxCopyDepth = 1024

// tree copies a tree, or with update brings an earlier copy of it, with its stamps, up to date. base is where the
// earlier copy is that is shared.
func (t *treeCopy) tree(from, to, base string, update bool) error {
	src, err := unix.Open(from, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: from, Err: err}
	}
	f := os.NewFile(uintptr(src), from)
	defer f.Close()
	if !update {
		if err := unix.Mkdir(to, 0o700); err != nil {
			return &os.PathError{Op: "mkdir", Path: to, Err: err}
		}
	}
	dst, err := unix.Open(to, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: to, Err: err}
	}
	defer unix.Close(dst)
	old := -1
	if base != "" && t.shared != nil {
		if old, err = unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			defer unix.Close(old)
		} else {
			old = -1
		}
	}
	t.to = dst
	clear(t.links)
	return t.dir(f, place{dst: dst, old: old}, update)
}

// place is where a directory is copied to.
type place struct {
	dst, old int    // descriptors; old is that of the copy that is shared, or -1
	path     string // below the tree, with a slash at its end
	depth    int
}

// dir copies what is in src to a place, and then gives that the attributes of src.
func (t *treeCopy) dir(src *os.File, p place, update bool) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	if p.depth > maxCopyDepth {
		return fmt.Errorf("directories are nested more than %d deep: %w", maxCopyDepth, warren.ErrInvalid)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return err
	}
	var extra map[string]bool // what the copy has and the source has no more
	if update {
		var err error
		if extra, err = namesIn(p.dst); err != nil {
			return err
		}
	}
	for {
		names, err := src.Readdirnames(1024)
		for _, n := range names {
			delete(extra, n)
			if err := t.entry(int(src.Fd()), st.Ino, p, n, update); err != nil {
				if errors.Is(err, unix.ENOENT) {
					continue // vanished meanwhile
				}
				return fmt.Errorf("%s: %w", printable(n), err)
			}
		}
		if err == io.EOF || err == nil && len(names) == 0 {
			break
		}
		if err != nil {
			if errors.Is(err, unix.ENOENT) {
				break
			}
			return err
		}
	}
	for n := range extra {
		if err := removeAt(p.dst, n); err != nil {
			return fmt.Errorf("%s: %w", printable(n), err)
		}
	}
	return attributes(int(src.Fd()), p.dst, &st)
}

func (t *treeCopy) entry(src int, parent uint64, p place, name string, update bool) error {
	var st unix.Stat_t
	if err := unix.Fstatat(src, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if update && errors.Is(err, unix.ENOENT) {
			return removeAt(p.dst, name)
		}
		return err
	}
	id := fileID{uint64(st.Dev), st.Ino}
	kind := st.Mode & unix.S_IFMT
	several := st.Nlink > 1 && kind != unix.S_IFDIR
	if update {
		// A file with several names is made again: which of them its copy has is not taken down.
		if !several && t.stamps.has(&st, parent, name) {
			if kind != unix.S_IFDIR {
				return nil
			}
			return t.subdir(src, p, &st, parent, name, true)
		}
		if err := removeAt(p.dst, name); err != nil {
			return err
		}
	}
	if several {
		if first, ok := t.links[id]; ok && unix.Linkat(t.to, first, p.dst, name, 0) == nil {
			return nil
		}
	}
	var err error
	switch kind {
	case unix.S_IFDIR:
		t.stamps.take(&st, parent, name)
		return t.subdir(src, p, &st, parent, name, false)
	case unix.S_IFREG:
		if !several && p.old >= 0 && t.shared.has(&st, parent, name) && unix.Linkat(p.old, name, p.dst, name, 0) == nil {
			t.stamps.take(&st, parent, name)
			return nil
		}
		err = t.file(src, parent, p.dst, name)
	case unix.S_IFLNK:
		if err = symlink(src, p.dst, name, &st); err == nil {
			t.stamps.take(&st, parent, name)
		}
	case unix.S_IFIFO:
		if err = unix.Mknodat(p.dst, name, unix.S_IFIFO|0o600, 0); err == nil {
			err = attributesAt(p.dst, name, &st)
		}
	default:
		return nil // a socket belongs to a process, and devices have no place in a workspace
	}
	if err == nil && several && len(p.path)+len(name) < unix.PathMax {
		t.links[id] = p.path + name
	}
	return err
}

func (t *treeCopy) subdir(src int, p place, st *unix.Stat_t, parent uint64, name string, update bool) error {
	from, err := openDir(src, name)
	if err != nil {
		return err
	}
	defer from.Close()
	if !update {
		if err := unix.Mkdirat(p.dst, name, 0o700); err != nil {
			return err
		}
	}
	to, err := unix.Openat(p.dst, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("the copy: %w", noVanish(err))
	}
	defer unix.Close(to)
	old := -1
	// A directory that has come here from elsewhere is not that of the earlier copy.
	if p.old >= 0 && t.shared.has(st, parent, name) {
		if old, err = unix.Openat(p.old, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			defer unix.Close(old)
		} else {
			old = -1
		}
	}
	return t.dir(from, place{to, old, p.path + name + "/", p.depth + 1}, update)
}

// noVanish keeps a name that is missing in a copy from counting as one that has vanished in the source.
func noVanish(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w (%v)", warren.ErrState, err)
	}
	return err
}

func openDir(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (t *treeCopy) file(src int, parent uint64, dst int, name string) error {
	fd, err := unix.Openat(src, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(fd), name)
	defer in.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.ENOENT // became something else
	}
	ofd, err := unix.Openat(dst, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(ofd), name)
	err = t.content(in, out, st.Size)
	if err == nil {
		err = attributes(fd, ofd, &st)
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err == nil && st.Nlink == 1 {
		t.stamps.take(&st, parent, name)
	}
	return err
}

// content copies a file's bytes: shared blocks where the file system can, else its data without its holes.
func (t *treeCopy) content(in, out *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	if t.reflink {
		if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
			return nil
		}
		t.reflink = false
	}
	for at := int64(0); at < size; {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // only a hole is left
		}
		if err != nil {
			data = at
		}
		hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil || hole > size {
			hole = size
		}
		if data >= size || hole <= data {
			break
		}
		if _, err := in.Seek(data, io.SeekStart); err != nil {
			return err
		}
		if _, err := out.Seek(data, io.SeekStart); err != nil {
			return err
		}
		n, err := io.CopyN(out, in, min(hole-data, 64<<20))
		if err == io.EOF {
			break // became shorter
		}
		if err != nil {
			return err
		}
		at = data + n
	}
	return out.Truncate(size)
}

// attributes gives an open file owner, mode, times and user attributes of another.
func attributes(from, to int, st *unix.Stat_t) error {
	if os.Geteuid() == 0 {
		if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
	}
	buf := make([]byte, 4096)
	if n, err := unix.Flistxattr(from, buf); err == nil {
		val := make([]byte, 64<<10)
		for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
			if !strings.HasPrefix(name, "user.") {
				continue
			}
			if v, err := unix.Fgetxattr(from, name, val); err == nil {
				if err := unix.Fsetxattr(to, name, val[:v], 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
					return err
				}
			}
		}
	}
	// After chown, which clears set-uid.
	if err := unix.Fchmod(to, st.Mode&0o7777); err != nil {
		return err
	}
	times := [2]unix.Timespec{st.Atim, st.Mtim}
	// utimensat with no name works on the descriptor itself.
	if _, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(to), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// attributesAt does the same for what cannot be opened.
func attributesAt(dir int, name string, st *unix.Stat_t) error {
	if os.Geteuid() == 0 {
		if err := unix.Fchownat(dir, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Fchmodat(dir, name, st.Mode&0o7777, 0); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(dir, name, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

func symlink(src, dst int, name string, st *unix.Stat_t) error {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(src, name, buf)
	if err != nil {
		if errors.Is(err, unix.EINVAL) {
			return unix.ENOENT // became something else
		}
		return err
	}
	if err := unix.Symlinkat(string(buf[:n]), dst, name); err != nil {
		return err
	}
	return attributesAt(dst, name, st)
}

// Size returns the bytes that a workspace takes on disk, without what it borrows. Blocks that a copy shares with its
// source count in both.
func (s *Store) Size(ctx context.Context, id warren.WorkspaceID) (int64, error) {
	total, _, err := s.Usage(ctx, id)
	return total, err
}

// Usage returns the bytes that a workspace takes on disk, and how many of them are in files that other copies have too.
func (s *Store) Usage(ctx context.Context, id warren.WorkspaceID) (total, shared int64, err error) {
	if _, err := s.load(id); err != nil {
		return 0, 0, err
	}
	m := &measure{ctx: ctx, seen: map[fileID]uint64{}}
	if err := m.tree(s.dir(id)); err != nil {
		return 0, 0, fmt.Errorf("size of workspace %s: %w", id, err)
	}
	return m.total, m.shared, nil
}

// measure adds up trees.
type measure struct {
	ctx context.Context
	// entries and bytes are what there is to copy; total and shared what it takes on disk.
	entries, bytes, total, shared int64
	seen                          map[fileID]uint64 // names seen of files with several
	// enough, when set, ends the measuring.
	enough func() bool
}

var errEnough = errors.New("measured enough")

func (m *measure) tree(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	d := os.NewFile(uintptr(fd), dir)
	defer d.Close()
	return m.dir(d, 0)
}

func (m *measure) dir(d *os.File, depth int) error {
	if err := m.ctx.Err(); err != nil {
		return err
	}
	if depth > maxCopyDepth {
		return fmt.Errorf("directories are nested more than %d deep: %w", maxCopyDepth, warren.ErrInvalid)
	}
	for {
		names, err := d.Readdirnames(1024)
		for _, n := range names {
			var st unix.Stat_t
			if unix.Fstatat(int(d.Fd()), n, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
				continue
			}
			m.entries++
			m.bytes += st.Size
			if m.enough != nil && m.enough() {
				return errEnough
			}
			m.add(&st)
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue
			}
			sub, err := openDir(int(d.Fd()), n)
			if err != nil {
				continue
			}
			err = m.dir(sub, depth+1)
			sub.Close()
			if err != nil {
				return err
			}
		}
		if err == io.EOF || err == nil && len(names) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// add counts a file once, and as shared until all its names have been seen.
func (m *measure) add(st *unix.Stat_t) {
	size := st.Blocks * 512
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Nlink <= 1 {
		m.total += size
		return
	}
	id := fileID{uint64(st.Dev), st.Ino}
	m.seen[id]++
	switch n := m.seen[id]; {
	case n == 1:
		m.total += size
		m.shared += size
	case n == uint64(st.Nlink):
		m.shared -= size
	}
}

// volArgs is struct btrfs_ioctl_vol_args.
type volArgs struct {
	fd   int64
	name [4088]byte
}

const (
	ioctlSnapCreate   = 0x50009401
	ioctlSubvolCreate = 0x5000940e
	ioctlSnapDestroy  = 0x5000940f
	// subvolumeInode is the inode of the root of every btrfs subvolume.
	subvolumeInode = 256
)

func subvolume(dir string) error { return volume(ioctlSubvolCreate, dir, 0) }

func snapshot(from, to string) error {
	fd, err := unix.Open(from, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return volume(ioctlSnapCreate, to, int64(fd))
}

func volume(op uintptr, name string, fd int64) error {
	parent, err := unix.Open(filepath.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	var st unix.Statfs_t
	if err := unix.Fstatfs(parent, &st); err != nil {
		return err
	}
	if st.Type != unix.BTRFS_SUPER_MAGIC {
		return unix.ENOTTY
	}
	args := volArgs{fd: fd}
	if copy(args.name[:len(args.name)-1], filepath.Base(name)) < len(filepath.Base(name)) {
		return unix.ENAMETOOLONG
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(parent), op, uintptr(unsafe.Pointer(&args))); errno != 0 {
		return errno
	}
	return nil
}

func isSubvolume(dir string) bool {
	var st unix.Stat_t
	var fs unix.Statfs_t
	return unix.Lstat(dir, &st) == nil && st.Ino == subvolumeInode && st.Mode&unix.S_IFMT == unix.S_IFDIR &&
		unix.Statfs(dir, &fs) == nil && fs.Type == unix.BTRFS_SUPER_MAGIC
}
