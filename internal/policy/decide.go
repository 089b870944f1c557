package policy

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
)

// refuseHost denies what no rule may allow.
func (p *Policy) refuseHost(h Host) (Verdict, bool) {
	if p == nil || p.allow == nil {
		return Verdict{Rule: ruleDefault, Reason: "there is no policy"}, true
	}
	if !h.canonical() {
		return Verdict{Rule: ruleDefault, Reason: fmt.Sprintf("%.100q is not the canonical form of a host", h)}, true
	}
	if a, ok := h.Addr(); ok {
		if what, ok := isMetadata(a); ok {
			return Verdict{Rule: ruleAddress, Reason: fmt.Sprintf("%s is never reachable: %s", a, what)}, true
		}
	}
	return Verdict{}, false
}

// Lookup decides whether a name may be resolved: whether a connection to it could be allowed, over some port and
// protocol. Addresses are not names.
func (p *Policy) Lookup(h Host) Verdict {
	if v, bad := p.refuseHost(h); bad {
		return v
	}
	if _, ok := h.Addr(); ok {
		return Verdict{Rule: ruleDefault, Reason: fmt.Sprintf("%s is an address and needs no lookup", h)}
	}
	var abuf, dbuf [16]int32
	denies := p.deny.host(h, dbuf[:0])
	var first *rule
	for _, i := range p.allow.host(h, abuf[:0]) {
		allow := p.allow.rules[i]
		by := allow.deniedBy(p.deny.rules, denies)
		if by == nil {
			return allow.verdict(true)
		}
		if first == nil {
			first = by
		}
	}
	if first != nil {
		return first.verdict(false)
	}
	why := ""
	if internal(h) {
		why = ", and names below .internal are looked up only where one names them"
	}
	return Verdict{Rule: ruleDefault, Reason: fmt.Sprintf("no rule allows %q%s", h, why)}
}

// deniedBy returns a rule of those listed, all of which name one host, if together they deny unconditionally whatever
// the allow rule allows there, or nil.
func (r *rule) deniedBy(rules []*rule, list []int32) *rule {
	speaks := protocols
	if r.protocol != "" {
		speaks = []Protocol{r.protocol}
	}
	var last *rule
	for _, proto := range speaks {
		left := r.ports.all()
		for _, i := range list {
			if d := rules[i]; !d.conditional() && d.speaks(proto) {
				if rest := left.minus(d.ports); len(rest) == 0 {
					left, last = nil, d
					break
				} else {
					left = rest
				}
			}
		}
		if len(left) > 0 {
			return nil
		}
	}
	return last
}

// Connect decides when a connection is made, and about an address that is asked for as such also what [Policy.Address]
// does. Where inspect is set, the verdict is the connection's only, and each
// request is to be decided on by [Policy.Request]: because all rules that allow it ask for a method, a path or a
// condition, because one that denies does, because a rule or platform_credentials_only wants it, or because a secret is granted there.
func (p *Policy) Connect(f Flow) (v Verdict, inspect bool) {
	if v, bad := p.refuseHost(f.Host); bad {
		return v, false
	}
	var buf [16]int32
	for _, i := range p.deny.host(f.Host, buf[:0]) {
		r := p.deny.rules[i]
		switch {
		case !r.flow(f):
		case !r.conditional():
			return r.verdict(false), false
		default:
			inspect = true
		}
	}
	var first *rule
	open := false
	for _, i := range p.allow.host(f.Host, buf[:0]) {
		r := p.allow.rules[i]
		if !r.flow(f) {
			continue
		}
		if first == nil {
			first = r
		}
		open = open || !r.conditional()
		inspect = inspect || r.inspect
	}
	if first == nil {
		return p.byDefault(f), false
	}
	if v, bad := p.refuseLiteral(f); bad {
		return v, false
	}
	if !f.Protocol.inspectable() {
		return first.verdict(true), false
	}
	inspect = inspect || !open || p.platformCredentialsOnly
	for i := range p.grants {
		inspect = inspect || p.grants[i].Covers(f)
	}
	return first.verdict(true), inspect
}

// refuseLiteral denies an address that is asked for as such and may not be dialled.
func (p *Policy) refuseLiteral(f Flow) (Verdict, bool) {
	a, ok := f.Host.Addr()
	if !ok {
		return Verdict{}, false
	}
	v := p.Address(f, a)
	return v, !v.Allow
}

func (p *Policy) byDefault(f Flow) Verdict {
	return Verdict{Rule: ruleDefault, Reason: "no rule allows " + f.String()}
}

// Request decides on a request. Deny wins over allow, and what no rule allows is denied.
//
// Some requests mean different things to different servers: a path with an encoded slash or with parameters, a method
// that a header such as X-HTTP-Method-Override replaces, a path that one such as X-Original-URL does, a header whose name has _ for -. Such a request is allowed if one rule allows all of its
// meanings, and denied if a rule denies one. A condition that fails to be evaluated allows nothing and denies.
func (p *Policy) Request(r Request) Verdict {
	if v, bad := p.refuseHost(r.Host); bad {
		return v
	}
	if !r.Protocol.inspectable() {
		return Verdict{Rule: ruleRequest, Reason: fmt.Sprintf("%s has no requests", r.Flow)}
	}
	if !token(r.Method) {
		return Verdict{Rule: ruleRequest, Reason: fmt.Sprintf("%.40q is no method", r.Method)}
	}
	if c, err := CanonicalPath(r.Path); err != nil {
		return Verdict{Rule: ruleRequest, Reason: err.Error()}
	} else if c != r.Path {
		return Verdict{Rule: ruleRequest, Reason: fmt.Sprintf("the path %.100q is not in canonical form", r.Path)}
	}
	q := &question{Request: &r}
	var buf [16]int32
	for _, i := range p.deny.host(r.Host, buf[:0]) {
		rule := p.deny.rules[i]
		if !rule.flow(r.Flow) {
			continue
		}
		if ok, why := rule.asks(q); ok {
			v := rule.verdict(false)
			if why != "" {
				v.Reason += "; " + why
			}
			return v
		}
	}
	var failed string
	for _, i := range p.allow.host(r.Host, buf[:0]) {
		rule := p.allow.rules[i]
		if !rule.flow(r.Flow) {
			continue
		}
		ok, why := rule.asks(q)
		if ok {
			if v, bad := p.refuseLiteral(r.Flow); bad {
				return v
			}
			return rule.verdict(true)
		}
		if failed == "" && why != "" {
			failed = "; " + rule.label + ": " + why
		}
	}
	return Verdict{Rule: ruleDefault, Reason: fmt.Sprintf("no rule allows %.40q %.200q at %s%s", r.Method, r.Path, r.Flow, failed)}
}

// token reports whether s is a token of HTTP, as methods and names of headers are.
func token(s string) bool {
	for i := range len(s) {
		if c := s[i]; !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0) {
			return false
		}
	}
	return s != ""
}

// meaning is what a server may take a request for.
type meaning struct {
	// path is empty where a header names one that is not canonical: no rule can tell what a server makes of it.
	method, path string
	// queryless says that a header that replaces the path comes with another query, or none.
	queryless bool
	// hyphened says that a header with _ in its name is also the one with -.
	hyphened bool
}

// question is a request with what has been found out about it so far.
type question struct {
	*Request
	meanings []meaning
	headers  [2]map[string]string // as they are spelled, and hyphened
	query    map[string][]string
	queryErr error
}

// overrides are the headers by which frameworks let a request name another method than its own.
var overrides = []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override"}

// rewrites are the headers by which frameworks let a proxy name another path than the request's own.
var rewrites = []string{"X-Original-Url", "X-Rewrite-Url"}

// hyphened is how some servers read the name of a header, whose variables have _ for -, as CGI and WSGI have it: two spellings are one header. Others drop one with _,
// or take it for another.
func hyphened(name string) string { return strings.ReplaceAll(name, "_", "-") }

// all returns the meanings, the first of which is the plain one. Where they are more than maxMeanings it returns one more than that many: no request makes it
// look for or keep more.
func (q *question) all() []meaning {
	if q.meanings != nil {
		return q.meanings
	}
	methods := []string{q.Method}
	var paths []meaning // of which no method is set
	for _, path := range readings(q.Path) {
		paths = append(paths, meaning{path: path})
	}
	own := len(paths)
	spellings := []bool{false}
	for name, values := range q.Header {
		plain := hyphened(name)
		if plain != name {
			spellings = []bool{false, true}
		}
		is := func(o string) bool { return strings.EqualFold(o, plain) }
		if slices.ContainsFunc(overrides, is) {
			methods = named(methods, values)
		}
		if slices.ContainsFunc(rewrites, is) {
			paths = rewritten(paths, values, q.Query)
		}
	}
	// Headers have no order.
	slices.Sort(methods[1:])
	slices.SortFunc(paths[own:], func(a, b meaning) int { return strings.Compare(a.path, b.path) })
	for _, path := range paths {
		for _, m := range methods {
			for _, h := range spellings {
				if len(q.meanings) > maxMeanings {
					return q.meanings
				}
				path.method, path.hyphened = m, h
				q.meanings = append(q.meanings, path)
			}
		}
	}
	return q.meanings
}

// named adds the methods that values name to a list, until they are too many: a header has room for tens of thousands, each of which is looked for among the others.
func named(methods, values []string) []string {
	for _, v := range values {
		for m := range strings.SplitSeq(v, ",") {
			if len(methods) > maxMeanings {
				return methods
			}
			if m = strings.ToUpper(strings.TrimSpace(m)); m != "" && !slices.Contains(methods, m) {
				methods = append(methods, m)
			}
		}
	}
	return methods
}

// rewritten adds the paths that values name to a list, until they are too many.
func rewritten(paths []meaning, values []string, query string) []meaning {
	for _, v := range values {
		path, other, _ := strings.Cut(v, "?")
		list := []string{""}
		if c, err := CanonicalPath(path); err == nil && c == path {
			list = readings(c)
		}
		for _, p := range list {
			if len(paths) > maxMeanings {
				return paths
			}
			if m := (meaning{path: p, queryless: p == "" || other != query}); !slices.Contains(paths, m) {
				paths = append(paths, m)
			}
		}
	}
	return paths
}

// header returns the headers by lower-case name, one with _ also as with - if that is asked for; values of one name are joined by a comma, as HTTP does.
func (q *question) header(hyphens bool) map[string]string {
	headers := &q.headers[0]
	if hyphens {
		headers = &q.headers[1]
	}
	if *headers == nil {
		all := make(map[string][]string, len(q.Header))
		// In order, so that two spellings of one name are joined the same way each time.
		for _, name := range slices.Sorted(maps.Keys(q.Header)) {
			lower := strings.ToLower(name)
			all[lower] = append(all[lower], q.Header[name]...)
			if other := hyphened(lower); hyphens && other != lower {
				all[other] = append(all[other], q.Header[name]...)
			}
		}
		h := make(map[string]string, len(all))
		for name, values := range all {
			sep := ", "
			if name == "cookie" {
				sep = "; "
			}
			h[name] = strings.Join(values, sep)
		}
		*headers = h
	}
	return *headers
}

// parameters returns the query by name.
func (q *question) parameters() (map[string][]string, error) {
	if q.query == nil && q.queryErr == nil {
		var v url.Values
		v, q.queryErr = url.ParseQuery(q.Query)
		q.query = v
	}
	return q.query, q.queryErr
}

// maxMeanings bounds what one request may ask of the rules.
const maxMeanings = 16

// asks reports whether the rule decides a request over a flow that it is about: an allow rule in all of its meanings, a
// deny rule in one. why tells what of it could not be evaluated.
func (r *rule) asks(q *question) (ok bool, why string) {
	if !r.conditional() {
		return true, ""
	}
	all := q.all()
	if len(all) > maxMeanings {
		return r.deny, fmt.Sprintf("the request can be understood in %d or more ways", len(all))
	}
	for _, m := range all {
		ok, why = r.means(q, m)
		if ok == r.deny {
			return ok, why
		}
	}
	return !r.deny, ""
}

// means reports whether one meaning of a request fits the rule's methods, paths and condition.
func (r *rule) means(q *question, m meaning) (ok bool, why string) {
	if len(r.methods) > 0 && !slices.ContainsFunc(r.methods, func(s string) bool {
		// Methods are case-sensitive, but a server that does not know that must not get past a deny rule.
		return s == m.method || r.deny && strings.EqualFold(s, m.method)
	}) {
		return false, ""
	}
	if len(r.paths) > 0 && m.path == "" {
		return r.deny, errRewritten.Error()
	}
	if len(r.paths) > 0 && !r.path(m.path) {
		return false, ""
	}
	if r.when == nil {
		return true, ""
	}
	ok, err := r.when.eval(q, m)
	if err != nil {
		return r.deny, fmt.Sprintf("when could not be evaluated: %v", err)
	}
	return ok, ""
}

// errRewritten says what is wrong with a value of one of the headers in rewrites.
var errRewritten = errors.New("a header such as X-Original-URL replaces the path by what is no canonical path; leave the header out")

func (r *rule) path(path string) bool {
	for i := range r.paths {
		if r.paths[i].match(path) {
			return true
		}
	}
	return false
}
