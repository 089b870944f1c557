package engine

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
)

// A record that is removed, or cut off, is bad also for a later engine, until the operator says that it is to be so.
func TestRemovedRecordIsMissed(t *testing.T) {
	for _, calls := range []bool{false, true} {
		t.Run(recordName(calls), func(t *testing.T) {
			ctx := t.Context()
			dir := filepath.Join(t.TempDir(), "record")
			r := newRig(t, func(o *Options) {
				if o.FlowDir = dir; calls {
					o.FlowDir, o.CallDir = "", dir
				}
			})
			write := func(n int) audit.Head {
				t.Helper()
				l, err := audit.Open(dir, audit.Options{})
				if err != nil {
					t.Fatal(err)
				}
				for range n {
					if _, err := l.Append(ctx, audit.Record{Action: "x"}); err != nil {
						t.Fatal(err)
					}
				}
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
				return l.Head()
			}
			verify := func(q VerifyRequest) *FlowReport {
				t.Helper()
				q.Calls = calls
				rep, err := r.VerifyFlows(ctx, operator, q)
				if err != nil {
					t.Fatal(err)
				}
				return rep
			}
			bad := func(want string) {
				t.Helper()
				if rep := verify(VerifyRequest{}); !strings.Contains(rep.Problem, want) {
					t.Errorf("%+v; want %q", rep, want)
				}
			}
			if rep := verify(VerifyRequest{}); rep.Problem != "" || rep.Records != 0 {
				t.Errorf("of no record: %+v", rep)
			}
			seen := write(60)
			r.stop() // nobody has verified it: the end of an engine is enough
			r.start()
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			bad("record 60 was")
			r.stop()
			write(5)
			r.start()
			bad("ends with record 5; an anchor names record 60")
			write(80)
			bad("record 60: edited")
			bad("(record 60 was seen at ")
			// As it is from now on.
			if rep := verify(VerifyRequest{Accept: true}); rep.Problem != "" || rep.Last != 85 {
				t.Fatalf("accepted: %+v", rep)
			}
			if rep := verify(VerifyRequest{}); rep.Problem != "" || rep.Records != 85 || rep.First != 1 {
				t.Errorf("after it was accepted: %+v", rep)
			}
			// What somebody else has kept is asked for all the same.
			if rep := verify(VerifyRequest{Since: []RecordHead{seen}}); !strings.Contains(rep.Problem, "record 60: edited") {
				t.Errorf("%+v", rep)
			}
			last := write(1)
			if rep := verify(VerifyRequest{Since: []RecordHead{last}}); rep.Problem != "" || rep.Hash != last.Hash {
				t.Errorf("%+v", rep)
			}
			for _, h := range []RecordHead{{Seq: 0, Hash: last.Hash}, {Seq: 1, Hash: "x"}, {Seq: -1, Hash: last.Hash}} {
				if _, err := r.VerifyFlows(ctx, operator, VerifyRequest{Calls: calls, Since: []RecordHead{h}}); !errors.Is(err, warren.ErrInvalid) {
					t.Errorf("%v: %v", h, err)
				}
			}
			if _, err := r.VerifyFlows(ctx, alice, VerifyRequest{Accept: true}); !errors.Is(err, warren.ErrDenied) {
				t.Error(err)
			}
			if err := os.Truncate(filepath.Join(dir, "00000000000000000001.jsonl"), 100); err != nil {
				t.Fatal(err)
			}
			if rep := verify(VerifyRequest{Accept: true}); rep.Problem == "" {
				t.Error("a record that is not whole is accepted")
			}
		})
	}
}
