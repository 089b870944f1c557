package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/channel"
	"github.com/warren-sandbox/warren/internal/guest/hold"
	"github.com/warren-sandbox/warren/internal/guest/lifecycle"
)

// Memory of the guest itself: the collector runs early rather than late, since an idle guest should cost little.
const (
	gcPercent   = 40
	memoryLimit = 64 << 20
)

const usage = `warren-guest runs as process 1 of a sandbox. "warren-guest channel SOCKET" instead carries a channel between its standard
streams and the socket of the guest that runs. Process 1 takes its settings from the environment:

  WARREN_CHANNEL_FD      descriptor of the channel to the host
  WARREN_CHANNEL_CONTROL descriptor on which the host begins that channel anew
  WARREN_CHANNEL_SOCKET  path of a unix socket to take channels on
  WARREN_CHANNEL_TOKEN   token with which a TCP connection may become a channel
  WARREN_LISTEN          TCP address to listen on (default 127.0.0.1:49983; "none" for none)
  WARREN_HOSTNAME        host name to set
  WARREN_USER            default user (default "user")
  WARREN_WORKDIR         default working directory
  WARREN_LOG_DIR         where long output is kept (default /var/log/warren)
`

// Main runs the guest until it is told to end, or a relay to it; it returns the exit code.
func Main(args []string, environ []string, stderr io.Writer) int {
	if filepath.Base(args[0]) == hold.Command {
		return hold.Dir(filepath.Join(lifecycle.Dir, "hold")).Main(args, stderr)
	}
	work := func() error { return run(environ) }
	if len(args) == 3 && args[1] == "channel" {
		work = func() error { return relay(args[2], os.Stdin, os.Stdout) }
	} else if len(args) > 1 {
		fmt.Fprint(stderr, usage)
		return 2
	}
	if err := work(); err != nil {
		fmt.Fprintf(stderr, "warren-guest: %v\n", err)
		return 1
	}
	return 0
}

func run(environ []string) error {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	own, rest := split(environ)
	init := os.Getpid() == 1
	// Nothing of the guest's memory is for others in the sandbox: no ptrace, no core dump, no /proc/1/mem or environ.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make the process not dumpable: %w", err)
	}
	for k := range own {
		os.Unsetenv(k)
	}
	unix.Umask(0o022)
	// Nor are descriptors that the guest was started with for what it starts; a kernel without the call has none such.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if init {
		if name := own["WARREN_HOSTNAME"]; name != "" {
			if err := unix.Sethostname([]byte(name)); err != nil && !errors.Is(err, unix.EPERM) {
				return fmt.Errorf("set the host name: %w", err)
			}
		}
		// Not every kernel lets it; then the memory guard is the only help.
		_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
	}
	logDir := own["WARREN_LOG_DIR"]
	if logDir == "" {
		logDir = "/var/log/warren"
		if os.Geteuid() != 0 {
			logDir = filepath.Join(os.TempDir(), "warren-guest-"+strconv.Itoa(os.Geteuid()))
		}
	}
	config := Config{ReapOrphans: init, LogDir: logDir, ChannelToken: own["WARREN_CHANNEL_TOKEN"], Env: rest,
		User: own["WARREN_USER"], Dir: own["WARREN_WORKDIR"]}
	if init {
		config.RunDir, config.HookDir, config.ServicesFile = lifecycle.Dir, lifecycle.HookDir, servicesFile
	}
	s := New(config)
	if init {
		// While the host still connects; /init waits for it.
		go s.furnished.Do(s.furnishRun)
	}
	wipe(own)

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if init {
		endure()
	}
	failed := make(chan error, 4)
	serve := func(what string, f func() error) {
		go func() {
			if err := f(); err != nil {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		}()
	}
	serve("channel", s.ServeInner)
	if err := s.listen(own, serve); err != nil {
		return err
	}
	go s.Guard(ctx)
	go trim(ctx)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	s.Close()
	if init {
		// Everything else in the sandbox ends with process 1; it gets a moment to end by itself.
		_ = syscall.Kill(-1, syscall.SIGTERM)
		time.Sleep(100 * time.Millisecond)
		_ = syscall.Kill(-1, syscall.SIGKILL)
	}
	return err
}

// endure keeps signals from ending process 1 and with it the sandbox. The kernel keeps those from it for which it has no
// handler; the Go runtime has handlers for these, which print and exit. A number that somebody takes for a process of his
// may be a thread of the guest's. They are not ignored, since what the guest starts would inherit that.
func endure() {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGABRT, syscall.SIGSYS, syscall.SIGSTKFLT)
}

// listen opens what the environment asks for.
func (s *Server) listen(own map[string]string, serve func(string, func() error)) error {
	if own["WARREN_CHANNEL_FD"] != "" {
		conn, err := inherited(own, "WARREN_CHANNEL_FD")
		if err != nil {
			return err
		}
		// When this channel ends the sandbox goes on: a new keeper comes back over TCP.
		work := func() error { _ = s.ServeChannel(conn); return nil }
		if own["WARREN_CHANNEL_CONTROL"] != "" {
			control, err := inherited(own, "WARREN_CHANNEL_CONTROL")
			if err != nil {
				return err
			}
			work = func() error { return channel.ServeRenewed(conn, control, s.streams()) }
		}
		serve("channel", work)
	}
	if path := own["WARREN_CHANNEL_SOCKET"]; path != "" {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the channel's socket: %w", err)
		}
		l, err := net.Listen("unix", path)
		if err == nil {
			err = os.Chmod(path, 0o600)
		}
		if err != nil {
			return fmt.Errorf("the channel's socket: %w", err)
		}
		serve("channel socket", func() error {
			for {
				conn, err := l.Accept()
				if err != nil {
					return err
				}
				go func() { _ = s.ServeChannel(conn) }()
			}
		})
	}
	addr := own["WARREN_LISTEN"]
	if addr == "none" {
		return nil
	}
	if addr == "" {
		addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(Port))
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	serve("listen", func() error { return s.Serve(l) })
	return nil
}

// inherited returns the connection on a descriptor that a variable names.
func inherited(own map[string]string, name string) (*net.UnixConn, error) {
	fd, err := strconv.Atoi(own[name])
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s=%q is no descriptor above 2", name, own[name])
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "channel")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("%s: descriptor %d: %w", name, fd, err)
	}
	c, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("%s: descriptor %d is no unix socket", name, fd)
	}
	return c, nil
}

// split takes the guest's own settings out of the environment, which processes inherit the rest of.
func split(environ []string) (own map[string]string, rest []string) {
	own = make(map[string]string)
	for _, e := range environ {
		k, v, _ := strings.Cut(e, "=")
		if strings.HasPrefix(k, "WARREN_") {
			own[k] = strings.Clone(v)
		} else {
			rest = append(rest, e)
		}
	}
	return own, rest
}

// trim gives memory back to the system after a burst of work.
func trim(ctx context.Context) {
	const every, slack = 10 * time.Second, 4 << 20
	t := time.NewTicker(every)
	defer t.Stop()
	var m runtime.MemStats
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		runtime.ReadMemStats(&m)
		if m.HeapSys-m.HeapReleased > m.HeapAlloc+slack {
			debug.FreeOSMemory()
		}
	}
}
