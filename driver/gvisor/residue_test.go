//go:build linux

package gvisor_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// instance is the name under which the keeper of a state directory makes its control groups.
func instance(t testing.TB, state string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(state, &st); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%d", st.Dev, st.Ino))
	return hex.EncodeToString(sum[:4])
}
