//go:build linux

package docker

import (
	"context"
	"errors"
	"fmt"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
)

// Freeze makes a sandbox stand still, see [driver.Freezer]. The engine does so with the container's control group, or asks the
// runtime's kernel; either way all of its memory stays where it is.
func (d *Driver) Freeze(ctx context.Context, id warren.SandboxID) error {
	if err := d.setFrozen(ctx, id, true); err != nil {
		return fmt.Errorf("freeze sandbox %s: %w", id, err)
	}
	return nil
}

// Thaw lets a frozen sandbox run on, see [driver.Freezer].
func (d *Driver) Thaw(ctx context.Context, id warren.SandboxID) error {
	if err := d.setFrozen(ctx, id, false); err != nil {
		return fmt.Errorf("thaw sandbox %s: %w", id, err)
	}
	return nil
}

func (d *Driver) setFrozen(ctx context.Context, id warren.SandboxID, frozen bool) (err error) {
	if !validID(id) {
		return warren.ErrNotFound
	}
	unlock, err := d.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	// A pause that a read-back left is not the caller's.
	if copies, err := d.loadCopies(id); err != nil {
		return err
	} else if copies != nil {
		if err := d.letRunOn(ctx, id, copies); err != nil {
			return err
		}
	}
	c, err := d.findAlive(ctx, id)
	if err != nil || c.State.Paused == frozen {
		return err
	}
	defer func() {
		// The mounts of a sandbox that stands still can be kept along with it.
		if err == nil && frozen {
			if err = d.syncFrozen(ctx, id); err != nil {
				late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
				defer cancel()
				_, uerr := d.api.ContainerUnpause(late, c.ID, client.ContainerUnpauseOptions{})
				err = errors.Join(err, uerr)
			}
		}
	}()
	late, cancel := grace(ctx)
	defer cancel()
	if frozen {
		_, err = d.api.ContainerPause(late, c.ID, client.ContainerPauseOptions{})
	} else {
		_, err = d.api.ContainerUnpause(late, c.ID, client.ContainerUnpauseOptions{})
	}
	if err == nil {
		return ctx.Err()
	}
	// Somebody else was faster, or it has died meanwhile: what it is now is the answer.
	if c, ferr := d.findAlive(late, id); ferr != nil {
		return ferr
	} else if c.State.Paused == frozen {
		return ctx.Err()
	}
	return d.callError(ctx, err)
}

// syncFrozen reads back the mounts of a sandbox that stands still.
func (d *Driver) syncFrozen(ctx context.Context, id warren.SandboxID) error {
	copies, err := d.loadCopies(id)
	if err != nil || copies == nil {
		return err
	}
	return d.readBack(ctx, id, copies)
}

// findAlive returns the container of a sandbox that runs or stands still. A dead one gives [warren.ErrState].
func (d *Driver) findAlive(ctx context.Context, id warren.SandboxID) (*container.InspectResponse, error) {
	c, err := d.find(ctx, id)
	if errors.Is(err, errForeign) {
		return nil, fmt.Errorf("%w: %v", warren.ErrNotFound, err)
	}
	if err != nil {
		return nil, err
	}
	switch stateOf(string(c.State.Status)) {
	case dead:
		return nil, fmt.Errorf("the sandbox has ended (%s): %w", exitOf(c.State).Message, warren.ErrState)
	case creating:
		return nil, fmt.Errorf("the sandbox has not started: %w", warren.ErrUnavailable)
	}
	return c, nil
}

// callError gives an error of a call about a container that is there a kind, also where the engine's own says nothing.
func (d *Driver) callError(ctx context.Context, err error) error {
	if e := d.engineError(ctx, err); !errors.Is(e, err) {
		return e
	}
	return fmt.Errorf("the engine refuses: %w (%s)", warren.ErrUnavailable, err)
}
