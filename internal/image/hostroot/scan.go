package hostroot

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/warren-sandbox/warren"
	"golang.org/x/sys/unix"
)

const (
	// crowd is how many unreadable entries of one directory are hidden one by one; with more, the directory is.
	crowd = 32
	// maxHide is how many names may be hidden in all: each is a mount in every sandbox.
	maxHide = 256
	// watchDepth is how deep below a bound directory the cheap check for changes looks.
	watchDepth = 2
)

// remote are file systems that are hidden and not walked when they are mounted below a bound directory: what they hold is not
// the host's software, and a server that does not answer must not hold up a sandbox.
var remote = map[int64]bool{
	unix.NFS_SUPER_MAGIC: true, unix.SMB_SUPER_MAGIC: true, unix.SMB2_SUPER_MAGIC: true, unix.CIFS_SUPER_MAGIC: true, unix.AFS_FS_MAGIC: true, unix.V9FS_MAGIC: true,
	unix.CEPH_SUPER_MAGIC: true, unix.FUSE_SUPER_MAGIC: true, unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, unix.DEVPTS_SUPER_MAGIC: true,
	unix.AUTOFS_SUPER_MAGIC: true,
}

// found is the result of a scan.
type found struct {
	// hide are the names, below the host's root, that not every user of the host may read.
	hide []string
	// watch are directories near the top, as they were before they were read; a change asks for another scan.
	watch map[string]stamp
}

// scan walks the bound directories for files that not every user of the host may read. In a sandbox its root could, for the
// host's ids show as they are.
func scan(ctx context.Context, host string, binds []string) (found, error) {
	w := &walker{ctx: ctx, host: host, watch: map[string]stamp{}}
	w.ready.L = &w.mu
	for _, b := range binds {
		w.push(job{name: b})
	}
	var wg sync.WaitGroup
	for range max(2, runtime.GOMAXPROCS(0)) {
		wg.Go(w.run)
	}
	wg.Wait()
	if w.err != nil {
		return found{}, w.err
	}
	hide, err := thin(w.hide, binds)
	if err != nil {
		return found{}, err
	}
	return found{hide, w.watch}, nil
}

type job struct {
	name  string
	depth int
	dev   uint64
}

// walker shares the directories that are still to be read between a few goroutines.
type walker struct {
	ctx   context.Context
	host  string
	mu    sync.Mutex
	ready sync.Cond
	todo  []job
	busy  int
	hide  []string
	watch map[string]stamp
	err   error
}

func (w *walker) push(j job) { w.todo = append(w.todo, j) }

func (w *walker) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for len(w.todo) == 0 && w.busy > 0 && w.err == nil {
			w.ready.Wait()
		}
		if len(w.todo) == 0 || w.err != nil {
			w.ready.Broadcast()
			return
		}
		j := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		w.busy++
		w.mu.Unlock()
		dirs, hide, err := w.read(j)
		w.mu.Lock()
		w.busy--
		w.todo = append(w.todo, dirs...)
		w.hide = append(w.hide, hide...)
		if err != nil && w.err == nil {
			w.err = err
		}
		w.ready.Broadcast()
	}
}

// read looks at one directory.
func (w *walker) read(j job) (dirs []job, hide []string, err error) {
	if err := w.ctx.Err(); err != nil {
		return nil, nil, err
	}
	fd, err := unix.Open(path.Join(w.host, j.name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil, nil, nil // it has gone meanwhile
	}
	if err == unix.EACCES && j.depth > 0 {
		return nil, []string{j.name}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look for files of the host that must not show in a sandbox: %w", &fs.PathError{Op: "open", Path: "/" + j.name, Err: err})
	}
	f := os.NewFile(uintptr(fd), j.name)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, err
	}
	if j.depth > 0 && st.Mode&0o005 != 0o005 {
		return nil, []string{j.name}, nil
	}
	if j.depth <= watchDepth {
		w.mu.Lock()
		w.watch[j.name] = stampOf(&st)
		w.mu.Unlock()
	}
	if j.depth > 0 && st.Dev != j.dev {
		var vfs unix.Statfs_t
		if unix.Fstatfs(fd, &vfs) != nil || remote[int64(vfs.Type)] {
			return nil, []string{j.name}, nil
		}
	}
	list, err := f.ReadDir(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("look for files of the host that must not show in a sandbox: %w", err)
	}
	for _, e := range list {
		name := j.name + "/" + e.Name()
		switch e.Type() {
		case fs.ModeSymlink:
			continue
		case fs.ModeDir: // its mode is looked at when it is opened
			dirs = append(dirs, job{name, j.depth + 1, st.Dev})
			continue
		}
		var c unix.Stat_t
		if err := unix.Fstatat(fd, e.Name(), &c, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT); err != nil {
			continue // it has gone meanwhile
		}
		switch c.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
		case unix.S_IFDIR:
			dirs = append(dirs, job{name, j.depth + 1, st.Dev})
		case unix.S_IFREG:
			if c.Mode&0o004 == 0 {
				hide = append(hide, name)
			}
		default: // a socket, a FIFO or a device is a way to talk to the host
			hide = append(hide, name)
		}
	}
	return dirs, hide, nil
}

// thin replaces many hidden names by the directories that hold them.
func thin(hide, binds []string) ([]string, error) {
	children := map[string]int{}
	for _, name := range hide {
		children[path.Dir(name)]++
	}
	collapse := func(list []string, which func(name string) bool) []string {
		var out []string
		for _, name := range list {
			if dir := path.Dir(name); which(name) && !slices.Contains(binds, dir) {
				name = dir
			}
			out = append(out, name)
		}
		return outermost(out)
	}
	hide = collapse(hide, func(name string) bool { return children[path.Dir(name)] > crowd })
	for len(hide) > maxHide {
		deepest := 0
		for _, name := range hide {
			deepest = max(deepest, strings.Count(name, "/"))
		}
		next := collapse(hide, func(name string) bool { return strings.Count(name, "/") == deepest })
		if slices.Equal(next, hide) {
			return nil, fmt.Errorf("%w: the host has %d files directly below /usr or /opt that not every user may read, such as /%s; "+
				"make them readable, move them away, or use another image than host", warren.ErrExhausted, len(hide), hide[0])
		}
		hide = next
	}
	return hide, nil
}

// outermost sorts names and drops those that lie below others.
func outermost(list []string) []string {
	slices.Sort(list)
	list = slices.Compact(list)
	kept := map[string]bool{}
	var out []string
next:
	for _, name := range list {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if kept[dir] {
				continue next
			}
		}
		kept[name] = true
		out = append(out, name)
	}
	return out
}
