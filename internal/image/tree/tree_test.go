package tree

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"golang.org/x/sys/unix"
)

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"": ".", ".": ".", "./": ".", "/": ".", "a": "a", "/a//b/./c/": "a/b/c", "..a": "..a", "a..": "a..", "...": "...",
		strings.Repeat("a/", MaxDepth): strings.TrimSuffix(strings.Repeat("a/", MaxDepth), "/"),
	} {
		if got, err := Clean(in); err != nil || got != want {
			t.Errorf("Clean(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"..", "/..", "a/../b", "a/..", "../a", "a\x00b", strings.Repeat("a", MaxComponent+1), strings.Repeat("a/", MaxDepth+1), strings.Repeat("aaaa/", 1000)} {
		if got, err := Clean(in); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("Clean(%q) = %q, %v; want an error", in, got, err)
		}
	}
}

// Nothing leads out of a tree, whatever the names and links in it say.
func TestConfined(t *testing.T) {
	top := t.TempDir()
	root := filepath.Join(top, "root")
	for name, content := range map[string]string{"secret": "outside", "root/secret": "inside", "root/d/f": "file"} {
		p := filepath.Join(top, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"up": "../secret", "abs": "/secret", "host": filepath.Join(top, "secret"), "dir": "../../..", "loop": "loop", "proc": "/proc/self/root"} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(root, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	tr, err := Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for name, want := range map[string]string{"secret": "inside", "../secret": "inside", "up": "inside", "abs": "inside", "dir/secret": "inside", "d/f": "file",
		"host": "", "loop": "", "fifo": "", "d": "", "proc/secret": "", "missing": ""} {
		b, err := tr.ReadFile(name, 100)
		if want == "" && err == nil || string(b) != want {
			t.Errorf("ReadFile(%s) = %q, %v; want %q", name, b, err, want)
		}
	}
	if _, err := tr.ReadFile("secret", 3); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a file above the limit: %v", err)
	}
	if _, err := tr.Lstat("missing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Lstat of what is missing: %v", err)
	}
	if got, err := tr.Readlink("up"); err != nil || got != "../secret" {
		t.Errorf("Readlink: %q, %v", got, err)
	}
	if _, err := tr.DirectoryStrict("dir"); !errors.Is(err, unix.ELOOP) {
		t.Errorf("DirectoryStrict through a link: %v", err)
	}
	if list, err := tr.ReadDir("dir"); err != nil || len(list) != 9 {
		t.Errorf("ReadDir through a link: %v, %v", list, err)
	}
}
