package engine

import (
	"errors"
	"math"
	"strings"
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

// What a refusal says is what to do about it.
func TestRefusalTexts(t *testing.T) {
	b := Budget{CPUMillis: 4000, Memory: 4 << 30, Disk: 1 << 40}
	for _, c := range []struct {
		have, more usage
		want       string
	}{
		{usage{}, usage{memory: 8 << 30}, "the request is larger than the budget of memory per user (limit 4 GiB): 8 GiB asked for; ask for less"},
		{usage{}, usage{cpu: math.MaxUint32}, "processors per user (limit 4 CPU): 4294967.295 CPU asked for"},
		{usage{cpu: 3500}, usage{cpu: 1500}, "is used up: 3.5 CPU in use, 1.5 CPU more asked for; delete a sandbox"},
		{usage{disk: 1 << 39}, usage{disk: math.MaxInt64}, "(limit 1 TiB): 8.0 EiB asked for"},
		{usage{disk: 1 << 39}, usage{disk: 1 << 40}, "is used up: 512 GiB in use, 1 TiB more asked for"},
	} {
		if err := within(&c.have, c.more, b, "per user"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v more than %+v: %v; want %q", c.more, c.have, err, c.want)
		}
	}
	for _, what := range []string{"issue tokens", "pull images"} {
		if err := operatorOnly(alice, what); !errors.Is(err, warren.ErrDenied) || strings.Contains(err.Error(), " is shared") || !strings.Contains(err.Error(), "only the operator of this server may "+what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
