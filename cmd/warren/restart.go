package main

import (
	"context"

	"github.com/spf13/cobra"
)

func restartCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "restart ID...",
		Short: "Replace the execution of sandboxes on the same workspace",
		Long: `Replace the execution of sandboxes, running or failed: same id, image, workspace and settings. Processes and
changes outside /workspace and /home/user are gone.`,
		Example: `  warren restart fix`,
		Args:    atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.Ref(id).Restart(ctx)
			})
		},
	}
}
