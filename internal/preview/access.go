package preview

import (
	"context"
	"encoding/base64"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/engine"
)

// grant is why a request was let in.
type grant struct {
	preview engine.Preview
	// expires and epoch are those of a link or its cookie; token is an API token. All are zero for a public preview.
	expires time.Time
	signed  bool
	token   string
	// by and user say in whose name it is, as [Use] does.
	by, user string
	// wait is how long who was not let in has to wait before another API token of theirs is looked at.
	wait time.Duration
	// linked says that the query had a token, and link that it was good.
	linked, link bool
}

// admit finds out whether a request may go on, and takes from it what lets it in. A preview that is not there, one that is not for this
// caller, and a token that is wrong, old or another's give the same answer.
func (s *Server) admit(r *http.Request, t target) (grant, bool) {
	p, there := s.opts.Engine.PreviewOf(t.id, t.port)
	query, linkToken, linked := takeToken(r.URL.RawQuery)
	g := grant{preview: p, linked: linked}
	r.URL.RawQuery = query
	others, cookies := s.takeCookies(r.Header)
	delete(r.Header, "Cookie")
	if len(others) > 0 {
		r.Header["Cookie"] = others
	}
	api := takeAPIToken(r.Header)
	if linked {
		if expires, ok := s.check(linkKind, linkToken, t, p.Epoch); ok && there {
			g.expires, g.signed, g.link, g.by, g.user = expires, true, true, "link", p.Owner
			return g, true
		}
	}
	if there && p.Public {
		g.by = "public"
		return g, true
	}
	for _, c := range cookies {
		if expires, ok := s.check(cookieKind, c, t, p.Epoch); ok && there && ownPage(r, t) {
			g.expires, g.signed, g.by, g.user = expires, true, "cookie", p.Owner
			return g, true
		}
	}
	if api == "" {
		return grant{}, false
	}
	user, good, may := s.mayUse(r.Context(), api, t)
	if may && there {
		g.token, g.by, g.user = api, "token", user
		return g, true
	}
	if !good && s.opts.Tries != nil {
		// Whatever the preview: only that the token is nobody's counts.
		if wait := s.opts.Tries.Wait(r.RemoteAddr); wait > 0 {
			return grant{wait: wait}, false
		}
		s.opts.Tries.Failed(r.RemoteAddr)
	}
	return grant{}, false
}

// mayUse says whether an API token is good, whose it is, and whether that user may use the sandbox.
func (s *Server) mayUse(ctx context.Context, token string, t target) (user string, good, may bool) {
	c, err := s.opts.Engine.Authenticate(ctx, token)
	if err != nil {
		return "", false, false
	}
	id, err := s.opts.Engine.Resolve(c, string(t.id))
	return c.User, true, err == nil && id == t.id
}

// still says whether what let a request in is still good.
func (s *Server) still(ctx context.Context, t target, g grant) bool {
	p, there := s.opts.Engine.PreviewOf(t.id, t.port)
	switch {
	case !there:
		return false
	case g.signed:
		return p.Epoch == g.preview.Epoch && s.now().Before(g.expires)
	case g.token != "":
		_, _, may := s.mayUse(ctx, g.token, t)
		return may
	}
	return p.Public
}

// apiToken is how the tokens of this server begin.
const apiToken = "warren_"

// takeAPIToken returns the API token of a request and removes whatever has the form of one, so that it gets no further.
func takeAPIToken(h http.Header) string {
	token := ""
	if v := h.Values(tokenHeader); len(v) == 1 {
		token = strings.TrimSpace(v[0])
	}
	delete(h, tokenHeader)
	values := h.Values("Authorization")
	for _, v := range values {
		if !hasAPIToken(v) {
			continue
		}
		if scheme, rest, ok := strings.Cut(v, " "); token == "" && len(values) == 1 && ok && strings.EqualFold(scheme, "Bearer") {
			token = strings.TrimSpace(rest)
		}
		delete(h, "Authorization")
	}
	if len(token) > 512 {
		return ""
	}
	return token
}

// hasAPIToken says whether an API token is in the value of a header, also as the name or password of Basic.
func hasAPIToken(v string) bool {
	if strings.Contains(v, apiToken) {
		return true
	}
	_, rest, _ := strings.Cut(v, " ")
	for _, e := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
		if b, err := e.DecodeString(strings.TrimSpace(rest)); err == nil && strings.Contains(string(b), apiToken) {
			return true
		}
	}
	return false
}

// ownPage says whether a request that carries a cookie was made by a page of the preview itself, or by a person. Previews below one
// domain are the same site to a browser, which then sends the cookie of one along with what a page of the other asks for.
func ownPage(r *http.Request, t target) bool {
	origins := r.Header.Values("Origin")
	own := len(origins) == 1 && origins[0] == t.origin
	switch site := r.Header.Get("Sec-Fetch-Site"); {
	case site == "same-origin":
		// A page that tells nobody where it comes from sends null to itself too.
		return own || len(origins) == 0 || len(origins) == 1 && origins[0] == "null"
	case own:
		return true
	case len(origins) > 0:
		return false
	case site == "" || site == "none":
		// Every browser sends an Origin with what changes something; what does not may be a person's.
		return safe(r.Method)
	default:
		// Another page may lead here, in a window of its own, and no more.
		return safe(r.Method) && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	}
}

func safe(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// live ends requests under way when what let them in is no longer good.
type live struct {
	mu   sync.Mutex
	all  map[*liveRequest]struct{}
	used map[place]int // requests by port of a sandbox
}

type liveRequest struct {
	t      target
	g      grant
	cancel context.CancelFunc
}

// enter notes a request, unless its port has too many.
func (s *Server) enter(ctx context.Context, t target, g grant) (context.Context, func(), bool) {
	ctx, cancel := context.WithCancel(ctx)
	l := &liveRequest{t, g, cancel}
	at := place{t.id, t.port}
	s.live.mu.Lock()
	defer s.live.mu.Unlock()
	if s.live.used[at] >= s.opts.MaxRequests || len(s.live.all) >= s.opts.MaxTotal {
		cancel()
		return nil, nil, false
	}
	s.live.used[at]++
	s.live.all[l] = struct{}{}
	return ctx, func() {
		cancel()
		s.live.mu.Lock()
		defer s.live.mu.Unlock()
		delete(s.live.all, l)
		if s.live.used[at]--; s.live.used[at] == 0 {
			delete(s.live.used, at)
		}
	}, true
}

// recheck looks at each request under way again.
func (s *Server) recheck(ctx context.Context) {
	s.live.mu.Lock()
	all := make([]*liveRequest, 0, len(s.live.all))
	for l := range s.live.all {
		all = append(all, l)
	}
	s.live.mu.Unlock()
	for _, l := range all {
		if !s.still(ctx, l.t, l.g) {
			l.cancel()
		}
	}
}
