package policy_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// many is a policy of n rules of all kinds: half of them exact, the rest wildcards, conditional, by address, and denials.
func many(n int) string {
	var allow, deny strings.Builder
	for i := range n {
		switch i % 10 {
		case 0, 1, 2, 3, 4:
			fmt.Fprintf(&allow, "  - host%d.example.com\n", i)
		case 5, 6:
			fmt.Fprintf(&allow, "  - \"*.zone%d.example.org\"\n", i)
		case 7:
			fmt.Fprintf(&allow, "  - {host: api%d.example.net, methods: [GET], paths: [/v1/**], when: 'request.headers[\"x-team\"] == \"a\"'}\n", i)
		case 8:
			fmt.Fprintf(&allow, "  - {cidr: 10.%d.%d.0/%d, protocol: tcp, ports: [5432]}\n", i/256%256, i%256, 24)
		default:
			fmt.Fprintf(&deny, "  - bad%d.zone%d.example.org\n", i, i-4)
		}
	}
	return "extends: registries\nallow:\n" + allow.String() + "deny:\n" + deny.String()
}

// oneHost is a policy of n rules that all name one host: an index by host does not help.
func oneHost(n int) string {
	var b strings.Builder
	b.WriteString("allow:\n")
	for i := range n {
		fmt.Fprintf(&b, "  - {host: api.example.com, paths: [/v1/%d/**]}\n", i)
	}
	return b.String()
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		p := parse(b, many(n))
		last := n - n%10 - 10
		flow := func(h string) policy.Flow {
			return policy.Flow{Host: policy.Host(h), Port: 443, Protocol: policy.HTTPS}
		}
		exact, wild, deny, none := flow(fmt.Sprintf("host%d.example.com", last)), flow(fmt.Sprintf("a.b.zone%d.example.org", last+5)),
			flow(fmt.Sprintf("bad%d.zone%d.example.org", last+9, last+5)), flow("a.b.c.d.nowhere.example")
		request := policy.Request{Flow: flow(fmt.Sprintf("api%d.example.net", last+7)), Method: "GET", Path: "/v1/repos/x/y", Header: http.Header{"X-Team": {"a"}, "Accept": {"*/*"}, "User-Agent": {"curl"}}}
		private := policy.Flow{Host: policy.Host(fmt.Sprintf("10.%d.%d.7", (last+8)/256%256, (last+8)%256)), Port: 5432, Protocol: policy.TCP}
		addr, _ := private.Host.Addr()
		public := netip.MustParseAddr("93.184.216.34")
		for _, c := range []struct {
			name string
			want bool
			ask  func() policy.Verdict
		}{
			{"lookup", true, func() policy.Verdict { return p.Lookup(exact.Host) }},
			{"connect-exact", true, func() policy.Verdict { v, _ := p.Connect(exact); return v }},
			{"connect-wildcard", true, func() policy.Verdict { v, _ := p.Connect(wild); return v }},
			{"connect-preset", true, func() policy.Verdict { v, _ := p.Connect(flow("registry.npmjs.org")); return v }},
			{"connect-denied", false, func() policy.Verdict { v, _ := p.Connect(deny); return v }},
			{"connect-none", false, func() policy.Verdict { v, _ := p.Connect(none); return v }},
			{"connect-address", true, func() policy.Verdict { v, _ := p.Connect(private); return v }},
			{"address-public", true, func() policy.Verdict { return p.Address(exact, public) }},
			{"address-private", true, func() policy.Verdict { return p.Address(private, addr) }},
			{"request-when", true, func() policy.Verdict { return p.Request(request) }},
		} {
			b.Run(fmt.Sprintf("rules=%d/%s", n, c.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if v := c.ask(); v.Allow != c.want {
						b.Fatalf("%+v", v)
					}
				}
			})
		}
	}
}

func BenchmarkOneHost(b *testing.B) {
	p := parse(b, oneHost(10_000))
	r := policy.Request{Flow: policy.Flow{Host: "api.example.com", Port: 443, Protocol: policy.HTTPS}, Method: "GET", Path: "/v1/9999/x"}
	b.ReportAllocs()
	for b.Loop() {
		if v := p.Request(r); !v.Allow {
			b.Fatal(v)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	src := []byte(many(10_000))
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		if _, err := policy.Parse("bench", src); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLint(b *testing.B) {
	p := parse(b, many(10_000))
	for b.Loop() {
		p.Lint()
	}
}

func BenchmarkParseHost(b *testing.B) {
	for _, s := range []string{"api.example.com", "API.Example.com.", "bücher.example", "192.0.2.1"} {
		b.Run(s, func(b *testing.B) {
			for b.Loop() {
				if _, err := policy.ParseHost(s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCanonicalPath(b *testing.B) {
	for _, s := range []string{"/v1/repos/owner/name/contents", "/v1/%7eowner/./a%20b/../c"} {
		b.Run(s[1:3], func(b *testing.B) {
			for b.Loop() {
				if _, err := policy.CanonicalPath(s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A decision among 10,000 rules takes what one among ten takes. The bound is a hundred times what is measured, for slow machines.
func TestManyRules(t *testing.T) {
	p := parse(t, many(10_000))
	flow := policy.Flow{Host: "host9994.example.com", Port: 443, Protocol: policy.HTTPS}
	start, n := time.Now(), 10_000
	for range n {
		if v, _ := p.Connect(flow); !v.Allow {
			t.Fatalf("%+v", v)
		}
	}
	if d := time.Since(start) / time.Duration(n); d > 100*time.Microsecond {
		t.Errorf("a decision takes %v", d)
	}
}
