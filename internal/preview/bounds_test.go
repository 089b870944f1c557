package preview

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// listenRaw serves a port of a sandbox with a program that speaks as it likes.
func (r *rig) listenRaw(id string, port uint16, handle func(net.Conn, *http.Request)) {
	r.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(time.Minute))
				if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					handle(c, req)
				}
			}()
		}
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[fmt.Sprintf("%s %d", id, port)] = l
}

// endless writes a text until nobody takes it, and returns how much that was.
func endless(w io.Writer, text string) (n int64) {
	b := []byte(strings.Repeat(text, 64<<10/len(text)))
	for n < 1<<30 {
		m, err := w.Write(b)
		if n += int64(m); err != nil {
			break
		}
	}
	return n
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

func inUse() uint64 {
	var m runtime.MemStats
	for range 2 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestOversize has a program in a sandbox answer with what is too large or does not end: whoever looks gets an error, the program a closed connection, and
// nothing of it is kept (B40).
func TestOversize(t *testing.T) {
	r := newRig(t, nil)
	for what, c := range map[string]struct{ begin, text string }{
		"line":      {"HTTP/1.1 200 ", "x"},
		"header":    {"HTTP/1.1 200 OK\r\nX: ", "x"},
		"headers":   {"HTTP/1.1 200 OK\r\n", "a: b\r\n"},
		"early":     {"", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"},
		"chunk":     {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0"},
		"extension": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", "x"},
		"trailer":   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", "x"},
		"lengths":   {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "x"},
		"encodings": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "x"},
		"socket":    {"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n", "x"},
	} {
		t.Run(what, func(t *testing.T) {
			taken := make(chan int64, 1)
			r.listenRaw(boxA, 3000, func(conn net.Conn, _ *http.Request) {
				io.WriteString(conn, c.begin)
				taken <- endless(conn, c.text)
			})
			before := inUse()
			req, err := http.NewRequestWithContext(t.Context(), "GET", r.s.URL(boxA, 3000), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+adaToken)
			res, err := r.client().Do(req)
			if err == nil {
				_, err = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			if err == nil && res.StatusCode != http.StatusBadGateway {
				t.Errorf("an answer arrives whole: %s", res.Status)
			}
			select {
			case n := <-taken:
				// What is on its way in sockets was taken as well.
				if n > 32<<20 {
					t.Errorf("%d bytes were taken from the program", n)
				}
			case <-time.After(2 * time.Minute):
				t.Error("the connection to the program is kept")
			}
			if more := int64(inUse()) - int64(before); more > 16<<20 {
				t.Errorf("%d bytes are in use", more)
			}
		})
	}
}

// TestSlow has visitors and programs say the heads of what they want byte by byte, without end.
func TestSlow(t *testing.T) {
	const short = 300 * time.Millisecond
	r := newRig(t, func(o *Options) { o.Answer, o.Head = short, short })
	ended := make(chan struct{}, 1)
	r.listenRaw(boxA, 3000, func(c net.Conn, _ *http.Request) {
		drip(c, "HTTP/1.1 200 OK\r\nX: ")
		ended <- struct{}{}
	})
	res, body := r.do("GET", r.s.URL(boxA, 3000), "Authorization: Bearer "+adaToken)
	if res.StatusCode != http.StatusGatewayTimeout {
		t.Errorf("a program that answers without end: %s: %s", res.Status, body)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the connection to a program that answers without end is kept")
	}
	c, err := net.Dial("tcp", r.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	dripped := make(chan struct{})
	go func() {
		drip(c, "GET / HTTP/1.1\r\nX: ")
		close(dripped)
	}()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a visitor may take for ever")
	}
	<-dripped
}

// TestStrangersReadNothing has strangers ask over HTTP/2 and give the answers no window: nothing of their requests is kept, no more than some wait, and none for ever.
func TestStrangersReadNothing(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Domain, o.Secure = "preview.lab", true })
	name := "3000-" + nobody + ".preview.lab"
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	const conns, streams, size = 8, 200, 48 << 10
	gone := make(chan error, conns)
	for range conns {
		config := r.tls.Clone()
		config.NextProtos, config.ServerName = []string{"h2"}, name
		conn, err := tls.Dial("tcp", r.l.Addr().String(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var out, head bytes.Buffer
		f, enc := http2.NewFramer(&out, nil), hpack.NewEncoder(&head)
		io.WriteString(&out, http2.ClientPreface)
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		go func() {
			conn.SetReadDeadline(time.Now().Add(time.Minute))
			_, err := io.Copy(io.Discard, conn)
			gone <- err
		}()
		for s := range uint32(streams) {
			head.Reset()
			for _, kv := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", name}, {":path", "/"}, {"x-much", strings.Repeat("~", size)}} {
				enc.WriteField(hpack.HeaderField{Name: kv[0], Value: kv[1]})
			}
			b := head.Bytes()
			for first := true; len(b) > 0; first = false {
				n := min(len(b), 16000)
				if first {
					f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*s + 1, BlockFragment: b[:n], EndStream: true, EndHeaders: n == len(b)})
				} else {
					f.WriteContinuation(2*s+1, n == len(b), b[:n])
				}
				b = b[n:]
			}
		}
		// At once, since the first answer ends what the connection takes.
		if _, err := conn.Write(out.Bytes()); err != nil {
			t.Log(err)
		}
	}
	for end := time.Now().Add(8 * time.Second); r.s.refusals.Waiting() == 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if n := r.s.refusals.Waiting(); n == 0 || n > maxRefusing+conns {
		t.Errorf("%d refusals wait", n)
	}
	time.Sleep(time.Second)
	if more := heap() - before; more > conns*streams*size/3 {
		t.Errorf("%d MiB are kept of %d", more>>20, conns*streams*size>>20)
	}
	for range conns {
		select {
		case err := <-gone:
			var slow net.Error
			if errors.As(err, &slow) && slow.Timeout() {
				t.Error("a stranger's connection does not end")
			}
		case <-time.After(30 * time.Second):
			t.Fatal("a stranger's connection does not end")
		}
	}
	if n := r.s.refusals.Waiting(); n != 0 {
		t.Errorf("%d refusals wait for ever", n)
	}
}
