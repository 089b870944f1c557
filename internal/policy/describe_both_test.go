package policy

import (
	"strings"
	"testing"
)

// A block beside a host is not open by itself, and does not read as if it were.
func TestDescribeHostAndBlock(t *testing.T) {
	for source, want := range map[string]string{
		"allow: [{host: api.lab, cidr: 10.231.0.0/24}]":              "allowed: api.lab, also where it resolves to 10.231.0.0/24; ",
		"allow: [{cidr: 10.231.0.0/24, protocol: tcp, ports: [22]}]": "allowed: 10.231.0.0/24; tcp",
	} {
		p, err := Parse("lab", []byte(source))
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Describe()[0].Detail; !strings.HasPrefix(got, want) {
			t.Errorf("%s is described as %q, want %q", source, got, want)
		}
	}
}
