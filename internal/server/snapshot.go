package server

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

func (h sandboxService) ForkSandbox(ctx context.Context, req *connect.Request[warrenv1.ForkSandboxRequest], stream *connect.ServerStream[warrenv1.ForkSandboxResponse]) error {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	r := engine.ForkRequest{ID: m.GetId(), Count: int(min(m.GetCount(), 1<<20)), Name: m.GetName(), Env: m.GetEnv(), Labels: m.GetLabels(), All: m.GetAll()}
	var err error
	if r.IdleTimeout, err = duration("idle_timeout", m.GetIdleTimeout()); err != nil {
		return err
	}
	if r.TTL, err = duration("ttl", m.GetTtl()); err != nil {
		return err
	}
	if r.IdleAction, err = idleActionOf(m.GetIdleAction()); err != nil {
		return err
	}
	res, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.ForkSandboxResponse{Event: &warrenv1.ForkSandboxResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.ForkResult, error) {
			return h.s.engine.Fork(ctx, callerOf(ctx), r, progress)
		})
	if err != nil {
		return err
	}
	out := &warrenv1.ForkResult{Stopped: durationTo(res.Stopped), Kind: kindTo(res.Kind)}
	var made []string
	for _, ch := range res.Children {
		f := &warrenv1.ForkedSandbox{}
		if ch.Err != nil {
			fault := h.s.judge(ctx, "fork sandbox", ch.Err)
			f.Error, f.Message = fault.Detail(), fault.Message
		} else {
			f.Sandbox = sandboxTo(ch.Sandbox)
			made = append(made, string(ch.Sandbox.ID))
		}
		out.Children = append(out.Children, f)
	}
	tell(ctx, "made", strings.Join(made, " "))
	return stream.Send(&warrenv1.ForkSandboxResponse{Event: &warrenv1.ForkSandboxResponse_Result{Result: out}})
}

func (h sandboxService) RollbackSandbox(ctx context.Context, req *connect.Request[warrenv1.RollbackSandboxRequest]) (*connect.Response[warrenv1.RollbackSandboxResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	id, err := h.s.engine.Resolve(callerOf(ctx), req.Msg.GetId())
	there := err == nil
	if there {
		defer h.s.pools.drop(id)
	}
	sb, err := h.s.engine.Rollback(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetSnapshot())
	if err != nil {
		if there && errors.Is(err, warren.ErrNotFound) {
			h.s.note(ctx, req.Msg.GetSnapshot())
		}
		return nil, err
	}
	return connect.NewResponse(&warrenv1.RollbackSandboxResponse{Sandbox: sandboxTo(sb)}), nil
}

type snapshotService struct{ s *Server }

func (h snapshotService) CreateSnapshot(ctx context.Context, req *connect.Request[warrenv1.CreateSnapshotRequest], stream *connect.ServerStream[warrenv1.CreateSnapshotResponse]) error {
	m := req.Msg
	h.s.note(ctx, m.GetSandboxId())
	p, err := report(ctx, h.s.opts.Heartbeat,
		func(p *warrenv1.Progress) error {
			return stream.Send(&warrenv1.CreateSnapshotResponse{Event: &warrenv1.CreateSnapshotResponse_Progress{Progress: p}})
		},
		func(ctx context.Context, progress func(engine.Progress)) (*engine.Snapshot, error) {
			return h.s.engine.Snapshot(ctx, callerOf(ctx), engine.SnapshotRequest{ID: m.GetSandboxId(), Name: m.GetName(), FilesOnly: m.GetFilesOnly()}, progress)
		})
	if err != nil {
		return err
	}
	return stream.Send(&warrenv1.CreateSnapshotResponse{Event: &warrenv1.CreateSnapshotResponse_Snapshot{Snapshot: snapshotTo(p)}})
}

func (h snapshotService) GetSnapshot(ctx context.Context, req *connect.Request[warrenv1.GetSnapshotRequest]) (*connect.Response[warrenv1.GetSnapshotResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	p, err := h.s.engine.GetSnapshot(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetSize())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetSnapshotResponse{Snapshot: snapshotTo(p)}), nil
}

func (h snapshotService) ListSnapshots(ctx context.Context, req *connect.Request[warrenv1.ListSnapshotsRequest]) (*connect.Response[warrenv1.ListSnapshotsResponse], error) {
	m := req.Msg
	size, err := pageSize(m.GetPageSize())
	if err != nil {
		return nil, err
	}
	list, next, err := h.s.engine.ListSnapshots(ctx, callerOf(ctx), m.GetSandboxId(), m.GetSize(), size, m.GetPageToken())
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListSnapshotsResponse{NextPageToken: next}
	for _, p := range list {
		res.Snapshots = append(res.Snapshots, snapshotTo(p))
	}
	return connect.NewResponse(res), nil
}

func (h snapshotService) DeleteSnapshot(ctx context.Context, req *connect.Request[warrenv1.DeleteSnapshotRequest]) (*connect.Response[warrenv1.DeleteSnapshotResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.DeleteSnapshot(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetAllowMissing()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteSnapshotResponse{}), nil
}
