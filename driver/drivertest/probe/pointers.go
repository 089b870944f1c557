package main

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pointer is the address of what a raw system call shall read or write.
func pointer[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// bpfMap is the attribute of an array map of one 4-byte element.
func bpfMap() *[72]byte {
	attr := new([72]byte)
	attr[0], attr[4], attr[8], attr[12] = 2, 4, 4, 1
	return attr
}

// perfAttr asks for the software clock.
func perfAttr() *unix.PerfEventAttr {
	return &unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_CPU_CLOCK, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}
}

// fileHandle opens the root's inode by number, past every path check, as "shocker" did.
func fileHandle() (uintptr, syscall.Errno) {
	handle, mount, err := unix.NameToHandleAt(unix.AT_FDCWD, "/", 0)
	if err != nil {
		return 0, syscall.EPERM
	}
	_ = mount
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return 0, syscall.EPERM
	}
	defer unix.Close(root)
	fd, err := unix.OpenByHandleAt(root, handle, unix.O_RDONLY)
	if err != nil {
		return 0, syscall.EPERM
	}
	return uintptr(fd), 0
}
