package main

import (
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warren-sandbox/warren"
)

func secretCommand(a *app) *cobra.Command {
	return parent("secret", "Values that sandboxes use without having them: set, list, remove",
		`  warren secret set github-token --file token.txt
  warren secret ls
  warren create --policy team`,
		secretSetCommand(a), secretListCommand(a), secretRemoveCommand(a))
}

// maxSecretInput is far above what a secret may have.
const maxSecretInput = 1 << 20

func secretSetCommand(a *app) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use: "set NAME", Short: "Seal a value; it counts from the next request on",
		Long: `Store a value, which is sealed and never shown again, in place of one of that name. It is read from the standard input or from a file, and
from a terminal without being shown; it is no argument, for those are seen by others. One line break at its end is taken off.

A policy grants it (see docs/POLICY.md): the sandbox gets a placeholder, and the gateway puts the value into the requests that the
grant names.`,
		Example: `  warren secret set github-token
  gh auth token | warren secret set github-token
  warren secret set npm-token --file ~/npm-token`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := readSecret(a, args[0], file)
			if err != nil {
				return err
			}
			defer clear(value)
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			s, err := c.SetSecret(cmd.Context(), args[0], value)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(s)
			case a.quiet:
				return nil
			}
			_, err = fmt.Fprintf(a.out, "%s version %d\n", s.Name, s.Version)
			return err
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "file to read the value from (the standard input)")
	return cmd
}

func readSecret(a *app, name, file string) ([]byte, error) {
	in := a.in
	if file != "" && file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	if f, ok := in.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		fmt.Fprintf(a.err, "value of %s: ", escapeLine(name))
		value, err := term.ReadPassword(int(f.Fd()))
		fmt.Fprintln(a.err)
		return value, err
	}
	value, err := io.ReadAll(io.LimitReader(in, maxSecretInput+1))
	if err != nil {
		return nil, err
	}
	if len(value) > maxSecretInput {
		return nil, fmt.Errorf("secret %s: the input has more than 1 MiB: %w", escapeLine(name), warren.ErrInvalid)
	}
	// echo and editors end a file so; what else is wrong with it, the server says.
	return []byte(strings.TrimSuffix(strings.TrimSuffix(string(value), "\n"), "\r")), nil
}

func secretListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List secrets, without their values, and the policies that grant them",
		Example: `  warren secret ls`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"NAME", "VERSION", "AGE", "UPDATED", "POLICIES"}, func(c *warren.Client) iter.Seq2[*warren.Secret, error] {
				return each(c.Secrets(cmd.Context()))
			}, func(s *warren.Secret) (string, []string) {
				return s.Name, []string{s.Name, fmt.Sprint(s.Version), ago(s.Created), ago(s.Updated), strings.Join(s.Policies, " ")}
			})
		},
	}
}

func secretRemoveCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"delete"}, Short: "Remove secrets; requests that need them fail from then on",
		Example: `  warren secret rm github-token`,
		Args:    atLeastOne("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, name string) error { return c.DeleteSecret(ctx, name) })
		},
	}
}
