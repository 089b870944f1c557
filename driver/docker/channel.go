//go:build linux

package docker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/guest/channel"
)

// guestChannel is the way into one container. It is made when it is first needed, and again when it has ended.
type guestChannel struct {
	// turn is held by who makes it.
	turn chan struct{}

	mu     sync.Mutex
	host   *channel.Host
	closed bool
}

func (g *guestChannel) current() *channel.Host {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host != nil {
		select {
		case <-g.host.Done():
			g.host = nil
		default:
		}
	}
	return g.host
}

// set keeps a new channel, or closes it when the driver or the sandbox has ended meanwhile.
func (g *guestChannel) set(h *channel.Host) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		h.Close()
		return
	}
	g.host = h
}

func (g *guestChannel) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.host != nil {
		g.host.Close()
	}
}

func (d *Driver) channel(id warren.SandboxID) *guestChannel {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.channels[id]
	if g == nil {
		g = &guestChannel{turn: make(chan struct{}, 1)}
		d.channels[id] = g
	}
	return g
}

func (d *Driver) dropChannel(id warren.SandboxID) {
	d.mu.Lock()
	g := d.channels[id]
	delete(d.channels, id)
	d.mu.Unlock()
	if g != nil {
		g.close()
	}
}

// Dial connects to a port inside, see [driver.Driver].
func (d *Driver) Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	c, err := d.dial(ctx, id, port)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of sandbox %s: %w", port, id, err)
	}
	return c, nil
}

// otherPortTries is how often the channel is made anew for a port other than the guest's, which nobody waits for.
const otherPortTries = 3

// errFrozen says that a sandbox stands still.
var errFrozen = fmt.Errorf("the sandbox is frozen: %w", warren.ErrUnavailable)

// answerTime is how long a guest may take to answer a dial before its channel counts as broken. A guest that is alive answers
// at once, or after the few seconds that it gives a dial of its own.
const answerTime = 20 * time.Second

func (d *Driver) dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	if !validID(id) {
		return nil, warren.ErrNotFound
	}
	if err := d.checkOpen(); err != nil {
		return nil, err
	}
	wait := 5 * time.Millisecond
	for try := 1; ; try++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		g := d.channel(id)
		h := g.current()
		var err error
		if h == nil {
			h, err = d.connect(ctx, id, g)
		}
		if err == nil {
			var conn *channel.Conn
			patient, cancel := context.WithTimeout(ctx, answerTime)
			conn, err = h.Dial(patient, port)
			cancel()
			if err == nil {
				return conn, nil
			}
			switch {
			case ctx.Err() != nil:
				return nil, ctx.Err()
			case errors.Is(err, channel.ErrRefused):
				return nil, fmt.Errorf("nothing listens there: %w", warren.ErrUnavailable)
			}
			// The channel broke. One that answers nonsense, or nothing because root inside has stopped the relay, is made anew
			// as well. That of a frozen sandbox is as good as ever, and so are the connections on it.
			if c, ferr := d.find(ctx, id); ferr == nil && c.State.Paused {
				err = errFrozen
			} else {
				h.Close()
			}
		}
		if err != nil && (errors.Is(err, warren.ErrNotFound) || errors.Is(err, warren.ErrState)) {
			d.dropChannel(id)
			return nil, err
		}
		if errors.Is(err, errFrozen) {
			try = 0 // until it is thawed nobody can say what listens
		}
		if port != warren.GuestPort && try >= otherPortTries {
			return nil, fmt.Errorf("%w: %w", warren.ErrUnavailable, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, 500*time.Millisecond)
	}
}

// connect makes the channel of a running container: the standard streams of a relay in it, carried by the engine.
func (d *Driver) connect(ctx context.Context, id warren.SandboxID, g *guestChannel) (*channel.Host, error) {
	select {
	case g.turn <- struct{}{}:
		defer func() { <-g.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if h := g.current(); h != nil {
		return h, nil
	}
	c, err := d.findAlive(ctx, id)
	if err != nil {
		return nil, err
	}
	if c.State.Paused {
		return nil, errFrozen
	}
	stream, err := d.relay(ctx, c.ID)
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	h, err := channel.NewHost(stream)
	if err != nil {
		stream.Close()
		return nil, err
	}
	g.set(h)
	go d.closeWith(c.ID, h)
	return h, nil
}

// closeWith ends a channel when its container ends. The relay's streams do not always: an engine learns of the end of a second
// process from the container's kernel, which may have been killed before it could say so.
func (d *Driver) closeWith(container string, h *channel.Host) {
	ctx, cancel := context.WithCancel(d.ctx)
	defer cancel()
	wait := d.api.ContainerWait(ctx, container, client.ContainerWaitOptions{})
	stop := make(chan struct{})
	go func() {
		select {
		case <-h.Done():
			cancel()
		case <-stop:
		}
	}()
	// One of the two always comes; the client would wait for ever for a result to be taken.
	select {
	case <-wait.Result:
	case <-wait.Error: // the engine has gone, and with it the stream; or it was the channel that ended
	}
	close(stop)
	h.Close()
}

// relay starts the guest's relay in a container and returns its standard streams.
func (d *Driver) relay(ctx context.Context, container string) (io.ReadWriteCloser, error) {
	made, err := d.api.ExecCreate(ctx, container, client.ExecCreateOptions{
		User: "0:0", WorkingDir: "/", Cmd: []string{guestPath, "channel", socketPath},
		// One thread at a time is enough to copy, and counts less against the limit of processes.
		Env:         []string{"GOMAXPROCS=1", "GOMEMLIMIT=16MiB"},
		AttachStdin: true, AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return nil, err
	}
	res, err := d.api.ExecAttach(ctx, made.ID, client.ExecAttachOptions{})
	if err != nil {
		return nil, err
	}
	return &execStream{conn: res.Conn, r: res.Reader}, nil
}

// execStream is the standard streams of a process that the engine carries: input as it is, and output in pieces, each
// with a header that says which stream it is of and how long it is.
type execStream struct {
	conn net.Conn
	r    io.Reader
	left uint32 // of the current piece
	skip bool   // it is not standard output
}

const (
	execHeader = 8
	execOutput = 1
	execErrors = 2
)

// Read implements io.Reader. One goroutine reads.
func (s *execStream) Read(p []byte) (int, error) {
	for {
		if s.left == 0 {
			var head [execHeader]byte
			if _, err := io.ReadFull(s.r, head[:]); err != nil {
				return 0, err
			}
			if head[0] != execOutput && head[0] != execErrors {
				return 0, fmt.Errorf("the engine's stream has a piece of unknown kind %d", head[0])
			}
			s.left, s.skip = binary.BigEndian.Uint32(head[4:]), head[0] != execOutput
			continue
		}
		if s.skip {
			n, err := io.CopyN(io.Discard, s.r, int64(s.left))
			s.left -= uint32(n)
			if err != nil {
				return 0, err
			}
			continue
		}
		if uint32(len(p)) > s.left {
			p = p[:s.left]
		}
		n, err := s.r.Read(p)
		s.left -= uint32(n)
		if s.left > 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return n, err
	}
}

// Write implements io.Writer.
func (s *execStream) Write(p []byte) (int, error) { return s.conn.Write(p) }

// Close ends the relay: the engine closes its input.
func (s *execStream) Close() error { return s.conn.Close() }
