package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/store"
)

// The places at which the crash suite ends the process during operations on workspaces.
var (
	fpWorkspaceIntent   = failpoint.New("engine.workspace.intent")
	fpWorkspaceMade     = failpoint.New("engine.workspace.made")
	fpWorkspaceReady    = failpoint.New("engine.workspace.ready")
	fpWorkspaceDeleting = failpoint.New("engine.workspace.deleting")
	fpWorkspaceRemoved  = failpoint.New("engine.workspace.removed")
	fpWorkspaceCommit   = failpoint.New("engine.workspace.committed")
)

// The states of a workspace.
const (
	wsCreating = "creating"
	wsReady    = "ready"
	wsDeleting = "deleting"
)

// workspace is a record in memory, guarded by Engine.mu.
type workspace struct {
	row      store.Workspace
	box      *sandbox // that has it mounted
	uses     int      // verbs under way
	removing bool     // no new ones
	idle     chan struct{}
	ends     chan struct{} // closed when it goes, for those who read it; nil before the first
}

// leaving returns what is closed when w goes. The caller holds mu.
func (w *workspace) leaving() chan struct{} {
	if w.ends == nil {
		w.ends = make(chan struct{})
	}
	return w.ends
}

// wsSource is what a row says about where a workspace came from and what was made of it.
type wsSource struct {
	URL        string `json:"url,omitempty"`
	Ref        string `json:"ref,omitempty"`
	Commit     string `json:"commit,omitempty"`
	Branch     string `json:"branch,omitempty"`
	Head       string `json:"head,omitempty"`
	HeadBranch string `json:"head_branch,omitempty"`
}

func (w *workspace) source() (s wsSource) {
	if len(w.row.Source) > 2 {
		json.Unmarshal(w.row.Source, &s) // written by us; a damaged one costs what it would show
	}
	return s
}

func (w *workspace) setSource(s WorkspaceSource) {
	if s.Repo != nil {
		w.row.RepoID = s.Repo.ID
	}
	w.put(wsSource{URL: s.URL, Ref: s.Ref, Commit: s.Commit, Branch: s.Branch})
}

func (w *workspace) put(s wsSource) {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // a struct of strings
	}
	w.row.Source = b
}

// free says why a sandbox cannot be put on w, if it cannot. The caller holds mu.
func (w *workspace) free() error {
	switch {
	case w.box != nil:
		return fmt.Errorf("workspace %s is in use by sandbox %s; delete that first (`warren rm %s`), or take a copy (`warren workspace cp`): %w",
			w.row.ID, w.box.label(), w.box.label(), warren.ErrState)
	case w.row.State != wsReady || w.removing:
		return fmt.Errorf("workspace %s is %s: %w", w.row.ID, w.stateWord(), warren.ErrState)
	}
	return nil
}

func (w *workspace) stateWord() string {
	switch {
	case w.removing || w.row.State == wsDeleting:
		return "being deleted"
	case w.row.State == wsCreating:
		return "being created"
	}
	return w.row.State
}

// forget takes w out of the maps. The caller holds mu.
func (e *Engine) forget(w *workspace) {
	e.madeRoom()
	delete(e.spaces, w.row.ID)
	if w.row.Name != "" {
		delete(e.spaceNames, ownedName{w.row.Owner, w.row.Name})
	}
}

// quiet lets no verb begin on w any more, ends those that read it and waits for the others under way.
func (e *Engine) quiet(ctx context.Context, w *workspace) error {
	e.mu.Lock()
	w.removing = true
	close(w.leaving())
	w.ends = nil // should it stay after all
	if w.uses == 0 {
		e.mu.Unlock()
		return nil
	}
	if w.idle == nil {
		w.idle = make(chan struct{})
	}
	idle := w.idle
	e.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("workspace %s is being read: %w", w.row.ID, ctx.Err())
	}
}

// findWorkspace returns the workspace that ref names for c: an id, a name, a unique prefix, or a sandbox that has it
// mounted. What is c's own by that name comes before what is others'. The caller holds mu.
func (e *Engine) findWorkspace(c Caller, ref string) (*workspace, error) {
	if w := e.spaces[warren.WorkspaceID(ref)]; w != nil && c.may(w.row.Owner) {
		return w, nil
	}
	if w := e.spaceNames[ownedName{c.User, ref}]; w != nil {
		return w, nil
	}
	if sb := e.names[ownedName{c.User, ref}]; sb != nil {
		if w := e.spaces[sb.row.WorkspaceID]; w != nil {
			return w, nil
		}
		return nil, notFound("workspace", ref)
	}
	if ref == "" {
		return nil, fmt.Errorf("a workspace is needed, by id or name: %w", warren.ErrInvalid)
	}
	// All of these together: others name what is theirs as they like, also like the beginning of somebody's id.
	var found []*workspace
	named := c.Operator && validName(ref) == nil
	prefix := len(ref) >= minPrefix && len(ref) < 20 && ref[0] == 'w'
	for id, w := range e.spaces {
		if named && w.row.Name == ref || prefix && strings.HasPrefix(string(id), ref) && c.may(w.row.Owner) {
			found = append(found, w)
		}
	}
	sb, err := e.find(c, ref)
	if err != nil && !errors.Is(err, warren.ErrNotFound) {
		return nil, err
	}
	if err == nil {
		if w := e.spaces[sb.row.WorkspaceID]; w != nil && !slices.Contains(found, w) {
			found = append(found, w)
		}
	}
	short := len(found) == 0 && len(ref) < minPrefix
	if short {
		for id, w := range e.spaces {
			if strings.HasPrefix(string(id), ref) && c.may(w.row.Owner) {
				found = append(found, w)
			}
		}
	}
	switch {
	case len(found) == 0:
		return nil, notFound("workspace", ref)
	case len(found) == 1 && !short:
		return found[0], nil
	}
	return nil, ambiguous("workspace", ref, func(yield func(string, string)) {
		for _, w := range found {
			yield(string(w.row.ID), w.row.Name)
		}
	})
}

// useWorkspace finds a workspace and keeps it from being deleted until release.
func (e *Engine) useWorkspace(c Caller, ref string) (*workspace, func(), error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w, err := e.findWorkspace(c, ref)
	if err != nil {
		return nil, nil, err
	}
	if w.row.State != wsReady || w.removing {
		return nil, nil, fmt.Errorf("workspace %s is %s: %w", w.row.ID, w.stateWord(), warren.ErrState)
	}
	w.uses++
	sb := w.box
	if sb != nil {
		// Reading its results is a use of a sandbox, to which its guest has nothing to say.
		sb.uses++
		sb.answered++
	}
	return w, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if sb != nil {
			sb.uses--
			sb.answered--
			sb.active = e.line.now()
			sb.row.LastActive = e.clock.Now()
		}
		if w.uses--; w.uses == 0 && w.idle != nil {
			close(w.idle)
			w.idle = nil
		}
	}, nil
}

// viewWorkspace copies what is in memory. The caller holds mu.
func (e *Engine) viewWorkspace(w *workspace) *Workspace {
	s := w.source()
	v := &Workspace{
		ID: w.row.ID, Name: w.row.Name, RepoURL: s.URL, RepoID: w.row.RepoID, Ref: s.Ref, BaseCommit: s.Commit,
		Created: w.row.Created, Branch: s.HeadBranch, HeadCommit: s.Head, Owner: w.row.Owner, Keep: w.row.Keep,
	}
	if w.box != nil {
		v.SandboxID = w.box.row.ID
	}
	return v
}

// GetWorkspace returns a workspace, with its size on disk when that is asked for.
func (e *Engine) GetWorkspace(ctx context.Context, c Caller, ref string, size bool) (*Workspace, error) {
	e.mu.Lock()
	w, err := e.findWorkspace(c, ref)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	v := e.viewWorkspace(w)
	e.mu.Unlock()
	if size {
		if v.Size, err = e.opts.Workspaces.Size(ctx, v.ID); err != nil {
			return nil, fmt.Errorf("size of workspace %s: %w", v.ID, err)
		}
	}
	return v, nil
}

// ListWorkspaces returns the workspaces that c may see, oldest first, and a token for the next page.
func (e *Engine) ListWorkspaces(ctx context.Context, c Caller, size bool, pageSize int, token string) ([]*Workspace, string, error) {
	n, after, err := page(pageSize, token)
	if err != nil {
		return nil, "", err
	}
	var found []*workspace
	e.mu.Lock()
	for _, w := range e.spaces {
		if c.may(w.row.Owner) && w.row.Num > after && w.row.State == wsReady {
			found = append(found, w)
		}
	}
	slices.SortFunc(found, func(a, b *workspace) int { return int(a.row.Num - b.row.Num) })
	next := ""
	if len(found) > n {
		found = found[:n]
		next = fmt.Sprint(found[n-1].row.Num)
	}
	views := make([]*Workspace, len(found))
	for i, w := range found {
		views[i] = e.viewWorkspace(w)
	}
	e.mu.Unlock()
	if size {
		for _, v := range views {
			// One that goes meanwhile has no size.
			if v.Size, err = e.opts.Workspaces.Size(ctx, v.ID); err != nil && !errors.Is(err, warren.ErrNotFound) {
				return nil, "", fmt.Errorf("size of workspace %s: %w", v.ID, err)
			}
		}
	}
	return views, next, nil
}

// CreateWorkspace makes a workspace without a sandbox. It is kept until it is deleted.
func (e *Engine) CreateWorkspace(ctx context.Context, c Caller, r CreateWorkspaceRequest, progress func(Progress)) (*Workspace, error) {
	if r.Name != "" {
		if err := validName(r.Name); err != nil {
			return nil, err
		}
	}
	if err := checkKey(r.IdempotencyKey); err != nil {
		return nil, err
	}
	if r.Repo != nil {
		if err := checkRepo(c, r.Repo); err != nil {
			return nil, err
		}
	}
	print := fingerprint(struct {
		Name string
		Repo *RepoSource
	}{r.Name, r.Repo})
	key := ownedName{c.User, r.IdempotencyKey}
	if key.name != "" {
		leave, err := e.oneAtATime(ctx, key)
		if err != nil {
			return nil, err
		}
		defer leave()
		k, err := e.store.Key(ctx, key.owner, key.name)
		if err != nil {
			return nil, err
		}
		if k != nil && e.clock.Now().Sub(k.Created) <= keyLife {
			if k.Fingerprint != print {
				return nil, keyReused(key.name)
			}
			w, err := e.GetWorkspace(ctx, c, k.Object, false)
			if errors.Is(err, warren.ErrNotFound) {
				err = fmt.Errorf("idempotency key %s made workspace %s, which is gone; use a new key: %w", quote(key.name), k.Object, warren.ErrState)
			}
			return w, err
		}
	}
	tell := func(p Progress) {
		if progress != nil {
			progress(p)
		}
	}
	return e.newWorkspace(ctx, c, r.Name, key, print, func(ctx context.Context, w *workspace) (WorkspaceSource, error) {
		if r.Repo == nil {
			return WorkspaceSource{}, nil
		}
		tell(Progress{Step: "fetch repo"})
		return e.fetchSource(ctx, c, w, r.Repo, tell)
	}, func(ctx context.Context, w *workspace, src WorkspaceSource) error {
		tell(Progress{Step: "cut workspace"})
		if _, err := e.opts.Workspaces.Prepare(ctx, w.row.ID, src); err != nil {
			return err
		}
		tell(Progress{Step: "checkout"})
		return e.opts.Workspaces.Populate(ctx, w.row.ID)
	})
}

// oneAtATime makes calls with the same key follow each other.
func (e *Engine) oneAtATime(ctx context.Context, key ownedName) (leave func(), err error) {
	for {
		e.mu.Lock()
		other := e.keyed[key]
		if other == nil {
			mine := make(chan struct{})
			e.keyed[key] = mine
			e.mu.Unlock()
			return func() {
				e.mu.Lock()
				delete(e.keyed, key)
				e.mu.Unlock()
				close(mine)
			}, nil
		}
		e.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// newWorkspace reserves a name, makes the intent durable, fills the workspace and makes it ready, or leaves nothing.
func (e *Engine) newWorkspace(ctx context.Context, c Caller, name string, key ownedName, print string,
	find func(context.Context, *workspace) (WorkspaceSource, error), fill func(context.Context, *workspace, WorkspaceSource) error) (_ *Workspace, err error) {
	w := &workspace{row: store.Workspace{ID: warren.WorkspaceID(newID('w')), Name: name, Owner: c.User, State: wsCreating, Created: e.clock.Now(), Keep: true}}
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		return nil, errClosing
	}
	if name != "" {
		if other := e.spaceNames[ownedName{c.User, name}]; other != nil {
			e.mu.Unlock()
			return nil, nameTaken("workspace", name, string(other.row.ID))
		}
		e.spaceNames[ownedName{c.User, name}] = w
	}
	e.lastSpace++
	w.row.Num = e.lastSpace
	e.spaces[w.row.ID] = w
	e.wg.Add(1)
	e.mu.Unlock()
	defer e.wg.Done()
	ctx, cancel := context.WithTimeout(ctx, e.opts.CreateTimeout)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	stored := false
	defer func() {
		if err != nil {
			e.undoWorkspace(ctx, w, stored, err)
		}
	}()
	src, err := find(ctx, w)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	if src.Repo != nil || len(w.row.Source) == 0 {
		w.setSource(src)
	}
	row := w.row
	e.mu.Unlock()
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.InsertWorkspace(&row); err != nil {
			return err
		}
		if key.name == "" {
			return nil
		}
		if err := tx.DeleteKey(key.owner, key.name); err != nil {
			return err
		}
		return tx.InsertKey(store.Key{Owner: key.owner, Key: key.name, Fingerprint: print, Object: string(row.ID), Created: e.clock.Now()})
	}); err != nil {
		return nil, err
	}
	stored = true
	if err := fpWorkspaceIntent.Hit(); err != nil {
		return nil, err
	}
	if err := fill(ctx, w, src); err != nil {
		return nil, err
	}
	if err := fpWorkspaceMade.Hit(); err != nil {
		return nil, err
	}
	row.State = wsReady
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateWorkspace(&row); err != nil {
			return err
		}
		return tx.AppendEvent(e.workspaceEvent(c.User, "workspace.create", &row, ""))
	}); err != nil {
		return nil, err
	}
	fpWorkspaceReady.Hit() // too late to fail
	e.mu.Lock()
	defer e.mu.Unlock()
	w.row = row
	return e.viewWorkspace(w), nil
}

func (e *Engine) undoWorkspace(ctx context.Context, w *workspace, stored bool, cause error) {
	if stored {
		if err := e.removeWorkspace(context.WithoutCancel(ctx), w, nil); err != nil {
			e.log.Warn("half-made workspace not removed until the next start", "workspace", w.row.ID, "error", err, "cause", cause)
			e.mu.Lock()
			w.removing = true
			e.mu.Unlock()
			return
		}
	}
	e.mu.Lock()
	e.forget(w)
	e.mu.Unlock()
}

// removeWorkspace removes the files, then the row and the keys that name it.
func (e *Engine) removeWorkspace(ctx context.Context, w *workspace, event *store.Event) error {
	// Files that are gone already are what an earlier try was killed after.
	if err := e.opts.Workspaces.Delete(ctx, w.row.ID); err != nil && !errors.Is(err, warren.ErrNotFound) {
		return fmt.Errorf("workspace %s: %w", w.row.ID, err)
	}
	if err := fpWorkspaceRemoved.Hit(); err != nil {
		return err
	}
	return e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteWorkspace(w.row.ID); err != nil {
			return err
		}
		if event != nil {
			return tx.AppendEvent(event)
		}
		return tx.DeleteKeysOf(string(w.row.ID))
	})
}

func (e *Engine) workspaceEvent(actor, action string, row *store.Workspace, message string) *store.Event {
	return &store.Event{Time: e.clock.Now(), Owner: row.Owner, Actor: actor, Action: action, WorkspaceID: row.ID, Message: message}
}

// DeleteWorkspace removes a workspace that no sandbox has.
func (e *Engine) DeleteWorkspace(ctx context.Context, c Caller, ref string, allowMissing bool) error {
	e.mu.Lock()
	w, err := e.findWorkspace(c, ref)
	if err == nil && w.box != nil {
		err = fmt.Errorf("workspace %s is in use by sandbox %s; delete that first (`warren rm %s`): %w", w.row.ID, w.box.label(), w.box.label(), warren.ErrState)
	}
	if err == nil && w.row.State == wsCreating {
		err = fmt.Errorf("workspace %s is being created: %w", w.row.ID, warren.ErrState)
	}
	if err == nil {
		w.removing = true // no sandbox takes it from here on
	}
	e.mu.Unlock()
	if err != nil {
		if allowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	// Several deletes of one workspace follow each other; each of these steps may be repeated.
	leave, err := e.oneAtATime(ctx, ownedName{"\x00workspace", string(w.row.ID)})
	if err != nil {
		return err
	}
	defer leave()
	e.mu.Lock()
	row := w.row
	there := e.spaces[row.ID] == w
	e.mu.Unlock()
	if !there {
		return nil
	}
	if err := e.quiet(ctx, w); err != nil {
		e.mu.Lock()
		w.removing = row.State == wsDeleting
		e.mu.Unlock()
		return err
	}
	row.State = wsDeleting
	err = e.store.UpdateFreeing(ctx, func(tx *store.Tx) error { return tx.UpdateWorkspace(&row) })
	if err != nil && !errors.Is(err, warren.ErrExhausted) { // deleting makes room
		e.mu.Lock()
		w.removing = w.row.State == wsDeleting
		e.mu.Unlock()
		return err
	}
	e.mu.Lock()
	w.row.State = wsDeleting
	e.mu.Unlock()
	if err := fpWorkspaceDeleting.Hit(); err != nil {
		return err
	}
	if err := e.removeWorkspace(ctx, w, e.workspaceEvent(c.User, "workspace.delete", &row, "")); err != nil {
		return err
	}
	e.mu.Lock()
	e.forget(w)
	e.mu.Unlock()
	return nil
}

// CopyWorkspace makes an independent copy and says how ("btrfs snapshot", "reflink" or "copy").
func (e *Engine) CopyWorkspace(ctx context.Context, c Caller, ref, name string) (*Workspace, string, error) {
	if name != "" {
		if err := validName(name); err != nil {
			return nil, "", err
		}
	}
	from, release, err := e.readWorkspace(ctx, c, ref)
	if err != nil {
		return nil, "", err
	}
	defer release()
	method := ""
	v, err := e.newWorkspace(ctx, c, name, ownedName{}, "", func(_ context.Context, w *workspace) (WorkspaceSource, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		w.row.RepoID, w.row.Source = from.row.RepoID, from.row.Source
		return WorkspaceSource{}, nil
	}, func(ctx context.Context, w *workspace, _ WorkspaceSource) (err error) {
		method, err = e.opts.Workspaces.Copy(ctx, from.row.ID, w.row.ID)
		return err
	})
	if err != nil {
		return nil, "", err
	}
	return v, method, nil
}

// Diff writes a patch of all changes since the workspace was cut, or marked.
func (e *Engine) Diff(ctx context.Context, c Caller, ref string, o DiffOptions, w io.Writer) error {
	return e.readout(ctx, c, ref, w, func(ctx context.Context, id warren.WorkspaceID, w io.Writer) error {
		return e.opts.Workspaces.Diff(ctx, id, o, w)
	})
}

// MarkWorkspace remembers the files as they are, for a diff since then.
func (e *Engine) MarkWorkspace(ctx context.Context, c Caller, ref string) error {
	return e.reading(ctx, c, ref, func(ctx context.Context, id warren.WorkspaceID) error {
		// After the workspace has been found: to others it says nothing of this server.
		if err := e.diskRoom(0); err != nil {
			return fmt.Errorf("workspace %s is not marked: %w", id, err)
		}
		return e.opts.Workspaces.Mark(ctx, id)
	})
}

// FormatPatch writes the commits of the workspace's branch as mails.
func (e *Engine) FormatPatch(ctx context.Context, c Caller, ref string, w io.Writer) error {
	return e.readout(ctx, c, ref, w, e.opts.Workspaces.FormatPatch)
}

// reading lets f read a workspace, until it goes: a delete ends f.
func (e *Engine) reading(ctx context.Context, c Caller, ref string, f func(context.Context, warren.WorkspaceID) error) error {
	ws, release, err := e.useWorkspace(c, ref)
	if err != nil {
		return err
	}
	defer release()
	e.mu.Lock()
	ends, going := ws.leaving(), ws.removing
	e.mu.Unlock()
	gone := fmt.Errorf("workspace %s is being deleted: %w", ws.row.ID, warren.ErrState)
	if going {
		return gone
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-ends:
			cancel(gone)
		case <-stop:
		}
	}()
	if err = e.syncWorkspace(ctx, ws); err == nil {
		err = f(ctx, ws.row.ID)
	}
	if err != nil && errors.Is(context.Cause(ctx), gone) {
		return gone
	}
	return err
}

// mostReadout bounds what is kept on disk for the readers of one user. A patch holds what a workspace holds, compressed.
const mostReadout = 4 << 30

// readoutStep is how much of a readout is asked for at once, and may be on a disk that runs short: to see what changed is how one
// saves it.
const readoutStep = 16 << 20

// readout lets f write what it reads of a workspace, and then copies that to w: how fast w takes it, and whether at all, holds up
// nobody who waits for the workspace, nor its end.
func (e *Engine) readout(ctx context.Context, c Caller, ref string, w io.Writer, f func(context.Context, warren.WorkspaceID, io.Writer) error) error {
	aside, err := nameless(e.opts.PauseDir)
	if err != nil {
		return fmt.Errorf("keep what is read: %w", wantOfRoom(err))
	}
	to := &readout{e: e, f: aside, user: c.User}
	defer to.close()
	err = e.reading(ctx, c, ref, func(ctx context.Context, id warren.WorkspaceID) error { return f(ctx, id, to) })
	if to.err != nil {
		return to.err
	}
	if err != nil {
		return err
	}
	if _, err := aside.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err = io.Copy(w, aside)
	return err
}

// readout is a file that takes as much as its user may have of such and the disk has room for, and remembers why it took no more.
type readout struct {
	e             *Engine
	f             *os.File
	user          string
	taken, length int64 // of all that the user may have, and of the file
	err           error
}

func (r *readout) Write(p []byte) (int, error) {
	for r.err == nil && r.length+int64(len(p)) > r.taken {
		r.err = r.grow()
	}
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.f.Write(p)
	r.length += int64(n)
	if err != nil {
		r.err = fmt.Errorf("keep what is read: %w", wantOfRoom(err))
	}
	return n, r.err
}

func (r *readout) grow() error {
	if r.taken > 0 {
		if err := r.e.diskRoom(readoutStep); err != nil {
			return fmt.Errorf("what is to be shown is not kept: %w", err)
		}
	}
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if r.e.readouts[r.user]+readoutStep > mostReadout {
		return fmt.Errorf("what is to be shown, with what else you are being shown now, has more than %s; fetch the files themselves (`warren cp`), or ask for a summary (`warren diff --stat`): %w",
			size(mostReadout), warren.ErrExhausted)
	}
	r.e.readouts[r.user] += readoutStep
	r.taken += readoutStep
	return nil
}

func (r *readout) close() {
	r.f.Close()
	r.e.mu.Lock()
	defer r.e.mu.Unlock()
	if r.e.readouts[r.user] -= r.taken; r.e.readouts[r.user] == 0 {
		delete(r.e.readouts, r.user)
	}
}

// nameless returns a new file in dir that goes with its descriptor, however this process ends.
func nameless(dir string) (*os.File, error) {
	if dir == "" {
		dir = os.TempDir()
	}
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "readout"), nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return nil, err
	}
	f, err := os.CreateTemp(dir, ".readout-")
	if err == nil {
		err = os.Remove(f.Name())
	}
	return f, err
}

// wantOfRoom says of a full disk that it is one, and of no error where on this host.
func wantOfRoom(err error) error {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return err
	}
	if errno == unix.ENOSPC || errno == unix.EDQUOT {
		return fmt.Errorf("the disk of this server is full; free some with `warren rm`, `warren workspace rm` or `warren image rm`: %w: %w", errno, warren.ErrExhausted)
	}
	return errno
}

// Commit records the changes of a workspace on a branch of its repository's mirror.
func (e *Engine) Commit(ctx context.Context, c Caller, r CommitRequest) (*Commit, error) {
	ws, release, err := e.readWorkspace(ctx, c, r.ID)
	if err != nil {
		return nil, err
	}
	defer release()
	leave, err := e.oneAtATime(ctx, ownedName{"\x00commit", string(ws.row.ID)})
	if err != nil {
		return nil, err
	}
	defer leave()
	e.mu.Lock()
	name := ws.row.Name
	if name == "" && ws.box != nil {
		name = ws.box.row.Name
	}
	if name == "" {
		name = string(ws.row.ID)
	}
	e.mu.Unlock()
	branch, err := ownBranch(c, r.Branch, name)
	if err != nil {
		return nil, err
	}
	cm, err := e.opts.Workspaces.Commit(ctx, ws.row.ID, CommitOptions{Name: name, Message: r.Message, Branch: branch, Author: r.Author, All: r.All})
	if err != nil {
		return nil, err
	}
	if err := fpWorkspaceCommit.Hit(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	next := workspace{row: ws.row}
	s := ws.source()
	e.mu.Unlock()
	s.Head, s.HeadBranch = cm.ID, cm.Branch
	next.put(s)
	// The commit is made; ctx may end, the record of it must not be lost for that.
	bg, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.DeleteTimeout)
	defer cancel()
	ev := e.workspaceEvent(c.User, "workspace.commit", &next.row, cm.Branch)
	ev.Fields = map[string]string{"commit": cm.ID, "branch": cm.Branch}
	if err := e.store.Update(bg, func(tx *store.Tx) error {
		if err := tx.UpdateWorkspace(&next.row); err != nil {
			return err
		}
		return tx.AppendEvent(ev)
	}); err != nil {
		return nil, err
	}
	e.mu.Lock()
	ws.row.Source = next.row.Source
	e.mu.Unlock()
	return cm, nil
}

// ownBranch is the branch of the mirror that a caller commits to. The mirror is shared, so each user but the operator
// has a part of its names, and nobody continues what another began.
func ownBranch(c Caller, branch, name string) (string, error) {
	if c.Operator {
		return branch, nil
	}
	prefix := "warren/" + branchPart(c.User) + "/"
	switch {
	case branch == "":
		return prefix + name, nil
	case !strings.HasPrefix(branch, prefix):
		return "", fmt.Errorf("branch %s: your branches begin with %s: %w", quote(branch), prefix, warren.ErrDenied)
	}
	return branch, nil
}

// branchPart is a user's name as one part of a branch name, or a digest of it where it has other characters.
func branchPart(user string) string {
	if plainUser.MatchString(user) && !strings.HasSuffix(user, ".lock") {
		return user
	}
	sum := sha256.Sum256([]byte(user))
	return "u-" + hex.EncodeToString(sum[:8])
}

var plainUser = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// Push sends a committed branch to the origin.
func (e *Engine) Push(ctx context.Context, c Caller, r PushRequest) (*PushResult, error) {
	if r.Branch != "" {
		if _, err := ownBranch(c, r.Branch, ""); err != nil {
			return nil, err
		}
	}
	ws, release, err := e.useWorkspace(c, r.ID)
	if err != nil {
		return nil, err
	}
	defer release()
	p, err := e.opts.Workspaces.Push(ctx, ws.row.ID, PushOptions{Branch: r.Branch, RemoteBranch: r.RemoteBranch, Force: r.Force, HostCredentials: c.Operator})
	if err != nil {
		return nil, err
	}
	ev := e.workspaceEvent(c.User, "workspace.push", &ws.row, p.Branch)
	ev.Fields = map[string]string{"commit": p.Commit, "branch": p.Branch, "url": p.URL}
	return p, e.record(ctx, ev)
}

// record appends an event about something that is done already.
func (e *Engine) record(ctx context.Context, ev *store.Event) error {
	bg, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.DeleteTimeout)
	defer cancel()
	return e.store.Update(bg, func(tx *store.Tx) error { return tx.AppendEvent(ev) })
}
