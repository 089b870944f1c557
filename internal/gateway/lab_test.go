//go:build linux

package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/warren-sandbox/warren/internal/policy"
	"github.com/warren-sandbox/warren/internal/secret"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/tun"
)

// lab is an internet of its own: names, addresses that look public, and servers behind them. What arrives there is what counts.
type lab struct {
	t    testing.TB
	g    *Gateway
	ca   *Authority // the gateway's
	root *Authority // that of the servers
	key  *secret.Source

	mu      sync.Mutex
	addrs   map[string][]netip.Addr
	servers map[string]string // address to listener
	asked   []string          // names that the gateway asked the world for
	dialled []string          // addresses that it went to
	entries []Entry
	fail    error // of evidence
	lost    error // of questions for names
	onEntry func(Entry)
	own     []netip.Addr
}

func newLab(t testing.TB) *lab {
	l := &lab{t: t, addrs: map[string][]netip.Addr{}, servers: map[string]string{}, own: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}
	var err error
	if l.ca, err = OpenAuthority(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	if l.root, err = OpenAuthority(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	if l.key, err = secret.ParseSource("file:" + filepath.Join(t.TempDir(), "key")); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(l.root.cert)
	l.g = New(Options{Authority: l.ca, Resolver: l, Dialer: l, Roots: roots, Evidence: l.evidence, Secrets: l.key, Own: l.machine})
	t.Cleanup(l.g.Close)
	return l
}

func (l *lab) evidence(e Entry) error {
	l.mu.Lock()
	if l.fail != nil {
		defer l.mu.Unlock()
		return l.fail
	}
	l.entries = append(l.entries, e)
	hook := l.onEntry
	l.mu.Unlock()
	if hook != nil {
		hook(e) // it may wait for what is recorded itself
	}
	return nil
}

// machine returns the addresses of the machine that the gateway is on.
func (l *lab) machine() ([]netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.own == nil {
		return nil, errors.New("nobody knows")
	}
	return l.own, nil
}

// LookupNetIP is the lab's DNS.
func (l *lab) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, host)
	if l.lost != nil {
		return nil, l.lost
	}
	a := l.addrs[strings.TrimSuffix(host, ".")]
	if len(a) == 0 {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return append([]netip.Addr(nil), a...), nil
}

// DialContext is the lab's way to its servers.
func (l *lab) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	l.mu.Lock()
	l.dialled = append(l.dialled, network+"/"+address)
	to := l.servers[network+"/"+address]
	l.mu.Unlock()
	if to == "" {
		return nil, errors.New("connection refused")
	}
	return (&net.Dialer{}).DialContext(ctx, network, to)
}

// reached returns where the gateway has gone, and what it asked for, since the last call.
func (l *lab) reached() (dialled, asked []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	dialled, asked = l.dialled, l.asked
	l.dialled, l.asked = nil, nil
	return dialled, asked
}

func (l *lab) has(action, host string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.Action == action && (host == "" || string(e.Host) == host) {
			return true
		}
	}
	return false
}

// name gives a name addresses.
func (l *lab) name(name string, addrs ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addrs[name] = nil
	for _, a := range addrs {
		l.addrs[name] = append(l.addrs[name], netip.MustParseAddr(a))
	}
	l.g.resolver.mu.Lock()
	clear(l.g.resolver.cache)
	l.g.resolver.mu.Unlock()
}

// listen puts a listener at an address of the lab.
func (l *lab) listen(address string) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { ln.Close() })
	l.mu.Lock()
	l.servers["tcp/"+address] = ln.Addr().String()
	l.mu.Unlock()
	return ln
}

// serve handles each connection to an address, and hangs up when that is done.
func (l *lab) serve(address string, handle func(net.Conn)) {
	ln := l.listen(address)
	go func() {
		for {
			c, err := ln.Accept()
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

// echo says what it hears.
func echo(c net.Conn) { io.Copy(c, c) }

// web serves HTTP at an address, with TLS for names if there are any.
func (l *lab) web(address string, h http.Handler, names ...string) {
	ln := l.listen(address)
	s := &http.Server{Handler: h}
	l.t.Cleanup(func() { s.Close() })
	if len(names) == 0 {
		go s.Serve(ln)
		return
	}
	s.TLSConfig = &tls.Config{NextProtos: []string{"h2", "http/1.1"}, Certificates: []tls.Certificate{l.cert(names...)}}
	go s.ServeTLS(ln, "", "")
}

func (l *lab) cert(names ...string) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		l.t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}, l.root.cert, key.Public(), l.root.key)
	if err != nil {
		l.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// inside is a sandbox's end of a card, with a stack as its kernel has one, or the namespace of a device, with the host's.
type inside struct {
	t     testing.TB
	id    string
	stack *stack.Stack
	link  stack.LinkEndpoint
	netns *os.File
	roots *x509.CertPool
}

// overDevice makes the cards of all labs devices in network namespaces. It is set by TestDevices alone.
var overDevice bool

// sandbox attaches one with a policy.
func (l *lab) sandbox(id, rules string, secrets ...Secret) *inside {
	return l.sandboxFor(l.t, id, rules, secrets...)
}

// secret seals a value.
func (l *lab) secret(name, value string, placeholders ...string) Secret {
	l.t.Helper()
	box, err := l.key.Box()
	if err != nil {
		l.t.Fatal(err)
	}
	sealed, err := box.Seal(l.t.Context(), name, []byte(value))
	if err != nil {
		l.t.Fatal(err)
	}
	return Secret{name, sealed, placeholders}
}

// sandboxFor attaches one that ends with a part of the test.
func (l *lab) sandboxFor(t testing.TB, id, rules string, secrets ...Secret) *inside {
	t.Helper()
	return l.attach(t, id, rules, "", secrets...)
}

// attach gives a sandbox a card, which knows the names that from has.
func (l *lab) attach(t testing.TB, id, rules, from string, secrets ...Secret) *inside {
	t.Helper()
	if overDevice {
		return l.device(t, id, rules, from, secrets...)
	}
	in, out, err := NewCard()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.g.Attach(id, out, Rules{Policy: l.policy(rules), Secrets: secrets}, from); err != nil {
		t.Fatal(err)
	}
	return l.inside(t, id, in)
}

// device is attach with a device.
func (l *lab) device(t testing.TB, id, rules, from string, secrets ...Secret) *inside {
	t.Helper()
	in := &inside{t: t, id: id, roots: l.trusted(), netns: testenv.NetworkNamespace(t)}
	if err := tun.Make(in.netns, tun.Device{Name: "eth0", MTU: MTU, Addrs: cardFacts().Addrs}); err != nil {
		t.Fatal(err)
	}
	end, err := tun.Open(in.netns, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.g.Attach(id, end, Rules{Policy: l.policy(rules), Secrets: secrets}, from); err != nil {
		t.Fatal(err)
	}
	return in
}

// trusted are the authorities that a sandbox trusts.
func (l *lab) trusted() *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AddCert(l.ca.cert)
	roots.AddCert(l.root.cert)
	return roots
}

func (l *lab) policy(rules string) *policy.Policy {
	l.t.Helper()
	p, err := policy.Parse("test", []byte(rules))
	if err != nil {
		l.t.Fatal(err)
	}
	return p
}

func (l *lab) inside(t testing.TB, id string, end *os.File) *inside {
	t.Helper()
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	link, err := fdbased.New(&fdbased.Options{FDs: []int{int(end.Fd())}, MTU: MTU, PacketDispatchMode: fdbased.Readv, ProcessorsPerChannel: 1, TXChecksumOffload: true, RXChecksumOffload: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.CreateNIC(1, link); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{SandboxIPv4, SandboxIPv6} {
		proto := tcpip.NetworkProtocolNumber(ipv4.ProtocolNumber)
		if a.Is6() {
			proto = ipv6.ProtocolNumber
		}
		pa := tcpip.ProtocolAddress{Protocol: proto, AddressWithPrefix: tcpip.AddrFromSlice(a.AsSlice()).WithPrefix()}
		if err := s.AddProtocolAddress(1, pa, stack.AddressProperties{}); err != nil {
			t.Fatal(err)
		}
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}, {Destination: header.IPv6EmptySubnet, NIC: 1}})
	in := &inside{t: t, id: id, stack: s, link: link, roots: l.trusted()}
	t.Cleanup(func() { in.unplug(); s.Close(); s.Wait(); end.Close() })
	return in
}

// unplug takes the card out. The stack would wait for the link's reader with its lock held, and the reader may be about to take that lock
// for a packet that has just come: so the reader goes first.
func (in *inside) unplug() {
	in.link.Attach(nil)
	in.stack.RemoveNIC(1)
}

func full(a netip.AddrPort) (tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
	proto := tcpip.NetworkProtocolNumber(ipv4.ProtocolNumber)
	if a.Addr().Is6() {
		proto = ipv6.ProtocolNumber
	}
	return tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFromSlice(a.Addr().AsSlice()), Port: a.Port()}, proto
}

// dial connects to an address.
func (in *inside) dial(ctx context.Context, a netip.AddrPort) (net.Conn, error) {
	if in.netns != nil {
		return in.native(ctx, &net.Dialer{}, "tcp", a)
	}
	addr, proto := full(a)
	return gonet.DialContextTCP(ctx, in.stack, addr, proto)
}

// dialFrom is dial with a port of its own.
func (in *inside) dialFrom(ctx context.Context, from, a netip.AddrPort) (net.Conn, error) {
	if in.netns != nil {
		return in.native(ctx, &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from)}, "tcp", a)
	}
	local, _ := full(from)
	addr, proto := full(a)
	return gonet.DialTCPWithBind(ctx, in.stack, local, addr, proto)
}

// udp returns a socket for one address.
func (in *inside) udp(a netip.AddrPort) (net.Conn, error) {
	if in.netns != nil {
		return in.native(context.Background(), &net.Dialer{}, "udp", a)
	}
	addr, proto := full(a)
	return gonet.DialUDP(in.stack, nil, &addr, proto)
}

// native connects with a socket of the namespace.
func (in *inside) native(ctx context.Context, d *net.Dialer, network string, a netip.AddrPort) (c net.Conn, err error) {
	err = tun.Within(in.netns, func() (err error) {
		c, err = d.DialContext(ctx, network, a.String())
		return err
	})
	return c, err
}

// ask asks the gateway's name server.
func (in *inside) ask(name string, qtype uint16) (*dns.Msg, error) {
	c, err := in.udp(netip.AddrPortFrom(GatewayIPv4, 53))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), qtype)
	m.SetEdns0(1232, false)
	conn := &dns.Conn{Conn: c}
	if err := conn.WriteMsg(m); err != nil {
		return nil, err
	}
	return conn.ReadMsg()
}

// lookup returns the address that stands for a name inside.
func (in *inside) lookup(name string) (netip.Addr, error) {
	m, err := in.ask(name, dns.TypeA)
	if err != nil {
		return netip.Addr{}, err
	}
	if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 {
		return netip.Addr{}, fmt.Errorf("%s: %s", name, dns.RcodeToString[m.Rcode])
	}
	a, _ := netip.AddrFromSlice(m.Answer[0].(*dns.A).A.To4())
	return a, nil
}

// connect connects to a name, for a minute at most.
func (in *inside) connect(t *testing.T, name string, port uint16) net.Conn {
	t.Helper()
	a, err := in.lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := in.dial(t.Context(), netip.AddrPortFrom(a, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

// dialName connects to a name as a program does.
func (in *inside) dialName(ctx context.Context, _, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		if a, err = in.lookup(host); err != nil {
			return nil, err
		}
	}
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		return nil, err
	}
	return in.dial(ctx, netip.AddrPortFrom(a, uint16(n)))
}

// client is an HTTP client inside.
func (in *inside) client() *http.Client {
	tr := &http.Transport{DialContext: in.dialName, ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: in.roots}}
	in.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// get returns status and body.
func (in *inside) get(url string) (int, string, error) {
	r, err := in.client().Get(url)
	if err != nil {
		return 0, "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return r.StatusCode, string(b), err
}

// native dials a server of the lab without a gateway.
func (l *lab) native(address string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return l.DialContext(ctx, network, address)
	}
}
