package search

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

const (
	defaultChanged = 1000
	maxChanged     = 100_000
	maxReplacement = 64 << 10
	// maxReplaced bounds the matches in one file.
	maxReplaced = 250_000
)

// Replace rewrites matches in files. It looks at all files before it changes the first one, so that a request that
// would change too many changes none; each file is replaced as a whole or stays as it was.
func Replace(ctx context.Context, u *account.User, root string, req *wire.ReplaceRequest) (*wire.ReplaceResponse, error) {
	re, err := compile(req.Pattern, req.Fixed, req.IgnoreCase)
	if err != nil {
		return nil, err
	}
	if len(req.Replacement) > maxReplacement {
		return nil, wire.Errorf(wire.InvalidArgument, "the replacement is longer than %d bytes", maxReplacement)
	}
	f, err := newFilter(root, req.Include, req.Exclude, req.All, 0)
	if err != nil {
		return nil, err
	}
	limit := int(req.MaxFiles)
	if limit == 0 {
		limit = defaultChanged
	}
	limit = min(limit, maxChanged)
	res := &wire.ReplaceResponse{}
	err = u.Do(func() error {
		var buf bytes.Buffer
		var paths []string
		err := f.walk(ctx, func(path string) error {
			if _, ok := f.read(path, &buf); !ok || !re.Match(buf.Bytes()) {
				return nil
			}
			if len(paths) == limit {
				return errTooMany
			}
			paths = append(paths, path)
			return nil
		}, func() {})
		if errors.Is(err, errTooMany) {
			return wire.Errorf(wire.FailedPrecondition, "more than %d files would change; raise max_files or narrow the search", limit)
		}
		if err != nil {
			return err
		}
		for _, path := range paths {
			if err := ctx.Err(); err != nil {
				return err
			}
			n, err := f.rewrite(re, path, req, &buf)
			if n == 0 && err == nil {
				continue // changed meanwhile
			}
			rf := wire.ReplacedFile{Path: path, Replacements: uint32(n)}
			if err != nil {
				rf.Replacements, rf.Error = 0, plain(err)
			}
			res.Files = append(res.Files, rf)
			res.Replacements += rf.Replacements
		}
		return nil
	})
	return res, err
}

// plain says what went wrong with a file whose path is told beside it.
func plain(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

var errTooLarge = errors.New("the file would become too large, or has too many matches")

// rewrite replaces the matches in one file and returns how many there were.
func (f *filter) rewrite(re *regexp.Regexp, path string, req *wire.ReplaceRequest, buf *bytes.Buffer) (int, error) {
	st, ok := f.read(path, buf)
	if !ok {
		return 0, errors.New("the file can no longer be read as text")
	}
	text := buf.Bytes()
	matches := re.FindAllSubmatchIndex(text, maxReplaced+1)
	if len(matches) > maxReplaced {
		return 0, errTooLarge
	}
	if len(matches) == 0 || req.DryRun {
		return len(matches), nil
	}
	var out []byte
	last := 0
	for _, m := range matches {
		out = append(out, text[last:m[0]]...)
		if req.Fixed {
			out = append(out, req.Replacement...)
		} else {
			out = re.Expand(out, []byte(req.Replacement), text, m)
		}
		last = m[1]
		if len(out) > maxFileBytes {
			return 0, errTooLarge
		}
	}
	out = append(out, text[last:]...)
	if bytes.Equal(out, text) {
		return len(matches), nil
	}
	return len(matches), writeAtomic(path, st, out)
}

// writeAtomic puts a new file in the place of an old one, with its mode, owner and extended attributes.
func writeAtomic(path string, st fs.FileInfo, data []byte) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // only the root of a request can be a link
	}
	// A file that the user may not write must not change because its directory may.
	if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".replace-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // gone already when all went well
	defer tmp.Close()
	if _, err := tmp.Write(data); err != nil {
		return err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		var now syscall.Stat_t
		if err := syscall.Fstat(int(tmp.Fd()), &now); err != nil {
			return err
		}
		if now.Uid != sys.Uid || now.Gid != sys.Gid {
			if err := tmp.Chown(int(sys.Uid), int(sys.Gid)); err != nil {
				return errors.New("the file belongs to another user or group, which could not be kept")
			}
		}
	}
	if err := tmp.Chmod(st.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)); err != nil {
		return err
	}
	copyAttributes(path, tmp)
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// copyAttributes copies what extended attributes the user may copy.
func copyAttributes(from string, to *os.File) {
	buf := make([]byte, 64<<10)
	n, err := unix.Listxattr(from, buf)
	if err != nil || n <= 0 {
		return
	}
	for name := range bytes.SplitSeq(buf[:n], []byte{0}) {
		if len(name) == 0 {
			continue
		}
		val := make([]byte, 64<<10)
		if n, err := unix.Getxattr(from, string(name), val); err == nil {
			_ = unix.Fsetxattr(int(to.Fd()), string(name), val[:n], 0)
		}
	}
}
