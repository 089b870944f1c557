package policy

import (
	"net/http"
	"slices"
	"strings"
)

// Place says where in a request a secret is put. One of Header, Basic and Query is set.
type Place struct {
	// Header is the name of a header, in canonical form, whose value becomes Format with the secret in place of "{}".
	Header, Format string
	// Basic is the user name of basic authentication, of which the secret is the password.
	Basic string
	// Query is the name of a parameter of the query.
	Query string
}

// Grant lets requests of a sandbox use a secret that the sandbox never has.
type Grant struct {
	// Name is what evidence calls the grant: that of the file, else the secret's.
	Name string
	// Secret names the sealed value; Env is the variable of the sandbox that holds its placeholder, or empty.
	Secret, Env string
	// Hosts and Ports are where it may be sent, over https only.
	Hosts []Pattern
	Ports []PortRange
	// Methods and Paths are what it may be sent with; none means all.
	Methods, Paths []string
	Place          Place

	line     int
	label    string
	patterns []pathPattern
}

// Grants returns the grants. No two of them apply to one request.
func (p *Policy) Grants() []Grant { return slices.Clone(p.grants) }

// Grant returns the grant that applies to a request; see [Grant.Match].
func (p *Policy) Grant(r Request) (Grant, bool) {
	for i := range p.grants {
		if p.grants[i].Match(r) {
			return p.grants[i], true
		}
	}
	return Grant{}, false
}

// Covers reports whether requests over a flow may be given the secret, so that it has to be inspected.
func (g *Grant) Covers(f Flow) bool {
	return f.Protocol == HTTPS && ports(g.Ports).has(f.Port) && g.Names(f.Host)
}

// Names reports whether the secret may be sent to a host at all. What has been sent there can come back over any protocol and port of it.
func (g *Grant) Names(h Host) bool {
	return slices.ContainsFunc(g.Hosts, func(p Pattern) bool { return p.Match(h) })
}

// Match reports whether a request is given the secret, in all that it can mean; see [Policy.Request], which is to be
// asked first.
func (g *Grant) Match(r Request) bool {
	if !g.Covers(r.Flow) || !r.Host.canonical() {
		return false
	}
	if c, err := CanonicalPath(r.Path); err != nil || c != r.Path {
		return false
	}
	rule := rule{methods: g.Methods, paths: g.patterns}
	ok, _ := rule.asks(&question{Request: &r})
	return ok
}

// overlap reports whether one request could be given both secrets.
func (g *Grant) overlap(h *Grant) bool {
	some := func(n, m int, f func(i, j int) bool) bool {
		for i := range n {
			for j := range m {
				if f(i, j) {
					return true
				}
			}
		}
		return false
	}
	return some(len(g.Hosts), len(h.Hosts), func(i, j int) bool { return g.Hosts[i].overlap(h.Hosts[j]) }) &&
		ports(g.Ports).overlap(h.Ports) &&
		(len(g.Methods) == 0 || len(h.Methods) == 0 || some(len(g.Methods), len(h.Methods), func(i, j int) bool { return g.Methods[i] == h.Methods[j] })) &&
		(len(g.patterns) == 0 || len(h.patterns) == 0 || some(len(g.patterns), len(h.patterns), func(i, j int) bool { return g.patterns[i].overlap(&h.patterns[j]) }))
}

// notForSecrets are headers that say how a message is carried or to whom: the gateway's to write.
var notForSecrets = []string{
	"Host", "Connection", "Content-Length", "Content-Encoding", "Content-Type", "Transfer-Encoding", "Te", "Trailer", "Upgrade", "Keep-Alive", "Expect",
	"Proxy-Authorization", "Proxy-Connection", "Range", "Accept-Encoding",
}

// checkHeader returns the canonical name of a header that a secret may be put into.
func checkHeader(name string) (string, bool) {
	c := http.CanonicalHeaderKey(name)
	return c, token(name) && !slices.Contains(notForSecrets, c) && !strings.HasPrefix(c, "Sec-")
}
