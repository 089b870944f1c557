//go:build linux

package gateway

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func hello(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, text+" "+r.Host+" "+r.Proto+" "+r.URL.Path)
	})
}

func TestPassThrough(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.name("evil.lab", "11.6.6.6")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab")
	l.web("11.6.6.6:443", hello("evil"), "evil.lab")
	in := l.sandbox("one", "allow: [allowed.lab]")

	status, body, err := in.get("https://allowed.lab/x")
	if err != nil || status != 200 || body != "hi allowed.lab HTTP/2.0 /x" {
		t.Errorf("an allowed host answers %d %q, %v", status, body, err)
	}
	if dialled, asked := l.reached(); len(dialled) != 1 || dialled[0] != "tcp/11.1.1.1:443" || len(asked) != 1 {
		t.Errorf("the gateway dialled %v and asked for %v", dialled, asked)
	}
	if !l.has("flow.open", "allowed.lab") {
		t.Error("the flow is not on record")
	}

	if _, _, err := in.get("https://evil.lab/"); err == nil {
		t.Error("a host that is not allowed answers")
	}
	for _, a := range []string{"11.6.6.6:443", "11.1.1.1:443", "10.0.0.1:22", "169.254.169.254:80", "[fd00:ec2::254]:80", "[2a00::1]:443", "198.18.77.7:443", "198.18.0.1:80"} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if c, err := in.dial(ctx, netip.MustParseAddrPort(a)); err == nil {
			t.Errorf("address %s answers", a)
			c.Close()
		} else if ctx.Err() != nil {
			t.Errorf("address %s is not refused at once", a)
		}
		cancel()
	}
	if dialled, asked := l.reached(); len(dialled)+len(asked) != 0 {
		t.Errorf("for what is denied the gateway dialled %v and asked for %v", dialled, asked)
	}
	if !l.has("dns.deny", "evil.lab") || !l.has("flow.deny", "11.6.6.6") {
		t.Errorf("denials are not on record: %+v", l.entries)
	}
}

func TestServerName(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.name("other.lab", "11.1.1.1")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab", "other.lab", "evil.lab")
	in := l.sandbox("one", "allow: [allowed.lab, other.lab]")
	a, err := in.lookup("allowed.lab")
	if err != nil {
		t.Fatal(err)
	}
	try := func(name string, first []byte) error {
		c, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if first != nil {
			c.Write(first)
			n, err := c.Read(make([]byte, 100))
			if n > 0 {
				err = nil
			}
			return err
		}
		return tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	}
	if err := try("allowed.lab", nil); err != nil {
		t.Errorf("the right name: %v", err)
	}
	l.reached()
	for _, name := range []string{"", "evil.lab", "other.lab"} {
		if err := try(name, nil); err == nil || !strings.Contains(err.Error(), "access denied") {
			t.Errorf("server name %q: %v, want an alert", name, err)
		}
	}
	for _, first := range []string{"SSH-2.0-x\r\n", "GET / HTTP/1.1\r\nHost: allowed.lab\r\n\r\n", "\x80\x2e\x01\x00\x02", "\x00\x00"} {
		if err := try("", []byte(first)); err == nil {
			t.Errorf("%q is answered on a port for TLS", first)
		}
	}
	if dialled, _ := l.reached(); len(dialled) != 0 {
		t.Errorf("the gateway dialled %v", dialled)
	}
}

func TestNames(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.name("inner.lab", "10.0.0.7")
	l.name("both.lab", "10.0.0.7", "11.1.1.1")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab", "both.lab")
	in := l.sandbox("one", "allow: [allowed.lab, inner.lab, both.lab, missing.lab]")
	for _, qtype := range []uint16{dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypeHTTPS, dns.TypeANY, dns.TypeNULL, dns.TypeCNAME} {
		for _, name := range []string{"allowed.lab", "canary.evil.lab", "canary.allowed.lab"} {
			if m, err := in.ask(name, qtype); err != nil || len(m.Answer) != 0 {
				t.Errorf("%s %s: %v, %v", name, dns.TypeToString[qtype], m, err)
			}
		}
	}
	if _, asked := l.reached(); len(asked) != 0 {
		t.Errorf("the gateway asked for %v", asked)
	}
	for name, rcode := range map[string]int{"missing.lab": dns.RcodeNameError, "x.evil.lab": dns.RcodeNameError, "ALLOWED.lab": 0, "both.lab": 0} {
		if m, err := in.ask(name, dns.TypeAAAA); err != nil || m.Rcode != rcode {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	// A name with a private address beside a public one leads to the public one only.
	l.reached()
	if _, _, err := in.get("https://both.lab/"); err != nil {
		t.Error(err)
	}
	if _, _, err := in.get("https://inner.lab/"); err == nil {
		t.Error("a name with a private address answers")
	}
	// And one that moves to a private address afterwards leads nowhere.
	l.name("allowed.lab", "127.0.0.1")
	if _, _, err := in.get("https://allowed.lab/"); err == nil {
		t.Error("a name that moved to a private address answers")
	}
	if dialled, _ := l.reached(); len(dialled) != 1 || dialled[0] != "tcp/11.1.1.1:443" {
		t.Errorf("the gateway dialled %v", dialled)
	}
	a, err := in.lookup("both.lab")
	if err != nil {
		t.Fatal(err)
	}
	rev, err := dns.ReverseAddr(a.String())
	if err != nil {
		t.Fatal(err)
	}
	if m, err := in.ask(rev, dns.TypePTR); err != nil || len(m.Answer) != 1 || m.Answer[0].(*dns.PTR).Ptr != "both.lab." {
		t.Errorf("%s: %v, %v", rev, m, err)
	}
}

// A client that uses a port again is answered at once, although the gateway had closed the connection before first.
func TestPortAgain(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", func(net.Conn) {})
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}")
	a, err := in.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	from, to := netip.AddrPortFrom(SandboxIPv4, 20000), netip.AddrPortFrom(a, 9000)
	// A handshake of which the first packet is not answered takes a second, then two, and so on: 63 for the six that TIME_WAIT lasts.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for i := range 5 {
		c, err := in.dialFrom(ctx, from, to)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		c.Close()
		time.Sleep(50 * time.Millisecond) // until the gateway has the answer to its end
	}
}
