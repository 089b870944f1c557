package engine

import (
	"context"
	"errors"
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

// heldCards is a driver that holds the cards of its sandboxes.
type heldCards struct{ plainCards }

func (heldCards) Card(context.Context, warren.SandboxID) (*os.File, error) {
	return os.Open(os.DevNull)
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
		o.Drivers = map[string]driver.Driver{"fake": heldCards{plainCards{o.Drivers["fake"].(*fake.Driver)}}}
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

	// A change counts by whichever way it comes to a sandbox: with a new card, in place of one that its gateway lost, or as it goes on.
	events := func(id warren.SandboxID) (all []*Event) {
		if err := r.Watch(t.Context(), alice, WatchRequest{ID: string(id), NoFollow: true}, func(e *Event) error {
			if e.Action == "policy.change" {
				all = append(all, e)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return all
	}
	if _, err := r.Pause(t.Context(), alice, string(boxes[0].ID)); err != nil {
		t.Fatal(err)
	}
	put("allow: [four.example]\n")
	eventually(t, "the one that runs", func() bool { return len(events(boxes[1].ID)) == 4 })
	four := events(boxes[1].ID)[3].Fields["new"]
	if _, err := r.Resume(t.Context(), alice, string(boxes[0].ID)); err != nil {
		t.Fatal(err)
	}
	if all := events(boxes[0].ID); len(all) != 4 || all[3].Fields["old"] != last || all[3].Fields["new"] != four {
		t.Errorf("resumed under another text it has %d events: %+v", len(all), all[len(all)-1])
	}
	n.mu.Lock()
	n.deaf = errors.New("it does not listen")
	n.mu.Unlock()
	put("allow: [five.example]\n")
	if _, err := r.Restart(t.Context(), alice, string(boxes[0].ID)); err == nil || !strings.Contains(err.Error(), "is as it was: its network could not be made anew: it does not listen") {
		t.Errorf("restarted without a gateway: %v", err)
	}
	if sb, err := r.Get(t.Context(), alice, string(boxes[0].ID)); err != nil || sb.State != Running || sb.Generation != boxes[0].Generation {
		t.Errorf("it is %+v, %v", sb, err)
	}
	if c := r.checkGateway(t.Context()); c.Status != "fail" || !strings.Contains(c.Message, "it does not listen") {
		t.Errorf("the doctor says %+v", c)
	}
	n.mu.Lock()
	clear(n.have) // it was killed and started anew
	n.deaf = nil
	n.mu.Unlock()
	r.TendNetwork()
	for _, sb := range boxes {
		eventually(t, "served again under the text of now", func() bool { return len(events(sb.ID)) == 5 })
		if x := events(sb.ID)[4]; x.Fields["old"] != four || x.Fields["new"] == four {
			t.Errorf("served again: %+v", x)
		}
	}
	if c := r.checkGateway(t.Context()); c.Status != "ok" || !strings.Contains(c.Message, "with a network: 2") {
		t.Errorf("the doctor says %+v", c)
	}
	eventually(t, "on the chain are the changes of both, twice", func() bool {
		sum := 0
		for i := 3; k.at(i).Action == "policy.change"; i++ {
			sum += int(k.at(i).Fields["sandboxes"][0] - '0')
		}
		return sum == 4
	})
}

// What a policy was before this engine is not made up.
func TestChangeFromUnknown(t *testing.T) {
	now := policyState{digest: "sha256:aaaa"}
	for old, want := range map[string]string{
		unknownText:   "policy lab is sha256:aaaa now; what it was before is not known",
		"sha256:bbbb": "policy lab has changed from sha256:bbbb to sha256:aaaa",
	} {
		if message, fields := (policyChange{"lab", old, now}).record(); message != want || fields["old"] != old {
			t.Errorf("from %s it is %q, %v", old, message, fields)
		}
	}
}
