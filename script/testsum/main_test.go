package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestVerdict(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		err      error
		code     int
		want     []string
	}{
		{
			name: "all pass",
			in: `{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"skip","Package":"empty"}
{"Action":"pass","Package":"p","Elapsed":0.5}
`,
			want: []string{"ok   p", "PASS: 1 passed, 0 failed, 0 skipped in 1 packages"},
		},
		{
			name: "a failure shows its output",
			in: `{"Action":"output","Package":"p","Test":"A","Output":"secret of life\n"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p"}
`,
			err: errors.New("exit status 1"), code: 1,
			want: []string{"secret of life", "failed p A", "FAIL: 0 passed, 1 failed"},
		},
		{
			name: "a build that fails",
			in: `{"ImportPath":"p [p.test]","Action":"build-output","Output":"undefined: x\n"}
{"ImportPath":"p [p.test]","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}
{"Action":"pass","Package":"q","Test":"A"}
`,
			err: errors.New("exit status 1"), code: 1,
			want: []string{"undefined: x", "failed package p", "FAIL: 1 passed"},
		},
		{
			name: "a test that never ended counts as failed",
			in: `{"Action":"output","Package":"p","Test":"A","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"p"}
`,
			err: errors.New("exit status 1"), code: 1,
			want: []string{"panic: test timed out", "failed p A (did not end)", "1 failed"},
		},
		{
			name: "go test itself fails",
			in:   `{"Action":"pass","Package":"p","Test":"A"}` + "\n",
			err:  errors.New("signal: killed"), code: 1,
			want: []string{"go test: signal: killed", "FAIL: 1 passed"},
		},
		{
			name: "go test is ended within a test",
			in: `{"Action":"pass","Package":"p","Test":"A"}
{"Action":"output","Package":"q","Test":"B","Output":"=== RUN B\n"}
{"Action":"output","Package":"q","Test":"B","Output":"waits\n"}
`,
			err: errors.New("signal: terminated"), code: 1,
			want: []string{"waits", "failed q B (did not end)", "go test: signal: terminated", "FAIL: 1 passed, 1 failed"},
		},
		{
			name: "nothing ran",
			code: 1, want: []string{"FAIL: 0 passed"},
		},
		{
			name: "a skip tells why",
			in: `{"Action":"output","Package":"p","Test":"A","Output":"=== RUN A\n"}
{"Action":"output","Package":"p","Test":"A","Output":"    x_test.go:3: needs a moon\n"}
{"Action":"skip","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"B"}
{"Action":"pass","Package":"p"}
`,
			want: []string{"skip p A: x_test.go:3: needs a moon", "PASS: 1 passed, 0 failed, 1 skipped"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			s := &summary{out: &out, output: map[string][]string{}}
			if err := s.read(strings.NewReader(tt.in)); err != nil {
				t.Fatal(err)
			}
			if code := s.verdict(time.Second, tt.err); code != tt.code {
				t.Errorf("code %d, want %d", code, tt.code)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("output lacks %q:\n%s", want, &out)
				}
			}
		})
	}
}
