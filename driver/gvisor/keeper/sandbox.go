//go:build linux

package keeper

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// sandbox is one sandbox, from the moment its create begins until it is deleted.
type sandbox struct {
	id string
	// cancel ends a create that is under way; created is closed when it has returned.
	cancel  context.CancelFunc
	created chan struct{}
	// work is held by whoever creates, buries or deletes.
	work sync.Mutex
	// still is held by whoever freezes or thaws, for as long as an image is written.
	still sync.Mutex
	cont  *container.Container

	mu       sync.Mutex
	meta     meta
	deleting bool
	channel  *channel
	kernel   *gsandbox.Sandbox // of cont, which forgets it when it is destroyed
	attach   chan struct{}     // holds a value while a channel is opened anew
	died     chan struct{}
	group    cgroup
	guard    *oomGuard
	// card is the outer end of the network card, for when whoever serves it is gone.
	card *os.File
	// outOfMemory says that the keeper ended the sandbox for memory.
	outOfMemory bool
}

func (s *sandbox) currentState() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.meta.State
}

func (s *sandbox) status() protocol.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return protocol.Status{ID: s.id, State: s.meta.State, Exit: s.meta.Exit}
}

// canceled is what a create returns that its caller gave up.
var canceled = protocol.Errorf(protocol.KindCanceled, "create was cancelled")

// create boots a sandbox. When it fails nothing of it is left.
func (k *Keeper) create(ctx context.Context, req *protocol.Request, files []*os.File) (pooled bool, err error) {
	spec := req.Spec
	if err := checkSpec(spec, len(files)); err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := k.reserve(spec, cancel)
	if err != nil {
		return false, err
	}
	defer k.calls.Done()
	defer close(s.created)
	s.work.Lock()
	defer s.work.Unlock()
	defer func() {
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			err = canceled
		}
		if derr := k.destroy(s); derr != nil {
			k.log.Error("undo a create", "sandbox", s.id, "error", derr)
			err = errors.Join(err, derr)
		}
	}()
	var img *image
	if spec.Image != nil {
		if img, err = openImage(files[*spec.Image], req.Packing.Key); err != nil {
			return false, err
		}
		if err := img.fits(k.build, k.name, spec); err != nil {
			return false, err
		}
		if img.apart() {
			if img.unpacked, err = newScratch(); err != nil {
				return false, err
			}
			defer func() {
				if cerr := img.unpacked.close(); cerr != nil {
					k.log.Error("remove an unpacked image", "sandbox", s.id, "error", cerr)
				}
			}()
		}
		s.meta.Token = img.Token
		img.verified = make(chan error, 1)
		reading, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		defer func() { stop(); <-done }()
		go func() { // while there is something to run it in
			defer close(done)
			img.verified <- img.verify(reading)
		}()
	}
	// In the order in which they came, as many at a time as there are processors.
	if err := k.starts.Acquire(ctx, 1); err != nil {
		return false, canceled
	}
	defer k.starts.Release(1)
	t0 := time.Now()
	if spec.Card != nil {
		if err := s.keepCard(files[spec.Card.Outside]); err != nil {
			return false, err
		}
	}
	if err := k.begin(ctx, s, spec, files, img); err != nil {
		return false, err
	}
	s.mu.Lock()
	s.meta.State = stateRunning
	err = s.meta.save()
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	if err := k.watchDeath(s); err != nil {
		return false, err
	}
	if err := k.guardMemory(s); err != nil {
		return false, fmt.Errorf("watch the sandbox's memory: %w", err)
	}
	pooled = s.meta.Container != ""
	k.log.Info("created", "sandbox", s.id, "total", time.Since(t0), "pool", pooled)
	if !pooled {
		go k.warm() // the pool makes its own, when nobody waits
	}
	k.pool.busy()
	k.pool.refill()
	return pooled, nil
}

// begin makes a sandbox that runs, from the pool if there is one that fits.
func (k *Keeper) begin(ctx context.Context, s *sandbox, spec *protocol.Spec, files []*os.File, img *image) error {
	if e := k.pool.take(spec, img == nil); e != nil {
		defer e.made.close()
		if err := k.adopt(s, e, spec, files); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return canceled
		}
		if img != nil {
			return k.restore(ctx, s, img, e.made, network(spec, files, true))
		}
		s.meta.Token = e.meta.Token // the guest has it from its environment
		return k.start(ctx, s, e.made, network(spec, files, false))
	}
	m, err := k.make(ctx, s, spec, files)
	if err != nil {
		return err
	}
	defer m.close()
	if ctx.Err() != nil {
		return canceled
	}
	if img != nil {
		return k.restore(ctx, s, img, m, network(spec, files, true))
	}
	return k.start(ctx, s, m, network(spec, files, false))
}

// made is an execution that gVisor has created and that does not run yet.
type made struct {
	conf *config.Config
	line *line
	root os.FileInfo // of the tree that its file server serves
	// placed says that its processes are in their control group.
	placed bool
}

func (m *made) close() { m.line.close() }

// make creates the execution of a sandbox: its processes, with their mounts, wait for what to run.
func (k *Keeper) make(ctx context.Context, s *sandbox, spec *protocol.Spec, files []*os.File) (*made, error) {
	if err := os.Mkdir(sandboxDir(s.id), 0o700); err != nil {
		return nil, err
	}
	if err := s.meta.save(); err != nil {
		return nil, err
	}
	if err := os.Mkdir(filestoreDir(s.id), 0o700); err != nil {
		return nil, err
	}
	if err := s.group.create(spec.Limits); err != nil {
		return nil, err
	}
	st, err := k.prepare(spec, files, idRange(s.meta.Range))
	if err != nil {
		return nil, err
	}
	// The processes have copies of the mounts once they run.
	defer func() {
		if cerr := st.close(); cerr != nil {
			k.log.Error("remove the mounts of a start", "sandbox", s.id, "error", cerr)
		}
	}()
	if len(st.unmapped) > 0 {
		k.log.Warn("no idmapped mounts; files belong to nobody inside", "sandbox", s.id, "parts", st.unmapped)
	}
	if ctx.Err() != nil {
		return nil, canceled
	}
	m := &made{}
	if m.root, err = os.Stat(st.root); err != nil {
		return nil, err
	}
	if m.conf, err = k.configFor(spec); err != nil {
		return nil, err
	}
	// The range of ids, the limits and the token are not those of an image. What must be alike is compared before.
	m.conf.RestoreSpecValidation = config.RestoreSpecValidationIgnore
	oci := ociSpec(spec, st, s.meta.Token, idRange(s.meta.Range))
	bundle, err := writeBundle(spec, k.instance, oci)
	if err != nil {
		return nil, err
	}
	if m.line, err = newLine(); err != nil {
		return nil, err
	}
	cont, err := container.New(m.conf, container.Args{ID: s.id, Spec: oci, BundleDir: bundle, PassFiles: m.line.theirs()})
	if err != nil {
		m.close()
		return nil, k.bootFailed(s, "create", err)
	}
	m.line.closeTheirs()
	s.cont, s.kernel = cont, cont.Sandbox
	s.meta.Sandbox = processOf(cont.Sandbox.Getpid())
	s.meta.Gofer = processOf(cont.GoferPid.Load())
	if err := s.meta.save(); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// checkSpec refuses what cannot be right before anything is made.
func checkSpec(spec *protocol.Spec, files int) error {
	if spec == nil {
		return protocol.Errorf(protocol.KindInvalid, "create without a spec")
	}
	if err := validID(spec.ID); err != nil {
		return err
	}
	ok := func(i int) bool { return i >= 0 && i < files }
	valid := len(spec.Layers) > 0 && ok(spec.Guest)
	for _, l := range spec.Layers {
		valid = valid && ok(l.FD)
	}
	for _, b := range spec.Binds {
		valid = valid && (b.Hide || ok(b.FD) && ok(b.Flat))
	}
	for _, m := range spec.Mounts {
		valid = valid && ok(m.FD)
	}
	valid = valid && (spec.Image == nil || ok(*spec.Image))
	if c := spec.Card; c != nil {
		valid = valid && ok(c.Inside) && ok(c.Outside)
		if c.MTU < 1280 || c.MTU > 65535 || len(c.Addrs) == 0 {
			return protocol.Errorf(protocol.KindInvalid, "a card with MTU %d and %d addresses: want 1280 to 65535, and one at least", c.MTU, len(c.Addrs))
		}
	}
	if !valid {
		return protocol.Errorf(protocol.KindInvalid, "a descriptor of the spec is missing")
	}
	return nil
}

// reserve enters the sandbox under its id, with a range of ids of its own.
func (k *Keeper) reserve(spec *protocol.Spec, cancel context.CancelFunc) (*sandbox, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.retiring {
		return nil, protocol.Errorf(protocol.KindUnavailable, "the keeper is being replaced; try again")
	}
	if k.sandboxes[spec.ID] != nil {
		return nil, protocol.Errorf(protocol.KindExists, "sandbox %s exists", spec.ID)
	}
	s, err := k.newSandbox(spec, cancel)
	if err == nil {
		k.sandboxes[spec.ID] = s
	}
	return s, err
}

// newSandbox returns a sandbox with a range of ids of its own, which k.calls waits for; k.mu is held.
func (k *Keeper) newSandbox(spec *protocol.Spec, cancel context.CancelFunc) (*sandbox, error) {
	i := k.freeRange()
	if i < 0 {
		return nil, protocol.Errorf(protocol.KindExhausted, "all %d ranges of user ids are in use", maxRanges)
	}
	k.ranges[i] = true
	s := &sandbox{
		id: spec.ID, cancel: cancel, created: make(chan struct{}), died: make(chan struct{}),
		attach: make(chan struct{}, 1),
		meta: meta{
			ID: spec.ID, State: stateCreating, Range: i, Token: rand.Text(), Limits: spec.Limits,
			Labels: spec.Labels, Created: time.Now().UTC(), Group: k.cgroups.group(spec.ID), Base: baseOf(spec),
		},
	}
	s.group = s.meta.Group
	k.calls.Add(1)
	return s, nil
}

// start lets a created execution boot its guest. The sandbox's processes are in their control group when it returns; until
// then only gVisor itself and the guest's start have run.
func (k *Keeper) start(ctx context.Context, s *sandbox, m *made, net *boot.CreateLinksAndRoutesArgs) error {
	var err error
	if s.channel, err = newChannel(m.line.takeHost()); err != nil {
		return err
	}
	// Moving a process waits for the kernel's next grace period, so where it is needed it goes along with the start.
	placed := make(chan error, 1)
	if m.placed {
		placed <- nil
	} else {
		go func() { placed <- s.group.place(s.cont.Sandbox.Getpid(), s.cont.GoferPid.Load()) }()
	}
	err = setNetwork(s.cont.Sandbox, net)
	if err == nil {
		// With "host" here, gVisor leaves what has been set.
		conf := *m.conf
		conf.Network = config.NetworkHost
		err = s.cont.Start(&conf)
	}
	if perr := <-placed; perr != nil {
		return errors.Join(err, perr)
	}
	if err != nil {
		return k.bootFailed(s, "start", err)
	}
	if ctx.Err() != nil {
		return canceled
	}
	return nil
}

// bootFailed logs what gVisor says, which has paths of the host in it, and returns what a caller may see.
func (k *Keeper) bootFailed(s *sandbox, step string, err error) error {
	k.log.Error("gVisor failed", "sandbox", s.id, "step", step, "error", err)
	return fmt.Errorf("gVisor could not %s the sandbox; the keeper's log has the reason", step)
}

// delete ends a sandbox and removes everything of it.
func (k *Keeper) delete(id string) error {
	if err := validID(id); err != nil {
		return err
	}
	k.mu.Lock()
	s := k.sandboxes[id]
	if s != nil {
		k.calls.Add(1)
	}
	k.mu.Unlock()
	if s == nil {
		return nil
	}
	defer k.calls.Done()
	s.mu.Lock()
	s.deleting = true
	s.mu.Unlock()
	s.cancel()
	<-s.created
	s.work.Lock()
	defer s.work.Unlock()
	return k.destroy(s)
}

// destroy ends and removes; s.work is held. It may be repeated until it returns nil.
func (k *Keeper) destroy(s *sandbox) error {
	k.mu.Lock()
	known := k.sandboxes[s.id] == s
	k.mu.Unlock()
	if !known {
		return nil // another delete was first
	}
	s.mu.Lock()
	s.deleting = true
	ch := s.channel
	s.mu.Unlock()
	if ch != nil {
		ch.session.Close()
	}
	if err := k.endRuntime(s); err != nil {
		return err
	}
	if err := os.RemoveAll(sandboxDir(s.id)); err != nil {
		return fmt.Errorf("remove the sandbox's files: %w", err)
	}
	k.mu.Lock()
	delete(k.sandboxes, s.id)
	if s.meta.Range >= 0 {
		delete(k.ranges, s.meta.Range)
	}
	k.lastUse = time.Now()
	k.mu.Unlock()
	return nil
}

// endRuntime ends the processes and removes what gVisor and the kernel hold for them. The files stay.
func (k *Keeper) endRuntime(s *sandbox) error {
	s.dropCard()
	s.mu.Lock()
	s.guard.close()
	s.mu.Unlock()
	if s.cont != nil {
		if err := s.cont.Destroy(); err != nil {
			return fmt.Errorf("destroy the sandbox: %w", err)
		}
		s.cont = nil
	}
	// Also what no record names, because the keeper was killed between a fork and the record of it.
	for _, p := range []process{s.meta.Sandbox, s.meta.Gofer} {
		kill(p)
	}
	for _, p := range k.strays(s) {
		kill(p)
	}
	removeGVisorState(s.meta.container())
	if err := s.group.remove(); err != nil {
		return err
	}
	// The parents of a keeper that ran elsewhere; ours stay.
	for ctl, dir := range s.group {
		if parent := filepath.Dir(dir); parent != k.cgroups.parent[ctl] {
			unix.Rmdir(parent)
		}
	}
	return nil
}

// removeGVisorState removes the files that gVisor keeps for a sandbox by its id.
func removeGVisorState(id string) {
	names, err := os.ReadDir(gvisorRoot)
	if err != nil {
		return
	}
	for _, n := range names {
		if n.Name() == "runsc-"+id+".sock" || strings.HasPrefix(n.Name(), id+"_") {
			os.Remove(filepath.Join(gvisorRoot, n.Name()))
		}
	}
}

// kill ends a process, if it is still the one, and waits until it is gone.
func kill(p process) {
	if !p.alive() {
		return
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if !p.alive() { // the descriptor is of its successor
		return
	}
	unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	poll(fd, unix.POLLIN, 5000)
}

// strays finds processes of a sandbox by the bundle that their command line names. Anybody may write such a command
// line, so they must also run as the sandbox's own user.
func (k *Keeper) strays(s *sandbox) []process {
	if s.meta.Range < 0 {
		return nil
	}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	prefix := filepath.Join(sandboxDir(s.meta.container()), "bundle-"+k.instance+"-")
	var found []process
	for _, e := range procs {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat("/proc/"+e.Name(), &st) != nil {
			continue
		}
		// A process that is not dumpable shows as root's here, so its status is asked.
		b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || !strings.Contains(string(b), prefix) {
			continue
		}
		if uid, err := realUID(pid); err == nil && uid == idRange(s.meta.Range) {
			found = append(found, processOf(pid))
		}
	}
	return found
}

func realUID(pid int) (uint32, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
			f := strings.Fields(rest)
			if len(f) == 0 {
				break
			}
			n, err := strconv.ParseUint(f[0], 10, 32)
			return uint32(n), err
		}
	}
	return 0, errors.New("no Uid line")
}

func (k *Keeper) list() []protocol.Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]protocol.Status, 0, len(k.sandboxes))
	for _, s := range k.sandboxes {
		all = append(all, s.status())
	}
	return all
}

// running returns a sandbox that runs.
func (k *Keeper) running(id string) (*sandbox, error) {
	k.mu.Lock()
	s := k.sandboxes[id]
	k.mu.Unlock()
	if s == nil {
		return nil, protocol.Errorf(protocol.KindNotFound, "sandbox %s does not exist", id)
	}
	switch st := s.status(); st.State {
	case stateRunning:
		return s, nil
	case stateDead:
		return nil, protocol.Errorf(protocol.KindState, "sandbox %s has ended: %s", id, st.Exit.Message)
	}
	return nil, protocol.Errorf(protocol.KindUnavailable, "sandbox %s is not yet created", id)
}

// dialAhead opens a stream as dial does. For the guest's own port it need not wait for its answer, which is then ahead, unless the sandbox stands
// still, for then there will be none.
func (k *Keeper) dialAhead(ctx context.Context, id string, port uint16) (_ *channel, _ *yamux.Stream, ahead bool, err error) {
	if port == guestPort {
		s, err := k.running(id)
		if err != nil {
			return nil, nil, false, err
		}
		s.mu.Lock()
		moves := s.meta.Frozen == runs
		s.mu.Unlock()
		if ch, err := s.open(ctx); err == nil && moves && ch.answered.Load() {
			if st, err := ch.dialGuest(); err == nil {
				return ch, st, true, nil
			}
		}
	}
	ch, st, err := k.dial(ctx, id, port)
	return ch, st, false, err
}

// dial opens a stream to a port inside.
func (k *Keeper) dial(ctx context.Context, id string, port uint16) (*channel, *yamux.Stream, error) {
	if port == 0 {
		return nil, nil, protocol.Errorf(protocol.KindInvalid, "port 0 cannot be dialled")
	}
	for {
		s, err := k.running(id)
		if err != nil {
			return nil, nil, err
		}
		ch, err := s.open(ctx)
		if err == nil {
			var st *yamux.Stream
			if st, err = ch.dial(port, ctx.Done()); err == nil {
				return ch, st, nil
			}
		}
		if ctx.Err() != nil {
			return nil, nil, protocol.Errorf(protocol.KindCanceled, "dial was cancelled")
		}
		if errors.Is(err, errRefused) && port != guestPort {
			return nil, nil, protocol.Errorf(protocol.KindUnavailable, "nothing listens on port %d of sandbox %s", port, id)
		}
		// The guest is not ready, or the channel broke; the sandbox's death ends the wait.
		select {
		case <-ctx.Done():
		case <-s.died:
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// open returns the sandbox's channel, a new one if the old has ended.
func (s *sandbox) open(ctx context.Context) (*channel, error) {
	s.mu.Lock()
	ch := s.channel
	s.mu.Unlock()
	if !ch.closed() {
		return ch, nil
	}
	select {
	case s.attach <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	type result struct {
		ch  *channel
		err error
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-s.attach }()
		ch, err := s.reopen()
		done <- result{ch, err}
	}()
	select {
	case r := <-done:
		return r.ch, r.err
	case <-ctx.Done(): // a sandbox that stands still answers late, and nobody must wait for it
		return nil, ctx.Err()
	}
}

// reopen opens a new channel, unless somebody else was first.
func (s *sandbox) reopen() (*channel, error) {
	s.mu.Lock()
	ch, kernel, token, stopped := s.channel, s.kernel, s.meta.Token, s.meta.Frozen == stands
	s.mu.Unlock()
	if !ch.closed() {
		return ch, nil
	}
	if stopped {
		return nil, errors.New("the sandbox stands still")
	}
	ch, err := reattach(kernel, token)
	if err != nil {
		return nil, err
	}
	return ch, s.use(ch)
}

// use makes a channel that of the sandbox, or ends it with the sandbox.
func (s *sandbox) use(ch *channel) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deleting || s.meta.State == stateDead {
		ch.session.Close()
		return errors.New("the sandbox has ended")
	}
	s.channel = ch
	return nil
}

func (k *Keeper) stats(id string) (*protocol.Stats, error) {
	s, err := k.running(id)
	if err != nil {
		return nil, err
	}
	st := &protocol.Stats{}
	s.group.stats(st)
	st.Disk = diskUse(s.meta.Sandbox.PID)
	return st, nil
}

// diskUse returns the blocks behind the root overlay: a file without a name that the sandbox process has open.
func diskUse(pid int) int64 {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, fd := range fds {
		at := filepath.Join(dir, fd.Name())
		if name, err := os.Readlink(at); err != nil || !strings.Contains(name, "/runsc-filestore-") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(at, &st) == nil {
			return st.Blocks * 512
		}
	}
	return 0
}
