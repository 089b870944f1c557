package warren_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/server/servertest"
)

func TestConnect(t *testing.T) {
	s := servertest.New(t)
	tcp := s.TCP()
	s.Engine.AddToken("good", "alice")
	for _, test := range []struct {
		name string
		o    warren.Options
		want error
	}{
		{"socket", warren.Options{URL: s.URL}, nil},
		{"TCP", warren.Options{URL: tcp, Token: "good"}, nil},
		{"slash", warren.Options{URL: tcp + "/", Token: "good"}, nil},
		{"no token", warren.Options{URL: tcp}, warren.ErrDenied},
		{"bad token", warren.Options{URL: tcp, Token: "bad"}, warren.ErrDenied},
		{"token with a line end", warren.Options{URL: tcp, Token: "good\n"}, warren.ErrInvalid},
		{"nothing there", warren.Options{URL: "unix:///no/such/socket"}, warren.ErrUnavailable},
		{"nobody listens", warren.Options{URL: "http://127.0.0.1:1"}, warren.ErrUnavailable},
		{"no scheme", warren.Options{URL: "localhost:80"}, warren.ErrInvalid},
		{"other scheme", warren.Options{URL: "ftp://localhost"}, warren.ErrInvalid},
		{"path", warren.Options{URL: tcp + "/sub"}, warren.ErrInvalid},
		{"password", warren.Options{URL: "http://user:pw@localhost"}, warren.ErrInvalid},
		{"relative socket", warren.Options{URL: "unix://socket"}, warren.ErrInvalid},
		{"not a URL", warren.Options{URL: "http://[::1"}, warren.ErrInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := warren.Connect(t.Context(), test.o)
			if !errors.Is(err, test.want) || (err == nil) != (test.want == nil) {
				t.Fatalf("Connect: %v; want %v", err, test.want)
			}
			if err != nil && strings.Contains(err.Error(), "pw") {
				t.Errorf("the error shows the password: %v", err)
			}
			if err == nil {
				if v := c.ServerVersion(); v.Version != "test" || v.Instance == "" {
					t.Errorf("version %+v", v)
				}
				c.Close()
			}
		})
	}
	t.Setenv("WARREN_URL", tcp)
	t.Setenv("WARREN_TOKEN", "good")
	if c, err := warren.Connect(t.Context(), warren.Options{}); err != nil || c.URL() != tcp {
		t.Errorf("from the environment: %v", err)
	}
	// The environment's token is for the environment's server.
	if _, err := warren.Connect(t.Context(), warren.Options{URL: tcp}); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("the environment's token went to another server: %v", err)
	}
	t.Setenv("WARREN_URL", "")
	t.Setenv("WARREN_HOME", "/tmp/a home")
	if got := warren.DefaultURL(); got != "unix:///tmp/a%20home/warren.sock" {
		t.Errorf("DefaultURL() = %q", got)
	}
}

// TestBadInput gives every call what it must refuse, and looks for the right sentinel.
func TestBadInput(t *testing.T) {
	s := servertest.New(t)
	url := s.TCP()
	op, alice, bob := s.Client(), s.User(url, "alice"), s.User(url, "bob")
	ctx := t.Context()
	mine, err := alice.Create(ctx, warren.Spec{Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	huge := strings.Repeat("x", 5<<20)
	read := func(r io.ReadCloser, err error) error {
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = io.Copy(io.Discard, r)
		return err
	}
	first := func(seq func(func(warren.PortEvent, error) bool)) (err error) {
		seq(func(_ warren.PortEvent, e error) bool { err = e; return false })
		return err
	}
	// On an id that is not there, and on one that is somebody else's, which must look the same.
	type call = func(c *warren.Client, id string) error
	for name, f := range map[string]call{
		"Sandbox":         func(c *warren.Client, id string) error { _, err := c.Sandbox(ctx, id); return err },
		"DeleteSandbox":   func(c *warren.Client, id string) error { return c.DeleteSandbox(ctx, id, warren.DeleteOptions{}) },
		"Refresh":         func(c *warren.Client, id string) error { return c.Ref(id).Refresh(ctx) },
		"Update":          func(c *warren.Client, id string) error { return c.Ref(id).Update(ctx, warren.Change{}) },
		"Restart":         func(c *warren.Client, id string) error { return c.Ref(id).Restart(ctx) },
		"Pause":           func(c *warren.Client, id string) error { return c.Ref(id).Pause(ctx) },
		"Resume":          func(c *warren.Client, id string) error { return c.Ref(id).Resume(ctx) },
		"Stats":           func(c *warren.Client, id string) error { _, err := c.Ref(id).Stats(ctx); return err },
		"Workspace":       func(c *warren.Client, id string) error { _, err := c.Workspace(ctx, id); return err },
		"DeleteWorkspace": func(c *warren.Client, id string) error { return c.DeleteWorkspace(ctx, id, warren.DeleteOptions{}) },
		"CopyWorkspace":   func(c *warren.Client, id string) error { _, _, err := c.CopyWorkspace(ctx, id, ""); return err },
		"MarkWorkspace":   func(c *warren.Client, id string) error { return c.MarkWorkspace(ctx, id) },
		"Diff":            func(c *warren.Client, id string) error { return read(c.Diff(ctx, id, warren.DiffOptions{})) },
		"FormatPatch":     func(c *warren.Client, id string) error { return read(c.FormatPatch(ctx, id)) },
		"Commit": func(c *warren.Client, id string) error {
			_, err := c.Commit(ctx, id, warren.CommitOptions{})
			return err
		},
		"Push":    func(c *warren.Client, id string) error { _, err := c.Push(ctx, id, warren.PushOptions{}); return err },
		"Command": func(c *warren.Client, id string) error { return c.Ref(id).Command("true").Run(ctx) },
		"Attach": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).Attach(ctx, warren.AttachOptions{PID: 1})
			return err
		},
		"Processes": func(c *warren.Client, id string) error { _, err := c.Ref(id).Processes(ctx, true); return err },
		"Kill":      func(c *warren.Client, id string) error { return c.Ref(id).FindProcess(1 << 22).Kill(ctx) },
		"Resize": func(c *warren.Client, id string) error {
			return c.Ref(id).FindProcess(1<<22).Resize(ctx, warren.Size{})
		},
		"Session": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).Session(ctx, warren.SessionOptions{})
			return err
		},
		"Sessions":       func(c *warren.Client, id string) error { _, err := c.Ref(id).Sessions(ctx); return err },
		"Ports":          func(c *warren.Client, id string) error { _, err := c.Ref(id).Ports(ctx); return err },
		"WatchPorts":     func(c *warren.Client, id string) error { return first(c.Ref(id).WatchPorts(ctx)) },
		"PutServices":    func(c *warren.Client, id string) error { return c.Ref(id).PutServices(ctx) },
		"Services":       func(c *warren.Client, id string) error { _, err := c.Ref(id).Services(ctx, 0); return err },
		"StopService":    func(c *warren.Client, id string) error { return c.Ref(id).StopService(ctx, "x") },
		"RestartService": func(c *warren.Client, id string) error { return c.Ref(id).RestartService(ctx, "x") },
		"WatchLifecycle": func(c *warren.Client, id string) error {
			for _, err := range c.Ref(id).WatchLifecycle(ctx) {
				return err
			}
			return nil
		},
		"Preview": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).Preview(ctx, 80, warren.PreviewOptions{NoLink: true})
			return err
		},
		"Dial": func(c *warren.Client, id string) error { _, err := c.Ref(id).Dial(ctx, 80); return err },
		"Search": func(c *warren.Client, id string) error {
			for _, err := range c.Ref(id).Search(ctx, warren.Query{Pattern: "x"}) {
				return err
			}
			return nil
		},
		"Replace": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).Replace(ctx, warren.Replacement{})
			return err
		},
		"Stat":      func(c *warren.Client, id string) error { _, err := c.Ref(id).FS().Stat("tmp"); return err },
		"ReadFile":  func(c *warren.Client, id string) error { _, err := c.Ref(id).FS().ReadFile("etc/hostname"); return err },
		"WriteFile": func(c *warren.Client, id string) error { return c.Ref(id).FS().WriteFile("tmp/x", nil, 0) },
		"CopyTo": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).CopyTo(ctx, t.TempDir(), "/tmp/x", warren.CopyOptions{})
			return err
		},
		"CopyFrom": func(c *warren.Client, id string) error {
			_, err := c.Ref(id).CopyFrom(ctx, "/tmp", t.TempDir(), warren.CopyOptions{})
			return err
		},
	} {
		ids := []string{"unknown", "s" + strings.Repeat("0", 19), string(mine.ID), "mine"}
		for _, id := range ids {
			if err := f(bob, id); !errors.Is(err, warren.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s of %q: %v; want ErrNotFound", name, id, err)
			}
		}
		for _, id := range []string{"", "../x", "a/b", "a\nb", "ü", strings.Repeat("x", 4000)} {
			if err := f(bob, id); !errors.Is(err, warren.ErrNotFound) && !errors.Is(err, warren.ErrInvalid) {
				t.Errorf("%s of %.20q: %v; want ErrNotFound or ErrInvalid", name, id, err)
			}
		}
	}
	dead, err := alice.Create(ctx, warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	s.Engine.Kill(dead.ID)
	long := -time.Second
	for _, test := range []struct {
		name string
		err  error
		want error
	}{
		{"Create with a bad name", last(alice.Create(ctx, warren.Spec{Name: "a b"})), warren.ErrInvalid},
		{"Create with a name that is taken", last(alice.Create(ctx, warren.Spec{Name: "mine"})), warren.ErrExists},
		{"Create with a huge spec", last(alice.Create(ctx, warren.Spec{Env: map[string]string{"X": huge}})), warren.ErrExhausted},
		{"Create with a negative TTL", last(alice.Create(ctx, warren.Spec{TTL: -time.Second})), warren.ErrInvalid},
		{"Update with a negative TTL", mine.Update(ctx, warren.Change{TTL: &long}), warren.ErrInvalid},
		{"Stats of a driver without", last(mine.Stats(ctx)), errors.ErrUnsupported},
		{"Command in a failed sandbox", dead.Command("true").Run(ctx), warren.ErrState},
		{"FS of a failed sandbox", last(dead.FS().Stat("tmp")), warren.ErrState},
		{"Dial of a failed sandbox", last(dead.Dial(ctx, 80)), warren.ErrState},
		{"DeleteWorkspace in use", alice.DeleteWorkspace(ctx, "mine", warren.DeleteOptions{}), warren.ErrState},
		{"Commit without a message", last(mine.Commit(ctx, warren.CommitOptions{})), warren.ErrInvalid},
		{"Push of nothing", last(mine.Push(ctx, warren.PushOptions{})), warren.ErrState},
		{"FetchRepo of no URL", last(alice.FetchRepo(ctx, "", nil)), warren.ErrInvalid},
		{"DeleteRepo", alice.DeleteRepo(ctx, "unknown", warren.DeleteOptions{}), warren.ErrNotFound},
		{"PullImage with a bad reference", last(alice.PullImage(ctx, "a b", warren.PullOptions{})), warren.ErrInvalid},
		{"ImportImage without a name", last(alice.ImportImage(ctx, "", strings.NewReader("x"))), warren.ErrInvalid},
		{"ImportImage of a broken reader", last(alice.ImportImage(ctx, "x", io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), errReader{}))), errBroken},
		{"BootstrapImage of an unknown distribution", last(alice.BootstrapImage(ctx, warren.BootstrapOptions{})), errors.ErrUnsupported},
		{"Image", last(alice.Image(ctx, "unknown")), warren.ErrNotFound},
		{"DeleteImage of a user", alice.DeleteImage(ctx, "host", warren.DeleteOptions{}), warren.ErrDenied},
		{"DeleteImage", op.DeleteImage(ctx, "unknown", warren.DeleteOptions{}), warren.ErrNotFound},
		{"Doctor of a user", last(alice.Doctor(ctx)), warren.ErrDenied},
		{"DeleteToken", op.DeleteToken(ctx, "unknown"), warren.ErrNotFound},
		{"CreateToken of a user", func() error { _, _, err := alice.CreateToken(ctx, warren.TokenSpec{User: "root"}); return err }(), warren.ErrDenied},
		{"DeleteSandbox that may be missing", alice.DeleteSandbox(ctx, "unknown", warren.DeleteOptions{AllowMissing: true}), nil},
	} {
		if !errors.Is(test.err, test.want) || (test.err == nil) != (test.want == nil) {
			t.Errorf("%s: %v; want %v", test.name, test.err, test.want)
		}
	}
	for _, err := range alice.Sandboxes(ctx, warren.ListOptions{States: []warren.SandboxState{"odd"}}) {
		if !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("list of an unknown state: %v", err)
		}
	}
	for _, err := range alice.Sandboxes(ctx, warren.ListOptions{PageSize: 5000}) {
		if !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("list with a page of 5000: %v", err)
		}
	}
	for _, err := range alice.Tokens(ctx) {
		if !errors.Is(err, warren.ErrDenied) {
			t.Errorf("tokens of a user: %v", err)
		}
	}
}

func last[T any](_ T, err error) error { return err }

var errBroken = errors.New("broken")

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errBroken }

func TestLists(t *testing.T) {
	s := servertest.New(t)
	c := s.Client()
	want := map[warren.SandboxID]bool{}
	for range 7 {
		want[s.Sandbox(warren.Spec{Labels: map[string]string{"k": "v"}}).ID] = true
	}
	s.Sandbox(warren.Spec{})
	n := 0
	for sb, err := range c.Sandboxes(t.Context(), warren.ListOptions{Labels: map[string]string{"k": "v"}, PageSize: 3}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; !want[sb.ID] {
			t.Errorf("listed %s", sb.ID)
		}
		delete(want, sb.ID)
	}
	if n != 7 || len(want) != 0 {
		t.Errorf("listed %d; not %v", n, want)
	}
	for range c.Sandboxes(t.Context(), warren.ListOptions{PageSize: 1}) {
		break
	}
	r, err := c.Diff(t.Context(), string(s.Sandbox(warren.Spec{}).ID), warren.DiffOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != servertest.Patch {
		t.Errorf("a diff of %d bytes, %v", len(b), err)
	}
	r.Close()
	s.Engine.Fail = func(call string) error {
		if call == "Diff" {
			return warren.ErrExhausted
		}
		return nil
	}
	r, err = c.Diff(t.Context(), string(s.Sandbox(warren.Spec{}).ID), warren.DiffOptions{})
	if err == nil {
		_, err = io.ReadAll(r)
		r.Close()
	}
	if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("an error in the middle of a diff: %v", err)
	}
	img, err := c.ImportImage(t.Context(), "big", bytes.NewReader(make([]byte, 10<<20)))
	if err != nil || img.Size != 10<<20 {
		t.Errorf("ImportImage: %+v, %v", img, err)
	}
}

// TestEventsRestart follows events through restarts of the server and sees each once.
func TestEventsRestart(t *testing.T) {
	s := servertest.New(t)
	c := s.Client()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen atomic.Int64
	done := make(chan error, 1)
	go func() {
		next := int64(1)
		for e, err := range c.Events(ctx, warren.EventOptions{}) {
			if err != nil {
				done <- err
				return
			}
			if e.Seq != next {
				done <- errors.New("an event is lost or comes twice")
				return
			}
			if seen.Store(next); next == 12 {
				done <- nil
				return
			}
			next++
		}
	}()
	for i := range 12 {
		s.Sandbox(warren.Spec{})
		for seen.Load() != int64(i+1) && i%4 == 3 {
			select {
			case err := <-done:
				if err != nil || i != 11 {
					t.Fatal(err)
				}
				return
			case <-time.After(time.Millisecond):
			}
		}
		if i%4 == 3 {
			s.Restart(20 * time.Millisecond)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// lossy is a connection whose answers are lost.
type lossy struct{ net.Conn }

func (c lossy) Read(b []byte) (int, error) {
	c.Conn.Read(b)
	c.Close()
	return 0, io.ErrUnexpectedEOF
}

// TestLostAnswers does each thing once although its first answers are lost.
func TestLostAnswers(t *testing.T) {
	s := servertest.New(t)
	var lose atomic.Int32
	c, err := warren.Connect(t.Context(), warren.Options{URL: s.URL, Dial: func(ctx context.Context) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", s.Socket)
		if err == nil && lose.Add(-1) >= 0 {
			return lossy{conn}, nil
		}
		return conn, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	count := func() (n int) {
		for range c.Sandboxes(t.Context(), warren.ListOptions{}) {
			n++
		}
		return n
	}
	lost := func() {
		c.Close() // the idle connections
		lose.Store(2)
	}
	lost()
	sb, err := c.Create(t.Context(), warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	if n := count(); n != 1 {
		t.Errorf("one Create made %d sandboxes", n)
	}
	dir := t.TempDir()
	lost()
	if out, err := sb.Command("sh", "-c", "echo x >>"+dir+"/ran; cat "+dir+"/ran").Output(t.Context()); err != nil || string(out) != "x\n" {
		t.Errorf("a command ran more than once, or not: %q, %v", out, err)
	}
	lost()
	if _, err := c.Sandbox(t.Context(), string(sb.ID)); err != nil {
		t.Errorf("Sandbox: %v", err)
	}
	lost()
	if err := sb.Delete(t.Context()); err != nil {
		t.Errorf("Delete: %v", err)
	}
	if n := count(); n != 0 {
		t.Errorf("%d sandboxes after Delete", n)
	}
	lost()
	if err := sb.Delete(t.Context()); err != nil && !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Delete again: %v", err)
	}
}

func TestPorts(t *testing.T) {
	_, sb := newSandbox(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	list, err := sb.Ports(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, p := range list {
		found = found || p.Port == port
	}
	if !found {
		t.Errorf("port %d is not among %v", port, list)
	}
	for e, err := range sb.WatchPorts(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Port.Port == port && !e.Closed {
			l.Close()
		}
		if e.Port.Port == port && e.Closed {
			break
		}
	}
}

// somewhere is where previews are.
type somewhere struct{}

func (somewhere) URL(id warren.SandboxID, port uint16) string {
	return fmt.Sprintf("http://%d-%s.localhost/", port, id)
}

func (s somewhere) Link(p engine.Preview, ttl time.Duration) (string, time.Time) {
	return s.URL(p.SandboxID, p.Port) + fmt.Sprintf("?epoch=%d&ttl=%s", p.Epoch, ttl), time.Unix(1e9, 0)
}

// TestPreview asks for links and changes previews, on a server that has them and on one that has not.
func TestPreview(t *testing.T) {
	ctx := t.Context()
	yes, no := true, false
	for _, has := range []bool{true, false} {
		s := servertest.New(t, func(o *server.Options) {
			if has {
				o.Previews = somewhere{}
			}
		})
		c, err := warren.Connect(ctx, warren.Options{URL: s.URL})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		sb, err := c.Create(ctx, warren.Spec{})
		if err != nil {
			t.Fatal(err)
		}
		url := somewhere{}.URL(sb.ID, 3000)
		for _, tt := range []struct {
			o    warren.PreviewOptions
			want warren.Preview
		}{
			{warren.PreviewOptions{}, warren.Preview{Link: url + "?epoch=0&ttl=1h0m0s"}},
			{warren.PreviewOptions{Revoke: true, TTL: 24 * time.Hour, KeepHost: &yes}, warren.Preview{Link: url + "?epoch=1&ttl=24h0m0s", KeepHost: true}},
			{warren.PreviewOptions{NoLink: true}, warren.Preview{KeepHost: true}},
			{warren.PreviewOptions{Public: &yes}, warren.Preview{Link: url, KeepHost: true, Public: true}},
			{warren.PreviewOptions{}, warren.Preview{Link: url, KeepHost: true, Public: true}},
			{warren.PreviewOptions{Public: &no, KeepHost: &no}, warren.Preview{Link: url + "?epoch=1&ttl=1h0m0s"}},
		} {
			p, err := sb.Preview(ctx, 3000, tt.o)
			if !has {
				if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "preview.listen") {
					t.Errorf("%+v without previews: %v", tt.o, err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			want := tt.want
			want.Sandbox, want.Port, want.URL = sb.ID, 3000, url
			if want.Link != "" && !want.Public {
				want.Expires = time.Unix(1e9, 0)
			}
			if !p.Expires.Equal(want.Expires) {
				t.Errorf("%+v: expires %v, want %v", tt.o, p.Expires, want.Expires)
			}
			if p.Expires = want.Expires; *p != want {
				t.Errorf("%+v:\n%+v, want\n%+v", tt.o, *p, want)
			}
		}
		for _, ttl := range []time.Duration{-time.Second, time.Millisecond, 24*time.Hour + 1, 1 << 62} {
			if _, err := sb.Preview(ctx, 3000, warren.PreviewOptions{TTL: ttl}); !errors.Is(err, warren.ErrInvalid) {
				t.Errorf("ttl %v: %v", ttl, err)
			}
		}
		for _, port := range []int{-1, 0, 22, warren.GuestPort, 65536, 1 << 40} {
			if _, err := sb.Preview(ctx, port, warren.PreviewOptions{}); !errors.Is(err, warren.ErrInvalid) {
				t.Errorf("port %d: %v", port, err)
			}
		}
	}
}

func TestWatchLifecycle(t *testing.T) {
	_, sb := newSandbox(t)
	for e, err := range sb.WatchLifecycle(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		// Its host has said nothing to this guest that changes who it is.
		if e.Event != "" && e.Event != "start" {
			t.Errorf("the first event is %+v", e)
		}
		break
	}
}

func TestServices(t *testing.T) {
	_, sb := newSandbox(t)
	t.Cleanup(func() { sb.PutServices(context.Background()) })
	if err := sb.PutServices(t.Context(), warren.Service{Name: "sleeper", Command: []string{"sleep", "1000"},
		Check: &warren.ServiceCheck{Command: []string{"true"}, Interval: 50 * time.Millisecond}}); err != nil {
		t.Fatal(err)
	}
	all, err := sb.Services(t.Context(), 20*time.Second)
	if err != nil || len(all) != 1 || all[0].Name != "sleeper" || all[0].State != "ready" || all[0].PID == 0 {
		t.Fatalf("services: %+v, %v", all, err)
	}
	if err := sb.RestartService(t.Context(), "sleeper"); err != nil {
		t.Error(err)
	}
	if err := sb.StopService(t.Context(), "sleeper"); err != nil {
		t.Error(err)
	}
	if all, err = sb.Services(t.Context(), 0); err != nil || all[0].State != "stopped" {
		t.Errorf("after its stop: %+v, %v", all, err)
	}
	if err := sb.StopService(t.Context(), "nobody"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a missing one: %v", err)
	}
	if err := sb.PutServices(t.Context(), warren.Service{Name: "x"}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("no command: %v", err)
	}
}
