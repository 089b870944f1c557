//go:build linux

package keeper

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// Role is the first argument that makes the runtime binary a keeper.
const Role = "keeper"

// Directories of the keeper's own root.
const (
	stateDir = "/state"
	stageDir = "/stage"
)

// readyFD is the descriptor on which a starting keeper tells the driver that it serves ("ok\n") or why not.
const readyFD = 3

// lockFD holds the lock of the state directory, which goes along when the binary executes itself.
const lockFD = 4

// Main runs the keeper with the arguments behind the role and returns its exit code.
//
// It runs twice in one process: the first pass makes the mount namespace on one thread and executes the binary again,
// so that the second pass has all of its threads in it.
func Main(args []string) int {
	fs := flag.NewFlagSet(Role, flag.ContinueOnError)
	state := fs.String("state", "", "state `directory`")
	inside := fs.Bool("inside", false, "the mount namespace is made")
	idle := fs.Duration("idle", 30*time.Second, "how long to stay with no sandbox and no client")
	if err := fs.Parse(args); err != nil || *state == "" {
		return 2
	}
	ready := os.NewFile(readyFD, "ready")
	unix.CloseOnExec(readyFD)
	fail := func(err error) int {
		fmt.Fprintf(ready, "%v\n", err)
		fmt.Fprintf(os.Stderr, "warren-runtime keeper: %v\n", err)
		return 1
	}
	if !*inside {
		// Before anything is made: a keeper that ends removes its directories until it lets go of the lock.
		if err := lockPIDFile(*state); err != nil {
			return fail(err)
		}
		err := enterNamespace(*state, append([]string{os.Args[0], Role, "-inside"}, args...))
		return fail(err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	if err := reserveStdio(); err != nil {
		return fail(err)
	}
	k, err := newKeeper(*idle, log)
	if err != nil {
		return fail(err)
	}
	signal.Ignore(unix.SIGHUP, unix.SIGPIPE)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT)
	go func() {
		<-stop
		k.retire()
	}()
	io.WriteString(ready, "ok\n")
	ready.Close()
	k.serve()
	return 0
}

// reserveStdio keeps the descriptors that gVisor's boot command moves its standard streams to, and refuses to start over.
// gVisor makes sockets for a new sandbox that its processes inherit under the number they have here; with some hundred
// descriptors open that would be one of these.
func reserveStdio() error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	const first, count = 253, 3
	for fd := first; fd < first+count; fd++ {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
			continue // in use, by what is not inherited
		}
		if err := unix.Dup3(null, fd, unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("reserve descriptor %d: %w", fd, err)
		}
	}
	return unix.Close(null)
}

// BeforeGVisor prepares this process for one of gVisor's commands and returns its arguments. A process that cannot be
// freed of what it inherited ends here.
func BeforeGVisor(args []string) []string {
	err := closeOthers(donated(args))
	if err == nil {
		args, err = placePassed(args)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "warren-runtime: %v\n", err)
		os.Exit(1)
	}
	if len(args) > 0 && (args[0] == "runsc-sandbox" || args[0] == "runsc-gofer") {
		// A start makes little garbage and has no time for it; it is collected when the sandbox runs.
		percent := debug.SetGCPercent(-1)
		time.AfterFunc(500*time.Millisecond, func() {
			debug.SetGCPercent(percent)
			debug.FreeOSMemory()
		})
	}
	if len(args) > 0 && args[0] == "runsc-sandbox" {
		useSeccomp()
		go takeSignals()
		return bootArgs(args, runtime.NumCPU())
	}
	return args
}

// takeSignals has Go take over the signals that gVisor takes over when a sandbox starts to run. The first to ask for a signal
// waits until two threads have spoken with each other about it, which for all of them is 10 ms, and here nobody waits.
func takeSignals() {
	ignored := make(chan os.Signal, 1)
	for sig := unix.Signal(1); sig <= 33; sig++ {
		if sig != unix.SIGURG && sig != unix.SIGPIPE && sig != unix.SIGCHLD {
			signal.Notify(ignored, sig)
		}
	}
}

// enterNamespace moves the calling thread into a new mount namespace with a root of its own, and executes the binary
// again there. It returns only on failure.
func enterNamespace(state string, argv []string) error {
	runtime.LockOSThread()
	// The namespace's root is built on a directory that is surely there and writable.
	if err := os.MkdirAll(filepath.Join(state, "ns"), 0o700); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace (root is needed): %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root := filepath.Join(state, "ns")
	if err := unix.Mount("warren", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0711,size=64m"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", root, err)
	}
	for _, d := range []string{"state", "stage", "proc", "sys", "dev", "etc"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o711); err != nil {
			return err
		}
	}
	// gVisor's sandbox process builds its root on /tmp, in a namespace copied from this one.
	if err := os.Mkdir(filepath.Join(root, "tmp"), 0o1777); err != nil {
		return err
	}
	if b, err := os.ReadFile("/etc/localtime"); err == nil {
		if err := os.WriteFile(filepath.Join(root, "etc/localtime"), b, 0o644); err != nil {
			return err
		}
	}
	bind := func(from, to string, flags uintptr) error {
		if err := unix.Mount(from, filepath.Join(root, to), "", unix.MS_BIND|flags, ""); err != nil {
			return fmt.Errorf("bind %s: %w", from, err)
		}
		return nil
	}
	if err := errors.Join(
		bind(state, "state", 0),
		bind("/proc", "proc", 0),
		bind("/sys", "sys", unix.MS_REC), // with the control groups
	); err != nil {
		return err
	}
	for _, dev := range []string{"null", "zero", "full", "random", "urandom"} {
		if err := os.WriteFile(filepath.Join(root, "dev", dev), nil, 0o600); err != nil {
			return err
		}
		if err := bind("/dev/"+dev, "dev/"+dev, 0); err != nil {
			return err
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the host's root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	for _, fd := range []uintptr{readyFD, lockFD} {
		if _, err := unix.FcntlInt(fd, unix.F_SETFD, 0); err != nil {
			return err
		}
	}
	env := []string{"PATH=/", "TMPDIR=/tmp", "GODEBUG=" + os.Getenv("GODEBUG")}
	return fmt.Errorf("execute the runtime again: %w", syscall.Exec("/proc/self/exe", argv, env))
}

// lockPIDFile makes this process the only keeper of a state directory for as long as it lives. The lock is on
// descriptor lockFD.
func lockPIDFile(state string) error {
	path := filepath.Join(state, protocol.PIDFile)
	// A keeper that retires answers its last callers before it goes.
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && !isFile(f, path) {
			err = errors.New("its last keeper has just removed its files")
		}
		if err == nil {
			defer f.Close()
			if err := f.Truncate(0); err != nil {
				return err
			}
			if _, err := fmt.Fprintf(f, "%d\n", os.Getpid()); err != nil {
				return err
			}
			return unix.Dup3(int(f.Fd()), lockFD, unix.O_CLOEXEC)
		}
		f.Close()
		if time.Now().After(deadline) {
			return fmt.Errorf("another keeper runs on this state directory: %w", err)
		}
	}
}

// isFile says whether the open file is still the one of that name.
func isFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}
