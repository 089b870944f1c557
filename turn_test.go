package warren

import "testing"

// TestTurn tells from what a guest says at a client's return where the output goes on, also from guests that say less.
func TestTurn(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before string // the last rollback when the old stream began
		from   int64
		info   ProcessInfo
		to     int64
		rolled bool
	}{
		{"nothing happened", "none", 100, ProcessInfo{Seq: 120, rollback: "none"}, 100, false},
		{"rolled back before it began", "a", 100, ProcessInfo{Seq: 120, rollback: "a", rollbackSeq: 40}, 100, false},
		{"the first rollback", "none", 100, ProcessInfo{Seq: 60, rollback: "a", rollbackSeq: 40}, 40, true},
		{"another past is further already", "none", 100, ProcessInfo{Seq: 500, rollback: "a", rollbackSeq: 40}, 40, true},
		{"another rollback", "a", 100, ProcessInfo{Seq: 500, rollback: "b", rollbackSeq: 40}, 40, true},
		{"all that was read is still so", "none", 30, ProcessInfo{Seq: 60, rollback: "a", rollbackSeq: 40}, 30, true},
		{"an old guest that has not that much", "", 100, ProcessInfo{Seq: 60}, 60, true},
		{"an old guest that has more", "", 100, ProcessInfo{Seq: 120}, 100, false},
		{"an old guest in the snapshot", "a", 100, ProcessInfo{Seq: 60}, 60, true},
		{"a guest that lies", "none", 100, ProcessInfo{Seq: -7, rollback: "a", rollbackSeq: -9}, 0, true},
		{"a header that was lost", "", 100, ProcessInfo{Seq: 120, rollback: "a", rollbackSeq: 40}, 100, false},
		{"a header that was lost, and less output", "", 100, ProcessInfo{Seq: 60, rollback: "a", rollbackSeq: 40}, 60, true},
	} {
		c := &Cmd{rollback: tt.before}
		if to, rolled := c.turn(tt.from, tt.info); to != tt.to || rolled != tt.rolled {
			t.Errorf("%s: %d, %v; want %d, %v", tt.name, to, rolled, tt.to, tt.rolled)
		}
	}
}
