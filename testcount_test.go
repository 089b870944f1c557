package warren_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
)

// What the runners print, as they do: colours, both streams, runs that are repeated.
func TestTestCounter(t *testing.T) {
	for _, test := range []struct {
		name                    string
		stdout, stderr          string
		runners                 string
		passed, failed, skipped int
	}{
		{name: "go test", runners: "go test", passed: 2, failed: 1, stdout: "ok  \texample.com/app/parse\t0.012s\n" +
			"?   \texample.com/app/cmd\t[no test files]\n" +
			"--- FAIL: TestLex (0.00s)\n    lex_test.go:12: got 3, want 4\nFAIL\nFAIL\texample.com/app/lex\t0.004s\n" +
			"ok  \texample.com/app/print\t(cached)\tcoverage: 71.4% of statements\nFAIL\n"},
		{name: "go test of a package that does not build", runners: "go test", passed: 1, failed: 1, stderr: "# example.com/app/lex\nlex/lex.go:3:1: syntax error\n",
			stdout: "FAIL\texample.com/app/lex [build failed]\nok  \texample.com/app/parse\t0.012s\nFAIL\n"},
		{name: "go test -v", runners: "go test", passed: 3, failed: 2, skipped: 1, stdout: "=== RUN   TestA\n--- PASS: TestA (0.00s)\n=== RUN   TestB\n=== RUN   TestB/one\n=== RUN   TestB/two\n" +
			"    b_test.go:9: no\n--- FAIL: TestB (0.01s)\n    --- PASS: TestB/one (0.00s)\n    --- FAIL: TestB/two (0.00s)\n=== RUN   TestC\n    c_test.go:3: not here\n--- SKIP: TestC (0.00s)\nFAIL\nFAIL\texample.com/app\t0.013s\n" +
			"=== RUN   TestD\n--- PASS: TestD (0.00s)\nPASS\nok  \texample.com/app/d\t0.002s\nFAIL\n"},
		{name: "go test -v again, of which the last run counts", runners: "go test", passed: 2, stdout: "=== RUN   TestA\n--- FAIL: TestA (0.00s)\n=== RUN   TestB\n--- PASS: TestB (0.00s)\nFAIL\nFAIL\texample.com/app\t0.013s\nFAIL\n" +
			"=== RUN   TestA\n--- PASS: TestA (0.00s)\n=== RUN   TestB\n--- PASS: TestB (0.00s)\nPASS\nok  \texample.com/app\t0.013s\n"},
		{name: "a test binary by itself", runners: "go test", passed: 1, failed: 1, stdout: "=== RUN   TestA\n--- FAIL: TestA (0.00s)\n=== RUN   TestB\n--- PASS: TestB (0.00s)\nFAIL\n"},
		{name: "go test -json", runners: "go test", passed: 1, failed: 2, skipped: 1, stdout: `{"Time":"2026-05-01T10:00:00Z","Action":"start","Package":"example.com/app"}
{"Time":"2026-05-01T10:00:00Z","Action":"run","Package":"example.com/app","Test":"TestA"}
{"Time":"2026-05-01T10:00:00Z","Action":"output","Package":"example.com/app","Test":"TestA","Output":"--- PASS: TestA (0.00s)\n"}
{"Time":"2026-05-01T10:00:00Z","Action":"pass","Package":"example.com/app","Test":"TestA","Elapsed":0}
{"Time":"2026-05-01T10:00:00Z","Action":"fail","Package":"example.com/app","Test":"TestB","Elapsed":0}
{"Time":"2026-05-01T10:00:00Z","Action":"skip","Package":"example.com/app","Test":"TestC","Elapsed":0}
{"Time":"2026-05-01T10:00:00Z","Action":"fail","Package":"example.com/app","Elapsed":0.01}
{"ImportPath":"example.com/app/b","Action":"build-fail"}
{"Time":"2026-05-01T10:00:00Z","Action":"start","Package":"example.com/app/b"}
{"Time":"2026-05-01T10:00:00Z","Action":"output","Package":"example.com/app/b","Output":"FAIL\texample.com/app/b [build failed]\n"}
{"Time":"2026-05-01T10:00:00Z","Action":"fail","Package":"example.com/app/b","Elapsed":0,"FailedBuild":"example.com/app/b"}
`},
		{name: "pytest", runners: "pytest", passed: 10, failed: 3, skipped: 3, stdout: "============================= test session starts ==============================\nplatform linux -- Python 3.11.7, pytest-8.1.1, pluggy-1.4.0\nrootdir: /workspace\nconfigfile: pyproject.toml\ncollected 15 items\n\ntests/test_a.py ..F.                                                     [ 26%]\n\n" +
			"=================================== FAILURES ===================================\nFAILED tests/test_a.py::test_x - assert 3 == 4\n" +
			"==== 2 failed, 10 passed, 2 skipped, 1 xfailed, 4 warnings, 1 error in 0.12s ====\n"},
		{name: "pytest -q in colour", runners: "pytest", passed: 3, failed: 1, stdout: "..F.                                          [100%]\n\x1b[31m\x1b[31m\x1b[1m1 failed\x1b[0m, \x1b[32m3 passed\x1b[0m\x1b[31m in 62.10s (0:01:02)\x1b[0m\x1b[0m\n"},
		{name: "pytest twice", runners: "pytest", passed: 4, stdout: "1 failed, 3 passed in 0.02s\n4 passed in 0.01s\n"},
		{name: "jest", runners: "jest", passed: 7, failed: 1, skipped: 3, stderr: "PASS src/a.test.js\nFAIL src/b.test.js\n  ● adds\n\nTest Suites: 1 failed, 1 passed, 2 total\nTests:       1 failed, 2 skipped, 1 todo, 7 passed, 11 total\nSnapshots:   0 total\nTime:        1.532 s\nRan all test suites.\n"},
		{name: "vitest", runners: "vitest", passed: 3, failed: 1, skipped: 1, stdout: "\n\x1b[7m\x1b[1m\x1b[36m RUN \x1b[39m\x1b[22m\x1b[27m \x1b[36mv1.6.0\x1b[39m \x1b[90m/workspace\x1b[39m\n\n ✓ src/a.test.ts (3)\n ❯ src/b.test.ts (2)\n\n" +
			"\x1b[2m Test Files \x1b[22m \x1b[1m\x1b[31m1 failed\x1b[39m\x1b[22m\x1b[2m | \x1b[22m\x1b[1m\x1b[32m1 passed\x1b[39m\x1b[22m\x1b[90m (2)\x1b[39m\n\x1b[2m      Tests \x1b[22m \x1b[1m\x1b[31m1 failed\x1b[39m\x1b[22m\x1b[2m | \x1b[22m\x1b[1m\x1b[32m3 passed\x1b[39m\x1b[22m\x1b[2m | \x1b[22m\x1b[33m1 skipped\x1b[39m\x1b[90m (5)\x1b[39m\n   Start at  10:00:00\n   Duration  312ms\n"},
		{name: "mocha", runners: "mocha", passed: 12, failed: 2, skipped: 1, stdout: "\n\n  parser\n    ✔ reads (3ms)\n    1) fails\n\n\n  12 passing (34ms)\n  1 pending\n  2 failing\n\n  1) parser\n       fails:\n"},
		{name: "mocha again", runners: "mocha", passed: 14, stdout: "  12 passing (34ms)\n  2 failing\n\n  14 passing (1s)\n"},
		{name: "cargo test", runners: "cargo test", passed: 6, failed: 1, skipped: 1,
			stderr: "   Compiling app v0.1.0 (/workspace)\n    Finished `test` profile [unoptimized + debuginfo] target(s) in 0.54s\n     Running unittests src/lib.rs (target/debug/deps/app-0a1b2c3d4e5f6071)\n     Running tests/end.rs (target/debug/deps/end-1a1b2c3d4e5f6071)\n   Doc-tests app\n",
			stdout: "\nrunning 4 tests\ntest a ... ok\ntest b ... FAILED\n\ntest result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\nrunning 4 tests\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.20s\n"},
		{name: "two runners", runners: "go test pytest", passed: 3, stdout: "ok  \texample.com/app\t0.012s\n2 passed in 0.10s\n"},
		{name: "no end of line, carriage returns", runners: "jest", passed: 2, stdout: "Tests:       2 passed, 2 total\r\n\r"},
		{name: "none", stdout: "building\n3 passed the gate in 1889\nTests: none\n  5 passing cars\n{\"Action\":\"pass\"}\n--- a/x\n+++ b/x\nFAIL\nok\n" + strings.Repeat("=", 200_000) + "\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, step := range []int{1 << 20, 7, 1} {
				var c warren.TestCounter
				// Headings come before results, whichever stream they use.
				for piece := range slices.Chunk([]byte(test.stderr), step) {
					c.Stderr(piece)
				}
				for piece := range slices.Chunk([]byte(test.stdout), step) {
					c.Stdout(piece)
				}
				n := c.Count()
				if test.runners == "" {
					if n != nil {
						t.Fatalf("counted %+v", *n)
					}
					continue
				}
				if n == nil {
					t.Fatal("nothing was counted")
				}
				if got := strings.Join(n.Runners, " "); got != test.runners || n.Passed != test.passed || n.Failed != test.failed || n.Skipped != test.skipped {
					t.Errorf("in steps of %d: %+v, want %s: %d passed, %d failed, %d skipped", step, *n, test.runners, test.passed, test.failed, test.skipped)
				}
			}
		})
	}
}
