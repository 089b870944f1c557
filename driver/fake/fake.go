// Package fake is a driver whose sandboxes are entries of a map. It keeps the driver's contract, so that the
// engine, the server and the conformance suite can be tested without privileges and in thousands, and it can be told
// to be slow, to fail, and to let sandboxes die.
//
// There is no isolation and no file system: what answers in a sandbox is the HTTP handler that [Options].Guest
// returns for it.
package fake

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Options of [New]. The zero value works.
type Options struct {
	// World in which the sandboxes live; nil means a new one in memory.
	World *World
	// Guest returns what answers on [warren.GuestPort] of a sandbox; nil means a handler of /health, /init and /root. It is
	// called for every connection.
	Guest func(id warren.SandboxID) http.Handler
	// GuestConn, when set, takes connections to [warren.GuestPort] as they are and closes them, instead of Guest: for guests that
	// talk nonsense.
	GuestConn func(id warren.SandboxID, c net.Conn)
	// Dial connects to another port of a sandbox; nil means that nothing listens on any.
	Dial func(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error)
	// Stats, when set, says what a sandbox uses, instead of invented figures.
	Stats func(id warren.SandboxID) driver.Stats
	// CreateLatency is how long a boot takes.
	CreateLatency time.Duration
	// MaxMemory is the most a sandbox may ask for; 0 means no limit.
	MaxMemory int64
}

// Driver is an open fake driver.
type Driver struct {
	opts   Options
	world  *World
	conns  chan net.Conn
	server *http.Server
	closed chan struct{}
	once   sync.Once
}

// New opens a driver.
func New(o Options) *Driver {
	if o.World == nil {
		o.World = NewWorld()
	}
	d := &Driver{opts: o, world: o.World, conns: make(chan net.Conn), closed: make(chan struct{})}
	d.server = &http.Server{
		Handler: http.HandlerFunc(d.serve),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, idKey{}, c.(*guestConn).id)
		},
		Protocols: new(http.Protocols),
	}
	d.server.Protocols.SetHTTP1(true)
	d.server.Protocols.SetUnencryptedHTTP2(true)
	go d.server.Serve(listener{d})
	return d
}

var (
	_ driver.Driver      = (*Driver)(nil)
	_ driver.Describer   = (*Driver)(nil)
	_ driver.Watcher     = (*Driver)(nil)
	_ driver.Statser     = (*Driver)(nil)
	_ driver.Snapshotter = (*Driver)(nil)
	_ driver.RootSaver   = (*Driver)(nil)
	_ driver.Checker     = (*Driver)(nil)
)

// World of the driver.
func (d *Driver) World() *World { return d.world }

// Info describes the driver.
func (d *Driver) Info() driver.Info {
	return driver.Info{Name: "fake", Isolation: "none (for tests)", Boundary: "none"}
}

// Check has one finding: that this driver isolates nothing.
func (d *Driver) Check(context.Context) []driver.Check {
	return []driver.Check{{Name: "fake driver", Status: "warn", Message: "sandboxes of this driver are not isolated", Hint: "use it for tests only"}}
}

// CheckOptions refuses every option but "note", which does nothing.
func (d *Driver) CheckOptions(options map[string]string) error {
	for k := range options {
		if k != "note" {
			return fmt.Errorf("driver option %q is not known to fake (known: note): %w", k, warren.ErrInvalid)
		}
	}
	return nil
}

// before waits and fails as the world was told to.
func (d *Driver) before(ctx context.Context, op Op, extra time.Duration) (half bool, err error) {
	select {
	case <-d.closed:
		return false, fmt.Errorf("the fake driver is closed: %w", warren.ErrUnavailable)
	default:
	}
	wait, err, half := d.world.fault(op)
	if wait += extra; wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return false, ctx.Err()
		case <-d.closed:
			return false, fmt.Errorf("the fake driver is closed: %w", warren.ErrUnavailable)
		}
	}
	if err == nil {
		err = ctx.Err()
	}
	return half, err
}

func (d *Driver) check(spec *driver.Spec) error {
	if err := spec.Check(); err != nil {
		return fmt.Errorf("fake: %w", err)
	}
	switch {
	case d.opts.MaxMemory > 0 && spec.Limits.Memory > d.opts.MaxMemory:
		return fmt.Errorf("fake: memory %d is more than %d: %w", spec.Limits.Memory, d.opts.MaxMemory, warren.ErrInvalid)
	case len(spec.Root.Layers) == 0 && len(spec.Root.Binds) == 0 && spec.Root.Digest == "":
		return fmt.Errorf("fake: no root: %w", warren.ErrInvalid)
	}
	return d.CheckOptions(spec.Options)
}

// Create implements [driver.Driver].
func (d *Driver) Create(ctx context.Context, spec *driver.Spec) error {
	return d.create(ctx, spec, OpCreate, "")
}

func (d *Driver) create(ctx context.Context, spec *driver.Spec, op Op, changed string) error {
	if err := d.check(spec); err != nil {
		return err
	}
	w := d.world
	b := &box{state: driver.Creating, limits: spec.Limits, root: spec.Root.Digest, changed: changed, started: time.Now()}
	for _, m := range spec.Mounts {
		b.mounts = append(b.mounts, m.Target)
	}
	w.mu.Lock()
	if w.boxes[spec.ID] != nil {
		w.mu.Unlock()
		return fmt.Errorf("sandbox %s: %w", spec.ID, warren.ErrExists)
	}
	w.boxes[spec.ID] = b
	err := w.save(spec.ID, b)
	w.mu.Unlock()
	half := false
	if err == nil {
		half, err = d.before(ctx, op, d.opts.CreateLatency)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && w.boxes[spec.ID] != b {
		return fmt.Errorf("sandbox %s was deleted while it was created: %w", spec.ID, warren.ErrState)
	}
	if err == nil {
		b.state = driver.Running
		err = w.save(spec.ID, b)
	}
	if err != nil && !half && w.boxes[spec.ID] == b {
		w.remove(spec.ID)
	}
	return err
}

// Delete implements [driver.Driver].
func (d *Driver) Delete(ctx context.Context, id warren.SandboxID) error {
	half, err := d.before(ctx, OpDelete, 0)
	w := d.world
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if b == nil {
		return err
	}
	if err != nil {
		if half {
			b.state, b.exit = driver.Dead, &driver.Exit{Reason: "killed", Time: time.Now()}
			w.save(id, b)
		}
		return err
	}
	for c := range b.conns {
		go c.Close()
	}
	b.conns = nil
	return w.remove(id)
}

// List implements [driver.Driver].
func (d *Driver) List(ctx context.Context) ([]driver.Status, error) {
	if _, err := d.before(ctx, OpList, 0); err != nil {
		return nil, err
	}
	w := d.world
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]driver.Status, 0, len(w.boxes))
	for id, b := range w.boxes {
		all = append(all, driver.Status{ID: id, State: b.state, Exit: b.exit})
	}
	return all, nil
}

// Dial implements [driver.Driver].
func (d *Driver) Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	if _, err := d.before(ctx, OpDial, 0); err != nil {
		return nil, err
	}
	if err := d.moving(ctx, id); err != nil {
		return nil, err
	}
	if port != warren.GuestPort {
		if err := d.alive(id); err != nil {
			return nil, err
		}
		if d.opts.Dial == nil {
			return nil, fmt.Errorf("nothing listens on port %d: %w", port, warren.ErrUnavailable)
		}
		c, err := d.opts.Dial(ctx, id, port)
		if err != nil {
			return nil, err
		}
		h := &held{Conn: c}
		if err := d.hold(id, h, &h.release); err != nil {
			c.Close()
			return nil, err
		}
		return h, nil
	}
	near, far := pipe()
	if err := d.hold(id, far, &far.onClose); err != nil {
		return nil, err
	}
	if d.opts.GuestConn != nil {
		go d.opts.GuestConn(id, far)
		return near, nil
	}
	select {
	case d.conns <- &guestConn{far, id}:
		return near, nil
	case <-ctx.Done():
		far.Close()
		return nil, ctx.Err()
	case <-d.closed:
		far.Close()
		return nil, fmt.Errorf("the fake driver is closed: %w", warren.ErrUnavailable)
	}
}

// hold makes a connection end with its sandbox, and sets what c has to call when it is closed, before anyone can close it.
func (d *Driver) hold(id warren.SandboxID, c io.Closer, release *func()) error {
	w := d.world
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if err := status(id, b); err != nil {
		return err
	}
	*release = func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(b.conns, c)
		if len(b.conns) == 0 {
			b.conns = nil
		}
	}
	if b.conns == nil {
		b.conns = map[io.Closer]struct{}{}
	}
	b.conns[c] = struct{}{}
	return nil
}

// held is a connection that [Options].Dial made.
type held struct {
	net.Conn
	release func()
}

// Close ends the connection.
func (h *held) Close() error {
	h.release()
	return h.Conn.Close()
}

// CloseWrite tells the other end that nothing more comes.
func (h *held) CloseWrite() error {
	if c, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return fmt.Errorf("half-close: %w", errors.ErrUnsupported)
}

func (d *Driver) alive(id warren.SandboxID) error {
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	return status(id, d.world.boxes[id])
}

func status(id warren.SandboxID, b *box) error {
	switch {
	case b == nil:
		return fmt.Errorf("sandbox %s: %w", id, warren.ErrNotFound)
	case b.state == driver.Dead:
		return fmt.Errorf("sandbox %s has died (%s): %w", id, b.exit.Reason, warren.ErrState)
	case b.state == driver.Creating:
		return fmt.Errorf("sandbox %s is being created: %w", id, warren.ErrUnavailable)
	}
	return nil
}

// Stats implements [driver.Statser] with invented figures.
func (d *Driver) Stats(ctx context.Context, id warren.SandboxID) (driver.Stats, error) {
	if _, err := d.before(ctx, OpStats, 0); err != nil {
		return driver.Stats{}, err
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	b := d.world.boxes[id]
	if err := status(id, b); err != nil {
		return driver.Stats{}, err
	}
	if d.opts.Stats != nil {
		return d.opts.Stats(id), nil
	}
	return driver.Stats{CPUTime: time.Since(b.started) / 1000, Memory: b.limits.Memory / 64, Disk: 4096, PIDs: 1}, nil
}

// Watch implements [driver.Watcher].
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Status, error) {
	x := &watcher{wake: make(chan struct{}, 1)}
	w := d.world
	w.mu.Lock()
	w.watchers[x] = struct{}{}
	w.mu.Unlock()
	out := make(chan driver.Status)
	go func() {
		defer close(out)
		defer func() {
			w.mu.Lock()
			delete(w.watchers, x)
			w.mu.Unlock()
		}()
		for {
			for _, s := range x.take() {
				select {
				case out <- s:
				case <-ctx.Done():
					return
				case <-d.closed:
					return
				}
			}
			select {
			case <-x.wake:
			case <-ctx.Done():
				return
			case <-d.closed:
				return
			}
		}
	}()
	return out, nil
}

// Close implements [driver.Driver]; the world stays.
func (d *Driver) Close() error {
	d.once.Do(func() {
		close(d.closed)
		d.server.Close()
	})
	return nil
}

type idKey struct{}

// guestConn tells the server whose connection it is.
type guestConn struct {
	*conn
	id warren.SandboxID
}

// listener hands dialled connections to the HTTP server.
type listener struct{ d *Driver }

func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.d.conns:
		return c, nil
	case <-l.d.closed:
		return nil, net.ErrClosed
	}
}

func (l listener) Close() error   { return nil }
func (l listener) Addr() net.Addr { return addr{} }

func (d *Driver) serve(rw http.ResponseWriter, r *http.Request) {
	id := r.Context().Value(idKey{}).(warren.SandboxID)
	if d.opts.Guest != nil {
		d.opts.Guest(id).ServeHTTP(rw, r)
		return
	}
	switch {
	case r.URL.Path == "/health" && r.Method == http.MethodGet:
		rw.WriteHeader(http.StatusNoContent)
	case r.URL.Path == "/init" && r.Method == http.MethodPost:
		var body struct {
			SandboxID string `json:"sandboxId"`
		}
		err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&body)
		if err == nil && body.SandboxID != string(id) {
			err = errors.New("not my id")
		}
		if err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		rw.WriteHeader(http.StatusNoContent)
	case r.URL.Path == "/root" && r.Method == http.MethodPost:
		t := tar.NewReader(io.LimitReader(r.Body, 1<<20))
		_, err := t.Next()
		var text []byte
		if err == nil {
			text, err = io.ReadAll(t)
		}
		if err == nil && !d.world.ChangeRoot(id, string(text)) {
			err = errors.New("it does not run")
		}
		if err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		rw.WriteHeader(http.StatusNoContent)
	default:
		http.NotFound(rw, r)
	}
}
