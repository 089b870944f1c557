//go:build linux

package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// inspected opens a connection to api.lab, of HTTP/2 or HTTP/1.1.
func (in *inside) inspected(t *testing.T, proto string) *tls.Conn {
	t.Helper()
	conn := tls.Client(in.connect(t, "api.lab", 443), &tls.Config{ServerName: "api.lab", RootCAs: in.roots, NextProtos: []string{proto}})
	conn.SetDeadline(time.Now().Add(time.Minute))
	return conn
}

// TestJudgedAsSent has a policy judge what the server gets: a header that a proxy takes out by itself, or a part of a query, allows nothing.
func TestJudgedAsSent(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	got := make(chan *http.Request, 1)
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got <- r }), "api.lab")
	in := l.sandbox("one", `platform_credentials_only: true
allow:
  - {host: api.lab, methods: [POST], when: '"authorization" in request.headers'}
  - {host: api.lab, methods: [DELETE], when: '"x-dry-run" in request.headers && request.headers["x-dry-run"] == "true"'}
  - {host: api.lab, methods: [PUT], when: 'request.headers["x-forwarded-for"] == "a"'}
  - {host: api.lab, methods: [PATCH], when: '"keep-alive" in request.headers || "te" in request.headers && request.headers["te"] != "trailers"'}
  - {host: api.lab, methods: [GET], when: 'request.path != "/up" || "upgrade" in request.headers'}
  - {host: api.lab, methods: [HEAD], paths: [/public/**]}
deny:
  - {host: api.lab, when: '"x-danger" in request.headers'}
`)
	for _, tt := range []struct {
		head   string
		status int
		want   map[string]string // of what arrives; "?" is the query
	}{
		{"DELETE / HTTP/1.1\r\nX-Dry-Run: true\r\n", 200, map[string]string{"X-Dry-Run": "true"}},
		{"DELETE / HTTP/1.1\r\n", 403, nil},
		{"DELETE / HTTP/1.1\r\nX-Dry-Run: true\r\nConnection: X-Dry-Run\r\n", 400, nil},
		{"DELETE / HTTP/1.1\r\nX-Dry-Run: true\r\nConnection: keep-alive, x-dry-run\r\n", 400, nil},
		{"PUT / HTTP/1.1\r\nX-Forwarded-For: a\r\nContent-Length: 0\r\n", 200, map[string]string{"X-Forwarded-For": "a"}},
		{"POST / HTTP/1.1\r\nAuthorization: Bearer mine\r\nContent-Length: 0\r\n", 403, nil},
		{"PATCH / HTTP/1.1\r\nKeep-Alive: 5\r\nContent-Length: 0\r\n", 403, nil},
		{"PATCH / HTTP/1.1\r\nTe: x\r\nContent-Length: 0\r\n", 403, nil},
		{"GET /q?a=1&b=%zz&c=x;y&d HTTP/1.1\r\nConnection: keep-alive, TE\r\nTe: trailers\r\n", 200, map[string]string{"?": "a=1&b=%zz&c=x;y&d"}},
		// What some servers take for the header, and others drop, is not what a request is allowed for.
		{"DELETE / HTTP/1.1\r\nX_Dry_Run: true\r\n", 403, nil},
		{"DELETE / HTTP/1.1\r\nX-Dry-Run: true\r\nX_Dry_Run: false\r\n", 403, nil},
		{"DELETE / HTTP/1.1\r\nX-Dry-Run: true\r\nX_Other: 1\r\n", 200, map[string]string{"X-Dry-Run": "true", "X_Other": "1"}},
		// It is sent with a Connection that names it, or not at all.
		{"GET /up HTTP/1.1\r\nUpgrade: websocket\r\n", 403, nil},
		{"GET /up HTTP/1.1\r\nUpgrade: websocket\r\nConnection: keep-alive\r\n", 403, nil},
		{"GET / HTTP/1.1\r\nUpgrade: websocket\r\n", 200, map[string]string{"Upgrade": "", "Connection": ""}},
		{"GET / HTTP/1.1\r\nX_HTTP_Method_Override: DELETE\r\n", 403, nil},
		{"GET / HTTP/1.1\r\nX_Danger: 1\r\n", 403, nil},
		// Some servers take it for the path.
		{"HEAD /public/x HTTP/1.1\r\nX-Original-URL: /public/y\r\n", 200, map[string]string{"X-Original-Url": "/public/y"}},
		{"HEAD /public/x HTTP/1.1\r\nX-Original-URL: /admin\r\n", 403, nil},
		{"HEAD /public/x HTTP/1.1\r\nX_Rewrite_URL: /admin\r\n", 403, nil},
	} {
		conn := in.inspected(t, "http/1.1")
		fmt.Fprintf(conn, "%sHost: api.lab\r\n\r\n", tt.head)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%q: %v", tt.head, err)
		}
		if res.StatusCode != tt.status {
			b, _ := io.ReadAll(res.Body)
			t.Errorf("%q: %d %s; want %d", tt.head, res.StatusCode, b, tt.status)
		}
		conn.Close()
		select {
		case r := <-got:
			if tt.status != 200 {
				t.Errorf("%q arrived", tt.head)
			}
			for name, want := range tt.want {
				have := r.Header.Get(name)
				if name == "?" {
					have = r.URL.RawQuery
				}
				if have != want {
					t.Errorf("%q: %s arrived as %q; want %q", tt.head, name, have, want)
				}
			}
		default:
			if tt.status == 200 {
				t.Errorf("%q did not arrive", tt.head)
			}
		}
	}
}

// TestQueries asks with queries that would end earlier for a server of HTTP/1.1, and with two names of one program: what is judged is what arrives.
func TestQueries(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	lines := make(chan string, 1)
	cert := l.cert("api.lab")
	l.serve("11.1.1.1:443", func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}})
		if line, err := bufio.NewReader(s).ReadString('\n'); err == nil {
			lines <- strings.TrimSpace(line)
			io.WriteString(s, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		}
	})
	in := l.sandbox("one", `allow: [{host: api.lab, methods: [GET]}]
deny: [{host: api.lab, when: '"user-agent" in request.headers && request.headers["user-agent"] == "bad"'}]
`)
	for _, tt := range []struct {
		target string
		agents []string
		status string
	}{
		{"/a?x=1&y=%20%23+%7F", nil, "200"},
		{"/a?x=/?<>|{}~é", nil, "200"},
		{"/a", nil, "200"},
		{"/a?x HTTP/1.1", nil, "400"},
		{"/a?x y", nil, "400"},
		{"/a? ", nil, "400"},
		{"/a?id=1#&dry_run=1", nil, "400"},
		{"/a?x\ty", nil, "400"},
		{"/a?x\x7f", nil, "400"},
		{"/a", []string{"good"}, "200"},
		{"/a", []string{"bad"}, "403"},
		{"/a", []string{"bad", "good"}, "400"},
		{"/a", []string{"good", "bad"}, "400"},
	} {
		for _, proto := range []string{"h2", "http/1.1"} {
			conn := in.inspected(t, proto)
			status := ""
			if proto == "h2" {
				fields := plainFields("GET", tt.target)
				for _, a := range tt.agents {
					fields = append(fields, "user-agent", a)
				}
				f := newFrames()
				io.WriteString(&f.out, http2.ClientPreface)
				f.WriteSettings()
				f.request(1, true, fields...)
				if _, err := conn.Write(f.out.Bytes()); err != nil {
					t.Fatal(err)
				}
				read := http2.NewFramer(nil, conn)
				read.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
				for status == "" {
					frame, err := read.ReadFrame()
					if err != nil {
						t.Fatalf("%q %v: %v", tt.target, tt.agents, err)
					}
					switch frame := frame.(type) {
					case *http2.MetaHeadersFrame:
						status = frame.PseudoValue("status")
					case *http2.RSTStreamFrame: // the server's own refusal
						status = "400"
					}
				}
			} else {
				fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: api.lab\r\n", tt.target)
				for _, a := range tt.agents {
					fmt.Fprintf(conn, "User-Agent: %s\r\n", a)
				}
				io.WriteString(conn, "\r\n")
				res, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatalf("%q %v: %v", tt.target, tt.agents, err)
				}
				status = fmt.Sprint(res.StatusCode)
			}
			conn.Close()
			if status != tt.status {
				t.Errorf("%s %q %v: %s; want %s", proto, tt.target, tt.agents, status, tt.status)
			}
			select {
			case line := <-lines:
				if want := "GET " + tt.target + " HTTP/1.1"; tt.status != "200" || line != want {
					t.Errorf("%s %q %v arrived as %q", proto, tt.target, tt.agents, line)
				}
			default:
				if tt.status == "200" {
					t.Errorf("%s %q %v did not arrive", proto, tt.target, tt.agents)
				}
			}
		}
	}
}

// TestContradictions says over HTTP/2 in a header what the frames say otherwise: nothing is judged that is not sent, and what is no contradiction arrives.
func TestContradictions(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	got := make(chan *http.Request, 1)
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		got <- r
	}), "api.lab")
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [GET, POST]}\ndeny:\n  - {host: api.lab, when: '\"host\" in request.headers'}")
	for _, tt := range []struct {
		what   string
		fields []string
		body   string
		status string
	}{
		{"the same host", plainFields("GET", "/", "host", "API.lab:443"), "", "200"},
		{"another host", plainFields("GET", "/", "host", "evil.lab"), "", "421"},
		{"another host beside the same", plainFields("GET", "/", "host", "api.lab", "host", "evil.lab"), "", "421"},
		{"another port", plainFields("GET", "/", "host", "api.lab:80"), "", "421"},
		{"a length", plainFields("POST", "/", "content-length", "5"), "hello", "200"},
		{"no length", plainFields("POST", "/"), "hello", "200"},
		{"a length of nothing", plainFields("POST", "/", "content-length", "0"), "", "200"},
		{"a length without a body", plainFields("POST", "/", "content-length", "5"), "", "400"},
	} {
		conn := in.inspected(t, "h2")
		f := newFrames()
		io.WriteString(&f.out, http2.ClientPreface)
		f.WriteSettings()
		f.request(1, tt.body == "", tt.fields...)
		if tt.body != "" {
			f.WriteData(1, true, []byte(tt.body))
		}
		if _, err := conn.Write(f.out.Bytes()); err != nil {
			t.Fatal(err)
		}
		status := ""
		read := http2.NewFramer(nil, conn)
		read.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		for status == "" {
			frame, err := read.ReadFrame()
			if err != nil {
				t.Fatalf("%s: %v", tt.what, err)
			}
			if h, ok := frame.(*http2.MetaHeadersFrame); ok {
				status = h.PseudoValue("status")
			}
		}
		conn.Close()
		if status != tt.status {
			t.Errorf("%s: %s; want %s", tt.what, status, tt.status)
		}
		select {
		case r := <-got:
			if tt.status != "200" || r.Host != "api.lab" {
				t.Errorf("%s arrived, for %s", tt.what, r.Host)
			}
		default:
			if tt.status == "200" {
				t.Errorf("%s did not arrive", tt.what)
			}
		}
	}
}

// TestOnlyTheGateways has a client and a server say what only the other side of a decision may: fields after it, and the mark of the gateway's own answers.
func TestOnlyTheGateways(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	got := make(chan *http.Request, 1)
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		got <- r
		w.Header().Set(errorHeader, "refused")
		w.WriteHeader(http.StatusForbidden)
	}), "api.lab")
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [POST]}")
	for _, proto := range []string{"http/1.1", "h2"} {
		conn := in.inspected(t, proto)
		tr := &http.Transport{DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil }, ForceAttemptHTTP2: true}
		req, err := http.NewRequest(http.MethodPost, "https://api.lab/", io.NopCloser(strings.NewReader("hello")))
		if err != nil {
			t.Fatal(err)
		}
		req.Trailer = http.Header{"X-After": {"the decision"}}
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatalf("%s: %v", proto, err)
		}
		res.Body.Close()
		if mark := res.Header[errorHeader]; res.StatusCode != http.StatusForbidden || len(mark) > 0 {
			t.Errorf("%s: the server's answer is %d, marked %q", proto, res.StatusCode, mark)
		}
		if r := <-got; len(r.Trailer) > 0 {
			t.Errorf("%s: after the body came %v", proto, r.Trailer)
		}
		// The gateway's own has it.
		req, _ = http.NewRequest(http.MethodGet, "https://api.lab/", nil)
		conn = in.inspected(t, proto)
		if res, err = tr.RoundTrip(req); err != nil {
			t.Fatalf("%s: %v", proto, err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusForbidden || res.Header.Get(errorHeader) == "" {
			t.Errorf("%s: the gateway's answer is %d, with %v", proto, res.StatusCode, res.Header)
		}
		tr.CloseIdleConnections()
	}
}

// TestParts asks a server that shows what it gets for parts of it, of which none has enough of a value to be found.
func TestParts(t *testing.T) {
	_, good, _, in := bankLab(t)
	for _, header := range [][]string{
		{"Range", "bytes=0-10"}, {"Range", "bytes=0-6,7-12"}, {"If-Range", "x", "range", "bytes=0-3"}, {"Request-Range", "bytes=0-3"}, {"Request_Range", "bytes=0-3"},
	} {
		res, err := in.do(t, "GET", "https://bank.lab/parts", "", header...)
		if err != nil {
			t.Fatal(err)
		}
		if text := whole(t, res); res.StatusCode != http.StatusOK || !strings.Contains(text, holder) {
			t.Errorf("%v: %s", header, text)
		}
		r, _, n := good.last()
		if n != 1 {
			t.Fatalf("%v: %d requests", header, n)
		}
		for name := range r.Header {
			if strings.Contains(strings.ToLower(name), "range") {
				t.Errorf("%v: %s arrived", header, name)
			}
		}
	}
	// Where no secret is granted they are the sandbox's affair.
	if res, err := in.do(t, "GET", "http://plain.lab/parts", "", "Range", "bytes=0-3"); err != nil || res.StatusCode != http.StatusPartialContent {
		t.Errorf("%v, %v", res, err)
	}
	// And a server that sends them unasked is not handed on.
	res, err := in.do(t, "GET", "https://bank.lab/part", "")
	if err != nil {
		t.Fatal(err)
	}
	if text := whole(t, res); res.StatusCode != http.StatusBadGateway || strings.Contains(text, "canary") {
		t.Errorf("a part that nobody asked for: %s", text)
	}
}

// TestEarlyAnswers has answers go out as they come, whether the request has ended or not.
func TestEarlyAnswers(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.serve("11.1.1.1:443", func(c net.Conn) {
		c = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{l.cert("api.lab")}})
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		switch r.URL.Path {
		case "/early":
			io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nfirst")
		case "/keep":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst")
		case "/echo":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n") // it serves one
			b := make([]byte, 100)
			for {
				n, err := r.Body.Read(b)
				if n > 0 {
					fmt.Fprintf(c, "%x\r\n%s\r\n", n, b[:n])
				}
				if err != nil {
					io.WriteString(c, "0\r\n\r\n")
					break
				}
			}
		}
		io.Copy(io.Discard, c)
	})
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [POST]}")
	for path, want := range map[string]int{"early": 413, "keep": 200, "echo": 200} {
		conn := in.inspected(t, "http/1.1")
		io.WriteString(conn, "POST /"+path+" HTTP/1.1\r\nHost: api.lab\r\nContent-Length: 10\r\n\r\nfirst")
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(res.Body, b); err != nil || string(b) != "first" || res.StatusCode != want || !res.Close {
			t.Errorf("%s: %d %q, %v, closes %v", path, res.StatusCode, b, err, res.Close)
		}
		if path == "echo" {
			io.WriteString(conn, "other")
		}
		if b, err := io.ReadAll(res.Body); err != nil || path == "echo" && string(b) != "other" {
			t.Errorf("%s: the rest is %q, %v", path, b, err)
		}
		conn.Close()
	}
}

// TestRefusalsWait has a sandbox that reads no answers keep neither their requests nor more than some of them, whether the gateway denies or a server fails.
func TestRefusalsWait(t *testing.T) {
	for action, path := range map[string]string{"http.deny": "/v2/denied", "http.fail": "/v1/x"} {
		t.Run(action, func(t *testing.T) { refusalsWait(t, action, path) })
	}
}

func refusalsWait(t *testing.T, action, path string) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [GET], paths: [/v1/**]}")
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	const conns, streams, size = 5, 120, 48 << 10
	for range conns {
		conn := in.inspected(t, "h2")
		defer conn.Close()
		f := newFrames()
		io.WriteString(&f.out, http2.ClientPreface)
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		go io.Copy(io.Discard, conn)
		for s := range uint32(streams) {
			b := f.block(append(plainFields("GET", path), "x-much", strings.Repeat("~", size))...)
			for first := true; len(b) > 0; first = false {
				n := min(len(b), 16000)
				if first {
					f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*s + 1, BlockFragment: b[:n], EndStream: true, EndHeaders: n == len(b)})
				} else {
					f.WriteContinuation(2*s+1, n == len(b), b[:n])
				}
				b = b[n:]
			}
			if _, err := conn.Write(f.out.Bytes()); err != nil {
				t.Fatal(err)
			}
			f.out.Reset()
		}
	}
	c, _ := l.g.card("one")
	eventually(t, "all are on record", func() bool { return len(l.of(action)) >= conns*streams })
	if n := c.refusing.Waiting(); n == 0 || n > maxRefusing+conns {
		t.Errorf("%d refusals wait", n)
	}
	if more := heap() - before; more > conns*streams*size/3 {
		t.Errorf("%d MiB are kept of %d", more>>20, conns*streams*size>>20)
	}
	eventually(t, "none waits for ever", func() bool { return c.refusing.Waiting() == 0 })
}
