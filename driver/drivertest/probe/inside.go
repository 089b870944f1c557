package main

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/drivertest/field"
)

// readHelper reads the memory of the first process as whoever it is run as.
func readHelper(_ field.Field, _ []string, r *field.Report) {
	r.Tried = 5
	if b := smallFile("/proc/1/environ", 1<<16); len(b) > 0 {
		r.Did = append(r.Did, "read the environment of process 1")
	}
	if readMemory(1, func([]byte) bool { return false }) {
		r.Did = append(r.Did, "read the memory of process 1")
	}
	// Seized, it goes on; attached, it would stop, and who watches this attack with it.
	if unix.PtraceSeize(1) == nil {
		r.Did = append(r.Did, "trace process 1")
	}
	buf := make([]byte, 16)
	for _, m := range readable(1) {
		local := []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}
		if n, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: uintptr(m[0]), Len: len(buf)}}, 0); err == nil && n > 0 {
			r.Did = append(r.Did, "read process 1 with process_vm_readv")
			break
		}
	}
	if fd, err := unix.PidfdOpen(1, 0); err == nil {
		if _, err := unix.PidfdGetfd(fd, 3, 0); err == nil {
			r.Did = append(r.Did, "take a descriptor of process 1")
		}
		unix.Close(fd)
	}
}

// readSecrets looks for canaries in the environment, arguments and memory of every process.
func readSecrets(_ field.Field, _ []string, r *field.Report) {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		pid, _ := strconv.Atoi(filepath.Base(p))
		if pid == os.Getpid() {
			continue
		}
		for _, name := range []string{"environ", "cmdline", "comm", "stack", "auxv"} {
			r.Tried++
			r.Look(p+"/"+name, smallFile(p+"/"+name, 1<<20))
		}
		r.Tried++
		readMemory(pid, func(b []byte) bool { r.Look(p+"/mem", b); return true })
	}
	for _, path := range []string{"/proc/kcore", "/dev/mem", "/dev/kmem", "/proc/kmsg", "/dev/kmsg"} {
		r.Tried++
		r.Look(path, smallFile(path, 16<<20))
	}
}

// readable returns the address ranges of a process that can be read.
func readable(pid int) (ranges [][2]int64) {
	for s := bufio.NewScanner(bytes.NewReader(smallFile(fmt.Sprintf("/proc/%d/maps", pid), 4<<20))); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) < 2 || f[1][0] != 'r' || strings.Contains(s.Text(), "[v") {
			continue
		}
		from, to, _ := strings.Cut(f[0], "-")
		a, err1 := strconv.ParseInt(from, 16, 64)
		b, err2 := strconv.ParseInt(to, 16, 64)
		if err1 == nil && err2 == nil {
			ranges = append(ranges, [2]int64{a, b})
		}
	}
	return ranges
}

// readMemory reads a process's memory piece by piece until look says no, and reports whether any could be read.
func readMemory(pid int, look func([]byte) bool) bool {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false
	}
	defer mem.Close()
	buf := make([]byte, 1<<20)
	read := false
	for _, m := range readable(pid) {
		for at := m[0]; at < m[1] && at-m[0] < 256<<20; at += int64(len(buf)) - 100 {
			n, err := mem.ReadAt(buf[:min(int64(len(buf)), m[1]-at)], at)
			if n > 0 {
				read = true
				if !look(buf[:n]) {
					return true
				}
			}
			if err != nil {
				break
			}
		}
	}
	return read
}

// lookAround collects what tells about the host.
func lookAround(_ field.Field, _ []string, r *field.Report) {
	var b bytes.Buffer
	patterns := []string{"/proc/cpuinfo", "/proc/mounts", "/proc/self/mountinfo", "/proc/1/mountinfo", "/proc/cmdline", "/proc/version", "/proc/sys/kernel/*", "/proc/sys/kernel/random/boot_id",
		"/proc/1/environ", "/proc/1/cmdline", "/proc/self/environ", "/proc/self/cgroup", "/proc/1/cgroup", "/proc/net/*", "/proc/partitions", "/proc/modules", "/proc/swaps", "/proc/keys",
		"/sys/class/dmi/id/*", "/sys/devices/virtual/dmi/id/*", "/sys/block/*", "/sys/fs/cgroup/*", "/etc/hostname", "/etc/hosts", "/etc/machine-id", "/etc/fstab", "/etc/mtab", "/etc/resolv.conf", "/run/*"}
	for _, p := range patterns {
		names, _ := filepath.Glob(p)
		for _, name := range names {
			r.Tried++
			fmt.Fprintf(&b, "%s: %s\n", name, bytes.ReplaceAll(smallFile(name, 1<<16), []byte{0}, []byte{' '}))
		}
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		fmt.Fprintf(&b, "uname: %s %s %s\n", u.Nodename[:], u.Release[:], u.Version[:])
	}
	log := make([]byte, 1<<18)
	if n, err := unix.Klogctl(3, log); err == nil {
		fmt.Fprintf(&b, "dmesg: %s\n", log[:n])
	}
	r.Look("its surroundings", b.Bytes())
	r.Text = strings.ToValidUTF8(b.String(), "?")
}

// peerName is what a sandbox makes visible by every means it has, for another to look for.
const peerName = "warren-peer"

// beVisible makes this sandbox visible to others as far as it can, prints "visible" and stays.
func beVisible(args []string) error {
	canary := args[0]
	for _, at := range [][2]string{{"tcp", ":4711"}, {"unix", "@" + peerName}} {
		l, err := net.Listen(at[0], at[1])
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Write([]byte(canary))
				c.Close()
			}
		}()
	}
	for _, dir := range []string{"/dev/shm", "/tmp", "/run", "/var/tmp", "/usr", "/etc", "/mnt/probe"} {
		os.WriteFile(filepath.Join(dir, peerName), []byte(canary), 0o666)
	}
	if id, err := shmget(peerKey, 4096); err == nil {
		if b, err := unix.SysvShmAttach(id, 0, 0); err == nil {
			copy(b, canary)
		}
	}
	unix.AddKey("user", peerName, []byte(canary), unix.KEY_SPEC_USER_KEYRING)
	unix.AddKey("user", peerName, []byte(canary), unix.KEY_SPEC_SESSION_KEYRING)
	fmt.Println("visible")
	select {}
}

const peerKey = 0x57415252

func shmget(key, size int) (int, error) { return unix.SysvShmGet(key, size, unix.IPC_CREAT|0o666) }

// scanPeers looks for another sandbox by every means. In a twin it makes the other one itself, beside it.
func scanPeers(f field.Field, args []string, r *field.Report) {
	if f.Twin {
		canary := smallFile(f.Read, 4096)
		other := exec.Command("/proc/self/exe", "peer", string(canary))
		out, err := other.StdoutPipe()
		if err != nil || other.Start() != nil {
			return
		}
		defer other.Process.Kill()
		bufio.NewReader(out).ReadString('\n')
	}
	hosts := []string{"127.0.0.1", "::1"}
	hosts = append(hosts, addresses()...)
	for net := range 4 {
		for host := range 6 {
			hosts = append(hosts, fmt.Sprintf("10.%d.0.%d", net, host), fmt.Sprintf("172.17.%d.%d", net, host), fmt.Sprintf("192.168.%d.%d", net, host))
		}
	}
	for _, h := range hosts {
		r.Tried++
		dialReport(r, "tcp", net.JoinHostPort(h, "4711"))
	}
	dialReport(r, "unix", "@"+peerName)
	for _, dir := range []string{"/dev/shm", "/tmp", "/run", "/var/tmp", "/usr", "/etc", "/mnt/probe"} {
		r.Tried++
		path := filepath.Join(dir, peerName)
		r.Look(path, smallFile(path, 4096))
	}
	if id, err := unix.SysvShmGet(peerKey, 4096, 0); err == nil {
		if b, err := unix.SysvShmAttach(id, 0, unix.SHM_RDONLY); err == nil {
			r.Look("shared memory", b)
		}
	}
	for _, ring := range []int{unix.KEY_SPEC_SESSION_KEYRING, unix.KEY_SPEC_USER_KEYRING} {
		r.Tried++
		if id, err := unix.KeyctlSearch(ring, "user", peerName, 0); err == nil {
			b := make([]byte, 512)
			if n, err := unix.KeyctlBuffer(unix.KEYCTL_READ, id, b, 0); err == nil {
				r.Look("a keyring", b[:min(n, len(b))])
			}
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if p != fmt.Sprintf("/proc/%d/cmdline", os.Getpid()) {
			r.Tried++
			r.Look(p, smallFile(p, 4096))
		}
	}
}

func addresses() (list []string) {
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			list = append(list, n.IP.String())
		}
	}
	return list
}

// exhaust uses up one thing past a limit, as far as it is let, and gives it back. Arguments: what, the limit, and how much
// to want at most.
func exhaust(_ field.Field, args []string, r *field.Report) {
	limit, err := strconv.Atoi(args[1])
	if err != nil {
		return
	}
	got := 0
	want, err := strconv.Atoi(args[2])
	if err != nil {
		return
	}
	switch args[0] {
	case "processes":
		var running []*exec.Cmd
		for ; got < want; got++ {
			cmd := exec.Command("/proc/self/exe", "wait")
			cmd.Env = []string{"SECRET=none"}
			if cmd.Start() != nil {
				break
			}
			running = append(running, cmd)
		}
		for _, cmd := range running {
			cmd.Process.Kill()
		}
		for _, cmd := range running {
			cmd.Wait()
		}
	case "descriptors":
		for ; got < want; got++ {
			if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
				break
			}
		}
	case "memory":
		for ; got < want; got += 4 << 20 {
			b, err := unix.Mmap(-1, 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			if err != nil {
				break
			}
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			time.Sleep(2 * time.Millisecond)
		}
	case "shm":
		os.MkdirAll("/dev/shm", 0o777)
		f, err := os.Create("/dev/shm/" + field.Marker)
		if err != nil {
			return
		}
		piece := bytes.Repeat([]byte("x"), 1<<20)
		for ; got < want; got += len(piece) {
			if _, err := f.Write(piece); err != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		f.Close()
		os.Remove(f.Name())
	case "files":
		dir := "/tmp/" + field.Marker
		os.MkdirAll(dir, 0o755)
		for ; got < want; got++ {
			fd, err := unix.Open(filepath.Join(dir, strconv.Itoa(got)), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
			if err != nil {
				break
			}
			unix.Close(fd)
		}
		os.RemoveAll(dir)
	case "output":
		line := bytes.Repeat([]byte("flood "), 1<<10)
		for ; got < want; got += len(line) {
			if _, err := os.Stderr.Write(line); err != nil {
				break
			}
		}
	}
	r.Tried = got
	if got > limit {
		r.Did = append(r.Did, fmt.Sprintf("use %d %s, limit %d", got, args[0], limit))
	}
}
