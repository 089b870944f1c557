package engine

import (
	"context"
	"io"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// Caller is who asks. The server finds it out; the engine decides by it.
type Caller struct {
	// User owns what the call makes, and sees only what it owns.
	User string
	// Operator is the owner of the server itself: it sees everything, may mount any host directory, use repositories by
	// path, and change images.
	Operator bool
}

// RestartPolicy says what the next use of a failed sandbox does.
type RestartPolicy string

// The restart policies.
const (
	// RestartNever leaves a failed sandbox until it is restarted or deleted.
	RestartNever RestartPolicy = "never"
	// RestartOnFailure gives the next use of a failed sandbox a fresh execution on the same workspace.
	RestartOnFailure RestartPolicy = "on-failure"
)

// State of a sandbox.
type State string

// The states of a sandbox.
const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	// RollingBack means that nothing but the snapshot counts any more, on the way to running or paused.
	RollingBack State = "rolling-back"
	Failed      State = "failed"
	Deleting    State = "deleting"
)

// Resources of a sandbox; 0 means the default.
type Resources struct {
	CPUMillis   uint32 `json:"cpu_millis,omitempty"`
	MemoryBytes int64  `json:"memory_bytes,omitempty"`
	DiskBytes   int64  `json:"disk_bytes,omitempty"`
	PIDs        uint32 `json:"pids,omitempty"`
}

// Mount is a host directory that a sandbox is to see.
type Mount struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	Writable bool   `json:"writable,omitempty"`
}

// RepoSource says what a workspace is cut from.
type RepoSource struct {
	URL string `json:"url"`
	Ref string `json:"ref,omitempty"`
	// Dirty takes the uncommitted changes of a path along.
	Dirty bool `json:"dirty,omitempty"`
	// Fetch even when the ref is in the cache.
	Fetch bool `json:"fetch,omitempty"`
}

// Spec is a user's wish for a sandbox. See the message SandboxSpec for the fields.
type Spec struct {
	Name          string            `json:"name,omitempty"`
	Image         string            `json:"image,omitempty"`
	Repo          *RepoSource       `json:"repo,omitempty"`
	WorkspaceID   string            `json:"workspace_id,omitempty"`
	Resources     Resources         `json:"resources,omitzero"`
	Env           map[string]string `json:"env,omitempty"`
	Mounts        []Mount           `json:"mounts,omitempty"`
	Driver        string            `json:"driver,omitempty"`
	Restart       RestartPolicy     `json:"restart,omitempty"`
	Labels        map[string]string `json:"labels,omitempty"`
	IdleTimeout   time.Duration     `json:"idle_timeout,omitempty"`
	TTL           time.Duration     `json:"ttl,omitempty"`
	KeepWorkspace bool              `json:"keep_workspace,omitempty"`
	DriverOptions map[string]string `json:"driver_options,omitempty"`
	// Policy names what the sandbox may reach, see network.go.
	Policy string `json:"policy,omitempty"`
	// PrivateNetwork of the owner's that it is in, see peers.go.
	PrivateNetwork string `json:"private_network,omitempty"`
	// Placeholders are, by secret, what stands for it in the sandbox, the newest first. The others are in memory that it goes on from.
	Placeholders map[string][]string `json:"placeholders,omitempty"`
	// Snapshot to go on from, by id or name. What it holds (image, driver, mounts, disk, environment) is not to be
	// given too, or the same.
	Snapshot string `json:"snapshot,omitempty"`
	// Template whose snapshot to go on from. It is resolved when the create begins.
	Template     string     `json:"template,omitempty"`
	IdleAction   IdleAction `json:"idle_action,omitempty"`
	NoAutoResume bool       `json:"no_auto_resume,omitempty"`
	// TTLAction is what TTL does; the empty one deletes.
	TTLAction IdleAction `json:"ttl_action,omitempty"`
	// MaxLifetime is how long after its creation it is deleted, whatever else happens.
	MaxLifetime time.Duration `json:"max_lifetime,omitempty"`
}

// CreateRequest asks for a sandbox.
type CreateRequest struct {
	Spec Spec
	// IdempotencyKey makes a retry return the first call's sandbox, for 24 hours.
	IdempotencyKey string
}

// Progress tells how a long call gets on.
type Progress struct {
	Step, Message string
	Done, Total   int64
}

// FailureEvicted is of a paused sandbox whose memory was removed since the disk ran short.
const FailureEvicted = "evicted"

// Failure is why a sandbox failed: "oom", "killed", "exited", "lost", "create" or [FailureEvicted].
type Failure struct {
	Reason  string
	Message string
	Time    time.Time
}

// Milestone is one step of a create.
type Milestone struct {
	Name     string
	Start    time.Duration
	Duration time.Duration
}

// Sandbox is what the engine tells about a sandbox. It is a copy.
type Sandbox struct {
	ID          warren.SandboxID
	Name        string
	State       State
	Spec        Spec
	Image       string
	ImageDigest string
	WorkspaceID warren.WorkspaceID
	Driver      string
	Limits      driver.Limits
	Labels      map[string]string
	Created     time.Time
	LastActive  time.Time
	// Expires is when lifetime, TTL or idle timeout end it, whichever is first, if nothing happens until then; zero for never. What only
	// pauses ends nothing.
	Expires time.Time
	// Pauses is when TTL pauses it, zero for never.
	Pauses     time.Time
	Failure    *Failure
	Timing     []Milestone
	Generation uint32
	Owner      string
	Isolation  string
	// Network is the name of its policy, PrivateNetwork that of the private network that it is in.
	Network        string
	PrivateNetwork string
	// ImageSize is the bytes that the memory image of a paused sandbox takes.
	ImageSize int64
	// SnapshotID is the last snapshot that was taken of it or that it was made from, SourceID the sandbox that it was
	// forked from, if any; neither has to be there any more.
	SnapshotID warren.SnapshotID
	SourceID   warren.SandboxID
	// PauseReason of a paused sandbox is PauseAsked, PauseIdle, PauseTTL or PauseMemory.
	PauseReason string
	// What the spec said of idling, or what it was changed to.
	IdleTimeout  time.Duration
	IdleAction   IdleAction
	NoAutoResume bool
	// And of its TTL.
	TTL       time.Duration
	TTLAction IdleAction
}

// SnapshotKind says what a snapshot holds.
type SnapshotKind string

// The kinds of snapshots.
const (
	// MemorySnapshot is of memory, root changes and workspace at one instant.
	MemorySnapshot SnapshotKind = "memory"
	// FilesSnapshot is of root changes and workspace, for a cold start.
	FilesSnapshot SnapshotKind = "files"
)

// Snapshot is what the engine tells about a snapshot. It is a copy.
type Snapshot struct {
	ID   warren.SnapshotID
	Name string
	Kind SnapshotKind
	// SandboxID and SandboxName are those of the sandbox that it was taken of, which does not have to be there any more.
	SandboxID   warren.SandboxID
	SandboxName string
	// ParentID is the snapshot before it, if it is still there.
	ParentID    warren.SnapshotID
	Driver      string
	Image       string
	ImageDigest string
	Limits      driver.Limits
	Created     time.Time
	Owner       string
	// MemorySize is the bytes of the memory image that count for the snapshot and FilesSize those of the workspace; when sizes are asked for,
	// all that there are, and SharedSize is how many of both others have too.
	MemorySize, FilesSize, SharedSize int64
	// Stopped is how long the sandbox stood still; only the call that took it tells.
	Stopped time.Duration
}

// Template is what the engine tells about a template. It is a copy.
type Template struct {
	ID, Name, Owner string
	SnapshotID      warren.SnapshotID
	// Recipe is a JSON object of the client that built it.
	Recipe string
	// IdleTimeout of what is made of it, unless that asks for one.
	IdleTimeout time.Duration
	// Version counts from 1 with each put.
	Version          uint32
	Created, Updated time.Time
	// Standby is how many sandboxes of it are restored already.
	Standby int
	// StandbyNote is why there is none.
	StandbyNote string
}

// TemplateRequest asks for a template.
type TemplateRequest struct {
	Name, Snapshot, Recipe string
	IdleTimeout            time.Duration
}

// SnapshotRequest asks for a snapshot of a sandbox.
type SnapshotRequest struct {
	ID, Name string
	// FilesOnly leaves the memory out.
	FilesOnly bool
}

// ForkRequest asks for sandboxes that go on from where one is.
type ForkRequest struct {
	ID string
	// Count of children, 0 for one.
	Count int
	// Name of the child; of several the beginning, "-1" and so on follow.
	Name string
	// Env and Labels are added to those of the source. Env reaches processes that start from then on.
	Env, Labels map[string]string
	// TTL, IdleTimeout and IdleAction replace the source's where they are set.
	TTL, IdleTimeout time.Duration
	IdleAction       IdleAction
	// All means that when one child fails, none stays.
	All bool
}

// Forked is what became of one child.
type Forked struct {
	Sandbox *Sandbox
	Err     error
}

// ForkResult is what became of a fork.
type ForkResult struct {
	Children []Forked
	// Stopped is how long the source stood still.
	Stopped time.Duration
	Kind    SnapshotKind
}

// ListRequest chooses sandboxes.
type ListRequest struct {
	Labels    map[string]string
	States    []State
	PageSize  int
	PageToken string
}

// UpdateRequest changes a sandbox; nil fields stay.
type UpdateRequest struct {
	ID            string
	Name          *string
	SetLabels     map[string]string
	RemoveLabels  []string
	IdleTimeout   *time.Duration
	TTL           *time.Duration
	TTLAction     *IdleAction
	KeepWorkspace *bool
	IdleAction    *IdleAction
	AutoResume    *bool
	// PrivateNetwork to be in from now on, "" or "none" for none.
	PrivateNetwork *string
}

// DeleteRequest removes a sandbox.
type DeleteRequest struct {
	ID string
	// Key, instead of ID, is the idempotency key of the create whose sandbox is meant, under way or done.
	Key string
	// AllowMissing makes it no error when there is none.
	AllowMissing bool
	// DeleteWorkspace also removes a workspace that would be kept.
	DeleteWorkspace bool
}

// Stats is what a sandbox uses.
type Stats struct {
	driver.Stats
	MemoryLimit int64
	DiskLimit   int64
	Time        time.Time
}

// Event is one line of what happened.
type Event struct {
	Seq         int64
	Time        time.Time
	Actor       string
	Action      string
	SandboxID   warren.SandboxID
	WorkspaceID warren.WorkspaceID
	Message     string
	Fields      map[string]string
}

// WatchRequest chooses events.
type WatchRequest struct {
	// ID of a sandbox or workspace; empty means all that the caller may see.
	ID string
	// After is the sequence number after which to begin; 0 begins with the oldest kept.
	After int64
	// NoFollow ends after the newest event instead of waiting for more.
	NoFollow bool
	// Calls asks [Engine.Flows] for the record of calls.
	Calls bool
}

// Workspace is what the engine tells about a workspace. It is a copy.
type Workspace struct {
	ID         warren.WorkspaceID
	Name       string
	RepoURL    string
	RepoID     warren.RepoID
	Ref        string
	BaseCommit string
	Created    time.Time
	// SandboxID has it mounted, if any.
	SandboxID warren.SandboxID
	// Size in bytes, when asked for.
	Size       int64
	Branch     string
	HeadCommit string
	Owner      string
	Keep       bool
}

// CreateWorkspaceRequest asks for a workspace without a sandbox.
type CreateWorkspaceRequest struct {
	Name           string
	Repo           *RepoSource
	IdempotencyKey string
}

// CommitRequest records the changes of a workspace.
type CommitRequest struct {
	ID      string
	Message string
	Branch  string
	Author  string
	All     bool
}

// PushRequest sends a branch to the origin.
type PushRequest struct {
	ID           string
	Branch       string
	RemoteBranch string
	Force        bool
}

// Token is a bearer token without its value.
type Token struct {
	ID          string
	User        string
	Description string
	Created     time.Time
	Expires     time.Time
	LastUsed    time.Time
}

// Image is a read-only root file system.
type Image struct {
	Name    string
	Digest  string
	Kind    string
	Size    int64
	Created time.Time
	Config  ImageConfig
	Root    driver.Root
}

// ImageConfig is what an image says about the processes in it.
type ImageConfig struct {
	User, WorkingDir string
	Env              map[string]string
	Cmd, Entrypoint  []string
}

// PullOptions of an image.
type PullOptions struct {
	Name, Platform string
	Insecure       bool
	Progress       func(Progress)
}

// BootstrapOptions of an image.
type BootstrapOptions struct {
	Name, Distribution, Release string
	Packages                    []string
	Progress                    func(Progress)
	Output                      io.Writer
}

// Images is where root file systems come from.
type Images interface {
	Resolve(ctx context.Context, ref string) (*Image, error)
	Pull(ctx context.Context, ref string, o PullOptions) (*Image, error)
	Import(ctx context.Context, name string, r io.Reader) (*Image, error)
	Bootstrap(ctx context.Context, o BootstrapOptions) (*Image, error)
	List(ctx context.Context) ([]*Image, error)
	Delete(ctx context.Context, name string) error
}

// HostPruner is what Images may have besides: at the start it removes what was kept of earlier states of the host's own
// image, but for the digests in keep, which sandboxes run on.
type HostPruner interface {
	PruneHost(keep map[string]bool) error
}

// Repo is a cached repository.
type Repo struct {
	ID            warren.RepoID
	URL           string
	Dir           string
	DefaultBranch string
	Size          int64
	Fetched       time.Time
	// Handle is what Repos gave and Workspaces takes, untouched by the engine.
	Handle any
}

// FetchOptions of a repository.
type FetchOptions struct {
	Ref   string
	Force bool
	// HostCredentials lets git use what the daemon's own user has.
	HostCredentials bool
	Progress        func(step, message string, done, total int64)
}

// Repos is the cache of repositories.
type Repos interface {
	Fetch(ctx context.Context, url string, o FetchOptions) (*Repo, error)
	ResolveRef(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error)
	// ResolveOrigin is ResolveRef among what the origin has, without the commits of workspaces.
	ResolveOrigin(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error)
	Get(ctx context.Context, idOrURL string) (*Repo, error)
	List(ctx context.Context) ([]*Repo, error)
	Delete(ctx context.Context, id warren.RepoID) error
}

// WorkspaceSource says what a workspace holds at first.
type WorkspaceSource struct {
	Repo                     *Repo
	URL, Ref, Commit, Branch string
	Dirty                    string
}

// WorkspaceDirs is a workspace on disk.
type WorkspaceDirs struct {
	URL, Ref, Commit, Branch string
	RepoID                   warren.RepoID
	// Files and Home are directories of the host. Borrow, when set, is one of objects to show read-only at RepoMount.
	Files, Home, Borrow string
	Head, HeadBranch    string
}

// DiffOptions choose what a diff shows.
type DiffOptions struct{ All, Stat, SinceMark bool }

// CommitOptions of a commit.
type CommitOptions struct {
	Name, Message, Branch, Author string
	All                           bool
}

// Commit is a commit that was made.
type Commit struct {
	ID, Branch string
	Files      int
	RepoDir    string
}

// PushOptions of a push.
type PushOptions struct {
	Branch, RemoteBranch string
	Force                bool
	// HostCredentials as in FetchOptions.
	HostCredentials bool
}

// PushResult is what was pushed where.
type PushResult struct{ URL, Branch, Commit string }

// WorkspaceCopy is a copy of a workspace under way. The sandbox that works in it stands still while Finish runs; Commit makes
// the copy a workspace; Abort ends it, after a Commit without effect.
type WorkspaceCopy interface {
	Finish(ctx context.Context) error
	Commit(ctx context.Context) (method string, err error)
	Abort()
}

// WorkspaceReplacement is what a workspace is to become, whole and on disk beside it. Commit puts it in the workspace's place in one
// step; Abort removes it, after a Commit what was there before. Until Abort nobody else changes the workspace.
type WorkspaceReplacement interface {
	Commit(ctx context.Context) error
	Abort()
}

// Workspaces keeps the durable files.
type Workspaces interface {
	// Prepare makes the directories, in milliseconds; Populate fills them. Both may be repeated.
	Prepare(ctx context.Context, id warren.WorkspaceID, src WorkspaceSource) (*WorkspaceDirs, error)
	Populate(ctx context.Context, id warren.WorkspaceID) error
	Get(ctx context.Context, id warren.WorkspaceID) (*WorkspaceDirs, error)
	// Delete returns nil when there is none.
	Delete(ctx context.Context, id warren.WorkspaceID) error
	Copy(ctx context.Context, from, to warren.WorkspaceID) (method string, err error)
	// BeginCopy begins a copy of one instant, see [WorkspaceCopy]; with keep nobody ever writes to it. Replace makes a
	// workspace what another is, all or nothing, and may be repeated. BeginReplace does of it all that takes room, which is
	// ReplaceNeeds bytes, see [WorkspaceReplacement]. Adopt gives a copy another id.
	BeginCopy(ctx context.Context, from, to warren.WorkspaceID, keep bool) (WorkspaceCopy, error)
	Replace(ctx context.Context, id, from warren.WorkspaceID) error
	ReplaceNeeds(ctx context.Context, from warren.WorkspaceID) (int64, error)
	BeginReplace(ctx context.Context, id, from warren.WorkspaceID) (WorkspaceReplacement, error)
	Adopt(ctx context.Context, from, to warren.WorkspaceID) error
	// Sync returns when the files are on disk for good.
	Sync(ctx context.Context, id warren.WorkspaceID) error
	// Usage is the bytes on disk, and how many of them other workspaces have too.
	Usage(ctx context.Context, id warren.WorkspaceID) (total, shared int64, err error)
	Size(ctx context.Context, id warren.WorkspaceID) (int64, error)
	Diff(ctx context.Context, id warren.WorkspaceID, o DiffOptions, w io.Writer) error
	// Mark remembers the files for a diff since then, in place of what was remembered before.
	Mark(ctx context.Context, id warren.WorkspaceID) error
	Commit(ctx context.Context, id warren.WorkspaceID, o CommitOptions) (*Commit, error)
	Push(ctx context.Context, id warren.WorkspaceID, o PushOptions) (*PushResult, error)
	FormatPatch(ctx context.Context, id warren.WorkspaceID, w io.Writer) error
}
