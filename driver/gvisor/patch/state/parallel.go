//go:build linux

package state

import (
	"errors"

	"gvisor.dev/gvisor/pkg/state/wire"
)

// An object is read in two steps, from bytes to a description and from that to the object. Of a whole kernel the first takes a third of the time,
// in which a second processor has nothing to do. Writing in two halves at once was faster too, and would hold one of them in memory just when the sandbox
// stands still: a deleted file that is open is one object, and may be as large as the sandbox's memory.

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

var _ = readAhead // whose caller is gVisor's
