package channel_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/channel"
)

// sockets returns the two ends of a socket pair.
func sockets(t *testing.T, kind int) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, kind|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return conns[0], conns[1]
}

// TestRenew leaves a session in the middle of a frame in each direction, renews the channel, and uses the new session.
func TestRenew(t *testing.T) {
	near, far := sockets(t, syscall.SOCK_STREAM)
	ctl, theirs := sockets(t, syscall.SOCK_SEQPACKET)
	broken := make(chan error, 16)
	go channel.ServeRenewed(far, theirs, channel.Config{
		Port: 7,
		Accept: func(c net.Conn) {
			go func() {
				_, err := io.Copy(c, c)
				broken <- err
				c.Close()
			}()
		},
		Dial: func(context.Context, uint16) (net.Conn, error) { return nil, errors.New("nothing there") },
	})
	for round := range byte(3) {
		h, err := channel.NewHost(keep{near})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := h.Dial(t.Context(), 7)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		io.WriteString(conn, "hello")
		got := make([]byte, 5)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
			t.Fatalf("round %d: %q, %v", round, got, err)
		}
		// The host's session ends without a word, after the head of a frame whose body will not come.
		near.SetDeadline(time.Unix(1, 0))
		<-h.Done()
		near.SetDeadline(time.Time{})
		near.Write([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 10, 0, 'x'})

		ctl.Write([]byte("too short"))
		want := bytes.Repeat([]byte{round}, channel.RenewalSize)
		ctl.Write(want)
		answer := make([]byte, 100)
		ctl.SetReadDeadline(time.Now().Add(30 * time.Second))
		n, err := ctl.Read(answer)
		if err != nil || !bytes.Equal(answer[:n], want) {
			t.Fatalf("the answer is %x, %v", answer[:n], err)
		}
		select {
		case <-broken:
		case <-time.After(30 * time.Second):
			t.Fatal("the old session's stream goes on")
		}
		// What the old session has left is all there.
		near.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		io.Copy(io.Discard, near)
		near.SetReadDeadline(time.Time{})
	}
}

// keep is a connection that the end of a session leaves open.
type keep struct{ net.Conn }

func (k keep) Close() error { return k.Conn.SetDeadline(time.Unix(1, 0)) }
