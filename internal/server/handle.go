package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/wire"
)

// requestIDHeader names a request in its answer and in the log.
const requestIDHeader = "Warren-Request-Id"

// request is what the log line of a request tells.
type request struct {
	id    string
	route string
	user  string
	// sandbox is as the caller wrote it.
	sandbox string
	// told is what else the record of calls says of it, see tell.
	told map[string]string
	// fault is the kind of the error that the call ended with, also one that is told after the status.
	fault string
}

func requestOf(ctx context.Context) *request {
	if r, ok := ctx.Value(requestKey).(*request); ok {
		return r
	}
	return new(request)
}

// ServeHTTP is the one way of every request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	var id [8]byte
	rand.Read(id[:])
	req := &request{id: hex.EncodeToString(id[:]), route: "none"}
	ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	ctx, span := s.tracer.Start(context.WithValue(ctx, requestKey, req), "request", trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	r = r.WithContext(ctx)
	rec := &recorder{ResponseWriter: w}
	rec.Header().Set(requestIDHeader, req.id)
	done := s.metrics.begin()
	defer func() {
		p := recover()
		if p != nil && p != http.ErrAbortHandler {
			s.log.Error("panic", "request", req.id, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if rec.status == 0 {
				wire.Judge(errors.New("panic"), wire.Audience{}).Write(rec, r)
				p = nil
			} else {
				// The answer has begun; all that is left is to not end it as if it were whole.
				p = http.ErrAbortHandler
			}
		}
		if err := s.calls.record(req, r, rec.code(), time.Since(began), p != nil); err != nil {
			s.log.Error("a call could not be recorded", "request", req.id, "error", err)
		}
		s.finish(r, req, rec, span, time.Since(began), p != nil)
		done(req.route, rec.code(), time.Since(began))
		if p != nil {
			// net/http reads on in the request's body before it cuts the connection, and would wait for a client that
			// waits for the answer.
			http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
			panic(p)
		}
	}()
	s.serve(rec, r, req)
}

// serve checks a request and gives it to its handler.
func (s *Server) serve(w *recorder, r *http.Request, req *request) {
	if f := s.guard.check(r); f != nil {
		s.refuse(w, r, f)
		return
	}
	route := s.find(r.URL.EscapedPath())
	if route != nil && route.open {
		req.route = route.name
		s.part(w)
		route.handler.ServeHTTP(w, r)
		return
	}
	ctx, cancel, fault := s.authenticate(w, r)
	if fault != nil {
		s.refuse(w, r, fault)
		return
	}
	defer cancel()
	r = r.WithContext(ctx)
	caller := callerOf(ctx)
	req.user = caller.User
	if !s.shares.take(caller.User) {
		w.Header().Set("Retry-After", "1")
		s.refuse(w, r, &wire.Fault{
			Kind: wire.Of(warren.ErrExhausted), Message: fmt.Sprintf("more than %d requests under way", s.opts.MaxRequests),
			Hint: "end some, or try again later", Resource: fmt.Sprintf("requests per user (limit %d)", s.opts.MaxRequests),
		})
		return
	}
	defer s.shares.give(caller.User)
	if route == nil {
		s.refuse(w, r, &wire.Fault{Kind: wire.Of(warren.ErrNotFound), Message: "there is nothing at this path"})
		return
	}
	req.route = route.name
	if route.name != "port" && !uploads[r.URL.Path] {
		s.bounded(w, r)
	}
	if route.name == "rpc" {
		req.route = r.URL.Path
		if _, known := procedures[r.URL.Path]; !known {
			req.route = "rpc"
		}
		if lasting[r.URL.Path] {
			stop := context.AfterFunc(s.long, cancel)
			defer stop()
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
	}
	if s.changes(route.name, r) {
		if err := s.recordable(); err != nil {
			s.refuse(w, r, s.judge(ctx, procedures[req.route], err))
			return
		}
	}
	route.handler.ServeHTTP(w, r)
}

// partingTime is how long a refused client may go on sending before its connection is cut. Cut at once, it would often lose the answer.
const partingTime = 500 * time.Millisecond

// part makes the answer the last of its connection, and keeps net/http from reading on in a body that may never come: before the
// answer because the connection ends, after it because of the deadline.
func (s *Server) part(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	http.NewResponseController(w).SetReadDeadline(time.Now().Add(partingTime))
}

// refuse answers a request that goes no further, whose body has not been looked at.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, f *wire.Fault) {
	// HTTP/2 waits for no body.
	if _, known := r.Context().Value(callerKey).(engine.Caller); !known || r.ProtoMajor == 1 && r.ContentLength != 0 {
		s.part(w)
	}
	f.Write(w, r)
}

// bounded gives a request a time to deliver its body. What comes after the body may take longer: net/http lifts the deadline when it
// has read the end.
func (s *Server) bounded(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 {
		return
	}
	http.NewResponseController(w).SetReadDeadline(time.Now().Add(s.opts.BodyTimeout))
	r.Body = &boundedBody{r.Body, w.Header()}
}

type boundedBody struct {
	io.ReadCloser
	header http.Header
}

// Read implements io.Reader.
func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// What still comes of the body is no next request.
		b.header.Set("Connection", "close")
	}
	return n, err
}

// finish tells the log and the trace how a request ended. Neither sees a header, a query or a body, in which secrets travel.
func (s *Server) finish(r *http.Request, req *request, rec *recorder, span trace.Span, took time.Duration, cut bool) {
	span.SetName(req.route)
	span.SetAttributes(attribute.String("http.request.method", printable(r.Method, 16)), attribute.Int("http.response.status_code", rec.code()), attribute.String("warren.request", req.id))
	if req.sandbox != "" {
		span.SetAttributes(attribute.String("warren.sandbox", logged(req.sandbox, 64)))
	}
	if rec.code() >= 500 {
		span.SetStatus(codes.Error, "")
	}
	level := slog.LevelInfo
	if req.route == "healthz" || req.route == "metrics" {
		level = slog.LevelDebug
	}
	if !s.log.Enabled(r.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("request", req.id),
		slog.String("method", printable(r.Method, 16)),
		slog.String("path", logged(r.URL.EscapedPath(), 256)),
		slog.Int("status", rec.code()),
		slog.Int64("bytes", rec.bytes),
		slog.Duration("took", took),
		slog.String("user", printable(req.user, 64)),
		slog.String("remote", r.RemoteAddr),
	}
	if req.sandbox != "" {
		attrs = append(attrs, slog.String("sandbox", logged(req.sandbox, 64)))
	}
	if cut {
		attrs = append(attrs, slog.Bool("cut", true))
	}
	s.log.LogAttrs(r.Context(), level, "request", attrs...)
}

// judge decides what the caller of a request sees of an error, and logs what it does not see.
func (s *Server) judge(ctx context.Context, op string, err error) *wire.Fault {
	f := wire.Judge(err, wire.Audience{Operator: callerOf(ctx).Operator, Hide: s.opts.HidePaths, Op: op})
	requestOf(ctx).fault = f.Name
	if f.Reference != "" {
		req := requestOf(ctx)
		level := slog.LevelInfo
		if f.Name == "internal" {
			level = slog.LevelError
		}
		s.log.Log(ctx, level, "error", "reference", f.Reference, "request", req.id, "op", op, "sandbox", logged(req.sandbox, 64), "error", logged(err.Error(), 16<<10))
	}
	return &f
}

// logged is what callers have written, without what looks like a secret: people paste tokens where ids are wanted, and paths of programs in sandboxes have
// them.
func logged(s string, max int) string { return printable(audit.Mask(s), max) }

func printable(s string, max int) string { return wire.Printable(s, max) }

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// recorder notes how an answer goes.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (r *recorder) WriteHeader(status int) {
	if status >= 200 && r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	n, err := r.ResponseWriter.Write(b)
	r.bytes += int64(n)
	return n, err
}

// Flush is looked for by connect, which does not know of Unwrap.
func (r *recorder) Flush() {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	http.NewResponseController(r.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recorder) code() int {
	if r.status == 0 {
		return http.StatusOK
	}
	return r.status
}
