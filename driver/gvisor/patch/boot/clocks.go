//go:build linux

package boot

import (
	"sync"

	"gvisor.dev/gvisor/pkg/sentry/time"
)

// made are the clocks of this process, and the host's monotonic time when they were made.
var made struct {
	sync.Mutex
	clocks *time.CalibratedClocks
	at     int64
}

// calibrated returns the clocks of this process, made by create. A new pair learns for a second how fast the processor's counter runs, in
// which programs ask for the time by system calls, and a Go program does so hundreds of times as it goes on after a restore. An execution
// that was created before somebody wanted it has had that second. What it has learnt holds no more when the host's clock was set or the host
// slept meanwhile, and then it learns again.
func calibrated(create func(bool) *time.CalibratedClocks, raw bool) *time.CalibratedClocks {
	made.Lock()
	defer made.Unlock()
	fresh := create(raw)
	now, err := fresh.GetTime(time.Monotonic)
	if c := made.clocks; c != nil && c.MonotonicRawEnabled() == raw && err == nil && agree(c, fresh, now-made.at) {
		c.Update(true) // it may be long ago that anybody asked
		return c
	}
	made.clocks, made.at = fresh, now
	return fresh
}

// teller is a pair of clocks.
type teller interface {
	GetTime(time.ClockID) (int64, error)
}

// mostSkew is how much faster or slower than the host's a clock may run, as the part that it is of the time: what a host's clock is slewed by at most.
const mostSkew = 2000

// agree says whether clocks tell the host's time, which is that of the fresh ones, for these know nothing yet and ask it. They have been
// running by what they learnt for that many nanoseconds.
func agree(c, fresh teller, running int64) bool {
	for _, id := range []time.ClockID{time.Monotonic, time.Realtime} {
		before, err1 := fresh.GetTime(id)
		told, err2 := c.GetTime(id)
		after, err3 := fresh.GetTime(id)
		if err1 != nil || err2 != nil || err3 != nil {
			return false
		}
		if skew := running / mostSkew; told < before-skew || told > after+skew {
			return false
		}
	}
	return true
}

var _ = calibrated // whose callers are gVisor's
