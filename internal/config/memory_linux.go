package config

import "golang.org/x/sys/unix"

// totalMemory returns the bytes of memory of this host, 0 when unknown.
func totalMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(uint64(info.Totalram) * uint64(info.Unit))
}
