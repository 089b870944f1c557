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

// DeniesPeer says whether a deny rule is about a connection to another sandbox of a private network, which needs no rule that allows it. One
// over TCP may speak anything and is not looked into, so rules for https, for http and with conditions, which could not be asked about each
// request, deny all of it.
func (p *Policy) DeniesPeer(h Host, port uint16, proto Protocol) (Verdict, bool) {
	if v, bad := p.refuseHost(h); bad {
		return v, true
	}
	var buf [16]int32
	for _, i := range p.deny.host(h, buf[:0]) {
		r := p.deny.rules[i]
		if !r.ports.has(port) || !(r.speaks(proto) || proto == TCP && (r.speaks(HTTPS) || r.speaks(HTTP))) {
			continue
		}
		v := r.verdict(false)
		if r.conditional() {
			v.Reason += "; connections between sandboxes are not looked into, so that its conditions deny all of them"
		}
		return v, true
	}
	return Verdict{}, false
}
