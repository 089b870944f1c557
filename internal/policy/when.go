package policy

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	celast "cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
)

// What a condition may be and cost. A comparison or a look-up costs 1, going through a text a tenth of its length; the
// longest path and all headers that a gateway takes are far below the limit.
const (
	maxWhen  = 4096    // characters
	costWhen = 100_000 // of one evaluation
)

// celEnv is the environment that conditions are compiled in.
var celEnv = sync.OnceValues(func() (*cel.Env, error) {
	return cel.NewEnv(
		cel.Variable("request.method", cel.StringType),
		cel.Variable("request.path", cel.StringType),
		cel.Variable("request.query", cel.MapType(cel.StringType, cel.ListType(cel.StringType))),
		cel.Variable("request.headers", cel.MapType(cel.StringType, cel.StringType)),
		cel.Variable("request.host", cel.StringType),
		cel.Variable("request.port", cel.IntType),
		cel.Function("lowerAscii", cel.MemberOverload("string_lower_ascii", []*cel.Type{cel.StringType}, cel.StringType, cel.UnaryBinding(lowerASCII))),
		cel.ParserExpressionSizeLimit(maxWhen),
		cel.ParserRecursionLimit(50),
		cel.ExpressionNodeLimit(5000),
		cel.RegexProgramSizeLimit(2000),
	)
})

func lowerASCII(v ref.Val) ref.Val {
	s, ok := v.(types.String)
	if !ok {
		return types.MaybeNoSuchOverloadErr(v)
	}
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return types.String(b)
}

// condition is a compiled `when`.
type condition struct {
	// text is for people: one line.
	text string
	prog cel.Program
	// constant is set if the request has no part in it; capital are the names of headers that it asks for and that no
	// request has, because it has them in lower case.
	constant bool
	capital  []string
}

func compile(text string) (*condition, error) {
	env, err := celEnv()
	if err != nil {
		return nil, err
	}
	ast, issues := env.Compile(text)
	if issues.Err() != nil {
		var msgs []string
		for i, e := range issues.Errors() {
			if i == 3 {
				break
			}
			// Columns are counted from 0 there, and the rest of a message repeats the parser's inner life.
			msg, _, _ := strings.Cut(e.Message, "\n")
			msgs = append(msgs, fmt.Sprintf("%s (column %d)", msg, e.Location.Column()+1))
		}
		return nil, errors.New(strings.Join(msgs, "; "))
	}
	if !ast.OutputType().IsExactType(cel.BoolType) {
		return nil, fmt.Errorf("it is of type %s, and has to be true or false", ast.OutputType())
	}
	prog, err := env.Program(ast, cel.CostLimit(costWhen), cel.EvalOptions(cel.OptOptimize))
	if err != nil {
		return nil, err
	}
	c := &condition{text: printable(strings.Join(strings.Fields(text), " ")), prog: prog, constant: true}
	native := ast.NativeRep()
	for _, r := range native.ReferenceMap() {
		if strings.HasPrefix(r.Name, "request.") {
			c.constant = false
		}
	}
	isHeaders := func(e celast.Expr) bool {
		r := native.ReferenceMap()[e.ID()]
		return r != nil && r.Name == "request.headers"
	}
	for _, e := range celast.MatchDescendants(celast.NavigateAST(native), celast.KindMatcher(celast.CallKind)) {
		call := e.AsCall()
		if len(call.Args()) != 2 {
			continue
		}
		m, key := call.Args()[0], call.Args()[1]
		switch call.FunctionName() {
		case "_[_]":
		case "@in":
			m, key = key, m
		default:
			continue
		}
		if !isHeaders(m) || key.Kind() != celast.LiteralKind {
			continue
		}
		if s, ok := key.AsLiteral().Value().(string); ok && s != strings.ToLower(s) {
			c.capital = append(c.capital, s)
		}
	}
	return c, nil
}

// eval evaluates the condition for one meaning of a request.
func (c *condition) eval(q *question, m meaning) (bool, error) {
	v, _, err := c.prog.Eval(&activation{q, m})
	if err != nil {
		msg, _, _ := strings.Cut(err.Error(), "\n")
		return false, fmt.Errorf("%.200q", msg)
	}
	b, ok := v.Value().(bool)
	if !ok {
		return false, fmt.Errorf("it is %s", v.Type())
	}
	return b, nil
}

// activation resolves the variables when they are asked for: most conditions need one of them.
type activation struct {
	q *question
	m meaning
}

func (a *activation) ResolveName(name string) (any, bool) {
	switch name {
	case "request.method":
		return a.m.method, true
	case "request.path":
		if a.m.path == "" {
			return types.NewErr("%s", errRewritten), true
		}
		return a.m.path, true
	case "request.query":
		if a.m.queryless {
			return types.NewErr("a header such as X-Original-URL replaces the path without this query; leave the header out"), true
		}
		v, err := a.q.parameters()
		if err != nil {
			return types.NewErr("the query cannot be parsed"), true
		}
		return v, true
	case "request.headers":
		return a.q.header(a.m.hyphened), true
	case "request.host":
		return string(a.q.Host), true
	case "request.port":
		return int64(a.q.Port), true
	}
	return nil, false
}

func (a *activation) Parent() cel.Activation { return nil }
