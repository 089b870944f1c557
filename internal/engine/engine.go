// Package engine owns the lifecycle of every sandbox and workspace, and is the only writer of the store.
//
// # States
//
// A sandbox is creating, then running; failed when its execution ended without being asked to, and running again
// after a restart; pausing on the way to paused, when it is an image on disk, and resuming on the way back; deleting on
// the way to gone. What the engine is about to do is durable before it is done: a row
// in state creating or deleting is a promise that [Open] keeps after a crash, by undoing the first and finishing the
// second; see pause.go for the others. One operation at a time (create, restart, pause, resume, delete) holds a sandbox; others wait for it or join it.
//
// # Memory and store
//
// What is asked often (state, owner, limits, labels) is held in memory, some hundred bytes a sandbox; specs and
// milestones are read from the store. One mutex guards the memory and is never held across input or output.
//
// # Time
//
// Timeouts run on a time line of the engine's own that moves with the monotonic clock, also across restarts of the
// daemon while the machine stays up, so that a jump of the wall clock ends no sandbox. See timeline.go.
//
// # Users
//
// Every call names its caller. What a caller may not see does not exist for it: a foreign id gives the same
// [warren.ErrNotFound] as one that was never given.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// Options of [Open].
type Options struct {
	Store      *store.Store
	Images     Images
	Repos      Repos
	Workspaces Workspaces
	// Drivers by the names that users write. The engine does not close them.
	Drivers map[string]driver.Driver
	// Unavailable says why drivers that could be there are not, by their names.
	Unavailable map[string]string
	// DefaultDriver and DefaultImage are used where a spec names none.
	DefaultDriver, DefaultImage string
	// Defaults fill in resources that a spec leaves out; zero fields mean 2 processors, 2 GiB of memory, 10 GiB of disk and
	// 4096 processes. Max bounds what a spec may ask for; zero fields bound nothing.
	Defaults, Max driver.Limits
	Budgets       Budgets
	// AllowMounts are host directories beneath which anyone may mount; an operator may mount any.
	AllowMounts []AllowedMount
	// PauseDir is where the memory of paused sandboxes is kept; it is made. Empty means that none can be paused.
	PauseDir string
	// SnapshotDir is where the memory of snapshots is kept, on the same file system; it is made. Empty means that there can be none.
	SnapshotDir string
	// Starts is how many sandboxes start at the same time; 0 means GOMAXPROCS.
	Starts int
	// CreateTimeout bounds a create, its clone included; 0 means 30 minutes. BootTimeout bounds the driver's create and the
	// guest's answer; 0 means 2 minutes. DeleteTimeout bounds one attempt to delete; 0 means 1 minute.
	CreateTimeout, BootTimeout, DeleteTimeout time.Duration
	// DialTimeout bounds how long a running sandbox may take to connect to one of its ports; 0 means 30 seconds.
	DialTimeout time.Duration
	// LowMemory and LowDisk are how many bytes of the host's memory, and of the disk of PauseDir, have to stay free: below, idle
	// sandboxes are paused, and no sandbox is made or paused, respectively. 0 means 5%, but no more than 512 MiB and 1 GiB; negative
	// means none.
	LowMemory, LowDisk int64
	// Host is the machine, nil for the one that this runs on.
	Host Host
	// DefaultIdleTimeout applies to sandboxes whose spec has none; 0 means none.
	DefaultIdleTimeout time.Duration
	// MaxLifetime is the longest that any sandbox lives, 0 for as long as it likes.
	MaxLifetime time.Duration
	// EvictPaused lets the disk's shortage take the memory of sandboxes that have been paused, and used by nobody, for so long; 0 means
	// never.
	EvictPaused time.Duration
	// Pool is how many executions at most are kept ready for sandboxes like those made last; 0 means none.
	Pool int
	// Standby is how many sandboxes of templates at most are restored beforehand, see standby.go; 0 means none.
	Standby int
	// IdleCPUMillis is how many thousandths of a processor the processes of a sandbox that nobody uses may take before it counts
	// as working; 0 means 50. MaxHold is how long after its last use a process in a sandbox can keep it from being paused; 0 means 24
	// hours.
	IdleCPUMillis uint32
	MaxHold       time.Duration
	// Network serves the network cards of sandboxes; nil means that there are none. PolicyDir has the policies, in files NAME.yaml;
	// DefaultPolicy is that of a spec which names none, "" meaning the preset "registries".
	Network                  Network
	PolicyDir, DefaultPolicy string
	// Secrets seals those that policies grant; nil means that there can be none.
	Secrets Sealer
	// FlowDir is where the gateway keeps its record, see package audit.
	FlowDir string
	// CallDir is where the server keeps its record of calls, and Calls what writes it, nil for none.
	CallDir    string
	Calls      Recorder
	Logger     *slog.Logger
	Tracer     trace.Tracer
	Registerer prometheus.Registerer
	Clock      Clock
}

// Engine is open between [Open] and [Engine.Close].
type Engine struct {
	opts    Options
	store   *store.Store
	log     *slog.Logger
	tracer  trace.Tracer
	clock   Clock
	metrics *metrics
	starts  *queue
	line    *timeline
	saved   int64           // reading of line when activity was last saved; of the heartbeat
	broken  map[string]bool // records that were found not to be what they were; of the heartbeat

	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	instance string
	lifeCap  lifeCap // from the start on

	secretMu sync.Mutex
	sharing  sync.Mutex   // held while it is measured what snapshots share, until it counts; before mu
	undoing  sync.RWMutex // held for reading while what a create had made is forgotten, by the store and then in memory
	parsedMu sync.Mutex
	parsed   map[string]*parsedPolicy // by name

	mu         sync.Mutex
	closing    bool
	lastNum    int64            // of sandboxes
	lastSpace  int64            // of workspaces
	lastSnap   int64            // of snapshots
	readouts   map[string]int64 // what is kept on disk for readers, by user
	boxes      map[warren.SandboxID]*sandbox
	names      map[ownedName]*sandbox
	spaces     map[warren.WorkspaceID]*workspace
	snaps      map[warren.SnapshotID]*snapshot
	snapNames  map[ownedName]*snapshot
	pool       map[string]*poolClass
	templates  map[ownedName]*store.Template // each is replaced, never changed
	standbys   map[ownedName]*standbyKind    // by owner and snapshot
	unready    map[warren.SnapshotID]string  // why the last one of a snapshot could not be made
	standingBy bool                          // somebody makes them
	secrets    map[string]*store.Secret      // as well; secretMu is held by who changes one
	spaceNames map[ownedName]*workspace
	usage      map[string]*usage
	total      usage
	pausing    int64 // bytes of disk that pauses under way may need
	flights    map[ownedName]*flight
	keyed      map[ownedName]chan struct{}
	timers     timers
	kick       chan struct{}      // wakes the expiry loop
	tend       chan struct{}      // wakes the network loop
	room       chan struct{}      // closed and replaced when something was removed
	peering    chan struct{}      // wakes the loop of private networks
	telling    chan struct{}      // has an element while the gateway is told of one
	untold     map[ownedName]bool // those of which it could not be told
	tokens     map[[32]byte]*token
	tokenIDs   map[string]*token
	repos      removals[warren.RepoID]
	images     removals[string]

	standIn chan struct{} // held while the image that stands for the host's is made
}

// ownedName is a name in the name space of its owner.
type ownedName struct{ owner, name string }

// Open loads the store, reconciles it with what the drivers have, and begins to serve. What takes time (removing
// half-made sandboxes, finishing deletions) goes on in the background while the sandboxes concerned are held.
func Open(ctx context.Context, o Options) (_ *Engine, err error) {
	if o.Store == nil || o.Images == nil || o.Repos == nil || o.Workspaces == nil || len(o.Drivers) == 0 {
		return nil, errors.New("engine: Store, Images, Repos, Workspaces and Drivers are needed")
	}
	if o.Drivers[o.DefaultDriver] == nil {
		return nil, fmt.Errorf("engine: the default driver %q is not among the drivers (%s): %w", o.DefaultDriver, driverNames(o.Drivers), warren.ErrInvalid)
	}
	setDefaults(&o)
	e := &Engine{
		opts: o, store: o.Store, log: o.Logger, tracer: o.Tracer, clock: o.Clock,
		starts:     newQueue(o.Starts),
		readouts:   map[string]int64{},
		boxes:      map[warren.SandboxID]*sandbox{},
		names:      map[ownedName]*sandbox{},
		spaces:     map[warren.WorkspaceID]*workspace{},
		spaceNames: map[ownedName]*workspace{},
		snaps:      map[warren.SnapshotID]*snapshot{},
		snapNames:  map[ownedName]*snapshot{},
		pool:       map[string]*poolClass{},
		templates:  map[ownedName]*store.Template{},
		standbys:   map[ownedName]*standbyKind{},
		unready:    map[warren.SnapshotID]string{},
		secrets:    map[string]*store.Secret{},
		parsed:     map[string]*parsedPolicy{},
		broken:     map[string]bool{},
		usage:      map[string]*usage{},
		flights:    map[ownedName]*flight{},
		keyed:      map[ownedName]chan struct{}{},
		kick:       make(chan struct{}, 1),
		tend:       make(chan struct{}, 1),
		room:       make(chan struct{}),
		peering:    make(chan struct{}, 1),
		telling:    make(chan struct{}, 1),
		untold:     map[ownedName]bool{},
		tokens:     map[[32]byte]*token{},
		tokenIDs:   map[string]*token{},
		instance:   randomHex(8),
		standIn:    make(chan struct{}, 1),
	}
	e.ctx, e.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if e.metrics, err = newMetrics(e, o.Registerer); err != nil {
		return nil, err
	}
	if e.line, err = openTimeline(ctx, e.store, e.clock); err != nil {
		return nil, err
	}
	if err := e.loadTokens(ctx); err != nil {
		return nil, err
	}
	if err := e.loadTemplates(ctx); err != nil {
		return nil, err
	}
	if err := e.loadSecrets(ctx); err != nil {
		return nil, err
	}
	if err := e.reconcile(ctx); err != nil {
		return nil, err
	}
	e.wg.Go(e.expiryLoop)
	e.wg.Go(e.heartbeatLoop)
	e.wg.Go(e.pressureLoop)
	if o.Network != nil {
		e.wg.Go(e.networkLoop)
		e.wg.Go(e.peerLoop)
	}
	for name, d := range o.Drivers {
		e.wg.Go(func() { e.watchDriver(name, d) })
	}
	return e, nil
}

func setDefaults(o *Options) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Tracer == nil {
		o.Tracer = noop.NewTracerProvider().Tracer("")
	}
	if o.Clock == nil {
		o.Clock = SystemClock()
	}
	if o.Host == nil {
		o.Host = SystemHost()
	}
	if o.Starts <= 0 {
		o.Starts = runtime.GOMAXPROCS(0)
	}
	if o.DefaultPolicy == "" {
		o.DefaultPolicy = "registries"
	}
	if o.DefaultImage == "" {
		o.DefaultImage = hostImage
	}
	def := func(v, to *time.Duration) {
		if *v == 0 {
			*v = *to
		}
	}
	half, two, one := 30*time.Minute, 2*time.Minute, time.Minute
	def(&o.CreateTimeout, &half)
	def(&o.BootTimeout, &two)
	day := 24 * time.Hour
	def(&o.MaxHold, &day)
	if o.IdleCPUMillis == 0 {
		o.IdleCPUMillis = 50
	}
	wait := dialWait
	def(&o.DialTimeout, &wait)
	def(&o.DeleteTimeout, &one)
	if o.Defaults.CPUMillis == 0 {
		o.Defaults.CPUMillis = 2000
	}
	if o.Defaults.Memory == 0 {
		o.Defaults.Memory = 2 << 30
	}
	if o.Defaults.Disk == 0 {
		o.Defaults.Disk = 10 << 30
	}
	if o.Defaults.PIDs == 0 {
		o.Defaults.PIDs = 4096
	}
}

// Close stops what runs in the background, undoes creates under way, and returns when all has ended. Sandboxes keep
// running.
func (e *Engine) Close() error {
	e.mu.Lock()
	was := e.closing
	e.closing = true
	e.mu.Unlock()
	e.cancel()
	e.coolStandbys("", "the server was stopping")
	if was {
		e.wg.Wait()
		return nil
	}
	e.wg.Wait()
	if e.metrics != nil {
		e.metrics.unregister()
	}
	if e.line == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	e.keepHeads(ctx)
	return e.saveActivity(ctx)
}

// Instance is another string at each Open.
func (e *Engine) Instance() string { return e.instance }

// Drivers describes the drivers by name.
func (e *Engine) Drivers() map[string]driver.Info {
	out := map[string]driver.Info{}
	for name, d := range e.opts.Drivers {
		out[name] = describe(name, d)
	}
	return out
}

func describe(name string, d driver.Driver) driver.Info {
	if x, ok := driver.As[driver.Describer](d); ok {
		return x.Info()
	}
	return driver.Info{Name: name}
}

// Doctor collects what the drivers find out about the host.
func (e *Engine) Doctor(ctx context.Context) []driver.Check {
	var all []driver.Check
	if err := e.store.Err(); err != nil {
		all = append(all, driver.Check{Name: "store", Status: "fail", Message: err.Error(), Hint: "start the server again; if that fails, restore warren.db from a backup"})
	} else {
		all = append(all, driver.Check{Name: "store", Status: "ok", Message: "takes changes"})
	}
	if e.opts.Network != nil {
		all = append(all, e.checkGateway(ctx))
	}
	for _, name := range sortedKeys(e.opts.Drivers) {
		if c, ok := driver.As[driver.Checker](e.opts.Drivers[name]); ok {
			all = append(all, c.Check(ctx)...)
		}
	}
	return all
}

// checkGateway asks the gateway for the sandboxes that it serves.
func (e *Engine) checkGateway(ctx context.Context) driver.Check {
	attached, err := e.opts.Network.Attached(ctx)
	if err != nil {
		return driver.Check{Name: "gateway", Status: "fail", Message: "no sandbox has a network, and no change of a policy, a secret or a private network counts: " + err.Error(),
			Hint: "the daemon's log says more; `warren shutdown` and any call start both anew, and the sandboxes run on"}
	}
	missing := 0
	for _, sb := range e.carded() {
		if _, ok := attached[sb.id]; !ok && !sb.held {
			missing++
		}
	}
	if missing > 0 {
		return driver.Check{Name: "gateway", Status: "warn", Message: fmt.Sprintf("answers; sandboxes with a network that it does not serve: %d", missing),
			Hint: "they are looked after every few seconds; the daemon's log says why one cannot be"}
	}
	return driver.Check{Name: "gateway", Status: "ok", Message: fmt.Sprintf("answers; sandboxes with a network: %d", len(attached))}
}

func driverNames(m map[string]driver.Driver) string {
	return strings.Join(sortedKeys(m), ", ")
}

// errClosing is what calls get while the engine closes.
var errClosing = fmt.Errorf("the server is stopping: %w", warren.ErrUnavailable)
