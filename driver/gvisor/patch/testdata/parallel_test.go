// TestState puts this into the copy, beside the package that it is about.
package state_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/compressio"
	"gvisor.dev/gvisor/pkg/state"
)

// node is one of many, in a chain and with pointers across it.
type node struct {
	n           int64
	next, other *node
	text        string
}

func (*node) StateTypeName() string { return "warren.node" }
func (*node) StateFields() []string { return []string{"n", "next", "other", "text"} }
func (n *node) StateSave(s state.Sink) {
	s.Save(0, &n.n)
	s.Save(1, &n.next)
	s.Save(2, &n.other)
	s.Save(3, &n.text)
}
func (n *node) StateLoad(_ context.Context, s state.Source) {
	s.Load(0, &n.n)
	s.Load(1, &n.next)
	s.Load(2, &n.other)
	s.Load(3, &n.text)
}

func init() { state.Register((*node)(nil)) }

func nodes(count int) (*node, []*node) {
	all := make([]*node, count)
	for i := range all {
		all[i] = &node{n: int64(i), text: string(rune('a' + i%26))}
	}
	for i, n := range all {
		n.other = all[rand.IntN(count)]
		if i > 0 {
			all[i-1].next = n
		}
	}
	return all[0], all
}

// short writes this many bytes.
type short struct{ left int }

var errShort = errors.New("no room")

func (s *short) Write(p []byte) (int, error) {
	if s.left < len(p) {
		return 0, errShort
	}
	s.left -= len(p)
	return len(p), nil
}

// TestParallel saves and loads so many objects that another goroutine reads them, and fewer.
func TestParallel(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, count := range []int{1, 511, 512, 513, 700, 5000} {
		root, all := nodes(count)
		var file bytes.Buffer
		w := compressio.NewSimpleWriter(&file, nil, 4096)
		if _, err := state.Save(t.Context(), w, root); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte("what comes after"))
		w.Close()
		whole := file.Bytes()
		got := new(node)
		r := compressio.NewSimpleReader(io.NopCloser(bytes.NewReader(whole)), nil)
		if _, err := state.Load(t.Context(), r, got); err != nil {
			t.Fatalf("%d objects: %v", count, err)
		}
		// No more was read than is theirs.
		if rest, err := io.ReadAll(r); string(rest) != "what comes after" {
			t.Errorf("%d objects: %q comes after: %v", count, rest, err)
		}
		var loaded []*node
		for n := got; n != nil; n = n.next {
			loaded = append(loaded, n)
		}
		if len(loaded) != count {
			t.Fatalf("%d of %d objects", len(loaded), count)
		}
		for i, n := range loaded {
			if n.n != int64(i) || n.text != all[i].text || n.other != loaded[all[i].other.n] {
				t.Fatalf("object %d of %d: %+v", i, count, n)
			}
		}
		// What has been cut off, or spoiled, is refused or read, and nobody is left who reads.
		for range 100 {
			n := rand.IntN(len(whole) - len("what comes after"))
			if _, err := state.Load(t.Context(), bytes.NewReader(whole[:n]), new(node)); err == nil {
				t.Fatalf("%d objects: the first %d bytes of %d were loaded", count, n, len(whole))
			}
			bad := bytes.Clone(whole)
			bad[n] ^= 1 << rand.IntN(8)
			state.Load(t.Context(), bytes.NewReader(bad), new(node))
		}
		// A writer that fails does so wherever that is.
		for _, n := range []int{0, len(whole) / 4, len(whole) * 3 / 4, len(whole) - len("what comes after") - 1} {
			if _, err := state.Save(t.Context(), &short{n}, root); !errors.Is(err, errShort) {
				t.Errorf("%d objects, room for %d bytes of %d: %v", count, n, len(whole), err)
			}
		}
	}
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}
