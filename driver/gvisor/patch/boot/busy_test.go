//go:build linux

package boot

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/sentry/usage"
)

func TestPercent(t *testing.T) {
	for _, c := range []struct{ memory, want uint64 }{{64 << 20, 2 << 20}, {512 << 20, 16 << 20}, {2 << 30, 32 << 20}, {1 << 40, 32 << 20}, {0, 0}} {
		if got := room(c.memory); got != c.want {
			t.Errorf("room(%d) = %d, want %d", c.memory, got, c.want)
		}
	}
	for _, c := range []struct {
		room, live uint64
		want       int
	}{{32 << 20, 8 << 20, 400}, {32 << 20, 64 << 20, 100}, {2 << 20, 8 << 20, 100}, {0, 8 << 20, 100}, {32 << 20, 0, 3200}} {
		if got := percent(c.room, c.live); got != c.want {
			t.Errorf("percent(%d, %d) = %d, want %d", c.room, c.live, got, c.want)
		}
	}
}

var sink []byte

// TestRoomy follows the percentage: it is more while there is room, for as long as anybody wants it, less when much is in use, and the usual in the end.
func TestRoomy(t *testing.T) {
	was, memory := debug.SetGCPercent(usual), usage.MaximumTotalMemoryBytes
	usage.MaximumTotalMemoryBytes = 4 << 30
	defer func() {
		debug.SetGCPercent(was)
		usage.MaximumTotalMemoryBytes = memory
	}()
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	now := func() int {
		metrics.Read(sample)
		return int(sample[0].Value.Uint64())
	}
	until := func(what string, ok func(int) bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !ok(now()); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %d%%", what, now())
			}
			runtime.GC() // whose finalizers run beside this
		}
	}
	// One who wants it for as long as the test does.
	heap.Lock()
	heap.wanted++
	heap.Unlock()
	roomy() // finds that it is not the first
	if got := now(); got != usual {
		t.Errorf("%d%% though somebody else has begun", got)
	}
	runtime.GC() // what other tests have left is not in use
	heap.Lock()
	pace(room(usage.MaximumTotalMemoryBytes))
	heap.Unlock()
	if got := now(); got <= 200 {
		t.Errorf("%d%% with little in use", got)
	}
	sink = make([]byte, 256<<20)
	until("with 256 MiB in use", func(p int) bool { return p == usual })
	sink = nil
	until("with little in use again", func(p int) bool { return p > 200 })
	roomy()
	heap.Lock()
	heap.wanted--
	heap.Unlock()
	if got := now(); got <= 200 {
		t.Errorf("%d%% while one still wants room", got)
	}
	until("in the end", func(p int) bool { return p == usual })
}
