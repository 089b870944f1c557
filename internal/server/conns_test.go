package server

import (
	"context"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// TestRoutesAreKnown keeps the table of routes to what those who look for doors try: the services of the contract and three paths. A new one belongs in
// TestEveryRouteAuthenticates, and in everyRoute of cmd/warren, too.
func TestRoutesAreKnown(t *testing.T) {
	s, err := New(Options{Engine: &engine.Engine{}, Metrics: http.NotFoundHandler()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Shutdown(context.Background())
	want := []string{"/v1/sandboxes/ ", "/healthz open", "/metrics "}
	services := warrenv1.File_warren_v1_warren_proto.Services()
	for i := range services.Len() {
		want = append(want, "/"+string(services.Get(i).FullName())+"/ ")
	}
	var have []string
	for _, r := range s.routes {
		have = append(have, r.path+" "+map[bool]string{true: "open"}[r.open])
	}
	slices.Sort(want)
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("the routes are\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

// TestGatePending cuts the connection of who never says who it is, and lets who has said it be.
func TestGatePending(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(inner, connLimits{total: 10, perSource: 2, pendingFor: 200 * time.Millisecond})
	defer g.Close()
	var accepted []net.Conn
	for range 2 {
		c, err := net.Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s, err := g.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		accepted = append(accepted, s)
	}
	placeOf(accepted[0]).known()
	placeOf(accepted[0]).known() // with each request
	accepted[1].SetReadDeadline(time.Now().Add(5 * time.Second))
	began := time.Now()
	if _, err := accepted[1].Read(make([]byte, 1)); err == nil || time.Since(began) > 4*time.Second {
		t.Errorf("nobody was authenticated, and after %v: %v", time.Since(began), err)
	}
	accepted[0].SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := accepted[0].Read(make([]byte, 1)); err == nil || !err.(net.Error).Timeout() {
		t.Errorf("somebody was authenticated: %v", err)
	}
	for range 2 {
		accepted[0].Close()
		accepted[1].Close()
	}
	if g.open != 0 || len(g.pending) != 0 {
		t.Errorf("after the end: %d open, pending %v", g.open, g.pending)
	}
}

// TestDefaultLimits leaves a reserve of descriptors when every connection needs two.
func TestDefaultLimits(t *testing.T) {
	n, tcp, unix := descriptors(), tcpLimits(), unixLimits()
	if n >= 1024 && 2*tcp.total+2*unix.total > n-n/8 {
		t.Errorf("of %d descriptors TCP may take 2*%d and the socket 2*%d", n, tcp.total, unix.total)
	}
	if tcp.perSource*4 > tcp.total*3 {
		t.Errorf("one address may take %d of %d connections without a token", tcp.perSource, tcp.total)
	}
}
