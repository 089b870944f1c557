//go:build linux

package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Options of a driver.
type Options struct {
	// StateDir holds what the driver keeps: the identity of this installation, and mounts while sandboxes start. It is made,
	// with mode 0711. Drivers with the same directory share their sandboxes.
	StateDir string
	// GuestPath is the warren-guest binary, which every sandbox sees at /.warren/guest.
	GuestPath string
	// Host is the engine's address, such as unix:///run/docker.sock, ssh://user@host or tcp://host:2376; empty means what
	// DOCKER_HOST, the docker context or the usual paths say. The keys of tcp are found as docker's command line finds them.
	Host string
	// Runtime is for sandboxes that name none; empty means the engine's default.
	Runtime string
	// Accept names protections that the engine may lack: [AcceptNoUserNamespace], [AcceptNoDiskLimit], [AcceptCopiedMounts].
	Accept []string
	// Logger gets what no caller is told; nil means none.
	Logger *slog.Logger
}

// What [Options.Accept] can name.
const (
	// AcceptNoUserNamespace lets a container's root be the host's.
	AcceptNoUserNamespace = "no-user-namespace"
	// AcceptNoDiskLimit lets a container write as much to its root as the engine's disk holds.
	AcceptNoDiskLimit = "no-disk-limit"
	// AcceptCopiedMounts lets an engine that does not see this machine's directories work on copies of them: what a
	// sandbox writes is on this machine after [Driver.Sync], [Driver.Freeze] or [Driver.Delete], and not before.
	AcceptCopiedMounts = "copied-mounts"
)

// accepts are all that [Options.Accept] can name.
var accepts = []string{AcceptNoUserNamespace, AcceptNoDiskLimit, AcceptCopiedMounts}

// Driver is the Docker driver. It implements [driver.Driver], [driver.Describer], [driver.Watcher],
// [driver.Statser], [driver.Checker], [driver.HostReplacer], [driver.Freezer],
// [driver.RootSaver], [driver.Syncer] and [driver.CardMaker].
type Driver struct {
	opts   Options
	at     endpoint
	log    *slog.Logger
	api    *client.Client
	labels ownership
	// ctx ends with Close.
	ctx  context.Context
	stop context.CancelFunc

	mu sync.Mutex
	// busy has a channel for each sandbox that is being created or deleted by this process.
	busy     map[warren.SandboxID]chan struct{}
	deleting map[string]bool // containers
	// signalled are containers that the engine has asked to end, or ended.
	signalled map[string]bool
	absences  []absence
	channels  map[warren.SandboxID]*guestChannel
	loads     map[string]*load
	engine    *engine // what the engine last said of itself
}

var (
	_ driver.Driver    = (*Driver)(nil)
	_ driver.Describer = (*Driver)(nil)
	_ driver.Watcher   = (*Driver)(nil)
	_ driver.Statser   = (*Driver)(nil)
	_ driver.Checker   = (*Driver)(nil)

	_ driver.HostReplacer = (*Driver)(nil)
	_ driver.Freezer      = (*Driver)(nil)
	_ driver.RootSaver    = (*Driver)(nil)
	_ driver.Syncer       = (*Driver)(nil)
	_ driver.CardMaker    = (*Driver)(nil)
)

// New opens the driver. It does not wait for the engine, which may be started later; without any sign of one it returns an error
// that matches [errors.ErrUnsupported].
func New(opts Options) (*Driver, error) {
	if opts.StateDir == "" || opts.GuestPath == "" {
		return nil, fmt.Errorf("docker driver: StateDir and GuestPath must be set: %w", warren.ErrInvalid)
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("docker driver: must run as root, to mount workspaces: %w", errors.ErrUnsupported)
	}
	for _, a := range opts.Accept {
		if !slices.Contains(accepts, a) {
			return nil, fmt.Errorf("docker driver: accept %q: want %s: %w", a, strings.Join(accepts, " or "), warren.ErrInvalid)
		}
	}
	for _, p := range []*string{&opts.StateDir, &opts.GuestPath} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return nil, err
		}
		*p = abs
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	at, err := findHost(opts.Host, os.Getenv)
	if err != nil {
		return nil, fmt.Errorf("docker driver: %w", err)
	}
	reach, err := at.options()
	if err != nil {
		return nil, fmt.Errorf("docker driver: %w", err)
	}
	// Containers with ids of their own pass through it.
	if err := os.MkdirAll(filepath.Join(opts.StateDir, stageDir), 0o711); err != nil {
		return nil, err
	}
	installation, err := installationID(opts.StateDir)
	if err != nil {
		return nil, fmt.Errorf("docker driver: %w", err)
	}
	if err := writeFilter(opts.StateDir); err != nil {
		return nil, fmt.Errorf("docker driver: %w", err)
	}
	api, err := client.New(append(reach, client.WithUserAgent("warren"))...)
	if err != nil {
		return nil, fmt.Errorf("docker driver: %w", err)
	}
	d := &Driver{
		opts: opts, at: at, log: opts.Logger, api: api, labels: ownership{installation},
		busy: map[warren.SandboxID]chan struct{}{}, deleting: map[string]bool{}, signalled: map[string]bool{},
		channels: map[warren.SandboxID]*guestChannel{}, loads: map[string]*load{},
	}
	d.ctx, d.stop = context.WithCancel(context.Background())
	go d.collectImages(d.ctx)
	d.wakeLeft()
	return d, nil
}

// installationID returns the identity of a state directory, which is made up once. Labels carry it, so that two
// installations on one engine keep off each other's containers.
func installationID(dir string) (string, error) {
	name := filepath.Join(dir, "installation")
	for {
		text, err := os.ReadFile(name)
		if err == nil {
			id := strings.TrimSpace(string(text))
			if len(id) != installationLen {
				return "", fmt.Errorf("%s is damaged: %q is no identity of %d characters; put it back, or remove it together with all containers labelled %s", name, id, installationLen, labelInstallation)
			}
			return id, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		// Whole or not at all, and by one of several that begin at the same time.
		tmp, err := os.CreateTemp(dir, ".installation-*")
		if err != nil {
			return "", err
		}
		_, err = tmp.WriteString(strings.ToLower(rand.Text()[:installationLen]) + "\n")
		if err == nil {
			err = tmp.Sync()
		}
		err = errors.Join(err, tmp.Close())
		if err == nil {
			err = os.Link(tmp.Name(), name)
		}
		os.Remove(tmp.Name())
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
}

// Info describes the driver.
func (d *Driver) Info() driver.Info {
	if ownKernel(d.opts.Runtime, "") {
		return driver.Info{Name: "docker", Isolation: "container with a kernel of its own (Docker, " + d.opts.Runtime + ")", Boundary: "kernel"}
	}
	return driver.Info{Name: "docker", Isolation: "container on the host's kernel (Docker)", Boundary: "namespace"}
}

// ReplaceHost says why the host's programs are no root here, see [driver.HostReplacer].
func (d *Driver) ReplaceHost() string {
	return "a container starts from an image that its engine holds, and not from directories of the host"
}

// lock makes creates and deletes of one sandbox in this process take turns.
func (d *Driver) lock(ctx context.Context, id warren.SandboxID) (unlock func(), err error) {
	for {
		d.mu.Lock()
		held := d.busy[id]
		if held == nil {
			mine := make(chan struct{})
			d.busy[id] = mine
			d.mu.Unlock()
			return func() {
				d.mu.Lock()
				delete(d.busy, id)
				d.mu.Unlock()
				close(mine)
			}, nil
		}
		d.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// graceTime is how long a call that changes something may go on after its caller has given up: an engine does not undo what
// it has begun, and what it answers says what there is to undo.
const graceTime = 10 * time.Second

// grace returns a context that ends a while after ctx.
func grace(ctx context.Context) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t := time.AfterFunc(graceTime, cancel)
		context.AfterFunc(late, func() { t.Stop() })
	})
	return late, func() { stop(); cancel() }
}

// Close releases what this process holds. Sandboxes keep running.
func (d *Driver) Close() error {
	d.stop()
	d.mu.Lock()
	open := d.channels
	d.channels = map[warren.SandboxID]*guestChannel{}
	d.mu.Unlock()
	for _, c := range open {
		c.close()
	}
	return d.api.Close()
}

func (d *Driver) accepts(what string) bool { return slices.Contains(d.opts.Accept, what) }

func (d *Driver) checkOpen() error {
	if d.ctx.Err() != nil {
		return fmt.Errorf("the driver is closed: %w", warren.ErrUnavailable)
	}
	return nil
}
