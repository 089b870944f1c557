package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

var fpReconcile = failpoint.New("engine.reconcile")

// listWait is how long Open waits for a driver's list. A driver that does not answer hinders no other; its sandboxes
// keep their states until it does.
const listWait = 30 * time.Second

// decision is what Open does with a sandbox.
type decision string

const (
	leave    decision = "leave"    // nothing to do
	adopt    decision = "adopt"    // it runs and goes on running
	undo     decision = "undo"     // its create was cut short, or the fork that it is a child of and that is all or nothing
	complete decision = "complete" // its create was cut short, but all is there and its caller may ask for it again
	fail     decision = "fail"     // it has no execution any more
	sweepOff decision = "sweep"    // it has an execution that it should not have
	settle   decision = "settle"   // its pause or resume was cut short, or it has an execution while it is paused
	finish   decision = "finish"   // its delete was cut short
)

// decide is the table of reconciliation. st is nil when the driver does not have the sandbox; keyed says that an
// idempotency key names it, and that it can be completed.
func decide(row *store.Sandbox, st *driver.Status, keyed bool) decision {
	has := driver.State("")
	if st != nil {
		has = st.State
	}
	if row.ForkID != "" && State(row.State) != Deleting {
		return undo
	}
	switch State(row.State) {
	case Creating:
		switch {
		case row.Generation > 1:
			return fail // a restart; the workspace is not ours to undo
		case has == driver.Running && keyed:
			return complete
		}
		return undo
	case Running:
		if has == driver.Running {
			return adopt
		}
		return fail
	case Failed:
		if st != nil {
			return sweepOff
		}
		return leave
	case Pausing, Resuming, RollingBack:
		return settle
	case Paused:
		if st != nil {
			return settle
		}
		return leave
	case Deleting:
		return finish
	}
	return leave
}

// reconcile loads the store and brings it and the drivers together.
func (e *Engine) reconcile(ctx context.Context) error {
	rows, err := e.store.Sandboxes(ctx)
	if err != nil {
		return err
	}
	spaces, err := e.store.Workspaces(ctx)
	if err != nil {
		return err
	}
	if e.lastNum, e.lastSpace, err = e.store.LastNums(ctx); err != nil {
		return err
	}
	if err := e.capLives(ctx, rows); err != nil {
		return err
	}
	snaps, err := e.store.Snapshots(ctx)
	if err != nil {
		return err
	}
	if e.lastSnap, err = e.store.LastSnapshot(ctx); err != nil {
		return err
	}
	have := e.listDrivers(ctx)
	if err := fpReconcile.Hit(); err != nil {
		return err
	}
	// At most so many repairs at the same time; each waits for drivers and disks.
	slots := make(chan struct{}, 16)
	do := func(fn func()) {
		e.spawn(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if e.ctx.Err() == nil {
				fn()
			}
		})
	}
	var keyed map[string]bool
	if slices.ContainsFunc(rows, func(r *store.Sandbox) bool { return State(r.State) == Creating }) {
		if keyed, err = e.store.KeyedObjects(ctx); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, row := range spaces {
		w := &workspace{row: *row}
		e.spaces[row.ID] = w
		if row.Name != "" {
			e.spaceNames[ownedName{row.Owner, row.Name}] = w
		}
	}
	for _, row := range snaps {
		// What a rollback that was cut short goes on with.
		e.snaps[row.ID] = &snapshot{row: *row}
	}
	count := map[decision]int{}
	for _, row := range rows {
		count[e.load(row, have, keyed[string(row.ID)], do)]++
	}
	for name, list := range have {
		for id := range list {
			if e.boxes[id] == nil {
				count["stranger"]++
				do(func() { e.removeStranger(name, id) })
			}
		}
	}
	for _, w := range e.spaces {
		if w.box == nil && w.row.State != wsReady {
			w.removing = true
			count["workspace"]++
			do(func() { e.finishWorkspace(w) })
		}
	}
	if err := e.dropImages(do); err != nil {
		return err
	}
	if err := e.loadSnapshots(snaps, do); err != nil {
		return err
	}
	if p, ok := e.opts.Images.(HostPruner); ok {
		keep := map[string]bool{}
		for _, row := range rows {
			keep[row.ImageDigest] = true
		}
		for _, row := range snaps {
			keep[row.ImageDigest] = true
		}
		do(func() {
			if err := p.PruneHost(keep); err != nil {
				e.log.Warn("old states of the host's image not removed", "error", err)
			}
		})
	}
	if len(rows) > 0 {
		e.log.Info("reconciled", "sandboxes", len(rows), "workspaces", len(spaces), "decisions", fmt.Sprint(count))
	}
	return nil
}

// lifeCap is the server's limit for the lives of what was made when it had none, or a longer one. It is kept apart from what they were made
// with: a line in a file that is taken back or changed leaves nothing behind.
type lifeCap struct {
	Limit time.Duration `json:"limit"`
	Since int64         `json:"since"` // on the time line
	Last  int64         `json:"last"`  // the number of the last sandbox made before
}

// metaLifeCap is where the store has the cap.
const metaLifeCap = "life_cap"

// capLives has the time of those that were made when the server had no limit for their lives, or a longer one, begin now, so that nobody
// loses a sandbox to a line in a file before having heard of it.
func (e *Engine) capLives(ctx context.Context, rows []*store.Sandbox) error {
	text, err := e.store.Meta(ctx, metaLifeCap)
	if err != nil {
		return err
	}
	var was lifeCap
	if text != "" {
		if err := json.Unmarshal([]byte(text), &was); err != nil {
			e.log.Error("what limit the lives of sandboxes had cannot be read; it begins anew", "error", err)
			was = lifeCap{}
		}
	}
	limit := e.opts.MaxLifetime
	e.lifeCap = was
	if limit == was.Limit {
		return nil
	}
	e.lifeCap.Limit = limit
	if limit != 0 && (was.Limit == 0 || limit < was.Limit) {
		e.lifeCap.Since, e.lifeCap.Last = e.line.now(), e.lastNum
	}
	if limit == 0 {
		e.lifeCap = lifeCap{}
	}
	b, err := json.Marshal(e.lifeCap)
	if err != nil {
		return err
	}
	var changed []*store.Sandbox
	for _, row := range rows {
		if State(row.State) == Deleting || row.Damaged != "" {
			continue
		}
		before, _ := was.ends(row)
		if now, _ := e.lifeCap.ends(row); now != before {
			changed = append(changed, row)
		}
	}
	says := "this server's limit for lives (max_lifetime) is gone; it has the end that it was made with, if any"
	if limit != 0 {
		says = "it lives until " + e.line.wall(e.lifeCap.Since+int64(limit)).UTC().Format(time.RFC3339) + " at most, for this server now allows " + limit.String() + " (max_lifetime)"
	}
	if len(changed) > 0 {
		e.log.Warn("max_lifetime has changed, and with it when sandboxes end that are there", "sandboxes", len(changed), "was", was.Limit, "is", limit)
	}
	for part := range slices.Chunk(changed, 200) {
		if err := e.store.Update(ctx, func(tx *store.Tx) error {
			for _, row := range part {
				if err := tx.AppendEvent(e.event("warren", "sandbox.update", row, says)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("bound the lives of sandboxes: %w", err)
		}
	}
	return e.store.Update(ctx, func(tx *store.Tx) error { return tx.SetMeta(metaLifeCap, string(b)) })
}

// ends is when the life of a sandbox ends, 0 for never, and whether the server's limit is why.
func (c *lifeCap) ends(row *store.Sandbox) (at int64, capped bool) {
	if c.Limit == 0 || row.Num > c.Last {
		return row.LifeEnds, false
	}
	if at = c.Since + int64(c.Limit); row.LifeEnds != 0 && row.LifeEnds <= at {
		return row.LifeEnds, false
	}
	return at, true
}

// listDrivers asks all drivers at the same time. A driver that fails has no entry.
func (e *Engine) listDrivers(ctx context.Context) map[string]map[warren.SandboxID]driver.Status {
	ctx, cancel := context.WithTimeout(ctx, listWait)
	defer cancel()
	var mu sync.Mutex
	out := map[string]map[warren.SandboxID]driver.Status{}
	var wg sync.WaitGroup
	for name, d := range e.opts.Drivers {
		wg.Go(func() {
			all, err := d.List(ctx)
			if err != nil {
				e.metrics.driverError(name, "list")
				e.log.Error("driver does not list its sandboxes; they keep their states until it does", "driver", name, "error", err)
				return
			}
			have := make(map[warren.SandboxID]driver.Status, len(all))
			for _, s := range all {
				have[s.ID] = s
			}
			mu.Lock()
			defer mu.Unlock()
			out[name] = have
		})
	}
	wg.Wait()
	return out
}

// load puts one row into memory and begins what is to be done with it. The caller holds mu.
func (e *Engine) load(row *store.Sandbox, have map[string]map[warren.SandboxID]driver.Status, keyed bool, do func(func())) decision {
	now := e.line.now()
	sb := &sandbox{row: *row, stored: true, timer: -1, born: now - int64(soon), active: now}
	switch State(row.State) {
	case Creating, Running, Pausing, Paused, Resuming, RollingBack, Failed, Deleting:
	default:
		sb.row.Damaged = fmt.Sprintf("its state is %q", row.State)
	}
	if sb.row.Damaged != "" {
		e.log.Error("record damaged; its sandbox can only be deleted", "sandbox", row.ID, "damage", sb.row.Damaged)
		sb.row.State = string(Failed)
	}
	list, listed := have[row.Driver]
	var st *driver.Status
	if s, ok := list[row.ID]; ok {
		st = &s
	}
	what := decide(&sb.row, st, keyed && e.rootCertain(row))
	if sb.row.Damaged != "" {
		what = leave
	}
	if !listed && ((what == adopt || what == fail) && sb.state() == Running || what == settle && e.opts.Drivers[row.Driver] == nil) {
		what = leave
		if e.opts.Drivers[row.Driver] == nil {
			// In memory alone: with the driver back it runs on.
			sb.row.State = string(Failed)
			sb.row.Failure = &store.Failure{Reason: "lost", Message: fmt.Sprintf("the driver %q is not open in this server", row.Driver), Time: e.clock.Now()}
		}
	}
	e.addUsage(sb)
	e.insert(sb)
	hold := func(kind string, fn func(op *operation)) {
		op := newOperation(kind, nil)
		sb.op = op
		do(func() { fn(op) })
	}
	switch what {
	case undo:
		hold("delete", func(op *operation) { e.undoInterrupted(sb, op) })
	case complete:
		hold("create", func(op *operation) { e.completeInterrupted(sb, op) })
	case fail:
		hold("fail", func(op *operation) { e.failAtStart(sb, op, st) })
	case sweepOff:
		hold("fail", func(op *operation) {
			e.removeExecution(sb)
			e.finish(sb, op, nil)
		})
	case settle:
		if State(row.State) == RollingBack {
			ctx, cancel := context.WithCancel(e.ctx) // which a delete ends
			op := newOperation("rollback", cancel)
			sb.op = op
			do(func() { e.settleFor(ctx, sb, op) })
			break
		}
		hold("pause", func(op *operation) { e.settlePause(sb, op) })
	case finish:
		hold("delete", func(op *operation) {
			e.erase(e.ctx, sb, op, erasure{event: e.event("warren", "sandbox.deleted", &sb.row, "after a restart of the server")})
		})
	}
	e.schedule(sb)
	return what
}

// addUsage counts a loaded sandbox, whatever the budgets say. The caller holds mu.
func (e *Engine) addUsage(sb *sandbox) {
	u := e.usageOf(sb.row.Owner)
	if sb.state() == Paused {
		sb.image = e.imageSize(sb.row.ID)
		if fi, err := os.Stat(e.imageDir(sb.row.ID)); err == nil {
			// It has rested since then, and a start of the server is no use of it.
			sb.paused = e.line.now() - int64(max(e.clock.Now().Sub(fi.ModTime()), 0))
			sb.active = sb.paused
		}
	}
	c := sb.cost()
	u.add(c, 1)
	e.total.add(c, 1)
}

var errInterrupted = fmt.Errorf("the server ended while the sandbox was being made: %w", warren.ErrUnavailable)

func (e *Engine) undoInterrupted(sb *sandbox, op *operation) {
	e.mu.Lock()
	ws := e.spaces[sb.row.WorkspaceID]
	// One that is not ready was made for this sandbox, even if it was to be kept afterwards; so was that of a fork's child.
	op.workspace = ws != nil && (ws.row.State == wsCreating || sb.row.ForkID != "")
	e.setState(sb, Deleting)
	e.mu.Unlock()
	e.erase(e.ctx, sb, op, erasure{event: e.event("warren", "sandbox.create_failed", &sb.row, errInterrupted.Error()), cause: errInterrupted, lostKey: true})
}

// completeInterrupted takes the last steps of a create whose execution is there.
func (e *Engine) completeInterrupted(sb *sandbox, op *operation) {
	err := func() error {
		ctx, cancel := context.WithTimeout(e.ctx, e.opts.CreateTimeout)
		defer cancel()
		e.mu.Lock()
		row, ws := sb.row, e.spaces[sb.row.WorkspaceID]
		e.mu.Unlock()
		if ws == nil {
			return fmt.Errorf("workspace %s: %w", row.WorkspaceID, warren.ErrNotFound)
		}
		if err := e.opts.Workspaces.Populate(ctx, row.WorkspaceID); err != nil {
			return err
		}
		spec, _, err := e.loadSpec(ctx, row.ID)
		if err != nil {
			return err
		}
		img, err := e.pinnedImage(ctx, &row)
		if err != nil {
			return err
		}
		bctx, bcancel := context.WithTimeout(ctx, e.opts.BootTimeout)
		defer bcancel()
		// What it may reach is what its spec says, also for one that stood by and was cut off before it was woken; to wake it twice is no harm.
		e.mu.Lock()
		sb.policy, sb.placeholders = cmp.Or(spec.Policy, NoNetwork), spec.Placeholders
		e.mu.Unlock()
		if err := e.setPolicy(bctx, row.ID, spec); err != nil {
			return err
		}
		if s, ok := driver.As[driver.Freezer](e.opts.Drivers[row.Driver]); ok {
			if err := s.Thaw(bctx, row.ID); err != nil {
				return err
			}
		}
		r := bootRequest{row: &row, spec: spec, image: img}
		if row.SnapshotID != "" || row.SourceID != "" {
			r.event = "fork"
		}
		if err := e.greet(bctx, r); err != nil {
			return err
		}
		row.State = string(Running)
		wsRow := ws.row
		wsRow.State = wsReady
		if err := e.store.Update(ctx, func(tx *store.Tx) error {
			if err := tx.UpdateSandbox(&row); err != nil {
				return err
			}
			if err := tx.UpdateWorkspace(&wsRow); err != nil {
				return err
			}
			return tx.AppendEvent(e.event("warren", "sandbox.running", &row, "completed after a restart of the server"))
		}); err != nil {
			return err
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		sb.row.State, ws.row.State = row.State, wsReady
		e.schedule(sb)
		return nil
	}()
	switch {
	case err == nil:
		e.finish(sb, op, nil)
	case e.ctx.Err() != nil:
		e.finish(sb, op, errClosing)
	default:
		e.log.Warn("interrupted create not completed", "sandbox", sb.row.ID, "error", err)
		e.mu.Lock()
		op.kind = "delete"
		e.mu.Unlock()
		e.undoInterrupted(sb, op)
	}
}

// failAtStart records a sandbox whose execution ended while no server looked, or whose restart was cut short.
func (e *Engine) failAtStart(sb *sandbox, op *operation, st *driver.Status) {
	f := store.Failure{Reason: "lost", Time: e.clock.Now()}
	e.mu.Lock()
	restarting := sb.state() == Creating
	e.mu.Unlock()
	switch {
	case restarting:
		f.Message = "the server ended while it was restarted"
	case st != nil && st.Exit != nil:
		f.Reason, f.Message, f.Time = st.Exit.Reason, st.Exit.Message, st.Exit.Time
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	e.setFailed(ctx, sb, f)
	e.mu.Lock()
	sb.failures = 0 // that was no crash loop
	e.schedule(sb)
	e.mu.Unlock()
	e.removeExecution(sb)
	e.finish(sb, op, nil)
}

// removeExecution removes what the driver still has of a failed sandbox. What fails is repeated by restart or delete.
func (e *Engine) removeExecution(sb *sandbox) {
	d := e.opts.Drivers[sb.row.Driver]
	if d == nil {
		return
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	if err := e.removeFrom(ctx, sb.row.Driver, sb.row.ID); err != nil {
		e.metrics.driverError(sb.row.Driver, "delete")
		e.log.Warn("dead execution not removed yet", "sandbox", sb.row.ID, "error", err)
	}
}

// removeStranger removes a sandbox that a driver has and the store has not. A driver's state belongs to one data
// directory, and with it to this store: what is in it is of our making.
func (e *Engine) removeStranger(name string, id warren.SandboxID) {
	var r removing
	for {
		ctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
		err := e.removeFrom(ctx, name, id)
		if err == nil {
			err = e.store.Update(ctx, func(tx *store.Tx) error {
				return tx.AppendEvent(&store.Event{Time: e.clock.Now(), Owner: "warren", Actor: "warren", Action: "sandbox.reaped", SandboxID: id,
					Message: "driver " + name + " had it, the store did not"})
			})
			cancel()
			e.log.Warn("sandbox without a record removed", "sandbox", id, "driver", name, "error", err)
			return
		}
		cancel()
		e.metrics.driverError(name, "delete")
		if !e.againRemove(e.ctx, &r) {
			return
		}
	}
}

// finishWorkspace removes a workspace whose create or delete was cut short.
func (e *Engine) finishWorkspace(w *workspace) {
	var ev *store.Event
	if w.row.State == wsDeleting {
		ev = e.workspaceEvent("warren", "workspace.delete", &w.row, "after a restart of the server")
	}
	if err := e.removeWorkspace(e.ctx, w, ev); err != nil {
		if !errors.Is(err, context.Canceled) {
			e.log.Warn("workspace not removed until the next start", "workspace", w.row.ID, "error", err)
		}
		return
	}
	e.mu.Lock()
	e.forget(w)
	e.mu.Unlock()
}
