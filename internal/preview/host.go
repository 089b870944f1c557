package preview

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

// target is what the host of a request names.
type target struct {
	id   warren.SandboxID
	port uint16
	// host is as the browser has it, with the port of this server if it said one; origin is the preview's.
	host, origin string
}

// label is the one form of a preview's name: the port, as people write it, and the whole id of a sandbox.
var label = regexp.MustCompile(`^([1-9][0-9]{0,4})-(s[a-z0-9]{19})$`)

// digits are those of a port in a Host.
var digits = regexp.MustCompile(`^[0-9]{1,5}$`)

// route finds out which preview a request is for, by its host and nothing else. Names are compared byte by byte: one that a client
// spells otherwise than browsers do, such as with capitals or a dot at its end, is nobody's.
func (s *Server) route(r *http.Request) (target, *problem) {
	var t target
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace || !strings.HasPrefix(r.RequestURI, "/") {
		// Whoever takes this for a proxy names another host in the line of the request.
		return t, badRequest
	}
	// net/http refuses two Host lines, but over HTTP/2 there may be one beside the :authority.
	if more := r.Header["Host"]; len(more) > 0 && (len(more) > 1 || more[0] != r.Host) {
		return t, badRequest
	}
	name, port, said := strings.Cut(r.Host, ":")
	if said && !digits.MatchString(port) {
		return t, badHost
	}
	first, found := strings.CutSuffix(name, "."+s.domain)
	if !found || strings.Contains(first, ".") {
		return t, badHost
	}
	// A browser reuses a connection for all names that its certificate covers; asked to come again, it opens another.
	if r.TLS != nil && r.TLS.ServerName != name {
		return t, badHost
	}
	m := label.FindStringSubmatch(first)
	if m == nil {
		return t, badName
	}
	n, err := strconv.ParseUint(m[1], 10, 32)
	if err != nil || engine.CheckPreviewPort(n) != nil {
		return t, badPort
	}
	return target{id: warren.SandboxID(m[2]), port: uint16(n), host: r.Host, origin: s.scheme + "://" + r.Host}, nil
}
