package engine

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/secret"
)

// policyNetwork is a gateway that only remembers what it was told.
type policyNetwork struct {
	mu     sync.Mutex
	have   map[warren.SandboxID]NetworkPolicy
	change int // calls of SetPolicy
	// attaching is called with the policy in hand, before a card has it.
	attaching func()
	// overtaken is how many calls of SetPolicy find that a later one is in force, and refuse what they are answered, by sandbox.
	overtaken map[warren.SandboxID]int
	refuse    map[warren.SandboxID]error
	// quiet is for how long there was no traffic; nil means long.
	quiet func() time.Duration
	// peers are the private networks, by key; deaf has it take no more.
	peers map[string]PeerNetwork
	deaf  error
}

func (n *policyNetwork) SetPeers(_ context.Context, p PeerNetwork) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.deaf != nil {
		return n.deaf
	}
	if n.peers == nil {
		n.peers = map[string]PeerNetwork{}
	}
	if n.peers[p.Key] = p; len(p.Members) == 0 {
		delete(n.peers, p.Key)
	}
	return nil
}

func (n *policyNetwork) PeerNetworks(context.Context) (map[string]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := map[string]string{}
	for key, p := range n.peers {
		m[key] = p.Digest
	}
	return m, nil
}

func (n *policyNetwork) Attach(_ context.Context, id warren.SandboxID, p NetworkPolicy, _ warren.SandboxID) (*driver.Card, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	if n.attaching != nil {
		n.attaching()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.have[id] = p
	return &driver.Card{Inside: in, Outside: out}, nil
}

func (n *policyNetwork) Adopt(_ context.Context, id warren.SandboxID, _ *os.File, p NetworkPolicy, _ warren.SandboxID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.have[id] = p
	return nil
}

func (n *policyNetwork) Plan(context.Context) (*driver.Card, error) { return nil, warren.ErrState }

func (n *policyNetwork) Detach(_ context.Context, id warren.SandboxID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.have, id)
	return nil
}

func (n *policyNetwork) SetPolicy(_ context.Context, id warren.SandboxID, p NetworkPolicy) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.deaf != nil {
		return n.deaf
	}
	if _, ok := n.have[id]; !ok {
		return warren.ErrNotFound
	}
	if n.overtaken[id] > 0 {
		n.overtaken[id]--
		return ErrSuperseded
	}
	if n.refuse[id] != nil {
		return n.refuse[id]
	}
	n.have[id] = p
	n.change++
	return nil
}

func (n *policyNetwork) Attached(context.Context) (map[warren.SandboxID]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.deaf != nil {
		return nil, n.deaf
	}
	m := map[warren.SandboxID]string{}
	for id, p := range n.have {
		m[id] = p.Digest
	}
	return m, nil
}

func (n *policyNetwork) Quiet(context.Context, warren.SandboxID) (time.Duration, error) {
	if n.quiet == nil {
		return time.Hour, nil
	}
	return n.quiet(), nil
}

func (n *policyNetwork) Card(context.Context, warren.SandboxID) (*os.File, error) {
	return nil, warren.ErrNotFound
}

func (n *policyNetwork) Authority() []byte { return []byte("certificate") }

// of returns what the gateway has for a sandbox of one secret.
func (n *policyNetwork) of(id warren.SandboxID, name string) (s NetworkSecret) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.have[id].Secrets {
		if s.Name == name {
			return s
		}
	}
	return NetworkSecret{}
}

// plainCards is the fake driver with cards that carry nothing.
type plainCards struct{ *fake.Driver }

func (plainCards) Card(context.Context, warren.SandboxID) (*os.File, error) {
	return nil, warren.ErrState
}
func (plainCards) KeepCard(context.Context, warren.SandboxID, *os.File) error {
	return nil
}

const bankPolicy = `allow: [bank.example]
secrets:
  - {secret: bank-key, env: BANK_TOKEN, host: bank.example, place: {header: Authorization}}
`

// startingCards is plainCards of which a sandbox with a card waits before it is made.
type startingCards struct {
	plainCards
	starting func(context.Context)
}

func (d startingCards) Create(ctx context.Context, s *driver.Spec) error {
	if s.Card != nil {
		d.starting(ctx)
	}
	return d.plainCards.Create(ctx, s)
}

func secretRig(t *testing.T, more ...func(*Options)) (*rig, *policyNetwork) {
	n := &policyNetwork{have: map[warren.SandboxID]NetworkPolicy{}}
	dir := t.TempDir()
	policies := filepath.Join(dir, "policies")
	if err := os.Mkdir(policies, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(policies, "bank.yaml"), []byte(bankPolicy), 0o644); err != nil {
		t.Fatal(err)
	}
	key, err := secret.ParseSource("file:" + filepath.Join(dir, "key"))
	if err != nil {
		t.Fatal(err)
	}
	r := prepareRig(t, dir, func(o *Options) {
		o.Network, o.PolicyDir, o.DefaultPolicy, o.Secrets = n, policies, "locked", key
		o.Drivers = map[string]driver.Driver{"fake": plainCards{o.Drivers["fake"].(*fake.Driver)}}
		for _, f := range more {
			f(o)
		}
	})
	r.start()
	t.Cleanup(r.stop)
	return r, n
}

// A secret that is removed, and a policy that is narrowed, count in a sandbox that does not run yet, whose card is served already.
func TestChangeWhileStarting(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	r, n := secretRig(t, func(o *Options) {
		o.Drivers["fake"] = startingCards{o.Drivers["fake"].(plainCards), func(ctx context.Context) {
			close(begun)
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		}}
	})
	if _, err := r.SetSecret(t.Context(), operator, "bank-key", []byte("a-secret-value-4711")); err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() {
		_, err := r.Create(t.Context(), operator, CreateRequest{Spec: Spec{Policy: "bank"}}, nil)
		made <- err
	}()
	<-begun
	only := func() (p NetworkPolicy) {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, p = range n.have {
		}
		return p
	}
	if p := only(); len(p.Secrets) != 1 || p.Secrets[0].Sealed == "" {
		t.Fatalf("the card has %+v", p)
	}
	if err := r.DeleteSecret(t.Context(), operator, "bank-key"); err != nil {
		t.Fatal(err)
	}
	if p := only(); len(p.Secrets) != 1 || p.Secrets[0].Sealed != "" {
		t.Errorf("after the secret is removed the card has %+v", p)
	}
	const narrow = "allow: [other.example]\n"
	if err := os.WriteFile(filepath.Join(r.dir, "policies", "bank.yaml"), []byte(narrow), 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the narrowed policy counts", func() bool { return string(only().Source) == narrow })
	close(goOn)
	if err := <-made; err != nil {
		t.Error(err)
	}
}

// A change of a secret that another call has overtaken is sent again, and what one sandbox is refused is no matter of the others.
func TestSecretIsOvertaken(t *testing.T) {
	r, n := secretRig(t)
	set := func() error {
		_, err := r.SetSecret(t.Context(), operator, "bank-key", []byte("a-secret-value-4711"))
		return err
	}
	if err := set(); err != nil {
		t.Fatal(err)
	}
	var ids []warren.SandboxID
	for range 12 { // more than are told side by side
		ids = append(ids, r.create(operator, Spec{Policy: "bank"}).ID)
	}
	n.mu.Lock()
	n.overtaken = map[warren.SandboxID]int{ids[0]: 2, ids[5]: 1}
	n.mu.Unlock()
	if err := set(); err != nil {
		t.Errorf("overtaken: %v", err)
	}
	have := r.secret("bank-key").Sealed
	for _, id := range ids {
		if n.of(id, "bank-key").Sealed != have {
			t.Errorf("sandbox %s has an older one", id)
		}
	}
	n.mu.Lock()
	n.refuse = map[warren.SandboxID]error{}
	for _, id := range ids[:9] {
		n.refuse[id] = errors.New("not this one")
	}
	n.mu.Unlock()
	if err := set(); err == nil || !strings.Contains(err.Error(), "not this one") {
		t.Errorf("refused for some: %v", err)
	}
	have = r.secret("bank-key").Sealed
	for _, id := range ids[9:] {
		if n.of(id, "bank-key").Sealed != have {
			t.Errorf("sandbox %s has an older one, since others are refused it", id)
		}
	}
}

// A secret is not said to be removed while a card is on its way that was to have it.
func TestChangeWhileAttaching(t *testing.T) {
	r, n := secretRig(t)
	if _, err := r.SetSecret(t.Context(), operator, "bank-key", []byte("a-secret-value-4711")); err != nil {
		t.Fatal(err)
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	n.attaching = func() { close(begun); <-goOn }
	made, removed := make(chan error, 1), make(chan error, 1)
	var sb *Sandbox
	go func() {
		var err error
		sb, err = r.Create(t.Context(), operator, CreateRequest{Spec: Spec{Policy: "bank"}}, nil)
		made <- err
	}()
	<-begun
	go func() { removed <- r.DeleteSecret(t.Context(), operator, "bank-key") }()
	eventually(t, "the secret is gone", func() bool { return r.secret("bank-key") == nil })
	close(goOn)
	if err := <-made; err != nil {
		t.Error(err)
	}
	if err := <-removed; err != nil {
		t.Error(err)
	}
	if s := n.of(sb.ID, "bank-key"); s.Name == "" || s.Sealed != "" {
		t.Errorf("the card has %+v", s)
	}
}

func TestSecrets(t *testing.T) {
	ctx := t.Context()
	r, n := secretRig(t)
	const value, other = "a-secret-value-4711", "another-value-0815"

	for _, c := range []struct{ name, value, want string }{
		{"bank-key", "short", "it has 5 bytes"}, {"bank-key", "two\nlines-of-it", "several lines"}, {"Bank", value, "want 1 to 64"}, {"../x", value, "want 1 to 64"}, {"", value, "want 1 to 64"},
	} {
		if _, err := r.SetSecret(ctx, operator, c.name, []byte(c.value)); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), c.value) {
			t.Errorf("set %q to %q: %v", c.name, c.value, err)
		}
	}
	if _, err := r.Create(ctx, operator, CreateRequest{Spec: Spec{Policy: "bank"}}, nil); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "warren secret set bank-key") {
		t.Errorf("create without the secret: %v", err)
	}
	given := []byte(value)
	i, err := r.SetSecret(ctx, operator, "bank-key", given)
	if err != nil || i.Version != 1 {
		t.Fatalf("%+v, %v", i, err)
	}
	if bytes.Contains(given, []byte("secret")) {
		t.Error("the value stays in memory")
	}
	// Only the operator may.
	if _, err := r.SetSecret(ctx, alice, "bank-key", []byte(value)); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("another user sets a secret: %v", err)
	}
	if err := r.DeleteSecret(ctx, alice, "bank-key"); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("another user removes a secret: %v", err)
	}
	if _, err := r.Secrets(alice); !errors.Is(err, warren.ErrDenied) {
		t.Errorf("another user lists secrets: %v", err)
	}
	if list, err := r.Secrets(operator); err != nil || len(list) != 1 || list[0].Name != "bank-key" || len(list[0].Policies) != 1 || list[0].Policies[0] != "bank" {
		t.Errorf("%+v, %v", list, err)
	}

	// But they may use it, where the policy says so.
	sb := r.create(alice, Spec{Name: "box", Policy: "bank"})
	first := n.of(sb.ID, "bank-key")
	if len(first.Placeholders) != 1 || !strings.HasPrefix(first.Placeholders[0], "wsec_") || first.Sealed == "" || strings.Contains(first.Sealed, value) {
		t.Fatalf("the gateway has %+v", first)
	}
	if box := r.create(alice, Spec{Policy: "locked"}); n.of(box.ID, "bank-key").Name != "" {
		t.Error("a sandbox without the grant has the secret")
	}
	if _, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Policy: "bank", Env: map[string]string{"BANK_TOKEN": "x"}}}, nil); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a variable that the policy has: %v", err)
	}

	// A fork has a placeholder of its own, and that of the memory it goes on from.
	res, err := r.Fork(ctx, alice, ForkRequest{ID: "box", Count: 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{first.Placeholders[0]: true}
	for _, c := range res.Children {
		s := n.of(c.Sandbox.ID, "bank-key")
		if len(s.Placeholders) != 2 || seen[s.Placeholders[0]] || s.Placeholders[1] != first.Placeholders[0] {
			t.Errorf("a fork of %v has %v", first.Placeholders, s.Placeholders)
		}
		seen[s.Placeholders[0]] = true
	}

	// What is set again counts at once, for all, and what is removed is gone.
	if i, err = r.SetSecret(ctx, operator, "bank-key", []byte(other)); err != nil || i.Version != 2 {
		t.Fatalf("%+v, %v", i, err)
	}
	second := n.of(sb.ID, "bank-key")
	if second.Sealed == first.Sealed || second.Placeholders[0] != first.Placeholders[0] {
		t.Errorf("after a change the gateway has %+v", second)
	}
	// Another engine, which starts with what is stored: nothing needs to be told anew.
	r.stop()
	r.start()
	eventually(t, "the policies are known", func() bool { return len(r.carded()) >= 4 })
	n.mu.Lock()
	n.deaf = errors.New("it does not listen")
	n.mu.Unlock()
	if err := r.DeleteSecret(ctx, operator, "bank-key"); err == nil || !strings.Contains(err.Error(), "sandboxes have what it was before until the gateway can be told") || !strings.Contains(err.Error(), "it does not listen") {
		t.Errorf("removed, and the gateway does not hear of it: %v", err)
	}
	n.mu.Lock()
	n.deaf = nil
	n.mu.Unlock()
	if _, err := r.SetSecret(ctx, operator, "bank-key", []byte(other)); err != nil {
		t.Fatal(err)
	}
	if err := r.DeleteSecret(ctx, operator, "bank-key"); err != nil {
		t.Fatal(err)
	}
	if s := n.of(sb.ID, "bank-key"); s.Sealed != "" || len(s.Placeholders) != 1 {
		t.Errorf("after it is removed the gateway has %+v", s)
	}
	if err := r.DeleteSecret(ctx, operator, "bank-key"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	r.stop()
	files, err := filepath.Glob(filepath.Join(r.dir, "warren.db*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte(value)) || bytes.Contains(b, []byte(other)) {
			t.Errorf("%s has the value", filepath.Base(f))
		}
	}
}

// Without its key a secret can neither be set nor be taken for another.
func TestSecretKey(t *testing.T) {
	r, _ := secretRig(t)
	if err := os.WriteFile(filepath.Join(r.dir, "key"), []byte("no key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.SetSecret(t.Context(), operator, "bank-key", []byte("a-secret-value-4711")); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("with a broken key: %v", err)
	}
	if list, err := r.Secrets(operator); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}
