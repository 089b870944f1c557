package engine

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// When the host's memory runs short, sandboxes that nobody uses are paused before their timeout is over: the longest idle
// first, and those whose processes work or hold them awake only when hardly anything is left. Nothing is deleted or killed: a
// pause can be undone, and what the host's kernel does in the worst case costs an execution and never a workspace. When its
// disk runs short, nothing is paused, which would need disk, nothing new is made, and sandboxes that stand by go. There is nothing else to
// drop that could be made again: mirrors hold commits that were not pushed, images may not be had again, and leftovers go at each start.
// What costs the least then is the memory of a sandbox that has been paused for long; it is taken only where the operator has said for how
// long, and when half of what has to stay free is gone too.

// Room is what a host has of something, in bytes.
type Room struct{ Free, Total int64 }

// Host tells what is left of the machine; tests give one of their own.
type Host interface {
	Memory() (Room, error)
	// Disk is of the file system that holds dir, for files of users other than root.
	Disk(dir string) (Room, error)
}

// SystemHost is the machine itself.
func SystemHost() Host { return systemHost{} }

type systemHost struct{}

func (systemHost) Memory() (Room, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Room{}, err
	}
	return parseMemory(string(b))
}

// parseMemory reads /proc/meminfo.
func parseMemory(text string) (Room, error) {
	var r Room
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "kB" {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 50)
		if err != nil {
			return Room{}, fmt.Errorf("%s %w", f[0], err)
		}
		switch f[0] {
		case "MemTotal:":
			r.Total = n << 10
		case "MemAvailable:":
			r.Free = n << 10
		}
	}
	if r.Total == 0 {
		return Room{}, fmt.Errorf("the kernel does not tell its memory: %w", errUnsupported)
	}
	return r, nil
}

func (systemHost) Disk(dir string) (Room, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Room{}, err
	}
	return Room{Free: int64(st.Bavail) * st.Bsize, Total: int64(st.Blocks) * st.Bsize}, nil
}

// low is below which there is too little: what the operator has set, else 5%, and no more than most, so that a large machine
// is not called full with much to spare.
func (r Room) low(set, most int64) int64 {
	if set != 0 {
		return max(set, 0)
	}
	return min(r.Total/20, most)
}

const (
	mostLowMemory = 512 << 20
	mostLowDisk   = 1 << 30
	// pressureEvery is how often the host is looked at; after an eviction sooner.
	pressureEvery = 5 * time.Second
	pressureSoon  = time.Second
	// restTime is how long nobody has used a sandbox that is evicted, unless hardly anything is left: who works with one pauses
	// for a while between two commands.
	restTime = 10 * time.Second
	// warnEvery is how often the log says that the disk is short.
	warnEvery = 10 * time.Minute
)

// pressureLoop pauses sandboxes while memory is short, and warns while disk is.
func (e *Engine) pressureLoop() {
	var warned int64
	for {
		wait := pressureEvery
		if e.relieveMemory() {
			wait = pressureSoon
		}
		if err := e.diskRoom(0); err != nil {
			e.coolStandbys("", "it went when the disk of this server ran short")
			if e.relieveDisk() {
				wait = pressureSoon
			}
			if now := e.line.now(); warned == 0 || now-warned > int64(warnEvery) {
				warned = now
				e.log.Warn("no sandbox is made or paused", "error", err)
			}
		}
		select {
		case <-e.clock.After(wait):
		case <-e.ctx.Done():
			return
		}
	}
}

// relieveMemory pauses one sandbox if the host's memory is short, and reports whether it did. It returns when that has ended.
func (e *Engine) relieveMemory() bool {
	room, err := e.opts.Host.Memory()
	if err != nil {
		e.log.Debug("memory of the host", "error", err)
		return false
	}
	low := room.low(e.opts.LowMemory, mostLowMemory)
	if room.Free >= low {
		return false
	}
	e.coolStandbys("", "it went when the memory of this server's host ran short")
	e.coolPool(true, "")
	hard := room.Free < low/2
	for _, sb := range e.evictable(hard) {
		e.mu.Lock()
		row := sb.row
		e.mu.Unlock()
		if !hard {
			if w := e.look(&row, time.Second); w.busy || w.held != 0 {
				continue
			}
		}
		need := e.pauseNeeds(e.ctx, &row)
		if err := e.diskRoom(need); err != nil {
			e.log.Warn("memory is short, and so is the disk that a pause needs", "sandbox", row.ID, "error", err)
			continue
		}
		if op := e.evict(sb, room, low, need); op != nil {
			<-op.done
			if op.err == nil {
				return true
			}
		}
		if e.ctx.Err() != nil {
			return false
		}
	}
	return false
}

// evictable lists the sandboxes that nobody uses and that can be paused, the longest idle first. When hard, also those that
// were used a moment ago.
func (e *Engine) evictable(hard bool) []*sandbox {
	type candidate struct {
		sb   *sandbox
		last int64
		held bool
	}
	var all []candidate
	e.mu.Lock()
	now := e.line.now()
	for _, sb := range e.boxes {
		if sb.state() != Running || sb.op != nil || !sb.stored || sb.attached() {
			continue
		}
		if _, err := e.snapshotter(sb.row.Driver); err != nil {
			continue
		}
		last := sb.lastUse(now)
		if !hard && now-last < int64(restTime) {
			continue
		}
		all = append(all, candidate{sb, last, sb.held > now || now-sb.awake < int64(time.Minute)})
	}
	e.mu.Unlock()
	slices.SortFunc(all, func(a, b candidate) int {
		if a.held != b.held {
			if a.held {
				return 1
			}
			return -1
		}
		return int(min(max(a.last-b.last, -1), 1))
	})
	out := make([]*sandbox, len(all))
	for i, c := range all {
		out[i] = c.sb
	}
	return out
}

// evict pauses a sandbox for the sake of the host's memory, if it can still be spared.
func (e *Engine) evict(sb *sandbox, room Room, low, need int64) *operation {
	e.mu.Lock()
	defer e.mu.Unlock()
	if sb.gone || sb.state() != Running || sb.op != nil || sb.attached() {
		return nil
	}
	now := e.line.now()
	idle := time.Duration(now - sb.lastUse(now)).Round(time.Second)
	why := fmt.Sprintf("the memory of the host runs short: %s of %s are available, less than %s; nobody has used the sandbox for %s", size(room.Free), size(room.Total), size(low), idle)
	op := e.beginPause(sb, pauseCause{reason: PauseMemory, action: "sandbox.evicted", message: why, fields: map[string]string{
		"reason": PauseMemory, "available": fmt.Sprint(room.Free), "total": fmt.Sprint(room.Total), "threshold": fmt.Sprint(low),
		"sandbox_memory": fmt.Sprint(need), "idle_seconds": fmt.Sprint(int64(idle.Seconds())),
	}})
	if op != nil {
		e.metrics.evictions.Inc()
		e.log.Warn("sandbox evicted", "sandbox", sb.row.ID, "why", why)
	}
	return op
}

// relieveDisk takes the memory image of the paused sandbox that nobody has used for the longest, if the disk is very short and the operator
// lets it, and reports whether it did. The sandbox is failed then: its workspace is intact, its processes, and what they wrote elsewhere, are gone.
func (e *Engine) relieveDisk() bool {
	if e.opts.EvictPaused == 0 || e.opts.PauseDir == "" {
		return false
	}
	room, err := e.opts.Host.Disk(e.opts.PauseDir)
	low := room.low(e.opts.LowDisk, mostLowDisk)
	if err != nil || room.Free >= low/2 {
		return false
	}
	for _, sb := range e.evictableImages() {
		evicted, err := e.evictImage(sb, room, low)
		if err != nil {
			e.log.Warn("disk is short, and a paused sandbox was not evicted", "sandbox", sb.row.ID, "error", err)
		}
		if evicted || err != nil {
			return evicted
		}
	}
	return false
}

// smallImage is less than what one eviction is worth while others free more.
const smallImage = 1 << 20

// evictableImages lists the sandboxes that were paused and not used for long enough and whose image's removal would free something,
// the longest unused first, but for those with hardly anything to free, which come last.
func (e *Engine) evictableImages() []*sandbox {
	type candidate struct {
		sb     *sandbox
		id     warren.SandboxID
		rested time.Duration
		frees  int64
	}
	var all []candidate
	e.mu.Lock()
	now := e.line.now()
	for _, sb := range e.boxes {
		if sb.state() == Paused && sb.op == nil && sb.stored && !sb.inUse() && sb.image != 0 && sb.restedFor(now) >= e.opts.EvictPaused {
			all = append(all, candidate{sb: sb, id: sb.row.ID, rested: sb.restedFor(now)})
		}
	}
	e.mu.Unlock()
	for i := range all {
		// What a snapshot has too stays on the disk whatever happens to the sandbox.
		if total, shared, err := memoryUsage(e.imageDir(all[i].id), anywhere); err == nil {
			all[i].frees = total - shared
		}
	}
	all = slices.DeleteFunc(all, func(c candidate) bool { return c.frees == 0 })
	small := func(c candidate) int {
		if c.frees < smallImage {
			return 1
		}
		return 0
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Or(small(a)-small(b), cmp.Compare(b.rested, a.rested)) })
	out := make([]*sandbox, len(all))
	for i, c := range all {
		out[i] = c.sb
	}
	return out
}

// restedFor is for how long a sandbox has been paused and nobody has used it. The caller holds mu.
func (sb *sandbox) restedFor(now int64) time.Duration {
	return time.Duration(now - max(sb.active, sb.paused))
}

// evictImage makes a paused sandbox a failed one without a memory image, if nobody has come for it. First that is on record: an image that
// is left over by a crash goes at the next start, and a sandbox that is paused always has its own.
func (e *Engine) evictImage(sb *sandbox, room Room, low int64) (evicted bool, err error) {
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.DeleteTimeout)
	defer cancel()
	op, err := e.hold(ctx, sb, "evict", nil)
	if err != nil {
		return false, err
	}
	defer func() { e.finish(sb, op, nil) }()
	e.mu.Lock()
	unused := sb.restedFor(e.line.now())
	if sb.gone || sb.state() != Paused || sb.inUse() || unused < e.opts.EvictPaused {
		e.mu.Unlock()
		return false, nil
	}
	row, image := sb.row, sb.image
	e.mu.Unlock()
	why := fmt.Sprintf("the disk of the host ran short (%s of %s were free, less than half of the %s that have to be), and it had been paused and unused for %s: its memory on disk, %s, was removed",
		size(room.Free), size(room.Total), size(low), unused.Round(time.Second), size(image))
	row.State, row.Failure = string(Failed), &store.Failure{Reason: FailureEvicted, Message: why, Time: e.clock.Now()}
	ev := e.event("warren", "sandbox.evicted", &row, why)
	ev.Fields = map[string]string{"reason": "disk", "available": fmt.Sprint(room.Free), "total": fmt.Sprint(room.Total), "threshold": fmt.Sprint(low / 2),
		"memory_image": fmt.Sprint(image), "idle_seconds": fmt.Sprint(int64(unused.Seconds()))}
	failed := e.event("warren", "sandbox.failed", &row, reason(&row))
	failed.Fields = map[string]string{"reason": FailureEvicted}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.UpdateSandbox(&row); err != nil {
			return err
		}
		if err := tx.AppendEvent(ev); err != nil {
			return err
		}
		return tx.AppendEvent(failed)
	}); err != nil {
		return false, err
	}
	e.mu.Lock()
	e.setState(sb, Failed)
	sb.row.Failure = row.Failure
	e.schedule(sb)
	e.mu.Unlock()
	e.metrics.evictions.Inc()
	e.log.Warn("sandbox evicted", "sandbox", row.ID, "why", why)
	return true, e.dropImage(row.ID)
}

// pauseNeeds is how many bytes of disk the pause of a sandbox takes at most: its memory, and what it has written to its root.
func (e *Engine) pauseNeeds(ctx context.Context, row *store.Sandbox) int64 {
	if s, ok := driver.As[driver.Statser](e.opts.Drivers[row.Driver]); ok {
		ctx, cancel := context.WithTimeout(ctx, guestWait)
		defer cancel()
		if st, err := s.Stats(ctx, row.ID); err == nil {
			return st.Memory + st.Disk
		}
	}
	return row.Memory
}

// diskRoom says whether need more bytes leave enough of the disk that holds what is durable.
func (e *Engine) diskRoom(need int64) error {
	if e.opts.PauseDir == "" {
		return nil
	}
	room, err := e.opts.Host.Disk(e.opts.PauseDir)
	if err != nil {
		e.log.Debug("disk of the host", "error", err)
		return nil // whoever writes finds out
	}
	e.mu.Lock()
	promised := e.pausing
	e.mu.Unlock()
	low := room.low(e.opts.LowDisk, mostLowDisk)
	if room.Free-promised-need >= low {
		return nil
	}
	more := ""
	if need > 0 {
		more = fmt.Sprintf(", and %s more are needed", size(need))
	}
	return fmt.Errorf("the disk of this server runs short: %s of %s are free%s, while %s have to stay so; free some with `warren rm`, `warren workspace rm` or `warren image rm`: %w",
		size(room.Free), size(room.Total), more, size(low), warren.ErrExhausted)
}

// takeDisk takes from the disk what the pause of a sandbox may need, until give is called, so that pauses at the same time do
// not fill it together.
func (e *Engine) takeDisk(ctx context.Context, row *store.Sandbox) (give func(), err error) {
	need := e.pauseNeeds(ctx, row)
	if err := e.diskRoom(need); err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.pausing += need
	e.mu.Unlock()
	return func() {
		e.mu.Lock()
		e.pausing -= need
		e.mu.Unlock()
	}, nil
}
