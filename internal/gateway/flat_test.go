//go:build linux

package gateway

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestFlat makes many flows of all kinds, one after the other: what they took, goroutines and memory, is given back.
func TestFlat(t *testing.T) {
	flows := 10_000
	if testenv.Soak() {
		flows = 100_000
	}
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.name("api.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }), "api.lab")
	l.serve("11.1.1.3:9000", func(c net.Conn) {
		io.CopyN(c, c, 1)
	})
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}\n  - {host: api.lab, inspect: true}\n")
	// The test's side does not wait for what cannot come either: it would be that which is measured.
	linger := tcpip.TCPTimeWaitTimeoutOption(time.Millisecond)
	if err := in.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &linger); err != nil {
		t.Fatal(err)
	}
	raw, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	api, err := in.lookup("api.lab")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: in.roots}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return in.dial(ctx, netip.AddrPortFrom(api, 443))
	}}}
	one := func(i int) error {
		switch i % 20 {
		case 0:
			r, err := web.Get("https://api.lab/v1/x")
			if err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, r.Body)
			r.Body.Close()
			return err
		case 1:
			if c, err := in.dial(t.Context(), netip.AddrPortFrom(raw, 9001)); err == nil {
				c.Close()
				return fmt.Errorf("a port that is denied answers")
			}
			return nil
		case 2:
			_, err := in.lookup("evil.lab")
			if err == nil {
				return fmt.Errorf("a name that is denied has an address")
			}
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c, err := in.dial(ctx, netip.AddrPortFrom(raw, 9000))
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, err = io.ReadFull(c, make([]byte, 1))
		return err
	}
	const workers = 8
	rush := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make([]error, workers)
		for w := range workers {
			wg.Go(func() {
				for i := w; i < n && errs[w] == nil; i += workers {
					errs[w] = one(i)
				}
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				l.mu.Lock()
				defer l.mu.Unlock()
				for _, e := range l.entries {
					if e.Host == "raw.lab" && e.Port == 9000 && e.Reason != "" {
						t.Logf("%s: %s", e.Action, e.Reason)
					}
				}
				t.Fatal(err)
			}
		}
		l.mu.Lock()
		l.entries, l.dialled, l.asked = nil, nil, nil // the lab's own memory
		l.mu.Unlock()
	}
	use := func(most int) (goroutines int, heap uint64) {
		goroutines = settled(most)
		var m runtime.MemStats
		for range 2 { // what a pool holds goes with the second
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return goroutines, m.HeapAlloc
	}
	rush(1000)
	goroutines, heap := use(0)
	rush(flows)
	after, heapAfter := use(goroutines)
	t.Logf("%d goroutines and %d KiB after 1,000 flows, %d and %d KiB after %d more", goroutines, heap>>10, after, heapAfter>>10, flows)
	if after > goroutines+20 {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines after 1,000 flows, %d after %d more:\n%s", goroutines, after, flows, buf[:runtime.Stack(buf, true)])
	}
	// 400 bytes of each of the fewest would show.
	if heapAfter > heap+4<<20 {
		t.Errorf("%d KiB are in use after 1,000 flows, %d KiB after %d more", heap>>10, heapAfter>>10, flows)
	}
	card, err := l.g.card("one")
	if err != nil {
		t.Fatal(err)
	}
	card.mu.Lock()
	defer card.mu.Unlock()
	if len(card.flows) != 0 {
		t.Errorf("%d flows are left", len(card.flows))
	}
}
