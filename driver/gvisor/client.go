//go:build linux

package gvisor

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

var (
	// errNoKeeper says that no keeper answered at all: the call has not begun.
	errNoKeeper = errors.New("no keeper answers")
	// errLost says that the keeper went away during a call.
	errLost = fmt.Errorf("the keeper went away during the call: %w", warren.ErrUnavailable)
)

// call makes one call; the keeper is started when none is there.
func (d *Driver) call(ctx context.Context, req *protocol.Request, files ...*os.File) (*protocol.Response, error) {
	c, r, err := d.open(ctx, req, files...)
	if err != nil {
		return nil, err
	}
	c.Close()
	return r, nil
}

// open makes a call and returns the connection on which it goes on.
func (d *Driver) open(ctx context.Context, req *protocol.Request, files ...*os.File) (*net.UnixConn, *protocol.Response, error) {
	for try := 0; ; try++ {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if d.isClosed() {
			return nil, nil, fmt.Errorf("the driver is closed: %w", warren.ErrUnavailable)
		}
		c, r, err := d.roundTrip(ctx, req, files...)
		if !errors.Is(err, errNoKeeper) || try == 3 {
			return c, r, err
		}
		if err := d.ensure(ctx, false); err != nil {
			return nil, nil, err
		}
	}
}

func (d *Driver) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// roundTrip sends a request to the keeper that is there and waits for the answer. When ctx ends it tells the keeper,
// by closing its sending side, and waits for a moment for the answer that everything has been undone.
func (d *Driver) roundTrip(ctx context.Context, req *protocol.Request, files ...*os.File) (*net.UnixConn, *protocol.Response, error) {
	c, err := d.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	type answer struct {
		r   *protocol.Response
		err error
	}
	got := make(chan answer, 1)
	go func() {
		if err := protocol.Write(c, req, files...); err != nil {
			got <- answer{err: err}
			return
		}
		r := &protocol.Response{}
		_, err := protocol.Read(c, r)
		got <- answer{r, err}
	}()
	var a answer
	select {
	case a = <-got:
	case <-ctx.Done():
		c.CloseWrite()
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		a = <-got
		if a.err == nil && a.r.Error == nil && (req.Op == protocol.OpCreate || req.Op == protocol.OpDelete || req.Op == protocol.OpSnapshot) {
			break // it was done before the cancellation arrived
		}
		c.Close()
		return nil, nil, ctx.Err()
	}
	switch {
	case a.err == nil && a.r.Error != nil:
		c.Close()
		return nil, nil, decodeError(ctx, a.r.Error)
	case a.err != nil:
		c.Close()
		if errors.Is(a.err, io.ErrUnexpectedEOF) || errors.Is(a.err, unix.ECONNRESET) || errors.Is(a.err, unix.EPIPE) {
			if req.Op == protocol.OpCreate || req.Op == protocol.OpSnapshot {
				return nil, nil, errLost
			}
			return nil, nil, errNoKeeper // the others may be repeated
		}
		return nil, nil, a.err
	}
	return c, a.r, nil
}

// decodeError turns an error of the keeper into one that matches a sentinel.
func decodeError(ctx context.Context, e *protocol.Error) error {
	var sentinel error
	switch e.Kind {
	case protocol.KindNotFound:
		sentinel = warren.ErrNotFound
	case protocol.KindExists:
		sentinel = warren.ErrExists
	case protocol.KindInvalid:
		sentinel = warren.ErrInvalid
	case protocol.KindState:
		sentinel = warren.ErrState
	case protocol.KindExhausted:
		sentinel = warren.ErrExhausted
	case protocol.KindUnavailable:
		sentinel = warren.ErrUnavailable
	case protocol.KindUnsupported:
		sentinel = errors.ErrUnsupported
	case protocol.KindImage:
		sentinel = driver.ErrImage
	case protocol.KindCanceled:
		if sentinel = ctx.Err(); sentinel == nil {
			sentinel = context.Canceled
		}
	default:
		return errors.New(e.Message)
	}
	return fmt.Errorf("%s: %w", e.Message, sentinel)
}

// connect opens a connection to the keeper's socket, or returns errNoKeeper.
func (d *Driver) connect(ctx context.Context) (*net.UnixConn, error) {
	name := filepath.Join(d.opts.StateDir, protocol.Socket)
	if len(name) > 100 { // of 107 that fit into an address
		dir, err := unix.Open(d.opts.StateDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer unix.Close(dir)
		name = fmt.Sprintf("/proc/self/fd/%d/%s", dir, protocol.Socket)
	}
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
			return nil, errNoKeeper
		}
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// ensure makes a keeper of our build answer, and holds a connection to it. With replace it also ends one of another
// build; sandboxes go on, and the new keeper takes them over.
func (d *Driver) ensure(ctx context.Context, replace bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("the driver is closed: %w", warren.ErrUnavailable)
	}
	// One at a time, also among processes.
	lock, err := os.OpenFile(filepath.Join(d.opts.StateDir, protocol.LockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := flock(ctx, lock); err != nil {
		return err
	}
	c, r, err := d.roundTrip(ctx, &protocol.Request{Op: protocol.OpAttach})
	if err == nil && replace {
		build, berr := buildID(d.opts.RuntimePath)
		if berr != nil {
			c.Close()
			return berr
		}
		if r.Version != protocol.Version || r.Build != build {
			d.log.Info("replace the keeper, which is of another build", "pid", r.PID)
			c.Close()
			gone, err := d.goneFunc()
			if err != nil {
				return err
			}
			if _, _, err := d.roundTrip(ctx, &protocol.Request{Op: protocol.OpRetire}); err != nil && !errors.Is(err, errNoKeeper) {
				return fmt.Errorf("replace the keeper: %w", err)
			}
			if err := gone(ctx); err != nil {
				return err
			}
			c = nil
		}
	}
	if c == nil && (err == nil || errors.Is(err, errNoKeeper)) {
		if err = d.start(ctx); err == nil {
			c, _, err = d.roundTrip(ctx, &protocol.Request{Op: protocol.OpAttach})
		}
	}
	if err != nil {
		return fmt.Errorf("reach the keeper: %w", err)
	}
	if d.held != nil {
		d.held.Close()
	}
	d.held = c
	return nil
}

func flock(ctx context.Context, f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// maxLog is how large a keeper's log may be before the next keeper begins a new one.
const maxLog = 8 << 20

// start runs a keeper in a session of its own and waits until it serves.
func (d *Driver) start(ctx context.Context) error {
	name := filepath.Join(d.opts.StateDir, protocol.LogFile)
	if fi, err := os.Stat(name); err == nil && fi.Size() > maxLog {
		if err := os.Rename(name, name+".old"); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	ready, told, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(d.opts.RuntimePath, "keeper", "-state", d.opts.StateDir, "-idle", d.opts.KeeperIdle.String())
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{told}
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	told.Close()
	if err != nil {
		return fmt.Errorf("start the keeper: %w", err)
	}
	go cmd.Wait() // it is reaped when it ends before us
	var line []byte
	read := make(chan struct{})
	go func() {
		defer close(read)
		line, _ = io.ReadAll(io.LimitReader(ready, 4096))
	}()
	select {
	case <-read:
	case <-ctx.Done():
		cmd.Process.Kill()
		return ctx.Err()
	}
	if msg := string(bytes.TrimSpace(line)); msg != "ok" {
		if msg == "" {
			msg = "it ended at once; its log has more"
		}
		return fmt.Errorf("start the keeper: %s", msg)
	}
	d.log.Info("started the keeper", "pid", cmd.Process.Pid)
	return nil
}

// goneFunc returns a function that waits until the keeper of this moment has let go of the state directory, which it does
// when it has ended.
func (d *Driver) goneFunc() (func(context.Context) error, error) {
	f, err := os.OpenFile(filepath.Join(d.opts.StateDir, protocol.PIDFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return func(context.Context) error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		defer f.Close()
		return flock(ctx, f)
	}, nil
}

// buildID is keeper.BuildID; that package links gVisor.
func buildID(path string) (string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return "", fmt.Errorf("read the build id of %s: %w", filepath.Base(path), err)
	}
	defer f.Close()
	s := f.Section(".note.go.buildid")
	if s == nil {
		return "", fmt.Errorf("%s has no Go build id", filepath.Base(path))
	}
	b, err := s.Data()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16]), nil
}
