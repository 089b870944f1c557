package framing

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// Handshake carries out that of a TLS connection which a server has accepted, and returns what is to serve requests: the connection itself where
// HTTP/2 was agreed on, whose frames say their lengths, and else one that looks at their framing.
func Handshake(ctx context.Context, c *tls.Conn) (net.Conn, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) && plain.Conn != nil && asHTTP(plain.RecordHeader) {
			io.WriteString(plain.Conn, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n")
		}
		return nil, err
	}
	if c.ConnectionState().NegotiatedProtocol == "h2" {
		return c, nil
	}
	return &secure{New(c), c}, nil
}

// asHTTP says whether what should have been a TLS record is the beginning of a request.
func asHTTP(record [5]byte) bool {
	switch string(record[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		return true
	}
	return false
}

// secure tells net/http of the TLS below.
type secure struct {
	*Conn
	tls *tls.Conn
}

// ConnectionState is asked for by net/http.
func (s *secure) ConnectionState() tls.ConnectionState { return s.tls.ConnectionState() }

// Of returns what looks at the framing on a connection that a server has been given, nil if nothing does.
func Of(c net.Conn) *Conn {
	switch c := c.(type) {
	case *Conn:
		return c
	case *secure:
		return c.Conn
	}
	return nil
}

// Listener accepts connections on whose framing somebody looks. Handshakes of TLS are over when it has accepted them.
type Listener struct {
	net.Listener
	// handshake bounds how long one may take.
	handshake time.Duration
	conns     chan net.Conn
	failed    chan error
	done      chan struct{}
	once      sync.Once
}

// Listen accepts connections of l, which are TLS or not.
func Listen(l net.Listener, handshake time.Duration) *Listener {
	n := &Listener{Listener: l, handshake: handshake, conns: make(chan net.Conn), failed: make(chan error), done: make(chan struct{})}
	go n.run()
	return n
}

func (l *Listener) run() {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			select {
			case l.failed <- err:
				continue // whoever accepts knows which errors pass, and when to try again
			case <-l.done:
				return
			}
		}
		t, ok := c.(*tls.Conn)
		if !ok {
			l.hand(New(c))
			continue
		}
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), l.handshake)
			defer cancel()
			ready, err := Handshake(ctx, t)
			if err != nil {
				c.Close()
				return
			}
			l.hand(ready)
		}()
	}
}

func (l *Listener) hand(c net.Conn) {
	select {
	case l.conns <- c:
	case <-l.done:
		c.Close()
	}
}

// Accept implements [net.Listener].
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case err := <-l.failed:
		return nil, err
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}
