//go:build linux

// Package gofer is compiled as a part of gVisor's package of that name, see the program in the directory above.
package gofer

import (
	"maps"
	"sync"

	"gvisor.dev/gvisor/pkg/lisafs"
	"gvisor.dev/gvisor/pkg/sentry/checkpoint"
	"gvisor.dev/gvisor/pkg/unet"
)

// A kernel that is restored asks for the roots of its file systems, one after the other, when all of it has been read: 2 ms, most of which the
// process that answers takes to wake up and find its way. They are asked for while the kernel is read, which one processor is enough for.

// mount is the answer of a file system's server to its first question.
type mount struct {
	client *lisafs.Client
	root   lisafs.Inode
	host   int
	err    error
	done   chan struct{}
}

var mounts struct {
	sync.Mutex
	of map[int]*mount // by the descriptor of its connection
}

// MountAhead asks the servers at the other ends of these connections for their roots. The answers are for those who mount them.
func MountAhead(fds map[checkpoint.ResourceID]int) {
	mounts.Lock()
	defer mounts.Unlock()
	if mounts.of == nil {
		mounts.of = make(map[int]*mount)
	}
	asked := make(map[int]*mount)
	for _, fd := range fds {
		asked[fd] = &mount{done: make(chan struct{})}
	}
	maps.Copy(mounts.of, asked)
	go func() { // one after the other: it is one process that answers
		for fd, m := range asked {
			m.ask(fd)
			close(m.done)
		}
	}()
}

func (m *mount) ask(fd int) {
	sock, err := unet.NewSocket(fd)
	if err != nil {
		m.err = err
		return
	}
	m.client, m.root, m.host, m.err = lisafs.NewClient(sock)
}

// newClient is lisafs.NewClient, unless that was done ahead.
func newClient(fd int) (*lisafs.Client, lisafs.Inode, int, error) {
	mounts.Lock()
	m := mounts.of[fd]
	delete(mounts.of, fd)
	mounts.Unlock()
	if m == nil {
		m = &mount{}
		m.ask(fd)
	} else {
		<-m.done
	}
	return m.client, m.root, m.host, m.err
}
