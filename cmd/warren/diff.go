package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func diffCommand(a *app) *cobra.Command {
	var opts warren.DiffOptions
	cmd := &cobra.Command{
		Use:   "diff ID [flags]",
		Short: "Print what changed in a workspace, as a patch",
		Long: `Print what changed in a workspace since it was cut from its repository, as a patch in git's format,
binary files included. A file of more than 128 MiB is only named, in a line before the patch. ID is that of a sandbox or of a workspace;
the sandbox need not run. With --stat a file of more than 16 MiB is a binary one, whose lines nobody counts.`,
		Example: `  warren diff fix
  warren diff fix --stat
  warren diff fix --all                              also files that git ignores
  warren diff fix | git apply                        take it into a checkout of yours
  warren workspace mark fix
  warren diff fix --since-mark                       what changed since then`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			patch, err := c.Diff(cmd.Context(), args[0], opts)
			if err != nil {
				return err
			}
			return a.stream(patch, "patch")
		},
	}
	cmd.Flags().BoolVar(&opts.All, "all", false, "also files that git ignores")
	cmd.Flags().BoolVar(&opts.Stat, "stat", false, "a summary of changed files instead of the patch")
	cmd.Flags().BoolVar(&opts.SinceMark, "since-mark", false, "what changed since warren workspace mark, not since the workspace was cut")
	return cmd
}

// stream prints what a reader holds, as one JSON string under key if JSON is wanted, and closes it.
func (a *app) stream(r io.ReadCloser, key string) error {
	defer r.Close()
	if a.json {
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		return a.printJSON(map[string]string{key: string(data)})
	}
	_, err := io.Copy(fileOutput(a.out), r)
	return err
}
