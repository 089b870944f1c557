package process

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"
)

// Kind tells the streams of a process apart.
type Kind uint8

// The streams of a process: two pipes, or a terminal.
const (
	Stdout Kind = iota
	Stderr
	Terminal
)

// Chunk is a piece of output of one kind. Its data must not be changed.
type Chunk struct {
	Seq  int64 // sequence number of the first byte
	Kind Kind
	Data []byte
}

func (c Chunk) end() int64 { return c.Seq + int64(len(c.Data)) }

const (
	// ringBytes is how much output of a process stays in memory.
	ringBytes = 1 << 20
	// chunkBytes is how large a chunk grows by small writes.
	chunkBytes = 32 << 10
	// chunkCost is what a chunk costs beside its data.
	chunkCost = 64
	// windowBytes is how far a process may run ahead of a client that follows it at a fair pace.
	windowBytes = 512 << 10
	// paceBytes in paceTime is the pace below which a client no longer holds up the process.
	paceBytes = 64 << 10
	paceTime  = 10 * time.Second
)

// Output is the output of one process. The zero value is not ready; use newOutput.
type Output struct {
	mu     sync.Mutex
	chunks []Chunk // in memory, the oldest first, without gaps
	cost   int
	end    int64 // sequence number after the last byte
	done   bool  // the process has ended; more may still come from its children
	mark   int64 // end when the host was last about to save the memory; 0 when the process is younger
	turn   int64 // where output goes on since the last rollback: see Turn
	spool  *spool

	changed   chan struct{} // closed at a change, when someone waits
	advanced  chan struct{} // closed when a follower advances, when the writer waits
	followers map[*Follower]struct{}
}

func newOutput(s *spool) *Output {
	return &Output{spool: s, followers: make(map[*Follower]struct{})}
}

// Seq returns the sequence number after the last byte so far.
func (o *Output) Seq() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end
}

// Turn returns the sequence number up to which the output is surely what it was before the last rollback. A client that is
// further has read what another past printed. 0 is also that of a process that is younger than the rollback.
func (o *Output) Turn() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.turn
}

// append adds output. The data is copied.
func (o *Output) append(kind Kind, data []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := len(o.chunks); n > 0 && o.chunks[n-1].Kind == kind && len(o.chunks[n-1].Data)+len(data) <= chunkBytes {
		// Readers hold slices of the old length, so bytes beyond it may be written.
		last := &o.chunks[n-1]
		before := cap(last.Data)
		last.Data = append(last.Data, data...)
		o.cost += cap(last.Data) - before
	} else {
		c := Chunk{Seq: o.end, Kind: kind, Data: slices.Clone(data)}
		o.chunks = append(o.chunks, c)
		o.cost += cap(c.Data) + chunkCost
	}
	o.end += int64(len(data))
	if o.cost > ringBytes {
		o.evict(ringBytes / 2)
	}
	o.wake()
}

// evict writes the oldest chunks to disk until those in memory cost at most keep.
func (o *Output) evict(keep int) {
	n, cost := 0, o.cost
	for n < len(o.chunks) && cost > keep {
		cost -= cap(o.chunks[n].Data) + chunkCost
		n++
	}
	o.spool.write(o.chunks[:n])
	// A new array lets go of the old data.
	o.chunks, o.cost = slices.Clone(o.chunks[n:]), cost
	if len(o.chunks) == 0 {
		o.chunks = nil
	}
}

// memory returns what the output costs in memory.
func (o *Output) memory() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.cost
}

// store moves all that is in memory to disk.
func (o *Output) store() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.evict(0)
}

// drop forgets everything.
func (o *Output) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.chunks, o.cost = nil, 0
	o.spool.close()
	o.wake()
}

// finish says that the process has ended.
func (o *Output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.done = true
	o.wake()
}

func (o *Output) wake() {
	if o.changed != nil {
		close(o.changed)
		o.changed = nil
	}
}

// throttle holds up the writer while a client that reads at a fair pace is more than the window behind, so that it
// loses nothing; a client that is slower than that, or stuck, holds up nobody.
func (o *Output) throttle() {
	for {
		o.mu.Lock()
		behind := false
		now := time.Now()
		for f := range o.followers {
			if o.end-f.seq <= windowBytes {
				f.stuck, f.paceSeq, f.paceAt = false, f.seq, now
				continue
			}
			if now.Sub(f.paceAt) > paceTime {
				f.stuck = f.seq-f.paceSeq < paceBytes
				f.paceSeq, f.paceAt = f.seq, now
			}
			behind = behind || !f.stuck
		}
		if !behind {
			o.mu.Unlock()
			return
		}
		if o.advanced == nil {
			o.advanced = make(chan struct{})
		}
		wait := o.advanced
		o.mu.Unlock()
		select {
		case <-wait:
		case <-time.After(paceTime / 4):
		}
	}
}

// Follower reads the output of a process in order. It is for one goroutine.
type Follower struct {
	o   *Output
	seq int64
	// Progress, by which throttle judges the pace.
	stuck   bool
	paceSeq int64
	paceAt  time.Time
}

// Follow returns a follower that starts at a sequence number; a negative one means now. Close it.
func (o *Output) Follow(from int64) *Follower {
	o.mu.Lock()
	defer o.mu.Unlock()
	if from < 0 || from > o.end {
		from = o.end
	}
	f := &Follower{o: o, seq: from, paceSeq: from, paceAt: time.Now()}
	o.followers[f] = struct{}{}
	return f
}

// Close ends the follower.
func (f *Follower) Close() {
	f.o.mu.Lock()
	defer f.o.mu.Unlock()
	delete(f.o.followers, f)
	f.o.tell()
}

// tell wakes a writer that waits for followers.
func (o *Output) tell() {
	if o.advanced != nil {
		close(o.advanced)
		o.advanced = nil
	}
}

// LostError says that output up to a sequence number is no longer kept. The follower goes on from there.
type LostError struct{ Before int64 }

// Error implements error.
func (e *LostError) Error() string { return "output is no longer kept" }

// ErrIdle says that nothing happened for the time asked.
var ErrIdle = errors.New("no output")

// Next returns the next chunk. It waits for one up to idle and then returns [ErrIdle]; with idle 0 it does not wait,
// and below 0 it waits without limit. At the end of a process that has ended it returns io.EOF, a [*LostError] when
// the client was away too long, and ctx's error.
func (f *Follower) Next(ctx context.Context, idle time.Duration) (Chunk, error) {
	var timeout <-chan time.Time
	for {
		c, wait, err := f.next()
		if wait == nil {
			return c, err
		}
		if idle == 0 {
			return Chunk{}, ErrIdle
		}
		if timeout == nil && idle > 0 {
			t := time.NewTimer(idle)
			defer t.Stop()
			timeout = t.C
		}
		select {
		case <-wait:
		case <-timeout:
			return Chunk{}, ErrIdle
		case <-ctx.Done():
			return Chunk{}, ctx.Err()
		}
	}
}

// next returns a chunk or an error or, when there is nothing yet, a channel that closes when there may be.
func (f *Follower) next() (Chunk, <-chan struct{}, error) {
	o := f.o
	o.mu.Lock()
	defer o.mu.Unlock()
	if f.seq == o.end {
		if o.done {
			return Chunk{}, nil, io.EOF
		}
		if o.changed == nil {
			o.changed = make(chan struct{})
		}
		return Chunk{}, o.changed, nil
	}
	c, ok := o.at(f.seq)
	if !ok {
		before := f.seq
		f.seq = o.first(f.seq)
		o.tell()
		if f.seq == before {
			f.seq = o.end
		}
		return Chunk{}, nil, &LostError{Before: f.seq}
	}
	f.seq = c.end()
	o.tell()
	return c, nil, nil
}

// at returns the chunk that holds seq, from seq on.
func (o *Output) at(seq int64) (Chunk, bool) {
	if len(o.chunks) > 0 && seq >= o.chunks[0].Seq {
		i, found := slices.BinarySearchFunc(o.chunks, seq, func(c Chunk, s int64) int { return int(c.Seq - s) })
		if !found {
			i--
		}
		c := o.chunks[i]
		skip := seq - c.Seq
		return Chunk{Seq: seq, Kind: c.Kind, Data: c.Data[skip:len(c.Data):len(c.Data)]}, true
	}
	return o.spool.read(seq)
}

// first returns the first sequence number above seq that is kept.
func (o *Output) first(seq int64) int64 {
	if s, ok := o.spool.first(seq); ok {
		return s
	}
	if len(o.chunks) > 0 {
		return o.chunks[0].Seq
	}
	return o.end
}
