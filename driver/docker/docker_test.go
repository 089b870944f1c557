//go:build linux

package docker_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/driver/drivertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// env is a driver on an engine of its own.
type env struct {
	*testing.T
	engine *dockertest.Engine
	api    *client.Client
	opts   docker.Options
	root   driver.Root
	d      *docker.Driver
}

func newEnv(t *testing.T, c dockertest.Config, change ...func(*docker.Options)) *env {
	t.Helper()
	guest, root := testenv.NeedsBinary(t, "warren-guest"), dockertest.Image(t)
	engine := dockertest.Start(t, c)
	e := &env{T: t, engine: engine, api: engine.Client(), root: root, opts: docker.Options{
		StateDir: filepath.Join(engine.Shared, "docker"), GuestPath: guest, Host: engine.Host,
		Accept: []string{docker.AcceptNoDiskLimit}, Logger: slog.New(slog.DiscardHandler),
	}}
	for _, f := range change {
		f(&e.opts)
	}
	e.d = e.open()
	return e
}

// open opens another driver on the same state.
func (e *env) open() *docker.Driver {
	e.Helper()
	d, err := docker.New(e.opts)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { d.Close() })
	return d
}

func (e *env) spec() *driver.Spec {
	return &driver.Spec{
		ID: warren.SandboxID("s" + strings.ToLower(rand.Text()[:19])), Hostname: "box", Root: e.root,
		Limits: driver.Limits{CPUMillis: 2000, Memory: 256 << 20, Disk: 256 << 20, PIDs: 200},
	}
}

func (e *env) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	e.Cleanup(cancel)
	return ctx
}

func (e *env) create() warren.SandboxID {
	e.Helper()
	s := e.spec()
	if err := e.d.Create(e.ctx(), s); err != nil {
		e.Fatal(err)
	}
	return s.ID
}

// run runs a shell script as root in a sandbox.
func (e *env) run(id warren.SandboxID, script string) string {
	e.Helper()
	return drivertest.NewGuest(e, e.d, id).Output(e.ctx(), "sh", "-c", script)
}

// containers returns all containers of the engine, whoever made them.
func (e *env) containers() []container.Summary {
	e.Helper()
	list, err := e.api.ContainerList(e.ctx(), client.ContainerListOptions{All: true})
	if err != nil {
		e.Fatal(err)
	}
	return list.Items
}

// clean deletes what List has and wants nothing to be left of anything.
func (e *env) clean() {
	e.Helper()
	list, err := e.d.List(e.ctx())
	if err != nil {
		e.Fatal(err)
	}
	for _, s := range list {
		if err := e.d.Delete(e.ctx(), s.ID); err != nil {
			e.Errorf("Delete(%s): %v", s.ID, err)
		}
	}
	for _, c := range e.containers() {
		e.Errorf("left in the engine: %v %s %v", c.Names, c.State, c.Labels)
	}
	if left, _ := os.ReadDir(filepath.Join(e.opts.StateDir, "stage")); len(left) > 0 {
		e.Errorf("left on the stage: %v", left)
	}
	if b, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(b), e.opts.StateDir) {
		e.Errorf("left in the host's mount table:\n%s", b)
	}
}

// status returns what List says of a sandbox.
func (e *env) status(id warren.SandboxID) (driver.Status, bool) {
	e.Helper()
	list, err := e.d.List(e.ctx())
	if err != nil {
		e.Fatal(err)
	}
	for _, s := range list {
		if s.ID == id {
			return s, true
		}
	}
	return driver.Status{}, false
}

func TestEngineKilledInCreate(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	e.create() // the image is loaded
	moments := []time.Duration{5, 120}
	if testenv.Soak() {
		moments = []time.Duration{5, 20, 45, 80, 120, 180, 260}
	}
	for _, after := range moments {
		spec := e.spec()
		done := make(chan error, 1)
		go func() { done <- e.d.Create(e.ctx(), spec) }()
		time.Sleep(after * time.Millisecond)
		e.engine.Kill()
		err := <-done
		if err != nil && !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("engine killed %v into a create: %v, want ErrUnavailable", after*time.Millisecond, err)
		}
		if s, lerr := e.d.List(e.ctx()); !errors.Is(lerr, warren.ErrUnavailable) || !strings.Contains(lerr.Error(), "start it") {
			t.Errorf("List without an engine: %v, %v", s, lerr)
		}
		e.engine.Run()
		// Whatever the engine has kept of it can be deleted, and the id be used again.
		if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
			t.Errorf("Delete after it: %v", err)
		}
		if err := e.d.Create(e.ctx(), spec); err != nil {
			t.Errorf("Create again: %v", err)
		}
	}
	e.clean()
}

func TestEngineKilledInDelete(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	moments := []time.Duration{15, 40}
	if testenv.Soak() {
		moments = []time.Duration{2, 15, 40, 80}
	}
	for _, after := range moments {
		id := e.create()
		e.run(id, "true")
		done := make(chan error, 1)
		go func() { done <- e.d.Delete(e.ctx(), id) }()
		time.Sleep(after * time.Millisecond)
		e.engine.Kill()
		if err := <-done; err != nil && !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("engine killed %v into a delete: %v, want ErrUnavailable", after*time.Millisecond, err)
		}
		e.engine.Run()
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Errorf("Delete again: %v", err)
		}
		if s, ok := e.status(id); ok {
			t.Errorf("List still has it: %+v", s)
		}
	}
	e.clean()
}

// TestEngineKilledInCommand loses the engine while a command runs. With live restore the sandbox goes on, and so does its
// command; the way to it is made anew.
func TestEngineKilledInCommand(t *testing.T) {
	e := newEnv(t, dockertest.Config{Daemon: map[string]any{"live-restore": true}})
	id := e.create()
	e.run(id, "echo kept > /tmp/file; (while :; do date +%s%N > /tmp/new; mv /tmp/new /tmp/beat; sleep 0.05; done) >/dev/null 2>&1 &")
	conn, err := e.d.Dial(e.ctx(), id, warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	e.engine.Kill()
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection without its engine: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := e.d.Dial(short, id, warren.GuestPort); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial without an engine: %v", err)
	}
	if _, err := e.d.Dial(e.ctx(), id, 80); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("Dial of another port without an engine: %v", err)
	}
	e.engine.Run()
	if got := e.run(id, "cat /tmp/file; a=$(cat /tmp/beat); sleep 0.5; [ $a != $(cat /tmp/beat) ] && echo beats"); got != "kept\nbeats" {
		t.Errorf("after the engine's restart: %q", got)
	}
	e.clean()
}

// TestEngineRestarted stops an engine as an administrator does, or kills it, which ends its containers: the watch, which lost its
// engine meanwhile, reports it, and does not say that the guest had wished it.
func TestEngineRestarted(t *testing.T) {
	t.Run("stopped", func(t *testing.T) {
		e := newEnv(t, dockertest.Config{})
		testEngineRestarted(t, e, e.engine.Stop)
	})
	t.Run("killed", func(t *testing.T) {
		e := newEnv(t, dockertest.Config{})
		testEngineRestarted(t, e, e.engine.Kill)
	})
}

func testEngineRestarted(t *testing.T, e *env, end func()) {
	id := e.create()
	e.run(id, "true")
	ctx, cancel := context.WithCancel(e.ctx())
	defer cancel()
	deaths, err := e.d.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	end()
	e.engine.Run()
	select {
	case s := <-deaths:
		if s.ID != id || s.State != driver.Dead || s.Exit == nil || s.Exit.Reason == "exited" || !strings.Contains(s.Exit.Message, "engine was stopped or restarted") {
			t.Errorf("the watch says %+v, %+v", s, s.Exit)
		}
		if l, ok := e.status(id); !ok || l.Exit == nil || l.Exit.Reason == "exited" {
			t.Errorf("List says %+v, %+v", l, l.Exit)
		}
	case <-ctx.Done():
		t.Fatal("the watch says nothing")
	}
	if _, err := e.d.Dial(e.ctx(), id, warren.GuestPort); !errors.Is(err, warren.ErrState) {
		t.Errorf("Dial: %v, want ErrState", err)
	}
	e.clean()
}

func TestRemovedBehindOurBack(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	id, other := e.create(), e.create()
	e.run(id, "true")
	ctx, cancel := context.WithCancel(e.ctx())
	defer cancel()
	deaths, err := e.d.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range e.containers() {
		if c.Labels["dev.warren.sandbox"] == string(id) {
			if _, err := e.api.ContainerRemove(ctx, c.ID, client.ContainerRemoveOptions{Force: true}); err != nil {
				t.Fatal(err)
			}
		}
	}
	select {
	case s := <-deaths:
		if s.ID != id || s.State != driver.Dead || s.Exit == nil || s.Exit.Reason != "lost" && s.Exit.Reason != "killed" {
			t.Errorf("the watch says %+v, %+v", s, s.Exit)
		}
	case <-ctx.Done():
		t.Fatal("the watch says nothing")
	}
	if _, err := e.d.Dial(ctx, id, warren.GuestPort); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Dial: %v, want ErrNotFound", err)
	}
	if err := e.d.Delete(ctx, id); err != nil {
		t.Errorf("Delete: %v", err)
	}
	e.run(other, "true")
	e.clean()
}

// TestStrangers puts containers beside ours that share a name, or labels, or belong to another installation: none is
// taken for ours, and none is touched.
func TestStrangers(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	id := e.create()
	mine := e.containers()[0]
	stranger := func(name string, labels map[string]string) string {
		t.Helper()
		res, err := e.api.ContainerCreate(e.ctx(), client.ContainerCreateOptions{Name: name, Config: &container.Config{Image: mine.ImageID, Cmd: []string{"true"}, Labels: labels}})
		if err != nil {
			t.Fatal(err)
		}
		return res.ID
	}
	prefix := strings.TrimSuffix(strings.TrimPrefix(mine.Names[0], "/"), string(id))
	taken := e.spec()
	strangers := map[string]string{
		"our labels under another name": stranger("web", mine.Labels),
		"our name without labels":       stranger(prefix+string(taken.ID), nil),
		"of another installation":       stranger("warren-00000000-"+string(id), map[string]string{"dev.warren.installation": "0000000000000000", "dev.warren.sandbox": string(id)}),
	}
	list, err := e.d.List(e.ctx())
	if err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("List: %+v, %v; want %s alone", list, err, id)
	}
	if err := e.d.Create(e.ctx(), taken); !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "not made by this installation") {
		t.Errorf("Create under a stranger's name: %v", err)
	}
	if _, err := e.d.Dial(e.ctx(), taken.ID, warren.GuestPort); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Dial of a stranger: %v, want ErrNotFound", err)
	}
	for _, id := range []warren.SandboxID{id, taken.ID} {
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Errorf("Delete: %v", err)
		}
	}
	for what, container := range strangers {
		if _, err := e.api.ContainerRemove(e.ctx(), container, client.ContainerRemoveOptions{}); err != nil {
			t.Errorf("the one with %s was touched: %v", what, err)
		}
	}
	e.clean()
}

// TestRenamed renames a sandbox's container: it stays the sandbox's.
func TestRenamed(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	spec := e.spec()
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := e.api.ContainerRename(e.ctx(), e.containers()[0].ID, client.ContainerRenameOptions{NewName: "mine"}); err != nil {
		t.Fatal(err)
	}
	if s, ok := e.status(spec.ID); !ok || s.State != driver.Running {
		t.Errorf("List: %+v, %v", s, ok)
	}
	e.run(spec.ID, "true")
	if err := e.d.Create(e.ctx(), spec); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Create once more: %v, want ErrExists", err)
	}
	if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
		t.Errorf("Delete: %v", err)
	}
	e.clean()
}

func TestRuntimeMissing(t *testing.T) {
	e := newEnv(t, dockertest.Config{NoRuntimes: true})
	spec := e.spec()
	spec.Options = map[string]string{"runtime": "runsc"}
	if err := e.d.Create(e.ctx(), spec); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), `"runsc"`) || !strings.Contains(err.Error(), "runc") {
		t.Errorf("Create: %v", err)
	}
	e.clean()
}

// TestRuntimeOption runs one sandbox on the runtime that its options name.
func TestRuntimeOption(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	spec := e.spec()
	spec.Options = map[string]string{"runtime": "runsc"}
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if got := e.run(spec.ID, "dmesg 2>/dev/null | head -1; cat /proc/version"); !strings.Contains(got, "gVisor") && !strings.Contains(got, "4.19.0") && !strings.Contains(got, "4.4.0") {
		t.Errorf("its kernel says %q", got)
	}
	e.clean()
}

// TestNoUserNamespaces takes an engine whose containers have the host's ids: it is refused unless that is accepted, and
// workspaces show right then, too.
func TestNoUserNamespaces(t *testing.T) {
	e := newEnv(t, dockertest.Config{NoUserNamespaces: true})
	if err := e.d.Create(e.ctx(), e.spec()); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "userns-remap") {
		t.Errorf("Create: %v", err)
	}
	e.clean()
	e.opts.Accept = append(e.opts.Accept, docker.AcceptNoUserNamespace)
	e.d = e.open()
	dir := filepath.Join(t.TempDir(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, driver.DiskIDBase+1000, driver.DiskIDBase+1000); err != nil {
		t.Fatal(err)
	}
	spec := e.spec()
	spec.Mounts = []driver.Mount{{Source: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if got := e.run(spec.ID, "stat -c %u /workspace; echo > /workspace/file; grep NoNewPrivs /proc/self/status; cat /proc/self/uid_map"); !strings.HasPrefix(got, "1000\nNoNewPrivs:\t1\n") {
		t.Errorf("inside: %q", got)
	}
	fi, err := os.Stat(filepath.Join(dir, "file"))
	if err != nil || fi.Sys().(*syscall.Stat_t).Uid != driver.DiskIDBase {
		t.Errorf("what root inside made is %+v on the host, %v", fi, err)
	}
	e.clean()
}

func TestEngineDiskFull(t *testing.T) {
	e := newEnv(t, dockertest.Config{DiskSize: 32 << 20})
	for range 2 {
		if err := e.d.Create(e.ctx(), e.spec()); !errors.Is(err, warren.ErrExhausted) {
			t.Errorf("Create: %v, want ErrExhausted", err)
		}
	}
	e.clean()
}

// TestImages loads an image once however many want it, and removes it when Warren's store has it no more.
func TestImages(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	layer := filepath.Join(t.TempDir(), "layer")
	if err := os.MkdirAll(filepath.Join(layer, "extra"), 0o755); err != nil {
		t.Fatal(err)
	}
	ids := make([]warren.SandboxID, 4)
	var wg sync.WaitGroup
	for i := range ids {
		spec := e.spec()
		spec.Root.Layers = append(append([]driver.Layer{}, spec.Root.Layers...), driver.Layer{Dir: layer})
		ids[i] = spec.ID
		wg.Go(func() {
			if err := e.d.Create(e.ctx(), spec); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	count := func() int {
		t.Helper()
		list, err := e.api.ImageList(e.ctx(), client.ImageListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Items)
	}
	if n := count(); n != 1 {
		t.Fatalf("%d images after four creates from one", n)
	}
	e.run(ids[0], "test -d /extra")
	e.create()
	if n := count(); n != 2 {
		t.Fatalf("%d images of two roots", n)
	}
	if err := os.RemoveAll(layer); err != nil {
		t.Fatal(err)
	}
	e.clean()
	e.d = e.open() // looks over what there is
	for until := time.Now().Add(20 * time.Second); count() != 1; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d images after the layer of one of two has gone", count())
		}
	}
	if err := e.d.Create(e.ctx(), e.spec()); err != nil {
		t.Error(err)
	}
	e.clean()
}

// TestBlindEngine gives the driver a state directory whose mounts the engine does not see, as one in another mount
// namespace: it must not run on whatever directory is there.
func TestBlindEngine(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	e.opts.StateDir = filepath.Join(t.TempDir(), "docker")
	d, err := docker.New(e.opts)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	dir := t.TempDir()
	spec := e.spec()
	spec.Mounts = []driver.Mount{{Source: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
	if err := d.Create(e.ctx(), spec); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "does not see") {
		t.Errorf("Create: %v", err)
	}
	e.clean()
}

// TestKilledDriver leaves what a driver leaves that is killed in a create: a stage, and a container that never started. The
// next one deletes both.
func TestKilledDriver(t *testing.T) {
	e := newEnv(t, dockertest.Config{})
	id := e.create()
	mine := e.containers()[0]
	spec := e.spec()
	stage := filepath.Join(e.opts.StateDir, "stage", string(spec.ID))
	if err := os.Mkdir(stage, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("warren-stage", stage, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{}
	for k, v := range mine.Labels {
		labels[k] = v
	}
	labels["dev.warren.sandbox"] = string(spec.ID)
	name := strings.ReplaceAll(strings.TrimPrefix(mine.Names[0], "/"), string(id), string(spec.ID))
	if _, err := e.api.ContainerCreate(e.ctx(), client.ContainerCreateOptions{Name: name, Config: &container.Config{Image: mine.ImageID, Cmd: []string{"true"}, Labels: labels}}); err != nil {
		t.Fatal(err)
	}
	e.d = e.open()
	if s, ok := e.status(spec.ID); !ok || s.State != driver.Creating {
		t.Errorf("List: %+v, %v; want it creating", s, ok)
	}
	if err := e.d.Create(e.ctx(), spec); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Create: %v, want ErrExists", err)
	}
	if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(stage); err == nil {
		t.Error("the stage is still there")
	}
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Errorf("Create after Delete: %v", err)
	}
	e.clean()
}

func TestNewRefuses(t *testing.T) {
	testenv.NeedsRoot(t)
	guest := filepath.Join(t.TempDir(), "guest")
	for name, tt := range map[string]struct {
		opts docker.Options
		want error
	}{
		"no directory":    {docker.Options{GuestPath: guest}, warren.ErrInvalid},
		"unknown accept":  {docker.Options{StateDir: t.TempDir(), GuestPath: guest, Accept: []string{"anything"}}, warren.ErrInvalid},
		"another machine": {docker.Options{StateDir: t.TempDir(), GuestPath: guest, Host: "tcp://192.0.2.1:2376"}, errors.ErrUnsupported},
	} {
		if _, err := docker.New(tt.opts); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "installation"), []byte("?\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := docker.New(docker.Options{StateDir: dir, GuestPath: guest, Host: "unix:///nonexistent"}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged identity: %v", err)
	}
	// One that does not answer yet is no reason not to open.
	d, err := docker.New(docker.Options{StateDir: t.TempDir(), GuestPath: guest, Host: "unix:///nonexistent"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.List(t.Context()); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("List without an engine: %v", err)
	}
	if c := d.Check(t.Context()); len(c) != 1 || c[0].Status != "fail" || c[0].Hint == "" {
		t.Errorf("Check without an engine: %+v", c)
	}
}

// TestPodman runs a sandbox on Podman's compatible service.
func TestPodman(t *testing.T) {
	testenv.NeedsTool(t, "podman")
	e := newEnv(t, dockertest.Config{Podman: true}, func(o *docker.Options) {
		o.Accept = append(o.Accept, docker.AcceptNoUserNamespace)
	})
	dir := filepath.Join(t.TempDir(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, driver.DiskIDBase, driver.DiskIDBase); err != nil {
		t.Fatal(err)
	}
	for _, c := range e.d.Check(e.ctx()) {
		t.Logf("%s: %s: %s", c.Status, c.Name, c.Message)
	}
	spec := e.spec()
	spec.Mounts = []driver.Mount{{Source: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if got := e.run(spec.ID, "set -e; id -u; hostname; echo text > /workspace/file; grep -E 'Seccomp:|NoNewPrivs' /proc/self/status"); got != "0\nbox\nNoNewPrivs:\t1\nSeccomp:\t2" {
		t.Errorf("inside: %q", got)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "file")); string(text) != "text\n" {
		t.Errorf("on the host: %q, %v", text, err)
	}
	if err := e.d.Create(e.ctx(), spec); !errors.Is(err, warren.ErrExists) {
		t.Errorf("Create again: %v", err)
	}
	if st, err := e.d.Stats(e.ctx(), spec.ID); err != nil || st.Memory == 0 {
		t.Errorf("Stats: %+v, %v", st, err)
	}
	again := e.open()
	if list, err := again.List(e.ctx()); err != nil || len(list) != 1 || list[0].State != driver.Running {
		t.Errorf("List of a driver opened anew: %+v, %v", list, err)
	}
	e.clean()
}

// TestHiddenRoot takes a runsc that keeps what is written to the root to itself: it runs, and its root cannot be saved.
func TestHiddenRoot(t *testing.T) {
	e := newEnv(t, dockertest.Config{RunscArgs: []string{"--platform=systrap"}}, func(o *docker.Options) { o.Runtime = "runsc" })
	id := e.create()
	e.run(id, "echo text > /var/tmp/file")
	if err := e.d.SaveRoot(e.ctx(), id, io.Discard); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "--overlay2=none") {
		t.Errorf("SaveRoot: %v", err)
	}
	if err := e.d.Freeze(e.ctx(), id); err != nil {
		t.Error(err)
	}
	e.clean()
}

// TestSaveRootLeavesNoImage saves a root, and has the engine die in the middle of another save: what is left goes when it is old.
func TestSaveRootLeavesNoImage(t *testing.T) {
	e := newEnv(t, dockertest.Config{Daemon: map[string]any{"live-restore": true}})
	id := e.create()
	e.run(id, "echo text > /var/tmp/file")
	images := func() int {
		t.Helper()
		list, err := e.api.ImageList(e.ctx(), client.ImageListOptions{All: true})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Items)
	}
	before := images()
	if err := e.d.SaveRoot(e.ctx(), id, io.Discard); err != nil {
		t.Fatal(err)
	}
	if n := images(); n != before {
		t.Errorf("%d images, before %d", n, before)
	}
	done := make(chan error, 1)
	go func() { done <- e.d.SaveRoot(e.ctx(), id, io.Discard) }()
	time.Sleep(150 * time.Millisecond)
	e.engine.Kill()
	if err := <-done; err != nil && !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("engine killed in a save: %v, want ErrUnavailable", err)
	}
	e.engine.Run()
	// A container that the dead engine had stopped for the time of the save is let go by Thaw.
	if err := e.d.Thaw(e.ctx(), id); err != nil {
		t.Error(err)
	}
	if err := e.d.SaveRoot(e.ctx(), id, io.Discard); err != nil {
		t.Errorf("SaveRoot after it: %v", err)
	}
	e.clean()
}
