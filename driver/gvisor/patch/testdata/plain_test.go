// TestState puts this into the copy, beside the package that it is about.
package state_test

import (
	"bytes"
	"context"
	"io"
	"reflect"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/atomicbitops"
	"gvisor.dev/gvisor/pkg/compressio"
	gvisor "gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/lock"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/state"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

type leaf struct {
	n    atomicbitops.Uint32
	data [5]byte
}

// all holds each kind of what is written plainly: empty and not, alone, in arrays, slices and maps, and pointed to from elsewhere.
type all struct {
	b           atomicbitops.Bool
	i32         atomicbitops.Int32
	i64         atomicbitops.Int64
	u32         atomicbitops.Uint32
	u64, none   atomicbitops.Uint64
	numbers     []atomicbitops.Uint32
	fixed       [3]atomicbitops.Int64
	byName      map[string]atomicbitops.Int32
	byKey       map[[4]byte][2]byte
	boxed       any
	bytes, gap  []byte
	nothing     []byte
	grid        [2][3]byte
	leaves      []leaf
	intoNumber  *atomicbitops.Uint32
	intoNumbers *atomicbitops.Uint32
	intoBytes   *byte
	tail        []byte
	locks, used vfs.FileLocks
	queue       waiter.Queue
	count       tcpip.StatCounter
	counted     tcpip.StatCounter
	counter     *tcpip.StatCounter
	after       uint64
}

func (*leaf) StateTypeName() string { return "warren.leaf" }
func (*leaf) StateFields() []string { return []string{"n", "data"} }
func (l *leaf) StateSave(s state.Sink) {
	s.Save(0, &l.n)
	s.Save(1, &l.data)
}
func (l *leaf) StateLoad(_ context.Context, s state.Source) {
	s.Load(0, &l.n)
	s.Load(1, &l.data)
}

func (a *all) fields() []any {
	return []any{&a.b, &a.i32, &a.i64, &a.u32, &a.u64, &a.none, &a.numbers, &a.fixed, &a.byName, &a.byKey, &a.boxed, &a.bytes, &a.gap, &a.nothing,
		&a.grid, &a.leaves, &a.intoNumber, &a.intoNumbers, &a.intoBytes, &a.tail, &a.locks, &a.used, &a.queue, &a.count, &a.counted, &a.counter, &a.after}
}
func (*all) StateTypeName() string { return "warren.all" }
func (*all) StateFields() (names []string) { // which is asked of a nil
	for i := range reflect.TypeFor[all]().NumField() {
		names = append(names, reflect.TypeFor[all]().Field(i).Name)
	}
	return names
}
func (a *all) StateSave(s state.Sink) {
	for i, f := range a.fields() {
		s.Save(i, f)
	}
}
func (a *all) StateLoad(_ context.Context, s state.Source) {
	for i, f := range a.fields() {
		s.Load(i, f)
	}
}

func init() {
	state.Register((*leaf)(nil))
	state.Register((*all)(nil))
}

func TestPlain(t *testing.T) {
	a := &all{
		b: atomicbitops.FromBool(true), i32: atomicbitops.FromInt32(-5), i64: atomicbitops.FromInt64(-1 << 63), u32: atomicbitops.FromUint32(1<<32 - 1),
		u64: atomicbitops.FromUint64(1<<64 - 1), numbers: make([]atomicbitops.Uint32, 4, 6),
		byName: map[string]atomicbitops.Int32{"one": atomicbitops.FromInt32(1), "zero": {}},
		byKey:  map[[4]byte][2]byte{{1, 2, 3, 4}: {5, 6}, {}: {}},
		boxed:  [4]byte{9, 8, 7, 6},
		bytes:  []byte("\x00\x01\x7f\x80\xff"), gap: make([]byte, 3, 9), nothing: []byte{},
		grid:   [2][3]byte{{0, 0, 0}, {1, 2, 3}},
		leaves: []leaf{{}, {n: atomicbitops.FromUint32(7), data: [5]byte{1, 2, 3, 4, 5}}},
		after:  42,
	}
	a.numbers[2] = atomicbitops.FromUint32(300)
	a.fixed[1] = atomicbitops.FromInt64(-2)
	a.intoNumber, a.intoNumbers, a.intoBytes, a.tail, a.counter = &a.leaves[1].n, &a.numbers[2], &a.leaves[1].data[3], a.bytes[:2], &a.counted
	a.counted.IncrementBy(1 << 40)
	if err := a.used.LockPOSIX(gvisor.Background(), "owner", 1, lock.WriteLock, lock.LockRange{Start: 3, End: 9}, false); err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		name string
		key  []byte
	}{{"plain", nil}, {"authenticated", bytes.Repeat([]byte{1}, 32)}} {
		t.Run(c.name, func(t *testing.T) {
			var file bytes.Buffer
			w := compressio.NewSimpleWriter(&file, c.key, 64)
			if _, err := state.Save(t.Context(), w, a); err != nil {
				t.Fatal(err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			whole := file.Bytes()
			got := new(all)
			if _, err := state.Load(t.Context(), compressio.NewSimpleReader(io.NopCloser(&file), c.key), got); err != nil {
				t.Fatal(err)
			}
			// Pointers into what was saved point into what was loaded.
			if got.intoNumber != &got.leaves[1].n || got.intoNumbers != &got.numbers[2] || got.intoBytes != &got.leaves[1].data[3] || got.counter != &got.counted {
				t.Error("a pointer does not point to where it did")
			}
			if &got.tail[0] != &got.bytes[0] || cap(got.tail) != 5 || cap(got.gap) != 9 || cap(got.numbers) != 6 || got.nothing == nil {
				t.Errorf("slices: tail %v, gap of %d, numbers of %d, nothing %v", got.tail, cap(got.gap), cap(got.numbers), got.nothing == nil)
			}
			if n := got.counted.Value(); n != 1<<40 {
				t.Errorf("counted %d", n)
			}
			if err := got.used.LockPOSIX(gvisor.Background(), "another", 2, lock.ReadLock, lock.LockRange{Start: 4, End: 5}, false); err == nil {
				t.Error("the lock is gone")
			}
			if err := got.locks.LockPOSIX(gvisor.Background(), "another", 2, lock.WriteLock, lock.LockRange{Start: 0, End: 5}, false); err != nil {
				t.Errorf("locks that nobody held: %v", err)
			}
			got.locks = vfs.FileLocks{}
			got.used, got.tail, got.intoNumber, got.intoNumbers, got.intoBytes, got.counter = a.used, a.tail, a.intoNumber, a.intoNumbers, a.intoBytes, a.counter
			if !reflect.DeepEqual(a, got) {
				t.Errorf("saved\n%#v\nloaded\n%#v", a, got)
			}

			// What has been cut off is refused, wherever that was.
			for n := range len(whole) {
				if _, err := state.Load(t.Context(), compressio.NewSimpleReader(io.NopCloser(bytes.NewReader(whole[:n])), c.key), new(all)); err == nil {
					t.Fatalf("the first %d bytes of %d were loaded", n, len(whole))
				}
			}
		})
	}
}

// TestPlainSize has a kilobyte of packet take a kilobyte, and what is empty next to nothing.
func TestPlainSize(t *testing.T) {
	size := func(a *all) int {
		var file bytes.Buffer
		if _, err := state.Save(t.Context(), &file, a); err != nil {
			t.Fatal(err)
		}
		return file.Len()
	}
	none := size(&all{})
	if n := size(&all{bytes: bytes.Repeat([]byte{0xff}, 1000)}) - none; n > 1020 {
		t.Errorf("1,000 bytes take %d", n)
	}
	var b strings.Builder
	if _, err := state.Save(t.Context(), &b, &all{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"FileLocks", "waiter.Queue", "StatCounter", "atomicbitops.Uint64"} {
		if strings.Contains(b.String(), name) {
			t.Errorf("an empty %s is written", name)
		}
	}
}
