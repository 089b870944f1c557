package account

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Do runs f with the rights of the user: the calling thread takes on the user's effective ids and groups, and with
// them loses every capability, so that the kernel checks each file operation as it would for the user's own
// process. It is per thread (the raw system calls, not package syscall's, which change all threads), and it is the
// effective ids rather than setfsuid(2) because gVisor does not have that. f must not rely on goroutines of its
// own for what needs the user's rights.
//
// When the guest is not root it can act as nobody but itself, and Do as another user fails with EPERM.
func (u *User) Do(f func() error) error {
	if self != 0 {
		if self != u.UID {
			return fmt.Errorf("act as user %s: %w", u.Name, syscall.EPERM)
		}
		return f()
	}
	if u.UID == 0 {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Going on with the wrong identity would be worse than ending: both directions end the process on failure.
	defer func() {
		must("seteuid", setIDs(unix.SYS_SETRESUID, 0))
		must("setegid", setIDs(unix.SYS_SETRESGID, 0))
		must("setgroups", setGroups(rootGroups))
	}()
	must("setgroups", setGroups(u.Groups))
	must("setegid", setIDs(unix.SYS_SETRESGID, u.GID))
	must("seteuid", setIDs(unix.SYS_SETRESUID, u.UID))
	return f()
}

// self is who the guest is, which never changes but inside Do.
var self = uint32(os.Geteuid())

// Self returns the uid of the guest, without a system call.
func Self() uint32 { return self }

// rootGroups are the groups that the guest itself has.
var rootGroups = func() []uint32 {
	var ids []uint32
	list, _ := os.Getgroups() // none is fine
	for _, g := range list {
		ids = append(ids, uint32(g))
	}
	return ids
}()

func must(what string, errno syscall.Errno) {
	if errno != 0 {
		fmt.Fprintf(os.Stderr, "warren-guest: %s: %v\n", what, errno)
		os.Exit(125)
	}
}

// setIDs sets the effective id and leaves the real and the saved one, so that the thread can come back and the user's
// processes may not signal it.
func setIDs(call uintptr, id uint32) syscall.Errno {
	keep := ^uintptr(0)
	_, _, errno := syscall.RawSyscall(call, keep, uintptr(id), keep)
	return errno
}

func setGroups(ids []uint32) syscall.Errno {
	var p unsafe.Pointer
	if len(ids) > 0 {
		p = unsafe.Pointer(&ids[0])
	}
	_, _, errno := syscall.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(ids)), uintptr(p), 0)
	return errno
}
