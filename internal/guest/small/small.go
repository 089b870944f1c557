// Package small reads and writes small files with as few system calls as there can be.
//
// Package os makes nine of the three that a file needs, to learn whether it is one that can be waited for, and a system call is dear in a sandbox: one
// that stands on the way of every fork or command takes 20 to 100 µs.
package small

import (
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"
)

// Read returns what a file holds, at most limit bytes. What cannot be read at once, such as a pipe without a writer, is an error.
func Read(path string, limit int) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return read(fd, path, make([]byte, 0, min(limit, 4096)), limit, -1)
}

// ReadRegular returns what a regular file of at most limit bytes holds.
func ReadRegular(path string, limit int64) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, failed("stat", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > limit {
		return nil, fmt.Errorf("%s is no file of at most %d bytes", path, limit)
	}
	// What is as long as it said to be is whole.
	return read(fd, path, make([]byte, 0, st.Size+1), int(limit), int(st.Size))
}

// read appends to b what a descriptor gives until its end, the limit, or a read that ends where it was expected to.
func read(fd int, path string, b []byte, limit, expected int) ([]byte, error) {
	for len(b) < limit {
		b = slices.Grow(b, 1)
		n, err := again(func() (int, error) { return unix.Read(fd, b[len(b):min(cap(b), limit)]) })
		if err != nil {
			return b, failed("read", path, err)
		}
		b = b[:len(b)+n]
		if n == 0 || len(b) == expected {
			break
		}
	}
	return b, nil
}

// Write opens a file to be written with further flags, writes data from where that begins, and closes it.
func Write(path string, flags int, perm uint32, data []byte) error {
	fd, err := open(path, unix.O_WRONLY|flags, perm)
	if err != nil {
		return err
	}
	for len(data) > 0 {
		var n int
		if n, err = again(func() (int, error) { return unix.Write(fd, data) }); err != nil {
			break
		}
		data = data[n:]
	}
	if cerr := unix.Close(fd); err == nil {
		err = cerr
	}
	return failed("write", path, err)
}

func open(path string, flags int, perm uint32) (int, error) {
	fd, err := again(func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOCTTY, perm) })
	return fd, failed("open", path, err)
}

func again(do func() (int, error)) (int, error) {
	for {
		if n, err := do(); err != unix.EINTR {
			return n, err
		}
	}
}

func failed(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}
