//go:build linux

package gateway

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// echConfig makes what a client encrypts its hello with, for servers behind a public name, and the key to that (RFC 9849).
func echConfig(t *testing.T, public string) (list []byte, key tls.EncryptedClientHelloKey) {
	t.Helper()
	private, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	vec := func(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }
	body := slices.Concat([]byte{7, 0, 0x20}, vec(private.PublicKey().Bytes()), vec([]byte{0, 1, 0, 1}), []byte{32, byte(len(public))}, []byte(public), vec(nil))
	config := append([]byte{0xfe, 0x0d}, vec(body)...)
	return vec(config), tls.EncryptedClientHelloKey{Config: config, PrivateKey: private.Bytes(), SendAsRetry: true}
}

// TestEncryptedHello speaks TLS with an encrypted hello inside of the hello (B19). What is decided on and dialled is the outer name, so it leads to the servers of
// that name alone; which of their names it is for is theirs to know, as all that is passed through. Where the gateway inspects, nobody takes it up.
func TestEncryptedHello(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.name("inspected.lab", "11.1.1.1")
	l.name("hidden.lab", "11.6.6.6")
	list, key := echConfig(t, "allowed.lab")
	other, otherKey := echConfig(t, "hidden.lab")
	inspectedList, inspectedKey := echConfig(t, "inspected.lab")
	grease, _ := echConfig(t, "allowed.lab")
	seen := make(chan string, 10)
	for _, address := range []string{"11.1.1.1:443", "11.6.6.6:443"} {
		ln := l.listen(address)
		s := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen <- address + " " + r.TLS.ServerName })}
		t.Cleanup(func() { s.Close() })
		s.TLSConfig = &tls.Config{Certificates: []tls.Certificate{l.cert("allowed.lab", "inspected.lab", "hidden.lab")}, EncryptedClientHelloKeys: []tls.EncryptedClientHelloKey{key, otherKey, inspectedKey}}
		go s.ServeTLS(ln, "", "")
	}
	in := l.sandbox("one", "allow:\n  - allowed.lab\n  - {host: inspected.lab, inspect: true}\n")
	ask := func(to, inner string, ech []byte) error {
		t.Helper()
		a, err := in.lookup(to)
		if err != nil {
			t.Fatal(err)
		}
		l.reached()
		raw, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		raw.SetDeadline(time.Now().Add(30 * time.Second))
		c := tls.Client(raw, &tls.Config{ServerName: inner, RootCAs: in.roots, EncryptedClientHelloConfigList: ech, MinVersion: tls.VersionTLS13})
		if err := c.Handshake(); err != nil {
			return err
		}
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+inner+"\r\nConnection: close\r\n\r\n")
		_, err = io.Copy(io.Discard, c)
		return err
	}
	got := func() string {
		select {
		case s := <-seen:
			return s
		default:
			return ""
		}
	}
	// The twin: without the gateway the same hello opens what is hidden, at the address of its own.
	raw, err := l.native("11.6.6.6:443")(t.Context(), "tcp", "")
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, &tls.Config{ServerName: "hidden.lab", RootCAs: in.roots, EncryptedClientHelloConfigList: other, MinVersion: tls.VersionTLS13})
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: hidden.lab\r\nConnection: close\r\n\r\n")
	io.Copy(io.Discard, c)
	raw.Close()
	if s := got(); s != "11.6.6.6:443 hidden.lab" {
		t.Fatalf("without a gateway the server saw %q", s)
	}
	// Passed through: to the server of the outer name, whatever is inside.
	if err := ask("allowed.lab", "hidden.lab", list); err != nil {
		t.Errorf("an encrypted hello under an allowed name: %v", err)
	}
	if s := got(); s != "11.1.1.1:443 hidden.lab" {
		t.Errorf("the server saw %q", s)
	}
	if dialled, asked := l.reached(); !slices.Equal(dialled, []string{"tcp/11.1.1.1:443"}) || slices.Contains(asked, "hidden.lab.") {
		t.Errorf("the gateway went to %v and asked for %v", dialled, asked)
	}
	l.mu.Lock()
	for _, e := range l.entries {
		if e.Action == "flow.open" && e.Host != "allowed.lab" {
			t.Errorf("on record is %+v", e)
		}
	}
	l.mu.Unlock()
	// What no server has the key of, as browsers send it to all servers, is a hello like another: the server answers under the outer name.
	var rejected *tls.ECHRejectionError
	if err := ask("allowed.lab", "hidden.lab", grease); !errors.As(err, &rejected) || len(rejected.RetryConfigList) == 0 {
		t.Errorf("one that no server takes up: %v", err)
	}
	l.reached()
	// An outer name that is not the connection's goes nowhere, whatever is inside.
	if err := ask("allowed.lab", "allowed.lab", other); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("an outer name that is not allowed: %v", err)
	}
	// Inspected: the gateway has no key, and says so under the outer name; what was inside is nowhere.
	if err := ask("inspected.lab", "hidden.lab", inspectedList); !errors.As(err, &rejected) {
		t.Errorf("an encrypted hello on an inspected connection: %v", err)
	}
	if dialled, _ := l.reached(); len(dialled) != 0 {
		t.Errorf("the gateway went to %v", dialled)
	}
	if s := got(); s != "" {
		t.Errorf("a server saw %q", s)
	}
	// Nobody inside learns how to encrypt one by asking for it.
	m, err := in.ask("allowed.lab", 65) // HTTPS
	if err != nil || len(m.Answer) != 0 {
		t.Errorf("a question for HTTPS is answered with %v, %v", m, err)
	}
}
