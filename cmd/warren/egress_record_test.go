//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver/drivertest/egress"
)

// recordAll is a ceiling of records that neither the attacks nor what sends all the while comes to: each denial is on record by itself then. Where there are more they are
// counted, see TestLedger in internal/gateway.
const recordAll = "WARREN_GATEWAY_RECORDS=1000"

// flowsAfter returns the records of flows of a sandbox after a number.
func (h *home) flowsAfter(n *internet, sandbox string, after int64) (list []warren.Event) {
	h.t.Helper()
	out := h.inLab(n, "events", sandbox, "--flows", "--json", "--after", fmt.Sprint(after))
	for line := range strings.Lines(out) {
		var e warren.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			h.t.Fatalf("%v of %.500q", err, line)
		}
		list = append(list, e)
	}
	return list
}

// at are the hosts under which a connection to an address can be on record.
func at(addr string) []string {
	hosts := []string{addr}
	for name, addrs := range egress.Names {
		if slices.Contains(addrs, addr) {
			hosts = append(hosts, name)
		}
	}
	return hosts
}

// refusedDial is what the kernel inside says of a connection that the gateway has refused.
var refusedDial = regexp.MustCompile(`dial tcp (\S+): connect: connection refused`)

// recorded checks that each try that was denied is on record as that, with its name or address. What cannot be told apart by these, such as many odd requests on
// connections to one host, has to be there as often as it was tried.
func (s *siege) recorded(t *testing.T, r egress.Report, list []warren.Event) {
	t.Helper()
	var denials []warren.Event
	for _, e := range list {
		// A handshake that the client ends is no denial of the gateway's, and is on record all the same.
		if strings.HasSuffix(e.Action, ".deny") || e.Action == "flow.close" && strings.Contains(e.Message, "no handshake of TLS") {
			denials = append(denials, e)
		}
		if strings.HasPrefix(e.Action, "record.") {
			t.Errorf("not everything is on record: %+v", e)
		}
		if e.Action == "flow.deny" && (e.Fields["host"] == "" && e.Fields["addr"] == "" || e.Fields["policy"] == "" || e.Message == "") {
			t.Errorf("a denial that does not say whom, of which policy and why: %+v", e)
		}
	}
	used := make([]bool, len(denials))
	find := func(is func(warren.Event) bool) bool {
		i := slices.IndexFunc(denials, is)
		if i >= 0 {
			used[i] = true
		}
		return i >= 0
	}
	to := func(e warren.Event, hostport string) bool {
		host, port, err := net.SplitHostPort(hostport)
		addr, _, _ := net.SplitHostPort(e.Fields["addr"])
		return err == nil && e.Fields["port"] == port && (slices.Contains(at(host), e.Fields["host"]) || e.Fields["addr"] == host || addr == host)
	}
	rest := map[string][]string{} // by host and port
	for _, try := range r.Tries {
		if slices.Contains(s.barred[try.Case], try.What) {
			continue // it has not come to the gateway
		}
		if m := refusedDial.FindStringSubmatch(try.Got); m != nil && len(try.To) == 0 && len(try.Signs) == 1 {
			try.To = m[1:]
		}
		for _, sign := range try.Signs {
			kind, text, _ := strings.Cut(sign, " ")
			ok := true
			switch kind {
			case "ip/1", "ip/58":
				// The gateway answers these itself.
			case "tcp", "udp":
				ok = try.What == "a second address that is private" || strings.Contains(try.What, "rebind.lab") || // these get on, to another address
					find(func(e warren.Event) bool { return e.Action != "dns.deny" && to(e, text) })
			case "dns":
				qtype, name, _ := strings.Cut(text, " ")
				ok = (qtype == "HTTPS" || qtype == "SVCB") && name == egress.Allowed+"." || // it is told that there is none
					find(func(e warren.Event) bool {
						if try.What == "the gateway's own resolver" {
							return e.Action == "flow.deny" && to(e, egress.DNS+":53")
						}
						got := e.Fields["host"] + "."
						if e.Fields["host"] == "" {
							got = wireName(strings.ReplaceAll(e.Fields["addr"], `\\`, `\`)) // the record escapes what is hostile
						}
						return e.Action == "dns.deny" && strings.EqualFold(got, name) && (name != egress.Allowed+"." || strings.Contains(e.Message, "type "+qtype+" "))
					})
			case "word":
				ok = find(func(e warren.Event) bool {
					return strings.Contains(e.Message+" "+e.Fields["path"]+" "+e.Fields["host"]+" "+e.Fields["addr"], text)
				})
				if !ok && len(try.To) > 0 {
					rest[try.To[0]] = append(rest[try.To[0]], try.Case+" "+try.What)
					ok = true
				}
				ok = ok || len(try.Signs) > 1 // it has not come to that
			case "secret":
				host := strings.TrimSpace(text)
				if !strings.Contains(try.Got, "HTTP/1.1 200 OK") { // no more than letters to whom it is passed through
					if len(try.To) > 0 {
						host = try.To[0]
					}
					rest[host] = append(rest[host], try.Case+" "+try.What)
				}
			case "used":
				ok = text == "/another" || find(func(e warren.Event) bool { return e.Action == "http.deny" && e.Fields["path"] == text })
			case "shown":
				// It was allowed, and came back without the value.
			default:
				ok = false
			}
			if !ok {
				t.Errorf("%s: that %s was denied is not on record (%s); it got %s", try.Case, try.What, sign, try.Got)
			}
		}
	}
	for host, tries := range rest {
		if a, err := netip.ParseAddrPort(host); err == nil {
			host = netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
		}
		n := 0
		for i, e := range denials {
			if !used[i] && e.Action != "dns.deny" && to(e, strings.ToLower(host)) {
				n++
			}
		}
		if n < len(tries) {
			t.Errorf("%d tries at %s were denied, of which %d are on record: %q", len(tries), host, n, tries)
		}
	}
}
