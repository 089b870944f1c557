//go:build linux

package gvisor

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// The least Linux with which idmapped mounts below an overlay work.
const minMajor, minMinor = 5, 19

// Check looks at the host, see [driver.Checker]. Nothing it does needs KVM; gVisor runs on its systrap platform.
func (d *Driver) Check(ctx context.Context) []driver.Check {
	out := hostChecks()
	r, err := d.call(ctx, &protocol.Request{Op: protocol.OpCheck})
	if err != nil {
		return append(out, driver.Check{
			Name: "gvisor keeper", Status: "fail", Message: err.Error(),
			Hint: "look into keeper.log in the driver's state directory",
		})
	}
	for _, c := range r.Checks {
		out = append(out, driver.Check(c))
	}
	return out
}

func hostChecks() []driver.Check {
	out := []driver.Check{checkKernel(kernelRelease())}
	root := driver.Check{Name: "root", Status: "ok", Message: "runs as root"}
	if os.Geteuid() != 0 {
		root.Status, root.Message = "fail", "the gvisor driver needs root for mounts and user namespaces"
		root.Hint = "start `warren serve` as root"
	}
	userns := driver.Check{Name: "user namespaces", Status: "ok", Message: "enabled"}
	if b, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err != nil {
		userns.Status, userns.Message, userns.Hint = "fail", "the kernel has none", "use a kernel with CONFIG_USER_NS=y"
	} else if n, _ := strconv.Atoi(strings.TrimSpace(string(b))); n == 0 {
		userns.Status, userns.Message, userns.Hint = "fail", "switched off", "sysctl -w user.max_user_namespaces=15000"
	}
	systrap := driver.Check{Name: "gvisor platform", Status: "ok", Message: "systrap"}
	if b, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail"); err != nil || !strings.Contains(string(b), "trap") {
		systrap.Status, systrap.Message, systrap.Hint = "fail", "the kernel has no seccomp filter with traps", "use a kernel with CONFIG_SECCOMP_FILTER=y"
	} else if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && strings.TrimSpace(string(b)) == "3" {
		systrap.Status, systrap.Message, systrap.Hint = "fail", "ptrace is switched off for the whole machine", "reboot with kernel.yama.ptrace_scope below 3"
	}
	return append(out, root, userns, systrap)
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

func checkKernel(release string) driver.Check {
	c := driver.Check{Name: "kernel", Status: "ok", Message: "Linux " + release}
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n != 2 {
		c.Status, c.Message = "warn", "cannot read the version "+strconv.Quote(release)
		return c
	}
	if major < minMajor || major == minMajor && minor < minMinor {
		c.Status = "fail"
		c.Message += fmt.Sprintf(" is older than %d.%d", minMajor, minMinor)
		c.Hint = "use a newer kernel; idmapped mounts below an overlay are needed"
	}
	return c
}
