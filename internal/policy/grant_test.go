package policy_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren/internal/policy"
)

const granted = `
allow: [api.github.com, "*.corp.lab", pkg.lab, other.lab]
secrets:
  - secret: github-token
    env: GITHUB_TOKEN
    hosts: [api.github.com]
    paths: [/v1/*]
    methods: [GET, POST]
    place: {header: authorization, format: "Bearer {}"}
  - {secret: corp, hosts: ["*.corp.lab"], place: {basic: x-access-token}}
  - {name: pkg key, secret: pkg, host: pkg.lab, port: 443, place: {query: api_key}}
`

func TestGrants(t *testing.T) {
	p := parse(t, granted)
	grants := p.Grants()
	if len(grants) != 3 {
		t.Fatalf("%d grants", len(grants))
	}
	want := []policy.Place{{Header: "Authorization", Format: "Bearer {}"}, {Basic: "x-access-token"}, {Query: "api_key"}}
	for i, g := range grants {
		if diff := cmp.Diff(want[i], g.Place); diff != "" {
			t.Error(diff)
		}
	}
	g := grants[0]
	if g.Name != "github-token" || g.Secret != "github-token" || g.Env != "GITHUB_TOKEN" || grants[2].Name != "pkg key" || g.Hosts[0].String() != "api.github.com" || g.Ports[0].String() != "443" || strings.Join(g.Paths, " ") != "/v1/*" {
		t.Errorf("%+v", g)
	}
	for _, host := range []policy.Host{"api.github.com", "a.corp.lab", "pkg.lab", "other.lab", "corp.lab"} {
		// A host that may have the secret may show it over any protocol and port.
		for i, want := range []bool{host == "api.github.com", host == "a.corp.lab", host == "pkg.lab"} {
			if got := grants[i].Names(host); got != want {
				t.Errorf("grant %d names %s: %v", i, host, got)
			}
		}
	}
	for _, tt := range []struct {
		req    string
		header http.Header
		grant  int // which is given, or -1
	}{
		{"GET https://api.github.com/v1/x", nil, 0},
		{"POST https://api.github.com/v1/x?q", nil, 0},
		{"GET https://api.github.com//v1//x", nil, 0},
		{"GET https://api.github.com/%76%31/x", nil, 0},
		{"PUT https://api.github.com/v1/x", nil, -1},
		{"GET https://api.github.com/v1/x", http.Header{"X-Http-Method-Override": {"DELETE"}}, -1},
		{"GET https://api.github.com/v1/../x", nil, -1},
		{"GET https://api.github.com/v1/%2e%2e/x", nil, -1},
		{"GET https://api.github.com/v1%2fx", nil, -1},
		{"GET https://api.github.com/v1;x/y", nil, -1},
		{"GET https://api.github.com/V1/x", nil, -1},
		{"GET https://api.github.com/v1/x/y", nil, -1},
		{"GET http://api.github.com/v1/x", nil, -1},
		{"GET https://api.github.com:8443/v1/x", nil, -1},
		{"GET https://api.github.com.evil.lab/v1/x", nil, -1},
		{"GET https://evil.lab/v1/x", nil, -1},
		{"GET https://a.corp.lab/", nil, 1},
		{"GET https://a.b.corp.lab/", nil, 1},
		{"GET https://corp.lab/", nil, -1},
		{"GET https://evilcorp.lab/", nil, -1},
		{"GET https://corp.lab.evil.lab/", nil, -1},
		{"GET https://pkg.lab/", nil, 2},
		{"GET https://other.lab/", nil, -1},
	} {
		r := target(t, tt.req)
		r.Header = tt.header
		for i := range grants {
			if got := grants[i].Match(r); got != (i == tt.grant) {
				t.Errorf("%s %v: grant %d matches: %v", tt.req, tt.header, i, got)
			}
		}
		if g, ok := p.Grant(r); ok != (tt.grant >= 0) || ok && g.Name != grants[tt.grant].Name {
			t.Errorf("%s %v: it is given %q", tt.req, tt.header, g.Name)
		}
		if v, inspect := p.Connect(r.Flow); v.Allow && inspect != (tt.grant >= 0 || strings.HasPrefix(string(r.Host), "api.")) {
			t.Errorf("%s: inspected: %v", tt.req, inspect)
		}
	}
	if f := p.Lint(); len(f) > 0 {
		t.Error(f)
	}
	// Without ParseHost and CanonicalPath there is no secret.
	for _, r := range []policy.Request{
		{Flow: policy.Flow{Host: "evil.lab\x00.corp.lab", Port: 443, Protocol: policy.HTTPS}, Method: "GET", Path: "/"},
		{Flow: policy.Flow{Host: "a.corp.lab", Port: 443, Protocol: policy.HTTPS}, Method: "GET", Path: "//"},
	} {
		if grants[1].Match(r) {
			t.Errorf("%+v is given a secret", r)
		}
	}
}

func TestGrantProblems(t *testing.T) {
	const ok = "secret: k, hosts: [a.lab], place: {query: key}"
	for _, tt := range []struct{ grants, want string }{
		{"{}", "it names no secret"},
		{"{" + strings.Replace(ok, "k,", "K,", 1) + "}", "is no name of a secret"},
		{"{" + strings.Replace(ok, "k,", "\"a\\nb\",", 1) + "}", "is no name of a secret"},
		{"{secret: k, place: {query: key}}", "it names no host"},
		{"{secret: k, hosts: [], place: {query: key}}", "is an empty list"},
		{"{secret: k, hosts: ['*'], place: {query: key}}", "names everything"},
		{"{secret: k, hosts: ['*.com'], place: {query: key}}", "below a public suffix"},
		{"{secret: k, hosts: [a.lab]}", "it has no place; want {header: Authorization"},
		{"{secret: k, hosts: [a.lab], place: header}", "place is a mapping"},
		{"{secret: k, hosts: [a.lab], place: {}}", "names 0 places"},
		{"{secret: k, hosts: [a.lab], place: {query: a, basic: b}}", "names 2 places"},
		{"{secret: k, hosts: [a.lab], place: {query: a&b}}", "is no name of a parameter"},
		{"{secret: k, hosts: [a.lab], place: {query: a, format: '{}'}}", "format belongs to header"},
		{"{secret: k, hosts: [a.lab], place: {basic: 'a:b'}}", "is no user name"},
		{"{secret: k, hosts: [a.lab], place: {basic: ''}}", "is no user name"},
		{"{secret: k, hosts: [a.lab], place: {header: 'a b'}}", "cannot carry a secret"},
		{"{secret: k, hosts: [a.lab], place: {header: host}}", "cannot carry a secret"},
		{"{secret: k, hosts: [a.lab], place: {header: Transfer-Encoding}}", "cannot carry a secret"},
		{"{secret: k, hosts: [a.lab], place: {header: \"X\\r\\nY\"}}", "cannot carry a secret"},
		{"{secret: k, hosts: [a.lab], place: {header: X, format: Bearer}}", "with {} once"},
		{"{secret: k, hosts: [a.lab], place: {header: X, format: '{}{}'}}", "with {} once"},
		{"{secret: k, hosts: [a.lab], place: {header: X, format: \"{}\\r\\nY: z\"}}", "with {} once"},
		{"{" + ok + ", env: 1X}", "is no name of a variable"},
		{"{" + ok + ", env: 'A=B'}", "is no name of a variable"},
		{"{" + ok + ", protocol: http}", `has no key "protocol"`},
		{"{" + ok + ", value: hunter2}", `has no key "value"`},
		{"{" + ok + ", methods: [get]}", "write GET"},
		{"{" + ok + ", paths: [x]}", "begin with a slash"},
		// Two for one request.
		{"{" + ok + "}, {secret: l, hosts: [a.lab], place: {query: other}}", `secrets[1] "l": it is ambiguous: one request could be given this secret and that of secrets[0] "k" (line 2)`},
		{"{" + ok + "}, {secret: k, hosts: ['*.lab', a.lab], place: {header: X}}", "ambiguous"},
		{"{secret: k, hosts: ['*.b.lab'], place: {query: x}}, {secret: l, hosts: [a.b.lab], place: {query: y}}", "ambiguous"},
		{"{secret: k, hosts: ['*.b.lab'], place: {query: x}}, {secret: l, hosts: ['*.a.b.lab'], place: {query: y}}", "ambiguous"},
		{"{" + ok + ", paths: [/v1/**]}, {secret: l, hosts: [a.lab], paths: [/*/x], place: {query: y}}", "ambiguous"},
		{"{" + ok + ", methods: [GET]}, {secret: l, hosts: [a.lab], methods: [GET, PUT], place: {query: y}}", "ambiguous"},
		{"{" + ok + ", ports: [1-9]}, {secret: l, hosts: [a.lab], ports: [9], place: {query: y}}", "ambiguous"},
		{"{" + ok + ", env: A}, {secret: l, hosts: [b.lab], env: A, place: {query: y}}", `env A is that of secrets[0] "k" too`},
	} {
		_, err := policy.Parse("test", []byte("secrets:\n  ["+tt.grants+"]\n"))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.grants, err, tt.want)
			continue
		}
		for _, p := range policy.Problems(err) {
			if p.Remedy == "" || p.Line != 2 || !strings.HasPrefix(p.Rule, "secrets[") || strings.ContainsAny(p.Error(), "\r\n") {
				t.Errorf("%s: %+v", tt.grants, p)
			}
		}
	}
	for _, grants := range []string{
		"{" + ok + "}, {secret: l, hosts: [b.lab], place: {query: y}}",
		"{" + ok + ", paths: [/v1/**]}, {secret: l, hosts: [a.lab], paths: [/v2/**], place: {query: y}}",
		"{" + ok + ", methods: [GET]}, {secret: l, hosts: [a.lab], methods: [PUT], place: {query: y}}",
		"{" + ok + ", ports: [1-9]}, {secret: l, hosts: [a.lab], ports: [10], place: {query: y}}",
		"{" + ok + ", env: A}, {secret: k, hosts: [b.lab], env: A, place: {query: y}}",
		"{secret: k, hosts: ['*.b.lab'], place: {query: x}}, {secret: l, hosts: [b.lab], place: {query: y}}",
	} {
		if _, err := policy.Parse("test", []byte("secrets:\n  ["+grants+"]\n")); err != nil {
			t.Errorf("%s: %v", grants, err)
		}
	}
}
