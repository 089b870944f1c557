package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"
)

// Severity is how bad a finding is.
type Severity string

// An error is a policy that does not do what it says; a warning is one that may do more or less than was meant.
const (
	SeverityError   Severity = "error"
	SeverityWarning Severity = "warning"
)

// Finding is something in a policy that parses and that its author should look at.
type Finding struct {
	Severity Severity
	// Line and Rule say where, as in a [Problem].
	Line int
	Rule string
	// What is odd, and what to do about it.
	What, Remedy string
}

// String writes the finding on one line.
func (f Finding) String() string {
	s := fmt.Sprintf("line %d: %s: ", f.Line, f.Severity)
	if f.Rule != "" {
		s += f.Rule + ": "
	}
	return s + f.What + "; " + f.Remedy
}

type linter struct {
	*Policy
	list []Finding
	// above holds every domain with an allowed pattern at or below it.
	above map[Host]bool
}

// Lint looks for patterns that are too broad, for rules that can never decide anything, for conditions that are always
// the same, for inspection that nothing needs and for secrets that are granted where nothing may be sent. Findings are
// in the order of the file.
func (p *Policy) Lint() []Finding {
	l := &linter{Policy: p, above: map[Host]bool{}}
	for _, r := range p.allow.rules {
		for _, h := range r.hosts {
			l.above[h.host] = true
			for i := range len(h.host) {
				if h.host[i] == '.' {
					l.above[h.host[i+1:]] = true
				}
			}
		}
	}
	names := map[string]*rule{}
	for n, r := range p.own() {
		l.broad(r)
		l.dead(r, n)
		l.conditions(r)
		l.inspection(r)
		l.passed(r)
		if _, name, ok := strings.Cut(r.label, " "); ok {
			if before := names[name]; before != nil {
				l.add(SeverityWarning, r, fmt.Sprintf("its name is that of %s on line %d too", before.label, before.line), "give it another, so that evidence tells them apart")
			}
			names[name] = r
		}
	}
	l.credentials()
	for i := range p.grants {
		l.grant(&p.grants[i])
	}
	slices.SortStableFunc(l.list, func(a, b Finding) int { return a.Line - b.Line })
	return l.list
}

// own returns the rules that the file itself has.
func (p *Policy) own() []*rule {
	return slices.Concat(p.allow.rules[:p.ownAllow], p.deny.rules[:p.ownDeny])
}

func (l *linter) add(s Severity, r *rule, what, remedy string) {
	l.list = append(l.list, Finding{s, r.line, r.label, what, remedy})
}

// broad warns of rules that name more than it seems.
func (l *linter) broad(r *rule) {
	if r.deny {
		return
	}
	for _, h := range r.hosts {
		if !h.wild {
			continue
		}
		suffix, icann := publicsuffix.PublicSuffix(string(h.host))
		switch {
		case suffix != string(h.host) || icann:
		case strings.Contains(suffix, "."):
			l.add(SeverityWarning, r, fmt.Sprintf("%q is broad: anybody can have a name below %s", h, h.host), "name the hosts that are meant")
		default:
			l.add(SeverityWarning, r, fmt.Sprintf("%q is broad: it names a whole top-level domain", h), "name the domains that are meant")
		}
	}
	for _, c := range r.prefixes {
		if what, ok := isMetadata(c.Addr()); ok && c.IsSingleIP() {
			l.add(SeverityError, r, fmt.Sprintf("%s is never reachable: %s", c.Addr(), what), "remove the rule")
			continue
		}
		if c.Addr().Is4() && c.Bits() < 8 || c.Addr().Is6() && c.Bits() < 16 {
			l.add(SeverityWarning, r, fmt.Sprintf("%s is broad", c), "name the blocks that are meant")
		}
		for _, local := range []netip.Prefix{loopback4, loopback6} {
			if c.Overlaps(local) {
				l.add(SeverityWarning, r, fmt.Sprintf("%s has addresses of the loopback: the services of the machine that runs the sandboxes, not those of the sandbox", c), "name an address of the service that others can reach")
			}
		}
	}
	if !r.protocol.inspectable() && r.ports.overlap(ports{{53, 53}, {853, 853}}) {
		l.add(SeverityWarning, r, "it reaches a name server directly, so that names are looked up that the policy does not allow", "leave ports 53 and 853 out; names are looked up by the gateway")
	}
}

var (
	loopback4 = netip.MustParsePrefix("127.0.0.0/8")
	loopback6 = netip.MustParsePrefix("::1/128")
)

// covers reports whether r names every flow that the part of s named by a host or prefix does.
func (r *rule) coversFlows(s *rule) bool {
	return (r.protocol == "" || r.protocol == s.protocol) && !r.conditional() && r.ports.covers(s.ports)
}

// parts calls f for each host pattern and each prefix of r, with the rules of the index that name all of it.
func (x *index) parts(r *rule, f func(rules []int32)) {
	for _, h := range r.hosts {
		var list []int32
		if h.wild {
			list = slices.Concat(x.every(h.host), x.below[h.host], x.host(h.host, nil))
			// Rules that name the apex name nothing below it.
			list = slices.DeleteFunc(list, func(i int32) bool {
				return !x.rules[i].any && !slices.ContainsFunc(x.rules[i].hosts, func(p Pattern) bool { return p.covers(h) })
			})
		} else {
			list = x.host(h.host, nil)
		}
		f(list)
	}
	for _, c := range r.prefixes {
		list := slices.DeleteFunc(x.addr(c.Addr(), nil), func(i int32) bool {
			return !slices.ContainsFunc(x.rules[i].prefixes, func(p netip.Prefix) bool { return p.Bits() <= c.Bits() && p.Contains(c.Addr()) })
		})
		f(list)
	}
}

// dead warns of a rule without which every verdict would be the same. n is its index if it is an allow rule.
func (l *linter) dead(r *rule, n int) {
	if r.deny {
		if !l.reaches(r) {
			l.add(SeverityWarning, r, "it can never decide: no rule allows what it denies", "remove it, or keep it for rules to come")
		}
		return
	}
	// A rule with hosts and addresses opens the addresses whatever else allows the hosts.
	both := len(r.hosts) > 0 && len(r.prefixes) > 0
	denied, parts := 0, 0
	var by *rule
	l.deny.parts(r, func(rules []int32) {
		parts++
		for _, i := range rules {
			if d := l.deny.rules[i]; d.coversFlows(r) {
				denied++
				by = d
				return
			}
		}
	})
	switch {
	case parts > 0 && denied == parts && !both:
		l.add(SeverityError, r, fmt.Sprintf("it can never decide: %s (line %d) denies all that it allows", by.label, by.line), "remove one of them")
		return
	case denied > 0 && !both:
		l.add(SeverityWarning, r, fmt.Sprintf("%s (line %d) denies some of its hosts", by.label, by.line), "remove them from one of the rules")
	}
	// A rule that inspects does so whatever else allows its hosts.
	if both || r.inspect {
		return
	}
	allowed := 0
	var also *rule
	l.allow.parts(r, func(rules []int32) {
		for _, i := range rules {
			s := l.allow.rules[i]
			if s == r || !s.coversFlows(r) || len(s.hosts) > 0 && len(s.prefixes) > 0 {
				continue
			}
			// Of two that say the same, the later is the one too many.
			if int(i) < l.ownAllow && int(i) > n && !r.conditional() && s.coveredBy(r) {
				continue
			}
			allowed++
			also = s
			return
		}
	})
	switch {
	case parts == 0 || allowed < parts:
	case r.conditional():
		l.add(SeverityWarning, r, fmt.Sprintf("it narrows nothing: %s%s allows all that it names, without conditions", also.label, at(also)), "remove one of them; what is to be taken away is written under deny")
	default:
		l.add(SeverityWarning, r, fmt.Sprintf("it can never decide: %s%s allows all of it already", also.label, at(also)), "remove it")
	}
}

// at gives the line of a rule in this file; those of presets are in another.
func at(r *rule) string {
	if strings.HasPrefix(r.label, "preset ") {
		return ""
	}
	return fmt.Sprintf(" (line %d)", r.line)
}

// coveredBy reports whether s allows all that r does: the same the other way round.
func (r *rule) coveredBy(s *rule) bool {
	if !s.coversFlows(r) {
		return false
	}
	for _, h := range r.hosts {
		if !slices.ContainsFunc(s.hosts, func(p Pattern) bool { return p.covers(h) }) {
			return false
		}
	}
	for _, c := range r.prefixes {
		if !slices.ContainsFunc(s.prefixes, func(p netip.Prefix) bool { return p.Bits() <= c.Bits() && p.Contains(c.Addr()) }) {
			return false
		}
	}
	return !r.any
}

// reaches reports whether a deny rule names something that is allowed.
func (l *linter) reaches(r *rule) bool {
	// Addresses are what names resolve to, so that a deny of them can always decide where names are allowed.
	if len(l.allow.any) > 0 || len(r.prefixes) > 0 && len(l.allow.rules) > 0 {
		return true
	}
	for _, h := range r.hosts {
		// Sandboxes of a private network need no rule that allows them.
		if internal(h.host) || h.wild && l.above[h.host] {
			return true
		}
		for _, i := range l.allow.host(h.host, nil) {
			s := l.allow.rules[i]
			if r.speaks(s.protocol) && r.ports.overlap(s.ports) {
				return true
			}
		}
	}
	return false
}

func (l *linter) conditions(r *rule) {
	if r.when == nil {
		return
	}
	for _, name := range r.when.capital {
		l.add(SeverityError, r, fmt.Sprintf("when asks for the header %.60q, and headers have lower-case names there", name), fmt.Sprintf("write %.60q", strings.ToLower(name)))
	}
	if !r.when.constant {
		return
	}
	q := &question{Request: &Request{}}
	switch ok, err := r.when.eval(q, meaning{}); {
	case err != nil:
		l.add(SeverityError, r, fmt.Sprintf("when always fails: %v", err), "correct it")
	case ok:
		l.add(SeverityWarning, r, "when is always true", "leave it out")
	default:
		l.add(SeverityError, r, "it can never decide: when is always false", "remove the rule, or let when ask something of the request")
	}
}

func (l *linter) inspection(r *rule) {
	all := slices.ContainsFunc(r.paths, func(p pathPattern) bool { return p.rest && len(p.segments) == 0 })
	switch {
	case r.deny || r.any:
	case all && len(r.methods) == 0 && r.when == nil:
		l.add(SeverityWarning, r, "paths names all paths, so connections are inspected without need", "leave paths out; if inspecting is what is meant, write inspect: true")
	case all && len(r.paths) > 1:
		l.add(SeverityWarning, r, "paths has /** beside others, which it includes", "leave the others out, or remove /**")
	case r.inspect && r.conditional():
		l.add(SeverityWarning, r, "inspect: true says nothing more: methods, paths and when inspect by themselves", "leave it out")
	}
	if !r.deny && !r.protocol.inspectable() {
		for _, h := range r.hosts {
			for _, x := range []*index{l.deny, l.allow} {
				for _, i := range x.host(h.host, nil) {
					d := x.rules[i]
					if d.conditional() && r.ports.overlap(d.ports) {
						l.add(SeverityWarning, r, fmt.Sprintf("over %s no request can be told from another, so %s (line %d) is passed by", r.protocol, d.label, d.line), "allow https, or deny the host altogether")
					}
				}
			}
		}
	}
}

// opaque returns the rules for everything over tcp and udp that decide where a rule does, and that no rule denies there. Only presets have such.
func (l *linter) opaque(r *rule) (list []*rule) {
	for _, i := range l.allow.any {
		s := l.allow.rules[i]
		if s.protocol.inspectable() || s.protocol == "" || !s.ports.overlap(r.ports) {
			continue
		}
		left := s.ports.all()
		for _, d := range l.deny.rules {
			if len(left) > 0 && !d.conditional() && d.speaks(s.protocol) && (d.any || r.coveredBy(&rule{hosts: d.hosts, prefixes: d.prefixes})) {
				left = left.minus(d.ports)
			}
		}
		if len(left) > 0 && left.overlap(r.ports) {
			list = append(list, s)
		}
	}
	return list
}

// protocolsOf names the protocols of rules, each once.
func protocolsOf(rules []*rule) string {
	var names []string
	for _, r := range rules {
		if !slices.Contains(names, string(r.protocol)) {
			names = append(names, string(r.protocol))
		}
	}
	return strings.Join(names, " and ")
}

// passed warns of a denial with conditions that a rule of the preset opens another way past.
func (l *linter) passed(r *rule) {
	if !r.deny || !r.conditional() {
		return // an allow rule with conditions narrows nothing where the preset allows all
	}
	if len(r.hosts) > 0 && !slices.ContainsFunc(r.hosts, func(p Pattern) bool { return !internal(p.host) }) {
		return // no rule for everything is about these
	}
	if list := l.opaque(r); len(list) > 0 {
		l.add(SeverityWarning, r, fmt.Sprintf("%s allows %s there as well, over which no request can be told from another, so it is passed by: over tcp by who is silent at first", list[0].label, protocolsOf(list)),
			"deny tcp and udp to the same hosts and ports, or extend another preset")
	}
}

// credentials warns of rules over whose connections credentials of the sandbox's own go, whatever the policy says of them.
func (l *linter) credentials() {
	if !l.platformCredentialsOnly {
		return
	}
	usual := &rule{ports: ports{{80, 80}, {443, 443}}, any: true}
	const what, remedy = "over %s nothing is taken out of what is sent, so platform_credentials_only is passed by", "allow https alone on ports 80 and 443"
	if list := l.opaque(usual); len(list) > 0 {
		l.list = append(l.list, Finding{SeverityWarning, l.credentialsLine, list[0].label, fmt.Sprintf(what+": over tcp by who is silent at first", protocolsOf(list)), "extend another preset"})
	}
	for _, r := range l.allow.rules[:l.ownAllow] {
		if !r.protocol.inspectable() && r.ports.overlap(usual.ports) {
			l.add(SeverityWarning, r, fmt.Sprintf(what, r.protocol), remedy)
		}
	}
}

// grant complains of a secret that can never be used.
func (l *linter) grant(g *Grant) {
	bad := func(what, remedy string) {
		l.list = append(l.list, Finding{SeverityError, g.line, g.label, what, remedy})
	}
	for _, h := range g.Hosts {
		if !slices.ContainsFunc(l.allow.rules, func(r *rule) bool {
			return r.protocol == HTTPS && r.ports.overlap(g.Ports) && (r.any || slices.ContainsFunc(r.hosts, func(p Pattern) bool { return p.overlap(h) }) || !h.wild && r.host(h.host))
		}) {
			bad(fmt.Sprintf("it is for %q, which no rule allows over https on its ports", h), "add the host to allow")
			continue
		}
		if h.wild {
			if suffix, icann := publicsuffix.PublicSuffix(string(h.host)); suffix == string(h.host) && !icann {
				bad(fmt.Sprintf("%q is broad: anybody can have a name below %s and would get the secret", h, h.host), "name the hosts that are meant")
			}
			continue
		}
		for _, port := range g.Ports {
			if v, _ := l.Connect(Flow{h.host, port.First, HTTPS}); !v.Allow && v.Rule != ruleDefault {
				bad(fmt.Sprintf("it is for %q, which %s denies", h, v.Rule), "remove the host from one of them")
			}
		}
	}
}
