package store

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// Head is how far a chained record was seen to go: the number and the hash of one of its last entries. The zero Seq means that nothing was seen.
type Head struct {
	Seq  int64
	Hash string
	Seen time.Time
}

// AdvanceHead keeps a head, unless one is kept that is as far.
func (t *Tx) AdvanceHead(record string, h Head) error {
	_, err := t.exec(`INSERT INTO heads (record, seq, hash, seen) VALUES (?,?,?,?)
		ON CONFLICT (record) DO UPDATE SET seq=excluded.seq, hash=excluded.hash, seen=excluded.seen WHERE excluded.seq > heads.seq`,
		record, h.Seq, h.Hash, unix(h.Seen))
	return err
}

// ReplaceHead keeps a head in place of whichever was kept.
func (t *Tx) ReplaceHead(record string, h Head) error {
	_, err := t.exec(`INSERT OR REPLACE INTO heads (record, seq, hash, seen) VALUES (?,?,?,?)`, record, h.Seq, h.Hash, unix(h.Seen))
	return err
}

// Head returns the head of a record that is kept.
func (s *Store) Head(ctx context.Context, record string) (Head, error) {
	var h Head
	var seen int64
	err := s.reader.QueryRowContext(ctx, `SELECT seq, hash, seen FROM heads WHERE record=?`, record).Scan(&h.Seq, &h.Hash, &seen)
	if errors.Is(err, sql.ErrNoRows) {
		return Head{}, nil
	}
	h.Seen = fromUnix(seen)
	return h, s.readError(err)
}
