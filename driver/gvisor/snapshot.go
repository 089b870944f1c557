//go:build linux

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// Snapshot writes an image of a sandbox, see [driver.Snapshotter]. The image holds the sandbox's memory as it is, secrets
// included; its files have mode 0600.
func (d *Driver) Snapshot(ctx context.Context, id warren.SandboxID, dir string, freeze bool) (driver.Image, error) {
	f, err := openDir(dir)
	if err != nil {
		return driver.Image{}, fmt.Errorf("snapshot sandbox %s: %w", id, err)
	}
	defer f.Close()
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpSnapshot, ID: string(id), Freeze: freeze}, f)
	if errors.Is(err, errLost) {
		// The keeper died in the middle, and the sandbox may stand still.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if terr := d.Thaw(undo, id); terr != nil {
			err = errors.Join(err, terr)
		}
		names, _ := f.Readdirnames(-1)
		for _, n := range names {
			unix.Unlinkat(int(f.Fd()), n, 0)
		}
	}
	if err != nil {
		return driver.Image{}, fmt.Errorf("snapshot sandbox %s: %w", id, err)
	}
	return driver.Image{Size: r.Size}, nil
}

// Thaw lets a frozen sandbox run on, see [driver.Snapshotter].
func (d *Driver) Thaw(ctx context.Context, id warren.SandboxID) error {
	if _, err := d.call(ctx, &protocol.Request{Op: protocol.OpThaw, ID: string(id)}); err != nil {
		return fmt.Errorf("thaw sandbox %s: %w", id, err)
	}
	return nil
}

// Restore makes a sandbox that goes on from an image, see [driver.Snapshotter].
func (d *Driver) Restore(ctx context.Context, spec *driver.Spec, dir string) error {
	f, err := openDir(dir)
	if err != nil {
		return fmt.Errorf("restore sandbox %s: %w: %w", spec.ID, driver.ErrImage, err)
	}
	defer f.Close()
	return d.create(ctx, spec, f)
}

// openDir opens a directory, and no symbolic link to one.
func openDir(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the image's directory: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
