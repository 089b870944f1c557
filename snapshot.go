package warren

import (
	"context"
	"iter"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// SnapshotKind says what a snapshot holds.
type SnapshotKind string

const (
	// SnapshotMemory is memory, root changes and workspace at one instant.
	SnapshotMemory SnapshotKind = "memory"
	// SnapshotFiles is root changes and workspace: what is made of it starts cold.
	SnapshotFiles SnapshotKind = "files"
)

func kindFrom(k warrenv1.SnapshotKind) SnapshotKind {
	if k == warrenv1.SnapshotKind_SNAPSHOT_KIND_FILES {
		return SnapshotFiles
	}
	return SnapshotMemory
}

// Snapshot is a kept instant of a sandbox, as the server last described it. It is whole by itself: deleting another
// snapshot, or the sandbox, does it no harm.
type Snapshot struct {
	ID   SnapshotID   `json:"id"`
	Name string       `json:"name,omitempty"`
	Kind SnapshotKind `json:"kind"`
	// Sandbox that it was taken of, and its name then. It may be gone.
	Sandbox     SandboxID `json:"sandboxId"`
	SandboxName string    `json:"sandboxName,omitempty"`
	// Parent is the snapshot before it, if that is still there.
	Parent      SnapshotID `json:"parentId,omitempty"`
	Driver      string     `json:"driver"`
	Image       string     `json:"image"`
	ImageDigest string     `json:"imageDigest"`
	Resources   Resources  `json:"resources"`
	Created     time.Time  `json:"created"`
	Owner       string     `json:"owner,omitempty"`
	// Memory is the bytes on disk of the memory image, or of the root's changes of one without memory: those that count for this
	// snapshot, or, where sizes are asked for, all.
	Memory int64 `json:"memoryBytes"`
	// Files is the bytes on disk of its copy of the workspace, and Shared how many of these and of Memory others have too.
	Files  int64 `json:"filesBytes"`
	Shared int64 `json:"sharedBytes,omitempty"`
	// Stopped is how long the sandbox stood still. Only the call that took it tells.
	Stopped time.Duration `json:"stopped,omitempty"`

	c *Client
}

func (c *Client) snapshotFrom(p *warrenv1.Snapshot) *Snapshot {
	return &Snapshot{
		ID: SnapshotID(p.GetId()), Name: p.GetName(), Kind: kindFrom(p.GetKind()), Sandbox: SandboxID(p.GetSandboxId()), SandboxName: p.GetSandboxName(),
		Parent: SnapshotID(p.GetParentId()), Driver: p.GetDriver(), Image: p.GetImage(), ImageDigest: p.GetImageDigest(),
		Resources: resourcesFrom(p.GetResources()), Created: timeFrom(p.GetCreated()), Owner: p.GetOwner(),
		Memory: p.GetMemoryBytes(), Files: p.GetFilesBytes(), Shared: p.GetSharedBytes(), Stopped: p.GetStopped().AsDuration(), c: c,
	}
}

// SnapshotOptions say how a snapshot is taken.
type SnapshotOptions struct {
	// Name is unique among the owner's snapshots. Empty means none.
	Name string
	// FilesOnly leaves the memory out.
	FilesOnly bool
	// Progress, when set, is told each step; also when the driver cannot keep memory, so that only the files are kept.
	Progress func(Progress)
}

// Snapshot keeps this instant of the sandbox: memory, processes with what they have open, root and workspace. The sandbox
// runs on after a moment. A paused sandbox can be kept too. Where the driver cannot keep memory the snapshot has the files
// alone, which its Kind says.
func (s *Sandbox) Snapshot(ctx context.Context, o SnapshotOptions) (*Snapshot, error) {
	stream, err := s.c.snapshots.CreateSnapshot(ctx, connect.NewRequest(&warrenv1.CreateSnapshotRequest{SandboxId: string(s.ID), Name: o.Name, FilesOnly: o.FilesOnly}))
	if err != nil {
		return nil, fromWire("create snapshot", err)
	}
	defer stream.Close()
	var made *warrenv1.Snapshot
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *warrenv1.CreateSnapshotResponse_Progress:
			if o.Progress != nil {
				o.Progress(progressFrom(e.Progress))
			}
		case *warrenv1.CreateSnapshotResponse_Snapshot:
			made = e.Snapshot
		}
	}
	if made == nil {
		return nil, streamEnd("create snapshot", stream.Err())
	}
	return s.c.snapshotFrom(made), nil
}

// Rollback takes the sandbox back to a snapshot, named by id or name: memory, root and workspace. It keeps its id, name and
// settings, and clients find their processes of then. What happened since is lost, but for commits. When it fails the
// sandbox is as it was, or at the snapshot and paused; the error says which. The snapshot may be of another sandbox with the same
// image and driver, for which the command line asks.
func (s *Sandbox) Rollback(ctx context.Context, snapshot string) error {
	res, err := s.c.sandboxes.RollbackSandbox(ctx, connect.NewRequest(&warrenv1.RollbackSandboxRequest{Id: string(s.ID), Snapshot: snapshot}))
	if err != nil {
		return fromWire("rollback sandbox", err)
	}
	s.set(res.Msg.GetSandbox())
	return nil
}

// Snapshot returns the snapshot with this id, name or unique prefix, its size measured.
func (c *Client) Snapshot(ctx context.Context, id string) (*Snapshot, error) {
	res, err := c.snapshots.GetSnapshot(ctx, connect.NewRequest(&warrenv1.GetSnapshotRequest{Id: id, Size: true}))
	if err != nil {
		return nil, fromWire("get snapshot", err)
	}
	return c.snapshotFrom(res.Msg.GetSnapshot()), nil
}

// SnapshotListOptions change a list of snapshots.
type SnapshotListOptions struct {
	// Sandbox leaves out those of others. One that is gone is named by its full id.
	Sandbox string
	// Size measures each, which takes a walk through its files.
	Size bool
	// PageSize is how many the server returns at a time; 0 means 100.
	PageSize int
}

// Snapshots lists the caller's snapshots, oldest first. The first error ends the list.
func (c *Client) Snapshots(ctx context.Context, o SnapshotListOptions) iter.Seq2[*Snapshot, error] {
	return func(yield func(*Snapshot, error) bool) {
		req := &warrenv1.ListSnapshotsRequest{SandboxId: o.Sandbox, Size: o.Size, PageSize: uint32(max(0, o.PageSize))}
		for {
			res, err := c.snapshots.ListSnapshots(ctx, connect.NewRequest(req))
			if err != nil {
				yield(nil, fromWire("list snapshots", err))
				return
			}
			for _, p := range res.Msg.GetSnapshots() {
				if !yield(c.snapshotFrom(p), nil) {
					return
				}
			}
			if req.PageToken = res.Msg.GetNextPageToken(); req.PageToken == "" {
				return
			}
		}
	}
}

// DeleteSnapshot removes a snapshot. Others, and what was made of it, stay.
func (c *Client) DeleteSnapshot(ctx context.Context, id string, o DeleteOptions) error {
	_, err := c.snapshots.DeleteSnapshot(ctx, connect.NewRequest(&warrenv1.DeleteSnapshotRequest{Id: id, AllowMissing: o.AllowMissing}))
	return fromWire("delete snapshot", err)
}

// Delete removes the snapshot. Others, and what was made of it, stay.
func (p *Snapshot) Delete(ctx context.Context) error {
	return p.c.DeleteSnapshot(ctx, string(p.ID), DeleteOptions{})
}

// ForkOptions say how children are made.
type ForkOptions struct {
	// Count of children; 0 means one.
	Count int
	// Name of the child; of several the beginning, which "-1", "-2" and so on follow. Empty means none.
	Name string
	// Env and Labels are added to those of the source. Env reaches processes that start after the fork.
	Env, Labels map[string]string
	// IdleTimeout and TTL of the children, if not those of the source.
	IdleTimeout, TTL time.Duration
	// IdleAction is what the idle timeout of the children does; empty means what that of the source does.
	IdleAction IdleAction
	// All means that when one child fails, none stays and Fork returns the error.
	All bool
	// Progress, when set, is told each step.
	Progress func(Progress)
}

// Fork is what became of a fork.
type Fork struct {
	Children []Child `json:"children"`
	// Stopped is how long the source stood still.
	Stopped time.Duration `json:"stopped"`
	// Kind is [SnapshotFiles] where the driver cannot keep memory, so that the children started cold on copies of the files.
	Kind SnapshotKind `json:"kind"`
}

// Child is one child of a fork, or why there is none.
type Child struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Err     error    `json:"-"`
}

// Fork makes sandboxes that go on from where this one is: memory, processes, open files, root and workspace. It runs on. Each
// child has an id, a host name, tokens and a workspace of its own. Fork returns an error when there is no child; when only
// some failed, each has its own.
func (s *Sandbox) Fork(ctx context.Context, o ForkOptions) (*Fork, error) {
	stream, err := s.c.sandboxes.ForkSandbox(ctx, connect.NewRequest(&warrenv1.ForkSandboxRequest{
		Id: string(s.ID), Count: uint32(max(0, o.Count)), Name: o.Name, Env: o.Env, Labels: o.Labels,
		IdleTimeout: durationTo(o.IdleTimeout), Ttl: durationTo(o.TTL), All: o.All, IdleAction: o.IdleAction.proto(),
	}))
	if err != nil {
		return nil, fromWire("fork sandbox", err)
	}
	defer stream.Close()
	var made *warrenv1.ForkResult
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *warrenv1.ForkSandboxResponse_Progress:
			if o.Progress != nil {
				o.Progress(progressFrom(e.Progress))
			}
		case *warrenv1.ForkSandboxResponse_Result:
			made = e.Result
		}
	}
	if made == nil {
		return nil, streamEnd("fork sandbox", stream.Err())
	}
	f := &Fork{Stopped: made.GetStopped().AsDuration(), Kind: kindFrom(made.GetKind())}
	for _, p := range made.GetChildren() {
		var ch Child
		if d := p.GetError(); d != nil {
			ch.Err = &Error{Kind: d.GetKind(), Op: d.GetOp(), ID: d.GetId(), Hint: d.GetHint(), Resource: d.GetResource(), Message: p.GetMessage()}
		} else {
			ch.Sandbox = s.c.sandboxFrom(p.GetSandbox())
		}
		f.Children = append(f.Children, ch)
	}
	return f, nil
}
