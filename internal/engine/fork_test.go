package engine

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver/fake"
)

// stuckFork begins a fork whose source does not run on, and returns when its children have been restored all the same.
func stuckFork(t *testing.T, r *rig, f ForkRequest) (forked chan error, res **ForkResult) {
	t.Helper()
	r.world.Inject(fake.OpThaw, fake.Fault{Err: fmt.Errorf("not yet: %w", warren.ErrUnavailable)})
	forked, res = make(chan error, 1), new(*ForkResult)
	before, n := r.world.Calls(fake.OpRestore), max(f.Count, 1)
	go func() {
		var err error
		*res, err = r.Fork(context.Background(), alice, f, nil)
		forked <- err
	}()
	for end := time.Now().Add(20 * time.Second); r.world.Calls(fake.OpRestore) < before+n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d children of %d are restored while the source stands still", r.world.Calls(fake.OpRestore)-before, n)
		}
	}
	return forked, res
}

// TestForkBesideThaw has a child restored while its source is still being let run on. It does not count, and the fork has not come to its
// end, before it is.
func TestForkBesideThaw(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	forked, res := stuckFork(t, r, ForkRequest{ID: "box", Name: "kid"})
	const still = 50 * time.Millisecond
	time.Sleep(still)
	select {
	case err := <-forked:
		t.Fatalf("it ended while its source stood still: %v", err)
	default:
	}
	all, _, err := r.List(ctx, alice, ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		if sb.Name != "box" && sb.State == Running {
			t.Errorf("%s is %s while its source stands still", sb.Name, sb.State)
		}
	}
	r.world.Inject(fake.OpThaw, fake.Fault{})
	if err := <-forked; err != nil {
		t.Fatal(err)
	}
	if len((*res).Children) != 1 || (*res).Stopped < still {
		t.Errorf("%d children, the source stood still for %v, want 1 and %v at least", len((*res).Children), (*res).Stopped, still)
	}
	for i, ch := range (*res).Children {
		if ch.Err != nil || ch.Sandbox.State != Running {
			t.Errorf("child %d: %+v, %v", i, ch.Sandbox, ch.Err)
		}
	}
	if _, err := r.Snapshot(ctx, alice, SnapshotRequest{ID: "box"}, nil); err != nil {
		t.Errorf("the source afterwards: %v", err)
	}
}

// TestForkOfDeleted deletes a source that is not let run on. The fork fails, and nothing of it is left.
func TestForkOfDeleted(t *testing.T) {
	for _, f := range []ForkRequest{{Count: 1}, {Count: 1, All: true}} {
		t.Run(fmt.Sprintf("%d %v", f.Count, f.All), func(t *testing.T) {
			ctx := t.Context()
			r := newRig(t, nil)
			r.create(alice, Spec{Name: "box"})
			f.ID = "box"
			forked, res := stuckFork(t, r, f)
			if err := r.Delete(ctx, alice, DeleteRequest{ID: "box", DeleteWorkspace: true}); err != nil {
				t.Fatal(err)
			}
			if err := <-forked; err == nil {
				t.Errorf("the fork of a sandbox that was deleted under it has %d children", len((*res).Children))
			}
			all, _, err := r.List(ctx, alice, ListRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if len(all) > 0 || r.world.Len() > 0 {
				t.Errorf("%d sandboxes are left on record, %d in the driver", len(all), r.world.Len())
			}
		})
	}
}
