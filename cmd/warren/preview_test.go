//go:build linux

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/server"
)

// wildcard makes a certificate for a name in two files.
func wildcard(t *testing.T, name string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// TestPreviewTLS has a daemon that shows previews below a domain, to a client that speaks HTTP/2.
func TestPreviewTLS(t *testing.T) {
	cert, key := wildcard(t, "*.preview.lab")
	addr := freeAddr(t)
	h := newHome(t)
	h.env = append(h.env, "WARREN_PREVIEW_LISTEN="+addr, "WARREN_PREVIEW_DOMAIN=preview.lab", "WARREN_PREVIEW_CERT="+cert, "WARREN_PREVIEW_KEY="+key)
	h.warren("create", "--name", "s")
	h.warren("exec", "s", "--", "sh", "-c", "echo inside >/workspace/index.html")
	h.warren("exec", "-d", "s", "--", "python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/workspace", "8000")
	link := h.warren("preview", "s", "8000", "--no-open")
	_, port, _ := net.SplitHostPort(addr)
	if !strings.HasPrefix(link, "https://8000-s") || !strings.Contains(link, ".preview.lab:"+port+"/?warren_token=") {
		t.Fatalf("the link is %s", link)
	}
	pemBytes, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pemBytes)
	tr := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: roots}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr}
	deadline := time.Now().Add(time.Minute)
	for {
		res, err := client.Get(link)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode == http.StatusOK {
			if res.ProtoMajor != 2 || string(body) != "inside\n" {
				t.Errorf("%s %s: %q", res.Proto, res.Status, body)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s %s", res.Status, body)
		}
		time.Sleep(50 * time.Millisecond)
	}
	for name, want := range map[string]int{strings.Replace(link, "8000-s", "8001-s", 1): 401, "https://www.preview.lab:" + port + "/": 404} {
		res, err := client.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: %s, want %d", name, res.Status, want)
		}
	}
	for _, bad := range []struct{ env, want string }{
		{"WARREN_PREVIEW_DOMAIN=other.lab", "not for *.other.lab"}, {"WARREN_PREVIEW_KEY=" + cert, "preview.cert and preview.key"}, {"WARREN_PREVIEW_LISTEN=" + addr, "address already in use"},
	} {
		cmd := exec.Command(h.bin.Warren, "serve")
		cmd.Env = append(append(os.Environ(), h.env...), "WARREN_HOME="+t.TempDir(), bad.env)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), bad.want) || strings.Contains(string(out), "keeper") {
			t.Errorf("%s: %v\n%s", bad.env, err, out)
		}
	}
	h.warren("rm", "s")
}

// TestPreviewPort makes sure that previews come back to the port of last time, and take another where that is somebody else's.
func TestPreviewPort(t *testing.T) {
	file := filepath.Join(t.TempDir(), "port")
	opts := server.TCPOptions{Open: true}
	open := func() (int, func()) {
		t.Helper()
		all, err := listenAnywhere(file, opts)
		if err != nil {
			t.Fatal(err)
		}
		port := all[0].Addr().(*net.TCPAddr).Port
		for _, l := range all {
			if at := l.Addr().(*net.TCPAddr); at.Port != port || !at.IP.IsLoopback() {
				t.Errorf("listens on %v beside %d", at, port)
			}
		}
		if text, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(text)) != strconv.Itoa(port) {
			t.Errorf("%d is remembered as %q, %v", port, text, err)
		}
		return port, func() {
			for _, l := range all {
				l.Close()
			}
		}
	}
	// One that is surely no other's: remembered before anybody has used it.
	_, free, _ := net.SplitHostPort(freeAddr(t))
	if err := os.WriteFile(file, []byte(free+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	first, end := open()
	if strconv.Itoa(first) != free {
		t.Errorf("port %d, want %s", first, free)
	}
	second, endSecond := open()
	if second == first {
		t.Errorf("two listen on %d", first)
	}
	endSecond()
	end()
	if again, end := open(); again != second {
		t.Errorf("came back to %d, want %d", again, second)
	} else {
		end()
	}
	for _, text := range []string{"", "x", "-1", "99999999", "0"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, end := open()
		end()
	}
}
