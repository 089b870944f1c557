//go:build linux

package keeper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The guest keeps its processes below the limit by looking at their use from time to time. A program that allocates
// faster than the guest looks reaches the limit of the control group, where the kernel would kill the sandbox as a
// whole: to it the sandbox is one program. On version 1 of control groups the keeper can be asked instead. The kernel
// then stops whoever needs memory, the keeper lends some, has the guest kill its largest process, and takes the loan
// back. A sandbox whose guest does not do so in time is ended. The kernel's own choice would be one of the processes that
// share the sandbox's memory, whose end frees nothing.

const (
	// oomTime is how long the guest may take until the memory is free.
	oomTime = 5 * time.Second
	// maxLoans bounds what is lent at a time. On a busy host the guest may wait for the processor while the program that runs away has it.
	maxLoans = 8
	// oomSlack is what may be left when somebody waits for memory: a large page, and what each processor has set aside.
	oomSlack = 8 << 20
	// oomLead is what is left of a loan when the next one is due, as long as the guest has not killed: whoever asks the kernel for a thread, or a process, and not
	// for memory does not wait at the limit, but is refused, and for want of one the sandbox ends.
	oomLead = 24 << 20
	// oomPoll is how often what is left is looked at.
	oomPoll = 2 * time.Millisecond
)

// oomLoan is what is lent to let the guest act.
func oomLoan(limit int64) int64 { return 32<<20 + limit/8 }

// oomGuard watches one control group.
type oomGuard struct {
	dir   string
	event *os.File
	once  sync.Once
}

// guardMemory starts to watch a sandbox's memory. On a host without version 1 of the memory controller it does
// nothing, and the kernel decides.
func (k *Keeper) guardMemory(s *sandbox) error {
	dir := s.group["memory"]
	if dir == "" {
		return nil
	}
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return err
	}
	defer control.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	g := &oomGuard{dir: dir, event: os.NewFile(uintptr(fd), "oom")}
	line := fmt.Sprintf("%d %d", fd, control.Fd())
	if err := os.WriteFile(filepath.Join(dir, "cgroup.event_control"), []byte(line), 0); err != nil {
		g.close()
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "memory.oom_control"), []byte("1"), 0); err != nil {
		g.close()
		return err
	}
	s.mu.Lock()
	s.guard = g
	s.mu.Unlock()
	go func() {
		defer g.close()
		var count [8]byte
		for {
			// What happened before the watch began, or before this keeper, makes no event.
			for g.underOOM() {
				if err := k.relieve(s, g, k.askGuest); err != nil {
					k.log.Warn("the guest did not free memory; the sandbox is ended", "sandbox", s.id, "error", err)
					s.mu.Lock()
					s.outOfMemory = true
					s.mu.Unlock()
					kill(s.meta.Sandbox)
					return
				}
			}
			if _, err := g.event.Read(count[:]); err != nil {
				return
			}
		}
	}()
	return nil
}

func (g *oomGuard) close() {
	if g != nil {
		g.once.Do(func() { g.event.Close() })
	}
}

func (g *oomGuard) underOOM() bool {
	return readKey(filepath.Join(g.dir, "memory.oom_control"), "under_oom") == 1
}

func (g *oomGuard) usage() int64 { return readInt(filepath.Join(g.dir, "memory.usage_in_bytes")) }

// relieve has the guest kill its largest process, with memory lent for the time. The program that runs away uses the
// loan too, and once it has all of it the kernel of the sandbox stands still again, so there are several.
func (k *Keeper) relieve(s *sandbox, g *oomGuard, ask func(*sandbox) error) error {
	limit := s.meta.Limits.Memory + memoryHeadroom(s.meta.Limits.Memory)
	lent := limit
	setLimit := func(n int64) error {
		return os.WriteFile(filepath.Join(g.dir, "memory.limit_in_bytes"), []byte(strconv.FormatInt(n, 10)), 0)
	}
	k.log.Info("out of memory; the guest is asked to kill its largest process", "sandbox", s.id)
	start := time.Now()
	loans := int64(0)
	lend := func() error {
		if loans == maxLoans {
			return fmt.Errorf("%d loans are used up", loans)
		}
		loans++
		lent = limit + loans*oomLoan(s.meta.Limits.Memory)
		return setLimit(lent)
	}
	if err := lend(); err != nil {
		return err
	}
	answer := make(chan error, 1)
	go func() { answer <- ask(s) }()
	answered := false
	var lastErr error
	for deadline := start.Add(oomTime); time.Now().Before(deadline); {
		select {
		case err := <-answer:
			if err != nil {
				return err
			}
			answered = true
			answer = nil
		case <-s.died:
			return nil
		case <-time.After(oomPoll):
		}
		// Whoever waits for memory says so until it has run again, which on a busy host takes longer than to look: only what is used up counts.
		if used := g.usage(); !answered && used > lent-oomLead || used > lent-oomSlack && g.underOOM() {
			if err := lend(); err != nil {
				return err
			}
			continue
		}
		if !answered {
			continue
		}
		// A lower limit than what is in use makes the kernel reclaim, and fails while it cannot.
		if lastErr = setLimit(limit); lastErr == nil || errors.Is(lastErr, unix.ENOENT) {
			k.log.Info("memory is freed", "sandbox", s.id, "loans", loans, "took", time.Since(start))
			return nil
		}
	}
	return fmt.Errorf("memory was not freed in time: %w", lastErr)
}

// askGuest calls POST /warren/oom on the trusted channel.
func (k *Keeper) askGuest(s *sandbox) error {
	ctx, cancel := context.WithTimeout(context.Background(), oomTime)
	defer cancel()
	ch, stream, err := k.dial(ctx, s.id, guestPort)
	if err != nil {
		return err
	}
	defer ch.reset(stream)
	stream.SetDeadline(time.Now().Add(oomTime))
	if _, err := fmt.Fprint(stream, "POST /warren/oom HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(stream), nil)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("guest answered %s", resp.Status)
	}
	return nil
}
