package git

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// systemDirs are the directories of programs and libraries that a confined git sees, read-only.
var systemDirs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/nix/store", "/gnu/store"}

// devices are what git opens.
var devices = []string{"/dev/null", "/dev/urandom"}

// mount is a directory or file that a confined git sees.
type mount struct {
	source, target string
	writable       bool
}

// start starts cmd as c says. It is to be told when it has ended.
func (c *Cmd) start(cmd *exec.Cmd, ended <-chan struct{}) error {
	root := os.Geteuid() == 0
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	switch {
	case root && c.Confine != nil:
		return c.startConfined(cmd, ended)
	case root && c.Owner != nil:
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: c.Owner.UID, Gid: c.Owner.GID}
	}
	cmd.Env = c.environ(func(p string) string { return p })
	return onThread(func() error {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no new privileges: %w", err)
		}
		return cmd.Start()
	}, ended)
}

// startConfined builds the view of c in a mount namespace of its own and starts cmd in it. The namespace belongs to a
// thread that ends with git, and leaves nothing behind, however git or this process ends.
func (c *Cmd) startConfined(cmd *exec.Cmd, ended <-chan struct{}) error {
	mounts, path := c.view()
	cmd.Env = c.environ(path)
	id := syscall.SysProcIDMap{ContainerID: 0, HostID: int(c.Confine.IDBase), Size: 65536}
	attr := cmd.SysProcAttr
	attr.Cloneflags = syscall.CLONE_NEWUSER
	attr.UidMappings = []syscall.SysProcIDMap{id}
	attr.GidMappings = []syscall.SysProcIDMap{id}
	attr.GidMappingsEnableSetgroups = true
	attr.Credential = &syscall.Credential{Uid: c.Confine.UID, Gid: c.Confine.UID}
	// Files of the sandbox's root and directories without permissions are the workspace's too. In a user namespace
	// the capability reaches only files whose owner is one of its own ids.
	attr.AmbientCaps = []uintptr{unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH}

	trees := make([]int, 0, len(mounts))
	defer func() {
		for _, fd := range trees {
			unix.Close(fd)
		}
	}()
	for _, m := range mounts {
		fd, err := openTree(m)
		if err != nil {
			return fmt.Errorf("show %s to git: %w", m.target, err)
		}
		trees = append(trees, fd)
	}
	return onThread(func() error {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no new privileges: %w", err)
		}
		root, err := newRoot(mounts, trees)
		if err != nil {
			return fmt.Errorf("confine git: %w", err)
		}
		attr.Chroot = root
		return cmd.Start()
	}, ended)
}

// view lists what the command sees, and returns the function that turns a host path into the path in that view.
func (c *Cmd) view() ([]mount, func(string) string) {
	var mounts []mount
	for _, d := range systemDirs {
		if fi, err := os.Lstat(d); err == nil && fi.Mode()&os.ModeSymlink == 0 {
			mounts = append(mounts, mount{source: d, target: d})
		}
	}
	for _, d := range devices {
		mounts = append(mounts, mount{source: d, target: d, writable: true})
	}
	own := len(mounts)
	add := func(name, dir string, writable bool) {
		if dir != "" && !slices.ContainsFunc(mounts[own:], func(m mount) bool { return m.source == dir }) {
			mounts = append(mounts, mount{source: dir, target: name, writable: writable})
		}
	}
	// Names of our own, so that git's messages hold no path of the host.
	add("/git", c.Dir, false)
	add("/workspace", c.WorkTree, c.WriteTree)
	add("/objects", c.Objects, true)
	if c.Index != "" {
		add("/index", filepath.Dir(c.Index), true)
	}
	for i, d := range c.Alternates {
		add(fmt.Sprintf("/alternate%d", i), d, false)
	}
	return mounts, func(p string) string {
		best, name := -1, p
		for _, m := range mounts[own:] {
			if p == m.source || strings.HasPrefix(p, m.source+"/") {
				if len(m.source) > best {
					best, name = len(m.source), m.target+strings.TrimPrefix(p, m.source)
				}
			}
		}
		return name
	}
}

// openTree clones the mount below m.source; the clone belongs to no namespace yet.
func openTree(m mount) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return -1, err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID, Propagation: unix.MS_PRIVATE}
	if !slices.Contains(devices, m.source) {
		attr.Attr_set |= unix.MOUNT_ATTR_NODEV
	}
	if !m.writable {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if !slices.Contains(systemDirs, m.source) {
		attr.Attr_set |= unix.MOUNT_ATTR_NOEXEC
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// newRoot gives the calling thread a mount namespace of its own and returns the directory in it that holds the mounts.
func newRoot(mounts []mount, trees []int) (string, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("new mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", fmt.Errorf("make mounts private: %w", err)
	}
	root := ""
	for _, d := range []string{"/mnt", "/tmp", "/run"} {
		if fi, err := os.Stat(d); err == nil && fi.IsDir() {
			root = d
			break
		}
	}
	if root == "" {
		return "", errors.New("the host has neither /mnt nor /tmp nor /run")
	}
	if err := unix.Mount("warren-git", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=1m"); err != nil {
		return "", fmt.Errorf("tmpfs: %w", err)
	}
	for _, d := range []string{"/bin", "/sbin", "/lib", "/lib64", "/lib32"} {
		if to, err := os.Readlink(d); err == nil {
			if err := unix.Symlink(to, root+d); err != nil {
				return "", err
			}
		}
	}
	for i, m := range mounts {
		target := root + m.target
		var st unix.Stat_t
		if err := unix.Fstat(trees[i], &st); err != nil {
			return "", err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			if err := os.MkdirAll(target, 0o755); err != nil {
				return "", err
			}
		} else {
			if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
				return "", err
			}
			f, err := os.OpenFile(target, os.O_CREATE|os.O_RDONLY, 0o644)
			if err != nil {
				return "", err
			}
			f.Close()
		}
		if err := unix.MoveMount(trees[i], "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return "", fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		return "", fmt.Errorf("make the root read-only: %w", err)
	}
	return root, nil
}

// onThread runs f on a thread of its own, so that f may change what belongs to a thread: its mount namespace, or that it and its
// children get no new privileges. The thread ends with what f has started, which the kernel kills when its thread goes first: with
// this process, however that ends.
func onThread(f func() error, ended <-chan struct{}) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread cannot end, and stands for the process in /proc. Hold it while another does the work.
			done <- onThread(f, ended)
			runtime.UnlockOSThread()
			return
		}
		// Not unlocked: the runtime ends the thread with the goroutine.
		err := f()
		done <- err
		if err == nil {
			<-ended
		}
	}()
	return <-done
}

// bound limits a git that has just been started.
func (c *Cmd) bound(pid int) error {
	if c.Confine == nil || c.Confine.Memory == 0 {
		return nil
	}
	err := unix.Prlimit(pid, unix.RLIMIT_DATA, &unix.Rlimit{Cur: c.Confine.Memory, Max: c.Confine.Memory}, nil)
	if err == unix.ESRCH { // it has ended already
		return nil
	}
	return err
}
