// Package bench measures Warren on the machine it runs on, beside what else the machine has: other ways to start something
// isolated, and the same work outside a sandbox. All of it is one run, and the ways take turns, so that what else the
// machine does meets them alike.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
)

// Options of [Start], [IO], [State] and [Drivers]. Client or Program is required.
type Options struct {
	// Client of the server to measure, which must be on this machine: memory and native figures are taken here. Nil: a
	// daemon of its own is started from Program, on a data directory that is removed afterwards.
	Client *warren.Client
	// Program is the warren executable.
	Program string
	// Image to start from; empty means the server's default.
	Image string
	// Rounds is how often each way to start is measured; 0 means 20. IO repeats each workload a fifth as often.
	Rounds int
	// Quick does a fraction of the work in each round, to see that all of it works: its figures are of little worth.
	Quick bool
	// Idle are the numbers of idle sandboxes at which memory is measured; nil means 1, 50 and 100.
	Idle []int
	// Loads are what the sandboxes of State hold, of those that [Loads] names; empty means all.
	Loads []string
	// Forks are the numbers of children in State; nil means 1, 3 and 10.
	Forks []int
	// Dir is where native work is done; it should be on the server's disk. Empty means the own daemon's data
	// directory, or the directory for temporary files.
	Dir string
	// Record, when set, is given each row of what is printed, for programs.
	Record func(Row)
}

// Row is one measured row. The names of its values end with their unit.
type Row struct {
	// Benchmark is the table, such as "cold start", and Name the row of it.
	Benchmark string             `json:"benchmark"`
	Name      string             `json:"name"`
	Values    map[string]float64 `json:"values,omitempty"`
	// Met says of a target whether it was met; it is nil in other rows.
	Met *bool `json:"met,omitempty"`
	// Absent says why there are no values.
	Absent string `json:"absent,omitempty"`
}

func (o Options) record(r Row) {
	if o.Record != nil {
		o.Record(r)
	}
}

// verdict prints and records whether a target was met.
func (o Options) verdict(w io.Writer, benchmark, what string, met bool, target string) {
	o.judge(w, benchmark, what, met, "most "+target)
}

// verdictAtLeast is verdict for what is better when it is more.
func (o Options) verdictAtLeast(w io.Writer, benchmark, what string, met bool, target string) {
	o.judge(w, benchmark, what, met, "least "+target)
}

func (o Options) judge(w io.Writer, benchmark, what string, met bool, target string) {
	word := "met"
	if !met {
		word = "MISSED"
	}
	fmt.Fprintf(w, "  target: %s at %s: %s\n", what, target, word)
	o.record(Row{Benchmark: benchmark, Name: "target: " + what + " at " + target, Met: &met})
}

func (o Options) rounds() int {
	if o.Rounds > 0 {
		return o.Rounds
	}
	return 20
}

// session is a server to measure.
type session struct {
	Options
	client *warren.Client
	// close ends the own daemon, if there is one, and data is its data directory.
	close func() error
	data  string
}

// open connects, or starts a daemon.
func (o Options) open(ctx context.Context) (*session, error) { return o.openWith(ctx, nil) }

// openWith has what prepare puts into the data directory, and the environment that it returns, before the daemon starts.
func (o Options) openWith(ctx context.Context, prepare func(data string) ([]string, error)) (*session, error) {
	s := &session{Options: o, client: o.Client, close: func() error { return nil }}
	if s.Dir == "" {
		s.Dir = os.TempDir()
	}
	if s.client != nil {
		return s, nil
	}
	if o.Program == "" {
		return nil, errors.New("bench: neither a server nor the program to start one is given")
	}
	data, err := os.MkdirTemp("", "warren-bench-")
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(data, 0o711); err != nil {
		return nil, errors.Join(err, os.RemoveAll(data))
	}
	var more []string
	if prepare != nil {
		if more, err = prepare(data); err != nil {
			return nil, errors.Join(err, os.RemoveAll(data))
		}
	}
	s.data = data
	cmd := exec.Command(o.Program, "serve")
	// No budget is in the way of a hundred sandboxes, and only what is given here decides.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "WARREN_") && !strings.HasPrefix(v, "WARREN_RUNTIME=") && !strings.HasPrefix(v, "WARREN_GUEST=") &&
			!strings.HasPrefix(v, "WARREN_DOCKER_")
	}),
		"WARREN_HOME="+data, "WARREN_BUDGETS_SANDBOXES=10000", "WARREN_BUDGETS_CPU=100000", "WARREN_BUDGETS_MEMORY=100TiB", "WARREN_BUDGETS_DISK=1000TiB")
	cmd.Env = append(cmd.Env, more...)
	log, err := os.Create(filepath.Join(data, "bench.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a daemon: %w", err)
	}
	s.close = func() error {
		cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
		defer timer.Stop()
		return errors.Join(cmd.Wait(), os.RemoveAll(data))
	}
	if o.Dir == "" {
		s.Dir = data
	}
	s.client, err = connect(ctx, "unix://"+filepath.Join(data, "warren.sock"))
	if err != nil {
		text, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("the daemon does not answer: %w\n%s", err, text), s.close())
	}
	closeDaemon := s.close
	s.close = func() error { return errors.Join(s.client.Close(), closeDaemon()) }
	return s, nil
}

// connect waits until a new daemon answers.
func connect(ctx context.Context, url string) (*warren.Client, error) {
	deadline := time.Now().Add(time.Minute)
	for {
		c, err := warren.Connect(ctx, warren.Options{URL: url})
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return c, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// sandbox makes a sandbox and runs its first command.
func (s *session) sandbox(ctx context.Context) (*warren.Sandbox, error) {
	return s.sandboxOf(ctx, warren.Spec{Image: s.Image})
}

func (s *session) sandboxOf(ctx context.Context, spec warren.Spec) (*warren.Sandbox, error) {
	sb, err := s.client.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	if err := sb.Command("/bin/true").Run(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("the first command: %w", err), remove(ctx, sb))
	}
	return sb, nil
}

// remove deletes also when the run is being cancelled.
func remove(ctx context.Context, sb *warren.Sandbox) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return sb.Delete(ctx)
}

// sample is a number of measured durations.
type sample []time.Duration

// at returns the duration below which a share of the sample lies.
func (s sample) at(share float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}

func (s sample) median() time.Duration { return s.at(0.5) }

// values are those of a row.
func (s sample) values() map[string]float64 {
	return map[string]float64{"runs": float64(len(s)), "medianMs": inMs(s.median()), "p95Ms": inMs(s.at(0.95)), "minMs": inMs(s.at(0))}
}

func inMs(d time.Duration) float64 { return float64(d) / 1e6 }

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/1e6) }

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// timed measures one call.
func timed(f func() error) (time.Duration, error) {
	begin := time.Now()
	err := f()
	return time.Since(begin), err
}
