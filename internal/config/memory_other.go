//go:build !linux

package config

// totalMemory returns 0, for unknown: a daemon runs on Linux only.
func totalMemory() int64 { return 0 }
