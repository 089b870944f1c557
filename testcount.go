package warren

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// TestCount is what test runners said in the output of a command.
type TestCount struct {
	// Runners that were seen: "go test", "pytest", "jest", "vitest", "mocha", "cargo test".
	Runners []string `json:"runners"`
	Passed  int      `json:"passed"`
	Failed  int      `json:"failed"`
	Skipped int      `json:"skipped,omitempty"`
}

// TestCounter counts tests in the output of go test (with -json, -v or plain), pytest, jest, vitest, mocha and cargo test. Of a
// package or suite that was tested again only the last run counts, so that the end of an agent's work is what is told.
// Plain go test names no test that passes: a package then counts as one.
//
// What is counted is what the command printed, which whoever runs there can print too. It is no proof.
type TestCounter struct {
	out, err lineSplitter

	results map[testKey]*tally
	order   []testKey

	// What the lines so far say of those to come.
	goPending  tally  // of plain go test: tests since the last package
	goSeen     bool   // that they have names
	cargoName  string // the target that runs now
	cargoRuns  int    // results since it was named
	pytestRoot string
	vitestRoot string
}

type testKey struct{ runner, name string }

type tally struct {
	passed, failed, skipped int
	// tests of go test -json by name, so that a package that fails without one of them counts.
	broken bool
}

// maxTestKeys bounds the packages and suites that are kept apart, so that no output can fill the memory here.
const maxTestKeys = 10_000

// Stdout and Stderr take the output. Both are to be written by one goroutine.
func (c *TestCounter) Stdout(p []byte) { c.out.write(p, c.line) }

// Stderr is like [TestCounter.Stdout] for the other stream.
func (c *TestCounter) Stderr(p []byte) { c.err.write(p, c.line) }

// Count returns what was counted, nil when no runner was seen. The output is taken to be at its end.
func (c *TestCounter) Count() *TestCount {
	c.out.end(c.line)
	c.err.end(c.line)
	c.endGo("")
	if len(c.order) == 0 {
		return nil
	}
	var n TestCount
	for _, k := range c.order {
		r := c.results[k]
		n.Passed += r.passed
		n.Failed += r.failed
		n.Skipped += r.skipped
		if r.broken && r.failed == 0 {
			n.Failed++
		}
		if !slices.Contains(n.Runners, k.runner) {
			n.Runners = append(n.Runners, k.runner)
		}
	}
	return &n
}

// result returns the tally of a package or suite, which is new if fresh is set.
func (c *TestCounter) result(runner, name string, fresh bool) *tally {
	if c.results == nil {
		c.results = map[testKey]*tally{}
	}
	k := testKey{runner, name}
	r := c.results[k]
	if r == nil {
		if len(c.order) == maxTestKeys {
			return &tally{}
		}
		r = &tally{}
		c.results[k] = r
		c.order = append(c.order, k)
	}
	if fresh {
		*r = tally{}
	}
	return r
}

// lineSplitter makes lines of pieces.
type lineSplitter struct{ rest []byte }

// maxTestLine bounds a line that is looked at; of a longer one the end is left out.
const maxTestLine = 64 << 10

func (s *lineSplitter) write(p []byte, line func(string)) {
	for len(p) > 0 {
		piece, rest, ended := bytes.Cut(p, []byte("\n"))
		s.rest = append(s.rest, piece[:min(len(piece), maxTestLine-len(s.rest))]...)
		if !ended {
			return
		}
		s.end(line)
		p = rest
	}
}

func (s *lineSplitter) end(line func(string)) {
	if len(s.rest) > 0 {
		line(string(s.rest))
		s.rest = s.rest[:0]
	}
}

var (
	colourSequence = regexp.MustCompile(`\x1b\[[0-9;:]*[A-Za-z]`)

	goTestLine    = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+) \(\d+\.\d+s\)$`)
	goPackageLine = regexp.MustCompile(`^(ok  |FAIL|\?   |---)\t(\S+)(?:\s.*)?$`)

	pytestSummary = regexp.MustCompile(`^(?:=+ )?((?:\d+ [a-z]+, )*\d+ (?:failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?|rerun)) in \d+(?:\.\d+)?s(?: \([0-9:, day]+\))?(?: =+)?$`)
	countedWord   = regexp.MustCompile(`(\d+) ([a-z]+)`)

	jestSummary   = regexp.MustCompile(`^Tests: +((?:\d+ [a-z]+, )*\d+ total)$`)
	vitestRun     = regexp.MustCompile(`^ *(?:RUN|DEV) +v\d\S* +(\S.*)$`)
	vitestSummary = regexp.MustCompile(`^ *Tests +((?:\d+ [a-z]+ \| )*\d+ [a-z]+) \(\d+\)$`)
	mochaSummary  = regexp.MustCompile(`^ +(\d+) (passing|failing|pending)(?: \(\d+(?:ms|s|m|h)\))?$`)

	cargoTarget = regexp.MustCompile(`^ +(Running (?:unittests )?\S.*|Doc-tests \S+)$`)
	cargoResult = regexp.MustCompile(`^test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored; \d+ measured; \d+ filtered out(?:; finished in .*)?$`)
)

// line looks at one line of output. The first byte decides what it can be at all, for most lines are none of these.
func (c *TestCounter) line(s string) {
	s = strings.TrimRight(s, "\r")
	if strings.Contains(s, "\x1b[") {
		s = colourSequence.ReplaceAllString(s, "")
	}
	switch {
	case s == "":
	case strings.HasPrefix(s, `{"`) && strings.Contains(s, `"Action":`):
		c.goEvent(s)
	case strings.HasPrefix(strings.TrimLeft(s, " "), "--- "):
		if m := goTestLine.FindStringSubmatch(s); m != nil {
			c.goSeen = true
			switch m[1] {
			case "PASS":
				c.goPending.passed++
			case "FAIL":
				c.goPending.failed++
			case "SKIP":
				c.goPending.skipped++
			}
		}
	case strings.HasPrefix(s, "ok  \t"), strings.HasPrefix(s, "FAIL\t"), strings.HasPrefix(s, "?   \t"):
		if m := goPackageLine.FindStringSubmatch(s); m != nil {
			c.goPackage(m[1], m[2], strings.HasSuffix(s, "[no tests to run]"))
		}
	case strings.HasPrefix(s, "rootdir: "):
		c.pytestRoot, _, _ = strings.Cut(s[len("rootdir: "):], ",")
	case strings.HasPrefix(s, "Tests:"):
		if m := jestSummary.FindStringSubmatch(s); m != nil {
			c.words(c.result("jest", "", true), m[1])
		}
	case strings.HasPrefix(s, "test result: "):
		if m := cargoResult.FindStringSubmatch(s); m != nil {
			c.cargo(m)
		}
	case s[0] == '=' || s[0] >= '0' && s[0] <= '9':
		if m := pytestSummary.FindStringSubmatch(s); m != nil {
			c.words(c.result("pytest", c.pytestRoot, true), m[1])
		}
	case s[0] == ' ':
		c.indented(s)
	}
}

// indented looks at a line of those that begin with a space.
func (c *TestCounter) indented(s string) {
	if m := cargoTarget.FindStringSubmatch(s); m != nil {
		c.cargoName, c.cargoRuns = m[1], 0
	} else if m := vitestRun.FindStringSubmatch(s); m != nil {
		c.vitestRoot = m[1]
	} else if m := vitestSummary.FindStringSubmatch(s); m != nil {
		c.words(c.result("vitest", c.vitestRoot, true), m[1])
	} else if m := mochaSummary.FindStringSubmatch(s); m != nil {
		n, _ := strconv.Atoi(m[1])
		r := c.result("mocha", "", m[2] == "passing")
		switch m[2] {
		case "passing":
			r.passed = n
		case "failing":
			r.failed = n
		case "pending":
			r.skipped = n
		}
	}
}

// words adds up counts such as "1 failed, 3 passed". Words that are no outcome of a test, such as warnings, count nothing.
func (c *TestCounter) words(r *tally, s string) {
	for _, m := range countedWord.FindAllStringSubmatch(s, -1) {
		n, _ := strconv.Atoi(m[1])
		switch m[2] {
		case "passed", "xpassed":
			r.passed += n
		case "failed", "error", "errors":
			r.failed += n
		case "skipped", "xfailed", "todo":
			r.skipped += n
		}
	}
}

// cargo takes the result of a target. Its name comes by the other stream; when it is late, results are told apart by a number.
func (c *TestCounter) cargo(m []string) {
	name := c.cargoName
	if c.cargoRuns > 0 {
		name += " " + strconv.Itoa(c.cargoRuns)
	}
	c.cargoRuns++
	r := c.result("cargo test", name, true)
	r.passed, _ = strconv.Atoi(m[1])
	r.failed, _ = strconv.Atoi(m[2])
	r.skipped, _ = strconv.Atoi(m[3])
}

// goPackage takes the line about a package with which plain go test ends it.
func (c *TestCounter) goPackage(word, name string, none bool) {
	if word == "?   " || none {
		c.result("go test", name, true)
		c.goPending = tally{}
		return
	}
	c.goPending.broken = word == "FAIL"
	c.endGo(name)
}

// endGo files the tests since the last package, of which there may be none.
func (c *TestCounter) endGo(name string) {
	p := c.goPending
	c.goPending = tally{}
	seen := c.goSeen
	c.goSeen = false
	if name == "" && !seen {
		return
	}
	if p.passed+p.failed+p.skipped == 0 && !p.broken {
		p.passed = 1 // a package that passed, whose tests have no names without -v
	}
	*c.result("go test", name, true) = p
}

// goEvent takes a line of go test -json.
func (c *TestCounter) goEvent(s string) {
	var e struct{ Action, Package, Test string }
	if json.Unmarshal([]byte(s), &e) != nil || e.Package == "" {
		return
	}
	switch {
	case e.Action == "start":
		c.result("go test", e.Package, true)
	case e.Test != "":
		r := c.result("go test", e.Package, false)
		switch e.Action {
		case "pass":
			r.passed++
		case "fail":
			r.failed++
		case "skip":
			r.skipped++
		}
	case e.Action == "fail":
		c.result("go test", e.Package, false).broken = true
	}
}
