//go:build linux

package gvisor

import (
	"context"
	"fmt"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// Warm keeps n executions ready for specs like this one, see [driver.Pooler]. They are lost with the keeper, and when its last
// driver is closed.
func (d *Driver) Warm(ctx context.Context, spec *driver.Spec, n int) error {
	like := *spec
	like.ID, like.Labels, like.Mounts = "pool", nil, nil
	if err := checkSpec(&like); err != nil {
		return fmt.Errorf("keep executions ready: %w", err)
	}
	msg, files, err := d.encode(&like)
	defer closeFiles(files)
	if err != nil {
		return fmt.Errorf("keep executions ready: %w", err)
	}
	for _, m := range spec.Mounts {
		msg.Mounts = append(msg.Mounts, protocol.Mount{Target: m.Target, Writable: m.Writable})
	}
	if _, err := d.call(ctx, &protocol.Request{Op: protocol.OpWarm, Spec: msg, Count: n}, files...); err != nil {
		return fmt.Errorf("keep executions ready: %w", err)
	}
	return nil
}

// PoolUse says how often the pool had what was asked for, see [driver.Pooler].
func (d *Driver) PoolUse() (hits, misses uint64) { return d.hits.Load(), d.misses.Load() }

// Pooled says how many executions are ready, see [driver.Pooler].
func (d *Driver) Pooled(ctx context.Context) (int, error) {
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpPooled})
	if err != nil {
		return 0, fmt.Errorf("count the executions that are ready: %w", err)
	}
	return r.Count, nil
}
