package hold

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain is also the program: a test starts its own binary again.
func TestMain(m *testing.M) {
	if dir := os.Getenv("HOLD_TEST_DIR"); dir != "" {
		os.Exit(Dir(dir).Main(append([]string{Command}, os.Args[1:]...), os.Stderr))
	}
	os.Exit(m.Run())
}

func newDir(t *testing.T) Dir {
	t.Helper()
	d := Dir(filepath.Join(t.TempDir(), "hold"))
	if err := d.Make(); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(string(d)); err != nil || st.Mode() != os.ModeDir|os.ModeSticky|0o777 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	return d
}

func program(d Dir, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), "HOLD_TEST_DIR="+string(d))
	return cmd
}

func TestFiles(t *testing.T) {
	now := time.Now()
	for _, test := range []struct {
		name, text string
		age        time.Duration
		want       time.Duration // from now; 0 means that it does not hold
	}{
		{"empty", "", 0, time.Hour},
		{"old", "", 2 * time.Hour, 0},
		{"duration", "90m\n", time.Hour, 30 * time.Minute},
		{"over", "5m", time.Hour, 0},
		{"too long", "1000h", 0, Most},
		{"date", now.Add(3 * time.Hour).UTC().Format(time.RFC3339), 0, 3 * time.Hour},
		{"far date", now.Add(3000 * time.Hour).UTC().Format(time.RFC3339), 0, Most},
		{"nonsense", "for ever", 0, time.Hour},
		{"negative", "-1h", 0, 0},
		{"future", "1h", -50 * time.Hour, time.Hour},
		{"nobody.run", "1h", 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := newDir(t)
			path := filepath.Join(string(d), test.name)
			if err := os.WriteFile(path, []byte(test.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(path, now, now.Add(-test.age)); err != nil {
				t.Fatal(err)
			}
			n, until := d.Now(now)
			if want := test.want > 0; (n == 1) != want || want && (until.Sub(now) > test.want+5*time.Second || until.Sub(now) < test.want-5*time.Second) {
				t.Errorf("%d until %v, want %v", n, until.Sub(now), test.want)
			}
			if _, err := os.Stat(path); (err == nil) != (n == 1) {
				t.Errorf("the file: %v", err)
			}
		})
	}
}

func TestOthersAreNoHolds(t *testing.T) {
	d := newDir(t)
	at := func(name string) string { return filepath.Join(string(d), name) }
	if err := unix.Mkfifo(at("pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", at("link")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(at("dir/sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if n, until := d.Now(time.Now()); n != 0 || !until.IsZero() {
		t.Errorf("%d until %v", n, until)
	}
	if n, _ := Dir(at("missing")).Now(time.Now()); n != 0 {
		t.Errorf("%d in a directory that is not there", n)
	}
}

func TestProgram(t *testing.T) {
	d := newDir(t)
	if out, err := program(d, "--for", "20m").CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("%v: %s", err, out)
	}
	n, until := d.Now(time.Now())
	if left := time.Until(until); n != 1 || left > 20*time.Minute || left < 19*time.Minute {
		t.Errorf("%d, %v left", n, left)
	}
	for _, test := range []struct {
		args []string
		code int
		out  string
	}{
		{[]string{"/bin/sh", "-c", "echo said; exit 7"}, 7, "said\n"},
		{[]string{"--for=2h", "--", "sh", "-c", "kill -9 $$"}, 137, ""},
		{[]string{"no-such-program"}, 127, "warren-hold: no-such-program is not in PATH: file does not exist\n"},
		{nil, 2, "warren-hold: say how long, or while which command\n" + usage},
		{[]string{"--for"}, 2, "warren-hold: --for needs a duration\n" + usage},
		{[]string{"--for", "long", "true"}, 2, "warren-hold: --for long is no duration such as 30m\n" + usage},
		{[]string{"--what"}, 2, "warren-hold: there is no option --what\n" + usage},
	} {
		cmd := program(d, test.args...)
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != test.code || string(out) != test.out {
			t.Errorf("%q: exit code %d, %q", test.args, code, out)
		}
	}
	if n, _ := d.Now(time.Now()); n != 1 {
		t.Errorf("%d holds are left", n)
	}
}

func TestProgramHoldsWhileItRuns(t *testing.T) {
	d := newDir(t)
	start := func() *exec.Cmd {
		cmd := program(d, "--for", "3h", "sleep", "1000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); cmd.Wait() })
		for {
			// The hold is there before the command is.
			children, _ := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/task/" + strconv.Itoa(cmd.Process.Pid) + "/children")
			if n, until := d.Now(time.Now()); n == 1 && time.Until(until) > 2*time.Hour {
				return cmd
			} else if len(children) > 0 {
				t.Fatalf("the command runs, and there are %d holds", n)
			}
			time.Sleep(time.Millisecond)
		}
	}
	cmd := start()
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 128+15 {
		t.Errorf("a signal for the command: %v", err)
	}
	if n, _ := d.Now(time.Now()); n != 0 {
		t.Errorf("%d holds after the end", n)
	}
	cmd = start()
	cmd.Process.Kill()
	cmd.Wait()
	// A child that it had forked, and that has not become the command yet, has the lock for a moment more.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		n, _ := d.Now(time.Now())
		if n == 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("%d holds after it was killed", n)
			break
		}
	}
	if files, _ := os.ReadDir(string(d)); len(files) != 0 {
		t.Errorf("left is %v", files)
	}
}
