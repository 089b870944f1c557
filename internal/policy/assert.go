package policy

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// assertion is an item of `tests`.
type assertion struct {
	line  int
	text  string
	allow bool
	req   Request
	// err is why no gateway would decide on it at all.
	err error
}

// Failure is a test of a policy that did not turn out as it says.
type Failure struct {
	// Line is that of the test, and Test what stands there: "deny: GET https://example.com/".
	Line int
	Test string
	// Verdict is what the policy says instead.
	Verdict Verdict
}

// String writes the failure on one line.
func (f Failure) String() string {
	got := "denied"
	if f.Verdict.Allow {
		got = "allowed"
	}
	at := f.Verdict.Rule
	if f.Verdict.Line > 0 {
		at = fmt.Sprintf("%s (line %d)", at, f.Verdict.Line)
	}
	return fmt.Sprintf("line %d: %s: it is %s by %s: %s", f.Line, f.Test, got, at, f.Verdict.Reason)
}

// Test runs the tests that the policy's file has and returns those that fail. A name is taken to resolve to a public address.
func (p *Policy) Test() []Failure {
	var list []Failure
	for _, a := range p.tests {
		v := Verdict{Rule: ruleRequest}
		if a.err != nil {
			v.Reason = a.err.Error()
		} else {
			v = p.Decide(a.req)
		}
		if v.Allow != a.allow {
			list = append(list, Failure{Line: a.line, Test: a.text, Verdict: v})
		}
	}
	return list
}

// Tests returns how many tests the policy's file has.
func (p *Policy) Tests() int { return len(p.tests) }

// Decide says whether all of a request is allowed: it asks all questions about it, in the gateway's order, and returns the answer that settles it.
// Without a method it stops at the connection. A name is taken to resolve to a public address.
func (p *Policy) Decide(r Request) Verdict {
	if _, literal := r.Host.Addr(); !literal {
		if v := p.Lookup(r.Host); !v.Allow {
			return v
		}
	}
	v, inspect := p.Connect(r.Flow)
	if !v.Allow {
		return v
	}
	if r.Method != "" && inspect {
		return p.Request(r)
	}
	return v
}

// assertion reads one item of tests.
func (p *parser) assertion(n *yaml.Node, i int) {
	label := fmt.Sprintf("tests[%d]", i)
	keys, ok := p.mapping(n, label, "a test", "allow", "deny", "headers")
	if !ok {
		return
	}
	key, other := "allow", "deny"
	if keys[key] == nil {
		key, other = other, key
	}
	if keys[key] == nil || keys[other] != nil {
		p.bad(n, label, "it has to say either allow or deny", `write one such as "deny: GET https://example.com/"`)
		return
	}
	text := p.text(keys[key], label, key)
	a := assertion{line: n.Line, text: key + ": " + text, allow: key == "allow"}
	var what string
	if a.req, what, a.err = parseTarget(text); what != "" {
		p.bad(keys[key], label, fmt.Sprintf("%.200q %s", text, what), `want "METHOD https://HOST/PATH", "tcp://HOST:PORT" or "udp://HOST:PORT"`)
		return
	}
	if h := keys["headers"]; h != nil {
		if a.req.Method == "" {
			p.bad(h, label, fmt.Sprintf("%s has no headers", a.req.Protocol), "leave them out")
		}
		a.req.Header = p.headers(h, label)
	}
	p.tests = append(p.tests, a)
}

func (p *parser) headers(n *yaml.Node, label string) http.Header {
	if !p.plain(n, label, "headers") {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		p.bad(n, label, "headers is a mapping, not "+kind(n), "write {x-team: a}")
		return nil
	}
	h := http.Header{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := p.text(n.Content[i], label, "a header")
		if !token(name) {
			p.bad(n.Content[i], label, fmt.Sprintf("%.60q is no name of a header", name), "write it as in a request, such as X-Team")
			continue
		}
		for _, v := range p.several(n.Content[i+1], label, "headers."+name) {
			h.Add(name, v.Value)
		}
	}
	return h
}

// ParseTarget reads what a person asks about: "GET https://example.com/v1", "https://example.com", "tcp://10.0.0.1:22",
// or a bare host, which means https on 443. A request without a method that names no path is a connection only.
func ParseTarget(s string) (Request, error) {
	if !strings.Contains(s, "://") && !strings.ContainsAny(s, " /") {
		h, err := ParseHost(s)
		if err != nil {
			return Request{}, err
		}
		return Request{Flow: Flow{Host: h, Port: 443, Protocol: HTTPS}}, nil
	}
	r, what, err := parseTarget(s)
	if what != "" {
		return Request{}, fmt.Errorf("%.200q %s; want [METHOD] https://HOST/PATH, tcp://HOST:PORT, udp://HOST:PORT or HOST", s, what)
	}
	if err == nil && !strings.Contains(s, " ") && strings.Count(s, "/") == 2 {
		r.Method = ""
	}
	return r, err
}

// parseTarget returns in err why a gateway refuses the target before any rule, and in what why it cannot be read.
func parseTarget(s string) (r Request, what string, err error) {
	method, url, ok := strings.Cut(s, " ")
	if !ok {
		method, url = "GET", s
	}
	scheme, rest, ok := strings.Cut(url, "://")
	if !ok {
		return r, "is no URL", nil
	}
	if r.Protocol = Protocol(scheme); !slices.Contains(protocols, r.Protocol) {
		return r, fmt.Sprintf("has the protocol %.40q", scheme), nil
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	host, path := rest[:end], rest[end:]
	if r.Protocol.inspectable() {
		if !token(method) {
			return r, "has no method in front of the URL", nil
		}
		r.Method = method
	} else if path != "" || strings.Contains(s, " ") {
		return r, fmt.Sprintf("has more than a host and a port, and %s has no requests", r.Protocol), nil
	}
	number := map[Protocol]string{HTTPS: "443", HTTP: "80"}[r.Protocol]
	if v6, after, ok := strings.Cut(strings.TrimPrefix(host, "["), "]"); ok && host[0] == '[' {
		if host = v6; after != "" {
			if after[0] != ':' {
				return r, "has something behind its address", nil
			}
			number = after[1:]
		}
		if !strings.Contains(host, ":") {
			return r, "has brackets around what is no IPv6 address", nil
		}
	} else if strings.Count(host, ":") == 1 {
		host, number, _ = strings.Cut(host, ":")
	}
	if r.Port, ok = port(number); !ok {
		if number == "" {
			return r, "names no port", nil
		}
		return r, fmt.Sprintf("has the port %.20q", number), nil
	}
	if strings.Contains(path, "#") {
		return r, "has a fragment, which is never sent", nil
	}
	if r.Host, err = ParseHost(host); err != nil {
		return r, "", err
	}
	path, r.Query, _ = strings.Cut(path, "?")
	r.Path, err = CanonicalPath(path)
	return r, "", err
}
