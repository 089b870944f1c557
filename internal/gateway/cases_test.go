//go:build linux

package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// sendUDP sends a datagram to an address and waits for an answer.
func (in *inside) sendUDP(a netip.AddrPort, text string, wait time.Duration) (string, error) {
	c, err := in.udp(a)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	buf := make([]byte, 2048)
	n, err := c.Read(buf)
	return string(buf[:n]), err
}

func TestDatagrams(t *testing.T) {
	l := newLab(t)
	l.name("time.lab", "11.1.1.5")
	echo, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := echo.ReadFrom(buf)
			if err != nil {
				return
			}
			echo.WriteTo(buf[:n], from)
		}
	}()
	l.mu.Lock()
	l.servers["udp/11.1.1.5:123"] = echo.LocalAddr().String()
	l.mu.Unlock()
	in := l.sandbox("one", "allow:\n  - {host: time.lab, protocol: udp, ports: [123]}")
	a, err := in.lookup("time.lab")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := in.sendUDP(netip.AddrPortFrom(a, 123), "hello", 5*time.Second); err != nil || got != "hello" {
		t.Errorf("an allowed flow answers %q, %v", got, err)
	}
	l.reached()
	for _, to := range []string{"11.1.1.5:123", "11.6.6.6:443", "11.6.6.6:53", "[2a00::1]:443", a.String() + ":124", "224.0.0.251:5353", "255.255.255.255:67"} {
		if got, err := in.sendUDP(netip.MustParseAddrPort(to), "canary", 200*time.Millisecond); err == nil {
			t.Errorf("%s answers %q", to, got)
		}
	}
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
}

func TestIPv6Inside(t *testing.T) {
	l := newLab(t)
	l.name("six.lab", "2a00:1::1")
	l.web("[2a00:1::1]:443", hello("six"), "six.lab")
	in := l.sandbox("one", "allow: [six.lab]")
	a4, err := in.lookup("six.lab")
	if err != nil {
		t.Fatal(err)
	}
	slot, _ := slotAt(a4)
	_, a6 := addresses(slot)
	for _, a := range []netip.Addr{a4, a6} {
		c, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
		if err != nil {
			t.Errorf("%s: %v", a, err)
			continue
		}
		c.Close()
	}
	if _, body, err := in.get("https://six.lab/"); err != nil || !strings.HasPrefix(body, "six") {
		t.Errorf("%q, %v", body, err)
	}
}

// TestUnrecorded shows that what cannot be recorded does not happen.
func TestUnrecorded(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	reached := make(chan struct{}, 16)
	l.web("11.1.1.1:443", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached <- struct{}{} }), "allowed.lab")
	in := l.sandbox("one", "allow: [allowed.lab]")
	if _, _, err := in.get("https://allowed.lab/"); err != nil {
		t.Fatal(err)
	}
	<-reached
	l.mu.Lock()
	l.fail = errors.New("the disk is full")
	l.mu.Unlock()
	if _, _, err := in.get("https://allowed.lab/"); err == nil {
		t.Error("a flow that cannot be recorded goes through")
	}
	select {
	case <-reached:
		t.Error("the server got a request that is not on record")
	default:
	}
}

func TestCeilings(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	for i := range 5 {
		l.name(fmt.Sprintf("n%d.many.lab", i), "11.1.1.3")
	}
	l.serve("11.1.1.3:9000", echo)
	in := l.sandbox("one", `
allow:
  - {host: raw.lab, protocol: tcp, ports: [9000]}
  - {host: "*.many.lab"}
limits: {connections: 3, bytes_up: 100KiB, new_hosts_per_hour: 3}
`)
	a, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	to := netip.AddrPortFrom(a, 9000)
	var open []net.Conn
	for range 3 {
		c, err := in.dial(t.Context(), to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	if c, err := in.dial(t.Context(), to); err == nil {
		c.Close()
		t.Error("a fourth connection opens")
	}
	open[1].Close()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := in.dial(t.Context(), to)
		if err == nil {
			c.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatal("no connection opens after one has ended")
		}
	}
	for i := range 5 {
		_, err := in.lookup(fmt.Sprintf("n%d.many.lab", i))
		if ok := i < 2; (err == nil) != ok { // one name has been asked for
			t.Errorf("new name %d: %v", i, err)
		}
	}
	c := open[0]
	c.SetDeadline(time.Now().Add(10 * time.Second))
	sent := 0
	for sent < 1<<20 {
		n, err := c.Write(make([]byte, 8<<10))
		sent += n
		if err != nil {
			break
		}
		if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
			break
		}
	}
	if sent < 90<<10 || sent > 300<<10 {
		t.Errorf("%d bytes went up before the ceiling of 100 KiB", sent)
	}
	if c, err := in.dial(t.Context(), to); err == nil {
		c.Close()
		t.Error("a connection opens after the ceiling of bytes")
	}
}

// TestWebSocket upgrades an inspected connection, which the policy then cuts.
func TestWebSocket(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		rw.Flush()
		io.Copy(c, rw)
	}), "api.lab")
	in := l.sandbox("one", inspected)
	a, err := in.lookup("api.lab")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(10 * time.Second))
	c := in.tls(raw, "api.lab")
	io.WriteString(c, "GET /v1/ws HTTP/1.1\r\nHost: api.lab\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", res, err)
	}
	io.WriteString(c, "ping\n")
	if s, err := r.ReadString('\n'); err != nil || s != "ping\n" {
		t.Fatalf("%q, %v", s, err)
	}
	if err := l.g.SetPolicy("one", Rules{Policy: l.policy("allow: [other.lab]")}); err != nil {
		t.Fatal(err)
	}
	raw.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := r.ReadString('\n'); err == nil || isTimeout(err) {
		t.Errorf("the WebSocket goes on: %v", err)
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// TestNamesStay gives a sandbox that was started anew, and one that was forked, the addresses of before.
func TestNamesStay(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab")
	in := l.sandbox("one", "allow: [allowed.lab]")
	a, err := in.lookup("allowed.lab")
	if err != nil {
		t.Fatal(err)
	}
	to := netip.AddrPortFrom(a, 443)
	again := l.sandbox("one", "allow: [allowed.lab]")
	if c, err := again.dial(t.Context(), to); err != nil {
		t.Errorf("started anew: %v", err)
	} else {
		c.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if c, err := in.dial(ctx, to); err == nil {
		c.Close()
		t.Error("the old card is still served")
	}
	if c, err := l.attach(t, "child", "allow: [allowed.lab]", "one").dial(t.Context(), to); err != nil {
		t.Errorf("forked: %v", err)
	} else {
		c.Close()
	}
	stranger := l.sandbox("two", "allow: [allowed.lab]")
	if c, err := stranger.dial(t.Context(), to); err == nil {
		c.Close()
		t.Error("a sandbox reaches an address that another was given")
	}
}

// TestOwnAddress shows that what the machine itself has is reached only where a rule names it, whoever may connect to all names.
func TestOwnAddress(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1", "2a00:1::1")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab")
	l.web("[2a00:1::1]:443", hello("hi"), "allowed.lab")
	open := l.sandbox("open", "extends: open")
	named := l.sandbox("named", "allow: [{host: allowed.lab, cidr: 11.1.1.1/32}]")
	get := func(in *inside, want bool) {
		t.Helper()
		_, _, err := in.get("https://allowed.lab/")
		if got := err == nil; got != want {
			t.Errorf("sandbox %s gets an answer: %v, want %v (%v)", in.id, got, want, err)
		}
		if dialled, _ := l.reached(); len(dialled) > 0 != want {
			t.Errorf("for sandbox %s the gateway dialled %v", in.id, dialled)
		}
	}
	get(open, true) // the twin: it is another's
	l.machineIs("11.1.1.1", "2a00:1::1")
	get(open, false)
	get(named, true)
	if !l.has("flow.deny", "allowed.lab") {
		t.Error("the denial is not on record")
	}
	// What only counts as the machine's is no different, also behind a translator to IPv4.
	l.machineIs("11.9.9.9")
	get(open, true)
	l.g.resolver.own.near = []netip.Prefix{netip.MustParsePrefix("11.1.1.0/24"), netip.MustParsePrefix("2a00:1::/32")}
	get(open, false)
	get(named, true)
	if own, err := l.g.resolver.own.has(netip.MustParseAddr("64:ff9b::11.1.1.7")); !own || err != nil {
		t.Errorf("an address behind a translator: %v, %v", own, err)
	}
	if own, err := l.g.resolver.own.has(netip.MustParseAddr("11.1.2.1")); own || err != nil {
		t.Errorf("an address beside: %v, %v", own, err)
	}
	l.g.resolver.own.near = nil
	l.machineIs()
	get(open, false)
	get(named, false)
}

// machineIs gives the machine of the gateway addresses; with none, nobody can tell them.
func (l *lab) machineIs(addrs ...string) {
	l.mu.Lock()
	l.own = nil
	for _, a := range addrs {
		l.own = append(l.own, netip.MustParseAddr(a))
	}
	l.mu.Unlock()
	l.g.resolver.own.mu.Lock()
	l.g.resolver.own.known = nil
	l.g.resolver.own.mu.Unlock()
}

// TestBrokenTwin shows that the lab notices: under a policy that allows all, what the other tests say is denied arrives.
func TestBrokenTwin(t *testing.T) {
	l := newLab(t)
	l.name("evil.lab", "11.6.6.6")
	l.web("11.6.6.6:443", hello("evil"), "evil.lab")
	l.web("11.6.6.6:80", hello("evil"))
	in := l.sandbox("one", "extends: open")
	for _, url := range []string{"https://evil.lab/", "http://evil.lab/", "http://11.6.6.6/"} {
		if _, body, err := in.get(url); err != nil || !strings.HasPrefix(body, "evil") {
			t.Errorf("%s: %q, %v", url, body, err)
		}
	}
	if dialled, asked := l.reached(); len(dialled) != 3 || len(asked) == 0 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
	// But not the machine's own networks.
	for _, a := range []string{"10.0.0.1:80", "192.168.1.1:80", "169.254.169.254:80", "100.100.100.200:80"} {
		if c, err := in.dial(t.Context(), netip.MustParseAddrPort(a)); err == nil {
			c.Close()
		}
	}
	if dialled, _ := l.reached(); len(dialled) != 0 {
		t.Errorf("the gateway dialled %v", dialled)
	}
}
