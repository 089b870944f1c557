package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor"
)

// maxDataDir bounds the length of the data directory's path: the longest socket below it has to fit into 107 bytes.
const maxDataDir = 80

// driverEntry is one kind of driver.
type driverEntry struct {
	name string
	// open opens it on its own directory below the data directory.
	open func(dir string, log *slog.Logger) (driver.Driver, error)
	// check looks at the host without a daemon.
	check func(ctx context.Context) []check
}

// drivers are all that this program knows.
var drivers = []driverEntry{
	{name: "gvisor", open: openGVisor, check: checkGVisor},
}

func openGVisor(dir string, log *slog.Logger) (driver.Driver, error) {
	runtime, err := findProgram("warren-runtime", "WARREN_RUNTIME")
	if err != nil {
		return nil, err
	}
	guest, err := findProgram("warren-guest", "WARREN_GUEST")
	if err != nil {
		return nil, err
	}
	return gvisor.New(gvisor.Options{StateDir: dir, RuntimePath: runtime, GuestPath: guest, Logger: log})
}

// checkGVisor opens the driver on a directory that is gone afterwards, so that it disturbs no daemon and leaves nothing.
func checkGVisor(ctx context.Context) []check {
	failed := func(err error) []check {
		return []check{{Name: "gvisor", Status: "fail", Message: err.Error(), Hint: "run as root, with warren-runtime and warren-guest beside warren"}}
	}
	dir, err := os.MkdirTemp("", "warren-doctor-")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(dir)
	d, err := openGVisor(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		return failed(err)
	}
	defer closeDriver(context.WithoutCancel(ctx), d)
	if c, ok := driver.As[driver.Checker](d); ok {
		return fromDriver(c.Check(ctx))
	}
	return nil
}

// closeDriver closes a driver, and ends the processes that it keeps for later when it has no sandbox.
func closeDriver(ctx context.Context, d driver.Driver) error {
	type shutdowner interface{ Shutdown(context.Context) error }
	if s, ok := driver.As[shutdowner](d); ok {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil && !errors.Is(err, warren.ErrState) {
			return errors.Join(err, d.Close())
		}
	}
	return d.Close()
}
