package drivertest

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/bench/hostproc"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// ProcessesNaming returns the processes whose command line holds the id, and all that descend from them: enough for drivers
// that pass the id to what they start.
func ProcessesNaming(t testing.TB, id warren.SandboxID) []int {
	t.Helper()
	pids, err := hostproc.Naming(string(id))
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// packageDir is this package's directory in the checkout.
func packageDir(t testing.TB) string {
	t.Helper()
	return filepath.Join(testenv.Repo(t), "driver", "drivertest")
}
