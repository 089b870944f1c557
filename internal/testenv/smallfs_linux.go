package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// SmallFS mounts a file system of size bytes and at most inodes files and returns its directory, for tests of full
// disks. It is ext4 in a file when mkfs.ext4 is there, else tmpfs. It is unmounted when the test ends, also when the test
// process is killed: a small helper waits for that.
func SmallFS(t testing.TB, size, inodes int64) string {
	t.Helper()
	NeedsRoot(t)
	NeedsTool(t, "mount", "umount")
	base := t.TempDir()
	dir := filepath.Join(base, "mnt")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	guard := guardMount(t, dir)
	if _, err := exec.LookPath("mkfs.ext4"); err == nil {
		image := filepath.Join(base, "image")
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, size); err != nil {
			t.Fatal(err)
		}
		run(t, "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-N", fmt.Sprint(inodes), image)
		run(t, "mount", "-t", "ext4", "-o", "loop,nosuid", image, dir)
	} else {
		run(t, "mount", "-t", "tmpfs", "-o", fmt.Sprintf("nosuid,mode=755,size=%d,nr_inodes=%d", size, inodes), "warren-test", dir)
	}
	t.Cleanup(func() {
		guard()
		if mounted(dir) {
			t.Errorf("%s is still mounted", dir)
		}
	})
	return dir
}

// guardMount starts a helper that unmounts dir when the returned function is called or this process ends.
func guardMount(t testing.TB, dir string) (unmount func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `read _; umount "$1" 2>/dev/null || umount -l "$1" 2>/dev/null; exit 0`, "sh", dir)
	cmd.Stdin = r
	// A signal to the test's process group must not reach the helper before it has done its work.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	return func() {
		w.Close()
		cmd.Wait()
	}
}

func run(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

func mounted(dir string) bool {
	mounts, err := readMounts()
	if err != nil {
		return true
	}
	for _, m := range mounts {
		if m.point == dir {
			return true
		}
	}
	return false
}
