//go:build linux

package idmap

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// holderVariable makes this program start a holder, say its process id and wait to be killed.
const holderVariable = "WARREN_TEST_HOLDER"

func TestMain(m *testing.M) {
	if os.Getenv(holderVariable) != "" {
		runtime.LockOSThread()
		pid, err := hold(Range(0x60000000, 0x61000000))
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(pid)
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

func TestMaps(t *testing.T) {
	if m := Range(100, 100); !m.Identity() || Range(100, 200).Identity() || User(1, 1, 0, 0, 1).Identity() {
		t.Error("Identity is wrong")
	}
	keys := map[Map]int{}
	for range 2 {
		keys[User(1000, 1001, 5, 70000, 1000)]++
		keys[User(1000, 1000, 5, 70000, 1000)]++
	}
	if len(keys) != 2 {
		t.Errorf("two different maps are %d keys", len(keys))
	}
}

func TestNamespaces(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsUserNamespaces(t)
	var n Namespaces
	a, release, err := n.Get(Range(0x60000000, 0x61000000), 1)
	if err != nil {
		t.Fatal(err)
	}
	release()
	again, release, err := n.Get(Range(0x60000000, 0x61000000), 1)
	if err != nil || again != a {
		t.Errorf("the second of one mapping: %v, %v; want the first", again, err)
	}
	release()
	other, release, err := n.Get(Range(0x60000000, 0x62000000), 1)
	if err != nil || other == a {
		t.Fatalf("another mapping: %v, %v", other, err)
	}
	release()
	if _, err := other.Stat(); err == nil {
		t.Error("a namespace beyond those that are kept stays open")
	}
	if kind, err := unix.IoctlRetInt(int(a.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWUSER {
		t.Errorf("the file is of kind %#x, %v", kind, err)
	}
	a.Close()
}

// TestHolderEndsWithParent kills a process while it has a holder, which stands still before its first instruction.
func TestHolderEndsWithParent(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsUserNamespaces(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), holderVariable+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	line, err := bufio.NewReader(out).ReadString('\n')
	if _, serr := fmt.Sscan(line, &pid); serr != nil {
		t.Errorf("the parent says %q, %v", line, err)
	}
	stops := func() bool {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		return err == nil && strings.Contains(string(status), "State:\tt")
	}
	for until := time.Now().Add(10 * time.Second); pid > 0 && !stops(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Error("the holder does not stand still")
			break
		}
	}
	cmd.Process.Kill()
	cmd.Wait()
	for until := time.Now().Add(10 * time.Second); pid > 0; time.Sleep(5 * time.Millisecond) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil || strings.Contains(string(status), "State:\tZ") {
			return // gone, or nobody's to wait for
		}
		if time.Now().After(until) {
			unix.Kill(pid, unix.SIGKILL)
			t.Fatalf("the holder lives on:\n%s", status)
		}
	}
}
