// Package e2btest holds a guest against the unmodified npm package e2b, in the package's debug mode: what E2B's own
// users run must work.
package e2btest

import (
	"context"
	"embed"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// Version of the npm package.
const Version = "2.51.0"

// deadline is for the whole script, which takes some ten seconds.
const deadline = 4 * time.Minute

//go:embed testdata/script.cjs
var script embed.FS

// Target is a guest to test.
type Target struct {
	// URL of the guest; empty means where the package looks by itself, http://localhost:49983.
	URL string
	// Home and UID are the default user's.
	Home string
	UID  int
	// Within is a command that runs another, such as nsenter in the guest's network namespace.
	Within []string
}

// Run drives the guest through the package and fails the test when anything is wrong. The sandbox needs bash, git,
// procps and coreutils, and must let the guest act as root and as the default user.
func Run(t testing.TB, target Target) {
	t.Helper()
	testenv.NeedsTool(t, "node", "npm")
	pkg := install(t)
	source, err := script.ReadFile("testdata/script.cjs")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "script.cjs")
	if err := os.WriteFile(file, source, 0o644); err != nil {
		t.Fatal(err)
	}
	argv := append(append([]string(nil), target.Within...), "node", file)
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = 5 * time.Second
	cmd.Env = append(os.Environ(), "E2B_DEBUG=true", "E2B_API_KEY=e2b_0000000000000000000000000000000000000000",
		"E2B_PACKAGE="+pkg, "WARREN_TEST_HOME="+target.Home, "WARREN_TEST_UID="+strconv.Itoa(target.UID))
	if target.URL != "" {
		cmd.Env = append(cmd.Env, "E2B_SANDBOX_URL="+target.URL)
	}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !strings.Contains(string(out), "\nverdict: ok, ") {
		t.Fatalf("the package e2b does not work with this guest: %v", err)
	}
}

// install installs the package into the checkout's cache, once, and returns its directory.
func install(t testing.TB) string {
	t.Helper()
	cache := filepath.Join(testenv.Repo(t), ".cache", "npm")
	dir := filepath.Join(cache, "e2b-"+Version)
	pkg := filepath.Join(dir, "node_modules", "e2b")
	if _, err := os.Stat(pkg); err == nil {
		return pkg
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(cache, "install-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	cmd := exec.Command("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", tmp, "e2b@"+Version)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("npm install e2b@%s: %v\n%s", Version, err, out)
	}
	// Another test may have been faster.
	if err := os.Rename(tmp, dir); err != nil {
		if _, err := os.Stat(pkg); err != nil {
			t.Fatal(err)
		}
	}
	return pkg
}
