package audit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/warren-sandbox/warren/internal/testenv"
)

func open(t testing.TB, dir string, opts Options) *Log {
	t.Helper()
	l, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func add(t testing.TB, l *Log, n int) (list []Record) {
	t.Helper()
	for i := range n {
		r, err := l.Append(t.Context(), Record{Actor: "sbx_1", Action: "flow.allow", Sandbox: "sbx_1", Message: fmt.Sprintf("GET host-%d.lab:443", i), Fields: map[string]string{"rule": "registries/3", "bytes": "12"}})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, r)
	}
	return list
}

func read(t testing.TB, dir string, after int64) (list []Record) {
	t.Helper()
	if err := Read(dir, after, func(r Record) error { list = append(list, r); return nil }); err != nil {
		t.Fatal(err)
	}
	return list
}

func whole(t testing.TB, dir string, anchors ...Head) Report {
	t.Helper()
	report, err := Verify(dir, anchors...)
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	return report
}

func TestAppendReadVerify(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a", "log")
	l := open(t, dir, Options{})
	want := add(t, l, 10)
	if got := read(t, dir, 0); !slices.EqualFunc(got, want, equal) {
		t.Errorf("read %v, want %v", got, want)
	}
	if got := read(t, dir, 7); len(got) != 3 || got[0].Seq != 8 {
		t.Errorf("after 7: %v", got)
	}
	if h := l.Head(); h != (Head{10, want[9].Hash}) {
		t.Errorf("head %v", h)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r := whole(t, dir, Head{4, want[3].Hash}); r.Records != 10 || r.Anchor.Seq != 10 || r.Last != r.Anchor || r.First != 1 {
		t.Errorf("report %+v", r)
	}
	if _, err := l.Append(t.Context(), Record{Action: "x"}); !errors.Is(err, ErrClosed) {
		t.Errorf("append after close: %v", err)
	}
	l = open(t, dir, Options{})
	if r := add(t, l, 1)[0]; r.Seq != 11 || r.Prev != want[9].Hash {
		t.Errorf("after opening again: %+v", r)
	}
	whole(t, dir)
}

// A copy of the lock's descriptor, such as a process has that is being started, does not keep the next writer out.
func TestLockIsLetGo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for range 3 {
		l, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		copied, err := syscall.Dup(int(l.lock.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(copied)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// The rule of the chain, said without the package: SHA-256 over the hash before and the line without its hash.
func TestChainRule(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	add(t, open(t, dir, Options{}), 5)
	text, err := os.ReadFile(filepath.Join(dir, "00000000000000000001.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	prev := strings.Repeat("0", 64)
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n")[1:] {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		hash := r["hash"].(string)
		sum := sha256.Sum256([]byte(prev + strings.Replace(line, `,"hash":"`+hash+`"`, "", 1)))
		if r["prev"] != prev || hex.EncodeToString(sum[:]) != hash || r["seq"] != float64(i+1) {
			t.Errorf("line %d: %s", i+2, line)
		}
		prev = hash
	}
}

func equal(a, b Record) bool {
	return a.Seq == b.Seq && a.Time.Equal(b.Time) && a.Hash == b.Hash && a.Prev == b.Prev && a.Message == b.Message && a.Actor == b.Actor &&
		a.Action == b.Action && a.Sandbox == b.Sandbox && fmt.Sprint(a.Fields) == fmt.Sprint(b.Fields)
}

func TestRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := Verify(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("verify of no log: %v", err)
	}
	if err := Read(filepath.Join(dir, "none"), 0, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read of no log: %v", err)
	}
	l := open(t, dir, Options{})
	if _, err := Open(dir, Options{}); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("a second writer: %v", err)
	}
	if _, err := l.Append(t.Context(), Record{Message: "x"}); err == nil || !strings.Contains(err.Error(), "action") {
		t.Errorf("no action: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Append(ctx, Record{Action: "x"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
	whole(t, dir)
}

// Hostile texts end as one line of printable characters each.
func TestHostile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{})
	tests := []struct{ in, want string }{
		{"a\nb\r\tc", `a\nb\r\tc`},
		{"\x1b[31mred\x1b[0m", `\x1b[31mred\x1b[0m`},
		{`{"seq":1}"},{`, `{"seq":1}"},{`},
		{"evil\u202egnp.exe", `evil\u202egnp.exe`},
		{"zero\u200bwidth\u2028\u0085\ufeff", `zero\u200bwidth\u2028\u0085\ufeff`},
		{"bad\xff\xc3(utf8", `bad\xff\xc3(utf8`},
		{"nul\x00del\x7f", `nul\x00del\x7f`},
		{`back\slash`, `back\\slash`},
		{"tag\U000e0041", `tag\U000e0041`},
		{"größe 日本 \ufffd", "größe 日本 \ufffd"},
	}
	for _, tt := range tests {
		r, err := l.Append(t.Context(), Record{Action: tt.in, Actor: tt.in, Sandbox: tt.in, Message: tt.in, Fields: map[string]string{"host": tt.in, tt.in: "x"}})
		if err != nil {
			t.Fatal(err)
		}
		for _, got := range []string{r.Action, r.Actor, r.Sandbox, r.Message, r.Fields["host"]} {
			if got != tt.want {
				t.Errorf("%q became %q, want %q", tt.in, got, tt.want)
			}
		}
		if r.Fields[tt.want] != "x" {
			t.Errorf("key %q: %v", tt.in, r.Fields)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, segment{first: 1}.name()))
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte("\n")); n != len(tests)+1 || bytes.ContainsAny(text, "\x00\x1b\r\t\x7f") || !utf8.Valid(text) {
		t.Errorf("%d lines:\n%q", n, text)
	}
	if got := read(t, dir, 0); len(got) != len(tests) {
		t.Errorf("%d records", len(got))
	}
	whole(t, dir)
}

func TestCaps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{})
	megabyte := strings.Repeat("x", 1<<20)
	fields := map[string]string{}
	for i := range 1000 {
		fields[fmt.Sprintf("field-%04d", i)] = strings.Repeat(`"\`, 300)
	}
	for _, r := range []Record{
		{Action: megabyte, Actor: megabyte, Sandbox: megabyte, Message: megabyte, Fields: map[string]string{megabyte: megabyte, megabyte + "y": "2"}},
		{Action: "many", Fields: fields},
		{Action: "quotes", Actor: strings.Repeat(`"`, 1<<20), Message: strings.Repeat(`\"`, 1<<19), Fields: map[string]string{"a": strings.Repeat(`\`, 5000), "b": strings.Repeat("\xff", 5000), "c": strings.Repeat("\u202e", 5000)}},
		{Action: "wide", Message: strings.Repeat("日", 400)},
	} {
		got, err := l.Append(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(encode(&got)); n > maxRecord {
			t.Errorf("%.20s: a line of %d bytes", r.Action, n)
		}
		for _, s := range append(slices.Collect(mapValues(got.Fields)), got.Action, got.Actor, got.Message) {
			if len(s) > maxText || !utf8.ValidString(s) {
				t.Errorf("%.20s: a text of %d bytes, valid %v", r.Action, len(s), utf8.ValidString(s))
			}
		}
		switch r.Action {
		case "many":
			if got.Fields["truncated"] == "" || len(got.Fields) < 3 {
				t.Errorf("fields left out: %q of %d", got.Fields["truncated"], len(got.Fields))
			}
		case "wide":
			if !strings.HasSuffix(got.Message, "日…(1200 bytes)") {
				t.Errorf("cut within a character: %q", got.Message[len(got.Message)-30:])
			}
		case megabyte:
			if !strings.HasSuffix(got.Message, "x…(1048576 bytes)") || len(got.Fields) != 2 {
				t.Errorf("a megabyte: %.10s…, %d fields", got.Message, len(got.Fields))
			}
		}
	}
	whole(t, dir)
}

func mapValues(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k, v := range m {
			if !yield(k) || !yield(v) {
				return
			}
		}
	}
}

func TestAppendMasks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const known = "correct horse battery"
	l := open(t, dir, Options{Mask: func(s string) string { return strings.ReplaceAll(s, known, "[github]") }})
	token := fake("gh", "p_", strings.Repeat("Ab1", 12))
	// Where a text is cut, half a token must not stay.
	cutToken := strings.Repeat("a ", maxInput/2-10) + token
	r, err := l.Append(t.Context(), Record{
		Action: "secret.use", Message: "with " + known + " to https://u:p@h.lab/?sig=abcdefgh",
		Fields: map[string]string{"authorization": "x", "api_key": "short", "secret": "github-token", "path": "/r?token=abc", "args": cutToken, "env": "A=" + token, "exit_code": "1", "key": "registries"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"authorization": "***", "api_key": "***", "secret": "github-token", "path": "/r?token=***", "env": "A=ghp_***", "exit_code": "1", "key": "registries"}
	for k, v := range want {
		if r.Fields[k] != v {
			t.Errorf("field %s is %q, want %q", k, r.Fields[k], v)
		}
	}
	if r.Message != "with [github] to https://***@h.lab/?sig=***" {
		t.Errorf("message %q", r.Message)
	}
	// What was cut off is short of being recognised, and the rest gets short by masking.
	r, err = l.Append(t.Context(), Record{Action: "x", Message: "token=" + strings.Repeat("x", maxInput-22) + " " + token})
	if err != nil || strings.Contains(r.Message, token[:6]) || !strings.HasSuffix(r.Message, "bytes)") {
		t.Errorf("a token at the end of what is looked at: %q, %v", r.Message, err)
	}
	l.Close()
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			text, _ := os.ReadFile(path)
			for _, secret := range []string{known, token, token[:12], "u:p@"} {
				if bytes.Contains(text, []byte(secret)) {
					t.Errorf("%s holds %q", path, secret)
				}
			}
		}
		return err
	})
}

// TestDestinations keeps where something went, also where a host is called like a token.
func TestDestinations(t *testing.T) {
	t.Parallel()
	const known = "sesame.lab"
	l := open(t, t.TempDir(), Options{Mask: func(s string) string { return strings.ReplaceAll(s, known, "[github]") }})
	evil := fake("xo", "xb-evil-corporation.com")
	long := fake("data.s", "k-abcdefghijklmnopq.com")
	for _, tt := range []struct{ actor, field, value, want string }{
		{"gateway", "host", evil, evil},
		{"gateway", "host", long, long},
		{"gateway", "host", "a." + known, "a.[github]"},
		{"gateway", "host", "2001:db8::1", "2001:db8::1"},
		{"gateway", "addr", "192.0.2.1", "192.0.2.1"},
		{"gateway", "addr", evil, evil},
		// What is no host, or stands elsewhere, may be anything.
		{"gateway", "host", evil + "/x", "xoxb-***.com/x"},
		{"gateway", "host", strings.ToUpper(evil) + " " + evil, strings.ToUpper(evil) + " xoxb-***.com"},
		{"gateway", "host", "a\nb", `a\nb`},
		{"gateway", "host", strings.Repeat(evil+".", 20), strings.Repeat("xoxb-***.com.", 20)},
		{"gateway", "path", evil, "xoxb-***.com"},
		{"gateway", "rule", evil, "xoxb-***.com"},
		{"ada", "host", evil, "xoxb-***.com"},
	} {
		r, err := l.Append(t.Context(), Record{Actor: tt.actor, Action: "flow.open", Message: "to " + evil, Fields: map[string]string{tt.field: tt.value}})
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Fields[tt.field]; got != tt.want {
			t.Errorf("%s of %s: %q; want %q", tt.field, tt.actor, got, tt.want)
		}
		if r.Message != "to xoxb-***.com" {
			t.Errorf("message %q", r.Message)
		}
	}
}

func TestDurable(t *testing.T) {
	t.Parallel()
	for _, sync := range []time.Duration{0, -1, time.Hour} {
		dir := t.TempDir()
		l := open(t, dir, Options{Sync: sync})
		for i := range int64(3) {
			r, err := l.Append(t.Context(), Record{Action: "x", Durable: true})
			if err != nil || r.Durable {
				t.Fatalf("%+v, %v", r, err)
			}
			l.mu.Lock()
			if l.synced != i+1 {
				t.Errorf("sync %v: record %d was acknowledged with %d on disk", sync, i+1, l.synced)
			}
			l.mu.Unlock()
		}
		l.Close()
	}
}

// The anchor follows in the time that the documentation gives.
func TestAnchorFollows(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{Sync: 20 * time.Millisecond})
	add(t, l, 3)
	deadline := time.Now().Add(10 * time.Second)
	for {
		if a, err := readAnchor(dir); err == nil && a.Head == l.Head() {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("anchor %+v, %v; head %v", a, err, l.Head())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestRetention(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	opts := Options{MaxBytes: 40_000, SegmentBytes: 8_000, Sync: time.Millisecond}
	l := open(t, dir, opts)
	outside := Head{}
	for range 30 {
		add(t, l, 20)
		outside = l.Head()
		time.Sleep(2 * time.Millisecond)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	report := whole(t, dir, outside, Head{1, strings.Repeat("a", 64)})
	if report.First == 1 {
		t.Fatal("nothing was dropped")
	}
	segments, err := list(dir)
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	for _, s := range segments {
		total += s.size
	}
	if total > opts.MaxBytes+opts.SegmentBytes {
		t.Errorf("%d bytes are kept, at most %d wanted", total, opts.MaxBytes)
	}
	dropped := 0
	for _, r := range read(t, dir, 0) {
		if r.Action == "audit.dropped" {
			dropped++
		}
	}
	if dropped == 0 {
		t.Error("no record says that others were dropped")
	}
	// The dropping was cut short after the anchor had been written: what it no longer counts is dropped at Open.
	old := segment{first: report.First - 1}
	if err := os.WriteFile(filepath.Join(dir, old.name()), encodeHeader(header{First: old.first, Prev: origin}), 0o600); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, opts)
	add(t, l, 1)
	if _, err := os.Stat(filepath.Join(dir, old.name())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the leftover stays: %v", err)
	}
	whole(t, dir, outside)
	// The oldest segment that counts is taken away.
	l.Close()
	report = whole(t, dir, outside)
	os.Remove(filepath.Join(dir, segment{first: report.First}.name()))
	if bad := damaged(t, dir); bad.Kind != Removed || bad.Seq != report.First {
		t.Errorf("the oldest segment is gone: %v", bad)
	}
}

func damaged(t testing.TB, dir string, anchors ...Head) *Bad {
	t.Helper()
	report, err := Verify(dir, anchors...)
	var bad *Bad
	if !errors.As(err, &bad) {
		t.Fatalf("verify of a log that is not whole: %v", err)
	}
	if report.Bad != bad {
		t.Errorf("report %+v, error %v", report, err)
	}
	return bad
}

func TestFullDisk(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	l := open(t, dir, Options{SegmentBytes: 64 << 10})
	add(t, l, 10)
	free := fill(t, dir)
	var failed error
	written := int64(10)
	for range 2000 {
		if _, failed = l.Append(t.Context(), Record{Action: "x", Message: strings.Repeat("y", 900)}); failed != nil {
			break
		}
		written++
	}
	if failed == nil || !strings.Contains(failed.Error(), "no space is left") {
		t.Fatalf("a full disk gives %v", failed)
	}
	if h := l.Head(); h.Seq != written {
		t.Errorf("head %d, written %d", h.Seq, written)
	}
	whole(t, dir)
	free()
	if r := add(t, l, 1)[0]; r.Seq != written+1 {
		t.Errorf("the record after a full disk is %d", r.Seq)
	}
	if r, err := l.Append(t.Context(), Record{Action: "x", Durable: true}); err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if r := whole(t, dir); r.Records != written+2 || r.Anchor != r.Last {
		t.Errorf("%+v", r)
	}
}

// What a failed write left is gone before the next one.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{})
	add(t, l, 2)
	l.mu.Lock()
	if _, err := l.file.WriteAt(bytes.Repeat([]byte("x"), 2000), l.size); err != nil {
		t.Fatal(err)
	}
	l.torn = true
	l.mu.Unlock()
	add(t, l, 1)
	if r := whole(t, dir); r.Records != 3 || r.Torn != 0 {
		t.Errorf("%+v", r)
	}
}

// Nothing is dropped that the anchor will not lie behind.
func TestSurplus(t *testing.T) {
	t.Parallel()
	l := open(t, t.TempDir(), Options{SegmentBytes: 2_000, MaxBytes: 1 << 30})
	add(t, l, 40)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opts.MaxBytes = 1
	for upto := range int64(41) {
		drop, start := l.surplus(upto)
		if start.Seq > upto || len(drop) > 0 && l.segments[len(drop)].first != start.Seq+1 {
			t.Errorf("up to %d: %d segments, the rest begins after %d", upto, len(drop), start.Seq)
		}
	}
	if drop, _ := l.surplus(40); len(drop) != len(l.segments)-1 {
		t.Errorf("%d of %d segments are dropped", len(drop), len(l.segments))
	}
}

// fill takes all space of a file system, and returns how to give it back.
func fill(t testing.TB, dir string) (free func()) {
	t.Helper()
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for chunk := 1 << 16; chunk > 0; {
		if _, err := f.Write(make([]byte, chunk)); err != nil {
			chunk /= 2
		}
	}
	f.Close()
	return func() {
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
	}
}

// A torn end on a full disk: the log opens, keeps what it can of it, and says so once there is space.
func TestTornOnFullDisk(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	l := open(t, dir, Options{})
	add(t, l, 10)
	l.Close()
	path := filepath.Join(dir, segment{first: 1}.name())
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	torn := `{"seq":11,"time":"` + strings.Repeat("x", 9000)
	if _, err := f.WriteString(torn); err != nil {
		t.Fatal(err)
	}
	f.Close()
	free := fill(t, dir)
	l = open(t, dir, Options{})
	free()
	add(t, l, 1)
	list := read(t, dir, 10)
	if len(list) != 2 || list[0].Action != "audit.recovered" || !strings.HasPrefix(list[0].Fields["begins"], `{"seq":11`) || list[0].Fields["bytes"] != fmt.Sprint(len(torn)) {
		t.Errorf("%+v", list)
	}
	whole(t, dir)
}

// Readers see a growing log without gaps or torn lines while many append and segments come and go.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{SegmentBytes: 20_000, MaxBytes: 1 << 30, Sync: 2 * time.Millisecond})
	const writers, each = 8, 300
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := errors.New("done")
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			next := int64(1)
			err := Follow(ctx, dir, 0, func(r Record) error {
				if r.Seq != next {
					return fmt.Errorf("record %d after %d", r.Seq, next-1)
				}
				if next++; r.Seq == writers*each {
					return done
				}
				return nil
			})
			if !errors.Is(err, done) {
				t.Errorf("follow: %v at %d", err, next)
			}
		})
	}
	var writing sync.WaitGroup
	var stopped atomic.Bool
	readers.Go(func() {
		for !stopped.Load() {
			if _, err := Verify(dir); err != nil {
				t.Errorf("verify meanwhile: %v", err)
			}
		}
	})
	for w := range writers {
		writing.Go(func() {
			for i := range each {
				if _, err := l.Append(ctx, Record{Action: "x", Fields: map[string]string{"w": fmt.Sprint(w)}, Durable: i%50 == 0}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writing.Wait()
	stopped.Store(true)
	readers.Wait()
	if r := whole(t, dir); r.Records != writers*each || r.Segments < 3 {
		t.Errorf("%+v", r)
	}
}

// A log that drops segments verifies while it does.
func TestVerifyWhileDropping(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{SegmentBytes: 3_000, MaxBytes: 12_000, Sync: time.Millisecond})
	var stopped atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stopped.Load() {
			add(t, l, 5)
		}
	})
	for range 200 {
		if _, err := Verify(dir); err != nil {
			t.Errorf("verify: %v", err)
			break
		}
		if err := Read(dir, 0, func(Record) error { return nil }); err != nil {
			t.Errorf("read: %v", err)
			break
		}
	}
	stopped.Store(true)
	wg.Wait()
}

func TestFollowWaitsForALog(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "later")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got := make(chan Record, 1)
	result := make(chan error, 1)
	go func() {
		result <- Follow(ctx, dir, 0, func(r Record) error { got <- r; return io.EOF })
	}()
	time.Sleep(20 * time.Millisecond)
	l := open(t, dir, Options{})
	want := add(t, l, 1)[0]
	if r := <-got; !equal(r, want) {
		t.Errorf("%+v, want %+v", r, want)
	}
	if err := <-result; !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	ended, stop := context.WithCancel(t.Context())
	stop()
	if err := Follow(ended, dir, 0, func(Record) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// The order is that of the numbers, whatever the clock says.
func TestClockBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{})
	now := time.Now()
	for i := range 5 {
		if _, err := l.Append(t.Context(), Record{Action: "x", Time: now.Add(time.Duration(-i) * time.Hour)}); err != nil {
			t.Fatal(err)
		}
	}
	l.Append(t.Context(), Record{Action: "x", Time: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)})
	got := read(t, dir, 0)
	for i, r := range got {
		if r.Seq != int64(i+1) {
			t.Errorf("record %d at %d", r.Seq, i)
		}
	}
	if !got[2].Time.Before(got[1].Time) || got[5].Time.Year() < 2020 {
		t.Errorf("times %v", got)
	}
	whole(t, dir)
}

func BenchmarkAppend(b *testing.B) {
	record := Record{Actor: "sbx_1", Action: "flow.allow", Sandbox: "sbx_1", Message: "GET registry.lab:443 allowed", Fields: map[string]string{
		"host": "registry.lab", "address": "10.1.2.3:443", "rule": "registries/12", "up": "1532", "down": "98211", "verdict": "allow"}}
	for _, bb := range []struct {
		name     string
		sync     time.Duration
		durable  bool
		parallel int
	}{
		{"no-flush", -1, false, 1}, {"no-flush-64", -1, false, 64},
		{"batched", 0, false, 1}, {"batched-64", 0, false, 64},
		{"durable", 0, true, 1}, {"durable-64", 0, true, 64}, {"durable-1024", 0, true, 1024},
	} {
		b.Run(bb.name, func(b *testing.B) {
			l := open(b, b.TempDir(), Options{Sync: bb.sync, MaxBytes: 256 << 20})
			r := record
			r.Durable = bb.durable
			b.SetParallelism(bb.parallel)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := l.Append(b.Context(), r); err != nil {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
		})
	}
}
