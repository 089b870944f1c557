package workspace

import (
	"bufio"
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
)

// A workspace is copied at one instant while a sandbox works in it: most is copied beforehand, then the sandbox stands
// still, and only what has changed is copied again. Whether a file has changed is told by its inode, its names and its
// time of change, which nobody but the kernel can set. Two cases are not told by it, and such files count as changed:
//
//   - a change within one tick of the kernel's clock after another, so what changed just before it was copied;
//   - a write through a memory mapping to a page that was dirty already, which moves no time. All is written to disk
//     first, after which the next such write does move it, so what changed after that counts as changed.
//
// Successive copies of one workspace share what has not changed, by hard links: a copy is never written to.

// trees are the parts of a workspace that are copied.
var trees = []string{"files", "home", "git"}

// tick is more than the kernel's clock moves at a time.
const tick = 50 * time.Millisecond

// What is at most copied while the sandbox stands still without a copy beforehand, which itself would take longer.
const (
	fewEntries = 200
	fewBytes   = 4 << 20
)

// stamps say what a tree was when it was copied.
type stamps struct {
	// Base is the copy.
	Base warren.WorkspaceID
	// Before is the time after whose changes no stamp is taken, in nanoseconds.
	Before int64
	Seen   map[uint64]stamp
}

// stamp is that of a file under its inode's number.
type stamp struct {
	Parent  uint64
	Name    uint64 // a hash
	Changed int64
	Size    int64
}

func stampOf(st *unix.Stat_t, parent uint64, name string) stamp {
	h := fnv.New64a()
	h.Write([]byte(name)) // never fails
	s := stamp{Parent: parent, Name: h.Sum64(), Size: st.Size, Changed: st.Ctim.Nano()}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		s.Size, s.Changed = 0, 0 // what is in it has stamps of its own
	}
	return s
}

func (s *stamps) take(st *unix.Stat_t, parent uint64, name string) {
	if s == nil || st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Ctim.Nano() >= s.Before {
		return
	}
	s.Seen[st.Ino] = stampOf(st, parent, name)
}

func (s *stamps) has(st *unix.Stat_t, parent uint64, name string) bool {
	if s == nil {
		return false
	}
	old, ok := s.Seen[st.Ino]
	return ok && old == stampOf(st, parent, name)
}

// Copying is a copy of a workspace under way.
type Copying struct {
	s        *Store
	from, to warren.WorkspaceID
	keep     bool
	tmp      string
	meta     *meta
	tree     *treeCopy
	early    bool // most has been copied
	method   string
	unlock   func()
}

// copyOptions say what a copy is for.
type copyOptions struct {
	// instant: the source stands still between BeginCopy and the end of Finish, but not before.
	instant bool
	// keep: the copy stays as it is, so that later copies of the same workspace can share what is in it.
	keep bool
}

// BeginCopy begins a copy of from that becomes workspace to, while a sandbox works in from. The sandbox has to stand
// still from then on until [Copying.Finish] has returned: the copy is what from is at that instant. With keep nobody
// writes to the copy, and it shares what has not changed with the last such copy of the same workspace.
// The caller calls [Copying.Abort] when it is done, whatever happened.
func (s *Store) BeginCopy(ctx context.Context, from, to warren.WorkspaceID, keep bool) (*Copying, error) {
	return s.beginCopy(ctx, from, to, copyOptions{instant: true, keep: keep})
}

func (s *Store) beginCopy(ctx context.Context, from, to warren.WorkspaceID, o copyOptions) (_ *Copying, err error) {
	if from == to {
		return nil, fmt.Errorf("workspace %s to itself: %w", from, warren.ErrInvalid)
	}
	unlock, err := s.lock(ctx, to)
	if err != nil {
		return nil, err
	}
	c := &Copying{s: s, from: from, to: to, keep: o.keep, unlock: unlock, tmp: filepath.Join(s.o.Dir, tmpPrefix+"copy~"+string(to))}
	defer func() {
		if err != nil {
			c.Abort()
		}
	}()
	if c.meta, err = s.ready(from); err != nil {
		return nil, err
	}
	if _, err := s.load(to); err == nil {
		return nil, fmt.Errorf("workspace %s: %w", to, warren.ErrExists)
	} else if !errors.Is(err, warren.ErrNotFound) {
		return nil, err
	}
	if err := removeAll(c.tmp); err != nil {
		return nil, err
	}
	if s.copier.method == bySnapshot && isSubvolume(s.dir(from)) {
		return c, nil
	}
	c.tree = &treeCopy{ctx: ctx, links: map[fileID]string{}, reflink: true}
	if o.instant {
		if err := c.ahead(ctx); err != nil {
			return nil, c.failed(err)
		}
	}
	return c, nil
}

// ahead copies what will hardly change any more, unless it is so little that it can be copied at the instant itself.
func (c *Copying) ahead(ctx context.Context) error {
	c.tree.stamps = &stamps{Base: c.to, Seen: map[uint64]stamp{}}
	m := &measure{ctx: ctx, seen: map[fileID]uint64{}}
	m.enough = func() bool { return m.entries > fewEntries || m.bytes > fewBytes }
	for _, d := range trees {
		if err := m.tree(filepath.Join(c.s.dir(c.from), d)); err != nil && !errors.Is(err, errEnough) {
			return err
		}
	}
	if !m.enough() {
		return nil
	}
	if c.keep {
		c.tree.shared = c.s.lastStamps(c.from)
	}
	c.tree.stamps.Before = time.Now().Add(-tick).UnixNano()
	if err := syncFS(c.s.dir(c.from)); err != nil {
		return err
	}
	c.early = true
	return c.pass(ctx, false)
}

// pass copies all parts, or brings them up to date.
func (c *Copying) pass(ctx context.Context, update bool) error {
	c.tree.ctx = ctx
	if !update {
		if err := c.s.copier.mkdir(c.tmp); err != nil {
			return err
		}
	}
	for _, d := range trees {
		base := ""
		if c.tree.shared != nil {
			base = filepath.Join(c.s.dir(c.tree.shared.Base), d)
		}
		if err := c.tree.tree(filepath.Join(c.s.dir(c.from), d), filepath.Join(c.tmp, d), base, update); err != nil {
			return err
		}
	}
	return nil
}

// Finish makes the copy what its source is now. The sandbox may run on afterwards.
func (c *Copying) Finish(ctx context.Context) error {
	err := c.finish(ctx)
	if err == nil {
		next := *c.meta
		// The commits so far are the copy's too; the branch is not.
		next.Created, next.HeadBranch = time.Now().UTC(), ""
		err = save(c.tmp, &next, true) // here, where as a rule something else takes longer
	}
	return c.failed(err)
}

func (c *Copying) finish(ctx context.Context) error {
	from := c.s.dir(c.from)
	if c.tree == nil {
		if err := snapshot(from, c.tmp); err != nil {
			return err
		}
		c.method = bySnapshot
		scratch, err := filepath.Glob(filepath.Join(c.tmp, tmpPrefix+"*"))
		for _, d := range append(scratch, filepath.Join(c.tmp, markDir)) {
			err = errors.Join(err, removeAll(d))
		}
		return err
	}
	if err := c.pass(ctx, c.early); err != nil {
		return err
	}
	if c.method = byCopy; c.tree.reflink && c.s.copier.method != byCopy {
		c.method = byReflink
	}
	return nil
}

// Commit makes the copy a workspace, which is on disk when it returns if it is to be kept, and says how it was made.
func (c *Copying) Commit(ctx context.Context) (method string, err error) {
	defer func() { err = c.failed(err) }()
	if c.keep {
		if err := syncFS(c.tmp); err != nil {
			return "", err
		}
	}
	if err := ctx.Err(); err != nil {
		return "", err
	}
	dir := c.s.dir(c.to)
	if err := removeAll(dir); err != nil {
		return "", err
	}
	if err := os.Rename(c.tmp, dir); err != nil {
		return "", err
	}
	if c.keep && c.early {
		c.s.saveStamps(c.from, c.tree.stamps)
	}
	return c.method, nil
}

// Abort removes what there is of a copy that was not committed.
func (c *Copying) Abort() {
	if c.unlock == nil {
		return
	}
	if err := removeAll(c.tmp); err != nil {
		c.s.o.Logger.Warn("unfinished copy not removed until the next start", "workspace", c.to, "err", err)
	}
	c.unlock()
	c.unlock = nil
}

func (c *Copying) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("copy workspace %s to %s: %w", c.from, c.to, err)
}

// Replace makes a workspace what from is, all of it or nothing, even when the machine fails in the middle. No sandbox may
// have it. Its last commit stays its own.
func (s *Store) Replace(ctx context.Context, id, from warren.WorkspaceID) error {
	r, err := s.BeginReplace(ctx, id, from)
	if err != nil {
		return err
	}
	defer r.Abort()
	return r.Commit(ctx)
}

// Replacing is what a workspace is to become, aside and on disk.
type Replacing struct{ c *Copying }

// ReplaceNeeds returns how many bytes [Store.BeginReplace] writes.
func (s *Store) ReplaceNeeds(ctx context.Context, from warren.WorkspaceID) (int64, error) {
	if s.copier.method != byCopy {
		return 0, nil
	}
	return s.Size(ctx, from)
}

// BeginReplace makes all that [Store.Replace] needs, and changes nothing yet: what fails for want of room fails here. A sandbox
// may have the workspace until [Replacing.Commit], which writes no data. Nobody else changes the workspace before
// [Replacing.Abort], which the caller calls when it is done, whatever happened.
func (s *Store) BeginReplace(ctx context.Context, id, from warren.WorkspaceID) (_ *Replacing, err error) {
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return nil, err
	}
	c := &Copying{s: s, from: from, to: id, tmp: filepath.Join(s.o.Dir, tmpPrefix+"copy~"+string(id)), unlock: unlock}
	defer func() {
		if err != nil {
			c.Abort()
			err = noRoom(err)
		}
	}()
	m, err := s.load(id)
	if err != nil {
		return nil, err
	}
	if c.meta, err = s.ready(from); err != nil {
		return nil, err
	}
	if c.meta.RepoID != m.RepoID || c.meta.Commit != m.Commit {
		return nil, fmt.Errorf("workspace %s was cut from another repository or commit than %s: %w", id, from, warren.ErrInvalid)
	}
	if err := removeAll(c.tmp); err != nil {
		return nil, err
	}
	if s.copier.method != bySnapshot || !isSubvolume(s.dir(from)) {
		c.tree = &treeCopy{ctx: ctx, links: map[fileID]string{}, reflink: true}
	}
	if err := c.finish(ctx); err != nil {
		return nil, fmt.Errorf("replace workspace %s: %w", id, err)
	}
	next := *m
	next.Populated = true
	if err := save(c.tmp, &next, true); err != nil {
		return nil, err
	}
	if err := syncFS(c.tmp); err != nil {
		return nil, err
	}
	return &Replacing{c}, nil
}

// Commit puts it in the workspace's place, in one step. No sandbox may have the workspace.
func (r *Replacing) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	id := r.c.to
	// The mark stays, with which what is there then is compared. A crash between the two may cost it, and nothing else.
	mark, aside := filepath.Join(r.c.s.dir(id), markDir), filepath.Join(r.c.tmp, markDir)
	switch err := os.Rename(mark, aside); {
	case errors.Is(err, unix.EXDEV): // a btrfs subvolume each
		t := &treeCopy{ctx: ctx, links: map[fileID]string{}, reflink: true}
		if err := t.tree(mark, aside, "", false); err != nil {
			r.c.s.o.Logger.Warn("the mark of the workspace is lost", "workspace", id, "err", errors.Join(err, removeAll(aside)))
		}
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		r.c.s.o.Logger.Warn("the mark of the workspace is lost", "workspace", id, "err", err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, r.c.tmp, unix.AT_FDCWD, r.c.s.dir(id), unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("replace workspace %s: %w", id, err)
	}
	return nil // and Abort removes what it was
}

// Abort removes what is aside: what did not take the workspace's place, or what had it before.
func (r *Replacing) Abort() { r.c.Abort() }

// noRoom says of a full disk that it is one.
func noRoom(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", err, warren.ErrExhausted)
	}
	return err
}

// Adopt makes a copy, which nobody else uses, a workspace under another id.
func (s *Store) Adopt(ctx context.Context, from, to warren.WorkspaceID) error {
	unlock, err := s.lock(ctx, to)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.ready(from); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, s.dir(from), unix.AT_FDCWD, s.dir(to), unix.RENAME_NOREPLACE); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("workspace %s: %w", to, warren.ErrExists)
		}
		return fmt.Errorf("workspace %s: %w", to, err)
	}
	os.Remove(s.lockName(from))
	return nil
}

// stampsName is the file in a workspace that says what has been copied of it.
const stampsName = "stamps"

// lastStamps returns the stamps of the last copy that was kept, nil when there are none of use.
func (s *Store) lastStamps(id warren.WorkspaceID) *stamps {
	f, err := os.Open(filepath.Join(s.dir(id), stampsName))
	if err != nil {
		return nil
	}
	defer f.Close()
	st := &stamps{}
	// One that is damaged shares nothing. What it says is only believed of files that have not changed since.
	if err := gob.NewDecoder(bufio.NewReader(f)).Decode(st); err != nil || checkID(st.Base) != nil {
		return nil
	}
	if _, err := s.load(st.Base); err != nil {
		return nil
	}
	return st
}

// saveStamps keeps stamps for the next copy. Without them that shares nothing.
func (s *Store) saveStamps(id warren.WorkspaceID, st *stamps) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(st)
	if err == nil {
		err = writeFile(s.dir(id), stampsName, b.Bytes(), 0o600, false)
	}
	if err != nil {
		s.o.Logger.Warn("the next copy of the workspace shares nothing with this one", "workspace", id, "err", err)
	}
}

// Sync writes the files of a workspace to disk for good, along with whatever else is on its file system.
func (s *Store) Sync(ctx context.Context, id warren.WorkspaceID) error {
	if _, err := s.Get(ctx, id); err != nil {
		return err
	}
	return syncFS(s.dir(id))
}

// syncFS writes what is dirty on the file system of a directory to disk.
func syncFS(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

// removeAt removes a file or a tree.
func removeAt(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		return removeAll(fmt.Sprintf("/proc/self/fd/%d/%s", dir, name))
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func namesIn(dir int) (map[string]bool, error) {
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "copy")
	defer f.Close()
	list, err := f.Readdirnames(-1)
	names := make(map[string]bool, len(list))
	for _, n := range list {
		names[n] = true
	}
	return names, err
}
