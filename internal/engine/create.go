package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during a create, in order.
var (
	fpCreateBegin     = failpoint.New("engine.create.begin")
	fpCreateIntent    = failpoint.New("engine.create.intent")
	fpCreatePrepared  = failpoint.New("engine.create.prepared")
	fpCreateQueued    = failpoint.New("engine.create.queued")
	fpCreateBooted    = failpoint.New("engine.create.booted")
	fpCreatePopulated = failpoint.New("engine.create.populated")
	fpCreateReady     = failpoint.New("engine.create.ready")
	fpCreateRunning   = failpoint.New("engine.create.running")
	fpCreateUndo      = failpoint.New("engine.create.undo")
)

// storedSpec is a spec as the store keeps it.
type storedSpec struct {
	Spec
	// Operator says with whose rights the mounts were allowed, for a restart opens them again.
	Operator bool `json:"operator,omitempty"`
}

// flight is a create under way and the callers that wait for it. It ends when none is left.
type flight struct {
	print  string
	cancel context.CancelFunc
	refs   int // guarded by Engine.mu
	done   chan struct{}
	result *Sandbox
	err    error

	mu        sync.Mutex
	listeners []func(Progress)
}

// tell passes progress on. Listeners of callers that have left are nil.
func (f *flight) tell(p Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fn := range f.listeners {
		if fn != nil {
			fn(p)
		}
	}
}

func (f *flight) listen(fn func(Progress)) (leave func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := len(f.listeners)
	f.listeners = append(f.listeners, fn)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.listeners[i] = nil
	}
}

// Create makes a sandbox that is ready for its first command, or leaves nothing. progress, if not nil, is called from
// another goroutine, one call at a time, and not after Create has returned.
//
// When ctx ends the create is undone, unless another call with the same idempotency key waits for it too.
func (e *Engine) Create(ctx context.Context, c Caller, r CreateRequest, progress func(Progress)) (*Sandbox, error) {
	spec := r.Spec.clone()
	if err := checkKey(r.IdempotencyKey); err != nil {
		return nil, err
	}
	print := fingerprint(spec) // as it was asked for: a default that changes makes no other request
	key := ownedName{c.User, r.IdempotencyKey}
	var from *origin
	if spec.Snapshot != "" || spec.Template != "" {
		snap, release, err := e.useOrigin(c, &spec)
		if err != nil && key.name != "" {
			// It may have been deleted since the call was first made.
			if sb, rerr := e.recall(ctx, c, key, print); sb != nil || rerr != nil {
				return sb, rerr
			}
		}
		if err != nil {
			return nil, err
		}
		defer release()
		have, err := e.specOf(ctx, snap)
		if err != nil {
			return nil, err
		}
		if err := e.from(snap, have, &spec); err != nil {
			return nil, err
		}
		spec.Snapshot = string(snap.row.ID)
		from = &origin{snap: snap, operator: have.Operator}
	}
	normal := e.normal
	if from != nil {
		normal = e.normalFrom
	}
	if err := normal(ctx, c, &spec); err != nil {
		return nil, err
	}
	for {
		f, err := e.board(ctx, c, spec, key, print, from)
		if err != nil {
			return nil, err
		}
		sb, err, again := e.ride(ctx, c, f, r.IdempotencyKey != "", progress)
		if !again {
			return sb, err
		}
	}
}

// board joins the flight of a key, or starts one.
func (e *Engine) board(ctx context.Context, c Caller, spec Spec, key ownedName, print string, from *origin) (*flight, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if key.name != "" {
		if f := e.flights[key]; f != nil {
			if f.print != print {
				return nil, keyReused(key.name)
			}
			if f.refs > 0 {
				f.refs++
			}
			return f, nil
		}
	}
	// The create has to outlive this call when others join it; the trace goes along.
	runCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.CreateTimeout)
	f := &flight{print: print, cancel: cancel, refs: 1, done: make(chan struct{})}
	release := func() {}
	if from != nil {
		release = e.holdSnapshot(from.snap)
	}
	stop := context.AfterFunc(e.ctx, cancel)
	ok := e.spawn(func() {
		defer stop()
		defer cancel()
		defer release()
		f.result, f.err = e.make(runCtx, &making{caller: c, spec: spec, key: key, flight: f, from: from})
		e.mu.Lock()
		if key.name != "" {
			delete(e.flights, key)
		}
		e.mu.Unlock()
		close(f.done)
	})
	if !ok {
		stop()
		cancel()
		return nil, errClosing
	}
	if key.name != "" {
		e.flights[key] = f
	}
	return f, nil
}

// spawn runs fn as a part of the engine's life. The caller holds mu.
func (e *Engine) spawn(fn func()) bool {
	if e.closing {
		return false
	}
	e.wg.Go(fn)
	return true
}

// undoWait is how long a caller that has given up waits to see its create undone.
const undoWait = 10 * time.Second

// ride waits for a flight. again says that it had been given up by others and is over, so that a new one is due.
func (e *Engine) ride(ctx context.Context, c Caller, f *flight, keyed bool, progress func(Progress)) (_ *Sandbox, _ error, again bool) {
	e.mu.Lock()
	abandoned := f.refs == 0
	e.mu.Unlock()
	if abandoned {
		select {
		case <-f.done:
			return nil, nil, true
		case <-ctx.Done():
			return nil, ctx.Err(), false
		}
	}
	if progress != nil {
		defer f.listen(progress)()
	}
	select {
	case <-f.done:
		if f.err != nil {
			return nil, f.err, false
		}
		sb := *f.result
		return &sb, nil, false
	case <-ctx.Done():
	}
	e.mu.Lock()
	f.refs--
	last := f.refs == 0
	if last {
		f.cancel()
	}
	e.mu.Unlock()
	if !last {
		return nil, ctx.Err(), false
	}
	select {
	case <-f.done:
	case <-time.After(undoWait):
		return nil, ctx.Err(), false
	}
	if f.err == nil && !keyed {
		// It was ready in the same moment. Nobody will ever ask for it.
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
		defer cancel()
		if err := e.Delete(dctx, c, DeleteRequest{ID: string(f.result.ID), AllowMissing: true}); err != nil {
			e.log.Warn("cancelled create not removed yet", "sandbox", f.result.ID, "error", err)
		}
	}
	return nil, ctx.Err(), false
}

func keyReused(key string) error {
	return fmt.Errorf("idempotency key %s was used for another request; a new request needs a new key: %w", quote(key), warren.ErrInvalid)
}

// making is one create.
type making struct {
	e      *Engine
	caller Caller
	spec   Spec
	key    ownedName
	flight *flight
	sb     *sandbox
	op     *operation
	ws     *workspace
	ownWS  bool // the workspace was made for this sandbox
	mounts []driver.Mount
	image  *Image
	source WorkspaceSource
	dirs   *WorkspaceDirs
	booted bool // the driver was asked to create
	from   *origin
	// standby is what the sandbox was taken from, and asleep says that it could not be woken; fresh, that none is to be used.
	standby       *standby
	asleep, fresh bool

	began time.Duration
	mu    sync.Mutex
	steps []store.Milestone
}

// make runs a create to its end.
func (e *Engine) make(ctx context.Context, m *making) (*Sandbox, error) {
	if m.key.name != "" {
		if sb, err := e.recall(ctx, m.caller, m.key, m.flight.print); sb != nil || err != nil {
			return sb, err
		}
	}
	m.e = e
	m.began, _ = e.clock.Steady()
	ctx, span := e.tracer.Start(ctx, "sandbox.create", trace.WithAttributes(attribute.String("warren.driver", m.spec.Driver), attribute.String("warren.image", m.spec.Image)))
	defer span.End()
	v, err := m.run(ctx)
	if err != nil && m.asleep && m.op.lingers == nil && ctx.Err() == nil {
		e.log.Warn("a sandbox that stood by cannot be used; one is made anew", "sandbox", m.sb.row.ID, "error", err)
		m = &making{e: e, caller: m.caller, spec: m.spec, key: m.key, flight: m.flight, from: m.from, fresh: true, began: m.began}
		v, err = m.run(ctx)
	}
	if err == nil && m.spec.Template != "" && m.from.stands(&m.spec) {
		e.noteTemplate(m.caller.User, m.from.snap.row.ID)
	}
	took, _ := e.clock.Steady()
	e.metrics.created(err, took-m.began)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		if m.sb != nil {
			e.log.Info("create failed", "sandbox", m.sb.row.ID, "user", m.caller.User, "error", err)
		}
		return nil, err
	}
	span.SetAttributes(attribute.String("warren.sandbox", string(v.ID)))
	e.log.Info("sandbox running", "sandbox", v.ID, "user", m.caller.User, "took", took-m.began)
	return v, nil
}

// recall returns the sandbox that an earlier call with the key made.
func (e *Engine) recall(ctx context.Context, c Caller, key ownedName, print string) (*Sandbox, error) {
	k, err := e.store.Key(ctx, key.owner, key.name)
	if err != nil || k == nil || e.clock.Now().Sub(k.Created) > keyLife {
		e.afterUndo()
		return nil, err
	}
	if k.Fingerprint != print {
		return nil, keyReused(key.name)
	}
	e.mu.Lock()
	sb := e.boxes[warren.SandboxID(k.Object)]
	e.mu.Unlock()
	if sb != nil {
		// One that reconciliation finishes or undoes is waited for, as long as that gets on.
		if err := e.settled(ctx, sb); err != nil {
			return nil, err
		}
		if v, err := e.Get(ctx, c, k.Object); !errors.Is(err, warren.ErrNotFound) {
			return v, err
		}
	}
	if k, err := e.store.Key(ctx, key.owner, key.name); err != nil || k == nil {
		e.afterUndo()
		return nil, err // undone: this is the first call
	}
	return nil, fmt.Errorf("idempotency key %s made sandbox %s, which is gone; use a new key for a new sandbox: %w", quote(key.name), k.Object, warren.ErrState)
}

// afterUndo waits for undone creates whose key the store has forgotten until the memory has forgotten them too: a retry shall find neither
// the key nor the name and the budget.
func (e *Engine) afterUndo() {
	e.undoing.Lock()
	defer e.undoing.Unlock()
}

// keyLife is how long an idempotency key is kept.
const keyLife = 24 * time.Hour

// settled waits until nothing holds sb. A removal that may be tried for hours is not waited for: its first failure is
// returned, and when it undoes a create, then why that create failed.
func (e *Engine) settled(ctx context.Context, sb *sandbox) error {
	for {
		e.mu.Lock()
		op := sb.op
		e.mu.Unlock()
		if op == nil {
			return nil
		}
		select {
		case <-op.done:
			continue
		case <-op.first:
			if op.lingers != nil {
				return op.lingers
			}
		case <-ctx.Done():
			return ctx.Err()
		}
		select {
		case <-op.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *making) run(ctx context.Context) (_ *Sandbox, err error) {
	e := m.e
	if err := fpCreateBegin.Hit(); err != nil {
		return nil, err
	}
	if err := e.diskRoom(0); err != nil {
		return nil, err
	}
	if m.mounts, err = e.openMounts(m.rights(), m.spec.Mounts); err != nil {
		return nil, err
	}
	defer closeMounts(m.mounts)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := m.reserve(cancel); err != nil {
		return nil, err
	}
	if err := m.build(ctx); err != nil {
		err = e.plain(ctx, err)
		m.undo(ctx, err)
		return nil, err
	}
	e.mu.Lock()
	v := e.view(m.sb)
	e.mu.Unlock()
	v.Spec = m.spec
	v.Spec.IdleAction = v.IdleAction
	if v.Spec.Policy != "" {
		v.Network = v.Spec.Policy
	}
	for _, s := range m.steps {
		v.Timing = append(v.Timing, Milestone(s))
	}
	e.finish(m.sb, m.op, nil)
	return v, nil
}

// rights are those with which the mounts are opened: what goes on from a snapshot has the mounts that it had.
func (m *making) rights() Caller {
	c := m.caller
	if m.from != nil {
		c.Operator = m.from.operator
	}
	return c
}

// plain says why a context ended when the engine itself ended it.
func (e *Engine) plain(ctx context.Context, err error) error {
	if e.ctx.Err() != nil {
		return errClosing
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return fmt.Errorf("the create was cut short by a delete or by its caller: %w", errors.Join(warren.ErrState, context.Canceled))
	}
	return err
}

// reserve takes the name, the workspace and the budgets, in memory, all or nothing.
func (m *making) reserve(cancel context.CancelFunc) error {
	e, s := m.e, &m.spec
	now := e.clock.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return errClosing
	}
	owner := m.caller.User
	if s.Name != "" {
		if other := e.names[ownedName{owner, s.Name}]; other != nil {
			return nameTaken("sandbox", s.Name, string(other.row.ID))
		}
		if err := e.notShortID(m.caller, s.Name); err != nil {
			return err
		}
	}
	l := s.Resources.limits()
	if s.WorkspaceID != "" {
		ws, err := e.findWorkspace(m.caller, s.WorkspaceID)
		if err != nil {
			return err
		}
		if err := ws.free(); err != nil {
			return err
		}
		m.ws = ws
		s.WorkspaceID = string(ws.row.ID)
		// A workspace stays its owner's, so a sandbox on it is that owner's too.
		if ws.row.Owner != owner {
			return fmt.Errorf("workspace %s belongs to user %q: %w", ws.row.ID, ws.row.Owner, warren.ErrDenied)
		}
	}
	if err := e.roomFor(ownedName{owner, s.PrivateNetwork}, 1); err != nil {
		return err
	}
	if !m.fresh {
		if m.from == nil || s.Driver == m.from.snap.row.Driver { // those that stand ready have the snapshot's
			m.standby = e.takeStandby(owner, m.from, s)
		}
	}
	if m.standby != nil {
		e.unreserveShared(m.standby)
	}
	if err := e.reserve(owner, cost(l, true)); err != nil {
		if m.standby != nil {
			e.total.add(m.standby.cost(), 1)
			e.giveStandby(owner, m.from, m.standby)
		}
		return err
	}
	id := warren.SandboxID(newID('s'))
	switch {
	case m.standby != nil:
		m.ownWS = true
		id = m.standby.row.ID
		m.ws = &workspace{row: m.standby.ws}
		m.ws.row.Keep = s.KeepWorkspace
		e.spaces[m.ws.row.ID] = m.ws
	case m.ws == nil:
		m.ownWS = true
		e.lastSpace++
		m.ws = &workspace{row: store.Workspace{Num: e.lastSpace, ID: warren.WorkspaceID(newID('w')), Owner: owner, State: wsCreating, Created: now, Keep: s.KeepWorkspace}}
		e.spaces[m.ws.row.ID] = m.ws
	}
	e.lastNum++
	m.sb = &sandbox{spec: s, timer: -1, born: e.line.now(), active: e.line.now()}
	m.sb.row = store.Sandbox{
		Num: e.lastNum, ID: id, Name: s.Name, Owner: owner, State: string(Creating), Generation: 1,
		Driver: s.Driver, Image: s.Image, WorkspaceID: m.ws.row.ID,
		CPUMillis: l.CPUMillis, Memory: l.Memory, Disk: l.Disk, PIDs: l.PIDs,
		Created: now, LastActive: now, Idle: s.IdleTimeout, Restart: string(s.Restart),
		DropWorkspace: m.ownWS && !s.KeepWorkspace, AccessToken: randomHex(32), Labels: s.Labels,
		IdleAction: string(s.IdleAction), NoAutoResume: s.NoAutoResume, Network: s.PrivateNetwork,
		TTL: s.TTL, TTLAction: string(s.TTLAction),
	}
	if m.from != nil {
		m.sb.row.SnapshotID, m.sb.row.SourceID, m.sb.row.ForkID = m.from.parent(), m.from.source, m.from.group
	}
	if s.TTL > 0 {
		m.sb.row.Expires = e.line.now() + int64(s.TTL)
	}
	if s.MaxLifetime > 0 {
		m.sb.row.LifeEnds = e.line.now() + int64(s.MaxLifetime)
	}
	m.op = newOperation("create", cancel)
	m.sb.op = m.op
	e.insert(m.sb)
	m.ws.box = m.sb
	return nil
}

// build does what can fail.
func (m *making) build(ctx context.Context) error {
	e := m.e
	if err := m.gather(ctx); err != nil {
		return err
	}
	if err := m.intend(ctx); err != nil {
		return err
	}
	if err := fpCreateIntent.Hit(); err != nil {
		return err
	}
	if m.from != nil {
		if err := m.from.instant.wait(ctx); err != nil {
			return err
		}
	}
	if m.standby != nil {
		if err := m.wake(ctx); err != nil {
			m.asleep = ctx.Err() == nil // else it was cut short
			return err
		}
		return m.settle(ctx)
	}
	if err := m.step(ctx, "cut workspace", func(ctx context.Context) (err error) {
		if m.from != nil {
			m.dirs, err = m.cutFrom(ctx)
		} else if m.ownWS {
			m.dirs, err = e.opts.Workspaces.Prepare(ctx, m.ws.row.ID, m.source)
		} else {
			m.dirs, err = e.opts.Workspaces.Get(ctx, m.ws.row.ID)
		}
		return err
	}); err != nil {
		return err
	}
	if err := fpCreatePrepared.Hit(); err != nil {
		return err
	}
	if err := m.step(ctx, "queue", func(ctx context.Context) error { return e.starts.acquire(ctx, m.sb.row.Owner) }); err != nil {
		return err
	}
	err := m.start(ctx)
	e.starts.release()
	if err == nil && m.from != nil {
		err = m.from.instant.waitRuns(ctx)
	}
	if err != nil {
		return err
	}
	return m.settle(ctx)
}

// cutFrom makes the workspace what the snapshot's is.
func (m *making) cutFrom(ctx context.Context) (*WorkspaceDirs, error) {
	e, files := m.e, m.from.snap.row.FilesID
	if m.from.copied != nil {
		defer m.from.copied()
	}
	var err error
	if m.from.adopt {
		err = e.opts.Workspaces.Adopt(ctx, files, m.ws.row.ID)
	} else {
		_, err = e.opts.Workspaces.Copy(ctx, files, m.ws.row.ID)
	}
	if err != nil {
		return nil, err
	}
	return e.opts.Workspaces.Get(ctx, m.ws.row.ID)
}

// gather finds the image and brings the repository into the cache, at the same time. It makes nothing of the sandbox's.
func (m *making) gather(ctx context.Context) error {
	e := m.e
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return m.step(gctx, "resolve image", func(ctx context.Context) error {
			if m.from != nil {
				return m.imageOf(ctx)
			}
			ref, err := m.imageRef(ctx)
			if err != nil {
				return err
			}
			m.image, err = e.useImage(ctx, m.sb, ref)
			return err
		})
	})
	if m.ownWS && m.spec.Repo != nil && m.from == nil {
		g.Go(func() error {
			return m.step(gctx, "fetch repo", func(ctx context.Context) (err error) {
				m.source, err = e.fetchSource(ctx, m.caller, m.ws, m.spec.Repo, m.flight.tell)
				return err
			})
		})
	}
	return g.Wait()
}

// imageOf finds the image that a snapshot goes on with.
func (m *making) imageOf(ctx context.Context) (err error) {
	p := &m.from.snap.row
	m.image, err = m.e.useImage(ctx, m.sb, p.ImageDigest)
	if !errors.Is(err, warren.ErrNotFound) {
		return err
	}
	if SnapshotKind(p.Kind) == FilesSnapshot && m.spec.Driver == p.Driver {
		m.image, err = m.e.useImage(ctx, m.sb, p.Image)
		return err
	}
	if SnapshotKind(p.Kind) == FilesSnapshot {
		return fmt.Errorf("image %s is no more what it was when snapshot %s was taken, so its files pass to no other driver: %w", p.Image, m.from.snap.label(), errUnsupported)
	}
	return fmt.Errorf("image %s is no more what it was when snapshot %s was taken, and memory goes on only with the files that it was made with: %w", p.Image, m.from.snap.label(), errUnsupported)
}

// intend makes the intent durable: from here on a crash is undone by the next Open.
func (m *making) intend(ctx context.Context) error {
	e := m.e
	spec, err := json.Marshal(storedSpec{m.spec, m.rights().Operator})
	if err != nil {
		return err
	}
	e.mu.Lock()
	row := m.sb.row
	var ws store.Workspace
	if m.ownWS {
		m.ws.setSource(m.source)
		if m.from != nil {
			m.ws.row.RepoID, m.ws.row.Source = m.from.snap.row.RepoID, m.from.snap.row.Source
		}
		ws = m.ws.row
	}
	e.mu.Unlock()
	err = e.store.Update(ctx, func(tx *store.Tx) error {
		if m.ownWS {
			put := tx.InsertWorkspace
			if m.standby != nil {
				put = tx.UpdateWorkspace
			}
			if err := put(&ws); err != nil {
				return err
			}
		}
		if err := tx.InsertSandbox(&row, spec); err != nil {
			return err
		}
		if m.key.name != "" {
			// One of more than 24 hours may still be there.
			if err := tx.DeleteKey(m.key.owner, m.key.name); err != nil {
				return err
			}
			if err := tx.InsertKey(store.Key{Owner: m.key.owner, Key: m.key.name, Fingerprint: m.flight.print, Object: string(row.ID), Created: e.clock.Now()}); err != nil {
				return err
			}
		}
		return tx.AppendEvent(e.event(m.caller.User, "sandbox.create", &row, ""))
	})
	if err != nil {
		return err
	}
	e.mu.Lock()
	m.sb.stored = true
	e.mu.Unlock()
	return nil
}

// start boots the execution while the workspace is filled, and waits for the guest.
func (m *making) start(ctx context.Context) error {
	e := m.e
	if err := fpCreateQueued.Hit(); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	checkout := func(ctx context.Context) error {
		if err := m.step(ctx, "checkout", func(ctx context.Context) error { return e.opts.Workspaces.Populate(ctx, m.ws.row.ID) }); err != nil {
			return err
		}
		return fpCreatePopulated.Hit()
	}
	fresh := m.ownWS && m.from == nil // else it has what the snapshot had
	if fresh && e.copies(ctx, m.sb.row.Driver) {
		// A copy of the workspace is made when the driver creates.
		if err := checkout(ctx); err != nil {
			return err
		}
	} else if fresh {
		g.Go(func() error { return checkout(gctx) })
	}
	g.Go(func() error {
		m.booted = true
		r := bootRequest{row: &m.sb.row, spec: &m.spec, image: m.image, dirs: m.dirs, mounts: m.mounts, step: m.step}
		if m.from != nil {
			if err := e.goOn(gctx, &r, m.from.snap); err != nil {
				return err
			}
			r.event = "fork"
			// A fork has said it already, and services of a template begin anew anyway.
			if p := m.from.snap; m.from.source == "" && m.spec.Template == "" && SnapshotKind(p.row.Kind) == FilesSnapshot {
				m.flight.tell(Progress{Step: "files only", Message: fmt.Sprintf("snapshot %s has files alone: files only, started cold", p.label())})
			}
		}
		err := e.boot(gctx, r)
		if errors.Is(err, driver.ErrImage) && m.from != nil {
			err = fmt.Errorf("snapshot %s cannot be gone on from: %w: %w", m.from.snap.label(), err, warren.ErrState)
		}
		return err
	})
	return g.Wait()
}

// settle makes the sandbox running, in the store and then in memory.
func (m *making) settle(ctx context.Context) error {
	e := m.e
	if err := fpCreateReady.Hit(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	e.mu.Lock()
	row := m.sb.row
	row.State, row.LastActive = string(Running), e.clock.Now()
	ws := m.ws.row
	ws.State = wsReady
	e.mu.Unlock()
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if m.ownWS {
			if err := tx.UpdateWorkspace(&ws); err != nil {
				return err
			}
		}
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		if err := tx.SetTiming(row.ID, m.steps); err != nil {
			return err
		}
		if err := tx.AppendEvent(e.event(m.caller.User, "sandbox.running", &row, "")); err != nil {
			return err
		}
		if m.from != nil && m.from.also != nil {
			return m.from.also(tx, row.ID)
		}
		return nil
	}); err != nil {
		return err
	}
	fpCreateRunning.Hit() // too late to fail
	e.mu.Lock()
	m.sb.row.State, m.sb.row.LastActive = row.State, row.LastActive
	m.ws.row.State = wsReady
	m.sb.spec = nil
	m.sb.born = e.line.now()
	m.sb.active = m.sb.born
	e.schedule(m.sb)
	e.mu.Unlock()
	return nil
}

// step runs one milestone: it is told as progress, traced, measured and kept.
func (m *making) step(ctx context.Context, name string, fn func(context.Context) error) error {
	m.flight.tell(Progress{Step: name})
	ctx, span := m.e.tracer.Start(ctx, name)
	defer span.End()
	start, _ := m.e.clock.Steady()
	err := fn(ctx)
	end, _ := m.e.clock.Steady()
	m.e.metrics.milestone(name, end-start)
	m.mu.Lock()
	m.steps = append(m.steps, store.Milestone{Name: name, Start: start - m.began, Duration: end - start})
	m.mu.Unlock()
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return err
}

// undo removes what a failed create has made. What cannot be removed now is removed later, as a delete is.
func (m *making) undo(ctx context.Context, cause error) {
	e := m.e
	e.mu.Lock()
	stored := m.sb.stored
	m.op.workspace = m.ownWS
	if !stored {
		e.drop(m.sb)
		e.dropWorkspace(m)
	} else {
		m.op.kind = "delete"
		e.setState(m.sb, Deleting)
	}
	e.mu.Unlock()
	if !stored {
		e.finish(m.sb, m.op, cause)
		if m.standby != nil {
			e.eraseStandby(m.standby)
		}
		return
	}
	fpCreateUndo.Hit()
	event := e.event(m.caller.User, "sandbox.create_failed", &m.sb.row, cause.Error())
	e.erase(context.WithoutCancel(ctx), m.sb, m.op, erasure{event: event, cause: cause, key: m.key})
}

// dropWorkspace forgets a workspace that was only reserved. The caller holds mu.
func (e *Engine) dropWorkspace(m *making) {
	if m.ownWS {
		delete(e.spaces, m.ws.row.ID)
	}
}
