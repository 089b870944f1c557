//go:build linux

package gateway

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/gateway/control"
	"github.com/warren-sandbox/warren/internal/message"
	"github.com/warren-sandbox/warren/internal/policy"
)

// Server lets a daemon use a gateway, see package control.
type Server struct {
	g     *Gateway
	l     *net.UnixListener
	log   *slog.Logger
	build string
	idle  time.Duration

	mu      sync.Mutex
	clients int
	lastUse time.Time
	// asks lead to the clients, who are asked there to start sandboxes.
	asks map[chan string]bool
	over chan struct{}
	once sync.Once
}

// NewServer serves a gateway on a socket. build names the program, idle says how long to stay with no card and no client.
func NewServer(g *Gateway, l *net.UnixListener, build string, idle time.Duration, log *slog.Logger) *Server {
	s := &Server{g: g, l: l, log: log, build: build, idle: idle, lastUse: time.Now(), over: make(chan struct{}), asks: map[chan string]bool{}}
	g.OnWake(s.wake)
	return s
}

// Serve answers calls until Retire is called, by whomever. The cards stay as they are for the next gateway; the process is to end.
func (s *Server) Serve() {
	go s.endWhenIdle()
	for {
		c, err := s.l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				break
			}
			s.log.Warn("accept", "error", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go s.handle(c, s.g.turn())
	}
	<-s.over
}

// Retire ends Serve.
func (s *Server) Retire() {
	s.once.Do(func() {
		close(s.over)
		s.l.Close()
	})
}

// endWhenIdle ends a gateway that nobody needs.
func (s *Server) endWhenIdle() {
	for {
		select {
		case <-s.over:
			return
		case <-time.After(s.idle / 8):
		}
		s.mu.Lock()
		if s.clients > 0 || len(s.g.Sandboxes()) > 0 {
			s.lastUse = time.Now()
		}
		unused := time.Since(s.lastUse)
		s.mu.Unlock()
		if unused > s.idle {
			s.log.Info("no sandbox and no daemon; good bye")
			s.Retire()
			return
		}
	}
}

// handle answers a call that came as the turn says.
func (s *Server) handle(c *net.UnixConn, turn uint64) {
	defer c.Close()
	if err := companion.SameUser(c); err != nil {
		s.log.Warn("refused a connection", "error", err)
		return
	}
	var req control.Request
	files, err := message.Read(c, &req)
	if err != nil {
		return
	}
	defer func() {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}()
	if left(c) {
		s.log.Warn("not done: whoever asked for it has not waited", "call", req.Op, "sandbox", req.ID)
		return
	}
	s.mu.Lock()
	s.lastUse = time.Now()
	s.mu.Unlock()
	r, out, err := s.do(&req, files, turn)
	if err != nil {
		r = &control.Response{Error: err.Error(), Kind: kindOf(err)}
	} else {
		r.OK = true
	}
	err = message.Write(c, r, out...)
	for _, f := range out {
		f.Close()
	}
	if err != nil {
		return
	}
	switch {
	case r.OK && req.Op == control.OpHold:
		s.hold(c)
	case r.OK && req.Op == control.OpRetire:
		s.Retire()
	}
}

// left says whether a caller has gone. A gateway that was stopped finds calls of long ago, and others have been made since.
func left(c *net.UnixConn) bool {
	gone := false
	if rc, err := c.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
			n, err := unix.Poll(fds, 0)
			for err == unix.EINTR {
				n, err = unix.Poll(fds, 0)
			}
			gone = err == nil && n == 1 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
		})
	}
	return gone
}

// hold keeps a client until one of both sides ends.
func (s *Server) hold(c *net.UnixConn) {
	asks, gone := make(chan string, maxAsks), make(chan struct{})
	s.mu.Lock()
	s.clients++
	s.asks[asks] = true
	s.mu.Unlock()
	go func() {
		defer c.Close()
		for {
			select {
			case <-s.over:
				return
			case <-gone:
				return
			case id := <-asks:
				// A client that does not listen is none.
				c.SetWriteDeadline(time.Now().Add(5 * time.Second))
				if message.Write(c, &control.Notice{Wake: id}) != nil {
					return
				}
			}
		}
	}()
	io.Copy(io.Discard, c)
	close(gone)
	s.mu.Lock()
	s.clients--
	delete(s.asks, asks)
	last := s.clients == 0
	s.lastUse = time.Now()
	s.mu.Unlock()
	if last {
		s.g.nobodyWakes()
	}
}

// maxAsks is how many wishes to start a sandbox may wait for a client to take them.
const maxAsks = 256

// wake asks a client to start a sandbox.
func (s *Server) wake(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for asks := range s.asks {
		select {
		case asks <- id:
			return true
		default:
		}
	}
	return false
}

func kindOf(err error) string {
	switch {
	case errors.Is(err, ErrNotFound):
		return "not_found"
	case errors.Is(err, errPolicy):
		return "invalid"
	case errors.Is(err, ErrSuperseded):
		return "superseded"
	}
	return ""
}

var errPolicy = errors.New("the policy cannot be used")

// do carries a call out. What it takes of files it sets to nil.
func (s *Server) do(req *control.Request, files []*os.File, turn uint64) (*control.Response, []*os.File, error) {
	switch req.Op {
	case control.OpHold:
		r := &control.Response{Version: control.Version, Build: s.build}
		if a := s.g.opts.Authority; a != nil {
			r.Authority = a.PEM()
		}
		return r, nil, nil
	case control.OpRetire:
		return &control.Response{}, nil, nil
	case control.OpList:
		r := &control.Response{}
		for _, id := range s.g.Sandboxes() {
			if d, err := s.g.Digest(id); err == nil {
				r.Cards = append(r.Cards, control.Attached{ID: id, Policy: d})
			}
		}
		r.Networks = s.g.PeerNetworks()
		return r, nil, nil
	case control.OpPeers:
		if req.Peers == nil {
			return nil, nil, errors.New("no private network")
		}
		p := Peers{Key: req.Peers.Key, Name: req.Peers.Name, Digest: req.Peers.Digest}
		for _, m := range req.Peers.Members {
			p.Members = append(p.Members, Peer(m))
		}
		return &control.Response{}, nil, s.g.SetPeers(p)
	case control.OpWoken:
		var why error
		if req.Why != "" {
			why = errors.New(req.Why)
		}
		s.g.Woken(req.ID, why)
		return &control.Response{}, nil, nil
	case control.OpDetach:
		s.g.Detach(req.ID)
		return &control.Response{}, nil, nil
	case control.OpQuiet:
		d, err := s.g.Quiet(req.ID)
		return &control.Response{Quiet: d}, nil, err
	case control.OpCard:
		f, err := s.g.Card(req.ID)
		if err != nil {
			return nil, nil, err
		}
		return &control.Response{}, []*os.File{f}, nil
	case control.OpPlan:
		return &control.Response{Card: cardFacts()}, nil, nil
	case control.OpAttach, control.OpAdopt, control.OpPolicy:
	default:
		return nil, nil, fmt.Errorf("no call %q", req.Op)
	}
	p, err := parseRules(req.Policy)
	if err != nil {
		return nil, nil, err
	}
	switch req.Op {
	case control.OpPolicy:
		return &control.Response{}, nil, s.g.setPolicy(req.ID, p, turn)
	case control.OpAdopt:
		if len(files) != 1 {
			return nil, nil, fmt.Errorf("a card with %d descriptors", len(files))
		}
		end := files[0]
		files[0] = nil
		// What is passed may block.
		if err := unix.SetNonblock(int(end.Fd()), true); err != nil {
			end.Close()
			return nil, nil, err
		}
		return &control.Response{}, nil, s.g.attach(req.ID, end, p, req.From, turn)
	}
	inside, outside, err := NewCard()
	if err != nil {
		return nil, nil, err
	}
	copied, err := duplicate(outside)
	if err == nil {
		err = s.g.attach(req.ID, outside, p, req.From, turn)
	} else {
		outside.Close()
	}
	if err != nil {
		inside.Close()
		if copied != nil {
			copied.Close()
		}
		return nil, nil, err
	}
	return &control.Response{Card: cardFacts()}, []*os.File{inside, copied}, nil
}

// cardFacts are what a sandbox has to know of its card.
func cardFacts() *control.Card {
	return &control.Card{MTU: MTU, Addrs: []netip.Addr{SandboxIPv4, SandboxIPv6}, DNS: []netip.Addr{GatewayIPv4}}
}

func parseRules(p *control.Policy) (Rules, error) {
	if p == nil {
		return Rules{}, fmt.Errorf("%w: there is none", errPolicy)
	}
	parsed, err := policy.Parse(p.Name, p.Source)
	if err != nil {
		return Rules{}, fmt.Errorf("%w: %w", errPolicy, err)
	}
	r := Rules{Policy: parsed, Digest: p.Digest}
	for _, s := range p.Secrets {
		r.Secrets = append(r.Secrets, Secret(s))
	}
	return r, nil
}

// Card returns another descriptor of a sandbox's card.
func (g *Gateway) Card(id string) (*os.File, error) {
	c, err := g.card(id)
	if err != nil {
		return nil, err
	}
	return duplicate(c.file)
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "card"), nil
}
