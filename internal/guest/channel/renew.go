package channel

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// RenewalSize is how many bytes a renewal has, which is one message each way.
const RenewalSize = 16

// ServeRenewed carries streams over conn as [Serve] does, and starts afresh each time that the host asks for it on control,
// for as long as the process lives. A sandbox that goes on from an image has another socket under the same descriptor,
// while its guest may be in the middle of anything on the one that was there; so the host sends nothing on the new one
// before the guest has left the old session and said so.
//
// A renewal is a message of [RenewalSize] bytes on control, which keeps messages apart; its answer is the same bytes. When the
// answer is there, nothing of an old session will be written to conn any more. The end of either connection ends nothing for
// good.
func ServeRenewed(conn net.Conn, control *net.UnixConn, c Config) error {
	for {
		t := &turn{conn: conn}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = Serve(t, c) // how it ended is of no interest: the host comes back or does not
		}()
		renewal, err := nextRenewal(control)
		t.end()
		<-ended
		if err == nil {
			err = conn.SetDeadline(time.Time{})
		}
		if err != nil {
			return err
		}
		_, _ = control.Write(renewal) // a host that has gone again asks again
	}
}

// nextRenewal waits for a renewal. A descriptor at its end is waited on like one with nothing to read: behind it may be another
// socket one day.
func nextRenewal(control *net.UnixConn) ([]byte, error) {
	rc, err := control.SyscallConn()
	if err != nil {
		return nil, err
	}
	var buf [RenewalSize + 1]byte
	err = rc.Read(func(fd uintptr) bool {
		for {
			n, err := syscall.Read(int(fd), buf[:])
			switch {
			case n == RenewalSize:
				return true
			case errors.Is(err, syscall.EINTR), n > 0:
			default:
				return false
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("wait for the host on the channel's control: %w", err)
	}
	return buf[:RenewalSize], nil
}

// turn is a connection for the time of one session, whose end leaves it open.
type turn struct {
	conn net.Conn
	mu   sync.RWMutex // held by whoever reads or writes
	over bool
}

var longAgo = time.Unix(1, 0)

func (t *turn) Read(b []byte) (int, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.over {
		return 0, os.ErrClosed
	}
	return t.conn.Read(b)
}

func (t *turn) Write(b []byte) (int, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.over {
		return 0, os.ErrClosed
	}
	return t.conn.Write(b)
}

// Close ends what the session does.
func (t *turn) Close() error {
	t.end()
	return nil
}

// end returns when the session reads and writes nothing any more.
func (t *turn) end() {
	t.mu.RLock()
	if !t.over {
		_ = t.conn.SetDeadline(longAgo)
	}
	t.mu.RUnlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}
