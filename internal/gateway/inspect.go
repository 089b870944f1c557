//go:build linux

package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/framing"
	"github.com/warren-sandbox/warren/internal/policy"
	"github.com/warren-sandbox/warren/internal/secret"
)

const (
	// maxHeader bounds the head of a request, headTime how long it may take to come.
	maxHeader = 256 << 10
	headTime  = 30 * time.Second
	// keepTime is how long a connection without a request is kept, on either side.
	keepTime = 90 * time.Second
	// answerTime bounds how long a server may take until it has sent the head of an answer. Models think for many minutes.
	answerTime = 30 * time.Minute
	// maxStreamHeader bounds the head of a request of HTTP/2, of which a connection has many at a time.
	maxStreamHeader = 64 << 10
	// maxRefusing is how many refusals of HTTP/2 may wait for a sandbox to read them.
	maxRefusing = 256
	// maxStreams is how many requests may be under way on one connection.
	maxStreams = 128
)

// inspector speaks HTTP with sandboxes, decides on each request, and makes those that may be anew towards the server: nothing but
// what the standard library has understood goes on.
type inspector struct {
	g *Gateway
	// server speaks HTTP/1, and frames HTTP/2 on connections whose TLS has ended here, so that what it refuses can be seen.
	server, frames *http.Server
	conns, framed  chan net.Conn
	done           chan struct{}
	once           sync.Once
	proxy          *httputil.ReverseProxy
	// answerTime is that constant.
	answerTime time.Duration
}

func newInspector(g *Gateway) *inspector {
	i := &inspector{g: g, conns: make(chan net.Conn), framed: make(chan net.Conn), done: make(chan struct{}), answerTime: answerTime}
	quiet := slog.NewLogLogger(g.log.Handler(), slog.LevelDebug)
	server := func(speaks func(*http.Protocols)) *http.Server {
		p := new(http.Protocols)
		speaks(p)
		return &http.Server{
			Handler:                      http.HandlerFunc(i.handle),
			ConnContext:                  withFlow,
			ReadHeaderTimeout:            headTime,
			IdleTimeout:                  keepTime,
			MaxHeaderBytes:               maxHeader,
			ErrorLog:                     quiet,
			HTTP2:                        &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
			DisableGeneralOptionsHandler: true,
			Protocols:                    p,
		}
	}
	i.server = server(func(p *http.Protocols) { p.SetHTTP1(true) })
	i.server.ConnState = func(c net.Conn, state http.ConnState) {
		if f := framing.Of(c); f != nil && state == http.StateIdle {
			f.Idle()
		}
	}
	i.frames = server(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	i.frames.MaxHeaderBytes = maxStreamHeader
	i.proxy = &httputil.ReverseProxy{
		Rewrite:        unchanged,
		Transport:      roundTripper{},
		FlushInterval:  -1,
		ErrorLog:       quiet,
		ErrorHandler:   i.failed,
		ModifyResponse: answered,
		BufferPool:     &buffers{},
	}
	go i.server.Serve(&handover{i, i.conns})
	go i.frames.Serve(&handover{i, i.framed})
	return i
}

// handover is the listener of a server.
type handover struct {
	i     *inspector
	conns chan net.Conn
}

// Accept implements [net.Listener].
func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.i.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (h *handover) Close() error { h.i.once.Do(func() { close(h.i.done) }); return nil }

// Addr is of no use.
func (h *handover) Addr() net.Addr { return &net.TCPAddr{} }

func (i *inspector) close() {
	i.once.Do(func() { close(i.done) })
	i.server.Close()
	i.frames.Close()
}

// flowConn is a connection in the server's hands.
type flowConn struct {
	net.Conn
	f    *flow
	once sync.Once
	// ended is closed when the server is done with it.
	ended chan struct{}
}

func (c *flowConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.f.up.Add(int64(n))
	if lerr := c.f.card.meter.up(int64(n)); lerr != nil && n > 0 {
		return 0, lerr
	}
	return n, err
}

func (c *flowConn) Write(b []byte) (int, error) {
	if err := c.f.card.meter.down(int64(len(b))); err != nil && len(b) > 0 {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	c.f.down.Add(int64(n))
	return n, err
}

func (c *flowConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.ended) })
	return err
}

// CloseWrite ends the sending half.
func (c *flowConn) CloseWrite() error { return closeWrite(c.Conn) }

type (
	flowKey    struct{}
	framingKey struct{}
	framesKey  struct{}
)

// withFlow gives the requests of a connection its flow.
func withFlow(ctx context.Context, c net.Conn) context.Context {
	if f := framing.Of(c); f != nil {
		ctx = context.WithValue(ctx, framingKey{}, f)
		c = f.Conn
	}
	if f, ok := c.(*framing.Frames); ok {
		ctx = context.WithValue(ctx, framesKey{}, f)
		c = f.Conn
	}
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, flowKey{}, c.(*flowConn).f)
}

// serve speaks plain HTTP on a connection until it ends.
func (i *inspector) serve(f *flow, c net.Conn) {
	fc := &flowConn{Conn: c, f: f, ended: make(chan struct{})}
	i.run(fc, framing.New(fc), i.conns)
}

// serveTLS speaks HTTP on a TLS connection, for which it has a certificate of its own.
func (i *inspector) serveTLS(f *flow, c net.Conn) {
	a := i.g.opts.Authority
	if a == nil {
		f.card.deny(f, policy.Verdict{Reason: "the connection has to be inspected, and the gateway has no certificate authority"})
		return
	}
	leaf, err := a.leaf(f.to.Host)
	if err != nil {
		f.card.failed(f, err)
		return
	}
	fc := &flowConn{Conn: c, f: f, ended: make(chan struct{})}
	secure := tls.Server(fc, &tls.Config{
		Certificates: []tls.Certificate{*leaf},
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2", "http/1.1"},
		// The tickets of a sandbox shall not open another's session.
		SessionTicketsDisabled: true,
	})
	ctx, cancel := context.WithTimeout(f.life, headTime)
	ready, err := framing.Handshake(ctx, secure)
	cancel()
	if err != nil {
		i.g.log.Debug("the handshake of an inspected connection", "sandbox", f.card.id, "error", err)
		fc.Close()
		f.stop(fmt.Errorf("there is no handshake of TLS: %w", err))
		i.ended(f)
		return
	}
	if t, ok := ready.(*tls.Conn); ok { // on which HTTP/2 was agreed
		i.run(fc, framing.NewFrames(t, func(r framing.Refusal) {
			e := f.entry("http.deny")
			e.Status, e.Reason = r.Status, "the request was refused by the HTTP/2 server: "+r.Text
			f.card.refuse(e)
		}), i.framed)
		return
	}
	i.run(fc, ready, i.conns)
}

// run has a server speak on a connection until it ends.
func (i *inspector) run(fc *flowConn, c net.Conn, server chan net.Conn) {
	if said := framing.Of(c); said != nil {
		said.OnRefusal(func(r framing.Refusal) { notUnderstood(fc.f, r) })
	}
	select {
	case server <- c:
	case <-i.done:
		return
	case <-fc.f.life.Done():
		return
	}
	select {
	case <-fc.ended:
	case <-fc.f.life.Done():
		fc.Close()
	}
	i.ended(fc.f)
}

// notUnderstood records a request that nobody has handled, since the server did not understand it, or since it was never whole.
func notUnderstood(f *flow, r framing.Refusal) {
	e := f.entry("http.deny")
	if r.Left {
		e.Action, e.Reason = "http.fail", "the client left before its request was whole"
		f.card.record(e)
		return
	}
	e.Status = r.Status
	// What is no request may be anything, and so may what follows the path: a secret of somebody's.
	if slices.Contains(methodsTold, r.Method) {
		e.Method = r.Method
	}
	if path, _, _ := strings.Cut(r.Target, "?"); strings.HasPrefix(path, "/") {
		e.Path = path[:min(len(path), maxPathTold)]
	}
	e.Reason = "the request cannot be understood: " + r.Text
	if r.Fault != nil {
		e.Reason = r.Fault.Error()
	}
	f.card.refuse(e)
}

// methodsTold are those that are put on record of a request that is not understood.
var methodsTold = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE"}

// maxPathTold is how much of the path of a request that is not understood is put on record.
const maxPathTold = 2000

// ended records the end of an inspected connection.
func (i *inspector) ended(f *flow) {
	e := f.entry("flow.close")
	e.Up, e.Down, e.Duration = f.up.Load(), f.down.Load(), time.Since(f.started)
	if err := context.Cause(f.life); err != nil {
		e.Reason = err.Error()
	}
	f.card.record(e)
}

// handle answers a request.
func (i *inspector) handle(w http.ResponseWriter, r *http.Request) {
	if f, ok := r.Context().Value(framesKey{}).(*framing.Frames); ok {
		w = &answeringWriter{w, f}
	}
	if a := i.carryOut(w, r); a != nil {
		// Whoever gives it no window has it wait, but nothing of what the request had.
		c := r.Context().Value(flowKey{}).(*flow).card
		c.refusing.Answer(w, r, func() { say(w, a.status, a.text) })
	}
}

// refusal is an answer of the gateway's own.
type refusal struct {
	status int
	text   string
}

// carryOut decides on a request and carries it out. What it returns is still to be said.
func (i *inspector) carryOut(w http.ResponseWriter, r *http.Request) (left *refusal) {
	conn := r.Context().Value(flowKey{}).(*flow)
	c := conn.card
	started := time.Now()
	e := conn.entry("http.request")
	e.Path = r.URL.Path
	if validMethod(r.Method) { // else it may be anything
		e.Method = r.Method
	}
	refuse := func(status int, v policy.Verdict) {
		e.Action, e.Rule, e.Reason, e.Status = "http.deny", v.Rule, v.Reason, status
		c.refuse(e)
		left = &refusal{status, fmt.Sprintf("%s %s%s is denied: %s", r.Method, conn.to.Host, e.Path[:min(len(e.Path), maxPathTold)], v.Reason)}
	}
	said, _ := r.Context().Value(framingKey{}).(*framing.Conn)
	if said != nil {
		said.Handed()
	}
	if err := checkFraming(r, said); err != nil {
		w.Header().Set("Connection", "close")
		refuse(http.StatusBadRequest, policy.Verdict{Reason: err.Error()})
		return left
	}
	if status, err := checkRequest(r, conn.to); err != nil {
		refuse(status, policy.Verdict{Reason: err.Error()})
		return left
	}
	r.Header = sentOn(r.Header)
	path, err := policy.CanonicalPath(r.URL.EscapedPath())
	if err != nil {
		refuse(http.StatusBadRequest, policy.Verdict{Reason: err.Error()})
		return left
	}
	e.Path = path
	rules, vault := c.rules.Load(), c.vault.Load()
	p := rules.Policy
	if p.PlatformCredentialsOnly() {
		secret.StripCredentials(r)
	}
	if covered(p, conn.to) { // then answers are looked through
		secret.RestrictEncoding(r.Header)
	}
	ask := policy.Request{Flow: conn.to, Method: r.Method, Path: path, Query: r.URL.RawQuery, Header: r.Header}
	v := p.Request(ask)
	if !v.Allow {
		refuse(http.StatusForbidden, v)
		return left
	}
	e.Rule = v.Rule
	if err := c.meter.request(p.Limits()); err != nil {
		w.Header().Set("Retry-After", "10")
		refuse(http.StatusTooManyRequests, policy.Verdict{Rule: v.Rule, Reason: err.Error()})
		return left
	}
	unescaped, err := url.PathUnescape(path)
	if err != nil {
		refuse(http.StatusBadRequest, policy.Verdict{Reason: err.Error()})
		return left
	}
	// A copy of the header: the proxy changes it, and the decision may be looked at again.
	f := &flow{to: conn.to, rule: v.Rule, request: &policy.Request{Flow: ask.Flow, Method: ask.Method, Path: path, Query: ask.Query, Header: r.Header.Clone()}, inspected: true}
	var unusable error
	f.use, unusable = c.secrets(rules, vault, *f.request)
	if err := c.begin(r.Context(), f); err != nil {
		refuse(http.StatusTooManyRequests, policy.Verdict{Rule: v.Rule, Reason: err.Error()})
		return left
	}
	defer c.done(f)
	// A policy that came meanwhile did not see the request.
	if now := c.policy(); now != p {
		if v := now.Request(*f.request); !v.Allow {
			refuse(http.StatusForbidden, v)
			return left
		}
	}
	out := r.WithContext(httptrace.WithClientTrace(context.WithValue(f.life, flowKey{}, f), framing.LimitInformational()))
	out.URL = &url.URL{Scheme: string(conn.to.Protocol), Host: hostPort(conn.to), Path: unescaped, RawPath: path, RawQuery: r.URL.RawQuery}
	out.Host = canonicalHost(conn.to)
	// They come after the decision.
	out.Trailer = nil
	if unusable != nil {
		e.Action, e.Rule, e.Reason, e.Status = "http.deny", v.Rule, unusable.Error(), http.StatusBadGateway
		c.refuse(e)
		i.failed(w, out, unusable)
		return f.left
	}
	sw := &statusWriter{ResponseWriter: w}
	// The stop of a flow must reach a response that is being streamed to a reader who does not read.
	// It must not once this has returned: the response is the server's again then, and touching it ends the process.
	var answering sync.Mutex
	returned := false
	stop := context.AfterFunc(f.life, func() {
		answering.Lock()
		defer answering.Unlock()
		if !returned && context.Cause(f.life) != context.Canceled {
			http.NewResponseController(w).SetWriteDeadline(time.Now())
		}
	})
	defer func() {
		stop()
		answering.Lock()
		defer answering.Unlock()
		returned = true
	}()
	defer func() {
		e.Status, e.Duration, e.Up, e.Down = sw.status, time.Since(started), f.up.Load(), f.down.Load()
		if a := f.addr.Load(); a != nil {
			e.Addr = a.String()
		}
		if cause := context.Cause(f.life); cause != nil && !errors.Is(cause, context.Canceled) {
			e.Reason = cause.Error()
		}
		o := f.outcome.Load()
		if o == nil {
			c.record(e)
			return
		}
		e.Action, e.Rule, e.Addr = o.action, cmp.Or(o.rule, e.Rule), cmp.Or(o.addr, e.Addr)
		if o.action == "http.deny" || e.Reason == "" {
			e.Reason = o.reason
		}
		if e.Secret = f.used; e.Secret != "" && !f.wrote.Load() {
			e.Reason += "; the secret was not sent"
		}
		if o.action == "http.deny" {
			c.refuse(e)
		} else {
			c.record(e)
		}
	}()
	// An answer may begin before its request has ended.
	early, out, body := duplex.Enable(sw, out)
	defer body.Finish()
	i.proxy.ServeHTTP(early, out)
	return f.left
}

// hopHeaders are about one connection, and those of a proxy: it keeps them to itself. Of HTTP/2 also the host, which is that of the request.
var hopHeaders = []string{"Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Trailer", "Transfer-Encoding", "Host"}

// sentOn returns a header as it goes to the server. That is what a policy judges: what is not sent cannot be what a request is allowed for.
func sentOn(h http.Header) http.Header {
	for _, name := range hopHeaders {
		delete(h, name)
	}
	if te := h["Te"]; len(te) > 0 {
		delete(h, "Te")
		if httpguts.HeaderValuesContainsToken(te, "trailers") {
			h["Te"] = []string{"trailers"}
		}
	}
	// Each is of use with the other alone.
	if len(h["Upgrade"]) == 0 || !httpguts.HeaderValuesContainsToken(h["Connection"], "upgrade") {
		delete(h, "Upgrade")
		delete(h, "Connection")
	}
	return h
}

// forwardHeaders are those that the proxy takes out before it calls Rewrite.
var forwardHeaders = []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"}

// unchanged puts back what the proxy takes out of a request by itself: the policy has judged it as it came.
func unchanged(p *httputil.ProxyRequest) {
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	for _, name := range forwardHeaders {
		if v, ok := p.In.Header[name]; ok {
			p.Out.Header[name] = slices.Clone(v)
		}
	}
}

// checkFraming refuses a request of which two programs might see different ends. Over HTTP/2 frames say where a request ends, but its length goes on to
// servers that have none.
func checkFraming(r *http.Request, said *framing.Conn) error {
	if r.ProtoMajor != 1 {
		count := 0
		for _, values := range r.Header {
			count += len(values)
		}
		if count > framing.MaxHeaders { // over HTTP/1 they are counted as they come
			return fmt.Errorf("its header has more than %d lines", framing.MaxHeaders)
		}
		lengths := r.Header["Content-Length"]
		if len(lengths) > 1 {
			return errors.New("the framing of the request: it has several Content-Lengths; send one")
		}
		if len(lengths) == 1 {
			n, err := framing.CheckLength(lengths[0])
			if err != nil {
				return err
			}
			// The server takes no notice of it where no body follows, and judges the frames by it where one does.
			if n != r.ContentLength {
				return fmt.Errorf("the framing of the request: its Content-Length is %d, and its stream ends with its header", n)
			}
		}
		return nil
	}
	if said == nil {
		return errors.New("a request of HTTP/1 on a connection that is not of HTTP/1")
	}
	return said.Check(r.Method, r.RequestURI)
}

// checkRequest refuses what is no plain request to the host of its connection. Each of these has been a way to make two programs
// understand a request differently.
func checkRequest(r *http.Request, to policy.Flow) (int, error) {
	switch {
	case r.Method == http.MethodConnect || r.Method == http.MethodTrace || r.Method == "TRACK":
		return http.StatusMethodNotAllowed, fmt.Errorf("method %s is not served", r.Method)
	case !validMethod(r.Method):
		return http.StatusBadRequest, errors.New("the method is no word in capitals")
	case r.ProtoMajor == 1 && r.URL.IsAbs():
		return http.StatusBadRequest, errors.New("the request target names a host itself, as to a proxy")
	case !strings.HasPrefix(r.URL.Path, "/"): // as OPTIONS has it that is for a whole server
		return http.StatusBadRequest, errors.New("the path does not begin with /")
	case strings.ContainsFunc(r.URL.RawQuery, func(b rune) bool { return b <= ' ' || b == 0x7f || b == '#' }):
		// Over HTTP/2 it can stand there, and over HTTP/1 it would end the request's target, or its query.
		return http.StatusBadRequest, errors.New("the query has a blank, a control character or #; escape it, as %20 or %23")
	case len(r.Header["User-Agent"]) > 1:
		// Both would be judged, and the first alone be sent.
		return http.StatusBadRequest, errors.New("it has several User-Agents; send one")
	case len(r.Header["Max-Forwards"]) > 0 || len(r.Header["Proxy-Authorization"]) > 0:
		return http.StatusBadRequest, errors.New("a header for proxies")
	}
	// HTTP/2 has it apart from the header, which may say another beside it.
	for _, host := range append([]string{r.Host}, r.Header["Host"]...) {
		if err := sameHost(host, to); err != nil {
			return http.StatusMisdirectedRequest, err
		}
	}
	for _, v := range r.Header["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			switch name = strings.ToLower(strings.Trim(name, " \t")); name {
			case "", "close", "keep-alive", "te", "upgrade":
			default:
				// It would be judged and not be sent.
				return http.StatusBadRequest, errors.New("header Connection names a header, which a proxy would take out of the request; send it without")
			}
		}
	}
	if up := r.Header["Upgrade"]; len(up) > 0 {
		if len(up) > 1 || !strings.EqualFold(up[0], "websocket") {
			return http.StatusBadRequest, fmt.Errorf("an upgrade to %q is not served", strings.Join(up, ", "))
		}
		if r.Method != http.MethodGet || r.ProtoMajor != 1 {
			return http.StatusBadRequest, errors.New("a WebSocket begins with GET")
		}
	}
	for name, values := range r.Header {
		if !httpguts.ValidHeaderFieldName(name) {
			return http.StatusBadRequest, errors.New("the name of a header is none")
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return http.StatusBadRequest, fmt.Errorf("header %s has bytes that no header has", name)
			}
		}
	}
	return 0, nil
}

func validMethod(m string) bool {
	for _, b := range []byte(m) {
		if b < 'A' || b > 'Z' {
			return false
		}
	}
	return m != "" && len(m) <= 32
}

// sameHost compares the host that a request names with that of its connection.
func sameHost(host string, to policy.Flow) error {
	if host == "" {
		return errors.New("the request names no host")
	}
	name, port := host, ""
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		name, port = host[:i], host[i+1:]
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	h, err := policy.ParseHost(name)
	if err != nil {
		return fmt.Errorf("the host of the request: %w", err)
	}
	if h != to.Host {
		return fmt.Errorf("the request is for %s, but the connection is to %s", h, to.Host)
	}
	if port == "" && to.Port == defaultPort(to.Protocol) || port == strconv.Itoa(int(to.Port)) {
		return nil
	}
	return fmt.Errorf("the request is for port %q, but the connection is to port %d", port, to.Port)
}

func defaultPort(p policy.Protocol) uint16 {
	if p == policy.HTTP {
		return 80
	}
	return 443
}

// hostPort is where a flow goes, as a URL says it.
func hostPort(to policy.Flow) string {
	return net.JoinHostPort(string(to.Host), strconv.Itoa(int(to.Port)))
}

// canonicalHost is the Host header of a flow.
func canonicalHost(to policy.Flow) string {
	if to.Port == defaultPort(to.Protocol) {
		if a, ok := to.Host.Addr(); ok && a.Is6() {
			return "[" + string(to.Host) + "]"
		}
		return string(to.Host)
	}
	return hostPort(to)
}

// roundTripper carries a request out by the transport of its sandbox, with which no other shares a connection.
type roundTripper struct{}

func (roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	f := r.Context().Value(flowKey{}).(*flow)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &countedBody{r.Body, f}
	}
	trace := &httptrace.ClientTrace{WroteHeaders: func() { f.wrote.Store(true) }, GotConn: func(i httptrace.GotConnInfo) {
		// It may be a connection that an earlier request was made on.
		if a, err := netip.ParseAddrPort(i.Conn.RemoteAddr().String()); err == nil {
			ip := a.Addr().Unmap()
			f.addr.Store(&ip)
		}
	}}
	if f.use == nil {
		if err := f.opens(r); err != nil {
			return nil, err
		}
		return f.card.forward.Load().RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
	}
	if f.use.clean != nil {
		// This is called before the proxy's own, which hands the header on.
		trace.Got1xxResponse = func(_ int, h textproto.MIMEHeader) error {
			if n := f.use.clean.Header(http.Header(h)); n > 0 {
				f.shown(int64(n))
			}
			return nil
		}
	}
	return f.use.send(f, r.WithContext(httptrace.WithClientTrace(r.Context(), trace)), f.card.forward.Load())
}

// countedBody counts what a request sends.
type countedBody struct {
	io.ReadCloser
	f *flow
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.f.up.Add(int64(n))
	return n, err
}

// transport makes the connections to servers of a sandbox.
func (i *inspector) transport(c *card) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			f, ok := ctx.Value(flowKey{}).(*flow)
			if !ok {
				return nil, errors.New("a dial for no flow")
			}
			if address != hostPort(f.to) {
				return nil, fmt.Errorf("a dial to %s for a flow to %s", address, hostPort(f.to))
			}
			conn, addr, err := i.g.resolver.connect(ctx, i.g.dialer, "tcp", c.policy(), f.to)
			if err != nil {
				return nil, err
			}
			// A policy that came meanwhile did not see the address.
			if v := i.g.resolver.judge(c.policy(), f.to, addr); !v.Allow {
				conn.Close()
				return nil, &deniedError{verdict: v, addr: addr}
			}
			return conn, nil
		},
		TLSClientConfig:        &tls.Config{RootCAs: i.g.opts.Roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    dialTime,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeader,
		ResponseHeaderTimeout:  i.answerTime,
		// What waits for a sandbox that does not read waits here, for all sandboxes together.
		HTTP2:                 &http.HTTP2Config{MaxReceiveBufferPerStream: 256 << 10, MaxReceiveBufferPerConnection: 4 << 20},
		MaxIdleConnsPerHost:   32,
		IdleConnTimeout:       keepTime,
		ExpectContinueTimeout: time.Second,
	}
}

// answered changes the head of what a server answers: it may not send the sandbox elsewhere beside the gateway, nor speak in the gateway's name.
func answered(r *http.Response) error {
	r.Header.Del("Alt-Svc")
	r.Header.Del(errorHeader)
	// The proxy would refuse it as well, and leave the connection open.
	if r.StatusCode == http.StatusSwitchingProtocols && (!strings.EqualFold(r.Header.Get("Upgrade"), "websocket") || r.Request.Header.Get("Upgrade") == "") {
		return errors.New("the server switched to a protocol that nobody asked for")
	}
	f := r.Request.Context().Value(flowKey{}).(*flow)
	if rw, ok := r.Body.(io.ReadWriteCloser); ok && r.StatusCode == http.StatusSwitchingProtocols {
		if said, ok := r.Request.Context().Value(framingKey{}).(*framing.Conn); ok {
			said.Opaque()
		}
		r.Body = &countedSocket{rw, f}
		return nil
	}
	r.Body = &countedAnswer{r.Body, f}
	return nil
}

type countedAnswer struct {
	io.ReadCloser
	f *flow
}

func (b *countedAnswer) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.f.down.Add(int64(n))
	if errors.Is(err, secret.ErrOpaque) {
		// Its head has gone out, so that the sandbox sees no more than that it ends.
		b.f.refused(err.Error())
	}
	return n, err
}

type countedSocket struct {
	io.ReadWriteCloser
	f *flow
}

func (s *countedSocket) Read(p []byte) (int, error) {
	n, err := s.ReadWriteCloser.Read(p)
	s.f.down.Add(int64(n))
	return n, err
}

func (s *countedSocket) Write(p []byte) (int, error) {
	n, err := s.ReadWriteCloser.Write(p)
	s.f.up.Add(int64(n))
	return n, err
}

// outcome is what a request came to that was not simply answered.
type outcome struct {
	action     string // "http.deny" or "http.fail"
	rule, addr string // that denied it, if they are others than the request's
	reason     string
}

// refused notes why a request was denied after it had been allowed.
func (f *flow) refused(reason string) { f.outcome.Store(&outcome{action: "http.deny", reason: reason}) }

// Of a request that its client gave up: whether anything of it may have reached the server, which is what somebody asks who reads the record.
const (
	givenUpBefore = "the request was given up before anything of it was sent"
	givenUpDuring = "the request was given up when it was about to be sent, and the server may have got it"
	givenUpAfter  = "the request was given up after it had been sent to the server"
)

func (f *flow) givenUp() string {
	switch {
	case f.wrote.Load():
		return givenUpAfter
	case f.addr.Load() != nil: // a connection was its own
		return givenUpDuring
	}
	return givenUpBefore
}

// failed answers for a server that could not be asked.
func (i *inspector) failed(w http.ResponseWriter, r *http.Request, err error) {
	f := r.Context().Value(flowKey{}).(*flow)
	// What a server said may stand in the error, and in that a secret.
	status, text := http.StatusBadGateway, "the server did not answer as a server does"
	// record is what the operator reads, if that is more.
	record := ""
	var cert *tls.CertificateVerificationError
	var dial *net.OpError
	if errors.As(err, &cert) || errors.As(err, &dial) {
		text, record = "the server could not be asked: "+unaddressed(err), "the server could not be asked: "+err.Error()
	}
	var d *deniedError
	var s *secretError
	var t net.Error
	var limit *limitError
	var o *outcome
	deny := func(reason string) *outcome { return &outcome{action: "http.deny", reason: reason} }
	fault, faulty := framing.IsFault(err)
	if said, ok := r.Context().Value(framingKey{}).(*framing.Conn); ok && errors.Is(err, context.Canceled) {
		fault, faulty = framing.IsFault(said.Fault())
	}
	switch {
	case faulty:
		// It came after the head, which is with the server already; its connection is closed.
		status, text = http.StatusBadRequest, fault.Error()
		o = deny(text)
		w.Header().Set("Connection", "close")
	case errors.As(err, &d):
		status, text = http.StatusForbidden, d.Error()
		o = deny(d.verdict.Reason)
		if o.rule = d.verdict.Rule; d.addr.IsValid() {
			o.addr = d.addr.String()
		}
	case errors.Is(err, errUnrecorded):
		status, text = http.StatusServiceUnavailable, "the request cannot be put on record, and does not happen without; the server's disk may be full"
		o = deny(text)
	case errors.As(err, &limit):
		status, text = http.StatusTooManyRequests, limit.Error()
		o = deny(text)
	case errors.Is(err, secret.ErrMisplaced):
		status, text = http.StatusForbidden, err.Error()
		o = deny(text)
	case errors.Is(err, secret.ErrOpaque):
		text = err.Error()
		o = deny(text)
	case errors.As(err, &s):
		text = s.told()
		o = deny(s.Error())
	case errors.Is(err, errNoName):
		text, record = fmt.Sprintf("there is no host %s", f.to.Host), ""
	case errors.As(err, &t) && t.Timeout():
		status, text, record = http.StatusGatewayTimeout, "the server took too long to answer", ""
	case errors.Is(err, context.Canceled) && context.Cause(f.life) != nil:
		text, record = f.givenUp(), ""
	}
	if o == nil {
		o = &outcome{action: "http.fail", reason: cmp.Or(record, text)}
	}
	f.outcome.Store(o)
	if r.ProtoMajor == 1 {
		say(w, status, text)
		return
	}
	f.left = &refusal{status, text}
	if sw, ok := w.(*statusWriter); ok {
		sw.status = status
	}
}

// unaddressed is what a sandbox is told of an error of the network or of the record: no addresses, for the host's own are among them, and no paths.
func unaddressed(err error) string {
	if errors.Is(err, errUnrecorded) {
		return errUnrecorded.Error()
	}
	// Of a question it has the resolver's address, and the text of an error of the network in its own.
	var name *net.DNSError
	if errors.As(err, &name) {
		if name.IsTimeout {
			return "the host's resolver did not answer in time"
		}
		return "the host's resolver could not be asked, or cannot tell"
	}
	var op *net.OpError
	for errors.As(err, &op) && op.Err != nil {
		err = op.Err
	}
	return err.Error()
}

// errorHeader tells what the gateway says from what a server said.
const errorHeader = "Warren-Gateway"

// say answers in words.
func say(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(errorHeader, "refused")
	w.WriteHeader(status)
	fmt.Fprintf(w, "warren: %s\n", text)
}

// answeringWriter tells a connection of HTTP/2 which answers are not the server's own.
type answeringWriter struct {
	http.ResponseWriter
	frames *framing.Frames
}

func (w *answeringWriter) WriteHeader(status int) {
	w.frames.Answering(status)
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the proxy flush.
func (w *answeringWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	if w.status < 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets the proxy flush and take over the connection.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// buffers are the proxy's.
type buffers struct{ pool sync.Pool }

// Get returns a buffer.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

// Put takes one back.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
