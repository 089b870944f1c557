//go:build linux

package keeper

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/message"
)

// Keeper holds the sandboxes of one state directory.
type Keeper struct {
	log      *slog.Logger
	conf     *config.Config
	userns   userNamespaces
	cgroups  *cgroups
	instance string
	build    string
	// name tells this keeper from every other.
	name     string
	starts   *semaphore.Weighted
	pool     *pool
	listener *net.UnixListener
	idle     time.Duration

	mu        sync.Mutex
	sandboxes map[string]*sandbox
	ranges    map[int]bool
	watchers  map[*watcher]bool
	clients   int
	calls     sync.WaitGroup // creates and deletes under way
	retiring  bool
	stopped   chan struct{}
	lastUse   time.Time
}

// firstCall is how long a new keeper waits for its first client, beyond the time that any keeper waits.
const firstCall = 10 * time.Second

func newKeeper(idle time.Duration, logger *slog.Logger) (*Keeper, error) {
	// Nothing of the keeper's shall reach a sandbox: gVisor hands on its own standard streams.
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	os.Stdin, os.Stdout, os.Stderr = null, null, null
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: discard{}}})
	log.SetLevel(log.Warning)

	unix.CloseOnExec(lockFD) // held until the end
	for _, d := range []string{sandboxesDir, gvisorRoot} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.Mkdir(filepath.Join(stageDir, ".empty-dir"), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(stageDir, ".empty-file"), nil, 0o444); err != nil {
		return nil, err
	}
	conf, err := baseConfig()
	if err != nil {
		return nil, err
	}
	build, err := companion.BuildID("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	instance, err := instanceName()
	if err != nil {
		return nil, err
	}
	groups, err := findCgroups(instance)
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	k := &Keeper{
		log: logger, conf: conf, cgroups: groups, instance: instance, build: build, name: rand.Text(),
		starts:    semaphore.NewWeighted(int64(max(runtime.NumCPU(), 2))),
		idle:      idle,
		sandboxes: map[string]*sandbox{},
		ranges:    map[int]bool{},
		watchers:  map[*watcher]bool{},
		stopped:   make(chan struct{}),
		// Whoever started it may be slow to call.
		lastUse: time.Now().Add(firstCall),
	}
	k.pool = newPool(k)
	if err := k.takeOver(); err != nil {
		return nil, err
	}
	sock := filepath.Join(stateDir, protocol.Socket)
	if err := os.Remove(sock); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	k.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: sock, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(sock, 0o600); err != nil {
		return nil, err
	}
	// The first sandbox shall not wait for its mappings, and may come before the rules are compiled.
	go k.warm()
	go func() {
		if err := writeSeccomp(conf); err != nil {
			logger.Warn("seccomp rules are compiled for each sandbox anew, which is slow", "error", err)
		}
	}()
	return k, nil
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// instanceName tells state directories apart where names are shared: control groups and command lines.
func instanceName() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(stateDir, &st); err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%d", st.Dev, st.Ino))
	return hex.EncodeToString(sum[:4]), nil
}

// warm makes the user namespaces that the next sandbox needs.
func (k *Keeper) warm() {
	k.mu.Lock()
	i := k.freeRange()
	k.mu.Unlock()
	if i < 0 {
		return
	}
	for _, base := range []uint32{0, diskIDBase} {
		if _, release, err := k.userns.get(diskMap(base, idRange(i))); err == nil {
			release()
		}
	}
}

// diskIDBase is driver.DiskIDBase.
const diskIDBase = 0x60000000

// freeRange returns the lowest free range; k.mu is held.
func (k *Keeper) freeRange() int {
	for i := range maxRanges {
		if !k.ranges[i] {
			return i
		}
	}
	return -1
}

func (k *Keeper) serve() {
	go k.exitWhenIdle()
	for {
		c, err := k.listener.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				break
			}
			k.log.Warn("accept", "error", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go k.handle(c)
	}
	<-k.stopped
}

// retire lets calls under way end and stops the keeper. Sandboxes go on; the next keeper finds them.
func (k *Keeper) retire() {
	k.mu.Lock()
	if k.retiring {
		k.mu.Unlock()
		return
	}
	k.retiring = true
	k.mu.Unlock()
	k.listener.Close()
	done := make(chan struct{})
	go func() { k.calls.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
	}
	k.pool.empty(true)
	if k.empty() {
		k.removeState()
	}
	close(k.stopped)
}

// removeState removes what a keeper without sandboxes leaves, but its log.
func (k *Keeper) removeState() {
	k.cgroups.close()
	// The network namespace that gofers share; first starts at the same time put several there.
	for unix.Unmount(filepath.Join(gvisorRoot, specutils.NullNetNSFilename), unix.MNT_DETACH) == nil {
	}
	names, _ := os.ReadDir(gvisorRoot)
	for _, n := range names {
		os.Remove(filepath.Join(gvisorRoot, n.Name()))
	}
	for _, d := range []string{gvisorRoot, sandboxesDir, filepath.Join(stateDir, "ns"), filepath.Join(stateDir, protocol.Socket), filepath.Join(stateDir, protocol.PIDFile)} {
		os.Remove(d)
	}
}

// empty says whether there is no sandbox, not even a dead one.
func (k *Keeper) empty() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.sandboxes) == 0
}

// exitWhenIdle ends the keeper when nobody has needed it for a while.
func (k *Keeper) exitWhenIdle() {
	for {
		select {
		case <-k.stopped:
			return
		case <-time.After(max(k.idle/4, 50*time.Millisecond)):
		}
		k.mu.Lock()
		busy := k.clients > 0
		for _, s := range k.sandboxes {
			busy = busy || s.currentState() != stateDead
		}
		if busy {
			k.lastUse = time.Now()
		}
		late := time.Since(k.lastUse) > k.idle
		k.mu.Unlock()
		if late {
			k.log.Info("nobody needs the keeper; it ends")
			k.retire()
			return
		}
	}
}

// handle serves one connection.
func (k *Keeper) handle(c *net.UnixConn) {
	defer c.Close()
	if err := checkPeer(c); err != nil {
		k.log.Warn("refused a connection", "error", err)
		return
	}
	var req protocol.Request
	files, err := message.Read(c, &req)
	if err != nil {
		return
	}
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	k.mu.Lock()
	k.lastUse = time.Now()
	retiring := k.retiring
	k.mu.Unlock()
	if retiring {
		return // without an answer: the driver calls the next keeper
	}
	reply := func(r *protocol.Response, err error) {
		if err != nil {
			r = &protocol.Response{Error: protocol.AsError(err)}
		} else {
			r.OK = true
		}
		if err := message.Write(c, r); err != nil && !errors.Is(err, unix.EPIPE) {
			k.log.Warn("answer", "op", req.Op, "error", err)
		}
	}
	switch req.Op {
	case protocol.OpAttach:
		k.client(1)
		defer k.client(-1)
		reply(&protocol.Response{Version: protocol.Version, Build: k.build, PID: os.Getpid()}, nil)
		waitClosed(c, k.stopped)
	case protocol.OpCreate:
		ctx, cancel := untilClosed(c)
		defer cancel()
		pooled, err := k.create(ctx, &req, files)
		reply(&protocol.Response{Pooled: pooled}, err)
	case protocol.OpDelete:
		reply(&protocol.Response{}, k.delete(req.ID))
	case protocol.OpList:
		reply(&protocol.Response{Statuses: k.list()}, nil)
	case protocol.OpSnapshot:
		ctx, cancel := untilClosed(c)
		defer cancel()
		n, err := k.snapshot(ctx, &req, files, func() error {
			if !req.Tell {
				return nil
			}
			return message.Write(c, &protocol.Response{OK: true, Stands: true})
		})
		reply(&protocol.Response{Size: n}, err)
	case protocol.OpSeal:
		ctx, cancel := untilClosed(c)
		defer cancel()
		n, err := k.seal(ctx, &req, files)
		reply(&protocol.Response{Size: n}, err)
	case protocol.OpSaveRoot:
		ctx, cancel := untilClosed(c)
		err := k.saveRoot(ctx, req.ID, func(size int64) error {
			cancel()
			return message.Write(c, &protocol.Response{OK: true, Size: size})
		}, c)
		cancel()
		if err != nil {
			reply(nil, err)
		}
	case protocol.OpVerify:
		ctx, cancel := untilClosed(c)
		defer cancel()
		reply(&protocol.Response{}, k.verify(ctx, &req, files))
	case protocol.OpFreeze:
		reply(&protocol.Response{}, k.still(req.ID))
	case protocol.OpThaw:
		reply(&protocol.Response{}, k.thaw(req.ID))
	case protocol.OpCard:
		f, err := k.cardOf(req.ID)
		if err != nil {
			reply(nil, err)
			return
		}
		defer f.Close()
		if err := message.Write(c, &protocol.Response{OK: true}, f); err != nil {
			k.log.Warn("answer", "op", req.Op, "error", err)
		}
	case protocol.OpKeepCard:
		reply(&protocol.Response{}, k.keepCardOf(req.ID, files))
	case protocol.OpWarm:
		reply(&protocol.Response{}, k.pool.warm(req.Spec, files, req.Count))
	case protocol.OpPooled:
		reply(&protocol.Response{Count: k.pool.count()}, nil)
	case protocol.OpStats:
		s, err := k.stats(req.ID)
		reply(&protocol.Response{Stats: s}, err)
	case protocol.OpCheck:
		reply(&protocol.Response{Checks: k.check()}, nil)
	case protocol.OpDial:
		ctx, cancel := untilClosed(c)
		ch, s, ahead, err := k.dialAhead(ctx, req.ID, req.Port)
		if cancel() && err == nil {
			ch.reset(s)
			return
		}
		if err != nil {
			reply(nil, err)
			return
		}
		reply(&protocol.Response{}, nil)
		ch.relay(c, s, ahead)
	case protocol.OpWatch:
		k.watch(c)
	case protocol.OpRetire:
		reply(&protocol.Response{}, nil)
		k.retire()
	case protocol.OpShutdown:
		if !k.empty() {
			reply(nil, protocol.Errorf(protocol.KindState, "the keeper still has sandboxes"))
			return
		}
		reply(&protocol.Response{}, nil)
		k.retire()
	default:
		reply(nil, protocol.Errorf(protocol.KindUnsupported, "unknown call %q", req.Op))
	}
}

func (k *Keeper) client(n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.clients += n
	k.lastUse = time.Now()
	if k.clients == 0 { // nobody is there to ask for what was made before
		go k.pool.empty(false)
	}
}

// checkPeer lets only the keeper's own user in; the socket's mode says so already.
func checkPeer(c *net.UnixConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if cerr != nil {
		return cerr
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("peer is user %d", cred.Uid)
	}
	return nil
}

// waitClosed waits until the client goes or stop is closed.
func waitClosed(c *net.UnixConn, stop <-chan struct{}) {
	ctx, cancel := untilClosed(c)
	defer cancel()
	select {
	case <-ctx.Done():
	case <-stop:
	}
}

// untilClosed returns a context that ends when the client closes its sending side. It takes no byte from the
// connection. The function ends the watching and tells whether the client had gone.
func untilClosed(c *net.UnixConn) (context.Context, func() bool) {
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		rc, err := c.SyscallConn()
		if err != nil {
			cancel()
			return
		}
		gone := false
		var b [1]byte
		rc.Read(func(fd uintptr) bool {
			n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
			if err == unix.EAGAIN || err == unix.EINTR {
				return false
			}
			gone = err != nil || n == 0
			return true
		})
		if gone {
			cancel()
		}
	}()
	return ctx, func() bool {
		c.SetReadDeadline(time.Unix(1, 0))
		<-over
		gone := ctx.Err() != nil
		cancel()
		c.SetReadDeadline(time.Time{})
		return gone
	}
}
