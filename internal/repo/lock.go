package repo

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LockFile takes the lock of a file that other processes take too, and waits for it until ctx ends. The kernel
// drops the lock when its holder dies. Lock files are never removed, so that two holders cannot hold two files of
// one name.
func LockFile(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}
