package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// readWorkspace is useWorkspace for somebody who reads the files: what a sandbox has written to a copy of them comes home first.
func (e *Engine) readWorkspace(ctx context.Context, c Caller, ref string) (*workspace, func(), error) {
	w, release, err := e.useWorkspace(c, ref)
	if err != nil {
		return nil, nil, err
	}
	if err := e.syncWorkspace(ctx, w); err != nil {
		release()
		return nil, nil, err
	}
	return w, release, nil
}

// syncWorkspace brings home what the workspace's sandbox has written to a copy of it.
func (e *Engine) syncWorkspace(ctx context.Context, w *workspace) error {
	e.mu.Lock()
	sb := w.box
	if sb == nil || sb.state() != Running && sb.state() != Failed {
		e.mu.Unlock()
		return nil // what there was came home when its execution was removed
	}
	id, label, d := sb.row.ID, sb.label(), e.opts.Drivers[sb.row.Driver]
	e.mu.Unlock()
	s, ok := driver.As[driver.Syncer](d)
	if !ok {
		return nil
	}
	if err := s.Sync(ctx, id); err != nil && !errors.Is(err, warren.ErrNotFound) {
		return fmt.Errorf("read back the workspace of sandbox %s: %w", label, err)
	}
	return nil
}

// copies says whether what a driver creates now works on copies, which are made when it creates: a workspace must be whole by
// then.
func (e *Engine) copies(ctx context.Context, name string) bool {
	s, ok := driver.As[driver.Syncer](e.opts.Drivers[name])
	return ok && s.Copies(ctx)
}
