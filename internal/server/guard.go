package server

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/wire"
)

// guard refuses requests that a web page made a browser send: those whose name was pointed at this server (DNS rebinding), and
// those from foreign origins.
type guard struct {
	hosts   []string
	origins []string
}

func newGuard(hosts, origins []string) (guard, error) {
	g := guard{hosts: []string{"localhost"}}
	for _, h := range hosts {
		name := strings.ToLower(h)
		if name == "" || strings.ContainsAny(name, ":/@*?# \t[]") || strings.HasSuffix(name, ".") {
			return g, fmt.Errorf("allowed host %q: %w: want a name without port, scheme or wildcard", h, warren.ErrInvalid)
		}
		g.hosts = append(g.hosts, name)
	}
	for _, o := range origins {
		u, err := url.Parse(o)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || o != u.Scheme+"://"+u.Host {
			return g, fmt.Errorf("allowed origin %q: %w: want scheme://host or scheme://host:port", o, warren.ErrInvalid)
		}
		g.origins = append(g.origins, strings.ToLower(o))
	}
	return g, nil
}

// check returns the fault of a request that may not go on.
func (g guard) check(r *http.Request) *wire.Fault {
	if !g.host(r) {
		return &wire.Fault{
			Kind:    wire.Kind{Name: "denied", Sentinel: warren.ErrDenied, Code: wire.Of(warren.ErrDenied).Code, Status: http.StatusMisdirectedRequest},
			Message: fmt.Sprintf("this server does not answer for the host %q", wire.Printable(r.Host, 200)),
			Hint:    "use localhost or the server's own address, or allow the name on the server",
		}
	}
	denied := func(message string) *wire.Fault {
		return &wire.Fault{Kind: wire.Of(warren.ErrDenied), Message: message}
	}
	origins := r.Header.Values("Origin")
	for _, o := range origins {
		if !slices.Contains(g.origins, strings.ToLower(o)) {
			return denied(fmt.Sprintf("pages of the origin %q may not use this server", wire.Printable(o, 200)))
		}
	}
	if r.Method == http.MethodOptions && (r.Header.Get("Access-Control-Request-Method") != "" || r.Header.Get("Access-Control-Request-Private-Network") != "") {
		return denied("this server answers no preflight requests")
	}
	// What a page can send without an Origin: navigations, images, forms of old browsers.
	if site := r.Header.Get("Sec-Fetch-Site"); len(origins) == 0 && site != "" && site != "same-origin" && site != "none" {
		return denied("requests of other sites' pages are refused")
	}
	return nil
}

func (g guard) host(r *http.Request) bool {
	name := strings.ToLower(r.Host)
	if h, port, err := net.SplitHostPort(name); err == nil {
		if port == "" || strings.ContainsFunc(port, func(c rune) bool { return c < '0' || c > '9' }) {
			return false
		}
		name = h
	} else {
		name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	}
	if slices.Contains(g.hosts, name) {
		return true
	}
	// A browser that was told a literal address did not resolve a name, so there was none to be pointed elsewhere. It must
	// be an address of this server all the same.
	ip, err := netip.ParseAddr(name)
	if err != nil || ip.Zone() != "" {
		return false
	}
	if ip.Unmap().IsLoopback() {
		return true
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	at, err := netip.ParseAddrPort(local.String())
	return err == nil && at.Addr().Unmap().WithZone("") == ip.Unmap()
}
