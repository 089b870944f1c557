//go:build linux

package keeper

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
)

// guestEnds returns a line and the guest's ends of it.
func guestEnds(t *testing.T) (l *line, channel, control *net.UnixConn) {
	t.Helper()
	l, err := newLine()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	var conns []*net.UnixConn
	for _, fd := range []int{channelFD, controlFD} {
		c, err := net.FileConn(l.theirs()[fd])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		conns = append(conns, c.(*net.UnixConn))
	}
	l.theirChannel.Close()
	l.theirCtrl.Close()
	return l, conns[0], conns[1]
}

// TestRenewHostile begins a channel anew with guests that answer wrongly, not at all or without end.
func TestRenewHostile(t *testing.T) {
	for name, c := range map[string]struct {
		guest func(channel, control *net.UnixConn)
		want  string
	}{
		"another answer": {func(_, control *net.UnixConn) {
			control.Read(make([]byte, renewalSize))
			control.Write(make([]byte, renewalSize))
		}, "something else"},
		"too long an answer": {func(_, control *net.UnixConn) {
			b := make([]byte, 100*renewalSize)
			control.Read(b)
			control.Write(b)
		}, "something else"},
		"the end": {func(_, control *net.UnixConn) { control.Close() }, ""},
		"the end of the channel": {func(channel, control *net.UnixConn) {
			b := make([]byte, renewalSize)
			control.Read(b)
			channel.Close()
			control.Write(b)
		}, "EOF"},
		"noise without end": {func(channel, control *net.UnixConn) {
			b := make([]byte, renewalSize)
			control.Read(b)
			go io.Copy(channel, zeroes{})
			go io.Copy(channel, zeroes{})
			control.Write(b)
		}, "without end"},
	} {
		t.Run(name, func(t *testing.T) {
			l, channel, control := guestEnds(t)
			go c.guest(channel, control)
			ch, err := renew(l.takeHost(), l.takeControl())
			if ch != nil {
				ch.session.Close()
			}
			if name == "noise without end" && err == nil {
				return // a guest that was slower than the keeper; its noise is no channel
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestRenewLeftOver begins a channel anew after a session that has left half a frame.
func TestRenewLeftOver(t *testing.T) {
	l, channel, control := guestEnds(t)
	go func() {
		b := make([]byte, renewalSize)
		control.Read(b)
		channel.Write(bytes.Repeat([]byte{0xff}, 100_000))
		control.Write(b)
		s, err := yamux.Server(channel, yamux.DefaultConfig())
		if err != nil {
			return
		}
		if st, err := s.AcceptStream(); err == nil {
			io.ReadFull(st, make([]byte, 4))
			st.Write([]byte{dialConnected})
		}
	}()
	ch, err := renew(l.takeHost(), l.takeControl())
	if err != nil {
		t.Fatal(err)
	}
	defer ch.session.Close()
	if _, err := ch.dial(80, nil); err != nil {
		t.Error(err)
	}
}

// TestPlacePassed starts a process as gVisor starts its own, with the descriptors for the guest in either order.
func TestPlacePassed(t *testing.T) {
	if os.Getenv("KEEPER_TEST_PLACE") != "" {
		args, err := placePassed(os.Args)
		if err != nil {
			os.Stdout.WriteString(err.Error())
			os.Exit(1)
		}
		again, err := placePassed(args)
		if err != nil || !slices.Equal(args, again) {
			os.Stdout.WriteString("placed twice, the arguments differ\n")
		}
		for _, fd := range []int{firstPassed + 3, firstPassed + 4} {
			b, _ := io.ReadAll(os.NewFile(uintptr(fd), "passed"))
			os.Stdout.Write(b)
		}
		os.Stdout.WriteString(strings.Join(args[3:], " "))
		os.Exit(0)
	}
	for _, order := range [][2]string{{"3", "4"}, {"4", "3"}} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestPlacePassed$", "--", "--pass-fd=3:"+order[0], "--pass-fd=4:"+order[1], "id")
		cmd.Env = append(os.Environ(), "KEEPER_TEST_PLACE=1")
		for _, content := range order {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			w.WriteString("for " + content + "\n")
			w.Close()
			defer r.Close()
			cmd.ExtraFiles = append(cmd.ExtraFiles, r)
		}
		out, err := cmd.Output()
		want := "for 3\nfor 4\n--pass-fd=243:" + order[0] + " --pass-fd=244:" + order[1] + " id"
		if order[0] == "4" {
			want = "for 3\nfor 4\n--pass-fd=244:4 --pass-fd=243:3 id"
		}
		if err != nil || string(out) != want {
			t.Errorf("order %v: %q, %v\nwant %q", order, out, err, want)
		}
	}
	if _, err := placePassed([]string{"--pass-fd=x"}); err == nil {
		t.Error("nonsense is taken")
	}
}

// relayAhead returns a client whose bytes are relayed to a guest that has not yet answered, and a channel that is closed when the relay ends.
func relayAhead(t *testing.T, guest net.Conn) (client *net.UnixConn, ended <-chan struct{}) {
	t.Helper()
	ch, err := newChannel(guest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ch.session.Close() })
	s, err := ch.dialGuest()
	if err != nil {
		t.Fatal(err)
	}
	client, other, err := socketPair(unix.SOCK_STREAM)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	f, err := net.FileConn(other)
	other.Close()
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		ch.relay(f.(*net.UnixConn), s, true)
		close(over)
	}()
	return client, over
}

// TestAhead relays what a client sends before the guest has answered that it takes the stream. A guest that refuses gets it, and its client an end.
func TestAhead(t *testing.T) {
	for name, status := range map[string]byte{"connected": dialConnected, "refused": dialRefused} {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			read := make(chan string, 1)
			go func() {
				s, err := yamux.Server(far, yamux.DefaultConfig())
				if err != nil {
					return
				}
				defer s.Close()
				st, err := s.AcceptStream()
				if err != nil {
					return
				}
				b := make([]byte, 4+5)
				io.ReadFull(st, b)
				read <- string(b)
				st.Write([]byte{status})
				io.WriteString(st, "world")
				st.Close()
				io.Copy(io.Discard, st)
			}()
			client, _ := relayAhead(t, near)
			io.WriteString(client, "hello")
			want := string([]byte{1, 0, guestPort >> 8, guestPort & 0xff}) + "hello"
			if got := <-read; got != want {
				t.Errorf("the guest read %q, want %q", got, want)
			}
			client.SetDeadline(time.Now().Add(20 * time.Second))
			got, err := io.ReadAll(client)
			if status == dialConnected && (err != nil || string(got) != "world") || status != dialConnected && (len(got) > 0 || os.IsTimeout(err)) {
				t.Errorf("the client read %q, %v", got, err)
			}
		})
	}
}

// TestAheadGone has a guest that answers nothing, and a client that goes away with more sent than the guest's window takes.
func TestAheadGone(t *testing.T) {
	near, far := net.Pipe()
	guest, err := yamux.Server(far, yamux.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	client, ended := relayAhead(t, near)
	client.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	if n, err := io.Copy(client, zeroes{}); err == nil || n < 256<<10 {
		t.Fatalf("%d bytes were taken, %v", n, err)
	}
	select {
	case <-ended:
		t.Error("the relay ended before its client")
	default:
	}
	client.Close()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the relay does not end with its client")
	}
}
