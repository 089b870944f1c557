//go:build linux

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/message"
)

// Options of a driver.
type Options struct {
	// StateDir holds everything that the driver keeps; it is made, with mode 0700. Drivers with the same directory share
	// their sandboxes.
	StateDir string
	// RuntimePath is the warren-runtime binary.
	RuntimePath string
	// GuestPath is the warren-guest binary, which every sandbox sees at /.warren/guest.
	GuestPath string
	// KeeperIdle is how long a keeper stays with no sandbox and no driver; 0 means 30 seconds.
	KeeperIdle time.Duration
	// ImageKey, of ImageKeySize bytes, encrypts the images that are written from now on, and is needed to restore them. Nil
	// leaves images as they are. Each has a key of its own, which is derived from this one.
	ImageKey []byte
	// CompressImages is CompressAlways or CompressNever; "" compresses images of up to 8 MiB, which takes next to no time.
	// Images for copies of a running sandbox are not compressed.
	CompressImages string
	// Debug makes gVisor write its debug log into each sandbox's directory. It is slow.
	Debug bool
	// Logger gets what no caller is told; nil means none.
	Logger *slog.Logger
}

// ImageKeySize is the length of Options.ImageKey.
const ImageKeySize = protocol.KeySize

// The values of Options.CompressImages.
const (
	CompressAlways = protocol.CompressAlways
	CompressNever  = protocol.CompressNever
)

// Driver is the gVisor driver. It implements [driver.Driver], [driver.Describer], [driver.Watcher],
// [driver.Statser], [driver.Snapshotter], [driver.Copier],
// [driver.RootSaver], [driver.Pooler], [driver.CardKeeper] and [driver.Checker].
type Driver struct {
	opts   Options
	log    *slog.Logger
	keeper companion.Process

	mu     sync.Mutex
	held   *net.UnixConn // says to the keeper that a client is there
	closed bool
	done   chan struct{}

	hits, misses atomic.Uint64 // of the pool
}

var (
	_ driver.Driver      = (*Driver)(nil)
	_ driver.Describer   = (*Driver)(nil)
	_ driver.Watcher     = (*Driver)(nil)
	_ driver.Statser     = (*Driver)(nil)
	_ driver.Snapshotter = (*Driver)(nil)
	_ driver.Copier      = (*Driver)(nil)
	_ driver.RootSaver   = (*Driver)(nil)
	_ driver.Pooler      = (*Driver)(nil)
	_ driver.CardKeeper  = (*Driver)(nil)
	_ driver.Checker     = (*Driver)(nil)
)

// New opens the driver on a state directory. It starts a keeper, or replaces one of another build, so that sandboxes
// that lost theirs are taken care of at once.
func New(opts Options) (*Driver, error) {
	for _, p := range []*string{&opts.StateDir, &opts.RuntimePath, &opts.GuestPath} {
		if *p == "" {
			return nil, fmt.Errorf("gvisor driver: StateDir, RuntimePath and GuestPath must be set: %w", warren.ErrInvalid)
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return nil, err
		}
		*p = abs
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("gvisor driver: must run as root, to make mounts and user namespaces: %w", errors.ErrUnsupported)
	}
	if n := len(opts.ImageKey); n != 0 && n != ImageKeySize {
		return nil, fmt.Errorf("gvisor driver: ImageKey has %d bytes, want %d: %w", n, ImageKeySize, warren.ErrInvalid)
	}
	if c := opts.CompressImages; c != "" && c != CompressAlways && c != CompressNever {
		return nil, fmt.Errorf("gvisor driver: CompressImages is %q, want %q, %q or nothing: %w", c, CompressAlways, CompressNever, warren.ErrInvalid)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.KeeperIdle == 0 {
		opts.KeeperIdle = 30 * time.Second
	}
	if err := os.MkdirAll(opts.StateDir, 0o700); err != nil {
		return nil, err
	}
	d := &Driver{opts: opts, log: opts.Logger, done: make(chan struct{}), keeper: companion.Process{
		Name: protocol.Name, Dir: opts.StateDir, Path: opts.RuntimePath, Log: opts.Logger,
		Args: []string{"keeper", "-state", opts.StateDir, "-idle", opts.KeeperIdle.String()},
	}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := d.ensure(ctx, true); err != nil {
		return nil, err
	}
	return d, nil
}

// Info describes the driver.
func (d *Driver) Info() driver.Info {
	return driver.Info{Name: "gvisor", Isolation: "kernel in user space (gVisor)", Boundary: "kernel"}
}

// Create boots a sandbox, see [driver.Driver].
func (d *Driver) Create(ctx context.Context, spec *driver.Spec) error {
	return d.create(ctx, spec, nil)
}

// create boots a sandbox, or makes one that goes on from an image.
func (d *Driver) create(ctx context.Context, spec *driver.Spec, image *os.File) error {
	if err := checkSpec(spec); err != nil {
		return fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	// The context's end is sent to the keeper, which then undoes what it has done before it answers.
	err := d.send(ctx, protocol.OpCreate, spec, image)
	if errors.Is(err, errLost) {
		// The keeper died in the middle. The next one undoes what it finds half made; make sure of it.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if derr := d.Delete(undo, spec.ID); derr != nil {
			err = errors.Join(err, derr)
		}
	}
	if err != nil {
		return fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	return nil
}

// send asks the keeper something about a spec, and the image that goes with it, if any.
func (d *Driver) send(ctx context.Context, op string, spec *driver.Spec, image *os.File) error {
	msg, files, err := d.encode(spec)
	defer closeFiles(files)
	if err != nil {
		return err
	}
	sent := files
	if image != nil {
		at := len(files)
		msg.Image, sent = &at, append(slices.Clip(files), image)
	}
	req := &protocol.Request{Op: op, Spec: msg}
	if image != nil {
		req.Packing = d.packing()
	}
	r, err := d.call(ctx, req, sent...)
	switch {
	case err != nil || op != protocol.OpCreate:
	case r.Pooled:
		d.hits.Add(1)
	default:
		d.misses.Add(1)
	}
	return err
}

// CheckOptions refuses every option, before anything is made for a sandbox: this driver has none yet.
func (d *Driver) CheckOptions(options map[string]string) error { return checkOptions(options) }

func checkOptions(options map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(options)) {
		return fmt.Errorf("driver option %q is not known to gvisor (known: none): %w", key, warren.ErrInvalid)
	}
	return nil
}

// checkSpec refuses what cannot work before anything is made.
func checkSpec(spec *driver.Spec) error {
	invalid := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, warren.ErrInvalid)...)
	}
	if err := checkOptions(spec.Options); err != nil {
		return err
	}
	if len(spec.Root.Layers) == 0 {
		return invalid("the root has no layer")
	}
	if l := spec.Limits; l.CPUMillis == 0 || l.Memory <= 0 || l.Disk <= 0 || l.PIDs == 0 {
		return invalid("every limit must be set: %+v", l)
	}
	if spec.Limits.Memory < 32<<20 {
		return invalid("memory limit %d is below 32 MiB, with which nothing starts", spec.Limits.Memory)
	}
	if spec.Limits.Disk < 1<<20 {
		return invalid("disk limit %d is below 1 MiB, with which nothing starts", spec.Limits.Disk)
	}
	if !validHostname(spec.Hostname) {
		return invalid("host name %q: 1 to 63 letters, digits and dashes", spec.Hostname)
	}
	seen := map[string]bool{}
	for _, m := range spec.Mounts {
		switch {
		case !path.IsAbs(m.Target) || path.Clean(m.Target) != m.Target || strings.ContainsRune(m.Target, 0):
			return invalid("mount target %q must be absolute and clean", m.Target)
		case seen[m.Target]:
			return invalid("two mounts on %s", m.Target)
		case m.Dir == nil && m.Source == "":
			return invalid("mount on %s has no directory", m.Target)
		}
		for _, taken := range []string{"/proc", "/sys", "/dev", "/.warren/guest"} {
			if m.Target == taken || strings.HasPrefix(m.Target, taken+"/") {
				return invalid("mount target %s: %s belongs to the sandbox", m.Target, taken)
			}
		}
		for _, whole := range []string{"/", "/.warren"} {
			if m.Target == whole {
				return invalid("mount target %s belongs to the sandbox", m.Target)
			}
		}
		seen[m.Target] = true
	}
	for _, b := range spec.Root.Binds {
		if !path.IsAbs(b.Target) || path.Clean(b.Target) != b.Target || b.Target == "/" {
			return invalid("bind target %q must be absolute, clean and not the root", b.Target)
		}
	}
	for _, e := range spec.Env {
		if strings.ContainsRune(e, 0) || !strings.Contains(e, "=") {
			return invalid("environment entry %q", e)
		}
	}
	return nil
}

// validHostname keeps the name from adding lines to /etc/hosts.
func validHostname(s string) bool {
	if s == "" || len(s) > 63 {
		return false
	}
	for _, r := range s {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.') {
			return false
		}
	}
	return true
}

// encode turns a spec into a message. Each directory becomes a detached mount here, in the mount namespace in which
// the caller's paths and descriptors mean something.
func (d *Driver) encode(spec *driver.Spec) (*protocol.Spec, []*os.File, error) {
	var files []*os.File
	clone := func(at int, name string, flags uint) (int, error) {
		fd, err := unix.OpenTree(at, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|flags)
		if err != nil {
			return 0, err
		}
		files = append(files, os.NewFile(uintptr(fd), "tree"))
		return len(files) - 1, nil
	}
	m := &protocol.Spec{
		ID: string(spec.ID), Hostname: spec.Hostname, Env: spec.Env, Labels: spec.Labels, Debug: d.opts.Debug, Root: spec.Root.Digest,
		Limits: protocol.Limits{CPUMillis: spec.Limits.CPUMillis, Memory: spec.Limits.Memory, Disk: spec.Limits.Disk, PIDs: spec.Limits.PIDs},
	}
	var err error
	if m.GuestBuild, err = companion.BuildID(d.opts.GuestPath); err != nil {
		return nil, files, fmt.Errorf("the guest binary: %w", err)
	}
	if m.Guest, err = clone(unix.AT_FDCWD, d.opts.GuestPath, 0); err != nil {
		return nil, files, fmt.Errorf("open the guest binary: %w", err)
	}
	for i, l := range spec.Root.Layers {
		fd, err := clone(unix.AT_FDCWD, l.Dir, 0)
		if err != nil {
			return nil, files, fmt.Errorf("open layer %d of the image: %w", i+1, err)
		}
		m.Layers = append(m.Layers, protocol.Layer{FD: fd, IDBase: l.IDBase})
	}
	for _, b := range spec.Root.Binds {
		p := protocol.Bind{Target: b.Target, IDBase: b.IDBase, Hide: b.Hide}
		if !b.Hide {
			if p.FD, err = clone(unix.AT_FDCWD, b.Source, unix.AT_RECURSIVE); err != nil {
				return nil, files, fmt.Errorf("open what the image binds on %s: %w", b.Target, err)
			}
			if p.Flat, err = clone(unix.AT_FDCWD, b.Source, 0); err != nil {
				return nil, files, fmt.Errorf("open what the image binds on %s: %w", b.Target, err)
			}
			fi, err := files[p.FD].Stat()
			if err != nil {
				return nil, files, err
			}
			p.Dir = fi.IsDir()
		}
		m.Binds = append(m.Binds, p)
	}
	for _, mt := range spec.Mounts {
		at, name, flags := unix.AT_FDCWD, mt.Source, uint(0)
		if mt.Dir != nil {
			at, name, flags = int(mt.Dir.Fd()), "", unix.AT_EMPTY_PATH
		}
		fd, err := clone(at, name, flags)
		if err != nil {
			return nil, files, fmt.Errorf("open the directory for %s: %w", mt.Target, err)
		}
		if fi, err := files[fd].Stat(); err != nil || !fi.IsDir() {
			return nil, files, fmt.Errorf("mount on %s: not a directory: %w", mt.Target, warren.ErrInvalid)
		}
		m.Mounts = append(m.Mounts, protocol.Mount{
			FD: fd, Target: mt.Target, Writable: mt.Writable,
			IDBase: mt.Owner.IDBase, User: mt.Owner.User, UID: mt.Owner.UID, GID: mt.Owner.GID,
		})
	}
	if c := spec.Card; c != nil {
		m.Card = &protocol.Card{Inside: len(files), Outside: len(files) + 1, MTU: c.MTU, Addrs: c.Addrs, DNS: c.DNS}
		for _, f := range []*os.File{c.Inside, c.Outside} {
			fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				return nil, files, fmt.Errorf("the network card: %w", err)
			}
			files = append(files, os.NewFile(uintptr(fd), "card"))
		}
	}
	if len(files) > message.MaxFiles {
		return nil, files, fmt.Errorf("image and mounts together need %d descriptors, of which %d fit: %w", len(files), message.MaxFiles, warren.ErrInvalid)
	}
	return m, files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Delete ends a sandbox and removes all of it, see [driver.Driver].
func (d *Driver) Delete(ctx context.Context, id warren.SandboxID) error {
	if _, err := d.call(ctx, &protocol.Request{Op: protocol.OpDelete, ID: string(id)}); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	return nil
}

// List returns the sandboxes of the state directory, see [driver.Driver].
func (d *Driver) List(ctx context.Context) ([]driver.Status, error) {
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpList})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	out := make([]driver.Status, len(r.Statuses))
	for i, s := range r.Statuses {
		out[i] = status(s)
	}
	return out, nil
}

func status(s protocol.Status) driver.Status {
	out := driver.Status{ID: warren.SandboxID(s.ID), State: driver.State(s.State)}
	if s.Exit != nil {
		out.Exit = &driver.Exit{Reason: s.Exit.Reason, Message: s.Exit.Message, Time: s.Exit.Time}
	}
	return out
}

// Dial connects to a port inside, see [driver.Driver].
func (d *Driver) Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	c, _, err := d.open(ctx, &protocol.Request{Op: protocol.OpDial, ID: string(id), Port: port})
	if err != nil {
		return nil, fmt.Errorf("dial port %d of sandbox %s: %w", port, id, err)
	}
	return c, nil
}

// Stats measures a sandbox. The memory is what its control group is charged with, without cache that nobody uses.
func (d *Driver) Stats(ctx context.Context, id warren.SandboxID) (driver.Stats, error) {
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpStats, ID: string(id)})
	if err != nil {
		return driver.Stats{}, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	s := r.Stats
	return driver.Stats{CPUTime: s.CPUTime, Memory: s.Memory, Disk: s.Disk, PIDs: s.PIDs}, nil
}

// Card returns the outer end of a sandbox's card, see [driver.Carder].
func (d *Driver) Card(ctx context.Context, id warren.SandboxID) (*os.File, error) {
	c, r, err := d.open(ctx, &protocol.Request{Op: protocol.OpCard, ID: string(id)})
	if err != nil {
		return nil, fmt.Errorf("card of sandbox %s: %w", id, err)
	}
	c.Close()
	if len(r.Files) != 1 {
		closeFiles(r.Files)
		return nil, fmt.Errorf("card of sandbox %s: the keeper sent %d descriptors", id, len(r.Files))
	}
	return r.Files[0], nil
}

// KeepCard gives the keeper a copy of the outer end of a sandbox's card, see [driver.CardKeeper].
func (d *Driver) KeepCard(ctx context.Context, id warren.SandboxID, outside *os.File) error {
	if _, err := d.call(ctx, &protocol.Request{Op: protocol.OpKeepCard, ID: string(id)}, outside); err != nil {
		return fmt.Errorf("card of sandbox %s: %w", id, err)
	}
	return nil
}

// Close lets go of the keeper. Sandboxes and keeper go on; a keeper without sandboxes ends by itself.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	close(d.done)
	if d.held != nil {
		d.held.Close()
		d.held = nil
	}
	return nil
}

// Shutdown ends a keeper that has no sandbox, at once, and closes the driver. While there are sandboxes it returns
// [warren.ErrState] and changes nothing.
func (d *Driver) Shutdown(ctx context.Context) error {
	gone, err := d.keeper.Gone()
	if err != nil {
		return err
	}
	_, _, err = d.roundTrip(ctx, &protocol.Request{Op: protocol.OpShutdown})
	if err != nil && !errors.Is(err, errNoKeeper) { // which says that it has ended already
		return fmt.Errorf("shut the keeper down: %w", err)
	}
	if err := gone(ctx); err != nil {
		return err
	}
	return d.Close()
}
