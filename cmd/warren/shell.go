package main

import (
	"github.com/spf13/cobra"
)

// loginShell takes the best shell that the image has.
const loginShell = `command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l`

func shellCommand(a *app) *cobra.Command {
	f := execFlags{}
	cmd := &cobra.Command{
		Use:   "shell ID [flags]",
		Short: "Open an interactive shell in a sandbox",
		Example: `  warren shell fix
  warren shell fix --user root --workdir /`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			f.interactive, f.tty = true, isTerminal(a.in)
			return a.execute(cmd.Context(), f.command(c.Ref(args[0]), []string{"sh", "-c", loginShell}, nil), f)
		},
	}
	cmd.Flags().StringVarP(&f.workdir, "workdir", "w", "", "directory to start in (default /workspace)")
	cmd.Flags().StringVarP(&f.user, "user", "u", "", `user to be: "user" (the default), "root" or another of the image`)
	return cmd
}
