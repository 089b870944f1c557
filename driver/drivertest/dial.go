package drivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver/drivertest/peer"
)

var dialCases = []testCase{
	{name: "dial-guest-waits", sentence: "Dial of the guest's port waits until the guest accepts", run: testDialGuest},
	{name: "dial-context", sentence: "Dial ends when its context does, and the connection outlives the context", run: testDialContext},
	{name: "dial-closed-port", sentence: "Dial of a port on which nothing listens returns ErrUnavailable at once", run: testDialClosed},
	{name: "dial-missing", sentence: "Dial of a sandbox that does not exist returns ErrNotFound", run: testDialMissing},
	{name: "dial-dead", sentence: "Dial of a sandbox that has died returns ErrState", processes: true, run: testDialDead},
	{name: "dial-loopback", sentence: "Dial connects to the sandbox's loopback, IPv4 and IPv6", commands: true, run: testDialLoopback},
	{name: "dial-both-ways", sentence: "the connection carries bytes both ways", run: testDialBothWays},
	{name: "dial-half-close", sentence: "the connection knows half-close, from either side", run: testDialHalfClose},
	{name: "dial-many", sentence: "many connections at once carry each their own bytes", run: testDialMany},
	{name: "dial-big", sentence: "big transfers arrive whole, both ways", run: testDialBig},
	{name: "dial-stalled", sentence: "a connection that nobody reads holds up no other", run: testDialStalled},
	{name: "dial-peer-ends", sentence: "the connection ends when the listener ends it", run: testDialPeerEnds},
	{name: "dial-we-end", sentence: "the listener sees the end when the connection is closed", commands: true, run: testDialWeEnd},
	{name: "dial-sandbox-ends", sentence: "the connection ends when the sandbox is deleted", run: testDialSandboxEnds},
	{name: "dial-sandbox-dies", sentence: "the connection ends when the sandbox dies", processes: true, run: testDialSandboxDies},
}

// port is where the suite's listener answers.
const port = 4007

func testDialGuest(t *testing.T, c *ctx) {
	for range 3 {
		spec := c.spec()
		c.createSpec(spec)
		c.answers(c.d, spec.ID)
	}
}

func testDialContext(t *testing.T, c *ctx) {
	id := c.listening(port)
	ended, cancel := context.WithCancel(c)
	cancel()
	if conn, err := c.d.Dial(ended, id, warren.GuestPort); err == nil {
		conn.Close()
		t.Error("Dial with a context that had ended succeeded")
	} else if !errors.Is(err, context.Canceled) {
		t.Errorf("Dial with a context that had ended: %v", err)
	}
	ctx, cancel := context.WithCancel(c)
	conn, err := c.d.Dial(ctx, id, port)
	cancel()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	roundTrip(t, conn, "after the context")
}

// roundTrip sends words to an echo and wants them back.
func roundTrip(t testing.TB, conn net.Conn, words string) {
	t.Helper()
	if _, err := fmt.Fprintf(conn, "%s\n%s", peer.Echo, words); err != nil {
		t.Errorf("write: %v", err)
		return
	}
	got := make([]byte, len(words))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != words {
		t.Errorf("echo of %.40q: %.40q, %v", words, got, err)
	}
}

func testDialClosed(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	for _, port := range []uint16{1, 4008, 65535} {
		begin := time.Now()
		conn, err := c.d.Dial(c, id, port)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("Dial of closed port %d: %v, want ErrUnavailable", port, err)
		}
		if took := time.Since(begin); took > 20*time.Second {
			t.Errorf("Dial of closed port %d took %v", port, took)
		}
	}
}

func testDialMissing(t *testing.T, c *ctx) {
	for _, port := range []uint16{warren.GuestPort, 80} {
		if _, err := c.d.Dial(c, c.newID(), port); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("Dial of an id that never was, port %d: %v, want ErrNotFound", port, err)
		}
	}
	// Ids match in full.
	id := c.create()
	if _, err := c.d.Dial(c, id[:10], warren.GuestPort); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Dial of a prefix: %v, want ErrNotFound", err)
	}
}

func testDialDead(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	c.kill(id)
	for _, port := range []uint16{warren.GuestPort, 80} {
		if _, err := c.d.Dial(c, id, port); !errors.Is(err, warren.ErrState) {
			t.Errorf("Dial of a dead sandbox, port %d: %v, want ErrState", port, err)
		}
	}
}

func testDialLoopback(t *testing.T, c *ctx) {
	id := c.create(withProbe(t))
	for i, host := range []string{"127.0.0.1", "::1", "0.0.0.0"} {
		p := uint16(5000 + i)
		c.serve(id, host, p)
		roundTrip(t, c.dial(id, p), "hello "+host)
	}
}

func testDialBothWays(t *testing.T, c *ctx) {
	id := c.listening(port)
	conn := c.dial(id, port)
	roundTrip(t, conn, "hello")
	// Ping-pong: each piece is there before the next is sent.
	for i := range 200 {
		words := fmt.Sprintf("piece %d", i)
		got := make([]byte, len(words))
		if _, err := io.WriteString(conn, words); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != words {
			t.Fatalf("got %q, %v; want %q", got, err, words)
		}
	}
}

func closeWrite(t testing.TB, conn net.Conn) {
	t.Helper()
	w, ok := conn.(interface{ CloseWrite() error })
	if !ok {
		t.Fatalf("%T has no CloseWrite", conn)
	}
	if err := w.CloseWrite(); err != nil {
		t.Errorf("CloseWrite: %v", err)
	}
}

func testDialHalfClose(t *testing.T, c *ctx) {
	id := c.listening(port)

	// We end our side; the listener answers after that.
	conn := c.ask(id, port, peer.Sink)
	io.WriteString(conn, "some bytes")
	closeWrite(t, conn)
	answer, err := io.ReadAll(conn)
	sum, n, _ := peer.Sum(strings.NewReader("some bytes"))
	if want := fmt.Sprintf("%d %s\n", n, sum); err != nil || string(answer) != want {
		t.Errorf("after half-close: %q, %v; want %q", answer, err, want)
	}

	// The listener ends its side; ours still carries bytes.
	conn = c.ask(id, port, peer.Drain)
	if rest, err := io.ReadAll(conn); err != nil || len(rest) > 0 {
		t.Errorf("the listener's half-close: read %q, %v; want the end", rest, err)
	}
	if _, err := io.Copy(conn, peer.Pattern(1<<20)); err != nil {
		t.Errorf("write after the listener's half-close: %v", err)
	}
	closeWrite(t, conn)
}

func testDialMany(t *testing.T, c *ctx) {
	id := c.listening(port)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			conn, err := c.d.Dial(c, id, port)
			if err != nil {
				t.Errorf("Dial %d: %v", i, err)
				return
			}
			defer conn.Close()
			roundTrip(t, conn, strings.Repeat(fmt.Sprintf("connection %d, ", i), 500))
		})
	}
	wg.Wait()
}

func testDialBig(t *testing.T, c *ctx) {
	const size = 64 << 20
	id := c.listening(port)
	want, _, _ := peer.Sum(peer.Pattern(size))

	down := c.ask(id, port, fmt.Sprint(peer.Source, " ", size))
	got, n, err := peer.Sum(down)
	if err != nil || n != size || got != want {
		t.Errorf("from the sandbox: %d of %d bytes, sum right: %v, %v", n, size, got == want, err)
	}

	up := c.ask(id, port, peer.Sink)
	if _, err := io.Copy(up, peer.Pattern(size)); err != nil {
		t.Fatalf("to the sandbox: %v", err)
	}
	closeWrite(t, up)
	answer, err := io.ReadAll(up)
	if text := fmt.Sprintf("%d %s\n", size, want); err != nil || string(answer) != text {
		t.Errorf("to the sandbox: it got %q, %v; want %q", answer, err, text)
	}
}

func testDialStalled(t *testing.T, c *ctx) {
	id := c.listening(port)
	for range 4 {
		// More than any buffer on the way; nobody reads it.
		c.ask(id, port, fmt.Sprint(peer.Source, " ", 64<<20))
	}
	roundTrip(t, c.dial(id, port), "past the stalled ones")
}

func testDialPeerEnds(t *testing.T, c *ctx) {
	id := c.listening(port)
	conn := c.ask(id, port, peer.Bye)
	if text, err := io.ReadAll(conn); err != nil || string(text) != "bye" {
		t.Errorf("read %q, %v; want bye and the end", text, err)
	}
}

func testDialWeEnd(t *testing.T, c *ctx) {
	id := c.listening(port)
	conn := c.dial(id, port)
	roundTrip(t, conn, "here")
	conn.Close()
	g := c.guest(id)
	for {
		// The kernel's table of the sandbox: state 01 is an established connection.
		table := g.Shell(c, "root", "cat /proc/net/tcp").Stdout
		if !strings.Contains(table, fmt.Sprintf(":%04X", port)) || !established(table, port) {
			return
		}
		if c.Err() != nil {
			t.Fatal("the sandbox still has the connection")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// established reports whether /proc/net/tcp has an open connection of a local port.
func established(table string, port uint16) bool {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && f[3] == "01" {
			return true
		}
	}
	return false
}

func testDialSandboxEnds(t *testing.T, c *ctx) {
	id := c.listening(port)
	conn := c.dial(id, port)
	roundTrip(t, conn, "alive")
	if err := c.d.Delete(c, id); err != nil {
		t.Fatal(err)
	}
	wantEnd(t, conn)
}

func testDialSandboxDies(t *testing.T, c *ctx) {
	id := c.listening(port)
	conn := c.dial(id, port)
	roundTrip(t, conn, "alive")
	c.kill(id)
	wantEnd(t, conn)
}

// wantEnd reads until the connection ends, by an end or an error other than the test's own deadline.
func wantEnd(t testing.TB, conn net.Conn) {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	_, err := io.Copy(io.Discard, conn)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("the connection stays open: %v", err)
	}
}
