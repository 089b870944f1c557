package policy

import (
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"
)

var canonicalPaths = []struct{ in, want string }{
	{"", "/"},
	{"/", "/"},
	{"/v1/x", "/v1/x"},
	{"//v1//x", "/v1/x"},
	{"/v1/./x/.", "/v1/x/"},
	{"/v1/../admin", "/admin"},
	{"/v1/%2e%2e/admin", "/admin"},
	{"/v1/%2E./admin", "/admin"},
	{"/v1/..", "/"},
	{"/v1/x/", "/v1/x/"},
	{"/V1", "/V1"},
	{"/%76%31", "/v1"},
	{"/a%20b", "/a%20b"},
	{"/a b", "/a%20b"},
	{"/a%c3%a9", "/a%C3%A9"},
	{"/é", "/%C3%A9"},
	{`/"<>^` + "`{|}", "/%22%3C%3E%5E%60%7B%7C%7D"},
	{"/@scope%2fname", "/@scope%2Fname"},
	{"/a;b=c/d", "/a;b=c/d"},
	{"/a%3bb", "/a%3Bb"},
	{"/a%40b", "/a%40b"},
	{"/100%25", "/100%25"},
	{"/...", "/..."},
	{"/a..b/.c", "/a..b/.c"},
	// Refused.
	{"v1", ""},
	{"*", ""},
	{"/..", ""},
	{"/../x", ""},
	{"/v1/../../x", ""},
	{"/%2e%2e/x", ""},
	{"/v1/..%2fadmin", ""},
	{"/v1%2f..%2fadmin", ""},
	{"/v1/%2e%2e%2fadmin", ""},
	{"/v1/..;/admin", ""},
	{"/v1/..;x=1/admin", ""},
	{"/v1/..%3b/admin", ""},
	{"/v1/.;/admin", ""},
	{`/v1/..\admin`, ""},
	{"/v1/..%5cadmin", ""},
	{"/v1%00", ""},
	{"/v1\x00", ""},
	{"/v1%0d%0aX: y", ""},
	{"/v1\n", ""},
	{"/%7f", ""},
	{"/v1?x=1", ""},
	{"/v1#x", ""},
	{"/%", ""},
	{"/%4", ""},
	{"/%zz", ""},
	{"/%252e%252e/x", ""},
	{"/%252f", ""},
	{"/%252%66", ""},
	{"/%25%32%65", ""},
	{"/%25252f", ""},
	{"/%c0%ae%c0%ae/x", ""},
	{"/\xff", ""},
	{"/" + strings.Repeat("a", maxPath), ""},
}

func TestCanonicalPath(t *testing.T) {
	for _, tt := range canonicalPaths {
		got, err := CanonicalPath(tt.in)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("CanonicalPath(%.60q) = %q, %v; want %q", tt.in, got, err, tt.want)
		}
		if err != nil && strings.ContainsAny(err.Error(), "\x00\n") {
			t.Errorf("CanonicalPath(%.60q): the error is not fit for a log: %q", tt.in, err)
		}
		if err == nil {
			if again, err := CanonicalPath(got); again != got || err != nil {
				t.Errorf("CanonicalPath(%q) = %q, %v; want the same again", got, again, err)
			}
		}
	}
}

// The table notices what most programs do: unescape and clean.
func TestCanonicalPathTwin(t *testing.T) {
	missed := 0
	for _, tt := range canonicalPaths {
		got, err := url.PathUnescape(tt.in)
		if err == nil {
			got = path.Clean("/" + got)
		}
		if got != tt.want {
			missed++
		}
	}
	if missed < 20 {
		t.Errorf("a naive canonicaliser fails only %d of %d cases", missed, len(canonicalPaths))
	}
}

func TestReadings(t *testing.T) {
	for in, want := range map[string][]string{
		"/v1/x":          {"/v1/x"},
		"/a%20b":         {"/a b"},
		"/a%40b":         {"/a@b"},
		"/a%2Fb":         {"/a%2Fb", "/a/b"},
		"/a;x/b":         {"/a;x/b", "/a/b"},
		"/a%2Fb;x":       {"/a%2Fb;x", "/a/b;x", "/a%2Fb", "/a/b"},
		"/a%3Bx":         {"/a;x", "/a"},
		"/https:%2F%2Fx": {"/https:%2F%2Fx", "/https:/x"},
	} {
		if got := readings(in); !slices.Equal(got, want) {
			t.Errorf("readings(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestPathPattern(t *testing.T) {
	for _, tt := range []struct {
		pattern  string
		yes, not []string
	}{
		{"/", []string{"/"}, []string{"/a"}},
		{"/**", []string{"/", "/a", "/a/b/"}, nil},
		{"/*", []string{"/a", "/a/"}, []string{"/", "/a/b"}},
		{"/v1/**", []string{"/v1", "/v1/", "/v1/x", "/v1/x/y"}, []string{"/", "/v10", "/V1/x", "/v2/v1/x"}},
		{"/v1/*", []string{"/v1/x", "/v1/x/"}, []string{"/v1", "/v1/", "/v1/x/y"}},
		{"/health", []string{"/health", "/health/"}, []string{"/healthz", "/health/x"}},
		{"/*/info/refs", []string{"/a/info/refs"}, []string{"/a/b/info/refs", "/info/refs"}},
		{"/a*c", []string{"/ac", "/abc", "/abbc"}, []string{"/ab", "/a/c", "/bac"}},
		{"/a*b*c", []string{"/abc", "/axbxc", "/abbc"}, []string{"/ac", "/abcd", "/acb"}},
		{"/a*a", []string{"/aa", "/aba"}, []string{"/a"}},
		{"/*.git/**", []string{"/x.git", "/x.git/info/refs"}, []string{"/x/info"}},
		{"/a%20b", []string{"/a b"}, []string{"/a%20b"}},
		{"/a%2A", []string{"/a*"}, []string{"/ab"}},
		{"/a%2fb", []string{"/a%2Fb"}, []string{"/a/b"}},
	} {
		p, err := parsePath(tt.pattern)
		if err != nil {
			t.Errorf("%s: %v", tt.pattern, err)
			continue
		}
		for _, s := range tt.yes {
			if !p.match(s) {
				t.Errorf("%s does not match %s", tt.pattern, s)
			}
		}
		for _, s := range tt.not {
			if p.match(s) {
				t.Errorf("%s matches %s", tt.pattern, s)
			}
		}
	}
	for _, s := range []string{"", "v1", "**", "/**/x", "/a**", "/v1/**/", "/a?b", "/a#b", "/a;b", "//a", "/a/../b", "/a/./b", "/..", "/%", "/%00", "https://x/y", "/" + strings.Repeat("a", 1024)} {
		if p, err := parsePath(s); err == nil {
			t.Errorf("parsePath(%.40q) = %+v, want an error", s, p)
		}
	}
}

func TestPathOverlap(t *testing.T) {
	for _, tt := range []struct {
		a, b            string
		overlap, covers bool
	}{
		{"/a", "/a", true, true},
		{"/a", "/b", false, false},
		{"/**", "/a/b", true, true},
		{"/a/**", "/a", true, true},
		{"/a/**", "/b/**", false, false},
		{"/a/**", "/a/b/**", true, true},
		{"/a/*", "/a/b", true, true},
		{"/a/*", "/*/b", true, false},
		{"/a/*", "/a/*/c", false, false},
		{"/a*c", "/*b*", true, false},
		{"/a*c", "/b*", false, false},
		{"/ab*", "/*cd", true, false},
		{"/x*y", "/*y*x", false, false},
		{"/a", "/**", true, false},
		{"/*", "/a/**", true, false},
	} {
		a, err := parsePath(tt.a)
		if err != nil {
			t.Fatal(err)
		}
		b, err := parsePath(tt.b)
		if err != nil {
			t.Fatal(err)
		}
		if a.overlap(&b) != tt.overlap || b.overlap(&a) != tt.overlap {
			t.Errorf("%s and %s: overlap is %v and %v, want %v", tt.a, tt.b, a.overlap(&b), b.overlap(&a), tt.overlap)
		}
		if a.covers(&b) != tt.covers {
			t.Errorf("%s covers %s: %v, want %v", tt.a, tt.b, a.covers(&b), tt.covers)
		}
	}
}

// Whatever two patterns both match they overlap in, tried with all short paths.
func TestPathOverlapAgainstMatch(t *testing.T) {
	var paths []string
	var walk func(s string, n int)
	walk = func(s string, n int) {
		paths = append(paths, s)
		if n == 0 {
			return
		}
		for _, c := range []string{"a", "b", "/a", "/b"} {
			if strings.HasSuffix(s, "/") && c[0] == '/' {
				continue
			}
			walk(s+c, n-1)
		}
	}
	walk("/", 5)
	var patterns []pathPattern
	for _, s := range []string{"/", "/**", "/*", "/a", "/a*", "/*a", "/a*b", "/*a*", "/a/*", "/*/b", "/a/**", "/a*/b*", "/*/*", "/b/**", "/ab/**", "/*b/a"} {
		p, err := parsePath(s)
		if err != nil {
			t.Fatal(err)
		}
		patterns = append(patterns, p)
	}
	for i := range patterns {
		for j := range patterns {
			p, q := &patterns[i], &patterns[j]
			both := slices.ContainsFunc(paths, func(s string) bool { return p.match(s) && q.match(s) })
			if got := p.overlap(q); got != both {
				t.Errorf("%s and %s: overlap is %v, and both match something is %v", p.text, q.text, got, both)
			}
			if p.covers(q) && slices.ContainsFunc(paths, func(s string) bool { return q.match(s) && !p.match(s) }) {
				t.Errorf("%s is said to cover %s and does not", p.text, q.text)
			}
		}
	}
}
