package servertest

import (
	"context"

	"github.com/warren-sandbox/warren/internal/engine"
)

// SetPreview implements server.Engine.
func (e *Engine) SetPreview(ctx context.Context, c engine.Caller, r engine.PreviewRequest) (*engine.Preview, error) {
	sb, err := e.Get(ctx, c, r.ID)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.previews == nil {
		e.previews = map[string]engine.Preview{}
	}
	key := string(sb.ID) + string(rune(r.Port))
	p := e.previews[key]
	p.SandboxID, p.Port, p.Owner = sb.ID, r.Port, sb.Owner
	if r.Public != nil {
		p.Public = *r.Public
	}
	if r.KeepHost != nil {
		p.KeepHost = *r.KeepHost
	}
	if r.Revoke {
		p.Epoch++
	}
	e.previews[key] = p
	return &p, nil
}
