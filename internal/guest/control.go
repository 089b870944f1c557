package guest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/lifecycle"
	"github.com/warren-sandbox/warren/internal/guest/memory"
	"github.com/warren-sandbox/warren/internal/guest/small"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// initRequest is the body of POST /init: E2B's fields, and Warren's own.
type initRequest struct {
	AccessToken      *string           `json:"accessToken"`
	EnvVars          map[string]string `json:"envVars"`
	DefaultUser      string            `json:"defaultUser"`
	DefaultWorkdir   string            `json:"defaultWorkdir"`
	Timestamp        *time.Time        `json:"timestamp"`
	Hostname         string            `json:"hostname"`
	MemoryLimitBytes int64             `json:"memoryLimitBytes"`
	SandboxID        string            `json:"sandboxId"`
	ChannelToken     *string           `json:"channelToken"`
	// Event says what happened to the sandbox: "start", "resume", "fork" or "rollback".
	Event string `json:"event"`
	// Entropy is random bytes of the host's, for memory that was copied.
	Entropy []byte `json:"entropy"`
	// ParentID is the sandbox that this one was forked from.
	ParentID string `json:"parentId"`
	// Authority is a certificate, in PEM form, that the sandbox's programs are to trust.
	Authority string `json:"authority"`
}

// init takes the settings of the sandbox from the host. It may come again, as after a restore; it replaces what came
// before, but for tokens that it does not mention. After an event it answers when the image's hooks have ended.
func (s *Server) init(w http.ResponseWriter, r *http.Request) {
	if !trusted(r) {
		httpError(w, http.StatusForbidden, "only the host may set up the sandbox")
		return
	}
	var req initRequest
	if !readJSON(w, r, &req) {
		return
	}
	if err := checkEnv(req.EnvVars); err != nil {
		httpError(w, http.StatusBadRequest, wire.AsError(err).Message)
		return
	}
	if req.DefaultWorkdir != "" && !filepath.IsAbs(req.DefaultWorkdir) || strings.IndexByte(req.DefaultWorkdir, 0) >= 0 {
		httpError(w, http.StatusBadRequest, "defaultWorkdir must be an absolute path")
		return
	}
	if req.Event != "" && !lifecycle.Known(req.Event) {
		httpError(w, http.StatusBadRequest, "event must be start, resume, fork or rollback")
		return
	}
	if req.DefaultUser != "" {
		u, err := s.user(req.DefaultUser)
		if err != nil {
			httpError(w, http.StatusBadRequest, wire.AsError(err).Message)
			return
		}
		if _, _, before := s.history.Last(); s.cfg.ReapOrphans && !(before && lifecycle.Again(req.Event)) {
			// A home that cannot be furnished is no reason to have no sandbox. A guest that goes on from memory has done it before.
			_ = furnish(u, "/etc/skel")
		}
	}
	if req.Authority != "" {
		if err := s.trustAuthority(req.Authority); err != nil {
			httpError(w, http.StatusBadRequest, err.Error())
			return
		}
	}
	s.mu.Lock()
	st := &s.settings
	if req.AccessToken == nil && req.Event == lifecycle.Fork {
		// The token in the copied memory is the source's, and opens nothing here. Without one of its own the sandbox has a
		// token that nobody knows.
		req.AccessToken = new(string)
		*req.AccessToken = randomName()
	}
	if req.AccessToken != nil {
		st.token, st.signing = newSecret(*req.AccessToken), *req.AccessToken
	}
	if req.ChannelToken != nil {
		st.channelToken = newSecret(*req.ChannelToken)
	}
	st.env = req.EnvVars
	st.user, st.dir = s.cfg.User, s.cfg.Dir
	if req.DefaultUser != "" {
		st.user = req.DefaultUser
	}
	if req.DefaultWorkdir != "" {
		st.dir = filepath.Clean(req.DefaultWorkdir)
	}
	st.sandboxID, st.memoryLimit = req.SandboxID, req.MemoryLimitBytes
	s.mu.Unlock()
	s.guard.SetLimit(req.MemoryLimitBytes)
	results := s.identity(&req)
	s.served.Do(s.serveFiles)
	hooksAnswer(w, results)
}

// fromHost says whether a request is a POST of the host's, who alone may do what it asks for, and answers it if not.
func fromHost(w http.ResponseWriter, r *http.Request, what string) bool {
	switch {
	case !trusted(r):
		httpError(w, http.StatusForbidden, "only the host may "+what)
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		httpError(w, http.StatusMethodNotAllowed, "use POST")
	default:
		return true
	}
	return false
}

// oom kills the largest process at once: the host has seen the memory run out before the guest did.
func (s *Server) oom(w http.ResponseWriter, r *http.Request) {
	if !fromHost(w, r, "say that memory ran out") {
		return
	}
	if !s.guard.KillNow() {
		httpError(w, http.StatusConflict, "there is no process to kill")
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// quiesce gives back what memory the guest itself does not need: the host is about to write the sandbox's memory to disk.
func (s *Server) quiesce(w http.ResponseWriter, r *http.Request) {
	if !fromHost(w, r, "say that the sandbox is to stand still") {
		return
	}
	debug.FreeOSMemory()
	s.table.Mark()
	w.WriteHeader(http.StatusNoContent)
}

// mark is told that the host is about to write the sandbox's memory to disk while the sandbox goes on.
func (s *Server) mark(w http.ResponseWriter, r *http.Request) {
	if !fromHost(w, r, "say that memory is about to be saved") {
		return
	}
	s.table.Mark()
	w.WriteHeader(http.StatusNoContent)
}

// killing is told that a process is about to be killed for memory. The process that the guest started gets the reason
// into its end or, when the victim is one of its descendants, into its error output.
func (s *Server) killing(victim memory.Process, ancestors []int, status string) {
	if p, err := s.table.ByPID(victim.PID); err == nil {
		if _, ended := p.End(); !ended {
			p.KilledForMemory(status)
			return
		}
	}
	for _, pid := range ancestors {
		p, err := s.table.ByPID(pid)
		if err != nil {
			continue
		}
		if _, ended := p.End(); !ended {
			p.Note(fmt.Sprintf("%s: %s (pid %d)", status, victim.Name, victim.PID))
			return
		}
	}
}

// readJSON reads a JSON body, answering itself when that fails.
func readJSON(w http.ResponseWriter, r *http.Request, into any) bool {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		httpError(w, http.StatusMethodNotAllowed, "use POST")
		return false
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		httpError(w, http.StatusBadRequest, "cannot read the body, or it is too large")
		return false
	}
	if len(body) == 0 {
		body = []byte("{}")
	}
	if err := wire.Unmarshal(body, into); err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return false
	}
	return true
}

func writeJSON(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(body)
}

// envs tells the variables of the sandbox, as E2B's code interpreter reads them.
func (s *Server) envs(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		httpError(w, http.StatusMethodNotAllowed, "use GET")
		return
	}
	st := s.get()
	env := map[string]string{"E2B_SANDBOX": "true"}
	if st.sandboxID != "" {
		env["E2B_SANDBOX_ID"] = st.sandboxID
	}
	for k, v := range st.env {
		env[k] = v
	}
	writeJSON(w, wire.AppendMap(nil, env))
}

// channel turns a connection into a channel, for a host that has lost the first one. Who knows the channel's token is
// the host.
func (s *Server) channel(w http.ResponseWriter, r *http.Request) {
	token := s.get().channelToken
	if !trusted(r) && (token == nil || !token.matches(r.Header.Get("X-Channel-Token"))) {
		httpError(w, http.StatusUnauthorized, "the channel's token is needed, in X-Channel-Token")
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "warren-channel") || r.ProtoMajor != 1 {
		httpError(w, http.StatusUpgradeRequired, "use HTTP/1.1 with Upgrade: warren-channel")
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		httpError(w, http.StatusInternalServerError, "this connection cannot be upgraded")
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: warren-channel\r\n\r\n"); err != nil {
		return
	}
	_ = s.ServeChannel(&bufferedConn{conn, rw.Reader}) // how it ended is of no interest here
}

// bufferedConn reads what the HTTP server had read ahead first.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

// Read implements io.Reader.
func (c *bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// readSmall reads a file of /proc or /sys, at most limit bytes of it.
func readSmall(path string, limit int) string {
	data, _ := small.Read(path, limit)
	return string(data)
}
