//go:build linux

// Package tun makes network devices whose packets a process reads and writes (TUN), in network namespaces of others. They carry bare
// IP packets: there is no link below them on which anybody could pretend to be somebody else.
//
// A device stays when nobody has it open, until its namespace ends: whoever served it may be killed, and the next one opens it again. What
// is sent over it meanwhile is lost. At most one descriptor is attached to a device at a time. A descriptor keeps the namespace alive.
package tun

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Device is what a device is to be like.
type Device struct {
	// Name of at most 15 characters.
	Name string
	MTU  uint32
	// Addrs are its addresses. All others of their families are reached through it. Those of IPv6 are left out where the kernel has no IPv6.
	Addrs []netip.Addr
}

// ErrBusy says that somebody has a device open.
var ErrBusy = errors.New("the device is in use")

// control is the file that devices are made with.
const control = "/dev/net/tun"

// queue is how many packets a device holds for whoever reads it. At 64 KiB each that is what one sandbox can make the kernel keep.
const queue = 256

// Available says why devices cannot be made on this host, nil if they can.
func Available() error {
	fd, err := unix.Open(control, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: control, Err: err}
	}
	unix.Close(fd)
	return nil
}

// Make makes a device in a network namespace, with its addresses and routes, and takes it into use. Nobody has it open then. One that has its
// name already gives [fs.ErrExist], and stays as it is; after an error nothing is left of the new one.
func Make(netns *os.File, d Device) error {
	return Within(netns, func() error {
		f, err := attach(d.Name, unix.IFF_TUN_EXCL)
		if errors.Is(err, ErrBusy) {
			return fmt.Errorf("make device %s: %w", d.Name, fs.ErrExist)
		}
		if err != nil {
			return err
		}
		// It goes with its last descriptor until it is told to stay.
		defer f.Close()
		fd := int(f.Fd())
		// Who may attach to it when nobody is: nobody of a user namespace, whatever files a container may be given.
		if err := unix.IoctlSetInt(fd, unix.TUNSETOWNER, 0); err != nil {
			return fmt.Errorf("give the device to root: %w", err)
		}
		if err := configure(d); err != nil {
			return err
		}
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
			return fmt.Errorf("keep the device: %w", err)
		}
		return nil
	})
}

// Open attaches to a device of a network namespace that Make has made. It returns [fs.ErrNotExist] if there is none and [ErrBusy] while
// another has it open.
func Open(netns *os.File, name string) (f *os.File, err error) {
	err = Within(netns, func() error {
		// Attaching to what is not there would make it.
		if _, err := index(name); err != nil {
			return err
		}
		if f, err = attach(name, 0); err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(name)
		if err == nil {
			err = unix.IoctlIfreq(int(f.Fd()), unix.TUNGETIFF, ifr)
		}
		if err == nil && ifr.Uint16()&unix.IFF_PERSIST == 0 {
			err = fmt.Errorf("device %s: %w", name, fs.ErrNotExist) // it went at this very moment, and this is another
		}
		if err == nil {
			err = settle(name)
		}
		if err != nil {
			f.Close()
			f = nil
		}
		return err
	})
	return f, err
}

// Is says whether a file is a device that carries bare IP packets, and is attached to.
func Is(f *os.File) bool {
	var st unix.Stat_t
	// Only of a character device is the number below a question to it.
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return false
	}
	ifr, err := unix.NewIfreq("")
	if err != nil || unix.IoctlIfreq(int(f.Fd()), unix.TUNGETIFF, ifr) != nil {
		return false
	}
	const bare = unix.IFF_TUN | unix.IFF_NO_PI
	return ifr.Uint16()&(unix.IFF_TUN|unix.IFF_TAP|unix.IFF_NO_PI|unix.IFF_VNET_HDR) == bare
}

// Within calls f in a network namespace. Sockets that f makes stay there; goroutines that it starts are elsewhere.
func Within(netns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// A thread that cannot go back ends with this goroutine. The first of the process would stay, and keep the namespace; so all go back.
		runtime.LockOSThread()
		own, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(own)
			err = unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET)
		}
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		err = f()
		if unix.Setns(own, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// attach opens a device of this thread's namespace, or makes it.
func attach(name string, flags uint16) (*os.File, error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil || name == "" {
		return nil, fmt.Errorf("%q is no name of a network device", name)
	}
	// Whatever is opened belongs to the namespace of that instant.
	fd, err := unix.Open(control, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: control, Err: err}
	}
	f := os.NewFile(uintptr(fd), "card")
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		f.Close()
		if err == unix.EBUSY {
			err = ErrBusy
		}
		return nil, fmt.Errorf("attach to device %s: %w", name, err)
	}
	return f, nil
}

// settle waits for the kernel to take a device into use again that somebody has attached to. What is sent before is lost.
func settle(name string) error {
	for range settleTries {
		var flags uint16
		if err := set(name, "flags", unix.SIOCGIFFLAGS, func(*unix.Ifreq) {}, func(r *unix.Ifreq) { flags = r.Uint16() }); err != nil {
			return err
		}
		if flags&unix.IFF_RUNNING != 0 {
			break
		}
		time.Sleep(settleWait)
	}
	// The lock that this takes is held while that is done.
	return setQueue(name)
}

// It is done in the background, at once. What takes longer is no reason not to serve the device.
const (
	settleTries = 500
	settleWait  = 2 * time.Millisecond
)

// set changes or asks for something of a device of this thread's namespace.
func set(name, what string, request uint, put, got func(*unix.Ifreq)) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq(name)
	if err != nil || name == "" {
		return fmt.Errorf("%q is no name of a network device", name)
	}
	put(ifr)
	if err := unix.IoctlIfreq(s, request, ifr); err != nil {
		if err == unix.ENODEV {
			err = fs.ErrNotExist
		}
		return fmt.Errorf("device %s: %s: %w", name, what, err)
	}
	if got != nil {
		got(ifr)
	}
	return nil
}

func setQueue(name string) error {
	return set(name, "queue", unix.SIOCSIFTXQLEN, func(r *unix.Ifreq) { r.SetUint32(queue) }, nil)
}

// index returns the number of a device of this thread's namespace.
func index(name string) (i uint32, err error) {
	err = set(name, "number", unix.SIOCGIFINDEX, func(*unix.Ifreq) {}, func(r *unix.Ifreq) { i = r.Uint32() })
	return i, err
}

// configure takes a device of this thread's namespace into use.
func configure(d Device) error {
	i, err := index(d.Name)
	if err != nil {
		return err
	}
	six := true
	// No address of its own making, and no router but ours: of what it did not say, a device says nothing.
	for _, setting := range [][2]string{{"disable_ipv6", "0"}, {"addr_gen_mode", "1"}, {"accept_ra", "0"}} {
		err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", d.Name, setting[0]), []byte(setting[1]), 0)
		if errors.Is(err, fs.ErrNotExist) {
			six = false
			break
		}
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
	}
	if err := set(d.Name, "MTU", unix.SIOCSIFMTU, func(r *unix.Ifreq) { r.SetUint32(d.MTU) }, nil); err != nil {
		return err
	}
	if err := setQueue(d.Name); err != nil {
		return err
	}
	if err := set(d.Name, "switch on", unix.SIOCSIFFLAGS, func(r *unix.Ifreq) { r.SetUint16(unix.IFF_UP | unix.IFF_NOARP) }, nil); err != nil {
		return err
	}
	for _, a := range d.Addrs {
		if a.Is6() && !six {
			continue
		}
		if err := ask(newAddress(i, a)); err != nil {
			return fmt.Errorf("device %s: address %s: %w", d.Name, a, err)
		}
		if err := ask(newRoute(i, a)); err != nil {
			return fmt.Errorf("device %s: route from %s: %w", d.Name, a, err)
		}
	}
	return nil
}

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// newAddress is the request that gives a device an address.
func newAddress(index uint32, a netip.Addr) []byte {
	b := []byte{family(a), byte(a.BitLen()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	b = binary.NativeEndian.AppendUint32(b, index)
	b = attribute(b, unix.IFA_LOCAL, a.AsSlice())
	return header(unix.RTM_NEWADDR, attribute(b, unix.IFA_ADDRESS, a.AsSlice()))
}

// newRoute is the request that has everything of a's family go through a device.
func newRoute(index uint32, a netip.Addr) []byte {
	scope := byte(unix.RT_SCOPE_LINK)
	if a.Is6() {
		scope = unix.RT_SCOPE_UNIVERSE
	}
	b := []byte{family(a), 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, scope, unix.RTN_UNICAST, 0, 0, 0, 0}
	b = attribute(b, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, index))
	return header(unix.RTM_NEWROUTE, attribute(b, unix.RTA_PREFSRC, a.AsSlice()))
}

// attribute appends an attribute to a request, whose length is a multiple of 4.
func attribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return append(b, value...) // all of ours are multiples of 4
}

// header completes a request.
func header(kind uint16, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	b = append(b, make([]byte, 8)...) // number and port: there is one request on each socket
	return append(b, body...)
}

// ask sends a request to the kernel for this thread's namespace and waits for the answer.
func ask(request []byte) error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if err := unix.Sendto(s, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	b := make([]byte, 4096)
	n, _, err := unix.Recvfrom(s, b, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_ERROR {
		return errors.New("the kernel's answer is none")
	}
	if code := -int32(binary.NativeEndian.Uint32(b[unix.SizeofNlMsghdr:])); code != 0 {
		return unix.Errno(code)
	}
	return nil
}
