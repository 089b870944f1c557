package git_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/git"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var confined = &git.Confine{IDBase: driver.DiskIDBase, UID: driver.SandboxUID}

func initDir(t testing.TB) string {
	t.Helper()
	testenv.NeedsTool(t, "git")
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	must(t, err)
	defer root.Close()
	must(t, git.Init(root, git.Layout{Head: "ref: refs/heads/main", Bare: true}, git.Unowned))
	return dir
}

// TestCheckRef compares our rules with git's.
func TestCheckRef(t *testing.T) {
	testenv.NeedsTool(t, "git")
	for _, name := range []string{"main", "feature/one", "a.b", "v1.0", "ünïcode", "x@y", "a-b", "HEAD", "-x", "", "@", "a..b", "a b", "a~b", "a^b", "a:b", "a?b", "a*b", "a[b", `a\b`,
		".a", "a/.b", "a.", "a/", "/a", "a//b", "a.lock", "a.lock/b", "a@{b", "a\nb", "a\x7fb", "a\x00b", strings.Repeat("x", 300)} {
		err := git.CheckRef(name)
		if err != nil && !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
		gitSays := !strings.Contains(name, "\x00") && exec.Command("git", "check-ref-format", "refs/heads/"+name).Run() == nil
		want := gitSays && !strings.HasPrefix(name, "-") && len(name) <= 255 && name != "@"
		if (err == nil) != want {
			t.Errorf("CheckRef(%q) = %v, git: %t", name, err, gitSays)
		}
	}
}

func FuzzCheckRef(f *testing.F) {
	f.Add("main")
	f.Add("a/.b")
	f.Fuzz(func(t *testing.T, name string) {
		if git.CheckRef(name) != nil {
			return
		}
		if err := exec.Command("git", "check-ref-format", "refs/heads/"+name).Run(); err != nil {
			t.Errorf("%q: we accept it, git does not", name)
		}
	})
}

func TestProgress(t *testing.T) {
	for line, want := range map[string][3]any{
		"Receiving objects:  45% (450/1000), 1.20 MiB | 2.00 MiB/s": {"Receiving objects", int64(450), int64(1000)},
		"remote: Counting objects: 100% (7/7), done.":               {"Counting objects", int64(7), int64(7)},
		"remote: Enumerating objects: 1234, done.":                  {"Enumerating objects", int64(1234), int64(0)},
		"Resolving deltas: 100% (0/0), done.":                       {"Resolving deltas", int64(0), int64(0)},
	} {
		what, done, total, ok := git.ParseProgress(line)
		if !ok || what != want[0] || done != want[1] || total != want[2] {
			t.Errorf("%q: %q %d %d %t", line, what, done, total, ok)
		}
	}
	for _, line := range []string{"fatal: x", "", "remote: hello: 1x", "Receiving objects: many"} {
		if _, _, _, ok := git.ParseProgress(line); ok {
			t.Errorf("%q is progress", line)
		}
	}
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"fatal: 'https://u:p@h/x' not found": "fatal: 'https://***@h/x' not found",
		"https://tok@h/x and http://a:b@c":   "https://***@h/x and http://***@c",
		"ssh://git@h/x":                      "ssh://git@h/x",
		"ssh://git:pw@h/x":                   "ssh://***@h/x",
		"said s3/cret and s3%2Fcret":         "said *** and ***",
	} {
		if got := git.Redact(in, "s3/cret"); got != want {
			t.Errorf("Redact(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestEnvironment runs git with an environment that would have it do a lot.
func TestEnvironment(t *testing.T) {
	dir := initDir(t)
	for k, v := range map[string]string{"GIT_DIR": "/evil", "GIT_EXTERNAL_DIFF": "/evil", "GIT_CONFIG_PARAMETERS": "'core.pager=evil'", "GIT_SSH_COMMAND": "evil", "GIT_EXEC_PATH": "/evil",
		"LD_PRELOAD": "/evil.so", "LD_LIBRARY_PATH": "/evil", "PAGER": "evil", "EDITOR": "evil", "GIT_TRACE": "1", "HOME": "/evil", "GIT_PROXY_COMMAND": "evil"} {
		t.Setenv(k, v)
	}
	out, err := (&git.Cmd{Dir: dir, Args: []string{"config", "--list", "--show-scope"}}).Output(t.Context())
	must(t, err)
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "evil") || !strings.HasPrefix(line, "command\t") && !strings.HasPrefix(line, "local\t") {
			t.Errorf("git has the setting %q", line)
		}
	}
	for _, want := range []string{"core.hookspath=/dev/null", "core.fsmonitor=false", "protocol.allow=never", "protocol.ext.allow=never", "gc.auto=0"} {
		if !strings.Contains(string(out), "command\t"+want+"\n") {
			t.Errorf("git lacks the setting %s", want)
		}
	}
	// No transport unless it is named; never ext.
	for _, url := range []string{"ext::touch /evil", "file:///etc", "https://127.0.0.1:1/", "ssh://h/x"} {
		for _, protocols := range [][]string{nil, {"git"}} {
			_, err := (&git.Cmd{Dir: dir, Args: []string{"ls-remote", "--", url}, Protocols: protocols}).Output(t.Context())
			if err == nil || !strings.Contains(err.Error(), "not allowed") {
				t.Errorf("ls-remote %s with %v: %v", url, protocols, err)
			}
		}
	}
}

// TestConfined looks around from where a confined git is.
func TestConfined(t *testing.T) {
	testenv.NeedsRoot(t)
	dir, work := initDir(t), t.TempDir()
	must(t, os.WriteFile(filepath.Join(work, "f"), []byte("x"), 0o644))
	look := func(script string) string {
		// An alias is the only way to have git run something; here it is ours.
		out, err := (&git.Cmd{Dir: dir, WorkTree: work, Args: []string{"look"}, Config: []git.Setting{{Key: "alias.look", Value: "!" + script}}, Confine: confined}).Output(t.Context())
		if err != nil {
			return err.Error()
		}
		return string(out)
	}
	if got := look("ls -1 / /dev /workspace"); got != "/:\nbin\ndev\netc\ngit\nlib\nlib64\nsbin\nusr\nworkspace\n\n/dev:\nnull\nurandom\n\n/workspace:\nf\n" {
		t.Logf("it sees %q", got)
	}
	for _, script := range []string{"cat /etc/passwd", "ls /proc", "ls /root", "ls /tmp", "touch /git/x", "touch /workspace/x", "touch /x", "touch /usr/x", "chroot /", "mount -t tmpfs x /workspace", "unshare -U true && unshare -m true"} {
		if got := look(script + " && echo DONE"); strings.Contains(got, "DONE") {
			t.Errorf("%s: %s", script, got)
		}
	}
	if got := look("id -u; id -G"); got != "1000\n1000\n" {
		t.Errorf("it runs as %q", got)
	}
	// Nothing of it is left in this process's view.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if strings.Contains(string(mounts), "warren-git") {
		t.Error("a mount is left")
	}
	if v, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || v != 0 {
		t.Errorf("this process lost its privileges: %d %v", v, err)
	}
}

// TestCancel ends git and what it started.
func TestCancel(t *testing.T) {
	dir := initDir(t)
	for _, c := range []*git.Confine{nil, confined} {
		ctx, cancel := context.WithCancel(t.Context())
		cmd := &git.Cmd{Dir: dir, Args: []string{"wait"}, Config: []git.Setting{{Key: "alias.wait", Value: "!sleep 1000 & sleep 1000; wait"}}, Confine: c}
		p, err := cmd.Start(ctx)
		must(t, err)
		time.AfterFunc(20*time.Millisecond, cancel)
		began := time.Now()
		if err := p.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("wait: %v", err)
		}
		if time.Since(began) > 4*time.Second {
			t.Error("what git started held it up")
		}
	}
}

// orphanEnv has TestOrphan be the process that dies: it names the git directory.
const orphanEnv = "GIT_TEST_ORPHAN"

// TestOrphan kills a process whose git is at work: git ends too, and reads the files of a hostile workspace no longer.
func TestOrphan(t *testing.T) {
	if dir := os.Getenv(orphanEnv); dir != "" {
		for _, c := range []*git.Confine{nil, confined} {
			// It says its pid and then waits for input that does not come.
			cmd := &git.Cmd{Dir: dir, Args: []string{"wait"}, Config: []git.Setting{{Key: "alias.wait", Value: "!echo $PPID; exec sleep 30"}}, Confine: c, Stdout: os.Stdout}
			_, err := cmd.Start(t.Context())
			must(t, err)
		}
		time.Sleep(time.Minute)
		return
	}
	dir := initDir(t)
	cmd := exec.Command(os.Args[0], "-test.run=^TestOrphan$")
	cmd.Env = append(os.Environ(), orphanEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var pids []int
	lines := bufio.NewScanner(out)
	for len(pids) < 2 && lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		must(t, err)
		pids = append(pids, pid)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for _, pid := range pids {
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			// One that nobody has waited for yet is a zombie.
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil || strings.Contains(string(stat), ") Z ") {
				break
			}
			if time.Now().After(deadline) {
				unix.Kill(pid, unix.SIGKILL)
				t.Fatalf("git %d goes on without its daemon: %s", pid, stat)
			}
		}
	}
}

// TestMemory has a confined git ask for more memory than it may have.
func TestMemory(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := initDir(t)
	for limit, want := range map[uint64]bool{1 << 30: true, 96 << 20: false} {
		few := *confined
		few.Memory = limit
		// A blob that is not streamed is kept whole.
		cmd := &git.Cmd{Dir: dir, Args: []string{"hash-object", "--stdin"}, Stdin: io.LimitReader(zeros{}, 200<<20), Confine: &few}
		if _, err := cmd.Output(t.Context()); (err == nil) != want {
			t.Errorf("200 MiB within %d MiB: %v", limit>>20, err)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func TestErrors(t *testing.T) {
	dir := initDir(t)
	err := (&git.Cmd{Dir: dir, Args: []string{"cat-file", "-e", "main"}}).Run(t.Context())
	if git.ExitCode(err) != 128 || !strings.Contains(err.Error(), "Not a valid object name main") {
		t.Errorf("%v", err)
	}
	if err := (&git.Cmd{Args: []string{"version"}}).Run(t.Context()); err == nil {
		t.Error("a command without a git directory ran")
	}
	_, err = (&git.Cmd{Dir: dir, Args: []string{"say"}, Config: []git.Setting{{Key: "alias.say", Value: "!printf 'fatal: \\033[31m https://u:p@h/' >&2; false"}}}).Output(t.Context())
	if err == nil || strings.ContainsAny(err.Error(), "\x1b") || strings.Contains(err.Error(), "u:p") {
		t.Errorf("%q", err)
	}
}

func BenchmarkRun(b *testing.B) {
	dir := initDir(b)
	for name, c := range map[string]*git.Confine{"plain": nil, "confined": confined} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				must(b, (&git.Cmd{Dir: dir, Args: []string{"version"}, Stdout: nil, Confine: c}).Run(b.Context()))
			}
		})
	}
}
