package main

import (
	"context"

	"github.com/spf13/cobra"
)

func pauseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "pause ID...",
		Short: "Keep sandboxes on disk instead of in memory",
		Long: `Write the memory of running sandboxes to disk and end their processes: they then take no processor and no
memory, only disk. Clients attached to them are cut off. The next command or copy resumes the sandbox, or warren resume does; after
warren update --auto-resume=false only the latter. A time to live goes on, but for one that pauses,
which begins anew with a resume; an idle timeout does not.`,
		Example: `  warren pause fix
  warren inspect fix                                 how much disk its memory takes
  warren resume fix                                  it goes on where it was`,
		Args: atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.Ref(id).Pause(ctx)
			})
		},
	}
}

func resumeCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "resume ID...",
		Short: "Let paused sandboxes go on where they were",
		Long: `Let paused sandboxes go on where they were: same memory, processes, open files and terminals. When the memory of one
cannot be brought back it says why and stays paused; warren restart then starts it anew on its workspace.`,
		Example: `  warren resume fix
  warren exec fix --attach 17                        back to a process, with the output that was missed`,
		Args: atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.Ref(id).Resume(ctx)
			})
		},
	}
}
