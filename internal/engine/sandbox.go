package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// sandbox is a record in memory. Everything in it is guarded by Engine.mu.
type sandbox struct {
	row  store.Sandbox
	gone bool // not in the maps any more
	// stored is false until the intent is in the store; until then spec is only here.
	stored bool
	spec   *Spec
	op     *operation // the one that holds it, if any

	uses int32 // calls and connections under way
	// answered are those of uses that got an answer; silent says that the guest gave none lately, see Use.
	answered int32
	silent   bool
	active   int64 // line reading of the last use
	paused   int64 // line reading of when it was last paused
	timer    int   // index in Engine.timers, -1 when it has none
	born     int64 // line reading of the start of this execution

	dialled map[*use]struct{} // those of uses that are connections to ports
	looked  bool              // somebody looks whether it is idle
	awake   int64             // line reading when its processes were last found at work
	held    int64             // line reading before which it is not paused for idling
	cause   pauseCause        // of the pause under way
	// pauseFailures are pauses that nobody asked for and that failed, in a row.
	pauseFailures int
	image         int64 // bytes of its memory image, which count as disk

	policy string // what it may reach, for one that runs
	// policyText is the digest of the text of its policy that is in force, "" for one of which this engine does not know it.
	policyText string
	// placeholders are those of the spec, for one that runs.
	placeholders map[string][]string
	arming       chan struct{} // see Engine.arming
	joining      string        // the private network that an update is about to put it into
	cardLost     uint32        // the generation that was found to have lost its card
	marked       bool          // the first command was recorded
	failures     int           // executions that failed soon after their start, in a row
	notBefore    int64         // line reading before which no use restarts it
}

// operation is what holds a sandbox: "create", "restart", "pause", "resume" or "delete".
type operation struct {
	kind   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	// first is closed after the first attempt of a delete, whose result firstErr is.
	first    chan struct{}
	firstErr error
	// waits is closed when a rollback does not get on, for the reason in stuck, which the engine's mu guards.
	waits chan struct{}
	stuck error
	// lingers, set before first is closed, is why what is removed is still there while the removal is tried again.
	lingers error
	// doomed says that a delete waits for its end. The engine's mu guards it.
	doomed bool
	// workspace says that a delete takes the workspace too, whatever the row says.
	workspace bool
}

func (sb *sandbox) state() State { return State(sb.row.State) }

func (sb *sandbox) limits() driver.Limits {
	return driver.Limits{CPUMillis: sb.row.CPUMillis, Memory: sb.row.Memory, Disk: sb.row.Disk, PIDs: sb.row.PIDs}
}

// label is how messages name a sandbox: by its name when it has one.
func (sb *sandbox) label() string {
	if sb.row.Name != "" {
		return sb.row.Name
	}
	return string(sb.row.ID)
}

// hold makes op the operation of sb, after those that hold it now. The caller has to call finish.
func (e *Engine) hold(ctx context.Context, sb *sandbox, kind string, cancel context.CancelFunc) (*operation, error) {
	for {
		e.mu.Lock()
		if sb.gone {
			e.mu.Unlock()
			return nil, notFound("sandbox", string(sb.row.ID))
		}
		waits := make(chan struct{})
		if kind != opSettle { // which comes after what does not get on
			if err := sb.settling(); err != nil {
				e.mu.Unlock()
				return nil, err
			}
			if sb.op != nil {
				waits = sb.op.waits
			}
		}
		old := sb.op
		if old == nil {
			op := newOperation(kind, cancel)
			sb.op = op
			e.mu.Unlock()
			return op, nil
		}
		e.mu.Unlock()
		select {
		case <-old.done:
		case <-waits:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// again waits before another try of what has to succeed some time, twice as long each time, and returns false when ctx ends
// first. wait is 0 before the first.
func (e *Engine) again(ctx context.Context, wait *time.Duration) bool {
	*wait = nextWait(*wait)
	select {
	case <-e.clock.After(*wait):
		return true
	case <-ctx.Done():
		return false
	}
}

// nextWait is how long to wait after wait.
func nextWait(wait time.Duration) time.Duration {
	return min(max(2*wait, 100*time.Millisecond), 30*time.Second)
}

// removing is the state of a removal that is tried until it succeeds; the zero value is before the first wait.
type removing struct {
	wait time.Duration
	room <-chan struct{} // closed when something was removed since the last try began
}

// roomWait is the least time between two tries of a removal that other removals bring forward, so that many that fail do
// not keep the drivers busy while others succeed.
const roomWait = time.Second

// againRemove is again for a removal. What may have failed for want of room is tried as soon as something else was removed.
func (e *Engine) againRemove(ctx context.Context, r *removing) bool {
	r.wait = nextWait(r.wait)
	full, room := e.clock.After(r.wait), r.room
	if r.wait <= roomWait {
		room = nil
	} else {
		select {
		case <-e.clock.After(roomWait):
		case <-ctx.Done():
			return false
		}
	}
	select {
	case <-full:
	case <-room:
		r.wait /= 2 // a try that was brought forward does not make the next one later
	case <-ctx.Done():
		return false
	}
	e.mu.Lock()
	r.room = e.room
	e.mu.Unlock()
	return true
}

// madeRoom tells removals that failed that something was removed. The caller holds mu.
func (e *Engine) madeRoom() {
	close(e.room)
	e.room = make(chan struct{})
}

func newOperation(kind string, cancel context.CancelFunc) *operation {
	return &operation{kind: kind, cancel: cancel, done: make(chan struct{}), first: make(chan struct{}), waits: make(chan struct{})}
}

// finish lets go of sb.
func (e *Engine) finish(sb *sandbox, op *operation, err error) {
	e.mu.Lock()
	op.err = err
	sb.op = nil
	e.mu.Unlock()
	if op.cancel != nil {
		op.cancel()
	}
	close(op.done)
}

// touch counts as a use of a sandbox what its caller has made of it.
func (e *Engine) touch(sb *sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb.active = e.line.now()
	e.schedule(sb)
}

// insert puts sb into the maps. The caller holds mu and has checked the name.
func (e *Engine) insert(sb *sandbox) {
	e.boxes[sb.row.ID] = sb
	if sb.row.Name != "" {
		e.names[ownedName{sb.row.Owner, sb.row.Name}] = sb
	}
	if ws := e.spaces[sb.row.WorkspaceID]; ws != nil {
		ws.box = sb
	}
}

// drop takes sb out of the maps and gives back what it counted for. The caller holds mu.
func (e *Engine) drop(sb *sandbox) {
	if sb.gone {
		return
	}
	sb.gone = true
	delete(e.boxes, sb.row.ID)
	if sb.row.Name != "" {
		delete(e.names, ownedName{sb.row.Owner, sb.row.Name})
	}
	if ws := e.spaces[sb.row.WorkspaceID]; ws != nil && ws.box == sb {
		ws.box = nil
	}
	e.unreserve(sb.row.Owner, sb.cost())
	e.timers.remove(sb)
	if sb.row.Network != "" {
		e.peersChanged()
	}
}

// executing says whether sb counts for processors and memory.
func (sb *sandbox) executing() bool { return sb.state() != Failed && sb.state() != Paused }

// setState changes the state in memory, and what sb counts for with it. The caller holds mu, and has reserved what a
// failed or paused sandbox needs to execute again.
func (e *Engine) setState(sb *sandbox, s State) {
	was := sb.executing()
	sb.row.State = string(s)
	if is := sb.executing(); was && !is {
		e.unreserve(sb.row.Owner, usage{cpu: int64(sb.row.CPUMillis), memory: sb.row.Memory})
	}
}

func notFound(what, id string) error {
	return fmt.Errorf("%s %q: %w", what, id, warren.ErrNotFound)
}

// may says whether c may see what owner owns.
func (c Caller) may(owner string) bool { return c.Operator || c.User == owner }

// minPrefix is how much of an id names a sandbox; less would make a slip of the finger a delete.
const minPrefix = 3

// notShortID refuses a name that is how people write the id of another sandbox: a name comes before a prefix, so a slip
// would remove the wrong one. The caller holds mu.
func (e *Engine) notShortID(c Caller, name string) error {
	if len(name) < 8 || name[0] != 's' || strings.ContainsRune(name, '-') {
		return nil
	}
	for id, sb := range e.boxes {
		if strings.HasPrefix(string(id), name) && c.may(sb.row.Owner) {
			return invalid("name", name, "it is the beginning of a sandbox's id; choose another")
		}
	}
	return nil
}

// find returns the sandbox that ref names for c: an id, a name, or a unique prefix of an id. The caller holds mu.
func (e *Engine) find(c Caller, ref string) (*sandbox, error) {
	if sb := e.boxes[warren.SandboxID(ref)]; sb != nil && c.may(sb.row.Owner) {
		return sb, nil
	}
	if sb := e.names[ownedName{c.User, ref}]; sb != nil {
		return sb, nil
	}
	if ref == "" {
		return nil, fmt.Errorf("a sandbox is needed, by id or name: %w", warren.ErrInvalid)
	}
	var found []*sandbox
	named := c.Operator && validName(ref) == nil
	prefix := len(ref) >= minPrefix && len(ref) < 20 && ref[0] == 's'
	// Together: others name their sandboxes as they like, also like the beginning of somebody's id.
	for id, sb := range e.boxes {
		if named && sb.row.Name == ref || prefix && strings.HasPrefix(string(id), ref) && c.may(sb.row.Owner) {
			found = append(found, sb)
		}
	}
	short := len(found) == 0 && len(ref) < minPrefix
	if short {
		for id, sb := range e.boxes {
			if strings.HasPrefix(string(id), ref) && c.may(sb.row.Owner) {
				found = append(found, sb)
			}
		}
	}
	switch {
	case len(found) == 0:
		return nil, notFound("sandbox", ref)
	case len(found) == 1 && !short:
		return found[0], nil
	}
	return nil, ambiguous("sandbox", ref, func(yield func(string, string)) {
		for _, sb := range found {
			yield(string(sb.row.ID), sb.row.Name)
		}
	})
}

// ambiguous lists the first candidates, sorted, for a ref that names several, or one with less than counts.
func ambiguous(what, ref string, each func(func(id, name string))) error {
	var list []string
	each(func(id, name string) {
		if name != "" {
			id += " (" + name + ")"
		}
		list = append(list, id)
	})
	slices.Sort(list)
	n := len(list)
	more := ""
	if n > 8 {
		list, more = list[:8], fmt.Sprintf(" and %d more", n-8)
	}
	if n == 1 {
		return fmt.Errorf("%q is too short for the id of %s %s; give at least %d characters: %w", ref, what, list[0], minPrefix, warren.ErrInvalid)
	}
	return fmt.Errorf("%q is ambiguous, it names %d %s: %s%s; give more of the id: %w", ref, n, map[string]string{"sandbox": "sandboxes", "workspace": "workspaces", "snapshot": "snapshots"}[what], strings.Join(list, ", "), more, warren.ErrInvalid)
}

// Resolve returns the id that an id, a name or a unique prefix stands for.
func (e *Engine) Resolve(c Caller, ref string) (warren.SandboxID, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return "", err
	}
	return sb.row.ID, nil
}

// view copies what is in memory. The caller holds mu.
func (e *Engine) view(sb *sandbox) *Sandbox {
	r := &sb.row
	v := &Sandbox{
		ID: r.ID, Name: r.Name, State: State(r.State), Image: r.Image, ImageDigest: r.ImageDigest, WorkspaceID: r.WorkspaceID,
		Driver: r.Driver, Limits: sb.limits(), Labels: maps.Clone(r.Labels), Created: r.Created, LastActive: r.LastActive,
		Generation: r.Generation, Owner: r.Owner, Network: "none", PrivateNetwork: r.Network, SnapshotID: r.SnapshotID, SourceID: r.SourceID,
	}
	if sb.inUse() {
		v.LastActive = e.clock.Now()
	}
	d := e.deadline(sb)
	if d.pause {
		if d = e.hardDeadline(sb); d.ttl {
			v.Pauses = e.line.wall(d.at)
			d.at, _ = e.lifeCap.ends(r)
		}
	}
	if d.at != 0 {
		v.Expires = e.line.wall(d.at)
	}
	v.IdleTimeout, v.IdleAction, v.NoAutoResume = r.Idle, e.idleAction(r), r.NoAutoResume
	v.TTL, v.TTLAction = r.TTL, IdleAction(r.TTLAction)
	if v.State == Paused {
		if v.ImageSize, v.PauseReason = sb.image, r.PauseReason; v.PauseReason == "" {
			v.PauseReason = PauseAsked
		}
	}
	if r.Failure != nil {
		v.Failure = &Failure{Reason: r.Failure.Reason, Message: r.Failure.Message, Time: r.Failure.Time}
	}
	if d := e.opts.Drivers[r.Driver]; d != nil {
		v.Isolation = describe(r.Driver, d).Isolation
	}
	if sb.spec != nil {
		v.Spec = *sb.spec
	}
	return v
}

// fill adds to views what only the store has.
func (e *Engine) fill(ctx context.Context, views ...*Sandbox) error {
	ids := make([]warren.SandboxID, len(views))
	for i, v := range views {
		ids[i] = v.ID
	}
	specs, err := e.store.Specs(ctx, ids...)
	if err != nil {
		return err
	}
	for _, v := range views {
		row, ok := specs[v.ID]
		if !ok {
			continue // not stored yet, or gone meanwhile
		}
		if err := json.Unmarshal(row.Spec, &v.Spec); err != nil {
			e.log.Error("spec damaged", "sandbox", v.ID, "error", err)
		}
		for _, m := range row.Timing {
			v.Timing = append(v.Timing, Milestone(m))
		}
		// What can be updated is in the row.
		v.Spec.Name, v.Spec.Labels, v.Spec.PrivateNetwork = v.Name, v.Labels, v.PrivateNetwork
		if v.Spec.Policy != "" {
			v.Network = v.Spec.Policy
		}
		v.Spec.IdleTimeout, v.Spec.IdleAction, v.Spec.NoAutoResume = v.IdleTimeout, v.IdleAction, v.NoAutoResume
		if v.TTLAction != "" || v.TTL != 0 || v.Expires.IsZero() { // else it was made before this was kept
			v.Spec.TTL, v.Spec.TTLAction = v.TTL, v.TTLAction
		}
	}
	return nil
}

// Get returns a sandbox.
func (e *Engine) Get(ctx context.Context, c Caller, ref string) (*Sandbox, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	v := e.view(sb)
	e.mu.Unlock()
	return v, e.fill(ctx, v)
}

// List returns the sandboxes that c may see, oldest first, and a token for the next page, "" after the last.
func (e *Engine) List(ctx context.Context, c Caller, r ListRequest) ([]*Sandbox, string, error) {
	size, after, err := page(r.PageSize, r.PageToken)
	if err != nil {
		return nil, "", err
	}
	for _, s := range r.States {
		switch s {
		case Creating, Running, Pausing, Paused, Resuming, RollingBack, Failed, Deleting:
		default:
			return nil, "", fmt.Errorf("state %q is not known (creating, running, pausing, paused, resuming, rolling-back, failed, deleting): %w", s, warren.ErrInvalid)
		}
	}
	var found []*sandbox
	e.mu.Lock()
	for _, sb := range e.boxes {
		if c.may(sb.row.Owner) && sb.row.Num > after && matches(sb, r) {
			found = append(found, sb)
		}
	}
	slices.SortFunc(found, func(a, b *sandbox) int { return int(a.row.Num - b.row.Num) })
	next := ""
	if len(found) > size {
		found = found[:size]
		next = fmt.Sprint(found[size-1].row.Num)
	}
	views := make([]*Sandbox, len(found))
	for i, sb := range found {
		views[i] = e.view(sb)
	}
	e.mu.Unlock()
	if err := e.fill(ctx, views...); err != nil {
		return nil, "", err
	}
	return views, next, nil
}

func matches(sb *sandbox, r ListRequest) bool {
	if len(r.States) > 0 && !slices.Contains(r.States, sb.state()) {
		return false
	}
	for k, v := range r.Labels {
		if have, ok := sb.row.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// page reads the size and token of a list call.
func page(size int, token string) (int, int64, error) {
	if size < 0 || size > 1000 {
		return 0, 0, fmt.Errorf("page size %d is not between 0 and 1000: %w", size, warren.ErrInvalid)
	}
	if size == 0 {
		size = 100
	}
	if token == "" {
		return size, 0, nil
	}
	var after int64
	if n, err := fmt.Sscanf(token, "%d", &after); n != 1 || err != nil || fmt.Sprint(after) != token || after < 0 {
		return 0, 0, fmt.Errorf("page token %.40q is not one that a list returned: %w", token, warren.ErrInvalid)
	}
	return size, after, nil
}

// Update changes name, labels, timeouts and what becomes of the workspace.
func (e *Engine) Update(ctx context.Context, c Caller, r UpdateRequest) (*Sandbox, error) {
	if err := checkUpdate(r); err != nil {
		return nil, err
	}
	e.mu.Lock()
	sb, err := e.find(c, r.ID)
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	op, err := e.hold(ctx, sb, "update", nil)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	was := sb.network()
	e.mu.Unlock()
	v, err := e.update(ctx, c, sb, r)
	if err == nil && (r.PrivateNetwork != nil || r.Name != nil && was.name != "") {
		e.mu.Lock()
		is := sb.network()
		e.mu.Unlock()
		if err = e.movedPeer(ctx, sb.row.Owner, was, is); err != nil {
			err = fmt.Errorf("sandbox %s: it is written, and not in force until the gateway can be told: %w", sb.label(), err)
		}
	}
	e.finish(sb, op, err)
	if err != nil {
		return nil, err
	}
	return v, e.fill(ctx, v)
}

func (e *Engine) update(ctx context.Context, c Caller, sb *sandbox, r UpdateRequest) (*Sandbox, error) {
	if n := r.PrivateNetwork; n != nil && *n != "" && *n != noPeers {
		spec, _, err := e.loadSpec(ctx, sb.row.ID)
		if err != nil {
			return nil, err
		}
		spec.PrivateNetwork = *n
		if err := needsCard(spec); err != nil {
			return nil, err
		}
	}
	e.mu.Lock()
	if s := sb.state(); s != Running && s != Failed && s != Paused {
		e.mu.Unlock()
		return nil, fmt.Errorf("sandbox %s is %s: %w", sb.label(), s, warren.ErrState)
	}
	old := sb.row
	row := sb.row
	if n := r.PrivateNetwork; n != nil {
		if row.Network = *n; *n == noPeers {
			row.Network = ""
		}
		if row.Network != old.Network {
			if err := e.roomFor(ownedName{row.Owner, row.Network}, 1); err != nil {
				e.mu.Unlock()
				return nil, err
			}
			sb.joining = row.Network
			defer func() {
				e.mu.Lock()
				sb.joining = ""
				e.mu.Unlock()
			}()
		}
	}
	if r.Name != nil && *r.Name != row.Name {
		key := ownedName{row.Owner, *r.Name}
		if *r.Name != "" {
			if other := e.names[key]; other != nil {
				e.mu.Unlock()
				return nil, nameTaken("sandbox", *r.Name, string(other.row.ID))
			}
			if err := e.notShortID(c, *r.Name); err != nil {
				e.mu.Unlock()
				return nil, err
			}
			e.names[key] = sb // taken from now on, whatever the store says
		}
		row.Name = *r.Name
	}
	row.Labels = maps.Clone(row.Labels)
	for k, v := range r.SetLabels {
		if row.Labels == nil {
			row.Labels = map[string]string{}
		}
		row.Labels[k] = v
	}
	for _, k := range r.RemoveLabels {
		delete(row.Labels, k)
	}
	err := checkLabels(row.Labels)
	if r.IdleTimeout != nil {
		row.Idle = *r.IdleTimeout
	}
	if r.IdleAction != nil {
		row.IdleAction = string(*r.IdleAction)
		if err == nil {
			err = e.checkAction("idle action", *r.IdleAction, row.Driver)
		}
	}
	if r.AutoResume != nil {
		row.NoAutoResume = !*r.AutoResume
	}
	if r.TTL != nil {
		row.TTL, row.Expires = *r.TTL, 0
		if *r.TTL > 0 {
			row.Expires = e.line.now() + int64(*r.TTL)
		}
	}
	if r.TTLAction != nil {
		was := IdleAction(row.TTLAction)
		row.TTLAction = string(*r.TTLAction)
		if err == nil {
			err = e.checkAction("ttl action", *r.TTLAction, row.Driver)
		}
		if now := e.line.now(); State(row.State) == Paused && was != *r.TTLAction && r.TTL == nil && row.TTL > 0 && row.Expires != 0 && row.Expires <= now {
			row.Expires = now + int64(row.TTL) // it is paused for that; nobody who changes what happens then means at once
		}
		if err == nil && *r.TTLAction == IdlePause && row.TTL == 0 && row.Expires != 0 {
			err = invalid("ttl action", string(*r.TTLAction), "how long it has after each resume is not known; give a ttl too")
		}
	}
	var ws *workspace
	var wsRow store.Workspace
	if r.KeepWorkspace != nil {
		if ws = e.spaces[row.WorkspaceID]; ws != nil {
			wsRow = ws.row
			wsRow.Keep = *r.KeepWorkspace
			row.DropWorkspace = !*r.KeepWorkspace
		}
	}
	e.mu.Unlock()
	if err == nil {
		err = e.store.Update(ctx, func(tx *store.Tx) error {
			if err := tx.UpdateSandbox(&row); err != nil {
				return err
			}
			if row.Name != old.Name {
				if err := tx.RenameSandbox(row.ID, row.Name); err != nil {
					return err
				}
			}
			if ws != nil {
				if err := tx.UpdateWorkspace(&wsRow); err != nil {
					return err
				}
			}
			what := ""
			if row.Network != old.Network {
				what = "network " + cmp.Or(row.Network, noPeers) + ", was " + cmp.Or(old.Network, noPeers)
			}
			return tx.AppendEvent(e.event(c.User, "sandbox.update", &row, what))
		})
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		if row.Name != old.Name && row.Name != "" {
			delete(e.names, ownedName{row.Owner, row.Name})
		}
		return nil, err
	}
	if row.Name != old.Name && old.Name != "" {
		delete(e.names, ownedName{row.Owner, old.Name})
	}
	// The execution may have failed while this was written; the state is not ours to change.
	row.State, row.Failure, row.LastActive = sb.row.State, sb.row.Failure, sb.row.LastActive
	sb.row = row
	if ws != nil {
		ws.row = wsRow
	}
	sb.active = e.line.now()
	e.schedule(sb)
	return e.view(sb), nil
}

func nameTaken(what, name, id string) error {
	return fmt.Errorf("the name %q is that of %s %s; choose another, or delete that one: %w", name, what, id, warren.ErrExists)
}

// event makes an event about a sandbox.
func (e *Engine) event(actor, action string, row *store.Sandbox, message string) *store.Event {
	return &store.Event{Time: e.clock.Now(), Owner: row.Owner, Actor: actor, Action: action, SandboxID: row.ID, WorkspaceID: row.WorkspaceID, Message: message}
}

// Stats returns what a running sandbox uses.
func (e *Engine) Stats(ctx context.Context, c Caller, ref string) (*Stats, error) {
	e.mu.Lock()
	sb, err := e.find(c, ref)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	row, label := sb.row, sb.label()
	e.mu.Unlock()
	if State(row.State) == Paused {
		return nil, fmt.Errorf("sandbox %s is paused and uses no processor and no memory; `warren resume %s`: %w", label, label, warren.ErrState)
	}
	if State(row.State) != Running {
		return nil, fmt.Errorf("sandbox %s is %s: %w", label, row.State, warren.ErrState)
	}
	s, ok := driver.As[driver.Statser](e.opts.Drivers[row.Driver])
	if !ok {
		return nil, fmt.Errorf("driver %s cannot measure a sandbox: %w", row.Driver, errUnsupported)
	}
	st, err := s.Stats(ctx, row.ID)
	if err != nil {
		return nil, fmt.Errorf("stats of sandbox %s: %w", label, err)
	}
	// A driver sees what its processes are on the host, which is another number. A guest that does not say leaves it open.
	if st.PIDs, err = guestProcesses(ctx, e.opts.Drivers[row.Driver], row.ID); err != nil {
		e.log.Debug("processes not counted", "sandbox", row.ID, "error", err)
	}
	return &Stats{Stats: st, MemoryLimit: row.Memory, DiskLimit: row.Disk, Time: time.Now()}, nil
}

// AccessToken returns the token that the guest of a sandbox asks for, for the server's proxy alone.
func (e *Engine) AccessToken(c Caller, ref string) (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return "", err
	}
	return sb.row.AccessToken, nil
}
