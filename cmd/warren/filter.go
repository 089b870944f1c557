package main

import (
	"bytes"
	"io"
	"unicode/utf8"
)

// terminalFilter passes the output of a sandbox to a person's terminal without what could do harm there. Text, colours, cursor movement
// and the modes that full-screen programs need go through. What does not: everything that makes a terminal answer as if the person
// had typed (status, attribute, title and colour queries), clipboard access and links (OSC 52 and 8 among all OSC but titles), device
// control, application and privacy strings, window operations, C1 controls, and characters that reverse the direction of text.
type terminalFilter struct {
	out   io.Writer
	plain bool // drop every sequence, for views of what was

	state filterState
	seq   []byte // the sequence so far, from its ESC on
	rest  []byte // an unfinished UTF-8 character
	buf   bytes.Buffer
}

type filterState int

const (
	inText   filterState = iota
	inEscape             // after ESC
	inCharset
	inCSI
	inOSC
	inString // DCS, APC, PM, SOS: dropped up to their end
)

// maxSequence bounds what is held back of one sequence; a longer one is dropped.
const maxSequence = 1024

// Write filters p. Incomplete sequences and characters wait for the next call.
func (f *terminalFilter) Write(p []byte) (int, error) {
	f.buf.Reset()
	data := p
	if len(f.rest) > 0 {
		data = append(f.rest, p...)
		f.rest = nil
	}
	for len(data) > 0 {
		if f.state != inText {
			f.control(data[0])
			data = data[1:]
			continue
		}
		if !utf8.FullRune(data) {
			f.rest = append([]byte(nil), data...)
			break
		}
		r, n := utf8.DecodeRune(data)
		f.text(r, n, data[:n])
		data = data[n:]
	}
	if f.buf.Len() > 0 {
		if _, err := f.out.Write(f.buf.Bytes()); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

func (f *terminalFilter) text(r rune, n int, raw []byte) {
	switch {
	case r == 0x1b:
		f.state, f.seq = inEscape, append(f.seq[:0], 0x1b)
	case r == '\n' || r == '\t':
		f.buf.WriteRune(r)
	case r == '\r' || r == '\b' || r == '\a' || r == 0x0e || r == 0x0f:
		if !f.plain {
			f.buf.WriteRune(r)
		}
	case r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0:
		// ENQ makes some terminals answer, and C1 controls are escape sequences in one byte.
	case r == utf8.RuneError && n == 1:
		f.buf.WriteRune(utf8.RuneError)
	case turnsText(r):
	default:
		f.buf.Write(raw)
	}
}

// turnsText is true for the marks that override, embed or isolate a direction of text.
func turnsText(r rune) bool {
	return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 || r == 0x061c || r == 0x200e || r == 0x200f
}

// control takes a byte that belongs to a sequence.
func (f *terminalFilter) control(b byte) {
	if b == 0x18 || b == 0x1a { // CAN and SUB abort any sequence
		f.state = inText
		return
	}
	if len(f.seq) < maxSequence {
		f.seq = append(f.seq, b)
	} else if f.state == inCSI {
		f.state = inString
	}
	switch f.state {
	case inEscape:
		f.escape(b)
	case inCharset:
		f.pass(b >= '0' && b <= '~')
	case inCSI:
		switch {
		case b == 0x1b:
			f.state, f.seq = inEscape, append(f.seq[:0], 0x1b)
		case b >= 0x40 && b <= 0x7e:
			f.pass(allowedCSI(f.seq[2:len(f.seq)-1], b))
		case b < 0x20 || b > 0x7e:
			f.state = inText
		}
	case inOSC, inString:
		ended := b == '\a' || b == '\\' && len(f.seq) > 1 && f.seq[len(f.seq)-2] == 0x1b
		if len(f.seq) == maxSequence {
			// The end of an endless string still has to be seen: only its last two bytes are kept.
			f.seq = append(f.seq[:0], 0x1b, ']', f.seq[maxSequence-1])
			f.state = inString
		}
		if ended {
			f.pass(f.state == inOSC && allowedOSC(f.seq))
		}
	}
}

func (f *terminalFilter) escape(b byte) {
	switch b {
	case '[':
		f.state = inCSI
	case ']':
		f.state = inOSC
	case 'P', '_', '^', 'X':
		f.state = inString
	case '(', ')', '*', '+', '#':
		f.state = inCharset
	case 0x1b:
		f.seq = append(f.seq[:0], 0x1b)
	default:
		f.pass(bytes.IndexByte([]byte("78DEHMc=>\\"), b) >= 0)
	}
}

// pass ends a sequence and writes it if it is allowed.
func (f *terminalFilter) pass(allowed bool) {
	if allowed && !f.plain {
		f.buf.Write(f.seq)
	}
	f.state = inText
}

// allowedCSI decides about ESC [ params final.
func allowedCSI(params []byte, final byte) bool {
	private := len(params) > 0 && params[0] >= '<' && params[0] <= '?'
	last := byte(0)
	if len(params) > 0 {
		last = params[len(params)-1]
	}
	if last >= 0x20 && last <= 0x2f { // an intermediate byte
		return last == ' ' && final == 'q' || last == '!' && final == 'p' // cursor style, soft reset
	}
	if private {
		// Modes only: alternate screen, cursor keys, mouse, bracketed paste. Their query is $p, refused above.
		return params[0] == '?' && (final == 'h' || final == 'l' || final == 'J' || final == 'K')
	}
	return bytes.IndexByte([]byte("@ABCDEFGHIJKLMPSTXZ`abdefghlmrsu"), final) >= 0
}

// allowedOSC lets a program set the title, to printable text of at most 256 bytes: an ESC within would begin another sequence.
func allowedOSC(seq []byte) bool {
	body := bytes.TrimSuffix(bytes.TrimSuffix(seq, []byte("\a")), []byte("\x1b\\"))
	if len(seq) > 256 || len(body) < 4 || body[3] != ';' || body[2] < '0' || body[2] > '2' || !utf8.Valid(body) {
		return false
	}
	for _, r := range string(body[4:]) {
		if !printable(r) {
			return false
		}
	}
	return true
}

// plainOutput drops every sequence: for output of the past, which no terminal is attached to.
func plainOutput(out io.Writer) io.Writer { return &terminalFilter{out: out, plain: true} }

// fileOutput is where the content of files goes, patches among it: on a terminal without any sequence, for no program runs there
// whose titles and screens they could be; untouched elsewhere.
func fileOutput(out io.Writer) io.Writer {
	if isTerminal(out) {
		return plainOutput(out)
	}
	return out
}

// sandboxOutput is where the output of a command goes: filtered on a terminal, untouched elsewhere.
func sandboxOutput(out io.Writer) io.Writer {
	if isTerminal(out) {
		return &terminalFilter{out: out}
	}
	return out
}
