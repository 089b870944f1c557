package engine

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/fake"
	"github.com/warren-sandbox/warren/internal/audit"
)

// keptRecords keeps records in memory.
type keptRecords struct {
	mu   sync.Mutex
	list []audit.Record
}

func (k *keptRecords) Append(_ context.Context, r audit.Record) (audit.Record, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = append(k.list, r)
	return r, nil
}

func (k *keptRecords) at(i int) audit.Record {
	k.mu.Lock()
	defer k.mu.Unlock()
	if i >= len(k.list) {
		return audit.Record{}
	}
	return k.list[i]
}

// A policy that changes is on record with what it was and is, and with why it cannot be used; among the events of each sandbox, and once on the chain.
func TestPolicyChangeIsOnRecord(t *testing.T) {
	n, k := &policyNetwork{have: map[warren.SandboxID]NetworkPolicy{}}, &keptRecords{}
	dir := t.TempDir()
	policies := filepath.Join(dir, "policies")
	if err := os.Mkdir(policies, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(policies, "team.yaml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("allow: [one.example]\n")
	r := prepareRig(t, dir, func(o *Options) {
		o.Network, o.PolicyDir, o.DefaultPolicy, o.Calls = n, policies, "locked", k
		o.Drivers = map[string]driver.Driver{"fake": plainCards{o.Drivers["fake"].(*fake.Driver)}}
	})
	r.start()
	t.Cleanup(r.stop)
	boxes := []*Sandbox{r.create(alice, Spec{Policy: "team"}), r.create(alice, Spec{Policy: "team"})}
	last := ""
	for i, c := range []struct{ text, problem string }{
		{"allow: [two.example]\n", ""}, {"allow: [\"*\"]\n", "too broad"}, {"allow: [three.example]\n", ""},
	} {
		if i == 0 {
			// What the gateway has is that of the first text.
			eventually(t, "the engine knows the policy", func() bool { return len(r.carded()) == 2 })
		}
		put(c.text)
		eventually(t, "record of "+c.text, func() bool { return k.at(i).Action == "policy.change" })
		x := k.at(i)
		if x.Actor != "warren" || x.Fields["policy"] != "team" || x.Fields["sandboxes"] != "2" || !strings.HasPrefix(x.Fields["old"], "sha256:") || !strings.HasPrefix(x.Fields["new"], "sha256:") || x.Fields["old"] == x.Fields["new"] || last != "" && x.Fields["old"] != last {
			t.Errorf("after %q: %+v", c.text, x)
		}
		if (x.Fields["problem"] != "") != (c.problem != "") || !strings.Contains(x.Message, x.Fields["old"]+" to "+x.Fields["new"]) || c.problem != "" && !strings.Contains(x.Message, "cannot be used, so that nothing passes: ") {
			t.Errorf("after %q: %+v", c.text, x)
		}
		last = x.Fields["new"]
		for _, sb := range boxes {
			found := false
			err := r.Watch(t.Context(), alice, WatchRequest{ID: string(sb.ID), NoFollow: true}, func(e *Event) error {
				found = found || e.Action == "policy.change" && e.Message == x.Message && e.Fields["new"] == last
				return nil
			})
			if err != nil || !found {
				t.Errorf("after %q: sandbox %s has no event of it: %v", c.text, sb.ID, err)
			}
		}
	}
	if x := k.at(3); x.Action != "" {
		t.Errorf("one record too many: %+v", x)
	}
}
