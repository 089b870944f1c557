package server_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// builder is a server over a real engine and the fake driver, and its operator, who builds templates.
type builder struct {
	*warren.Client
	t     *testing.T
	world *fake.World
	tcp   string
}

func newBuilder(t *testing.T) *builder {
	t.Helper()
	e, d := realEngine(t)
	unix, tcp := serveReal(t, e)
	b := &builder{t: t, world: d.World(), tcp: tcp}
	b.Client = b.connect(warren.Options{URL: unix})
	return b
}

func (b *builder) connect(o warren.Options) *warren.Client {
	b.t.Helper()
	c, err := warren.Connect(b.t.Context(), o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	return c
}

// user is another one's client.
func (b *builder) user(name string) *warren.Client {
	b.t.Helper()
	_, token, err := b.CreateToken(b.t.Context(), warren.TokenSpec{User: name, TTL: time.Hour})
	if err != nil {
		b.t.Fatal(err)
	}
	return b.connect(warren.Options{URL: b.tcp, Token: token})
}

// app is a template of two steps.
var app = warren.TemplateSpec{Name: "app", Setup: []warren.TemplateStep{{Run: "true"}, {Run: "echo two"}}}

// build builds it, and returns what became of its steps.
func (b *builder) build(o warren.BuildOptions) string {
	b.t.Helper()
	var steps []string
	o.Report = func(e warren.BuildEvent) {
		if e.Step > 0 && e.What != "step" {
			steps = append(steps, fmt.Sprintf("%d %s", e.Step, e.What))
		}
		if e.What == "step unfit" && e.Message == "" {
			b.t.Errorf("not said why: %+v", e)
		}
	}
	if _, err := b.BuildTemplate(b.t.Context(), app, o); err != nil {
		b.t.Fatal(err)
	}
	return strings.Join(steps, ", ")
}

// snapshots returns those that a client sees.
func (b *builder) snapshots(c *warren.Client) []*warren.Snapshot {
	b.t.Helper()
	var all []*warren.Snapshot
	for p, err := range c.Snapshots(b.t.Context(), warren.SnapshotListOptions{}) {
		if err != nil {
			b.t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

const (
	allRun    = "1 step done, 2 step done"
	allCached = "1 cached, 2 cached"
)

// TestBuildAmongOthers has other users give their snapshots the names that the steps of an operator's template have. The operator takes
// none of them, deletes none, and is not hindered by them.
func TestBuildAmongOthers(t *testing.T) {
	b := newBuilder(t)
	if got := b.build(warren.BuildOptions{}); got != allRun {
		t.Fatalf("the first build: %s", got)
	}
	var steps []string
	for _, p := range b.snapshots(b.Client) {
		if strings.HasPrefix(p.Name, "step-app-") {
			steps = append(steps, p.Name)
		}
	}
	if len(steps) != 2 {
		t.Fatalf("steps %q", steps)
	}
	if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	theirs := map[string]*warren.Client{}
	for _, name := range []string{"bob", "carol"} {
		c := b.user(name)
		theirs[name] = c
		sb, err := c.Create(t.Context(), warren.Spec{})
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range steps {
			if _, err := sb.Snapshot(t.Context(), warren.SnapshotOptions{Name: step}); err != nil {
				t.Fatal(err)
			}
		}
		// Once there is one of that name and once there are two.
		if got := b.build(warren.BuildOptions{}); got != allRun {
			t.Errorf("with those of %s: %s", name, got)
		}
		if got := b.build(warren.BuildOptions{}); got != allCached {
			t.Errorf("with those of %s, once more: %s", name, got)
		}
		if got := b.build(warren.BuildOptions{NoCache: true}); got != allRun {
			t.Errorf("with those of %s, without a cache: %s", name, got)
		}
		if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
	for name, c := range theirs {
		var names []string
		for _, p := range b.snapshots(c) {
			names = append(names, p.Name)
		}
		if !slices.Equal(names, steps) {
			t.Errorf("%s has %q", name, names)
		}
	}
}

// TestBuildUnfitSteps has snapshots of steps that cannot be gone on from: the build goes to the step before, or to none, and puts another in
// their place.
func TestBuildUnfitSteps(t *testing.T) {
	b := newBuilder(t)
	if got := b.build(warren.BuildOptions{}); got != allRun {
		t.Fatalf("the first build: %s", got)
	}
	for _, how := range []struct {
		name  string
		fault fake.Fault
		want  string
	}{
		{"all of another build of the runtime", fake.Fault{Err: errors.ErrUnsupported, Times: 2}, "2 step unfit, 1 step unfit, 1 step done, 2 step done"},
		{"all damaged", fake.Fault{Err: driver.ErrImage, Times: 2}, "2 step unfit, 1 step unfit, 1 step done, 2 step done"},
		{"the last damaged", fake.Fault{Err: driver.ErrImage, Times: 1}, "2 step unfit, 1 cached, 2 step done"},
	} {
		before := map[string]warren.SnapshotID{}
		for _, p := range b.snapshots(b.Client) {
			before[p.Name] = p.ID
		}
		b.world.Inject(fake.OpRestore, how.fault)
		if got := b.build(warren.BuildOptions{}); got != how.want {
			t.Errorf("%s: %s", how.name, got)
		}
		anew := 0
		for _, p := range b.snapshots(b.Client) {
			if was, ok := before[p.Name]; ok && was != p.ID {
				anew++
			}
		}
		if anew != how.fault.Times {
			t.Errorf("%s: %d steps are kept anew", how.name, anew)
		}
		b.world.Inject(fake.OpRestore, fake.Fault{})
		if got := b.build(warren.BuildOptions{}); got != allCached {
			t.Errorf("after %s: %s", how.name, got)
		}
	}
	// What else goes wrong is no reason to run a step again.
	b.world.Inject(fake.OpRestore, fake.Fault{Err: warren.ErrExhausted, Times: 1})
	if _, err := b.BuildTemplate(t.Context(), app, warren.BuildOptions{}); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("without room: %v", err)
	}
	if n := len(b.snapshots(b.Client)); n != 3 {
		t.Errorf("%d snapshots are there", n)
	}
	for sb, err := range b.Sandboxes(t.Context(), warren.ListOptions{}) {
		t.Errorf("left: %v, %v", sb.ID, err)
	}
}

// TestBuildRemains has what builds leave that are killed between their last snapshot and their end: the next build removes it, and so does
// the removal of the template, but nothing of a build that is under way or of another user.
func TestBuildRemains(t *testing.T) {
	b := newBuilder(t)
	bob := b.user("bob")
	// last is what a build makes at its end. Its sandbox is there while it is under way.
	last := func(c *warren.Client, name string, over bool) warren.SnapshotID {
		t.Helper()
		sb, err := c.Create(t.Context(), warren.Spec{})
		if err != nil {
			t.Fatal(err)
		}
		p, err := sb.Snapshot(t.Context(), warren.SnapshotOptions{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		if over {
			if err := sb.Delete(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return p.ID
	}
	// has checks that of these there are only the first n.
	has := func(when string, n int, ids ...warren.SnapshotID) {
		t.Helper()
		for i, id := range ids {
			if _, err := b.Snapshot(t.Context(), string(id)); (err == nil) != (i < n) {
				t.Errorf("%s: snapshot %d of %d: %v", when, i+1, len(ids), err)
			}
		}
	}
	under := last(b.Client, "template-app-00000001", false)
	bobs := last(bob, "template-app-00000002", true)
	other := last(b.Client, "template-app-x-00000002", true)
	named := last(b.Client, "template-app-mine", true)
	for i, ends := range []struct {
		name string
		do   func()
	}{
		{"build", func() { b.build(warren.BuildOptions{}) }},
		{"removal", func() {
			if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}},
	} {
		dead := last(b.Client, fmt.Sprintf("template-app-1000000%d", i), true)
		if i == 0 {
			b.build(warren.BuildOptions{Keep: true})
			has("after a build that keeps", 5, under, bobs, other, named, dead)
		}
		ends.do()
		has("after a "+ends.name, 4, under, bobs, other, named, dead)
	}
	// Whose it is that is to go cannot be said by the name of a template that is not there.
	dead := last(b.Client, "template-app-10000002", true)
	if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "bob") {
		t.Errorf("of two users: %v", err)
	}
	has("after it", 5, under, bobs, other, named, dead)
	if err := bob.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); err != nil {
		t.Errorf("bob's: %v", err)
	}
	has("after that", 4, under, dead, other, named, bobs)
	if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); err != nil {
		t.Errorf("the operator's: %v", err)
	}
	has("at the end", 3, under, other, named, dead)
	if err := b.DeleteTemplate(t.Context(), "app", warren.DeleteOptions{}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("once more: %v", err)
	}
}
