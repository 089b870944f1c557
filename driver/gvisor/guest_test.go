//go:build linux

package gvisor_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestGuest boots the real guest and finds it again after the keeper was killed.
func TestGuest(t *testing.T) {
	e := newEnv(t)
	if err := e.d.Close(); err != nil {
		t.Fatal(err)
	}
	e.opts.GuestPath = testenv.NeedsBinary(t, "warren-guest")
	e.open()
	t0 := time.Now()
	id := e.create(e.spec())
	e.do(id, "POST", "/init", `{"defaultUser":"user","hostname":"box","memoryLimitBytes":536870912,"sandboxId":"`+string(id)+`"}`, http.StatusNoContent)
	t.Logf("create to guest ready: %v", time.Since(t0))
	e.do(id, "GET", "/health", "", http.StatusNoContent)
	e.killKeeper()
	e.do(id, "GET", "/health", "", http.StatusNoContent)
	// What was charged before the processes came into their group is not in it: an idle guest shows about 1 MiB.
	if st, err := e.d.Stats(t.Context(), id); err != nil || st.Memory < 256<<10 {
		t.Errorf("stats %+v, %v", st, err)
	}
}

// do makes a request of the guest on the trusted channel.
func (e *env) do(id warren.SandboxID, method, path, body string, want int) string {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	resp, err := e.client(id).Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != want {
		e.t.Errorf("%s %s: %s, %v: %s", method, path, resp.Status, err, b)
	}
	return string(b)
}
