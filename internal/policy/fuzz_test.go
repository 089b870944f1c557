package policy

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/net/dns/dnsmessage"
)

var hostSeeds = []string{
	"allowed.lab", "ALLOWED.lab.", "allowed。lab", "evil.lab\x00.allowed.lab", "Bücher.example", "xn--bcher-kva.example", "127.1", "0x7f.0.0.1", "2130706433", "192.0.2.1",
	"::ffff:7f00:1", "[::1]", "fe80::1%eth0", "раypal.com", "*.wild.lab", "a..b", "ａ．ｂ", "_x.wild.lab", "1.2.3.4.", "xn--", "a\u00adb.lab", "ﬁ.lab", "٠.lab",
}

// FuzzParseHost is the differential test too: what parses is the same to the policy, to DNS and to the dialler.
func FuzzParseHost(f *testing.F) {
	for _, s := range hostSeeds {
		f.Add(s)
	}
	p, err := Parse("fuzz", []byte("allow: [allowed.lab, '*.wild.lab', 192.0.2.1]\ndeny: [evil.wild.lab]\n"))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, err := ParseHost(s)
		if raw := Host(s); err != nil {
			flow := Flow{raw, 443, HTTPS}
			v, _ := p.Connect(flow)
			if w := p.Request(Request{Flow: flow, Method: "GET", Path: "/"}); v.Allow || w.Allow || p.Lookup(raw).Allow {
				t.Fatalf("%q does not parse (%v) and is allowed: %+v %+v", s, err, v, w)
			}
			if raw.canonical() {
				t.Fatalf("%q is canonical and does not parse: %v", s, err)
			}
			for _, c := range err.Error() {
				if c < ' ' || c == 0x7f || c == utf8.RuneError {
					t.Fatalf("%q: the error %q is not fit for a log", s, err)
				}
			}
			return
		}
		if !h.canonical() {
			t.Fatalf("%q is %q, which is not canonical", s, h)
		}
		if again, err := ParseHost(string(h)); err != nil || again != h {
			t.Fatalf("%q is %q, which is %q, %v", s, h, again, err)
		}
		flow := Flow{h, 443, HTTPS}
		v, _ := p.Connect(flow)
		want := h == "allowed.lab" || h == "192.0.2.1" || strings.HasSuffix(string(h), ".wild.lab") && h != "evil.wild.lab"
		if w := p.Request(Request{Flow: flow, Method: "GET", Path: "/"}); v.Allow != want || w.Allow != want {
			t.Fatalf("%q is %q: %+v %+v", s, h, v, w)
		}
		a, literal := h.Addr()
		if l := p.Lookup(h); l.Allow != (want && !literal) {
			t.Fatalf("%q is %q: Lookup %+v, Connect %+v", s, h, l, v)
		}
		// What a resolver of the C library's kind could take for an address is one.
		if _, err := netip.ParseAddr(string(h)); (err == nil) != literal {
			t.Fatalf("%q is %q: a literal to one parser and none to another", s, h)
		}
		if literal {
			if a.String() != string(h) || a.Is4In6() || a.Zone() != "" {
				t.Fatalf("%q is %q, and the address %v", s, h, a)
			}
			return
		}
		name, err := dnsmessage.NewName(string(h) + ".")
		if err != nil {
			t.Fatalf("%q is %q: %v", s, h, err)
		}
		b, err := (&dnsmessage.Message{Questions: []dnsmessage.Question{{Name: name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}).Pack()
		if err != nil {
			t.Fatalf("%q is %q: %v", s, h, err)
		}
		var labels []string
		for i := 12; b[i] != 0; i += 1 + int(b[i]) {
			labels = append(labels, string(b[i+1:i+1+int(b[i])]))
		}
		if strings.Join(labels, ".") != string(h) || len(labels) != 1+strings.Count(string(h), ".") {
			t.Fatalf("%q is %q, and the labels %q in DNS", s, h, labels)
		}
	})
}

func FuzzCanonicalPath(f *testing.F) {
	for _, tt := range canonicalPaths {
		f.Add(tt.in)
	}
	v1, err := parsePath("/v1/**")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := CanonicalPath(s)
		if err != nil {
			return
		}
		if again, err := CanonicalPath(c); err != nil || again != c {
			t.Fatalf("%q is %q, which is %q, %v", s, c, again, err)
		}
		for i := range len(c) {
			if c[i] <= ' ' || c[i] > '~' || strings.IndexByte(`\?#"<>`, c[i]) >= 0 {
				t.Fatalf("%q is %q", s, c)
			}
		}
		inside := true
		for _, r := range readings(c) {
			if !strings.HasPrefix(r, "/") || !utf8.ValidString(r) || strings.ContainsAny(r, "\x00\r\n\\") {
				t.Fatalf("%q is read as %q", c, r)
			}
			for part := range strings.SplitSeq(r, "/") {
				if part == "." || part == ".." {
					t.Fatalf("%q is read as %q", c, r)
				}
			}
			inside = inside && v1.match(r)
		}
		// A server that decodes everything, some of it twice, and resolves dots stays where the pattern is.
		if !inside {
			return
		}
		var out []string
		for part := range strings.SplitSeq(decodeAll(decodeAll(c)), "/") {
			switch part, _, _ := strings.Cut(part, ";"); part {
			case "", ".":
			case "..":
				out = out[:max(0, len(out)-1)]
			default:
				out = append(out, part)
			}
		}
		if len(out) == 0 || out[0] != "v1" {
			t.Fatalf("%q is under /v1 and reaches %q", c, out)
		}
	})
}

func decodeAll(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' {
			if c, ok := unhex(s[i+1:]); ok {
				b.WriteByte(c)
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("presets/*.yaml")
	if err != nil || len(files) != 3 {
		f.Fatal(files, err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, s := range []string{
		"extends: open\ndeny: [gist.github.com]\n",
		"allow:\n  - {name: m, hosts: ['*.example.com', a.lab], ports: [443, 8000-8010], methods: [GET], paths: [/v1/**, /a*b/*], when: 'request.headers[\"x\"] == \"a\"', inspect: true}\n",
		"allow:\n  - {cidr: [10.0.0.0/8, fd00::/8], protocol: tcp, ports: [5432]}\n  - {host: db.lab, cidr: 10.0.0.0/8, protocol: udp, port: 53}\ndeny:\n  - {host: a.lab, methods: [PUT]}\n",
		"limits: {connections: 1, bytes_up: 1.5GiB, bytes_down: 10}\nplatform_credentials_only: true\n",
		"secrets:\n  - {secret: k, env: K, hosts: [a.lab], place: {header: Authorization, format: 'Bearer {}'}}\n",
		"tests:\n  - allow: GET https://a.lab/x?y\n    headers: {a: [b, c]}\n  - deny: tcp://[::1]:22\n",
		"a: &a [*a]\n", "? {a: b}\n: c\n", "allow: [[[[[[", "--- !!set {}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 64<<10 {
			return
		}
		p, err := Parse("fuzz", data)
		if err != nil {
			if p != nil {
				t.Fatal("an error and a policy")
			}
			problems := Problems(err)
			if len(problems) == 0 {
				t.Fatalf("%v holds no problem", err)
			}
			for i, q := range problems {
				if q.Line < 1 || q.What == "" || strings.ContainsAny(q.Error(), "\n\r\x00\x1b") || i > 0 && q.Line < problems[i-1].Line {
					t.Fatalf("problem %+v", q)
				}
			}
			return
		}
		p.Test()
		for _, finding := range p.Lint() {
			if finding.Line < 1 || strings.ContainsAny(finding.String(), "\n\r\x00\x1b") {
				t.Fatalf("finding %+v", finding)
			}
		}
		for _, h := range []Host{"a.lab", "x.example.com", "db.lab", "10.0.0.1", "127.0.0.1", "fd00::1"} {
			r := Request{Flow: Flow{h, 443, HTTPS}, Method: "GET", Path: "/v1/x"}
			v, inspect := p.Connect(r.Flow)
			w := p.Request(r)
			if w.Allow && !v.Allow {
				t.Fatalf("%s: the request is allowed (%+v) and the connection is not (%+v)", h, w, v)
			}
			if v.Allow && !inspect && !w.Allow {
				t.Fatalf("%s: the connection is allowed without a look (%+v) and the request is not (%+v)", h, v, w)
			}
			if a, literal := h.Addr(); literal {
				if !p.Address(r.Flow, a).Allow && (v.Allow || w.Allow) {
					t.Fatalf("%s may be connected to and not be dialled", h)
				}
			} else if v.Allow && !p.Lookup(h).Allow {
				t.Fatalf("%s may be connected to and not be looked up", h)
			}
			for _, step := range p.Explain(r) {
				if strings.ContainsAny(step.Rule+step.Detail, "\n\r\x00\x1b") {
					t.Fatalf("step %+v", step)
				}
			}
			if strings.ContainsAny(v.Reason+w.Reason, "\n\r\x00\x1b") {
				t.Fatalf("%+v %+v", v, w)
			}
		}
		again, err := Parse("fuzz", p.Source())
		if err != nil || again.Digest() != p.Digest() {
			t.Fatalf("the source does not parse again: %v", err)
		}
	})
}
