package audit

import (
	"bufio"
	"bytes"
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
	"strconv"
	"strings"
	"time"
)

// segment is one file of a log.
type segment struct {
	first int64
	size  int64
}

const segmentDigits = 20

func (s segment) name() string { return fmt.Sprintf("%0*d.jsonl", segmentDigits, s.first) }

// list returns the segments of a directory, oldest first.
func list(dir string) ([]segment, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	var segments []segment
	for _, e := range entries {
		digits, ok := strings.CutSuffix(e.Name(), ".jsonl")
		first, err := strconv.ParseInt(digits, 10, 64)
		if !ok || len(digits) != segmentDigits || err != nil || first < 1 || !e.Type().IsRegular() {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // dropped meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("audit: %w", err)
		}
		segments = append(segments, segment{first, info.Size()})
	}
	slices.SortFunc(segments, func(a, b segment) int {
		if a.first < b.first {
			return -1
		}
		return 1
	})
	return segments, nil
}

// anchorFile is the content of the file head.
type anchorFile struct {
	Head
	// Start is the record that the oldest segment continues.
	Start Head `json:"start"`
}

const anchorName = "head"

func writeAnchor(dir string, a anchorFile, flush bool) error {
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return replace(dir, anchorName, append(text, '\n'), flush)
}

func readAnchor(dir string) (anchorFile, error) {
	text, err := os.ReadFile(filepath.Join(dir, anchorName))
	if err != nil {
		return anchorFile{}, err
	}
	var a anchorFile
	if err := strict(text, &a); err != nil || a.Seq < 0 || a.Start.Seq < 0 || a.Start.Seq > a.Seq || !isHash(a.Hash) || !isHash(a.Start.Hash) {
		return anchorFile{}, errNoAnchor
	}
	return a, nil
}

var errNoAnchor = errors.New("the anchor cannot be read as one")

// replace puts a file in place at once, or leaves what was there.
func replace(dir, name string, content []byte, flush bool) error {
	path := filepath.Join(dir, name)
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && flush {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return err
	}
	if !flush {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// lines calls fn with each line of r, numbered from the number after n, and how many bytes it takes; the last one also when
// it has no newline. A line that is too long to be a record is passed cut.
func lines(r io.Reader, n int, fn func(n int, line []byte, size int64) error) error {
	br := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := br.ReadSlice('\n')
		size := int64(len(line))
		if errors.Is(err, bufio.ErrBufferFull) {
			line = bytes.Clone(line)
			var more []byte
			for errors.Is(err, bufio.ErrBufferFull) {
				more, err = br.ReadSlice('\n')
				size += int64(len(more))
			}
			if complete(more) {
				line = append(line, '\n')
			}
		}
		if size > 0 {
			n++
			if err := fn(n, line, size); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func complete(line []byte) bool { return len(line) > 0 && line[len(line)-1] == '\n' }

func readHeader(dir string, s segment) (header, error) {
	f, err := os.Open(filepath.Join(dir, s.name()))
	if err != nil {
		return header{}, err
	}
	defer f.Close()
	line, err := bufio.NewReader(io.LimitReader(f, 512)).ReadBytes('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return header{}, err
	}
	h, err := decodeHeader(line)
	if err == nil && h.First != s.first {
		err = fmt.Errorf("the segment says that it begins with record %d, and its name %d", h.First, s.first)
	}
	return h, err
}

// load finds where the log ends and puts it in order after a crash.
func (l *Log) load() error {
	leftovers, err := filepath.Glob(filepath.Join(l.dir, "*.tmp"))
	if err != nil {
		return err
	}
	for _, name := range leftovers {
		if err := os.Remove(name); err != nil {
			return fmt.Errorf("audit: %w", err)
		}
	}
	segments, err := list(l.dir)
	if err != nil {
		return err
	}
	anchor, err := readAnchor(l.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && len(segments) == 0:
		l.head = Head{0, origin}
		l.start = l.head
		if err := writeAnchor(l.dir, anchorFile{Head: l.head, Start: l.head}, l.opts.Sync > 0); err != nil {
			return l.explain("begin a log", err)
		}
		l.anchored = l.head
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return l.refuse(&Bad{Segment: anchorName, Kind: Removed, Why: "the anchor is missing"})
	case errors.Is(err, errNoAnchor):
		return l.refuse(&Bad{Segment: anchorName, Kind: Edited, Why: err.Error()})
	case err != nil:
		return fmt.Errorf("audit: %w", err)
	}
	// Dropping was cut short: the anchor no longer counts these.
	for len(segments) > 1 && segments[1].first <= anchor.Start.Seq+1 {
		if err := os.Remove(filepath.Join(l.dir, segments[0].name())); err != nil {
			return fmt.Errorf("audit: %w", err)
		}
		segments = segments[1:]
	}
	l.anchored, l.start, l.segments = anchor.Head, anchor.Start, segments
	if len(segments) == 0 {
		if anchor.Seq > 0 {
			return l.refuse(&Bad{Segment: anchorName, Seq: anchor.Start.Seq + 1, Kind: Removed, Why: "no segment is there"})
		}
		l.head = anchor.Head
		return nil
	}
	l.prune = true
	return l.loadNewest(anchor)
}

// loadNewest reads the newest segment, whose end a crash may have cut.
func (l *Log) loadNewest(anchor anchorFile) error {
	s := l.newest()
	h, err := readHeader(l.dir, *s)
	if err != nil {
		return l.refuse(&Bad{Segment: s.name(), Line: 1, Seq: s.first, Kind: Edited, Why: err.Error()})
	}
	l.file, err = os.OpenFile(filepath.Join(l.dir, s.name()), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	l.head = Head{s.first - 1, h.Prev}
	why, at := "", 0
	matches := func() error {
		if l.head.Seq == anchor.Seq && l.head.Hash != anchor.Hash {
			return l.refuse(&Bad{Segment: s.name(), Line: at, Seq: l.head.Seq, Kind: Edited, Why: "its hash is not the anchor's"})
		}
		return nil
	}
	if err := matches(); err != nil {
		return err
	}
	stop := errors.New("stop")
	err = lines(l.file, 0, func(n int, line []byte, size int64) error {
		at = n
		if n == 1 {
			l.size = size
			return nil
		}
		r, err := decode(line)
		switch {
		case !complete(line):
			why = "it has no end"
			return stop
		case err != nil:
			why = err.Error()
			return stop
		case r.Seq != l.head.Seq+1 || r.Prev != l.head.Hash:
			why = "it does not continue the one before"
			return stop
		}
		l.head = Head{r.Seq, r.Hash}
		l.size += size
		return matches()
	})
	if err != nil && !errors.Is(err, stop) {
		return err
	}
	if l.head.Seq < anchor.Seq {
		b := &Bad{Segment: s.name(), Line: at, Seq: l.head.Seq + 1, Kind: Edited, Why: why}
		if why == "" || why == "it has no end" {
			b.Kind, b.Why = Truncated, fmt.Sprintf("the log ends before record %d; the anchor says %d", b.Seq, anchor.Seq)
		}
		return l.refuse(b)
	}
	if why != "" {
		return l.setAside(why)
	}
	s.size = l.size
	return nil
}

func (l *Log) refuse(b *Bad) error {
	return fmt.Errorf("audit: the log in %s is not whole and is not written: %w. Keep the directory as evidence: move it away, and a new log begins", l.dir, b)
}

// setAside moves what follows the last good record to a file of its own. It was never flushed: the anchor is older.
func (l *Log) setAside(why string) error {
	s := l.newest()
	tail, err := io.ReadAll(io.NewSectionReader(l.file, l.size, 16<<20))
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	digest := sha256.Sum256(tail)
	note := Record{
		Actor: "audit", Action: "audit.recovered",
		Message: fmt.Sprintf("what follows record %d was left by a writer that did not end well: %s", l.head.Seq, why),
		Fields:  map[string]string{"segment": s.name(), "bytes": strconv.Itoa(len(tail)), "sha256": hex.EncodeToString(digest[:])},
	}
	name := fmt.Sprintf("torn-%0*d-%d", segmentDigits, l.head.Seq+1, time.Now().UnixNano())
	if err := replace(l.dir, name, tail, l.opts.Sync > 0); err == nil {
		note.Fields["file"] = name
	} else if full(err) {
		// The beginning is kept in the record instead: the log must go on, and cutting the tail frees space.
		note.Fields["begins"] = string(tail[:min(len(tail), 256)])
	} else {
		return l.explain("move a torn record aside", err)
	}
	if err := l.file.Truncate(l.size); err != nil {
		return fmt.Errorf("audit: cut a torn record off: %w", err)
	}
	s.size = l.size
	l.owed = append(l.owed, note)
	old, err := filepath.Glob(filepath.Join(l.dir, "torn-*"))
	if err != nil {
		return err
	}
	slices.Sort(old)
	for ; len(old) > keepTorn; old = old[1:] {
		if err := os.Remove(old[0]); err != nil {
			return fmt.Errorf("audit: %w", err)
		}
	}
	return nil
}
