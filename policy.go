package warren

import (
	"context"
	"iter"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Policy says what sandboxes may reach. It is a file of the server's, or a preset.
type Policy struct {
	Name string `json:"name"`
	// Preset says that it comes with the server.
	Preset bool `json:"preset,omitempty"`
	// Source is its text, in YAML.
	Source string `json:"source,omitempty"`
	// Problem is why it cannot be used, if it cannot; sandboxes that have it reach nothing.
	Problem string `json:"problem,omitempty"`
}

func policyFrom(p *warrenv1.Policy) *Policy {
	return &Policy{Name: p.GetName(), Preset: p.GetPreset(), Source: string(p.GetSource()), Problem: p.GetProblem()}
}

// Policies lists the policies that sandboxes can have, presets first.
func (c *Client) Policies(ctx context.Context) ([]*Policy, error) {
	res, err := c.policies.ListPolicies(ctx, connect.NewRequest(&warrenv1.ListPoliciesRequest{}))
	if err != nil {
		return nil, fromWire("list policies", err)
	}
	list := make([]*Policy, 0, len(res.Msg.GetPolicies()))
	for _, p := range res.Msg.GetPolicies() {
		list = append(list, policyFrom(p))
	}
	return list, nil
}

// Policy returns the policy with this name.
func (c *Client) Policy(ctx context.Context, name string) (*Policy, error) {
	res, err := c.policies.GetPolicy(ctx, connect.NewRequest(&warrenv1.GetPolicyRequest{Name: name}))
	if err != nil {
		return nil, fromWire("get policy", err)
	}
	return policyFrom(res.Msg.GetPolicy()), nil
}

// PolicyFinding is something in a policy that its author should look at.
type PolicyFinding struct {
	// Severity is "error", for a policy that cannot be used or does not do what it says, "warning", or "failure" of one of the policy's own tests.
	Severity string `json:"severity"`
	// Line is counted from 1, and 0 where there is none. Rule is the rule that it is about, such as "allow[2]", or empty.
	Line    int    `json:"line,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Message string `json:"message"`
	Remedy  string `json:"remedy,omitempty"`
}

// CheckPolicy reads a policy, looks for what is doubtful in it and runs its tests, of which it returns the number. It changes nothing.
func (c *Client) CheckPolicy(ctx context.Context, name, source string) (findings []PolicyFinding, tests int, err error) {
	res, err := c.checkPolicy(ctx, name, source)
	if err != nil {
		return nil, 0, err
	}
	for _, f := range res.GetFindings() {
		findings = append(findings, PolicyFinding{Severity: f.GetSeverity(), Line: int(f.GetLine()), Rule: f.GetRule(), Message: f.GetMessage(), Remedy: f.GetRemedy()})
	}
	return findings, int(res.GetTests()), nil
}

// DescribePolicy tells a policy in words, rule by rule. Of one that cannot be used there is nothing to tell; see [Client.CheckPolicy].
func (c *Client) DescribePolicy(ctx context.Context, name, source string) ([]PolicyStep, error) {
	res, err := c.checkPolicy(ctx, name, source)
	return stepsFrom(res.GetRules()), err
}

func (c *Client) checkPolicy(ctx context.Context, name, source string) (*warrenv1.CheckPolicyResponse, error) {
	res, err := c.policies.CheckPolicy(ctx, connect.NewRequest(&warrenv1.CheckPolicyRequest{Name: name, Source: []byte(source)}))
	if err != nil {
		return nil, fromWire("check policy", err)
	}
	return res.Msg, nil
}

// PolicyAnswer says how a policy decides.
type PolicyAnswer struct {
	Policy string `json:"policy"`
	Allow  bool   `json:"allow"`
	// Rule is what decides, and Reason why.
	Rule   string       `json:"rule"`
	Reason string       `json:"reason"`
	Steps  []PolicyStep `json:"steps,omitempty"`
}

// PolicyStep is one rule that was considered.
type PolicyStep struct {
	Rule    string `json:"rule,omitempty"`
	Line    int    `json:"line,omitempty"`
	Matched bool   `json:"matched,omitempty"`
	Reason  string `json:"reason"`
}

func answerFrom(m *warrenv1.ExplainPolicyResponse) *PolicyAnswer {
	return &PolicyAnswer{Policy: m.GetPolicy(), Allow: m.GetAllow(), Rule: m.GetRule(), Reason: m.GetReason(), Steps: stepsFrom(m.GetSteps())}
}

func stepsFrom(list []*warrenv1.PolicyStep) (steps []PolicyStep) {
	for _, s := range list {
		steps = append(steps, PolicyStep{Rule: s.GetRule(), Line: int(s.GetLine()), Matched: s.GetMatched(), Reason: s.GetReason()})
	}
	return steps
}

// ExplainPolicy says how a policy decides on a target: HOST, a URL, METHOD URL, tcp://HOST:PORT or udp://HOST:PORT.
func (c *Client) ExplainPolicy(ctx context.Context, name, target string) (*PolicyAnswer, error) {
	res, err := c.policies.ExplainPolicy(ctx, connect.NewRequest(&warrenv1.ExplainPolicyRequest{Of: &warrenv1.ExplainPolicyRequest_Policy{Policy: name}, Target: target}))
	if err != nil {
		return nil, fromWire("explain policy", err)
	}
	return answerFrom(res.Msg), nil
}

// ExplainSandbox says how the policy of a sandbox decides on a target, as [Client.ExplainPolicy].
func (c *Client) ExplainSandbox(ctx context.Context, sandbox, target string) (*PolicyAnswer, error) {
	res, err := c.policies.ExplainPolicy(ctx, connect.NewRequest(&warrenv1.ExplainPolicyRequest{Of: &warrenv1.ExplainPolicyRequest_Sandbox{Sandbox: sandbox}, Target: target}))
	if err != nil {
		return nil, fromWire("explain policy", err)
	}
	return answerFrom(res.Msg), nil
}

// Flows returns what the gateway has recorded of a sandbox's connections, names and requests, oldest first, up to now. Only the owner of the
// server sees those of all sandboxes, with "" for the sandbox. The first error ends them.
func (c *Client) Flows(ctx context.Context, sandbox string, after int64) iter.Seq2[*Event, error] {
	return c.records(ctx, &warrenv1.ListFlowsRequest{Id: sandbox, After: after})
}

// Calls returns what the server has recorded of calls: who made each, and what came of it, oldest first, up to now. Only the owner of the server
// sees them. The first error ends them.
func (c *Client) Calls(ctx context.Context, after int64) iter.Seq2[*Event, error] {
	return c.records(ctx, &warrenv1.ListFlowsRequest{Calls: true, After: after})
}

func (c *Client) records(ctx context.Context, req *warrenv1.ListFlowsRequest) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.sandboxes.ListFlows(ctx, connect.NewRequest(req))
		if err != nil {
			yield(nil, fromWire("list flows", err))
			return
		}
		defer stream.Close()
		for stream.Receive() {
			for _, p := range stream.Msg().GetFlows() {
				if !yield(eventFrom(p), nil) {
					return
				}
			}
		}
		if err := stream.Err(); err != nil {
			yield(nil, fromWire("list flows", err))
		}
	}
}

// RecordHead names an entry of a chained record by its number and hash, as a [FlowReport] gives those of the last.
type RecordHead struct {
	Seq  int64  `json:"seq"`
	Hash string `json:"hash"`
}

// FlowReport is the result of a look at a whole record.
type FlowReport struct {
	Records int64 `json:"records"`
	// First is the number of the oldest record that is kept.
	First int64 `json:"first,omitempty"`
	// Last and Hash name the last good record. Kept elsewhere, they prove later that nothing before it was changed.
	Last int64  `json:"last"`
	Hash string `json:"hash"`
	// Problem is what is wrong with the first bad record, and where, or empty.
	Problem string `json:"problem,omitempty"`
}

// VerifyFlows reads the whole record of flows, compares its chain of hashes, and compares it with how far the server has seen it go and with heads that
// were kept elsewhere. A head before the first record that is kept proves nothing.
func (c *Client) VerifyFlows(ctx context.Context, since ...RecordHead) (*FlowReport, error) {
	return c.verify(ctx, &warrenv1.VerifyFlowsRequest{}, since)
}

// VerifyCalls does to the record of calls what [Client.VerifyFlows] does to that of flows.
func (c *Client) VerifyCalls(ctx context.Context, since ...RecordHead) (*FlowReport, error) {
	return c.verify(ctx, &warrenv1.VerifyFlowsRequest{Calls: true}, since)
}

// AcceptFlows takes the record of flows as it is, if it is whole by itself, for what it is compared with from now on.
func (c *Client) AcceptFlows(ctx context.Context) (*FlowReport, error) {
	return c.verify(ctx, &warrenv1.VerifyFlowsRequest{Accept: true}, nil)
}

// AcceptCalls does to the record of calls what [Client.AcceptFlows] does to that of flows.
func (c *Client) AcceptCalls(ctx context.Context) (*FlowReport, error) {
	return c.verify(ctx, &warrenv1.VerifyFlowsRequest{Calls: true, Accept: true}, nil)
}

func (c *Client) verify(ctx context.Context, req *warrenv1.VerifyFlowsRequest, since []RecordHead) (*FlowReport, error) {
	for _, h := range since {
		req.Since = append(req.Since, &warrenv1.RecordHead{Seq: h.Seq, Hash: h.Hash})
	}
	res, err := c.sandboxes.VerifyFlows(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, fromWire("verify flows", err)
	}
	m := res.Msg
	return &FlowReport{Records: m.GetRecords(), First: m.GetFirst(), Last: m.GetLast(), Hash: m.GetHash(), Problem: m.GetProblem()}, nil
}
