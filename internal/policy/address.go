package policy

import (
	"fmt"
	"net/netip"
)

// metadata are the addresses at which clouds hand the credentials of the machine to whoever asks. No rule opens them.
var metadata = func() map[netip.Addr]string {
	m := map[netip.Addr]string{}
	for _, a := range [][2]string{
		{"169.254.169.254", "cloud metadata"}, {"169.254.170.2", "task credentials of ECS"}, {"169.254.170.23", "pod credentials of EKS"},
		{"fd00:ec2::254", "cloud metadata of EC2"}, {"fd00:ec2::23", "pod credentials of EKS"}, {"fd20:ce::254", "cloud metadata of Google"},
		{"100.100.100.200", "cloud metadata of Alibaba"}, {"168.63.129.16", "the platform of Azure"}, {"192.0.0.192", "cloud metadata of Oracle"},
		{"169.254.0.23", "cloud metadata of Tencent"},
	} {
		m[netip.MustParseAddr(a[0])] = a[1]
	}
	return m
}()

type block struct {
	prefix netip.Prefix
	what   string
}

// special are the blocks that are not public global unicast, as IANA's special-purpose registries list them, the
// narrower before the wider. Within IPv6 only 2000::/3 is global unicast, so that what is unassigned is refused without being listed.
var special = func() (list []block) {
	for _, b := range [][2]string{
		{"0.0.0.0/8", "this network"}, {"10.0.0.0/8", "private (RFC 1918)"}, {"100.64.0.0/10", "shared by a carrier (RFC 6598)"},
		{"127.0.0.0/8", "loopback"}, {"169.254.0.0/16", "link-local"}, {"172.16.0.0/12", "private (RFC 1918)"},
		{"192.0.0.0/24", "reserved for protocols"}, {"192.0.2.0/24", "for documentation"}, {"192.88.99.0/24", "a relay of 6to4"},
		{"192.168.0.0/16", "private (RFC 1918)"}, {"198.18.0.0/15", "for benchmarks"}, {"198.51.100.0/24", "for documentation"},
		{"203.0.113.0/24", "for documentation"}, {"224.0.0.0/4", "multicast"}, {"255.255.255.255/32", "broadcast"}, {"240.0.0.0/4", "reserved"},
		{"::/128", "unspecified"}, {"::1/128", "loopback"}, {"::/96", "reserved (IPv4-compatible)"}, {"::ffff:0:0:0/96", "translated IPv4"},
		{"64:ff9b:1::/48", "local NAT64"}, {"100::/64", "discard-only"}, {"2001::/32", "Teredo"}, {"2001:db8::/32", "for documentation"},
		{"2001::/23", "reserved for protocols"}, {"2002::/16", "6to4"}, {"3ffe::/16", "returned to IANA"}, {"3fff::/20", "for documentation"},
		{"5f00::/16", "segment routing"}, {"fc00::/7", "unique local"}, {"fe80::/10", "link-local"}, {"fec0::/10", "site-local"}, {"ff00::/8", "multicast"},
	} {
		list = append(list, block{netip.MustParsePrefix(b[0]), b[1]})
	}
	return list
}()

var (
	globalV6  = netip.MustParsePrefix("2000::/3")
	nat64     = netip.MustParsePrefix("64:ff9b::/96")
	sixToFour = netip.MustParsePrefix("2002::/16")
	teredo    = netip.MustParsePrefix("2001::/32")
	// carriers have an IPv4 address as their last 32 bits.
	carriers = []netip.Prefix{nat64, netip.MustParsePrefix("::/96"), netip.MustParsePrefix("::ffff:0:0:0/96"), netip.MustParsePrefix("64:ff9b:1::/48")}
)

// embedded returns the IPv4 address that packets to a can end at.
func embedded(a netip.Addr) (netip.Addr, bool) {
	if !a.Is6() {
		return netip.Addr{}, false
	}
	b := a.As16()
	if sixToFour.Contains(a) {
		return netip.AddrFrom4([4]byte(b[2:6])), true
	}
	if teredo.Contains(a) {
		return netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]}), true
	}
	for _, p := range carriers {
		if p.Contains(a) {
			return netip.AddrFrom4([4]byte(b[12:])), true
		}
	}
	return netip.Addr{}, false
}

// isMetadata reports whether a, or what it embeds, is an address of metadata, and which.
func isMetadata(a netip.Addr) (string, bool) {
	if what, ok := metadata[a]; ok {
		return what, true
	}
	if v4, ok := embedded(a); ok {
		what, ok := metadata[v4]
		return what, ok
	}
	return "", false
}

// public reports whether a is public global unicast, and otherwise what it is. An address of NAT64 is not.
func public(a netip.Addr) (what string, ok bool) {
	for _, b := range special {
		if b.prefix.Contains(a) {
			return b.what, false
		}
	}
	if a.Is6() && !globalV6.Contains(a) {
		return "not assigned to the public internet", false
	}
	return "", true
}

// Address decides whether the gateway may dial a for a flow: the address that the flow's host resolved to, or is a
// literal of. It is asked besides [Policy.Connect], for each address.
//
// Public global unicast addresses may be dialled unless a rule denies them. All others may not, also for names that
// are allowed, except where an allow rule names them by an address or a cidr, with the flow's port and protocol. A rule
// that has both hosts and a cidr opens its addresses for its hosts only. Addresses of cloud metadata are always refused,
// and IPv4 addresses inside of IPv6 ones are judged as such.
func (p *Policy) Address(f Flow, a netip.Addr) Verdict { return p.address(f, a, false) }

// OwnAddress is [Policy.Address] for one that the machine of the gateway has itself. What listens there is meant for others, and often behind a
// firewall that a connection from the machine does not pass: even a public one may be dialled only where a rule names it.
func (p *Policy) OwnAddress(f Flow, a netip.Addr) Verdict { return p.address(f, a, true) }

func (p *Policy) address(f Flow, a netip.Addr, own bool) Verdict {
	if v, bad := p.refuseHost(f.Host); bad {
		return v
	}
	if !a.IsValid() || a.Zone() != "" {
		return Verdict{Rule: ruleAddress, Reason: fmt.Sprintf("%q is no address without a zone", a)}
	}
	a = a.Unmap()
	literal, isLiteral := f.Host.Addr()
	if isLiteral && literal != a {
		return Verdict{Rule: ruleAddress, Reason: fmt.Sprintf("%s is not the address that was asked for, %s", a, literal)}
	}
	if what, ok := isMetadata(a); ok {
		return Verdict{Rule: ruleAddress, Reason: fmt.Sprintf("%s is never reachable: %s", a, what)}
	}
	both := []netip.Addr{a}
	if v4, ok := embedded(a); ok {
		both = append(both, v4)
	}
	var buf [16]int32
	for _, x := range both {
		for _, i := range p.deny.addr(x, buf[:0]) {
			if r := p.deny.rules[i]; r.flow(f) {
				return r.verdict(false)
			}
		}
	}
	judged := a
	if nat64.Contains(a) {
		judged = both[1]
	}
	what, ok := public(judged)
	if ok && !own {
		return Verdict{Allow: true, Rule: ruleAddress, Reason: a.String() + " is a public address"}
	}
	for _, i := range p.allow.addr(judged, buf[:0]) {
		if r := p.allow.rules[i]; r.opens(f, isLiteral) {
			return r.verdict(true)
		}
	}
	reason := fmt.Sprintf("%s is not public (%s)", a, what)
	if own {
		reason = fmt.Sprintf("%s is an address of the machine that runs the sandboxes", a)
	}
	return Verdict{Rule: ruleAddress, Reason: fmt.Sprintf("%s and no allow rule with a cidr opens it to %s", reason, f)}
}

// opens reports whether a rule whose prefix has the address opens it for a flow.
func (r *rule) opens(f Flow, literal bool) bool {
	if !r.flow(f) {
		return false
	}
	if len(r.hosts) > 0 {
		return r.host(f.Host)
	}
	// The conditions of a rule are about requests to that address; those to a name are decided by the name's rules.
	return literal || !r.conditional()
}
