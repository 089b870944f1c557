//go:build linux

package boot

import (
	"io"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
)

// copier reads the pages of an image into the files in which a sandbox's memory is. Read into mappings of these, each page is asked for by a
// fault of its own, cleared, and mapped into the sentry, which looks at few of them: 2.2 MB took 9 ms of two processors.
type copier struct {
	fd      int
	jobs    chan copyJob
	done    chan stateio.Completion
	workers sync.WaitGroup
	// into are our own descriptors of the files, which may be closed while something is still copied.
	into []int
}

type copyJob struct {
	id   int
	off  int64
	into int
	frs  []memmap.FileRange
}

const (
	copyBytes    = 256 << 10 // of a job
	copyParallel = 128       // jobs
	copyBuffer   = 64 << 10  // is read at a time, and still in the processor's cache when it is written
)

// newCopier returns a reader of a file of pages, whose descriptor it owns.
func newCopier(fd int32) stateio.AsyncReader {
	c := &copier{fd: int(fd), jobs: make(chan copyJob, copyParallel), done: make(chan stateio.Completion, copyParallel)}
	for range runtime.NumCPU() {
		c.workers.Go(c.work)
	}
	return c
}

func (c *copier) Close() error {
	close(c.jobs)
	c.workers.Wait()
	for _, fd := range c.into {
		unix.Close(fd)
	}
	return unix.Close(c.fd)
}

func (*copier) MaxReadBytes() uint64            { return copyBytes }
func (*copier) MaxRanges() int                  { return copyBytes >> 12 } // a page each
func (*copier) MaxParallel() int                { return copyParallel }
func (*copier) NeedRegisterDestinationFD() bool { return true }

func (c *copier) RegisterDestinationFD(fd int32, _ uint64, _ []stateio.ClientFileRangeSetting) (stateio.DestinationFile, error) {
	own, err := unix.Dup(int(fd)) // which is what the sentry's filter lets it do
	if err != nil {
		return nil, err
	}
	c.into = append(c.into, own)
	return own, nil
}

func (c *copier) AddRead(id int, off int64, into stateio.DestinationFile, fr memmap.FileRange, _ []byte) {
	c.jobs <- copyJob{id, off, into.(int), []memmap.FileRange{fr}}
}

func (c *copier) AddReadv(id int, off int64, _ uint64, into stateio.DestinationFile, frs []memmap.FileRange, _ []unix.Iovec) {
	c.jobs <- copyJob{id, off, into.(int), frs}
}

func (c *copier) Wait(cs []stateio.Completion, least int) ([]stateio.Completion, error) {
	for ; least > 0; least-- {
		cs = append(cs, <-c.done)
	}
	for {
		select {
		case d := <-c.done:
			cs = append(cs, d)
		default:
			return cs, nil
		}
	}
}

func (c *copier) work() {
	buf := make([]byte, copyBuffer)
	for j := range c.jobs {
		n, err := c.copy(j, buf)
		c.done <- stateio.Completion{ID: j.id, N: n, Err: err}
	}
}

// copy returns how much it has copied, and why that is not all. What it reads lies together, and what it writes does not.
func (c *copier) copy(j copyJob, buf []byte) (total uint64, err error) {
	var ready []byte // has been read and not been written
	left := uint64(0)
	for _, fr := range j.frs {
		left += fr.Length()
	}
	for _, fr := range j.frs {
		for fr.Start < fr.End {
			if len(ready) == 0 {
				ready = buf[:min(uint64(len(buf)), left)]
				n, err := again(func() (int, error) { return unix.Pread(c.fd, ready, j.off) })
				if err == nil && n == 0 {
					err = io.EOF
				}
				if err != nil {
					return total, err
				}
				ready = ready[:n]
				j.off += int64(n)
				left -= uint64(n)
			}
			n, err := again(func() (int, error) {
				return unix.Pwrite(j.into, ready[:min(uint64(len(ready)), fr.Length())], int64(fr.Start))
			})
			if err == nil && n == 0 {
				err = io.ErrShortWrite
			}
			if err != nil {
				return total, err
			}
			ready = ready[n:]
			fr.Start += uint64(n)
			total += uint64(n)
		}
	}
	return total, nil
}

func again(do func() (int, error)) (int, error) {
	for {
		if n, err := do(); err != unix.EINTR {
			return n, err
		}
	}
}

var _ = newCopier // whose caller is gVisor's
