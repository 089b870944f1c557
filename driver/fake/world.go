package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// World is where fake sandboxes live. It outlives the drivers on it, as the processes of real sandboxes outlive the
// daemon: close a driver, open another on the same World, and the sandboxes are there.
type World struct {
	dir string

	mu       sync.Mutex
	boxes    map[warren.SandboxID]*box
	watchers map[*watcher]struct{}
	faults   map[Op]Fault
	counts   map[Op]int
}

// box is one sandbox, kept small for the sake of fleets.
type box struct {
	state   driver.State
	limits  driver.Limits
	mounts  []string // targets
	root    string
	changed string // what its root has that its image has not
	frozen  bool
	exit    *driver.Exit
	conns   map[io.Closer]struct{}
	started time.Time
}

// record is a box on disk.
type record struct {
	State   driver.State
	Limits  driver.Limits
	Mounts  []string     `json:",omitempty"`
	Root    string       `json:",omitempty"`
	Frozen  bool         `json:",omitempty"`
	Exit    *driver.Exit `json:",omitempty"`
	Changed string       `json:",omitempty"`
}

// Op names an operation of the driver that can be made slow or made to fail.
type Op string

// The operations of a driver.
const (
	OpCreate Op = "create"
	OpDelete Op = "delete"
	OpList   Op = "list"
	OpDial   Op = "dial"
	OpStats  Op = "stats"

	OpSnapshot Op = "snapshot"
	OpFreeze   Op = "freeze"
	OpThaw     Op = "thaw"
	OpRestore  Op = "restore"
	OpSaveRoot Op = "saveroot"
)

// Fault is what happens to an operation.
type Fault struct {
	// Latency is waited first; the wait ends with the context.
	Latency time.Duration
	// Err, when set, is what the operation returns.
	Err error
	// Times limits how often Err is returned; 0 means always.
	Times int
	// After is how many calls succeed before the first that fails.
	After int
	// Half makes a failing create or delete stop in the middle: something is left, as when a driver's own process is
	// killed. Contract-abiding drivers do so only then.
	Half bool
}

// NewWorld returns an empty world in memory.
func NewWorld() *World {
	return &World{
		boxes:    map[warren.SandboxID]*box{},
		watchers: map[*watcher]struct{}{},
		faults:   map[Op]Fault{},
		counts:   map[Op]int{},
	}
}

// OpenWorld returns the world kept in a directory, one file for each sandbox, so that it survives the process.
func OpenWorld(dir string) (*World, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	w := NewWorld()
	w.dir = dir
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			os.Remove(filepath.Join(dir, e.Name())) // a write that was cut short
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		var r record
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, fmt.Errorf("fake world %s: %w", e.Name(), err)
		}
		w.boxes[warren.SandboxID(id)] = &box{state: r.State, limits: r.Limits, mounts: r.Mounts, root: r.Root, changed: r.Changed, frozen: r.Frozen, exit: r.Exit, started: time.Now()}
	}
	return w, nil
}

// save writes a box to the directory, if there is one. The caller holds mu.
func (w *World) save(id warren.SandboxID, b *box) error {
	if w.dir == "" {
		return nil
	}
	data, err := json.Marshal(record{b.state, b.limits, b.mounts, b.root, b.frozen, b.exit, b.changed})
	if err != nil {
		return err
	}
	path := filepath.Join(w.dir, string(id)+".json")
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (w *World) remove(id warren.SandboxID) error {
	delete(w.boxes, id)
	if w.dir == "" {
		return nil
	}
	if err := os.Remove(filepath.Join(w.dir, string(id)+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Inject makes an operation slow or failing from now on; the zero Fault heals it.
func (w *World) Inject(op Op, f Fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[op] = f
}

// fault returns how long to wait and what to return for one call of op.
func (w *World) fault(op Op) (time.Duration, error, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[op]++
	f, ok := w.faults[op]
	if !ok {
		return 0, nil, false
	}
	if f.Err == nil {
		return f.Latency, nil, false
	}
	if f.After > 0 {
		f.After--
		w.faults[op] = f
		return f.Latency, nil, false
	}
	err := f.Err
	if f.Times > 0 {
		if f.Times--; f.Times == 0 {
			w.faults[op] = Fault{Latency: f.Latency}
		} else {
			w.faults[op] = f
		}
	}
	return f.Latency, err, f.Half
}

// Calls returns how often an operation was called.
func (w *World) Calls(op Op) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[op]
}

// Kill ends a sandbox as the host would, and reports whether it was there and running.
func (w *World) Kill(id warren.SandboxID, exit driver.Exit) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if b == nil || b.state != driver.Running {
		return false
	}
	if exit.Time.IsZero() {
		exit.Time = time.Now()
	}
	b.state, b.exit = driver.Dead, &exit
	w.save(id, b)
	for c := range b.conns {
		go c.Close()
	}
	b.conns = nil
	for x := range w.watchers {
		x.add(driver.Status{ID: id, State: driver.Dead, Exit: &exit})
	}
	return true
}

// Forget removes a sandbox behind the driver's back, as a reboot does.
func (w *World) Forget(id warren.SandboxID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.boxes[id]; b != nil {
		for c := range b.conns {
			go c.Close()
		}
	}
	w.remove(id)
}

// Put adds a sandbox in a state, behind the driver's back.
func (w *World) Put(s driver.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := &box{state: s.State, exit: s.Exit, started: time.Now()}
	w.boxes[s.ID] = b
	w.save(s.ID, b)
}

// ChangeRoot writes a text into the root of a sandbox, which is all that it has besides its image, and reports whether it is there and running.
func (w *World) ChangeRoot(id warren.SandboxID, text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if b == nil || b.state != driver.Running {
		return false
	}
	b.changed = text
	return w.save(id, b) == nil
}

// Changed returns the text in the root of a sandbox, "" where it is as in its image.
func (w *World) Changed(id warren.SandboxID) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.boxes[id]; b != nil {
		return b.changed
	}
	return ""
}

// IDs returns the sandboxes that exist, sorted, dead and half-made ones included.
func (w *World) IDs() []warren.SandboxID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.boxes))
}

// Len is how many sandboxes exist.
func (w *World) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.boxes)
}

// watcher queues deaths for one reader without limit, for a slow reader loses none.
type watcher struct {
	mu    sync.Mutex
	queue []driver.Status
	wake  chan struct{}
}

func (x *watcher) add(s driver.Status) {
	x.mu.Lock()
	x.queue = append(x.queue, s)
	x.mu.Unlock()
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

func (x *watcher) take() []driver.Status {
	x.mu.Lock()
	defer x.mu.Unlock()
	q := x.queue
	x.queue = nil
	return q
}
