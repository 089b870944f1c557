package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/net/publicsuffix"
)

// rule reads one item of allow or deny.
func (p *parser) rule(n *yaml.Node, i int, deny bool) *rule {
	p.rules++
	key := "allow"
	if deny {
		key = "deny"
	}
	r := &rule{label: fmt.Sprintf("%s[%d]", key, i), line: n.Line, deny: deny}
	if p.preset {
		r.label = "preset " + p.name + ": " + r.label
	}
	defer func() { r.reason = r.describe() }()
	if n.Kind == yaml.ScalarNode && !null(n) && p.plain(n, r.label, "a rule") {
		p.host(r, n)
		if !deny {
			r.protocol, r.ports = HTTPS, ports{{443, 443}}
		}
		return r
	}
	keys, ok := p.mapping(n, r.label, "a rule", "name", "host", "hosts", "cidr", "cidrs", "port", "ports", "protocol", "methods", "paths", "when", "inspect")
	if !ok {
		return r
	}
	if name := p.label(keys["name"], r.label); name != "" {
		r.label += ` "` + name + `"`
	}
	for _, pair := range [][2]string{{"host", "hosts"}, {"cidr", "cidrs"}, {"port", "ports"}} {
		if keys[pair[0]] != nil && keys[pair[1]] != nil {
			p.bad(keys[pair[1]], r.label, fmt.Sprintf("it has both %s and %s", pair[0], pair[1]), "write all of them under "+pair[1])
		}
	}
	either := func(a, b string) *yaml.Node {
		if keys[a] != nil {
			return keys[a]
		}
		return keys[b]
	}
	for _, h := range p.several(either("host", "hosts"), r.label, "host") {
		p.host(r, h)
	}
	literals := len(r.prefixes)
	cidrs := either("cidr", "cidrs")
	for _, c := range p.several(cidrs, r.label, "cidr") {
		p.cidr(r, c)
	}
	p.protocol(r, keys["protocol"])
	for _, q := range p.several(either("port", "ports"), r.label, "ports") {
		p.ports(&r.ports, q, r.label)
	}
	r.ports = merge(r.ports)
	r.methods = p.methods(keys["methods"], r.label)
	r.paths, _ = p.paths(keys["paths"], r.label)
	p.when(r, keys["when"])
	if keys["inspect"] != nil {
		r.inspect = p.boolean(keys["inspect"], r.label, "inspect")
	}
	p.consistent(r, keys, n, cidrs, literals)
	return r
}

// consistent checks what the keys of a rule say together.
func (p *parser) consistent(r *rule, keys map[string]*yaml.Node, n, cidrs *yaml.Node, literals int) {
	named := keys["host"] != nil || keys["hosts"] != nil
	if !named && cidrs == nil {
		p.bad(n, r.label, "it names no host", `write host: or hosts:, or cidr: for addresses`)
	}
	switch {
	case !named || cidrs == nil && (literals == 0 || len(r.hosts) == 0):
	case r.deny && cidrs != nil:
		p.bad(cidrs, r.label, "it denies hosts and a cidr at once", "write two rules; each denies what it names")
	case literals > 0:
		p.bad(n, r.label, "it names hosts by name and by address at once", "write two rules, because a name with an address means that it may resolve to that address")
	}
	if r.deny && r.conditional() && (len(r.prefixes) > 0) {
		p.bad(n, r.label, "a deny rule with addresses has methods, paths or when", "deny the addresses altogether, or name the hosts")
	}
	if !r.deny {
		if r.protocol == "" {
			r.protocol = HTTPS
		}
		if len(r.ports) == 0 && keys["ports"] == nil && keys["port"] == nil {
			switch r.protocol {
			case HTTPS:
				r.ports = ports{{443, 443}}
			case HTTP:
				r.ports = ports{{80, 80}}
			default:
				p.bad(n, r.label, fmt.Sprintf("protocol %s has no port", r.protocol), "write ports:, such as ports: [5432]")
			}
		}
	} else if keys["inspect"] != nil {
		p.bad(keys["inspect"], r.label, "a deny rule is not inspected by itself", "leave inspect out; methods, paths and when inspect what they need")
	}
	if r.protocol != "" && !r.protocol.inspectable() {
		for _, key := range []string{"methods", "paths", "when", "inspect"} {
			if keys[key] != nil {
				p.bad(keys[key], r.label, fmt.Sprintf("%s cannot be decided on over %s, which has no requests", key, r.protocol), "leave it out, or use protocol: https or http")
			}
		}
	}
}

// host reads one host of a rule: a pattern, or an address.
func (p *parser) host(r *rule, n *yaml.Node) {
	if p.preset && n.Value == "*" {
		r.any = true
		return
	}
	pattern, ok := p.pattern(n, r.label, r.deny)
	if !ok {
		return
	}
	if a, ok := pattern.host.Addr(); ok {
		r.prefixes = append(r.prefixes, netip.PrefixFrom(a, a.BitLen()))
		return
	}
	if !slices.Contains(r.hosts, pattern) {
		r.hosts = append(r.hosts, pattern)
	}
}

// pattern reads a host or "*." and a host.
func (p *parser) pattern(n *yaml.Node, label string, deny bool) (Pattern, bool) {
	s := n.Value
	bad := func(what, remedy string) (Pattern, bool) {
		p.bad(n, label, fmt.Sprintf("host %.100q %s", s, what), remedy)
		return Pattern{}, false
	}
	rest, wild := strings.CutPrefix(s, "*.")
	switch {
	case s == "":
		return bad("is empty", "name one, such as example.com or \"*.example.com\"")
	case s == "*" || s == "**" || s == "*.*":
		if deny {
			return bad("names everything", "use `extends: locked`, which allows nothing that the file does not")
		}
		return bad("names everything", "use `extends: open` to allow the whole internet, or name the hosts")
	case rest == "":
		return bad("names everything", "name the domain behind the star, such as \"*.example.com\"")
	case strings.Contains(s, "://"):
		return bad("is a URL", "write the host only; the protocol goes to protocol:, the port to ports: and the path to paths:")
	case strings.Contains(s, "/"):
		if _, err := netip.ParsePrefix(s); err == nil {
			return bad("is a block of addresses", fmt.Sprintf("write cidr: %s", s))
		}
		return bad("has a path", "write the host only, and the path to paths:")
	case strings.HasPrefix(s, "."):
		return bad("begins with a dot", fmt.Sprintf("write \"*%s\" for its subdomains", s))
	case strings.Contains(rest, "*"):
		return bad("has a star that does not stand for whole subdomains", "a star is only the first label, such as \"*.example.com\"")
	}
	h, err := ParseHost(rest)
	if err != nil {
		if host, port, ok := strings.Cut(rest, ":"); ok && !strings.Contains(port, ":") {
			if _, perr := ParseHost(host); perr == nil {
				return bad("has a port", fmt.Sprintf("write host: %s and ports: [%s]", host, port))
			}
		}
		what := strings.TrimPrefix(err.Error(), fmt.Sprintf("host %.100q: ", rest))
		return bad("cannot be reached by any request: "+what, "write the name as it stands in a URL")
	}
	if _, ok := h.Addr(); ok && wild {
		return bad("has a star before an address", "write cidr: with a block of addresses")
	}
	// Only the registry's own part of the list: below the other, private part live services that Lint warns of.
	if suffix, icann := publicsuffix.PublicSuffix(string(h)); wild && !deny && icann && suffix == string(h) {
		return bad("names every domain below a public suffix", "name the domains, such as \"*.example."+string(h)+"\", or use `extends: open`")
	}
	return Pattern{h, wild}, true
}

func (p *parser) cidr(r *rule, n *yaml.Node) {
	bad := func(what, remedy string) { p.bad(n, r.label, fmt.Sprintf("cidr %.60q %s", n.Value, what), remedy) }
	prefix, err := netip.ParsePrefix(n.Value)
	if err != nil {
		if a, err := netip.ParseAddr(n.Value); err == nil && a.Zone() == "" {
			bad("has no length", fmt.Sprintf("write %s/%d for this one address", a, a.BitLen()))
			return
		}
		bad("is no block of addresses", "write one such as 10.1.2.0/24 or fd00:1::/64")
		return
	}
	switch {
	case prefix.Addr().Is4In6():
		bad("is a block of IPv4 in IPv6", "write it as IPv4")
	case prefix.Masked() != prefix:
		bad("has bits set behind its length", fmt.Sprintf("write %s, or %s/%d for the one address", prefix.Masked(), prefix.Addr(), prefix.Addr().BitLen()))
	case prefix.Bits() == 0 && !r.deny:
		bad("names every address", "use `extends: open` for the public ones, and name the blocks that are yours")
	default:
		if !slices.Contains(r.prefixes, prefix) {
			r.prefixes = append(r.prefixes, prefix)
		}
	}
}

func (p *parser) protocol(r *rule, n *yaml.Node) {
	if n == nil {
		return
	}
	s := p.text(n, r.label, "protocol")
	if r.protocol = Protocol(s); s != "" && !slices.Contains(protocols, r.protocol) {
		remedy := "want https, http, tcp or udp"
		if s == "ssh" || s == "postgres" || s == "git" {
			remedy += "; what is neither HTTP nor HTTPS is tcp, with its port under ports:"
		}
		p.bad(n, r.label, fmt.Sprintf("protocol %.60q is not known", s), remedy)
		r.protocol = ""
	}
}

func (p *parser) ports(to *ports, n *yaml.Node, label string) {
	first, last, isRange := strings.Cut(n.Value, "-")
	if !isRange {
		last = first
	}
	a, aok := port(first)
	b, bok := port(last)
	if !aok || !bok || a > b {
		p.bad(n, label, fmt.Sprintf("%.60q is no port", n.Value), "want a number from 1 to 65535, or a range such as 8000-8010")
		return
	}
	*to = append(*to, PortRange{a, b})
}

func port(s string) (uint16, bool) {
	// No signs, no zeros in front: one way to write a port.
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0 && strconv.FormatUint(n, 10) == s
}

func (p *parser) methods(n *yaml.Node, label string) (list []string) {
	for _, m := range p.several(n, label, "methods") {
		switch s := m.Value; {
		case s == "*":
			p.bad(m, label, `method "*" is all methods`, "leave methods out")
		case s != strings.ToUpper(s) && token(s):
			p.bad(m, label, fmt.Sprintf("method %.40q is not in capitals, which methods are", s), "write "+strings.ToUpper(s))
		case !token(s) || len(s) > 40:
			p.bad(m, label, fmt.Sprintf("%.60q is no method", s), "want methods such as GET or POST")
		default:
			list = append(list, s)
		}
	}
	return list
}

func (p *parser) paths(n *yaml.Node, label string) (list []pathPattern, texts []string) {
	for _, m := range p.several(n, label, "paths") {
		pattern, err := parsePath(m.Value)
		if err != nil {
			p.bad(m, label, err.Error(), "a pattern is a path such as /health, /v1/* or /v1/**")
			continue
		}
		list, texts = append(list, pattern), append(texts, pattern.text)
	}
	return list, texts
}

func (p *parser) when(r *rule, n *yaml.Node) {
	if n == nil {
		return
	}
	s := strings.TrimSpace(p.text(n, r.label, "when"))
	if s == "" {
		p.bad(n, r.label, "when is empty", "write a condition, or leave it out")
		return
	}
	if r.when = p.conditions[s]; r.when != nil {
		return
	}
	c, err := compile(s)
	if err != nil {
		p.bad(n, r.label, fmt.Sprintf("when cannot be compiled: %v", err), "there are request.method, path, query, headers, host and port; see docs/POLICY.md")
		return
	}
	p.conditions[s], r.when = c, c
}
