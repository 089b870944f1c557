// Package port tells which TCP ports listen in the sandbox, from /proc/net/tcp and /proc/net/tcp6.
package port

import (
	"cmp"
	"context"
	"encoding/hex"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Port is a TCP port on which a program listens.
type Port struct {
	Addr    netip.Addr
	Port    uint16
	PID     int    // 0 where it cannot be told
	Program string // "" where it cannot be told
}

type key struct {
	addr netip.Addr
	port uint16
}

const (
	// maxTable bounds how much of a table is read.
	maxTable = 4 << 20
	stListen = "0A"
)

// listening is one line of a table.
type listening struct {
	key
	inode uint64
}

// parse reads a table of /proc/net, passing over lines it does not understand.
func parse(table string) []listening {
	var out []listening
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != stListen {
			continue
		}
		addrHex, portHex, ok := strings.Cut(f[1], ":")
		addr, okAddr := parseAddr(addrHex)
		port, err := strconv.ParseUint(portHex, 16, 16)
		if !ok || !okAddr || err != nil || port == 0 {
			continue
		}
		inode, _ := strconv.ParseUint(f[9], 10, 64) // 0 is no socket's
		out = append(out, listening{key{addr, uint16(port)}, inode})
	}
	return out
}

// parseAddr reads an address as the kernel prints it: groups of four bytes, each in the machine's order.
func parseAddr(s string) (netip.Addr, bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return netip.Addr{}, false
	}
	for i := 0; i < len(b); i += 4 {
		slices.Reverse(b[i : i+4]) // every machine this runs on is little-endian
	}
	addr, ok := netip.AddrFromSlice(b)
	return addr.Unmap(), ok
}

// List returns the ports that listen now, in order, without those to leave out.
func List(omit ...uint16) []Port {
	var all []listening
	for _, path := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		all = append(all, parse(readFile(path))...)
	}
	var out []Port
	seen := make(map[key]bool)
	inodes := make(map[uint64]int) // to the index in out
	for _, l := range all {
		if seen[l.key] || slices.Contains(omit, l.port) {
			continue
		}
		seen[l.key] = true
		if l.inode != 0 {
			inodes[l.inode] = len(out)
		}
		out = append(out, Port{Addr: l.addr, Port: l.port})
	}
	findOwners(inodes, out)
	slices.SortFunc(out, func(a, b Port) int { return cmp.Or(cmp.Compare(a.Port, b.Port), a.Addr.Compare(b.Addr)) })
	return out
}

func readFile(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, maxTable)) // what can be read counts
	return string(data)
}

// owners remembers which process holds a socket, since finding it means looking at every descriptor in the sandbox.
var owners = struct {
	sync.Mutex
	byInode map[uint64]owner
}{byInode: make(map[uint64]owner)}

type owner struct {
	pid     int
	program string
}

// findOwners fills in the processes that hold the sockets, as far as they can be seen.
func findOwners(inodes map[uint64]int, ports []Port) {
	owners.Lock()
	defer owners.Unlock()
	for inode := range owners.byInode {
		if _, ok := inodes[inode]; !ok {
			delete(owners.byInode, inode)
		}
	}
	missing := make(map[string]uint64)
	for inode := range inodes {
		if _, ok := owners.byInode[inode]; !ok {
			missing["socket:["+strconv.FormatUint(inode, 10)+"]"] = inode
		}
	}
	if len(missing) > 0 {
		scan(missing)
	}
	for inode, i := range inodes {
		o := owners.byInode[inode]
		ports[i].PID, ports[i].Program = o.pid, o.program
	}
}

// scan looks for the sockets among the descriptors of all processes. What it does not find is not looked for again.
func scan(missing map[string]uint64) {
	for _, inode := range missing {
		owners.byInode[inode] = owner{}
	}
	procs, _ := os.ReadDir("/proc")
	for _, d := range procs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		dir := "/proc/" + d.Name()
		fds, _ := os.ReadDir(dir + "/fd")
		for _, fd := range fds {
			link, err := os.Readlink(dir + "/fd/" + fd.Name())
			if err != nil {
				continue
			}
			inode, ok := missing[link]
			if !ok {
				continue
			}
			// The youngest process that holds the socket serves it, most likely; the others are its parents.
			if o := owners.byInode[inode]; pid > o.pid {
				owners.byInode[inode] = owner{pid, strings.TrimSpace(readFile(dir + "/comm"))}
			}
		}
	}
}

const (
	fastPoll = 250 * time.Millisecond
	slowPoll = time.Second
	// calmAfter polls without a change the pace slows down.
	calmAfter = 40
)

// Watch calls opened for each port that listens, ready once when those that listened at the start have been told, and
// then opened and closed as ports open and close, and idle now and then. It polls, and ends with ctx or an error.
func Watch(ctx context.Context, omit []uint16, idle time.Duration, on Events) error {
	before := make(map[key]Port)
	first, calm, lastSent := true, 0, time.Now()
	for {
		now := make(map[key]Port)
		changed := false
		for _, p := range List(omit...) {
			k := key{p.Addr, p.Port}
			now[k] = p
			if _, was := before[k]; !was {
				changed = true
				if err := on.Open(p); err != nil {
					return err
				}
			}
		}
		for k, p := range before {
			if _, is := now[k]; !is {
				changed = true
				if err := on.Close(p); err != nil {
					return err
				}
			}
		}
		before = now
		if first {
			first, changed = false, true
			if err := on.Ready(); err != nil {
				return err
			}
		}
		calm++
		if changed {
			calm, lastSent = 0, time.Now()
		} else if time.Since(lastSent) >= idle {
			lastSent = time.Now()
			if err := on.Idle(); err != nil {
				return err
			}
		}
		wait := fastPoll
		if calm > calmAfter {
			wait = slowPoll
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// Events is who is told what [Watch] sees.
type Events struct {
	Open, Close func(Port) error
	Ready, Idle func() error
}
