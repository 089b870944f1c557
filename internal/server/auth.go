package server

import (
	"context"
	"crypto/sha256"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/wire"
)

// tokenCheck is how often the tokens of requests under way are looked up again.
const tokenCheck = 2 * time.Second

var unauthenticated = wire.Kind{Name: "denied", Sentinel: warren.ErrDenied, Code: connect.CodeUnauthenticated, Status: http.StatusUnauthorized}

// authenticate finds out who makes a request. The context that it returns ends when the caller's token does.
func (s *Server) authenticate(w http.ResponseWriter, r *http.Request) (context.Context, context.CancelFunc, *wire.Fault) {
	ctx := r.Context()
	if p, ok := ctx.Value(peerKey).(peer); ok {
		if p.err != nil || p.uid != uint32(os.Getuid()) && p.uid != 0 {
			return nil, nil, &wire.Fault{Kind: wire.Of(warren.ErrDenied), Message: "this socket is for the server's own user", Hint: "use the server's TCP address with a token"}
		}
		ctx, cancel := context.WithCancel(context.WithValue(ctx, callerKey, engine.Caller{User: s.opts.OperatorName, Operator: true}))
		return ctx, cancel, nil
	}
	token, found := bearer(r)
	if !found {
		// Nothing was guessed, so nothing is counted.
		w.Header().Set("WWW-Authenticate", `Bearer realm="warren"`)
		return nil, nil, &wire.Fault{Kind: unauthenticated, Message: "a bearer token is needed", Hint: "`warren token create` on the server makes one"}
	}
	// A good token passes whatever others at its address do: many share one, behind a proxy or on this host.
	caller, err := s.engine.Authenticate(ctx, token)
	if err != nil {
		if k := wire.Judge(err, wire.Audience{}); k.Name != "denied" && k.Name != "not_found" && k.Name != "invalid" {
			return nil, nil, s.judge(ctx, "authenticate", err)
		}
		if wait := s.tries.Wait(r.RemoteAddr); wait > 0 {
			w.Header().Set("Retry-After", retryAfter(wait))
			return nil, nil, &wire.Fault{Kind: wire.Of(warren.ErrExhausted), Message: "too many requests with bad tokens from this address", Hint: "try again later", Resource: "failed logins per address"}
		}
		s.tries.Failed(r.RemoteAddr)
		w.Header().Set("WWW-Authenticate", `Bearer realm="warren", error="invalid_token"`)
		return nil, nil, &wire.Fault{Kind: unauthenticated, Message: "the token is not valid", Hint: "it may have expired or been revoked"}
	}
	if p, ok := ctx.Value(placeKey).(*place); ok {
		p.known()
	}
	ctx, cancel := s.tokens.hold(context.WithValue(ctx, callerKey, caller), token)
	return ctx, cancel, nil
}

// bearer returns the token of a request, which has one Authorization header or it has none.
func bearer(r *http.Request) (string, bool) {
	values := r.Header.Values("Authorization")
	if len(values) != 1 {
		return "", false
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	token = strings.TrimSpace(token)
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > 512 {
		return "", false
	}
	return token, true
}

// sourceOf is what failures are counted by: an IPv4 address, or the network of an IPv6 address, of which one client has as many as it
// likes.
func sourceOf(remote string) netip.Prefix {
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := at.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits)
	return p
}

func retryAfter(d time.Duration) string {
	seconds := int64((d + time.Second - 1) / time.Second)
	return itoa(max(1, seconds))
}

// Tries counts bad tokens by source, at all doors that share it. Good ones cost nothing.
type Tries struct {
	mu      sync.Mutex
	sources map[netip.Prefix]*rate.Limiter
	now     func() time.Time
}

const (
	triesBurst = 20
	triesEvery = 3 * time.Second
	// maxSources bounds the memory that counting takes.
	maxSources = 16 << 10
)

// NewTries returns one that has counted nothing yet.
func NewTries() *Tries {
	return &Tries{sources: map[netip.Prefix]*rate.Limiter{}, now: time.Now}
}

// Wait returns how long a remote address has to wait before it is told again what its token is worth.
func (t *Tries) Wait(remote string) time.Duration {
	source := sourceOf(remote)
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.sources[source]
	if l == nil {
		return 0
	}
	tokens := l.TokensAt(t.now())
	if tokens >= 1 {
		return 0
	}
	return time.Duration((1 - tokens) * float64(triesEvery))
}

// Failed counts a token of a remote address that was not good.
func (t *Tries) Failed(remote string) {
	source := sourceOf(remote)
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	l := t.sources[source]
	if l == nil {
		if len(t.sources) >= maxSources {
			t.forget(now)
		}
		l = rate.NewLimiter(rate.Every(triesEvery), triesBurst)
		t.sources[source] = l
	}
	l.AllowN(now, 1)
}

// forget drops sources that have made good, or else any.
func (t *Tries) forget(now time.Time) {
	for p, l := range t.sources {
		if l.TokensAt(now) >= triesBurst-1 {
			delete(t.sources, p)
		}
	}
	for p := range t.sources {
		if len(t.sources) < maxSources {
			break
		}
		delete(t.sources, p)
	}
}

// liveTokens ends requests whose token is revoked or has expired while they are under way.
type liveTokens struct {
	engine Engine
	mu     sync.Mutex
	live   map[[sha256.Size]byte]*liveToken
}

type liveToken struct {
	// token is held only while its requests, which hold it too, are under way.
	token   string
	caller  engine.Caller
	cancels map[int]context.CancelCauseFunc
	next    int
}

func newLiveTokens(ctx context.Context, e Engine, every time.Duration) *liveTokens {
	t := &liveTokens{engine: e, live: map[[sha256.Size]byte]*liveToken{}}
	go func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				t.check(ctx)
			}
		}
	}()
	return t
}

// hold returns a context that ends when the token does, or when the request calls the returned function.
func (t *liveTokens) hold(ctx context.Context, token string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	key := sha256.Sum256([]byte(token))
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.live[key]
	if l == nil {
		l = &liveToken{token: token, caller: callerOf(ctx), cancels: map[int]context.CancelCauseFunc{}}
		t.live[key] = l
	}
	id := l.next
	l.next++
	l.cancels[id] = cancel
	return ctx, func() {
		cancel(nil)
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(l.cancels, id)
		if len(l.cancels) == 0 && t.live[key] == l {
			delete(t.live, key)
		}
	}
}

// check looks up each live token again and cuts the requests of those that are gone.
func (t *liveTokens) check(ctx context.Context) {
	t.mu.Lock()
	live := make([]*liveToken, 0, len(t.live))
	for _, l := range t.live {
		live = append(live, l)
	}
	t.mu.Unlock()
	for _, l := range live {
		caller, err := t.engine.Authenticate(ctx, l.token)
		if err == nil && caller == l.caller {
			continue
		}
		if err != nil {
			if k := wire.Judge(err, wire.Audience{}); k.Name != "denied" && k.Name != "not_found" && k.Name != "invalid" {
				continue // the store cannot say
			}
		}
		t.mu.Lock()
		for _, cancel := range l.cancels {
			cancel(warren.ErrDenied)
		}
		t.mu.Unlock()
	}
}

// shares bounds how many requests a caller has under way.
type shares struct {
	max  int
	mu   sync.Mutex
	used map[string]int
}

func newShares(max int) *shares { return &shares{max: max, used: map[string]int{}} }

func (s *shares) take(user string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[user] >= s.max {
		return false
	}
	s.used[user]++
	return true
}

func (s *shares) give(user string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[user]--; s.used[user] == 0 {
		delete(s.used, user)
	}
}
