package guest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

func testAuthority(t testing.TB, name string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestKeyStore has Java's own program make key stores of both kinds, and read them when a certificate has been added.
func TestKeyStore(t *testing.T) {
	testenv.NeedsTool(t, "keytool")
	dir := t.TempDir()
	had, more := testAuthority(t, "one that was there"), testAuthority(t, "the gateway")
	file := filepath.Join(dir, "had.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: had.Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	keytool := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("keytool", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("keytool %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	open := []string{"-J-Dkeystore.pkcs12.certProtectionAlgorithm=NONE", "-J-Dkeystore.pkcs12.macAlgorithm=NONE"}
	for _, kind := range []struct {
		name, store string
		flags       []string
		fails       string
	}{
		{"jks", "JKS", []string{"-storepass", "changeit"}, ""},
		{"jks with a password", "JKS", []string{"-storepass", "another"}, "password"},
		{"pkcs12", "PKCS12", append([]string{"-storepass", "changeit"}, open...), ""},
		{"pkcs12 with a password", "PKCS12", []string{"-storepass", "changeit"}, "password"},
	} {
		t.Run(kind.name, func(t *testing.T) {
			path := filepath.Join(dir, strings.ReplaceAll(kind.name, " ", "-"))
			keytool(append([]string{"-importcert", "-noprompt", "-storetype", kind.store, "-keystore", path, "-alias", "had", "-file", file}, kind.flags...)...)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b, err = addToKeyStore(b, more, time.Now())
			if kind.fails != "" {
				if err == nil || !strings.Contains(err.Error(), kind.fails) {
					t.Errorf("error %v, want one about its %s", err, kind.fails)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			list := keytool(append([]string{"-list", "-v", "-keystore", path}, kind.flags...)...)
			for _, want := range []string{"CN=one that was there", "CN=the gateway", "Alias name: warren", "contains 2 entries"} {
				if !strings.Contains(list, want) {
					t.Errorf("the key store has no %q:\n%s", want, list)
				}
			}
			if n := strings.Count(list, "trustedCertEntry"); n != 2 {
				t.Errorf("%d certificates are trusted, want 2", n)
			}
		})
	}
}

// FuzzKeyStore adds to what an image may have in the place of a key store.
func FuzzKeyStore(f *testing.F) {
	cert := testAuthority(f, "the gateway")
	f.Add([]byte{})
	f.Add([]byte("no key store"))
	f.Add(append([]byte{0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2, 0, 0, 0, 0}, make([]byte, 21)...))
	part, err := pkcs12Part(cert)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(part)
	f.Fuzz(func(t *testing.T, store []byte) {
		before := bytes.Clone(store)
		out, err := addToKeyStore(store, cert, time.Unix(1, 0))
		if !bytes.Equal(store, before) {
			t.Error("what was read was changed")
		}
		if err == nil && !bytes.Contains(out, cert.Raw) {
			t.Errorf("added to %q, and it is not there", store)
		}
	})
}
