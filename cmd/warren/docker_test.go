//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// newDockerHome is a data directory whose daemon uses an engine of the test's own, with the small image in its store.
func newDockerHome(t *testing.T) *home {
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
	return h
}

// TestDockerNetwork runs the script of the network with containers: the same cases as with gVisor.
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
	p.Files = []string{filepath.Join("..", "..", "testdata", "script", "network.txtar")}
	testscript.Run(t, p)
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
