//go:build linux

package drivertest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/drivertest"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/bench/hostproc"
	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/store"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// overSocket is a driver whose sandboxes are made and reached through a daemon's API, as far as the API can express it: the
// id becomes the name, and the guest is reached through the byte proxy.
type overSocket struct {
	client *warren.Client
	socket string
	ids    *sync.Map // name → id on the server
}

// namePrefix sets names apart from ids, which the server refuses as names.
const namePrefix = "t-"

func name(id warren.SandboxID) string { return namePrefix + string(id) }

func (d overSocket) Create(ctx context.Context, spec *driver.Spec) error {
	s := warren.Spec{
		Name:          name(spec.ID),
		Resources:     warren.Resources{CPUMillis: spec.Limits.CPUMillis, Memory: spec.Limits.Memory, Disk: spec.Limits.Disk, PIDs: spec.Limits.PIDs},
		Labels:        spec.Labels,
		DriverOptions: spec.Options, Policy: "none", // which is what a spec without a card means
		Env: map[string]string{},
	}
	for _, v := range spec.Env {
		name, value, _ := strings.Cut(v, "=")
		s.Env[name] = value
	}
	for _, m := range spec.Mounts {
		s.Mounts = append(s.Mounts, warren.Mount{Source: m.Source, Target: m.Target, Writable: m.Writable})
	}
	sb, err := d.client.Create(ctx, s)
	if err != nil {
		return err
	}
	d.ids.Store(spec.ID, sb.ID)
	return nil
}

func (d overSocket) Delete(ctx context.Context, id warren.SandboxID) error {
	return d.client.DeleteSandbox(ctx, name(id), warren.DeleteOptions{AllowMissing: true})
}

func (d overSocket) List(ctx context.Context) (list []driver.Status, err error) {
	for sb, err := range d.client.Sandboxes(ctx, warren.ListOptions{}) {
		if err != nil {
			return nil, err
		}
		s := driver.Status{ID: warren.SandboxID(strings.TrimPrefix(sb.Name, namePrefix))}
		switch sb.State {
		case warren.StateRunning:
			s.State = driver.Running
		case warren.StateFailed:
			s.State = driver.Dead
			if sb.Failure != nil {
				s.Exit = &driver.Exit{Reason: sb.Failure.Reason, Message: sb.Failure.Message, Time: sb.Failure.Time}
			}
		default:
			s.State = driver.Creating
		}
		list = append(list, s)
	}
	return list, nil
}

func (d overSocket) Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	if port != warren.GuestPort {
		return d.client.Ref(name(id)).Dial(ctx, int(port))
	}
	// Raw bytes to the guest are the daemon's own; others have its HTTP, behind the proxy.
	sb, err := d.client.Sandbox(ctx, name(id))
	if err != nil {
		return nil, err
	}
	if sb.State != warren.StateRunning {
		return nil, fmt.Errorf("sandbox %s is %s: %w", id, sb.State, warren.ErrState)
	}
	near, far := net.Pipe()
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "localhost", "localhost"
			r.Out.URL.Path = fmt.Sprintf("/v1/sandboxes/%s/ports/%d%s", sb.ID, port, r.In.URL.Path)
			if user, _, ok := r.In.BasicAuth(); ok {
				r.Out.Header.Del("Authorization")
				r.Out.Header.Set("Warren-User", user)
			}
		},
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", d.socket)
			},
		},
		FlushInterval: -1,
		// Sandboxes are killed in the middle of answers.
		ErrorLog: log.New(io.Discard, "", 0),
	}
	go http.Serve(&once{conn: far}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A command answers before its request has ended. net/http would close the request's body then, under the transport that
		// sends it on, which takes that for an error and cuts the answer.
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		proxy.ServeHTTP(w, r)
	}))
	return near, nil
}

func (d overSocket) Stats(ctx context.Context, id warren.SandboxID) (driver.Stats, error) {
	s, err := d.client.Ref(name(id)).Stats(ctx)
	if err != nil {
		return driver.Stats{}, err
	}
	return driver.Stats{CPUTime: s.CPUTime, Memory: s.Memory, Disk: s.Disk, PIDs: s.PIDs}, nil
}

func (d overSocket) Info() driver.Info {
	return driver.Info{Name: "socket", Isolation: "that of the server's driver", Boundary: "none"}
}

func (d overSocket) Close() error { return d.client.Close() }

// alias returns the id that the server gave.
func (d overSocket) alias(id warren.SandboxID) warren.SandboxID {
	if own, ok := d.ids.Load(id); ok {
		return own.(warren.SandboxID)
	}
	return ""
}

// once is a listener with one connection.
type once struct {
	mu   sync.Mutex
	conn net.Conn
}

func (l *once) Accept() (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return nil, io.EOF
	}
	c := l.conn
	l.conn = nil
	return c, nil
}

func (l *once) Close() error   { return nil }
func (l *once) Addr() net.Addr { return &net.UnixAddr{Name: "once", Net: "unix"} }

// socketLacks is what the API cannot express.
var socketLacks = map[string]string{
	"create-refuses":              "the server resolves the spec; what it refuses is tested with the server and the engine",
	"create-error-leaves-nothing": "a request names no layers and no open directories",
	"delete-half-made":            "a name belongs to a sandbox once its create has answered",
	"root-binds":                  "a request names an image, not binds",
	"mount-pinned":                "a request names a path, which the engine pins",
	"owner-base":                  "the engine decides how ids are mapped",
	"owner-user":                  "the engine decides how ids are mapped",
	"set-user-id":                 "the engine maps a mount's ids to one user",
	"hostname":                    "the engine decides the host name",
	"guest-env":                   "the environment of a request is that of commands",
	"info":                        "the API tells a server's drivers another way",
	"A03":                         "the same processes as without the socket",
	"A04":                         "the same kernel as without the socket",
	"A14":                         "a request names a path, which the engine pins",
	"A19":                         "a request names no layers",
	"A20":                         "the same limits as without the socket",
	"A22":                         "the same kernel as without the socket",
}

func TestFakeOverSocket(t *testing.T) {
	dir := t.TempDir()
	st, err := store.Open(t.Context(), store.Options{Path: filepath.Join(dir, "warren.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	l := &listeners{m: map[listenerKey]func(net.Conn){}}
	world := fake.NewWorld()
	d := fake.New(fake.Options{World: world, Dial: l.dial, CreateLatency: 20 * time.Millisecond})
	t.Cleanup(func() { d.Close() })
	eng, err := engine.Open(t.Context(), engine.Options{
		Store: st, Images: oneImage{}, Repos: struct{ engine.Repos }{}, Workspaces: plainWorkspaces{dir: dir},
		Drivers: map[string]driver.Driver{"fake": d}, DefaultDriver: "fake", DefaultImage: "host",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { eng.Close() })
	srv, err := server.New(server.Options{Engine: eng, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "api.sock")
	ln, err := srv.ListenUnix(socket)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(ln)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		srv.Shutdown(ctx)
	})
	ids := &sync.Map{}
	drivertest.Run(t, drivertest.Harness{
		Name:         "fake over the socket",
		Boundary:     "none",
		Asynchronous: true,
		New:          func(t testing.TB) driver.Driver { return connectSocket(t, socket, ids) },
		Spec: func(_ testing.TB, id warren.SandboxID) *driver.Spec {
			return &driver.Spec{ID: id, Limits: limits}
		},
		Listen: func(_ testing.TB, d driver.Driver, id warren.SandboxID, port uint16, handle func(net.Conn)) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.m[listenerKey{socketOf(d).alias(id), port}] = handle
		},
		Kill: func(_ testing.TB, d driver.Driver, id warren.SandboxID) {
			world.Kill(socketOf(d).alias(id), driver.Exit{Reason: "killed", Message: "killed by the test"})
		},
		Lacks: socketLacks,
	})
}

func socketOf(d driver.Driver) overSocket {
	s, _ := driver.As[overSocket](d)
	return s
}

func connectSocket(t testing.TB, socket string, ids *sync.Map) overSocket {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		c, err := warren.Connect(context.Background(), warren.Options{URL: "unix://" + socket})
		if err == nil {
			return overSocket{client: c, socket: socket, ids: ids}
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestGVisorOverSocket(t *testing.T)       { drivertest.Run(t, brief(daemonHarness(t))) }
func TestGVisorOverSocketEscape(t *testing.T) { drivertest.Escape(t, brief(daemonHarness(t))) }

// daemonHarness starts a daemon with the gVisor driver.
func daemonHarness(t *testing.T) drivertest.Harness {
	t.Helper()
	testenv.NeedsRoot(t)
	testenv.NeedsUserNamespaces(t)
	testenv.NeedsMountNamespace(t)
	// Short: a socket's path has a limit.
	data, err := os.MkdirTemp("", "warren-dt-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	h := serveHarness(t, data)
	h.Name, h.Boundary = "gvisor over the socket", "kernel"
	names := &sync.Map{} // of executions on the host's command lines; one from the pool has not its sandbox's
	h.Processes = func(t testing.TB, id warren.SandboxID) []int {
		t.Helper()
		own := h.Alias(id)
		if own == "" {
			return nil
		}
		var meta struct{ Container string }
		b, err := os.ReadFile(filepath.Join(data, "run", "gvisor", "sandboxes", string(own), "meta.json"))
		if err == nil {
			err = json.Unmarshal(b, &meta)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if meta.Container != "" {
			names.Store(own, meta.Container)
		}
		name, ok := names.Load(own) // known from before, when the sandbox has gone
		if !ok {
			name = string(own)
		}
		pids, err := hostproc.Naming(name.(string))
		if err != nil {
			t.Fatal(err)
		}
		return pids
	}
	return h
}

// serveHarness starts a daemon on a directory, with more variables of its environment. The caller adds what the harness
// says of the daemon's driver.
func serveHarness(t *testing.T, data string, env ...string) drivertest.Harness {
	t.Helper()
	bin := testenv.NeedsBinaries(t)
	before, err := testenv.TakeSnapshot(data)
	if err != nil {
		t.Fatal(err)
	}
	output, err := os.Create(filepath.Join(t.TempDir(), "daemon.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin.Warren, "serve")
	cmd.Env = append(append(os.Environ(), "WARREN_HOME="+data), env...)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Which ends the driver's processes too; by a signal alone they wait for another daemon.
		end := exec.Command(bin.Warren, "shutdown", "--sandboxes")
		end.Env = cmd.Env
		if out, err := end.CombinedOutput(); err != nil {
			t.Errorf("shutdown: %v: %s", err, out)
			cmd.Process.Signal(syscall.SIGTERM)
		}
		cmd.Wait()
		if text, err := os.ReadFile(output.Name()); t.Failed() && err == nil {
			t.Logf("daemon.log, last part:\n%s", text[max(0, len(text)-4000):])
		}
		output.Close()
		// The data directory's own files stay; nothing else may.
		for _, left := range before.WaitClean(45*time.Second, func(left string) bool { return strings.HasPrefix(left, "file ") }) {
			t.Errorf("left behind: %s", left)
		}
	})
	socket := filepath.Join(data, "warren.sock")
	ids := &sync.Map{}
	first := connectSocket(t, socket, ids)
	t.Cleanup(func() { first.Close() })
	return drivertest.Harness{
		Commands:     true,
		Initialized:  true,
		Asynchronous: true,
		State:        []string{filepath.Join(data, "run")},
		Binaries:     []string{bin.Runtime, bin.Guest, bin.Warren},
		Alias:        first.alias,
		New:          func(t testing.TB) driver.Driver { return connectSocket(t, socket, ids) },
		Spec: func(_ testing.TB, id warren.SandboxID) *driver.Spec {
			return &driver.Spec{ID: id, Limits: limits}
		},
		Lacks: maps.Clone(socketLacks),
	}
}

// oneImage resolves everything to one root.
type oneImage struct{ engine.Images }

func (oneImage) Resolve(context.Context, string) (*engine.Image, error) {
	return &engine.Image{Name: "host", Digest: "sha256:test", Kind: "host", Root: driver.Root{Digest: "sha256:test"}}, nil
}

// plainWorkspaces are empty directories.
type plainWorkspaces struct {
	engine.Workspaces
	dir string
}

func (w plainWorkspaces) dirs(id warren.WorkspaceID) *engine.WorkspaceDirs {
	return &engine.WorkspaceDirs{Files: filepath.Join(w.dir, string(id), "files"), Home: filepath.Join(w.dir, string(id), "home")}
}

func (w plainWorkspaces) Prepare(_ context.Context, id warren.WorkspaceID, _ engine.WorkspaceSource) (*engine.WorkspaceDirs, error) {
	d := w.dirs(id)
	return d, errors.Join(os.MkdirAll(d.Files, 0o755), os.MkdirAll(d.Home, 0o755))
}

func (w plainWorkspaces) Populate(context.Context, warren.WorkspaceID) error { return nil }

func (w plainWorkspaces) Get(_ context.Context, id warren.WorkspaceID) (*engine.WorkspaceDirs, error) {
	return w.dirs(id), nil
}

func (w plainWorkspaces) Delete(_ context.Context, id warren.WorkspaceID) error {
	return os.RemoveAll(filepath.Join(w.dir, string(id)))
}
