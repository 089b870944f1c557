package guest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/duplex"
	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// call is one call of a remote procedure.
type call struct {
	ctx  context.Context
	user *account.User
	// timeout is the client's Connect-Timeout-Ms; 0 means none.
	timeout time.Duration
	header  http.Header
}

// unary makes a handler of a procedure with one request and one response.
func unary[Req, Res any](s *Server, f func(*call, *Req) (*Res, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !accepts(w, r, wire.UnaryType) {
			return
		}
		res, err := func() (*Res, error) {
			c, cancel, err := s.newCall(r)
			if err != nil {
				return nil, err
			}
			defer cancel()
			body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
			if err != nil {
				return nil, wire.Errorf(wire.InvalidArgument, "read the request: %v", err)
			}
			if len(body) > maxBody {
				return nil, wire.Errorf(wire.ResourceExhausted, "the request is larger than %d bytes", maxBody)
			}
			req := new(Req)
			if err := wire.Unmarshal(body, req); err != nil {
				return nil, wire.Errorf(wire.InvalidArgument, "%v", err)
			}
			return f(c, req)
		}()
		if err != nil {
			writeError(w, asWire(err))
			return
		}
		body := wire.Append(nil, res)
		w.Header().Set("Content-Type", wire.UnaryType)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body) // the client may have gone
	}
}

// writeError answers a unary call with an error.
func writeError(w http.ResponseWriter, e *wire.Error) {
	w.Header().Set("Content-Type", wire.UnaryType)
	w.WriteHeader(e.Code.Status())
	_, _ = w.Write(wire.AppendError(nil, e))
}

// asWire gives an error its code.
func asWire(err error) *wire.Error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return wire.Errorf(wire.DeadlineExceeded, "the deadline has passed")
	case errors.Is(err, context.Canceled):
		return wire.Errorf(wire.Canceled, "the call was cancelled")
	}
	return wire.AsError(err)
}

// accepts refuses requests that are not POST, or of another content type or encoding.
func accepts(w http.ResponseWriter, r *http.Request, contentType string) bool {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
		return false
	}
	if !wire.ContentType(r.Header, contentType) {
		w.Header().Set("Accept-Post", contentType)
		w.WriteHeader(http.StatusUnsupportedMediaType)
		return false
	}
	name := "Content-Encoding"
	if contentType == wire.StreamType {
		name = "Connect-Content-Encoding"
	}
	if enc := r.Header.Get(name); enc != "" && enc != "identity" {
		e := wire.Errorf(wire.Unimplemented, "unknown compression %.20q: only identity is supported", enc)
		if contentType == wire.UnaryType {
			writeError(w, e)
		} else {
			w.Header().Set("Content-Type", wire.StreamType)
			_, _ = w.Write(wire.AppendEnd(nil, e))
		}
		return false
	}
	return true
}

// newCall reads what every call has in its headers.
func (s *Server) newCall(r *http.Request) (*call, context.CancelFunc, error) {
	timeout, err := wire.Timeout(r.Header)
	if err != nil {
		return nil, nil, err
	}
	u, err := s.userOf(r)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, timeout)
	}
	return &call{ctx: ctx, user: u, timeout: timeout, header: r.Header}, cancel, nil
}

// keepalive returns how long a stream may be silent before a keepalive event.
func (c *call) keepalive() time.Duration {
	n, err := strconv.Atoi(c.header.Get("Keepalive-Ping-Interval"))
	if err != nil || n <= 0 || n > 3600 {
		n = 90
	}
	return time.Duration(n) * time.Second
}

// stream sends the frames of a response.
type stream struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
}

// frames are buffers for sending; a silent stream holds none.
var frames = sync.Pool{New: func() any { return new([]byte) }}

// send sends a message at once.
func (st *stream) send(msg any) error {
	return st.write(func(dst []byte) []byte { return wire.AppendFrame(dst, msg) })
}

func (st *stream) write(appendTo func([]byte) []byte) error {
	buf := frames.Get().(*[]byte)
	defer frames.Put(buf)
	*buf = appendTo((*buf)[:0])
	// A client that takes nothing for that long is gone, whatever its connection says.
	_ = st.ctl.SetWriteDeadline(time.Now().Add(writeTime))
	if _, err := st.w.Write(*buf); err != nil {
		return err
	}
	return st.ctl.Flush()
}

// serverStream makes a handler of a procedure with one request and many responses.
func serverStream[Req any](s *Server, f func(*call, *Req, func(any) error) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.stream(w, r, func(c *call, st *stream, body io.Reader) error {
			data, err := wire.ReadFrame(body, maxBody)
			if errors.Is(err, io.EOF) {
				return wire.Errorf(wire.InvalidArgument, "the stream holds no request")
			}
			if err != nil {
				return err
			}
			if r.ContentLength < 0 {
				// Only at the end of the body does the HTTP server begin to watch for the client's leaving.
				go func() { _, _ = io.Copy(io.Discard, io.LimitReader(body, maxBody)) }()
			}
			req := new(Req)
			if err := wire.Unmarshal(data, req); err != nil {
				return wire.Errorf(wire.InvalidArgument, "%v", err)
			}
			return f(c, req, st.send)
		})
	}
}

// clientStream makes a handler of a procedure with many requests and one response.
func clientStream[Req, Res any](s *Server, f func(c *call, next func() (*Req, error)) (*Res, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.stream(w, r, func(c *call, st *stream, body io.Reader) error {
			res, err := f(c, func() (*Req, error) {
				data, err := wire.ReadFrame(body, maxBody)
				if err != nil {
					return nil, err
				}
				req := new(Req)
				if err := wire.Unmarshal(data, req); err != nil {
					return nil, wire.Errorf(wire.InvalidArgument, "%v", err)
				}
				return req, nil
			})
			if err != nil {
				return err
			}
			return st.send(res)
		})
	}
}

// stream runs a streaming call and ends its response.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, f func(*call, *stream, io.Reader) error) {
	if !accepts(w, r, wire.StreamType) {
		return
	}
	w, r, body := duplex.Enable(w, r)
	defer body.Finish()
	st := &stream{w: w, ctl: http.NewResponseController(w)}
	w.Header().Set("Content-Type", wire.StreamType)
	c, cancel, err := s.newCall(r)
	if err == nil {
		err = f(c, st, r.Body)
		if err != nil && c.ctx.Err() != nil && c.timeout > 0 && errors.Is(c.ctx.Err(), context.DeadlineExceeded) {
			err = c.ctx.Err()
		}
		cancel()
	}
	var e *wire.Error
	if err != nil {
		e = asWire(err)
	}
	_ = st.write(func(dst []byte) []byte { return wire.AppendEnd(dst, e) }) // the client may have gone
	_ = st.ctl.SetWriteDeadline(time.Time{})
}
