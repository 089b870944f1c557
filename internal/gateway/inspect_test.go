//go:build linux

package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

const inspected = `
allow:
  - host: api.lab
    methods: [GET, POST]
    paths: [/v1/**]
  - host: plain.lab
    protocol: http
`

func TestInspect(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.name("plain.lab", "11.1.1.2")
	l.web("11.1.1.1:443", hello("api"), "api.lab")
	l.web("11.1.1.2:80", hello("plain"))
	in := l.sandbox("one", inspected)
	for _, c := range []struct {
		method, url string
		status      int
		body        string
	}{
		{"GET", "https://api.lab/v1/x", 200, "api api.lab HTTP/2.0 /v1/x"},
		{"POST", "https://api.lab/v1/x", 200, "api api.lab HTTP/2.0 /v1/x"},
		{"DELETE", "https://api.lab/v1/x", 403, "warren: DELETE api.lab/v1/x is denied"},
		{"GET", "https://api.lab/v2/x", 403, "denied"},
		{"GET", "https://api.lab/v1/../v2/x", 403, "denied"},
		{"GET", "https://api.lab/v1/%2e%2e/v2", 403, "denied"},
		{"TRACE", "https://api.lab/v1/x", 405, "not served"},
		{"GET", "http://plain.lab/any", 200, "plain plain.lab HTTP/1.1 /any"},
	} {
		req, err := http.NewRequest(c.method, c.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := in.client().Do(req)
		if err != nil {
			t.Errorf("%s %s: %v", c.method, c.url, err)
			continue
		}
		b, _ := io.ReadAll(r.Body)
		r.Body.Close()
		if r.StatusCode != c.status && !(c.status == 403 && r.StatusCode == 400) || !strings.Contains(string(b), c.body) {
			t.Errorf("%s %s: %d %q, want %d %q", c.method, c.url, r.StatusCode, b, c.status, c.body)
		}
	}
	if !l.has("http.request", "api.lab") || !l.has("http.deny", "api.lab") {
		t.Error("requests are not on record")
	}
	// What is seen inside is a certificate of the gateway's.
	a, err := in.lookup("api.lab")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	tc := tls.Client(raw, &tls.Config{ServerName: "api.lab", RootCAs: in.roots})
	if err := tc.Handshake(); err != nil {
		t.Fatal(err)
	}
	if got := tc.ConnectionState().PeerCertificates[0].Issuer.CommonName; got != l.ca.cert.Subject.CommonName {
		t.Errorf("the certificate inside is by %q", got)
	}
}

// raw speaks to a host as no well-behaved client does, and returns the answer.
func (in *inside) raw(t *testing.T, name string, port uint16, secure bool, text string) string {
	t.Helper()
	a, err := in.lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := in.dial(t.Context(), netip.AddrPortFrom(a, port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if secure {
		c = in.tls(c, name)
	}
	go io.WriteString(c, text)
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := c.Read(buf)
		b.Write(buf[:n])
		if err != nil || strings.Contains(b.String(), "\r\n0\r\n\r\n") {
			return b.String()
		}
	}
}

// TestFraming sends what makes two programs see two different requests: a server gets one at most, as the gateway understood it, or none.
func TestFraming(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	var mu sync.Mutex
	var got []string
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprintf("%s %s%s %q", r.Method, r.Host, r.URL.Path, b))
	}), "api.lab", "evil.lab")
	in := l.sandbox("one", inspected)
	smuggled := "GET /v2/secret HTTP/1.1\r\nHost: api.lab\r\n\r\n"
	for name, text := range map[string]string{
		"other host":           "GET /v1/a HTTP/1.1\r\nHost: evil.lab\r\nConnection: close\r\n\r\n",
		"two hosts":            "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nHost: evil.lab\r\nConnection: close\r\n\r\n",
		"no host":              "GET /v1/a HTTP/1.1\r\nConnection: close\r\n\r\n",
		"user in host":         "GET /v1/a HTTP/1.1\r\nHost: x@api.lab\r\nConnection: close\r\n\r\n",
		"port in host":         "GET /v1/a HTTP/1.1\r\nHost: api.lab:444\r\nConnection: close\r\n\r\n",
		"absolute form":        "GET https://evil.lab/v1/a HTTP/1.1\r\nHost: api.lab\r\nConnection: close\r\n\r\n",
		"connect":              "CONNECT evil.lab:443 HTTP/1.1\r\nHost: evil.lab\r\nConnection: close\r\n\r\n",
		"two lengths":          "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 0\r\nContent-Length: 46\r\n\r\n" + smuggled,
		"plus length":          "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length: +5\r\nConnection: close\r\n\r\nhello",
		"odd encoding":         "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: xchunked\r\nConnection: close\r\n\r\n" + smuggled,
		"two encodings":        "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nConnection: close\r\n\r\n0\r\n\r\n",
		"length and encoding":  "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 51\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"encoding and length":  "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
		"one length twice":     "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 5\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
		"lengths in one":       "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 5, 5\r\nConnection: close\r\n\r\nhello",
		"encodings in one":     "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: gzip, chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
		"encoding of a tab":    "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: \x0bchunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
		"encoding in HTTP/1.0": "POST /v1/a HTTP/1.0\r\nHost: api.lab\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"no carriage returns":  "GET /v1/a HTTP/1.1\nHost: api.lab\n\n",
		"a line goes on":       "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nX-A: b\r\n c\r\nConnection: close\r\n\r\n",
		"many headers":         "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\n" + strings.Repeat("a: b\r\n", 1001) + "\r\n",
		"space before colon":   "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nContent-Length : 5\r\nConnection: close\r\n\r\nhello",
		"folded":               "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nX-A: b\r\n\tc\r\nBad\r\nConnection: close\r\n\r\n",
		"null":                 "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nX-A: b\x00c\r\nConnection: close\r\n\r\n",
		"upgrade":              "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n",
		"lower case method":    "get /v1/a HTTP/1.1\r\nHost: api.lab\r\nConnection: close\r\n\r\n",
		"proxy header":         "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\nMax-Forwards: 0\r\nConnection: close\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			answer := in.raw(t, "api.lab", 443, true, text)
			if len(answer) < 12 || answer[:7] != "HTTP/1." || answer[9] != '4' && answer[9:12] != "501" {
				t.Errorf("the answer is %.80q", answer)
			}
			mu.Lock()
			defer mu.Unlock()
			if len(got) != 0 {
				t.Errorf("the server got %q", got)
				got = nil
			}
		})
	}
	// What is framed plainly arrives, also several on one connection, so that what is refused above is refused for what it is.
	answer := in.raw(t, "api.lab", 443, true, "POST /v1/a HTTP/1.1\r\nHost: api.lab\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nX-T: a\r\n\r\n"+
		"POST /v1/b HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 5\r\n\r\nhelloGET /v1/c HTTP/1.1\r\nHost: api.lab\r\nConnection: close\r\n\r\n")
	want := []string{`POST api.lab/v1/a "hello"`, `POST api.lab/v1/b "hello"`, `GET api.lab/v1/c ""`}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(got, want) {
		t.Errorf("the server got %q, want %q, and the answer is %q", got, want, answer)
	}
	// It is on record, with what was wrong.
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.ContainsFunc(l.entries, func(e Entry) bool {
		return e.Action == "http.deny" && strings.Contains(e.Reason, "both a Content-Length and a Transfer-Encoding")
	}) {
		t.Error("a request with a length and an encoding is not on record")
	}
}

func TestUpstreamCertificate(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	reached := false
	l.web("11.1.1.1:443", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }), "other.lab")
	in := l.sandbox("one", inspected)
	status, body, err := in.get("https://api.lab/v1/x")
	if err != nil || status != http.StatusBadGateway || !strings.Contains(body, "certificate") {
		t.Errorf("a server with another's certificate: %d %q, %v", status, body, err)
	}
	if reached {
		t.Error("the server got the request")
	}
}

// TestReload changes the policy while things are open.
// What fails between the host and a server, or the host's resolver, is told without the host's own addresses; the record has them.
func TestErrorsHaveNoAddresses(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.serve("11.1.1.1:443", func(c net.Conn) {
		io.ReadFull(c, make([]byte, 100))
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	})
	in := l.sandbox("one", "allow:\n  - {host: \"*.lab\", methods: [GET]}")
	status, body, err := in.get("https://api.lab/")
	if err != nil || status != http.StatusBadGateway || !strings.Contains(body, "reset by peer") || strings.Contains(body, "127.0.0.1") || strings.Contains(body, "->") {
		t.Errorf("%d %s %v", status, body, err)
	}
	recorded := func(action, text string) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return slices.ContainsFunc(l.entries, func(e Entry) bool { return e.Action == action && strings.Contains(e.Reason, text) })
	}
	eventually(t, "the addresses are on record", func() bool { return recorded("http.fail", "127.0.0.1") })

	read := &net.OpError{Op: "read", Net: "udp", Source: net.UDPAddrFromAddrPort(netip.MustParseAddrPort("192.168.7.7:5555")),
		Addr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort("192.168.7.1:53")), Err: errors.New("connection refused")}
	for i, lost := range []error{
		&net.DNSError{Err: read.Error(), Name: "x.lab.", Server: "192.168.7.1:53"},
		&net.DNSError{Err: read.Error(), Name: "x.lab.", Server: "192.168.7.1:53", IsTimeout: true},
		read,
	} {
		l.mu.Lock()
		l.lost = lost
		l.mu.Unlock()
		m, err := in.ask(fmt.Sprintf("x%d.lab", i), dns.TypeA)
		if err != nil {
			t.Fatal(err)
		}
		if text := m.String(); m.Rcode != dns.RcodeServerFailure || !strings.Contains(text, "EDE") || strings.Contains(text, "192.168") {
			t.Errorf("of %v the sandbox is told %s", lost, text)
		}
	}
	if !recorded("dns.fail", "192.168.7.1:53") {
		t.Error("what failed is not on record")
	}
	if text := unaddressed(fmt.Errorf("%w: %w", errUnrecorded, &os.PathError{Op: "write", Path: "/var/lib/warren/flows", Err: io.ErrShortWrite})); strings.Contains(text, "/var") {
		t.Errorf("of the record the sandbox is told %q", text)
	}
}

func TestReload(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.name("raw.lab", "11.1.1.3")
	stream := make(chan struct{})
	defer close(stream)
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "first")
		w.(http.Flusher).Flush()
		select {
		case <-stream:
		case <-r.Context().Done():
		}
	}), "api.lab")
	l.serve("11.1.1.3:9000", echo)
	in := l.sandbox("one", inspected+"  - {host: raw.lab, protocol: tcp, ports: [9000]}\n")
	a, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := in.dial(t.Context(), netip.AddrPortFrom(a, 9000))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	echo := func(c net.Conn) error {
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, "ping\n"); err != nil {
			return err
		}
		_, err := bufio.NewReader(c).ReadString('\n')
		return err
	}
	if err := echo(raw); err != nil {
		t.Fatal(err)
	}
	r, err := in.client().Get("https://api.lab/v1/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if _, err := io.ReadFull(r.Body, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	// One that allows the same closes nothing.
	if err := l.g.SetPolicy("one", Rules{Policy: l.policy(inspected + "  - {host: raw.lab, protocol: tcp, ports: [9000]}\n  - more.lab\n")}); err != nil {
		t.Fatal(err)
	}
	if err := echo(raw); err != nil {
		t.Errorf("a policy that allows more closed a flow: %v", err)
	}
	start := time.Now()
	if err := l.g.SetPolicy("one", Rules{Policy: l.policy("allow: [more.lab]")}); err != nil {
		t.Fatal(err)
	}
	// It is told to stop, and does on a goroutine of its own.
	eventually(t, "a flow ends that is no longer allowed", func() bool { return echo(raw) != nil })
	ended := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, r.Body); ended <- err }()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("a response goes on that is no longer allowed")
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("it took %v", d)
	}
	if c, err := in.dial(context.Background(), netip.AddrPortFrom(a, 9000)); err == nil {
		c.Close()
		t.Error("a connection opens that is no longer allowed")
	}
}

// tls speaks TLS on a connection, and HTTP/1.1 above it.
func (in *inside) tls(c net.Conn, name string) *tls.Conn {
	in.t.Helper()
	tc := tls.Client(c, &tls.Config{ServerName: name, RootCAs: in.roots, NextProtos: []string{"http/1.1"}})
	if err := tc.Handshake(); err != nil {
		in.t.Fatal(err)
	}
	return tc
}
