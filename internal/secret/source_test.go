package secret

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestSource(t *testing.T) {
	for text, want := range map[string]string{
		"": "of no kind", "file:": "not absolute", "file:key": "not absolute", "env:": "no name", "env:A=B": "no name", "kms:/bin/kms": "needs an id", "kms:a=kms": "needs an id",
		"hex:00112233": "of no kind",
	} {
		if _, err := ParseSource(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	path := filepath.Join(t.TempDir(), "key")
	one, err := ParseSource("file:" + path)
	if err != nil || one.String() != "file:"+path || one.Variable() != "" {
		t.Fatalf("%v, %v", one, err)
	}
	box, err := one.Box()
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := box.Seal(t.Context(), "name", []byte("a-secret-value"))
	if err != nil {
		t.Fatal(err)
	}
	two, _ := ParseSource("file:" + path)
	if v, err := two.Open(t.Context(), "name", sealed); err != nil || string(v) != "a-secret-value" {
		t.Fatalf("%q, %v", v, err)
	}
	// The key changes under the feet of one that has its box open.
	if _, err := RotateFile(path); err != nil {
		t.Fatal(err)
	}
	three, _ := ParseSource("file:" + path)
	if box, err = three.Box(); err != nil {
		t.Fatal(err)
	}
	if sealed, err = box.Seal(t.Context(), "name", []byte("another-value")); err != nil {
		t.Fatal(err)
	}
	if v, err := two.Open(t.Context(), "name", sealed); err != nil || string(v) != "another-value" {
		t.Errorf("after the key has changed: %q, %v", v, err)
	}
	t.Setenv("WARREN_TEST_KEY", strings.Repeat("0123456789abcdef", 4))
	env, err := ParseSource("env:WARREN_TEST_KEY")
	if err != nil || env.Variable() != "WARREN_TEST_KEY" {
		t.Fatal(err)
	}
	if _, err := env.Open(t.Context(), "name", sealed); err == nil {
		t.Error("another key opens it")
	}
}
