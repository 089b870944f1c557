package engine

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/warren-sandbox/warren/driver"
)

// Where the driver can (driver.Pooler), executions are kept ready in which nothing runs yet, for sandboxes like those that were
// made last: as many as there were in the last minutes, up to Options.Pool of all kinds. They take memory, so they go when
// nobody has asked for a while, and first of all when the host's memory runs short. What they are made from is a part of what
// they are found by, so none is ever used for another image than its own.

const (
	// poolWindow is how far demand looks back.
	poolWindow = 2 * time.Minute
	// poolLife is how long a kind of sandbox that nobody asks for is kept ready.
	poolLife = 10 * time.Minute
)

// demand is when something was asked for: line readings, newest last.
type demand struct{ uses []int64 }

func (d *demand) note(now int64) { d.uses = append(d.uses, now) }

// last is when that was last, 0 for never.
func (d *demand) last() int64 {
	if len(d.uses) == 0 {
		return 0
	}
	return d.uses[len(d.uses)-1]
}

// wanted is how many are to be ready: as many as were asked for in the last minutes, and one for a while after that, but no more than most.
func (d *demand) wanted(now int64, most int) (n int) {
	d.uses = slices.DeleteFunc(d.uses, func(at int64) bool { return now-at > int64(poolLife) })
	d.uses = d.uses[max(len(d.uses)-maxDemand, 0):]
	for _, at := range d.uses {
		if now-at <= int64(poolWindow) || n == 0 {
			n++
		}
	}
	return min(n, most)
}

// maxDemand is how many uses are remembered: more than are ever kept ready.
const maxDemand = 64

// poolClass is a kind of sandbox that is kept ready, guarded by Engine.mu.
type poolClass struct {
	driver string
	spec   driver.Spec // of which the mounts have no directories
	demand
	want int
	// busy says that somebody tells the driver; again that it has to be told anew.
	busy, again bool
	told        int64 // line reading of the last time
}

// tellAgain is how often a driver hears of a kind that goes on being asked for: what it had may have gone with its processes.
const tellAgain = 5 * time.Second

// noteStart takes down that a sandbox was made of a spec, and keeps more or fewer like it ready.
func (e *Engine) noteStart(name string, spec *driver.Spec, own int) {
	p, ok := driver.As[driver.Pooler](e.opts.Drivers[name])
	switch {
	case !ok || e.opts.Pool == 0:
		return
	case len(spec.Mounts) != own:
		return // a directory of the user's is hardly asked for again
	}
	c := &poolClass{driver: name, spec: *spec}
	c.spec.ID, c.spec.Hostname, c.spec.Labels, c.spec.Mounts, c.spec.Card = "pool", commonName, nil, nil, nil
	for _, m := range spec.Mounts {
		c.spec.Mounts = append(c.spec.Mounts, driver.Mount{Target: m.Target, Writable: m.Writable, Owner: m.Owner})
	}
	key := fmt.Sprintf("%s %q %+v %q %q %v", name, c.spec.Root.Digest, c.spec.Limits, c.spec.Env, c.spec.Options, targets(c.spec.Mounts))
	e.mu.Lock()
	defer e.mu.Unlock()
	if have := e.pool[key]; have != nil {
		c = have
	} else {
		e.pool[key] = c
	}
	c.note(e.line.now())
	e.sizePool(func(c *poolClass) { e.tellPool(p, c) })
	if c.want > 0 && e.line.now()-c.told > int64(tellAgain) {
		e.tellPool(p, c)
	}
}

func targets(mounts []driver.Mount) (out []string) {
	for _, m := range mounts {
		out = append(out, fmt.Sprint(m.Target, m.Writable))
	}
	return out
}

// sizePool decides how many of each kind there are to be, those asked for last first, and calls tell for each of which
// there are to be more or fewer. The caller holds mu.
func (e *Engine) sizePool(tell func(*poolClass)) {
	now := e.line.now()
	var all []*poolClass
	for key, c := range e.pool {
		if c.wanted(now, 1) == 0 && c.want == 0 && !c.busy {
			delete(e.pool, key)
			continue
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *poolClass) int { return cmp.Compare(b.last(), a.last()) })
	left := e.opts.Pool
	for _, c := range all {
		want := c.wanted(now, left)
		left -= want
		if want != c.want {
			c.want = want
			tell(c)
		}
	}
}

// tellPool tells the driver how many of a kind there are to be. The caller holds mu.
func (e *Engine) tellPool(p driver.Pooler, c *poolClass) {
	c.told = e.line.now()
	if c.busy {
		c.again = true
		return
	}
	c.busy = e.spawn(func() {
		for {
			e.mu.Lock()
			c.again = false
			spec, want := c.spec, c.want
			e.mu.Unlock()
			if err := e.warm(p, spec, want); err != nil && e.ctx.Err() == nil {
				e.log.Warn("no executions are kept ready", "driver", c.driver, "error", err)
			}
			e.mu.Lock()
			if !c.again || e.ctx.Err() != nil {
				c.busy = false
				e.mu.Unlock()
				return
			}
			e.mu.Unlock()
		}
	})
}

// warm gives the mounts of a spec some directory, for only their targets count.
func (e *Engine) warm(p driver.Pooler, spec driver.Spec, n int) error {
	ctx, cancel := context.WithTimeout(e.ctx, e.opts.BootTimeout)
	defer cancel()
	spec.Mounts = slices.Clone(spec.Mounts)
	defer func() { closeMounts(spec.Mounts) }()
	for i := range spec.Mounts {
		f, err := os.Open(e.opts.PauseDir)
		if err != nil {
			return err
		}
		spec.Mounts[i].Dir, spec.Mounts[i].Source = f, e.opts.PauseDir
	}
	return p.Warm(ctx, &spec, n)
}

// coolPool lets go what nobody has asked for lately, or with all everything; of one image if a digest is given. It waits for the driver.
func (e *Engine) coolPool(all bool, digest string) {
	type told struct {
		p    driver.Pooler
		spec driver.Spec
		want int
	}
	var list []told
	e.mu.Lock()
	if all {
		for _, c := range e.pool {
			if digest == "" || c.spec.Root.Digest == digest {
				c.uses = nil
			}
		}
	}
	e.sizePool(func(c *poolClass) {
		if c.busy {
			c.again = true
			return
		}
		if p, ok := driver.As[driver.Pooler](e.opts.Drivers[c.driver]); ok {
			list = append(list, told{p, c.spec, c.want})
		}
	})
	e.mu.Unlock()
	for _, t := range list {
		if err := e.warm(t.p, t.spec, t.want); err != nil && e.ctx.Err() == nil {
			e.log.Warn("executions that are kept ready not let go", "error", err)
		}
	}
}
