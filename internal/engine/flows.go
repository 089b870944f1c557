package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/store"
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

// RecordHead names an entry of a chained record by its number and hash.
type RecordHead = audit.Head

// VerifyRequest says which record is looked at, and against what.
type VerifyRequest struct {
	// Calls is for the record of calls instead of that of flows.
	Calls bool
	// Since are heads that were kept elsewhere; the record has to have them, unless it has dropped them as its oldest.
	Since []RecordHead
	// Accept takes the record as it is for what it is compared with from now on, if it is whole by itself.
	Accept bool
}

// FlowReport is the result of a look at the whole record of flows, or of calls.
type FlowReport struct {
	// First is the number of the oldest entry that is kept, Last that of the last good one.
	Records, First, Last int64
	Hash                 string
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

// recordName is what the store calls a record.
func recordName(calls bool) string {
	if calls {
		return "calls"
	}
	return "flows"
}

// VerifyFlows reads the whole record of flows, or of calls, and compares it with how far it was seen to go before.
func (e *Engine) VerifyFlows(ctx context.Context, c Caller, q VerifyRequest) (*FlowReport, error) {
	if !c.Operator {
		return nil, fmt.Errorf("only the owner of the server may verify its records: %w", warren.ErrDenied)
	}
	for _, h := range q.Since {
		if !audit.IsHead(h) {
			return nil, invalid("since", fmt.Sprintf("%d:%s", h.Seq, h.Hash), "want the number of a record, from 1, and its hash, 64 of 0-9 and a-f")
		}
	}
	name, dir := recordName(q.Calls), e.evidence(q.Calls)
	kept, err := e.store.Head(ctx, name)
	if err != nil {
		return nil, err
	}
	known := q.Since
	if !q.Accept {
		known = append([]RecordHead{{Seq: kept.Seq, Hash: kept.Hash}}, known...)
	}
	r, err := audit.Verify(dir, known...)
	var bad *audit.Bad
	switch {
	case errors.As(err, &bad):
		rep := &FlowReport{Records: r.Records, First: r.First, Last: r.Last.Seq, Hash: r.Last.Hash, Problem: bad.Error()}
		if kept.Seq > 0 && !q.Accept {
			rep.Problem += fmt.Sprintf(" (record %d was seen at %s)", kept.Seq, kept.Seen.UTC().Format(time.RFC3339))
		}
		return rep, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	// What the anchor names is on disk, so that no loss of power makes what is kept here wrong. There is none before the first record.
	err = e.store.Update(ctx, func(tx *store.Tx) error {
		h := store.Head{Seq: r.Anchor.Seq, Hash: r.Anchor.Hash, Seen: e.clock.Now()}
		if q.Accept {
			return tx.ReplaceHead(name, h)
		}
		return tx.AdvanceHead(name, h)
	})
	if err != nil && q.Accept {
		return nil, err
	}
	if err != nil {
		e.log.Warn("keep how far a record goes", "record", name, "error", err)
	}
	return &FlowReport{Records: r.Records, First: r.First, Last: r.Last.Seq, Hash: r.Last.Hash}, nil
}

// keepHeads keeps in the store how far the records go, so that one that is removed or cut off is missed. One that does not go on from what was seen is
// told once, and what was seen stays.
func (e *Engine) keepHeads(ctx context.Context) {
	for _, calls := range []bool{false, true} {
		name, dir := recordName(calls), e.evidence(calls)
		if dir == "" {
			continue
		}
		kept, err := e.store.Head(ctx, name)
		if err != nil {
			e.log.Warn("keep how far a record goes", "record", name, "error", err)
			continue
		}
		from := audit.Head{Seq: kept.Seq, Hash: kept.Hash}
		to, err := audit.Advance(dir, from)
		var bad *audit.Bad
		switch {
		case errors.As(err, &bad):
			if !e.broken[name] {
				e.log.Error("a record is not what it was; `warren events --verify` says more", "record", name, "error", bad)
			}
			e.broken[name] = true
			continue
		case err == nil && to != from:
			err = e.store.Update(ctx, func(tx *store.Tx) error {
				return tx.AdvanceHead(name, store.Head{Seq: to.Seq, Hash: to.Hash, Seen: e.clock.Now()})
			})
		}
		if err != nil && ctx.Err() == nil {
			e.log.Warn("keep how far a record goes", "record", name, "error", err)
		}
		delete(e.broken, name)
	}
}
