package engine

import (
	"errors"
	"math"
	"testing"

	"github.com/warren-sandbox/warren"
)

// A user other than the operator has names of its own in the mirror, and reaches no others.
func TestOwnBranch(t *testing.T) {
	ci, op := Caller{User: "ci"}, Caller{User: "root", Operator: true}
	for _, tc := range []struct {
		who    Caller
		branch string
		want   string
		denied bool
	}{
		{op, "main", "main", false},
		{op, "", "", false}, // the workspace's own default
		{ci, "", "warren/ci/fix", false},
		{ci, "warren/ci/other", "warren/ci/other", false},
		{ci, "warren/rt", "", true},
		{ci, "warren/ci", "", true},
		{ci, "warren/ci2/x", "", true},
		{ci, "main", "", true},
		{Caller{User: "a/b"}, "warren/a/b/c", "", true},
		{Caller{User: "../x"}, "warren/../x/y", "", true},
	} {
		got, err := ownBranch(tc.who, tc.branch, "fix")
		if tc.denied != errors.Is(err, warren.ErrDenied) || got != tc.want {
			t.Errorf("ownBranch(%+v, %q) = %q, %v; want %q, denied %v", tc.who, tc.branch, got, err, tc.want, tc.denied)
		}
	}
}

// Amounts that overflow do not switch a budget off.
func TestBudgetOverflow(t *testing.T) {
	err := within(&usage{disk: 10 << 30}, usage{disk: math.MaxInt64}, Budget{Disk: 20 << 30}, "per user")
	if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("an absurd amount of disk gave %v", err)
	}
}
