package preview

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

const (
	boxA = "saaaaaaaaaaaaaaaaaaa"
	boxB = "sbbbbbbbbbbbbbbbbbbb"
	// nobody is the id of a sandbox that never was.
	nobody = "snnnnnnnnnnnnnnnnnnn"
	// adaToken is that of the user to whom sandbox A belongs, bobToken that of B's.
	adaToken = "warren_ada0000000000000000000000"
	bobToken = "warren_bob0000000000000000000000"
)

// world is an engine with two sandboxes, whose ports are servers of the test's.
type world struct {
	mu    sync.Mutex
	boxes map[warren.SandboxID]*engine.Preview // of all ports alike, but for public ones
	open  map[string]net.Listener              // by "id port"
	// hold, when set, is waited for by every use.
	hold         chan struct{}
	holdErr      error
	uses, dials  int
	holds        int
	publicPorts  map[uint16]bool
	keepHostPort uint16
}

func (w *world) PreviewOf(id warren.SandboxID, port uint16) (engine.Preview, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.boxes[id]
	if p == nil {
		return engine.Preview{}, false
	}
	v := *p
	v.Port, v.Public, v.KeepHost = port, w.publicPorts[port], w.keepHostPort == port
	return v, true
}

func (w *world) Authenticate(_ context.Context, token string) (engine.Caller, error) {
	switch token {
	case adaToken:
		return engine.Caller{User: "ada"}, nil
	case bobToken:
		return engine.Caller{User: "bob"}, nil
	}
	return engine.Caller{}, warren.ErrDenied
}

func (w *world) Resolve(c engine.Caller, ref string) (warren.SandboxID, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.boxes[warren.SandboxID(ref)]; p != nil && p.Owner == c.User {
		return p.SandboxID, nil
	}
	return "", warren.ErrNotFound
}

type fakeUse struct {
	w    *world
	once sync.Once
}

func (u *fakeUse) Answered()   {}
func (u *fakeUse) Unanswered() {}
func (u *fakeUse) End() {
	u.once.Do(func() {
		u.w.mu.Lock()
		defer u.w.mu.Unlock()
		u.w.uses--
	})
}

func (w *world) Hold(ctx context.Context, c engine.Caller, ref string) (warren.SandboxID, engine.Use, error) {
	w.mu.Lock()
	w.holds++
	hold, err := w.hold, w.holdErr
	w.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return "", nil, ctx.Err()
		}
	}
	if err != nil {
		return "", nil, err
	}
	id, err := w.Resolve(c, ref)
	if err != nil {
		return "", nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uses++
	return id, &fakeUse{w: w}, nil
}

func (w *world) Dial(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error) {
	id, err := w.Resolve(c, ref)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.dials++
	l := w.open[fmt.Sprintf("%s %d", id, port)]
	w.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial: %w", warren.ErrUnavailable)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
}

func (w *world) DialPooled(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error) {
	return w.Dial(ctx, c, ref, port)
}

// rig is a server of previews over a world.
type rig struct {
	*world
	t   *testing.T
	s   *Server
	l   net.Listener
	tls *tls.Config // of clients
}

func newRig(t *testing.T, change func(*Options)) *rig {
	t.Helper()
	w := &world{boxes: map[warren.SandboxID]*engine.Preview{}, open: map[string]net.Listener{}, publicPorts: map[uint16]bool{}}
	w.boxes[boxA] = &engine.Preview{SandboxID: boxA, Owner: "ada", State: engine.Running}
	w.boxes[boxB] = &engine.Preview{SandboxID: boxB, Owner: "bob", State: engine.Running}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Engine: w, Key: bytes.Repeat([]byte{7}, 32), Port: l.Addr().(*net.TCPAddr).Port, Recheck: 20 * time.Millisecond}
	if change != nil {
		change(&o)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{world: w, t: t, s: s, l: l}
	if o.Secure {
		server, client := certificate(t, "*."+o.Domain)
		l, r.tls = tls.NewListener(l, server), client
	}
	go s.Serve(l)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		s.Shutdown(ctx)
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.uses != 0 {
			t.Errorf("%d uses have not ended", w.uses)
		}
	})
	return r
}

func certificate(t *testing.T, name string) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{"h2", "http/1.1"}}, &tls.Config{RootCAs: roots}
}

// listen serves a port of a sandbox.
func (r *rig) listen(id string, port uint16, h http.HandlerFunc) {
	r.t.Helper()
	srv := httptest.NewServer(h)
	r.t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[fmt.Sprintf("%s %d", id, port)] = srv.Listener
}

// link is a good link to a port, for an hour.
func (r *rig) link(id string, port uint16) string {
	p, _ := r.PreviewOf(warren.SandboxID(id), port)
	p.SandboxID, p.Port = warren.SandboxID(id), port
	l, _ := r.s.Link(p, time.Hour)
	return l
}

// token is what a good link has.
func (r *rig) token(id string, port uint16) string {
	u, err := url.Parse(r.link(id, port))
	if err != nil {
		r.t.Fatal(err)
	}
	return u.Query().Get(Parameter)
}

func (r *rig) cookie(id string, port uint16) string {
	c := r.s.cookie(target{id: warren.SandboxID(id), port: port}, r.boxes[warren.SandboxID(id)].Epoch, time.Now().Add(time.Hour))
	return c.Name + "=" + c.Value
}

// client reaches the server under any name, and follows nothing.
func (r *rig) client() *http.Client {
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", r.l.Addr().String())
		},
		TLSClientConfig:   r.tls,
		ForceAttemptHTTP2: r.tls != nil,
	}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// do makes a request with headers "Name: value" and returns the answer with its body read.
func (r *rig) do(method, url string, headers ...string) (*http.Response, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, url, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	res, err := r.client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res, string(body)
}

// raw sends bytes and returns the status and body of the answer.
func (r *rig) raw(text string) (int, string) {
	r.t.Helper()
	c, err := net.Dial("tcp", r.l.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	io.WriteString(c, text)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		r.t.Fatalf("%q: %v", text, err)
	}
	defer res.Body.Close()
	body, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(body)
}

// echo answers with what it got, without what the transport made.
func echo(w http.ResponseWriter, r *http.Request) {
	dump, err := httputil.DumpRequest(r, true)
	if err != nil {
		panic(err)
	}
	w.Header().Set("Seen", "yes")
	w.Write(dump)
}

// TestHosts holds the routing to one form of each name (E12 to E14). Whatever else is asked for reaches no sandbox and asks for none.
func TestHosts(t *testing.T) {
	r := newRig(t, nil)
	for _, port := range []uint16{22, 80, 3000, warren.GuestPort} {
		r.listen(boxA, port, echo)
		r.publicPorts[port] = true
	}
	port := fmt.Sprint(r.s.opts.Port)
	good := "3000-" + boxA + ".localhost"
	for _, host := range []string{good, good + ":" + port, good + ":1", "80-" + boxA + ".localhost"} {
		if status, body := r.raw("GET /x HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n"); status != 200 || !strings.Contains(body, "GET /x") {
			t.Errorf("host %s: %d %s", host, status, body)
		}
	}
	dials := r.dials
	for host, want := range map[string]int{
		"localhost": 421, "localhost:" + port: 421, "127.0.0.1:" + port: 421, "[::1]:" + port: 421, "": 421, "rebind.evil.lab": 421,
		good + ".evil.lab": 421, good + ".": 421, "3000-" + boxA + ".LOCALHOST": 421, "x." + good: 421, "3000-" + boxA + "..localhost": 421,
		"ada@" + good: 400, good + ":": 421, good + ":x": 421, good + ":123456": 421, good + ":80:80": 421, good + "/": 400, good + "%2e": 421,
		"3000-" + strings.ToUpper(boxA) + ".localhost": 404, "3000-" + boxA + "a.localhost": 404, "3000-" + boxA[:19] + ".localhost": 404,
		"3000_" + boxA + ".localhost": 404, "-3000-" + boxA + ".localhost": 404, "03000-" + boxA + ".localhost": 404, "+3000-" + boxA + ".localhost": 404,
		boxA + ".localhost": 404, "3000.localhost": 404, "3000-.localhost": 404, "3000-api.localhost": 404, "3000-xn--fsq.localhost": 404, "3000-" + strings.Repeat("s", 64) + ".localhost": 404,
		"api.localhost": 404, "www.localhost": 404, "admin.localhost": 404, "...localhost": 421,
		"0-" + boxA + ".localhost": 404, "65536-" + boxA + ".localhost": 404, "99999-" + boxA + ".localhost": 404, "22-" + boxA + ".localhost": 404,
		fmt.Sprintf("%d-%s.localhost", warren.GuestPort, boxA): 404,
	} {
		if status, body := r.raw("GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n"); status != want {
			t.Errorf("host %q: %d, want %d: %s", host, status, want, body)
		}
	}
	for text, want := range map[string]int{
		"GET / HTTP/1.1\r\nHost: " + good + "\r\nHost: " + good + "\r\n\r\n":                400,
		"GET / HTTP/1.1\r\nHost: " + good + "\r\nHost: 3000-" + boxB + ".localhost\r\n\r\n": 400,
		"GET http://" + good + "/ HTTP/1.1\r\nHost: " + good + "\r\n\r\n":                   400,
		"GET http://" + good + "/ HTTP/1.1\r\nHost: 3000-" + boxB + ".localhost\r\n\r\n":    400,
		"GET http://evil.lab/ HTTP/1.1\r\nHost: " + good + "\r\n\r\n":                       400,
		"OPTIONS * HTTP/1.1\r\nHost: " + good + "\r\n\r\n":                                  400,
		"CONNECT " + good + ":80 HTTP/1.1\r\nHost: " + good + ":80\r\n\r\n":                 400,
		"TRACE / HTTP/1.1\r\nHost: " + good + "\r\n\r\n":                                    400,
		"GET / HTTP/1.1\r\n\r\n": 400,
		"POST / HTTP/1.1\r\nHost: " + good + "\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n":      400,
		"POST / HTTP/1.1\r\nHost: " + good + "\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n":      400,
		"POST / HTTP/1.1\r\nHost: " + good + "\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx":                       400,
		"POST / HTTP/1.1\r\nHost: " + good + "\r\nContent-Length: +1\r\n\r\nx":                                           400,
		"POST / HTTP/1.1\r\nHost: " + good + "\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n":                     501,
		"POST / HTTP/1.0\r\nHost: " + good + "\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
		"GET / HTTP/1.1\nHost: " + good + "\n\n":                                                                         400,
		"GET / HTTP/1.1\r\nHost: " + good + "\r\nX: a\r\n b\r\n\r\n":                                                     400,
		"GET / HTTP/1.1\r\nHost: " + good + "\r\nX: " + strings.Repeat("x", 80<<10) + "\r\n\r\n":                         431,
	} {
		if status, body := r.raw(text); status != want {
			t.Errorf("%.100q: %d, want %d: %s", text, status, want, body)
		}
	}
	if r.dials != dials {
		t.Errorf("%d connections into sandboxes, want %d", r.dials, dials)
	}
}

// TestAdmission makes sure that who is not let in learns nothing (E01, E02): the answer is the same to the byte for a sandbox that is
// there and one that never was, whatever token is shown, whatever the method, the path or the port.
func TestAdmission(t *testing.T) {
	r := newRig(t, nil)
	r.listen(boxA, 3000, echo)
	r.listen(boxA, 3001, echo)
	r.listen(boxB, 3000, echo)
	old := r.s.mint(linkKind, boxA, 3000, 0, time.Now().Add(-time.Second).Unix())
	epoch := r.s.mint(linkKind, boxA, 3000, 1, time.Now().Add(time.Hour).Unix())
	oldCookie := r.s.mint(cookieKind, boxA, 3000, 0, time.Now().Add(-time.Second).Unix())
	good := r.token(boxA, 3000)
	later := "zzzzzzz" + good[strings.Index(good, "."):]
	query := func(v string) string { return "/?" + Parameter + "=" + v }
	type try struct{ name, path, header string }
	bad := []try{
		{"nothing", "/", ""}, {"empty", query(""), ""}, {"rubbish", query("rubbish"), ""}, {"no MAC", query("zzzzzz."), ""}, {"expired", query(old), ""},
		{"revoked", query(epoch), ""}, {"another sandbox's", query(r.token(boxB, 3000)), ""}, {"another port's", query(r.token(boxA, 3001)), ""},
		{"another time", query(later), ""}, {"twice", query(good) + "&" + Parameter + "=" + good, ""}, {"a cookie's", query(strings.TrimPrefix(r.cookie(boxA, 3000), plainCookie+"=")), ""},
		{"a bit more", query(good + "A"), ""}, {"padded", query(good + "="), ""}, {"huge", query(strings.Repeat("a", 4000)), ""},
		{"wrong cookie", "/", "Cookie: " + plainCookie + "=x"}, {"a link as cookie", "/", "Cookie: " + plainCookie + "=" + good},
		{"another's cookie", "/", "Cookie: " + r.cookie(boxB, 3000)}, {"another port's cookie", "/", "Cookie: " + r.cookie(boxA, 3001)},
		{"old cookie", "/", "Cookie: " + plainCookie + "=" + oldCookie}, {"secure name", "/", "Cookie: " + strings.Replace(r.cookie(boxA, 3000), plainCookie, secureCookie, 1)},
		{"another user", "/", "Authorization: Bearer " + bobToken}, {"no user", "/", "Authorization: Bearer warren_nobody"}, {"Basic", "/", "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("ada:"+adaToken))},
		{"another user's header", "/", tokenHeader + ": " + bobToken}, {"X-Api-Key", "/", "X-Api-Key: " + adaToken},
		{"dots", "/%2e%2e/", ""}, {"slashes", "//", ""}, {"semicolon", "/;x=1", ""}, {"long path", "/" + strings.Repeat("a", 5000), ""},
	}
	seen := map[string]string{}
	for _, b := range bad {
		for _, id := range []string{boxA, nobody} {
			for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST", "DELETE", "WEBSOCKET"} {
				headers := []string{"Accept: */*"}
				if b.header != "" {
					headers = append(headers, b.header)
				}
				m := method
				if method == "WEBSOCKET" {
					m, headers = "GET", append(headers, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
				}
				res, body := r.do(m, strings.TrimSuffix(r.s.URL(warren.SandboxID(id), 3000), "/")+b.path, headers...)
				res.Header.Del("Date")
				var all bytes.Buffer
				res.Header.Write(&all)
				got := res.Status + "\n" + all.String() + body
				if res.StatusCode != 401 || strings.Contains(got, "aaaa") || strings.Contains(got, "nnnn") {
					t.Fatalf("%s: %s of %s: %s", b.name, method, id, got)
				}
				if want := seen[method]; want == "" {
					seen[method] = got
				} else if got != want {
					t.Errorf("%s: %s of %s answers\n%s\nwant\n%s", b.name, method, id, got, want)
				}
			}
		}
	}
	if r.dials != 0 || r.holds != 0 {
		t.Errorf("%d connections and %d uses for those who were not let in", r.dials, r.holds)
	}
	// The twin: the same requests with what is right.
	for _, g := range []try{
		{"link", query(good), ""}, {"link among others", "/?a=1&" + Parameter + "=" + good + "&b", ""}, {"cookie", "/", "Cookie: a=b; " + r.cookie(boxA, 3000) + "; c=d"},
		{"cookie after a wrong one", "/", "Cookie: " + plainCookie + "=x; " + r.cookie(boxA, 3000)},
		{"bearer", "/", "Authorization: bearer " + adaToken}, {"header", "/", tokenHeader + ": " + adaToken},
	} {
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST"} {
			if strings.HasPrefix(g.name, "cookie") && !safe(method) {
				continue
			}
			headers := []string{}
			if g.header != "" {
				headers = append(headers, g.header)
			}
			if res, body := r.do(method, strings.TrimSuffix(r.s.URL(boxA, 3000), "/")+g.path, headers...); res.StatusCode != 200 || res.Header.Get("Seen") == "" {
				t.Errorf("%s: %s: %s %s", g.name, method, res.Status, body)
			} else if strings.Contains(body, Parameter) || strings.Contains(body, "warren") {
				t.Errorf("%s: %s: the sandbox saw %s", g.name, method, body)
			}
		}
	}
	r.publicPorts[3001] = true
	if res, body := r.do("GET", r.s.URL(boxA, 3001)); res.StatusCode != 200 {
		t.Errorf("public: %s %s", res.Status, body)
	}
	if res, body := r.do("GET", r.s.URL(nobody, 3001)); res.StatusCode != 401 {
		t.Errorf("public, of nobody: %s %s", res.Status, body)
	}
}

// counted counts tokens that were not good, of which it takes three.
type counted struct {
	mu sync.Mutex
	n  int
}

func (c *counted) Wait(string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(max(0, c.n-2)) * 1500 * time.Millisecond
}

func (c *counted) Failed(string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
}

// TestGuessing makes sure that API tokens are guessed here no faster than at the API (E21), and that nothing else is counted.
func TestGuessing(t *testing.T) {
	c := &counted{}
	r := newRig(t, func(o *Options) { o.Tries = c })
	r.listen(boxA, 3000, echo)
	url := r.s.URL(boxA, 3000)
	for _, header := range []string{"X: y", "Cookie: " + plainCookie + "=x", "Authorization: Basic eDp5", "Authorization: Bearer " + bobToken, tokenHeader + ": " + bobToken} {
		if res, _ := r.do("GET", url+"?"+Parameter+"=x", header); res.StatusCode != 401 {
			t.Errorf("%s: %s", header, res.Status)
		}
	}
	if c.n != 0 {
		t.Errorf("%d were counted of which none is a bad API token", c.n)
	}
	seen := ""
	for i := range 6 {
		// Whether there is such a sandbox makes no difference.
		for _, id := range []string{boxA, nobody} {
			res, body := r.do("GET", r.s.URL(warren.SandboxID(id), 3000), tokenHeader+": warren_nobody"+strconv.Itoa(i))
			if want := map[bool]int{true: 401, false: 429}[2*i < 2 || 2*i == 2 && id == boxA]; res.StatusCode != want || (res.StatusCode == 429) != (res.Header.Get("Retry-After") == "2") {
				t.Errorf("bad token %d: %s %v, want %d", i, res.Status, res.Header, want)
			}
			if res.StatusCode == 429 && seen == "" {
				seen = body
			} else if res.StatusCode == 429 && body != seen {
				t.Errorf("of %s it says %s, and else %s", id, body, seen)
			}
		}
	}
	for _, header := range []string{"Authorization: Bearer " + adaToken, tokenHeader + ": " + adaToken, "Cookie: " + r.cookie(boxA, 3000)} {
		if res, _ := r.do("GET", url, header); res.StatusCode != 200 {
			t.Errorf("with what is good, of the same address: %s", res.Status)
		}
	}
}

// TestExchange follows a link as a browser does (E11): the token is exchanged for a cookie of this host alone, and leaves no trace.
func TestExchange(t *testing.T) {
	for _, secure := range []bool{false, true} {
		r := newRig(t, func(o *Options) {
			if o.Secure = secure; secure {
				o.Domain = "preview.lab"
			}
		})
		r.listen(boxA, 3000, echo)
		base := strings.TrimSuffix(r.s.URL(boxA, 3000), "/")
		for path, want := range map[string]string{
			"/?" + Parameter + "=T":                      "/",
			"/a%2Fb/;c?x=1&" + Parameter + "=T&y=%20&y":  "/a%2Fb/;c?x=1&y=%20&y",
			"//evil.lab/?" + Parameter + "=T":            "//evil.lab/",
			"/%5Cevil.lab?" + Parameter + "=T&next=//e/": "/%5Cevil.lab?next=//e/",
			"/?%77arren_token=T":                         "/",
		} {
			for _, browser := range []string{"Sec-Fetch-Mode: navigate", "Accept: text/html,*/*;q=0.8"} {
				res, _ := r.do("GET", base+strings.Replace(path, "=T", "="+r.token(boxA, 3000), 1), browser)
				if res.StatusCode != 303 || res.Header.Get("Location") != base+want || res.Header.Get("Referrer-Policy") != "no-referrer" || res.Header.Get("Cache-Control") != "no-store" {
					t.Fatalf("%s: %s %v, want a redirect to %s", path, res.Status, res.Header, base+want)
				}
				cookies := res.Header["Set-Cookie"]
				if len(cookies) != 1 {
					t.Fatalf("%s: cookies %q", path, cookies)
				}
				name, attrs, _ := strings.Cut(cookies[0], "=")
				wantName := plainCookie
				if secure {
					wantName = secureCookie
				}
				if name != wantName || strings.Contains(attrs, "Domain") || !strings.Contains(attrs, "; Path=/;") || !strings.Contains(attrs, "HttpOnly") || !strings.Contains(attrs, "SameSite=Lax") ||
					strings.Contains(attrs, "Secure") != secure || !strings.Contains(attrs, "Expires=") {
					t.Errorf("cookie %q", cookies[0])
				}
				pair, _, _ := strings.Cut(cookies[0], ";")
				if res, body := r.do("GET", res.Header.Get("Location"), "Cookie: "+pair); res.StatusCode != 200 || strings.Contains(body, pair) {
					t.Errorf("with the cookie: %s %s", res.Status, body)
				}
			}
		}
		// A link that has expired is no harm to who is in already, and does not stay in the bar either.
		res, _ := r.do("GET", base+"/x?"+Parameter+"=old", "Accept: text/html", "Cookie: "+r.cookie(boxA, 3000))
		if res.StatusCode != 303 || res.Header.Get("Location") != base+"/x" || res.Header["Set-Cookie"] != nil {
			t.Errorf("an old link beside a good cookie: %s %v", res.Status, res.Header)
		}
		if secure {
			if res, _ := r.do("GET", base+"/", "Cookie: "+r.cookie(boxA, 3000)); res.ProtoMajor != 2 {
				t.Errorf("%s over TLS", res.Proto)
			}
		}
	}
}

// canaries are headers of a request that no sandbox may see, each with its value.
func canaries(r *rig) []string {
	basic := base64.StdEncoding.EncodeToString([]byte("x:" + adaToken))
	return []string{
		"Cookie: " + plainCookie + "=canary; " + r.cookie(boxA, 3000), "Cookie: " + secureCookie + "=canary", "Cookie: __host-WARREN=canary",
		"Authorization: Bearer " + adaToken, "Authorization: Basic " + basic, tokenHeader + ": " + adaToken, "X-Api-Key: canary", "X-Apikey: canary", "X-Goog-Api-Key: canary", "X-Access-Token: canary",
		"X-Forwarded-For: canary", "X-Forwarded-Host: canary", "X-Forwarded-Proto: canary", "X-Forwarded-User: canary", "X_forwarded_for: canary", "X-Original-Forwarded-For: canary", "X-Real-Ip: canary",
		"X-Auth-Request-Email: canary", "X-Remote-User: canary", "X-Amzn-Oidc-Data: canary", "X-Envoy-External-Address: canary", "X-Warren-Anything: canary", "X-Original-Url: canary", "X-Rewrite-Url: canary",
		"Warren-User: canary", "Warren-Reconnect: canary", "Forwarded: for=canary", "Via: canary", "True-Client-Ip: canary", "Cf-Connecting-Ip: canary", "Cf-Access-Jwt-Assertion: canary", "Fly-Client-Ip: canary",
		"Proxy-Authorization: Basic canary", "Proxy-Connection: canary", "Private-Token: canary", "Api-Key: canary", "Remote-User: canary", "E2b-Sandbox-Id: canary",
	}
}

// ordinary are headers that it has to see.
var ordinary = []string{
	"Accept: text/css", "Accept-Encoding: br", "Accept-Language: de", "Cache-Control: no-cache", "Content-Type: text/plain", "If-None-Match: \"x\"", "Range: bytes=0-1", "User-Agent: test/1",
	"Sec-Fetch-Dest: style", "Sec-Ch-Ua: x", "X-Requested-With: XMLHttpRequest", "X-Csrf-Token: t", "X-Inertia: true", "Next-Action: a", "Rsc: 1", "Hx-Request: true", "Traceparent: 00-x", "Cookie: session=1; theme=dark",
	"Upgrade-Insecure-Requests: 1", "Last-Event-Id: 7", "Idempotency-Key: k", "Pragma: no-cache", "Grpc-Timeout: 1S", "Connect-Protocol-Version: 1",
}

// TestCredentialsStayOut sends all that a browser, a proxy or a platform might (E04), lets the sandbox say what it saw, and does the same with a proxy that
// has no list, where all of it must show: the probe is alive.
func TestCredentialsStayOut(t *testing.T) {
	for _, twin := range []bool{false, true} {
		r := newRig(t, nil)
		r.listen(boxA, 3000, echo)
		at := r.link(boxA, 3000)
		base := r.s.URL(boxA, 3000)
		if twin {
			naive := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
				p.Out.URL.Scheme, p.Out.URL.Host = "http", r.open[boxA+" 3000"].Addr().String()
				p.Out.Header = p.In.Header.Clone()
			}})
			defer naive.Close()
			at = naive.URL + "/?" + Parameter + "=" + r.token(boxA, 3000)
		}
		_, body := r.do("POST", at, append(canaries(r), ordinary...)...)
		if twin {
			req, err := http.NewRequest("POST", at, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range append(canaries(r), ordinary...) {
				name, value, _ := strings.Cut(h, ": ")
				req.Header.Add(name, value)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			all, _ := io.ReadAll(res.Body)
			body = string(all)
		}
		leaks := 0
		for _, h := range append(canaries(r), Parameter+": "+r.token(boxA, 3000)) {
			name, value, _ := strings.Cut(h, ": ")
			if strings.Contains(strings.ToLower(body), "\n"+strings.ToLower(name)+": "+strings.ToLower(value)) || strings.Contains(body, value) && value != "canary" {
				leaks++
				if !twin {
					t.Errorf("the sandbox sees %s", h)
				}
			}
		}
		for _, word := range []string{"canary", adaToken, base[len("http://"):], r.token(boxA, 3000), "warren"} {
			if strings.Contains(body, word) && !twin {
				t.Errorf("the sandbox sees %q in\n%s", word, body)
			}
		}
		if twin && leaks < len(canaries(r)) {
			t.Errorf("through a proxy without a list %d of %d show", leaks, len(canaries(r)))
		}
		for _, h := range ordinary {
			if !strings.Contains(body, "\n"+h+"\r\n") && !(twin && strings.HasPrefix(h, "Cookie")) {
				t.Errorf("the sandbox does not see %s in\n%s", h, body)
			}
		}
	}
}

// TestName is about what a sandbox believes that it is called.
func TestName(t *testing.T) {
	r := newRig(t, nil)
	seen := func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Location", "http://localhost:3000/next")
		h.Set("Content-Location", "http://localhost:30001/x")
		h.Set("Access-Control-Allow-Origin", "http://localhost:3000")
		h.Set("Access-Control-Allow-Credentials", "true")
		fmt.Fprintf(w, "host=%s origin=%s referer=%s fh=%s fp=%s", r.Host, r.Header.Get("Origin"), r.Header.Get("Referer"), r.Header.Get("X-Forwarded-Host"), r.Header.Get("X-Forwarded-Proto"))
	}
	r.listen(boxA, 3000, seen)
	r.listen(boxA, 4000, seen)
	r.keepHostPort = 4000
	origin := func(port uint16) string { return strings.TrimSuffix(r.s.URL(boxA, port), "/") }
	ask := func(port uint16, from string) (*http.Response, string) {
		return r.do("GET", r.link(boxA, port), "Origin: "+from, "Referer: "+from+"/p?q=1&"+Parameter+"="+r.token(boxA, port)+"&r=2")
	}
	res, body := ask(3000, origin(3000))
	if want := "host=localhost:3000 origin=http://localhost:3000 referer=http://localhost:3000/p?q=1&r=2 fh= fp="; body != want {
		t.Errorf("masked: %s\nwant %s", body, want)
	}
	h := res.Header
	if h.Get("Location") != origin(3000)+"/next" || h.Get("Content-Location") != "http://localhost:30001/x" || h.Get("Access-Control-Allow-Origin") != origin(3000) || h.Get("Access-Control-Allow-Credentials") != "true" {
		t.Errorf("masked: %v", h)
	}
	res, body = ask(4000, origin(4000))
	if want := "host=" + origin(4000)[7:] + " origin=" + origin(4000) + " referer=" + origin(4000) + "/p?q=1&r=2 fh=" + origin(4000)[7:] + " fp=http"; body != want {
		t.Errorf("kept: %s\nwant %s", body, want)
	}
	if h := res.Header; h.Get("Location") != "http://localhost:3000/next" || h.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("kept: %v", h)
	}
	// Another origin stays what it is.
	if _, body := ask(3000, "http://evil.lab"); !strings.Contains(body, "origin=http://evil.lab referer= ") {
		t.Errorf("foreign: %s", body)
	}
}

// TestAnswers is about headers that a sandbox may not send (E07, E10).
func TestAnswers(t *testing.T) {
	r := newRig(t, nil)
	r.publicPorts[3000] = true
	r.listen(boxA, 3000, func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		for _, c := range []string{
			"a=1; Domain=localhost; Path=/", "b=2; domain=.LOCALHOST ; HttpOnly", "c=3;DOMAIN = x", "d=4; Path=/; SameSite=Strict", "__Host-e=5; Secure; Path=/",
			plainCookie + "=x; Path=/", "__host-Warren=x; Secure", " " + plainCookie + " =x", "=" + plainCookie + "=x", "= =" + secureCookie + "=x", plainCookie,
		} {
			h.Add("Set-Cookie", c)
		}
		for _, name := range append(slices.Clone(dropped), "Warren-Preview", "Warren-Request-Id", "Access-Control-Allow-Credentials") {
			h.Set(name, "true")
		}
		h.Set("Access-Control-Allow-Origin", "*")
		h.Set("Content-Security-Policy", "default-src 'self'")
		h["Clear-Site-Data"] = []string{`"cache", "cookies","storage"`, `"*"`, `"Cookies", cookies, "clientHints", "executionContexts"`}
		h.Set("Origin-Agent-Cluster", "?0")
		h.Set("X-App", "1")
	})
	res, _ := r.do("GET", r.s.URL(boxA, 3000), "Origin: https://evil.lab")
	if got, want := fmt.Sprintf("%q", res.Header["Set-Cookie"]), `["a=1; Path=/" "b=2; HttpOnly" "c=3" "d=4; Path=/; SameSite=Strict" "__Host-e=5; Secure; Path=/"]`; got != want {
		t.Errorf("cookies %s\nwant    %s", got, want)
	}
	for _, name := range append(slices.Clone(dropped), "Warren-Preview", "Warren-Request-Id", "Access-Control-Allow-Credentials") {
		if v := res.Header.Get(name); v != "" {
			t.Errorf("%s: %s", name, v)
		}
	}
	for name, want := range map[string]string{"Access-Control-Allow-Origin": "*", "Content-Security-Policy": "default-src 'self'", "Clear-Site-Data": `"cache", "storage", "executionContexts"`, "Origin-Agent-Cluster": "?1", "X-App": "1"} {
		if v := res.Header.Get(name); v != want {
			t.Errorf("%s: %q, want %q", name, v, want)
		}
	}
}

// TestClearSiteData keeps a page from clearing what is not its own.
func TestClearSiteData(t *testing.T) {
	for v, want := range map[string]string{`"cookies"`: "", `"*"`: "", "": "", `"cache"`: `"cache"`, `"storage","cookies"`: `"storage"`, `"storage:buckets"`: "", `"cookies";"*"`: ""} {
		h := http.Header{"Clear-Site-Data": {v}}
		clearOwn(h)
		if got, has := h["Clear-Site-Data"]; has != (want != "") || has && (len(got) != 1 || got[0] != want) {
			t.Errorf("%s: %q; want %q", v, got, want)
		}
	}
}

// TestForeignPages holds pages elsewhere, other previews among them, to what they may do with a browser that has the cookie (E08, E16).
func TestForeignPages(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Domain, o.Secure = "preview.lab", true })
	r.listen(boxA, 3000, echo)
	own := strings.TrimSuffix(r.s.URL(boxA, 3000), "/")
	other := strings.TrimSuffix(r.s.URL(boxB, 3000), "/")
	for _, tt := range []struct {
		what    string
		method  string
		headers []string
		want    int
	}{
		{"a person", "GET", nil, 200},
		{"a person's bookmark", "GET", []string{"Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}, 200},
		{"the page's own script", "POST", []string{"Origin: " + own, "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"}, 200},
		{"the page's own form, of an old browser", "POST", []string{"Origin: " + own}, 200},
		{"the page's own form, with no-referrer", "POST", []string{"Origin: null", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: navigate"}, 200},
		{"its own frame", "GET", []string{"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"}, 200},
		{"a link elsewhere", "GET", []string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}, 200},
		{"a script of another preview", "GET", []string{"Origin: " + other, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors"}, 401},
		{"an image of another preview", "GET", []string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"}, 401},
		{"a frame of another preview", "GET", []string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"}, 401},
		{"a form of another preview", "POST", []string{"Origin: " + other, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}, 401},
		{"a form without a word", "POST", nil, 401},
		{"a beacon", "POST", []string{"Origin: null", "Content-Type: text/plain"}, 401},
		{"a sandboxed frame", "POST", []string{"Origin: null", "Sec-Fetch-Site: cross-site"}, 401},
		{"an origin that begins alike", "GET", []string{"Origin: " + own + ".evil.lab"}, 401},
		{"the wrong scheme", "GET", []string{"Origin: " + strings.Replace(own, "https", "http", 1)}, 401},
		{"two origins", "GET", []string{"Origin: " + own, "Origin: " + other}, 401},
		{"a preflight", "OPTIONS", []string{"Origin: " + other, "Access-Control-Request-Method: PUT"}, 401},
		{"a deletion", "DELETE", []string{"Sec-Fetch-Site: cross-site"}, 401},
	} {
		if res, body := r.do(tt.method, own+"/", append([]string{"Cookie: " + r.cookie(boxA, 3000)}, tt.headers...)...); res.StatusCode != tt.want {
			t.Errorf("%s: %s, want %d: %s", tt.what, res.Status, tt.want, body)
		}
	}
	// WebSockets, which know no preflight.
	for origin, want := range map[string]int{own: 101, other: 401, "null": 401, "https://evil.lab": 401, "": 101} {
		r.listen(boxA, 3000, socket)
		headers := []string{"Cookie: " + r.cookie(boxA, 3000)}
		if origin != "" {
			headers = append(headers, "Origin: "+origin)
		}
		res, c := r.dialSocket(own, headers...)
		if c != nil {
			c.Close()
		}
		if res.StatusCode != want {
			t.Errorf("a WebSocket of %q: %s, want %d", origin, res.Status, want)
		}
	}
}

// socket answers as a WebSocket and then sends back what it gets, bytes instead of frames.
func socket(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Sec-WebSocket-Key") == "" {
		http.Error(w, "no socket", 400)
		return
	}
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer c.Close()
	io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n")
	io.Copy(c, rw)
}

// dialSocket opens a WebSocket at a preview; the connection is nil when it was refused.
func (r *rig) dialSocket(base string, headers ...string) (*http.Response, net.Conn) {
	r.t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		r.t.Fatal(err)
	}
	c, err := net.Dial("tcp", r.l.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	if u.Scheme == "https" {
		config := r.tls.Clone()
		config.ServerName, config.NextProtos = u.Hostname(), []string{"http/1.1"}
		c = tls.Client(c, config)
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", u.RequestURI(), u.Host)
	for _, h := range headers {
		fmt.Fprintf(c, "%s\r\n", h)
	}
	io.WriteString(c, "\r\n")
	br := bufio.NewReader(c)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if res.StatusCode != 101 {
		c.Close()
		return res, nil
	}
	return res, &bufferedConn{c, br}
}

type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (b *bufferedConn) Read(p []byte) (int, error) { return b.r.Read(p) }

// says sends a word and wants it back.
func says(t *testing.T, c net.Conn, word string) error {
	t.Helper()
	if _, err := io.WriteString(c, word); err != nil {
		return err
	}
	got := make([]byte, len(word))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != word {
		return fmt.Errorf("%q came back as %q", word, got)
	}
	return nil
}

// TestSocketEnds cuts what is under way when what let it in is no longer good: an expired link, one that was revoked, a preview that is not
// public any more, a sandbox that was deleted, an API token. As long as it is good, nothing is cut.
func TestSocketEnds(t *testing.T) {
	for name, end := range map[string]func(r *rig){
		"revoked":  func(r *rig) { r.boxes[boxA].Epoch++ },
		"private":  func(r *rig) { delete(r.publicPorts, 3000) },
		"deleted":  func(r *rig) { delete(r.boxes, boxA) },
		"disowned": func(r *rig) { r.boxes[boxA].Owner = "bob" },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			r.listen(boxA, 3000, socket)
			at, headers := r.link(boxA, 3000), []string(nil)
			switch name {
			case "private":
				r.publicPorts[3000], at = true, r.s.URL(boxA, 3000)
			case "disowned":
				at, headers = r.s.URL(boxA, 3000), []string{"Authorization: Bearer " + adaToken}
			}
			res, c := r.dialSocket(at, headers...)
			if c == nil {
				t.Fatal(res.Status)
			}
			defer c.Close()
			if err := says(t, c, "hello"); err != nil {
				t.Fatal(err)
			}
			r.s.recheck(t.Context())
			if err := says(t, c, "still"); err != nil {
				t.Fatalf("cut while all is well: %v", err)
			}
			r.mu.Lock()
			end(r)
			r.mu.Unlock()
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("not cut: %v", err)
			}
			if name != "disowned" {
				r.mu.Lock()
				defer r.mu.Unlock()
				if r.uses != 0 {
					t.Errorf("a WebSocket is a use besides its connection")
				}
			}
		})
	}
	t.Run("expired", func(t *testing.T) {
		r := newRig(t, nil)
		r.listen(boxA, 3000, socket)
		p, _ := r.PreviewOf(boxA, 3000)
		at, expires := r.s.Link(p, 3*time.Second)
		_, c := r.dialSocket(at)
		if c == nil {
			t.Fatal("refused")
		}
		defer c.Close()
		if err := says(t, c, "hello"); err != nil {
			t.Fatal(err)
		}
		_, err := c.Read(make([]byte, 1))
		if err == nil || time.Now().Before(expires) {
			t.Errorf("ended with %v before %v", err, expires)
		}
	})
}

// TestBodies carries large bodies both ways, at once, and what is sent as it happens.
func TestBodies(t *testing.T) {
	for _, secure := range []bool{false, true} {
		r := newRig(t, func(o *Options) {
			if o.Secure = secure; secure {
				o.Domain = "preview.lab"
			}
		})
		r.listen(boxA, 3000, func(w http.ResponseWriter, req *http.Request) {
			http.NewResponseController(w).EnableFullDuplex()
			w.WriteHeader(200)
			io.Copy(w, req.Body)
		})
		steps := make(chan chan bool, 1) // one for each stream: one that has just been left takes none of the next
		r.listen(boxA, 3001, func(w http.ResponseWriter, req *http.Request) {
			step := <-steps
			w.Header().Set("Content-Type", "text/event-stream")
			for i := 0; ; i++ {
				fmt.Fprintf(w, "data: %d\n\n", i)
				http.NewResponseController(w).Flush()
				select {
				case <-step:
				case <-req.Context().Done():
					return
				}
			}
		})
		const size = 64 << 20
		sum := sha256.New()
		body := io.TeeReader(io.LimitReader(rand.Reader, size), sum)
		req, err := http.NewRequestWithContext(t.Context(), "POST", r.link(boxA, 3000), io.NopCloser(body))
		if err != nil {
			t.Fatal(err)
		}
		c := r.client()
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		back := sha256.New()
		n, err := io.Copy(back, res.Body)
		res.Body.Close()
		if err != nil || n != size || !bytes.Equal(back.Sum(nil), sum.Sum(nil)) {
			t.Errorf("%d bytes came back, %v; the same: %v", n, err, bytes.Equal(back.Sum(nil), sum.Sum(nil)))
		}
		for _, accept := range []string{"text/event-stream", "*/*"} {
			req, err := http.NewRequestWithContext(t.Context(), "GET", r.link(boxA, 3001), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Accept", accept)
			step := make(chan bool)
			steps <- step
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(res.Body)
			for i := range 3 {
				for lines.Scan() && lines.Text() == "" {
				}
				if lines.Text() != fmt.Sprintf("data: %d", i) {
					t.Fatalf("event %d is %q", i, lines.Text())
				}
				if i < 2 {
					step <- true
				}
			}
			r.mu.Lock()
			if uses := r.uses; (uses == 0) != (accept != "*/*") {
				t.Errorf("%d uses while events come for %q", uses, accept)
			}
			r.mu.Unlock()
			res.Body.Close()
		}
	}
}

// TestNames of TLS: a request goes where its connection was made for, though the certificate is good for all (E14).
func TestNames(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Domain, o.Secure = "preview.lab", true })
	r.listen(boxA, 3000, echo)
	r.listen(boxB, 3000, echo)
	r.publicPorts[3000] = true
	for _, protos := range [][]string{{"h2"}, {"http/1.1"}} {
		config := r.tls.Clone()
		config.NextProtos, config.ServerName = protos, "3000-"+boxA+".preview.lab"
		tr := &http.Transport{ForceAttemptHTTP2: protos[0] == "h2", DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", r.l.Addr().String())
		}}
		defer tr.CloseIdleConnections()
		for id, want := range map[string]int{boxA: 200, boxB: 421} {
			res, err := (&http.Client{Transport: tr}).Get(r.s.URL(warren.SandboxID(id), 3000))
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != want {
				t.Errorf("%v: a request for %s on the connection of %s: %s, want %d", protos, id, boxA, res.Status, want)
			}
		}
	}
}

// TestNobodyThere is about the pages that explain.
func TestNobodyThere(t *testing.T) {
	r := newRig(t, func(o *Options) { o.PageWait, o.Wait = 50*time.Millisecond, time.Minute })
	page := func(want int, name string, headers ...string) string {
		t.Helper()
		res, body := r.do("GET", r.s.URL(boxA, 3000), append(headers, "Cookie: "+r.cookie(boxA, 3000))...)
		if res.StatusCode != want || res.Header.Get("Warren-Preview") != name || res.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s %v, want %d %s", res.Status, res.Header, want, name)
		}
		html := strings.HasPrefix(res.Header.Get("Content-Type"), "text/html")
		if html != strings.Contains(strings.Join(headers, " "), "text/html") || html != strings.HasPrefix(body, "<!doctype html>") || strings.Contains(body, "<script") {
			t.Errorf("the answer to %q is %q", headers, body)
		}
		if csp := res.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'none'; style-src 'sha256-") {
			t.Errorf("policy %q", csp)
		}
		return body
	}
	if body := page(502, "nothing-listens", "Accept: text/html"); !strings.Contains(body, `http-equiv="refresh"`) || !strings.Contains(body, "port 3000") {
		t.Errorf("page %s", body)
	}
	if body := page(502, "nothing-listens", "Accept: */*"); !strings.Contains(body, "port 3000") || !strings.Contains(body, "warren ports") {
		t.Errorf("page %s", body)
	}

	// A paused sandbox: a page is told to wait and comes back by itself, all else waits.
	r.listen(boxA, 3000, echo)
	hold := make(chan struct{})
	r.mu.Lock()
	r.boxes[boxA].State, r.hold = engine.Paused, hold
	r.mu.Unlock()
	if body := page(503, "waiting", "Accept: text/html"); !strings.Contains(body, `http-equiv="refresh"`) {
		t.Errorf("page %s", body)
	}
	done := make(chan int)
	go func() {
		res, _ := r.do("GET", r.link(boxA, 3000), "Accept: application/json")
		done <- res.StatusCode
	}()
	for {
		r.mu.Lock()
		holds := r.holds
		r.mu.Unlock()
		if holds >= 4 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	// What is open in a tab does not keep it from its rest.
	holds := r.holds
	for _, background := range [][]string{
		{"Accept: text/event-stream", "Sec-Fetch-Mode: cors"},
		{"Accept: text/x-vite-ping", "Sec-Fetch-Mode: no-cors"},
		{"Upgrade: websocket", "Connection: Upgrade", "Origin: " + strings.TrimSuffix(r.s.URL(boxA, 3000), "/")},
	} {
		r.silence(background...)
	}
	if r.holds != holds {
		t.Errorf("a tab has woken the sandbox")
	}
	r.mu.Lock()
	r.boxes[boxA].State, r.hold = engine.Running, nil
	r.mu.Unlock()
	close(hold)
	if status := <-done; status != 200 {
		t.Errorf("who waited got %d", status)
	}

	for err, want := range map[error]string{warren.ErrState: "not-running", warren.ErrNotFound: "not-running", warren.ErrExhausted: "exhausted", errors.New("a host path /var/lib/x"): "broken"} {
		r.mu.Lock()
		r.holdErr = fmt.Errorf("sandbox secret-name: %w", err)
		r.mu.Unlock()
		status := 503
		if want == "broken" {
			status = 502
		}
		if body := page(status, want, "Accept: text/html"); strings.Contains(body, "secret-name") || strings.Contains(body, "/var/lib") {
			t.Errorf("page %s", body)
		}
	}
	// A page that asks by itself gets no answer, which it could take for the server being back.
	r.mu.Lock()
	r.holdErr = warren.ErrState
	r.mu.Unlock()
	r.silence("Sec-Fetch-Mode: no-cors", "Sec-Fetch-Site: same-origin", "Accept: */*")
	r.mu.Lock()
	r.holdErr = nil
	r.mu.Unlock()

	// What listens is no server, or hangs up.
	r.listen(boxA, 3000, func(w http.ResponseWriter, _ *http.Request) {
		c, _, _ := http.NewResponseController(w).Hijack()
		io.WriteString(c, "SSH-2.0-x\r\n")
		c.Close()
	})
	r.s.sweep(time.Time{})
	page(502, "broken", "Accept: */*")
}

// silence makes a request with the cookie of port 3000, which is to get no answer at all.
func (r *rig) silence(headers ...string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), "GET", r.s.URL(boxA, 3000), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, h := range append(headers, "Cookie: "+r.cookie(boxA, 3000)) {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	res, err := r.client().Do(req)
	if err == nil {
		res.Body.Close()
		r.t.Errorf("the answer to %q is %s", headers, res.Status)
	} else if !errors.Is(err, io.EOF) {
		r.t.Errorf("%q: %v", headers, err)
	}
}

// TestWaitEnds gives up on a sandbox that is never there.
func TestWaitEnds(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Wait = 50 * time.Millisecond })
	r.hold = make(chan struct{})
	if res, body := r.do("GET", r.link(boxA, 3000)); res.StatusCode != 504 || res.Header.Get("Warren-Preview") != "late" {
		t.Errorf("%s %s", res.Status, body)
	}
}

// TestPooled makes sure that a connection which ended while nobody used it costs no request.
func TestPooled(t *testing.T) {
	r := newRig(t, nil)
	r.listen(boxA, 3000, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) })
	_, first := r.do("GET", r.link(boxA, 3000))
	if _, again := r.do("GET", r.link(boxA, 3000)); again != first {
		t.Errorf("two requests came over %s and %s", first, again)
	}
	// Another instance of the sandbox, as after a pause.
	r.open[boxA+" 3000"].Close()
	r.listen(boxA, 3000, echo)
	for i := range 20 {
		r.s.mu.Lock()
		r.s.pools[place{boxA, 3000}].CloseIdleConnections()
		r.s.mu.Unlock()
		if res, body := r.do("GET", r.link(boxA, 3000)); res.StatusCode != 200 || res.Header.Get("Seen") == "" {
			t.Fatalf("request %d: %s %s", i, res.Status, body)
		}
	}
}

// TestCrowd bounds what one port has under way, and leaves the others alone.
func TestCrowd(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxRequests, o.MaxTotal = 2, 3 })
	r.listen(boxA, 3000, socket)
	r.listen(boxB, 3000, socket)
	var all []net.Conn
	open := func(id string, want int) {
		t.Helper()
		res, c := r.dialSocket(r.link(id, 3000))
		if c != nil {
			all = append(all, c)
			defer says(t, c, "x")
		}
		if res.StatusCode != want {
			t.Errorf("%s: %s, want %d", id, res.Status, want)
		}
	}
	open(boxA, 101)
	open(boxA, 101)
	open(boxA, 503)
	open(boxB, 101)
	open(boxB, 503)
	for _, c := range all {
		c.Close()
	}
	deadline := time.Now().Add(time.Minute)
	for {
		r.s.live.mu.Lock()
		n := len(r.s.live.all) + len(r.s.live.used)
		r.s.live.mu.Unlock()
		if n == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("places are not given back")
		}
		time.Sleep(time.Millisecond)
	}
	open(boxA, 101)
	all[len(all)-1].Close()
}

// TestPaths go in as they are.
func TestPaths(t *testing.T) {
	r := newRig(t, nil)
	r.publicPorts[3000] = true
	r.listen(boxA, 3000, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RequestURI) })
	for _, path := range []string{"/", "//", "//evil.lab/x", "/a/../b", "/%2e%2e/", "/a%2Fb", "/a;b=c", "/?", "/?a=1;b=2&c=%zz", "/a%20b?q=a+b&&x", "/ü%C3%BC", "/?x=http://evil.lab/"} {
		if _, got := r.raw("GET " + path + " HTTP/1.1\r\nHost: 3000-" + boxA + ".localhost\r\nConnection: close\r\n\r\n"); got != path && got != strings.ReplaceAll(path, "ü", "%C3%BC") {
			t.Errorf("%s went in as %s", path, got)
		}
	}
}

// TestTrailers of requests do not go in: they are headers by another way.
func TestTrailers(t *testing.T) {
	r := newRig(t, nil)
	r.publicPorts[3000] = true
	r.listen(boxA, 3000, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%v", r.Trailer)
	})
	if _, got := r.raw("POST / HTTP/1.1\r\nHost: 3000-" + boxA + ".localhost\r\nTransfer-Encoding: chunked\r\nTrailer: X-Forwarded-For\r\nConnection: close\r\n\r\n1\r\nx\r\n0\r\nX-Forwarded-For: canary\r\n\r\n"); got != "map[]" {
		t.Errorf("the sandbox sees %s", got)
	}
}

// FuzzHost makes sure that a host which names a preview is written in one way.
func FuzzHost(f *testing.F) {
	for _, h := range []string{"3000-" + boxA + ".localhost", "3000-" + boxA + ".localhost:7080", "localhost", "[::1]:1", "1-x.localhost."} {
		f.Add(h)
	}
	s, err := New(Options{Engine: &world{}, Key: make([]byte, 32)})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, host string) {
		got, bad := s.route(&http.Request{Method: "GET", RequestURI: "/", Host: host})
		name, _, _ := strings.Cut(host, ":")
		if bad == nil && (name != fmt.Sprintf("%d-%s.localhost", got.port, got.id) || engine.CheckPreviewPort(uint64(got.port)) != nil) {
			t.Errorf("%q leads to port %d of %s", host, got.port, got.id)
		}
	})
}

// FuzzQuery makes sure that no token is left in a query.
func FuzzQuery(f *testing.F) {
	for _, q := range []string{"", Parameter + "=x", "a=1&%77arren_token=x&b", "&&=&" + Parameter} {
		f.Add(q)
	}
	f.Fuzz(func(t *testing.T, query string) {
		rest, _, _ := takeToken(query)
		values, _ := url.ParseQuery(rest)
		if values.Has(Parameter) {
			t.Errorf("%q leaves %q", query, rest)
		}
		if !strings.Contains(query, "%") && !strings.Contains(query, Parameter) && rest != query {
			t.Errorf("%q became %q", query, rest)
		}
	})
}

// FuzzCookie makes sure that no cookie for a domain, and none of ours, comes from a sandbox.
func FuzzCookie(f *testing.F) {
	for _, c := range []string{"a=b; Domain=x", "=" + plainCookie + "=x", "a=b;dOmAiN\t=x; Path=/"} {
		f.Add(c)
	}
	f.Fuzz(func(t *testing.T, line string) {
		out, ok := hostOnly(line)
		if !ok {
			return
		}
		for i, part := range strings.Split(out, ";") {
			name, _, _ := strings.Cut(part, "=")
			if name = strings.TrimSpace(name); i > 0 && strings.EqualFold(name, "domain") || i == 0 && ownCookie(name) {
				t.Errorf("%q became %q", line, out)
			}
		}
	})
}

// TestFaultyChunk has who sends a broken body hear that it is broken, whichever notices first: the transport that reads it, or the server for
// whom the connection has ended.
func TestFaultyChunk(t *testing.T) {
	r := newRig(t, nil)
	r.listen(boxA, 3000, func(_ http.ResponseWriter, q *http.Request) {
		io.Copy(io.Discard, q.Body)
		<-q.Context().Done()
	})
	r.publicPorts[3000] = true
	host := "3000-" + boxA + ".localhost"
	for range 30 {
		if status, body := r.raw("POST / HTTP/1.1\r\nHost: " + host + "\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n"); status != 400 {
			t.Fatalf("%d: %s", status, body)
		}
	}
}

// TestNothingListensOverTLS has the page that explains go out over HTTP/2 too, whose connections have no framing to be looked at.
func TestNothingListensOverTLS(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Domain, o.Secure = "preview.lab", true })
	r.listen(boxA, 3000, echo) // the sandbox is there
	r.publicPorts[3001] = true
	if res, body := r.do("GET", r.s.URL(boxA, 3001)); res.ProtoMajor != 2 || res.StatusCode != http.StatusBadGateway && res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%s %s: %s", res.Proto, res.Status, body)
	}
}
