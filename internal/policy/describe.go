package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Describe tells the policy in words: what it denies, what it allows, what it takes over from a preset, its ceilings and its secrets, and what becomes of the rest.
// Of a nil Policy that is all.
func (p *Policy) Describe() []Step {
	if p == nil {
		return []Step{{Detail: "everything is denied"}}
	}
	var steps []Step
	for _, x := range []struct {
		rules []*rule
		word  string
	}{{p.deny.rules[:p.ownDeny], "denied"}, {p.allow.rules[:p.ownAllow], "allowed"}} {
		for _, r := range x.rules {
			s := Step{Rule: r.label, Line: r.line, Detail: x.word + ": " + r.reason}
			if !r.deny && (r.inspect || r.conditional() && r.protocol == HTTPS) {
				s.Detail += "; each request is looked into"
			}
			steps = append(steps, s)
		}
	}
	if p.extends != "" {
		allow, deny := len(p.allow.rules)-p.ownAllow, len(p.deny.rules)-p.ownDeny
		s := Step{Rule: "extends", Detail: fmt.Sprintf("allowed besides: what the preset %s allows (%d rules)", p.extends, allow)}
		if allow == 0 {
			s.Detail = fmt.Sprintf("the preset %s allows nothing besides", p.extends)
		}
		if deny > 0 {
			s.Detail += fmt.Sprintf("; denied: what it denies (%d rules)", deny)
		}
		steps = append(steps, s)
	}
	for _, g := range p.grants {
		var hosts []string
		for _, h := range g.Hosts {
			hosts = append(hosts, h.String())
		}
		what := slices.Concat([]string{strings.Join(hosts, ", ")}, g.Methods, g.Paths)
		steps = append(steps, Step{Rule: g.label, Line: g.line, Detail: fmt.Sprintf("the secret %s goes along to %s", g.Secret, strings.Join(what, " "))})
	}
	if p.platformCredentialsOnly {
		steps = append(steps, Step{Rule: "platform_credentials_only", Detail: "credentials that the sandbox brought itself are refused; each request is looked into"})
	}
	l := p.limits
	for _, c := range []struct {
		key string
		n   int64
	}{{"connections", int64(l.Connections)}, {"bytes_up", l.BytesUp}, {"bytes_down", l.BytesDown}, {"requests_per_minute", int64(l.RequestsPerMinute)}, {"new_hosts_per_hour", int64(l.NewHostsPerHour)}} {
		if c.n > 0 {
			steps = append(steps, Step{Rule: "limits", Detail: fmt.Sprintf("%s: at most %d", c.key, c.n)})
		}
	}
	return append(steps, Step{Detail: "all else is denied"})
}
