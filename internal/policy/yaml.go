package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:line (\d+): )?(?s:(.*))$`)

// yamlError takes the line out of an error of the library, which has no type for it.
func yamlError(err error) (int, string) {
	m := yamlLine.FindStringSubmatch(err.Error())
	line, _ := strconv.Atoi(m[1])
	return max(1, line), strings.ReplaceAll(m[2], "\n", " ")
}

func null(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// plain refuses what says the same in another way than the documentation: anchors, aliases and tags.
func (p *parser) plain(n *yaml.Node, rule, key string) bool {
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		p.bad(n, rule, key+" uses an anchor or an alias", "write the value out")
	case n.Style&yaml.TaggedStyle != 0:
		p.bad(n, rule, fmt.Sprintf("%s has the tag %.40q", key, n.Tag), "leave it out")
	default:
		return true
	}
	return false
}

// mapping returns the values of a mapping by key, having refused keys that are not among names and keys that come twice.
func (p *parser) mapping(n *yaml.Node, rule, what string, names ...string) (map[string]*yaml.Node, bool) {
	if !p.plain(n, rule, what) {
		return nil, false
	}
	if n.Kind != yaml.MappingNode {
		p.bad(n, rule, fmt.Sprintf("%s is a mapping, not %s", what, kind(n)), "its keys are "+strings.Join(names, ", "))
		return nil, false
	}
	keys := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		name := key.Value
		if key.Kind != yaml.ScalarNode {
			p.bad(key, rule, fmt.Sprintf("%s has a key that is %s", what, kind(key)), "its keys are "+strings.Join(names, ", "))
			continue
		}
		if !slices.Contains(names, name) {
			remedy := "its keys are " + strings.Join(names, ", ")
			if near := nearest(name, names); near != "" {
				remedy = fmt.Sprintf("did you mean %q?", near)
			}
			p.bad(key, rule, fmt.Sprintf("%s has no key %.100q", what, name), remedy)
			continue
		}
		if keys[name] != nil {
			p.bad(key, rule, fmt.Sprintf("%s has the key %q twice, first on line %d", what, name, keys[name].Line), "keep one")
			continue
		}
		keys[name] = value
	}
	return keys, true
}

// nearest returns the name that is one edit away from s, or s in the plural or singular.
func nearest(s string, names []string) string {
	s = strings.ToLower(s)
	for _, n := range names {
		if n == s || n == s+"s" || n+"s" == s || len(s) > 2 && len(n) > 2 && (strings.ReplaceAll(n, "_", "") == strings.NewReplacer("_", "", "-", "").Replace(s) || oneEdit(n, s)) {
			return n
		}
	}
	return ""
}

func oneEdit(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	i := 0
	for i < len(a) && a[i] == b[i] {
		i++
	}
	switch len(b) - len(a) {
	case 0:
		return i+1 >= len(a) || a[i+1:] == b[i+1:] || i+1 < len(a) && a[i] == b[i+1] && a[i+1] == b[i] && a[i+2:] == b[i+2:]
	case 1:
		return a[i:] == b[i+1:]
	}
	return false
}

func kind(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case null(n):
		return "nothing"
	}
	return fmt.Sprintf("%.60q", n.Value)
}

// list returns the items of a list; a key without a value is an empty one.
func (p *parser) list(n *yaml.Node, rule, key string) []*yaml.Node {
	if n == nil || !p.plain(n, rule, key) || null(n) {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		p.bad(n, rule, fmt.Sprintf("%s is a list, not %s", key, kind(n)), `begin each item with "- "`)
		return nil
	}
	return n.Content
}

// several returns the scalars of a list, or the one scalar that stands in its place.
func (p *parser) several(n *yaml.Node, rule, key string) []*yaml.Node {
	if n == nil || !p.plain(n, rule, key) {
		return nil
	}
	list := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		if list = n.Content; len(list) == 0 {
			p.bad(n, rule, key+" is an empty list", "name what is meant, or leave the key out")
		}
	}
	var out []*yaml.Node
	for _, item := range list {
		if p.plain(item, rule, key) && p.scalar(item, rule, key) {
			out = append(out, item)
		}
	}
	return out
}

func (p *parser) scalar(n *yaml.Node, rule, key string) bool {
	if n.Kind != yaml.ScalarNode || null(n) {
		p.bad(n, rule, fmt.Sprintf("%s is a text, not %s", key, kind(n)), "give a value, in quotes if it has special characters, or leave the key out")
		return false
	}
	return true
}

func (p *parser) text(n *yaml.Node, rule, key string) string {
	if n == nil || !p.plain(n, rule, key) || !p.scalar(n, rule, key) {
		return ""
	}
	return n.Value
}

func (p *parser) boolean(n *yaml.Node, rule, key string) bool {
	switch s := p.text(n, rule, key); s {
	case "true", "false":
		return s == "true"
	case "":
	default:
		p.bad(n, rule, fmt.Sprintf("%s is %.60q", key, s), "want true or false")
	}
	return false
}

// label reads the name of a rule or grant.
func (p *parser) label(n *yaml.Node, rule string) string {
	s := p.text(n, rule, "name")
	if n != nil && (s == "" || utf8.RuneCountInString(s) > 64 || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == '"' || r == '\\' })) {
		p.bad(n, rule, fmt.Sprintf("name %.100q", s), "a name has 1 to 64 printable characters, and no quotes or backslashes")
		return ""
	}
	return s
}
