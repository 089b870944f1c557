package policy

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxPath is the longest path that is decided on, in bytes. Servers take 8 KiB for the whole request line.
const maxPath = 16 << 10

// CanonicalPath returns the path that a request is decided by and that is then sent upstream. raw is the path as it was
// received, escaped and without query.
//
// Escapes of unreserved characters are decoded and other escapes written with capital letters; what may not stand in a
// path is escaped. "//" becomes "/", and "." and ".." are resolved. Refused are dot segments that climb out of the root
// or hide behind an encoded slash or a parameter, backslashes, NUL and other control characters in either form, escapes
// of escapes of these, bytes that are not UTF-8 (which ".." can be hidden in too), and paths over 16 KiB.
//
// "%2F" and ";parameters" remain: npm sends the one, and some servers need the other. Servers read them in two ways,
// so rules decide on both readings; see [Policy.Request].
func CanonicalPath(raw string) (string, error) {
	if len(raw) > maxPath {
		return "", fmt.Errorf("the path has %d bytes; at most %d are decided on", len(raw), maxPath)
	}
	if raw == "" {
		return "/", nil
	}
	if plainPath(raw) {
		return raw, nil
	}
	bad := func(format string, args ...any) (string, error) {
		return "", fmt.Errorf("path %.100q: %s", raw, fmt.Sprintf(format, args...))
	}
	if raw[0] != '/' {
		return bad("it has to begin with a slash")
	}
	out := make([]byte, 0, len(raw)+16)
	for i := 0; i < len(raw); i++ {
		c, escaped := raw[i], false
		if c == '%' {
			var ok bool
			if c, ok = unhex(raw[i+1:]); !ok {
				return bad("%% is not followed by two hexadecimal digits")
			}
			escaped = true
			i += 2
		}
		switch {
		case c < ' ' || c == 0x7f:
			return bad("it holds the control character %#02x", c)
		case c == '\\':
			return bad("it holds a backslash, which some servers take for a slash")
		case !escaped && (c == '?' || c == '#'):
			return bad("it holds %q; the query is given apart, and a fragment is never sent", c)
		case unreserved(c), !escaped && (c == '/' || subDelim(c)):
			out = append(out, c)
		default:
			out = append(out, '%', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	// Looked for here and not above, because the digits can be escaped themselves.
	for rest := string(out); ; {
		_, after, ok := strings.Cut(rest, "%25")
		if !ok {
			break
		}
		if inner, ok := unhex(after); ok && (inner < ' ' || strings.IndexByte("./\\;%\x7f", inner) >= 0) {
			return bad("it holds an escape of an escape")
		}
		rest = after
	}
	// Segments are resolved when nothing is hidden any more.
	var segments []string
	parts := strings.Split(string(out[1:]), "/")
	for i, s := range parts {
		last := i == len(parts)-1
		switch s {
		case "":
			if last {
				segments = append(segments, "")
			}
			continue
		case ".", "..":
			if s == ".." {
				if len(segments) == 0 {
					return bad("it climbs out of the root")
				}
				segments = segments[:len(segments)-1]
			}
			if last {
				segments = append(segments, "")
			}
			continue
		}
		segments = append(segments, s)
	}
	path := "/" + strings.Join(segments, "/")
	for _, r := range readings(path) {
		if !utf8.ValidString(r) {
			return bad("its escapes are not UTF-8")
		}
		for s := range strings.SplitSeq(r, "/") {
			if s == "." || s == ".." {
				return bad("a dot segment is hidden behind an encoded slash or a parameter")
			}
		}
	}
	return path, nil
}

// plainPath reports whether nothing in a path has to be looked at closely, as in most.
func plainPath(raw string) bool {
	for i := range len(raw) {
		switch c := raw[i]; {
		case c == '/':
			if i+1 < len(raw) && (raw[i+1] == '/' || raw[i+1] == '.') {
				return false
			}
		case i == 0, c == ';', !unreserved(c) && !subDelim(c):
			return false
		}
	}
	return true
}

// readings are the ways in which servers take a canonical path: decoded, with an encoded slash as part of a segment or
// as a slash, with parameters or without. Nearly every path has one.
func readings(path string) []string {
	list := []string{decode(path)}
	if strings.Contains(path, "%2F") {
		list = append(list, collapse(strings.ReplaceAll(list[0], "%2F", "/")))
	}
	for _, p := range list {
		if !strings.Contains(p, ";") {
			continue
		}
		segments := strings.Split(p, "/")
		for i, s := range segments {
			segments[i], _, _ = strings.Cut(s, ";")
		}
		if q := collapse(strings.Join(segments, "/")); !slices.Contains(list, q) {
			list = append(list, q)
		}
	}
	return list
}

// decode decodes the escapes of a canonical path except that of the slash, which would be another path.
func decode(path string) string {
	if strings.IndexByte(path, '%') < 0 {
		return path
	}
	out := make([]byte, 0, len(path))
	for i := 0; i < len(path); i++ {
		if path[i] != '%' || strings.HasPrefix(path[i:], "%2F") {
			out = append(out, path[i])
			continue
		}
		c, ok := unhex(path[i+1:])
		if !ok {
			out = append(out, path[i])
			continue
		}
		out = append(out, c)
		i += 2
	}
	return string(out)
}

func collapse(path string) string {
	for strings.Contains(path, "//") {
		path = strings.ReplaceAll(path, "//", "/")
	}
	return path
}

const hexDigits = "0123456789ABCDEF"

func unhex(s string) (byte, bool) {
	if len(s) < 2 {
		return 0, false
	}
	var n byte
	for _, c := range []byte(s[:2]) {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		n = n<<4 | c
	}
	return n, true
}

func unreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0
}

func subDelim(c byte) bool { return strings.IndexByte("!$&'()*+,;=:@", c) >= 0 }

// pathPattern is a pattern of paths: segments, the last of which may be "**".
type pathPattern struct {
	text     string
	segments []segment
	rest     bool
}

// segment is the text between slashes, cut at its stars.
type segment []string

// parsePath reads the pattern of a rule.
func parsePath(s string) (pathPattern, error) {
	bad := func(format string, args ...any) (pathPattern, error) {
		return pathPattern{}, fmt.Errorf("path %.100q: %s", s, fmt.Sprintf(format, args...))
	}
	switch {
	case len(s) > 1024:
		return bad("longer than 1024 bytes")
	case strings.Contains(s, "://"):
		return bad("write the path only, such as /v1/**")
	case !strings.HasPrefix(s, "/"):
		return bad("it has to begin with a slash, such as /v1/**")
	case strings.ContainsAny(s, "?#"):
		return bad("a path has no query; decide on it with when: request.query")
	case strings.Contains(s, ";"):
		return bad("parameters behind a semicolon are left out when paths are compared; leave them out")
	}
	c, err := CanonicalPath(s)
	if err != nil {
		return pathPattern{}, err
	}
	if strings.Count(c, "/") != strings.Count(s, "/") {
		return bad("write it as %q", c)
	}
	p := pathPattern{text: c}
	if c == "/" {
		return p, nil
	}
	parts := strings.Split(strings.TrimSuffix(c[1:], "/"), "/")
	for i, part := range parts {
		if part == "**" && i == len(parts)-1 && !strings.HasSuffix(c, "/") {
			p.rest = true
			break
		}
		if strings.Contains(part, "**") {
			return bad(`"**" stands for all that follows, so it can only be the last segment; use "*" within one`)
		}
		seg := segment(strings.Split(part, "*"))
		for i := range seg {
			seg[i] = decode(seg[i])
		}
		p.segments = append(p.segments, seg)
	}
	return p, nil
}

// match compares one reading of a path. A final slash makes no difference.
func (p *pathPattern) match(path string) bool {
	if path = strings.TrimSuffix(path[1:], "/"); path == "" {
		path = pathEnd
	}
	for _, seg := range p.segments {
		if path == pathEnd {
			return false
		}
		part, rest, more := strings.Cut(path, "/")
		if !seg.match(part) {
			return false
		}
		if path = rest; !more {
			path = pathEnd
		}
	}
	return p.rest || path == pathEnd
}

// pathEnd is what is left of a path behind its last segment; no segment is such.
const pathEnd = "/"

func (s segment) match(part string) bool {
	if len(s) == 1 {
		return part == s[0]
	}
	part, ok := strings.CutPrefix(part, s[0])
	if !ok {
		return false
	}
	if part, ok = strings.CutSuffix(part, s[len(s)-1]); !ok {
		return false
	}
	for _, piece := range s[1 : len(s)-1] {
		_, after, ok := strings.Cut(part, piece)
		if !ok {
			return false
		}
		part = after
	}
	return true
}

// overlap reports whether one path matches both patterns.
func (p *pathPattern) overlap(q *pathPattern) bool {
	for i := 0; ; i++ {
		switch pEnd, qEnd := i == len(p.segments), i == len(q.segments); {
		case pEnd && qEnd, pEnd && p.rest, qEnd && q.rest:
			return true
		case pEnd, qEnd:
			return false
		case !p.segments[i].overlap(q.segments[i]):
			return false
		}
	}
}

// covers reports whether p matches whatever q does, as far as that can be said without trying.
func (p *pathPattern) covers(q *pathPattern) bool {
	if p.text == q.text || p.rest && len(p.segments) == 0 {
		return true
	}
	if len(p.segments) > len(q.segments) || !p.rest && (q.rest || len(p.segments) < len(q.segments)) {
		return false
	}
	for i, s := range p.segments {
		if !(len(s) == 2 && s[0] == "" && s[1] == "") && !slices.Equal(s, q.segments[i]) {
			return false
		}
	}
	return true
}

// overlap walks both patterns side by side; a star may stand for the other's next character or for nothing.
func (s segment) overlap(t segment) bool {
	a, b := s.tokens(), t.tokens()
	// row[j] tells whether a[i:] and b[j:] have a text in common.
	row := make([]bool, len(b)+1)
	for i := len(a); i >= 0; i-- {
		next := slices.Clone(row)
		for j := len(b); j >= 0; j-- {
			switch {
			case i == len(a) && j == len(b):
				row[j] = true
			case i < len(a) && a[i] == star:
				row[j] = next[j] || j < len(b) && row[j+1]
			case j < len(b) && b[j] == star:
				row[j] = row[j+1] || i < len(a) && next[j]
			default:
				row[j] = i < len(a) && j < len(b) && a[i] == b[j] && next[j+1]
			}
		}
	}
	return row[0]
}

// star is no byte.
const star = -1

func (s segment) tokens() (list []int) {
	for i, piece := range s {
		if i > 0 {
			list = append(list, star)
		}
		for _, c := range []byte(piece) {
			list = append(list, int(c))
		}
	}
	return list
}
