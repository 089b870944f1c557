package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
)

// Errors of this package, besides those of the system.
var (
	// ErrNotFound says that no such process is known, or that it has ended.
	ErrNotFound = errors.New("no such process")
	// ErrInvalid says that a process cannot be started as asked, or has no such stream.
	ErrInvalid = errors.New("invalid")
	// ErrTooMany says that a limit of the guest is reached.
	ErrTooMany = errors.New("too many processes")
)

// Size is the size of a terminal in characters.
type Size struct{ Cols, Rows uint32 }

// Spec says what to start.
type Spec struct {
	Cmd  string
	Args []string
	// Env is the whole environment, as KEY=VALUE.
	Env []string
	Dir string
	// OtherDirs are taken in their order if Dir is no directory that the user can enter.
	OtherDirs []string
	User      *account.User
	// PTY, when set, gives the process a terminal of that size.
	PTY *Size
	// Stdin keeps the standard input open for [Process.Write]; else the process reads an empty file. A terminal always takes input.
	Stdin bool
	Tag   string
	// Files are handed on as descriptors 3 and up; the caller closes its own. Hidden processes are not listed.
	Files  []*os.File
	Hidden bool
	// Label is the caller's own.
	Label any
}

// End is how a process ended.
type End struct {
	// Code is the exit code, or -1 when a signal ended the process.
	Code int
	// Exited is false when a signal ended it.
	Exited bool
	// Status says it in words, such as "exit status 3" or "signal: killed".
	Status string
	Time   time.Time
}

// Process is a command or terminal that the guest has started.
type Process struct {
	PID     int
	Spec    Spec
	Started time.Time
	Output  *Output

	reaper *Reaper
	child  *child
	ended  chan struct{} // closed when end is set
	end    End

	mu      sync.Mutex
	oom     string
	exit    *syscall.WaitStatus
	exitAt  time.Time
	streams []*os.File // what output is read from
	open    int        // streams not settled yet
	syncs   int        // how many times Sync was called
	synced  chan struct{}
	reached map[*os.File]int // the call of Sync up to which a stream has been read
	stdin   *os.File
	writing chan struct{} // holds a token while nobody writes
}

const (
	// settleTime is how long after the end of a process its children may still add to its output before its end is told.
	settleTime = 150 * time.Millisecond
	// settleBytes bounds what they can add by writing without pause.
	settleBytes = 8 << 20
)

// FirstDir returns the first directory that the user can enter. An error is about the first of all.
func FirstDir(u *account.User, dirs []string) (dir string, err error) {
	err = u.Do(func() error {
		dir, err = firstDir(dirs)
		return err
	})
	return dir, err
}

func firstDir(dirs []string) (string, error) {
	var first error
	for _, dir := range dirs {
		st, err := os.Stat(dir)
		switch {
		case err == nil && st.IsDir():
			return dir, nil
		case first != nil:
		case errors.Is(err, syscall.EACCES):
			first = fmt.Errorf("%w: cwd %q: permission denied", ErrInvalid, dir)
		default:
			first = fmt.Errorf("%w: cwd %q does not exist", ErrInvalid, dir)
		}
	}
	return "", first
}

// lookPath finds the directory and the command as the user would.
func lookPath(s *Spec) (string, error) {
	var path string
	for _, e := range s.Env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	var found, denied string
	err := s.User.Do(func() error {
		dir, err := firstDir(append([]string{s.Dir}, s.OtherDirs...))
		if err != nil {
			return err
		}
		s.Dir = dir
		if strings.Contains(s.Cmd, "/") {
			found = s.Cmd
			return nil
		}
		for _, dir := range filepath.SplitList(path) {
			p := filepath.Join(dir, s.Cmd)
			if !filepath.IsAbs(p) {
				p = filepath.Join(s.Dir, p)
			}
			st, err := os.Stat(p)
			if err != nil || !st.Mode().IsRegular() {
				continue
			}
			if st.Mode()&0o111 != 0 {
				found = p
				return nil
			}
			if denied == "" {
				denied = p
			}
		}
		// As a shell does: one that is there but cannot be run is not one that is not there.
		if found = denied; found != "" {
			return nil
		}
		return fmt.Errorf("%w: %q is not in PATH", ErrInvalid, s.Cmd)
	})
	return found, err
}

// start starts the process; done is called once, when it has ended and its output is complete.
func start(r *Reaper, s Spec, out *Output, done func(*Process)) (*Process, error) {
	if s.Cmd == "" || strings.IndexByte(s.Cmd, 0) >= 0 {
		return nil, fmt.Errorf("%w: no command", ErrInvalid)
	}
	// A command that is a path is tried as it is: to look at it and the directory as the user takes ten times as many system calls as to find
	// out, and only tells better what is wrong.
	path, looked := s.Cmd, false
	look := func() (err error) {
		looked = true
		path, err = lookPath(&s)
		return err
	}
	if !strings.Contains(path, "/") {
		if err := look(); err != nil {
			return nil, err
		}
	}
	p := &Process{Spec: s, Output: out, reaper: r, ended: make(chan struct{}), writing: make(chan struct{}, 1),
		reached: make(map[*os.File]int)}
	p.writing <- struct{}{}
	attr := &syscall.ProcAttr{Dir: s.Dir, Env: s.Env, Sys: &syscall.SysProcAttr{}}
	if account.Self() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: s.User.UID, Gid: s.User.GID, Groups: s.User.Groups}
	} else if account.Self() != s.User.UID {
		return nil, fmt.Errorf("start as user %s: %w", s.User.Name, syscall.EPERM)
	}
	child, kinds, err := p.wire(attr)
	defer func() {
		for _, fd := range child {
			syscall.Close(fd)
		}
	}()
	if err == nil {
		for _, f := range s.Files {
			attr.Files = append(attr.Files, f.Fd())
		}
		p.open = len(p.streams)
		p.mu.Lock() // exited waits until the streams are being read
		defer p.mu.Unlock()
		p.Started = time.Now()
		spawn := func() (err error) {
			p.child, err = r.spawn(path, append([]string{s.Cmd}, s.Args...), attr, func(ws syscall.WaitStatus) { p.exited(ws, done) })
			return err
		}
		if err = spawn(); err != nil && !looked {
			if why := look(); why != nil {
				err = why
			} else if s.Dir != attr.Dir {
				attr.Dir, p.Spec = s.Dir, s
				err = spawn()
			}
		}
	}
	if err != nil {
		for _, f := range p.streams {
			f.Close()
		}
		if p.stdin != nil {
			p.stdin.Close()
		}
		if errors.Is(err, syscall.EAGAIN) {
			return nil, fmt.Errorf("%w: start %q: the sandbox has reached its limit%s; end some with `warren kill`, or begin afresh with `warren restart`", ErrTooMany, s.Cmd, limit())
		}
		if errors.Is(err, ErrInvalid) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: start %q: %w", ErrInvalid, s.Cmd, err)
	}
	p.PID = p.child.pid
	for i, f := range p.streams {
		go p.pump(f, kinds[i], done)
	}
	return p, nil
}

// limit says how many processes a user of the sandbox may have, if there is a limit.
func limit() string {
	const nproc = 6 // RLIMIT_NPROC, which package syscall does not name
	var l syscall.Rlimit
	if syscall.Getrlimit(nproc, &l) != nil || l.Cur > 1<<31 {
		return ""
	}
	return fmt.Sprintf(" of %d processes", l.Cur)
}

// wire makes the pipes or the terminal of the process. It returns the child's ends, which the caller closes, and the kind of each stream.
func (p *Process) wire(attr *syscall.ProcAttr) (child []int, kinds []Kind, err error) {
	if p.Spec.PTY != nil {
		master, slave, err := openPTY(p.Spec.User, *p.Spec.PTY)
		if err != nil {
			return nil, nil, err
		}
		fd := uintptr(slave)
		attr.Files = []uintptr{fd, fd, fd}
		attr.Sys.Setsid, attr.Sys.Setctty, attr.Sys.Ctty = true, true, 0
		p.streams, p.stdin = []*os.File{master}, nil
		return []int{slave}, []Kind{Terminal}, nil
	}
	// A session of its own: the guest has no terminal to lose, and a group to signal comes with it.
	attr.Sys.Setsid = true
	in, err := devNull()
	if p.Spec.Stdin {
		in, p.stdin, err = pipe(1)
		child = append(child, in)
	}
	if err != nil {
		return nil, nil, err
	}
	attr.Files = []uintptr{uintptr(in)}
	for range 2 {
		w, r, err := pipe(0)
		if err != nil {
			return child, nil, err
		}
		child = append(child, w)
		p.streams = append(p.streams, r)
		attr.Files = append(attr.Files, uintptr(w))
	}
	return child, []Kind{Stdout, Stderr}, nil
}

// pipe returns a pipe: one end, 0 to read from or 1 to write to, for the guest, and the other to be handed to a process, for which it has to be
// blocking. [os.Pipe] takes twice as many system calls for it.
func pipe(end int) (theirs int, own *os.File, err error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return -1, nil, os.NewSyscallError("pipe2", err)
	}
	flags := syscall.O_NONBLOCK | [2]int{syscall.O_RDONLY, syscall.O_WRONLY}[end]
	if _, err := unix.FcntlInt(uintptr(fds[end]), syscall.F_SETFL, flags); err != nil {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return -1, nil, os.NewSyscallError("fcntl", err)
	}
	return fds[1-end], os.NewFile(uintptr(fds[end]), "|"), nil
}

// null is a descriptor of an empty file, which is never closed once it is open.
var null struct {
	sync.Mutex
	open bool
	fd   int
}

func devNull() (int, error) {
	null.Lock()
	defer null.Unlock()
	if !null.open {
		fd, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return -1, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
		}
		null.fd, null.open = fd, true
	}
	return null.fd, nil
}

// buffers for reading output; they are not held while a process is silent.
var buffers = sync.Pool{New: func() any { return new([chunkBytes]byte) }}

// pump moves output from a stream to the log until the last writer closes it.
func (p *Process) pump(f *os.File, kind Kind, done func(*Process)) {
	settled := false
	settle := func() {
		if !settled {
			settled = true
			p.settle(done)
		}
	}
	defer settle()
	defer p.closeStream(f)
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		more, again := true, true
		err := raw.Read(func(fd uintptr) bool {
			more, again = p.read(int(fd), kind)
			return !again
		})
		switch {
		case err == nil && more:
			p.Output.throttle()
			continue
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return
		}
		// Either the process has ended some time ago and a child of it still holds the stream, or Sync waits. Take what
		// is there, say so, and go on reading so that nobody is stopped by a full pipe.
		p.mu.Lock()
		ended, syncs := p.exit != nil, p.syncs
		p.mu.Unlock()
		for total := 0; total < settleBytes; total += chunkBytes {
			if raw.Control(func(fd uintptr) { more, again = p.read(int(fd), kind) }) != nil || again || !more {
				break
			}
		}
		if ended {
			settle()
		}
		p.mu.Lock()
		p.reached[f] = syncs
		p.tellSync()
		if ended == (p.exit != nil) && syncs == p.syncs {
			f.SetReadDeadline(time.Time{})
		}
		p.mu.Unlock()
	}
}

// Sync waits until all output that was written before the call is in the log.
func (p *Process) Sync() {
	p.mu.Lock()
	p.syncs++
	want := p.syncs
	for _, f := range p.streams {
		f.SetReadDeadline(time.Unix(1, 0))
	}
	for !p.allReached(want) {
		if p.synced == nil {
			p.synced = make(chan struct{})
		}
		wait := p.synced
		p.mu.Unlock()
		<-wait
		p.mu.Lock()
	}
	p.mu.Unlock()
}

func (p *Process) allReached(want int) bool {
	for _, f := range p.streams {
		if p.reached[f] < want {
			return false
		}
	}
	return true
}

func (p *Process) tellSync() {
	if p.synced != nil {
		close(p.synced)
		p.synced = nil
	}
}

// read reads once. It returns more false at the end of the stream, and again when there is nothing to read now.
func (p *Process) read(fd int, kind Kind) (more, again bool) {
	buf := buffers.Get().(*[chunkBytes]byte)
	defer buffers.Put(buf)
	for {
		n, err := syscall.Read(fd, buf[:])
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return true, true
		case err != nil || n <= 0:
			return false, false // a terminal whose last user has left says EIO
		}
		p.Output.append(kind, buf[:n])
		return true, false
	}
}

// exited takes note of the end of the process and gives its streams a little time to end too.
func (p *Process) exited(ws syscall.WaitStatus, done func(*Process)) {
	p.mu.Lock()
	p.exit, p.exitAt = &ws, time.Now()
	for _, f := range p.streams {
		f.SetReadDeadline(time.Now().Add(settleTime))
	}
	finished := p.open == 0
	p.mu.Unlock()
	if finished {
		p.finish(done)
	}
}

// settle says that one stream has brought all output up to the end of the process.
func (p *Process) settle(done func(*Process)) {
	p.mu.Lock()
	p.open--
	finished := p.open == 0 && p.exit != nil
	p.mu.Unlock()
	if finished {
		p.finish(done)
	}
}

func (p *Process) closeStream(f *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, s := range p.streams {
		if s == f {
			p.streams = append(p.streams[:i], p.streams[i+1:]...)
			break
		}
	}
	delete(p.reached, f)
	p.tellSync()
	f.Close()
}

func (p *Process) finish(done func(*Process)) {
	p.mu.Lock()
	ws := *p.exit
	e := End{Time: p.exitAt}
	switch {
	case ws.Exited():
		e.Code, e.Exited = ws.ExitStatus(), true
		e.Status = fmt.Sprintf("exit status %d", e.Code)
	default:
		e.Code = -1
		e.Status = "signal: " + ws.Signal().String()
		if ws.CoreDump() {
			e.Status += " (core dumped)"
		}
		if p.oom != "" {
			e.Status = p.oom
		}
	}
	p.end = e
	if p.stdin != nil {
		p.stdin.Close()
	}
	p.mu.Unlock()
	close(p.ended)
	done(p)
	p.Output.finish()
}

// Ended returns a channel that closes when the process has ended; then End is valid.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// End returns how the process ended; it is false while it runs.
func (p *Process) End() (End, bool) {
	select {
	case <-p.ended:
		return p.end, true
	default:
		return End{}, false
	}
}

// Signal signals the process or all of its group. It returns [ErrNotFound] when it has ended.
func (p *Process) Signal(sig syscall.Signal, group bool) error {
	err := p.reaper.signal(p.child, sig, group)
	if errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("%w: pid %d", ErrNotFound, p.PID)
	}
	return err
}

// Kill kills the process and its group.
func (p *Process) Kill() error { return p.Signal(syscall.SIGKILL, true) }

// Write writes input, all of it or until ctx ends. The process may be slow to read it.
func (p *Process) Write(ctx context.Context, data []byte, pty bool) error {
	if pty != (p.Spec.PTY != nil) {
		if pty {
			return fmt.Errorf("%w: process %d has no terminal", ErrInvalid, p.PID)
		}
		return fmt.Errorf("%w: process %d has a terminal, not a standard input", ErrInvalid, p.PID)
	}
	select {
	case <-p.writing:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { p.writing <- struct{}{} }()
	f, err := p.input()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })
	_, err = f.Write(data)
	if !stop() {
		f.SetWriteDeadline(time.Time{})
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	case errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EIO):
		return fmt.Errorf("%w: the input of process %d is closed", ErrInvalid, p.PID)
	}
	return err
}

// input returns the file that takes the input of the process.
func (p *Process) input() (*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.Spec.PTY != nil && len(p.streams) > 0:
		return p.streams[0], nil
	case p.Spec.PTY == nil && p.stdin != nil:
		return p.stdin, nil
	}
	return nil, fmt.Errorf("%w: the input of process %d is closed", ErrInvalid, p.PID)
}

// CloseStdin closes the standard input.
func (p *Process) CloseStdin() error {
	if p.Spec.PTY != nil {
		return fmt.Errorf("%w: process %d has a terminal, not a standard input; send it the end-of-file character", ErrInvalid, p.PID)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stdin != nil {
		p.stdin.Close()
		p.stdin = nil
	}
	return nil
}

// Resize sets the size of the terminal.
func (p *Process) Resize(s Size) error {
	if p.Spec.PTY == nil {
		return fmt.Errorf("%w: process %d has no terminal", ErrInvalid, p.PID)
	}
	f, err := p.input()
	if err != nil {
		return err
	}
	return setSize(f, s)
}

// KilledForMemory notes why the process is about to be killed, for its end.
func (p *Process) KilledForMemory(status string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.oom = status
}

// Note adds a line of the guest's own to the process's error output or terminal.
func (p *Process) Note(line string) {
	if p.Spec.PTY != nil {
		p.Output.append(Terminal, []byte(line+"\r\n"))
	} else {
		p.Output.append(Stderr, []byte(line+"\n"))
	}
}
