package policy

// Inspects reports whether any connection is inspected under the policy.
func (p *Policy) Inspects() bool {
	if p.platformCredentialsOnly || len(p.grants) > 0 {
		return true
	}
	for _, x := range []*index{p.allow, p.deny} {
		for _, r := range x.rules {
			if r.inspect || r.conditional() {
				return true
			}
		}
	}
	return false
}

// Decide says whether all of a request is allowed: the lookup of its host, the connection, and what is asked, if it has a method. A name is taken
// to resolve to a public address.
func (p *Policy) Decide(r Request) Verdict { return p.decide(r) }
