// Package audit keeps evidence: an append-only log of records, one line of JSON each, chained by hash, so that a record
// which was edited, removed, moved, inserted or cut off afterwards is found and named.
//
// A directory holds one log. One process writes it; any number of others read, follow and verify it meanwhile.
//
//	00000000000000000001.jsonl   a segment, named by the number of its first record
//	head                         the anchor: number and hash of a recent record, and where the log begins
//	lock                         held by the writer
//	torn-…                       what a crash left of a record, moved aside by Open
//
// The first line of a segment says with which record it begins and the hash that this record continues, so the oldest
// segments can be dropped and the rest still verifies. The hash of a record is SHA-256 over the hash before it and over
// its own line without the hash.
//
// # What is kept when
//
// Append returns when the system has the record: kill -9 of the writer loses nothing that was acknowledged. A power cut
// may lose what is younger than [Options.Sync], except records with Durable set, which are on disk when Append returns.
//
// The anchor is replaced after a flush, at most once in Options.Sync and at Close, so after a crash it is behind by what
// was appended in that time (200 ms by default) and one flush. A log that is longer than its anchor is
// whole if it chains; a shorter one was cut off. Whoever can write the directory can write a whole new chain and its
// anchor; against that, keep [Log.Head] somewhere else from time to time and hand it to [Verify].
package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Record is one line of evidence. Append sets Seq, Prev and Hash, and Time when it is zero.
type Record struct {
	// Seq counts from 1 without gaps. It gives the order; Time does not, for clocks go back.
	Seq  int64     `json:"seq"`
	Time time.Time `json:"time"`
	// Actor is who did it, Action what was done, such as "flow.allow"; only Action is required.
	Actor  string `json:"actor,omitempty"`
	Action string `json:"action"`
	// Sandbox is the ID of the sandbox that it concerns.
	Sandbox string            `json:"sandbox,omitempty"`
	Message string            `json:"message,omitempty"`
	Fields  map[string]string `json:"fields,omitempty"`
	// Prev and Hash are SHA-256 in hex: of the record before and of this one.
	Prev string `json:"prev"`
	Hash string `json:"hash"`
	// Durable makes Append wait until the record is on disk. It is no part of the record.
	Durable bool `json:"-"`
}

// Head names a record by its number and hash. The zero Seq is the beginning of a log.
type Head struct {
	Seq  int64  `json:"seq"`
	Hash string `json:"hash"`
}

// IsHead says whether h has the form of the head of a record.
func IsHead(h Head) bool { return h.Seq > 0 && isHash(h.Hash) }

// Options of a log. The zero value works.
type Options struct {
	// MaxBytes is how much the segments may take together, by default 1 GiB. The oldest are dropped beyond it; the newest
	// stays, so two segments are the least that can be held to.
	MaxBytes int64
	// SegmentBytes is how long a segment gets, by default 8 MiB.
	SegmentBytes int64
	// Sync is how long a record may wait to be flushed to disk, by default 200 ms. Negative leaves flushing to the system,
	// except for records with Durable set; after a power cut the log may then look cut off.
	Sync time.Duration
	// Mask, when set, is applied to every text before [Mask] is, such as to take out values that are known.
	Mask func(string) string
	// Lost, when set, has records that could not be written counted: a record "record.lost" of this actor says how many they were and of when, before
	// the next one that can be. It is for logs of what happens whether it is on record or not; the count is lost with the process.
	Lost string
}

const (
	defaultMax     = 1 << 30
	defaultSegment = 8 << 20
	defaultSync    = 200 * time.Millisecond
	keepTorn       = 8 // files of torn records
)

// ErrClosed is what a log returns after Close.
var ErrClosed = errors.New("audit: the log is closed")

// ErrLocked is what Open returns while another process, or another Log, writes the directory.
var ErrLocked = errors.New("the log has a writer")

// Log appends to a directory. Its methods may be called concurrently.
type Log struct {
	dir  string
	opts Options
	lock *os.File

	mu       sync.Mutex
	file     *os.File // the newest segment, nil before the first record
	size     int64    // of its good part
	torn     bool     // a failed write left bytes after size
	head     Head
	segments []segment // oldest first
	start    Head      // the record before the oldest segment
	owed     []Record  // what the log has to say of itself, before the next record
	lost     missing   // as well
	reserved int64     // up to here file has room, see Ready
	prune    bool
	retired  []*os.File // segments before file, still open
	synced   int64      // up to this record all is on disk
	waiting  *batch
	failed   error // a flush failed: what is on disk is not known
	closed   bool

	anchored Head // of the anchor file; only the flusher looks
	anchorAt time.Time
	dirty    chan struct{}
	urgent   chan struct{}
	stop     chan struct{}
	done     chan struct{}
}

// batch is what durable records wait for together.
type batch struct {
	done chan struct{}
	err  error
}

// Open opens the log in dir for writing and makes it when it is not there. A record that a crash cut short is moved to a
// file torn-…, and a record of its own says so. Damage that no crash explains is an error that matches *[Bad]; the log is
// not written then. A directory that has a writer gives [ErrLocked].
func Open(dir string, opts Options) (*Log, error) {
	if opts.MaxBytes <= 0 {
		opts.MaxBytes = defaultMax
	}
	if opts.SegmentBytes <= 0 {
		opts.SegmentBytes = min(defaultSegment, max(opts.MaxBytes/4, maxRecord))
	}
	if opts.Sync == 0 {
		opts.Sync = defaultSync
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("audit: make the log's directory: %w", err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	l := &Log{
		dir: dir, opts: opts, lock: lock,
		dirty: make(chan struct{}, 1), urgent: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
	if err := l.load(); err != nil {
		if l.file != nil {
			l.file.Close()
		}
		return nil, errors.Join(err, unlock(lock))
	}
	l.synced = l.head.Seq
	go l.run()
	if len(l.owed) > 0 {
		l.mu.Lock()
		err := l.pay()
		l.mu.Unlock()
		if err != nil && !full(err) { // with a full disk it stays owed
			return nil, errors.Join(err, l.Close())
		}
	}
	l.poke(l.dirty)
	return l, nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("audit: open the log's lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		who, _ := io.ReadAll(io.LimitReader(f, 20))
		f.Close()
		pid := strings.TrimSpace(string(who))
		if _, err := strconv.Atoi(pid); err != nil {
			pid = "unknown"
		}
		return nil, fmt.Errorf("audit: process %s writes %s; stop it first, or use another directory: %w", pid, dir, ErrLocked)
	}
	// Only for the message above; a full disk must keep nobody out.
	if f.Truncate(0) == nil {
		f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}

// unlock lets go by name and not only by closing: a process that is being started holds a copy until it runs its program.
func unlock(f *os.File) error {
	return errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.Close())
}

// Head returns the last record that was appended.
func (l *Log) Head() Head {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head
}

// Anchor returns what the anchor of the log in dir names: a recent record, for keeping somewhere else.
func Anchor(dir string) (Head, error) {
	a, err := readAnchor(dir)
	if err != nil {
		return Head{}, fmt.Errorf("audit: the anchor of the log in %s: %w", dir, err)
	}
	return a.Head, nil
}

// Append writes a record and returns it as it was written: control characters, invalid UTF-8 and what changes the
// direction of text are escaped as in Go, backslashes doubled; what looks like a secret is masked; a text of more than 1 KiB
// (names: 256 bytes, keys: 64) is cut and says how long it was; fields that would make the line longer than 8 KiB are left
// out, and the field "truncated" counts them.
//
// An error means that the record was not written, and the log can be used on, such as when a full disk has space again.
// Two exceptions: when ctx ends, or the flush fails, while a durable record waits, the record is returned as well: it is
// written, and not known to be on disk.
func (l *Log) Append(ctx context.Context, r Record) (Record, error) {
	if err := ctx.Err(); err != nil {
		return Record{}, err
	}
	durable := r.Durable
	r, err := l.tidy(r)
	if err != nil {
		return Record{}, err
	}
	l.mu.Lock()
	tidy := r
	if err = l.pay(); err == nil {
		r, err = l.write(r)
	}
	if err != nil {
		l.lose(tidy, err)
	}
	var b *batch
	if err == nil && durable {
		if l.waiting == nil {
			l.waiting = &batch{done: make(chan struct{})}
		}
		b = l.waiting
	}
	l.mu.Unlock()
	if err != nil {
		return Record{}, err
	}
	l.poke(l.dirty)
	if b == nil {
		return r, nil
	}
	l.poke(l.urgent)
	select {
	case <-b.done:
		return r, b.err
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

func (l *Log) poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pay writes what the log has to say of itself. mu is held.
func (l *Log) pay() error {
	for len(l.owed) > 0 {
		r, err := l.tidy(l.owed[0])
		if err != nil {
			return err
		}
		if _, err := l.write(r); err != nil {
			return err
		}
		l.owed = l.owed[1:]
	}
	return l.ownUp()
}

// write adds a tidy record. mu is held.
func (l *Log) write(r Record) (Record, error) {
	switch {
	case l.closed:
		return Record{}, ErrClosed
	case l.failed != nil:
		return Record{}, l.failed
	}
	r.Seq, r.Prev = l.head.Seq+1, l.head.Hash
	line := encode(&r)
	if l.file == nil || l.size+int64(len(line)) > l.opts.SegmentBytes && l.head.Seq >= l.newest().first {
		if err := l.rotate(); err != nil {
			return Record{}, l.explain("begin a segment", err)
		}
	}
	if l.torn {
		if err := l.file.Truncate(l.size); err != nil {
			return Record{}, l.explain("remove what an earlier write left", err)
		}
		l.torn, l.reserved = false, 0
	}
	if _, err := l.file.WriteAt(line, l.size); err != nil {
		l.torn = l.file.Truncate(l.size) != nil
		l.reserved = 0
		return Record{}, l.explain("write a record", err)
	}
	l.size += int64(len(line))
	l.newest().size = l.size
	l.head = Head{r.Seq, r.Hash}
	return r, nil
}

func (l *Log) newest() *segment { return &l.segments[len(l.segments)-1] }

// rotate begins the segment of the next record. mu is held.
func (l *Log) rotate() error {
	if l.file != nil && l.opts.Sync > 0 {
		// Before the next segment exists: after a power cut only the newest may end early.
		if err := l.file.Sync(); err != nil {
			return err
		}
	}
	s := segment{first: l.head.Seq + 1}
	line := encodeHeader(header{First: s.first, Prev: l.head.Hash})
	s.size = int64(len(line))
	if err := replace(l.dir, s.name(), line, l.opts.Sync > 0); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(l.dir, s.name()), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if l.file != nil {
		if l.reserved > l.size {
			l.file.Truncate(l.size) // gives the room back that was not needed; a failure costs that room
		}
		l.retired = append(l.retired, l.file)
	}
	l.file, l.size, l.torn, l.reserved = f, s.size, false, 0
	l.segments = append(l.segments, s)
	l.prune = true
	return nil
}

// explain says what failed, and what to do when it is the disk that is full.
func (l *Log) explain(what string, err error) error {
	if full(err) {
		return fmt.Errorf("audit: %s: no space is left for %s: nothing was written; free some and try again: %w", what, l.dir, err)
	}
	return fmt.Errorf("audit: %s: %w", what, err)
}

func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// run flushes: at once when a durable record waits, else some time after a record came.
func (l *Log) run() {
	defer close(l.done)
	interval := l.opts.Sync
	if interval < 0 {
		interval = defaultSync
	}
	var tick <-chan time.Time
	for {
		select {
		case <-l.dirty:
			if tick == nil {
				tick = time.After(interval)
			}
		case <-l.urgent:
			l.flush(time.Since(l.anchorAt) >= interval)
		case <-tick:
			tick = nil
			l.flush(true)
		case <-l.stop:
			l.flush(true)
			return
		}
	}
}

// flush brings to disk what was written, tells who waits, drops segments, and renews the anchor when asked to.
func (l *Log) flush(anchor bool) {
	l.mu.Lock()
	b, retired, file, head := l.waiting, l.retired, l.file, l.head
	l.waiting, l.retired = nil, nil
	var err error
	dirty := head.Seq > l.synced && (l.opts.Sync > 0 || b != nil)
	l.mu.Unlock()
	for _, f := range retired {
		// It was flushed when its successor began, or shall not be.
		if l.opts.Sync < 0 && b != nil {
			err = errors.Join(err, f.Sync())
		}
		f.Close()
	}
	if dirty && file != nil {
		err = errors.Join(err, file.Sync())
	}
	l.mu.Lock()
	if err != nil {
		err = l.explain("flush", err)
		if !full(err) {
			// What the system has dropped after a failed flush is not known, so a later success would prove nothing.
			l.failed = fmt.Errorf("%w; open the log again", err)
		}
	} else if dirty {
		l.synced = head.Seq
	}
	var drop []segment
	start := l.start
	if l.prune {
		drop, start = l.surplus(head.Seq)
		// Until the anchor knows; what was appended meanwhile may have made more to drop.
		l.prune = len(drop) > 0 || l.head.Seq > head.Seq
	}
	l.mu.Unlock()
	if b != nil {
		b.err = err
		close(b.done)
	}
	if err != nil {
		return
	}
	if len(drop) > 0 || anchor && head != l.anchored {
		if err := writeAnchor(l.dir, anchorFile{Head: head, Start: start}, l.opts.Sync > 0); err != nil {
			return // the log is longer than its anchor; the next flush tries again
		}
		l.anchored, l.anchorAt = head, time.Now()
	}
	l.drop(drop, start)
}

// surplus returns the oldest segments that are too many, of those that end at a record or before it, and the record that the
// rest begins after. mu is held.
func (l *Log) surplus(upto int64) (drop []segment, start Head) {
	var total int64
	for _, s := range l.segments {
		total += s.size
	}
	start = l.start
	for i := 0; i+1 < len(l.segments) && total > l.opts.MaxBytes && l.segments[i+1].first-1 <= upto; i++ {
		next := l.segments[i+1].first
		h, err := readHeader(l.dir, l.segments[i+1])
		if err != nil {
			break // Verify names it
		}
		drop = append(drop, l.segments[i])
		total -= l.segments[i].size
		start = Head{next - 1, h.Prev}
	}
	return drop, start
}

// drop removes segments that the anchor no longer counts.
func (l *Log) drop(drop []segment, start Head) {
	if len(drop) == 0 {
		return
	}
	for _, s := range drop {
		if err := os.Remove(filepath.Join(l.dir, s.name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return // the next flush tries again
		}
	}
	l.mu.Lock()
	l.segments, l.start = l.segments[len(drop):], start
	l.owed = append(l.owed, Record{
		Actor: "audit", Action: "audit.dropped", Message: fmt.Sprintf("records %d to %d were dropped to stay within %d bytes", drop[0].first, start.Seq, l.opts.MaxBytes),
		Fields: map[string]string{"first": strconv.FormatInt(drop[0].first, 10), "last": strconv.FormatInt(start.Seq, 10), "last_hash": start.Hash},
	})
	l.pay() // what fails stays owed
	l.mu.Unlock()
	l.poke(l.dirty)
}

// Close flushes, renews the anchor and lets go of the directory. What is appended later fails with [ErrClosed].
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	if l.failed == nil {
		l.ownUp() // or never
	}
	if l.reserved > l.size {
		l.file.Truncate(l.size)
	}
	l.closed = true
	l.mu.Unlock()
	close(l.stop)
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.failed
	for _, f := range l.retired {
		f.Close()
	}
	if l.file != nil {
		err = errors.Join(err, l.file.Close())
	}
	return errors.Join(err, unlock(l.lock))
}
