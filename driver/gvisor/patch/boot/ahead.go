//go:build linux

package boot

import (
	"sync/atomic"
	"time"
)

// A sandbox that is made before anybody wants it works ahead while it waits to be told what to run: there are things that whoever starts or
// restores it would wait for, 2 ms for what unmounts /proc, and 2 ms for each process that holds the memory of a program. One that is
// told at once does what it needs at its own time.

const (
	// waiting is how long a sandbox waits before it works ahead. One that nobody keeps for later is told within milliseconds.
	waiting = 100 * time.Millisecond
	// stubs is how many processes for the memory of programs are made: for the guest, for what it runs, and for what that runs. They are kept
	// when their programs end, so a sandbox that has run a command has about as many anyway.
	stubs = 3
)

// asked is set when the sandbox is told what to run.
var asked atomic.Bool

// ahead has the steps done after a while, one after the other, as long as more says so.
func ahead(steps ...func(more func() bool)) {
	time.AfterFunc(waiting, func() {
		for _, step := range steps {
			if !asked.Load() {
				step(func() bool { return !asked.Load() })
			}
		}
	})
}

var (
	_ = ahead // whose caller is gVisor's
	_ = stubs
)
