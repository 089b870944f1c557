//go:build linux

package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/warren-sandbox/warren/internal/gateway/control"
	"github.com/warren-sandbox/warren/internal/message"
	"github.com/warren-sandbox/warren/internal/tun"
)

// serve handles each connection to a port of the sandbox, and hangs up when that is done.
func (in *inside) serve(port uint16, handle func(net.Conn)) {
	in.t.Helper()
	l := in.listener(port)
	in.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
}

func (in *inside) listener(port uint16) (l net.Listener) {
	in.t.Helper()
	var err error
	if in.netns != nil {
		err = tun.Within(in.netns, func() (err error) {
			l, err = net.Listen("tcp", fmt.Sprintf("%s:%d", SandboxIPv4, port))
			return err
		})
	} else {
		at, proto := full(netip.AddrPortFrom(SandboxIPv4, port))
		l, err = gonet.ListenTCP(in.stack, at, proto)
	}
	if err != nil {
		in.t.Fatal(err)
	}
	return l
}

// packets returns a socket for datagrams to a port of the sandbox.
func (in *inside) packets(port uint16) (c net.PacketConn) {
	in.t.Helper()
	var err error
	if in.netns != nil {
		err = tun.Within(in.netns, func() (err error) {
			c, err = net.ListenPacket("udp", fmt.Sprintf("%s:%d", SandboxIPv4, port))
			return err
		})
	} else {
		at, _ := full(netip.AddrPortFrom(SandboxIPv4, port))
		c, err = gonet.DialUDP(in.stack, &at, nil, ipv4.ProtocolNumber)
	}
	if err != nil {
		in.t.Fatal(err)
	}
	in.t.Cleanup(func() { c.Close() })
	return c
}

// say connects to a name, says something and returns the answer.
func (in *inside) say(host string, port int, text string) (string, error) {
	ctx, cancel := context.WithTimeout(in.t.Context(), 20*time.Second)
	defer cancel()
	c, err := in.dialName(ctx, "tcp", fmt.Sprintf("%s:%d", host, port))
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	c.(interface{ CloseWrite() error }).CloseWrite()
	b, err := io.ReadAll(c)
	return string(b), err
}

// peers puts sandboxes into a private network, as NAME=ID.
func (l *lab) peers(key, name string, members ...string) {
	l.t.Helper()
	p := Peers{Key: key, Name: name}
	for _, m := range members {
		n, id, _ := strings.Cut(m, "=")
		p.Members = append(p.Members, Peer{ID: id, Name: n})
	}
	if err := l.g.SetPeers(p); err != nil {
		l.t.Fatal(err)
	}
}

// answers is an echo that begins with who it is.
func answers(who string) func(net.Conn) {
	return func(c net.Conn) {
		io.WriteString(c, who+":")
		io.Copy(c, c)
	}
}

// found returns the entries that fit.
func (l *lab) found(fits func(Entry) bool) (list []Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if fits(e) {
			list = append(list, e)
		}
	}
	return list
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not happen that %s", what)
		}
	}
}

// TestPeers has members of a private network talk to each other in both directions, and everybody else try what a member does.
func TestPeers(t *testing.T) {
	l := newLab(t)
	a := l.sandbox("sa", "extends: locked")
	b := l.sandbox("sb", "extends: locked")
	stranger := l.sandbox("sx", "extends: open")
	other := l.sandbox("so", "extends: open")
	l.peers("alice/shop", "shop", "web=sa", "db=sb")
	l.peers("bob/shop", "shop", "web=so")
	for who, in := range map[string]*inside{"a": a, "b": b, "x": stranger, "o": other} {
		in.serve(8000, answers(who))
	}
	for _, c := range []struct {
		from *inside
		host string
		want string
	}{
		{a, "db.shop.internal", "b:hi"}, {b, "web.shop.internal", "a:hi"}, {a, "sb.shop.internal", "b:hi"}, {a, "DB.Shop.Internal", "b:hi"}, {a, "db", "b:hi"},
		{a, "web.shop.internal", "a:hi"}, // itself
		{other, "web.shop.internal", "o:hi"},
	} {
		if got, err := c.from.say(c.host, 8000, "hi"); got != c.want || err != nil {
			t.Errorf("%s says to %s: %q, %v; want %q", c.from.id, c.host, got, err, c.want)
		}
	}
	for _, c := range []struct {
		from *inside
		host string
	}{
		{stranger, "db.shop.internal"}, {stranger, "sb.shop.internal"}, {other, "db.shop.internal"}, {other, "sb.shop.internal"}, {a, "so.shop.internal"},
		{a, "sx.shop.internal"}, {a, "db.other.internal"}, {a, "nobody.shop.internal"}, {a, "x.db.shop.internal"}, {a, "shop.internal"}, {a, "internal"}, {a, "nobody"},
		{a, "db.shop.internal.lab"},
	} {
		if got, err := c.from.say(c.host, 8000, "hi"); err == nil {
			t.Errorf("%s says to %s: %q", c.from.id, c.host, got)
		}
	}
	// The addresses that names stand for are each sandbox's own: one that another has got leads nowhere, as the other's own addresses do.
	synthetic, err := a.lookup("db.shop.internal")
	if err != nil {
		t.Fatal(err)
	}
	dial := func(in *inside, at netip.AddrPort) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c, err := in.dial(ctx, at)
		if err == nil {
			c.Close()
		}
		return err
	}
	if err := dial(a, netip.AddrPortFrom(synthetic, 8000)); err != nil {
		t.Errorf("the address that stands for a member: %v", err)
	}
	for _, in := range []*inside{stranger, other} {
		if err := dial(in, netip.AddrPortFrom(synthetic, 8000)); err == nil {
			t.Errorf("%s reaches a member at %s", in.id, synthetic)
		}
	}
	for _, at := range []netip.Addr{GatewayIPv4, GatewayIPv6, netip.MustParseAddr("198.18.0.3"), netip.MustParseAddr("198.19.0.2"), netip.MustParseAddr("fd77:6172:7265:6e::3")} {
		for _, in := range []*inside{a, stranger} {
			if err := dial(in, netip.AddrPortFrom(at, 8000)); err == nil {
				t.Errorf("%s reaches somebody at %s", in.id, at)
			}
		}
	}
	// Two of them may have anything looked up outside. These names are not.
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
}

// TestPeerIPv6 reaches a server that listens on IPv6 alone.
func TestPeerIPv6(t *testing.T) {
	l := newLab(t)
	a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
	l.peers("k", "shop", "web=sa", "db=sb")
	at, proto := full(netip.AddrPortFrom(SandboxIPv6, 9000))
	ln, err := gonet.ListenTCP(b.stack, at, proto)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); echo(c) }()
		}
	}()
	if got, err := a.say("db.shop.internal", 9000, "six"); got != "six" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := a.say("db.shop.internal", 9001, "six"); err == nil {
		t.Error("a port on which nobody listens answers")
	}
}

func TestPeerNames(t *testing.T) {
	l := newLab(t)
	l.name("db.corp.internal", "11.1.1.1")
	a := l.sandbox("sa", "extends: open\nallow: [{host: db.corp.internal, protocol: tcp, ports: [5432]}]")
	l.sandbox("sb", "extends: locked")
	ask := func(name string, qtype uint16) (int, int) {
		t.Helper()
		m, err := a.ask(name, qtype)
		if err != nil {
			t.Fatal(err)
		}
		return m.Rcode, len(m.Answer)
	}
	want := func(name string, qtype uint16, rcode, answers int) {
		t.Helper()
		if r, n := ask(name, qtype); r != rcode || n != answers {
			t.Errorf("%s %s: %s with %d answers", name, dns.TypeToString[qtype], dns.RcodeToString[r], n)
		}
	}
	// Without a network there is none of its names, and nobody outside is asked for them, whatever the policy allows.
	want("db.shop.internal", dns.TypeA, dns.RcodeNameError, 0)
	l.peers("k", "shop", "web=sa", "db=sb")
	for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
		want("db.shop.internal", qtype, dns.RcodeSuccess, 1)
		want("sb.shop.internal", qtype, dns.RcodeSuccess, 1)
		want("nobody.shop.internal", qtype, dns.RcodeNameError, 0)
		want("shop.internal", qtype, dns.RcodeNameError, 0)
		want("db.other.internal", qtype, dns.RcodeNameError, 0)
	}
	want("db.shop.internal", dns.TypeTXT, dns.RcodeSuccess, 0)
	// A label alone is the member's too, and only a member's.
	for _, name := range []string{"db", "DB", "sb", "web"} {
		want(name, dns.TypeA, dns.RcodeSuccess, 1)
	}
	want("nobody", dns.TypeA, dns.RcodeNameError, 0)
	want("shop", dns.TypeA, dns.RcodeNameError, 0)
	long, err := a.lookup("db.shop.internal")
	if err != nil {
		t.Fatal(err)
	}
	if short, err := a.lookup("db"); err != nil || short != long {
		t.Errorf("db is %v, and db.shop.internal %v: %v", short, long, err)
	}
	if _, asked := l.reached(); slices.ContainsFunc(asked, func(name string) bool { return name != "nobody." && name != "shop." }) {
		t.Errorf("the gateway asked for %v", asked)
	}
	addr, err := a.lookup("db.shop.internal")
	if err != nil {
		t.Fatal(err)
	}
	rev, _ := dns.ReverseAddr(addr.String())
	if m, err := a.ask(rev, dns.TypePTR); err != nil || len(m.Answer) != 1 || m.Answer[0].(*dns.PTR).Ptr != "db.shop.internal." {
		t.Errorf("%s: %v, %v", rev, m, err)
	}
	// What a rule names is looked up as before, unless it is the network's.
	want("db.corp.internal", dns.TypeA, dns.RcodeSuccess, 1)
	if _, asked := l.reached(); len(asked) != 1 || asked[0] != "db.corp.internal." {
		t.Errorf("for a name that a rule names the gateway asked for %v", asked)
	}
	l.peers("k", "shop")
	l.peers("k2", "corp", "web=sa")
	want("db.corp.internal", dns.TypeA, dns.RcodeNameError, 0)
	// An address in the sandbox's memory, of a network that it has left, asks nobody either.
	l.peers("k2", "corp")
	if c, err := a.dial(t.Context(), netip.AddrPortFrom(addr, 80)); err == nil {
		c.Close()
		t.Error("a name of a network that was left is reached")
	}
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
	if !l.has("dns.allow", "db.shop.internal") || !l.has("dns.deny", "nobody.shop.internal") || !l.has("flow.deny", "db.shop.internal") {
		t.Error("what was asked is not on record")
	}
}

// TestPeerBytes carries 16 MiB each way, the end of each direction by itself.
func TestPeerBytes(t *testing.T) {
	l := newLab(t)
	a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
	l.peers("k", "shop", "web=sa", "db=sb")
	up, down := make([]byte, 16<<20), make([]byte, 16<<20)
	for _, data := range [][]byte{up, down} {
		r := rand.NewChaCha8(sha256.Sum256([]byte{byte(len(data) & 1)}))
		r.Read(data)
	}
	got := make(chan [32]byte, 1)
	b.serve(9000, func(c net.Conn) {
		// The answer comes when the question has ended, over what is left of the connection.
		data, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		got <- sha256.Sum256(data)
		c.Write(down)
	})
	c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Minute))
	if _, err := c.Write(up); err != nil {
		t.Fatal(err)
	}
	c.(interface{ CloseWrite() error }).CloseWrite()
	answer, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(answer, down) {
		t.Errorf("of the answer %d bytes came, %v", len(answer), err)
	}
	if sum := <-got; sum != sha256.Sum256(up) {
		t.Error("what was sent is not what came")
	}
	eventually(t, "both have the end on record", func() bool {
		return len(l.found(func(e Entry) bool { return e.Action == "flow.close" })) == 2
	})
	for _, e := range l.found(func(e Entry) bool { return strings.HasPrefix(e.Action, "flow.") }) {
		want := Entry{Sandbox: "sa", Host: "db.shop.internal", Peer: "sb"}
		if e.Sandbox == "sb" {
			want = Entry{Sandbox: "sb", Host: "web.shop.internal", Peer: "sa", Inward: true}
		}
		if e.Host != want.Host || e.Peer != want.Peer || e.Inward != want.Inward || e.Rule != "network shop" || e.Port != 9000 || e.Protocol != "tcp" {
			t.Errorf("on record is %+v", e)
		}
		if e.Action == "flow.close" && (e.Up != 16<<20 || e.Down != 16<<20 || e.Reason != "") {
			t.Errorf("%s has sent %d and received %d bytes, %q", e.Sandbox, e.Up, e.Down, e.Reason)
		}
	}
	if n := len(l.found(func(e Entry) bool { return e.Action == "flow.open" })); n != 2 {
		t.Errorf("%d flows were opened, of which each side has one", n)
	}
}

func TestPeerUDP(t *testing.T) {
	l := newLab(t)
	a, b, x := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked"), l.sandbox("sx", "extends: locked")
	l.peers("k", "shop", "web=sa", "db=sb")
	for _, in := range []*inside{a, b} {
		s := in.packets(5353)
		go func() {
			buf := make([]byte, MTU)
			for {
				n, from, err := s.ReadFrom(buf)
				if err != nil {
					return
				}
				s.WriteTo(append([]byte(in.id+":"), buf[:n]...), from)
			}
		}()
	}
	try := func(in *inside, at netip.Addr, text string) (string, error) {
		c, err := in.udp(netip.AddrPortFrom(at, 5353))
		if err != nil {
			return "", err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(c, text); err != nil {
			return "", err
		}
		buf := make([]byte, MTU)
		n, err := c.Read(buf)
		return string(buf[:n]), err
	}
	large := strings.Repeat("x", 30000)
	for _, c := range []struct {
		from       *inside
		host, want string
	}{{a, "db.shop.internal", "sb:"}, {b, "web.shop.internal", "sa:"}} {
		addr, err := c.from.lookup(c.host)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{"hi", large} {
			if got, err := try(c.from, addr, text); got != c.want+text || err != nil {
				t.Errorf("%s to %s: %d bytes, %v", c.from.id, c.host, len(got), err)
			}
		}
		stranger, err := x.udp(netip.AddrPortFrom(addr, 5353))
		if err != nil {
			t.Fatal(err)
		}
		defer stranger.Close()
		if _, err := io.WriteString(stranger, "hi"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "who is in no network is denied", func() bool {
			return len(l.found(func(e Entry) bool { return e.Sandbox == "sx" && e.Action == "flow.deny" && e.Addr == addr.String() })) > 0
		})
	}
	if n := len(l.found(func(e Entry) bool { return e.Action == "flow.open" && e.Protocol == "udp" && e.Rule == "network shop" })); n != 8 {
		t.Errorf("%d flows are on record, want both sides of 4", n)
	}
}

// TestPeersPart ends what goes on between two sandboxes in each way in which they stop to be members of one network.
func TestPeersPart(t *testing.T) {
	for name, part := range map[string]func(*lab){
		"the other leaves":                func(l *lab) { l.peers("k", "shop", "web=sa") },
		"it leaves":                       func(l *lab) { l.peers("k", "shop", "db=sb") },
		"the network goes":                func(l *lab) { l.peers("k", "shop") },
		"the other goes elsewhere":        func(l *lab) { l.peers("k2", "shop", "db=sb") },
		"the other is deleted":            func(l *lab) { l.g.Detach("sb") },
		"it is deleted":                   func(l *lab) { l.g.Detach("sa") },
		"a rule denies it":                func(l *lab) { l.g.SetPolicy("sa", Rules{Policy: l.policy("deny: [db.shop.internal]")}) },
		"a rule of the other's denies it": func(l *lab) { l.g.SetPolicy("sb", Rules{Policy: l.policy("deny: [web.shop.internal]")}) },
		"a rule denies its id":            func(l *lab) { l.g.SetPolicy("sa", Rules{Policy: l.policy("deny: [sb.shop.internal]")}) },
		"a rule denies it with a path": func(l *lab) {
			l.g.SetPolicy("sa", Rules{Policy: l.policy("deny: [{host: \"*.shop.internal\", paths: [/x]}]")})
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
			l.peers("k", "shop", "web=sa", "db=sb")
			ended := make(chan error, 1)
			b.serve(9000, func(c net.Conn) {
				c.Write([]byte("x"))
				_, err := io.Copy(io.Discard, c)
				ended <- err
			})
			c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(20 * time.Second))
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			part(l)
			if !strings.HasPrefix(name, "it is deleted") { // who has no card is told nothing
				if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
					t.Errorf("it sees the end %v, which is none in order", err)
				}
			}
			if name != "the other is deleted" {
				select {
				case err := <-ended:
					if err == nil {
						t.Error("the other sees an end in order")
					}
				case <-time.After(20 * time.Second):
					t.Error("the other sees no end")
				}
			}
			eventually(t, "both have it on record", func() bool {
				return len(l.found(func(e Entry) bool { return e.Action == "flow.close" && e.Reason != "" })) == 2
			})
			if strings.HasPrefix(name, "it is deleted") {
				return
			}
			if got, err := a.say("db.shop.internal", 9000, ""); err == nil {
				t.Errorf("it reaches the other again: %q", got)
			}
		})
	}
	t.Run("neither of them", func(t *testing.T) {
		l := newLab(t)
		a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
		l.peers("k", "shop", "web=sa", "db=sb")
		b.serve(9000, echo)
		c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		old, err := a.lookup("db.shop.internal")
		if err != nil {
			t.Fatal(err)
		}
		l.peers("k", "shop", "web=sa", "store=sb", "more=sc")
		l.peers("k2", "other", "q=sq")
		if err := l.g.SetPolicy("sa", Rules{Policy: l.policy("deny: [{host: db.shop.internal, protocol: udp}, {host: db.shop.internal, ports: [9001]}, \"*.other.internal\"]")}); err != nil {
			t.Fatal(err)
		}
		if err := l.g.SetPolicy("sb", Rules{Policy: l.policy("deny: [\"*.other.internal\", db.shop.internal]")}); err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Errorf("a flow that nobody forbids, to one that has another name now: %v", err)
		}
		if _, err := a.say("store.shop.internal", 9000, "x"); err != nil {
			t.Errorf("the new name: %v", err)
		}
		if d, err := a.dial(t.Context(), netip.AddrPortFrom(old, 9000)); err == nil {
			d.Close()
			t.Error("the old name leads there")
		}
		if _, err := a.say("db.shop.internal", 9000, "x"); err == nil {
			t.Error("the old name is there")
		}
	})
}

// TestPeerFork gives a sandbox a copy that goes on from its memory, in which addresses are.
func TestPeerFork(t *testing.T) {
	l := newLab(t)
	a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
	l.peers("k", "shop", "web=sa", "db=sb")
	var conns atomic.Int32
	b.serve(9000, func(c net.Conn) { conns.Add(1); answers("b")(c) })
	addr, err := a.lookup("db.shop.internal")
	if err != nil {
		t.Fatal(err)
	}
	child := l.attach(t, "sc", "extends: locked", "sa")
	a.serve(9000, answers("a"))
	child.serve(9000, answers("c"))
	dial := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c, err := child.dial(ctx, netip.AddrPortFrom(addr, 9000))
		if err == nil {
			c.Close()
		}
		return err
	}
	if err := dial(); err == nil || conns.Load() != 0 {
		t.Errorf("a copy that is not a member reaches one: %v, %d connections", err, conns.Load())
	}
	l.peers("k", "shop", "web=sa", "db=sb", "web-1=sc")
	if err := dial(); err != nil {
		t.Errorf("a copy that is a member does not reach the address that it has in its memory: %v", err)
	}
	for host, want := range map[string]string{"web.shop.internal": "a:x", "web-1.shop.internal": "c:x", "sc.shop.internal": "c:x"} {
		if got, err := b.say(host, 9000, "x"); got != want || err != nil {
			t.Errorf("%s answers %q, %v; want %q", host, got, err, want)
		}
	}
}

// TestPeerLimits counts connections to others as connections, but not what others open, and no bytes.
func TestPeerLimits(t *testing.T) {
	l := newLab(t)
	a := l.sandbox("sa", "limits: {connections: 1, bytes_up: 10, bytes_down: 10}")
	b := l.sandbox("sb", "limits: {connections: 1, bytes_up: 10, bytes_down: 10}")
	l.peers("k", "shop", "web=sa", "db=sb")
	a.serve(9000, echo)
	b.serve(9000, echo)
	long := strings.Repeat("x", 1000)
	for range 2 {
		if got, err := a.say("db.shop.internal", 9000, long); got != long || err != nil {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		eventually(t, "the connection is over", func() bool {
			c, err := l.g.card("sa")
			if err != nil {
				return false
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			return len(c.flows) == 0 && c.connections == 0 && c.inward == 0
		})
	}
	c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := a.say("db.shop.internal", 9000, "x"); err == nil {
		t.Error("a second connection is open, of 1")
	}
	if got, err := b.say("web.shop.internal", 9000, "x"); got != "x" || err != nil {
		t.Errorf("the connection of the other counts: %q, %v", got, err)
	}
	if !l.has("flow.deny", "db.shop.internal") {
		t.Error("what was too much is not on record")
	}
}

// TestPeerEvidence refuses what cannot be recorded.
func TestPeerEvidence(t *testing.T) {
	l := newLab(t)
	a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
	l.peers("k", "shop", "web=sa", "db=sb")
	b.serve(9000, answers("b"))
	addr, err := a.lookup("db.shop.internal")
	if err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	l.fail = errors.New("the disk is full")
	l.mu.Unlock()
	if c, err := a.dial(t.Context(), netip.AddrPortFrom(addr, 9000)); err == nil {
		c.Close()
		t.Error("a flow goes on that is not on record")
	}
	l.mu.Lock()
	l.fail = nil
	l.mu.Unlock()
	if got, err := a.say("db.shop.internal", 9000, "x"); got != "b:x" || err != nil {
		t.Errorf("once it can be recorded: %q, %v", got, err)
	}
}

// TestPeerSleeps reaches a sandbox that has no card, which somebody else has to start.
func TestPeerSleeps(t *testing.T) {
	l := newLab(t)
	a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sx", "extends: locked")
	b.serve(9000, answers("x"))
	l.peers("k", "shop", "web=sa", "db=sb")
	if _, err := a.say("db.shop.internal", 9000, "x"); err == nil {
		t.Error("nobody is there to start it, and it answers")
	}
	var asked atomic.Int32
	answer := errors.New("it is paused for good")
	l.g.OnWake(func(id string) bool {
		asked.Add(1)
		go l.g.Woken(id, answer)
		return true
	})
	var reasons string
	eventually(t, "somebody is asked, once the answer before is old", func() bool {
		_, err := a.say("db.shop.internal", 9000, "x")
		return err != nil && asked.Load() > 0
	})
	for _, e := range l.found(func(e Entry) bool { return e.Action == "flow.fail" }) {
		reasons += e.Reason + "\n"
	}
	if !strings.Contains(reasons, "the other sandbox does not run: nobody is there who could start it") || !strings.Contains(reasons, "it is paused for good") {
		t.Errorf("on record is why:\n%s", reasons)
	}
	// Who asks for itself only does not have others started.
	before := asked.Load()
	if _, err := b.say("db.shop.internal", 9000, "x"); err == nil || asked.Load() != before {
		t.Errorf("who is in no network has a sandbox started: %v, %d", err, asked.Load()-before)
	}
	var sb *inside
	l.g.OnWake(func(id string) bool {
		sb = l.sandbox(id, "extends: locked")
		sb.serve(9000, answers("b"))
		go l.g.Woken(id, nil)
		return true
	})
	eventually(t, "it is started and answers", func() bool {
		got, err := a.say("db.shop.internal", 9000, "x")
		return err == nil && got == "b:x"
	})
	// Who was asked and goes away keeps nobody waiting.
	l.g.Detach("sb")
	taken := make(chan struct{}, 1)
	l.g.OnWake(func(string) bool { taken <- struct{}{}; return true })
	done := make(chan error, 1)
	go func() { _, err := a.say("db.shop.internal", 9000, "x"); done <- err }()
	<-taken
	l.g.nobodyWakes()
	if err := <-done; err == nil {
		t.Error("it answers, although it was not started")
	}
}

// TestPeerServed has a daemon say who is in a network, and start who is wanted.
func TestPeerServed(t *testing.T) {
	l := newLab(t)
	path := filepath.Join(t.TempDir(), "g.sock")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(l.g, ln, "build", time.Hour, slog.New(slog.DiscardHandler))
	served := make(chan struct{})
	go func() { defer close(served); s.Serve() }()
	defer func() { s.Retire(); <-served }()
	call := func(r control.Request) (*net.UnixConn, control.Response) {
		t.Helper()
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		var a control.Response
		if err := message.Write(c, &r); err != nil {
			t.Fatal(err)
		}
		if _, err := message.Read(c, &a); err != nil {
			t.Fatal(err)
		}
		return c, a
	}
	a := l.sandbox("sa", "extends: locked")
	if _, r := call(control.Request{Op: control.OpPeers, Peers: &control.Peers{Key: "alice/shop", Name: "shop", Digest: "d", Members: []control.Peer{{ID: "sa", Name: "web"}, {ID: "sb", Name: "db"}}}}); !r.OK {
		t.Fatalf("%+v", r)
	}
	many := control.Peers{Key: "alice/many", Name: "many"}
	for i := range MaxPeers + 1 {
		many.Members = append(many.Members, control.Peer{ID: fmt.Sprint("s", i)})
	}
	for _, p := range []*control.Peers{nil, {}, {Key: "k"}, &many} {
		if _, r := call(control.Request{Op: control.OpPeers, Peers: p}); r.OK {
			t.Errorf("%+v is taken", p)
		}
	}
	if _, r := call(control.Request{Op: control.OpList}); len(r.Networks) != 1 || r.Networks["alice/shop"] != "d" {
		t.Errorf("there are %v", r.Networks)
	}
	hold, r := call(control.Request{Op: control.OpHold})
	if !r.OK || r.Version != control.Version {
		t.Fatalf("%+v", r)
	}
	say := func() chan error {
		done := make(chan error, 1)
		go func() { _, err := a.say("db.shop.internal", 9000, "x"); done <- err }()
		return done
	}
	asked := func() {
		t.Helper()
		var n control.Notice
		hold.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := message.Read(hold, &n); err != nil || n.Wake != "sb" {
			t.Fatalf("%+v, %v", n, err)
		}
	}
	first, second := say(), say() // which ask once
	asked()
	card, err := l.g.card("sa")
	if err != nil {
		t.Fatal(err)
	}
	// Who came later would find it there, and perhaps not listening yet.
	eventually(t, "both wait", func() bool {
		card.mu.Lock()
		defer card.mu.Unlock()
		return len(card.flows) == 2
	})
	b := l.sandbox("sb", "extends: locked")
	b.serve(9000, echo)
	call(control.Request{Op: control.OpWoken, ID: "sb"})
	for _, done := range []chan error{first, second} {
		if err := <-done; err != nil {
			t.Errorf("it was started: %v", err)
		}
	}
	l.g.Detach("sb")
	done := say()
	asked()
	call(control.Request{Op: control.OpWoken, ID: "sb", Why: "it is paused for good"})
	if err := <-done; err == nil || len(l.found(func(e Entry) bool { return strings.Contains(e.Reason, "it is paused for good") })) != 1 {
		t.Errorf("it cannot be started: %v", err)
	}
	time.Sleep(askAgain) // that long it is not asked again
	done = say()
	asked()
	hold.Close()
	if err := <-done; err == nil {
		t.Error("the daemon has gone, and it answers")
	}
}

// TestPeersSilent has a sandbox go silent at the very moment when its connection to another is taken: the other does not wait longer than the two are
// together.
func TestPeersSilent(t *testing.T) {
	for name, part := range map[string]func(*lab){
		"it leaves":     func(l *lab) { l.peers("k", "shop", "db=sb") },
		"it is deleted": func(l *lab) { l.g.Detach("sa") },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			a, b := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked")
			ended := make(chan error, 1)
			b.serve(9000, func(c net.Conn) {
				_, err := io.Copy(io.Discard, c)
				ended <- err
			})
			l.peers("k", "shop", "web=sa", "db=sb")
			at, err := a.lookup("db.shop.internal")
			if err != nil {
				t.Fatal(err)
			}
			opened := make(chan bool, 1)
			l.mu.Lock()
			l.onEntry = func(e Entry) {
				if e.Sandbox == "sb" && e.Action == "flow.open" {
					a.unplug()
					opened <- true
				}
			}
			l.mu.Unlock()
			go a.dial(t.Context(), netip.AddrPortFrom(at, 9000))
			<-opened
			part(l)
			select {
			case <-ended:
			case <-time.After(20 * time.Second):
				t.Error("the other's connection goes on")
			}
			c, err := l.g.card("sb")
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the other's place is free", func() bool {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.inward == 0 && len(c.from) == 0
			})
		})
	}
}

// TestPeersShare has one member take as many connections to another as it can get: a third still gets in.
func TestPeersShare(t *testing.T) {
	l := newLab(t)
	a, b, other := l.sandbox("sa", "extends: locked"), l.sandbox("sb", "extends: locked"), l.sandbox("sc", "extends: locked")
	b.serve(9000, echo)
	l.peers("k", "shop", "web=sa", "db=sb", "more=sc")
	for range maxFromOne {
		c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if c, err := a.dialName(t.Context(), "tcp", "db.shop.internal:9000"); err == nil {
		c.Close()
		t.Error("one member has more connections than its share")
	}
	if _, err := other.say("db.shop.internal", 9000, "x"); err != nil {
		t.Errorf("another member is kept out: %v", err)
	}
}
