package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func open(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(context.Background(), Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func box(i int) *Sandbox {
	return &Sandbox{
		ID: warren.SandboxID(fmt.Sprintf("s%019d", i)), Name: fmt.Sprint("n", i), Owner: "alice", State: "running", Generation: 1, Driver: "fake",
		Image: "host", ImageDigest: "sha256:x", WorkspaceID: "w", CPUMillis: 1, Memory: 2, Disk: 3, PIDs: 4,
		Created: time.Unix(1, 0), LastActive: time.Unix(2, 0), Expires: 5, Idle: time.Second, Restart: "never", DropWorkspace: true,
		AccessToken: "secret", Labels: map[string]string{"a": "b"}, Failure: &Failure{Reason: "oom", Time: time.Unix(3, 0).UTC()}, Network: "shop",
	}
}

func TestRoundTrip(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "warren.db")
	s := open(t, path)
	want := box(1)
	ws := &Workspace{ID: "w", Name: "space", Owner: "alice", State: "ready", RepoID: "r", Created: time.Unix(1, 0), Keep: true, Source: json.RawMessage(`{"url":"x"}`)}
	tok := Token{ID: "t", User: "alice", Description: "d", Hash: []byte("12345678901234567890123456789012"), Created: time.Unix(1, 0)}
	if err := s.Update(ctx, func(tx *Tx) error {
		return errors.Join(tx.InsertSandbox(want, json.RawMessage(`{"name":"n1"}`)), tx.SetTiming(want.ID, []Milestone{{"x", 1, 2}}),
			tx.InsertWorkspace(ws), tx.InsertToken(tok), tx.SetMeta("k", "v"),
			tx.InsertKey(Key{Owner: "alice", Key: "k", Fingerprint: "f", Object: "o", Created: time.Unix(1, 0)}))
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, path)
	got, err := s.Sandboxes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*Sandbox{want}, got); diff != "" {
		t.Error(diff)
	}
	spaces, err := s.Workspaces(ctx)
	if diff := cmp.Diff([]*Workspace{ws}, spaces); err != nil || diff != "" {
		t.Error(diff, err)
	}
	tokens, err := s.Tokens(ctx)
	if diff := cmp.Diff([]Token{tok}, tokens); err != nil || diff != "" {
		t.Error(diff, err)
	}
	specs, err := s.Specs(ctx, want.ID, "none")
	if err != nil || len(specs) != 1 || string(specs[want.ID].Spec) != `{"name":"n1"}` || len(specs[want.ID].Timing) != 1 {
		t.Errorf("%v, %v", specs, err)
	}
	if v, err := s.Meta(ctx, "k"); v != "v" || err != nil {
		t.Errorf("%q, %v", v, err)
	}
	if k, err := s.Key(ctx, "alice", "k"); err != nil || k.Object != "o" {
		t.Errorf("%+v, %v", k, err)
	}
	if k, err := s.Key(ctx, "bob", "k"); err != nil || k != nil {
		t.Errorf("%+v, %v", k, err)
	}
}

// TestGroups: many changes share commits, one that fails takes none with it, and the order of events is that of commits.
func TestGroups(t *testing.T) {
	ctx := context.Background()
	s := open(t, filepath.Join(t.TempDir(), "warren.db"))
	var groups, changes atomic.Int64
	s.Observe(func(_ time.Duration, n int) { groups.Add(1); changes.Add(int64(n)) })
	const n = 400
	boom := errors.New("boom")
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			err := s.Update(ctx, func(tx *Tx) error {
				if err := tx.InsertSandbox(box(i), json.RawMessage("{}")); err != nil {
					return err
				}
				if err := tx.AppendEvent(&Event{Time: time.Now(), Owner: "alice", Action: "x", SandboxID: box(i).ID}); err != nil {
					return err
				}
				if i%4 == 0 {
					return boom
				}
				return nil
			})
			if (i%4 == 0) != errors.Is(err, boom) || (i%4 != 0 && err != nil) {
				t.Errorf("change %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	rows, err := s.Sandboxes(ctx)
	if err != nil || len(rows) != n*3/4 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
	events, upto, err := s.Events(ctx, 0, EventFilter{Owner: "alice"}, 1000)
	if err != nil || len(events) != n*3/4 || upto != s.LastSeq() {
		t.Errorf("%d events to %d of %d, %v", len(events), upto, s.LastSeq(), err)
	}
	if !slices.IsSortedFunc(events, func(a, b *Event) int { return int(a.Seq - b.Seq) }) {
		t.Error("events out of order")
	}
	t.Logf("%d changes in %d commits", changes.Load(), groups.Load())
	if groups.Load() >= changes.Load() {
		t.Error("no change shared a commit")
	}
	// A constraint says which kind of error it is.
	if err := s.Update(ctx, func(tx *Tx) error { return tx.InsertSandbox(box(1), json.RawMessage("{}")) }); !errors.Is(err, warren.ErrExists) {
		t.Errorf("a second time: %v", err)
	}
	if err := s.Update(ctx, func(tx *Tx) error { return tx.UpdateSandbox(box(0)) }); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("update of none: %v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.Update(gone, func(tx *Tx) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	s.Close()
	if err := s.Update(ctx, func(tx *Tx) error { return nil }); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("closed: %v", err)
	}
}

func TestEventsArePruned(t *testing.T) {
	ctx := context.Background()
	s, err := Open(ctx, Options{Path: filepath.Join(t.TempDir(), "warren.db"), MaxEvents: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 10 {
		if err := s.Update(ctx, func(tx *Tx) error {
			for range 64 {
				if err := tx.AppendEvent(&Event{Time: time.Now(), Owner: "a", Action: "x"}); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	oldest, err := s.OldestSeq(ctx)
	if err != nil || s.LastSeq() != 640 || oldest < 500 || oldest > 541 {
		t.Errorf("oldest %d of %d, %v", oldest, s.LastSeq(), err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if err := s.WaitSeq(ctx, 639); err != nil {
		t.Error(err)
	}
	if err := s.WaitSeq(ctx, 640); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	ctx := context.Background()
	good := func(t *testing.T) string {
		path := filepath.Join(t.TempDir(), "warren.db")
		s := open(t, path)
		for i := range 200 {
			if err := s.Update(ctx, func(tx *Tx) error {
				return tx.InsertSandbox(box(i), json.RawMessage(`{"x":"`+strings.Repeat("y", 500)+`"}`))
			}); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, path string)
		want  error
		says  string
	}{
		{"not a database", func(t *testing.T, p string) { write(t, p, []byte("hello, this is not a database at all")) }, warren.ErrUnavailable, "is damaged"},
		{"short file", func(t *testing.T, p string) { write(t, p, []byte("SQL")) }, warren.ErrUnavailable, "is damaged"},
		{"truncated", func(t *testing.T, p string) {
			if err := os.Truncate(p, 20<<10); err != nil {
				t.Fatal(err)
			}
		}, warren.ErrUnavailable, "is damaged"},
		{"page of garbage", func(t *testing.T, p string) {
			b := read(t, p)
			copy(b[len(b)/2/4096*4096:], bytes.Repeat([]byte{0xa5}, 4096))
			write(t, p, b)
		}, warren.ErrUnavailable, "is damaged"},
		{"missing beside its log", func(t *testing.T, p string) {
			write(t, p+"-wal", []byte("x"))
			if err := os.Remove(p); err != nil {
				t.Fatal(err)
			}
		}, warren.ErrUnavailable, "is missing"},
		{"directory", func(t *testing.T, p string) {
			if err := errors.Join(os.Remove(p), os.Mkdir(p, 0o700)); err != nil {
				t.Fatal(err)
			}
		}, warren.ErrUnavailable, ""},
		{"newer", func(t *testing.T, p string) {
			s := open(t, p)
			if _, err := s.conn.ExecContext(ctx, "PRAGMA user_version = 99"); err != nil {
				t.Fatal(err)
			}
			s.Close()
		}, warren.ErrState, "written by a newer Warren"},
		{"no directory", func(t *testing.T, p string) {
			if err := os.RemoveAll(filepath.Dir(p)); err != nil {
				t.Fatal(err)
			}
		}, warren.ErrNotFound, "directory does not exist"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := good(t)
			c.spoil(t, path)
			before, _ := os.ReadFile(path)
			_, err := Open(ctx, Options{Path: path})
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v, want %v that says %q and names the file", err, c.want, c.says)
			}
			if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
				t.Error("the file was changed")
			}
		})
	}
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "warren.db")
	s := open(t, path)
	_, err := Open(context.Background(), Options{Path: path})
	if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) {
		t.Errorf("a second open: %v", err)
	}
	s.Close()
	open(t, path)
}

// TestMigrateIdle opens a store of version 2: sandboxes that idling was to remove are removed still, and those that are paused were
// paused by somebody.
func TestMigrateIdle(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "warren.db")
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, path)
	idle, paused, plain := box(1), box(2), box(3)
	idle.Idle, paused.Idle, plain.Idle = time.Minute, 0, 0
	paused.State = "paused"
	if err := s.Update(ctx, func(tx *Tx) error {
		for _, sb := range []*Sandbox{idle, paused, plain} {
			if err := tx.InsertSandbox(sb, json.RawMessage("{}")); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// Back to what version 2 was.
	for _, c := range []string{"idle_action", "no_auto_resume", "pause_reason"} {
		if _, err := s.conn.ExecContext(ctx, "ALTER TABLE sandboxes DROP COLUMN "+c); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.conn.ExecContext(ctx, "PRAGMA user_version = 2"); err != nil {
		t.Fatal(err)
	}
	if err := s.migrateTo(ctx, all[:3]); err != nil {
		t.Fatal(err)
	}
	rows, err := s.Sandboxes(ctx)
	if err != nil || len(rows) != 3 {
		t.Fatal(rows, err)
	}
	for i, want := range [][2]string{{"delete", ""}, {"", "asked"}, {"", ""}} {
		if got := [2]string{rows[i].IdleAction, rows[i].PauseReason}; got != want || rows[i].NoAutoResume {
			t.Errorf("row %d: %q, %v; want %q", i, got, rows[i].NoAutoResume, want)
		}
	}
}

// TestMigrate goes from version 1 to a later one that fails half-way, is repeated, and then holds.
func TestMigrate(t *testing.T) {
	ctx := context.Background()
	path := filepath.Join(t.TempDir(), "warren.db")
	s := open(t, path)
	if err := s.Update(ctx, func(tx *Tx) error { return tx.InsertSandbox(box(1), json.RawMessage("{}")) }); err != nil {
		t.Fatal(err)
	}
	all, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	have := len(all)
	all = append(all, migration{have + 1, "next.sql", "CREATE TABLE later (x INTEGER); INSERT INTO later VALUES (7);"})
	t.Cleanup(failpoint.Clear)
	if err := failpoint.Set("store.migrate=error"); err != nil {
		t.Fatal(err)
	}
	if err := s.migrateTo(ctx, all); !errors.Is(err, failpoint.ErrInjected) {
		t.Fatal(err)
	}
	failpoint.Clear()
	var n int
	if err := s.conn.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_master WHERE name = 'later'").Scan(&n); err != nil || n != 0 {
		t.Fatalf("%d tables of a migration that failed, %v", n, err)
	}
	if err := s.migrateTo(ctx, all); err != nil {
		t.Fatal(err)
	}
	if err := s.conn.QueryRowContext(ctx, "SELECT x FROM later").Scan(&n); err != nil || n != 7 {
		t.Fatal(n, err)
	}
	s.Close()
	// This program knows only the first, and says so; the copy that was made before is as good as new.
	_, err = Open(ctx, Options{Path: path})
	if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), fmt.Sprintf("warren.db.v%d", have)) {
		t.Fatal(err)
	}
	if err := os.Rename(fmt.Sprintf("%s.v%d", path, have), path); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"-wal", "-shm"} {
		if err := os.Remove(path + s); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	rows, err := open(t, path).Sandboxes(ctx)
	if err != nil || len(rows) != 1 {
		t.Errorf("%d rows in the copy, %v", len(rows), err)
	}
}

func TestBackup(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "warren.db"))
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if err := s.Update(ctx, func(tx *Tx) error { return tx.InsertSandbox(box(i), json.RawMessage("{}")) }); err != nil {
				t.Error(err)
			}
		})
	}
	if err := s.Backup(ctx, filepath.Join(dir, "copy")); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if err := s.Backup(ctx, filepath.Join(dir, "copy")); !errors.Is(err, warren.ErrExists) {
		t.Errorf("over a file: %v", err)
	}
	if _, err := open(t, filepath.Join(dir, "copy")).Sandboxes(ctx); err != nil {
		t.Error(err)
	}
}

func TestDamagedRow(t *testing.T) {
	ctx := context.Background()
	s := open(t, filepath.Join(t.TempDir(), "warren.db"))
	for i := range 3 {
		if err := s.Update(ctx, func(tx *Tx) error { return tx.InsertSandbox(box(i), json.RawMessage("{}")) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Update(ctx, func(tx *Tx) error {
		_, err := tx.exec("UPDATE sandboxes SET labels = '{', memory = 'much' WHERE id = ?", string(box(1).ID))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	rows, err := s.Sandboxes(ctx)
	if err != nil || len(rows) != 3 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for i, row := range rows {
		if (row.Damaged != "") != (i == 1) {
			t.Errorf("row %d: damage %q", i, row.Damaged)
		}
	}
}

// TestFullDisk fills the disk: changes are refused with words, what was acknowledged stays, and when there is room again
// the store goes on by itself.
func TestFullDisk(t *testing.T) {
	ctx := context.Background()
	dir := testenv.SmallFS(t, 8<<20, 64)
	path := filepath.Join(dir, "warren.db")
	others := filepath.Join(dir, "others") // what people can delete
	write(t, others, make([]byte, 3<<20))
	s := open(t, path)
	big := json.RawMessage(`{"x":"` + strings.Repeat("y", 20000) + `"}`)
	made := 0
	var err error
	for i := range 1000 {
		if err = s.Update(ctx, func(tx *Tx) error { return tx.InsertSandbox(box(i), big) }); err != nil {
			break
		}
		made++
	}
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "full") {
		t.Fatalf("after %d rows: %v", made, err)
	}
	t.Logf("%d rows, then: %v", made, err)
	rows, err := s.Sandboxes(ctx)
	if err != nil || len(rows) != made {
		t.Fatalf("%d rows of %d, %v", len(rows), made, err)
	}
	if err := s.Close(); err != nil {
		t.Logf("close on a full disk: %v", err)
	}
	filler := filepath.Join(dir, "filler")
	fill(t, filler)
	if s, err := Open(ctx, Options{Path: path}); err == nil {
		s.Close() // the log's place was enough
	} else if !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("open on a full disk: %v", err)
	}
	if err := errors.Join(os.Remove(filler), os.Remove(others)); err != nil {
		t.Fatal(err)
	}
	s = open(t, path)
	if rows, err = s.Sandboxes(ctx); err != nil || len(rows) != made {
		t.Fatalf("%d rows of %d after a full disk, %v", len(rows), made, err)
	}
	for _, row := range rows[:made/2] {
		if err := s.UpdateFreeing(ctx, func(tx *Tx) error { return tx.DeleteSandbox(row.ID) }); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	eventuallyUpdates(t, s)
}

// eventuallyUpdates: checkpoints give room back.
func eventuallyUpdates(t *testing.T, s *Store) {
	t.Helper()
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = s.Update(context.Background(), func(tx *Tx) error { return tx.SetMeta("room", "again") }); err == nil {
			return
		}
	}
	t.Fatal(err)
}

func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
}

func TestNoInodes(t *testing.T) {
	dir := testenv.SmallFS(t, 8<<20, 16)
	for i := range 64 {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint("f", i)))
		if err != nil {
			break
		}
		f.Close()
	}
	if _, err := Open(context.Background(), Options{Path: filepath.Join(dir, "warren.db")}); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("open without inodes: %v", err)
	}
}

func BenchmarkUpdate(b *testing.B) {
	s := open(b, filepath.Join(b.TempDir(), "warren.db"))
	var n atomic.Int64
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			i := int(n.Add(1))
			if err := s.Update(context.Background(), func(tx *Tx) error { return tx.InsertSandbox(box(i), json.RawMessage("{}")) }); err != nil {
				b.Error(err)
			}
		}
	})
}

// TestLockOfTheGone waits for a lock that a child of an owner has which has ended, and for nobody else's.
func TestLockOfTheGone(t *testing.T) {
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		pid   int
		waits bool
	}{"of one that has ended": {ended.Process.Pid, true}, "of this one": {os.Getpid(), true}, "of another": {os.Getppid(), false}} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "warren.db")
			f, err := os.Create(path + ".lock")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			fmt.Fprintln(f, tt.pid)
			if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
				t.Fatal(err)
			}
			if tt.waits {
				time.AfterFunc(200*time.Millisecond, func() { syscall.Flock(int(f.Fd()), syscall.LOCK_UN) })
			}
			s, err := Open(t.Context(), Options{Path: path})
			switch {
			case tt.waits && err != nil:
				t.Error(err)
			case !tt.waits && (!errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprint("process ", tt.pid))):
				t.Errorf("open: %v", err)
			}
			if err == nil {
				s.Close()
			}
		})
	}
}
