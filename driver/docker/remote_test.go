//go:build linux

package docker_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// newRemote is a driver on an engine that is reached over TLS and sees nothing of this machine's directories.
func newRemote(t *testing.T, disk ...int64) *env {
	t.Helper()
	config := dockertest.Config{Remote: true}
	if len(disk) > 0 {
		config.DiskSize = disk[0]
	}
	e := newEnv(t, config, func(o *docker.Options) {
		o.StateDir = filepath.Join(t.TempDir(), "docker")
		o.Accept = append(o.Accept, docker.AcceptCopiedMounts)
	})
	at := e.engine
	t.Setenv("DOCKER_CERT_PATH", at.Certs)
	e.opts.Host = at.Host
	e.d = e.open()
	return e
}

// work is a directory of the sandbox's user with some of everything.
func (e *env) work() string {
	e.Helper()
	dir := filepath.Join(e.TempDir(), "work")
	for _, sub := range []string{"", "sub", "gone", "gone/deep"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			e.Fatal(err)
		}
	}
	for _, name := range []string{"file", "sub/file", "gone/deep/file", "changed", "host-changed", "host-removed"} {
		e.write(filepath.Join(dir, name), "first "+name)
	}
	if err := errors.Join(os.Symlink("sub/file", filepath.Join(dir, "link")), os.Link(filepath.Join(dir, "file"), filepath.Join(dir, "twin"))); err != nil {
		e.Fatal(err)
	}
	if err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(p, driver.DiskIDBase+1000, driver.DiskIDBase+1000))
	}); err != nil {
		e.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "sub/file"), os.ModeSetuid|0o751); err != nil {
		e.Fatal(err)
	}
	return dir
}

func (e *env) write(path, text string) {
	e.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		e.Fatal(err)
	}
}

// want wants a file on this machine; an empty text means that it is not there.
func (e *env) want(path, text string) {
	e.Helper()
	got, err := os.ReadFile(path)
	if text == "" && errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil || string(got) != text {
		e.Errorf("%s: %q, %v; want %q", filepath.Base(path), got, err, text)
	}
}

// specOn is a spec with a directory as its workspace.
func (e *env) specOn(dir string) *driver.Spec {
	s := e.spec()
	s.Mounts = []driver.Mount{{Source: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
	return s
}

// volumes are all of the engine's.
func (e *env) volumes() []string {
	e.Helper()
	res, err := e.api.VolumeList(e.ctx(), client.VolumeListOptions{})
	if err != nil {
		e.Fatal(err)
	}
	var names []string
	for _, v := range res.Items {
		names = append(names, v.Name)
	}
	return names
}

func (e *env) noVolumes() {
	e.Helper()
	if left := e.volumes(); len(left) > 0 {
		e.Errorf("volumes left: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(e.opts.StateDir, "copies", "*")); len(left) > 0 {
		e.Errorf("records left: %v", left)
	}
}

// TestRemote does a job on an engine that does not see this machine, and looks at every point where the two are to be equal.
func TestRemote(t *testing.T) {
	e := newRemote(t)
	strict := e.opts
	strict.Accept = []string{docker.AcceptNoDiskLimit}
	if d, err := docker.New(strict); err != nil {
		t.Fatal(err)
	} else if err := d.Create(e.ctx(), e.spec()); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), docker.AcceptCopiedMounts) {
		t.Errorf("Create where copies are not accepted: %v", err)
	} else {
		d.Close()
	}
	if !e.d.Copies(e.ctx()) {
		t.Fatal("the driver believes that the engine sees this machine")
	}
	dir := e.work()
	file := func(name string) string { return filepath.Join(dir, name) }
	spec := e.specOn(dir)
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if got := e.run(spec.ID, "cd /workspace; stat -c '%n %u:%g %a' . file sub sub/file link; readlink link; cat file; test file -ef twin && echo twins"); got != ". 1000:1000 755\nfile 1000:1000 644\nsub 1000:1000 755\nsub/file 1000:1000 4751\nlink 1000:1000 777\nsub/file\nfirst filetwins" {
		t.Errorf("inside: %q", got)
	}
	before, err := os.Stat(file("sub/file"))
	if err != nil {
		t.Fatal(err)
	}
	e.run(spec.ID, `cd /workspace; echo -n new > new; rm -r gone; echo -n second > changed; ln -sfn new link; mkdir -p a/b; echo -n deep > a/b/c; chmod 700 a; chown 1:2 a/b/c; ln a/b/c hard; mkfifo pipe; rm host-removed`)
	e.want(file("new"), "")
	e.write(file("host-changed"), "by the host")
	e.write(file("host-removed"), "changed by the host, removed inside")
	e.write(file("host-new"), "by the host")
	if err := e.d.Sync(e.ctx(), spec.ID); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"new": "new", "gone": "", "changed": "second", "a/b/c": "deep", "hard": "deep", "link": "new", "file": "first file", "twin": "first file",
		"host-changed": "by the host", "host-removed": "changed by the host, removed inside", "host-new": "by the host", "pipe": "",
	} {
		e.want(file(name), text)
	}
	if after, err := os.Stat(file("sub/file")); err != nil || !os.SameFile(before, after) || after.ModTime() != before.ModTime() || after.Mode() != before.Mode() {
		t.Errorf("a file that nobody changed was: %+v, before %+v, %v", after, before, err)
	}
	st := func(name string) *syscall.Stat_t {
		t.Helper()
		fi, err := os.Lstat(file(name))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t)
	}
	if s := st("a/b/c"); s.Uid != driver.DiskIDBase+1 || s.Gid != driver.DiskIDBase+2 || s.Ino != st("hard").Ino {
		t.Errorf("a/b/c: %+v", s)
	}
	if s := st("a"); s.Mode&0o7777 != 0o700 || s.Uid != driver.DiskIDBase {
		t.Errorf("a: %+v", s)
	}
	// It goes on, and another driver knows of it.
	e.d.Close()
	e.d = e.open()
	e.run(spec.ID, "cd /workspace; cat new; echo -n frozen > frozen")
	if err := e.d.Freeze(e.ctx(), spec.ID); err != nil {
		t.Fatal(err)
	}
	e.want(file("frozen"), "frozen")
	if err := e.d.Thaw(e.ctx(), spec.ID); err != nil {
		t.Fatal(err)
	}
	e.run(spec.ID, "cd /workspace; echo -n last > last; rm new")
	if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
		t.Fatal(err)
	}
	e.want(file("last"), "last")
	e.want(file("new"), "")
	e.want(file("host-new"), "by the host")
	e.clean()
	e.noVolumes()
	if err := e.d.Sync(e.ctx(), spec.ID); err != nil {
		t.Errorf("Sync of what is gone: %v", err)
	}
}

// TestRemoteNothingLost takes the engine, the container, the directory and the volume away before what was written has been
// read back.
func TestRemoteNothingLost(t *testing.T) {
	e := newRemote(t)
	start := func() (warren.SandboxID, string) {
		t.Helper()
		dir := e.work()
		spec := e.specOn(dir)
		if err := e.d.Create(e.ctx(), spec); err != nil {
			t.Fatal(err)
		}
		e.run(spec.ID, "cd /workspace; echo -n kept > kept")
		return spec.ID, filepath.Join(dir, "kept")
	}
	t.Run("container removed", func(t *testing.T) {
		id, kept := start()
		for _, c := range e.containers() {
			if _, err := e.api.ContainerRemove(e.ctx(), c.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true}); err != nil {
				t.Fatal(err)
			}
		}
		if s, ok := e.status(id); !ok || s.State != driver.Dead || s.Exit == nil {
			t.Errorf("List: %+v, %v; want it dead", s, ok)
		}
		if err := e.d.Create(e.ctx(), &driver.Spec{ID: id, Hostname: "box", Root: e.root, Limits: e.spec().Limits}); !errors.Is(err, warren.ErrExists) {
			t.Errorf("Create before its files are home: %v, want ErrExists", err)
		}
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Fatal(err)
		}
		e.want(kept, "kept")
		e.noVolumes()
	})
	t.Run("engine killed in delete", func(t *testing.T) {
		moments := []time.Duration{80, 300}
		if testenv.Soak() {
			moments = []time.Duration{20, 80, 160, 300, 500}
		}
		for _, after := range moments {
			id, kept := start()
			done := make(chan error, 1)
			go func() { done <- e.d.Delete(e.ctx(), id) }()
			time.Sleep(after * time.Millisecond)
			e.engine.Kill()
			if err := <-done; err != nil && !errors.Is(err, warren.ErrUnavailable) {
				t.Errorf("killed %v into a delete: %v, want ErrUnavailable", after*time.Millisecond, err)
			} else {
				t.Logf("killed %v into a delete: %v", after*time.Millisecond, err)
			}
			e.engine.Run()
			if err := e.d.Delete(e.ctx(), id); err != nil {
				t.Fatalf("Delete again: %v", err)
			}
			e.want(kept, "kept")
			e.noVolumes()
		}
	})
	t.Run("another directory in its place", func(t *testing.T) {
		id, kept := start()
		dir := filepath.Dir(kept)
		if err := errors.Join(os.Rename(dir, dir+"-aside"), os.Mkdir(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Delete(e.ctx(), id); err == nil || !strings.Contains(err.Error(), "is kept in volume") || strings.Contains(err.Error(), dir) {
			t.Errorf("Delete: %v", err)
		}
		if len(e.volumes()) != 1 {
			t.Errorf("volumes: %v", e.volumes())
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("the other directory has %v", left)
		}
		if err := errors.Join(os.Remove(dir), os.Rename(dir+"-aside", dir)); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Fatal(err)
		}
		e.want(kept, "kept")
		e.noVolumes()
	})
	t.Run("volume removed", func(t *testing.T) {
		id, kept := start()
		for _, c := range e.containers() {
			if _, err := e.api.ContainerRemove(e.ctx(), c.ID, client.ContainerRemoveOptions{Force: true}); err != nil {
				t.Fatal(err)
			}
		}
		for _, v := range e.volumes() {
			if _, err := e.api.VolumeRemove(e.ctx(), v, client.VolumeRemoveOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.d.Sync(e.ctx(), id); !errors.Is(err, warren.ErrState) {
			t.Errorf("Sync: %v, want ErrState", err)
		}
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Fatal(err)
		}
		// What was there before is there still: an empty volume in its place is not taken for the copy.
		e.want(filepath.Join(filepath.Dir(kept), "file"), "first file")
		e.noVolumes()
	})
	t.Run("one volume of several removed", func(t *testing.T) {
		for gone := range 3 {
			dirs := []string{e.work(), e.work(), e.work()}
			spec := e.specOn(dirs[0])
			for i, target := range []string{"/second", "/read-only"} {
				spec.Mounts = append(spec.Mounts, driver.Mount{Source: dirs[i+1], Target: target, Writable: i == 0, Owner: spec.Mounts[0].Owner})
			}
			if err := e.d.Create(e.ctx(), spec); err != nil {
				t.Fatal(err)
			}
			e.run(spec.ID, "echo -n kept > /workspace/kept; echo -n kept > /second/kept")
			for _, c := range e.containers() {
				if _, err := e.api.ContainerRemove(e.ctx(), c.ID, client.ContainerRemoveOptions{Force: true}); err != nil {
					t.Fatal(err)
				}
			}
			for _, v := range e.volumes() {
				if strings.HasSuffix(v, "-"+strconv.Itoa(gone)) {
					if _, err := e.api.VolumeRemove(e.ctx(), v, client.VolumeRemoveOptions{}); err != nil {
						t.Fatal(err)
					}
				}
			}
			if gone == 0 { // what cannot be read yet is not removed because something else is lost
				if err := os.Rename(dirs[1], dirs[1]+"-aside"); err != nil {
					t.Fatal(err)
				}
				e.write(dirs[1], "not a directory")
				if err := e.d.Delete(e.ctx(), spec.ID); err == nil || len(e.volumes()) != 2 {
					t.Errorf("Delete: %v, volumes %v", err, e.volumes())
				}
				if err := errors.Join(os.Remove(dirs[1]), os.Rename(dirs[1]+"-aside", dirs[1])); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
				t.Errorf("Delete without volume %d: %v", gone, err)
			}
			for i, dir := range dirs[:2] {
				if i != gone {
					e.want(filepath.Join(dir, "kept"), "kept")
				}
				e.want(filepath.Join(dir, "file"), "first file")
			}
			e.noVolumes()
		}
	})
	t.Run("directory removed", func(t *testing.T) {
		id, kept := start()
		if err := os.RemoveAll(filepath.Dir(kept)); err != nil {
			t.Fatal(err)
		}
		if err := e.d.Delete(e.ctx(), id); err != nil {
			t.Fatal(err)
		}
		e.noVolumes()
	})
	e.clean()
}

// TestRemoteKilledInSync opens the driver after one was killed while it read a sandbox back: the sandbox runs on. One whose
// reader lives, or that was frozen, stands still.
func TestRemoteKilledInSync(t *testing.T) {
	e := newRemote(t)
	spec := e.specOn(e.work())
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Sync(e.ctx(), spec.ID); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(e.opts.StateDir, "copies", string(spec.ID)+".json")
	text, err := os.ReadFile(record)
	if err != nil || strings.Contains(string(text), "PausedBy") {
		t.Fatalf("the record after a sync: %v, %s", err, text)
	}
	id := e.containers()[0].ID
	paused := func() bool {
		t.Helper()
		c, err := e.api.ContainerInspect(e.ctx(), id, client.ContainerInspectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return c.Container.State.Paused
	}
	reopen := func(by string) {
		t.Helper()
		e.d.Close()
		if !paused() {
			if _, err := e.api.ContainerPause(e.ctx(), id, client.ContainerPauseOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		e.write(record, `{"PausedBy":"`+by+`",`+string(text[1:]))
		e.d = e.open()
	}
	self, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(self[strings.LastIndexByte(string(self), ')')+1:]))
	for _, by := range []string{"", strconv.Itoa(os.Getpid()) + "-" + fields[19]} {
		reopen(by)
		time.Sleep(300 * time.Millisecond)
		if !paused() {
			t.Errorf("paused by %q: it runs on", by)
		}
	}
	reopen("1-1")
	if got := e.run(spec.ID, "cat /workspace/file"); got != "first file" {
		t.Errorf("%q", got)
	}
	if text, err := os.ReadFile(record); err != nil || strings.Contains(string(text), "PausedBy") {
		t.Errorf("the record after it: %v, %s", err, text)
	}
	e.clean()
	e.noVolumes()
}

// TestRemoteStrangers puts a volume and a container of our names into the engine: neither is used, nor touched.
func TestRemoteStrangers(t *testing.T) {
	e := newRemote(t)
	first := e.create()
	name := strings.TrimPrefix(e.containers()[0].Names[0], "/")
	spec := e.specOn(e.work())
	volume := strings.ReplaceAll(name, string(first), string(spec.ID)) + "-0"
	if _, err := e.api.VolumeCreate(e.ctx(), client.VolumeCreateOptions{Name: volume}); err != nil {
		t.Fatal(err)
	}
	if err := e.d.Create(e.ctx(), spec); !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "not made by this installation") {
		t.Errorf("Create over a stranger's volume: %v", err)
	}
	if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
		t.Errorf("Delete: %v", err)
	}
	if got := e.volumes(); len(got) != 1 || got[0] != volume {
		t.Errorf("volumes: %v, want the stranger's", got)
	}
	if _, err := e.api.VolumeRemove(e.ctx(), volume, client.VolumeRemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	e.clean()
	e.noVolumes()
}

// TestRemoteEngineKilledInCreate loses the engine while a workspace is copied and started.
func TestRemoteEngineKilledInCreate(t *testing.T) {
	e := newRemote(t)
	if err := e.d.Delete(e.ctx(), e.create()); err != nil { // the image is loaded
		t.Fatal(err)
	}
	dir := e.work()
	for _, after := range []time.Duration{20, 60, 120, 200, 300} {
		spec := e.specOn(dir)
		done := make(chan error, 1)
		go func() { done <- e.d.Create(e.ctx(), spec) }()
		time.Sleep(after * time.Millisecond)
		e.engine.Kill()
		if err := <-done; err != nil && !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("engine killed %v into a create: %v, want ErrUnavailable", after*time.Millisecond, err)
		}
		e.engine.Run()
		if err := e.d.Delete(e.ctx(), spec.ID); err != nil {
			t.Errorf("Delete after it: %v", err)
		}
		e.want(filepath.Join(dir, "file"), "first file")
		e.want(filepath.Join(dir, "gone/deep/file"), "first gone/deep/file")
		e.noVolumes()
	}
	e.clean()
}

// TestRemoteDiskFull copies more than the engine can hold.
func TestRemoteDiskFull(t *testing.T) {
	e := newRemote(t, 640<<20)
	dir := e.work()
	if err := os.Truncate(filepath.Join(dir, "file"), 1<<30); err != nil { // a file with holes
		t.Fatal(err)
	}
	if err := e.d.Create(e.ctx(), e.specOn(dir)); err == nil {
		t.Error("Create succeeded")
	} else if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("Create: %v, want ErrExhausted", err)
	}
	e.clean()
	e.noVolumes()
}
