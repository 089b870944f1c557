package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// A standby is a sandbox of a template that was restored before anybody asked for it, and stands still since: a create of that
// template tells it who it is and lets it run on, instead of reading its memory first. There are as many as the template was used in the last
// minutes, up to Options.Standby of all templates.
//
// It has an id, an execution and a workspace, and is nobody's: no list shows it, no name leads to it, and its network card lets nothing
// pass. It counts in the budgets of the server, not in its owner's, and goes first when these or the host's memory run short, when its template
// stands for something else, and when the engine closes. What a crash leaves of it is what no record of a sandbox names, and the next Open removes that.

var (
	fpStandbyMade  = failpoint.New("engine.standby.made")
	fpStandbyWoken = failpoint.New("engine.standby.woken")
)

// standby is one of them.
type standby struct {
	row    store.Sandbox
	ws     store.Workspace
	dirs   *WorkspaceDirs
	carded bool
}

// standbyKind are those of one owner and one snapshot, guarded by Engine.mu.
type standbyKind struct {
	owner string
	snap  warren.SnapshotID
	demand
	have []*standby
}

// noteTemplate takes down that what a template stands for was asked for, or will be.
func (e *Engine) noteTemplate(owner string, snap warren.SnapshotID) {
	if e.opts.Standby == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return
	}
	key := ownedName{owner, string(snap)}
	k := e.standbys[key]
	if k == nil {
		k = &standbyKind{owner: owner, snap: snap}
		e.standbys[key] = k
	}
	k.note(e.line.now())
	e.sizeStandbys()
}

// sizeStandbys has as many made, or let go, as are wanted. The caller holds mu.
func (e *Engine) sizeStandbys() {
	left, lack := e.opts.Standby, false
	for _, k := range e.standbyKinds() {
		want := k.wanted(e.line.now(), left)
		if !e.standsFor(k) {
			want = 0
		}
		left -= want
		for len(k.have) > want {
			e.spawnErase(k.pop())
		}
		if lack = lack || len(k.have) < want; want == 0 {
			delete(e.standbys, ownedName{k.owner, string(k.snap)})
		}
	}
	if lack && !e.standingBy {
		e.standingBy = e.spawn(e.fillStandbys)
	}
}

// standbyKinds are all kinds, those asked for last first. The caller holds mu.
func (e *Engine) standbyKinds() []*standbyKind {
	var all []*standbyKind
	for _, k := range e.standbys {
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b *standbyKind) int { return cmp.Compare(b.last(), a.last()) })
	return all
}

// standsFor says whether a template of the owner's still stands for what a kind is made of. The caller holds mu.
func (e *Engine) standsFor(k *standbyKind) bool {
	for _, t := range e.templates {
		if t.Owner == k.owner && t.SnapshotID == k.snap {
			return true
		}
	}
	return false
}

// pop takes the one that was made last.
func (k *standbyKind) pop() *standby {
	sp := k.have[len(k.have)-1]
	k.have = k.have[:len(k.have)-1]
	return sp
}

// standbyQuiet is how long nobody has used a template when one is made: what was asked for goes first.
const standbyQuiet = 200 * time.Millisecond

// fillStandbys makes those that are lacking, one at a time.
func (e *Engine) fillStandbys() {
	for {
		select {
		case <-e.clock.After(standbyQuiet):
		case <-e.ctx.Done():
			return
		}
		var next *standbyKind
		e.mu.Lock()
		left, quiet := e.opts.Standby, true
		for _, k := range e.standbyKinds() {
			want := k.wanted(e.line.now(), left)
			left -= want
			if next == nil && len(k.have) < want {
				next = k
			}
			quiet = quiet && e.line.now()-k.last() >= int64(standbyQuiet)
		}
		if next == nil || e.closing {
			e.standingBy = false
			e.mu.Unlock()
			return
		}
		e.mu.Unlock()
		if !quiet {
			continue
		}
		sp, err := e.makeStandby(e.ctx, next)
		e.mu.Lock()
		switch {
		case err != nil:
			next.uses = nil // until it is asked for again
			e.unready[next.snap] = "the last one could not be made ready: " + plainPath(err).Error()
			if e.ctx.Err() == nil && !errors.Is(err, errUnsupported) {
				e.log.Warn("no sandbox of a template is made ready", "snapshot", next.snap, "error", err)
			}
		case e.closing || e.standbys[ownedName{next.owner, string(next.snap)}] != next:
			e.unreserveShared(sp) // nobody wants it any more
			e.mu.Unlock()
			e.eraseStandby(sp)
			continue
		default:
			next.have = append(next.have, sp)
			delete(e.unready, next.snap)
		}
		e.sizeStandbys()
		e.mu.Unlock()
	}
}

// makeStandby restores what a kind is made of and lets it stand still.
func (e *Engine) makeStandby(ctx context.Context, k *standbyKind) (_ *standby, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.CreateTimeout)
	defer cancel()
	snap, release, err := e.useSnapshot(Caller{User: k.owner}, string(k.snap))
	if err != nil {
		return nil, err
	}
	defer release()
	have, err := e.specOf(ctx, snap)
	if err != nil {
		return nil, err
	}
	if SnapshotKind(snap.row.Kind) != MemorySnapshot || len(have.Mounts) > 0 || have.PrivateNetwork != "" {
		return nil, fmt.Errorf("a standby is of memory, and has no mounts and no private network: %w", errUnsupported)
	}
	s, err := e.snapshotter(snap.row.Driver)
	if err != nil {
		return nil, err
	}
	var spec Spec
	if err := e.from(snap, have, &spec); err != nil {
		return nil, err
	}
	if err := e.normalFrom(ctx, Caller{User: k.owner}, &spec); err != nil {
		return nil, err
	}
	sp := &standby{carded: spec.Policy != NoNetwork}
	if sp.carded {
		spec.Policy, spec.Placeholders = "locked", nil
	}
	memory, _, err := memoryUsage(e.memoryDir(snap.row.ID), anywhere) // with what it shares
	if err != nil {
		return nil, err
	}
	if err := errors.Join(e.diskRoom(0), e.memoryRoom(memory)); err != nil {
		return nil, err
	}
	image, err := e.opts.Images.Resolve(ctx, snap.row.ImageDigest) // which the snapshot keeps
	if err != nil {
		return nil, err
	}
	l := spec.Resources.limits()
	now := e.clock.Now()
	sp.row = store.Sandbox{
		ID: warren.SandboxID(newID('s')), Owner: k.owner, State: string(Creating), Generation: 1, Driver: spec.Driver, Image: image.Name, ImageDigest: image.Digest,
		CPUMillis: l.CPUMillis, Memory: l.Memory, Disk: l.Disk, PIDs: l.PIDs, Created: now, SnapshotID: k.snap,
	}
	sp.ws = store.Workspace{ID: warren.WorkspaceID(newID('w')), Owner: k.owner, State: wsCreating, Created: now, RepoID: snap.row.RepoID, Source: snap.row.Source}
	sp.row.WorkspaceID = sp.ws.ID
	e.mu.Lock()
	if err = within(&e.total, sp.cost(), e.opts.Budgets.Total, "of this server"); err == nil {
		e.total.add(sp.cost(), 1)
		e.lastSpace++
		sp.ws.Num = e.lastSpace
	}
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.mu.Lock()
			e.unreserveShared(sp)
			e.mu.Unlock()
			e.eraseStandby(sp)
		}
	}()
	if err := e.store.Update(ctx, func(tx *store.Tx) error { return tx.InsertWorkspace(&sp.ws) }); err != nil {
		return nil, err
	}
	if _, err := e.opts.Workspaces.Copy(ctx, snap.row.FilesID, sp.ws.ID); err != nil {
		return nil, err
	}
	if sp.dirs, err = e.opts.Workspaces.Get(ctx, sp.ws.ID); err != nil {
		return nil, err
	}
	if err := e.starts.acquire(ctx, k.owner); err != nil {
		return nil, err
	}
	defer e.starts.release()
	ctx, cancel = context.WithTimeout(ctx, e.opts.BootTimeout)
	defer cancel()
	if err := e.launch(ctx, bootRequest{
		row: &sp.row, spec: &spec, image: image, dirs: sp.dirs, memory: e.memoryDir(k.snap),
		step: func(ctx context.Context, _ string, fn func(context.Context) error) error { return fn(ctx) },
	}); err != nil {
		return nil, err
	}
	// The guest has answered once before it stands still: its channel is there then, and so is what it takes to answer.
	if err := guestHealth(ctx, e.opts.Drivers[sp.row.Driver], sp.row.ID); err != nil {
		return nil, err
	}
	if err := s.Freeze(ctx, sp.row.ID); err != nil {
		return nil, err
	}
	return sp, fpStandbyMade.Hit()
}

// memoryRoom says whether need more bytes leave enough of the host's memory that they are not the first to go again.
func (e *Engine) memoryRoom(need int64) error {
	room, err := e.opts.Host.Memory()
	if err != nil {
		return nil // as everywhere
	}
	if low := room.low(e.opts.LowMemory, mostLowMemory); room.Free-need < 2*low {
		return fmt.Errorf("the host has %s of memory left: %w", size(room.Free), warren.ErrExhausted)
	}
	return nil
}

func (sp *standby) cost() usage {
	return cost(sp.limits(), true)
}

// unreserveShared gives back what a standby counts for. The caller holds mu.
func (e *Engine) unreserveShared(sp *standby) { e.total.add(sp.cost(), -1) }

// stands says whether one that stands by could become what is asked for.
func (o *origin) stands(s *Spec) bool {
	return o != nil && o.source == "" && s.WorkspaceID == "" && s.PrivateNetwork == "" && len(s.Mounts) == 0 && s.Resources.limits() == o.snap.limits()
}

// takeStandby takes one that can become what is asked for, or returns nil. The caller holds mu.
func (e *Engine) takeStandby(owner string, o *origin, s *Spec) *standby {
	if !o.stands(s) {
		return nil
	}
	k := e.standbys[ownedName{owner, string(o.snap.row.ID)}]
	if k == nil || len(k.have) == 0 {
		return nil
	}
	l := s.Resources.limits()
	if sp := k.have[len(k.have)-1]; sp.limits() != l || sp.carded != (s.Policy != NoNetwork) {
		return nil
	}
	return k.pop()
}

func (sp *standby) limits() driver.Limits {
	return driver.Limits{CPUMillis: sp.row.CPUMillis, Memory: sp.row.Memory, Disk: sp.row.Disk, PIDs: sp.row.PIDs}
}

// giveStandby puts one back that was taken. The caller holds mu.
func (e *Engine) giveStandby(owner string, o *origin, sp *standby) {
	k := e.standbys[ownedName{owner, string(o.snap.row.ID)}]
	if k == nil {
		e.spawnErase(sp)
		return
	}
	k.have = append(k.have, sp)
}

// wake makes a standby the sandbox that was asked for. The policy counts before anything in it runs.
func (m *making) wake(ctx context.Context) error {
	e := m.e
	ctx, cancel := context.WithTimeout(ctx, e.opts.BootTimeout)
	defer cancel()
	id := m.sb.row.ID
	m.booted = true
	if err := m.step(ctx, "wake", func(ctx context.Context) error {
		e.mu.Lock()
		m.sb.policy, m.sb.placeholders = m.spec.Policy, m.spec.Placeholders
		e.mu.Unlock()
		if err := e.setPolicy(ctx, id, &m.spec); err != nil {
			return err
		}
		s, err := e.snapshotter(m.sb.row.Driver)
		if err != nil {
			return err
		}
		return s.Thaw(ctx, id)
	}); err != nil {
		return err
	}
	if err := fpStandbyWoken.Hit(); err != nil {
		return err
	}
	return m.step(ctx, "guest ready", func(ctx context.Context) error {
		return e.greet(ctx, bootRequest{row: &m.sb.row, spec: &m.spec, image: m.image, event: "fork"})
	})
}

// setPolicy makes the policy of a spec that of a sandbox's card, which is there.
func (e *Engine) setPolicy(ctx context.Context, id warren.SandboxID, s *Spec) error {
	if s.Policy == "" || s.Policy == NoNetwork || e.opts.Network == nil {
		return nil
	}
	if err := e.putPolicy(ctx, cardedSandbox{id: id, policy: s.Policy, placeholders: s.Placeholders}, nil); err != nil {
		return fmt.Errorf("the gateway does not serve its network card: %w", err)
	}
	return nil
}

// yieldStandby lets one go, that of the template which was used longest ago, and says whether there was one. The caller holds mu.
func (e *Engine) yieldStandby() bool {
	kinds := e.standbyKinds()
	slices.Reverse(kinds)
	for _, k := range kinds {
		if len(k.have) > 0 {
			e.spawnErase(k.pop())
			k.uses = k.uses[max(len(k.uses)-len(k.have), 0):] // no other is made in its place
			return true
		}
	}
	return false
}

// standbyUsage is what all of them count for. The caller holds mu.
func (e *Engine) standbyUsage() (u usage) {
	for _, k := range e.standbys {
		for _, sp := range k.have {
			u.add(sp.cost(), 1)
		}
	}
	return u
}

// coolStandbys lets all go, or all of one image, and waits until they are gone. Their templates say why.
func (e *Engine) coolStandbys(digest, why string) {
	var gone []*standby
	e.mu.Lock()
	for _, k := range e.standbyKinds() {
		keep := k.have[:0]
		had := len(k.have)
		for _, sp := range k.have {
			if digest != "" && sp.row.ImageDigest != digest {
				keep = append(keep, sp)
				continue
			}
			e.unreserveShared(sp)
			gone = append(gone, sp)
			e.unready[k.snap] = why
		}
		if k.have = keep; digest == "" || len(keep) < had {
			k.uses = nil
		}
	}
	e.mu.Unlock()
	var wg sync.WaitGroup
	for _, sp := range gone {
		wg.Go(func() { e.eraseStandby(sp) })
	}
	wg.Wait()
}

// renewStandbys lets those go that have a network card, which nobody serves any more, and has others made.
func (e *Engine) renewStandbys() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, k := range e.standbys {
		k.have = slices.DeleteFunc(k.have, func(sp *standby) bool {
			if sp.carded {
				e.spawnErase(sp)
			}
			return sp.carded
		})
	}
	e.sizeStandbys()
}

// standbyDied removes one whose execution has ended. The caller holds mu.
func (e *Engine) standbyDied(id warren.SandboxID) {
	for _, k := range e.standbys {
		if i := slices.IndexFunc(k.have, func(sp *standby) bool { return sp.row.ID == id }); i >= 0 {
			sp := k.have[i]
			k.have = slices.Delete(k.have, i, i+1)
			k.uses = nil
			e.log.Warn("a sandbox that stood by has ended", "sandbox", id, "snapshot", k.snap)
			e.spawnErase(sp)
			return
		}
	}
}

// standbyNote says why no sandbox of a template stands by. The caller holds mu.
func (e *Engine) standbyNote(row *store.Template) string {
	k := e.standbys[ownedName{row.Owner, string(row.SnapshotID)}]
	switch why := e.unready[row.SnapshotID]; {
	case e.standbyCount(row) > 0:
		return ""
	case e.opts.Standby == 0:
		return "this server keeps none ready (WARREN_STANDBY)"
	case why != "":
		return why
	case k == nil:
		return "nobody has used it lately; the next create has one made ready"
	}
	return "one is being made ready, or other templates were used later"
}

// standbyCount is how many sandboxes of a template stand by. The caller holds mu.
func (e *Engine) standbyCount(t *store.Template) int {
	if k := e.standbys[ownedName{t.Owner, string(t.SnapshotID)}]; k != nil {
		return len(k.have)
	}
	return 0
}

// spawnErase removes one that has been taken out, in the background. The caller holds mu.
func (e *Engine) spawnErase(sp *standby) {
	e.unreserveShared(sp)
	e.spawn(func() { e.eraseStandby(sp) })
}

// eraseStandby removes all of one, also while the engine closes. What cannot be removed is tried again until then, and is removed by the next Open.
func (e *Engine) eraseStandby(sp *standby) {
	var r removing
	for {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), e.opts.DeleteTimeout)
		err := e.removeFrom(ctx, sp.row.Driver, sp.row.ID)
		if err == nil {
			if err = e.opts.Workspaces.Delete(ctx, sp.ws.ID); errors.Is(err, warren.ErrNotFound) {
				err = nil
			}
		}
		if err == nil {
			err = e.store.UpdateFreeing(ctx, func(tx *store.Tx) error { return tx.DeleteWorkspace(sp.ws.ID) })
		}
		cancel()
		if err == nil {
			return
		}
		e.log.Warn("a sandbox that stood by is not removed yet", "sandbox", sp.row.ID, "error", err)
		if e.ctx.Err() != nil || !e.againRemove(e.ctx, &r) {
			return
		}
	}
}
