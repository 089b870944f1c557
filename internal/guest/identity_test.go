package guest_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/internal/guest"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// newLiving is a guest with a place for its files and for hooks.
func newLiving(t *testing.T) (s *sandbox, run, hooks string) {
	dir := t.TempDir()
	run, hooks = filepath.Join(dir, "run"), filepath.Join(dir, "hooks")
	for _, d := range []string{"fork.d", "resume.d"} {
		if err := os.MkdirAll(filepath.Join(hooks, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return newSandbox(t, func(c *guest.Config) { c.RunDir, c.HookDir = run, hooks }), run, hooks
}

func writeHook(t *testing.T, path, script string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // whatever the umask
		t.Fatal(err)
	}
}

// initAnswer is what /init says when hooks were run.
type initAnswer struct {
	Hooks []struct {
		Hook, Status string
		OK           bool
		Millis       int
	}
}

// become tells the guest of an event and returns its answer.
func (s *sandbox) become(t *testing.T, body string) (answer initAnswer) {
	t.Helper()
	resp, err := s.trusted().Post("http://guest/init", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	switch resp.StatusCode {
	case http.StatusNoContent:
	case http.StatusOK:
		if err := json.Unmarshal(text, &answer); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
	default:
		t.Fatalf("init: %s: %s", resp.Status, text)
	}
	return answer
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestIdentityAfterFork(t *testing.T) {
	s, run, _ := newLiving(t)
	s.become(t, `{"event":"start","sandboxId":"one","accessToken":"parent-token"}`)
	file := func(name string) string { return content(t, filepath.Join(run, name)) }
	generation, boot := file("generation"), file("boot-id")
	if file("sandbox-id") != "one\n" || len(generation) != 37 || len(boot) != 37 {
		t.Errorf("files after the start: %q %q %q", file("sandbox-id"), generation, boot)
	}
	old, err := os.Open(filepath.Join(run, "generation"))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	// The host may repeat itself; nothing has happened then.
	s.become(t, `{"event":"start","sandboxId":"one","accessToken":"parent-token"}`)
	if file("generation") != generation {
		t.Error("a repeated start is taken for another one")
	}
	status := func(token string) int {
		req, err := http.NewRequest(http.MethodGet, s.url("/metrics"), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Access-Token", token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if code := status("parent-token"); code != http.StatusOK {
		t.Fatalf("the token opens: %d", code)
	}

	s.become(t, `{"event":"fork","sandboxId":"two","parentId":"one","accessToken":"child-token","entropy":"`+
		base64.StdEncoding.EncodeToString(make([]byte, 32))+`"}`)
	if code := status("parent-token"); code != http.StatusUnauthorized {
		t.Errorf("the source's token in the fork: %d", code)
	}
	if code := status("child-token"); code != http.StatusOK {
		t.Errorf("the fork's own token: %d", code)
	}
	if file("sandbox-id") != "two\n" || file("generation") == generation || file("boot-id") == boot {
		t.Errorf("files after the fork: %q %q %q", file("sandbox-id"), file("generation"), file("boot-id"))
	}
	// Who has the file open, or mapped, sees the new one.
	same := make([]byte, 64)
	if n, err := old.ReadAt(same, 0); err != io.EOF || string(same[:n]) != file("generation") {
		t.Errorf("the file that was open holds %q, %v", same[:n], err)
	}
	for _, name := range []string{"generation", "sandbox-id", "boot-id"} {
		if st, err := os.Stat(filepath.Join(run, name)); err != nil || st.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v %v", name, st.Mode(), err)
		}
	}
	c := newClients(s.trusted(), "http://guest")
	if o := runScript(t, c, `echo $WARREN_SANDBOX_ID $E2B_SANDBOX_ID`); o.stdout != "two two\n" {
		t.Errorf("the environment says %q", o.stdout)
	}

	// A fork that is told no token opens to nobody but the host.
	s.become(t, `{"event":"fork","sandboxId":"three"}`)
	for _, token := range []string{"parent-token", "child-token", ""} {
		if code := status(token); code != http.StatusUnauthorized {
			t.Errorf("token %q in a fork without a token: %d", token, code)
		}
	}
	// A resume that is told none goes on with its own.
	s.become(t, `{"event":"fork","sandboxId":"four","accessToken":"four-token"}`)
	before := file("generation")
	s.become(t, `{"event":"resume","sandboxId":"four"}`)
	if code := status("four-token"); code != http.StatusOK || file("generation") == before {
		t.Errorf("after a resume: %d, generation changed: %v", code, file("generation") != before)
	}
}

func runScript(t *testing.T, c clients, script string) outcome { return run(t, c, shell(script)) }

func TestUnknownEvent(t *testing.T) {
	s, _, _ := newLiving(t)
	resp, err := s.trusted().Post("http://guest/init", "application/json", strings.NewReader(`{"event":"birth"}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("an event of no kind: %s", resp.Status)
	}
}

func TestHooks(t *testing.T) {
	s, runDir, hooks := newLiving(t)
	s.become(t, `{"event":"start","sandboxId":"one"}`)
	out := filepath.Join(t.TempDir(), "out")
	fork := filepath.Join(hooks, "fork.d")
	say := `echo "$0 $WARREN_EVENT $WARREN_SANDBOX_ID $WARREN_PARENT_ID $WARREN_GENERATION $(od -An -tx1 -v | tr -d ' \n')" >>` + out
	writeHook(t, filepath.Join(fork, "10-first"), say+"; echo printed; echo complained >&2", 0o755)
	writeHook(t, filepath.Join(fork, "20-fails"), "exit 3", 0o755)
	writeHook(t, filepath.Join(fork, "30-second"), say, 0o755)
	writeHook(t, filepath.Join(fork, "40-not-executable"), say, 0o644)
	writeHook(t, filepath.Join(fork, "50-backup~"), say, 0o755)
	writeHook(t, filepath.Join(fork, "60-anyone"), say, 0o777)
	writeHook(t, filepath.Join(hooks, "resume.d", "10-resume"), say, 0o755)

	answer := s.become(t, `{"event":"fork","sandboxId":"two","parentId":"one","entropy":"`+
		base64.StdEncoding.EncodeToString([]byte(strings.Repeat("e", 32)))+`"}`)
	var got []string
	for _, h := range answer.Hooks {
		got = append(got, fmt.Sprintf("%s %v %s", h.Hook, h.OK, h.Status))
	}
	want := []string{"fork.d/60-anyone false not run: others than root may write it or its directory", "fork.d/10-first true exit status 0",
		"fork.d/20-fails false exit status 3", "fork.d/30-second true exit status 0"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("hooks:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	lines := strings.Split(strings.TrimSpace(content(t, out)), "\n")
	if len(lines) != 2 {
		t.Fatalf("hooks wrote %q", lines)
	}
	var entropy []string
	for i, name := range []string{"10-first", "30-second"} {
		f := strings.Fields(lines[i])
		if len(f) != 6 || f[0] != filepath.Join(fork, name) || f[1] != "fork" || f[2] != "two" || f[3] != "one" ||
			f[4]+"\n" != content(t, filepath.Join(runDir, "generation")) || len(f[5]) != 64 {
			t.Errorf("hook %s wrote %q", name, lines[i])
			continue
		}
		entropy = append(entropy, f[5])
	}
	if len(entropy) == 2 && entropy[0] == entropy[1] {
		t.Error("two hooks get the same entropy")
	}
	log := content(t, filepath.Join(runDir, "hooks.log"))
	for _, part := range []string{"fork.d/10-first: exit status 0", "  printed\n", "  complained\n", "fork.d/20-fails: exit status 3", "60-anyone: not run"} {
		if !strings.Contains(log, part) {
			t.Errorf("the log lacks %q:\n%s", part, log)
		}
	}

	for _, event := range []string{"resume", "rollback"} {
		os.Remove(out)
		answer = s.become(t, `{"event":"`+event+`","sandboxId":"two"}`)
		if len(answer.Hooks) != 1 || answer.Hooks[0].Hook != "resume.d/10-resume" || !strings.Contains(content(t, out), " "+event+" two ") {
			t.Errorf("hooks of a %s: %+v %q", event, answer.Hooks, content(t, out))
		}
	}
	os.Remove(out)
	if answer = s.become(t, `{"event":"start","sandboxId":"other"}`); len(answer.Hooks) != 0 {
		t.Errorf("hooks of a start: %+v", answer.Hooks)
	}
	if o := runScript(t, newClients(s.trusted(), "http://guest"), "ls "+out); o.end.GetExitCode() == 0 {
		t.Error("a hook ran at a start")
	}
}

// TestHangingHook loses a little time and nothing else by a hook that does not end.
func TestHangingHook(t *testing.T) {
	s, runDir, hooks := newLiving(t)
	writeHook(t, filepath.Join(hooks, "fork.d", "10-hangs"), "trap '' TERM; echo begun; sleep 1000", 0o755)
	writeHook(t, filepath.Join(hooks, "fork.d", "20-floods"), "while :; do echo flood; done", 0o755)
	writeHook(t, filepath.Join(hooks, "fork.d", "30-hangs"), "exec sleep 1000", 0o755)
	writeHook(t, filepath.Join(hooks, "fork.d", "40-late"), "echo too late", 0o755)
	begin := time.Now()
	answer := s.become(t, `{"event":"fork","sandboxId":"two"}`)
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("/init took %v", took)
	}
	for i, want := range []string{"killed: it ran longer than 2s", "killed: it ran longer than 2s", "killed: it ran longer than", "not run: the time for all hooks, 5s, is used up"} {
		if i >= len(answer.Hooks) || answer.Hooks[i].OK || !strings.HasPrefix(answer.Hooks[i].Status, want) {
			t.Errorf("hook %d: %+v", i, answer.Hooks)
		}
	}
	log := content(t, filepath.Join(runDir, "hooks.log"))
	if len(log) > 64<<10 || !strings.Contains(log, "begun") || !strings.Contains(log, "flood") {
		t.Errorf("the log has %d bytes", len(log))
	}
	if o := runScript(t, newClients(s.trusted(), "http://guest"), "echo alive"); o.stdout != "alive\n" {
		t.Errorf("after it: %+v", o)
	}
}

func TestWatchLifecycle(t *testing.T) {
	s, runDir, _ := newLiving(t)
	transports(t, s, func(t *testing.T, c clients) {
		s.become(t, `{"event":"fork","sandboxId":"before","accessToken":""}`)
		st, err := c.guest.WatchLifecycle(testContext(t), connect.NewRequest(&guestv1.WatchLifecycleRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		if !st.Receive() || st.Msg().GetCurrent().GetSandboxId() != "before" {
			t.Fatalf("the first message: %v, %v", st.Msg(), st.Err())
		}
		first := st.Msg().GetCurrent().GetGeneration()
		for _, event := range []string{"fork", "resume", "rollback"} {
			s.become(t, `{"event":"`+event+`","sandboxId":"after","parentId":"before","accessToken":""}`)
			if !st.Receive() {
				t.Fatal(st.Err())
			}
			e := st.Msg().GetHappened()
			if e.GetEvent() != event || e.GetSandboxId() != "after" || e.GetParentId() != "before" || e.GetGeneration() == first ||
				e.GetGeneration()+"\n" != content(t, filepath.Join(runDir, "generation")) || time.Since(e.GetTime().AsTime()) > time.Minute {
				t.Errorf("event %v", e)
			}
		}
		once, err := c.guest.WatchLifecycle(testContext(t), connect.NewRequest(&guestv1.WatchLifecycleRequest{NoFollow: true}))
		if err != nil {
			t.Fatal(err)
		}
		defer once.Close()
		n := 0
		for once.Receive() {
			n++
			if once.Msg().GetCurrent().GetEvent() != "rollback" {
				t.Errorf("current: %v", once.Msg())
			}
		}
		if n != 1 || once.Err() != nil {
			t.Errorf("%d messages, %v", n, once.Err())
		}
	})
}

func TestHoldsInMetrics(t *testing.T) {
	s, run, _ := newLiving(t)
	s.become(t, `{"event":"start","sandboxId":"one"}`)
	type metrics struct {
		Holds, Clients *int
		HoldUntil      *time.Time
		Busy           *uint64 `json:"cpu_busy_ms"`
	}
	ask := func() (m metrics) {
		t.Helper()
		resp, err := s.trusted().Get("http://guest/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(&m); err != nil || m.Holds == nil || m.Clients == nil || m.Busy == nil {
			t.Fatalf("%+v, %v", m, err)
		}
		return m
	}
	if m := ask(); *m.Holds != 0 || m.HoldUntil != nil || *m.Clients != 0 || *m.Busy == 0 {
		t.Errorf("at first: %d holds until %v, %d clients, %d ms", *m.Holds, m.HoldUntil, *m.Clients, *m.Busy)
	}
	// The program is on the way, for everybody; only its directory is the sandbox's own.
	c := newClients(s.trusted(), "http://guest")
	if o := runScript(t, c, `readlink "$(command -v warren-hold)"`); o.stdout == "" {
		t.Errorf("warren-hold is not in PATH: %+v", o)
	}
	if err := os.WriteFile(filepath.Join(run, "hold", "mine"), []byte("30m"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, st := start(t, c, shell("sleep 100"))
	if m := ask(); *m.Holds != 1 || m.HoldUntil == nil || time.Until(*m.HoldUntil) > 30*time.Minute || time.Until(*m.HoldUntil) < 29*time.Minute || *m.Clients != 1 {
		t.Errorf("with a hold and a client: %d holds until %v, %d clients", *m.Holds, m.HoldUntil, *m.Clients)
	}
	st.Close()
	os.Remove(filepath.Join(run, "hold", "mine"))
	until(t, "the client and the hold are gone", func() bool {
		m := ask()
		return *m.Holds == 0 && m.HoldUntil == nil && *m.Clients == 0
	})
}

// TestAttachAfterRollback tells clients which past a stream begins in, and after a rollback where the output went on.
func TestAttachAfterRollback(t *testing.T) {
	s, _, _ := newLiving(t)
	s.become(t, `{"event":"start","sandboxId":"one"}`)
	transports(t, s, func(t *testing.T, c clients) {
		pid, st := start(t, c, shell("echo 1234; sleep 1000"))
		defer st.Close()
		for !strings.Contains(string(st.Msg().GetEvent().GetData().GetStdout()), "1234") {
			if !st.Receive() {
				t.Fatal(st.Err())
			}
		}
		defer c.guest.Signal(testContext(t), connect.NewRequest(&guestv1.SignalRequest{
			Process: &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Pid{Pid: pid}}, Signal: 9, Group: true}))
		attached := func() *guestv1.ProcessStatus {
			t.Helper()
			a, err := c.guest.Attach(testContext(t), connect.NewRequest(&guestv1.AttachRequest{
				Process: &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Pid{Pid: pid}}, FromSeq: -1}))
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if !a.Receive() || a.Msg().GetStart() == nil {
				t.Fatalf("no start: %v", a.Err())
			}
			return a.Msg().GetStart()
		}
		before := st.ResponseHeader().Get("Warren-Rollback")
		if got := attached(); before == "" || got.GetRollback() != before {
			t.Errorf("the start tells %q, the attach %q", before, got.GetRollback())
		}
		resp, err := s.trusted().Post("http://guest/warren/mark", "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		s.become(t, `{"event":"resume","sandboxId":"one"}`)
		if got := attached(); got.GetRollback() != before {
			t.Errorf("a resume is told as a rollback: %v", got)
		}
		s.become(t, `{"event":"rollback","sandboxId":"one"}`)
		got := attached()
		if got.GetRollback() == before || got.GetRollback() == "" || got.GetRollbackSeq() != 5 {
			t.Errorf("after the rollback: %v; before it: %q", got, before)
		}
		_, again := start(t, c, shell("true"))
		defer again.Close()
		if tells := again.ResponseHeader().Get("Warren-Rollback"); tells != got.GetRollback() {
			t.Errorf("a new start tells %q, not %q", tells, got.GetRollback())
		}
	})
}
