//go:build linux

package keeper

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// guestPath is where the guest's binary is inside.
const guestPath = "/.warren/guest"

// hostAttrs are the attributes of every mount that a sandbox gets. The host itself never executes a file of a
// sandbox, so set-uid bits need no effect here; inside, gVisor decides about them by itself.
const hostAttrs = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID

// stage is the mounts of one sandbox while it starts. The gofer and the sandbox process take copies of the
// namespace; once they run, close removes the keeper's own.
type stage struct {
	dir    string
	root   string
	mounts []string // by index in Spec.Mounts
	guest  string
	// unmapped tells of read-only parts whose file system cannot be idmapped: they show as owned by nobody.
	unmapped []string
}

// idRange is the first host id of a sandbox.
func idRange(i int) uint32 { return firstRange + uint32(i)*idCount }

const (
	firstRange = 0x70000000
	idCount    = 65536
	// sandboxUser is the id of the user that works in a sandbox.
	sandboxUser = 1000
	// maxRanges keeps the last range below 2^31, where some tools' ids end.
	maxRanges = (1<<31 - firstRange) / idCount
)

// idmap makes a detached mount show the ids of m.
func (k *Keeper) idmap(fd int, m idMap, attrs uint64, recursive bool) error {
	ns, release, err := k.userns.get(m)
	if err != nil {
		return err
	}
	defer release()
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	return unix.MountSetattr(fd, "", flags, &unix.MountAttr{
		Attr_set:  attrs | unix.MOUNT_ATTR_IDMAP,
		Userns_fd: uint64(ns.Fd()),
	})
}

// setAttrs sets attributes without a mapping.
func setAttrs(fd int, attrs uint64, recursive bool) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	return unix.MountSetattr(fd, "", flags, &unix.MountAttr{Attr_set: attrs})
}

// cannotMap says whether an error of mount_setattr means that the file system does not know idmapped mounts.
func cannotMap(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)
}

// mapReadOnly idmaps a read-only tree, and leaves it unmapped where that cannot be: its files then belong to nobody
// inside, which takes rights away and gives none.
func (k *Keeper) mapReadOnly(s *stage, what string, fd int, m idMap, recursive bool) error {
	const attrs = hostAttrs | unix.MOUNT_ATTR_RDONLY
	err := k.idmap(fd, m, attrs, recursive)
	if err == nil || !cannotMap(err) {
		return err
	}
	s.unmapped = append(s.unmapped, what)
	return setAttrs(fd, attrs, recursive)
}

// prepare builds the mounts of a sandbox below /stage.
func (k *Keeper) prepare(spec *protocol.Spec, files []*os.File, host uint32) (_ *stage, err error) {
	s := &stage{dir: filepath.Join(stageDir, spec.ID)}
	s.root = filepath.Join(s.dir, "root")
	s.guest = filepath.Join(s.dir, "guest")
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	fd := func(i int) int { return int(files[i].Fd()) }

	// Layers, topmost first.
	var layers []int
	for i := len(spec.Layers) - 1; i >= 0; i-- {
		l := spec.Layers[i]
		if err := k.mapReadOnly(s, "an image layer", fd(l.FD), diskMap(l.IDBase, host), false); err != nil {
			return nil, fmt.Errorf("map an image layer: %w", err)
		}
		layers = append(layers, fd(l.FD))
	}
	top, err := k.makeTop(spec, layers, host)
	if err != nil {
		return nil, err
	}
	topFD, err := unix.OpenTree(unix.AT_FDCWD, top, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone the top layer: %w", err)
	}
	defer unix.Close(topFD)
	if err := s.mountOverlay(append([]int{topFD}, layers...)); err != nil {
		return nil, fmt.Errorf("mount the image's layers: %w", err)
	}
	if err := k.mountBinds(s, spec, fd, host); err != nil {
		return nil, err
	}

	if err := setAttrs(fd(spec.Guest), hostAttrs|unix.MOUNT_ATTR_RDONLY, false); err != nil {
		return nil, err
	}
	if err := attachNew(fd(spec.Guest), s.guest, false); err != nil {
		return nil, fmt.Errorf("mount the guest: %w", err)
	}
	for i, m := range spec.Mounts {
		at := filepath.Join(s.dir, "m"+strconv.Itoa(i))
		if m.Later {
			if err := k.mountEmpty(at); err != nil {
				return nil, fmt.Errorf("prepare the mount on %s: %w", m.Target, err)
			}
			s.mounts = append(s.mounts, at)
			continue
		}
		if err := k.mountDir(s, m, fd(m.FD), at, host); err != nil {
			return nil, err
		}
		s.mounts = append(s.mounts, at)
	}
	return s, nil
}

func (k *Keeper) mountDir(s *stage, m protocol.Mount, fd int, at string, host uint32) error {
	if err := k.mapDir(s, m, fd, host); err != nil {
		return err
	}
	if err := attachNew(fd, at, true); err != nil {
		return fmt.Errorf("mount %s: %w", m.Target, err)
	}
	return nil
}

// mapDir gives a detached mount the ids and attributes that it has in a sandbox.
func (k *Keeper) mapDir(s *stage, m protocol.Mount, fd int, host uint32) error {
	ids := diskMap(m.IDBase, host)
	if m.User {
		ids = userMap(m.UID, m.GID, host)
	}
	if m.Writable {
		// Never unmapped: the sandbox could not write, or would write as somebody else.
		if err := k.idmap(fd, ids, hostAttrs, false); err != nil {
			if cannotMap(err) {
				return protocol.Errorf(protocol.KindUnsupported, "mount %s: the file system of its host directory cannot map owners (idmapped mounts), so it can only be mounted read-only", m.Target)
			}
			return fmt.Errorf("mount %s: %w", m.Target, err)
		}
	} else if err := k.mapReadOnly(s, "the mount "+m.Target, fd, ids, false); err != nil {
		return fmt.Errorf("mount %s: %w", m.Target, err)
	}
	return nil
}

// makeTop makes the sandbox's own layer and returns its path.
func (k *Keeper) makeTop(spec *protocol.Spec, layers []int, host uint32) (string, error) {
	t := &topLayer{
		dir:    filepath.Join(sandboxDir(spec.ID), "top"),
		below:  mergedDir{layers},
		owner:  int(host),
		isMade: make(map[string]bool),
	}
	if err := os.Mkdir(t.dir, 0o755); err != nil {
		return "", err
	}
	// The root directory itself.
	var st unix.Stat_t
	if err := unix.Fstat(layers[0], &st); err != nil {
		return "", err
	}
	if err := os.Chown(t.dir, int(st.Uid), int(st.Gid)); err != nil {
		return "", err
	}
	if err := unix.Chmod(t.dir, st.Mode&0o7777); err != nil {
		return "", err
	}
	for _, d := range []string{"/proc", "/sys", "/dev", "/run"} {
		if _, err := t.mkdirAll(d, 0o755); err != nil {
			return "", err
		}
	}
	// gVisor covers an empty /tmp with a tmpfs, which would be charged to the memory limit. One directory that many
	// systems have there keeps /tmp in the root overlay, on disk and under the disk limit.
	tmp, err := t.mkdirAll("/tmp", 0o1777)
	if err != nil {
		return "", err
	}
	if err := t.mkdirResolved(path.Join(tmp, ".X11-unix"), 0o1777); err != nil {
		return "", err
	}
	for name, content := range ownFiles(spec) {
		if err := t.write(name, content, 0o644); err != nil {
			return "", err
		}
	}
	if err := t.point(guestPath, false); err != nil {
		return "", err
	}
	var covered []string
	for _, b := range spec.Binds {
		if !b.Hide && !within(b.Target, covered) {
			if err := t.point(b.Target, b.Dir); err != nil {
				return "", err
			}
		}
		if b.Dir {
			covered = append(covered, b.Target)
		}
	}
	for _, m := range spec.Mounts {
		if !within(m.Target, covered) {
			if err := t.point(m.Target, true); err != nil {
				return "", err
			}
		}
		covered = append(covered, m.Target)
	}
	return t.dir, nil
}

// ownFiles are the files of a sandbox that take the place of the image's.
func ownFiles(spec *protocol.Spec) map[string]string {
	hostname := spec.Hostname
	return map[string]string{
		"/etc/hostname":    hostname + "\n",
		"/etc/hosts":       "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n",
		"/etc/resolv.conf": resolvConf(spec.Card),
	}
}

// within says whether p lies in one of dirs.
func within(p string, dirs []string) bool {
	for _, d := range dirs {
		if p == d || strings.HasPrefix(p, strings.TrimSuffix(d, "/")+"/") {
			return true
		}
	}
	return false
}

// mountOverlay mounts layers, topmost first, read-only at s.root.
func (s *stage) mountOverlay(layers []int) error {
	if err := os.Mkdir(s.root, 0o755); err != nil {
		return err
	}
	err := overlayByFD(layers, s.root)
	if err == nil {
		return nil
	}
	// Before Linux 6.13 overlayfs takes layers by name only.
	if perr := s.overlayByName(layers); perr != nil {
		return errors.Join(err, perr)
	}
	return nil
}

func overlayByFD(layers []int, at string) error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	for _, l := range layers {
		if err := unix.FsconfigSetFd(fs, "lowerdir+", l); err != nil {
			return fmt.Errorf("add a layer: %w", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return err
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, hostAttrs|unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return attach(fd, at)
}

func (s *stage) overlayByName(layers []int) error {
	dir := filepath.Join(s.dir, "l")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	var names []string
	for i, l := range layers {
		name := strconv.Itoa(i)
		if err := attachNew(l, filepath.Join(dir, name), true); err != nil {
			return err
		}
		names = append(names, name)
	}
	// The options must fit on one page, so the names are relative to a working directory that only this thread has;
	// the thread ends with the goroutine.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- err
			return
		}
		if err := unix.Chdir(dir); err != nil {
			done <- err
			return
		}
		done <- unix.Mount("overlay", s.root, "overlay", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID,
			"lowerdir="+strings.Join(names, ":"))
	}()
	return <-done
}

func (k *Keeper) mountBinds(s *stage, spec *protocol.Spec, fd func(int) int, host uint32) error {
	rootFD, err := unix.Open(s.root, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(rootFD)
	for _, b := range spec.Binds {
		// Resolved inside the tree as built so far.
		target, err := unix.Openat2(rootFD, b.Target, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != nil {
			if b.Hide && errors.Is(err, unix.ENOENT) {
				continue // nothing to hide
			}
			return protocol.Errorf(protocol.KindInvalid, "image: bind on %s: %w", b.Target, err)
		}
		err = k.mountBind(s, b, fd, target, host)
		unix.Close(target)
		if err != nil {
			return fmt.Errorf("image: bind on %s: %w", b.Target, err)
		}
	}
	return checkPoints(rootFD, spec, fd)
}

// checkPoints refuses mounts whose mount point would have to be made in a bind, which is the host's, and those in another
// mount whose point what runs in a sandbox has turned into something else.
func checkPoints(rootFD int, spec *protocol.Spec, fd func(int) int) error {
	for i, m := range spec.Mounts {
		// The mount that the point is in, if any, is the last one made over it.
		outer := -1
		for j, o := range spec.Mounts[:i] {
			if within(m.Target, []string{o.Target}) {
				outer = j
			}
		}
		if outer >= 0 {
			o := spec.Mounts[outer]
			if err := checkInner(fd(o.FD), strings.Trim(strings.TrimPrefix(m.Target, o.Target), "/"), o.Writable); err != nil {
				return protocol.Errorf(protocol.KindInvalid, "mount on %s: in what is mounted on %s %w; mount it elsewhere, or mend that from a sandbox without this mount", m.Target, o.Target, err)
			}
			continue
		}
		fd, err := unix.Openat2(rootFD, m.Target, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC | unix.O_DIRECTORY,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != nil {
			return protocol.Errorf(protocol.KindInvalid, "mount on %s: the image has no such directory there, and it cannot be made (%w); mount it elsewhere", m.Target, err)
		}
		unix.Close(fd)
	}
	return nil
}

// checkInner looks at the point of a mount in another mount, where it is made if it is missing.
func checkInner(dir int, rel string, writable bool) error {
	if rel == "" {
		return nil
	}
	point, err := unix.Openat2(dir, rel, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | unix.O_DIRECTORY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case err == nil:
		unix.Close(point)
		return nil
	case errors.Is(err, unix.ENOENT) && writable:
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("there is no %s, and it is read-only", rel)
	case errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%s is a symbolic link or leads through one", rel)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%s is no directory", rel)
	}
	return fmt.Errorf("%s cannot be opened (%w)", rel, err)
}

func (k *Keeper) mountBind(s *stage, b protocol.Bind, fd func(int) int, target int, host uint32) error {
	if b.Hide {
		var st unix.Stat_t
		if err := unix.Fstat(target, &st); err != nil {
			return err
		}
		empty, err := k.cloneEmpty(st.Mode&unix.S_IFMT == unix.S_IFDIR)
		if err != nil {
			return err
		}
		defer unix.Close(empty)
		return unix.MoveMount(empty, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	}
	tree := fd(b.FD)
	ids := diskMap(b.IDBase, host)
	if err := k.idmap(tree, ids, hostAttrs|unix.MOUNT_ATTR_RDONLY, true); err != nil {
		// Something mounted below cannot be mapped, or the directory itself.
		tree = fd(b.Flat)
		if err := k.mapReadOnly(s, b.Target, tree, ids, false); err != nil {
			return err
		}
	}
	return unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// mountEmpty mounts an empty directory, over which something else is mounted before the sandbox runs.
func (k *Keeper) mountEmpty(at string) error {
	fd, err := k.cloneEmpty(true)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return attachNew(fd, at, true)
}

// cloneEmpty returns a detached mount of an empty file or directory.
func (k *Keeper) cloneEmpty(dir bool) (int, error) {
	name := filepath.Join(stageDir, ".empty-file")
	if dir {
		name = filepath.Join(stageDir, ".empty-dir")
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if err := setAttrs(fd, hostAttrs|unix.MOUNT_ATTR_RDONLY, false); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// attachNew makes a mount point and attaches a detached mount there.
func attachNew(fd int, at string, dir bool) error {
	if dir {
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
	} else if err := os.WriteFile(at, nil, 0o644); err != nil {
		return err
	}
	return attach(fd, at)
}

func attach(fd int, at string) error {
	return unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// close removes the keeper's copy of the mounts. The processes of a sandbox that started keep theirs.
func (s *stage) close() error {
	var errs []error
	names, err := os.ReadDir(s.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs = append(errs, err)
	unmount := func(at string) {
		for {
			err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if err != nil {
				if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
					errs = append(errs, err)
				}
				return
			}
		}
	}
	for _, n := range names {
		at := filepath.Join(s.dir, n.Name())
		if n.Name() == "l" {
			layers, _ := os.ReadDir(at)
			for _, l := range layers {
				unmount(filepath.Join(at, l.Name()))
				errs = append(errs, os.Remove(filepath.Join(at, l.Name())))
			}
		} else {
			unmount(at)
		}
		// Remove, never RemoveAll: were something still mounted, it must not be emptied.
		errs = append(errs, os.Remove(at))
	}
	errs = append(errs, os.Remove(s.dir))
	return errors.Join(errs...)
}
