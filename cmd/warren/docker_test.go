//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// newDockerHome is a data directory whose daemon uses an engine of the test's own, with the small image in its store.
func newDockerHome(t *testing.T) *home {
	t.Helper()
	h, _ := startDockerHome(t)
	return h
}

func startDockerHome(t *testing.T) (*home, *dockertest.Engine) {
	t.Helper()
	testenv.NeedsTool(t, "cp", "git")
	_, store := dockertest.ImageStore(t)
	engine := dockertest.Start(t, dockertest.Config{})
	dir := filepath.Join(engine.Shared, "home")
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	h := newHomeIn(t, dir)
	h.env = []string{"WARREN_DOCKER_HOST=" + engine.Host, "WARREN_DOCKER_ACCEPT=no-disk-limit"}
	if out, err := exec.Command("cp", "-a", store, filepath.Join(dir, "images")).CombinedOutput(); err != nil {
		t.Fatalf("copy the image store: %v\n%s", err, out)
	}
	return h, engine
}

// TestDockerNetwork runs the scripts of the network with containers: the same cases as with gVisor.
func TestDockerNetwork(t *testing.T) {
	testenv.NeedsTUN(t)
	_, store := dockertest.ImageStore(t)
	engine := dockertest.Start(t, dockertest.Config{})
	p := scriptParams(t, scriptServer{
		homes: engine.Shared,
		env: []string{
			"WARREN_DRIVER=docker", "WARREN_IMAGE=" + dockertest.ImageName, "WARREN_DOCKER_HOST=" + engine.Host, "WARREN_DOCKER_ACCEPT=no-disk-limit",
		},
		prepare: func(home string) error {
			if err := os.Chmod(home, 0o711); err != nil {
				return err
			}
			if out, err := exec.Command("cp", "-a", store, filepath.Join(home, "images")).CombinedOutput(); err != nil {
				return fmt.Errorf("copy the image store: %v\n%s", err, out)
			}
			return nil
		},
	})
	for _, name := range []string{"network", "peers"} {
		p.Files = append(p.Files, filepath.Join("..", "..", "testdata", "script", name+".txtar"))
	}
	testscript.Run(t, p)
}

// gatewayPID returns the process of the gateway of a data directory.
func (h *home) gatewayPID() int {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir, "run", "gateway", "gateway.pid"))
	if err != nil {
		h.t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		h.t.Fatal(err)
	}
	return pid
}

// devices counts the network devices that the gateway has open.
func (h *home) devices() (n int) {
	h.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", h.gatewayPID()))
	if err != nil || len(files) == 0 {
		h.t.Fatalf("the gateway has %d files, %v", len(files), err)
	}
	for _, name := range files {
		if to, err := os.Readlink(name); err == nil && to == "/dev/net/tun" {
			n++
		}
	}
	return n
}

func (h *home) wantDevices(n int, when string) {
	h.t.Helper()
	for end := time.Now().Add(30 * time.Second); h.devices() != n; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			h.t.Fatalf("%s the gateway has %d network devices, want %d", when, h.devices(), n)
		}
	}
}

// TestDockerCards kills whoever serves a container's network card, and removes sandboxes in all ways: the card comes back, and none stays, with
// which a network namespace would.
func TestDockerCards(t *testing.T) {
	testenv.NeedsTUN(t)
	h, engine := startDockerHome(t)
	one := h.warren("create", "--name", "one", "--driver", "docker", "--image", dockertest.ImageName, "--policy", "locked")
	h.warren("create", "--name", "two", "--driver", "docker", "--image", dockertest.ImageName, "--policy", "locked")
	h.wantDevices(2, "of two sandboxes")
	// What is refused is refused at once; what nobody serves is not answered.
	answers := func(when string) {
		t.Helper()
		for _, box := range []string{"one", "two"} {
			h.warren("exec", box, "--", "sh", "-c", "for i in $(seq 30); do curl -s -m 2 http://11.22.33.44/; [ $? != 7 ] || exit 0; sleep 0.05; done; echo nothing answers "+when+"; exit 1")
		}
	}
	answers("at first")
	kill := func(pid int) {
		t.Helper()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	kill(h.gatewayPID())
	answers("after the gateway was killed")
	kill(h.daemon())
	answers("after the daemon was killed")
	kill(h.daemon())
	kill(h.gatewayPID())
	answers("after both were killed")
	h.wantDevices(2, "after all that")

	// Removed by a stranger, while the daemon looks and while it does not.
	engine.RemoveSandbox(one)
	h.wantDevices(1, "after a container was removed")
	three := h.warren("create", "--name", "three", "--driver", "docker", "--image", dockertest.ImageName, "--policy", "locked")
	h.wantDevices(2, "of another sandbox")
	kill(h.daemon())
	engine.RemoveSandbox(three)
	h.warren("ls")
	h.wantDevices(1, "after a container was removed while there was no daemon")
	h.warren("rm", "one", "two", "three")
	h.wantDevices(0, "of no sandbox")
}

// gitRepo makes a repository with one commit.
func gitRepo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "README"), []byte("one\ntwo\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "."}, {"-c", "user.name=Ada", "-c", "user.email=ada@example.com", "commit", "-qm", "first"}} {
		if out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	return dir
}

// TestDockerSameResult does one job under each driver and goes on with each workspace under another: diffs and branches are
// the same.
func TestDockerSameResult(t *testing.T) {
	h := newDockerHome(t)
	repo := gitRepo(t)
	with := map[string][]string{
		"gvisor": {"--driver", "gvisor"},
		"runc":   {"--driver", "docker"},
		"runsc":  {"--driver", "docker", "--runtime", "runsc"},
	}
	diffs, trees := map[string]string{}, map[string]string{}
	for name, next := range map[string]string{"gvisor": "runc", "runc": "runsc", "runsc": "gvisor"} {
		create := append([]string{"create", "--name", name, "--image", dockertest.ImageName, "--repo", repo, "--keep-workspace"}, with[name]...)
		h.warren(create...)
		if got := h.warren("exec", name, "--", "sh", "-c", "id -un; pwd; git status --short; git log --format=%s"); got != "user\n/workspace\nfirst" {
			t.Errorf("%s: %q", name, got)
		}
		h.warren("exec", name, "--", "sh", "-c", "echo three >> README; mkdir -p src; printf 'package main\\n' > src/main.go; chmod 755 src/main.go; ln -s README link")
		diffs[name] = h.warren("diff", name)
		workspace := h.field("inspect", name, "workspaceId")
		h.warren("rm", name)
		again := name + "-again"
		h.warren(append([]string{"create", "--name", again, "--image", dockertest.ImageName, "--workspace", workspace}, with[next]...)...)
		if got := h.warren("exec", again, "--", "git", "status", "--short"); got != "M README\n?? link\n?? src/" {
			t.Errorf("%s, then %s: git sees %q", name, next, got)
		}
		h.warren("commit", again, "-m", "Edit", "--branch", "warren/"+name, "--author", "Ada <ada@example.com>")
		mirror := h.field("repo", "ls", "path")
		tree, err := exec.Command("git", "--git-dir="+mirror, "rev-parse", "warren/"+name+"^{tree}").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, tree)
		}
		trees[name] = string(tree)
		h.warren("rm", again)
		h.warren("workspace", "rm", workspace)
	}
	for name := range with {
		if diffs[name] != diffs["gvisor"] || !strings.Contains(diffs[name], "+three") {
			t.Errorf("the diff under %s is\n%s\nand under gvisor\n%s", name, diffs[name], diffs["gvisor"])
		}
		if trees[name] != trees["gvisor"] {
			t.Errorf("the branch under %s has tree %s, under gvisor %s", name, trees[name], trees["gvisor"])
		}
	}
}

// field returns a field of what a command prints as JSON; there is one such object.
func (h *home) field(args ...string) string {
	h.t.Helper()
	last := len(args) - 1
	text := h.warren(append(args[:last:last], "--json")...)
	_, rest, ok := strings.Cut(text, `"`+args[last]+`":"`)
	value, _, ok2 := strings.Cut(rest, `"`)
	if !ok || !ok2 {
		h.t.Fatalf("warren %v has no %s:\n%s", args[:last], args[last], text)
	}
	return value
}

// TestDockerDaemonKilled kills the daemon while a command runs in a container: the next one finds the sandbox, and the command.
func TestDockerDaemonKilled(t *testing.T) {
	h := newDockerHome(t)
	h.warren("create", "--name", "box", "--driver", "docker", "--image", dockertest.ImageName)
	h.warren("exec", "box", "--", "sh", "-c", "echo kept > /tmp/file; sleep 1000 >/dev/null 2>&1 & echo $! > /tmp/pid")
	for range 2 {
		if err := syscall.Kill(h.daemon(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if got := h.warren("exec", "box", "--", "sh", "-c", "cat /tmp/file; kill -0 $(cat /tmp/pid) && echo runs"); got != "kept\nruns" {
			t.Errorf("after the daemon was killed: %q", got)
		}
	}
	if got := h.warren("stats", "box", "--json"); !strings.Contains(got, `"memory`) {
		t.Errorf("stats: %s", got)
	}
	cmd := h.command("create", "--driver", "docker", "--image", dockertest.ImageName, "--driver-option", "no-such=1")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "known: runtime") {
		t.Errorf("an unknown option: %v\n%s", err, out)
	}
	doctor := h.warren("doctor")
	for _, want := range []string{"docker engine", "docker userns", "docker disk"} {
		if !strings.Contains(doctor, want) {
			t.Errorf("the doctor says nothing of %q:\n%s", want, doctor)
		}
	}
	h.warren("rm", "box")
}

// TestDockerBench sets the drivers side by side on a server that runs.
func TestDockerBench(t *testing.T) {
	h := newDockerHome(t)
	h.warren("create", "--name", "box", "--driver", "docker", "--image", dockertest.ImageName) // so that the engine has an image
	how := []string{"--rounds", "1", "--quick"}
	if n := os.Getenv("WARREN_BENCH_ROUNDS"); n != "" {
		how = []string{"--rounds", n}
	}
	h.env = append(h.env, "DOCKER_HOST="+strings.TrimPrefix(h.env[0], "WARREN_DOCKER_HOST="))
	out := h.warren(append([]string{"bench", "drivers", "--url", "unix://" + filepath.Join(h.dir, "warren.sock"), "--image", dockertest.ImageName,
		"--compare", "gvisor,docker,docker:runsc,docker:kata"}, how...)...)
	t.Logf("\n%s", out)
	for _, want := range []string{"gvisor ", "docker ", "docker:runsc ", "not measured:", "docker:kata (", "its own", "the host's"} {
		if !strings.Contains(out, want) {
			t.Errorf("the table lacks %q", want)
		}
	}
	h.warren("rm", "box")
}

// TestDockerDemo is the demo on an engine of the test's own, with the image that stands for the host's.
func TestDockerDemo(t *testing.T) {
	testenv.NeedsLong(t, "WARREN_DEMO")
	testenv.NeedsTool(t, "bash", "docker")
	testenv.NeedsBinaries(t)
	engine := dockertest.Start(t, dockertest.Config{})
	cmd := exec.Command("script/demo.sh", "--driver", "docker")
	cmd.Dir = testenv.Repo(t)
	cmd.Env = append(os.Environ(), "TMPDIR="+engine.Shared, "DOCKER_HOST="+engine.Host, "WARREN_DOCKER_ACCEPT=no-disk-limit")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"made inside", "+Edited in a sandbox.", "Ada: Edit from a sandbox", "no process, no mount, no workspace"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the demo does not show %q", want)
		}
	}
}

// TestDockerRemoteResult does the job on an engine that sees nothing of this machine: the diff, also of a daemon that was killed
// meanwhile, has what the sandbox wrote, and the workspace goes on under gVisor.
func TestDockerRemoteResult(t *testing.T) {
	testenv.NeedsTool(t, "cp", "git")
	_, store := dockertest.ImageStore(t)
	engine := dockertest.Start(t, dockertest.Config{Remote: true})
	h := newHome(t)
	h.env = []string{"WARREN_DOCKER_HOST=" + engine.Host, "DOCKER_CERT_PATH=" + engine.Certs, "WARREN_DOCKER_ACCEPT=no-disk-limit,copied-mounts"}
	if out, err := exec.Command("cp", "-a", store, filepath.Join(h.dir, "images")).CombinedOutput(); err != nil {
		t.Fatalf("copy the image store: %v\n%s", err, out)
	}
	repo := gitRepo(t)
	h.warren("create", "--name", "far", "--driver", "docker", "--image", dockertest.ImageName, "--repo", repo, "--keep-workspace")
	if got := h.warren("exec", "far", "--", "sh", "-c", "id -un; pwd; git status --short; git log --format=%s"); got != "user\n/workspace\nfirst" {
		t.Errorf("inside: %q", got)
	}
	h.warren("exec", "far", "--", "sh", "-c", "echo three >> README; mkdir -p src; printf 'package main\\n' > src/main.go")
	if got := h.warren("diff", "far"); !strings.Contains(got, "+three") || !strings.Contains(got, "+package main") {
		t.Errorf("the diff is\n%s", got)
	}
	h.warren("exec", "far", "--", "sh", "-c", "echo four >> README")
	if err := syscall.Kill(h.daemon(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := h.warren("diff", "far"); !strings.Contains(got, "+four") {
		t.Errorf("after the daemon was killed the diff is\n%s", got)
	}
	if doctor := h.warren("doctor"); !strings.Contains(doctor, "docker mounts") || !strings.Contains(doctor, "that is accepted") {
		t.Errorf("the doctor says nothing of copies:\n%s", doctor)
	}
	h.warren("exec", "far", "--", "sh", "-c", "rm src/main.go; echo five >> README")
	workspace := h.field("inspect", "far", "workspaceId")
	h.warren("rm", "far")
	h.warren("create", "--name", "near", "--driver", "gvisor", "--image", dockertest.ImageName, "--workspace", workspace)
	if got := h.warren("exec", "near", "--", "sh", "-c", "tail -n 3 README; git status --short; ls src"); got != "three\nfour\nfive\n M README" && got != "three\nfour\nfive\nM README" {
		t.Errorf("under gVisor: %q", got)
	}
	h.warren("commit", "near", "-m", "Edit", "--branch", "warren/far", "--author", "Ada <ada@example.com>")
	h.warren("rm", "near")
	h.warren("workspace", "rm", workspace)
}

// TestDockerFiles takes what other drivers do with memory through a driver that keeps files alone: templates, whose services begin anew,
// snapshots, rollbacks, forks and races.
func TestDockerFiles(t *testing.T) {
	h := newDockerHome(t)
	project := t.TempDir()
	if err := os.WriteFile(filepath.Join(project, "warren.yaml"), []byte(`
driver: docker
image: `+dockertest.ImageName+`
env: {GREETING: hi}
setup:
  - echo deps > /var/tmp/installed
services:
  - name: beat
    command: while true; do echo "$GREETING" > /var/tmp/beat; sleep 0.2; done
    ready: {command: "test -s /var/tmp/beat", interval: 100ms}
    restart: always
`), 0o644); err != nil {
		t.Fatal(err)
	}
	h.warren("template", "build", "--name", "app", project)
	h.warren("create", "--name", "one", "--template", "app")
	beats := func(name string) {
		t.Helper()
		h.warren("exec", name, "--", "sh", "-c", "rm -f /var/tmp/beat; for i in $(seq 100); do test -s /var/tmp/beat && exit 0; sleep 0.1; done; echo no beat; exit 1")
	}
	if got := h.warren("exec", "one", "--", "sh", "-c", "cat /var/tmp/installed; echo $GREETING"); got != "deps\nhi" {
		t.Errorf("of the template: %q", got)
	}
	beats("one")
	if got := h.warren("ps", "one"); !strings.Contains(got, "service:beat") {
		t.Errorf("processes: %s", got)
	}

	h.warren("exec", "one", "--", "sh", "-c", "echo first > file; echo first > /var/tmp/file")
	// cold runs a command that makes do with files, and says so.
	cold := func(want string, args ...string) {
		t.Helper()
		cmd := h.command(args...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if out, err := cmd.Output(); err != nil {
			t.Fatalf("warren %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.Bytes())
		}
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("warren %s says %q, want %q", strings.Join(args, " "), stderr.String(), want)
		}
	}
	const made, begun = "driver docker cannot keep memory: the snapshot has the files alone", "snapshot then has files alone: files only, started cold"
	cold(made, "snapshot", "--name", "then", "one")
	h.warren("exec", "one", "--", "sh", "-c", "echo second > file; echo second > /var/tmp/file")
	cold(made, "fork", "--name", "two", "one")
	if got := h.warren("exec", "two", "--", "sh", "-c", "cat file /var/tmp/file"); got != "second\nsecond" {
		t.Errorf("the fork has %q", got)
	}
	cold(begun, "create", "--name", "three", "--snapshot", "then")
	if got := h.warren("exec", "three", "--", "sh", "-c", "cat file /var/tmp/file"); got != "first\nfirst" {
		t.Errorf("made of the snapshot: %q", got)
	}
	h.warren("rm", "three")
	beats("two")
	cold(begun, "rollback", "one", "then")
	if got := h.warren("exec", "one", "--", "sh", "-c", "cat file /var/tmp/file"); got != "first\nfirst" {
		t.Errorf("after the rollback: %q", got)
	}
	beats("one")

	// The best attempt becomes the source, whose id, name and services stay.
	id := h.field("inspect", "one", "id")
	out := h.warren("race", "one", "-n", "2", "--keep", "best", "--", "sh", "-c", "echo attempt > /var/tmp/won; test $WARREN_ATTEMPT = 2 && echo won > file")
	t.Logf("\n%s", out)
	if got := h.warren("exec", "one", "--", "sh", "-c", "cat file /var/tmp/won"); got != "won\nattempt" {
		t.Errorf("after the race: %q", got)
	}
	beats("one")
	if again := h.field("inspect", "one", "id"); again != id {
		t.Errorf("the source was %s and is %s", id, again)
	}
	h.warren("rm", "one", "two")
	h.warren("snapshot", "rm", "then")
	h.warren("template", "rm", "app")
	if got := h.warren("ls", "-q") + h.warren("snapshot", "ls", "-q"); got != "" {
		t.Errorf("left: %s", got)
	}
}
