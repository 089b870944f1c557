package drivertest

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/drivertest/field"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// escapeCase is one attack of the security list. Each runs in a sandbox, where nothing may come of it, and in a twin
// without a boundary, where the suite must see it succeed: an attack that cannot succeed anywhere proves nothing.
type escapeCase struct {
	id, what string
	// notRun says why the case is not run here, and where it is.
	notRun string
	run    func(t *testing.T, a *arena)
}

var escapeCases = []escapeCase{
	{id: "A01", what: "search everything that shows for a flag of the host", run: attackAs("root", "user")},
	{id: "A02", what: "write through every path and link trick to a target of the host", run: attackAs("root", "user")},
	{id: "A03", what: "posture of the sandbox's processes on the host", run: posture},
	{id: "A04", what: "make every system call", run: systemCalls},
	{id: "A05", what: "mount, unshare, setns, pivot_root, the new mount interface", run: attackAs("root")},
	{id: "A06", what: "cgroup release_agent, cgroup.procs, devices.allow", run: attackAs("root")},
	{id: "A07", what: "core_pattern, modprobe, sysrq, uevent_helper, binfmt_misc", run: attackAs("root")},
	{id: "A08", what: "replace devices by links while commands start", run: raceDevices},
	{id: "A09", what: "start in a directory reached through a leaked descriptor", run: leakedDirectory},
	{id: "A10", what: "overwrite the programs that run the sandbox", run: attackAs("root")},
	{id: "A11", what: "reach unix sockets, by path and abstract", run: attackAs("root")},
	{id: "A12", what: "reach a listener of the host over the network", run: attackAs("root")},
	{id: "A13", what: "ask for privileged options over the API", notRun: "internal/server and testdata/script: the API has no such fields"},
	{id: "A14", what: "swap a mount's source for a link", run: naiveMount},
	{id: "A15", what: "names that are paths", notRun: "internal/workspace and internal/engine; ids here in create-refuses"},
	{id: "A16", what: "hostile image layers", notRun: "internal/image"},
	{id: "A17", what: "layers whose digest is wrong", notRun: "internal/image"},
	{id: "A18", what: "two sandboxes look for each other", run: peers},
	{id: "A19", what: "a sandbox changes the image for the next one", run: nextSandbox},
	{id: "A20", what: "use up processes, memory, descriptors, files, output", run: exhaust},
	{id: "A21", what: "io_uring, bpf, userfaultfd, perf, keyrings, rare sockets, file handles", run: attackAs("root")},
	{id: "A22", what: "random system calls", run: fuzzCalls},
	{id: "A23", what: "syzkaller for 24 hours", notRun: "needs a day and its own images"},
	{id: "A24", what: "read or trace the guest as the sandbox's user and as root", run: attackAs("nobody", "root")},
	{id: "A25", what: "find secrets of the daemon in any process's memory, as root", run: attackAs("root")},
	{id: "A26", what: "run a blocked program under another name", notRun: "nothing claims to block a program by its name"},
	{id: "A27", what: "learn of the host from /proc, /sys, dmesg, environment", run: attackAs("root")},
	{id: "A36", what: "what is left after delete", notRun: "checked at the end of every case of this suite and of the conformance suite"},
}

// Escape runs the attacks on a driver's boundary and prints a table of them. A driver without a boundary or without
// commands runs none.
func Escape(t *testing.T, h Harness) {
	t.Helper()
	table := NewTable(h.Name, "escape")
	for _, ec := range escapeCases {
		notRun := ec.notRun
		if notRun == "" && h.isBrief() && !slices.Contains(briefAttacks, ec.id) {
			notRun = inFull
		}
		if why := h.Lacks[ec.id]; why != "" {
			notRun = why
		} else if notRun == "" && !h.Commands {
			notRun = "no guest runs commands"
		} else if notRun == "" && h.Boundary == "none" {
			notRun = "the driver claims no boundary"
		}
		table.Run(t, ec.id, ec.what, notRun, func(t *testing.T) {
			testenv.NeedsRoot(t)
			testenv.NeedsUserNamespaces(t)
			ec.run(t, newArena(t, h, ec.id))
		})
	}
	table.Print(t)
}

// briefAttacks are those on what a way to a sandbox adds: what it lets show, which descriptors and sockets it passes on, and how its
// processes stand on the host. The kernel of the boundary is attacked in full where it is reached directly.
var briefAttacks = []string{"A01", "A05", "A09", "A12", "A18", "A25"}

// arena is a field on the host and a sandbox from which it is attacked.
type arena struct {
	*ctx
	caseID  string
	planted *field.Planted
}

func newArena(t *testing.T, h Harness, caseID string) *arena {
	t.Helper()
	dir := t.TempDir()
	planted, err := field.Plant(filepath.Join(dir, "field"), h.Binaries)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(planted.Close)
	for d := dir; len(d) > 1; d = filepath.Dir(d) {
		// Only the boundary shall keep an attack out, not a parent directory's mode.
		if fi, err := os.Stat(d); err != nil || fi.Mode().Perm()&5 != 5 {
			os.Chmod(d, 0o755)
		}
	}
	// What the driver starts from now on could carry this into a sandbox.
	t.Setenv("WARREN_CANARY", planted.Canary)
	plantKey(t, planted.Canary)
	return &arena{ctx: newCtx(t, h), caseID: caseID, planted: planted}
}

// plantKey puts the canary into root's keyring until the test ends.
func plantKey(t testing.TB, canary string) {
	t.Helper()
	id, err := unix.AddKey("user", "warren-canary", []byte(canary), unix.KEY_SPEC_USER_KEYRING)
	if err != nil {
		t.Logf("no key on the host to look for: %v", err)
		return
	}
	t.Cleanup(func() { unix.KeyctlInt(unix.KEYCTL_UNLINK, id, unix.KEY_SPEC_USER_KEYRING, 0, 0) })
}

// sandbox makes one with a workspace and the probe in it.
func (a *arena) sandbox(change ...func(*driver.Spec)) warren.SandboxID {
	a.t.Helper()
	if !a.h.Initialized {
		// Who creates as the engine does gives a workspace as well.
		work := workDir(a.t)
		change = append(change, func(s *driver.Spec) {
			s.Mounts = append(s.Mounts, openMount(a.t, work, "/workspace", true, diskOwner))
		})
	}
	return a.create(append(change, withProbe(a.t))...)
}

func (a *arena) look() field.Facts {
	a.t.Helper()
	f, err := a.planted.Look()
	if err != nil {
		a.t.Fatal(err)
	}
	if a.h.Boundary != "kernel" {
		delete(f.Names, "the host's kernel release")
	}
	return f
}

// attack runs the attack in a sandbox and returns its report.
func (a *arena) attack(id warren.SandboxID, user, name string, args ...string) field.Report {
	a.t.Helper()
	text, err := json.Marshal(a.planted.Field)
	if err != nil {
		a.t.Fatal(err)
	}
	res, err := a.guest(id).Try(a, Command{User: user, Args: append([]string{probePath, "attack", name, string(text)}, args...)})
	if err != nil {
		s, found := a.list(a.d, id)
		a.t.Fatalf("the attack as %s: %v; List says of its sandbox (there: %v) %+v", user, err, found, s)
	}
	var r field.Report
	if err := json.Unmarshal([]byte(res.Stdout), &r); err != nil {
		a.t.Fatalf("the attack as %s: no report: %v (%s)\n%s", user, err, res.Status, tail(res.Stderr))
	}
	if r.Tried == 0 {
		a.t.Errorf("the attack as %s tried nothing", user)
	}
	return r
}

func tail(s string) string { return s[max(0, len(s)-2000):] }

// nothing fails the case for each piece of evidence that an attack in a sandbox achieved something.
func (a *arena) nothing(before field.Facts, r field.Report, who string) {
	a.t.Helper()
	for _, ev := range field.Evidence(before, a.look(), r) {
		a.t.Errorf("escape as %s: %s", who, ev)
	}
}

// twin runs the attack in the twin, where there must be evidence.
func (a *arena) twin(name string, args ...string) {
	a.t.Helper()
	if ev := runTwin(a.t, name, args...); len(ev) == 0 {
		a.t.Errorf("the twin: %s succeeds nowhere, so that it fails in a sandbox proves nothing", name)
	} else {
		a.t.Logf("the twin shows: %.600s", strings.Join(ev, "; "))
	}
}

// throwAway starts a process as root of namespaces of its own, whose ids are nobody's on the host, and ends it with this one.
func throwAway() *syscall.SysProcAttr {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: driver.DiskIDBase + 0x1000000, Size: 65536}}
	return &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{}, Setsid: true, Pdeathsig: syscall.SIGKILL,
	}
}

// twins are what the attacks have achieved in the twin, which has nothing to do with any driver: each is run once for all of them.
var twins sync.Map

// runTwin runs an attack without a boundary, in namespaces of its own; see the probe's twin.
func runTwin(t testing.TB, name string, args ...string) []string {
	t.Helper()
	key := strings.Join(append([]string{name}, args...), " ")
	if ev, ok := twins.Load(key); ok {
		return ev.([]string)
	}
	ev := runTwinNow(t, name, args...)
	twins.Store(key, ev)
	return ev
}

func runTwinNow(t testing.TB, name string, args ...string) []string {
	t.Helper()
	ctx, cancel := contextFor(2 * time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, probeBinary(t), append([]string{"twin", name}, args...)...)
	cmd.SysProcAttr = throwAway()
	cmd.Env = []string{"PATH=/"}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("twin %s: %v\n%s", name, err, stderr.String())
	}
	var result struct {
		Before, After field.Facts
		Report        field.Report
	}
	if err := json.Unmarshal(out, &result); err != nil {
		t.Fatalf("twin %s: %v\n%.500s", name, err, out)
	}
	return field.Evidence(result.Before, result.After, result.Report)
}

// attackAs is a case that is judged by its report and by the field alone.
func attackAs(users ...string) func(t *testing.T, a *arena) {
	return func(t *testing.T, a *arena) {
		id := a.sandbox()
		for _, user := range users {
			before := a.look()
			r := a.attack(id, user, a.caseID)
			t.Logf("as %s: %d attempts", user, r.Tried)
			a.nothing(before, r, user)
		}
		// Neither the driver nor another sandbox took harm.
		a.answers(a.d, a.create())
		a.twin(a.caseID)
	}
}

func raceDevices(t *testing.T, a *arena) {
	id := a.sandbox()
	before := a.look()
	done := make(chan field.Report, 1)
	go func() { done <- a.attack(id, "root", "A08", "5") }()
	g := a.guest(id)
	execs := 0
	for running := true; running; execs++ {
		// What starts in the middle of a swap may fail; what counts is what the host sees.
		g.Try(a, Command{Args: []string{"/bin/sh", "-c", "echo out > /dev/null; echo err >&2"}})
		select {
		case r := <-done:
			a.nothing(before, r, "root")
			running = false
		default:
		}
	}
	t.Logf("%d commands started during the race", execs)
	a.twin("A08", "2")
}

func leakedDirectory(t *testing.T, a *arena) {
	id := a.sandbox()
	g := a.guest(id)
	before := a.look()
	r := a.attack(id, "root", "A09")
	for fd := range 20 {
		for _, dir := range []string{fmt.Sprintf("/proc/self/fd/%d", fd), fmt.Sprintf("/proc/1/fd/%d", fd), fmt.Sprintf("/proc/self/fd/%d/../../..", fd)} {
			res, err := g.Try(a, Command{Dir: dir, Args: []string{"/bin/sh", "-c", `pwd; cat flag read/flag "../../../../../../../../../../../../..$0" 2>/dev/null`, a.planted.Read}})
			if err == nil {
				r.Look("the directory "+dir, []byte(res.Stdout))
			}
		}
	}
	for _, dir := range []string{"/proc/self/cwd/../../..", "/proc/1/cwd", "/proc/1/root", "/../../..", a.planted.Dir} {
		if res, err := g.Try(a, Command{Dir: dir, Args: []string{"/bin/sh", "-c", `pwd; cat "$0" read/flag ".$0"`, a.planted.Read}}); err == nil {
			r.Look("the directory "+dir, []byte(res.Stdout))
		}
	}
	a.nothing(before, r, "root")
	a.twin("A09")
}

// naiveMount is the twin of the conformance case mount-pinned: a driver that opens the path again mounts the secret.
func naiveMount(t *testing.T, a *arena) {
	base := t.TempDir()
	path, secret := filepath.Join(base, "path"), filepath.Join(base, "secret")
	for dir, text := range map[string]string{path: "mine", secret: "secret"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, "file"), text)
	}
	spec := a.spec(func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, path, "/mnt/x", false, diskOwner)) })
	again := a.spec(func(s *driver.Spec) { s.Mounts = append(s.Mounts, openMount(t, path, "/mnt/x", false, diskOwner)) })
	if err := os.Rename(path, path+"-aside"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, path); err != nil {
		t.Fatal(err)
	}
	// A driver may also refuse what moved.
	if err := a.d.Create(a, spec); err == nil {
		if got := a.guest(spec.ID).Shell(a, "root", "cat /mnt/x/file").Stdout; got != "mine" {
			t.Errorf("after the swap the sandbox reads %q", got)
		}
	}
	naive, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer naive.Close()
	again.Mounts[len(again.Mounts)-1].Dir = naive
	again.Mounts[len(again.Mounts)-1].Source = secret
	a.createSpec(again)
	if got := a.guest(again.ID).Shell(a, "root", "cat /mnt/x/file").Stdout; got != "secret" {
		t.Errorf("the twin, which opens the path after the swap, reads %q: the attack succeeds nowhere", got)
	}
}

// visible starts what makes a sandbox visible to others as far as possible.
func (a *arena) visible(id warren.SandboxID) {
	a.t.Helper()
	p := a.guest(id).start(a, Command{Args: []string{probePath, "peer", a.planted.Canary}})
	if line, err := p.line(); line != "visible" {
		a.t.Fatalf("the first sandbox said %q, %v", line, err)
	}
}

func peers(t *testing.T, a *arena) {
	first, second := a.sandbox(), a.sandbox()
	a.visible(first)
	before := a.look()
	a.nothing(before, a.attack(second, "root", "A18"), "root")
	a.twin("A18")
}

func nextSandbox(t *testing.T, a *arena) {
	layer := imageLayer(t)
	onLayer := func(s *driver.Spec) {
		s.Root.Layers = append(slices.Clone(s.Root.Layers), driver.Layer{Dir: layer, IDBase: driver.DiskIDBase})
	}
	var dirs, programs []string
	for _, l := range a.spec().Root.Layers {
		dirs = append(dirs, l.Dir)
	}
	for _, p := range []string{"/usr/bin/env", "/usr/bin/git", "/usr/bin/id", "/bin/sh"} {
		if p, err := filepath.EvalSymlinks(p); err == nil {
			programs = append(programs, p)
		}
	}
	dirs = append(dirs, layer)
	onHost := treeState(t, append(programs, dirs...)...)

	// One sandbox lives all the while, one changes the image, one comes afterwards.
	witness, first := a.sandbox(onLayer), a.sandbox(onLayer)
	look := func(id warren.SandboxID) map[string]string {
		r := a.guest(id).Shell(a, "root", listImage)
		if r.Code != 0 {
			t.Fatalf("list the image: %s %s", r.Status, r.Stderr)
		}
		files := map[string]string{}
		for line := range strings.Lines(r.Stdout) {
			name, state, _ := strings.Cut(strings.TrimSpace(line), " ")
			files[name] += state + ";"
		}
		return files
	}
	pristine := look(witness)
	if len(pristine) < 15 {
		t.Fatalf("the image shows as %v", pristine)
	}
	a.visible(first)
	a.guest(first).Shell(a, "root", changeImage)
	a.guest(first).Shell(a, "root", "for f in /bin/sh /usr/bin/env /etc/passwd /etc/profile /usr/bin/git; do echo changed >> $f; done; rm -rf /usr/share/doc; mv /usr/bin/id /usr/bin/moved; chmod 0 /usr/bin/git")
	changed := look(first)
	for name, state := range pristine {
		if changed[name] == state && name != "/image/untouched" {
			t.Errorf("the attack did not change %s in its own sandbox, so it proves nothing", name)
		}
	}
	if err := a.d.Delete(a, first); err != nil {
		t.Fatal(err)
	}
	before := a.look()
	second := a.sandbox()
	a.nothing(before, a.attack(second, "root", "A18"), "root")
	third := a.sandbox(onLayer)
	for who, id := range map[string]warren.SandboxID{"the sandbox that ran meanwhile": witness, "the next sandbox": third} {
		if got := look(id); !maps.Equal(got, pristine) {
			t.Errorf("%s sees\n%v\nand the image is\n%v", who, got, pristine)
		}
		if r := a.guest(id).Shell(a, "root", "id -u >/dev/null || echo changed; tail -c 8 /bin/sh /usr/bin/env /etc/passwd /etc/profile /usr/bin/git"); strings.Contains(r.Stdout, "changed") {
			t.Errorf("%s sees what the first did to programs of the image", who)
		}
	}
	after := treeState(t, append(programs, dirs...)...)
	for name, state := range onHost {
		if after[name] != state {
			t.Errorf("%s changed on the host from %q to %q", name, state, after[name])
		}
	}
	for name := range after {
		if onHost[name] == "" {
			t.Errorf("%s is new on the host", name)
		}
	}
	a.twin("A18")
}

// imageLayer makes a layer with a file below /image for each way to change one.
func imageLayer(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layer")
	sub := filepath.Join(dir, "image", "dir")
	if err := os.MkdirAll(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"appended", "overwritten", "truncated", "removed", "moved", "mode", "owner", "time", "linked", "replaced", "descriptor", "hole", "untouched", "dir/file"} {
		writeFile(t, filepath.Join(dir, "image", name), "pristine "+name+"\n")
	}
	writeFile(t, filepath.Join(dir, "image", "setuid"), "pristine\n")
	if err := os.Symlink("untouched", filepath.Join(dir, "image", "link")); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, driver.DiskIDBase, driver.DiskIDBase))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "image", "setuid"), 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	return dir
}

// listImage prints a line for each name and each content below /image.
const listImage = `find /image -printf '%p %y,%m,%U,%G,%T@,%l\n'; find /image -type f -printf '%p ' -exec sh -c 'sha256sum < "$0"' {} \;`

// changeImage changes everything below /image but one file, each in another way.
const changeImage = `cd /image
echo more >> appended
printf X | dd of=overwritten conv=notrunc 2>/dev/null
: > truncated
rm removed
mv moved moved-away
chmod 0777 mode
chown 1000:1000 owner
touch -d 2001-01-01 time
chmod 0 setuid
ln linked hard && echo more >> hard
echo new > new && mv -f new replaced
exec 3<> descriptor; rm -f descriptor; echo more >&3; cat /proc/self/fd/3 > descriptor; exec 3>&-
dd if=/dev/zero of=hole bs=4096 count=3 seek=7 conv=notrunc 2>/dev/null
ln -sfn /etc/passwd link
rm -rf dir
mount -o remount,rw / ; mount -o bind /tmp /image/untouched
for p in /proc/1/root /proc/self/root /.warren/..; do echo more >> $p/image/appended; done
true`

// treeState describes files and everything below directories of the host: owner, mode, size, times of change and content.
func treeState(t *testing.T, paths ...string) map[string]string {
	t.Helper()
	state := map[string]string{}
	for _, root := range paths {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return err
			}
			text := fmt.Sprint(st.Uid, st.Gid, st.Mode, st.Size, st.Nlink, st.Mtim, st.Ctim)
			if d.Type().IsRegular() {
				b, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				text += fmt.Sprintf(" %x", sha256.Sum256(b))
			}
			state[path] = text
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return state
}

func exhaust(t *testing.T, a *arena) {
	const processes, memory = 100, 256 << 20
	peer := a.create()
	g := a.guest(peer)
	latency := func() time.Duration {
		begin := time.Now()
		g.Output(a, "true")
		return time.Since(begin)
	}
	var calm []time.Duration
	for range 10 {
		calm = append(calm, latency())
	}
	big := strconv.Itoa(1 << 40)
	descriptors, files, output := 20_000, 5_000, 16<<20
	if testenv.Soak() {
		descriptors, files, output = 100_000, 20_000, 64<<20
	}
	for _, kind := range []struct {
		name        string
		limit, want string
		// twin gets a limit of its own: little is enough to see that nothing stops it.
		twin string
	}{
		{"processes", strconv.Itoa(processes), strconv.Itoa(4 * processes), "50"},
		{"memory", strconv.Itoa(memory), strconv.Itoa(2 * memory), strconv.Itoa(8 << 20)},
		{"shm", strconv.Itoa(2 * memory), strconv.Itoa(3 * memory), strconv.Itoa(4 << 20)},
		{"descriptors", big, strconv.Itoa(descriptors), "100"},
		{"files", big, strconv.Itoa(files), "100"},
		{"output", big, strconv.Itoa(output), strconv.Itoa(1 << 20)},
	} {
		id := a.sandbox(func(s *driver.Spec) { s.Limits.PIDs, s.Limits.Memory = processes, memory })
		text, err := json.Marshal(a.planted.Field)
		if err != nil {
			t.Fatal(err)
		}
		type end struct {
			res Result
			err error
		}
		done := make(chan end, 1)
		victim := a.guest(id)
		go func() {
			res, err := victim.Try(a, Command{User: "user", Args: []string{probePath, "attack", "A20", string(text), kind.name, kind.limit, kind.want}})
			done <- end{res, err}
		}()
		var busy []time.Duration
		var e end
		for running := true; running; {
			busy = append(busy, latency())
			select {
			case e = <-done:
				running = false
			default:
			}
		}
		var r field.Report
		switch {
		case json.Unmarshal([]byte(e.res.Stdout), &r) == nil:
			for _, did := range r.Did {
				t.Errorf("%s: the attacker could %s", kind.name, did)
			}
		case e.err == nil:
			// It was stopped, as it should be.
		default:
			// The whole sandbox ended; then it must say why.
			if s := a.waitState(id, driver.Dead); s.Exit == nil || s.Exit.Reason != "oom" {
				t.Errorf("%s: the sandbox ended as %+v (%v)", kind.name, s.Exit, e.err)
			}
		}
		slices.Sort(calm)
		slices.Sort(busy)
		t.Logf("%s: tried %d (%s); another sandbox's commands: median %v calm, %v under attack, worst of %d %v", kind.name, r.Tried, e.res.Status,
			calm[len(calm)/2].Round(time.Millisecond), busy[len(busy)/2].Round(time.Millisecond), len(busy), busy[len(busy)-1].Round(time.Millisecond))
		if worst := busy[len(busy)-1]; worst > 30*time.Second {
			t.Errorf("%s: a command in another sandbox took %v", kind.name, worst)
		}
		if err := a.d.Delete(a, id); err != nil {
			t.Errorf("%s: Delete: %v", kind.name, err)
		}
		a.twin("A20", kind.name, kind.twin, kind.twin+"0")
	}
	a.answers(a.d, a.create())
}

func fuzzCalls(t *testing.T, a *arena) {
	seconds, procs := "4", "4"
	if testenv.Soak() {
		seconds = "10"
	}
	if s := os.Getenv("WARREN_FUZZ_SECONDS"); s != "" {
		seconds, procs = s, "8"
	}
	seed := strconv.FormatInt(time.Now().UnixNano(), 10)
	if s := os.Getenv("WARREN_FUZZ_SEED"); s != "" {
		seed = s
	}
	t.Logf("seed %s (WARREN_FUZZ_SEED repeats it, WARREN_FUZZ_SECONDS makes it longer)", seed)
	id, peer := a.sandbox(), a.create()
	g := a.guest(peer)
	g.Output(a, "true")
	kernel := openKernelLog(t)
	files := openFiles(t)
	before := a.look()
	n, _ := strconv.Atoi(seconds)
	// Without a kernel of its own, root inside can also stop what carries its channel; then nobody answers any more.
	long, cancel := contextFor(time.Duration(n+20) * time.Second)
	defer cancel()
	res, err := a.guest(id).Try(long, Command{User: "root", Args: []string{probePath, "fuzz", seed, seconds, procs}})
	if err != nil {
		// The sandbox's own kernel may end; the host's business is that nothing else does.
		s, _ := a.list(a.d, id)
		t.Logf("the sandbox ended: %+v (%v)", s, err)
	} else {
		t.Logf("%s calls", strings.TrimSpace(res.Stdout))
	}
	a.nothing(before, field.Report{}, "root")
	g.Output(a, "true")
	// Gone first: where the host has no disk limit, and an operator has accepted that, the calls may have filled its disk.
	if err := a.d.Delete(a, id); err != nil {
		t.Fatal(err)
	}
	a.answers(a.d, a.create())
	if lines := kernel.complaints(); len(lines) > 0 {
		t.Errorf("the host's kernel says:\n%s", strings.Join(lines, "\n"))
	}
	if now := openFiles(t); now > files+50 {
		t.Errorf("open files of this process went from %d to %d", files, now)
	}
	// The judge's twin: it must see a complaint where there is one.
	if (&kernelLog{}).judge([]string{"6,1,1,-;BUG: unable to handle page fault", "6,1,1,-;eth0: link up", "6,1,1,-;traps: exe[1] general protection fault ip:1 sp:2 error:0 in probe[1,2+3]"}) == nil {
		t.Error("the judge of the kernel's log sees nothing")
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// kernelLog follows the host's kernel log from when it was opened.
type kernelLog struct{ f *os.File }

func openKernelLog(t testing.TB) *kernelLog {
	t.Helper()
	f, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Logf("the kernel's log cannot be read: %v", err)
		return &kernelLog{}
	}
	t.Cleanup(func() { f.Close() })
	unix.Seek(int(f.Fd()), 0, io.SeekEnd)
	return &kernelLog{f}
}

var complaint = regexp.MustCompile(`\b(BUG|Oops|WARNING|general protection|segfault|traps:|audit|seccomp|hung task|soft lockup)\b`)

// ownCrash is a crash of the fuzzer's own code, which the host's kernel notes where the sandbox has none of its own.
var ownCrash = regexp.MustCompile(`(general protection|segfault) .* in probe\[`)

// complaints returns what the kernel has complained of since the log was opened.
func (k *kernelLog) complaints() []string {
	if k.f == nil {
		return nil
	}
	var lines []string
	buf := make([]byte, 8<<10)
	for {
		n, err := unix.Read(int(k.f.Fd()), buf)
		if errors.Is(err, unix.EPIPE) {
			continue
		}
		if err != nil || n <= 0 {
			return k.judge(lines)
		}
		lines = append(lines, strings.TrimSpace(string(buf[:n])))
	}
}

func (*kernelLog) judge(lines []string) (bad []string) {
	for _, l := range lines {
		if complaint.MatchString(l) && !ownCrash.MatchString(l) {
			bad = append(bad, l)
		}
	}
	return bad
}

// systemCalls compares what each system call answers with a checked-in table; WARREN_UPDATE=1 writes the table.
func systemCalls(t *testing.T, a *arena) {
	id := a.sandbox()
	kernel := openKernelLog(t)
	before := a.look()
	r := a.attack(id, "root", "A04")
	a.nothing(before, field.Report{}, "root")
	got := callTable(r.Calls)
	golden(t, filepath.Join("testdata", "calls-"+a.goldenName()+".txt"), got)
	if lines := kernel.complaints(); len(lines) > 0 {
		t.Errorf("the host's kernel says:\n%s", strings.Join(lines, "\n"))
	}
	a.answers(a.d, a.create())
	// The twin is this kernel itself; were it the same table, the calls would reach it.
	if twin := callTable(twinCalls(t)); twin == got {
		t.Error("the system calls answer as the host's kernel does")
	}
}

// goldenName is the driver's own name, the same for each way to reach it.
func (a *arena) goldenName() string {
	name, _, _ := strings.Cut(a.h.Name, " ")
	return name
}

func callTable(calls map[int]string) string {
	numbers := make([]int, 0, len(calls))
	for n := range calls {
		numbers = append(numbers, n)
	}
	sort.Ints(numbers)
	var b strings.Builder
	for _, n := range numbers {
		fmt.Fprintf(&b, "%d %s\n", n, calls[n])
	}
	return b.String()
}

// twinCalls makes the calls with no sandbox around, in the twin's namespaces.
func twinCalls(t testing.TB) map[int]string {
	t.Helper()
	cmd := exec.Command(probeBinary(t), "attack", "A04", "{}")
	cmd.SysProcAttr = throwAway()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("system calls without a sandbox: %v", err)
	}
	var r field.Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	return r.Calls
}

// golden compares with a checked-in file, or writes it when WARREN_UPDATE=1.
func golden(t testing.TB, name, got string) {
	t.Helper()
	path := filepath.Join(packageDir(t), name)
	if os.Getenv("WARREN_UPDATE") == "1" {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; WARREN_UPDATE=1 writes it", err)
	}
	if string(want) == got {
		return
	}
	old := strings.Split(string(want), "\n")
	for _, line := range strings.Split(got, "\n") {
		if !slices.Contains(old, line) {
			t.Errorf("%s: now %q", name, line)
		}
	}
	t.Errorf("%s differs; if the change is right, WARREN_UPDATE=1 writes it", name)
}
