//go:build linux

package keeper

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/internal/message"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestParseCgroups(t *testing.T) {
	for _, tc := range []struct {
		name, mounts, own string
		v1                map[string]string
		v2                unifiedMount
	}{
		{
			name: "version 1",
			mounts: `31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw`,
			own: "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/x\n",
			v1:  map[string]string{"memory": "/sys/fs/cgroup/memory/a/b", "cpu": "/sys/fs/cgroup/cpu,cpuacct", "cpuacct": "/sys/fs/cgroup/cpu,cpuacct"},
			v2:  unifiedMount{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/x"},
		},
		{
			name:   "version 2",
			mounts: "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate",
			own:    "0::/system.slice/warren.service\n",
			v1:     map[string]string{},
			v2:     unifiedMount{"/sys/fs/cgroup", "/sys/fs/cgroup/system.slice/warren.service"},
		},
		{
			name:   "in a container",
			mounts: "30 24 0:26 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
			own:    "4:memory:/docker/1/in\n",
			v1:     map[string]string{"memory": "/sys/fs/cgroup/memory/in"},
		},
		{
			name:   "outside of what is mounted",
			mounts: "30 24 0:26 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
			own:    "4:memory:/other\n",
			v1:     map[string]string{"memory": "/sys/fs/cgroup/memory"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v1, v2, err := parseCgroups(bufio.NewScanner(strings.NewReader(tc.mounts)), tc.own)
			if err != nil || !reflect.DeepEqual(v1, tc.v1) || v2 != tc.v2 {
				t.Errorf("got %v, %v, %v", v1, v2, err)
			}
		})
	}
}

// On version 2 a group with processes hands on no controllers; the parent above must be found.
func TestUnifiedParent(t *testing.T) {
	root := t.TempDir()
	own := filepath.Join(root, "slice", "service")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(dir, name, content string, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{root, filepath.Join(root, "slice"), own} {
		write(d, "cgroup.controllers", "cpuset cpu io memory pids", 0o644)
	}
	write(root, "cgroup.subtree_control", "", 0o644)
	write(filepath.Join(root, "slice"), "cgroup.subtree_control", "", 0o644)
	// A directory in its place cannot be written, as the kernel's refusal.
	if err := os.Mkdir(filepath.Join(own, "cgroup.subtree_control"), 0o755); err != nil {
		t.Fatal(err)
	}
	dir, missing, err := unifiedParent(root, own)
	if err != nil || dir != filepath.Join(root, "slice") || missing != nil {
		t.Errorf("got %q, %v, %v", dir, missing, err)
	}
	write(filepath.Join(root, "slice"), "cgroup.controllers", "memory pids", 0o644)
	if _, missing, err := unifiedParent(root, own); err != nil || !reflect.DeepEqual(missing, []string{"cpu"}) {
		t.Errorf("missing %v, %v", missing, err)
	}
}

func TestUnifiedLimits(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"memory.max", "memory.swap.max", "cpu.max", "pids.max"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	g := cgroup{unified: dir}
	if err := g.limit(protocol.Limits{CPUMillis: 1500, Memory: 512 << 20, PIDs: 100}); err != nil {
		t.Fatal(err)
	}
	for f, want := range map[string]string{"memory.max": "704643072", "memory.swap.max": "0", "cpu.max": "150000 100000", "pids.max": "656"} {
		if b, _ := os.ReadFile(filepath.Join(dir, f)); string(b) != want {
			t.Errorf("%s is %q, want %q", f, b, want)
		}
	}
	os.WriteFile(filepath.Join(dir, "memory.events"), []byte("low 0\noom 3\noom_kill 2\n"), 0o644)
	if n := g.oomKills(); n != 2 {
		t.Errorf("%d kills", n)
	}
}

func TestBootArgs(t *testing.T) {
	limits := protocol.Limits{Memory: 512 << 20, CPUMillis: 3500}
	args := []string{"runsc-sandbox", "--root=x", "boot", "--bundle=/state/sandboxes/s1/" + bundleName("abcd", limits), "--total-memory", "999", "s1"}
	got := bootArgs(args, 8)
	want := []string{"runsc-sandbox", "--root=x", "boot", args[3], "--total-memory", "536870912", "--cpu-num", "4", "s1"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q", got)
	}
	if args[5] != "999" {
		t.Error("the arguments given were changed")
	}
	if got := bootArgs(args, 1); got[7] != "1" {
		t.Errorf("more processors than the host has: %q", got)
	}
	for _, other := range [][]string{nil, {"x"}, {"runsc-sandbox", "boot", "--bundle=/x/y", "s1"}} {
		if got := bootArgs(other, 8); !reflect.DeepEqual(got, other) {
			t.Errorf("%q became %q", other, got)
		}
	}
}

func TestDonated(t *testing.T) {
	args := []string{
		"runsc-sandbox", "--root=/state/root", "--debug-log-fd=3", "--fdlimit=-1", "boot", "--io-fds=5,6", "--io-fds=7", "--device-fd=-1",
		"--pass-fd=20:3,21:4", "-exec-fd", "9", "--profiling-metrics-fd-lossy=true", "--total-memory", "30", "s1",
	}
	var got []int
	for fd := range donated(args) {
		got = append(got, fd)
	}
	slices.Sort(got)
	if want := []int{0, 1, 2, 3, 5, 6, 7, 9, 20, 21}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A watcher gets each death, in order, and what it got is kept no longer.
func TestWatchKeepsNothing(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ends[i] = c.(*net.UnixConn)
	}
	k := &Keeper{sandboxes: map[string]*sandbox{}, watchers: map[*watcher]bool{}, stopped: make(chan struct{})}
	over := make(chan struct{})
	go func() { defer close(over); k.watch(ends[0]) }()
	var r protocol.Response
	if _, err := message.Read(ends[1], &r); err != nil || !r.OK || len(r.Statuses) != 0 {
		t.Fatalf("first answer %+v, %v", r, err)
	}
	var want, got []string
	for i := range 1000 {
		id := "s" + strings.Repeat("x", i%7)
		want = append(want, id)
		k.announce(protocol.Status{ID: id, State: stateDead})
	}
	for len(got) < len(want) {
		var r protocol.Response
		if _, err := message.Read(ends[1], &r); err != nil {
			t.Fatal(err)
		}
		for _, st := range r.Statuses {
			got = append(got, st.ID)
		}
	}
	if !slices.Equal(got, want) {
		t.Error("deaths came in another order, or twice")
	}
	k.mu.Lock()
	for w := range k.watchers {
		if len(w.news) != 0 || cap(w.news) != 0 {
			t.Errorf("%d deaths are kept", len(w.news))
		}
	}
	k.mu.Unlock()
	ends[1].Close()
	<-over
	if len(k.watchers) != 0 {
		t.Error("a watcher that has gone is kept")
	}
}

func TestMergedDir(t *testing.T) {
	testenv.NeedsRoot(t) // to make whiteouts
	base := t.TempDir()
	var fds []int
	for _, l := range []string{"top", "low"} { // topmost first
		dir := filepath.Join(base, l)
		if err := os.MkdirAll(filepath.Join(dir, "d"), 0o755); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	low, top := filepath.Join(base, "low"), filepath.Join(base, "top")
	do(os.MkdirAll(filepath.Join(low, "d/sub"), 0o700))
	do(os.MkdirAll(filepath.Join(low, "gone/x"), 0o755))
	do(os.WriteFile(filepath.Join(low, "file"), nil, 0o644))
	do(os.Symlink("../../../d", filepath.Join(low, "up")))
	do(os.Symlink("/d/sub", filepath.Join(low, "abs")))
	do(os.Symlink("loop", filepath.Join(low, "loop")))
	do(os.Symlink("missing/one", filepath.Join(low, "dangling")))
	do(os.MkdirAll(filepath.Join(low, "hidden/old"), 0o755))
	do(os.Mkdir(filepath.Join(top, "hidden"), 0o755))
	do(unix.Mknod(filepath.Join(top, "gone"), unix.S_IFCHR, 0))
	do(unix.Setxattr(filepath.Join(top, "hidden"), "trusted.overlay.opaque", []byte("y"), 0))
	m := mergedDir{fds}
	for _, tc := range []struct {
		name, path string
		exists     bool
	}{
		{"/", "/", true},
		{"/d", "/d", true},
		{"/d/sub", "/d/sub", true},
		{"/d/new/deep", "/d/new/deep", false},
		{"/none/a/b", "/none/a/b", false},
		{"/gone", "/gone", false},
		{"/gone/x", "/gone/x", false},
		{"/hidden", "/hidden", true},
		{"/hidden/old", "/hidden/old", false},
		{"/up/sub", "/d/sub", true},
		{"/abs/new", "/d/sub/new", false},
		{"/dangling", "/missing/one", false},
		{"/file", "/file", true},
	} {
		e, err := m.lookup(tc.name)
		if err != nil || e.path != tc.path || e.exists != tc.exists {
			t.Errorf("%s: %+v, %v", tc.name, e, err)
		}
	}
	for _, bad := range []string{"/loop", "/file/x"} {
		var pe *protocol.Error
		if e, err := m.lookup(bad); !errors.As(err, &pe) || pe.Kind != protocol.KindInvalid {
			t.Errorf("%s: %+v, %v", bad, e, err)
		}
	}
}

// A reset goes between frames and never into one.
func TestReset(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	got := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(b)
		got <- all
	}()
	f := &frameConn{Conn: a}
	hdr := make([]byte, yamuxHeader)
	binary.BigEndian.PutUint32(hdr[8:], 5)
	write := func(b []byte) {
		if _, err := f.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	write(hdr)
	f.sendReset(7)
	write([]byte("hello"))
	f.sendReset(9)
	write(hdr)
	write([]byte("world"))
	a.Close()
	reset := func(n byte) []byte { return []byte{0, 1, 0, 8, 0, 0, 0, n, 0, 0, 0, 0} }
	want := bytes.Join([][]byte{hdr, []byte("hello"), reset(7), reset(9), hdr, []byte("world")}, nil)
	if b := <-got; !bytes.Equal(b, want) {
		t.Errorf("got %q\nwant %q", b, want)
	}
}

func TestResetReachesPeer(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	server, err := yamux.Server(b, yamux.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	ch, err := newChannel(a)
	if err != nil {
		t.Fatal(err)
	}
	defer ch.session.Close()
	peer := make(chan error, 1)
	go func() {
		s, err := server.AcceptStream()
		if err != nil {
			peer <- err
			return
		}
		io.ReadFull(s, make([]byte, 4))
		s.Write([]byte{dialConnected})
		for { // until the host resets: the window alone would block for ever
			if _, err := s.Write(make([]byte, 64<<10)); err != nil {
				peer <- err
				return
			}
		}
	}()
	s, err := ch.dial(80, nil)
	if err != nil {
		t.Fatal(err)
	}
	ch.reset(s)
	select {
	case err := <-peer:
		if !errors.Is(err, yamux.ErrConnectionReset) && !errors.Is(err, yamux.ErrStreamClosed) {
			t.Errorf("peer got %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the peer is still blocked")
	}
}

func TestValidID(t *testing.T) {
	for _, bad := range []string{"", "..", "a/b", "-a", "A", "a\x00", strings.Repeat("a", 65), "."} {
		if validID(bad) == nil {
			t.Errorf("%q passes", bad)
		}
	}
	if err := validID("s0123456789abcdefghi"); err != nil {
		t.Error(err)
	}
}

func TestProcess(t *testing.T) {
	p := processOf(os.Getpid())
	if !p.alive() {
		t.Error("this process is not alive")
	}
	p.Start++
	if p.alive() {
		t.Error("another process with this number is taken for it")
	}
	if (process{}).alive() {
		t.Error("no process is alive")
	}
}

// TestZombie asks how processes ended that nobody has reaped yet.
func TestZombie(t *testing.T) {
	for script, want := range map[string]unix.WaitStatus{"sleep 0.2; exit 3": 3 << 8, "sleep 0.2; kill -KILL $$": 9} {
		cmd := exec.Command("/bin/sh", "-c", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := process{PID: cmd.Process.Pid}
		var err error
		if p.Start, err = startTime(p.PID); err != nil {
			t.Fatal(err)
		}
		if ws, ok := p.zombie(); ok {
			t.Errorf("%s: it ended with %x while it runs", script, ws)
		}
		for deadline := time.Now().Add(10 * time.Second); p.alive() && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		}
		if ws, ok := p.zombie(); !ok || ws != want {
			t.Errorf("%s: %x, %v; want %x", script, ws, ok, want)
		}
		cmd.Wait()
		if _, ok := p.zombie(); ok {
			t.Errorf("%s: known after it was reaped", script)
		}
	}
}
