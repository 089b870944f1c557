//go:build linux

package boot

import (
	"io"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/state/stateio"
)

// copier reads the pages of an image into the files in which a sandbox's memory is. Read into mappings of these, each page is asked for by a
// fault of its own, cleared, and mapped into the sentry, which looks at few of them: 2.2 MB took 9 ms of two processors. Written, it is given its
// pages for half of that, but by one at a time: who would have to wait for another reads into the mapping all the same where there is much to copy.
type copier struct {
	fd      int
	jobs    chan copyJob
	done    chan stateio.Completion
	workers sync.WaitGroup
	writing sync.Mutex // is held by whoever writes
	// into are our own descriptors of the files, which may be closed while something is still copied.
	into []int
}

type copyJob struct {
	id   int
	off  int64
	into int
	frs  []memmap.FileRange
	mem  []unix.Iovec // where frs are mapped
}

const (
	copyBytes    = 256 << 10 // of a job
	copyParallel = 128       // jobs
	copyBuffer   = 64 << 10  // is read at a time, and still in the processor's cache when it is written
	copyLittle   = 8 << 20   // is written in any case: what is mapped takes memory for that too
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

func (c *copier) AddRead(id int, off int64, into stateio.DestinationFile, fr memmap.FileRange, mem []byte) {
	v := unix.Iovec{Base: unsafe.SliceData(mem)}
	v.SetLen(len(mem))
	c.jobs <- copyJob{id, off, into.(int), []memmap.FileRange{fr}, []unix.Iovec{v}}
}

func (c *copier) AddReadv(id int, off int64, _ uint64, into stateio.DestinationFile, frs []memmap.FileRange, mem []unix.Iovec) {
	c.jobs <- copyJob{id, off, into.(int), frs, mem}
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

// copy returns how much it has copied, and why that is not all.
func (c *copier) copy(j copyJob, buf []byte) (uint64, error) {
	if j.off < copyLittle {
		c.writing.Lock()
	} else if !c.writing.TryLock() {
		n, err := c.fill(j)
		if err != unix.EFAULT {
			return n, err
		}
		c.writing.Lock() // there is no memory for it, of which only who writes is told more
	}
	defer c.writing.Unlock()
	return c.write(j, buf)
}

// fill reads into the mapping.
func (c *copier) fill(j copyJob) (total uint64, err error) {
	for _, v := range j.mem {
		for b := unsafe.Slice(v.Base, v.Len); len(b) > 0; {
			n, err := c.read(b, j.off+int64(total))
			if err != nil {
				return total, err
			}
			b = b[n:]
			total += uint64(n)
		}
	}
	return total, nil
}

// write reads what lies together, and writes it to where it does not.
func (c *copier) write(j copyJob, buf []byte) (total uint64, err error) {
	var ready []byte // has been read and not been written
	left := uint64(0)
	for _, fr := range j.frs {
		left += fr.Length()
	}
	for _, fr := range j.frs {
		for fr.Start < fr.End {
			if len(ready) == 0 {
				ready = buf[:min(uint64(len(buf)), left)]
				n, err := c.read(ready, j.off)
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

// read reads some of the pages.
func (c *copier) read(b []byte, off int64) (int, error) {
	n, err := again(func() (int, error) { return unix.Pread(c.fd, b, off) })
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}

func again(do func() (int, error)) (int, error) {
	for {
		if n, err := do(); err != unix.EINTR {
			return n, err
		}
	}
}

var _ = newCopier // whose caller is gVisor's
