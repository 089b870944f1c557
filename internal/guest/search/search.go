// Package search finds and replaces text in files, with the rights of a user: like ripgrep it passes over what
// .gitignore names, hidden files and binary files, and works in parallel. Patterns are RE2, which runs in linear time
// whatever the pattern, and everything is bounded.
package search

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"regexp/syntax"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

const (
	defaultMatches   = 1000
	maxMatches       = 100_000
	defaultFileBytes = 16 << 20
	maxFileBytes     = 64 << 20
	maxContext       = 20
	maxText          = 4 << 10
	maxPattern       = 64 << 10
	maxGlobs         = 256
	maxWorkers       = 4
	maxDepth         = 256
	// maxFiles bounds a walk.
	maxFiles = 2_000_000
	// binaryProbe is how much of a file is looked at to tell whether it is binary.
	binaryProbe = 8 << 10
)

// filter says which files count.
type filter struct {
	root             string
	include, exclude []rule
	all              bool
	maxBytes         int64
}

func newFilter(root string, include, exclude []string, all bool, maxBytes int64) (*filter, error) {
	f := &filter{root: root, all: all, maxBytes: maxBytes}
	if maxBytes <= 0 {
		f.maxBytes = defaultFileBytes
	}
	f.maxBytes = min(f.maxBytes, maxFileBytes)
	if len(include)+len(exclude) > maxGlobs {
		return nil, wire.Errorf(wire.InvalidArgument, "more than %d globs", maxGlobs)
	}
	for _, g := range []struct {
		globs []string
		into  *[]rule
	}{{include, &f.include}, {exclude, &f.exclude}} {
		for _, s := range g.globs {
			r, ok := parseRule(s)
			if _, err := filepath.Match(strings.ReplaceAll(s, "[!", "[^"), ""); !ok || err != nil || r.negate {
				return nil, wire.Errorf(wire.InvalidArgument, "glob %.100q is not valid; use such as \"*.go\" or \"cmd/**\"", s)
			}
			*g.into = append(*g.into, r)
		}
	}
	return f, nil
}

// compile makes the expression that both searching and replacing use: lines are what ^ and $ stand for.
func compile(pattern string, fixed, ignoreCase bool) (*regexp.Regexp, error) {
	if len(pattern) > maxPattern {
		return nil, wire.Errorf(wire.InvalidArgument, "the pattern is longer than %d bytes", maxPattern)
	}
	if pattern == "" {
		return nil, wire.Errorf(wire.InvalidArgument, "the pattern is empty")
	}
	if fixed {
		pattern = regexp.QuoteMeta(pattern)
	}
	flags := "m"
	if ignoreCase {
		flags += "i"
	}
	re, err := regexp.Compile("(?" + flags + ":" + pattern + ")")
	if err != nil {
		var serr *syntax.Error
		if errors.As(err, &serr) {
			return nil, wire.Errorf(wire.InvalidArgument, "the pattern is not valid: %s: %.100q", serr.Code, serr.Expr)
		}
		return nil, wire.Errorf(wire.InvalidArgument, "the pattern is not valid: %v", err)
	}
	return re, nil
}

// wanted says whether the globs let a file through.
func (f *filter) wanted(rel string) bool {
	for _, r := range f.exclude {
		if r.matches(rel, false) {
			return false
		}
	}
	if len(f.include) == 0 {
		return true
	}
	for _, r := range f.include {
		if r.matches(rel, false) {
			return true
		}
	}
	return false
}

// walk calls found for each regular file that counts, in lexical order. The caller has the user's rights. skipped
// counts files passed over for their size.
func (f *filter) walk(ctx context.Context, found func(path string) error, skipped func()) error {
	st, err := os.Stat(f.root)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		if !st.Mode().IsRegular() {
			return wire.Errorf(wire.InvalidArgument, "path '%s' is neither a file nor a directory", f.root)
		}
		if st.Size() > f.maxBytes {
			skipped()
			return nil
		}
		return found(f.root)
	}
	var rules *ruleSet
	if !f.all {
		rules = rulesAbove(f.root)
	}
	n := 0
	var visit func(dir string, rules *ruleSet, depth int) error
	visit = func(dir string, rules *ruleSet, depth int) error {
		entries, err := os.ReadDir(dir)
		if err != nil {
			if depth == 0 {
				return err
			}
			return nil // not the user's to read, or gone
		}
		if !f.all {
			rules = readRules(rules, dir, ".gitignore")
		}
		for _, d := range entries {
			if err := ctx.Err(); err != nil {
				return err
			}
			name := d.Name()
			path := filepath.Join(dir, name)
			rel, _ := filepath.Rel(f.root, path) // both absolute
			if !f.all && (strings.HasPrefix(name, ".") || rules.ignores(path, d.IsDir())) {
				continue
			}
			switch {
			case d.IsDir():
				if depth < maxDepth && !f.excludedDir(rel) {
					if err := visit(path, rules, depth+1); err != nil {
						return err
					}
				}
			case d.Type().IsRegular() && f.wanted(rel):
				if n++; n > maxFiles {
					return wire.Errorf(wire.ResourceExhausted, "more than %d files; search a smaller directory", maxFiles)
				}
				if info, err := d.Info(); err != nil || info.Size() > f.maxBytes {
					skipped()
					continue
				}
				if err := found(path); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return visit(f.root, rules, 0)
}

// excludedDir says whether an exclude glob names a directory, and with it all that is below.
func (f *filter) excludedDir(rel string) bool {
	for _, r := range f.exclude {
		if r.matches(rel, true) {
			return true
		}
	}
	return false
}

// read reads a text file into buf; it is false for a binary file, or one that cannot be read.
func (f *filter) read(path string, buf *bytes.Buffer) (fs.FileInfo, bool) {
	// What was a regular file may be something else by now.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_NOCTTY, 0)
	if err != nil && path == f.root {
		file, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, false
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return nil, false
	}
	buf.Reset()
	if _, err := io.CopyN(buf, file, binaryProbe); err != nil && err != io.EOF {
		return nil, false
	}
	if bytes.IndexByte(buf.Bytes(), 0) >= 0 {
		return nil, false
	}
	buf.Grow(int(min(st.Size(), f.maxBytes)) + bytes.MinRead)
	if _, err := io.Copy(buf, io.LimitReader(file, f.maxBytes)); err != nil || int64(buf.Len()) > f.maxBytes {
		return nil, false
	}
	return st, bytes.IndexByte(buf.Bytes(), 0) < 0
}

// Search finds matching lines, calling send for each in turn and then for the summary.
func Search(ctx context.Context, u *account.User, root string, req *wire.SearchRequest, send func(*wire.SearchResponse) error) error {
	re, err := compile(req.Pattern, req.Fixed, req.IgnoreCase)
	if err != nil {
		return err
	}
	f, err := newFilter(root, req.Include, req.Exclude, req.All, req.MaxFileBytes)
	if err != nil {
		return err
	}
	limit := int(req.MaxMatches)
	if limit == 0 {
		limit = defaultMatches
	}
	limit = min(limit, maxMatches)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	paths := make(chan string, 64)
	results := make(chan []wire.Match, 16)
	var sum wire.SearchSummary
	var searched, skipped atomic.Uint32
	var walkErr error
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(paths)
		walkErr = u.Do(func() error {
			return f.walk(ctx, func(path string) error {
				select {
				case paths <- path:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}, func() { skipped.Add(1) })
		})
	})
	for range min(runtime.GOMAXPROCS(0), maxWorkers) {
		wg.Go(func() {
			// One thread per worker takes on the user's rights, once. Opening a file may fail; acting as the user did not.
			_ = u.Do(func() error {
				var buf bytes.Buffer
				for path := range paths {
					if _, ok := f.read(path, &buf); !ok {
						skipped.Add(1)
						continue
					}
					searched.Add(1)
					m := matchLines(re, path, buf.Bytes(), limit, int(min(req.Context, maxContext)))
					if len(m) == 0 {
						continue
					}
					select {
					case results <- m:
					case <-ctx.Done():
						return nil
					}
				}
				return nil
			})
		})
	}
	go func() {
		wg.Wait()
		close(results)
	}()
	var sendErr error
	for matches := range results {
		for i := range matches {
			if sendErr != nil || sum.Truncated {
				break
			}
			if int(sum.Matches) == limit {
				sum.Truncated = true
				break
			}
			sum.Matches++
			sendErr = send(&wire.SearchResponse{Match: &matches[i]})
		}
		if sendErr != nil || sum.Truncated {
			cancel() // and go on until the workers have seen it
		}
	}
	switch {
	case sendErr != nil:
		return sendErr
	case sum.Truncated:
	case walkErr != nil:
		return walkErr
	}
	sum.FilesSearched, sum.FilesSkipped = searched.Load(), skipped.Load()
	return send(&wire.SearchResponse{Summary: &sum})
}

// matchLines returns the matching lines of a text, at most limit and one more, which tells that there are more.
func matchLines(re *regexp.Regexp, path string, text []byte, limit, context int) []wire.Match {
	var out []wire.Match
	line, at := 1, 0 // at is the start of that line
	byLine := false
	for at < len(text) && len(out) <= limit {
		start := at
		if !byLine {
			loc := re.FindIndex(text[at:])
			if loc == nil {
				break
			}
			start = at + loc[0]
			// An expression that runs over line ends could run to the end of the file from each line anew.
			byLine = at+loc[1] > lineEnd(text, start)
		}
		if start == len(text) && bytes.HasSuffix(text, []byte("\n")) {
			break // after the last line
		}
		begin := bytes.LastIndexByte(text[:start], '\n') + 1
		end := lineEnd(text, start)
		line += bytes.Count(text[at:begin], []byte("\n"))
		// The match may have gone on into the next line; what counts is whether this line by itself matches.
		l := text[begin:end]
		if m := re.FindIndex(l); m != nil {
			out = append(out, wire.Match{Path: path, Line: uint32(line), Column: uint32(m[0] + 1), Text: clip(l),
				Before: linesBefore(text, begin, context), After: linesAfter(text, end, context)})
		}
		at = min(end+1, len(text))
		line++
	}
	return out
}

// lineEnd returns the end of the line that holds position i, without its line feed.
func lineEnd(text []byte, i int) int {
	if n := bytes.IndexByte(text[i:], '\n'); n >= 0 {
		return i + n
	}
	return len(text)
}

func linesBefore(text []byte, begin, n int) []string {
	out := make([]string, 0, n)
	for ; n > 0 && begin > 0; n-- {
		prev := bytes.LastIndexByte(text[:begin-1], '\n') + 1
		out = append(out, clip(text[prev:begin-1]))
		begin = prev
	}
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return out
}

func linesAfter(text []byte, end, n int) []string {
	var out []string
	for ; n > 0 && end+1 < len(text); n-- {
		next := lineEnd(text, end+1)
		out = append(out, clip(text[end+1:next]))
		end = next
	}
	return out
}

// clip makes a line fit to be told: without a carriage return, at most maxText bytes.
func clip(l []byte) string {
	l = bytes.TrimSuffix(l, []byte("\r"))
	if len(l) > maxText {
		l = l[:maxText]
		for i := 0; i < utf8.UTFMax && len(l) > 0; i++ {
			if r, n := utf8.DecodeLastRune(l); r != utf8.RuneError || n != 1 {
				break
			}
			l = l[:len(l)-1]
		}
	}
	return string(l)
}

// errTooMany ends a walk that would change more files than allowed.
var errTooMany = fmt.Errorf("too many files")
