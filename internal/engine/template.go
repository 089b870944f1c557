package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// A template is a name for a snapshot, with what its sandboxes get besides. Building one is a client's work. While a template
// stands for a snapshot, that cannot be deleted; a create that has begun keeps the one it began with.

const (
	// maxTemplateName leaves room for what the client that builds it makes of the name.
	maxTemplateName = 40
	maxRecipe       = 1 << 20
)

// viewTemplate copies what is in memory. The caller holds mu.
func (e *Engine) viewTemplate(row *store.Template) *Template {
	return &Template{ID: row.ID, Name: row.Name, Owner: row.Owner, SnapshotID: row.SnapshotID, Recipe: row.Recipe, IdleTimeout: row.Idle,
		Version: row.Version, Created: row.Created, Updated: row.Updated, Standby: e.standbyCount(row), StandbyNote: e.standbyNote(row)}
}

// findTemplate returns the template that ref names for c, an id or a name. The caller holds mu.
func (e *Engine) findTemplate(c Caller, ref string) (*store.Template, error) {
	if t := e.templates[ownedName{c.User, ref}]; t != nil {
		return t, nil
	}
	if ref == "" {
		return nil, fmt.Errorf("a template is needed, by id or name: %w", warren.ErrInvalid)
	}
	var found []*store.Template
	for _, t := range e.templates {
		if c.may(t.Owner) && (t.ID == ref || c.Operator && t.Name == ref) {
			found = append(found, t)
		}
	}
	switch len(found) {
	case 0:
		return nil, notFound("template", ref)
	case 1:
		return found[0], nil
	}
	return nil, ambiguous("template", ref, func(yield func(string, string)) {
		for _, t := range found {
			yield(t.ID, t.Name)
		}
	})
}

// templateOf returns a template that stands for a snapshot, nil when none does. The caller holds mu.
func (e *Engine) templateOf(id warren.SnapshotID) *store.Template {
	for _, t := range e.templates {
		if t.SnapshotID == id {
			return t
		}
	}
	return nil
}

// isTemplates says why a snapshot cannot be deleted.
func isTemplates(p *snapshot, t *store.Template) error {
	return fmt.Errorf("snapshot %s is what template %s stands for; remove that template, or build it anew, first: %w", p.label(), t.Name, warren.ErrState)
}

// useOrigin finds the snapshot that a spec goes on from, by a template if it names one, and keeps it until release. An update of
// the template in the same moment does not come in between.
func (e *Engine) useOrigin(c Caller, s *Spec) (*snapshot, func(), error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.Template != "" {
		if err := e.fillTemplate(c, s); err != nil {
			return nil, nil, err
		}
	}
	return e.useFound(c, s.Snapshot)
}

// fillTemplate puts what a template stands for into a spec that names it. The caller holds mu.
func (e *Engine) fillTemplate(c Caller, s *Spec) error {
	if s.Snapshot != "" {
		return invalid("snapshot", s.Snapshot, "a template stands for a snapshot; give one of the two")
	}
	t, err := e.findTemplate(c, s.Template)
	if err != nil {
		return err
	}
	s.Template, s.Snapshot = t.Name, string(t.SnapshotID)
	if s.IdleTimeout == 0 {
		s.IdleTimeout = t.Idle
	}
	return nil
}

// PutTemplate makes a template, or makes one stand for another snapshot; it returns the snapshot that it stood for before.
func (e *Engine) PutTemplate(ctx context.Context, c Caller, r TemplateRequest) (*Template, warren.SnapshotID, error) {
	if err := validName(r.Name); err != nil {
		return nil, "", err
	}
	if len(r.Name) > maxTemplateName {
		return nil, "", invalid("name", r.Name, fmt.Sprintf("that of a template has at most %d characters", maxTemplateName))
	}
	if isID(r.Name, 'm') {
		return nil, "", invalid("name", r.Name, "it looks like an id; choose another")
	}
	if r.Recipe == "" {
		r.Recipe = "{}"
	}
	if len(r.Recipe) > maxRecipe {
		return nil, "", fmt.Errorf("the recipe has %s, of at most %s: %w", size(int64(len(r.Recipe))), size(maxRecipe), warren.ErrInvalid)
	}
	if !json.Valid([]byte(r.Recipe)) || !strings.HasPrefix(strings.TrimSpace(r.Recipe), "{") {
		return nil, "", invalid("recipe", r.Recipe, "it is not a JSON object")
	}
	if err := checkTimeout("idle timeout", r.IdleTimeout); err != nil {
		return nil, "", err
	}
	// Puts and deletes of one name follow each other.
	key := ownedName{c.User, r.Name}
	leave, err := e.oneAtATime(ctx, ownedName{"\x00template " + c.User, r.Name})
	if err != nil {
		return nil, "", err
	}
	defer leave()
	// Held until the template stands for it, so that no delete comes in between.
	p, release, err := e.useSnapshot(c, r.Snapshot)
	if err != nil {
		return nil, "", err
	}
	defer release()
	if p.row.Owner != c.User {
		return nil, "", fmt.Errorf("snapshot %s belongs to user %q, and a template is made of one's own: %w", p.row.ID, p.row.Owner, warren.ErrDenied)
	}
	now := e.clock.Now()
	row := store.Template{ID: newID('m'), Name: r.Name, Owner: c.User, Created: now, Version: 1}
	action, before := "template.create", warren.SnapshotID("")
	e.mu.Lock()
	if old := e.templates[key]; old != nil {
		row, action, before = *old, "template.update", old.SnapshotID
		row.Version++
	}
	e.mu.Unlock()
	row.SnapshotID, row.Recipe, row.Idle, row.Updated = p.row.ID, r.Recipe, r.IdleTimeout, now
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.PutTemplate(&row); err != nil {
			return err
		}
		return tx.AppendEvent(templateEvent(c, action, &row, now))
	}); err != nil {
		return nil, "", err
	}
	e.mu.Lock()
	e.templates[key] = &row
	e.sizeStandbys()
	v := e.viewTemplate(&row)
	e.mu.Unlock()
	e.noteTemplate(row.Owner, row.SnapshotID)
	e.log.Info("template", "name", row.Name, "user", c.User, "version", row.Version, "snapshot", row.SnapshotID)
	return v, before, nil
}

func templateEvent(c Caller, action string, row *store.Template, at time.Time) *store.Event {
	return &store.Event{Time: at, Owner: row.Owner, Actor: c.User, Action: action, Message: row.Name,
		Fields: map[string]string{"template": row.ID, "snapshot": string(row.SnapshotID), "version": fmt.Sprint(row.Version)}}
}

// GetTemplate returns one template.
func (e *Engine) GetTemplate(_ context.Context, c Caller, ref string) (*Template, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	t, err := e.findTemplate(c, ref)
	if err != nil {
		return nil, err
	}
	return e.viewTemplate(t), nil
}

// ListTemplates returns the templates that c may see, by name.
func (e *Engine) ListTemplates(_ context.Context, c Caller) ([]*Template, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []*Template
	for _, t := range e.templates {
		if c.may(t.Owner) {
			all = append(all, e.viewTemplate(t))
		}
	}
	slices.SortFunc(all, func(a, b *Template) int {
		return strings.Compare(a.Name+"\x00"+a.Owner, b.Name+"\x00"+b.Owner)
	})
	return all, nil
}

// DeleteTemplate forgets a template. Its snapshot, and what was made of it, stay.
func (e *Engine) DeleteTemplate(ctx context.Context, c Caller, ref string, allowMissing bool) error {
	e.mu.Lock()
	t, err := e.findTemplate(c, ref)
	e.mu.Unlock()
	if err == nil {
		var leave func()
		if leave, err = e.oneAtATime(ctx, ownedName{"\x00template " + t.Owner, t.Name}); err != nil {
			return err
		}
		defer leave()
		e.mu.Lock()
		t, err = e.findTemplate(c, t.ID) // as it is now
		e.mu.Unlock()
	}
	if err != nil {
		if allowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	if err := e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteTemplate(t.ID); err != nil {
			return err
		}
		return tx.AppendEvent(templateEvent(c, "template.delete", t, e.clock.Now()))
	}); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.templates, ownedName{t.Owner, t.Name})
	e.sizeStandbys()
	return nil
}

// loadTemplates puts the rows into memory.
func (e *Engine) loadTemplates(ctx context.Context) error {
	rows, err := e.store.Templates(ctx)
	if err != nil {
		return err
	}
	for _, row := range rows {
		e.templates[ownedName{row.Owner, row.Name}] = row
	}
	return nil
}
