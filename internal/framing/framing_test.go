package framing

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
)

// said is a connection on which something was said.
type said struct {
	net.Conn
	r io.Reader
}

func (s said) Read(b []byte) (int, error) { return s.r.Read(b) }

// hear returns what is handed on, the heads that were found, and how it ends.
func hear(r io.Reader) (string, []head, error) {
	c := New(said{r: r})
	b, err := io.ReadAll(c)
	return string(b), c.heads, err
}

const plain = "GET /a HTTP/1.1\r\nHost: a\r\n\r\n"

func TestPlain(t *testing.T) {
	for _, c := range []struct {
		text string
		want string
	}{
		{plain, "GET /a"},
		{plain + plain, "GET /a,GET /a"},
		{"POST /b HTTP/1.1\r\nContent-Length: 28\r\n\r\n" + plain + "\r\n\r\n" + plain, "POST /b,GET /a"},
		{"POST /b HTTP/1.1\r\ncontent-length:0\r\n\r\n" + plain, "POST /b,GET /a"},
		{"POST /b HTTP/1.1\r\nTransfer-Encoding:  Chunked \r\n\r\n1c\r\n" + plain + "\r\n1;a=\"b\"\r\nx\r\n0\r\nA: b\r\n\r\n" + plain, "POST /b,GET /a"},
		{"GET /a HTTP/1.0\r\n\r\n", "GET /a"},
		{"GET /a HTTP/1.1\r\nX: " + strings.Repeat("x", 100<<10) + "\r\n\r\n" + plain, "GET /a,GET /a"},
		{"GET /" + strings.Repeat("x", 100<<10) + " HTTP/1.1\r\n\r\n", "GET /" + strings.Repeat("x", 100<<10)},
	} {
		for name, r := range map[string]io.Reader{"at once": strings.NewReader(c.text), "byte by byte": iotest.OneByteReader(strings.NewReader(c.text)), "halves": iotest.HalfReader(strings.NewReader(c.text))} {
			text, heads, err := hear(r)
			var got []string
			for _, h := range heads {
				if h.fault != nil {
					t.Errorf("%.60q %s: %v", c.text, name, h.fault)
				}
				got = append(got, h.method+" "+h.target)
			}
			if text != c.text || err != nil || strings.Join(got, ",") != c.want {
				t.Errorf("%.60q %s: %.60q, %.80q, %v", c.text, name, text, got, err)
			}
		}
	}
}

func TestFaults(t *testing.T) {
	for text, want := range map[string]string{
		"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n":            "both",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n":            "both",
		"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n":                     "several Content-Lengths",
		"POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n":                                       "no number",
		"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n":                                         "no number",
		"POST / HTTP/1.1\r\nContent-Length: 0x1\r\n\r\n":                                        "no number",
		"POST / HTTP/1.1\r\nContent-Length:\r\n\r\n":                                            "no number",
		"POST / HTTP/1.1\r\nContent-Length: 9999999999999999999\r\n\r\n":                        "no number",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n":         "several Transfer-Encodings",
		"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n":                           "only chunked",
		"POST / HTTP/1.1\r\nTransfer-Encoding: \vchunked\r\n\r\n":                               "only chunked",
		"POST / HTTP/1.1\r\nTransfer-Encoding:" + strings.Repeat(" ", 2000) + "chunked\r\n\r\n": "only chunked",
		"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n":                                 "HTTP/1.0",
		"POST / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n":                                "no name and colon",
		"POST / HTTP/1.1\r\nTransfer\x00-Encoding: chunked\r\n\r\n":                             "null",
		"GET / HTTP/1.1\nHost: a\r\n\r\n":                                                       "carriage return",
		"GET / HTTP/1.1\r\nHost: a\n\r\n":                                                       "carriage return",
		"GET / HTTP/1.1\r\nHost: a\r\n\n":                                                       "carriage return",
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 5000) + "\n\r\n":                          "carriage return",
		"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n":                                               "carriage return",
		"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n":                                               "goes on",
		"GET / HTTP/1.1\r\nHost\r\n\r\n":                                                        "line 1 of its header begins with no name",
		"GET /  HTTP/1.1\r\n\r\n":                                                               "first line",
		"GET /\r\n\r\n":                                                                         "first line",
		"PRI * HTTP/2.0\r\n\r\n":                                                                "version",
		"GET / HTTP/1.1\r\n" + strings.Repeat("a: b\r\n", MaxHeaders+1) + "\r\n":                "more than 1000",
	} {
		for name, r := range map[string]io.Reader{"at once": strings.NewReader(text + plain), "byte by byte": iotest.OneByteReader(strings.NewReader(text + plain))} {
			got, heads, err := hear(r)
			if len(heads) != 1 || heads[0].fault == nil || !strings.Contains(heads[0].fault.Error(), want) {
				t.Errorf("%.90q %s: %+v, want %q", text, name, heads, want)
			}
			// Nothing that follows is handed on, and whoever waits for it is told.
			if _, ok := IsFault(err); !ok || got != text {
				t.Errorf("%.90q %s: ends with %v after %.90q", text, name, err, got)
			}
		}
	}
}

// TestChunks ends a body where its chunks are odd, before what is odd.
func TestChunks(t *testing.T) {
	const begin = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, body := range []string{
		"5\nhello\r\n0\r\n\r\n", "5;a\nb\r\nhello\r\n0\r\n\r\n", "5;a\rb\r\nhello\r\n", "0x5\r\nhello\r\n", "+5\r\nhello\r\n", "\r\nhello", " 5\r\nhello\r\n", "5 \r\nhello\r\n", "-1\r\n", "g\r\n",
		"1000000000000000\r\n", strings.Repeat("0", 300) + "5\r\nhello", "5;" + strings.Repeat("x", 300) + "\r\nhello\r\n", "0\r\nA: b\n\r\n", "5;" + strings.Repeat("x", 2000), "0\r\nA: " + strings.Repeat("x", maxTrailer) + "\r\n\r\n",
	} {
		for name, r := range map[string]io.Reader{"at once": strings.NewReader(begin + body + plain), "byte by byte": iotest.OneByteReader(strings.NewReader(begin + body + plain))} {
			_, heads, err := hear(r)
			if _, ok := IsFault(err); !ok || len(heads) != 1 || heads[0].fault != nil {
				t.Errorf("%.60q %s: %v, %+v", body, name, err, heads)
			}
		}
	}
	for _, body := range []string{"5\r\nhelloX\r\n0\r\n\r\n", "5\r\nhello\n0\r\n\r\n"} {
		if _, _, err := hear(strings.NewReader(begin + body)); err == nil {
			t.Errorf("%q is taken", body)
		}
	}
}

func TestCheck(t *testing.T) {
	c := New(said{r: strings.NewReader(plain + plain + plain)})
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Fatal(err)
	}
	if err := c.Check("GET", "/a"); err != nil {
		t.Error(err)
	}
	for _, ask := range [][2]string{{"POST", "/a"}, {"GET", "/b"}} {
		if err := c.Check(ask[0], ask[1]); !errors.As(err, new(*Error)) {
			t.Errorf("%s: %v", ask, err)
		}
	}
	if err := c.Check("GET", "/a"); err == nil {
		t.Error("a request that never came is taken")
	}
}

// FuzzScan says anything: it is found to be the same in pieces of any size, and what is handed on is what was said.
func FuzzScan(f *testing.F) {
	f.Add([]byte(plain+"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"+plain), uint8(3))
	f.Add([]byte("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n"+plain), uint8(1))
	f.Add([]byte("POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+plain), uint8(7))
	f.Add([]byte("\r\n\nGET / HTTP/1.1\n\n"), uint8(2))
	f.Fuzz(func(t *testing.T, text []byte, size uint8) {
		whole, heads, err := hear(bytes.NewReader(text))
		parts, again, perr := hear(pieces{bytes.NewReader(text), int(size)%16 + 1})
		if !bytes.HasPrefix(text, []byte(whole)) || (err == nil) != (perr == nil) || len(heads) != len(again) {
			t.Fatalf("at once: %q, %+v, %v; in pieces: %q, %+v, %v", whole, heads, err, parts, again, perr)
		}
		if err == nil && (whole != string(text) || parts != whole) {
			t.Fatalf("%q became %q and %q", text, whole, parts)
		}
		for i, h := range heads {
			o := again[i]
			if h.method != o.method || h.target != o.target || (h.fault == nil) != (o.fault == nil) {
				t.Fatalf("head %d: %+v and %+v", i, h, o)
			}
			if h.fault != nil && i < len(heads)-1 {
				t.Fatalf("more follows a fault: %+v", heads)
			}
		}
	})
}

// pieces hands out a few bytes at a time.
type pieces struct {
	r io.Reader
	n int
}

func (p pieces) Read(b []byte) (int, error) { return p.r.Read(b[:min(p.n, len(b))]) }
