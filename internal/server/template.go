package server

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

type templateService struct{ s *Server }

func templateTo(t *engine.Template) *warrenv1.Template {
	return &warrenv1.Template{
		Id: t.ID, Name: t.Name, SnapshotId: string(t.SnapshotID), Recipe: t.Recipe, IdleTimeout: durationTo(t.IdleTimeout), Version: t.Version,
		Created: timeTo(t.Created), Updated: timeTo(t.Updated), Owner: t.Owner, Standby: uint32(t.Standby), StandbyNote: t.StandbyNote,
	}
}

func (h templateService) PutTemplate(ctx context.Context, req *connect.Request[warrenv1.PutTemplateRequest]) (*connect.Response[warrenv1.PutTemplateResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetName())
	idle, err := duration("idle_timeout", m.GetIdleTimeout())
	if err != nil {
		return nil, err
	}
	r := engine.TemplateRequest{Name: m.GetName(), Snapshot: m.GetSnapshot(), Recipe: m.GetRecipe(), IdleTimeout: idle}
	t, before, err := h.s.engine.PutTemplate(ctx, callerOf(ctx), r)
	if err != nil {
		if errors.Is(err, warren.ErrNotFound) {
			h.s.note(ctx, m.GetSnapshot())
		}
		return nil, err
	}
	return connect.NewResponse(&warrenv1.PutTemplateResponse{Template: templateTo(t), PreviousSnapshotId: string(before)}), nil
}

func (h templateService) GetTemplate(ctx context.Context, req *connect.Request[warrenv1.GetTemplateRequest]) (*connect.Response[warrenv1.GetTemplateResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	t, err := h.s.engine.GetTemplate(ctx, callerOf(ctx), req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetTemplateResponse{Template: templateTo(t)}), nil
}

func (h templateService) ListTemplates(ctx context.Context, _ *connect.Request[warrenv1.ListTemplatesRequest]) (*connect.Response[warrenv1.ListTemplatesResponse], error) {
	list, err := h.s.engine.ListTemplates(ctx, callerOf(ctx))
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListTemplatesResponse{}
	for _, t := range list {
		res.Templates = append(res.Templates, templateTo(t))
	}
	return connect.NewResponse(res), nil
}

func (h templateService) DeleteTemplate(ctx context.Context, req *connect.Request[warrenv1.DeleteTemplateRequest]) (*connect.Response[warrenv1.DeleteTemplateResponse], error) {
	h.s.note(ctx, req.Msg.GetId())
	if err := h.s.engine.DeleteTemplate(ctx, callerOf(ctx), req.Msg.GetId(), req.Msg.GetAllowMissing()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteTemplateResponse{}), nil
}
