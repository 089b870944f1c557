package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

// startTimeout is how long a daemon may take to answer: it may have many sandboxes to look at first.
const startTimeout = 60 * time.Second

// lockName is the file that the daemon of a data directory holds a lock on. The lock belongs to the process and ends with it, and
// the kernel tells whose it is, so that no number in a file has to be believed.
const lockName = "daemon.lock"

// exitLocked is what serve exits with when another daemon has the data directory, which is no failure to whoever wanted one.
const exitLocked = 75

// errLocked says that another daemon has the data directory.
var errLocked = fmt.Errorf("another daemon runs on this data directory: %w", warren.ErrExists)

// lockDataDir takes the lock, which ends with the process. The file must not be opened by this process again: closing any
// descriptor of it would give the lock up.
func lockDataDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		f.Close()
		return nil, errLocked
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	return f, nil
}

// daemonPID returns the process that holds the lock of a data directory, 0 if none does.
func daemonPID(dir string) (int, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		return 0, err
	}
	if lock.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(lock.Pid), nil
}

func logPath(dir string) string { return filepath.Join(dir, "logs", "daemon.log") }

// makeDataDir makes the top of a data directory. Sandboxes' files lie below and are reached through it by other
// ids, so others may pass but not list.
func makeDataDir(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(dir, "logs"), 0o700)
}

// ensureDaemon starts a daemon on the data directory unless one answers there. Many programs may do so at the same time, and a
// daemon may be on its way out: whoever loses the race for the lock waits for the winner, and tries again if that one goes.
func (a *app) ensureDaemon(ctx context.Context, dir string) error {
	if answers(ctx, dir) {
		return nil
	}
	if err := makeDataDir(dir); err != nil {
		return fmt.Errorf("make the data directory: %w; set WARREN_HOME to another, or WARREN_URL to a server", err)
	}
	deadline := time.After(startTimeout)
	var child *spawned
	for !answers(ctx, dir) {
		if child == nil {
			if pid, err := daemonPID(dir); err != nil {
				return err
			} else if pid == 0 {
				if child, err = spawnDaemon(dir); err != nil {
					return err
				}
			}
		}
		var ended <-chan error
		if child != nil {
			ended = child.ended
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != exitLocked {
				return fmt.Errorf("the daemon did not start: %s; the log is %s", lastWords(dir, child.log, err), logPath(dir))
			}
			child = nil // another was faster
		case <-deadline:
			return fmt.Errorf("the daemon did not answer within %v: %w; look into %s", startTimeout, warren.ErrUnavailable, logPath(dir))
		case <-time.After(5 * time.Millisecond):
		}
	}
	if child != nil {
		if pid, err := daemonPID(dir); err != nil || pid == child.pid {
			a.notice("started a daemon (log: %s)", logPath(dir))
		}
	}
	return nil
}

// spawned is a daemon that this program started.
type spawned struct {
	pid   int
	log   int64 // where its part of the log begins
	ended <-chan error
}

// spawnDaemon starts a daemon that outlives this program, its terminal and its Ctrl-C.
func spawnDaemon(dir string) (*spawned, error) {
	log, err := os.OpenFile(logPath(dir), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, "serve", "--data", dir)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a daemon: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return &spawned{pid: cmd.Process.Pid, log: begin, ended: ended}, nil
}

// answers reports whether something accepts connections on the socket. A socket that a killed daemon left refuses them.
func answers(ctx context.Context, dir string) bool {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", config.Socket(dir))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// lastWords returns what a daemon that ended at once said last.
func lastWords(dir string, from int64, err error) string {
	said := "it ended at once"
	if err != nil {
		said = err.Error()
	}
	f, openErr := os.Open(logPath(dir))
	if openErr != nil {
		return said
	}
	defer f.Close()
	data, readErr := io.ReadAll(io.LimitReader(io.NewSectionReader(f, from, 1<<20), 1<<20))
	if readErr != nil {
		return said
	}
	lines := bytes.Split(bytes.TrimSpace(data), []byte("\n"))
	if last := string(lines[len(lines)-1]); last != "" {
		return strings.TrimPrefix(last, "warren: ")
	}
	return said
}

// dialDaemon connects to the local daemon, and starts one when it was lost while this program ran.
func (a *app) dialDaemon(dir string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", config.Socket(dir))
		if err == nil || !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOENT) {
			return conn, err
		}
		if err := a.ensureDaemon(ctx, dir); err != nil {
			return nil, err
		}
		return new(net.Dialer).DialContext(ctx, "unix", config.Socket(dir))
	}
}
