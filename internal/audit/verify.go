package audit

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Kind says what was done to a record.
type Kind string

// What can be wrong with a log.
const (
	Edited    Kind = "edited"    // the content of a record, a header or the anchor was changed
	Removed   Kind = "removed"   // records or a segment are missing between others, or before all
	Reordered Kind = "reordered" // a record stands at another place than its number says
	Inserted  Kind = "inserted"  // a record was put between others
	Truncated Kind = "truncated" // the end is missing
)

// Bad is the first record of a log that is not as it was written. It is an error.
type Bad struct {
	// Segment is the file, Line the line in it, from 1; where records are missing, the line that stands in their place.
	Segment string `json:"segment"`
	Line    int    `json:"line"`
	// Seq is the number of the record, 0 when it is none.
	Seq  int64  `json:"seq"`
	Kind Kind   `json:"kind"`
	Why  string `json:"why"`
}

// Error names the place, the record and what is wrong.
func (b *Bad) Error() string {
	var at strings.Builder
	at.WriteString(b.Segment)
	if b.Line > 0 {
		fmt.Fprintf(&at, " line %d", b.Line)
	}
	if b.Seq > 0 {
		fmt.Fprintf(&at, ", record %d", b.Seq)
	}
	return fmt.Sprintf("%s: %s: %s", at.String(), b.Kind, b.Why)
}

// Report says what Verify saw.
type Report struct {
	// Records and Segments count what was read up to the first bad one.
	Records  int64 `json:"records"`
	Segments int   `json:"segments"`
	// First is the number of the oldest record that is kept.
	First int64 `json:"first"`
	// Last is the last good record, Anchor what the file head names.
	Last   Head `json:"last"`
	Anchor Head `json:"anchor"`
	// Torn counts bytes after the last record that have no end: a writer is writing them, or Open will move them aside.
	Torn int64 `json:"torn,omitempty"`
	// Bad is the first bad record, nil when the log is whole.
	Bad *Bad `json:"bad,omitempty"`
}

// Verify reads the whole log in dir, also while it is written. When it is not whole, the error is the *[Bad] that the report
// holds as well; any other error means that the log could not be read. Anchors are heads that were kept outside the
// directory; each whose record is still kept must be in the chain, and a log that is not there is bad. One that lies before the oldest record
// proves nothing any more; one whose Seq is 0 never does.
func Verify(dir string, anchors ...Head) (Report, error) {
	for try := 0; ; try++ {
		v := verifier{dir: dir, outside: slices.DeleteFunc(slices.Clone(anchors), func(h Head) bool { return h.Seq <= 0 })}
		err := v.run()
		var bad *Bad
		if errors.As(err, &bad) || errors.Is(err, fs.ErrNotExist) && v.anchorRead {
			// The writer may be dropping segments, after it has said so in the anchor.
			now, aerr := readAnchor(dir)
			dropping := bad == nil || aerr == nil && v.anchorRead && now.Start != v.anchor.Start
			if dropping && try < 50 {
				continue
			}
		}
		v.report.Bad = bad
		return v.report, err
	}
}

type place struct {
	segment string
	line    int
}

type verifier struct {
	dir        string
	outside    []Head
	anchor     anchorFile
	anchorRead bool
	report     Report
	segments   []segment

	last Head
	at   place // of last
	prev Head  // the record before last
}

func (v *verifier) run() error {
	anchor, err := readAnchor(v.dir)
	segments, lerr := list(v.dir)
	switch {
	case errors.Is(lerr, fs.ErrNotExist) && len(v.outside) > 0: // as if it were empty
	case lerr != nil:
		return lerr
	case errors.Is(err, fs.ErrNotExist) && len(segments) == 0 && len(v.outside) > 0:
		return gone(slices.MaxFunc(v.outside, func(a, b Head) int { return cmp.Compare(a.Seq, b.Seq) }))
	case errors.Is(err, fs.ErrNotExist) && len(segments) == 0:
		return fmt.Errorf("audit: no log is in %s: %w", v.dir, err)
	case errors.Is(err, fs.ErrNotExist):
		return &Bad{Segment: anchorName, Kind: Removed, Why: "the anchor is missing, so that the end of the log proves nothing"}
	case errors.Is(err, errNoAnchor):
		return &Bad{Segment: anchorName, Kind: Edited, Why: err.Error()}
	case err != nil:
		return fmt.Errorf("audit: %w", err)
	}
	v.anchor, v.anchorRead, v.segments = anchor, true, segments
	v.report.Anchor = anchor.Head
	v.last, v.at.segment = anchor.Start, anchorName
	if len(segments) > 0 && segments[0].first <= anchor.Start.Seq {
		// Segments that are about to be dropped.
		h, err := readHeader(v.dir, segments[0])
		if errors.Is(err, fs.ErrNotExist) {
			return err
		}
		v.last = Head{segments[0].first - 1, h.Prev} // a bad header is named below
	}
	v.report.First = v.last.Seq + 1
	v.report.Last = v.last
	if err := v.matches(v.last); err != nil {
		return err
	}
	for i := range segments {
		if err := v.segment(i); err != nil {
			return err
		}
		v.report.Segments++
	}
	for _, h := range append(v.outside, anchor.Head) {
		if h.Seq > v.last.Seq {
			return &Bad{Segment: v.at.segment, Line: v.at.line + 1, Seq: v.last.Seq + 1, Kind: Truncated,
				Why: fmt.Sprintf("the log ends with record %d; an anchor names record %d", v.last.Seq, h.Seq)}
		}
	}
	return nil
}

// matches compares a record with the anchors.
func (v *verifier) matches(h Head) error {
	for _, a := range append(v.outside, v.anchor.Head) {
		if a.Seq == h.Seq && a.Hash != h.Hash && a.Seq > 0 {
			return &Bad{Segment: v.at.segment, Line: v.at.line, Seq: h.Seq, Kind: Edited,
				Why: fmt.Sprintf("its hash is %.16s…, and an anchor says %.16s…: it or a record before it was written anew", h.Hash, a.Hash)}
		}
	}
	return nil
}

func (v *verifier) segment(i int) error {
	s := v.segments[i]
	f, err := os.Open(filepath.Join(v.dir, s.name()))
	if err != nil {
		return err
	}
	defer f.Close()
	newest := i == len(v.segments)-1
	return lines(f, 0, func(n int, line []byte, size int64) error {
		here := place{s.name(), n}
		if n == 1 {
			return v.header(s, line)
		}
		r, err := decode(line)
		switch {
		case !complete(line) && newest:
			v.report.Torn = size
			return nil
		case !complete(line):
			return &Bad{here.segment, n, v.last.Seq + 1, Truncated, "the segment ends within a record, and another follows it"}
		case err != nil:
			return &Bad{here.segment, n, v.last.Seq + 1, Edited, err.Error()}
		case r.Seq != v.last.Seq+1 || r.Prev != v.last.Hash:
			return v.classify(i, here, r)
		}
		v.prev, v.last, v.at = v.last, Head{r.Seq, r.Hash}, here
		v.report.Records++
		v.report.Last = v.last
		return v.matches(v.last)
	})
}

func (v *verifier) header(s segment, line []byte) error {
	h, err := decodeHeader(line)
	switch want := v.last.Seq + 1; {
	case err != nil:
		return &Bad{s.name(), 1, s.first, Edited, err.Error()}
	case h.First != s.first:
		return &Bad{s.name(), 1, s.first, Edited, fmt.Sprintf("the segment says that it begins with record %d, and its name %d", h.First, s.first)}
	case s.first > want:
		return &Bad{s.name(), 1, want, Removed, fmt.Sprintf("records %d to %d are missing before the segment", want, s.first-1)}
	case s.first < want:
		return &Bad{s.name(), 1, s.first, Inserted, fmt.Sprintf("the segment begins with record %d, which an earlier one holds", s.first)}
	case h.Prev != v.last.Hash && v.at.line > 0:
		return &Bad{v.at.segment, v.at.line, v.last.Seq, Edited, "the next segment continues another record of this number"}
	case h.Prev != v.last.Hash:
		return &Bad{s.name(), 1, s.first, Edited, "the segment does not continue the record that the anchor says it does"}
	}
	return nil
}

// classify names what happened where a record that is sound in itself does not continue the one before it. What follows
// decides: a successor commits to one of two that claim a place.
func (v *verifier) classify(i int, here place, r Record) error {
	want := v.last.Seq + 1
	bad := func(at place, seq int64, kind Kind, why string, args ...any) error {
		return &Bad{at.segment, at.line, seq, kind, fmt.Sprintf(why, args...)}
	}
	rest := v.following(i, here)
	next := func(seq int64) (Record, bool) {
		for _, f := range rest {
			if f.Seq == seq {
				return f, true
			}
		}
		return Record{}, false
	}
	immediate := Record{}
	if len(rest) > 0 {
		immediate = rest[0]
	}
	switch {
	case r.Seq == want:
		if immediate.Seq == want && immediate.Prev == v.last.Hash {
			return bad(here, want, Inserted, "it continues nothing; the record %d that does follows it", want)
		}
		if immediate.Seq == want+1 && immediate.Prev != r.Hash || v.at.line == 0 {
			return bad(here, want, Edited, "it does not continue record %d, and nothing continues it", v.last.Seq)
		}
		return bad(v.at, v.last.Seq, Edited, "record %d, which follows, continues another record of this number", want)
	case r.Hash == v.last.Hash:
		return bad(here, r.Seq, Inserted, "it is the record before once more")
	case r.Seq == v.last.Seq && immediate.Seq == want && immediate.Prev == r.Hash && r.Prev == v.prev.Hash:
		return bad(v.at, v.last.Seq, Inserted, "line %d of %s holds the record %d that the rest continues", here.line, here.segment, r.Seq)
	case r.Seq < want:
		return bad(here, r.Seq, Inserted, "record %d stands before it", v.last.Seq)
	}
	missing, later := next(want)
	switch {
	case later && immediate.Seq == want && immediate.Prev == v.last.Hash && continues(rest, r):
		return bad(here, r.Seq, Inserted, "it stands between records %d and %d, which continue each other", v.last.Seq, want)
	case later && missing.Prev == v.last.Hash:
		return bad(here, want, Reordered, "record %d stands in its place, and it further on", r.Seq)
	}
	return bad(here, want, Removed, "records %d to %d are missing", want, r.Seq-1)
}

// continues says whether the records have no gap where r would belong, so that r is one too many.
func continues(rest []Record, r Record) bool {
	last := int64(0)
	for _, f := range rest {
		if f.Seq == r.Seq {
			return true
		}
		last = max(last, f.Seq)
	}
	return r.Seq > last+1
}

// following returns the sound records after a place, as far as deciding needs them.
func (v *verifier) following(i int, from place) (rest []Record) {
	enough := errors.New("enough")
	for ; i < len(v.segments) && len(rest) < 100_000; i++ {
		s := v.segments[i]
		f, err := os.Open(filepath.Join(v.dir, s.name()))
		if err != nil {
			return rest
		}
		lines(f, 0, func(n int, line []byte, _ int64) error {
			if s.name() == from.segment && n <= from.line || n == 1 {
				return nil
			}
			if r, err := decode(line); err == nil {
				rest = append(rest, Record{Seq: r.Seq, Prev: r.Prev, Hash: r.Hash})
			}
			if len(rest) >= 100_000 {
				return enough
			}
			return nil
		})
		f.Close()
	}
	return rest
}
