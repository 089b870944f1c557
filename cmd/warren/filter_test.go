package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestTerminalFilter(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"text", "plain, ünïcode 漢字 🙂\r\n\ttab", "plain, ünïcode 漢字 🙂\r\n\ttab"},
		{"colours", "\x1b[1;31mred\x1b[0m \x1b[38:2::1:2:3mx", "\x1b[1;31mred\x1b[0m \x1b[38:2::1:2:3mx"},
		{"cursor", "\x1b[2J\x1b[H\x1b[10;5Hx\x1b[K", "\x1b[2J\x1b[H\x1b[10;5Hx\x1b[K"},
		{"alternate screen", "\x1b[?1049h\x1b[?25l\x1b[?2004h", "\x1b[?1049h\x1b[?25l\x1b[?2004h"},
		{"charset", "\x1b(0lqk\x1b(B", "\x1b(0lqk\x1b(B"},
		{"title", "\x1b]0;my title\x07x", "\x1b]0;my title\x07x"},
		{"title by ST", "\x1b]2;t\x1b\\x", "\x1b]2;t\x1b\\x"},
		{"title with a query", "a\x1b]0;\x1b[6n\ab", "ab"},
		{"short title", "a\x1b]0\ab", "ab"},
		{"clipboard", "a\x1b]52;c;ZXZpbA==\x07b", "ab"},
		{"clipboard by ST", "a\x1b]52;c;ZXZpbA==\x1b\\b", "ab"},
		{"link", "\x1b]8;;https://evil.example\x1b\\bank\x1b]8;;\x1b\\", "bank"},
		{"colour query", "a\x1b]11;?\x07b", "ab"},
		{"device attributes", "a\x1b[cb\x1b[>cc\x1b[=c", "abc"},
		{"status", "a\x1b[5nb\x1b[6nc\x1b[?6n", "abc"},
		{"title report", "a\x1b[21tb", "ab"},
		{"checksum", "a\x1b[1;1;1;1;1;1*yb", "ab"},
		{"mode query", "a\x1b[?2026$pb", "ab"},
		{"keyboard query", "a\x1b[?ub", "ab"},
		{"bracketed paste end", "a\x1b[201~b", "ab"},
		{"DECRQSS", "a\x1bP$qm\x1b\\b", "ab"},
		{"application string", "a\x1b_Gi=1;AAAA\x1b\\b", "ab"},
		{"ENQ", "a\x05b", "ab"},
		{"C1 CSI as UTF-8", "a\u009b6nb", "a6nb"},
		{"C1 OSC as a byte", "a\x9d52;c;x\x07b", "a\ufffd52;c;x\ab"},
		{"identify", "a\x1bZb", "ab"},
		{"bidi", "a\u202eb\u2066c", "abc"},
		{"cancelled", "\x1b]52;c;\x18text", "text"},
		{"sequence within a sequence", "\x1b[3\x1b[6nx", "x"},
		{"printer", "a\x1b[5ib", "ab"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var whole bytes.Buffer
			if _, err := (&terminalFilter{out: &whole}).Write([]byte(tt.in)); err != nil {
				t.Fatal(err)
			}
			if whole.String() != tt.want {
				t.Errorf("got %q, want %q", &whole, tt.want)
			}
			var split bytes.Buffer
			f := &terminalFilter{out: &split}
			for i := range len(tt.in) {
				_, _ = f.Write([]byte{tt.in[i]})
			}
			if split.String() != tt.want {
				t.Errorf("byte by byte: got %q, want %q", &split, tt.want)
			}
		})
	}
}

func TestTerminalFilterBoundsWhatItHolds(t *testing.T) {
	var out bytes.Buffer
	f := &terminalFilter{out: &out}
	_, _ = f.Write([]byte("\x1b]0;" + strings.Repeat("x", 1<<20)))
	if cap(f.seq) > 4*maxSequence {
		t.Errorf("holds %d bytes", cap(f.seq))
	}
	_, _ = f.Write([]byte("\x1b\\after"))
	if out.String() != "after" {
		t.Errorf("got %q", &out)
	}
}

func TestPlainOutput(t *testing.T) {
	var out bytes.Buffer
	_, _ = plainOutput(&out).Write([]byte("\x1b[31mred\x1b[0m\r\n\x1b]0;t\x07ok\n"))
	if out.String() != "red\nok\n" {
		t.Errorf("got %q", &out)
	}
}

func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"plain":             "plain",
		"naïve 漢字":          "naïve 漢字",
		"a\nb\tc":           `a\nb\tc`,
		"\x1b[31mred":       `\x1b[31mred`,
		"bad \xff utf8":     `bad \xff utf8`,
		"\u202egnp.exe":     `\u202egnp.exe`,
		"c1 \u009b31m":      `c1 \u009b31m`,
		"line\u2028break":   `line\u2028break`,
		"zero\u200bwidth":   `zero\u200bwidth`,
		"\U000e0041 hidden": `\ue0041 hidden`,
	} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
}

// What goes in whole or in two pieces comes out the same, and nothing that is refused comes out at all.
func FuzzTerminalFilter(f *testing.F) {
	for _, seed := range []string{"\x1b[6n", "\x1b]52;c;x\x07", "\x1bP+q\x1b\\", "\xc2\x9b6n", "\x1b[\x1b]\x1b[c"} {
		f.Add([]byte(seed), 3)
	}
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		if cut < 0 || cut > len(data) {
			cut = len(data) / 2
		}
		var whole, split bytes.Buffer
		_, _ = (&terminalFilter{out: &whole}).Write(data)
		s := &terminalFilter{out: &split}
		_, _ = s.Write(data[:cut])
		_, _ = s.Write(data[cut:])
		if whole.String() != split.String() {
			t.Fatalf("split at %d: %q, whole: %q", cut, &split, &whole)
		}
		out := whole.String()
		for _, bad := range []string{"\x1b]5", "\x1b]8", "\x1bP", "\x1b_", "\x1b^", "\x1bX", "\x1bZ", "\x05", "\u009b", "\u202e"} {
			if strings.Contains(out, bad) {
				t.Fatalf("%q passed: %q", bad, out)
			}
		}
	})
}
