package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
)

// State measures pause and resume of a sandbox that holds nothing and of one that holds 300 MB: how long the pause takes, the
// resume until its first command is done, and what the memory takes on disk. Then it measures snapshots, forks and pauses of
// sandboxes in which something runs: an idle agent, servers, many files. Last it makes sandboxes of a template with a running server.
// It prints a table of each to w.
func State(ctx context.Context, o Options, w io.Writer) (err error) {
	if err := o.checkLoads(); err != nil {
		return err
	}
	s, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if s.wants(loadIdle) || s.wants(loadMemory) {
		if err := s.plainPauses(ctx, w); err != nil {
			return err
		}
	}
	if err := s.loaded(ctx, w); err != nil {
		return err
	}
	if s.wants(loadTemplate) {
		if err := s.templates(ctx, w); err != nil {
			return fmt.Errorf("template: %w", err)
		}
	}
	return nil
}

// plainPauses measures pauses of sandboxes in which nothing runs.
func (s *session) plainPauses(ctx context.Context, w io.Writer) error {
	const benchmark = "pause and resume"
	fmt.Fprintf(w, "Pause, and resume to first command done (n=%d, %d with 300 MB)\n", s.rounds(), s.heavyRounds())
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tpause\tp95\tresume\tp95\ton disk\t")
	for _, load := range []struct {
		load, name, fill string
		rounds           int
	}{
		{loadIdle, "idle", "true", s.rounds()},
		{loadMemory, "300 MB of memory", "head -c 300000000 /dev/urandom >/dev/shm/held", s.heavyRounds()},
	} {
		if !s.wants(load.load) {
			continue
		}
		pause, resume, size, err := s.cycles(ctx, load.fill, load.rounds)
		if err != nil {
			return fmt.Errorf("%s: %w", load.name, err)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t\n", load.name, ms(pause.median()), ms(pause.at(0.95)), ms(resume.median()), ms(resume.at(0.95)), mib(size))
		values := map[string]float64{"runs": float64(load.rounds), "imageBytes": float64(size)}
		for what, sample := range map[string]sample{"pause": pause, "resume": resume} {
			for name, v := range sample.values() {
				if name != "runs" {
					values[what+strings.ToUpper(name[:1])+name[1:]] = v
				}
			}
		}
		s.record(Row{Benchmark: benchmark, Name: load.name, Values: values})
	}
	return tw.Flush()
}

// heavyRounds is how often what moves much data is repeated.
func (s *session) heavyRounds() int {
	if s.Quick {
		return 1
	}
	return max(s.rounds()/4, 3)
}

// cycles pauses and resumes one sandbox again and again, and returns the times and the size of the last image.
func (s *session) cycles(ctx context.Context, fill string, rounds int) (pause, resume sample, size int64, err error) {
	sb, err := s.sandbox(ctx)
	if err != nil {
		return nil, nil, 0, err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	if err := sb.Command("/bin/sh", "-c", fill).Run(ctx); err != nil {
		return nil, nil, 0, err
	}
	return s.pauses(ctx, sb, rounds)
}

// pauses pauses and resumes a sandbox, each time when an execution is ready, and returns the times and the size of the last image.
func (s *session) pauses(ctx context.Context, sb *warren.Sandbox, rounds int) (pause, resume sample, size int64, err error) {
	for range rounds {
		took, err := timed(func() error { return sb.Pause(ctx) })
		if err != nil {
			return nil, nil, 0, err
		}
		pause = append(pause, took)
		size = sb.MemoryImage
		s.filled(ctx, 1)
		took, err = timed(func() error { return resumed(ctx, sb) })
		if err != nil {
			return nil, nil, 0, err
		}
		resume = append(resume, took)
		time.Sleep(10 * time.Millisecond) // what a resume leaves to do is not counted as a part of the next pause
	}
	return pause, resume, size, nil
}

// resumed resumes and runs a command.
func resumed(ctx context.Context, sb *warren.Sandbox) error {
	if err := sb.Resume(ctx); err != nil {
		return err
	}
	return sb.Command("/bin/true").Run(ctx)
}
