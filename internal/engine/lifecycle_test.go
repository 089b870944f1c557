package engine

import (
	"context"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/warren-sandbox/warren"
)

func TestLifecycle(t *testing.T) {
	r := newRig(t, nil)
	ctx := context.Background()
	var steps []string
	sb, err := r.Create(ctx, alice, CreateRequest{Spec: Spec{Name: "one", Labels: map[string]string{"a": "b"}, Env: map[string]string{"X": "y"},
		Repo: &RepoSource{URL: "https://example.com/r.git", Ref: "main"}}}, func(p Progress) { steps = append(steps, p.Step) })
	if err != nil {
		t.Fatal(err)
	}
	if sb.State != Running || sb.Generation != 1 || sb.Owner != "alice" || sb.Network != "none" || sb.Isolation == "" || sb.ImageDigest == "" {
		t.Errorf("created %+v", sb)
	}
	for _, want := range []string{"resolve image", "fetch repo", "cut workspace", "queue", "checkout", "create", "guest ready"} {
		if !slices.Contains(steps, want) {
			t.Errorf("no progress about %q in %q", want, steps)
		}
		if !slices.ContainsFunc(sb.Timing, func(m Milestone) bool { return m.Name == want }) {
			t.Errorf("no milestone %q", want)
		}
	}
	got, err := r.Get(ctx, alice, "one")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sb, got, cmp.Comparer(func(a, b Sandbox) bool { return a.ID == b.ID && a.State == b.State && cmp.Equal(a.Spec, b.Spec) })); diff != "" {
		t.Errorf("get differs from create (-create +get):\n%s", diff)
	}
	conn, err := r.Dial(ctx, alice, "one", warren.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := r.MarkFirstCommand(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got, _ = r.Get(ctx, alice, "one"); got.Timing[len(got.Timing)-1].Name != "first command" {
		t.Errorf("milestones %v", got.Timing)
	}
	ws, err := r.GetWorkspace(ctx, alice, "one", true)
	if err != nil || ws.ID != sb.WorkspaceID || ws.RepoURL != "https://example.com/r.git" || ws.BaseCommit != "c0ffee" || ws.SandboxID != sb.ID || ws.Size != 5 {
		t.Errorf("workspace %+v, %v", ws, err)
	}
	list, next, err := r.List(ctx, alice, ListRequest{Labels: map[string]string{"a": "b"}, States: []State{Running}})
	if err != nil || len(list) != 1 || next != "" || list[0].Spec.Env["X"] != "y" {
		t.Errorf("list %v %q %v", list, next, err)
	}
	r.stop()
	r.start()
	got, err = r.Get(ctx, alice, string(sb.ID[:8]))
	if err != nil || got.State != Running || got.Name != "one" {
		t.Errorf("after a restart of the daemon: %+v, %v", got, err)
	}
	r.delete(alice, "one")
	r.empty()
	var actions []string
	if err := r.Watch(ctx, alice, WatchRequest{ID: string(sb.ID), NoFollow: true}, func(e *Event) error {
		actions = append(actions, e.Action)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"sandbox.create", "sandbox.running", "sandbox.delete", "sandbox.deleted"}; !slices.Equal(actions, want) {
		t.Errorf("events %q, want %q", actions, want)
	}
}
