// Package secret keeps values sealed and lets the gateway use them for sandboxes that never see them.
//
// A [Box] seals values for storage under a key from a file, the environment or a KMS hook. For use, a sandbox gets a
// random [NewPlaceholder] instead of the value. On the way out, [Injector.Inject] puts the value into the one place that a grant
// names and refuses the placeholder everywhere else; on the way back, a [Scrubber] puts the placeholder where the value
// shows.
//
// # What comes back
//
// A scrubber knows a value as it is; escaped in JSON, HTML or a URL, wholly percent-encoded; in hex, lower or upper; in base64 of
// both alphabets on one line, wherever it begins in the encoded text, such as in basic auth (up to 4 bits at each end of
// it mix with the neighbours and stay). It does not know it compressed, encrypted, in other bases, encoded twice, broken
// into lines, or split between answers. [RestrictEncoding] asks upstream for nothing compressed and for no parts, and what comes so
// all the same is opened or refused.
package secret

import (
	"bytes"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
)

const (
	// MaxValue is how many bytes a value may have.
	MaxValue = 16 << 10
	// MinValue is how few: a shorter one cannot be told from ordinary text in what comes back.
	MinValue = 8
)

// ErrValue is what a refused value matches.
var ErrValue = errors.New("the value cannot be a secret")

// CheckValue says whether a value can be kept: 8 bytes to 16 KiB of printable ASCII, no blank at the ends. The error says
// what is wrong and what to do, matches [ErrValue], and holds nothing of the value.
func CheckValue(value []byte) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrValue, fmt.Sprintf(format, args...))
	}
	switch trimmed := bytes.TrimRight(value, "\r\n"); {
	case len(value) == 0:
		return refuse("it is empty")
	case len(value) > MaxValue:
		return refuse("it has %d bytes, and %d at most fit into a request's header", len(value), MaxValue)
	case bytes.Contains(value, []byte("-----BEGIN ")):
		return refuse("it is a PEM file, whose lines fit into no header. Encode it as one line (base64 -w0) if the service takes that, " +
			"or use a token; a key that signs must stay with a service that signs")
	case len(trimmed) < len(value) && !bytes.ContainsAny(trimmed, "\r\n"):
		return refuse("it ends with a line break; give it without (printf %%s instead of echo)")
	}
	for i, c := range value {
		switch {
		case c == '\r' || c == '\n':
			return refuse("it has several lines (byte %d); a header takes one. Encode it as one line (base64 -w0) if the service takes that", i)
		case c == 0:
			return refuse("byte %d is NUL; it looks like a binary file. Encode it as text (base64 -w0) if the service takes that", i)
		case c >= 0x80:
			return refuse("byte %d is not ASCII; headers carry no other characters reliably. Look for a typographic quote or blank from a copied text", i)
		case c < ' ' || c == 0x7f:
			return refuse("byte %d is a control character (0x%02x)", i, c)
		}
	}
	if value[0] == ' ' || value[len(value)-1] == ' ' {
		return refuse("it begins or ends with a blank, which servers remove")
	}
	if len(value) < MinValue {
		return refuse("it has %d bytes; one of fewer than %d cannot be told from ordinary text in what comes back", len(value), MinValue)
	}
	return nil
}

// PlaceholderPrefix begins the placeholders of grants that ask for no other.
const PlaceholderPrefix = "wsec_"

var letters = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewPlaceholder returns a random text that stands for a value in one sandbox: the prefix and 32 characters (160 bits), 36
// after GitHub's prefixes, which clients count. The empty prefix means [PlaceholderPrefix]; others are for clients that look
// at a token's beginning, such as "ghp_": letters, digits, _ and -, 16 at most. Nothing derives it: the caller keeps it.
func NewPlaceholder(prefix string) (string, error) {
	if prefix == "" {
		prefix = PlaceholderPrefix
	}
	if len(prefix) > 16 || strings.Trim(prefix, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "" {
		return "", fmt.Errorf("placeholder prefix %.40q: want at most 16 letters, digits, _ and -, such as ghp_", prefix)
	}
	n := 32
	if len(prefix) == 4 && strings.HasPrefix(prefix, "gh") && prefix[3] == '_' {
		n = 36
	}
	random := make([]byte, 25)
	if _, err := rand.Read(random); err != nil {
		return "", err
	}
	return prefix + letters.EncodeToString(random)[:n], nil
}
