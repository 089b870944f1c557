package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func completionCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print a script that completes commands in a shell",
		Example: `  warren completion bash > /etc/bash_completion.d/warren
  warren completion zsh > "${fpath[1]}/_warren"
  warren completion fish > ~/.config/fish/completions/warren.fish`,
		ValidArgs: []string{"bash", "zsh", "fish"},
		Args:      exactly("bash, zsh or fish"),
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.out, true)
			case "zsh":
				return root.GenZshCompletion(a.out)
			case "fish":
				return root.GenFishCompletion(a.out, true)
			}
			return fmt.Errorf("shell %q: %w: want bash, zsh or fish", args[0], warren.ErrInvalid)
		},
	}
	return cmd
}
