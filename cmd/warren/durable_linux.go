package main

import (
	"context"
	"fmt"
	"io"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/image"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// images, repos and workspaces say in the engine's words what the packages of the durable things do, so that neither knows the
// other.
type (
	images     struct{ s *image.Store }
	repos      struct{ c *repo.Cache }
	workspaces struct{ s *workspace.Store }
)

var (
	_ engine.Images     = images{}
	_ engine.HostPruner = images{}
	_ engine.Repos      = repos{}
	_ engine.Workspaces = workspaces{}
)

func imageOf(im *image.Image) *engine.Image {
	return &engine.Image{
		Name: im.Name, Digest: im.Digest, Kind: im.Kind, Size: im.Size, Created: im.Created, Root: im.Root,
		Config: engine.ImageConfig(im.Config),
	}
}

// imageResult passes an image or an error on.
func imageResult(im *image.Image, err error) (*engine.Image, error) {
	if err != nil {
		return nil, err
	}
	return imageOf(im), nil
}

func imageProgress(tell func(engine.Progress)) func(image.Progress) {
	if tell == nil {
		return nil
	}
	return func(p image.Progress) {
		tell(engine.Progress{Step: p.Step, Message: p.Message, Done: p.Done, Total: p.Total})
	}
}

func (i images) Resolve(ctx context.Context, ref string) (*engine.Image, error) {
	return imageResult(i.s.Resolve(ctx, ref))
}

func (i images) Pull(ctx context.Context, ref string, o engine.PullOptions) (*engine.Image, error) {
	return imageResult(i.s.Pull(ctx, ref, image.PullOptions{Name: o.Name, Platform: o.Platform, Insecure: o.Insecure, Progress: imageProgress(o.Progress)}))
}

func (i images) Import(ctx context.Context, name string, r io.Reader) (*engine.Image, error) {
	return imageResult(i.s.Import(ctx, name, r, image.ImportOptions{}))
}

func (i images) Bootstrap(ctx context.Context, o engine.BootstrapOptions) (*engine.Image, error) {
	return imageResult(i.s.Bootstrap(ctx, image.BootstrapOptions{
		Name: o.Name, Distribution: o.Distribution, Release: o.Release, Packages: o.Packages, Progress: imageProgress(o.Progress), Output: o.Output,
	}))
}

func (i images) List(ctx context.Context) ([]*engine.Image, error) {
	list, err := i.s.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]*engine.Image, len(list))
	for n, im := range list {
		out[n] = imageOf(im)
	}
	return out, nil
}

func (i images) Delete(ctx context.Context, name string) error { return i.s.Delete(ctx, name) }

func (i images) PruneHost(keep map[string]bool) error { return i.s.PruneHost(keep) }

func repoOf(r *repo.Repo) *engine.Repo {
	return &engine.Repo{ID: r.ID, URL: r.URL, Dir: r.Dir, DefaultBranch: r.DefaultBranch, Size: r.Size, Fetched: r.Fetched, Handle: r}
}

func (c repos) Fetch(ctx context.Context, url string, o engine.FetchOptions) (*engine.Repo, error) {
	r, err := c.c.Fetch(ctx, url, repo.FetchOptions{Ref: o.Ref, Force: o.Force, HostCredentials: o.HostCredentials, Progress: o.Progress})
	if err != nil {
		return nil, err
	}
	return repoOf(r), nil
}

func (c repos) ResolveRef(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error) {
	return c.c.ResolveRef(ctx, id, ref)
}

func (c repos) ResolveOrigin(ctx context.Context, id warren.RepoID, ref string) (commit, branch string, err error) {
	return c.c.ResolveOrigin(ctx, id, ref)
}

func (c repos) Get(ctx context.Context, idOrURL string) (*engine.Repo, error) {
	r, err := c.c.Get(ctx, idOrURL)
	if err != nil {
		return nil, err
	}
	return repoOf(r), nil
}

func (c repos) List(ctx context.Context) ([]*engine.Repo, error) {
	list, err := c.c.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]*engine.Repo, len(list))
	for n, r := range list {
		out[n] = repoOf(r)
	}
	return out, nil
}

func (c repos) Delete(ctx context.Context, id warren.RepoID) error {
	return c.c.Delete(ctx, string(id))
}

func dirsOf(w *workspace.Workspace) *engine.WorkspaceDirs {
	return &engine.WorkspaceDirs{
		URL: w.URL, Ref: w.Ref, Commit: w.Commit, Branch: w.Branch, RepoID: w.RepoID,
		Files: w.Files, Home: w.Home, Borrow: w.Borrow, Head: w.Head, HeadBranch: w.HeadBranch,
	}
}

func (w workspaces) Prepare(ctx context.Context, id warren.WorkspaceID, src engine.WorkspaceSource) (*engine.WorkspaceDirs, error) {
	from := workspace.Source{URL: src.URL, Ref: src.Ref, Commit: src.Commit, Branch: src.Branch, Dirty: src.Dirty}
	if src.Repo != nil {
		r, ok := src.Repo.Handle.(*repo.Repo)
		if !ok {
			return nil, fmt.Errorf("workspace %s: the repository %s came from elsewhere than the cache", id, src.Repo.ID)
		}
		from.Repo = r
	}
	made, err := w.s.Prepare(ctx, id, from)
	if err != nil {
		return nil, err
	}
	return dirsOf(made), nil
}

func (w workspaces) Populate(ctx context.Context, id warren.WorkspaceID) error {
	return w.s.Populate(ctx, id)
}

func (w workspaces) Get(ctx context.Context, id warren.WorkspaceID) (*engine.WorkspaceDirs, error) {
	ws, err := w.s.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	return dirsOf(ws), nil
}

func (w workspaces) Delete(ctx context.Context, id warren.WorkspaceID) error {
	return w.s.Delete(ctx, id)
}

func (w workspaces) Copy(ctx context.Context, from, to warren.WorkspaceID) (string, error) {
	return w.s.Copy(ctx, from, to)
}

func (w workspaces) BeginCopy(ctx context.Context, from, to warren.WorkspaceID, keep bool) (engine.WorkspaceCopy, error) {
	c, err := w.s.BeginCopy(ctx, from, to, keep)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (w workspaces) Sync(ctx context.Context, id warren.WorkspaceID) error { return w.s.Sync(ctx, id) }

func (w workspaces) ReplaceNeeds(ctx context.Context, from warren.WorkspaceID) (int64, error) {
	return w.s.ReplaceNeeds(ctx, from)
}

func (w workspaces) BeginReplace(ctx context.Context, id, from warren.WorkspaceID) (engine.WorkspaceReplacement, error) {
	r, err := w.s.BeginReplace(ctx, id, from)
	if err != nil {
		return nil, err // not a replacement that is nil
	}
	return r, nil
}

func (w workspaces) Replace(ctx context.Context, id, from warren.WorkspaceID) error {
	return w.s.Replace(ctx, id, from)
}

func (w workspaces) Adopt(ctx context.Context, from, to warren.WorkspaceID) error {
	return w.s.Adopt(ctx, from, to)
}

func (w workspaces) Usage(ctx context.Context, id warren.WorkspaceID) (total, shared int64, err error) {
	return w.s.Usage(ctx, id)
}

func (w workspaces) Size(ctx context.Context, id warren.WorkspaceID) (int64, error) {
	return w.s.Size(ctx, id)
}

func (w workspaces) Diff(ctx context.Context, id warren.WorkspaceID, o engine.DiffOptions, out io.Writer) error {
	return w.s.Diff(ctx, id, workspace.DiffOptions{All: o.All, Stat: o.Stat, SinceMark: o.SinceMark}, out)
}

func (w workspaces) Mark(ctx context.Context, id warren.WorkspaceID) error { return w.s.Mark(ctx, id) }

func (w workspaces) Commit(ctx context.Context, id warren.WorkspaceID, o engine.CommitOptions) (*engine.Commit, error) {
	c, err := w.s.Commit(ctx, id, workspace.CommitOptions{Name: o.Name, Message: o.Message, Branch: o.Branch, Author: o.Author, All: o.All})
	if err != nil {
		return nil, err
	}
	return &engine.Commit{ID: c.ID, Branch: c.Branch, Files: c.Files, RepoDir: c.RepoDir}, nil
}

func (w workspaces) Push(ctx context.Context, id warren.WorkspaceID, o engine.PushOptions) (*engine.PushResult, error) {
	p, err := w.s.Push(ctx, id, workspace.PushOptions{Branch: o.Branch, RemoteBranch: o.RemoteBranch, Force: o.Force, HostCredentials: o.HostCredentials})
	if err != nil {
		return nil, err
	}
	return &engine.PushResult{URL: p.URL, Branch: p.Branch, Commit: p.Commit}, nil
}

func (w workspaces) FormatPatch(ctx context.Context, id warren.WorkspaceID, out io.Writer) error {
	return w.s.FormatPatch(ctx, id, out)
}
