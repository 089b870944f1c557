//go:build linux

package gateway

import (
	"context"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// TestSamePort connects again and again from one port, each time as soon as the connection before has ended, which the server does: a client that
// has few ports left does so. One that comes at the very moment when the one before ends, which takes microseconds, is refused.
func TestSamePort(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", func(c net.Conn) {
		io.WriteString(c, "bye")
	})
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}\n")
	raw, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	linger := tcpip.TCPTimeWaitTimeoutOption(time.Millisecond)
	if err := in.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &linger); err != nil {
		t.Fatal(err)
	}
	to, proto := full(netip.AddrPortFrom(raw, 9000))
	from := tcpip.FullAddress{NIC: 1, Addr: tcpip.AddrFromSlice(SandboxIPv4.AsSlice()), Port: 40000}
	refused := 0
	for i := range 500 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		c, err := gonet.DialTCPWithBind(ctx, in.stack, from, to, proto)
		for err != nil && strings.Contains(err.Error(), "port is in use") && ctx.Err() == nil {
			runtime.Gosched() // the end of the one before is still on its way
			c, err = gonet.DialTCPWithBind(ctx, in.stack, from, to, proto)
		}
		cancel()
		if err != nil {
			if refused++; refused > 5 {
				t.Fatalf("connection %d is the sixth that fails: %v", i, err)
			}
			continue
		}
		b, err := io.ReadAll(c)
		c.Close()
		if err != nil || string(b) != "bye" {
			t.Errorf("connection %d: %q, %v", i, b, err)
		}
	}
	t.Logf("%d of 500 were refused", refused)
}

// TestBuffersShrink opens many connections: what each may hold of the host's memory becomes less, and with few is as before.
func TestBuffersShrink(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", func(c net.Conn) { io.Copy(c, c) })
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}\n")
	raw, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	c, err := l.g.card("one")
	if err != nil {
		t.Fatal(err)
	}
	wait := func(want int) {
		t.Helper()
		var receive tcpip.TCPReceiveBufferSizeRangeOption
		var send tcpip.TCPSendBufferSizeRangeOption
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			if err := c.stack.TransportProtocolOption(tcp.ProtocolNumber, &receive); err != nil {
				t.Fatal(err)
			}
			if err := c.stack.TransportProtocolOption(tcp.ProtocolNumber, &send); err != nil {
				t.Fatal(err)
			}
			if receive.Max == want && send.Max == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("buffers of up to %d and %d bytes; want %d", receive.Max, send.Max, want)
			}
		}
	}
	wait(buffer)
	var conns []net.Conn
	for range fewConnections + 1 {
		conn, err := in.dial(t.Context(), netip.AddrPortFrom(raw, 9000))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	wait(beginBuffer)
	conns[3].Close()
	wait(buffer)
}
