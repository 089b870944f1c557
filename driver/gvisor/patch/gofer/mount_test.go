//go:build linux

package gofer

import (
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/checkpoint"
)

// TestMountAhead gives the answer of a server to the first who mounts it, also when it is that there is none.
func TestMountAhead(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	MountAhead(map[checkpoint.ResourceID]int{{Path: "/"}: pair[0]})
	// It asks without being waited for.
	if err := unix.SetsockoptTimeval(pair[1], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(pair[1], make([]byte, 1024)); n <= 0 || err != nil {
		t.Fatalf("asked with %d bytes: %v", n, err)
	}
	unix.Close(pair[1])
	if _, _, _, err := newClient(pair[0]); err == nil {
		t.Error("a server that has gone was mounted")
	}
	if len(mounts.of) != 0 {
		t.Errorf("answers left: %v", mounts.of)
	}
	// One that was not asked ahead is asked now.
	if _, _, _, err := newClient(-1); err == nil {
		t.Error("no server was mounted")
	}
}
