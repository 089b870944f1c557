package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
)

// room is a network namespace that has no name: it is there as long as a thread of this process, or a program that it started, is in it.
// So nothing of it stays, however the process ends.
type room struct {
	do   chan func()
	path string
}

// newRoom makes a namespace.
func newRoom() (*room, error) {
	r := &room{do: make(chan func())}
	made := make(chan error)
	go func() {
		// The thread is never given back: it ends with the goroutine.
		runtime.LockOSThread()
		err := syscall.Unshare(syscall.CLONE_NEWNET)
		r.path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), syscall.Gettid())
		made <- err
		if err != nil {
			return
		}
		for f := range r.do {
			f()
		}
	}()
	if err := <-made; err != nil {
		return nil, fmt.Errorf("a network namespace: %w", err)
	}
	return r, nil
}

func (r *room) close() { close(r.do) }

// in calls a function on the thread that is in the namespace.
func (r *room) in(f func() error) error {
	done := make(chan error)
	r.do <- func() { done <- f() }
	return <-done
}

// run runs a program there.
func (r *room) run(ctx context.Context, stdin, name string, args ...string) error {
	return r.in(func() error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w %s", name, err, firstLine(string(out)))
		}
		return nil
	})
}

// listen listens there.
func (r *room) listen(network, address string) (l net.Listener, err error) {
	err = r.in(func() error {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

// The addresses of the two ends of a wire, and the ports that are changed to those of the server.
const (
	wireServer = "10.213.0.1"
	wireClient = "10.213.0.2"
	wireRaw    = 9001
	wireSecure = 9443
)

// wire is a pair of veth between two namespaces; in that of the server the port of each connection is changed by NAT.
type wire struct {
	server, client *room
	// raw and secure are where a client finds the server.
	raw, secure string
}

func (w *wire) close() {
	for _, r := range []*room{w.server, w.client} {
		if r != nil {
			r.close()
		}
	}
}

// newWire joins a server and its clients as containers are joined to their host. Without a program that sets NAT up it has none,
// and noNAT says why.
func newWire(ctx context.Context, s *benchServer) (w *wire, noNAT error, err error) {
	w = &wire{}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.server, err = newRoom(); err != nil {
		return nil, nil, err
	}
	if w.client, err = newRoom(); err != nil {
		return nil, nil, err
	}
	for _, step := range []struct {
		r    *room
		args string
	}{
		{w.server, "link add wire0 type veth peer name wire1 netns " + w.client.path},
		{w.server, "addr add " + wireServer + "/24 dev wire0"},
		{w.client, "addr add " + wireClient + "/24 dev wire1"},
		{w.server, "link set wire0 up"},
		{w.client, "link set wire1 up"},
	} {
		if err := step.r.run(ctx, "", "ip", strings.Fields(step.args)...); err != nil {
			return nil, nil, err
		}
	}
	raw, secure, err := s.listen(wireServer+":0", w.server.listen)
	if err != nil {
		return nil, nil, err
	}
	if noNAT = w.nat(ctx, raw, secure); noNAT != nil {
		w.raw, w.secure = raw, secure
		return w, noNAT, nil
	}
	w.raw, w.secure = fmt.Sprintf("%s:%d", wireServer, wireRaw), fmt.Sprintf("%s:%d", wireServer, wireSecure)
	return w, nil, nil
}

// nat changes the port of what comes in.
func (w *wire) nat(ctx context.Context, raw, secure string) error {
	_, rawPort, err1 := net.SplitHostPort(raw)
	_, securePort, err2 := net.SplitHostPort(secure)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if _, err := exec.LookPath("nft"); err == nil {
		return w.server.run(ctx, fmt.Sprintf("table ip wire {\n chain in {\n  type nat hook prerouting priority -100;\n  tcp dport %d redirect to :%s\n  tcp dport %d redirect to :%s\n }\n}\n",
			wireRaw, rawPort, wireSecure, securePort), "nft", "-f", "-")
	}
	if _, err := exec.LookPath("iptables"); err != nil {
		return errors.New("neither nft nor iptables is installed")
	}
	for from, to := range map[int]string{wireRaw: rawPort, wireSecure: securePort} {
		if err := w.server.run(ctx, "", "iptables", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", fmt.Sprint(from), "-j", "REDIRECT", "--to-ports", to); err != nil {
			return err
		}
	}
	return nil
}
