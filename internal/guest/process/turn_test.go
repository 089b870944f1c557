package process

import (
	"testing"
	"time"
)

// TestTurn tells where output goes on after the memory went back: where it was marked before it was saved, or where it is when
// nobody marked it.
func TestTurn(t *testing.T) {
	old := NewTable(NewReaper(false), t.TempDir())
	p := &Process{PID: 7, Output: newOutput(&spool{disk: old.disk})}
	old.running[7] = p
	p.Output.append(Stdout, []byte("12345"))
	if got := p.Output.Turn(); got != 0 {
		t.Errorf("before any rollback: %d", got)
	}
	old.Turn()
	if got := p.Output.Turn(); got != 5 {
		t.Errorf("without a mark: %d, want 5", got)
	}

	old.Mark()
	p.Output.append(Stdout, []byte("678"))
	young := &Process{PID: 8, Output: newOutput(&spool{disk: old.disk})}
	old.running[8] = young
	young.Output.append(Stdout, []byte("young"))
	ended := &Process{PID: 9, Output: newOutput(&spool{disk: old.disk})}
	ended.Output.append(Stdout, []byte("end"))
	old.ended = append(old.ended, ended)
	p.Output.append(Stdout, []byte("9"))
	old.Turn()
	for _, tt := range []struct {
		what string
		p    *Process
		want int64
	}{{"marked", p, 5}, {"began after the mark", young, 0}, {"ended after the mark", ended, 0}} {
		if got := tt.p.Output.Turn(); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.what, got, tt.want)
		}
	}
	f := p.Output.Follow(p.Output.Turn())
	defer f.Close()
	if c, err := f.Next(t.Context(), time.Minute); err != nil || string(c.Data) != "6789" {
		t.Errorf("what comes after the turn: %q, %v", c.Data, err)
	}
}
