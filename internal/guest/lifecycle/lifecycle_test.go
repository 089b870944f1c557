package lifecycle

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestNames(t *testing.T) {
	dir := t.TempDir()
	n := Names{Hostname: filepath.Join(dir, "hostname"), Hosts: filepath.Join(dir, "hosts")}
	hosts := "127.0.0.1\tlocalhost old\n::1 localhost ip6-localhost\n127.0.1.1\told old.local # old comment\n# 10.0.0.1 old\n\n10.0.0.2 older kept"
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(n.Hosts, hosts)
	write(n.Hostname, "earlier\n")
	if err := n.Set("new", "old", "localhost", ""); err != nil {
		t.Fatal(err)
	}
	want := "127.0.0.1\tlocalhost new\n::1 localhost ip6-localhost\n127.0.1.1\tnew old.local # old comment\n# 10.0.0.1 old\n\n10.0.0.2 older kept"
	if got, _ := os.ReadFile(n.Hosts); string(got) != want {
		t.Errorf("hosts:\n%s\nwant:\n%s", got, want)
	}
	if got, _ := os.ReadFile(n.Hostname); string(got) != "new\n" {
		t.Errorf("hostname %q", got)
	}
	// The kernel has the new name already, so that only the file tells the old one.
	write(n.Hosts, "127.0.1.1 new\n")
	if err := n.Set("newer", "newer"); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(n.Hosts); string(got) != "127.0.1.1\tnewer\n" {
		t.Errorf("hosts %q", got)
	}
	// What is no file is left alone and does not hold anybody up.
	os.Remove(n.Hosts)
	if err := unix.Mkfifo(n.Hosts, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := n.Set("last"); err == nil {
		t.Error("a pipe was taken for a file")
	}
	if got, _ := os.ReadFile(n.Hostname); string(got) != "last\n" {
		t.Errorf("hostname %q", got)
	}
}

func TestHistory(t *testing.T) {
	var h History
	if _, next, ok := h.Last(); ok || next != 0 {
		t.Errorf("an empty history: %d %v", next, ok)
	}
	if _, next, ok, err := h.Next(t.Context(), 0, time.Millisecond); ok || err != nil || next != 0 {
		t.Errorf("nothing happened: %d %v %v", next, ok, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, _, err := h.Next(ctx, 0, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	got := make(chan Event)
	go func() {
		e, _, _, _ := h.Next(t.Context(), 0, time.Hour)
		got <- e
	}()
	h.Add(Event{Name: Fork, SandboxID: "0"})
	if e := <-got; e.SandboxID != "0" {
		t.Errorf("%+v", e)
	}
	for range keptEvents + 10 {
		h.Add(Event{Name: Resume})
	}
	if e, next, ok, err := h.Next(t.Context(), 0, time.Hour); e.Name != Resume || next != 12 || !ok || err != nil {
		t.Errorf("who is far behind: %+v %d %v %v", e, next, ok, err)
	}
}

func TestLogIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for range 100 {
		appendLog(path, strings.Repeat("x", 8<<10)+"\n")
	}
	appendLog(path, "the last\n")
	data, err := os.ReadFile(path)
	if err != nil || len(data) > maxLog || len(data) < maxLog/2 || !strings.HasSuffix(string(data), "\nthe last\n") {
		t.Errorf("%d bytes, %v", len(data), err)
	}
}
