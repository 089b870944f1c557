//go:build linux

package gateway

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/warren-sandbox/warren/internal/policy"
)

// A sandbox that asks for an allowed name gets an address that stands for the name and exists nowhere else. A flow to it says
// which name is meant, whatever the protocol; the gateway looks the real address up itself when it dials.

// slots is how many names a sandbox can have at a time.
const slots = 65536

// firstSlot leaves room for the card's own addresses.
const firstSlot = 256

// slot4 and slot6 are the first address of each family; a slot is added to them.
var (
	slot4 = binary.BigEndian.Uint32(netip.MustParseAddr("198.18.0.0").AsSlice())
	slot6 = netip.MustParseAddr("fd77:6172:7265:6e:1::")
)

// names are those that a sandbox has been given addresses for.
type names struct {
	mu     sync.Mutex
	bySlot map[uint32]policy.Host
	byName map[policy.Host]uint32
}

func newNames() *names {
	return &names{bySlot: map[uint32]policy.Host{}, byName: map[policy.Host]uint32{}}
}

// slotOf returns the slot that a name is looked for first: the same one at all times, so that a gateway that was
// started again gives the names it is asked for the addresses they had.
func slotOf(h policy.Host) uint32 {
	sum := sha256.Sum256([]byte(h))
	return firstSlot + binary.BigEndian.Uint32(sum[:])%(slots-firstSlot)
}

// add gives a name its addresses. It returns false when all are taken.
func (n *names) add(h policy.Host) (v4, v6 netip.Addr, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	slot, ok := n.byName[h]
	if !ok {
		if len(n.bySlot) >= (slots-firstSlot)/2 {
			return v4, v6, false
		}
		for slot = slotOf(h); ; slot++ {
			if slot == slots {
				slot = firstSlot
			}
			if _, taken := n.bySlot[slot]; !taken {
				break
			}
		}
		n.bySlot[slot], n.byName[h] = h, slot
	}
	v4, v6 = addresses(slot)
	return v4, v6, true
}

// find returns the name that an address stands for. synthetic says that the address is one of those that stand for names, taken or not.
func (n *names) find(a netip.Addr) (h policy.Host, synthetic bool) {
	slot, ok := slotAt(a)
	if !ok {
		return "", false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.bySlot[slot], true
}

// copyTo gives another sandbox the same names at the same addresses: it goes on from a memory in which they may be.
func (n *names) copyTo(o *names) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	for slot, h := range n.bySlot {
		o.bySlot[slot], o.byName[h] = h, slot
	}
}

func addresses(slot uint32) (v4, v6 netip.Addr) {
	var b4 [4]byte
	binary.BigEndian.PutUint32(b4[:], slot4+slot)
	b6 := slot6.As16()
	binary.BigEndian.PutUint32(b6[12:], slot)
	return netip.AddrFrom4(b4), netip.AddrFrom16(b6)
}

func slotAt(a netip.Addr) (uint32, bool) {
	if a.Is4() {
		b := a.As4()
		slot := binary.BigEndian.Uint32(b[:]) - slot4
		return slot, slot < 2*slots
	}
	b, first := a.As16(), slot6.As16()
	if [12]byte(b[:12]) != [12]byte(first[:12]) {
		return 0, false
	}
	return binary.BigEndian.Uint32(b[12:]), true
}
