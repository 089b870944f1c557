package servertest

import (
	"context"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

// The engine of the tests has one policy, "locked", and decides nothing.

// Policies lists it.
func (e *Engine) Policies() ([]engine.PolicyInfo, error) {
	return []engine.PolicyInfo{{Name: "locked", Preset: true, Source: []byte("extends: locked\n")}}, nil
}

// Policy returns it.
func (e *Engine) Policy(name string) (engine.PolicyInfo, error) {
	if name != "locked" {
		return engine.PolicyInfo{}, fmt.Errorf("there is no policy %q: %w", name, warren.ErrNotFound)
	}
	return engine.PolicyInfo{Name: "locked", Preset: true, Source: []byte("extends: locked\n")}, nil
}

// CheckPolicy finds nothing.
func (e *Engine) CheckPolicy(string, []byte) ([]engine.PolicyFinding, int, error) { return nil, 0, nil }

// ExplainSandbox denies.
func (e *Engine) ExplainSandbox(ctx context.Context, c engine.Caller, ref, _ string) (*engine.PolicyAnswer, error) {
	if _, err := e.Get(ctx, c, ref); err != nil {
		return nil, err
	}
	return e.ExplainPolicy("locked", "")
}

// ExplainPolicy denies.
func (e *Engine) ExplainPolicy(name, _ string) (*engine.PolicyAnswer, error) {
	return &engine.PolicyAnswer{Policy: name, Rule: "default", Reason: "nothing is allowed"}, nil
}

// ExplainSource denies.
func (e *Engine) ExplainSource(name string, _ []byte, _ string) (*engine.PolicyAnswer, error) {
	return e.ExplainPolicy(name, "")
}

// Flows has none.
func (e *Engine) Flows(context.Context, engine.Caller, engine.WatchRequest, func(*engine.Event) error) error {
	return nil
}

// DescribePolicy has nothing to tell.
func (e *Engine) DescribePolicy(string, []byte) []engine.PolicyStep { return nil }

// VerifyFlows finds nothing.
func (e *Engine) VerifyFlows(context.Context, engine.Caller, engine.VerifyRequest) (*engine.FlowReport, error) {
	return &engine.FlowReport{}, nil
}
