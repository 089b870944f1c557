package engine

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/store"
)

// Clock is where the engine gets its time from; tests give one that they move.
type Clock interface {
	// Now is the wall clock.
	Now() time.Time
	// Steady is a reading of a clock that never jumps, and the name of the period in which its readings can be compared: the
	// boot of the machine.
	Steady() (d time.Duration, boot string)
	// After works as time.After does, on the steady clock.
	After(d time.Duration) <-chan time.Time
}

type systemClock struct{ boot string }

// SystemClock is the machine's clock. Time for which the machine sleeps does not count as steady time.
func SystemClock() Clock {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		// Without it no two processes can compare readings; each run is a boot of its own.
		return systemClock{boot: randomHex(16)}
	}
	return systemClock{boot: strings.TrimSpace(string(b))}
}

func (systemClock) Now() time.Time { return time.Now() }

func (c systemClock) Steady() (time.Duration, string) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("clock_gettime(CLOCK_MONOTONIC): " + err.Error()) // cannot fail on Linux
	}
	return time.Duration(ts.Nano()), c.boot
}

func (systemClock) After(d time.Duration) <-chan time.Time { return time.After(d) }

// timeline is the engine's own time, in nanoseconds, on which sandboxes expire. It began as the wall clock's time
// when the store was made, and moves with the steady clock from then on. Its last reading is kept in the store
// beside that of the steady clock, so that it goes on exactly when the daemon is restarted, whatever happens to the
// wall clock. Across a boot of the machine nothing but the wall clock tells how long it was off: the line moves
// with it then, but never backwards, and nothing expires in the first minute after, so that a clock that is set
// late has time to be seen.
type timeline struct {
	clock Clock
	base  int64         // reading of the line
	at    time.Duration // reading of the steady clock at base
	boot  string
	// grace is until when nothing expires.
	grace int64
}

const bootGrace = time.Minute

type savedLine struct {
	Line   int64         `json:"line"`
	Wall   int64         `json:"wall"`
	Steady time.Duration `json:"steady"`
	Boot   string        `json:"boot"`
}

const lineKey = "timeline"

func openTimeline(ctx context.Context, s *store.Store, c Clock) (*timeline, error) {
	steady, boot := c.Steady()
	l := &timeline{clock: c, base: c.Now().UnixNano(), at: steady, boot: boot}
	text, err := s.Meta(ctx, lineKey)
	if err != nil {
		return nil, err
	}
	var saved savedLine
	if text == "" || json.Unmarshal([]byte(text), &saved) != nil {
		return l, nil
	}
	if saved.Boot == boot && steady >= saved.Steady {
		l.base = saved.Line + int64(steady-saved.Steady)
		return l, nil
	}
	l.base = saved.Line + max(0, c.Now().UnixNano()-saved.Wall)
	l.grace = l.base + int64(bootGrace)
	return l, nil
}

// now is the line's reading.
func (l *timeline) now() int64 {
	steady, _ := l.clock.Steady()
	return l.base + int64(steady-l.at)
}

// wall translates a reading to the wall clock as it stands now.
func (l *timeline) wall(reading int64) time.Time {
	return l.clock.Now().Add(time.Duration(reading - l.now()))
}

func (l *timeline) save(tx *store.Tx) error {
	steady, boot := l.clock.Steady()
	b, err := json.Marshal(savedLine{Line: l.base + int64(steady-l.at), Wall: l.clock.Now().UnixNano(), Steady: steady, Boot: boot})
	if err != nil {
		return err
	}
	return tx.SetMeta(lineKey, string(b))
}
