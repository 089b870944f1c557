//go:build linux

package gateway

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/link/nested"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/warren-sandbox/warren/internal/policy"
)

// astray is what a packet is that the stack drops before anybody decides on it. Nothing of it gets on, but that it was tried belongs on record.
type astray struct {
	to       netip.Addr
	port     uint16
	protocol policy.Protocol
	reason   string
}

// watcher looks at the packets of a card before its stack does.
type watcher struct {
	nested.Endpoint
	saw func(astray)
}

func watch(link stack.LinkEndpoint, saw func(astray)) *watcher {
	w := &watcher{saw: saw}
	w.Init(link, w)
	return w
}

// lookedAt is how much of a packet is looked at. What stands behind more headers than that is dropped as well, and not put on record.
const lookedAt = 256

// DeliverNetworkPacket implements stack.NetworkDispatcher.
func (w *watcher) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	if b, ok := pkt.Data().PullUp(min(pkt.Data().Size(), lookedAt)); ok {
		if a, is := goesAstray(protocol, b); is {
			w.saw(a)
		}
	}
	w.Endpoint.DeliverNetworkPacket(protocol, pkt)
}

// goesAstray says whether a packet, of which this is the beginning, is of a protocol that nothing answers, for a group of receivers, of which there is none, or from or to
// an address that none on a network has. ICMP is the stack's own, with which the sandbox's kernel also looks for its neighbours.
func goesAstray(network tcpip.NetworkProtocolNumber, b []byte) (a astray, is bool) {
	var proto byte
	var rest []byte
	var from netip.Addr
	piece := false // a later one of several
	switch {
	case network == ipv4.ProtocolNumber && len(b) >= 20 && len(b) >= int(b[0]&15)*4:
		proto, rest = b[9], b[int(b[0]&15)*4:]
		from, _ = netip.AddrFromSlice(b[12:16])
		a.to, _ = netip.AddrFromSlice(b[16:20])
		piece = binary.BigEndian.Uint16(b[6:])&0x1fff != 0
	case network == ipv6.ProtocolNumber && len(b) >= 40:
		from, _ = netip.AddrFromSlice(b[8:24])
		a.to, _ = netip.AddrFromSlice(b[24:40])
		var ok bool
		if proto, rest, piece, ok = behindHeaders(b[6], b[40:]); !ok {
			return a, false // the stack drops it, or reads on
		}
	default:
		return a, false
	}
	a.protocol = policy.Protocol(fmt.Sprintf("ip/%d", proto))
	switch proto {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return a, false
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		a.protocol = policy.TCP
		if proto == unix.IPPROTO_UDP {
			a.protocol = policy.UDP
		}
		if !piece && len(rest) >= 4 {
			a.port = binary.BigEndian.Uint16(rest[2:])
		}
		switch {
		case a.to.IsMulticast():
			a.reason = "the address is of a group of receivers, and a sandbox is alone on its network"
		case a.to.IsLoopback() || a.to.Is4In6():
			a.reason = "the address is of no network, and a packet for it leads nowhere"
		case from.IsMulticast() || from.IsLoopback() || from == broadcast:
			a.reason = fmt.Sprintf("the packet says that it is from %s, which sends none", from)
		// Of a datagram the gateway decides, and says so.
		case proto == unix.IPPROTO_TCP && (a.to == broadcast || a.to.IsUnspecified()):
			a.reason = "the address is of no receiver, and no connection leads to it"
		case proto == unix.IPPROTO_TCP && from.IsUnspecified():
			a.reason = fmt.Sprintf("the packet says that it is from %s, to which no answer leads", from)
		default:
			return a, false
		}
		return a, true
	}
	a.reason = fmt.Sprintf("the packet is neither of TCP, of UDP nor of ICMP, but of protocol %d, of which nothing passes", proto)
	return a, true
}

// broadcast is the address of all receivers.
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// behindHeaders goes through the headers that IPv6 may have before what it carries.
func behindHeaders(next byte, b []byte) (proto byte, rest []byte, piece, ok bool) {
	for {
		long := 8
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			if len(b) >= 2 {
				long += 8 * int(b[1])
			}
		case unix.IPPROTO_FRAGMENT:
			piece = piece || len(b) >= 4 && binary.BigEndian.Uint16(b[2:])>>3 != 0
		default:
			return next, b, piece, true
		}
		if len(b) < long {
			return 0, nil, false, false
		}
		if next, b = b[0], b[long:]; piece {
			return next, b, true, true // what follows is not the beginning of anything
		}
	}
}
