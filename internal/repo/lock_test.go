package repo

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// TestLockFileRemoved has holders that remove the file: still only one at a time holds the lock.
func TestLockFileRemoved(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lock")
	var holders atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				unlock, err := LockFile(t.Context(), name)
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d hold the lock", n)
				}
				holders.Add(-1)
				os.Remove(name) // from here on another may hold it
				unlock()
			}
		})
	}
	wg.Wait()
	unlock, err := LockFile(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := LockFile(done, name); !errors.Is(err, context.Canceled) {
		t.Errorf("a lock that is held: %v", err)
	}
}
