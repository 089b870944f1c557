package fleet

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestBench runs a small fleet; WARREN_FLEET=50000 runs one of that size and holds it to the targets.
func TestBench(t *testing.T) {
	n, concurrency := 500, 16
	size := os.Getenv("WARREN_FLEET")
	if size != "" {
		var err error
		if n, err = strconv.Atoi(size); err != nil {
			t.Fatal(err)
		}
	}
	if c := os.Getenv("WARREN_FLEET_CONCURRENCY"); c != "" {
		var err error
		if concurrency, err = strconv.Atoi(c); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	r, err := Bench(t.Context(), t.TempDir(), n, concurrency, &out)
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	if size != "" && (r.PerSecond < 500 || r.P99 > 50*time.Millisecond) {
		t.Errorf("%.0f creates/s with p99 %s; want 500/s and 50ms", r.PerSecond, r.P99)
	}
}

func TestBenchRefuses(t *testing.T) {
	if _, err := Bench(t.Context(), t.TempDir(), 0, 1, nil); err == nil {
		t.Error("an empty fleet is no fleet")
	}
}
