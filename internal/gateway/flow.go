//go:build linux

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/warren-sandbox/warren/internal/policy"
)

const (
	// maxOpening is how many connections of a sandbox may wait for a decision or for the other side.
	maxOpening = 512
	// speakFirst is how long a client may be silent on a port where it might speak TLS or HTTP but need not, before it is taken for
	// one that waits for the server's greeting.
	speakFirst = 300 * time.Millisecond
	// udpIdle ends a flow of datagrams on which nothing came or went.
	udpIdle = 60 * time.Second
)

// flow is something of a sandbox that goes on until it ends or is ended: a connection, a stream of datagrams, or a request of an
// inspected connection.
type flow struct {
	card *card
	// to has no protocol while a connection has not shown which one it speaks; mu guards that and inspected.
	mu      sync.Mutex
	to      policy.Flow
	addr    atomic.Pointer[netip.Addr] // that was dialled
	rule    string
	started time.Time
	// request is set for a request. inspected says that the requests of a connection are decided on one by one.
	request   *policy.Request
	inspected bool
	up, down  atomic.Int64
	// peer is set for a flow between two sandboxes, of which each has one.
	peer *peer
	// use is what a request has to do with secrets, nil if nothing; outcome is what it came to if it was not simply answered.
	use     *use
	wrote   atomic.Bool // that its head was sent
	used    string      // the names of the grants that were
	outcome atomic.Pointer[outcome]
	// left is what is to be said when a request of HTTP/2 has failed and is over.
	left *refusal

	life   context.Context
	cancel context.CancelCauseFunc
}

// stop ends a flow from outside.
func (f *flow) stop(why error) { f.cancel(why) }

// settle says what a connection has turned out to be.
func (f *flow) settle(p policy.Protocol, inspected bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.to.Protocol, f.inspected = p, inspected
}

// again decides on a flow that is open.
func (f *flow) again(p *policy.Policy) policy.Verdict {
	if f.peer != nil {
		if v, denied := f.peer.denied(p, f.to.Port, f.to.Protocol); denied {
			return v
		}
		return policy.Verdict{Allow: true, Rule: f.rule}
	}
	if f.request != nil {
		v := p.Request(*f.request)
		if a := f.addr.Load(); v.Allow && a != nil {
			v = f.card.g.resolver.judge(p, f.to, *a)
		}
		return v
	}
	f.mu.Lock()
	to, inspected := f.to, f.inspected
	f.mu.Unlock()
	if to.Protocol == "" {
		return policy.Verdict{Allow: true} // for now: it is decided on when it is known
	}
	v, inspect := p.Connect(to)
	if v.Allow && inspect && !inspected {
		return policy.Verdict{Rule: v.Rule, Line: v.Line, Reason: "its requests have to be inspected now"}
	}
	if a := f.addr.Load(); v.Allow && a != nil {
		v = f.card.g.resolver.judge(p, to, *a)
	}
	return v
}

// begin enters a flow, unless the sandbox has too many.
func (c *card) begin(ctx context.Context, f *flow) error {
	f.card, f.started = c, time.Now()
	f.life, f.cancel = context.WithCancelCause(ctx)
	limits := c.policy().Limits()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		return errDetached // whoever gives its stack back waits for flows that are entered, and for no others
	}
	count, most, what := c.counter(f), maxFlows, "requests are under way"
	switch {
	case f.peer != nil && f.peer.inward:
		// Its own ceiling is about what it does, not about what others do with it.
		what = "connections from other sandboxes are open"
		if from := c.from[f.peer.id]; from >= maxFromOne {
			return &limitError{fmt.Sprintf("%d connections from this one sandbox are open, which is the most", from)}
		}
	case f.request == nil:
		most, what = atMost(limits.Connections, maxFlows), "connections are open"
	}
	if *count >= most {
		return &limitError{fmt.Sprintf("%d %s, which is the most", most, what)}
	}
	if f.peer == nil {
		if err := c.meter.left(limits); err != nil {
			return err
		}
	}
	if err := c.g.share.room(len(c.flows) - c.inward); err != nil {
		return err
	}
	c.flows[f] = true
	c.g.share.open.Add(1)
	*count++
	if f.peer != nil && f.peer.inward {
		c.from[f.peer.id]++
	}
	if open := c.connections + c.inward; f.request == nil && open == fewConnections+1 {
		setBuffers(c.stack, open)
	}
	return nil
}

// counter returns what counts flows of a kind. The caller holds mu.
func (c *card) counter(f *flow) *int {
	switch {
	case f.request != nil:
		return &c.requests
	case f.peer != nil && f.peer.inward:
		return &c.inward
	}
	return &c.connections
}

// done takes a flow out.
func (c *card) done(f *flow) {
	f.cancel(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flows[f] {
		c.g.share.open.Add(-1)
		*c.counter(f)--
		if f.peer != nil && f.peer.inward {
			if c.from[f.peer.id]--; c.from[f.peer.id] == 0 {
				delete(c.from, f.peer.id)
			}
		}
		if open := c.connections + c.inward; f.request == nil && open == fewConnections {
			setBuffers(c.stack, open)
		}
	}
	delete(c.flows, f)
}

// target says what an address of the sandbox's means: a name, or itself.
func (c *card) target(a netip.Addr) (policy.Host, error) {
	h, synthetic := c.names.find(a)
	switch {
	case h != "":
		return h, nil
	case synthetic:
		return "", errors.New("the address stands for no name that this sandbox has looked up")
	}
	return policy.ParseHost(a.String())
}

// plan is what a connection may turn out to be.
type plan struct {
	https, http, tcp policy.Verdict
	// inspect says that requests have to be seen.
	inspect bool
}

func planFor(p *policy.Policy, h policy.Host, port uint16) (pl plan) {
	pl.https, pl.inspect = p.Connect(policy.Flow{Host: h, Port: port, Protocol: policy.HTTPS})
	pl.http, _ = p.Connect(policy.Flow{Host: h, Port: port, Protocol: policy.HTTP})
	pl.tcp, _ = p.Connect(policy.Flow{Host: h, Port: port, Protocol: policy.TCP})
	return pl
}

// denied returns the verdict that tells most, if nothing is allowed.
func (pl plan) denied(port uint16) policy.Verdict {
	for _, v := range []policy.Verdict{pl.https, pl.http, pl.tcp} {
		if v.Line > 0 {
			return v
		}
	}
	if port == 80 {
		return pl.http
	}
	return pl.https
}

// forged is why a packet with another sender is dropped.
func forged(from netip.Addr) string {
	return fmt.Sprintf("the packet says that %s has sent it, which is not the sandbox", from)
}

// acceptTCP decides on a connection of the sandbox, before it is answered.
func (c *card) acceptTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	from, to := addrOf(id.RemoteAddress), netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)
	if from != SandboxIPv4 && from != SandboxIPv6 {
		c.refuse(Entry{Addr: to.Addr().String(), Port: to.Port(), Protocol: policy.TCP, Reason: forged(from)})
		r.Complete(false)
		return
	}
	h, err := c.target(to.Addr())
	if err != nil {
		c.refuse(Entry{Addr: to.Addr().String(), Port: to.Port(), Protocol: policy.TCP, Reason: err.Error()})
		r.Complete(true)
		return
	}
	if n, mine := c.private(h); mine {
		c.peerTCP(r, n, h)
		return
	}
	p := c.policy()
	pl := planFor(p, h, to.Port())
	if !pl.https.Allow && !pl.http.Allow && !pl.tcp.Allow {
		v := pl.denied(to.Port())
		c.refuse(Entry{Host: h, Port: to.Port(), Protocol: policy.TCP, Rule: v.Rule, Reason: v.Reason})
		r.Complete(true)
		return
	}
	f := &flow{to: policy.Flow{Host: h, Port: to.Port()}}
	if err := c.begin(c.life, f); err != nil {
		c.refuse(Entry{Host: h, Port: to.Port(), Protocol: policy.TCP, Reason: err.Error()})
		r.Complete(true)
		return
	}
	defer c.done(f)
	if !pl.https.Allow && !pl.http.Allow && pl.https.Line == 0 && pl.http.Line == 0 {
		// Nothing of what is said matters, so that the sandbox can be told at once when nobody answers.
		f.settle(policy.TCP, false)
		far, ok := c.reach(f, pl.tcp)
		if !ok {
			r.Complete(true)
			return
		}
		defer far.Close()
		// Whoever asked may be silent from now on, and has minutes to answer.
		unused := context.AfterFunc(f.life, func() { far.Close() })
		near, err := accept(r)
		unused()
		if err != nil {
			c.failed(f, err)
			return
		}
		defer near.Close()
		c.relay(f, near, far)
		return
	}
	near, err := accept(r)
	if err != nil {
		c.failed(f, err)
		return
	}
	defer near.Close()
	stop := context.AfterFunc(f.life, near.abort)
	defer stop()
	c.listen(f, near, pl)
}

// conn is a connection of a sandbox.
type conn struct {
	*gonet.TCPConn
	ep   tcpip.Endpoint
	once sync.Once
}

// abort ends a connection at once, so that the other side sees that it was not its end.
func (c *conn) abort() { c.once.Do(c.ep.Abort) }

// accept answers a connection.
func accept(r *tcp.ForwarderRequest) (*conn, error) {
	var wq waiter.Queue
	ep, err := r.CreateEndpoint(&wq)
	r.Complete(err != nil)
	if err != nil {
		return nil, fmt.Errorf("the sandbox's side of the connection: %s", err)
	}
	return &conn{TCPConn: gonet.NewTCPConn(&wq, ep), ep: ep}, nil
}

// listen hears what a connection is, and treats it as what it is.
func (c *card) listen(f *flow, near *conn, pl plan) {
	wait := helloTime
	if pl.tcp.Allow {
		wait = speakFirst
	}
	near.SetReadDeadline(time.Now().Add(wait))
	first := make([]byte, 1)
	n, err := near.Read(first)
	near.SetReadDeadline(time.Time{})
	var timeout net.Error
	if err != nil && !(pl.tcp.Allow && errors.As(err, &timeout) && timeout.Timeout()) {
		if n == 0 && !errors.As(err, &timeout) {
			return // it has ended without a word
		}
		c.deny(f, policy.Verdict{Reason: "the client said nothing"})
		near.abort()
		return
	}
	said := &prefixed{near, first[:n]}
	switch {
	case n == 1 && first[0] == recordHandshake && (pl.https.Allow || pl.https.Line > 0):
		c.tls(f, near, said, pl)
	case n == 1 && isMethod(first[0]) && (pl.http.Allow || pl.http.Line > 0):
		f.settle(policy.HTTP, true)
		if !pl.http.Allow {
			c.deny(f, pl.http)
			near.abort()
			return
		}
		c.g.inspect.serve(f, said)
	case pl.tcp.Allow:
		f.settle(policy.TCP, false)
		far, ok := c.reach(f, pl.tcp)
		if !ok {
			near.abort()
			return
		}
		defer far.Close()
		c.relay(f, said, far)
	default:
		want := "TLS"
		if pl.http.Allow && !pl.https.Allow {
			want = "HTTP"
		}
		c.deny(f, policy.Verdict{Rule: pl.https.Rule, Reason: fmt.Sprintf("what the client said is not %s", want)})
		near.abort()
	}
}

// recordHandshake is the first byte of a TLS connection.
const recordHandshake = 22

// isMethod says whether a byte can begin a request.
func isMethod(b byte) bool { return b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z' }

// accessDenied is the alert of that name, which clients tell their users.
var accessDenied = []byte{21, 3, 3, 0, 2, 2, 49}

// tls passes a TLS connection on, or inspects it.
func (c *card) tls(f *flow, near *conn, said *prefixed, pl plan) {
	f.settle(policy.HTTPS, pl.inspect)
	deny := func(v policy.Verdict) {
		c.deny(f, v)
		near.SetWriteDeadline(time.Now().Add(time.Second))
		near.Write(accessDenied)
		near.CloseWrite()
	}
	if !pl.https.Allow {
		deny(pl.https)
		return
	}
	name, read, err := readHello(said)
	_, literal := f.to.Host.Addr()
	switch {
	case literal && len(read) > 0:
		// The rule is about the address; a name that the client gives is the business of whoever has it.
	case err != nil:
		deny(policy.Verdict{Rule: pl.https.Rule, Reason: err.Error()})
		return
	case name != f.to.Host:
		deny(policy.Verdict{Rule: pl.https.Rule, Reason: fmt.Sprintf("the TLS server name is %s, but the connection is to %s", name, f.to.Host)})
		return
	}
	whole := &prefixed{near, read}
	if pl.inspect {
		c.g.inspect.serveTLS(f, whole)
		return
	}
	far, ok := c.reach(f, pl.https)
	if !ok {
		near.abort()
		return
	}
	defer far.Close()
	c.relay(f, whole, far)
}

// reach connects to the other side of a flow and records that, or why not.
func (c *card) reach(f *flow, v policy.Verdict) (net.Conn, bool) {
	f.rule = v.Rule
	if err := c.meter.request(c.policy().Limits()); err != nil {
		c.deny(f, policy.Verdict{Rule: v.Rule, Reason: err.Error()})
		return nil, false
	}
	far, addr, err := c.g.resolver.connect(f.life, c.g.dialer, "tcp", c.policy(), f.to)
	if err == nil {
		f.addr.Store(&addr)
		if err = c.record(f.entry("flow.open")); err != nil {
			far.Close()
		}
	}
	// A policy that came meanwhile did not see the address.
	if err == nil {
		if w := f.again(c.policy()); !w.Allow {
			far.Close()
			err = &deniedError{verdict: w}
		}
	}
	if err != nil {
		c.failed(f, err)
		return nil, false
	}
	return far, true
}

// failed records why a flow that was allowed did not come about.
func (c *card) failed(f *flow, err error) {
	var d *deniedError
	if errors.As(err, &d) {
		e := f.entry("flow.deny")
		e.Rule, e.Reason = d.verdict.Rule, d.verdict.Reason
		if d.addr.IsValid() {
			e.Addr = d.addr.String()
		}
		c.refuse(e)
		return
	}
	e := f.entry("flow.fail")
	e.Reason = err.Error()
	c.refuse(e)
}

// deny records that a flow which had begun is denied.
func (c *card) deny(f *flow, v policy.Verdict) {
	e := f.entry("flow.deny")
	e.Rule, e.Reason = v.Rule, v.Reason
	c.refuse(e)
}

func (f *flow) entry(action string) Entry {
	e := Entry{Action: action, Host: f.to.Host, Port: f.to.Port, Protocol: f.to.Protocol, Rule: f.rule, Inspected: f.inspected}
	if a := f.addr.Load(); a != nil {
		e.Addr = a.String()
	}
	if f.peer != nil {
		e.Peer, e.Inward = f.peer.id, f.peer.inward
	}
	return e
}

// relay carries bytes both ways until both sides have ended, one has failed or the flow is stopped.
func (c *card) relay(f *flow, near, far net.Conn) {
	stop := context.AfterFunc(f.life, func() {
		cut(far)
		cut(near)
	})
	var both sync.WaitGroup
	carry := func(to, from net.Conn, count *atomic.Int64, add func(int64) error) {
		if err := c.copy(to, from, count, add); err != nil {
			f.stop(err)
			return
		}
		closeWrite(to)
	}
	up, down := f.carried()
	both.Go(func() { carry(far, near, &f.up, up) })
	both.Go(func() { carry(near, far, &f.down, down) })
	both.Wait()
	stop()
	c.closed(f, context.Cause(f.life))
}

// cut ends a connection at once, whatever waits to be sent.
func cut(c net.Conn) {
	if n, ok := c.(interface{ abort() }); ok {
		n.abort()
	} else {
		c.Close()
	}
}

// closed records the end of a flow.
func (c *card) closed(f *flow, why error) {
	e := f.entry("flow.close")
	e.Up, e.Down, e.Duration = f.up.Load(), f.down.Load(), time.Since(f.started)
	if errors.Is(why, context.Canceled) { // in order, or with a card
		why = nil
		if f.card.life.Err() != nil || f.peer != nil && f.peer.other != nil && f.peer.other.life.Err() != nil {
			why = errDetached
		}
	}
	if why != nil {
		e.Reason = why.Error()
	}
	c.record(e)
}

const (
	// smallBuffer is what an idle direction of a flow costs; it grows while it is filled, to largeBuffer.
	smallBuffer = 4 << 10
	largeBuffer = 256 << 10
)

// copy carries bytes one way.
func (c *card) copy(to, from net.Conn, count *atomic.Int64, add func(int64) error) error {
	buf := make([]byte, smallBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if lerr := add(int64(n)); lerr != nil {
				return lerr
			}
			m, werr := to.Write(buf[:n])
			count.Add(int64(m))
			if werr != nil {
				return werr
			}
		}
		if err != nil {
			if isEnd(err) {
				return nil
			}
			return err
		}
		if n == len(buf) && n < largeBuffer {
			buf = make([]byte, 4*n)
		}
	}
}

// acceptUDP decides on the first datagram of a flow. It returns false for what is not served, which tells the sandbox that
// nobody is there.
func (c *card) acceptUDP(r *udp.ForwarderRequest) bool {
	id := r.ID()
	from, to := addrOf(id.RemoteAddress), netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)
	if from != SandboxIPv4 && from != SandboxIPv6 {
		c.refuse(Entry{Addr: to.Addr().String(), Port: to.Port(), Protocol: policy.UDP, Reason: forged(from)})
		return true // and dropped
	}
	f := &flow{to: policy.Flow{Port: to.Port(), Protocol: policy.UDP}}
	h, err := c.target(to.Addr())
	if err != nil {
		c.refuse(Entry{Addr: to.Addr().String(), Port: to.Port(), Protocol: policy.UDP, Reason: err.Error()})
		return false
	}
	if n, mine := c.private(h); mine {
		return c.peerUDP(r, n, h)
	}
	f.to.Host = h
	v, _ := c.policy().Connect(f.to)
	if !v.Allow {
		c.refuse(Entry{Host: h, Port: to.Port(), Protocol: policy.UDP, Rule: v.Rule, Reason: v.Reason})
		return false
	}
	if err := c.begin(c.life, f); err != nil {
		c.refuse(Entry{Host: h, Port: to.Port(), Protocol: policy.UDP, Reason: err.Error()})
		return false
	}
	// The datagram waits in the endpoint, which has to be there before this returns.
	near, ok := hear(r)
	if !ok {
		c.done(f)
		return false
	}
	go func() {
		defer c.done(f)
		defer near.Close()
		f.rule = v.Rule
		far, addr, err := c.g.resolver.connect(f.life, c.g.dialer, "udp", c.policy(), f.to)
		if err == nil {
			f.addr.Store(&addr)
			if err = c.record(f.entry("flow.open")); err != nil {
				far.Close()
			}
		}
		// A policy that came meanwhile did not see the address.
		if err == nil {
			if w := f.again(c.policy()); !w.Allow {
				far.Close()
				err = &deniedError{verdict: w}
			}
		}
		if err != nil {
			c.failed(f, err)
			return
		}
		defer far.Close()
		c.exchange(f, near, far)
	}()
	return true
}

// hear is accept for datagrams.
func hear(r *udp.ForwarderRequest) (*gonet.UDPConn, bool) {
	var wq waiter.Queue
	ep, err := r.CreateEndpoint(&wq)
	if err != nil {
		return nil, false
	}
	return gonet.NewUDPConn(&wq, ep), true
}

// exchange carries datagrams both ways until nothing has come for a while.
func (c *card) exchange(f *flow, near, far net.Conn) {
	stop := context.AfterFunc(f.life, func() { near.Close(); far.Close() })
	defer stop()
	var last atomic.Int64
	last.Store(time.Now().UnixNano())
	var both sync.WaitGroup
	carry := func(to, from net.Conn, count *atomic.Int64, add func(int64) error) {
		defer f.cancel(nil)
		buf := make([]byte, MTU)
		for {
			from.SetReadDeadline(time.Now().Add(udpIdle))
			n, err := from.Read(buf)
			if err != nil {
				var t net.Error
				if errors.As(err, &t) && t.Timeout() && time.Since(time.Unix(0, last.Load())) < udpIdle {
					continue // the other direction is in use
				}
				return
			}
			last.Store(time.Now().UnixNano())
			if add(int64(n)) != nil {
				return
			}
			if _, err := to.Write(buf[:n]); err == nil {
				count.Add(int64(n))
			}
		}
	}
	up, down := f.carried()
	both.Go(func() { carry(far, near, &f.up, up) })
	both.Go(func() { carry(near, far, &f.down, down) })
	both.Wait()
	c.closed(f, context.Cause(f.life))
}
