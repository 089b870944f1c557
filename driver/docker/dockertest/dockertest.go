//go:build linux

// Package dockertest starts Docker engines for tests. Each has namespaces of its own for mounts, processes and the network,
// its own socket, data and state, so that an engine of the user's is never touched, and everything that the engine has
// made ends with its first process: also when the test is killed.
package dockertest

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// IDBase is the host id of a container's root in these engines. It is not that of the files on disk, so that mappings are
// needed as with most engines.
const IDBase = 0x68000000

// Config changes an engine.
type Config struct {
	// Daemon is added to the engine's configuration file.
	Daemon map[string]any
	// NoRuntimes leaves out the runtime runsc.
	NoRuntimes bool
	// RunscArgs are the arguments of the runtime runsc; nil means those that show the engine what is written to the root.
	RunscArgs []string
	// DiskSize bounds what the engine can store; 0 means plenty.
	DiskSize int64
	// NoUserNamespaces lets containers run with the host's ids.
	NoUserNamespaces bool
	// Remote gives it a /tmp of its own and a TCP port with TLS, as if it were on another machine: what lies in the test's
	// temporary directories is not there. It has no runtime but runc.
	Remote bool
	// Podman makes it Podman's service in place of Docker's daemon. It has no user namespaces then, and no runtime but runc.
	Podman bool
}

// Engine is a running engine.
type Engine struct {
	// Host is its address.
	Host string
	// Shared is a directory whose mounts the engine sees. A driver's state has to lie in it.
	Shared string
	// Base holds everything of the engine.
	Base string
	// Certs is a directory with the client's keys of a remote engine.
	Certs string

	remote  bool
	t       testing.TB
	control io.WriteCloser
	outer   *exec.Cmd
	log     bytes.Buffer
}

//go:embed outer.sh
var outerScript string

//go:embed inner.sh
var innerScript string

// Start starts an engine that ends with the test.
func Start(t testing.TB, c Config) *Engine {
	t.Helper()
	testenv.NeedsRoot(t)
	testenv.NeedsMountNamespace(t)
	testenv.NeedsTool(t, "runc", "mkfs.ext4", "unshare", "ip")
	daemon := "dockerd"
	if c.Podman {
		daemon, c.NoRuntimes = "podman", true
	}
	kind := daemon
	if c.Remote {
		kind, c.NoRuntimes = "remote", true
	}
	testenv.NeedsTool(t, daemon)
	// The path is short: sockets lie below it.
	base, err := os.MkdirTemp("", "wdk")
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{t: t, Base: base, Shared: filepath.Join(base, "shared"), Host: "unix://" + filepath.Join(base, "docker.sock")}
	if err := e.prepare(c); err != nil {
		os.RemoveAll(base)
		t.Fatal(err)
	}
	e.outer = exec.Command("sh", "-c", outerScript, "sh", base, innerScript, e.group(), kind)
	// A signal to the test's process group must not reach what cleans up after it.
	e.outer.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	e.outer.Stdout, e.outer.Stderr = &e.log, &e.log
	if e.control, err = e.outer.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := e.outer.Start(); err != nil {
		os.RemoveAll(base)
		t.Fatal(err)
	}
	t.Cleanup(e.end)
	e.Run()
	if c.Remote {
		if err := e.forward(); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

// group is the control group below which the engine puts containers.
func (e *Engine) group() string { return "warren-" + filepath.Base(e.Base) }

func (e *Engine) prepare(c Config) error {
	if err := os.Chmod(e.Base, 0o711); err != nil {
		return err
	}
	// The mode of etc becomes that of the engine's /etc.
	for _, dir := range []string{"shared", "data", "exec", "etc", "etc-work"} {
		if err := os.Mkdir(filepath.Join(e.Base, dir), 0o755); err != nil {
			return err
		}
	}
	config := map[string]any{
		"bridge": "none", "iptables": false, "ip6tables": false, "log-level": "warn", "storage-driver": "overlay2",
		"cgroup-parent": "/" + e.group(), "userns-remap": "warren-test",
	}
	if c.NoUserNamespaces {
		delete(config, "userns-remap")
	}
	if !c.NoRuntimes {
		runsc, err := testenv.Build(filepath.Join(testenv.Repo(e.t), ".cache", "testbin"), "runsc", "gvisor.dev/gvisor/runsc")
		if err != nil {
			return err
		}
		args := c.RunscArgs
		if args == nil {
			args = []string{"--platform=systrap", "--overlay2=none"}
		}
		config["runtimes"] = map[string]any{"runsc": map[string]any{"path": runsc, "runtimeArgs": args}}
	}
	if c.Remote {
		e.remote, e.Certs = true, filepath.Join(e.Base, "certs")
		if err := makeCerts(e.Certs); err != nil {
			return err
		}
		config["tlsverify"] = true
		for key, name := range map[string]string{"tlscacert": "ca.pem", "tlscert": "server.pem", "tlskey": "server-key.pem"} {
			config[key] = filepath.Join(e.Certs, name)
		}
	}
	for k, v := range c.Daemon {
		config[k] = v
	}
	text, err := json.Marshal(config)
	if err != nil {
		return err
	}
	size := c.DiskSize
	if size == 0 {
		size = 20 << 30 // a file with holes
	}
	if err := os.WriteFile(filepath.Join(e.Base, "disk"), nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(filepath.Join(e.Base, "disk"), size); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", filepath.Join(e.Base, "disk")).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	ids := fmt.Sprintf("warren-test:%d:%d\n", IDBase, driver.IDCount)
	for name, add := range map[string]string{
		"etc/passwd": "warren-test:x:64999:64999::/:/bin/false\n", "etc/group": "warren-test:x:64999:\n", "etc/subuid": ids, "etc/subgid": ids,
	} {
		was, err := os.ReadFile("/" + name)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		if err := os.WriteFile(filepath.Join(e.Base, name), append(was, add...), 0o644); err != nil {
			return err
		}
	}
	// Podman asks by default for higher limits than a machine may give.
	if err := os.MkdirAll(filepath.Join(e.Base, "etc/containers"), 0o755); err != nil {
		return err
	}
	conf := fmt.Sprintf("[containers]\ndefault_ulimits = [\"nofile=4096:4096\", \"nproc=4096:4096\"]\n[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nexit_command_delay = 1\ntmp_dir = %q\n", filepath.Join(e.Base, "exec/tmp"))
	if err := os.WriteFile(filepath.Join(e.Base, "etc/containers/containers.conf"), []byte(conf), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(e.Base, "daemon.json"), text, 0o644)
}

// command has the engine's first process do something.
func (e *Engine) command(word string) {
	e.t.Helper()
	if _, err := io.WriteString(e.control, word+"\n"); err != nil {
		e.t.Fatalf("the engine's first process is gone: %v\n%s", err, e.Log())
	}
}

// Run starts the engine's daemon, after Kill or Stop, and waits until it answers.
func (e *Engine) Run() {
	e.t.Helper()
	api := e.Client()
	// A daemon that was killed leaves parts that may end only after the next one has begun; on a busy machine that one gives
	// up waiting for them.
	for range 3 {
		e.command("start")
		if e.answers(api, 30*time.Second) {
			return
		}
		e.Kill()
	}
	e.t.Fatalf("the engine does not start\n%s", e.Log())
}

func (e *Engine) answers(api *client.Client, patience time.Duration) bool {
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_, err := api.Ping(ctx, client.PingOptions{})
		cancel()
		if err == nil {
			return true
		}
	}
	return false
}

// Kill ends the engine's daemon with SIGKILL; containers run on.
func (e *Engine) Kill() { e.signal("kill") }

// Stop ends the engine's daemon as an administrator would.
func (e *Engine) Stop() { e.signal("stop") }

func (e *Engine) signal(word string) {
	e.t.Helper()
	e.command(word)
	name := filepath.Join(e.Base, "ended")
	for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if os.Remove(name) == nil {
			return
		}
		if time.Now().After(until) {
			e.t.Fatalf("the engine does not end\n%s", e.Log())
		}
	}
}

// Client returns a client of the engine.
func (e *Engine) Client() *client.Client {
	e.t.Helper()
	// The socket lies where the test sees it, also of an engine that does not see the test.
	api, err := client.New(client.WithHost("unix://" + filepath.Join(e.Base, "docker.sock")))
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { api.Close() })
	return api
}

// Log returns the end of what the engine has said.
func (e *Engine) Log() string {
	text, _ := os.ReadFile(filepath.Join(e.Base, "log"))
	return e.log.String() + string(text[max(0, len(text)-8000):])
}

// end ends everything and wants nothing to be left.
func (e *Engine) end() {
	if e.t.Failed() {
		e.t.Logf("the engine said:\n%s", e.Log())
	}
	e.control.Close()
	done := make(chan error, 1)
	go func() { done <- e.outer.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			e.t.Errorf("end of the engine: %v\n%s", err, e.log.String())
		}
	case <-time.After(time.Minute):
		e.t.Errorf("the engine's end takes too long\n%s", e.log.String())
	}
	if _, err := os.Lstat(e.Base); err == nil {
		e.t.Errorf("left of the engine: %s", e.Base)
	}
	if b, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(b), e.Base+"/") {
		e.t.Errorf("the engine left mounts")
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*/" + e.group()); len(left) > 0 {
		e.t.Errorf("the engine left control groups: %v", left)
	}
}

// RemoveSandbox removes the container of a sandbox, as a stranger may.
func (e *Engine) RemoveSandbox(id string) {
	e.t.Helper()
	api := e.Client()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := api.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.warren.sandbox="+id)})
	if err != nil || len(list.Items) != 1 {
		e.t.Fatalf("sandbox %s has %d containers, %v", id, len(list.Items), err)
	}
	if _, err := api.ContainerRemove(ctx, list.Items[0].ID, client.ContainerRemoveOptions{Force: true}); err != nil {
		e.t.Fatal(err)
	}
}

// Processes returns the host's processes of a container.
func (e *Engine) Processes(container string) []int {
	var pids []int
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil || !strings.Contains(string(text), container) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
