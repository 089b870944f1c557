package store

import (
	"context"
	"time"

	"github.com/warren-sandbox/warren"
)

// Template is a row of the table of templates.
type Template struct {
	ID         string
	Name       string
	Owner      string
	SnapshotID warren.SnapshotID
	// Recipe is what it was built from, as the client wrote it.
	Recipe string
	// Idle is the idle timeout of what is made of it.
	Idle time.Duration
	// Version counts from 1.
	Version          uint32
	Created, Updated time.Time
}

// PutTemplate adds a row, or replaces the one with its id.
func (t *Tx) PutTemplate(k *Template) error {
	_, err := t.exec(`INSERT INTO templates (id, name, owner, snapshot_id, recipe, idle, version, created, updated) VALUES (?,?,?,?,?,?,?,?,?)
		ON CONFLICT (id) DO UPDATE SET snapshot_id=excluded.snapshot_id, recipe=excluded.recipe, idle=excluded.idle, version=excluded.version, updated=excluded.updated`,
		k.ID, k.Name, k.Owner, string(k.SnapshotID), k.Recipe, int64(k.Idle), int64(k.Version), unix(k.Created), unix(k.Updated))
	return err
}

// DeleteTemplate removes a row.
func (t *Tx) DeleteTemplate(id string) error {
	r, err := t.exec(`DELETE FROM templates WHERE id=?`, id)
	return one(r, err, "template", id)
}

// Templates returns all rows.
func (s *Store) Templates(ctx context.Context) ([]*Template, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT id, name, owner, snapshot_id, recipe, idle, version, created, updated FROM templates`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []*Template
	for rows.Next() {
		k := &Template{}
		var idle, created, updated int64
		if err := rows.Scan(&k.ID, &k.Name, &k.Owner, &k.SnapshotID, &k.Recipe, &idle, &k.Version, &created, &updated); err != nil {
			return nil, s.readError(err)
		}
		k.Idle, k.Created, k.Updated = time.Duration(idle), fromUnix(created), fromUnix(updated)
		all = append(all, k)
	}
	return all, s.readError(rows.Err())
}
