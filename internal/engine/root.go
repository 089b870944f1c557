package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// A rollback to a snapshot of files ends in a cold start, which writes the layer of the snapshot's root over that of the image. Until an
// execution runs that has it, the sandbox is owed that layer: a link to it lies beside the images of paused sandboxes, and every cold start
// writes it, whatever became of the one before and of the snapshot. Later ones begin with the image's root, as they do for any sandbox.

// owed marks the directory with the layer. The only file in it is named by its checksum.
const owed = ".root"

// unknownSum stands for the checksum of a layer that has none.
const unknownSum = "unknown"

// oweRoot makes durable that the next execution of a sandbox has the root of a snapshot. Nothing may be owed to it yet.
func (e *Engine) oweRoot(ctx context.Context, id warren.SandboxID, p *snapshot) error {
	layer, err := e.checkRoot(ctx, p)
	if err != nil || layer == "" {
		return err
	}
	e.mu.Lock()
	sum := p.row.RootSum
	e.mu.Unlock()
	dir := e.imageDir(id) + owed
	if err := os.Mkdir(dir, 0o700); err != nil {
		return plainPath(err)
	}
	if err := os.Link(layer, filepath.Join(dir, cmp.Or(sum, unknownSum))); err != nil {
		return plainPath(err)
	}
	if err := errors.Join(syncDir(dir), syncDir(e.opts.PauseDir)); err != nil {
		return plainPath(err)
	}
	return nil
}

// owedRoot returns the layer that a sandbox is owed and its checksum, which may be unknown and so empty; without a layer it is owed none.
func (e *Engine) owedRoot(ctx context.Context, id warren.SandboxID) (layer, sum string, err error) {
	if e.opts.PauseDir == "" {
		return "", "", nil
	}
	dir := e.imageDir(id) + owed
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", plainPath(err)
	}
	damaged := func(what string) error {
		return fmt.Errorf("the layer of the root with which sandbox %s was to begin after its rollback %s; `warren rollback` to another snapshot begins with that one's: %w", id, what, warren.ErrState)
	}
	if len(entries) != 1 {
		return "", "", damaged("is gone")
	}
	layer, sum = filepath.Join(dir, entries[0].Name()), entries[0].Name()
	if sum == unknownSum {
		return layer, "", nil
	}
	f, err := os.Open(layer)
	if err != nil {
		return "", "", plainPath(err)
	}
	defer f.Close()
	is, err := sumOf(ctx, f)
	if err != nil {
		return "", "", plainPath(err)
	}
	if is != sum {
		return "", "", damaged("has not the checksum that it had when it was taken")
	}
	return layer, sum, nil
}

// keepOwed gives a snapshot of a sandbox that has no execution the root that the next one would have, and returns its size and checksum.
func (e *Engine) keepOwed(ctx context.Context, id warren.SandboxID, p *snapshot) (size int64, sum string, err error) {
	layer, sum, err := e.owedRoot(ctx, id)
	if err != nil || layer == "" {
		return 0, noRoot, err
	}
	fi, err := os.Stat(layer)
	if err == nil {
		err = os.Link(layer, e.rootTar(p.row.ID))
	}
	if err != nil {
		return 0, "", plainPath(err)
	}
	return fi.Size(), sum, nil
}

// rootCertain says that an execution whose create was cut short has the root that it should have. With a layer to be written over it
// nobody knows: to write it now would be too late for what has begun since. The caller holds mu and has loaded the snapshots.
func (e *Engine) rootCertain(row *store.Sandbox) bool {
	if row.SnapshotID == "" {
		return true
	}
	p := e.snaps[row.SnapshotID]
	return p != nil && (SnapshotKind(p.row.Kind) == MemorySnapshot || p.row.RootSum == noRoot)
}
