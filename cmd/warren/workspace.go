package main

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func workspaceCommand(a *app) *cobra.Command {
	return parent("workspace", "Durable files: list, inspect, create, copy, remove",
		`  warren workspace ls --size
  warren workspace create --repo . --name base
  warren workspace copy base attempt-2
  warren run --workspace attempt-2 -- make test`,
		workspaceListCommand(a), workspaceInspectCommand(a), workspaceCreateCommand(a), workspaceCopyCommand(a), workspaceMarkCommand(a), workspaceRemoveCommand(a))
}

func workspaceListCommand(a *app) *cobra.Command {
	var opts warren.WorkspaceListOptions
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List workspaces",
		Example: `  warren workspace ls
  warren workspace ls --size`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"ID", "NAME", "REPOSITORY", "REF", "BASE", "BRANCH", "SANDBOX", "SIZE", "AGE"}, func(c *warren.Client) iter.Seq2[*warren.Workspace, error] {
				return c.Workspaces(cmd.Context(), opts)
			}, func(w *warren.Workspace) (string, []string) {
				return string(w.ID), []string{
					short(string(w.ID)), w.Name, w.RepoURL, w.Ref, short(w.BaseCommit), w.Branch, short(string(w.Sandbox)), bytesOf(w.Size), ago(w.Created),
				}
			})
		},
	}
	cmd.Flags().BoolVar(&opts.Size, "size", false, "measure each, which walks through its files")
	return cmd
}

func workspaceMarkCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "mark ID", Short: "Remember the files as they are, for a diff since then",
		Long: `Remember the files of a workspace as they are: warren diff --since-mark compares with them. The next mark takes the place of the
one before. Ignored files are left out, and what was ignored then says what is ignored in the diff, whatever .gitignore files say later.
Files of more than 128 MiB, and the largest when there is more than 1 GiB to read, count as changed when their size, times or inode
differ. A rollback leaves the mark as it is; a copy or fork has none. ID is that of a workspace or of a sandbox.`,
		Example: `  warren workspace mark fix
  warren diff fix --since-mark --stat`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return c.MarkWorkspace(cmd.Context(), args[0])
		},
	}
}

func workspaceInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Show all about a workspace",
		Long:    "Show all about a workspace, by its id or name or by those of the sandbox that has it.",
		Example: `  warren workspace inspect fix`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			w, err := c.Workspace(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(w)
			}
			return a.fields(
				"ID", string(w.ID), "Name", w.Name, "Repository", w.RepoURL, "Ref", w.Ref, "Base", w.BaseCommit,
				"Branch", w.Branch, "Head", w.Head, "Sandbox", string(w.Sandbox), "Size", bytesOf(w.Size), "Owner", w.Owner, "Created", rfc3339(w.Created),
			)
		},
	}
}

func (a *app) printWorkspace(w *warren.Workspace) error {
	a.progress.clear()
	if a.json {
		return a.printJSON(w)
	}
	_, err := fmt.Fprintln(a.out, w.ID)
	return err
}

func workspaceCreateCommand(a *app) *cobra.Command {
	var name, repo string
	var dirty, fetch bool
	cmd := &cobra.Command{
		Use: "create [flags]", Short: "Make a workspace that no sandbox uses yet",
		Example: `  warren workspace create --name base --repo https://example.com/org/app@main
  warren workspace create --repo . --dirty`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			spec := warren.WorkspaceSpec{Name: name, Progress: a.showProgress}
			switch {
			case repo != "":
				source, err := parseRepo(repo, a.remote() == "")
				if err != nil {
					return err
				}
				source.Dirty, source.Fetch = dirty, fetch
				spec.Repo = source
			case dirty || fetch:
				return &usageError{errors.New("--dirty and --fetch need --repo"), cmd.CommandPath()}
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			w, err := c.CreateWorkspace(cmd.Context(), spec)
			if err != nil {
				return err
			}
			return a.printWorkspace(w)
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name, unique among yours")
	cmd.Flags().StringVar(&repo, "repo", "", "cut it from this repository: URL or PATH, with @REF for a branch, tag or commit")
	cmd.Flags().BoolVar(&dirty, "dirty", false, "take uncommitted changes of --repo PATH along")
	cmd.Flags().BoolVar(&fetch, "fetch", false, "ask the origin for news, even when the ref is in the cache")
	return cmd
}

func workspaceCopyCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "copy ID [NAME]", Aliases: []string{"cp"}, Short: "Make an independent copy of a workspace",
		Example: `  warren workspace copy base attempt-2`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				return nil
			}
			return exactly("ID", "NAME")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 2 {
				name = args[1]
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			w, method, err := c.CopyWorkspace(cmd.Context(), args[0], name)
			if err != nil {
				return err
			}
			a.notice("copied by %s", escape(method))
			return a.printWorkspace(w)
		},
	}
}

func workspaceRemoveCommand(a *app) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm ID... [flags]", Aliases: []string{"delete"}, Short: "Remove workspaces that no sandbox uses, with all their files",
		Example: `  warren workspace rm attempt-2`,
		Args:    atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.DeleteWorkspace(ctx, id, warren.DeleteOptions{AllowMissing: force})
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "no error for a workspace that does not exist")
	return cmd
}
