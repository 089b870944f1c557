package server

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/wire"
	"github.com/warren-sandbox/warren/proto/e2b/process/processconnect"
)

// sandboxesPath is what leads into sandboxes: /v1/sandboxes/{id}/ports/{port}/{path...} and /v1/sandboxes/{id}/dial/{port}.
const sandboxesPath = "/v1/sandboxes/"

// target is what a path into a sandbox names.
type target struct {
	ref  string
	verb string
	port uint16
	// rest is what the sandbox gets, as it was on the wire.
	rest string
}

// parseTarget reads an escaped path. What comes after the port is not looked at: %2f, // and .. mean what the sandbox
// takes them to mean.
func parseTarget(escaped string) (target, error) {
	invalid := func(message string) error {
		return &warren.Error{Kind: "invalid", Op: "reach sandbox", Message: message}
	}
	parts := strings.SplitN(strings.TrimPrefix(escaped, sandboxesPath), "/", 4)
	if len(parts) < 3 || parts[1] != "ports" && parts[1] != "dial" {
		return target{}, &warren.Error{Kind: "not_found", Op: "reach sandbox", Message: "there is nothing at this path; want " + sandboxesPath + "{id}/ports/{port}/… or …/dial/{port}"}
	}
	t := target{verb: parts[1], rest: "/"}
	var err error
	if t.ref, err = url.PathUnescape(parts[0]); err != nil || t.ref == "" || len(t.ref) > 64 || strings.ContainsFunc(t.ref, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
	}) {
		return target{}, invalid("that is not the id or name of a sandbox")
	}
	port, err := strconv.ParseUint(parts[2], 10, 16)
	if err != nil || port == 0 || parts[2][0] == '0' || parts[2][0] == '+' {
		return target{}, invalid("a port is from 1 to 65535")
	}
	t.port = uint16(port)
	if len(parts) == 4 {
		t.rest += parts[3]
		if t.verb == "dial" {
			return target{}, invalid("nothing comes after the port to dial")
		}
	}
	return t, nil
}

// serveSandbox carries a request into a sandbox.
func (s *Server) serveSandbox(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	t, err := parseTarget(r.URL.EscapedPath())
	if err != nil {
		s.refuse(w, r, s.judge(ctx, "reach sandbox", err))
		return
	}
	requestOf(ctx).sandbox = t.ref
	if t.port == warren.GuestPort && !guestPath(t) {
		s.refuse(w, r, &wire.Fault{Kind: wire.Of(warren.ErrDenied), Op: "reach sandbox", ID: t.ref, Message: "the guest's port carries its calls, and those that set it up are the server's alone"})
		return
	}
	if r.Header.Get(reconnectHeader) != "" {
		ctx = engine.ComingBack(ctx)
	}
	// Each request is looked at: a pooled connection was dialled for an earlier one.
	id, use, err := s.engine.Hold(ctx, callerOf(ctx), t.ref)
	if err != nil {
		s.refuse(w, r, s.judge(ctx, "reach sandbox", err))
		return
	}
	defer use.End()
	// A drain ends what lasts. From here on this is a call under way: a pause that cuts it off is not undone by it.
	ctx, cancel := context.WithCancelCause(engine.ComingBack(ctx))
	defer cancel(nil)
	defer context.AfterFunc(s.long, func() { cancel(errDraining) })() // its client has not given it up, and comes back
	r = r.WithContext(ctx)
	if t.verb == "dial" {
		s.serveDial(w, r, id, use, t)
		return
	}
	s.serveProxy(w, r, id, use, t)
}

// guestPath reports whether a path of the guest is open to callers. What is not named here is not: the guest trusts the
// connection, and what sets it up, freezes it or takes its channel is the engine's.
func guestPath(t target) bool {
	p, err := url.PathUnescape(t.rest)
	if err != nil || t.verb != "ports" || path.Clean(p) != p {
		return false
	}
	switch p {
	case "/health", "/metrics", "/envs", "/files", "/files/compose":
		return true
	}
	for _, service := range []string{"/process.Process/", "/filesystem.Filesystem/", "/warren.guest.v1.GuestService/"} {
		if method, ok := strings.CutPrefix(p, service); ok && method != "" && !strings.Contains(method, "/") {
			return true
		}
	}
	return false
}

func (s *Server) serveProxy(w http.ResponseWriter, r *http.Request, id warren.SandboxID, use engine.Use, t target) {
	caller := callerOf(r.Context())
	token := ""
	if t.port == warren.GuestPort {
		var err error
		if token, err = s.engine.AccessToken(caller, string(id)); err != nil {
			s.judge(r.Context(), "reach sandbox", err).Write(w, r)
			return
		}
	}
	rest, err := url.ParseRequestURI(t.rest)
	if err != nil {
		(&wire.Fault{Kind: wire.Of(warren.ErrInvalid), Op: "reach sandbox", ID: t.ref, Message: "the path is not a path"}).Write(w, r)
		return
	}
	// ParseRequestURI takes a leading // for a host.
	if strings.HasPrefix(t.rest, "//") {
		rest = &url.URL{RawPath: t.rest}
		rest.Path, _ = url.PathUnescape(t.rest)
	}
	transport := http.RoundTripper(s.pools.get(poolKey{id, t.port}))
	if t.port == warren.GuestPort {
		transport = s.patient(transport)
	}
	w, r, body := duplex.Enable(w, r)
	defer body.Finish()
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		BufferPool:    buffers,
		ErrorLog:      quietLog,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL = &url.URL{Scheme: "http", Host: "localhost:" + itoa(int64(t.port)), Path: rest.Path, RawPath: rest.RawPath, RawQuery: p.In.URL.RawQuery, ForceQuery: p.In.URL.ForceQuery}
			p.Out.Host = p.Out.URL.Host
			requestHeader(p.Out.Header, p.In.Header, t.port, token)
		},
		ModifyResponse: func(res *http.Response) error {
			use.Answered()
			responseHeader(res.Header)
			if t.port == warren.GuestPort && t.rest == processconnect.ProcessStartProcedure && res.StatusCode == http.StatusOK {
				go s.engine.MarkFirstCommand(s.base, id)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if errors.Is(err, errSilent) {
				use.Unanswered()
				err = engine.Unanswered(t.ref)
			}
			s.proxyFault(r.Context(), t, err).Write(w, r)
		},
	}
	proxy.ServeHTTP(noInformational{w}, r)
}

// proxyFault is the answer when a sandbox gave none.
func (s *Server) proxyFault(ctx context.Context, t target, err error) *wire.Fault {
	var dial *dialError
	var told *warren.Error
	if errors.As(err, &told) && told.Resource == warren.ResourceGuest {
		f := s.judge(ctx, "reach sandbox", told)
		f.Op, f.Status = "", http.StatusGatewayTimeout
		return f
	}
	if !errors.As(err, &dial) && ctx.Err() == nil {
		// The connection was there and broke, or what came over it was not HTTP.
		f := &wire.Fault{Kind: wire.Of(warren.ErrUnavailable), Op: "reach sandbox", ID: t.ref, Message: "the sandbox broke the connection off, or what listens on port " + itoa(int64(t.port)) + " does not speak HTTP"}
		f.Status = http.StatusBadGateway
		return f
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	f := s.judge(ctx, "reach sandbox", err)
	if f.Name == "unavailable" {
		f.Status = http.StatusBadGateway
	}
	return f
}

// requestHeader makes what a sandbox sees of a request's headers. Credentials for this server are not for what runs in a
// sandbox, and who is in front of it is none of its business.
func requestHeader(out, in http.Header, port uint16, token string) {
	for name := range out {
		switch {
		case strings.HasPrefix(name, "Proxy-"), strings.HasPrefix(name, "X-Forwarded-"), strings.HasPrefix(name, "Warren-"), strings.HasPrefix(name, "X-Warren-"):
			delete(out, name)
		}
	}
	for _, name := range []string{"Authorization", "Cookie", "Cookie2", "X-Api-Key", "X-Access-Token", "Forwarded", "X-Real-Ip", "Via", "Origin", "Referer"} {
		delete(out, name)
	}
	if port != warren.GuestPort {
		return
	}
	if user := in.Get("Warren-User"); user != "" {
		r := http.Request{Header: out}
		r.SetBasicAuth(user, "")
	}
	if token != "" {
		out.Set("X-Access-Token", token)
	}
}

// dropped are headers of answers that would act on the origin of this API, on which a sandbox has no say.
var dropped = []string{
	"Set-Cookie", "Set-Cookie2", "Strict-Transport-Security", "Clear-Site-Data", "Service-Worker-Allowed", "Alt-Svc", "Public-Key-Pins",
	"Refresh", "Link", "Nel", "Report-To", "Reporting-Endpoints", "Content-Security-Policy", "Content-Security-Policy-Report-Only",
	"Origin-Agent-Cluster", "Permissions-Policy", "Www-Authenticate", "Proxy-Authenticate", "Speculation-Rules", "Sourcemap", "X-Sourcemap",
	"Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Allow-Headers", "Access-Control-Allow-Methods",
	"Access-Control-Allow-Private-Network", "Access-Control-Expose-Headers", "Access-Control-Max-Age", "Cross-Origin-Embedder-Policy",
	"Cross-Origin-Opener-Policy", "Cross-Origin-Resource-Policy", "Timing-Allow-Origin", "Server-Timing",
}

// responseHeader makes what a caller sees of a sandbox's headers. Should a browser show an answer at all, then as a page
// without scripts and without an origin.
func responseHeader(h http.Header) {
	for _, name := range dropped {
		delete(h, name)
	}
	for name := range h {
		if strings.HasPrefix(name, "Warren-") {
			delete(h, name)
		}
	}
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// noInformational drops answers of 1xx, whose headers ReverseProxy does not let anyone look at. 101 does not come this way.
type noInformational struct{ http.ResponseWriter }

func (w noInformational) WriteHeader(status int) {
	if status >= 200 {
		w.ResponseWriter.WriteHeader(status)
	}
}

func (w noInformational) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// reconnectHeader is how a client says that it comes back to what was cut off, see [engine.ComingBack].
const reconnectHeader = "Warren-Reconnect"

// serveDial carries raw bytes to a port and back.
func (s *Server) serveDial(w http.ResponseWriter, r *http.Request, id warren.SandboxID, use engine.Use, t target) {
	ctx := r.Context()
	fault := func(kind error, message string) {
		(&wire.Fault{Kind: wire.Of(kind), Op: "dial", ID: t.ref, Message: message}).Write(w, r)
	}
	if r.Method != http.MethodGet || !upgrades(r.Header, dialUpgrade) {
		w.Header().Set("Upgrade", dialUpgrade)
		f := wire.Fault{Kind: wire.Of(warren.ErrInvalid), Op: "dial", ID: t.ref, Message: "want GET over HTTP/1.1 with Connection: Upgrade and Upgrade: " + dialUpgrade}
		f.Status = http.StatusUpgradeRequired
		f.Write(w, r)
		return
	}
	inner, err := s.engine.Dial(ctx, callerOf(ctx), string(id), t.port)
	if err != nil {
		f := s.judge(ctx, "dial", err)
		if f.Name == "unavailable" {
			f.Status = http.StatusBadGateway
		}
		f.Write(w, r)
		return
	}
	defer inner.Close()
	use.End() // from here on the connection is one
	outer, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		fault(warren.ErrInvalid, "this connection cannot carry raw bytes; use HTTP/1.1")
		return
	}
	defer outer.Close()
	s.conns.Add(1)
	defer s.conns.Done()
	outer.SetDeadline(time.Time{})
	if rec, ok := w.(*recorder); ok {
		rec.status = http.StatusSwitchingProtocols
	}
	if _, err := io.WriteString(outer, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+dialUpgrade+"\r\n\r\n"); err != nil {
		return
	}
	var first io.Reader = outer
	if n := rw.Reader.Buffered(); n > 0 {
		first = io.MultiReader(io.LimitReader(rw.Reader, int64(n)), outer)
	}
	splice(ctx, outer, first, inner)
}

// dialUpgrade is the protocol of raw bytes to a port.
const dialUpgrade = "warren-tcp"

func upgrades(h http.Header, protocol string) bool {
	connection := false
	for _, v := range h.Values("Connection") {
		for _, token := range strings.Split(v, ",") {
			connection = connection || strings.EqualFold(strings.TrimSpace(token), "upgrade")
		}
	}
	return connection && slices.EqualFunc(h.Values("Upgrade"), []string{protocol}, strings.EqualFold)
}

// splice carries bytes both ways. The end of one direction is passed on as such, where the connection can; an error, and the end of
// ctx, cut both.
func splice(ctx context.Context, outer net.Conn, fromOuter io.Reader, inner net.Conn) {
	cut := func() {
		outer.Close()
		inner.Close()
	}
	stop := context.AfterFunc(ctx, cut)
	defer stop()
	done := make(chan struct{}, 2)
	carry := func(dst net.Conn, src io.Reader) {
		defer func() { done <- struct{}{} }()
		_, err := io.Copy(dst, src)
		half, ok := dst.(interface{ CloseWrite() error })
		if err != nil || !ok || half.CloseWrite() != nil {
			cut()
		}
	}
	go carry(inner, fromOuter)
	go carry(outer, inner)
	<-done
	<-done
}

type bufferPool struct{ ch chan []byte }

// Get implements httputil.BufferPool.
func (p bufferPool) Get() []byte {
	select {
	case b := <-p.ch:
		return b
	default:
		return make([]byte, 32<<10)
	}
}

// Put implements httputil.BufferPool.
func (p bufferPool) Put(b []byte) {
	select {
	case p.ch <- b:
	default:
	}
}

var (
	buffers  = bufferPool{make(chan []byte, 64)}
	quietLog = log.New(io.Discard, "", 0)
)
