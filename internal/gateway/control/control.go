//go:build linux

// Package control is how the daemon and its gateway speak. Each call is a connection with one line of JSON each way, see package
// message; the connection of OpHold stays, and its end tells each side that the other is gone.
package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/message"
	"github.com/warren-sandbox/warren/internal/secret"
)

// Version of what is said. A gateway of another version or build is replaced.
const Version = 3

// Name of the gateway's files.
const Name = "gateway"

// The calls.
const (
	// OpHold counts as a client until the connection ends.
	OpHold = "hold"
	// OpAttach makes a card under Policy and answers with its two ends; OpAdopt brings the outer end of a card that is there. OpPlan
	// answers with what a card that the sandbox's driver makes has to be like.
	OpAttach = "attach"
	OpAdopt  = "adopt"
	OpPlan   = "plan"
	OpDetach = "detach"
	OpPolicy = "policy"
	OpList   = "list"
	// OpQuiet answers for how long a sandbox has neither sent nor received a byte.
	OpQuiet = "quiet"
	// OpCard answers with the outer end of a card.
	OpCard = "card"
	// OpPeers says who is in the private network Peers. OpWoken says that a sandbox which a [Notice] asked for has been started, or Why not.
	OpPeers  = "peers"
	OpWoken  = "woken"
	OpRetire = "retire"
)

// Request is a call.
type Request struct {
	Op     string  `json:"op"`
	ID     string  `json:"id,omitempty"`
	From   string  `json:"from,omitempty"`
	Policy *Policy `json:"policy,omitempty"`
	Peers  *Peers  `json:"peers,omitempty"`
	Why    string  `json:"why,omitempty"`
}

// Peers is a private network and who is in it; nobody means that it is gone. Key tells it apart from another of that name, Digest its state from
// another.
type Peers struct {
	Key     string `json:"key"`
	Name    string `json:"name"`
	Members []Peer `json:"members,omitempty"`
	Digest  string `json:"digest"`
}

// Peer is a sandbox in a private network.
type Peer struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
}

// Notice is what a gateway says without being asked, on the connection of OpHold.
type Notice struct {
	// Wake is a sandbox without a card that another of its private network wants to reach.
	Wake string `json:"wake,omitempty"`
}

// Policy is a policy as its author wrote it.
type Policy struct {
	Name   string `json:"name"`
	Source []byte `json:"source"`
	// Secrets are those that its grants name. Digest tells all of it apart from another, and is what [Attached] has; empty means that of the source.
	Secrets []Secret `json:"secrets,omitempty"`
	Digest  string   `json:"digest,omitempty"`
}

// Secret is a value that only the gateway can open, and what stands for it in the sandbox.
type Secret struct {
	Name         string   `json:"name"`
	Sealed       string   `json:"sealed,omitempty"`
	Placeholders []string `json:"placeholders,omitempty"`
}

// Response is an answer.
type Response struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
	// Kind is "not_found", "invalid" or empty.
	Kind string `json:"kind,omitempty"`

	Version int        `json:"version,omitempty"`
	Build   string     `json:"build,omitempty"`
	Card    *Card      `json:"card,omitempty"`
	Cards   []Attached `json:"cards,omitempty"`
	// Networks are the digests of the private networks, by key.
	Networks map[string]string `json:"networks,omitempty"`
	// Quiet is in nanoseconds.
	Quiet time.Duration `json:"quiet,omitempty"`
	// Authority is the certificate that sandboxes have to trust, in PEM form.
	Authority []byte `json:"authority,omitempty"`
}

// Card is what a sandbox has to know of its card.
type Card struct {
	MTU   uint32       `json:"mtu"`
	Addrs []netip.Addr `json:"addrs"`
	DNS   []netip.Addr `json:"dns"`
}

// Attached is a sandbox that has a card, and the digest of what it may do.
type Attached struct {
	ID     string `json:"id"`
	Policy string `json:"policy"`
}

// The errors that a gateway tells apart.
var (
	ErrNotFound = errors.New("the sandbox has no card")
	ErrInvalid  = errors.New("the policy is invalid")
	// ErrSuperseded says that what another call has set, which came later, is in force.
	ErrSuperseded = errors.New("the policy was superseded")
)

// ErrSilent says that there is a gateway, and that it does not answer in time. It is left as it is: nothing of sandboxes passes meanwhile, whoever has stopped it may have
// done so on purpose, and ending it would end their connections.
var ErrSilent = errors.New("the gateway does not answer")

const (
	// patience is how long a gateway may take to answer, and with secrets, which it opens with the help of others, longPatience. One that has not answered the
	// last call has impatience for each until it does: many may wait for it.
	patience     = 10 * time.Second
	longPatience = 40 * time.Second
	impatience   = 2 * time.Second
)

// within is how long an answer to a call is waited for.
func (c *Client) within(req *Request) time.Duration {
	switch {
	case c.silent.Load():
		return impatience
	case req.Policy != nil && len(req.Policy.Secrets) > 0:
		return longPatience
	}
	return patience
}

// silence describes a gateway that does not answer.
func (c *Client) silence(waited time.Duration) error {
	pid := c.p.PID()
	if pid == 0 {
		return fmt.Errorf("%w within %v", ErrSilent, waited)
	}
	again := fmt.Sprintf("`kill -KILL %d` has it replaced at once, which ends connections of sandboxes and nothing else", pid)
	if companion.Stopped(pid) {
		return fmt.Errorf("%w (process %d) within %v: it is stopped, as by SIGSTOP, a debugger or a frozen control group. `kill -CONT %d` lets it go on, %s. Until then nothing of sandboxes passes", ErrSilent, pid, waited, pid, again)
	}
	return fmt.Errorf("%w (process %d) within %v, though it runs. The machine may be short of processors or memory; %s. Until then nothing of sandboxes may pass", ErrSilent, pid, waited, again)
}

// Client is the daemon's side.
type Client struct {
	p    companion.Process
	wake func(ctx context.Context, id string) error

	mu        sync.Mutex
	conn      *net.UnixConn // of OpHold
	closed    bool
	authority []byte

	lost func()
	// silent says that the last call was not answered in time.
	silent atomic.Bool
}

// Options of a client.
type Options struct {
	// Dir holds the gateway's files, StateDir what it keeps: its certificate authority and its evidence.
	Dir, StateDir string
	// Path is the warren-gateway binary.
	Path string
	// Resolver is the name server that it asks, and Roots a file of certificates that it trusts besides the host's; either may be empty.
	Resolver, Roots string
	// Connections, Memory and Records are ceilings, see [gateway.Options]; 0 means the gateway's own.
	Connections, Records uint32
	Memory               int64
	// Near are networks whose addresses count as this machine's.
	Near []netip.Prefix
	// Secrets says where the key of secrets is, see [secret.ParseSource]; nil means that there are none.
	Secrets *secret.Source
	// Idle is how long a gateway stays without a card and without a client; 0 means 3 seconds: another is started in less.
	Idle time.Duration
	// Logger may not be nil.
	Logger *slog.Logger
	// Lost is called, on a goroutine of its own, when the gateway has gone away by itself. It has no card then.
	Lost func()
	// Wake is called, on a goroutine of its own, when a sandbox that has no card is to be started, because another wants to reach it; why not, if
	// not, is what it returns. Nil means that none can be.
	Wake func(ctx context.Context, id string) error
}

// New returns a client, which is to be opened.
func New(o Options) *Client {
	if o.Idle == 0 {
		o.Idle = 3 * time.Second
	}
	c := &Client{wake: o.Wake, lost: o.Lost, p: companion.Process{
		Name: Name, Dir: o.Dir, Path: o.Path, Log: o.Logger,
		Env: hostTrust(),
		Args: []string{"-dir", o.Dir, "-state", o.StateDir, "-idle", o.Idle.String(), "-resolver", o.Resolver, "-roots", o.Roots,
			"-connections", fmt.Sprint(o.Connections), "-memory", fmt.Sprint(o.Memory), "-records", fmt.Sprint(o.Records)},
	}}
	if len(o.Near) > 0 {
		var list []string
		for _, p := range o.Near {
			list = append(list, p.String())
		}
		c.p.Args = append(c.p.Args, "-near", strings.Join(list, ","))
	}
	if o.Secrets != nil {
		c.p.Args = append(c.p.Args, "-secrets", o.Secrets.String())
		if name := o.Secrets.Variable(); name != "" {
			c.p.Env = append(c.p.Env, name+"="+os.Getenv(name))
		}
	}
	return c
}

// Open finds the gateway of the directory, or starts one. It may be called again when it has failed.
func (c *Client) Open(ctx context.Context) error {
	if err := os.MkdirAll(c.p.Dir, 0o700); err != nil {
		return err
	}
	return c.ensure(ctx)
}

// hostTrust names the certificates that the daemon was told to trust, which are the gateway's as well.
func hostTrust() (env []string) {
	for _, name := range []string{"GODEBUG", "SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// ensure makes a gateway of our build answer, and holds a connection to it.
func (c *Client) ensure(ctx context.Context) error {
	lock, err := c.p.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	build, err := companion.BuildID(c.p.Path)
	if err != nil {
		return err
	}
	conn, r, _, err := c.roundTrip(ctx, &Request{Op: OpHold})
	if err == nil && (r.Version != Version || r.Build != build) {
		c.p.Log.Info("replace the gateway, which is of another build")
		conn.Close()
		gone, err := c.p.Gone()
		if err != nil {
			return err
		}
		if rc, _, _, err := c.roundTrip(ctx, &Request{Op: OpRetire}); err == nil {
			rc.Close()
		} else if !errors.Is(err, companion.ErrNone) {
			return fmt.Errorf("replace the gateway: %w", err)
		}
		if err := gone(ctx); err != nil {
			return err
		}
		conn = nil
	}
	if conn == nil && (err == nil || errors.Is(err, companion.ErrNone)) {
		starting, cancel := context.WithTimeout(ctx, startTime)
		err = c.p.Start(starting)
		cancel()
		if err == nil {
			conn, r, _, err = c.roundTrip(ctx, &Request{Op: OpHold})
		}
	}
	if err != nil {
		return fmt.Errorf("reach the gateway: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		conn.Close()
		return errors.New("the gateway's client is closed")
	}
	c.conn, c.authority = conn, r.Authority
	go func() {
		c.notices(conn)
		c.mu.Lock()
		over := c.closed
		c.mu.Unlock()
		said := ""
		for wait := 10 * time.Millisecond; !over; wait = min(2*wait, time.Second) {
			ctx, cancel := context.WithTimeout(context.Background(), startTime)
			err := c.ensure(ctx)
			cancel()
			if err == nil {
				if c.lost != nil {
					c.lost()
				}
				return
			}
			if err.Error() != said {
				said = err.Error()
				c.p.Log.Error("the gateway is gone and cannot be started; sandboxes have no network", "error", err)
			}
			time.Sleep(wait)
			c.mu.Lock()
			over = c.closed
			c.mu.Unlock()
		}
	}()
	return nil
}

// startTime is how long a gateway may take to start. It waits for one that is on its way out.
const startTime = 30 * time.Second

// notices answers what a gateway says without being asked, until the connection ends.
func (c *Client) notices(conn *net.UnixConn) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for {
		var n Notice
		files, err := message.Read(conn, &n)
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			conn.Close()
			return
		}
		if n.Wake == "" {
			continue
		}
		go func() {
			why := "the daemon starts none"
			if c.wake != nil {
				why = ""
				if err := c.wake(ctx, n.Wake); err != nil {
					why = err.Error()
				}
			}
			if _, _, err := c.call(ctx, &Request{Op: OpWoken, ID: n.Wake, Why: why}); err != nil && ctx.Err() == nil {
				c.p.Log.Warn("tell the gateway that a sandbox runs", "sandbox", n.Wake, "error", err)
			}
		}()
	}
}

// roundTrip makes a call and returns the connection on which it goes on.
func (c *Client) roundTrip(ctx context.Context, req *Request, files ...*os.File) (*net.UnixConn, *Response, []*os.File, error) {
	wait := c.within(req)
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	conn, r, got, err := c.exchange(limited, req, files...)
	switch {
	case errors.Is(err, unix.EAGAIN), err != nil && limited.Err() != nil && ctx.Err() == nil: // more callers wait than fit, or for too long
		c.silent.Store(true)
		return nil, nil, nil, c.silence(wait)
	case err == nil:
		c.silent.Store(false)
	}
	if err == nil && !r.OK {
		conn.Close()
		for _, f := range got {
			f.Close()
		}
		return nil, nil, nil, decode(r)
	}
	return conn, r, got, err
}

// exchange writes a call and reads its answer.
func (c *Client) exchange(ctx context.Context, req *Request, files ...*os.File) (*net.UnixConn, *Response, []*os.File, error) {
	conn, err := c.p.Connect(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	err = message.Write(conn, req, files...)
	r := &Response{}
	var got []*os.File
	if err == nil {
		got, err = message.Read(conn, r)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx) // the connection is of no more use
	}
	if err != nil {
		conn.Close()
		for _, f := range got {
			f.Close()
		}
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, nil, nil, err
	}
	return conn, r, got, nil
}

func decode(r *Response) error {
	for kind, err := range map[string]error{"not_found": ErrNotFound, "invalid": ErrInvalid, "superseded": ErrSuperseded} {
		if r.Kind == kind {
			return fmt.Errorf("%s: %w", r.Error, err)
		}
	}
	return errors.New(r.Error)
}

// call is roundTrip for what ends with its answer. While a gateway is being started anew, it waits for it.
func (c *Client) call(ctx context.Context, req *Request, files ...*os.File) (*Response, []*os.File, error) {
	for {
		conn, r, got, err := c.roundTrip(ctx, req, files...)
		if err == nil {
			conn.Close()
			return r, got, nil
		}
		if !errors.Is(err, companion.ErrNone) {
			return nil, nil, err
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("the gateway does not run: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Attach makes a card for a sandbox, which is served under the policy from now on, in place of one that it had. With from, names have the
// addresses they have for that sandbox.
func (c *Client) Attach(ctx context.Context, id string, p Policy, from string) (card Card, inside, outside *os.File, err error) {
	r, files, err := c.call(ctx, &Request{Op: OpAttach, ID: id, Policy: &p, From: from})
	if err != nil {
		return Card{}, nil, nil, err
	}
	if len(files) != 2 || r.Card == nil {
		for _, f := range files {
			f.Close()
		}
		return Card{}, nil, nil, fmt.Errorf("the gateway sent %d descriptors", len(files))
	}
	return *r.Card, files[0], files[1], nil
}

// Plan returns what a card that the sandbox's driver makes has to be like.
func (c *Client) Plan(ctx context.Context) (Card, error) {
	r, _, err := c.call(ctx, &Request{Op: OpPlan})
	if err == nil && r.Card == nil {
		err = errors.New("the gateway does not say what a card is like")
	}
	if err != nil {
		return Card{}, err
	}
	return *r.Card, nil
}

// Adopt has a gateway serve a card that is there, by its outer end, which the caller closes, in place of one that the sandbox had. With from,
// names have the addresses they have for that sandbox.
func (c *Client) Adopt(ctx context.Context, id string, outside *os.File, p Policy, from string) error {
	_, _, err := c.call(ctx, &Request{Op: OpAdopt, ID: id, Policy: &p, From: from}, outside)
	return err
}

// Detach ends a sandbox's flows and its card.
func (c *Client) Detach(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, &Request{Op: OpDetach, ID: id})
	return err
}

// SetPolicy changes a sandbox's policy; flows that it does not allow have ended when it returns.
func (c *Client) SetPolicy(ctx context.Context, id string, p Policy) error {
	_, _, err := c.call(ctx, &Request{Op: OpPolicy, ID: id, Policy: &p})
	return err
}

// SetPeers says who is in a private network, in place of who was. Flows of those that are not together any more have ended when it returns.
func (c *Client) SetPeers(ctx context.Context, p Peers) error {
	_, _, err := c.call(ctx, &Request{Op: OpPeers, Peers: &p})
	return err
}

// List returns the sandboxes that have a card, and the digests of the private networks by key.
func (c *Client) List(ctx context.Context) ([]Attached, map[string]string, error) {
	r, _, err := c.call(ctx, &Request{Op: OpList})
	if err != nil {
		return nil, nil, err
	}
	return r.Cards, r.Networks, nil
}

// Quiet says for how long a sandbox has neither sent nor received a byte.
func (c *Client) Quiet(ctx context.Context, id string) (time.Duration, error) {
	r, _, err := c.call(ctx, &Request{Op: OpQuiet, ID: id})
	if err != nil {
		return 0, err
	}
	return r.Quiet, nil
}

// Card returns the outer end of a sandbox's card, which the caller closes.
func (c *Client) Card(ctx context.Context, id string) (*os.File, error) {
	_, files, err := c.call(ctx, &Request{Op: OpCard, ID: id})
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("the gateway sent %d descriptors", len(files))
	}
	return files[0], nil
}

// Authority returns the certificate that sandboxes have to trust, in PEM form.
func (c *Client) Authority() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.authority
}

// Close lets go of the gateway, which goes on.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.conn != nil {
		return c.conn.Close()
	}
	return nil
}

// Retire ends the gateway of a directory, if there is one, also one that does not answer.
func Retire(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	c := &Client{p: companion.Process{Name: Name, Dir: dir, Log: slog.New(slog.DiscardHandler)}}
	// It has nothing to do any more, so that there is little to wait for.
	limited, cancel := context.WithTimeout(ctx, retireTime)
	defer cancel()
	err := c.Retire(limited)
	if errors.Is(err, ErrSilent) || limited.Err() != nil && ctx.Err() == nil {
		return c.p.Kill(ctx)
	}
	return err
}

// retireTime is how long a gateway that has nothing to do may take to end.
const retireTime = 5 * time.Second

// Retire ends the gateway, and with it all flows, and closes the client.
func (c *Client) Retire(ctx context.Context) error {
	c.Close()
	gone, err := c.p.Gone()
	if err != nil {
		return err
	}
	conn, _, _, err := c.roundTrip(ctx, &Request{Op: OpRetire})
	if errors.Is(err, companion.ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	conn.Close()
	return gone(ctx)
}
