package main

import (
	"slices"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// TestSandboxRow looks at the table's row of a sandbox: its policy and its private network stand apart.
func TestSandboxRow(t *testing.T) {
	sb := &warren.Sandbox{
		ID: "sabcdefghijklmnop", Name: "fix", State: "running", Image: "host", Workspace: "wabcdefghijklmnop", Created: time.Now(), Network: "registries", PrivateNetwork: "team",
		Resources: warren.Resources{CPUMillis: 2000, Memory: 2 << 30},
	}
	sb.Spec.Labels = map[string]string{"job": "nightly"}
	got := sandboxRow(sb, false)
	want := []string{"sabcdefghijk", "fix", "running", "host", "wabcdefghijk", "2", "2GiB", got[7], "registries", "team", "job=nightly"}
	if !slices.Equal(got, want) {
		t.Errorf("the row is %q, want %q", got, want)
	}
	sb.Network, sb.PrivateNetwork = "none", ""
	if got := sandboxRow(sb, true); got[0] != string(sb.ID) || got[8] != "none" || got[9] != "" {
		t.Errorf("the row is %q", got)
	}
}
