package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile is an advisory lock between the goroutines and processes that use one store. Closing it, or the end of the process,
// releases it.
type lockFile struct{ f *os.File }

// lock waits until it has the lock of that name. A shared one keeps exclusive ones away, and the other way round.
func (s *Store) lock(ctx context.Context, name string, exclusive bool) (*lockFile, error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		l, err := s.tryLock(name, exclusive)
		if err != nil || l != nil {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// tryLock returns nil when another holds the lock.
func (s *Store) tryLock(name string, exclusive bool) (*lockFile, error) {
	f, err := os.OpenFile(filepath.Join(s.dir, "locks", name), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for {
		err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err == nil {
		return &lockFile{f}, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("image store: lock: %w", err)
}

func (l *lockFile) unlock() { l.f.Close() }

// storeLock is the lock that whoever adds to the store holds shared, until a reference names what was added. Whoever holds it
// exclusively may remove what no reference names.
const storeLock = "store"
