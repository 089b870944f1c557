package repocheck

import (
	"bytes"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// tracked returns the files that git has or would add, by their path from the root.
func tracked(t *testing.T) []string {
	t.Helper()
	testenv.NeedsTool(t, "git")
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = testenv.Repo(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if fi, err := os.Lstat(filepath.Join(cmd.Dir, name)); err == nil && fi.Mode().IsRegular() {
			files = append(files, name)
		}
	}
	if len(files) < 50 {
		t.Fatalf("only %d files", len(files))
	}
	return files
}

// source is a Go file of this module.
type source struct {
	name      string
	text      []byte
	file      *ast.File
	set       *token.FileSet
	generated bool
}

func sources(t *testing.T) (list []source) {
	t.Helper()
	root := testenv.Repo(t)
	for _, name := range tracked(t) {
		if !strings.HasSuffix(name, ".go") || strings.Contains("/"+name, "/testdata/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, text, parser.ParseComments)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		list = append(list, source{name, text, file, set, ast.IsGenerated(file)})
	}
	return list
}

func TestFormatted(t *testing.T) {
	for _, s := range sources(t) {
		if want, err := format.Source(s.text); err == nil && !bytes.Equal(want, s.text) {
			t.Errorf("%s is not formatted; run gofmt -w", s.name)
		}
	}
}

// A skip that is not counted is a test that nobody misses.
func TestSkipsInOnePlace(t *testing.T) {
	for _, s := range sources(t) {
		if strings.HasPrefix(s.name, "internal/testenv/") {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			recv, ok := sel.X.(*ast.Ident)
			skips := sel.Sel.Name == "Skip" || sel.Sel.Name == "Skipf" || sel.Sel.Name == "SkipNow"
			if ok && skips && (recv.Name == "t" || recv.Name == "b" || recv.Name == "f" || recv.Name == "tb") {
				t.Errorf("%s: %s.%s: skip with testenv.Skip, which counts it and fails where nothing may be skipped", s.set.Position(call.Pos()), recv.Name, sel.Sel.Name)
			}
			return true
		})
	}
}

func TestDocumented(t *testing.T) {
	packages := map[string]bool{} // directory → has a package comment
	for _, s := range sources(t) {
		if s.generated || strings.HasSuffix(s.name, "_test.go") {
			continue
		}
		dir := filepath.Dir(s.name)
		packages[dir] = packages[dir] || s.file.Doc != nil
		for _, d := range s.file.Decls {
			for _, name := range undocumented(d) {
				t.Errorf("%s: %s has no comment", s.set.Position(d.Pos()), name)
			}
		}
	}
	for dir, ok := range packages {
		if !ok {
			t.Errorf("%s: no file has a package comment", dir)
		}
	}
}

// undocumented returns the exported names of a declaration that no comment describes.
func undocumented(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if !d.Name.IsExported() || d.Doc != nil {
			return nil
		}
		if d.Recv != nil && !ast.IsExported(receiver(d.Recv.List[0].Type)) {
			return nil
		}
		return []string{d.Name.Name}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() && d.Doc == nil && spec.Doc == nil {
					names = append(names, spec.Name.Name)
				}
			case *ast.ValueSpec:
				for _, n := range spec.Names {
					// A comment on the group, or on the line, is one.
					if n.IsExported() && d.Doc == nil && spec.Doc == nil && spec.Comment == nil {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	return names
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// forbidden texts, put together here so that this file holds none of them.
var forbidden = []struct {
	pattern *regexp.Regexp
	why     string
	// except are files that need it.
	except []string
}{
	{regexp.MustCompile("-----BEGIN " + "(?:[A-Z]+ )?PRIVATE KEY-----\\s*[A-Za-z0-9+/=]{40,}"), "a private key", nil},
	{regexp.MustCompile(`\b` + "AKIA" + `[0-9A-Z]{16}\b`), "a cloud key", nil},
	{regexp.MustCompile(`\b` + "gh[pousr]_" + `[A-Za-z0-9]{36}\b`), "a GitHub token", nil},
	{regexp.MustCompile(`\b` + "xox[bap]-" + `[0-9A-Za-z-]{20,}`), "a Slack token", nil},
	{regexp.MustCompile("/wo" + "rk/(?:main|shared)"), "the path of one machine", nil},
	{regexp.MustCompile(`(?m)(?://|#|/\*).*\b(?:TO` + `DO|FIX` + `ME|XX` + `X)\b`), "a promise of later work", []string{"script/", ".ci/"}},
}

func TestTrackedFiles(t *testing.T) {
	root := testenv.Repo(t)
	host, _ := os.Hostname()
	for _, name := range tracked(t) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > 2<<20 {
			t.Errorf("%s has %d bytes; a repository is no place for it", name, len(text))
		}
		if len(host) > 6 && strings.Contains(string(text), host) {
			t.Errorf("%s holds this machine's name", name)
		}
		if bytes.HasPrefix(text, []byte("\x7fELF")) {
			t.Errorf("%s is a program", name)
		}
	rules:
		for _, f := range forbidden {
			for _, e := range f.except {
				if strings.HasPrefix(name, e) {
					continue rules
				}
			}
			if m := f.pattern.Find(text); m != nil {
				t.Errorf("%s holds %s: %.40q", name, f.why, m)
			}
		}
	}
}

func TestLicence(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(testenv.Repo(t), "LICENSE"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "Apache License") || !strings.Contains(string(text), "Version 2.0") {
		t.Error("LICENSE is not the Apache License 2.0")
	}
}
