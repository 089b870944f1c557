//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// counts is a process whose memory must go on: it writes each number once, and never again.
const counts = `i=0; while :; do i=$((i+1)); echo $i >>/workspace/count; sleep 0.01; done`

// TestKillDuringPause kills the daemon at each step of a pause and of a resume. The next one finds the sandbox running or
// paused, it goes on where it was, and there is one of it.
func TestKillDuringPause(t *testing.T) {
	h := newHome(t)
	id := h.warren("create", "--name", "s")
	h.warren("exec", "-d", "s", "--", "sh", "-c", counts)
	last := func() int {
		t.Helper()
		n, err := strconv.Atoi(h.warren("exec", "s", "--", "tail", "-n", "1", "count"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	state := func() string {
		t.Helper()
		for range 600 {
			out := h.warren("inspect", "s", "--json")
			for _, s := range []string{"running", "paused", "failed"} {
				if strings.Contains(out, `"state":"`+s+`"`) {
					return s
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Fatal("the sandbox never comes to rest")
		return ""
	}
	for _, point := range []string{
		"pause.intent", "pause.written", "pause.kept", "pause.paused", "pause.removed",
		"resume.intent", "resume.restored", "resume.running", "resume.dropped",
	} {
		verb, _, _ := strings.Cut(point, ".")
		before := last()
		if verb == "resume" {
			h.warren("pause", "s")
		}
		h.warren("shutdown")
		serve := h.command("serve")
		serve.Env = append(serve.Env, "WARREN_FAILPOINTS=engine."+point+"=kill")
		var log bytes.Buffer
		serve.Stdout, serve.Stderr = &log, &log
		if err := serve.Start(); err != nil {
			t.Fatal(err)
		}
		// One that does not come to the point ends by itself, which is no kill.
		late := time.AfterFunc(30*time.Second, func() { serve.Process.Signal(syscall.SIGTERM) })
		url := "unix://" + filepath.Join(h.dir, "warren.sock")
		for i := 0; h.command("--url", url, "ls").Run() != nil; i++ {
			if i == 200 {
				t.Fatalf("%s: the daemon does not answer\n%s", point, log.Bytes())
			}
			time.Sleep(20 * time.Millisecond)
		}
		// With an address of its own it starts no other daemon.
		call := h.command("--url", url, verb, "s")
		var said bytes.Buffer
		call.Stdout, call.Stderr = &said, &said
		if err := call.Start(); err != nil {
			t.Fatal(err)
		}
		err := serve.Wait()
		late.Stop()
		call.Process.Kill()
		call.Wait()
		if !killed(err) {
			t.Fatalf("%s: the daemon ended with %v\n%s\n%s", point, err, said.Bytes(), log.Bytes())
		}
		is := state()
		if is == "paused" {
			h.warren("resume", "s")
		}
		if is == "failed" {
			t.Fatalf("%s: the sandbox failed\n%s", point, h.warren("inspect", "s"))
		}
		after := last()
		time.Sleep(100 * time.Millisecond)
		if now := last(); after < before || now <= after {
			t.Errorf("%s (found %s): the count was %d, is %d and then %d", point, is, before, after, now)
		}
		if n := len(h.sentries(id)); n != 1 {
			t.Errorf("%s (found %s): %d processes run the sandbox", point, is, n)
		}
		if left := h.entries("paused"); len(left) != 0 {
			t.Errorf("%s (found %s): images left of a running sandbox: %v", point, is, left)
		}
	}
	out := h.warren("exec", "s", "--", "sh", "-c", `i=0; while read x; do i=$((i+1)); [ $x = $i ] || { echo $x after $i; break; }; done <count`)
	if out != "" {
		t.Errorf("a number is missing or was written twice: %s", out)
	}
}

// killed says whether a process ended by SIGKILL.
func killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	ws, ok := exit.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// sentries are the host's processes that are the kernel of a sandbox. One that came from the pool has another name there.
func (h *home) sentries(id string) (pids []string) {
	h.t.Helper()
	var meta struct{ Container string }
	record, err := os.ReadFile(filepath.Join(h.dir, "run", "gvisor", "sandboxes", id, "meta.json"))
	if err == nil {
		err = json.Unmarshal(record, &meta)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.t.Fatal(err)
	}
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		h.t.Fatal(err)
	}
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err == nil && bytes.HasPrefix(b, []byte("runsc-sandbox")) && (bytes.Contains(b, []byte(id)) || meta.Container != "" && bytes.Contains(b, []byte(meta.Container))) {
			pids = append(pids, p)
		}
	}
	return pids
}

// busyServer closes connections that are made to it, so that the ports of their clients are in TIME_WAIT at its end, and then goes on answering.
const busyServer = `
import socket, threading
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", 8000))
s.listen(100)
def serve():
    while True:
        c, _ = s.accept()
        c.sendall(b"hi")
        c.close()
threading.Thread(target=serve).start()
for _ in range(12000):
    c = socket.create_connection(("127.0.0.1", 8000))
    while c.recv(10): pass
    c.close()
open("/tmp/ready", "w").close()
`

// TestResumedPorts connects to a port that had many connections just before a pause: after it the kernel inside takes a new one from the same port as one of them
// for an old one of it, and does not answer.
func TestResumedPorts(t *testing.T) {
	h := newHome(t)
	h.warren("create", "--name", "s")
	cmd := h.command("exec", "-i", "s", "--", "sh", "-c", "cat >/tmp/busy.py")
	cmd.Stdin = strings.NewReader(busyServer)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	h.warren("exec", "-d", "s", "--", "python3", "/tmp/busy.py")
	h.warren("exec", "s", "--", "sh", "-c", "until [ -e /tmp/ready ]; do sleep 0.1; done")
	h.warren("pause", "s")
	c, err := warren.Connect(t.Context(), warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	box, err := c.Sandbox(t.Context(), "s")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		conn, err := box.Dial(t.Context(), 8000)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if got, err := io.ReadAll(conn); string(got) != "hi" {
			t.Errorf("connection %d: %q, %v", i, got, err)
		}
		conn.Close()
	}
}
