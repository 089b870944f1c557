package servertest

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

// errNoSnapshots is what this engine says of snapshots: tests of them need a real one.
var errNoSnapshots = fmt.Errorf("the test engine keeps no snapshots: %w", errors.ErrUnsupported)

// Snapshot implements server.Engine.
func (e *Engine) Snapshot(context.Context, engine.Caller, engine.SnapshotRequest, func(engine.Progress)) (*engine.Snapshot, error) {
	return nil, errNoSnapshots
}

// GetSnapshot implements server.Engine.
func (e *Engine) GetSnapshot(context.Context, engine.Caller, string, bool) (*engine.Snapshot, error) {
	return nil, errNoSnapshots
}

// ListSnapshots implements server.Engine.
func (e *Engine) ListSnapshots(context.Context, engine.Caller, string, bool, int, string) ([]*engine.Snapshot, string, error) {
	return nil, "", errNoSnapshots
}

// DeleteSnapshot implements server.Engine.
func (e *Engine) DeleteSnapshot(context.Context, engine.Caller, string, bool) error {
	return errNoSnapshots
}

// PutTemplate implements server.Engine.
func (e *Engine) PutTemplate(context.Context, engine.Caller, engine.TemplateRequest) (*engine.Template, warren.SnapshotID, error) {
	return nil, "", errNoSnapshots
}

// GetTemplate implements server.Engine.
func (e *Engine) GetTemplate(context.Context, engine.Caller, string) (*engine.Template, error) {
	return nil, errNoSnapshots
}

// ListTemplates implements server.Engine.
func (e *Engine) ListTemplates(context.Context, engine.Caller) ([]*engine.Template, error) {
	return nil, errNoSnapshots
}

// DeleteTemplate implements server.Engine.
func (e *Engine) DeleteTemplate(context.Context, engine.Caller, string, bool) error {
	return errNoSnapshots
}

// Rollback implements server.Engine.
func (e *Engine) Rollback(context.Context, engine.Caller, string, string) (*engine.Sandbox, error) {
	return nil, errNoSnapshots
}

// Fork implements server.Engine.
func (e *Engine) Fork(context.Context, engine.Caller, engine.ForkRequest, func(engine.Progress)) (*engine.ForkResult, error) {
	return nil, errNoSnapshots
}
