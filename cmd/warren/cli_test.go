package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// runCLI runs a command line that needs no server.
func runCLI(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(context.Background(), args, strings.NewReader(""), &out, &err)
	return code, out.String(), err.String()
}

// Each command teaches by example and says in one line what it does.
func TestEveryCommandHasHelp(t *testing.T) {
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if !strings.Contains(cmd.Example, "warren ") && !strings.Contains(cmd.Example, "WARREN_URL=") {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: short help %q", cmd.CommandPath(), cmd.Short)
		}
		for _, line := range strings.Split(cmd.Long+"\n"+cmd.Example, "\n") {
			if len([]rune(line)) > 140 {
				t.Errorf("%s: a line of help has %d characters: %s", cmd.CommandPath(), len(line), line)
			}
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s has no help", cmd.CommandPath(), f.Name)
			}
		})
		if len(cmd.Commands()) == 0 && !cmd.Runnable() {
			t.Errorf("%s does nothing", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(newApp(nil, nil, nil)))
}

// Every line of an example that calls warren is one that warren takes.
func TestExamplesParse(t *testing.T) {
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, line := range strings.Split(cmd.Example, "\n") {
			words := exampleWords(line)
			if len(words) < 2 {
				continue
			}
			root := newRoot(newApp(nil, nil, nil))
			found, rest, err := root.Find(words[1:])
			if err != nil || found == root && !strings.HasPrefix(words[1], "-") {
				t.Errorf("%s: example %q names no command: %v", cmd.CommandPath(), line, err)
				continue
			}
			if found.DisableFlagParsing {
				continue
			}
			if err := found.ParseFlags(rest); err != nil {
				t.Errorf("%s: example %q: %v", cmd.CommandPath(), line, err)
			}
			if found.Args != nil {
				if err := found.Args(found, found.Flags().Args()); err != nil {
					t.Errorf("%s: example %q: %v", cmd.CommandPath(), line, err)
				}
			}
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(newApp(nil, nil, nil)))
}

// exampleWords returns the words of a line that begins with warren, without what follows in the shell and without a remark.
func exampleWords(line string) []string {
	line = strings.TrimSpace(line)
	if !strings.HasPrefix(line, "warren ") {
		return nil
	}
	for _, end := range []string{"   ", " | ", " && ", " > "} {
		line, _, _ = strings.Cut(line, end)
	}
	var words []string
	for len(line) > 0 {
		if line[0] == '"' || line[0] == '\'' {
			if word, rest, ok := strings.Cut(line[1:], line[:1]); ok {
				words, line = append(words, word), strings.TrimLeft(rest, " ")
				continue
			}
		}
		word, rest, _ := strings.Cut(line, " ")
		words, line = append(words, word), strings.TrimLeft(rest, " ")
	}
	return words
}

func TestUsageErrors(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"craete"}, `unknown command "craete"; did you mean "create"?; see warren --help`},
		{[]string{"run"}, "missing COMMAND; see warren run --help"},
		{[]string{"exec"}, "missing ID; see warren exec --help"},
		{[]string{"exec", "x"}, "missing COMMAND; see warren exec --help"},
		{[]string{"exec", "x", "--nope"}, "unknown flag: --nope; see warren exec --help"},
		{[]string{"snapshot", "ls", "--size=maybe"}, `invalid argument "maybe" for --size: want true or false; see warren snapshot ls --help`},
		{[]string{"create", "--ttl", "5"}, `invalid argument "5" for --ttl: want a time with its unit, such as 90s or 2h; see warren create --help`},
		{[]string{"fork", "x", "-n", "3.5"}, `invalid argument "3.5" for --count: want a whole number; see warren fork --help`},
		{[]string{"race", "x", "-n", "3.5"}, `invalid argument "3.5" for --count: want a whole number; see warren race --help`},
		{[]string{"race", "x", "-n", "99999999999999999999"}, `for --count: want a whole number that is not so large; see warren race --help`},
		{[]string{"bench", "state", "--forks", "1,x"}, `invalid argument "1,x" for --forks: want a whole number; see warren bench state --help`},
		{[]string{"rm"}, "missing ID; see warren rm --help"},
		{[]string{"rm", "--all", "x"}, "give ids or --all, not both; see warren rm --help"},
		{[]string{"cp", "a"}, "missing DST; see warren cp --help"},
		{[]string{"cp", "a", "b"}, "one of SRC and DST has to be in a sandbox, as ID:PATH; see warren cp --help"},
		{[]string{"inspect", "--nope"}, "unknown flag: --nope; see warren inspect --help"},
		{[]string{"image", "nope"}, `unknown command "nope"; see warren image --help`},
		{[]string{"create", "--memory", "lots"}, `size "lots": invalid: want a number with a unit, such as 512MiB or 2G`},
		{[]string{"create", "--cpu", "0"}, `processors "0": invalid: want a number such as 2 or 0.5`},
		{[]string{"create", "--mount", "/x"}, "want HOST:PATH"},
		{[]string{"create", "--env", "=x"}, "want K=V"},
		{[]string{"create", "--dirty"}, "they need --repo"},
		{[]string{"create", "--repo", "/nonexistent/dir"}, "there is no such directory"},
		{[]string{"kill", "x"}, "missing PID"},
		{[]string{"ls", "x"}, `unexpected argument "x"; see warren ls --help`},
		{[]string{"policy", "show"}, "missing NAME; see warren policy show --help"},
		{[]string{"policy", "check", "a", "b"}, `unexpected argument "b"; see warren policy check --help`},
		{[]string{"secret", "set"}, "missing NAME; see warren secret set --help"},
		{[]string{"events", "a", "b"}, `unexpected argument "b"; see warren events --help`},
		{[]string{"template", "build", "a", "b"}, `unexpected argument "b"; see warren template build --help`},
		{[]string{"create", "alpine"}, `unexpected argument "alpine"; --image takes an image`},
		{[]string{"completion", "tcsh"}, `shell "tcsh": invalid: want bash, zsh or fish`},
	} {
		code, stdout, stderr := runCLI(t, tt.args...)
		if code != exitFailure || stdout != "" || !strings.HasPrefix(stderr, "warren: ") || !strings.Contains(stderr, tt.want) {
			t.Errorf("warren %q: exit %d, stdout %q, stderr %q; want %q", tt.args, code, stdout, stderr, tt.want)
		}
		if strings.Count(stderr, "\n") != 1 {
			t.Errorf("warren %q: the error has not one line: %q", tt.args, stderr)
		}
	}
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if code, stdout, stderr := runCLI(t, "completion", shell); code != 0 || !strings.Contains(stdout, "warren") || stderr != "" {
			t.Errorf("%s: exit %d, stderr %q", shell, code, stderr)
		}
	}
}

func TestErrorsCannotSteerTheTerminal(t *testing.T) {
	_, _, stderr := runCLI(t, "run\x1b]52;c;x\x07\u202e")
	if strings.ContainsAny(stderr, "\x1b\x07\u202e") {
		t.Errorf("%q", stderr)
	}
}

func TestExitCodes(t *testing.T) {
	for n, name := range linuxSignals {
		if sig, ok := signalNumbers[strings.ToUpper(name)]; ok && sig != n {
			t.Errorf("signal %d is not %s", n, name)
		}
	}
	for in, want := range map[string]int{"TERM": 15, "SIGKILL": 9, "int": 2, "10": 10} {
		if got, err := parseSignal(in); err != nil || int(got) != want {
			t.Errorf("parseSignal(%q) = %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "65", "NOPE", "-9"} {
		if got, err := parseSignal(in); err == nil {
			t.Errorf("parseSignal(%q) = %d", in, got)
		}
	}
}
