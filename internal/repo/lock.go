package repo

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LockFile takes the lock of a file that other processes take too, and waits for it until ctx ends. The kernel
// drops the lock when its holder dies. Only the holder may remove the file, as its last act, for others
// can take the lock from then on; who waited for the old file begins anew, so that two never hold two files of one name.
func LockFile(ctx context.Context, name string) (unlock func(), err error) {
	wait := time.Millisecond
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		if err := flock(ctx, f, &wait); err != nil {
			f.Close()
			return nil, err
		}
		held, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if now, err := os.Stat(name); err == nil && os.SameFile(held, now) {
			return func() { f.Close() }, nil
		}
		f.Close()
	}
}

func flock(ctx context.Context, f *os.File, wait *time.Duration) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(*wait):
			*wait = min(2*(*wait), 50*time.Millisecond)
		}
	}
}
