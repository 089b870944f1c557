//go:build linux

// Package protocol is what the gVisor driver and its keeper say to each other over a unix socket.
//
// Each call is a connection of its own: one line of JSON from the driver, with file descriptors attached where the
// call needs some, then one line of JSON back. Closing the connection before the answer cancels the call. After the
// answer to OpDial the connection carries the bytes of the dialled port; after the answer to OpAttach and OpWatch it
// stays open, and OpWatch sends further lines.
//
// The keeper links neither the root package nor the driver package, so the types stand here again.
package protocol

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Version is the version of the protocol. A keeper of another version is replaced.
const Version = 2

// Socket and the other names are the files in a driver's state directory.
const (
	Socket   = "keeper.sock"
	PIDFile  = "keeper.pid"
	LockFile = "keeper.lock"
	LogFile  = "keeper.log"
)

// MaxFiles is how many descriptors one message can carry (SCM_MAX_FD of Linux).
const MaxFiles = 253

// The calls.
const (
	// OpAttach tells version and build, and counts as a client until the connection ends.
	OpAttach = "attach"
	OpCreate = "create"
	OpDelete = "delete"
	OpList   = "list"
	OpDial   = "dial"
	OpWatch  = "watch"
	OpStats  = "stats"
	OpCheck  = "check"
	// OpSnapshot writes an image into the directory that is the message's only descriptor.
	OpSnapshot = "snapshot"
	OpThaw     = "thaw"
	// OpRetire makes the keeper finish what it does and exit; sandboxes go on.
	OpRetire = "retire"
	// OpShutdown makes the keeper exit when it has no sandbox.
	OpShutdown = "shutdown"
)

// Request is a call.
type Request struct {
	Op   string `json:"op"`
	ID   string `json:"id,omitempty"`
	Port uint16 `json:"port,omitempty"`
	Spec *Spec  `json:"spec,omitempty"`
	// Freeze says that a snapshot leaves the sandbox standing still.
	Freeze bool `json:"freeze,omitempty"`
}

// Response is an answer.
type Response struct {
	OK    bool   `json:"ok"`
	Error *Error `json:"error,omitempty"`

	Version  int      `json:"version,omitempty"`
	Build    string   `json:"build,omitempty"`
	PID      int      `json:"pid,omitempty"`
	Statuses []Status `json:"statuses,omitempty"`
	Stats    *Stats   `json:"stats,omitempty"`
	Checks   []Check  `json:"checks,omitempty"`
	// Size of a snapshot's image in bytes.
	Size int64 `json:"size,omitempty"`
}

// Spec is a sandbox. Every FD is an index into the descriptors of the message; each is a detached mount
// (open_tree(2)) that the driver made in its own mount namespace, so that the keeper needs no path of the host.
type Spec struct {
	ID       string            `json:"id"`
	Hostname string            `json:"hostname"`
	Layers   []Layer           `json:"layers"`
	Binds    []Bind            `json:"binds,omitempty"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Guest    int               `json:"guest"`
	Limits   Limits            `json:"limits"`
	Env      []string          `json:"env,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	// Debug makes gVisor write its debug log into the sandbox's directory.
	Debug bool `json:"debug,omitempty"`
	// Root names the content of the layers and binds, and GuestBuild that of the guest: an image needs the same ones.
	Root       string `json:"root"`
	GuestBuild string `json:"guestBuild"`
	// Image, when set, is the directory of an image to go on from.
	Image *int `json:"image,omitempty"`
}

// Layer of the root, lowest first.
type Layer struct {
	FD     int    `json:"fd"`
	IDBase uint32 `json:"idBase"`
}

// Bind over the root. With Hide no descriptor is used. Flat is a clone without the mounts below it, for when one of
// these cannot be idmapped.
type Bind struct {
	FD     int    `json:"fd"`
	Flat   int    `json:"flat"`
	Target string `json:"target"`
	IDBase uint32 `json:"idBase"`
	Dir    bool   `json:"dir"`
	Hide   bool   `json:"hide,omitempty"`
}

// Mount of a host directory. With User the ids UID and GID stand for the sandbox's user, else IDBase for 0.
type Mount struct {
	FD       int    `json:"fd"`
	Target   string `json:"target"`
	Writable bool   `json:"writable,omitempty"`
	IDBase   uint32 `json:"idBase"`
	User     bool   `json:"user,omitempty"`
	UID      uint32 `json:"uid,omitempty"`
	GID      uint32 `json:"gid,omitempty"`
}

// Limits as in driver.Limits.
type Limits struct {
	CPUMillis uint32 `json:"cpuMillis"`
	Memory    int64  `json:"memory"`
	Disk      int64  `json:"disk"`
	PIDs      uint32 `json:"pids"`
}

// Status as in driver.Status.
type Status struct {
	ID    string `json:"id"`
	State string `json:"state"`
	Exit  *Exit  `json:"exit,omitempty"`
}

// Exit as in driver.Exit.
type Exit struct {
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Time    time.Time `json:"time"`
}

// Stats as in driver.Stats.
type Stats struct {
	CPUTime time.Duration `json:"cpuTime"`
	Memory  int64         `json:"memory"`
	Disk    int64         `json:"disk"`
	PIDs    uint32        `json:"pids"`
}

// Check as in driver.Check.
type Check struct {
	Name    string `json:"name"`
	Status  string `json:"status"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// The kinds of error; each stands for a sentinel of package warren or the standard library.
const (
	KindNotFound    = "not_found"
	KindExists      = "exists"
	KindInvalid     = "invalid"
	KindState       = "state"
	KindExhausted   = "exhausted"
	KindUnavailable = "unavailable"
	KindUnsupported = "unsupported"
	KindCanceled    = "canceled"
	KindImage       = "image"
	KindInternal    = "internal"
)

// Error is an error that crosses the socket.
type Error struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Errorf returns an Error of a kind.
func Errorf(kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Message: fmt.Errorf(format, args...).Error()}
}

// AsError returns err as an Error; what is none becomes KindInternal.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return &Error{Kind: e.Kind, Message: err.Error()}
	}
	return &Error{Kind: KindInternal, Message: err.Error()}
}

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
