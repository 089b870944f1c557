package secret

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
)

// Pair is a value and what to show in its place.
type Pair struct {
	Value       []byte
	Placeholder string
}

// Scrubber replaces values by their placeholders, in every form that [Forms] lists, by the placeholder in the same form. It
// never changes and may be used concurrently; make it once for a set of values, for it costs about 0.1 ms a value. Where several
// forms match, the leftmost counts, and the longest of those that begin together.
type Scrubber struct {
	m     *matcher
	near  *nearly
	with  []string
	which []Found // by text
	lower []string
}

// Found is where a value stands.
type Found struct {
	// Pair is the value's place among those that the scrubber was made of, Form the name of its form, At the offset.
	Pair int
	Form string
	At   int64
}

// MaxPairs bounds what one scrubber looks for; each value has some 10 to 40 forms.
const MaxPairs = 256

// NewScrubber returns a scrubber. Of two placeholders for one value, the first is shown. Values must pass [CheckValue].
func NewScrubber(pairs ...Pair) (*Scrubber, error) {
	if len(pairs) > MaxPairs {
		return nil, fmt.Errorf("%d secrets for one scrubber; %d at most", len(pairs), MaxPairs)
	}
	s := &Scrubber{}
	var texts, near []string
	seen := map[string]bool{}
	for i, p := range pairs {
		if err := CheckValue(p.Value); err != nil {
			return nil, err
		}
		for _, f := range forms(string(p.Value), p.Placeholder) {
			if !seen[f.Text] {
				seen[f.Text] = true
				texts = append(texts, f.Text)
				near = append(near, f.Text[:len(f.Text)-endOf(len(f.Text), len(p.Value))])
				s.lower = append(s.lower, strings.ToLower(f.Text))
				s.with = append(s.with, f.with)
				s.which = append(s.which, Found{Pair: i, Form: f.Name})
			}
		}
	}
	s.m = newMatcher(texts)
	s.near = newNearly(texts, near, s.which)
	return s, nil
}

// nearly are texts without their ends, in the same order. Where one stands, nobody may see from what is handed on, and when, how much of the end is right:
// what may be the text waits until as many bytes have come as it has, right or wrong.
type nearly struct {
	*matcher
	// until is, by text, how many bytes have to be there: as many as the longest has of those that begin so.
	until []int
	which []Found
}

func newNearly(texts, near []string, which []Found) *nearly {
	n := &nearly{matcher: newMatcher(near), until: make([]int, len(near)), which: which}
	sorted := slices.Sorted(slices.Values(texts))
	for i, t := range near {
		// Those that begin with a text stand together.
		for at, _ := slices.BinarySearch(sorted, t); at < len(sorted) && strings.HasPrefix(sorted[at], t); at++ {
			n.until[i] = max(n.until[i], len(sorted[at]))
		}
	}
	return n
}

// waits returns how many bytes have to be there from a place in b on where some of them stand, but for those of a pair, and how long the shortest of them is.
func (n *nearly) waits(b []byte, at, but int) (until, shortest int) {
	rest := b[at:]
	for i := n.head[n.hash(rest[0], rest[1], rest[2])]; i > 0; i = n.nextHead[i-1] {
		t := n.texts[i-1]
		if n.which[i-1].Pair == but || len(t) > len(rest) || string(rest[:len(t)]) != t {
			continue
		}
		if until = max(until, n.until[i-1]); shortest == 0 || len(t) < shortest {
			shortest = len(t)
		}
	}
	return until, shortest
}

// endOf is how much of the end of a form has to be wrong for the rest to be nearly the value: what is a quarter of the value in it, or eight bytes if
// that is more, or half of a short value. Tokens of one kind begin alike, some for more than half of their length.
func endOf(form, value int) int {
	end := max(value/4, min(8, value/2))
	return (form*end + value - 1) / value
}

// String returns text with every value replaced, and how many there were.
func (s *Scrubber) String(text string) (string, int) {
	b := []byte(text)
	at, which := s.m.find(b, 0)
	if at < 0 {
		return text, 0
	}
	var out strings.Builder
	from, n := 0, 0
	for ; at >= 0; at, which = s.m.find(b, from) {
		out.Write(b[from:at])
		out.WriteString(s.with[which])
		from = at + len(s.m.texts[which])
		n++
	}
	out.Write(b[from:])
	return out.String(), n
}

// Reader returns what src gives with every value replaced. It hands on at once what cannot belong to a value, unless it begins
// like one for all but its end: at most as many bytes as the longest form has, less one, wait for more. When src fails other than by its end, these are lost.
func (s *Scrubber) Reader(src io.Reader) *Reader {
	return &Reader{m: s.m, near: s.near, with: s.with, src: src}
}

// Search calls found for every value in what src gives.
func (s *Scrubber) Search(src io.Reader, found func(Found)) error {
	buf := make([]byte, max(256<<10, 2*s.m.max))
	base, end := int64(0), 0 // of buf in src
	for {
		n, err := io.ReadFull(src, buf[end:])
		end += n
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return err
		}
		limit, pos := end, 0
		if !last {
			limit = s.m.alive(buf[:end], 0)
		}
		for {
			at, which := s.m.find(buf[:end], pos)
			if at < 0 || at >= limit {
				break
			}
			f := s.which[which]
			f.At = base + int64(at)
			found(f)
			pos = at + len(s.m.texts[which])
			if !last {
				limit = s.m.alive(buf[:end], pos)
			}
		}
		if last {
			return nil
		}
		pos = max(pos, limit)
		base += int64(pos)
		end = copy(buf, buf[pos:end])
	}
}

// Reader is a stream that a [Scrubber] cleans.
type Reader struct {
	m    *matcher
	with []string // nil: the first text that is found ends the stream
	// found, when with is nil, makes the error.
	found func(which int) error
	src   io.Reader
	buf   []byte
	pos   int // before it all was handed on or is in out
	end   int
	out   string // replacement to hand on
	ready int    // buf[pos:ready] can be handed on
	err   error  // of src
	count atomic.Int64

	// missed, when not nil, is told of the text that came without its end, and of the one that stands there in its place, or -1. Its error ends the stream.
	missed func(which, whole int) error
	near   *nearly // nil: texts are no secrets, and what is held back may be seen
	judged int     // missed knows of what begins before it in buf
}

// Count returns how many values were replaced up to now.
func (r *Reader) Count() int64 { return r.count.Load() }

const readSize = 32 << 10

// Read implements [io.Reader].
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for empty := 0; ; {
		switch {
		case r.out != "":
			n := copy(p, r.out)
			r.out = r.out[n:]
			return n, nil
		case r.ready > r.pos:
			n := copy(p, r.buf[r.pos:r.ready])
			r.pos += n
			return n, nil
		case r.step():
			continue
		case r.err != nil:
			return 0, r.err
		}
		if n := r.fill(); n == 0 && r.err == nil {
			if empty++; empty >= 100 {
				return 0, io.ErrNoProgress
			}
		}
	}
}

// step decides about what is in the buffer, and says whether it came further.
func (r *Reader) step() bool {
	if r.pos == r.end {
		return false
	}
	b := r.buf[:r.end]
	limit := len(b)
	switch {
	case r.err == nil:
		limit = r.held(b, r.m.alive(b, r.pos))
	case !errors.Is(r.err, io.EOF):
		return false
	}
	if err := r.judge(limit); err != nil {
		r.err = err
		r.pos, r.ready = r.end, 0
		return false
	}
	at, which := r.m.find(b, r.pos)
	switch {
	case at == r.pos && at < limit && r.with == nil:
		r.err = r.found(which)
		r.pos, r.ready = r.end, 0
		return false
	case at == r.pos && at < limit:
		r.out = r.with[which]
		r.pos += len(r.m.texts[which])
		r.count.Add(1)
		return true
	case at >= 0 && at < limit:
		r.ready = at
	default:
		r.ready = limit
	}
	return r.ready > r.pos
}

// held returns from where b is held back, not after limit: before a text that stands there but for its end while not as many bytes have come as it has.
func (r *Reader) held(b []byte, limit int) int {
	if r.near == nil {
		return limit
	}
	for from := max(r.pos, len(b)-r.m.max+1); ; {
		at, _ := r.near.find(b, from)
		if at < 0 || at > limit {
			return limit
		}
		// Whoever has sent the whole of a text is shown that anyway.
		but := -1
		if whole := r.m.at(b, at); whole >= 0 {
			but = r.near.which[whole].Pair
		}
		if until, shortest := r.near.waits(b, at, but); at+until > len(b) {
			// A longer text that this one is in was held back from its beginning on, and whether it goes on tells of this one.
			return min(limit, r.m.alive(b[:at+shortest], r.pos))
		}
		from = at + 1
	}
}

// judge tells missed of the texts that begin in the buffer before limit, where it is known whether they go on, and do not.
func (r *Reader) judge(limit int) error {
	if r.missed == nil {
		return nil
	}
	b := r.buf[:r.end]
	for from := max(r.judged, r.pos); ; {
		at, which := r.near.find(b, from)
		if at < 0 || at >= limit {
			r.judged = max(from, limit)
			return nil
		}
		whole := r.m.at(b, at)
		if err := r.missed(which, whole); err != nil {
			return err
		}
		if from = at + len(r.near.texts[which]); whole >= 0 {
			from = max(from, at+len(r.m.texts[whole]))
		}
	}
}

func (r *Reader) fill() int {
	if r.buf == nil {
		r.buf = make([]byte, max(readSize, 2*r.m.max))
	}
	r.judged = max(r.judged-r.pos, 0)
	r.end = copy(r.buf, r.buf[r.pos:r.end])
	r.pos, r.ready = 0, 0
	n, err := r.src.Read(r.buf[r.end:])
	r.end += n
	r.err = err
	return n
}

// ErrOpaque is what a body matches that is compressed or coded in a way that is not looked into.
var ErrOpaque = errors.New("the body is encoded in a way that cannot be searched for secrets")

// unreadable are the headers by which a client asks for answers that a [Scrubber] cannot read: coded ones, and parts, of which each may hold
// less of a value than is looked for.
var unreadable = []string{"Accept-Encoding", "TE", "A-IM", "Sec-WebSocket-Extensions", "Range", "If-Range", "Request-Range"}

// RestrictEncoding asks for answers that a [Scrubber] can read: no compression, no transfer codings, no WebSocket
// compression, no parts. It belongs on every request that a value was put into; the client's transport must not add its own.
func RestrictEncoding(h http.Header) {
	for _, name := range unreadable {
		deleteHeader(h, name)
	}
	h["Accept-Encoding"] = []string{"identity"}
}

// Header replaces values in the names and values of headers, and returns how many there were. A name that held one is dropped.
func (s *Scrubber) Header(h http.Header) (n int) {
	for _, name := range slices.Collect(maps.Keys(h)) {
		if _, found := s.String(name); found > 0 {
			delete(h, name)
			n += found
			continue
		}
		// Servers may change the case of a name.
		if s.foldedName(name) {
			delete(h, name)
			n++
			continue
		}
		for i, v := range h[name] {
			clean, found := s.String(v)
			if found > 0 {
				h[name][i] = clean
				n += found
			}
		}
	}
	return n
}

// foldedName says whether a header's name holds a value in another case.
func (s *Scrubber) foldedName(name string) bool {
	if len(name) < s.m.window {
		return false
	}
	lower := strings.ToLower(name)
	for _, t := range s.lower {
		if len(t) <= len(lower) && strings.Contains(lower, t) {
			return true
		}
	}
	return false
}

// Tell is what [Scrubber.Response] tells of an answer. Either may be nil.
type Tell struct {
	// Found is told how many values were replaced: once for what is known before the body, and once at its end.
	Found func(n int64)
	// Near is told of a pair of which a form came but for its end, and then something else. What may be a value is held back until
	// more has come, which can be seen: who has the server say what he likes can guess its beginning letter by letter. The end is held
	// back whole, so that he has to guess all of it at once, and comes by here each time.
	// An error ends the body.
	Near func(pair int) error
}

func (s *Scrubber) misses(tell Tell) func(which, whole int) error {
	if tell.Near == nil {
		return nil
	}
	return func(which, whole int) error {
		if whole >= 0 && s.which[whole].Pair == s.which[which].Pair {
			return nil // it is the value, in the same or another form
		}
		return tell.Near(s.which[which].Pair)
	}
}

// Response replaces values in an answer: status line, headers, trailers, and the body as it is read. The body loses its
// stated length, and gzip, which is opened on the way. Any other encoding, and a part of an answer (206), is an error that matches
// [ErrOpaque]: the answer must not be handed on. After a switch of protocols (101) nothing can be replaced, for lengths are part of the frames; there
// the stream ends with an error where a value would appear. Headers of answers before it (1xx) are [Scrubber.Header]'s.
func (s *Scrubber) Response(res *http.Response, tell Tell) error {
	found := tell.Found
	if found == nil {
		found = func(int64) {}
	}
	status, n := s.String(res.Status)
	res.Status = status
	n += s.Header(res.Header)
	n += s.Header(res.Trailer)
	if n > 0 {
		found(int64(n))
	}
	if res.StatusCode == http.StatusSwitchingProtocols {
		s.guardUpgrade(res, found, s.misses(tell))
		return nil
	}
	if res.StatusCode == http.StatusPartialContent {
		return fmt.Errorf("%w: a part of it, though the whole was asked for", ErrOpaque)
	}
	if res.Body == nil || res.Body == http.NoBody {
		return nil
	}
	if bodiless(res) {
		// What it says of a body is of another answer's. Over HTTP/2 it can have trailers all the same, and they come with its end.
		s.cleanBody(res, res.Body, found, tell)
		return nil
	}
	if len(res.TransferEncoding) > 1 || len(res.TransferEncoding) == 1 && !strings.EqualFold(res.TransferEncoding[0], "chunked") {
		return fmt.Errorf("%w: transfer coding %.60q", ErrOpaque, res.TransferEncoding)
	}
	src := io.Reader(res.Body)
	switch coding := contentCoding(res.Header); coding {
	case "":
	case "gzip":
		src = &lazyGzip{src: res.Body}
		deleteHeader(res.Header, "Content-Encoding")
		res.Uncompressed = true
	default:
		return fmt.Errorf("%w: content encoding %.60q, though identity was asked for", ErrOpaque, coding)
	}
	deleteHeader(res.Header, "Content-Length")
	res.ContentLength = -1
	s.cleanBody(res, src, found, tell)
	return nil
}

// bodiless says whether an answer has no body, whatever its header says.
func bodiless(res *http.Response) bool {
	head := res.Request != nil && res.Request.Method == http.MethodHead
	return head || res.StatusCode == http.StatusNoContent || res.StatusCode == http.StatusNotModified
}

// cleanBody replaces values in what src, the body as it can be read, gives, and at its end in the trailers.
func (s *Scrubber) cleanBody(res *http.Response, src io.Reader, found func(n int64), tell Tell) {
	r := s.Reader(src)
	r.missed = s.misses(tell)
	res.Body = &body{Reader: r, Closer: res.Body, end: func() error {
		if n := r.Count() + int64(s.Header(res.Trailer)); n > 0 {
			found(n)
		}
		return nil
	}}
}

// ErrShown is what a stream ends with in which a value appeared that cannot be replaced.
var ErrShown = errors.New("a secret appeared in a stream in which it cannot be replaced")

func (s *Scrubber) guardUpgrade(res *http.Response, found func(int64), missed func(which, whole int) error) {
	both, ok := res.Body.(io.ReadWriteCloser)
	if !ok {
		return
	}
	r := &Reader{m: s.m, near: s.near, src: both, found: func(int) error { found(1); return ErrShown }, missed: missed}
	res.Body = struct {
		io.Reader
		io.Writer
		io.Closer
	}{r, both, both}
}

// body is a reader in the place of another, with something to do at its end.
type body struct {
	io.Reader
	io.Closer
	end  func() error
	done bool
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) && !b.done {
		b.done = true
		if eerr := b.end(); eerr != nil {
			b.Reader = failed{eerr}
			return n, eerr
		}
	}
	return n, err
}

type failed struct{ err error }

func (f failed) Read([]byte) (int, error) { return 0, f.err }
