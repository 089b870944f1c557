package bench_test

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/bench"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// The benchmarks run here once in little, so that they cannot rot; WARREN_BENCH_ROUNDS=20 gives figures.
func options(t *testing.T) bench.Options {
	t.Helper()
	testenv.NeedsRoot(t)
	o := bench.Options{Program: testenv.NeedsBinaries(t).Warren, Rounds: 1, Quick: true, Idle: []int{1, 3}}
	if n, err := strconv.Atoi(os.Getenv("WARREN_BENCH_ROUNDS")); err == nil {
		o.Rounds, o.Idle, o.Quick = n, nil, false
	}
	return o
}

func run(t *testing.T, f func(context.Context, bench.Options, *strings.Builder) error, want ...string) {
	t.Helper()
	o := options(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	var out strings.Builder
	rows := map[string]int{}
	o.Record = func(r bench.Row) {
		rows[r.Benchmark]++
		if r.Name == "" || r.Met == nil && r.Absent == "" && len(r.Values) == 0 {
			t.Errorf("row %+v says nothing", r)
		}
		for name, v := range r.Values {
			if strings.HasSuffix(name, "Ms") && v <= 0 {
				t.Errorf("%s of row %s is %v", name, r.Name, v)
			}
		}
	}
	err := f(ctx, o, &out)
	t.Logf("\n%s", out.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(rows)
	if len(rows) == 0 || rows["cold start"] < 3 && rows["files"] < 3 && rows["pause and resume"] != 2 && rows["gateway"] < 20 {
		t.Errorf("rows %v", rows)
	}
	for _, w := range want {
		if !strings.Contains(out.String(), w) {
			t.Errorf("the report has no %q", w)
		}
	}
}

func TestStart(t *testing.T) {
	run(t, func(ctx context.Context, o bench.Options, w *strings.Builder) error { return bench.Start(ctx, o, w) },
		"Cold start", "fork+exec", "Round trip", "Throughput", "Memory of idle", "target:")
}

func TestIO(t *testing.T) {
	run(t, func(ctx context.Context, o bench.Options, w *strings.Builder) error { return bench.IO(ctx, o, w) },
		"create ", "stat walk", "rm -rf", "target:")
}

func TestState(t *testing.T) {
	run(t, func(ctx context.Context, o bench.Options, w *strings.Builder) error {
		if o.Quick {
			o.Loads, o.Forks = []string{"idle", "memory", "agent", "node", "template"}, []int{1, 2}
		}
		return bench.State(ctx, o, w)
	}, "idle", "300 MB of memory", "on disk", "idle agent", "pause seen inside", "fork of 2", "running dev server", "create to first HTTP reply", "target:")
}
