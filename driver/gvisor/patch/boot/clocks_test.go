//go:build linux

package boot

import (
	"errors"
	"testing"

	"gvisor.dev/gvisor/pkg/sentry/time"
)

// told is a pair of clocks that tell what they are told to.
type told map[time.ClockID]int64

func (t told) GetTime(id time.ClockID) (int64, error) {
	v, ok := t[id]
	if !ok {
		return 0, errors.New("no such clock")
	}
	return v, nil
}

func TestAgree(t *testing.T) {
	const second = int64(1e9)
	host := told{time.Monotonic: 5000 * second, time.Realtime: 1e6 * second}
	for _, c := range []struct {
		name                string
		monotonic, realtime int64 // what they are ahead of the host's
		running             int64
		want                bool
	}{
		{"exact", 0, 0, second, true},
		{"a little off after an hour", 50e6, -50e6, 3600 * second, true},
		{"as much off after a second", 50e6, -50e6, second, false},
		{"the host's clock was set forward", 0, -30 * second, 60 * second, false},
		{"the host's clock was set back", 0, 30 * second, 60 * second, false},
		{"set by little, at once", 0, 5e6, second, false},
		{"the host slept and the counter did not", 3600 * second, 0, 600 * second, false},
		{"another processor", -second, -second, 100 * second, false},
	} {
		mine := told{time.Monotonic: host[time.Monotonic] + c.monotonic, time.Realtime: host[time.Realtime] + c.realtime}
		if got := agree(mine, host, c.running); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if agree(told{time.Monotonic: host[time.Monotonic]}, host, second) {
		t.Error("a clock that fails agrees")
	}
}

// TestCalibrated takes the same clocks again as long as they are right.
func TestCalibrated(t *testing.T) {
	n := 0
	create := func(raw bool) *time.CalibratedClocks { n++; return time.NewCalibratedClocks(raw) }
	first := calibrated(create, false)
	if calibrated(create, false) != first {
		t.Error("clocks that have learnt nothing yet, and so ask the host, were not taken again")
	}
	if calibrated(create, true) == first {
		t.Error("clocks of another kind were taken")
	}
	if n != 3 {
		t.Errorf("%d were made, want one for each call", n)
	}
}
