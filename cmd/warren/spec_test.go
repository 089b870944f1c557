package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren"
)

func TestParseRepo(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"work/.git", "work/sub", "bare.git", "odd@name/.git"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		in       string
		local    bool
		url, ref string
	}{
		{"https://example.com/a/b", true, "https://example.com/a/b", ""},
		{"https://example.com/a/b@v1.2", true, "https://example.com/a/b", "v1.2"},
		{"https://example.com/a/b.git@feature/x", false, "https://example.com/a/b.git", "feature/x"},
		{"https://me@example.com/a/b", true, "https://me@example.com/a/b", ""},
		{"https://me:pw@example.com:8443/a/b@main", true, "https://me:pw@example.com:8443/a/b", "main"},
		{"ssh://git@example.com/a/b@main", true, "ssh://git@example.com/a/b", "main"},
		{"git@example.com:a/b.git", true, "git@example.com:a/b.git", ""},
		{"git@example.com:a/b.git@main", false, "git@example.com:a/b.git", "main"},
		{"file:///srv/x.git@abc123", true, "file:///srv/x.git", "abc123"},
		{dir + "/work", true, dir + "/work", ""},
		{dir + "/work@feature/x", true, dir + "/work", "feature/x"},
		{dir + "/work/sub", true, dir + "/work", ""},
		{dir + "/bare.git@v1", true, dir + "/bare.git", "v1"},
		{dir + "/odd@name", true, dir + "/odd@name", ""},
		{dir + "/odd@name@v2", true, dir + "/odd@name", "v2"},
		{"/srv/there@v1", false, "/srv/there", "v1"},
	} {
		got, err := parseRepo(tt.in, tt.local)
		if err != nil {
			t.Errorf("parseRepo(%q): %v", tt.in, err)
			continue
		}
		if got.URL != tt.url || got.Ref != tt.ref {
			t.Errorf("parseRepo(%q) = %q %q, want %q %q", tt.in, got.URL, got.Ref, tt.url, tt.ref)
		}
	}
	for _, tt := range []struct {
		in    string
		local bool
		want  error
	}{
		{"https://example.com", true, warren.ErrInvalid},
		{"https://example.com/a@", true, warren.ErrInvalid},
		{"relative", false, warren.ErrInvalid},
		{dir + "/nowhere", true, warren.ErrNotFound},
	} {
		if got, err := parseRepo(tt.in, tt.local); !errors.Is(err, tt.want) {
			t.Errorf("parseRepo(%q) = %+v, %v; want %v", tt.in, got, err, tt.want)
		}
	}
}

func TestParseMount(t *testing.T) {
	for in, want := range map[string]warren.Mount{
		"/a:/b":         {Source: "/a", Target: "/b"},
		"/a:/b:ro":      {Source: "/a", Target: "/b"},
		"/a:/b/../c:rw": {Source: "/a", Target: "/c", Writable: true},
	} {
		got, err := parseMount(in, true)
		if err != nil || got != want {
			t.Errorf("parseMount(%q) = %+v, %v; want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "/a", "/a:b", ":/b", "/a:/b:rx", "/a:/b:ro:rw", "/a:/b:"} {
		if got, err := parseMount(in, true); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("parseMount(%q) = %+v, %v; want ErrInvalid", in, got, err)
		}
	}
	if _, err := parseMount("a:/b", false); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a relative path for a remote server: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("WARREN_TEST_HERE", "from here")
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte("# comment\n\nA=1\nB=x=y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := environment([]string{file}, []string{"A=2", "C=", "WARREN_TEST_HERE"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"A": "2", "B": "x=y", "C": "", "WARREN_TEST_HERE": "from here"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"=x", "", "WARREN_TEST_NOT_SET"} {
		if _, err := environment(nil, []string{bad}); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("environment(%q): %v", bad, err)
		}
	}
	if _, err := environment([]string{"/nonexistent"}, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func TestEnvFileLines(t *testing.T) {
	name := filepath.Join(t.TempDir(), "vars")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("x", 100<<10)
	write("A=1\nLONG=" + long + "\n")
	if env, err := environment([]string{name}, nil); err != nil || env["LONG"] != long || env["A"] != "1" {
		t.Errorf("a line of 100 KiB: %d bytes, %v", len(env["LONG"]), err)
	}
	write("A=1\n\nLONG=" + strings.Repeat("x", 2<<20) + "\n")
	if _, err := environment([]string{name}, nil); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "vars:3: ") || !strings.Contains(err.Error(), "1 MiB") {
		t.Errorf("a line of 2 MiB: %v", err)
	}
}
