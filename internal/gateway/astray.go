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

// DeliverNetworkPacket implements stack.NetworkDispatcher.
func (w *watcher) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	if b, ok := pkt.Data().PullUp(min(pkt.Data().Size(), 64)); ok {
		if a, is := goesAstray(protocol, b); is {
			w.saw(a)
		}
	}
	w.Endpoint.DeliverNetworkPacket(protocol, pkt)
}

// goesAstray says whether a packet, of which this is the beginning, is of a protocol that nothing answers, or for a group of receivers, of which there is none.
// ICMP is the stack's own, with which the sandbox's kernel also looks for its neighbours.
func goesAstray(network tcpip.NetworkProtocolNumber, b []byte) (a astray, is bool) {
	var proto byte
	var rest []byte
	switch {
	case network == ipv4.ProtocolNumber && len(b) >= 20 && len(b) >= int(b[0]&15)*4:
		proto, rest = b[9], b[int(b[0]&15)*4:]
		a.to, _ = netip.AddrFromSlice(b[16:20])
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return a, false // the first piece of it was seen
		}
	case network == ipv6.ProtocolNumber && len(b) >= 40:
		proto, rest = b[6], b[40:]
		a.to, _ = netip.AddrFromSlice(b[24:40])
		switch proto {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT, unix.IPPROTO_DSTOPTS, unix.IPPROTO_NONE:
			return a, false // the stack reads on
		}
	default:
		return a, false
	}
	switch proto {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return a, false
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		if !a.to.IsMulticast() || len(rest) < 4 {
			return a, false
		}
		a.protocol = policy.TCP
		if proto == unix.IPPROTO_UDP {
			a.protocol = policy.UDP
		}
		a.port, a.reason = binary.BigEndian.Uint16(rest[2:]), "the address is of a group of receivers, and a sandbox is alone on its network"
		return a, true
	}
	a.protocol, a.reason = policy.Protocol(fmt.Sprintf("ip/%d", proto)), fmt.Sprintf("the packet is neither of TCP, of UDP nor of ICMP, but of protocol %d, of which nothing passes", proto)
	return a, true
}
