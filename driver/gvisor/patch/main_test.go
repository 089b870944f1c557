package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// TestPatch makes the copy from the module that this one needs, so all edits fit, and once only.
func TestPatch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gvisor")
	modfile, err := patch(dir)
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(modfile)
	if err != nil {
		t.Fatal(err)
	}
	_, copied, ok := strings.Cut(string(mod), "replace gvisor.dev/gvisor => ")
	if copied = strings.Trim(copied, "\"\n"); !ok || !strings.HasPrefix(copied, dir) {
		t.Fatalf("the go.mod does not use the copy:\n%s", mod)
	}
	for _, e := range edits {
		b, err := os.ReadFile(filepath.Join(copied, e.file))
		if err != nil || !strings.Contains(string(b), e.new) {
			t.Errorf("%s has no %q: %v", e.file, e.new, err)
		}
	}
	for _, s := range added {
		if _, err := os.Stat(filepath.Join(copied, s.to)); err != nil {
			t.Error(err)
		}
	}
	// A second time nothing is made; what others left goes when something is.
	mark := filepath.Join(copied, "mark")
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := patch(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("the copy was made again: %v", err)
	}

	// What is not a copy is left alone.
	mine := filepath.Join(dir, "mine")
	if err := os.Mkdir(mine, 0o755); err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(dir, "v0.0.0-20200101000000-0123456789ab-0123456789ab")
	if err := os.Mkdir(stale, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(copied); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := patch(dir); err != nil {
				t.Errorf("several at once: %v", err)
			}
		})
	}
	wg.Wait()
	if _, err := os.Stat(mine); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("an older copy is left: %v", err)
	}
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	defer func(was []edit) { edits = was }(edits)
	edits = append([]edit{{"pkg/aio/aio.go", "no such line", "x"}}, edits...)
	if _, err := patch(dir); err == nil || !strings.Contains(err.Error(), `pkg/aio/aio.go has "no such line" 0 times, want 1`) {
		t.Errorf("an edit that does not fit: %v", err)
	}
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("an edit that does not fit has cost the copy that was there: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "new-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestState saves and loads objects with the edited package, whose own tests are not in the module.
func TestState(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gvisor")
	modfile, err := patch(dir)
	if err != nil {
		t.Fatal(err)
	}
	copied, err := filepath.Glob(filepath.Join(dir, "v*"))
	if err != nil || len(copied) != 1 {
		t.Fatalf("copies: %v, %v", copied, err)
	}
	for _, name := range []string{"plain_test.go", "parallel_test.go"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(copied[0], "pkg", "state", "warren_"+name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "test", "-count=1", "-vet=off", "-modfile="+modfile, "-run", "TestPlain|TestParallel", "-v", module+"/pkg/state")
	cmd.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	for _, test := range []string{"TestPlainSize", "TestParallel"} {
		if err != nil || !strings.Contains(string(out), "--- PASS: "+test) {
			t.Fatalf("%s: %v\n%s", test, err, out)
		}
	}
}
