package engine

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
)

const alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"

// newID returns a letter and 19 random characters, 98 bits: never the same twice.
func newID(kind byte) string {
	b := make([]byte, 0, 20)
	b = append(b, kind)
	var raw [32]byte
	for {
		rand.Read(raw[:])
		for _, r := range raw {
			if r >= 252 { // 7*36; the rest would favour the first characters
				continue
			}
			if b = append(b, alphabet[r%36]); len(b) == 20 {
				return string(b)
			}
		}
	}
}

// isID says whether s has the form of an id of that kind.
func isID(s string, kind byte) bool {
	if len(s) != 20 || s[0] != kind {
		return false
	}
	for i := 1; i < len(s); i++ {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
