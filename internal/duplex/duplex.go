// Package duplex answers requests of HTTP/1.1 before they have ended, and leaves their connections in order.
//
// net/http allows that since [http.ResponseController.EnableFullDuplex], but expects the handler to have read the whole body
// when it returns. Otherwise it meets the body's end afterwards, begins to watch the connection for the client's leaving, finds
// itself watching as it waits for the next request, and panics: the connection is cut under a client who may have sent that
// request already (golang.org/issue/68560). A goroutine that still reads the body can even end the process by that panic.
package duplex

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	// settle is how long the head of an answer waits for the end of its request, which is on its way more often than not.
	settle = 5 * time.Millisecond
	// parting is how long a client may go on sending after the answer. Cut at once, it would often lose the answer.
	parting = 500 * time.Millisecond
)

// errOver is what reads get after the answer.
var errOver = errors.New("the request has been answered")

// Body is the body of a request that may be answered before it has ended.
type Body struct {
	body io.ReadCloser
	ctl  *http.ResponseController
	end  chan struct{} // closed at the end of the body

	mu      sync.Mutex
	ended   bool
	over    bool
	reading bool
	read    *sync.Cond
}

// Enable lets a request be answered before it has ended. The writer and the request that it returns are those to go on with, and
// a handler defers [Body.Finish].
func Enable(w http.ResponseWriter, r *http.Request) (http.ResponseWriter, *http.Request, *Body) {
	b := &Body{body: r.Body, ctl: http.NewResponseController(w), end: make(chan struct{})}
	b.read = sync.NewCond(&b.mu)
	if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		// Other protocols have streams for that; what is not there has ended.
		b.done()
		return w, r, b
	}
	// Where the writer cannot, the answer waits for the request as it always did.
	_ = b.ctl.EnableFullDuplex()
	r = r.WithContext(r.Context())
	r.Body = b
	return &writer{ResponseWriter: w, body: b}, r, b
}

// writer writes the answer.
type writer struct {
	http.ResponseWriter
	body  *Body
	began bool
}

// head goes before the head of the answer.
func (w *writer) head() {
	if !w.began {
		w.began = true
		w.body.answer(w.Header())
	}
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	if status >= 200 {
		w.head()
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(p []byte) (int, error) {
	w.head()
	return w.ResponseWriter.Write(p)
}

// FlushError is found by http.ResponseController.
func (w *writer) FlushError() error {
	w.head()
	return w.body.ctl.Flush()
}

// Unwrap is found by http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (b *Body) done() {
	if !b.ended {
		b.ended = true
		close(b.end)
	}
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	b.mu.Lock()
	for b.reading && !b.over {
		b.read.Wait()
	}
	if b.over {
		b.mu.Unlock()
		return 0, errOver
	}
	b.reading = true
	b.mu.Unlock()
	n, err := b.body.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading = false
	if err == io.EOF {
		b.done()
	}
	b.read.Broadcast()
	return n, err
}

// Close implements io.Closer. What the client still sends is left to the end of the handler.
func (b *Body) Close() error { return nil }

// answer tells a client whose request has not ended when its answer begins that the connection ends with the answer.
func (b *Body) answer(h http.Header) {
	t := time.NewTimer(settle)
	defer t.Stop()
	select {
	case <-b.end:
		return
	default:
	}
	select {
	case <-b.end:
	case <-t.C:
		h.Set("Connection", "close")
	}
}

// Finish ends the handling of the request. Nothing reads its body any more when it returns; a handler defers it.
func (b *Body) Finish() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return
	}
	b.over = true
	b.read.Broadcast()
	if b.reading {
		_ = b.ctl.SetReadDeadline(time.Unix(1, 0))
		for b.reading {
			b.read.Wait()
		}
	}
	if !b.ended {
		// For net/http, which reads on in the body: a little is taken, so that the answer arrives.
		_ = b.ctl.SetReadDeadline(time.Now().Add(parting))
	}
}
