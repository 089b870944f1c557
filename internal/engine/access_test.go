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

// What the cache holds was perhaps fetched with the operator's credentials, and branches of workspaces are in it: others
// have the origin asked, as themselves, and see nothing but the origin's.
func TestOthersSeeTheOrigin(t *testing.T) {
	r := newRig(t, nil)
	spec := Spec{Repo: &RepoSource{URL: "https://example.com/r"}}
	r.create(alice, spec)
	if o := r.repos.last; !o.Force || o.HostCredentials {
		t.Errorf("for a user: force %v, the host's credentials %v; want true, false", o.Force, o.HostCredentials)
	}
	r.create(operator, spec)
	if o := r.repos.last; o.Force || !o.HostCredentials {
		t.Errorf("for the operator: force %v, the host's credentials %v; want false, true", o.Force, o.HostCredentials)
	}
	spec.Repo.Ref = "warren/rt"
	r.create(operator, spec)
	if _, err := r.Create(t.Context(), alice, CreateRequest{Spec: spec}, nil); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a user cut from a branch of somebody's workspace: %v", err)
	}
}

// Files that vanished with an earlier try, whose record was not written any more, do not keep a sandbox for ever.
func TestDeleteWithoutFiles(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	if err := r.spaces.Delete(t.Context(), sb.WorkspaceID); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), alice, DeleteRequest{ID: "box"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get(t.Context(), alice, "box"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("after the delete: %v", err)
	}
}
