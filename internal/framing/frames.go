package framing

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"sync"

	"golang.org/x/net/http2/hpack"
)

// Frames is a connection of HTTP/2 of which somebody wants to know what its server refuses by itself. It hands on all as it is.
//
// A server of HTTP/2 answers what breaks its rules with frames and tells nobody. They are seen here as it writes them: a stream that is reset, a connection that is
// given up, and an answer to a request that nobody has handled.
type Frames struct {
	net.Conn
	refused func(Refusal)

	mu sync.Mutex
	// begin is what the client said first.
	begin []byte
	// wrote says that the server did.
	wrote bool
	// answers counts those of handlers, by the statuses that the server has answers of its own with.
	answers map[int]int

	// Of the frame that is being written: its header, how much of it there is, and the beginning of what follows.
	head  [9]byte
	have  int
	left  int
	first []byte
	heads *hpack.Decoder
	// status is what the header says that is being written.
	status int
}

// preface is what a client begins with.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// statusMalformed and statusTooLarge are of the answers that a server gives without a handler.
const statusMalformed, statusTooLarge = 400, 431

// NewFrames returns a connection that looks at what a server of HTTP/2 writes to c, and calls f for each refusal.
func NewFrames(c *tls.Conn, f func(Refusal)) *Frames {
	w := &Frames{Conn: c, refused: f, answers: map[int]int{}}
	w.heads = hpack.NewDecoder(4096, func(h hpack.HeaderField) {
		if h.Name == ":status" {
			fmt.Sscan(h.Value, &w.status)
		}
	})
	return w
}

// TLS returns the connection below.
func (c *Frames) TLS() *tls.Conn { return c.Conn.(*tls.Conn) }

// Answering says that a handler is about to answer with a status.
func (c *Frames) Answering(status int) {
	if status == statusMalformed || status == statusTooLarge {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.answers[status]++
	}
}

// Read implements [net.Conn].
func (c *Frames) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	if more := len(preface) - len(c.begin); more > 0 {
		c.begin = append(c.begin, b[:min(n, more)]...)
	}
	return n, err
}

// Write implements [net.Conn].
func (c *Frames) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.wrote = true
	found := c.scan(b)
	c.mu.Unlock()
	for _, r := range found {
		c.refused(r)
	}
	return c.Conn.Write(b)
}

// Close implements [net.Conn]. What is no HTTP/2 from its first byte on is closed without a word.
func (c *Frames) Close() error {
	c.mu.Lock()
	odd := !c.wrote && !strings.HasPrefix(preface, string(c.begin))
	c.wrote = true
	c.mu.Unlock()
	if odd {
		c.refused(Refusal{Text: "what was said is no HTTP/2"})
	}
	return c.Conn.Close()
}

// The kinds of frames that are looked at.
const (
	frameHeaders      = 1
	frameReset        = 3
	frameGoAway       = 7
	frameContinuation = 9
)

// maxHead bounds what is kept of a frame.
const maxHead = 64 << 10

// scan looks at what is written next.
func (c *Frames) scan(b []byte) (found []Refusal) {
	for len(b) > 0 {
		if c.have < len(c.head) {
			n := copy(c.head[c.have:], b)
			c.have, b = c.have+n, b[n:]
			if c.have < len(c.head) {
				return found
			}
			c.left, c.first = int(c.head[0])<<16|int(c.head[1])<<8|int(c.head[2]), c.first[:0]
		}
		take := min(c.left, len(b))
		if c.wanted() && len(c.first)+take <= maxHead {
			c.first = append(c.first, b[:take]...)
		}
		c.left, b = c.left-take, b[take:]
		if c.left > 0 {
			return found
		}
		c.have = 0
		if r, is := c.frame(); is {
			found = append(found, r)
		}
	}
	return found
}

// wanted says whether the frame is of a kind that is looked at.
func (c *Frames) wanted() bool {
	switch c.head[3] {
	case frameHeaders, frameReset, frameGoAway, frameContinuation:
		return true
	}
	return false
}

// frame looks at one that has been written whole.
func (c *Frames) frame() (r Refusal, is bool) {
	switch kind, flags := c.head[3], c.head[4]; kind {
	case frameReset:
		return refusal(c.first, 0, "its stream was reset")
	case frameGoAway:
		return refusal(c.first, 4, "its connection was ended")
	case frameHeaders, frameContinuation:
		if kind == frameHeaders {
			c.status = 0
		}
		// A server of our own pads nothing and gives no priorities.
		if flags&(1<<3|1<<5) == 0 {
			c.heads.Write(c.first)
		}
		if flags&(1<<2) == 0 {
			return r, false // it goes on
		}
		c.heads.Close()
		if c.status != statusMalformed && c.status != statusTooLarge {
			return r, false
		}
		if c.answers[c.status] > 0 {
			c.answers[c.status]--
			return r, false
		}
		return Refusal{Status: c.status, Text: fmt.Sprintf("the server answered %d by itself", c.status)}, true
	}
	return r, false
}

// errorCodes are those of RFC 9113, section 7.
var errorCodes = []string{"NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED", "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL",
	"COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM", "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED"}

// refusal reads the code of an error, unless it is one with which a server ends what it has handled, or what comes after that.
func refusal(b []byte, at int, what string) (r Refusal, is bool) {
	if len(b) < at+4 {
		return r, false
	}
	code := binary.BigEndian.Uint32(b[at:])
	name := fmt.Sprintf("error %d", code)
	if code < uint32(len(errorCodes)) {
		name = errorCodes[code]
	}
	switch name {
	case "NO_ERROR", "INTERNAL_ERROR", "STREAM_CLOSED", "CANCEL":
		return r, false
	}
	return Refusal{Status: statusMalformed, Text: name + ", and " + what}, true
}
