package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/policy"
)

// Sandboxes of one owner that name the same private network reach each other by name. Who is in which is in their records, and the gateway is told
// whenever that changes: what it was not told it does not let pass. A loop compares what it knows, for whoever was killed in between.

// PeerNetwork is a private network. Key tells it apart from another of that name, which is another owner's.
type PeerNetwork struct {
	Key, Name string
	Members   []Peer
	// Digest tells its state apart from another, see [Network.PeerNetworks].
	Digest string
}

// Peer is a sandbox in a private network.
type Peer struct {
	ID   warren.SandboxID
	Name string
}

const (
	// maxPeers is how many sandboxes may be in a private network. The gateway takes no more either.
	maxPeers = 256
	// comparePeers is how often what the gateway knows is compared with the records.
	comparePeers = 10 * time.Second
	// tellWait is how long a gateway may take to be told of a change.
	tellWait = 10 * time.Second
	// leaveWait is how long a delete waits for that.
	leaveWait = 2 * time.Second
)

// noPeers is the name of no private network.
const noPeers = "none"

// checkNetwork checks the name of a private network.
func checkNetwork(name string) error {
	ok := nameForm.MatchString(name) && !strings.HasSuffix(name, "-")
	if _, err := policy.ParseHost("x." + name + ".internal"); !ok || err != nil {
		return invalid("network", name, `want a name of 1 to 63 of a-z, 0-9 and -, with - neither first nor last, or "none"`)
	}
	return nil
}

// checkPeers checks the private network of a spec, whose policy is settled.
func checkPeers(s *Spec) error {
	if s.PrivateNetwork == noPeers {
		s.PrivateNetwork = ""
	}
	if s.PrivateNetwork == "" {
		return nil
	}
	if err := checkNetwork(s.PrivateNetwork); err != nil {
		return err
	}
	return needsCard(s)
}

// needsCard refuses a private network for a sandbox that has no network card to reach it by.
func needsCard(s *Spec) error {
	if s.Policy != NoNetwork && s.Policy != "" {
		return nil
	}
	return fmt.Errorf("network %s: the sandbox has no network card, because its policy is none or driver %s gives it none; name a policy, such as locked, and a driver that has cards, or leave the network out: %w",
		quote(s.PrivateNetwork), s.Driver, errUnsupported)
}

// roomFor refuses n more members of a private network. The caller holds mu.
func (e *Engine) roomFor(n ownedName, more int) error {
	if n.name == "" {
		return nil
	}
	have := 0
	for _, sb := range e.boxes {
		if sb.network() == n || sb.row.Owner == n.owner && sb.joining == n.name {
			have++
		}
	}
	if have+more > maxPeers {
		return fmt.Errorf("network %s has %d sandboxes and %d more are too many, at most %d can be in one; delete some, or use another network: %w", quote(n.name), have, more, maxPeers, warren.ErrExhausted)
	}
	return nil
}

// network returns the private network of a sandbox, with an empty name for none. The caller holds mu.
func (sb *sandbox) network() ownedName {
	if sb.row.Network == "" || sb.gone || sb.state() == Deleting {
		return ownedName{}
	}
	return ownedName{sb.row.Owner, sb.row.Network}
}

// networkOf is network for an id, which may be nobody's.
func (e *Engine) networkOf(id warren.SandboxID) ownedName {
	e.mu.Lock()
	defer e.mu.Unlock()
	if sb := e.boxes[id]; sb != nil {
		return sb.network()
	}
	return ownedName{}
}

// key is what a gateway calls a private network. The name has no slash, so that no two have one key.
func (n ownedName) key() string { return n.owner + "/" + n.name }

// peerNetworks returns the private networks that there are, or the one with this key alone, which may have nobody.
func (e *Engine) peerNetworks(only string) map[string]PeerNetwork {
	all := map[string]PeerNetwork{}
	if only != "" {
		all[only] = PeerNetwork{Key: only, Name: only[strings.LastIndexByte(only, '/')+1:]}
	}
	e.mu.Lock()
	for id, sb := range e.boxes {
		n := sb.network()
		if n.name == "" || only != "" && n.key() != only {
			continue
		}
		p := all[n.key()]
		p.Key, p.Name = n.key(), n.name
		p.Members = append(p.Members, Peer{id, sb.row.Name})
		all[n.key()] = p
	}
	e.mu.Unlock()
	for key, p := range all {
		slices.SortFunc(p.Members, func(a, b Peer) int { return strings.Compare(string(a.ID), string(b.ID)) })
		text, err := json.Marshal(p)
		if err != nil {
			panic(err) // names always encode
		}
		sum := sha256.Sum256(text)
		p.Digest = hex.EncodeToString(sum[:])
		all[key] = p
	}
	return all
}

// tellPeers tells the gateway who is in a private network now. Tellings follow each other, so that the last one is the newest.
func (e *Engine) tellPeers(ctx context.Context, n ownedName) error {
	if n.name == "" || e.opts.Network == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, tellWait)
	defer cancel()
	var err error
	select {
	case e.telling <- struct{}{}:
		err = e.opts.Network.SetPeers(ctx, e.peerNetworks(n.key())[n.key()])
		<-e.telling
	case <-ctx.Done(): // who asked before waits for an answer as well, and this one no longer than that
		err = fmt.Errorf("it is still being told of others: %w", warren.ErrUnavailable)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.untold[n] = true
		return fmt.Errorf("tell the gateway who is in network %s: %w", quote(n.name), err)
	}
	delete(e.untold, n)
	return nil
}

// movedPeer tells the gateway that a sandbox has gone from one private network to another, or has another name. When the gateway cannot be told
// now, it is as soon as it can; until then whoever repeats the call hears of it again.
func (e *Engine) movedPeer(ctx context.Context, owner string, from, to ownedName) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellWait)
	defer cancel()
	tell := []ownedName{from, to}
	e.mu.Lock()
	for n := range e.untold {
		if n.owner == owner {
			tell = append(tell, n)
		}
	}
	e.mu.Unlock()
	slices.SortFunc(tell, func(a, b ownedName) int {
		return cmp.Or(strings.Compare(a.owner, b.owner), strings.Compare(a.name, b.name))
	})
	var err error
	for _, n := range slices.Compact(tell) {
		err = errors.Join(err, e.tellPeers(ctx, n))
	}
	if err != nil {
		e.log.Warn("a change of a private network is not in force yet", "error", err)
		e.peersChanged()
	}
	return err
}

// leftPeers tells the gateway that a sandbox of a private network is gone, so that its name is too when the call that removed it returns. What could
// not be told soon is left to the loop.
func (e *Engine) leftPeers(ctx context.Context, n ownedName) {
	if n.name == "" || len(e.carded()) == 0 {
		return // nobody is there who could ask
	}
	ctx, cancel := context.WithTimeout(ctx, leaveWait)
	defer cancel()
	if err := e.tellPeers(ctx, n); err != nil && e.ctx.Err() == nil {
		e.log.Warn("the name of a sandbox that is gone stays for a moment", "error", err)
	}
}

// peersChanged has the gateway told, soon.
func (e *Engine) peersChanged() {
	select {
	case e.peering <- struct{}{}:
	default:
	}
}

// peerLoop keeps the gateway's knowledge of private networks that of the records.
func (e *Engine) peerLoop() {
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-e.peering:
		case <-e.clock.After(comparePeers):
		}
		if err := e.comparePeers(e.ctx); err != nil && e.ctx.Err() == nil {
			e.log.Error("look after the private networks", "error", err)
		}
	}
}

// comparePeers tells the gateway of each private network of which it knows another state. A gateway without a card has nobody to keep apart.
func (e *Engine) comparePeers(ctx context.Context) error {
	if len(e.carded()) == 0 {
		return nil
	}
	has, err := e.opts.Network.PeerNetworks(ctx)
	if err != nil {
		return err
	}
	want := e.peerNetworks("")
	for key := range has {
		if _, ok := want[key]; !ok {
			want[key] = PeerNetwork{Key: key}
		}
	}
	var errs []error
	for _, key := range sortedKeys(want) {
		if digest, ok := has[key]; ok && digest == want[key].Digest && len(want[key].Members) > 0 {
			continue
		}
		i := strings.LastIndexByte(key, '/')
		if i < 0 {
			continue // none of ours
		}
		if err := e.tellPeers(ctx, ownedName{key[:i], key[i+1:]}); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// WakePeer starts a sandbox that another of its private network wants to reach, as a call into it would. When it returns without an error, the
// sandbox runs.
func (e *Engine) WakePeer(ctx context.Context, id warren.SandboxID) error {
	e.mu.Lock()
	sb := e.boxes[id]
	if sb == nil || sb.network().name == "" {
		e.mu.Unlock()
		return fmt.Errorf("it is in no private network: %w", warren.ErrNotFound)
	}
	e.mu.Unlock()
	u, err := e.use(ctx, sb)
	if err != nil {
		return err
	}
	u.End()
	return nil
}

// explainPeer answers for a name of a sandbox's private network as the gateway does. It returns nil for all others.
func (e *Engine) explainPeer(sb *Sandbox, target string) (*PolicyAnswer, error) {
	r, err := policy.ParseTarget(target)
	if err != nil || sb.PrivateNetwork == "" {
		return nil, nil // which explains itself
	}
	key := ownedName{sb.Owner, sb.PrivateNetwork}.key()
	member := func(label string) bool {
		return slices.ContainsFunc(e.peerNetworks(key)[key].Members, func(m Peer) bool {
			return label == string(m.ID) || m.Name != "" && label == m.Name
		})
	}
	domain := "." + sb.PrivateNetwork + ".internal"
	if member(string(r.Host)) { // its label is enough
		r.Host += policy.Host(domain)
	}
	label, own := strings.CutSuffix("."+string(r.Host), domain)
	if !own {
		return nil, nil
	}
	parsed, err := e.parse(e.effective(sb.ID, sb.Spec.Policy))
	if err != nil {
		return nil, err
	}
	a := &PolicyAnswer{Policy: sb.Spec.Policy, Rule: "network " + sb.PrivateNetwork}
	if !member(strings.TrimPrefix(label, ".")) {
		a.Reason = fmt.Sprintf("no sandbox of the private network %s has this name", sb.PrivateNetwork)
		return a, nil
	}
	proto := policy.TCP
	if r.Protocol == policy.UDP {
		proto = policy.UDP
	}
	if v, denied := parsed.DeniesPeer(r.Host, r.Port, proto); denied {
		a.Rule, a.Reason = v.Rule, v.Reason
		a.Steps = append(a.Steps, PolicyStep{v.Rule, v.Line, true, v.Reason})
		return a, nil
	}
	a.Allow, a.Reason = true, "both are in the private network "+sb.PrivateNetwork
	return a, nil
}
