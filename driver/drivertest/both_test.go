//go:build linux

package drivertest_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/drivertest"
)

// TestWorkspaceMoves opens one workspace under gVisor and under Docker by turns: each finds what the other left, with the same
// owners, and can change it.
func TestWorkspaceMoves(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, driver.DiskIDBase+driver.SandboxUID, driver.DiskIDBase+driver.SandboxUID); err != nil {
		t.Fatal(err)
	}
	harnesses := []drivertest.Harness{gvisorHarness(t), dockerHarness(t, ""), dockerHarness(t, "runsc")}
	want := ""
	for turn := range 2 * len(harnesses) {
		h := harnesses[turn%len(harnesses)]
		t.Run(fmt.Sprintf("%d %s", turn, h.Name), func(t *testing.T) {
			d := h.New(t)
			defer d.Close()
			id := warren.SandboxID("s" + strings.ToLower(rand.Text()[:19]))
			spec := h.Spec(t, id)
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			spec.Mounts = []driver.Mount{{Dir: f, Source: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
			if err := d.Create(t.Context(), spec); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := d.Delete(t.Context(), id); err != nil {
					t.Error(err)
				}
			}()
			g := drivertest.NewGuest(t, d, id)
			g.Init(t.Context(), fmt.Sprintf(`{"defaultUser":"user","defaultWorkdir":"/workspace","sandboxId":%q,"envVars":{}}`, id))
			run := func(user, line string) string {
				t.Helper()
				r := g.Shell(t.Context(), user, "cd /workspace && "+line)
				if r.Code != 0 {
					t.Fatalf("%s: %q: %s %s", user, line, r.Status, r.Stderr)
				}
				return strings.TrimSuffix(r.Stdout, "\n")
			}
			if turn > 0 {
				if got := run("user", "cat log"); got != want {
					t.Errorf("the log reads %q, want %q", got, want)
				}
				if got := run("user", "stat -c '%u:%g %a' log script link root | tr '\\n' ' '"); got != "1000:1000 644 1000:1000 750 1000:1000 777 0:0 600 " {
					t.Errorf("owners and modes: %q", got)
				}
				if got := run("user", "./script"); got != fmt.Sprintf("made in turn %d", turn-1) {
					t.Errorf("the script of the turn before says %q", got)
				}
			}
			run("user", fmt.Sprintf("umask 022; echo turn %d >> log; printf '#!/bin/sh\\necho made in turn %d\\n' > new && chmod 750 new && mv new script; ln -sfn log link", turn, turn))
			run("root", "echo of root > root; chmod 600 root; chown 0:0 root")
			want = strings.TrimPrefix(want+fmt.Sprintf("\nturn %d", turn), "\n")
		})
	}
}
