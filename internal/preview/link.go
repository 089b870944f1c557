package preview

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

const (
	// Parameter carries the token of a link.
	Parameter = "warren_token"
	// secureCookie is bound by browsers to one host and to TLS; over HTTP there is no such name.
	secureCookie = "__Host-warren"
	plainCookie  = "warren_preview"
	// tokenHeader carries an API token where Authorization belongs to the program in the sandbox.
	tokenHeader = "X-Warren-Token"
)

// The kinds of tokens. None is good as another.
const (
	linkKind   = "link"
	cookieKind = "cookie"
)

// mint makes a token that lets into one port of one sandbox until it expires: the time, and a MAC over it and all that it is for.
func (s *Server) mint(kind string, id warren.SandboxID, port uint16, epoch uint64, expires int64) string {
	return strconv.FormatInt(expires, 36) + "." + base64.RawURLEncoding.EncodeToString(s.mac(kind, id, port, epoch, expires))
}

func (s *Server) mac(kind string, id warren.SandboxID, port uint16, epoch uint64, expires int64) []byte {
	m := hmac.New(sha256.New, s.opts.Key)
	fmt.Fprintf(m, "warren preview v1\n%s\n%s\n%d\n%d\n%d\n", kind, id, port, epoch, expires)
	return m.Sum(nil)
}

// check returns when a token expires, if it is good now. The work is the same for every token, and for a sandbox that is not there.
func (s *Server) check(kind, token string, t target, epoch uint64) (time.Time, bool) {
	when, sum, ok := strings.Cut(token, ".")
	if !ok || len(token) > 100 {
		return time.Time{}, false
	}
	n, err := strconv.ParseInt(when, 36, 64)
	if err != nil || n < 0 || strconv.FormatInt(n, 36) != when {
		return time.Time{}, false
	}
	got, err := base64.RawURLEncoding.Strict().DecodeString(sum)
	if err != nil {
		return time.Time{}, false
	}
	good := subtle.ConstantTimeCompare(got, s.mac(kind, t.id, t.port, epoch, n)) == 1
	expires := time.Unix(n, 0)
	return expires, good && s.now().Before(expires)
}

// host is the name of a preview, with the port of this server where that is not what the scheme says.
func (s *Server) host(id warren.SandboxID, port uint16) string {
	h := fmt.Sprintf("%d-%s.%s", port, id, s.domain)
	if s.opts.Port != 0 {
		h += ":" + strconv.Itoa(s.opts.Port)
	}
	return h
}

// URL is where a preview is.
func (s *Server) URL(id warren.SandboxID, port uint16) string {
	return s.scheme + "://" + s.host(id, port) + "/"
}

// Link is the URL of a preview with a token that lets in until it expires.
func (s *Server) Link(p engine.Preview, ttl time.Duration) (link string, expires time.Time) {
	expires = s.now().Add(ttl).Truncate(time.Second)
	token := s.mint(linkKind, p.SandboxID, p.Port, p.Epoch, expires.Unix())
	return s.URL(p.SandboxID, p.Port) + "?" + Parameter + "=" + token, expires
}

// takeToken takes the token of a link out of a raw query and leaves the rest as it is. Of several, none counts, and none is left.
func takeToken(query string) (rest, token string, found bool) {
	if query == "" {
		return "", "", false
	}
	var kept []string
	for _, part := range strings.Split(query, "&") {
		key, value, _ := strings.Cut(part, "=")
		if name, err := url.QueryUnescape(key); err != nil || name != Parameter {
			kept = append(kept, part)
			continue
		}
		if found {
			token = ""
			continue
		}
		found = true
		token, _ = url.QueryUnescape(value)
	}
	return strings.Join(kept, "&"), token, found
}

func (s *Server) cookieName() string {
	if s.scheme == "https" {
		return secureCookie
	}
	return plainCookie
}

// cookie is what a link is exchanged for. It ends when the link does, and is for this host alone.
func (s *Server) cookie(t target, epoch uint64, expires time.Time) *http.Cookie {
	return &http.Cookie{
		Name: s.cookieName(), Value: s.mint(cookieKind, t.id, t.port, epoch, expires.Unix()), Path: "/", Expires: expires,
		HttpOnly: true, Secure: s.scheme == "https", SameSite: http.SameSiteLaxMode,
	}
}

// ownCookie says whether a name is that of a cookie of ours, whichever the scheme. Browsers compare the prefix without regard to case.
func ownCookie(name string) bool {
	return strings.EqualFold(name, secureCookie) || strings.EqualFold(name, plainCookie)
}

// takeCookies splits the cookies of a request into ours and the others, which stay as they are.
func (s *Server) takeCookies(h http.Header) (others, tokens []string) {
	for _, line := range h.Values("Cookie") {
		var kept []string
		for _, part := range strings.Split(line, ";") {
			part = strings.TrimSpace(part)
			name, value, _ := strings.Cut(part, "=")
			switch name = strings.TrimSpace(name); {
			case part == "":
			case !ownCookie(name):
				kept = append(kept, part)
			case name == s.cookieName() && len(tokens) < 4:
				tokens = append(tokens, strings.Trim(strings.TrimSpace(value), `"`))
			}
		}
		if len(kept) > 0 {
			others = append(others, strings.Join(kept, "; "))
		}
	}
	return others, tokens
}
