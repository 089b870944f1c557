package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestCreateRefuses(t *testing.T) {
	r := newRig(t, func(o *Options) {
		o.Max = driver.Limits{CPUMillis: 4000, Memory: 4 << 30, Disk: 20 << 30, PIDs: 10000}
		o.AllowMounts = []AllowedMount{{Dir: "/usr/share"}}
		o.Unavailable = map[string]string{"shut": "no engine answers"}
	})
	r.create(alice, Spec{Name: "taken"})
	long := strings.Repeat("x", 300)
	many := map[string]string{}
	for i := range 300 {
		many[fmt.Sprintf("K%d", i)] = "v"
	}
	for _, c := range []struct {
		name string
		spec Spec
		want error
		says string
	}{
		{"name with a path", Spec{Name: "../x"}, warren.ErrInvalid, `name "../x"`},
		{"name with dots", Spec{Name: "a/../../b"}, warren.ErrInvalid, "name"},
		{"name with NUL", Spec{Name: "a\x00b"}, warren.ErrInvalid, "name"},
		{"long name", Spec{Name: long}, warren.ErrInvalid, "1 to 63"},
		{"unicode dots", Spec{Name: "a\u2024b"}, warren.ErrInvalid, "name"},
		{"upper case", Spec{Name: "Box"}, warren.ErrInvalid, "name"},
		{"dash first", Spec{Name: "-rf"}, warren.ErrInvalid, "name"},
		{"name like an id", Spec{Name: "s" + strings.Repeat("a", 19)}, warren.ErrInvalid, "looks like an id"},
		{"name like a snapshot's id", Spec{Name: "p" + strings.Repeat("a", 19)}, warren.ErrInvalid, "looks like an id"},
		{"name taken", Spec{Name: "taken"}, warren.ErrExists, `the name "taken"`},
		{"image missing", Spec{Image: "nope"}, warren.ErrNotFound, "warren image pull nope"},
		{"image with NUL", Spec{Image: "a\x00"}, warren.ErrInvalid, "image"},
		{"driver missing", Spec{Driver: "docker"}, warren.ErrInvalid, "this server has fake"},
		{"driver not open", Spec{Driver: "shut"}, warren.ErrInvalid, "no engine answers; this server has fake; once that is mended, `warren shutdown`"},
		{"driver option", Spec{DriverOptions: map[string]string{"privileged": "1"}}, warren.ErrInvalid, "privileged"},
		{"too little memory", Spec{Resources: Resources{MemoryBytes: 1024}}, warren.ErrInvalid, "the least is 32 MiB"},
		{"too much memory", Spec{Resources: Resources{MemoryBytes: 8 << 30}}, warren.ErrInvalid, "at most 4 GiB"},
		{"too many processors", Spec{Resources: Resources{CPUMillis: 64000}}, warren.ErrInvalid, "at most 4"},
		{"negative disk", Spec{Resources: Resources{DiskBytes: -1}}, warren.ErrInvalid, "disk"},
		{"too few pids", Spec{Resources: Resources{PIDs: 1}}, warren.ErrInvalid, "pids"},
		{"env name", Spec{Env: map[string]string{"A=B": "c"}}, warren.ErrInvalid, `env "A=B"`},
		{"empty env name", Spec{Env: map[string]string{"": "c"}}, warren.ErrInvalid, "env"},
		{"env value with NUL", Spec{Env: map[string]string{"A": "secret\x00"}}, warren.ErrInvalid, `env "A"`},
		{"too many env", Spec{Env: many}, warren.ErrInvalid, "at most 256"},
		{"large env", Spec{Env: map[string]string{"A": strings.Repeat("x", 200<<10)}}, warren.ErrInvalid, "at most 128 KiB"},
		{"label", Spec{Labels: map[string]string{"a": "b\n"}}, warren.ErrInvalid, "label"},
		{"empty label", Spec{Labels: map[string]string{"": "b"}}, warren.ErrInvalid, "label"},
		{"restart", Spec{Restart: "always"}, warren.ErrInvalid, "never or on-failure"},
		{"negative ttl", Spec{TTL: -1}, warren.ErrInvalid, "ttl"},
		{"short idle", Spec{IdleTimeout: time.Millisecond}, warren.ErrInvalid, "idle timeout"},
		{"huge ttl", Spec{TTL: 200 * 365 * 24 * time.Hour}, warren.ErrInvalid, "ttl"},
		{"repo and workspace", Spec{Repo: &RepoSource{URL: "https://x/y"}, WorkspaceID: "w"}, warren.ErrInvalid, "one of the two"},
		{"workspace missing", Spec{WorkspaceID: "nope"}, warren.ErrNotFound, `workspace "nope"`},
		{"local repo", Spec{Repo: &RepoSource{URL: "/etc"}}, warren.ErrDenied, "path on the server"},
		{"file URL", Spec{Repo: &RepoSource{URL: "file:///etc"}}, warren.ErrDenied, "path on the server"},
		{"transport helper", Spec{Repo: &RepoSource{URL: "ext::sh -c id"}}, warren.ErrInvalid, `kind "ext::" are not allowed; give an https, http or ssh URL`},
		{"unknown scheme", Spec{Repo: &RepoSource{URL: "ftp://x/y"}}, warren.ErrInvalid, `kind "ftp://" are not allowed`},
		{"path with colons", Spec{Repo: &RepoSource{URL: "/a::b://c"}}, warren.ErrDenied, "path on the server"},
		{"relative repo", Spec{Repo: &RepoSource{URL: "../x:y"}}, warren.ErrDenied, "path"},
		{"repo option", Spec{Repo: &RepoSource{URL: "--upload-pack=x"}}, warren.ErrInvalid, "-"},
		{"dirty remote", Spec{Repo: &RepoSource{URL: "https://x/y", Dirty: true}}, warren.ErrInvalid, "uncommitted"},
		{"no repo", Spec{Repo: &RepoSource{}}, warren.ErrInvalid, "repo"},
		{"ref missing", Spec{Repo: &RepoSource{URL: "https://x/y", Ref: "missing"}}, warren.ErrNotFound, "missing"},
		{"mount of the root", Spec{Mounts: []Mount{{Source: "/", Target: "/x"}}}, warren.ErrDenied, "operator"},
		{"mount of /etc", Spec{Mounts: []Mount{{Source: "/etc", Target: "/x"}}}, warren.ErrDenied, "operator"},
		{"mount beside an allowed one", Spec{Mounts: []Mount{{Source: "/usr/share2", Target: "/x"}}}, warren.ErrDenied, "operator"},
		{"mount out of an allowed one", Spec{Mounts: []Mount{{Source: "/usr/share/../lib", Target: "/x"}}}, warren.ErrInvalid, "absolute path"},
		{"mount source missing", Spec{Mounts: []Mount{{Source: "/usr/share/no-such-dir", Target: "/x"}}}, warren.ErrInvalid, "no such directory"},
		{"relative target", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "x"}}}, warren.ErrInvalid, "target"},
		{"target /", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/"}}}, warren.ErrInvalid, "target"},
		{"target /proc", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/proc/x"}}}, warren.ErrInvalid, "target"},
		{"target /.warren", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/.warren/guest"}}}, warren.ErrInvalid, "target"},
		{"target /workspace", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/workspace"}}}, warren.ErrInvalid, "hide the workspace"},
		{"target /home", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/home"}}}, warren.ErrInvalid, "hide the workspace"},
		{"target twice", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/x"}, {Source: "/usr/share", Target: "/x"}}}, warren.ErrInvalid, "twice"},
		{"target above another", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/x/y"}, {Source: "/usr/share", Target: "/x"}}}, warren.ErrInvalid, "hide the mount"},
		{"unclean target", Spec{Mounts: []Mount{{Source: "/usr/share", Target: "/x/../proc"}}}, warren.ErrInvalid, "target"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := r.Create(context.Background(), alice, CreateRequest{Spec: c.spec}, nil)
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q does not say %q", err, c.says)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("%q tells a value", err)
			}
		})
	}
	if _, err := r.Create(context.Background(), alice, CreateRequest{IdempotencyKey: long}, nil); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a long key: %v", err)
	}
	r.delete(alice, "taken")
	r.empty()
}

func TestMounts(t *testing.T) {
	dir := t.TempDir()
	allowed := filepath.Join(dir, "allowed")
	for _, d := range []string{"allowed/in/ner", "secret"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"allowed/link": "../secret", "allowed/self": "in"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(allowed, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(o *Options) { o.AllowMounts = []AllowedMount{{Dir: allowed}} })
	for _, c := range []struct {
		source string
		caller Caller
		want   error
	}{
		{"allowed/in/ner", alice, nil},
		{"allowed", alice, nil},
		{"allowed/link", alice, warren.ErrInvalid},
		{"allowed/self", alice, warren.ErrInvalid},
		{"allowed/self/ner", alice, warren.ErrInvalid},
		{"allowed/file", alice, warren.ErrInvalid},
		{"secret", alice, warren.ErrDenied},
		{"secret", operator, nil},
		{"allowed/link", operator, warren.ErrInvalid},
	} {
		sb, err := r.Create(context.Background(), c.caller, CreateRequest{Spec: Spec{Mounts: []Mount{{Source: filepath.Join(dir, c.source), Target: "/mnt/x"}}}}, nil)
		if !errors.Is(err, c.want) {
			t.Errorf("%s for %s: %v, want %v", c.source, c.caller.User, err, c.want)
		}
		if err == nil {
			if _, err := r.Restart(context.Background(), c.caller, string(sb.ID)); err != nil {
				t.Errorf("restart with %s: %v", c.source, err)
			}
			r.delete(c.caller, string(sb.ID))
		}
	}
	r.empty()
}

// TestWritableMounts lets others than the operator write only where it was said, and nowhere as root.
func TestWritableMounts(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := t.TempDir()
	for d, uid := range map[string]int{"ro": 1234, "ro/rw": 1234, "rw": 1234, "rw/ro": 1234, "rw/root": 0, "rw/user": 1234, "root": 0, "root/user": 1234} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(dir, d), uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	r := newRig(t, func(o *Options) {
		for d, writable := range map[string]bool{"ro": false, "ro/rw": true, "rw": true, "rw/ro": false, "root": true} {
			o.AllowMounts = append(o.AllowMounts, AllowedMount{filepath.Join(dir, d), writable})
		}
	})
	for _, c := range []struct {
		source   string
		caller   Caller
		writable bool
		want     string
	}{
		{"ro", alice, false, ""},
		{"ro", alice, true, "read-only"},
		{"ro/rw", alice, true, ""},
		{"rw/ro", alice, false, ""},
		{"rw/ro", alice, true, "read-only"},
		{"rw", alice, true, "read-only"}, // it holds rw/ro
		{"rw", alice, false, ""},
		{"rw/user", alice, true, ""},
		{"rw/root", alice, true, "belongs to root"},
		{"rw/root", alice, false, ""},
		{"root", alice, true, "belongs to root"},
		{"root", alice, false, ""},
		{"root/user", alice, true, ""},
		{"ro", operator, true, ""},
		{"root", operator, true, ""},
	} {
		sb, err := r.Create(context.Background(), c.caller, CreateRequest{Spec: Spec{Mounts: []Mount{{Source: filepath.Join(dir, c.source), Target: "/mnt/x", Writable: c.writable}}}}, nil)
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, warren.ErrDenied) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s for %s, writable %v: %v, want %q", c.source, c.caller.User, c.writable, err, c.want)
		}
		if err == nil {
			r.delete(c.caller, string(sb.ID))
		}
	}
	// What has become root's since is refused by the next start.
	source := filepath.Join(dir, "rw/user")
	sb := r.create(alice, Spec{Mounts: []Mount{{Source: source, Target: "/mnt/x", Writable: true}}})
	if err := os.Chown(source, 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restart(context.Background(), alice, string(sb.ID)); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("restart with a mount that belongs to root now: %v", err)
	}
	r.delete(alice, string(sb.ID))
	r.empty()
}

// TestMountSwap turns a mount's source into a link to a secret directory and back while sandboxes are created. What a
// driver gets is the directory, or the create is refused; never the secret. Its twin opens by path alone, and must catch
// the secret, or the race was none.
func TestMountSwap(t *testing.T) {
	dir := t.TempDir()
	source, secret, aside := filepath.Join(dir, "source"), filepath.Join(dir, "secret"), filepath.Join(dir, "aside")
	for _, d := range []string{source, secret} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(secret, aside); err != nil {
		t.Fatal(err)
	}
	want, err := os.Stat(source)
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, nil)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tmp := filepath.Join(dir, "tmp")
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, step := range [][2]string{{source, tmp}, {aside, source}, {source, aside}, {tmp, source}} {
				if err := os.Rename(step[0], step[1]); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	opened, refused, fooled := 0, 0, 0
	for deadline := time.Now().Add(20 * time.Second); (opened+refused < 1000 || opened < 100 || refused == 0 || fooled == 0) && time.Now().Before(deadline); {
		f, err := r.openSource(operator, Mount{Source: source})
		if err != nil {
			refused++
		} else {
			got, err := f.Stat()
			f.Close()
			if err != nil || !os.SameFile(got, want) {
				t.Fatalf("the secret directory was opened (%v)", err)
			}
			opened++
		}
		if got, err := os.Stat(source); err == nil && !os.SameFile(got, want) {
			fooled++
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("opened %d, refused %d; the twin was fooled %d times", opened, refused, fooled)
	if opened+refused < 1000 || opened == 0 || refused == 0 {
		t.Errorf("opened %d, refused %d: too few tries, or all of one kind", opened, refused)
	}
	if fooled == 0 {
		t.Error("the twin was never fooled: the test proves nothing")
	}
}

func TestIdempotency(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	r.world.Inject(fake.OpCreate, fake.Fault{Latency: 50 * time.Millisecond})
	var wg sync.WaitGroup
	ids := make([]warren.SandboxID, 20)
	for i := range ids {
		wg.Go(func() {
			sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "one"}, IdempotencyKey: "k"}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("one key made %s and %s", ids[0], id)
		}
	}
	if r.world.Len() != 1 {
		t.Errorf("%d sandboxes", r.world.Len())
	}
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "two"}, IdempotencyKey: "k"}, nil); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("another request with the same key: %v", err)
	}
	// Another user's key is another key, and the name is free there.
	sb, err := r.Create(ctx, bob, CreateRequest{Spec: Spec{Name: "one"}, IdempotencyKey: "k"}, nil)
	if err != nil || sb.ID == ids[0] {
		t.Errorf("bob got %v, %v", sb, err)
	}
	r.stop()
	r.start()
	if sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "one"}, IdempotencyKey: "k"}, nil); err != nil || sb.ID != ids[0] {
		t.Errorf("after a restart: %v, %v", sb, err)
	}
	r.delete(alice, "one")
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "one"}, IdempotencyKey: "k"}, nil); !errors.Is(err, warren.ErrState) {
		t.Errorf("the sandbox of the key is gone: %v", err)
	}
	// A create that failed was none.
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Image: "later"}, IdempotencyKey: "f"}, nil); !errors.Is(err, warren.ErrNotFound) {
		t.Fatal(err)
	}
	r.images.add("later", "oci")
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Image: "later"}, IdempotencyKey: "f"}, nil); err != nil {
		t.Errorf("a retry of a failed create: %v", err)
	}
}

// TestCancel gives up creates at every moment; nothing may be left of those.
func TestCancel(t *testing.T) {
	r := newRig(t, nil)
	r.world.Inject(fake.OpCreate, fake.Fault{Latency: 3 * time.Millisecond})
	r.spaces.slow = 2 * time.Millisecond
	made := 0
	for i := range 60 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*200*time.Microsecond)
		sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "x"}}, nil)
		cancel()
		if err == nil {
			made++
			r.delete(alice, string(sb.ID))
		}
		r.empty()
	}
	t.Logf("%d of 60 were made", made)
}

// TestCancelShared: one of two callers leaves; the other gets the sandbox.
func TestCancelShared(t *testing.T) {
	r := newRig(t, nil)
	r.repos.hold = make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	req := CreateRequest{Spec: Spec{Repo: &RepoSource{URL: "https://x/y"}}, IdempotencyKey: "k"}
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := r.Create(ctx, alice, req, nil)
		first <- err
	}()
	eventually(t, "the first is on its way", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.flights) == 1
	})
	go func() {
		_, err := r.Create(context.Background(), alice, req, nil)
		second <- err
	}()
	eventually(t, "the second has joined", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, f := range r.flights {
			return f.refs == 2
		}
		return false
	})
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first got %v", err)
	}
	close(r.repos.hold)
	if err := <-second; err != nil {
		t.Errorf("the second got %v", err)
	}
}

func TestUndo(t *testing.T) {
	boom := fmt.Errorf("boom: %w", warren.ErrUnavailable)
	for _, c := range []struct {
		name   string
		break_ func(r *rig)
		want   error
	}{
		{"repo", func(r *rig) { r.repos.err = boom }, warren.ErrUnavailable},
		{"checkout", func(r *rig) { r.spaces.populate = boom }, warren.ErrUnavailable},
		{"driver create", func(r *rig) { r.world.Inject(fake.OpCreate, fake.Fault{Err: boom}) }, warren.ErrUnavailable},
		{"driver create leaves something", func(r *rig) { r.world.Inject(fake.OpCreate, fake.Fault{Err: boom, Half: true}) }, warren.ErrUnavailable},
		{"guest", func(r *rig) { r.world.Inject(fake.OpDial, fake.Fault{Err: boom}) }, warren.ErrUnavailable},
		{"driver full", func(r *rig) {
			r.world.Inject(fake.OpCreate, fake.Fault{Err: fmt.Errorf("disk: %w", warren.ErrExhausted)})
		}, warren.ErrExhausted},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, nil)
			c.break_(r)
			_, err := r.Create(context.Background(), alice, CreateRequest{Spec: Spec{Name: "x", Repo: &RepoSource{URL: "https://x/y"}}}, nil)
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			r.empty()
		})
	}
	t.Run("undo fails too", func(t *testing.T) {
		r := newRig(t, nil)
		r.world.Inject(fake.OpCreate, fake.Fault{Err: boom, Half: true})
		r.world.Inject(fake.OpDelete, fake.Fault{Err: boom, Times: 3})
		if _, err := r.Create(context.Background(), alice, CreateRequest{Spec: Spec{Name: "x"}}, nil); !errors.Is(err, warren.ErrUnavailable) {
			t.Fatal(err)
		}
		eventually(t, "the undo succeeds in the end", func() bool { return r.leftovers() == nil })
	})
	// A caller that asks again while nothing can be removed hears why at once, as it does the first time.
	t.Run("retry while the undo fails", func(t *testing.T) {
		r := newRig(t, nil)
		r.world.Inject(fake.OpCreate, fake.Fault{Err: boom, Half: true})
		r.world.Inject(fake.OpDelete, fake.Fault{Err: fmt.Errorf("gone: %w", warren.ErrUnavailable)})
		req := CreateRequest{Spec: Spec{Name: "x"}, IdempotencyKey: "k"}
		for i := range 3 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			_, err := r.Create(ctx, alice, req, nil)
			cancel()
			if !errors.Is(err, boom) {
				t.Fatalf("try %d: got %v, want %v", i+1, err, boom)
			}
		}
		r.world.Inject(fake.OpCreate, fake.Fault{})
		r.world.Inject(fake.OpDelete, fake.Fault{})
		eventually(t, "the undo succeeds in the end", func() bool { return r.leftovers() == nil })
		sb, err := r.Create(context.Background(), alice, req, nil)
		if err != nil || sb.State != Running {
			t.Fatalf("after the undo: %+v, %v", sb, err)
		}
	})
	// Between the store and the memory that forget what was undone, a caller that asks again finds neither.
	t.Run("retry in the moment of the undo", func(t *testing.T) {
		if err := failpoint.Set("engine.delete.gone=sleep:200ms"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(failpoint.Clear)
		r := newRig(t, nil)
		r.world.Inject(fake.OpCreate, fake.Fault{Err: boom, Half: true, Times: 1})
		r.world.Inject(fake.OpDelete, fake.Fault{Err: boom, Times: 1})
		req := CreateRequest{Spec: Spec{Name: "x"}, IdempotencyKey: "k"}
		for {
			sb, err := r.Create(context.Background(), alice, req, nil)
			if err == nil && sb.Name == "x" {
				break
			}
			if !errors.Is(err, boom) {
				t.Fatalf("got %+v, %v; want %v, or the sandbox", sb, err, boom)
			}
		}
	})
}

func TestHostileGuest(t *testing.T) {
	for name, answer := range map[string]string{
		"nothing":       "",
		"garbage":       "\x00\x01\x02 garbage\r\n\r\n",
		"refusal":       "HTTP/1.1 500 no\r\nContent-Length: 3\r\n\r\nbad",
		"endless":       "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20),
		"half a header": "HTTP/1.1 204",
	} {
		t.Run(name, func(t *testing.T) {
			r := prepareRig(t, t.TempDir(), func(o *Options) { o.BootTimeout = 200 * time.Millisecond })
			r.fopts.GuestConn = func(_ warren.SandboxID, c net.Conn) {
				defer c.Close()
				io.WriteString(c, answer)
				io.Copy(io.Discard, c)
			}
			r.start()
			defer r.stop()
			_, err := r.Create(context.Background(), alice, CreateRequest{}, nil)
			if !errors.Is(err, warren.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			r.empty()
		})
	}
}

func TestBudgets(t *testing.T) {
	r := newRig(t, func(o *Options) {
		o.Defaults = driver.Limits{CPUMillis: 1000, Memory: 1 << 30, Disk: 1 << 30, PIDs: 100}
		o.Budgets = Budgets{
			PerUser: Budget{Sandboxes: 3, CPUMillis: 4000, Memory: 4 << 30, Disk: 8 << 30},
			Users:   map[string]Budget{"bob": {Sandboxes: 1}},
			Total:   Budget{Sandboxes: 4},
		}
	})
	ctx := context.Background()
	refused := func(c Caller, s Spec, resource string) {
		t.Helper()
		_, err := r.Create(ctx, c, CreateRequest{Spec: s}, nil)
		var b *BudgetError
		if !errors.Is(err, warren.ErrExhausted) || !errors.As(err, &b) || b.Resource != resource {
			t.Errorf("got %v, want the budget %q", err, resource)
		}
	}
	refused(alice, Spec{Resources: Resources{CPUMillis: 5000}}, "processors per user (limit 4 CPU)")
	refused(alice, Spec{Resources: Resources{MemoryBytes: 5 << 30}}, "memory per user (limit 4 GiB)")
	refused(alice, Spec{Resources: Resources{DiskBytes: 9 << 30}}, "disk per user (limit 8 GiB)")
	for i := range 3 {
		r.create(alice, Spec{Name: fmt.Sprint("a", i)})
	}
	refused(alice, Spec{}, "sandboxes per user (limit 3)")
	r.create(bob, Spec{Name: "b"})
	refused(bob, Spec{}, "sandboxes per user (limit 1)")
	refused(operator, Spec{}, "sandboxes of this server (limit 4)")
	// A failed one gives back processors and memory, which another may take; then it cannot be restarted.
	id, err := r.Resolve(alice, "a0")
	if err != nil {
		t.Fatal(err)
	}
	r.world.Kill(id, driver.Exit{Reason: "oom"})
	eventually(t, "a0 failed", func() bool { sb, err := r.Get(ctx, alice, "a0"); return err == nil && sb.State == Failed })
	r.delete(alice, "a1")
	r.create(alice, Spec{Name: "big", Resources: Resources{CPUMillis: 3000}})
	if _, err := r.Restart(ctx, alice, "a0"); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("restart over the budget: %v", err)
	}
	r.stop()
	r.start()
	refused(alice, Spec{}, "sandboxes per user (limit 3)")
	r.delete(alice, "big")
	if _, err := r.Restart(ctx, alice, "a0"); err != nil {
		t.Error(err)
	}
	for _, n := range []string{"a0", "a2"} {
		r.delete(alice, n)
	}
	r.delete(bob, "b")
	r.empty()
	// 20 creates at once on 3 places.
	var wg sync.WaitGroup
	var mu sync.Mutex
	made := 0
	for range 20 {
		wg.Go(func() {
			if _, err := r.Create(ctx, alice, CreateRequest{}, nil); err == nil {
				mu.Lock()
				made++
				mu.Unlock()
			} else if !errors.Is(err, warren.ErrExhausted) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made != 3 {
		t.Errorf("%d sandboxes were made, the budget is 3", made)
	}
}

func TestQueueIsFair(t *testing.T) {
	q := newQueue(1)
	ctx := context.Background()
	if err := q.acquire(ctx, "x"); err != nil {
		t.Fatal(err)
	}
	order := make(chan string, 20)
	var wg sync.WaitGroup
	add := func(user string, n int) {
		for range n {
			want := q.len() + 1
			wg.Go(func() {
				if err := q.acquire(ctx, user); err != nil {
					t.Error(err)
					return
				}
				order <- user
				q.release()
			})
			eventually(t, "it waits", func() bool { return q.len() == want })
		}
	}
	add("greedy", 10)
	add("modest", 1)
	gone, cancel := context.WithCancel(ctx)
	left := make(chan error)
	go func() { left <- q.acquire(gone, "modest") }()
	eventually(t, "it waits", func() bool { return q.len() == 12 })
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	q.release()
	wg.Wait()
	close(order)
	at := 0
	for u := range order {
		at++
		if u == "modest" {
			break
		}
	}
	if at > 2 {
		t.Errorf("the modest user was served as number %d", at)
	}
	if q.len() != 0 || q.free != 1 {
		t.Errorf("%d wait, %d are free", q.len(), q.free)
	}
}

func FuzzName(f *testing.F) {
	for _, s := range []string{"a", "box-1", "../x", "a\x00", "s0123456789012345678", "", "é", strings.Repeat("a", 64)} {
		f.Add(s)
	}
	e := &Engine{boxes: map[warren.SandboxID]*sandbox{}, names: map[ownedName]*sandbox{}, spaces: map[warren.WorkspaceID]*workspace{}, spaceNames: map[ownedName]*workspace{}}
	f.Fuzz(func(t *testing.T, s string) {
		if validName(s) == nil {
			if len(s) > 63 || strings.ContainsAny(s, "/.\x00 ") || filepath.Base(s) != s || isID(s, 's') {
				t.Errorf("%q passes for a name", s)
			}
		}
		if isID(s, 's') && filepath.Base(s) != s {
			t.Errorf("%q passes for an id", s)
		}
		if _, err := e.find(alice, s); err == nil {
			t.Errorf("%q was found where nothing is", s)
		}
		if _, err := e.findWorkspace(operator, s); err == nil {
			t.Errorf("%q was found where nothing is", s)
		}
		local(s)
		checkTargets([]Mount{{Source: s, Target: s}})
		page(10, s)
	})
}
