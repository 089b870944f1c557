package channel_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/warren-sandbox/warren/internal/guest/channel"
)

// pair returns a channel between a host and a guest whose port 7 leads to the function.
func pair(t *testing.T, handle func(net.Conn)) *channel.Host {
	t.Helper()
	near, far := net.Pipe()
	go channel.Serve(far, channel.Config{Port: 7, Accept: func(c net.Conn) { go handle(c) }, Dial: func(context.Context, uint16) (net.Conn, error) {
		return nil, errors.New("nothing there")
	}})
	h, err := channel.NewHost(near)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func TestHostDial(t *testing.T) {
	h := pair(t, func(c net.Conn) {
		io.Copy(c, c)
		c.Close()
	})
	if _, err := h.Dial(t.Context(), 8); !errors.Is(err, channel.ErrRefused) {
		t.Errorf("a closed port: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := h.Dial(ctx, 7)
	if err != nil {
		t.Fatal(err)
	}
	cancel() // the connection outlives it
	io.WriteString(conn, "hello")
	conn.CloseWrite()
	if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	conn.Close()
	if _, err := h.Dial(ctx, 7); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// TestHostClose closes a connection from which the guest sends without end: the guest must hear of it, and the channel go on.
func TestHostClose(t *testing.T) {
	ended := make(chan error, 1)
	h := pair(t, func(c net.Conn) {
		_, err := io.Copy(c, zeroes{})
		ended <- err
	})
	conn, err := h.Dial(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	io.ReadFull(conn, make([]byte, 1000))
	conn.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the guest's writes end without an error")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the guest never hears that its reader has gone")
	}
	if again, err := h.Dial(t.Context(), 7); err != nil {
		t.Errorf("after that: %v", err)
	} else {
		again.Close()
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestHostileGuest is answered by what is no guest: by noise, by streams of its own, by the end.
func TestHostileGuest(t *testing.T) {
	for name, act := range map[string]func(net.Conn){
		"noise": func(c net.Conn) {
			go io.Copy(io.Discard, c)
			io.Copy(c, io.LimitReader(zeroes{}, 12*1000))
			c.Write([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"))
		},
		"a stream of its own": func(c net.Conn) {
			s, err := yamux.Server(c, channel.YamuxConfig())
			if err == nil {
				s.OpenStream()
			}
		},
		"the end": func(c net.Conn) { c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			defer far.Close()
			h, err := channel.NewHost(near)
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			go act(far)
			select {
			case <-h.Done():
			case <-time.After(30 * time.Second):
				t.Fatal("the channel stays")
			}
			if _, err := h.Dial(t.Context(), 7); err == nil {
				t.Error("a dial succeeds")
			}
		})
	}
}

// counted counts what is written to a connection at once.
type counted struct {
	net.Conn
	mu    sync.Mutex
	sizes []int
}

func (c *counted) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.sizes = append(c.sizes, len(b))
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// TestFrames sends short and long messages: a short one is one write, its header and its body.
func TestFrames(t *testing.T) {
	near, far := net.Pipe()
	c := &counted{Conn: far}
	go channel.Serve(c, channel.Config{Port: 7, Accept: func(conn net.Conn) {
		go func() {
			io.Copy(conn, conn)
			conn.Close()
		}()
	}})
	h, err := channel.NewHost(near)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	conn, err := h.Dial(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1, 100, 10_000, 100_000} {
		c.mu.Lock()
		c.sizes = nil
		c.mu.Unlock()
		data := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
		go conn.Write(data)
		got := make([]byte, size)
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes came back as others, %v", size, err)
		}
		c.mu.Lock()
		if joined := slices.Contains(c.sizes, 12+size); joined != (size <= 10_000) {
			t.Errorf("%d bytes were written as %v", size, c.sizes)
		}
		c.mu.Unlock()
	}
}
