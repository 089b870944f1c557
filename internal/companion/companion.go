//go:build linux

// Package companion starts, finds and replaces a process of this module that outlives the daemon: one at a time for each
// directory, which holds its socket, its log, and the lock that it has for as long as it lives.
package companion

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
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is such a process, seen from the daemon.
type Process struct {
	// Name is what its files are named for, and what errors call it.
	Name string
	// Dir holds its files.
	Dir string
	// Path and Args are what is executed. It gets the writing end of a pipe as descriptor 3, on which it says "ok", or why it cannot
	// start, and closes it.
	Path string
	Args []string
	// Env is its environment besides a PATH of the system's.
	Env []string
	// Log gets what it started and replaced.
	Log *slog.Logger
}

// ErrNone says that no such process answers.
var ErrNone = errors.New("no such process answers")

// maxLog is how large a log may be before the next process begins a new one.
const maxLog = 8 << 20

// Socket is the path of its socket.
func (p *Process) Socket() string { return filepath.Join(p.Dir, p.Name+".sock") }

// Connect opens a connection to its socket, or returns ErrNone.
func (p *Process) Connect(ctx context.Context) (*net.UnixConn, error) {
	name := p.Socket()
	if len(name) > 100 { // of 107 that fit into an address
		dir, err := unix.Open(p.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer unix.Close(dir)
		name = fmt.Sprintf("/proc/self/fd/%d/%s.sock", dir, p.Name)
	}
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
			return nil, ErrNone
		}
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// Lock waits until nobody else starts or replaces the process; closing the file lets others.
func (p *Process) Lock(ctx context.Context) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(p.Dir, p.Name+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(ctx, f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Start runs it in a session of its own and waits until it serves.
func (p *Process) Start(ctx context.Context) error {
	name := filepath.Join(p.Dir, p.Name+".log")
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
	cmd := exec.Command(p.Path, p.Args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{told}
	cmd.Dir = "/"
	cmd.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, p.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	told.Close()
	if err != nil {
		return fmt.Errorf("start the %s: %w", p.Name, err)
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
		return fmt.Errorf("start the %s: %s", p.Name, msg)
	}
	p.Log.Info("started the "+p.Name, "pid", cmd.Process.Pid)
	return nil
}

// Gone returns a function that waits until the process of this moment has ended.
func (p *Process) Gone() (func(context.Context) error, error) {
	f, err := os.OpenFile(filepath.Join(p.Dir, p.Name+".pid"), os.O_RDWR, 0)
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

// PID returns which process it is, or 0 if there is none.
func (p *Process) PID() int {
	f, err := os.Open(filepath.Join(p.Dir, p.Name+".pid"))
	if err != nil {
		return 0
	}
	defer f.Close()
	// Whoever has the lock is the one that it says.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return 0
	}
	var pid int
	if _, err := fmt.Fscan(f, &pid); err != nil || pid <= 1 {
		return 0
	}
	return pid
}

// Stopped says whether a process does not run because somebody has stopped it, by a signal, a debugger or its control group.
func Stopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// The name before may have anything in it.
	i := bytes.LastIndexByte(b, ')')
	if i < 0 || len(b) < i+3 {
		return false
	}
	if state := b[i+2]; state == 'T' || state == 't' {
		return true
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for file, frozen := range map[string]string{
			filepath.Join("/sys/fs/cgroup", parts[2], "cgroup.events"):         "frozen 1",
			filepath.Join("/sys/fs/cgroup/freezer", parts[2], "freezer.state"): "FROZEN",
		} {
			if b, err := os.ReadFile(file); err == nil && strings.Contains(string(b), frozen) {
				return true
			}
		}
	}
	return false
}

// Kill ends the process of this moment with SIGKILL and waits until it is gone.
func (p *Process) Kill(ctx context.Context) error {
	gone, err := p.Gone()
	if err != nil {
		return err
	}
	if pid := p.PID(); pid != 0 {
		// The handle is of this very process; that it still is the one is looked at after it was opened.
		proc, err := os.FindProcess(pid)
		if err != nil {
			return err
		}
		defer proc.Release()
		if p.PID() == pid {
			if err := proc.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return fmt.Errorf("end the %s (process %d): %w", p.Name, pid, err)
			}
		}
	}
	return gone(ctx)
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

// Become makes the calling process the one of its directory for as long as it lives, and listens on its socket. The file has the lock.
func Become(dir, name string) (*net.UnixListener, *os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, err
	}
	path := filepath.Join(dir, name+".pid")
	// One that is being replaced answers its last callers before it goes.
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, err
	}
	if err := flock(ctx, f); err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("another %s runs on this directory: %w", name, err)
	}
	fail := func(err error) (*net.UnixListener, *os.File, error) {
		f.Close()
		return nil, nil, err
	}
	if err := errors.Join(f.Truncate(0), writeLine(f, os.Getpid())); err != nil {
		return fail(err)
	}
	sock := filepath.Join(dir, name+".sock")
	if err := os.Remove(sock); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(err)
	}
	at := sock
	if len(sock) > 100 {
		d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(err)
		}
		defer unix.Close(d)
		at = fmt.Sprintf("/proc/self/fd/%d/%s.sock", d, name)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: at, Net: "unix"})
	if err != nil {
		return fail(err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(sock, 0o600); err != nil {
		l.Close()
		return fail(err)
	}
	return l, f, nil
}

func writeLine(w io.Writer, pid int) error {
	_, err := fmt.Fprintf(w, "%d\n", pid)
	return err
}

// BuildID returns the build id that the Go linker wrote into an executable; it differs whenever the program does.
func BuildID(path string) (string, error) {
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

// SameUser refuses a caller that is neither this process's user nor root.
func SameUser(c *net.UnixConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if cerr != nil {
		return cerr
	}
	if cred.Uid != 0 && cred.Uid != uint32(os.Geteuid()) {
		return fmt.Errorf("the caller is uid %d", cred.Uid)
	}
	return nil
}
