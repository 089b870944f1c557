//go:build linux

package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// frozen says whether a sandbox stands still. gVisor counts stops, and as it comes panics when it is asked to end one that was
// not begun; so what is about to change is recorded before and after, and a keeper that finds a change begun looks at
// the guest first. A guest that runs and does not answer looks the same; the gVisor of driver/gvisor/patch ends no more than was begun.
type frozen string

const (
	runs     frozen = ""
	changing frozen = "changing"
	stands   frozen = "stands"
)

// freeze makes a sandbox stand still; s.still is held.
func (s *sandbox) freeze(kernel *gsandbox.Sandbox) error {
	if err := s.setFrozen(changing); err != nil {
		return err
	}
	if err := kernel.Pause(kernel.ID); err != nil {
		return err
	}
	return s.setFrozen(stands)
}

func (s *sandbox) setFrozen(f frozen) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deleting || s.meta.State != stateRunning {
		return protocol.Errorf(protocol.KindState, "sandbox %s has ended", s.id)
	}
	if err := s.meta.mark(f); err != nil {
		return err
	}
	s.meta.Frozen = f
	return nil
}

// release lets the sandbox run on; s.still is held.
func (s *sandbox) release() error {
	s.mu.Lock()
	was, kernel := s.meta.Frozen, s.kernel
	s.mu.Unlock()
	if was == changing && s.moves(kernel) {
		was = runs
	}
	if was == runs {
		return s.setFrozen(runs)
	}
	if err := s.setFrozen(changing); err != nil {
		return err
	}
	if err := kernel.Resume(kernel.ID); err != nil {
		return err
	}
	return s.setFrozen(runs)
}

// moves says whether the guest answers, which it does within milliseconds unless it stands still.
func (s *sandbox) moves(kernel *gsandbox.Sandbox) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	ch, err := s.open(ctx)
	if err != nil {
		return false
	}
	st, err := ch.dial(guestPort, ctx.Done())
	if err != nil {
		return false
	}
	ch.reset(st)
	return true
}

// snapshot writes an image of a sandbox into a directory and returns its size. It leaves the sandbox as it is when it
// fails, or when the caller has gone, for nobody would let a frozen one run on. When it stands still the caller is told.
func (k *Keeper) snapshot(ctx context.Context, req *protocol.Request, files []*os.File, tell func() error) (size int64, err error) {
	id, freeze := req.ID, req.Freeze
	if len(files) != 1 {
		return 0, protocol.Errorf(protocol.KindInvalid, "snapshot without a directory")
	}
	s, err := k.hold(id)
	if err != nil {
		return 0, err
	}
	defer k.calls.Done()
	defer s.still.Unlock()
	img := &image{dir: files[0], Created: time.Now().UTC(), Runtime: k.build, Arch: runtime.GOARCH}
	if names, err := img.names(); err != nil || len(names) > 0 {
		return 0, errors.Join(err, protocol.Errorf(protocol.KindInvalid, "the directory for an image must be empty"))
	}
	if req.Transient {
		img.Transient = k.name
	}
	if img.seals, err = newSealer(req.Packing.Key); err != nil {
		return 0, err
	}
	if img.seals != nil {
		if img.unpacked, err = newScratch(); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, img.unpacked.close()) }()
	}
	if img.CPU, err = cpuFeatures(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	unsure := s.meta.Frozen == changing // the last keeper was killed at the wrong moment
	s.mu.Unlock()
	if unsure {
		if err := s.release(); err != nil {
			return 0, err
		}
	}
	// Nobody opens a channel meanwhile: gVisor cannot save a sandbox while it forwards a connection into it.
	select {
	case s.attach <- struct{}{}:
		defer func() { <-s.attach }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	s.mu.Lock()
	ch, kernel := s.channel, s.kernel
	img.Base, img.Token = s.meta.Base, s.meta.Token
	stood := s.meta.Frozen == stands
	s.mu.Unlock()
	t0 := time.Now()
	var t1 time.Time
	defer func() {
		err = fullDisk(err)
		if err == nil && ctx.Err() != nil {
			err = protocol.Errorf(protocol.KindCanceled, "the snapshot was cancelled")
		}
		if err != nil {
			if cerr := img.clear(); cerr != nil {
				k.log.Error("remove an unfinished image", "sandbox", id, "error", cerr)
			}
		}
		if !stood && (err != nil || !freeze) {
			if rerr := s.release(); rerr != nil && s.currentState() == stateRunning {
				k.log.Error("let a sandbox run on after a snapshot", "sandbox", id, "error", rerr)
				err = errors.Join(err, rerr)
			}
		}
		if err == nil {
			k.log.Info("snapshot", "sandbox", id, "bytes", size, "stood", t1.Sub(t0), "total", time.Since(t0))
		}
	}()
	if !ch.closed() && ch.forward != nil {
		ch.hangUp()
	}
	// A stop of our own around that of the checkpoint, which gVisor does not save: what is restored runs.
	if !stood {
		if err := s.freeze(kernel); err != nil {
			return 0, k.snapshotFailed(s, "stop", err)
		}
	}
	if err := tell(); err != nil {
		return 0, err
	}
	if ctx.Err() != nil { // the defer says so
		return 0, ctx.Err()
	}
	conf := *k.conf
	err = kernel.Checkpoint(&conf, kernel.ID, img.plain(), gsandbox.CheckpointOpts{Compression: statefile.CompressionLevelNone, Resume: true})
	if err != nil {
		return 0, k.snapshotFailed(s, "save", err)
	}
	t1 = time.Now()
	if !freeze && !stood {
		if err := s.release(); err != nil {
			return 0, err
		}
	}
	return img.finish(ctx, req.Packing)
}

// fullDisk says in words that an image does not fit.
func fullDisk(err error) error {
	if isFull(err) {
		return protocol.Errorf(protocol.KindExhausted, "the disk of this server is full, and the image of the sandbox does not fit; free some and try again")
	}
	return err
}

// isFull says whether an error is that of a full disk. What gVisor writes itself fails in the sandbox's process, whose errors come as text.
func isFull(err error) bool {
	return err != nil && slices.ContainsFunc([]unix.Errno{unix.ENOSPC, unix.EDQUOT}, func(errno unix.Errno) bool {
		return errors.Is(err, errno) || strings.Contains(err.Error(), errno.Error())
	})
}

// finish packs the image as far as that is asked for and seals it. One that is transient is packed only to be encrypted.
func (m *image) finish(ctx context.Context, p protocol.Packing) (int64, error) {
	if !m.Packed && (m.seals != nil || m.Transient == "") {
		size, err := m.plainSize()
		if err != nil {
			return 0, err
		}
		if compress := compresses(p, size); compress || m.seals != nil {
			if err := m.pack(ctx, compress); err != nil {
				return 0, err
			}
		}
	}
	return m.seal(ctx)
}

// seal gives a transient image of this keeper its checksums and writes it to disk. With a second directory it shares what it can with the image
// there.
func (k *Keeper) seal(ctx context.Context, req *protocol.Request, files []*os.File) (_ int64, err error) {
	if len(files) != 1 && len(files) != 2 {
		return 0, protocol.Errorf(protocol.KindInvalid, "seal without a directory")
	}
	img, err := openImage(files[0], req.Packing.Key)
	if err != nil {
		return 0, err
	}
	if img.Transient != k.name {
		return 0, damaged("it was made by another keeper, which has ended, or is sealed already")
	}
	// Without a manifest it is no image, should this be cut short.
	if err := unix.Unlinkat(int(img.dir.Fd()), manifestName, 0); err != nil {
		return 0, err
	}
	if len(files) == 2 {
		t0 := time.Now()
		defer func() { err = errors.Join(err, img.unpacked.close()) }()
		if err := img.shareWith(ctx, files[1], req.Packing.Key, k.build, newScratch); err != nil {
			return 0, fullDisk(err)
		}
		k.log.Info("looked for pages in an earlier image", "bytes", img.Pages, "packs", len(img.Packs), "total", time.Since(t0))
	}
	img.Transient = ""
	n, err := img.finish(ctx, req.Packing)
	return n, fullDisk(err)
}

// snapshotFailed logs what gVisor says and returns what a caller may see.
func (k *Keeper) snapshotFailed(s *sandbox, step string, err error) error {
	if s.currentState() != stateRunning {
		return protocol.Errorf(protocol.KindState, "sandbox %s ended during the snapshot", s.id)
	}
	k.log.Error("snapshot failed", "sandbox", s.id, "step", step, "error", err)
	if isFull(err) {
		return fullDisk(err)
	}
	return fmt.Errorf("gVisor could not %s the sandbox (is the disk full?); it runs on; the keeper's log has more", step)
}

// hold returns a running sandbox that nobody else freezes or thaws. The caller ends s.still and k.calls.
func (k *Keeper) hold(id string) (*sandbox, error) {
	k.mu.Lock()
	k.calls.Add(1)
	k.mu.Unlock()
	s, err := k.running(id)
	if err != nil {
		k.calls.Done()
		return nil, err
	}
	s.still.Lock()
	return s, nil
}

// verify says whether a sandbox could go on from an image.
func (k *Keeper) verify(ctx context.Context, req *protocol.Request, files []*os.File) error {
	spec := req.Spec
	if err := checkSpec(spec, len(files)); err != nil {
		return err
	}
	if spec.Image == nil {
		return protocol.Errorf(protocol.KindInvalid, "verify without an image")
	}
	img, err := openImage(files[*spec.Image], req.Packing.Key)
	if err != nil {
		return err
	}
	if err := img.fits(k.build, k.name, spec); err != nil {
		return err
	}
	return img.verify(ctx)
}

// still makes a sandbox stand still until thaw.
func (k *Keeper) still(id string) error {
	s, err := k.hold(id)
	if err != nil {
		return err
	}
	defer k.calls.Done()
	defer s.still.Unlock()
	_, err = k.standStill(s)
	return err
}

// thaw lets a frozen sandbox run on.
func (k *Keeper) thaw(id string) error {
	s, err := k.hold(id)
	if err != nil {
		return err
	}
	defer k.calls.Done()
	defer s.still.Unlock()
	return s.release()
}

// restore fills a created container from an image and lets it run. Its processes come into their control group first:
// memory is charged to the group in which it is first touched.
func (k *Keeper) restore(ctx context.Context, s *sandbox, img *image, m *made, net *boot.CreateLinksAndRoutesArgs) error {
	if !m.placed {
		if err := s.group.place(s.cont.Sandbox.Getpid(), s.cont.GoferPid.Load()); err != nil {
			return err
		}
	}
	if err := <-img.verified; err != nil {
		return err
	}
	// The guest finds the renewal when it goes on, which is before gVisor says so here. Whoever dials waits for this. A guest that does not
	// answer is reached as one that another keeper started.
	s.attach <- struct{}{}
	host, control := m.line.takeHost(), m.line.takeControl()
	var failed atomic.Bool
	go func() {
		defer func() { <-s.attach }()
		ch, err := renew(host, control)
		if err == nil {
			err = s.use(ch)
		}
		if err != nil && !failed.Load() {
			k.log.Warn("the guest of a restored sandbox does not take its channel", "sandbox", s.id, "error", err)
		}
	}()
	conf := *m.conf
	conf.Network = config.NetworkHost
	if err := s.cont.Restore(&conf, img.plain(), false, false, net); err != nil {
		failed.Store(true)
		control.Close()
		err = k.bootFailed(s, "restore", err)
		return fmt.Errorf("%w; a file that a process had open in a mount must still be there", err)
	}
	control.SetDeadline(time.Now().Add(renewTime)) // it may be closed already
	if ctx.Err() != nil {
		return canceled
	}
	return nil
}
