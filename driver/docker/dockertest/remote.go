//go:build linux

package dockertest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// makeCerts makes the keys of an authority, of a server on loopback and of a client.
func makeCerts(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	now := time.Now()
	var authority *x509.Certificate
	var authorityKey *ecdsa.PrivateKey
	for i, c := range []struct{ cert, key string }{{"ca.pem", "ca-key.pem"}, {"server.pem", "server-key.pem"}, {"cert.pem", "key.pem"}} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return err
		}
		t := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: c.cert}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true,
		}
		parent, signer := authority, authorityKey
		if i == 0 {
			t.IsCA, t.KeyUsage = true, x509.KeyUsageCertSign
			parent, signer = t, key
		}
		der, err := x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, signer)
		if err != nil {
			return err
		}
		if i == 0 {
			if authority, err = x509.ParseCertificate(der); err != nil {
				return err
			}
			authorityKey = key
		}
		secret, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			return err
		}
		for name, block := range map[string]*pem.Block{c.cert: {Type: "CERTIFICATE", Bytes: der}, c.key: {Type: "EC PRIVATE KEY", Bytes: secret}} {
			if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// forward lets this network namespace reach the engine's TCP port, which is on a loopback of its own.
func (e *Engine) forward() error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	e.t.Cleanup(func() { ln.Close() })
	e.Host = "tcp://" + ln.Addr().String()
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer near.Close()
				far, err := e.dialInside()
				if err != nil {
					return
				}
				defer far.Close()
				go func() {
					io.Copy(far, near)
					far.(*net.TCPConn).CloseWrite()
				}()
				io.Copy(near, far)
			}()
		}
	}()
	return nil
}

// dialInside connects to the engine's port from within its network namespace.
func (e *Engine) dialInside() (net.Conn, error) {
	pid, err := e.daemon()
	if err != nil {
		return nil, err
	}
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		// The thread is in another namespace from here on: it is not given back, and ends with this goroutine.
		runtime.LockOSThread()
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			ns.Close()
		}
		var r result
		if r.err = err; err == nil {
			r.conn, r.err = net.Dial("tcp", "127.0.0.1:2376")
		}
		done <- r
	}()
	r := <-done
	return r.conn, r.err
}

// daemon is the process id of the engine's daemon.
func (e *Engine) daemon() (int, error) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil || !bytes.HasPrefix(text, []byte("dockerd\x00")) || !bytes.Contains(text, []byte(e.Base+"/")) {
			continue
		}
		return strconv.Atoi(filepath.Base(filepath.Dir(name)))
	}
	return 0, fmt.Errorf("the engine does not run")
}
