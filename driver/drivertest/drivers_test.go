//go:build linux

package drivertest_test

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/drivertest"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/driver/gvisor"
	"github.com/warren-sandbox/warren/internal/image"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// limits that a busy test machine can give many times over.
var limits = driver.Limits{CPUMillis: 2000, Memory: 512 << 20, Disk: 512 << 20, PIDs: 500}

func TestFake(t *testing.T)        { drivertest.Run(t, fakeHarness(t)) }
func TestFakeWrapped(t *testing.T) { drivertest.Run(t, drivertest.Wrap(fakeHarness(t))) }

func fakeHarness(t *testing.T) drivertest.Harness {
	t.Helper()
	dir := t.TempDir()
	world, err := fake.OpenWorld(dir)
	if err != nil {
		t.Fatal(err)
	}
	l := &listeners{m: map[listenerKey]func(net.Conn){}}
	return drivertest.Harness{
		Name:     "fake",
		Boundary: "none",
		State:    []string{dir},
		New: func(testing.TB) driver.Driver {
			return fake.New(fake.Options{World: world, Dial: l.dial, CreateLatency: 20 * time.Millisecond})
		},
		Spec: func(_ testing.TB, id warren.SandboxID) *driver.Spec {
			return &driver.Spec{ID: id, Hostname: "fake", Limits: limits, Root: driver.Root{Digest: "fake:1"}}
		},
		Listen: func(_ testing.TB, _ driver.Driver, id warren.SandboxID, port uint16, handle func(net.Conn)) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.m[listenerKey{id, port}] = handle
		},
		Kill: func(_ testing.TB, _ driver.Driver, id warren.SandboxID) {
			world.Kill(id, driver.Exit{Reason: "killed", Message: "killed by the test"})
		},
		Lacks: map[string]string{
			"create-error-leaves-nothing": "it mounts nothing that could be missing",
			"mount-pinned":                "it mounts nothing",
		},
	}
}

// listeners answer ports of fake sandboxes.
type listeners struct {
	mu sync.Mutex
	m  map[listenerKey]func(net.Conn)
}

type listenerKey struct {
	id   warren.SandboxID
	port uint16
}

func (l *listeners) dial(_ context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	l.mu.Lock()
	handle := l.m[listenerKey{id, port}]
	l.mu.Unlock()
	if handle == nil {
		return nil, warren.ErrUnavailable
	}
	far, near, err := tcpPair()
	if err != nil {
		return nil, err
	}
	go handle(far)
	return near, nil
}

// tcpPair returns the two ends of a connection, with the half-close that a pipe lacks.
func tcpPair() (a, b net.Conn, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	if a, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		return nil, nil, err
	}
	if b, err = ln.Accept(); err != nil {
		a.Close()
		return nil, nil, err
	}
	return a, b, nil
}

func TestGVisor(t *testing.T)        { drivertest.Run(t, gvisorHarness(t)) }
func TestGVisorWrapped(t *testing.T) { drivertest.Run(t, brief(drivertest.Wrap(gvisorHarness(t)))) }
func TestGVisorEscape(t *testing.T)  { drivertest.Escape(t, gvisorHarness(t)) }

func brief(h drivertest.Harness) drivertest.Harness {
	h.Brief = true
	return h
}

func gvisorHarness(t *testing.T) drivertest.Harness {
	t.Helper()
	testenv.NeedsRoot(t)
	testenv.NeedsUserNamespaces(t)
	testenv.NeedsMountNamespace(t)
	runtime, guest := testenv.NeedsBinary(t, "warren-runtime"), testenv.NeedsBinary(t, "warren-guest")
	root := hostRoot(t)
	state := filepath.Join(t.TempDir(), "gvisor")
	opts := gvisor.Options{StateDir: state, RuntimePath: runtime, GuestPath: guest, Logger: slog.New(slog.DiscardHandler)}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		d, err := gvisor.New(opts)
		if err != nil {
			t.Error(err)
			return
		}
		if err := d.Shutdown(ctx); err != nil {
			t.Errorf("end the keeper: %v", err)
		}
	})
	return drivertest.Harness{
		Name:     "gvisor",
		Boundary: "kernel",
		Commands: true,
		State:    []string{state},
		Binaries: []string{runtime, guest},
		New: func(t testing.TB) driver.Driver {
			t.Helper()
			d, err := gvisor.New(opts)
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Spec: func(_ testing.TB, id warren.SandboxID) *driver.Spec {
			return &driver.Spec{ID: id, Hostname: "sandbox", Limits: limits, Root: root}
		},
		Processes: drivertest.ProcessesNaming,
	}
}

// hostRoot returns the root of the image "host".
func hostRoot(t *testing.T) driver.Root {
	t.Helper()
	store, err := image.Open(image.Options{Dir: filepath.Join(t.TempDir(), "images"), IDBase: driver.DiskIDBase})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	img, err := store.Resolve(t.Context(), image.HostName)
	if err != nil {
		t.Fatal(err)
	}
	return img.Root
}
