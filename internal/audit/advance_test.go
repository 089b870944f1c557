package audit

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// wipe removes what a log has written, as somebody would who does not want it to be known.
func wipe(t *testing.T, dir string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(names, filepath.Join(dir, anchorName)) {
		if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

// A head that was kept elsewhere is followed as long as the log goes on from it, and no further.
func TestAdvance(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "log")
	if h, err := Advance(dir, Head{}); err != nil || h != (Head{}) {
		t.Fatalf("of no log: %v, %v", h, err)
	}
	begin := func(n int) Head {
		t.Helper()
		l := open(t, dir, Options{})
		add(t, l, n)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		return l.Head()
	}
	follow := func(from, want Head) {
		t.Helper()
		if h, err := Advance(dir, from); err != nil || h != want {
			t.Fatalf("after %v: %v, %v; want %v", from, h, err, want)
		}
	}
	missed := func(from Head, kind Kind) {
		t.Helper()
		var bad *Bad
		if h, err := Advance(dir, from); !errors.As(err, &bad) || bad.Kind != kind || h != from {
			t.Errorf("after %v: %v, %v; want %s", from, h, err, kind)
		}
		if _, err := Verify(dir, from); !errors.As(err, &bad) {
			t.Errorf("verified against %v: %v", from, err)
		}
	}
	first := begin(5)
	follow(Head{}, first)
	follow(first, first)
	last := begin(55)
	follow(first, last)
	wipe(t, dir)
	missed(last, Removed)
	// Begun anew: shorter, then as long, then longer. The first that was seen is as many as the new one has.
	again := begin(5)
	if again.Seq != first.Seq {
		t.Fatal(again, first)
	}
	whole(t, dir)
	missed(last, Truncated)
	missed(first, Edited)
	begin(55)
	missed(last, Edited)
	begin(10)
	missed(last, Edited)
	follow(Head{}, begin(1))
}

// A log that drops its oldest records goes on from a head that it no longer has.
func TestAdvanceOverDropped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{SegmentBytes: 2_000, MaxBytes: 6_000})
	add(t, l, 3)
	first := l.Head()
	add(t, l, 300)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if h, err := Advance(dir, first); err != nil || h != l.Head() {
		t.Errorf("%v, %v", h, err)
	}
	r := whole(t, dir, first)
	if r.First <= first.Seq+1 {
		t.Fatalf("nothing was dropped: %+v", r)
	}
	// The last that was dropped is known from the first that was not.
	a, err := readAnchor(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Advance(dir, a.Start); err != nil {
		t.Error(err)
	}
	a.Start.Hash = origin
	if _, err := Advance(dir, a.Start); err == nil {
		t.Error("another hash of the last that was dropped is taken")
	}
}
