//go:build linux

package keeper

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

func TestHeadroom(t *testing.T) {
	for _, c := range []struct{ memory, want int64 }{
		{64 << 20, 2 << 20}, {512 << 20, 16 << 20}, {2 << 30, 32 << 20}, {1 << 40, 32 << 20}, {0, 0}, {-1, 0},
	} {
		if got := headroom(c.memory); got != c.want {
			t.Errorf("headroom(%d) = %d, want %d", c.memory, got, c.want)
		}
	}
	for _, c := range []struct {
		room int64
		live uint64
		want int
	}{{32 << 20, 8 << 20, 400}, {32 << 20, 64 << 20, 100}, {2 << 20, 8 << 20, 100}, {0, 8 << 20, 100}, {32 << 20, 0, 3200}} {
		if got := pace(100, c.room, c.live); got != c.want {
			t.Errorf("pace(100, %d, %d) = %d, want %d", c.room, c.live, got, c.want)
		}
	}
}

var sink []byte

// TestPaced looks at what collections leave behind: the percentage follows what is in use.
func TestPaced(t *testing.T) {
	was := debug.SetGCPercent(100)
	defer debug.SetGCPercent(was)
	paced(100, mostHeadroom)
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	percent := func() int {
		metrics.Read(sample)
		return int(sample[0].Value.Uint64())
	}
	until := func(what string, ok func(int) bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; {
			runtime.GC() // whose finalizers run beside this
			p := percent()
			if ok(p) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %d%%", what, p)
			}
			time.Sleep(time.Millisecond)
		}
	}
	until("with little in use", func(p int) bool { return p > 200 })
	sink = make([]byte, 256<<20)
	until("with 256 MiB in use", func(p int) bool { return p == 100 })
	sink = nil
	until("with little in use again", func(p int) bool { return p > 200 })
}
