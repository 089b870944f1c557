package warren

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// TemplateSpec says what a template is built from.
type TemplateSpec struct {
	// Name is up to 40 of a-z, 0-9 and -, not - first.
	Name string `json:"name"`
	// Image, Repo, Env, Resources and Driver are those of the sandbox that it is built in, as in [Spec].
	Image     string            `json:"image,omitempty"`
	Repo      *RepoSource       `json:"repo,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Resources Resources         `json:"resources,omitzero"`
	Driver    string            `json:"driver,omitempty"`
	// Setup is run in order, each step once the one before it has succeeded.
	Setup []TemplateStep `json:"setup,omitempty"`
	// Services are started after the setup and run in every sandbox made of the template.
	Services []Service `json:"services,omitempty"`
	// ReadyTimeout is how long they may take until all are ready; 0 means 5 minutes.
	ReadyTimeout time.Duration `json:"readyTimeout,omitempty"`
	// Ports that people want to reach, for whoever reads it.
	Ports []int `json:"ports,omitempty"`
	// IdleTimeout of sandboxes made of it that ask for none.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
}

// TemplateStep is one command of a setup.
type TemplateStep struct {
	// Name is shown; empty means the beginning of Run.
	Name string `json:"name,omitempty"`
	// Run is a script for sh, which ends at the first command that fails.
	Run string `json:"run"`
	// Timeout ends it; 0 means 30 minutes.
	Timeout time.Duration `json:"timeout,omitempty"`
	// User and Dir are as for processes.
	User string            `json:"user,omitempty"`
	Dir  string            `json:"dir,omitempty"`
	Env  map[string]string `json:"env,omitempty"`
}

// label is how people read of a step.
func (s *TemplateStep) label() string {
	if s.Name != "" {
		return s.Name
	}
	line, _, more := strings.Cut(strings.TrimSpace(s.Run), "\n")
	if r := []rune(line); len(r) > 60 {
		line, more = string(r[:60]), true
	}
	if more {
		line += "…"
	}
	return line
}

const (
	stepTimeout  = 30 * time.Minute
	readyTimeout = 5 * time.Minute
	// buildMargin is how much longer than its steps a build may take before the server removes its sandbox, whose client must be gone.
	buildMargin = time.Hour
	// steadyTime is how long a service without a check has to run to count as ready.
	steadyTime = time.Second
	// buildLabel marks the sandbox of a build.
	buildLabel = "warren.template"
)

// BuildEvent is a milestone of a build.
type BuildEvent struct {
	// What is "sandbox" (one is there), "cached" (steps up to this one are taken from an earlier build), "step unfit" (an earlier build has
	// kept this one, but it cannot be gone on from, and is run again), "step" (one begins), "step done",
	// "services" (they begin), "service" (one is in another state), "services ready", "snapshot", or "template" (the build is over).
	What string `json:"what"`
	// Step counts from 1, of Steps.
	Step  int `json:"step,omitempty"`
	Steps int `json:"steps,omitempty"`
	// Name of the step or the service, or the id of what was made.
	Name string `json:"name,omitempty"`
	// Message says more.
	Message string `json:"message,omitempty"`
	// Took is how long what has ended took.
	Took time.Duration `json:"took,omitempty"`
}

// BuildOptions change how a template is built. The zero value works.
type BuildOptions struct {
	// NoCache runs every step, also those that an earlier build has kept.
	NoCache bool
	// Keep leaves the snapshots of the versions before and of steps that are in no build any more, until a build without it.
	Keep bool
	// Output takes what the steps write, both streams, as it comes, and the log of a service that does not get ready.
	Output io.Writer
	// Report, when set, is told the milestones, and Progress the steps of the calls in between.
	Report   func(BuildEvent)
	Progress func(Progress)
}

// BuildTemplate makes a template, or the next version of one: it makes a sandbox, runs the setup in it, starts the services, waits until
// they are ready, and makes the template stand for a snapshot of that, at one instant. After each step it takes a snapshot named by
// the content of all up to there, and begins after the last step that an earlier build of the template has such a snapshot of, and that
// this server can go on from: one that is damaged, or of another build of Warren, is run again and replaced. A build that
// fails leaves the template as it was, and of its own only the snapshots of steps that succeeded. The sandbox is removed in every case.
func (c *Client) BuildTemplate(ctx context.Context, spec TemplateSpec, o BuildOptions) (*Template, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	if o.Output == nil {
		o.Output = io.Discard
	}
	if o.Report == nil {
		o.Report = func(BuildEvent) {}
	}
	b := &build{c: c, spec: spec, o: o, unfit: map[string]SnapshotID{}}
	t, err := b.run(ctx)
	if derr := b.leave(ctx); derr != nil && err == nil {
		err = derr
	}
	if err != nil {
		return nil, fmt.Errorf("build template %s: %w", spec.Name, err)
	}
	return t, nil
}

var templateName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// check refuses what would only fail after the work of a build.
func (s *TemplateSpec) check() error {
	if !templateName.MatchString(s.Name) {
		return fmt.Errorf("template name %.80q: want 1 to 40 of a-z, 0-9 and -, not - first: %w", s.Name, ErrInvalid)
	}
	for i, st := range s.Setup {
		if strings.TrimSpace(st.Run) == "" {
			return fmt.Errorf("step %d of template %s has nothing to run: %w", i+1, s.Name, ErrInvalid)
		}
		if st.Timeout < 0 {
			return fmt.Errorf("step %d of template %s: timeout %v is negative: %w", i+1, s.Name, st.Timeout, ErrInvalid)
		}
	}
	if s.ReadyTimeout < 0 {
		return fmt.Errorf("template %s: ready timeout %v is negative: %w", s.Name, s.ReadyTimeout, ErrInvalid)
	}
	return nil
}

// build is one build under way.
type build struct {
	c     *Client
	spec  TemplateSpec
	o     BuildOptions
	sb    *Sandbox
	owner string                // whose build it is
	repo  string                // the URL of the repository, without credentials
	keys  []string              // the name of the snapshot after each step
	unfit map[string]SnapshotID // of the steps that cannot be gone on from, by name
}

func (b *build) report(e BuildEvent, began time.Time) {
	if e.Steps = len(b.spec.Setup); e.Step == 0 {
		e.Steps = 0
	}
	if !began.IsZero() {
		e.Took = time.Since(began).Round(time.Millisecond)
	}
	b.o.Report(e)
}

// leave removes the sandbox, also when ctx has ended.
func (b *build) leave(ctx context.Context) error {
	if b.sb == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err := b.c.DeleteSandbox(ctx, string(b.sb.ID), DeleteOptions{AllowMissing: true})
	if err != nil {
		return fmt.Errorf("sandbox %s of the build could not be removed; it is when its time is over, or by `warren rm`: %w", b.sb.ID, err)
	}
	b.sb = nil
	return nil
}

func (b *build) run(ctx context.Context) (*Template, error) {
	all := time.Now()
	if err := b.create(ctx, ""); err != nil {
		return nil, err
	}
	if err := b.name(ctx); err != nil {
		return nil, err
	}
	done, err := b.resume(ctx)
	if err != nil {
		return nil, err
	}
	for i := done; i < len(b.spec.Setup); i++ {
		if err := b.step(ctx, i); err != nil {
			return nil, err
		}
	}
	if err := b.services(ctx); err != nil {
		return nil, err
	}
	t, err := b.finish(ctx)
	if err != nil {
		return nil, err
	}
	b.report(BuildEvent{What: "template", Name: t.Name, Message: fmt.Sprintf("version %d", t.Version)}, all)
	return t, nil
}

// create makes the sandbox, of a snapshot if that is named.
func (b *build) create(ctx context.Context, snapshot string) error {
	began := time.Now()
	left := buildMargin + b.spec.ReadyTimeout
	for _, s := range b.spec.Setup {
		left += max(s.Timeout, stepTimeout)
	}
	wish := Spec{Labels: map[string]string{buildLabel: b.spec.Name}, TTL: left, Snapshot: snapshot, Progress: b.o.Progress}
	if snapshot == "" {
		wish.Image, wish.Repo, wish.Env, wish.Resources, wish.Driver = b.spec.Image, b.spec.Repo, b.spec.Env, b.spec.Resources, b.spec.Driver
	}
	sb, err := b.c.Create(ctx, wish)
	if err != nil {
		return err
	}
	b.sb, b.owner = sb, sb.Owner
	if snapshot == "" {
		b.report(BuildEvent{What: "sandbox", Name: string(sb.ID), Message: "image " + sb.Image}, began)
	}
	return nil
}

// stepPrefix begins the names of the snapshots that builds of a template keep; 16 hexadecimal digits follow.
func stepPrefix(template string) string { return "step-" + template + "-" }

// versionPrefix begins the names of the snapshots that a template stands for; 8 hexadecimal digits follow.
func versionPrefix(template string) string { return "template-" + template + "-" }

// name finds out what the snapshot after each step is called: by all that the step's result depends on.
func (b *build) name(ctx context.Context) error {
	b.keys = nil
	base := ""
	if b.spec.Repo != nil {
		ws, err := b.c.Workspace(ctx, string(b.sb.Workspace))
		if err != nil {
			return err
		}
		b.repo = ws.RepoURL
		if base = ws.RepoURL + "@" + ws.BaseCommit; b.spec.Repo.Dirty {
			base += randomKey() // changes that are in no commit have no name
		}
	}
	h := sha256.New()
	// Maps are encoded in order of their keys.
	enc := json.NewEncoder(h)
	if err := enc.Encode([]any{1, b.sb.Driver, b.sb.ImageDigest, base, b.spec.Env, b.sb.Resources}); err != nil {
		return err
	}
	for _, s := range b.spec.Setup {
		if err := enc.Encode([]any{s.Run, s.User, s.Dir, s.Env}); err != nil {
			return err
		}
		b.keys = append(b.keys, stepPrefix(b.spec.Name)+hex.EncodeToString(h.Sum(nil))[:16])
	}
	return nil
}

// resume goes on from the last step that an earlier build has kept, and returns how many steps that are.
func (b *build) resume(ctx context.Context) (int, error) {
	if b.o.NoCache {
		return 0, nil
	}
	kept, err := b.kept(ctx)
	if err != nil {
		return 0, err
	}
	for i := len(b.keys) - 1; i >= 0; i-- {
		began := time.Now()
		id, ok := kept[b.keys[i]]
		if !ok {
			continue
		}
		if err := b.leave(ctx); err != nil {
			return 0, err
		}
		err := b.create(ctx, string(id))
		switch {
		case isNotFound(err):
			continue // another build has removed it meanwhile
		case errors.Is(err, errors.ErrUnsupported) || errors.Is(err, ErrState):
			// Made by another build of warren-runtime, or damaged: it will be no better the next time.
			b.unfit[b.keys[i]] = id
			b.report(BuildEvent{What: "step unfit", Step: i + 1, Name: b.spec.Setup[i].label(), Message: err.Error()}, time.Time{})
			continue
		case err != nil:
			return 0, err
		}
		for j := range i + 1 {
			e := BuildEvent{What: "cached", Step: j + 1, Name: b.spec.Setup[j].label()}
			if j < i {
				b.report(e, time.Time{})
			} else {
				b.report(e, began)
			}
		}
		return i + 1, nil
	}
	if b.sb == nil {
		// The first made room for one from a step.
		if err := b.create(ctx, ""); err != nil {
			return 0, err
		}
		// The image or the branch may have moved since.
		if err := b.name(ctx); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// kept returns which steps earlier builds of the same user have kept, by name. The server is not asked for a name: for an operator that
// names the snapshots of all users, and anybody can give one such a name.
func (b *build) kept(ctx context.Context) (map[string]SnapshotID, error) {
	all, _, err := b.c.built(ctx, b.spec.Name)
	if err != nil {
		return nil, err
	}
	kept := map[string]SnapshotID{}
	for _, p := range all {
		if p.Owner == b.owner {
			kept[p.Name] = p.ID
		}
	}
	return kept, nil
}

// step runs one, and keeps what is there then.
func (b *build) step(ctx context.Context, i int) error {
	s := b.spec.Setup[i]
	began := time.Now()
	b.report(BuildEvent{What: "step", Step: i + 1, Name: s.label()}, time.Time{})
	limit := s.Timeout
	if limit == 0 {
		limit = stepTimeout
	}
	run, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := b.sb.Command("sh", "-e", "-c", s.Run)
	cmd.User, cmd.Dir, cmd.Stdout, cmd.Stderr = s.User, s.Dir, b.o.Output, b.o.Output
	for k, v := range s.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	err := cmd.Run(run)
	failed := func(format string, args ...any) error {
		kept := ""
		if i > 0 {
			kept = "; the steps before it are kept for the next build, or until the template is removed"
		}
		return fmt.Errorf("step %d of %d (%s) %s%s", i+1, len(b.spec.Setup), s.label(), fmt.Sprintf(format, args...), kept)
	}
	var exit *ExitError
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return ctx.Err()
	case run.Err() != nil:
		return failed("has not ended after %v and was killed; give it a longer timeout, or find out what it waits for", limit)
	case errors.As(err, &exit):
		return failed("failed: %v", exit)
	default:
		return fmt.Errorf("step %d of %d (%s): %w", i+1, len(b.spec.Setup), s.label(), err)
	}
	old := b.unfit[b.keys[i]]
	if b.o.NoCache {
		kept, err := b.kept(ctx)
		if err != nil {
			return err
		}
		old = kept[b.keys[i]]
	}
	if old != "" {
		if err := b.c.dropUnused(ctx, old); err != nil {
			return err
		}
	}
	// Another build that has come to the same content at the same time has kept it.
	if _, err := b.sb.Snapshot(ctx, SnapshotOptions{Name: b.keys[i], Progress: b.o.Progress}); err != nil && !errors.Is(err, ErrExists) {
		return err
	}
	b.report(BuildEvent{What: "step done", Step: i + 1, Name: s.label()}, began)
	return nil
}

// services starts them and waits until all are ready.
func (b *build) services(ctx context.Context) error {
	if len(b.spec.Services) == 0 {
		return nil
	}
	limit := b.spec.ReadyTimeout
	if limit == 0 {
		limit = readyTimeout
	}
	began := time.Now()
	b.report(BuildEvent{What: "services", Message: fmt.Sprintf("%d, within %v", len(b.spec.Services), limit)}, time.Time{})
	if err := b.sb.PutServices(ctx, b.spec.Services...); err != nil {
		return err
	}
	states := map[string]string{}
	type run struct {
		restarts int
		since    time.Time
	}
	steady := map[string]run{} // of services without a check
	for {
		left := limit - time.Since(began)
		list, err := b.sb.Services(ctx, min(max(left, time.Millisecond), time.Second))
		if err != nil {
			return err
		}
		pause := false
		ready := 0
		var slow *ServiceStatus
		for _, st := range list {
			if states[st.Name] != st.State {
				states[st.Name] = st.State
				b.report(BuildEvent{What: "service", Name: st.Name, Message: strings.TrimSpace(st.State + " " + st.Message)}, began)
			}
			switch st.State {
			case "ready":
				ready++
			case "running":
				// One that is going to fail does so soon.
				r, ok := steady[st.Name]
				if !ok || r.restarts != st.Restarts {
					r = run{st.Restarts, time.Now()}
					steady[st.Name] = r
				}
				if time.Since(r.since) >= steadyTime {
					ready++
				} else {
					pause = true
				}
			case "starting", "waiting":
				slow = &st
			default:
				return b.unready(ctx, st, "")
			}
		}
		switch {
		case ready == len(b.spec.Services):
			b.report(BuildEvent{What: "services ready"}, began)
			return nil
		case left <= 0 && slow != nil:
			return b.unready(ctx, *slow, fmt.Sprintf(" within %v", limit))
		case left <= 0:
			return fmt.Errorf("the services are not ready within %v; give them a longer ready timeout", limit)
		}
		if pause {
			// The guest does not wait for it.
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// maxTail is how much of the log of a service that is not ready is shown.
const maxTail = 4 << 10

// unready says why the services are not ready, and shows the end of the log of the one that is at fault.
func (b *build) unready(ctx context.Context, st ServiceStatus, within string) error {
	var log bytes.Buffer
	tail, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if cmd, err := b.sb.Attach(tail, AttachOptions{Tag: "service:" + st.Name, NoFollow: true, Stdout: &log, Stderr: &log}); err == nil {
		cmd.Wait() // how it ended is in the status
	}
	text := log.Bytes()
	if len(text) > maxTail {
		text = text[len(text)-maxTail:]
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	if len(text) > 0 {
		fmt.Fprintf(b.o.Output, "the end of the log of service %s:\n%s\n", st.Name, bytes.TrimRight(text, "\n"))
	}
	why := "it is " + st.State
	if st.Message != "" {
		why += ": " + st.Message
	}
	if st.Restarts > 0 {
		why += fmt.Sprintf(", after %d restarts", st.Restarts)
	}
	return fmt.Errorf("service %s did not get ready%s (%s); see its log above, and its command, port and check", st.Name, within, why)
}

// finish takes the snapshot, makes the template stand for it, and removes what is of no more use.
func (b *build) finish(ctx context.Context) (*Template, error) {
	began := time.Now()
	spec := b.spec
	if spec.Repo != nil {
		source := *spec.Repo
		source.URL = b.repo // credentials are for this build
		spec.Repo = &source
	}
	recipe, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	snap, err := b.sb.Snapshot(ctx, SnapshotOptions{Name: versionPrefix(b.spec.Name) + randomKey()[:8], Progress: b.o.Progress})
	if err != nil {
		return nil, err
	}
	b.report(BuildEvent{What: "snapshot", Name: string(snap.ID), Message: string(snap.Kind)}, began)
	res, err := b.c.templates.PutTemplate(ctx, connect.NewRequest(&warrenv1.PutTemplateRequest{
		Name: b.spec.Name, Snapshot: string(snap.ID), Recipe: string(recipe), IdleTimeout: durationTo(b.spec.IdleTimeout),
	}))
	if err != nil {
		// One that the server did all the same stays, for it stands for the snapshot then.
		bg, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return nil, errors.Join(fromWire("put template", err), b.c.dropUnused(bg, snap.ID))
	}
	t := templateFrom(res.Msg.GetTemplate())
	if b.o.Keep {
		return t, nil
	}
	if before := SnapshotID(res.Msg.GetPreviousSnapshotId()); before != "" {
		if err := b.c.dropUnused(ctx, before); err != nil {
			return nil, fmt.Errorf("the template is built, but the snapshot of the version before stays: %w", err)
		}
	}
	// The server's clock is the measure of both.
	if _, err := b.c.dropBuilt(ctx, t.Name, t.Owner, append(b.keys, snap.Name), snap.Created); err != nil {
		return nil, fmt.Errorf("the template is built, but snapshots of earlier builds stay: %w", err)
	}
	return t, nil
}

func isNotFound(err error) bool { return errors.Is(err, ErrNotFound) }

// dropUnused deletes a snapshot that may be gone, and stays if a template stands for it.
func (c *Client) dropUnused(ctx context.Context, id SnapshotID) error {
	err := c.DeleteSnapshot(ctx, string(id), DeleteOptions{AllowMissing: true})
	if errors.Is(err, ErrState) {
		return nil
	}
	return err
}

var (
	stepKey    = regexp.MustCompile(`^[0-9a-f]{16}$`)
	versionKey = regexp.MustCompile(`^[0-9a-f]{8}$`)
)

// built returns the snapshots that builds of a template have made, of steps and of what the template was to stand for, of all users whose
// snapshots the caller sees.
func (c *Client) built(ctx context.Context, template string) (steps, versions []*Snapshot, err error) {
	for p, err := range c.Snapshots(ctx, SnapshotListOptions{PageSize: 1000}) {
		if err != nil {
			return nil, nil, err
		}
		if key, ok := strings.CutPrefix(p.Name, stepPrefix(template)); ok && stepKey.MatchString(key) {
			steps = append(steps, p)
		}
		if key, ok := strings.CutPrefix(p.Name, versionPrefix(template)); ok && versionKey.MatchString(key) {
			versions = append(versions, p)
		}
	}
	return steps, versions, nil
}

// finishing is how long a build may take from the begin of its last snapshot, which may have much to write, to the put that follows it.
const finishing = 30 * time.Minute

// underWay reports whether the build that made a snapshot may yet put it in the place of the template. A build removes its sandbox when it is
// over, so one whose sandbox is gone is. That of a client that was killed stays for hours, and so counts only for a while.
func (c *Client) underWay(ctx context.Context, p *Snapshot, now time.Time) bool {
	if now.Sub(p.Created) > finishing {
		return false
	}
	_, err := c.Sandbox(ctx, string(p.Sandbox))
	return !isNotFound(err)
}

// dropBuilt deletes the snapshots that an owner's builds of a template have made, but for those named in keep, of builds that are under way
// at now, and what a template stands for. Who was killed before its put, or before it had removed the version before, has left some. It
// returns how many it has tried.
func (c *Client) dropBuilt(ctx context.Context, template, owner string, keep []string, now time.Time) (int, error) {
	steps, versions, err := c.built(ctx, template)
	if err != nil {
		return 0, err
	}
	var old []SnapshotID
	for i, p := range slices.Concat(steps, versions) {
		if p.Owner == owner && !slices.Contains(keep, p.Name) && (i < len(steps) || !c.underWay(ctx, p, now)) {
			old = append(old, p.ID)
		}
	}
	for i, id := range old {
		if err := c.dropUnused(ctx, id); err != nil {
			return i, err
		}
	}
	return len(old), nil
}
