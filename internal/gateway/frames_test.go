//go:build linux

package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log"
	"net"
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
	found := &panics{}
	l.g.inspect.server.ErrorLog = log.New(found, "", 0)
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
		decided, requests := map[string]int{}, 0
		for _, e := range entries {
			if e.Action == "http.request" {
				decided[e.Method+" api.lab "+e.Path]++
				requests++
			}
		}
		server.mu.Lock()
		defer server.mu.Unlock()
		for end := time.Now().Add(10 * time.Second); len(server.got) < requests && server.open > 0 && time.Now().Before(end); {
			server.mu.Unlock()
			card.forward.Load().CloseIdleConnections()
			time.Sleep(time.Millisecond)
			server.mu.Lock()
		}
		got, problems := server.got, server.problems
		server.got, server.problems = nil, nil
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
		if now := settled(base + 60); now > base+60 {
			t.Fatalf("%d goroutines, of %d at first", now, base)
		}
	})
}
