package fake

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// conn is one end of a buffered connection in memory that knows half-close, which net.Pipe does not.
type conn struct {
	in, out *stream
	once    sync.Once
	onClose func()
}

// maxBuffer is how many unread bytes a stream holds before its writer waits.
const maxBuffer = 64 << 10

// pipe returns two connected ends.
func pipe() (a, b *conn) {
	x, y := newStream(), newStream()
	return &conn{in: x, out: y}, &conn{in: y, out: x}
}

func (c *conn) Read(p []byte) (int, error)  { return c.in.read(p) }
func (c *conn) Write(p []byte) (int, error) { return c.out.write(p) }

// CloseWrite tells the other end that nothing more comes.
func (c *conn) CloseWrite() error {
	c.out.finish()
	return nil
}

// Close ends both directions.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.out.finish()
		c.in.refuse()
		if c.onClose != nil {
			c.onClose()
		}
	})
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return addr{} }
func (c *conn) RemoteAddr() net.Addr { return addr{} }

func (c *conn) SetDeadline(t time.Time) error {
	c.in.rd.set(t, c.in)
	c.out.wd.set(t, c.out)
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.rd.set(t, c.in)
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.wd.set(t, c.out)
	return nil
}

type addr struct{}

func (addr) Network() string { return "fake" }
func (addr) String() string  { return "fake" }

// stream is one direction.
type stream struct {
	mu     sync.Mutex
	cond   sync.Cond
	buf    []byte
	eof    bool // the writer has finished
	gone   bool // the reader has closed
	rd, wd deadline
}

func newStream() *stream {
	s := &stream{}
	s.cond.L = &s.mu
	return s
}

type deadline struct {
	timer *time.Timer
	past  bool
	gen   int
}

func (d *deadline) set(t time.Time, s *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.gen++
	d.past = false
	if !t.IsZero() {
		if wait := time.Until(t); wait <= 0 {
			d.past = true
		} else {
			gen := d.gen
			d.timer = time.AfterFunc(wait, func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				if d.gen == gen {
					d.past = true
					s.cond.Broadcast()
				}
			})
		}
	}
	s.cond.Broadcast()
}

func (s *stream) read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.gone:
			return 0, net.ErrClosed
		case s.rd.past:
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case len(s.buf) > 0:
			n := copy(p, s.buf)
			if n == len(s.buf) {
				s.buf = s.buf[:0]
			} else {
				s.buf = s.buf[n:]
			}
			s.cond.Broadcast()
			return n, nil
		case s.eof:
			return 0, io.EOF
		}
		s.cond.Wait()
	}
}

var errReset = errors.New("connection reset by the other end")

func (s *stream) write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for {
		switch {
		case s.eof:
			return n, net.ErrClosed
		case s.wd.past:
			return n, os.ErrDeadlineExceeded
		case s.gone:
			return n, errReset
		case len(p) == 0:
			return n, nil
		case len(s.buf) < maxBuffer:
			k := min(len(p), maxBuffer-len(s.buf))
			s.buf = append(s.buf, p[:k]...)
			p = p[k:]
			n += k
			s.cond.Broadcast()
			continue
		}
		s.cond.Wait()
	}
}

// finish ends the stream for its reader, after what is buffered.
func (s *stream) finish() {
	s.mu.Lock()
	s.eof = true
	s.cond.Broadcast()
	s.mu.Unlock()
}

// refuse ends the stream for both sides at once.
func (s *stream) refuse() {
	s.mu.Lock()
	s.gone = true
	s.buf = nil
	s.cond.Broadcast()
	s.mu.Unlock()
}
