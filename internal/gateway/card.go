//go:build linux

package gateway

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/warren-sandbox/warren/internal/tun"
)

// MTU of a card. It crosses no wire: large packets are what makes it fast.
const MTU = 65000

// The addresses on a card are the same for every sandbox, since no two share a wire: a fork keeps its own. They are of ranges that
// no network routes, and of which the gateway dials none.
var (
	// SandboxIPv4 and SandboxIPv6 are the sandbox's own addresses.
	SandboxIPv4 = netip.MustParseAddr("198.18.0.2")
	SandboxIPv6 = netip.MustParseAddr("fd77:6172:7265:6e::2")
	// GatewayIPv4 and GatewayIPv6 answer DNS on port 53, and nothing else.
	GatewayIPv4 = netip.MustParseAddr("198.18.0.1")
	GatewayIPv6 = netip.MustParseAddr("fd77:6172:7265:6e::1")
)

// wanted is how many bytes a card holds on their way. With the default of the kernel, three packets would fill it, and what does
// not fit is lost.
const wanted = 4 << 20

// NewCard makes the two ends of a card: a pair of sockets on which each message is an IP packet. Inside is for the sandbox, outside for the gateway.
func NewCard() (inside, outside *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a network card: %w", err)
	}
	for _, fd := range fds {
		for _, o := range [][2]int{{unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}, {unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}} {
			// Without the right to pass the host's limit it takes what that allows.
			if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[0], wanted) != nil {
				unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[1], wanted)
			}
		}
	}
	return os.NewFile(uintptr(fds[0]), "card"), os.NewFile(uintptr(fds[1]), "card"), nil
}

// endKind is what a gateway holds of a card.
type endKind int

const (
	// endSocket is one of a pair of sockets. Each end tells the other that it is gone.
	endSocket endKind = iota
	// endDevice is a network device in the sandbox's network namespace. It does not tell of the sandbox's end, since it keeps the namespace alive.
	endDevice
)

// kindOfEnd looks at what is to be served as a card.
func kindOfEnd(f *os.File) (endKind, error) {
	if tun.Is(f) {
		return endDevice, nil
	}
	if kind, err := unix.GetsockoptInt(int(f.Fd()), unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_SEQPACKET {
		return 0, errors.New("a card's end is a socket of packets in order, or a network device (TUN) without headers of its own, and this is neither")
	}
	return endSocket, nil
}

// nic is the only interface of a card's stack.
const nic tcpip.NICID = 1

const (
	// buffer is what a connection holds in each direction for a side that is slower than the other, at most; on a wire without delay more
	// makes nothing faster. It begins with beginBuffer, and stays with that beside many connections: memory is the host's.
	buffer      = 1 << 20
	beginBuffer = 256 << 10
	// fewConnections is how many may have large buffers.
	fewConnections = 64
)

// setBuffers sets how far the buffers of a stack with so many connections may grow.
func setBuffers(s *stack.Stack, connections int) tcpip.Error {
	most := buffer
	if connections > fewConnections {
		most = beginBuffer
	}
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: beginBuffer, Max: most}
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &receive); err != nil {
		return err
	}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: beginBuffer, Max: most}
	return s.SetTransportProtocolOption(tcp.ProtocolNumber, &send)
}

// newStack terminates what comes over a card. It takes every address for its own, so that a flow to anywhere ends here; it forwards nothing.
// fd stays the caller's, who may close it once the stack is closed and has been waited for. gone is called when the other end is closed, and saw
// for what the stack drops before anybody decides on it.
func newStack(fd int, kind endKind, gone func(), saw func(astray)) (*stack.Stack, stack.LinkEndpoint, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	fail := func(what string, err tcpip.Error) (*stack.Stack, stack.LinkEndpoint, error) {
		s.Destroy()
		return nil, nil, fmt.Errorf("the stack of a card: %s: %v", what, err)
	}
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true)
	// An old packet cannot turn up late on a pair of sockets, or a device that is read by one. What TIME_WAIT would cost: a stack without a listener
	// takes no new connection from a port that is in it, but drops or resets it, also when that lasts for a millisecond.
	linger := tcpip.TCPTimeWaitTimeoutOption(0)
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &linger} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fail("set an option", err)
		}
	}
	if err := setBuffers(s, 0); err != nil {
		return fail("set the size of buffers", err)
	}
	link, err := fdbased.New(&fdbased.Options{
		// Readv, and not several packets at a time, which takes the end of the other side for empty packets without end.
		FDs: []int{fd}, MTU: MTU, PacketDispatchMode: fdbased.Readv, ProcessorsPerChannel: 1,
		// Nothing is altered between two processes of one machine. A sandbox behind a device has the host's kernel, which verifies the sums of
		// what comes, and has made those of what it sends.
		TXChecksumOffload: kind == endSocket, RXChecksumOffload: true,
		ClosedFunc: func(tcpip.Error) { gone() },
	})
	if err != nil {
		s.Destroy()
		return nil, nil, fmt.Errorf("the stack of a card: %w", err)
	}
	link = watch(link, saw)
	if err := s.CreateNICWithOptions(nic, link, stack.NICOptions{Name: "card"}); err != nil {
		return fail("make the interface", err)
	}
	if err := s.SetPromiscuousMode(nic, true); err != nil {
		return fail("take all addresses", err)
	}
	if err := s.SetSpoofing(nic, true); err != nil {
		return fail("answer for all addresses", err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	return s, link, nil
}

// addrOf converts an address.
func addrOf(a tcpip.Address) netip.Addr {
	ip, _ := netip.AddrFromSlice(a.AsSlice())
	return ip.Unmap()
}
