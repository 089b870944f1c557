package repo

import (
	"io/fs"
	"syscall"
)

// diskUse returns the bytes that a file takes on disk.
func diskUse(fi fs.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return fi.Size()
}
