package server_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/guest"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/store"
)

// oneImage has the host's image and no other.
type oneImage struct{ engine.Images }

func (oneImage) Resolve(_ context.Context, ref string) (*engine.Image, error) {
	if ref != "host" && ref != "host:1" {
		return nil, &warren.Error{Kind: "not_found", Op: "resolve image", ID: ref, Message: "there is no such image"}
	}
	return &engine.Image{Name: "host", Digest: "host:1", Kind: "host", Root: driver.Root{Digest: "host:1"}}, nil
}

type noRepos struct{ engine.Repos }

func (noRepos) List(context.Context) ([]*engine.Repo, error) { return nil, nil }

// plainWorkspaces are directories.
type plainWorkspaces struct {
	engine.Workspaces
	dir string
}

func (w plainWorkspaces) Prepare(ctx context.Context, id warren.WorkspaceID, _ engine.WorkspaceSource) (*engine.WorkspaceDirs, error) {
	for _, sub := range []string{"files", "home"} {
		if err := os.MkdirAll(filepath.Join(w.dir, string(id), sub), 0o755); err != nil {
			return nil, err
		}
	}
	return w.Get(ctx, id)
}

func (w plainWorkspaces) Populate(context.Context, warren.WorkspaceID) error { return nil }

func (w plainWorkspaces) Sync(context.Context, warren.WorkspaceID) error { return nil }

func (w plainWorkspaces) Get(_ context.Context, id warren.WorkspaceID) (*engine.WorkspaceDirs, error) {
	return &engine.WorkspaceDirs{Files: filepath.Join(w.dir, string(id), "files"), Home: filepath.Join(w.dir, string(id), "home")}, nil
}

func (w plainWorkspaces) Delete(_ context.Context, id warren.WorkspaceID) error {
	return os.RemoveAll(filepath.Join(w.dir, string(id)))
}

// plainCopy copies nothing: the sandboxes of this engine share one guest, which has the host's files.
type plainCopy struct {
	w  plainWorkspaces
	to warren.WorkspaceID
}

func (plainCopy) Finish(context.Context) error { return nil }

func (c plainCopy) Commit(ctx context.Context) (string, error) {
	_, err := c.w.Prepare(ctx, c.to, engine.WorkspaceSource{})
	return "copy", err
}

func (plainCopy) Abort() {}

func (w plainWorkspaces) BeginCopy(_ context.Context, _, to warren.WorkspaceID, _ bool) (engine.WorkspaceCopy, error) {
	return plainCopy{w, to}, nil
}

func (w plainWorkspaces) Copy(ctx context.Context, _, to warren.WorkspaceID) (string, error) {
	return plainCopy{w, to}.Commit(ctx)
}

func (w plainWorkspaces) Adopt(_ context.Context, from, to warren.WorkspaceID) error {
	return os.Rename(filepath.Join(w.dir, string(from)), filepath.Join(w.dir, string(to)))
}

func (w plainWorkspaces) Usage(context.Context, warren.WorkspaceID) (total, shared int64, err error) {
	return 0, 0, nil
}

func (w plainWorkspaces) Mark(context.Context, warren.WorkspaceID) error {
	return errors.ErrUnsupported
}

func (w plainWorkspaces) Size(context.Context, warren.WorkspaceID) (int64, error) { return 0, nil }

// realEngine opens an engine on the fake driver, whose sandboxes share a real guest that runs here.
func realEngine(t *testing.T) (*engine.Engine, *fake.Driver) {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "guest.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	user := "root"
	if os.Getuid() != 0 {
		user = ""
	}
	g := guest.New(guest.Config{LogDir: t.TempDir(), Env: os.Environ(), User: user, Dir: dir})
	go g.Serve(l)
	t.Cleanup(func() { g.Close() })
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.Out.URL.Scheme, p.Out.URL.Host = "http", "guest" },
		Transport:     &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) }},
		FlushInterval: -1,
	}
	d := fake.New(fake.Options{Guest: func(warren.SandboxID) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/init" {
				w.WriteHeader(http.StatusNoContent)
				return
			}
			http.NewResponseController(w).EnableFullDuplex()
			proxy.ServeHTTP(w, r)
		})
	}})
	t.Cleanup(func() { d.Close() })
	st, err := store.Open(t.Context(), store.Options{Path: filepath.Join(dir, "warren.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	e, err := engine.Open(t.Context(), engine.Options{
		Store: st, Images: oneImage{}, Repos: noRepos{}, Workspaces: plainWorkspaces{dir: dir},
		Drivers: map[string]driver.Driver{"fake": d}, DefaultDriver: "fake", DefaultImage: "host",
		PauseDir: filepath.Join(dir, "paused"), SnapshotDir: filepath.Join(dir, "snapshots"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e, d
}

// serveReal serves an engine on a socket and on loopback, and returns the URLs of both.
func serveReal(t *testing.T, e *engine.Engine) (unix, overTCP string) {
	t.Helper()
	s, err := server.New(server.Options{Engine: e, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := s.ListenUnix(socket)
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	tcp, err := server.ListenTCP("127.0.0.1:0", server.TCPOptions{})
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(tcp)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		s.Shutdown(ctx)
	})
	return "unix://" + socket, "http://" + tcp.Addr().String()
}

// TestRealEngine takes the main path from the SDK through the server, the engine and the fake driver to a guest, and back.
func TestRealEngine(t *testing.T) {
	e, _ := realEngine(t)
	unix, tcp := serveReal(t, e)
	ctx := t.Context()
	c, err := warren.Connect(ctx, warren.Options{URL: unix})
	if err != nil {
		t.Fatal(err)
	}
	var steps []string
	spec := warren.Spec{Name: "box", Labels: map[string]string{"a": "b"}, IdempotencyKey: "k1", Progress: func(p warren.Progress) { steps = append(steps, p.Step) }}
	sb, err := c.Create(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	if sb.State != warren.StateRunning || sb.Name != "box" || sb.Generation != 1 || sb.Driver != "fake" || len(steps) == 0 || len(sb.Timing) == 0 {
		t.Errorf("created %+v after %q", sb, steps)
	}
	if again, err := c.Create(ctx, spec); err != nil || again.ID != sb.ID {
		t.Errorf("the same key again: %v, %v", again, err)
	}
	if out, err := c.Ref("box").Command("echo", "hi").Output(ctx); err != nil || string(out) != "hi\n" {
		t.Errorf("Output = %q, %v", out, err)
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if err := sb.Refresh(ctx); err != nil {
			t.Fatal(err)
		}
		if n := len(sb.Timing); n > 0 && sb.Timing[n-1].Name == "first command" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no milestone of the first command: %+v", sb.Timing)
		}
	}
	if _, err := c.Create(ctx, warren.Spec{Name: "box"}); !errors.Is(err, warren.ErrExists) {
		t.Errorf("the name again: %v", err)
	}
	if _, err := c.Create(ctx, warren.Spec{Image: "nope"}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("an unknown image: %v", err)
	}
	if _, err := c.Create(ctx, warren.Spec{Driver: "nope"}); !errors.Is(err, warren.ErrInvalid) && !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("an unknown driver: %v", err)
	}
	var names []string
	for sb, err := range c.Sandboxes(ctx, warren.ListOptions{Labels: map[string]string{"a": "b"}}) {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, sb.Name)
	}
	if strings.Join(names, " ") != "box" {
		t.Errorf("listed %q", names)
	}
	var actions []string
	for ev, err := range c.Events(ctx, warren.EventOptions{Sandbox: "box", NoFollow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		actions = append(actions, ev.Action)
	}
	if len(actions) < 2 {
		t.Errorf("events %q", actions)
	}

	// Another user, with a token, sees none of it.
	id, token, err := c.CreateToken(ctx, warren.TokenSpec{User: "alice", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	alice, err := warren.Connect(ctx, warren.Options{URL: tcp, Token: token, RetryFor: -1})
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(string) error{
		"get":    func(id string) error { _, err := alice.Sandbox(ctx, id); return err },
		"run":    func(id string) error { return alice.Ref(id).Command("true").Run(ctx) },
		"file":   func(id string) error { _, err := alice.Ref(id).FS().ReadFile("etc/hostname"); return err },
		"dial":   func(id string) error { _, err := alice.Ref(id).Dial(ctx, 80); return err },
		"delete": func(id string) error { return alice.DeleteSandbox(ctx, id, warren.DeleteOptions{}) },
		"diff":   func(id string) error { _, err := alice.Diff(ctx, id, warren.DiffOptions{}); return err },
	} {
		foreign, unknown := call(string(sb.ID)), call("s"+strings.Repeat("0", 19))
		if !errors.Is(foreign, warren.ErrNotFound) || errors.Is(foreign, fs.ErrNotExist) || strings.ReplaceAll(foreign.Error(), string(sb.ID), "X") != strings.ReplaceAll(unknown.Error(), "s"+strings.Repeat("0", 19), "X") {
			t.Errorf("%s of a foreign sandbox: %v; of an unknown one: %v", name, foreign, unknown)
		}
	}
	if _, err := alice.Create(ctx, warren.Spec{Mounts: []warren.Mount{{Source: "/etc", Target: "/host"}}}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("a mount of a user: %v", err)
	}
	if _, err := alice.Doctor(ctx); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("doctor for a user: %v", err)
	}
	if err := c.DeleteToken(ctx, id); err != nil {
		t.Fatal(err)
	}
	if _, err := alice.Version(ctx); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("with a revoked token: %v", err)
	}

	if err := sb.Pause(ctx); err != nil || sb.State != warren.StatePaused || sb.MemoryImage == 0 {
		t.Errorf("Pause: %s, image of %d bytes, %v", sb.State, sb.MemoryImage, err)
	}
	no, yes := false, true
	if err := sb.Update(ctx, warren.Change{AutoResume: &no}); err != nil || !sb.Spec.NoAutoResume {
		t.Errorf("no auto-resume: %+v, %v", sb.Spec, err)
	}
	if err := sb.Command("true").Run(ctx); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren resume") {
		t.Errorf("a command in a paused sandbox: %v", err)
	}
	if err := sb.Update(ctx, warren.Change{AutoResume: &yes, IdleAction: warren.IdleDelete}); err != nil || sb.Spec.NoAutoResume || sb.Spec.IdleAction != warren.IdleDelete {
		t.Errorf("auto-resume: %+v, %v", sb.Spec, err)
	}
	if err := sb.Update(ctx, warren.Change{IdleAction: "fly"}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("an unknown idle action: %v", err)
	}
	// Who says that he comes back does not resume it; a new call does.
	for _, back := range []bool{true, false} {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://localhost/v1/sandboxes/box/ports/49983/health", nil)
		if err != nil {
			t.Fatal(err)
		}
		if back {
			req.Header.Set("Warren-Reconnect", "1")
		}
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(unix, "unix://"))
		}}}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if kind := res.Header.Get("Warren-Error"); back && kind != "state" || !back && (kind != "" || res.StatusCode != http.StatusNoContent) {
			t.Errorf("coming back %v: %s, %q", back, res.Status, kind)
		}
	}
	if err := sb.Refresh(ctx); err != nil || sb.State != warren.StateRunning {
		t.Errorf("after a call: %s, %v", sb.State, err)
	}
	if err := sb.Pause(ctx); err != nil {
		t.Error(err)
	}
	if err := sb.Command("true").Run(ctx); err != nil {
		t.Errorf("a command that resumes: %v", err)
	}
	if err := sb.Refresh(ctx); err != nil || sb.State != warren.StateRunning {
		t.Errorf("after it: %s, %v", sb.State, err)
	}
	// A command that is followed when the sandbox is paused ends for its client, which does not resume it.
	followed := sb.Command("sleep", "5")
	if err := followed.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := sb.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if err := followed.Wait(); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "is paused") {
		t.Errorf("a command cut off by a pause: %v", err)
	}
	if err := sb.Refresh(ctx); err != nil || sb.State != warren.StatePaused {
		t.Errorf("after it: %s, %v", sb.State, err)
	}
	if err := sb.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if err := sb.Pause(ctx); err != nil || sb.PauseReason != "asked" {
		t.Errorf("Pause: %q, %v", sb.PauseReason, err)
	}
	if err := sb.Resume(ctx); err != nil || sb.State != warren.StateRunning || sb.Generation != 1 || sb.MemoryImage != 0 {
		t.Errorf("Resume: %s, generation %d, image of %d bytes, %v", sb.State, sb.Generation, sb.MemoryImage, err)
	}
	if err := sb.Command("true").Run(ctx); err != nil {
		t.Errorf("after a resume: %v", err)
	}
	if err := sb.Restart(ctx); err != nil || sb.Generation != 2 {
		t.Errorf("Restart: generation %d, %v", sb.Generation, err)
	}
	if err := sb.Command("true").Run(ctx); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	if err := sb.Delete(ctx); err != nil {
		t.Fatal(err)
	}
	if err := sb.Command("true").Run(ctx); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("after Delete: %v", err)
	}
}
