package warren_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// at returns the files below a directory.
func at(t testing.TB, sb *warren.Sandbox, dir string) *warren.FS {
	t.Helper()
	f, err := sb.FS().WithContext(t.Context()).Dir(strings.TrimPrefix(dir, "/"))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFS(t *testing.T) {
	_, sb := newSandbox(t)
	dir := t.TempDir()
	f := at(t, sb, dir)
	big := make([]byte, 3<<20)
	rand.Read(big)
	for name, data := range map[string][]byte{"a.txt": []byte("hello"), "empty": nil, "sub/deep/b.bin": big[:300], "sub/ünïcode name & more": []byte("x")} {
		if err := f.WriteFile(name, data, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.MkdirAll("void/dir", 0o700); err != nil {
		t.Fatal(err)
	}
	os.Symlink("a.txt", filepath.Join(dir, "link"))
	os.Symlink("sub", filepath.Join(dir, "dirlink"))
	if err := fstest.TestFS(f, "a.txt", "empty", "sub/deep/b.bin", "sub/ünïcode name & more", "void/dir", "link"); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteFile("sub/deep/b.bin", big, 0); err != nil {
		t.Fatal(err)
	}
	if got, err := f.ReadFile("sub/deep/b.bin"); err != nil || !bytes.Equal(got, big) {
		t.Errorf("ReadFile: %d bytes, %v", len(got), err)
	}
	info, err := f.Stat("void/dir")
	if err != nil || info.Mode() != fs.ModeDir|0o700 {
		t.Errorf("Stat: %v, %v", info, err)
	}
	if info, err = f.Lstat("link"); err != nil || info.Mode().Type() != fs.ModeSymlink {
		t.Errorf("Lstat: %v, %v", info, err)
	}
	if target, err := f.ReadLink("link"); err != nil || target != filepath.Join(dir, "a.txt") {
		t.Errorf("ReadLink: %q, %v", target, err)
	}

	// Changes.
	w, err := f.Create("new/stream")
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := w.Write(big[:10_000]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, "new/stream")); err != nil || info.Size() != 1_000_000 {
		t.Errorf("Create wrote %v, %v", info, err)
	}
	if err := f.WriteFile("script", []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, "script")); err != nil || info.Mode() != 0o755 {
		t.Errorf("WriteFile with 0755: %v, %v", info, err)
	}
	if err := f.Rename("script", "moved/script"); err != nil {
		t.Fatal(err)
	}
	if err := f.Remove("moved"); !errors.Is(err, warren.ErrState) {
		t.Errorf("Remove of a directory with a file: %v", err)
	}
	if err := f.Remove("moved/script"); err != nil {
		t.Error(err)
	}
	if err := f.Remove("moved"); err != nil {
		t.Error(err)
	}
	if err := f.RemoveAll("sub"); err != nil {
		t.Error(err)
	}
	if err := f.RemoveAll("sub"); err != nil {
		t.Errorf("RemoveAll of nothing: %v", err)
	}

	// Seeks and ranges.
	file, err := f.Open("new/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	part := make([]byte, 100)
	if n, err := file.(io.ReaderAt).ReadAt(part, 999_950); n != 50 || err != io.EOF || !bytes.Equal(part[:50], big[9_950:10_000]) {
		t.Errorf("ReadAt: %d, %v", n, err)
	}
	if _, err := file.(io.Seeker).Seek(-10, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(file); err != nil || !bytes.Equal(got, big[9_990:10_000]) {
		t.Errorf("after Seek: %d bytes, %v", len(got), err)
	}
}

func TestFSErrors(t *testing.T) {
	s, sb := newSandbox(t)
	dir := t.TempDir()
	f := at(t, sb, dir)
	os.Mkdir(filepath.Join(dir, "dir"), 0o755)
	os.WriteFile(filepath.Join(dir, "file"), nil, 0o644)
	gone, _ := s.Client().Ref("gone").FS().Dir("tmp")
	for _, test := range []struct {
		name string
		call func(f *warren.FS) error
		want error
	}{
		{"stat", func(f *warren.FS) error { _, err := f.Stat("no"); return err }, fs.ErrNotExist},
		{"open", func(f *warren.FS) error { _, err := f.Open("no"); return err }, fs.ErrNotExist},
		{"read", func(f *warren.FS) error { _, err := f.ReadFile("no/file"); return err }, fs.ErrNotExist},
		{"read a directory", func(f *warren.FS) error { _, err := f.ReadFile("dir"); return err }, warren.ErrInvalid},
		{"readdir", func(f *warren.FS) error { _, err := f.ReadDir("no"); return err }, fs.ErrNotExist},
		{"readdir a file", func(f *warren.FS) error { _, err := f.ReadDir("file"); return err }, warren.ErrInvalid},
		{"readlink a file", func(f *warren.FS) error { _, err := f.ReadLink("file"); return err }, fs.ErrInvalid},
		{"mkdir", func(f *warren.FS) error { return f.Mkdir("dir") }, fs.ErrExist},
		{"mkdir below a file", func(f *warren.FS) error { return f.MkdirAll("file/dir", 0) }, warren.ErrInvalid},
		{"rename", func(f *warren.FS) error { return f.Rename("no", "other") }, fs.ErrNotExist},
		{"remove", func(f *warren.FS) error { return f.Remove("no") }, fs.ErrNotExist},
		{"chmod", func(f *warren.FS) error { return f.Chmod("no", 0o600) }, fs.ErrNotExist},
		{"up", func(f *warren.FS) error { _, err := f.Open("../etc/passwd"); return err }, fs.ErrInvalid},
		{"absolute", func(f *warren.FS) error { return f.WriteFile("/etc/passwd", nil, 0) }, fs.ErrInvalid},
		{"create with a bad name", func(f *warren.FS) error { _, err := f.Create("a//b"); return err }, fs.ErrInvalid},
		{"watch", func(f *warren.FS) error {
			for _, err := range f.Watch("no", false) {
				return err
			}
			return nil
		}, fs.ErrNotExist},
		{"other user's file", func(f *warren.FS) error { _, err := f.WithUser("nobody").ReadDir("."); return err }, fs.ErrPermission},
		{"unknown user", func(f *warren.FS) error { _, err := f.WithUser("no-such-user").ReadDir("."); return err }, warren.ErrDenied},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "other user's file" {
				testenv.NeedsRoot(t)
				os.Chmod(dir, 0o700)
			}
			err := test.call(f)
			if !errors.Is(err, test.want) {
				t.Errorf("%v; want %v", err, test.want)
			}
			var pe *fs.PathError
			if !errors.As(err, &pe) {
				t.Errorf("%T is not a *fs.PathError", err)
			}
			if test.want == fs.ErrNotExist {
				if err := test.call(gone); !errors.Is(err, warren.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
					t.Errorf("in a sandbox that is gone: %v", err)
				}
			}
		})
	}
}

func TestFSWatch(t *testing.T) {
	_, sb := newSandbox(t)
	f := at(t, sb, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for e, err := range f.WithContext(ctx).Watch(".", true) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Op == "" {
			if err := f.WriteFile("new", []byte("x"), 0); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if e.Name == "new" && e.Op == "create" {
			return
		}
	}
}

func TestSearchAndReplace(t *testing.T) {
	_, sb := newSandbox(t)
	dir := t.TempDir()
	f := at(t, sb, dir)
	f.WriteFile("a.go", []byte("package a\n\nfunc old() {}\n"), 0)
	f.WriteFile("b.txt", []byte("old old\n"), 0)
	var sum warren.SearchSummary
	var got []string
	for m, err := range sb.Search(t.Context(), warren.Query{Path: dir, Pattern: `ol[d]`, Include: []string{"*.go"}, Context: 1, Summary: &sum}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m.Text)
		if m.Line != 3 || m.Column != 6 || len(m.Before) != 1 {
			t.Errorf("%+v", m)
		}
	}
	if !slices.Equal(got, []string{"func old() {}"}) || sum.Matches != 1 {
		t.Errorf("matches %q, summary %+v", got, sum)
	}
	files, err := sb.Replace(t.Context(), warren.Replacement{Path: dir, Pattern: "old", With: "new"})
	if err != nil || len(files) != 2 {
		t.Fatalf("Replace: %+v, %v", files, err)
	}
	if data, _ := f.ReadFile("b.txt"); string(data) != "new new\n" {
		t.Errorf("after Replace: %q", data)
	}
	for _, err := range sb.Search(t.Context(), warren.Query{Path: dir, Pattern: "("}) {
		if !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("bad pattern: %v", err)
		}
	}
	for _, err := range sb.Search(t.Context(), warren.Query{Path: dir + "/no", Pattern: "x"}) {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("missing path: %v", err)
		}
	}
}

func TestCopy(t *testing.T) {
	_, sb := newSandbox(t)
	src, inside, dst := t.TempDir(), t.TempDir(), t.TempDir()
	os.MkdirAll(filepath.Join(src, "tree/sub"), 0o755)
	os.WriteFile(filepath.Join(src, "tree/run"), []byte("#!"), 0o755)
	os.WriteFile(filepath.Join(src, "tree/sub/data"), bytes.Repeat([]byte("x"), 300_000), 0o600)
	os.Symlink("sub/data", filepath.Join(src, "tree/link"))
	os.Symlink("/etc/passwd", filepath.Join(src, "tree/out"))

	if n, err := sb.CopyTo(t.Context(), filepath.Join(src, "tree"), inside, warren.CopyOptions{}); err != nil || n.Files != 5 {
		t.Fatalf("CopyTo: %+v, %v", n, err)
	}
	if info, err := os.Stat(filepath.Join(inside, "tree/run")); err != nil || info.Mode() != 0o755 {
		t.Errorf("run: %v, %v", info, err)
	}
	// Files and directories tell how far they are, both ways.
	for _, c := range []struct {
		name     string
		copy     func(context.Context, string, string, warren.CopyOptions) (*warren.Copied, error)
		from, to string
		total    int64
	}{
		{"file in", sb.CopyTo, filepath.Join(src, "tree/sub/data"), inside + "/one", 300_000},
		{"file out", sb.CopyFrom, inside + "/one", filepath.Join(dst, "one"), 300_000},
		{"directory in", sb.CopyTo, filepath.Join(src, "tree"), inside + "/again", 0},
		{"directory out", sb.CopyFrom, inside + "/again", filepath.Join(dst, "again"), 0},
	} {
		var last, of int64
		_, err := c.copy(t.Context(), c.from, c.to, warren.CopyOptions{Progress: func(done, total int64) {
			if done <= last {
				t.Errorf("%s: from %d to %d", c.name, last, done)
			}
			last, of = done, total
		}})
		if err != nil || last < 300_000 || c.total > 0 && last != c.total || of != c.total {
			t.Errorf("%s: %d of %d, %v", c.name, last, of, err)
		}
	}
	var warnings []string
	n, err := sb.CopyFrom(t.Context(), inside+"/tree", dst, warren.CopyOptions{Warn: func(m string) { warnings = append(warnings, m) }})
	if err != nil || n.Skipped != 1 || len(warnings) != 1 || !strings.Contains(warnings[0], "/etc/passwd") {
		t.Fatalf("CopyFrom: %+v, %v, %q", n, err, warnings)
	}
	if data, err := os.ReadFile(filepath.Join(dst, "tree/link")); err != nil || len(data) != 300_000 {
		t.Errorf("through the link: %d bytes, %v", len(data), err)
	}
	if info, err := os.Stat(filepath.Join(dst, "tree/sub/data")); err != nil || info.Mode() != 0o600 {
		t.Errorf("data: %v, %v", info, err)
	}
	// Contents, and a new name.
	if _, err := sb.CopyFrom(t.Context(), inside+"/tree/.", filepath.Join(dst, "other"), warren.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dst, "other/run")); err != nil {
		t.Error(err)
	}
	// Files.
	if _, err := sb.CopyTo(t.Context(), filepath.Join(src, "tree/run"), inside+"/renamed", warren.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if n, err := sb.CopyFrom(t.Context(), inside+"/renamed", dst, warren.CopyOptions{}); err != nil || n.Bytes != 2 {
		t.Errorf("CopyFrom of a file: %+v, %v", n, err)
	}
	if info, err := os.Stat(filepath.Join(dst, "renamed")); err != nil || info.Mode() != 0o755 {
		t.Errorf("renamed: %v, %v", info, err)
	}
	// Limits.
	_, err = sb.CopyFrom(t.Context(), inside+"/tree", filepath.Join(dst, "small"), warren.CopyOptions{MaxBytes: 1000})
	if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("beyond MaxBytes: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dst, "small/sub/data")); err == nil {
		t.Error("a part of a file that was too large is left")
	}
	if _, err := sb.CopyFrom(t.Context(), inside+"/tree", filepath.Join(dst, "few"), warren.CopyOptions{MaxFiles: 2}); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("beyond MaxFiles: %v", err)
	}
	for _, call := range []func() error{
		func() error { _, err := sb.CopyFrom(t.Context(), "/no/such", dst, warren.CopyOptions{}); return err },
		func() error {
			_, err := sb.CopyTo(t.Context(), filepath.Join(src, "no"), inside, warren.CopyOptions{})
			return err
		},
	} {
		if err := call(); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("missing source: %v", err)
		}
	}
}
