//go:build linux

package gateway

import (
	"os"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/internal/tun"
)

// TestDevices runs the tests of sockets with cards that are devices: those of drivers whose sandboxes have the host's kernel.
func TestDevices(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTUN(t)
	overDevice = true
	defer func() { overDevice = false }()
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"PassThrough", TestPassThrough}, {"ServerName", TestServerName}, {"Names", TestNames}, {"PortAgain", TestPortAgain},
		{"Datagrams", TestDatagrams}, {"IPv6Inside", TestIPv6Inside}, {"Unrecorded", TestUnrecorded}, {"Ceilings", TestCeilings},
		{"WebSocket", TestWebSocket}, {"NamesStay", TestNamesStay}, {"BrokenTwin", TestBrokenTwin},
		{"Inspect", TestInspect}, {"Framing", TestFraming}, {"UpstreamCertificate", TestUpstreamCertificate}, {"Reload", TestReload},
		{"NothingStays", TestNothingStays}, {"Peers", TestPeers}, {"PeerNames", TestPeerNames}, {"PeerBytes", TestPeerBytes}, {"PeerUDP", TestPeerUDP},
		{"PeersPart", TestPeersPart}, {"HalfClose", TestHalfClose}, {"SlowReader", TestSlowReader}, {"EndlessRequests", TestEndlessRequests},
	} {
		t.Run(c.name, c.run)
	}
}

// TestDeviceAgain serves a device, lets go of it and serves it again, as the next gateway does after the first was killed.
func TestDeviceAgain(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTUN(t)
	overDevice = true
	defer func() { overDevice = false }()
	l := newLab(t)
	l.name("allowed.lab", "11.1.1.1")
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab")
	in := l.sandbox("one", "allow: [allowed.lab]")
	for range 5 {
		if _, body, err := in.get("https://allowed.lab/"); err != nil || !strings.HasPrefix(body, "hi") {
			t.Fatalf("%q, %v", body, err)
		}
		l.g.Detach("one")
		var end *os.File
		var err error
		for end == nil {
			// Its flows end first.
			if end, err = tun.Open(in.netns, "eth0"); err != nil && !strings.Contains(err.Error(), tun.ErrBusy.Error()) {
				t.Fatal(err)
			}
		}
		if err := l.g.Attach("one", end, Rules{Policy: l.policy("allow: [allowed.lab]")}, ""); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNoCard attaches what is no card.
func TestNoCard(t *testing.T) {
	l := newLab(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{null, w} {
		if err := l.g.Attach("one", f, Rules{Policy: l.policy("extends: open")}, ""); err == nil || !strings.Contains(err.Error(), "neither") {
			t.Errorf("%s is taken for a card: %v", f.Name(), err)
		}
	}
	if left := l.g.Sandboxes(); len(left) != 0 {
		t.Errorf("there are cards of %v", left)
	}
}

// BenchmarkDevices runs the benchmarks of sockets with cards that are devices.
func BenchmarkDevices(b *testing.B) {
	testenv.NeedsRoot(b)
	testenv.NeedsTUN(b)
	overDevice = true
	defer func() { overDevice = false }()
	b.Run("Down", BenchmarkDown)
	b.Run("Up", BenchmarkUp)
	b.Run("Request", BenchmarkRequest)
	b.Run("Connect", BenchmarkConnect)
}
