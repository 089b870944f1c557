package policy

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"
)

// Step is one thing that was considered on the way to a verdict.
type Step struct {
	// Rule is the rule, as verdicts call it, or empty for steps that are of none; Line is its line or 0.
	Rule string
	Line int
	// Matched says that the rule fits what was asked, and Decided that the verdict is its.
	Matched, Decided bool
	// Detail says why, in one line.
	Detail string
}

// Explain says how a request is decided on: each rule that names its host, deny before allow, with the first thing in
// which it does not fit, then rules that nearly name it, then the verdict as the last step. A request without a method
// is a connection.
func (p *Policy) Explain(r Request) []Step {
	v := p.Decide(r)
	var steps []Step
	if !r.Host.canonical() {
		return append(steps, Step{Rule: v.Rule, Decided: true, Detail: v.summary()})
	}
	q := &question{Request: &r}
	for _, x := range []*index{p.deny, p.allow} {
		named := x.host(r.Host, nil)
		for _, i := range named {
			rule := x.rules[i]
			s := Step{Rule: rule.label, Line: rule.line}
			s.Matched, s.Detail = rule.explain(q)
			s.Decided = s.Matched && rule.label == v.Rule
			steps = append(steps, s)
		}
		others := 0
		for i, rule := range x.rules {
			if slices.Contains(named, int32(i)) {
				continue
			}
			why := rule.near(r.Host)
			if why == "" {
				others++
				continue
			}
			steps = append(steps, Step{Rule: rule.label, Line: rule.line, Detail: why})
		}
		if others > 0 {
			kind := "allow"
			if x == p.deny {
				kind = "deny"
			}
			steps = append(steps, Step{Detail: fmt.Sprintf("%d other %s rules name other hosts", others, kind)})
		}
	}
	if _, inspect := p.Connect(r.Flow); inspect {
		steps = append(steps, Step{Matched: true, Detail: "the connection is inspected: each request is decided on by itself"})
	}
	for i := range p.grants {
		g := &p.grants[i]
		if !g.Covers(r.Flow) {
			continue
		}
		s := Step{Rule: g.label, Line: g.line, Detail: fmt.Sprintf("the secret %s is granted to requests there", g.Secret)}
		if r.Method != "" {
			if s.Matched = g.Match(r); s.Matched {
				s.Detail = fmt.Sprintf("the secret %s is put into the request", g.Secret)
			} else {
				s.Detail = fmt.Sprintf("the secret %s is not for this method or path", g.Secret)
			}
		}
		steps = append(steps, s)
	}
	return append(steps, Step{Rule: v.Rule, Line: v.Line, Matched: v.Allow, Decided: true, Detail: v.summary()})
}

// ExplainFlow says how a connection is decided on; see [Policy.Explain].
func (p *Policy) ExplainFlow(f Flow) []Step { return p.Explain(Request{Flow: f}) }

func (v Verdict) summary() string {
	word := "denied"
	if v.Allow {
		word = "allowed"
	}
	return word + ": " + v.Reason
}

// explain says whether a rule that names the host fits, and what it lacks.
func (r *rule) explain(q *question) (bool, string) {
	switch {
	case !r.speaks(q.Protocol):
		return false, fmt.Sprintf("it is for %s and not for %s", r.spoken(), q.Protocol)
	case !r.ports.has(q.Port):
		return false, fmt.Sprintf("it is for %s and not for %d", r.ports, q.Port)
	case !r.conditional():
		return true, "it names " + r.reason
	case q.Method == "":
		return true, "it depends on the request: " + r.reason
	}
	if ok, why := r.asks(q); ok {
		return true, strings.TrimSuffix("it names "+r.reason+"; "+why, "; ")
	}
	for _, m := range q.all() {
		other := ""
		if m.method != q.Method {
			other = " (which a header of the request asks for)"
		}
		switch ok, why := r.means(q, m); {
		case ok:
		case len(r.methods) > 0 && !slices.Contains(r.methods, m.method):
			return false, fmt.Sprintf("the method %.40q%s is not among %s", m.method, other, strings.Join(r.methods, ", "))
		case len(r.paths) > 0 && m.path != "" && !r.path(m.path):
			return false, fmt.Sprintf("the path %.200q is not among its paths", m.path)
		case why != "":
			return false, why
		default:
			return false, fmt.Sprintf("when is false for %.40q %.200q: %s", m.method, m.path, r.when.text)
		}
	}
	return false, "the request can be understood in too many ways"
}

func (r *rule) spoken() string {
	if r.protocol == "" {
		return "http and https"
	}
	return string(r.protocol)
}

// near says why a rule does not name a host that its author may have meant.
func (r *rule) near(h Host) string {
	if a, ok := h.Addr(); ok {
		if len(r.hosts) > 0 {
			for _, p := range r.prefixes {
				if p.Contains(a) {
					return fmt.Sprintf("it names %s for hosts that resolve to it, not the address itself", p)
				}
			}
		}
		return ""
	}
	for _, p := range r.hosts {
		switch {
		case p.wild && p.host == h:
			return fmt.Sprintf("%q names subdomains and not %s itself", p, h)
		case p.wild && strings.HasSuffix(string(h), string(p.host)):
			return fmt.Sprintf("%s ends like %q and is no subdomain of it", h, p)
		case !p.wild && strings.HasSuffix(string(h), "."+string(p.host)):
			return fmt.Sprintf("%q does not name its subdomains", p)
		}
		if site, err := publicsuffix.EffectiveTLDPlusOne(string(h)); err == nil && (string(p.host) == site || strings.HasSuffix(string(p.host), "."+site)) {
			return fmt.Sprintf("%q names another host of %s", p, site)
		}
	}
	return ""
}
