package audit

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// lab is a closed log of three segments that a test damages.
type lab struct {
	t     *testing.T
	dir   string
	files []string
	head  Head
}

func newLab(t *testing.T) *lab {
	dir := t.TempDir()
	l := open(t, dir, Options{SegmentBytes: 3_000})
	for len(l.segments) < 3 {
		add(t, l, 1)
	}
	add(t, l, 4)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	whole(t, dir, l.Head())
	b := &lab{t: t, dir: dir, head: l.Head()}
	for _, s := range l.segments {
		b.files = append(b.files, filepath.Join(dir, s.name()))
	}
	return b
}

func (b *lab) lines(i int) []string {
	text, err := os.ReadFile(b.files[i])
	if err != nil {
		b.t.Fatal(err)
	}
	lines := strings.SplitAfter(string(text), "\n")
	return lines[:len(lines)-1]
}

func (b *lab) write(i int, lines []string) {
	if err := os.WriteFile(b.files[i], []byte(strings.Join(lines, "")), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// forge writes a record anew so that it is sound in itself.
func forge(t *testing.T, line string, change func(*Record)) string {
	t.Helper()
	r, err := decode([]byte(strings.TrimSuffix(line, "\n") + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	change(&r)
	return string(encode(&r))
}

// Each way to change a log that was written is found, and the first record that it concerns is named.
func TestTampering(t *testing.T) {
	t.Parallel()
	first := func(b *lab, i int) int64 { // the number of the first record of a segment
		h, err := decodeHeader([]byte(b.lines(i)[0]))
		if err != nil {
			t.Fatal(err)
		}
		return h.First
	}
	tests := []struct {
		name string
		do   func(b *lab) (file int, line int, seq int64, kind Kind) // line 0: not compared
	}{
		{"a word edited", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[3] = strings.Replace(l[3], "host-0.lab", "host-9.lab", 1)
			b.write(0, l)
			return 0, 4, 3, Edited
		}},
		{"a time edited", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(1)
			l[1] = strings.Replace(l[1], `"time":"2`, `"time":"3`, 1)
			b.write(1, l)
			return 1, 2, first(b, 1), Edited
		}},
		{"a blank added", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[2] = strings.Replace(l[2], `,"actor"`, `, "actor"`, 1)
			b.write(0, l)
			return 0, 3, 2, Edited
		}},
		{"a key twice", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[2] = strings.Replace(l[2], `,"actor"`, `,"actor":"other","actor"`, 1)
			b.write(0, l)
			return 0, 3, 2, Edited
		}},
		{"a character escaped in another way", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[2] = strings.Replace(l[2], "flow.allow", `\u0066low.allow`, 1)
			b.write(0, l)
			return 0, 3, 2, Edited
		}},
		{"a byte flipped", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[4] = l[4][:30] + string(l[4][30]^1) + l[4][31:]
			b.write(0, l)
			return 0, 5, 4, Edited
		}},
		{"a record written anew with its hash", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[3] = forge(b.t, l[3], func(r *Record) { r.Message = "nothing" })
			b.write(0, l)
			return 0, 4, 3, Edited
		}},
		{"the last of a segment written anew", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			n := len(l) - 1
			l[n] = forge(b.t, l[n], func(r *Record) { r.Message = "nothing" })
			b.write(0, l)
			return 0, n + 1, int64(n), Edited
		}},
		{"the last of all written anew", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(2)
			n := len(l) - 1
			l[n] = forge(b.t, l[n], func(r *Record) { r.Message = "nothing" })
			b.write(2, l)
			return 2, n + 1, b.head.Seq, Edited
		}},
		{"a record joined to another chain", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[3] = forge(b.t, l[3], func(r *Record) { r.Prev = strings.Repeat("a", 64) })
			b.write(0, l)
			return 0, 4, 3, Edited
		}},
		{"the chain written anew to its end", func(b *lab) (int, int, int64, Kind) {
			prev := ""
			for i := range b.files {
				l := b.lines(i)
				for n := range l {
					switch {
					case n == 0 && i > 0:
						l[0] = string(encodeHeader(header{First: first(b, i), Prev: prev}))
					case n > 0:
						l[n] = forge(b.t, l[n], func(r *Record) {
							if i > 0 || n > 2 {
								r.Prev = prev
							}
							if i == 0 && n == 2 {
								r.Message = "nothing"
							}
						})
						r, _ := decode([]byte(l[n]))
						prev = r.Hash
					}
				}
				b.write(i, l)
			}
			return 2, 0, b.head.Seq, Edited
		}},
		{"a record removed", func(b *lab) (int, int, int64, Kind) {
			b.write(0, slices.Delete(b.lines(0), 3, 4))
			return 0, 4, 3, Removed
		}},
		{"three records removed", func(b *lab) (int, int, int64, Kind) {
			b.write(0, slices.Delete(b.lines(0), 1, 4))
			return 0, 2, 1, Removed
		}},
		{"the last of a segment removed", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, l[:len(l)-1])
			return 1, 1, int64(len(l) - 1), Removed
		}},
		{"a segment removed", func(b *lab) (int, int, int64, Kind) {
			seq := first(b, 1)
			os.Remove(b.files[1])
			return 2, 1, seq, Removed
		}},
		{"the first segment removed", func(b *lab) (int, int, int64, Kind) {
			os.Remove(b.files[0])
			return 1, 1, 1, Removed
		}},
		{"a segment's middle cut", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(1)
			text := strings.Join(l[:len(l)-1], "") + l[len(l)-1][:40]
			os.WriteFile(b.files[1], []byte(text), 0o600)
			return 1, len(l), first(b, 2) - 1, Truncated
		}},
		{"neighbours swapped", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l[3], l[4] = l[4], l[3]
			b.write(0, l)
			return 0, 4, 3, Reordered
		}},
		{"a record moved to the end", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			l = append(slices.Delete(slices.Clone(l), 2, 3), l[2])
			b.write(0, l)
			return 0, 3, 2, Reordered
		}},
		{"a record moved to another segment", func(b *lab) (int, int, int64, Kind) {
			l, m := b.lines(0), b.lines(2)
			b.write(2, append(m, l[2]))
			b.write(0, slices.Delete(l, 2, 3))
			return 0, 3, 2, Reordered
		}},
		{"segments that change names", func(b *lab) (int, int, int64, Kind) {
			seq := first(b, 1)
			os.Rename(b.files[1], b.files[1]+".x")
			os.Rename(b.files[2], b.files[1])
			os.Rename(b.files[1]+".x", b.files[2])
			return 1, 1, seq, Edited
		}},
		{"a record twice", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 4, l[3]))
			return 0, 5, 3, Inserted
		}},
		{"an old record again", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 5, l[1]))
			return 0, 6, 1, Inserted
		}},
		{"one inserted that continues", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 3, forge(b.t, l[3], func(r *Record) { r.Message = "forged" })))
			return 0, 4, 3, Inserted
		}},
		{"one inserted behind its double", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 4, forge(b.t, l[3], func(r *Record) { r.Message = "forged" })))
			return 0, 5, 3, Inserted
		}},
		{"one inserted with a number of its own", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 3, forge(b.t, l[3], func(r *Record) { r.Seq = 1_000_000 })))
			return 0, 4, 1_000_000, Inserted
		}},
		{"one inserted that continues nothing", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(0)
			b.write(0, slices.Insert(l, 3, forge(b.t, l[3], func(r *Record) { r.Prev = strings.Repeat("b", 64) })))
			return 0, 4, 3, Inserted
		}},
		{"a line of rubbish", func(b *lab) (int, int, int64, Kind) {
			b.write(1, slices.Insert(b.lines(1), 2, "rubbish\n"))
			return 1, 3, first(b, 1) + 1, Edited
		}},
		{"an empty line", func(b *lab) (int, int, int64, Kind) {
			b.write(1, slices.Insert(b.lines(1), 2, "\n"))
			return 1, 3, first(b, 1) + 1, Edited
		}},
		{"a line without end", func(b *lab) (int, int, int64, Kind) {
			b.write(1, slices.Insert(b.lines(1), 2, strings.Repeat("x", 1<<20)+"\n"))
			return 1, 3, first(b, 1) + 1, Edited
		}},
		{"the end cut off", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(2)
			b.write(2, l[:len(l)-2])
			return 2, len(l) - 1, b.head.Seq - 1, Truncated
		}},
		{"the end cut within a record", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(2)
			os.WriteFile(b.files[2], []byte(strings.Join(l, "")[:len(strings.Join(l, ""))-20]), 0o600)
			return 2, len(l), b.head.Seq, Truncated
		}},
		{"the last segment removed", func(b *lab) (int, int, int64, Kind) {
			seq := first(b, 2)
			os.Remove(b.files[2])
			return 1, 0, seq, Truncated
		}},
		{"a header edited", func(b *lab) (int, int, int64, Kind) {
			l := b.lines(1)
			l[0] = string(encodeHeader(header{First: first(b, 1), Prev: strings.Repeat("c", 64)}))
			b.write(1, l)
			n := len(b.lines(0))
			return 0, n, int64(n - 1), Edited
		}},
		{"a header removed", func(b *lab) (int, int, int64, Kind) {
			seq := first(b, 1)
			b.write(1, b.lines(1)[1:])
			return 1, 1, seq, Edited
		}},
		{"a log begun later than it did", func(b *lab) (int, int, int64, Kind) {
			// Without the first segment, as if it had been dropped.
			os.Remove(b.files[0])
			return 1, 1, 1, Removed
		}},
		{"the anchor removed", func(b *lab) (int, int, int64, Kind) {
			os.Remove(filepath.Join(b.dir, anchorName))
			return -1, 0, 0, Removed
		}},
		{"the anchor edited", func(b *lab) (int, int, int64, Kind) {
			os.WriteFile(filepath.Join(b.dir, anchorName), []byte("{}"), 0o600)
			return -1, 0, 0, Edited
		}},
		{"everything removed but the anchor", func(b *lab) (int, int, int64, Kind) {
			for _, f := range b.files {
				os.Remove(f)
			}
			return -1, 0, 1, Truncated
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := newLab(t)
			file, line, seq, kind := tt.do(b)
			name := anchorName
			if file >= 0 {
				name = filepath.Base(b.files[file])
			}
			bad := damaged(t, b.dir)
			if bad.Kind != kind || bad.Segment != name || line > 0 && bad.Line != line || bad.Seq != seq {
				t.Errorf("found %v\nwant %s line %d, record %d: %s", bad, name, line, seq, kind)
			}
		})
	}
}

// The whole directory was replaced by another, sound log: only what was kept outside shows it.
func TestOutsideAnchor(t *testing.T) {
	t.Parallel()
	b, other := newLab(t), newLab(t)
	whole(t, other.dir)
	if bad := damaged(t, other.dir, b.head); bad.Seq != b.head.Seq || bad.Kind != Edited {
		t.Errorf("another log: %v", bad)
	}
	longer := b.head
	longer.Seq += 5
	if bad := damaged(t, b.dir, longer); bad.Kind != Truncated || bad.Seq != b.head.Seq+1 {
		t.Errorf("a shorter log: %v", bad)
	}
}

// Wherever a crash cuts the last record, Open goes on after the one before, keeps the rest and says so.
func TestTornAtEveryByte(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{Sync: -1})
	add(t, l, 3)
	anchor, err := os.ReadFile(filepath.Join(dir, anchorName))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	path := filepath.Join(dir, segment{first: 1}.name())
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := bytes.LastIndexByte(text[:len(text)-1], '\n') + 1
	for n := last; n <= len(text); n++ {
		again := t.TempDir()
		os.WriteFile(filepath.Join(again, anchorName), anchor, 0o600)
		os.WriteFile(filepath.Join(again, filepath.Base(path)), text[:n], 0o600)
		want := int64(3) // the record that says so, or the third
		torn := n > last && n < len(text)
		if report := whole(t, again); (report.Torn > 0) != torn {
			t.Errorf("%d of %d bytes: %+v", n-last, len(text)-last, report)
		}
		l := open(t, again, Options{Sync: -1})
		if n == last {
			want = 2
		}
		if l.Head().Seq != want {
			t.Errorf("%d of %d bytes: the log goes on after %d", n-last, len(text)-last, l.Head().Seq)
		}
		l.Close()
		list := read(t, again, 0)
		r := list[len(list)-1]
		if (r.Action == "audit.recovered") != torn {
			t.Errorf("%d of %d bytes: the last record is %+v", n-last, len(text)-last, r)
		}
		if torn {
			kept, err := os.ReadFile(filepath.Join(again, r.Fields["file"]))
			if err != nil || !bytes.Equal(kept, text[last:n]) {
				t.Errorf("moved aside: %q, %v", kept, err)
			}
		}
		whole(t, again)
	}
}

// What was flushed and anchored is no torn end: a log that lost it is not written on.
func TestOpenRefusesDamage(t *testing.T) {
	t.Parallel()
	tests := map[string]func(b *lab){
		"edited": func(b *lab) {
			l := b.lines(2)
			l[2] = strings.Replace(l[2], "flow", "glow", 1)
			b.write(2, l)
		},
		"truncated": func(b *lab) { b.write(2, b.lines(2)[:2]) },
		"torn": func(b *lab) {
			text := strings.Join(b.lines(2), "")
			os.WriteFile(b.files[2], []byte(text[:len(text)-9]), 0o600)
		},
		"rewritten": func(b *lab) {
			l := b.lines(2)
			l[len(l)-1] = forge(b.t, l[len(l)-1], func(r *Record) { r.Actor = "nobody" })
			b.write(2, l)
		},
		"no anchor":   func(b *lab) { os.Remove(filepath.Join(b.dir, anchorName)) },
		"bad anchor":  func(b *lab) { os.WriteFile(filepath.Join(b.dir, anchorName), []byte("x"), 0o600) },
		"bad header":  func(b *lab) { b.write(2, b.lines(2)[1:]) },
		"no segments": func(b *lab) { os.Remove(b.files[0]); os.Remove(b.files[1]); os.Remove(b.files[2]) },
	}
	for name, do := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newLab(t)
			do(b)
			l, err := Open(b.dir, Options{})
			var bad *Bad
			if err == nil {
				l.Close()
			}
			if !errors.As(err, &bad) || !strings.Contains(fmt.Sprint(err), b.dir) {
				t.Errorf("open: %v", err)
			}
		})
	}
}

// Read shows what can be read of a damaged log, and says that it is.
func TestReadDamaged(t *testing.T) {
	t.Parallel()
	b := newLab(t)
	l := b.lines(0)
	l[3] = strings.Repeat("y", 1<<18) + "\n"
	b.write(0, l)
	n := int64(0)
	err := Read(b.dir, 0, func(Record) error { n++; return nil })
	var bad *Bad
	if !errors.As(err, &bad) || bad.Line != 4 || n != b.head.Seq-1 {
		t.Errorf("%d of %d records, %v", n, b.head.Seq, err)
	}
}

// Nothing that is taken for a record is written in another way than records are, and nothing panics.
func FuzzDecode(f *testing.F) {
	r := Record{Seq: 7, Action: "a", Message: `q"\\`, Fields: map[string]string{"k": "v", "日": "本"}, Prev: origin}
	f.Add(encode(&r))
	f.Add([]byte("{}\n"))
	f.Add(encodeHeader(header{First: 1, Prev: origin}))
	f.Add([]byte(`{"seq":1,"time":"2026-01-02T03:04:05Z","action":"x","prev":"` + origin + `","hash":"` + origin + `"}` + "\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if h, err := decodeHeader(line); err == nil && !bytes.Equal(encodeHeader(h), line) {
			t.Errorf("header %q", line)
		}
		r, err := decode(line)
		if err != nil {
			return
		}
		if again := encode(&r); !bytes.Equal(again, line) {
			t.Errorf("%q is written as %q", line, again)
		}
		if bytes.Count(line, []byte("\n")) != 1 || bytes.ContainsRune(line, 0x1b) {
			t.Errorf("a record of %q", line)
		}
	})
}
