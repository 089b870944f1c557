//go:build linux

package gateway

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"
)

// noise is the same n bytes each time, of which none is like another.
func noise(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), n) }

func sumOf(r io.Reader) string {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return fmt.Sprintf("%x of %d bytes, %v", h.Sum(nil), n, err)
}

func endWrite(t *testing.T, c net.Conn) {
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
}

// TestHalfClose ends one direction of a connection before the other, on either side: what the other still carries arrives, and so does the end (B38).
func TestHalfClose(t *testing.T) {
	const size = 2 << 20
	want := sumOf(noise(size))
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.name("plain.lab", "11.1.1.2")
	heard := make(chan string, 1)
	l.serve("11.1.1.3:9000", func(c net.Conn) { // hears all before it says a word
		heard <- sumOf(c)
		io.Copy(c, noise(size))
	})
	l.serve("11.1.1.3:9001", func(c net.Conn) { // says all and ends before it hears a word
		io.Copy(c, noise(size))
		endWrite(t, c)
		heard <- sumOf(c)
	})
	gone := make(chan struct{}, 1)
	l.serve("11.1.1.2:80", func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		switch {
		case err != nil:
		case r.URL.Path == "/wait":
			heard <- "begun"
			io.Copy(io.Discard, c)
			gone <- struct{}{}
		default: // an answer whose end is that of the connection
			io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			io.Copy(c, noise(size))
		}
	})
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000, 9001]}\n  - {host: plain.lab, protocol: http, inspect: true}\n")
	said := func() string {
		select {
		case s := <-heard:
			return s
		case <-time.After(time.Minute):
			return "nothing, for a minute"
		}
	}
	c := in.connect(t, "raw.lab", 9000)
	if _, err := io.Copy(c, noise(size)); err != nil {
		t.Fatal(err)
	}
	endWrite(t, c)
	if got := said(); got != want {
		t.Errorf("a server that waits for the end heard %s, want %s", got, want)
	}
	if got := sumOf(c); got != want {
		t.Errorf("after its own end the client hears %s, want %s", got, want)
	}
	c = in.connect(t, "raw.lab", 9001)
	if got := sumOf(c); got != want {
		t.Errorf("of a server that ends first the client hears %s, want %s", got, want)
	}
	if _, err := io.Copy(c, noise(size)); err != nil {
		t.Fatal(err)
	}
	endWrite(t, c)
	if got := said(); got != want {
		t.Errorf("after its own end the server hears %s, want %s", got, want)
	}
	// Inspected: the end of the server's connection is that of its answer.
	c = in.connect(t, "plain.lab", 80)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: plain.lab\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := sumOf(res.Body); got != want {
		t.Errorf("an answer without a length: %s, want %s", got, want)
	}
	// A client that ends its half while it waits is taken to have gone, so that who gives a request up ends it at the server too.
	c = in.connect(t, "plain.lab", 80)
	io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: plain.lab\r\n\r\n")
	if got := said(); got != "begun" {
		t.Fatal(got)
	}
	endWrite(t, c)
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("a request goes on of which the client has gone")
	}
}

// counted counts what is read or written.
type counted struct {
	r io.Reader
	w io.Writer
	n atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n.Add(int64(n))
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n.Add(int64(n))
	return n, err
}

// stalls waits until nobody takes more, and returns how much that was.
func stalls(t *testing.T, n *atomic.Int64, size int64) int64 {
	t.Helper()
	last, since := n.Load(), time.Now()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if now := n.Load(); now != last || now == 0 {
			last, since = now, time.Now()
		}
		if last == size || time.Since(since) > 700*time.Millisecond {
			return last
		}
	}
	t.Fatalf("it goes on: %d bytes were taken", last)
	return 0
}

// TestSlowReader has one side of a connection stop reading in the midst of 64 MiB: the other has to wait, for the gateway holds no more than its buffers; then all
// arrives (B38).
func TestSlowReader(t *testing.T) {
	const size, begin = 64 << 20, 1 << 20
	want := sumOf(noise(size))
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.name("api.lab", "11.1.1.1")
	l.name("plain.lab", "11.1.1.2")
	var sent atomic.Pointer[counted]          // by whoever sends now
	read := make(chan func() string)          // by a server that is slow: what is left
	slow := func(r io.Reader) func() string { // reads the beginning, and later the rest
		h := sha256.New()
		n, err := io.CopyN(h, r, begin)
		return func() string {
			m, rerr := io.Copy(h, r)
			if err == nil {
				err = rerr
			}
			return fmt.Sprintf("%x of %d bytes, %v", h.Sum(nil), n+m, err)
		}
	}
	l.serve("11.1.1.3:9000", func(c net.Conn) {
		out := &counted{w: c}
		sent.Store(out)
		io.Copy(out, noise(size))
	})
	done := make(chan struct{})
	l.serve("11.1.1.3:9001", func(c net.Conn) {
		read <- slow(c)
		<-done
	})
	web := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			read <- slow(r.Body)
			<-done
			return
		}
		out := &counted{w: w}
		sent.Store(out)
		io.Copy(out, noise(size))
	})
	l.web("11.1.1.1:443", web, "api.lab")
	l.web("11.1.1.2:80", web)
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000, 9001]}\n  - {host: api.lab, inspect: true}\n  - {host: plain.lab, protocol: http, inspect: true}\n")
	client := in.client()
	client.Timeout = 0
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dial := func(t *testing.T, port uint16) net.Conn {
		a, err := in.lookup("raw.lab")
		if err != nil {
			t.Fatal(err)
		}
		c, err := in.dial(ctx, netip.AddrPortFrom(a, port))
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(4 * time.Minute))
		return c
	}
	held := func(t *testing.T, before uint64, n int64) {
		t.Helper()
		// The sockets of the server and both stacks have theirs too.
		if n > size/2 {
			t.Errorf("%d bytes were taken of which %d were read", n, begin)
		}
		if more := int64(inUse()) - int64(before); more > most {
			t.Errorf("%d bytes are in use", more)
		}
	}
	for name, from := range map[string]func(*testing.T) io.ReadCloser{
		"passed": func(t *testing.T) io.ReadCloser { return dial(t, 9000) },
		"https":  func(t *testing.T) io.ReadCloser { return get(ctx, t, client, "https://api.lab/") },
		"http":   func(t *testing.T) io.ReadCloser { return get(ctx, t, client, "http://plain.lab/") },
	} {
		t.Run("down/"+name, func(t *testing.T) {
			before := inUse()
			sent.Store(nil)
			r := from(t)
			defer r.Close()
			rest := slow(r)
			held(t, before, stalls(t, &sent.Load().n, size))
			if got := rest(); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
	for name, to := range map[string]func(*testing.T, io.Reader) error{
		"passed": func(t *testing.T, r io.Reader) error {
			c := dial(t, 9001)
			defer c.Close()
			_, err := io.Copy(c, r)
			endWrite(t, c)
			return err
		},
		"https": func(_ *testing.T, r io.Reader) error { return post(ctx, client, "https://api.lab/", r) },
		"http":  func(_ *testing.T, r io.Reader) error { return post(ctx, client, "http://plain.lab/", r) },
	} {
		t.Run("up/"+name, func(t *testing.T) {
			before := inUse()
			out := &counted{r: noise(size)}
			ended := make(chan error, 1)
			go func() { ended <- to(t, out) }()
			select {
			case rest := <-read:
				held(t, before, stalls(t, &out.n, size))
				if got := rest(); got != want {
					t.Errorf("%s, want %s", got, want)
				}
				done <- struct{}{}
			case <-time.After(time.Minute):
				t.Fatal("nothing arrives")
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func get(ctx context.Context, t *testing.T, client *http.Client, url string) io.ReadCloser {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return r.Body
}

func post(ctx context.Context, client *http.Client, url string, body io.Reader) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		return err
	}
	r, err := client.Do(req)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", r.Status)
	}
	return nil
}
