//go:build linux

package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	cerrdefs "github.com/containerd/errdefs"
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

// exitOf says how a container ended.
func exitOf(s *container.State) *driver.Exit {
	const killed, terminated = 128 + 9, 128 + 15
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
	for i, l := range list {
		out[i] = l.Status
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
	res, err := d.api.ContainerList(ctx, client.ContainerListOptions{
		All: true, Filters: client.Filters{}.Add("label", labelInstallation+"="+d.labels.installation),
	})
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
			continue
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
			l.Exit = exitOf(c.State)
		}
		out = append(out, l)
	}
	return out, nil
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
	if cerrdefs.IsNotFound(err) {
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
