package main

import (
	"context"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func repoCommand(a *app) *cobra.Command {
	return parent("repo", "Cached repositories: list, fetch, remove",
		`  warren repo fetch https://example.com/org/app
  warren repo ls`,
		repoListCommand(a), repoFetchCommand(a), repoRemoveCommand(a))
}

func repoListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List cached repositories",
		Example: `  warren repo ls
  warren repo ls --json | jq -r .path                the mirrors, for git on the server's host`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"ID", "URL", "BRANCH", "SIZE", "FETCHED"}, func(c *warren.Client) iter.Seq2[*warren.Repo, error] {
				return c.Repos(cmd.Context())
			}, func(r *warren.Repo) (string, []string) {
				return string(r.ID), []string{string(r.ID), r.URL, r.DefaultBranch, bytesOf(r.Size), ago(r.Fetched)}
			})
		},
	}
}

func repoFetchCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "fetch URL|PATH",
		Short: "Clone a repository into the cache, or bring it up to date",
		Example: `  warren repo fetch https://example.com/org/app
  warren repo fetch .`,
		Args: exactly("URL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			source, err := parseRepo(args[0], a.remote() == "")
			if err != nil {
				return err
			}
			if source.Ref != "" {
				return fmt.Errorf("%q: %w: the cache holds all of a repository; leave out @%s", args[0], warren.ErrInvalid, source.Ref)
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.FetchRepo(cmd.Context(), source.URL, a.showProgress)
			if err != nil {
				return err
			}
			a.progress.clear()
			if a.json {
				return a.printJSON(r)
			}
			_, err = fmt.Fprintln(a.out, r.ID)
			return err
		},
	}
}

func repoRemoveCommand(a *app) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm ID|URL... [flags]", Aliases: []string{"delete"}, Short: "Remove repositories that no workspace borrows from",
		Example: `  warren repo rm https://example.com/org/app`,
		Args:    atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.DeleteRepo(ctx, id, warren.DeleteOptions{AllowMissing: force})
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "no error for a repository that does not exist")
	return cmd
}
