package server

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
)

// poolKey is one port of one sandbox. Connections are never shared between keys.
type poolKey struct {
	id   warren.SandboxID
	port uint16
}

// pools keeps connections into sandboxes for the next request.
type pools struct {
	engine Engine
	mu     sync.Mutex
	pools  map[poolKey]*pool
}

type pool struct {
	*http.Transport
	used time.Time
}

const (
	// connIdle is shorter than what the guest allows, so that a request does not meet a connection about to close.
	connIdle = 30 * time.Second
	poolIdle = time.Minute
)

func newPools(ctx context.Context, e Engine) *pools {
	p := &pools{engine: e, pools: map[poolKey]*pool{}}
	go func() {
		tick := time.NewTicker(poolIdle)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				p.sweep(now)
			}
		}
	}()
	return p
}

// dialError is an error of the engine's Dial, which is the engine's word and not a broken connection.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// get returns the transport of a port. The caller of a request must have been let in before; that who makes a request
// dials its connection.
func (p *pools) get(key poolKey) http.RoundTripper {
	p.mu.Lock()
	defer p.mu.Unlock()
	if have := p.pools[key]; have != nil {
		have.used = time.Now()
		return have
	}
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := p.engine.DialPooled(ctx, callerOf(ctx), string(key.id), key.port)
			if err != nil {
				return nil, &dialError{err}
			}
			return c, nil
		},
		MaxIdleConnsPerHost:    16,
		MaxConnsPerHost:        1024,
		IdleConnTimeout:        connIdle,
		MaxResponseHeaderBytes: 256 << 10,
		DisableCompression:     true,
		// Bytes of requests and answers in memory, per connection.
		WriteBufferSize: 32 << 10,
		ReadBufferSize:  32 << 10,
	}
	p.pools[key] = &pool{t, time.Now()}
	return p.pools[key]
}

// drop closes the idle connections into a sandbox that is no more.
func (p *pools) drop(id warren.SandboxID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, have := range p.pools {
		if key.id == id {
			have.CloseIdleConnections()
			delete(p.pools, key)
		}
	}
}

func (p *pools) sweep(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, have := range p.pools {
		if now.Sub(have.used) > poolIdle {
			// Requests under way keep their connections, which then end with them or with connIdle.
			have.CloseIdleConnections()
			delete(p.pools, key)
		}
	}
}

func (p *pools) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, have := range p.pools {
		have.CloseIdleConnections()
		delete(p.pools, key)
	}
}
