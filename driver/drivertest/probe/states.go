package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A state is something that a sandbox holds and that a copy of it should hold too. Its function sets it up, or says that the
// kernel does not have it, and returns what looks, later and perhaps in a copy, whether it is still there and works.
type state struct {
	name string
	set  func(h *holder) (check func() error, err error)
}

// holder is what the states share.
type holder struct {
	dir   string // in the root
	mount string // on a mount
	// values are what the host compares between copies.
	values map[string]string
}

// holdStates sets up all states, says that it has, waits for the file "go" in its directory, looks at each, and writes what it
// found into the file "out".
func holdStates(args []string) error {
	h := &holder{dir: args[0], mount: args[1], values: map[string]string{}}
	if err := os.MkdirAll(h.dir, 0o777); err != nil {
		return err
	}
	results := map[string]string{}
	checks := map[string]func() error{}
	for _, s := range states {
		begin := time.Now()
		check, err := s.set(h)
		if took := time.Since(begin); took > time.Second {
			h.values["slow"] += fmt.Sprintf("%s took %v to set up; ", s.name, took)
		}
		switch {
		case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM), errors.Is(err, unix.EOPNOTSUPP):
			results[s.name] = "missing: " + err.Error()
		case err != nil:
			results[s.name] = "broken: cannot be set up: " + err.Error()
		default:
			checks[s.name] = check
		}
	}
	fmt.Println("ready")
	for {
		if _, err := os.Stat(filepath.Join(h.dir, "go")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	looked, err := os.Create(filepath.Join(h.dir, "looked"))
	if err != nil {
		return err
	}
	for _, s := range states {
		check := checks[s.name]
		if check == nil {
			continue
		}
		fmt.Fprintln(looked, s.name)
		ended := make(chan error, 1)
		go func() { ended <- check() }()
		select {
		case err := <-ended:
			results[s.name] = "continues"
			if errors.Is(err, errClosed) {
				results[s.name] = "closed"
			} else if err != nil {
				results[s.name] = "broken: " + err.Error()
			}
		case <-time.After(15 * time.Second):
			results[s.name] = "broken: the check hangs"
		}
	}
	data, err := json.Marshal(map[string]any{"results": results, "values": h.values})
	if err != nil {
		return err
	}
	tmp := filepath.Join(h.dir, "out.new")
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(h.dir, "out")); err != nil {
		return err
	}
	time.Sleep(time.Hour)
	return nil
}

var errClosed = errors.New("closed")

// again makes a call until no signal interrupts it: the runtime sends itself some to have goroutines take turns.
func again[T any](call func() (T, error)) (T, error) {
	for {
		if r, err := call(); err != unix.EINTR {
			return r, err
		}
	}
}

func wantf(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}

var states = []state{
	{"memory", memoryState},
	{"threads", threadsState},
	{"thread waiting on a futex", futexState},
	{"thread in a blocking read", blockedReadState},
	{"tree of processes", treeState},
	{"zombie waiting for its parent", zombieState},
	{"orphan and its reaping", orphanState},
	{"stopped process", stoppedState},
	{"ptrace-stopped process", ptraceState},
	{"pidfd", pidfdState},
	{"pipe with bytes in it", pipeState},
	{"conversation over pipes", talkState},
	{"socket pair with bytes in it", socketpairState},
	{"descriptor in flight", rightsState},
	{"unix socket, named", func(h *holder) (func() error, error) {
		return streamState("unix", filepath.Join(h.dir, "named.sock"))
	}},
	{"unix socket, abstract", func(*holder) (func() error, error) { return streamState("unix", "@warren-states") }},
	{"unix datagrams queued", datagramState},
	{"TCP on the loopback", func(*holder) (func() error, error) { return streamState("tcp", "127.0.0.1:0") }},
	{"TCP on the loopback, IPv6", func(*holder) (func() error, error) { return streamState("tcp", "[::1]:0") }},
	{"UDP on the loopback", udpState},
	{"open file in the root", func(h *holder) (func() error, error) { return offsetState(filepath.Join(h.dir, "offset"), false) }},
	{"deleted open file in the root", func(h *holder) (func() error, error) { return offsetState(filepath.Join(h.dir, "deleted"), true) }},
	{"open file on a mount", func(h *holder) (func() error, error) { return offsetState(filepath.Join(h.mount, "offset"), false) }},
	{"append mode", appendState},
	{"open directory", directoryState},
	{"flock", flockState},
	{"record lock of fcntl", recordLockState},
	{"shared anonymous memory", sharedAnonymousState},
	{"shared file mapping in the root", func(h *holder) (func() error, error) { return mappingState(filepath.Join(h.dir, "mapped")) }},
	{"shared file mapping on a mount", func(h *holder) (func() error, error) { return mappingState(filepath.Join(h.mount, "mapped")) }},
	{"memfd with seals", memfdState},
	{"file in /dev/shm", func(*holder) (func() error, error) { return offsetState("/dev/shm/warren-states", false) }},
	{"SysV shared memory", sysvShmState},
	{"SysV semaphore", sysvSemState},
	{"SysV message queue", sysvMsgState},
	{"POSIX message queue", mqState},
	{"mount made inside", mountState},
	{"eventfd", eventfdState},
	{"signalfd", signalfdState},
	{"timerfd", timerfdState},
	{"interval timer", itimerState},
	{"POSIX timer", posixTimerState},
	{"epoll", epollState},
	{"inotify", inotifyState},
	{"terminal, its size and jobs", ptyState},
	{"signal handler", handlerState},
	{"signal mask and pending signal", maskState},
	{"relative sleep", func(*holder) (func() error, error) { return sleepState(false) }},
	{"absolute sleep", func(*holder) (func() error, error) { return sleepState(true) }},
	{"umask", shellState("umask 027", "umask", "0027")},
	{"working directory", shellState("cd /var/tmp", "pwd", "/var/tmp")},
	{"resource limits", shellState("ulimit -n 123", "ulimit -n", "123")},
	{"nice value", shellState("renice -n 5 -p $$ >/dev/null", "nice", "5")},
	{"environment", shellState("export HELD=4711", "env | grep ^HELD=", "HELD=4711")},
	{"user, group and groups", credentialState},
	{"wall clock", func(h *holder) (func() error, error) {
		before := time.Now().UnixNano()
		return func() error {
			now := time.Now().UnixNano()
			h.values["wall"] = strconv.FormatInt(now, 10)
			return wantf(now > before, "it went back")
		}, nil
	}},
	{"monotonic clock", monotonicState},
	{"random bytes of the kernel", func(h *holder) (func() error, error) {
		return func() error {
			b := make([]byte, 16)
			_, err := io.ReadFull(rand.Reader, b)
			h.values["random"] = hex.EncodeToString(b)
			return err
		}, nil
	}},
	{"generator in a program's memory", func(h *holder) (func() error, error) {
		g := mathrand.New(mathrand.NewPCG(mathrand.Uint64(), mathrand.Uint64()))
		return func() error { h.values["generator"] = strconv.FormatUint(g.Uint64(), 16); return nil }, nil
	}},
}

func memoryState(*holder) (func() error, error) {
	b := make([]byte, 4<<20)
	for i := range b {
		b[i] = byte(i * i >> 7)
	}
	return func() error {
		for i := range b {
			if b[i] != byte(i*i>>7) {
				return fmt.Errorf("byte %d is another", i)
			}
		}
		return nil
	}, nil
}

func threadsState(*holder) (func() error, error) {
	var counters [4]atomic.Int64
	for i := range counters {
		go func() {
			runtime.LockOSThread()
			for {
				counters[i].Add(1)
				// A kernel in user space has more work with a system call; the rest of the probe shall get some too.
				t := unix.Timespec{Nsec: 50e6}
				unix.Nanosleep(&t, nil)
			}
		}()
	}
	return func() error {
		for i := range counters {
			before := counters[i].Load()
			for range 1000 {
				if counters[i].Load() > before+1 {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
			if counters[i].Load() <= before+1 {
				return fmt.Errorf("thread %d stands still", i)
			}
		}
		return nil
	}, nil
}

// anonymous returns a page of memory that a forked child shares.
func anonymous() ([]byte, error) {
	return unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
}

func futexState(*holder) (func() error, error) {
	page, err := anonymous()
	if err != nil {
		return nil, err
	}
	word := (*uint32)(unsafe.Pointer(&page[0]))
	woken := make(chan syscall.Errno, 1)
	go func() {
		runtime.LockOSThread()
		const wait = 0
		var errno syscall.Errno
		for atomic.LoadUint32(word) == 0 {
			_, _, errno = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), wait, 0, 0, 0, 0)
		}
		woken <- errno
	}()
	time.Sleep(20 * time.Millisecond)
	return func() error {
		atomic.StoreUint32(word, 1)
		const wake = 1
		unix.Syscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), wake, 1)
		if errno := <-woken; errno != 0 && errno != unix.EINTR && errno != unix.EAGAIN {
			return errno
		}
		return nil
	}, nil
}

func blockedReadState(*holder) (func() error, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	got := make(chan string, 1)
	go func() {
		b := make([]byte, 16)
		n, err := again(func() (int, error) { return unix.Read(p[0], b) })
		got <- fmt.Sprint(string(b[:max(n, 0)]), err)
	}()
	return func() error {
		unix.Write(p[1], []byte("late"))
		s := <-got
		return wantf(s == "late<nil>", "read %q", s)
	}, nil
}

func self(args ...string) *exec.Cmd { return exec.Command("/proc/self/exe", args...) }

// ppid returns the parent and the state of a process.
func ppid(pid int) (parent int, state string, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, "", err
	}
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(f) < 2 {
		return 0, "", fmt.Errorf("/proc/%d/stat holds %q", pid, data)
	}
	parent, err = strconv.Atoi(f[1])
	return parent, f[0], err
}

func treeState(*holder) (func() error, error) {
	cmd := exec.Command("/bin/sh", "-c", `for i in 1 2 3 4 5; do sh -c 'for j in 1 2 3 4 5; do sleep 1000 & echo $$ $!; done; echo; wait' & done; wait`)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	parents := map[int]int{}
	r := bufio.NewScanner(out)
	for done := 0; done < 5 && r.Scan(); {
		var parent, child int
		if n, _ := fmt.Sscan(r.Text(), &parent, &child); n == 2 {
			parents[child] = parent
		} else {
			done++
		}
	}
	return func() error {
		if len(parents) != 25 {
			return fmt.Errorf("there were %d of 25", len(parents))
		}
		for child, want := range parents {
			if got, _, err := ppid(child); err != nil || got != want {
				return fmt.Errorf("process %d is the child of %d, not of %d: %v", child, got, want, err)
			}
			if err := unix.Kill(child, unix.SIGKILL); err != nil {
				return err
			}
		}
		return cmd.Wait() // all of them end, and each shell reaps its own
	}, nil
}

func zombieState(*holder) (func() error, error) {
	cmd := exec.Command("/bin/sh", "-c", "exit 7")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	for {
		if _, state, err := ppid(cmd.Process.Pid); err != nil || state == "Z" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return func() error {
		err := cmd.Wait()
		return wantf(cmd.ProcessState.ExitCode() == 7, "it ended with %v", err)
	}, nil
}

func orphanState(*holder) (func() error, error) {
	out, err := exec.Command("/bin/sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		return nil, err
	}
	return func() error {
		if parent, _, err := ppid(pid); err != nil || parent != 1 {
			return fmt.Errorf("its parent is %d, %v", parent, err)
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			return err
		}
		for range 500 {
			if _, _, err := ppid(pid); err != nil {
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
		return errors.New("nobody reaps it")
	}, nil
}

func stoppedState(*holder) (func() error, error) {
	cmd := exec.Command("/bin/sh", "-c", "kill -STOP $$; exit 9")
	// A group of its own: a group without a parent in its session is hung up when one of it is stopped.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stopped := func() bool {
		_, state, err := ppid(cmd.Process.Pid)
		return err == nil && state == "T"
	}
	for range 1000 {
		if stopped() {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return func() error {
		if !stopped() {
			return errors.New("it is not stopped")
		}
		if err := cmd.Process.Signal(unix.SIGCONT); err != nil {
			return err
		}
		err := cmd.Wait()
		return wantf(cmd.ProcessState.ExitCode() == 9, "continued it ends with %v", err)
	}, nil
}

// onThread runs functions on one operating-system thread.
func onThread() func(func() error) error {
	work, done := make(chan func() error), make(chan error)
	go func() {
		runtime.LockOSThread()
		for f := range work {
			done <- f()
		}
	}()
	return func(f func() error) error { work <- f; return <-done }
}

func ptraceState(*holder) (func() error, error) {
	thread := onThread()
	cmd := exec.Command("/bin/sh", "-c", "exit 5")
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := thread(func() error {
		if err := cmd.Start(); err != nil {
			return err
		}
		var ws unix.WaitStatus
		if _, err := again(func() (int, error) { return unix.Wait4(cmd.Process.Pid, &ws, 0, nil) }); err != nil || !ws.Stopped() {
			return fmt.Errorf("it does not stop: %v %v", ws, err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return func() error {
		return thread(func() error {
			var regs unix.PtraceRegs
			if err := unix.PtraceGetRegs(cmd.Process.Pid, &regs); err != nil {
				return fmt.Errorf("its registers: %w", err)
			}
			if err := unix.PtraceCont(cmd.Process.Pid, 0); err != nil {
				return err
			}
			var ws unix.WaitStatus
			_, err := again(func() (int, error) { return unix.Wait4(cmd.Process.Pid, &ws, 0, nil) })
			return wantf(err == nil && ws.ExitStatus() == 5, "it ends with %v, %v", ws, err)
		})
	}, nil
}

func pidfdState(*holder) (func() error, error) {
	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		return nil, err
	}
	return func() error {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := again(func() (int, error) { return unix.Poll(p, 0) }); n != 0 || err != nil {
			return fmt.Errorf("it says that the process has ended: %d %v", n, err)
		}
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
			return err
		}
		n, err := again(func() (int, error) { return unix.Poll(p, 5000) })
		cmd.Wait()
		return wantf(n == 1 && err == nil, "poll: %d %v", n, err)
	}, nil
}

func pipeState(*holder) (func() error, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	w.WriteString("before ")
	return func() error {
		w.WriteString("after")
		b := make([]byte, 12)
		_, err := io.ReadFull(r, b)
		return wantf(err == nil && string(b) == "before after", "read %q, %v", b, err)
	}, nil
}

// talker is a shell that answers.
type talker struct {
	in  io.Writer
	out *bufio.Reader
}

func newTalker(credential *syscall.Credential) (*talker, error) {
	cmd := exec.Command("/bin/sh")
	cmd.Dir = "/"
	if credential != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	return &talker{in, bufio.NewReader(out)}, cmd.Start()
}

func (t *talker) ask(line string) (string, error) {
	if _, err := io.WriteString(t.in, line+"\n"); err != nil {
		return "", err
	}
	s, err := t.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

func talkState(*holder) (func() error, error) {
	t, err := newTalker(nil)
	if err != nil {
		return nil, err
	}
	if s, err := t.ask("x=1; echo $x"); s != "1" {
		return nil, fmt.Errorf("it says %q, %v", s, err)
	}
	return func() error {
		s, err := t.ask("x=$((x+1)); echo $x")
		return wantf(s == "2", "it says %q, %v", s, err)
	}, nil
}

// shellState is a state of a shell that one command makes and another tells.
func shellState(set, tell, want string) func(*holder) (func() error, error) {
	return func(*holder) (func() error, error) {
		t, err := newTalker(nil)
		if err != nil {
			return nil, err
		}
		look := func(command string) error {
			s, err := t.ask(command)
			return wantf(s == want, "%s says %q, %v", tell, s, err)
		}
		if err := look(set + "; " + tell); err != nil {
			return nil, err
		}
		return func() error { return look(tell) }, nil
	}
}

func credentialState(*holder) (func() error, error) {
	t, err := newTalker(&syscall.Credential{Uid: 1000, Gid: 1000, Groups: []uint32{1000, 20, 4711}})
	if err != nil {
		return nil, err
	}
	const tell = "echo $(id -u) $(id -g) $(id -G)"
	before, err := t.ask(tell)
	if err != nil || before != "1000 1000 1000 20 4711" {
		return nil, fmt.Errorf("id says %q, %v", before, err)
	}
	return func() error {
		s, err := t.ask(tell)
		return wantf(s == before, "id says %q, %v", s, err)
	}, nil
}

func socketpairState(*holder) (func() error, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	unix.Write(fds[0], []byte("one"))
	return func() error {
		unix.Write(fds[0], []byte("two"))
		b := make([]byte, 16)
		n, err := again(func() (int, error) { return unix.Read(fds[1], b) })
		if string(b[:max(n, 0)]) != "onetwo" {
			return fmt.Errorf("read %q, %v", b[:max(n, 0)], err)
		}
		unix.Write(fds[1], []byte("back"))
		n, err = again(func() (int, error) { return unix.Read(fds[0], b) })
		return wantf(string(b[:max(n, 0)]) == "back", "read %q, %v", b[:max(n, 0)], err)
	}, nil
}

func rightsState(h *holder) (func() error, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(filepath.Join(h.dir, "flying"))
	if err != nil {
		return nil, err
	}
	f.WriteString("flying")
	if err := unix.Sendmsg(fds[0], []byte("x"), unix.UnixRights(int(f.Fd())), nil, 0); err != nil {
		return nil, err
	}
	f.Close()
	return func() error {
		b, oob := make([]byte, 1), make([]byte, 64)
		_, n, _, _, err := unix.Recvmsg(fds[1], b, oob, 0)
		if err != nil {
			return err
		}
		msgs, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil || len(msgs) != 1 {
			return fmt.Errorf("%d messages, %v", len(msgs), err)
		}
		got, err := unix.ParseUnixRights(&msgs[0])
		if err != nil {
			return err
		}
		text := make([]byte, 16)
		k, err := unix.Pread(got[0], text, 0)
		return wantf(string(text[:max(k, 0)]) == "flying", "the file holds %q, %v", text[:max(k, 0)], err)
	}, nil
}

// streamState is a listener with a connection that talks, one that waits in its queue with bytes sent, and one to come.
func streamState(network, address string) (func() error, error) {
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, err
	}
	dial := func() (net.Conn, error) {
		c, err := net.DialTimeout(network, l.Addr().String(), 5*time.Second)
		if err == nil {
			c.SetDeadline(time.Now().Add(time.Hour))
		}
		return c, err
	}
	pair := func() (a, b net.Conn, err error) {
		if a, err = dial(); err == nil {
			b, err = l.Accept()
		}
		return a, b, err
	}
	talk := func(a, b net.Conn, held string) error {
		for _, d := range []struct {
			from, to net.Conn
			want     string
		}{{a, b, held + "there"}, {b, a, "and back"}} {
			io.WriteString(d.from, strings.TrimPrefix(d.want, held))
			got := make([]byte, len(d.want))
			if _, err := io.ReadFull(d.to, got); err != nil || string(got) != d.want {
				return fmt.Errorf("read %q of %q: %w", got, d.want, err)
			}
			held = ""
		}
		return nil
	}
	a, b, err := pair()
	if err != nil {
		return nil, err
	}
	if err := talk(a, b, ""); err != nil {
		return nil, err
	}
	io.WriteString(a, "under way ")
	queued, err := dial()
	if err != nil {
		return nil, err
	}
	io.WriteString(queued, "queued ")
	return func() error {
		if err := talk(a, b, "under way "); err != nil {
			return fmt.Errorf("the connection: %w", err)
		}
		q, err := l.Accept()
		if err == nil {
			err = talk(queued, q, "queued ")
		}
		if err != nil {
			return fmt.Errorf("the one in the queue: %w", err)
		}
		x, y, err := pair()
		if err == nil {
			err = talk(x, y, "")
		}
		if err != nil {
			return fmt.Errorf("a new one: %w", err)
		}
		a.Close()
		_, err = b.Read(make([]byte, 1))
		return wantf(err == io.EOF, "the end of the connection: %v", err)
	}, nil
}

func packets(send, receive func(string) (string, error)) (func() error, error) {
	if _, err := send("first"); err != nil {
		return nil, err
	}
	if _, err := send("second"); err != nil {
		return nil, err
	}
	return func() error {
		if _, err := send("third"); err != nil {
			return err
		}
		for _, want := range []string{"first", "second", "third"} {
			if got, err := receive(""); got != want {
				return fmt.Errorf("received %q, %v; want %q", got, err, want)
			}
		}
		return nil
	}, nil
}

func datagramState(h *holder) (func() error, error) {
	at := &net.UnixAddr{Name: filepath.Join(h.dir, "datagram.sock"), Net: "unixgram"}
	l, err := net.ListenUnixgram("unixgram", at)
	if err != nil {
		return nil, err
	}
	c, err := net.DialUnix("unixgram", nil, at)
	if err != nil {
		return nil, err
	}
	return packets(func(s string) (string, error) { _, err := c.Write([]byte(s)); return "", err }, receiver(l))
}

func receiver(c net.Conn) func(string) (string, error) {
	return func(string) (string, error) {
		b := make([]byte, 64)
		n, err := c.Read(b)
		return string(b[:max(n, 0)]), err
	}
}

func udpState(*holder) (func() error, error) {
	l, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	c, err := net.DialUDP("udp", nil, l.LocalAddr().(*net.UDPAddr))
	if err != nil {
		return nil, err
	}
	return packets(func(s string) (string, error) { _, err := c.Write([]byte(s)); return "", err }, receiver(l))
}

// offsetState is an open file with an offset, perhaps without a name.
func offsetState(path string, deleted bool) (func() error, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	f.WriteString("0123456789")
	if _, err := f.Seek(4, io.SeekStart); err != nil {
		return nil, err
	}
	if deleted {
		os.Remove(path)
	}
	return func() error {
		f.WriteString("xy")
		rest, err := io.ReadAll(f)
		if string(rest) != "6789" {
			return fmt.Errorf("after the offset is %q, %v", rest, err)
		}
		b := make([]byte, 10)
		if _, err := f.ReadAt(b, 0); err != nil || string(b) != "0123xy6789" {
			return fmt.Errorf("it holds %q, %v", b, err)
		}
		_, err = os.Stat(path)
		return wantf((err != nil) == deleted, "its name: %v", err)
	}, nil
}

func appendState(h *holder) (func() error, error) {
	path := filepath.Join(h.dir, "append")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	f.WriteString("a")
	return func() error {
		os.WriteFile(path, []byte("other"), 0o644)
		f.WriteString("b")
		got, err := os.ReadFile(path)
		return wantf(string(got) == "otherb", "it holds %q, %v", got, err)
	}, nil
}

func directoryState(h *holder) (func() error, error) {
	dir := filepath.Join(h.dir, "many")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	for i := range 40 {
		os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o644)
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	first, err := d.Readdirnames(10)
	if err != nil {
		return nil, err
	}
	return func() error {
		rest, err := d.Readdirnames(-1)
		return wantf(len(first)+len(rest) == 40, "%d and %d names, %v", len(first), len(rest), err)
	}, nil
}

func flockState(h *holder) (func() error, error) {
	path := filepath.Join(h.dir, "flock")
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, err
	}
	return func() error {
		other, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
			return fmt.Errorf("another gets it: %v", err)
		}
		f.Close()
		return unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}, nil
}

func recordLockState(h *holder) (func() error, error) {
	path := filepath.Join(h.dir, "record")
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 3, Len: 4}); err != nil {
		return nil, err
	}
	return func() error {
		out, err := self("trylock", path).CombinedOutput() // a process does not meet its own locks
		return wantf(string(out) == fmt.Sprintf("%d 3 4 %d\n", unix.F_WRLCK, os.Getpid()), "another process sees %q, %v", out, err)
	}, nil
}

// tryLock tells whose record lock is on a file.
func tryLock(args []string) error {
	f, err := os.OpenFile(args[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	l := unix.Flock_t{Type: unix.F_WRLCK}
	err = unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l)
	fmt.Println(l.Type, l.Start, l.Len, l.Pid)
	return err
}

// sharedAnonymousState is memory between two processes, of which one has no other way to it.
func sharedAnonymousState(*holder) (func() error, error) {
	page, err := anonymous()
	if err != nil {
		return nil, err
	}
	word := (*uint32)(unsafe.Pointer(&page[0]))
	runtime.LockOSThread()
	pid := forkCounter(word)
	runtime.UnlockOSThread()
	if pid < 0 {
		return nil, unix.EAGAIN
	}
	return func() error {
		before := atomic.LoadUint32(word)
		for range 2000 {
			if atomic.LoadUint32(word) > before+5 {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		now := atomic.LoadUint32(word)
		unix.Kill(pid, unix.SIGKILL)
		var ws unix.WaitStatus
		again(func() (int, error) { return unix.Wait4(pid, &ws, 0, nil) })
		return wantf(now > before+5, "what the other process writes does not arrive")
	}, nil
}

// tick is how long the other process sleeps; it may use no memory of the runtime's.
var tick = unix.Timespec{Nsec: 20e6}

// forkCounter forks a process that counts in shared memory. It has no runtime, so that it may make raw calls and nothing else.
//
//go:norace
//go:nosplit
func forkCounter(word *uint32) int {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return -1
	}
	if pid != 0 {
		return int(pid)
	}
	// Else it would hold open what its parent closes.
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, math.MaxUint32, 0)
	for {
		*word++
		syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&tick)), 0, 0)
	}
}

func mappingState(path string) (func() error, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	f.Write(make([]byte, 4096))
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	copy(m, "before")
	return func() error {
		copy(m[6:], " after")
		b := make([]byte, 12)
		if _, err := f.ReadAt(b, 0); err != nil || string(b) != "before after" {
			return fmt.Errorf("the file holds %q, %v", b, err)
		}
		f.WriteAt([]byte("BEFORE"), 0)
		if string(m[:12]) != "BEFORE after" {
			return fmt.Errorf("the mapping holds %q", m[:12])
		}
		return unix.Msync(m, unix.MS_SYNC)
	}, nil
}

func memfdState(*holder) (func() error, error) {
	fd, err := unix.MemfdCreate("states", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	unix.Write(fd, []byte("in memory"))
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK); err != nil {
		return nil, err
	}
	return func() error {
		b := make([]byte, 16)
		n, err := unix.Pread(fd, b, 0)
		if string(b[:max(n, 0)]) != "in memory" {
			return fmt.Errorf("it holds %q, %v", b[:max(n, 0)], err)
		}
		_, err = unix.Write(fd, []byte("x"))
		return wantf(err == unix.EPERM, "the seal: %v", err)
	}, nil
}

func sysvShmState(*holder) (func() error, error) {
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o600)
	if err != nil {
		return nil, err
	}
	m, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return nil, err
	}
	copy(m, "shared")
	return func() error {
		again, err := unix.SysvShmAttach(id, 0, 0)
		if err != nil {
			return err
		}
		copy(m[6:], "!")
		return wantf(string(again[:7]) == "shared!", "it holds %q", again[:7])
	}, nil
}

func sysCall(number uintptr, args ...uintptr) (uintptr, error) {
	var a [6]uintptr
	copy(a[:], args)
	r, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
	if errno != 0 {
		return r, errno
	}
	return r, nil
}

func sysvSemState(*holder) (func() error, error) {
	id, err := sysCall(unix.SYS_SEMGET, unix.IPC_PRIVATE, 1, unix.IPC_CREAT|0o600)
	if err != nil {
		return nil, err
	}
	const getval, setval = 12, 16
	if _, err := sysCall(unix.SYS_SEMCTL, id, 0, setval, 3); err != nil {
		return nil, err
	}
	return func() error {
		n, err := sysCall(unix.SYS_SEMCTL, id, 0, getval)
		return wantf(n == 3 && err == nil, "its value is %d, %v", n, err)
	}, nil
}

func sysvMsgState(*holder) (func() error, error) {
	id, err := sysCall(unix.SYS_MSGGET, unix.IPC_PRIVATE, unix.IPC_CREAT|0o600)
	if err != nil {
		return nil, err
	}
	type message struct {
		kind int64
		text [8]byte
	}
	m := message{1, [8]byte{'q', 'u', 'e', 'u', 'e', 'd'}}
	if _, err := sysCall(unix.SYS_MSGSND, id, uintptr(unsafe.Pointer(&m)), 8, 0); err != nil {
		return nil, err
	}
	return func() error {
		var got message
		_, err := sysCall(unix.SYS_MSGRCV, id, uintptr(unsafe.Pointer(&got)), 8, 0, unix.IPC_NOWAIT)
		return wantf(got == m, "received %q, %v", got.text, err)
	}, nil
}

func mqState(*holder) (func() error, error) {
	name, err := unix.BytePtrFromString("warren-states")
	if err != nil {
		return nil, err
	}
	fd, err := sysCall(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(name)), unix.O_RDWR|unix.O_CREAT|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	text := []byte("posted")
	if _, err := sysCall(unix.SYS_MQ_TIMEDSEND, fd, uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)), 0, 0); err != nil {
		return nil, err
	}
	return func() error {
		b := make([]byte, 8192)
		n, err := sysCall(unix.SYS_MQ_TIMEDRECEIVE, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0)
		return wantf(err == nil && string(b[:n]) == "posted", "received %v", err)
	}, nil
}

func mountState(h *holder) (func() error, error) {
	dir := filepath.Join(h.dir, "tmpfs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o644); err != nil {
		return nil, err
	}
	return func() error {
		got, err := os.ReadFile(file)
		return wantf(string(got) == "kept", "its file holds %q, %v", got, err)
	}, nil
}

func eventfdState(*holder) (func() error, error) {
	fd, err := unix.Eventfd(7, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return func() error {
		b := binary.NativeEndian.AppendUint64(nil, 4)
		unix.Write(fd, b)
		_, err := unix.Read(fd, b)
		n := binary.NativeEndian.Uint64(b)
		return wantf(n == 11, "it counted %d, %v", n, err)
	}, nil
}

func sigset(s syscall.Signal) *unix.Sigset_t {
	var set unix.Sigset_t
	set.Val[0] = 1 << (s - 1)
	return &set
}

// pendTo blocks a signal on the calling thread and sends it there.
func pendTo(s syscall.Signal) error {
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, sigset(s), nil); err != nil {
		return err
	}
	return unix.Tgkill(os.Getpid(), unix.Gettid(), s)
}

func signalfdState(*holder) (func() error, error) {
	thread := onThread()
	fd := -1
	if err := thread(func() (err error) {
		if err = pendTo(unix.SIGUSR2); err != nil {
			return err
		}
		fd, err = unix.Signalfd(-1, sigset(unix.SIGUSR2), unix.SFD_CLOEXEC|unix.SFD_NONBLOCK)
		return err
	}); err != nil {
		return nil, err
	}
	return func() error {
		return thread(func() error {
			b := make([]byte, 128)
			n, err := unix.Read(fd, b)
			return wantf(n == 128 && binary.NativeEndian.Uint32(b) == uint32(unix.SIGUSR2), "read %d bytes, %v", n, err)
		})
	}, nil
}

// lastSignal is one that nobody else uses.
const lastSignal = syscall.Signal(64)

func maskState(*holder) (func() error, error) {
	thread := onThread()
	if err := thread(func() error { return pendTo(lastSignal) }); err != nil {
		return nil, err
	}
	return func() error {
		return thread(func() error {
			var now unix.Sigset_t
			if err := unix.PthreadSigmask(unix.SIG_BLOCK, nil, &now); err != nil {
				return err
			}
			set := sigset(lastSignal)
			if now.Val[0]&set.Val[0] == 0 {
				return errors.New("it is no longer blocked")
			}
			t := unix.Timespec{Sec: 1}
			s, err := again(func() (uintptr, error) {
				return sysCall(unix.SYS_RT_SIGTIMEDWAIT, uintptr(unsafe.Pointer(set)), 0, uintptr(unsafe.Pointer(&t)), 8)
			})
			return wantf(syscall.Signal(s) == lastSignal, "pending is %d, %v", int(s), err)
		})
	}, nil
}

func handlerState(*holder) (func() error, error) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGUSR1)
	return func() error {
		if err := unix.Kill(os.Getpid(), unix.SIGUSR1); err != nil {
			return err
		}
		<-got
		return nil
	}, nil
}

// far is when timers are due that shall still be pending.
const far = 600

func stillPending(seconds float64) error {
	return wantf(seconds > 0 && seconds < far, "%.3f s are left of %d", seconds, far)
}

func timerfdState(*holder) (func() error, error) {
	var fds [2]int
	for i, spec := range []unix.ItimerSpec{{Value: unix.Timespec{Sec: far}}, {Value: unix.Timespec{Nsec: 20e6}, Interval: unix.Timespec{Nsec: 20e6}}} {
		fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
		if err != nil {
			return nil, err
		}
		if err := unix.TimerfdSettime(fd, 0, &spec, nil); err != nil {
			return nil, err
		}
		fds[i] = fd
	}
	return func() error {
		var left unix.ItimerSpec
		if err := unix.TimerfdGettime(fds[0], &left); err != nil {
			return err
		}
		b := make([]byte, 8)
		for range 3 {
			if _, err := again(func() (int, error) { return unix.Read(fds[1], b) }); err != nil {
				return err
			}
		}
		return stillPending(float64(left.Value.Sec) + float64(left.Value.Nsec)/1e9)
	}, nil
}

func itimerState(*holder) (func() error, error) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGALRM)
	if _, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Value: unix.Timeval{Sec: far}}); err != nil {
		return nil, err
	}
	return func() error {
		left, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Value: unix.Timeval{Usec: 1000}})
		if err != nil {
			return err
		}
		<-got
		return stillPending(float64(left.Value.Sec) + float64(left.Value.Usec)/1e6)
	}, nil
}

func posixTimerState(*holder) (func() error, error) {
	// struct sigevent: value, signo, notify (SIGEV_NONE).
	event := [16]uint32{2: uint32(unix.SIGUSR1), 3: 1}
	var id int32
	if _, err := sysCall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)), uintptr(unsafe.Pointer(&id))); err != nil {
		return nil, err
	}
	spec := unix.ItimerSpec{Value: unix.Timespec{Sec: far}}
	if _, err := sysCall(unix.SYS_TIMER_SETTIME, uintptr(id), 0, uintptr(unsafe.Pointer(&spec)), 0); err != nil {
		return nil, err
	}
	return func() error {
		var left unix.ItimerSpec
		if _, err := sysCall(unix.SYS_TIMER_GETTIME, uintptr(id), uintptr(unsafe.Pointer(&left))); err != nil {
			return err
		}
		return stillPending(float64(left.Value.Sec) + float64(left.Value.Nsec)/1e9)
	}, nil
}

func epollState(*holder) (func() error, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, p[0], &unix.EpollEvent{Events: unix.EPOLLIN, Fd: 4711}); err != nil {
		return nil, err
	}
	return func() error {
		events := make([]unix.EpollEvent, 4)
		if n, err := again(func() (int, error) { return unix.EpollWait(ep, events, 0) }); n != 0 || err != nil {
			return fmt.Errorf("it is ready too early: %d %v", n, err)
		}
		unix.Write(p[1], []byte("x"))
		n, err := again(func() (int, error) { return unix.EpollWait(ep, events, 5000) })
		return wantf(n == 1 && events[0].Fd == 4711, "%d events, %v, %v", n, events[0], err)
	}, nil
}

func inotifyState(h *holder) (func() error, error) {
	dir := filepath.Join(h.dir, "watched")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE); err != nil {
		return nil, err
	}
	os.WriteFile(filepath.Join(dir, "before"), nil, 0o644)
	return func() error {
		os.WriteFile(filepath.Join(dir, "after"), nil, 0o644)
		var all []byte
		for range 200 {
			b := make([]byte, 4096)
			if n, err := unix.Read(fd, b); err == nil && n > 0 {
				all = append(all, b[:n]...)
			}
			if bytes.Contains(all, []byte("before")) && bytes.Contains(all, []byte("after")) {
				return nil
			}
			time.Sleep(10 * time.Millisecond)
		}
		return fmt.Errorf("events are %q", all)
	}, nil
}

func ptyState(*holder) (func() error, error) {
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	n, err := unix.IoctlGetInt(int(m.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(m.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		return nil, err
	}
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlSetWinsize(int(s.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 33, Col: 111}); err != nil {
		return nil, err
	}
	// A shell with job control: one job is stopped, the other runs.
	cmd := exec.Command("/bin/sh", "-i")
	cmd.Env = append(os.Environ(), "PS1=", "ENV=")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s, s, s
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := make(chan string, 1000)
	go func() {
		for r := bufio.NewScanner(m); r.Scan(); {
			lines <- r.Text()
		}
		close(lines)
	}()
	ask := func(command, want string) error {
		io.WriteString(m, command+"\n")
		var seen []string
		for {
			select {
			case l := <-lines:
				if seen = append(seen, l); strings.TrimSpace(l) == want {
					return nil
				}
			case <-time.After(10 * time.Second):
				return fmt.Errorf("%s: no %q in %q", command, want, seen)
			}
		}
	}
	if err := ask("x=kept; sleep 1000 & echo be''gun", "begun"); err != nil {
		return nil, err
	}
	return func() error {
		ws, err := unix.IoctlGetWinsize(int(m.Fd()), unix.TIOCGWINSZ)
		if err != nil || ws.Row != 33 || ws.Col != 111 {
			return fmt.Errorf("its size is %v, %v", ws, err)
		}
		if err := ask("echo $x $(stty size)", "kept 33 111"); err != nil {
			return err
		}
		if err := ask("kill %1; wait %1; echo job $?", "job 143"); err != nil {
			return err
		}
		// The terminal still makes signals of keys: one stops what runs in the foreground, and the shell has it as a job.
		io.WriteString(m, "sleep 1000\n")
		time.Sleep(200 * time.Millisecond)
		io.WriteString(m, "\x1a")
		if err := ask("kill -KILL %% && echo was st''opped", "was stopped"); err != nil {
			return err
		}
		io.WriteString(m, "sleep 1000\n")
		time.Sleep(200 * time.Millisecond)
		io.WriteString(m, "\x03")
		return ask("echo inter''rupted", "interrupted")
	}, nil
}

// sleepTime is longer than a snapshot and a restore take.
const sleepTime = 4 * time.Second

func sleepState(absolute bool) (func() error, error) {
	begin := time.Now()
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		t := unix.NsecToTimespec(sleepTime.Nanoseconds())
		clock, flags := int32(unix.CLOCK_MONOTONIC), 0
		if absolute {
			t = unix.NsecToTimespec(begin.Add(sleepTime).UnixNano())
			clock, flags = unix.CLOCK_REALTIME, unix.TIMER_ABSTIME
		}
		for {
			err := unix.ClockNanosleep(clock, flags, &t, &t)
			if err != unix.EINTR {
				ended <- err
				return
			}
		}
	}()
	return func() error {
		err := <-ended
		took := time.Since(begin)
		if err == nil && took < sleepTime {
			return fmt.Errorf("it ended after %v", took)
		}
		return err
	}, nil
}

func monotonicState(h *holder) (func() error, error) {
	read := func() int64 {
		var t unix.Timespec
		if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
			return math.MinInt64
		}
		return t.Nano()
	}
	var last atomic.Int64
	var back atomic.Bool
	last.Store(read())
	first, wall := last.Load(), time.Now().UnixNano()
	go func() {
		for {
			now := read()
			if now < last.Load() {
				back.Store(true)
			}
			last.Store(now)
			time.Sleep(20 * time.Millisecond)
		}
	}()
	return func() error {
		h.values["monotonic"] = strconv.FormatInt(read()-first, 10)
		h.values["elapsed"] = strconv.FormatInt(time.Now().UnixNano()-wall, 10)
		return wantf(!back.Load(), "it went back")
	}, nil
}
