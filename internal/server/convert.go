package server

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

func invalid(format string, args ...any) error {
	return &warren.Error{Kind: "invalid", Message: fmt.Sprintf(format, args...)}
}

var statesOf = map[warrenv1.SandboxState]engine.State{
	warrenv1.SandboxState_SANDBOX_STATE_CREATING:     engine.Creating,
	warrenv1.SandboxState_SANDBOX_STATE_RUNNING:      engine.Running,
	warrenv1.SandboxState_SANDBOX_STATE_PAUSING:      engine.Pausing,
	warrenv1.SandboxState_SANDBOX_STATE_PAUSED:       engine.Paused,
	warrenv1.SandboxState_SANDBOX_STATE_RESUMING:     engine.Resuming,
	warrenv1.SandboxState_SANDBOX_STATE_FAILED:       engine.Failed,
	warrenv1.SandboxState_SANDBOX_STATE_ROLLING_BACK: engine.RollingBack,
	warrenv1.SandboxState_SANDBOX_STATE_DELETING:     engine.Deleting,
}

func stateTo(s engine.State) warrenv1.SandboxState {
	for to, state := range statesOf {
		if state == s {
			return to
		}
	}
	return warrenv1.SandboxState_SANDBOX_STATE_UNSPECIFIED
}

func pageSize(n uint32) (int, error) {
	if n > 1000 {
		return 0, invalid("page_size is %d; the most is 1000", n)
	}
	return int(n), nil
}

// duration reads a duration that may be left out.
func duration(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	// AsDuration makes of what is too long the longest there is, which nobody meant.
	if err := d.CheckValid(); err != nil || d.GetSeconds() < 0 || d.GetNanos() < 0 || d.GetSeconds() > 100*365*24*3600 {
		return 0, invalid("%s is %d s; want 0 or more, up to 100 years", field, d.GetSeconds())
	}
	return d.AsDuration(), nil
}

func optionalDuration(field string, d *durationpb.Duration) (*time.Duration, error) {
	if d == nil {
		return nil, nil
	}
	v, err := duration(field, d)
	return &v, err
}

func specOf(p *warrenv1.SandboxSpec) (engine.Spec, error) {
	r := p.GetResources()
	s := engine.Spec{
		Name: p.GetName(), Image: p.GetImage(), Repo: repoSourceOf(p.GetRepo()), WorkspaceID: p.GetWorkspaceId(),
		Resources: engine.Resources{CPUMillis: r.GetCpuMillis(), MemoryBytes: r.GetMemoryBytes(), DiskBytes: r.GetDiskBytes(), PIDs: r.GetPids()},
		Env:       p.GetEnv(), Driver: p.GetDriver(), Labels: p.GetLabels(), KeepWorkspace: p.GetKeepWorkspace(), DriverOptions: p.GetDriverOptions(), Policy: p.GetPolicy(), PrivateNetwork: p.GetPrivateNetwork(), Snapshot: p.GetSnapshot(), Template: p.GetTemplate(),
	}
	for _, m := range p.GetMounts() {
		s.Mounts = append(s.Mounts, engine.Mount{Source: m.GetSource(), Target: m.GetTarget(), Writable: m.GetWritable()})
	}
	switch p.GetRestart() {
	case warrenv1.RestartPolicy_RESTART_POLICY_UNSPECIFIED:
	case warrenv1.RestartPolicy_RESTART_POLICY_NEVER:
		s.Restart = engine.RestartNever
	case warrenv1.RestartPolicy_RESTART_POLICY_ON_FAILURE:
		s.Restart = engine.RestartOnFailure
	default:
		return s, invalid("restart policy %d is not known", p.GetRestart())
	}
	var err error
	if s.IdleAction, err = idleActionOf(p.GetIdleAction()); err != nil {
		return s, err
	}
	s.NoAutoResume = p.AutoResume != nil && !p.GetAutoResume()
	if s.IdleTimeout, err = duration("idle_timeout", p.GetIdleTimeout()); err != nil {
		return s, err
	}
	if s.TTL, err = duration("ttl", p.GetTtl()); err != nil {
		return s, err
	}
	if s.TTLAction, err = idleActionOf(p.GetTtlAction()); err != nil {
		return s, err
	}
	s.MaxLifetime, err = duration("max_lifetime", p.GetMaxLifetime())
	return s, err
}

var idleActions = map[warrenv1.IdleAction]engine.IdleAction{
	warrenv1.IdleAction_IDLE_ACTION_UNSPECIFIED: "",
	warrenv1.IdleAction_IDLE_ACTION_PAUSE:       engine.IdlePause,
	warrenv1.IdleAction_IDLE_ACTION_DELETE:      engine.IdleDelete,
}

func idleActionOf(a warrenv1.IdleAction) (engine.IdleAction, error) {
	action, ok := idleActions[a]
	if !ok {
		return "", invalid("action %d is not known; want pause or delete", a)
	}
	return action, nil
}

func repoSourceOf(p *warrenv1.RepoSource) *engine.RepoSource {
	if p == nil {
		return nil
	}
	return &engine.RepoSource{URL: p.GetUrl(), Ref: p.GetRef(), Dirty: p.GetDirty(), Fetch: p.GetFetch()}
}

func timeTo(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func durationTo(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func specTo(s *engine.Spec) *warrenv1.SandboxSpec {
	p := &warrenv1.SandboxSpec{
		Name: s.Name, Image: s.Image, WorkspaceId: s.WorkspaceID, Env: s.Env, Driver: s.Driver, Labels: s.Labels,
		Resources:   &warrenv1.Resources{CpuMillis: s.Resources.CPUMillis, MemoryBytes: s.Resources.MemoryBytes, DiskBytes: s.Resources.DiskBytes, Pids: s.Resources.PIDs},
		IdleTimeout: durationTo(s.IdleTimeout), Ttl: durationTo(s.TTL), MaxLifetime: durationTo(s.MaxLifetime), KeepWorkspace: s.KeepWorkspace, DriverOptions: s.DriverOptions, Policy: s.Policy, PrivateNetwork: s.PrivateNetwork, Snapshot: s.Snapshot, Template: s.Template,
	}
	if r := s.Repo; r != nil {
		p.Repo = &warrenv1.RepoSource{Url: r.URL, Ref: r.Ref, Dirty: r.Dirty, Fetch: r.Fetch}
	}
	for wire, action := range idleActions {
		if action == s.IdleAction {
			p.IdleAction = wire
		}
		if action == s.TTLAction {
			p.TtlAction = wire
		}
	}
	if resume := !s.NoAutoResume; !resume {
		p.AutoResume = &resume
	}
	for _, m := range s.Mounts {
		p.Mounts = append(p.Mounts, &warrenv1.Mount{Source: m.Source, Target: m.Target, Writable: m.Writable})
	}
	switch s.Restart {
	case engine.RestartNever:
		p.Restart = warrenv1.RestartPolicy_RESTART_POLICY_NEVER
	case engine.RestartOnFailure:
		p.Restart = warrenv1.RestartPolicy_RESTART_POLICY_ON_FAILURE
	}
	return p
}

func sandboxTo(s *engine.Sandbox) *warrenv1.Sandbox {
	p := &warrenv1.Sandbox{
		Id: string(s.ID), Name: s.Name, State: stateTo(s.State), Spec: specTo(&s.Spec), Image: s.Image, ImageDigest: s.ImageDigest,
		WorkspaceId: string(s.WorkspaceID), Driver: s.Driver,
		Resources: &warrenv1.Resources{CpuMillis: s.Limits.CPUMillis, MemoryBytes: s.Limits.Memory, DiskBytes: s.Limits.Disk, Pids: s.Limits.PIDs},
		Created:   timeTo(s.Created), LastActive: timeTo(s.LastActive), Expires: timeTo(s.Expires), Pauses: timeTo(s.Pauses),
		Generation: s.Generation, Owner: s.Owner, Isolation: s.Isolation, Network: s.Network, PrivateNetwork: s.PrivateNetwork, MemoryImageBytes: s.ImageSize,
		SnapshotId: string(s.SnapshotID), SourceId: string(s.SourceID),
		PauseReason: s.PauseReason,
	}
	// Labels and name as they are now, not as they were wished for.
	p.Spec.Name = s.Name
	p.Spec.Labels = s.Labels
	if f := s.Failure; f != nil {
		p.Failure = &warrenv1.Failure{Reason: f.Reason, Message: f.Message, Time: timeTo(f.Time)}
	}
	for _, m := range s.Timing {
		p.Timing = append(p.Timing, &warrenv1.Milestone{Name: m.Name, Start: durationpb.New(m.Start), Duration: durationpb.New(m.Duration)})
	}
	return p
}

func kindTo(k engine.SnapshotKind) warrenv1.SnapshotKind {
	if k == engine.FilesSnapshot {
		return warrenv1.SnapshotKind_SNAPSHOT_KIND_FILES
	}
	return warrenv1.SnapshotKind_SNAPSHOT_KIND_MEMORY
}

func snapshotTo(p *engine.Snapshot) *warrenv1.Snapshot {
	return &warrenv1.Snapshot{
		Id: string(p.ID), Name: p.Name, Kind: kindTo(p.Kind), SandboxId: string(p.SandboxID), SandboxName: p.SandboxName, ParentId: string(p.ParentID),
		Driver: p.Driver, Image: p.Image, ImageDigest: p.ImageDigest, Created: timeTo(p.Created), Owner: p.Owner,
		Resources:   &warrenv1.Resources{CpuMillis: p.Limits.CPUMillis, MemoryBytes: p.Limits.Memory, DiskBytes: p.Limits.Disk, Pids: p.Limits.PIDs},
		MemoryBytes: p.MemorySize, FilesBytes: p.FilesSize, SharedBytes: p.SharedSize, Stopped: durationTo(p.Stopped),
	}
}

func statsTo(s *engine.Stats) *warrenv1.GetStatsResponse {
	return &warrenv1.GetStatsResponse{
		CpuTime: durationpb.New(s.CPUTime), MemoryBytes: s.Memory, MemoryLimitBytes: s.MemoryLimit,
		DiskBytes: s.Disk, DiskLimitBytes: s.DiskLimit, Pids: s.PIDs, Time: timeTo(s.Time),
	}
}

func eventTo(e *engine.Event) *warrenv1.Event {
	return &warrenv1.Event{
		Seq: e.Seq, Time: timeTo(e.Time), Actor: e.Actor, Action: e.Action, SandboxId: string(e.SandboxID), WorkspaceId: string(e.WorkspaceID),
		Message: e.Message, Fields: e.Fields,
	}
}

func workspaceTo(w *engine.Workspace) *warrenv1.Workspace {
	return &warrenv1.Workspace{
		Id: string(w.ID), Name: w.Name, RepoUrl: w.RepoURL, RepoId: string(w.RepoID), Ref: w.Ref, BaseCommit: w.BaseCommit, Created: timeTo(w.Created),
		SandboxId: string(w.SandboxID), SizeBytes: w.Size, Branch: w.Branch, HeadCommit: w.HeadCommit, Owner: w.Owner, Keep: w.Keep,
	}
}

func repoTo(r *engine.Repo, c engine.Caller) *warrenv1.Repo {
	p := &warrenv1.Repo{Id: string(r.ID), Url: r.URL, DefaultBranch: r.DefaultBranch, SizeBytes: r.Size, Fetched: timeTo(r.Fetched)}
	if c.Operator {
		p.Path = r.Dir
	}
	return p
}

func imageTo(i *engine.Image) *warrenv1.Image {
	return &warrenv1.Image{
		Name: i.Name, Digest: i.Digest, SizeBytes: i.Size, Created: timeTo(i.Created), Kind: i.Kind,
		User: i.Config.User, WorkingDir: i.Config.WorkingDir, Env: i.Config.Env, Layers: uint32(len(i.Root.Layers)),
	}
}

func tokenTo(t *engine.Token) *warrenv1.Token {
	return &warrenv1.Token{Id: t.ID, User: t.User, Description: t.Description, Created: timeTo(t.Created), Expires: timeTo(t.Expires), LastUsed: timeTo(t.LastUsed)}
}

func (s *Server) version() *warrenv1.GetVersionResponse {
	return &warrenv1.GetVersionResponse{
		Version: s.opts.Version, Commit: s.opts.Commit, GoVersion: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Drivers: slices.Sorted(maps.Keys(s.engine.Drivers())), Instance: s.engine.Instance(),
	}
}
