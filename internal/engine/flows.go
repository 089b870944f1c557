package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
)

// Flows calls fn with what the gateway has recorded of a sandbox, or of all for an operator, oldest first.
func (e *Engine) Flows(ctx context.Context, c Caller, r WatchRequest, fn func(*Event) error) error {
	if r.ID == "" && !c.Operator {
		return fmt.Errorf("flows of all sandboxes: only the owner of the server sees them; name a sandbox: %w", warren.ErrDenied)
	}
	if r.After < 0 {
		return invalid("after", fmt.Sprint(r.After), "want 0 or the number of a record")
	}
	if r.Calls && !c.Operator {
		return fmt.Errorf("the record of calls: only the owner of the server sees it: %w", warren.ErrDenied)
	}
	if r.Calls && r.ID != "" {
		return invalid("sandbox", r.ID, "the record of calls is of the whole server; leave it out")
	}
	var only string
	if r.ID != "" {
		id, err := e.Resolve(c, r.ID)
		if err != nil {
			// The operator may ask for one that is gone.
			if !c.Operator || !errors.Is(err, warren.ErrNotFound) || !isID(r.ID, 's') {
				return err
			}
			id = warren.SandboxID(r.ID)
		}
		only = string(id)
	}
	err := audit.Read(e.evidence(r.Calls), r.After, func(x audit.Record) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if only != "" && x.Sandbox != only {
			return nil
		}
		return fn(&Event{Seq: x.Seq, Time: x.Time, Actor: x.Actor, Action: x.Action, SandboxID: warren.SandboxID(x.Sandbox), Message: x.Message, Fields: x.Fields})
	})
	var bad *audit.Bad
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // nothing has ever flowed
	case errors.As(err, &bad):
		return fmt.Errorf("the record is damaged: %v; `warren events --verify` says where: %w", bad, warren.ErrState)
	}
	return err
}

// FlowReport is the result of a look at the whole record of flows.
type FlowReport struct {
	Records, Last int64
	Hash          string
	// Problem is what is wrong with the first bad record, or empty.
	Problem string
}

// evidence is where the record of flows is, or of calls.
func (e *Engine) evidence(calls bool) string {
	if calls {
		return e.opts.CallDir
	}
	return e.opts.FlowDir
}

// VerifyFlows reads the whole record of flows, or of calls.
func (e *Engine) VerifyFlows(_ context.Context, c Caller, calls bool) (*FlowReport, error) {
	if !c.Operator {
		return nil, fmt.Errorf("only the owner of the server may verify its records: %w", warren.ErrDenied)
	}
	r, err := audit.Verify(e.evidence(calls))
	var bad *audit.Bad
	if errors.Is(err, fs.ErrNotExist) {
		return &FlowReport{}, nil
	}
	if err != nil && !errors.As(err, &bad) {
		return nil, err
	}
	rep := &FlowReport{Records: r.Records, Last: r.Last.Seq, Hash: r.Last.Hash}
	if bad != nil {
		rep.Problem = bad.Error()
	}
	return rep, nil
}
