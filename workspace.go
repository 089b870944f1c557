package warren

import (
	"cmp"
	"context"
	"io"
	"iter"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Workspace is the durable files of a sandbox, as the server last described them.
type Workspace struct {
	ID   WorkspaceID `json:"id"`
	Name string      `json:"name,omitempty"`
	// RepoURL, without credentials, and Repo say what it was cut from; empty means nothing.
	RepoURL string `json:"repoUrl,omitempty"`
	Repo    RepoID `json:"repoId,omitempty"`
	Ref     string `json:"ref,omitempty"`
	// BaseCommit is the commit that it was cut from.
	BaseCommit string    `json:"baseCommit,omitempty"`
	Created    time.Time `json:"created,omitzero"`
	// Sandbox that has it mounted, if any.
	Sandbox SandboxID `json:"sandboxId,omitempty"`
	// Size in bytes on disk, when it was asked for.
	Size int64 `json:"sizeBytes,omitempty"`
	// Branch and Head are those of the last commit made from it.
	Branch string `json:"branch,omitempty"`
	Head   string `json:"headCommit,omitempty"`
	Owner  string `json:"owner,omitempty"`
	// Keep says that it stays when its sandbox goes.
	Keep bool `json:"keep,omitempty"`

	c *Client
}

// WorkspaceSpec is the wish for a workspace.
type WorkspaceSpec struct {
	// Name is unique among the owner's workspaces. Empty means none.
	Name string
	// Repo to cut it from. Nil means empty.
	Repo *RepoSource
	// IdempotencyKey is as in [Spec].
	IdempotencyKey string
	// Progress, when set, is told each step.
	Progress func(Progress)
}

// CreateWorkspace makes a workspace that no sandbox uses yet.
func (c *Client) CreateWorkspace(ctx context.Context, spec WorkspaceSpec) (*Workspace, error) {
	req := &warrenv1.CreateWorkspaceRequest{Name: spec.Name, Repo: spec.Repo.proto(), IdempotencyKey: spec.IdempotencyKey}
	if req.IdempotencyKey == "" {
		req.IdempotencyKey = randomKey()
	}
	var made *warrenv1.Workspace
	err := c.again(ctx, func() error {
		stream, err := c.workspaces.CreateWorkspace(ctx, connect.NewRequest(req))
		if err != nil {
			return fromWire("create workspace", err)
		}
		defer stream.Close()
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().(type) {
			case *warrenv1.CreateWorkspaceResponse_Progress:
				if spec.Progress != nil {
					spec.Progress(progressFrom(e.Progress))
				}
			case *warrenv1.CreateWorkspaceResponse_Workspace:
				made = e.Workspace
			}
		}
		if made != nil {
			return nil
		}
		return streamEnd("create workspace", stream.Err())
	})
	if err != nil {
		return nil, err
	}
	return c.workspaceFrom(made), nil
}

// Workspace returns the workspace with this id, name or unique prefix, or that of the sandbox so named, its size included.
func (c *Client) Workspace(ctx context.Context, id string) (*Workspace, error) {
	res, err := c.workspaces.GetWorkspace(ctx, connect.NewRequest(&warrenv1.GetWorkspaceRequest{Id: id, Size: true}))
	if err != nil {
		return nil, fromWire("get workspace", err)
	}
	return c.workspaceFrom(res.Msg.GetWorkspace()), nil
}

// WorkspaceListOptions change a list of workspaces.
type WorkspaceListOptions struct {
	// Size measures each, which takes a walk through its files.
	Size bool
	// PageSize is how many the server returns at a time; 0 means 100.
	PageSize int
}

// Workspaces lists the caller's workspaces. The first error ends the list.
func (c *Client) Workspaces(ctx context.Context, o WorkspaceListOptions) iter.Seq2[*Workspace, error] {
	return func(yield func(*Workspace, error) bool) {
		req := &warrenv1.ListWorkspacesRequest{Size: o.Size, PageSize: uint32(max(0, o.PageSize))}
		for {
			res, err := c.workspaces.ListWorkspaces(ctx, connect.NewRequest(req))
			if err != nil {
				yield(nil, fromWire("list workspaces", err))
				return
			}
			for _, p := range res.Msg.GetWorkspaces() {
				if !yield(c.workspaceFrom(p), nil) {
					return
				}
			}
			if req.PageToken = res.Msg.GetNextPageToken(); req.PageToken == "" {
				return
			}
		}
	}
}

// DeleteWorkspace removes a workspace that no sandbox uses, with all its files.
func (c *Client) DeleteWorkspace(ctx context.Context, id string, o DeleteOptions) error {
	_, err := c.workspaces.DeleteWorkspace(ctx, connect.NewRequest(&warrenv1.DeleteWorkspaceRequest{Id: id, AllowMissing: o.AllowMissing}))
	return fromWire("delete workspace", err)
}

// Delete removes the workspace with all its files.
func (w *Workspace) Delete(ctx context.Context) error {
	return w.c.DeleteWorkspace(ctx, string(w.ID), DeleteOptions{})
}

// CopyWorkspace makes an independent copy, and says how: "btrfs snapshot", "reflink" or "copy".
func (c *Client) CopyWorkspace(ctx context.Context, id, name string) (w *Workspace, method string, err error) {
	res, err := c.workspaces.CopyWorkspace(ctx, connect.NewRequest(&warrenv1.CopyWorkspaceRequest{Id: id, Name: name}))
	if err != nil {
		return nil, "", fromWire("copy workspace", err)
	}
	return c.workspaceFrom(res.Msg.GetWorkspace()), res.Msg.GetMethod(), nil
}

// Copy makes an independent copy of the workspace.
func (w *Workspace) Copy(ctx context.Context, name string) (*Workspace, error) {
	ws, _, err := w.c.CopyWorkspace(ctx, string(w.ID), name)
	return ws, err
}

// DiffOptions change a diff.
type DiffOptions struct {
	// All shows also files that git ignores.
	All bool
	// Stat writes a summary of changed files instead of the patch.
	Stat bool
	// SinceMark shows what changed since [Client.MarkWorkspace], not since the workspace was cut.
	SinceMark bool
}

// MarkWorkspace remembers the files of a workspace, named by its id or that of the sandbox that has it, for a diff since then. The
// next mark takes the place of the one before, and a rollback leaves it as it is; a copy or fork has no mark. What was ignored then says
// what is ignored in the diff. Files of more than 128 MiB, and the largest when there is more than 1 GiB to read, count as changed when
// their size, times or inode differ.
func (c *Client) MarkWorkspace(ctx context.Context, id string) error {
	_, err := c.workspaces.MarkWorkspace(ctx, connect.NewRequest(&warrenv1.MarkWorkspaceRequest{Id: id}))
	return fromWire("mark workspace", err)
}

// Mark remembers the files; see [Client.MarkWorkspace].
func (w *Workspace) Mark(ctx context.Context) error { return w.c.MarkWorkspace(ctx, string(w.ID)) }

// MarkWorkspace remembers the files of the sandbox's workspace; see [Client.MarkWorkspace].
func (s *Sandbox) MarkWorkspace(ctx context.Context) error {
	return s.c.MarkWorkspace(ctx, string(s.ID))
}

// Diff returns a patch of all changes since the workspace was cut, or marked, in git's format, binary files included. The id is that of a
// workspace or of the sandbox that has it. An error in the middle comes from Read. The reader must be closed.
func (c *Client) Diff(ctx context.Context, id string, o DiffOptions) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.workspaces.Diff(ctx, connect.NewRequest(&warrenv1.DiffRequest{Id: id, All: o.All, Stat: o.Stat, SinceMark: o.SinceMark}))
	if err != nil {
		cancel()
		return nil, fromWire("diff", err)
	}
	return newChunks("diff", cancel, stream.Close, func() ([]byte, error) {
		if stream.Receive() {
			return stream.Msg().GetChunk(), nil
		}
		return nil, cmp.Or(stream.Err(), io.EOF)
	})
}

// FormatPatch returns the commits of the last commit's branch as mails, as git format-patch writes them. The reader must
// be closed.
func (c *Client) FormatPatch(ctx context.Context, id string) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.workspaces.FormatPatch(ctx, connect.NewRequest(&warrenv1.FormatPatchRequest{Id: id}))
	if err != nil {
		cancel()
		return nil, fromWire("format patch", err)
	}
	return newChunks("format patch", cancel, stream.Close, func() ([]byte, error) {
		if stream.Receive() {
			return stream.Msg().GetChunk(), nil
		}
		return nil, cmp.Or(stream.Err(), io.EOF)
	})
}

// chunks reads a stream of byte chunks.
type chunks struct {
	op     string
	cancel context.CancelFunc
	close  func() error
	// next returns io.EOF at the end.
	next func() ([]byte, error)
	rest []byte
	err  error
}

// newChunks waits for the first chunk, so that a refused call is an error of the call and not of the first Read.
func newChunks(op string, cancel context.CancelFunc, close func() error, next func() ([]byte, error)) (io.ReadCloser, error) {
	r := &chunks{op: op, cancel: cancel, close: close, next: next}
	r.fill()
	if r.err != nil && r.err != io.EOF {
		r.Close()
		return nil, r.err
	}
	return r, nil
}

func (r *chunks) fill() {
	for len(r.rest) == 0 && r.err == nil {
		b, err := r.next()
		switch {
		case err == io.EOF:
			r.err = err
		case err != nil:
			r.err = fromWire(r.op, err)
		default:
			r.rest = b
		}
	}
}

func (r *chunks) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	r.fill()
	if len(r.rest) == 0 {
		return 0, r.err
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *chunks) Close() error {
	r.cancel()
	r.close()
	if r.err == nil {
		r.err = io.ErrClosedPipe
	}
	r.rest = nil
	return nil
}

// CommitOptions describe a commit.
type CommitOptions struct {
	Message string
	// Branch in the repository's mirror. Empty means warren/<name>.
	Branch string
	// Author is "Name <mail>". Empty means the server's default.
	Author string
	// All takes also files that git ignores.
	All bool
}

// Commit is what a commit made.
type Commit struct {
	ID           string `json:"commit"`
	Branch       string `json:"branch"`
	FilesChanged int    `json:"filesChanged"`
	// RepoPath is the mirror on the server's host, for callers on that host.
	RepoPath string `json:"repoPath,omitempty"`
}

// Commit records the changes of a workspace as a commit on a branch of the repository's mirror.
func (c *Client) Commit(ctx context.Context, id string, o CommitOptions) (*Commit, error) {
	res, err := c.workspaces.Commit(ctx, connect.NewRequest(&warrenv1.CommitRequest{Id: id, Message: o.Message, Branch: o.Branch, Author: o.Author, All: o.All}))
	if err != nil {
		return nil, fromWire("commit", err)
	}
	p := res.Msg
	return &Commit{ID: p.GetCommit(), Branch: p.GetBranch(), FilesChanged: int(p.GetFilesChanged()), RepoPath: p.GetRepoPath()}, nil
}

// PushOptions say what to push.
type PushOptions struct {
	// Branch to push. Empty means that of the last commit.
	Branch string
	// RemoteBranch is its name at the origin. Empty means the same.
	RemoteBranch string
	Force        bool
}

// Push is what a push did.
type Push struct {
	URL    string `json:"url"`
	Branch string `json:"branch"`
	Commit string `json:"commit"`
}

// Push sends a committed branch to the repository's origin.
func (c *Client) Push(ctx context.Context, id string, o PushOptions) (*Push, error) {
	res, err := c.workspaces.Push(ctx, connect.NewRequest(&warrenv1.PushRequest{Id: id, Branch: o.Branch, RemoteBranch: o.RemoteBranch, Force: o.Force}))
	if err != nil {
		return nil, fromWire("push", err)
	}
	return &Push{URL: res.Msg.GetUrl(), Branch: res.Msg.GetBranch(), Commit: res.Msg.GetCommit()}, nil
}

// Diff returns a patch of all changes in the workspace; see [Client.Diff].
func (w *Workspace) Diff(ctx context.Context, o DiffOptions) (io.ReadCloser, error) {
	return w.c.Diff(ctx, string(w.ID), o)
}

// Commit records the changes as a commit; see [Client.Commit].
func (w *Workspace) Commit(ctx context.Context, o CommitOptions) (*Commit, error) {
	return w.c.Commit(ctx, string(w.ID), o)
}

// Push sends a committed branch to the origin; see [Client.Push].
func (w *Workspace) Push(ctx context.Context, o PushOptions) (*Push, error) {
	return w.c.Push(ctx, string(w.ID), o)
}

// FormatPatch returns the commits as mails; see [Client.FormatPatch].
func (w *Workspace) FormatPatch(ctx context.Context) (io.ReadCloser, error) {
	return w.c.FormatPatch(ctx, string(w.ID))
}

// Diff returns a patch of all changes in the sandbox's workspace; see [Client.Diff].
func (s *Sandbox) Diff(ctx context.Context, o DiffOptions) (io.ReadCloser, error) {
	return s.c.Diff(ctx, string(s.ID), o)
}

// Commit records the changes in the sandbox's workspace as a commit; see [Client.Commit].
func (s *Sandbox) Commit(ctx context.Context, o CommitOptions) (*Commit, error) {
	return s.c.Commit(ctx, string(s.ID), o)
}

// Push sends a committed branch to the origin; see [Client.Push].
func (s *Sandbox) Push(ctx context.Context, o PushOptions) (*Push, error) {
	return s.c.Push(ctx, string(s.ID), o)
}

// FormatPatch returns the commits as mails; see [Client.FormatPatch].
func (s *Sandbox) FormatPatch(ctx context.Context) (io.ReadCloser, error) {
	return s.c.FormatPatch(ctx, string(s.ID))
}
