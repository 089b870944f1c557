//go:build linux

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/message"
)

var (
	// errNoKeeper says that no keeper answered at all: the call has not begun.
	errNoKeeper = companion.ErrNone
	// errLost says that the keeper went away during a call.
	errLost = fmt.Errorf("the keeper went away during the call: %w", warren.ErrUnavailable)
)

// call makes one call; the keeper is started when none is there.
func (d *Driver) call(ctx context.Context, req *protocol.Request, files ...*os.File) (*protocol.Response, error) {
	c, r, err := d.open(ctx, req, files...)
	if err != nil {
		return nil, err
	}
	c.Close()
	return r, nil
}

// open makes a call and returns the connection on which it goes on.
func (d *Driver) open(ctx context.Context, req *protocol.Request, files ...*os.File) (*net.UnixConn, *protocol.Response, error) {
	for try := 0; ; try++ {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if d.isClosed() {
			return nil, nil, fmt.Errorf("the driver is closed: %w", warren.ErrUnavailable)
		}
		c, r, err := d.roundTrip(ctx, req, files...)
		if !errors.Is(err, errNoKeeper) || try == 3 {
			return c, r, err
		}
		if err := d.ensure(ctx, false); err != nil {
			return nil, nil, err
		}
	}
}

func (d *Driver) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// roundTrip sends a request to the keeper that is there and waits for the answer. When ctx ends it tells the keeper,
// by closing its sending side, and waits for a moment for the answer that everything has been undone.
func (d *Driver) roundTrip(ctx context.Context, req *protocol.Request, files ...*os.File) (*net.UnixConn, *protocol.Response, error) {
	c, err := d.keeper.Connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	type answer struct {
		r   *protocol.Response
		err error
	}
	got := make(chan answer, 1)
	go func() {
		if err := message.Write(c, req, files...); err != nil {
			got <- answer{err: err}
			return
		}
		for {
			r := &protocol.Response{}
			var err error
			if r.Files, err = message.Read(c, r); err == nil && r.Stands && req.Stood != nil {
				req.Stood()
				continue
			}
			got <- answer{r, err}
			return
		}
	}()
	var a answer
	select {
	case a = <-got:
	case <-ctx.Done():
		c.CloseWrite()
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		a = <-got
		if a.err == nil && a.r.Error == nil && (req.Op == protocol.OpCreate || req.Op == protocol.OpDelete || req.Op == protocol.OpSnapshot) {
			break // it was done before the cancellation arrived
		}
		c.Close()
		return nil, nil, ctx.Err()
	}
	switch {
	case a.err == nil && a.r.Error != nil:
		c.Close()
		return nil, nil, decodeError(ctx, a.r.Error)
	case a.err != nil:
		c.Close()
		if errors.Is(a.err, io.ErrUnexpectedEOF) || errors.Is(a.err, unix.ECONNRESET) || errors.Is(a.err, unix.EPIPE) {
			if req.Op == protocol.OpCreate || req.Op == protocol.OpSnapshot {
				return nil, nil, errLost
			}
			return nil, nil, errNoKeeper // the others may be repeated
		}
		return nil, nil, a.err
	}
	return c, a.r, nil
}

// decodeError turns an error of the keeper into one that matches a sentinel.
func decodeError(ctx context.Context, e *protocol.Error) error {
	var sentinel error
	switch e.Kind {
	case protocol.KindNotFound:
		sentinel = warren.ErrNotFound
	case protocol.KindExists:
		sentinel = warren.ErrExists
	case protocol.KindInvalid:
		sentinel = warren.ErrInvalid
	case protocol.KindState:
		sentinel = warren.ErrState
	case protocol.KindExhausted:
		sentinel = warren.ErrExhausted
	case protocol.KindUnavailable:
		sentinel = warren.ErrUnavailable
	case protocol.KindUnsupported:
		sentinel = errors.ErrUnsupported
	case protocol.KindImage:
		sentinel = driver.ErrImage
	case protocol.KindCanceled:
		if sentinel = ctx.Err(); sentinel == nil {
			sentinel = context.Canceled
		}
	default:
		return errors.New(e.Message)
	}
	return fmt.Errorf("%s: %w", e.Message, sentinel)
}

// ensure makes a keeper of our build answer, and holds a connection to it. With replace it also ends one of another
// build; sandboxes go on, and the new keeper takes them over.
func (d *Driver) ensure(ctx context.Context, replace bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("the driver is closed: %w", warren.ErrUnavailable)
	}
	// One at a time, also among processes.
	lock, err := d.keeper.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	c, r, err := d.roundTrip(ctx, &protocol.Request{Op: protocol.OpAttach})
	if err == nil && replace {
		build, berr := companion.BuildID(d.opts.RuntimePath)
		if berr != nil {
			c.Close()
			return berr
		}
		if r.Version != protocol.Version || r.Build != build {
			d.log.Info("replace the keeper, which is of another build", "pid", r.PID)
			c.Close()
			gone, err := d.keeper.Gone()
			if err != nil {
				return err
			}
			if _, _, err := d.roundTrip(ctx, &protocol.Request{Op: protocol.OpRetire}); err != nil && !errors.Is(err, errNoKeeper) {
				return fmt.Errorf("replace the keeper: %w", err)
			}
			if err := gone(ctx); err != nil {
				return err
			}
			c = nil
		}
	}
	if c == nil && (err == nil || errors.Is(err, errNoKeeper)) {
		if err = d.keeper.Start(ctx); err == nil {
			c, _, err = d.roundTrip(ctx, &protocol.Request{Op: protocol.OpAttach})
		}
	}
	if err != nil {
		return fmt.Errorf("reach the keeper: %w", err)
	}
	if d.held != nil {
		d.held.Close()
	}
	d.held = c
	return nil
}
