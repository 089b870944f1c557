//go:build linux

package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/warren-sandbox/warren/internal/policy"
)

// frames writes those of a client.
type frames struct {
	*http2.Framer
	out  bytes.Buffer
	head bytes.Buffer
	enc  *hpack.Encoder
}

func newFrames() *frames {
	f := &frames{}
	f.Framer, f.enc = http2.NewFramer(&f.out, nil), hpack.NewEncoder(&f.head)
	f.AllowIllegalWrites = true
	return f
}

// block encodes a header of names and values, one after the other.
func (f *frames) block(fields ...string) []byte {
	f.head.Reset()
	for i := 0; i < len(fields); i += 2 {
		f.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return bytes.Clone(f.head.Bytes())
}

// request begins a stream.
func (f *frames) request(stream uint32, end bool, fields ...string) {
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: f.block(fields...), EndHeaders: true, EndStream: end})
}

func plainFields(method, path string, more ...string) []string {
	return append([]string{":method", method, ":scheme", "https", ":authority", "api.lab", ":path", path}, more...)
}

// frameSeeds are what clients say after the preface, well and badly.
func frameSeeds() (list [][]byte) {
	add := func(say func(f *frames)) {
		f := newFrames()
		say(f)
		list = append(list, f.out.Bytes())
	}
	for _, fields := range [][]string{
		plainFields("GET", "/v1/a"), plainFields("GET", "/v1/a?b=c%20d", "x-a", "b", "cookie", "a=b", "cookie", "c=d"), plainFields("GET", "/v1/../v2/x"), plainFields("GET", "/v2/x"),
		plainFields("GET", "/v1/a", "transfer-encoding", "chunked"), plainFields("GET", "/v1/a", "connection", "x-a"), plainFields("GET", "/v1/a", "upgrade", "websocket"),
		plainFields("GET", "/v1/a", "host", "evil.lab"), plainFields("GET", "/v1/a", "X-Upper", "a"), plainFields("GET", "/v1/a", "x-a", "b\r\nhost: evil.lab"), plainFields("GET", "/v1/a", "x a", "b"),
		plainFields("GET", "/v1/a", ":path", "/v2/x"), plainFields("GET", "/v1/a b"), plainFields("GET", "https://evil.lab/v1/a"), plainFields("GET", "*"), plainFields("G T", "/v1/a"),
		plainFields("CONNECT", "/v1/a", ":protocol", "websocket"), {":method", "CONNECT", ":authority", "evil.lab:443"}, {":method", "GET", ":scheme", "https", ":path", "/v1/a"},
		{":method", "GET", ":scheme", "http", ":authority", "evil.lab", ":path", "/v1/a"}, {"x-a", "b"}, plainFields("GET", "/v1/a", "content-length", "5"), plainFields("GET", "/v1/a", "te", "gzip"),
	} {
		add(func(f *frames) { f.request(1, true, fields...) })
	}
	for _, lengths := range [][]string{nil, {"content-length", "5"}, {"content-length", "4"}, {"content-length", "6"}, {"content-length", "5", "content-length", "6"}, {"content-length", "+5"}, {"expect", "100-continue"}} {
		add(func(f *frames) {
			f.request(1, false, plainFields("POST", "/v1/a", lengths...)...)
			f.WriteData(1, true, []byte("hello"))
			f.request(3, true, plainFields("GET", "/v1/b")...)
		})
	}
	add(func(f *frames) { // trailers
		f.request(1, false, plainFields("POST", "/v1/a", "trailer", "x-t")...)
		f.WriteDataPadded(1, false, []byte("hello"), make([]byte, 20))
		f.request(1, true, "x-t", "a", ":path", "/v2/x")
		f.WriteData(1, true, []byte("more"))
	})
	add(func(f *frames) { // in pieces
		b := f.block(plainFields("GET", "/v1/a")...)
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:3], EndStream: true, PadLength: 9})
		f.WriteContinuation(1, false, b[3:5])
		f.WriteContinuation(1, true, b[5:])
	})
	add(func(f *frames) { // and without end
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block(plainFields("GET", "/v1/a")...), EndStream: true})
		for range 2000 {
			f.WriteContinuation(1, false, f.block("x-a", "b"))
		}
	})
	add(func(f *frames) { // begun and taken back
		for i := range uint32(300) {
			f.request(2*i+1, true, plainFields("GET", "/v1/a")...)
			f.WriteRSTStream(2*i+1, http2.ErrCodeCancel)
		}
	})
	add(func(f *frames) { // a table that grows, and a field of it many times
		f.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 1 << 30}, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
		fields := plainFields("GET", "/v1/a", "x-big", strings.Repeat("x", 4000))
		for range 1000 {
			fields = append(fields, "x-big", strings.Repeat("x", 4000))
		}
		f.request(1, true, fields...)
	})
	add(func(f *frames) { // frames of no use
		f.WritePing(false, [8]byte{1})
		f.WriteWindowUpdate(0, 1<<31-1)
		f.WriteWindowUpdate(0, 1<<31-1)
		f.WritePriority(1, http2.PriorityParam{StreamDep: 1, Weight: 255})
		f.WriteGoAway(5, http2.ErrCodeNo, []byte("bye"))
	})
	add(func(f *frames) {
		f.WriteData(7, true, []byte("to nobody"))
		f.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, BlockFragment: f.block(plainFields("GET", "/v1/a")...), EndHeaders: true})
		f.WriteRawFrame(0x77, 0xff, 1, []byte("unknown"))
		f.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1})
	})
	add(func(f *frames) { // longer than it may be
		f.out.Write([]byte{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1})
		f.out.WriteString(strings.Repeat("x", 1000))
	})
	return list
}

// panics fails a test when the server writes down that something has panicked, which it goes on after.
type panics struct {
	mu  sync.Mutex
	got string
}

func (p *panics) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes.Contains(b, []byte("panic")) && p.got == "" {
		p.got = string(b)
	}
	return len(b), nil
}

// FuzzFrames says any frames of HTTP/2 on an inspected connection. Nothing panics, what was begun ends with the connection, and the server behind sees requests of
// the plainest form only, each of which has been decided on and may be.
func FuzzFrames(f *testing.F) {
	for _, s := range frameSeeds() {
		f.Add(s)
	}
	l := newLab(f)
	l.name("api.lab", "11.1.1.1")
	server := &strictServer{}
	go server.serve(tls.NewListener(l.listen("11.1.1.1:443"), &tls.Config{Certificates: []tls.Certificate{l.cert("api.lab")}}))
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [GET, POST], paths: [/v1/**]}")
	card, err := l.g.card("one")
	if err != nil {
		f.Fatal(err)
	}
	oneByOne(card)
	found := &panics{}
	l.g.inspect.frames.ErrorLog = log.New(found, "", 0)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { ln.Close() })
	base, said, arrived := 0, 0, 0
	f.Cleanup(func() {
		// Else all would be refused for another reason than what is looked for.
		if said >= len(frameSeeds()) && arrived == 0 {
			f.Error("no request arrives, also none that may be")
		}
	})
	f.Fuzz(func(t *testing.T, text []byte) {
		said++
		raw, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		outside, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		flow := &flow{to: policy.Flow{Host: "api.lab", Port: 443, Protocol: policy.HTTPS}, inspected: true}
		if err := card.begin(context.Background(), flow); err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			l.g.inspect.serveTLS(flow, outside)
			outside.Close()
			card.done(flow)
			close(served)
		}()
		raw.SetDeadline(time.Now().Add(30 * time.Second))
		c := tls.Client(raw, &tls.Config{ServerName: "api.lab", RootCAs: in.roots, NextProtos: []string{"h2"}})
		if err := c.Handshake(); err != nil {
			t.Fatal(err)
		}
		heard := make(chan struct{}, 1)
		go func() {
			buf := make([]byte, 16<<10)
			for {
				_, err := c.Read(buf)
				select {
				case heard <- struct{}{}:
				default:
				}
				if err != nil {
					return
				}
			}
		}()
		// A frame of settings comes first, always.
		wrote := make(chan struct{})
		go func() {
			io.WriteString(c, http2.ClientPreface)
			http2.NewFramer(c, nil).WriteSettings()
			c.Write(text)
			close(wrote)
		}()
		select {
		case <-wrote:
		case <-served:
		case <-time.After(10 * time.Second):
			t.Fatal("what is said is not taken")
		}
		// What is answered shows that there is work.
		for quiet := false; !quiet; {
			select {
			case <-heard:
			case <-time.After(30 * time.Millisecond):
				quiet = true
			}
		}
		c.Close()
		select {
		case <-served:
		case <-time.After(20 * time.Second):
			t.Fatal("the connection does not end")
		}
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			card.mu.Lock()
			left := len(card.flows)
			card.mu.Unlock()
			if left == 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%d requests do not end", left)
			}
		}
		l.mu.Lock()
		entries := l.entries
		l.entries = nil
		l.mu.Unlock()
		decided, requests := decidedOn(entries)
		server.mu.Lock()
		for end := time.Now().Add(10 * time.Second); len(server.got) < requests && server.open > 0 && time.Now().Before(end); {
			server.mu.Unlock()
			card.forward.Load().CloseIdleConnections()
			time.Sleep(time.Millisecond)
			server.mu.Lock()
		}
		got, problems := server.got, server.problems
		server.got, server.problems = nil, nil
		server.mu.Unlock() // the server's connections end with it
		arrived += len(got)
		if len(problems) > 0 {
			t.Fatalf("the server saw what is no plain request: %q", problems)
		}
		for _, line := range got {
			line, _, _ = strings.Cut(line, "?")
			decided[line]--
			path := line[strings.LastIndexByte(line, ' ')+1:]
			if decided[line] < 0 || path != "/v1" && !strings.HasPrefix(path, "/v1/") {
				t.Fatalf("the server got %q, and what was decided on are %+v", got, entries)
			}
		}
		found.mu.Lock()
		defer found.mu.Unlock()
		if found.got != "" {
			t.Fatal(found.got)
		}
		if base == 0 {
			base = runtime.NumGoroutine()
		}
		card.forward.Load().CloseIdleConnections() // which are kept for a while, up to a bound
		if now := settled(base + 60); now > base+60 {
			t.Fatalf("%d goroutines, of %d at first", now, base)
		}
	})
}

// TestOddFramesOnRecord makes requests over HTTP/2 that the server refuses before anybody handles them: each is on record, and what is handled is there once.
func TestOddFramesOnRecord(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/large" {
			w.WriteHeader(http.StatusRequestHeaderFieldsTooLarge)
		}
	}), "api.lab")
	in := l.sandbox("one", "allow:\n  - {host: api.lab, methods: [GET, POST], paths: [/v1/**]}")
	large := strings.Repeat("y", 300<<10)
	shared := plainFields("GET", "/v1/a")
	for range 100 {
		shared = append(shared, "x-big", strings.Repeat("x", 4000))
	}
	for _, c := range []struct {
		what   string
		say    func(f *frames)
		reason string // of the only denial, "" for none
	}{
		{"allowed", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a")...) }, ""},
		{"denied", func(f *frames) { f.request(1, true, plainFields("GET", "/v2/x")...) }, "no rule allows"},
		{"400 by the gateway", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", "content-length", "1x")...) }, "Content-Length"},
		{"431 by the server behind", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/large")...) }, ""},
		{"taken back", func(f *frames) {
			f.request(1, false, plainFields("POST", "/v1/a")...)
			f.WriteRSTStream(1, http2.ErrCodeCancel)
		}, ""},
		{"connection", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", "connection", "close")...) }, "the server answered 400"},
		{"transfer-encoding", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", "transfer-encoding", "chunked")...) }, "the server answered 400"},
		{"no path", func(f *frames) { f.request(1, true, ":method", "GET", ":scheme", "https", ":authority", "api.lab") }, "PROTOCOL_ERROR"},
		{"an odd path", func(f *frames) { f.request(1, true, plainFields("GET", "evil")...) }, "PROTOCOL_ERROR"},
		{"an upper-case header", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", "X-Up", "a")...) }, "PROTOCOL_ERROR"},
		{"a late pseudo-header", func(f *frames) {
			f.request(1, true, ":method", "GET", ":scheme", "https", "a", "b", ":authority", "evil.lab", ":path", "/v1/a")
		}, "PROTOCOL_ERROR"},
		{"two authorities", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", ":authority", "evil.lab")...) }, "PROTOCOL_ERROR"},
		{"a user", func(f *frames) {
			f.request(1, true, ":method", "GET", ":scheme", "https", ":authority", "a@evil.lab", ":path", "/v1/a")
		}, "PROTOCOL_ERROR"},
		{"an odd scheme", func(f *frames) {
			f.request(1, true, ":method", "GET", ":scheme", "gopher", ":authority", "api.lab", ":path", "/v1/a")
		}, "PROTOCOL_ERROR"},
		{"an odd value", func(f *frames) { f.request(1, true, plainFields("GET", "/v1/a", "x", "a\nb")...) }, "PROTOCOL_ERROR"},
		{"a large header", func(f *frames) {
			b := f.block(plainFields("GET", "/v1/a", "x", large)...)
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:16000], EndStream: true})
			for b = b[16000:]; len(b) > 0; {
				n := min(len(b), 16000)
				f.WriteContinuation(1, n == len(b), b[:n])
				b = b[n:]
			}
		}, "_ERROR, and its connection was ended"},
		{"a header that is large when it is unpacked", func(f *frames) { f.request(1, true, shared...) }, "the server answered 431"},
		{"an odd frame", func(f *frames) { f.WriteData(7, true, []byte("to nobody")) }, "PROTOCOL_ERROR"},
	} {
		l.mu.Lock()
		l.entries = nil
		l.mu.Unlock()
		conn := tls.Client(in.connect(t, "api.lab", 443), &tls.Config{ServerName: "api.lab", RootCAs: in.roots, NextProtos: []string{"h2"}})
		f := newFrames()
		io.WriteString(&f.out, http2.ClientPreface)
		f.WriteSettings()
		c.say(f)
		f.WritePing(false, [8]byte{9})
		go conn.Write(f.out.Bytes())
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		// What is answered to the ping is written after what is answered to the request, or nothing is.
		answered, pinged := c.what == "taken back", false
		for read := http2.NewFramer(nil, conn); !answered || !pinged; {
			got, err := read.ReadFrame()
			if err != nil {
				break
			}
			switch got := got.(type) {
			case *http2.HeadersFrame, *http2.RSTStreamFrame, *http2.GoAwayFrame:
				answered = true
			case *http2.PingFrame:
				pinged = got.IsAck() || pinged
			}
			if _, over := got.(*http2.GoAwayFrame); over {
				break
			}
		}
		conn.Close()
		eventually(t, c.what+" has its end on record", func() bool { return l.has("flow.close", "api.lab") })
		var denied []string
		l.mu.Lock()
		for _, e := range l.entries {
			if e.Action == "http.deny" {
				denied = append(denied, e.Reason)
			}
		}
		l.mu.Unlock()
		if c.reason == "" && len(denied) > 0 || c.reason != "" && (len(denied) != 1 || !strings.Contains(denied[0], c.reason)) {
			t.Errorf("%s: as denials are on record %q, want one of %q", c.what, denied, c.reason)
		}
	}
	// What is no HTTP/2 at all.
	l.mu.Lock()
	l.entries = nil
	l.mu.Unlock()
	conn := tls.Client(in.connect(t, "api.lab", 443), &tls.Config{ServerName: "api.lab", RootCAs: in.roots, NextProtos: []string{"h2"}})
	io.WriteString(conn, "GET /v1/a HTTP/1.1\r\nHost: api.lab\r\n\r\n")
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	io.Copy(io.Discard, conn)
	conn.Close()
	eventually(t, "what is no HTTP/2 is on record", func() bool { return l.denied("what was said is no HTTP/2") })
}
