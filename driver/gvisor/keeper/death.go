//go:build linux

package keeper

import (
	"fmt"
	"net"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/container"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/internal/message"
)

// The reasons of driver.Exit.
const (
	reasonOOM    = "oom"
	reasonKilled = "killed"
	reasonExited = "exited"
	reasonLost   = "lost"
)

// watchDeath waits in the background for the end of a sandbox's process.
func (k *Keeper) watchDeath(s *sandbox) error {
	fd, err := unix.PidfdOpen(s.meta.Sandbox.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		// It is gone already.
		go k.bury(s, k.exitOf(s, -1, -1))
		return nil
	}
	gofer, err := unix.PidfdOpen(s.meta.Gofer.PID, 0)
	if err != nil {
		gofer = -1
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	rc, err := f.SyscallConn()
	if err != nil {
		f.Close()
		unix.Close(gofer)
		return err
	}
	go func() {
		defer f.Close()
		defer unix.Close(gofer)
		rc.Read(func(fd uintptr) bool {
			return poll(int(fd), unix.POLLIN, 0) != 0
		})
		k.bury(s, k.exitOf(s, fd, gofer))
	}()
	return nil
}

// poll waits for so many milliseconds and returns what has come of a descriptor. A signal, of which Go's runtime sends itself some, does
// not cut it short: who had "nothing yet" of one would then wait for an event that has been.
func poll(fd int, events int16, timeout int) int16 {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		switch n, err := unix.Poll(p, timeout); {
		case err == unix.EINTR:
		case err != nil || n == 0:
			return 0
		default:
			return p[0].Revents
		}
	}
}

// exitOf finds out how a sandbox ended, from the descriptors of its two processes; -1 is for one that is unknown.
func (k *Keeper) exitOf(s *sandbox, pidfd, gofer int) *protocol.Exit {
	e := &protocol.Exit{Time: time.Now().UTC()}
	ws, known := exitStatus(pidfd)
	if !known && pidfd >= 0 {
		ws, known = s.meta.Sandbox.zombie()
	}
	s.mu.Lock()
	oom := s.outOfMemory || s.group.oomKills() > 0
	s.mu.Unlock()
	switch {
	case oom:
		e.Reason = reasonOOM
		e.Message = fmt.Sprintf("killed: out of memory (limit %s and %s for the sandbox's kernel)",
			size(s.meta.Limits.Memory), size(memoryHeadroom(s.meta.Limits.Memory)))
	case !known && pidfd < 0:
		e.Reason, e.Message = reasonLost, "it ended while no keeper ran, so how it did is not known"
	case !known:
		e.Reason, e.Message = reasonLost, "the kernel tells how it ended to the keeper that had started it alone, which is gone"
	case ws.Signaled():
		e.Reason, e.Message = reasonKilled, fmt.Sprintf("the sandbox's kernel was killed by signal %d (%s)", int(ws.Signal()), unix.SignalName(ws.Signal()))
	case killed(gofer):
		// Without its file server the sandbox's kernel gives up and exits.
		e.Reason, e.Message = reasonKilled, "the sandbox's file server was killed"
	default:
		e.Reason, e.Message = reasonExited, fmt.Sprintf("the guest exited with status %d", ws.ExitStatus())
	}
	return e
}

// killed says whether a signal ended the gofer. By itself it ends a little after the sandbox's process.
func killed(gofer int) bool {
	if gofer < 0 {
		return false
	}
	if poll(gofer, unix.POLLIN, 2000) == 0 {
		return false
	}
	ws, known := exitStatus(gofer)
	return known && ws.Signaled()
}

func size(n int64) string {
	if n%(1<<30) == 0 {
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// exitStatus asks for the status of an ended process without reaping it, which gVisor does. For a process that
// is no child, started by an earlier keeper, the kernel tells since Linux 6.15 when init has reaped it.
func exitStatus(pidfd int) (ws unix.WaitStatus, known bool) {
	if pidfd < 0 {
		return 0, false
	}
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PIDFD, pidfd, &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
	if err == nil {
		// si_pid, si_uid and si_status follow the aligned head.
		raw := (*[128]byte)(unsafe.Pointer(&info))
		status := *(*int32)(unsafe.Pointer(&raw[24]))
		const cldExited = 1
		if info.Code == cldExited {
			return unix.WaitStatus(status << 8), true
		}
		return unix.WaitStatus(status), true
	}
	const pidfdInfoExit = 1 << 3
	type pidfdInfo struct {
		mask, cgroup uint64
		ids          [11]uint32
		exit         int32
	}
	const pidfdGetInfo = 3<<30 | 64<<16 | 0xff<<8 | 11
	for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		i := pidfdInfo{mask: pidfdInfoExit}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(pidfd), pidfdGetInfo, uintptr(unsafe.Pointer(&i)))
		if errno == unix.ENOTTY || errno == unix.EINVAL {
			break
		}
		if errno == 0 && i.mask&pidfdInfoExit != 0 {
			return unix.WaitStatus(i.exit), true
		}
	}
	return 0, false
}

// bury records a death, tells of it, and removes what the processes held.
func (k *Keeper) bury(s *sandbox, e *protocol.Exit) {
	s.mu.Lock()
	if s.deleting || s.meta.State == stateDead {
		s.mu.Unlock()
		return
	}
	s.meta.State, s.meta.Exit = stateDead, e
	err := s.meta.save()
	ch := s.channel
	s.mu.Unlock()
	if err != nil {
		k.log.Error("record a death", "sandbox", s.id, "error", err)
	}
	close(s.died)
	k.announce(protocol.Status{ID: s.id, State: stateDead, Exit: e})
	k.log.Info("sandbox ended", "sandbox", s.id, "reason", e.Reason, "message", e.Message)
	if ch != nil {
		ch.session.Close()
	}
	s.work.Lock()
	defer s.work.Unlock()
	if err := k.endRuntime(s); err != nil {
		k.log.Error("clean up after a death", "sandbox", s.id, "error", err)
	}
}

// watcher is a client that wants to know of deaths.
type watcher struct {
	wake chan struct{}
	news []protocol.Status // in order; not yet sent
}

// announce tells the watchers of a death.
func (k *Keeper) announce(st protocol.Status) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for w := range k.watchers {
		w.news = append(w.news, st)
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// watch sends the dead of the moment and then each death, a line each, until the client goes.
func (k *Keeper) watch(c *net.UnixConn) {
	w := &watcher{wake: make(chan struct{}, 1)}
	k.mu.Lock()
	k.watchers[w] = true
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.watchers, w)
	}()
	first := &protocol.Response{OK: true}
	for _, st := range k.list() {
		if st.State == stateDead {
			first.Statuses = append(first.Statuses, st)
		}
	}
	if message.Write(c, first) != nil {
		return
	}
	ctx, cancel := untilClosed(c)
	defer cancel()
	for {
		k.mu.Lock()
		news := w.news
		w.news = nil
		k.mu.Unlock()
		if len(news) > 0 && message.Write(c, &protocol.Response{OK: true, Statuses: news}) != nil {
			return
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return
		case <-k.stopped:
			return
		}
	}
}

// takeOver finds the sandboxes of earlier keepers.
func (k *Keeper) takeOver() error {
	dirs, err := os.ReadDir(sandboxesDir)
	if err != nil {
		return err
	}
	done := make(chan struct{})
	close(done)
	var half []*sandbox
	for _, d := range dirs {
		if validID(d.Name()) != nil {
			continue
		}
		s := &sandbox{id: d.Name(), cancel: func() {}, created: done, died: make(chan struct{}), attach: make(chan struct{}, 1), meta: *loadMeta(d.Name())}
		if s.group = s.meta.Group; s.group == nil {
			s.group = k.cgroups.group(s.id)
		}
		if s.meta.Range >= 0 {
			k.ranges[s.meta.Range] = true
		}
		k.sandboxes[s.id] = s
		switch s.meta.State {
		case stateDead:
			close(s.died)
		case stateRunning:
			k.resume(s)
		default:
			half = append(half, s)
		}
	}
	// A create that its keeper did not survive has failed for its caller; nothing of it may be left.
	for _, s := range half {
		if err := k.destroy(s); err != nil {
			k.log.Error("undo a create cut short", "sandbox", s.id, "error", err)
		}
	}
	return nil
}

// resume takes a running sandbox over, or records that it has died meanwhile.
func (k *Keeper) resume(s *sandbox) {
	cont, err := container.Load(gvisorRoot, container.FullID{SandboxID: s.meta.container(), ContainerID: s.meta.container()},
		container.LoadOpts{Exact: true, SkipCheck: true})
	if err == nil {
		// A number that the kernel has given to another process must never get a signal from us.
		if !s.meta.Sandbox.alive() {
			cont.Sandbox.Pid.Store(0)
		}
		if !s.meta.Gofer.alive() {
			cont.GoferPid.Store(0)
		}
		s.cont, s.kernel = cont, cont.Sandbox
	} else {
		k.log.Error("load a sandbox", "sandbox", s.id, "error", err)
	}
	if err != nil || !s.meta.Sandbox.alive() {
		k.bury(s, k.exitOf(s, -1, -1))
		return
	}
	if err := k.watchDeath(s); err != nil {
		k.log.Error("watch a sandbox", "sandbox", s.id, "error", err)
	}
	if err := k.guardMemory(s); err != nil {
		k.log.Error("watch a sandbox's memory", "sandbox", s.id, "error", err)
	}
	k.log.Info("took over", "sandbox", s.id)
}
