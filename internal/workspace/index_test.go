package workspace

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func FuzzIndex(f *testing.F) {
	dir := f.TempDir()
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"}} {
		if err := os.WriteFile(filepath.Join(dir, "a name"), []byte("x"), 0o644); err != nil {
			f.Fatal(err)
		}
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			f.Fatalf("%v %s", err, out)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, ".git/index"))
	if err != nil {
		f.Fatal(err)
	}
	x, err := parseIndex(b, "sha1")
	if err != nil || len(x.entries) != 1 || x.entries[0].name != "a name" || !bytes.Equal(x.seal(), b) {
		f.Fatalf("%+v %v", x, err)
	}
	f.Add(b, false)
	f.Add(b[:len(b)-5], true)
	f.Add([]byte("DIRC\x00\x00\x00\x02\xff\xff\xff\xff0000000000000000000000000000"), false)
	f.Fuzz(func(t *testing.T, b []byte, long bool) {
		format := "sha1"
		if long {
			format = "sha256"
		}
		if x, err := parseIndex(b, format); err == nil {
			for _, e := range x.entries {
				_ = x.raw[e.at+61]
			}
			x.seal()
		}
	})
}
