package policy_test

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// target parses what a table asks about, which is canonical except where the table is about that.
func target(t testing.TB, s string) policy.Request {
	t.Helper()
	r, err := policy.ParseTarget(s)
	if err != nil {
		t.Fatalf("%s: %v", s, err)
	}
	return r
}

const rules = `
extends: locked
allow:
  - allowed.lab
  - name: sub
    host: "*.wild.lab"
  - name: models
    host: models.lab
    ports: [443, 8000-8010]
    methods: [GET, POST]
    paths: [/v1/**, /health]
  - name: team
    host: team.lab
    when: request.headers["x-team"] == "a" && !request.path.startsWith("/v1/admin")
  - {name: plain, host: plain.lab, protocol: http}
  - {name: ssh, host: git.lab, protocol: tcp, ports: [22]}
  - {name: dns, host: time.lab, protocol: udp, ports: [123]}
  - {name: seen, host: seen.lab, inspect: true}
  - {name: both, host: both.lab, paths: [/a/**]}
  - both.lab
  - {name: mixed, host: mixed.lab, ports: [443]}
  - {name: mixed-tcp, host: mixed.lab, protocol: tcp, ports: [443, 22]}
  - {host: 93.184.216.34}
  - {host: "2606:4700::1111"}
deny:
  - evil.wild.lab
  - "*.bad.wild.lab"
  - {name: admin, host: allowed.lab, paths: [/admin/**]}
  - {name: writes, host: "*.ro.wild.lab", methods: [POST, PUT, PATCH, DELETE]}
  - {name: one-port, host: models.lab, ports: [8005]}
  - {name: no-tls, host: mixed.lab, protocol: https}
`

func TestConnect(t *testing.T) {
	p := parse(t, rules)
	for _, tt := range []struct {
		flow           string
		allow, inspect bool
		rule           string
	}{
		{"https://allowed.lab", true, true, "allow[0]"}, // inspected because of deny[2]
		{"https://allowed.lab:8443", false, false, "default"},
		{"http://allowed.lab", false, false, "default"},
		{"tcp://allowed.lab:443", false, false, "default"},
		{"udp://allowed.lab:443", false, false, "default"},
		{"https://a.wild.lab", true, false, `allow[1] "sub"`},
		{"https://a.b.c.wild.lab", true, false, `allow[1] "sub"`},
		{"https://wild.lab", false, false, "default"},
		{"https://evilwild.lab", false, false, "default"},
		{"https://wild.lab.evil.lab", false, false, "default"},
		{"https://evil.wild.lab", false, false, "deny[0]"},
		{"https://x.evil.wild.lab", true, false, `allow[1] "sub"`},
		{"https://x.bad.wild.lab", false, false, "deny[1]"},
		{"https://bad.wild.lab", true, false, `allow[1] "sub"`},
		{"https://x.ro.wild.lab", true, true, `allow[1] "sub"`},
		{"https://models.lab", true, true, `allow[2] "models"`},
		{"https://models.lab:8000", true, true, `allow[2] "models"`},
		{"https://models.lab:8010", true, true, `allow[2] "models"`},
		{"https://models.lab:8011", false, false, "default"},
		{"https://models.lab:8005", false, false, `deny[4] "one-port"`},
		{"https://team.lab", true, true, `allow[3] "team"`},
		{"http://plain.lab", true, false, `allow[4] "plain"`},
		{"http://plain.lab:8080", false, false, "default"},
		{"https://plain.lab", false, false, "default"},
		{"tcp://git.lab:22", true, false, `allow[5] "ssh"`},
		{"https://git.lab:22", false, false, "default"},
		{"udp://time.lab:123", true, false, `allow[6] "dns"`},
		{"https://seen.lab", true, true, `allow[7] "seen"`},
		{"https://both.lab", true, false, `allow[8] "both"`}, // allow[9] has no conditions
		{"https://mixed.lab", false, false, `deny[5] "no-tls"`},
		{"tcp://mixed.lab:443", true, false, `allow[11] "mixed-tcp"`},
		{"https://93.184.216.34", true, false, "allow[12]"},
		{"https://93.184.216.35", false, false, "default"},
		{"https://[2606:4700::1111]", true, false, "allow[13]"},
		{"https://10.0.0.1", false, false, "default"},
		{"https://other.lab", false, false, "default"},
	} {
		r := target(t, tt.flow)
		v, inspect := p.Connect(r.Flow)
		if v.Allow != tt.allow || inspect != tt.inspect || v.Rule != tt.rule {
			t.Errorf("%s: %+v, %v; want %v, %v by %s", tt.flow, v, inspect, tt.allow, tt.inspect, tt.rule)
		}
		if (v.Line > 0) != (v.Rule != "default") || v.Reason == "" {
			t.Errorf("%s: %+v names no line or no reason", tt.flow, v)
		}
	}
	for _, f := range []policy.Flow{{Host: "allowed.lab", Protocol: "https"}, {Host: "allowed.lab", Port: 443, Protocol: "quic"}, {Host: "allowed.lab", Port: 443}, {}} {
		if v, _ := p.Connect(f); v.Allow {
			t.Errorf("%+v: %+v", f, v)
		}
	}
}

func TestLookup(t *testing.T) {
	p := parse(t, rules+"  - {host: plain.lab, protocol: http, ports: [1-100]}\n  - {host: plain.lab, protocol: http, ports: [70-65535]}\n")
	for h, want := range map[policy.Host]bool{
		"allowed.lab": true, "a.wild.lab": true, "wild.lab": false, "evil.wild.lab": false, "x.bad.wild.lab": false, "x.ro.wild.lab": true,
		"models.lab": true, "git.lab": true, "time.lab": true, "other.lab": false, "x.allowed.lab": false, "plain.lab": false,
		"mixed.lab": true, "93.184.216.34": false, "": false, "ALLOWED.lab": false, "allowed.lab.": false,
		"evil.lab\x00.wild.lab": false, "evil.lab\n.wild.lab": false, "-.wild.lab": false, ".wild.lab": false, "a..wild.lab": false,
	} {
		if v := p.Lookup(h); v.Allow != want || v.Reason == "" {
			t.Errorf("Lookup(%q) = %+v, want %v", h, v, want)
		}
	}
}

func TestRequest(t *testing.T) {
	p := parse(t, rules)
	for _, tt := range []struct {
		req    string
		header http.Header
		want   bool
		rule   string
	}{
		{"GET https://allowed.lab/", nil, true, "allow[0]"},
		{"GET https://allowed.lab/admin", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/admin/", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/admin/x", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab//admin/x", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/%61dmin/x", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/x/../admin", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/admin%2Fx", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/admin;x=1/y", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/admin%3Bx=1/y", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/;x/admin", nil, false, `deny[2] "admin"`},
		{"GET https://allowed.lab/administrator", nil, true, "allow[0]"},
		{"POST https://x.ro.wild.lab/", nil, false, `deny[3] "writes"`},
		{"post https://x.ro.wild.lab/", nil, false, `deny[3] "writes"`},
		{"GET https://x.ro.wild.lab/", nil, true, `allow[1] "sub"`},
		{"GET https://x.ro.wild.lab/", http.Header{"X-Http-Method-Override": {"delete"}}, false, `deny[3] "writes"`},
		{"GET https://x.ro.wild.lab/", http.Header{"x-http-method": {"GET, PUT"}}, false, `deny[3] "writes"`},
		{"GET https://x.ro.wild.lab/", http.Header{"X-Method-Override": {"GET"}}, true, `allow[1] "sub"`},
		{"GET https://models.lab/v1/x", nil, true, `allow[2] "models"`},
		{"POST https://models.lab:8001/v1/x?a=b", nil, true, `allow[2] "models"`},
		{"GET https://models.lab/health", nil, true, `allow[2] "models"`},
		{"GET https://models.lab/", nil, false, "default"},
		{"get https://models.lab/v1/x", nil, false, "default"},
		{"PUT https://models.lab/v1/x", nil, false, "default"},
		{"GET https://models.lab/v1/x", http.Header{"X-HTTP-Method-Override": {"DELETE"}}, false, "default"},
		{"GET https://models.lab/v1/x", http.Header{"X-HTTP-Method-Override": {"POST"}}, true, `allow[2] "models"`},
		{"GET https://models.lab/v1/../admin", nil, false, "default"},
		{"GET https://models.lab/v1%2Fx", nil, false, "default"},
		{"GET https://models.lab/v1/a%2Fb", nil, true, `allow[2] "models"`},
		{"GET https://models.lab/v1;a/b", nil, false, "default"},
		{"GET https://models.lab/V1/x", nil, false, "default"},
		{"GET https://models.lab:8005/v1/x", nil, false, `deny[4] "one-port"`},
		{"GET https://team.lab/", http.Header{"X-Team": {"a"}}, true, `allow[3] "team"`},
		{"GET https://team.lab/", http.Header{"x-team": {"a"}}, true, `allow[3] "team"`},
		{"GET https://team.lab/", http.Header{"X-Team": {"a", "b"}}, false, "default"},
		{"GET https://team.lab/", http.Header{"X-Team": {"a"}, "x-team": {"b"}}, false, "default"},
		{"GET https://team.lab/", nil, false, "default"},
		{"GET https://team.lab/v1/admin", http.Header{"X-Team": {"a"}}, false, "default"},
		{"GET https://team.lab/v1%2Fadmin", http.Header{"X-Team": {"a"}}, false, "default"},
		{"GET https://team.lab/v1;/admin", http.Header{"X-Team": {"a"}}, false, "default"},
		{"GET http://plain.lab/", nil, true, `allow[4] "plain"`},
		{"GET https://plain.lab/", nil, false, "default"},
		{"GET https://both.lab/b", nil, true, "allow[9]"},
		{"GET https://both.lab/a/x", nil, true, `allow[8] "both"`},
		{"GET https://other.lab/", nil, false, "default"},
	} {
		r := target(t, tt.req)
		r.Header = tt.header
		if v := p.Request(r); v.Allow != tt.want || v.Rule != tt.rule {
			t.Errorf("%s %v: %+v, want %v by %s", tt.req, tt.header, v, tt.want, tt.rule)
		}
	}
	ok := target(t, "GET https://allowed.lab/")
	if v := p.Request(ok); !v.Allow {
		t.Fatal(v)
	}
	for name, change := range map[string]func(*policy.Request){
		"tcp":               func(r *policy.Request) { r.Host, r.Port, r.Protocol = "git.lab", 22, policy.TCP },
		"no method":         func(r *policy.Request) { r.Method = "" },
		"method with space": func(r *policy.Request) { r.Method = "GET /" },
		"no path":           func(r *policy.Request) { r.Path = "" },
		"raw path":          func(r *policy.Request) { r.Path = "//x" },
		"dot segment":       func(r *policy.Request) { r.Path = "/x/../y" },
		"escaped letter":    func(r *policy.Request) { r.Path = "/%61dmin" },
		"capital host":      func(r *policy.Request) { r.Host = "Allowed.lab" },
		"many methods": func(r *policy.Request) {
			r.Header = http.Header{"X-Http-Method": {"A,B,C,D,E,F,G,H,I,J,K,L,M,N,O,P,Q,R"}}
		},
	} {
		r := ok
		change(&r)
		if v := p.Request(r); v.Allow {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

// TestRewrittenPaths asks with headers that some servers take the path from: rules hold for both.
func TestRewrittenPaths(t *testing.T) {
	p := parse(t, `
allow:
  - {name: paths, host: paths.lab, paths: [/public/**]}
  - {name: when, host: when.lab, when: '!request.path.startsWith("/admin")'}
  - {name: query, host: query.lab, when: '"dry" in request.query'}
  - {name: methods, host: methods.lab, methods: [GET]}
  - denied.lab
deny:
  - {name: admin, host: denied.lab, paths: [/admin/**]}
secrets:
  - {secret: k, hosts: [paths.lab, denied.lab], paths: [/public/**], place: {query: key}}
`)
	for _, tt := range []struct {
		req           string
		values        []string
		allow, secret bool
	}{
		{"https://paths.lab/public/x", nil, true, true},
		{"https://paths.lab/public/x", []string{"/public/x"}, true, true},
		{"https://paths.lab/public/x?a=b", []string{"/public/y?c=d"}, true, true},
		{"https://paths.lab/public/x", []string{"/admin"}, false, false},
		{"https://paths.lab/public/x", []string{"/admin?/public/x"}, false, false},
		{"https://paths.lab/public/x", []string{"/public/y", "/admin"}, false, false},
		{"https://paths.lab/public/x", []string{"/public%2Fy"}, false, false},
		{"https://paths.lab/public/x", []string{"/public/../admin"}, false, false},
		{"https://paths.lab/public/x", []string{"/public//y"}, false, false},
		{"https://paths.lab/public/x", []string{"public/y"}, false, false},
		{"https://paths.lab/public/x", []string{"https://paths.lab/public/y"}, false, false},
		{"https://paths.lab/public/x", []string{""}, false, false},
		{"https://paths.lab/admin", []string{"/public/x"}, false, false},
		{"https://when.lab/", []string{"/x"}, true, false},
		{"https://when.lab/", []string{"/admin"}, false, false},
		{"https://when.lab/", []string{"//x"}, false, false},
		{"https://query.lab/?dry=1", []string{"/?dry=1"}, true, false},
		{"https://query.lab/?dry=1", []string{"/x"}, false, false},
		{"https://query.lab/?dry=1", []string{"/x?dry=0"}, false, false},
		{"https://query.lab/?dry=1", []string{"x"}, false, false},
		{"https://methods.lab/", []string{"/admin"}, true, false},
		{"https://methods.lab/", []string{"//"}, true, false},
		{"https://denied.lab/public/x", []string{"/public/y"}, true, true},
		{"https://denied.lab/public/x", []string{"/other"}, true, false},
		{"https://denied.lab/public/x", []string{"/admin"}, false, false},
		{"https://denied.lab/public/x", []string{"/x%2F..%2Fadmin"}, false, false},
	} {
		for _, name := range []string{"X-Original-Url", "X-ORIGINAL-URL", "X-Rewrite-Url", "X_original-Url", "X_REWRITE_URL"} {
			r := target(t, "GET "+tt.req)
			if tt.values != nil {
				r.Header = http.Header{name: tt.values}
			}
			if v := p.Request(r); v.Allow != tt.allow {
				t.Errorf("%s with %s: %q: %+v; want it allowed: %v", tt.req, name, tt.values, v, tt.allow)
			}
			if _, secret := p.Grant(r); secret != tt.secret {
				t.Errorf("%s with %s: %q is given the secret: %v", tt.req, name, tt.values, secret)
			}
			if steps := p.Explain(r); len(steps) == 0 || steps[len(steps)-1].Matched != tt.allow {
				t.Errorf("%s with %s: %q: %+v", tt.req, name, tt.values, steps)
			}
		}
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = fmt.Sprintf("/public/%d", i)
	}
	for n, want := range map[int]bool{15: true, 16: false, 1000: false} {
		r := target(t, "GET https://paths.lab/public/x")
		r.Header = http.Header{"X-Original-Url": many[:n]}
		if v := p.Request(r); v.Allow != want {
			t.Errorf("%d paths: %+v", n, v)
		}
	}
}

// TestManyMeanings asks with requests that name more than anybody means: they are denied by what comes first of it, and cost and keep nothing of the rest.
func TestManyMeanings(t *testing.T) {
	var list strings.Builder
	for i := range 62_000 {
		fmt.Fprintf(&list, "M%x,", i)
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = fmt.Sprintf("M%d", i)
	}
	for name, tt := range map[string]struct {
		header http.Header
		allow  bool
	}{
		"a long list":                  {http.Header{"X-Http-Method-Override": {list.String()}}, false},
		"a long list with _":           {http.Header{"X_http_method": {list.String()}}, false},
		"many lines":                   {http.Header{"X-Method-Override": many}, false},
		"one method many times":        {http.Header{"X-Http-Method": {strings.Repeat("POST,", 50_000)}}, true},
		"sixteen ways":                 {http.Header{"X-Http-Method": {"A,B,C,D,E,F,G"}, "X_other": {"1"}}, true},
		"seventeen ways":               {http.Header{"X-Http-Method": {"A,B,C,D,E,F,G,H,I,J,K,L,M,N,O,P"}}, false},
		"seventeen ways by two things": {http.Header{"X-Http-Method": {"A,B,C,D,E,F,G,H"}, "X_other": {"1"}}, false},
	} {
		r := target(t, "GET https://api.lab/")
		r.Header = tt.header
		allows := parse(t, "allow: [{host: api.lab, when: 'request.method != \"DELETE\"'}]")
		denies := parse(t, "allow: [api.lab]\ndeny: [{host: api.lab, methods: [DELETE]}]")
		for what, p := range map[string]*policy.Policy{"allow": allows, "deny": denies} {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := time.Now()
			v := p.Request(r)
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			if v.Allow != tt.allow {
				t.Errorf("%s: the %s rule: %+v; want it allowed: %v", name, what, v, tt.allow)
			}
			if !tt.allow && !strings.Contains(v.Reason, "can be understood in 17 or more ways") {
				t.Errorf("%s: the %s rule: %q does not say why", name, what, v.Reason)
			}
			if kept := after.TotalAlloc - before.TotalAlloc; kept > 128<<10 || took > time.Second {
				t.Errorf("%s: the %s rule took %v and %d bytes", name, what, took, kept)
			}
		}
	}
	// Spellings of one header are joined once, not anew with each.
	h := http.Header{}
	name := []byte("x-aaaaaaaaaa-b")
	for i := range 1000 {
		for bit := range 10 {
			name[2+bit] = "-_"[i>>bit&1]
		}
		h[string(name)] = []string{strings.Repeat("v", 200)}
	}
	r := target(t, "GET https://api.lab/")
	r.Header = h
	p := parse(t, "allow: [{host: api.lab, when: '\"x\" in request.headers'}]")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	p.Request(r)
	runtime.ReadMemStats(&after)
	if kept := after.TotalAlloc - before.TotalAlloc; kept > 8<<20 {
		t.Errorf("1000 spellings of a header of 200 KiB took %d bytes", kept)
	}
}

// TestDenyWins holds for each way to allow and each way to deny; the twin is that without the denial all is allowed.
func TestDenyWins(t *testing.T) {
	allows := []string{"a.x.lab", `"*.x.lab"`, `"*.lab"`, "{host: a.x.lab, methods: [GET]}", "{host: a.x.lab, paths: [/**]}", `{host: a.x.lab, when: 'request.host == "a.x.lab"'}`}
	denies := []string{"a.x.lab", `"*.x.lab"`, `"*.lab"`, "{host: a.x.lab, ports: [443]}", "{host: a.x.lab, methods: [GET]}", "{host: a.x.lab, paths: [/a]}", `{host: a.x.lab, when: request.port == 443}`, `{host: a.x.lab, when: 'request.headers["none"] == ""'}`}
	for _, preset := range []string{"locked", "open"} {
		for _, allow := range allows {
			src := "extends: " + preset + "\nallow:\n  - " + allow + "\n"
			if v := parse(t, src).Request(target(t, "GET https://a.x.lab/a")); !v.Allow {
				t.Errorf("without a denial %s allows nothing: %+v", allow, v)
			}
			for _, deny := range denies {
				for _, src := range []string{src + "deny:\n  - " + deny, "deny:\n  - " + deny + "\n" + src} {
					p := parse(t, src)
					if v := p.Request(target(t, "GET https://a.x.lab/a")); v.Allow || !strings.HasPrefix(v.Rule, "deny[0]") {
						t.Errorf("%s and deny %s: %+v", allow, deny, v)
					}
					if v, inspect := p.Connect(target(t, "https://a.x.lab").Flow); v.Allow && !inspect {
						t.Errorf("%s and deny %s: the connection is neither denied nor inspected", allow, deny)
					}
				}
			}
		}
	}
}

func TestWhen(t *testing.T) {
	for _, tt := range []struct {
		when        string
		allow, deny bool // what the rule does as an allow and, on its own, as a deny
	}{
		{`true`, true, true},
		{`false`, false, false},
		{`request.method == "POST"`, true, true},
		{`request.path == "/a/b c"`, true, true},
		{`request.path.startsWith("/a/")`, true, true},
		{`request.path.matches("^/a/[a-z ]+$")`, true, true},
		{`request.path.lowerAscii() == "/a/b c"`, true, true},
		{`request.host == "x.lab" && request.port == 443`, true, true},
		{`"x" in request.query && request.query["x"] == ["1", "2 3"]`, true, true},
		{`request.query["x"].exists(v, v == "1")`, true, true},
		{`request.query["none"] == []`, false, true}, // no such key: fails, closed both ways
		{`request.headers["x-a"] == "1, 2"`, true, true},
		{`request.headers["cookie"] == "a=1; b=2"`, true, true},
		{`request.headers["X-A"] == "1, 2"`, false, true},
		{`"none" in request.headers`, false, false},
		{`request.headers["none"] == ""`, false, true},
		{`1 / (request.port - 443) == 0`, false, true},
		{`request.headers["none"] == "" || request.port == 443`, true, true},
		{`[1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, [1,2,3,4,5,6,7,8,9,10].all(d, [1,2,3,4,5,6,7,8,9,10].all(e, a + b + c + d + e > request.port - 1000)))))`, false, true}, // too costly
	} {
		r := target(t, "POST https://x.lab/a/b%20c?x=1&x=2+3")
		r.Header = http.Header{"X-A": {"1", "2"}, "Cookie": {"a=1", "b=2"}}
		src := "allow:\n  - host: x.lab\n    when: '" + tt.when + "'\n"
		if v := parse(t, src).Request(r); v.Allow != tt.allow {
			t.Errorf("allow when %s: %+v, want %v", tt.when, v, tt.allow)
		}
		src = "allow: [x.lab]\ndeny:\n  - host: x.lab\n    when: '" + tt.when + "'\n"
		if v := parse(t, src).Request(r); v.Allow == tt.deny {
			t.Errorf("deny when %s: %+v, want denied: %v", tt.when, v, tt.deny)
		}
	}
	// A query that servers take apart in different ways fits no allow and every deny.
	for _, query := range []string{"x=%zz", "a=1;b=2"} {
		r := target(t, "GET https://x.lab/")
		r.Query = query
		if v := parse(t, "allow:\n  - host: x.lab\n    when: '!(\"x\" in request.query)'\n").Request(r); v.Allow || !strings.Contains(v.Reason, "query") {
			t.Errorf("%s: %+v", query, v)
		}
	}
}

func TestOpen(t *testing.T) {
	p := parse(t, "extends: open\ndeny: [evil.lab]\n")
	for s, want := range map[string]bool{
		"https://example.com": true, "http://example.com:8080": true, "tcp://example.com:25": true, "udp://example.com:443": true, "https://1.1.1.1": true,
		"https://10.0.0.1": false, "tcp://127.0.0.1:22": false, "udp://[fe80::1]:53": false, "https://[64:ff9b::7f00:1]": false,
		"https://evil.lab": false, "tcp://evil.lab:22": false, "udp://evil.lab:53": false,
	} {
		if v, inspect := p.Connect(target(t, s).Flow); v.Allow != want || inspect {
			t.Errorf("%s: %+v, %v", s, v, inspect)
		}
	}
	if v := p.Lookup("evil.lab"); v.Allow {
		t.Error(v)
	}
}

func TestPlatformCredentialsOnly(t *testing.T) {
	p := parse(t, "extends: open\nplatform_credentials_only: true\n")
	for s, want := range map[string]bool{"https://example.com": true, "http://example.com": true, "tcp://example.com:22": false} {
		if v, inspect := p.Connect(target(t, s).Flow); !v.Allow || inspect != want {
			t.Errorf("%s: %+v, %v; want it inspected: %v", s, v, inspect, want)
		}
	}
	if !p.PlatformCredentialsOnly() || parse(t, "extends: open").PlatformCredentialsOnly() {
		t.Error("platform_credentials_only is not what the file says")
	}
}

// What a verdict says is one line without anything that a terminal or a log would take for more.
func TestVerdictsAreFitForLogs(t *testing.T) {
	p := parse(t, rules)
	hostile := "x\n\x1b[31m\"}{\x00\u202e"
	for _, v := range []policy.Verdict{
		p.Lookup(policy.Host(hostile)),
		p.Request(policy.Request{Flow: policy.Flow{Host: policy.Host(hostile), Protocol: policy.HTTPS}}),
		p.Request(policy.Request{Flow: policy.Flow{Host: "allowed.lab", Port: 443, Protocol: policy.HTTPS}, Method: hostile, Path: "/"}),
		p.Request(policy.Request{Flow: policy.Flow{Host: "allowed.lab", Port: 443, Protocol: policy.HTTPS}, Method: "GET", Path: "/" + hostile}),
		p.Request(policy.Request{Flow: policy.Flow{Host: "allowed.lab", Port: 443, Protocol: policy.Protocol(hostile)}, Method: "GET", Path: "/"}),
	} {
		if v.Allow || strings.ContainsAny(v.Reason+v.Rule, "\n\x1b\x00\u202e") {
			t.Errorf("%+v", v)
		}
	}
	p = parse(t, "allow:\n  - host: x\n    when: |\n      request.path != \"\\x1b\" &&\n      request.host != '\u202e\ta'\n")
	for _, r := range []policy.Request{target(t, "GET https://x/"), target(t, "x")} {
		v, _ := p.Connect(r.Flow)
		if !v.Allow || strings.ContainsAny(v.Reason, "\n\t\x1b\u202e") {
			t.Errorf("%+v", v)
		}
	}
	v, _ := p.Connect(policy.Flow{Host: "x", Port: 1, Protocol: policy.Protocol(hostile)})
	if v.Allow || strings.ContainsAny(v.Reason, "\n\x1b\x00") {
		t.Errorf("%+v", v)
	}
}

func TestConcurrent(t *testing.T) {
	p := parse(t, rules)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 200 {
				r := target(t, fmt.Sprintf("GET https://team.lab/v1/%d", i))
				r.Header = http.Header{"X-Team": {"a"}}
				if v := p.Request(r); !v.Allow {
					t.Errorf("%+v", v)
				}
				p.Explain(r)
			}
		})
	}
	wg.Wait()
}

// TestDeniesPeer asks about sandboxes of a private network, which need no rule that allows them and are denied by each that is about them.
func TestDeniesPeer(t *testing.T) {
	p := parse(t, `
extends: open
allow: ["*.named.internal"]
deny:
  - all.shop.internal
  - {host: port.shop.internal, ports: [22]}
  - {host: tcp.shop.internal, protocol: tcp}
  - {host: udp.shop.internal, protocol: udp}
  - {host: tls.shop.internal, protocol: https}
  - {host: path.shop.internal, paths: [/x/**]}
  - "*.locked.internal"
`)
	for _, tt := range []struct {
		host     policy.Host
		port     uint16
		tcp, udp bool
	}{
		{"db.shop.internal", 22, false, false},
		{"all.shop.internal", 80, true, true},
		{"port.shop.internal", 22, true, true},
		{"port.shop.internal", 23, false, false},
		{"tcp.shop.internal", 80, true, false},
		{"udp.shop.internal", 80, false, true},
		{"tls.shop.internal", 80, true, false},
		{"path.shop.internal", 80, true, false},
		{"x.locked.internal", 80, true, true},
		{"locked.internal", 80, false, false},
		{"NOT.canonical", 80, true, true},
	} {
		for proto, want := range map[policy.Protocol]bool{policy.TCP: tt.tcp, policy.UDP: tt.udp} {
			if v, got := p.DeniesPeer(tt.host, tt.port, proto); got != want || v.Allow || got && v.Reason == "" {
				t.Errorf("%s:%d over %s: %v, %+v", tt.host, tt.port, proto, got, v)
			}
		}
	}
	// A rule for every host means none of these.
	for host, want := range map[policy.Host]bool{"a.named.internal": true, "named.internal": false, "a.shop.internal": false, "internal": false, "internal.lab": true, "a.xinternal": true} {
		if v := p.Lookup(host); v.Allow != want {
			t.Errorf("%s may be looked up: %+v", host, v)
		}
		if v, _ := p.Connect(policy.Flow{Host: host, Port: 443, Protocol: policy.HTTPS}); v.Allow != want {
			t.Errorf("%s may be connected to: %+v", host, v)
		}
	}
	for _, f := range p.Lint() {
		t.Errorf("doubtful: %s", f)
	}
	var none *policy.Policy
	if _, denied := none.DeniesPeer("db.shop.internal", 80, policy.TCP); !denied {
		t.Error("without a policy a peer is not denied")
	}
}
