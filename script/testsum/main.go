// Command testsum runs go test and tells what happened in one line that counts: it prints each package as it ends, the whole output
// of every test that failed, the reason of every skip, and a verdict. Its arguments go to go test as they are.
//
//	go run ./script/testsum -timeout 15m ./...
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(stderr, "testsum:", err)
		return 1
	}
	start := time.Now()
	s := &summary{out: stdout, output: map[string][]string{}}
	readErr := s.read(out)
	waitErr := cmd.Wait()
	if readErr != nil {
		fmt.Fprintln(stderr, "testsum:", readErr)
	}
	return s.verdict(time.Since(start), errors.Join(readErr, waitErr))
}

// event is a line of go test -json; see go doc test2json.
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	Elapsed     float64
	FailedBuild string
}

type summary struct {
	out io.Writer
	// output of tests that have not ended, by package and test; of a build, by its import path.
	output                    map[string][]string
	passed, failed, skipped   int
	packages                  int
	failures, skips, packFail []string
	// slow holds every test that ended.
	slow []timed
}

// timed is a test and how many seconds it took.
type timed struct {
	name    string
	seconds float64
}

// slowest is how many of the longest tests are named.
const slowest = 40

func (s *summary) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(s.out, "%s", line)
			} else {
				s.add(e)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) add(e event) {
	key := e.Package + "\x00" + e.Test
	switch e.Action {
	case "output":
		s.output[key] = append(s.output[key], e.Output)
		return
	case "build-output":
		s.output[e.ImportPath] = append(s.output[e.ImportPath], e.Output)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	text := s.output[key]
	delete(s.output, key)
	if e.Test == "" {
		s.endPackage(e, text)
		return
	}
	name := e.Package + " " + e.Test
	s.slow = append(s.slow, timed{name, e.Elapsed})
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		s.failures = append(s.failures, name)
		fmt.Fprintf(s.out, "--- %s\n%s", name, strings.Join(text, ""))
	case "skip":
		s.skipped++
		s.skips = append(s.skips, name+": "+reason(text))
	}
}

func (s *summary) endPackage(e event, text []string) {
	if e.Action == "skip" {
		return // no test files
	}
	s.packages++
	word := "ok  "
	if e.Action == "fail" {
		word = "FAIL"
		s.packFail = append(s.packFail, e.Package)
		fmt.Fprint(s.out, strings.Join(text, ""))
		if e.FailedBuild != "" {
			fmt.Fprint(s.out, strings.Join(s.output[e.FailedBuild], ""))
		}
		// A test that never ended, such as one that a panic or the time limit cut short, has said so in its own output.
		s.cutShort(e.Package)
	}
	fmt.Fprintf(s.out, "%s %-60s %6.1fs\n", word, e.Package, e.Elapsed)
}

// cutShort counts the tests of a package, or of all, that began and did not end as failed, and prints what they had said.
func (s *summary) cutShort(pkg string) {
	for _, key := range slices.Sorted(maps.Keys(s.output)) {
		name, test, isTest := strings.Cut(key, "\x00")
		if !isTest || test == "" || pkg != "" && name != pkg {
			continue
		}
		fmt.Fprint(s.out, strings.Join(s.output[key], ""))
		delete(s.output, key)
		s.failed++
		s.failures = append(s.failures, name+" "+test+" (did not end)")
	}
}

// reason returns what a test said before it was skipped.
func reason(text []string) string {
	for _, line := range text {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			return line
		}
	}
	return "no reason given"
}

func (s *summary) verdict(elapsed time.Duration, err error) int {
	if err != nil {
		s.cutShort("") // go test itself was ended, and could not tell of any package
	}
	slices.SortFunc(s.slow, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, t := range s.slow[:min(len(s.slow), slowest)] {
		if t.seconds >= 1 {
			fmt.Fprintf(s.out, "slow %6.1fs %s\n", t.seconds, t.name)
		}
	}
	slices.Sort(s.skips)
	for _, line := range s.skips {
		fmt.Fprintln(s.out, "skip", line)
	}
	for _, line := range s.failures {
		fmt.Fprintln(s.out, "failed", line)
	}
	for _, line := range s.packFail {
		fmt.Fprintln(s.out, "failed package", line)
	}
	word, code := "PASS", 0
	if err != nil || s.failed > 0 || len(s.packFail) > 0 || s.passed == 0 {
		word, code = "FAIL", 1
	}
	if err != nil && err.Error() != "exit status 1" || err != nil && s.failed == 0 && len(s.packFail) == 0 {
		fmt.Fprintln(s.out, "go test:", err)
	}
	fmt.Fprintf(s.out, "%s: %d passed, %d failed, %d skipped in %d packages (%s)\n",
		word, s.passed, s.failed, s.skipped, s.packages, elapsed.Round(time.Second))
	return code
}
