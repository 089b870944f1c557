package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

// Recorder keeps evidence of calls; an [audit.Log] is one.
type Recorder interface {
	Append(ctx context.Context, r audit.Record) (audit.Record, error)
	// Ready says whether a record could be written now.
	Ready() error
}

// harmless are beginnings of the names of calls that change nothing, or only end or remove something, which is how room is made. All others are refused while there is
// no record of them.
var harmless = []string{
	"Get", "List", "Watch", "Verify", "Check", "Explain", "Diff", "FormatPatch", "Doctor", "Delete",
	// Of the guest.
	"Stat", "Remove", "Search", "Signal", "SendSignal", "Attach", "Connect", "CreateWatcher", "CloseSession", "CloseStdin",
}

// changes says whether a request changes something, as far as its first line tells. Of calls that only sometimes do, the handler says so, see [Server.recordable].
func (s *Server) changes(route string, r *http.Request) bool {
	procedure := r.URL.Path
	switch {
	case route == "rpc":
		if _, known := procedures[procedure]; !known || procedure == warrenv1connect.SandboxServicePreviewPortProcedure {
			return false
		}
	case route != "port":
		return false
	default:
		t, err := parseTarget(r.URL.EscapedPath())
		if err != nil {
			return false // it goes nowhere
		}
		if t.verb == "ports" && (r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions) && r.Header.Get("Upgrade") == "" {
			return false
		}
		if procedure = t.rest; t.verb != "ports" || t.port != warren.GuestPort || strings.Count(procedure, "/") != 2 {
			return true
		}
	}
	name := procedure[strings.LastIndexByte(procedure, '/')+1:]
	return !slices.ContainsFunc(harmless, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// recordable says whether a call that changes something can go on record.
func (s *Server) recordable() error {
	if s.calls.to == nil {
		return nil
	}
	err := s.calls.to.Ready()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &warren.Error{Kind: "exhausted", Op: "record a call", Message: "the disk is full that has the record of calls, and what is not on record does not happen: " + err.Error(),
			Hint: "free some space; reading, ending and deleting go on meanwhile", Resource: "disk"}
	}
	return fmt.Errorf("the record of calls cannot be written, and what is not on record does not happen: %v: %w", err, warren.ErrUnavailable)
}

// strangers is how many calls of callers who have shown no good token are recorded in a second: a flood of them shall not push
// out what others did.
const strangers = 5

// calls writes down who called what, and what came of it.
type calls struct {
	to Recorder

	mu     sync.Mutex
	second time.Time
	seen   int
	more   int64
}

// result is what came of a call.
func (r *request) result(status int, cut bool) string {
	switch {
	case r.fault != "":
		return r.fault
	case cut:
		return "cut"
	case status >= http.StatusBadRequest:
		return "refused"
	}
	return "ok"
}

// record writes down a call that has ended. What is asked all the time and by machines alone is left out.
func (c *calls) record(req *request, r *http.Request, status int, took time.Duration, cut bool) error {
	if c.to == nil || req.route == "healthz" || req.route == "metrics" {
		return nil
	}
	var more int64
	if req.user == "" {
		var enough bool
		if more, enough = c.stranger(time.Now()); enough {
			return nil
		}
	}
	fields := map[string]string{
		"call": printable(req.route, 128), "result": req.result(status, cut), "status": strconv.Itoa(status), "request": req.id,
		"ms": itoa(took.Milliseconds()), "method": printable(r.Method, 16),
	}
	for key, value := range req.told {
		fields[key] = logged(value, 512)
	}
	if req.user == "" {
		fields["remote"] = printable(r.RemoteAddr, 64)
	}
	if req.sandbox != "" {
		fields["target"] = logged(req.sandbox, 64)
	}
	if more > 0 {
		fields["more"] = itoa(more)
	}
	_, err := c.to.Append(context.WithoutCancel(r.Context()), audit.Record{Actor: printable(req.user, 64), Action: "call", Fields: fields})
	return err
}

// stranger says whether enough calls of strangers are on record in this second, and else how many are not that came before.
func (c *calls) stranger(now time.Time) (more int64, enough bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.second) >= time.Second {
		c.second, c.seen = now, 0
	}
	if c.seen++; c.seen > strangers {
		c.more++
		return 0, true
	}
	more, c.more = c.more, 0
	return more, false
}
