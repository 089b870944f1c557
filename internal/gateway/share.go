//go:build linux

package gateway

import (
	"fmt"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// defaultConnections is how many connections and requests all sandboxes together may have open.
	defaultConnections = 16384
	// ownShare is how many a sandbox may have when there are too many, or too much memory is in use: whoever has more has to wait, and nobody can take the
	// network from others by having much.
	ownShare = 32
	// memoryFresh is how long the memory in use is taken to be the same.
	memoryFresh = 100 * time.Millisecond
)

// share is what all cards of a gateway have together.
type share struct {
	connections int
	memory      int64 // 0 for any
	open        atomic.Int64

	mu   sync.Mutex
	used int64
	at   time.Time
	// inUse returns the bytes that the process holds.
	inUse func() int64
}

// room says whether a card that has so many flows may have another.
func (s *share) room(mine int) error {
	if mine < ownShare {
		return nil
	}
	if open := s.open.Load(); open >= int64(s.connections) {
		return &limitError{fmt.Sprintf("%d connections and requests of all sandboxes together are open, which is the most (gateway.connections); a sandbox may have %d all the same", open, ownShare)}
	}
	if s.memory == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); now.Sub(s.at) > memoryFresh {
		s.used, s.at = s.inUse(), now
	}
	if s.used >= s.memory {
		return &limitError{fmt.Sprintf("the connections of all sandboxes together hold %d bytes of memory, of %d at most (gateway.memory); a sandbox may have %d all the same", s.used, s.memory, ownShare)}
	}
	return nil
}

// heapInUse is what the heap and stacks hold. To ask stops nothing.
func heapInUse() int64 {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(samples)
	n := int64(0)
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			n += int64(s.Value.Uint64())
		}
	}
	return n
}
