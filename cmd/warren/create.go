package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func createCommand(a *app) *cobra.Command {
	var spec specFlags
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Make a sandbox and print its id",
		Long:  "Make a sandbox that stays until it is removed or a limit of time is over, and print its id.",
		Example: `  warren create                                      the host's own tools, an empty workspace
  warren create --name fix --repo https://example.com/org/app@main
  warren create --repo . --dirty                     a copy of this repository, uncommitted changes included
  warren create --image debian:12 --cpu 1 --memory 512MiB --ttl 2h
  warren create --template app                       see warren template build
  warren create --name db --network shop             others in it reach it as db.shop.internal
  id=$(warren create) && warren exec $id -- make test; warren rm $id`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := exactly()(cmd, args); err != nil {
				return fmt.Errorf("%w; --image takes an image, --template a template, --name a name, and warren run a command", err)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			wish, err := spec.spec(a)
			if err != nil {
				return err
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			sb, err := c.Create(cmd.Context(), wish)
			if err != nil {
				return err
			}
			a.progress.clear()
			if a.json {
				return a.printJSON(sb)
			}
			_, err = fmt.Fprintln(a.out, sb.ID)
			return err
		},
	}
	spec.register(cmd)
	return cmd
}
