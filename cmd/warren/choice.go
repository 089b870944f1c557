package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/warren-sandbox/warren"
)

// choice is a flag that takes one of a few words.
type choice struct {
	value *string
	of    []string
}

// choiceVar adds a flag that takes one of a few words, or none of them.
func choiceVar(flags *pflag.FlagSet, value *string, name, usage string, of ...string) {
	flags.Var(choice{value, of}, name, usage)
}

func (c choice) Set(s string) error {
	if !slices.Contains(c.of, s) {
		return fmt.Errorf("%w: want %s", warren.ErrInvalid, strings.Join(c.of, " or "))
	}
	*c.value = s
	return nil
}

func (c choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

func (choice) Type() string { return "string" }
