package engine

import (
	"context"
	"sync"
)

// queue lets so many starts run at the same time, and takes the users that wait in turn, so that one user's
// hundred starts delay another's first by one.
type queue struct {
	mu      sync.Mutex
	free    int
	waiting map[string][]*turn
	ring    []string // users with someone waiting, the next first
	length  int
}

type turn struct {
	ready chan struct{}
	gone  bool
}

func newQueue(slots int) *queue {
	return &queue{free: slots, waiting: map[string][]*turn{}}
}

// acquire waits for a slot; release gives it back.
func (q *queue) acquire(ctx context.Context, user string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	q.mu.Lock()
	if q.free > 0 {
		q.free--
		q.mu.Unlock()
		return nil
	}
	t := &turn{ready: make(chan struct{})}
	if len(q.waiting[user]) == 0 {
		q.ring = append(q.ring, user)
	}
	q.waiting[user] = append(q.waiting[user], t)
	q.length++
	q.mu.Unlock()
	select {
	case <-t.ready:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	select {
	case <-t.ready: // it came all the same
		q.mu.Unlock()
		q.release()
	default:
		t.gone = true
		q.length--
		q.mu.Unlock()
	}
	return ctx.Err()
}

func (q *queue) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.ring) > 0 {
		user := q.ring[0]
		q.ring = q.ring[1:]
		list := q.waiting[user]
		for len(list) > 0 && list[0].gone {
			list = list[1:]
		}
		if len(list) == 0 {
			delete(q.waiting, user)
			continue
		}
		t := list[0]
		if list = list[1:]; len(list) == 0 {
			delete(q.waiting, user)
		} else {
			q.waiting[user] = list
			q.ring = append(q.ring, user)
		}
		q.length--
		close(t.ready)
		return
	}
	q.free++
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.length
}
