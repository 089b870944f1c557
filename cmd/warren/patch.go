package main

import (
	"github.com/spf13/cobra"
)

func patchCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "patch ID",
		Aliases: []string{"format-patch"},
		Short:   "Print the commits of a workspace as mails, for git am",
		Example: `  warren commit fix -m "fix the parser"
  warren patch fix | git am`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			mails, err := c.FormatPatch(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.stream(mails, "patch")
		},
	}
}
