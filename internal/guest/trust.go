package guest

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
)

// bundles are where systems keep the certificates that they trust, in one file.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt", // Debian, Alpine, Arch
	"/etc/pki/tls/certs/ca-bundle.crt",   // Fedora, RHEL
	"/etc/ssl/ca-bundle.pem",             // SUSE
	"/etc/ssl/cert.pem",                  // Alpine's libressl
}

// authorityFile holds the gateway's certificate alone, for programs that take one besides their own.
const authorityFile = "/usr/local/share/ca-certificates/warren.crt"

// maxAuthority bounds what is taken for a certificate, maxBundle what is read of those of the system.
const (
	maxAuthority = 64 << 10
	maxBundle    = 8 << 20
)

// authority is the body of POST /warren/trust.
type authority struct {
	// Certificate in PEM form.
	Certificate string `json:"certificate"`
}

// trust makes the sandbox's programs trust the gateway's certificate.
func (s *Server) trust(w http.ResponseWriter, r *http.Request) {
	if !trusted(r) {
		httpError(w, http.StatusForbidden, "only the host may say whom to trust")
		return
	}
	var req authority
	if !readJSON(w, r, &req) {
		return
	}
	if err := s.trustAuthority(req.Certificate); err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// trustAuthority adds a certificate to the system's, and names the files in the environment of what is started from now on, for
// the programs that do not look there. It may be repeated.
func (s *Server) trustAuthority(text string) error {
	block, _ := pem.Decode([]byte(text))
	if len(text) > maxAuthority || block == nil || block.Type != "CERTIFICATE" {
		return errors.New("the authority is no certificate in PEM form")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !cert.IsCA {
		return errors.New("the certificate is none of an authority")
	}
	if !s.cfg.ReapOrphans {
		return nil // this is no sandbox: its files are somebody's
	}
	own := pem.EncodeToMemory(block)
	if err := writeTrust(authorityFile, own); err != nil {
		return err
	}
	bundle := ""
	for _, path := range bundles {
		had, err := readBundle(path)
		if err != nil {
			continue // not this system's
		}
		if bundle == "" {
			bundle = path
		}
		if bytes.Contains(had, own) {
			continue
		}
		if len(had) > 0 && had[len(had)-1] != '\n' {
			had = append(had, '\n')
		}
		if err := writeTrust(path, append(had, own...)); err != nil {
			return err
		}
	}
	if bundle == "" {
		bundle = bundles[0]
		if err := writeTrust(bundle, own); err != nil {
			return err
		}
	}
	trustJava(cert)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings.trust = map[string]string{"NODE_EXTRA_CA_CERTS": authorityFile}
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO"} {
		s.settings.trust[name] = bundle
	}
	return nil
}

func readBundle(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, errors.New("no regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, maxBundle+1))
	if err == nil && len(b) > maxBundle {
		err = errors.New("too large")
	}
	return b, err
}

// writeTrust replaces a file in one step, so that nobody reads half of it. A link stays one, and leads to the new file.
func writeTrust(path string, data []byte) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".warren-*")
	if err != nil {
		return fmt.Errorf("trust the gateway: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
