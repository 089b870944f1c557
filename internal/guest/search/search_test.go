package search

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
)

func me() *account.User {
	return &account.User{Name: "me", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
}

func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func search(t *testing.T, root string, req *wire.SearchRequest) (matches []wire.Match, sum wire.SearchSummary, err error) {
	t.Helper()
	err = Search(context.Background(), me(), root, req, func(r *wire.SearchResponse) error {
		if r.Match != nil {
			matches = append(matches, *r.Match)
		} else {
			sum = *r.Summary
		}
		return nil
	})
	return matches, sum, err
}

// found returns the files in which something matched.
func found(t *testing.T, root string, req *wire.SearchRequest) []string {
	t.Helper()
	m, _, err := search(t, root, req)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, x := range m {
		rel, _ := filepath.Rel(root, x.Path)
		names = append(names, rel)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestWhichFilesAreSearched(t *testing.T) {
	root := tree(t, map[string]string{
		".git/HEAD": "x", ".git/info/exclude": "excluded.txt\n",
		".gitignore": "*.log\n!keep.log\n/only-top\nbuild/\ndeep/**/gen\n# comment\n\\#hash\nspace\\ \n",
		"a.txt":      "x", "b.log": "x", "keep.log": "x", "only-top": "x", "sub/only-top": "x", "build/o.txt": "x", "sub/build/o.txt": "x",
		"deep/gen/f": "x", "deep/er/est/gen/f": "x", "deep/er/other": "x", "#hash": "x", "excluded.txt": "x",
		".hidden": "x", ".dir/f": "x", "sub/.gitignore": "!b.log\na2.txt\n", "sub/b.log": "x", "sub/a2.txt": "x", "sub/a.txt": "x",
		"binary": "x\x00y", "late-binary": strings.Repeat("x\n", 10000) + "\x00",
	})
	if err := os.Symlink("a.txt", root+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("..", root+"/sub/up"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(root+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	want := []string{"a.txt", "deep/er/other", "keep.log", "sub/a.txt", "sub/b.log", "sub/only-top"}
	if got := found(t, root, &wire.SearchRequest{Pattern: "x"}); !slices.Equal(got, want) {
		t.Errorf("default: %q, want %q", got, want)
	}
	// From a directory inside the repository the rules above still hold.
	if got := found(t, root+"/sub", &wire.SearchRequest{Pattern: "x"}); !slices.Equal(got, []string{"a.txt", "b.log", "only-top"}) {
		t.Errorf("from below: %q", got)
	}
	if got := found(t, root, &wire.SearchRequest{Pattern: "x", All: true}); len(got) != 20 {
		t.Errorf("all: %d: %q", len(got), got)
	}
	for _, c := range []struct{ include, exclude, want []string }{
		{[]string{"*.txt"}, nil, []string{"a.txt", "sub/a.txt"}},
		{[]string{"sub/*"}, nil, []string{"sub/a.txt", "sub/b.log", "sub/only-top"}},
		{[]string{"deep/**"}, nil, []string{"deep/er/other"}},
		{nil, []string{"sub"}, []string{"a.txt", "deep/er/other", "keep.log"}},
		{nil, []string{"*.txt", "deep/"}, []string{"keep.log", "sub/b.log", "sub/only-top"}},
		{[]string{"[!k]*.log"}, nil, []string{"sub/b.log"}},
	} {
		if got := found(t, root, &wire.SearchRequest{Pattern: "x", Include: c.include, Exclude: c.exclude}); !slices.Equal(got, c.want) {
			t.Errorf("include %q exclude %q: %q, want %q", c.include, c.exclude, got, c.want)
		}
	}
	if got := found(t, root+"/b.log", &wire.SearchRequest{Pattern: "x"}); !slices.Equal(got, []string{"."}) {
		t.Errorf("a file that is named is searched whatever ignores it: %q", got)
	}
}

func TestGitignoreOutsideARepositoryIsNoRule(t *testing.T) {
	root := tree(t, map[string]string{"sub/f": "x"})
	if got := found(t, root, &wire.SearchRequest{Pattern: "x"}); !slices.Equal(got, []string{"sub/f"}) {
		t.Errorf("%q", got)
	}
}

func TestMatchLines(t *testing.T) {
	for _, c := range []struct {
		pattern, text string
		fixed, icase  bool
		want          []string // line:column:text
	}{
		{`b+`, "abb\nc\nbb", false, false, []string{"1:2:abb", "3:1:bb"}},
		{`^$`, "a\n\nb\n", false, false, []string{"2:1:"}},
		{`a*`, "", false, false, nil},
		{`$`, "a\nb", false, false, []string{"1:2:a", "2:2:b"}},
		{`a.c`, "a.c\nabc", true, false, []string{"1:1:a.c"}},
		{`ABC`, "xabc", true, true, []string{"1:2:xabc"}},
		{`a\s+b`, "a\nb\na b\n", false, false, []string{"3:1:a b"}},
		{`(?s)a.*b`, "a\na b\nb\nab", false, false, []string{"2:1:a b", "4:1:ab"}},
		{`[^x]y`, "a\ny\nby", false, false, []string{"3:1:by"}},
		{`x`, "x\r\nyx\r\n", false, false, []string{"1:1:x", "2:2:yx"}},
		{`\Ax`, "x\nx", false, false, []string{"1:1:x", "2:1:x"}},
		{`ü`, "aü", false, false, []string{"1:2:aü"}},
	} {
		re, err := compile(c.pattern, c.fixed, c.icase)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range matchLines(re, "p", []byte(c.text), 100, 0) {
			got = append(got, fmt.Sprintf("%d:%d:%s", m.Line, m.Column, m.Text))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%q in %q: %q, want %q", c.pattern, c.text, got, c.want)
		}
	}
	re, _ := compile("m", false, false)
	m := matchLines(re, "p", []byte("1\n2\nm\n4\n5\n6"), 10, 2)
	if len(m) != 1 || !slices.Equal(m[0].Before, []string{"1", "2"}) || !slices.Equal(m[0].After, []string{"4", "5"}) {
		t.Errorf("context: %+v", m)
	}
	m = matchLines(re, "p", []byte("m"+strings.Repeat("ä", 10000)), 10, 0)
	if len(m[0].Text) > maxText || !strings.HasSuffix(m[0].Text, "ä") {
		t.Errorf("a long line: %d bytes", len(m[0].Text))
	}
}

// FuzzMatchLines holds the search of whole files against one line by line.
func FuzzMatchLines(f *testing.F) {
	f.Add(`a\s*b|^c`, "a\nb\nab\nc\n")
	f.Add(`[^x]`, "x\n\ny")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		re, err := compile(pattern, false, false)
		if err != nil {
			return
		}
		var want []uint32
		for i, line := range strings.SplitAfter(text, "\n") {
			if line != "" && re.MatchString(strings.TrimSuffix(line, "\n")) {
				want = append(want, uint32(i+1))
			}
		}
		var got []uint32
		for _, m := range matchLines(re, "p", []byte(text), 1<<30, 1) {
			got = append(got, m.Line)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q in %q: lines %v, want %v", pattern, text, got, want)
		}
	})
}

func TestLimits(t *testing.T) {
	root := tree(t, map[string]string{"a": strings.Repeat("x\n", 5000), "b": strings.Repeat("x\n", 5000), "big": strings.Repeat("x", 2000)})
	m, sum, err := search(t, root, &wire.SearchRequest{Pattern: "x"})
	if err != nil || len(m) != defaultMatches || !sum.Truncated || sum.Matches != defaultMatches {
		t.Errorf("%d matches, %+v, %v", len(m), sum, err)
	}
	m, sum, err = search(t, root, &wire.SearchRequest{Pattern: "x", MaxMatches: 10001})
	if err != nil || len(m) != 10001 || sum.Truncated || sum.FilesSearched != 3 {
		t.Errorf("%d matches, %+v, %v", len(m), sum, err)
	}
	_, sum, err = search(t, root, &wire.SearchRequest{Pattern: "x", MaxFileBytes: 1000})
	if err != nil || sum.FilesSkipped != 3 || sum.FilesSearched != 0 {
		t.Errorf("%+v, %v", sum, err)
	}
	for _, bad := range []*wire.SearchRequest{{Pattern: ""}, {Pattern: "("}, {Pattern: strings.Repeat("a", maxPattern+1)}, {Pattern: "a", Include: []string{"["}},
		{Pattern: "a", Exclude: []string{"!a"}}, {Pattern: "a", Include: make([]string, maxGlobs+1)}} {
		var e *wire.Error
		if _, _, err := search(t, root, bad); !errors.As(err, &e) || e.Code != wire.InvalidArgument {
			t.Errorf("%.40q %q: %v", bad.Pattern, bad.Include, err)
		}
	}
	if _, _, err := search(t, root+"/gone", &wire.SearchRequest{Pattern: "x"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Search(ctx, me(), root, &wire.SearchRequest{Pattern: "x"}, func(*wire.SearchResponse) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestReplace(t *testing.T) {
	root := tree(t, map[string]string{"a": "foo bar foo\n", "b": "no\n", "c/d": "foo", "bin": "foo\x00"})
	if err := os.Chmod(root+"/a", 0o751); err != nil {
		t.Fatal(err)
	}
	replace := func(req *wire.ReplaceRequest) (*wire.ReplaceResponse, error) {
		return Replace(context.Background(), me(), root, req)
	}
	text := func(name string) string {
		data, _ := os.ReadFile(filepath.Join(root, name))
		return string(data)
	}
	r, err := replace(&wire.ReplaceRequest{Pattern: "foo", Replacement: "x", DryRun: true})
	if err != nil || r.Replacements != 3 || len(r.Files) != 2 || text("a") != "foo bar foo\n" {
		t.Errorf("dry run: %+v %v", r, err)
	}
	var e *wire.Error
	if _, err := replace(&wire.ReplaceRequest{Pattern: "foo", MaxFiles: 1}); !errors.As(err, &e) || e.Code != wire.FailedPrecondition || text("a") != "foo bar foo\n" {
		t.Errorf("too many: %v", err)
	}
	r, err = replace(&wire.ReplaceRequest{Pattern: `(f)(o+)`, Replacement: "$2-$1$$"})
	st, _ := os.Stat(root + "/a")
	if err != nil || r.Replacements != 3 || text("a") != "oo-f$ bar oo-f$\n" || text("c/d") != "oo-f$" || st.Mode().Perm() != 0o751 || text("bin") != "foo\x00" {
		t.Errorf("%+v %v %q %v", r, err, text("a"), st.Mode())
	}
	r, err = replace(&wire.ReplaceRequest{Pattern: "$", Replacement: "$1", Fixed: true})
	if err != nil || text("c/d") != "oo-f$1" {
		t.Errorf("fixed: %+v %v %q", r, err, text("c/d"))
	}
	entries, _ := os.ReadDir(root)
	if len(entries) != 4 {
		t.Errorf("something is left: %v", entries)
	}
}

func FuzzGitignore(f *testing.F) {
	f.Add("a/**/b", "a/x/y/b")
	f.Add("!/foo[!a]*/", "foob")
	f.Add(strings.Repeat("*a", 40), strings.Repeat("a", 200))
	f.Add(strings.Repeat("**/", 60), strings.Repeat("a/", 60))
	f.Fuzz(func(_ *testing.T, pattern, path string) {
		if len(pattern)+len(path) > 10_000 {
			return
		}
		if r, ok := parseRule(pattern); ok {
			r.matches(path, true)
		}
	})
}
