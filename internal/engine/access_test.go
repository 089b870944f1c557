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

// Others name what is theirs as they like. The operator, who may use all of it, gets it by no name that is his own or the beginning of
// one of his ids.
func TestOthersNamesAreNotTheOperators(t *testing.T) {
	r := newRig(t, nil)
	mine := r.create(operator, Spec{Name: "web"})
	short := string(mine.ID[:8])
	r.create(alice, Spec{Name: short})
	for _, name := range []string{"web", short, string(mine.WorkspaceID[:8])} {
		if _, err := r.CreateWorkspace(t.Context(), alice, CreateWorkspaceRequest{Name: name}, nil); err != nil {
			t.Fatal(err)
		}
	}
	r.create(alice, Spec{Name: "only-hers"})
	if id, err := r.Resolve(operator, "web"); err != nil || id != mine.ID {
		t.Errorf("sandbox web is %s, %v", id, err)
	}
	if id, err := r.Resolve(operator, short); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "ambiguous") {
		t.Errorf("sandbox %s is %s, %v", short, id, err)
	}
	if w, err := r.GetWorkspace(t.Context(), operator, "web", false); err != nil || w.ID != mine.WorkspaceID {
		t.Errorf("workspace web is %+v, %v", w, err)
	}
	for _, ref := range []string{short, string(mine.WorkspaceID[:8])} {
		if w, err := r.GetWorkspace(t.Context(), operator, ref, false); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "ambiguous") {
			t.Errorf("workspace %s is %+v, %v", ref, w, err)
		}
	}
	// Whole ids, more of an id, and names that nothing else has, are good.
	for _, ref := range []string{string(mine.ID), string(mine.ID[:12]), string(mine.WorkspaceID), string(mine.WorkspaceID[:12])} {
		if w, err := r.GetWorkspace(t.Context(), operator, ref, false); err != nil || w.ID != mine.WorkspaceID {
			t.Errorf("workspace %s is %+v, %v", ref, w, err)
		}
	}
	if _, err := r.Resolve(operator, "only-hers"); err != nil {
		t.Error(err)
	}
	// She herself gets her own, and nobody else's.
	if id, err := r.Resolve(alice, short); err != nil || id == mine.ID {
		t.Errorf("her %s is %s, %v", short, id, err)
	}
	if _, err := r.Resolve(alice, string(mine.ID[:9])); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("another's id is %v", err)
	}
}
