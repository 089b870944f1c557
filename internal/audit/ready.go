package audit

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	// reserveBytes is how much room [Log.Ready] takes beforehand for the records to come, when there is less than reserveLow of it.
	reserveBytes = 256 << 10
	reserveLow   = 64 << 10
	// reserveLeast is what has to be there for it to say yes.
	reserveLeast = 4 * maxRecord
)

// missing counts records that could not be written.
type missing struct {
	records  int64
	from, to time.Time
	why      string
}

// lose notes that a record could not be written, if they are to be counted. mu is held.
func (l *Log) lose(r Record, err error) {
	if l.opts.Lost == "" || errors.Is(err, ErrClosed) {
		return
	}
	at := r.Time
	if l.lost.records++; l.lost.records == 1 {
		l.lost.from = at
	}
	l.lost.to, l.lost.why = at, err.Error()
}

// ownUp writes how many records are missing, if any are. mu is held.
func (l *Log) ownUp() error {
	m := l.lost
	if m.records == 0 {
		return nil
	}
	r, err := l.tidy(Record{
		Actor: l.opts.Lost, Action: "record.lost",
		Message: fmt.Sprintf("%d records could not be written: %s", m.records, m.why),
		Fields:  map[string]string{"records": strconv.FormatInt(m.records, 10), "from": m.from.UTC().Format(time.RFC3339Nano), "to": m.to.UTC().Format(time.RFC3339Nano)},
	})
	if err != nil {
		return err
	}
	if _, err := l.write(r); err != nil {
		return err
	}
	l.lost = missing{}
	return nil
}

// Ready says whether records can be written, for who does nothing that would not be on record. It takes room for some of them beforehand, where the
// file system can. After an Append that failed it is an error until one succeeds, which it tries.
func (l *Log) Ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return ErrClosed
	case l.failed != nil:
		return l.failed
	}
	if len(l.owed) > 0 || l.lost.records > 0 {
		if err := l.pay(); err != nil {
			return err
		}
		l.poke(l.dirty)
	}
	if l.file == nil {
		if err := l.rotate(); err != nil {
			return l.explain("begin a segment", err)
		}
	}
	if l.reserved-l.size >= reserveLow {
		return nil
	}
	switch err := allocate(l.file, l.size, reserveBytes); {
	case err == nil:
		l.reserved = l.size + reserveBytes
	case full(err) && l.reserved-l.size < reserveLeast:
		return l.explain("take room for records", err)
	}
	return nil
}
