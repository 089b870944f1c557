package engine

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Where the workspace shows in a sandbox.
const (
	filesTarget = "/workspace"
	homeTarget  = "/home/user"
	// RepoMount is where the objects that a workspace borrows show, read-only.
	RepoMount = "/.warren/repo/objects"
)

// reserved are the targets that a sandbox needs for itself; nothing is mounted on them, beneath or above.
var reserved = []string{"/proc", "/sys", "/dev", "/.warren"}

// checkTargets checks where mounts are to show.
func checkTargets(mounts []Mount) error {
	if len(mounts) > maxMounts {
		return invalid("mounts", fmt.Sprintf("%d mounts", len(mounts)), fmt.Sprintf("at most %d", maxMounts))
	}
	var seen []string
	for _, m := range mounts {
		if err := text("mount source", m.Source, maxPath); err != nil {
			return err
		}
		if err := text("mount target", m.Target, maxPath); err != nil {
			return err
		}
		if !path.IsAbs(m.Source) || path.Clean(m.Source) != m.Source {
			return invalid("mount source", m.Source, "want an absolute path without . or .. or doubled or final slashes")
		}
		if !path.IsAbs(m.Target) || path.Clean(m.Target) != m.Target {
			return invalid("mount target", m.Target, "want an absolute path without . or .. or doubled or final slashes")
		}
		for _, r := range reserved {
			if beneath(m.Target, r) {
				return invalid("mount target", m.Target, "the sandbox needs "+r+" for itself")
			}
		}
		for _, r := range []string{filesTarget, homeTarget} {
			if beneath(r, m.Target) { // equal or above, "/" among them
				return invalid("mount target", m.Target, "it would hide the workspace at "+r+"; mount beneath it, or elsewhere")
			}
		}
		for _, old := range seen {
			if old == m.Target {
				return invalid("mount target", m.Target, "it is used twice")
			}
			if beneath(old, m.Target) {
				return invalid("mount target", m.Target, "it would hide the mount at "+old+"; give it first")
			}
		}
		seen = append(seen, m.Target)
	}
	return nil
}

// beneath says whether p is dir or beneath it; both are clean.
func beneath(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// AllowedMount is a host directory beneath which anyone may mount.
type AllowedMount struct {
	Dir string
	// Writable also lets them write, where the directory that they mount does not belong to root. Of two directories the one nearer
	// to what is mounted decides.
	Writable bool
}

// allowed returns the directory that lets a source be mounted, or an error when there is none or it is read-only.
func (e *Engine) allowed(m Mount) (string, error) {
	var best *AllowedMount
	readOnlyWithin := false
	for i := range e.opts.AllowMounts {
		a := &AllowedMount{path.Clean(e.opts.AllowMounts[i].Dir), e.opts.AllowMounts[i].Writable}
		if beneath(m.Source, a.Dir) && (best == nil || len(a.Dir) > len(best.Dir) || a.Dir == best.Dir && !a.Writable) {
			best = a
		}
		readOnlyWithin = readOnlyWithin || !a.Writable && beneath(a.Dir, m.Source)
	}
	if best == nil {
		return "", fmt.Errorf("mount source %s is not beneath a directory that the operator of this server allows: %w", quote(m.Source), warren.ErrDenied)
	}
	if m.Writable && (!best.Writable || readOnlyWithin) {
		return "", fmt.Errorf("mount source %s is allowed read-only; mount it so, or ask the operator of this server for `--allow-mount %s:rw`: %w", quote(m.Source), m.Source, warren.ErrDenied)
	}
	return best.Dir, nil
}

// checkOwner refuses to let a user write as root: the sandbox's user stands for the owner of what is mounted, so its set-uid files
// would be root's outside.
func checkOwner(c Caller, m Mount, uid uint32) error {
	if c.Operator || !m.Writable || uid != 0 {
		return nil
	}
	return fmt.Errorf("mount source %s belongs to root, and what a sandbox wrote there would too; mount it read-only, or ask the operator of this server to give it to an ordinary user (chown): %w", quote(m.Source), warren.ErrDenied)
}

// openMounts opens the sources, so that what was checked is what gets mounted, whatever is renamed afterwards. The
// caller closes them.
func (e *Engine) openMounts(c Caller, mounts []Mount) (_ []driver.Mount, err error) {
	var out []driver.Mount
	defer func() {
		if err != nil {
			closeMounts(out)
		}
	}()
	for _, m := range mounts {
		f, err := e.openSource(c, m)
		if err != nil {
			return nil, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			f.Close()
			return nil, fmt.Errorf("mount source %s: %w", quote(m.Source), err)
		}
		if err := checkOwner(c, m, st.Uid); err != nil {
			f.Close()
			return nil, err
		}
		out = append(out, driver.Mount{Dir: f, Source: m.Source, Target: m.Target, Writable: m.Writable,
			Owner: driver.Owner{User: true, UID: st.Uid, GID: st.Gid}})
	}
	return out, nil
}

func closeMounts(mounts []driver.Mount) {
	for _, m := range mounts {
		if m.Dir != nil {
			m.Dir.Close()
		}
	}
}

// openSource opens a directory without following any symbolic link on the way: a link could be turned elsewhere
// between the check and the mount. A caller who is no operator gets only what is beneath an allowed directory, held by
// the kernel (RESOLVE_BENEATH), and learns nothing of the rest.
func (e *Engine) openSource(c Caller, m Mount) (*os.File, error) {
	source := m.Source
	flags := uint64(unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NOFOLLOW)
	if c.Operator {
		fd, err := unix.Openat2(unix.AT_FDCWD, source, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
		if err != nil {
			return nil, sourceError(source, err)
		}
		return os.NewFile(uintptr(fd), source), nil
	}
	root, err := e.allowed(m)
	if err != nil {
		return nil, err
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, sourceError(root, err)
	}
	defer unix.Close(dir)
	rel, err := filepath.Rel(root, source)
	if err != nil {
		return nil, sourceError(source, err)
	}
	fd, err := unix.Openat2(dir, rel, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil, sourceError(source, err)
	}
	return os.NewFile(uintptr(fd), source), nil
}

// openOwn opens a directory of ours, beneath the data directory, which may itself be reached through links.
func openOwn(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), dir), nil
}

func sourceError(source string, err error) error {
	switch {
	case errors.Is(err, syscall.ELOOP):
		return invalid("mount source", source, "it is or passes a symbolic link, which could be turned elsewhere; give the real path")
	case errors.Is(err, syscall.ENOENT):
		return invalid("mount source", source, "there is no such directory on the server")
	case errors.Is(err, syscall.ENOTDIR):
		return invalid("mount source", source, "it is no directory; only directories can be mounted")
	case errors.Is(err, syscall.EXDEV):
		return invalid("mount source", source, "it leaves the directory that is allowed")
	case errors.Is(err, syscall.ENAMETOOLONG):
		return invalid("mount source", source, "a part of it is too long")
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("mount source %s: the server may not read it: %w", quote(source), warren.ErrDenied)
	}
	return fmt.Errorf("mount source %s: %w (%v)", quote(source), warren.ErrInvalid, err)
}
