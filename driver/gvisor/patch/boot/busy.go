//go:build linux

// Package boot is compiled as a part of gVisor's package of that name, see the program in the directory above.
package boot

import (
	"runtime"
	runtimedebug "runtime/debug" // gVisor has a debug of its own here
	"runtime/metrics"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/gomaxprocs"
	"gvisor.dev/gvisor/pkg/sentry/usage"
)

const (
	// more goroutines than the sandbox has processors may run when it goes on: all of its tasks begin at once, and several of gVisor's own
	// goroutines go into system calls for good. Those that Go is told of are noticed by its monitor, which looks every 10 ms, and those that
	// it is not told of never; until then whatever else could run waits. For long it would be a cost, in memory and in threads that look for work.
	// Each is a thread that Go makes when it needs it, and a sandbox that has used up its memory just then ends for want of one; so a sandbox that
	// starts, and may do that at once, has none.
	more = 4
	// begun is when a sandbox that was started, restored or saved does what it is there for.
	begun = time.Second
)

// busy has a sandbox go on faster.
func busy() {
	gomaxprocs.Add(more)
	time.AfterFunc(begun, func() { gomaxprocs.Add(-more) })
	roomy()
}

// The Go heap of a sentry is some MiB, and Go collects a heap whenever it has doubled. Writing down or reading a kernel makes more
// garbage than that within 20 ms, in which the sandbox stands still, so Go would collect several times just then. Until it is over the
// heap has room instead, and then what was left behind is collected and goes back to the host. For good it would cost that much
// memory in each sandbox.
const (
	mostRoom = 32 << 20
	// roomPart of a sandbox's memory limit, which its sentry counts for, is room.
	roomPart = 32
	// usual is Go's own percentage by which a heap may grow.
	usual = 100
)

// heap counts those who want room in it.
var heap struct {
	sync.Mutex
	wanted int
}

// roomy gives the heap room until a second from now.
func roomy() {
	heap.Lock()
	defer heap.Unlock()
	if heap.wanted++; heap.wanted == 1 {
		pace(room(usage.MaximumTotalMemoryBytes))
	}
	time.AfterFunc(begun, func() {
		heap.Lock()
		heap.wanted--
		over := heap.wanted == 0
		if over {
			runtimedebug.SetGCPercent(usual)
		}
		heap.Unlock()
		if over { // without the lock: it takes a while, for which the next checkpoint would wait
			runtimedebug.FreeOSMemory()
		}
	})
}

// room is what a heap with this memory limit has.
func room(memory uint64) uint64 { return min(memory/roomPart, mostRoom) }

// pace sets by how much the heap may grow, now and after each collection; heap is locked.
func pace(room uint64) {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	runtimedebug.SetGCPercent(percent(room, sample[0].Value.Uint64()))
	type mark struct{ _ *int } // small values without a pointer may lie together with others
	// It is found to be garbage by the next collection.
	runtime.SetFinalizer(new(mark), func(*mark) {
		heap.Lock()
		defer heap.Unlock()
		if heap.wanted > 0 {
			pace(room)
		}
	})
}

// percent is that by which a heap of which this much is in use may grow.
func percent(room, live uint64) int {
	return max(usual, int(room*100/max(live, 1<<20)))
}

var (
	_ = busy // whose callers are gVisor's
	_ = roomy
)
