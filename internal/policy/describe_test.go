package policy

import (
	"fmt"
	"strings"
	"testing"
)

// Every rule, ceiling and secret of a file is told, with its line.
func TestDescribe(t *testing.T) {
	p, err := Parse("team", []byte(`extends: registries
allow:
  - {name: api, host: api.example.com, methods: [GET], paths: [/v1/**]}
  - "*.example.org"
deny:
  - bad.example.org
limits: {connections: 7, bytes_up: 1MiB}
secrets:
  - {secret: key, host: api.example.com, place: {header: Authorization}}
`))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, s := range p.Describe() {
		fmt.Fprintf(&b, "%s|%d|%s\n", s.Rule, s.Line, s.Detail)
	}
	got := b.String()
	for _, want := range []string{
		"|6|denied: bad.example.org; any protocol; any port\n", `"api"|3|allowed: api.example.com; https; port 443; GET; /v1/**; each request is looked into`, "|4|allowed: *.example.org; https; port 443\n",
		"extends|0|allowed besides: what the preset registries allows (", "|9|the secret key goes along to api.example.com", "limits|0|connections: at most 7\n", "limits|0|bytes_up: at most 1048576\n", "\n|0|all else is denied\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
	if p, err = Parse("nothing", []byte("extends: locked\n")); err != nil {
		t.Fatal(err)
	}
	if s := p.Describe(); len(s) != 2 || !strings.Contains(s[0].Detail, "locked allows nothing") {
		t.Errorf("%+v", s)
	}
	if s := (*Policy)(nil).Describe(); len(s) != 1 {
		t.Errorf("%+v", s)
	}
}
