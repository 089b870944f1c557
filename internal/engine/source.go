package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// removals lets what is being removed (repos, images) and what begins to use it see each other, without holding a lock
// over either. Guarded by Engine.mu.
type removals[K comparable] struct {
	busy map[K]chan struct{}
	done int // how many have ended
}

func (r *removals[K]) begin(k K) (end func()) {
	if r.busy == nil {
		r.busy = map[K]chan struct{}{}
	}
	ch := make(chan struct{})
	r.busy[k] = ch
	return func() {
		delete(r.busy, k)
		r.done++
		close(ch)
	}
}

// fetchSource brings a repository into the cache and finds what to cut. When it returns, the workspace's row names the
// repository, which keeps it from being deleted.
func (e *Engine) fetchSource(ctx context.Context, c Caller, w *workspace, r *RepoSource, tell func(Progress)) (WorkspaceSource, error) {
	for {
		e.mu.Lock()
		before := e.repos.done
		e.mu.Unlock()
		// What the cache has was perhaps fetched with the credentials of the host or of somebody else. Others than the
		// operator ask the origin each time, which shows that they may read it.
		repo, err := e.opts.Repos.Fetch(ctx, r.URL, FetchOptions{Ref: r.Ref, Force: r.Fetch || !c.Operator, HostCredentials: c.Operator, Progress: func(step, message string, done, total int64) {
			tell(Progress{Step: step, Message: message, Done: done, Total: total})
		}})
		if err != nil {
			return WorkspaceSource{}, err
		}
		resolve := e.opts.Repos.ResolveOrigin // not what others committed
		if c.Operator {
			resolve = e.opts.Repos.ResolveRef
		}
		commit, branch, err := resolve(ctx, repo.ID, r.Ref)
		e.mu.Lock()
		busy, changed := e.repos.busy[repo.ID], e.repos.done != before
		if busy == nil && !changed && err == nil {
			w.row.RepoID = repo.ID
		}
		e.mu.Unlock()
		switch {
		case busy != nil:
			select {
			case <-busy:
			case <-ctx.Done():
				return WorkspaceSource{}, ctx.Err()
			}
		case changed: // it may have been this one
		case err != nil:
			return WorkspaceSource{}, err
		default:
			src := WorkspaceSource{Repo: repo, URL: repo.URL, Ref: r.Ref, Commit: commit, Branch: branch}
			if r.Dirty {
				src.Dirty = strings.TrimPrefix(r.URL, "file://")
			}
			return src, nil
		}
	}
}

// FetchRepo brings a repository into the cache, or up to date.
func (e *Engine) FetchRepo(ctx context.Context, c Caller, url string, progress func(Progress)) (*Repo, error) {
	if err := checkRepo(c, &RepoSource{URL: url}); err != nil {
		return nil, err
	}
	repo, err := e.opts.Repos.Fetch(ctx, url, FetchOptions{Force: true, HostCredentials: c.Operator, Progress: func(step, message string, done, total int64) {
		if progress != nil {
			progress(Progress{Step: step, Message: message, Done: done, Total: total})
		}
	}})
	if err != nil {
		return nil, err
	}
	return repo, e.record(ctx, &store.Event{Time: e.clock.Now(), Owner: c.User, Actor: c.User, Action: "repo.fetch", Message: repo.URL})
}

// ListRepos returns the cached repositories: all to an operator, to others those that their workspaces were cut from.
func (e *Engine) ListRepos(ctx context.Context, c Caller) ([]*Repo, error) {
	all, err := e.opts.Repos.List(ctx)
	if err != nil || c.Operator {
		return all, err
	}
	mine := map[warren.RepoID]bool{}
	e.mu.Lock()
	for _, w := range e.spaces {
		if w.row.Owner == c.User {
			mine[w.row.RepoID] = true
		}
	}
	e.mu.Unlock()
	var out []*Repo
	for _, r := range all {
		if mine[r.ID] {
			out = append(out, r)
		}
	}
	return out, nil
}

// operatorOnly refuses what changes things that all users share.
func operatorOnly(c Caller, what string) error {
	if c.Operator {
		return nil
	}
	return fmt.Errorf("only the operator of this server may %s, which concerns all its users: %w", what, warren.ErrDenied)
}

// DeleteRepo removes a repository that no workspace borrows from.
func (e *Engine) DeleteRepo(ctx context.Context, c Caller, ref string, allowMissing bool) error {
	if err := operatorOnly(c, "delete repositories"); err != nil {
		return err
	}
	r, err := e.opts.Repos.Get(ctx, ref)
	if err != nil {
		if allowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	e.mu.Lock()
	if e.repos.busy[r.ID] != nil {
		e.mu.Unlock()
		return fmt.Errorf("repo %s is being deleted: %w", r.ID, warren.ErrState)
	}
	for _, w := range e.spaces {
		if w.row.RepoID == r.ID {
			e.mu.Unlock()
			return fmt.Errorf("repo %s is borrowed from by workspace %s; delete that first (`warren workspace rm %s`): %w", r.ID, w.row.ID, w.row.ID, warren.ErrState)
		}
	}
	end := e.repos.begin(r.ID)
	e.mu.Unlock()
	err = e.opts.Repos.Delete(ctx, r.ID)
	e.mu.Lock()
	end()
	if err == nil {
		e.madeRoom()
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	return e.record(ctx, &store.Event{Time: e.clock.Now(), Owner: c.User, Actor: c.User, Action: "repo.delete", Message: r.URL})
}

// useImage finds an image for a sandbox. When it returns, the sandbox's row names it, which keeps it from being deleted.
func (e *Engine) useImage(ctx context.Context, sb *sandbox, ref string) (*Image, error) {
	for {
		e.mu.Lock()
		before := e.images.done
		e.mu.Unlock()
		img, err := e.opts.Images.Resolve(ctx, ref)
		if err != nil {
			return nil, err
		}
		e.mu.Lock()
		busy, changed := e.images.busy[img.Digest], e.images.done != before
		if busy == nil && !changed {
			sb.row.Image, sb.row.ImageDigest = img.Name, img.Digest
		}
		e.mu.Unlock()
		switch {
		case busy != nil:
			select {
			case <-busy:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		case !changed:
			return img, nil
		}
	}
}

// pinnedImage finds the image with which a sandbox began. When that is no more (the host's programs were upgraded), it is
// the one that has its name now.
func (e *Engine) pinnedImage(ctx context.Context, row *store.Sandbox) (*Image, error) {
	img, err := e.opts.Images.Resolve(ctx, row.ImageDigest)
	if errors.Is(err, warren.ErrNotFound) {
		if img, err = e.opts.Images.Resolve(ctx, row.Image); err == nil {
			e.log.Info("image has changed since the sandbox began", "sandbox", row.ID, "was", row.ImageDigest, "is", img.Digest)
			row.ImageDigest = img.Digest
		}
	}
	return img, err
}

// PullImage fetches an image from a registry.
func (e *Engine) PullImage(ctx context.Context, c Caller, ref string, o PullOptions) (*Image, error) {
	if err := operatorOnly(c, "pull images"); err != nil {
		return nil, err
	}
	img, err := e.opts.Images.Pull(ctx, ref, o)
	return img, e.imageEvent(ctx, c, "image.pull", img, err)
}

// ImportImage takes a tar.
func (e *Engine) ImportImage(ctx context.Context, c Caller, name string, r io.Reader) (*Image, error) {
	if err := operatorOnly(c, "import images"); err != nil {
		return nil, err
	}
	img, err := e.opts.Images.Import(ctx, name, r)
	return img, e.imageEvent(ctx, c, "image.import", img, err)
}

// BootstrapImage builds an image from packages.
func (e *Engine) BootstrapImage(ctx context.Context, c Caller, o BootstrapOptions) (*Image, error) {
	if err := operatorOnly(c, "bootstrap images"); err != nil {
		return nil, err
	}
	img, err := e.opts.Images.Bootstrap(ctx, o)
	return img, e.imageEvent(ctx, c, "image.bootstrap", img, err)
}

func (e *Engine) imageEvent(ctx context.Context, c Caller, action string, img *Image, err error) error {
	if err != nil {
		return err
	}
	return e.record(ctx, &store.Event{Time: e.clock.Now(), Owner: c.User, Actor: c.User, Action: action, Message: img.Name, Fields: map[string]string{"digest": img.Digest}})
}

// ListImages returns all images.
func (e *Engine) ListImages(ctx context.Context, _ Caller) ([]*Image, error) {
	return e.opts.Images.List(ctx)
}

// GetImage returns an image.
func (e *Engine) GetImage(ctx context.Context, _ Caller, ref string) (*Image, error) {
	return e.opts.Images.Resolve(ctx, ref)
}

// DeleteImage removes a name, and the image when it was its last and no sandbox uses it.
func (e *Engine) DeleteImage(ctx context.Context, c Caller, ref string, allowMissing bool) error {
	if err := operatorOnly(c, "delete images"); err != nil {
		return err
	}
	img, err := e.opts.Images.Resolve(ctx, ref)
	if err != nil {
		if allowMissing && errors.Is(err, warren.ErrNotFound) {
			return nil
		}
		return err
	}
	if img.Kind == "host" {
		return fmt.Errorf("image %s is the host itself and cannot be deleted: %w", img.Name, warren.ErrInvalid)
	}
	all, err := e.opts.Images.List(ctx)
	if err != nil {
		return err
	}
	names := 0
	for _, other := range all {
		if other.Digest == img.Digest {
			names++
		}
	}
	e.mu.Lock()
	if e.images.busy[img.Digest] != nil {
		e.mu.Unlock()
		return fmt.Errorf("image %s is being deleted: %w", img.Name, warren.ErrState)
	}
	for _, sb := range e.boxes {
		if sb.row.ImageDigest == img.Digest && names <= 1 {
			label := sb.label()
			e.mu.Unlock()
			return fmt.Errorf("image %s is in use by sandbox %s; delete that first (`warren rm %s`): %w", img.Name, label, label, warren.ErrState)
		}
	}
	for _, p := range e.snaps {
		if p.row.ImageDigest == img.Digest && names <= 1 {
			label := p.label()
			e.mu.Unlock()
			return fmt.Errorf("image %s is in use by snapshot %s; delete that first (`warren snapshot rm %s`): %w", img.Name, label, label, warren.ErrState)
		}
	}
	end := e.images.begin(img.Digest)
	e.mu.Unlock()
	e.coolStandbys(img.Digest, "its image was being removed")
	e.coolPool(true, img.Digest)
	err = e.opts.Images.Delete(ctx, img.Name)
	e.mu.Lock()
	end()
	if err == nil {
		e.madeRoom()
	}
	e.mu.Unlock()
	return e.imageEvent(ctx, c, "image.delete", img, err)
}
