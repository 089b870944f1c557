package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// errSilent ends a request that its guest leaves without an answer.
var errSilent = errors.New("the guest does not answer")

// patient carries requests to a guest. Some calls last: the guest takes a process's input when the process does. So a request
// that has waited for long is not given up, but the guest is asked whether it is there, again and again; who is root inside
// may have stopped it, and then no answer ever comes. What has begun to answer is left alone.
type patient struct {
	next http.RoundTripper
	wait time.Duration
}

func (s *Server) patient(next http.RoundTripper) patient { return patient{next, s.opts.GuestWait} }

// RoundTrip implements http.RoundTripper.
func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	// Ends with the request, whose context the answer's body needs.
	ctx, cancel := context.WithCancelCause(r.Context())
	w := &wait{}
	w.mu.Lock() // until there is a timer
	w.timer = time.AfterFunc(p.wait, func() {
		if w.off() {
			return
		}
		if err := p.ask(ctx); err != nil && !w.off() {
			cancel(errSilent)
			return
		}
		w.restart(p.wait)
	})
	w.mu.Unlock()
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &waitedBody{r.Body, w, p.wait}
	}
	res, err := p.next.RoundTrip(r)
	w.end()
	if err != nil {
		if context.Cause(ctx) == errSilent {
			err = errSilent
		}
		cancel(nil)
		return nil, err
	}
	return res, nil
}

// ask asks a guest for its health, over a connection that is free or a new one.
func (p patient) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.wait)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/health", nil)
	if err != nil {
		return err
	}
	res, err := p.next.RoundTrip(r)
	if err == nil {
		res.Body.Close()
		return nil
	}
	if ctx.Err() == nil {
		return nil // an end, or a refusal: the request itself learns of that
	}
	return err
}

// wait is the time for which a request waits for its guest, not that in which the guest waits for the request.
type wait struct {
	mu     sync.Mutex
	timer  *time.Timer
	caller bool // the rest of the body has yet to come
	over   bool
}

func (w *wait) off() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over || w.caller
}

func (w *wait) restart(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over && !w.caller {
		w.timer.Reset(d)
	}
}

func (w *wait) forCaller(yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.caller = yes
}

func (w *wait) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.timer.Stop()
}

// waitedBody is the body of a request.
type waitedBody struct {
	io.ReadCloser
	w    *wait
	wait time.Duration
}

// Read implements io.Reader.
func (b *waitedBody) Read(p []byte) (int, error) {
	b.w.forCaller(true)
	n, err := b.ReadCloser.Read(p)
	b.w.forCaller(false)
	b.w.restart(b.wait)
	return n, err
}
