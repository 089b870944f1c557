package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func pushCommand(a *app) *cobra.Command {
	var opts warren.PushOptions
	cmd := &cobra.Command{
		Use:   "push ID [flags]",
		Short: "Send a committed branch to where the repository came from",
		Long: `Send the branch of the last commit to the repository's origin, from the host and with the host's credentials, which a
sandbox never sees.`,
		Example: `  warren commit fix -m "fix the parser" && warren push fix
  warren push fix --to feature/parser`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			done, err := c.Push(cmd.Context(), args[0], opts)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(done)
			}
			_, err = fmt.Fprintf(a.out, "%s to %s of %s\n", escape(done.Commit), escape(done.Branch), escape(done.URL))
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.Branch, "branch", "", "branch to push (default that of the last commit)")
	flags.StringVar(&opts.RemoteBranch, "to", "", "its name at the origin (default the same)")
	flags.BoolVar(&opts.Force, "force", false, "replace what is there")
	return cmd
}
