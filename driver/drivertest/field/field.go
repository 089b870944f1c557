// Package field is the ground on which attacks are judged: flags that nobody in a sandbox may read, a target that nobody may
// write, listeners that nobody may reach, and the values of the host that nobody may change. The suite plants one on
// the host; the twin of an attack plants one inside a throw-away environment, where the attack must be seen to succeed.
package field

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"syscall"
)

// Marker is in all that an attack leaves: names, mount sources, values.
const Marker = "warren-attack"

// Field is what attacks aim at. Probes get it as JSON; it holds no canary.
type Field struct {
	// Dir holds all that is planted.
	Dir string
	// Read is a file that holds the canary, Write a directory with a file "target".
	Read, Write string
	// Socket is a listening unix socket, Abstract a listening name, Port a TCP port on every address.
	Socket, Abstract string
	Port             int
	// Binaries are programs of the host.
	Binaries []string
	// Addresses of the host.
	Addresses []string
	// Twin says that this field lies in a twin, where nothing beyond the stand-ins may be tried.
	Twin bool
}

// canaryPattern is put together here so that no binary holds a string that matches it.
var canaryPattern = regexp.MustCompile("WCANARY" + "-[0-9a-f]{64}")

// Canary returns a new secret.
func Canary() string {
	var b [32]byte
	rand.Read(b[:])
	return "WCANARY" + "-" + hex.EncodeToString(b[:])
}

// Canaries returns the canaries in b, each once.
func Canaries(b []byte) []string {
	var found []string
	for _, m := range canaryPattern.FindAll(b, -1) {
		if s := string(m); !slices.Contains(found, s) {
			found = append(found, s)
		}
	}
	return found
}

// Planted is a field with its listeners.
type Planted struct {
	Field
	Canary    string
	accepted  atomic.Int64
	listeners []net.Listener
}

// Plant makes a field in a directory.
func Plant(dir string, binaries []string) (*Planted, error) {
	p := &Planted{Canary: Canary(), Field: Field{
		Dir: dir, Read: filepath.Join(dir, "read", "flag"), Write: filepath.Join(dir, "write"),
		Socket: filepath.Join(dir, "daemon.sock"), Abstract: "@warren-field-" + hex.EncodeToString([]byte(filepath.Base(dir))),
		Binaries: binaries,
	}}
	for _, d := range []string{filepath.Dir(p.Read), p.Write} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	// The flag is readable and the target writable for everyone, so that only the boundary keeps an attack out.
	if err := os.WriteFile(p.Read, []byte(p.Canary), 0o644); err != nil {
		return nil, err
	}
	target := filepath.Join(p.Write, "target")
	if err := os.WriteFile(target, []byte("untouched"), 0o666); err != nil {
		return nil, err
	}
	if err := os.Chmod(target, 0o666); err != nil {
		return nil, err
	}
	if err := os.Chmod(p.Write, 0o777); err != nil {
		return nil, err
	}
	for _, at := range [][2]string{{"unix", p.Socket}, {"unix", p.Abstract}, {"tcp", ":0"}} {
		l, err := net.Listen(at[0], at[1])
		if err != nil {
			p.Close()
			return nil, err
		}
		if a, ok := l.Addr().(*net.TCPAddr); ok {
			p.Port = a.Port
		}
		p.listeners = append(p.listeners, l)
		go p.count(l)
	}
	if err := os.Chmod(p.Socket, 0o777); err != nil {
		p.Close()
		return nil, err
	}
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			p.Addresses = append(p.Addresses, n.IP.String())
		}
	}
	return p, nil
}

// count counts who connects, and tells the canary to whoever does.
func (p *Planted) count(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		p.accepted.Add(1)
		conn.Write([]byte(p.Canary))
		conn.Close()
	}
}

// Close ends the listeners.
func (p *Planted) Close() {
	for _, l := range p.listeners {
		l.Close()
	}
}

// Facts is what is true on the field at one moment.
type Facts struct {
	// Values are what an attack may not change: settings of the kernel, control files of cgroups, what is in the
	// field's directory, hashes of programs, mounts that bear the marker.
	Values map[string]string
	// Accepted counts connections to the listeners.
	Accepted int64
	// Names must not be seen in a sandbox: of the host, its boot, its kernel, its directories.
	Names map[string]string
	// Canary is what is in the flag.
	Canary string
}

// controls are settings through which a kernel runs programs or stops.
var controls = []string{
	"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/kernel/poweroff_cmd",
	"/proc/sys/kernel/sysrq", "/proc/sys/kernel/panic_on_oops", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
	"/proc/sys/fs/binfmt_misc/" + Marker, "/sys/kernel/uevent_helper",
}

// Controls returns the paths that attacks on the kernel's settings write.
func Controls() []string { return append(slices.Clone(controls), "/proc/sysrq-trigger") }

// Look collects the facts.
func (p *Planted) Look() (Facts, error) {
	f := Facts{Values: map[string]string{}, Accepted: p.accepted.Load(), Canary: p.Canary, Names: map[string]string{"the field's directory": p.Dir}}
	for _, path := range controls {
		if b, err := os.ReadFile(path); err == nil {
			f.Values["setting "+path] = strings.TrimSpace(string(b))
		}
	}
	// In a twin this is a plain file; the kernel's own cannot be read.
	if fi, err := os.Stat("/proc/sysrq-trigger"); err == nil && fi.Size() > 0 {
		f.Values["setting /proc/sysrq-trigger"] = fmt.Sprint(fi.Size())
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/release_agent", "/sys/fs/cgroup/*/notify_on_release", "/sys/fs/cgroup/*/devices.list", "/sys/fs/cgroup/*/devices.allow"} {
		files, _ := filepath.Glob(pattern)
		for _, path := range files {
			if b, err := os.ReadFile(path); err == nil {
				f.Values["cgroup "+path] = strings.TrimSpace(string(b))
			}
		}
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + Marker + "*")
	for _, path := range groups {
		f.Values["cgroup "+path] = "exists"
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return f, err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, Marker) {
			f.Values["mount "+strings.TrimSpace(line)] = "exists"
		}
	}
	for _, path := range p.Binaries {
		f.Values["program "+path] = hashFile(path)
	}
	err = filepath.WalkDir(p.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		v := info.Mode().String()
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			v += fmt.Sprintf(" %d:%d", st.Uid, st.Gid)
		}
		if info.Mode().IsRegular() {
			v += " " + hashFile(path)
		}
		f.Values["file "+path] = v
		return nil
	})
	if err != nil {
		return f, err
	}
	for what, path := range map[string]string{
		"the host's name": "/proc/sys/kernel/hostname", "the host's boot id": "/proc/sys/kernel/random/boot_id", "the host's machine id": "/etc/machine-id",
		"the host's kernel release": "/proc/sys/kernel/osrelease",
	} {
		if b, err := os.ReadFile(path); err == nil && len(strings.TrimSpace(string(b))) > 3 {
			f.Names[what] = strings.TrimSpace(string(b))
		}
	}
	return f, nil
}

func hashFile(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// Report is what an attack says that it could do.
type Report struct {
	// Did is what the attacker could do and should not have been able to.
	Did []string `json:",omitempty"`
	// Found are canaries that it saw, with where.
	Found map[string]string `json:",omitempty"`
	// Text is what it read about its surroundings.
	Text string `json:",omitempty"`
	// Tried counts attempts, so that a report of nothing is not one of no attempt.
	Tried int
	// Calls is the result of each system call, by number.
	Calls map[int]string `json:",omitempty"`
}

// Look notes the canaries in b.
func (r *Report) Look(where string, b []byte) {
	for _, c := range Canaries(b) {
		if r.Found == nil {
			r.Found = map[string]string{}
		}
		if _, ok := r.Found[c]; !ok {
			r.Found[c] = where
		}
	}
}

// Evidence returns what an attack achieved, by the facts before and after and by its report. Nothing is the right answer in
// a sandbox; in a twin it means that the attack proves nothing.
func Evidence(before, after Facts, r Report) []string {
	var ev []string
	for k, was := range before.Values {
		if now, ok := after.Values[k]; !ok {
			ev = append(ev, k+" is gone")
		} else if now != was {
			ev = append(ev, fmt.Sprintf("%s changed from %q to %q", k, was, now))
		}
	}
	for k := range after.Values {
		if _, ok := before.Values[k]; !ok {
			ev = append(ev, k+" is new")
		}
	}
	if n := after.Accepted - before.Accepted; n > 0 {
		ev = append(ev, fmt.Sprintf("%d connections reached listeners outside", n))
	}
	if where, ok := r.Found[before.Canary]; ok && before.Canary != "" {
		ev = append(ev, "the flag was read at "+where)
	}
	for what, name := range before.Names {
		if strings.Contains(r.Text, name) {
			ev = append(ev, what+" shows inside")
		}
	}
	for _, d := range r.Did {
		ev = append(ev, "the attacker could "+d)
	}
	sort.Strings(ev)
	// One piece is proof; thousands say no more.
	return ev[:min(len(ev), 20)]
}
