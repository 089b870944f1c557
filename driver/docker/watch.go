//go:build linux

package docker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/internal/deaths"
)

// podmanLooks is how often Podman is asked who is dead: it names events differently from version to version, and filters by the
// names that it does not show.
const podmanLooks = 2 * time.Second

// watchRetry is how long the watch waits before it asks an engine again that has gone.
const watchRetry = 500 * time.Millisecond

// Watch reports deaths, see [driver.Watcher]. It goes on across restarts of the engine: whenever its events begin anew, it
// first looks who is dead.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Status, error) {
	if err := d.checkOpen(); err != nil {
		return nil, err
	}
	// An engine that has gone is waited for.
	first, err := d.list(ctx)
	if err != nil && !errors.Is(err, warren.ErrUnavailable) {
		return nil, fmt.Errorf("watch sandboxes: %w", err)
	}
	w := &watch{d: d, alive: map[string]warren.SandboxID{}, told: map[string]bool{}, news: make(chan driver.Status)}
	for _, l := range first {
		w.note(l)
		if l.State == dead {
			w.told[l.container] = true
		}
	}
	out := make(chan driver.Status)
	go deaths.Queue(ctx, w.news, out)
	go w.run(ctx)
	return out, nil
}

// watch follows the containers of an installation. They are told apart by the engine's ids, since a sandbox may come back
// under its own.
type watch struct {
	d     *Driver
	alive map[string]warren.SandboxID
	told  map[string]bool
	news  chan driver.Status
}

func (w *watch) note(l listed) {
	if l.State != dead {
		w.alive[l.container] = l.ID
	}
}

func (w *watch) run(ctx context.Context) {
	defer close(w.news)
	defer w.d.came() // nobody looks any more
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.d.ctx, cancel)()
	for ctx.Err() == nil {
		w.follow(ctx)
		if ctx.Err() == nil {
			w.d.left()
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchRetry):
		}
	}
}

// follow reads events until they end.
func (w *watch) follow(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := w.d.api.Events(ctx, client.EventsListOptions{Filters: client.Filters{}.
		Add("type", "container").Add("event", "start", "kill", "die", "destroy").Add("label", labelInstallation+"="+w.d.labels.installation)})
	// What happened before the events began.
	if !w.look(ctx) {
		return
	}
	w.d.came()
	var again <-chan time.Time
	if e, err := w.d.askEngine(ctx); err == nil && e.podman {
		t := time.NewTicker(podmanLooks)
		defer t.Stop()
		again = t.C
	}
	for {
		select {
		case m := <-events.Messages:
			id, ok := w.d.labels.owns(m.Actor.Attributes["name"], m.Actor.Attributes)
			if !ok {
				if id, ok = w.alive[m.Actor.ID]; !ok { // renamed
					continue
				}
			}
			switch m.Action {
			case "start":
				w.alive[m.Actor.ID] = id
				continue
			case "kill":
				if s := m.Actor.Attributes["signal"]; s == "15" || s == "9" {
					w.d.signal(m.Actor.ID, true)
				}
				continue
			}
			w.died(ctx, m.Actor.ID, id)
			if m.Action == "destroy" {
				w.d.signal(m.Actor.ID, false)
				delete(w.told, m.Actor.ID) // nothing more will be heard of it
			}
		case <-again:
			if !w.look(ctx) {
				return
			}
		case <-events.Err:
			return
		case <-ctx.Done():
			return
		}
	}
}

// look reports all that is dead or gone now.
func (w *watch) look(ctx context.Context) (ok bool) {
	list, err := w.d.list(ctx)
	if err != nil {
		return false
	}
	there := map[string]bool{}
	for _, l := range list {
		there[l.container] = true
		if l.State == dead {
			w.tell(ctx, l.container, l.Status)
		}
		w.note(l)
	}
	for container, id := range w.alive {
		if !there[container] {
			w.gone(ctx, container, id)
		}
	}
	return true
}

// signal notes that somebody has sent a container's first process a signal through the engine, or that the container is gone.
func (d *Driver) signal(container string, sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if sent {
		d.signalled[container] = true
	} else {
		delete(d.signalled, container)
	}
}

// died asks how a container ended.
func (w *watch) died(ctx context.Context, container string, id warren.SandboxID) {
	if w.told[container] {
		return
	}
	c, err := w.d.find(ctx, id)
	switch {
	case errors.Is(err, warren.ErrNotFound), errors.Is(err, errForeign), err == nil && c.ID != container:
		w.gone(ctx, container, id)
	case err == nil && stateOf(string(c.State.Status)) == dead:
		w.tell(ctx, container, driver.Status{ID: id, State: dead, Exit: w.d.ended(c)})
	}
}

// gone reports a container that somebody else removed.
func (w *watch) gone(ctx context.Context, container string, id warren.SandboxID) {
	w.tell(ctx, container, driver.Status{ID: id, State: dead, Exit: &driver.Exit{
		Reason: "lost", Message: "its container was removed by somebody else", Time: time.Now(),
	}})
}

// tell reports a death once, and not those that this driver brings about.
func (w *watch) tell(ctx context.Context, container string, s driver.Status) {
	delete(w.alive, container)
	if w.told[container] {
		return
	}
	w.told[container] = true
	w.d.mu.Lock()
	ours := w.d.deleting[container]
	w.d.mu.Unlock()
	if ours {
		return
	}
	select {
	case w.news <- s:
	case <-ctx.Done():
	}
}
