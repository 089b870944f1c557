package servertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
)

var errUnsupported = errors.ErrUnsupported

// space returns a workspace by its id, its name or its sandbox. The caller holds mu.
func (e *Engine) space(c engine.Caller, ref string) (*engine.Workspace, error) {
	for _, w := range e.spaces {
		sb := e.boxes[w.SandboxID]
		if (c.Operator || w.Owner == c.User) && (string(w.ID) == ref || w.Name != "" && w.Name == ref || sb != nil && (string(sb.ID) == ref || sb.Name == ref && ref != "")) {
			return w, nil
		}
	}
	return nil, missing("workspace", ref)
}

// CreateWorkspace implements server.Engine.
func (e *Engine) CreateWorkspace(ctx context.Context, c engine.Caller, r engine.CreateWorkspaceRequest, progress func(engine.Progress)) (*engine.Workspace, error) {
	progress(engine.Progress{Step: "cut workspace"})
	if err := e.fail("CreateWorkspace"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	w := &engine.Workspace{ID: warren.WorkspaceID(newID("w")), Name: r.Name, Owner: c.User, Created: time.Now(), Keep: true}
	e.spaces[w.ID] = w
	v := *w
	return &v, nil
}

// GetWorkspace implements server.Engine.
func (e *Engine) GetWorkspace(ctx context.Context, c engine.Caller, ref string, size bool) (*engine.Workspace, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w, err := e.space(c, ref)
	if err != nil {
		return nil, err
	}
	v := *w
	return &v, nil
}

// ListWorkspaces implements server.Engine.
func (e *Engine) ListWorkspaces(ctx context.Context, c engine.Caller, size bool, pageSize int, pageToken string) ([]*engine.Workspace, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []*engine.Workspace
	for _, w := range e.spaces {
		if c.Operator || w.Owner == c.User {
			v := *w
			list = append(list, &v)
		}
	}
	return list, "", nil
}

// DeleteWorkspace implements server.Engine.
func (e *Engine) DeleteWorkspace(ctx context.Context, c engine.Caller, ref string, allowMissing bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	w, err := e.space(c, ref)
	switch {
	case err != nil && allowMissing:
		return nil
	case err != nil:
		return err
	case e.boxes[w.SandboxID] != nil:
		return fmt.Errorf("workspace %s is in use by sandbox %s: %w", w.ID, w.SandboxID, warren.ErrState)
	}
	delete(e.spaces, w.ID)
	return nil
}

// CopyWorkspace implements server.Engine.
func (e *Engine) CopyWorkspace(ctx context.Context, c engine.Caller, ref, name string) (*engine.Workspace, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w, err := e.space(c, ref)
	if err != nil {
		return nil, "", err
	}
	v := *w
	v.ID, v.Name, v.SandboxID = warren.WorkspaceID(newID("w")), name, ""
	e.spaces[v.ID] = &v
	return &v, "copy", nil
}

// MarkWorkspace implements server.Engine.
func (e *Engine) MarkWorkspace(ctx context.Context, c engine.Caller, ref string) error {
	_, err := e.GetWorkspace(ctx, c, ref, false)
	if err == nil && e.Mark != nil {
		err = e.Mark(ctx)
	}
	return err
}

// Patch is what Diff and FormatPatch return.
var Patch = strings.Repeat("diff --git a/x b/x\n", 10_000)

// Diff implements server.Engine.
func (e *Engine) Diff(ctx context.Context, c engine.Caller, ref string, o engine.DiffOptions, w io.Writer) error {
	if _, err := e.GetWorkspace(ctx, c, ref, false); err != nil {
		return err
	}
	if _, err := io.WriteString(w, Patch); err != nil {
		return err
	}
	return e.fail("Diff")
}

// FormatPatch implements server.Engine.
func (e *Engine) FormatPatch(ctx context.Context, c engine.Caller, ref string, w io.Writer) error {
	return e.Diff(ctx, c, ref, engine.DiffOptions{}, w)
}

// Commit implements server.Engine.
func (e *Engine) Commit(ctx context.Context, c engine.Caller, r engine.CommitRequest) (*engine.Commit, error) {
	if _, err := e.GetWorkspace(ctx, c, r.ID, false); err != nil {
		return nil, err
	}
	if r.Message == "" {
		return nil, fmt.Errorf("a commit needs a message: %w", warren.ErrInvalid)
	}
	return &engine.Commit{ID: "c0ffee", Branch: "warren/x", Files: 1, RepoDir: "/data/repos/x"}, nil
}

// Push implements server.Engine.
func (e *Engine) Push(ctx context.Context, c engine.Caller, r engine.PushRequest) (*engine.PushResult, error) {
	if _, err := e.GetWorkspace(ctx, c, r.ID, false); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("nothing was committed: %w", warren.ErrState)
}

// FetchRepo implements server.Engine.
func (e *Engine) FetchRepo(ctx context.Context, c engine.Caller, url string, progress func(engine.Progress)) (*engine.Repo, error) {
	progress(engine.Progress{Step: "fetch repo", Total: 1})
	if !strings.Contains(url, "://") {
		return nil, fmt.Errorf("URL %q: %w", url, warren.ErrInvalid)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.repos[url] = &engine.Repo{ID: "r1", URL: url, Dir: "/data/repos/r1"}
	return e.repos[url], nil
}

// ListRepos implements server.Engine.
func (e *Engine) ListRepos(ctx context.Context, c engine.Caller) ([]*engine.Repo, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []*engine.Repo
	for _, r := range e.repos {
		list = append(list, r)
	}
	return list, nil
}

// DeleteRepo implements server.Engine.
func (e *Engine) DeleteRepo(ctx context.Context, c engine.Caller, ref string, allowMissing bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.repos[ref] == nil && !allowMissing {
		return missing("repo", ref)
	}
	delete(e.repos, ref)
	return nil
}

// PullImage implements server.Engine.
func (e *Engine) PullImage(ctx context.Context, c engine.Caller, ref string, o engine.PullOptions) (*engine.Image, error) {
	o.Progress(engine.Progress{Step: "pull", Done: 1, Total: 2})
	if strings.ContainsAny(ref, " \n") {
		return nil, fmt.Errorf("reference %q: %w", ref, warren.ErrInvalid)
	}
	return &engine.Image{Name: ref, Digest: "sha256:1", Kind: "oci"}, e.fail("PullImage")
}

// ImportImage implements server.Engine.
func (e *Engine) ImportImage(ctx context.Context, c engine.Caller, name string, r io.Reader) (*engine.Image, error) {
	if name == "" {
		return nil, fmt.Errorf("an image needs a name: %w", warren.ErrInvalid)
	}
	n, err := io.Copy(io.Discard, r)
	if err != nil {
		return nil, err
	}
	return &engine.Image{Name: name, Digest: "sha256:2", Kind: "tar", Size: n}, nil
}

// BootstrapImage implements server.Engine.
func (e *Engine) BootstrapImage(ctx context.Context, c engine.Caller, o engine.BootstrapOptions) (*engine.Image, error) {
	if o.Distribution != "debian" {
		return nil, fmt.Errorf("distribution %q: %w", o.Distribution, errUnsupported)
	}
	return &engine.Image{Name: o.Name, Kind: "bootstrap"}, nil
}

// ListImages implements server.Engine.
func (e *Engine) ListImages(ctx context.Context, c engine.Caller) ([]*engine.Image, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []*engine.Image
	for _, i := range e.images {
		list = append(list, i)
	}
	return list, nil
}

// GetImage implements server.Engine.
func (e *Engine) GetImage(ctx context.Context, c engine.Caller, name string) (*engine.Image, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := e.images[name]; i != nil {
		return i, nil
	}
	return nil, missing("image", name)
}

// DeleteImage implements server.Engine.
func (e *Engine) DeleteImage(ctx context.Context, c engine.Caller, name string, allowMissing bool) error {
	if !c.Operator {
		return fmt.Errorf("images are the operator's: %w", warren.ErrDenied)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.images[name] == nil && !allowMissing {
		return missing("image", name)
	}
	delete(e.images, name)
	return nil
}
