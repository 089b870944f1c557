//go:build linux

package gateway

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// inUse is what the heap holds once what nobody needs is gone.
func inUse() uint64 {
	var m runtime.MemStats
	for range 2 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// most is how much more memory a test's gateway, client and server may hold together than before: a few buffers, and nothing that grows with what was said.
const most = 32 << 20

// endless writes text until nobody takes it any more, and returns how much that was.
func endless(w io.Writer, text string) (n int64) {
	b := []byte(strings.Repeat(text, 64<<10/len(text)))
	for n < 1<<30 {
		m, err := w.Write(b)
		n += int64(m)
		if err != nil {
			break
		}
	}
	return n
}

// TestEndlessRequests sends heads and chunks that do not end: the connection does, and what they are kept in is bounded (B40).
func TestEndlessRequests(t *testing.T) {
	l := newLab(t)
	l.name("plain.lab", "11.1.1.2")
	var served atomic.Int64
	l.web("11.1.1.2:80", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			served.Add(1)
		}
	}))
	in := l.sandbox("one", "allow:\n  - {host: plain.lab, protocol: http, inspect: true}\n")
	a, err := in.lookup("plain.lab")
	if err != nil {
		t.Fatal(err)
	}
	before := inUse()
	for name, c := range map[string]struct{ begin, text string }{
		"a line":        {"GET /", "x"},
		"one header":    {"GET / HTTP/1.1\r\nHost: plain.lab\r\nX: ", "x"},
		"headers":       {"GET / HTTP/1.1\r\nHost: plain.lab\r\n", "a: b\r\n"},
		"empty lines":   {"", "\r\n"},
		"a chunk":       {"POST / HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n", "0"},
		"an extension":  {"POST / HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n1;", "x"},
		"one trailer":   {"POST / HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", "x"},
		"many trailers": {"POST / HTTP/1.1\r\nHost: plain.lab\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", "a: b\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := in.dial(t.Context(), netip.AddrPortFrom(a, 80))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(time.Minute))
			go io.Copy(io.Discard, conn)
			io.WriteString(conn, c.begin)
			// What is on its way in a connection's buffers has been sent as well.
			if n := endless(conn, c.text); n > 8<<20 {
				t.Errorf("%d bytes were taken", n)
			}
			if more := int64(inUse()) - int64(before); more > most {
				t.Errorf("%d bytes are in use", more)
			}
		})
	}
	if n := served.Load(); n != 0 {
		t.Errorf("%d requests arrived whole", n)
	}
}

// TestSlowHeads sends heads of requests, and of answers, byte by byte without end: somebody gives up (B40).
func TestSlowHeads(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.name("plain.lab", "11.1.1.2")
	l.name("slow.lab", "11.1.1.3")
	l.web("11.1.1.1:443", hello("api"), "api.lab")
	l.web("11.1.1.2:80", hello("plain"))
	ended := make(chan struct{}, 8)
	l.serve("11.1.1.3:80", func(c net.Conn) {
		http.ReadRequest(bufio.NewReader(c))
		drip(c, "HTTP/1.1 200 OK\r\nX: ")
		ended <- struct{}{}
	})
	const short = 300 * time.Millisecond
	l.g.inspect.server.ReadHeaderTimeout, l.g.inspect.answerTime = short, short
	in := l.sandbox("one", "allow:\n  - {host: api.lab, inspect: true}\n  - {host: plain.lab, protocol: http, inspect: true}\n  - {host: slow.lab, protocol: http, inspect: true}\n")
	for name, c := range map[string]struct {
		conn  net.Conn
		begin string
	}{
		"plain": {in.connect(t, "plain.lab", 80), "GET / HTTP/1.1\r\nX: "},
		"TLS":   {in.tls(in.connect(t, "api.lab", 443), "api.lab"), "GET / HTTP/1.1\r\nX: "},
	} {
		dripped := make(chan struct{})
		go func() {
			drip(c.conn, c.begin)
			close(dripped)
		}()
		if _, err := io.Copy(io.Discard, c.conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: a head may take for ever", name)
		}
		c.conn.Close()
		<-dripped
	}
	// The server's.
	r, err := in.client().Get("http://slow.lab/")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(r.Body)
	r.Body.Close()
	if r.StatusCode != http.StatusGatewayTimeout || !strings.Contains(string(b), "too long") {
		t.Errorf("a server that answers without end: %d %q", r.StatusCode, b)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the connection to a server that answers without end is kept")
	}
}

// drip writes a text, and then a byte now and then, until nobody takes it or a minute has passed.
func drip(w io.Writer, text string) {
	io.WriteString(w, text)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if _, err := io.WriteString(w, "x"); err != nil {
			return
		}
	}
}

// TestOversizeAnswers has a server answer with what is too large or does not end: the sandbox gets an error, the server a closed connection, and nothing of it
// is kept (B40).
func TestOversizeAnswers(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.name("web.lab", "11.1.1.4")
	type answer struct{ begin, text string }
	answers := map[string]answer{
		"/line":      {"HTTP/1.1 200 ", "x"},
		"/head":      {"HTTP/1.1 200 OK\r\nX: ", "x"},
		"/headers":   {"HTTP/1.1 200 OK\r\n", "a: b\r\n"},
		"/chunk":     {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0"},
		"/extension": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", "x"},
		"/tiny":      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "1;" + strings.Repeat("x", 1000) + "\r\nx\r\n"},
		"/trailer":   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", "x"},
		"/both":      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n", "x"},
		"/early":     {"", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"},
		"/socket":    {"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "x"},
		"/lengths":   {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "x"},
	}
	taken := make(chan int64, 1)
	l.serve("11.1.1.3:80", func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		c.SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(c, answers[r.URL.Path].begin)
		taken <- endless(c, answers[r.URL.Path].text)
	})
	many := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/head" {
			w.Header().Set("X", strings.Repeat("x", 1<<20))
			return
		}
		for i := range 100_000 {
			w.Header()[fmt.Sprintf("X-%d", i)] = []string{"x"}
		}
	})
	l.web("11.1.1.4:443", many, "web.lab")
	l.web("11.1.1.4:80", many)
	in := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: http, inspect: true}\n  - {host: web.lab, protocol: http, inspect: true}\n  - {host: web.lab, inspect: true}\n")
	before := inUse()
	for path := range answers {
		t.Run(path[1:], func(t *testing.T) {
			r, err := in.client().Get("http://raw.lab" + path)
			if err == nil {
				_, err = io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			if err == nil && r.StatusCode != http.StatusBadGateway {
				t.Errorf("an answer arrives whole: %d", r.StatusCode)
			}
			select {
			case n := <-taken:
				// What is on its way in sockets was taken as well.
				if n > 32<<20 {
					t.Errorf("%d bytes were taken from the server", n)
				}
			case <-time.After(2 * time.Minute):
				t.Error("the connection to the server is kept")
			}
		})
	}
	for _, url := range []string{"http://web.lab/head", "http://web.lab/headers", "https://web.lab/head", "https://web.lab/headers"} {
		status, _, err := in.get(url)
		if err != nil || status != http.StatusBadGateway {
			t.Errorf("%s: %d, %v, want 502", url, status, err)
		}
	}
	in.client().CloseIdleConnections()
	if more := int64(inUse()) - int64(before); more > most {
		t.Errorf("%d bytes are in use", more)
	}
}

// TestBombs packs much into little, where the gateway looks inside: it ends when it is far larger than it was, and is never kept (B40).
func TestBombs(t *testing.T) {
	const size = 256 << 20
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	io.Copy(z, io.LimitReader(zeros{}, size))
	z.Close()
	l := newLab(t)
	l.name("bank.lab", "11.1.1.1")
	arrived := make(chan int64, 1)
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			n, err := io.Copy(io.Discard, r.Body)
			if err == nil {
				arrived <- n
			}
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(bomb.Bytes())
	}), "bank.lab")
	in := l.sandbox("one", "allow:\n  - bank.lab\nsecrets:\n  - {secret: key, hosts: [bank.lab], place: {header: Authorization}}\n", l.secret("key", canary, holder))
	before := inUse()
	r, err := in.client().Get("https://bank.lab/")
	if err != nil {
		t.Fatal(err)
	}
	got := int64(0)
	buf := make([]byte, 64<<10)
	for next := int64(0); err == nil; {
		var n int
		n, err = r.Body.Read(buf)
		if got += int64(n); got > next {
			next += 32 << 20
			if more := int64(inUse()) - int64(before); more > most {
				t.Errorf("after %d bytes %d are in use", got, more)
			}
		}
	}
	r.Body.Close()
	if errors.Is(err, io.EOF) || got >= size || got > 1<<20+200*int64(bomb.Len()) {
		t.Errorf("of %d bytes, packed into %d, %d came, and then %v", size, bomb.Len(), got, err)
	}
	eventually(t, "the bomb is on record", func() bool { return l.denied("unpacks") })
	// Upwards, where a placeholder is looked for.
	req, err := http.NewRequest("POST", "https://bank.lab/", bytes.NewReader(bomb.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Encoding", "gzip")
	if r, err := in.client().Do(req); err == nil {
		r.Body.Close()
		if r.StatusCode < 400 {
			t.Errorf("a request that is a bomb is answered with %d", r.StatusCode)
		}
	}
	select {
	case n := <-arrived:
		t.Errorf("%d bytes of a request that is a bomb arrived as a whole", n)
	default:
	}
	if more := int64(inUse()) - int64(before); more > most {
		t.Errorf("%d bytes are in use", more)
	}
}

// denied says whether a request is on record that was denied for a reason.
func (l *lab) denied(reason string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.Action == "http.deny" && strings.Contains(e.Reason, reason) {
			return true
		}
	}
	return false
}

// TestCrowdedQuestions asks the name server with few bytes that say much: they are refused by their header or their length, before anything is made of them, and on
// record all the same.
func TestCrowdedQuestions(t *testing.T) {
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	in := l.sandbox("one", "allow: [allowed.lab]")
	// One long name, to which all other records point.
	name := append(bytes.Repeat(append([]byte{63}, bytes.Repeat([]byte{'x'}, 63)...), 3), 3, 'l', 'a', 'b', 0)
	long := strings.Repeat(strings.Repeat("x", 63)+".", 3) + "lab."
	// message has so many bytes, and n questions or n records in a later section, all for that name; its header has said of them.
	message := func(size, section int, said uint16) []byte {
		m := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, name...)
		m = append(m, 0, 1, 0, 1)
		for {
			next := []byte{0xc0, 12, 0, 1, 0, 1}
			if section > 0 {
				next = append(next, 0, 0, 0, 9, 0, 0)
			}
			if len(m)+len(next) > size {
				break
			}
			m = append(m, next...)
		}
		binary.BigEndian.PutUint16(m[4+2*section:], said)
		return append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...)
	}
	ask := func(m []byte) (answer *dns.Msg, err error) {
		c, err := in.dial(t.Context(), netip.AddrPortFrom(GatewayIPv4, 53))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Write(m); err != nil {
			return nil, err
		}
		return (&dns.Conn{Conn: c}).ReadMsg()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for what, c := range map[string]struct {
		message []byte
		reason  string
		names   int
	}{
		"a long message":      {message(65535, 0, 10000), "the message has 65535 bytes", 0},
		"one byte too long":   {message(maxMessage+6, 0, 1), "bytes, and a question has at most 1024", 0},
		"many questions":      {message(maxMessage, 0, 100), "the message has 100 questions", maxTold},
		"two questions":       {message(219, 0, 2), "the message has 2 questions", 2},
		"claimed questions":   {message(0, 0, 65535), "the message has 65535 questions", 1},
		"many answers":        {message(maxMessage, 1, 50), "the message has 50, 0 and 0 records", 1},
		"many authorities":    {message(maxMessage, 2, 50), "the message has 0, 50 and 0 records", 1},
		"many more":           {message(maxMessage, 3, 50), "the message has 0, 0 and 50 records", 1},
		"three more than one": {message(0, 3, 3), "the message has 0, 0 and 3 records", 1},
	} {
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
		m, err := ask(c.message)
		if c.names == 0 && err == nil || c.names > 0 && (err != nil || m.Rcode != dns.RcodeFormatError || len(m.Answer) > 0) {
			t.Errorf("%s: the answer is %v, %v", what, m, err)
		}
		l.denials(1)
		l.mu.Lock()
		for _, e := range l.entries {
			if e.Action != "dns.deny" || !strings.Contains(e.Reason, c.reason) || c.names > 0 && e.Addr != long {
				t.Errorf("%s: on record is %+v", what, e)
			}
		}
		if n := len(l.entries); n != max(c.names, 1) {
			t.Errorf("%s: %d denials are on record, want %d", what, n, max(c.names, 1))
		}
		l.mu.Unlock()
	}
	// A question that is as long as may be is answered, with what clients add.
	q := new(dns.Msg)
	q.SetQuestion("allowed.lab.", dns.TypeA)
	q.SetEdns0(dns.DefaultMsgSize, false)
	q.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, 900)}}
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if m, err := ask(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)); err != nil || m.Rcode != dns.RcodeSuccess || len(m.Answer) != 1 {
		t.Errorf("a padded question is answered with %v, %v", m, err)
	}
	runtime.ReadMemStats(&after)
	// What the first of them was unpacked into had 11 MB.
	if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
		t.Errorf("%d bytes were made of ten messages", n)
	}
}
