package wire_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/wire"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

// failing is a server whose every call fails with err.
type failing struct {
	warrenv1connect.UnimplementedSystemServiceHandler
	warrenv1connect.UnimplementedSandboxServiceHandler
	err *error
}

func (f failing) GetVersion(context.Context, *connect.Request[warrenv1.GetVersionRequest]) (*connect.Response[warrenv1.GetVersionResponse], error) {
	if *f.err != nil {
		return nil, wire.Judge(*f.err, wire.Audience{Op: "get version"}).Connect()
	}
	return connect.NewResponse(&warrenv1.GetVersionResponse{}), nil
}

func (f failing) CreateSandbox(context.Context, *connect.Request[warrenv1.CreateSandboxRequest], *connect.ServerStream[warrenv1.CreateSandboxResponse]) error {
	return wire.Judge(*f.err, wire.Audience{Op: "create sandbox"}).Connect()
}

// TestSentinels sends each sentinel over each kind of route and looks for it on the other side, and for no other.
func TestSentinels(t *testing.T) {
	var err error
	mux := http.NewServeMux()
	mux.Handle(warrenv1connect.NewSystemServiceHandler(failing{err: &err}))
	mux.Handle(warrenv1connect.NewSandboxServiceHandler(failing{err: &err}))
	mux.HandleFunc("/v1/", func(w http.ResponseWriter, r *http.Request) { wire.Judge(err, wire.Audience{}).Write(w, r) })
	s := httptest.NewServer(mux)
	defer s.Close()
	c, cerr := warren.Connect(t.Context(), warren.Options{URL: s.URL, RetryFor: -1})
	if cerr != nil {
		t.Fatal(cerr)
	}
	calls := map[string]func() error{
		"unary":        func() error { _, err := c.Version(t.Context()); return err },
		"stream":       func() error { _, err := c.Create(t.Context(), warren.Spec{}); return err },
		"plain":        func() error { _, err := c.Ref("x").FS().ReadFile("x"); return err },
		"upgrade":      func() error { _, err := c.Ref("x").Dial(t.Context(), 80); return err },
		"guest unary":  func() error { _, err := c.Ref("x").Processes(t.Context(), true); return err },
		"guest stream": func() error { _, err := c.Ref("x").Ports(t.Context()); return err },
		"start":        func() error { return c.Ref("x").Command("true").Run(t.Context()) },
	}
	for _, k := range wire.Kinds {
		for wrapped, e := range map[string]error{
			"bare":    k.Sentinel,
			"wrapped": fmt.Errorf("thing %q: %w", "x", k.Sentinel),
			"struct":  &warren.Error{Kind: k.Name, Op: "test thing", ID: "x1", Hint: "try `this`", Resource: "things (limit 2)", Message: "it went wrong"},
		} {
			err = e
			for name, call := range calls {
				got := call()
				for _, other := range wire.Kinds {
					if errors.Is(got, other.Sentinel) != (other.Name == k.Name) {
						t.Errorf("%s %s over %s: %v: matches %v: %v", k.Name, wrapped, name, got, other.Sentinel, errors.Is(got, other.Sentinel))
					}
				}
				var we *warren.Error
				if !errors.As(got, &we) {
					t.Errorf("%s %s over %s: %T", k.Name, wrapped, name, got)
				} else if wrapped == "struct" && (we.Op != "test thing" || we.ID != "x1" || we.Hint != "try `this`" || we.Resource != "things (limit 2)" || !strings.Contains(got.Error(), "test thing x1: it went wrong; try `this`")) {
					t.Errorf("%s over %s: %v, %+v", k.Name, name, got, we)
				}
			}
		}
	}
}

func TestJudge(t *testing.T) {
	const secret = "/var/lib/warren/workspaces/w123/files/x"
	hide := []string{"/var/lib/warren"}
	for _, test := range []struct {
		name string
		err  error
		kind string
		// seen is what the caller's message must hold.
		seen string
	}{
		{"unknown", errors.New("boom " + secret), "internal", "internal error (reference "},
		{"a file that the server misses", &fs.PathError{Op: "open", Path: secret, Err: syscall.ENOENT}, "internal", "internal error"},
		{"a file that the caller misses", fmt.Errorf("path %q: %w", "x.txt", fs.ErrNotExist), "file_not_found", `path "x.txt"`},
		{"a host path below a sentinel", fmt.Errorf("copy: %w: %w", &os.LinkError{Op: "link", Old: "/mnt/a", New: "/mnt/b", Err: syscall.EXDEV}, warren.ErrState), "state", "copy: link … …"},
		{"a host path in words", fmt.Errorf("look at %s, please: %w", secret, warren.ErrInvalid), "invalid", "look at …, please: invalid"},
		{"a full disk", &fs.PathError{Op: "write", Path: secret, Err: syscall.ENOSPC}, "exhausted", "no space left on device"},
		{"an address", fmt.Errorf("%w: %w", &net.OpError{Op: "dial", Net: "unix", Addr: &net.UnixAddr{Name: secret}, Err: syscall.ECONNREFUSED}, warren.ErrUnavailable), "unavailable", "connection refused"},
		{"a system call that the host lacks", os.NewSyscallError("openat2", syscall.ENOSYS), "internal", "internal error"},
		{"too large", &http.MaxBytesError{Limit: 5}, "exhausted", "too large"},
		{"control characters", fmt.Errorf("name %s: %w", "a\x1b[31m\nb\u202e\xff", warren.ErrInvalid), "invalid", `a\u001b[31m\nb\u202e\xff`},
		{"first of several", fmt.Errorf("%w after %w", warren.ErrUnavailable, context.DeadlineExceeded), "unavailable", "unavailable after"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := wire.Judge(test.err, wire.Audience{Hide: hide})
			if f.Name != test.kind || !strings.Contains(f.Message, test.seen) || strings.Contains(f.Message, secret) || strings.Contains(f.Message, "/mnt/") {
				t.Errorf("a caller sees %s: %q; want %s: %q", f.Name, f.Message, test.kind, test.seen)
			}
			if strings.Contains(test.err.Error(), secret) && f.Reference == "" {
				t.Error("what the caller does not see has no reference")
			}
			if f := wire.Judge(test.err, wire.Audience{Operator: true, Hide: hide}); strings.Contains(test.err.Error(), secret) && !strings.Contains(f.Message, secret) {
				t.Errorf("the operator sees %q", f.Message)
			}
		})
	}
	long := wire.Judge(fmt.Errorf("%s: %w", strings.Repeat("x", 1<<20), warren.ErrInvalid), wire.Audience{})
	if len(long.Message) > 5<<10 {
		t.Errorf("a message of %d bytes", len(long.Message))
	}
}

func FuzzPrintable(f *testing.F) {
	f.Add("plain")
	f.Add("a\x1b[0m\n\u202e\xff")
	f.Fuzz(func(t *testing.T, s string) {
		p := wire.Printable(s, 100)
		if strings.ContainsAny(p, "\n\r\x1b\x00") || len(p) > 110 {
			t.Errorf("%q becomes %q", s, p)
		}
	})
}
