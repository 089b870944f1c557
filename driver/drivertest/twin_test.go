package drivertest

import (
	"testing"

	"github.com/warren-sandbox/warren/driver/drivertest/field"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestTwins proves without any driver that each attack is noticed where nothing stops it.
func TestTwins(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsUserNamespaces(t)
	for _, name := range []string{"A01", "A02", "A05", "A06", "A07", "A08", "A09", "A10", "A11", "A12", "A18", "A21", "A24", "A25", "A27"} {
		t.Run(name, func(t *testing.T) {
			ev := runTwin(t, name)
			if len(ev) == 0 {
				t.Error("no evidence")
			}
			for _, e := range ev {
				t.Logf("%.200s", e)
			}
		})
	}
	for _, kind := range []string{"processes", "descriptors", "memory", "shm", "files", "output"} {
		t.Run("A20/"+kind, func(t *testing.T) {
			if ev := runTwin(t, "A20", kind, "100", "1000"); len(ev) == 0 {
				t.Error("no evidence")
			}
		})
	}
}

// TestCanary proves that the scanner finds what it is to find, and only that.
func TestCanary(t *testing.T) {
	c := field.Canary()
	for _, tt := range []struct {
		text string
		want int
	}{
		{"", 0},
		{"before " + c + " after", 1},
		{c + c, 1},
		{c[:len(c)-1], 0},
		{c + "\x00" + field.Canary(), 2},
	} {
		if got := field.Canaries([]byte(tt.text)); len(got) != tt.want {
			t.Errorf("Canaries(%.40q): %d, want %d", tt.text, len(got), tt.want)
		}
	}
}
