package fake

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// imageName is the only file of a fake image: a line with what the sandbox was, and one with its checksum.
const imageName = "image.json"

// Snapshot implements [driver.Snapshotter]. A fake sandbox has no memory, so the image says only what it relies on.
func (d *Driver) Snapshot(ctx context.Context, id warren.SandboxID, dir string, freeze bool) (driver.Image, error) {
	if names, err := os.ReadDir(dir); err != nil {
		return driver.Image{}, err
	} else if len(names) > 0 {
		return driver.Image{}, fmt.Errorf("fake: the directory for an image must be empty: %w", warren.ErrInvalid)
	}
	if _, err := d.before(ctx, OpSnapshot, 0); err != nil {
		return driver.Image{}, err
	}
	w := d.world
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if err := status(id, b); err != nil {
		return driver.Image{}, err
	}
	line, err := json.Marshal(record{State: b.state, Limits: b.limits, Mounts: b.mounts, Root: b.root, Changed: b.changed})
	if err != nil {
		return driver.Image{}, err
	}
	sum := sha256.Sum256(line)
	line = fmt.Appendf(line, "\n%s\n", hex.EncodeToString(sum[:]))
	path := filepath.Join(dir, imageName)
	if err := os.WriteFile(path, line, 0o600); err != nil {
		return driver.Image{}, errors.Join(err, os.Remove(path))
	}
	b.frozen = b.frozen || freeze
	return driver.Image{Size: int64(len(line))}, w.save(id, b)
}

// Freeze implements [driver.Freezer].
func (d *Driver) Freeze(ctx context.Context, id warren.SandboxID) error {
	return d.still(ctx, id, OpFreeze, true)
}

// Thaw implements [driver.Freezer].
func (d *Driver) Thaw(ctx context.Context, id warren.SandboxID) error {
	return d.still(ctx, id, OpThaw, false)
}

func (d *Driver) still(ctx context.Context, id warren.SandboxID, op Op, frozen bool) error {
	if _, err := d.before(ctx, op, 0); err != nil {
		return err
	}
	w := d.world
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if err := status(id, b); err != nil {
		return err
	}
	b.frozen = frozen
	return w.save(id, b)
}

// Restore implements [driver.Snapshotter].
func (d *Driver) Restore(ctx context.Context, spec *driver.Spec, dir string) error {
	if err := d.Verify(ctx, spec, dir); err != nil {
		return err
	}
	r, err := readImage(dir)
	if err != nil {
		return err
	}
	return d.create(ctx, spec, OpRestore, r.Changed)
}

// Verify implements [driver.Verifier].
func (d *Driver) Verify(_ context.Context, spec *driver.Spec, dir string) error {
	r, err := readImage(dir)
	if err != nil {
		return err
	}
	var targets []string
	for _, m := range spec.Mounts {
		targets = append(targets, m.Target)
	}
	switch {
	case r.Root != spec.Root.Digest:
		return fmt.Errorf("fake: the image is of root %q, not %q: %w", r.Root, spec.Root.Digest, errors.ErrUnsupported)
	case !slices.Equal(r.Mounts, targets):
		return fmt.Errorf("fake: the image has mounts on %q, not %q: %w", r.Mounts, targets, errors.ErrUnsupported)
	}
	return nil
}

// SaveRoot implements [driver.RootSaver]. The layer has one file, with what [World.ChangeRoot] wrote, or none.
func (d *Driver) SaveRoot(ctx context.Context, id warren.SandboxID, w io.Writer) error {
	if _, err := d.before(ctx, OpSaveRoot, 0); err != nil {
		return err
	}
	if err := d.alive(id); err != nil {
		return err
	}
	t := tar.NewWriter(w)
	if text := d.world.Changed(id); text != "" {
		if err := t.WriteHeader(&tar.Header{Name: "changed", Mode: 0o644, Size: int64(len(text))}); err != nil {
			return err
		}
		if _, err := io.WriteString(t, text); err != nil {
			return err
		}
	}
	return t.Close()
}

func readImage(dir string) (*record, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("fake: %w: %w", driver.ErrImage, err)
	}
	data, err := os.ReadFile(filepath.Join(dir, imageName))
	if err != nil || len(names) != 1 {
		return nil, fmt.Errorf("fake: %w: a file is missing or too many", driver.ErrImage)
	}
	line, sum, _ := bytes.Cut(data, []byte{'\n'})
	want := sha256.Sum256(line)
	if string(sum) != hex.EncodeToString(want[:])+"\n" {
		return nil, fmt.Errorf("fake: %w: the checksum differs", driver.ErrImage)
	}
	r := &record{}
	return r, json.Unmarshal(line, r)
}

// moving waits while a sandbox is frozen.
func (d *Driver) moving(ctx context.Context, id warren.SandboxID) error {
	for {
		d.world.mu.Lock()
		b := d.world.boxes[id]
		frozen := b != nil && b.state == driver.Running && b.frozen
		d.world.mu.Unlock()
		if !frozen {
			return nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		case <-d.closed:
			return fmt.Errorf("the fake driver is closed: %w", warren.ErrUnavailable)
		}
	}
}
