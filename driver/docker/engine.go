//go:build linux

package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/system"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// engine is what an engine says of itself.
type engine struct {
	info    system.Info
	version string
	asked   time.Time
	// base is the host id that stands for a container's 0.
	base uint32
	// userns says that base is not an id of the host's own users.
	userns bool
	// podman says that it is Podman's service, which takes a system call filter as a file.
	podman bool
	// copies says why sandboxes work on copies of their mounts, "" when they have the directories themselves.
	copies string
	// noCard says why sandboxes have no network card, "" when those can have one whose kernel is the host's.
	noCard   string
	findings []finding
}

// finding is one comparison of what an engine gives with what a sandbox is promised.
type finding struct {
	driver.Check
	// accept is what [Options.Accept] has to name for sandboxes to run all the same; only a warning has it.
	accept string
	// unlessOwnKernel says that runtimes with a kernel of their own do not need it.
	unlessOwnKernel bool
}

// engineAge is how long what an engine has said is believed. It can only change with the engine's own restart.
const engineAge = 30 * time.Second

// askEngine returns what the engine says of itself.
func (d *Driver) askEngine(ctx context.Context) (*engine, error) {
	if err := d.checkOpen(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	e := d.engine
	d.mu.Unlock()
	if e != nil && time.Since(e.asked) < engineAge {
		return e, nil
	}
	res, err := d.api.Info(ctx, client.InfoOptions{})
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	v, err := d.api.ServerVersion(ctx, client.ServerVersionOptions{})
	if err != nil {
		return nil, d.engineError(ctx, err)
	}
	e = &engine{info: res.Info, version: d.api.ClientVersion(), asked: time.Now()}
	e.podman = slices.ContainsFunc(v.Components, func(c system.ComponentVersion) bool { return strings.Contains(c.Name, "Podman") })
	e.ids()
	switch {
	case e.rootless():
		e.copies = "the engine is rootless, and cannot give a directory's files other owners"
	case e.podman:
		// It looks for the image first. One that does not see a directory refuses to start a container on it.
	default:
		sees, err := d.seesMounts(ctx)
		if err != nil {
			return nil, err
		}
		if !sees {
			e.copies = "the engine does not see this machine's directories"
		}
	}
	e.noCard = e.noCards(d.at)
	e.judge()
	d.mu.Lock()
	d.engine = e
	d.mu.Unlock()
	return e, nil
}

// forgetEngine makes the next call ask again, after one that failed in a way that the profile may explain.
func (d *Driver) forgetEngine() {
	d.mu.Lock()
	d.engine = nil
	d.mu.Unlock()
}

// engineError gives an error of the engine's a kind.
func (d *Driver) engineError(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		return ctx.Err()
	case d.ctx.Err() != nil:
		return d.checkOpen()
	case client.IsErrConnectionFailed(err) && !d.at.local():
		return fmt.Errorf("the engine at %s does not answer (%s); start it, or set DOCKER_HOST: %w", d.at.shown(), err, warren.ErrUnavailable)
	case client.IsErrConnectionFailed(err):
		return fmt.Errorf("the engine at %s does not answer; start it, or set DOCKER_HOST: %w", d.at.shown(), warren.ErrUnavailable)
	case strings.Contains(err.Error(), "no space left on device"):
		return fmt.Errorf("the engine's disk is full: %w (%s)", warren.ErrExhausted, err)
	case cerrdefs.IsNotFound(err), cerrdefs.IsConflict(err), cerrdefs.IsInvalidArgument(err):
		return err // what it means depends on the call
	}
	// A stream that broke off, or an answer of a dying engine.
	return fmt.Errorf("the engine says: %w (%s)", warren.ErrUnavailable, err)
}

// containerGone says whether a call about a container failed because there is none. Podman fails in its own way when the
// container is removed while it answers.
func containerGone(err error) bool {
	return err != nil && (cerrdefs.IsNotFound(err) || strings.Contains(err.Error(), "no such container"))
}

// option returns a value of a security option, such as "name=seccomp,profile=default".
func (e *engine) option(name, key string) (value string, ok bool) {
	for _, o := range e.info.SecurityOptions {
		fields := map[string]string{}
		for f := range strings.SplitSeq(o, ",") {
			k, v, _ := strings.Cut(f, "=")
			fields[k] = v
		}
		if fields["name"] == name {
			return fields[key], true
		}
	}
	return "", false
}

// ids finds out which id of the host a container's root is. An engine with user namespaces says that it has them and not
// which ids they map, but it keeps everything in a directory named for them.
func (e *engine) ids() {
	if _, ok := e.option("userns", "name"); !ok {
		return
	}
	uid, gid, ok := strings.Cut(path.Base(e.info.DockerRootDir), ".")
	if n, err := strconv.ParseUint(uid, 10, 32); ok && err == nil && uid == gid {
		e.base, e.userns = uint32(n), true
	}
}

func (e *engine) rootless() bool { _, ok := e.option("rootless", "name"); return ok }

// acceptHint says how an operator accepts what an engine lacks.
func acceptHint(what string) string {
	return fmt.Sprintf("accept it with docker.accept: [%s] in the configuration or %s=%s in the server's environment, commas between several", what, acceptVariable, what)
}

// acceptVariable is the variable of [Options.Accept], as the configuration reads it.
const acceptVariable = "WARREN_DOCKER_ACCEPT"

// minAPI is the least version of the engine's API that has what is used here.
const minAPI = "1.41"

// judge compares what the engine gives with what a sandbox is promised.
func (e *engine) judge() {
	add := func(name, status, message, hint string) *finding {
		e.findings = append(e.findings, finding{Check: driver.Check{Name: "docker " + name, Status: status, Message: message, Hint: hint}})
		return &e.findings[len(e.findings)-1]
	}
	ok := func(name, message string) { add(name, "ok", message, "") }
	i := &e.info
	if older(e.version, minAPI) {
		add("engine", "fail", fmt.Sprintf("%s speaks API %s, older than %s", i.ServerVersion, e.version, minAPI), "install Docker 20.10 or newer, or Podman 4 or newer")
	} else {
		ok("engine", fmt.Sprintf("%s, API %s, runtimes %s", i.ServerVersion, e.version, strings.Join(e.runtimes(), " ")))
	}
	if profile, found := e.option("seccomp", "profile"); !found {
		add("seccomp", "fail", "the engine has no system call filter (seccomp)", "use a kernel with CONFIG_SECCOMP_FILTER=y and an engine built with seccomp")
	} else if profile == "unconfined" {
		add("seccomp", "fail", "the engine's system call filter is switched off", `remove "seccomp-profile": "unconfined" from the engine's configuration`)
	} else {
		ok("seccomp", "filtered, profile "+profile)
	}
	var missing []string
	for _, l := range []struct {
		name string
		has  bool
	}{{"memory", i.MemoryLimit}, {"processes (pids)", i.PidsLimit}, {"processors (cpu cfs quota)", i.CPUCfsQuota && i.CPUCfsPeriod}} {
		if !l.has {
			missing = append(missing, l.name)
		}
	}
	if len(missing) > 0 {
		add("limits", "fail", "the engine cannot limit "+strings.Join(missing, ", "), "give the engine those control groups; a rootless engine needs them delegated by systemd")
	} else {
		ok("limits", fmt.Sprintf("memory, processors and processes by cgroup v%s", version1(i.CgroupVersion)))
	}
	switch base, found := e.option("userns", "name"); {
	case e.rootless():
		f := add("userns", "warn", "a container's root is the user who runs the engine (rootless)",
			"use an engine that runs as root, with userns-remap, or "+acceptHint(AcceptNoUserNamespace))
		f.accept, f.unlessOwnKernel = AcceptNoUserNamespace, true
	case found && !e.userns:
		add("userns", "fail", fmt.Sprintf("the engine has them (%s), but which ids they map cannot be told from its directory %q", base, path.Base(i.DockerRootDir)), `set "userns-remap" to a user that has the same range in /etc/subuid and /etc/subgid`)
	case e.userns:
		ok("userns", fmt.Sprintf("a container's root is id %d of the host", e.base))
	default:
		f := add("userns", "warn", "a container's root is the host's root",
			`set "userns-remap": "default" in the engine's configuration, use a runtime such as runsc, or `+acceptHint(AcceptNoUserNamespace))
		f.accept, f.unlessOwnKernel = AcceptNoUserNamespace, true
	}
	if why := e.noQuota(); why != "" {
		f := add("disk", "warn", "the engine cannot limit what a container writes to its root: "+why,
			"put the engine's data on xfs mounted with pquota, or on zfs, or "+acceptHint(AcceptNoDiskLimit))
		f.accept = AcceptNoDiskLimit
	} else {
		ok("disk", "storage driver "+i.Driver)
	}
	if e.copies != "" {
		f := add("mounts", "warn", e.copies+": sandboxes work on copies of their workspaces, which are read back when somebody looks at them and when the sandbox is deleted",
			"run Warren where the engine runs, or "+acceptHint(AcceptCopiedMounts))
		f.accept = AcceptCopiedMounts
	} else {
		ok("mounts", "sandboxes have the directories of this machine")
	}
	if e.noCard != "" {
		add("network", "warn", "sandboxes have no network but their loopback: "+e.noCard, "a policy is then refused; `--policy none`, which is the default there, is not")
	} else {
		ok("network", "sandboxes on runtimes without a kernel of their own can have a network card")
	}
	if names := e.runsc(); len(names) > 0 {
		add("gvisor", "warn", fmt.Sprintf("runtime %s hides from the engine what sandboxes write to their root; `warren stats` shows far too much", strings.Join(names, " ")),
			`add "--overlay2=none" to its runtimeArgs in the engine's configuration`)
	}
}

// runsc looks at how the engine runs gVisor. By default gVisor keeps what is written to the root to itself.
func (e *engine) runsc() (names []string) {
	for _, name := range e.runtimes() {
		r := e.info.Runtimes[name]
		if strings.Contains(path.Base(r.Path), "runsc") && !slices.Contains(r.Args, "--overlay2=none") {
			names = append(names, name)
		}
	}
	return names
}

func version1(v string) string {
	if v == "" {
		return "1"
	}
	return v
}

// noQuota says why the engine cannot limit a container's disk, "" when it can.
func (e *engine) noQuota() string {
	switch e.info.Driver {
	case "zfs":
		return ""
	case "btrfs":
		return "storage driver btrfs counts the image as well"
	case "overlay2", "overlay":
		for _, s := range e.info.DriverStatus {
			if s[0] == "Backing Filesystem" && s[1] != "xfs" {
				return fmt.Sprintf("storage driver %s on %s", e.info.Driver, s[1])
			}
		}
		return "" // xfs can, when mounted so; if not, the engine refuses the container and says why
	}
	return "storage driver " + e.info.Driver
}

func (e *engine) runtimes() []string { return slices.Sorted(maps.Keys(e.info.Runtimes)) }

// ownKernel says whether a runtime, by its name or program, gives each container a kernel of its own.
func ownKernel(name, program string) bool {
	for _, s := range []string{name, path.Base(program)} {
		for _, known := range []string{"runsc", "gvisor", "kata"} {
			if strings.Contains(s, known) {
				return true
			}
		}
	}
	return false
}

// plan is what a sandbox gets from the engine.
type plan struct {
	runtime   string // "" is the engine's default
	ownKernel bool
	base      uint32
	quota     bool
	// copies says that mounts become volumes, and the guest a part of the image.
	copies bool
	// filter is the system call filter, or the file that it is in.
	filter string
	// noCard says why the sandbox can have no network card, "" if it can.
	noCard string
}

// plan decides how a sandbox would run, or why it must not.
func (d *Driver) plan(e *engine, options map[string]string) (*plan, error) {
	p := &plan{runtime: d.opts.Runtime, base: e.base, quota: e.noQuota() == "", copies: e.copies != "", filter: systemCallFilter(), noCard: e.noCard}
	if e.podman {
		p.filter = filepath.Join(d.opts.StateDir, filterFile)
	}
	if r := options[optionRuntime]; r != "" {
		p.runtime = r
	}
	name := p.runtime
	if name == "" {
		name = e.info.DefaultRuntime
	}
	r, known := e.info.Runtimes[name]
	// A name like io.containerd.kata.v2 is looked up by containerd itself.
	if !known && !strings.HasPrefix(name, "io.containerd.") {
		return nil, fmt.Errorf("the engine has no runtime %q (it has %s); add it to the engine's configuration: %w", name, strings.Join(e.runtimes(), ", "), warren.ErrInvalid)
	}
	p.ownKernel = ownKernel(name, r.Path)
	if p.ownKernel && p.noCard == "" {
		p.noCard = fmt.Sprintf("runtime %s has a kernel of its own, which knows the cards alone that were there when it started; use a runtime such as runc, or driver gvisor", name)
	}
	for _, f := range e.findings {
		lacks := f.Status == "fail" || f.accept != "" && !d.accepts(f.accept) && !(f.unlessOwnKernel && p.ownKernel)
		if lacks {
			return nil, fmt.Errorf("the engine gives less than a sandbox is promised: %s; %s: %w", f.Message, f.Hint, errors.ErrUnsupported)
		}
	}
	return p, nil
}

// older compares API versions such as 1.41.
func older(a, b string) bool {
	var am, an, bm, bn int
	if n, _ := fmt.Sscanf(a, "%d.%d", &am, &an); n != 2 {
		return false // an engine that does not say is found out by what it refuses
	}
	fmt.Sscanf(b, "%d.%d", &bm, &bn)
	return am < bm || am == bm && an < bn
}

// Check looks at the engine, see [driver.Checker].
func (d *Driver) Check(ctx context.Context) []driver.Check {
	e, err := d.askEngine(ctx)
	if err != nil {
		return []driver.Check{{Name: "docker engine", Status: "fail", Message: err.Error(), Hint: "start Docker or Podman, or set DOCKER_HOST to its socket"}}
	}
	out := make([]driver.Check, len(e.findings))
	for i, f := range e.findings {
		out[i] = f.Check
		switch {
		case f.accept == "":
		case d.accepts(f.accept):
			out[i].Message += "; that is accepted"
		case f.unlessOwnKernel:
			out[i].Message += "; sandboxes on runtimes without a kernel of their own are refused"
		default:
			out[i].Message += "; sandboxes are refused"
		}
	}
	return out
}
