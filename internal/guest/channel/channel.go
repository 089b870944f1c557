// Package channel is the guest's end of the byte path between host and sandbox: one connection, multiplexed by yamux,
// whose streams each begin with a port. The guest's own port goes to its HTTP server; every other is dialled on the
// loopback interface.
//
// A stream begins with four bytes from the host: version 1, zero, and the port in big endian. The guest answers with
// one byte ([Connected], [Refused] or [BadRequest]); after Connected the stream carries bytes both ways, and each way
// ends by itself.
package channel

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// Version of the stream header.
const Version = 1

// Answers to a stream header.
const (
	Connected  = 0
	Refused    = 1
	BadRequest = 2
)

const (
	headerTime = 10 * time.Second
	dialTime   = 5 * time.Second
	// maxStreams bounds the open streams of a channel. The host is trusted to be reasonable, not to be free of bugs.
	maxStreams = 4096
)

// Config says where streams lead.
type Config struct {
	// Port is the port that Accept takes.
	Port uint16
	// Accept takes a connection to Port. It must not block.
	Accept func(net.Conn)
	// Dial connects to a port of the loopback; the default is [DialLoopback].
	Dial func(ctx context.Context, port uint16) (net.Conn, error)
}

// YamuxConfig is how both ends of a channel run yamux: without keepalives, since a sandbox may stand still for any
// time while it is paused, and patient for the same reason.
func YamuxConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = false
	c.ConnectionWriteTimeout = time.Hour
	c.StreamOpenTimeout = 0
	c.StreamCloseTimeout = 24 * time.Hour // a half-closed stream is in use
	c.LogOutput = io.Discard
	return c
}

// Serve carries streams over conn until it ends.
func Serve(conn io.ReadWriteCloser, c Config) error {
	if c.Dial == nil {
		c.Dial = DialLoopback
	}
	session, err := yamux.Server(&frameConn{ReadWriteCloser: conn}, YamuxConfig())
	if err != nil {
		return err
	}
	defer session.Close()
	slots := make(chan struct{}, maxStreams)
	for {
		s, err := session.AcceptStream()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		select {
		case slots <- struct{}{}:
			go func() {
				defer func() { <-slots }()
				c.stream(s)
			}()
		default:
			s.Close()
		}
	}
}

// DialLoopback connects to a port of the sandbox's own, on 127.0.0.1 or else on ::1.
func DialLoopback(ctx context.Context, port uint16) (net.Conn, error) {
	p := strconv.Itoa(int(port))
	conn, err := insist(ctx, net.JoinHostPort("127.0.0.1", p))
	if err == nil || ctx.Err() != nil {
		return conn, err
	}
	if v6, err := insist(ctx, net.JoinHostPort("::1", p)); err == nil {
		return v6, nil
	}
	return nil, err
}

// patience is how long a connection of the loopback may take before another is tried beside it, doubled each time. It is made at once, or refused, but for one
// case besides a server that is behind: a pause or a fork has the kernel begin to count the bytes of connections at another number, and it takes one from a port
// that a connection in TIME_WAIT still has for an old one of it, and does not answer (gVisor, for a minute). Another try has another port.
const patience = 200 * time.Millisecond

// insist connects by the first of some tries that comes through.
func insist(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	try := func() {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", address)
		select {
		case results <- result{conn, err}:
		case <-ctx.Done():
			if conn != nil {
				conn.Close()
			}
		}
	}
	go try()
	for wait := patience; ; wait *= 2 {
		select {
		case r := <-results:
			return r.conn, r.err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(wait):
			go try()
		}
	}
}

// stream serves one stream.
func (c Config) stream(s *yamux.Stream) {
	var head [4]byte
	_ = s.SetReadDeadline(time.Now().Add(headerTime))
	if _, err := io.ReadFull(s, head[:]); err != nil {
		s.Close()
		return
	}
	_ = s.SetReadDeadline(time.Time{})
	port := binary.BigEndian.Uint16(head[2:])
	if head[0] != Version || head[1] != 0 || port == 0 {
		answer(s, BadRequest)
		return
	}
	if port == c.Port && c.Accept != nil {
		if answer(s, Connected) {
			done := make(chan struct{})
			c.Accept(&streamConn{Stream: s, done: done})
			<-done // so that the stream counts as long as it is open
		}
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	conn, err := c.Dial(ctx, port)
	cancel()
	if err != nil {
		answer(s, Refused)
		return
	}
	if !answer(s, Connected) {
		conn.Close()
		return
	}
	splice(s, conn)
}

// answer sends the answer to a header and says whether the stream goes on.
func answer(s *yamux.Stream, b byte) bool {
	if _, err := s.Write([]byte{b}); err != nil || b != Connected {
		s.Close()
		return false
	}
	return true
}

// splice copies both ways until both have ended. yamux's Close closes one way only: it sends what TCP calls FIN, and
// reading goes on.
func splice(s *yamux.Stream, conn net.Conn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := io.Copy(conn, s)
		if half, ok := conn.(interface{ CloseWrite() error }); ok && err == nil {
			_ = half.CloseWrite()
		} else {
			conn.Close() // the writer inside is gone, or the host: nothing that is read now has a taker
		}
	})
	_, err := io.Copy(s, conn)
	s.Close()
	if err != nil {
		_ = s.SetReadDeadline(time.Unix(1, 0))
	}
	wg.Wait()
	conn.Close()
}

// streamConn is a stream as the HTTP server takes it.
type streamConn struct {
	*yamux.Stream
	once sync.Once
	done chan struct{}
}

// Close closes both ways: after it nobody reads, and the other end must not wait for a close of its own.
func (c *streamConn) Close() error {
	err := c.Stream.Close()
	_ = c.Stream.SetDeadline(time.Unix(1, 0))
	c.once.Do(func() { close(c.done) })
	return err
}

// CloseWrite closes one way, as a TCP connection does.
func (c *streamConn) CloseWrite() error { return c.Stream.Close() }
