//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestGatewayStopped stops the gateway, as SIGSTOP does: what needs it fails with words that say what to do, what does not need it goes on, and when it goes on
// itself it does nothing that was asked of it long ago. It is left alone until somebody ends it, or everything.
func TestGatewayStopped(t *testing.T) {
	h := newHome(t)
	if err := os.MkdirAll(filepath.Join(h.dir, "policies"), 0o755); err != nil {
		t.Fatal(err)
	}
	h.policy("lab", "allow: [one.lab]\n")
	h.warren("create", "--name", "s", "--policy", "lab")
	pid := h.gatewayPID()
	gateway, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Before the home ends. It may have ended by then.
		gateway.Signal(syscall.SIGCONT)
		gateway.Release()
	})
	signal := func(s os.Signal) {
		t.Helper()
		if err := gateway.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	// refused runs what needs the gateway.
	refused := func(args ...string) {
		t.Helper()
		cmd := h.command(args...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		for _, want := range []string{"the gateway does not answer", fmt.Sprintf("process %d", pid), "it is stopped", fmt.Sprintf("kill -CONT %d", pid), fmt.Sprintf("kill -KILL %d", pid)} {
			if err == nil || !strings.Contains(out.String(), want) {
				t.Errorf("warren %s: %v, %q, want %q in it", strings.Join(args, " "), err, out.String(), want)
			}
		}
	}
	// logged waits until the daemon's log says something.
	logged := func(want string) {
		t.Helper()
		for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
			b, err := os.ReadFile(filepath.Join(h.dir, "logs", "daemon.log"))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(b), want) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the log never says %q", want)
			}
		}
	}

	signal(syscall.SIGSTOP)
	refused("create", "--name", "two", "--policy", "lab")
	refused("create", "--name", "two", "--policy", "lab")
	refused("doctor")
	refused("restart", "s") // which goes on below
	h.policy("lab", "allow: [two.lab]\n")
	logged("changes of policies do not count until this ends")
	// What does not need it goes on, also with another daemon.
	h.killDaemon()
	if got := h.warren("exec", "s", "--", "echo", "it goes on"); got != "it goes on" {
		t.Errorf("a command gives %q", got)
	}
	if testenv.Soak() {
		refused("create", "--name", "two", "--policy", "lab")
	}
	if got := h.warren("create", "--name", "without", "--policy", "none"); got == "" {
		t.Error("a sandbox without a network is not made")
	}
	signal(syscall.SIGCONT)
	for end := time.Now().Add(2 * time.Minute); !strings.Contains(h.warren("events", "--json"), "policy.change"); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the policy never changes")
		}
	}
	h.warren("create", "--name", "two", "--policy", "lab")
	if now := h.gatewayPID(); now != pid {
		t.Errorf("the gateway was process %d, and is %d", pid, now)
	}
	// What was asked of it while it was stopped, nobody waits for.
	b, err := os.ReadFile(filepath.Join(h.dir, "run", "gateway", "gateway.log"))
	if err != nil || !strings.Contains(string(b), "whoever asked for it has not waited") {
		t.Errorf("the gateway's log does not say that it has not done what nobody waits for: %v\n%s", err, b)
	}

	// Ended with all sandboxes while it is stopped, it is gone too.
	signal(syscall.SIGSTOP)
	h.warren("shutdown", "--sandboxes")
	if gateway.Signal(syscall.Signal(0)) == nil && !zombie(pid) {
		t.Errorf("the gateway, process %d, is left", pid)
	}
}

// zombie says whether a process has ended and is not reaped.
func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || bytes.Contains(b, []byte(") Z "))
}
