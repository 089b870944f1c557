//go:build linux

package keeper

import (
	"encoding/gob"
	"fmt"
	"os"
	"path/filepath"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/boot/filter"
	filterconfig "gvisor.dev/gvisor/runsc/boot/filter/config"
	"gvisor.dev/gvisor/runsc/config"
)

// gVisor compiles its seccomp rules anew for each sandbox, a fifth of the time that a start takes. Its own builds
// avoid this with programs compiled at build time; Go modules of it come with an empty list. The keeper compiles the
// one program that its sandboxes use when it starts, from the same rules and by gVisor's own function for that, and the
// sandbox processes enter it into the list. Both are the same executable, so the rules cannot differ; a sandbox
// process with other options finds nothing under its key and compiles as before.

// seccompFile lies in the keeper's own root, where nobody else can write.
var seccompFile = filepath.Join(stageDir, ".seccomp")

//go:linkname seccompRules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func seccompRules(opt filterconfig.Options, vars precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

// compileSeccomp compiles the program for a configuration, for each variant of the platform.
func compileSeccomp(conf *config.Config) ([]precompiledseccomp.Program, error) {
	constructor, err := platform.Lookup(conf.Platform)
	if err != nil {
		return nil, err
	}
	var out []precompiledseccomp.Program
	for _, info := range constructor.PrecompiledSeccompInfo() {
		opt := filterconfig.Options{Platform: info, HostFilesystem: conf.DirectFS, CgoEnabled: config.CgoEnabled}
		var names []string
		for name := range opt.Vars() {
			names = append(names, name)
		}
		p, err := precompiledseccomp.Precompile(opt.ConfigKey(), names, func(vars precompiledseccomp.Values) *seccomp.Program {
			rules, deny := seccompRules(opt, vars)
			return &seccomp.Program{
				RuleSets: []seccomp.RuleSet{{Rules: deny.Copy()}, {Rules: rules.Copy(), Action: seccomp.Allow}},
				Options:  filterconfig.SeccompOptions(opt),
			}
		})
		if err != nil {
			return nil, fmt.Errorf("compile seccomp rules: %w", err)
		}
		out = append(out, p)
	}
	return out, nil
}

// writeSeccomp compiles the program and puts it where sandbox processes find it.
func writeSeccomp(conf *config.Config) error {
	programs, err := compileSeccomp(conf)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(seccompFile+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o444)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := gob.NewEncoder(f).Encode(programs); err != nil {
		return err
	}
	return os.Rename(seccompFile+".new", seccompFile)
}

// useSeccomp enters the keeper's programs into gVisor's list. Without them gVisor compiles its own.
func useSeccomp() {
	f, err := os.Open(seccompFile)
	if err != nil {
		return
	}
	defer f.Close()
	var programs []precompiledseccomp.Program
	if gob.NewDecoder(f).Decode(&programs) != nil {
		return
	}
	filter.ListPrecompiled() // makes the list, once
	for _, p := range programs {
		precompiledPrograms[p.Name] = p
	}
}
