package duplex

import (
	"net/http"
	"sync/atomic"
	"time"
)

// refusalTime is how long an answer of HTTP/2 that refuses a request may wait to be read.
const refusalTime = 10 * time.Second

// Refusals bounds the short answers of HTTP/2 that wait for their clients. A client that gives a stream no window would have its answer wait for ever, with all
// that the request has.
type Refusals struct {
	// Max is how many may wait at a time; those beyond are not given, and their streams are reset.
	Max     int64
	waiting atomic.Int64
}

// Waiting returns how many wait.
func (x *Refusals) Waiting() int64 { return x.waiting.Load() }

// Answer has write write an answer, and returns when it has gone out or is given up. Over HTTP/2 the request has no header and no URL from then on; it has to be
// the one that the server has made, since a copy keeps nothing from being kept.
func (x *Refusals) Answer(w http.ResponseWriter, r *http.Request, write func()) {
	if r.ProtoMajor == 1 {
		write()
		return
	}
	r.Header, r.URL, r.RequestURI = nil, nil, ""
	defer x.waiting.Add(-1)
	if x.waiting.Add(1) > x.Max {
		panic(http.ErrAbortHandler)
	}
	ctl := http.NewResponseController(w)
	_ = ctl.SetWriteDeadline(time.Now().Add(refusalTime))
	write()
	_ = ctl.Flush()
}
