package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/server/servertest"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
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

func (l *ledger) Ready() error { return nil }

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
	sb, err := alice.Create(ctx, warren.Spec{Name: "box", Policy: "locked"})
	if err != nil {
		t.Fatal(err)
	}
	for _, public := range []bool{true, false} {
		// This server shows none; what was asked for is on record all the same.
		if _, err := sb.Preview(ctx, 3000, warren.PreviewOptions{Public: &public}); !errors.Is(err, warren.ErrUnavailable) {
			t.Fatal(err)
		}
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
	for end := time.Now().Add(10 * time.Second); strings.Count(got, "\n") < 6 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		got += l.take() // a call is recorded when its answer is out
	}
	for _, want := range []string{
		"alice call map[call:/warren.v1.SandboxService/CreateSandbox method:POST ", "call:/warren.v1.SandboxService/GetSandbox", "result:not_found", "target:nosuch", "DeleteSandbox",
		"made:" + string(sb.ID), "policy:locked", "public:true", "public:false",
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

// fullLedger is one whose disk can be full.
type fullLedger struct {
	ledger
	full atomic.Bool
}

func (l *fullLedger) Ready() error {
	if l.full.Load() {
		return fmt.Errorf("no space is left: %w", syscall.ENOSPC)
	}
	return nil
}

func (l *fullLedger) Append(ctx context.Context, r audit.Record) (audit.Record, error) {
	if err := l.Ready(); err != nil {
		return r, err
	}
	return l.ledger.Append(ctx, r)
}

// While there is no record of calls, nothing is changed; what reads, ends and deletes goes on.
func TestNoRecordNoChange(t *testing.T) {
	l := &fullLedger{}
	s := servertest.New(t, func(o *server.Options) { o.Calls = l })
	ctx := t.Context()
	url := s.TCP()
	c := s.User(url, "alice")
	sb, err := c.Create(ctx, warren.Spec{Name: "box"})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(path string) (status int, body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer token-of-alice")
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(b)
	}
	refused := func(path string) bool {
		t.Helper()
		status, body := ask(path)
		return status == http.StatusTooManyRequests && strings.Contains(body, "the record of calls") && strings.Contains(body, "free some space")
	}
	l.full.Store(true)
	calls := 0
	if _, err := c.Create(ctx, warren.Spec{Name: "two"}); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("create: %v", err)
	}
	services := warrenv1.File_warren_v1_warren_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			name := string(m.Name())
			harmless := strings.HasPrefix(name, "Get") || strings.HasPrefix(name, "List") || strings.HasPrefix(name, "Delete") || slices.Contains([]string{
				"WatchEvents", "VerifyFlows", "CheckPolicy", "ExplainPolicy", "Diff", "FormatPatch", "Doctor",
				"PreviewPort", // which closes too, see below
			}, name)
			if m.IsStreamingServer() && harmless {
				continue // of JSON it takes none
			}
			if calls++; refused("/"+string(services.Get(i).FullName())+"/"+name) == harmless {
				t.Errorf("%s: refused is %t", name, !harmless)
			}
		}
	}
	if calls < 40 {
		t.Errorf("only %d calls", calls)
	}
	box := "/v1/sandboxes/" + string(sb.ID)
	for path, want := range map[string]bool{
		"/ports/8000/x": true, "/ports/49983/process.Process/Start": true, "/ports/49983/filesystem.Filesystem/MakeDir": true, "/ports/49983/filesystem.Filesystem/Move": true,
		"/ports/49983/warren.guest.v1.GuestService/Replace": true, "/ports/49983/warren.guest.v1.GuestService/RunInSession": true, "/ports/49983/files": true, "/dial/8000": true,
		"/ports/49983/filesystem.Filesystem/Remove": false, "/ports/49983/filesystem.Filesystem/ListDir": false, "/ports/49983/process.Process/SendSignal": false, "/ports/8000": true, "/nothing": false,
		"/ports/8000/process.Process/List": true,
	} {
		if got := refused(box + path); got != want {
			t.Errorf("%s: refused is %t", path, got)
		}
	}
	off, on := false, true
	if _, err := sb.Preview(ctx, 3000, warren.PreviewOptions{Public: &on}); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("a preview is opened: %v", err)
	}
	if _, err := sb.Preview(ctx, 3000, warren.PreviewOptions{Public: &off, NoLink: true}); errors.Is(err, warren.ErrExhausted) {
		t.Errorf("a preview is not closed: %v", err)
	}
	if err := sb.Delete(ctx); err != nil {
		t.Errorf("delete: %v", err)
	}
	l.full.Store(false)
	if _, err := c.Create(ctx, warren.Spec{Name: "two"}); err != nil {
		t.Errorf("once there is room: %v", err)
	}
}
