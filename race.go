package warren

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"
)

// RaceOptions say what is tried and which attempt is kept.
type RaceOptions struct {
	// Commands, each a program and its arguments: one that every child runs, or one for each child.
	Commands [][]string
	// Count of children; 0 means one for each command.
	Count int
	// Name is the beginning of the children's names, which "-1", "-2" and so on follow. Empty means none.
	Name string
	// Env is added to the environment of the commands, in which WARREN_ATTEMPT is the number of the attempt, from 1.
	Env map[string]string
	// Dir and User of the commands, as of [Cmd].
	Dir, User string
	// Timeout kills a command that takes longer; 0 means never. What is done before it begins and after its end does not count.
	Timeout time.Duration
	// Output, when set, says where the output of an attempt goes. Nil discards a stream. The writers of different attempts are
	// used at the same time.
	Output func(a *Attempt) (stdout, stderr io.Writer)
	// Ended, when set, is told of each attempt that has ended and been measured; not of two at the same time.
	Ended func(a *Attempt)
	// Choose returns the attempt to keep, or nil for none. Nil means [BestAttempt].
	Choose func([]*Attempt) *Attempt
	// Leave keeps the children when no attempt is kept.
	Leave bool
	// Progress, when set, is told each step.
	Progress func(Progress)
}

// Attempt is one child of a race and what became of its command.
type Attempt struct {
	// Number counts from 1.
	Number  int
	Sandbox *Sandbox
	Command []string
	// State is how the command ended; nil if it never began, or that could not be learned. Err says why.
	State *ProcessState
	Err   error
	// TimedOut is set when the command was killed after [RaceOptions].Timeout.
	TimedOut bool
	Took     time.Duration
	// Tests is what test runners said in the output, nil when none was seen.
	Tests *TestCount
	// Diff is the size of the workspace's changes since just before the command began; nil if that could not be learned, and DiffErr
	// says why.
	Diff    *DiffSize
	DiffErr error
	Kept    bool
	// Left is set when the attempt was to be kept and that failed: its child is there still, and is removed by nobody else.
	Left bool
}

// Succeeded reports whether the command exited with 0.
func (a *Attempt) Succeeded() bool { return a.Err == nil && a.State != nil && a.State.Success() }

// DiffSize is how much a diff changes.
type DiffSize struct {
	Files      int `json:"files"`
	Insertions int `json:"insertions"`
	Deletions  int `json:"deletions"`
}

// Race is what became of a race.
type Race struct {
	Attempts []*Attempt
	// Kept is the attempt at which the sandbox is now, nil when it is as it was.
	Kept *Attempt
	// Stopped is how long the sandbox stood still for the fork.
	Stopped time.Duration
	// Kind is [SnapshotFiles] where the driver cannot keep memory, so that the children started cold on copies of the files, and
	// only files are kept.
	Kind SnapshotKind
}

// BestAttempt returns the attempt whose command exited with 0, then of these the one with the most tests passed, the fewest failed,
// the smallest diff, and the shortest time. When none exited with 0 it is the best of the failed. It returns nil when no
// command came to an end of its own.
func BestAttempt(attempts []*Attempt) *Attempt {
	var able []*Attempt
	for _, a := range attempts {
		if a.Err == nil && a.State != nil && !a.TimedOut {
			able = append(able, a)
		}
	}
	if len(able) == 0 {
		return nil
	}
	return slices.MinFunc(able, compareAttempts)
}

// compareAttempts is negative when a is better.
func compareAttempts(a, b *Attempt) int {
	first := func(x, y bool) int {
		switch {
		case x == y:
			return 0
		case x:
			return -1
		}
		return 1
	}
	tests := func(a *Attempt) TestCount {
		if a.Tests == nil {
			return TestCount{}
		}
		return *a.Tests
	}
	changed := func(a *Attempt) int {
		if a.Diff == nil {
			return 0
		}
		return a.Diff.Insertions + a.Diff.Deletions
	}
	files := func(a *Attempt) int {
		if a.Diff == nil {
			return 0
		}
		return a.Diff.Files
	}
	return cmp.Or(
		first(a.Succeeded(), b.Succeeded()),
		cmp.Compare(tests(b).Passed, tests(a).Passed),
		cmp.Compare(tests(a).Failed, tests(b).Failed),
		first(a.Diff != nil, b.Diff != nil),
		cmp.Compare(changed(a), changed(b)),
		cmp.Compare(files(a), files(b)),
		cmp.Compare(a.Took, b.Took),
	)
}

// raceLabel is the label of a race's children, by which they are found when the answer to the fork is lost.
const raceLabel = "warren.race"

// lateFork is how long a server may take to give up a fork whose client has gone.
const lateFork = 500 * time.Millisecond

// A child of a race whose client is gone removes itself after raceIdle. Meanwhile the client uses each every raceTouch.
const (
	raceIdle  = 2 * time.Minute
	raceTTL   = 365 * 24 * time.Hour // that of the source would end it, or pause it, in the midst of its command
	raceTouch = 20 * time.Second
	raceAgain = time.Second // after which a watch over the source that broke is begun anew
)

// Race forks the sandbox, runs a command in each child side by side, and takes the sandbox to where the attempt is that it
// keeps: memory, processes, root and workspace. What the sandbox did itself meanwhile is then lost. The children are
// removed, also when ctx ends, unless none is kept and they are to be left. For its idle timeout the sandbox is in use until then.
//
// The error is nil when commands fail; each attempt says how it ended. With an error the sandbox is as it was, unless the error
// comes from the rollback and says otherwise. When it is the keeping that fails, the child of the attempt stays, and so does the
// snapshot of it if there is one; the error names both.
func (s *Sandbox) Race(ctx context.Context, o RaceOptions) (r *Race, err error) {
	commands, err := o.commands(string(s.ID))
	if err != nil {
		return nil, err
	}
	if tell := o.Progress; tell != nil {
		var mu sync.Mutex // attempts tell at the same time
		o.Progress = func(p Progress) {
			mu.Lock()
			defer mu.Unlock()
			tell(p)
		}
	}
	// All fork options but these are the source's.
	key := randomKey()
	fo := ForkOptions{Count: len(commands), Name: o.Name, All: true, Labels: map[string]string{raceLabel: key}, Progress: o.Progress}
	if o.Name != "" && len(commands) == 1 {
		fo.Name += "-1"
	}
	if !o.Leave {
		// With the fork itself: a client that is killed right after it tells no child anything any more.
		fo.IdleTimeout, fo.IdleAction, fo.TTL = raceIdle, IdleDelete, raceTTL
	}
	leave := false
	var left SandboxID
	defer func() {
		if !leave {
			err = errors.Join(err, s.c.removeRace(ctx, key, left))
		}
	}()
	fork, err := s.Fork(ctx, fo)
	if err != nil {
		if ctx.Err() != nil {
			// The server may be about to notice; what it makes until then is not in the list yet.
			time.Sleep(lateFork)
		}
		return nil, err
	}
	// Nobody else may be at the source, which has an idle timeout of its own and is needed at the end.
	defer s.stayInUse(ctx)()
	r = &Race{Stopped: fork.Stopped, Kind: fork.Kind}
	for i, ch := range fork.Children {
		if ch.Err != nil {
			return nil, ch.Err
		}
		r.Attempts = append(r.Attempts, &Attempt{Number: i + 1, Sandbox: ch.Sandbox, Command: commands[i]})
	}
	if err := r.run(ctx, &o); err != nil {
		return r, err
	}
	choose := o.Choose
	if choose == nil {
		choose = BestAttempt
	}
	best := choose(r.Attempts)
	if best == nil {
		leave = o.Leave
		return r, nil
	}
	// A name that is the race's: a snapshot whose id does not arrive is found by it.
	err = r.keep(ctx, s, best, "race-"+key)
	if best.Left {
		left = best.Sandbox.ID
		err = s.stay(ctx, best, err, o.Leave)
	}
	return r, err
}

// stayInUse keeps the sandbox from its idle timeout until it is let go. A watch that somebody follows is a use for as long as it lasts,
// however short the timeout is, and asks nothing of the sandbox.
func (s *Sandbox) stayInUse(ctx context.Context) (letGo func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		watch := ctx
		for {
			for _, err := range s.WatchLifecycle(watch) {
				if errors.Is(err, ErrNotFound) || errors.Is(err, ErrState) {
					return // it was removed or paused meanwhile, by somebody who wants that
				}
			}
			watch = comingBack(ctx)
			select {
			case <-time.After(raceAgain):
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// commands returns one for each child.
func (o *RaceOptions) commands(id string) ([][]string, error) {
	wrong := func(format string, args ...any) error {
		err := fmt.Errorf(format, args...)
		return &Error{Kind: "invalid", Op: "race", ID: id, Message: err.Error(), Err: err}
	}
	n := o.Count
	if n == 0 {
		n = len(o.Commands)
	}
	for _, argv := range o.Commands {
		if len(argv) == 0 || argv[0] == "" {
			return nil, wrong("a command is empty; give each a program")
		}
	}
	switch {
	case o.Timeout < 0:
		return nil, wrong("timeout %v is negative; 0 is none", o.Timeout)
	case len(o.Commands) == 0:
		return nil, wrong("no command; give one for all children, or one for each")
	case n < 1:
		return nil, wrong("%d children; want at least 1", n)
	case len(o.Commands) == 1:
		return slices.Repeat(o.Commands, n), nil
	case len(o.Commands) != n:
		return nil, wrong("%d commands for %d children; give one for all, or one for each", len(o.Commands), n)
	}
	return o.Commands, nil
}

// run runs the commands to their ends. It returns the context's error when that ends first.
func (r *Race) run(ctx context.Context, o *RaceOptions) error {
	// A child that is done waits for the others, which is no reason to remove it as idle.
	touch, done := context.WithCancel(ctx)
	var touching sync.WaitGroup
	defer touching.Wait()
	defer done()
	touching.Go(func() {
		tick := time.NewTicker(raceTouch)
		defer tick.Stop()
		for {
			select {
			case <-touch.Done():
				return
			case <-tick.C:
				for _, a := range r.Attempts {
					soon, cancel := context.WithTimeout(touch, raceTouch)
					_, _ = a.Sandbox.Processes(soon, false)
					cancel()
				}
			}
		}
	})
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, a := range r.Attempts {
		wg.Go(func() {
			a.run(ctx, o)
			if o.Ended != nil && ctx.Err() == nil {
				mu.Lock()
				defer mu.Unlock()
				o.Ended(a)
			}
		})
	}
	wg.Wait()
	return ctx.Err()
}

// How long the files of an attempt may take to be remembered, and how soon that is told as a step.
const (
	raceMark     = 10 * time.Minute
	raceMarkTell = time.Second
)

// mark remembers the files as they are: what was changed before is no attempt's. It takes nothing of the command's time.
func (a *Attempt) mark(ctx context.Context, o *RaceOptions) error {
	if o.Progress != nil {
		tell := time.AfterFunc(raceMarkTell, func() {
			o.Progress(Progress{Step: fmt.Sprintf("remember the files of attempt %d, for its diff", a.Number)})
		})
		defer tell.Stop()
	}
	ctx, cancel := context.WithTimeout(ctx, raceMark)
	defer cancel()
	return a.Sandbox.MarkWorkspace(ctx)
}

func (a *Attempt) run(ctx context.Context, o *RaceOptions) {
	a.DiffErr = a.mark(ctx, o)
	limited := ctx
	if o.Timeout > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(ctx, o.Timeout)
		defer cancel()
	}
	cmd := a.Sandbox.Command(a.Command[0], a.Command[1:]...)
	cmd.Dir, cmd.User = o.Dir, o.User
	cmd.Env = append(cmd.Env, "WARREN_ATTEMPT="+strconv.Itoa(a.Number))
	for k, v := range o.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	var stdout, stderr io.Writer
	if o.Output != nil {
		stdout, stderr = o.Output(a)
	}
	var tests TestCounter
	cmd.Stdout, cmd.Stderr = counted(tests.Stdout, stdout), counted(tests.Stderr, stderr)
	begin := time.Now()
	err := cmd.Run(limited)
	a.Took, a.State = time.Since(begin), cmd.ProcessState
	a.TimedOut = ctx.Err() == nil && limited.Err() != nil && (a.State == nil || !a.State.Exited())
	var exit *ExitError
	if !errors.As(err, &exit) && !(a.TimedOut && errors.Is(err, context.DeadlineExceeded)) {
		a.Err = err
	}
	a.Tests = tests.Count()
	if ctx.Err() == nil && a.DiffErr == nil {
		limited, cancel := context.WithTimeoutCause(ctx, maxCounting, errCounting)
		d, err := a.Sandbox.diffSize(limited)
		if limited.Err() != nil && ctx.Err() == nil {
			err = errCounting
		}
		cancel()
		if err == nil {
			a.Diff = &d
		}
		a.DiffErr = err
	}
}

// counted shows what is written to count, and passes it on to w, which may be nil.
func counted(count func([]byte), w io.Writer) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		count(p)
		if w == nil {
			return len(p), nil
		}
		return w.Write(p)
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// statTotal is the last line of a diff's summary.
var statTotal = regexp.MustCompile(`(?m)^ (\d+) files? changed(?:, (\d+) insertions?\(\+\))?(?:, (\d+) deletions?\(-\))?$`)

// statMore counts files that changed and are not in the summary; no name of a file ends such a line.
var statMore = regexp.MustCompile(`(?m)^# warren: files that changed and are too large to compare: (\d+)$`)

// maxCounting is how long an attempt's diff may take. What the attempt wrote decides how much there is to read.
const maxCounting = 2 * time.Minute

var errCounting = fmt.Errorf("its diff is not counted: that took longer than %v: %w", maxCounting, ErrExhausted)

func (s *Sandbox) diffSize(ctx context.Context) (d DiffSize, err error) {
	out, err := s.Diff(ctx, DiffOptions{Stat: true, SinceMark: true})
	if err != nil {
		return d, err
	}
	defer out.Close()
	text, err := io.ReadAll(out)
	if err != nil {
		return d, err
	}
	if all := statTotal.FindAllSubmatch(text, -1); all != nil {
		m := all[len(all)-1] // before it may stand names, which anybody can choose
		d.Files, _ = strconv.Atoi(string(m[1]))
		d.Insertions, _ = strconv.Atoi(string(m[2]))
		d.Deletions, _ = strconv.Atoi(string(m[3]))
	}
	if m := statMore.FindSubmatch(text); m != nil {
		more, _ := strconv.Atoi(string(m[1]))
		d.Files += more
	}
	return d, nil
}

// keep takes the sandbox to where an attempt is, by a snapshot of its child. When that fails, and not because ctx has ended before,
// the child is to stay.
func (r *Race) keep(ctx context.Context, s *Sandbox, a *Attempt, name string) error {
	// To its end, for a snapshot whose id does not arrive would stay.
	snap, err := a.Sandbox.Snapshot(context.WithoutCancel(ctx), SnapshotOptions{Name: name})
	if gone := ctx.Err(); err != nil || gone != nil {
		a.Left = gone == nil
		if gone != nil {
			err = gone
		}
		return errors.Join(err, s.c.dropSoon(ctx, name))
	}
	// The server does not stop in the middle of this either.
	if err := s.Rollback(context.WithoutCancel(ctx), string(snap.ID)); err != nil {
		a.Left = true
		return fmt.Errorf("%w; what was chosen stays as snapshot %s: roll back to it, or delete it", err, snap.ID)
	}
	a.Kept, r.Kept = true, a
	return s.c.dropSoon(ctx, string(snap.ID))
}

// stay makes a child one that stays, as its source would, and adds to the error that kept it from becoming that where it is.
func (s *Sandbox) stay(ctx context.Context, a *Attempt, why error, settled bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	called := string(a.Sandbox.ID)
	if a.Sandbox.Name != "" {
		called = a.Sandbox.Name + " (" + called + ")"
	}
	why = fmt.Errorf("attempt %d could not be kept: %w; its sandbox %s stays", a.Number, why, called)
	ch := Change{RemoveLabels: []string{raceLabel}}
	if !settled {
		ch.IdleTimeout, ch.TTL = new(time.Duration), new(time.Duration)
		if src, err := s.c.Sandbox(ctx, string(s.ID)); err == nil {
			*ch.IdleTimeout, ch.IdleAction = src.Spec.IdleTimeout, src.Spec.IdleAction
			*ch.TTL = src.Spec.TTL
		}
	}
	if err := a.Sandbox.Update(ctx, ch); err != nil {
		return errors.Join(why, fmt.Errorf("it may still be removed when it is idle for %s: %w", raceIdle, err))
	}
	return why
}

// removeTimeout bounds the removal of what a race made.
const removeTimeout = time.Minute

// dropSoon deletes a snapshot, if there is one, also when ctx has ended.
func (c *Client) dropSoon(ctx context.Context, snapshot string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return c.DeleteSnapshot(ctx, snapshot, DeleteOptions{AllowMissing: true})
}

// removeRace removes the children of a race but for one, with their workspaces, also those of which the answer never came.
func (c *Client) removeRace(ctx context.Context, key string, but SandboxID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	for sb, err := range c.Sandboxes(ctx, ListOptions{Labels: map[string]string{raceLabel: key}, PageSize: 1000}) {
		if err != nil {
			failed = err
			break
		}
		if sb.ID == but {
			continue
		}
		wg.Go(func() {
			err := c.DeleteSandbox(ctx, string(sb.ID), DeleteOptions{AllowMissing: true, DeleteWorkspace: true})
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
		})
	}
	wg.Wait()
	return failed
}
