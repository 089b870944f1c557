package warren

import (
	"context"
	"fmt"
	"iter"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Spec is the wish for a sandbox. The zero value is a sandbox of the server's defaults with an empty workspace.
type Spec struct {
	// Name is unique among the owner's sandboxes: [a-z0-9][a-z0-9-]{0,62}. Empty means none.
	Name string `json:"name,omitempty"`
	// Image is "host", or an image's name or digest. Empty means the server's default.
	Image string `json:"image,omitempty"`
	// Repo is what a new workspace is cut from. Nil means an empty workspace.
	Repo *RepoSource `json:"repo,omitempty"`
	// Workspace is the id or name of a workspace to use instead of a new one. At most one sandbox may run on it.
	Workspace string `json:"workspace,omitempty"`
	// Resources that the sandbox may use; what is 0 gets the server's default.
	Resources Resources `json:"resources,omitzero"`
	// Env is added to the environment of every process.
	Env map[string]string `json:"env,omitempty"`
	// Mounts of directories of the server's host. The server refuses what its operator does not allow.
	Mounts []Mount `json:"mounts,omitempty"`
	// Driver that runs the sandbox. Empty means the server's default.
	Driver string `json:"driver,omitempty"`
	// Restart says what happens to a sandbox that failed. Empty means [RestartNever].
	Restart RestartPolicy `json:"restart,omitempty"`
	// Labels to find the sandbox by.
	Labels map[string]string `json:"labels,omitempty"`
	// IdleTimeout does what IdleAction says when the sandbox has been idle for so long; 0 means never. A sandbox is in use while a
	// call is under way or a command is followed, silent or not; one that is to be paused also while its processes use the
	// processor, while one of them holds it awake, and while a connection to one of its ports carries something.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// IdleAction is what IdleTimeout does. Empty means [IdlePause] where the driver can, else [IdleDelete].
	IdleAction IdleAction `json:"idleAction,omitempty"`
	// NoAutoResume makes calls into a paused sandbox fail with [ErrState] instead of resuming it.
	NoAutoResume bool `json:"noAutoResume,omitempty"`
	// TTL does what TTLAction says this long after the creation of the sandbox; 0 means never.
	TTL time.Duration `json:"ttl,omitempty"`
	// TTLAction is what TTL does, whether the sandbox is in use or not. Empty means [IdleDelete]. What pauses begins anew when the sandbox is
	// resumed.
	TTLAction IdleAction `json:"ttlAction,omitempty"`
	// MaxLifetime removes the sandbox this long after its creation, whatever else happens, and cannot be changed; 0 means as long as the server
	// allows.
	MaxLifetime time.Duration `json:"maxLifetime,omitempty"`
	// KeepWorkspace keeps a workspace that was made for this sandbox when the sandbox goes.
	KeepWorkspace bool `json:"keepWorkspace,omitempty"`
	// Policy names what the sandbox may reach, see [Client.Policies]; "none" gives it no network card. Empty means the server's
	// default, or none where the driver gives sandboxes no network.
	Policy string `json:"policy,omitempty"`
	// PrivateNetwork is the private network that the sandbox is in: yours that name the same one reach each other as NAME.NETWORK.internal,
	// whatever their policies allow otherwise. Empty means none, or that of the snapshot or template; "none" means none.
	PrivateNetwork string `json:"privateNetwork,omitempty"`
	// DriverOptions are keys that the driver understands.
	DriverOptions map[string]string `json:"driverOptions,omitempty"`
	// Snapshot, an id or name, to go on from instead of booting. Image, driver, mounts, disk and environment are those of
	// the snapshot; Env is added.
	Snapshot string `json:"snapshot,omitempty"`
	// Template, a name, whose snapshot to go on from; as if that had been given.
	Template string `json:"template,omitempty"`

	// IdempotencyKey makes a create safe to repeat: the server returns the first call's sandbox for the same key within
	// 24 hours. Empty means one of this call's own, which covers its own retries.
	IdempotencyKey string `json:"-"`
	// Progress, when set, is told each step of a create, on the calling goroutine.
	Progress func(Progress) `json:"-"`
}

// RepoSource says what a workspace is cut from.
type RepoSource struct {
	// URL is an https, ssh or file URL, or an absolute path on the server's host.
	URL string `json:"url"`
	// Ref is a branch, tag or commit. Empty means the default branch.
	Ref string `json:"ref,omitempty"`
	// Dirty takes uncommitted changes along; only of a path.
	Dirty bool `json:"dirty,omitempty"`
	// Fetch asks the origin even when the ref is already in the cache.
	Fetch bool `json:"fetch,omitempty"`
}

// Resources of a sandbox.
type Resources struct {
	// CPUMillis is thousandths of a processor; 2000 is two.
	CPUMillis uint32 `json:"cpuMillis,omitempty"`
	// Memory in bytes, processes and page cache together.
	Memory int64 `json:"memoryBytes,omitempty"`
	// Disk is bytes that may be written outside the workspace.
	Disk int64 `json:"diskBytes,omitempty"`
	// PIDs is how many processes and threads there may be.
	PIDs uint32 `json:"pids,omitempty"`
}

// Mount is a directory of the server's host that shows in a sandbox.
type Mount struct {
	// Source is an absolute path on the server's host.
	Source string `json:"source"`
	// Target is an absolute path in the sandbox.
	Target string `json:"target"`
	// Writable mounts take writes; others refuse them.
	Writable bool `json:"writable,omitempty"`
}

// IdleAction says what an idle timeout does, or a TTL.
type IdleAction string

const (
	// IdlePause keeps the sandbox on disk; the next call resumes it.
	IdlePause IdleAction = "pause"
	// IdleDelete removes the sandbox, with a workspace that was made for it and not to be kept.
	IdleDelete IdleAction = "delete"
)

// RestartPolicy says what happens to a sandbox that failed.
type RestartPolicy string

const (
	// RestartNever leaves it failed until it is restarted or deleted.
	RestartNever RestartPolicy = "never"
	// RestartOnFailure gives the next command a fresh execution on the same workspace.
	RestartOnFailure RestartPolicy = "on-failure"
)

// SandboxState is where a sandbox is in its life.
type SandboxState string

const (
	// StateCreating means on the way to running.
	StateCreating SandboxState = "creating"
	// StateRunning means ready for commands.
	StateRunning SandboxState = "running"
	// StatePausing means on the way to paused.
	StatePausing SandboxState = "pausing"
	// StatePaused means that its memory is on disk and nothing of it runs until [Sandbox.Resume].
	StatePaused SandboxState = "paused"
	// StateResuming means on the way back from paused to running.
	StateResuming SandboxState = "resuming"
	// StateRollingBack means on the way to a snapshot; what was since then is lost.
	StateRollingBack SandboxState = "rolling-back"
	// StateFailed means that the execution ended without being asked to; Failure tells why, the workspace is intact.
	StateFailed SandboxState = "failed"
	// StateDeleting means being removed.
	StateDeleting SandboxState = "deleting"
)

// Failure says why a sandbox failed.
type Failure struct {
	// Reason is "oom", "killed", "exited", "lost", "create", or "evicted" when the host's disk ran short while it was paused.
	Reason  string    `json:"reason"`
	Message string    `json:"message,omitempty"`
	Time    time.Time `json:"time,omitzero"`
}

// Milestone is one step of a create.
type Milestone struct {
	Name string `json:"name"`
	// Start is counted from the beginning of the create.
	Start    time.Duration `json:"start"`
	Duration time.Duration `json:"duration"`
}

// Progress tells of a long call.
type Progress struct {
	// Step such as "resolve image", "pull", "fetch repo", "cut workspace", "create", "start" or "guest ready".
	Step    string `json:"step"`
	Message string `json:"message,omitempty"`
	// Done of Total, in the step's own unit; 0 when not known.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
}

// Sandbox is one execution environment as the server last described it; Refresh asks again.
type Sandbox struct {
	ID    SandboxID    `json:"id"`
	Name  string       `json:"name,omitempty"`
	State SandboxState `json:"state"`
	// Spec is the wish that it was made from.
	Spec Spec `json:"spec"`
	// Image and ImageDigest are what Spec.Image meant when the sandbox was made.
	Image       string `json:"image,omitempty"`
	ImageDigest string `json:"imageDigest,omitempty"`
	// Workspace is mounted at /workspace.
	Workspace WorkspaceID `json:"workspaceId,omitempty"`
	Driver    string      `json:"driver,omitempty"`
	// Isolation says how strong the boundary is, such as "kernel in user space (gVisor)".
	Isolation string `json:"isolation,omitempty"`
	// Network is the name of its policy, or "none" when the sandbox has loopback only.
	Network string `json:"network,omitempty"`
	// PrivateNetwork is the private network that it is in, if any.
	PrivateNetwork string `json:"privateNetwork,omitempty"`
	// Resources with the server's defaults filled in.
	Resources  Resources `json:"resources,omitzero"`
	Created    time.Time `json:"created,omitzero"`
	LastActive time.Time `json:"lastActive,omitzero"`
	// Expires is zero when nothing will remove the sandbox by itself.
	Expires time.Time `json:"expires,omitzero"`
	// Pauses is when its TTL pauses it, zero for never.
	Pauses time.Time `json:"pauses,omitzero"`
	// Failure is set in [StateFailed].
	Failure *Failure    `json:"failure,omitempty"`
	Timing  []Milestone `json:"timing,omitempty"`
	// Generation counts executions; 1 is the first.
	Generation uint32 `json:"generation,omitempty"`
	Owner      string `json:"owner,omitempty"`
	// MemoryImage is the bytes on disk that the memory of a paused sandbox takes.
	MemoryImage int64 `json:"memoryImageBytes,omitempty"`
	// LastSnapshot is the last one taken of it, rolled back to, or that it was made from, and Source the sandbox that it was
	// forked from. Either may be gone.
	LastSnapshot SnapshotID `json:"snapshotId,omitempty"`
	Source       SandboxID  `json:"sourceId,omitempty"`
	// PauseReason of a paused sandbox is "asked", "idle", "ttl", or "memory" when the host's ran short.
	PauseReason string `json:"pauseReason,omitempty"`

	c     *Client
	guest *guest
}

func (c *Client) sandboxFrom(p *warrenv1.Sandbox) *Sandbox {
	s := &Sandbox{c: c}
	s.set(p)
	s.guest = newGuest(c, string(s.ID))
	return s
}

// Ref returns a handle on a sandbox by id, name or unique prefix, without asking the server; only ID is set, to id. A
// mistake shows at the first call.
func (c *Client) Ref(id string) *Sandbox {
	return &Sandbox{ID: SandboxID(id), c: c, guest: newGuest(c, id)}
}

// Create makes a sandbox and returns when it is ready for its first command. When the connection breaks, Create asks
// again under the same key, so that one call makes one sandbox. When ctx ends first, what the server had made by then is
// removed again, unless the spec has a key of its own, by which the caller can ask for it later.
func (c *Client) Create(ctx context.Context, spec Spec) (*Sandbox, error) {
	req := &warrenv1.CreateSandboxRequest{Spec: spec.proto(), IdempotencyKey: spec.IdempotencyKey}
	if req.IdempotencyKey == "" {
		req.IdempotencyKey = randomKey()
	}
	var made *warrenv1.Sandbox
	err := c.again(ctx, func() error {
		stream, err := c.sandboxes.CreateSandbox(ctx, connect.NewRequest(req))
		if err != nil {
			return fromWire("create sandbox", err)
		}
		defer stream.Close()
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().(type) {
			case *warrenv1.CreateSandboxResponse_Progress:
				if spec.Progress != nil {
					spec.Progress(progressFrom(e.Progress))
				}
			case *warrenv1.CreateSandboxResponse_Sandbox:
				made = e.Sandbox
			}
		}
		if made != nil {
			return nil
		}
		return streamEnd("create sandbox", stream.Err())
	})
	if err != nil {
		if ctx.Err() != nil && spec.IdempotencyKey == "" {
			c.giveUp(ctx, req.IdempotencyKey)
		}
		return nil, err
	}
	return c.sandboxFrom(made), nil
}

// giveUp removes what a create has made whose answer came too late for its caller: nobody else knows of it.
func (c *Client) giveUp(ctx context.Context, key string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	// Should this fail too, the server has seen the caller leave.
	_, _ = c.sandboxes.DeleteSandbox(ctx, connect.NewRequest(&warrenv1.DeleteSandboxRequest{IdempotencyKey: key, AllowMissing: true}))
}

// streamEnd is the error of a stream that ended before its result.
func streamEnd(op string, err error) error {
	if err == nil {
		return &Error{Kind: "unavailable", Op: op, Message: "the server ended the answer early"}
	}
	return fromWire(op, err)
}

// Sandbox returns the sandbox with this id, name or unique prefix of an id.
func (c *Client) Sandbox(ctx context.Context, id string) (*Sandbox, error) {
	res, err := c.sandboxes.GetSandbox(ctx, connect.NewRequest(&warrenv1.GetSandboxRequest{Id: id}))
	if err != nil {
		return nil, fromWire("get sandbox", err)
	}
	return c.sandboxFrom(res.Msg.GetSandbox()), nil
}

// ListOptions narrow a list of sandboxes.
type ListOptions struct {
	// Labels that each must have, with these values.
	Labels map[string]string
	// States of which each must have one; empty means any.
	States []SandboxState
	// PageSize is how many the server returns at a time, at most 1000; 0 means 100.
	PageSize int
}

// Sandboxes lists the caller's sandboxes. The first error ends the list.
func (c *Client) Sandboxes(ctx context.Context, o ListOptions) iter.Seq2[*Sandbox, error] {
	return func(yield func(*Sandbox, error) bool) {
		req := &warrenv1.ListSandboxesRequest{Labels: o.Labels, PageSize: uint32(max(0, o.PageSize))}
		for _, s := range o.States {
			wire, ok := stateTo(s)
			if !ok {
				yield(nil, fmt.Errorf("list sandboxes: state %q: %w: want creating, running, pausing, paused, resuming, failed or deleting", s, ErrInvalid))
				return
			}
			req.States = append(req.States, wire)
		}
		for {
			res, err := c.sandboxes.ListSandboxes(ctx, connect.NewRequest(req))
			if err != nil {
				yield(nil, fromWire("list sandboxes", err))
				return
			}
			for _, p := range res.Msg.GetSandboxes() {
				if !yield(c.sandboxFrom(p), nil) {
					return
				}
			}
			if req.PageToken = res.Msg.GetNextPageToken(); req.PageToken == "" {
				return
			}
		}
	}
}

func stateTo(s SandboxState) (warrenv1.SandboxState, bool) {
	for wire, state := range states {
		if state == s {
			return wire, true
		}
	}
	return 0, false
}

// DeleteOptions change what a delete does.
type DeleteOptions struct {
	// AllowMissing succeeds when there is nothing to delete.
	AllowMissing bool
	// DeleteWorkspace also removes the workspace of a sandbox, even one that was to be kept.
	DeleteWorkspace bool
}

// DeleteSandbox removes the sandbox with this id, name or unique prefix, with all that runs in it.
func (c *Client) DeleteSandbox(ctx context.Context, id string, o DeleteOptions) error {
	_, err := c.sandboxes.DeleteSandbox(ctx, connect.NewRequest(&warrenv1.DeleteSandboxRequest{Id: id, AllowMissing: o.AllowMissing, DeleteWorkspace: o.DeleteWorkspace}))
	return fromWire("delete sandbox", err)
}

// Refresh asks the server for the present state of the sandbox.
func (s *Sandbox) Refresh(ctx context.Context) error {
	res, err := s.c.sandboxes.GetSandbox(ctx, connect.NewRequest(&warrenv1.GetSandboxRequest{Id: string(s.ID)}))
	if err != nil {
		return fromWire("get sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Delete removes the sandbox with all that runs in it, and a workspace that was made for it and not to be kept. A sandbox that
// is gone already gives [ErrNotFound].
func (s *Sandbox) Delete(ctx context.Context) error {
	return s.c.DeleteSandbox(ctx, string(s.ID), DeleteOptions{})
}

// Change is a change of a sandbox; what is nil or empty stays as it is.
type Change struct {
	Name         *string
	SetLabels    map[string]string
	RemoveLabels []string
	// IdleTimeout and TTL count from now on; zero removes the limit.
	IdleTimeout, TTL *time.Duration
	// IdleAction is what IdleTimeout does, and TTLAction what TTL does; empty leaves them as they are.
	IdleAction, TTLAction IdleAction
	// AutoResume says whether a call into the sandbox resumes it when it is paused.
	AutoResume    *bool
	KeepWorkspace *bool
	// PrivateNetwork is the private network to be in from now on; "" or "none" for none. Connections to sandboxes that it is not together
	// with any more have ended when Update returns.
	PrivateNetwork *string
}

// Update changes name, labels, timeouts and the private network.
func (s *Sandbox) Update(ctx context.Context, ch Change) error {
	req := &warrenv1.UpdateSandboxRequest{
		Id: string(s.ID), Name: ch.Name, SetLabels: ch.SetLabels, RemoveLabels: ch.RemoveLabels, KeepWorkspace: ch.KeepWorkspace,
		IdleAction: ch.IdleAction.proto(), TtlAction: ch.TTLAction.proto(), AutoResume: ch.AutoResume, PrivateNetwork: ch.PrivateNetwork,
	}
	if ch.IdleTimeout != nil {
		req.IdleTimeout = durationpb.New(*ch.IdleTimeout)
	}
	if ch.TTL != nil {
		req.Ttl = durationpb.New(*ch.TTL)
	}
	res, err := s.c.sandboxes.UpdateSandbox(ctx, connect.NewRequest(req))
	if err != nil {
		return fromWire("update sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Restart replaces the execution: same id, image, workspace and settings; processes and changes outside the workspace
// are gone.
func (s *Sandbox) Restart(ctx context.Context) error {
	res, err := s.c.sandboxes.RestartSandbox(ctx, connect.NewRequest(&warrenv1.RestartSandboxRequest{Id: string(s.ID)}))
	if err != nil {
		return fromWire("restart sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Pause writes the memory of a running sandbox to disk and ends its processes, so that it takes no processor and no
// memory. Connections into it end, and what was cut off, such as a command that is followed, returns [ErrState]. The next call
// into the sandbox, or [Sandbox.Resume], resumes it, unless it was told not to; processes and their output
// are then found again by their ids and sequence numbers. When Pause fails the sandbox runs on. One that is paused stays
// so. Not every driver can do it; one that cannot returns an error that matches [errors.ErrUnsupported].
func (s *Sandbox) Pause(ctx context.Context) error {
	res, err := s.c.sandboxes.PauseSandbox(ctx, connect.NewRequest(&warrenv1.PauseSandboxRequest{Id: string(s.ID)}))
	if err != nil {
		return fromWire("pause sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Resume lets a paused sandbox go on where it was: memory, processes, open files and terminals; the wall clock in it is
// right. One that runs is left alone. When its memory cannot be brought back here (the image was made by another build, on a
// processor that can do more, or with another key) it stays paused, and [Sandbox.Restart] starts it anew on its workspace. When
// the image is damaged that has been done when Resume returns, with an error that says so and matches [ErrState].
func (s *Sandbox) Resume(ctx context.Context) error {
	res, err := s.c.sandboxes.ResumeSandbox(ctx, connect.NewRequest(&warrenv1.ResumeSandboxRequest{Id: string(s.ID)}))
	if err != nil {
		return fromWire("resume sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Stats is what a sandbox uses now.
type Stats struct {
	// CPUTime used since the start.
	CPUTime     time.Duration `json:"cpuTime"`
	Memory      int64         `json:"memoryBytes"`
	MemoryLimit int64         `json:"memoryLimitBytes"`
	// Disk is bytes written outside the workspace.
	Disk      int64 `json:"diskBytes"`
	DiskLimit int64 `json:"diskLimitBytes"`
	// PIDs is how many processes are in it, the guest included; 0 when the guest does not say.
	PIDs uint32    `json:"pids"`
	Time time.Time `json:"time"`
}

// Stats measures the sandbox. A driver that cannot gives errors.ErrUnsupported.
func (s *Sandbox) Stats(ctx context.Context) (*Stats, error) {
	res, err := s.c.sandboxes.GetStats(ctx, connect.NewRequest(&warrenv1.GetStatsRequest{Id: string(s.ID)}))
	if err != nil {
		return nil, fromWire("get stats", err)
	}
	p := res.Msg
	return &Stats{
		CPUTime: p.GetCpuTime().AsDuration(), Memory: p.GetMemoryBytes(), MemoryLimit: p.GetMemoryLimitBytes(),
		Disk: p.GetDiskBytes(), DiskLimit: p.GetDiskLimitBytes(), PIDs: p.GetPids(), Time: timeFrom(p.GetTime()),
	}, nil
}

// Event is one line of what happened.
type Event struct {
	// Seq grows by time; it is where a later [Client.Events] can go on.
	Seq   int64     `json:"seq"`
	Time  time.Time `json:"time"`
	Actor string    `json:"actor,omitempty"`
	// Action such as "sandbox.create", "sandbox.running", "sandbox.failed" or "workspace.commit".
	Action    string            `json:"action"`
	Sandbox   SandboxID         `json:"sandboxId,omitempty"`
	Workspace WorkspaceID       `json:"workspaceId,omitempty"`
	Message   string            `json:"message,omitempty"`
	Fields    map[string]string `json:"fields,omitempty"`
}

// EventOptions say which events to return.
type EventOptions struct {
	// Sandbox, an id or name, leaves out what concerns others.
	Sandbox string
	// After is the Seq to start behind; 0 means the oldest kept.
	After int64
	// NoFollow ends with what is there instead of waiting for more.
	NoFollow bool
}

// Events returns events, oldest first, and waits for more. A broken connection is mended without losing or repeating one;
// the first other error ends the events.
func (c *Client) Events(ctx context.Context, o EventOptions) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		after, stopped := o.After, false
		err := c.again(ctx, func() error {
			for {
				seen, err := c.events(ctx, o, &after, func(e *Event) bool {
					stopped = !yield(e, nil)
					return !stopped
				})
				// A connection that brought something starts the patience anew.
				if stopped || !broken(err) || !seen {
					return err
				}
			}
		})
		if err != nil && !stopped {
			yield(nil, err)
		}
	}
}

func (c *Client) events(ctx context.Context, o EventOptions, after *int64, yield func(*Event) bool) (seen bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.sandboxes.WatchEvents(ctx, connect.NewRequest(&warrenv1.WatchEventsRequest{Id: o.Sandbox, After: *after, NoFollow: o.NoFollow}))
	if err != nil {
		return false, fromWire("watch events", err)
	}
	defer stream.Close()
	for stream.Receive() {
		p := stream.Msg().GetEvent()
		if p == nil {
			continue
		}
		seen, *after = true, p.GetSeq()
		if !yield(eventFrom(p)) {
			cancel()
			return seen, nil
		}
	}
	if err := stream.Err(); err != nil {
		return seen, fromWire("watch events", err)
	}
	if !o.NoFollow {
		return seen, &Error{Kind: "unavailable", Op: "watch events", Message: "the server ended the stream"}
	}
	return seen, nil
}
