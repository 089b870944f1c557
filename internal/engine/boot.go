package engine

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// bootRequest is what an execution is made of.
type bootRequest struct {
	row    *store.Sandbox
	spec   *Spec
	image  *Image
	dirs   *WorkspaceDirs
	mounts []driver.Mount
	// memory, when set, is the directory of an image to go on from.
	memory string
	// root, when set, is a layer to put over the root of an execution that boots.
	root string
	// event is what the guest is told of it, see guestInit.
	event string
	step  func(ctx context.Context, name string, fn func(context.Context) error) error
}

// boot makes the driver create the execution and tells its guest who it is.
func (e *Engine) boot(ctx context.Context, r bootRequest) error {
	ctx, cancel := context.WithTimeout(ctx, e.opts.BootTimeout)
	defer cancel()
	if err := e.launch(ctx, r); err != nil {
		return err
	}
	if err := fpCreateBooted.Hit(); err != nil {
		return err
	}
	return r.step(ctx, "guest ready", func(ctx context.Context) error {
		if r.root != "" {
			if err := e.applyRoot(ctx, r.row, r.root); err != nil {
				return err
			}
		}
		return e.greet(ctx, r)
	})
}

// launch makes the driver create the execution, with its network card.
func (e *Engine) launch(ctx context.Context, r bootRequest) error {
	d := e.opts.Drivers[r.row.Driver]
	return r.step(ctx, "create", func(ctx context.Context) error {
		spec, own, err := e.driverSpec(r)
		if err != nil {
			return err
		}
		defer closeMounts(own)
		if spec.Card, err = e.card(ctx, r); err != nil {
			return err
		}
		defer closeCard(spec.Card)
		create := d.Create
		if r.memory != "" {
			s, err := e.snapshotter(r.row.Driver)
			if err != nil {
				return err
			}
			create = func(ctx context.Context, spec *driver.Spec) error { return s.Restore(ctx, spec, r.memory) }
		}
		if err := create(ctx, spec); err != nil {
			e.metrics.driverError(r.row.Driver, "create")
			return fmt.Errorf("driver %s: %w", r.row.Driver, err)
		}
		if spec.Card != nil {
			if err := e.plug(ctx, r); err != nil {
				return err
			}
		}
		e.noteStart(r.row.Driver, spec, len(own))
		return nil
	})
}

// greet waits for the guest and tells it who it is.
func (e *Engine) greet(ctx context.Context, r bootRequest) error {
	d := e.opts.Drivers[r.row.Driver]
	conn, err := d.Dial(ctx, r.row.ID, warren.GuestPort)
	if err != nil {
		e.metrics.driverError(r.row.Driver, "dial")
		return fmt.Errorf("the guest does not answer: %w", err)
	}
	defer conn.Close()
	if r.event == "" {
		r.event = "start"
		if r.memory != "" {
			r.event = "resume"
		}
	}
	in := guestInit{
		AccessToken: r.row.AccessToken, EnvVars: map[string]string{}, DefaultUser: "user", DefaultWorkdir: filesTarget,
		Hostname: hostname(r.row), MemoryLimit: r.row.Memory, SandboxID: r.row.ID, ParentID: r.row.SourceID, Timestamp: e.clock.Now().UTC(),
		Event: r.event, Entropy: make([]byte, 32),
	}
	rand.Read(in.Entropy)
	if e.inspects(r.spec.Policy) {
		in.Authority = string(e.opts.Network.Authority())
	}
	maps.Copy(in.EnvVars, r.image.Config.Env)
	maps.Copy(in.EnvVars, r.spec.Env)
	maps.Copy(in.EnvVars, e.placeholderEnv(r.spec))
	return initGuest(ctx, conn, in)
}

// driverSpec resolves everything for the driver. own are the mounts that were opened for it.
func (e *Engine) driverSpec(r bootRequest) (_ *driver.Spec, own []driver.Mount, err error) {
	defer func() {
		if err != nil {
			closeMounts(own)
		}
	}()
	open := func(dir, target string, writable bool) error {
		f, err := openOwn(dir)
		if err != nil {
			e.log.Error("workspace directory", "sandbox", r.row.ID, "workspace", r.row.WorkspaceID, "error", err)
			return fmt.Errorf("the files of workspace %s cannot be opened: %w", r.row.WorkspaceID, warren.ErrUnavailable)
		}
		own = append(own, driver.Mount{Dir: f, Source: dir, Target: target, Writable: writable, Owner: driver.Owner{IDBase: driver.DiskIDBase}})
		return nil
	}
	if err := open(r.dirs.Files, filesTarget, true); err != nil {
		return nil, own, err
	}
	if err := open(r.dirs.Home, homeTarget, true); err != nil {
		return nil, own, err
	}
	if r.dirs.Borrow != "" {
		if err := open(r.dirs.Borrow, RepoMount, false); err != nil {
			return nil, own, err
		}
	}
	labels := map[string]string{"warren.owner": r.row.Owner}
	if r.row.Name != "" {
		labels["warren.name"] = r.row.Name
	}
	var env []string // and not the id, which the guest is told: what is kept ready is nobody's yet
	for _, k := range sortedKeys(r.image.Config.Env) {
		env = append(env, k+"="+r.image.Config.Env[k])
	}
	return &driver.Spec{
		ID: r.row.ID, Hostname: hostname(r.row), Root: r.image.Root,
		Mounts: slices.Concat(own, r.mounts),
		Limits: driver.Limits{CPUMillis: r.row.CPUMillis, Memory: r.row.Memory, Disk: r.row.Disk, PIDs: r.row.PIDs},
		Env:    env, Options: r.spec.DriverOptions, Labels: labels,
	}, own, nil
}

// hostname is the sandbox's name. What has none has a name that all such have; a fork differs from its source.
func hostname(row *store.Sandbox) string {
	switch {
	case row.Name != "":
		return row.Name
	case row.SourceID != "":
		return string(row.ID[:9])
	}
	return commonName
}

// commonName is the host name of sandboxes that have no name of their own.
const commonName = "sandbox"

// guestInit is the body of the guest's /init.
type guestInit struct {
	AccessToken    string            `json:"accessToken"`
	EnvVars        map[string]string `json:"envVars"`
	DefaultUser    string            `json:"defaultUser"`
	DefaultWorkdir string            `json:"defaultWorkdir"`
	Hostname       string            `json:"hostname"`
	MemoryLimit    int64             `json:"memoryLimitBytes"`
	SandboxID      warren.SandboxID  `json:"sandboxId"`
	ParentID       warren.SandboxID  `json:"parentId,omitempty"`
	Timestamp      time.Time         `json:"timestamp"`
	// Event is what happened: "start", "resume", "fork" or "rollback".
	Event string `json:"event"`
	// Entropy is 32 random bytes of the host's, base64.
	Entropy []byte `json:"entropy"`
	// Authority is a certificate to trust, in PEM form.
	Authority string `json:"authority,omitempty"`
}

// maxAnswer is how much of a guest's answer is read: it is untrusted, and has nothing long to say.
const maxAnswer = 64 << 10

// initGuest tells the guest at the other end of conn who it is.
func initGuest(ctx context.Context, conn net.Conn, in guestInit) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/init", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	var refused error
	if err := askGuest(ctx, conn, req, func(resp *http.Response) error {
		refused = refusal(resp, "the guest refused /init")
		return nil
	}); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("the guest did not answer /init: %w", err)
	}
	return refused
}

// askGuest sends a request to the guest at the other end of conn and hands its answer to read.
func askGuest(ctx context.Context, conn net.Conn, req *http.Request, read func(*http.Response) error) error {
	req.Close = true
	// A guest that never answers is ended by the context, through the connection.
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if err := req.Write(conn); err != nil {
		return guestError(err)
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(io.LimitReader(conn, maxAnswer), 4096), req)
	if err != nil {
		return guestError(err)
	}
	defer resp.Body.Close()
	return read(resp)
}

// refusal is what an answer says that is no success, or nil.
func refusal(resp *http.Response, what string) error {
	if resp.StatusCode/100 == 2 {
		return nil
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
	return fmt.Errorf("%s: %d %q: %w", what, resp.StatusCode, text, warren.ErrUnavailable)
}

// statsWait is how long a guest may take to say how many processes there are.
const statsWait = time.Second

// guestProcesses asks a guest how many processes its sandbox has.
func guestProcesses(ctx context.Context, d driver.Driver, id warren.SandboxID) (uint32, error) {
	ctx, cancel := context.WithTimeout(ctx, statsWait)
	defer cancel()
	m, err := guestMetrics(ctx, d, id)
	if err != nil {
		return 0, err
	}
	return m.Processes, nil
}

// measured is what a guest tells of its sandbox.
type measured struct {
	Processes uint32 `json:"processes"`
	// CPUUsed is percent of all processors since the guest was last asked by anybody.
	CPUUsed float64 `json:"cpu_used_pct"`
	CPUs    int     `json:"cpu_count"`
	// HoldUntil is a time before which a process in it does not want it paused, in the form of RFC 3339, or empty.
	HoldUntil string `json:"holdUntil"`
}

// guestMetrics asks a guest what its sandbox does.
func guestMetrics(ctx context.Context, d driver.Driver, id warren.SandboxID) (*measured, error) {
	conn, err := d.Dial(ctx, id, warren.GuestPort)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest/metrics", nil)
	if err != nil {
		return nil, err
	}
	var m measured
	if err := askGuest(ctx, conn, req, func(resp *http.Response) error {
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("the guest answers %s: %w", resp.Status, warren.ErrUnavailable)
		}
		if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
			return guestError(err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return &m, nil
}

// guestHealth waits until a guest answers.
func guestHealth(ctx context.Context, d driver.Driver, id warren.SandboxID) error {
	conn, err := d.Dial(ctx, id, warren.GuestPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest/health", nil)
	if err != nil {
		return err
	}
	return askGuest(ctx, conn, req, func(resp *http.Response) error { return refusal(resp, "the guest is not well") })
}

// quiesceWait is how long a guest may take to make itself small before a pause.
const quiesceWait = 500 * time.Millisecond

// quiesceGuest lets a guest give back memory that would be written to disk for nothing. One that does not, or knows no such
// call, is paused as it is.
func quiesceGuest(ctx context.Context, d driver.Driver, id warren.SandboxID) error {
	return prepareGuest(ctx, d, id, "quiesce")
}

// markGuest lets a guest note how far the output of its processes is, shortly before its memory is saved, so that clients
// know after a rollback from where on it is another. A guest that does not, or knows no such call, is saved as it is.
func markGuest(ctx context.Context, d driver.Driver, id warren.SandboxID) error {
	return prepareGuest(ctx, d, id, "mark")
}

func prepareGuest(ctx context.Context, d driver.Driver, id warren.SandboxID, call string) error {
	ctx, cancel := context.WithTimeout(ctx, quiesceWait)
	defer cancel()
	conn, err := d.Dial(ctx, id, warren.GuestPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/warren/"+call, nil)
	if err != nil {
		return err
	}
	return askGuest(ctx, conn, req, func(*http.Response) error { return nil })
}

// guestError gives errors of a connection a kind.
func guestError(err error) error {
	if err == context.Canceled || err == context.DeadlineExceeded {
		return err
	}
	if os.IsTimeout(err) {
		return context.DeadlineExceeded
	}
	return fmt.Errorf("%w (%v)", warren.ErrUnavailable, err)
}
