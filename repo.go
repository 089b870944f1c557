package warren

import (
	"context"
	"iter"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Repo is a git repository in the server's cache.
type Repo struct {
	ID RepoID `json:"id"`
	// URL without credentials.
	URL           string    `json:"url"`
	DefaultBranch string    `json:"defaultBranch,omitempty"`
	Size          int64     `json:"sizeBytes"`
	Fetched       time.Time `json:"fetched,omitzero"`
	// Path of the mirror on the server's host.
	Path string `json:"path,omitempty"`
}

// FetchRepo clones a repository into the cache, or brings it up to date. A progress that is not nil is told each step.
func (c *Client) FetchRepo(ctx context.Context, url string, progress func(Progress)) (*Repo, error) {
	var got *warrenv1.Repo
	err := c.again(ctx, func() error {
		stream, err := c.repos.FetchRepo(ctx, connect.NewRequest(&warrenv1.FetchRepoRequest{Url: url}))
		if err != nil {
			return fromWire("fetch repo", err)
		}
		defer stream.Close()
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().(type) {
			case *warrenv1.FetchRepoResponse_Progress:
				if progress != nil {
					progress(progressFrom(e.Progress))
				}
			case *warrenv1.FetchRepoResponse_Repo:
				got = e.Repo
			}
		}
		if got != nil {
			return nil
		}
		return streamEnd("fetch repo", stream.Err())
	})
	if err != nil {
		return nil, err
	}
	return repoFrom(got), nil
}

// Repos lists the repositories in the cache.
func (c *Client) Repos(ctx context.Context) iter.Seq2[*Repo, error] {
	return func(yield func(*Repo, error) bool) {
		res, err := c.repos.ListRepos(ctx, connect.NewRequest(&warrenv1.ListReposRequest{}))
		if err != nil {
			yield(nil, fromWire("list repos", err))
			return
		}
		for _, p := range res.Msg.GetRepos() {
			if !yield(repoFrom(p), nil) {
				return
			}
		}
	}
}

// DeleteRepo removes a repository, by id or URL, that no workspace borrows from.
func (c *Client) DeleteRepo(ctx context.Context, id string, o DeleteOptions) error {
	_, err := c.repos.DeleteRepo(ctx, connect.NewRequest(&warrenv1.DeleteRepoRequest{Id: id, AllowMissing: o.AllowMissing}))
	return fromWire("delete repo", err)
}
