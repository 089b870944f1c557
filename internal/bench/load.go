package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
)

// Targets of the design, on 2 cores without KVM.
const (
	targetForkSmall       = 60 * time.Millisecond
	targetForkSmallPaused = 30 * time.Millisecond
	targetForkLarge       = 300 * time.Millisecond // of 300 MB, to the first reply over HTTP
	targetForkLargePaused = 120 * time.Millisecond
	targetForkTen         = 500 * time.Millisecond // of the small, until each of ten has run a command
	targetResume          = 60 * time.Millisecond
	targetResumePerMB     = 600 * time.Microsecond
)

// load is what a sandbox holds while its snapshots and forks are measured.
type load struct {
	name, title string
	// needs is a program without which it cannot be.
	needs string
	// start is left running, and fill is run to its end.
	start, fill []string
	// megabytes of memory that it holds.
	megabytes int
	// http says that it replies on loadPort.
	http bool
	// light loads are measured as often as anything, the others less.
	light bool
	// goals are those of the design, by the number of children.
	goals map[int]goal
}

// goal is what the design wants of a fork; 0 is no goal.
type goal struct{ command, http, paused time.Duration }

const loadPort = 8080

var loads = []load{
	{name: "agent", title: "idle agent", start: []string{"/bin/sh", "-c", "while :; do sleep 3600; done"}, light: true,
		goals: map[int]goal{1: {command: targetForkSmall, paused: targetForkSmallPaused}, 10: {command: targetForkTen}}},
	{name: "node", title: "64 MB Node server", needs: "node", megabytes: 64, http: true, start: []string{"node", "-e", `
const held = require('crypto').randomBytes(64e6);
require('http').createServer((q, r) => r.end('held ' + held.length)).listen(8080, '127.0.0.1');`}},
	{name: "python", title: "300 MB Python heap", needs: "python3", megabytes: 300, http: true, goals: map[int]goal{1: {http: targetForkLarge, paused: targetForkLargePaused}}, start: []string{"python3", "-c", `
import http.server, os
held = [os.urandom(10000) for _ in range(30000)]
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'held %d' % len(held))
    def log_message(self, *a): pass
http.server.HTTPServer(('127.0.0.1', 8080), H).serve_forever()`}},
	{name: "files", title: "500 MB in 20,000 files", fill: []string{"/bin/sh", "-ec", `
for d in $(seq 200); do mkdir -p bench/$d; head -c 2500000 /dev/urandom | split -b 25000 -a 3 - bench/$d/f; done`}},
}

// Loads are the names of what [State] can measure.
func Loads() []string {
	names := []string{loadIdle, loadMemory}
	for _, l := range loads {
		names = append(names, l.name)
	}
	return append(names, loadTemplate)
}

// The loads of the table of pauses, which measures nothing else, and that of the table of templates.
const (
	loadIdle     = "idle"
	loadMemory   = "memory"
	loadTemplate = "template"
)

// wants reports whether a load is to be measured.
func (o Options) wants(name string) bool { return len(o.Loads) == 0 || slices.Contains(o.Loads, name) }

func (o Options) checkLoads() error {
	for _, name := range o.Loads {
		if !slices.Contains(Loads(), name) {
			return fmt.Errorf("load %q: %w: want of %s", name, warren.ErrInvalid, strings.Join(Loads(), ", "))
		}
	}
	for _, n := range o.Forks {
		if n < 1 {
			return fmt.Errorf("%d forks: %w: want at least 1", n, warren.ErrInvalid)
		}
	}
	return nil
}

func (o Options) forks() []int {
	if o.Forks != nil {
		return o.Forks
	}
	return []int{1, 3, 10}
}

// loaded measures snapshots, pauses and forks of sandboxes that do something.
func (s *session) loaded(ctx context.Context, w io.Writer) error {
	for _, l := range loads {
		if !s.wants(l.name) {
			continue
		}
		if err := s.measureLoad(ctx, w, l); err != nil {
			return fmt.Errorf("%s: %w", l.title, err)
		}
	}
	return nil
}

const benchmarkLoad = "snapshot and fork"

func (s *session) measureLoad(ctx context.Context, w io.Writer, l load) (err error) {
	rounds := s.heavyRounds()
	if l.light {
		rounds = s.rounds()
	}
	sb, err := s.sandbox(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	fmt.Fprintf(w, "\nSnapshot, pause and fork of: %s (n=%d)\n", l.title, rounds)
	if l.needs != "" && sb.Command("/bin/sh", "-c", "command -v "+l.needs).Run(ctx) != nil {
		why := "the image has no " + l.needs
		fmt.Fprintf(w, "  not measured: %s\n", why)
		s.record(Row{Benchmark: benchmarkLoad, Name: l.title, Absent: why})
		return nil
	}
	if err := begin(ctx, sb, l); err != nil {
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tmedian\tp95\ttarget\t")
	var verdicts []func()
	// A target, if it is not 0, is that of the median.
	show := func(what string, values sample, target time.Duration) {
		if len(values) == 0 {
			return
		}
		limit := ""
		if target > 0 {
			limit = ms(target)
			verdicts = append(verdicts, func() {
				s.verdict(w, benchmarkLoad, l.title+": "+what+", median", values.median() <= target, limit)
			})
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t\n", what, ms(values.median()), ms(values.at(0.95)), limit)
		s.record(Row{Benchmark: benchmarkLoad, Name: l.title + ": " + what, Values: values.values()})
	}
	before, counted := s.pool(ctx)
	// A clock runs beside for snapshots, and for single forks of which nothing else is measured: it is a load that children have too.
	tick, err := startClock(ctx, sb)
	if err != nil {
		return err
	}
	snapshot, inside, err := snapshots(ctx, sb, tick, rounds)
	if err != nil {
		return err
	}
	show("snapshot", snapshot, 0)
	show("snapshot, pause seen inside", inside, 0)
	counts := slices.Clone(s.forks())
	slices.Sort(counts)
	if slices.Contains(counts, 1) {
		f, err := s.forked(ctx, sb, l, tick, 1, rounds)
		if err != nil && !errors.Is(err, warren.ErrExhausted) { // which is told below
			return fmt.Errorf("fork of 1: %w", err)
		}
		show("fork of 1, pause seen inside", f.inside, l.goals[1].paused)
	}
	if err := tick.stop(ctx); err != nil {
		return err
	}
	for _, n := range counts {
		f, err := s.forked(ctx, sb, l, nil, n, rounds)
		if errors.Is(err, warren.ErrExhausted) {
			why := firstLine(err.Error())
			fmt.Fprintf(tw, "fork of %d\tnot measured: %s\t\t\t\n", n, why)
			s.record(Row{Benchmark: benchmarkLoad, Name: fmt.Sprintf("%s: fork of %d", l.title, n), Absent: why})
			continue
		}
		if err != nil {
			return fmt.Errorf("fork of %d: %w", n, err)
		}
		of := fmt.Sprintf("fork of %d", n)
		goal := l.goals[n]
		show(of+", source stopped", f.stopped, 0)
		show(of+" to first command in all", f.command, goal.command)
		show(of+" to first HTTP reply of all", f.http, goal.http)
	}
	pause, resume, size, err := s.pauses(ctx, sb, rounds)
	if err != nil {
		return err
	}
	show("pause", pause, 0)
	show("resume to first command", resume, targetResume+time.Duration(l.megabytes)*targetResumePerMB)
	if inside, err = s.pausesSeen(ctx, sb, rounds); err != nil {
		return err
	}
	show("pause and resume at once, seen inside", inside, 0)
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "  memory on disk while paused: %s\n", mib(size))
	if now, still := s.pool(ctx); counted && still {
		hits, misses := now.hits-before.hits, now.misses-before.misses
		fmt.Fprintf(w, "  an execution was ready in the pool for %.0f of %.0f forks and resumes, each of which began when the pool was full\n", hits, hits+misses)
		s.record(Row{Benchmark: benchmarkLoad, Name: l.title + ": pool", Values: map[string]float64{"hits": hits, "misses": misses}})
	}
	for _, tell := range verdicts {
		tell()
	}
	return nil
}

// begin starts a load and waits until it is there.
func begin(ctx context.Context, sb *warren.Sandbox, l load) error {
	if l.fill != nil {
		if out, err := sb.Command(l.fill[0], l.fill[1:]...).CombinedOutput(ctx); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	if l.start == nil {
		return nil
	}
	cmd := sb.Command(l.start[0], l.start[1:]...)
	if err := cmd.Start(ctx); err != nil {
		return err
	}
	cmd.Detach()
	deadline := time.Now().Add(time.Minute)
	for l.http {
		err := firstReply(ctx, sb)
		if err == nil {
			break
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("its server does not reply: %w", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil
}

// firstReply asks the server in a sandbox once.
func firstReply(ctx context.Context, sb *warren.Sandbox) error {
	conn, err := sb.Dial(ctx, loadPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && !bytes.HasPrefix(body, []byte("held ")) {
		err = fmt.Errorf("it replied %.40q", body)
	}
	return err
}

// clock is a process in a sandbox that looks at the clock all the time and writes down where it stood still.
type clock struct {
	sb  *warren.Sandbox
	pid int
}

// A gap below this is the clock's own step or the host's scheduler.
const clockLoop = `
if command -v python3 >/dev/null; then exec python3 -uc '
import time
last = time.time_ns()
out = open("/dev/shm/gaps", "w", 1)
while True:
    time.sleep(0.001)
    now = time.time_ns()
    if now - last > 4000000: print(now, now - last, file=out)
    last = now'
fi
p=$(date +%s%N)
while :; do n=$(date +%s%N); [ $((n-p)) -gt 4000000 ] && echo $n $((n-p)); p=$n; done > /dev/shm/gaps`

func startClock(ctx context.Context, sb *warren.Sandbox) (*clock, error) {
	cmd := sb.Command("/bin/sh", "-c", clockLoop)
	if err := cmd.Start(ctx); err != nil {
		return nil, fmt.Errorf("the clock: %w", err)
	}
	cmd.Detach()
	time.Sleep(300 * time.Millisecond) // it is an interpreter that starts
	return &clock{sb, cmd.Process.Pid}, nil
}

func (c *clock) stop(ctx context.Context) error {
	return c.sb.FindProcess(c.pid).Kill(ctx)
}

// gap returns the longest time that the clock stood still since a time; false if it did not.
func (c *clock) gap(ctx context.Context, since time.Time) (longest time.Duration, ok bool, err error) {
	time.Sleep(50 * time.Millisecond) // it has to wake up once more
	out, err := c.sb.Command("cat", "/dev/shm/gaps").Output(ctx)
	if err != nil {
		return 0, false, fmt.Errorf("the clock: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		at, length, _ := strings.Cut(strings.TrimSpace(line), " ")
		end, err1 := strconv.ParseInt(at, 10, 64)
		n, err2 := strconv.ParseInt(length, 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, false, fmt.Errorf("the clock: %w", err)
		}
		if end >= since.UnixNano() {
			longest = max(longest, time.Duration(n))
		}
	}
	return longest, longest > 0, nil
}

// pausesSeen pauses and resumes a sandbox at once, and returns for how long its processes stood still each time.
func (s *session) pausesSeen(ctx context.Context, sb *warren.Sandbox, rounds int) (inside sample, err error) {
	c, err := startClock(ctx, sb)
	if err != nil {
		return nil, err
	}
	for range rounds {
		s.filled(ctx, 1)
		begun := time.Now()
		if err := sb.Pause(ctx); err != nil {
			return nil, err
		}
		if err := sb.Resume(ctx); err != nil {
			return nil, err
		}
		gap, ok, err := c.gap(ctx, begun)
		if err != nil {
			return nil, err
		}
		if ok {
			inside = append(inside, gap)
		}
	}
	return inside, c.stop(ctx)
}

// poolState is what the daemon says of its pool.
type poolState struct{ hits, misses, ready float64 }

// pool asks the daemon how many starts found an execution ready, how many did not, and how many are ready; false when it is not the bench's
// own, or does not say.
func (s *session) pool(ctx context.Context) (p poolState, ok bool) {
	if s.data == "" {
		return p, false
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(s.data, "warren.sock"))
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/metrics", nil)
	if err != nil {
		return p, false
	}
	res, err := c.Do(req)
	if err != nil {
		return p, false
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		var to *float64
		switch {
		case strings.HasPrefix(name, "warren_pool_ready{"):
			to = &p.ready
		case strings.HasPrefix(name, "warren_pool_starts_total{") && strings.Contains(name, `ready="true"`):
			to = &p.hits
		case strings.HasPrefix(name, "warren_pool_starts_total{"):
			to = &p.misses
		default:
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return p, false
		}
		*to += n
		ok = true
	}
	return p, ok && lines.Err() == nil
}

// filled waits until n executions are ready in the pool, or as many as it makes, and have come to rest: what is measured is a fork out of the
// pool, and not how fast that is filled.
func (s *session) filled(ctx context.Context, n int) {
	const step, enough, rest = 50 * time.Millisecond, 40, 1500 * time.Millisecond
	last, same := -1.0, 0
	for same < enough && ctx.Err() == nil {
		p, ok := s.pool(ctx)
		if !ok {
			return
		}
		if p.ready >= float64(n) {
			time.Sleep(rest)
			return
		}
		if same++; p.ready != last {
			last, same = p.ready, 0
		}
		time.Sleep(step)
	}
}

// snapshots takes snapshots and removes them.
func snapshots(ctx context.Context, sb *warren.Sandbox, c *clock, rounds int) (took, inside sample, err error) {
	for range rounds {
		var p *warren.Snapshot
		begun := time.Now()
		d, err := timed(func() (err error) {
			p, err = sb.Snapshot(ctx, warren.SnapshotOptions{})
			return err
		})
		if err != nil {
			return nil, nil, err
		}
		took = append(took, d)
		gap, ok, err := c.gap(ctx, begun)
		if err != nil {
			return nil, nil, err
		}
		if ok {
			inside = append(inside, gap)
		}
		if err := p.Delete(ctx); err != nil {
			return nil, nil, err
		}
	}
	return took, inside, nil
}

// forking is what was measured of forks: of several children the time of the last.
type forking struct{ stopped, inside, command, http sample }

func (s *session) forked(ctx context.Context, sb *warren.Sandbox, l load, c *clock, n, rounds int) (f forking, err error) {
	for range rounds {
		s.filled(ctx, n)
		if err := s.forkOnce(ctx, sb, l, c, n, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (s *session) forkOnce(ctx context.Context, sb *warren.Sandbox, l load, c *clock, n int, f *forking) (err error) {
	begun := time.Now()
	made, err := sb.Fork(ctx, warren.ForkOptions{Count: n, All: true})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer func() {
		removed := make([]error, n)
		for i, ch := range made.Children {
			wg.Go(func() { removed[i] = remove(ctx, ch.Sandbox) })
		}
		wg.Wait()
		err = errors.Join(err, errors.Join(removed...))
	}()
	commands, replies, errs := make(sample, n), make(sample, n), make([]error, 2*n)
	for i, ch := range made.Children {
		wg.Go(func() {
			errs[i] = ch.Sandbox.Command("/bin/true").Run(ctx)
			commands[i] = time.Since(begun)
		})
		if l.http {
			wg.Go(func() {
				errs[n+i] = firstReply(ctx, ch.Sandbox)
				replies[i] = time.Since(begun)
			})
		}
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	f.stopped = append(f.stopped, made.Stopped)
	f.command = append(f.command, slices.Max(commands))
	if l.http {
		f.http = append(f.http, slices.Max(replies))
	}
	if c != nil {
		gap, ok, err := c.gap(ctx, begun)
		if err != nil {
			return err
		}
		if ok {
			f.inside = append(f.inside, gap)
		}
	}
	return nil
}
