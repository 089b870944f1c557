package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// Host is the one canonical form of a host name or address literal: lower-case ASCII A-labels without a trailing dot,
// or netip.Addr.String of an address that is neither IPv4-mapped nor has a zone. Deciding, dialling, inspecting,
// injecting and evidence use this form and no other.
type Host string

// The longest name and label that DNS can carry, in bytes and without a trailing dot.
const (
	maxName  = 253
	maxLabel = 63
)

// lookup is IDNA2008's profile for looking names up. Lengths are checked by ParseHost, for names that are ASCII too.
var lookup = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.CheckJoiners(true), idna.Transitional(false))

// ParseHost returns the canonical form of a host name or address literal.
//
// Names are of letters, digits, hyphens and underscores, in labels of 1 to 63 bytes, 253 in all; case is folded and
// one trailing dot is dropped. What is not ASCII, full-width dots included, is mapped as IDNA2008 says, and refused if
// that fails or if a label mixes scripts. A name whose last label is a number must be an IPv4 address of four decimal
// numbers: 127.1, 0x7f.0.0.1 and 2130706433 are addresses to some resolvers and names to others. IPv6 addresses have
// neither brackets nor a zone.
func ParseHost(s string) (Host, error) {
	bad := func(format string, args ...any) (Host, error) {
		return "", fmt.Errorf("host %.100q: %s", s, fmt.Sprintf(format, args...))
	}
	if s == "" {
		return "", fmt.Errorf("the host is empty; name one")
	}
	// Four bytes are the most that one of a name can have been written with.
	if len(s) > 4*(maxName+1) {
		return bad("longer than the %d bytes that a name can have", maxName)
	}
	if !utf8.ValidString(s) {
		return bad("not UTF-8")
	}
	ascii := true
	for _, c := range s {
		switch {
		case c >= utf8.RuneSelf:
			ascii = false
		case c == ':' || nameByte(byte(c)) || c >= 'A' && c <= 'Z' || c == '.':
		case c == '[' || c == ']':
			return bad("write the address without brackets")
		case c == '*':
			return bad("a pattern is not a host")
		default:
			return bad("%q is not part of a host name", c)
		}
	}
	if strings.Contains(s, ":") {
		if !ascii {
			return bad("not an IPv6 address, and a name has no colon")
		}
		a, err := netip.ParseAddr(s)
		if err != nil {
			return bad("not an IPv6 address, and a name has no colon; give the port apart")
		}
		return Host(a.Unmap().String()), nil
	}
	name := strings.ToLower(s)
	if !ascii {
		var err error
		if name, err = toASCII(s); err != nil {
			return bad("%v", err)
		}
	}
	// An address with a dot behind it is one to some clients only.
	if ascii && numeric(name) {
		a, err := netip.ParseAddr(name)
		if err != nil || !a.Is4() {
			return bad("its last part is a number, so it has to be an IPv4 address of four decimal numbers, such as 192.0.2.1")
		}
		return Host(name), nil
	}
	name = strings.TrimSuffix(name, ".")
	if len(name) > maxName {
		return bad("%d bytes; a name has at most %d", len(name), maxName)
	}
	for label := range strings.SplitSeq(name, ".") {
		if err := checkLabel(label); err != nil {
			return bad("%v", err)
		}
	}
	if numeric(name) {
		return bad("its last part is a number; write an address with plain digits and nothing behind it")
	}
	return Host(name), nil
}

// Addr returns the address that h is a literal of.
func (h Host) Addr() (netip.Addr, bool) {
	// Only addresses have colons or end with a number.
	if strings.IndexByte(string(h), ':') < 0 && (h == "" || h[len(h)-1] < '0' || h[len(h)-1] > '9') {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(string(h))
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, false
	}
	return a, true
}

// canonical reports whether h could have come from ParseHost. It is what stands between a caller that forgot to parse
// and a wildcard that matches the end of anything.
func (h Host) canonical() bool {
	if a, ok := h.Addr(); ok {
		return string(h) == a.String()
	}
	if len(h) == 0 || len(h) > maxName {
		return false
	}
	start := 0
	for i := 0; i <= len(h); i++ {
		if i < len(h) && h[i] != '.' {
			if !nameByte(h[i]) {
				return false
			}
			continue
		}
		if i == start || i-start > maxLabel || h[start] == '-' || h[i-1] == '-' {
			return false
		}
		if label := string(h[start:i]); strings.HasPrefix(label, "xn--") && checkLabel(label) != nil {
			return false
		}
		start = i + 1
	}
	return !numeric(string(h))
}

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// numeric reports whether the last label, not counting an empty one, is a number to some parser of addresses.
func numeric(name string) bool {
	name = strings.TrimSuffix(name, ".")
	last := name[strings.LastIndexByte(name, '.')+1:]
	if last == "" {
		return false
	}
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

// checkLabel checks one lower-case label, of letters that nameByte has already taken.
func checkLabel(label string) error {
	switch {
	case label == "":
		return fmt.Errorf("it has an empty label; write single dots, and at most one at the end")
	case len(label) > maxLabel:
		return fmt.Errorf("the label %.20q… has %d bytes; a label has at most %d", label, len(label), maxLabel)
	case label[0] == '-' || label[len(label)-1] == '-':
		return fmt.Errorf("the label %q begins or ends with a hyphen", label)
	case !strings.HasPrefix(label, "xn--"):
		return nil
	}
	// What decodes to something else than it was encoded from has two names.
	u, err := lookup.ToUnicode(label)
	if err != nil {
		return fmt.Errorf("the label %q is not valid Punycode", label)
	}
	if again, err := lookup.ToASCII(u); err != nil || again != label {
		return fmt.Errorf("the label %q is not the canonical form of %+q", label, u)
	}
	return oneScript(u)
}

// toASCII maps a name that is not ASCII.
func toASCII(s string) (string, error) {
	// The dots that IDNA knows. Any other character that maps to a dot is refused below.
	labels := strings.Split(strings.NewReplacer("。", ".", "．", ".", "｡", ".").Replace(s), ".")
	for i, label := range labels {
		if isASCII(label) {
			labels[i] = strings.ToLower(label)
			continue
		}
		a, err := lookup.ToASCII(label)
		if err != nil {
			return "", fmt.Errorf("the label %+q cannot be looked up: %v", label, err)
		}
		if strings.ContainsFunc(a, func(r rune) bool { return r >= utf8.RuneSelf || !nameByte(byte(r)) }) {
			return "", fmt.Errorf("the label %+q maps to %+q, which is no label", label, a)
		}
		labels[i] = a
	}
	return strings.Join(labels, "."), nil
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// together are the scripts that one language writes together, as Unicode's "highly restrictive" level has it.
var together = [][]*unicode.RangeTable{
	{unicode.Latin, unicode.Han, unicode.Hiragana, unicode.Katakana},
	{unicode.Latin, unicode.Han, unicode.Bopomofo},
	{unicode.Latin, unicode.Han, unicode.Hangul},
}

// oneScript refuses labels whose letters come from scripts that no language mixes: most look-alikes of known names are such.
func oneScript(label string) error {
	var scripts []*unicode.RangeTable
	names := map[*unicode.RangeTable]string{}
next:
	for _, r := range label {
		if unicode.In(r, unicode.Common, unicode.Inherited) {
			continue
		}
		for _, t := range scripts {
			if unicode.Is(t, r) {
				continue next
			}
		}
		for name, t := range unicode.Scripts {
			if unicode.Is(t, r) {
				scripts, names[t] = append(scripts, t), name
				continue next
			}
		}
		return fmt.Errorf("the label %+q has the letter %+q of no known script", label, r)
	}
	if len(scripts) < 2 {
		return nil
	}
sets:
	for _, set := range together {
		for _, t := range scripts {
			if !slices.Contains(set, t) {
				continue sets
			}
		}
		return nil
	}
	return fmt.Errorf("the label %+q mixes %s with %s letters, as look-alikes do", label, names[scripts[0]], names[scripts[1]])
}
