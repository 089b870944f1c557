// Package unpack turns the tar of an image's layer into a directory, whatever the tar holds.
//
// A layer comes from strangers. Every name in it is resolved below the target directory by the kernel (package tree), so
// nothing outside is ever read, written, linked to or removed; what cannot be honoured in there is refused. In detail:
//
//   - "/" in front of a name is dropped; a ".." anywhere in a name refuses the layer.
//   - An entry that goes through a symbolic link of the same layer ends where the link leads inside the layer, an absolute
//     one too. A hard link must name a regular file or a symbolic link of the same layer, and no link may be on the way to it.
//   - Device nodes and FIFOs are left out and counted: a sandbox has its own /dev, and a FIFO on shared storage would join two
//     sandboxes.
//   - Owners are shifted by [Options.IDBase]. Ids above 65535 become 65534, nobody's, and are counted. So the set-uid bit, which
//     is kept, means nothing outside.
//   - Of extended attributes, user.* is kept, and security.capability with the shifted root as its owner, so that it holds in the
//     sandbox's user namespace only. Overlayfs's own are dropped.
//   - OCI whiteouts become overlayfs's: a character device 0:0, or trusted.overlay.opaque on a directory.
//   - The number of entries, their size and the compression ratio are limited ([Limits]).
package unpack

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"golang.org/x/sys/unix"
)

// Limits of one layer; a zero means the default.
type Limits struct {
	// Entries of the tar, 1,000,000.
	Entries int64
	// Bytes of its content when unpacked, 32 GiB.
	Bytes int64
	// Ratio of unpacked to compressed bytes, 250; it counts from 64 MiB on.
	Ratio int64
}

const (
	defaultEntries = 1_000_000
	defaultBytes   = 32 << 30
	defaultRatio   = 250
	// ratioFrom is how much a layer may unpack to before its ratio matters: small files of zeros are honest.
	ratioFrom = 64 << 20
	// maxNames bounds the memory for names of directories whose times are set at the end.
	maxNames = 64 << 20
	// maxXattr is the largest value that the kernel takes.
	maxXattr = 64 << 10
)

func (l Limits) withDefaults() Limits {
	if l.Entries == 0 {
		l.Entries = defaultEntries
	}
	if l.Bytes == 0 {
		l.Bytes = defaultBytes
	}
	if l.Ratio == 0 {
		l.Ratio = defaultRatio
	}
	return l
}

// MaxBytes is Bytes, or its default.
func (l Limits) MaxBytes() int64 { return l.withDefaults().Bytes }

// Options of an unpacking.
type Options struct {
	IDBase uint32
	Limits Limits
}

// Stats tell what a tar held.
type Stats struct {
	// Entries of the tar, and bytes of the files that were written.
	Entries, Bytes int64
	// Skipped counts device nodes and FIFOs, Clamped entries with ids above 65535, Xattrs attributes that were dropped.
	Skipped, Clamped, Xattrs int64
}

// Tar unpacks a tar that is not compressed into the tree, which should be empty and which nothing else may change meanwhile.
// An error that matches [warren.ErrInvalid] means that the tar is at fault, [warren.ErrExhausted] that a limit or the disk is.
// After an error the tree holds a part, for the caller to remove.
func Tar(ctx context.Context, t *tree.Tree, r io.Reader, o Options) (Stats, error) {
	u := &unpacker{tree: t, base: o.IDBase, limits: o.Limits.withDefaults(), fd: -1, buf: make([]byte, 256<<10)}
	defer u.forget()
	err := u.run(ctx, r)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = fmt.Errorf("%w: the disk of the image store is full (%w); free some space, or remove images with `warren image rm`", warren.ErrExhausted, err)
	}
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: %w; unpacking an image gives its files to ids of their own, which only root can do", warren.ErrDenied, err)
	}
	return u.stats, err
}

type unpacker struct {
	tree   *tree.Tree
	base   uint32
	limits Limits
	stats  Stats
	buf    []byte
	// dir and fd are the directory of the last entry: the next is mostly in the same.
	dir string
	fd  int
	// times of directories are set at the end, since each new entry changes them.
	times []dirTime
	names int
}

type dirTime struct {
	name string
	time time.Time
}

func (u *unpacker) run(ctx context.Context, r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if err == io.EOF {
			return u.setTimes()
		}
		if err != nil {
			return readError(err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if u.stats.Entries++; u.stats.Entries > u.limits.Entries {
			return fmt.Errorf("%w: the layer has more than %d entries", warren.ErrExhausted, u.limits.Entries)
		}
		if err := u.entry(ctx, h, tr); err != nil {
			if errors.Is(err, ctx.Err()) && ctx.Err() != nil {
				return err
			}
			return fmt.Errorf("entry %s: %w", tree.Quote(h.Name), err)
		}
	}
}

// readError sorts errors of reading: those of the archive's form are its fault, others have their own kind.
func readError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, tar.ErrInsecurePath) {
		return fmt.Errorf("%w: the tar is damaged or cut off: %w", warren.ErrInvalid, err)
	}
	return err
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{warren.ErrInvalid}, args...)...)
}

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	reserved = ".wh..wh."
)

func (u *unpacker) entry(ctx context.Context, h *tar.Header, r io.Reader) error {
	name, err := tree.Clean(h.Name)
	if err != nil {
		return err
	}
	uid, gid, err := u.owner(h)
	if err != nil {
		return err
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return invalid("the top of the layer must be a directory")
		}
		return u.finishDir(int(u.tree.Dir().Fd()), name, h, uid, gid)
	}
	dir, base := path.Split(name)
	dir = path.Clean(dir)
	if strings.HasPrefix(dir, whiteout) || strings.Contains(dir, "/"+whiteout) {
		return invalid("a whiteout cannot be a directory")
	}
	if strings.HasPrefix(base, whiteout) {
		return u.whiteout(dir, base)
	}
	switch h.Typeflag {
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		u.stats.Skipped++
		return nil
	case tar.TypeDir:
		return u.mkdir(dir, base, h, uid, gid)
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return u.file(ctx, dir, base, h, r, uid, gid)
	case tar.TypeSymlink:
		return u.symlink(dir, base, h, uid, gid)
	case tar.TypeLink:
		return u.link(dir, base, h)
	}
	return invalid("entries of type %q are not supported", h.Typeflag)
}

// owner shifts the ids of an entry.
func (u *unpacker) owner(h *tar.Header) (uid, gid int, err error) {
	ids := [2]int{h.Uid, h.Gid}
	clamped := false
	for i, id := range ids {
		if id < 0 {
			return 0, 0, invalid("owner %d", id)
		}
		if id > 65535 {
			id, clamped = 65534, true
		}
		ids[i] = int(u.base) + id
	}
	if clamped {
		u.stats.Clamped++
	}
	return ids[0], ids[1], nil
}

// forget closes the remembered directory, which may no longer be where its name says.
func (u *unpacker) forget() {
	if u.fd >= 0 {
		unix.Close(u.fd)
	}
	u.fd, u.dir = -1, ""
}

// parent opens the directory of an entry and makes it when it is missing. The descriptor is good until the next call.
func (u *unpacker) parent(dir string) (int, error) {
	if dir == "." {
		return int(u.tree.Dir().Fd()), nil
	}
	if u.fd >= 0 && dir == u.dir {
		return u.fd, nil
	}
	fd, err := u.open(dir)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		if err := u.makeParent(dir); err != nil {
			return -1, err
		}
		fd, err = u.open(dir)
	}
	if err != nil {
		return -1, u.pathError(dir, err)
	}
	u.forget()
	u.dir, u.fd = dir, fd
	return fd, nil
}

// pathError says why a directory of an entry cannot be had.
func (u *unpacker) pathError(dir string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP):
		return invalid("directory %s: its symbolic links lead in a circle", tree.Quote(dir))
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EXDEV):
		return invalid("directory %s: %w", tree.Quote(dir), err)
	}
	return fmt.Errorf("directory %s: %w", tree.Quote(dir), err)
}

// open opens a directory of the layer, through symbolic links of the layer if need be.
func (u *unpacker) open(dir string) (int, error) {
	fd, err := u.tree.DirectoryStrict(dir)
	if !errors.Is(err, unix.ELOOP) {
		return fd, err
	}
	if fd, err = u.tree.Directory(dir); err != nil {
		return -1, err
	}
	// Links can stack directories far deeper than any name in the tar is long; what is too deep could hardly be removed.
	top, err1 := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", u.tree.Dir().Fd()))
	real, err2 := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err := errors.Join(err1, err2); err != nil {
		unix.Close(fd)
		return -1, err
	}
	rest := strings.TrimPrefix(real, top)
	if len(rest) > tree.MaxName || strings.Count(rest, "/") > tree.MaxDepth {
		unix.Close(fd)
		return -1, invalid("it is more than %d directories deep", tree.MaxDepth)
	}
	return fd, nil
}

// makeParent makes a directory that the tar has not announced.
func (u *unpacker) makeParent(dir string) error {
	up, base := path.Split(dir)
	pfd, err := u.parent(path.Clean(up))
	if err != nil {
		return err
	}
	isDir, isOpaque, err := u.replace(pfd, base, whiteoutOnly)
	if err != nil {
		return err
	}
	if isDir {
		return nil
	}
	if err := unix.Mkdirat(pfd, base, 0o755); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return invalid("directory %s: there is something else of that name", tree.Quote(dir))
		}
		return err
	}
	if err := unix.Fchownat(pfd, base, int(u.base), int(u.base), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if isOpaque {
		return setOpaque(pfd, base)
	}
	return nil
}

// what an entry may take the place of.
type replacing int

const (
	// anything is removed, a directory with all it holds.
	anything replacing = iota
	// butDirectory keeps a directory, for an entry that is one.
	butDirectory
	// whiteoutOnly keeps everything that is no whiteout.
	whiteoutOnly
)

// replace makes room for an entry. It says whether a directory is there and stays, and whether a directory to be made must hide
// that of the layers below, since this layer has removed it.
func (u *unpacker) replace(pfd int, base string, what replacing) (isDir, isOpaque bool, err error) {
	var st unix.Stat_t
	err = unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return false, false, nil
	}
	if err != nil {
		return false, false, err
	}
	switch {
	case isWhiteout(&st):
		return false, true, unix.Unlinkat(pfd, base, 0)
	case st.Mode&unix.S_IFMT == unix.S_IFDIR && what != anything:
		return true, false, nil
	case what == whiteoutOnly:
		return false, false, nil
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		err := removeAll(pfd, base)
		if u.dir != "" && u.fd != pfd {
			u.forget()
		}
		return false, false, err
	}
	return false, false, unix.Unlinkat(pfd, base, 0)
}

func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// removeAll removes a directory of the layer. Its depth is bounded, see open.
func removeAll(pfd int, base string) error {
	fd, err := unix.Openat(pfd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		err := unix.Unlinkat(fd, name, 0)
		if errors.Is(err, unix.EISDIR) {
			err = removeAll(fd, name)
		}
		if err != nil {
			return err
		}
	}
	return unix.Unlinkat(pfd, base, unix.AT_REMOVEDIR)
}

func setOpaque(pfd int, base string) error {
	fd, err := unix.Openat(pfd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte("y"), 0)
}

// whiteout removes a name of the layers below; what this layer itself puts there stays, in whichever order they come.
func (u *unpacker) whiteout(dir, base string) error {
	if base == opaque {
		pfd, err := u.parent(dir)
		if err != nil {
			return err
		}
		if dir == "." {
			return unix.Fsetxattr(pfd, "trusted.overlay.opaque", []byte("y"), 0)
		}
		return setOpaque(pfd, ".")
	}
	if strings.HasPrefix(base, reserved) {
		return nil // bookkeeping of aufs
	}
	name := base[len(whiteout):]
	if name == "" || name == "." || name == ".." {
		return invalid("a whiteout of %q", name)
	}
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	err = unix.Fstatat(pfd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return unix.Mknodat(pfd, name, unix.S_IFCHR, 0)
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return setOpaque(pfd, name)
	}
	return nil
}

func (u *unpacker) mkdir(dir, base string, h *tar.Header, uid, gid int) error {
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	isDir, isOpaque, err := u.replace(pfd, base, butDirectory)
	if err != nil {
		return err
	}
	if !isDir {
		if err := unix.Mkdirat(pfd, base, 0o700); err != nil {
			return err
		}
	}
	fd, err := unix.Openat(pfd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if isOpaque {
		if err := unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte("y"), 0); err != nil {
			return err
		}
	}
	return u.finishDir(fd, path.Join(dir, base), h, uid, gid)
}

func (u *unpacker) finishDir(fd int, name string, h *tar.Header, uid, gid int) error {
	if u.names += len(name) + 32; u.names > maxNames {
		return fmt.Errorf("%w: the names of the layer's directories take more than %d MB", warren.ErrExhausted, maxNames>>20)
	}
	u.times = append(u.times, dirTime{name, h.ModTime})
	if err := unix.Fchown(fd, uid, gid); err != nil {
		return err
	}
	if err := u.xattrs(fd, h); err != nil {
		return err
	}
	return unix.Fchmod(fd, uint32(h.Mode)&0o7777)
}

func (u *unpacker) file(ctx context.Context, dir, base string, h *tar.Header, r io.Reader, uid, gid int) error {
	if h.Size > u.limits.Bytes-u.stats.Bytes {
		return fmt.Errorf("%w: the layer's files take more than %d bytes", warren.ErrExhausted, u.limits.Bytes)
	}
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	if _, _, err := u.replace(pfd, base, anything); err != nil {
		return err
	}
	fd, err := unix.Openat(pfd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := u.copy(ctx, fd, r); err != nil {
		return err
	}
	if err := unix.Fchown(fd, uid, gid); err != nil {
		return err
	}
	// A change of the owner drops capabilities and the set-uid bit, so these come after it.
	if err := u.xattrs(fd, h); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	return ignoreTime(utimes(pfd, base, h.ModTime))
}

// copy writes the content of a file. The reader of the tar ends it where the header says.
func (u *unpacker) copy(ctx context.Context, fd int, r io.Reader) error {
	for {
		n, err := r.Read(u.buf)
		for b := u.buf[:n]; len(b) > 0; {
			m, err := unix.Write(fd, b)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			b = b[m:]
		}
		if u.stats.Bytes += int64(n); u.stats.Bytes > u.limits.Bytes {
			return fmt.Errorf("%w: the layer's files take more than %d bytes", warren.ErrExhausted, u.limits.Bytes)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return readError(err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

func (u *unpacker) symlink(dir, base string, h *tar.Header, uid, gid int) error {
	if h.Linkname == "" || len(h.Linkname) > tree.MaxName || strings.IndexByte(h.Linkname, 0) >= 0 {
		return invalid("a symbolic link to %s", tree.Quote(h.Linkname))
	}
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	if _, _, err := u.replace(pfd, base, anything); err != nil {
		return err
	}
	if err := unix.Symlinkat(h.Linkname, pfd, base); err != nil {
		return err
	}
	if err := unix.Fchownat(pfd, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return ignoreTime(utimes(pfd, base, h.ModTime))
}

// link makes a hard link to a file that the layer already has.
func (u *unpacker) link(dir, base string, h *tar.Header) error {
	target, err := tree.Clean(h.Linkname)
	if err != nil {
		return err
	}
	if target == "." {
		return invalid("a hard link to the top of the layer")
	}
	from, targetBase := path.Split(target)
	tfd, err := u.tree.DirectoryStrict(path.Clean("./" + from))
	if err != nil {
		if errors.Is(err, unix.ELOOP) {
			return invalid("a hard link to %s, through a symbolic link", tree.Quote(h.Linkname))
		}
		return invalid("a hard link to %s, which the layer does not have: %w", tree.Quote(h.Linkname), err)
	}
	defer unix.Close(tfd)
	var st, old unix.Stat_t
	if err := unix.Fstatat(tfd, targetBase, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return invalid("a hard link to %s, which the layer does not have: %w", tree.Quote(h.Linkname), err)
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFLNK {
		return invalid("a hard link to %s, which is not a file", tree.Quote(h.Linkname))
	}
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	if unix.Fstatat(pfd, base, &old, unix.AT_SYMLINK_NOFOLLOW) == nil && old.Ino == st.Ino && old.Dev == st.Dev {
		return nil
	}
	if _, _, err := u.replace(pfd, base, anything); err != nil {
		return err
	}
	err = unix.Linkat(tfd, targetBase, pfd, base, 0)
	if errors.Is(err, unix.EMLINK) || errors.Is(err, unix.ENOENT) {
		return invalid("a hard link to %s: %w", tree.Quote(h.Linkname), err)
	}
	return err
}

const paxXattr = "SCHILY.xattr."

// xattrs sets the attributes that mean something in a sandbox.
func (u *unpacker) xattrs(fd int, h *tar.Header) error {
	for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		value := []byte(h.PAXRecords[key])
		switch {
		case name == "security.capability" && h.Typeflag != tar.TypeDir:
			value = shiftCapability(value, u.base)
		case !strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "user.overlay.") || len(name) > 255 || len(value) > maxXattr:
			value = nil
		}
		if value == nil {
			u.stats.Xattrs++
			continue
		}
		err := unix.Fsetxattr(fd, name, value, 0)
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
			// The file system has no room for attributes of this size or kind: also an honest one may have that.
			u.stats.Xattrs++
		default:
			return fmt.Errorf("attribute %s: %w", tree.Quote(name), err)
		}
	}
	return nil
}

// shiftCapability rewrites a file capability (struct vfs_ns_cap_data) so that it holds only where IDBase is root. It returns nil
// for one that it does not understand.
func shiftCapability(v []byte, base uint32) []byte {
	const (
		v1, v2, v3   = 0x01000000, 0x02000000, 0x03000000
		versionMask  = 0xff000000
		size2, size3 = 20, 24
	)
	if len(v) < 4 {
		return nil
	}
	magic := binary.LittleEndian.Uint32(v)
	out := make([]byte, size3)
	root := base
	switch {
	case magic&versionMask == v1 && len(v) == 12:
		copy(out[4:], v[4:12])
	case magic&versionMask == v2 && len(v) == size2:
		copy(out[4:], v[4:])
	case magic&versionMask == v3 && len(v) == size3:
		copy(out[4:], v[4:size2])
		id := binary.LittleEndian.Uint32(v[size2:])
		if id > 65535 {
			return nil
		}
		root += id
	default:
		return nil
	}
	binary.LittleEndian.PutUint32(out, v3|magic&^versionMask)
	binary.LittleEndian.PutUint32(out[size2:], root)
	return out
}

// setTimes gives directories their times, the last announced for each name.
func (u *unpacker) setTimes() error {
	u.forget()
	for _, d := range u.times {
		dir, base := path.Split(d.name)
		if d.name == "." {
			if err := ignoreTime(unix.Futimes(int(u.tree.Dir().Fd()), timevals(d.time))); err != nil {
				return err
			}
			continue
		}
		fd, err := u.open(path.Clean("./" + dir))
		if err != nil {
			continue // a later entry took its place
		}
		var st unix.Stat_t
		if unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			err = ignoreTime(utimes(fd, base, d.time))
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

func utimes(pfd int, base string, t time.Time) error {
	ts := unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
	return unix.UtimesNanoAt(pfd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

func timevals(t time.Time) []unix.Timeval {
	tv := unix.Timeval{Sec: t.Unix(), Usec: int64(t.Nanosecond() / 1000)}
	return []unix.Timeval{tv, tv}
}

// ignoreTime drops the error of a time that the file system cannot hold; it is no reason to refuse a layer.
func ignoreTime(err error) error {
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOVERFLOW) {
		return nil
	}
	return err
}
