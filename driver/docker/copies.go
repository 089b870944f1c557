//go:build linux

package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// An engine that does not see this machine's directories works on copies. Each mount of a sandbox is a volume of the engine,
// named and labelled as ours, which is filled before the sandbox starts. A record of it stands in the state directory from
// before the volume is made until after it is removed, and the volume of a sandbox that may have written is removed only when
// all of it has been read back: whatever is killed in between, a later delete reads it.
//
// Volumes are filled and read through a container that is never started. So it does not matter whether the sandbox runs, is
// dead, or was removed by somebody else, and nothing that is in the sandbox has a part in it.

// copiesDir is where, below the state directory, the records are.
const copiesDir = "copies"

// copyTarget is where a helper container has the volumes, as /copy/0 and so on.
const copyTarget = "/copy"

// copies is the record of one sandbox.
type copies struct {
	Volumes []volumeCopy
	// Live says that the sandbox may have run, and written.
	Live bool
	// Base is the host id of the container's root.
	Base uint32
	// PausedBy is the process that makes the sandbox stand still while it reads it back, from before it does so until it has let
	// it run on. A process that is gone left it so.
	PausedBy string `json:",omitempty"`

	file string
}

// volumeCopy is one mount.
type volumeCopy struct {
	Name     string
	Source   string
	Dev, Ino uint64
	Target   string
	Writable bool
	Owner    driver.Owner
	// Asked says that the engine had no such volume when it was asked for it, and has not yet said that it is made.
	Asked bool
	// Lost says that the volume was not there, or not ours, when it was last to be read.
	Lost bool `json:",omitempty"`
	// Stage is the name of the file in the directory that is being read back.
	Stage string
	// Files are what the directory and the volume both had when they were last made equal.
	Files map[string]seen
}

func (d *Driver) copiesPath(id warren.SandboxID) string {
	return filepath.Join(d.opts.StateDir, copiesDir, string(id)+".json")
}

// loadCopies returns the record of a sandbox, nil when its mounts are no copies.
func (d *Driver) loadCopies(id warren.SandboxID) (*copies, error) {
	c := &copies{file: d.copiesPath(id)}
	text, err := os.ReadFile(c.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, c)
	}
	if err != nil {
		return nil, fmt.Errorf("the record of the copied mounts of sandbox %s: %w (%v)", id, warren.ErrUnavailable, err)
	}
	return c, nil
}

// save writes the record, whole or not at all, and for good.
func (c *copies) save() error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	dir := filepath.Dir(c.file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, ".copies-*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(text)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), c.file)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return err
	}
	return syncDir(dir)
}

func (c *copies) forget() error {
	if err := os.Remove(c.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return syncDir(filepath.Dir(c.file))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// copied are the sandboxes that have a record.
func (d *Driver) copied() ([]warren.SandboxID, error) {
	entries, err := os.ReadDir(filepath.Join(d.opts.StateDir, copiesDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var ids []warren.SandboxID
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok && !strings.HasPrefix(name, ".") {
			ids = append(ids, warren.SandboxID(name))
		}
	}
	return ids, nil
}

// copyMounts makes volumes of a sandbox's mounts and fills them.
func (d *Driver) copyMounts(ctx context.Context, spec *driver.Spec, base uint32) ([]mount.Mount, error) {
	if len(spec.Root.Binds) > 0 {
		return nil, fmt.Errorf("the engine does not see this machine's directories, and the image is made of them; take an image of layers: %w", errors.ErrUnsupported)
	}
	c := &copies{file: d.copiesPath(spec.ID), Base: base}
	var mounts []mount.Mount
	dirs := make([]*os.Root, len(spec.Mounts))
	defer func() {
		for _, r := range dirs {
			if r != nil {
				r.Close()
			}
		}
	}()
	for i, m := range spec.Mounts {
		path := m.Source
		if m.Dir != nil {
			path = fmt.Sprintf("/proc/self/fd/%d", m.Dir.Fd())
		}
		var err error
		if dirs[i], err = os.OpenRoot(path); err != nil {
			return nil, fmt.Errorf("open the directory for %s: %w", m.Target, pathless(err))
		}
		dev, ino, err := identity(dirs[i])
		if err != nil {
			return nil, err
		}
		v := volumeCopy{Name: d.labels.name(spec.ID) + "-" + strconv.Itoa(i), Source: m.Source, Dev: dev, Ino: ino, Target: m.Target, Writable: m.Writable, Owner: m.Owner, Stage: stageName()}
		c.Volumes = append(c.Volumes, v)
		mounts = append(mounts, volumeMount(v.Name, m.Target, !m.Writable))
	}
	if len(c.Volumes) == 0 {
		return nil, nil
	}
	if err := c.save(); err != nil {
		return nil, err
	}
	for i, v := range c.Volumes {
		if _, err := d.api.VolumeInspect(ctx, v.Name, client.VolumeInspectOptions{}); err == nil {
			return nil, strangersVolume(v.Name)
		} else if !cerrdefs.IsNotFound(err) {
			return nil, d.callError(ctx, err)
		}
		c.Volumes[i].Asked = true
	}
	if err := c.save(); err != nil {
		return nil, err
	}
	for _, v := range c.Volumes {
		res, err := d.api.VolumeCreate(ctx, client.VolumeCreateOptions{Name: v.Name, Labels: d.volumeLabels(spec.ID, v)})
		if err != nil {
			return nil, d.callError(ctx, err)
		}
		if got := res.Volume.Labels; got[labelInstallation] != d.labels.installation || got[labelSandbox] != string(spec.ID) {
			return nil, strangersVolume(v.Name)
		}
	}
	err := d.withHelper(ctx, spec.ID, c, func(*volumeCopy) bool { return true }, func(helper string) error {
		for i := range c.Volumes {
			v := &c.Volumes[i]
			r, w := io.Pipe()
			done := make(chan error, 1)
			go func() {
				var err error
				v.Files, err = writeTree(ctx, w, dirs[i], strconv.Itoa(i), v.Owner)
				w.CloseWithError(err)
				done <- err
			}()
			_, err := d.api.CopyToContainer(ctx, helper, client.CopyToContainerOptions{DestinationPath: copyTarget, Content: r})
			r.CloseWithError(io.ErrClosedPipe)
			if werr := <-done; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
				return fmt.Errorf("copy the directory for %s to the engine: %w", v.Target, pathless(werr))
			}
			if err != nil {
				return fmt.Errorf("copy the directory for %s to the engine: %w", v.Target, d.callError(ctx, err))
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// From here on there may be something in the volumes that is nowhere else, and one without labels is a stranger's.
	c.Live = true
	for i := range c.Volumes {
		c.Volumes[i].Asked = false
	}
	return mounts, c.save()
}

func volumeMount(name, target string, readOnly bool) mount.Mount {
	return mount.Mount{Type: mount.TypeVolume, Source: name, Target: target, ReadOnly: readOnly, VolumeOptions: &mount.VolumeOptions{NoCopy: true}}
}

func (d *Driver) volumeLabels(id warren.SandboxID, v volumeCopy) map[string]string {
	return map[string]string{labelInstallation: d.labels.installation, labelSandbox: string(id), labelPrefix + "target": v.Target}
}

// withHelper makes a container with some volumes of a record, which never starts, for the time of f.
func (d *Driver) withHelper(ctx context.Context, id warren.SandboxID, c *copies, which func(*volumeCopy) bool, f func(container string) error) (err error) {
	image, err := d.nothingImage(ctx)
	if err != nil {
		return err
	}
	name := d.labels.name(id) + ".copy"
	if err := d.removeHelper(ctx, name); err != nil { // of a process that was killed
		return err
	}
	host := &container.HostConfig{NetworkMode: "none"}
	for i := range c.Volumes {
		if v := &c.Volumes[i]; which(v) {
			host.Mounts = append(host.Mounts, volumeMount(v.Name, copyTarget+"/"+strconv.Itoa(i), false))
		}
	}
	late, cancel := grace(ctx)
	defer cancel()
	res, err := d.api.ContainerCreate(late, client.ContainerCreateOptions{Name: name, HostConfig: host, Config: &container.Config{
		Image: image, Cmd: []string{"/never-started"}, Labels: map[string]string{labelInstallation: d.labels.installation, labelHelper: string(id)},
	}})
	if err != nil {
		return fmt.Errorf("make a container to copy with: %w", d.callError(ctx, err))
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
		defer cancel()
		err = errors.Join(err, d.remove(undo, res.ID))
	}()
	if err := ctx.Err(); err != nil {
		return err
	}
	return f(res.ID)
}

func (d *Driver) removeHelper(ctx context.Context, name string) error {
	res, err := d.api.ContainerInspect(ctx, name, client.ContainerInspectOptions{})
	if containerGone(err) {
		return nil
	}
	if err != nil {
		return d.engineError(ctx, err)
	}
	if c := res.Container.Config; c == nil || c.Labels[labelInstallation] != d.labels.installation || c.Labels[labelHelper] == "" {
		return fmt.Errorf("the engine has a container %s that was not made by this installation; rename or remove it: %w", name, warren.ErrUnavailable)
	}
	return d.remove(ctx, res.Container.ID)
}

// nothingImage is an image with nothing in it.
func (d *Driver) nothingImage(ctx context.Context) (string, error) {
	dir := filepath.Join(d.opts.StateDir, "nothing")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return d.image(ctx, &driver.Root{Digest: "warren:nothing", Layers: []driver.Layer{{Dir: dir}}})
}

// guestLayer is a layer with the guest in it, for engines that it cannot be mounted from. It is made once for each guest.
func (d *Driver) guestLayer() (driver.Layer, error) {
	sum, err := fileDigest(d.opts.GuestPath)
	if err != nil {
		return driver.Layer{}, fmt.Errorf("read the guest: %w", err)
	}
	dir := filepath.Join(d.opts.StateDir, "guests", sum[:32])
	if _, err := os.Stat(dir); err == nil {
		return driver.Layer{Dir: dir}, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return driver.Layer{}, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".guest-")
	if err != nil {
		return driver.Layer{}, err
	}
	defer os.RemoveAll(tmp)
	inside := filepath.Join(tmp, guestPath)
	err = errors.Join(os.Chmod(tmp, 0o755), os.Mkdir(filepath.Dir(inside), 0o755))
	if err == nil {
		err = copyFile(inside, d.opts.GuestPath)
	}
	if err == nil {
		err = os.Rename(tmp, dir)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return driver.Layer{}, fmt.Errorf("make a layer of the guest: %w", err)
	}
	return driver.Layer{Dir: dir}, nil
}

// Sync brings what a sandbox wrote to its mounts to this machine, see [driver.Syncer]. The sandbox stands still meanwhile.
func (d *Driver) Sync(ctx context.Context, id warren.SandboxID) error {
	if err := d.sync(ctx, id); err != nil {
		return fmt.Errorf("read back the mounts of sandbox %s: %w", id, err)
	}
	return nil
}

func (d *Driver) sync(ctx context.Context, id warren.SandboxID) (err error) {
	if !validID(id) {
		return warren.ErrNotFound
	}
	unlock, err := d.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	copies, err := d.loadCopies(id)
	if err != nil || copies == nil {
		return err // its mounts are the directories themselves, whatever becomes of the engine
	}
	if err := d.letRunOn(ctx, id, copies); err != nil {
		return err
	}
	c, err := d.find(ctx, id)
	if err != nil && !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, errForeign) {
		return err
	}
	if err == nil && stateOf(string(c.State.Status)) == running && !c.State.Paused {
		copies.PausedBy = processName(os.Getpid())
		if err := copies.save(); err != nil {
			return err
		}
		defer func() {
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
			defer cancel()
			if uerr := d.letRunOn(late, id, copies); uerr != nil {
				err = errors.Join(err, fmt.Errorf("let it run on: %w", uerr))
				go d.letRunOnLater(id)
			}
		}()
		// What is begun is waited for: a pause that came after we looked would last. One that cannot be paused is read as it runs.
		late, cancel := grace(ctx)
		_, err := d.api.ContainerPause(late, c.ID, client.ContainerPauseOptions{})
		cancel()
		if err != nil {
			d.log.Debug("a sandbox runs while its mounts are read back", "sandbox", id, "err", err)
		}
	}
	return d.readBack(ctx, id, copies)
}

// letRunOn ends the pause that a read-back made, in this process or in one that is gone. The sandbox is locked.
func (d *Driver) letRunOn(ctx context.Context, id warren.SandboxID, c *copies) error {
	if c.PausedBy == "" || c.PausedBy != processName(os.Getpid()) && processLives(c.PausedBy) {
		return nil
	}
	there, err := d.find(ctx, id)
	if err != nil && !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, errForeign) {
		return err
	}
	if err == nil && there.State.Paused {
		if _, uerr := d.api.ContainerUnpause(ctx, there.ID, client.ContainerUnpauseOptions{}); uerr != nil {
			if now, ferr := d.find(ctx, id); ferr != nil || now.State.Paused {
				return d.callError(ctx, uerr)
			}
		}
	}
	if err := d.removeHelper(ctx, d.labels.name(id)+".copy"); err != nil {
		return err
	}
	c.PausedBy = ""
	return c.save()
}

// letRunOnLater does so as soon as the engine answers. Whoever dials the sandbox waits for it, as for any that stands still.
func (d *Driver) letRunOnLater(id warren.SandboxID) {
	for {
		err := d.letOneRunOn(id)
		if err == nil || d.ctx.Err() != nil {
			return
		}
		d.log.Warn("a sandbox stands still since its mounts were read back; it is tried again", "sandbox", id, "err", err)
		select {
		case <-time.After(time.Second):
		case <-d.ctx.Done():
			return
		}
	}
}

func (d *Driver) letOneRunOn(id warren.SandboxID) error {
	unlock, err := d.lock(d.ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := d.loadCopies(id)
	if err != nil || c == nil {
		return err
	}
	return d.letRunOn(d.ctx, id, c)
}

// wakeLeft lets the sandboxes run on whose read-back was cut short by the end of its process.
func (d *Driver) wakeLeft() {
	ids, err := d.copied()
	if err != nil {
		d.log.Warn("the records of copied mounts cannot be read", "err", err)
	}
	for _, id := range ids {
		if c, err := d.loadCopies(id); err == nil && c != nil && c.PausedBy != "" && !processLives(c.PausedBy) {
			go d.letRunOnLater(id)
		}
	}
}

// processName tells a process from all others of this machine, also from a later one with its number.
func processName(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return strconv.Itoa(pid)
	}
	// What is after the program's name, which may hold anything, begins with the third field; the 22nd is when it started.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return strconv.Itoa(pid)
	}
	return strconv.Itoa(pid) + "-" + fields[19]
}

func processLives(name string) bool {
	number, started, _ := strings.Cut(name, "-")
	pid, err := strconv.Atoi(number)
	return err == nil && started != "" && processName(pid) == name
}

// readBack makes the directories of a record what the volumes are. A volume that is gone keeps none of the others from being
// read: it gives errVolumeLost when all that is left has been.
func (d *Driver) readBack(ctx context.Context, id warren.SandboxID, c *copies) error {
	if !c.Live {
		return nil
	}
	var lost []error
	left := false
	for i := range c.Volumes {
		v := &c.Volumes[i]
		if !v.Writable {
			continue // there is nothing in it that is not here
		}
		ours, err := d.ownsVolume(ctx, id, *v)
		if err != nil {
			return err
		}
		if v.Lost = !ours; v.Lost {
			lost = append(lost, fmt.Errorf("%w: %s", errVolumeLost, v.Name))
		}
		left = left || ours
	}
	if !left {
		return errors.Join(lost...)
	}
	// A container would be given a new, empty volume in the place of one that is gone.
	readable := func(v *volumeCopy) bool { return v.Writable && !v.Lost }
	err := d.withHelper(ctx, id, c, readable, func(helper string) error {
		var failed []error
		for i := range c.Volumes {
			v := &c.Volumes[i]
			if !readable(v) {
				continue
			}
			if err := d.readVolume(ctx, helper, i, v, c.Base); err != nil {
				failed = append(failed, fmt.Errorf("the directory mounted on %s: %w; what the sandbox wrote is kept in volume %s of the engine, and read by the next try", v.Target, err, v.Name))
			}
			if ctx.Err() != nil {
				break
			}
		}
		return errors.Join(append(failed, c.save())...)
	})
	if err != nil {
		return err // whatever is lost, there is something left to be read
	}
	return errors.Join(lost...)
}

func (d *Driver) readVolume(ctx context.Context, helper string, i int, v *volumeCopy, base uint32) error {
	dir, err := os.OpenRoot(v.Source)
	if errors.Is(err, fs.ErrNotExist) {
		// Whoever removed the directory has removed what was written to it, as with a mount of the directory itself.
		d.log.Warn("a directory was removed while a sandbox worked on its copy; the copy goes as well", "target", v.Target)
		return nil
	}
	if err != nil {
		return pathless(err)
	}
	defer dir.Close()
	if dev, ino, err := identity(dir); err != nil {
		return err
	} else if dev != v.Dev || ino != v.Ino {
		return fmt.Errorf("another directory has taken its place on this machine; put it back: %w", warren.ErrState)
	}
	res, err := d.api.CopyFromContainer(ctx, helper, client.CopyFromContainerOptions{SourcePath: copyTarget + "/" + strconv.Itoa(i)})
	if err != nil {
		return d.callError(ctx, err)
	}
	defer res.Content.Close()
	m := &mirror{root: dir, prefix: strconv.Itoa(i), owner: v.Owner, base: base, was: v.Files, log: d.log, stage: v.Stage}
	files, err := m.read(ctx, res.Content)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return pathless(err)
	}
	v.Files = files
	return nil
}

// errVolumeLost says that the copy of a mount is no longer in the engine.
var errVolumeLost = fmt.Errorf("the volume of a mount was removed from the engine by somebody else: %w", warren.ErrState)

func strangersVolume(name string) error {
	return fmt.Errorf("the engine has a volume %s that was not made by this installation; rename or remove it: %w", name, warren.ErrUnavailable)
}

// ownsVolume says whether the engine has the volume, and it is a sandbox's of ours. An engine that is killed while it makes one
// leaves it without labels; such a one is ours if we have asked for it when there was none.
func (d *Driver) ownsVolume(ctx context.Context, id warren.SandboxID, v volumeCopy) (bool, error) {
	res, err := d.api.VolumeInspect(ctx, v.Name, client.VolumeInspectOptions{})
	if cerrdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, d.engineError(ctx, err)
	}
	l := res.Volume.Labels
	return v.Asked && len(l) == 0 || l[labelInstallation] == d.labels.installation && l[labelSandbox] == string(id), nil
}

// dropCopies reads back what there is and removes the volumes of a sandbox whose container is gone.
func (d *Driver) dropCopies(ctx context.Context, id warren.SandboxID) error {
	c, err := d.loadCopies(id)
	if err != nil || c == nil {
		return err
	}
	if err := d.readBack(ctx, id, c); errors.Is(err, errVolumeLost) {
		d.log.Warn("a volume was removed by somebody else; what the sandbox wrote to it since it was last read is lost", "sandbox", id, "err", err)
	} else if err != nil {
		return err
	}
	// What has been read need not be read again by a delete that goes on after a crash, from volumes of which some are gone.
	c.Live = false
	if err := c.save(); err != nil {
		return err
	}
	if err := d.removeHelper(ctx, d.labels.name(id)+".copy"); err != nil {
		return err
	}
	for _, v := range c.Volumes {
		if v.Lost {
			continue // should it have come back, nobody has read it
		}
		if ours, err := d.ownsVolume(ctx, id, v); err != nil {
			return err
		} else if !ours {
			continue
		}
		if _, err := d.api.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{}); err != nil && !cerrdefs.IsNotFound(err) {
			return fmt.Errorf("remove volume %s: %w", v.Name, d.callError(ctx, err))
		}
	}
	return c.forget()
}

// Copies says whether sandboxes that are created now work on copies of their mounts, see [driver.Syncer].
func (d *Driver) Copies(ctx context.Context) bool {
	e, err := d.askEngine(ctx)
	return err == nil && e.copies != ""
}

func identity(r *os.Root) (dev, ino uint64, err error) {
	f, err := r.Open(".")
	if err != nil {
		return 0, 0, pathless(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, 0, err
	}
	return st.Dev, st.Ino, nil
}

// pathless takes the host's path out of an error, which users see.
func pathless(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok && filepath.IsAbs(p.Path) {
		return fmt.Errorf("%s: %w", p.Op, p.Err)
	}
	return err
}
