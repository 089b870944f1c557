package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// Table records which cases of a suite ran and how they ended, for people: what did not run is told with its
// reason and is never counted as passed.
type Table struct {
	driver, suite string

	mu   sync.Mutex
	rows []row
}

type row struct{ name, what, result, reason string }

// NewTable returns an empty table of one suite on one driver.
func NewTable(driver, suite string) *Table { return &Table{driver: driver, suite: suite} }

// Run runs a case as a subtest and records it. With a reason in notRun it is recorded only.
func (tb *Table) Run(t *testing.T, name, what, notRun string, f func(t *testing.T)) {
	t.Helper()
	if notRun != "" {
		tb.add(row{name, what, "not run", notRun})
		return
	}
	ran := false
	t.Run(name, func(t *testing.T) {
		ran = true
		t.Cleanup(func() {
			r := row{name, what, "passed", ""}
			switch {
			case t.Failed():
				r.result = "FAILED"
			case t.Skipped():
				r.result, r.reason = "not run", "skipped on this machine"
			}
			tb.add(r)
		})
		f(t)
	})
	if !ran {
		tb.add(row{name, what, "not run", "left out by -run"})
	}
}

func (tb *Table) add(r row) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.rows = append(tb.rows, r)
}

// String formats the table.
func (tb *Table) String() string {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	count := map[string]int{}
	var b strings.Builder
	for _, r := range tb.rows {
		count[r.result]++
	}
	fmt.Fprintf(&b, "%s, %s: %d cases, %d passed, %d failed, %d not run\n", tb.driver, tb.suite, len(tb.rows), count["passed"], count["FAILED"], count["not run"])
	for _, r := range tb.rows {
		fmt.Fprintf(&b, "  %-8s %-28s %s", r.result, r.name, r.what)
		if r.reason != "" {
			fmt.Fprintf(&b, " [%s]", r.reason)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Print logs the table and writes it to a file below WARREN_RESULTS, by default .cache/results of the checkout.
func (tb *Table) Print(t testing.TB) {
	t.Helper()
	t.Log("\n" + tb.String())
	dir := os.Getenv("WARREN_RESULTS")
	if dir == "" {
		dir = filepath.Join(testenv.Repo(t), ".cache", "results")
	}
	name := strings.ReplaceAll(tb.driver+"-"+tb.suite, " ", "-") + ".txt"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Error(err)
		return
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(tb.String()), 0o644); err != nil {
		t.Error(err)
	}
}
