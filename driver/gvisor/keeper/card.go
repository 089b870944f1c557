//go:build linux

package keeper

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// cardName is that of the network card inside.
const cardName = "eth0"

// network is what gVisor is to set up in a sandbox that starts or is restored: its loopback, and its card if it has one. A file in it
// stays the caller's.
func network(spec *protocol.Spec, files []*os.File, restore bool) *boot.CreateLinksAndRoutesArgs {
	args := &boot.CreateLinksAndRoutesArgs{
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		IsRestore:     restore,
		// A copy of a running sandbox is made without its connections being cut.
		AllowConnectedOnSave: true,
	}
	if spec.Card == nil {
		return args
	}
	link := boot.FDBasedLink{
		Name: cardName, MTU: int(spec.Card.MTU), NumChannels: 1, ProcessorsPerChannel: 2,
		// Nothing is altered between two processes of one machine.
		TXChecksumOffload: true, RXChecksumOffload: true,
		QDisc: config.QDiscNone,
	}
	for _, a := range spec.Card.Addrs {
		link.Addresses = append(link.Addresses, boot.IPWithPrefix{Address: a.AsSlice(), PrefixLen: a.BitLen()})
		link.Routes = append(link.Routes, boot.Route{Destination: everywhere(a)})
	}
	args.FDBasedLinks = []boot.FDBasedLink{link}
	args.FilePayload.Files = []*os.File{files[spec.Card.Inside]}
	return args
}

// setNetwork says what a sandbox that is about to start gets.
func setNetwork(kernel *gsandbox.Sandbox, args *boot.CreateLinksAndRoutesArgs) error {
	c, err := client.ConnectTo(kernel.GetControlSocketPath())
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Call(boot.ContMgrSetNetworkArgs, args, nil)
}

// everywhere is all addresses of the family of a.
func everywhere(a netip.Addr) net.IPNet {
	n := a.BitLen() / 8
	return net.IPNet{IP: make(net.IP, n), Mask: make(net.IPMask, n)}
}

// resolvConf names the name servers.
func resolvConf(c *protocol.Card) string {
	if c == nil {
		return "# A sandbox has no network but its loopback.\n"
	}
	var b strings.Builder
	for _, a := range c.DNS {
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	return b.String()
}

// keepCard takes a copy of the outer end of a sandbox's card, which lives as long as the sandbox does.
func (s *sandbox) keepCard(outside *os.File) error {
	fd, err := unix.FcntlInt(outside.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("keep the card: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.card != nil {
		s.card.Close()
	}
	s.card = os.NewFile(uintptr(fd), "card")
	return nil
}

// dropCard lets go of the card.
func (s *sandbox) dropCard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.card != nil {
		s.card.Close()
		s.card = nil
	}
}

// cardOf returns a copy of the outer end of a sandbox's card.
func (k *Keeper) cardOf(id string) (*os.File, error) {
	s, err := k.running(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.card == nil {
		return nil, protocol.Errorf(protocol.KindState, "the card of sandbox %s is not here", id)
	}
	fd, err := unix.FcntlInt(s.card.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "card"), nil
}

// keepCardOf takes the outer end of a sandbox's card again.
func (k *Keeper) keepCardOf(id string, files []*os.File) error {
	if len(files) != 1 {
		return protocol.Errorf(protocol.KindInvalid, "a card with %d descriptors", len(files))
	}
	s, err := k.running(id)
	if err != nil {
		return err
	}
	return s.keepCard(files[0])
}
