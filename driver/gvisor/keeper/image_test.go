//go:build linux

package keeper

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// TestImageFits refuses, in words, to go on from an image where something is not as it was.
func TestImageFits(t *testing.T) {
	spec := &protocol.Spec{Root: "sha256:1", GuestBuild: "g1", Limits: protocol.Limits{Disk: 1 << 30}, Mounts: []protocol.Mount{{Target: "/workspace"}}}
	cpu, err := cpuFeatures()
	if err != nil {
		t.Fatal(err)
	}
	whole := func() *image { return &image{Arch: runtime.GOARCH, Runtime: "r1", CPU: cpu, Base: baseOf(spec)} }
	if err := whole().fits("r1", spec); err != nil {
		t.Fatalf("an image of this host and spec: %v", err)
	}
	for want, spoil := range map[string]func(*image){
		"another build of warren-runtime": func(m *image) { m.Runtime = "r0" },
		"another build of warren-guest":   func(m *image) { m.Base.Guest = "g0" },
		"was made on vax":                 func(m *image) { m.Arch = "vax" },
		"lacks: zzz_matrix":               func(m *image) { m.CPU = append(append([]string{}, m.CPU...), "zzz_matrix") },
		"root file system":                func(m *image) { m.Base.Root = "sha256:2" },
		"mounts on":                       func(m *image) { m.Base.Mounts = nil },
		"limit of 2 GiB":                  func(m *image) { m.Base.Disk *= 2 },
	} {
		m := whole()
		spoil(m)
		err := m.fits("r1", spec)
		var e *protocol.Error
		if !errors.As(err, &e) || e.Kind != protocol.KindUnsupported || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q: %v", want, err)
		}
	}
	less := whole()
	less.CPU = less.CPU[:1] // this machine can do more
	if err := less.fits("r1", spec); err != nil {
		t.Errorf("an image of a lesser processor: %v", err)
	}
}
