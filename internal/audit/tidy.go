package audit

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	maxText   = 1 << 10
	maxName   = 256
	maxKey    = 64
	maxRecord = 8 << 10
	// maxInput is what is looked at of a text; the rest cannot be shown.
	maxInput = 16 << 10
	// overhead is what a line has beside its texts: seq, time, prev, hash and punctuation.
	overhead = 400
)

// tidy masks, escapes and cuts every text of a record.
func (l *Log) tidy(r Record) (Record, error) {
	t := Record{
		Time:    r.Time.Round(0).UTC(),
		Actor:   l.text(r.Actor, maxName),
		Action:  l.text(r.Action, maxName),
		Sandbox: l.text(r.Sandbox, maxName),
		Message: l.text(r.Message, maxText),
	}
	if t.Action == "" {
		return Record{}, errors.New("audit: the record names no action")
	}
	if y := t.Time.Year(); r.Time.IsZero() || y < 1970 || y > 9999 {
		t.Time = time.Now().UTC()
	}
	if len(r.Fields) == 0 {
		return t, nil
	}
	left := maxRecord - overhead - quoted(t.Actor) - quoted(t.Action) - quoted(t.Sandbox) - quoted(t.Message)
	t.Fields = make(map[string]string, min(len(r.Fields), 64))
	dropped := 0
	for _, key := range slices.Sorted(maps.Keys(r.Fields)) {
		if left < maxKey {
			dropped++
			continue
		}
		k := l.text(key, maxKey)
		value := r.Fields[key]
		if namesCredential(key, value) {
			value = masked
		}
		v := ""
		if r.Actor == "gateway" && (key == "host" || key == "addr") && isDestination(value) {
			// A name that looks like a token is still where something went, which is what the record is for. What is known as a secret is taken out.
			if v = value; l.opts.Mask != nil {
				v = escape(l.opts.Mask(value), maxText, len(value))
			}
		} else {
			v = l.text(value, maxText)
		}
		if _, taken := t.Fields[k]; taken || k == "" || k == "truncated" {
			// Two keys that are the same once cut.
			k = cut(k, maxKey-8) + "~" + strconv.Itoa(len(t.Fields))
		}
		if n := quoted(k) + quoted(v); n <= left {
			left -= n
			t.Fields[k] = v
		} else {
			dropped++
		}
	}
	if dropped > 0 {
		t.Fields["truncated"] = fmt.Sprintf("%d fields", dropped)
	}
	return t, nil
}

// isDestination says whether a text can be a host in its canonical form, which has nothing to escape or to cut.
func isDestination(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil && !strings.Contains(s, "%") {
		return true
	}
	for i := range len(s) {
		if c := s[i]; !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') {
			return false
		}
	}
	return s != "" && len(s) <= 253
}

// namesCredential says whether a field holds a credential by its key. "secret" and its like are the names of ours.
func namesCredential(key, value string) bool {
	switch strings.ToLower(key) {
	case "secret", "secret_name", "token_id":
		return false
	}
	sure := keyish(key)
	return sure == strong && value != "" || sure == weak && random(value)
}

// quoted is the most that a text takes in a line, with punctuation.
func quoted(s string) int {
	return len(s) + strings.Count(s, `"`) + strings.Count(s, `\`) + 16
}

func (l *Log) text(s string, limit int) string {
	if s == "" {
		return ""
	}
	whole := len(s)
	if whole > maxInput {
		s = s[:maxInput]
	}
	if l.opts.Mask != nil {
		s = l.opts.Mask(s)
	}
	s = Mask(s)
	if whole > maxInput {
		// The end may be the beginning of a secret, too short to be recognised.
		s = s[:max(0, len(s)-256)]
	}
	return escape(s, limit, whole)
}

// tidied says whether a text needs no escaping.
func tidied(s string) bool {
	for i, r := range s {
		if r < utf8.RuneSelf {
			if r < ' ' || r == 0x7f {
				return false
			}
			continue
		}
		if !unicode.IsPrint(r) || r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD") {
			return false
		}
	}
	return true
}

// escape returns s on one line: what is not printable as Go writes it in a string, backslashes doubled. A result of more
// than limit bytes is cut between characters and says how long the text was.
func escape(s string, limit, whole int) string {
	if len(s) == whole && len(s) <= limit && tidied(s) && strings.IndexByte(s, '\\') < 0 {
		return s
	}
	mark := ""
	room := limit
	if len(s) != whole && whole > maxInput || len(s) > limit {
		mark = fmt.Sprintf("…(%d bytes)", whole)
		room -= len(mark)
	}
	for {
		out, ok := escapeInto(s, room)
		if ok || mark != "" {
			return out + mark
		}
		mark = fmt.Sprintf("…(%d bytes)", whole)
		room = limit - len(mark)
	}
}

// escapeInto escapes as much of s as takes room bytes, and says whether that was all.
func escapeInto(s string, room int) (string, bool) {
	var b strings.Builder
	b.Grow(min(len(s), room))
	var one [12]byte
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		piece := one[:0]
		switch {
		case r == utf8.RuneError && n == 1:
			piece = fmt.Appendf(piece, `\x%02x`, s[0])
		case r == '\\':
			piece = append(piece, `\\`...)
		case r == '\n':
			piece = append(piece, `\n`...)
		case r == '\r':
			piece = append(piece, `\r`...)
		case r == '\t':
			piece = append(piece, `\t`...)
		case r < ' ' || r == 0x7f:
			piece = fmt.Appendf(piece, `\x%02x`, r)
		case r < utf8.RuneSelf || unicode.IsPrint(r):
			piece = append(piece, s[:n]...)
		case r > 0xffff:
			piece = fmt.Appendf(piece, `\U%08x`, r)
		default:
			piece = fmt.Appendf(piece, `\u%04x`, r)
		}
		if b.Len()+len(piece) > room {
			return b.String(), false
		}
		b.Write(piece)
		s = s[n:]
	}
	return b.String(), true
}

// cut shortens a tidy text.
func cut(s string, limit int) string {
	for len(s) > limit {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}
