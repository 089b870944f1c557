package channel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// ErrRefused says that nothing listens on the port that was dialled.
var ErrRefused = errors.New("connection refused")

// Host is the host's end of a channel, for drivers whose process holds it themselves. What comes from the guest is
// hostile: it may say anything, and gets no more than the streams that the host opened.
type Host struct {
	session *yamux.Session
	conn    *frameConn
}

// NewHost begins a channel on a connection to a guest.
func NewHost(conn io.ReadWriteCloser) (*Host, error) {
	c := YamuxConfig()
	c.MaxStreamWindowSize = 1 << 20
	fc := &frameConn{ReadWriteCloser: conn}
	session, err := yamux.Client(fc, c)
	if err != nil {
		return nil, err
	}
	go func() {
		// A guest opens no streams. One that does has been replaced by something else.
		if _, err := session.AcceptStream(); err == nil {
			session.Close()
		}
	}()
	return &Host{session: session, conn: fc}, nil
}

// Close ends the channel and every connection on it.
func (h *Host) Close() error { return h.session.Close() }

// Done is closed when the channel has ended.
func (h *Host) Done() <-chan struct{} { return h.session.CloseChan() }

// Dial opens a connection to a port of the sandbox. One on which nothing listens gives [ErrRefused]. The connection
// outlives ctx.
func (h *Host) Dial(ctx context.Context, port uint16) (*Conn, error) {
	s, err := h.session.OpenStream()
	if err != nil {
		return nil, err
	}
	c := &Conn{Stream: s, host: h}
	stop := context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })
	status, err := handshake(s, port)
	if !stop() {
		c.Close()
		return nil, ctx.Err()
	}
	switch {
	case err != nil:
	case status == Connected:
		return c, nil
	case status == Refused:
		err = ErrRefused
	default:
		err = fmt.Errorf("the guest answered %d to a dial of port %d", status, port)
	}
	c.Close()
	return nil, err
}

func handshake(s *yamux.Stream, port uint16) (byte, error) {
	head := [4]byte{0: Version}
	binary.BigEndian.PutUint16(head[2:], port)
	if _, err := s.Write(head[:]); err != nil {
		return 0, err
	}
	var status [1]byte
	_, err := io.ReadFull(s, status[:])
	return status[0], err
}

// Conn is a connection to a port of a sandbox.
type Conn struct {
	*yamux.Stream
	host *Host
	once sync.Once
}

// CloseWrite ends the direction to the sandbox; what comes from there can still be read.
func (c *Conn) CloseWrite() error { return c.Stream.Close() }

// Close ends both directions. Yamux has no call for that, and without one the guest's end would block for ever on a stream
// that nobody reads.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.Stream.Close()
		c.host.conn.sendReset(c.StreamID())
		// What has arrived is let go, so that the closed stream holds no memory until it times out.
		_ = c.SetDeadline(time.Unix(1, 0))
		_, _ = io.Copy(io.Discard, c.Stream)
		c.Shrink()
	})
	return nil
}

var _ net.Conn = (*Conn)(nil)

// frameConn is a connection that carries yamux frames and can send one of its own between two others. It writes a frame at once where yamux
// writes its header and its body, which would wake the other end twice.
type frameConn struct {
	io.ReadWriteCloser
	mu   sync.Mutex
	body uint32            // how much of the current frame's body is still to come
	head [yamuxHeader]byte // of that frame, not yet written
	kept bool              // whether head is
	buf  []byte            // for a frame, reused
	todo [][]byte          // frames to send before the next one
}

// joinedSize is up to which size a header and a body are put together.
const joinedSize = 16 << 10

const (
	yamuxHeader     = 12
	yamuxDataFrame  = 0
	yamuxWindow     = 1 // frame type: window update
	yamuxFlagReset  = 8
	yamuxFlagsAt    = 2
	yamuxStreamAt   = 4
	yamuxBodySizeAt = 8
)

// Write sends a header or a body; yamux writes them one by one, each whole.
func (f *frameConn) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.body == 0 && len(b) == yamuxHeader && b[1] == yamuxDataFrame {
		if f.body = binary.BigEndian.Uint32(b[yamuxBodySizeAt:]); f.body > 0 {
			copy(f.head[:], b)
			f.kept = true
			return len(b), nil
		}
	}
	if err := f.send(b); err != nil {
		return 0, err
	}
	f.body -= min(f.body, uint32(len(b)))
	return len(b), f.flush()
}

// send writes b, behind the header that was kept.
func (f *frameConn) send(b []byte) error {
	if f.kept {
		f.kept = false
		if len(b) <= joinedSize {
			f.buf = append(append(f.buf[:0], f.head[:]...), b...)
			b = f.buf
		} else if _, err := f.ReadWriteCloser.Write(f.head[:]); err != nil {
			return err
		}
	}
	_, err := f.ReadWriteCloser.Write(b)
	return err
}

func (f *frameConn) flush() error {
	for f.body == 0 && len(f.todo) > 0 {
		b := f.todo[0]
		f.todo = f.todo[1:]
		if _, err := f.ReadWriteCloser.Write(b); err != nil {
			return err
		}
	}
	return nil
}

func (f *frameConn) sendReset(stream uint32) {
	b := make([]byte, yamuxHeader)
	b[1] = yamuxWindow
	binary.BigEndian.PutUint16(b[yamuxFlagsAt:], yamuxFlagReset)
	binary.BigEndian.PutUint32(b[yamuxStreamAt:], stream)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.todo = append(f.todo, b)
	_ = f.flush() // a connection that is gone takes its streams with it
}
