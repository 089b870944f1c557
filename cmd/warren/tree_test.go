package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// TestTree draws what came of what; letters stand for ids, in the order of their making.
func TestTree(t *testing.T) {
	now := time.Now()
	at := func(minute int) time.Time { return now.Add(time.Duration(minute-60) * time.Minute) }
	snap := func(id string, minute int, of, after string) *warren.Snapshot {
		return &warren.Snapshot{ID: warren.SnapshotID(id), Kind: warren.SnapshotMemory, Sandbox: warren.SandboxID(of), SandboxName: "n" + of, Parent: warren.SnapshotID(after), Created: at(minute)}
	}
	box := func(id string, minute int, source, last string) *warren.Sandbox {
		return &warren.Sandbox{ID: warren.SandboxID(id), Name: "n" + id, State: warren.StateRunning, Source: warren.SandboxID(source), LastSnapshot: warren.SnapshotID(last), Created: at(minute)}
	}
	for _, c := range []struct {
		name      string
		snaps     []*warren.Snapshot
		sandboxes []*warren.Sandbox
		want      []string // without ages
	}{
		{"forks before and after a snapshot, and one of a fork",
			[]*warren.Snapshot{snap("p", 3, "s", "")},
			[]*warren.Sandbox{box("s", 1, "", "p"), box("a", 2, "s", ""), box("b", 4, "s", "p"), box("c", 5, "b", "p")},
			[]string{"ns s  running, at p", "├─ na a  running, fork of ns", "└─ p  snapshot, memory",
				"   ├─ nb b  running, fork of ns, at p", "   └─ nc c  running, fork of nb, at p"}},
		{"snapshots one after another, with the fork's own",
			[]*warren.Snapshot{snap("p", 2, "s", ""), snap("q", 3, "s", "p"), snap("r", 5, "f", "p")},
			[]*warren.Sandbox{box("s", 1, "", "p"), box("f", 4, "s", "r")},
			[]string{"ns s  running, at p", "└─ p  snapshot, memory", "   ├─ q  snapshot, memory", "   └─ nf f  running, fork of ns, at r",
				"      └─ r  snapshot, memory"}},
		{"the source is gone",
			nil,
			[]*warren.Sandbox{box("f", 4, "s", "")},
			[]string{"nf f  running, fork of s, which is gone"}},
		{"the source is gone, its snapshots stay",
			[]*warren.Snapshot{snap("p", 2, "s", ""), snap("q", 3, "s", "p")},
			[]*warren.Sandbox{box("f", 4, "s", "q"), box("g", 5, "", "p")},
			[]string{"p  snapshot, memory, of ns, which is gone", "├─ q  snapshot, memory, of ns, which is gone",
				"│  └─ nf f  running, fork of s, which is gone, at q", "└─ ng g  running, at p"}},
		{"a source rolled back to its fork's snapshot",
			[]*warren.Snapshot{snap("p", 3, "f", "")},
			[]*warren.Sandbox{box("s", 1, "", "p"), box("f", 2, "s", "p")},
			[]string{"ns s  running, at p", "└─ nf f  running, fork of ns, at p", "   └─ p  snapshot, memory"}},
		{"a snapshot that names itself",
			[]*warren.Snapshot{snap("p", 2, "s", "p")},
			[]*warren.Sandbox{box("s", 1, "", "p")},
			[]string{"ns s  running, at p", "└─ p  snapshot, memory"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			for _, n := range growTree(c.snaps, c.sandboxes) {
				if err := n.draw(&app{out: &out}, "", "", true, true); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			for line := range strings.Lines(out.String()) {
				words := strings.Split(strings.TrimSuffix(line, "\n"), ", ")
				i := 1
				if strings.Contains(words[0], "snapshot") {
					i = 2
				}
				got = append(got, strings.Join(append(words[:i:i], words[i+1:]...), ", "))
			}
			if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
				t.Errorf("drawn:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}
