// Package framing looks at how HTTP/1 requests follow each other on a connection, before net/http does.
//
// Where a request ends is the one thing that two programs must not understand differently: what one takes for a body, the other may take for a
// request. net/http settles the doubtful cases, as RFC 9112 lets it, and says nothing of them afterwards. Here they are findings: a request is
// framed in one of three plain ways (nothing, one length, chunks), each line ends in one way, and whoever handles a request can ask
// whether the one that net/http has understood is the one that was said.
package framing

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// Error says in which way requests on a connection are framed so that two programs might disagree.
type Error struct{ What string }

// Error implements error.
func (e *Error) Error() string { return "the framing of the request: " + e.What }

func faulty(format string, args ...any) *Error { return &Error{fmt.Sprintf(format, args...)} }

const (
	// maxLine bounds what is kept of a line: the whole of a request's first, and of a header as much as a length or an encoding may need.
	maxLine = 512 << 10
	// MaxHeaders is how many lines the header of a request may have. Each costs its reader several times its size.
	MaxHeaders = 1000
	// maxChunkLine bounds the line before a chunk.
	maxChunkLine = 256
	// maxTrailer bounds what follows the last chunk.
	maxTrailer = 64 << 10
)

// Conn is a connection on which requests come. It hands on what it reads unchanged, up to the end of the head that has a fault.
type Conn struct {
	net.Conn
	opaque atomic.Bool
	// handed says that what is answered now is a request that somebody was given, and refused is called with what is answered to none.
	handed  atomic.Bool
	refused func(Refusal)

	mu    sync.Mutex
	s     scanner
	heads []head
	// fault ends what is read, once what is before it has been.
	fault error
	// left says that the client has ended its half within a head in which nothing is wrong so far.
	left bool
}

// head is a request's, as far as it matters.
type head struct {
	method, target string
	fault          *Error
}

// New returns a connection that looks at what comes over c.
func New(c net.Conn) *Conn { return &Conn{Conn: c} }

// Read implements [net.Conn].
func (c *Conn) Read(b []byte) (int, error) {
	if c.opaque.Load() {
		return c.Conn.Read(b)
	}
	c.mu.Lock()
	fault := c.fault
	c.mu.Unlock()
	if fault != nil {
		return 0, fault
	}
	n, err := c.Conn.Read(b)
	if c.opaque.Load() {
		return n, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m, fault := c.s.scan(b[:n], func(h head) { c.heads = append(c.heads, h) })
	if err != nil {
		c.left = c.s.begun() && c.s.head.fault == nil
	}
	if fault != nil {
		c.fault = fault
		if m == 0 {
			return 0, fault
		}
		return m, nil
	}
	return n, err
}

// Refusal is the answer of a server to what it does not take for a request.
type Refusal struct {
	// Status and Text are of its first line, such as 400 and "400 Bad Request: malformed Host header".
	Status int
	Text   string
	// Method and Target are those of the request as it was seen here, if it was.
	Method, Target string
	// Fault is what is wrong with its framing, if that is what is wrong with it.
	Fault error
	// Left says that the client has gone before its head was whole, and that nothing is wrong with what was there of it.
	Left bool
}

// OnRefusal has f called before the server writes an answer to what it has given nobody to handle. It is called before the connection is served.
func (c *Conn) OnRefusal(f func(Refusal)) { c.refused = f }

// Fault is what is wrong with what came, nil if nothing is so far. Nothing that follows is handed on, which a server may take for its client's leaving.
func (c *Conn) Fault() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fault
}

// Handed says that a request is being handled, until the connection is [Conn.Idle].
func (c *Conn) Handed() { c.handed.Store(true) }

// Idle says that the last request has been answered.
func (c *Conn) Idle() { c.handed.Store(false) }

// Write implements [net.Conn].
func (c *Conn) Write(b []byte) (int, error) {
	if c.refused != nil && !c.opaque.Load() && !c.handed.Swap(true) {
		c.mu.Lock()
		var r Refusal
		if len(c.heads) > 0 {
			// It is the first of those that came; what is wrong with the connection may be of a later one.
			r.Method, r.Target = c.heads[0].method, c.heads[0].target
			if f := c.heads[0].fault; f != nil {
				r.Fault = f
			}
		} else {
			r.Fault, r.Left = c.fault, c.left
		}
		c.mu.Unlock()
		line, _, _ := strings.Cut(string(b[:min(len(b), 200)]), "\r\n")
		_, r.Text, _ = strings.Cut(line, " ")
		fmt.Sscan(r.Text, &r.Status)
		c.refused(r)
	}
	return c.Conn.Write(b)
}

// Opaque says that what comes from now on is no HTTP any more.
func (c *Conn) Opaque() { c.opaque.Store(true) }

// Check says whether the next request that came is one of this method and this target, and is framed as it should be. It is called once for each
// request, in their order; an error means that nothing of the request may go on, nor anything that follows it.
func (c *Conn) Check(method, target string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.heads) == 0 {
		return faulty("there is one more than came")
	}
	h := c.heads[0]
	c.heads[0] = head{} // which may be long
	if c.heads = c.heads[1:]; len(c.heads) == 0 {
		c.heads = nil
	}
	switch {
	case h.fault != nil:
		return h.fault
	case h.method != method || h.target != target:
		return faulty("its first line was understood in two ways")
	}
	return nil
}

// CloseWrite ends the sending half.
func (c *Conn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Conn.Close()
}

// state is what a scanner expects next.
type state int

const (
	between    state = iota // the first line of a request
	header                  // a line of its header
	body                    // bytes of a body with a length, or of a chunk
	chunkEnd                // the end of the line behind a chunk
	chunkLine               // the line before one
	trailer                 // a line behind the last
	everything              // nothing more can be told
)

// scanner follows requests through a stream.
type scanner struct {
	state state
	line  []byte // so far
	long  int    // of the line, in all
	last  byte   // of what came of it before
	cr    bool   // before the end of it
	left  int64  // of body
	chunk bool   // body is a chunk's
	empty int    // lines before a request
	tail  int    // bytes of the trailer

	head              head
	old               bool // HTTP/1.0
	lines             int
	lengths, encoding []string
}

// scan looks at the next bytes. It returns how many may be handed on, and why no more.
func (s *scanner) scan(b []byte, begun func(head)) (n int, fault error) {
	for n < len(b) {
		if s.state == everything {
			return n, faulty("more follows what could not be told apart")
		}
		if s.state == body {
			take := min(s.left, int64(len(b)-n))
			s.left -= take
			n += int(take)
			if s.left == 0 {
				s.state = between
				if s.chunk {
					s.state = chunkEnd
				}
			}
			continue
		}
		rest := b[n:]
		end := bytes.IndexByte(rest, '\n')
		part := rest
		if end >= 0 {
			part = rest[:end+1]
		}
		s.long += len(part)
		if room := s.room() - len(s.line); room > 0 {
			s.line = append(s.line, part[:min(len(part), room)]...)
		}
		if end < 0 {
			s.last = part[len(part)-1]
			if s.state == chunkLine && s.long > maxChunkLine || s.state == chunkEnd && s.long > 2 || s.state == trailer && s.tail+s.long > maxTrailer {
				return n, faulty("the line of a chunk does not end")
			}
			return len(b), nil
		}
		if len(part) > 1 {
			s.last = part[len(part)-2]
		}
		s.cr = s.last == '\r'
		h, err := s.next()
		if cap(s.line) > keptLine {
			s.line = nil // a connection that waits shall not hold what was long once
		}
		s.line, s.long, s.last = s.line[:0], 0, 0
		if err != nil {
			return n, err
		}
		n += len(part)
		if h != nil {
			begun(*h)
		}
	}
	return n, nil
}

// keptLine is how much room for lines a connection keeps between them.
const keptLine = 4 << 10

// begun says whether a head is on its way, and not whole.
func (s *scanner) begun() bool { return s.state == header || s.state == between && len(s.line) > 0 }

// room is how much of a line is kept.
func (s *scanner) room() int {
	if s.state == between {
		return maxLine
	}
	return 1 << 10
}

// next takes the line that has come to its end. It returns the head that is complete with it.
func (s *scanner) next() (*head, error) {
	text := strings.TrimSuffix(strings.TrimSuffix(string(s.line), "\n"), "\r")
	bare := !s.cr || strings.ContainsAny(text, "\r\x00") // net/http looks at the rest of a long line
	switch s.state {
	case between:
		// Some clients end a body with an empty line that they do not count.
		if text == "" && s.empty < 2 {
			s.empty++
			return nil, nil
		}
		*s = scanner{state: header, line: s.line, long: s.long, cr: s.cr}
		s.first(text, bare)
	case header:
		if text != "" || s.long > len(s.line) {
			s.field(text, bare)
			return nil, nil
		}
		if bare {
			s.wrong("a line ends without a carriage return")
		}
		h := s.head
		s.judge()
		h.fault = s.head.fault
		if h.fault != nil {
			s.state = everything
		}
		return &h, nil
	case chunkEnd:
		if text != "" || bare {
			return nil, faulty("a chunk is followed by something else than the end of its line")
		}
		s.state = chunkLine
	case chunkLine:
		n, err := chunkLength(text)
		if bare || s.long > maxChunkLine {
			err = faulty("the line of a chunk is too long, or ends or is broken oddly")
		}
		if err != nil {
			return nil, err
		}
		s.state, s.left, s.chunk = body, n, true
		if n == 0 {
			s.state, s.tail = trailer, 0
		}
	case trailer:
		if s.tail += s.long; bare || s.tail > maxTrailer {
			return nil, faulty("what follows the last chunk is too long, or ends or is broken oddly")
		}
		if text == "" {
			s.state, s.empty = between, 0
		}
	}
	return nil, nil
}

// wrong notes the first fault of a head. It quotes nothing but lengths and encodings: what is no request may be a secret of somebody's, and what is wrong is put on record.
func (s *scanner) wrong(format string, args ...any) {
	if s.head.fault == nil {
		s.head.fault = faulty(format, args...)
	}
}

// first takes the line that a request begins with.
func (s *scanner) first(text string, bare bool) {
	method, rest, _ := strings.Cut(text, " ")
	target, version, ok := strings.Cut(rest, " ")
	s.head = head{method: method, target: target}
	switch {
	case bare:
		s.wrong("a line ends without a carriage return, or has one inside")
	case !ok || method == "" || target == "" || strings.ContainsAny(version, " \t"):
		s.wrong("its first line is not a method, a target and a version")
	case version == "HTTP/1.0":
		s.old = true
	case version != "HTTP/1.1":
		s.wrong("its version is neither HTTP/1.1 nor HTTP/1.0")
	}
}

// field takes a line of a header.
func (s *scanner) field(text string, bare bool) {
	if s.lines++; s.lines == MaxHeaders+1 {
		s.wrong("its header has more than %d lines", MaxHeaders)
	}
	name, value, ok := strings.Cut(text, ":")
	value = strings.Trim(value, " \t")
	switch {
	case bare:
		s.wrong("a line ends without a carriage return, or has one or a null inside")
	case strings.HasPrefix(text, " ") || strings.HasPrefix(text, "\t"):
		s.wrong("a line of its header goes on on the next one")
	case !ok || name == "" || strings.ContainsFunc(name, notToken):
		s.wrong("line %d of its header begins with no name and colon", s.lines)
	case strings.EqualFold(name, "Content-Length"):
		if len(s.lengths) < 2 {
			s.lengths = append(s.lengths, value)
		}
	case strings.EqualFold(name, "Transfer-Encoding"):
		if len(s.encoding) < 2 {
			s.encoding = append(s.encoding, value)
		}
	}
}

// notToken refuses what no name of a header has.
func notToken(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("!#$%&'*+-.^_`|~", r))
}

// judge decides how the body of a request is framed.
func (s *scanner) judge() {
	s.empty = 0
	switch {
	case len(s.lengths) > 0 && len(s.encoding) > 0:
		s.wrong("it has both a Content-Length and a Transfer-Encoding; send one of them")
	case len(s.lengths) > 1:
		s.wrong("it has several Content-Lengths; send one")
	case len(s.encoding) > 1:
		s.wrong("it has several Transfer-Encodings; send one, which is chunked")
	case len(s.encoding) == 1 && s.old:
		s.wrong("a Transfer-Encoding in HTTP/1.0, which has none; send HTTP/1.1 or a Content-Length")
	case len(s.encoding) == 1:
		if !strings.EqualFold(s.encoding[0], "chunked") {
			s.wrong("its Transfer-Encoding is %.20q; only chunked is understood alike by all", s.encoding[0])
		}
		s.state = chunkLine
	case len(s.lengths) == 1:
		n, err := CheckLength(s.lengths[0])
		if err != nil {
			s.wrong("%s", err.What)
		}
		s.state, s.left, s.chunk = body, n, false
		if n == 0 {
			s.state = between
		}
	default:
		s.state = between
	}
}

// CheckLength returns the number in a Content-Length, which is digits alone.
func CheckLength(text string) (int64, *Error) {
	if text == "" || len(text) > 18 || strings.ContainsFunc(text, func(r rune) bool { return r < '0' || r > '9' }) {
		return 0, faulty("its Content-Length is %.20q, which is no number of bytes", text)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, faulty("its Content-Length is %.20q, which is no number of bytes", text)
	}
	return n, nil
}

// chunkLength returns the length that the line before a chunk gives.
func chunkLength(text string) (int64, error) {
	digits, more, extended := strings.Cut(text, ";")
	if extended {
		digits = strings.TrimRight(digits, " \t")
	}
	if digits == "" || len(digits) > 15 || strings.ContainsFunc(digits, notHex) || strings.ContainsFunc(more, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return 0, faulty("the length of a chunk is no number in hexadecimal digits")
	}
	return strconv.ParseInt(digits, 16, 64)
}

func notHex(r rune) bool {
	return !('0' <= r && r <= '9' || 'a' <= r && r <= 'f' || 'A' <= r && r <= 'F')
}

// IsFault says whether an error, of a body that was read, is that its framing has a fault, and returns that.
func IsFault(err error) (*Error, bool) {
	var e *Error
	return e, errors.As(err, &e)
}
