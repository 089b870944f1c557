//go:build linux

package keeper

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"
)

// guestPort is warren.GuestPort.
const guestPort = 49983

// The guest's answers to the header of a stream.
const (
	dialConnected = 0
	dialRefused   = 1
)

var errRefused = errors.New("connection refused")

// channel is the host's end of a sandbox's multiplexed channel. What comes from the other side is hostile.
type channel struct {
	session *yamux.Session
	conn    *frameConn
	// forward is the connection that gVisor forwards to the guest's port, if the channel goes that way.
	forward *net.UnixConn
	// answered says that a guest has answered on it.
	answered atomic.Bool
}

// hangUp ends a forwarded channel and waits until gVisor has let go of it too, which it cannot save. A guest that does
// not close its end makes the wait long, and the snapshot fail.
func (c *channel) hangUp() {
	c.forward.CloseWrite()
	select {
	case <-c.session.CloseChan():
	case <-time.After(2 * time.Second):
	}
	c.session.Close()
}

func newChannel(c net.Conn) (*channel, error) {
	fc := &frameConn{Conn: c}
	conf := yamux.DefaultConfig()
	conf.EnableKeepAlive = false // the other end is on this machine
	conf.StreamOpenTimeout = 0
	// A direction may stay closed for long while the other is used. An abandoned stream does not wait for this, see reset.
	conf.StreamCloseTimeout = 24 * time.Hour
	// A guest without processor time, or a paused one, is slow and not gone.
	conf.ConnectionWriteTimeout = time.Hour
	conf.MaxStreamWindowSize = 1 << 20
	conf.LogOutput = io.Discard
	s, err := yamux.Client(fc, conf)
	if err != nil {
		return nil, err
	}
	return &channel{session: s, conn: fc}, nil
}

func (c *channel) closed() bool { return c == nil || c.session.IsClosed() }

// dial opens a stream to a port. Closing cancel ends it early.
func (c *channel) dial(port uint16, cancel <-chan struct{}) (*yamux.Stream, error) {
	s, err := c.session.OpenStream()
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-cancel:
			s.SetDeadline(time.Unix(1, 0))
		case <-done:
		}
	}()
	status, err := handshake(s, port)
	close(done)
	<-stopped
	if err == nil {
		s.SetDeadline(time.Time{})
		switch status {
		case dialConnected:
			c.answered.Store(true)
			return s, nil
		case dialRefused:
			err = errRefused
		default:
			err = fmt.Errorf("guest answered %d", status)
		}
	}
	c.reset(s)
	return nil, err
}

func handshake(s *yamux.Stream, port uint16) (byte, error) {
	if err := ask(s, port); err != nil {
		return 0, err
	}
	return answer(s)
}

// ask names the port that a stream is for, and answer is what the guest says to that.
func ask(s *yamux.Stream, port uint16) error {
	hdr := [4]byte{0: 1}
	binary.BigEndian.PutUint16(hdr[2:], port)
	_, err := s.Write(hdr[:])
	return err
}

func answer(s *yamux.Stream) (byte, error) {
	var status [1]byte
	_, err := io.ReadFull(s, status[:])
	return status[0], err
}

// dialGuest opens a stream to the guest's own port, on which it always answers, so that a guest that has answered before need not be waited for:
// its answer comes before whatever else it sends, and is for relay to read.
func (c *channel) dialGuest() (*yamux.Stream, error) {
	s, err := c.session.OpenStream()
	if err != nil {
		return nil, err
	}
	if err := ask(s, guestPort); err != nil {
		c.reset(s)
		return nil, err
	}
	return s, nil
}

// reset ends both directions of a stream whose user is gone. Yamux has no call for that, and without one the guest's
// end would block for ever on a stream that nobody reads.
func (c *channel) reset(s *yamux.Stream) {
	s.Close()
	c.conn.sendReset(s.StreamID())
	// What has arrived is let go, so that the closed stream holds no memory until it times out.
	s.SetReadDeadline(time.Unix(1, 0))
	buf := make([]byte, 32<<10)
	for {
		if n, err := s.Read(buf); err != nil || n == 0 {
			break
		}
	}
	s.Shrink()
}

// frameConn is a connection that carries yamux frames and can send one of its own between two others. It writes a frame at once where yamux
// writes its header and its body, which would wake the sandbox twice.
type frameConn struct {
	net.Conn
	mu   sync.Mutex
	body uint32            // how much of the current frame's body is still to come
	head [yamuxHeader]byte // of that frame, not yet written
	kept bool              // whether head is
	buf  []byte            // for a frame, reused
	todo [][]byte          // frames to send before the next one
}

// joinedSize is up to which size a header and a body are put together.
const joinedSize = 16 << 10

const (
	yamuxHeader     = 12
	yamuxWindow     = 1 // frame type: window update
	yamuxFlagReset  = 8
	yamuxDataFrames = 0
)

// Write sends a header or a body; yamux writes them one by one, each whole.
func (f *frameConn) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.body == 0 && len(b) == yamuxHeader && b[1] == yamuxDataFrames {
		if f.body = binary.BigEndian.Uint32(b[8:]); f.body > 0 {
			copy(f.head[:], b)
			f.kept = true
			return len(b), nil
		}
	}
	if err := f.send(b); err != nil {
		return 0, err
	}
	f.body -= min(f.body, uint32(len(b)))
	return len(b), f.flush()
}

// send writes b, behind the header that was kept.
func (f *frameConn) send(b []byte) error {
	if f.kept {
		f.kept = false
		if len(b) <= joinedSize {
			f.buf = append(append(f.buf[:0], f.head[:]...), b...)
			b = f.buf
		} else if _, err := f.Conn.Write(f.head[:]); err != nil {
			return err
		}
	}
	_, err := f.Conn.Write(b)
	return err
}

func (f *frameConn) flush() error {
	for f.body == 0 && len(f.todo) > 0 {
		b := f.todo[0]
		f.todo = f.todo[1:]
		if _, err := f.Conn.Write(b); err != nil {
			return err
		}
	}
	return nil
}

func (f *frameConn) sendReset(stream uint32) {
	b := make([]byte, yamuxHeader)
	b[1] = yamuxWindow
	binary.BigEndian.PutUint16(b[2:], yamuxFlagReset)
	binary.BigEndian.PutUint32(b[4:], stream)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.todo = append(f.todo, b)
	f.flush()
}

// line is the sockets that a sandbox is started with: descriptor 3 in it carries the channel, and on descriptor 4 the guest
// that goes on from an image is told to begin it anew.
type line struct {
	host, control           *net.UnixConn
	theirChannel, theirCtrl *os.File
}

// The guest's descriptors.
const (
	channelFD = 3
	controlFD = 4
)

func newLine() (*line, error) {
	l := &line{}
	var err error
	if l.host, l.theirChannel, err = socketPair(unix.SOCK_STREAM); err != nil {
		return nil, err
	}
	if l.control, l.theirCtrl, err = socketPair(unix.SOCK_SEQPACKET); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// theirs returns the guest's ends, by descriptor.
func (l *line) theirs() map[int]*os.File {
	return map[int]*os.File{channelFD: l.theirChannel, controlFD: l.theirCtrl}
}

func (l *line) takeHost() *net.UnixConn {
	c := l.host
	l.host = nil
	return c
}

func (l *line) takeControl() *net.UnixConn {
	c := l.control
	l.control = nil
	return c
}

// close closes what nobody has taken.
func (l *line) close() {
	for _, c := range []*net.UnixConn{l.host, l.control} {
		if c != nil {
			c.Close()
		}
	}
	l.closeTheirs()
}

// closeTheirs closes the guest's ends here, when its process has them: else a guest that ends would not be heard.
func (l *line) closeTheirs() {
	for _, f := range []*os.File{l.theirChannel, l.theirCtrl} {
		if f != nil {
			f.Close()
		}
	}
}

const (
	// renewalSize is channel.RenewalSize of the guest.
	renewalSize = 16
	// renewTime is how long a restored guest may take to leave its old session. It needs milliseconds; one that is stopped never does.
	renewTime = 10 * time.Second
	// maxLeft bounds what an old session may leave in a socket, which holds far less.
	maxLeft = 8 << 20
)

// renew makes a channel on the sockets of a sandbox that is restored, whose guest is in the middle of a session that is gone. Nothing
// goes to it on the channel before it has left that session, and what the session had still written is thrown away. How long the guest
// may take is the caller's to say, by the deadline of control.
func renew(host, control *net.UnixConn) (_ *channel, err error) {
	defer control.Close()
	defer func() {
		if err != nil {
			host.Close()
		}
	}()
	var renewal [renewalSize]byte
	rand.Read(renewal[:]) // never fails
	if _, err := control.Write(renewal[:]); err != nil {
		return nil, err
	}
	var answer [renewalSize + 1]byte
	n, err := control.Read(answer[:])
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(answer[:n], renewal[:]) {
		return nil, errors.New("the guest answered something else")
	}
	if err := drain(host); err != nil {
		return nil, err
	}
	c, err := newChannel(host)
	if err == nil {
		c.answered.Store(true)
	}
	return c, err
}

// drain reads what is there, without waiting for more.
func drain(c *net.UnixConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	left := 0
	var rerr error
	if err := rc.Read(func(fd uintptr) bool {
		for left <= maxLeft {
			n, err := unix.Read(int(fd), buf)
			switch {
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				return true
			case err != nil:
				rerr = err
				return true
			case n == 0:
				rerr = io.ErrUnexpectedEOF
				return true
			}
			left += max(n, 0)
		}
		rerr = errors.New("the guest writes without end")
		return true
	}); err != nil {
		return err
	}
	return rerr
}

// socketPair returns both ends of a socket, the first as a connection.
func socketPair(kind int) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	other := os.NewFile(uintptr(fds[1]), "channel")
	f := os.NewFile(uintptr(fds[0]), "channel")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		other.Close()
		return nil, nil, err
	}
	return c.(*net.UnixConn), other, nil
}

// reattach opens a channel to a running guest through its TCP port, for a keeper that did not start it.
func reattach(kernel *gsandbox.Sandbox, token string) (*channel, error) {
	if kernel == nil {
		return nil, errors.New("the sandbox has ended")
	}
	conn, other, err := socketPair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer other.Close()
	err = kernel.PortForward(&boot.PortForwardOpts{
		FilePayload: urpc.FilePayload{Files: []*os.File{other}},
		ContainerID: kernel.ID,
		Port:        guestPort,
	})
	if err != nil {
		conn.Close()
		return nil, err
	}
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	r, err := upgrade(conn, token)
	if err != nil {
		conn.Close()
		return nil, err
	}
	conn.SetDeadline(time.Time{})
	ch, err := newChannel(r)
	if err != nil {
		conn.Close()
		return nil, err
	}
	ch.forward = conn
	return ch, nil
}

// upgrade makes a connection to the guest's HTTP server a channel.
func upgrade(conn net.Conn, token string) (net.Conn, error) {
	_, err := fmt.Fprintf(conn, "GET /warren/channel HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: warren-channel\r\nX-Channel-Token: %s\r\n\r\n", token)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, fmt.Errorf("guest answered %s", resp.Status)
	}
	return &bufferedConn{Conn: conn, r: r}, nil
}

// bufferedConn reads first what a reader took too much.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (b *bufferedConn) Read(p []byte) (int, error) { return b.r.Read(p) }

// relay carries bytes between a client and a stream until both directions have ended or one side is gone. What is ahead has yet to be answered.
func (c *channel) relay(client *net.UnixConn, s *yamux.Stream, ahead bool) {
	defer client.Close()
	gone := make(chan struct{}) // the client has closed, not only its sending side
	toGuest := make(chan struct{})
	go func() {
		defer close(toGuest)
		_, err := io.Copy(s, client)
		if err != nil {
			// The stream or the client broke; whichever it was, the other direction finds out.
			client.CloseRead()
		}
		s.Close()
		if err == nil && hungUp(client) {
			close(gone)
		}
	}()
	fromGuest := make(chan error, 1)
	go func() {
		if ahead {
			answered := make(chan struct{})
			go whileOpen(client, answered, func() { s.SetDeadline(time.Unix(1, 0)) })
			status, err := answer(s)
			close(answered)
			if err != nil || status != dialConnected {
				fromGuest <- errors.Join(err, errRefused)
				return
			}
		}
		_, err := io.Copy(client, s)
		fromGuest <- err
	}()
	select {
	case err := <-fromGuest:
		if err != nil {
			client.Close()
			c.reset(s)
			return
		}
		if c.session.IsClosed() { // the sandbox has ended
			return
		}
		client.CloseWrite()
		<-toGuest
	case <-gone:
		client.Close()
		c.reset(s)
	}
}

// whileOpen calls gone if the other end of a connection is closed for good before done is. Unlike hungUp it does so while somebody else reads from it, or would
// if the other side took what has been read.
func whileOpen(client *net.UnixConn, done <-chan struct{}, gone func()) {
	rc, err := client.SyscallConn()
	if err != nil {
		return
	}
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-done:
			return
		case <-look.C:
		}
		hup := false
		if err := rc.Control(func(fd uintptr) { hup = over(fd) }); err != nil || hup {
			gone()
			return
		}
	}
}

// over says that the other end of a connection is closed in both directions, or that this one is.
func over(fd uintptr) bool {
	return poll(int(fd), 0, 0)&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
}

// hungUp waits until the other end of the connection is closed for good, and returns false when this end is first.
func hungUp(c *net.UnixConn) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	hup := false
	rc.Read(func(fd uintptr) bool {
		hup = over(fd)
		return hup
	})
	return hup
}
