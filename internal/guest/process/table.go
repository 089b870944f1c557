package process

import (
	"fmt"
	"slices"
	"sync"
)

const (
	// maxRunning bounds how many processes the guest follows at a time; what they start themselves does not count.
	maxRunning = 1024
	// maxEnded is how many ended processes are remembered.
	maxEnded = 256
	// endedMemory is how much output of ended processes stays in memory; more goes to disk.
	endedMemory = 512 << 10
	// diskLimit is how much output of all processes together stays on disk.
	diskLimit = 64 << 20
)

// Table is the processes that the guest has started: those that run, and those that ended lately.
type Table struct {
	reaper *Reaper
	disk   *disk

	mu      sync.Mutex
	running map[int]*Process
	ended   []*Process // the oldest first
	marked  bool       // Mark was called
	pending int        // being started
}

// NewTable returns an empty table whose processes are reaped by r and keep their output in dir.
func NewTable(r *Reaper, dir string) *Table {
	return &Table{reaper: r, disk: &disk{dir: dir, limit: diskLimit}, running: make(map[int]*Process)}
}

// Start starts a process.
func (t *Table) Start(s Spec) (*Process, error) {
	t.mu.Lock()
	if len(t.running)+t.pending >= maxRunning {
		t.mu.Unlock()
		return nil, fmt.Errorf("%w: %d run already", ErrTooMany, maxRunning)
	}
	t.pending++
	t.mu.Unlock()

	out := newOutput(&spool{disk: t.disk})
	added := make(chan struct{})
	p, err := start(t.reaper, s, out, func(p *Process) {
		<-added
		t.retire(p)
	})
	t.mu.Lock()
	t.pending--
	if err == nil {
		t.running[p.PID] = p
	}
	t.mu.Unlock()
	close(added)
	return p, err
}

// retire moves a process that has ended and keeps within the limits.
func (t *Table) retire(p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.running, p.PID)
	t.ended = append(t.ended, p)
	for len(t.ended) > maxEnded || len(t.ended) > 1 && t.disk.full() {
		t.ended[0].Output.drop()
		t.ended = slices.Delete(t.ended, 0, 1)
	}
	memory := 0
	for _, e := range slices.Backward(t.ended) {
		m := e.Output.memory()
		if memory+m > endedMemory && m > 0 {
			e.Output.store()
			continue
		}
		memory += m
	}
}

// ByPID returns the process with that pid: the one that runs, else the one that ended last.
func (t *Table) ByPID(pid int) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.running[pid]; p != nil {
		return p, nil
	}
	for _, p := range slices.Backward(t.ended) {
		if p.PID == pid {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: pid %d", ErrNotFound, pid)
}

// ByTag returns the process with that tag: one that runs, else the one that ended last.
func (t *Table) ByTag(tag string) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var newest *Process
	for _, p := range t.running {
		if p.Spec.Tag == tag && tag != "" && (newest == nil || p.Started.After(newest.Started)) {
			newest = p
		}
	}
	for _, p := range slices.Backward(t.ended) {
		if newest == nil && p.Spec.Tag == tag && tag != "" {
			newest = p
		}
	}
	if newest == nil {
		return nil, fmt.Errorf("%w: tag %.64q", ErrNotFound, tag)
	}
	return newest, nil
}

// Running returns the processes that run, in the order of their start.
func (t *Table) Running() []*Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*Process, 0, len(t.running))
	for _, p := range t.running {
		if !p.Spec.Hidden {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b *Process) int { return a.Started.Compare(b.Started) })
	return list
}

// All returns the processes that ended lately, the oldest first, and then those that run.
func (t *Table) All() []*Process {
	t.mu.Lock()
	var list []*Process
	for _, p := range t.ended {
		if !p.Spec.Hidden {
			list = append(list, p)
		}
	}
	t.mu.Unlock()
	return append(list, t.Running()...)
}

// KillAll kills every process that runs, with its group.
func (t *Table) KillAll() {
	t.mu.Lock()
	var list []*Process
	for _, p := range t.running {
		list = append(list, p)
	}
	t.mu.Unlock()
	for _, p := range list {
		_ = p.Kill() // it may have ended meanwhile
	}
}

// Mark notes how far the output of each process is. The host calls for it when it is about to save the memory: what comes
// between the mark and that instant is not known to be in the saved memory.
func (t *Table) Mark() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.marked = true
	t.outputs(func(o *Output) { o.mark = o.end })
}

// Turn says that the memory has gone back to where it was when it was saved: see [Output.Turn]. A memory that was saved
// without a mark turns here.
func (t *Table) Turn() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.outputs(func(o *Output) {
		if o.turn = o.mark; !t.marked {
			o.turn = o.end
		}
	})
}

// outputs calls f for the output of each process. The caller holds mu.
func (t *Table) outputs(f func(*Output)) {
	each := func(p *Process) {
		p.Output.mu.Lock()
		defer p.Output.mu.Unlock()
		f(p.Output)
	}
	for _, p := range t.running {
		each(p)
	}
	for _, p := range t.ended {
		each(p)
	}
}
