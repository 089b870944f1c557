package guest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/internal/guest/account"
)

func TestFurnish(t *testing.T) {
	skel := t.TempDir()
	write := func(dir, name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(skel, ".bashrc", "alias ll='ls -l'\n")
	write(skel, "huge", strings.Repeat("x", maxSkelBytes+1))
	if err := os.Symlink("/etc/shadow", filepath.Join(skel, "link")); err != nil {
		t.Fatal(err)
	}
	names := func(dir string) string {
		t.Helper()
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, e := range entries {
			list = append(list, e.Name())
		}
		return strings.Join(list, " ")
	}
	me := &account.User{Name: "me", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: t.TempDir()}
	if err := furnish(me, skel); err != nil {
		t.Fatal(err)
	}
	if got := names(me.Home); got != ".bashrc" {
		t.Errorf("an empty home got %q, want .bashrc alone", got)
	}

	me.Home = t.TempDir()
	write(me.Home, "work", "mine")
	if err := furnish(me, skel); err != nil {
		t.Fatal(err)
	}
	if got := names(me.Home); got != "work" {
		t.Errorf("a home in use became %q", got)
	}

	me.Home = filepath.Join(t.TempDir(), "missing")
	if err := furnish(me, skel); err == nil {
		t.Error("a missing home was no error")
	}
}
