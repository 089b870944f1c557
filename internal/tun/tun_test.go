//go:build linux

package tun

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/testenv"
)

var device = Device{Name: "eth0", MTU: 65000, Addrs: []netip.Addr{netip.MustParseAddr("198.18.0.2"), netip.MustParseAddr("fd77::2")}}

// namespace returns a network namespace that nothing is in.
func namespace(t testing.TB) *os.File {
	t.Helper()
	testenv.NeedsTUN(t)
	return testenv.NetworkNamespace(t)
}

// names returns the devices of a namespace.
func names(t *testing.T, netns *os.File) (list []string) {
	t.Helper()
	if err := Within(netns, func() error {
		ifs, err := net.Interfaces()
		for _, i := range ifs {
			list = append(list, i.Name)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return list
}

// send sends a datagram from a namespace, from a socket made there.
func send(t *testing.T, netns *os.File, to, text string) {
	t.Helper()
	var conn net.Conn
	err := Within(netns, func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(context.Background(), "udp", to)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
}

// receive reads packets until one has a text in it, and returns all up to that.
func receive(t *testing.T, f *os.File, text string) (packets [][]byte) {
	t.Helper()
	b := make([]byte, 1<<16)
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		n, err := unix.Read(int(f.Fd()), b)
		if errors.Is(err, unix.EAGAIN) {
			time.Sleep(time.Millisecond)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		packets = append(packets, bytes.Clone(b[:n]))
		if bytes.Contains(b[:n], []byte(text)) {
			return packets
		}
	}
	t.Fatalf("no packet with %q comes", text)
	return nil
}

// TestDevice sends packets of both families through a device, also after whoever had it open has gone.
func TestDevice(t *testing.T) {
	netns := namespace(t)
	if err := Make(netns, device); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names(t, netns), " "); got != "lo eth0" {
		t.Errorf("the devices are %s, want lo and eth0", got)
	}
	for _, round := range []string{"first", "second", "third", "fourth"} {
		// The kernel notices in its own time that nobody has it open.
		if round != "first" {
			time.Sleep(20 * time.Millisecond)
		}
		f, err := Open(netns, "eth0")
		if err != nil {
			t.Fatal(err)
		}
		if !Is(f) {
			t.Error("what was opened is not told from other files")
		}
		for _, to := range []string{"11.22.33.44:9", "[2001:db8::1]:9"} {
			send(t, netns, to, round+to)
			got := receive(t, f, round+to)
			p := got[len(got)-1]
			if v := p[0] >> 4; (v == 6) != strings.HasPrefix(to, "[") {
				t.Errorf("to %s: a packet of IP version %d", to, v)
			}
		}
		// One at a time, and the second changes nothing.
		if g, err := Open(netns, "eth0"); !errors.Is(err, ErrBusy) {
			t.Errorf("a second one opens it: %v, %v", g, err)
		}
		if err := Make(netns, device); !errors.Is(err, fs.ErrExist) {
			t.Errorf("a second device of that name: %v", err)
		}
		f.Close()
	}
	if err := Make(netns, device); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second device of that name, when nobody has the first open: %v", err)
	}
	// What is sent while nobody reads is lost.
	send(t, netns, "11.22.33.44:9", "lost")
	f, err := Open(netns, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	send(t, netns, "11.22.33.44:9", "found")
	for _, p := range receive(t, f, "found") {
		if bytes.Contains(p, []byte("lost")) {
			t.Error("a packet of before came")
		}
	}
}

// TestThreads enters a namespace from many goroutines at once: no thread stays there.
func TestThreads(t *testing.T) {
	netns := namespace(t)
	fi, err := netns.Stat()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if err := Within(netns, func() error {
				its, err := os.Stat("/proc/thread-self/ns/net")
				if err == nil && !os.SameFile(fi, its) {
					err = errors.New("it is elsewhere")
				}
				return err
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(threads) < 2 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	for _, name := range threads {
		if its, err := os.Stat(name); err == nil && os.SameFile(fi, its) {
			t.Errorf("%s is still in the namespace", name)
		}
	}
}

// TestRefusals asks for what cannot be: nothing is left of it.
func TestRefusals(t *testing.T) {
	netns := namespace(t)
	if _, err := Open(netns, "eth0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open a device that is not there: %v", err)
	}
	for _, d := range []Device{
		{Name: "", MTU: 1500},
		{Name: "a-name-of-16-char", MTU: 1500},
		{Name: "eth0", MTU: 70000},
		{Name: "eth0", MTU: 65000, Addrs: []netip.Addr{device.Addrs[0], device.Addrs[0]}},
	} {
		if err := Make(netns, d); err == nil {
			t.Errorf("%+v is made", d)
		}
	}
	if got := strings.Join(names(t, netns), " "); got != "lo" {
		t.Errorf("left are %s", got)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for _, f := range []*os.File{null, r, netns} {
		if Is(f) {
			t.Errorf("%s is taken for a device", f.Name())
		}
	}
	if err := Make(null, device); err == nil {
		t.Error("a file is taken for a namespace")
	}
}
