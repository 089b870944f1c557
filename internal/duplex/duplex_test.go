package duplex_test

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/warren-sandbox/warren/internal/duplex"
)

// remarks is what net/http says of panics.
type remarks struct {
	mu   sync.Mutex
	said strings.Builder
}

func (r *remarks) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said.Write(p)
}

func (r *remarks) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said.String()
}

// serve starts a server, which has to do without such remarks.
func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	said := &remarks{}
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(said, "", 0)
	s.Start()
	t.Cleanup(func() {
		s.Close()
		if text := said.String(); text != "" {
			t.Errorf("net/http said:\n%s", text)
		}
	})
	return s.Listener.Addr().String()
}

type client struct {
	net.Conn
	r *bufio.Reader
}

func dial(t *testing.T, address string) client {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return client{c, bufio.NewReader(c)}
}

func (c client) send(t *testing.T, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
}

// answer reads an answer, and reports whether the connection goes on.
func (c client) answer(t *testing.T) (body string, goesOn bool) {
	t.Helper()
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("after %q: %v", data, err)
	}
	return string(data), !res.Close
}

const post = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

// TestEarly answers before the request has ended, which the client learns; what it sends of the rest costs it nothing.
func TestEarly(t *testing.T) {
	for name, read := range map[string]int{"nothing read": 0, "a part read": 3} {
		t.Run(name, func(t *testing.T) {
			address := serve(t, func(w http.ResponseWriter, r *http.Request) {
				w, r, body := duplex.Enable(w, r)
				defer body.Finish()
				io.ReadFull(r.Body, make([]byte, read))
				io.WriteString(w, "early")
			})
			for range 50 {
				c := dial(t, address)
				c.send(t, post+"3\r\nabc\r\n")
				body, goesOn := c.answer(t)
				if body != "early" || goesOn {
					t.Fatalf("got %q, and the connection goes on: %v", body, goesOn)
				}
				c.send(t, "0\r\n\r\n")
				c.Close()
			}
		})
	}
}

// TestLate has a goroutine that reads the body when the handler has returned, as a proxy's transport does. The client ends its request
// at any moment around the answer, and sends another one if it may.
func TestLate(t *testing.T) {
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		io.ReadFull(r.Body, make([]byte, 3))
		go io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, "late")
	})
	went := 0
	for i := range 300 {
		c := dial(t, address)
		c.send(t, post+"3\r\nabc\r\n")
		if i%3 != 0 {
			c.send(t, "0\r\n\r\n")
		}
		body, goesOn := c.answer(t)
		if i%3 == 0 {
			c.send(t, "0\r\n\r\n")
		}
		if body != "late" {
			t.Fatalf("got %q", body)
		}
		if goesOn {
			went++
			c.send(t, post+"3\r\nabc\r\n0\r\n\r\n")
			if body, _ := c.answer(t); body != "late" {
				t.Fatalf("the second time %q", body)
			}
		}
		c.Close()
	}
	if went == 0 {
		t.Error("no connection went on")
	}
}

// TestProxy has a proxy before a server that answers early or not at all.
func TestProxy(t *testing.T) {
	behind := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		if r.URL.Path == "/cut" {
			c, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				c.Close()
			}
			return
		}
		io.WriteString(w, "behind")
	})
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: behind})
		proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { io.WriteString(w, "broken") }
		proxy.ServeHTTP(w, r)
	})
	for path, want := range map[string]string{"/": "behind", "/cut": "broken"} {
		for i := range 60 {
			c := dial(t, address)
			c.send(t, strings.Replace(post, "/", path, 1)+"3\r\nabc\r\n")
			// A transport whose connection was cut waits for what it reads of the request.
			ends := i%2 == 0 || path == "/cut"
			if ends {
				c.send(t, "0\r\n\r\n")
			}
			body, goesOn := c.answer(t)
			if body != want {
				t.Fatalf("%s: got %q", path, body)
			}
			if !ends && goesOn {
				t.Fatalf("%s: the connection goes on in the midst of a request", path)
			}
			if goesOn {
				c.send(t, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				if body, _ := c.answer(t); body != "behind" {
					t.Fatalf("%s: the second time %q", path, body)
				}
			}
			c.Close()
		}
	}
}

// TestWhole carries both ways at once, and keeps the connection.
func TestWhole(t *testing.T) {
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		if r.ContentLength == 0 {
			io.WriteString(w, "none")
			return
		}
		for buf := make([]byte, 16); ; {
			n, err := r.Body.Read(buf)
			w.Write(buf[:n])
			if err != nil {
				return
			}
			http.NewResponseController(w).Flush()
		}
	})
	c := dial(t, address)
	for range 20 {
		c.send(t, post+"3\r\nabc\r\n0\r\n\r\n")
		if body, goesOn := c.answer(t); body != "abc" || !goesOn {
			t.Fatalf("got %q, goes on %v", body, goesOn)
		}
		c.send(t, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nde")
		if body, goesOn := c.answer(t); body != "de" || !goesOn {
			t.Fatalf("got %q, goes on %v", body, goesOn)
		}
		c.send(t, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if body, goesOn := c.answer(t); body != "none" || !goesOn {
			t.Fatalf("got %q, goes on %v", body, goesOn)
		}
	}
	// The echo of the first comes while the second is yet to be sent.
	c.send(t, post+"3\r\nabc\r\n")
	res, err := http.ReadResponse(c.r, nil)
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 3)
	if _, err := io.ReadFull(res.Body, first); err != nil || string(first) != "abc" {
		t.Fatalf("got %q, %v", first, err)
	}
	c.send(t, "2\r\nde\r\n0\r\n\r\n")
	if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "de" {
		t.Fatalf("got %q, %v", rest, err)
	}
}

// TestOver reads after the answer.
func TestOver(t *testing.T) {
	bodies := make(chan io.Reader, 1)
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w, r, body := duplex.Enable(w, r)
		defer body.Finish()
		bodies <- r.Body
		io.WriteString(w, "x")
	})
	c := dial(t, address)
	c.send(t, post+"3\r\nabc\r\n")
	c.answer(t)
	if n, err := (<-bodies).Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
		// It may be before the end of the handler that this one is read.
		if n != 1 || err != nil {
			t.Errorf("got %d bytes, %v", n, err)
		}
	}
}
