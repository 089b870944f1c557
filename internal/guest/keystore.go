package guest

import (
	"bytes"
	"crypto/sha1"
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
	"unicode/utf16"
)

// Java trusts what is in a file of its own, whose formats are its own too. There is no variable that adds to it without each program
// saying so on its standard error, so the certificate is written into it.

// keyStores are where Java looks for whom to trust.
var keyStores = []string{
	"/etc/ssl/certs/java/cacerts", // Debian
	"/etc/pki/java/cacerts",       // Fedora, RHEL
	"/etc/pki/ca-trust/extracted/java/cacerts",
	"/usr/lib/jvm/*/lib/security/cacerts",
	"/usr/lib/jvm/*/jre/lib/security/cacerts",
	"/usr/local/*/lib/security/cacerts", // the images of openjdk
	"/opt/*/lib/security/cacerts",
	"/opt/*/*/lib/security/cacerts", // those of Temurin
}

// trustJava adds a certificate to Java's files. One of a kind that it does not know, or with a password that is not the usual one, is left as it
// is: that Java does not trust the gateway is no reason to have no sandbox.
func trustJava(cert *x509.Certificate) {
	done := map[string]bool{}
	for _, pattern := range keyStores {
		paths, _ := filepath.Glob(pattern) // it fails for a bad pattern only
		for _, path := range paths {
			real, err := filepath.EvalSymlinks(path)
			if err != nil || done[real] {
				continue
			}
			done[real] = true
			had, err := readBundle(real)
			if err != nil || bytes.Contains(had, cert.Raw) {
				continue
			}
			more, err := addToKeyStore(had, cert, time.Now())
			if err == nil {
				err = writeTrust(real, more)
			}
			if err != nil {
				fmt.Fprintf(os.Stderr, "warren-guest: by %s Java does not trust the gateway: %v\n", path, err)
			}
		}
	}
}

// keyStoreAlias is the certificate's name in a key store.
const keyStoreAlias = "warren"

// addToKeyStore returns a key store with one more certificate.
func addToKeyStore(store []byte, cert *x509.Certificate, now time.Time) ([]byte, error) {
	if len(store) > 12+sha1.Size && binary.BigEndian.Uint32(store) == 0xfeedfeed {
		return addToJKS(store, cert, now)
	}
	return addToPKCS12(store, cert)
}

// addToJKS adds to a file of the format that Java has had from its beginning: entries, and a digest of them and of the password.
func addToJKS(store []byte, cert *x509.Certificate, now time.Time) ([]byte, error) {
	if v := binary.BigEndian.Uint32(store[4:]); v != 2 {
		return nil, fmt.Errorf("a key store of version %d, want 2", v)
	}
	body, sum := store[:len(store)-sha1.Size], store[len(store)-sha1.Size:]
	digest := func(b []byte) []byte {
		h := sha1.New()
		for _, c := range utf16.Encode([]rune("changeit")) {
			h.Write([]byte{byte(c >> 8), byte(c)})
		}
		h.Write([]byte("Mighty Aphrodite"))
		h.Write(b)
		return h.Sum(nil)
	}
	if !bytes.Equal(digest(body), sum) {
		return nil, errors.New("its password is not the usual one")
	}
	out := bytes.Clone(body)
	binary.BigEndian.PutUint32(out[8:], binary.BigEndian.Uint32(out[8:])+1)
	text := func(s string) {
		out = binary.BigEndian.AppendUint16(out, uint16(len(s)))
		out = append(out, s...)
	}
	out = binary.BigEndian.AppendUint32(out, 2) // a certificate to trust
	text(keyStoreAlias)
	out = binary.BigEndian.AppendUint64(out, uint64(now.UnixMilli()))
	text("X.509")
	out = binary.BigEndian.AppendUint32(out, uint32(len(cert.Raw)))
	out = append(out, cert.Raw...)
	return append(out, digest(out)...), nil
}

var (
	oidData        = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag     = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509        = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidName        = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	oidJavaTrusted = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1}
	oidAnyUsage    = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

// typed is a value and what it is.
type typed struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// pfx is a PKCS #12 file. MAC is there if it has a password.
type pfx struct {
	Version int
	Safe    typed
	MAC     asn1.RawValue `asn1:"optional"`
}

// addToPKCS12 adds to a file as Java 18 and later come with: PKCS #12 without a password.
func addToPKCS12(store []byte, cert *x509.Certificate) ([]byte, error) {
	var p pfx
	if rest, err := asn1.Unmarshal(store, &p); err != nil || len(rest) > 0 || p.Version != 3 || !p.Safe.Type.Equal(oidData) {
		return nil, errors.New("it is no key store that the guest knows")
	}
	if len(p.MAC.FullBytes) > 0 {
		return nil, errors.New("it has a password")
	}
	var content []byte
	if rest, err := asn1.Unmarshal(p.Safe.Value.Bytes, &content); err != nil || len(rest) > 0 {
		return nil, errors.New("its content is no string of bytes")
	}
	var parts []asn1.RawValue
	if rest, err := asn1.Unmarshal(content, &parts); err != nil || len(rest) > 0 {
		return nil, errors.New("its content is no list")
	}
	part, err := pkcs12Part(cert)
	if err != nil {
		return nil, err
	}
	if content, err = asn1.Marshal(append(parts, asn1.RawValue{FullBytes: part})); err != nil {
		return nil, err
	}
	if p.Safe, err = data(content); err != nil {
		return nil, err
	}
	return asn1.Marshal(struct {
		Version int
		Safe    typed
	}{p.Version, p.Safe})
}

// data is a string of bytes as PKCS #7 has it.
func data(b []byte) (typed, error) {
	v, err := wrapped(b)
	return typed{oidData, v}, err
}

// wrapped is a value behind the tag 0.
func wrapped(v any) (asn1.RawValue, error) {
	b, err := asn1.Marshal(v)
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: b}, err
}

// pkcs12Part is a part of a file with one certificate, marked as Java marks those that it trusts.
func pkcs12Part(cert *x509.Certificate) ([]byte, error) {
	type attribute struct {
		Type   asn1.ObjectIdentifier
		Values []asn1.RawValue `asn1:"set"`
	}
	var name []byte
	for _, c := range utf16.Encode([]rune(keyStoreAlias)) {
		name = append(name, byte(c>>8), byte(c))
	}
	usage, err := asn1.Marshal(oidAnyUsage)
	if err != nil {
		return nil, err
	}
	der, err := wrapped(cert.Raw)
	if err != nil {
		return nil, err
	}
	bag, err := wrapped(typed{oidX509, der})
	if err != nil {
		return nil, err
	}
	type safeBag struct {
		Type       asn1.ObjectIdentifier
		Value      asn1.RawValue
		Attributes []attribute `asn1:"set"`
	}
	bags, err := asn1.Marshal([]safeBag{{oidCertBag, bag, []attribute{
		{oidName, []asn1.RawValue{{Tag: asn1.TagBMPString, Bytes: name}}},
		{oidJavaTrusted, []asn1.RawValue{{FullBytes: usage}}},
	}}})
	if err != nil {
		return nil, err
	}
	part, err := data(bags)
	if err != nil {
		return nil, err
	}
	return asn1.Marshal(part)
}
