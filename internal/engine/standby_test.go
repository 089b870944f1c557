package engine

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// standing are the ids of those that stand by.
func (r *rig) standing() (ids []warren.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.standbys {
		for _, sp := range k.have {
			ids = append(ids, sp.row.ID)
		}
	}
	return ids
}

// preparing says whether one is being made.
func (r *rig) preparing() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.standingBy
}

func (r *rig) stand(n int) []warren.SandboxID {
	r.t.Helper()
	eventually(r.t, "as many as wanted stand by", func() bool { return len(r.standing()) == n })
	return r.standing()
}

func standbyRig(t *testing.T, change func(*Options)) *rig {
	r := newRig(t, func(o *Options) {
		o.Standby = 2
		if change != nil {
			change(o)
		}
	})
	r.create(alice, Spec{Name: "box", Env: map[string]string{"A": "1"}})
	r.mark("box", "one")
	r.snapshotNow("box", "one")
	return r
}

func woken(sb *Sandbox) bool {
	return slices.ContainsFunc(sb.Timing, func(m Milestone) bool { return m.Name == "wake" })
}

func TestStandby(t *testing.T) {
	ctx := t.Context()
	r := standbyRig(t, nil)
	before, _ := r.usageNow()
	r.put("app", "one")
	first := r.stand(1)[0]
	if got, err := r.GetTemplate(ctx, alice, "app"); err != nil || got.Standby != 1 || got.StandbyNote != "" {
		t.Errorf("the template: %+v, %v", got, err)
	}

	// It is nobody's.
	list, _, err := r.List(ctx, operator, ListRequest{})
	if err != nil || len(list) != 1 {
		t.Errorf("%d sandboxes are listed: %v", len(list), err)
	}
	if spaces, _, err := r.ListWorkspaces(ctx, operator, false, 0, ""); err != nil || len(spaces) != 1 {
		t.Errorf("%d workspaces are listed: %v", len(spaces), err)
	}
	for name, err := range map[string]error{
		"get":    func() error { _, err := r.Get(ctx, operator, string(first)); return err }(),
		"delete": r.Delete(ctx, operator, DeleteRequest{ID: string(first)}),
		"dial":   func() error { _, err := r.Dial(ctx, operator, string(first), 80); return err }(),
	} {
		if !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	after, total := r.usageNow()
	if after["alice"] != before["alice"] || total.sandboxes != after["alice"].sandboxes+1 {
		t.Errorf("in use before: %v, after: %v, together %v", before, after, total)
	}

	// A create takes it over, under its own name and with all that was asked for.
	kid := r.create(alice, Spec{Name: "kid", Template: "app", Labels: map[string]string{"l": "v"}, Env: map[string]string{"B": "2"}, KeepWorkspace: true})
	if kid.ID != first || !woken(kid) || r.word("kid") != "one" || kid.Labels["l"] != "v" || kid.Spec.Env["A"] != "1" || kid.Spec.Env["B"] != "2" || !kid.Spec.KeepWorkspace {
		t.Errorf("the standby was %s; made was %+v, %q", first, kid, r.word("kid"))
	}
	conn, err := r.Dial(ctx, alice, "kid", warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	r.mark("kid", "two")
	r.stand(2)
	// With other limits it is made as ever.
	big := r.create(alice, Spec{Name: "big", Template: "app", Resources: Resources{CPUMillis: 500}})
	if woken(big) || big.Limits.CPUMillis != 500 || r.word("big") != "one" {
		t.Errorf("with other limits: %+v", big)
	}
	if got := r.stand(2); slices.Contains(got, kid.ID) {
		t.Errorf("%s still stands by", kid.ID)
	}
	r.stop()
	if ids := r.world.IDs(); len(ids) != 3 {
		t.Errorf("after a stop the driver has %v", ids)
	}
	r.start()
	if got := r.word("kid"); got != "two" {
		t.Errorf("after a start: %q", got)
	}

	// A template that changes takes those of before along.
	r.snapshotNow("kid", "two")
	r.put("app", "two")
	r.stand(1)
	if kid := r.create(alice, Spec{Name: "kid-2", Template: "app"}); !woken(kid) || r.word("kid-2") != "two" {
		t.Errorf("after the update: %+v, %q", kid, r.word("kid-2"))
	}
	r.stand(2)
	if err := r.DeleteTemplate(ctx, alice, "app", false); err != nil {
		t.Fatal(err)
	}
	r.stand(0)
	for _, name := range []string{"box", "kid", "kid-2", "big"} {
		if err := r.Delete(ctx, alice, DeleteRequest{ID: name, DeleteWorkspace: true}); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"one", "two"} {
		if err := r.DeleteSnapshot(ctx, alice, name, false); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "nothing is left", func() bool { return r.leftovers() == nil })
	r.empty()
}

// TestStandbyYields has standbys in the way of what is asked for.
func TestStandbyYields(t *testing.T) {
	ctx := t.Context()
	r := standbyRig(t, func(o *Options) { o.Budgets.Total.Sandboxes = 2 })
	r.put("app", "one")
	r.stand(1)
	r.create(alice, Spec{Name: "more"}) // there is room for it, or for one that stands by
	r.stand(0)
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "too-many"}}, nil); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("beyond the budget: %v", err)
	}
	r.delete(alice, "more")
	// Its own takes its place, and is the last.
	r.put("app", "one")
	id := r.stand(1)[0]
	if kid := r.create(alice, Spec{Name: "kid", Template: "app"}); kid.ID != id {
		t.Errorf("made was %s, %s stood by", kid.ID, id)
	}
	r.delete(alice, "kid")
	r.put("app", "one")
	r.stand(1)
	r.coolStandbys("sha256:other", "")
	r.stand(1)
	r.coolStandbys("sha256:host", "")
	r.stand(0)

	// What its owner may not have is not taken, and stays.
	r.put("app", "one")
	id = r.stand(1)[0]
	r.mu.Lock()
	r.opts.Budgets.PerUser.Sandboxes = 1
	r.mu.Unlock()
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Template: "app"}}, nil); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("beyond the owner's budget: %v", err)
	}
	if got := r.stand(1); got[0] != id {
		t.Errorf("%v stand by, %s did", got, id)
	}
	// Nor is it let go for what would not fit without it.
	r.mu.Lock()
	r.opts.Budgets.PerUser.Sandboxes = 0
	r.opts.Budgets.Total.Memory = 16 << 30
	r.mu.Unlock()
	if _, err := r.Create(ctx, bob, CreateRequest{Spec: Spec{Resources: Resources{MemoryBytes: 17 << 30}}}, nil); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("more than there is: %v", err)
	}
	if got := r.stand(1); got[0] != id {
		t.Errorf("%v stand by, %s did", got, id)
	}
	// One that ends by itself is not taken either.
	r.world.Kill(id, driver.Exit{Reason: "oom"})
	r.stand(0)
	if kid := r.create(alice, Spec{Name: "kid", Template: "app"}); kid.ID == id || woken(kid) {
		t.Errorf("made was %+v", kid)
	}
}

// TestStandbyShortDisk lets those that stand by go when the disk is short.
func TestStandbyShortDisk(t *testing.T) {
	h := &testHost{}
	h.set(64<<30, 64<<30)
	r := standbyRig(t, func(o *Options) { o.Host = h })
	r.put("app", "one")
	r.stand(1)
	h.set(64<<30, 1<<20)
	r.stand(0)
	eventually(t, "its template says why", func() bool {
		got, err := r.GetTemplate(t.Context(), alice, "app")
		return err == nil && strings.Contains(got.StandbyNote, "the disk of this server ran short")
	})
	h.set(64<<30, 64<<30)
	r.create(alice, Spec{Template: "app"})
	r.stand(1)
	if got, err := r.GetTemplate(t.Context(), alice, "app"); err != nil || got.StandbyNote != "" {
		t.Errorf("with one that stands by: %+v, %v", got, err)
	}
}

// drowsy is a driver that does not wake what stands still.
type drowsy struct {
	driver.Driver
	driver.Snapshotter
	sleeps atomic.Bool
	// asked, when set, gets a word when somebody is to be woken, who is then woken no more.
	asked chan struct{}
}

func (d *drowsy) Unwrap() driver.Driver { return d.Driver }

func (d *drowsy) Thaw(ctx context.Context, id warren.SandboxID) error {
	if d.asked != nil {
		d.asked <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	if d.sleeps.Load() {
		return errors.New("it sleeps on")
	}
	return d.Snapshotter.Thaw(ctx, id)
}

// TestStandbySleepsOn has a standby that cannot be woken: the sandbox is made anew.
func TestStandbySleepsOn(t *testing.T) {
	var d *drowsy
	r := standbyRig(t, func(o *Options) {
		fake := o.Drivers["fake"]
		d = &drowsy{Driver: fake, Snapshotter: fake.(driver.Snapshotter)}
		o.Drivers["fake"] = d
	})
	r.put("app", "one")
	id := r.stand(1)[0]
	d.sleeps.Store(true)
	req := CreateRequest{Spec: Spec{Name: "kid", Template: "app"}, IdempotencyKey: "once"}
	kid, err := r.Create(t.Context(), alice, req, nil)
	if err != nil {
		t.Fatal(err)
	}
	if kid.ID == id || woken(kid) || r.word("kid") != "one" {
		t.Errorf("made was %+v", kid)
	}
	again, err := r.Create(t.Context(), alice, req, nil)
	if err != nil || again.ID != kid.ID {
		t.Errorf("with the same key: %+v, %v", again, err)
	}
	d.sleeps.Store(false)
	r.stand(2)
	r.coolStandbys("", "")
	for _, name := range []string{"box", "kid"} {
		r.delete(alice, name)
	}
	if ids := r.world.IDs(); len(ids) != 0 {
		t.Errorf("the driver has %v", ids)
	}
}

// TestStandbyDeletedInWake has a sandbox deleted while it is woken: none is made in its place.
func TestStandbyDeletedInWake(t *testing.T) {
	var d *drowsy
	r := standbyRig(t, func(o *Options) {
		fake := o.Drivers["fake"]
		d = &drowsy{Driver: fake, Snapshotter: fake.(driver.Snapshotter)}
		o.Drivers["fake"] = d
	})
	r.put("app", "one")
	r.stand(1)
	d.asked = make(chan struct{})
	made := make(chan error, 1)
	go func() {
		_, err := r.Create(context.Background(), alice, CreateRequest{Spec: Spec{Name: "kid", Template: "app"}}, nil)
		made <- err
	}()
	<-d.asked
	if err := r.Delete(t.Context(), alice, DeleteRequest{ID: "kid"}); err != nil {
		t.Error(err)
	}
	if err := <-made; !errors.Is(err, warren.ErrState) {
		t.Errorf("the create: %v", err)
	}
	if list, _, err := r.List(t.Context(), alice, ListRequest{}); err != nil || len(list) != 1 {
		t.Errorf("%d sandboxes are listed: %v", len(list), err)
	}
}

// TestStandbyWithoutMemory makes none of what has no memory, and does not try for ever.
func TestStandbyWithoutMemory(t *testing.T) {
	r := standbyRig(t, nil)
	if _, err := r.Snapshot(t.Context(), alice, SnapshotRequest{ID: "box", Name: "files", FilesOnly: true}, nil); err != nil {
		t.Fatal(err)
	}
	r.put("app", "files")
	eventually(t, "it is given up", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return !r.standingBy && len(r.standbys) == 0
	})
	if kid := r.create(alice, Spec{Name: "kid", Template: "app"}); woken(kid) || !strings.HasPrefix(string(kid.ID), "s") {
		t.Errorf("made was %+v", kid)
	}
}

// TestStandbyPolicy looks at what the card of a standby lets pass, before and after it is somebody's, also when the server ends in between.
func TestStandbyPolicy(t *testing.T) {
	r, n := secretRig(t)
	r.stop()
	change := r.change
	r.change = func(o *Options) {
		change(o)
		o.Standby = 1
	}
	r.start()
	policyOf := func(id warren.SandboxID) string {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.have[id].Name
	}
	r.create(alice, Spec{Name: "box", Policy: "open"})
	r.snapshotNow("box", "one")
	r.put("app", "one")
	id := r.stand(1)[0]
	if got := policyOf(id); got != "locked" {
		t.Errorf("while it stands by its policy is %q", got)
	}
	req := CreateRequest{Spec: Spec{Name: "kid", Template: "app", Policy: "registries"}, IdempotencyKey: "k"}
	kid, err := r.Create(t.Context(), alice, req, nil)
	if err != nil || kid.ID != id || policyOf(id) != "registries" {
		t.Fatalf("made was %+v with policy %q, %v", kid, policyOf(id), err)
	}
	if plain := r.create(alice, Spec{Name: "plain", Template: "app", Policy: NoNetwork}); woken(plain) {
		t.Errorf("without a network: %+v", plain)
	}

	// As if the server had ended before it was woken: the next one makes it what was asked for.
	ctx := context.Background()
	if err := r.store.Update(ctx, func(tx *store.Tx) error {
		r.mu.Lock()
		row := r.boxes[id].row
		r.mu.Unlock()
		row.State = string(Creating)
		return tx.UpdateSandbox(&row)
	}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	n.mu.Lock()
	n.have[id] = NetworkPolicy{Name: "locked"}
	n.mu.Unlock()
	r.start()
	again, err := r.Create(ctx, alice, req, nil)
	if err != nil || again.ID != id || policyOf(id) != "registries" {
		t.Fatalf("the next server made %+v with policy %q, %v", again, policyOf(id), err)
	}
	if !slices.ContainsFunc(r.carded(), func(sb cardedSandbox) bool { return sb.id == id && sb.policy == "registries" }) {
		t.Errorf("its policy is not looked after: %+v", r.carded())
	}
}

// TestStandbyOfLocalRepo has a template whose repo only the operator may read: what goes on from it reads it no more.
func TestStandbyOfLocalRepo(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, func(o *Options) { o.Standby = 1 })
	r.create(Caller{User: alice.User, Operator: true}, Spec{Name: "box", Repo: &RepoSource{URL: "/srv/repo"}})
	r.mark("box", "one")
	r.snapshotNow("box", "one")
	r.put("app", "one")
	first := r.stand(1)[0]
	kid := r.create(alice, Spec{Name: "kid", Template: "app"})
	if kid.ID != first || !woken(kid) || r.word("kid") != "one" || kid.Spec.Repo == nil || kid.Spec.Repo.URL != "/srv/repo" {
		t.Errorf("the standby was %s; made was %+v, %q", first, kid, r.word("kid"))
	}
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: "kid", Name: "twin"}, nil); err != nil || r.word("twin") != "one" {
		t.Errorf("a fork of it: %q, %v", r.word("twin"), err)
	}
}
