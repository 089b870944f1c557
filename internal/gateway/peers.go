//go:build linux

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/warren-sandbox/warren/internal/policy"
)

// Sandboxes of one private network reach each other by name. Such a name stands for an address as every other does, and a flow to it ends
// here as every other does; it goes on over the stack of the other's card, from the gateway's address. Nothing is forwarded, and there is
// no other way from one sandbox to another.

// internal is the domain of private networks: the sandbox "web" of the network "shop" is web.shop.internal.
const internal = ".internal"

// maxFromOne is how many connections one sandbox may have to another, so that one of them does not keep out the rest.
const maxFromOne = maxFlows / 4

// MaxPeers is how many sandboxes a private network has at most.
const MaxPeers = 256

// Peers is a private network.
type Peers struct {
	// Key tells it apart from another of that name, which is of somebody else. Name is the part of it that names have.
	Key, Name string
	Members   []Peer
	// Digest tells its state apart from another, for who wants to know which one is in force.
	Digest string
}

// Peer is a sandbox of a private network. Its id is a name of it too.
type Peer struct{ ID, Name string }

// peering is what a gateway knows of private networks.
type peering struct {
	mu       sync.Mutex
	networks map[string]Peers  // by key
	of       map[string]string // keys, by sandbox
	// ask has somebody start a sandbox that has no card, and says whether there is somebody; waking are those that were asked for.
	ask    func(id string) bool
	waking map[string]*waking
}

// waking is a sandbox that somebody was asked to start.
type waking struct {
	done chan struct{}
	// asked is when; an answer that has not come by wakeTime later is not waited for by the next.
	asked time.Time
	// err, set before done is closed, is why it cannot be; until is how long that is not asked again.
	err   error
	until time.Time
}

const (
	// wakeTime is how long a flow waits for the other sandbox to have its card again, askAgain how long an answer that it cannot is taken for the next.
	wakeTime = 30 * time.Second
	askAgain = time.Second
	// otherFamily is how long a sandbox may take to answer over IPv6 what it has refused over IPv4.
	otherFamily = time.Second
)

// SetPeers says who is in a private network, in place of who was; without members it is gone. A sandbox is in the last one that it was put into.
// Flows of those that are no more together have ended when SetPeers returns.
func (g *Gateway) SetPeers(p Peers) error {
	if p.Key == "" || p.Name == "" || len(p.Members) > MaxPeers {
		return fmt.Errorf("private network %q: it has no name, or more than %d members", p.Name, MaxPeers)
	}
	g.peers.mu.Lock()
	for _, m := range g.peers.networks[p.Key].Members {
		if g.peers.of[m.ID] == p.Key {
			delete(g.peers.of, m.ID)
		}
	}
	if len(p.Members) == 0 {
		delete(g.peers.networks, p.Key)
	} else {
		g.peers.networks[p.Key] = p
	}
	for _, m := range p.Members {
		g.peers.of[m.ID] = p.Key
	}
	g.peers.mu.Unlock()
	g.mu.Lock()
	var flows []*flow
	for _, c := range g.cards {
		c.mu.Lock()
		for f := range c.flows {
			if f.peer != nil {
				flows = append(flows, f)
			}
		}
		c.mu.Unlock()
	}
	g.mu.Unlock()
	for _, f := range flows {
		if err := f.together(); err != nil {
			f.stop(err)
		}
	}
	return nil
}

// PeerNetworks returns the digests of the private networks that there are, by key.
func (g *Gateway) PeerNetworks() map[string]string {
	g.peers.mu.Lock()
	defer g.peers.mu.Unlock()
	m := map[string]string{}
	for key, p := range g.peers.networks {
		m[key] = p.Digest
	}
	return m
}

// network returns the private network of a sandbox.
func (p *peering) network(id string) (Peers, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.networks[p.of[id]]
	return n, ok
}

// domain is what the names of a network end with.
func (p Peers) domain() string { return "." + p.Name + internal }

// find returns the member that a label is the name or the id of.
func (p Peers) find(label string) (Peer, bool) {
	for _, of := range []func(Peer) string{func(m Peer) string { return m.ID }, func(m Peer) string { return m.Name }} {
		if i := slices.IndexFunc(p.Members, func(m Peer) bool { return of(m) == label }); i >= 0 && label != "" {
			return p.Members[i], true
		}
	}
	return Peer{}, false
}

// host is the name of a member: its own if it has one that is a host's, else its id.
func (p Peers) host(id string) policy.Host {
	if m, ok := p.find(id); ok && m.Name != "" {
		if h, err := policy.ParseHost(m.Name + p.domain()); err == nil {
			return h
		}
	}
	return policy.Host(id + p.domain())
}

// has says whether a name is one of the network's, of a member or of nobody.
func (p Peers) has(h policy.Host) bool {
	return strings.HasSuffix("."+string(h), p.domain())
}

// lookup returns the member that a name of the network is of.
func (p Peers) lookup(h policy.Host) (Peer, error) {
	label, _ := strings.CutSuffix(string(h), p.domain())
	if m, ok := p.find(label); ok {
		return m, nil
	}
	return Peer{}, fmt.Errorf("no sandbox of the private network %s has this name", p.Name)
}

// rule is what the record says has allowed a flow within the network.
func (p Peers) rule() string { return "network " + p.Name }

// private says whether a name is one of the sandbox's private network, which is not looked up outside whatever a rule says.
func (c *card) private(h policy.Host) (n Peers, mine bool) {
	n, ok := c.g.peers.network(c.id)
	return n, ok && n.has(h)
}

// whole returns the whole name of a member of the sandbox's private network that is asked for by its label alone, and any other name as it is.
func (c *card) whole(h policy.Host) policy.Host {
	if strings.Contains(string(h), ".") {
		return h
	}
	n, ok := c.g.peers.network(c.id)
	if !ok {
		return h
	}
	if _, member := n.find(string(h)); !member {
		return h
	}
	return h + policy.Host(n.domain())
}

// peer is what a flow between two sandboxes has besides. Each of the two has one, in its own flow.
type peer struct {
	key  string
	id   string      // the other
	name policy.Host // of the other
	rule string
	// names are all that the other has.
	names []policy.Host
	// inward says that the flow is the other's.
	inward bool
	// other is the card of the other, once there is a connection.
	other *card
}

// peer returns what a flow to or from a member has besides.
func (p Peers) peer(id string, inward bool) *peer {
	return &peer{key: p.Key, id: id, name: p.host(id), rule: p.rule(), names: []policy.Host{p.host(id), policy.Host(id + p.domain())}, inward: inward}
}

// denied says whether a policy denies the other sandbox of a flow, under any of its names. That of either side counts: one that cannot be used
// denies all, and what is denied shall not come the other way.
func (f *peer) denied(p *policy.Policy, port uint16, proto policy.Protocol) (policy.Verdict, bool) {
	for _, h := range f.names {
		if v, denied := p.DeniesPeer(h, port, proto); denied {
			return v, true
		}
	}
	return policy.Verdict{}, false
}

var errApart = errors.New("the two sandboxes are not in one private network any more")

// together says why the two sandboxes of a flow may not go on with it.
func (f *flow) together() error {
	p := &f.card.g.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of[f.card.id] != f.peer.key || p.of[f.peer.id] != f.peer.key {
		return errApart
	}
	return nil
}

// peerFlow begins a flow to another sandbox, if it may be. What may not is on record.
func (c *card) peerFlow(n Peers, h policy.Host, port uint16, proto policy.Protocol) (*flow, bool) {
	f := &flow{to: policy.Flow{Host: h, Port: port, Protocol: proto}}
	refuse := func(rule, reason string) (*flow, bool) {
		e := f.entry("flow.deny")
		e.Rule, e.Reason = rule, reason
		c.refuse(e)
		return nil, false
	}
	to, err := n.lookup(h)
	if err != nil {
		return refuse("", err.Error())
	}
	f.rule, f.peer = n.rule(), n.peer(to.ID, false)
	if v, denied := f.peer.denied(c.policy(), port, proto); denied {
		return refuse(v.Rule, v.Reason)
	}
	if err := c.begin(c.life, f); err != nil {
		return refuse(f.rule, err.Error())
	}
	if err := c.meter.request(c.policy().Limits()); err != nil {
		c.done(f)
		return refuse(f.rule, err.Error())
	}
	return f, true
}

// reachPeer connects to the other sandbox of a flow and enters the flow there as well; over ends that. Both have it on record, or why not.
func (c *card) reachPeer(f *flow) (far net.Conn, over func(), ok bool) {
	far, twin, err := c.dialPeer(f)
	if err != nil {
		c.failed(f, err)
		return nil, nil, false
	}
	other := twin.card
	unlink := context.AfterFunc(twin.life, func() { f.stop(fmt.Errorf("the other side: %w", context.Cause(twin.life))) })
	end := func() {
		unlink()
		far.Close()
		other.done(twin)
	}
	// A policy or a network that came meanwhile did not see the flow.
	err = f.together()
	if w := f.again(c.policy()); err == nil && !w.Allow {
		err = &deniedError{verdict: w}
	}
	if err == nil {
		err = c.record(f.entry("flow.open"))
	}
	if err != nil {
		end()
		c.failed(f, err)
		return nil, nil, false
	}
	if err := other.record(twin.entry("flow.open")); err != nil {
		end()
		c.closed(f, err)
		return nil, nil, false
	}
	return far, func() {
		end()
		twin.up.Store(f.down.Load())
		twin.down.Store(f.up.Load())
		other.closed(twin, context.Cause(f.life))
	}, true
}

// dialPeer connects to the other sandbox, which is started for that if it sleeps.
func (c *card) dialPeer(f *flow) (net.Conn, *flow, error) {
	ctx, cancel := context.WithTimeout(f.life, wakeTime+dialTime)
	defer cancel()
	other, err := c.g.awake(ctx, f.peer.id)
	if err != nil {
		return nil, nil, err
	}
	n, ok := c.g.peers.network(c.id)
	if !ok || n.Key != f.peer.key {
		return nil, nil, errApart
	}
	if err := f.together(); err != nil {
		return nil, nil, err
	}
	twin := &flow{to: policy.Flow{Host: n.host(c.id), Port: f.to.Port, Protocol: f.to.Protocol}, rule: f.rule, peer: n.peer(c.id, true)}
	if v := twin.again(other.policy()); !v.Allow {
		v.Reason = "the policy of the other sandbox: " + v.Reason
		return nil, nil, &deniedError{verdict: v}
	}
	if err := other.begin(f.life, twin); err != nil {
		return nil, nil, fmt.Errorf("the other sandbox: %w", err)
	}
	far, err := other.dialInside(twin.life, f.to.Protocol, f.to.Port)
	if err != nil {
		if cause := context.Cause(twin.life); cause != nil {
			err = cause
		}
		other.done(twin)
		return nil, nil, err
	}
	f.peer.other, twin.peer.other = other, c
	return far, twin, nil
}

// dialInside connects to a sandbox, as its kernel's only neighbour. It tries IPv6 where nobody listens on IPv4, which datagrams do not tell.
func (c *card) dialInside(ctx context.Context, proto policy.Protocol, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	at := func(from, to netip.Addr) (local, remote tcpip.FullAddress) {
		return tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(from.AsSlice())}, tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(to.AsSlice()), Port: port}
	}
	local, remote := at(GatewayIPv4, SandboxIPv4)
	if proto == policy.UDP {
		return gonet.DialUDP(c.stack, &local, &remote, ipv4.ProtocolNumber)
	}
	far, err := c.connect(ctx, local, remote, ipv4.ProtocolNumber)
	if err != nil && ctx.Err() == nil {
		// A sandbox whose kernel has no IPv6 says nothing to that.
		ctx, cancel := context.WithTimeout(ctx, otherFamily)
		defer cancel()
		local, remote = at(GatewayIPv6, SandboxIPv6)
		if far6, err6 := c.connect(ctx, local, remote, ipv6.ProtocolNumber); err6 == nil {
			return far6, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return far, nil
}

// connect is gonet.DialTCPWithBind with a connection that can be aborted.
func (c *card) connect(ctx context.Context, local, remote tcpip.FullAddress, network tcpip.NetworkProtocolNumber) (*conn, error) {
	var wq waiter.Queue
	ep, err := c.stack.NewEndpoint(tcp.ProtocolNumber, network, &wq)
	if err != nil {
		return nil, errors.New(err.String())
	}
	entry, writable := waiter.NewChannelEntry(waiter.WritableEvents)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)
	if err = ep.Bind(local); err == nil {
		if err = ep.Connect(remote); isStarted(err) {
			select {
			case <-ctx.Done():
				ep.Abort()
				return nil, fmt.Errorf("the other sandbox does not answer: %w", ctx.Err())
			case <-writable:
			}
			err = ep.LastError()
		}
	}
	if err != nil {
		ep.Close()
		return nil, fmt.Errorf("the other sandbox: %s", err)
	}
	return &conn{TCPConn: gonet.NewTCPConn(&wq, ep), ep: ep}, nil
}

func isStarted(err tcpip.Error) bool {
	_, ok := err.(*tcpip.ErrConnectStarted)
	return ok
}

// peerTCP is acceptTCP for a connection to another sandbox.
func (c *card) peerTCP(r *tcp.ForwarderRequest, n Peers, h policy.Host) {
	f, ok := c.peerFlow(n, h, r.ID().LocalPort, policy.TCP)
	if !ok {
		r.Complete(true)
		return
	}
	defer c.done(f)
	far, over, ok := c.reachPeer(f)
	if !ok {
		r.Complete(true)
		return
	}
	over = sync.OnceFunc(over)
	defer over()
	// Whoever asked may be silent from now on, and has minutes to answer: the other side does not wait that long.
	unused := context.AfterFunc(f.life, func() {
		cut(far)
		over()
	})
	near, err := accept(r)
	unused()
	if err != nil {
		f.stop(err)
		c.closed(f, err)
		return
	}
	defer near.Close()
	c.relay(f, near, far)
}

// peerUDP is acceptUDP for datagrams to another sandbox.
func (c *card) peerUDP(r *udp.ForwarderRequest, n Peers, h policy.Host) bool {
	f, ok := c.peerFlow(n, h, r.ID().LocalPort, policy.UDP)
	if !ok {
		return false
	}
	near, ok := hear(r)
	if !ok {
		c.done(f)
		return false
	}
	go func() {
		defer c.done(f)
		defer near.Close()
		far, over, ok := c.reachPeer(f)
		if !ok {
			return
		}
		defer over()
		c.exchange(f, near, far)
	}()
	return true
}

// carried returns what counts the bytes of a flow each way. What goes from sandbox to sandbox does not leave the host, so that the ceilings of
// bytes do not count it; it keeps both from being taken for idle.
func (f *flow) carried() (up, down func(int64) error) {
	m := f.card.meter
	if f.peer == nil {
		return m.up, m.down
	}
	both := func(n int64) error {
		m.note(n)
		f.peer.other.meter.note(n)
		return nil
	}
	return both, both
}

// awake returns the card of a sandbox, which is started for that if it has none.
func (g *Gateway) awake(ctx context.Context, id string) (*card, error) {
	ctx, cancel := context.WithTimeout(ctx, wakeTime)
	defer cancel()
	if c, err := g.card(id); err == nil {
		return c, nil
	}
	p := &g.peers
	p.mu.Lock()
	w := p.waking[id]
	if now := time.Now(); w != nil && (!w.until.IsZero() && now.After(w.until) || w.until.IsZero() && now.After(w.asked.Add(wakeTime))) {
		w = nil
	}
	fresh := w == nil
	if fresh {
		w = &waking{done: make(chan struct{}), asked: time.Now()}
		p.waking[id] = w
	}
	ask := p.ask
	p.mu.Unlock()
	if fresh && (ask == nil || !ask(id)) {
		g.Woken(id, errors.New("nobody is there who could start it"))
	}
	select {
	case <-w.done:
	case <-ctx.Done():
		return nil, fmt.Errorf("the other sandbox has not been started: %w", ctx.Err())
	}
	if w.err != nil {
		return nil, fmt.Errorf("the other sandbox does not run: %w", w.err)
	}
	c, err := g.card(id)
	if err != nil {
		// It runs all the same. The next does not ask again at once.
		err = errors.New("the other sandbox has no network card")
		p.mu.Lock()
		if p.waking[id] == nil {
			p.waking[id] = &waking{done: w.done, err: err, until: time.Now().Add(askAgain)}
		}
		p.mu.Unlock()
		return nil, err
	}
	return c, nil
}

// Woken says what has come of the wish to start a sandbox.
func (g *Gateway) Woken(id string, err error) {
	p := &g.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.waking[id]
	if w == nil || !w.until.IsZero() {
		return
	}
	if err == nil {
		delete(p.waking, id)
	} else {
		w.err, w.until = err, time.Now().Add(askAgain)
		for other, o := range p.waking {
			if !o.until.IsZero() && time.Now().After(o.until) {
				delete(p.waking, other)
			}
		}
	}
	close(w.done)
}

// OnWake says who starts sandboxes that others of their private network want to reach; ask returns false if that is nobody. Woken is to be called
// for each that ask has taken.
func (g *Gateway) OnWake(ask func(id string) bool) {
	g.peers.mu.Lock()
	defer g.peers.mu.Unlock()
	g.peers.ask = ask
}

// nobodyWakes ends the waiting of flows when who was asked has gone.
func (g *Gateway) nobodyWakes() {
	g.peers.mu.Lock()
	var ids []string
	for id, w := range g.peers.waking {
		if w.until.IsZero() {
			ids = append(ids, id)
		}
	}
	g.peers.mu.Unlock()
	for _, id := range ids {
		g.Woken(id, errors.New("the daemon has gone that was to start it"))
	}
}
