package engine

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// TestPreview changes previews, and looks at them again after a restart of the server.
func TestPreview(t *testing.T) {
	r := newRig(t, nil)
	ctx := t.Context()
	sb := r.create(alice, Spec{Name: "box"})
	yes, no := true, false
	set := func(q PreviewRequest) Preview {
		t.Helper()
		q.ID = "box"
		p, err := r.SetPreview(ctx, alice, q)
		if err != nil {
			t.Fatal(err)
		}
		if now, there := r.PreviewOf(sb.ID, q.Port); !there || now != *p {
			t.Fatalf("set %+v, is %+v, %v", p, now, there)
		}
		return *p
	}
	want := Preview{SandboxID: sb.ID, Port: 3000, Owner: alice.User, State: Running}
	if p := set(PreviewRequest{Port: 3000}); p != want {
		t.Errorf("at first %+v, want %+v", p, want)
	}
	set(PreviewRequest{Port: 3000, Public: &yes, KeepHost: &yes, Link: time.Hour})
	set(PreviewRequest{Port: 4000, Revoke: true})
	if p := set(PreviewRequest{Port: 4000, Public: &no}); p.Public || p.KeepHost || p.Epoch != 1 {
		t.Errorf("the other port is %+v", p)
	}
	want.Public, want.KeepHost, want.Epoch = true, true, 1
	for range 2 {
		if p := set(PreviewRequest{Port: 3000}); p != want {
			t.Errorf("is %+v, want %+v", p, want)
		}
		r.stop()
		r.start()
	}
	// Another change of the sandbox leaves it alone, and it dies with the sandbox.
	name := "other"
	if _, err := r.Update(ctx, alice, UpdateRequest{ID: "box", Name: &name}); err != nil {
		t.Fatal(err)
	}
	if p, _ := r.PreviewOf(sb.ID, 3000); p != want {
		t.Errorf("after a change of name %+v", p)
	}
	if _, err := r.SetPreview(ctx, bob, PreviewRequest{ID: string(sb.ID), Port: 3000, Public: &no}); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("another user: %v", err)
	}
	for _, port := range []uint16{0, 22, warren.GuestPort} {
		if _, err := r.SetPreview(ctx, alice, PreviewRequest{ID: "other", Port: port}); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("port %d: %v", port, err)
		}
	}
	var actions []string
	if err := r.Watch(ctx, alice, WatchRequest{ID: "other", NoFollow: true}, func(e *Event) error {
		if strings.HasPrefix(e.Action, "preview.") {
			actions = append(actions, e.Action+" "+e.Fields["port"])
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(actions, ", "), "preview.public 3000, preview.host 3000, preview.link 3000, preview.revoke 4000"; got != want {
		t.Errorf("events %s, want %s", got, want)
	}
	if err := r.Delete(ctx, alice, DeleteRequest{ID: "other"}); err != nil {
		t.Fatal(err)
	}
	if p, there := r.PreviewOf(sb.ID, 3000); there || p != (Preview{}) {
		t.Errorf("after its end %+v", p)
	}
}

// TestPreviewDamaged opens nothing whose record cannot be read: it may have had links that were revoked.
func TestPreviewDamaged(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(alice, Spec{Name: "box"})
	if _, there := r.PreviewOf(sb.ID, 3000); !there {
		t.Fatal("no preview of what is whole")
	}
	r.mu.Lock()
	r.boxes[sb.ID].row.Damaged = "previews: unexpected end"
	r.mu.Unlock()
	if _, there := r.PreviewOf(sb.ID, 3000); there {
		t.Error("a damaged record has a preview")
	}
	if _, err := r.SetPreview(t.Context(), alice, PreviewRequest{ID: "box", Port: 3000}); !errors.Is(err, warren.ErrState) {
		t.Errorf("asked for one: %v", err)
	}
	r.mu.Lock()
	r.boxes[sb.ID].row.Damaged = ""
	r.mu.Unlock()
}
