package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/gateway/control"
	"github.com/warren-sandbox/warren/internal/secret"
)

// network is the engine's gateway: a process of its own, which is found or started when the first card is asked for.
type network struct {
	opts control.Options
	// lost is called when the gateway has been started anew.
	lost atomic.Pointer[func()]
	// wake starts a sandbox that another of its private network wants to reach.
	wake atomic.Pointer[func(context.Context, warren.SandboxID) error]

	mu sync.Mutex
	// c is the gateway's client, nil before anything was asked of it. opened says that it has found one.
	c      *control.Client
	opened bool
	closed bool
}

// network returns the gateway of the data directory.
func (d *daemon) network(secrets *secret.Source) (*network, error) {
	path, err := findProgram("warren-gateway", "WARREN_GATEWAY")
	if err != nil {
		return nil, err
	}
	n := &network{opts: control.Options{
		Dir: filepath.Join(d.cfg.DataDir, "run", "gateway"), StateDir: filepath.Join(d.cfg.DataDir, "gateway"), Path: path,
		Connections: d.cfg.Gateway.Connections, Memory: int64(d.cfg.Gateway.Memory), Records: d.cfg.Gateway.Records,
		Resolver: d.cfg.Gateway.Resolver, Roots: d.cfg.Gateway.Roots, Near: d.cfg.Gateway.Own, Secrets: secrets, Logger: d.log.With("part", "gateway"),
	}}
	n.opts.Lost = func() {
		if f := n.lost.Load(); f != nil {
			(*f)()
		}
	}
	n.opts.Wake = func(ctx context.Context, id string) error {
		f := n.wake.Load()
		if f == nil {
			return errors.New("the daemon is not ready yet")
		}
		return (*f)(ctx, warren.SandboxID(id))
	}
	d.onClose(n.close)
	return n, nil
}

func (n *network) client(ctx context.Context) (*control.Client, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, fmt.Errorf("the server is stopping: %w", warren.ErrUnavailable)
	}
	if n.c == nil {
		n.c = control.New(n.opts)
	}
	if !n.opened {
		if err := n.c.Open(ctx); err != nil {
			return nil, err
		}
		n.opened = true
	}
	return n.c, nil
}

// close lets go of the gateway, and ends it if it has nothing to do.
func (n *network) close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	if !n.opened {
		return nil
	}
	// One that does not answer is left: it ends by itself when it has nothing to do.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if list, _, err := n.c.List(ctx); err == nil && len(list) == 0 {
		return n.c.Retire(ctx)
	}
	return n.c.Close()
}

// kind gives the gateway's errors those of the API.
func kind(err error) error {
	switch {
	case errors.Is(err, control.ErrSilent):
		// Clients are not to come again for it until they are out of patience: who reads it can do something.
		return &warren.Error{Kind: "unavailable", Resource: warren.ResourceGateway, Err: err}
	case errors.Is(err, control.ErrNotFound):
		return fmt.Errorf("%w: %w", err, warren.ErrNotFound)
	case errors.Is(err, control.ErrSuperseded):
		return fmt.Errorf("%w: %w", err, engine.ErrSuperseded)
	case errors.Is(err, control.ErrInvalid):
		return fmt.Errorf("%w: %w", err, warren.ErrInvalid)
	case err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", err, warren.ErrUnavailable)
	}
	return err
}

func policyOf(p engine.NetworkPolicy) control.Policy {
	q := control.Policy{Name: p.Name, Source: p.Source, Digest: p.Digest}
	for _, s := range p.Secrets {
		q.Secrets = append(q.Secrets, control.Secret(s))
	}
	return q
}

func (n *network) Attach(ctx context.Context, id warren.SandboxID, p engine.NetworkPolicy, from warren.SandboxID) (*driver.Card, error) {
	c, err := n.client(ctx)
	if err != nil {
		return nil, kind(err)
	}
	card, inside, outside, err := c.Attach(ctx, string(id), policyOf(p), string(from))
	if err != nil {
		return nil, kind(err)
	}
	return &driver.Card{Inside: inside, Outside: outside, MTU: card.MTU, Addrs: card.Addrs, DNS: card.DNS}, nil
}

func (n *network) Plan(ctx context.Context) (*driver.Card, error) {
	c, err := n.client(ctx)
	if err != nil {
		return nil, kind(err)
	}
	card, err := c.Plan(ctx)
	if err != nil {
		return nil, kind(err)
	}
	return &driver.Card{MTU: card.MTU, Addrs: card.Addrs, DNS: card.DNS}, nil
}

func (n *network) Adopt(ctx context.Context, id warren.SandboxID, outside *os.File, p engine.NetworkPolicy, from warren.SandboxID) error {
	c, err := n.client(ctx)
	if err == nil {
		err = c.Adopt(ctx, string(id), outside, policyOf(p), string(from))
	}
	return kind(err)
}

func (n *network) Detach(ctx context.Context, id warren.SandboxID) error {
	c, err := n.client(ctx)
	if err == nil {
		err = c.Detach(ctx, string(id))
	}
	return kind(err)
}

func (n *network) SetPolicy(ctx context.Context, id warren.SandboxID, p engine.NetworkPolicy) error {
	c, err := n.client(ctx)
	if err == nil {
		err = c.SetPolicy(ctx, string(id), policyOf(p))
	}
	return kind(err)
}

func (n *network) Attached(ctx context.Context) (map[warren.SandboxID]string, error) {
	c, err := n.client(ctx)
	if err != nil {
		return nil, kind(err)
	}
	list, _, err := c.List(ctx)
	if err != nil {
		return nil, kind(err)
	}
	m := make(map[warren.SandboxID]string, len(list))
	for _, a := range list {
		m[warren.SandboxID(a.ID)] = a.Policy
	}
	return m, nil
}

func (n *network) SetPeers(ctx context.Context, p engine.PeerNetwork) error {
	c, err := n.client(ctx)
	if err != nil {
		return kind(err)
	}
	q := control.Peers{Key: p.Key, Name: p.Name, Digest: p.Digest}
	for _, m := range p.Members {
		q.Members = append(q.Members, control.Peer{ID: string(m.ID), Name: m.Name})
	}
	return kind(c.SetPeers(ctx, q))
}

func (n *network) PeerNetworks(ctx context.Context) (map[string]string, error) {
	c, err := n.client(ctx)
	if err != nil {
		return nil, kind(err)
	}
	_, has, err := c.List(ctx)
	return has, kind(err)
}

func (n *network) Quiet(ctx context.Context, id warren.SandboxID) (time.Duration, error) {
	c, err := n.client(ctx)
	if err != nil {
		return 0, kind(err)
	}
	d, err := c.Quiet(ctx, string(id))
	return d, kind(err)
}

func (n *network) Card(ctx context.Context, id warren.SandboxID) (*os.File, error) {
	c, err := n.client(ctx)
	if err != nil {
		return nil, kind(err)
	}
	f, err := c.Card(ctx, string(id))
	return f, kind(err)
}

func (n *network) Authority() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.c == nil {
		return nil
	}
	return n.c.Authority()
}

// secrets says where the key of secrets is: in the data directory, if nothing else is configured.
func (d *daemon) secrets() (*secret.Source, error) {
	where := d.cfg.Secrets.Key
	if where == "" {
		where = "file:" + filepath.Join(d.cfg.DataDir, "secrets", "key")
		if err := os.MkdirAll(filepath.Join(d.cfg.DataDir, "secrets"), 0o700); err != nil {
			return nil, err
		}
	}
	return secret.ParseSource(where)
}
