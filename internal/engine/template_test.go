package engine

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren"
)

func (r *rig) put(name, snapshot string) (*Template, warren.SnapshotID) {
	r.t.Helper()
	t, before, err := r.PutTemplate(context.Background(), alice, TemplateRequest{Name: name, Snapshot: snapshot, Recipe: `{"a":1}`, IdleTimeout: time.Hour})
	if err != nil {
		r.t.Fatal(err)
	}
	return t, before
}

func TestTemplate(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.mark("box", "one")
	one := r.snapshotNow("box", "one")
	r.mark("box", "two")
	two := r.snapshotNow("box", "two")
	first, before := r.put("app", "one")
	if first.Version != 1 || first.SnapshotID != one.ID || before != "" || first.Owner != alice.User {
		t.Errorf("first: %+v, before %q", first, before)
	}
	kid := r.create(alice, Spec{Name: "kid", Template: "app"})
	if kid.SnapshotID != one.ID || r.word("kid") != "one" || kid.Spec.IdleTimeout != time.Hour || kid.Spec.Template != "app" {
		t.Errorf("made of it: %+v, %q", kid, r.word("kid"))
	}
	if got := r.create(alice, Spec{Name: "own", Template: "app", IdleTimeout: time.Minute}); got.Spec.IdleTimeout != time.Minute {
		t.Errorf("idle timeout of its own: %v", got.Spec.IdleTimeout)
	}
	if err := r.DeleteSnapshot(ctx, alice, "one", false); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "template app") {
		t.Errorf("delete of a template's snapshot: %v", err)
	}
	second, before := r.put("app", "two")
	if second.ID != first.ID || second.Version != 2 || second.SnapshotID != two.ID || before != one.ID {
		t.Errorf("second: %+v, before %q", second, before)
	}
	if err := r.DeleteSnapshot(ctx, alice, "one", false); err != nil {
		t.Errorf("delete of what it stood for: %v", err)
	}
	r.stop()
	r.start()
	if got, err := r.GetTemplate(ctx, alice, "app"); err != nil {
		t.Error(err)
	} else if d := cmp.Diff(second, got); d != "" {
		t.Errorf("after a start: %s", d)
	}
	r.create(alice, Spec{Name: "kid-2", Template: "app"})
	if r.word("kid-2") != "two" || r.word("kid") != "one" {
		t.Errorf("after the update: %q, the older %q", r.word("kid-2"), r.word("kid"))
	}
	if list, err := r.ListTemplates(ctx, alice); err != nil || len(list) != 1 {
		t.Errorf("list: %v, %v", list, err)
	}
	if err := r.DeleteTemplate(ctx, alice, "app", false); err != nil {
		t.Error(err)
	}
	if err := r.DeleteTemplate(ctx, alice, "app", false); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}
	if err := r.DeleteTemplate(ctx, alice, "app", true); err != nil {
		t.Error(err)
	}
	if err := r.DeleteSnapshot(ctx, alice, "two", false); err != nil {
		t.Errorf("delete of the snapshot after the template: %v", err)
	}
}

func TestTemplateBadInput(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	r.snapshotNow("box", "one")
	r.put("app", "one")
	for name, tt := range map[string]struct {
		c    Caller
		req  TemplateRequest
		want error
	}{
		"no name":        {alice, TemplateRequest{Snapshot: "one"}, warren.ErrInvalid},
		"bad name":       {alice, TemplateRequest{Name: "A b", Snapshot: "one"}, warren.ErrInvalid},
		"long name":      {alice, TemplateRequest{Name: strings.Repeat("a", 41), Snapshot: "one"}, warren.ErrInvalid},
		"no snapshot":    {alice, TemplateRequest{Name: "x"}, warren.ErrInvalid},
		"wrong snapshot": {alice, TemplateRequest{Name: "x", Snapshot: "nothing"}, warren.ErrNotFound},
		"another's":      {bob, TemplateRequest{Name: "x", Snapshot: "one"}, warren.ErrNotFound},
		"bad recipe":     {alice, TemplateRequest{Name: "x", Snapshot: "one", Recipe: "{"}, warren.ErrInvalid},
		"no object":      {alice, TemplateRequest{Name: "x", Snapshot: "one", Recipe: "[]"}, warren.ErrInvalid},
		"long recipe":    {alice, TemplateRequest{Name: "x", Snapshot: "one", Recipe: `{"a":"` + strings.Repeat("a", maxRecipe) + `"}`}, warren.ErrInvalid},
		"idle timeout":   {alice, TemplateRequest{Name: "x", Snapshot: "one", IdleTimeout: -1}, warren.ErrInvalid},
	} {
		if _, _, err := r.PutTemplate(ctx, tt.c, tt.req); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	for name, tt := range map[string]struct {
		c    Caller
		spec Spec
		want error
	}{
		"no such template": {alice, Spec{Template: "x"}, warren.ErrNotFound},
		"another's":        {bob, Spec{Template: "app"}, warren.ErrNotFound},
		"and a snapshot":   {alice, Spec{Template: "app", Snapshot: "one"}, warren.ErrInvalid},
		"and an image":     {alice, Spec{Template: "app", Image: "other"}, warren.ErrInvalid},
	} {
		if _, err := r.Create(ctx, tt.c, CreateRequest{Spec: tt.spec}, nil); !errors.Is(err, tt.want) {
			t.Errorf("create, %s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := r.GetTemplate(ctx, bob, "app"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("another's template: %v", err)
	}
}

// TestTemplatePutMeetsDelete has a put and a delete of its snapshot begin in the same moment: one of them fails.
func TestTemplatePutMeetsDelete(t *testing.T) {
	ctx := t.Context()
	r := newRig(t, nil)
	r.create(alice, Spec{Name: "box"})
	for range 20 {
		p := r.snapshotNow("box", "")
		deleted := make(chan error, 1)
		go func() { deleted <- r.DeleteSnapshot(ctx, alice, string(p.ID), false) }()
		_, _, put := r.PutTemplate(ctx, alice, TemplateRequest{Name: "app", Snapshot: string(p.ID)})
		if gone := <-deleted; (put == nil) == (gone == nil) {
			t.Fatalf("put: %v, delete: %v", put, gone)
		}
		if put == nil {
			r.delete(alice, string(r.create(alice, Spec{Template: "app"}).ID))
		}
	}
}
