//go:build linux

package main

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
	"github.com/warren-sandbox/warren/internal/secret/secrettest"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/tun"
)

// internet is the world of package egress: a network namespace in which every address there is leads to servers of the test's. It has no way out. What
// is sent in it is recorded: each packet as the kernel hands it on, each question for a name, and each word of an attack that a server reads.
type internet struct {
	t     *testing.T
	ns    *os.File
	roots []byte
	// secrets are values that are looked for in all that servers read.
	secrets []string
	scans   []*secrettest.Scanner

	mu      sync.Mutex
	seen    map[string]int
	answers map[string]int // by name
	bank    []string       // the tokens that the bank was shown
	raw     int            // the packet socket
}

func newInternet(t *testing.T) *internet {
	t.Helper()
	testenv.NeedsTool(t, "ip")
	n := &internet{t: t, ns: testenv.NetworkNamespace(t), seen: map[string]int{}, answers: map[string]int{}}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range []string{
		"link set lo up", "addr add " + egress.Host4 + "/32 dev lo", "-6 addr add " + egress.Host6 + "/128 dev lo nodad",
		"route add local 0.0.0.0/0 dev lo src " + egress.Host4, "-6 route add local ::/0 dev lo src " + egress.Host6,
	} {
		var out []byte
		check(n.within(func() (err error) {
			out, err = exec.Command("ip", strings.Fields(args)...).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("ip %s: %w\n%s", args, err, out)
			}
			return err
		}))
	}
	n.record()

	var cert tls.Certificate
	cert, n.roots = labCertificate(check, egress.Allowed, egress.Passed, "*.lab", "*.wild.lab", "*.evil.lab", "*."+egress.Allowed)
	secure := &tls.Config{
		Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS10,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			n.words([]byte(h.ServerName), nil)
			return nil, nil
		},
	}
	conns := make(chan net.Conn)
	plain := &http.Server{Handler: http.HandlerFunc(n.serve), ErrorLog: log.New(io.Discard, "", 0)}
	var listeners []net.Listener
	var packets []net.PacketConn
	check(n.within(func() error {
		for _, port := range []string{":80", ":443", ":8443"} {
			l, err := net.Listen("tcp", port)
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
		}
		l, err := net.Listen("tcp", ":53")
		if err != nil {
			return err
		}
		go (&dns.Server{Listener: l, Handler: dns.HandlerFunc(n.resolve), MsgAcceptFunc: anything}).ActivateAndServe()
		listeners = append(listeners, l)
		for _, network := range []string{"udp4", "udp6"} {
			// A socket of the package's own making answers from the address that was asked.
			p, err := (&net.ListenConfig{}).ListenPacket(t.Context(), network, ":53")
			if err != nil {
				return err
			}
			go (&dns.Server{PacketConn: p, Handler: dns.HandlerFunc(n.resolve), UDPSize: 4096, MsgAcceptFunc: anything}).ActivateAndServe()
			packets = append(packets, p)
		}
		return nil
	}))
	for _, l := range listeners[:3] {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go n.accept(&heard{Conn: c, n: n, what: "secret " + c.LocalAddr().String()}, secure, conns)
			}
		}()
	}
	served := &handed{conns, make(chan bool)}
	go plain.Serve(served)
	t.Cleanup(func() {
		for _, l := range listeners {
			l.Close()
		}
		for _, p := range packets {
			p.Close()
		}
		plain.Close()
	})
	return n
}

// within calls f in the namespace.
func (n *internet) within(f func() error) error { return tun.Within(n.ns, f) }

// start starts a program in the namespace.
func (n *internet) start(cmd *exec.Cmd) error { return n.within(cmd.Start) }

// output runs a program in the namespace, and returns what it prints.
func (n *internet) output(cmd *exec.Cmd) (string, error) {
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := n.start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, stderr.Bytes())
	}
	return out.String(), err
}

// sign notes one.
func (n *internet) sign(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen[fmt.Sprintf(format, args...)]++
}

// signs returns what has been seen since the last call.
func (n *internet) signs() map[string]int {
	time.Sleep(200 * time.Millisecond) // for what is on its way
	if st, err := unix.GetsockoptTpacketStats(n.raw, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || st.Drops > 0 {
		n.t.Errorf("of the packets of the lab %v are not on record: %v", st, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	seen := n.seen
	n.seen = map[string]int{}
	return seen
}

// words notes the words of attacks in what a server has read, and calls secret for secrets in it.
func (n *internet) words(b []byte, secret func()) {
	for _, w := range egress.Word.FindAll(b, -1) {
		n.sign("%s", egress.Read(string(w)))
	}
	for _, s := range n.secrets {
		if secret != nil && bytes.Contains(b, []byte(s)) {
			secret()
		}
	}
}

// record notes packets, as they are sent.
func (n *internet) record() {
	err := n.within(func() (err error) {
		all := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
		if n.raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return unix.SetsockoptInt(n.raw, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	})
	if err != nil {
		n.t.Fatalf("record packets: %v", err)
	}
	tv := unix.NsecToTimeval(int64(50 * time.Millisecond))
	if err := unix.SetsockoptTimeval(n.raw, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		n.t.Fatal(err)
	}
	stop, done := make(chan bool), make(chan bool)
	go func() {
		defer close(done)
		buf := make([]byte, 512)
		for {
			m, from, err := unix.Recvfrom(n.raw, buf, 0)
			select {
			case <-stop:
				return
			default:
			}
			if a, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && a.Pkttype == unix.PACKET_OUTGOING {
				n.packet(buf[:m])
			} else if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
				n.t.Errorf("record packets: %v", err)
				return
			}
		}
	}()
	n.t.Cleanup(func() {
		close(stop)
		<-done
		unix.Close(n.raw)
	})
}

// packet notes one, unless it is the answer to another: the kernel's word that nobody is there, what servers send, and neighbours that it looks for.
func (n *internet) packet(b []byte) {
	var proto int
	var to netip.Addr
	var rest []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4 && len(b) >= int(b[0]&15)*4:
		to, _ = netip.AddrFromSlice(b[16:20])
		proto, rest = int(b[9]), b[int(b[0]&15)*4:]
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return // the first piece of it is on record
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		to, _ = netip.AddrFromSlice(b[24:40])
		proto, rest = int(b[6]), b[40:]
	default:
		n.sign("odd packet % x", b[:min(len(b), 40)])
		return
	}
	port := func() (from, to int) {
		if len(rest) < 4 {
			return 0, 0
		}
		return int(binary.BigEndian.Uint16(rest)), int(binary.BigEndian.Uint16(rest[2:]))
	}
	from, at := port()
	switch {
	case proto == unix.IPPROTO_TCP && len(rest) > 13 && rest[13]&0x12 != 2: // not the first of a connection
	case proto == unix.IPPROTO_TCP:
		n.sign("%s", egress.Packet("tcp", to.String(), at))
	case proto == unix.IPPROTO_UDP && from == 53:
	case proto == unix.IPPROTO_UDP:
		n.sign("%s", egress.Packet("udp", to.String(), at))
	case proto == unix.IPPROTO_ICMP && len(rest) > 0 && (rest[0] == 3 || rest[0] == 0):
	case proto == unix.IPPROTO_ICMPV6 && len(rest) > 0 && rest[0] != 128:
	default:
		n.sign("%s", egress.Other(proto, to.String()))
	}
}

// resolve answers any question for a name.
func (n *internet) resolve(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	for _, ask := range q.Question {
		name := wireName(ask.Name)
		n.sign("%s", egress.Question(dns.TypeToString[ask.Qtype], name))
		n.words([]byte(name), nil)
		host := strings.ToLower(strings.TrimSuffix(name, "."))
		addrs := egress.Addresses(host)
		if ask.Qtype == dns.TypeA {
			n.mu.Lock()
			if n.answers[host]++; host == "rebind.lab" && n.answers[host] == 1 {
				addrs = []string{egress.First}
			}
			n.mu.Unlock()
		}
		at := ask.Name
		if host == "alias.lab" {
			at = "elsewhere.lab."
			m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: ask.Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET}, Target: at})
		}
		for _, a := range addrs {
			switch ip := net.ParseIP(a); {
			case ask.Qtype == dns.TypeA && !strings.Contains(a, ":"):
				m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: at, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: ip})
			case ask.Qtype == dns.TypeAAAA && strings.Contains(a, ":"):
				m.Answer = append(m.Answer, &dns.AAAA{Hdr: dns.RR_Header{Name: at, Rrtype: dns.TypeAAAA, Class: dns.ClassINET}, AAAA: ip})
			}
		}
	}
	w.WriteMsg(m)
}

func anything(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }

// wireName writes a name as package egress does.
func wireName(name string) string {
	b := make([]byte, 256)
	end, err := dns.PackDomainName(name, b, 0, nil, false)
	if err != nil {
		return name
	}
	var labels []string
	for i := 0; i < end && b[i] > 0; i += 1 + int(b[i]) {
		labels = append(labels, string(b[i+1:i+1+int(b[i])]))
	}
	return egress.Name(strings.Join(labels, "."))
}

// accept hears what a connection speaks, on whatever port, and serves it.
func (n *internet) accept(c *heard, secure *tls.Config, plain chan<- net.Conn) {
	first := make([]byte, 1)
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(c, first); err != nil {
		c.Close()
		return
	}
	c.first = first
	if first[0] != 22 {
		plain <- c
		return
	}
	t := tls.Server(c, secure)
	if err := t.Handshake(); err != nil {
		c.Close()
		return
	}
	c.SetReadDeadline(time.Time{})
	if t.ConnectionState().NegotiatedProtocol == "h2" {
		plain <- t
		return
	}
	plain <- &heard{Conn: t, n: n, what: c.what}
}

// heard is a connection of which all that is read is looked through.
type heard struct {
	net.Conn
	n     *internet
	what  string
	first []byte
	last  []byte // of what was read before
}

func (h *heard) Read(b []byte) (int, error) {
	if len(h.first) > 0 && len(b) > 0 {
		b[0], h.first = h.first[0], nil
		return 1, nil
	}
	m, err := h.Conn.Read(b)
	h.last = append(h.last, b[:m]...)
	h.n.words(h.last, func() { h.n.sign("%s", h.what) })
	if k := len(h.last) - 256; k > 0 {
		h.last = slices.Clone(h.last[k:])
	}
	return m, err
}

// handed is the listener of what accept has heard.
type handed struct {
	conns chan net.Conn
	ended chan bool
}

func (h *handed) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.ended:
		return nil, net.ErrClosed
	}
}

func (h *handed) Close() error {
	select {
	case <-h.ended:
	default:
		close(h.ended)
	}
	return nil
}

func (h *handed) Addr() net.Addr { return &net.TCPAddr{} }

// serve answers requests.
func (n *internet) serve(w http.ResponseWriter, r *http.Request) {
	local := r.Context().Value(http.LocalAddrContextKey).(net.Addr).String()
	// Over HTTP/2 the words are packed.
	n.words(fmt.Appendf(nil, "%s %s %s %v", r.Method, r.Host, r.URL, r.Header), func() {
		n.sign("secret %s", local)
		n.sign("%s", egress.Used(r.URL.Path))
	})
	n.sign("request %s %s%s", r.Method, r.Host, r.URL.Path)
	kind, echo := strings.CutPrefix(r.URL.Path, "/echo/")
	switch {
	case echo:
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		n.mu.Lock()
		n.bank = append(n.bank, token)
		n.mu.Unlock()
		tell(w, kind, token)
	case r.URL.Path == "/redirect":
		var code, kind int
		fmt.Sscan(r.URL.Query().Get("code"), &code)
		fmt.Sscan(r.URL.Query().Get("kind"), &kind)
		text := egress.Marker(fmt.Sprintf("b26-%d-%d", code, kind))
		w.Header().Set("Location", []string{"http://" + text + ".evil.lab/", "http://169.254.169.254/" + text}[kind&1])
		w.WriteHeader(code)
	case r.URL.Path == "/bytes":
		io.Copy(w, egress.Bytes())
	case r.URL.Path == "/sum":
		sum := sha256.New()
		io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%x", sum.Sum(nil))
	default:
		fmt.Fprintf(w, "%s is here", r.Host)
	}
}

// shown returns the tokens that the bank was shown since the last call.
func (n *internet) shown() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	bank := n.bank
	n.bank = nil
	return bank
}

// tell answers with a token, in one of the kinds of package egress, or without.
func tell(w http.ResponseWriter, kind, token string) {
	body := &strings.Builder{}
	pack := func(z interface {
		Write([]byte) (int, error)
		Close() error
	}) {
		fmt.Fprintf(z, "it is %s.", token)
		z.Close()
	}
	switch kind {
	case "header":
		w.Header().Set("X-Echo", "it is "+token)
	case "cookie":
		http.SetCookie(w, &http.Cookie{Name: "token", Value: url.QueryEscape(token)})
		w.Header().Add("Set-Cookie", "plain="+token)
	case "location":
		w.Header().Set("Location", "https://"+egress.Bank+"/?token="+url.QueryEscape(token))
		w.WriteHeader(http.StatusFound)
	case "trailer":
		w.Header().Set("Trailer", "X-Echo")
		w.(http.Flusher).Flush()
		w.Header().Set("X-Echo", token)
	case "plain":
		fmt.Fprintf(body, "it is %s.", token)
	case "pieces":
		for _, b := range []byte("it is " + token + ".") {
			w.Write([]byte{b})
			w.(http.Flusher).Flush()
		}
	case "gzip":
		w.Header().Set("Content-Encoding", "gzip")
		pack(gzip.NewWriter(body))
	case "deflate":
		w.Header().Set("Content-Encoding", "deflate")
		z, _ := flate.NewWriter(body, 9)
		pack(z)
	case "events":
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(body, "data: 1\n\ndata: %s\n\n", token)
	case "lines":
		w.Header().Set("Content-Type", "application/x-ndjson")
		fmt.Fprintf(body, "{}\n{\"token\":%q}\n", token)
	case "base64":
		fmt.Fprintf(body, "it is %s.", base64.StdEncoding.EncodeToString([]byte("it is "+token+".")))
	case "base64url":
		fmt.Fprintf(body, "it is %s.", base64.RawURLEncoding.EncodeToString([]byte("it: "+token)))
	case "basic":
		fmt.Fprintf(body, "Basic %s", base64.StdEncoding.EncodeToString([]byte("user:"+token)))
	case "url":
		fmt.Fprintf(body, "/?token=%s&a=b", url.QueryEscape(token))
	case "json":
		json.NewEncoder(body).Encode(map[string]string{"token": token})
	case "html":
		fmt.Fprintf(body, "<p>%s</p>", html.EscapeString(token))
	case "hex":
		fmt.Fprintf(body, "%x", "it is "+token)
	case "HEX":
		fmt.Fprintf(body, "%X", "it is "+token)
	}
	fmt.Fprint(w, body.String())
}
