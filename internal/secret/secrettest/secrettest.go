// Package secrettest finds secrets where they must not be: a scanner for tests that plants canaries and looks for them in
// files, streams, replies and processes, in every form in which a [secret.Scrubber] knows a value, and in UTF-16.
package secrettest

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren/internal/secret"
)

// Finding is one place where a secret stands.
type Finding struct {
	// Secret is its name, Form how it is written: plain, json, html, url, hex, base64, utf16 or name (of a file).
	Secret, Form string
	// Where is the file, or what the caller called the stream; At the offset in it.
	Where string
	At    int64
}

// String names the secret and the place, and does not show the value.
func (f Finding) String() string {
	return fmt.Sprintf("secret %s (%s) in %s at %d", f.Secret, f.Form, f.Where, f.At)
}

// maxFindings of one stream; more tell nothing new.
const maxFindings = 20

// Scanner looks for a set of secrets.
type Scanner struct {
	names []string
	wide  [][]byte // UTF-16
	s     *secret.Scrubber
}

// New returns a scanner for secrets by name, after it has found planted ones itself. It fails the test when it cannot.
func New(t testing.TB, secrets map[string]string) *Scanner {
	t.Helper()
	s := &Scanner{names: slices.Sorted(maps.Keys(secrets))}
	var pairs []secret.Pair
	for _, name := range s.names {
		pairs = append(pairs, secret.Pair{Value: []byte(secrets[name])})
		s.wide = append(s.wide, utf16(secrets[name]))
	}
	var err error
	if s.s, err = secret.NewScrubber(pairs...); err != nil {
		t.Fatalf("canary scanner: %v", err)
	}
	if err := s.selfTest(secrets); err != nil {
		t.Fatalf("canary scanner: %v", err)
	}
	return s
}

func utf16(s string) []byte {
	var b []byte
	for i := range len(s) {
		b = binary.LittleEndian.AppendUint16(b, uint16(s[i]))
	}
	return b
}

// selfTest plants each secret in each form and as basic auth, and looks for it.
func (s *Scanner) selfTest(secrets map[string]string) error {
	for i, name := range s.names {
		value := secrets[name]
		plants := map[string]string{
			"utf16":      string(s.wide[i]),
			"basic auth": base64.StdEncoding.EncodeToString([]byte("x-access-token:" + value)),
			"a cookie":   "a=b; c=" + value + "; d",
		}
		for n, f := range secret.Forms(value) {
			plants[fmt.Sprintf("form %d, %s", n, f.Name)] = f.Text
		}
		for what, text := range plants {
			for _, where := range []string{text, strings.Repeat("\x00", 1<<20-len(text)/2) + text + "z"} {
				found, err := s.Reader(what, strings.NewReader(where))
				if err != nil {
					return err
				}
				if !slices.ContainsFunc(found, func(f Finding) bool { return f.Secret == name }) {
					return fmt.Errorf("it does not find %s as %s", name, what)
				}
			}
		}
	}
	if found, err := s.Reader("noise", strings.NewReader(strings.Repeat("nothing to see ", 1000))); err != nil || len(found) > 0 {
		return fmt.Errorf("it finds in noise: %v, %v", found, err)
	}
	return nil
}

// Reader looks through a stream, which findings call where.
func (s *Scanner) Reader(where string, r io.Reader) ([]Finding, error) {
	var list []Finding
	add := func(secret int, form string, at int64) {
		if len(list) < maxFindings {
			list = append(list, Finding{s.names[secret], form, where, at})
		}
	}
	w := &wideReader{r: r, s: s, add: add}
	err := s.s.Search(w, func(f secret.Found) { add(f.Pair, f.Form, f.At) })
	return list, err
}

// wideReader looks for UTF-16 in what passes.
type wideReader struct {
	r    io.Reader
	s    *Scanner
	add  func(int, string, int64)
	kept []byte // the end of what was seen, too short for any secret
	at   int64  // of kept
}

func (w *wideReader) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	w.kept = append(w.kept, p[:n]...)
	longest := 0
	for i, text := range w.s.wide {
		longest = max(longest, len(text))
		for from := 0; ; {
			k := bytes.Index(w.kept[from:], text)
			if k < 0 {
				break
			}
			w.add(i, "utf16", w.at+int64(from+k))
			from += k + 1
		}
	}
	// A secret that was found is found once: less than its length stays.
	if drop := len(w.kept) - longest + 1; drop > 0 {
		w.at += int64(drop)
		w.kept = append(w.kept[:0], w.kept[drop:]...)
	}
	return n, err
}

// Text looks through a text, such as a reply or a log.
func (s *Scanner) Text(where, text string) []Finding {
	list, err := s.Reader(where, strings.NewReader(text))
	if err != nil {
		panic(err) // reading from memory
	}
	return list
}

// Paths looks through files and directories with all below them, names and targets of links included, and returns how many
// files it read. Links are not followed; what is no file is passed over, and what disappears meanwhile as well.
func (s *Scanner) Paths(paths ...string) (list []Finding, files int, err error) {
	for _, root := range paths {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) && path != root {
				return nil
			}
			if err != nil {
				return err
			}
			name := d.Name()
			if d.Type()&fs.ModeSymlink != 0 {
				target, err := os.Readlink(path)
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
				name += " " + target
			}
			for _, f := range s.Text(path, name) {
				list = append(list, Finding{f.Secret, "name", path, 0})
			}
			if !d.Type().IsRegular() {
				return nil
			}
			found, err := s.file(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			list, files = append(list, found...), files+1
			return err
		})
		if err != nil {
			return list, files, err
		}
	}
	return list, files, nil
}

func (s *Scanner) file(path string) ([]Finding, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return s.Reader(path, f)
}

// Process looks at what a process shows of itself: environment, command line, and the memory that can be read. It returns how
// many bytes of memory it read; 0 means that it may not. A process that ends meanwhile is no error.
func (s *Scanner) Process(pid int) (list []Finding, memory int64, err error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	for _, name := range []string{"environ", "cmdline", "comm"} {
		found, err := s.file(dir + name)
		if err != nil && !gone(err) && !errors.Is(err, fs.ErrPermission) {
			return list, 0, err
		}
		list = append(list, found...)
	}
	maps, err := os.ReadFile(dir + "maps")
	if err != nil {
		if gone(err) || errors.Is(err, fs.ErrPermission) {
			return list, 0, nil
		}
		return list, 0, err
	}
	mem, err := os.Open(dir + "mem")
	if err != nil {
		if gone(err) || errors.Is(err, fs.ErrPermission) {
			return list, 0, nil
		}
		return list, 0, err
	}
	defer mem.Close()
	for line := range strings.SplitSeq(string(maps), "\n") {
		var from, to int64
		var mode string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); err != nil || mode[0] != 'r' {
			continue
		}
		area := &counted{r: &holes{r: mem, at: from, end: to}}
		found, err := s.Reader(dir+"mem "+line, area)
		memory += area.n
		list = append(list, found...)
		if err != nil {
			return list, memory, err
		}
	}
	return list, memory, nil
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// holes reads an area of memory, of which parts may not be there.
type holes struct {
	r       io.ReaderAt
	at, end int64
}

func (h *holes) Read(p []byte) (int, error) {
	const page = 4096
	for h.at < h.end {
		n, err := h.r.ReadAt(p[:min(int64(len(p)), h.end-h.at)], h.at)
		h.at += int64(n)
		if n > 0 {
			return n, nil
		}
		if err != nil {
			h.at = (h.at/page + 1) * page
		}
	}
	return 0, io.EOF
}

type counted struct {
	r io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
