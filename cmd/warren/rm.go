package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
)

func rmCommand(a *app) *cobra.Command {
	var force, workspace, all bool
	cmd := &cobra.Command{
		Use:     "rm ID... [flags]",
		Aliases: []string{"delete"},
		Short:   "Remove sandboxes with all that runs in them",
		Long: `Remove sandboxes with all that runs in them. A workspace that was made for the sandbox goes as well,
unless it was to be kept (--keep-workspace); one that was given by --workspace stays.`,
		Example: `  warren rm fix
  warren rm --force fix                              no error when it is gone already
  warren rm --workspace fix                          with its workspace, even one that was to be kept
  warren rm --all`,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case all && len(args) > 0:
				return &usageError{errors.New("give ids or --all, not both"), cmd.CommandPath()}
			case !all && len(args) == 0:
				return &usageError{errors.New("missing ID"), cmd.CommandPath()}
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			if all {
				for sb, err := range c.Sandboxes(cmd.Context(), warren.ListOptions{}) {
					if err != nil {
						return err
					}
					args = append(args, string(sb.ID))
				}
				force = true
			}
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.DeleteSandbox(ctx, id, warren.DeleteOptions{AllowMissing: force, DeleteWorkspace: workspace})
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "no error for a sandbox that does not exist")
	cmd.Flags().BoolVar(&workspace, "workspace", false, "also remove the workspace")
	cmd.Flags().BoolVar(&all, "all", false, "every sandbox of yours")
	return cmd
}

// each does something to each id, a few at a time, and prints the ids it was done to. It goes on after an error; all
// errors but the last are printed, the last is returned.
func (a *app) each(ctx context.Context, ids []string, do func(context.Context, string) error) error {
	errs := make([]error, len(ids))
	var group errgroup.Group
	group.SetLimit(8)
	for i, id := range ids {
		group.Go(func() error {
			errs[i] = do(ctx, id)
			return nil
		})
	}
	_ = group.Wait()
	var last error
	for i, id := range ids {
		switch {
		case errs[i] != nil:
			if last != nil {
				fmt.Fprintln(a.err, a.errorStyle("warren:"), describe(last))
			}
			last = errs[i]
		case a.json:
			if err := a.printJSON(map[string]string{"id": id}); err != nil {
				return err
			}
		case !a.quiet:
			fmt.Fprintln(a.out, escape(id))
		}
	}
	return last
}
