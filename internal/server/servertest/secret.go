package servertest

import (
	"context"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

// SetSecret keeps nothing.
func (e *Engine) SetSecret(_ context.Context, _ engine.Caller, name string, _ []byte) (engine.SecretInfo, error) {
	return engine.SecretInfo{Name: name, Version: 1}, nil
}

// Secrets has none.
func (e *Engine) Secrets(engine.Caller) ([]engine.SecretInfo, error) { return nil, nil }

// DeleteSecret finds none.
func (e *Engine) DeleteSecret(_ context.Context, _ engine.Caller, name string) error {
	return fmt.Errorf("there is no secret %q: %w", name, warren.ErrNotFound)
}
