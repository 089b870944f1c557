//go:build linux

package docker

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// systemCallFilter is the filter of every container, in the engine's JSON form: the default one of the newest engines, also on
// an older engine whose own default still lets io_uring through, with fewer kinds of sockets.
var systemCallFilter = sync.OnceValue(func() string {
	p := seccomp.DefaultProfile()
	p.Syscalls = slices.DeleteFunc(p.Syscalls, func(s *seccomp.Syscall) bool {
		// The multiplexer of 32-bit programs, whose arguments no filter sees, goes as well; they have socket too.
		s.Names = slices.DeleteFunc(s.Names, func(name string) bool { return name == "socket" || name == "socketcall" })
		return len(s.Names) == 0
	})
	for _, args := range allowedSockets {
		p.Syscalls = append(p.Syscalls, &seccomp.Syscall{LinuxSyscall: specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActAllow, Args: args}})
	}
	text, err := json.Marshal(p)
	if err != nil {
		panic("docker driver: the system call filter cannot be written: " + err.Error())
	}
	return string(text)
})

// filterFile holds the filter in the state directory, for engines that take it from there.
const filterFile = "seccomp.json"

// writeFilter writes the filter of this program's version, whole or not at all.
func writeFilter(dir string) error {
	name := filepath.Join(dir, filterFile)
	if text, err := os.ReadFile(name); err == nil && string(text) == systemCallFilter() {
		return nil
	}
	tmp, err := os.CreateTemp(dir, ".seccomp-*")
	if err != nil {
		return err
	}
	_, err = tmp.WriteString(systemCallFilter())
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

// allowedSockets is what a sandbox needs whose network is a loopback and perhaps a card: local ones, IP, and questions about its own network.
var allowedSockets = [][]specs.LinuxSeccompArg{
	{argument(0, unix.AF_UNIX)},
	{argument(0, unix.AF_INET)},
	{argument(0, unix.AF_INET6)},
	{argument(0, unix.AF_NETLINK), argument(2, unix.NETLINK_ROUTE)},
	{argument(0, unix.AF_NETLINK), argument(2, unix.NETLINK_SOCK_DIAG)},
}

func argument(index uint, value uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: index, Value: value, Op: specs.OpEqualTo}
}

// maskedPaths are those files of the kernel that say something of the host: what engines hide by default, and the
// identity of its boot.
var maskedPaths = []string{
	"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
	"/proc/sys/kernel/random/boot_id", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
}
