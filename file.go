package warren

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"sync"
)

// File is an open file of a sandbox. It reads what the file holds at the time of each request to the sandbox.
type File struct {
	fsys *FS
	name string
	path string
	info *fileInfo

	mu     sync.Mutex
	closed bool
	off    int64
	body   io.ReadCloser // of the bytes at bodyAt, or nil
	bodyAt int64
}

var (
	_ io.Seeker   = (*File)(nil)
	_ io.ReaderAt = (*File)(nil)
)

// Stat describes the file as it was when it was opened.
func (f *File) Stat() (fs.FileInfo, error) { return f.info, nil }

func (f *File) fail(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.name, Err: err}
}

// ranged asks for the bytes from off on, n of them or with n < 0 all; io.EOF means that there are none.
func (f *File) ranged(off, n int64) (io.ReadCloser, error) {
	var header http.Header
	if off > 0 || n >= 0 {
		spec := fmt.Sprintf("bytes=%d-", off)
		if n >= 0 {
			spec = fmt.Sprintf("bytes=%d-%d", off, off+n-1)
		}
		header = http.Header{"Range": {spec}}
	}
	res, err := f.fsys.get("read", f.name, f.path, header)
	if err != nil {
		var re *rangeError
		if errors.As(err, &re) {
			return nil, io.EOF
		}
		return nil, err
	}
	if off > 0 && res.StatusCode != http.StatusPartialContent {
		// Not every guest serves ranges of what is not a regular file.
		if _, err := io.CopyN(io.Discard, res.Body, off); err != nil {
			res.Body.Close()
			return nil, io.EOF
		}
	}
	return res.Body, nil
}

// Read reads the next bytes.
func (f *File) Read(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, f.fail("read", fs.ErrClosed)
	}
	if len(b) == 0 {
		return 0, nil
	}
	if f.body != nil && f.bodyAt != f.off {
		f.body.Close()
		f.body = nil
	}
	if f.body == nil {
		body, err := f.ranged(f.off, -1)
		if err != nil {
			return 0, err
		}
		f.body, f.bodyAt = body, f.off
	}
	n, err := f.body.Read(b)
	f.off += int64(n)
	f.bodyAt = f.off
	if err != nil && err != io.EOF {
		f.body.Close()
		f.body = nil
		err = f.fail("read", &Error{Kind: "unavailable", Message: err.Error(), Err: err})
	}
	return n, err
}

// ReadAt reads the bytes at off.
func (f *File) ReadAt(b []byte, off int64) (int, error) {
	f.mu.Lock()
	closed := f.closed
	f.mu.Unlock()
	switch {
	case closed:
		return 0, f.fail("read", fs.ErrClosed)
	case off < 0:
		return 0, f.fail("read", fs.ErrInvalid)
	case len(b) == 0:
		return 0, nil
	}
	body, err := f.ranged(off, int64(len(b)))
	if err != nil {
		return 0, err
	}
	defer body.Close()
	n, err := io.ReadFull(body, b)
	switch err {
	case nil:
		return n, nil
	case io.EOF, io.ErrUnexpectedEOF:
		return n, io.EOF
	}
	return n, f.fail("read", &Error{Kind: "unavailable", Message: err.Error(), Err: err})
}

// Seek sets where the next Read begins.
func (f *File) Seek(offset int64, whence int) (int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, f.fail("seek", fs.ErrClosed)
	}
	switch whence {
	case io.SeekStart:
	case io.SeekCurrent:
		offset += f.off
	case io.SeekEnd:
		info, err := f.fsys.Stat(f.name)
		if err != nil {
			return 0, setOp("seek", err)
		}
		offset += info.Size()
	default:
		return 0, f.fail("seek", fs.ErrInvalid)
	}
	if offset < 0 {
		return 0, f.fail("seek", fs.ErrInvalid)
	}
	f.off = offset
	return offset, nil
}

// Close ends a request that is under way.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.fail("close", fs.ErrClosed)
	}
	f.closed = true
	if f.body != nil {
		f.body.Close()
	}
	return nil
}

// dirFile is an open directory.
type dirFile struct {
	fsys   *FS
	name   string
	info   *fileInfo
	read   bool
	rest   []fs.DirEntry
	closed bool
}

func (d *dirFile) Stat() (fs.FileInfo, error) { return d.info, nil }

func (d *dirFile) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.name, Err: fmt.Errorf("is a directory: %w", ErrInvalid)}
}

func (d *dirFile) Close() error {
	if d.closed {
		return &fs.PathError{Op: "close", Path: d.name, Err: fs.ErrClosed}
	}
	d.closed = true
	return nil
}

func (d *dirFile) ReadDir(n int) ([]fs.DirEntry, error) {
	if d.closed {
		return nil, &fs.PathError{Op: "readdir", Path: d.name, Err: fs.ErrClosed}
	}
	if !d.read {
		entries, err := d.fsys.ReadDir(d.name)
		if err != nil {
			return nil, err
		}
		d.read, d.rest = true, entries
	}
	if n <= 0 {
		rest := d.rest
		d.rest = nil
		return rest, nil
	}
	if len(d.rest) == 0 {
		return nil, io.EOF
	}
	k := min(n, len(d.rest))
	out := d.rest[:k:k]
	d.rest = d.rest[k:]
	return out, nil
}

// rangeError is an answer that a file ends before the range asked for.
type rangeError struct{ error }
