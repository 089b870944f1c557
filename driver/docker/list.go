//go:build linux

package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

const (
	creating = driver.Creating
	running  = driver.Running
	dead     = driver.Dead
)

// stateOf says what the engine's word for a container's state means here.
func stateOf(status string) driver.State {
	switch status {
	case "created":
		return creating // its create was cut short, or goes on
	case "running", "paused", "restarting":
		return running
	}
	return dead
}

// Codes of containers that did not end by themselves. foundDead is what an engine gives those that it finds dead at its own start.
const killed, terminated, foundDead = 128 + 9, 128 + 15, 255

// engineEnded is said of containers that their engine took along.
const engineEnded = `the engine was stopped or restarted, which ends its containers; with "live-restore": true in its configuration they run on`

// absence is a time in which the watch had lost its engine. One without an end goes on.
type absence struct{ from, to time.Time }

// maxAbsences is how many the driver remembers.
const maxAbsences = 16

// left notes that the engine has gone, and came that it is back.
func (d *Driver) left() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.absences); n > 0 && d.absences[n-1].to.IsZero() {
		return
	}
	d.absences = append(d.absences, absence{from: time.Now()})
	d.absences = d.absences[max(0, len(d.absences)-maxAbsences):]
}

func (d *Driver) came() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.absences); n > 0 && d.absences[n-1].to.IsZero() {
		d.absences[n-1].to = time.Now()
	}
}

// ended says how a container ended, with what the driver has seen of its engine. An engine that is stopped, or that finds
// containers of an earlier one at its start, asks them to end: the guest obeys, which looks as if it had wished so.
func (d *Driver) ended(c *container.InspectResponse) *driver.Exit {
	e := exitOf(c.State)
	if e.Reason == "oom" || e.Reason == "lost" || c.State.ExitCode != 0 && c.State.ExitCode != killed && c.State.ExitCode != terminated {
		return e
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range d.absences {
		// The clock of an engine on another machine is another.
		if d.at.local() && !e.Time.Before(a.from) && (a.to.IsZero() || !e.Time.After(a.to)) {
			e.Reason, e.Message = "lost", engineEnded
			return e
		}
	}
	if d.signalled[c.ID] {
		e.Reason = "killed"
		e.Message = "somebody stopped its container, or " + engineEnded
	}
	return e
}

// exitOf says how a container ended.
func exitOf(s *container.State) *driver.Exit {
	e := &driver.Exit{Message: fmt.Sprintf("the container ended with code %d", s.ExitCode)}
	switch {
	case s.OOMKilled && s.ExitCode != 0:
		e.Reason = "oom"
		e.Message = "the container used more memory than its limit"
	case s.ExitCode == killed, s.ExitCode == terminated:
		e.Reason = "killed"
	case s.Status == container.StateDead || s.Status == container.StateRemoving:
		e.Reason = "lost"
		e.Message = "the container is being removed"
	case s.ExitCode == foundDead:
		e.Reason, e.Message = "lost", engineEnded
	default:
		e.Reason = "exited"
	}
	if t, err := time.Parse(time.RFC3339Nano, s.FinishedAt); err == nil && t.Year() > 1 {
		e.Time = t
	} else {
		e.Time = time.Now()
	}
	return e
}

// List returns the sandboxes of this installation, see [driver.Driver].
func (d *Driver) List(ctx context.Context) ([]driver.Status, error) {
	list, err := d.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	out := make([]driver.Status, len(list))
	have := map[warren.SandboxID]bool{}
	for i, l := range list {
		out[i] = l.Status
		have[l.ID] = true
	}
	// Of others there is only what they wrote to their mounts, which their Delete has to bring home.
	copied, err := d.copied()
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	for _, id := range copied {
		if have[id] {
			continue
		}
		c, err := d.loadCopies(id)
		switch {
		case err == nil && c == nil:
		case err == nil && !c.Live:
			out = append(out, driver.Status{ID: id, State: creating})
		default:
			out = append(out, driver.Status{ID: id, State: dead, Exit: &driver.Exit{Reason: "lost", Message: "its container is gone", Time: time.Now()}})
		}
	}
	return out, nil
}

// listed is a sandbox and its container.
type listed struct {
	driver.Status
	container string
}

func (d *Driver) list(ctx context.Context) ([]listed, error) {
	if err := d.checkOpen(); err != nil {
		return nil, err
	}
	res, err := d.listContainers(ctx)
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	var out []listed
	for _, c := range res.Items {
		var id warren.SandboxID
		ours := false
		for _, name := range c.Names {
			if owner, ok := d.labels.owns(name, c.Labels); ok {
				id, ours = owner, true
			}
		}
		if !ours {
			// It may be one of ours that somebody has renamed.
			if id = warren.SandboxID(c.Labels[labelSandbox]); id == "" {
				continue
			}
			r, err := d.find(ctx, id)
			if errors.Is(err, warren.ErrNotFound) || errors.Is(err, errForeign) || err == nil && r.ID != c.ID {
				continue
			}
			if err != nil {
				return nil, err
			}
		}
		l := listed{driver.Status{ID: id, State: stateOf(string(c.State))}, c.ID}
		if l.State == dead {
			c, err := d.find(ctx, id)
			if errors.Is(err, warren.ErrNotFound) || errors.Is(err, errForeign) {
				continue // removed meanwhile
			}
			if err != nil {
				return nil, err
			}
			l.Exit = d.ended(c)
		}
		out = append(out, l)
	}
	return out, nil
}

// listTries is how often a list is asked for that fails because of a container which has just been removed, as Podman's do.
const listTries = 40

func (d *Driver) listContainers(ctx context.Context, labels ...string) (res client.ContainerListResult, err error) {
	for range listTries {
		res, err = d.api.ContainerList(ctx, client.ContainerListOptions{
			All: true, Filters: client.Filters{}.Add("label", append(labels, labelInstallation+"="+d.labels.installation)...),
		})
		if !containerGone(err) {
			break
		}
		select { // others are being removed meanwhile
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return res, ctx.Err()
		}
	}
	return res, err
}

// Stats measures a sandbox, see [driver.Statser].
func (d *Driver) Stats(ctx context.Context, id warren.SandboxID) (driver.Stats, error) {
	s, err := d.stats(ctx, id)
	if err != nil {
		return driver.Stats{}, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	return s, nil
}

func (d *Driver) stats(ctx context.Context, id warren.SandboxID) (driver.Stats, error) {
	if !validID(id) {
		return driver.Stats{}, warren.ErrNotFound
	}
	c, err := d.findSized(ctx, id, true)
	if err != nil {
		return driver.Stats{}, err
	}
	if stateOf(string(c.State.Status)) != running {
		return driver.Stats{}, fmt.Errorf("the sandbox is %s: %w", c.State.Status, warren.ErrState)
	}
	res, err := d.api.ContainerStats(ctx, c.ID, client.ContainerStatsOptions{})
	if containerGone(err) {
		return driver.Stats{}, warren.ErrNotFound
	}
	if err != nil {
		return driver.Stats{}, d.engineError(ctx, err)
	}
	defer res.Body.Close()
	var s container.StatsResponse
	if err := json.NewDecoder(io.LimitReader(res.Body, 1<<20)).Decode(&s); err != nil {
		return driver.Stats{}, d.engineError(ctx, err)
	}
	out := driver.Stats{
		CPUTime: time.Duration(s.CPUStats.CPUUsage.TotalUsage), PIDs: uint32(s.PidsStats.Current), Memory: int64(s.MemoryStats.Usage),
	}
	// Pages of files that nobody uses can be had back at any time.
	for _, key := range []string{"total_inactive_file", "inactive_file"} {
		if n, ok := s.MemoryStats.Stats[key]; ok {
			out.Memory -= min(int64(n), out.Memory)
			break
		}
	}
	if c.SizeRw != nil {
		out.Disk = *c.SizeRw
	}
	return out, nil
}
