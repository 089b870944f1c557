// Package preview shows what listens in sandboxes to browsers, each port of each sandbox under a name, and so an origin, of its own.
//
// A request is for the preview that its host names, PORT-ID.DOMAIN, and nothing else of it is looked at to find out. It is let in by a
// link, by the cookie that the link was exchanged for, by an API token, or because the preview is public; only then is the sandbox woken or
// asked anything. What let it in is taken out, and of its headers those go on that are on a list. Bytes are carried over a connection that the
// engine dials, so that a preview is a use of the sandbox like any other.
//
// The pages that this package writes itself are constant but for a port's number.
package preview

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/framing"
)

// Engine is what a server of previews needs of *engine.Engine.
type Engine interface {
	// PreviewOf is false for a sandbox that is not there.
	PreviewOf(id warren.SandboxID, port uint16) (engine.Preview, bool)
	Authenticate(ctx context.Context, token string) (engine.Caller, error)
	Resolve(c engine.Caller, ref string) (warren.SandboxID, error)
	Hold(ctx context.Context, c engine.Caller, ref string) (warren.SandboxID, engine.Use, error)
	Dial(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error)
	DialPooled(ctx context.Context, c engine.Caller, ref string, port uint16) (net.Conn, error)
}

// Tries bounds how often an address may be told that a token is not good.
type Tries interface {
	// Wait returns how long an address has to wait before it is told anything again.
	Wait(remote string) time.Duration
	Failed(remote string)
}

// Options of [New].
type Options struct {
	Engine Engine
	// Key signs links and cookies: 32 random bytes that outlive the process.
	Key    []byte
	Logger *slog.Logger
	// Domain is what previews are named below; empty means localhost.
	Domain string
	// Secure says that browsers reach the server by https.
	Secure bool
	// Port stands in URLs; 0 leaves it out.
	Port int
	// PageWait is how long a page waits for its sandbox to be resumed before it is told so; 0 means 3 seconds. Wait is how long any
	// request waits; 0 means a minute.
	PageWait, Wait time.Duration
	// Answer is how long a program in a sandbox may take until it has sent the head of an answer; 0 means half an hour, for what compiles first.
	Answer time.Duration
	// Tries counts API tokens that are not good; nil means that nobody does.
	Tries Tries
	// Head is how long a handshake may take, and the head of a request; 0 means 10 seconds.
	Head time.Duration
	// Recheck is how often requests under way are looked at again; 0 means 2 seconds.
	Recheck time.Duration
	// Used is told how previews are used; nil means that nobody wants to know.
	Used func(Use)
	// MaxRequests is how many requests one port of a sandbox may have under way, MaxTotal how many all have; 0 means 256 and 4096.
	MaxRequests, MaxTotal int
}

// Server answers for previews. It is an http.Handler.
type Server struct {
	opts           Options
	domain, scheme string
	log            *slog.Logger
	now            func() time.Time
	http           *http.Server
	live           live
	uses           uses
	refusals       duplex.Refusals

	base   context.Context
	stop   context.CancelFunc
	active sync.WaitGroup // net/http forgets connections that have become WebSockets
	ticker sync.WaitGroup

	mu    sync.Mutex
	pools map[place]*pool
}

// place is a port of a sandbox.
type place struct {
	id   warren.SandboxID
	port uint16
}

// pool keeps connections to one place for its next requests. Those of two places never meet.
type pool struct {
	*http.Transport
	used time.Time
}

const (
	// maxAnswerHead bounds the head of an answer.
	maxAnswerHead = 256 << 10
	connIdle      = 30 * time.Second
	poolIdle      = time.Minute
	// maxRefusing is how many refusals of HTTP/2 may wait for whoever asked to read them. They may be anybody's.
	maxRefusing = 1024
)

// New returns a server. Nothing listens until [Server.Serve].
func New(o Options) (*Server, error) {
	if o.Engine == nil || len(o.Key) < 32 {
		return nil, errors.New("preview: an engine and a key of 32 bytes are needed")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	def := func(v *time.Duration, to time.Duration) {
		if *v == 0 {
			*v = to
		}
	}
	def(&o.PageWait, 3*time.Second)
	def(&o.Wait, time.Minute)
	def(&o.Head, 10*time.Second)
	def(&o.Answer, 30*time.Minute)
	def(&o.Recheck, 2*time.Second)
	if o.MaxRequests == 0 {
		o.MaxRequests = 256
	}
	if o.MaxTotal == 0 {
		o.MaxTotal = 4096
	}
	s := &Server{opts: o, domain: o.Domain, scheme: "http", log: o.Logger, now: time.Now, pools: map[place]*pool{}, refusals: duplex.Refusals{Max: maxRefusing}}
	if s.domain == "" {
		s.domain = "localhost"
	}
	if o.Secure {
		s.scheme = "https"
	}
	s.live.all, s.live.used = map[*liveRequest]struct{}{}, map[place]int{}
	s.uses.tell, s.uses.wait, s.uses.later = o.Used, useTime, s.active.Go
	s.base, s.stop = context.WithCancel(context.Background())
	s.http = &http.Server{
		Handler: s,
		// OPTIONS * is for no preview, like all that names none.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            o.Head,
		IdleTimeout:                  2 * time.Minute,
		MaxHeaderBytes:               64 << 10,
		// No read or write timeouts: what a page uploads, and what it is sent as it happens, take what they take.
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: 250, SendPingTimeout: 30 * time.Second, PingTimeout: 30 * time.Second},
		ErrorLog:    log.New(quiet{s.log}, "", 0),
		BaseContext: func(net.Listener) context.Context { return s.base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, framingKey{}, framing.Of(c))
		},
	}
	s.ticker.Go(s.tick)
	return s, nil
}

// quiet takes net/http's remarks about clients.
type quiet struct{ log *slog.Logger }

func (q quiet) Write(p []byte) (int, error) {
	q.log.Debug("previews", "message", strings.TrimSpace(string(p)))
	return len(p), nil
}

func (s *Server) tick() {
	tick := time.NewTicker(s.opts.Recheck)
	defer tick.Stop()
	for {
		select {
		case <-s.base.Done():
			return
		case now := <-tick.C:
			s.recheck(s.base)
			s.sweep(now)
			s.uses.settle(s.now())
		}
	}
}

// Serve answers on a listener until [Server.Shutdown].
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(framing.Listen(l, s.opts.Head))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Shutdown ends all requests and returns when they have ended, or with ctx.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stop()
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	s.active.Wait()
	s.ticker.Wait()
	s.uses.settle(time.Time{})
	s.sweep(time.Time{})
	return err
}

// ServeHTTP is the one way of every request: which preview it is for, whether it may go on, and then into the sandbox.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.active.Add(1)
	defer s.active.Done()
	began := time.Now()
	rec := &recorder{ResponseWriter: w}
	t, bad := s.route(r)
	defer func() {
		// Neither paths nor queries, in which secrets of what runs in the sandbox travel.
		s.log.Debug("preview", "sandbox", t.id, "port", t.port, "status", rec.status, "took", time.Since(began))
	}()
	if !framed(r) {
		rec.Header().Set("Connection", "close")
		bad = badFraming
	}
	if bad != nil {
		s.uses.note(r, place{}, grant{}, bad.name, s.now())
		s.refuse(rec, r, bad, t)
		return
	}
	g, ok := s.admit(r, t)
	if !ok {
		why := denied
		if g.wait > 0 {
			why = guessing
			rec.Header().Set("Retry-After", strconv.Itoa(int((g.wait+time.Second-1)/time.Second)))
		}
		at := place{} // of what is not there no names are kept, which are whatever a stranger likes
		if _, there := s.opts.Engine.PreviewOf(t.id, t.port); there {
			at = place{t.id, t.port}
		}
		s.uses.note(r, at, g, why.name, s.now())
		s.refuse(rec, r, why, t)
		return
	}
	if g.linked && navigates(r) {
		s.uses.note(r, place{t.id, t.port}, g, "", s.now())
		s.exchange(rec, r, t, g)
		return
	}
	ctx, leave, ok := s.enter(r.Context(), t, g)
	if !ok {
		s.uses.note(r, place{t.id, t.port}, g, crowded.name, s.now())
		s.refuse(rec, r, crowded, t)
		return
	}
	defer leave()
	s.uses.note(r, place{t.id, t.port}, g, "", s.now())
	if g.signed {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, g.expires)
		defer cancel()
	}
	s.carry(rec, r.WithContext(ctx), t, g)
}

type framingKey struct{}

// framed says whether nobody can see another end of a request than net/http does.
func framed(r *http.Request) bool {
	if r.ProtoMajor != 1 {
		return len(r.Header["Content-Length"]) <= 1
	}
	said, _ := r.Context().Value(framingKey{}).(*framing.Conn)
	return said != nil && said.Check(r.Method, r.RequestURI) == nil
}

// navigates says whether a request is that of a browser for a page, which the person sees in the end.
func navigates(r *http.Request) bool {
	if !safe(r.Method) || upgrades(r) {
		return false
	}
	if mode := r.Header.Get("Sec-Fetch-Mode"); mode != "" {
		return mode == "navigate"
	}
	return strings.Contains(r.Header.Get("Accept"), "text/html")
}

// upgrades says whether a request wants a WebSocket.
func upgrades(r *http.Request) bool {
	return r.ProtoMajor == 1 && r.Method == http.MethodGet && len(r.Header["Upgrade"]) == 1 && strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
}

// exchange gives the cookie for a good link and leads to the same page without its token, which so stands in no bar, no log and no Referer.
func (s *Server) exchange(w http.ResponseWriter, r *http.Request, t target, g grant) {
	if g.link {
		http.SetCookie(w, s.cookie(t, g.preview.Epoch, g.expires))
	}
	to := r.URL.EscapedPath()
	if r.URL.RawQuery != "" {
		to += "?" + r.URL.RawQuery
	}
	h := w.Header()
	ownHeader(h)
	// Whole, since a path may begin with two slashes.
	h.Set("Location", t.origin+to)
	w.WriteHeader(http.StatusSeeOther)
}

// refuse answers a request that goes no further, whose body nobody reads.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, p *problem, t target) {
	if r.ProtoMajor == 1 && (r.ContentLength != 0 || p == denied || p == guessing) {
		// A stranger's connection is of no further use, and would be kept for its idle time.
		w.Header().Set("Connection", "close")
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	}
	if r.ProtoMajor != 1 && p.status < http.StatusInternalServerError {
		// It takes no further streams, and ends when those that it has have ended.
		w.Header().Set("Connection", "close")
	}
	method, accept := r.Method, r.Header.Get("Accept")
	s.refusals.Answer(w, r, func() { p.write(w, method, accept, t.port) })
}

// errWaiting is the error of a page whose sandbox takes long to be there.
var errWaiting = errors.New("the sandbox is not there yet")

// hold begins a use of the sandbox, which wakes it. The owner's sandbox is used in the owner's name, whoever looks.
func (s *Server) hold(r *http.Request, t target, g grant) (engine.Use, error) {
	ctx := r.Context()
	// What a page does by itself, open in some tab, does not undo a pause that somebody asked for; what it keeps open, no pause.
	if background(r) {
		ctx = engine.ComingBack(ctx)
		if g.preview.State == engine.Paused && (lasts(r) || knocks(r)) {
			return nil, warren.ErrState
		}
	}
	type result struct {
		use engine.Use
		err error
	}
	done := make(chan result, 1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.Wait)
	s.active.Go(func() {
		defer cancel()
		_, use, err := s.opts.Engine.Hold(ctx, owner(g), string(t.id))
		done <- result{use, err}
	})
	var page <-chan time.Time
	if navigates(r) {
		timer := time.NewTimer(s.opts.PageWait)
		defer timer.Stop()
		page = timer.C
	}
	var err error
	select {
	case got := <-done:
		return got.use, got.err
	case <-page:
		// The sandbox is woken all the same.
		err = errWaiting
	case <-r.Context().Done():
		cancel()
		err = r.Context().Err()
	case <-s.base.Done():
		cancel()
		err = s.base.Err()
	}
	s.active.Go(func() {
		if got := <-done; got.err == nil {
			got.use.End()
		}
	})
	return nil, err
}

// owner is in whose name a preview reaches its sandbox: whoever gives a link away lets others do so.
func owner(g grant) engine.Caller { return engine.Caller{User: g.preview.Owner} }

// background says whether a page made a request by itself. Programs that are no browsers say nothing of this kind.
func background(r *http.Request) bool {
	if upgrades(r) && r.Header.Get("Origin") != "" {
		return true
	}
	mode := r.Header.Get("Sec-Fetch-Mode")
	return mode != "" && mode != "navigate"
}

// lasts says whether a request is for a connection that stays open. It is a use by the bytes that it carries, not by being there.
func lasts(r *http.Request) bool {
	return upgrades(r) || strings.HasPrefix(r.Header.Get("Accept"), "text/event-stream")
}

// knocks says whether a page asks, again and again, for nothing but whether its server is back. Vite's does, and then loads itself.
func knocks(r *http.Request) bool { return r.Header.Get("Accept") == "text/x-vite-ping" }

// carry takes a request into the sandbox and the answer back.
func (s *Server) carry(w *recorder, r *http.Request, t target, g grant) {
	use, err := s.hold(r, t, g)
	if err != nil {
		p := s.explain(r, err)
		if p == notRunning && background(r) {
			// To the page this is a server that is not there. Any answer would tell some clients, such as Vite's, that it is back, and
			// the page would load itself again.
			panic(http.ErrAbortHandler)
		}
		s.refuse(w, r, p, t)
		return
	}
	defer use.End()
	if !upgrades(r) {
		// ReverseProxy would carry any protocol that both ends agree on.
		r.Header.Del("Upgrade")
	}
	// From here on a pause that cuts the request off is not undone by trying it again.
	ctx := engine.ComingBack(r.Context())
	var transport http.RoundTripper
	if lasts(r) {
		one := &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxAnswerHead, ResponseHeaderTimeout: s.opts.Answer, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := s.opts.Engine.Dial(ctx, owner(g), string(t.id), t.port)
			if err != nil {
				return nil, &dialError{err}
			}
			use.End() // the connection is one
			return c, nil
		}}
		defer one.CloseIdleConnections()
		transport = one
	} else {
		transport = s.pool(t, g)
	}
	keep := g.preview.KeepHost
	out, r, body := duplex.Enable(w, r)
	defer body.Finish()
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		BufferPool:    buffers,
		ErrorLog:      silent,
		Rewrite: func(p *httputil.ProxyRequest) {
			in := p.In.URL
			host := "localhost:" + strconv.Itoa(int(t.port))
			p.Out.URL = &url.URL{Scheme: "http", Host: host, Path: in.Path, RawPath: in.RawPath, RawQuery: in.RawQuery, ForceQuery: in.ForceQuery}
			p.Out.Host = host
			if keep {
				p.Out.Host = t.host
			}
			s.requestHeader(p.Out.Header, t, keep)
			p.Out.Trailer = nil // headers that no list has seen
		},
		ModifyResponse: func(res *http.Response) error {
			if res.StatusCode == http.StatusSwitchingProtocols {
				if !strings.EqualFold(res.Header.Get("Upgrade"), res.Request.Header.Get("Upgrade")) || res.Header.Get("Upgrade") == "" {
					return errSwitched // the proxy would refuse it as well, and leave the connection open
				}
				if said, _ := r.Context().Value(framingKey{}).(*framing.Conn); said != nil {
					said.Opaque()
				}
			}
			s.responseHeader(res.Header, t, keep)
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, sent *http.Request, err error) {
			// What was sent may still be looked at.
			s.refuse(out, r, s.explain(sent, err), t)
		},
	}
	proxy.ServeHTTP(noInformational{out}, r.WithContext(httptrace.WithClientTrace(ctx, framing.LimitInformational())))
}

var errSwitched = errors.New("the program switched to a protocol that nobody asked for")

// dialError is an error of the engine's Dial, which is the engine's word and not a broken connection.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// explain chooses the page for an error. What the error says is for the log: who looks may be anybody.
func (s *Server) explain(r *http.Request, err error) *problem {
	s.log.Debug("preview", "error", err)
	var dial *dialError
	var slow net.Error
	errors.As(err, &dial)
	_, faulty := framing.IsFault(err)
	if said, _ := r.Context().Value(framingKey{}).(*framing.Conn); said != nil && !faulty { // HTTP/2 has none
		// The server takes the end that a fault puts to the request for its client's leaving, and may be first to say so.
		faulty = said.Fault() != nil
	}
	switch {
	case faulty:
		return badFraming
	case errors.Is(err, errWaiting):
		return waiting
	case r.Context().Err() != nil:
		return ended
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &slow) && slow.Timeout() && dial == nil:
		return late
	case dial != nil && errors.Is(err, warren.ErrUnavailable):
		return nothing
	case errors.Is(err, warren.ErrState) || errors.Is(err, warren.ErrNotFound):
		return notRunning
	case errors.Is(err, warren.ErrExhausted):
		return exhausted
	case errors.Is(err, warren.ErrUnavailable):
		return notRunning
	}
	return broken
}

// pool returns the transport of a place.
func (s *Server) pool(t target, g grant) http.RoundTripper {
	at := place{t.id, t.port}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.pools[at]; have != nil {
		have.used = time.Now()
		return have
	}
	who := owner(g) // a sandbox never changes hands
	s.pools[at] = &pool{used: time.Now(), Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := s.opts.Engine.DialPooled(ctx, who, string(t.id), t.port)
			if err != nil {
				return nil, &dialError{err}
			}
			return c, nil
		},
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        connIdle,
		MaxResponseHeaderBytes: maxAnswerHead,
		ResponseHeaderTimeout:  s.opts.Answer,
		DisableCompression:     true,
		WriteBufferSize:        32 << 10,
		ReadBufferSize:         32 << 10,
	}}
	return s.pools[at]
}

// sweep closes connections that wait for requests to places where none come any more; a zero time means all.
func (s *Server) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, have := range s.pools {
		if now.IsZero() || now.Sub(have.used) > poolIdle {
			have.CloseIdleConnections()
			delete(s.pools, at)
		}
	}
}

// noInformational drops answers of 1xx, whose headers ReverseProxy does not let anyone look at. 101 does not come this way.
type noInformational struct{ http.ResponseWriter }

func (w noInformational) WriteHeader(status int) {
	if status >= 200 {
		w.ResponseWriter.WriteHeader(status)
	}
}

func (w noInformational) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// recorder notes the status of an answer.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

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
	buffers = bufferPool{make(chan []byte, 64)}
	silent  = log.New(io.Discard, "", 0)
)
