package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func raceCommand(a *app) *cobra.Command {
	var o warren.RaceOptions
	var env, each []string
	var keep string
	cmd := &cobra.Command{
		Use:   "race ID [flags] -- COMMAND [ARG...]",
		Short: "Try a command in several forks at once and keep the best",
		Long: `Fork a sandbox, run a command in each child side by side, compare, and take the sandbox to where the chosen attempt is: memory,
processes, root and workspace. What the sandbox itself did meanwhile is then lost, but for commits. The children are removed, also
after Ctrl-C; --keep none --leave leaves them. When the chosen attempt cannot be kept, its child stays, and the error names it.

The best has exit code 0, then the most tests passed and the fewest failed, then the smallest diff, then the shortest time; when none
has exit code 0 it is the best of the failed. Tests are counted in the output of go test, pytest, jest, vitest, mocha and cargo test, of
a package that is tested again the last run. The diff is what the attempt changed: what was there before it began does not count, and
what it writes to .gitignore hides nothing. One that cannot be learned is "unknown", and comes after those that are known.

Each line of output begins with the attempt it is of. In the commands WARREN_ATTEMPT is the number of the attempt, from 1. Exits as
the kept attempt did, or the best if none is kept; Warren's own failures exit with 125.`,
		Example: `  warren race fix -n 3 -- ./agent "make the tests pass"
  warren race fix --each "./agent -m small" --each "./agent -m large"
  warren race fix -n 2 --keep none -- go test ./...     compare only
  warren race fix -n 3 --keep 2 -- ./agent              the second, whatever the others do
  warren race fix -n 3 --name try --keep none --leave -- ./agent`,
		RunE: func(cmd *cobra.Command, args []string) error {
			// Flags may stand on both sides of ID, as for exec.
			if len(args) > 0 {
				if err := cmd.Flags().Parse(args[1:]); err != nil {
					return cmd.FlagErrorFunc()(cmd, err)
				}
				if help, _ := cmd.Flags().GetBool("help"); help {
					return cmd.Help()
				}
				args = append(args[:1:1], cmd.Flags().Args()...)
			}
			r := &race{app: a, keep: keep}
			err := r.prepare(&o, args, each, cmd.Flags().Changed("count"))
			if err != nil {
				return &usageError{err, cmd.CommandPath()}
			}
			if o.Env, err = environment(nil, env); err != nil {
				return err
			}
			return r.run(cmd.Context(), args[0], o)
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false)
	flags.SortFlags = false
	flags.IntVarP(&o.Count, "count", "n", 2, "how many children")
	flags.StringArrayVar(&each, "each", nil, "a command line for the shell, one for each child")
	flags.StringVar(&keep, "keep", keepBest, `attempt to keep: "best", "none", its number, or the name of its child`)
	flags.BoolVar(&o.Leave, "leave", false, "with --keep none: leave the children")
	flags.StringVar(&o.Name, "name", "", `beginning of the children's names, which "-1" and so on follow`)
	flags.StringArrayVarP(&env, "env", "e", nil, "set a variable of the commands, as K=V; K alone takes the value from here")
	flags.StringVarP(&o.Dir, "workdir", "w", "", "directory to run in (default /workspace)")
	flags.StringVarP(&o.User, "user", "u", "", `user to run as: "user" (the default), "root" or another of the image`)
	flags.DurationVar(&o.Timeout, "timeout", 0, "kill a command after this long; it then counts as failed, with exit code 124")
	return cmd
}

const (
	keepBest = "best"
	keepNone = "none"
)

// race is one call of warren race.
type race struct {
	*app
	keep  string
	name  string // beginning of the children's names
	leave bool

	mu     sync.Mutex // over the streams
	labels []*labelWriter
}

// prepare completes o and says what of the command line cannot be.
func (r *race) prepare(o *warren.RaceOptions, args, each []string, counted bool) error {
	switch {
	case len(args) == 0:
		return errors.New("missing ID")
	case len(args) == 1 && len(each) == 0:
		return errors.New("missing COMMAND; give one after --, or several with --each")
	case len(args) > 1 && len(each) > 0:
		return errors.New("--each and a COMMAND; give one of the two")
	case o.Count < 1:
		return fmt.Errorf("-n %d: want at least 1", o.Count)
	case o.Timeout < 0:
		return fmt.Errorf("--timeout %v: want more than 0, or 0 for none", o.Timeout)
	case o.Leave && r.keep != keepNone:
		return errors.New("--leave is for --keep none; otherwise the children are removed")
	}
	if len(each) == 0 {
		o.Commands = [][]string{args[1:]}
	} else {
		for _, line := range each {
			o.Commands = append(o.Commands, []string{"/bin/sh", "-c", line})
		}
		if !counted {
			o.Count = len(each)
		} else if len(each) > 1 && o.Count != len(each) {
			return fmt.Errorf("-n %d with %d times --each; leave -n out", o.Count, len(each))
		}
	}
	r.name, r.leave = o.Name, o.Leave
	if r.keep == keepBest || r.keep == keepNone {
		return nil
	}
	for i := range o.Count {
		if r.names(i + 1) {
			return nil
		}
	}
	return fmt.Errorf("--keep %q: want best, none, or an attempt from 1 to %d", r.keep, o.Count)
}

// names reports whether --keep names an attempt.
func (r *race) names(n int) bool {
	return r.keep == strconv.Itoa(n) || r.name != "" && r.keep == r.label(n)
}

// label is what an attempt is called.
func (r *race) label(n int) string {
	if r.name != "" {
		return r.name + "-" + strconv.Itoa(n)
	}
	return strconv.Itoa(n)
}

func (r *race) choose(attempts []*warren.Attempt) *warren.Attempt {
	switch r.keep {
	case keepBest:
		return warren.BestAttempt(attempts)
	case keepNone:
		return nil
	}
	for _, t := range attempts {
		if r.names(t.Number) && t.State != nil {
			return t
		}
	}
	return nil
}

func (r *race) run(ctx context.Context, id string, o warren.RaceOptions) error {
	c, err := r.client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	o.Choose, o.Progress = r.choose, r.progressNotes()
	o.Output = r.output
	o.Ended = r.ended
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals := forwardedSignals()
	defer signal.Stop(signals)
	caught := make(chan os.Signal, 1)
	go func() {
		select {
		case sig := <-signals:
			caught <- sig
			signal.Stop(signals) // the next ends this program
			cancel()
			r.notice("interrupted; removing the children")
		case <-ctx.Done():
		}
	}()
	result, err := c.Ref(id).Race(ctx, o)
	r.progress.clear()
	r.flush()
	select {
	case sig := <-caught:
		if err != nil && (result == nil || result.Kept == nil) {
			if !errors.Is(err, context.Canceled) {
				r.notice("%s", describe(err))
			}
			return exitError(128 + int(linuxSignal(sig)))
		}
	default:
	}
	if result != nil {
		if e := r.show(result); err == nil {
			err = e
		}
	}
	if err != nil {
		return err
	}
	return r.exit(result)
}

// exit is the kept attempt's, or the best's.
func (r *race) exit(result *warren.Race) error {
	t := result.Kept
	if t == nil && r.keep != keepBest && r.keep != keepNone {
		return fmt.Errorf("attempt %s, which is to be kept, did not run to an end; the sandbox is as it was", r.keep)
	}
	if t == nil {
		t = warren.BestAttempt(result.Attempts)
	}
	if t == nil {
		return errors.New("no attempt came to an end of its own; the sandbox is as it was")
	}
	if code := attemptCode(t); code != 0 {
		return exitError(code)
	}
	return nil
}

// attemptCode is how an attempt ended, as exec would say.
func attemptCode(t *warren.Attempt) int {
	switch {
	case t.TimedOut:
		return exitTimeout
	case t.State == nil:
		return exitFailure
	}
	return exitCode(t.State)
}

// attemptRow is an attempt as --json prints it.
type attemptRow struct {
	Attempt   int               `json:"attempt"`
	Sandbox   *warren.SandboxID `json:"sandboxId,omitempty"` // of one that stays
	Command   []string          `json:"command"`
	ExitCode  int               `json:"exitCode"`
	Status    string            `json:"status,omitempty"`
	TimedOut  bool              `json:"timedOut,omitempty"`
	Error     string            `json:"error,omitempty"`
	TookMs    float64           `json:"tookMs"`
	Tests     *warren.TestCount `json:"tests,omitempty"`
	Diff      *warren.DiffSize  `json:"diff,omitempty"`
	DiffError string            `json:"diffError,omitempty"`
	Kept      bool              `json:"kept"`
	StoppedMs float64           `json:"sourceStoppedMs"`
}

// show prints the comparison.
func (r *race) show(result *warren.Race) error {
	var rows [][]string
	for _, t := range result.Attempts {
		if t.State == nil && t.Err == nil && !t.TimedOut {
			return nil // cut short
		}
		if r.json {
			row := attemptRow{
				Attempt: t.Number, Command: t.Command, ExitCode: attemptCode(t), TimedOut: t.TimedOut, TookMs: inMillis(t.Took),
				Tests: t.Tests, Diff: t.Diff, Kept: t.Kept, StoppedMs: inMillis(result.Stopped),
			}
			if t.State != nil {
				row.Status = t.State.String()
			}
			if t.Err != nil {
				row.Error = describe(t.Err)
			}
			if t.DiffErr != nil {
				row.DiffError = describe(t.DiffErr)
			}
			if r.leave || t.Left {
				row.Sandbox = &t.Sandbox.ID
			}
			if err := r.printJSON(row); err != nil {
				return err
			}
			continue
		}
		exit, passed, failed, diff, kept := strconv.Itoa(attemptCode(t)), "", "", "unknown", ""
		if t.Tests != nil {
			passed, failed = strconv.Itoa(t.Tests.Passed), strconv.Itoa(t.Tests.Failed)
		}
		if t.Diff != nil {
			diff = fmt.Sprintf("%s, +%d -%d", count(t.Diff.Files, "file"), t.Diff.Insertions, t.Diff.Deletions)
		}
		if t.Kept {
			kept = "kept"
		}
		rows = append(rows, []string{r.label(t.Number), exit, t.Took.Round(10 * time.Millisecond).String(), passed, failed, diff, kept})
	}
	if r.json {
		return nil
	}
	if err := r.table([]string{"ATTEMPT", "EXIT", "TIME", "PASSED", "FAILED", "DIFF", "KEPT"}, rows); err != nil {
		return err
	}
	for _, t := range result.Attempts {
		if t.Err != nil {
			fmt.Fprintf(r.err, "%s attempt %s: %s\n", r.errorStyle("warren:"), r.label(t.Number), describe(t.Err))
		}
		if t.DiffErr != nil {
			fmt.Fprintf(r.err, "%s attempt %s: its diff is unknown: %s\n", r.errorStyle("warren:"), r.label(t.Number), describe(t.DiffErr))
		}
	}
	return nil
}

func inMillis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// count writes a number of things.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// output returns the streams of an attempt.
func (r *race) output(t *warren.Attempt) (stdout, stderr io.Writer) {
	out := &labelWriter{race: r, number: t.Number, stream: "stdout", to: r.out}
	err := &labelWriter{race: r, number: t.Number, stream: "stderr", to: r.err}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.labels = append(r.labels, out, err)
	return out, err
}

// ended shows the last line of an attempt, which may have no end, and how it went.
func (r *race) ended(t *warren.Attempt) {
	r.mu.Lock()
	for _, w := range r.labels {
		if w.number == t.Number {
			_ = w.end()
		}
	}
	r.mu.Unlock()
	r.notice("attempt %s has ended after %v with exit code %d", r.label(t.Number), t.Took.Round(10*time.Millisecond), attemptCode(t))
}

func (r *race) flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.labels {
		_ = w.end()
	}
}

// labelColours are those of attempts on a terminal, in turn.
var labelColours = []string{"36", "33", "35", "32", "34", "31"}

// labelWriter writes whole lines, each behind the label of its attempt, so that lines of several can be told apart.
type labelWriter struct {
	race   *race
	number int
	stream string
	to     io.Writer
	rest   []byte
}

// maxLabelled bounds a line that is held back; a longer one goes on in the next.
const maxLabelled = 64 << 10

func (w *labelWriter) Write(p []byte) (int, error) {
	w.race.mu.Lock()
	defer w.race.mu.Unlock()
	for rest := p; len(rest) > 0; {
		piece, after, ended := bytes.Cut(rest, []byte("\n"))
		if room := maxLabelled - len(w.rest); len(piece) >= room {
			piece, after, ended = rest[:room], rest[room:], true
		}
		w.rest = append(w.rest, piece...)
		if ended {
			if err := w.line(); err != nil {
				return 0, err
			}
		}
		rest = after
	}
	return len(p), nil
}

// end writes what is left without an end of line.
func (w *labelWriter) end() error {
	if len(w.rest) == 0 {
		return nil
	}
	return w.line()
}

func (w *labelWriter) line() error {
	line := bytes.TrimSuffix(w.rest, []byte("\r"))
	w.rest = w.rest[:0]
	if w.race.json {
		text := struct {
			Attempt int    `json:"attempt"`
			Stream  string `json:"stream"`
			Text    string `json:"text,omitempty"`
			Base64  []byte `json:"base64,omitempty"`
		}{Attempt: w.number, Stream: w.stream}
		if utf8.Valid(line) {
			text.Text = string(line)
		} else {
			text.Base64 = line
		}
		return w.race.printJSON(text)
	}
	var b bytes.Buffer
	label := w.race.label(w.number) + " | "
	if colours(w.to) {
		label = "\x1b[" + labelColours[(w.number-1)%len(labelColours)] + "m" + label + "\x1b[0m"
	}
	b.WriteString(label)
	if isTerminal(w.to) {
		// A line that is written over and over shows as it is in the end, and nothing moves the cursor to another's.
		line = line[bytes.LastIndexByte(line, '\r')+1:]
		_, _ = plainOutput(&b).Write(line)
	} else {
		b.Write(line)
	}
	b.WriteByte('\n')
	w.race.progress.clear()
	_, err := io.Copy(w.to, &b)
	return err
}
