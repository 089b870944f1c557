//go:build linux

// Package gateway is the network of sandboxes, and all of it. It holds the far end of each sandbox's network card and ends every
// flow there, in a TCP/IP stack of its own for each: no packet is forwarded. A flow is decided on by its policy, and if it may be,
// the gateway looks the name up, compares the addresses with the policy and connects to one of those itself.
//
// What is not written here does not happen: without a policy, or when the process is gone, nothing passes.
package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/policy"
)

// Options of a gateway.
type Options struct {
	// Authority signs the certificates that inspected connections see; nil means that a connection which has to be inspected is denied.
	Authority *Authority
	// Evidence gets what happens. A flow that cannot be recorded does not happen. Nil means none.
	Evidence func(Entry) error
	// Resolver and Dialer are the host's own if nil.
	Resolver Resolver
	Dialer   Dialer
	// Own returns the addresses of this machine, which only a rule that names them opens; nil means those of its network cards.
	Own func() ([]netip.Addr, error)
	// Near are networks whose addresses count as this machine's: what a translator in front of it turns into its own, and public addresses of its
	// owner's.
	Near []netip.Prefix
	// Roots verify the servers of inspected connections; nil means the host's.
	Roots *x509.CertPool
	// Secrets opens those that sandboxes are granted; nil means that there are none.
	Secrets Opener
	// Connections is how many connections and requests all sandboxes together may have open, 0 for 16384, and Memory how many bytes the process may hold before
	// those that have many get no more, 0 for any. Records is how many records a second each may write one by one; 0 means 50.
	Connections, Records int
	Memory               int64
	// Logger gets what is nobody's evidence; nil means none.
	Logger *slog.Logger
}

// Gateway serves the cards of a host's sandboxes.
type Gateway struct {
	opts     Options
	log      *slog.Logger
	resolver *resolver
	dialer   Dialer
	inspect  *inspector
	share    share
	turns    atomic.Uint64

	mu     sync.Mutex
	cards  map[string]*card
	past   map[string]*names // of sandboxes that have no card now
	closed bool

	peers peering
}

// New returns a gateway without a card.
func New(opts Options) *Gateway {
	if opts.Evidence == nil {
		opts.Evidence = func(Entry) error { return nil }
	}
	if opts.Resolver == nil {
		opts.Resolver = &net.Resolver{PreferGo: true}
	}
	if opts.Dialer == nil {
		opts.Dialer = &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true}}
	}
	if opts.Own == nil {
		opts.Own = machineAddresses
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Connections == 0 {
		opts.Connections = defaultConnections
	}
	if opts.Records == 0 {
		opts.Records = defaultRecords
	}
	g := &Gateway{opts: opts, log: opts.Logger, resolver: newResolver(opts.Resolver, opts.Own, opts.Near), dialer: opts.Dialer, cards: map[string]*card{}, past: map[string]*names{}}
	g.peers = peering{networks: map[string]Peers{}, of: map[string]string{}, waking: map[string]*waking{}}
	g.share.connections, g.share.memory, g.share.inUse = opts.Connections, opts.Memory, heapInUse
	g.inspect = newInspector(g)
	return g
}

// card is a sandbox's.
type card struct {
	refusing duplex.Refusals
	id       string
	g        *Gateway
	file     *os.File
	kind     endKind
	stack    *stack.Stack
	link     stack.LinkEndpoint
	names    *names
	// naming joins questions for one name.
	naming singleflight.Group
	meter  *meter
	dns    *dnsServer
	// forward makes the requests of inspected connections; with each policy there is another, so that none goes over a connection that is no longer allowed.
	forward atomic.Pointer[http.Transport]
	// life ends with the card.
	life context.Context
	end  context.CancelFunc
	// rules are those of this moment, never nil, and vault what they need; it is changed before them, so that a request may find a vault that is
	// newer than its rules, and then lacks what they no longer grant.
	rules  atomic.Pointer[Rules]
	vault  atomic.Pointer[vault]
	ledger *ledger
	// setting orders those who change the rules, of whom turn was the last; the gateway's mu guards turn.
	setting sync.Mutex
	turn    uint64

	mu    sync.Mutex
	flows map[*flow]bool
	// How many of them are connections of the sandbox, requests of those, and connections of other sandboxes.
	connections, requests, inward int
	// from is how many connections are open of each other sandbox.
	from map[string]int
}

// ErrNotFound says that a sandbox has no card.
var ErrNotFound = errors.New("the sandbox has no card")

// ErrSuperseded says that what came later than a call is in force, and stays.
var ErrSuperseded = errors.New("one that came after it is in force")

// Attach serves a card, under rules which hold from the first packet on: what a device has got before waits, or is lost. The end is the gateway's
// then, also after a failure. A card that
// the sandbox had before is let go of: it has been started anew. Names keep the addresses that they had for it, or for the sandbox from, whose
// memory it goes on from.
func (g *Gateway) Attach(id string, end *os.File, r Rules, from string) error {
	return g.attach(id, end, r, from, g.turn())
}

// attach is Attach for a call that came as the turn says.
func (g *Gateway) attach(id string, end *os.File, r Rules, from string, turn uint64) error {
	if r.Policy == nil {
		end.Close()
		return fmt.Errorf("attach sandbox %s: no policy", id)
	}
	kind, err := kindOfEnd(end)
	if err != nil {
		end.Close()
		return fmt.Errorf("attach sandbox %s: %w", id, err)
	}
	c := &card{refusing: duplex.Refusals{Max: maxRefusing}, id: id, g: g, file: end, kind: kind, names: newNames(), meter: newMeter(), turn: turn, flows: map[*flow]bool{}, from: map[string]int{}}
	c.ledger = newLedger(g.opts.Records, c.write)
	c.set(r)
	c.life, c.end = context.WithCancel(context.Background())
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		end.Close()
		return errors.New("the gateway is closed")
	}
	before := g.cards[id]
	if before != nil && turn < before.turn {
		end.Close()
		return fmt.Errorf("attach sandbox %s with policy %q: %w", id, r.Policy.Name(), ErrSuperseded)
	}
	if before != nil {
		delete(g.cards, id)
		go before.close()
	}
	switch {
	case before != nil:
		before.names.copyTo(c.names)
	case g.past[id] != nil:
		g.past[id].copyTo(c.names)
	case g.cards[from] != nil:
		g.cards[from].names.copyTo(c.names)
	case g.past[from] != nil:
		g.past[from].copyTo(c.names)
	}
	delete(g.past, id)
	s, link, err := newStack(int(end.Fd()), kind, func() { go g.drop(c) }, func(a astray) {
		c.refuse(Entry{Addr: a.to.String(), Port: a.port, Protocol: a.protocol, Reason: a.reason})
	})
	if err != nil {
		end.Close()
		return err
	}
	c.stack, c.link = s, link
	c.forward.Store(g.inspect.transport(c))
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxOpening, c.acceptTCP).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, c.acceptUDP).HandlePacket)
	if c.dns, err = serveDNS(c); err != nil {
		c.close()
		return err
	}
	g.cards[id] = c
	return nil
}

// Detach ends the flows of a sandbox and lets go of its card. Without one it does nothing.
func (g *Gateway) Detach(id string) {
	if c, err := g.card(id); err == nil {
		g.drop(c)
	}
}

// drop lets go of a card, if it is still its sandbox's. The sandbox may come back, with addresses in its memory.
func (g *Gateway) drop(c *card) {
	g.mu.Lock()
	mine := g.cards[c.id] == c
	if mine {
		delete(g.cards, c.id)
		if len(g.past) >= maxPast {
			clear(g.past)
		}
		g.past[c.id] = c.names
	}
	g.mu.Unlock()
	if mine {
		c.close()
	}
}

// maxPast is for how many sandboxes without a card names are remembered.
const maxPast = 10000

// SetPolicy changes what a sandbox may do. Flows that it no longer may have end before SetPolicy returns.
func (g *Gateway) SetPolicy(id string, r Rules) error { return g.setPolicy(id, r, g.turn()) }

// turn numbers what is asked of the gateway as it comes.
func (g *Gateway) turn() uint64 { return g.turns.Add(1) }

// setPolicy is SetPolicy for a call that came as the turn says. Policies take their time to be read, and one that came later may be in force by then: it stays.
func (g *Gateway) setPolicy(id string, r Rules, turn uint64) error {
	if r.Policy == nil {
		return fmt.Errorf("sandbox %s: no policy", id)
	}
	c, err := g.settable(id, turn)
	if err != nil {
		return fmt.Errorf("policy %q was not put into force: %w", r.Policy.Name(), err)
	}
	c.set(r)
	c.setting.Unlock()
	c.mu.Lock()
	flows := make([]*flow, 0, len(c.flows))
	for f := range c.flows {
		flows = append(flows, f)
	}
	c.mu.Unlock()
	for _, f := range flows {
		if v := f.again(c.policy()); !v.Allow {
			f.stop(&deniedError{verdict: v})
		} else if f.use != nil && !f.wrote.Load() && !f.use.still(c) {
			f.stop(&deniedError{verdict: policy.Verdict{Reason: "the secret that the request was to be sent with has changed"}})
		}
	}
	c.forward.Swap(g.inspect.transport(c)).CloseIdleConnections()
	return nil
}

// settable returns the card of a sandbox, whose rules the caller alone may set, until it unlocks setting.
func (g *Gateway) settable(id string, turn uint64) (*card, error) {
	for {
		c, err := g.card(id)
		if err != nil {
			return nil, err
		}
		c.setting.Lock()
		g.mu.Lock()
		now, last := g.cards[id], c.turn
		if now == c && turn >= last {
			c.turn = turn
		}
		g.mu.Unlock()
		switch {
		case now == c && turn >= last:
			return c, nil
		case now == c:
			err = fmt.Errorf("sandbox %s: %w", id, ErrSuperseded)
		}
		c.setting.Unlock()
		if err != nil {
			return nil, err
		}
		// Another card has come in its place, which may have come before this call.
	}
}

// set puts rules into force.
func (c *card) set(r Rules) {
	if r.Digest == "" {
		r.Digest = r.Policy.Digest()
	}
	c.vault.Store(newVault(c.g.opts.Secrets, r.Secrets, c.vault.Load()))
	c.rules.Store(&r)
}

// policy is that of this moment.
func (c *card) policy() *policy.Policy { return c.rules.Load().Policy }

// Quiet says for how long a sandbox has neither sent nor received a byte.
func (g *Gateway) Quiet(id string) (time.Duration, error) {
	c, err := g.card(id)
	if err != nil {
		return 0, err
	}
	return c.meter.quiet(), nil
}

// Digest returns that of a sandbox's rules.
func (g *Gateway) Digest(id string) (string, error) {
	c, err := g.card(id)
	if err != nil {
		return "", err
	}
	return c.rules.Load().Digest, nil
}

// Sandboxes returns the ids of those that have a card, in order.
func (g *Gateway) Sandboxes() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	ids := make([]string, 0, len(g.cards))
	for id := range g.cards {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (g *Gateway) card(id string) (*card, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.cards[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
}

// Close ends all flows and all cards, those that are sockets also for whoever else has a copy of them. A gateway that another is to follow just ends its process.
func (g *Gateway) Close() {
	g.mu.Lock()
	g.closed = true
	cards := g.cards
	g.cards = map[string]*card{}
	g.mu.Unlock()
	for _, c := range cards {
		c.close()
	}
	g.inspect.close()
}

// close ends a card; it is called once.
func (c *card) close() {
	c.end()
	if c.dns != nil {
		c.dns.close()
	}
	c.forward.Load().CloseIdleConnections()
	c.mu.Lock()
	for f := range c.flows {
		f.stop(errDetached)
	}
	c.mu.Unlock()
	go c.release()
}

// release gives back what a card holds, once nothing of it is in use. The stack waits for the link's reader with its lock held, the
// reader may wait for a connection, and a connection that is being ended for the lock: so the reader goes first, then the
// connections, and only then the stack.
func (c *card) release() {
	defer c.ledger.settle()
	if c.kind == endSocket {
		unix.Shutdown(int(c.file.Fd()), unix.SHUT_RDWR)
		c.link.Wait()
	} else {
		c.link.Attach(nil) // which stops its reader and waits for it
	}
	// A connection that its side has begun and gone silent over takes the stack two minutes to give up.
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		c.mu.Lock()
		left := len(c.flows)
		c.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(end) {
			c.g.log.Error("flows of a card that is gone do not end; what they hold is kept", "sandbox", c.id, "flows", left)
			return
		}
	}
	c.stack.RemoveNIC(nic)
	c.stack.Close()
	c.stack.Wait()
	c.file.Close()
}

var errDetached = errors.New("the sandbox has no card any more")

// Entry is what happened once.
type Entry struct {
	Sandbox string
	Time    time.Time
	// Action is "flow.open", "flow.close", "flow.deny", "flow.fail", "http.open", "http.request", "http.deny", "http.fail", "dns.allow", "dns.deny", "dns.fail",
	// "secret.use", "secret.shown", "secret.guess", "record.more", which counts those of the action Of, or "record.lost", which counts what could not be written.
	// A request that is about to be sent is "http.open", or "secret.use" if a secret goes along, and "http.request" or "http.fail" when it has ended.
	Action, Of string
	Host       policy.Host
	// Addr is the address that was dialled, or that was asked for where there is no host.
	Addr     string
	Port     uint16
	Protocol policy.Protocol
	Rule     string
	Policy   string
	Reason   string
	// Up and Down are bytes to and from the other side.
	Up, Down int64
	Duration time.Duration
	Method   string
	Path     string
	Status   int
	// Peer is the other sandbox of a flow within a private network, and Inward says that the flow is that one's.
	Peer   string
	Inward bool
	// Inspected says that the gateway has seen what was said.
	Inspected bool
	// Secret names the grants whose secrets were used.
	Secret string
	// More counts what happened alike and has no record of its own.
	More int64
}
