package search

import (
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

const (
	// maxIgnoreFile bounds how much of a .gitignore is read, maxIgnoreRules how many rules of it count.
	maxIgnoreFile  = 256 << 10
	maxIgnoreRules = 4096
	// maxSegments bounds the length of patterns and of the paths that they are held against.
	maxSegments = 256
)

// rule is one line of a .gitignore, or one glob of a request.
type rule struct {
	segments []string // "**" stands for any number of directories
	negate   bool
	dirOnly  bool
}

// parseRule reads one pattern in the syntax of .gitignore; it is false for a line that holds none.
func parseRule(line string) (rule, bool) {
	var r rule
	line = strings.TrimRight(line, "\r\n")
	for strings.HasSuffix(line, " ") && !strings.HasSuffix(line, `\ `) {
		line = line[:len(line)-1]
	}
	if line == "" || line[0] == '#' {
		return r, false
	}
	if line[0] == '!' {
		r.negate, line = true, line[1:]
	}
	if strings.HasSuffix(line, "/") {
		r.dirOnly, line = true, strings.TrimRight(line, "/")
	}
	anchored := strings.Contains(line, "/")
	line = strings.TrimLeft(line, "/")
	if line == "" {
		return r, false
	}
	if !anchored {
		r.segments = append(r.segments, "**") // a name alone matches at any depth
	}
	for s := range strings.SplitSeq(line, "/") {
		if s == "" {
			continue
		}
		r.segments = append(r.segments, strings.ReplaceAll(s, "[!", "[^"))
	}
	return r, len(r.segments) <= maxSegments
}

// matches holds a rule against a path relative to where the rule stands.
func (r rule) matches(rel string, dir bool) bool {
	if r.dirOnly && !dir {
		return false
	}
	return matchSegments(r.segments, strings.Split(rel, "/"))
}

// matchSegments matches in time proportional to the product of the lengths, whatever the pattern.
func matchSegments(pat, name []string) bool {
	if len(name) > maxSegments {
		return false
	}
	// can[j] says whether the pattern so far can match the first j names.
	can := make([]bool, len(name)+1)
	can[0] = true
	for i, p := range pat {
		if p == "**" {
			last := i == len(pat)-1
			for j := 1; j <= len(name); j++ {
				can[j] = can[j] || can[j-1]
			}
			if last && i > 0 {
				can[0] = false // "a/**" is what is in a, not a itself
			}
			continue
		}
		for j := len(name); j >= 1; j-- {
			can[j] = false
			if can[j-1] {
				ok, err := path.Match(p, name[j-1])
				can[j] = err == nil && ok
			}
		}
		can[0] = false
	}
	return can[len(name)]
}

// ruleSet is the rules of one directory, and those of the directories above it.
type ruleSet struct {
	parent *ruleSet
	dir    string // absolute
	rules  []rule
}

// readRules adds the rules of a directory's .gitignore to those above it.
func readRules(parent *ruleSet, dir, file string) *ruleSet {
	f, err := os.Open(filepath.Join(dir, file))
	if err != nil {
		return parent
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return parent
	}
	data, _ := io.ReadAll(io.LimitReader(f, maxIgnoreFile)) // what can be read counts
	set := &ruleSet{parent: parent, dir: dir}
	for line := range strings.Lines(string(data)) {
		if r, ok := parseRule(line); ok && len(set.rules) < maxIgnoreRules {
			set.rules = append(set.rules, r)
		}
	}
	if len(set.rules) == 0 {
		return parent
	}
	return set
}

// ignores says whether a path below the set's directory is ignored: the last rule that matches decides, and the rules
// of a deeper directory come after those above.
func (s *ruleSet) ignores(abs string, dir bool) bool {
	for ; s != nil; s = s.parent {
		rel, ok := strings.CutPrefix(abs, strings.TrimSuffix(s.dir, "/")+"/")
		if !ok {
			continue
		}
		for i := len(s.rules) - 1; i >= 0; i-- {
			if s.rules[i].matches(rel, dir) {
				return !s.rules[i].negate
			}
		}
	}
	return false
}

// rulesAbove returns the rules that hold in root because of the repository that it lies in.
func rulesAbove(root string) *ruleSet {
	var dirs []string
	repo := ""
	for d := root; ; d = filepath.Dir(d) {
		dirs = append(dirs, d)
		if _, err := os.Lstat(filepath.Join(d, ".git")); err == nil {
			repo = d
			break
		}
		if d == filepath.Dir(d) {
			return nil
		}
	}
	set := readRules(nil, repo, ".git/info/exclude")
	for i := len(dirs) - 1; i >= 1; i-- { // root's own is read by the walk
		set = readRules(set, dirs[i], ".gitignore")
	}
	return set
}
