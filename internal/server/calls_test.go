package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/server/servertest"
)

// ledger keeps records in memory.
type ledger struct {
	mu   sync.Mutex
	list []audit.Record
}

func (l *ledger) Append(_ context.Context, r audit.Record) (audit.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, r)
	return r, nil
}

func (l *ledger) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, r := range l.list {
		fmt.Fprintf(&b, "%s %s %v\n", r.Actor, r.Action, r.Fields)
	}
	l.list = nil
	return b.String()
}

// Every call is on record with who made it and what came of it, and strangers cannot fill the record.
func TestCallsAreRecorded(t *testing.T) {
	l := &ledger{}
	s := servertest.New(t, func(o *server.Options) { o.Calls = l })
	ctx := t.Context()
	url := s.TCP()
	alice := s.User(url, "alice")
	l.take()
	sb, err := alice.Create(ctx, warren.Spec{Name: "box"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := alice.Sandbox(ctx, "nosuch"); !errors.Is(err, warren.ErrNotFound) {
		t.Fatal(err)
	}
	// A stream tells its error after its status.
	s.Engine.Fail = func(call string) error {
		if call == "Create" {
			return fmt.Errorf("there is no image: %w", warren.ErrNotFound)
		}
		return nil
	}
	if _, err := alice.Create(ctx, warren.Spec{}); !errors.Is(err, warren.ErrNotFound) {
		t.Fatal(err)
	}
	if err := sb.Delete(ctx); err != nil {
		t.Fatal(err)
	}
	got := ""
	for end := time.Now().Add(10 * time.Second); strings.Count(got, "\n") < 4 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		got += l.take() // a call is recorded when its answer is out
	}
	for _, want := range []string{
		"alice call map[call:/warren.v1.SandboxService/CreateSandbox method:POST ", "call:/warren.v1.SandboxService/GetSandbox", "result:not_found", "target:nosuch", "DeleteSandbox",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the record lacks %q:\n%s", want, got)
		}
	}
	if n := strings.Count(got, "result:not_found"); n != 2 {
		t.Errorf("%d calls have not found something, want 2: an error that a stream ends with counts too\n%s", n, got)
	}
	if strings.Contains(got, "token-of-alice") {
		t.Errorf("a token is on record: %s", got)
	}
	for range 50 {
		res, err := http.Post(url+"/warren.v1.SystemService/GetVersion", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
	}
	got = l.take()
	if n := strings.Count(got, "\n"); n == 0 || n > 40 || !strings.Contains(got, "result:refused") || !strings.Contains(got, "remote:127.0.0.1") {
		t.Errorf("50 calls of strangers are %d records:\n%s", n, got)
	}
}
