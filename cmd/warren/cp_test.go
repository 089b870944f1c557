package main

import "testing"

func TestSplitPlace(t *testing.T) {
	for in, want := range map[string]place{
		"fix:":       {"fix", "/workspace"},
		"fix:a/b":    {"fix", "a/b"},
		"fix:/etc/x": {"fix", "/etc/x"},
		"fix:/":      {"fix", "/"},
		"here":       {"", "here"},
		"./a:b":      {"", "./a:b"},
		"/a:b":       {"", "/a:b"},
		`C:\x`:       {"", `C:\x`},
		"-":          {"", "-"},
		":x":         {"", ":x"},
		"fix:a:b":    {"fix", "a:b"},
	} {
		if got := splitPlace(in); got != want {
			t.Errorf("splitPlace(%q) = %+v, want %+v", in, got, want)
		}
	}
}

func TestFSName(t *testing.T) {
	for in, want := range map[string]string{"a": "workspace/a", "/etc/x": "etc/x", "/": ".", "../..": ".", "a/../b/": "workspace/b"} {
		if got := fsName(in); got != want {
			t.Errorf("fsName(%q) = %q, want %q", in, got, want)
		}
	}
}
