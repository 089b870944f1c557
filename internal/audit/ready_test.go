package audit

import (
	"errors"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// What a full disk has kept off the record is counted, and said before anything else; and who asks before is told in time.
func TestLost(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	l := open(t, dir, Options{Lost: "warren"})
	if err := l.Ready(); err != nil {
		t.Fatal(err)
	}
	add(t, l, 3)
	free := fill(t, dir)
	// There is room yet that was taken beforehand; who asks each time never loses one.
	said := 3
	var err error
	for ; said < 10_000; said++ {
		if err = l.Ready(); err != nil {
			break
		}
		if _, err := l.Append(t.Context(), Record{Action: "x"}); err != nil {
			t.Fatalf("record %d, after a yes: %v", said, err)
		}
	}
	if !errors.Is(err, syscall.ENOSPC) || said < 20 {
		t.Fatalf("after %d records: %v", said, err)
	}
	began := time.Now()
	lost := 0
	for i := 0; i < 10_000 && lost < 7; i++ {
		if _, err := l.Append(t.Context(), Record{Action: "x", Time: began}); err != nil {
			lost++
		} else {
			said++
		}
	}
	if err := l.Ready(); lost != 7 || !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("%d are lost; ready: %v", lost, err)
	}
	whole(t, dir)
	free()
	if err := l.Ready(); err != nil {
		t.Fatal(err)
	}
	add(t, l, 1)
	list := read(t, dir, int64(said))
	if len(list) != 2 || list[0].Action != "record.lost" || list[0].Actor != "warren" || list[0].Fields["records"] != strconv.Itoa(lost) {
		t.Fatalf("%+v", list)
	}
	from, err := time.Parse(time.RFC3339Nano, list[0].Fields["from"])
	to, err2 := time.Parse(time.RFC3339Nano, list[0].Fields["to"])
	if err != nil || err2 != nil || !from.Equal(began) || !to.Equal(began) {
		t.Errorf("%+v, %v, %v; they were lost at %v", list[0].Fields, err, err2, began)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	whole(t, dir, l.Head())
	if err := l.Ready(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// A log that does not count keeps what it was: the next record follows the last.
func TestNothingIsLostUncounted(t *testing.T) {
	dir := testenv.SmallFS(t, 4<<20, 64)
	l := open(t, dir, Options{})
	add(t, l, 3)
	free := fill(t, dir)
	said, failed := 3, false
	for i := 0; i < 10_000 && !failed; i++ {
		_, err := l.Append(t.Context(), Record{Action: "x"})
		if failed = err != nil; !failed {
			said++
		}
	}
	free()
	add(t, l, 1)
	if list := read(t, dir, int64(said)); !failed || len(list) != 1 || list[0].Action != "flow.allow" {
		t.Errorf("%t, %+v", failed, list)
	}
}

// Room that was taken and not needed is given back: the next segment, and who opens the log, see only records.
func TestReadyAcrossSegments(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l := open(t, dir, Options{SegmentBytes: 2_000, MaxBytes: 1 << 20})
	for range 50 {
		if err := l.Ready(); err != nil {
			t.Fatal(err)
		}
		add(t, l, 1)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r := whole(t, dir, l.Head()); r.Records != 50 || r.Torn != 0 || r.Segments < 3 {
		t.Errorf("%+v", r)
	}
	// One that has room and nothing else.
	l = open(t, dir, Options{})
	if err := l.Ready(); err != nil {
		t.Fatal(err)
	}
	add(t, l, 1)
	if r := whole(t, dir); r.Records != 51 {
		t.Errorf("%+v", r)
	}
}
