package file

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

const (
	// maxWatchDirs bounds how many directories one watch covers.
	maxWatchDirs = 16_384
	// maxPending bounds how many events wait for their reader.
	maxPending = 8_192
)

// Watch is a watched directory.
type Watch struct {
	user      *account.User
	root      string
	recursive bool
	entries   bool
	notify    *os.File

	// The rest but the queue is for the reading goroutine.
	dirs  map[int32]string // watch descriptor to path relative to the root
	wds   map[string]int32
	told  map[string]bool // names found by a scan, whose event from the kernel is still to come
	moved string          // a directory that left its name in the last event
	cook  uint32

	mu     sync.Mutex
	queue  []wire.FilesystemEvent
	err    error
	change chan struct{} // holds a token when the queue or err has changed
}

const watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_MODIFY | unix.IN_ATTRIB |
	unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// networkFS are the file systems whose changes elsewhere go unnoticed.
var networkFS = map[int64]string{
	unix.NFS_SUPER_MAGIC: "nfs", unix.SMB_SUPER_MAGIC: "smb", 0xfe534d42: "smb2", 0xff534d42: "cifs", 0x65735546: "fuse",
}

// WatchOptions say what a watch covers and tells.
type WatchOptions struct {
	Recursive bool
	// Entries adds a description of the file to events, where it still exists.
	Entries bool
	// Network allows a file system of which only changes from here are seen.
	Network bool
}

// NewWatch watches a directory. When it returns, every later change will be told. Close it.
func NewWatch(u *account.User, path string, o WatchOptions) (*Watch, error) {
	w := &Watch{user: u, root: path, recursive: o.Recursive, entries: o.Entries, dirs: make(map[int32]string),
		wds: make(map[string]int32), told: make(map[string]bool), change: make(chan struct{}, 1)}
	err := u.Do(func() error {
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !st.IsDir() {
			return wire.Errorf(wire.InvalidArgument, "path '%s' is not a directory", path)
		}
		var sfs unix.Statfs_t
		if err := unix.Statfs(path, &sfs); err == nil && !o.Network {
			if name, ok := networkFS[int64(uint32(sfs.Type))]; ok {
				return wire.Errorf(wire.InvalidArgument, "path '%s' is on a network file system (%s), where changes made elsewhere are not seen", path, name)
			}
		}
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return err
		}
		w.notify = os.NewFile(uintptr(fd), "inotify")
		return w.add(".", nil)
	})
	if err != nil {
		if w.notify != nil {
			w.notify.Close()
		}
		return nil, Wrap(err, path)
	}
	go w.run()
	return w, nil
}

// Close ends the watch.
func (w *Watch) Close() { w.notify.Close() }

// Changed returns a channel that receives when Take may have something.
func (w *Watch) Changed() <-chan struct{} { return w.change }

// Take returns the events since the last call, and why the watch ended if it did.
func (w *Watch) Take() ([]wire.FilesystemEvent, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.queue
	w.queue = nil
	if len(events) > 0 {
		return events, nil
	}
	return nil, w.err
}

func (w *Watch) tell(name string, t wire.EventType) {
	e := wire.FilesystemEvent{Name: name, Type: t}
	if w.entries && t != wire.EventRemove && t != wire.EventRename {
		if info, err := entry(filepath.Join(w.root, name)); err == nil {
			e.Entry = info
		}
	}
	w.mu.Lock()
	if len(w.queue) < maxPending {
		w.queue = append(w.queue, e)
	} else if w.err == nil {
		w.err = wire.Errorf(wire.ResourceExhausted, "more than %d changes wait to be read; some are lost", maxPending)
	}
	w.mu.Unlock()
	w.signal()
}

func (w *Watch) fail(err error) {
	w.mu.Lock()
	if w.err == nil {
		w.err = err
	}
	w.mu.Unlock()
	w.signal()
}

func (w *Watch) signal() {
	select {
	case w.change <- struct{}{}:
	default:
	}
}

// add watches a directory, with all below it when the watch is recursive. For each entry found it calls found: in a
// directory that appeared, those may have been made before it was watched.
func (w *Watch) add(rel string, found func(name string)) error {
	if len(w.dirs) >= maxWatchDirs {
		return wire.Errorf(wire.ResourceExhausted, "path '%s' holds more than %d directories", w.root, maxWatchDirs)
	}
	path := filepath.Join(w.root, rel)
	mask := uint32(watchMask)
	if rel != "." {
		mask |= unix.IN_DONT_FOLLOW
	}
	var wd int
	err := w.control(func(fd int) (err error) {
		wd, err = unix.InotifyAddWatch(fd, path, mask)
		return err
	})
	if err != nil {
		return err
	}
	w.dirs[int32(wd)] = rel
	w.wds[rel] = int32(wd)
	if !w.recursive {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, d := range entries {
		name := filepath.Join(rel, d.Name())
		if d.IsDir() {
			if err := w.add(name, found); err != nil && !passable(err) {
				return err
			}
		}
		if found != nil {
			found(name)
		}
	}
	return nil
}

// control calls f with the descriptor, which stays open meanwhile whoever closes the watch.
func (w *Watch) control(f func(fd int) error) error {
	raw, err := w.notify.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// passable says whether a directory below the watched one may be left out: it is gone, or not the user's to read.
func passable(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOTDIR)
}

// run reads events until the watch is closed.
func (w *Watch) run() {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.notify.Read(buf)
		if err != nil {
			w.fail(wire.Errorf(wire.Canceled, "the watch is closed"))
			return
		}
		// New directories are watched, and entries described, with the user's rights.
		err = w.user.Do(func() error { return w.events(buf[:n]) })
		if err != nil {
			w.fail(Wrap(err, w.root))
			w.notify.Close()
			return
		}
	}
}

// events handles the events of one read.
func (w *Watch) events(buf []byte) error {
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf))
		mask := binary.NativeEndian.Uint32(buf[4:])
		cookie := binary.NativeEndian.Uint32(buf[8:])
		n := int(binary.NativeEndian.Uint32(buf[12:]))
		if n > len(buf)-unix.SizeofInotifyEvent {
			break
		}
		name := strings.TrimRight(string(buf[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+n]), "\x00")
		buf = buf[unix.SizeofInotifyEvent+n:]
		if err := w.event(wd, mask, cookie, name); err != nil {
			return err
		}
	}
	return nil
}

func (w *Watch) event(wd int32, mask, cookie uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return wire.Errorf(wire.ResourceExhausted, "too many changes at a time in '%s'; some are lost", w.root)
	}
	if w.moved != "" {
		from := w.moved
		w.moved = ""
		if mask&unix.IN_MOVED_TO != 0 && cookie == w.cook {
			w.rename(from, filepath.Join(w.dirs[wd], name))
		} else {
			w.forget(from)
		}
	}
	dir, ok := w.dirs[wd]
	if !ok {
		return nil
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.dirs, wd)
		if w.wds[dir] == wd {
			delete(w.wds, dir)
		}
		return nil
	}
	rel := filepath.Join(dir, name)
	isDir := mask&unix.IN_ISDIR != 0
	if name == "" {
		// About the directory itself: its parent tells it too, unless it is the root.
		if dir == "." {
			switch {
			case mask&unix.IN_DELETE_SELF != 0:
				w.tell(".", wire.EventRemove)
			case mask&unix.IN_MOVE_SELF != 0:
				w.tell(".", wire.EventRename)
			}
		}
		return nil
	}
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		if w.told[rel] {
			delete(w.told, rel)
			return nil
		}
		var found []string
		if isDir && w.recursive {
			if _, watched := w.wds[rel]; !watched {
				err := w.add(rel, func(name string) { found = append(found, name) })
				if err != nil && !passable(err) {
					return err
				}
			}
		}
		w.tell(rel, wire.EventCreate)
		for _, f := range found {
			w.told[f] = true
			w.tell(f, wire.EventCreate)
		}
		if len(w.told) > maxPending {
			clear(w.told) // those whose event never came; at worst a name is told twice
		}
	case mask&unix.IN_MOVED_FROM != 0:
		delete(w.told, rel)
		if isDir && w.recursive {
			w.moved, w.cook = rel, cookie
		}
		w.tell(rel, wire.EventRename)
	case mask&unix.IN_DELETE != 0:
		delete(w.told, rel)
		w.tell(rel, wire.EventRemove)
	case mask&unix.IN_MODIFY != 0:
		w.tell(rel, wire.EventWrite)
	case mask&unix.IN_ATTRIB != 0:
		w.tell(rel, wire.EventChmod)
	}
	return nil
}

// rename gives the directories below a moved one their new names.
func (w *Watch) rename(from, to string) {
	for wd, dir := range w.dirs {
		if dir == from || strings.HasPrefix(dir, from+"/") {
			delete(w.wds, dir)
			w.dirs[wd] = to + dir[len(from):]
			w.wds[w.dirs[wd]] = wd
		}
	}
}

// forget stops watching a directory that has left, with all below it.
func (w *Watch) forget(dir string) {
	for wd, d := range w.dirs {
		if d == dir || strings.HasPrefix(d, dir+"/") {
			delete(w.dirs, wd)
			delete(w.wds, d)
			_ = w.control(func(fd int) error {
				_, err := unix.InotifyRmWatch(fd, uint32(wd))
				return err
			})
		}
	}
}
