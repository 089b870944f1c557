package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
)

// ListenUnix listens on a unix socket that only the daemon's own user can open. A socket that a dead server left behind is
// replaced; one that answers gives [warren.ErrExists].
func (s *Server) ListenUnix(path string) (net.Listener, error) {
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("listen on %s: %w: there is something that is not a socket", path, warren.ErrExists)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("listen on %s: %w: another server answers there", path, warren.ErrExists)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("listen on %s: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	// Until here the umask decides who may connect; whoever slips in is asked who it is like all others.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return newGate(l, unixLimits()), nil
}

// TCPOptions say how to listen on TCP. Every request over TCP needs a token.
type TCPOptions struct {
	// CertFile and KeyFile are PEM files. They are read again when they change.
	CertFile, KeyFile string
	// Plaintext allows a listener that is not on loopback to go without TLS, such as behind a proxy that has it.
	Plaintext bool
	// MaxConns is how many connections may be open, and MaxPending how many of one address on which no token has been shown yet.
	// Those beyond are closed at once. 0 means a quarter and a 32nd of the files that the process may have open.
	MaxConns, MaxPending int
	// Open is for those who need not show a token: MaxPending does not count.
	Open bool
}

// ListenTCP listens on host:port. Who connects before the server serves waits.
func ListenTCP(address string, o TCPOptions) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w: want host:port", address, warren.ErrInvalid)
	}
	secure := o.CertFile != "" || o.KeyFile != ""
	if secure && (o.CertFile == "" || o.KeyFile == "") {
		return nil, fmt.Errorf("listen on %s: %w: TLS needs a certificate and its key", address, warren.ErrInvalid)
	}
	if !secure && !o.Plaintext {
		if err := loopbackOnly(host); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", address, err)
		}
	}
	var config *tls.Config
	if secure {
		c := &certificate{cert: o.CertFile, key: o.KeyFile}
		if _, err := c.get(nil); err != nil {
			return nil, fmt.Errorf("listen on %s: TLS certificate and key: %w", address, err)
		}
		config = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"h2", "http/1.1"}}
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	limits := tcpLimits()
	if o.MaxConns > 0 {
		limits.total = o.MaxConns
	}
	if o.MaxPending > 0 {
		limits.perSource = o.MaxPending
	}
	if o.Open {
		limits.perSource = 0
	}
	l = newGate(l, limits)
	if config != nil {
		l = tls.NewListener(l, config)
	}
	return l, nil
}

// loopbackOnly refuses a host that others can reach.
func loopbackOnly(host string) error {
	refuse := fmt.Errorf("%w: tokens would cross the network in the clear; give a certificate, or say that plain text is meant", warren.ErrInvalid)
	if host == "" {
		return refuse
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if !a.Unmap().IsLoopback() {
			return refuse
		}
	}
	return nil
}

// certificate is a pair of files that may be renewed while the server runs.
type certificate struct {
	cert, key string

	mu     sync.Mutex
	loaded *tls.Certificate
	stamp  [2]time.Time
	looked time.Time
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loaded != nil && time.Since(c.looked) < 10*time.Second {
		return c.loaded, nil
	}
	c.looked = time.Now()
	var stamp [2]time.Time
	for i, name := range []string{c.cert, c.key} {
		if info, err := os.Stat(name); err == nil {
			stamp[i] = info.ModTime()
		}
	}
	if c.loaded != nil && stamp == c.stamp {
		return c.loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		// Half of a renewal: the old pair serves until the new one is whole.
		if c.loaded != nil {
			return c.loaded, nil
		}
		return nil, err
	}
	c.loaded, c.stamp = &pair, stamp
	return c.loaded, nil
}
