package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/warren-sandbox/warren"
)

// Snapshot is a row of the table of snapshots. Its spec is read apart, by [Store.SnapshotSpec].
type Snapshot struct {
	Num   int64 // order of creation
	ID    warren.SnapshotID
	Name  string
	Owner string
	State string
	// Kind is "memory", or "files" without memory.
	Kind string
	// SandboxID and SandboxName are those of the sandbox that it was taken of, which does not have to be there any more.
	SandboxID   warren.SandboxID
	SandboxName string
	ParentID    warren.SnapshotID
	Driver      string
	Image       string
	ImageDigest string
	// FilesID names its copy of the workspace.
	FilesID   warren.WorkspaceID
	RepoID    warren.RepoID
	CPUMillis uint32
	Memory    int64
	Disk      int64
	PIDs      uint32
	Created   time.Time
	// MemorySize is the bytes of the memory image and what else is beside it, FilesSize those of the copy of the workspace; of what
	// several snapshots have, what counts for this one.
	MemorySize int64
	FilesSize  int64
	// RootSum is of a snapshot of files "sha256:" and the checksum of the layer beside them, which is MemorySize bytes long, "none"
	// when there is none, or empty when that was not written down.
	RootSum string
	// Transient is a snapshot that lasts as long as the call that took it.
	Transient bool
	// Source is what the workspace was made from, as the engine wrote it.
	Source json.RawMessage
}

// InsertSnapshot adds a row; when p.Num is 0 the next number is taken and set.
func (t *Tx) InsertSnapshot(p *Snapshot, spec json.RawMessage) error {
	r, err := t.exec(`INSERT INTO snapshots (num, id, name, owner, state, kind, sandbox_id, sandbox_name, parent_id, driver, image, image_digest,
		files_id, repo_id, cpu_millis, memory, disk, pids, created, memory_size, files_size, root_sum, transient, source, spec)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`,
		number(p.Num), string(p.ID), null(p.Name), p.Owner, p.State, p.Kind, string(p.SandboxID), null(p.SandboxName), null(string(p.ParentID)),
		p.Driver, p.Image, p.ImageDigest, string(p.FilesID), string(p.RepoID), int64(p.CPUMillis), p.Memory, p.Disk, int64(p.PIDs),
		unix(p.Created), p.MemorySize, p.FilesSize, p.RootSum, p.Transient, string(p.Source), string(spec))
	if err != nil {
		return err
	}
	p.Num, err = r.LastInsertId()
	return err
}

// UpdateSnapshot writes what can change of a snapshot.
func (t *Tx) UpdateSnapshot(p *Snapshot) error {
	r, err := t.exec(`UPDATE snapshots SET name=?, state=?, kind=?, memory_size=?, files_size=?, root_sum=? WHERE id=?`, null(p.Name), p.State, p.Kind, p.MemorySize, p.FilesSize, p.RootSum, string(p.ID))
	return one(r, err, "snapshot", p.ID)
}

// DeleteSnapshot removes a row, and hangs what came after it on the one before it. Nothing comes after a transient one.
func (t *Tx) DeleteSnapshot(p *Snapshot) error {
	if !p.Transient {
		for _, q := range []string{`UPDATE snapshots SET parent_id=? WHERE parent_id=?`, `UPDATE sandboxes SET snapshot_id=? WHERE snapshot_id=?`} {
			if _, err := t.exec(q, null(string(p.ParentID)), string(p.ID)); err != nil {
				return err
			}
		}
	}
	_, err := t.exec(`DELETE FROM snapshots WHERE id=?`, string(p.ID))
	return err
}

// Snapshots returns all rows in order of creation.
func (s *Store) Snapshots(ctx context.Context) ([]*Snapshot, error) {
	rows, err := s.reader.QueryContext(ctx, `SELECT num, id, coalesce(name,''), owner, state, kind, sandbox_id, coalesce(sandbox_name,''), coalesce(parent_id,''),
		driver, image, image_digest, files_id, repo_id, cpu_millis, memory, disk, pids, created, memory_size, files_size, root_sum, transient, source FROM snapshots ORDER BY num`)
	if err != nil {
		return nil, s.readError(err)
	}
	defer rows.Close()
	var all []*Snapshot
	for rows.Next() {
		p := &Snapshot{}
		var created int64
		var source string
		if err := rows.Scan(&p.Num, &p.ID, &p.Name, &p.Owner, &p.State, &p.Kind, &p.SandboxID, &p.SandboxName, &p.ParentID,
			&p.Driver, &p.Image, &p.ImageDigest, &p.FilesID, &p.RepoID, &p.CPUMillis, &p.Memory, &p.Disk, &p.PIDs, &created, &p.MemorySize, &p.FilesSize, &p.RootSum, &p.Transient, &source); err != nil {
			return nil, s.readError(err)
		}
		p.Created, p.Source = fromUnix(created), json.RawMessage(source)
		all = append(all, p)
	}
	return all, s.readError(rows.Err())
}

// SnapshotSpec returns the spec of a snapshot, nil when there is none.
func (s *Store) SnapshotSpec(ctx context.Context, id warren.SnapshotID) (json.RawMessage, error) {
	var spec string
	err := s.reader.QueryRowContext(ctx, `SELECT spec FROM snapshots WHERE id=?`, string(id)).Scan(&spec)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return json.RawMessage(spec), s.readError(err)
}

// LastSnapshot returns the highest number that a snapshot ever had.
func (s *Store) LastSnapshot(ctx context.Context) (n int64, err error) {
	err = s.reader.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name='snapshots'), 0)`).Scan(&n)
	return n, s.readError(err)
}
