package server_test

import (
	"errors"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// TestRaceKeepsSource has races that last longer than the idle timeout of their source, at which nobody else is: it is neither removed nor
// paused in their midst.
func TestRaceKeepsSource(t *testing.T) {
	for _, action := range []warren.IdleAction{warren.IdleDelete, warren.IdlePause} {
		t.Run(string(action), func(t *testing.T) {
			t.Parallel()
			b := newBuilder(t)
			src, err := b.Create(t.Context(), warren.Spec{IdleTimeout: time.Second, IdleAction: action})
			if err != nil {
				t.Fatal(err)
			}
			var state warren.SandboxState
			r, err := src.Race(t.Context(), warren.RaceOptions{Commands: [][]string{{"sleep", "4"}}, Count: 2, Choose: func(all []*warren.Attempt) *warren.Attempt {
				if err := src.Refresh(t.Context()); err != nil {
					t.Errorf("the source at the end of the race: %v", err)
				}
				state = src.State
				return nil
			}})
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range r.Attempts {
				if !a.Succeeded() {
					t.Errorf("attempt %d: %v, %v", a.Number, a.State, a.Err)
				}
			}
			if state != warren.StateRunning {
				t.Errorf("the source is %s at the end of the race", state)
			}
			// The race over, so is its use.
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
				sb, err := b.Sandbox(t.Context(), string(src.ID))
				if errors.Is(err, warren.ErrNotFound) || err == nil && sb.State == warren.StatePaused {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if time.Now().After(end) {
					t.Fatalf("long after the race the source is %s", sb.State)
				}
			}
		})
	}
}

// TestRaceChildrenRemoveThemselves asks what the children of a race are from the fork on: nothing tells them later what becomes of them
// when the client is killed.
func TestRaceChildrenRemoveThemselves(t *testing.T) {
	b := newBuilder(t)
	src, err := b.Create(t.Context(), warren.Spec{IdleTimeout: time.Hour, IdleAction: warren.IdlePause})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []warren.IdleAction{"", warren.IdleDelete} {
		want := warren.IdlePause
		if a != "" {
			want = a
		}
		f, err := src.Fork(t.Context(), warren.ForkOptions{IdleAction: a})
		if err != nil {
			t.Fatal(err)
		}
		if s := f.Children[0].Sandbox.Spec; s.IdleAction != want || s.IdleTimeout != time.Hour {
			t.Errorf("fork with %q: %q after %v", a, s.IdleAction, s.IdleTimeout)
		}
	}
	if _, err := src.Fork(t.Context(), warren.ForkOptions{IdleAction: "fly"}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("an unknown action: %v", err)
	}
	if _, err := src.Race(t.Context(), warren.RaceOptions{Commands: [][]string{{"true"}}, Count: 2, Choose: func(all []*warren.Attempt) *warren.Attempt {
		for _, a := range all {
			if s := a.Sandbox.Spec; s.IdleAction != warren.IdleDelete || s.IdleTimeout > 10*time.Minute {
				t.Errorf("attempt %d: %q after %v", a.Number, s.IdleAction, s.IdleTimeout)
			}
			for e, err := range b.Events(t.Context(), warren.EventOptions{Sandbox: string(a.Sandbox.ID), NoFollow: true}) {
				if err != nil || e.Action == "sandbox.update" {
					t.Errorf("attempt %d: %+v, %v", a.Number, e, err)
				}
			}
		}
		return nil
	}}); err != nil {
		t.Fatal(err)
	}
}
