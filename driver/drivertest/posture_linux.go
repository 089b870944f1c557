package drivertest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"
)

// Posture is what the host's kernel says about one kind of process of a sandbox, over all its threads.
type Posture struct {
	// Role is the name that the process gives itself.
	Role string
	// Seccomp, NoNewPrivs and CapEff are as in /proc/PID/status; each holds the values of all threads.
	Seccomp, NoNewPrivs, CapEff, CapBnd []string
	// OwnNamespaces are those that are not the host's.
	OwnNamespaces []string
	// HostUser says that it runs as a user that the host's own processes have.
	HostUser bool
	// HostRoot says that its root directory is the host's.
	HostRoot bool
	// Files are the kinds of descriptors that it holds.
	Files []string
}

// posture compares the processes of a sandbox with the checked-in posture of the driver; WARREN_UPDATE=1 writes it.
func posture(t *testing.T, a *arena) {
	if a.h.Processes == nil {
		t.Fatal("the harness does not tell the sandbox's processes")
	}
	id := a.sandbox()
	g := a.guest(id)
	for range 4 {
		g.Output(a, "true")
	}
	seen := map[string]*Posture{}
	for _, pid := range a.h.Processes(t, id) {
		if p, ok := readPosture(pid); ok {
			merge(seen, p)
		}
	}
	if len(seen) == 0 {
		t.Fatal("the sandbox has no processes")
	}
	var got []Posture
	for _, p := range seen {
		got = append(got, *p)
	}
	sort.Slice(got, func(i, j int) bool { return got[i].Role < got[j].Role })
	text, err := json.MarshalIndent(got, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("posture:\n%s", text)
	name := filepath.Join("testdata", "posture-"+a.goldenName()+".json")
	if os.Getenv("WARREN_UPDATE") == "1" {
		golden(t, name, string(text)+"\n")
	}
	want := readGoldenPosture(t, a)
	for _, p := range got {
		for _, d := range p.differs(want) {
			t.Error(d)
		}
		// Whatever the file says: these hold for every driver with a boundary.
		if slices.Contains(p.NoNewPrivs, "0") {
			t.Errorf("%s: a thread can gain privileges (NoNewPrivs 0)", p.Role)
		}
		if slices.Contains(p.Seccomp, "0") {
			t.Errorf("%s: a thread has no system call filter (Seccomp 0)", p.Role)
		}
		if p.HostUser {
			t.Errorf("%s: runs as a user of the host", p.Role)
		}
	}
	// The twin: a plain process must not pass.
	plain := exec.Command(probeBinary(t), "wait")
	plain.Env = []string{"SECRET=none"}
	if err := plain.Start(); err != nil {
		t.Fatal(err)
	}
	defer plain.Wait()
	defer plain.Process.Kill()
	p, ok := readPosture(plain.Process.Pid)
	// Start returns a moment before the new program's arguments can be read.
	for deadline := time.Now().Add(5 * time.Second); !ok && time.Now().Before(deadline); p, ok = readPosture(plain.Process.Pid) {
		time.Sleep(time.Millisecond)
	}
	if !ok {
		t.Fatal("the twin's posture cannot be read")
	}
	for _, w := range want {
		p.Role = w.Role
		if len(p.differs(want)) == 0 {
			t.Errorf("a plain process passes as %s", w.Role)
		}
	}
}

func readGoldenPosture(t testing.TB, a *arena) (want []Posture) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(packageDir(t), "testdata", "posture-"+a.goldenName()+".json"))
	if err != nil {
		t.Fatalf("%v; WARREN_UPDATE=1 writes it", err)
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	return want
}

// differs returns how a posture is weaker than, or other than, the expected one of its role. Descriptors that are expected may be absent.
func (p Posture) differs(want []Posture) (list []string) {
	i := slices.IndexFunc(want, func(w Posture) bool { return w.Role == p.Role })
	if i < 0 {
		return []string{fmt.Sprintf("%s: no such process is expected", p.Role)}
	}
	w := want[i]
	for _, f := range []struct {
		name      string
		got, want any
	}{
		{"Seccomp", p.Seccomp, w.Seccomp}, {"NoNewPrivs", p.NoNewPrivs, w.NoNewPrivs}, {"CapEff", p.CapEff, w.CapEff}, {"CapBnd", p.CapBnd, w.CapBnd},
		{"own namespaces", p.OwnNamespaces, w.OwnNamespaces}, {"host user", p.HostUser, w.HostUser}, {"host root", p.HostRoot, w.HostRoot},
	} {
		if fmt.Sprint(f.got) != fmt.Sprint(f.want) {
			list = append(list, fmt.Sprintf("%s: %s is %v, expected %v", p.Role, f.name, f.got, f.want))
		}
	}
	for _, file := range p.Files {
		if !slices.Contains(w.Files, file) {
			list = append(list, fmt.Sprintf("%s: an unexpected descriptor of %s", p.Role, file))
		}
	}
	return list
}

func merge(seen map[string]*Posture, p Posture) {
	old := seen[p.Role]
	if old == nil {
		seen[p.Role] = &p
		return
	}
	for _, f := range [][2]*[]string{{&old.Seccomp, &p.Seccomp}, {&old.NoNewPrivs, &p.NoNewPrivs}, {&old.CapEff, &p.CapEff}, {&old.CapBnd, &p.CapBnd}, {&old.Files, &p.Files}} {
		*f[0] = union(*f[0], *f[1])
	}
	// A namespace counts as its own only if all such processes have their own.
	old.OwnNamespaces = slices.DeleteFunc(old.OwnNamespaces, func(ns string) bool { return !slices.Contains(p.OwnNamespaces, ns) })
	old.HostUser = old.HostUser || p.HostUser
	old.HostRoot = old.HostRoot || p.HostRoot
}

func union(a, b []string) []string {
	all := append(slices.Clone(a), b...)
	sort.Strings(all)
	return slices.Compact(all)
}

// readPosture reads one process; ok is false when it has ended meanwhile.
func readPosture(pid int) (p Posture, ok bool) {
	proc := fmt.Sprintf("/proc/%d", pid)
	cmdline, err := os.ReadFile(proc + "/cmdline")
	if err != nil || len(cmdline) == 0 {
		return p, false
	}
	arg0, _, _ := strings.Cut(string(cmdline), "\x00")
	p.Role = filepath.Base(arg0)
	tasks, err := os.ReadDir(proc + "/task")
	if err != nil {
		return p, false
	}
	for _, task := range tasks {
		status, err := os.ReadFile(proc + "/task/" + task.Name() + "/status")
		if err != nil {
			continue
		}
		value := func(key string) string {
			for line := range strings.Lines(string(status)) {
				if k, v, _ := strings.Cut(line, ":"); k == key {
					return strings.Join(strings.Fields(v), " ")
				}
			}
			return "absent"
		}
		for key, list := range map[string]*[]string{"Seccomp": &p.Seccomp, "NoNewPrivs": &p.NoNewPrivs, "CapEff": &p.CapEff, "CapBnd": &p.CapBnd} {
			*list = union(*list, []string{value(key)})
		}
		for _, id := range strings.Fields(value("Uid") + " " + value("Gid")) {
			// The host's own users, and nobody, lie below the ranges of sandboxes.
			p.HostUser = p.HostUser || len(id) < 6
		}
	}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		own, err := os.Readlink(proc + "/ns/" + ns)
		if err != nil {
			return p, false
		}
		if host, _ := os.Readlink("/proc/1/ns/" + ns); own != host {
			p.OwnNamespaces = append(p.OwnNamespaces, ns)
		}
	}
	root, err := os.Stat(proc + "/root")
	if err != nil {
		return p, false
	}
	if host, err := os.Stat("/"); err == nil {
		p.HostRoot = os.SameFile(root, host)
	}
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return p, false
	}
	for _, fd := range fds {
		if target, err := os.Readlink(proc + "/fd/" + fd.Name()); err == nil {
			p.Files = union(p.Files, []string{fileKind(target)})
		}
	}
	return p, true
}

var digits = regexp.MustCompile(`[0-9]+`)

// fileKind is what a descriptor is, without what differs from run to run.
func fileKind(target string) string {
	switch {
	case strings.HasPrefix(target, "/memfd:"):
		return "memfd"
	case strings.HasPrefix(target, "/dev/"):
		return target
	case strings.HasPrefix(target, "/proc"):
		return digits.ReplaceAllString(target, "N")
	case strings.HasPrefix(target, "/"):
		// Seen from outside, a path in the sandbox's own mounts; the attacks judge what can be reached through it.
		return "a path"
	}
	kind, _, _ := strings.Cut(target, ":[")
	return kind
}
