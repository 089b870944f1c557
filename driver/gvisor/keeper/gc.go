//go:build linux

package keeper

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// The Go heap of a sentry is some MiB, and Go collects a heap whenever it has doubled. Writing down or reading a kernel makes more
// garbage than that within 20 ms, in which the sandbox stands still, so Go would collect several times just then. It collects when
// the headroom is used up instead, and what is left behind by a start or a restore is collected when the sandbox runs.
const (
	mostHeadroom = 32 << 20
	// headroomPart of a sandbox's memory limit, which its sentry counts for, is headroom.
	headroomPart = 32
	// settled is when a process that has been started has what it needs.
	settled = 500 * time.Millisecond
)

// headroom is for a sandbox with this memory limit.
func headroom(memory int64) int64 { return min(max(memory, 0)/headroomPart, mostHeadroom) }

// paceGC makes this process collect when its heap has grown by room at least, and not at all while it starts.
func paceGC(room int64) {
	percent := debug.SetGCPercent(-1)
	time.AfterFunc(settled, func() {
		paced(percent, room)
		debug.FreeOSMemory()
	})
}

// paced sets after each collection when the next one is: when the heap has grown by the usual percent, or by room if that is more.
func paced(percent int, room int64) {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	last := 0
	type mark struct{ _ *int } // small values without a pointer may lie together with others
	var again func(*mark)
	again = func(*mark) {
		metrics.Read(sample)
		want := pace(percent, room, sample[0].Value.Uint64())
		// Each change stops the world.
		if want < last*9/10 || want > last*11/10 {
			last = want
			debug.SetGCPercent(want)
		}
		// It is found to be garbage by the next collection.
		runtime.SetFinalizer(new(mark), again)
	}
	again(nil)
}

// pace is the percentage by which a heap of which this much is in use may grow.
func pace(percent int, room int64, live uint64) int {
	return max(percent, int(uint64(room)*100/max(live, 1<<20)))
}
