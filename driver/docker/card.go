//go:build linux

package docker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/tun"
)

// cardName is that of the network card inside.
const cardName = "eth0"

// busyTries is how often a card is tried for that another still has open, who may be on his way out: the kernel ends a killed process piece by
// piece.
const (
	busyTries = 40
	busyWait  = 50 * time.Millisecond
)

// CheckCard says whether a sandbox can have a network card, see [driver.CardMaker].
func (d *Driver) CheckCard(ctx context.Context, options map[string]string) error {
	if err := checkOptions(options); err != nil {
		return err
	}
	e, err := d.askEngine(ctx)
	if err != nil {
		return err
	}
	p, err := d.plan(e, options)
	if err != nil {
		return err
	}
	return p.checkCard()
}

// checkCard refuses a card where there is none.
func (p *plan) checkCard() error {
	if p.noCard == "" {
		return nil
	}
	return fmt.Errorf("the sandbox can have no network card: %s: %w", p.noCard, errors.ErrUnsupported)
}

// noCards says why no container of an engine can have a card, "" when those can whose kernel is the host's.
func (e *engine) noCards(at endpoint) string {
	switch {
	case e.copies != "":
		return "a card is made on the machine that the container runs on, and " + e.copies
	case e.podman:
		return "Podman's containers have none; use Docker's engine"
	case at.hidden():
		return "the engine's processes are not to be seen from here; run Warren in the process namespace of the engine's host"
	}
	if err := tun.Available(); err != nil {
		return fmt.Sprintf("this machine makes no network devices (%v); `modprobe tun`", err)
	}
	return ""
}

// hidden says whether the process that listens on the engine's socket is in a process namespace that is not to be seen from here, so that containers
// are not either.
func (e *endpoint) hidden() bool {
	name, ok := strings.CutPrefix(e.host, "unix://")
	if !ok {
		return false
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return false // whoever asks next is told
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	hidden := false
	raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		hidden = err == nil && cred.Pid == 0
	})
	return hidden
}

// makeCard makes the network device of a container that has just been started, of which nobody can have asked anything yet. It has had no
// device but its loopback until now.
func (d *Driver) makeCard(ctx context.Context, id warren.SandboxID, card *driver.Card) error {
	netns, err := d.networkOf(ctx, id)
	if err != nil {
		return err
	}
	defer netns.Close()
	if err := tun.Make(netns, tun.Device{Name: cardName, MTU: card.MTU, Addrs: card.Addrs}); err != nil {
		return fmt.Errorf("make the network card: %w", err)
	}
	return nil
}

// Card opens a sandbox's network card, see [driver.CardMaker].
func (d *Driver) Card(ctx context.Context, id warren.SandboxID) (*os.File, error) {
	f, err := d.card(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("card of sandbox %s: %w", id, err)
	}
	return f, nil
}

func (d *Driver) card(ctx context.Context, id warren.SandboxID) (*os.File, error) {
	if !validID(id) {
		return nil, warren.ErrNotFound
	}
	netns, err := d.networkOf(ctx, id)
	if err != nil {
		return nil, err
	}
	defer netns.Close()
	for try := 1; ; try++ {
		f, err := tun.Open(netns, cardName)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("it has none: %w", warren.ErrState)
		case !errors.Is(err, tun.ErrBusy):
			return nil, err
		case try == busyTries:
			return nil, fmt.Errorf("another process has it open; end whatever else serves the networks of this machine's sandboxes: %w", warren.ErrUnavailable)
		}
		select {
		case <-time.After(busyWait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// networkOf opens the network namespace of a sandbox's container.
func (d *Driver) networkOf(ctx context.Context, id warren.SandboxID) (*os.File, error) {
	c, err := d.findAlive(ctx, id)
	if err != nil {
		return nil, err
	}
	netns, err := namespaceOf(c)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := d.findAlive(ctx, id); err != nil { // it has just died
			return nil, err
		}
		return nil, fmt.Errorf("the container's processes are not to be seen from here, so that it can have no network card; run Warren in the process namespace of the engine's host, or choose policy none: %w", errors.ErrUnsupported)
	}
	return netns, err
}

// namespaceOf finds the network namespace of a running container among the processes of this machine. The engine names its first process
// by the number that it has for the engine, which may be another one's here: what counts is the control group, whose name is the container's.
func namespaceOf(c *container.InspectResponse) (*os.File, error) {
	if len(c.ID) < 64 {
		return nil, fmt.Errorf("the engine says that %q is a container's id", c.ID)
	}
	if f, err := processNamespace(strconv.Itoa(c.State.Pid), c.ID); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			continue
		}
		if f, err := processNamespace(name, c.ID); err == nil || !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
	return nil, fs.ErrNotExist
}

// processNamespace opens the network namespace of a process, if that is the first of a container; else it returns [fs.ErrNotExist].
func processNamespace(pid, id string) (*os.File, error) {
	// What is opened below is of one process, also when its number becomes another's.
	dir, err := os.OpenRoot(filepath.Join("/proc", pid))
	if err != nil {
		return nil, fs.ErrNotExist
	}
	defer dir.Close()
	groups, err := dir.ReadFile("cgroup")
	if err != nil || !inGroup(string(groups), id) {
		return nil, fs.ErrNotExist
	}
	status, err := dir.ReadFile("status")
	if err != nil || !isFirst(string(status)) {
		return nil, fs.ErrNotExist
	}
	at, err := dir.Open(".")
	if err != nil {
		return nil, fs.ErrNotExist
	}
	defer at.Close()
	fd, err := unix.Openat(int(at.Fd()), "ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("open the container's network namespace: %w", err)
	}
	netns := os.NewFile(uintptr(fd), "network namespace")
	// Nothing is ever made in the host's own.
	own, err := os.Stat("/proc/self/ns/net")
	if err == nil {
		var its os.FileInfo
		if its, err = netns.Stat(); err == nil && os.SameFile(own, its) {
			err = fmt.Errorf("the container has the network of this process: %w", errors.ErrUnsupported)
		}
	}
	if err != nil {
		netns.Close()
		return nil, err
	}
	return netns, nil
}

// inGroup says whether the text of a process's control groups has that of a container in it.
func inGroup(text, id string) bool {
	for line := range strings.Lines(text) {
		_, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "/")
		if !ok {
			continue
		}
		if base := path.Base(name); base == id || base == "docker-"+id+".scope" {
			return true
		}
	}
	return false
}

// isFirst says whether a process is the first of a process namespace that is not this machine's, by the text of its status.
func isFirst(text string) bool {
	for line := range strings.Lines(text) {
		if numbers, ok := strings.CutPrefix(line, "NSpid:"); ok {
			list := strings.Fields(numbers)
			return len(list) > 1 && list[len(list)-1] == "1"
		}
	}
	return false
}
