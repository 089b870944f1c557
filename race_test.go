package warren_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/server/servertest"
)

// Each comparison decides only between those that the ones before leave equal. The ends of commands are real.
func TestBestAttempt(t *testing.T) {
	sb := servertest.New(t).Sandbox(warren.Spec{})
	end := func(code string) *warren.ProcessState {
		cmd := sb.Command("sh", "-c", "exit "+code)
		var exit *warren.ExitError
		if err := cmd.Run(t.Context()); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return cmd.ProcessState
	}
	good, bad := end("0"), end("1")
	tests := func(passed, failed int) *warren.TestCount {
		return &warren.TestCount{Passed: passed, Failed: failed}
	}
	small, large := &warren.DiffSize{Files: 2, Insertions: 3, Deletions: 1}, &warren.DiffSize{Files: 1, Insertions: 3, Deletions: 2}
	fewer := &warren.DiffSize{Files: 1, Insertions: 4}
	var order []*warren.Attempt // from the best on
	for _, a := range []warren.Attempt{
		{State: good, Tests: tests(5, 1), Diff: large, Took: time.Hour},
		{State: good, Tests: tests(4, 0), Diff: fewer, Took: 2 * time.Second},
		{State: good, Tests: tests(4, 0), Diff: small, Took: time.Second},
		{State: good, Tests: tests(4, 0), Diff: small, Took: 2 * time.Second},
		{State: good, Tests: tests(4, 0), Diff: large, Took: time.Second},
		{State: good, Tests: tests(4, 0), Took: time.Second},
		{State: good, Tests: tests(4, 1), Diff: small, Took: time.Second},
		{State: good, Diff: small, Took: time.Second},
		{State: bad, Tests: tests(9, 1), Diff: small, Took: time.Second},
	} {
		order = append(order, &a)
	}
	for i, better := range order {
		for j, worse := range order[i+1:] {
			for _, both := range [][]*warren.Attempt{{better, worse}, {worse, better}} {
				if got := warren.BestAttempt(both); got != better {
					t.Errorf("attempt %d is not before %d", i, i+1+j)
				}
			}
		}
	}
	if got := warren.BestAttempt([]*warren.Attempt{{Err: errors.New("not found")}, {State: bad, TimedOut: true}}); got != nil {
		t.Errorf("the best is %+v, though none came to an end", got)
	}
}

func TestRaceOptions(t *testing.T) {
	sb := servertest.New(t).Sandbox(warren.Spec{})
	for _, o := range []warren.RaceOptions{
		{},
		{Count: 3},
		{Commands: [][]string{{"true"}}, Timeout: -time.Second},
		{Commands: [][]string{{"true"}}, Count: -1},
		{Commands: [][]string{{"true"}, {}}},
		{Commands: [][]string{{""}}},
		{Commands: [][]string{{"true"}, {"false"}}, Count: 3},
	} {
		if _, err := sb.Race(t.Context(), o); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// The timeout is the command's: remembering the files has its own, and when it fails the attempt says so and runs all the same.
func TestRaceMark(t *testing.T) {
	srv := servertest.New(t)
	sb := srv.Sandbox(warren.Spec{})
	run := func(mark func(context.Context) error) *warren.Attempt {
		srv.Engine.Mark = mark
		a := &warren.Attempt{Number: 1, Sandbox: sb, Command: []string{"true"}}
		warren.RunAttempt(a, t.Context(), &warren.RaceOptions{Timeout: 30 * time.Second})
		if !a.Succeeded() {
			t.Errorf("the command: %v, %v", a.State, a.Err)
		}
		return a
	}
	if a := run(func(ctx context.Context) error {
		if end, ok := ctx.Deadline(); !ok || time.Until(end) < time.Minute {
			return errors.New("it is given the command's time")
		}
		return nil
	}); a.DiffErr != nil || a.Diff == nil {
		t.Errorf("marked: %v, %v", a.Diff, a.DiffErr)
	}
	if a := run(func(context.Context) error { return warren.ErrExhausted }); !errors.Is(a.DiffErr, warren.ErrExhausted) || a.Diff != nil {
		t.Errorf("not marked: %v, %v", a.Diff, a.DiffErr)
	}
}
