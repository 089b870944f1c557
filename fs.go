package warren

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/warren-sandbox/warren/proto/e2b/filesystem"
)

// FS is the files of a sandbox. Names are as in [io/fs]: relative to the FS's root, with slashes, and without "." or ".."; the root
// of [Sandbox.FS] is "/", so that "workspace/main.go" names /workspace/main.go.
//
// Errors are *fs.PathError and match fs.ErrNotExist, fs.ErrExist and fs.ErrPermission; a sandbox that is gone matches
// [ErrNotFound]. An FS may be used at the same time.
type FS struct {
	sb   *Sandbox
	ctx  context.Context
	root string
	user string
}

var (
	_ fs.FS         = (*FS)(nil)
	_ fs.ReadDirFS  = (*FS)(nil)
	_ fs.ReadFileFS = (*FS)(nil)
	_ fs.StatFS     = (*FS)(nil)
	_ fs.SubFS      = (*FS)(nil)
	_ fs.ReadLinkFS = (*FS)(nil)
)

// FS returns the files of the sandbox as its default user sees them.
func (s *Sandbox) FS() *FS { return &FS{sb: s, ctx: context.Background(), root: "/"} }

// WithContext returns the same files with a context for all calls.
func (f *FS) WithContext(ctx context.Context) *FS {
	g := *f
	g.ctx = ctx
	return &g
}

// WithUser returns the same files as another user sees them.
func (f *FS) WithUser(user string) *FS {
	g := *f
	g.user = user
	return &g
}

// Dir returns the files below a directory, without asking whether it exists. It is [FS.Sub] with the concrete type.
func (f *FS) Dir(dir string) (*FS, error) {
	p, err := f.path("sub", dir)
	if err != nil {
		return nil, err
	}
	g := *f
	g.root = p
	return &g, nil
}

// Sub returns the files below a directory.
func (f *FS) Sub(dir string) (fs.FS, error) {
	g, err := f.Dir(dir)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// path returns the path in the sandbox that a name stands for.
func (f *FS) path(op, name string) (string, error) {
	if !fs.ValidPath(name) || strings.ContainsRune(name, 0) {
		return "", &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	return path.Join(f.root, name), nil
}

// lstat describes a name, a symbolic link itself too.
func (f *FS) lstat(op, name string) (*filesystem.EntryInfo, error) {
	p, err := f.path(op, name)
	if err != nil {
		return nil, err
	}
	res, err := f.sb.guest.files.Stat(f.ctx, request(f.user, &filesystem.StatRequest{Path: p}))
	if err != nil {
		return nil, fileError(op, name, err)
	}
	return res.Msg.GetEntry(), nil
}

// Stat describes a file; of a symbolic link, its target.
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	e, err := f.lstat("stat", name)
	if err != nil {
		return nil, err
	}
	return f.follow("stat", name, e)
}

// follow describes what a link points at.
func (f *FS) follow(op, name string, e *filesystem.EntryInfo) (*fileInfo, error) {
	if e.SymlinkTarget == nil {
		return newFileInfo(path.Base(name), e), nil
	}
	if e.GetType() == filesystem.FileType_FILE_TYPE_UNSPECIFIED {
		return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	// The entry has the target's type and mode but the link's size and time.
	res, err := f.sb.guest.files.Stat(f.ctx, request(f.user, &filesystem.StatRequest{Path: e.GetSymlinkTarget()}))
	if err != nil {
		return nil, fileError(op, name, err)
	}
	return newFileInfo(path.Base(name), res.Msg.GetEntry()), nil
}

// Lstat describes a file without following a symbolic link.
func (f *FS) Lstat(name string) (fs.FileInfo, error) {
	e, err := f.lstat("lstat", name)
	if err != nil {
		return nil, err
	}
	return linkInfo(path.Base(name), e), nil
}

// ReadLink returns the target of a symbolic link, absolute and fully resolved, as the guest tells it.
func (f *FS) ReadLink(name string) (string, error) {
	e, err := f.lstat("readlink", name)
	if err != nil {
		return "", err
	}
	if e.SymlinkTarget == nil {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return e.GetSymlinkTarget(), nil
}

// ReadDir returns the entries of a directory by name.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	p, err := f.path("readdir", name)
	if err != nil {
		return nil, err
	}
	res, err := f.sb.guest.files.ListDir(f.ctx, request(f.user, &filesystem.ListDirRequest{Path: p, Depth: 1}))
	if err != nil {
		return nil, fileError("readdir", name, err)
	}
	entries := make([]fs.DirEntry, 0, len(res.Msg.GetEntries()))
	for _, e := range res.Msg.GetEntries() {
		// What a guest calls a name goes into paths of this side.
		if n := e.GetName(); n == "" || n == "." || n == ".." || strings.ContainsAny(n, "/\x00") {
			continue
		}
		entries = append(entries, fs.FileInfoToDirEntry(linkInfo(e.GetName(), e)))
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	return entries, nil
}

// ReadFile returns the content of a file.
func (f *FS) ReadFile(name string) ([]byte, error) {
	p, err := f.path("open", name)
	if err != nil {
		return nil, err
	}
	res, err := f.get("open", name, p, nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	var b bytes.Buffer
	if n := res.ContentLength; n > 0 && n < 1<<30 {
		b.Grow(int(n) + bytes.MinRead)
	}
	if _, err := b.ReadFrom(res.Body); err != nil {
		return nil, &fs.PathError{Op: "read", Path: name, Err: &Error{Kind: "unavailable", Message: err.Error(), Err: err}}
	}
	return b.Bytes(), nil
}

// get asks for the bytes of a file, of a range of them when header says so.
func (f *FS) get(op, name, p string, header http.Header) (*http.Response, error) {
	var res *http.Response
	err := f.sb.c.again(f.ctx, func() (err error) {
		res, err = f.sb.guest.do(f.ctx, "GET", "/files", f.user, f.query(p), header, nil)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: op, Path: name, Err: err}
	}
	return res, nil
}

func (f *FS) query(p string) url.Values {
	q := url.Values{"path": {p}}
	if f.user != "" {
		q.Set("username", f.user)
	}
	return q
}

// Open opens a file for reading. Files are io.Seeker and io.ReaderAt; a seek asks for the range it needs.
func (f *FS) Open(name string) (fs.File, error) {
	e, err := f.lstat("open", name)
	if err != nil {
		return nil, err
	}
	info, err := f.follow("open", name, e)
	if err != nil {
		return nil, err
	}
	p, _ := f.path("open", name)
	if info.IsDir() {
		return &dirFile{fsys: f, name: name, info: info}, nil
	}
	return &File{fsys: f, name: name, path: p, info: info}, nil
}

// WriteFile writes data to a file, and makes the directories on the way. Unlike in os, perm is the mode of the file after the call
// also when it existed; 0 means 0644 for a new one and no change of another.
func (f *FS) WriteFile(name string, data []byte, perm fs.FileMode) error {
	if err := f.upload(name, bytes.NewReader(data)); err != nil {
		return err
	}
	if perm == 0 {
		return nil
	}
	info, err := f.Stat(name)
	if err != nil || info.Mode().Perm() == perm.Perm() {
		return err
	}
	return f.Chmod(name, perm)
}

func (f *FS) upload(name string, r io.Reader) error {
	p, err := f.path("write", name)
	if err != nil {
		return err
	}
	header := http.Header{"Content-Type": {"application/octet-stream"}}
	res, err := f.sb.guest.do(f.ctx, "POST", "/files", f.user, f.query(p), header, r)
	if err != nil {
		return &fs.PathError{Op: "write", Path: name, Err: err}
	}
	defer res.Body.Close()
	io.Copy(io.Discard, io.LimitReader(res.Body, 1<<20))
	return nil
}

// Create returns a writer of a new content of a file, which streams to the sandbox. Close returns the first error; only after it
// returned nil is all of the content there.
func (f *FS) Create(name string) (io.WriteCloser, error) {
	if _, err := f.path("create", name); err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	u := &upload{w: w, done: make(chan error, 1)}
	go func() {
		err := f.upload(name, r)
		r.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		u.done <- err
	}()
	return u, nil
}

type upload struct {
	w    *io.PipeWriter
	done chan error
}

func (u *upload) Write(b []byte) (int, error) { return u.w.Write(b) }

func (u *upload) Close() error {
	u.w.Close()
	err := <-u.done
	u.done <- fs.ErrClosed
	return err
}

// Mkdir makes a directory, and those on the way to it. One that exists gives fs.ErrExist.
func (f *FS) Mkdir(name string) error {
	p, err := f.path("mkdir", name)
	if err != nil {
		return err
	}
	_, err = f.sb.guest.files.MakeDir(f.ctx, request(f.user, &filesystem.MakeDirRequest{Path: p}))
	return fileError("mkdir", name, err)
}

// MkdirAll makes a directory, and those on the way to it. One that exists is fine. The guest gives it mode 0755; another perm is
// set on the last one.
func (f *FS) MkdirAll(name string, perm fs.FileMode) error {
	err := f.Mkdir(name)
	if errors.Is(err, fs.ErrExist) {
		info, serr := f.Stat(name)
		if serr != nil {
			return serr
		}
		if info.IsDir() {
			return nil
		}
	}
	if err != nil || perm.Perm() == 0 || perm.Perm() == 0o755 {
		return err
	}
	return f.Chmod(name, perm)
}

// Remove removes a file or an empty directory.
func (f *FS) Remove(name string) error {
	info, err := f.Lstat(name)
	if err != nil {
		return setOp("remove", err)
	}
	if info.IsDir() {
		entries, err := f.ReadDir(name)
		if err != nil {
			return setOp("remove", err)
		}
		if len(entries) > 0 {
			return &fs.PathError{Op: "remove", Path: name, Err: fmt.Errorf("directory not empty: %w", ErrState)}
		}
	}
	return setOp("remove", f.RemoveAll(name))
}

func setOp(op string, err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		pe.Op = op
	}
	return err
}

// RemoveAll removes a file, or a directory with all below it. What does not exist is fine.
func (f *FS) RemoveAll(name string) error {
	p, err := f.path("removeall", name)
	if err != nil {
		return err
	}
	_, err = f.sb.guest.files.Remove(f.ctx, request(f.user, &filesystem.RemoveRequest{Path: p}))
	if err = fileError("removeall", name, err); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Rename moves a file or directory, and makes the directories on the way to its new name.
func (f *FS) Rename(oldname, newname string) error {
	from, err := f.path("rename", oldname)
	if err != nil {
		return err
	}
	to, err := f.path("rename", newname)
	if err != nil {
		return err
	}
	_, err = f.sb.guest.files.Move(f.ctx, request(f.user, &filesystem.MoveRequest{Source: from, Destination: to}))
	return fileError("rename", oldname, err)
}

// Chmod changes the permission bits. The wire has no word for it, so it runs the image's chmod; an image without one gives
// errors.ErrUnsupported.
func (f *FS) Chmod(name string, mode fs.FileMode) error {
	p, err := f.path("chmod", name)
	if err != nil {
		return err
	}
	if _, err := f.lstat("chmod", name); err != nil {
		return err
	}
	cmd := f.sb.Command("chmod", "--", strconv.FormatUint(uint64(mode.Perm()), 8), p)
	cmd.User, cmd.Dir, cmd.Env = f.user, "/", []string{"LC_ALL=C"}
	_, err = cmd.Output(f.ctx)
	var ee *ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ee):
		msg, kind := strings.TrimSpace(string(ee.Stderr)), error(ErrState)
		if strings.Contains(msg, "not permitted") || strings.Contains(msg, "denied") {
			kind = fs.ErrPermission
		}
		return &fs.PathError{Op: "chmod", Path: name, Err: fmt.Errorf("%s: %w", msg, kind)}
	case errors.Is(err, fs.ErrNotExist):
		return &fs.PathError{Op: "chmod", Path: name, Err: fmt.Errorf("the image has no chmod: %w", errors.ErrUnsupported)}
	}
	return &fs.PathError{Op: "chmod", Path: name, Err: err}
}

// FileEvent is one change of a file.
type FileEvent struct {
	// Name relative to the watched directory.
	Name string `json:"name"`
	// Op is "create", "write", "remove", "rename" or "chmod".
	Op string `json:"op"`
}

var fileOps = map[filesystem.EventType]string{
	filesystem.EventType_EVENT_TYPE_CREATE: "create",
	filesystem.EventType_EVENT_TYPE_WRITE:  "write",
	filesystem.EventType_EVENT_TYPE_REMOVE: "remove",
	filesystem.EventType_EVENT_TYPE_RENAME: "rename",
	filesystem.EventType_EVENT_TYPE_CHMOD:  "chmod",
}

// Watch returns the changes in a directory from now on, with recursive also those below it. The first error ends the watch; a
// connection that breaks is one, since changes may have been missed. The first pair, an event with no Op, says that the watch has begun.
func (f *FS) Watch(dir string, recursive bool) iter.Seq2[FileEvent, error] {
	return func(yield func(FileEvent, error) bool) {
		p, err := f.path("watch", dir)
		if err != nil {
			yield(FileEvent{}, err)
			return
		}
		ctx, cancel := context.WithCancel(f.ctx)
		defer cancel()
		stream, err := f.sb.guest.files.WatchDir(ctx, request(f.user, &filesystem.WatchDirRequest{Path: p, Recursive: recursive}))
		if err != nil {
			yield(FileEvent{}, fileError("watch", dir, err))
			return
		}
		defer stream.Close()
		for stream.Receive() {
			var e FileEvent
			switch ev := stream.Msg().GetEvent().(type) {
			case *filesystem.WatchDirResponse_Start:
			case *filesystem.WatchDirResponse_Filesystem:
				e = FileEvent{ev.Filesystem.GetName(), fileOps[ev.Filesystem.GetType()]}
			default:
				continue
			}
			if !yield(e, nil) {
				cancel()
				return
			}
		}
		if err := stream.Err(); err != nil {
			yield(FileEvent{}, fileError("watch", dir, err))
			return
		}
		yield(FileEvent{}, &fs.PathError{Op: "watch", Path: dir, Err: streamEnd("", nil)})
	}
}

// fileInfo describes a file of a sandbox.
type fileInfo struct {
	name string
	size int64
	mode fs.FileMode
	time time.Time
	sys  *Entry
}

// Entry is what FileInfo.Sys returns for a file of a sandbox.
type Entry struct {
	// Path is absolute in the sandbox.
	Path         string
	Owner, Group string
	// Target of a symbolic link, absolute and resolved.
	Target string
	// Metadata given at the upload.
	Metadata map[string]string
}

func newFileInfo(name string, e *filesystem.EntryInfo) *fileInfo {
	info := &fileInfo{name: name, size: e.GetSize(), time: timeFrom(e.GetModifiedTime()), mode: fs.FileMode(e.GetMode()) & fs.ModePerm}
	info.sys = &Entry{Path: e.GetPath(), Owner: e.GetOwner(), Group: e.GetGroup(), Target: e.GetSymlinkTarget(), Metadata: e.GetMetadata()}
	switch e.GetType() {
	case filesystem.FileType_FILE_TYPE_DIRECTORY:
		info.mode |= fs.ModeDir
	case filesystem.FileType_FILE_TYPE_UNSPECIFIED:
		info.mode |= fs.ModeIrregular
	}
	// The letters before the permission bits tell of set-uid files, pipes and devices.
	if perm := e.GetPermissions(); len(perm) > 9 {
		for _, r := range perm[:len(perm)-9] {
			if i := strings.IndexRune(modeLetters, r); i >= 0 && r != 'L' {
				info.mode |= 1 << (31 - i)
				if r != 'u' && r != 'g' && r != 't' && r != 'd' {
					info.mode &^= fs.ModeIrregular
				}
			}
		}
	}
	return info
}

// modeLetters are those of fs.FileMode.String, from the highest bit.
const modeLetters = "dalTLDpSugct?"

// linkInfo describes an entry itself: of a link, the link.
func linkInfo(name string, e *filesystem.EntryInfo) *fileInfo {
	info := newFileInfo(name, e)
	if e.SymlinkTarget != nil {
		info.mode = fs.ModeSymlink | 0o777
	}
	return info
}

func (i *fileInfo) Name() string       { return i.name }
func (i *fileInfo) Size() int64        { return i.size }
func (i *fileInfo) Mode() fs.FileMode  { return i.mode }
func (i *fileInfo) ModTime() time.Time { return i.time }
func (i *fileInfo) IsDir() bool        { return i.mode.IsDir() }
func (i *fileInfo) Sys() any           { return i.sys }
func (i *fileInfo) String() string     { return fs.FormatFileInfo(i) }
