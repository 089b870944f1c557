//go:build linux

package gateway

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"testing"
	"time"
)

// The client's stack is in the same process and costs as much as the gateway's.

// BenchmarkDown and BenchmarkUp carry bytes on one flow that is passed through.
func BenchmarkDown(b *testing.B) {
	benchmarkStream(b, func(c net.Conn) { io.Copy(c, zeros{}) }, func(c net.Conn, n int64) error { _, err := io.CopyN(io.Discard, c, n); return err })
}

func BenchmarkUp(b *testing.B) {
	benchmarkStream(b, func(c net.Conn) { io.Copy(io.Discard, c) }, func(c net.Conn, n int64) error {
		_, err := io.CopyN(c, zeros{}, n)
		return err
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func benchmarkStream(b *testing.B, serve func(net.Conn), use func(net.Conn, int64) error) {
	l := newLab(b)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", serve)
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}")
	a, err := in.lookup("raw.lab")
	if err != nil {
		b.Fatal(err)
	}
	c, err := in.dial(b.Context(), netip.AddrPortFrom(a, 9000))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	const size = 1 << 20
	b.SetBytes(size)
	for b.Loop() {
		if err := use(c, size); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRequest makes requests that take 5 ms at the server, on a connection that is kept.
func BenchmarkRequest(b *testing.B) {
	for _, kind := range []string{"native", "passed", "inspected"} {
		b.Run(kind, func(b *testing.B) {
			l := newLab(b)
			l.name("api.lab", "11.1.1.1")
			l.web("11.1.1.1:443", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Millisecond) }), "api.lab")
			rules := "allow: [api.lab]"
			if kind == "inspected" {
				rules = "allow:\n  - {host: api.lab, inspect: true}"
			}
			client := l.sandbox("one", rules).client()
			if kind == "native" {
				client.Transport.(*http.Transport).DialContext = l.native("11.1.1.1:443")
			}
			for b.Loop() {
				r, err := client.Get("https://api.lab/v1/x")
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
		})
	}
}

// BenchmarkConnect opens connections that are passed through, and says one byte each way.
func BenchmarkConnect(b *testing.B) {
	l := newLab(b)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", func(c net.Conn) {
		io.CopyN(c, c, 1)
	})
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}")
	a, err := in.lookup("raw.lab")
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 1)
	for b.Loop() {
		c, err := in.dial(b.Context(), netip.AddrPortFrom(a, 9000))
		if err == nil {
			_, err = c.Write(buf)
		}
		if err == nil {
			_, err = io.ReadFull(c, buf)
		}
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// TestNothingStays attaches and detaches cards with flows on them: nothing of them is left.
func TestNothingStays(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", echo)
	before := 0
	for round := range 20 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			in := l.sandboxFor(t, fmt.Sprint("s", round), "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}")
			a, err := in.lookup("raw.lab")
			if err != nil {
				t.Fatal(err)
			}
			for range 20 {
				c, err := in.dial(t.Context(), netip.AddrPortFrom(a, 9000))
				if err != nil {
					t.Fatal(err)
				}
				c.Write([]byte("x"))
				io.ReadFull(c, make([]byte, 1))
			}
			if round%2 == 0 || overDevice {
				l.g.Detach(in.id)
			} // else it ends with the sandbox's end
		})
		if round == 4 {
			before = settled(0)
		}
	}
	for end := time.Now().Add(10 * time.Second); len(l.g.Sandboxes()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the cards of sandboxes that have ended are still there: %v", l.g.Sandboxes())
		}
	}
	if after := settled(before); after > before+20 {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines after 5 cards, %d after 20:\n%s", before, after, buf[:runtime.Stack(buf, true)])
	}
}

// settled waits until the number of goroutines no longer falls, or is at most most.
func settled(most int) int {
	last, same := runtime.NumGoroutine(), 0
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end) && same < 10 && last > most; time.Sleep(50 * time.Millisecond) {
		now := runtime.NumGoroutine()
		if now < last {
			same = 0
		} else {
			same++
		}
		last = now
	}
	return last
}
