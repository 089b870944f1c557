package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process while a snapshot is taken or removed, in order.
var (
	fpSnapshotIntent  = failpoint.New("engine.snapshot.intent")
	fpSnapshotBegun   = failpoint.New("engine.snapshot.begun")
	fpSnapshotFrozen  = failpoint.New("engine.snapshot.frozen")
	fpSnapshotThawed  = failpoint.New("engine.snapshot.thawed")
	fpSnapshotWritten = failpoint.New("engine.snapshot.written")
	fpSnapshotReady   = failpoint.New("engine.snapshot.ready")
	fpSnapshotGone    = failpoint.New("engine.snapshot.gone")
)

// A snapshot is a directory of its own, with an image of the memory or what the root had that its image has not, and a
// copy of the workspace under an id of its own among the workspaces. None depends on another: what they share they share by
// hard links. A row in state creating is undone by the next Open, which also lets the sandbox run on; so is one that
// was for a fork alone.

// The states of a snapshot.
const (
	snapCreating = "creating"
	snapReady    = "ready"
	snapDeleting = "deleting"
)

// snapshot is a record in memory, guarded by Engine.mu.
type snapshot struct {
	row      store.Snapshot
	uses     int // creates and rollbacks under way
	removing bool
	idle     chan struct{}
	handed   bool // what it shares counts for others, see release
}

func (p *snapshot) label() string {
	if p.row.Name != "" {
		return p.row.Name
	}
	return string(p.row.ID)
}

func (p *snapshot) limits() driver.Limits {
	return driver.Limits{CPUMillis: p.row.CPUMillis, Memory: p.row.Memory, Disk: p.row.Disk, PIDs: p.row.PIDs}
}

// disk is what a snapshot counts for.
func (p *snapshot) disk() usage { return usage{disk: p.row.MemorySize + p.row.FilesSize} }

func (e *Engine) snapshotDir(id warren.SnapshotID) string {
	return filepath.Join(e.opts.SnapshotDir, string(id))
}

// memoryDir is where the memory image of a snapshot is.
func (e *Engine) memoryDir(id warren.SnapshotID) string {
	return filepath.Join(e.snapshotDir(id), "memory")
}

// findSnapshot returns the snapshot that ref names for c: an id, a name, or a unique prefix of an id. The caller holds mu.
func (e *Engine) findSnapshot(c Caller, ref string) (*snapshot, error) {
	seen := func(p *snapshot) bool { return p != nil && c.may(p.row.Owner) && !p.row.Transient }
	if p := e.snaps[warren.SnapshotID(ref)]; seen(p) {
		return p, nil
	}
	if p := e.snapNames[ownedName{c.User, ref}]; p != nil {
		return p, nil
	}
	if ref == "" {
		return nil, fmt.Errorf("a snapshot is needed, by id or name: %w", warren.ErrInvalid)
	}
	var found []*snapshot
	for id, p := range e.snaps {
		if seen(p) && (len(ref) >= minPrefix && strings.HasPrefix(string(id), ref) || c.Operator && p.row.Name == ref) {
			found = append(found, p)
		}
	}
	switch len(found) {
	case 0:
		return nil, notFound("snapshot", ref)
	case 1:
		return found[0], nil
	}
	return nil, ambiguous("snapshot", ref, func(yield func(string, string)) {
		for _, p := range found {
			yield(string(p.row.ID), p.row.Name)
		}
	})
}

// useSnapshot finds a snapshot and keeps it from being removed until release.
func (e *Engine) useSnapshot(c Caller, ref string) (*snapshot, func(), error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.useFound(c, ref)
}

// useFound is useSnapshot for a caller that holds mu.
func (e *Engine) useFound(c Caller, ref string) (*snapshot, func(), error) {
	p, err := e.findSnapshot(c, ref)
	if err != nil {
		return nil, nil, err
	}
	if p.row.State != snapReady || p.removing {
		word := p.row.State
		if p.removing {
			word = snapDeleting
		}
		return nil, nil, fmt.Errorf("snapshot %s is %s: %w", p.label(), word, warren.ErrState)
	}
	return p, e.holdSnapshot(p), nil
}

// holdSnapshot keeps a snapshot from being removed. The caller holds mu.
func (e *Engine) holdSnapshot(p *snapshot) (release func()) {
	p.uses++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if p.uses--; p.uses == 0 && p.idle != nil {
			close(p.idle)
			p.idle = nil
		}
	}
}

// viewSnapshot copies what is in memory. The caller holds mu.
func (e *Engine) viewSnapshot(p *snapshot) *Snapshot {
	r := &p.row
	return &Snapshot{
		ID: r.ID, Name: r.Name, Kind: SnapshotKind(r.Kind), SandboxID: r.SandboxID, SandboxName: r.SandboxName, ParentID: r.ParentID,
		Driver: r.Driver, Image: r.Image, ImageDigest: r.ImageDigest, Limits: p.limits(), Created: r.Created, Owner: r.Owner,
		MemorySize: r.MemorySize, FilesSize: r.FilesSize,
	}
}

// GetSnapshot returns a snapshot, with what its files take now when that is asked for.
func (e *Engine) GetSnapshot(ctx context.Context, c Caller, ref string, size bool) (*Snapshot, error) {
	e.mu.Lock()
	p, err := e.findSnapshot(c, ref)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	v := e.viewSnapshot(p)
	files := p.row.FilesID
	e.mu.Unlock()
	if size {
		if err := e.measure(ctx, v, files); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// measure puts into a view what its files take now, and how much of that others have too.
func (e *Engine) measure(ctx context.Context, v *Snapshot, files warren.WorkspaceID) error {
	total, shared, err := e.opts.Workspaces.Usage(ctx, files)
	if err != nil {
		return fmt.Errorf("size of snapshot %s: %w", v.ID, err)
	}
	v.FilesSize, v.SharedSize = total, shared
	if v.Kind == MemorySnapshot {
		total, shared, err := memoryUsage(e.memoryDir(v.ID), anywhere)
		if err != nil {
			return fmt.Errorf("size of snapshot %s: %w", v.ID, err)
		}
		v.MemorySize = total
		v.SharedSize += shared
	}
	return nil
}

// memoryUsage returns the bytes of a memory image, and how many of them are in files that other images have too, of which also is asked whether
// they matter. Of one that is gone there are none.
func memoryUsage(dir string, also func(*syscall.Stat_t) bool) (total, shared int64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, 0, plainPath(err)
	}
	for _, d := range entries {
		fi, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, 0, plainPath(err)
		}
		total += fi.Size()
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 && also(st) {
			shared += fi.Size()
		}
	}
	return total, shared, nil
}

// anywhere is for [memoryUsage], of which it is no matter whether the other image is a snapshot's or that of a paused sandbox.
func anywhere(*syscall.Stat_t) bool { return true }

// memoryFiles counts in how many of some snapshots' memory images each file is. The image of a paused sandbox counts for that sandbox, also
// where a snapshot has its files too, and so is of no matter to what snapshots count for.
type memoryFiles map[uint64]int

// memoryFilesOf counts for those of all that may share with row, which may be one of them.
func (e *Engine) memoryFilesOf(row *store.Snapshot, all []*store.Snapshot) (memoryFiles, error) {
	m := memoryFiles{}
	for _, q := range all {
		if !shareMemory(row, q) {
			continue
		}
		if _, _, err := memoryUsage(e.memoryDir(q.ID), func(st *syscall.Stat_t) bool { m[st.Ino]++; return false }); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// several says that more than one has a file.
func (m memoryFiles) several(st *syscall.Stat_t) bool { return m[st.Ino] > 1 }

// shareMemory says whether the memory images of two snapshots may have files in common.
func shareMemory(a, b *store.Snapshot) bool {
	return a.Kind == string(MemorySnapshot) && b.Kind == a.Kind && a.Driver == b.Driver && a.Owner == b.Owner
}

// ownMemory returns how much of the memory image of a snapshot no other has that counts. The caller holds sharing.
func (e *Engine) ownMemory(row *store.Snapshot) (int64, error) {
	e.mu.Lock()
	others := e.counting(row.ID)
	e.mu.Unlock()
	files, err := e.memoryFilesOf(row, others)
	if err != nil {
		return 0, err
	}
	total, shared, err := memoryUsage(e.memoryDir(row.ID), func(st *syscall.Stat_t) bool { return files[st.Ino] > 0 })
	return total - shared, err
}

// ListSnapshots returns the snapshots that c may see, of one sandbox if that is named, oldest first, and a token for the
// next page, "" after the last.
func (e *Engine) ListSnapshots(ctx context.Context, c Caller, sandbox string, size bool, pageSize int, token string) ([]*Snapshot, string, error) {
	n, after, err := page(pageSize, token)
	if err != nil {
		return nil, "", err
	}
	var of warren.SandboxID
	if sandbox != "" {
		if isID(sandbox, 's') {
			of = warren.SandboxID(sandbox) // which may be gone
		} else if of, err = e.Resolve(c, sandbox); err != nil {
			return nil, "", err
		}
	}
	var found []*snapshot
	e.mu.Lock()
	for _, p := range e.snaps {
		if c.may(p.row.Owner) && p.row.Num > after && p.row.State == snapReady && !p.row.Transient && (of == "" || p.row.SandboxID == of) {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b *snapshot) int { return int(a.row.Num - b.row.Num) })
	next := ""
	if len(found) > n {
		found = found[:n]
		next = fmt.Sprint(found[n-1].row.Num)
	}
	views := make([]*Snapshot, len(found))
	for i, p := range found {
		views[i] = e.viewSnapshot(p)
	}
	e.mu.Unlock()
	if size {
		for i, v := range views {
			// One that goes meanwhile keeps what it had.
			if err := e.measure(ctx, v, found[i].row.FilesID); err != nil && !errors.Is(err, warren.ErrNotFound) {
				return nil, "", err
			}
		}
	}
	return views, next, nil
}

// within returns a context that also ends with the engine, and after CreateTimeout.
func (e *Engine) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.CreateTimeout)
	stop := context.AfterFunc(e.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// Snapshot keeps the instant of a sandbox, which runs on, or is paused. When ctx ends nothing is kept.
func (e *Engine) Snapshot(ctx context.Context, c Caller, r SnapshotRequest, progress func(Progress)) (*Snapshot, error) {
	if r.Name != "" {
		if err := validName(r.Name); err != nil {
			return nil, err
		}
	}
	if progress == nil {
		progress = func(Progress) {}
	}
	e.mu.Lock()
	sb, err := e.find(c, r.ID)
	if err == nil && e.closing {
		err = errClosing
	}
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	e.wg.Add(1)
	e.mu.Unlock()
	defer e.wg.Done()
	ctx, cancel := e.within(ctx)
	defer cancel()
	op, err := e.hold(ctx, sb, "snapshot", cancel)
	if err != nil {
		return nil, err
	}
	if err := e.diskRoom(0); err != nil { // how much more it needs shows when its pages have been compared
		e.finish(sb, op, err)
		return nil, fmt.Errorf("snapshot of sandbox %s: %w", sb.label(), err)
	}
	p, stood, err := e.takeSnapshot(ctx, sb, taking{actor: c.User, name: r.Name, filesOnly: r.FilesOnly, tell: progress})
	if err != nil {
		err = e.cut(ctx, "snapshot", sb, err)
	}
	e.touch(sb)
	e.finish(sb, op, err)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.viewSnapshot(p)
	v.Stopped, _ = stood.wait() // which it does not any more
	return v, nil
}

// cut names what failed, and says why its context ended when the engine or a delete ended it.
func (e *Engine) cut(ctx context.Context, what string, sb *sandbox, err error) error {
	e.mu.Lock()
	label := sb.label()
	e.mu.Unlock()
	switch {
	case e.ctx.Err() != nil:
		return errClosing
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return fmt.Errorf("the %s of sandbox %s was cut short by its delete or its caller: %w", what, label, fmt.Errorf("%w (%w)", warren.ErrState, context.Canceled))
	}
	return fmt.Errorf("%s of sandbox %s: %w", what, label, err)
}

// taking says how a snapshot is taken.
type taking struct {
	actor, name string
	filesOnly   bool
	// transient is for a fork, which removes it.
	transient bool
	tell      func(Progress)
	// intended, when set, is called with the snapshot once it is on record, before there is anything in it.
	intended func(*snapshot)
}

// takeSnapshot keeps the instant of a sandbox that the caller holds, or leaves nothing. It may return before the sandbox runs on, as what
// it returns says.
func (e *Engine) takeSnapshot(ctx context.Context, sb *sandbox, o taking) (_ *snapshot, _ *standing, err error) {
	p, spec, err := e.intendSnapshot(ctx, sb, o)
	if err != nil {
		return nil, nil, err
	}
	stood := &standing{}
	stored := false
	defer func() {
		if err == nil {
			return
		}
		_, _ = stood.wait() // whose error, if it has one, is not what went wrong
		bg, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
		defer cancel()
		if stored {
			e.mu.Lock()
			p.removing = true
			e.mu.Unlock()
			if derr := e.removeSnapshot(bg, p, nil); derr != nil {
				e.log.Warn("unfinished snapshot not removed until the next start", "snapshot", p.row.ID, "error", derr)
				return
			}
		}
		e.mu.Lock()
		e.forgetSnapshot(p)
		e.mu.Unlock()
	}()
	row := p.row
	if err := e.store.Update(ctx, func(tx *store.Tx) error { return tx.InsertSnapshot(&row, spec) }); err != nil {
		return nil, nil, err
	}
	stored = true
	if err := fpSnapshotIntent.Hit(); err != nil {
		return nil, nil, err
	}
	if o.intended != nil {
		o.intended(p)
	}
	like, release := e.likeOf(sb, p)
	defer release() // when it counts: until then what they share counts for that one
	img, sum, err := e.keepInstant(ctx, sb, p, like, o, stood)
	if err != nil {
		return nil, nil, err
	}
	if err := fpSnapshotWritten.Hit(); err != nil {
		return nil, nil, err
	}
	row.State, row.MemorySize, row.RootSum = snapReady, img, sum
	if !o.transient {
		e.sharing.Lock() // until it counts
		defer e.sharing.Unlock()
		total, shared, err := e.opts.Workspaces.Usage(ctx, row.FilesID)
		if err != nil {
			return nil, nil, err
		}
		row.FilesSize = total - shared
		if SnapshotKind(row.Kind) == MemorySnapshot {
			if row.MemorySize, err = e.ownMemory(&row); err != nil {
				return nil, nil, err
			}
		}
	}
	e.mu.Lock()
	sized := snapshot{row: row}
	err = e.reserve(row.Owner, sized.disk())
	sbRow := sb.row
	e.mu.Unlock()
	if err != nil {
		return nil, nil, fmt.Errorf("it takes %s of disk: %w", size(row.MemorySize+row.FilesSize), err)
	}
	sbRow.SnapshotID = row.ID
	if !o.transient { // the record of one that is goes with it, and at the next start, whatever it says
		stopped, _ := stood.wait()
		err = e.store.Update(ctx, func(tx *store.Tx) error {
			if err := tx.UpdateSnapshot(&row); err != nil {
				return err
			}
			if err := tx.UpdateSandbox(&sbRow); err != nil {
				return err
			}
			ev := e.event(o.actor, "sandbox.snapshot", &sbRow, "stood still for "+stopped.Round(100*time.Microsecond).String())
			ev.Fields = map[string]string{"snapshot": string(row.ID), "kind": row.Kind}
			return tx.AppendEvent(ev)
		})
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.unreserve(row.Owner, sized.disk())
		return nil, nil, err
	}
	// One by one: of a fork's, others read what it is of.
	p.row.State, p.row.MemorySize, p.row.FilesSize, p.row.RootSum = row.State, row.MemorySize, row.FilesSize, row.RootSum
	if !o.transient {
		sb.row.SnapshotID = row.ID
	}
	fpSnapshotReady.Hit() // too late to fail
	e.log.Info("snapshot", "sandbox", row.SandboxID, "snapshot", row.ID, "kind", row.Kind)
	return p, stood, nil
}

// intendSnapshot decides what a snapshot of sb will hold, and takes its name.
func (e *Engine) intendSnapshot(ctx context.Context, sb *sandbox, o taking) (*snapshot, json.RawMessage, error) {
	specs, err := e.store.Specs(ctx, sb.row.ID)
	if err != nil {
		return nil, nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	spec, err := withNetwork(specs[sb.row.ID].Spec, sb.row.Network)
	if err != nil {
		return nil, nil, fmt.Errorf("the spec of sandbox %s: %w", sb.label(), err)
	}
	ws := e.spaces[sb.row.WorkspaceID]
	switch s := sb.state(); {
	case sb.row.Damaged != "":
		return nil, nil, failedError(sb)
	case s == Failed && o.filesOnly && !o.transient:
	case s == Failed:
		return nil, nil, fmt.Errorf("%w; `warren snapshot --files-only` keeps its workspace", failedError(sb))
	case s != Running && (s != Paused || o.transient):
		return nil, nil, fmt.Errorf("sandbox %s is %s: %w", sb.label(), s, warren.ErrState)
	}
	if _, saves := driver.As[driver.RootSaver](e.opts.Drivers[sb.row.Driver]); saves && o.filesOnly && sb.state() == Paused {
		// They are in its memory.
		return nil, nil, fmt.Errorf("sandbox %s is paused, and what it has changed outside its workspace cannot be kept without its memory: `warren resume %s` first, or leave out --files-only: %w",
			sb.label(), sb.label(), warren.ErrState)
	}
	if e.opts.SnapshotDir == "" || ws == nil {
		return nil, nil, fmt.Errorf("this server keeps no snapshots: %w", errUnsupported)
	}
	d := e.opts.Drivers[sb.row.Driver]
	if d == nil {
		return nil, nil, fmt.Errorf("driver %q, which sandbox %s needs, is not open in this server: %w", sb.row.Driver, sb.label(), warren.ErrUnavailable)
	}
	kind := MemorySnapshot
	if _, ok := driver.As[driver.Snapshotter](d); !ok || o.filesOnly {
		kind = FilesSnapshot
		if !o.filesOnly {
			o.tell(Progress{Step: "files only", Message: fmt.Sprintf("driver %s cannot keep memory: the snapshot has the files alone, and what is made of it starts cold", sb.row.Driver)})
		}
	}
	if o.name != "" {
		if other := e.snapNames[ownedName{sb.row.Owner, o.name}]; other != nil {
			return nil, nil, nameTaken("snapshot", o.name, string(other.row.ID))
		}
	}
	e.lastSnap++
	p := &snapshot{row: store.Snapshot{
		Num: e.lastSnap, ID: warren.SnapshotID(newID('p')), Name: o.name, Owner: sb.row.Owner, State: snapCreating, Kind: string(kind),
		SandboxID: sb.row.ID, SandboxName: sb.row.Name, ParentID: sb.row.SnapshotID, Driver: sb.row.Driver, Image: sb.row.Image,
		ImageDigest: sb.row.ImageDigest, FilesID: warren.WorkspaceID(newID('w')), RepoID: ws.row.RepoID, Source: ws.row.Source,
		CPUMillis: sb.row.CPUMillis, Memory: sb.row.Memory, Disk: sb.row.Disk, PIDs: sb.row.PIDs, Created: e.clock.Now(), Transient: o.transient,
	}}
	e.snaps[p.row.ID] = p
	if o.name != "" {
		e.snapNames[ownedName{p.row.Owner, o.name}] = p
	}
	return p, spec, nil
}

// buildLabel is on the sandbox in which a client builds a template.
const buildLabel = "warren.template"

// likeOf returns the directory of the image with which that of p may share pages, "" for none, and keeps it there until release: that of the newest
// snapshot before p. What is made of a template should have to put nothing together first, so the snapshots of a build are whole.
func (e *Engine) likeOf(sb *sandbox, p *snapshot) (dir string, release func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, build := sb.row.Labels[buildLabel]; build || p.row.Transient || SnapshotKind(p.row.Kind) != MemorySnapshot {
		return "", func() {}
	}
	for q := e.snaps[p.row.ParentID]; q != nil && q.row.Owner == p.row.Owner; q = e.snaps[q.row.ParentID] {
		if q.row.State == snapReady && !q.removing && SnapshotKind(q.row.Kind) == MemorySnapshot && q.row.Driver == p.row.Driver {
			return e.memoryDir(q.row.ID), e.holdSnapshot(q)
		}
	}
	return "", func() {}
}

// withNetwork returns the text of a spec with the private network that its sandbox is in, which may be another than at its create.
func withNetwork(text json.RawMessage, network string) (json.RawMessage, error) {
	var s storedSpec
	if err := json.Unmarshal(text, &s); err != nil || s.PrivateNetwork == network {
		return text, nil // of a damaged one others tell
	}
	s.PrivateNetwork = network
	return json.Marshal(s)
}

// keepInstant makes the files of a snapshot. It returns the size of what is beside the workspace, of a layer of the root also the checksum. That
// of a fork may still stand still then. The size is without what the image has from that in the directory like.
func (e *Engine) keepInstant(ctx context.Context, sb *sandbox, p *snapshot, like string, o taking, stood *standing) (size int64, sum string, err error) {
	if SnapshotKind(p.row.Kind) == FilesSnapshot {
		sum = noRoot // unless it runs and has changed something
	}
	e.mu.Lock()
	state, id, ws := sb.state(), sb.row.ID, sb.row.WorkspaceID
	e.mu.Unlock()
	dir := e.snapshotDir(p.row.ID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, "", plainPath(err)
	}
	o.tell(Progress{Step: "copy workspace"})
	cp, err := e.opts.Workspaces.BeginCopy(ctx, ws, p.row.FilesID, !o.transient)
	if err != nil {
		return 0, "", err
	}
	defer cp.Abort()
	if err := fpSnapshotBegun.Hit(); err != nil {
		return 0, "", err
	}
	o.tell(Progress{Step: "save " + p.row.Kind})
	began, _ := e.clock.Steady()
	switch {
	case state == Paused && SnapshotKind(p.row.Kind) == MemorySnapshot:
		if size, err = linkImage(e.imageDir(id), e.memoryDir(p.row.ID)); err == nil {
			err = cp.Finish(ctx)
		}
	case state == Running:
		size, sum, err = e.standStill(ctx, sb, p, func() error {
			if err := fpSnapshotFrozen.Hit(); err != nil {
				return err
			}
			return cp.Finish(ctx)
		})
		e.runOn(sb, began, stood)
		if err != nil || !o.transient { // a fork's children begin meanwhile
			_, terr := stood.wait()
			err = errors.Join(err, terr)
		}
	default:
		if state == Failed {
			size, sum, err = e.keepOwed(ctx, id, p)
		}
		if err == nil {
			err = cp.Finish(ctx)
		}
	}
	if err != nil {
		return 0, "", err
	}
	if err := fpSnapshotThawed.Hit(); err != nil {
		return 0, "", err
	}
	if _, err := cp.Commit(ctx); err != nil {
		return 0, "", err
	}
	if !o.transient {
		if c, ok := driver.As[driver.Copier](e.opts.Drivers[p.row.Driver]); ok && state == Running && SnapshotKind(p.row.Kind) == MemorySnapshot {
			img, err := c.Seal(ctx, e.memoryDir(p.row.ID), like)
			if err != nil {
				return 0, "", fmt.Errorf("driver %s: %w", p.row.Driver, err)
			}
			size = img.Size
		}
		if err := syncTree(dir); err != nil {
			return 0, "", plainPath(err)
		}
		if err := syncDir(e.opts.SnapshotDir); err != nil {
			return 0, "", plainPath(err)
		}
	}
	return size, sum, nil
}

// standing is a sandbox that may stand still for its snapshot.
type standing struct {
	over    chan struct{} // closed when it runs on; nil if it does not stand still
	stopped time.Duration
	err     error
}

// wait waits until the sandbox runs on, and returns for how long it did not.
func (s *standing) wait() (time.Duration, error) {
	if s.over != nil {
		<-s.over
	}
	return s.stopped, s.err
}

// runOn begins to let a sandbox run on that has stood still since began.
func (e *Engine) runOn(sb *sandbox, began time.Duration, stood *standing) {
	stood.over = make(chan struct{})
	go func() {
		defer close(stood.over)
		if err := e.letRun(sb); err != nil {
			stood.err = fmt.Errorf("the sandbox could not be let run on: driver %s: %w", sb.row.Driver, err)
		}
		ended, _ := e.clock.Steady()
		stood.stopped = ended - began
	}()
}

// standStill keeps the memory, or the root's changes with their checksum, of a running sandbox, and does what is to be done at the same instant. The
// sandbox may stand still afterwards, also when it fails.
func (e *Engine) standStill(ctx context.Context, sb *sandbox, p *snapshot, meanwhile func() error) (size int64, sum string, err error) {
	d, id := e.opts.Drivers[p.row.Driver], sb.row.ID
	freezer, freezes := driver.As[driver.Freezer](d)
	fail := func(what string, err error) error {
		e.metrics.driverError(p.row.Driver, what)
		return fmt.Errorf("driver %s: %w", p.row.Driver, err)
	}
	if SnapshotKind(p.row.Kind) == MemorySnapshot {
		s, _ := driver.As[driver.Snapshotter](d)
		if err := os.Mkdir(e.memoryDir(p.row.ID), 0o700); err != nil {
			return 0, "", plainPath(err)
		}
		if !p.row.Transient { // a fork's, to which nobody goes back
			if err := markGuest(ctx, d, id); err != nil {
				e.log.Debug("guest did not note its output", "sandbox", id, "error", err)
			}
		}
		c, ok := driver.As[driver.Copier](d)
		if !ok {
			img, err := s.Snapshot(ctx, id, e.memoryDir(p.row.ID), true)
			if err != nil {
				return 0, "", fail("snapshot", err)
			}
			return img.Size, "", meanwhile()
		}
		var files errgroup.Group
		stood := false
		img, err := c.SnapshotTransient(ctx, id, e.memoryDir(p.row.ID), true, func() { stood = true; files.Go(meanwhile) })
		if err == nil && !stood {
			err = errors.New("it did not say that the sandbox stands still")
		}
		if err != nil {
			err = fail("snapshot", err)
		}
		return img.Size, "", errors.Join(err, files.Wait())
	}
	if freezes {
		if err := freezer.Freeze(ctx, id); err != nil {
			return 0, "", fail("freeze", err)
		}
	}
	if c, ok := driver.As[driver.Syncer](d); ok && !freezes { // which brings home as well
		if err := c.Sync(ctx, id); err != nil {
			return 0, "", fail("sync", err)
		}
	}
	if err := meanwhile(); err != nil {
		return 0, "", err
	}
	saver, ok := driver.As[driver.RootSaver](d)
	if !ok {
		return 0, noRoot, nil
	}
	f, err := os.OpenFile(e.rootTar(p.row.ID), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, "", plainPath(err)
	}
	defer f.Close()
	h := sha256.New()
	if err := saver.SaveRoot(ctx, id, io.MultiWriter(f, h)); err != nil {
		return 0, "", fail("save root", err)
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() <= emptyTar {
		return 0, noRoot, os.Remove(f.Name()) // nothing has changed
	}
	if err != nil {
		return 0, "", plainPath(err)
	}
	return fi.Size(), rootSum(h), nil
}

// emptyTar is the size of an archive without entries.
const emptyTar = 1024

// rootTar is the layer with what the root of a snapshot's sandbox had that its image has not. It is missing where the driver
// cannot tell.
func (e *Engine) rootTar(id warren.SnapshotID) string {
	return filepath.Join(e.snapshotDir(id), "root.tar")
}

// noRoot stands for the checksum where there is no layer.
const noRoot = "none"

func rootSum(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// checkRoot returns the layer of a snapshot of files, "" for none, when it is what was written then. Snapshots of older versions have no
// checksum: theirs is believed.
func (e *Engine) checkRoot(ctx context.Context, p *snapshot) (layer string, err error) {
	e.mu.Lock()
	row, label := p.row, p.label()
	e.mu.Unlock()
	damaged := func(format string, args ...any) error {
		return fmt.Errorf("snapshot %s is damaged: %s; its workspace is not, but what was changed outside of it is lost; take another: %w", label, fmt.Sprintf(format, args...), warren.ErrState)
	}
	layer = e.rootTar(row.ID)
	f, err := os.Open(layer)
	switch {
	case errors.Is(err, os.ErrNotExist) && (row.RootSum == noRoot || row.RootSum == "" && row.MemorySize == 0):
		return "", nil
	case errors.Is(err, os.ErrNotExist):
		return "", damaged("the layer of its root, %s, is gone", size(row.MemorySize))
	case err != nil:
		return "", plainPath(err)
	}
	defer f.Close()
	if row.RootSum == noRoot {
		return "", damaged("it has a layer of its root, which it had not when it was taken")
	}
	fi, err := f.Stat()
	if err != nil {
		return "", plainPath(err)
	}
	if fi.Size() != row.MemorySize {
		return "", damaged("the layer of its root has %d bytes, and had %d when it was taken", fi.Size(), row.MemorySize)
	}
	if row.RootSum == "" {
		return layer, nil
	}
	sum, err := sumOf(ctx, f)
	if err != nil {
		return "", plainPath(err)
	}
	if sum != row.RootSum {
		return "", damaged("the layer of its root has not the checksum that it had when it was taken")
	}
	return layer, nil
}

// sumOf returns the checksum of what is read from a layer.
func sumOf(ctx context.Context, f io.Reader) (string, error) {
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		n, err := f.Read(buf)
		h.Write(buf[:n]) // never fails
		if err == nil {
			err = ctx.Err()
		}
		if err == io.EOF {
			return rootSum(h), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// linkImage makes an image appear in another directory, and returns its size. Its files are never written again.
func linkImage(from, to string) (size int64, err error) {
	if err := os.Mkdir(to, 0o700); err != nil {
		return 0, plainPath(err)
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return 0, plainPath(err)
	}
	for _, d := range entries {
		if err := os.Link(filepath.Join(from, d.Name()), filepath.Join(to, d.Name())); err != nil {
			return 0, plainPath(err)
		}
		if fi, err := d.Info(); err == nil {
			size += fi.Size()
		}
	}
	return size, syncDir(to)
}

// syncTree writes the files of a small tree to disk.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		return syncDir(path)
	})
}

// forgetSnapshot takes p out of the maps. The caller holds mu.
func (e *Engine) forgetSnapshot(p *snapshot) {
	if e.snaps[p.row.ID] != p {
		return
	}
	e.madeRoom()
	delete(e.snaps, p.row.ID)
	delete(e.unready, p.row.ID)
	if p.row.Name != "" {
		delete(e.snapNames, ownedName{p.row.Owner, p.row.Name})
	}
	if p.row.State == snapReady {
		e.unreserve(p.row.Owner, p.disk())
	}
	for _, other := range e.snaps {
		if other.row.ParentID == p.row.ID {
			other.row.ParentID = p.row.ParentID
		}
	}
	if p.row.Transient {
		return
	}
	for _, sb := range e.boxes {
		if sb.row.SnapshotID == p.row.ID {
			sb.row.SnapshotID = p.row.ParentID
		}
	}
}

// removeSnapshot removes the files, then the row. It may be repeated.
func (e *Engine) removeSnapshot(ctx context.Context, p *snapshot, event *store.Event) error {
	if err := os.RemoveAll(e.snapshotDir(p.row.ID)); err != nil {
		return plainPath(err)
	}
	if err := e.opts.Workspaces.Delete(ctx, p.row.FilesID); err != nil && !errors.Is(err, warren.ErrNotFound) {
		return err
	}
	if err := fpSnapshotGone.Hit(); err != nil {
		return err
	}
	e.mu.Lock()
	row := p.row
	e.mu.Unlock()
	return e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteSnapshot(&row); err != nil || event == nil {
			return err
		}
		return tx.AppendEvent(event)
	})
}

// DeleteSnapshot removes a snapshot when no create or rollback uses it any more. Others and the sandboxes made of it stay.
func (e *Engine) DeleteSnapshot(ctx context.Context, c Caller, ref string, allowMissing bool) error {
	e.mu.Lock()
	p, err := e.findSnapshot(c, ref)
	if err == nil && p.row.State == snapCreating {
		err = fmt.Errorf("snapshot %s is being taken: %w", p.label(), warren.ErrState)
	}
	if err == nil {
		if t := e.templateOf(p.row.ID); t != nil {
			err = isTemplates(p, t)
		}
	}
	if err == nil && p.uses == 0 {
		err = e.neededByRollback(p)
	}
	if err != nil {
		e.mu.Unlock()
		if allowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	p.removing = true
	if e.closing {
		e.mu.Unlock()
		return errClosing
	}
	e.wg.Add(1)
	e.mu.Unlock()
	defer e.wg.Done()
	// Deletes of one snapshot follow each other; each of the steps may be repeated.
	leave, err := e.oneAtATime(ctx, ownedName{"\x00snapshot", string(p.row.ID)})
	if err != nil {
		return err
	}
	defer leave()
	return e.dropSnapshot(ctx, p, &store.Event{Time: e.clock.Now(), Owner: p.row.Owner, Actor: c.User, Action: "snapshot.delete", SandboxID: p.row.SandboxID,
		Message: p.label(), Fields: map[string]string{"snapshot": string(p.row.ID)}})
}

// neededByRollback refuses to remove a snapshot that a sandbox is on its way to: a rollback that does not get on uses it only while it tries. The caller holds mu.
func (e *Engine) neededByRollback(p *snapshot) error {
	for _, sb := range e.boxes {
		if sb.state() == RollingBack && sb.row.SnapshotID == p.row.ID {
			return fmt.Errorf("snapshot %s is needed: sandbox %s is being rolled back to it; delete one of them when it is there, or the sandbox first: %w", p.label(), sb.label(), warren.ErrState)
		}
	}
	return nil
}

// dropSnapshot removes a snapshot of which removing is set.
func (e *Engine) dropSnapshot(ctx context.Context, p *snapshot, event *store.Event) error {
	e.mu.Lock()
	if e.snaps[p.row.ID] != p {
		e.mu.Unlock()
		return nil
	}
	var idle chan struct{}
	if p.uses > 0 {
		if p.idle == nil {
			p.idle = make(chan struct{})
		}
		idle = p.idle
	}
	row := p.row
	e.mu.Unlock()
	if idle != nil {
		select {
		case <-idle:
		case <-ctx.Done():
			e.mu.Lock()
			p.removing = p.row.State == snapDeleting
			e.mu.Unlock()
			return fmt.Errorf("snapshot %s is in use by a fork, a create or a rollback: %w", p.label(), ctx.Err())
		}
	}
	e.mu.Lock()
	t := e.templateOf(row.ID)    // that of a put which was under way
	err := e.neededByRollback(p) // one that was under way, and did not get on
	if t != nil {
		err = isTemplates(p, t)
	}
	if err != nil {
		p.removing = false
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	if !row.Transient {
		if err := e.release(ctx, p); err != nil && !errors.Is(err, warren.ErrExhausted) {
			return err // deleting makes room, so a full disk does not forbid it
		}
	}
	if err := e.removeSnapshot(ctx, p, event); err != nil {
		return fmt.Errorf("snapshot %s could not be removed yet; delete it again: %w", p.label(), err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forgetSnapshot(p)
	return nil
}

// loadSnapshots puts the rows into memory, and removes what was cut short or was for a fork alone. The caller holds mu and
// has loaded the sandboxes.
func (e *Engine) loadSnapshots(rows []*store.Snapshot, do func(func())) error {
	if e.opts.SnapshotDir == "" {
		return nil
	}
	if err := os.MkdirAll(e.opts.SnapshotDir, 0o700); err != nil {
		return err
	}
	for _, row := range rows {
		p := e.snaps[row.ID]
		if row.Name != "" {
			e.snapNames[ownedName{row.Owner, row.Name}] = p
		}
		if row.State == snapReady {
			u := e.usageOf(row.Owner)
			u.add(p.disk(), 1)
			e.total.add(p.disk(), 1)
		}
		if row.State == snapReady && !row.Transient {
			continue
		}
		p.removing = true
		sb := e.boxes[row.SandboxID]
		var op *operation
		if row.State == snapCreating && sb != nil && sb.op == nil && sb.state() == Running {
			op = newOperation("snapshot", nil)
			sb.op = op
		}
		do(func() {
			if op != nil {
				e.finish(sb, op, e.letRun(sb))
			}
			if err := e.dropSnapshot(e.ctx, p, nil); err != nil && e.ctx.Err() == nil {
				e.log.Warn("snapshot that was cut short not removed until the next start", "snapshot", p.row.ID, "error", err)
			}
		})
	}
	entries, err := os.ReadDir(e.opts.SnapshotDir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if e.snaps[warren.SnapshotID(d.Name())] == nil {
			do(func() {
				if err := os.RemoveAll(filepath.Join(e.opts.SnapshotDir, d.Name())); err != nil {
					e.log.Warn("files of a snapshot without a record not removed", "error", err)
				}
			})
		}
	}
	return nil
}

// letRun lets a sandbox run on that was made to stand still. It goes on until the driver has done it, for nobody else would ask: until then, its delete, or the end of the server.
func (e *Engine) letRun(sb *sandbox) error {
	f, ok := driver.As[driver.Freezer](e.opts.Drivers[sb.row.Driver])
	if !ok {
		return nil
	}
	var wait time.Duration
	for {
		// Also of a server that ends: what stands still would until another is started.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), e.opts.DeleteTimeout)
		err := f.Thaw(ctx, sb.row.ID)
		cancel()
		// One that has died is found so by its driver's watch, or by the next use.
		if err == nil || errors.Is(err, warren.ErrState) || errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		e.mu.Lock()
		doomed := sb.op != nil && sb.op.doomed
		e.mu.Unlock()
		if doomed {
			return err
		}
		e.log.Warn("sandbox does not run on yet", "sandbox", sb.row.ID, "error", err)
		if !e.again(e.ctx, &wait) {
			return errClosing
		}
	}
}
