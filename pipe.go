package warren

import (
	"fmt"
	"io"
	"sync"
)

// pipe is a bounded buffer between one writer and one reader, like the kernel's.
type pipe struct {
	mu     sync.Mutex
	cond   *sync.Cond
	buf    []byte
	limit  int
	ended  bool // no more writes
	closed bool // no more reads
}

func newPipe(limit int) *pipe {
	p := &pipe{limit: limit}
	p.cond = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for len(b) > 0 {
		for len(p.buf) >= p.limit && !p.closed && !p.ended {
			p.cond.Wait()
		}
		if p.closed || p.ended {
			return n, io.ErrClosedPipe
		}
		k := min(len(b), p.limit-len(p.buf))
		p.buf = append(p.buf, b[:k]...)
		b, n = b[k:], n+k
		p.cond.Broadcast()
	}
	return n, nil
}

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.buf) == 0 && !p.ended && !p.closed {
		p.cond.Wait()
	}
	switch {
	case p.closed:
		return 0, io.ErrClosedPipe
	case len(p.buf) == 0:
		return 0, io.EOF
	}
	n := copy(b, p.buf)
	p.buf = p.buf[n:]
	p.cond.Broadcast()
	return n, nil
}

// Close ends the reader's side.
func (p *pipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.cond.Broadcast()
	return nil
}

// closeWrite ends the writer's side; what is in the buffer can still be read.
func (p *pipe) closeWrite() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.cond.Broadcast()
}

// headTail keeps the first and the last limit bytes written to it.
type headTail struct {
	limit   int
	head    []byte
	tail    []byte
	dropped int64
}

func (h *headTail) Write(b []byte) (int, error) {
	n := len(b)
	if k := min(len(b), h.limit-len(h.head)); k > 0 {
		h.head = append(h.head, b[:k]...)
		b = b[k:]
	}
	h.tail = append(h.tail, b...)
	if over := len(h.tail) - h.limit; over > 0 {
		h.dropped += int64(over)
		h.tail = append(h.tail[:0], h.tail[over:]...)
	}
	return n, nil
}

func (h *headTail) bytes() []byte {
	if h.dropped == 0 {
		return append(h.head, h.tail...)
	}
	mid := fmt.Sprintf("\n... %d bytes left out ...\n", h.dropped)
	return append(append(h.head, mid...), h.tail...)
}
