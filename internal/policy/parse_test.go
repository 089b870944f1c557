package policy_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren/internal/policy"
)

// Each of these is refused on that line, with that text in what is wrong or in the remedy.
func TestParseProblems(t *testing.T) {
	for _, tt := range []struct {
		src  string
		line int
		want string
	}{
		// The file.
		{"", 1, "the file is empty"},
		{"# nothing\n", 1, "the file is empty"},
		{"null\n", 1, "the file is empty"},
		{"---\n---\n", 1, "more than one document"},
		{"extends: open\n---\nextends: locked\n", 1, "more than one document"},
		{"- a\n", 1, "a policy is a mapping, not a list"},
		{"locked\n", 1, "a policy is a mapping"},
		{"allow: [a.lab\n", 1, "it is not YAML"},
		{"allow:\n\t- a.lab\n", 2, "it is not YAML"},
		{"\xff\xfe", 1, "not UTF-8"},
		{"extends: everything\n", 1, "no preset \"everything\"; want one of locked, registries, open"},
		{"extends: [open]\n", 1, "extends is a text, not a list"},
		{"extend: open\n", 1, `has no key "extend"; did you mean "extends"?`},
		{"alow: [a.lab]\n", 1, `did you mean "allow"?`},
		{"permit: [a.lab]\n", 1, "its keys are extends, allow, deny"},
		{"allow: [a.lab]\nallow: [b.lab]\n", 2, `has the key "allow" twice, first on line 1`},
		{"allow: a.lab\n", 1, "allow is a list"},
		{"allow: &x [a.lab]\n", 1, "anchor"},
		{"allow: [a.lab]\ndeny:\n  - <<: {host: a}\n", 3, `no key "<<"`},
		{"allow:\n  - &a a.lab\n  - *a\n", 2, "anchor"},
		{"allow:\n  - !!binary YQ==\n", 2, "tag"},
		{"? [a]\n: b\n", 1, "a key that is a list"},
		// Hosts.
		{"allow:\n  -\n", 2, "a rule is a mapping, not nothing"},
		{"allow: ['*']\n", 1, "names everything; use `extends: open`"},
		{"deny: ['*']\n", 1, "names everything; use `extends: locked`"},
		{"allow: ['*.']\n", 1, "names everything"},
		{"allow: ['*.*']\n", 1, "names everything"},
		{"allow: ['']\n", 1, "is empty"},
		{"allow: ['*.com']\n", 1, "below a public suffix"},
		{"allow: ['*.co.uk']\n", 1, "below a public suffix; name the domains, such as \"*.example.co.uk\""},
		{"allow: ['*.COM']\n", 1, "below a public suffix"},
		{"allow: ['*.com.']\n", 1, "below a public suffix"},
		{"allow: ['https://a.lab']\n", 1, "is a URL; write the host only"},
		{"allow: ['a.lab/x']\n", 1, "has a path"},
		{"allow: ['a.lab:8443']\n", 1, "has a port; write host: a.lab and ports: [8443]"},
		{"allow: ['.a.lab']\n", 1, "begins with a dot; write \"*.a.lab\""},
		{"allow: ['a.*.lab']\n", 1, "star"},
		{"allow: ['*a.lab']\n", 1, "star"},
		{"allow: ['*.*.lab']\n", 1, "star"},
		{"allow: ['*.10.0.0.1']\n", 1, "star before an address"},
		{"allow: ['127.1']\n", 1, "its last part is a number"},
		{"allow: ['0x7f.1']\n", 1, "its last part is a number"},
		{"allow: [2130706433]\n", 1, "its last part is a number"},
		{"allow: ['[::1]']\n", 1, "without brackets"},
		{"allow: ['10.0.0.0/8']\n", 1, "is a block of addresses; write cidr: 10.0.0.0/8"},
		{"allow: [\"a\\0.lab\"]\n", 1, "is not part of a host name"},
		{"allow: ['a..lab']\n", 1, "empty label"},
		{"allow:\n  - name: x\n", 2, "it names no host"},
		{"allow:\n  - host: []\n", 2, "is an empty list"},
		{"allow:\n  - host:\n", 2, "is a text, not nothing"},
		{"allow:\n  - host: {a: b}\n", 2, "is a text, not a mapping"},
		{"allow:\n  - host: a.lab\n    hosts: [b.lab]\n", 3, "both host and hosts"},
		{"allow:\n  - host: a.lab\n  - name: x\n    host: [b.lab, '*.com']\n", 4, `allow[1] "x": host "*.com"`},
		{"allow:\n  - host: [a.lab, 10.0.0.1]\n", 2, "by name and by address at once"},
		{"deny:\n  - {host: a.lab, cidr: 10.0.0.0/8}\n", 2, "denies hosts and a cidr at once"},
		// Addresses.
		{"allow:\n  - cidr: 10.0.0.1\n", 2, "write 10.0.0.1/32"},
		{"allow:\n  - cidr: 10.0.0.1/8\n", 2, "write 10.0.0.0/8, or 10.0.0.1/32"},
		{"allow:\n  - cidr: 0.0.0.0/0\n", 2, "names every address"},
		{"allow:\n  - cidr: ::/0\n", 2, "names every address"},
		{"allow:\n  - cidr: '::ffff:10.0.0.0/104'\n", 2, "write it as IPv4"},
		{"allow:\n  - cidr: lan\n", 2, "is no block of addresses"},
		{"allow:\n  - cidr: fe80::%eth0/64\n", 2, "is no block of addresses"},
		// Ports and protocols.
		{"allow:\n  - {host: a.lab, ports: [0]}\n", 2, `"0" is no port`},
		{"allow:\n  - {host: a.lab, ports: [65536]}\n", 2, `"65536" is no port`},
		{"allow:\n  - {host: a.lab, ports: [https]}\n", 2, "is no port"},
		{"allow:\n  - {host: a.lab, ports: [90-80]}\n", 2, "is no port"},
		{"allow:\n  - {host: a.lab, ports: ['0443']}\n", 2, "is no port"},
		{"allow:\n  - {host: a.lab, ports: [-1]}\n", 2, "is no port"},
		{"allow:\n  - {host: a.lab, ports: []}\n", 2, "is an empty list"},
		{"allow:\n  - {host: a.lab, protocol: ssh}\n", 2, `protocol "ssh" is not known; want https, http, tcp or udp; what is neither`},
		{"allow:\n  - {host: a.lab, protocol: HTTPS}\n", 2, "is not known"},
		{"allow:\n  - {host: a.lab, protocol: tcp}\n", 2, "protocol tcp has no port"},
		{"allow:\n  - {host: a.lab, protocol: udp}\n", 2, "protocol udp has no port"},
		{"allow:\n  - {host: a.lab, protocol: tcp, ports: [1], methods: [GET]}\n", 2, "methods cannot be decided on over tcp"},
		{"allow:\n  - {host: a.lab, protocol: udp, ports: [1], paths: [/a]}\n", 2, "paths cannot be decided on over udp"},
		{"allow:\n  - {host: a.lab, protocol: tcp, ports: [1], when: 'true'}\n", 2, "when cannot be decided on over tcp"},
		{"allow:\n  - {host: a.lab, protocol: tcp, ports: [1], inspect: true}\n", 2, "inspect cannot be decided on over tcp"},
		{"deny:\n  - {host: a.lab, protocol: tcp, methods: [GET]}\n", 2, "methods cannot be decided on over tcp"},
		{"deny:\n  - {host: 10.0.0.1, methods: [GET]}\n", 2, "a deny rule with addresses has methods, paths or when"},
		{"deny:\n  - {cidr: 10.0.0.0/8, when: 'true'}\n", 2, "a deny rule with addresses has methods, paths or when"},
		{"deny:\n  - {host: a.lab, inspect: true}\n", 2, "leave inspect out"},
		{"allow:\n  - {host: a.lab, inspect: yes}\n", 2, "want true or false"},
		// Conditions.
		{"allow:\n  - {host: a.lab, methods: [get]}\n", 2, "write GET"},
		{"allow:\n  - {host: a.lab, methods: ['*']}\n", 2, "leave methods out"},
		{"allow:\n  - {host: a.lab, methods: ['GE T']}\n", 2, "is no method"},
		{"allow:\n  - {host: a.lab, paths: [v1]}\n", 2, "begin with a slash"},
		{"allow:\n  - {host: a.lab, paths: ['/a/../b']}\n", 2, `write it as "/b"`},
		{"allow:\n  - {host: a.lab, paths: ['/**/b']}\n", 2, "last segment"},
		{"allow:\n  - {host: a.lab, paths: ['/a?b']}\n", 2, "no query"},
		{"allow:\n  - {host: a.lab, when: }\n", 2, "when is a text"},
		{"allow:\n  - {host: a.lab, when: ' '}\n", 2, "when is empty"},
		{"allow:\n  - host: a.lab\n    when: request.verb == 'GET'\n", 3, "undeclared reference"},
		{"allow:\n  - host: a.lab\n    when: request.method == 1\n", 3, "no matching overload"},
		{"allow:\n  - host: a.lab\n    when: request.method\n", 3, "it is of type string, and has to be true or false"},
		{"allow:\n  - host: a.lab\n    when: 'request.method =='\n", 3, "when cannot be compiled"},
		{"allow:\n  - host: a.lab\n    when: 'request.path.matches(\"[\")'\n", 3, "when cannot be compiled"},
		{"allow:\n  - host: a.lab\n    when: '" + strings.Repeat("(", 300) + "true" + strings.Repeat(")", 300) + "'\n", 3, "when cannot be compiled"},
		{"allow:\n  - host: a.lab\n    when: '" + strings.Repeat("true || ", 1000) + "true'\n", 3, "when cannot be compiled"},
		{"allow:\n  - host: a.lab\n    wen: x\n", 3, `did you mean "when"?`},
		{"allow:\n  - host: a.lab\n    path: [/a]\n", 3, `did you mean "paths"?`},
		{"allow:\n  - {host: a.lab, name: ''}\n", 2, "a name has 1 to 64"},
		{"allow:\n  - {host: a.lab, name: \"a\\nb\"}\n", 2, "a name has 1 to 64"},
		{"allow:\n  - {host: a.lab, name: 'a\"b'}\n", 2, "a name has 1 to 64"},
		// Limits.
		{"limits: 3\n", 1, "limits is a mapping"},
		{"limits: {connection: 3}\n", 1, `did you mean "connections"?`},
		{"limits: {connections: -1}\n", 1, "want a whole number"},
		{"limits: {connections: many}\n", 1, "want a whole number"},
		{"limits: {connections: 1.5}\n", 1, "want a whole number"},
		{"limits: {connections: 99999999999}\n", 1, "want a whole number"},
		{"limits: {bytes_up: 1XB}\n", 1, "want a number with a unit"},
		{"limits: {bytes_up: -1}\n", 1, "want a number with a unit"},
		{"limits: {bytes_up: 1.5}\n", 1, "want a number with a unit"},
		{"limits: {bytes_down: 99999999TiB}\n", 1, "want a number with a unit"},
		{"limits: {bytes_down: [1]}\n", 1, "is a text"},
		{"platform_credentials_only: 1\n", 1, "want true or false"},
		// Tests.
		{"tests: [a]\n", 1, "a test is a mapping"},
		{"tests:\n  - {}\n", 2, "either allow or deny"},
		{"tests:\n  - {allow: 'https://a.lab/', deny: 'https://a.lab/'}\n", 2, "either allow or deny"},
		{"tests:\n  - deny: a.lab\n", 2, "is no URL"},
		{"tests:\n  - deny: ftp://a.lab\n", 2, "has the protocol"},
		{"tests:\n  - deny: tcp://a.lab\n", 2, "names no port"},
		{"tests:\n  - deny: https://a.lab:0/\n", 2, "has the port"},
		{"tests:\n  - deny: 'GET tcp://a.lab:1'\n", 2, "has no requests"},
		{"tests:\n  - deny: tcp://a.lab:1/x\n", 2, "has no requests"},
		{"tests:\n  - deny: https://[a.lab]/\n", 2, "brackets"},
		{"tests:\n  - deny: 'https://a.lab/#x'\n", 2, "fragment"},
		{"tests:\n  - deny: tcp://a.lab:1\n    headers: {a: b}\n", 3, "has no headers"},
		{"tests:\n  - deny: https://a.lab\n    headers: {'a b': b}\n", 3, "is no name of a header"},
		{"tests:\n  - deny: https://a.lab\n    headers: [a]\n", 3, "headers is a mapping"},
	} {
		_, err := policy.Parse("test", []byte(tt.src))
		if err == nil {
			t.Errorf("%q is accepted", tt.src)
			continue
		}
		problems := policy.Problems(err)
		if len(problems) == 0 {
			t.Errorf("%q: %v is no *Problem", tt.src, err)
			continue
		}
		p := problems[0]
		if !strings.Contains(p.Error(), tt.want) || p.Line != tt.line || p.Policy != "test" || !strings.HasPrefix(p.Error(), fmt.Sprintf("policy test: line %d: ", tt.line)) {
			t.Errorf("%q: %v, want line %d with %q", tt.src, p, tt.line, tt.want)
		}
		if p.Remedy == "" {
			t.Errorf("%q: %v has no remedy", tt.src, p)
		}
		if strings.ContainsAny(p.Error(), "\n\x00\x1b") {
			t.Errorf("%q: %q is not one line", tt.src, p.Error())
		}
	}
}

// All problems are told at once, in the order of the file, and no more than a screen of them.
func TestParseTellsAll(t *testing.T) {
	_, err := policy.Parse("my policy", []byte("tests: [{deny: x}]\nallow: ['*', a.lab, '*.com']\ndeny:\n  - {host: a.lab, wen: x, port: 0}\n"))
	var lines []int
	for _, p := range policy.Problems(err) {
		lines = append(lines, p.Line)
	}
	if diff := cmp.Diff([]int{1, 2, 2, 4, 4}, lines); diff != "" {
		t.Errorf("%v: %s", err, diff)
	}
	var p *policy.Problem
	if !errors.As(err, &p) || !strings.HasPrefix(err.Error(), `policy "my policy": line 1: tests[0]: "x" is no URL; want `) {
		t.Errorf("%v", err)
	}
	_, err = policy.Parse("x", []byte("allow:\n"+strings.Repeat("  - '*'\n", 1000)))
	if n := len(policy.Problems(err)); n != 51 || !strings.Contains(err.Error(), "and 950 more problems") {
		t.Errorf("%d problems: %.300s", n, err)
	}
	if _, err := policy.Parse("x", make([]byte, 5<<20)); err == nil || !strings.Contains(err.Error(), "is it a policy?") {
		t.Errorf("a large file: %v", err)
	}
	if policy.Problems(nil) != nil {
		t.Error("no error has problems")
	}
}

func TestParse(t *testing.T) {
	src := `
extends: registries
allow: # a comment
  - api.github.com
  - name: models
    host: "*.example.com"
    ports: [443, 8443, 8000-8010, 8005-8020]
    methods: [GET, POST]
    paths: [/v1/**, /health]
    when: >
      request.headers["x-team"] == "a" &&
      !request.path.startsWith("/v1/admin")
  - cidr: 10.1.2.0/24
    port: 5432
    protocol: tcp
  - BÜCHER.example.
deny:
  - host: gist.github.com
  - "*.ru"
limits: {connections: 256, bytes_up: 1GiB, bytes_down: 10 GB, requests_per_minute: 600, new_hosts_per_hour: 300}
secrets:
tests:
  - allow: GET https://api.github.com/repos/x
  - allow: https://registry.npmjs.org/left-pad
  - deny: GET https://gist.github.com/
  - deny: GET https://x/
  - deny: tcp://10.0.0.1:22
  - allow: tcp://10.1.2.3:5432
  - deny: GET https://0x7f.1/
  - deny: GET https://a.example.com/v1/x
  - allow: GET https://a.example.com:8015/v1/x
    headers: {X-Team: a}
  - deny: GET https://a.example.com/v1/admin
    headers: {X-Team: a}
  - deny: GET https://a.example.com/v1/..;/x
    headers: {X-Team: [a]}
  - allow: https://xn--bcher-kva.example/
  - deny: https://[::1]:8080/
  - deny: udp://registry.npmjs.org:443
`
	p := parse(t, src)
	if f := p.Test(); len(f) > 0 || p.Tests() != 14 {
		t.Errorf("%d tests, failures: %v", p.Tests(), f)
	}
	if p.Name() != "test" || p.Extends() != "registries" || string(p.Source()) != src || p.Digest() != fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(src))) {
		t.Errorf("name %q, extends %q, digest %q", p.Name(), p.Extends(), p.Digest())
	}
	p.Source()[0] = 'x'
	if string(p.Source()) != src {
		t.Error("the source of a policy can be changed")
	}
	want := policy.Limits{Connections: 256, BytesUp: 1 << 30, BytesDown: 1e10, RequestsPerMinute: 600, NewHostsPerHour: 300}
	if diff := cmp.Diff(want, p.Limits()); diff != "" {
		t.Error(diff)
	}
	v := p.Request(policy.Request{Flow: policy.Flow{Host: "x.example.com", Port: 443, Protocol: policy.HTTPS}, Method: "PUT", Path: "/v1/x"})
	if v.Allow {
		t.Error(v)
	}
	for s, rule := range map[string]string{
		"https://x.example.com":          `allow[1] "models"`,
		"tcp://10.1.2.3:5432":            "allow[2]",
		"https://files.pythonhosted.org": `preset registries: allow[3] "pypi"`,
		"https://yandex.ru":              "deny[1]",
	} {
		if v, _ := p.Connect(target(t, s).Flow); v.Rule != rule {
			t.Errorf("%s: %+v, want %s", s, v, rule)
		}
	}
	if q := parse(t, "extends: locked\n"); q.Digest() == p.Digest() {
		t.Error("two policies have one digest")
	}
	if l := parse(t, "limits: {bytes_up: 0, bytes_down: 1000000, connections: 0}").Limits(); l != (policy.Limits{BytesDown: 1e6}) {
		t.Errorf("%+v", l)
	}
	if l := parse(t, "limits: {bytes_up: 1.5k, bytes_down: 2MB}").Limits(); l != (policy.Limits{BytesUp: 1536, BytesDown: 2e6}) {
		t.Errorf("%+v", l)
	}
}

// What says nothing allows nothing.
func TestEmptyAllowsNothing(t *testing.T) {
	for _, src := range []string{"{}", "extends: locked", "allow:", "allow: []", "allow:\ndeny:\nsecrets:\ntests:\nlimits:\n", "deny: [a.lab]"} {
		p := parse(t, src)
		if p.Extends() != "locked" {
			t.Errorf("%q extends %q", src, p.Extends())
		}
		for _, s := range []string{"GET https://a.lab/", "GET http://a.lab/", "https://registry.npmjs.org", "tcp://1.1.1.1:53", "udp://a.lab:53", "https://127.0.0.1"} {
			r := target(t, s)
			v, _ := p.Connect(r.Flow)
			if w := p.Request(r); v.Allow || w.Allow || p.Lookup(r.Host).Allow {
				t.Errorf("%q allows %s: %+v %+v", src, s, v, w)
			}
		}
	}
}

// Neither does a policy that is missing.
func TestNoPolicy(t *testing.T) {
	for _, p := range []*policy.Policy{nil, {}} {
		r := target(t, "GET https://a.lab/")
		v, _ := p.Connect(r.Flow)
		for _, v := range []policy.Verdict{v, p.Lookup(r.Host), p.Request(r), p.Address(r.Flow, netip.MustParseAddr("8.8.8.8"))} {
			if v.Allow || v.Reason != "there is no policy" {
				t.Errorf("%+v", v)
			}
		}
	}
}

func TestTestFailures(t *testing.T) {
	p := parse(t, "allow:\n  - {host: a.lab, methods: [GET]}\n  - {host: b.lab, protocol: tcp, ports: [22]}\ntests:\n  - deny: GET https://a.lab/\n  - allow: POST https://a.lab/\n  - allow: tcp://c.lab:22\n  - allow: https://a.lab/%00\n  - deny: tcp://b.lab:22\n")
	var got []string
	for _, f := range p.Test() {
		got = append(got, f.String())
	}
	want := []string{
		`line 5: deny: GET https://a.lab/: it is allowed by allow[0] (line 2): a.lab; https; port 443; GET`,
		`line 6: allow: POST https://a.lab/: it is denied by default: no rule allows "POST" "/" at https://a.lab:443`,
		`line 7: allow: tcp://c.lab:22: it is denied by default: no rule allows "c.lab"`,
		`line 8: allow: https://a.lab/%00: it is denied by request: path "/%00": it holds the control character 0x00`,
		`line 9: deny: tcp://b.lab:22: it is allowed by allow[1] (line 3): b.lab; tcp; port 22`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseTarget(t *testing.T) {
	for in, want := range map[string]policy.Request{
		"a.lab":                  {Flow: policy.Flow{Host: "a.lab", Port: 443, Protocol: policy.HTTPS}},
		"::1":                    {Flow: policy.Flow{Host: "::1", Port: 443, Protocol: policy.HTTPS}},
		"https://a.lab":          {Flow: policy.Flow{Host: "a.lab", Port: 443, Protocol: policy.HTTPS}, Path: "/"},
		"https://a.lab/":         {Flow: policy.Flow{Host: "a.lab", Port: 443, Protocol: policy.HTTPS}, Method: "GET", Path: "/"},
		"PUT http://A.lab/a?b=c": {Flow: policy.Flow{Host: "a.lab", Port: 80, Protocol: policy.HTTP}, Method: "PUT", Path: "/a", Query: "b=c"},
		"tcp://[::1]:22":         {Flow: policy.Flow{Host: "::1", Port: 22, Protocol: policy.TCP}, Path: "/"},
	} {
		got, err := policy.ParseTarget(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", in, diff)
		}
	}
	for _, in := range []string{"", "a b", "a/b", "https://", "https://a:b:c/", "gopher://a/", "https://user@a.lab/", "https://a.lab:x/", "https://[::1", "https://[::1]x/", "tcp://a.lab:22 "} {
		if r, err := policy.ParseTarget(in); err == nil {
			t.Errorf("%q: %+v", in, r)
		}
	}
}

// The examples of the reference are policies, and their own tests hold.
func TestDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/POLICY.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for i, block := range strings.Split(string(text), "```") {
		src, ok := strings.CutPrefix(block, "yaml\n")
		if i%2 == 0 || !ok {
			continue
		}
		n++
		p, err := policy.Parse("POLICY.md", []byte(src))
		if err != nil {
			t.Errorf("%s\n%v", src, err)
			continue
		}
		for _, f := range p.Test() {
			t.Errorf("%s\n%v", src, f)
		}
		for _, f := range p.Lint() {
			t.Errorf("%s\n%v", src, f)
		}
	}
	if n < 5 {
		t.Errorf("the reference has %d examples", n)
	}
}
