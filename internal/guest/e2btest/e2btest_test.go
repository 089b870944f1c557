package e2btest_test

import (
	"bytes"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/e2btest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestPackage runs the guest as process 1 of namespaces of its own, so that port 49983 is free and /home is empty.
func TestPackage(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTool(t, "node", "npm", "unshare", "nsenter", "ip", "git", "pgrep")
	testenv.NeedsMountNamespace(t)
	guest := testenv.NeedsBinary(t, "warren-guest")
	// The binary may lie below a directory that is covered, so it is opened before.
	const setup = `exec 9<"$1" && ip link set lo up && mount -t tmpfs tmpfs /home && mkdir /home/user && chown 1000:1000 /home/user &&
mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=700 tmpfs /root && mount -t tmpfs tmpfs /var/log && exec /proc/self/fd/9`
	cmd := exec.Command("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
		"--propagation", "private", "sh", "-c", setup, "sh", guest)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill() // unshare takes its child along
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the guest said: %s", log.String())
		}
	}()
	within := []string{"nsenter", "--net=/proc/" + strconv.Itoa(cmd.Process.Pid) + "/ns/net"}
	waitFor(t, func() bool {
		return exec.Command(within[0], append(within[1:], "node", "-e", "fetch('http://localhost:49983/health').then(r=>process.exit(r.status===204?0:1),()=>process.exit(1))")...).Run() == nil
	})
	e2btest.Run(t, e2btest.Target{Home: "/home/user", UID: 1000, Within: within})
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the guest does not answer")
		}
	}
}
