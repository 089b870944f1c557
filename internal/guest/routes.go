package guest

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren/internal/guest/file"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

// route fills the table of what the guest answers.
func (s *Server) route() {
	s.routes = map[string]http.HandlerFunc{
		"/process.Process/List":        unary(s, s.processList),
		"/process.Process/Start":       s.attached(s.tellTurn(serverStream(s, s.processStart))),
		"/process.Process/Connect":     s.attached(serverStream(s, s.processConnect)),
		"/process.Process/Update":      unary(s, s.processUpdate),
		"/process.Process/StreamInput": clientStream(s, s.processStreamInput),
		"/process.Process/SendInput":   unary(s, s.processSendInput),
		"/process.Process/SendSignal":  unary(s, s.processSendSignal),
		"/process.Process/CloseStdin":  unary(s, s.processCloseStdin),

		"/filesystem.Filesystem/Stat":             unary(s, s.entryCall(file.Stat)),
		"/filesystem.Filesystem/MakeDir":          unary(s, s.entryCall(file.MakeDir)),
		"/filesystem.Filesystem/Move":             unary(s, s.fileMove),
		"/filesystem.Filesystem/ListDir":          unary(s, s.fileList),
		"/filesystem.Filesystem/Remove":           unary(s, s.fileRemove),
		"/filesystem.Filesystem/WatchDir":         serverStream(s, s.fileWatch),
		"/filesystem.Filesystem/CreateWatcher":    unary(s, s.fileCreateWatcher),
		"/filesystem.Filesystem/GetWatcherEvents": unary(s, s.fileWatcherEvents),
		"/filesystem.Filesystem/RemoveWatcher":    unary(s, s.fileRemoveWatcher),

		"/warren.guest.v1.GuestService/Attach":         s.attached(serverStream(s, s.attach)),
		"/warren.guest.v1.GuestService/ListProcesses":  unary(s, s.listProcesses),
		"/warren.guest.v1.GuestService/Signal":         unary(s, s.signal),
		"/warren.guest.v1.GuestService/Search":         serverStream(s, s.search),
		"/warren.guest.v1.GuestService/Replace":        unary(s, s.replace),
		"/warren.guest.v1.GuestService/OpenSession":    unary(s, s.openSession),
		"/warren.guest.v1.GuestService/RunInSession":   s.attached(serverStream(s, s.runInSession)),
		"/warren.guest.v1.GuestService/CloseSession":   unary(s, s.closeSession),
		"/warren.guest.v1.GuestService/ListSessions":   unary(s, s.listSessions),
		"/warren.guest.v1.GuestService/WatchPorts":     serverStream(s, s.watchPorts),
		"/warren.guest.v1.GuestService/WatchLifecycle": serverStream(s, s.watchLifecycle),
		"/warren.guest.v1.GuestService/PutServices":    unary(s, s.putServices),
		"/warren.guest.v1.GuestService/ListServices":   unary(s, s.listServices),
		"/warren.guest.v1.GuestService/ControlService": unary(s, s.controlService),

		"/health":         s.health,
		"/init":           s.init,
		"/metrics":        s.metrics,
		"/envs":           s.envs,
		"/files":          s.files,
		"/files/compose":  s.compose,
		"/warren/channel": s.channel,
		"/warren/oom":     s.oom,
		"/root":           s.root,
		"/warren/quiesce": s.quiesce,
		"/warren/mark":    s.mark,
		"/warren/trust":   s.trust,
	}
}

// attached counts the clients that follow what runs.
func (s *Server) attached(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.clients.Add(1)
		defer s.clients.Add(-1)
		h(w, r)
	}
}

// turnHeader names the last rollback, or "none", in the answer to a start: E2B's stream has no field for it, and its clients
// pass over headers that they do not know.
const turnHeader = "Warren-Rollback"

// tellTurn says which past a stream begins in, so that its client knows later whether another one goes on.
func (s *Server) tellTurn(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(turnHeader, s.turn())
		h(w, r)
	}
}

// turn names the last rollback.
func (s *Server) turn() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.rollback == "" {
		return "none"
	}
	return s.rollback
}

// handle is the way of every request: CORS, then the token, then the handler.
func (s *Server) handle(w http.ResponseWriter, r *http.Request) {
	if cors(w, r) {
		return
	}
	if !s.authorized(r) {
		httpError(w, http.StatusUnauthorized, "unauthorized: a valid X-Access-Token is needed")
		return
	}
	h := s.routes[r.URL.Path]
	if h == nil {
		httpError(w, http.StatusNotFound, "no such path")
		return
	}
	h(w, r)
}

// authorized says whether a request may reach its handler. The handlers of /files and /warren/channel check for
// themselves, since they know other proofs than the token; /init wants the host and nothing less.
func (s *Server) authorized(r *http.Request) bool {
	token := s.get().token
	if token == nil || trusted(r) {
		return true
	}
	switch r.URL.Path {
	case "/health":
		return r.Method == http.MethodGet || r.Method == http.MethodHead
	case "/files", "/init", "/warren/channel", "/warren/oom":
		return true
	}
	return token.matches(r.Header.Get("X-Access-Token"))
}

// cors lets pages of any origin use the guest: what protects it is the token, which no browser sends by itself. It
// answers preflights.
func cors(w http.ResponseWriter, r *http.Request) bool {
	if r.Header.Get("Origin") == "" {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "Location, Cache-Control, X-Content-Type-Options, Content-Range, Content-Length, Accept-Ranges, "+
		"Connect-Protocol-Version, Connect-Content-Encoding")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	// A star would not cover Authorization.
	allow := r.Header.Get("Access-Control-Request-Headers")
	if len(allow) > 4096 || strings.ContainsFunc(allow, func(c rune) bool { return c < ' ' || c > '~' }) {
		allow = ""
	}
	h.Set("Access-Control-Allow-Headers", allow)
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
	return true
}

// httpError answers with the error body of the plain HTTP paths.
func httpError(w http.ResponseWriter, status int, message string) {
	body := append([]byte(`{"code":`), strconv.Itoa(status)...)
	body = append(body, `,"message":`...)
	body = wire.AppendString(body, message)
	body = append(body, '}')
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
