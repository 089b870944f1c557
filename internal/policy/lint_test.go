package policy_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren/internal/policy"
)

// Each of these has just these findings.
func TestLint(t *testing.T) {
	for _, tt := range []struct {
		src  string
		want []string
	}{
		{"allow: [a.lab, '*.b.example.com']\ndeny: ['x.b.example.com']\n", nil},
		{"extends: registries\nallow: [api.github.com]\n", nil},
		{"extends: open\ndeny: [evil.lab, '*.ru']\nallow:\n  - {cidr: 10.0.0.0/8, protocol: tcp, ports: [22]}\n", nil},
		// Too broad.
		{"allow: ['*.github.io']\n", []string{`line 1: warning: allow[0]: "*.github.io" is broad: anybody`}},
		{"allow: ['*.s3.amazonaws.com']\n", []string{`line 1: warning: allow[0]: "*.s3.amazonaws.com" is broad: anybody`}},
		{"allow: ['*.internal']\n", []string{`line 1: warning: allow[0]: "*.internal" is broad: it names a whole`}},
		{"deny: ['*.github.io']\nextends: open\n", nil},
		{"allow:\n  - {cidr: 8.0.0.0/7}\n", []string{`warning: allow[0]: 8.0.0.0/7 is broad`}},
		{"allow:\n  - {cidr: fc00::/7}\n", []string{`warning: allow[0]: fc00::/7 is broad`}},
		{"allow:\n  - {cidr: 127.0.0.0/8}\n", []string{`warning: allow[0]: 127.0.0.0/8 has addresses of the loopback`}},
		{"allow: ['::1']\n", []string{`::1/128 has addresses of the loopback`}},
		{"allow: [169.254.169.254]\n", []string{`error: allow[0]: 169.254.169.254 is never reachable: cloud metadata; remove the rule`}},
		{"allow:\n  - {host: a.lab, protocol: udp, ports: [53]}\n", []string{`it reaches a name server directly`}},
		{"allow:\n  - {host: a.lab, protocol: tcp, ports: [800-900]}\n", []string{`it reaches a name server directly`}},
		{"allow:\n  - {host: a.lab, ports: [853]}\n", nil},
		// Dead.
		{"allow: [a.lab]\ndeny: [a.lab]\n", []string{`line 1: error: allow[0]: it can never decide: deny[0] (line 2) denies all that it allows`}},
		{"allow: [a.b.lab]\ndeny: ['*.lab']\n", []string{`line 1: error: allow[0]: it can never decide: deny[0] (line 2)`}},
		{"allow: ['*.b.lab']\ndeny: ['*.lab']\n", []string{`line 1: error: allow[0]: it can never decide: deny[0] (line 2)`}},
		{"allow: [{host: [a.lab, b.lab]}]\ndeny: [a.lab]\n", []string{`line 1: warning: allow[0]: deny[0] (line 2) denies some of its hosts`}},
		{"allow: [{host: [a.lab, b.lab]}]\ndeny: [a.lab, b.lab]\n", []string{`line 1: error: allow[0]: it can never decide`}},
		{"allow: [a.lab]\ndeny: [{host: a.lab, ports: [8443]}]\n", []string{`line 2: warning: deny[0]: it can never decide: no rule allows what it denies`}},
		{"allow: [a.lab]\ndeny: [{host: a.lab, methods: [PUT]}]\n", nil},
		{"allow: [a.lab]\ndeny: [{host: a.lab, protocol: http}]\n", []string{`line 2: warning: deny[0]: it can never decide`}},
		{"allow: [10.1.2.3]\ndeny: [{cidr: 10.0.0.0/8}]\n", []string{`line 1: error: allow[0]: it can never decide: deny[0]`}},
		{"allow: [{cidr: 10.0.0.0/8}]\ndeny: [{cidr: 10.1.0.0/16}]\n", nil},
		{"deny: [a.lab]\n", []string{`line 1: warning: deny[0]: it can never decide`}},
		{"deny: ['*.lab']\nallow: [a.b.lab]\n", []string{`line 2: error: allow[0]`}},
		{"deny: ['*.b.lab']\nallow: [b.lab, '*.c.lab']\n", []string{}},
		{"allow: [a.lab, a.lab]\n", []string{`line 1: warning: allow[1]: it can never decide: allow[0] (line 1) allows all of it already`}},
		{"allow:\n  - a.lab\n  - a.lab\n", []string{`line 3: warning: allow[1]: it can never decide: allow[0] (line 2)`}},
		{"allow:\n  - x.a.lab\n  - '*.a.lab'\n", []string{`line 2: warning: allow[0]: it can never decide: allow[1] (line 3)`}},
		{"allow:\n  - x.a.lab\n  - {host: '*.a.lab', protocol: http}\n", nil},
		{"allow:\n  - {host: a.lab, ports: [443]}\n  - {host: a.lab, ports: [400-500]}\n", []string{`line 2: warning: allow[0]: it can never decide: allow[1]`}},
		{"allow:\n  - 10.1.2.3\n  - {cidr: 10.0.0.0/8}\n", []string{`line 2: warning: allow[0]: it can never decide: allow[1]`}},
		{"extends: open\nallow: [a.lab]\n", []string{`it can never decide: preset open: allow[0] "https" allows all of it already`}},
		{"extends: registries\nallow: [nodejs.org]\n", []string{`it can never decide: preset registries: allow[1] "node"`}},
		{"extends: open\nallow: [{host: a.lab, inspect: true}]\n", nil},
		{"extends: registries\nallow: [{host: github.com, paths: [/our/**]}]\n", []string{`it narrows nothing: preset registries: allow[22] "github" allows all that it names`}},
		{"allow:\n  - {host: a.lab, paths: [/x]}\n  - {host: a.lab, paths: [/y]}\n", nil},
		// Conditions.
		{"allow: [{host: a.lab, when: '1 == 1'}]\n", []string{`when is always true`}},
		{"allow: [{host: a.lab, when: '[1].all(x, x == 2)'}]\n", []string{`error: allow[0]: it can never decide: when is always false`}},
		{"allow: [{host: a.lab, when: '1 / 0 == 1'}]\n", []string{`error: allow[0]: when always fails`}},
		{"allow:\n  - host: a.lab\n    when: request.headers[\"X-Team\"] == \"a\"\n", []string{`error: allow[0]: when asks for the header "X-Team", and headers have lower-case names there; write "x-team"`}},
		{"allow:\n  - host: a.lab\n    when: '\"X-Team\" in request.headers'\n", []string{`when asks for the header "X-Team"`}},
		{"allow:\n  - host: a.lab\n    when: request.query[\"X\"] == [\"A\"]\n", nil},
		// Inspection.
		{"allow: [{host: a.lab, paths: [/**]}]\n", []string{`connections are inspected without need`}},
		{"allow: [{host: a.lab, paths: [/**, /v1]}]\n", []string{`connections are inspected without need`}},
		{"allow: [{host: a.lab, methods: [GET], paths: [/**, /v1]}]\n", []string{`paths has /** beside others`}},
		{"allow: [{host: a.lab, methods: [GET], inspect: true}]\n", []string{`inspect: true says nothing more`}},
		{"allow: [{host: a.lab}, {host: a.lab, protocol: tcp, ports: [443]}]\ndeny: [{host: a.lab, methods: [PUT]}]\n", []string{`over tcp no request can be told from another, so deny[0] (line 2) is passed by`}},
		{"allow:\n  - {host: a.lab, methods: [GET]}\n  - {host: a.lab, protocol: tcp, ports: [443]}\n", []string{`line 3: warning: allow[1]: over tcp no request can be told from another, so allow[0] (line 2) is passed by`}},
		{"allow:\n  - {host: a.lab, methods: [GET]}\n  - {host: a.lab, protocol: tcp, ports: [22]}\n", nil},
		{"extends: open\ndeny: [{host: a.lab, methods: [PUT]}]\n", []string{`line 2: warning: deny[0]: preset open: allow[2] "tcp" allows tcp and udp there as well, over which no request can be told from another, so it is passed by`}},
		{"extends: open\ndeny:\n  - {host: a.lab, paths: [/x]}\n  - {host: a.lab, protocol: udp}\n", []string{`line 3: warning: deny[0]: preset open: allow[2] "tcp" allows tcp there`}},
		{"extends: open\ndeny:\n  - {host: a.lab, paths: [/x], ports: [443]}\n  - {host: '*.lab', protocol: udp}\n  - {host: a.lab, protocol: tcp, ports: [400-442]}\n  - {host: a.lab, protocol: tcp, ports: [443-500]}\n", nil},
		{"extends: open\ndeny:\n  - {host: [a.lab, b.lab], paths: [/x], ports: [443]}\n  - {host: a.lab, protocol: udp}\n  - {host: a.lab, protocol: tcp}\n", []string{`deny[0]: preset open: allow[2] "tcp" allows tcp and udp there`}},
		{"extends: open\nplatform_credentials_only: true\n", []string{`line 2: warning: preset open: allow[2] "tcp": over tcp and udp nothing is taken out of what is sent, so platform_credentials_only is passed by`}},
		{"allow: [a.lab, {host: a.lab, protocol: tcp, ports: [22]}]\nplatform_credentials_only: true\n", nil},
		{"allow: [a.lab, {host: a.lab, protocol: tcp, ports: [443]}]\nplatform_credentials_only: true\n", []string{`line 1: warning: allow[1]: over tcp nothing is taken out of what is sent, so platform_credentials_only is passed by`}},
		{"extends: registries\nplatform_credentials_only: true\n", nil},
		// Names.
		{"allow: [{name: x, host: a.lab}, {name: x, host: b.lab}]\n", []string{`allow[1] "x": its name is that of allow[0] "x" on line 1 too`}},
		// Secrets.
		{"secrets: [{secret: k, hosts: [a.lab], place: {query: key}}]\n", []string{`line 1: error: secrets[0] "k": it is for "a.lab", which no rule allows over https`}},
		{"allow: [a.lab]\nsecrets: [{secret: k, hosts: [a.lab], place: {query: key}}]\n", nil},
		{"allow: ['*.b.example.com']\nsecrets: [{secret: k, hosts: [a.b.example.com], place: {query: key}}]\n", nil},
		{"allow: [a.b.example.com]\nsecrets: [{secret: k, hosts: ['*.b.example.com'], place: {query: key}}]\n", nil},
		{"allow: [{host: a.lab, protocol: http, ports: [443]}]\nsecrets: [{secret: k, hosts: [a.lab], place: {query: key}}]\n", []string{`which no rule allows over https`}},
		{"allow: [{host: a.lab, ports: [8443]}]\nsecrets: [{secret: k, hosts: [a.lab], place: {query: key}}]\n", []string{`which no rule allows over https`}},
		{"allow: [a.lab, b.lab]\ndeny: [{host: a.lab, protocol: https}]\nsecrets: [{secret: k, hosts: [a.lab], place: {query: key}}]\n", []string{`allow[0]: it can never decide`, `it is for "a.lab", which deny[0] denies`}},
		{"extends: open\nsecrets: [{secret: k, hosts: ['*.github.io'], place: {query: key}}]\n", []string{`error: secrets[0] "k": "*.github.io" is broad`}},
	} {
		var got []string
		for _, f := range parse(t, tt.src).Lint() {
			got = append(got, f.String())
			if f.Remedy == "" || f.What == "" || f.Line == 0 {
				t.Errorf("%q: %+v", tt.src, f)
			}
		}
		ok := len(got) == len(tt.want)
		for i := range min(len(got), len(tt.want)) {
			ok = ok && strings.Contains(got[i], tt.want[i])
		}
		if !ok {
			t.Errorf("%q:\n got %q\nwant %q", tt.src, got, tt.want)
		}
	}
}

// The presets are without findings but for what "open" is.
func TestPresets(t *testing.T) {
	if diff := cmp.Diff([]string{"locked", "registries", "open"}, policy.Presets()); diff != "" {
		t.Error(diff)
	}
	digests := map[string]bool{}
	for _, name := range policy.Presets() {
		p, err := policy.Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name() != name || len(p.Source()) == 0 || !strings.HasPrefix(p.Digest(), "sha256:") || p.Extends() != "" {
			t.Errorf("%s: name %q, digest %q", name, p.Name(), p.Digest())
		}
		digests[p.Digest()] = true
		for _, f := range p.Lint() {
			if name != "open" {
				t.Errorf("%s: %v", name, f)
			}
		}
		if q, err := policy.Parse("again", p.Source()); name != "open" && err != nil {
			t.Errorf("%s is no policy by itself: %v", name, err)
		} else if name == "open" && err == nil {
			t.Errorf("anybody can write open by himself: %v", q)
		}
	}
	if len(digests) != 3 {
		t.Errorf("digests %v", digests)
	}
	if _, err := policy.Preset("lockd"); err == nil || !strings.Contains(err.Error(), "want one of locked, registries, open") {
		t.Errorf("%v", err)
	}
	if p, err := policy.Preset(policy.DefaultPreset); err != nil || p.Name() != "registries" {
		t.Errorf("%v", err)
	}
}

func TestRegistries(t *testing.T) {
	p := parse(t, "extends: registries")
	for s, want := range map[string]bool{
		"https://registry.npmjs.org": true, "https://pypi.org": true, "https://files.pythonhosted.org": true, "https://proxy.golang.org": true, "https://sum.golang.org": true,
		"https://index.crates.io": true, "https://static.crates.io": true, "https://rubygems.org": true, "https://repo.maven.apache.org": true, "https://repo1.maven.org": true,
		"https://repo.packagist.org": true, "http://deb.debian.org": true, "https://deb.debian.org": true, "http://security.ubuntu.com": true, "http://de.archive.ubuntu.com": true,
		"https://dl-cdn.alpinelinux.org": true, "https://registry-1.docker.io": true, "https://auth.docker.io": true, "https://ghcr.io": true, "https://quay.io": true,
		"https://github.com": true, "https://codeload.github.com": true, "https://objects.githubusercontent.com": true, "https://raw.githubusercontent.com": true,
		"https://release-assets.githubusercontent.com": true, "https://gitlab.com": true, "https://bitbucket.org": true, "https://codeberg.org": true, "https://nodejs.org": true,
		"https://jsr.io": true, "https://deno.land": true,
		"http://registry.npmjs.org": false, "http://github.com": false, "tcp://github.com:22": false, "https://github.com:8443": false, "https://gist.github.com": false,
		"https://github.com.evil.lab": false, "https://api.github.com": false, "https://example.com": false, "https://1.1.1.1": false, "udp://github.com:443": false,
		"https://github.io": false, "https://storage.googleapis.com": false,
	} {
		r := target(t, s)
		v, inspect := p.Connect(r.Flow)
		if v.Allow != want || inspect {
			t.Errorf("%s: %+v, %v", s, v, inspect)
		}
		if want && (!strings.HasPrefix(v.Rule, "preset registries: allow[") || !p.Lookup(r.Host).Allow) {
			t.Errorf("%s: %+v, %+v", s, v, p.Lookup(r.Host))
		}
	}
}

func TestExplain(t *testing.T) {
	p := parse(t, `
allow:
  - {name: sub, host: "*.wild.lab"}
  - {name: models, host: a.wild.lab, methods: [GET], paths: [/v1/**]}
  - {name: ssh, host: a.wild.lab, protocol: tcp, ports: [22]}
  - {name: alt, host: a.wild.lab, ports: [8443]}
  - {name: when, host: a.wild.lab, when: 'request.headers["x"] == "y"'}
  - wild.example.com
deny:
  - {name: admin, host: a.wild.lab, paths: [/admin]}
  - unrelated.lab
secrets:
  - {secret: key, hosts: [a.wild.lab], methods: [GET], place: {header: authorization, format: "Bearer {}"}}
`)
	explain := func(s string) (lines []string) {
		for _, s := range p.Explain(target(t, s)) {
			mark := " "
			if s.Matched {
				mark = "+"
			}
			if s.Decided {
				mark += "!"
			}
			lines = append(lines, fmt.Sprintf("%s %s(%d) %s", mark, s.Rule, s.Line, s.Detail))
		}
		return lines
	}
	for _, tt := range []struct {
		ask  string
		want []string
	}{
		{"PUT https://a.wild.lab/x", []string{
			`  deny[0] "admin"(10) the path "/x" is not among its paths`,
			`  (0) 1 other deny rules name other hosts`,
			`+! allow[0] "sub"(3) it names *.wild.lab; https; port 443`,
			`  allow[1] "models"(4) the method "PUT" is not among GET`,
			`  allow[2] "ssh"(5) it is for tcp and not for https`,
			`  allow[3] "alt"(6) it is for port 8443 and not for 443`,
			`  allow[4] "when"(7) when could not be evaluated: "no such key: x"`,
			`  (0) 1 other allow rules name other hosts`,
			`+ (0) the connection is inspected: each request is decided on by itself`,
			`  secrets[0] "key"(13) the secret key is not for this method or path`,
			`+! allow[0] "sub"(3) allowed: *.wild.lab; https; port 443`,
		}},
		{"GET https://a.wild.lab/x/%2e%2e/admin", []string{
			`+! deny[0] "admin"(10) it names a.wild.lab; http and https; any port; /admin`,
			`  (0) 1 other deny rules name other hosts`,
			`+ allow[0] "sub"(3) it names *.wild.lab; https; port 443`,
			`  allow[1] "models"(4) the path "/admin" is not among its paths`,
			`  allow[2] "ssh"(5) it is for tcp and not for https`,
			`  allow[3] "alt"(6) it is for port 8443 and not for 443`,
			`  allow[4] "when"(7) when could not be evaluated: "no such key: x"`,
			`  (0) 1 other allow rules name other hosts`,
			`+ (0) the connection is inspected: each request is decided on by itself`,
			`+ secrets[0] "key"(13) the secret key is put into the request`,
			` ! deny[0] "admin"(10) denied: a.wild.lab; http and https; any port; /admin`,
		}},
		{"wild.lab", []string{
			`  deny[0] "admin"(10) "a.wild.lab" names another host of wild.lab`,
			`  (0) 1 other deny rules name other hosts`,
			`  allow[0] "sub"(3) "*.wild.lab" names subdomains and not wild.lab itself`,
			`  allow[1] "models"(4) "a.wild.lab" names another host of wild.lab`,
			`  allow[2] "ssh"(5) "a.wild.lab" names another host of wild.lab`,
			`  allow[3] "alt"(6) "a.wild.lab" names another host of wild.lab`,
			`  allow[4] "when"(7) "a.wild.lab" names another host of wild.lab`,
			`  (0) 1 other allow rules name other hosts`,
			` ! default(0) denied: no rule allows "wild.lab"`,
		}},
	} {
		if diff := cmp.Diff(tt.want, explain(tt.ask)); diff != "" {
			t.Errorf("%s: %s", tt.ask, diff)
		}
	}
	// The last step is what the gateway would say.
	for _, s := range []string{"https://x.wild.lab", "tcp://a.wild.lab:22", "https://127.0.0.1", "https://169.254.169.254", "GET https://a.wild.lab/v1/x"} {
		r := target(t, s)
		steps := p.Explain(r)
		last := steps[len(steps)-1]
		v, _ := p.Connect(r.Flow)
		if last.Matched != v.Allow || last.Rule != v.Rule || !last.Decided {
			t.Errorf("%s: %+v, %+v", s, last, v)
		}
	}
	steps := p.ExplainFlow(policy.Flow{Host: "a\n.wild.lab", Port: 443, Protocol: policy.HTTPS})
	if len(steps) != 1 || steps[0].Matched || strings.Contains(steps[0].Detail, "\n") {
		t.Errorf("%+v", steps)
	}
}

// Linting many rules for one host, the worst case, ends.
func TestLintLarge(t *testing.T) {
	var b strings.Builder
	b.WriteString("allow:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - {host: a.lab, ports: [%d]}\n  - {host: h%d.lab}\n", i+1, i)
	}
	p := parse(t, b.String())
	start := time.Now()
	if f := p.Lint(); len(f) > 0 {
		t.Errorf("%v", f[0])
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("it took %v", d)
	}
}
