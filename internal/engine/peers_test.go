package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
)

// peerRig is a rig whose gateway remembers who is in which private network.
func peerRig(t *testing.T) (*rig, *policyNetwork) {
	n := &policyNetwork{have: map[warren.SandboxID]NetworkPolicy{}}
	dir := t.TempDir()
	r := prepareRig(t, dir, func(o *Options) {
		o.Network, o.PolicyDir, o.DefaultPolicy = n, filepath.Join(dir, "policies"), "locked"
		o.Drivers = map[string]driver.Driver{"fake": plainCards{o.Drivers["fake"].(*fake.Driver)}, "bare": o.Drivers["fake"]}
	})
	if err := os.Mkdir(filepath.Join(dir, "policies"), 0o755); err != nil {
		t.Fatal(err)
	}
	r.start()
	t.Cleanup(r.stop)
	return r, n
}

// told returns what the gateway knows, such as "alice/shop: db web".
func (n *policyNetwork) told() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var lines []string
	for key, p := range n.peers {
		var names []string
		for _, m := range p.Members {
			names = append(names, m.Name)
		}
		slices.Sort(names)
		lines = append(lines, key+": "+strings.Join(names, " "))
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}

func TestPeers(t *testing.T) {
	ctx := t.Context()
	r, n := peerRig(t)
	want := func(when, want string) {
		t.Helper()
		if got := n.told(); got != want {
			t.Errorf("%s the gateway knows %q, want %q", when, got, want)
		}
	}
	soon := func(when, want string) {
		t.Helper()
		eventually(t, when+" the gateway knows "+want, func() bool { return n.told() == want })
	}
	web := r.create(alice, Spec{Name: "web", PrivateNetwork: "shop"})
	r.create(alice, Spec{Name: "db", PrivateNetwork: "shop"})
	r.create(alice, Spec{Name: "alone"})
	r.create(alice, Spec{Name: "none", PrivateNetwork: "none"})
	want("with two members", "alice/shop: db web")
	r.create(bob, Spec{Name: "web", PrivateNetwork: "shop"})
	want("with another owner's", "alice/shop: db web; bob/shop: web")
	if web.PrivateNetwork != "shop" || web.Spec.PrivateNetwork != "shop" || web.Network != "locked" {
		t.Errorf("the sandbox is in %q, its spec says %q, its policy is %q", web.PrivateNetwork, web.Spec.PrivateNetwork, web.Network)
	}
	// Another user's is not there to be changed.
	other := "x"
	if _, err := r.Update(ctx, bob, UpdateRequest{ID: string(web.ID), PrivateNetwork: &other}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("another user moves it: %v", err)
	}

	// A restart of the daemon, a pause and a resume change nothing.
	r.stop()
	r.start()
	want("after a restart", "alice/shop: db web; bob/shop: web")
	r.pauseNow(web.ID)
	want("of one that is paused", "alice/shop: db web; bob/shop: web")
	if err := r.WakePeer(ctx, web.ID); err != nil {
		t.Errorf("wake one that is paused: %v", err)
	}
	if sb, err := r.Get(ctx, alice, "web"); err != nil || sb.State != Running || sb.PrivateNetwork != "shop" {
		t.Errorf("it is then %v, %v", sb, err)
	}
	off := false
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "web", AutoResume: &off}); err != nil {
		t.Fatal(err)
	}
	r.pauseNow(web.ID)
	if err := r.WakePeer(ctx, web.ID); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "warren resume") {
		t.Errorf("wake one that nothing may resume: %v", err)
	}
	alone, err := r.Resolve(alice, "alone")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.WakePeer(ctx, alone); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("wake one that is in no network: %v", err)
	}
	if _, err := r.Resume(ctx, alice, "web"); err != nil {
		t.Fatal(err)
	}

	// A gateway that has been started anew is told again, and forgets what is no more.
	n.mu.Lock()
	n.peers = map[string]PeerNetwork{"alice/old": {Key: "alice/old", Name: "old", Members: []Peer{{"s1", "x"}}}}
	n.mu.Unlock()
	r.TendNetwork()
	soon("when it was started anew", "alice/shop: db web; bob/shop: web")

	// Names, moves and ends.
	update := func(u UpdateRequest) {
		t.Helper()
		u.ID = "db"
		if _, err := r.Update(ctx, alice, u); err != nil {
			t.Fatal(err)
		}
	}
	name, shop, store, none, back := "base", "shop", "store", "none", "db"
	update(UpdateRequest{Name: &name})
	want("after a rename", "alice/shop: base web; bob/shop: web")
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "base", Name: &back, PrivateNetwork: &store}); err != nil {
		t.Fatal(err)
	}
	want("after a move", "alice/shop: web; alice/store: db; bob/shop: web")
	update(UpdateRequest{PrivateNetwork: &none})
	want("after it has left", "alice/shop: web; bob/shop: web")
	update(UpdateRequest{PrivateNetwork: &shop})
	want("when it is back", "alice/shop: db web; bob/shop: web")
	r.stop()
	r.start()
	if sb, err := r.Get(ctx, alice, "db"); err != nil || sb.PrivateNetwork != "shop" || sb.Spec.PrivateNetwork != "shop" {
		t.Errorf("after a restart it is %+v, %v", sb, err)
	}
	n.mu.Lock()
	n.deaf = errors.New("it does not listen")
	n.mu.Unlock()
	for range 2 { // who repeats it does not hear that all is well
		if _, err := r.Update(ctx, alice, UpdateRequest{ID: "db", PrivateNetwork: &none}); err == nil || !strings.Contains(err.Error(), "not in force until the gateway can be told") || !strings.Contains(err.Error(), `network "shop": it does not listen`) {
			t.Errorf("a change that the gateway does not hear of: %v", err)
		}
	}
	// It is no matter of others, nor of what has no private network.
	renamed := "other"
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "db", Name: &renamed}); err != nil {
		t.Errorf("another name of what is in no network: %v", err)
	}
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "other", Name: &back}); err != nil {
		t.Error(err)
	}
	r.create(bob, Spec{Name: "alone", Policy: NoNetwork})
	if _, err := r.Update(ctx, bob, UpdateRequest{ID: "alone", PrivateNetwork: &none}); err != nil {
		t.Errorf("somebody else's: %v", err)
	}
	r.delete(bob, "alone")
	if sb, err := r.Get(ctx, alice, "db"); err != nil || sb.PrivateNetwork != "" {
		t.Errorf("written is %+v, %v", sb, err)
	}
	n.mu.Lock()
	n.deaf = nil
	n.mu.Unlock()
	r.TendNetwork()
	soon("when it listens again", "alice/shop: web; bob/shop: web")
	update(UpdateRequest{PrivateNetwork: &shop})

	// Copies are in the network that the sandbox is in now, under names of their own.
	f, err := r.Fork(ctx, alice, ForkRequest{ID: "db", Name: "copy", Count: 2}, nil)
	if err != nil || len(f.Children) != 2 || f.Children[0].Sandbox.PrivateNetwork != "shop" {
		t.Fatalf("%+v, %v", f, err)
	}
	soon("with copies", "alice/shop: copy-1 copy-2 db web; bob/shop: web")
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "db", Name: "then"}, nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.PutTemplate(ctx, alice, TemplateRequest{Name: "tmpl", Snapshot: "then"}); err != nil {
		t.Fatal(err)
	}
	r.create(alice, Spec{Name: "later", Template: "tmpl"})
	r.create(alice, Spec{Name: "apart", Snapshot: "then", PrivateNetwork: "none"})
	r.create(alice, Spec{Name: "away", Template: "tmpl", PrivateNetwork: "store"})
	soon("with what is made of a template", "alice/shop: copy-1 copy-2 db later web; alice/store: away; bob/shop: web")
	update(UpdateRequest{PrivateNetwork: &none})
	if _, err := r.Rollback(ctx, alice, "db", "then"); err != nil {
		t.Fatal(err)
	}
	soon("after a rollback", "alice/shop: copy-1 copy-2 later web; alice/store: away; bob/shop: web")
	for _, id := range []string{"copy-1", "copy-2", "later", "away"} {
		r.delete(alice, id)
	}
	want("after deletes", "alice/shop: web; bob/shop: web")
	var events []string
	if err := r.Watch(ctx, alice, WatchRequest{NoFollow: true}, func(e *Event) error {
		if strings.Contains(e.Message, "network ") {
			events = append(events, e.Message)
		}
		return nil
	}); err != nil || !slices.Contains(events, "network store, was shop") || !slices.Contains(events, "network none, was store") {
		t.Errorf("events tell %q, %v", events, err)
	}
	for _, who := range []Caller{alice, bob} {
		list, _, err := r.List(ctx, who, ListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range list {
			r.delete(who, string(sb.ID))
		}
	}
}

func TestPeersRefused(t *testing.T) {
	ctx := t.Context()
	r, _ := peerRig(t)
	for _, c := range []struct {
		spec Spec
		want string
		is   error
	}{
		{Spec{PrivateNetwork: "Shop"}, `network "Shop": want a name of 1 to 63`, warren.ErrInvalid},
		{Spec{PrivateNetwork: "a.b"}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: "-a"}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: "a-"}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: "xn--a"}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: strings.Repeat("a", 64)}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: "a\nb"}, "want a name", warren.ErrInvalid},
		{Spec{PrivateNetwork: "shop", Policy: "none"}, `network "shop": the sandbox has no network card`, errors.ErrUnsupported},
		{Spec{PrivateNetwork: "shop", Driver: "bare"}, "driver bare gives it none", errors.ErrUnsupported},
	} {
		if _, err := r.Create(ctx, alice, CreateRequest{Spec: c.spec}, nil); !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("network %q, policy %q, driver %q: %v", c.spec.PrivateNetwork, c.spec.Policy, c.spec.Driver, err)
		}
	}
	r.create(alice, Spec{Name: "bare", Driver: "bare"})
	bad, good := "a b", "shop"
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "bare", PrivateNetwork: &bad}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("%q: %v", bad, err)
	}
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "bare", PrivateNetwork: &good}); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "no network card") {
		t.Errorf("a sandbox without a card is put into a network: %v", err)
	}
	// A network that is full takes no more, in whichever way they come.
	r.create(alice, Spec{Name: "first", PrivateNetwork: "shop"})
	r.create(alice, Spec{Name: "out"})
	r.mu.Lock()
	first := r.boxes[mustResolve(t, r, "first")]
	for i := range maxPeers - 1 {
		sb := &sandbox{timer: -1}
		sb.row.ID, sb.row.Owner, sb.row.Network, sb.row.State = warren.SandboxID(fmt.Sprint("x", i)), first.row.Owner, "shop", string(Running)
		r.boxes[sb.row.ID] = sb
	}
	r.mu.Unlock()
	full := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "at most 256") {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{PrivateNetwork: "shop"}}, nil)
	full("create", err)
	_, err = r.Update(ctx, alice, UpdateRequest{ID: "out", PrivateNetwork: &good})
	full("update", err)
	_, err = r.Fork(ctx, alice, ForkRequest{ID: "first"}, nil)
	full("fork", err)
	r.create(bob, Spec{Name: "first", PrivateNetwork: "shop"})
	r.mu.Lock()
	for i := range maxPeers - 1 {
		delete(r.boxes, warren.SandboxID(fmt.Sprint("x", i)))
	}
	r.mu.Unlock()
}

func mustResolve(t *testing.T, r *rig, name string) warren.SandboxID {
	for id, sb := range r.boxes {
		if sb.row.Name == name {
			return id
		}
	}
	t.Fatalf("no %s", name)
	return ""
}

func TestPeersExplained(t *testing.T) {
	r, _ := peerRig(t)
	policies := filepath.Join(r.dir, "policies")
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(policies, "team.yaml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("extends: open\nallow: [db.corp.internal]\ndeny: [{host: db.shop.internal, ports: [22]}]\n")
	r.create(alice, Spec{Name: "web", PrivateNetwork: "shop", Policy: "team"})
	db := r.create(alice, Spec{Name: "db", PrivateNetwork: "shop"})
	r.create(bob, Spec{Name: "hers", PrivateNetwork: "shop"})
	check := func(target string, allow bool, rule string) {
		t.Helper()
		a, err := r.ExplainSandbox(t.Context(), alice, "web", target)
		if err != nil || a.Allow != allow || !strings.HasPrefix(a.Rule, rule) || a.Reason == "" {
			t.Errorf("%s: %+v, %v", target, a, err)
		}
	}
	check("db.shop.internal", true, "network shop")
	check("tcp://db.shop.internal:5432", true, "network shop")
	check("udp://"+string(db.ID)+".shop.internal:53", true, "network shop")
	check("http://db.shop.internal:8000/x", true, "network shop")
	check("tcp://db.shop.internal:22", false, "deny[0]")
	check("hers.shop.internal", false, "network shop")
	check("shop.internal", false, "network shop")
	check("db.other.internal", false, "default")
	check("db.corp.internal", true, "allow[0]")
	check("example.com", true, "preset open")
	// A policy that cannot be used denies what it would have denied, and so all of it.
	write("deny: {")
	check("db.shop.internal", false, "deny[0]")
}
