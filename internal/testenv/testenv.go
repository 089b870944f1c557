// Package testenv tells tests what this machine can do, builds the binaries that they run, and finds what they
// leave behind. It is the only place that skips a test, so that every skip has a reason that can be counted.
//
// With WARREN_REQUIRE_ALL=1 a skip is a failure: CI and make test set it, so that nothing stops being tested
// unnoticed. With WARREN_SKIP_LOG=FILE each skip is added to FILE as a line of JSON; see [SkipSummary].
package testenv

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// RequireAll reports whether a skip is a failure in this run.
func RequireAll() bool { return os.Getenv("WARREN_REQUIRE_ALL") == "1" }

// Skip ends the test as skipped, with the reason why it cannot run here; with WARREN_REQUIRE_ALL=1 it fails.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if RequireAll() {
		t.Fatalf("cannot run here: %s (WARREN_REQUIRE_ALL=1 makes this a failure)", reason)
	}
	if err := logSkip(t.Name(), reason); err != nil {
		t.Logf("skip log: %v", err)
	}
	t.Skip(reason)
}

// Skipped is one line of the skip log.
type Skipped struct {
	Package string `json:"package"`
	Test    string `json:"test"`
	Reason  string `json:"reason"`
}

func logSkip(test, reason string) error {
	name := os.Getenv("WARREN_SKIP_LOG")
	if name == "" {
		return nil
	}
	line, err := json.Marshal(Skipped{Package: filepath.Base(os.Args[0]), Test: test, Reason: reason})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// SkipSummary reads a skip log and returns a table for people: the reasons, how many tests each kept from
// running, and which.
func SkipSummary(log io.Reader) (string, error) {
	byReason := map[string][]string{}
	dec := json.NewDecoder(log)
	for {
		var s Skipped
		err := dec.Decode(&s)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", fmt.Errorf("skip log: %w", err)
		}
		byReason[s.Reason] = append(byReason[s.Reason], strings.TrimSuffix(s.Package, ".test")+"."+s.Test)
	}
	reasons := make([]string, 0, len(byReason))
	for r := range byReason {
		reasons = append(reasons, r)
	}
	sort.Strings(reasons)
	var b strings.Builder
	for _, r := range reasons {
		fmt.Fprintf(&b, "%4d not run: %s\n", len(byReason[r]), r)
		for _, test := range byReason[r] {
			fmt.Fprintf(&b, "       %s\n", test)
		}
	}
	return b.String(), nil
}

// NeedsRoot skips unless the test runs as root.
func NeedsRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root")
	}
}

// NeedsTool skips unless every program is on the PATH.
func NeedsTool(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			Skip(t, "needs the program "+name)
		}
	}
}

// NeedsLinux skips on other systems.
func NeedsLinux(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		Skip(t, "needs Linux")
	}
}

// NeedsLong skips a test of minutes or hours unless the environment variable is set, such as WARREN_SOAK. It is not a
// gap of this machine, so it is no failure with WARREN_REQUIRE_ALL=1.
func NeedsLong(t testing.TB, variable string) {
	t.Helper()
	if os.Getenv(variable) == "" {
		reason := "a long run, started by " + variable
		if err := logSkip(t.Name(), reason); err != nil {
			t.Logf("skip log: %v", err)
		}
		t.Skip(reason)
	}
}

// Soak says whether tests run in their long form, which WARREN_SOAK asks for: with all the points, sizes and waits of which the
// short form has a few.
func Soak() bool { return os.Getenv("WARREN_SOAK") != "" }

// Count returns how often a test does what it repeats: short, or long when [Soak] says so, or what the environment variable says.
func Count(t testing.TB, variable string, short, long int) int {
	t.Helper()
	if s := os.Getenv(variable); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("%s: %v", variable, err)
		}
		return n
	}
	if Soak() {
		return long
	}
	return short
}

// Repo returns the root of this checkout.
func Repo(t testing.TB) string {
	t.Helper()
	root, err := repoRoot()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// repoRoot walks up from the test's directory, which go test sets to the package's.
var repoRoot = sync.OnceValues(func() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module github.com/warren-sandbox/warren\n") {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("not inside a checkout of warren; run the tests from one")
		}
		dir = parent
	}
})
