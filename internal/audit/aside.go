package audit

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

// OpenAside opens a log as [Open] does. One that was tampered with is kept aside as it is, and the new one says so first: what is to be recorded need
// not stop for it. actor is who says so.
func OpenAside(dir, actor string, o Options, log *slog.Logger) (*Log, error) {
	l, err := Open(dir, o)
	var bad *Bad
	if !errors.As(err, &bad) {
		return l, err
	}
	aside := dir + "-damaged-" + time.Now().UTC().Format("20060102T150405.000")
	log.Error("a record is damaged; it is kept aside", "error", bad, "directory", filepath.Base(aside))
	if err := os.Rename(dir, aside); err != nil {
		return nil, err
	}
	if l, err = Open(dir, o); err != nil {
		return nil, err
	}
	_, err = l.Append(context.Background(), Record{Actor: actor, Action: "audit.damaged", Message: bad.Error(), Fields: map[string]string{"kept": filepath.Base(aside)}, Durable: true})
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
