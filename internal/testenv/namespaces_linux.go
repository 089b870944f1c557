package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
)

// NeedsMountNamespace skips unless a process can be started in a mount namespace of its own.
func NeedsMountNamespace(t testing.TB) {
	t.Helper()
	if err := mountNamespace(); err != nil {
		Skip(t, fmt.Sprintf("needs mount namespaces: %v", err))
	}
}

// NeedsUserNamespaces skips unless a process can be started in a user namespace with ids of its own.
func NeedsUserNamespaces(t testing.TB) {
	t.Helper()
	if err := userNamespace(); err != nil {
		Skip(t, fmt.Sprintf("needs user namespaces: %v", err))
	}
}

// NeedsTUN skips unless network devices can be made whose packets a process reads.
func NeedsTUN(t testing.TB) {
	t.Helper()
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		Skip(t, fmt.Sprintf("needs TUN devices: %v", err))
		return
	}
	f.Close()
}

var mountNamespace = sync.OnceValue(func() error {
	return runTrue(&syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS})
})

var userNamespace = sync.OnceValue(func() error {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0x60000000, Size: 65536}}
	return runTrue(&syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids})
})

func runTrue(attr *syscall.SysProcAttr) error {
	cmd := exec.Command("true")
	cmd.SysProcAttr = attr
	return cmd.Run()
}
