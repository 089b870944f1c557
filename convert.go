package warren

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

func timeFrom(t *timestamppb.Timestamp) time.Time {
	if t == nil || (t.Seconds == 0 && t.Nanos == 0) {
		return time.Time{}
	}
	return t.AsTime()
}

// durationTo keeps an unset limit unset.
func durationTo(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

var states = map[warrenv1.SandboxState]SandboxState{
	warrenv1.SandboxState_SANDBOX_STATE_CREATING:     StateCreating,
	warrenv1.SandboxState_SANDBOX_STATE_RUNNING:      StateRunning,
	warrenv1.SandboxState_SANDBOX_STATE_PAUSING:      StatePausing,
	warrenv1.SandboxState_SANDBOX_STATE_PAUSED:       StatePaused,
	warrenv1.SandboxState_SANDBOX_STATE_RESUMING:     StateResuming,
	warrenv1.SandboxState_SANDBOX_STATE_FAILED:       StateFailed,
	warrenv1.SandboxState_SANDBOX_STATE_ROLLING_BACK: StateRollingBack,
	warrenv1.SandboxState_SANDBOX_STATE_DELETING:     StateDeleting,
}

func (s Spec) proto() *warrenv1.SandboxSpec {
	p := &warrenv1.SandboxSpec{
		Name:          s.Name,
		Image:         s.Image,
		Repo:          s.Repo.proto(),
		WorkspaceId:   s.Workspace,
		Resources:     s.Resources.proto(),
		Env:           s.Env,
		Driver:        s.Driver,
		Labels:        s.Labels,
		IdleTimeout:   durationTo(s.IdleTimeout),
		Ttl:           durationTo(s.TTL),
		KeepWorkspace: s.KeepWorkspace,
		DriverOptions: s.DriverOptions, Policy: s.Policy, PrivateNetwork: s.PrivateNetwork,
		Snapshot: s.Snapshot,
		Template: s.Template,
	}
	for _, m := range s.Mounts {
		p.Mounts = append(p.Mounts, &warrenv1.Mount{Source: m.Source, Target: m.Target, Writable: m.Writable})
	}
	p.IdleAction, p.TtlAction, p.MaxLifetime = s.IdleAction.proto(), s.TTLAction.proto(), durationTo(s.MaxLifetime)
	if resume := !s.NoAutoResume; !resume {
		p.AutoResume = &resume
	}
	switch s.Restart {
	case "":
	case RestartNever:
		p.Restart = warrenv1.RestartPolicy_RESTART_POLICY_NEVER
	case RestartOnFailure:
		p.Restart = warrenv1.RestartPolicy_RESTART_POLICY_ON_FAILURE
	default:
		p.Restart = -1 // no policy at all, which the server refuses
	}
	return p
}

var idleActions = map[IdleAction]warrenv1.IdleAction{
	"":         warrenv1.IdleAction_IDLE_ACTION_UNSPECIFIED,
	IdlePause:  warrenv1.IdleAction_IDLE_ACTION_PAUSE,
	IdleDelete: warrenv1.IdleAction_IDLE_ACTION_DELETE,
}

func (a IdleAction) proto() warrenv1.IdleAction {
	if wire, ok := idleActions[a]; ok {
		return wire
	}
	return -1 // no action at all, which the server refuses
}

func (r *RepoSource) proto() *warrenv1.RepoSource {
	if r == nil {
		return nil
	}
	return &warrenv1.RepoSource{Url: r.URL, Ref: r.Ref, Dirty: r.Dirty, Fetch: r.Fetch}
}

func (r Resources) proto() *warrenv1.Resources {
	if r == (Resources{}) {
		return nil
	}
	return &warrenv1.Resources{CpuMillis: r.CPUMillis, MemoryBytes: r.Memory, DiskBytes: r.Disk, Pids: r.PIDs}
}

func resourcesFrom(p *warrenv1.Resources) Resources {
	return Resources{CPUMillis: p.GetCpuMillis(), Memory: p.GetMemoryBytes(), Disk: p.GetDiskBytes(), PIDs: p.GetPids()}
}

func specFrom(p *warrenv1.SandboxSpec) Spec {
	s := Spec{
		Name:          p.GetName(),
		Image:         p.GetImage(),
		Workspace:     p.GetWorkspaceId(),
		Resources:     resourcesFrom(p.GetResources()),
		Env:           p.GetEnv(),
		Driver:        p.GetDriver(),
		Labels:        p.GetLabels(),
		IdleTimeout:   p.GetIdleTimeout().AsDuration(),
		TTL:           p.GetTtl().AsDuration(),
		MaxLifetime:   p.GetMaxLifetime().AsDuration(),
		KeepWorkspace: p.GetKeepWorkspace(),
		DriverOptions: p.GetDriverOptions(), Policy: p.GetPolicy(), PrivateNetwork: p.GetPrivateNetwork(),
		Snapshot: p.GetSnapshot(),
		Template: p.GetTemplate(),
	}
	if r := p.GetRepo(); r != nil {
		s.Repo = &RepoSource{URL: r.GetUrl(), Ref: r.GetRef(), Dirty: r.GetDirty(), Fetch: r.GetFetch()}
	}
	for _, m := range p.GetMounts() {
		s.Mounts = append(s.Mounts, Mount{Source: m.GetSource(), Target: m.GetTarget(), Writable: m.GetWritable()})
	}
	for action, wire := range idleActions {
		if wire == p.GetIdleAction() {
			s.IdleAction = action
		}
		if wire == p.GetTtlAction() {
			s.TTLAction = action
		}
	}
	s.NoAutoResume = p.AutoResume != nil && !p.GetAutoResume()
	switch p.GetRestart() {
	case warrenv1.RestartPolicy_RESTART_POLICY_NEVER:
		s.Restart = RestartNever
	case warrenv1.RestartPolicy_RESTART_POLICY_ON_FAILURE:
		s.Restart = RestartOnFailure
	}
	return s
}

func (s *Sandbox) set(p *warrenv1.Sandbox) {
	s.ID = SandboxID(p.GetId())
	s.Name = p.GetName()
	s.State = states[p.GetState()]
	s.Spec = specFrom(p.GetSpec())
	s.Image = p.GetImage()
	s.ImageDigest = p.GetImageDigest()
	s.Workspace = WorkspaceID(p.GetWorkspaceId())
	s.Driver = p.GetDriver()
	s.Isolation = p.GetIsolation()
	s.Network = p.GetNetwork()
	s.PrivateNetwork = p.GetPrivateNetwork()
	s.Resources = resourcesFrom(p.GetResources())
	s.Created = timeFrom(p.GetCreated())
	s.LastActive = timeFrom(p.GetLastActive())
	s.Expires, s.Pauses = timeFrom(p.GetExpires()), timeFrom(p.GetPauses())
	s.Generation = p.GetGeneration()
	s.Owner = p.GetOwner()
	s.MemoryImage = p.GetMemoryImageBytes()
	s.LastSnapshot = SnapshotID(p.GetSnapshotId())
	s.Source = SandboxID(p.GetSourceId())
	s.PauseReason = p.GetPauseReason()
	s.Failure = nil
	if f := p.GetFailure(); f != nil {
		s.Failure = &Failure{Reason: f.GetReason(), Message: f.GetMessage(), Time: timeFrom(f.GetTime())}
	}
	s.Timing = nil
	for _, m := range p.GetTiming() {
		s.Timing = append(s.Timing, Milestone{Name: m.GetName(), Start: m.GetStart().AsDuration(), Duration: m.GetDuration().AsDuration()})
	}
}

func (c *Client) workspaceFrom(p *warrenv1.Workspace) *Workspace {
	return &Workspace{
		ID:         WorkspaceID(p.GetId()),
		Name:       p.GetName(),
		RepoURL:    p.GetRepoUrl(),
		Repo:       RepoID(p.GetRepoId()),
		Ref:        p.GetRef(),
		BaseCommit: p.GetBaseCommit(),
		Created:    timeFrom(p.GetCreated()),
		Sandbox:    SandboxID(p.GetSandboxId()),
		Size:       p.GetSizeBytes(),
		Branch:     p.GetBranch(),
		Head:       p.GetHeadCommit(),
		Owner:      p.GetOwner(),
		Keep:       p.GetKeep(),
		c:          c,
	}
}

func repoFrom(p *warrenv1.Repo) *Repo {
	return &Repo{
		ID:            RepoID(p.GetId()),
		URL:           p.GetUrl(),
		DefaultBranch: p.GetDefaultBranch(),
		Size:          p.GetSizeBytes(),
		Fetched:       timeFrom(p.GetFetched()),
		Path:          p.GetPath(),
	}
}

func imageFrom(p *warrenv1.Image) *Image {
	return &Image{
		Name:       p.GetName(),
		Digest:     p.GetDigest(),
		Kind:       p.GetKind(),
		Size:       p.GetSizeBytes(),
		Created:    timeFrom(p.GetCreated()),
		User:       p.GetUser(),
		WorkingDir: p.GetWorkingDir(),
		Env:        p.GetEnv(),
		Layers:     int(p.GetLayers()),
	}
}

func eventFrom(p *warrenv1.Event) *Event {
	return &Event{
		Seq:       p.GetSeq(),
		Time:      timeFrom(p.GetTime()),
		Actor:     p.GetActor(),
		Action:    p.GetAction(),
		Sandbox:   SandboxID(p.GetSandboxId()),
		Workspace: WorkspaceID(p.GetWorkspaceId()),
		Message:   p.GetMessage(),
		Fields:    p.GetFields(),
	}
}

func versionFrom(p *warrenv1.GetVersionResponse) *Version {
	return &Version{
		Version:   p.GetVersion(),
		Commit:    p.GetCommit(),
		GoVersion: p.GetGoVersion(),
		Platform:  p.GetPlatform(),
		Drivers:   p.GetDrivers(),
		Instance:  p.GetInstance(),
	}
}

func progressFrom(p *warrenv1.Progress) Progress {
	return Progress{Step: p.GetStep(), Message: p.GetMessage(), Done: p.GetDone(), Total: p.GetTotal()}
}
