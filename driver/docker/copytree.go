//go:build linux

package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// seen is what a file was when it was last equal on both sides: what has changed since, and on which side, tells it.
type seen struct {
	Mode fs.FileMode `json:"m"`
	Size int64       `json:"s,omitempty"`
	// Time is the last change of the content, in nanoseconds.
	Time int64 `json:"t,omitempty"`
}

func seenOf(fi fs.FileInfo) seen {
	s := seen{Mode: fi.Mode()}
	if fi.Mode().IsRegular() {
		s.Size, s.Time = fi.Size(), fi.ModTime().UnixNano()
	}
	return s
}

const nobody = 65534

// inside is the id in the sandbox of one on disk.
func inside(o driver.Owner, on uint32, user uint32) int {
	if o.User {
		switch on {
		case user:
			return driver.SandboxUID
		case driver.DiskIDBase:
			return 0
		}
		return nobody
	}
	if id := on - o.IDBase; id < driver.IDCount {
		return int(id)
	}
	return nobody
}

// onDisk is the id on disk of one in the sandbox.
func onDisk(o driver.Owner, id int, user uint32) int {
	if id < 0 || id >= driver.IDCount {
		id = nobody
	}
	switch {
	case !o.User:
		return int(o.IDBase) + id
	case id == driver.SandboxUID:
		return int(user)
	}
	// Root, and whoever else the sandbox has made up: no user of this machine.
	return driver.DiskIDBase + id
}

// mapped says whether a file of the host's belongs to somebody in the sandbox, who may then change it.
func mapped(o driver.Owner, st *unix.Stat_t) bool {
	return !o.User || (st.Uid == o.UID || st.Uid == driver.DiskIDBase) && (st.Gid == o.GID || st.Gid == driver.DiskIDBase)
}

// writeTree writes a directory as a tar, below the name prefix, with the ids that its files have in the sandbox. Nothing outside
// the directory is read, whatever its names are turned into meanwhile. It returns what it has written.
func writeTree(ctx context.Context, w io.Writer, root *os.Root, prefix string, owner driver.Owner) (map[string]seen, error) {
	t := tar.NewWriter(w)
	files := map[string]seen{}
	links := map[inode]string{}
	buf := make([]byte, 1<<20)
	err := fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil && !(errors.Is(err, fs.ErrNotExist) && name != ".") {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		fi, err := root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) && name != "." {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		st, ok := statOf(fi)
		if !ok {
			return nil
		}
		h := &tar.Header{
			Name: path.Join(prefix, name), Mode: int64(st.Mode & 0o7777), Uid: inside(owner, st.Uid, owner.UID), Gid: inside(owner, st.Gid, owner.GID),
			ModTime: fi.ModTime(), Format: tar.FormatPAX,
		}
		switch {
		case fi.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case fi.Mode()&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = root.Readlink(name); err != nil {
				return err
			}
		case fi.Mode().IsRegular():
			h.Typeflag, h.Size = tar.TypeReg, fi.Size()
			if st.Nlink > 1 {
				if first, ok := links[inode{st.Dev, st.Ino}]; ok {
					h.Typeflag, h.Size, h.Linkname = tar.TypeLink, 0, first
				} else {
					links[inode{st.Dev, st.Ino}] = h.Name
				}
			}
		default:
			return nil // devices, pipes and sockets are nothing on another machine
		}
		files[name] = seenOf(fi)
		if h.Typeflag != tar.TypeReg {
			return t.WriteHeader(h)
		}
		return writeRegular(t, root, name, h, buf)
	})
	if err != nil {
		return nil, err
	}
	return files, t.Close()
}

// writeRegular writes a file as long as it was said to be, also when it changes meanwhile.
func writeRegular(t *tar.Writer, root *os.Root, name string, h *tar.Header, buf []byte) error {
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{t}, io.LimitReader(f, h.Size), buf)
	if err == nil && n < h.Size {
		return fmt.Errorf("%q became shorter while it was read: %w", name, warren.ErrUnavailable)
	}
	return err
}

func statOf(fi fs.FileInfo) (unix.Stat_t, bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return unix.Stat_t{}, false
	}
	return unix.Stat_t{Dev: st.Dev, Ino: st.Ino, Nlink: st.Nlink, Mode: st.Mode, Uid: st.Uid, Gid: st.Gid}, true
}

// stageName makes up the name of a file that a directory has while it is read back. Nothing in the sandbox knows it.
func stageName() string { return ".warren-sync-" + strings.ToLower(rand.Text()) }

// mirror makes a directory what a tar of its copy says. Files that are equal are not touched. What only the host has changed since
// the two were last equal stays, what both have changed is as the sandbox has it, and what the sandbox has removed goes if the
// host has not changed it.
type mirror struct {
	root   *os.Root
	prefix string
	owner  driver.Owner
	base   uint32
	was    map[string]seen
	log    *slog.Logger
	// stage is the name under which files are written before they are put in place. One that is there was left by a process
	// that was killed.
	stage string

	now     map[string]seen
	dirs    []dirTime
	keep    map[string]bool // names that the sandbox has, but that are the host's
	special map[string]bool // names of what is nothing on another machine
	missed  int             // how many entries could not be placed
}

type dirTime struct {
	name string
	time time.Time
}

// read takes the whole tar. It returns what both sides have now.
func (m *mirror) read(ctx context.Context, r io.Reader) (map[string]seen, error) {
	m.now, m.keep, m.special = map[string]seen{}, map[string]bool{}, map[string]bool{}
	if m.stage == "" {
		m.stage = stageName()
	}
	if err := m.root.Remove(m.stage); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	whole := &ending{r: r}
	t := tar.NewReader(whole)
	top := false
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the engine's copy: %w (%s)", warren.ErrUnavailable, err)
		}
		name, err := m.name(h.Name)
		if err != nil {
			return nil, err
		}
		top = top || name == "."
		if name == m.stage || name == "." && h.Typeflag != tar.TypeDir {
			continue
		}
		if err := m.entry(name, h, t); misplaced(err) {
			// One name must not keep all the others from being read.
			if m.missed++; m.missed == 1 {
				m.log.Warn("what a sandbox wrote to a copied mount has no place on this machine", "name", name, "err", err)
			}
			m.leave(name)
		} else if err != nil {
			return nil, err
		}
	}
	// An engine that cannot read a file any more goes on, and what comes then is not all there is. What is not there would be
	// taken for removed.
	if _, err := io.Copy(io.Discard, whole); err != nil || !top || whole.zeros < tarEnd {
		return nil, fmt.Errorf("the engine's copy is not whole: %w (%v)", warren.ErrUnavailable, err)
	}
	if m.missed > 1 {
		m.log.Warn("entries of a copied mount were passed over", "count", m.missed)
	}
	if err := m.removeOld(); err != nil {
		return nil, err
	}
	for _, d := range slices.Backward(m.dirs) {
		if fi, err := m.root.Lstat(d.name); err == nil && fi.ModTime().Unix() == d.time.Unix() {
			continue
		}
		if err := m.root.Chtimes(d.name, d.time, d.time); err != nil && !misplaced(err) {
			return nil, err
		}
	}
	return m.now, m.flush()
}

// errOthers says that something of somebody else's is in the way.
var errOthers = errors.New("it would remove what belongs to others")

// misplaced says that an error is about one name, which something else on this machine does not agree with. All else, such as a
// full disk or an archive that breaks off, is about the whole.
func misplaced(err error) bool {
	if err == nil || errors.Is(err, warren.ErrUnavailable) {
		return false
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return slices.Contains([]syscall.Errno{
			unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.EEXIST, unix.ENOTEMPTY, unix.ELOOP, unix.ENAMETOOLONG, unix.EMLINK, unix.EXDEV, unix.EBUSY,
			unix.EINVAL, unix.EILSEQ, unix.EFBIG,
		}, errno)
	}
	// A name that leads out of the directory through a link has no number.
	_, name := errors.AsType[*fs.PathError](err)
	_, link := errors.AsType[*os.LinkError](err)
	return name || link || errors.Is(err, errOthers)
}

// tarEnd is how many zeros end a tar.
const tarEnd = 1024

// ending counts the zeros with which what was read ends.
type ending struct {
	r     io.Reader
	zeros int
}

// Read implements io.Reader.
func (e *ending) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if rest := len(bytes.TrimRight(p[:n], "\x00")); rest == 0 {
		e.zeros += n
	} else {
		e.zeros = n - rest
	}
	return n, err
}

// flush waits until all of it is on disk.
func (m *mirror) flush() error {
	f, err := m.root.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// name is the name of an entry below the directory.
func (m *mirror) name(in string) (string, error) {
	name, ok := strings.CutPrefix(path.Clean(in), m.prefix)
	if name == "" {
		name = "/."
	}
	if name = strings.TrimPrefix(name, "/"); !ok || !filepath.IsLocal(name) {
		return "", fmt.Errorf("the engine's copy has the name %q, which leads out of it: %w", in, warren.ErrUnavailable)
	}
	return name, nil
}

// id is the id in the sandbox of an entry. Engines with user namespaces write the host's ids into what they hand out, or those
// inside; the two do not overlap.
func (m *mirror) id(in int) int {
	if m.base > 0 && in >= int(m.base) && in < int(m.base)+driver.IDCount {
		return in - int(m.base)
	}
	return in
}

func (m *mirror) entry(name string, h *tar.Header, content io.Reader) error {
	there, err := m.root.Lstat(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return err
	}
	if there != nil {
		if st, ok := statOf(there); !ok || !mapped(m.owner, &st) {
			m.leave(name) // nobody in the sandbox may change it
			return nil
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err = m.directory(name, there); err == nil {
			m.dirs = append(m.dirs, dirTime{name, h.ModTime})
		}
	case tar.TypeReg:
		if m.hostOnly(name, there, h) {
			m.leave(name)
			return nil
		}
		err = m.regular(name, there, h, content)
	case tar.TypeSymlink:
		if target, rerr := m.root.Readlink(name); there != nil && rerr == nil && target == h.Linkname {
			break
		}
		if err = m.clear(name, there); err == nil {
			err = m.root.Symlink(h.Linkname, name)
		}
	case tar.TypeLink:
		return m.link(name, there, h)
	default:
		m.log.Debug("a special file of a copied mount is left out", "name", name)
		m.special[name] = true
		return nil
	}
	if err != nil {
		return err
	}
	return m.finish(name, h)
}

// leave leaves a file as the host has it. What both sides had last stays what it was.
func (m *mirror) leave(name string) {
	m.keep[name] = true
	if was, ok := m.was[name]; ok {
		m.now[name] = was
	}
}

// hostOnly says that the host has changed a file since the two were equal, and the sandbox has not. The times of what an
// engine hands out are whole seconds.
func (m *mirror) hostOnly(name string, there fs.FileInfo, h *tar.Header) bool {
	was, known := m.was[name]
	return known && there != nil && there.Mode().IsRegular() && was.Mode.IsRegular() && seenOf(there) != was &&
		h.Size == was.Size && h.ModTime.Unix() == time.Unix(0, was.Time).Unix() && (h.FileInfo().Mode() == was.Mode || m.owner.User && h.FileInfo().Mode()&^setID == was.Mode)
}

const setID = fs.ModeSetuid | fs.ModeSetgid

// finish gives an entry its owner, mode and time where they differ, and notes it.
func (m *mirror) finish(name string, h *tar.Header) error {
	fi, err := m.root.Lstat(name)
	if err != nil {
		return err
	}
	st, _ := statOf(fi)
	uid, gid := onDisk(m.owner, m.id(h.Uid), m.owner.UID), onDisk(m.owner, m.id(h.Gid), m.owner.GID)
	chowned := int(st.Uid) != uid || int(st.Gid) != gid
	if chowned {
		if err := m.root.Lchown(name, uid, gid); err != nil {
			return err
		}
	}
	const bits = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky
	mode := h.FileInfo().Mode() & bits
	if m.owner.User {
		// It would be the user's own program here. Only what the user has given them and the sandbox has not changed keeps them.
		mode &^= setID
		if !chowned {
			mode |= h.FileInfo().Mode() & fi.Mode() & setID
		}
	}
	// After the owner, whose change takes bits away.
	if h.Typeflag != tar.TypeSymlink && (chowned || fi.Mode()&bits != mode) {
		if err := m.root.Chmod(name, mode); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeReg && fi.ModTime().Unix() != h.ModTime.Unix() {
		if err := m.root.Chtimes(name, h.ModTime, h.ModTime); err != nil {
			return err
		}
	}
	if fi, err = m.root.Lstat(name); err != nil {
		return err
	}
	m.now[name] = seenOf(fi)
	return nil
}

func (m *mirror) directory(name string, there fs.FileInfo) error {
	if there != nil && there.IsDir() {
		return nil
	}
	if err := m.clear(name, there); err != nil {
		return err
	}
	return m.root.Mkdir(name, 0o700)
}

// clear removes what is in the way of something of another kind.
func (m *mirror) clear(name string, there fs.FileInfo) error {
	if there == nil {
		return nil
	}
	return m.remove(name)
}

// remove removes all of a directory, or a file. In a user's directory nothing goes if there is something of others below.
func (m *mirror) remove(name string) error {
	if !m.owner.User {
		return m.root.RemoveAll(name)
	}
	names, err := m.own(nil, name)
	if err != nil {
		return err
	}
	for _, name := range slices.Backward(names) {
		// One by one: what others put there meanwhile keeps its directory.
		if err := m.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// own adds a name, and all that is below it, when it is the user's.
func (m *mirror) own(names []string, name string) ([]string, error) {
	fi, err := m.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return names, nil
	}
	if err != nil {
		return nil, err
	}
	if st, ok := statOf(fi); !ok || !mapped(m.owner, &st) {
		return nil, errOthers
	}
	names = append(names, name)
	if !fi.IsDir() {
		return names, nil
	}
	f, err := m.root.Open(name)
	if err != nil {
		return nil, err
	}
	below, err := f.Readdirnames(-1)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	for _, b := range below {
		if names, err = m.own(names, name+"/"+b); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// regular writes a file unless it has the content already. A file that is written is put in place when it is whole.
func (m *mirror) regular(name string, there fs.FileInfo, h *tar.Header, content io.Reader) error {
	var same int64
	if there != nil && there.Mode().IsRegular() {
		f, err := m.root.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		equal, rest, err := compare(f, content, &same)
		if err != nil || equal {
			return err
		}
		// What was equal so far is on the host already.
		content = io.MultiReader(io.NewSectionReader(f, 0, same), bytes.NewReader(rest), content)
	}
	tmp, err := m.root.OpenFile(m.stage, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := writeHoles(tmp, content)
	if err = errors.Join(err, tmp.Close()); err == nil && n != h.Size {
		err = fmt.Errorf("%q has %d bytes of %d: %w", name, n, h.Size, warren.ErrUnavailable)
	}
	if err == nil && there != nil && there.IsDir() {
		err = m.remove(name)
	}
	if err == nil {
		err = m.root.Rename(m.stage, name)
	}
	if err != nil {
		return errors.Join(err, m.root.Remove(m.stage))
	}
	return nil
}

// holeSize is how many zeros are left out of a file. A file that is all holes in the sandbox would else fill the host's disk.
const holeSize = 64 << 10

// writeHoles copies a file's content, where zeros become holes.
func writeHoles(f *os.File, content io.Reader) (n int64, err error) {
	buf, zeros := make([]byte, holeSize), make([]byte, holeSize)
	for {
		k, rerr := io.ReadFull(content, buf)
		if !bytes.Equal(buf[:k], zeros[:k]) {
			if _, err := f.WriteAt(buf[:k], n); err != nil {
				return n, err
			}
		}
		n += int64(k)
		switch {
		case errors.Is(rerr, io.EOF), errors.Is(rerr, io.ErrUnexpectedEOF) && k > 0:
			return n, f.Truncate(n)
		case rerr != nil:
			return n, rerr
		}
	}
}

// compare reads a file and new content side by side. same is how many bytes are equal; rest is what of the new content was read
// beyond that.
func compare(old io.Reader, content io.Reader, same *int64) (equal bool, rest []byte, err error) {
	a, b := make([]byte, 256<<10), make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(content, b)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return false, nil, err
		}
		k, oerr := io.ReadFull(old, a[:max(n, 1)])
		if oerr != nil && !errors.Is(oerr, io.EOF) && !errors.Is(oerr, io.ErrUnexpectedEOF) {
			return false, nil, oerr
		}
		switch {
		case n == 0 && k == 0:
			return true, nil, nil
		case k != n || !bytes.Equal(a[:k], b[:n]):
			return false, bytes.Clone(b[:n]), nil
		}
		*same += int64(n)
	}
}

func (m *mirror) link(name string, there fs.FileInfo, h *tar.Header) error {
	first, err := m.name(h.Linkname)
	if err != nil {
		return err
	}
	if m.special[first] {
		m.special[name] = true
		return nil
	}
	other, err := m.root.Lstat(first)
	if err != nil {
		return err
	}
	if st, ok := statOf(other); !ok || !mapped(m.owner, &st) {
		return errOthers
	}
	if there == nil || !os.SameFile(there, other) {
		if err := m.clear(name, there); err != nil {
			return err
		}
		if err := m.root.Link(first, name); err != nil {
			return err
		}
	}
	m.now[name] = seenOf(other)
	return nil
}

// removeOld removes what was in the copy and is there no more.
func (m *mirror) removeOld() error {
	names := slices.Sorted(maps.Keys(m.was))
	for _, name := range slices.Backward(names) { // what is in a directory comes after it
		if _, ok := m.now[name]; ok || m.keep[name] {
			continue
		}
		there, err := m.root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return err
		}
		if st, ok := statOf(there); !ok || !mapped(m.owner, &st) || !there.IsDir() && seenOf(there) != m.was[name] {
			continue
		}
		if err := m.root.Remove(name); err != nil && !misplaced(err) {
			return err
		}
	}
	return nil
}

func fileDigest(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// copyFile copies a program.
func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}
