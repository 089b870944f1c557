package git

import (
	"fmt"
	"strings"

	"github.com/warren-sandbox/warren"
)

// CheckRef returns an error unless name can be a branch, a tag or a full ref name: git's own rules
// (git-check-ref-format), and besides no leading "-", so that it is never taken for an option.
func CheckRef(name string) error {
	bad := func(why string) error {
		return fmt.Errorf("ref name %q: %s: %w", clip(name), why, warren.ErrInvalid)
	}
	switch {
	case name == "":
		return bad("is empty")
	case len(name) > 255:
		return bad("is longer than 255 bytes")
	case name[0] == '-':
		return bad("starts with a dash")
	case name == "@" || strings.Contains(name, "@{"):
		return bad("has @{")
	case strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Contains(name, "//"):
		return bad("has an empty part")
	case strings.HasSuffix(name, ".") || strings.Contains(name, ".."):
		return bad("has .. or ends with a dot")
	}
	for i := 0; i < len(name); i++ {
		if c := name[i]; c <= ' ' || c == 0x7f || strings.IndexByte(`~^:?*[\`, c) >= 0 {
			return bad("has a character that git refuses")
		}
	}
	for part := range strings.SplitSeq(name, "/") {
		if strings.HasPrefix(part, ".") || strings.HasSuffix(part, ".lock") {
			return bad(`has a part that starts with "." or ends with ".lock"`)
		}
	}
	return nil
}

// CheckRevision accepts what CheckRef accepts and a commit id, which may be short. Expressions such as main~3 are
// refused: a ref names a place, not a program.
func CheckRevision(name string) error { return CheckRef(name) }

// IsObjectID reports whether s is a full object id.
func IsObjectID(s string) bool { return (len(s) == 40 || len(s) == 64) && isHex(s) }

// IsShortID reports whether s may be the beginning of an object id.
func IsShortID(s string) bool { return len(s) >= 4 && len(s) <= 64 && isHex(s) }

func isHex(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
