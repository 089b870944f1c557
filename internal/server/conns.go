package server

import (
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// pendingFor is how long a TCP connection may last on which nobody has shown a token.
const pendingFor = 30 * time.Second

// connLimits bound the connections of a listener.
type connLimits struct {
	// total are all that are open. perSource are those of one source on which nobody has been authenticated yet, each of which
	// lasts for pendingFor; 0 bounds nothing.
	total, perSource int
	pendingFor       time.Duration
}

// descriptors is how many files this process may have open. Go has raised the soft limit to the hard one.
func descriptors() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return int(min(r.Cur, 64<<10))
}

// tcpLimits leave descriptors to the unix socket, the sandboxes and the store, also when each connection needs another one into a
// sandbox.
func tcpLimits() connLimits {
	n := descriptors()
	return connLimits{total: max(64, n/4), perSource: max(32, n/32), pendingFor: pendingFor}
}

// unixLimits are for the operator alone: nobody else can open the socket.
func unixLimits() connLimits {
	return connLimits{total: max(64, descriptors()/8)}
}

// gate is a listener that closes at once what is above its limits, so that others cannot use up the descriptors of the daemon.
type gate struct {
	net.Listener
	limits connLimits

	mu      sync.Mutex
	open    int
	pending map[netip.Prefix]int
}

func newGate(l net.Listener, limits connLimits) *gate {
	return &gate{Listener: l, limits: limits, pending: map[netip.Prefix]int{}}
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		p := g.enter(c)
		if p == nil {
			c.Close()
			continue
		}
		// The types stay what they are, for what they do beyond net.Conn.
		switch c := c.(type) {
		case *net.TCPConn:
			return &tcpConn{c, p}, nil
		case *net.UnixConn:
			return &unixConn{c, p}, nil
		}
		return &otherConn{c, p}, nil
	}
}

// enter counts a connection, or returns nil when there are too many.
func (g *gate) enter(c net.Conn) *place {
	p := &place{gate: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open >= g.limits.total {
		return nil
	}
	if g.limits.perSource > 0 {
		p.source, p.pending = sourceOf(c.RemoteAddr().String()), true
		if g.pending[p.source] >= g.limits.perSource {
			return nil
		}
		g.pending[p.source]++
		// net/http bounds the wait for a header, but neither each step of HTTP/2 nor an answer that nobody takes.
		p.expiry = time.AfterFunc(g.limits.pendingFor, func() { c.Close() })
	}
	g.open++
	return p
}

// place is what a connection takes of its gate.
type place struct {
	gate    *gate
	source  netip.Prefix
	expiry  *time.Timer
	pending bool // guarded by gate.mu, as is left
	left    bool
}

// known notes that who is at the other end has been authenticated.
func (p *place) known() {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	p.settle()
}

// leave gives the place back, once.
func (p *place) leave() {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	if p.left {
		return
	}
	p.left = true
	p.gate.open--
	p.settle()
}

func (p *place) settle() {
	if !p.pending {
		return
	}
	p.pending = false
	p.expiry.Stop()
	if p.gate.pending[p.source]--; p.gate.pending[p.source] == 0 {
		delete(p.gate.pending, p.source)
	}
}

type tcpConn struct {
	*net.TCPConn
	*place
}

// Close implements net.Conn.
func (c *tcpConn) Close() error {
	defer c.leave()
	return c.TCPConn.Close()
}

type unixConn struct {
	*net.UnixConn
	*place
}

// Close implements net.Conn.
func (c *unixConn) Close() error {
	defer c.leave()
	return c.UnixConn.Close()
}

type otherConn struct {
	net.Conn
	*place
}

// Close implements net.Conn.
func (c *otherConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

// placeOf returns the place of a connection that came through a gate.
func placeOf(c net.Conn) *place {
	switch c := c.(type) {
	case *tcpConn:
		return c.place
	case *unixConn:
		return c.place
	case *otherConn:
		return c.place
	}
	return nil
}
