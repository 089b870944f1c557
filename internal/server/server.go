// Package server is Warren's API: the services of warren.v1 over Connect and gRPC, and one byte proxy that carries all
// traffic into sandboxes.
//
// A request goes one way, whatever its route: a request id and a log line, the Host and Origin checks, authentication,
// the caller's share of concurrency, and then its handler, which calls the engine as that caller. Nothing is routed before
// it is authenticated; /healthz, which says nothing, is the only exception.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/wire"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

// Options of [New].
type Options struct {
	Engine Engine
	Logger *slog.Logger
	Tracer trace.Tracer
	// Registerer takes the server's own metrics; nil counts nothing.
	Registerer prometheus.Registerer
	// Previews makes the links to previews; nil means that there are none.
	Previews Previews
	// Tries counts bad tokens; nil means that the server does by itself. Another door to the same tokens shares it.
	Tries *Tries
	// Metrics answers /metrics, which only the operator may read; nil answers 404.
	Metrics http.Handler
	// AllowedHosts are names, without port, under which the server may be addressed besides localhost and its own
	// addresses. A request for another host is refused: it comes from a page whose name was pointed here.
	AllowedHosts []string
	// AllowedOrigins are origins such as "https://console.example.com" whose pages may call the API. Requests of all other
	// pages are refused.
	AllowedOrigins []string
	// HidePaths are directories of the host that no message to others than the operator names.
	HidePaths []string
	// MaxRequests is how many requests a caller may have under way, streams included; 0 means 1000.
	MaxRequests int
	// MaxMessage bounds one message of a call, in bytes; 0 means 4 MiB.
	MaxMessage int
	// Heartbeat is how often a stream that has nothing to tell says so; 0 means 10 seconds.
	Heartbeat time.Duration
	// BodyTimeout is how long a call with one message may take to deliver it; 0 means a minute. Uploads, and what is carried
	// into sandboxes, take what they take.
	BodyTimeout time.Duration
	// IdleTimeout is how long a connection may be without a request; 0 means two minutes.
	IdleTimeout time.Duration
	// GuestWait is how long a call may wait for its guest before the guest is asked whether it is there at all, and how long
	// the answer to that may take; 0 means 15 seconds.
	GuestWait time.Duration
	// OperatorName is the user that the daemon's own uid and root act as; empty means the daemon's user name.
	OperatorName string
	// Calls gets a record of each call with who made it and what came of it; nil means none.
	Calls Recorder
	// Version and Commit are what GetVersion tells.
	Version, Commit string
}

// Server is the API. It is an http.Handler for connections that carry who they are; see [Server.Serve].
type Server struct {
	opts    Options
	engine  Engine
	log     *slog.Logger
	tracer  trace.Tracer
	metrics *metrics
	guard   guard
	tries   *Tries
	shares  *shares
	calls   calls
	tokens  *liveTokens
	pools   *pools
	routes  []route
	http    *http.Server

	// long ends the requests that last: streams, proxied connections, raw ports.
	long context.Context
	cut  context.CancelFunc
	// base ends everything.
	base context.Context
	stop context.CancelFunc
	// conns are the raw connections, which http.Server forgets.
	conns sync.WaitGroup
}

// route is one line of the route table.
type route struct {
	name string
	// prefix or exact path, escaped as on the wire.
	path  string
	exact bool
	// open routes need no authentication.
	open    bool
	handler http.Handler
}

// New returns a server. Nothing listens until [Server.Serve].
func New(o Options) (*Server, error) {
	if o.Engine == nil {
		return nil, errors.New("server: an engine is needed")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Tracer == nil {
		o.Tracer = noop.NewTracerProvider().Tracer("")
	}
	if o.MaxRequests == 0 {
		o.MaxRequests = 1000
	}
	if o.MaxMessage == 0 {
		o.MaxMessage = 4 << 20
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = 10 * time.Second
	}
	if o.BodyTimeout == 0 {
		o.BodyTimeout = time.Minute
	}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 2 * time.Minute
	}
	if o.GuestWait == 0 {
		o.GuestWait = 15 * time.Second
	}
	if o.OperatorName == "" {
		o.OperatorName = ownName()
	}
	s := &Server{opts: o, engine: o.Engine, log: o.Logger, tracer: o.Tracer}
	s.calls.to = o.Calls
	var err error
	if s.guard, err = newGuard(o.AllowedHosts, o.AllowedOrigins); err != nil {
		return nil, err
	}
	if s.metrics, err = newMetrics(o.Registerer); err != nil {
		return nil, err
	}
	s.base, s.stop = context.WithCancel(context.Background())
	s.long, s.cut = context.WithCancel(s.base)
	if s.tries = o.Tries; s.tries == nil {
		s.tries = NewTries()
	}
	s.shares = newShares(o.MaxRequests)
	s.tokens = newLiveTokens(s.base, o.Engine, tokenCheck)
	s.pools = newPools(s.base, o.Engine)
	s.routes = s.table()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler:   s,
		Protocols: &protocols,
		// OPTIONS * goes the way of every request.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            10 * time.Second,
		IdleTimeout:                  o.IdleTimeout,
		MaxHeaderBytes:               64 << 10,
		// No read or write timeouts for all: output streams for as long as its command runs, and uploads take what they take.
		// See [Server.refuse] and [Server.bounded] for those who have shown no token, and for calls.
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: 250, SendPingTimeout: 30 * time.Second, PingTimeout: 30 * time.Second},
		ErrorLog:    log.New(httpLog{s.log}, "", 0),
		BaseContext: func(net.Listener) context.Context { return s.base },
		ConnContext: connContext,
	}
	return s, nil
}

// ownName is the user whom the daemon runs as.
func ownName() string {
	uid := strconv.Itoa(os.Getuid())
	if u, err := user.LookupId(uid); err == nil && u.Username != "" {
		return u.Username
	}
	return "uid-" + uid
}

// httpLog takes net/http's remarks about clients, which are of little interest.
type httpLog struct{ log *slog.Logger }

func (l httpLog) Write(p []byte) (int, error) {
	l.log.Debug("http", "message", strings.TrimSpace(string(p)))
	return len(p), nil
}

// table is every route there is.
func (s *Server) table() []route {
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(s.opts.MaxMessage),
		connect.WithInterceptors(errorInterceptor{s}),
		connect.WithCodec(strictJSON{"json"}),
		connect.WithCodec(strictJSON{"json; charset=utf-8"}),
		connect.WithCompressMinBytes(1 << 10),
	}
	var routes []route
	add := func(path string, h http.Handler) {
		routes = append(routes, route{name: "rpc", path: path, handler: h})
	}
	add(warrenv1connect.NewSandboxServiceHandler(sandboxService{s}, opts...))
	add(warrenv1connect.NewSnapshotServiceHandler(snapshotService{s}, opts...))
	add(warrenv1connect.NewTemplateServiceHandler(templateService{s}, opts...))
	add(warrenv1connect.NewPolicyServiceHandler(policyService{s}, opts...))
	add(warrenv1connect.NewSecretServiceHandler(secretService{s}, opts...))
	add(warrenv1connect.NewWorkspaceServiceHandler(workspaceService{s}, opts...))
	add(warrenv1connect.NewRepoServiceHandler(repoService{s}, opts...))
	add(warrenv1connect.NewImageServiceHandler(imageService{s}, opts...))
	add(warrenv1connect.NewSystemServiceHandler(systemService{s}, opts...))
	routes = append(routes, route{name: "port", path: sandboxesPath, handler: http.HandlerFunc(s.serveSandbox)})
	routes = append(routes, route{name: "healthz", path: "/healthz", exact: true, open: true, handler: http.HandlerFunc(s.serveHealth)})
	if s.opts.Metrics != nil {
		routes = append(routes, route{name: "metrics", path: "/metrics", exact: true, handler: http.HandlerFunc(s.serveMetrics)})
	}
	return routes
}

// find returns the route of a path as it is on the wire. Nothing is cleaned or decoded: a path that only resembles a route is
// none.
func (s *Server) find(path string) *route {
	for i := range s.routes {
		r := &s.routes[i]
		if path == r.path || !r.exact && strings.HasPrefix(path, r.path) {
			return r
		}
	}
	return nil
}

func (s *Server) serveHealth(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// serveMetrics tells of all users together, and so is for none of them.
func (s *Server) serveMetrics(w http.ResponseWriter, r *http.Request) {
	if !callerOf(r.Context()).Operator {
		(&wire.Fault{
			Kind: wire.Of(warren.ErrDenied), Op: "read metrics", Message: "only the server's operator may read its metrics",
			Hint: "ask over the server's own socket, as its user",
		}).Write(w, r)
		return
	}
	s.opts.Metrics.ServeHTTP(w, r)
}

// Serve answers on a listener that [Server.ListenUnix] or [Server.ListenTCP] returned, until [Server.Shutdown].
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Shutdown stops listening and cuts the streams, to which clients attach again after a restart; calls under way may end until
// ctx does.
func (s *Server) Shutdown(ctx context.Context) error {
	s.cut()
	err := s.http.Shutdown(ctx)
	s.stop()
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	s.conns.Wait()
	s.pools.close()
	return err
}

// peer is the other end of a unix connection.
type peer struct {
	uid uint32
	err error
}

type contextKey int

const (
	peerKey contextKey = iota
	placeKey
	callerKey
	requestKey
)

// connContext notes who is at the other end of a connection, and which place it takes, before its first request.
func connContext(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if p := placeOf(c); p != nil {
		ctx = context.WithValue(ctx, placeKey, p)
	}
	if u, ok := c.(*unixConn); ok {
		c = u.UnixConn
	}
	if u, ok := c.(*net.UnixConn); ok {
		uid, err := peerUID(u)
		return context.WithValue(ctx, peerKey, peer{uid, err})
	}
	return ctx
}

// callerOf returns who makes a request. Every handler runs behind authentication.
func callerOf(ctx context.Context) engine.Caller {
	c, _ := ctx.Value(callerKey).(engine.Caller)
	return c
}
