package engine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// copying is a driver whose sandboxes work on copies.
type copying struct {
	driver.Driver

	mu     sync.Mutex
	synced []warren.SandboxID
	err    error
	// files had the checkout's file when Create was called.
	files []bool
}

func (c *copying) Unwrap() driver.Driver { return c.Driver }

func (c *copying) Copies(context.Context) bool { return true }

func (c *copying) Sync(_ context.Context, id warren.SandboxID) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = append(c.synced, id)
	return c.err
}

func (c *copying) Create(ctx context.Context, spec *driver.Spec) error {
	_, err := os.Stat(filepath.Join(spec.Mounts[0].Source, "README"))
	c.mu.Lock()
	c.files = append(c.files, err == nil)
	c.mu.Unlock()
	return c.Driver.Create(ctx, spec)
}

func (c *copying) take() []warren.SandboxID {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.synced
	c.synced = nil
	return s
}

// TestCopiedWorkspace has a driver whose sandboxes work on copies: the checkout is there before the sandbox is made, and whoever
// reads the workspace gets what the sandbox wrote.
func TestCopiedWorkspace(t *testing.T) {
	var d *copying
	r := newRig(t, func(o *Options) {
		d = &copying{Driver: o.Drivers["fake"]}
		o.Drivers["fake"] = d
	})
	r.spaces.mu.Lock()
	r.spaces.slow = 50 * time.Millisecond
	r.spaces.mu.Unlock()
	ctx := t.Context()
	sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "box"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(d.files, []bool{true}) {
		t.Errorf("the checkout was there at the create: %v", d.files)
	}
	reads := map[string]func() error{
		"diff":   func() error { return r.Diff(ctx, alice, "box", DiffOptions{}, io.Discard) },
		"mark":   func() error { return r.MarkWorkspace(ctx, alice, "box") },
		"patch":  func() error { return r.FormatPatch(ctx, alice, "box", &bytes.Buffer{}) },
		"commit": func() error { _, err := r.Commit(ctx, alice, CommitRequest{ID: "box", Message: "m"}); return err },
		"copy": func() error {
			w, _, err := r.CopyWorkspace(ctx, alice, "box", "")
			if err == nil {
				err = r.DeleteWorkspace(ctx, alice, string(w.ID), false)
			}
			return err
		},
	}
	for name, read := range reads {
		if err := read(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := d.take(); !slices.Equal(got, []warren.SandboxID{sb.ID}) {
			t.Errorf("%s synced %v, want the sandbox once", name, got)
		}
	}
	d.mu.Lock()
	d.err = warren.ErrUnavailable
	d.mu.Unlock()
	for name, read := range reads {
		if err := read(); !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("%s of what cannot be read back: %v, want ErrUnavailable", name, err)
		}
	}
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "box"}); err != nil {
		t.Fatal(err)
	}
	r.empty()
}

// TestWhoCanPause asks a driver that keeps no memory: the refusal names one that does.
func TestWhoCanPause(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Drivers["plain"] = struct{ driver.Driver }{o.Drivers["fake"]} })
	if _, err := r.snapshotter("plain"); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "driver plain cannot") || !strings.Contains(err.Error(), "; fake can") {
		t.Errorf("%v", err)
	}
}

// gate is a reader that takes nothing until it is opened.
type gate struct {
	came, open chan struct{}
	got        bytes.Buffer
}

func (g *gate) Write(p []byte) (int, error) {
	close(g.came)
	<-g.open
	return g.got.Write(p)
}

// TestSlowReader has readers that take what they asked for when the workspace is long gone: nobody waits for them, and they get it.
func TestSlowReader(t *testing.T) {
	r := newRig(t, nil)
	ctx := t.Context()
	sb := r.create(alice, Spec{Name: "box"})
	type result struct {
		*gate
		err chan error
	}
	var all []result
	for _, read := range []func(io.Writer) error{
		func(w io.Writer) error { return r.Diff(ctx, alice, "box", DiffOptions{SinceMark: true}, w) },
		func(w io.Writer) error { return r.FormatPatch(ctx, alice, "box", w) },
	} {
		g := result{&gate{came: make(chan struct{}), open: make(chan struct{})}, make(chan error, 1)}
		go func() { g.err <- read(g.gate) }()
		<-g.came
		all = append(all, g)
	}
	if _, err := r.Restart(ctx, alice, "box"); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "box", DeleteWorkspace: true}); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"diff of " + string(sb.WorkspaceID), "From abc123"} {
		close(all[i].open)
		if err := <-all[i].err; err != nil || !strings.HasPrefix(all[i].got.String(), want) {
			t.Errorf("%v, %q", err, all[i].got.String())
		}
	}
}

// TestReadout has what is kept for readers take as much as one user may have and no more, and of a disk that runs short only a little.
func TestReadout(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	r := newRig(t, func(o *Options) { o.Host = h })
	open := func(user string) *readout {
		f, err := nameless(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		to := &readout{e: r.Engine, f: f, user: user}
		t.Cleanup(func() { f.Close() })
		return to
	}
	used := func(user string) int64 {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.readouts[user]
	}
	piece := make([]byte, readoutStep)
	r.mu.Lock()
	r.readouts["alice"] = mostReadout - readoutStep // by others that are open
	r.mu.Unlock()
	a, b := open("alice"), open("bob")
	if n, err := a.Write(piece); n != len(piece) || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	for range 2 {
		if _, err := a.Write([]byte("x")); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "warren diff --stat") {
			t.Errorf("over the bound: %v", err)
		}
	}
	if _, err := b.Write(piece); err != nil {
		t.Errorf("another user: %v", err)
	}
	h.set(8<<30, 1<<20)
	if _, err := b.Write([]byte("x")); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "disk of this server runs short") {
		t.Errorf("much on a disk that runs short: %v", err)
	}
	c := open("bob")
	if _, err := c.Write([]byte("a little")); err != nil {
		t.Errorf("a little on a disk that runs short: %v", err)
	}
	a.close()
	b.close()
	c.close()
	if a, b := used("alice"), used("bob"); a != mostReadout-readoutStep || b != 0 {
		t.Errorf("kept after they are closed: %d, %d", a, b)
	}
	// A full disk is one, and says nothing of where.
	full := &readout{e: r.Engine, user: "bob"}
	var err error
	if full.f, err = os.OpenFile("/dev/full", os.O_WRONLY, 0); err != nil {
		t.Fatal(err)
	}
	defer full.close()
	if _, err := full.Write([]byte("x")); !errors.Is(err, warren.ErrExhausted) || strings.Contains(err.Error(), "/dev") {
		t.Errorf("a full disk: %v", err)
	}
}

// TestMarkNoDisk marks nothing when the host's disk runs short, and lets what there is be read.
func TestMarkNoDisk(t *testing.T) {
	h := &testHost{}
	h.set(8<<30, 50<<30)
	r := newRig(t, func(o *Options) { o.Host = h })
	r.create(alice, Spec{Name: "box"})
	if err := r.MarkWorkspace(t.Context(), alice, "box"); err != nil {
		t.Fatal(err)
	}
	h.set(8<<30, 1<<20)
	if err := r.MarkWorkspace(t.Context(), alice, "box"); !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "runs short") {
		t.Errorf("mark: %v", err)
	}
	if err := r.Diff(t.Context(), alice, "box", DiffOptions{}, io.Discard); err != nil {
		t.Errorf("diff: %v", err)
	}
}
