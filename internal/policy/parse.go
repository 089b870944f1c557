package policy

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// What a file may hold.
const (
	maxSource   = 4 << 20
	maxRules    = 50_000
	maxProblems = 50
)

// Parse reads a policy. The error joins a *[Problem] for each thing that is wrong, in the order of the file. name is
// what verdicts and problems call the policy.
func Parse(name string, data []byte) (*Policy, error) {
	return parse(name, data, false)
}

func parse(name string, data []byte, preset bool) (*Policy, error) {
	sum := sha256.Sum256(data)
	p := &parser{
		Policy: &Policy{name: name, digest: "sha256:" + hex.EncodeToString(sum[:]), source: bytes.Clone(data)},
		preset: preset, conditions: map[string]*condition{},
	}
	p.file(data)
	if len(p.problems) > 0 {
		slices.SortStableFunc(p.problems, func(a, b *Problem) int { return a.Line - b.Line })
		var list []error
		for i, e := range p.problems {
			if i == maxProblems {
				list = append(list, &Problem{Policy: name, Line: e.Line, What: fmt.Sprintf("and %d more problems", len(p.problems)-i)})
				break
			}
			list = append(list, e)
		}
		return nil, errors.Join(list...)
	}
	return p.Policy, nil
}

type parser struct {
	*Policy
	preset     bool
	problems   []*Problem
	conditions map[string]*condition
	rules      int
}

// bad notes a problem; what comes from the file is quoted by the caller.
func (p *parser) bad(n *yaml.Node, rule, what, remedy string) {
	line := 1
	if n != nil && n.Line > 0 {
		line = n.Line
	}
	p.problems = append(p.problems, &Problem{Policy: p.name, Line: line, Rule: rule, What: printable(what), Remedy: printable(remedy)})
}

func (p *parser) file(data []byte) {
	if len(data) > maxSource {
		p.bad(nil, "", fmt.Sprintf("the file has %d bytes", len(data)), fmt.Sprintf("at most %d are read; is it a policy?", maxSource))
		return
	}
	if !utf8.Valid(data) {
		p.bad(nil, "", "the file is not UTF-8", "save it as UTF-8")
		return
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	err := dec.Decode(&doc)
	empty := "write what is to be allowed, or `extends: locked` to allow nothing"
	switch {
	case errors.Is(err, io.EOF):
		p.bad(nil, "", "the file is empty", empty)
		return
	case err != nil:
		line, msg := yamlError(err)
		p.bad(&yaml.Node{Line: line}, "", "it is not YAML: "+msg, "correct the line or the one above it")
		return
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		p.bad(nil, "", "the file holds more than one document", "remove the lines with --- and what belongs to other policies")
		return
	}
	if len(doc.Content) != 1 || null(doc.Content[0]) {
		p.bad(nil, "", "the file is empty", empty)
		return
	}
	keys, ok := p.mapping(doc.Content[0], "", "a policy", "extends", "allow", "deny", "limits", "platform_credentials_only", "secrets", "tests")
	if !ok {
		return
	}
	var allow, deny []*rule
	if !p.preset {
		p.extends = "locked"
		if n := keys["extends"]; n != nil {
			p.extends = p.text(n, "", "extends")
		}
	} else if n := keys["extends"]; n != nil {
		p.bad(n, "", "a preset extends nothing", "")
	}
	for i, n := range p.list(keys["allow"], "", "allow") {
		allow = append(allow, p.rule(n, i, false))
	}
	for i, n := range p.list(keys["deny"], "", "deny") {
		deny = append(deny, p.rule(n, i, true))
	}
	if p.rules > maxRules {
		p.bad(doc.Content[0], "", fmt.Sprintf("it has %d rules", p.rules), fmt.Sprintf("at most %d are read", maxRules))
	}
	if n := keys["limits"]; n != nil && !null(n) {
		p.parseLimits(n)
	}
	if n := keys["platform_credentials_only"]; n != nil {
		p.platformCredentialsOnly, p.credentialsLine = p.boolean(n, "", "platform_credentials_only"), n.Line
	}
	for i, n := range p.list(keys["secrets"], "", "secrets") {
		p.grant(n, i)
	}
	p.ambiguous(keys["secrets"])
	for i, n := range p.list(keys["tests"], "", "tests") {
		p.assertion(n, i)
	}
	p.ownAllow, p.ownDeny = len(allow), len(deny)
	if p.extends != "" {
		base, err := Preset(p.extends)
		if err != nil {
			p.bad(keys["extends"], "", fmt.Sprintf("extends: there is no preset %.100q", p.extends), "want one of "+strings.Join(Presets(), ", "))
			return
		}
		allow, deny = append(allow, base.allow.rules...), append(deny, base.deny.rules...)
	}
	if len(p.problems) == 0 {
		p.allow, p.deny = newIndex(allow), newIndex(deny)
	}
}
