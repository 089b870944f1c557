package policy

import (
	"embed"
	"fmt"
	"strings"
	"sync"
)

//go:embed presets
var presetFiles embed.FS

// presets are parsed when they are first asked for. Their files are like any other, and may also name "*".
var presets struct {
	once sync.Once
	all  map[string]*Policy
	err  error
}

func loadPresets() (map[string]*Policy, error) {
	m := map[string]*Policy{}
	for _, name := range Presets() {
		data, err := presetFiles.ReadFile("presets/" + name + ".yaml")
		if err != nil {
			return nil, err
		}
		if m[name], err = parse(name, data, true); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Presets returns the names of the presets, the narrowest first.
func Presets() []string { return []string{"locked", "registries", "open"} }

// DefaultPreset is the policy of a sandbox for which none is named.
const DefaultPreset = "registries"

// Preset returns a policy that Warren brings: "locked" allows nothing, "registries" package registries and git hosts,
// "open" any name and any public address.
func Preset(name string) (*Policy, error) {
	presets.once.Do(func() { presets.all, presets.err = loadPresets() })
	if presets.err != nil {
		return nil, presets.err
	}
	p := presets.all[name]
	if p == nil {
		return nil, fmt.Errorf("there is no preset %.100q; want one of %s", name, strings.Join(Presets(), ", "))
	}
	return p, nil
}
