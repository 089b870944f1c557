//go:build linux

package main

import (
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// TestListenTLS has a daemon with a TCP address under TLS and a client that knows it by a token alone.
func TestListenTLS(t *testing.T) {
	h := newHome(t)
	cert, key := selfSigned(t)
	addr := freeAddr(t)
	h.serve("--listen", addr, "--tls-cert", cert, "--tls-key", key)
	token := lastLine(h.warren("token", "create", "--user", "ada", "--description", "test"))

	call := func(env []string, args ...string) (string, error) {
		cmd := exec.Command(h.bin.Warren, args...)
		cmd.Env = append(os.Environ(), "WARREN_HOME="+t.TempDir(), "HOME="+t.TempDir())
		cmd.Env = append(cmd.Env, env...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	trusted := []string{"WARREN_URL=https://" + addr, "SSL_CERT_FILE=" + cert}
	known := append(trusted, "WARREN_TOKEN="+token)
	if out, err := call(known, "run", "--", "echo", "over TLS"); err != nil || !strings.Contains(out, "over TLS") {
		t.Errorf("run over TLS: %v\n%s", err, out)
	}
	if out, err := call(trusted, "ls"); err == nil || !strings.Contains(out, "token") {
		t.Errorf("without a token: %v\n%s", err, out)
	}
	if out, err := call(append(trusted, "WARREN_TOKEN="+token[:len(token)-1]+"x"), "ls"); err == nil || strings.Contains(out, token[4:20]) {
		t.Errorf("with a wrong token: %v\n%s", err, out)
	}
	if out, err := call([]string{"WARREN_URL=https://" + addr, "WARREN_TOKEN=" + token, "SSL_CERT_FILE=/dev/null", "SSL_CERT_DIR=/dev/null"}, "ls"); err == nil || !strings.Contains(out, "certificate") {
		t.Errorf("a certificate that the client does not know: %v\n%s", err, out)
	}
	if out, err := call([]string{"WARREN_URL=http://" + addr, "WARREN_TOKEN=" + token}, "ls"); err == nil || strings.Contains(out, "panic") {
		t.Errorf("without TLS: %v\n%s", err, out)
	}
	old, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11})
	if err == nil {
		old.Close()
		t.Error("the server speaks TLS 1.1")
	}
	for _, bad := range [][]string{
		{"--tls-cert", cert},
		{"--tls-cert", cert, "--tls-key", cert},
		{"--tls-cert", filepath.Join(h.dir, "none"), "--tls-key", key},
	} {
		cmd := exec.Command(h.bin.Warren, append([]string{"serve", "--listen", "127.0.0.1:0"}, bad...)...)
		cmd.Env = append(os.Environ(), "WARREN_HOME="+t.TempDir())
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(strings.ToLower(string(out)), "tls") || strings.Contains(string(out), "keeper") {
			t.Errorf("serve %s: %v\n%s", strings.Join(bad, " "), err, out)
		}
	}
}

// TestTraces has a collector that gets the spans of a create.
func TestTraces(t *testing.T) {
	var mu sync.Mutex
	names := map[string]string{} // span → service
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body io.Reader = r.Body
		if r.Header.Get("Content-Encoding") == "gzip" {
			zr, err := gzip.NewReader(r.Body)
			if err != nil {
				t.Error(err)
				return
			}
			body = zr
		}
		b, err := io.ReadAll(body)
		var req coltracepb.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(b, &req)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for _, rs := range req.ResourceSpans {
			service := ""
			for _, a := range rs.Resource.Attributes {
				if a.Key == "service.name" {
					service = a.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					names[s.Name] = service
				}
			}
		}
	}))
	defer collector.Close()
	h := newHome(t)
	h.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL}
	h.serve()
	h.warren("run", "--", "true")
	h.warren("shutdown")
	mu.Lock()
	defer mu.Unlock()
	if names["sandbox.create"] != "warren" {
		t.Errorf("the collector got %v, without sandbox.create of warren", names)
	}
}

// serve runs a daemon in the foreground until the test ends, and returns when it answers.
func (h *home) serve(args ...string) {
	h.t.Helper()
	cmd := h.command(append([]string{"serve"}, args...)...)
	out, err := os.CreateTemp(h.t.TempDir(), "serve")
	if err != nil {
		h.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	h.t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		<-ended
		out.Close()
	})
	socket := filepath.Join(h.dir, "warren.sock")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if c, err := net.Dial("unix", socket); err == nil {
			c.Close()
			return
		}
		select {
		case err := <-ended:
			ended <- err
			text, _ := os.ReadFile(out.Name())
			h.t.Fatalf("serve ended: %v\n%s", err, text)
		default:
		}
		if time.Now().After(deadline) {
			h.t.Fatal("serve does not answer")
		}
	}
}

// selfSigned writes a certificate for 127.0.0.1 and its key.
func selfSigned(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// freeAddr returns an address that was free a moment ago.
func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}
