package warren

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// CopyOptions change a copy into or out of a sandbox.
type CopyOptions struct {
	// User to read or write as in the sandbox. Empty means its default.
	User string
	// MaxBytes and MaxFiles bound what a copy out of a sandbox may write here; 0 means 16 GiB and 1,000,000 files.
	MaxBytes int64
	MaxFiles int
	// Warn, when set, is told what was left out, such as a device or a link that leads outside.
	Warn func(message string)
	// Progress, when set, is told how many bytes have gone by, and of how many: 0 for a directory, whose size nobody knows. It is
	// called from other goroutines, one call at a time.
	Progress func(done, total int64)
}

// counted tells Progress of what is read from r.
func (o CopyOptions) counted(r io.Reader, total int64) io.Reader {
	if o.Progress == nil {
		return r
	}
	return &countedReader{r: r, total: total, tell: o.Progress}
}

type countedReader struct {
	r           io.Reader
	done, total int64
	tell        func(done, total int64)
}

func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if n > 0 {
		c.done += int64(n)
		c.tell(c.done, c.total)
	}
	return n, err
}

// Copied is what a copy did.
type Copied struct {
	Files int   `json:"files"`
	Bytes int64 `json:"bytes"`
	// Skipped counts what was left out.
	Skipped int `json:"skipped,omitempty"`
}

func (o CopyOptions) warn(n *Copied, format string, args ...any) {
	n.Skipped++
	if o.Warn != nil {
		o.Warn(fmt.Sprintf(format, args...))
	}
}

// CopyTo copies a local file or directory into the sandbox. As with cp -r, a dst that is a directory gets it under its own
// name, and another dst becomes the copy itself; a src that ends in "/." stands for what is in the directory. Links are
// copied as links, the source itself followed. Directories need a tar program in the image.
func (s *Sandbox) CopyTo(ctx context.Context, src, dst string, o CopyOptions) (*Copied, error) {
	info, err := os.Stat(src)
	if err != nil {
		return nil, err
	}
	target, err := s.absolute("copy", dst)
	if err != nil {
		return nil, err
	}
	files := s.FS().WithContext(ctx).WithUser(o.User)
	into, err := files.Stat(rel(target))
	switch {
	case err == nil && into.IsDir() && !contents(src):
		name, err := baseName(src)
		if err != nil {
			return nil, err
		}
		target = path.Join(target, name)
	case err == nil && !into.IsDir() && info.IsDir():
		return nil, fmt.Errorf("copy %s to %s: %w: there is a file", src, dst, fs.ErrExist)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	case err != nil && strings.HasSuffix(dst, "/") && !info.IsDir():
		return nil, fmt.Errorf("copy %s to %s: %w: there is no such directory", src, dst, fs.ErrNotExist)
	}
	n := new(Copied)
	if !info.IsDir() {
		return n, s.copyFileTo(files, src, target, n, o)
	}
	if err := files.MkdirAll(rel(target), 0); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(src)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := writeTar(w, root, n, o)
		w.CloseWithError(err)
		packed <- err
	}()
	cmd := s.tar(o.User, "-x", "-o", "-f", "-", "-C", target)
	cmd.Stdin = o.counted(r, 0)
	_, err = cmd.Output(ctx)
	r.CloseWithError(io.ErrClosedPipe)
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return n, perr
	}
	return n, tarError(err)
}

func (s *Sandbox) tar(user string, arg ...string) *Cmd {
	cmd := s.Command("tar", arg...)
	cmd.User, cmd.Dir, cmd.Env = user, "/", []string{"LC_ALL=C"}
	return cmd
}

func tarError(err error) error {
	var ee *ExitError
	switch {
	case errors.As(err, &ee):
		return fmt.Errorf("tar in the sandbox: %s: %w", bytes.TrimSpace(ee.Stderr), err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("copy a directory: the image has no tar program: %w", errors.ErrUnsupported)
	}
	return err
}

func (s *Sandbox) copyFileTo(files *FS, src, target string, n *Copied, o CopyOptions) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("copy %s: %w: not a regular file or a directory", src, ErrInvalid)
	}
	if err := files.upload(rel(target), o.counted(f, info.Size())); err != nil {
		return err
	}
	n.Files, n.Bytes = 1, info.Size()
	// The guest makes files 0644; what matters beyond that is whether a program stays one, and whether a key stays private.
	if perm := info.Mode().Perm(); perm != 0o644 && perm != 0o666 {
		return files.Chmod(rel(target), perm)
	}
	return nil
}

// writeTar packs all below root.
func writeTar(w io.Writer, root *os.Root, n *Copied, o CopyOptions) error {
	tw := tar.NewWriter(w)
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			if link, err = root.Readlink(name); err != nil {
				return err
			}
			link = filepath.ToSlash(link)
		case !info.IsDir() && !info.Mode().IsRegular():
			o.warn(n, "%s: not a file, a directory or a link", name)
			return nil
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		// Nobody's ids and names travel; the files become the sandbox user's.
		h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.Mode = name, 0, 0, "", "", h.Mode&0o777
		h.Format = tar.FormatPAX
		h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
		if info.IsDir() {
			h.Name += "/"
		}
		n.Files++
		if !info.Mode().IsRegular() {
			return tw.WriteHeader(h)
		}
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		// A file that grows meanwhile is copied at the size it had; one that shrinks is an error of the copy.
		k, err := io.CopyN(tw, f, h.Size)
		n.Bytes += k
		if err == io.EOF {
			err = fmt.Errorf("%s: %w: the file shrank while it was copied", name, ErrState)
		}
		return err
	})
	return cmp.Or(err, tw.Close())
}

// CopyFrom copies a file or directory out of the sandbox, with the rules of [Sandbox.CopyTo]. What the sandbox sends is not
// trusted: nothing is written outside dst, links that lead outside, devices and pipes are left out, and set-uid bits are
// dropped.
func (s *Sandbox) CopyFrom(ctx context.Context, src, dst string, o CopyOptions) (*Copied, error) {
	source, err := s.absolute("copy", src)
	if err != nil {
		return nil, err
	}
	files := s.FS().WithContext(ctx).WithUser(o.User)
	info, err := files.Stat(rel(source))
	if err != nil {
		return nil, err
	}
	into, err := os.Stat(dst)
	switch {
	case err == nil && into.IsDir() && !contents(src):
		// The name is the caller's own word, not the sandbox's.
		if name := path.Base(source); name != "/" {
			dst = filepath.Join(dst, name)
		}
	case err == nil && !into.IsDir() && info.IsDir():
		return nil, fmt.Errorf("copy %s to %s: %w: there is a file", src, dst, fs.ErrExist)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	n := new(Copied)
	if !info.IsDir() {
		return n, copyFileFrom(files, source, dst, info, n, o)
	}
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := extractTar(root, o.counted(r, 0), n, o)
		// The rest of the archive is its padding.
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		r.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		unpacked <- err
	}()
	var stderr headTail
	stderr.limit = 4 << 10
	cmd := s.tar(o.User, "-c", "-f", "-", "-C", source, ".")
	cmd.Stdout, cmd.Stderr = w, &stderr
	err = cmd.Run(ctx)
	var ee *ExitError
	if errors.As(err, &ee) {
		ee.Stderr = stderr.bytes()
		// What GNU tar says of a tree that is being worked in.
		if ee.ExitCode() == 1 && bytes.Contains(ee.Stderr, []byte("as we read it")) {
			o.warn(n, "%s", bytes.TrimSpace(ee.Stderr))
			err = nil
		}
	}
	w.CloseWithError(err)
	if uerr := <-unpacked; uerr != nil && (err == nil || !errors.Is(uerr, err)) {
		return n, uerr
	}
	return n, tarError(err)
}

func copyFileFrom(files *FS, source, dst string, info fs.FileInfo, n *Copied, o CopyOptions) error {
	limit := cmp.Or(o.MaxBytes, defaultCopyBytes)
	src, err := files.Open(rel(source))
	if err != nil {
		return err
	}
	defer src.Close()
	f, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, info.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	n.Files = 1
	n.Bytes, err = io.Copy(f, io.LimitReader(o.counted(src, info.Size()), limit+1))
	err = cmp.Or(err, f.Close())
	if err == nil && n.Bytes > limit {
		err = tooMuch(limit)
	}
	if err != nil {
		os.Remove(dst)
	}
	return err
}

const (
	defaultCopyBytes = 16 << 30
	defaultCopyFiles = 1_000_000
)

func tooMuch(limit int64) error {
	return fmt.Errorf("copy out of the sandbox: more than %d bytes: %w", limit, ErrExhausted)
}

// extractTar unpacks an archive that is not trusted below root.
func extractTar(root *os.Root, r io.Reader, n *Copied, o CopyOptions) error {
	maxBytes, maxFiles := cmp.Or(o.MaxBytes, defaultCopyBytes), cmp.Or(o.MaxFiles, defaultCopyFiles)
	type dirMode struct {
		name string
		mode fs.FileMode
	}
	var dirs []dirMode
	tr := tar.NewReader(r)
	for entries := 0; ; entries++ {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("archive from the sandbox: %w", err)
		}
		if entries >= maxFiles {
			return fmt.Errorf("copy out of the sandbox: more than %d files: %w", maxFiles, ErrExhausted)
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		local, err := filepath.Localize(name)
		if err != nil || path.IsAbs(h.Name) || strings.ContainsRune(h.Name, 0) {
			return fmt.Errorf("archive from the sandbox: name %q: %w", clip(h.Name), ErrInvalid)
		}
		if err := plainParents(root, local); err != nil {
			return err
		}
		perm := fs.FileMode(h.Mode) & fs.ModePerm
		switch h.Typeflag {
		case tar.TypeDir:
			if err := root.MkdirAll(local, 0o700); err != nil {
				return err
			}
			dirs = append(dirs, dirMode{local, perm | 0o700})
		case tar.TypeReg, tar.TypeGNUSparse:
			err = extractFile(root, local, perm|0o600, tr, maxBytes-n.Bytes, h.ModTime, n)
			if errors.Is(err, ErrExhausted) {
				err = tooMuch(maxBytes)
			}
			if err != nil {
				return err
			}
		case tar.TypeSymlink:
			if !inside(name, h.Linkname) {
				o.warn(n, "%s: a link that leads outside, to %q", name, clip(h.Linkname))
				continue
			}
			if err := makeWay(root, local); err != nil {
				return err
			}
			if err := root.Symlink(filepath.FromSlash(h.Linkname), local); err != nil {
				return err
			}
		case tar.TypeLink:
			old, err := filepath.Localize(path.Clean(h.Linkname))
			if err != nil || path.IsAbs(h.Linkname) {
				return fmt.Errorf("archive from the sandbox: link to %q: %w", clip(h.Linkname), ErrInvalid)
			}
			if err := plainParents(root, old); err != nil {
				return err
			}
			// Of what is there already, only what this archive brought may get a second name; a link to it is all that
			// os.Root allows, and a link is not followed.
			if info, err := root.Lstat(old); err != nil || !info.Mode().IsRegular() {
				o.warn(n, "%s: a link to %q, which is not a file of the copy", name, clip(h.Linkname))
				continue
			}
			if old == local {
				continue
			}
			if err := makeWay(root, local); err != nil {
				return err
			}
			if err := root.Link(old, local); err != nil {
				return err
			}
		default:
			o.warn(n, "%s: not a file, a directory or a link", name)
			continue
		}
		n.Files++
	}
	// Last, so that a directory without write permission does not keep its own files out.
	for _, d := range slices.Backward(dirs) {
		if err := root.Chmod(d.name, d.mode); err != nil {
			return err
		}
	}
	return nil
}

func extractFile(root *os.Root, name string, perm fs.FileMode, r io.Reader, limit int64, mtime time.Time, n *Copied) error {
	if err := makeWay(root, name); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	k, err := io.Copy(f, io.LimitReader(r, limit+1))
	n.Bytes += k
	if err == nil && k > limit {
		err = ErrExhausted
	}
	if err == nil {
		err = f.Chmod(perm)
	}
	err = cmp.Or(err, f.Close())
	if err != nil {
		root.Remove(name)
		return err
	}
	if !mtime.IsZero() {
		root.Chtimes(name, mtime, mtime)
	}
	return nil
}

// plainParents makes the directories above a name, and refuses one that is a link: a real tree has nothing below a link.
func plainParents(root *os.Root, name string) error {
	dir := filepath.Dir(name)
	if dir == "." {
		return nil
	}
	at := ""
	for _, part := range strings.Split(dir, string(filepath.Separator)) {
		at = filepath.Join(at, part)
		info, err := root.Lstat(at)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return root.MkdirAll(dir, 0o755)
		case err != nil:
			return err
		case !info.IsDir():
			return fmt.Errorf("copy out of the sandbox: %q is not a directory: %w", at, ErrInvalid)
		}
	}
	return nil
}

// makeWay makes way for a new file, so that none is written through a link or into a file with other names.
func makeWay(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("copy out of the sandbox: %q: %w: there is a directory", name, fs.ErrExist)
	}
	return root.Remove(name)
}

// inside reports whether a link at name to target stays in the tree.
func inside(name, target string) bool {
	if target == "" || path.IsAbs(target) || strings.ContainsAny(target, "\x00\\:") {
		return false
	}
	// Up first and then down: after a name that is itself a link, ".." is not what it looks like.
	depth, down := strings.Count(path.Clean(name), "/"), false
	for _, part := range strings.Split(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; depth < 0 || down {
				return false
			}
		default:
			down = true
		}
	}
	return true
}

// absolute returns a path in the sandbox; what is relative is below /workspace.
func (s *Sandbox) absolute(op, name string) (string, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return "", &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	if !path.IsAbs(name) {
		name = path.Join(workDir, name)
	}
	return path.Clean(name), nil
}

// rel is the name of an absolute path in [Sandbox.FS].
func rel(p string) string { return cmp.Or(strings.TrimPrefix(path.Clean(p), "/"), ".") }

// contents reports whether src stands for what is in a directory.
func contents(src string) bool {
	src = filepath.ToSlash(src)
	return src == "." || strings.HasSuffix(src, "/.")
}

// baseName is the name that a copy of src gets.
func baseName(src string) (string, error) {
	abs, err := filepath.Abs(src)
	if err != nil {
		return "", err
	}
	name := filepath.Base(abs)
	if name == "." || name == string(filepath.Separator) {
		return "", fmt.Errorf("copy %s: %w: it has no name; write %s/. for what is in it", src, ErrInvalid, strings.TrimSuffix(src, "/"))
	}
	return name, nil
}

func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}
