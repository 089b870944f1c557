//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestScripts runs the whole system: the real programs, a daemon and a keeper for each script, gVisor below them. What a
// script starts is gone at its end, or the test fails.
//
// Besides testscript's own commands there are:
//
//	code N COMMAND…     runs a command that has to exit with N; -stdin FILE gives it an input
//	eventually COMMAND… runs a command again until it succeeds, for at most 30 s
//	killall FILE        kills every process of the sandbox whose id FILE holds, with SIGKILL, from the host
//	freeze FILE         stops the kernel of the sandbox whose id FILE holds, and with it its guest, until thaw FILE
//	killdaemon          kills the daemon with SIGKILL
//	lab                 serves names and web servers of an internet of the script's own, see startLab; labhits prints what they saw
//	policy NAME FILE    makes FILE a policy of the server, with variables such as $LAB_HTTP replaced, and writes that as NAME.policy too
//	killgateway         kills the gateway with SIGKILL
//	unpath FILE         prints FILE without the data directory and ids, for cmp
//
// The condition [soak] is met in the long form of the tests, and [memory] where sandboxes can be paused with their memory.
func TestScripts(t *testing.T) {
	p := scriptParams(t, scriptServer{memory: true})
	p.Dir = filepath.Join("..", "..", "testdata", "script")
	testscript.Run(t, p)
}

// scriptServer is what the daemons of scripts are to be like.
type scriptServer struct {
	// homes is where their data directories are made, by default where temporary files are.
	homes string
	// env is added to their environment.
	env []string
	// prepare changes a data directory that has just been made.
	prepare func(home string) error
	// memory says that the driver keeps the memory of sandboxes.
	memory bool
}

func scriptParams(t *testing.T, s scriptServer) testscript.Params {
	t.Helper()
	testenv.NeedsRoot(t)
	testenv.NeedsTool(t, "git", "tar")
	bin := testenv.NeedsBinaries(t)
	return testscript.Params{
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Condition: func(cond string) (bool, error) {
			switch cond {
			case "soak":
				return testenv.Soak(), nil
			case "memory":
				return s.memory, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Setup: func(env *testscript.Env) error {
			// Short, because sockets lie below it.
			home, err := os.MkdirTemp(s.homes, "warren-script-")
			if err != nil {
				return err
			}
			if s.prepare != nil {
				if err := s.prepare(home); err != nil {
					return err
				}
			}
			before, err := testenv.TakeSnapshot(home)
			if err != nil {
				return err
			}
			env.Setenv("PATH", bin.Dir+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("WARREN_HOME", home)
			env.Setenv("HOME", filepath.Join(env.WorkDir, "home"))
			env.Setenv("DOCKER_HOST", testenv.NoEngine)
			env.Setenv("WARREN_POOL", testenv.Pool)
			env.Setenv("GIT_CONFIG_NOSYSTEM", "1")
			env.Vars = append(env.Vars, s.env...)
			for _, who := range []string{"AUTHOR", "COMMITTER"} {
				env.Setenv("GIT_"+who+"_NAME", "Ada")
				env.Setenv("GIT_"+who+"_EMAIL", "ada@example.com")
			}
			if err := os.Mkdir(filepath.Join(env.WorkDir, "home"), 0o755); err != nil {
				return err
			}
			env.Defer(func() { cleanUp(t, env.T(), bin, home, s.env, before) })
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":       scriptCode,
			"eventually": scriptEventually,
			"killall":    scriptKillAll,
			"freeze":     scriptFreeze(syscall.SIGSTOP),
			"thaw":       scriptFreeze(syscall.SIGCONT),
			"killdaemon": scriptKillDaemon,
			"unpath":     scriptUnpath,

			"lab": startLab, "labhits": scriptLabHits, "policy": scriptPolicy, "killgateway": scriptKillGateway,
			"canary": func(ts *testscript.TestScript, neg bool, args []string) { scriptCanary(t, ts, neg, args) },
		},
	}
}

// cleanUp ends what a script left running on purpose, and complains about the rest.
func cleanUp(t *testing.T, script testscript.T, bin testenv.Binaries, home string, env []string, before *testenv.Snapshot) {
	cmd := exec.Command(bin.Warren, "shutdown", "--sandboxes")
	cmd.Env = slices.Concat(os.Environ(), env, []string{"WARREN_HOME=" + home, "WARREN_URL="})
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("shutdown: %v\n%s", err, out)
	}
	log := remarks(home)
	before.Note()
	if err := os.RemoveAll(home); err != nil {
		t.Errorf("remove the data directory: %v", err)
	}
	if left := before.WaitClean(15 * time.Second); len(left) > 0 {
		t.Errorf("left behind:\n  %s\nlog:\n%s", strings.Join(left, "\n  "), log)
	} else if failed, ok := script.(interface{ Failed() bool }); ok && failed.Failed() {
		script.Log("log of the daemon:\n" + log)
	}
}

// remarks returns the log of the daemon without its lines about requests.
func remarks(home string) string {
	log, _ := os.ReadFile(logPath(home))
	var b strings.Builder
	for line := range strings.Lines(string(log)) {
		if !strings.Contains(line, `"msg":"request"`) {
			b.WriteString(line)
		}
	}
	return b.String()
}

func scriptCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N [-stdin FILE] COMMAND…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

func scriptEventually(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: eventually COMMAND…")
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := ts.Exec(args[0], args[1:]...)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("still fails after 30 s: %v", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// sandboxPIDs finds the host processes of a sandbox by its control group, which carries the name that its execution was made under:
// the sandbox's id, or one of its own when it was made before it was asked for.
func sandboxPIDs(home, id string) ([]int, error) {
	record, err := os.ReadFile(filepath.Join(home, "run", "gvisor", "sandboxes", id, "meta.json"))
	if err != nil {
		return nil, err
	}
	var meta struct{ ID, Container string }
	if err := json.Unmarshal(record, &meta); err != nil {
		return nil, err
	}
	made := cmp.Or(meta.Container, meta.ID)
	groups, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range groups {
		data, err := os.ReadFile(name)
		if err != nil {
			continue // ended meanwhile
		}
		for _, line := range strings.Split(string(data), "\n") {
			if strings.HasSuffix(line, "/"+made) {
				pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
				if err != nil {
					return nil, err
				}
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids, nil
}

func scriptKillAll(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: killall FILE")
	}
	id := strings.TrimSpace(ts.ReadFile(args[0]))
	if len(id) < 12 {
		ts.Fatalf("%q is no whole id", id)
	}
	pids, err := sandboxPIDs(ts.Getenv("WARREN_HOME"), id)
	ts.Check(err)
	if len(pids) == 0 {
		ts.Fatalf("sandbox %s has no process", id)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			ts.Fatalf("kill %d: %v", pid, err)
		}
	}
}

func scriptFreeze(sig syscall.Signal) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) != 1 {
			ts.Fatalf("usage: freeze FILE, thaw FILE")
		}
		id := strings.TrimSpace(ts.ReadFile(args[0]))
		if len(id) < 12 {
			ts.Fatalf("%q is no whole id", id)
		}
		pids, err := sandboxPIDs(ts.Getenv("WARREN_HOME"), id)
		ts.Check(err)
		found := false
		for _, pid := range pids {
			cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err == nil && strings.HasPrefix(string(cmdline), "runsc-sandbox") {
				found = true
				ts.Check(syscall.Kill(pid, sig))
			}
		}
		if !found {
			ts.Fatalf("the kernel of sandbox %s is not among %v", id, pids)
		}
	}
}

func scriptKillDaemon(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: killdaemon")
	}
	dir := ts.Getenv("WARREN_HOME")
	pid, err := daemonPID(dir)
	ts.Check(err)
	if pid == 0 {
		ts.Fatalf("no daemon runs")
	}
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
	deadline := time.Now().Add(10 * time.Second)
	for {
		now, err := daemonPID(dir)
		ts.Check(err)
		if now != pid {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("the daemon %d does not die", pid)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func scriptUnpath(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: unpath FILE")
	}
	text := strings.ReplaceAll(ts.ReadFile(args[0]), ts.Getenv("WARREN_HOME"), "$WARREN_HOME")
	fmt.Fprint(ts.Stdout(), text)
}
