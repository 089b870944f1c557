package bench

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// slowAnswer is how long the server thinks about a request of the kind "slow".
const slowAnswer = 5 * time.Millisecond

// chunk is how much is written and read at a time where the speed of one flow is measured.
const chunk = 256 << 10

// task is what a client is told to do, on its standard input.
type task struct {
	// Op is "connect", "requests", "slow", "down", "up" or "hold".
	Op string
	// Addr is the server, by name or address. TLS says that HTTP over TLS is spoken with it, and bytes over TCP otherwise.
	Addr string
	TLS  bool
	// Name is the server's in its certificate, and Roots, in PEM form, who may sign that, besides those whom the system trusts.
	Name, Roots string
	// Count is how often, Workers how many at a time, and Bytes how much.
	Count, Workers int
	Bytes          int64
	// Own has the client be the server as well.
	Own bool
}

// outcome is what a client answers, on its standard output.
type outcome struct {
	Times sample
	// Took is how long all of it took.
	Took time.Duration
}

// GatewayClient does what it is told on in and answers on out. It runs in sandboxes and beside them, and is the same program in all
// places.
func GatewayClient(ctx context.Context, in io.Reader, out io.Writer) error {
	line := bufio.NewReader(in)
	text, err := line.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("it is started by warren bench gateway, which tells it what to do: %w", err)
	}
	var t task
	if err := json.Unmarshal(text, &t); err != nil {
		return fmt.Errorf("the task: %w", err)
	}
	if t.Own {
		s, err := serveBench()
		if err != nil {
			return err
		}
		defer s.close()
		raw, secure, err := s.listen("127.0.0.1:0", net.Listen)
		if err != nil {
			return err
		}
		t.Addr, t.Roots = raw, s.roots
		if t.TLS {
			t.Addr = secure
		}
	}
	c, err := newLoad(ctx, t)
	if err != nil {
		return err
	}
	var o outcome
	if t.Op == "hold" {
		release, err := c.hold(ctx)
		if err != nil {
			return err
		}
		defer release()
		if err := json.NewEncoder(out).Encode(o); err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, line) // until nobody needs them any more
		return err
	}
	o.Took, err = timed(func() (err error) {
		o.Times, err = c.do(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(o)
}

// loadClient carries a task out.
type loadClient struct {
	task
	addr string // resolved
	tls  *tls.Config
}

func newLoad(ctx context.Context, t task) (*loadClient, error) {
	host, port, err := net.SplitHostPort(t.Addr)
	if err != nil {
		return nil, err
	}
	// Once: how fast names are found is not what is measured.
	addrs, err := net.DefaultResolver.LookupIP(ctx, "ip4", host)
	if err != nil {
		return nil, err
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	pool.AppendCertsFromPEM([]byte(t.Roots))
	return &loadClient{task: t, addr: net.JoinHostPort(addrs[0].String(), port), tls: &tls.Config{ServerName: t.Name, RootCAs: pool, NextProtos: []string{"http/1.1"}}}, nil
}

// client has as many connections as there are workers, which it keeps or makes anew for each request.
func (c *loadClient) client(keep bool) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, c.addr)
		},
		TLSClientConfig: c.tls, DisableKeepAlives: !keep, MaxIdleConnsPerHost: max(c.Workers, c.Count), DisableCompression: true, WriteBufferSize: chunk, ReadBufferSize: chunk,
	}}
}

func (c *loadClient) get(ctx context.Context, hc *http.Client, path string) error {
	return c.ask(ctx, hc, http.MethodGet, path, nil, 0)
}

func (c *loadClient) ask(ctx context.Context, hc *http.Client, method, path string, body io.Reader, size int64) error {
	_, port, _ := net.SplitHostPort(c.addr)
	r, err := http.NewRequestWithContext(ctx, method, "https://"+net.JoinHostPort(c.Name, port)+path, body)
	if err != nil {
		return err
	}
	r.ContentLength = size
	res, err := hc.Do(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, res.Body, make([]byte, chunk))
	switch {
	case err != nil:
		return err
	case res.StatusCode != http.StatusOK:
		return fmt.Errorf("%s %s: %s", method, path, res.Status)
	case strings.HasPrefix(path, "/down") && n != c.Bytes:
		return fmt.Errorf("%d bytes came, want %d", n, c.Bytes)
	}
	return nil
}

func (c *loadClient) do(ctx context.Context) (sample, error) {
	switch {
	case c.Op == "connect" && c.TLS:
		hc := c.client(false)
		return c.each(1, func() error { return c.get(ctx, hc, "/small") })
	case c.Op == "connect":
		return c.each(1, func() error { return c.raw(ctx, 'e', 1, nil) })
	case c.Op == "requests":
		hc := c.client(true)
		return c.each(c.Workers, func() error { return c.get(ctx, hc, "/small") })
	case c.Op == "slow":
		hc := c.client(true)
		if err := c.get(ctx, hc, "/small"); err != nil {
			return nil, err
		}
		return c.each(1, func() error { return c.get(ctx, hc, "/slow") })
	case c.Op == "down" && c.TLS:
		hc := c.client(true)
		return c.warmed(func() error { return c.get(ctx, hc, "/small") }, func() error {
			return c.ask(ctx, hc, http.MethodGet, "/down?n="+strconv.FormatInt(c.Bytes, 10), nil, 0)
		})
	case c.Op == "up" && c.TLS:
		hc := c.client(true)
		return c.warmed(func() error { return c.get(ctx, hc, "/small") }, func() error {
			return c.ask(ctx, hc, http.MethodPost, "/up", io.LimitReader(zeros{}, c.Bytes), c.Bytes)
		})
	case c.Op == "down":
		return c.warmed(nil, func() error { return c.raw(ctx, 'd', c.Bytes, nil) })
	case c.Op == "up":
		return c.warmed(nil, func() error { return c.raw(ctx, 'u', c.Bytes, zeros{}) })
	}
	return nil, fmt.Errorf("no task %q", c.Op)
}

// warmed measures once what comes after.
func (c *loadClient) warmed(before, f func() error) (sample, error) {
	if before != nil {
		if err := before(); err != nil {
			return nil, err
		}
	}
	d, err := timed(f)
	return sample{d}, err
}

// each measures Count calls, by so many workers.
func (c *loadClient) each(workers int, f func() error) (sample, error) {
	times := make([]sample, workers)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for range c.Count / workers {
				d, err := timed(f)
				if err != nil {
					errs[w] = err
					return
				}
				times[w] = append(times[w], d)
			}
		})
	}
	wg.Wait()
	var all sample
	for _, t := range times {
		all = append(all, t...)
	}
	return all, errors.Join(errs...)
}

// raw does one thing on a connection of its own: a letter that says what, a number of bytes, the bytes one way, and at the end
// one byte from the server.
func (c *loadClient) raw(ctx context.Context, what byte, n int64, from io.Reader) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	return exchange(conn, what, n, from)
}

func exchange(conn net.Conn, what byte, n int64, from io.Reader) error {
	if _, err := conn.Write(binary.BigEndian.AppendUint64([]byte{what}, uint64(n))); err != nil {
		return err
	}
	buf := make([]byte, chunk)
	switch what {
	case 'd':
		if m, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(conn, n), buf); err != nil || m != n {
			return fmt.Errorf("%d of %d bytes came: %w", m, n, err)
		}
	case 'u':
		if _, err := io.CopyBuffer(struct{ io.Writer }{conn}, io.LimitReader(from, n), buf); err != nil {
			return err
		}
	}
	_, err := io.ReadFull(conn, buf[:1])
	return err
}

// hold opens Count connections on each of which something has been said, and keeps them.
func (c *loadClient) hold(ctx context.Context) (release func(), err error) {
	conns := make([]net.Conn, c.Count)
	release = func() {
		for _, conn := range conns {
			if conn != nil {
				conn.Close()
			}
		}
	}
	errs := make([]error, holders)
	var wg sync.WaitGroup
	for w := range holders {
		wg.Go(func() {
			for i := w; i < c.Count && errs[w] == nil; i += holders {
				conns[i], errs[w] = c.one(ctx)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// holders open the connections that are held.
const holders = 8

// one opens a connection to keep.
func (c *loadClient) one(ctx context.Context) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return nil, err
	}
	if !c.TLS {
		return conn, exchange(conn, 'h', 0, nil)
	}
	secure := tls.Client(conn, c.tls)
	_, port, _ := net.SplitHostPort(c.addr)
	if _, err := fmt.Fprintf(secure, "GET /small HTTP/1.1\r\nHost: %s\r\n\r\n", net.JoinHostPort(c.Name, port)); err != nil {
		return conn, err
	}
	res, err := http.ReadResponse(bufio.NewReader(secure), nil)
	if err != nil {
		return conn, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("the answer is %s", res.Status)
	}
	return secure, err
}

// zeros is a reader without end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// benchServer is what all clients speak to.
type benchServer struct {
	web   *http.Server
	roots string

	mu        sync.Mutex
	listeners []net.Listener
	conns     map[net.Conn]bool
}

// benchNames are those of its certificate.
var benchNames = []string{"raw.bench.test", "web.bench.test", "seen.bench.test"}

func serveBench() (*benchServer, error) {
	cert, roots, err := benchCertificate()
	if err != nil {
		return nil, err
	}
	s := &benchServer{roots: roots, conns: map[net.Conn]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("/small", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	mux.HandleFunc("/slow", func(w http.ResponseWriter, _ *http.Request) { time.Sleep(slowAnswer); io.WriteString(w, "ok") })
	mux.HandleFunc("/down", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.FormValue("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(zeros{}, n), make([]byte, chunk))
	})
	mux.HandleFunc("/up", func(_ http.ResponseWriter, r *http.Request) {
		io.CopyBuffer(struct{ io.Writer }{io.Discard}, r.Body, make([]byte, chunk))
	})
	s.web = &http.Server{Handler: mux, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}}}
	return s, nil
}

// listen serves bytes on one port and HTTP over TLS on another, and returns where.
func (s *benchServer) listen(address string, listen func(network, address string) (net.Listener, error)) (raw, secure string, err error) {
	r, err := listen("tcp", address)
	if err != nil {
		return "", "", err
	}
	t, err := listen("tcp", address)
	if err != nil {
		r.Close()
		return "", "", err
	}
	s.mu.Lock()
	s.listeners = append(s.listeners, r, t)
	s.mu.Unlock()
	go s.web.ServeTLS(t, "", "")
	go func() {
		for {
			c, err := r.Accept()
			if err != nil {
				return
			}
			go s.answer(c)
		}
	}()
	return r.Addr().String(), t.Addr().String(), nil
}

// answer is the other side of exchange.
func (s *benchServer) answer(c net.Conn) {
	s.mu.Lock()
	s.conns[c] = true
	s.mu.Unlock()
	defer func() {
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head); err != nil {
		return
	}
	n := int64(binary.BigEndian.Uint64(head[1:]))
	switch head[0] {
	case 'd':
		if _, err := io.CopyBuffer(struct{ io.Writer }{c}, io.LimitReader(zeros{}, n), make([]byte, chunk)); err != nil {
			return
		}
	case 'u':
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(c, n), make([]byte, chunk)); err != nil {
			return
		}
	}
	if _, err := c.Write([]byte{'k'}); err != nil {
		return
	}
	if head[0] == 'h' {
		io.Copy(io.Discard, c)
	}
}

func (s *benchServer) close() {
	s.web.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		l.Close()
	}
	for c := range s.conns {
		c.Close()
	}
}

func benchCertificate() (tls.Certificate, string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "warren bench"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: benchNames, NotBefore: root.NotBefore, NotAfter: root.NotAfter}
	der, err := x509.CreateCertificate(rand.Reader, leaf, root, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, "", err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: rootDER})), nil
}

// benchNameServer answers that every name is at one address. It understands no more of DNS than the gateway asks.
func benchNameServer(address string, ip net.IP) (net.PacketConn, error) {
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		return nil, err
	}
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			if a := nameAnswer(buf[:n], ip.To4()); a != nil {
				c.WriteTo(a, from)
			}
		}
	}()
	return c, nil
}

// nameAnswer answers one question, if it is one.
func nameAnswer(q []byte, ip []byte) []byte {
	if len(q) < 12 || q[2]&0x80 != 0 || binary.BigEndian.Uint16(q[4:]) != 1 {
		return nil
	}
	end := 12
	for end < len(q) && q[end] != 0 {
		end += 1 + int(q[end])
	}
	end += 5 // the root, type and class
	if end > len(q) {
		return nil
	}
	a := append([]byte{q[0], q[1], 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}, q[12:end]...)
	if binary.BigEndian.Uint16(q[end-4:]) == 1 { // A
		a[7] = 1
		a = append(a, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
		a = append(a, ip...)
	}
	return a
}
