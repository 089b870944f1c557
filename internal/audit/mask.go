package audit

import (
	"regexp"
	"strings"
)

// masked stands for what was taken out.
const masked = "***"

// shapes are tokens that are known by their form, with what begins each; the beginning is kept. A private key goes
// whole.
var shapes = []struct {
	begins string
	form   *regexp.Regexp
}{
	{"gh", regexp.MustCompile(`\b(gh[oprsu]_)[A-Za-z0-9]{16,}`)},
	{"github_pat_", regexp.MustCompile(`\b(github_pat_)\w{16,}`)},
	{"glpat-", regexp.MustCompile(`\b(glpat-)[\w-]{16,}`)},
	{"sk-", regexp.MustCompile(`\b(sk-)[\w-]{16,}`)},
	{"_live_", regexp.MustCompile(`\b([rsp]k_live_)\w{16,}`)},
	{"_test_", regexp.MustCompile(`\b([rs]k_test_)\w{16,}`)},
	{"AKIA", regexp.MustCompile(`\b(AKIA)[0-9A-Z]{12,}`)},
	{"ASIA", regexp.MustCompile(`\b(ASIA)[0-9A-Z]{16,}`)},
	{"AIza", regexp.MustCompile(`\b(AIza)[\w-]{30,}`)},
	{"xox", regexp.MustCompile(`\b(xox[a-z]-)[\w-]{8,}`)},
	{"xapp-", regexp.MustCompile(`\b(xapp-)[\w-]{8,}`)},
	{"npm_", regexp.MustCompile(`\b(npm_)[A-Za-z0-9]{20,}`)},
	{"pypi-", regexp.MustCompile(`\b(pypi-)[\w-]{20,}`)},
	{"warren_", regexp.MustCompile(`\b(warren_)[0-9a-f]{16,}`)},
	{"hf_", regexp.MustCompile(`\b(hf_)[A-Za-z0-9]{20,}`)},
	{"dckr_", regexp.MustCompile(`\b(dckr_[a-z]+_)[\w-]{16,}`)},
	{"SG.", regexp.MustCompile(`\b(SG\.)[\w-]{16,}\.[\w-]{16,}`)},
	{"AGE-SECRET-KEY-", regexp.MustCompile(`\b(AGE-SECRET-KEY-)[0-9A-Z]{8,}`)},
	{"eyJ", regexp.MustCompile(`\b(eyJ)[\w-]{6,}\.[\w-]{2,}(?:\.[\w-]*)*`)},
	{"PRIVATE KEY", regexp.MustCompile(`(?s)()(?:-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----).*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)`)},
}

var (
	userinfo = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#"'<>\\]*@`)
	scheme   = regexp.MustCompile(`(?i)\b((?:bearer|basic|negotiate|digest)[ \t]+)([A-Za-z0-9+/=._~-]{8,})`)
)

// Mask returns s without what looks like a secret: tokens of known shapes, private keys, the user part of URLs, values of
// query parameters, headers, JSON members and command-line options whose names say that they hold one, and what follows
// "Bearer" or "Basic". It guesses: it may take out too much, and cannot know a secret that looks like a word. Mask of a
// masked text changes nothing.
func Mask(s string) string {
	if len(s) < 20 && !strings.ContainsAny(s, "=:%@ \"") {
		return s // too short for any shape, and no pair
	}
	for _, shape := range shapes {
		if strings.Contains(s, shape.begins) {
			s = shape.form.ReplaceAllString(s, "${1}"+masked)
		}
	}
	if strings.Contains(s, "://") && strings.Contains(s, "@") {
		s = userinfo.ReplaceAllString(s, "${1}"+masked+"@")
	}
	s = maskPairs(s)
	if hasScheme(s) {
		s = scheme.ReplaceAllString(s, "${1}"+masked)
	}
	return s
}

func hasScheme(s string) bool {
	for _, word := range [...]string{"earer", "EARER", "asic", "ASIC", "egotiate", "igest"} {
		if strings.Contains(s, word) {
			return true
		}
	}
	return false
}

// maskPairs masks the values of names that say what they hold: name=value, name: value, "name":"value", --name value.
func maskPairs(s string) string {
	var b strings.Builder
	done := 0 // up to here s is in b
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c != '=' && c != ':' && c != ' ' && c != '"' && c != ',' && c != '%' {
			continue
		}
		sep := i + 1
		if c == '%' {
			// An equals sign that was escaped, as in a URL within a URL.
			if !strings.HasPrefix(s[i:], "%3D") && !strings.HasPrefix(s[i:], "%3d") {
				continue
			}
			c, sep = '=', i+3
		}
		name, option := nameBefore(s[done:i])
		if name == "" || (c == ' ' || c == '"' || c == ',') && !option {
			continue
		}
		sure := keyish(name)
		if sure == none {
			continue
		}
		from, to := valueAfter(s, sep, c, name, option)
		if to <= from || s[from:to] == masked || sure == weak && to-from < 8 {
			continue
		}
		b.WriteString(s[done:from])
		b.WriteString(masked)
		done = to
		i = to - 1
	}
	if done == 0 {
		return s
	}
	b.WriteString(s[done:])
	return b.String()
}

// nameBefore returns the name that ends where s does, quotes and blanks passed over, and whether it is an option.
func nameBefore(s string) (name string, option bool) {
	end := len(s)
	for n := 0; end > 0 && n < 4 && strings.IndexByte(" \t\"'\\", s[end-1]) >= 0; n++ {
		end--
	}
	start := end
	for start > 0 && end-start < 64 && nameByte(s[start-1]) {
		start--
	}
	name = s[start:end]
	bare := strings.TrimLeft(name, "-")
	return bare, len(name) > len(bare)
}

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-' || c == '.' || c == '[' || c == ']'
}

// valueAfter returns where the value lies that follows a separator ending before at. An empty one means that it is no secret.
func valueAfter(s string, at int, sep byte, name string, option bool) (from, to int) {
	from = at
	limit := min(len(s), at+4)
	passed := " \t"
	if option {
		passed = " \t=,\"'\\"
	}
	for from < limit && strings.IndexByte(passed, s[from]) >= 0 {
		from++
	}
	if strings.HasPrefix(s[from:], "//") && sep == ':' {
		return 0, 0 // a URL
	}
	quote := byte(0)
	q, open := from, from
	for q < len(s) && s[q] == '\\' {
		q++
	}
	if q < len(s) && (s[q] == '"' || s[q] == '\'') {
		quote, from = s[q], q+1
	}
	to = from
	switch {
	case quote != 0:
		// The quote that closes has as many backslashes as the one that opens: JSON within JSON.
		for slashes := 0; to < len(s); to++ {
			if s[to] == '\\' {
				slashes++
				continue
			}
			if s[to] == quote && (slashes == q-open || q == open && slashes%2 == 0) {
				return from, to - slashes*min(1, q-open)
			}
			slashes = 0
		}
		return from, to
	case sep == ':' && wholeLine(name):
		for to < len(s) && s[to] != '\r' && s[to] != '\n' && s[to] != '"' && s[to] != '\'' && s[to] != '\\' {
			to++
		}
		return afterScheme(s, from, to), to
	}
	from = afterScheme(s, from, len(s))
	to = endOfWord(s, from, from+128)
	if sep == ':' && !option && !strings.Contains(name, "-") && !random(s[from:to]) {
		return 0, 0 // "token: expired" is prose
	}
	return from, endOfWord(s, to, len(s))
}

// endsWord are the bytes that no value without quotes holds.
var endsWord = func() (t [256]bool) {
	for _, c := range []byte(" \t\r\n&;,\"'<>()[]{}|\\") {
		t[c] = true
	}
	return t
}()

func endOfWord(s string, from, limit int) int {
	for limit = min(limit, len(s)); from < limit && !endsWord[s[from]]; from++ {
	}
	return from
}

// afterScheme passes over the word that says how an Authorization header is to be read.
func afterScheme(s string, from, to int) int {
	for _, word := range [...]string{"bearer ", "basic ", "token ", "digest ", "negotiate ", "apikey "} {
		if to-from > len(word) && strings.EqualFold(s[from:from+len(word)], word) {
			return from + len(word)
		}
	}
	return from
}

// random says whether a word looks like a key: long, of the letters of base64 or hex, and with a digit.
func random(s string) bool {
	digit := false
	for i := range len(s) {
		c := s[i]
		digit = digit || c >= '0' && c <= '9'
		if !nameByte(c) && c != '+' && c != '/' && c != '=' && c != '~' {
			return false
		}
	}
	return digit && len(s) >= 20 || len(s) >= 32
}

// wholeLine says whether a header's value is a secret up to the end of its line.
func wholeLine(name string) bool {
	switch strings.ToLower(name) {
	case "authorization", "proxy-authorization", "cookie", "set-cookie", "cookie2", "set-cookie2", "www-authenticate", "authentication-info":
		return true
	}
	return false
}

// strength says how surely a name is that of a secret.
type strength int

const (
	none   strength = iota
	weak            // where the value is not short: code=404 is none
	strong          // whatever the value
)

// words count when they stand in a name on their own, parts wherever they stand once _, - and dots are taken out.
var (
	words = map[string]strength{
		"pass": strong, "pwd": strong, "pw": strong, "auth": strong, "jwt": strong, "sessionid": strong, "bearer": strong, "otp": strong,
		"creds": strong, "assertion": strong, "sas": strong,
		"key": weak, "sig": weak, "sid": weak, "session": weak, "code": weak, "pin": weak, "pat": weak, "nonce": weak,
	}
	parts = []string{
		"token", "secret", "passw", "passphrase", "apikey", "accesskey", "privatekey", "authkey", "signingkey", "sshkey", "encryptionkey",
		"credential", "authorization", "cookie", "signature",
	}
	separators = strings.NewReplacer("_", "", "-", "", ".", "", "[", "", "]", "")
)

// keyish says whether a name is one of those that hold secrets: api_key, X-Auth-Token, clientSecret, PASSWORD.
func keyish(name string) strength {
	if len(name) < 2 || len(name) > 64 {
		return none
	}
	lower := strings.ToLower(name)
	joined := separators.Replace(lower)
	for _, p := range parts {
		if strings.Contains(joined, p) {
			return strong
		}
	}
	start, best := 0, none
	for i := 0; i <= len(name); i++ {
		boundary := i == len(name) || strings.IndexByte("_-.[]", name[i]) >= 0
		hump := !boundary && i > start && name[i] >= 'A' && name[i] <= 'Z' && name[i-1] >= 'a' && name[i-1] <= 'z'
		if !boundary && !hump {
			continue
		}
		best = max(best, words[lower[start:i]])
		start = i
		if boundary {
			start++
		}
	}
	return best
}
