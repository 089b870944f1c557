//go:build linux

// Package boot is compiled as a part of gVisor's package of that name, see the program in the directory above.
package boot

import (
	runtimedebug "runtime/debug" // gVisor has a debug of its own here
	"time"

	"gvisor.dev/gvisor/pkg/gomaxprocs"
)

const (
	// more goroutines than the sandbox has processors may run while it starts: all of its tasks begin at once, and several of gVisor's own
	// goroutines go into system calls for good. Those that Go is told of are noticed by its monitor, which looks every 10 ms, and those that
	// it is not told of never; until then whatever else could run waits. For long it would be a cost, in memory and in threads that look for work.
	more = 16
	// begun is when a sandbox that was started or restored does what it is there for.
	begun = time.Second
)

// busy has a sandbox start faster. What the start leaves behind is collected when it is over.
func busy() {
	gomaxprocs.Add(more)
	time.AfterFunc(begun, func() {
		gomaxprocs.Add(-more)
		runtimedebug.FreeOSMemory()
	})
}

var _ = busy // whose callers are gVisor's
