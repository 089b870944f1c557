package engine

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren"
)

// What stands among the policies and is none is told in words, and nothing waits for it.
func TestPolicyFiles(t *testing.T) {
	r, _ := secretRig(t)
	dir := filepath.Join(r.dir, "policies")
	at := func(name string) string { return filepath.Join(dir, name+".yaml") }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(syscall.Mkfifo(at("pipe"), 0o644))
	must(os.Mkdir(at("folder"), 0o755))
	must(os.Symlink("/dev/zero", at("zero")))
	l, err := net.Listen("unix", at("sock"))
	must(err)
	defer l.Close()
	for _, name := range []string{"open", "none"} {
		must(os.WriteFile(at(name), []byte("extends: open\n"), 0o644))
	}
	must(os.Symlink("nowhere", at("registries")))
	want := map[string]string{
		"pipe": "a named pipe", "folder": "a directory", "zero": "a device", "sock": "a socket",
		"open": "has the name of a preset", "registries": "has the name of a preset", "none": "no network at all",
	}
	list, err := r.Policies()
	must(err)
	seen := 0
	for _, p := range list {
		if w := want[p.Name]; w != "" {
			if seen++; !strings.Contains(p.Problem, w) || p.Preset || len(p.Source) > 0 {
				t.Errorf("%+v; want %q", p, w)
			}
		} else if p.Name == "locked" && (!p.Preset || p.Problem != "") {
			t.Errorf("%+v", p)
		}
	}
	if seen != len(want) {
		t.Errorf("%d of %d are listed: %+v", seen, len(want), list)
	}
	for name, w := range want {
		if name == "none" {
			continue
		}
		_, err := r.Create(t.Context(), operator, CreateRequest{Spec: Spec{Policy: name}}, nil)
		if err == nil || !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), dir) {
			t.Errorf("create with %s: %v", name, err)
		}
		if p := string(r.effective("s1", name).Source); !strings.HasPrefix(p, "extends: locked") {
			t.Errorf("in place of %s counts %q", name, p)
		}
	}
	// To have no network needs no file, and takes none.
	r.create(operator, Spec{Policy: "none"})
	for _, name := range []string{"./team.yaml", "team.yaml", "nosuch", "/etc/team"} {
		_, err := r.Create(t.Context(), operator, CreateRequest{Spec: Spec{Policy: name}}, nil)
		if err == nil || !strings.Contains(err.Error(), "NAME.yaml in the server's directory of policies, "+dir) || !strings.Contains(err.Error(), "locked") {
			t.Errorf("create with %s: %v", name, err)
		}
	}
	for name, w := range map[string]string{"open": "error", "none": "error", "Team": "warning", "team": ""} {
		found, _, err := r.CheckPolicy(name, []byte("allow: [one.example]\n"))
		if err != nil || (w == "") != (len(found) == 0) || w != "" && (found[0].Severity != w || !strings.Contains(found[0].Remedy, "rename the file")) {
			t.Errorf("check of %s.yaml: %+v, %v", name, found, err)
		}
	}
	if _, err := r.Policy("open"); !errors.Is(err, warren.ErrInvalid) {
		t.Error(err)
	}
}
