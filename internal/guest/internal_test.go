package guest

import (
	"net/http"
	"strings"
	"testing"
)

func TestDisposition(t *testing.T) {
	for in, want := range map[string][2]string{
		`form-data; name="file"; filename="/a/b c.txt"`:                  {"file", "/a/b c.txt"},
		`form-data; name=file; filename=x.txt`:                           {"file", "x.txt"},
		`form-data;NAME="file";FileName="a\"b\\c\d"`:                     {"file", `a"b\c\d`},
		`form-data; name="file"; filename="a;b=c"; x=y`:                  {"file", "a;b=c"},
		`form-data; name="file"; filename="%22q%22%0A"`:                  {"file", "\"q\"\n"},
		`form-data; name="file"; filename="100%25"`:                      {"file", "100%25"},
		`form-data; name="file"; filename*=UTF-8''%C3%A4%2Fb`:            {"file", "ä/b"},
		`form-data; name="file"; filename="plain"; filename*=utf-8''ext`: {"file", "ext"},
		`form-data; flag; name="file"`:                                   {"file", ""},
		`form-data; name="unterminated`:                                  {"unterminated", ""},
		`form-data`:                                                      {"", ""},
		``:                                                               {"", ""},
		`;;;=;`:                                                          {"", ""},
	} {
		if name, file := disposition(in); name != want[0] || file != want[1] {
			t.Errorf("disposition(%q) = %q, %q; want %q", in, name, file, want)
		}
	}
}

func FuzzDisposition(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/a/b c.txt"; filename*=UTF-8''x`)
	f.Add(`;="\`)
	f.Fuzz(func(t *testing.T, in string) {
		name, file := disposition(in)
		if len(name) > len(in) || len(file) > len(in) {
			t.Errorf("%q and %q from %q", name, file, in)
		}
	})
}

func TestWantsGzip(t *testing.T) {
	for in, want := range map[string]bool{"": false, "gzip": false, "gzip, deflate": false, "gzip, identity;q=0": true, "gzip;q=1, *; q=0": true,
		"identity;q=0": false, "gzip;q=0, identity;q=0": false} {
		r := &http.Request{Header: http.Header{"Accept-Encoding": {in}}}
		if got := wantsGzip(r); got != want {
			t.Errorf("%q: %t", in, got)
		}
	}
}

func TestParseCPU(t *testing.T) {
	busy, total := parseCPU("cpu  10 20 30 400 5 6 7 8 9 9\ncpu0 1 2 3\n")
	if busy != 10+20+30+6+7+8 || total != 486 {
		t.Errorf("%d of %d", busy, total)
	}
	for _, bad := range []string{"", "cpu", "cpu a b c d e", "intr 1 2 3 4 5"} {
		if busy, total := parseCPU(bad); busy != 0 || total != 0 {
			t.Errorf("%q: %d of %d", bad, busy, total)
		}
	}
}

func TestEnvironBlock(t *testing.T) {
	fields := make([]string, 52)
	for i := range fields {
		fields[i] = "0"
	}
	fields[0], fields[1], fields[49], fields[50] = "1", "(a) b (c)", "4096", "8192"
	if start, end := environBlock(strings.Join(fields, " ")); start != 4096 || end != 8192 {
		t.Errorf("%d to %d", start, end)
	}
	for _, bad := range []string{"", "1 (x) S", "no"} {
		if start, end := environBlock(bad); start != 0 || end != 0 {
			t.Errorf("%q: %d to %d", bad, start, end)
		}
	}
}

func FuzzProc(f *testing.F) {
	f.Add("cpu  10 20 30 400 5 6 7 8 9 9\nMemTotal: 12 kB\n1 (x) S 1 2 3")
	f.Fuzz(func(_ *testing.T, in string) {
		parseCPU(in)
		parseMeminfo(in)
		environBlock(in)
	})
}
