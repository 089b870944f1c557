package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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

// NetworkNamespace returns a network namespace that nothing is in. It needs root.
func NetworkNamespace(t testing.TB) *os.File {
	t.Helper()
	NeedsRoot(t)
	var f *os.File
	made := make(chan error)
	go func() {
		runtime.LockOSThread()
		own, err := os.Open("/proc/thread-self/ns/net")
		if err == nil {
			defer own.Close()
			err = unix.Unshare(unix.CLONE_NEWNET)
		}
		if err == nil {
			f, err = os.Open("/proc/thread-self/ns/net")
			// It may be the process's first thread, which stays.
			if unix.Setns(int(own.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
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
