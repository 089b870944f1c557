//go:build unix

package secret

import (
	"os/exec"
	"syscall"
)

// endWithChildren has what a command starts end with it when it is cancelled: it may outlive it, and hold the pipes.
func endWithChildren(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
