package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
)

// wait is for what may never come.
const wait = 2 * time.Second

// lookup asks the resolver of the sandbox for a name.
func lookup(name string) (netip.Addr, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeA)
	c := dns.Client{Timeout: wait}
	r, _, err := c.Exchange(m, egress.Resolver+":53")
	if err != nil {
		return netip.Addr{}, err
	}
	for _, rr := range r.Answer {
		if a, ok := rr.(*dns.A); ok {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			return addr, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s: %s", name, dns.RcodeToString[r.Rcode])
}

// dial connects to a name: where the resolver says, or where the attacker knows that it is.
func dial(name string, port int) (net.Conn, error) {
	a, err := lookup(name)
	if err != nil {
		return dialAddr(egress.Addresses(name)[0], port)
	}
	c, err := dialAddr(a.String(), port)
	if err == nil {
		c.(*hosted).host = net.JoinHostPort(name, fmt.Sprint(port))
	}
	return c, err
}

func dialAddr(addr string, port int) (net.Conn, error) {
	host := net.JoinHostPort(addr, fmt.Sprint(port))
	c, err := net.DialTimeout("tcp", host, wait)
	if err != nil {
		return nil, err
	}
	return &hosted{c, host}, nil
}

// hosted is a connection of which it is known whom it was made to.
type hosted struct {
	net.Conn
	host string
}

// told is to whom words were said.
var told = struct {
	sync.Mutex
	hosts map[string][]string
}{hosts: map[string][]string{}}

// tell notes to whom the words in a text are said.
func tell(c net.Conn, text string) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	n, ok := c.(*hosted)
	if !ok {
		return
	}
	told.Lock()
	defer told.Unlock()
	for _, w := range egress.Word.FindAllString(text, -1) {
		if !slices.Contains(told.hosts[w], n.host) {
			told.hosts[w] = append(told.hosts[w], n.host)
		}
	}
}

// toldTo returns to whom one of the words of signs was said.
func toldTo(signs []string) (hosts []string) {
	told.Lock()
	defer told.Unlock()
	for _, s := range signs {
		for _, w := range egress.Word.FindAllString(s, -1) {
			hosts = append(hosts, told.hosts[w]...)
		}
	}
	return hosts
}

// say writes texts to a connection, waiting a moment for what comes back after each, and returns the beginning of that.
func say(c net.Conn, err error, texts ...string) string {
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	var got []byte
	for _, text := range texts {
		tell(c, text)
		c.SetWriteDeadline(time.Now().Add(wait))
		if _, err := io.WriteString(c, text); err != nil {
			return fmt.Sprintf("%q, then %v", got, err)
		}
		c.SetReadDeadline(time.Now().Add(wait / 4))
		buf := make([]byte, 4096)
		n, err := c.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Sprintf("%q, then %v", got, err)
		}
	}
	return fmt.Sprintf("%q", got)
}

// secure says texts within TLS.
func secure(c net.Conn, err error, sni string, texts ...string) string {
	if err != nil {
		return err.Error()
	}
	for _, text := range texts {
		tell(c, text) // it may not come to that
	}
	t, err := handshake(c, sni)
	return say(t, err, texts...)
}

// handshake begins TLS, or closes the connection.
func handshake(c net.Conn, sni string) (net.Conn, error) {
	c.SetDeadline(time.Now().Add(2 * wait))
	t := tls.Client(c, &tls.Config{ServerName: sni, InsecureSkipVerify: true, MinVersion: tls.VersionTLS10})
	if err := t.Handshake(); err != nil {
		c.Close()
		return nil, err
	}
	return t, nil
}

// inTurn makes requests over one connection, each when the answer to the one before has come whole.
func inTurn(c net.Conn, err error, sni string, texts ...string) string {
	if err != nil {
		return err.Error()
	}
	t, err := handshake(c, sni)
	if err != nil {
		return err.Error()
	}
	defer t.Close()
	var got strings.Builder
	for r := bufio.NewReader(t); len(texts) > 0; texts = texts[1:] {
		tell(t, texts[0])
		t.SetDeadline(time.Now().Add(2 * wait))
		if _, err := io.WriteString(t, texts[0]); err != nil {
			return fmt.Sprintf("%s, then %v", got.String(), err)
		}
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			return fmt.Sprintf("%s, then %v", got.String(), err)
		}
		body, err := io.ReadAll(io.LimitReader(res.Body, 4096))
		fmt.Fprintf(&got, "%s %s %q; ", res.Proto, res.Status, body)
		if err != nil {
			return fmt.Sprintf("%s, then %v", got.String(), err)
		}
	}
	return got.String()
}

// request is a GET of HTTP/1.1.
func request(host, path string, headers ...string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n" + strings.Join(append(headers, "", ""), "\r\n")
}

// get makes a request that is allowed, and returns the status and the body.
func get(scheme, name string) string {
	port := map[string]int{"http": 80, "https": 443}[scheme]
	a, err := lookup(name)
	for i := 0; i < 3 && err != nil; i++ {
		a, err = lookup(name) // of a machine with much to do an answer may be late
	}
	if err != nil {
		return err.Error()
	}
	c, err := dialAddr(a.String(), port)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * wait))
	if scheme == "https" {
		c = tls.Client(c, &tls.Config{ServerName: strings.TrimSuffix(name, "."), InsecureSkipVerify: true})
	}
	io.WriteString(c, request(name, "/", "Connection: close"))
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err.Error()
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s", r.StatusCode, body)
}

// carry fetches the bytes from a host, and sends them there, and prints the sums of what arrived, and how many of 1,000 small requests over one
// connection were answered.
func carry(args []string) {
	name := args[0]
	c := http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DialContext: func(context.Context, string, string) (net.Conn, error) { return dial(name, 443) }, MaxConnsPerHost: 1,
	}}
	sum := sha256.New()
	r, err := c.Get("https://" + name + "/bytes")
	if err == nil {
		_, err = io.Copy(sum, r.Body)
		r.Body.Close()
	}
	if err != nil {
		fail(err.Error())
	}
	fmt.Printf("%x\n", sum.Sum(nil))
	r, err = c.Post("https://"+name+"/sum", "application/octet-stream", egress.Bytes())
	if err != nil {
		fail(err.Error())
	}
	io.Copy(os.Stdout, r.Body)
	r.Body.Close()
	good := 0
	for range 1000 {
		r, err := c.Get("https://" + name + "/")
		if err != nil {
			fail(err.Error())
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err == nil && string(body) == name+" is here" {
			good++
		}
	}
	fmt.Printf("\n%d\n", good)
}

// datagram sends one, and waits for no answer.
func datagram(network, addr string, port int, text string) string {
	lc := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_BROADCAST, 1) })
	}}
	c, err := lc.Dial(network, net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		return err.Error()
	}
	// Sent again after what may have been a refusal, as a program would.
	c.SetReadDeadline(time.Now().Add(wait / 20))
	if _, err := c.Read(make([]byte, 2048)); err != nil {
		io.WriteString(c, text)
		return err.Error()
	}
	return "an answer"
}

// packet sends one of a protocol through a raw socket, or for echo requests through one of their own.
func packet(proto int, addr string, payload []byte) string {
	a := netip.MustParseAddr(addr)
	domain, to := syscall.AF_INET6, syscall.Sockaddr(&syscall.SockaddrInet6{Addr: a.As16()})
	if a.Is4() {
		domain, to = syscall.AF_INET, &syscall.SockaddrInet4{Addr: a.As4()}
	}
	fd, err := syscall.Socket(domain, syscall.SOCK_RAW, proto)
	if err != nil && (proto == syscall.IPPROTO_ICMP || proto == syscall.IPPROTO_ICMPV6) {
		fd, err = syscall.Socket(domain, syscall.SOCK_DGRAM, proto)
	}
	if err != nil {
		return "socket: " + err.Error()
	}
	defer syscall.Close(fd)
	if err := syscall.Sendto(fd, payload, 0, to); err != nil {
		return "send: " + err.Error()
	}
	return "sent"
}

// echo is an echo request with something in it.
func echo(kind byte, text string) []byte {
	b := append([]byte{kind, 0, 0, 0, 0x12, 0x34, 0, 1}, text...)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum))
	return b
}

// hello is a ClientHello with each of the names, and a word where a server reads which protocols there are.
type hello struct {
	names  []string
	word   string
	old    bool // TLS 1.0
	pad    int  // bytes that mean nothing
	record int  // bytes of a record at most, all if 0
	ech    bool // with an encrypted hello inside, which here is made of words
}

func vec8(b []byte) []byte  { return append([]byte{byte(len(b))}, b...) }
func vec16(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }

func (h hello) bytes() string {
	version := []byte{3, 3}
	if h.old {
		version = []byte{3, 1}
	}
	var exts []byte
	ext := func(id uint16, body []byte) { exts = append(binary.BigEndian.AppendUint16(exts, id), vec16(body)...) }
	if h.names != nil {
		var list []byte
		for _, n := range h.names {
			list = append(append(list, 0), vec16([]byte(n))...)
		}
		ext(0, vec16(list))
	}
	ext(10, vec16([]byte{0, 29, 0, 23}))
	ext(11, vec8([]byte{0}))
	ext(13, vec16([]byte{4, 3, 8, 4, 4, 1, 2, 1}))
	ext(16, vec16(vec8([]byte(h.word))))
	if !h.old {
		ext(43, vec8([]byte{3, 4, 3, 3}))
	}
	if h.ech {
		// An outer one, with ciphers, a configuration, a key, and what is encrypted.
		ext(0xfe0d, slices.Concat([]byte{0, 0, 1, 0, 1, 7}, vec16(make([]byte, 32)), vec16([]byte(strings.Repeat(h.word+" ", 8)))))
	}
	if h.pad > 0 {
		ext(21, make([]byte, h.pad))
	}
	body := append(append(version, make([]byte, 32)...), 0)
	body = append(body, vec16([]byte{0x13, 1, 0xc0, 0x2f, 0xc0, 0x2b, 0xc0, 0x13, 0, 0x2f})...)
	body = append(append(body, 1, 0), vec16(exts)...)
	whole := append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
	if h.record == 0 {
		h.record = 16 << 10
	}
	var out []byte
	for len(whole) > 0 {
		n := min(h.record, len(whole))
		out = append(append(out, 22, 3, 1), vec16(whole[:n])...)
		whole = whole[n:]
	}
	return string(out)
}

// query asks a server for a name on the wire.
func query(network, server, name string, qtype uint16) string {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), qtype)
	return exchange(network, server, m)
}

func exchange(network, server string, m *dns.Msg) string {
	c := dns.Client{Net: network, Timeout: wait}
	r, _, err := c.Exchange(m, net.JoinHostPort(server, "53"))
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s %v", dns.RcodeToString[r.Rcode], r.Answer)
}
