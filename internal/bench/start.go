package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/bench/hostproc"
)

// Targets of the design, on 2 cores without KVM.
const (
	targetCold = 100 * time.Millisecond
	targetExec = 3 * time.Millisecond
	targetIdle = 15 << 20
)

// way is one way to start something and have its first command done.
type way struct {
	name string
	// run does it once and returns how long it took, without what cleans up.
	run func(ctx context.Context) (time.Duration, error)
	sample
}

// Start measures starts: create to first command done beside the other ways that this machine has, the round trip of a
// command, throughput, and memory of idle sandboxes. It prints a table of each to w.
func Start(ctx context.Context, o Options, w io.Writer) (err error) {
	s, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	for _, part := range []func(context.Context, io.Writer) error{s.coldStarts, s.roundTrips, s.throughput, s.idleMemory} {
		if err := part(ctx, w); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	return nil
}

func (s *session) coldStarts(ctx context.Context, w io.Writer) error {
	first, err := timed(func() error {
		sb, err := s.sandbox(ctx)
		if err != nil {
			return err
		}
		return remove(ctx, sb)
	})
	if err != nil {
		return err
	}
	ways := []*way{{name: "warren", run: s.once}, {name: "fork+exec", run: plain("/bin/true")}}
	var absent []string
	const benchmark = "cold start"
	add := func(y *way, why string) {
		if why == "" {
			// Once before the clock runs, as for warren.
			if _, err := y.run(ctx); err != nil {
				why = firstLine(err.Error())
			}
		}
		if why != "" {
			absent = append(absent, y.name+" ("+why+")")
			s.record(Row{Benchmark: benchmark, Name: y.name, Absent: why})
			return
		}
		ways = append(ways, y)
	}
	add(bwrap())
	run, cleanup := runc(s.Dir)
	defer cleanup()
	add(run, "")
	add(docker(ctx))
	for range s.rounds() {
		for _, y := range ways {
			d, err := y.run(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", y.name, err)
			}
			y.sample = append(y.sample, d)
		}
	}
	fmt.Fprintf(w, "Cold start: create to first command done (n=%d each, taking turns; the first of this server took %s)\n", s.rounds(), ms(first))
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tmedian\tp95\tmin\tof warren\t")
	for _, y := range ways {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%.3f\t\n", y.name, ms(y.median()), ms(y.at(0.95)), ms(y.at(0)), float64(y.median())/float64(ways[0].median()))
		s.record(Row{Benchmark: benchmark, Name: y.name, Values: y.values()})
	}
	s.record(Row{Benchmark: benchmark, Name: "first of this server", Values: map[string]float64{"ms": inMs(first)}})
	tw.Flush()
	if len(absent) > 0 {
		fmt.Fprintf(w, "  not measured: %s\n", strings.Join(absent, ", "))
	}
	s.verdict(w, benchmark, "median", ways[0].median() <= targetCold, ms(targetCold))
	return nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// once creates a sandbox, runs a command in it and deletes it, which is not counted.
func (s *session) once(ctx context.Context) (time.Duration, error) {
	var sb *warren.Sandbox
	d, err := timed(func() (err error) {
		sb, err = s.sandbox(ctx)
		return err
	})
	if err != nil {
		return 0, err
	}
	return d, remove(ctx, sb)
}

// plain runs a program of the host.
func plain(name string, args ...string) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) {
		var out bytes.Buffer
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Stdout, cmd.Stderr = &out, &out
		d, err := timed(cmd.Run)
		if err != nil {
			err = fmt.Errorf("%w %s", err, firstLine(out.String()))
		}
		return d, err
	}
}

func bwrap() (*way, string) {
	y := &way{name: "bwrap", run: plain("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/bin/true")}
	return y, missing("bwrap")
}

func missing(name string) string {
	if _, err := exec.LookPath(name); err != nil {
		return "not installed"
	}
	return ""
}

// docker uses whatever image the engine has with a true in it.
func docker(ctx context.Context) (*way, string) {
	y := &way{name: "docker run"}
	if why := missing("docker"); why != "" {
		return y, why
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	images, err := exec.CommandContext(ctx, "docker", "image", "ls", "-q").Output()
	if err != nil {
		return y, "no engine answers"
	}
	image := firstLine(string(images))
	if image == "" {
		return y, "the engine has no image"
	}
	y.run = plain("docker", "run", "--rm", "--network", "none", "--entrypoint", "/bin/true", image)
	return y, ""
}

// runc runs a bundle whose root shows the host's programs, as the image host does.
func runc(dir string) (y *way, cleanup func()) {
	y = &way{name: "runc run"}
	bundle, err := os.MkdirTemp(dir, "runc-")
	if err == nil {
		err = writeBundle(bundle)
	}
	if why := missing("runc"); why != "" {
		err = errors.New(why)
	}
	n := 0
	y.run = func(ctx context.Context) (time.Duration, error) {
		if err != nil {
			return 0, err
		}
		n++
		return plain("runc", "--root", filepath.Join(bundle, "state"), "run", "--bundle", bundle, fmt.Sprintf("warren-bench-%d-%d", os.Getpid(), n))(ctx)
	}
	return y, func() { os.RemoveAll(bundle) }
}

func writeBundle(bundle string) error {
	type m = map[string]any
	mounts := []m{
		{"destination": "/proc", "type": "proc", "source": "proc"},
		{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
	}
	root := filepath.Join(bundle, "rootfs")
	for _, d := range []string{"proc", "dev", "usr"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	mounts = append(mounts, m{"destination": "/usr", "type": "bind", "source": "/usr", "options": []string{"rbind", "ro"}})
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if target, err := os.Readlink("/" + d); err == nil {
			if err := os.Symlink(target, filepath.Join(root, d)); err != nil {
				return err
			}
		} else if _, err := os.Stat("/" + d); err == nil {
			if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
				return err
			}
			mounts = append(mounts, m{"destination": "/" + d, "type": "bind", "source": "/" + d, "options": []string{"rbind", "ro"}})
		}
	}
	text, err := json.Marshal(m{
		"ociVersion": "1.0.2",
		"process":    m{"user": m{"uid": 0, "gid": 0}, "args": []string{"/bin/true"}, "cwd": "/", "env": []string{"PATH=/usr/bin:/bin"}, "noNewPrivileges": true},
		"root":       m{"path": "rootfs", "readonly": true},
		"mounts":     mounts,
		"linux":      m{"namespaces": []m{{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600)
}

func (s *session) roundTrips(ctx context.Context, w io.Writer) error {
	sb, err := s.sandbox(ctx)
	if err != nil {
		return err
	}
	defer remove(ctx, sb)
	shell, err := sb.Session(ctx, warren.SessionOptions{})
	if err != nil {
		return err
	}
	host := plain("/bin/true")
	var inside, inShell, looked, outside sample
	for range 10 * s.rounds() {
		for _, one := range []struct {
			into *sample
			run  func() error
		}{
			{&inside, func() error { return sb.Command("/bin/true").Run(ctx) }},
			{&inShell, func() error { _, err := shell.Run(ctx, "true", warren.SessionRun{}); return err }},
			{&looked, func() error { _, err := fs.Stat(sb.FS(), "workspace"); return err }},
		} {
			d, err := timed(one.run)
			if err != nil {
				return err
			}
			*one.into = append(*one.into, d)
		}
		d, err := host(ctx)
		if err != nil {
			return err
		}
		outside = append(outside, d)
	}
	fmt.Fprintf(w, "Round trip of a command through the API (n=%d): median %s, p95 %s, min %s; the same without a sandbox: median %s\n",
		len(inside), ms(inside.median()), ms(inside.at(0.95)), ms(inside.at(0)), ms(outside.median()))
	s.record(Row{Benchmark: "round trip", Name: "warren", Values: inside.values()})
	fmt.Fprintf(w, "Round trip without a new process: a command in a session: median %s, p95 %s; the status of a file: median %s, p95 %s\n",
		ms(inShell.median()), ms(inShell.at(0.95)), ms(looked.median()), ms(looked.at(0.95)))
	s.record(Row{Benchmark: "round trip", Name: "session", Values: inShell.values()})
	s.record(Row{Benchmark: "round trip", Name: "stat", Values: looked.values()})
	s.record(Row{Benchmark: "round trip", Name: "fork+exec", Values: outside.values()})
	s.verdict(w, "round trip", "median", inside.median() <= targetExec, ms(targetExec))
	return nil
}

func (s *session) throughput(ctx context.Context, w io.Writer) error {
	n := 24
	if s.Quick {
		n = 4
	}
	fmt.Fprintf(w, "Throughput: %d creates with their first command\n", n)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "at once\tper second\tmedian\tp95\t")
	for _, workers := range []int{1, 2, 4} {
		var (
			mu    sync.Mutex
			times sample
			errs  []error
			made  []*warren.Sandbox
			wg    sync.WaitGroup
		)
		next := make(chan struct{}, n)
		for range n {
			next <- struct{}{}
		}
		close(next)
		begin := time.Now()
		for range workers {
			wg.Go(func() {
				for range next {
					var sb *warren.Sandbox
					d, err := timed(func() (err error) {
						sb, err = s.sandbox(ctx)
						return err
					})
					mu.Lock()
					if err != nil {
						errs = append(errs, err)
					} else {
						made, times = append(made, sb), append(times, d)
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		took := time.Since(begin)
		for _, sb := range made {
			errs = append(errs, remove(ctx, sb))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		fmt.Fprintf(tw, "%d\t%.1f\t%s\t%s\t\n", workers, float64(n)/took.Seconds(), ms(times.median()), ms(times.at(0.95)))
		v := times.values()
		v["perSecond"] = float64(n) / took.Seconds()
		s.record(Row{Benchmark: "throughput", Name: strconv.Itoa(workers) + " at once", Values: v})
	}
	return tw.Flush()
}

func (s *session) idleMemory(ctx context.Context, w io.Writer) (err error) {
	steps := s.Idle
	if steps == nil {
		steps = []int{1, 50, 100}
	}
	var idle []*warren.Sandbox
	defer func() {
		for _, sb := range idle {
			err = errors.Join(err, remove(ctx, sb))
		}
	}()
	fmt.Fprintln(w, "Memory of idle sandboxes, each")
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "sandboxes\tPSS\tMemAvailable\tprocesses\t")
	before := s.settled()
	poolPSS, poolProcesses, err := runtimes()
	if err != nil {
		return err
	}
	last := int64(0)
	for _, n := range steps {
		for len(idle) < n {
			sb, err := s.sandbox(ctx)
			if err != nil {
				return err
			}
			idle = append(idle, sb)
		}
		available := s.settled()
		pss, processes, err := runtimes()
		if err != nil {
			return err
		}
		pss, processes = pss-poolPSS, processes-poolProcesses
		last = (before - available) / int64(n)
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t\n", n, mib(pss/int64(n)), mib(last), strconv.FormatFloat(float64(processes)/float64(n), 'f', 1, 64))
		s.record(Row{Benchmark: "idle memory", Name: strconv.Itoa(n) + " sandboxes", Values: map[string]float64{
			"pssBytes": float64(pss / int64(n)), "memAvailableBytes": float64(last), "processes": float64(processes) / float64(n),
		}})
	}
	tw.Flush()
	s.verdict(w, "idle memory", "MemAvailable of the last row", last <= targetIdle, mib(targetIdle))
	return nil
}

// runtimes measures all processes of the runtime. A sandbox from the pool has not its own name on its command line, so what
// sandboxes take is what these take more than before.
func runtimes() (pss int64, processes int, err error) {
	pids, err := hostproc.Naming("warren-runtime")
	for _, pid := range pids {
		pss += hostproc.PSS(pid)
	}
	return pss, len(pids), err
}

// settled returns the memory that is available once it has stood still for 1.5 seconds, so that the pool is full, or after ten.
// A quick run waits for half a second.
func (o Options) settled() int64 {
	last, still, most := hostproc.MemAvailable(), 0, 20
	if o.Quick {
		most = 1
	}
	for range most {
		time.Sleep(500 * time.Millisecond)
		now := hostproc.MemAvailable()
		if d := now - last; d < 1<<20 && d > -1<<20 {
			if still++; still == 3 {
				return now
			}
		} else {
			still = 0
		}
		last = now
	}
	return last
}
