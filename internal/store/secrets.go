package store

import (
	"context"
	"time"
)

// Secret is a row of the table of secrets.
type Secret struct {
	Name string
	// Sealed is the value as package secret sealed it.
	Sealed string
	// Version counts from 1.
	Version          uint32
	Created, Updated time.Time
}

// PutSecret adds a row, or replaces the one of that name.
func (t *Tx) PutSecret(s *Secret) error {
	_, err := t.exec(`INSERT INTO secrets (name, sealed, version, created, updated) VALUES (?,?,?,?,?)
		ON CONFLICT (name) DO UPDATE SET sealed=excluded.sealed, version=excluded.version, updated=excluded.updated`,
		s.Name, s.Sealed, int64(s.Version), unix(s.Created), unix(s.Updated))
	return err
}

// DeleteSecret removes a row.
func (t *Tx) DeleteSecret(name string) error {
	r, err := t.exec(`DELETE FROM secrets WHERE name=?`, name)
	return one(r, err, "secret", name)
}

// Secrets returns all rows.
func (s *Store) Secrets(ctx context.Context) ([]*Secret, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT name, sealed, version, created, updated FROM secrets`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []*Secret
	for rows.Next() {
		k := &Secret{}
		var created, updated int64
		if err := rows.Scan(&k.Name, &k.Sealed, &k.Version, &created, &updated); err != nil {
			return nil, s.readError(err)
		}
		k.Created, k.Updated = fromUnix(created), fromUnix(updated)
		all = append(all, k)
	}
	return all, s.readError(rows.Err())
}
