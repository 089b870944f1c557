package secret

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sync/singleflight"
)

// Errors of sealed values.
var (
	// ErrKey: the value is sealed under another key than this box has.
	ErrKey = errors.New("sealed under another key")
	// ErrSealed: the sealed text is damaged, or belongs to another name.
	ErrSealed = errors.New("the sealed value is damaged or belongs to another name")
)

const (
	sealedPrefix  = "warren-sealed"
	sealedVersion = "1"
	saltSize      = 16
)

// Box seals values and opens them. Each value has a key of its own, derived (HKDF-SHA256) from the box's key and a random
// salt; the cipher is AES-256-GCM, with the name of the secret and the key's id bound to it. A box never changes, and its
// methods may be called concurrently.
type Box struct {
	key  *Key
	keys map[string]*Key
}

// NewBox returns a box that seals under key and opens what was sealed under it or an older one.
func NewBox(key *Key, older ...*Key) *Box {
	b := &Box{key: key, keys: map[string]*Key{key.id: key}}
	for _, k := range older {
		if b.keys[k.id] == nil {
			b.keys[k.id] = k
		}
	}
	return b
}

// Rotate returns a box that seals under key and opens what old opened. Values move to the new key by [Box.Reseal]; the old key
// may go when none is left.
func Rotate(old *Box, key *Key) *Box {
	b := NewBox(key)
	for id, k := range old.keys {
		if b.keys[id] == nil {
			b.keys[id] = k
		}
	}
	return b
}

// KeyID names the key that the box seals under.
func (b *Box) KeyID() string { return b.key.id }

// Seal returns a value as text for storage: version, key id and ciphertext. The value must pass [CheckValue].
func (b *Box) Seal(ctx context.Context, name string, value []byte) (string, error) {
	if err := CheckValue(value); err != nil {
		return "", fmt.Errorf("secret %q: %w", name, err)
	}
	master, wrapped, err := b.key.toSeal(ctx)
	if err != nil {
		return "", fmt.Errorf("secret %q: %w", name, err)
	}
	random := make([]byte, saltSize)
	if _, err := rand.Read(random); err != nil {
		return "", err
	}
	head := strings.Join([]string{sealedPrefix, sealedVersion, b.key.id, base64.RawURLEncoding.EncodeToString(wrapped)}, ":")
	aead, err := valueCipher(master, random)
	if err != nil {
		return "", err
	}
	// The key is used once, so a fixed nonce is one that never repeats.
	sealed := aead.Seal(random, make([]byte, aead.NonceSize()), value, bound(head, name))
	return head + ":" + base64.RawURLEncoding.EncodeToString(sealed), nil
}

// Open returns the value that Seal was given with the same name. The caller clears it when it is done. The error matches
// [ErrKey] or [ErrSealed], or is that of the KMS hook.
func (b *Box) Open(ctx context.Context, name, sealed string) ([]byte, error) {
	value, _, err := b.open(ctx, name, sealed)
	return value, err
}

func (b *Box) open(ctx context.Context, name, sealed string) ([]byte, string, error) {
	fail := func(err error) ([]byte, string, error) { return nil, "", fmt.Errorf("secret %q: %w", name, err) }
	part := strings.Split(sealed, ":")
	if len(part) != 5 || part[0] != sealedPrefix {
		return fail(fmt.Errorf("%w: it does not have the form %s:VERSION:KEY:…", ErrSealed, sealedPrefix))
	}
	if part[1] != sealedVersion {
		return fail(fmt.Errorf("%w: it has version %.20q; this program knows %s", ErrSealed, part[1], sealedVersion))
	}
	key := b.keys[part[2]]
	if key == nil {
		return fail(fmt.Errorf("%w: it needs key %.64q, and this is key %s; put the key back that the value was sealed with, or set the secret again",
			ErrKey, part[2], b.key.id))
	}
	wrapped, err := base64.RawURLEncoding.Strict().DecodeString(part[3])
	payload, perr := base64.RawURLEncoding.Strict().DecodeString(part[4])
	if err != nil || perr != nil || len(payload) < saltSize {
		return fail(fmt.Errorf("%w: its encoding is broken", ErrSealed))
	}
	master, err := key.toOpen(ctx, wrapped)
	if err != nil {
		return fail(err)
	}
	aead, err := valueCipher(master, payload[:saltSize])
	if err != nil {
		return fail(err)
	}
	head := sealed[:len(sealed)-len(part[4])-1]
	value, err := aead.Open(nil, make([]byte, aead.NonceSize()), payload[saltSize:], bound(head, name))
	if err != nil {
		return fail(fmt.Errorf("%w (key %s)", ErrSealed, key.id))
	}
	return value, part[2], nil
}

// Reseal returns a sealed value under the box's present key, and whether it was under another one.
func (b *Box) Reseal(ctx context.Context, name, sealed string) (string, bool, error) {
	value, id, err := b.open(ctx, name, sealed)
	if err != nil {
		return "", false, err
	}
	defer clear(value)
	if id == b.key.id {
		return sealed, false, nil
	}
	again, err := b.Seal(ctx, name, value)
	return again, err == nil, err
}

// bound is what a value cannot be opened without: the sealed text's head and the secret's name.
func bound(head, name string) []byte { return []byte(head + "\x00" + name) }

func valueCipher(master, salt []byte) (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, master, salt, "warren secret value v1", keySize)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// cache holds data keys that a KMS opened, so that it is asked once for each.
type cache struct {
	// sealing is held while a data key to seal with is made, open joins those who wait for one to be opened.
	sealing chan struct{}
	open    singleflight.Group

	mu   sync.Mutex
	keys map[string][]byte // wrapped → data key
	own  []byte            // wrapped, of the key to seal with
}
