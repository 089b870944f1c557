//go:build linux

package gateway

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// ipPacket is one of a protocol, with a payload.
func ipPacket(from, to string, proto byte, payload []byte) []byte {
	f, t := netip.MustParseAddr(from), netip.MustParseAddr(to)
	if f.Is6() {
		b := []byte{0x60, 0, 0, 0, 0, byte(len(payload)), proto, 64}
		return append(append(append(b, f.AsSlice()...), t.AsSlice()...), payload...)
	}
	b := append([]byte{0x45, 0, 0, byte(20 + len(payload)), 0, 1, 0, 0, 64, proto, 0, 0}, append(f.AsSlice(), t.AsSlice()...)...)
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	return append(b, payload...)
}

// datagramTo is the payload of a datagram with no sum, which is not looked at.
func datagramTo(port uint16) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0x30, 0x39}, port)
	return append(b, 0, 9, 0, 0, 'x')
}

// denials waits until as many are on record as there are wanted, and returns them as text.
func (l *lab) denials(want int) (list []string) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		list = nil
		l.mu.Lock()
		for _, e := range l.entries {
			if strings.HasSuffix(e.Action, ".deny") {
				list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s%s %d %s %d", e.Action, e.Host, e.Addr, e.Port, e.Protocol, e.More)))
			}
		}
		l.mu.Unlock()
		if len(list) >= want || time.Now().After(end) {
			slices.Sort(list)
			return list
		}
	}
}

// TestAstrayOnRecord sends what the stack drops before anybody decides on it: that it was tried is on record all the same.
func TestAstrayOnRecord(t *testing.T) {
	l := newLab(t)
	inside, outside, err := NewCard()
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	if err := l.g.Attach("one", outside, Rules{Policy: l.policy("allow: [allowed.lab]")}, ""); err != nil {
		t.Fatal(err)
	}
	const own4, own6 = "198.18.0.2", "fd77:6172:7265:6e::2"
	syn := make([]byte, 20)
	binary.BigEndian.PutUint16(syn, 4000)
	binary.BigEndian.PutUint16(syn[2:], 443)
	syn[12], syn[13] = 5<<4, 2
	// Headers of IPv6 before a payload, and pieces of packets.
	behind := func(header []byte, next byte, payload []byte) []byte {
		header[0] = next
		return append(header, payload...)
	}
	options := func() []byte { return []byte{0, 0, 1, 4, 0, 0, 0, 0} }
	long := func() []byte { return append([]byte{0, 1, 1, 12}, make([]byte, 12)...) }
	later := func(p []byte) []byte {
		binary.BigEndian.PutUint16(p[6:], 1)
		binary.BigEndian.PutUint16(p[10:], binary.BigEndian.Uint16(p[10:])-1)
		return p
	}
	gre := make([]byte, 16)
	for _, p := range [][]byte{
		ipPacket(own6, "2a00::11", unix.IPPROTO_DSTOPTS, behind(options(), unix.IPPROTO_GRE, gre)),
		ipPacket(own6, "2a00::12", unix.IPPROTO_HOPOPTS, behind(long(), unix.IPPROTO_DSTOPTS, behind(options(), unix.IPPROTO_SCTP, gre))),
		ipPacket(own6, "2a00::13", unix.IPPROTO_FRAGMENT, behind([]byte{0, 0, 0, 0, 0, 0, 0, 9}, unix.IPPROTO_GRE, gre)),
		ipPacket(own6, "2a00::14", unix.IPPROTO_FRAGMENT, behind([]byte{0, 0, 0, 8, 0, 0, 0, 9}, unix.IPPROTO_GRE, gre)),
		ipPacket(own6, "2a00::15", unix.IPPROTO_ROUTING, behind(make([]byte, 8), unix.IPPROTO_GRE, gre)), ipPacket(own6, "2a00::16", unix.IPPROTO_NONE, gre),
		ipPacket(own6, "ff02::1:fb", unix.IPPROTO_DSTOPTS, behind(options(), unix.IPPROTO_UDP, datagramTo(5353))), ipPacket(own6, "ff02::1:fc", unix.IPPROTO_HOPOPTS, behind(long(), unix.IPPROTO_TCP, syn)),
		later(ipPacket(own4, "224.0.0.253", unix.IPPROTO_UDP, datagramTo(5353))), later(ipPacket(own4, "11.6.1.1", unix.IPPROTO_GRE, gre)),
		ipPacket(own4, "127.0.0.1", unix.IPPROTO_UDP, datagramTo(7420)), ipPacket(own4, "127.0.0.1", unix.IPPROTO_TCP, syn), ipPacket(own6, "::1", unix.IPPROTO_UDP, datagramTo(53)),
		ipPacket(own6, "::ffff:169.254.169.254", unix.IPPROTO_TCP, syn), ipPacket("224.0.0.5", "11.6.1.2", unix.IPPROTO_UDP, datagramTo(99)), ipPacket("255.255.255.255", "11.6.1.3", unix.IPPROTO_UDP, datagramTo(99)),
		ipPacket("127.0.0.1", "11.6.1.4", unix.IPPROTO_UDP, datagramTo(99)), ipPacket("ff02::1", "2a00::17", unix.IPPROTO_UDP, datagramTo(99)), ipPacket("::1", "2a00::18", unix.IPPROTO_UDP, datagramTo(99)),
		ipPacket(own4, "255.255.255.255", unix.IPPROTO_TCP, syn), ipPacket(own4, "0.0.0.0", unix.IPPROTO_TCP, syn), ipPacket(own6, "::", unix.IPPROTO_TCP, syn),
		ipPacket("0.0.0.0", "11.6.1.5", unix.IPPROTO_TCP, syn), ipPacket("::", "2a00::20", unix.IPPROTO_TCP, syn), ipPacket("0.0.0.0", "11.6.1.6", unix.IPPROTO_UDP, datagramTo(99)),
		// What is decided on is told by who does, once.
		ipPacket(own6, "2a00::19", unix.IPPROTO_DSTOPTS, behind(options(), unix.IPPROTO_UDP, datagramTo(99))), ipPacket(own4, "255.255.255.255", unix.IPPROTO_UDP, datagramTo(67)),
		ipPacket(own4, "11.6.0.1", unix.IPPROTO_GRE, make([]byte, 8)), ipPacket(own4, "11.6.0.2", unix.IPPROTO_SCTP, make([]byte, 8)), ipPacket(own4, "224.0.0.9", unix.IPPROTO_IGMP, make([]byte, 8)),
		ipPacket(own6, "2a00::1", unix.IPPROTO_GRE, make([]byte, 8)), ipPacket(own4, "224.0.0.251", unix.IPPROTO_UDP, datagramTo(5353)), ipPacket(own6, "ff02::fb", unix.IPPROTO_UDP, datagramTo(5353)),
		ipPacket("10.9.9.9", "11.6.0.3", unix.IPPROTO_UDP, datagramTo(99)), ipPacket("10.9.9.9", "11.6.0.4", unix.IPPROTO_TCP, syn),
		// These are the sandbox's kernel's own affair, and no denials.
		ipPacket(own4, "11.6.0.5", unix.IPPROTO_ICMP, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}), ipPacket(own6, "ff02::2", unix.IPPROTO_ICMPV6, []byte{133, 0, 0, 0, 0, 0, 0, 0}), {0x45, 0}, {},
		ipPacket(own4, "11.6.0.6", unix.IPPROTO_UDP, datagramTo(99)),
	} {
		if len(p) == 0 {
			continue // a message of no bytes is the end of a card
		}
		if _, err := inside.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"flow.deny 2a00::11 0 ip/47 0", "flow.deny 2a00::12 0 ip/132 0", "flow.deny 2a00::13 0 ip/47 0", "flow.deny 2a00::14 0 ip/47 0", "flow.deny 2a00::15 0 ip/47 0", "flow.deny 2a00::16 0 ip/59 0",
		"flow.deny ff02::1:fb 5353 udp 0", "flow.deny ff02::1:fc 443 tcp 0", "flow.deny 224.0.0.253 0 udp 0", "flow.deny 11.6.1.1 0 ip/47 0", "flow.deny 127.0.0.1 7420 udp 0",
		"flow.deny 127.0.0.1 443 tcp 0", "flow.deny ::1 53 udp 0", "flow.deny ::ffff:169.254.169.254 443 tcp 0", "flow.deny 11.6.1.2 99 udp 0", "flow.deny 11.6.1.3 99 udp 0", "flow.deny 11.6.1.4 99 udp 0",
		"flow.deny 2a00::17 99 udp 0", "flow.deny 2a00::18 99 udp 0", "flow.deny 2a00::19 99 udp 0", "flow.deny 255.255.255.255 67 udp 0",
		"flow.deny 255.255.255.255 443 tcp 0", "flow.deny 0.0.0.0 443 tcp 0", "flow.deny :: 443 tcp 0", "flow.deny 11.6.1.5 443 tcp 0", "flow.deny 2a00::20 443 tcp 0", "flow.deny 11.6.1.6 99 udp 0",
		"flow.deny 11.6.0.1 0 ip/47 0", "flow.deny 11.6.0.2 0 ip/132 0", "flow.deny 11.6.0.3 99 udp 0", "flow.deny 11.6.0.4 443 tcp 0", "flow.deny 11.6.0.6 99 udp 0",
		"flow.deny 224.0.0.251 5353 udp 0", "flow.deny 224.0.0.9 0 ip/2 0", "flow.deny 2a00::1 0 ip/47 0", "flow.deny ff02::fb 5353 udp 0",
	}
	slices.Sort(want)
	if got := l.denials(len(want)); !slices.Equal(got, want) {
		t.Errorf("on record are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
}

// TestDenialsOnRecord is refused a thousand things at once: each of them is on record by itself.
func TestDenialsOnRecord(t *testing.T) {
	l := newLab(t)
	in := l.sandbox("one", "allow: [allowed.lab]")
	var want []string
	for i := range 500 {
		name := fmt.Sprintf("n%d.evil.lab", i)
		if _, err := in.ask(name, dns.TypeA); err != nil {
			t.Fatal(err)
		}
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, 6, byte(i >> 8), byte(i)}), 443)
		if c, err := in.dial(t.Context(), a); err == nil {
			c.Close()
			t.Fatalf("%s answers", a)
		}
		want = append(want, fmt.Sprintf("dns.deny %s 0  0", name), fmt.Sprintf("flow.deny %s 443 tcp 0", a.Addr()))
	}
	slices.Sort(want)
	if got := l.denials(len(want)); !slices.Equal(got, want) {
		t.Errorf("%d are on record, such as %q, want %d, such as %q", len(got), got[:min(3, len(got))], len(want), want[:3])
	}
}

// TestQuestionsOnRecord asks the name server what it does not answer.
func TestQuestionsOnRecord(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	in := l.sandbox("one", "allow: [allowed.lab]")
	c, err := in.udp(netip.AddrPortFrom(GatewayIPv4, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	for what, change := range map[string]func(*dns.Msg){
		"two.lab.":     func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]); m.Question[1].Name = "second.lab." },
		"update.lab.":  func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate },
		"chaos.lab.":   func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS },
		"allowed.lab.": func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeTXT },
		// Clients do without it, and ask it for each name.
		"allowed.lab": func(m *dns.Msg) {
			m.Question[0] = dns.Question{Name: "allowed.lab.", Qtype: dns.TypeHTTPS, Qclass: dns.ClassINET}
		},
		"6.6.6.11.in-addr.arpa.":    func(m *dns.Msg) { m.Question[0].Qtype = dns.TypePTR },
		"1.0.18.198.in-addr.arpa.":  func(m *dns.Msg) { m.Question[0].Qtype = dns.TypePTR },
		"1.0.0.127.in-addr.arpa.":   func(m *dns.Msg) { m.Question[0].Qtype = dns.TypePTR },
		"2.0.18.198.in-addr.arpa.":  func(m *dns.Msg) { m.Question[0].Qtype = dns.TypePTR },
		"none.lab.":                 func(m *dns.Msg) { m.Question = nil },
		"unparsable.lab.":           func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeA },
		"with an update for it.lab": func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify; m.Question[0].Name = "notify.lab." },
	} {
		m := new(dns.Msg)
		m.SetQuestion(dns.Fqdn(strings.ReplaceAll(what, " ", "-")), dns.TypeA)
		change(m)
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		if what == "unparsable.lab." {
			b = b[:len(b)-3]
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 1024)
		n, err := c.Read(buf)
		if err != nil {
			t.Fatalf("%s: no answer: %v", what, err)
		}
		if err := m.Unpack(buf[:n]); err != nil || strings.Contains(what, "1.0.18") != (len(m.Answer) == 1) {
			t.Errorf("%s: the answer is %v, %v", what, m, err)
		}
	}
	want := []string{
		"dns.deny  0  0", "dns.deny  0  0", "dns.deny 6.6.6.11.in-addr.arpa. 0  0", "dns.deny allowed.lab 0  0", "dns.deny chaos.lab. 0  0", "dns.deny notify.lab. 0  0", "dns.deny second.lab. 0  0",
		"dns.deny two.lab. 0  0", "dns.deny update.lab. 0  0",
	}
	if got := l.denials(len(want)); !slices.Equal(got, want) {
		t.Errorf("on record are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
}

// TestOddRequestsOnRecord makes requests that the server does not take for any, so that nobody handles them: they are on record, each once, and so is one that is handled.
func TestOddRequestsOnRecord(t *testing.T) {
	l := newLab(t)
	l.name("plain.lab", "11.1.1.1")
	l.web("11.1.1.1:80", hello("hi"))
	in := l.sandbox("one", "allow: [{host: plain.lab, protocol: http}]")
	const good = "GET /good HTTP/1.1\r\nHost: plain.lab\r\n\r\n"
	for _, c := range []struct{ text, path, reason string }{
		{"GET /odd-host?x=secret HTTP/1.1\r\nHost: a b\r\n\r\n", "/odd-host", "400 Bad Request: malformed Host header"},
		{"GET /no-host HTTP/1.1\r\nX: y\r\n\r\n", "/no-host", "400 Bad Request: missing required Host header"},
		{"GET /odd-header HTTP/1.1\r\nHost: plain.lab\r\nX : y\r\n\r\n", "/odd-header", ""},
		{"GET /second\x01 HTTP/1.1\r\nHost: plain.lab\r\n\r\n", "", "400"},
		{"POST /encoded HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: x\r\n\r\n", "/encoded", ""},
		{"OPTIONS * HTTP/1.1\r\nHost: plain.lab\r\nConnection: close\r\n\r\n", "*", "the path does not begin with /"},
		{"no request at all\r\n\r\n", "", "a method, a target and a version"},
		{good + "GET  /after-a-good-one HTTP/1.1\r\nHost: plain.lab\r\n\r\n", "", "a method, a target and a version"},
	} {
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
		conn := in.connect(t, "plain.lab", 80)
		fmt.Fprint(conn, c.text)
		b, err := io.ReadAll(conn)
		conn.Close()
		if err != nil && len(b) == 0 || !strings.Contains(string(b), " 400 ") && !strings.Contains(string(b), " 501 ") {
			t.Errorf("%q: answered %q, %v", c.text, b, err)
		}
		l.denials(1)
		var got []Entry
		l.mu.Lock()
		for _, e := range l.entries {
			if e.Action == "http.deny" {
				got = append(got, e)
			}
		}
		l.mu.Unlock()
		if len(got) != 1 || got[0].Host != "plain.lab" || got[0].Port != 80 || got[0].Status < 400 || !strings.Contains(got[0].Reason, c.reason) || got[0].Reason == "" ||
			!strings.HasPrefix(got[0].Path, c.path) || strings.Contains(fmt.Sprint(got), "secret") {
			t.Errorf("%q: on record is %+v", c.text, got)
		}
	}
	// One that is refused before another that is odd, and words that may be somebody's secret.
	for _, c := range []struct{ text, reason, path string }{
		{"GET /first HTTP/1.1\r\nHost: a b\r\n\r\nGET  /second-secret HTTP/1.1\r\n\r\n" + good, "malformed Host header", "/first"},
		{"a-secret /x HTTP/1.1\r\nHost: plain.lab\r\nConnection: close\r\n\r\n", "no word in capitals", "/x"},
		{"a-secret /x HTTP/1.1\r\nHost: a b\r\n\r\n", "malformed Host header", "/x"},
		{"GET /x HTTP/1.1\r\nHost: plain.lab\r\nAuthorization a-secret\r\n\r\n", "line 2 of its header", "/x"},
		{"GET /x a-secret\r\nHost: plain.lab\r\n\r\n", "its version", "/x"},
		{"POST /x HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\na-secret\r\n", "the length of a chunk", "/x"},
	} {
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
		conn := in.connect(t, "plain.lab", 80)
		fmt.Fprint(conn, c.text)
		io.Copy(io.Discard, conn)
		conn.Close()
		eventually(t, "the end is on record", func() bool { return l.has("flow.close", "plain.lab") })
		l.mu.Lock()
		got := slices.DeleteFunc(slices.Clone(l.entries), func(e Entry) bool { return e.Action != "http.deny" })
		if len(got) != 1 || !strings.Contains(got[0].Reason, c.reason) || got[0].Path != c.path || strings.Contains(fmt.Sprint(l.entries), "secret") {
			t.Errorf("%q: on record is %+v", c.text, l.entries)
		}
		l.mu.Unlock()
	}
	// Who leaves in the middle of a head is not denied anything, unless the head is wrong already.
	for text, action := range map[string]string{"GET /ha": "http.fail", "GET /half HTTP/1.1\r\nHost: plain.lab\r\n": "http.fail", good + "GET /ha": "http.fail", "GET /half HTTP/1.1\r\nHost\r\n": "http.deny"} {
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
		conn := in.connect(t, "plain.lab", 80)
		if strings.HasPrefix(text, good) {
			fmt.Fprint(conn, good)
			eventually(t, "the first request is on record", func() bool { return l.has("http.request", "plain.lab") })
			text = strings.TrimPrefix(text, good)
		}
		fmt.Fprint(conn, text)
		conn.(interface{ CloseWrite() error }).CloseWrite()
		io.Copy(io.Discard, conn)
		conn.Close()
		eventually(t, "the end is on record", func() bool { return l.has("flow.close", "plain.lab") })
		l.mu.Lock()
		got := slices.DeleteFunc(slices.Clone(l.entries), func(e Entry) bool { return e.Action != "http.deny" && e.Action != "http.fail" })
		if len(got) != 1 || got[0].Action != action || action == "http.fail" && (got[0].Status != 0 || !strings.Contains(got[0].Reason, "left before")) {
			t.Errorf("%q: on record is %+v, want one of %s", text, got, action)
		}
		l.mu.Unlock()
	}
	if status, body, err := in.get("http://plain.lab/good"); err != nil || status != 200 || !strings.HasPrefix(body, "hi plain.lab") {
		t.Errorf("what is allowed answers %d %q, %v", status, body, err)
	}
}
