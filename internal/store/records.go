package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"
)

// Sandbox is a row of the table of sandboxes. Spec and Timing are read apart, by [Store.Specs], for they are large and
// seldom needed.
type Sandbox struct {
	Num         int64 // order of creation
	ID          warren.SandboxID
	Name        string
	Owner       string
	State       string
	Generation  uint32
	Driver      string
	Image       string
	ImageDigest string
	WorkspaceID warren.WorkspaceID
	// SnapshotID is the last snapshot that was taken of it or that it was made from, SourceID the sandbox that it was forked
	// from. Neither has to be there any more.
	SnapshotID warren.SnapshotID
	SourceID   warren.SandboxID
	CPUMillis  uint32
	Memory     int64
	Disk       int64
	PIDs       uint32
	Created    time.Time
	LastActive time.Time
	// Expires is on the engine's own time line, 0 for never; see package engine.
	Expires int64
	// LifeEnds is when its longest life is over, on the same time line.
	LifeEnds      int64
	Idle          time.Duration
	Restart       string
	DropWorkspace bool
	AccessToken   string
	Labels        map[string]string
	Failure       *Failure
	// IdleAction is what Idle does, "" for what the driver can do best; PauseReason is why a paused one is paused.
	IdleAction   string
	NoAutoResume bool
	PauseReason  string
	// TTL is how long it has from a resume on when TTLAction is to pause; "" is to delete.
	TTL       time.Duration
	TTLAction string
	// Network is the private network of the owner's that it is in, "" for none.
	Network string
	// ForkID is what the children of a fork have in common of which only all or none are wanted, until [Tx.CompleteFork] clears it, and "" after that
	// and in all others.
	ForkID string
	// Previews is written by [Tx.SetPreviews] alone, and never changed in place.
	Previews *Previews
	// Damaged tells what of the row could not be read.
	Damaged string
}

// Failure is why a sandbox failed.
type Failure struct {
	Reason  string    `json:"reason"`
	Message string    `json:"message,omitempty"`
	Time    time.Time `json:"time"`
}

// Previews say how the ports of a sandbox may be looked at from outside.
type Previews struct {
	// Epoch is counted up to make the links that were given out invalid.
	Epoch uint64 `json:"epoch,omitempty"`
	// Ports are those that differ from a port of which nothing was said.
	Ports map[uint16]PortPreview `json:"ports,omitempty"`
}

// PortPreview is one port of [Previews].
type PortPreview struct {
	Public   bool `json:"public,omitempty"`
	KeepHost bool `json:"keep_host,omitempty"`
}

// Milestone is one step of a create.
type Milestone struct {
	Name     string        `json:"name"`
	Start    time.Duration `json:"start"`
	Duration time.Duration `json:"duration"`
}

// Workspace is a row of the table of workspaces.
type Workspace struct {
	Num    int64
	ID     warren.WorkspaceID
	Name   string
	Owner  string
	State  string
	RepoID warren.RepoID
	// Created is when its making began.
	Created time.Time
	Keep    bool
	// Source is what it is made from, as the engine wrote it.
	Source json.RawMessage
}

// Key is a stored idempotency key.
type Key struct {
	Owner, Key  string
	Fingerprint string
	Object      string // the id that the first call made
	Created     time.Time
}

// Event is a row of the table of events.
type Event struct {
	Seq         int64
	Time        time.Time
	Owner       string // who may read it
	Actor       string
	Action      string
	SandboxID   warren.SandboxID
	WorkspaceID warren.WorkspaceID
	Message     string
	Fields      map[string]string
}

// Token is a row of the table of tokens.
type Token struct {
	ID          string
	User        string
	Description string
	Hash        []byte
	Created     time.Time
	Expires     time.Time // zero for never
	LastUsed    time.Time
}

// Tx is one change under way.
type Tx struct {
	s     *Store
	ctx   context.Context
	seq   int64
	fatal error // the transaction as a whole cannot go on
}

func (t *Tx) exec(query string, args ...any) (sql.Result, error) {
	st, err := t.s.stmt(t.ctx, query)
	if err != nil {
		return nil, t.note(err)
	}
	r, err := st.ExecContext(t.ctx, args...)
	if err != nil {
		return nil, t.note(err)
	}
	return r, nil
}

// note remembers errors after which SQLite may have ended the whole transaction.
func (t *Tx) note(err error) error {
	var se *sqlite.Error
	if errors.As(err, &se) && se.Code()&0xff == lib.SQLITE_CONSTRAINT {
		return fmt.Errorf("%w (%v)", warren.ErrExists, se)
	}
	t.fatal = err
	return err
}

// one says ErrNotFound when a statement changed no row.
func one(r sql.Result, err error, what string, id any) error {
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err == nil && n == 0 {
		return fmt.Errorf("%s %v is not in the store: %w", what, id, warren.ErrNotFound)
	}
	return nil
}

func unix(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromUnix(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

func null(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// number leaves 0 to the database to choose.
func number(n int64) any {
	if n == 0 {
		return nil
	}
	return n
}

// jsonOrNull stores empty values as NULL.
func jsonOrNull(v any, empty bool) any {
	if empty {
		return nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil // maps and structs of strings, numbers and times always encode
	}
	return string(b)
}

// InsertSandbox adds a row; when sb.Num is 0 the next number is taken and set.
func (t *Tx) InsertSandbox(sb *Sandbox, spec json.RawMessage) error {
	r, err := t.exec(`INSERT INTO sandboxes (num, id, name, owner, state, generation, driver, image, image_digest, workspace_id,
		cpu_millis, memory, disk, pids, created, last_active, expires, idle, restart, drop_workspace, access_token, labels, failure, spec, snapshot_id, source_id,
		idle_action, no_auto_resume, pause_reason, network, fork_id, ttl, ttl_action, life_ends)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`,
		number(sb.Num), string(sb.ID), null(sb.Name), sb.Owner, sb.State, int64(sb.Generation), sb.Driver, sb.Image, sb.ImageDigest, string(sb.WorkspaceID),
		int64(sb.CPUMillis), sb.Memory, sb.Disk, int64(sb.PIDs), unix(sb.Created), unix(sb.LastActive), sb.Expires, int64(sb.Idle),
		sb.Restart, sb.DropWorkspace, sb.AccessToken, jsonOrNull(sb.Labels, len(sb.Labels) == 0), jsonOrNull(sb.Failure, sb.Failure == nil), string(spec),
		null(string(sb.SnapshotID)), null(string(sb.SourceID)), sb.IdleAction, sb.NoAutoResume, sb.PauseReason, sb.Network, sb.ForkID,
		int64(sb.TTL), sb.TTLAction, sb.LifeEnds)
	if err != nil {
		return err
	}
	sb.Num, err = r.LastInsertId()
	return err
}

// UpdateSandbox writes what can change of a sandbox, but for its name.
func (t *Tx) UpdateSandbox(sb *Sandbox) error {
	r, err := t.exec(`UPDATE sandboxes SET state=?, generation=?, last_active=?, expires=?, idle=?, drop_workspace=?, labels=?, failure=?, image_digest=?, access_token=?, snapshot_id=?,
		idle_action=?, no_auto_resume=?, pause_reason=?, network=?, ttl=?, ttl_action=?, life_ends=? WHERE id=?`,
		sb.State, int64(sb.Generation), unix(sb.LastActive), sb.Expires, int64(sb.Idle), sb.DropWorkspace,
		jsonOrNull(sb.Labels, len(sb.Labels) == 0), jsonOrNull(sb.Failure, sb.Failure == nil), sb.ImageDigest, sb.AccessToken, null(string(sb.SnapshotID)),
		sb.IdleAction, sb.NoAutoResume, sb.PauseReason, sb.Network, int64(sb.TTL), sb.TTLAction, sb.LifeEnds, string(sb.ID))
	return one(r, err, "sandbox", sb.ID)
}

// CompleteFork says that all children of a fork are there.
func (t *Tx) CompleteFork(id string) error {
	_, err := t.exec(`UPDATE sandboxes SET fork_id='' WHERE fork_id=?`, id)
	return err
}

// RenameSandbox gives a sandbox another name, or none.
func (t *Tx) RenameSandbox(id warren.SandboxID, name string) error {
	r, err := t.exec(`UPDATE sandboxes SET name=? WHERE id=?`, null(name), string(id))
	return one(r, err, "sandbox", id)
}

// SetPreviews stores how the ports of a sandbox may be looked at.
func (t *Tx) SetPreviews(id warren.SandboxID, p *Previews) error {
	r, err := t.exec(`UPDATE sandboxes SET previews=? WHERE id=?`, jsonOrNull(p, p == nil), string(id))
	return one(r, err, "sandbox", id)
}

// SetTiming stores the milestones of a sandbox.
func (t *Tx) SetTiming(id warren.SandboxID, timing []Milestone) error {
	r, err := t.exec(`UPDATE sandboxes SET timing=? WHERE id=?`, jsonOrNull(timing, len(timing) == 0), string(id))
	return one(r, err, "sandbox", id)
}

// SetActive stores when a sandbox was last used. It does nothing when the sandbox is gone.
func (t *Tx) SetActive(id warren.SandboxID, at time.Time) error {
	_, err := t.exec(`UPDATE sandboxes SET last_active=? WHERE id=?`, unix(at), string(id))
	return err
}

// DeleteSandbox removes a row; none to remove is no error.
func (t *Tx) DeleteSandbox(id warren.SandboxID) error {
	_, err := t.exec(`DELETE FROM sandboxes WHERE id=?`, string(id))
	return err
}

// InsertWorkspace adds a row; when w.Num is 0 the next number is taken and set.
func (t *Tx) InsertWorkspace(w *Workspace) error {
	r, err := t.exec(`INSERT INTO workspaces (num, id, name, owner, state, repo_id, created, keep, source) VALUES (?,?,?,?,?,?,?,?,?)`,
		number(w.Num), string(w.ID), null(w.Name), w.Owner, w.State, string(w.RepoID), unix(w.Created), w.Keep, string(w.Source))
	if err != nil {
		return err
	}
	w.Num, err = r.LastInsertId()
	return err
}

// UpdateWorkspace writes what can change of a workspace. Its name cannot.
func (t *Tx) UpdateWorkspace(w *Workspace) error {
	r, err := t.exec(`UPDATE workspaces SET state=?, repo_id=?, keep=?, source=? WHERE id=?`,
		w.State, string(w.RepoID), w.Keep, string(w.Source), string(w.ID))
	return one(r, err, "workspace", w.ID)
}

// DeleteWorkspace removes a row; none to remove is no error.
func (t *Tx) DeleteWorkspace(id warren.WorkspaceID) error {
	_, err := t.exec(`DELETE FROM workspaces WHERE id=?`, string(id))
	return err
}

// InsertKey adds an idempotency key.
func (t *Tx) InsertKey(k Key) error {
	_, err := t.exec(`INSERT INTO keys (owner, key, fingerprint, object, created) VALUES (?,?,?,?,?)`,
		k.Owner, k.Key, k.Fingerprint, k.Object, unix(k.Created))
	return err
}

// DeleteKey removes an idempotency key; none to remove is no error.
func (t *Tx) DeleteKey(owner, key string) error {
	_, err := t.exec(`DELETE FROM keys WHERE owner=? AND key=?`, owner, key)
	return err
}

// DeleteKeysOf removes the keys that name an object. It reads them all: it is for what was cut short, where the key itself is
// not at hand.
func (t *Tx) DeleteKeysOf(object string) error {
	_, err := t.exec(`DELETE FROM keys WHERE object=?`, object)
	return err
}

// DeleteKeysBefore removes keys that are older, up to 1000 at a time, oldest first; rowids are in order of age.
func (t *Tx) DeleteKeysBefore(at time.Time) error {
	_, err := t.exec(`DELETE FROM keys WHERE rowid IN
		(SELECT rowid FROM (SELECT rowid, created FROM keys ORDER BY rowid LIMIT 1000) WHERE created < ?)`, unix(at))
	return err
}

// AppendEvent adds an event and sets its Seq. Sequence numbers grow in the order in which changes become durable.
func (t *Tx) AppendEvent(e *Event) error {
	r, err := t.exec(`INSERT INTO events (time, owner, actor, action, sandbox_id, workspace_id, message, fields) VALUES (?,?,?,?,?,?,?,?)`,
		unix(e.Time), e.Owner, e.Actor, e.Action, null(string(e.SandboxID)), null(string(e.WorkspaceID)), null(e.Message), jsonOrNull(e.Fields, len(e.Fields) == 0))
	if err != nil {
		return err
	}
	if e.Seq, err = r.LastInsertId(); err != nil {
		return err
	}
	t.seq = e.Seq
	// Pruned as they come, a few at a time, so that no change ever waits for a large delete.
	if e.Seq%64 == 0 {
		_, err = t.exec(`DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE seq <= ? ORDER BY seq LIMIT 256)`, e.Seq-t.s.opts.MaxEvents)
	}
	return err
}

// InsertToken adds a token.
func (t *Tx) InsertToken(k Token) error {
	_, err := t.exec(`INSERT INTO tokens (id, user, description, hash, created, expires, last_used) VALUES (?,?,?,?,?,?,?)`,
		k.ID, k.User, k.Description, k.Hash, unix(k.Created), unix(k.Expires), unix(k.LastUsed))
	return err
}

// SetTokenUsed stores when a token was last used.
func (t *Tx) SetTokenUsed(id string, at time.Time) error {
	_, err := t.exec(`UPDATE tokens SET last_used=? WHERE id=?`, unix(at), id)
	return err
}

// DeleteToken removes a token.
func (t *Tx) DeleteToken(id string) error {
	r, err := t.exec(`DELETE FROM tokens WHERE id=?`, id)
	return one(r, err, "token", id)
}

// SetMeta stores a value of the store as a whole.
func (t *Tx) SetMeta(key, value string) error {
	_, err := t.exec(`INSERT INTO meta (key, value) VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value=excluded.value`, key, value)
	return err
}

// Meta returns a value of the store as a whole, "" when there is none.
func (s *Store) Meta(ctx context.Context, key string) (string, error) {
	var v string
	err := s.reader.QueryRowContext(ctx, `SELECT value FROM meta WHERE key=?`, key).Scan(&v)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return v, s.readError(err)
}

func (s *Store) readError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return s.explain("read", err)
}

// Sandboxes returns all rows in order of creation. One that cannot be understood is returned with Damaged set, so that
// it hinders no other.
func (s *Store) Sandboxes(ctx context.Context) ([]*Sandbox, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT num, id, coalesce(name,''), owner, state, generation, driver, image, image_digest, workspace_id,
		cpu_millis, memory, disk, pids, created, last_active, expires, idle, restart, drop_workspace, access_token, coalesce(labels,''), coalesce(failure,''),
		coalesce(snapshot_id,''), coalesce(source_id,''), idle_action, no_auto_resume, pause_reason, coalesce(previews,''), network, fork_id, ttl, ttl_action, life_ends
		FROM sandboxes ORDER BY num`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []*Sandbox
	for rows.Next() {
		sb := &Sandbox{}
		var id, ws, labels, failure, previews string
		var created, active, idle, ttl int64
		if err := rows.Scan(&sb.Num, &id, &sb.Name, &sb.Owner, &sb.State, &sb.Generation, &sb.Driver, &sb.Image, &sb.ImageDigest, &ws,
			&sb.CPUMillis, &sb.Memory, &sb.Disk, &sb.PIDs, &created, &active, &sb.Expires, &idle, &sb.Restart, &sb.DropWorkspace, &sb.AccessToken, &labels, &failure,
			&sb.SnapshotID, &sb.SourceID, &sb.IdleAction, &sb.NoAutoResume, &sb.PauseReason, &previews, &sb.Network, &sb.ForkID,
			&ttl, &sb.TTLAction, &sb.LifeEnds); err != nil {
			if id == "" {
				return nil, s.readError(err)
			}
			sb.Damaged = err.Error()
		}
		sb.ID, sb.WorkspaceID = warren.SandboxID(id), warren.WorkspaceID(ws)
		sb.Created, sb.LastActive, sb.Idle, sb.TTL = fromUnix(created), fromUnix(active), time.Duration(idle), time.Duration(ttl)
		if labels != "" {
			if err := json.Unmarshal([]byte(labels), &sb.Labels); err != nil {
				sb.Damaged = "labels: " + err.Error()
			}
		}
		if failure != "" {
			if err := json.Unmarshal([]byte(failure), &sb.Failure); err != nil {
				sb.Damaged = "failure: " + err.Error()
			}
		}
		if previews != "" {
			if err := json.Unmarshal([]byte(previews), &sb.Previews); err != nil {
				sb.Damaged = "previews: " + err.Error()
			}
		}
		all = append(all, sb)
	}
	return all, s.readError(rows.Err())
}

// LastNums returns the highest numbers that a sandbox and a workspace ever had.
func (s *Store) LastNums(ctx context.Context) (sandbox, workspace int64, err error) {
	err = s.reader.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='sandboxes'), 0),
		coalesce((SELECT seq FROM sqlite_sequence WHERE name='workspaces'), 0)`).Scan(&sandbox, &workspace)
	return sandbox, workspace, s.readError(err)
}

// SpecRow is the large part of a sandbox's row.
type SpecRow struct {
	Spec   json.RawMessage
	Timing []Milestone
}

// Specs returns the specs and milestones of those sandboxes that exist.
func (s *Store) Specs(ctx context.Context, ids ...warren.SandboxID) (map[warren.SandboxID]SpecRow, error) {
	out := make(map[warren.SandboxID]SpecRow, len(ids))
	for len(ids) > 0 {
		n := min(len(ids), 500)
		args := make([]any, n)
		for i, id := range ids[:n] {
			args[i] = string(id)
		}
		ids = ids[n:]
		rows, err := s.reader.QueryContext(ctx, `SELECT id, spec, coalesce(timing,'') FROM sandboxes WHERE id IN (?`+strings.Repeat(",?", n-1)+`)`, args...)
		if err != nil {
			return nil, s.readError(err)
		}
		for rows.Next() {
			var id, spec, timing string
			if err := rows.Scan(&id, &spec, &timing); err != nil {
				rows.Close()
				return nil, s.readError(err)
			}
			row := SpecRow{Spec: json.RawMessage(spec)}
			if timing != "" {
				json.Unmarshal([]byte(timing), &row.Timing) // a damaged timing is no reason to hide a sandbox
			}
			out[warren.SandboxID(id)] = row
		}
		err = rows.Err()
		rows.Close()
		if err != nil {
			return nil, s.readError(err)
		}
	}
	return out, nil
}

// Workspaces returns all rows in order of creation.
func (s *Store) Workspaces(ctx context.Context) ([]*Workspace, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT num, id, coalesce(name,''), owner, state, repo_id, created, keep, source FROM workspaces ORDER BY num`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []*Workspace
	for rows.Next() {
		w := &Workspace{}
		var id, repo, source string
		var created int64
		if err := rows.Scan(&w.Num, &id, &w.Name, &w.Owner, &w.State, &repo, &created, &w.Keep, &source); err != nil {
			return nil, s.readError(err)
		}
		w.ID, w.RepoID, w.Created, w.Source = warren.WorkspaceID(id), warren.RepoID(repo), fromUnix(created), json.RawMessage(source)
		all = append(all, w)
	}
	return all, s.readError(rows.Err())
}

// Key returns a stored idempotency key, nil when there is none.
func (s *Store) Key(ctx context.Context, owner, key string) (*Key, error) {
	k := &Key{Owner: owner, Key: key}
	var created int64
	err := s.reader.QueryRowContext(ctx, `SELECT fingerprint, object, created FROM keys WHERE owner=? AND key=?`, owner, key).Scan(&k.Fingerprint, &k.Object, &created)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	k.Created = fromUnix(created)
	return k, s.readError(err)
}

// KeyedObjects returns the objects that keys name.
func (s *Store) KeyedObjects(ctx context.Context) (map[string]bool, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT object FROM keys`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	all := map[string]bool{}
	for rows.Next() {
		var object string
		if err := rows.Scan(&object); err != nil {
			return nil, s.readError(err)
		}
		all[object] = true
	}
	return all, s.readError(rows.Err())
}

// Tokens returns all tokens, oldest first.
func (s *Store) Tokens(ctx context.Context) ([]Token, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT id, user, description, hash, created, expires, last_used FROM tokens ORDER BY created, id`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []Token
	for rows.Next() {
		var k Token
		var created, expires, used int64
		if err := rows.Scan(&k.ID, &k.User, &k.Description, &k.Hash, &created, &expires, &used); err != nil {
			return nil, s.readError(err)
		}
		k.Created, k.Expires, k.LastUsed = fromUnix(created), fromUnix(expires), fromUnix(used)
		all = append(all, k)
	}
	return all, s.readError(rows.Err())
}

// EventFilter chooses events.
type EventFilter struct {
	Owner       string // "" means everyone's
	SandboxID   warren.SandboxID
	WorkspaceID warren.WorkspaceID
}

// Events returns up to limit events after a sequence number, oldest first, and the sequence number up to which it
// has looked: the events up to there that it did not return do not match.
func (s *Store) Events(ctx context.Context, after int64, f EventFilter, limit int) ([]*Event, int64, error) {
	upto := s.LastSeq()
	q, args := `SELECT seq, time, owner, actor, action, coalesce(sandbox_id,''), coalesce(workspace_id,''), coalesce(message,''), coalesce(fields,'')
		FROM events WHERE seq > ? AND seq <= ?`, []any{after, upto}
	if f.Owner != "" {
		q, args = q+` AND owner = ?`, append(args, f.Owner)
	}
	if f.SandboxID != "" {
		q, args = q+` AND sandbox_id = ?`, append(args, string(f.SandboxID))
	}
	if f.WorkspaceID != "" {
		q, args = q+` AND workspace_id = ?`, append(args, string(f.WorkspaceID))
	}
	rows, err := s.reader.QueryContext(ctx, q+` ORDER BY seq LIMIT ?`, append(args, limit)...)
	if err != nil {
		return nil, 0, s.readError(err)
	}
	defer rows.Close()
	var all []*Event
	for rows.Next() {
		e := &Event{}
		var at int64
		var sb, ws, fields string
		if err := rows.Scan(&e.Seq, &at, &e.Owner, &e.Actor, &e.Action, &sb, &ws, &e.Message, &fields); err != nil {
			return nil, 0, s.readError(err)
		}
		e.Time, e.SandboxID, e.WorkspaceID = fromUnix(at), warren.SandboxID(sb), warren.WorkspaceID(ws)
		if fields != "" {
			json.Unmarshal([]byte(fields), &e.Fields) // written by us; a damaged one costs the fields alone
		}
		all = append(all, e)
	}
	if err := rows.Err(); err != nil {
		return nil, 0, s.readError(err)
	}
	if len(all) == limit {
		upto = all[len(all)-1].Seq
	}
	return all, max(upto, after), nil
}

// OldestSeq returns the sequence number of the oldest event that is kept, 0 when there is none.
func (s *Store) OldestSeq(ctx context.Context) (int64, error) {
	var n int64
	err := s.reader.QueryRowContext(ctx, `SELECT coalesce(min(seq), 0) FROM events`).Scan(&n)
	return n, s.readError(err)
}

// LastSeq returns the sequence number of the newest durable event.
func (s *Store) LastSeq() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lastSeq
}

// WaitSeq returns when there is an event after seq, or ctx ends, or the store closes.
func (s *Store) WaitSeq(ctx context.Context, seq int64) error {
	for {
		s.mu.Lock()
		last, moved := s.lastSeq, s.moved
		s.mu.Unlock()
		if last > seq {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
			return errClosed
		}
	}
}
