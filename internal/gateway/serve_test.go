//go:build linux

package gateway

import (
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/gateway/control"
	"github.com/warren-sandbox/warren/internal/message"
)

// TestPoliciesInTurn sets a policy that takes longer to arrive and to be read than one that was begun after it: the later one stays, and whoever began the first is told.
func TestPoliciesInTurn(t *testing.T) {
	l := newLab(t)
	l.sandbox("one", "allow: [allowed.lab]")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "gateway"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(l.g, ln, "build", time.Hour, slog.New(slog.DiscardHandler))
	served := make(chan struct{})
	go func() {
		s.Serve()
		close(served)
	}()
	defer func() {
		s.Retire()
		<-served
	}()
	begin := func() *net.UnixConn {
		c, err := net.DialUnix("unix", nil, ln.Addr().(*net.UnixAddr))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(time.Minute))
		return c
	}
	set := func(c *net.UnixConn, source, digest string) (r control.Response) {
		if err := message.Write(c, &control.Request{Op: control.OpPolicy, ID: "one", Policy: &control.Policy{Name: digest, Source: []byte(source), Digest: digest}}); err != nil {
			t.Fatal(err)
		}
		if _, err := message.Read(c, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	first, second, third := begin(), begin(), begin()
	for _, c := range []struct {
		conn            *net.UnixConn
		digest, inForce string
	}{{second, "second", "second"}, {first, "first", "second"}, {third, "third", "third"}} {
		r := set(c.conn, "extends: locked", c.digest)
		if told := strings.Contains(r.Error, "one that came after it"); r.OK != (c.digest == c.inForce) || told == r.OK {
			t.Errorf("the %s policy is answered with %+v", c.digest, r)
		}
		if d, err := l.g.Digest("one"); err != nil || d != c.inForce {
			t.Errorf("after the %s policy the %s is in force, %v; want the %s", c.digest, d, err, c.inForce)
		}
		if !r.OK && r.Kind != "superseded" {
			t.Errorf("what was overtaken is answered with the kind %q", r.Kind)
		}
	}

	// A card that was asked for before does not come in place of one with a newer policy either, and one that is asked for later does.
	attach := func(c *net.UnixConn, digest string) (r control.Response) {
		if err := message.Write(c, &control.Request{Op: control.OpAttach, ID: "one", Policy: &control.Policy{Name: digest, Source: []byte("extends: locked"), Digest: digest}}); err != nil {
			t.Fatal(err)
		}
		files, err := message.Read(c, &r)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			t.Cleanup(func() { f.Close() })
		}
		return r
	}
	before, between, after := begin(), begin(), begin()
	if r := set(between, "extends: locked", "between"); !r.OK {
		t.Fatalf("%+v", r)
	}
	if r := attach(before, "before"); r.OK || r.Kind != "superseded" {
		t.Errorf("a card that was asked for before is answered with %+v", r)
	}
	if d, err := l.g.Digest("one"); err != nil || d != "between" {
		t.Errorf("the policy %s is in force, %v", d, err)
	}
	if r := attach(after, "after"); !r.OK {
		t.Errorf("a card that was asked for after is answered with %+v", r)
	}
	if d, err := l.g.Digest("one"); err != nil || d != "after" {
		t.Errorf("the policy %s is in force, %v", d, err)
	}
}
