//go:build linux

package keeper

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"gvisor.dev/gvisor/pkg/bpf"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/boot/filter"
	filterconfig "gvisor.dev/gvisor/runsc/boot/filter/config"
	"gvisor.dev/gvisor/runsc/config"
)

// TestSeccompSame checks that a sandbox process gets, instruction for instruction, the filter that gVisor would
// compile by itself.
func TestSeccompSame(t *testing.T) {
	conf, err := baseConfig()
	if err != nil {
		t.Fatal(err)
	}
	defer func(was string) { seccompFile = was }(seccompFile)
	seccompFile = filepath.Join(t.TempDir(), "seccomp")
	if err := writeSeccomp(conf); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(seccompFile); err != nil || fi.Mode().Perm() != 0o444 {
		t.Fatalf("%v, %v", fi, err)
	}
	useSeccomp()
	constructor, err := platform.Lookup(conf.Platform)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range constructor.PrecompiledSeccompInfo() {
		opt := filterconfig.Options{Platform: info, HostFilesystem: true, ControllerFD: 17, CgoEnabled: config.CgoEnabled}
		p, ok := filter.GetPrecompiled(opt.ConfigKey())
		if !ok {
			t.Fatalf("no program for %s", opt.ConfigKey())
		}
		got, err := p.RenderInstructions(opt.Vars())
		if err != nil {
			t.Fatal(err)
		}
		rules, deny := filterconfig.Rules(opt)
		own := &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: rules, Action: seccomp.Allow}},
			Options:  filterconfig.SeccompOptions(opt),
		}
		want, _, err := own.Build()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got, want, func(a, b bpf.Instruction) bool { return a == b }) {
			t.Errorf("%s: the programs differ (%d and %d instructions)", opt.ConfigKey(), len(got), len(want))
		}
	}
	// Other options must not find this program.
	other := filterconfig.Options{HostNetwork: true, HostFilesystem: true}
	if constructor.PrecompiledSeccompInfo() != nil {
		other.Platform = constructor.PrecompiledSeccompInfo()[0]
	}
	if _, ok := filter.GetPrecompiled(other.ConfigKey()); ok {
		t.Error("a program for host networking exists")
	}
}
