//go:build linux

package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/config"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// frozen says whether a sandbox stands still. gVisor counts stops, and panics when it is asked to end one that was
// not begun; so what is about to change is recorded before and after, and a keeper that finds a change begun looks at
// the guest first.
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
	if err := kernel.Pause(s.id); err != nil {
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
	s.meta.Frozen = f
	return s.meta.save()
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
	if err := kernel.Resume(s.id); err != nil {
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
// fails, or when the caller has gone, for nobody would let a frozen one run on.
func (k *Keeper) snapshot(ctx context.Context, id string, files []*os.File, freeze bool) (size int64, err error) {
	if len(files) != 1 {
		return 0, protocol.Errorf(protocol.KindInvalid, "snapshot without a directory")
	}
	s, err := k.hold(id)
	if err != nil {
		return 0, err
	}
	defer k.calls.Done()
	defer s.still.Unlock()
	img := &image{dir: files[0], Version: manifestVersion, Created: time.Now().UTC(), Runtime: k.build, Arch: runtime.GOARCH}
	if names, err := img.names(); err != nil || len(names) > 0 {
		return 0, errors.Join(err, protocol.Errorf(protocol.KindInvalid, "the directory for an image must be empty"))
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
			k.log.Info("snapshot", "sandbox", id, "bytes", size, "written", t1.Sub(t0), "total", time.Since(t0))
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
	conf := *k.conf
	err = kernel.Checkpoint(&conf, s.id, img.path(), gsandbox.CheckpointOpts{Compression: statefile.CompressionLevelNone, Resume: true})
	if err != nil {
		return 0, k.snapshotFailed(s, "save", err)
	}
	t1 = time.Now()
	if !freeze && !stood {
		if err := s.release(); err != nil {
			return 0, err
		}
	}
	return img.seal(ctx)
}

// snapshotFailed logs what gVisor says and returns what a caller may see.
func (k *Keeper) snapshotFailed(s *sandbox, step string, err error) error {
	if s.currentState() != stateRunning {
		return protocol.Errorf(protocol.KindState, "sandbox %s ended during the snapshot", s.id)
	}
	k.log.Error("snapshot failed", "sandbox", s.id, "step", step, "error", err)
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
func (k *Keeper) restore(ctx context.Context, s *sandbox, conf *config.Config, img *image) error {
	if err := s.group.place(s.cont.Sandbox.Getpid(), s.cont.GoferPid.Load()); err != nil {
		return err
	}
	start := *conf
	start.Network = config.NetworkNone
	if err := s.cont.Restore(&start, img.path(), false, false, nil); err != nil {
		err = k.bootFailed(s, "restore", err)
		return fmt.Errorf("%w; a file that a process had open in a mount must still be there", err)
	}
	// The guest in the image may be in the middle of a session on a channel that is gone. It sees this one end, and a
	// new one is opened as for a guest that another keeper started.
	s.channel.session.Close()
	if ctx.Err() != nil {
		return canceled
	}
	return nil
}
