//go:build linux

package gateway

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// maxHello bounds what is read before a TLS client has said whom it wants to speak to.
const maxHello = 64 << 10

// helloTime bounds how long it may take to say it.
const helloTime = 10 * time.Second

// errHello is what ends the reading of a ClientHello once it is there.
var errHello = errors.New("the hello has been read")

// readHello reads a ClientHello with the standard library's parser, which refuses what is malformed: two names, two extensions of a
// kind, records of an odd version. It returns the name in its canonical form and all bytes that were read, which the
// receiver of the connection is still owed.
func readHello(c net.Conn) (name policy.Host, read []byte, err error) {
	c.SetReadDeadline(time.Now().Add(helloTime))
	defer c.SetReadDeadline(time.Time{})
	rec := &recorder{Conn: c}
	var sni string
	var versions []uint16
	err = tls.Server(rec, &tls.Config{
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			sni, versions = h.ServerName, h.SupportedVersions
			return nil, errHello
		},
	}).Handshake()
	read = rec.read.Bytes()
	if !errors.Is(err, errHello) {
		if err == nil {
			err = errors.New("no handshake")
		}
		return "", read, fmt.Errorf("not a TLS handshake: %w", err)
	}
	if newest(versions) < tls.VersionTLS12 {
		return "", read, errors.New("TLS older than 1.2")
	}
	if sni == "" {
		return "", read, errors.New("TLS without a server name")
	}
	if name, err = policy.ParseHost(sni); err != nil {
		return "", read, fmt.Errorf("TLS server name: %w", err)
	}
	if _, literal := name.Addr(); literal {
		return "", read, fmt.Errorf("TLS server name %s is an address", name)
	}
	return name, read, nil
}

func newest(versions []uint16) (v uint16) {
	for _, w := range versions {
		if w <= tls.VersionTLS13 {
			v = max(v, w)
		}
	}
	return v
}

// recorder keeps what is read of a connection, and writes nothing: the parser's alert is not for the client.
type recorder struct {
	net.Conn
	read bytes.Buffer
}

func (r *recorder) Read(b []byte) (int, error) {
	if r.read.Len() >= maxHello {
		return 0, errors.New("the ClientHello is too long")
	}
	n, err := r.Conn.Read(b[:min(len(b), maxHello-r.read.Len())])
	r.read.Write(b[:n])
	return n, err
}

func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }

func (r *recorder) Close() error { return nil }

// prefixed is a connection of which some bytes have been read already.
type prefixed struct {
	net.Conn
	first []byte
}

func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.first) > 0 {
		n := copy(b, p.first)
		p.first = p.first[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// CloseWrite ends the sending half.
func (p *prefixed) CloseWrite() error { return closeWrite(p.Conn) }

// closeWrite ends the sending half of a connection that knows halves, else the whole.
func closeWrite(c io.Closer) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}
