//go:build linux

package keeper

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// gvisorRoot is gVisor's own state directory. It is the same path in every keeper, so that saved paths stay right.
var gvisorRoot = filepath.Join(stateDir, "root")

// baseConfig is gVisor's configuration that all sandboxes share.
func baseConfig() (*config.Config, error) {
	fs := flag.NewFlagSet("gvisor", flag.ContinueOnError)
	config.RegisterFlags(fs)
	for name, value := range map[string]string{
		"root":     gvisorRoot,
		"platform": "systrap",
		// The sandbox has a network stack of its own with a loopback and no card; with "none" gVisor refuses to
		// forward ports, which a new keeper needs to reach the guest again.
		"network": "sandbox",
		// The sentry opens files itself; the gofer only hands out the mounts.
		"directfs": "true",
		// Set-uid programs such as sudo work inside. On the host the processes have no_new_privs all the same.
		"allow-suid": "true",
		// The control groups are the keeper's, see cgroup.go.
		"ignore-cgroups": "true",
		"host-uds":       "none",
		"host-fifo":      "none",
		"host-settings":  "ignore",
		// The runtime binary is the sentry too. Without this the default may one day demand side-car binaries.
		"sidecar-usage-policy":               "LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		"sidecar-release-enforcement-policy": "NEVER",
	} {
		if err := fs.Set(name, value); err != nil {
			return nil, fmt.Errorf("gvisor flag %s: %w", name, err)
		}
	}
	return config.NewFromFlags(fs)
}

// configFor is the configuration of one sandbox.
func (k *Keeper) configFor(spec *protocol.Spec) (*config.Config, error) {
	conf := *k.conf
	// Writes to the root go to a file that has no name and ends with the sandbox's processes.
	var overlay config.Overlay2
	if err := overlay.Set(fmt.Sprintf("root:dir=%s,size=%d", filestoreDir(spec.ID), spec.Limits.Disk)); err != nil {
		return nil, err
	}
	conf.Overlay2 = overlay
	if spec.Debug {
		conf.Debug = true
		conf.DebugLog = filepath.Join(sandboxDir(spec.ID), "log") + "/"
		if err := os.Mkdir(conf.DebugLog, 0o700); err != nil {
			return nil, err
		}
	}
	return &conf, nil
}

func filestoreDir(id string) string { return filepath.Join(sandboxDir(id), "disk") }

// guestCapabilities is what root inside may do, to the gVisor kernel and nothing else: enough for sudo, package
// managers and servers. It is Docker's default set without raw sockets. CAP_SYS_RESOURCE, CAP_SYS_PTRACE and CAP_SYS_ADMIN are
// for the guest alone, which lets nothing that it starts have them: with the first it can make a thread though root inside has
// used up all processes, with the second it sees whose process listens on a port, with the third it sets the host name of what
// came from the pool. Root inside could freeze it by ptrace.
var guestCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	"CAP_SYS_RESOURCE", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN",
}

// ociSpec describes a sandbox to gVisor.
func ociSpec(spec *protocol.Spec, s *stage, token string, host uint32) *specs.Spec {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: host, Size: idCount}}
	env := append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		fmt.Sprintf("WARREN_CHANNEL_FD=%d", channelFD),
		fmt.Sprintf("WARREN_CHANNEL_CONTROL=%d", controlFD),
		"WARREN_CHANNEL_TOKEN=" + token,
	}, spec.Env...)
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc"},
		{Destination: "/sys", Type: "sysfs", Options: []string{"ro"}},
		{Destination: "/dev", Type: "tmpfs"},
		// Charged to the memory limit, so half of that at most.
		{Destination: "/dev/shm", Type: "tmpfs", Options: []string{"mode=1777", "size=" + strconv.FormatInt(spec.Limits.Memory/2, 10)}},
		{Destination: guestPath, Type: "bind", Source: s.guest, Options: []string{"ro"}},
	}
	for i, m := range spec.Mounts {
		options := []string{"rw"}
		if !m.Writable {
			options = []string{"ro"}
		}
		mounts = append(mounts, specs.Mount{Destination: m.Target, Type: "bind", Source: s.mounts[i], Options: options})
	}
	return &specs.Spec{
		Version:  specs.Version,
		Hostname: spec.Hostname,
		Root:     &specs.Root{Path: s.root},
		Mounts:   mounts,
		Process: &specs.Process{
			Args: []string{guestPath},
			Cwd:  "/",
			Env:  env,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: guestCapabilities, Effective: guestCapabilities, Permitted: guestCapabilities,
			},
			// Off on purpose: with it sudo could not work inside. It says nothing about the host's processes.
			NoNewPrivileges: false,
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NPROC", Soft: uint64(spec.Limits.PIDs), Hard: uint64(spec.Limits.PIDs)},
				{Type: "RLIMIT_NOFILE", Soft: 65536, Hard: 1 << 20},
			},
		},
		Linux: &specs.Linux{
			UIDMappings: ids,
			GIDMappings: ids,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.UserNamespace},
			},
		},
	}
}

// writeBundle writes the OCI bundle and returns its directory.
func writeBundle(spec *protocol.Spec, instance string, oci *specs.Spec) (string, error) {
	dir := filepath.Join(sandboxDir(spec.ID), bundleName(instance, spec.Limits))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	b, err := json.Marshal(oci)
	if err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}

// bundleName carries what the sandbox shall believe of its machine. gVisor takes memory and processors from control
// groups that it manages itself; ours it does not know, and it offers no other way in than flags of its boot command,
// which bootArgs sets from this name.
//
// The instance tells the processes of one keeper from those of another, see strays.
func bundleName(instance string, l protocol.Limits) string {
	return fmt.Sprintf("bundle-%s-%d-%d", instance, l.Memory, l.CPUMillis)
}

// bootArgs returns the arguments of gVisor's boot command with the memory and the processors of the sandbox, as
// bundleName put them into the bundle's name; other arguments come back as they are.
func bootArgs(args []string, hostCPUs int) []string {
	var memory int64
	var millis int
	for _, a := range args {
		if b, ok := strings.CutPrefix(a, "--bundle="); ok {
			f := strings.Split(filepath.Base(b), "-")
			if len(f) != 4 {
				return args
			}
			memory, _ = strconv.ParseInt(f[2], 10, 64)
			millis, _ = strconv.Atoi(f[3])
		}
	}
	if memory <= 0 || len(args) < 2 {
		return args
	}
	// Programs that see a single processor leave out locks; gVisor itself never shows fewer than two.
	cpus := min(max((millis+999)/1000, 2), hostCPUs)
	out := append([]string{}, args[:len(args)-1]...)
	for i := range out {
		if out[i] == "--total-memory" && i+1 < len(out) {
			out[i+1] = strconv.FormatInt(memory, 10)
		}
	}
	return append(out, "--cpu-num", strconv.Itoa(cpus), args[len(args)-1])
}
