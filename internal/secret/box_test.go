package secret

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

func fileKey(t testing.TB) *Key {
	t.Helper()
	k, err := FileKey(filepath.Join(t.TempDir(), "key"))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestBox(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	b := NewBox(fileKey(t))
	const value = "tok_0123456789abcdef"
	sealed, err := b.Seal(ctx, "github", []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(sealed, value) || !strings.Contains(sealed, b.KeyID()) || !strings.HasPrefix(sealed, "warren-sealed:1:") {
		t.Errorf("sealed as %s", sealed)
	}
	if got, err := b.Open(ctx, "github", sealed); err != nil || string(got) != value {
		t.Errorf("open: %q, %v", got, err)
	}
	again, err := b.Seal(ctx, "github", []byte(value))
	if err != nil || again == sealed {
		t.Errorf("sealed twice to the same text: %v", err)
	}
	// Swapped with another secret's.
	if _, err := b.Open(ctx, "gitlab", sealed); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), "another name") {
		t.Errorf("another name: %v", err)
	}
	// Every character counts.
	for i := range sealed {
		other := byte('A')
		if sealed[i] == 'A' {
			other = 'B'
		}
		damaged := sealed[:i] + string(other) + sealed[i+1:]
		if got, err := b.Open(ctx, "github", damaged); err == nil {
			t.Fatalf("byte %d changed: %q", i, got)
		} else if !errors.Is(err, ErrSealed) && !errors.Is(err, ErrKey) || strings.Contains(err.Error(), value) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
	for _, text := range []string{"", "x", sealed[:len(sealed)-5], sealed + ":", strings.Replace(sealed, ":1:", ":2:", 1)} {
		if _, err := b.Open(ctx, "github", text); !errors.Is(err, ErrSealed) {
			t.Errorf("%.30q: %v", text, err)
		}
	}
}

func TestBoxOtherKey(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	old, other := NewBox(fileKey(t)), NewBox(fileKey(t))
	sealed, err := old.Seal(ctx, "github", []byte("tok_0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = other.Open(ctx, "github", sealed)
	if !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), old.KeyID()) || !strings.Contains(err.Error(), other.KeyID()) {
		t.Errorf("another key: %v", err)
	}
	// Rotation: what is old can be read, and moves.
	both := Rotate(old, other.key)
	if v, err := both.Open(ctx, "github", sealed); err != nil || string(v) != "tok_0123456789abcdef" {
		t.Errorf("after rotation: %q, %v", v, err)
	}
	moved, changed, err := both.Reseal(ctx, "github", sealed)
	if err != nil || !changed {
		t.Fatalf("reseal: %v, %v", changed, err)
	}
	if v, err := other.Open(ctx, "github", moved); err != nil || string(v) != "tok_0123456789abcdef" {
		t.Errorf("resealed: %q, %v", v, err)
	}
	if same, changed, err := both.Reseal(ctx, "github", moved); err != nil || changed || same != moved {
		t.Errorf("reseal again: %v, %v", changed, err)
	}
	// And back.
	if v, err := Rotate(both, old.key).Open(ctx, "github", moved); err != nil || len(v) == 0 {
		t.Errorf("after rolling back: %v", err)
	}
}

func TestCheckValue(t *testing.T) {
	t.Parallel()
	pem := "-----BEGIN EC " + "PRIVATE KEY-----\nabc\n-----END EC " + "PRIVATE KEY-----\n"
	for value, want := range map[string]string{
		"":                                "empty",
		"tok_0123\n":                      "printf",
		"tok_0123\r\n":                    "printf",
		"line one\nline two":              "base64 -w0",
		"with\rreturn":                    "base64 -w0",
		"nul\x00within":                   "NUL",
		"gr\u00f6\u00dfe-gr\u00f6\u00dfe": "ASCII",
		"tok\u20190123456":                "typographic",
		"tab\tbed-value":                  "control",
		"esc\x1b[0mvalue":                 "control",
		" leading-blank":                  "blank",
		"trailing-blank ":                 "blank",
		"short":                           "fewer than 8",
		pem:                               "PEM",
		strings.Repeat("x", MaxValue+1):   "16384",
		strings.Repeat("x", 64<<10):       "65536",
	} {
		err := CheckValue([]byte(value))
		if !errors.Is(err, ErrValue) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v; want a word of %q", value, err, want)
		}
		if value != "" && err != nil && len(value) > 4 && strings.Contains(err.Error(), value) {
			t.Errorf("the error holds the value: %v", err)
		}
		if _, err := NewBox(fileKey(t)).Seal(t.Context(), "n", []byte(value)); !errors.Is(err, ErrValue) {
			t.Errorf("%.20q was sealed: %v", value, err)
		}
	}
	for _, value := range []string{"12345678", "with blank within", strings.Repeat("x", MaxValue), `!"#$%&'()*+,-./`} {
		if err := CheckValue([]byte(value)); err != nil {
			t.Errorf("%.20q: %v", value, err)
		}
	}
}

func TestFileKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "key")
	// Many begin at once and agree.
	var wg sync.WaitGroup
	ids := make([]string, 16)
	for i := range ids {
		wg.Go(func() {
			k, err := FileKey(path)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = k.ID()
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id == "" || id != ids[0] {
			t.Fatalf("ids %v", ids)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Fatalf("%v, %v", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
	text, _ := os.ReadFile(path)
	good := strings.TrimSpace(string(text))
	put := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		put("group", good, 0o640):                     "0640",
		put("world", good, 0o604):                     "chmod 600",
		put("short", good[:62], 0o600):                "64 hex digits",
		put("long", good+"00", 0o600):                 "64 hex digits",
		put("empty", "", 0o600):                       "64 hex digits",
		put("zero", strings.Repeat("0", 64), 0600):    "one byte repeated",
		put("huge", strings.Repeat("0", 1<<20), 0600): "64 hex digits",
		dir:                                "no regular file",
		fifo:                               "no regular file",
		filepath.Join(dir, "none", "key"):  "no such file",
		filepath.Join(path, "below-a-key"): "not a directory",
	} {
		k, err := FileKey(path)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), good[:40]) {
			t.Errorf("%s: %v, %v; want %q", filepath.Base(path), k, err, want)
		}
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if k, err := FileKey(link); err != nil || k.ID() != ids[0] {
		t.Errorf("a link to a sound file: %v, %v", k, err)
	}
	if s := fmt.Sprintf("%v %+v %#v %s", mustKey(t, path), mustKey(t, path), mustKey(t, path), mustKey(t, path)); strings.Contains(s, good[:16]) || strings.Contains(s, "master") {
		t.Errorf("printed as %s", s)
	}
}

func mustKey(t *testing.T, path string) *Key {
	k, err := FileKey(path)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestRotateFile(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "key")
	b, err := FileBox(path)
	if err != nil {
		t.Fatal(err)
	}
	var sealed []string
	for range 3 {
		s, err := b.Seal(ctx, "n", []byte("tok_0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		sealed = append(sealed, s)
		before := b.KeyID()
		if _, err := RotateFile(path); err != nil {
			t.Fatal(err)
		}
		if b, err = FileBox(path); err != nil || b.KeyID() == before {
			t.Fatalf("rotated from %s to %s, %v", before, b.KeyID(), err)
		}
		for _, s := range sealed {
			if _, err := b.Open(ctx, "n", s); err != nil {
				t.Errorf("after rotation: %v", err)
			}
		}
	}
	// A crash between the two steps leaves the old key in both places.
	old := mustKey(t, path)
	if err := writeKey(path+oldKey+old.id, old.master, os.Link); err != nil {
		t.Fatal(err)
	}
	if b, err := FileBox(path); err != nil || b.KeyID() != old.id {
		t.Errorf("half rotated: %v", err)
	}
	if _, err := RotateFile(path); err != nil {
		t.Errorf("rotating on: %v", err)
	}
	if _, err := RotateFile(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a key that is not there was rotated")
	}
}

func TestEnvKey(t *testing.T) {
	raw := []byte("0123456789abcdef0123456789ABCDE\xff")
	id := ""
	for _, text := range []string{
		hex.EncodeToString(raw), strings.ToUpper(hex.EncodeToString(raw)), base64.StdEncoding.EncodeToString(raw), base64.RawStdEncoding.EncodeToString(raw),
		base64.URLEncoding.EncodeToString(raw), base64.RawURLEncoding.EncodeToString(raw) + "\n",
	} {
		t.Setenv("WARREN_TEST_KEY", text)
		k, err := EnvKey("WARREN_TEST_KEY")
		if err != nil || id != "" && k.ID() != id {
			t.Errorf("%q: %v, %v", text, k, err)
			continue
		}
		id = k.ID()
	}
	for _, text := range []string{"", "password", hex.EncodeToString(raw)[:63], hex.EncodeToString(raw) + "ab", base64.StdEncoding.EncodeToString(raw[:31])} {
		t.Setenv("WARREN_TEST_KEY", text)
		if k, err := EnvKey("WARREN_TEST_KEY"); err == nil || !strings.Contains(err.Error(), "WARREN_TEST_KEY") || text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v, %v", text, k, err)
		}
	}
}

// kms writes a KMS command of a few lines of shell.
func kms(t testing.TB, script string) KMS {
	t.Helper()
	testenv.NeedsTool(t, "sh", "od", "tr", "cat")
	path := filepath.Join(t.TempDir(), "kms")
	if err := testenv.WriteProgram(path, []byte("#!/bin/sh\n"+script)); err != nil {
		t.Fatal(err)
	}
	return KMS{Command: path, ID: "lab", Timeout: 10 * time.Second}
}

func key(t testing.TB, k KMS) *Key {
	t.Helper()
	made, err := k.Key()
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestKMS(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	// Turns bytes round: enough to tell sealed from not.
	k := kms(t, fmt.Sprintf(`echo "$1 $HOME" >>%s; case $1 in seal|open) tr '\000-\377' '\200-\377\000-\177';; *) exit 2;; esac`, log))
	ctx := t.Context()
	b := NewBox(key(t, k))
	var sealed []string
	for i := range 5 {
		s, err := b.Seal(ctx, fmt.Sprint("n", i), []byte("tok_0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		sealed = append(sealed, s)
	}
	for _, b := range []*Box{b, NewBox(key(t, k))} {
		for i, s := range sealed {
			if v, err := b.Open(ctx, fmt.Sprint("n", i), s); err != nil || string(v) != "tok_0123456789abcdef" {
				t.Errorf("open: %q, %v", v, err)
			}
		}
	}
	// One data key: sealed and tried by the first box, opened once by the second. The environment stays outside.
	if text, _ := os.ReadFile(log); string(text) != "seal \nopen \nopen \n" {
		t.Errorf("it was run as %q", text)
	}
	if _, err := NewBox(fileKey(t)).Open(ctx, "n0", sealed[0]); !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), "kms.lab") {
		t.Errorf("without the KMS: %v", err)
	}
}

// A data key that does not come keeps nobody from another one, and is asked for once.
func TestKMSHangs(t *testing.T) {
	log, stuck := filepath.Join(t.TempDir(), "log"), filepath.Join(t.TempDir(), "stuck")
	k := kms(t, fmt.Sprintf(`if [ "$1" = seal ]; then tr '\000-\377' '\200-\377\000-\177'; exit; fi
tr '\000-\377' '\200-\377\000-\177' >%[1]s.$$; sum=$(cksum <%[1]s.$$); echo "$sum" >>%[1]s
if [ "$sum" = "$(cat %[2]s 2>/dev/null)" ]; then while [ -e %[2]s ]; do sleep 0.01; done; fi
cat %[1]s.$$`, log, stuck))
	var sealed []string
	for range 2 {
		s, err := NewBox(key(t, k)).Seal(t.Context(), "n", []byte("tok_0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		sealed = append(sealed, s)
	}
	sums, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(sums), "\n")
	if err := os.WriteFile(stuck, []byte(first+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := NewBox(key(t, k))
	waiting := make(chan error, 3)
	for range cap(waiting) {
		go func() {
			_, err := b.Open(t.Context(), "n", sealed[0])
			waiting <- err
		}()
	}
	for n := 1; ; time.Sleep(time.Millisecond) {
		if text, _ := os.ReadFile(log); strings.Count(string(text), first) > n {
			break
		}
	}
	if v, err := b.Open(t.Context(), "n", sealed[1]); err != nil || string(v) != "tok_0123456789abcdef" {
		t.Errorf("another data key meanwhile: %q, %v", v, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Open(ended, "n", sealed[0]); !errors.Is(err, context.Canceled) {
		t.Errorf("who gives up: %v", err)
	}
	if err := os.Remove(stuck); err != nil {
		t.Fatal(err)
	}
	for range cap(waiting) {
		if err := <-waiting; err != nil {
			t.Error(err)
		}
	}
	if text, _ := os.ReadFile(log); strings.Count(string(text), first) != 2 {
		t.Errorf("it was asked more than once:\n%s", text)
	}
}

func TestKMSMisuse(t *testing.T) {
	ctx := t.Context()
	for name, tt := range map[string]struct{ script, want string }{
		"fails":         {`echo no access >&2; exit 3`, "no access"},
		"says nothing":  {`cat >/dev/null`, "0 bytes"},
		"says too much": {`cat /dev/zero | head -c 100000`, "want 1 to"},
		"passes it on":  {`cat`, "data key itself"},
		"opens another": {`case $1 in seal) cat >/dev/null; echo sealed;; open) cat >/dev/null; echo other;; esac`, "does not open"},
	} {
		b := NewBox(key(t, kms(t, tt.script)))
		if _, err := b.Seal(ctx, "n", []byte("tok_0123456789abcdef")); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v; want %q", name, err, tt.want)
		}
	}
	slow := kms(t, `sleep 60 & sleep 60`)
	slow.Timeout = 100 * time.Millisecond
	start := time.Now()
	if _, err := NewBox(key(t, slow)).Seal(ctx, "n", []byte("tok_0123456789abcdef")); err == nil || !strings.Contains(err.Error(), "100ms") {
		t.Errorf("slow: %v", err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := NewBox(key(t, slow)).Seal(ended, "n", []byte("tok_0123456789abcdef")); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
	if time.Since(start) > 30*time.Second {
		t.Error("the time limit was not kept")
	}
	good := kms(t, `cat`)
	writable := kms(t, `cat`)
	os.Chmod(writable.Command, 0o777)
	plain := kms(t, `cat`)
	os.Chmod(plain.Command, 0o644)
	for want, k := range map[string]KMS{
		"absolute":     {Command: "kms", ID: "x"},
		"KMS id":       {Command: good.Command, ID: "a:b"},
		"no such file": {Command: "/nonexistent/kms", ID: "x"},
		"by others":    {Command: writable.Command, ID: "x"},
		"executable":   {Command: plain.Command, ID: "x"},
	} {
		if _, err := k.Key(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v; want %q", k, err, want)
		}
	}
}

func TestPlaceholder(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 1000 {
		p, err := NewPlaceholder("")
		if err != nil || !regexp.MustCompile(`^wsec_[a-z2-7]{32}$`).MatchString(p) || seen[p] {
			t.Fatalf("%q, %v", p, err)
		}
		seen[p] = true
	}
	if p, err := NewPlaceholder("gh" + "p_"); err != nil || !regexp.MustCompile(`^gh`+`p_[A-Za-z0-9]{36}$`).MatchString(p) {
		t.Errorf("%q, %v", p, err)
	}
	for _, prefix := range []string{"a b", "a\n", "é", strings.Repeat("a", 17), `"`} {
		if p, err := NewPlaceholder(prefix); err == nil {
			t.Errorf("prefix %q gives %q", prefix, p)
		}
	}
}

func FuzzOpen(f *testing.F) {
	k, err := newKey([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		f.Fatal(err)
	}
	b := NewBox(k)
	good, err := b.Seal(context.Background(), "n", []byte("tok_0123456789abcdef"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add("warren-sealed:1::" + ":")
	f.Fuzz(func(t *testing.T, sealed string) {
		v, err := b.Open(t.Context(), "n", sealed)
		if err == nil && !bytes.Equal(v, []byte("tok_0123456789abcdef")) {
			t.Errorf("%q opens to %q", sealed, v)
		}
	})
}

// TestDerive makes sure that derived keys last, differ by purpose and by key, and are not the key.
func TestDerive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	seen := map[string]string{}
	for _, name := range []string{path, path + "2"} {
		for _, purpose := range []string{"previews", "other", ""} {
			var first []byte
			for range 2 {
				k, err := FileKey(name)
				if err != nil {
					t.Fatal(err)
				}
				got, err := k.Derive(purpose)
				if err != nil || len(got) != 32 || bytes.Equal(got, k.master) || first != nil && !bytes.Equal(got, first) {
					t.Fatalf("%x, %v; before %x", got, err, first)
				}
				first = got
			}
			if other := seen[string(first)]; other != "" {
				t.Errorf("%s and %s for %q have one key", other, name, purpose)
			}
			seen[string(first)] = name + purpose
		}
	}
	k, err := KMS{Command: "/bin/true", ID: "x"}.Key()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Derive("previews"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("of a KMS: %v", err)
	}
}
