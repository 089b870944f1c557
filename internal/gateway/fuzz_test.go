//go:build linux

package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren/internal/policy"
)

// saying is a connection whose other side says something, ends, and is not to be told anything.
type saying struct {
	net.Conn
	said *bytes.Reader
	told int
}

func (s *saying) Read(b []byte) (int, error)         { return s.said.Read(b) }
func (s *saying) Write(b []byte) (int, error)        { s.told += len(b); return len(b), nil }
func (s *saying) SetReadDeadline(t time.Time) error  { return nil }
func (s *saying) SetWriteDeadline(t time.Time) error { return nil }
func (s *saying) SetDeadline(t time.Time) error      { return nil }
func (s *saying) Close() error                       { return nil }

// helloOf returns what a TLS client says first.
func helloOf(t testing.TB, config *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer b.Close()
	go func() {
		defer a.Close()
		tls.Client(a, config).Handshake()
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(b, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(b, body); err != nil {
		t.Fatal(err)
	}
	return append(head, body...)
}

// namesIn is a second parser of a ClientHello, as another program may have one: all names that it can find.
func namesIn(b []byte) (names []string) {
	var hello []byte
	for len(b) >= 5 && b[0] == recordHandshake {
		n := int(binary.BigEndian.Uint16(b[3:]))
		if len(b) < 5+n {
			break
		}
		hello, b = append(hello, b[5:5+n]...), b[5+n:]
	}
	if len(hello) < 4 || hello[0] != 1 {
		return nil
	}
	if n := int(hello[1])<<16 | int(hello[2])<<8 | int(hello[3]); len(hello) >= 4+n {
		hello = hello[:4+n]
	}
	rest := hello[4:]
	skip := func(size int) bool { // what is behind a length of so many bytes, or that many
		if len(rest) < size {
			return false
		}
		n := 0
		for _, c := range rest[:size] {
			n = n<<8 | int(c)
		}
		if len(rest) < size+n {
			return false
		}
		rest = rest[size+n:]
		return true
	}
	if len(rest) < 34 {
		return nil
	}
	rest = rest[34:]
	if !skip(1) || !skip(2) || !skip(1) || len(rest) < 2 {
		return nil
	}
	for rest = rest[2:]; len(rest) >= 4; {
		kind := binary.BigEndian.Uint16(rest)
		rest = rest[2:]
		ext := rest
		if !skip(2) {
			return names
		}
		ext = ext[2 : len(ext)-len(rest)]
		if kind != 0 || len(ext) < 2 {
			continue
		}
		for ext = ext[2:]; len(ext) >= 3; {
			n := int(binary.BigEndian.Uint16(ext[1:]))
			if len(ext) < 3+n {
				break
			}
			if ext[0] == 0 {
				names = append(names, string(ext[3:3+n]))
			}
			ext = ext[3+n:]
		}
	}
	return names
}

// FuzzHello reads what claims to be the beginning of a TLS connection: the name that is decided on is the only one that anybody finds in it, and all that
// was read can be passed on.
func FuzzHello(f *testing.F) {
	plain := helloOf(f, &tls.Config{ServerName: "allowed.lab", NextProtos: []string{"h2"}})
	f.Add(plain)
	f.Add(helloOf(f, &tls.Config{ServerName: "allowed.lab", MaxVersion: tls.VersionTLS12}))
	f.Add(helloOf(f, &tls.Config{ServerName: "allowed.lab", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}))
	f.Add(helloOf(f, &tls.Config{InsecureSkipVerify: true}))
	f.Add(bytes.Replace(plain, []byte("allowed.lab"), []byte("ALLOWED.LAB"), 1))
	f.Add(bytes.Replace(plain, []byte("allowed.lab"), []byte("allowe\x00.lab"), 1))
	f.Add(append(bytes.Clone(plain), "GET / HTTP/1.1\r\n"...))
	// In two records.
	f.Add(append(append([]byte{22, 3, 1, 0, 20}, plain[5:25]...), append(binary.BigEndian.AppendUint16([]byte{22, 3, 1}, uint16(len(plain)-25)), plain[25:]...)...))
	f.Add([]byte{22, 3, 1, 0xff, 0xff, 1})
	f.Add([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"))
	f.Add([]byte("\x80\x2e\x01\x00\x02"))
	f.Fuzz(func(t *testing.T, said []byte) {
		c := &saying{said: bytes.NewReader(said)}
		name, read, err := readHello(c)
		if c.told > 0 {
			t.Fatalf("%d bytes were written", c.told)
		}
		if len(read) > maxHello || !bytes.HasPrefix(said, read) || len(read)+c.said.Len() != len(said) {
			t.Fatalf("%d bytes are kept of %d, of which %d are left", len(read), len(said), c.said.Len())
		}
		if err != nil {
			return
		}
		if again, err := policy.ParseHost(string(name)); err != nil || again != name {
			t.Fatalf("the name is %q, which is %q, %v", name, again, err)
		}
		found := namesIn(read)
		if len(found) != 1 {
			t.Fatalf("the name is %q, and others find %q", name, found)
		}
		if other, err := policy.ParseHost(found[0]); err != nil || other != name {
			t.Fatalf("the name is %q, and others find %q, %v", name, other, err)
		}
	})
}

// answering takes the answer to a question.
type answering struct {
	dns.ResponseWriter
	answer *dns.Msg
	n      int
}

func (a *answering) WriteMsg(m *dns.Msg) error { a.answer, a.n = m, a.n+1; return nil }

// oneByOne has all records of a sandbox written one by one, however many these are: what is counted says less than a test looks for.
func oneByOne(c *card) { c.ledger.rate.burst, c.ledger.rate.have = math.MaxFloat64, math.MaxFloat64 }

// FuzzDNS asks the gateway's name server: it answers all that is a question, and asks the world for no other name than the policy's.
func FuzzDNS(f *testing.F) {
	for _, q := range []struct {
		name string
		kind uint16
	}{
		{"allowed.lab.", dns.TypeA}, {"ALLOWED.lab.", dns.TypeAAAA}, {"sub.wild.lab.", dns.TypeA}, {"canary.evil.lab.", dns.TypeA}, {"allowed.lab.", dns.TypeTXT}, {"evil\\.allowed.lab.", dns.TypeA},
		{"2.0.18.198.in-addr.arpa.", dns.TypePTR}, {"1.0.18.198.in-addr.arpa.", dns.TypePTR}, {".", dns.TypeNS}, {strings.Repeat("a.", 100) + "wild.lab.", dns.TypeA},
		{"2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.e.6.0.0.5.6.2.7.2.7.1.6.7.7.d.f.ip6.arpa.", dns.TypePTR},
	} {
		m := new(dns.Msg)
		m.SetQuestion(q.name, q.kind)
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		m.SetEdns0(1232, true)
		if b, err = m.Pack(); err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	l := newLab(f)
	l.name("allowed.lab", "11.1.1.1")
	l.sandbox("one", "allow: [allowed.lab, '*.wild.lab']\nlimits: {new_hosts_per_hour: 2000}")
	c, err := l.g.card("one")
	if err != nil {
		f.Fatal(err)
	}
	oneByOne(c)
	f.Fuzz(func(t *testing.T, packet []byte) {
		c.dns.told(packet)
		word := func(i int) uint16 { return binary.BigEndian.Uint16(packet[2*i:]) }
		if len(packet) >= 12 && word(1)&(1<<15) == 0 {
			odd := crowded(dns.Header{Qdcount: word(2), Ancount: word(3), Nscount: word(4), Arcount: word(5)}) != ""
			l.mu.Lock()
			n := len(l.entries)
			l.entries = nil
			l.mu.Unlock()
			if odd != (n > 0) || n > maxTold {
				t.Fatalf("a message is more than a question: %v, and has %d records", odd, n)
			}
			if odd {
				return // answered by the library
			}
		}
		q := new(dns.Msg)
		if len(packet) < 12 || len(packet) > maxMessage || q.Unpack(packet) != nil || q.Response {
			return // as well
		}
		w := &answering{}
		c.dns.answer(w, q)
		if w.n != 1 || w.answer.Id != q.Id || !w.answer.Response {
			t.Fatalf("answered %d times: %v", w.n, w.answer)
		}
		b, err := w.answer.Pack()
		if err != nil {
			t.Fatalf("the answer %v cannot be sent: %v", w.answer, err)
		}
		if len(b) > len(packet)+1024 {
			t.Fatalf("%d bytes answer %d", len(b), len(packet))
		}
		_, asked := l.reached()
		for _, name := range asked {
			if name != "allowed.lab." && !strings.HasSuffix(name, ".wild.lab.") {
				t.Fatalf("the world was asked for %q", name)
			}
		}
		for _, rr := range w.answer.Answer {
			if host, err := hostOf(rr.Header().Name); rr.Header().Rrtype != dns.TypePTR && (err != nil || host != "allowed.lab") {
				t.Fatalf("the answer is %v", rr)
			}
		}
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
	})
}

// strictServer is a server that takes nothing for granted: what is not the plainest form of a request is a finding. It tells what it got.
type strictServer struct {
	mu       sync.Mutex
	got      []string
	problems []string
	open     int // connections
}

var (
	requestLine = regexp.MustCompile(`^(GET|POST) (/[!-~]*) HTTP/1\.1$`)
	headerLine  = regexp.MustCompile("^([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([^\\x00-\\x08\\x0a-\\x1f\\x7f]*)$")
)

func (s *strictServer) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.open++
		s.mu.Unlock()
		go func() {
			defer func() {
				c.Close()
				s.mu.Lock()
				s.open--
				s.mu.Unlock()
			}()
			r := bufio.NewReader(c)
			for {
				line, err := s.request(r, c)
				if err != nil {
					// That a request was broken off is nothing that it says.
					if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.As(err, new(*net.OpError)) {
						s.mu.Lock()
						s.problems = append(s.problems, err.Error())
						s.mu.Unlock()
					}
					return
				}
				s.mu.Lock()
				s.got = append(s.got, line)
				s.mu.Unlock()
				if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"); err != nil {
					return
				}
			}
		}()
	}
}

// line reads one that ends as it has to.
func (s *strictServer) line(r *bufio.Reader) (string, error) {
	text, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line, ok := strings.CutSuffix(text, "\r\n")
	if !ok || strings.ContainsAny(line, "\r\x00") {
		return "", fmt.Errorf("a line ends or is broken oddly: %q", text)
	}
	return line, nil
}

// request reads one as RFC 9112 has it and no other.
func (s *strictServer) request(r *bufio.Reader, w io.Writer) (string, error) {
	first, err := s.line(r)
	if err != nil {
		return "", err
	}
	m := requestLine.FindStringSubmatch(first)
	if m == nil {
		return "", fmt.Errorf("the request line is %q", first)
	}
	h := map[string][]string{}
	for {
		line, err := s.line(r)
		if err != nil {
			return "", err
		}
		if line == "" {
			break
		}
		f := headerLine.FindStringSubmatch(line)
		if f == nil {
			return "", fmt.Errorf("a line of the header is %q", line)
		}
		name := strings.ToLower(f[1])
		h[name] = append(h[name], f[2])
	}
	if len(h["host"]) != 1 || len(h["content-length"])+len(h["transfer-encoding"]) > 1 || len(h["upgrade"]) > 1 {
		return "", fmt.Errorf("%s has headers that say two things: %q", first, h)
	}
	if len(h["expect"]) > 0 {
		if _, err := io.WriteString(w, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return "", err
		}
	}
	switch {
	case len(h["transfer-encoding"]) == 1:
		if h["transfer-encoding"][0] != "chunked" {
			return "", fmt.Errorf("the encoding is %q", h["transfer-encoding"])
		}
		for {
			line, err := s.line(r)
			if err != nil {
				return "", err
			}
			n, err := strconv.ParseUint(line, 16, 31)
			if err != nil {
				return "", fmt.Errorf("the length of a chunk is %q", line)
			}
			if _, err := io.CopyN(io.Discard, r, int64(n)); err != nil {
				return "", err
			}
			if n == 0 {
				for line = "-"; line != ""; { // trailers
					if line, err = s.line(r); err != nil {
						return "", err
					}
				}
				break
			}
			if end, err := s.line(r); err != nil || end != "" {
				return "", fmt.Errorf("a chunk ends with %q: %w", end, err)
			}
		}
	case len(h["content-length"]) == 1:
		n, err := strconv.ParseUint(h["content-length"][0], 10, 31)
		if err != nil {
			return "", fmt.Errorf("the length is %q", h["content-length"])
		}
		if _, err := io.CopyN(io.Discard, r, int64(n)); err != nil {
			return "", err
		}
	}
	return m[1] + " " + h["host"][0] + " " + m[2], nil
}

var requestSeeds = []string{
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/a?b=c%20d;e HTTP/1.1\r\nHost: PLAIN.lab:80\r\nX-A: b\r\nCookie: a=b\r\n\r\n",
	"POST /v1/a HTTP/1.1\r\nHost: plain.lab\r\nContent-Length: 5\r\n\r\nhelloGET /v1/b HTTP/1.1\r\nHost: plain.lab\r\nConnection: close\r\n\r\n",
	"POST /v1/a HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET /v2/secret HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"POST /v1/a HTTP/1.1\r\nHost: plain.lab\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v2/secret HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"POST /v1/a HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n0\r\nX-T: a\r\nHost: evil.lab\r\n\r\n",
	"POST /v1/a HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=\"a\nb\"\r\nhello\r\n0\r\n\r\n",
	"GET /v1/../v2/x HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/%2e%2e/v2 HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/a%2Fb//c;d=e/%41 HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/a%0d%0aX: HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET http://evil.lab/v1/a HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x80aaaa",
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\nConnection: Host, X-A, Content-Length\r\nX-A: b\r\nKeep-Alive: 1\r\nTE: trailers\r\n\r\n",
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
	"GET /v1/a HTTP/1.1\nHost: plain.lab\n\n",
	"GET /v1/a HTTP/1.0\r\nHost: plain.lab\r\n\r\n",
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\nX: a\r\n b\r\n\r\n",
	"OPTIONS * HTTP/1.1\r\nHost: plain.lab\r\n\r\n",
	"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"GET /v1/a HTTP/1.1\r\nHost: plain.lab\r\nX-HTTP-Method-Override: DELETE\r\n\r\n",
}

// FuzzRequest says anything on a connection that is inspected. The server behind sees requests of the plainest form only, each of
// which has been decided on and may be.
func FuzzRequest(f *testing.F) {
	for _, s := range requestSeeds {
		f.Add([]byte(s))
	}
	l := newLab(f)
	l.name("plain.lab", "11.1.1.2")
	server := &strictServer{}
	go server.serve(l.listen("11.1.1.2:80"))
	l.sandbox("one", "allow:\n  - {host: plain.lab, protocol: http, methods: [GET, POST], paths: [/v1/**]}")
	card, err := l.g.card("one")
	if err != nil {
		f.Fatal(err)
	}
	oneByOne(card)
	states := make(chan http.ConnState, 64)
	before := l.g.inspect.server.ConnState
	l.g.inspect.server.ConnState = func(c net.Conn, s http.ConnState) {
		before(c, s)
		states <- s
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { ln.Close() })
	f.Fuzz(func(t *testing.T, said []byte) {
		inside, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer inside.Close()
		outside, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		flow := &flow{to: policy.Flow{Host: "plain.lab", Port: 80, Protocol: policy.HTTP}, inspected: true}
		if err := card.begin(context.Background(), flow); err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			l.g.inspect.serve(flow, outside)
			card.done(flow)
			close(served)
		}()
		go inside.Write(said)
		go io.Copy(io.Discard, inside)
		// An end that comes while a request is under way breaks that off: it comes when the gateway waits for the next, or for what never comes.
		give := time.NewTimer(60 * time.Millisecond)
		for ended := false; !ended; {
			select {
			case s := <-states:
				if s == http.StateIdle {
					give.Reset(5 * time.Millisecond)
				} else {
					give.Reset(60 * time.Millisecond)
				}
			case <-served:
				ended = true
			case <-give.C:
				inside.(*net.TCPConn).CloseWrite()
				give.Reset(time.Second)
				if !waits(served, states, 10*time.Second) {
					// What was taken over, such as a WebSocket, ends with its flow.
					flow.stop(errDetached)
					if !waits(served, states, 10*time.Second) {
						t.Fatal("the connection does not end")
					}
				}
				ended = true
			}
		}
		for len(states) > 0 {
			<-states
		}
		l.mu.Lock()
		entries := l.entries
		l.entries = nil
		l.mu.Unlock()
		decided, requests := decidedOn(entries)
		server.mu.Lock()
		defer server.mu.Unlock()
		// What was broken off may still be on its way: it is there when no connection is left.
		for deadline := time.Now().Add(10 * time.Second); len(server.got) < requests && server.open > 0 && time.Now().Before(deadline); {
			server.mu.Unlock()
			card.forward.Load().CloseIdleConnections()
			time.Sleep(time.Millisecond)
			server.mu.Lock()
		}
		got, problems := server.got, server.problems
		server.got, server.problems = nil, nil
		if len(problems) > 0 {
			t.Fatalf("the server saw what is no plain request: %q", problems)
		}
		for _, line := range got {
			line, _, _ = strings.Cut(line, "?")
			decided[line]--
			path := line[strings.LastIndexByte(line, ' ')+1:]
			if decided[line] < 0 || path != "/v1" && !strings.HasPrefix(path, "/v1/") {
				t.Fatalf("the server got %q, and what was decided on are %+v", got, entries)
			}
		}
	})
}

// decidedOn counts the requests that a server may have got by what is on record, and returns how many of them it has got. One that was given up says whether it has.
func decidedOn(entries []Entry) (decided map[string]int, requests int) {
	decided = map[string]int{}
	for _, e := range entries {
		got := e.Action == "http.request" || e.Action == "http.fail" && e.Reason == givenUpAfter
		if got {
			requests++
		}
		if got || e.Action == "http.fail" && e.Reason != givenUpBefore {
			decided[fmt.Sprintf("%s %s %s", e.Method, e.Host, e.Path)]++
		}
	}
	return decided, requests
}

// waits waits for the end of a connection, whatever states it goes through.
func waits(served chan struct{}, states chan http.ConnState, most time.Duration) bool {
	give := time.NewTimer(most)
	defer give.Stop()
	for {
		select {
		case <-served:
			return true
		case <-states:
		case <-give.C:
			return false
		}
	}
}
