//go:build linux

package state

import (
	"bytes"
	"errors"

	"gvisor.dev/gvisor/pkg/state/wire"
)

// What is written for an object is made in two steps, from the object to its description and from that to bytes, and read in the reverse two. Of a
// whole kernel the bytes take a quarter of the time to write and a third to read, in which a second processor has nothing to do.

const (
	// few objects are not worth a goroutine.
	few = 512
	// batch is how many objects are handed over at a time.
	batch = 128
)

// readAhead returns what gives the objects of a stream, n of them and the types among them, one after the other, and panics when one cannot be
// read, with what safely makes of that. They are read while those before them are used. Nobody reads any more when stop returns.
func readAhead(r *wire.Reader, n uint64, safely func(func()) error) (next func() wire.Object, stop func()) {
	if n < few {
		return func() wire.Object { return wire.Load(r) }, func() {}
	}
	var (
		batches = make(chan []wire.Object, 4)
		done    = make(chan struct{})
		failed  error // before batches is closed
	)
	go func() {
		defer close(batches)
		var objs []wire.Object
		flush := func() bool {
			select {
			case batches <- objs:
				objs = make([]wire.Object, 0, batch+1)
				return true
			case <-done:
				return false
			}
		}
		failed = safely(func() {
			for i := uint64(0); i < n; {
				obj := wire.Load(r)
				objs = append(objs, obj)
				if _, typ := obj.(*wire.Type); !typ {
					if _, id := obj.(wire.Uint); !id {
						break // which is refused by who gets it
					}
					objs = append(objs, wire.Load(r))
					i++
				}
				if len(objs) >= batch && !flush() {
					return
				}
			}
		})
		flush() // what was read before a failure too, as without
	}()
	var have []wire.Object
	next = func() wire.Object {
		for len(have) == 0 {
			var ok bool
			if have, ok = <-batches; !ok {
				if failed == nil {
					failed = errors.New("more objects are wanted than there are")
				}
				panic(failed)
			}
		}
		obj := have[0]
		have = have[1:]
		return obj
	}
	stop = func() {
		close(done)
		for range batches {
		}
	}
	return next, stop
}

// writeAhead begins to write the second half of some objects. It returns the first half, and what writes the rest after it, or panics.
func writeAhead[ID ~uint32](ids []ID, encoded func(ID) wire.Object, safely func(func()) error) (first []ID, rest func(*wire.Writer)) {
	if len(ids) < few {
		return ids, func(*wire.Writer) {}
	}
	first, second := ids[:len(ids)/2], ids[len(ids)/2:]
	var (
		b      bytes.Buffer
		failed error
		done   = make(chan struct{})
	)
	go func() {
		defer close(done)
		w := wire.Writer{Writer: &b}
		failed = safely(func() {
			for _, id := range second {
				wire.Save(&w, wire.Uint(id))
				wire.Save(&w, encoded(id))
			}
		})
	}()
	return first, func(w *wire.Writer) {
		<-done
		if failed != nil {
			panic(failed)
		}
		if _, err := w.Write(b.Bytes()); err != nil {
			panic(err)
		}
	}
}

var (
	_ = readAhead // whose callers are gVisor's
	_ = writeAhead[uint32]
)
