// Package policy decides what a sandbox may reach.
//
// A [Policy] is parsed from a YAML file once and answers questions from then on: may this name be looked up, may this
// connection be made, may this address be dialled, may this request be sent. It does no I/O of its own and every answer
// names the rule that gave it. What it cannot tell it denies.
//
// Questions are asked with a [Host], the one canonical form of a name or address, and with a path that [CanonicalPath]
// returned. docs/POLICY.md describes the file.
package policy

import (
	"bytes"
	"net/http"
	"strconv"
	"strings"
)

// Policy is what a sandbox may reach. It is immutable and safe for concurrent use. A nil Policy denies everything.
type Policy struct {
	name, digest, extends   string
	source                  []byte
	allow, deny             *index
	limits                  Limits
	platformCredentialsOnly bool
	credentialsLine         int
	grants                  []Grant
	tests                   []assertion
	// own is how many of allow and of deny the file itself has; those of the preset follow.
	ownAllow, ownDeny int
}

// Name returns the name that the policy was parsed under.
func (p *Policy) Name() string { return p.name }

// Digest returns "sha256:" and the sum of the source in hexadecimal. A policy of another digest is another policy. The
// presets belong to the version of Warren, so the digest of a file says nothing about the one that it extends.
func (p *Policy) Digest() string { return p.digest }

// Source returns a copy of what the policy was parsed from.
func (p *Policy) Source() []byte { return bytes.Clone(p.source) }

// Extends returns the name of the preset whose rules the policy has besides its own; "" is what a preset returns.
func (p *Policy) Extends() string { return p.extends }

// PlatformCredentialsOnly reports whether credentials that the sandbox brought itself are to be refused. All HTTP
// connections of such a policy are inspected.
func (p *Policy) PlatformCredentialsOnly() bool { return p.platformCredentialsOnly }

// Flow is a connection, or what datagrams of one kind have in common.
type Flow struct {
	Host     Host
	Port     uint16
	Protocol Protocol
}

// String writes the flow as "https://example.com:443". What did not come from ParseHost is quoted in it.
func (f Flow) String() string {
	protocol, host := quoted(string(f.Protocol)), string(f.Host)
	if !f.Host.canonical() {
		host = quoted(host)
	} else if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return protocol + "://" + host + ":" + strconv.Itoa(int(f.Port))
}

// Request is one HTTP request over a flow.
type Request struct {
	Flow
	// Method is as it was sent. Path came from CanonicalPath; Query is what followed its question mark, undecoded.
	Method, Path, Query string
	// Header is the request's. Host is not among it: the flow has it.
	Header http.Header
}

// Verdict is an answer.
type Verdict struct {
	Allow bool
	// Rule is the rule that decided, such as `allow[2] "npm"` or `preset registries: allow[0] "npm"`; "default" if none
	// did, and "address" if what an address is did. Rules are counted from 0.
	Rule string
	// Line is the rule's in its file, from 1, or 0.
	Line int
	// Reason is one line for people. What came from the sandbox is quoted in it.
	Reason string
}

// What decides if no rule does.
const (
	ruleDefault = "default"
	ruleAddress = "address"
	ruleRequest = "request"
)
