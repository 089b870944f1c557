//go:build linux

package keeper

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// gVisor makes some of its descriptors without FD_CLOEXEC: control sockets of a sandbox and connections to them, eventfds.
// While one sandbox starts, the processes of another that is forked at that moment inherit them. So each process of
// gVisor's first closes what its command line does not name.

// donated returns the descriptors that a command line names, in flags such as --spec-fd=3, --io-fds=4,5 and --pass-fd=6:3.
func donated(args []string) map[int]bool {
	named := map[int]bool{0: true, 1: true, 2: true}
	for i, a := range args {
		if !strings.HasPrefix(a, "-") {
			continue
		}
		name, value, ok := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if !strings.HasSuffix(name, "-fd") && !strings.HasSuffix(name, "-fds") {
			continue
		}
		if !ok && i+1 < len(args) {
			value = args[i+1]
		}
		for _, v := range strings.Split(value, ",") {
			host, _, _ := strings.Cut(v, ":") // the number behind the colon is the guest's
			if fd, err := strconv.Atoi(host); err == nil && fd >= 0 {
				named[fd] = true
			}
		}
	}
	return named
}

// closeOthers closes the descriptors that this process inherited and that are not in keep. Those with FD_CLOEXEC are its
// own, of Go's runtime.
func closeOthers(keep map[int]bool) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list inherited descriptors: %w", err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || keep[fd] {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if errors.Is(err, unix.EBADF) {
			continue // the listing's own
		}
		if err != nil {
			return fmt.Errorf("look at descriptor %d: %w", fd, err)
		}
		if flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
	return nil
}

// firstPassed is where the descriptors for the guest go: its number 3 becomes 243 of the sandbox process. Above it are those
// of reserveStdio.
const firstPassed = 240

// placePassed moves the descriptors that a command line passes to the guest to numbers that depend on nothing else, and
// returns the arguments that say so. gVisor passes them in no order, and a socket in an image is restored under the number
// that it had when the image was made.
func placePassed(args []string) ([]string, error) {
	out := slices.Clone(args)
	for i, a := range args {
		value, ok := strings.CutPrefix(a, "--pass-fd=")
		if !ok {
			continue
		}
		var host, guest int
		if n, err := fmt.Sscanf(value, "%d:%d", &host, &guest); err != nil || n != 2 || guest < 0 {
			return nil, fmt.Errorf("argument %q passes no descriptor", a)
		}
		to := firstPassed + guest
		if to == host {
			continue // the process has executed itself again
		}
		if _, err := unix.FcntlInt(uintptr(to), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
			return nil, fmt.Errorf("descriptor %d is in use: the sandbox has too many mounts", to)
		}
		if err := unix.Dup3(host, to, 0); err != nil {
			return nil, fmt.Errorf("move descriptor %d to %d: %w", host, to, err)
		}
		unix.Close(host)
		out[i] = fmt.Sprintf("--pass-fd=%d:%d", to, guest)
	}
	return out, nil
}
