package secret

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
)

// Source says where the key of a box is: "file:PATH", "env:VARIABLE" or "kms:ID=COMMAND". It opens the box when it is first
// needed, and again when something is sealed under a key that the box does not have, which may have come since.
type Source struct {
	kind, at, id string

	mu  sync.Mutex
	box *Box
}

// ParseSource reads where a key is.
func ParseSource(text string) (*Source, error) {
	refuse := func(what string) (*Source, error) {
		return nil, fmt.Errorf("the key of secrets %.200q: %s; want file:PATH, env:VARIABLE or kms:ID=COMMAND", text, what)
	}
	kind, rest, _ := strings.Cut(text, ":")
	s := &Source{kind: kind, at: rest}
	switch kind {
	case "file":
		if !filepath.IsAbs(rest) {
			return refuse("the path is not absolute")
		}
	case "env":
		if rest == "" || strings.ContainsAny(rest, "= \x00") {
			return refuse("that is no name of a variable")
		}
	case "kms":
		s.id, s.at, _ = strings.Cut(rest, "=")
		if s.id == "" || !filepath.IsAbs(s.at) {
			return refuse("it needs an id, and the absolute path of a program")
		}
	default:
		return refuse("it is of no kind that there is")
	}
	return s, nil
}

// Variable is the environment variable that holds the key, or empty.
func (s *Source) Variable() string {
	if s.kind == "env" {
		return s.at
	}
	return ""
}

// String is what ParseSource read.
func (s *Source) String() string {
	if s.kind == "kms" {
		return "kms:" + s.id + "=" + s.at
	}
	return s.kind + ":" + s.at
}

func (s *Source) open() (*Box, error) {
	switch s.kind {
	case "file":
		return FileBox(s.at)
	case "env":
		k, err := EnvKey(s.at)
		if err != nil {
			return nil, err
		}
		return NewBox(k), nil
	}
	k, err := KMS{Command: s.at, ID: s.id}.Key()
	if err != nil {
		return nil, err
	}
	return NewBox(k), nil
}

// Box returns the box.
func (s *Source) Box() (*Box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.box == nil {
		b, err := s.open()
		if err != nil {
			return nil, err
		}
		s.box = b
	}
	return s.box, nil
}

// Open returns a value, which the caller clears; see [Box.Open].
func (s *Source) Open(ctx context.Context, name, sealed string) ([]byte, error) {
	b, err := s.Box()
	if err != nil {
		return nil, err
	}
	v, err := b.Open(ctx, name, sealed)
	if !errors.Is(err, ErrKey) || s.kind != "file" {
		return v, err // only a file can have changed
	}
	s.mu.Lock()
	if s.box == b {
		s.box = nil
	}
	s.mu.Unlock()
	if b, err = s.Box(); err != nil {
		return nil, err
	}
	return b.Open(ctx, name, sealed)
}
