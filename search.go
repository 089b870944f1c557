package warren

import (
	"context"
	"iter"

	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// Query says what to search for in the files of a sandbox.
type Query struct {
	// Path to search; a directory is searched with all below it. Empty means /workspace.
	Path string
	// Pattern in RE2 syntax; a literal string when Fixed.
	Pattern    string
	Fixed      bool
	IgnoreCase bool
	// Include only files whose path relative to Path matches one of these, such as "*.go" or "cmd/**".
	Include []string
	Exclude []string
	// All looks also at files that .gitignore names, and hidden ones.
	All bool
	// MaxMatches is how many matching lines to return; 0 means 1000, the most is 100000.
	MaxMatches int
	// MaxFileSize passes over files above this many bytes; 0 means 16 MiB.
	MaxFileSize int64
	// Context is how many lines to return before and after each match, at most 20.
	Context int
	// User to search as. Empty means the sandbox's default.
	User string
	// Summary, when set, is filled in at the end of a search.
	Summary *SearchSummary
}

// Match is one matching line.
type Match struct {
	Path string `json:"path"`
	// Line counts from 1.
	Line int `json:"line"`
	// Column is the byte of the first match in the line, from 1.
	Column int `json:"column"`
	// Text is at most 4 KiB of the line.
	Text   string   `json:"text"`
	Before []string `json:"before,omitempty"`
	After  []string `json:"after,omitempty"`
}

// SearchSummary says what a search did.
type SearchSummary struct {
	FilesSearched int `json:"filesSearched"`
	FilesSkipped  int `json:"filesSkipped"`
	Matches       int `json:"matches"`
	// Truncated says that a limit ended the search early.
	Truncated bool `json:"truncated,omitempty"`
}

const workDir = "/workspace"

// Search finds lines that match. The first error ends the matches.
func (s *Sandbox) Search(ctx context.Context, q Query) iter.Seq2[*Match, error] {
	return func(yield func(*Match, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		if q.Path == "" {
			q.Path = workDir
		}
		stream, err := s.guest.warren.Search(ctx, request(q.User, &guestv1.SearchRequest{
			Path: q.Path, Pattern: q.Pattern, Fixed: q.Fixed, IgnoreCase: q.IgnoreCase, Include: q.Include, Exclude: q.Exclude,
			All: q.All, MaxMatches: uint32(max(0, q.MaxMatches)), MaxFileBytes: q.MaxFileSize, Context: uint32(max(0, q.Context)),
		}))
		if err != nil {
			yield(nil, fileError("search", q.Path, err))
			return
		}
		defer stream.Close()
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().(type) {
			case *guestv1.SearchResponse_Match:
				m := e.Match
				if !yield(&Match{m.GetPath(), int(m.GetLine()), int(m.GetColumn()), m.GetText(), m.GetBefore(), m.GetAfter()}, nil) {
					cancel()
					return
				}
			case *guestv1.SearchResponse_Summary:
				if q.Summary != nil {
					m := e.Summary
					*q.Summary = SearchSummary{int(m.GetFilesSearched()), int(m.GetFilesSkipped()), int(m.GetMatches()), m.GetTruncated()}
				}
			}
		}
		if err := stream.Err(); err != nil {
			yield(nil, fileError("search", q.Path, err))
		}
	}
}

// Replacement says what to rewrite in the files of a sandbox.
type Replacement struct {
	// Path, Pattern, Fixed, IgnoreCase, Include, Exclude, All and User are as in [Query].
	Path       string
	Pattern    string
	Fixed      bool
	IgnoreCase bool
	Include    []string
	Exclude    []string
	All        bool
	User       string
	// With replaces each match; $1 stands for the first group, unless Fixed.
	With string
	// DryRun counts only.
	DryRun bool
	// MaxFiles refuses when more files than this would change; 0 means 1000.
	MaxFiles int
}

// Replaced is what a replace did to one file.
type Replaced struct {
	Path         string `json:"path"`
	Replacements int    `json:"replacements"`
	// Error says why this file was left as it was, if it was.
	Error string `json:"error,omitempty"`
}

// Replace rewrites matches in many files, each file atomically, and returns the files that changed or would have.
func (s *Sandbox) Replace(ctx context.Context, r Replacement) ([]Replaced, error) {
	if r.Path == "" {
		r.Path = workDir
	}
	res, err := s.guest.warren.Replace(ctx, request(r.User, &guestv1.ReplaceRequest{
		Path: r.Path, Pattern: r.Pattern, Replacement: r.With, Fixed: r.Fixed, IgnoreCase: r.IgnoreCase,
		Include: r.Include, Exclude: r.Exclude, All: r.All, DryRun: r.DryRun, MaxFiles: uint32(max(0, r.MaxFiles)),
	}))
	if err != nil {
		return nil, fileError("replace", r.Path, err)
	}
	var files []Replaced
	for _, f := range res.Msg.GetFiles() {
		files = append(files, Replaced{f.GetPath(), int(f.GetReplacements()), f.GetError()})
	}
	return files, nil
}
