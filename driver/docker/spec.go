//go:build linux

package docker

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/container"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

const (
	// guestPath is where the guest's binary is inside.
	guestPath = "/.warren/guest"
	// socketDir is a small file system inside that holds the guest's socket.
	socketDir  = "/.warren/run"
	socketPath = socketDir + "/channel"
)

// optionRuntime is the driver's option that names the engine's runtime.
const optionRuntime = "runtime"

// CheckOptions refuses options that the driver does not know, before anything is made for a sandbox.
func (d *Driver) CheckOptions(options map[string]string) error { return checkOptions(options) }

func checkOptions(options map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(options)) {
		switch {
		case key != optionRuntime:
			return fmt.Errorf("driver option %q is not known to docker (known: %s): %w", key, optionRuntime, warren.ErrInvalid)
		case options[key] == "" || strings.ContainsFunc(options[key], func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
		}):
			return fmt.Errorf("driver option runtime=%.80q is no name of a runtime: %w", options[key], warren.ErrInvalid)
		}
	}
	return nil
}

// The least that a container starts with.
const (
	minMemory    = 32 << 20
	minCPUMillis = 10
)

// checkSpec refuses what cannot work before anything is made.
func checkSpec(spec *driver.Spec) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if err := checkOptions(spec.Options); err != nil {
		return err
	}
	invalid := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, warren.ErrInvalid)...)
	}
	if c := spec.Card; c != nil && (c.Inside != nil || c.Outside != nil) {
		return invalid("a network card with ends: this driver makes its own")
	}
	if len(spec.Root.Layers) == 0 {
		return invalid("the root has no layer")
	}
	if spec.Limits.Memory < minMemory {
		return invalid("memory limit %d is below 32 MiB, with which nothing starts", spec.Limits.Memory)
	}
	if spec.Limits.CPUMillis < minCPUMillis {
		return invalid("processor limit %d/1000 is below %d/1000, the least that an engine can give", spec.Limits.CPUMillis, minCPUMillis)
	}
	for _, m := range spec.Mounts {
		if m.Target == socketDir || strings.HasPrefix(m.Target, socketDir+"/") {
			return invalid("mount target %s: %s belongs to the sandbox", m.Target, socketDir)
		}
	}
	return nil
}

// guestCapabilities is what root inside may do: start commands as a user and give files away, end processes, listen on low
// ports, and look into processes, which debuggers and the guest's own root need. All of it ends at the container's
// user namespace. It is Docker's default set without raw sockets, devices, other roots, file capabilities and audit.
var guestCapabilities = []string{"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_PTRACE"}

// cpuPeriod is the length of the slices in which the kernel gives processor time, in microseconds.
const cpuPeriod = 100_000

// memoryHeadroom is what a container may use beyond the limit: the guest ends the largest process at the limit and needs a
// moment for it, and a kernel of its own needs memory for itself.
func memoryHeadroom(limit int64, ownKernel bool) int64 {
	if ownKernel {
		return 128<<20 + limit/4
	}
	return 64<<20 + limit/8
}

// containerOf describes a sandbox to the engine.
func containerOf(spec *driver.Spec, p *plan, image string, s *stage, labels map[string]string) (*container.Config, *container.HostConfig) {
	pids := int64(spec.Limits.PIDs)
	memory := spec.Limits.Memory + memoryHeadroom(spec.Limits.Memory, p.ownKernel)
	config := &container.Config{
		Hostname: spec.Hostname, Image: image, Labels: labels,
		User: "0:0", WorkingDir: "/", Entrypoint: []string{guestPath},
		Env: append([]string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"WARREN_CHANNEL_SOCKET=" + socketPath,
		}, spec.Env...),
	}
	host := &container.HostConfig{
		Runtime: p.runtime, NetworkMode: "none", IpcMode: container.IPCModePrivate, CgroupnsMode: container.CgroupnsModePrivate,
		CapDrop: []string{"ALL"}, CapAdd: guestCapabilities, SecurityOpt: []string{"no-new-privileges", "seccomp=" + p.filter},
		MaskedPaths:   maskedPaths,
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
		// Programs look up their own name. The engine would copy the host's resolvers otherwise.
		ExtraHosts: []string{spec.Hostname + ":127.0.1.1"},
		DNS:        []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}, DNSSearch: []string{"."},
		// What the guest says before it can be asked: why it cannot start.
		LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "64k", "max-file": "1"}},
		Mounts:    s.mounts,
		Tmpfs:     map[string]string{socketDir: "rw,noexec,nosuid,nodev,size=64k,mode=700"},
		// Charged to the memory limit, so half of that at most.
		ShmSize: spec.Limits.Memory / 2,
		Resources: container.Resources{
			Memory: memory, MemorySwap: memory,
			CPUPeriod: cpuPeriod, CPUQuota: int64(spec.Limits.CPUMillis) * cpuPeriod / 1000,
			PidsLimit: &pids,
		},
	}
	if p.ownKernel {
		// Its kernel has threads of its own, which have to fit beside those of the processes in it; what may be in it is its own
		// kernel's to count.
		pids = 4*pids + 256
		n := int64(spec.Limits.PIDs)
		host.Ulimits = []*container.Ulimit{{Name: "nproc", Soft: n, Hard: n}}
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil && !p.copies {
		// The engine switches IPv6 off where it has given no address, on loopback too. Of another machine's kernel nobody can tell
		// whether it has it.
		host.Sysctls = map[string]string{"net.ipv6.conf.all.disable_ipv6": "0"}
	}
	if c := spec.Card; c != nil {
		host.DNS = c.DNS
	}
	if p.quota {
		host.StorageOpt = map[string]string{"size": strconv.FormatInt(spec.Limits.Disk, 10)}
	}
	return config, host
}
