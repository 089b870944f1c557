package main

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/drivertest/field"
)

// lastCall is above every system call of this architecture.
const lastCall = 480

// unharmed are calls that are not made: they would end, stop or copy the prober itself instead of answering.
var unharmed = map[int]string{
	unix.SYS_RT_SIGRETURN: "sigreturn", unix.SYS_PAUSE: "pause", unix.SYS_FORK: "fork", unix.SYS_VFORK: "fork", unix.SYS_CLONE: "fork", unix.SYS_EXIT: "exit",
	unix.SYS_EXIT_GROUP: "exit", unix.SYS_RT_SIGSUSPEND: "pause", unix.SYS_SYNC: "sync",
}

// walkSyscalls makes every system call with arguments that mean nothing, each in a process that may die of it.
func walkSyscalls(_ field.Field, _ []string, r *field.Report) {
	r.Calls = map[int]string{}
	for next := 0; next <= lastCall; {
		next = walkFrom(next, r)
	}
	r.Tried = len(r.Calls)
}

// walkFrom runs a child that makes calls from one number on, and returns the number at which to go on.
func walkFrom(from int, r *field.Report) (next int) {
	cmd := exec.Command("/proc/self/exe", "calls", strconv.Itoa(from))
	out, err := cmd.StdoutPipe()
	if err != nil || cmd.Start() != nil {
		return lastCall + 1
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- s.Text()
		}
	}()
	current := from
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				if current <= lastCall {
					r.Calls[current] = "ended"
				}
				return current + 1
			}
			n, result, done := strings.Cut(line, " ")
			current, _ = strconv.Atoi(n)
			if done {
				r.Calls[current] = result
				current++
			}
		case <-time.After(5 * time.Second):
			r.Calls[current] = "blocks"
			return current + 1
		}
	}
}

// calls makes the calls and prints each number before and after.
func calls(args []string) error {
	from, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for n := from; n <= lastCall; n++ {
		if why, ok := unharmed[n]; ok {
			fmt.Println(n, "not made:", why)
			continue
		}
		fmt.Println(n)
		const bad = ^uintptr(0)
		_, _, errno := unix.RawSyscall6(uintptr(n), bad, bad, bad, bad, bad, bad)
		result := "ok"
		if errno != 0 {
			if result = unix.ErrnoName(errno); result == "" {
				result = strconv.Itoa(int(errno))
			}
		}
		fmt.Println(n, result)
	}
	return nil
}

// rareSyscalls tries the parts of a kernel that escapes have come from.
func rareSyscalls(_ field.Field, _ []string, r *field.Report) {
	var params [120]byte
	for name, try := range map[string]func() (uintptr, syscall.Errno){
		"use io_uring":    func() (uintptr, syscall.Errno) { return call(unix.SYS_IO_URING_SETUP, 4, pointer(&params[0]), 0, 0) },
		"load a BPF map":  func() (uintptr, syscall.Errno) { return call(unix.SYS_BPF, 0, pointer(bpfMap()), 72, 0) },
		"use userfaultfd": func() (uintptr, syscall.Errno) { return call(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0, 0) },
		"use perf events": func() (uintptr, syscall.Errno) {
			return call(unix.SYS_PERF_EVENT_OPEN, pointer(perfAttr()), 0, ^uintptr(0), ^uintptr(0))
		},
		"open an AF_ALG":   func() (uintptr, syscall.Errno) { return call(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_SEQPACKET, 0, 0) },
		"open an AF_VSOCK": func() (uintptr, syscall.Errno) { return call(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0, 0) },
		"open a netfilter": func() (uintptr, syscall.Errno) {
			return call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER, 0)
		},
		"load a kernel image": func() (uintptr, syscall.Errno) { return call(unix.SYS_KEXEC_LOAD, 0, 0, 0, 0) },
		"open a file handle":  func() (uintptr, syscall.Errno) { return fileHandle() },
	} {
		r.Tried++
		if fd, errno := try(); errno == 0 {
			r.Did = append(r.Did, name)
			unix.Close(int(fd))
		}
	}
	for _, ring := range []int{unix.KEY_SPEC_SESSION_KEYRING, unix.KEY_SPEC_USER_KEYRING, unix.KEY_SPEC_USER_SESSION_KEYRING, unix.KEY_SPEC_PROCESS_KEYRING} {
		r.Tried++
		id, err := unix.KeyctlSearch(ring, "user", "warren-canary", 0)
		if err != nil {
			continue
		}
		b := make([]byte, 512)
		if n, err := unix.KeyctlBuffer(unix.KEYCTL_READ, id, b, 0); err == nil {
			r.Look("a keyring", b[:min(n, len(b))])
		}
	}
	for id := range strings.Lines(string(smallFile("/proc/keys", 1<<16))) {
		if strings.Contains(id, "warren-canary") {
			r.Did = append(r.Did, "see a key of the host in /proc/keys")
		}
	}
}

func call(n, a, b, c, d uintptr) (uintptr, syscall.Errno) {
	r, _, errno := unix.Syscall6(n, a, b, c, d, 0, 0)
	return r, errno
}

// fuzz makes system calls with random numbers and arguments for a while, in several processes. Arguments: seed, seconds,
// processes. It prints how many calls were begun.
func fuzz(args []string) error {
	seed, err := strconv.ParseUint(args[0], 10, 64)
	if err != nil {
		return err
	}
	until := time.Now().Add(seconds(args[1:2], 10))
	procs, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	total := make(chan int)
	for p := range procs {
		go func() {
			n := 0
			for round := uint64(0); time.Now().Before(until); round++ {
				one := exec.Command("/proc/self/exe", "fuzzone", strconv.FormatUint(seed+uint64(p)<<32+round, 10))
				// A call may stop or orphan the process: it ends with its group and its time.
				one.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				if one.Start() != nil {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				timer := time.AfterFunc(500*time.Millisecond, func() { syscall.Kill(-one.Process.Pid, syscall.SIGKILL) })
				one.Wait()
				timer.Stop()
				syscall.Kill(-one.Process.Pid, syscall.SIGKILL)
				n += callsPerProcess
			}
			total <- n
		}()
	}
	sum := 0
	for range procs {
		sum += <-total
	}
	fmt.Println(sum)
	return nil
}

const callsPerProcess = 200

// fuzzOne makes the calls of one seed.
func fuzzOne(args []string) error {
	seed, err := strconv.ParseUint(args[0], 10, 64)
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(seed, 7))
	buf := make([]byte, 1<<16)
	for i := range buf {
		buf[i] = byte(rnd.Uint32())
	}
	fds := openSome()
	value := func() uintptr {
		switch rnd.IntN(7) {
		case 0:
			return uintptr(rnd.IntN(8))
		case 1:
			return ^uintptr(0) - uintptr(rnd.IntN(4096))
		case 2:
			return uintptr(fds[rnd.IntN(len(fds))])
		case 3, 4:
			return pointer(&buf[rnd.IntN(len(buf)/2)])
		case 5:
			return uintptr(1) << rnd.IntN(64)
		}
		return uintptr(rnd.Uint64())
	}
	for range callsPerProcess {
		n := rnd.IntN(lastCall)
		switch n {
		// These would signal or stop other processes of the sandbox, which is its own affair, and end the run.
		case unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_TGKILL, unix.SYS_REBOOT, unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_PAUSE, unix.SYS_RT_SIGSUSPEND,
			unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_VFORK:
			continue
		}
		unix.RawSyscall6(uintptr(n), value(), value(), value(), value(), value(), value())
	}
	os.Exit(0)
	return nil
}

// openSome opens a few kinds of descriptors for calls to work on.
func openSome() []int {
	fds := []int{0, 1, 2}
	for _, path := range []string{"/dev/null", "/dev/zero", "/proc/self/maps", "/tmp", "/proc/self/mem", "/etc/passwd", "/dev/ptmx"} {
		if fd, err := unix.Open(path, unix.O_RDWR, 0); err == nil {
			fds = append(fds, fd)
		} else if fd, err := unix.Open(path, unix.O_RDONLY, 0); err == nil {
			fds = append(fds, fd)
		}
	}
	var pair [2]int
	if unix.Pipe(pair[:]) == nil {
		fds = append(fds, pair[:]...)
	}
	for _, s := range [][2]int{{unix.AF_INET, unix.SOCK_STREAM}, {unix.AF_INET6, unix.SOCK_DGRAM}, {unix.AF_UNIX, unix.SOCK_SEQPACKET}, {unix.AF_NETLINK, unix.SOCK_RAW}} {
		if fd, err := unix.Socket(s[0], s[1], 0); err == nil {
			fds = append(fds, fd)
		}
	}
	if fd, err := unix.EpollCreate1(0); err == nil {
		fds = append(fds, fd)
	}
	if fd, err := unix.MemfdCreate("x", 0); err == nil {
		fds = append(fds, fd)
	}
	if fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, 0); err == nil {
		fds = append(fds, fd)
	}
	return fds
}
