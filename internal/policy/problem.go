package policy

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// Problem is one thing that is wrong with a policy. The error of [Parse] joins all of them.
type Problem struct {
	// Policy is the name that was given to Parse, and Line the line, from 1.
	Policy string
	Line   int
	// Rule is the rule, such as `allow[2] "npm"`, or empty if it is the file's.
	Rule string
	// What is wrong, with the value, and what to do about it.
	What, Remedy string
}

// Error writes the problem on one line.
func (p *Problem) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "policy %s: line %d: ", quoted(p.Policy), p.Line)
	if p.Rule != "" {
		b.WriteString(p.Rule + ": ")
	}
	b.WriteString(p.What)
	if p.Remedy != "" {
		b.WriteString("; " + p.Remedy)
	}
	return b.String()
}

// quoted leaves plain names as they are.
func quoted(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/") == "" {
		return s
	}
	return fmt.Sprintf("%.100q", s)
}

// printable replaces what a terminal or a log could take for more than text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// Problems returns what is wrong of an error of [Parse], in the order of the file.
func Problems(err error) []*Problem {
	var list []*Problem
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			list = append(list, Problems(e)...)
		}
		return list
	}
	var p *Problem
	if errors.As(err, &p) {
		list = append(list, p)
	}
	return list
}
