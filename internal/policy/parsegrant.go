package policy

import (
	"fmt"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

var (
	secretName = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$`)
	envName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

// grant reads one item of secrets.
func (p *parser) grant(n *yaml.Node, i int) {
	g := Grant{label: fmt.Sprintf("secrets[%d]", i), line: n.Line}
	keys, ok := p.mapping(n, g.label, "a secret", "name", "secret", "env", "host", "hosts", "port", "ports", "methods", "paths", "place")
	if !ok {
		return
	}
	name := p.label(keys["name"], g.label)
	g.Secret = p.text(keys["secret"], g.label, "secret")
	switch {
	case keys["secret"] == nil:
		p.bad(n, g.label, "it names no secret", "write secret: and the name that the value was stored under")
	case !secretName.MatchString(g.Secret):
		p.bad(keys["secret"], g.label, fmt.Sprintf("secret %.60q is no name of a secret", g.Secret), "names have 1 to 64 lower-case letters, digits, dots, hyphens and underscores; the value never stands in a policy")
	}
	if g.Name = name; name == "" {
		g.Name = g.Secret
	}
	g.label += fmt.Sprintf(" %.64q", g.Name)
	if keys["env"] != nil {
		if g.Env = p.text(keys["env"], g.label, "env"); !envName.MatchString(g.Env) {
			p.bad(keys["env"], g.label, fmt.Sprintf("env %.60q is no name of a variable", g.Env), "want one such as GITHUB_TOKEN")
		}
	}
	hosts, portsNode := keys["hosts"], keys["ports"]
	for _, pair := range [][2]string{{"host", "hosts"}, {"port", "ports"}} {
		if keys[pair[0]] != nil && keys[pair[1]] != nil {
			p.bad(keys[pair[1]], g.label, fmt.Sprintf("it has both %s and %s", pair[0], pair[1]), "write all of them under "+pair[1])
		}
	}
	if hosts == nil {
		hosts = keys["host"]
	}
	if portsNode == nil {
		portsNode = keys["port"]
	}
	if hosts == nil {
		p.bad(n, g.label, "it names no host", "write hosts: and where the secret may be sent")
	}
	for _, h := range p.several(hosts, g.label, "hosts") {
		if pattern, ok := p.pattern(h, g.label, false); ok {
			g.Hosts = append(g.Hosts, pattern)
		}
	}
	var list ports
	for _, q := range p.several(portsNode, g.label, "ports") {
		p.ports(&list, q, g.label)
	}
	if g.Ports = merge(list); portsNode == nil {
		g.Ports = []PortRange{{443, 443}}
	}
	g.Methods = p.methods(keys["methods"], g.label)
	g.patterns, g.Paths = p.paths(keys["paths"], g.label)
	p.place(&g, keys["place"], n)
	p.grants = append(p.grants, g)
}

func (p *parser) place(g *Grant, n, at *yaml.Node) {
	const remedy = `want {header: Authorization, format: "Bearer {}"}, {basic: USER} or {query: NAME}`
	if n == nil {
		p.bad(at, g.label, "it has no place", remedy)
		return
	}
	keys, ok := p.mapping(n, g.label, "place", "header", "format", "basic", "query")
	if !ok {
		return
	}
	ways := 0
	for _, key := range []string{"header", "basic", "query"} {
		if keys[key] != nil {
			ways++
		}
	}
	if ways != 1 {
		p.bad(n, g.label, fmt.Sprintf("place names %d places", ways), remedy)
		return
	}
	control := func(r rune) bool { return r < ' ' || r > '~' }
	switch {
	case keys["header"] != nil:
		h := p.text(keys["header"], g.label, "header")
		c, ok := checkHeader(h)
		if !ok {
			p.bad(keys["header"], g.label, fmt.Sprintf("header %.60q cannot carry a secret", h), "want one that the service reads it from, such as Authorization or X-Api-Key")
		}
		g.Place.Header, g.Place.Format = c, "{}"
		if keys["format"] != nil {
			f := p.text(keys["format"], g.label, "format")
			if strings.Count(f, "{}") != 1 || len(f) > 256 || strings.ContainsFunc(f, control) {
				p.bad(keys["format"], g.label, fmt.Sprintf("format %.60q", f), `want printable ASCII with {} once, where the secret goes, such as "Bearer {}"`)
			}
			g.Place.Format = f
		}
		return
	case keys["basic"] != nil:
		u := p.text(keys["basic"], g.label, "basic")
		if g.Place.Basic = u; u == "" || len(u) > 256 || strings.ContainsFunc(u, control) || strings.Contains(u, ":") {
			p.bad(keys["basic"], g.label, fmt.Sprintf("basic %.60q is no user name", u), "want printable ASCII without a colon, such as x-access-token")
		}
	case keys["query"] != nil:
		q := p.text(keys["query"], g.label, "query")
		if g.Place.Query = q; q == "" || len(q) > 256 || strings.ContainsFunc(q, func(r rune) bool { return r > '~' || !unreserved(byte(r)) }) {
			p.bad(keys["query"], g.label, fmt.Sprintf("query %.60q is no name of a parameter", q), "want letters, digits, hyphens, dots and underscores, such as api_key")
		}
	}
	if keys["format"] != nil {
		p.bad(keys["format"], g.label, "format belongs to header", "leave it out")
	}
}

// ambiguous refuses grants of which one request or one variable could get two.
func (p *parser) ambiguous(n *yaml.Node) {
	const most = 500
	if len(p.grants) > most {
		p.bad(n, "", fmt.Sprintf("it grants %d secrets", len(p.grants)), fmt.Sprintf("at most %d can be told apart", most))
		return
	}
	for i := range p.grants {
		for j := range i {
			g, h := &p.grants[i], &p.grants[j]
			at := &yaml.Node{Line: g.line}
			if g.Env != "" && g.Env == h.Env && g.Secret != h.Secret {
				p.bad(at, g.label, fmt.Sprintf("env %s is that of %s too", g.Env, h.label), "give it another name")
			}
			if g.overlap(h) {
				p.bad(at, g.label, fmt.Sprintf("it is ambiguous: one request could be given this secret and that of %s (line %d)", h.label, h.line),
					"tell them apart by hosts, ports, methods or paths")
			}
		}
	}
}
