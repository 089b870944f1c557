package server

import (
	"context"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

type policyService struct{ s *Server }

func policyTo(p engine.PolicyInfo) *warrenv1.Policy {
	return &warrenv1.Policy{Name: p.Name, Preset: p.Preset, Source: p.Source, Problem: p.Problem}
}

func (h policyService) ListPolicies(context.Context, *connect.Request[warrenv1.ListPoliciesRequest]) (*connect.Response[warrenv1.ListPoliciesResponse], error) {
	list, err := h.s.engine.Policies()
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListPoliciesResponse{}
	for _, p := range list {
		res.Policies = append(res.Policies, policyTo(p))
	}
	return connect.NewResponse(res), nil
}

func (h policyService) GetPolicy(ctx context.Context, req *connect.Request[warrenv1.GetPolicyRequest]) (*connect.Response[warrenv1.GetPolicyResponse], error) {
	h.s.note(ctx, req.Msg.GetName())
	p, err := h.s.engine.Policy(req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.GetPolicyResponse{Policy: policyTo(p)}), nil
}

func (h policyService) CheckPolicy(_ context.Context, req *connect.Request[warrenv1.CheckPolicyRequest]) (*connect.Response[warrenv1.CheckPolicyResponse], error) {
	list, tests, err := h.s.engine.CheckPolicy(req.Msg.GetName(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	res := &warrenv1.CheckPolicyResponse{Tests: uint32(tests)}
	for _, f := range list {
		res.Findings = append(res.Findings, &warrenv1.PolicyFinding{Severity: f.Severity, Line: uint32(f.Line), Rule: f.Rule, Message: f.Message, Remedy: f.Remedy})
	}
	res.Rules = stepsTo(h.s.engine.DescribePolicy(req.Msg.GetName(), req.Msg.GetSource()))
	return connect.NewResponse(res), nil
}

func stepsTo(list []engine.PolicyStep) (out []*warrenv1.PolicyStep) {
	for _, s := range list {
		out = append(out, &warrenv1.PolicyStep{Rule: s.Rule, Line: uint32(s.Line), Matched: s.Matched, Reason: s.Reason})
	}
	return out
}

func (h policyService) ExplainPolicy(ctx context.Context, req *connect.Request[warrenv1.ExplainPolicyRequest]) (*connect.Response[warrenv1.ExplainPolicyResponse], error) {
	m := req.Msg
	var a *engine.PolicyAnswer
	var err error
	switch m.GetOf().(type) {
	case *warrenv1.ExplainPolicyRequest_Sandbox:
		h.s.note(ctx, m.GetSandbox())
		a, err = h.s.engine.ExplainSandbox(ctx, callerOf(ctx), m.GetSandbox(), m.GetTarget())
	case *warrenv1.ExplainPolicyRequest_Policy:
		a, err = h.s.engine.ExplainPolicy(m.GetPolicy(), m.GetTarget())
	default:
		a, err = h.s.engine.ExplainSource("policy", m.GetSource(), m.GetTarget())
	}
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ExplainPolicyResponse{Policy: a.Policy, Allow: a.Allow, Rule: a.Rule, Reason: a.Reason}
	res.Steps = stepsTo(a.Steps)
	return connect.NewResponse(res), nil
}

// flowBatch is how many flows go into one message.
const flowBatch = 200

func (h sandboxService) ListFlows(ctx context.Context, req *connect.Request[warrenv1.ListFlowsRequest], stream *connect.ServerStream[warrenv1.ListFlowsResponse]) error {
	h.s.note(ctx, req.Msg.GetId())
	res := &warrenv1.ListFlowsResponse{}
	err := h.s.engine.Flows(ctx, callerOf(ctx), engine.WatchRequest{ID: req.Msg.GetId(), After: req.Msg.GetAfter(), Calls: req.Msg.GetCalls()}, func(e *engine.Event) error {
		if res.Flows = append(res.Flows, eventTo(e)); len(res.Flows) < flowBatch {
			return nil
		}
		err := stream.Send(res)
		res = &warrenv1.ListFlowsResponse{}
		return err
	})
	if len(res.Flows) > 0 {
		if serr := stream.Send(res); err == nil {
			err = serr
		}
	}
	return err
}

func (h sandboxService) VerifyFlows(ctx context.Context, req *connect.Request[warrenv1.VerifyFlowsRequest]) (*connect.Response[warrenv1.VerifyFlowsResponse], error) {
	q := engine.VerifyRequest{Calls: req.Msg.GetCalls(), Accept: req.Msg.GetAccept()}
	if q.Accept {
		tell(ctx, "accept", "true")
		if err := h.s.recordable(); err != nil {
			return nil, err
		}
	}
	for _, x := range req.Msg.GetSince() {
		q.Since = append(q.Since, engine.RecordHead{Seq: x.GetSeq(), Hash: x.GetHash()})
	}
	r, err := h.s.engine.VerifyFlows(ctx, callerOf(ctx), q)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.VerifyFlowsResponse{Records: r.Records, Last: r.Last, Hash: r.Hash, Problem: r.Problem, First: r.First}), nil
}
