//go:build linux

package docker

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Labels of everything that the driver makes in an engine.
const (
	labelPrefix       = "dev.warren."
	labelInstallation = labelPrefix + "installation"
	labelSandbox      = labelPrefix + "sandbox"
	labelSpec         = labelPrefix + "spec"
	labelAttempt      = labelPrefix + "attempt"
	labelImage        = labelPrefix + "image"
	labelLayers       = labelPrefix + "layers"
	labelSave         = labelPrefix + "save"
	labelHelper       = labelPrefix + "helper"
)

const installationLen = 16

// ownership tells what belongs to an installation. The name of a container is the engine's own lock against a second one of
// the same sandbox; the labels keep a stranger's container of that name from being taken for ours.
type ownership struct{ installation string }

func (o ownership) name(id warren.SandboxID) string {
	return "warren-" + o.installation[:8] + "-" + string(id)
}

// repository is the name of all images of the installation.
func (o ownership) repository() string { return "warren/" + o.installation }

// of returns the labels of a sandbox's container. People's labels cannot take the place of ours.
func (o ownership) of(spec *driver.Spec, attempt string) map[string]string {
	labels := map[string]string{}
	for k, v := range spec.Labels {
		if !strings.HasPrefix(k, labelPrefix) {
			labels[k] = v
		}
	}
	maps.Copy(labels, map[string]string{
		labelInstallation: o.installation, labelSandbox: string(spec.ID), labelSpec: fingerprint(spec), labelAttempt: attempt,
	})
	return labels
}

// owns says whether a container of this name and these labels is ours, and which sandbox it is.
func (o ownership) owns(name string, labels map[string]string) (warren.SandboxID, bool) {
	id := warren.SandboxID(labels[labelSandbox])
	return id, id != "" && labels[labelInstallation] == o.installation && strings.TrimPrefix(name, "/") == o.name(id)
}

// fingerprint tells two specs of one sandbox apart, for people who compare what runs with what was asked for.
func fingerprint(spec *driver.Spec) string {
	type mount struct {
		Target   string
		Writable bool
		Owner    driver.Owner
	}
	var mounts []mount
	for _, m := range spec.Mounts {
		mounts = append(mounts, mount{m.Target, m.Writable, m.Owner})
	}
	text, err := json.Marshal([]any{spec.Hostname, spec.Root, mounts, spec.Limits, spec.Env, spec.Options})
	if err != nil {
		panic("docker driver: a spec has become something that JSON cannot say: " + err.Error())
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}
