// Package store keeps what the engine must not forget, in one SQLite database.
//
// All changes pass through one goroutine that gathers what waits into a group and commits it with one fsync, so
// that many small changes a second are as durable as one. [Store.Update] returns after its group is on disk. Reads
// go beside it and see whole groups.
//
// The database is in WAL mode with synchronous=FULL: a change that Update acknowledged survives the loss of power.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/failpoint"
)

// Options of [Open].
type Options struct {
	// Path of the database file; its directory exists.
	Path string
	// Logger for what happens beside the calls; nil means none.
	Logger *slog.Logger
	// MaxEvents is how many events are kept; 0 means 200,000.
	MaxEvents int64
}

// Store is an open database. Its methods may be called at the same time.
type Store struct {
	opts    Options
	log     *slog.Logger
	lock    *os.File
	writer  *sql.DB
	conn    *sql.Conn // the one connection that writes
	reader  *sql.DB
	ops     chan *op
	stop    chan struct{}
	done    chan struct{}
	observe atomic.Pointer[func(time.Duration, int)]
	broken  atomic.Pointer[error] // set when the disk failed; nothing is written from then on

	pageSize int64
	reserve  atomic.Int64         // size of the reserve when there was one last
	emptied  atomic.Bool          // a checkpoint has just moved most of the log
	short    atomic.Bool          // there should be a reserve and is none
	moving   sync.Mutex           // held by who moves pages from the log to the database
	stmts    map[string]*sql.Stmt // of conn, used by the writer goroutine only

	mu      sync.Mutex
	closed  bool
	lastSeq int64
	moved   chan struct{} // closed and replaced when lastSeq grows
}

type op struct {
	ctx   context.Context
	fn    func(*Tx) error
	frees bool
	err   error
	done  chan struct{}
}

var (
	beforeCommit = failpoint.New("store.before-commit")
	afterCommit  = failpoint.New("store.after-commit")
)

const (
	maxGroup = 512
	// checkEvery is after how many commits the log's size is looked at, beside once a second.
	checkEvery = 8
)

// Open opens the database, creates it when there is none, and migrates an older one after making a copy of it. It
// fails, and changes nothing, when the file is damaged, newer than this program, or used by another process.
func Open(ctx context.Context, o Options) (_ *Store, err error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MaxEvents == 0 {
		o.MaxEvents = 200_000
	}
	s := &Store{
		opts: o, log: o.Logger,
		ops: make(chan *op, maxGroup), stop: make(chan struct{}), done: make(chan struct{}),
		stmts: map[string]*sql.Stmt{}, moved: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			s.release()
		}
	}()
	if s.lock, err = lockFile(o.Path + ".lock"); err != nil {
		return nil, err
	}
	if err := checkFile(o.Path); err != nil {
		return nil, err
	}
	// Every connection: wait for nobody (there is one writer), durable commits, no checkpoint inside a commit, because
	// checkpoint does that beside the writer.
	dsn := "file:" + escapePath(o.Path) + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)" +
		"&_pragma=foreign_keys(1)&_pragma=wal_autocheckpoint(0)&_pragma=temp_store(2)"
	if s.writer, err = sql.Open("sqlite", dsn); err != nil {
		return nil, s.explain("open", err)
	}
	s.writer.SetMaxOpenConns(2) // the writer and the checkpointer
	if s.conn, err = s.writer.Conn(ctx); err != nil {
		return nil, s.explain("open", err)
	}
	if err := s.verify(ctx); err != nil {
		return nil, err
	}
	if err := s.migrate(ctx); err != nil {
		return nil, err
	}
	// A first write shows at once whether the disk takes any.
	opened := func() error {
		_, err := s.conn.ExecContext(ctx, `INSERT INTO meta (key, value) VALUES ('opened', ?)
			ON CONFLICT (key) DO UPDATE SET value = excluded.value`, time.Now().UTC().Format(time.RFC3339))
		return s.explain("open", err)
	}
	err = opened()
	for stage := 0; stage < 2 && errors.Is(err, warren.ErrExhausted); stage++ {
		// With the reserve, so that there is a server to delete things with.
		if s.makeRoom(stage, []*op{{frees: true}}) {
			err = opened()
		}
	}
	if err != nil {
		return nil, err
	}
	if err := s.conn.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0)`).Scan(&s.lastSeq); err != nil {
		return nil, s.explain("open", err)
	}
	if err := s.conn.QueryRowContext(ctx, `PRAGMA page_size`).Scan(&s.pageSize); err != nil {
		return nil, s.explain("open", err)
	}
	if s.reader, err = sql.Open("sqlite", dsn+"&_pragma=query_only(1)"); err != nil {
		return nil, s.explain("open", err)
	}
	s.keepReserve()
	s.reader.SetMaxOpenConns(4)
	s.reader.SetMaxIdleConns(4)
	go s.write()
	return s, nil
}

// Path of the database file.
func (s *Store) Path() string { return s.opts.Path }

// Observe makes fn be told how long each group took to commit and how many changes it held.
func (s *Store) Observe(fn func(d time.Duration, changes int)) { s.observe.Store(&fn) }

// Close waits for changes under way and closes the database.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	close(s.stop)
	<-s.done
	return s.release()
}

func (s *Store) release() error {
	var errs []error
	for _, st := range s.stmts {
		errs = append(errs, st.Close())
	}
	for _, c := range []io.Closer{closer(s.reader), closer(s.conn), closer(s.writer), closer(s.lock)} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// closer avoids interfaces that hold nil pointers.
func closer[T any, P interface {
	*T
	io.Closer
}](p P) io.Closer {
	if p == nil {
		return nil
	}
	return p
}

// Update runs fn in a transaction and returns when it is durable. When fn returns an error, nothing of it is kept
// and Update returns that error. fn must be quick, for it runs on the one writer, must not call the store, and may be run
// again.
//
// When ctx ends while the change waits for its turn it is dropped; once its turn has come Update waits for it.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	return s.update(&op{ctx: ctx, fn: fn, done: make(chan struct{})})
}

// UpdateFreeing is Update for a change that is a part of making room: on a full disk it may use the space that the store
// keeps in reserve.
func (s *Store) UpdateFreeing(ctx context.Context, fn func(*Tx) error) error {
	return s.update(&op{ctx: ctx, fn: fn, frees: true, done: make(chan struct{})})
}

func (s *Store) update(o *op) error {
	if err := s.Err(); err != nil {
		return err
	}
	select {
	case s.ops <- o:
	case <-o.ctx.Done():
		return o.ctx.Err()
	case <-s.stop:
		return errClosed
	}
	select {
	case <-o.done:
		return o.err
	case <-s.done:
		select {
		case <-o.done:
			return o.err
		default:
			return errClosed
		}
	}
}

var errClosed = fmt.Errorf("the store is closed: %w", warren.ErrUnavailable)

// Err returns why the store takes no more changes, if it does not: after the disk failed to write, what is in the
// database's memory and what is on disk may differ, and only opening it anew finds out.
func (s *Store) Err() error {
	if p := s.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// write is the writer goroutine.
func (s *Store) write() {
	defer close(s.done)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	check := make(chan struct{}, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range check {
			s.checkpoint()
		}
	})
	defer wg.Wait()
	defer close(check)
	poke := func() {
		select {
		case check <- struct{}{}:
		default:
		}
	}
	commits := 0
	group := make([]*op, 0, maxGroup)
	for {
		select {
		case o := <-s.ops:
			group = append(group[:0], o)
			s.gather(&group)
			s.commit(group)
			clear(group)
			s.trim()
			if commits++; commits%checkEvery == 0 {
				poke()
			}
		case <-tick.C:
			poke()
		case <-s.stop:
			for {
				select {
				case o := <-s.ops:
					s.commit([]*op{o})
					continue
				default:
				}
				return
			}
		}
	}
}

func (s *Store) gather(group *[]*op) {
	for len(*group) < maxGroup {
		select {
		case o := <-s.ops:
			*group = append(*group, o)
		default:
			return
		}
	}
}

// commit runs a group in one transaction. A change that fails is undone to its savepoint and the others go on.
func (s *Store) commit(group []*op) {
	start := time.Now()
	err := s.Err()
	var last int64
	if err == nil {
		last, err = s.run(group)
	}
	if err != nil {
		err = s.explain("write", err)
	}
	for stage := 0; stage < 2 && errors.Is(err, warren.ErrExhausted); stage++ {
		if !s.makeRoom(stage, group) {
			continue
		}
		if last, err = s.run(group); err != nil {
			err = s.explain("write", err)
		}
	}
	n := 0
	for _, o := range group {
		if err != nil && o.err == nil {
			o.err = err
		}
		if o.err == nil {
			n++
		}
	}
	if last > 0 && err == nil {
		s.mu.Lock()
		s.lastSeq = max(s.lastSeq, last)
		close(s.moved)
		s.moved = make(chan struct{})
		s.mu.Unlock()
	}
	if fn := s.observe.Load(); fn != nil && n > 0 {
		(*fn)(time.Since(start), n)
	}
	for _, o := range group {
		close(o.done)
	}
}

func (s *Store) run(group []*op) (last int64, err error) {
	ctx := context.Background()
	if err := s.exec(ctx, "BEGIN IMMEDIATE"); err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			s.conn.ExecContext(ctx, "ROLLBACK") // SQLite may have done so itself
		}
	}()
	for _, o := range group {
		if o.err = o.ctx.Err(); o.err != nil {
			continue
		}
		if !o.frees && s.short.Load() {
			o.err = errShort
			continue
		}
		if len(group) > 1 {
			if err := s.exec(ctx, "SAVEPOINT change"); err != nil {
				return 0, err
			}
		}
		tx := &Tx{s: s, ctx: ctx}
		o.err = o.fn(tx)
		switch {
		case o.err == nil:
			last = max(last, tx.seq)
		case tx.fatal != nil:
			return 0, tx.fatal // the whole transaction is in doubt, such as when the disk is full
		case len(group) == 1:
			return 0, s.exec(ctx, "ROLLBACK")
		default:
			if err := s.exec(ctx, "ROLLBACK TO change"); err != nil {
				return 0, err
			}
		}
		if len(group) > 1 {
			if err := s.exec(ctx, "RELEASE change"); err != nil {
				return 0, err
			}
		}
	}
	if err := beforeCommit.Hit(); err != nil {
		return 0, err
	}
	if err := s.exec(ctx, "COMMIT"); err != nil {
		return 0, err
	}
	// An error injected here would be a lie: the group is durable.
	afterCommit.Hit()
	return last, nil
}

func (s *Store) exec(ctx context.Context, query string, args ...any) error {
	st, err := s.stmt(ctx, query)
	if err != nil {
		return err
	}
	_, err = st.ExecContext(ctx, args...)
	return err
}

func (s *Store) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	if st := s.stmts[query]; st != nil {
		return st, nil
	}
	st, err := s.conn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	s.stmts[query] = st
	return st, nil
}

// checkpoint moves pages from the log to the database, beside the writer, whom it does not stop.
func (s *Store) checkpoint() {
	s.keepReserve()
	if logSize(s.opts.Path) < s.maxLog()/2 || s.Err() != nil {
		return
	}
	s.moving.Lock()
	defer s.moving.Unlock()
	var busy, frames, moved int
	if err := s.writer.QueryRow("PRAGMA wal_checkpoint(PASSIVE)").Scan(&busy, &frames, &moved); err != nil {
		s.log.Warn("store checkpoint", "error", err)
		return
	}
	s.emptied.Store(true)
}

// maxLog is how large the log may grow: not more than the reserve has room for, or a full disk could not take what is in it.
func (s *Store) maxLog() int64 { return max(s.reserve.Load(), minReserve) }

// trim empties the log. After a checkpoint beside the writer there is little left to move. A log that has grown in spite
// of that is emptied too: changes wait meanwhile, which gives the disk the time that it seems to need.
func (s *Store) trim() {
	if s.emptied.Swap(false) || logSize(s.opts.Path) >= s.maxLog() {
		s.emptyLog()
	}
}

// emptyLog moves all of the log to the database and cuts it to nothing, and reports whether that was possible. The writer
// calls it, between transactions.
func (s *Store) emptyLog() bool {
	s.moving.Lock()
	defer s.moving.Unlock()
	var busy, frames, moved int
	err := s.conn.QueryRowContext(context.Background(), "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &moved)
	if err != nil {
		s.log.Warn("store checkpoint", "error", err)
	}
	return err == nil && busy == 0
}

// makeRoom tries to get room for a group that found the disk full, and reports whether another attempt is worth it. First,
// the log: it holds many versions of the same pages and shrinks when they are moved to the database. Then, for changes that
// make room themselves, the reserve, which is as large as what the log may need for that. From then on nothing else is
// changed until there is a reserve again, so that it is not used up by more of what filled the disk.
func (s *Store) makeRoom(stage int, group []*op) bool {
	if stage == 0 {
		return logSize(s.opts.Path) > 0 && s.emptyLog()
	}
	for _, o := range group {
		if o.frees && os.Remove(s.reservePath()) == nil {
			s.log.Warn("the disk is full; the store uses its reserve")
			s.short.Store(true)
			s.emptyLog()
			return true
		}
	}
	return false
}

func logSize(path string) int64 {
	info, err := os.Stat(path + "-wal")
	if err != nil {
		return 0
	}
	return info.Size()
}

func (s *Store) reservePath() string { return s.opts.Path + ".reserve" }

// The reserve is what the store keeps allocated for deletes on a full disk, and the bound of its log.
const (
	minReserve = 256 << 10
	maxReserve = 16 << 20
)

// keepReserve makes the reserve when there is none, of an eighth of what is free if that is enough.
func (s *Store) keepReserve() {
	if info, err := os.Lstat(s.reservePath()); err == nil {
		s.reserve.Store(info.Size())
		s.short.Store(false)
		return
	}
	// The database's own file does not shrink, what is free in it does not show; so little is asked for.
	room := free(s.opts.Path)
	size := max(minReserve, min(maxReserve, room/8))
	if room < 2*size {
		s.short.Store(true)
		return
	}
	f, err := os.OpenFile(s.reservePath(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		s.short.Store(full(s.opts.Path))
		return
	}
	if err := errors.Join(syscall.Fallocate(int(f.Fd()), 0, 0, size), f.Close()); err != nil {
		os.Remove(s.reservePath())
		// A file system that cannot allocate ahead has no reserve.
		s.short.Store(!errors.Is(err, errors.ErrUnsupported))
		return
	}
	s.reserve.Store(size)
	s.short.Store(false)
}

var errShort = fmt.Errorf("the disk that holds the store is as good as full, only deletes are taken; free space (`warren rm`, `warren workspace rm`, `warren image rm`) and try again: %w", warren.ErrExhausted)

// Backup writes a consistent copy of the database to path, which must not exist, while changes go on.
func (s *Store) Backup(ctx context.Context, path string) error {
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("backup to %s: the file is there: %w", filepath.Base(path), warren.ErrExists)
	}
	// query_only forbids VACUUM INTO, so this is the checkpointer's connection.
	if _, err := s.writer.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return s.explain("backup", err)
	}
	return os.Chmod(path, 0o600)
}
