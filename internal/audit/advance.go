package audit

import (
	"errors"
	"fmt"
	"io/fs"
)

// Advance returns a newer head of the log in dir that lies on disk and continues from, which was kept elsewhere; from itself when there is none. It reads
// what came since from alone, so that it may be called often. A log that does not go on from there, such as one that was removed and begun anew, gives a
// *[Bad]. Where the record of from was dropped as one of the oldest, nothing can be compared.
func Advance(dir string, from Head) (Head, error) {
	for try := 0; ; try++ {
		was, _ := readAnchor(dir)
		to, err := advance(dir, from)
		var bad *Bad
		// The writer may be dropping segments, after it has said so in the anchor.
		if now, e := readAnchor(dir); errors.As(err, &bad) && e == nil && now.Start != was.Start && try < 50 {
			continue
		}
		return to, err
	}
}

func advance(dir string, from Head) (Head, error) {
	a, err := readAnchor(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && from.Seq == 0:
		return from, nil
	case errors.Is(err, fs.ErrNotExist):
		return from, gone(from)
	case errors.Is(err, errNoAnchor):
		return from, &Bad{Segment: anchorName, Kind: Edited, Why: err.Error()}
	case err != nil:
		return from, fmt.Errorf("audit: %w", err)
	case from.Seq == 0 || a.Start.Seq > from.Seq:
		return a.Head, nil
	case a.Seq < from.Seq:
		return from, &Bad{Segment: anchorName, Seq: a.Seq + 1, Kind: Truncated, Why: fmt.Sprintf("the log ends with record %d; record %d was there", a.Seq, from.Seq)}
	}
	anew := func(h Head) error {
		return &Bad{Segment: anchorName, Seq: h.Seq, Kind: Edited, Why: fmt.Sprintf("its hash is %.16s…, and it was %.16s…: it or a record before it was written anew", h.Hash, from.Hash)}
	}
	if a.Start.Seq == from.Seq && a.Start.Hash != from.Hash {
		return from, anew(a.Start)
	}
	last, enough := from, errors.New("enough")
	err = Read(dir, from.Seq-1, func(r Record) error {
		switch {
		case r.Seq > a.Seq:
			return enough
		case r.Seq == from.Seq && r.Hash != from.Hash:
			return anew(Head{r.Seq, r.Hash})
		case r.Seq == from.Seq:
		case r.Seq == last.Seq+1 && r.Prev == last.Hash:
			last = Head{r.Seq, r.Hash}
		default:
			return &Bad{Segment: anchorName, Seq: r.Seq, Kind: Edited, Why: fmt.Sprintf("it does not continue record %d as that was seen", last.Seq)}
		}
		return nil
	})
	if err != nil && !errors.Is(err, enough) {
		return from, err
	}
	if last != a.Head {
		return from, &Bad{Segment: anchorName, Seq: last.Seq + 1, Kind: Edited, Why: fmt.Sprintf("the log does not lead from record %d, as it was seen, to record %d, which its anchor names", from.Seq, a.Seq)}
	}
	return a.Head, nil
}

// gone is what is wrong with a log that is not there.
func gone(from Head) *Bad {
	return &Bad{Segment: anchorName, Seq: 1, Kind: Removed, Why: fmt.Sprintf("no log is there, and record %d was", from.Seq)}
}
