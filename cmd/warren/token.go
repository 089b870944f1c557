package main

import (
	"context"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func tokenCommand(a *app) *cobra.Command {
	return parent("token", "Bearer tokens for callers over TCP: create, list, remove",
		`  warren token create --user ci --description "nightly job" --ttl 720h
  WARREN_URL=https://host:7420 WARREN_TOKEN=… warren ls`,
		tokenCreateCommand(a), tokenListCommand(a), tokenRemoveCommand(a))
}

func tokenCreateCommand(a *app) *cobra.Command {
	var spec warren.TokenSpec
	cmd := &cobra.Command{
		Use: "create --user USER [flags]", Short: "Issue a token and print it once",
		Long: "Issue a token and print its value, which cannot be had again: the server keeps only a hash.",
		Example: `  warren token create --user ci
  export WARREN_TOKEN=$(warren token create --user ci --ttl 24h)`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			id, value, err := c.CreateToken(cmd.Context(), spec)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"id": id, "token": value})
			}
			_, err = fmt.Fprintln(a.out, value)
			return err
		},
	}
	cmd.Flags().StringVar(&spec.User, "user", "", "owner that the token acts as")
	cmd.Flags().StringVar(&spec.Description, "description", "", "what it is for")
	cmd.Flags().DurationVar(&spec.TTL, "ttl", 0, "how long it is valid, such as 24h (default for ever)")
	return cmd
}

func tokenListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List tokens, without their values",
		Example: `  warren token ls`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"ID", "USER", "DESCRIPTION", "AGE", "EXPIRES", "LAST USED"}, func(c *warren.Client) iter.Seq2[*warren.Token, error] {
				return c.Tokens(cmd.Context())
			}, func(t *warren.Token) (string, []string) {
				return t.ID, []string{t.ID, t.User, t.Description, ago(t.Created), rfc3339(t.Expires), ago(t.LastUsed)}
			})
		},
	}
}

func tokenRemoveCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "rm ID...", Aliases: []string{"delete", "revoke"}, Short: "Revoke tokens; streams that they opened are cut",
		Example: `  warren token rm 7c1e`,
		Args:    atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error { return c.DeleteToken(ctx, id) })
		},
	}
}
