package secret

import "math/bits"

const (
	block     = 3  // bytes that are looked at together
	maxWindow = 64 // of each text's beginning, what the shifts are made of
)

// matcher finds the leftmost of several texts, and of those at one place the longest. It looks at blocks of three bytes
// and passes over as many as no text can begin in (Wu and Manber), so long texts make it faster.
type matcher struct {
	texts    []string
	window   int // the shortest text, or maxWindow
	max      int // the longest text
	hashBits uint
	shift    []uint8  // block → how far to go on
	tail     []uint16 // block that ends a window → first text, from 1
	nextTail []uint16
	head     []uint16 // block that begins a text → first text, from 1
	nextHead []uint16
}

// newMatcher makes a matcher of texts, none shorter than 4 bytes.
func newMatcher(texts []string) *matcher {
	m := &matcher{texts: texts, window: maxWindow}
	for _, t := range texts {
		m.window = min(m.window, len(t))
		m.max = max(m.max, len(t))
	}
	// Most entries stay free, and the tables of a few secrets within a processor's nearest cache.
	m.hashBits = uint(min(max(bits.Len(uint(len(texts)*m.window*4)), 10), 15))
	size := 1 << m.hashBits
	m.shift, m.tail, m.head = make([]uint8, size), make([]uint16, size), make([]uint16, size)
	m.nextTail, m.nextHead = make([]uint16, len(texts)), make([]uint16, len(texts))
	last := m.window - block
	for i := range m.shift {
		m.shift[i] = uint8(last + 1)
	}
	for n, t := range texts {
		for i := range last + 1 {
			h := m.hash(t[i], t[i+1], t[i+2])
			m.shift[h] = min(m.shift[h], uint8(last-i))
		}
		h := m.hash(t[last], t[last+1], t[last+2])
		m.nextTail[n], m.tail[h] = m.tail[h], uint16(n+1)
		h = m.hash(t[0], t[1], t[2])
		m.nextHead[n], m.head[h] = m.head[h], uint16(n+1)
	}
	return m
}

func (m *matcher) hash(a, b, c byte) uint32 {
	return (uint32(a) | uint32(b)<<8 | uint32(c)<<16) * 0x9E3779B1 >> (32 - m.hashBits)
}

// find returns where the first text stands in b at or after from, and which; -1 when none does.
func (m *matcher) find(b []byte, from int) (at, which int) {
	if len(m.texts) == 0 {
		return -1, -1
	}
	last := m.window - block
	shift, k := m.shift, 32-m.hashBits
	for i := from + last; i+block <= len(b); {
		c := b[i : i+3 : i+3]
		h := (uint32(c[0]) | uint32(c[1])<<8 | uint32(c[2])<<16) * 0x9E3779B1 >> k
		if s := shift[h]; s > 0 {
			i += int(s)
			continue
		}
		start, best := i-last, -1
		for n := m.tail[h]; n > 0; n = m.nextTail[n-1] {
			t := m.texts[n-1]
			if len(t) <= len(b)-start && (best < 0 || len(t) > len(m.texts[best])) && string(b[start:start+len(t)]) == t {
				best = int(n - 1)
			}
		}
		if best >= 0 {
			return start, best
		}
		i++
	}
	return -1, -1
}

// at returns the longest text that stands at a place in b, -1 when none does.
func (m *matcher) at(b []byte, i int) int {
	best := -1
	if rest := b[i:]; len(rest) >= block {
		for n := m.head[m.hash(rest[0], rest[1], rest[2])]; n > 0; n = m.nextHead[n-1] {
			if t := m.texts[n-1]; len(t) <= len(rest) && (best < 0 || len(t) > len(m.texts[best])) && string(rest[:len(t)]) == t {
				best = int(n - 1)
			}
		}
	}
	return best
}

// alive returns the first place in b at or after from where a text may begin that goes on after b's end; len(b) when
// there is none.
func (m *matcher) alive(b []byte, from int) int {
	for i := max(from, len(b)-m.max+1); i < len(b); i++ {
		rest := b[i:]
		if len(rest) < block {
			for _, t := range m.texts {
				if t[:len(rest)] == string(rest) {
					return i
				}
			}
			continue
		}
		for n := m.head[m.hash(rest[0], rest[1], rest[2])]; n > 0; n = m.nextHead[n-1] {
			if t := m.texts[n-1]; len(t) > len(rest) && t[:len(rest)] == string(rest) {
				return i
			}
		}
	}
	return len(b)
}
