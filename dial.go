package warren

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// dialUpgrade is the protocol of raw bytes to a port.
const dialUpgrade = "warren-tcp"

// Dial connects to a TCP port in the sandbox, on its loopback. The connection carries raw bytes both ways and, except through
// servers in between that know no better, has CloseWrite. A port on which nothing listens gives [ErrUnavailable].
func (s *Sandbox) Dial(ctx context.Context, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, &Error{Kind: "invalid", Op: "dial", ID: strconv.Itoa(port), Message: "a port is from 1 to 65535"}
	}
	conn, err := s.dial(ctx, port)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		var known *Error
		if errors.As(err, &known) {
			return nil, err
		}
		return nil, &Error{Kind: "unavailable", Op: "dial", ID: strconv.Itoa(port), Message: err.Error(), Err: err}
	}
	return conn, nil
}

func (s *Sandbox) dial(ctx context.Context, port int) (_ net.Conn, err error) {
	conn, err := s.c.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	if s.c.url.Scheme == "https" {
		config := s.c.tls.Clone()
		config.NextProtos = []string{"http/1.1"}
		secure := tls.Client(conn, config)
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		conn = secure
	}
	// Reading the answer ends with ctx.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	req, err := http.NewRequestWithContext(ctx, "GET", s.c.base+"/v1/sandboxes/"+url.PathEscape(string(s.ID))+"/dial/"+strconv.Itoa(port), nil)
	if err != nil {
		return nil, err
	}
	s.c.sign(req.Header)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", dialUpgrade)
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		defer res.Body.Close()
		if res.StatusCode/100 == 2 {
			return nil, fmt.Errorf("the server answered %s instead of switching to %s", res.Status, dialUpgrade)
		}
		return nil, plainError(res)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return &portConn{Conn: conn, r: r}, nil
}

// portConn gives what was read with the answer first.
type portConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *portConn) Read(b []byte) (int, error) {
	if c.r.Buffered() > 0 {
		return c.r.Read(b)
	}
	return c.Conn.Read(b)
}

// CloseWrite ends this side's bytes; the other's can still be read.
func (c *portConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}
