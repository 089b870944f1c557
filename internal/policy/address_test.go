package policy_test

import (
	"net/netip"
	"testing"

	"github.com/warren-sandbox/warren/internal/policy"
)

// addresses are judged for a name that is allowed; public ones may be dialled.
var addresses = map[string]bool{
	"8.8.8.8": true, "1.1.1.1": true, "192.0.1.1": true, "198.20.0.1": true, "172.32.0.1": true, "100.128.0.1": true, "223.255.255.255": true,
	"2606:4700::1111": true, "2a00:1450::1": true, "::ffff:8.8.8.8": true, "64:ff9b::808:808": true,

	"0.0.0.0": false, "0.1.2.3": false, "10.0.0.1": false, "10.255.255.255": false, "100.64.0.1": false, "100.127.255.255": false,
	"127.0.0.1": false, "127.255.255.255": false, "169.254.1.1": false, "172.16.0.1": false, "172.31.255.255": false, "192.0.0.1": false,
	"192.0.2.1": false, "192.88.99.1": false, "192.168.1.1": false, "198.18.0.1": false, "198.19.255.255": false, "198.51.100.1": false,
	"203.0.113.1": false, "224.0.0.1": false, "239.255.255.250": false, "240.0.0.1": false, "255.255.255.255": false,
	"::": false, "::1": false, "::7f00:1": false, "::8.8.8.8": false, "::ffff:0:808:808": false, "::ffff:127.0.0.1": false, "::ffff:10.0.0.1": false,
	"64:ff9b::7f00:1": false, "64:ff9b::a00:1": false, "64:ff9b::a9fe:a9fe": false, "64:ff9b:1::808:808": false, "100::1": false,
	"2001::1": false, "2001:0:808:808::f7f7:f7f7": false, "2001:2::1": false, "2001:10::1": false, "2001:20::1": false, "2001:db8::1": false,
	"2002:7f00:1::": false, "2002:808:808::1": false, "3fff::1": false, "4000::1": false, "5f00::1": false, "fc00::1": false, "fd12::1": false,
	"fe80::1": false, "fe80::1%eth0": false, "fec0::1": false, "ff02::1": false,
	"169.254.169.254": false, "169.254.170.2": false, "169.254.170.23": false, "fd00:ec2::254": false, "100.100.100.200": false, "168.63.129.16": false,
	"::ffff:169.254.169.254": false, "::ffff:168.63.129.16": false, "64:ff9b::a83f:8110": false, "2002:a83f:8110::": false,
}

func TestAddress(t *testing.T) {
	for _, src := range []string{"allow: [allowed.lab]", "extends: open"} {
		p := parse(t, src)
		f := policy.Flow{Host: "allowed.lab", Port: 443, Protocol: policy.HTTPS}
		for s, want := range addresses {
			a := netip.MustParseAddr(s)
			if v := p.Address(f, a); v.Allow != want || v.Rule == "" || v.Reason == "" {
				t.Errorf("%s: Address(%s) = %+v, want %v", src, s, v, want)
			}
			// As a literal, what is not public is refused too, whatever allows all names.
			h, err := policy.ParseHost(s)
			if err != nil {
				continue
			}
			f := policy.Flow{Host: h, Port: 443, Protocol: policy.HTTPS}
			if v := p.Address(f, a); v.Allow != want {
				t.Errorf("%s: as a literal, Address(%s) = %+v, want %v", src, s, v, want)
			}
		}
		if v := p.Address(f, netip.Addr{}); v.Allow {
			t.Errorf("%s: no address: %+v", src, v)
		}
	}
}

// The table notices a check that knows what the standard library knows.
func TestAddressTwin(t *testing.T) {
	missed := 0
	for s, want := range addresses {
		a := netip.MustParseAddr(s)
		naive := a.IsGlobalUnicast() && !a.IsPrivate() && !a.IsLoopback()
		if naive != want {
			missed++
		}
	}
	if missed < 20 {
		t.Errorf("a naive check fails only %d of %d cases", missed, len(addresses))
	}
}

func TestAddressOpened(t *testing.T) {
	p := parse(t, `
allow:
  - {name: net, cidr: 10.1.2.0/24, protocol: tcp, ports: [5432]}
  - {name: one, host: 10.9.9.9, ports: [8443]}
  - {name: db, hosts: [db.corp.lab, "*.db.corp.lab"], cidr: [10.7.0.0/16, "fd00:7::/32"], protocol: tcp, ports: [6379]}
  - {name: web, cidr: 10.8.0.0/16, paths: [/public/**]}
  - {name: any, host: other.lab, protocol: tcp, ports: [5432, 6379]}
  - {name: https, host: other.lab}
  - {name: meta, cidr: 169.254.0.0/16}
  - {name: azure, host: 168.63.129.16}
  - {name: v6, cidr: "2002::/16"}
deny:
  - cidr: 10.1.2.128/25
  - 8.8.8.0.example
  - cidr: 8.8.4.0/24
`)
	for _, tt := range []struct {
		flow string
		addr string
		want bool
		rule string
	}{
		{"tcp://10.1.2.3:5432", "10.1.2.3", true, `allow[0] "net"`},
		{"tcp://10.1.2.3:22", "10.1.2.3", false, "address"},
		{"https://10.1.2.3:5432", "10.1.2.3", false, "address"},
		{"tcp://10.1.2.200:5432", "10.1.2.200", false, "deny[0]"},
		{"tcp://other.lab:5432", "10.1.2.3", true, `allow[0] "net"`},
		{"tcp://other.lab:5432", "64:ff9b::a01:203", true, `allow[0] "net"`},
		{"tcp://other.lab:5432", "10.1.3.3", false, "address"},
		{"tcp://other.lab:5432", "8.8.4.4", false, "deny[2]"},
		{"tcp://other.lab:5432", "::ffff:8.8.4.4", false, "deny[2]"},
		{"tcp://other.lab:5432", "64:ff9b::808:404", false, "deny[2]"},
		{"https://10.9.9.9:8443", "10.9.9.9", true, `allow[1] "one"`},
		{"https://10.9.9.9:8443", "10.9.9.8", false, "address"},
		{"tcp://db.corp.lab:6379", "10.7.1.1", true, `allow[2] "db"`},
		{"tcp://a.db.corp.lab:6379", "fd00:7::1", true, `allow[2] "db"`},
		{"tcp://other.lab:6379", "10.7.1.1", false, "address"},
		{"tcp://10.7.1.1:6379", "10.7.1.1", false, "address"},
		{"https://10.8.1.1:443", "10.8.1.1", true, `allow[3] "web"`},
		{"https://other.lab:443", "10.8.1.1", false, "address"},
		{"https://169.254.169.254:443", "169.254.169.254", false, "address"},
		{"https://other.lab:443", "169.254.170.2", false, "address"},
		{"https://other.lab:443", "169.254.1.1", true, `allow[6] "meta"`},
		{"https://168.63.129.16:443", "168.63.129.16", false, "address"},
		{"https://other.lab:443", "2002:a9fe:a9fe::1", false, "address"},
		{"https://other.lab:443", "2002:a00:1::1", true, `allow[8] "v6"`},
	} {
		r, err := policy.ParseTarget(tt.flow)
		if err != nil {
			t.Fatalf("%s: %v", tt.flow, err)
		}
		v := p.Address(r.Flow, netip.MustParseAddr(tt.addr))
		if v.Allow != tt.want || v.Rule != tt.rule {
			t.Errorf("%s to %s: %+v, want %v by %s", tt.flow, tt.addr, v, tt.want, tt.rule)
		}
	}
	// A literal that only Address would refuse is refused at once.
	for _, h := range []policy.Host{"169.254.169.254", "168.63.129.16"} {
		if v, _ := p.Connect(policy.Flow{Host: h, Port: 443, Protocol: policy.HTTPS}); v.Allow {
			t.Errorf("Connect to %s: %+v", h, v)
		}
	}
	// Addresses that only hosts may resolve to are not opened themselves.
	if v, _ := p.Connect(policy.Flow{Host: "10.7.1.1", Port: 6379, Protocol: policy.TCP}); v.Allow {
		t.Errorf("Connect to an address that hosts may resolve to: %+v", v)
	}
}

// A public address that the machine has itself is opened by its name alone.
func TestOwnAddress(t *testing.T) {
	for _, tt := range []struct {
		rules string
		want  bool
	}{
		{"allow: [allowed.lab]", false},
		{"extends: open", false},
		{"allow: [{host: allowed.lab, cidr: 8.8.8.8/32}]", true},
		{"allow: [{host: allowed.lab, cidr: 8.8.8.8/32}]\ndeny: [{cidr: 8.8.8.0/24}]", false},
		{"allow: [allowed.lab, {cidr: 8.8.8.0/24}]", true},
		{"allow: [allowed.lab, {cidr: 8.8.8.0/24, protocol: tcp, ports: [22]}]", false},
	} {
		p := parse(t, tt.rules)
		f := policy.Flow{Host: "allowed.lab", Port: 443, Protocol: policy.HTTPS}
		for _, s := range []string{"8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808"} {
			if v := p.OwnAddress(f, netip.MustParseAddr(s)); v.Allow != tt.want || v.Reason == "" {
				t.Errorf("%s: OwnAddress(%s) = %+v, want %v", tt.rules, s, v, tt.want)
			}
		}
		if v := p.OwnAddress(f, netip.MustParseAddr("169.254.169.254")); v.Allow {
			t.Errorf("%s: metadata: %+v", tt.rules, v)
		}
	}
}
