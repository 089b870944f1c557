//go:build linux

package keeper

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// pool holds executions that gVisor has created before they are asked for. Each has its processes, its range of ids, its control
// group and its root; empty directories stand where the mounts will be. Their real mounts are put over these in the mount
// namespace of the file server, which opens them when the sandbox begins to run and not before.
//
// On record an entry is a create that has begun, so the keeper after one that was killed removes it. No list shows it.
type pool struct {
	k *Keeper

	mu      sync.Mutex
	classes map[string]*class
	filling bool
	closed  bool
	used    time.Time      // when somebody last asked, or was given what he asked for
	n       int            // classes there have ever been
	work    sync.WaitGroup // what goes on in the background; nothing is added once closed is set
}

// class is what the entries for one kind of spec are made from.
type class struct {
	spec  *protocol.Spec
	dir   string   // where the parts of the root are mounted, to be cloned for each entry
	parts []string // by index of the descriptors of spec; "" for one that is not needed
	want  int
	ready []*spare
}

// spare is an execution of the pool.
type spare struct {
	*sandbox
	made *made
}

// maxPooled bounds the entries of all classes together.
const maxPooled = 64

// quiet is how long the pool waits after somebody asked, or after what he asked for has begun to run: what was asked for goes first, and then
// the first commands in it. Where somebody asks all the time it waits no longer than maxQuiet.
const (
	quiet    = 200 * time.Millisecond
	maxQuiet = 5 * quiet
)

// settle is how long an execution may take after its create to be ready for its mounts; machines that are very busy need seconds.
const settle = 30 * time.Second

func newPool(k *Keeper) *pool { return &pool{k: k, classes: make(map[string]*class)} }

// classOf names what cannot be changed in an execution that is there.
func classOf(spec *protocol.Spec) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %q %+v %v", spec.Root, spec.GuestBuild, spec.Limits, spec.Debug)
	for _, m := range spec.Mounts {
		fmt.Fprintf(&b, " %q %v", m.Target, m.Writable)
	}
	return b.String()
}

// warm keeps n executions for specs like this one from now on; with 0 it ends that.
func (p *pool) warm(spec *protocol.Spec, files []*os.File, n int) error {
	if err := checkSpec(spec, len(files)); err != nil {
		return err
	}
	if n < 0 || n > maxPooled {
		return protocol.Errorf(protocol.KindInvalid, "a pool of %d: 0 to %d can be kept", n, maxPooled)
	}
	for i, m := range spec.Mounts {
		for _, o := range spec.Mounts[:i] {
			if within(m.Target, []string{o.Target}) || within(o.Target, []string{m.Target}) {
				return protocol.Errorf(protocol.KindUnsupported, "the mount on %s lies in that on %s, and the pool prepares mounts beside each other only", m.Target, o.Target)
			}
		}
		spec.Mounts[i].Later = true
	}
	key := fmt.Sprintf("%s %q", classOf(spec), spec.Env)
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return protocol.Errorf(protocol.KindUnavailable, "the keeper is being replaced; try again")
	}
	total := n
	for other, c := range p.classes {
		if other != key {
			total += c.want
		}
	}
	if total > maxPooled {
		p.mu.Unlock()
		return protocol.Errorf(protocol.KindExhausted, "the pool would have %d executions of all kinds, and at most %d can be kept", total, maxPooled)
	}
	c := p.classes[key]
	if c == nil && n > 0 {
		var err error
		if c, err = p.newClass(spec, files); err != nil {
			p.mu.Unlock()
			return err
		}
		p.classes[key] = c
	}
	var gone []*spare
	if c != nil {
		c.want = n
		for len(c.ready) > n {
			gone = append(gone, c.ready[0])
			c.ready = c.ready[1:]
		}
		if n == 0 {
			delete(p.classes, key)
			defer c.unmount(p.k)
		}
	}
	p.mu.Unlock()
	for _, e := range gone {
		p.discard(e)
	}
	p.refill()
	return nil
}

// newClass mounts the parts of the root in the keeper's own namespace; p.mu is held.
func (p *pool) newClass(spec *protocol.Spec, files []*os.File) (_ *class, err error) {
	p.n++
	c := &class{spec: spec, dir: filepath.Join(stageDir, ".pool"+strconv.Itoa(p.n))}
	if err := os.Mkdir(c.dir, 0o700); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.unmount(p.k)
		}
	}()
	for i, f := range files {
		fi, err := f.Stat()
		if err != nil {
			return nil, err
		}
		at := filepath.Join(c.dir, strconv.Itoa(i))
		if err := attachNew(int(f.Fd()), at, fi.IsDir()); err != nil {
			return nil, fmt.Errorf("keep a part of the root for the pool: %w", err)
		}
		c.parts = append(c.parts, at)
	}
	return c, nil
}

func (c *class) unmount(k *Keeper) {
	if err := (&stage{dir: c.dir}).close(); err != nil {
		k.log.Error("remove the mounts of a pool", "error", err)
	}
}

// clones returns descriptors as those of the message that a sandbox is created by.
func (c *class) clones() (files []*os.File, err error) {
	for _, at := range c.parts {
		fd, err := unix.OpenTree(unix.AT_FDCWD, at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return files, err
		}
		files = append(files, os.NewFile(uintptr(fd), "tree"))
	}
	return files, nil
}

// take returns an entry that fits, or nil. For a cold start the environment of the guest must be the same too, which gVisor
// reads at a create; a guest in an image has its own. The host name is that of the entry until the guest sets another.
func (p *pool) take(spec *protocol.Spec, cold bool) *spare {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = time.Now()
	want := classOf(spec)
	for _, c := range p.classes {
		if classOf(c.spec) != want || cold && !slices.Equal(c.spec.Env, spec.Env) {
			continue
		}
		if e := p.takeFrom(c); e != nil {
			return e
		}
	}
	return nil
}

// takeFrom takes the oldest entry of a class, which has done most of what it does ahead; p.mu is held.
func (p *pool) takeFrom(c *class) *spare {
	for len(c.ready) > 0 {
		e := c.ready[0]
		c.ready = slices.Delete(c.ready, 0, 1)
		if e.meta.Sandbox.alive() && e.meta.Gofer.alive() {
			return e
		}
		p.k.log.Warn("an execution of the pool has ended", "entry", e.id)
		if !p.closed {
			p.work.Go(func() { p.discard(e) })
		}
	}
	return nil
}

// busy has the pool wait: somebody is about to use what has begun to run.
func (p *pool) busy() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = time.Now()
}

// count returns how many entries are ready.
func (p *pool) count() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.classes {
		n += len(c.ready)
	}
	return n
}

// refill makes what is missing in the background, one at a time.
func (p *pool) refill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.filling || p.closed || p.lacking() == nil {
		return
	}
	p.filling = true
	p.work.Go(func() {
		for p.fillOne() {
		}
	})
}

// lacking returns a class that lacks entries; p.mu is held.
func (p *pool) lacking() *class {
	for _, c := range p.classes {
		if len(c.ready) < c.want {
			return c
		}
	}
	return nil
}

// fillOne makes one entry and says whether to go on.
func (p *pool) fillOne() bool {
	for begun := time.Now(); time.Since(begun) < maxQuiet; {
		p.mu.Lock()
		wait, closed := quiet-time.Since(p.used), p.closed
		p.mu.Unlock()
		if wait <= 0 || closed {
			break
		}
		time.Sleep(wait)
	}
	if !p.k.starts.TryAcquire(1) { // what was asked for goes first
		p.mu.Lock()
		defer p.mu.Unlock()
		p.used = time.Now()
		p.filling = !p.closed
		return p.filling
	}
	defer p.k.starts.Release(1)
	p.mu.Lock()
	c := p.lacking()
	if c == nil || p.closed {
		p.filling = false
		p.mu.Unlock()
		return false
	}
	spec := *c.spec
	files, err := c.clones()
	p.mu.Unlock()
	var e *spare
	if err == nil {
		e, err = p.newEntry(&spec, files)
	}
	for _, f := range files {
		f.Close()
	}
	p.mu.Lock()
	if err != nil {
		p.k.log.Error("make an execution for the pool", "error", err)
		p.filling = false // until somebody asks again
		p.mu.Unlock()
		return false
	}
	if p.closed || len(c.ready) >= c.want {
		p.mu.Unlock()
		p.discard(e)
		return true
	}
	c.ready = append(c.ready, e)
	p.mu.Unlock()
	return true
}

// newEntry makes an execution with ids of its own and nothing in it.
func (p *pool) newEntry(spec *protocol.Spec, files []*os.File) (*spare, error) {
	k := p.k
	spec.ID = "pool-" + strings.ToLower(rand.Text())
	k.mu.Lock()
	if k.retiring {
		k.mu.Unlock()
		return nil, errors.New("the keeper is being replaced")
	}
	s, err := k.newSandbox(spec, func() {})
	k.mu.Unlock()
	if err != nil {
		return nil, err
	}
	defer k.calls.Done()
	close(s.created)
	e := &spare{sandbox: s}
	if e.made, err = k.make(context.Background(), s, spec, files); err == nil {
		err = s.group.place(s.cont.Sandbox.Getpid(), s.cont.GoferPid.Load())
		e.made.placed = true
	}
	if err == nil {
		err = atRoot(s.meta.Gofer, e.made.root)
	}
	if err == nil {
		// What is put in later must be found where it was made.
		_, err = os.Lstat(filepath.Join(sandboxDir(s.id), "top", "etc", "hostname"))
	}
	if err != nil {
		p.discard(e)
		return nil, err
	}
	return e, nil
}

// atRoot waits until a file server has made root its own: it does so as its last step, of which the create does not wait to hear,
// and before that the places of the mounts are not where they are looked for.
func atRoot(gofer process, root os.FileInfo) error {
	for end := time.Now().Add(settle); ; time.Sleep(time.Millisecond) {
		fi, err := os.Stat(fmt.Sprintf("/proc/%d/root/.", gofer.PID))
		switch {
		case !gofer.alive():
			return errors.New("the file server has ended")
		case err == nil && os.SameFile(fi, root):
			return nil
		case time.Now().After(end):
			return fmt.Errorf("the file server has not changed to its root within %v", settle)
		}
	}
}

// discard ends an entry and removes what there is of it.
func (p *pool) discard(e *spare) {
	if e.made != nil {
		e.made.close()
	}
	err := p.k.endRuntime(e.sandbox)
	if err == nil {
		err = os.RemoveAll(sandboxDir(e.id))
	}
	if err != nil {
		p.k.log.Error("remove an execution of the pool", "entry", e.id, "error", err)
		return
	}
	p.k.mu.Lock()
	delete(p.k.ranges, e.meta.Range)
	p.k.mu.Unlock()
}

// empty removes all entries and classes; with end no others are made any more.
func (p *pool) empty(end bool) {
	p.mu.Lock()
	p.closed = p.closed || end
	classes := p.classes
	p.classes = make(map[string]*class)
	var gone []*spare
	for _, c := range classes {
		c.want = 0
		gone = append(gone, c.ready...)
		c.ready = nil
	}
	p.mu.Unlock()
	var wg sync.WaitGroup
	for _, e := range gone {
		wg.Go(func() { p.discard(e) })
	}
	wg.Wait()
	if end {
		p.work.Wait()
	}
	for _, c := range classes {
		c.unmount(p.k)
	}
}

// adopt makes an entry the execution of a sandbox. From the first step on it is the sandbox's, which is destroyed when a later
// one fails.
func (k *Keeper) adopt(s *sandbox, e *spare, spec *protocol.Spec, files []*os.File) error {
	if err := os.Rename(sandboxDir(e.id), sandboxDir(s.id)); err != nil {
		k.pool.discard(e)
		return err
	}
	k.mu.Lock()
	delete(k.ranges, s.meta.Range)
	k.mu.Unlock()
	s.mu.Lock()
	s.meta.Range, s.meta.Container = e.meta.Range, e.id
	s.meta.Sandbox, s.meta.Gofer, s.meta.Group = e.meta.Sandbox, e.meta.Gofer, e.meta.Group
	s.group, s.cont, s.kernel = e.group, e.cont, e.kernel
	err := s.meta.save()
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := writeOwn(filepath.Join(sandboxDir(s.id), "top"), spec); err != nil {
		return err
	}
	st := &stage{}
	for _, m := range spec.Mounts {
		if err := k.mapDir(st, m, int(files[m.FD].Fd()), idRange(s.meta.Range)); err != nil {
			return err
		}
	}
	if len(st.unmapped) > 0 {
		k.log.Warn("no idmapped mounts; files belong to nobody inside", "sandbox", s.id, "parts", st.unmapped)
	}
	return mountInside(s.meta.Gofer, spec.Mounts, files)
}

// writeOwn writes the files that are the sandbox's own. Nothing in it has seen them yet.
func writeOwn(top string, spec *protocol.Spec) error {
	root, err := os.OpenRoot(top)
	if err != nil {
		return err
	}
	defer root.Close()
	for name, content := range ownFiles(spec) {
		f, err := root.OpenFile(strings.TrimPrefix(name, "/"), os.O_WRONLY|os.O_TRUNC, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(content)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// mountInside attaches the mounts of a spec, which are mapped, over the empty directories that a gofer has in their places.
func mountInside(gofer process, mounts []protocol.Mount, files []*os.File) error {
	if len(mounts) == 0 {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		done <- func() error {
			dir := fmt.Sprintf("/proc/%d/", gofer.PID)
			root, err := unix.Open(dir+"root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(root)
			ns, err := unix.Open(dir+"ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(ns)
			if !gofer.alive() { // its number may be another's
				return errors.New("the file server has ended")
			}
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
				return err
			}
			for _, m := range mounts {
				at, err := unix.Openat2(root, m.Target, &unix.OpenHow{
					Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
					Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
				})
				if err != nil {
					return fmt.Errorf("find %s: %w", m.Target, err)
				}
				err = unix.MoveMount(int(files[m.FD].Fd()), "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
				unix.Close(at)
				if err != nil {
					return fmt.Errorf("mount on %s: %w", m.Target, err)
				}
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("put the mounts into an execution of the pool: %w", err)
	}
	return nil
}
