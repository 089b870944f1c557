package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func commitCommand(a *app) *cobra.Command {
	var opts warren.CommitOptions
	cmd := &cobra.Command{
		Use:   "commit ID -m MESSAGE [flags]",
		Short: "Record what changed in a workspace as a commit",
		Long: `Record what changed in a workspace as a commit on a branch of the repository in Warren's cache. No hook, filter or
setting of the workspace takes part. Your own git sees the branch by the path that is printed. A file of more than 1 GiB is refused.`,
		Example: `  warren commit fix -m "parser: accept empty input"
  warren commit fix -m "try it" --branch experiments/parser --author "Ada <ada@example.com>"
  git fetch "$(warren commit fix -m done --json | jq -r .repoPath)" warren/fix`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			made, err := c.Commit(cmd.Context(), args[0], opts)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(made)
			}
			plural := "s"
			if made.FilesChanged == 1 {
				plural = ""
			}
			fmt.Fprintf(a.out, "%s on %s, %d file%s changed\n", escape(made.ID), escape(made.Branch), made.FilesChanged, plural)
			if made.RepoPath != "" {
				a.notice("fetch it: git fetch %s %s", escape(made.RepoPath), escape(made.Branch))
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&opts.Message, "message", "m", "", "message of the commit")
	flags.StringVar(&opts.Branch, "branch", "", "branch (default warren/NAME)")
	flags.StringVar(&opts.Author, "author", "", `author, as "Name <mail>"`)
	flags.BoolVar(&opts.All, "all", false, "also files that git ignores")
	return cmd
}
