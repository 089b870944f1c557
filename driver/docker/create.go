//go:build linux

package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Create boots a sandbox, see [driver.Driver].
func (d *Driver) Create(ctx context.Context, spec *driver.Spec) error {
	if err := d.create(ctx, spec); err != nil {
		return fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	return nil
}

func (d *Driver) create(ctx context.Context, spec *driver.Spec) (err error) {
	if err := checkSpec(spec); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	unlock, err := d.lock(ctx, spec.ID)
	if err != nil {
		return err
	}
	defer unlock()
	e, err := d.askEngine(ctx)
	if err != nil {
		return err
	}
	p, err := d.plan(e, spec.Options)
	if err != nil {
		d.forgetEngine() // it may be mended
		return err
	}
	if spec.Card != nil {
		if err := p.checkCard(); err != nil {
			return err
		}
	}
	if err := d.free(ctx, spec.ID); err != nil {
		return err
	}
	root := spec.Root
	if p.copies {
		guest, err := d.guestLayer()
		if err != nil {
			return err
		}
		root.Layers = append(slices.Clone(root.Layers), guest)
	}
	image, err := d.image(ctx, &root)
	if err != nil {
		return err
	}
	s := &stage{dir: d.stagePath(spec.ID)}
	if p.copies {
		defer func() {
			if err != nil {
				err = errors.Join(err, d.undoCopies(ctx, spec.ID))
			}
		}()
		s.mounts, err = d.copyMounts(ctx, spec, p.base)
	} else if s, err = d.prepare(spec, p.base); err == nil {
		defer func() { err = errors.Join(err, s.close()) }()
	}
	if err != nil {
		return err
	}
	attempt := rand.Text()
	config, host := containerOf(spec, p, image, s, d.labels.of(spec, attempt))
	made := false
	defer func() {
		if err != nil {
			err = errors.Join(err, d.undo(ctx, spec.ID, attempt, made))
		}
	}()
	if made, err = d.boot(ctx, spec.ID, config, host); err != nil {
		return err
	}
	if spec.Card != nil {
		if err := d.makeCard(ctx, spec.ID, spec.Card); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// free returns [warren.ErrExists] when the name of a sandbox is taken.
func (d *Driver) free(ctx context.Context, id warren.SandboxID) error {
	c, err := d.find(ctx, id)
	switch {
	case errors.Is(err, errForeign):
		return err
	case err != nil && !errors.Is(err, warren.ErrNotFound):
		return err
	case c != nil:
		return fmt.Errorf("its container is there already: %w", warren.ErrExists)
	}
	if copies, err := d.loadCopies(id); err != nil || copies != nil {
		return errors.Join(err, fmt.Errorf("what it wrote to its mounts is in the engine still, delete it first: %w", warren.ErrExists))
	}
	return nil
}

// boot makes and starts a container. made says that the engine has made it, as far as is known.
func (d *Driver) boot(ctx context.Context, id warren.SandboxID, config *container.Config, host *container.HostConfig) (made bool, err error) {
	late, cancel := grace(ctx)
	defer cancel()
	res, err := d.api.ContainerCreate(late, client.ContainerCreateOptions{Name: d.labels.name(id), Config: config, HostConfig: host})
	if cerrdefs.IsConflict(err) {
		// Made by another process since we looked.
		if ferr := d.free(late, id); ferr != nil {
			return false, ferr
		}
		return false, fmt.Errorf("the engine says that its name is taken: %w", warren.ErrExists)
	}
	if err != nil {
		return false, d.createError(ctx, err)
	}
	if err := ctx.Err(); err != nil {
		return true, err
	}
	if _, err := d.api.ContainerStart(late, res.ID, client.ContainerStartOptions{}); err != nil {
		if cerrdefs.IsNotFound(err) && strings.Contains(err.Error(), "No such container") {
			return true, fmt.Errorf("its container was removed while it started: %w", warren.ErrUnavailable)
		}
		return true, d.createError(ctx, err)
	}
	return true, nil
}

// createError makes something of the engine's refusal of a container.
func (d *Driver) createError(ctx context.Context, err error) error {
	text := err.Error()
	switch {
	case strings.Contains(text, sourceMissing), strings.Contains(text, mountSourceMissing):
		d.forgetEngine() // it saw them a while ago
		return fmt.Errorf("the engine does not see the mounts of this process: it runs on another machine, or in another mount namespace; run Warren where the engine runs: %w", errors.ErrUnsupported)
	case strings.Contains(text, "storage-opt"), strings.Contains(text, "pquota"):
		return fmt.Errorf("the engine cannot limit a container's disk; mount its file system with pquota, or %s: %w (%s)", acceptHint(AcceptNoDiskLimit), errors.ErrUnsupported, err)
	case strings.Contains(text, "unknown or invalid runtime name"), strings.Contains(text, "Unknown runtime"):
		d.forgetEngine()
		return fmt.Errorf("the engine lost the runtime: %w (%s)", warren.ErrInvalid, err)
	}
	if e := d.engineError(ctx, err); !errors.Is(e, err) {
		return e
	}
	return fmt.Errorf("the engine refuses the container: %w (%s)", warren.ErrUnavailable, err)
}

// undoCopies removes the volumes of an attempt to create, when its container is gone.
func (d *Driver) undoCopies(ctx context.Context, id warren.SandboxID) error {
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
	defer cancel()
	if _, err := d.find(late, id); !errors.Is(err, warren.ErrNotFound) {
		return nil // its Delete reads them, and removes them
	}
	if err := d.dropCopies(late, id); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// undo removes what an attempt to create has made. made says that there must be something.
func (d *Driver) undo(ctx context.Context, id warren.SandboxID, attempt string, made bool) error {
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
	defer cancel()
	c, err := d.find(late, id)
	switch {
	case errors.Is(err, warren.ErrNotFound), errors.Is(err, errForeign):
		return nil
	case err != nil && !made:
		return nil // the engine is gone; had it made something, List would say so
	case err != nil:
		return fmt.Errorf("undo: %w", err)
	case c.Config.Labels[labelAttempt] != attempt:
		return nil // somebody else's
	}
	if err := d.remove(late, c.ID); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// errForeign says that the name of a sandbox's container is that of another.
var errForeign = errors.New("a container of that name was not made by this installation")

// find returns the container of a sandbox. None gives [warren.ErrNotFound], and one that only has its name errForeign.
func (d *Driver) find(ctx context.Context, id warren.SandboxID) (*container.InspectResponse, error) {
	return d.findSized(ctx, id, false)
}

func (d *Driver) findSized(ctx context.Context, id warren.SandboxID, size bool) (*container.InspectResponse, error) {
	if err := d.checkOpen(); err != nil {
		return nil, err
	}
	c, err := d.inspect(ctx, id, d.labels.name(id), size)
	if err == nil {
		if owner, ok := d.labels.owns(c.Name, c.Config.Labels); ok && owner == id {
			return c, nil
		}
		err = fmt.Errorf("%w: %w (%s); rename or remove it", warren.ErrUnavailable, errForeign, d.labels.name(id))
	} else if !errors.Is(err, warren.ErrNotFound) {
		return nil, err
	}
	// The name is the lock of a create. Whoever has renamed the container since has not made it another sandbox's.
	if c, rerr := d.findRenamed(ctx, id, size); c != nil || rerr != nil {
		return c, rerr
	}
	return nil, err
}

// findRenamed returns the container of a sandbox that has not its name any more, nil when there is none. The labels alone do not
// tell it: whatever people start from an image that they made of a sandbox has them too.
func (d *Driver) findRenamed(ctx context.Context, id warren.SandboxID, size bool) (*container.InspectResponse, error) {
	list, err := d.listContainers(ctx, labelSandbox+"="+string(id))
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	for _, l := range list.Items {
		c, err := d.inspect(ctx, id, l.ID, size)
		if errors.Is(err, warren.ErrNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		if c.Config.Labels[labelSandbox] == string(id) && c.Config.Labels[labelInstallation] == d.labels.installation && startedHere(c) {
			return c, nil
		}
	}
	return nil, nil
}

// startedHere says whether a container was started as this driver does: with a file system for the guest's socket, which an
// image cannot hand on.
func startedHere(c *container.InspectResponse) bool {
	return c.HostConfig != nil && c.HostConfig.Tmpfs[socketDir] != ""
}

// inspect asks for a container by its name or the engine's id.
func (d *Driver) inspect(ctx context.Context, id warren.SandboxID, name string, size bool) (*container.InspectResponse, error) {
	res, err := d.api.ContainerInspect(ctx, name, client.ContainerInspectOptions{Size: size})
	if containerGone(err) {
		return nil, warren.ErrNotFound
	}
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	c := &res.Container
	if c.Config == nil || c.State == nil {
		return nil, fmt.Errorf("the engine describes the container of sandbox %s without its state: %w", id, warren.ErrUnavailable)
	}
	return c, nil
}

// Delete ends a sandbox and removes all of it, see [driver.Driver].
func (d *Driver) Delete(ctx context.Context, id warren.SandboxID) error {
	if err := d.delete(ctx, id); err != nil {
		return fmt.Errorf("delete sandbox %s: %w", id, err)
	}
	return nil
}

func (d *Driver) delete(ctx context.Context, id warren.SandboxID) error {
	if !validID(id) {
		return nil // no sandbox can have it
	}
	unlock, err := d.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := d.find(ctx, id)
	switch {
	case errors.Is(err, errForeign):
		d.log.Warn("a container has the name of a sandbox's and is not ours; it is left alone", "name", d.labels.name(id))
	case errors.Is(err, warren.ErrNotFound):
	case err != nil:
		return err
	default:
		if err := d.remove(ctx, c.ID); err != nil {
			return err
		}
	}
	d.dropChannel(id)
	return errors.Join(d.dropCopies(ctx, id), (&stage{dir: d.stagePath(id)}).close())
}

// validID keeps an id from being a path.
func validID(id warren.SandboxID) bool { return id != "" && !strings.ContainsAny(string(id), "/.\x00") }

// remove ends a container and waits until the engine has nothing of it.
func (d *Driver) remove(ctx context.Context, container string) error {
	d.mu.Lock()
	d.deleting[container] = true
	d.mu.Unlock()
	defer func() {
		// Its last event may be behind.
		time.AfterFunc(time.Minute, func() {
			d.mu.Lock()
			delete(d.deleting, container)
			d.mu.Unlock()
		})
	}()
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		_, err := d.api.ContainerRemove(ctx, container, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		if containerGone(err) {
			return nil
		}
		if err == nil {
			continue // until it is not found: an answer of success may mean that it is marked to be removed
		}
		// Being removed by somebody else, or busy for a moment; but not for long.
		if client.IsErrConnectionFailed(err) || ctx.Err() != nil || wait == time.Second {
			return d.engineError(ctx, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
