//go:build linux

package docker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/mount"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/internal/idmap"
)

// stageDir is where, below the state directory, mounts wait for the engine to take them.
const stageDir = "stage"

// stage is the mounts of one sandbox while it starts. An engine takes paths and not descriptors, so each directory that the
// caller opened gets a path of its own for that time: a clone of its mount, with the container's ids. The container has
// copies once it runs, and the stage is taken down.
//
// All lie on a small file system made for it. An engine that does not see this machine's mounts finds nothing at the
// paths and refuses, where it would otherwise mount whatever directory happens to be there.
type stage struct {
	dir    string
	base   uint32
	n      int
	mounts []mount.Mount
}

// hostAttrs are the attributes of every mount that a sandbox gets.
const hostAttrs = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID

func (d *Driver) stagePath(id warren.SandboxID) string {
	return filepath.Join(d.opts.StateDir, stageDir, string(id))
}

// prepare makes the mounts of a sandbox whose id 0 is the host's id base.
func (d *Driver) prepare(spec *driver.Spec, base uint32) (_ *stage, err error) {
	s := &stage{dir: d.stagePath(spec.ID), base: base}
	if err := s.close(); err != nil { // of a process that was killed
		return nil, err
	}
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := unix.Mount("warren-stage", s.dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711,size=1m"); err != nil {
		return nil, fmt.Errorf("make a place for mounts: %w", err)
	}
	for _, b := range spec.Root.Binds {
		if err := s.bind(spec, b); err != nil {
			return nil, err
		}
	}
	if err := s.guest(d.opts.GuestPath); err != nil {
		return nil, fmt.Errorf("mount the guest: %w", err)
	}
	for _, m := range spec.Mounts {
		if err := s.mount(m); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// close takes the stage down. What has been taken from it stays.
func (s *stage) close() error {
	err := takeDown(s.dir)
	if errors.Is(err, unix.ENOTEMPTY) {
		// Another process took it down while it was built, and what came later lies in the directory below.
		err = nil
		entries, rerr := os.ReadDir(s.dir)
		for _, e := range entries {
			err = errors.Join(err, takeDown(filepath.Join(s.dir, e.Name())))
		}
		err = errors.Join(err, rerr, takeDown(s.dir))
	}
	if err != nil {
		return fmt.Errorf("take down the mounts of a start: %w", err)
	}
	return nil
}

// takeDown removes a place for mounts with what is mounted on it. It never looks into what was mounted: a directory is removed
// only if it is empty.
func takeDown(at string) error {
	for {
		err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// add moves a detached mount onto the stage and notes it for the container.
func (s *stage) add(fd int, dir bool, target string, writable bool) error {
	at, err := s.place(dir)
	if err != nil {
		return err
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount for %s: %w", target, err)
	}
	s.note(at, target, writable)
	return nil
}

// place makes an empty directory or file on the stage.
func (s *stage) place(dir bool) (string, error) {
	at := filepath.Join(s.dir, strconv.Itoa(s.n))
	s.n++
	if dir {
		return at, os.Mkdir(at, 0o755)
	}
	return at, os.WriteFile(at, nil, 0o644)
}

func (s *stage) note(source, target string, writable bool) {
	s.mounts = append(s.mounts, mount.Mount{
		Type: mount.TypeBind, Source: source, Target: target, ReadOnly: !writable,
		BindOptions: &mount.BindOptions{Propagation: mount.PropagationRPrivate},
	})
}

func (s *stage) guest(name string) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := setAttrs(fd, hostAttrs|unix.MOUNT_ATTR_RDONLY, false); err != nil {
		return err
	}
	return s.add(fd, false, guestPath, false)
}

func (s *stage) mount(m driver.Mount) error {
	at, name, flags := unix.AT_FDCWD, m.Source, uint(unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if m.Dir != nil {
		at, name, flags = int(m.Dir.Fd()), "", flags|unix.AT_EMPTY_PATH
	}
	fd, err := unix.OpenTree(at, name, flags)
	if err != nil {
		return fmt.Errorf("open the directory for %s: %w", m.Target, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("mount on %s: %w", m.Target, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("mount on %s: not a directory: %w", m.Target, warren.ErrInvalid)
	}
	ids := ownerMap(m.Owner, s.base)
	if !m.Writable {
		err = mapReadOnly(fd, ids, false)
	} else if err = mapTree(fd, ids, hostAttrs, false); cannotMap(err) {
		// Never unmapped: the sandbox could not write, or would write as somebody else.
		err = fmt.Errorf("the file system of its host directory cannot map owners (idmapped mounts), so it can only be mounted read-only: %w", errors.ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("mount on %s: %w", m.Target, err)
	}
	return s.add(fd, true, m.Target, m.Writable)
}

// bind puts a part of the root over the image.
func (s *stage) bind(spec *driver.Spec, b driver.Bind) error {
	if b.Hide {
		dir, ok := isDirectory(spec, b)
		if !ok {
			return nil // nothing is there to be hidden
		}
		at, err := s.place(dir)
		if err != nil {
			return err
		}
		s.note(at, b.Target, false)
		return nil
	}
	open := func(flags uint) (int, error) {
		return unix.OpenTree(unix.AT_FDCWD, b.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|flags)
	}
	fd, err := open(unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("open what the image binds on %s: %w", b.Target, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("bind on %s: %w", b.Target, err)
	}
	ids := ownerMap(driver.Owner{IDBase: b.IDBase}, s.base)
	if err := mapReadOnly(fd, ids, true); err != nil {
		return fmt.Errorf("bind on %s: %w", b.Target, err)
	}
	return s.add(fd, st.Mode&unix.S_IFMT == unix.S_IFDIR, b.Target, false)
}

// isDirectory looks for what a bind shall hide, in the binds before it and then in the layers.
func isDirectory(spec *driver.Spec, hide driver.Bind) (dir, ok bool) {
	var places []string
	for _, b := range spec.Root.Binds {
		if b == hide {
			break
		}
		if rest, under := strings.CutPrefix(hide.Target, b.Target); !b.Hide && under && (rest == "" || rest[0] == '/') {
			places = append([]string{b.Source + rest}, places...)
		}
	}
	for i := len(spec.Root.Layers) - 1; i >= 0; i-- {
		places = append(places, path.Join(spec.Root.Layers[i].Dir, hide.Target))
	}
	for _, p := range places {
		if fi, err := os.Lstat(p); err == nil {
			return fi.IsDir(), true
		}
	}
	return false, false
}

// mapTree makes a detached mount show the ids of m.
func mapTree(fd int, m idmap.Map, attrs uint64, recursive bool) error {
	if m.Identity() {
		return setAttrs(fd, attrs, recursive)
	}
	ns, release, err := namespaces.Get(m, maxUserNamespaces)
	if err != nil {
		return err
	}
	defer release()
	return unix.MountSetattr(fd, "", treeFlags(recursive), &unix.MountAttr{Attr_set: attrs | unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())})
}

// mapReadOnly maps a read-only tree, and leaves it unmapped where that cannot be: its files then belong to nobody
// inside, which takes rights away and gives none.
func mapReadOnly(fd int, m idmap.Map, recursive bool) error {
	const attrs = hostAttrs | unix.MOUNT_ATTR_RDONLY
	err := mapTree(fd, m, attrs, recursive)
	if err == nil || !cannotMap(err) {
		return err
	}
	return setAttrs(fd, attrs, recursive)
}

func setAttrs(fd int, attrs uint64, recursive bool) error {
	return unix.MountSetattr(fd, "", treeFlags(recursive), &unix.MountAttr{Attr_set: attrs})
}

func treeFlags(recursive bool) uint {
	if recursive {
		return unix.AT_EMPTY_PATH | unix.AT_RECURSIVE
	}
	return unix.AT_EMPTY_PATH
}

// cannotMap says whether an error of mount_setattr means that the file system does not know idmapped mounts.
func cannotMap(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)
}
