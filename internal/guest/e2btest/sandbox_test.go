//go:build linux

package e2btest_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/guest/e2btest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestSandbox drives the guest of a real sandbox with the package, through the daemon's byte proxy.
func TestSandbox(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTool(t, "node", "npm", "git", "pgrep")
	bin := testenv.NeedsBinaries(t)
	home, err := os.MkdirTemp("", "warren-e2b-") // short, for the sockets in it
	if err != nil {
		t.Fatal(err)
	}
	testenv.Residue(t, home)
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	env := append(os.Environ(), "WARREN_HOME="+home, "WARREN_URL=")
	cli := func(args ...string) {
		t.Helper()
		cmd := exec.Command(bin.Warren, args...)
		cmd.Env = env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("warren %v: %v\n%s", args, err, out)
		}
	}
	t.Cleanup(func() { cli("shutdown", "--sandboxes") })
	cli("create", "--name", "e2b")

	socket := filepath.Join(home, "warren.sock")
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{URL: "unix://" + socket})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Sandbox(ctx, "e2b")
	if err != nil {
		t.Fatal(err)
	}
	prefix := "/v1/sandboxes/" + string(sb.ID) + "/ports/49983"
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "localhost"
			r.Out.URL.Path, r.Out.URL.RawPath = prefix+r.In.URL.Path, prefix+r.In.URL.EscapedPath()
			r.Out.Host = "localhost"
			// The package names the user by basic authentication, which at the daemon is the caller's own.
			if user, _, ok := r.In.BasicAuth(); ok {
				r.Out.Header.Del("Authorization")
				r.Out.Header.Set("Warren-User", user)
			}
		},
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}},
		FlushInterval: -1,
	}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The first event of a stream comes before the request's body has been read to its end.
		_ = http.NewResponseController(w).EnableFullDuplex()
		proxy.ServeHTTP(w, r)
	}))
	defer front.Close()
	e2btest.Run(t, e2btest.Target{URL: front.URL, Home: "/home/user", UID: 1000})
}
