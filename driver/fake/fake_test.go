package fake

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// The driver's contract is tested by package drivertest. Here is what only the fake has.

func spec(id string) *driver.Spec {
	return &driver.Spec{ID: warren.SandboxID(id), Hostname: "h", Root: driver.Root{Digest: "sha256:x", Layers: []driver.Layer{{Dir: "/usr"}}},
		Limits: driver.Limits{CPUMillis: 1000, Memory: 1 << 30, Disk: 1 << 30, PIDs: 100}}
}

func TestPipe(t *testing.T) {
	a, b := pipe()
	big := strings.Repeat("0123456789", 50_000) // more than is buffered
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.WriteString(a, big); err != nil {
			t.Error(err)
		}
		a.CloseWrite()
	})
	got, err := io.ReadAll(b)
	if err != nil || string(got) != big {
		t.Errorf("%d bytes of %d, %v", len(got), len(big), err)
	}
	wg.Wait()
	// Half-closed: the other direction goes on.
	if _, err := io.WriteString(b, "back"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(a, buf); err != nil || string(buf) != "back" {
		t.Errorf("%q, %v", buf, err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after CloseWrite: %v", err)
	}
	a.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := a.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read past its deadline: %v", err)
	}
	a.SetDeadline(time.Time{})
	b.Close()
	if _, err := a.Read(buf); err != io.EOF {
		t.Errorf("read from a closed end: %v", err)
	}
	if _, err := b.Read(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read of one's own closed end: %v", err)
	}
}

func TestWriteDeadline(t *testing.T) {
	a, _ := pipe()
	a.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	n, err := a.Write(make([]byte, 2*maxBuffer))
	if n != maxBuffer || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d, %v", n, err)
	}
}

func TestWorldSurvives(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	w, err := OpenWorld(dir)
	if err != nil {
		t.Fatal(err)
	}
	d := New(Options{World: w})
	for _, id := range []string{"a", "b", "c"} {
		if err := d.Create(ctx, spec(id)); err != nil {
			t.Fatal(err)
		}
	}
	w.Kill("b", driver.Exit{Reason: "oom"})
	if err := d.Delete(ctx, "c"); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.List(ctx); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("list of a closed driver: %v", err)
	}
	if w, err = OpenWorld(dir); err != nil {
		t.Fatal(err)
	}
	d = New(Options{World: w})
	defer d.Close()
	list, err := d.List(ctx)
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	for _, s := range list {
		if want := map[warren.SandboxID]driver.State{"a": driver.Running, "b": driver.Dead}[s.ID]; s.State != want {
			t.Errorf("%s is %s, want %s", s.ID, s.State, want)
		}
	}
}

func TestFaults(t *testing.T) {
	ctx := context.Background()
	boom := errors.New("boom")
	d := New(Options{})
	defer d.Close()
	w := d.World()
	w.Inject(OpCreate, Fault{Err: boom, After: 1, Times: 2})
	for i, want := range []error{nil, boom, boom, nil} {
		if err := d.Create(ctx, spec(string(rune('a'+i)))); !errors.Is(err, want) {
			t.Errorf("create %d: %v, want %v", i, err, want)
		}
	}
	if w.Len() != 2 || w.Calls(OpCreate) != 4 {
		t.Errorf("%v after %d calls", w.IDs(), w.Calls(OpCreate))
	}
	w.Inject(OpCreate, Fault{Err: boom, Half: true})
	if err := d.Create(ctx, spec("half")); !errors.Is(err, boom) || w.Len() != 3 {
		t.Errorf("half a create: %v, %v", err, w.IDs())
	}
	w.Inject(OpDelete, Fault{Latency: time.Hour})
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if err := d.Delete(short, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a delete that hangs: %v", err)
	}
}
