package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

func testOutput(t *testing.T, limit int64) *Output {
	o := newOutput(&spool{disk: &disk{dir: t.TempDir(), limit: limit}})
	t.Cleanup(o.drop)
	return o
}

// readAll reads what is kept from a sequence number on.
func readAll(t *testing.T, o *Output, from int64) (data map[Kind]string, lost int64) {
	t.Helper()
	f := o.Follow(from)
	defer f.Close()
	data = make(map[Kind]string)
	var b [3]strings.Builder
	next := from
	for {
		c, err := f.Next(context.Background(), 0)
		var le *LostError
		switch {
		case errors.As(err, &le):
			lost, next = le.Before, le.Before
			continue
		case errors.Is(err, ErrIdle), errors.Is(err, io.EOF):
			for k := range b {
				data[Kind(k)] = b[k].String()
			}
			return data, lost
		case err != nil:
			t.Fatal(err)
		}
		if c.Seq != next || len(c.Data) == 0 {
			t.Fatalf("chunk at %d of %d bytes, want one at %d", c.Seq, len(c.Data), next)
		}
		next = c.end()
		b[c.Kind].Write(c.Data)
	}
}

func TestOutputReplaysFromAnywhere(t *testing.T) {
	o := testOutput(t, diskLimit)
	rnd := rand.New(rand.NewPCG(1, 2))
	var kinds []Kind // of each byte
	var all []byte
	for len(all) < 6<<20 { // beyond the ring, within the spool
		piece := make([]byte, 1+rnd.IntN(chunkBytes))
		if rnd.IntN(3) == 0 {
			piece = piece[:1+rnd.IntN(min(20, len(piece)))]
		}
		for i := range piece {
			piece[i] = byte(rnd.Uint32())
		}
		kind := Kind(rnd.IntN(2))
		o.append(kind, piece)
		all = append(all, piece...)
		for range piece {
			kinds = append(kinds, kind)
		}
	}
	if o.Seq() != int64(len(all)) {
		t.Fatalf("seq %d, want %d", o.Seq(), len(all))
	}
	if o.memory() > ringBytes {
		t.Errorf("%d bytes in memory", o.memory())
	}
	for range 40 {
		from := rnd.IntN(len(all) + 1)
		var want [2][]byte
		for i := from; i < len(all); i++ {
			want[kinds[i]] = append(want[kinds[i]], all[i])
		}
		got, lost := readAll(t, o, int64(from))
		if lost != 0 || got[Stdout] != string(want[0]) || got[Stderr] != string(want[1]) {
			t.Fatalf("from %d: lost %d, %d and %d bytes, want %d and %d", from, lost, len(got[Stdout]), len(got[Stderr]), len(want[0]), len(want[1]))
		}
	}
	o.store()
	if o.memory() != 0 {
		t.Errorf("%d bytes in memory after all was stored", o.memory())
	}
	if got, lost := readAll(t, o, 0); lost != 0 || len(got[Stdout])+len(got[Stderr]) != len(all) {
		t.Errorf("after all was stored: lost %d", lost)
	}
}

func TestOutputLosesTheOldest(t *testing.T) {
	o := testOutput(t, diskLimit)
	line := bytes.Repeat([]byte("x"), 1000)
	for range 40_000 {
		o.append(Stdout, line)
	}
	got, lost := readAll(t, o, 0)
	if lost == 0 || lost+int64(len(got[Stdout])) != 40_000_000 || len(got[Stdout]) < spoolFile {
		t.Errorf("lost %d, %d kept", lost, len(got[Stdout]))
	}
	o.drop()
	if got, lost := readAll(t, o, 5); lost != 40_000_000 || got[Stdout] != "" || o.spool.disk.used != 0 {
		t.Errorf("dropped: lost %d, %d kept, disk %d", lost, len(got[Stdout]), o.spool.disk.used)
	}
}

func TestDiskBudget(t *testing.T) {
	d := &disk{dir: t.TempDir(), limit: 4 << 20}
	var outs []*Output
	line := bytes.Repeat([]byte("y"), 4096)
	for range 8 {
		o := newOutput(&spool{disk: d})
		outs = append(outs, o)
		for range 2000 {
			o.append(Stdout, line)
		}
	}
	if most := int64(4<<20 + 8*3*spoolMin); d.used > most {
		t.Errorf("%d bytes on disk, at most %d", d.used, most)
	}
	for i, o := range outs {
		got, lost := readAll(t, o, 0)
		if lost+int64(len(got[Stdout])) != 2000*4096 || len(got[Stdout]) < ringBytes/3 {
			t.Errorf("%d: lost %d, %d kept", i, lost, len(got[Stdout]))
		}
		o.drop()
	}
	if d.used != 0 {
		t.Errorf("%d bytes on disk at the end", d.used)
	}
}

func TestOutputWithoutDisk(t *testing.T) {
	o := newOutput(&spool{disk: &disk{dir: "/proc/no/such/dir", limit: diskLimit}})
	for range 3000 {
		o.append(Stdout, bytes.Repeat([]byte("z"), 1000))
	}
	got, lost := readAll(t, o, 0)
	if lost == 0 || lost+int64(len(got[Stdout])) != 3_000_000 {
		t.Errorf("lost %d, %d kept", lost, len(got[Stdout]))
	}
}

func TestTinyWritesCostLittle(t *testing.T) {
	o := testOutput(t, diskLimit)
	for i := range 200_000 {
		o.append(Kind(i%2), []byte("a"))
	}
	if len(o.chunks)*chunkCost > ringBytes {
		t.Errorf("%d chunks in memory", len(o.chunks))
	}
	if got, lost := readAll(t, o, 0); lost != 0 || len(got[Stdout]) != 100_000 {
		t.Errorf("lost %d, %d", lost, len(got[Stdout]))
	}
}

func TestNextWaits(t *testing.T) {
	o := testOutput(t, diskLimit)
	f := o.Follow(0)
	defer f.Close()
	if _, err := f.Next(context.Background(), time.Millisecond); !errors.Is(err, ErrIdle) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := f.Next(ctx, -1); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	go o.append(Stderr, []byte("late"))
	if c, err := f.Next(context.Background(), -1); err != nil || string(c.Data) != "late" || c.Kind != Stderr {
		t.Errorf("%v %v", c, err)
	}
	go o.finish()
	if _, err := f.Next(context.Background(), -1); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
}

// TestThrottle: a client that reads gets everything; one that does not holds up nobody for long.
func TestThrottle(t *testing.T) {
	o := testOutput(t, diskLimit)
	f := o.Follow(0)
	const total = 40 << 20 // more than is kept
	go func() {
		piece := bytes.Repeat([]byte("w"), chunkBytes)
		for range total / chunkBytes {
			o.append(Stdout, piece)
			o.throttle()
		}
		o.finish()
	}()
	n := 0
	for {
		c, err := f.Next(context.Background(), -1)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n += len(c.Data)
	}
	f.Close()
	if n != total {
		t.Errorf("%d bytes, want %d", n, total)
	}

	stuck := o.Follow(-1)
	defer stuck.Close()
	o.append(Stdout, bytes.Repeat([]byte("v"), 2*windowBytes))
	o.mu.Lock()
	stuck.paceAt = time.Now().Add(-2 * paceTime) // it has not read for long
	o.mu.Unlock()
	done := make(chan bool)
	go func() { o.throttle(); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("a stuck client holds up the process")
	}
}

func BenchmarkOutput(b *testing.B) {
	for _, n := range []int{100, 4096, chunkBytes} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			o := newOutput(&spool{disk: &disk{dir: b.TempDir(), limit: diskLimit}})
			defer o.drop()
			data := bytes.Repeat([]byte("x"), n)
			b.SetBytes(int64(n))
			for b.Loop() {
				o.append(Stdout, data)
			}
		})
	}
}
