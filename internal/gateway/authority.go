//go:build linux

package gateway

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// Authority signs the certificates that sandboxes see on inspected connections. Its key is this installation's own, and stays in
// the directory it was made in: sandboxes trust its certificate, and nobody else does.
type Authority struct {
	cert *x509.Certificate
	pem  []byte
	key  crypto.Signer
	// leafKey is that of all certificates it makes, of which no one outside ever sees more than the public half.
	leafKey *ecdsa.PrivateKey

	mu    sync.Mutex
	leafs map[policy.Host]*tls.Certificate
}

const (
	authorityFile = "ca.pem"
	authorityKey  = "ca.key"
	// authorityLife is how long an authority is good for; a new one is made when less than renewBefore is left of it.
	authorityLife = 5 * 365 * 24 * time.Hour
	renewBefore   = 90 * 24 * time.Hour
	leafLife      = 7 * 24 * time.Hour
	// backdate allows for clocks that are behind.
	backdate = time.Hour
	maxLeafs = 2048
)

// OpenAuthority reads the authority of a directory, or makes one.
func OpenAuthority(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a, err := loadAuthority(dir)
	if err == nil && time.Until(a.cert.NotAfter) > renewBefore {
		return a, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the certificate authority in %s is damaged: %w; remove %s and %s for a new one", dir, err, authorityFile, authorityKey)
	}
	return makeAuthority(dir)
}

func loadAuthority(dir string) (*Authority, error) {
	certPEM, err := os.ReadFile(filepath.Join(dir, authorityFile))
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, authorityKey)
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %v, want a file that only its owner can read", authorityKey, fi.Mode())
	}
	keyPEM, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	if !pair.Leaf.IsCA {
		return nil, errors.New("the certificate is none of an authority")
	}
	return newAuthority(pair.Leaf, certPEM, pair.PrivateKey.(crypto.Signer))
}

func makeAuthority(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(),
		// The random part tells one installation's authority from another's for people who look at it.
		Subject:               pkix.Name{Organization: []string{"Warren"}, CommonName: "Warren gateway " + rand.Text()[:8]},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(authorityLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	// The certificate last: without it the key is none.
	if err := replaceFile(filepath.Join(dir, authorityKey), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return nil, err
	}
	if err := replaceFile(filepath.Join(dir, authorityFile), certPEM, 0o644); err != nil {
		return nil, err
	}
	return newAuthority(cert, certPEM, key)
}

// replaceFile writes a file in one step, for good.
func replaceFile(path string, data []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func newAuthority(cert *x509.Certificate, certPEM []byte, key crypto.Signer) (*Authority, error) {
	leaf, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	return &Authority{cert: cert, pem: certPEM, key: key, leafKey: leaf, leafs: map[policy.Host]*tls.Certificate{}}, nil
}

// PEM returns the authority's certificate, which sandboxes have to trust.
func (a *Authority) PEM() []byte { return a.pem }

// leaf returns a certificate for a host.
func (a *Authority) leaf(h policy.Host) (*tls.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.leafs[h]; c != nil && time.Until(c.Leaf.NotAfter) > leafLife/2 {
		return c, nil
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"Warren"}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(leafLife),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	if ip, ok := h.Addr(); ok {
		template.IPAddresses = []net.IP{ip.AsSlice()}
	} else {
		template.DNSNames = []string{string(h)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, a.leafKey.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if len(a.leafs) >= maxLeafs {
		clear(a.leafs)
	}
	c := &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: a.leafKey, Leaf: leaf}
	a.leafs[h] = c
	return c, nil
}

// serial returns a serial number of 120 random bits.
func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // the system has no randomness
	}
	return n
}
