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
