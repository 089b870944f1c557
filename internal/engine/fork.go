package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a fork, in order.
var (
	fpForkTaken   = failpoint.New("engine.fork.taken")
	fpForkMade    = failpoint.New("engine.fork.made")
	fpForkDropped = failpoint.New("engine.fork.dropped")
)

// maxFork is how many children one fork makes at most.
const maxFork = 1000

// origin is the snapshot that a create goes on from.
type origin struct {
	snap *snapshot
	// source is the sandbox that is forked, "" for a create from a snapshot; adopt takes the snapshot's files for the child's
	// own, after which they are gone.
	source warren.SandboxID
	adopt  bool
	// copied, when set, is called when the snapshot's files are not needed any more.
	copied func()
	// group is what the children of a fork have in common that is all or nothing: the next Open removes those of which the fork did not come
	// to its end.
	group string
	// operator says with whose rights the mounts were allowed.
	operator bool
	// instant, when set, is what is waited for before anything of the snapshot's files is used.
	instant *instant
	// also, when set, is recorded along with the child's running.
	also func(*store.Tx, warren.SandboxID) error
}

// instant is the taking of a fork's snapshot. What its children need beside it is made ready meanwhile.
type instant struct {
	over chan struct{} // closed when the snapshot is there, or will not be
	err  error         // why it will not be
	drop func()        // removes the snapshot, which must be there

	ran     chan struct{} // closed after over, when the source runs on; never if the snapshot will not be there
	stopped time.Duration
	stuck   error // why the source does not run on
}

// end says that the snapshot is there, or will not be.
func (i *instant) end(err error) {
	i.err = err
	close(i.over)
}

// runs says that the source runs on after a while, or does not.
func (i *instant) runs(stopped time.Duration, err error) {
	i.stopped, i.stuck = stopped, err
	close(i.ran)
}

// wait waits until the snapshot is there.
func (i *instant) wait(ctx context.Context) error {
	if i == nil {
		return nil
	}
	select {
	case <-i.over:
		return i.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitRuns waits until the source runs on as well: no child counts before.
func (i *instant) waitRuns(ctx context.Context) error {
	if i == nil {
		return nil
	}
	select {
	case <-i.ran:
		return i.stuck
	case <-ctx.Done():
		return ctx.Err()
	}
}

// parent is the snapshot in whose place the child stands in the tree.
func (o *origin) parent() warren.SnapshotID {
	if o.snap.row.Transient {
		return o.snap.row.ParentID
	}
	return o.snap.row.ID
}

// specOf returns the spec of a snapshot's sandbox.
func (e *Engine) specOf(ctx context.Context, p *snapshot) (*storedSpec, error) {
	b, err := e.store.SnapshotSpec(ctx, p.row.ID)
	if err != nil {
		return nil, err
	}
	var s storedSpec
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("the spec of snapshot %s is damaged (%v): %w", p.label(), err, warren.ErrState)
	}
	return &s, nil
}

// from fills a spec that names a snapshot with what that holds. What it asks for besides must be possible.
func (e *Engine) from(p *snapshot, have *storedSpec, s *Spec) error {
	same := func(field, asked, has string) error {
		if asked == "" || asked == has {
			return nil
		}
		return invalid(field, asked, fmt.Sprintf("snapshot %s has %s, and what is made of it goes on with that; leave it out", p.label(), quote(has)))
	}
	switch {
	case s.Repo != nil:
		return invalid("repo", s.Repo.URL, "a snapshot has a workspace of its own; give one of the two")
	case s.WorkspaceID != "":
		return invalid("workspace", s.WorkspaceID, "a snapshot has a workspace of its own; give one of the two")
	case len(s.Mounts) > 0:
		return invalid("mount", s.Mounts[0].Target, "what is made of a snapshot has the snapshot's mounts; leave it out")
	case len(s.DriverOptions) > 0:
		return invalid("driver options", strings.Join(sortedKeys(s.DriverOptions), " "), "what is made of a snapshot has the snapshot's; leave them out")
	case s.Resources.DiskBytes != 0 && s.Resources.DiskBytes != p.row.Disk:
		return same("disk", size(s.Resources.DiskBytes), size(p.row.Disk))
	}
	if err := same("image", s.Image, p.row.Image); err != nil {
		return err
	}
	// The layer of a root is an image's for every driver, and memory is only its own's. A template stands ready with the one that it has.
	if SnapshotKind(p.row.Kind) == MemorySnapshot || s.Template != "" {
		if err := same("driver", s.Driver, p.row.Driver); err != nil {
			return err
		}
	}
	if s.Driver == "" {
		s.Driver = p.row.Driver
	}
	if s.Driver != p.row.Driver && len(have.DriverOptions) > 0 {
		return invalid("driver", s.Driver, fmt.Sprintf("snapshot %s has options for driver %s (%s), which are no other's; leave it out", p.label(), p.row.Driver, strings.Join(sortedKeys(have.DriverOptions), " ")))
	}
	fill := func(v *uint32, n uint32) {
		if *v == 0 {
			*v = n
		}
	}
	s.Image = p.row.Image
	s.DriverOptions, s.Mounts, s.Repo = have.DriverOptions, have.Mounts, have.Repo
	s.Resources.DiskBytes = p.row.Disk
	fill(&s.Resources.CPUMillis, p.row.CPUMillis)
	fill(&s.Resources.PIDs, p.row.PIDs)
	if s.Resources.MemoryBytes == 0 {
		s.Resources.MemoryBytes = p.row.Memory
	}
	env := maps.Clone(have.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, s.Env)
	s.Env = env
	if s.Policy == "" {
		s.Policy = have.Policy
	}
	if s.PrivateNetwork == "" {
		s.PrivateNetwork = have.PrivateNetwork
	}
	s.Placeholders = have.Placeholders
	if s.Restart == "" {
		s.Restart = have.Restart
	}
	return nil
}

// Fork makes sandboxes that go on from where a running one is, which runs on. Each child gets a workspace, tokens and a
// name of its own. It returns an error when there is no child; what became of each is in the result.
func (e *Engine) Fork(ctx context.Context, c Caller, r ForkRequest, progress func(Progress)) (*ForkResult, error) {
	if r.Count == 0 {
		r.Count = 1
	}
	if r.Count < 0 || r.Count > maxFork {
		return nil, invalid("count", fmt.Sprint(r.Count), fmt.Sprintf("want 1 to %d", maxFork))
	}
	names := make([]string, r.Count)
	for i := range names {
		if names[i] = r.Name; r.Name != "" && r.Count > 1 {
			names[i] = fmt.Sprintf("%s-%d", r.Name, i+1)
		}
		if names[i] != "" {
			if err := validName(names[i]); err != nil {
				return nil, err
			}
		}
	}
	if err := errors.Join(checkEnv(r.Env), checkLabels(r.Labels)); err != nil {
		return nil, err
	}
	var tellMu sync.Mutex
	tell := func(p Progress) {
		if progress != nil {
			tellMu.Lock()
			defer tellMu.Unlock()
			progress(p)
		}
	}
	e.mu.Lock()
	sb, err := e.find(c, r.ID)
	if err == nil {
		err = e.forkable(c, sb, names)
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
	op, err := e.hold(ctx, sb, "fork", cancel)
	if err != nil {
		return nil, err
	}
	// The children are put on record, and their network cards and budgets made ready, while the source stands still. One is also restored while the
	// source is let run on.
	shot := &instant{over: make(chan struct{}), ran: make(chan struct{})}
	var res *ForkResult
	var made errgroup.Group
	snap, stood, err := e.takeSnapshot(ctx, sb, taking{actor: c.User, transient: true, tell: tell, intended: func(p *snapshot) {
		made.Go(func() (err error) {
			res, err = e.children(ctx, c, sb, p, r, names, shot, tell)
			return err
		})
	}})
	if err != nil {
		shot.end(err)
		_ = made.Wait() // which fails as the snapshot did
		err = e.cut(ctx, "fork", sb, err)
		e.finish(sb, op, err)
		return nil, err
	}
	shot.drop = sync.OnceFunc(func() {
		e.mu.Lock()
		snap.removing = true
		e.mu.Unlock()
		bg, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
		defer cancel()
		if err := e.dropSnapshot(bg, snap, nil); err != nil {
			e.log.Warn("snapshot of a fork not removed until the next start", "snapshot", snap.row.ID, "error", err)
		}
		fpForkDropped.Hit()
	})
	if r.Count > 1 { // they would keep the source from running on
		_, _ = stood.wait()
	}
	shot.end(fpForkTaken.Hit())
	stopped, err := stood.wait()
	if err != nil {
		err = e.cut(ctx, "fork", sb, err)
	}
	// The source is free again; the children are made of the snapshot.
	e.mu.Lock()
	op.cancel = nil
	e.mu.Unlock()
	e.touch(sb)
	e.finish(sb, op, err)
	shot.runs(stopped, err)
	if err := made.Wait(); err != nil {
		shot.drop()
		return nil, err
	}
	e.wg.Go(shot.drop) // nobody waits for it
	return res, nil
}

// forkable says why a sandbox cannot be forked, or its children not be made, before it is stopped for that. The caller holds mu.
func (e *Engine) forkable(c Caller, sb *sandbox, names []string) error {
	if e.closing {
		return errClosing
	}
	switch s := sb.state(); {
	case s == Failed || sb.row.Damaged != "":
		return fmt.Errorf("%w; a sandbox without an execution cannot be forked, its workspace can be copied: `warren workspace cp %s`", failedError(sb), sb.row.WorkspaceID)
	case s == Paused:
		return fmt.Errorf("sandbox %s is paused, so it cannot be forked; `warren resume %s` first: %w", sb.label(), sb.label(), warren.ErrState)
	case s == Deleting || s == Creating:
		return fmt.Errorf("sandbox %s is %s: %w", sb.label(), s, warren.ErrState)
	}
	for _, name := range names {
		if other := e.names[ownedName{c.User, name}]; name != "" && other != nil {
			return nameTaken("sandbox", name, string(other.row.ID))
		}
	}
	if err := e.roomFor(ownedName{c.User, sb.row.Network}, len(names)); err != nil {
		return err
	}
	// The budgets are asked again for each child; this saves the work of a fork that cannot be.
	l := sb.limits()
	n := int64(len(names))
	all := cost(driver.Limits{CPUMillis: l.CPUMillis, Memory: n * l.Memory, Disk: n * l.Disk}, true)
	all.sandboxes, all.cpu = len(names), n*int64(l.CPUMillis)
	if err := e.reserve(c.User, all); err != nil {
		return err
	}
	e.unreserve(c.User, all)
	return nil
}

// children makes the children of a fork of a snapshot that is being taken, as many at a time as there are starts.
func (e *Engine) children(ctx context.Context, c Caller, sb *sandbox, snap *snapshot, r ForkRequest, names []string, shot *instant, tell func(Progress)) (*ForkResult, error) {
	have, err := e.specOf(ctx, snap)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	row, keep := sb.row, have.KeepWorkspace
	if ws := e.spaces[row.WorkspaceID]; ws != nil {
		keep = ws.row.Keep
	}
	e.mu.Unlock()
	// What was changed of the source since it was made holds for its children too.
	ttl, most := row.TTL, have.MaxLifetime
	if ttl == 0 && row.Expires != 0 {
		ttl = have.TTL // the record is of a server that did not write it down
	}
	if e.opts.MaxLifetime > 0 {
		most = min(most, e.opts.MaxLifetime) // which was longer when the source was made
	}
	res := &ForkResult{Children: make([]Forked, len(names)), Kind: SnapshotKind(snap.row.Kind)}
	last := len(names) - 1
	one, group := last == 0, ""
	if r.All && !one { // one is all
		group = string(snap.row.ID)
	}
	make1 := func(i int, copied func()) {
		spec := Spec{
			Name: names[i], Env: maps.Clone(r.Env), Labels: maps.Clone(row.Labels), IdleTimeout: row.Idle, TTL: ttl, TTLAction: IdleAction(row.TTLAction), MaxLifetime: most,
			IdleAction: IdleAction(row.IdleAction), NoAutoResume: row.NoAutoResume,
			KeepWorkspace: keep, Restart: RestartPolicy(row.Restart),
		}
		if spec.Labels == nil {
			spec.Labels = map[string]string{}
		}
		maps.Copy(spec.Labels, r.Labels)
		if r.TTL != 0 {
			spec.TTL = r.TTL
		}
		if r.IdleTimeout != 0 {
			spec.IdleTimeout = r.IdleTimeout
		}
		if r.IdleAction != "" {
			spec.IdleAction = r.IdleAction
		}
		err := e.from(snap, have, &spec)
		if err == nil {
			err = e.normalFrom(ctx, c, &spec)
		}
		if r.IdleTimeout == 0 {
			spec.IdleTimeout = row.Idle // none too, for which a create has the server's default
		}
		if err == nil {
			f := &flight{listeners: []func(Progress){func(p Progress) {
				if len(names) > 1 {
					p.Step = fmt.Sprintf("child %d: %s", i+1, p.Step)
				}
				tell(p)
			}}}
			o := &origin{snap: snap, source: row.ID, adopt: i == last, copied: copied, group: group, operator: have.Operator, instant: shot}
			if one {
				o.also = func(tx *store.Tx, id warren.SandboxID) error {
					return tx.AppendEvent(e.forkEvent(c, &row, shot.stopped, []string{string(id)}))
				}
			}
			m := &making{caller: c, spec: spec, flight: f, from: o}
			res.Children[i].Sandbox, err = e.make(ctx, m)
		}
		res.Children[i].Err = err
	}
	// The last takes the files of the snapshot for its own, when the others have copied them.
	var wg, copying sync.WaitGroup
	copying.Add(last)
	for i := range last {
		wg.Go(func() {
			copied := sync.OnceFunc(copying.Done)
			defer copied()
			make1(i, copied)
		})
	}
	wg.Go(func() {
		copying.Wait()
		make1(last, nil)
	})
	wg.Wait()
	if <-shot.over; shot.err != nil { // also where no child came as far as to wait for it
		return nil, shot.err
	}
	<-shot.ran
	res.Stopped = shot.stopped
	why := fpForkMade.Hit()
	if why != nil && !r.All {
		return nil, why
	}
	var errs []error
	for _, ch := range res.Children {
		if ch.Err != nil {
			errs = append(errs, ch.Err)
		}
	}
	made := len(names) - len(errs)
	none := len(errs) > 0 && (r.All || made == 0 || ctx.Err() != nil)
	if why == nil && !none {
		go shot.drop() // the execution of each child has read what it needs
		if !one {
			why = e.completeFork(ctx, c, &row, group, res)
		}
		if why != nil && !r.All {
			e.log.Warn("event of a fork not recorded", "sandbox", row.ID, "error", why)
			why = nil
		}
	}
	if why == nil && !none {
		return res, nil
	}
	for i := range res.Children {
		if ch := &res.Children[i]; ch.Err == nil {
			bg, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.DeleteTimeout)
			if err := e.Delete(bg, c, DeleteRequest{ID: string(ch.Sandbox.ID), AllowMissing: true, DeleteWorkspace: true}); err != nil {
				e.log.Warn("child of a fork that failed not removed yet", "sandbox", ch.Sandbox.ID, "error", err)
			}
			cancel()
		}
	}
	switch {
	case len(errs) == 0:
		return nil, fmt.Errorf("the fork could not be completed, so no child stays: %w", why)
	case made > 0:
		return nil, fmt.Errorf("%d of %d children failed, so none stays: %w", len(errs), len(names), errs[0])
	}
	return nil, errs[0]
}

// forkEvent is what is recorded of a fork.
func (e *Engine) forkEvent(c Caller, source *store.Sandbox, stopped time.Duration, ids []string) *store.Event {
	children := "1 child"
	if len(ids) != 1 {
		children = fmt.Sprintf("%d children", len(ids))
	}
	ev := e.event(c.User, "sandbox.fork", source, fmt.Sprintf("%s, stood still for %s", children, stopped.Round(100*time.Microsecond)))
	ev.Fields = map[string]string{"children": strings.Join(ids, " ")}
	return ev
}

// completeFork records a fork of several children. From then on those of one that is all or nothing stay.
func (e *Engine) completeFork(ctx context.Context, c Caller, source *store.Sandbox, group string, res *ForkResult) error {
	var ids []string
	for _, ch := range res.Children {
		if ch.Sandbox != nil {
			ids = append(ids, string(ch.Sandbox.ID))
		}
	}
	ev := e.forkEvent(c, source, res.Stopped, ids)
	if err := e.store.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error {
		if group != "" {
			if err := tx.CompleteFork(group); err != nil {
				return err
			}
		}
		return tx.AppendEvent(ev)
	}); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, id := range ids {
		if sb := e.boxes[warren.SandboxID(id)]; sb != nil {
			sb.row.ForkID = ""
		}
	}
	return nil
}
