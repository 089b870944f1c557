//go:build linux

package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"

	"github.com/warren-sandbox/warren/internal/policy"
)

// nameTTL is how long a sandbox may keep the address of a name, in seconds. The address stays the name's for longer.
const nameTTL = 60

// maxAsking is how many questions of a sandbox may wait for the resolver, and how many connections it may have to ask them on.
const maxAsking = 64

// maxTold is how many names of one odd message are put on record.
const maxTold = 4

const (
	// maxMessage bounds a message over TCP. A question has at most 259 bytes, and what clients add to it is padded to 468; over UDP 512 are read.
	maxMessage = 1 << 10
	// maxAnswers, maxAuthorities and maxAdditional are how many records of each section a message may have. A question has none but in the last, where the
	// options of EDNS are and a signature.
	maxAnswers, maxAuthorities, maxAdditional = 1, 1, 2
)

// dnsServer answers a sandbox's questions for names. It passes none on: an allowed name is looked up by the gateway itself, and what is not
// allowed is not asked anybody.
type dnsServer struct {
	c       *card
	servers []*dns.Server
	asking  chan struct{}
}

// serveDNS answers on port 53 of the gateway's addresses.
func serveDNS(c *card) (*dnsServer, error) {
	d := &dnsServer{c: c, asking: make(chan struct{}, maxAsking)}
	for _, at := range []struct {
		addr  netip.Addr
		proto tcpip.NetworkProtocolNumber
	}{{GatewayIPv4, ipv4.ProtocolNumber}, {GatewayIPv6, ipv6.ProtocolNumber}} {
		full := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(at.addr.AsSlice()), Port: 53}
		p, err := gonet.DialUDP(c.stack, &full, nil, at.proto)
		if err != nil {
			d.close()
			return nil, err
		}
		d.serve(&dns.Server{PacketConn: p})
		l, err := gonet.ListenTCP(c.stack, full, at.proto)
		if err != nil {
			d.close()
			return nil, err
		}
		d.serve(&dns.Server{Listener: netutil.LimitListener(l, maxAsking), MaxTCPQueries: 128, IdleTimeout: func() time.Duration { return 10 * time.Second }})
	}
	return d, nil
}

func (d *dnsServer) serve(s *dns.Server) {
	s.Handler = dns.HandlerFunc(d.answer)
	s.DecorateReader = func(r dns.Reader) dns.Reader { return &asked{r, d} }
	// Few bytes can say much, since names may refer to others: what is more than a question is refused by its header, before anything is made of it. The
	// reader has put it on record; what else is odd about a message is told by answer.
	s.MsgAcceptFunc = func(h dns.Header) dns.MsgAcceptAction {
		switch {
		case h.Bits&(1<<15) != 0:
			return dns.MsgIgnore // an answer, to nobody's question
		case crowded(h) != "":
			return dns.MsgReject
		}
		return dns.MsgAccept
	}
	s.MsgInvalidFunc = func(_ []byte, err error) {
		d.c.refuse(Entry{Action: "dns.deny", Reason: "what was sent to the name server is no question: " + err.Error()})
	}
	s.ReadTimeout, s.WriteTimeout = 5*time.Second, 5*time.Second
	d.servers = append(d.servers, s)
	go func() {
		if err := s.ActivateAndServe(); err != nil && d.c.life.Err() == nil {
			d.c.g.log.Error("the name server of a sandbox has ended", "sandbox", d.c.id, "error", err)
		}
	}()
}

func (d *dnsServer) close() {
	for _, s := range d.servers {
		// Not Shutdown, which waits for connections that a sandbox keeps open.
		if s.PacketConn != nil {
			s.PacketConn.Close()
		}
		if s.Listener != nil {
			s.Listener.Close()
		}
	}
}

// crowded says why a message is more than a question by the counts of its header, which may say anything; "" if it is not.
func crowded(h dns.Header) string {
	if h.Qdcount > 1 {
		return fmt.Sprintf("the message has %d questions, and has to have one", h.Qdcount)
	}
	if h.Ancount > maxAnswers || h.Nscount > maxAuthorities || h.Arcount > maxAdditional {
		return fmt.Sprintf("the message has %d, %d and %d records besides its question, and may have %d, %d and %d", h.Ancount, h.Nscount, h.Arcount, maxAnswers, maxAuthorities, maxAdditional)
	}
	return ""
}

// asked reads messages for the library, which takes of a message what its header and its length claim.
type asked struct {
	dns.Reader
	d *dnsServer
}

// ReadTCP implements [dns.Reader].
func (a *asked) ReadTCP(c net.Conn, timeout time.Duration) ([]byte, error) {
	c.SetReadDeadline(time.Now().Add(timeout))
	var long [2]byte
	if _, err := io.ReadFull(c, long[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint16(long[:])
	if n > maxMessage {
		// The connection ends with it.
		reason := fmt.Sprintf("the message has %d bytes, and a question has at most %d", n, maxMessage)
		a.d.c.refuse(Entry{Action: "dns.deny", Reason: reason})
		return nil, errors.New(reason)
	}
	m := make([]byte, n)
	if _, err := io.ReadFull(c, m); err != nil {
		return nil, err
	}
	a.d.told(m)
	return m, nil
}

// ReadPacketConn implements [dns.PacketConnReader].
func (a *asked) ReadPacketConn(c net.PacketConn, timeout time.Duration) ([]byte, net.Addr, error) {
	m, from, err := a.Reader.(dns.PacketConnReader).ReadPacketConn(c, timeout)
	if err == nil {
		a.d.told(m)
	}
	return m, from, err
}

// told puts a message on record that is more than a question, with the first of its names.
func (d *dnsServer) told(m []byte) {
	if len(m) < 12 || m[2]&(1<<7) != 0 {
		return
	}
	word := func(i int) uint16 { return binary.BigEndian.Uint16(m[i:]) }
	h := dns.Header{Qdcount: word(4), Ancount: word(6), Nscount: word(8), Arcount: word(10)}
	reason := crowded(h)
	if reason == "" {
		return
	}
	n := 0
	for off := 12; n < min(int(h.Qdcount), maxTold); n++ {
		name, next, err := dns.UnpackDomainName(m, off)
		if err != nil || next+4 > len(m) {
			break
		}
		d.c.refuse(Entry{Action: "dns.deny", Addr: name, Reason: reason})
		off = next + 4
	}
	if n == 0 {
		d.c.refuse(Entry{Action: "dns.deny", Reason: reason})
	}
}

// answer answers one question.
func (d *dnsServer) answer(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.RecursionAvailable = true
	edns := q.IsEdns0() != nil
	d.reply(m, q.Question, edns) // and not q, which is nothing to keep while somebody else is waited for
	if edns && m.IsEdns0() == nil {
		m.SetEdns0(dns.DefaultMsgSize, false)
	}
	w.WriteMsg(m)
}

// reply says in m, which has the header of the answer, what is answered.
func (d *dnsServer) reply(m *dns.Msg, questions []dns.Question, edns bool) {
	refused := func(rcode int, name, reason string) {
		m.Rcode = rcode
		d.c.refuse(Entry{Action: "dns.deny", Addr: name, Reason: reason})
	}
	switch {
	case m.Opcode != dns.OpcodeQuery:
		name := ""
		if len(questions) > 0 {
			name = questions[0].Name
		}
		refused(dns.RcodeNotImplemented, name, fmt.Sprintf("the message is no question, but of kind %d", m.Opcode))
		return
	case len(questions) != 1:
		refused(dns.RcodeFormatError, "", fmt.Sprintf("the message has %d questions, and has to have one", len(questions)))
		return
	case questions[0].Qclass != dns.ClassINET:
		refused(dns.RcodeRefused, questions[0].Name, fmt.Sprintf("the question is of class %d, and has to be of the internet's", questions[0].Qclass))
		return
	}
	ask := questions[0]
	if a, ok := reverse(ask.Name); ok {
		if !d.reverse(m, ask, a) {
			refused(dns.RcodeNameError, ask.Name, "the address stands for no name that this sandbox has looked up, and nobody else is asked")
		}
		return
	}
	h, err := hostOf(ask.Name)
	if err != nil {
		d.deny(m, edns, Entry{Action: "dns.deny", Addr: ask.Name, Reason: err.Error()})
		return
	}
	h = d.c.whole(h)
	if n, mine := d.c.private(h); mine {
		d.peer(m, edns, ask, n, h)
		return
	}
	p := d.c.policy()
	if v := p.Lookup(h); !v.Allow {
		d.deny(m, edns, Entry{Action: "dns.deny", Host: h, Rule: v.Rule, Reason: v.Reason})
		return
	}
	// No other type is needed to reach a name, and each could carry something out. Those of HTTPS are asked for each name by clients that do without an
	// answer: as denials they would hide the others.
	if ask.Qtype != dns.TypeA && ask.Qtype != dns.TypeAAAA {
		if ask.Qtype != dns.TypeHTTPS && ask.Qtype != dns.TypeSVCB {
			d.c.refuse(Entry{Action: "dns.deny", Host: h, Reason: fmt.Sprintf("questions of type %s are not answered, only those for addresses", dns.Type(ask.Qtype))})
		}
		return
	}
	select {
	case d.asking <- struct{}{}:
		defer func() { <-d.asking }()
	default:
		m.Rcode = dns.RcodeServerFailure
		d.c.refuse(Entry{Action: "dns.deny", Host: h, Reason: fmt.Sprintf("%d questions of the sandbox wait for an answer, which is the most", maxAsking)})
		return
	}
	v4, v6, err := d.c.name(p, h)
	var limit *limitError
	switch {
	case errors.Is(err, errNoName):
		m.Rcode = dns.RcodeNameError
	case errors.As(err, &limit):
		d.deny(m, edns, Entry{Action: "dns.deny", Host: h, Reason: err.Error()})
	case err != nil:
		m.Rcode = dns.RcodeServerFailure
		explain(m, edns, dns.ExtendedErrorCodeNetworkError, unaddressed(err))
	default:
		addressed(m, ask, v4, v6)
	}
}

// addressed answers with the address of the family that was asked for.
func addressed(m *dns.Msg, ask dns.Question, v4, v6 netip.Addr) {
	hdr := dns.RR_Header{Name: ask.Name, Rrtype: ask.Qtype, Class: dns.ClassINET, Ttl: nameTTL}
	if ask.Qtype == dns.TypeA {
		m.Answer = []dns.RR{&dns.A{Hdr: hdr, A: v4.AsSlice()}}
	} else {
		m.Answer = []dns.RR{&dns.AAAA{Hdr: hdr, AAAA: v6.AsSlice()}}
	}
}

// peer answers for a name of the sandbox's private network, which nobody else is asked about.
func (d *dnsServer) peer(m *dns.Msg, edns bool, ask dns.Question, n Peers, h policy.Host) {
	to, err := n.lookup(h)
	if err != nil {
		d.deny(m, edns, Entry{Action: "dns.deny", Host: h, Reason: err.Error()})
		return
	}
	if ask.Qtype != dns.TypeA && ask.Qtype != dns.TypeAAAA {
		return
	}
	d.c.names.mu.Lock()
	_, known := d.c.names.byName[h]
	d.c.names.mu.Unlock()
	if !known {
		if err := d.c.record(Entry{Action: "dns.allow", Host: h, Peer: to.ID, Rule: n.rule()}); err != nil {
			m.Rcode = dns.RcodeServerFailure
			return
		}
	}
	v4, v6, ok := d.c.names.add(h)
	if !ok {
		d.deny(m, edns, Entry{Action: "dns.deny", Host: h, Reason: "the sandbox has looked up more names than it can have"})
		return
	}
	addressed(m, ask, v4, v6)
}

// name gives an allowed name its addresses, if it exists and can be reached. Questions for both families come at once, and are one.
func (c *card) name(p *policy.Policy, h policy.Host) (v4, v6 netip.Addr, err error) {
	type pair struct{ v4, v6 netip.Addr }
	got, err, _ := c.naming.Do(string(h), func() (any, error) {
		v4, v6, err := c.nameOnce(p, h)
		return pair{v4, v6}, err
	})
	a := got.(pair)
	return a.v4, a.v6, err
}

func (c *card) nameOnce(p *policy.Policy, h policy.Host) (v4, v6 netip.Addr, err error) {
	c.names.mu.Lock()
	_, known := c.names.byName[h]
	c.names.mu.Unlock()
	first := false
	if !known {
		if first, err = c.meter.newHost(p.Limits(), h); err != nil {
			return v4, v6, err
		}
	}
	if first {
		// Before it is asked for: a name can carry something to whoever answers for it, even if that says that there is none.
		if err := c.record(Entry{Action: "dns.allow", Host: h, Rule: p.Lookup(h).Rule}); err != nil {
			c.meter.notAsked(h)
			return v4, v6, err
		}
	}
	ctx, cancel := context.WithTimeout(c.life, lookupTime)
	defer cancel()
	// Which of the addresses may be dialled depends on the flow, and is decided on then.
	if _, err := c.g.resolver.lookup(ctx, h); err != nil {
		if first {
			c.refuse(Entry{Action: "dns.fail", Host: h, Rule: p.Lookup(h).Rule, Reason: err.Error()})
		}
		return v4, v6, err
	}
	v4, v6, ok := c.names.add(h)
	if !ok {
		return v4, v6, &limitError{"the sandbox has looked up more names than it can have"}
	}
	return v4, v6, nil
}

// hostOf returns the canonical form of a name on the wire, in which bytes may be escaped.
func hostOf(name string) (policy.Host, error) {
	if strings.ContainsRune(name, '\\') {
		return "", errors.New("the name has bytes that no host name has")
	}
	if name == "." {
		return "", errors.New("the root has no address")
	}
	return policy.ParseHost(name)
}

// deny answers that a name does not exist, which every program understands, and says why to those that can hear it.
func (d *dnsServer) deny(m *dns.Msg, edns bool, e Entry) {
	m.Rcode = dns.RcodeNameError
	explain(m, edns, dns.ExtendedErrorCodeProhibited, e.Reason)
	d.c.refuse(e)
}

// explain adds a reason for those that ask with EDNS.
func explain(m *dns.Msg, edns bool, code uint16, text string) {
	if !edns {
		return
	}
	m.SetEdns0(dns.DefaultMsgSize, false)
	o := m.IsEdns0()
	o.Option = append(o.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: text})
}

// reverse answers for what name an address stands, if it does for one.
func (d *dnsServer) reverse(m *dns.Msg, ask dns.Question, a netip.Addr) bool {
	h, _ := d.c.names.find(a)
	switch {
	case a == GatewayIPv4 || a == GatewayIPv6:
		h = "gateway.internal"
	case a == SandboxIPv4 || a == SandboxIPv6 || a.IsLoopback():
		m.Rcode = dns.RcodeNameError // it asks for itself
		return true
	case h == "":
		return false
	}
	if ask.Qtype == dns.TypePTR {
		m.Answer = []dns.RR{&dns.PTR{Hdr: dns.RR_Header{Name: ask.Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: nameTTL}, Ptr: string(h) + "."}}
	}
	return true
}

// reverse reads the name under which an address is asked for.
func reverse(name string) (netip.Addr, bool) {
	lower := strings.ToLower(name)
	if s, ok := strings.CutSuffix(lower, ".in-addr.arpa."); ok {
		l := strings.Split(s, ".")
		for i, j := 0, len(l)-1; i < j; i, j = i+1, j-1 {
			l[i], l[j] = l[j], l[i]
		}
		a, err := netip.ParseAddr(strings.Join(l, "."))
		return a, err == nil && a.Is4()
	}
	if s, ok := strings.CutSuffix(lower, ".ip6.arpa."); ok {
		if len(s) != 63 {
			return netip.Addr{}, false
		}
		var b strings.Builder
		for i := 62; i >= 0; i -= 2 {
			b.WriteByte(s[i])
			if n := (62 - i) / 2; n%4 == 3 && n != 31 {
				b.WriteByte(':')
			}
		}
		a, err := netip.ParseAddr(b.String())
		return a, err == nil && a.Is6()
	}
	return netip.Addr{}, false
}

var _ net.PacketConn = (*gonet.UDPConn)(nil)
