//go:build linux

package main

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestIntegrity holds memory and files to their hashes through pauses, rollbacks and forks of forks: each byte is what it was, and
// what another sandbox writes is not seen. With WARREN_SOAK it has gigabytes.
func TestIntegrity(t *testing.T) {
	files, memory, cycles, limit := 20, 32, 1, "512MiB"
	if testenv.Soak() {
		files, memory, cycles, limit = 2048, 512, 10, "1GiB"
	}
	h := newHome(t)
	hold, err := testenv.Build(t.TempDir(), "hold", "./cmd/warren/testdata/hold")
	if err != nil {
		t.Fatal(err)
	}
	h.warren("create", "--name", "s", "--memory", limit, "--disk", "4GiB")
	h.warren("cp", hold, "s:/var/tmp/hold")
	const program = "/var/tmp/hold"
	run := func(sb string, args ...string) string {
		t.Helper()
		return h.warren(append([]string{"exec", sb, "--", program}, args...)...)
	}
	// Most of the files are in the workspace, the rest among the changes of the root.
	trees := []string{"/workspace/tree", "/var/tmp/tree"}
	run("s", "make", trees[0], fmt.Sprint(files-files/8))
	run("s", "make", trees[1], fmt.Sprint(files/8))
	h.warren("exec", "-d", "s", "--", program, "serve", fmt.Sprint(memory))
	for i := 0; h.command("exec", "s", "--", program, "memory").Run() != nil; i++ {
		if i == 600 {
			t.Fatal("the process that holds memory does not answer")
		}
		time.Sleep(100 * time.Millisecond)
	}
	state := func(sb string) string {
		t.Helper()
		return run(sb, append([]string{"state"}, trees...)...)
	}
	change := func(sb string) string {
		t.Helper()
		before := state(sb)
		run(sb, "change-memory")
		for _, dir := range trees {
			run(sb, "change-files", dir)
		}
		after := state(sb)
		if after == before {
			t.Fatalf("%s does not change", sb)
		}
		return after
	}
	equal := func(sb, after, want string) {
		t.Helper()
		if got := state(sb); got != want {
			t.Errorf("%s after %s: %s\nwant %s", sb, after, got, want)
		}
	}
	for i := range cycles {
		begun := time.Now()
		want := state("s")

		h.warren("pause", "s")
		h.warren("resume", "s")
		equal("s", "a resume", want)

		h.warren("snapshot", "--name", "then", "s")
		equal("s", "a snapshot", want)
		change("s")
		h.warren("rollback", "s", "then")
		equal("s", "a rollback", want)

		// A child, and a child of that once it has gone its own way.
		h.warren("fork", "--name", "child", "s")
		equal("child", "a fork", want)
		its := change("child")
		h.warren("fork", "--name", "grandchild", "child")
		equal("grandchild", "a fork of a fork", its)
		change("grandchild")
		equal("child", "changes of its child", its)
		equal("s", "changes of its children", want)
		h.warren("pause", "child")
		h.warren("resume", "child")
		equal("child", "a resume", its)
		h.warren("rm", "s")
		equal("child", "the end of its source", its)

		// What a snapshot holds is whole by itself.
		h.warren("create", "--snapshot", "then", "--name", "s")
		equal("s", "a create from a snapshot whose sandbox is gone", want)
		h.warren("rm", "child", "grandchild")
		h.warren("snapshot", "rm", "then")
		change("s")
		t.Logf("cycle %d took %v", i+1, time.Since(begun).Round(time.Millisecond))
		if t.Failed() {
			break
		}
	}
	h.warren("rm", "s")
	for _, dir := range []string{"workspaces", "snapshots", "paused"} {
		left, err := filepath.Glob(filepath.Join(h.dir, dir, "[a-z]*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}
