// Package egress is the world in which attacks on a sandbox's network are judged: names and addresses of an internet of the test's own, which the
// program that attacks (in attack) and the lab that counts what arrives have to agree on. Nothing of it exists outside of a network namespace.
//
// An attack says beforehand which signs it leaves where it succeeds: packets to an address, questions for a name, words that a server reads. In a
// sandbox the lab must see no sign at all, and in the twin, where the same program runs with no gateway in between, every one of them.
package egress

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Resolver is the name server of sandboxes, and Gateway6 the gateway's other address. In the twin the lab's servers answer there.
const (
	Resolver = "198.18.0.1"
	Gateway6 = "fd77:6172:7265:6e::1"
)

// Addresses of the lab. Host has the machine's own, from which it also sends; DNS is where the gateway asks for names.
const (
	Host4 = "11.9.9.9"
	Host6 = "2a00:9::9"
	DNS   = "11.1.1.53"
	Evil  = "11.6.6.6"
	Evil6 = "2a00:6::6"
)

// Allowed are the names that the policy of the attacked sandbox allows and that answer: the first over https and inspected, Passed over https and
// passed through, Plain over http.
const (
	Allowed = "allowed.lab"
	Passed  = "passed.lab"
	Plain   = "plain.lab"
	Wild    = "a.wild.lab" // by *.wild.lab
)

// Bank is granted a secret, on port 443 and below /echo. Branch is another name of it.
const (
	Bank   = "bank.lab"
	Branch = "branch.lab"
	// TokenVariable has what the sandbox sends in place of the secret. In the twin, where it is the secret, it begins with TwinPrefix.
	TokenVariable = "BANK_TOKEN"
	TwinPrefix    = "vault+"
)

// Heads and Bodies are the ways in which the bank's answers have the value.
var (
	Heads  = []string{"header", "cookie", "location", "trailer"}
	Bodies = []string{"plain", "pieces", "gzip", "deflate", "events", "lines", "base64", "base64url", "basic", "url", "json", "html", "hex", "HEX"}
)

// Names are those of the lab with an address of their own; all others are at Evil. The second group is allowed too, and leads where no name may.
// The first answer for rebind.lab is another than those that follow.
var Names = map[string][]string{
	Allowed: {"11.1.1.1"}, Passed: {"11.1.1.2"}, Plain: {"11.1.1.3"}, Wild: {"11.1.1.4"}, Bank: {"11.1.1.8"}, Branch: {"11.1.1.10"},

	"rebind.lab": {"10.6.15.1"}, "mixed.lab": {"11.1.1.5", "fd00:6::15"}, "alias.lab": {"10.6.15.2"},
	"loop.lab": {"127.0.0.1"}, "loop6.lab": {"::1"}, "ten.lab": {"10.6.13.1"}, "shared.lab": {"100.64.13.1"}, "link.lab": {"169.254.13.1"}, "unique.lab": {"fd00:6::13"},
	"testnet.lab": {"192.0.2.13"}, "reserved.lab": {"240.6.13.1"}, "own.lab": {Host4}, "own6.lab": {Host6}, "mapped.lab": {"::ffff:10.6.13.2"},
	"meta.lab": {"169.254.169.254"}, "meta6.lab": {"fd00:ec2::254"}, "alibaba.lab": {"100.100.100.200"}, "azure.lab": {"168.63.129.16"},
}

// First is what rebind.lab is at first.
const First = "11.1.1.6"

// Servers says whether an address is that of a server that the policy allows.
func Servers(a netip.Addr) bool { return netip.MustParsePrefix("11.1.1.0/28").Contains(a) }

// Addresses returns those of a name.
func Addresses(name string) []string {
	if a := Names[name]; a != nil {
		return a
	}
	return []string{Evil}
}

// Word is what attacks let servers read. Where one arrives, an attack has succeeded.
var Word = regexp.MustCompile(`canary-[a-z0-9-]+`)

// Marker returns a word of a case.
func Marker(name string) string { return "canary-" + name }

// Read, Packet and Question are signs: a server has read a word, a packet has come to an address, a name has been asked for.
func Read(word string) string { return "word " + word }

// Packet is the sign of one over TCP, of which the first of a connection counts, or UDP.
func Packet(network, address string, port int) string {
	return network + " " + netip.AddrPortFrom(netip.MustParseAddr(address).WithZone("").Unmap(), uint16(port)).String()
}

// Other is the sign of a packet of another protocol, by its number.
func Other(proto int, address string) string { return "ip/" + strconv.Itoa(proto) + " " + address }

// Question is the sign of a question, which has the type and the name as it is written in files.
func Question(qtype, name string) string { return "dns " + qtype + " " + name }

// Secret is the sign of a value that a server at an address has read, Used that of one in a request for a path, and Shown that of one that came back.
func Secret(address string, port int) string {
	return "secret " + netip.AddrPortFrom(netip.MustParseAddr(address).Unmap(), uint16(port)).String()
}

// Used is told with Secret.
func Used(path string) string { return "used " + path }

// Shown is told with Secret.
func Shown(kind string) string { return "shown " + kind }

// Name writes the bytes of a name as files do, in one way.
func Name(name string) string {
	var b strings.Builder
	for _, c := range []byte(name) {
		if c == '.' || c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "\\%03d", c)
		}
	}
	return strings.ReplaceAll(b.String(), "..", ".") + "."
}

// Start are the signs of the first thing that a sandbox does.
var Start = []string{Packet("udp", "11.6.30.1", 9999), Packet("udp", "2a00:6::30", 9999), Packet("tcp", "11.6.30.1", 443), Question("TXT", Marker("b30.evil.lab."))}

// OwnKeys and Flood are cases that need a policy of their own, and run where they are named alone: credentials of the sandbox's own, and names below a wildcard,
// as many as FloodVariable says.
const (
	OwnKeys       = "B37"
	Flood         = "B08 wild"
	FloodVariable = "FLOOD_NAMES"
)

// Bytes are 64 MiB that are the same each time.
func Bytes() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), 64<<20) }

// Try is one thing that an attack does.
type Try struct {
	Case, What string
	// Signs are what the lab sees where it succeeds, each of them.
	Signs []string
	// Got is what came of it for the attacker.
	Got string
	// To are the hosts to which it said one of its words, with the port.
	To []string `json:",omitempty"`
	// Back is all that came back, where that matters.
	Back []byte `json:",omitempty"`
}

// Report is what the program that attacks prints, as JSON. Controls are requests that are allowed, by their URL, with what came back, and Charge what came back where the secret was
// to be used.
type Report struct {
	Tries    []Try
	Controls map[string]string
	Charge   string
}
