//go:build linux

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/warren-sandbox/warren/internal/policy"
)

// Resolver looks names up. [net.Resolver] is one.
type Resolver interface {
	// LookupNetIP returns the addresses of a name, both families for network "ip".
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Dialer connects to an address that has been decided on.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}

const (
	// lookupTime bounds one question to the resolver.
	lookupTime = 5 * time.Second
	// fresh is how long an answer is used again. The resolver does not say how long it holds, and a name that has moved must be found soon.
	fresh = 20 * time.Second
	// dialTime bounds the connection to all addresses of a name, eachDial that to one while there are others.
	dialTime = 15 * time.Second
	eachDial = 5 * time.Second
	// maxCache bounds the answers that are kept.
	maxCache = 4096
)

// errNoName says that a name does not exist.
var errNoName = errors.New("no such host")

// deniedError says that policy forbids what was asked for.
type deniedError struct {
	verdict policy.Verdict
	// addr is the address that was refused, if it was one.
	addr netip.Addr
}

func (e *deniedError) Error() string {
	if e.addr.IsValid() {
		return fmt.Sprintf("address %s is denied by %s: %s", e.addr, e.verdict.Rule, e.verdict.Reason)
	}
	return fmt.Sprintf("denied by %s: %s", e.verdict.Rule, e.verdict.Reason)
}

// resolver keeps answers for a moment and asks each question once at a time. What a name may be used for is not its business.
type resolver struct {
	from  Resolver
	own   *ownAddresses
	group singleflight.Group

	mu    sync.Mutex
	cache map[policy.Host]answer
}

type answer struct {
	addrs []netip.Addr
	err   error
	until time.Time
}

func newResolver(from Resolver, own func() ([]netip.Addr, error), near []netip.Prefix) *resolver {
	return &resolver{from: from, own: &ownAddresses{list: own, near: near}, cache: map[policy.Host]answer{}}
}

// lookup returns the addresses of a name, or the one of a literal.
func (r *resolver) lookup(ctx context.Context, h policy.Host) ([]netip.Addr, error) {
	if a, ok := h.Addr(); ok {
		return []netip.Addr{a}, nil
	}
	r.mu.Lock()
	got, ok := r.cache[h]
	r.mu.Unlock()
	if ok && time.Now().Before(got.until) {
		return got.addrs, got.err
	}
	// The question outlives whoever asked first: others may wait for it.
	done := r.group.DoChan(string(h), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookupTime)
		defer cancel()
		// With the dot no search domain of the host's is tried.
		addrs, err := r.from.LookupNetIP(ctx, "ip", string(h)+".")
		for i := range addrs {
			addrs[i] = addrs[i].Unmap()
		}
		var dns *net.DNSError
		if errors.As(err, &dns) && dns.IsNotFound {
			err = errNoName
		}
		if err == nil && len(addrs) == 0 {
			err = errNoName
		}
		if err == nil || errors.Is(err, errNoName) {
			r.keep(h, answer{addrs, err, time.Now().Add(fresh)})
		}
		return addrs, err
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case a := <-done:
		addrs, _ := a.Val.([]netip.Addr)
		return addrs, a.Err
	}
}

func (r *resolver) keep(h policy.Host, a answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.cache) >= maxCache {
		now := time.Now()
		for name, old := range r.cache {
			if now.After(old.until) {
				delete(r.cache, name)
			}
		}
		if len(r.cache) >= maxCache {
			clear(r.cache)
		}
	}
	r.cache[h] = a
}

// permitted returns those of the addresses of a flow's host that may be dialled. With none it returns why.
func (r *resolver) permitted(ctx context.Context, p *policy.Policy, f policy.Flow) ([]netip.Addr, error) {
	addrs, err := r.lookup(ctx, f.Host)
	if err != nil {
		return nil, err
	}
	var may []netip.Addr
	var denied error = errNoName
	for _, a := range addrs {
		if v := r.judge(p, f, a); v.Allow {
			may = append(may, a)
		} else {
			denied = &deniedError{v, a}
		}
	}
	if len(may) == 0 {
		return nil, denied
	}
	return may, nil
}

// judge decides on an address for a flow.
func (r *resolver) judge(p *policy.Policy, f policy.Flow, a netip.Addr) policy.Verdict {
	own, err := r.own.has(a)
	switch {
	case err != nil:
		return policy.Verdict{Rule: "address", Reason: "the addresses of this machine cannot be told: " + err.Error()}
	case own:
		return p.OwnAddress(f, a)
	}
	return p.Address(f, a)
}

// ownAddresses are those of the machine. They change while it runs.
type ownAddresses struct {
	list func() ([]netip.Addr, error)
	near []netip.Prefix // which count as well

	mu    sync.Mutex
	known map[netip.Addr]bool
	until time.Time
}

// ownFresh is how long the machine's addresses are taken to be the same. To ask for them takes longer than all else that a decision needs.
const ownFresh = time.Second

// nat64 is where IPv4 is reached over IPv6.
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// has says whether the machine has an address, also as one behind a translator of its network.
func (o *ownAddresses) has(a netip.Addr) (bool, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.known == nil || time.Now().After(o.until) {
		addrs, err := o.list()
		if err != nil {
			return false, err
		}
		o.known, o.until = make(map[netip.Addr]bool, len(addrs)), time.Now().Add(ownFresh)
		for _, own := range addrs {
			o.known[own.Unmap().WithZone("")] = true
		}
	}
	a = a.Unmap()
	if nat64.Contains(a) {
		b := a.As16()
		if o.counts(netip.AddrFrom4([4]byte(b[12:]))) {
			return true, nil
		}
	}
	return o.counts(a), nil
}

func (o *ownAddresses) counts(a netip.Addr) bool {
	return o.known[a] || slices.ContainsFunc(o.near, func(p netip.Prefix) bool { return p.Contains(a) })
}

// machineAddresses returns those of the machine's network cards.
func machineAddresses() (list []netip.Addr, err error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			return nil, fmt.Errorf("address %s: %w", a, err)
		}
		list = append(list, p.Addr())
	}
	return list, nil
}

// connect dials the first address that answers, of those that may be dialled and no other. A flow to IPv6 is tried as well when it has one: what the
// sandbox took is no wish, since it has both for every name.
func (r *resolver) connect(ctx context.Context, d Dialer, network string, p *policy.Policy, f policy.Flow) (net.Conn, netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	addrs, err := r.permitted(ctx, p, f)
	if err != nil {
		return nil, netip.Addr{}, err
	}
	var errs []error
	for i, a := range addrs {
		dctx, stop := ctx, context.CancelFunc(func() {})
		if i < len(addrs)-1 {
			dctx, stop = context.WithTimeout(ctx, eachDial)
		}
		c, err := d.DialContext(dctx, network, net.JoinHostPort(a.String(), strconv.Itoa(int(f.Port))))
		stop()
		if err == nil {
			return c, a, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, netip.Addr{}, errors.Join(errs...)
}
