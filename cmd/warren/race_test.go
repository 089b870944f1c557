package main

import (
	"bytes"
	"strings"
	"testing"
)

// Lines of several attempts come whole and labelled, however they are written.
func TestLabelWriter(t *testing.T) {
	var out bytes.Buffer
	r := &race{app: newApp(nil, &out, &out), name: "try"}
	one := &labelWriter{race: r, number: 1, stream: "stdout", to: &out}
	two := &labelWriter{race: r, number: 2, stream: "stderr", to: &out}
	write := func(w *labelWriter, text string) {
		t.Helper()
		if n, err := w.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatalf("Write: %d, %v", n, err)
		}
	}
	write(one, "a\nb")
	write(two, "\nx\r\n")
	write(one, "c\nrest")
	if err := one.end(); err != nil {
		t.Fatal(err)
	}
	want := "try-1 | a\ntry-2 | \ntry-2 | x\ntry-1 | bc\ntry-1 | rest\n"
	if out.String() != want {
		t.Errorf("wrote %q, want %q", out.String(), want)
	}
	out.Reset()
	write(two, strings.Repeat("y", maxLabelled+5)+"\n")
	if want := "try-2 | " + strings.Repeat("y", maxLabelled) + "\ntry-2 | yyyyy\n"; out.String() != want {
		t.Errorf("a long line is %d bytes, want %d", out.Len(), len(want))
	}
	out.Reset()
	r.json = true
	write(one, "a\n\xff\n")
	if want := `{"attempt":1,"stream":"stdout","text":"a"}` + "\n" + `{"attempt":1,"stream":"stdout","base64":"/w=="}` + "\n"; out.String() != want {
		t.Errorf("wrote %q, want %q", out.String(), want)
	}
}
