// Package guest is Warren's agent inside every sandbox: PID 1, the parent of all processes, and the server on port
// 49983. It speaks E2B's in-sandbox wire (processes, terminals, files, watching) and beside it a service of its own
// for what that lacks: output by sequence number, search and replace, shell sessions, and events of ports.
//
// The guest lives on hostile ground: whatever runs in the sandbox may be root there. It holds no secret of the host,
// and its answers are data to whoever reads them. What it does guarantee is that a user of the sandbox gets no more
// rights through it than that user has: commands start, and files are touched, as the user that a request names.
//
// Requests come over the channel from the host, which is trusted, or over TCP, where a token is needed once one is
// set. Only the host may set it, and with it the rest of the settings (POST /init).
package guest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/channel"
	"github.com/warren-sandbox/warren/internal/guest/lifecycle"
	"github.com/warren-sandbox/warren/internal/guest/memory"
	"github.com/warren-sandbox/warren/internal/guest/process"
	"github.com/warren-sandbox/warren/internal/guest/service"
	"github.com/warren-sandbox/warren/internal/guest/session"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// Port is the port on which the guest answers.
const Port = 49983

// Config is what the guest is told by whoever starts it.
type Config struct {
	// ReapOrphans says that the guest is PID 1 and the parent of all that is left behind.
	ReapOrphans bool
	// LogDir is where output that does not fit into memory goes.
	LogDir string
	// ChannelToken lets a TCP connection become a channel; empty means none may until /init sets one.
	ChannelToken string
	// Env is the guest's own environment, of which processes inherit PATH, LANG and the like.
	Env []string
	// User and Dir are the default user and working directory until /init says otherwise.
	User, Dir string
	// RunDir is where software inside finds what the guest tells it, see package lifecycle; empty means nowhere.
	RunDir string
	// HookDir is where the image has its hooks; empty means that none are run.
	HookDir string
	// ServicesFile keeps the services for a guest that begins with the files alone; empty means that nothing does.
	ServicesFile string
}

// Server is a guest.
type Server struct {
	cfg      Config
	table    *process.Table
	http     *http.Server
	inner    *innerListener
	routes   map[string]http.HandlerFunc
	watches  watchers
	cpu      cpuMeter
	sessions *session.Table
	services *service.Table
	guard    *memory.Guard
	searches chan struct{} // holds a token for each search that runs
	clients  atomic.Int64  // calls that follow a process or a session now

	identities sync.Mutex // held while an event is taken in
	history    lifecycle.History
	furnished  sync.Once
	served     sync.Once // the services of the files were started

	mu       sync.RWMutex
	settings settings
	rollback string // the generation of the last one
}

// settings are what /init sets.
type settings struct {
	token        *secret
	signing      string // the token itself, which signatures are made with
	channelToken *secret
	env          map[string]string
	trust        map[string]string // variables that name the certificates to trust
	user, dir    string
	sandboxID    string
	memoryLimit  int64
}

// secret is the digest of a token: comparing digests takes the same time whatever is guessed, and the token itself is
// not kept in memory for others in the sandbox to find.
type secret [sha256.Size]byte

func newSecret(s string) *secret {
	if s == "" {
		return nil
	}
	d := secret(sha256.Sum256([]byte(s)))
	return &d
}

func (s *secret) matches(guess string) bool {
	d := sha256.Sum256([]byte(guess))
	return s != nil && subtle.ConstantTimeCompare(s[:], d[:]) == 1
}

const (
	// maxBody bounds every JSON body and every frame.
	maxBody = 4 << 20
	// maxHeader bounds the head of a request.
	maxHeader = 64 << 10
	// writeTime is how long one write to a client may take before the client is given up.
	writeTime = 2 * time.Minute
)

// New returns a guest. It starts nothing but its reaper until [Server.Serve] or [Server.ServeChannel] is called.
func New(c Config) *Server {
	if c.User == "" {
		c.User = "user"
		if uid := os.Geteuid(); uid != 0 {
			c.User = account.System.UserName(uint32(uid))
		}
	}
	s := &Server{cfg: c, inner: newInnerListener()}
	s.table = process.NewTable(process.NewReaper(c.ReapOrphans), c.LogDir)
	s.sessions = session.NewTable(s.table)
	s.services = &service.Table{Start: s.startService}
	s.guard = memory.New(s.killing)
	s.searches = make(chan struct{}, maxSearches)
	s.settings = settings{channelToken: newSecret(c.ChannelToken), user: c.User, dir: c.Dir}
	s.route()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler:           http.HandlerFunc(s.handle),
		Protocols:         &protocols,
		ReadHeaderTimeout: 15 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    maxHeader,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 1000, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10},
		ErrorLog:          log.New(quiet{}, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if _, ok := c.(*trustedConn); ok {
				ctx = context.WithValue(ctx, trustedKey{}, true)
			}
			return ctx
		},
	}
	return s
}

// quiet drops the HTTP server's remarks about clients: in a sandbox anyone can provoke them without end.
type quiet struct{}

func (quiet) Write(p []byte) (int, error) { return len(p), nil }

type trustedKey struct{}

// trusted says whether the request came over the channel from the host.
func trusted(r *http.Request) bool {
	t, _ := r.Context().Value(trustedKey{}).(bool)
	return t
}

// Serve answers on a listener whose clients need the token, until the server is closed.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Guard keeps the sandbox below the memory limit that /init sets, until ctx ends.
func (s *Server) Guard(ctx context.Context) { s.guard.Run(ctx) }

// ServeInner answers the connections that come over channels, until the server is closed.
func (s *Server) ServeInner() error { return s.Serve(s.inner) }

// ServeChannel carries the streams of a channel until it ends. [Server.ServeInner] must run.
func (s *Server) ServeChannel(conn net.Conn) error {
	return channel.Serve(conn, s.streams())
}

// streams says where the streams of a channel lead.
func (s *Server) streams() channel.Config {
	return channel.Config{Port: Port, Accept: func(c net.Conn) { s.inner.take(&trustedConn{c}) }}
}

// Close kills every process and closes all connections.
func (s *Server) Close() error {
	s.services.Close()
	s.table.KillAll()
	return s.http.Close()
}

// trustedConn marks a connection from the host.
type trustedConn struct{ net.Conn }

// CloseWrite keeps what the HTTP server uses on a TCP connection.
func (c *trustedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// innerListener is a listener whose connections are handed to it.
type innerListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newInnerListener() *innerListener {
	return &innerListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (l *innerListener) take(c net.Conn) {
	select {
	case l.conns <- c:
	case <-l.closed:
		c.Close()
	}
}

// Accept implements net.Listener.
func (l *innerListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *innerListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *innerListener) Addr() net.Addr { return &net.UnixAddr{Name: "channel", Net: "unix"} }

// get returns the settings now.
func (s *Server) get() settings {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.settings
}

// userOf returns the user that a request names: the name of its Basic credentials, else the default user.
func (s *Server) userOf(r *http.Request) (*account.User, error) {
	name, _, _ := r.BasicAuth()
	return s.user(name)
}

func (s *Server) user(name string) (*account.User, error) {
	if name == "" {
		name = s.get().user
	}
	u, err := account.System.Lookup(name)
	if err != nil {
		return nil, wire.Errorf(wire.Unauthenticated, "invalid username: '%.64s'", name)
	}
	return u, nil
}

// environ builds the environment of a process, later sources replacing earlier ones.
func (s *Server) environ(u *account.User, extra map[string]string) []string {
	st := s.get()
	env := map[string]string{"PATH": defaultPath}
	for _, e := range s.cfg.Env {
		for i := 1; i < len(e); i++ {
			if e[i] == '=' {
				env[e[:i]] = e[i+1:]
				break
			}
		}
	}
	env["HOME"], env["USER"], env["LOGNAME"], env["SHELL"] = u.Home, u.Name, u.Name, u.Shell
	env["E2B_SANDBOX"] = "true"
	if st.sandboxID != "" {
		env["E2B_SANDBOX_ID"], env["WARREN_SANDBOX_ID"] = st.sandboxID, st.sandboxID
	}
	for _, m := range []map[string]string{st.trust, st.env, extra} {
		for k, v := range m {
			env[k] = v
		}
	}
	if s.cfg.RunDir != "" {
		// Last, so that it hides nothing of the image's.
		env["PATH"] += ":" + s.binDir()
	}
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	return out
}

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// checkEnv refuses variables that no environment can hold.
func checkEnv(env map[string]string) error {
	for k, v := range env {
		if k == "" || containsAny(k, "=\x00") || containsAny(v, "\x00") {
			return wire.Errorf(wire.InvalidArgument, "environment variable %.100q: a name must not be empty or hold '=', and nothing may hold a zero byte", k)
		}
	}
	return nil
}

func containsAny(s, chars string) bool {
	for i := range len(s) {
		for j := range len(chars) {
			if s[i] == chars[j] {
				return true
			}
		}
	}
	return false
}

// randomName returns a name that nobody guesses, of lower-case letters and digits.
func randomName() string { return strings.ToLower(rand.Text()) }
