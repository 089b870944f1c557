//go:build linux

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-sandbox/warren/internal/secret/secrettest"
)

// labAddr is where the servers of a lab are: an address of the loopback that policies of the tests open by name.
const labAddr = "127.0.0.9"

// scriptLab is an internet on the loopback: a name server that knows every name below ".lab", and web servers that tell what they were asked. What they
// saw, "labhits" prints.
type scriptLab struct {
	mu   sync.Mutex
	hits []string
}

func (l *scriptLab) hit(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hits = append(l.hits, fmt.Sprintf(format, args...))
}

var labs sync.Map // by data directory

// startLab serves a lab for a script, in whose environment LAB_HTTP and LAB_HTTPS are ports.
func startLab(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: lab")
	}
	l := &scriptLab{}
	packets, err := net.ListenPacket("udp", labAddr+":0")
	ts.Check(err)
	names := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(l.resolve)}
	go names.ActivateAndServe()
	ts.Defer(func() { packets.Close() })
	ts.Setenv("WARREN_GATEWAY_RESOLVER", packets.LocalAddr().String())

	web := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme := "http"
		if r.TLS != nil {
			scheme = "https"
		}
		auth := r.Header.Get("Authorization")
		if auth != "" {
			auth = " auth=" + auth
		}
		l.hit("%s %s://%s%s%s", r.Method, scheme, r.Host, r.URL, auth)
		if auth != "" {
			w.Header().Set("X-Echo", auth)
		}
		fmt.Fprintf(w, "%s %s://%s%s over %s%s\n", r.Method, scheme, r.Host, r.URL, r.Proto, auth)
	})
	serve := func(name string, config *tls.Config) {
		ln, err := net.Listen("tcp", labAddr+":0")
		ts.Check(err)
		s := &http.Server{Handler: web, TLSConfig: config}
		if config != nil {
			go s.ServeTLS(ln, "", "")
		} else {
			go s.Serve(ln)
		}
		ts.Defer(func() { s.Close() })
		_, port, err := net.SplitHostPort(ln.Addr().String())
		ts.Check(err)
		ts.Setenv(name, port)
	}
	cert, root := labCertificate(ts.Check, "web.lab", "api.lab", "evil.lab")
	roots := filepath.Join(ts.Getenv("WARREN_HOME"), "lab-roots.pem")
	ts.Check(os.WriteFile(roots, root, 0o644))
	ts.Setenv("WARREN_GATEWAY_ROOTS", roots)
	ts.Setenv("LAB_ROOTS", roots)
	serve("LAB_HTTP", nil)
	serve("LAB_HTTPS", &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"}})
	labs.Store(ts.Getenv("WARREN_HOME"), l)
	ts.Check(os.MkdirAll(filepath.Join(ts.Getenv("WARREN_HOME"), "policies"), 0o755))
}

func (l *scriptLab) resolve(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	for _, ask := range q.Question {
		l.hit("dns %s", ask.Name)
		switch {
		case !strings.HasSuffix(strings.ToLower(ask.Name), ".lab."):
			m.Rcode = dns.RcodeNameError
		case ask.Qtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: ask.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(labAddr)})
		}
	}
	w.WriteMsg(m)
}

// scriptLabHits prints what a lab has seen since the last time.
func scriptLabHits(ts *testscript.TestScript, neg bool, args []string) {
	v, ok := labs.Load(ts.Getenv("WARREN_HOME"))
	if neg || len(args) != 0 || !ok {
		ts.Fatalf("usage: labhits, after lab")
	}
	l := v.(*scriptLab)
	l.mu.Lock()
	defer l.mu.Unlock()
	io.WriteString(ts.Stdout(), strings.Join(append(slices.Clone(l.hits), ""), "\n"))
	l.hits = nil
}

// scriptPolicy makes a file a policy of the script's server, with the lab's ports in it.
func scriptPolicy(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: policy NAME FILE")
	}
	text := os.Expand(ts.ReadFile(args[1]), ts.Getenv)
	for _, path := range []string{filepath.Join(ts.Getenv("WARREN_HOME"), "policies", args[0]+".yaml"), ts.MkAbs(args[0] + ".policy")} {
		ts.Check(os.WriteFile(path, []byte(text), 0o644))
	}
}

// scriptCanary looks for a value, in all forms that the scrubber knows, in files and directories, and in what the last command printed.
func scriptCanary(t *testing.T, ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: [!] canary VALUE PATH...")
	}
	scan := secrettest.New(t, map[string]string{"canary": args[0]})
	var found []secrettest.Finding
	for _, path := range args[1:] {
		switch path {
		case "stdout", "stderr":
			found = append(found, scan.Text(path, ts.ReadFile(path))...)
		default:
			list, files, err := scan.Paths(ts.MkAbs(path))
			ts.Check(err)
			ts.Logf("looked through %d files of %s", files, path)
			found = append(found, list...)
		}
	}
	switch {
	case neg && len(found) > 0:
		ts.Fatalf("the value stands in %v", found)
	case !neg && len(found) == 0:
		ts.Fatalf("the value stands nowhere")
	}
}

// scriptKillGateway kills the gateway with SIGKILL.
func scriptKillGateway(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: killgateway")
	}
	b, err := os.ReadFile(filepath.Join(ts.Getenv("WARREN_HOME"), "run", "gateway", "gateway.pid"))
	ts.Check(err)
	var pid int
	_, err = fmt.Sscan(string(b), &pid)
	ts.Check(err)
	p, err := os.FindProcess(pid)
	ts.Check(err)
	ts.Check(p.Kill())
}

// labCertificate makes a certificate for names, and returns that of who signed it.
func labCertificate(check func(error), names ...string) (tls.Certificate, []byte) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the lab"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, key.Public(), key)
	check(err)
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: names, NotBefore: root.NotBefore, NotAfter: root.NotAfter}
	der, err := x509.CreateCertificate(rand.Reader, leaf, root, key.Public(), key)
	check(err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: rootDER})
}
