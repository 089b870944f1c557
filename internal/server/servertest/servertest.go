// Package servertest runs Warren's API in process: a server on a unix socket over an engine that is a map, and a real guest that
// serves the host's own files and processes to every sandbox.
package servertest

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/guest"
	"github.com/warren-sandbox/warren/internal/server"
)

// Server is an API in process.
type Server struct {
	*server.Server
	Engine *Engine
	// URL is for warren.Connect.
	URL string
	// Socket is the path in URL.
	Socket string

	t    testing.TB
	opts server.Options
}

// New starts a server that ends with the test. Options may be changed before it starts.
func New(t testing.TB, change ...func(*server.Options)) *Server {
	t.Helper()
	s := &Server{Engine: NewEngine(t), t: t, Socket: filepath.Join(t.TempDir(), "api.sock")}
	s.URL = "unix://" + s.Socket
	s.opts = server.Options{Engine: s.Engine, Version: "test"}
	for _, f := range change {
		f(&s.opts)
	}
	s.start()
	t.Cleanup(func() { s.Stop() })
	return s
}

func (s *Server) start() {
	s.t.Helper()
	var err error
	if s.Server, err = server.New(s.opts); err != nil {
		s.t.Fatal(err)
	}
	l, err := s.ListenUnix(s.Socket)
	if err != nil {
		s.t.Fatal(err)
	}
	go s.Serve(l)
}

// TCP also listens on loopback, and returns the URL.
func (s *Server) TCP() string {
	s.t.Helper()
	l, err := server.ListenTCP("127.0.0.1:0", server.TCPOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	go s.Serve(l)
	return "http://" + l.Addr().String()
}

// User returns an SDK client over TCP that acts as a user.
func (s *Server) User(url, user string) *warren.Client {
	s.t.Helper()
	s.Engine.AddToken("token-of-"+user, user)
	c, err := warren.Connect(s.t.Context(), warren.Options{URL: url, Token: "token-of-" + user})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

// Stop ends the server, with little patience for requests under way.
func (s *Server) Stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	s.Shutdown(ctx)
}

// Restart stops the server, waits, and starts another on the same engine and socket.
func (s *Server) Restart(down time.Duration) {
	s.t.Helper()
	s.Stop()
	time.Sleep(down)
	s.start()
}

// Client returns an SDK client of the server's operator.
func (s *Server) Client() *warren.Client {
	s.t.Helper()
	c, err := warren.Connect(s.t.Context(), warren.Options{URL: s.URL})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

// Sandbox creates a sandbox.
func (s *Server) Sandbox(spec warren.Spec) *warren.Sandbox {
	s.t.Helper()
	sb, err := s.Client().Create(s.t.Context(), spec)
	if err != nil {
		s.t.Fatal(err)
	}
	return sb
}

// Engine is an engine of maps. All of its sandboxes share one guest; other ports are the host's loopback.
type Engine struct {
	// Fail, when set, is asked before each call; an error that it returns is the call's.
	Fail func(call string) error
	// Mark, when set, is what marking a workspace does.
	Mark func(context.Context) error

	socket string
	frozen atomic.Bool
	ended  context.Context
	mu     sync.Mutex
	boxes  map[warren.SandboxID]*engine.Sandbox
	keys   map[string]warren.SandboxID
	spaces map[warren.WorkspaceID]*engine.Workspace
	images map[string]*engine.Image
	repos  map[string]*engine.Repo
	tokens map[string]engine.Token // by value
	events []*engine.Event
	// previews by sandbox and port.
	previews map[string]engine.Preview
	change   chan struct{}
	conns    map[net.Conn]warren.SandboxID
	held     map[warren.SandboxID]int
	silent   map[warren.SandboxID]bool
	// Dials counts connections into sandboxes.
	Dials int
}

var _ server.Engine = (*Engine)(nil)

// NewEngine returns an engine with one image, "host", and starts its guest, which runs as this process's user.
func NewEngine(t testing.TB) *Engine {
	t.Helper()
	e := &Engine{
		socket: filepath.Join(t.TempDir(), "guest.sock"), ended: t.Context(),
		boxes: map[warren.SandboxID]*engine.Sandbox{}, keys: map[string]warren.SandboxID{}, spaces: map[warren.WorkspaceID]*engine.Workspace{},
		images: map[string]*engine.Image{"host": {Name: "host", Digest: "host:1", Kind: "host"}}, repos: map[string]*engine.Repo{},
		tokens: map[string]engine.Token{}, change: make(chan struct{}), conns: map[net.Conn]warren.SandboxID{}, held: map[warren.SandboxID]int{}, silent: map[warren.SandboxID]bool{},
	}
	l, err := net.Listen("unix", e.socket)
	if err != nil {
		t.Fatal(err)
	}
	user := "user"
	if os.Getuid() == 0 {
		user = "root"
	}
	g := guest.New(guest.Config{LogDir: t.TempDir(), Env: os.Environ(), User: user, Dir: t.TempDir()})
	go g.Serve(l)
	t.Cleanup(func() { g.Close() })
	return e
}

func (e *Engine) fail(call string) error {
	if e.Fail == nil {
		return nil
	}
	return e.Fail(call)
}

func newID(prefix string) string {
	var b [12]byte
	rand.Read(b[:])
	return prefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))[:19]
}

func missing(what, ref string) error {
	return &warren.Error{Kind: "not_found", Op: "find " + what, ID: ref, Message: "there is no " + what + " " + ref, Hint: "`warren ls` shows what there is"}
}

// find returns the sandbox itself. The caller holds mu.
func (e *Engine) find(c engine.Caller, ref string) (*engine.Sandbox, error) {
	for _, sb := range e.boxes {
		if (string(sb.ID) == ref || sb.Name != "" && sb.Name == ref) && (c.Operator || c.User == sb.Owner) {
			return sb, nil
		}
	}
	return nil, missing("sandbox", ref)
}

func (e *Engine) note(actor, action string, id warren.SandboxID) {
	e.events = append(e.events, &engine.Event{Seq: int64(len(e.events) + 1), Time: time.Now(), Actor: actor, Action: action, SandboxID: id})
	close(e.change)
	e.change = make(chan struct{})
}

// Create implements server.Engine.
func (e *Engine) Create(ctx context.Context, c engine.Caller, r engine.CreateRequest, progress func(engine.Progress)) (*engine.Sandbox, error) {
	progress(engine.Progress{Step: "create", Message: "on the way"})
	if err := e.fail("Create"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if id, ok := e.keys[c.User+"/"+r.IdempotencyKey]; ok {
		v := *e.boxes[id]
		return &v, nil
	}
	if strings.ContainsAny(r.Spec.Name, " /\n") {
		return nil, fmt.Errorf("name %q: %w", r.Spec.Name, warren.ErrInvalid)
	}
	if _, err := e.find(c, r.Spec.Name); err == nil && r.Spec.Name != "" {
		return nil, fmt.Errorf("sandbox %q: %w", r.Spec.Name, warren.ErrExists)
	}
	sb := &engine.Sandbox{
		ID: warren.SandboxID(newID("s")), Name: r.Spec.Name, State: engine.Running, Spec: r.Spec, Image: "host", Driver: "fake",
		WorkspaceID: warren.WorkspaceID(newID("w")), Labels: r.Spec.Labels, Created: time.Now(), Owner: c.User, Generation: 1, Network: "none",
	}
	e.boxes[sb.ID] = sb
	e.keys[c.User+"/"+r.IdempotencyKey] = sb.ID
	e.spaces[sb.WorkspaceID] = &engine.Workspace{ID: sb.WorkspaceID, SandboxID: sb.ID, Owner: c.User, Created: sb.Created}
	e.note(c.User, "sandbox.create", sb.ID)
	progress(engine.Progress{Step: "guest ready"})
	v := *sb
	return &v, nil
}

// Get implements server.Engine.
func (e *Engine) Get(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error) {
	if err := e.fail("Get"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return nil, err
	}
	v := *sb
	return &v, nil
}

// List implements server.Engine.
func (e *Engine) List(ctx context.Context, c engine.Caller, r engine.ListRequest) ([]*engine.Sandbox, string, error) {
	if err := e.fail("List"); err != nil {
		return nil, "", err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []*engine.Sandbox
	for _, sb := range e.boxes {
		ok := c.Operator || c.User == sb.Owner
		for k, v := range r.Labels {
			ok = ok && sb.Labels[k] == v
		}
		if ok && string(sb.ID) > r.PageToken && (len(r.States) == 0 || slices.Contains(r.States, sb.State)) {
			v := *sb
			list = append(list, &v)
		}
	}
	slices.SortFunc(list, func(a, b *engine.Sandbox) int { return strings.Compare(string(a.ID), string(b.ID)) })
	size := r.PageSize
	if size == 0 {
		size = 100
	}
	if len(list) > size {
		return list[:size], string(list[size-1].ID), nil
	}
	return list, "", nil
}

// Update implements server.Engine.
func (e *Engine) Update(ctx context.Context, c engine.Caller, r engine.UpdateRequest) (*engine.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, r.ID)
	if err != nil {
		return nil, err
	}
	if r.Name != nil {
		sb.Name = *r.Name
	}
	v := *sb
	return &v, nil
}

// Delete implements server.Engine.
func (e *Engine) Delete(ctx context.Context, c engine.Caller, r engine.DeleteRequest) error {
	if err := e.fail("Delete"); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, r.ID)
	if err != nil {
		if r.AllowMissing {
			return nil
		}
		return err
	}
	delete(e.boxes, sb.ID)
	e.cut(sb.ID)
	e.note(c.User, "sandbox.delete", sb.ID)
	return nil
}

// cut breaks all connections into a sandbox. The caller holds mu.
func (e *Engine) cut(id warren.SandboxID) {
	for conn, of := range e.conns {
		if of == id {
			conn.Close()
			delete(e.conns, conn)
		}
	}
}

// Kill makes a sandbox fail, as when its kernel dies.
func (e *Engine) Kill(id warren.SandboxID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.boxes[id].State = engine.Failed
	e.boxes[id].Failure = &engine.Failure{Reason: "killed", Time: time.Now()}
	e.cut(id)
}

// Restart implements server.Engine.
func (e *Engine) Restart(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return nil, err
	}
	e.cut(sb.ID)
	sb.State, sb.Failure = engine.Running, nil
	sb.Generation++
	v := *sb
	return &v, nil
}

// Pause implements server.Engine.
func (e *Engine) Pause(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error) {
	return e.turn(c, ref, engine.Running, engine.Paused)
}

// Resume implements server.Engine.
func (e *Engine) Resume(ctx context.Context, c engine.Caller, ref string) (*engine.Sandbox, error) {
	return e.turn(c, ref, engine.Paused, engine.Running)
}

func (e *Engine) turn(c engine.Caller, ref string, from, to engine.State) (*engine.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return nil, err
	}
	if sb.State != from && sb.State != to {
		return nil, fmt.Errorf("sandbox %s is %s: %w", ref, sb.State, warren.ErrState)
	}
	e.cut(sb.ID)
	sb.State, sb.ImageSize = to, 0
	if to == engine.Paused {
		sb.ImageSize = 4096
	}
	v := *sb
	return &v, nil
}

// Stats implements server.Engine.
func (e *Engine) Stats(ctx context.Context, c engine.Caller, ref string) (*engine.Stats, error) {
	if _, err := e.Get(ctx, c, ref); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("driver fake cannot measure: %w", errUnsupported)
}

// Watch implements server.Engine.
func (e *Engine) Watch(ctx context.Context, c engine.Caller, r engine.WatchRequest, yield func(*engine.Event) error) error {
	for at := int(r.After); ; {
		e.mu.Lock()
		var next []*engine.Event
		if at < len(e.events) {
			next = e.events[at:]
		}
		change := e.change
		e.mu.Unlock()
		for _, ev := range next {
			at++
			if r.ID != "" && string(ev.SandboxID) != r.ID {
				continue
			}
			if err := yield(ev); err != nil {
				return err
			}
		}
		if r.NoFollow {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-change:
		}
	}
}

// Resolve implements server.Engine.
func (e *Engine) Resolve(c engine.Caller, ref string) (warren.SandboxID, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return "", err
	}
	return sb.ID, nil
}

// Hold implements server.Engine.
func (e *Engine) Hold(ctx context.Context, c engine.Caller, ref string) (warren.SandboxID, engine.Use, error) {
	if err := e.fail("Hold"); err != nil {
		return "", nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sb, err := e.find(c, ref)
	if err != nil {
		return "", nil, err
	}
	if sb.State != engine.Running {
		return "", nil, fmt.Errorf("sandbox %s is %s: %w", ref, sb.State, warren.ErrState)
	}
	e.held[sb.ID]++
	return sb.ID, &use{e: e, id: sb.ID}, nil
}

// use implements engine.Use.
type use struct {
	e    *Engine
	id   warren.SandboxID
	over sync.Once
}

// Answered implements engine.Use.
func (u *use) Answered() { u.e.mark(u.id, false) }

// Unanswered implements engine.Use.
func (u *use) Unanswered() { u.e.mark(u.id, true) }

// End implements engine.Use.
func (u *use) End() {
	u.over.Do(func() {
		u.e.mu.Lock()
		defer u.e.mu.Unlock()
		u.e.held[u.id]--
	})
}

func (e *Engine) mark(id warren.SandboxID, silent bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.silent[id] = silent
}

// Silent reports whether the last use of a sandbox that told was left without an answer.
func (e *Engine) Silent(id warren.SandboxID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.silent[id]
}

// Freeze makes connections into sandboxes, those to come, take nothing and answer nothing.
func (e *Engine) Freeze() { e.frozen.Store(true) }

// Held returns how many uses of a sandbox are under way.
func (e *Engine) Held(id warren.SandboxID) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.held[id]
}

// Dial implements server.Engine.
func (e *Engine) Dial(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error) {
	id, use, err := e.Hold(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	use.End()
	var conn net.Conn
	if e.frozen.Load() {
		var other net.Conn
		conn, other = net.Pipe() // nobody reads or writes there
		context.AfterFunc(e.ended, func() { other.Close() })
	} else if port == warren.GuestPort {
		conn, err = net.Dial("unix", e.socket)
	} else {
		conn, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	}
	if err != nil {
		return nil, fmt.Errorf("nothing listens on port %d: %w", port, warren.ErrUnavailable)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.conns[conn] = id
	e.Dials++
	return conn, nil
}

// DialPooled implements server.Engine.
func (e *Engine) DialPooled(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error) {
	return e.Dial(ctx, c, ref, port)
}

// AccessToken implements server.Engine.
func (e *Engine) AccessToken(c engine.Caller, ref string) (string, error) {
	if _, err := e.Resolve(c, ref); err != nil {
		return "", err
	}
	return "guest-token", nil
}

// MarkFirstCommand implements server.Engine.
func (e *Engine) MarkFirstCommand(context.Context, warren.SandboxID) error { return nil }

// Instance implements server.Engine.
func (e *Engine) Instance() string { return "instance" }

// Drivers implements server.Engine.
func (e *Engine) Drivers() map[string]driver.Info {
	return map[string]driver.Info{"fake": {Name: "fake"}}
}

// Doctor implements server.Engine.
func (e *Engine) Doctor(context.Context) []driver.Check {
	return []driver.Check{{Name: "test", Status: "ok", Message: "fine"}}
}

// AddToken makes a token valid.
func (e *Engine) AddToken(value, user string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tokens[value] = engine.Token{ID: "t-" + user, User: user}
}

// Authenticate implements server.Engine.
func (e *Engine) Authenticate(ctx context.Context, value string) (engine.Caller, error) {
	if err := e.fail("Authenticate"); err != nil {
		return engine.Caller{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	t, ok := e.tokens[value]
	if !ok {
		return engine.Caller{}, fmt.Errorf("token: %w", warren.ErrDenied)
	}
	return engine.Caller{User: t.User}, nil
}

// CreateToken implements server.Engine.
func (e *Engine) CreateToken(ctx context.Context, c engine.Caller, user, description string, ttl time.Duration) (string, string, error) {
	if !c.Operator {
		return "", "", fmt.Errorf("tokens are the operator's: %w", warren.ErrDenied)
	}
	value := newID("warren_")
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tokens[value] = engine.Token{ID: newID("t"), User: user, Description: description, Created: time.Now()}
	return e.tokens[value].ID, value, nil
}

// ListTokens implements server.Engine.
func (e *Engine) ListTokens(ctx context.Context, c engine.Caller) ([]engine.Token, error) {
	if !c.Operator {
		return nil, fmt.Errorf("tokens are the operator's: %w", warren.ErrDenied)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []engine.Token
	for _, t := range e.tokens {
		list = append(list, t)
	}
	return list, nil
}

// DeleteToken implements server.Engine.
func (e *Engine) DeleteToken(ctx context.Context, c engine.Caller, id string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for value, t := range e.tokens {
		if t.ID == id && c.Operator {
			delete(e.tokens, value)
			return nil
		}
	}
	return missing("token", id)
}
