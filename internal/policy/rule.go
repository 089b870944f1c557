package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Protocol is what a flow carries, as far as the gateway takes part in it.
type Protocol string

// The protocols. Requests are decided on one by one over the first two only.
const (
	HTTPS Protocol = "https"
	HTTP  Protocol = "http"
	TCP   Protocol = "tcp"
	UDP   Protocol = "udp"
)

var protocols = []Protocol{HTTPS, HTTP, TCP, UDP}

// inspectable reports whether the protocol has requests.
func (p Protocol) inspectable() bool { return p == HTTPS || p == HTTP }

// Pattern names hosts: one, or all true subdomains of one.
type Pattern struct {
	host Host
	wild bool
}

// Match reports whether the pattern names h. "*.example.com" names no address and not example.com itself.
func (p Pattern) Match(h Host) bool {
	if !p.wild {
		return p.host == h
	}
	rest, ok := strings.CutSuffix(string(h), string(p.host))
	return ok && len(rest) > 1 && rest[len(rest)-1] == '.'
}

// String returns the pattern in canonical form, such as "*.example.com".
func (p Pattern) String() string {
	if p.wild {
		return "*." + string(p.host)
	}
	return string(p.host)
}

// covers reports whether p names every host that q does.
func (p Pattern) covers(q Pattern) bool { return p == q || p.wild && p.Match(q.host) }

func (p Pattern) overlap(q Pattern) bool { return p.covers(q) || q.covers(p) }

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// String writes "443" or "8000-8010".
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// ports are ranges in order that do not touch. None means all ports.
type ports []PortRange

func (p ports) has(port uint16) bool {
	for _, r := range p {
		if port >= r.First && port <= r.Last {
			return true
		}
	}
	return len(p) == 0 && port != 0
}

// all returns the ranges with none written out.
func (p ports) all() ports {
	if len(p) == 0 {
		return ports{{1, 65535}}
	}
	return p
}

func (p ports) covers(q ports) bool { return len(q.minus(p)) == 0 }

func (p ports) overlap(q ports) bool {
	for _, a := range p.all() {
		for _, b := range q.all() {
			if a.First <= b.Last && b.First <= a.Last {
				return true
			}
		}
	}
	return false
}

// minus returns the ranges of p that are not in q. Here none means none.
func (p ports) minus(q ports) ports {
	left := slices.Clone(p.all())
	for _, b := range q.all() {
		var next ports
		for _, a := range left {
			if a.Last < b.First || a.First > b.Last {
				next = append(next, a)
				continue
			}
			if a.First < b.First {
				next = append(next, PortRange{a.First, b.First - 1})
			}
			if a.Last > b.Last {
				next = append(next, PortRange{b.Last + 1, a.Last})
			}
		}
		left = next
	}
	return left
}

// merge orders ranges and joins those that touch.
func merge(list ports) ports {
	slices.SortFunc(list, func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	out := list[:0]
	for _, r := range list {
		if n := len(out); n > 0 && uint32(r.First) <= uint32(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, r.Last)
			continue
		}
		out = append(out, r)
	}
	return out
}

func (p ports) String() string {
	if len(p) == 0 || len(p) == 1 && p[0] == (PortRange{1, 65535}) {
		return "any port"
	}
	var b strings.Builder
	b.WriteString("port ")
	for i, r := range p {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(r.String())
	}
	return b.String()
}

// rule is one of allow or deny. It is not changed once it has been parsed.
type rule struct {
	// label is what verdicts call it: allow[2] "npm".
	label string
	line  int
	deny  bool
	// A rule names hosts, addresses, or everything; an allow rule may name hosts together with the addresses that they
	// may resolve to.
	hosts    []Pattern
	prefixes []netip.Prefix
	any      bool
	// protocol is empty in a deny rule for all of them, or for the two with requests if it is conditional.
	protocol Protocol
	ports    ports
	methods  []string
	paths    []pathPattern
	when     *condition
	inspect  bool
	// reason describes what the rule names.
	reason string
}

// conditional reports whether the rule can only be decided with a request.
func (r *rule) conditional() bool { return len(r.methods) > 0 || len(r.paths) > 0 || r.when != nil }

// speaks reports whether the rule is about a protocol.
func (r *rule) speaks(p Protocol) bool {
	if r.protocol != "" {
		return r.protocol == p
	}
	return p.inspectable() || (p == TCP || p == UDP) && !r.conditional()
}

// flow reports whether the rule is about the port and protocol of a flow.
func (r *rule) flow(f Flow) bool { return r.speaks(f.Protocol) && r.ports.has(f.Port) }

// host reports whether the rule names a host.
func (r *rule) host(h Host) bool {
	if r.any {
		return r.deny || !internal(h)
	}
	if a, ok := h.Addr(); ok {
		return len(r.hosts) == 0 && slices.ContainsFunc(r.prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	return slices.ContainsFunc(r.hosts, func(p Pattern) bool { return p.Match(h) })
}

func (r *rule) verdict(allow bool) Verdict {
	return Verdict{Allow: allow, Rule: r.label, Line: r.line, Reason: r.reason}
}

// describe writes what the rule names, for verdicts.
func (r *rule) describe() string {
	var names []string
	for _, p := range r.hosts {
		names = append(names, p.String())
	}
	for _, p := range r.prefixes {
		if p.IsSingleIP() {
			names = append(names, p.Addr().String())
			continue
		}
		names = append(names, p.String())
	}
	if r.any {
		names = append(names, "any host")
	}
	shown := func(names []string) string {
		if n := len(names); n > 3 {
			names = append(names[:3:3], fmt.Sprintf("%d more", n-3))
		}
		return strings.Join(names, ", ")
	}
	what := shown(names)
	if n := len(r.hosts); n > 0 && n < len(names) && !r.any {
		// The blocks are not open by themselves.
		what = shown(names[:n]) + ", also where it resolves to " + shown(names[n:])
	}
	protocol := string(r.protocol)
	if protocol == "" {
		protocol = "any protocol"
		if r.conditional() {
			protocol = "http and https"
		}
	}
	parts := []string{what, protocol, r.ports.String()}
	if len(r.methods) > 0 {
		parts = append(parts, strings.Join(r.methods, " "))
	}
	if len(r.paths) > 0 {
		var texts []string
		for i := range r.paths {
			texts = append(texts, r.paths[i].text)
		}
		parts = append(parts, strings.Join(texts, " "))
	}
	if r.when != nil {
		parts = append(parts, "when "+r.when.text)
	}
	return strings.Join(parts, "; ")
}

// index finds the rules that name a host without looking at the others.
type index struct {
	rules []*rule
	exact map[Host][]int32
	// below holds the rules with "*.example.com" by example.com.
	below    map[Host][]int32
	any      []int32
	prefixes map[netip.Prefix][]int32
	// bits are the lengths that prefixes have, for each family.
	bits4, bits6 []int
}

func newIndex(rules []*rule) *index {
	x := &index{rules: rules, exact: map[Host][]int32{}, below: map[Host][]int32{}, prefixes: map[netip.Prefix][]int32{}}
	// A rule that names a host twice is listed once.
	add := func(list []int32, i int32) []int32 {
		if n := len(list); n > 0 && list[n-1] == i {
			return list
		}
		return append(list, i)
	}
	for n, r := range rules {
		i := int32(n)
		if r.any {
			x.any = append(x.any, i)
		}
		for _, p := range r.hosts {
			if p.wild {
				x.below[p.host] = add(x.below[p.host], i)
				continue
			}
			x.exact[p.host] = add(x.exact[p.host], i)
		}
		for _, p := range r.prefixes {
			x.prefixes[p] = add(x.prefixes[p], i)
			bits := &x.bits6
			if p.Addr().Is4() {
				bits = &x.bits4
			}
			if !slices.Contains(*bits, p.Bits()) {
				*bits = append(*bits, p.Bits())
			}
		}
	}
	return x
}

// internal says whether a name is below .internal, which no public name is. Private networks of sandboxes have names there, and so have organisations:
// a rule that allows every host does not mean them, so that a name of a private network, or one that is spelled wrong, is not told to a resolver.
func internal(h Host) bool { return h == "internal" || strings.HasSuffix(string(h), ".internal") }

// every returns the rules for every host, as far as they are about h.
func (x *index) every(h Host) []int32 {
	if len(x.any) > 0 && !x.rules[x.any[0]].deny && internal(h) {
		return nil
	}
	return x.any
}

// host returns the rules that name h, in order. The list may lie in buf, which is empty, and is not to be changed.
func (x *index) host(h Host, buf []int32) []int32 {
	if a, ok := h.Addr(); ok {
		list := slices.DeleteFunc(x.addr(a, buf), func(i int32) bool { return len(x.rules[i].hosts) > 0 })
		if len(x.any) > 0 {
			list = append(list, x.any...)
			slices.Sort(list)
		}
		return list
	}
	// One list is in order and is returned as it is, however long.
	list := x.every(h)
	lists := min(len(list), 1)
	add := func(more []int32) {
		switch {
		case len(more) == 0:
			return
		case lists == 0:
			list = more
		case lists == 1:
			list = append(append(buf, list...), more...)
		default:
			list = append(list, more...)
		}
		lists++
	}
	add(x.exact[h])
	if len(x.below) > 0 {
		for i := range len(h) {
			if h[i] == '.' {
				add(x.below[h[i+1:]])
			}
		}
	}
	if lists > 1 {
		slices.Sort(list)
		list = slices.Compact(list)
	}
	return list
}

// addr returns the rules with a prefix that has a, in order. The list is the caller's and lies in buf, which is empty, if it fits.
func (x *index) addr(a netip.Addr, buf []int32) []int32 {
	bits := x.bits6
	if a.Is4() {
		bits = x.bits4
	}
	list := buf
	for _, n := range bits {
		p, err := a.Prefix(n)
		if err != nil {
			continue
		}
		list = append(list, x.prefixes[p]...)
	}
	if len(bits) > 1 {
		slices.Sort(list)
		list = slices.Compact(list)
	}
	return list
}
