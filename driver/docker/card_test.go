//go:build linux

package docker_test

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

var testCard = driver.Card{
	MTU: 65000, Addrs: []netip.Addr{netip.MustParseAddr("198.18.0.2"), netip.MustParseAddr("fd77::2")}, DNS: []netip.Addr{netip.MustParseAddr("198.18.0.1")},
}

func (e *env) carded() *driver.Spec {
	s, c := e.spec(), testCard
	s.Card = &c
	return s
}

// openCard opens a sandbox's card as a gateway gets it.
func (e *env) openCard(d *docker.Driver, id warren.SandboxID) *os.File {
	e.Helper()
	f, err := d.Card(e.ctx(), id)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { f.Close() })
	return f
}

// sends runs a script in a sandbox and wants a packet with a text in it to come over the card.
func (e *env) sends(id warren.SandboxID, f *os.File, script, want string) {
	e.Helper()
	e.run(id, script)
	b := make([]byte, 1<<16)
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		n, err := unix.Read(int(f.Fd()), b)
		switch {
		case errors.Is(err, unix.EAGAIN):
			time.Sleep(time.Millisecond)
		case err != nil:
			e.Fatal(err)
		case bytes.Contains(b[:n], []byte(want)):
			return
		}
	}
	e.Errorf("no packet with %q comes", want)
}

// TestCard makes a sandbox with a card: it has the card and nothing else, nothing inside can change it, and whoever serves it may be killed.
func TestCard(t *testing.T) {
	testenv.NeedsTUN(t)
	e := newEnv(t, dockertest.Config{})
	if err := e.d.CheckCard(e.ctx(), nil); err != nil {
		t.Fatal(err)
	}
	s := e.carded()
	if err := e.d.Create(e.ctx(), s); err != nil {
		t.Fatal(err)
	}
	if got := e.run(s.ID, "cd /sys/class/net && echo *; cat /etc/resolv.conf; cat eth0/mtu"); !strings.HasPrefix(got, "eth0 lo\n") || !strings.Contains(got, "nameserver 198.18.0.1\n") || !strings.HasSuffix(got, "65000") {
		t.Errorf("inside: %q", got)
	}
	udp := "exec 3<>/dev/udp/11.22.33.44/9; printf "
	f := e.openCard(e.d, s.ID)
	e.sends(s.ID, f, "bash -c '"+udp+"first >&3'", "first")
	e.sends(s.ID, f, "bash -c 'exec 3<>/dev/udp/2001:db8::1/9; printf six >&3'", "six")
	// Another process: the card is there, and taken.
	other := e.open()
	if g, err := other.Card(e.ctx(), s.ID); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("a second one opens the card: %v, %v", g, err)
	}
	e.sends(s.ID, f, "bash -c '"+udp+"still >&3'", "still")
	f.Close()
	e.run(s.ID, "bash -c '"+udp+"lost >&3'")
	f = e.openCard(other, s.ID)
	e.sends(s.ID, f, "bash -c '"+udp+"again >&3'", "again")
	// Frozen and thawed, and served anew in between.
	if err := e.d.Freeze(e.ctx(), s.ID); err != nil {
		t.Fatal(err)
	}
	f.Close()
	f = e.openCard(e.d, s.ID)
	if err := e.d.Thaw(e.ctx(), s.ID); err != nil {
		t.Fatal(err)
	}
	e.sends(s.ID, f, "bash -c '"+udp+"thawed >&3'", "thawed")
	if got := e.run(s.ID, "perl -e 'socket(S, 2, 2, 0) or exit 1' && echo yes"); got != "yes" {
		t.Fatalf("perl inside makes no socket: %q", got)
	}
	for _, attempt := range []string{
		"echo 1 > /proc/sys/net/ipv4/ip_forward", "mknod /tmp/tun c 10 200", "test -e /dev/net/tun", "unshare -Urn true", "nsenter --net=/proc/1/ns/net true",
		"perl -e 'socket(S, 17, 3, 768) or exit 1'", "perl -e 'socket(S, 2, 3, 1) or exit 1'", // a device's packets, and bare IP
	} {
		if got := e.run(s.ID, "if ("+attempt+") 2>/dev/null; then echo yes; else echo no; fi"); got != "no" {
			t.Errorf("root inside may: %s", attempt)
		}
	}
	if err := e.d.Delete(e.ctx(), s.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := e.d.Card(e.ctx(), s.ID); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("the card of a sandbox that is gone: %v", err)
	}
	f.Close()
	e.clean()
}

// TestNoCard asks for cards that cannot be.
func TestNoCard(t *testing.T) {
	testenv.NeedsTUN(t)
	e := newEnv(t, dockertest.Config{})
	id := e.create()
	if got := e.run(id, "cd /sys/class/net && echo *"); got != "lo" {
		t.Errorf("without a card a sandbox has %q", got)
	}
	if _, err := e.d.Card(e.ctx(), id); !errors.Is(err, warren.ErrState) {
		t.Errorf("the card of a sandbox without one: %v", err)
	}
	runsc := map[string]string{"runtime": "runsc"}
	if err := e.d.CheckCard(e.ctx(), runsc); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "kernel of its own") {
		t.Errorf("with runsc: %v", err)
	}
	s := e.carded()
	s.Options = runsc
	if err := e.d.Create(e.ctx(), s); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("create with runsc: %v", err)
	}
	for _, c := range []driver.Card{{MTU: 70000}, {MTU: 65000, Addrs: []netip.Addr{testCard.Addrs[0], testCard.Addrs[0]}}, {MTU: 65000, Inside: os.Stdin, Outside: os.Stdin}} {
		s := e.carded()
		s.Card = &c
		if err := e.d.Create(e.ctx(), s); err == nil {
			t.Errorf("a card %+v is made", c)
		}
		if _, ok := e.status(s.ID); ok {
			t.Errorf("something is left of a sandbox whose card was refused")
		}
	}
	e.clean()
}

// TestNoCardElsewhere asks engines for cards that are on another machine, or Podman's.
func TestNoCardElsewhere(t *testing.T) {
	for name, c := range map[string]dockertest.Config{"remote": {Remote: true}, "podman": {Podman: true}} {
		t.Run(name, func(t *testing.T) {
			if c.Podman {
				testenv.NeedsTool(t, "podman")
			}
			e := newEnv(t, c, func(o *docker.Options) {
				o.Accept = []string{docker.AcceptNoDiskLimit, docker.AcceptCopiedMounts, docker.AcceptNoUserNamespace}
			})
			if c.Remote {
				t.Setenv("DOCKER_CERT_PATH", e.engine.Certs)
				e.d = e.open()
			}
			if err := e.d.CheckCard(e.ctx(), nil); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("a card: %v", err)
			}
			if err := e.d.Create(e.ctx(), e.carded()); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("a sandbox with one: %v", err)
			}
			said := false
			for _, check := range e.d.Check(e.ctx()) {
				said = said || check.Name == "docker network" && check.Status == "warn" && strings.Contains(check.Message, "loopback")
			}
			if !said {
				t.Error("the check says nothing of it")
			}
			e.clean()
		})
	}
}
