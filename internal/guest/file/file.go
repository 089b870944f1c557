// Package file looks at, changes and watches the files of the sandbox, with the rights of the user who asks.
//
// Every operation runs inside [account.User.Do]: the kernel itself decides what the user may see and write, at the
// moment of each call, so that no check can be raced and no symbolic link leads anywhere the user could not go.
package file

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// maxEntries bounds how many entries a listing returns.
const maxEntries = 100_000

// Resolve makes a path absolute: "~" and relative paths start at the user's home, the empty path is def.
func Resolve(path string, u *account.User, def string) (string, error) {
	switch {
	case strings.IndexByte(path, 0) >= 0:
		return "", wire.Errorf(wire.InvalidArgument, "a path holds a zero byte")
	case path == "":
		path = def
		if path == "" {
			path = u.Home
		}
	case path == "~" || strings.HasPrefix(path, "~/"):
		path = u.Home + path[1:]
	case path[0] == '~':
		return "", wire.Errorf(wire.InvalidArgument, "path %.200q: only ~ and ~/ are known, not another user's home", path)
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(u.Home, path)
	}
	return filepath.Clean(path), nil
}

// Wrap gives an error of the system the code that clients know it by.
func Wrap(err error, path string) error {
	if err == nil {
		return nil
	}
	var coded *wire.Error
	if errors.As(err, &coded) {
		return err
	}
	code := wire.Internal
	what := err.Error()
	var errno syscall.Errno
	if errors.As(err, &errno) {
		what = errno.Error()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return wire.Errorf(wire.NotFound, "path '%s' does not exist", path)
	case errors.Is(err, fs.ErrPermission), errno == syscall.EROFS:
		code = wire.PermissionDenied
	case errors.Is(err, fs.ErrExist), errno == syscall.ENOTEMPTY:
		code = wire.AlreadyExists
	case errno == syscall.ENOTDIR, errno == syscall.EISDIR, errno == syscall.EINVAL, errno == syscall.ENAMETOOLONG, errno == syscall.ELOOP,
		errno == syscall.ENXIO, errno == syscall.ENODEV:
		code = wire.InvalidArgument
	case errno == syscall.ENOSPC, errno == syscall.EDQUOT, errno == syscall.EMFILE, errno == syscall.ENFILE, errno == syscall.EFBIG:
		code = wire.ResourceExhausted
	case errno == syscall.EBUSY, errno == syscall.ETXTBSY:
		code = wire.FailedPrecondition
	}
	return wire.Errorf(code, "path '%s': %s", path, what)
}

// Stat describes a file.
func Stat(u *account.User, path string) (*wire.EntryInfo, error) {
	var e *wire.EntryInfo
	err := u.Do(func() (err error) {
		e, err = entry(path)
		return err
	})
	return e, Wrap(err, path)
}

// entry describes a file. The caller has the user's rights.
func entry(path string) (*wire.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return describe(path, st), nil
}

func describe(path string, st fs.FileInfo) *wire.EntryInfo {
	mtime := st.ModTime()
	e := &wire.EntryInfo{
		Name: filepath.Base(path), Path: path, Size: st.Size(), Permissions: st.Mode().String(), ModifiedTime: &mtime,
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		e.Owner = account.System.UserName(sys.Uid)
		e.Group = account.System.GroupName(sys.Gid)
	}
	if st.Mode()&fs.ModeSymlink == 0 {
		e.Type, e.Mode = typeOf(st.Mode()), uint32(st.Mode().Perm())
		e.Metadata = metadata(path, st.Mode())
		return e
	}
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		e.SymlinkTarget = &path // broken: it leads nowhere but to itself
		return e
	}
	e.SymlinkTarget = &target
	if st, err := os.Stat(target); err == nil {
		e.Type, e.Mode = typeOf(st.Mode()), uint32(st.Mode().Perm())
		e.Metadata = metadata(target, st.Mode())
	}
	return e
}

func typeOf(m fs.FileMode) wire.FileType {
	switch {
	case m.IsRegular():
		return wire.FileTypeFile
	case m.IsDir():
		return wire.FileTypeDirectory
	case m&fs.ModeSymlink != 0:
		return wire.FileTypeSymlink
	}
	return wire.FileTypeUnspecified
}

// List returns what is in a directory, down to depth, each directory followed by what is in it, in lexical order.
func List(u *account.User, path string, depth int) ([]wire.EntryInfo, error) {
	var out []wire.EntryInfo
	err := u.Do(func() error {
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !st.IsDir() {
			return wire.Errorf(wire.InvalidArgument, "path '%s' is not a directory", path)
		}
		return list(path, max(depth, 1), &out)
	})
	return out, Wrap(err, path)
}

func list(dir string, depth int, out *[]wire.EntryInfo) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if len(*out) >= maxEntries {
			return wire.Errorf(wire.ResourceExhausted, "more than %d entries; ask for fewer levels", maxEntries)
		}
		path := filepath.Join(dir, d.Name())
		st, err := d.Info()
		if err != nil {
			continue // gone meanwhile
		}
		*out = append(*out, *describe(path, st))
		if st.IsDir() && depth > 1 {
			// What the user may not read is listed without what is in it.
			if err := list(path, depth-1, out); err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// MakeDir makes a directory and its parents.
func MakeDir(u *account.User, path string) (*wire.EntryInfo, error) {
	var e *wire.EntryInfo
	err := u.Do(func() error {
		if st, err := os.Stat(path); err == nil {
			if st.IsDir() {
				return wire.Errorf(wire.AlreadyExists, "directory '%s' already exists", path)
			}
			return wire.Errorf(wire.InvalidArgument, "path '%s' exists and is not a directory", path)
		}
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		var err error
		e, err = entry(path)
		return err
	})
	return e, Wrap(err, path)
}

// Move renames a file or directory, making the parents of its new name. Between file systems it copies.
func Move(u *account.User, from, to string) (*wire.EntryInfo, error) {
	var e *wire.EntryInfo
	err := u.Do(func() error {
		if _, err := os.Lstat(from); err != nil {
			return Wrap(err, from)
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		err := os.Rename(from, to)
		if errors.Is(err, syscall.EXDEV) {
			err = moveAcross(from, to)
		}
		if err != nil {
			return err
		}
		e, err = entry(to)
		return err
	})
	return e, Wrap(err, to)
}

// moveAcross copies to a name beside the destination, renames that, and then removes the original, so that at no time
// neither name holds the whole.
func moveAcross(from, to string) error {
	tmp, err := os.MkdirTemp(filepath.Dir(to), ".move-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	part := filepath.Join(tmp, filepath.Base(to))
	if err := copyTree(from, part); err != nil {
		return err
	}
	if err := os.Rename(part, to); err != nil {
		return err
	}
	return os.RemoveAll(from)
}

func copyTree(from, to string) error {
	st, err := os.Lstat(from)
	if err != nil {
		return err
	}
	switch {
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	case st.IsDir():
		if err := os.Mkdir(to, 0o700); err != nil {
			return err
		}
		entries, err := os.ReadDir(from)
		if err != nil {
			return err
		}
		for _, d := range entries {
			if err := copyTree(filepath.Join(from, d.Name()), filepath.Join(to, d.Name())); err != nil {
				return err
			}
		}
	case st.Mode().IsRegular():
		if err := copyFile(from, to); err != nil {
			return err
		}
	default:
		return wire.Errorf(wire.FailedPrecondition, "path '%s' is a special file and cannot be moved to another file system", from)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
		_ = os.Lchown(to, int(sys.Uid), int(sys.Gid))
	}
	if err := os.Chmod(to, st.Mode().Perm()|st.Mode()&fs.ModeSticky); err != nil {
		return err
	}
	return os.Chtimes(to, st.ModTime(), st.ModTime())
}

func copyFile(from, to string) error {
	in, _, err := openRegular(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	for k, v := range metadata(from, 0) {
		if err := unix.Setxattr(to, metadataPrefix+k, []byte(v), 0); err != nil {
			return err
		}
	}
	return out.Close()
}

// Remove removes a file or a directory with all in it. What does not exist is removed already.
func Remove(u *account.User, path string) error {
	return Wrap(u.Do(func() error { return os.RemoveAll(path) }), path)
}

// openRegular opens a regular file for reading. Anything else could block for ever, or have no end.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = wire.Errorf(wire.InvalidArgument, "path '%s' is not a regular file", path)
		if st.IsDir() {
			err = wire.Errorf(wire.InvalidArgument, "path '%s' is a directory", path)
		}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, st, nil
}

// Open opens a regular file for reading.
func Open(u *account.User, path string) (*os.File, fs.FileInfo, error) {
	var f *os.File
	var st fs.FileInfo
	err := u.Do(func() (err error) {
		f, st, err = openRegular(path)
		return err
	})
	return f, st, Wrap(err, path)
}

// Create opens a file for writing, empty, making its parents. A file that exists keeps its owner and its mode.
func Create(u *account.User, path string) (*os.File, error) {
	var f *os.File
	err := u.Do(func() (err error) {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			return wire.Errorf(wire.InvalidArgument, "path '%s' is a directory", path)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		// Not truncated by the open itself, which would come before the look at what was opened.
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK|unix.O_NOCTTY, 0o666)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err == nil && !st.Mode().IsRegular() {
			err = wire.Errorf(wire.InvalidArgument, "path '%s' is not a regular file", path)
		}
		if err == nil && st.Size() > 0 {
			err = f.Truncate(0) // as the user: this also takes away set-uid bits
		}
		if err != nil {
			f.Close()
		}
		return err
	})
	return f, Wrap(err, path)
}

// SetMetadata replaces the metadata of an open file.
func SetMetadata(u *account.User, f *os.File, path string, md map[string]string) error {
	return Wrap(u.Do(func() error {
		raw, err := f.SyscallConn()
		if err != nil {
			return err
		}
		var ferr error
		err = raw.Control(func(fd uintptr) {
			for _, name := range names(func(buf []byte) (int, error) { return unix.Flistxattr(int(fd), buf) }) {
				if _, keep := md[name]; !keep {
					ferr = errors.Join(ferr, unix.Fremovexattr(int(fd), metadataPrefix+name))
				}
			}
			for k, v := range md {
				ferr = errors.Join(ferr, unix.Fsetxattr(int(fd), metadataPrefix+k, []byte(v), 0))
			}
		})
		if err == nil {
			err = ferr
		}
		if errors.Is(err, syscall.EOPNOTSUPP) {
			if len(md) == 0 {
				return nil
			}
			return wire.Errorf(wire.FailedPrecondition, "path '%s': the file system keeps no metadata", path)
		}
		return err
	}), path)
}

// metadataPrefix is where E2B's wire keeps metadata, among a file's extended attributes.
const metadataPrefix = "user.e2b."

// metadata reads the metadata of a file; a file system without extended attributes has none.
func metadata(path string, mode fs.FileMode) map[string]string {
	if !mode.IsRegular() && !mode.IsDir() {
		return nil // the kernel keeps user attributes of these two only
	}
	var md map[string]string
	for _, name := range names(func(buf []byte) (int, error) { return unix.Listxattr(path, buf) }) {
		var buf [maxMetadata]byte
		n, err := unix.Getxattr(path, metadataPrefix+name, buf[:])
		if err != nil {
			continue
		}
		if md == nil {
			md = make(map[string]string)
		}
		md[name] = string(buf[:n])
	}
	return md
}

// maxMetadata bounds the size of one value.
const maxMetadata = 4096

// names returns the names of metadata that a listxattr call tells.
func names(list func([]byte) (int, error)) []string {
	var buf [16 << 10]byte
	n, err := list(buf[:])
	if err != nil || n <= 0 {
		return nil
	}
	var out []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if name, ok := strings.CutPrefix(name, metadataPrefix); ok && name != "" {
			out = append(out, name)
		}
	}
	return out
}

// Disk returns the bytes used and in total of the file system that holds path.
func Disk(path string) (used, total uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, fmt.Errorf("statfs: %w", err)
	}
	return (st.Blocks - st.Bfree) * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}
