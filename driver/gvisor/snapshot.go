//go:build linux

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	return d.snapshot(ctx, id, dir, &protocol.Request{Freeze: freeze})
}

// SnapshotTransient writes an image that is of use until the keeper ends, see [driver.Copier].
func (d *Driver) SnapshotTransient(ctx context.Context, id warren.SandboxID, dir string, freeze bool, stood func()) (driver.Image, error) {
	return d.snapshot(ctx, id, dir, &protocol.Request{Freeze: freeze, Transient: true, Tell: stood != nil, Stood: stood})
}

// Seal makes a transient image one that lasts, see [driver.Copier].
func (d *Driver) Seal(ctx context.Context, dir, like string) (driver.Image, error) {
	f, err := openDir(dir)
	if err != nil {
		return driver.Image{}, fmt.Errorf("seal an image: %w", err)
	}
	defer f.Close()
	files := []*os.File{f}
	if like != "" {
		if other, err := openDir(like); err == nil { // else the image is whole
			defer other.Close()
			files = append(files, other)
		}
	}
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpSeal, Packing: d.packing()}, files...)
	if err != nil {
		return driver.Image{}, fmt.Errorf("seal an image: %w", err)
	}
	return driver.Image{Size: r.Size}, nil
}

func (d *Driver) snapshot(ctx context.Context, id warren.SandboxID, dir string, req *protocol.Request) (driver.Image, error) {
	f, err := openDir(dir)
	if err != nil {
		return driver.Image{}, fmt.Errorf("snapshot sandbox %s: %w", id, err)
	}
	defer f.Close()
	req.Op, req.ID, req.Packing = protocol.OpSnapshot, string(id), d.packing()
	r, err := d.call(ctx, req, f)
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

func (d *Driver) packing() protocol.Packing {
	return protocol.Packing{Key: d.opts.ImageKey, Compress: d.opts.CompressImages}
}

// Freeze makes a sandbox stand still, see [driver.Freezer].
func (d *Driver) Freeze(ctx context.Context, id warren.SandboxID) error {
	if _, err := d.call(ctx, &protocol.Request{Op: protocol.OpFreeze, ID: string(id)}); err != nil {
		return fmt.Errorf("freeze sandbox %s: %w", id, err)
	}
	return nil
}

// Thaw lets a frozen sandbox run on, see [driver.Freezer].
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
		return fmt.Errorf("restore sandbox %s: %w", spec.ID, err)
	}
	defer f.Close()
	return d.create(ctx, spec, f)
}

// SaveRoot writes what a sandbox has changed of its root as a layer, see [driver.RootSaver]. A running sandbox stands still
// while it is collected on the host's disk, and runs on while w takes it. Left out are sockets, names that begin
// with ".wh.", which mean something else in a layer, and extended attributes whose values are no text.
func (d *Driver) SaveRoot(ctx context.Context, id warren.SandboxID, w io.Writer) error {
	c, r, err := d.open(ctx, &protocol.Request{Op: protocol.OpSaveRoot, ID: string(id)})
	if err != nil {
		return fmt.Errorf("save the root of sandbox %s: %w", id, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	n, err := io.Copy(w, io.LimitReader(c, r.Size))
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case err == nil && n != r.Size:
		err = errLost
	}
	if err != nil {
		return fmt.Errorf("save the root of sandbox %s: %w", id, err)
	}
	return nil
}

// Verify compares an image with its checksums and with the spec, see [driver.Verifier].
func (d *Driver) Verify(ctx context.Context, spec *driver.Spec, dir string) error {
	f, err := openDir(dir)
	if err != nil {
		return fmt.Errorf("verify an image: %w", err)
	}
	defer f.Close()
	if err := d.send(ctx, protocol.OpVerify, spec, f); err != nil {
		return fmt.Errorf("verify an image: %w", err)
	}
	return nil
}

// openDir opens a directory, and no symbolic link to one.
func openDir(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%w: its directory is not there: %w", driver.ErrImage, err)
	}
	if err != nil { // which says nothing of the image
		return nil, fmt.Errorf("open the image's directory: %w: %w", warren.ErrUnavailable, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
