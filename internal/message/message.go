//go:build linux

// Package message exchanges single lines of JSON, with file descriptors attached, over unix sockets: what the processes of this module that
// outlive each other say to one another.
package message

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxFiles is how many descriptors one message can carry (SCM_MAX_FD of Linux).
const MaxFiles = 253

// maxLine bounds a message: far above any spec, far below what could hurt.
const maxLine = 16 << 20

// Write sends v as a line with files attached.
func Write(c *net.UnixConn, v any, files ...*os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if len(files) == 0 {
		_, err = c.Write(b)
		return err
	}
	if len(files) > MaxFiles {
		return fmt.Errorf("%d descriptors in one message; at most %d fit", len(files), MaxFiles)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	// The rights travel with the first byte, the rest follows as it fits into the socket's buffer.
	if _, _, err := c.WriteMsgUnix(b[:1], syscall.UnixRights(fds...), nil); err != nil {
		return err
	}
	_, err = c.Write(b[1:])
	return err
}

// Read receives one line into v, and the files attached to it, which belong to the caller. It reads no byte beyond the
// line, because what follows may be the stream of a dialled port.
func Read(c *net.UnixConn, v any) ([]*os.File, error) {
	var files []*os.File
	fail := func(err error) ([]*os.File, error) {
		for _, f := range files {
			f.Close()
		}
		return nil, err
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return fail(err)
	}
	var line []byte
	buf := make([]byte, 4096)
	oob := make([]byte, syscall.CmsgSpace(MaxFiles*4))
	for {
		// Peek, so that exactly the line can be taken.
		var n int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			n, _, rerr = unix.Recvfrom(int(fd), buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return rerr != unix.EAGAIN && rerr != unix.EINTR
		})
		if err == nil {
			err = rerr
		}
		if err != nil {
			return fail(err)
		}
		if n == 0 {
			return fail(io.ErrUnexpectedEOF)
		}
		take := n
		end := bytes.IndexByte(buf[:n], '\n')
		if end >= 0 {
			take = end + 1
		}
		n, oobn, _, _, err := c.ReadMsgUnix(buf[:take], oob)
		if err != nil {
			return fail(err)
		}
		if oobn > 0 {
			got, err := parseRights(oob[:oobn])
			files = append(files, got...)
			if err != nil {
				return fail(err)
			}
		}
		line = append(line, buf[:n]...)
		if end >= 0 && n == take {
			break
		}
		if len(line) > maxLine {
			return fail(errors.New("message is too long"))
		}
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fail(err)
	}
	return files, nil
}

func parseRights(oob []byte) ([]*os.File, error) {
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range msgs {
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // credentials and the like
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}
