package preview

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// passed are headers of requests that a sandbox sees. Names that are not here, do not begin with one of passedPrefixes, and are none of the
// program's own X- headers do not go in: what a browser, a proxy or a platform adds tomorrow is not for a sandbox unless somebody says so.
var passed = set(
	"Accept", "Accept-Charset", "Accept-Datetime", "Accept-Encoding", "Accept-Language", "Accept-Patch", "Accept-Ranges",
	"Access-Control-Request-Headers", "Access-Control-Request-Method", "Apollo-Require-Preflight", "Authorization", "Baggage",
	"Cache-Control", "Cookie", "Csrf-Token", "Date", "Depth", "Destination", "Dnt", "Downlink", "Dpr", "Ect", "If-Match", "If-Modified-Since",
	"If-None-Match", "If-Range", "If-Unmodified-Since", "Idempotency-Key", "Last-Event-Id", "Origin", "Overwrite", "Pragma", "Prefer",
	"Priority", "Purpose", "Range", "Referer", "Rsc", "Rtt", "Save-Data", "Service-Worker", "Soapaction",
	"Traceparent", "Tracestate", "Tus-Resumable", "Upgrade-Insecure-Requests", "Upload-Length", "Upload-Metadata", "Upload-Offset", "User-Agent",
	"Viewport-Width", "Want-Digest", "Width", "Xsrf-Token",
	// What ReverseProxy has put there itself.
	"Connection", "Upgrade", "Te",
)

// passedPrefixes are families of headers: of content, of browsers (pages cannot set Sec-), and of frameworks.
var passedPrefixes = []string{"Content-", "Sec-", "Grpc-", "Connect-", "Hx-", "Turbo-", "Next-", "Vite-"}

// withheld are parts of X- names that tell who is in front of the sandbox, or that are credentials of platforms.
var withheld = []string{
	"forward", "proxy", "real-ip", "client-ip", "client-cert", "cluster-", "remote-", "original-", "rewrite-", "envoy", "amz", "goog", "appengine",
	"ms-", "api-key", "apikey", "access-token", "auth-request", "authenticated", "warren", "scheme", "-via",
}

func set(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, n := range names {
		m[n] = true
	}
	return m
}

// passes says whether a header, in its canonical form, goes into a sandbox.
func passes(name string) bool {
	if passed[name] {
		return true
	}
	if slices.ContainsFunc(passedPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
		return true
	}
	lower := strings.ToLower(name)
	return strings.HasPrefix(lower, "x-") && lower != "x-host" && !strings.ContainsFunc(lower, notHeader) &&
		!slices.ContainsFunc(withheld, func(w string) bool { return strings.Contains(lower, w) })
}

// notHeader refuses what some servers read as a dash, so that X_Forwarded_For is not X-Forwarded-For by another way.
func notHeader(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
}

// requestHeader makes what a sandbox sees of a request's headers. The request's own tokens and cookies are gone already.
//
// Without keep the sandbox is told that it is looked at as localhost, which every development server answers for, and nothing says
// otherwise: its own origin is replaced in Origin and Referer too. With keep it is told the preview's name, in Host and X-Forwarded-Host.
func (s *Server) requestHeader(h http.Header, t target, keep bool) {
	for name := range h {
		if !passes(name) {
			delete(h, name)
		}
	}
	if keep {
		h.Set("X-Forwarded-Host", t.host)
		h.Set("X-Forwarded-Proto", s.scheme)
	} else if o := h.Values("Origin"); len(o) == 1 && o[0] == t.origin {
		h.Set("Origin", inside(t))
	}
	refs := h.Values("Referer")
	h.Del("Referer")
	if len(refs) != 1 {
		return
	}
	u, err := url.Parse(refs[0])
	if err != nil || u.User != nil {
		return
	}
	if u.Scheme+"://"+u.Host == t.origin {
		// The page whose URL had the token is left at once, but not by all clients.
		u.RawQuery, _, _ = takeToken(u.RawQuery)
		if !keep {
			u.Scheme, u.Host = "http", "localhost:"+strconv.Itoa(int(t.port))
		}
		h.Set("Referer", u.String())
	} else if _, _, has := takeToken(u.RawQuery); !has {
		h.Set("Referer", refs[0])
	}
}

// inside is the origin that a sandbox takes itself to have.
func inside(t target) string { return "http://localhost:" + strconv.Itoa(int(t.port)) }

// dropped are headers of answers that act on more than the answer: on the network, on names, or on other users of a browser.
var dropped = []string{
	"Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins", "Public-Key-Pins-Report-Only", "Expect-Ct", "Service-Worker-Allowed", "Set-Cookie2", "Nel",
	"Proxy-Authenticate", "Proxy-Authentication-Info", "Access-Control-Allow-Private-Network", "Access-Control-Allow-Local-Network",
}

// responseHeader makes what a browser sees of a sandbox's headers. What acts on the preview's own origin is the sandbox's affair.
func (s *Server) responseHeader(h http.Header, t target, keep bool) {
	for _, name := range dropped {
		delete(h, name)
	}
	for name := range h {
		if strings.HasPrefix(name, "Warren-") {
			delete(h, name)
		}
	}
	clearOwn(h)
	cookies := h["Set-Cookie"]
	delete(h, "Set-Cookie")
	for _, c := range cookies {
		if c, ok := hostOnly(c); ok {
			h["Set-Cookie"] = append(h["Set-Cookie"], c)
		}
	}
	if !keep {
		s.rename(h, t)
	}
	// Pages of other origins may read answers if the sandbox says so, but not those to who is let in.
	if o := h.Values("Access-Control-Allow-Origin"); len(o) != 1 || o[0] != t.origin {
		delete(h, "Access-Control-Allow-Credentials")
	}
	// No page may loosen its origin to the domain that it shares with others.
	h.Set("Origin-Agent-Cluster", "?1")
}

// clearOwn leaves of Clear-Site-Data what it names of the preview's own origin. Cookies are cleared for the whole domain that previews share: a page would log its
// visitor out of all. What is not known may do as much, and is left out.
func clearOwn(h http.Header) {
	const name = "Clear-Site-Data"
	var kept []string
	for _, v := range h[name] {
		for part := range strings.SplitSeq(v, ",") {
			switch part = strings.TrimSpace(part); part {
			case `"cache"`, `"storage"`, `"executionContexts"`, `"prefetchCache"`, `"prerenderCache"`:
				kept = append(kept, part)
			}
		}
	}
	delete(h, name)
	if len(kept) > 0 {
		h.Set(name, strings.Join(kept, ", "))
	}
}

// rename replaces the origin that the sandbox takes itself to have by the one that it is reached under.
func (s *Server) rename(h http.Header, t target) {
	port := strconv.Itoa(int(t.port))
	own := []string{"http://localhost:" + port, "http://127.0.0.1:" + port}
	if t.port == 80 {
		own = append(own, "http://localhost", "http://127.0.0.1")
	}
	for _, o := range own {
		if v := h.Get("Access-Control-Allow-Origin"); v == o {
			h.Set("Access-Control-Allow-Origin", t.origin)
		}
		for _, name := range []string{"Location", "Content-Location"} {
			rest, ok := strings.CutPrefix(h.Get(name), o)
			if ok && (rest == "" || strings.ContainsAny(rest[:1], "/?#")) {
				h.Set(name, t.origin+rest)
			}
		}
	}
}

// hostOnly takes the Domain out of a cookie that a sandbox sets, and refuses those that have a name of ours.
func hostOnly(line string) (string, bool) {
	parts := strings.Split(line, ";")
	// A cookie without a name is sent as its value, which may look like one with a name.
	pair := strings.TrimLeft(strings.TrimSpace(parts[0]), "= \t")
	name, _, _ := strings.Cut(pair, "=")
	if ownCookie(strings.TrimSpace(name)) {
		return "", false
	}
	kept := parts[:1]
	for _, p := range parts[1:] {
		attr, _, _ := strings.Cut(p, "=")
		if !strings.EqualFold(strings.TrimSpace(attr), "domain") {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, ";"), true
}
