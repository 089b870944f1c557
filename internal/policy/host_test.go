package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/warren-sandbox/warren/internal/policy"
)

var label63 = strings.Repeat("a", 63)

var hosts = []struct{ in, want string }{
	// Spellings of one name.
	{"allowed.lab", "allowed.lab"},
	{"ALLOWED.lab", "allowed.lab"},
	{"allowed.lab.", "allowed.lab"},
	{"allowed。lab", "allowed.lab"},
	{"allowed．lab", "allowed.lab"},
	{"allowed｡lab｡", "allowed.lab"},
	{"ａｌｌｏｗｅｄ.lab", "allowed.lab"},
	{"Bücher.example", "xn--bcher-kva.example"},
	{"xn--bcher-kva.example", "xn--bcher-kva.example"},
	{"XN--BCHER-KVA.example", "xn--bcher-kva.example"},
	{"straße.de", "xn--strae-oqa.de"},
	{"日本語.jp", "xn--wgv71a119e.jp"},
	{"東京カフェabc.jp", "xn--abc-2i4bta6wt32qmo2b.jp"},
	{"xn--80ak6aa92e.com", "xn--80ak6aa92e.com"}, // all Cyrillic: another name, and not a mixed one
	{"localhost", "localhost"},
	{"_dmarc.example.com", "_dmarc.example.com"},
	{"my_bucket.example.com", "my_bucket.example.com"},
	{"r3---sn-abc.example.com", "r3---sn-abc.example.com"},
	{"1.example", "1.example"},
	{"0x7f.example", "0x7f.example"},
	{label63 + ".example", label63 + ".example"},
	{strings.Repeat("a.", 126) + "a", strings.Repeat("a.", 126) + "a"},
	{strings.Repeat("a.", 126) + "a.", strings.Repeat("a.", 126) + "a"},
	// Addresses.
	{"192.0.2.1", "192.0.2.1"},
	{"::1", "::1"},
	{"2001:DB8:0:0::1", "2001:db8::1"},
	{"::ffff:127.0.0.1", "127.0.0.1"},
	{"::ffff:7f00:1", "127.0.0.1"},
	{"64:ff9b::7f00:1", "64:ff9b::7f00:1"},
	// Refused.
	{"", ""},
	{".", ""},
	{"..", ""},
	{".lab", ""},
	{"allowed.lab..", ""},
	{"allowed..lab", ""},
	{"allowed.lab.。", ""},
	{"evil.lab\x00.allowed.lab", ""},
	{"evil.lab\r\n.allowed.lab", ""},
	{"evil.lab\n", ""},
	{" allowed.lab", ""},
	{"allowed.lab ", ""},
	{"al lowed.lab", ""},
	{"allowed%2elab", ""},
	{"user@allowed.lab", ""},
	{"allowed.lab/", ""},
	{"allowed.lab\\evil", ""},
	{"allowed.lab:443", ""},
	{"[::1]", ""},
	{"[::1]:443", ""},
	{"fe80::1%eth0", ""},
	{"*.allowed.lab", ""},
	{"allowed.lab?x", ""},
	{"allowed.lab#x", ""},
	{"\x1b[31mallowed.lab", ""},
	{`"allowed.lab"`, ""},
	{"-allowed.lab", ""},
	{"allowed-.lab", ""},
	{label63 + "a.example", ""},
	{strings.Repeat("a.", 127) + "a", ""},
	{strings.Repeat("x", 10_000), ""},
	{"\xff.lab", ""},
	{"allowed\u202e.lab", ""},
	{"127.1", ""},
	{"127.0.1", ""},
	{"2130706433", ""},
	{"0x7f.0.0.1", ""},
	{"0x7f000001", ""},
	{"0X7F.1", ""},
	{"0177.0.0.1", ""},
	{"192.0.2.01", ""},
	{"192.0.2.1.", ""},
	{"192.0.2.256", ""},
	{"1.2.3.4.5", ""},
	{"example.0x", ""},
	{"example.123", ""},
	{"１２７.0.0.1", ""},
	{"127。0。0。1", ""},
	{"ⓔxample⒈com", ""},
	{"xn--a.example", ""},
	{"xn--.example", ""},
	{"xn--example-.com", ""},
	{"раypal.com", ""},         // Cyrillic р and а before Latin
	{"xn--ypal-43d9g.com", ""}, // the same in Punycode
	{"gοοgle.com", ""},         // Greek ο
	{"a\u200db.com", ""},
	{"אa.com", ""},
	{"::1::", ""},
	{":", ""},
	{"1:2", ""},
	{"é:1", ""},
}

func TestParseHost(t *testing.T) {
	for _, tt := range hosts {
		h, err := policy.ParseHost(tt.in)
		if tt.want == "" {
			if err == nil {
				t.Errorf("ParseHost(%.80q) = %q, want an error", tt.in, h)
			} else if msg := err.Error(); strings.ContainsAny(msg, "\r\n\x00\x1b\u202e") || len(msg) > 700 {
				t.Errorf("ParseHost(%.80q): the error is not fit for a log: %q", tt.in, msg)
			}
			continue
		}
		if err != nil || string(h) != tt.want {
			t.Errorf("ParseHost(%.80q) = %q, %v; want %q", tt.in, h, err, tt.want)
			continue
		}
		if again, err := policy.ParseHost(string(h)); again != h || err != nil {
			t.Errorf("ParseHost(%q) = %q, %v; want the same again", h, again, err)
		}
	}
}

// The table notices a canonicaliser that only folds case and drops the dot.
func TestParseHostTwin(t *testing.T) {
	missed := 0
	for _, tt := range hosts {
		if got := strings.TrimSuffix(strings.ToLower(tt.in), "."); got != tt.want {
			missed++
		}
	}
	if missed < 50 {
		t.Errorf("a naive canonicaliser fails only %d of %d cases", missed, len(hosts))
	}
}

func TestHostAddr(t *testing.T) {
	for in, want := range map[policy.Host]string{
		"192.0.2.1": "192.0.2.1", "2001:db8::1": "2001:db8::1", "example.com": "", "example.com1": "", "": "",
		"fe80::1%eth0": "", "::ffff:192.0.2.1": "", "192.0.2.01": "",
	} {
		a, ok := in.Addr()
		if ok != (want != "") || ok && a != netip.MustParseAddr(want) {
			t.Errorf("Host(%q).Addr() = %v, %v; want %q", in, a, ok, want)
		}
	}
}

// dnsRoundTrip packs a name as DNS does and reads it back.
func dnsRoundTrip(h policy.Host) (string, error) {
	name, err := dnsmessage.NewName(string(h) + ".")
	if err != nil {
		return "", err
	}
	m := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}
	b, err := m.Pack()
	if err != nil {
		return "", err
	}
	// The labels by hand, because a dot or a NUL inside of one would not show in the text.
	var labels []string
	for i := 12; b[i] != 0; i += 1 + int(b[i]) {
		labels = append(labels, string(b[i+1:i+1+int(b[i])]))
	}
	var back dnsmessage.Message
	if err := back.Unpack(b); err != nil {
		return "", err
	}
	if got := strings.TrimSuffix(back.Questions[0].Name.String(), "."); got != strings.Join(labels, ".") {
		return "", fmt.Errorf("the labels are %q, the name %q", labels, got)
	}
	return strings.Join(labels, "."), nil
}

const differential = `
allow:
  - allowed.lab
  - "*.wild.lab"
  - xn--bcher-kva.example
  - 192.0.2.1
deny:
  - host: evil.wild.lab
`

// agree holds ParseHost, the policy and DNS against each other for one spelling.
func agree(p *policy.Policy, s string) error {
	h, err := policy.ParseHost(s)
	if err != nil {
		// What was not parsed is not allowed either by who forgets to parse.
		raw := policy.Host(s)
		if p.Lookup(raw).Allow {
			return fmt.Errorf("%q is refused by ParseHost (%v) and allowed by Lookup", s, err)
		}
		if v, _ := p.Connect(policy.Flow{Host: raw, Port: 443, Protocol: policy.HTTPS}); v.Allow {
			return fmt.Errorf("%q is refused by ParseHost (%v) and allowed by Connect", s, err)
		}
		return nil
	}
	if again, err := policy.ParseHost(string(h)); err != nil || again != h {
		return fmt.Errorf("%q is %q, which is %q, %v", s, h, again, err)
	}
	flow := policy.Flow{Host: h, Port: 443, Protocol: policy.HTTPS}
	connect, _ := p.Connect(flow)
	request := p.Request(policy.Request{Flow: flow, Method: "GET", Path: "/"})
	if connect.Allow != request.Allow {
		return fmt.Errorf("%q: Connect says %+v, Request %+v", s, connect, request)
	}
	name := string(h)
	want := name == "allowed.lab" || name == "xn--bcher-kva.example" || name == "192.0.2.1" ||
		strings.HasSuffix(name, ".wild.lab") && name != "evil.wild.lab"
	if connect.Allow != want {
		return fmt.Errorf("%q is %q: Connect says %+v", s, h, connect)
	}
	if a, ok := h.Addr(); ok {
		if p.Lookup(h).Allow {
			return fmt.Errorf("%q is an address and may be looked up", s)
		}
		if a.String() != name {
			return fmt.Errorf("%q is %q and dials %s", s, h, a)
		}
		return nil
	}
	if lookup := p.Lookup(h); lookup.Allow != connect.Allow {
		return fmt.Errorf("%q: Lookup says %+v, Connect %+v", s, lookup, connect)
	}
	got, err := dnsRoundTrip(h)
	if err != nil {
		return fmt.Errorf("%q is %q, which DNS refuses: %v", s, h, err)
	}
	if got != name {
		return fmt.Errorf("%q is %q, and %q in DNS", s, h, got)
	}
	return nil
}

func parse(t testing.TB, src string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse("test", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAgree(t *testing.T) {
	t.Parallel()
	p := parse(t, differential)
	for _, tt := range hosts {
		if err := agree(p, tt.in); err != nil {
			t.Error(err)
		}
	}
	// A million names of pieces that have confused parsers before; the same ones each time.
	pieces := []string{
		"allowed", "allowed.lab", "wild", ".wild.lab", "evil", "lab", ".", ".", "。", "．", "\x00", "-", "--", "xn--", "xn--bcher-kva", "bücher", "example", "1", "0", "255", "0x7f", "017",
		"LAB", "ß", "р", "a", "_", "%", "@", "/", "\\", " ", ":", "::ffff:", "[", "]", "\u00ad", "\u202e", "\xff", "ⅷ", "192.0.2.1", "\r\n",
	}
	const n = 250_000
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			allowed, parsed := 0, 0
			random := rand.New(rand.NewPCG(seed, 2))
			var b strings.Builder
			for range n {
				b.Reset()
				for range 1 + random.IntN(6) {
					b.WriteString(pieces[random.IntN(len(pieces))])
				}
				if err := agree(p, b.String()); err != nil {
					t.Fatal(err)
				}
				if h, err := policy.ParseHost(b.String()); err == nil {
					parsed++
					if v, _ := p.Connect(policy.Flow{Host: h, Port: 443, Protocol: policy.HTTPS}); v.Allow {
						allowed++
					}
				}
			}
			if allowed < n/200 || parsed < n/50 {
				t.Errorf("of %d names %d parse and %d are allowed; the test has lost its point", n, parsed, allowed)
			}
		})
	}
}

// Look-alikes and the wildcard; the twin is the end of the text, as which a wildcard is often compared.
func TestPattern(t *testing.T) {
	p := parse(t, "allow: ['*.allowed.lab']")
	missed := 0
	for name, want := range map[string]bool{
		"a.allowed.lab": true, "a.b.allowed.lab": true, "allowed.lab": false, "evilallowed.lab": false, "allowed.lab.evil.lab": false,
		"a.allowed.lab.evil.lab": false, "a.allowed.labs": false, "aallowed.lab": false, "a-allowed.lab": false, "xallowed.lab": false,
	} {
		h, err := policy.ParseHost(name)
		if err != nil {
			t.Fatal(err)
		}
		if v, _ := p.Connect(policy.Flow{Host: h, Port: 443, Protocol: policy.HTTPS}); v.Allow != want || p.Lookup(h).Allow != want {
			t.Errorf("%s: %+v", name, v)
		}
		if strings.HasSuffix(name, "allowed.lab") != want {
			missed++
		}
	}
	if missed < 4 {
		t.Errorf("a naive wildcard fails only %d cases", missed)
	}
}
